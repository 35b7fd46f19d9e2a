"""Passes: what they keep, by running traces before and after them in NumPy, and what they make of known patterns."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pase.importers.ir import ops
from pase.importers.ir.trace import Trace, live_parameters, product_flop
from pase.importers.passes import PASSES, run_passes
from tests.importers.traces import Array, Tracer, evaluate, read, values_of

EXACT = ("drop no-ops", "drop constants and indices", "see through views", "split merged dims")
"""Passes after which the values of a trace are what they were; the others name what steps are together."""


def _kinds(trace: Trace) -> Counter[str]:
    return Counter(type(node.op).__name__ for node in trace.nodes)


def _after(trace: Trace, name: str) -> Trace:
    return run_passes(trace)[list(PASSES).index(name) + 1]


def _final(t: Tracer, *outputs: str) -> Trace:
    return run_passes(t.trace(*outputs))[-1]


# -- values stay what they are


def _randomly(draw: st.DrawFn, t: Tracer, values: list[str]) -> str | None:
    """Add a random operator on some values so far; None where it does not fit them."""
    x = draw(st.sampled_from(values[-4:]))
    shape = t.shapes[x]
    rank = len(shape)
    kind = draw(st.integers(0, 10))
    dim = draw(st.integers(0, rank - 1)) if rank else 0
    match kind:
        case 0:
            return t.transpose(x, *draw(st.permutations(range(rank))))
        case 1 if rank > 1:
            dim = min(dim, rank - 2)
            return t.reshape(x, *shape[:dim], shape[dim] * shape[dim + 1], *shape[dim + 2 :])
        case 2 if rank < 5 and shape[dim : dim + 1] in ((4,), (6,), (8,), (12,)):
            return t.reshape(x, *shape[:dim], 2, shape[dim] // 2, *shape[dim + 1 :])
        case 3 if rank and shape[dim] > 1:
            size = draw(st.integers(1, shape[dim] - 1))
            return t.slice(x, dim, draw(st.integers(0, shape[dim] - size)), size)
        case 4:
            other = next((v for v in values if v != x and t.shapes[v] == shape), x)
            return t.point(draw(st.sampled_from(["add", "multiply"])), x, other)
        case 5:
            return t.point(draw(st.sampled_from(["tanh", "relu", "sigmoid"])), x)
        case 6 if rank:
            w = t.weight(f"w{len(t.leaves)}", *shape[-1:])
            return t.point(draw(st.sampled_from(["add", "multiply"])), x, w)
        case 7 if rank > 1:
            w = t.weight(f"w{len(t.leaves)}", shape[-1], draw(st.sampled_from([1, 4, 6])))
            return t.linear(x, w)
        case 8 if rank > 1:
            return t.reduce(draw(st.sampled_from(["sum", "mean", "max"])), x, dim, keeps=draw(st.booleans()))
        case 9 if rank:
            return t.concat(dim, x, x)
        case 10 if rank:
            return t.add(ops.Identity(), x, shape=shape)
        case _:
            return None


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    t = Tracer()
    t.leaf("x", draw(st.sampled_from([(2, 4), (4, 6), (2, 3, 4), (2, 6, 4)])))
    values = ["x", t.leaf("mask", t.shapes["x"], "constant")]
    for _ in range(draw(st.integers(2, 12))):
        made = _randomly(draw, t, values)
        if made is not None and np.prod(t.shapes[made]) <= 2000:
            values.append(made)
    outputs = draw(st.lists(st.sampled_from(values[-3:]), min_size=1, max_size=2, unique=True))
    return t.trace(*outputs)


@given(traces())
@settings(max_examples=100)
def test_passes_that_keep_values_keep_them(trace: Trace) -> None:
    given_ = values_of(trace)
    before = evaluate(trace, given_)
    stages = dict(zip(("source", *PASSES), run_passes(trace), strict=True))
    for name in EXACT:
        after = stages[name]
        # A weight that is read in place of what is computed of it has other values.
        if any(use.seen_as is not None or use.of for node in after.nodes for use in node.inputs):
            return
        # Constants are leaves now, whose values are those that the source computes for them.
        held = evaluate(after, before | given_)
        for node in after.nodes:
            made, source = held[node.outputs[0].name], before[node.outputs[0].name]
            assert np.allclose(made.reshape(source.shape), source), f"{node.name} after {name!r}"


@given(traces())
@settings(max_examples=150)
def test_nodes_carry_what_they_compute(trace: Trace) -> None:
    """Of what its node reads alone, each computes the source's values again, whatever was put together."""
    given_ = values_of(trace)
    before = evaluate(trace, given_)
    final = run_passes(trace)[-1]
    every = [inner for node in final.nodes for inner in node.elementary]
    if any(use.seen_as is not None or use.of for inner in every for use in inner.inputs):
        return
    lies = {(n.outputs[0].name, n.inputs[0].value): n.inputs[0] for n in every if isinstance(n.op, ops.Identity)}
    leaves = {leaf.value.name: before[leaf.value.name] for leaf in final.leaves}
    held: dict[str, Array] = {}
    for node in final.nodes:
        inner = node.elementary
        made = {value.name for own in inner for value in own.outputs}
        reads = {use.value for own in inner for use in own.inputs} - made
        assert reads <= {*leaves, *(use.value for use in node.inputs)}, f"{node.name} computes with more than it reads"
        found = evaluate(replace(final, nodes=inner), leaves | held)
        last, own = inner[-1].outputs[0].name, node.outputs[0]
        for name in made & before.keys():
            assert np.allclose(found[name].reshape(before[name].shape), before[name]), f"{name} of {node.name}"
        held[own.name] = found[last].reshape(own.shape) if last == own.name else np.zeros(own.shape)
        if (last, own.name) in lies:
            places = np.arange(held[own.name].size).reshape(own.shape)
            held[own.name].put(read(lies[last, own.name], {own.name: places}), found[last])


@given(traces())
@settings(max_examples=80)
def test_no_pass_loses_products_or_weights(trace: Trace) -> None:
    stages = run_passes(trace)[2:]
    for (name, before), (_, after) in pairwise(zip(list(PASSES)[1:], stages, strict=True)):
        assert product_flop(after) == product_flop(before), name
        assert live_parameters(after) == live_parameters(before), name


# -- no-ops, constants, indices, choices


def test_what_changes_nothing_goes_and_a_flip_stays() -> None:
    t = Tracer()
    y = t.add(ops.Identity(), t.point("relu", t.leaf("x", (2, 3))), shape=(2, 3))
    y = t.reshape(t.transpose(y, 0, 1), 2, 3)
    flipped = t.add(ops.Slice(starts=(0, 2), steps=(1, -1)), y, shape=(2, 3))
    found = _after(t.trace(t.point("tanh", flipped)), "drop no-ops")
    assert _kinds(found) == {"Pointwise": 2, "Slice": 1}


def test_masks_and_positions_vanish() -> None:
    t = Tracer()
    x = t.leaf("x", (2, 4))
    ones = t.leaf("ones", (4,), "constant")
    tokens = t.leaf("tokens", (2, 4), dtype="int64")
    floats = t.add(ops.Pointwise(functions=("cast",)), tokens, shape=(2, 4))
    y = t.point("add", t.point("multiply", x, t.point("negate", ones)), t.point("negate", floats))
    found = _after(t.trace(y), "drop constants and indices")
    assert [node.op for node in found.nodes] == [ops.Pointwise(functions=(name,)) for name in ("multiply", "add")]
    assert found.leaf[found.nodes[1].inputs[1].value].role == "constant"


def test_rows_looked_up_by_tokens_stay() -> None:
    t = Tracer()
    tokens, table = t.leaf("tokens", (2, 4), dtype="int64"), t.weight("table", 10, 6)
    y = t.point("tanh", t.add(ops.Lookup(), table, tokens, shape=(2, 4, 6)))
    assert _kinds(_after(t.trace(y), "drop constants and indices")) == {"Lookup": 1, "Pointwise": 1}


def test_a_product_of_two_weights_is_work() -> None:
    """A matrix made of two factors is computed in every step, by the framework's counter too."""
    t = Tracer()
    x, a, b = t.leaf("x", (8, 4)), t.weight("a", 4, 2), t.weight("b", 2, 6)
    found = _final(t, t.linear(x, t.linear(a, b)))
    assert product_flop(found) == 2 * 4 * 2 * 6 + 2 * 8 * 4 * 6
    assert len(found.nodes) == 2


def test_whole_numbers_chosen_by_activations_keep_what_chose_them() -> None:
    """Rows of a codebook that are nearest to what a network computes: the distances are part of it."""
    t = Tracer()
    x, codes = t.leaf("x", (8, 4)), t.weight("codes", 16, 4)
    scores = t.einsum("ak,nk->an", x, codes)
    nearest = t.add(ops.Reduce(function="argmax", over=(1,)), scores, shape=(8,), dtype="int64")
    moved = t.add(ops.Pointwise(functions=("add",), constant=0.0), nearest, shape=(8,), dtype="int64")
    trace = t.trace(t.add(ops.Lookup(), codes, moved, shape=(8, 4)))
    found = _after(trace, "drop constants and indices")
    assert _kinds(found) == {"Contract": 1, "Reduce": 1, "Lookup": 1}
    assert product_flop(found) == 2 * 8 * 16 * 4
    assert live_parameters(run_passes(trace)[-1]) == 64


def test_tensors_without_elements_vanish() -> None:
    t = Tracer()
    x, none = t.leaf("x", (2, 4)), t.leaf("none", (2, 0))
    empty = t.point("negate", none)
    found = _final(t, t.point("tanh", t.concat(1, empty, t.point("relu", x))))
    assert sum(isinstance(node.op, ops.Pointwise) for node in found.nodes) >= 1
    assert all(leaf.role == "constant" for leaf in found.leaves if leaf.value.name == empty)


# -- regions


def _layer_norm(t: Tracer, x: str, *over: int) -> str:
    middle = t.point("subtract", x, t.reduce("mean", x, *over))
    square = t.reduce("mean", t.point("multiply", middle, middle), *over)
    return t.point("multiply", middle, t.point("rsqrt", square))


def _scaled(t: Tracer, x: str, *shape: int, name: str = "scale") -> str:
    return t.point("multiply", x, t.weight(name, *shape))


def _softmax(t: Tracer, x: str) -> str:
    powers = t.point("exp", t.point("subtract", x, t.reduce("max", x, 2)))
    return t.point("divide", powers, t.reduce("sum", powers, 2))


def _group_norm(t: Tracer, x: str) -> str:
    return t.reshape(_layer_norm(t, t.reshape(x, 2, 3, 2, 4, 4), 2, 3, 4), 2, 6, 4, 4)


def turned(t: Tracer, x: str, *by: str) -> str:
    """A rotary embedding; by: its cosines and sines."""
    dim, half = len(t.shapes[x]) - 1, t.shapes[x][-1] // 2
    halves = t.concat(dim, t.point("negate", t.slice(x, dim, half, half)), t.slice(x, dim, 0, half))
    return t.point("add", t.point("multiply", x, by[0]), t.point("multiply", halves, by[-1]))


@pytest.mark.parametrize(
    ("shape", "made", "op"),
    [
        (
            (2, 3, 8),
            lambda t, x: t.point("add", _scaled(t, _layer_norm(t, x, 2), 8), t.weight("shift", 8)),
            ops.Normalise(kind="layer", over=(2,), channels=(2,)),
        ),
        (
            (2, 3, 4, 3),
            lambda t, x: _scaled(t, _layer_norm(t, x, 2, 3), 3, 1, 1),
            ops.Normalise(kind="layer", over=(2, 3), channels=(1,), has_shift=False),
        ),
        (
            (2, 6, 4, 4),
            lambda t, x: _scaled(t, _group_norm(t, x), 6, 1, 1),
            ops.Normalise(kind="group", over=(1, 2, 3), channels=(1,), groups=3, has_shift=False),
        ),
        ((2, 3, 8), _softmax, ops.Softmax(dim=2)),
    ],
)
def test_what_is_spelled_out_is_one_operator(
    shape: tuple[int, ...], made: Callable[[Tracer, str], str], op: ops.Op
) -> None:
    t = Tracer()
    (node,) = _after(t.trace(made(t, t.leaf("x", shape))), "collapse regions").nodes
    assert node.op == op
    assert [use.value for use in node.inputs] == [leaf.value.name for leaf in t.leaves]


def test_two_norms_in_a_row_are_two_operators() -> None:
    t = Tracer()
    y = _scaled(t, _layer_norm(t, t.leaf("x", (2, 8)), 1), 8, name="a")
    found = _after(t.trace(_scaled(t, _layer_norm(t, y, 1), 8, name="b")), "collapse regions")
    assert [node.op.kind for node in found.nodes if isinstance(node.op, ops.Normalise)] == ["layer", "layer"]
    assert [[use.value for use in node.inputs][1:] for node in found.nodes] == [["a"], ["b"]]


def test_a_rotary_embedding_reads_across_its_dim() -> None:
    t = Tracer()
    x, cos, sin = t.leaf("x", (2, 3, 8)), t.leaf("cos", (3, 8), "constant"), t.leaf("sin", (3, 8), "constant")
    (node,) = _after(t.trace(turned(t, x, cos, sin)), "collapse regions").nodes
    assert isinstance(node.op, ops.Pointwise)
    assert (node.op.functions, node.op.mixes) == (("rotary",), (2,))


def test_a_tensor_and_its_transpose_are_not_read_point_by_point() -> None:
    t = Tracer()
    x = t.leaf("x", (4, 4))
    found = _final(t, t.point("tanh", t.point("add", x, t.transpose(x, 1, 0))))
    assert all(isinstance(node.op, ops.Pointwise) for node in found.nodes)
    # Both reads are still there: as it is, and transposed.
    assert len({(use.value, use.view) for node in found.nodes for use in node.inputs if use.value == "x"}) == 2


@st.composite
def regions(draw: st.DrawFn) -> Trace:
    """Steps that a region may consist of, on one tensor."""
    t = Tracer()
    x = t.leaf("x", draw(st.sampled_from([(2, 4), (2, 3, 4), (4, 4)])))
    shape = t.shapes[x]
    values = [x]
    for _ in range(draw(st.integers(1, 6))):
        y = draw(st.sampled_from(values[-3:]))
        dim = draw(st.integers(0, len(shape) - 1))
        match draw(st.integers(0, 6)):
            case 0:
                y = t.point("tanh", y)
            case 1:
                y = t.point(draw(st.sampled_from(["add", "multiply"])), y, draw(st.sampled_from(values)))
            case 2:
                y = t.point("subtract", y, t.reduce("mean", y, dim))
            case 3:
                half = shape[dim] // 2
                if half:
                    y = t.concat(dim, t.slice(y, dim, half, shape[dim] - half), t.slice(y, dim, 0, half))
            case 4:
                order = draw(st.permutations(range(len(shape))))
                if tuple(shape[i] for i in order) == shape:
                    y = t.transpose(y, *order)
            case 5 if shape[-1] == 4:
                apart = t.reshape(y, *shape[:-1], 2, 2)
                mean = t.reduce("mean", apart, len(shape) - draw(st.integers(0, 1)))
                y = t.reshape(t.point("subtract", apart, mean), *shape)
            case _:
                y = t.point("multiply", y, t.leaf(f"c{len(t.leaves)}", shape[-1:], "constant"))
        values.append(y)
    return t.trace(t.point("relu", values[-1]))


@given(regions())
@settings(max_examples=100)
def test_a_region_depends_on_other_points_only_where_it_says(trace: Trace) -> None:
    """Change one element: what changes lies at the same place in all dims but those that are said to be read across."""
    found = _after(trace, "collapse regions")
    before = _after(trace, "see through views")
    if len(found.nodes) != 1 or not before.nodes:
        return
    (node,) = found.nodes
    entry = node.inputs[0]
    if len(node.computes) < 2 or entry.value != "x":
        return
    across: set[int] = set()
    match node.op:
        case ops.Pointwise(mixes=mixes):
            across = set(mixes)
        case ops.Normalise(over=over, mixes=mixes):
            across = {*over, *mixes}
        case ops.Softmax(dim=dim):
            across = {dim}
        case _:
            pytest.fail(f"{node.op} is no region")
    given_ = values_of(trace)
    x, name = given_["x"], node.outputs[0].name
    # Which element of x the region reads at each of its own places.
    element = read(entry, {"x": np.arange(x.size).reshape(x.shape)})
    for position in np.ndindex(*element.shape):
        moved = x.copy()
        moved.flat[element[position]] += 0.5
        one, other = (evaluate(trace, given_ | {"x": v})[name] for v in (x, moved))
        changed = np.argwhere(~np.isclose(one, other, rtol=1e-12, atol=1e-14))
        for i in set(range(element.ndim)) - across:
            assert set(changed[:, i].tolist()) <= {position[i]}, (node.op, position)


# -- attention


def qkv(t: Tracer) -> list[str]:
    x = t.leaf("x", (2, 5, 12))
    return [t.reshape(t.linear(x, t.weight(f"w{i}", 12, 12)), 2, 5, 3, 4) for i in "qkv"]


def _scores(t: Tracer, q: str, k: str) -> str:
    return t.einsum("bshk,bthk->bhst", q, k)


def _attended(t: Tracer, scores: str, v: str) -> str:
    return t.reshape(t.einsum("bhst,bthk->bshk", t.softmax(scores), v), 2, 5, 12)


def _by_products_over_heads(t: Tracer) -> str:
    q, k, v = (t.transpose(x, 0, 2, 1, 3) for x in qkv(t))
    scores = t.einsum("bhsk,bhkt->bhst", q, t.transpose(k, 0, 1, 3, 2))
    scores = t.point("multiply", scores, t.leaf("c", (), "constant"))
    y = t.transpose(t.einsum("bhst,bhtk->bhsk", t.softmax(scores), v), 0, 2, 1, 3)
    return t.point("tanh", t.reshape(y, 2, 5, 12))


def _by_einsums(t: Tracer) -> str:
    q, k, v = qkv(t)
    return t.point("tanh", _attended(t, _scores(t, q, k), v))


def _with_heads_and_batch_as_one_dim_and_a_mask_between(t: Tracer) -> str:
    q, k, v = (t.reshape(t.transpose(x, 0, 2, 1, 3), 6, 5, 4) for x in qkv(t))
    scores = t.reshape(t.einsum("bsk,bkt->bst", q, t.transpose(k, 0, 2, 1)), 2, 3, 5, 5)
    scores = t.reshape(t.point("add", scores, t.leaf("mask", (2, 1, 5, 5), "constant")), 6, 5, 5)
    y = t.transpose(t.reshape(t.einsum("bst,btk->bsk", t.softmax(scores), v), 2, 3, 5, 4), 0, 2, 1, 3)
    return t.point("tanh", t.reshape(y, 2, 5, 12))


def _with_a_trained_bias(t: Tracer) -> str:
    q, k, v = qkv(t)
    return _attended(t, t.point("add", _scores(t, q, k), t.weight("bias", 3, 5, 5)), v)


def _with_a_bias_that_is_computed(t: Tracer) -> str:
    q, k, v = qkv(t)
    bias = t.transpose(t.linear(t.leaf("pairs", (2, 5, 5, 7)), t.weight("wb", 7, 3)), 0, 3, 1, 2)
    return _attended(t, t.point("add", _scores(t, q, k), bias), v)


def _of_normalised_queries_over_windows(t: Tracer) -> str:
    """Windows that were cut out of images are known of the values alone: queries and keys are computed since."""
    x = t.leaf("x", (2, 3, 5, 12))
    q, k, v = (t.reshape(t.linear(x, t.weight(f"w{i}", 12, 12)), 6, 5, 3, 4) for i in "qkv")
    q, k, v = (t.transpose(y, 0, 2, 1, 3) for y in (q, k, v))
    q, k = (t.point("divide", y, t.reduce("sum", t.point("multiply", y, y), 3)) for y in (q, k))
    scores = t.point("multiply", t.einsum("bhsk,bhtk->bhst", q, k), t.weight("scale", 3, 1, 1))
    y = t.einsum("bhst,bhtk->bhsk", t.softmax(scores), v)
    return t.reshape(t.transpose(y, 0, 2, 1, 3), 2, 3, 5, 12)


@pytest.mark.parametrize(
    ("made", "shapes", "counts"),
    [
        (_by_products_over_heads, [], (3, 5)),
        (_by_einsums, [], (3, 5)),
        (_with_heads_and_batch_as_one_dim_and_a_mask_between, [], (3, 5)),
        (_with_a_trained_bias, [(3, 5, 5)], (3, 4)),
        (_with_a_bias_that_is_computed, [(2, 3, 5, 5)], (4, 5)),
        (_of_normalised_queries_over_windows, [(3, 1, 1)], (3, 6)),
    ],
)
def test_attention_is_one_operator(
    made: Callable[[Tracer], str], shapes: list[tuple[int, ...]], counts: tuple[int, int]
) -> None:
    """shapes: of what it reads beside queries, keys and values. counts: of products, of nodes."""
    t = Tracer()
    trace = t.trace(made(t))
    found = run_passes(trace)[-1]
    (node,) = [node for node in found.nodes if isinstance(node.op, ops.Attention)]
    heads = (6 if made is _of_normalised_queries_over_windows else 2, 3, 5, 4)
    assert [found.shape(use) for use in node.inputs] == [heads] * 3 + shapes
    assert product_flop(found) == product_flop(trace)
    assert live_parameters(found) == live_parameters(trace)
    assert (_kinds(found)["Contract"], len(found.nodes)) == counts


def test_scores_that_are_returned_stay() -> None:
    t = Tracer()
    q, k, v = qkv(t)
    scores = _scores(t, q, k)
    y = t.einsum("bhst,bthk->bshk", t.softmax(scores), v)
    assert _kinds(_final(t, y, scores)) == {"Contract": 5, "Softmax": 1}


# -- folding


def test_a_bias_along_another_dim_is_no_bias() -> None:
    t = Tracer()
    x, w, column = t.leaf("x", (8, 4)), t.weight("w", 4, 8), t.weight("column", 8, 1)
    (node,) = _final(t, t.point("add", t.linear(x, w), column)).nodes
    assert isinstance(node.op, ops.Contract)
    assert (node.op.has_bias, node.epilogue, len(node.inputs)) == (False, ("add",), 3)


def test_functions_go_into_what_makes_them() -> None:
    t = Tracer()
    x, w, b = t.leaf("x", (8, 4)), t.weight("w", 4, 6), t.weight("b", 6)
    y = t.point("relu", t.point("add", t.linear(x, w), b))
    (node,) = _final(t, t.point("multiply", y, t.leaf("c", (6,), "constant"))).nodes
    assert isinstance(node.op, ops.Contract)
    assert node.op.has_bias
    # ReLU and a product with a constant; the bias is the contraction's own.
    assert [(folded.flop, folded.backward_flop, folded.argument) for folded in node.folded] == [(96, 96, "")]


def test_what_is_folded_works_backward_for_each_factor_and_for_no_summand() -> None:
    t = Tracer()
    x, w, scale = t.leaf("x", (8, 4)), t.weight("w", 4, 6), t.weight("scale", 8, 6)
    y = t.point("add", t.point("multiply", t.linear(x, w), scale), t.weight("shift", 8, 6))
    (node,) = _final(t, y).nodes
    # A product and a sum forward; backward a product for each of the two factors.
    assert [(folded.flop, folded.backward_flop) for folded in node.folded] == [(2 * 48, 2 * 48)]


def test_what_is_folded_before_works_backward_for_what_is_read_alone() -> None:
    t = Tracer()
    data, w = t.leaf("x", (8, 4)), t.weight("w", 4, 6)
    (node,) = _final(t, t.linear(t.point("relu", data), w)).nodes
    assert [(folded.flop, folded.argument) for folded in node.folded] == [(8 * 4, "x")]


def test_a_rotary_embedding_goes_into_attention_and_holds_its_dim() -> None:
    t = Tracer()
    q, k, v = (t.transpose(x, 0, 2, 1, 3) for x in qkv(t))
    cos = t.leaf("cos", (5, 4), "constant")
    scores = t.einsum("bhsk,bhtk->bhst", turned(t, q, cos), turned(t, k, cos))
    found = _final(t, t.einsum("bhst,bhtk->bhsk", t.softmax(scores), v))
    (node,) = [node for node in found.nodes if isinstance(node.op, ops.Attention)]
    assert set(node.whole) == {(0, 3), (1, 3)}
    assert _kinds(found) == {"Contract": 3, "Attention": 1}


def test_nothing_that_mixes_points_goes_into_a_product_that_makes_it() -> None:
    t = Tracer()
    x, w = t.leaf("x", (8, 4)), t.weight("w", 4, 6)
    y = t.linear(x, w)
    rolled = t.concat(1, t.slice(y, 1, 2, 4), t.slice(y, 1, 0, 2))
    found = _final(t, t.point("add", t.point("tanh", y), rolled))
    mixing = [node for node in found.nodes if isinstance(node.op, ops.Pointwise)]
    assert [node.op.mixes for node in mixing if isinstance(node.op, ops.Pointwise)] == [(1,)]


def test_an_input_and_a_transposed_input_that_are_returned() -> None:
    t = Tracer()
    x = t.leaf("x", (2, 3))
    y = t.point("tanh", x)
    found = _final(t, y, "x", t.transpose(x, 1, 0))
    assert _kinds(found) == {"Pointwise": 1, "Transpose": 1}
    assert isinstance(found.nodes[-1].op, ops.Transpose)
