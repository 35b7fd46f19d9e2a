"""Passes: what they keep, by running traces before and after them in NumPy, and what they make of known patterns."""

from collections import Counter
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pase.importers.ir import ops
from pase.importers.ir.trace import Trace, live_parameters, product_flop
from pase.importers.passes import PASSES, run_passes
from pase.importers.passes.regions import aligned
from tests.importers.traces import Array, Tracer, evaluate, read, values_of

EXACT = ("drop no-ops", "drop constants and indices", "see through views", "split merged dims")
"""Passes after which the values of a trace are what they were; the others name what steps are together."""


def _kinds(trace: Trace) -> Counter[str]:
    return Counter(type(node.op).__name__ for node in trace.nodes)


def _after(trace: Trace, name: str) -> Trace:
    return run_passes(trace)[list(PASSES).index(name) + 1]


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


# -- no-ops


def test_what_changes_nothing_goes() -> None:
    t = Tracer()
    x = t.leaf("x", (2, 3))
    y = t.add(ops.Identity(), t.point("relu", x), shape=(2, 3))
    y = t.reshape(t.transpose(y, 0, 1), 2, 3)
    found = _after(t.trace(t.point("tanh", y)), "drop no-ops")
    assert [node.op.functions for node in found.nodes if isinstance(node.op, ops.Pointwise)] == [("relu",), ("tanh",)]


def test_a_flip_is_no_no_op() -> None:
    t = Tracer()
    x = t.leaf("x", (2, 3))
    flipped = t.add(ops.Slice(starts=(0, 2), steps=(1, -1)), x, shape=(2, 3))
    found = _after(t.trace(t.point("tanh", flipped)), "drop no-ops")
    assert _kinds(found) == {"Slice": 1, "Pointwise": 1}


# -- constants, indices, choices


def test_masks_and_positions_vanish() -> None:
    t = Tracer()
    x = t.leaf("x", (2, 4))
    ones = t.leaf("ones", (4,), "constant")
    tokens = t.leaf("tokens", (2, 4), dtype="int64")
    floats = t.add(ops.Pointwise(functions=("cast",)), tokens, shape=(2, 4))
    y = t.point("add", t.point("multiply", x, t.point("negate", ones)), t.point("negate", floats))
    found = _after(t.trace(y), "drop constants and indices")
    assert [node.op for node in found.nodes] == [
        ops.Pointwise(functions=("multiply",)),
        ops.Pointwise(functions=("add",)),
    ]
    assert {leaf.value.name: leaf.role for leaf in found.leaves}[found.nodes[1].inputs[1].value] == "constant"


def test_rows_looked_up_by_tokens_stay() -> None:
    t = Tracer()
    tokens, table = t.leaf("tokens", (2, 4), dtype="int64"), t.weight("table", 10, 6)
    y = t.point("tanh", t.add(ops.Lookup(), table, tokens, shape=(2, 4, 6)))
    assert _kinds(_after(t.trace(y), "drop constants and indices")) == {"Lookup": 1, "Pointwise": 1}


def test_a_product_of_two_weights_is_work() -> None:
    """A matrix made of two factors is computed in every step, by the framework's counter too."""
    t = Tracer()
    x, a, b = t.leaf("x", (8, 4)), t.weight("a", 4, 2), t.weight("b", 2, 6)
    trace = t.trace(t.linear(x, t.linear(a, b)))
    assert product_flop(run_passes(trace)[-1]) == 2 * 4 * 2 * 6 + 2 * 8 * 4 * 6
    assert len(run_passes(trace)[-1].nodes) == 2


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
    y = t.concat(1, empty, t.point("relu", x))
    found = run_passes(t.trace(t.point("tanh", y)))[-1]
    assert sum(isinstance(node.op, ops.Pointwise) for node in found.nodes) >= 1
    assert all(leaf.role == "constant" for leaf in found.leaves if leaf.value.name == empty)


# -- regions


def _layer_norm(t: Tracer, x: str, *over: int) -> str:
    middle = t.point("subtract", x, t.reduce("mean", x, *over))
    square = t.reduce("mean", t.point("multiply", middle, middle), *over)
    return t.point("multiply", middle, t.point("rsqrt", square))


def _one(trace: Trace) -> Trace:
    found = _after(trace, "collapse regions")
    assert len(found.nodes) == 1, [node.op for node in found.nodes]
    return found


def test_a_layer_norm_is_one_operator() -> None:
    t = Tracer()
    x, scale, shift = t.leaf("x", (2, 3, 8)), t.weight("scale", 8), t.weight("shift", 8)
    y = t.point("add", t.point("multiply", _layer_norm(t, x, 2), scale), shift)
    (node,) = _one(t.trace(y)).nodes
    assert node.op == ops.Normalise(kind="layer", over=(2,), channels=(2,))
    assert [use.value for use in node.inputs] == ["x", "scale", "shift"]


def test_an_instance_norm_has_its_scale_along_channels() -> None:
    t = Tracer()
    x, scale = t.leaf("x", (2, 3, 4, 3)), t.weight("scale", 3, 1, 1)
    (node,) = _one(t.trace(t.point("multiply", _layer_norm(t, x, 2, 3), scale))).nodes
    assert node.op == ops.Normalise(kind="layer", over=(2, 3), channels=(1,), has_shift=False)


def test_a_group_norm_over_a_reshaped_tensor_is_one_operator() -> None:
    t = Tracer()
    x, scale = t.leaf("x", (2, 6, 4, 4)), t.weight("scale", 6, 1, 1)
    y = t.reshape(_layer_norm(t, t.reshape(x, 2, 3, 2, 4, 4), 2, 3, 4), 2, 6, 4, 4)
    (node,) = _one(t.trace(t.point("multiply", y, scale))).nodes
    assert node.op == ops.Normalise(kind="group", over=(1, 2, 3), channels=(1,), groups=3, has_shift=False)


def test_a_softmax_is_one_operator() -> None:
    t = Tracer()
    x = t.leaf("x", (2, 3, 8))
    powers = t.point("exp", t.point("subtract", x, t.reduce("max", x, 2)))
    (node,) = _one(t.trace(t.point("divide", powers, t.reduce("sum", powers, 2)))).nodes
    assert node.op == ops.Softmax(dim=2)


def test_two_norms_in_a_row_are_two_operators() -> None:
    t = Tracer()
    x, a, b = t.leaf("x", (2, 8)), t.weight("a", 8), t.weight("b", 8)
    y = t.point("multiply", _layer_norm(t, t.point("multiply", _layer_norm(t, x, 1), a), 1), b)
    found = _after(t.trace(y), "collapse regions")
    assert [node.op.kind for node in found.nodes if isinstance(node.op, ops.Normalise)] == ["layer", "layer"]
    assert [[use.value for use in node.inputs][1:] for node in found.nodes] == [["a"], ["b"]]


def test_a_rotary_embedding_reads_across_its_dim() -> None:
    t = Tracer()
    x, cos, sin = t.leaf("x", (2, 3, 8)), t.leaf("cos", (3, 8), "constant"), t.leaf("sin", (3, 8), "constant")
    turned = t.concat(2, t.point("negate", t.slice(x, 2, 4, 4)), t.slice(x, 2, 0, 4))
    y = t.point("add", t.point("multiply", x, cos), t.point("multiply", turned, sin))
    (node,) = _one(t.trace(y)).nodes
    assert isinstance(node.op, ops.Pointwise)
    assert (node.op.functions, node.op.mixes) == (("rotary",), (2,))


def test_a_tensor_and_its_transpose_are_not_read_point_by_point() -> None:
    t = Tracer()
    x = t.leaf("x", (4, 4))
    y = t.point("tanh", t.point("add", x, t.transpose(x, 1, 0)))
    found = run_passes(t.trace(y))[-1]
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


def test_alignment_refuses_what_is_not_alike() -> None:
    t = Tracer()
    x = t.leaf("x", (4, 4))
    trace = _after(t.trace(t.point("add", t.point("tanh", x), t.transpose(x, 1, 0))), "see through views")
    assert aligned(trace, trace.nodes, trace.nodes[0].inputs[0]) is None


# -- attention


def _heads(t: Tracer, x: str, w: str, heads: int) -> str:
    b, s, d = t.shapes[x]
    return t.reshape(t.linear(x, w), b, s, heads, d // heads)


def _qkv(t: Tracer) -> tuple[str, str, str]:
    x = t.leaf("x", (2, 5, 12))
    q, k, v = (_heads(t, x, t.weight(f"w{i}", 12, 12), 3) for i in "qkv")
    return q, k, v


ATTENTION_FLOP = 2 * 2 * 3 * 5 * 5 * (4 + 4)


def _check_attention(trace: Trace, num_inputs: int = 3) -> None:
    found = run_passes(trace)[-1]
    (node,) = [node for node in found.nodes if isinstance(node.op, ops.Attention)]
    assert [found.shape(use) for use in node.inputs[:3]] == [(2, 3, 5, 4)] * 3
    assert len(node.inputs) == num_inputs
    assert product_flop(found) == product_flop(trace)
    assert _kinds(found)["Contract"] == 3
    assert len(found.nodes) == 4 + (not isinstance(found.producer[found.outputs[0]].op, ops.Attention))


def test_attention_by_matrix_products_over_heads() -> None:
    t = Tracer()
    q, k, v = (t.transpose(x, 0, 2, 1, 3) for x in _qkv(t))
    scores = t.point(
        "multiply", t.einsum("bhsk,bhkt->bhst", q, t.transpose(k, 0, 1, 3, 2)), t.leaf("c", (), "constant")
    )
    y = t.transpose(t.einsum("bhst,bhtk->bhsk", t.softmax(scores), v), 0, 2, 1, 3)
    _check_attention(t.trace(t.point("tanh", t.reshape(y, 2, 5, 12))))


def test_attention_by_einsum_with_steps_before_heads() -> None:
    t = Tracer()
    q, k, v = _qkv(t)
    y = t.einsum("bhst,bthk->bshk", t.softmax(t.einsum("bshk,bthk->bhst", q, k)), v)
    _check_attention(t.trace(t.point("tanh", t.reshape(y, 2, 5, 12))))


def test_attention_with_heads_and_batch_as_one_dim_and_a_mask_between() -> None:
    t = Tracer()
    q, k, v = (t.reshape(t.transpose(x, 0, 2, 1, 3), 6, 5, 4) for x in _qkv(t))
    scores = t.reshape(t.einsum("bsk,bkt->bst", q, t.transpose(k, 0, 2, 1)), 2, 3, 5, 5)
    scores = t.reshape(t.point("add", scores, t.leaf("mask", (2, 1, 5, 5), "constant")), 6, 5, 5)
    y = t.transpose(t.reshape(t.einsum("bst,btk->bsk", t.softmax(scores), v), 2, 3, 5, 4), 0, 2, 1, 3)
    _check_attention(t.trace(t.point("tanh", t.reshape(y, 2, 5, 12))))


def test_attention_with_a_trained_bias_of_the_scores() -> None:
    t = Tracer()
    q, k, v = _qkv(t)
    bias = t.weight("bias", 3, 5, 5)
    y = t.einsum("bhst,bthk->bshk", t.softmax(t.point("add", t.einsum("bshk,bthk->bhst", q, k), bias)), v)
    trace = t.trace(t.reshape(y, 2, 5, 12))
    _check_attention(trace, num_inputs=4)
    assert live_parameters(run_passes(trace)[-1]) == 3 * 144 + 75


def test_attention_with_a_bias_that_is_computed() -> None:
    t = Tracer()
    q, k, v = _qkv(t)
    pairs, w = t.leaf("pairs", (2, 5, 5, 7)), t.weight("wb", 7, 3)
    bias = t.transpose(t.linear(pairs, w), 0, 3, 1, 2)
    y = t.einsum("bhst,bthk->bshk", t.softmax(t.point("add", t.einsum("bshk,bthk->bhst", q, k), bias)), v)
    found = run_passes(t.trace(t.reshape(y, 2, 5, 12)))[-1]
    (node,) = [node for node in found.nodes if isinstance(node.op, ops.Attention)]
    assert [found.shape(use) for use in node.inputs] == [(2, 3, 5, 4)] * 3 + [(2, 3, 5, 5)]


def test_attention_of_normalised_queries_over_windows() -> None:
    """Windows that were cut out of images are known of the values alone: queries and keys are computed since."""
    t = Tracer()
    x = t.leaf("x", (2, 3, 5, 12))
    q, k, v = (t.reshape(t.linear(x, t.weight(f"w{i}", 12, 12)), 6, 5, 3, 4) for i in "qkv")
    q, k, v = (t.transpose(y, 0, 2, 1, 3) for y in (q, k, v))
    q, k = (t.point("divide", y, t.reduce("sum", t.point("multiply", y, y), 3)) for y in (q, k))
    scores = t.point("multiply", t.einsum("bhsk,bhtk->bhst", q, k), t.weight("scale", 3, 1, 1))
    y = t.einsum("bhst,bhtk->bhsk", t.softmax(scores), v)
    trace = t.trace(t.reshape(t.transpose(y, 0, 2, 1, 3), 2, 3, 5, 12))
    found = run_passes(trace)[-1]
    (node,) = [node for node in found.nodes if isinstance(node.op, ops.Attention)]
    assert [found.shape(use) for use in node.inputs[:3]] == [(6, 3, 5, 4)] * 3
    assert product_flop(found) == product_flop(trace)


def test_scores_that_are_returned_stay() -> None:
    t = Tracer()
    q, k, v = _qkv(t)
    scores = t.einsum("bshk,bthk->bhst", q, k)
    y = t.einsum("bhst,bthk->bshk", t.softmax(scores), v)
    found = run_passes(t.trace(y, scores))[-1]
    assert _kinds(found) == {"Contract": 5, "Softmax": 1}


# -- folding


def test_a_bias_along_another_dim_is_no_bias() -> None:
    t = Tracer()
    x, w, column = t.leaf("x", (8, 4)), t.weight("w", 4, 8), t.weight("column", 8, 1)
    (node,) = run_passes(t.trace(t.point("add", t.linear(x, w), column)))[-1].nodes
    assert isinstance(node.op, ops.Contract)
    assert (node.op.has_bias, node.epilogue, len(node.inputs)) == (False, ("add",), 3)


def test_functions_go_into_what_makes_them() -> None:
    t = Tracer()
    x, w, b = t.leaf("x", (8, 4)), t.weight("w", 4, 6), t.weight("b", 6)
    y = t.point("relu", t.point("add", t.linear(x, w), b))
    (node,) = run_passes(t.trace(t.point("multiply", y, t.leaf("c", (6,), "constant"))))[-1].nodes
    assert isinstance(node.op, ops.Contract)
    assert node.op.has_bias
    # ReLU and a product with a constant; the bias is the contraction's own.
    assert [(folded.flop, folded.backward_flop, folded.argument) for folded in node.folded] == [(96, 96, "")]


def test_what_is_folded_works_backward_for_each_factor_and_for_no_summand() -> None:
    t = Tracer()
    x, w, scale = t.leaf("x", (8, 4)), t.weight("w", 4, 6), t.weight("scale", 8, 6)
    y = t.point("add", t.point("multiply", t.linear(x, w), scale), t.weight("shift", 8, 6))
    (node,) = run_passes(t.trace(y))[-1].nodes
    # A product and a sum forward; backward a product for each of the two factors.
    assert [(folded.flop, folded.backward_flop) for folded in node.folded] == [(2 * 48, 2 * 48)]


def test_what_is_folded_before_works_backward_for_what_is_read_alone() -> None:
    t = Tracer()
    data, w = t.leaf("x", (8, 4)), t.weight("w", 4, 6)
    (node,) = run_passes(t.trace(t.linear(t.point("relu", data), w)))[-1].nodes
    assert [(folded.flop, folded.argument) for folded in node.folded] == [(8 * 4, "x")]


def test_a_rotary_embedding_goes_into_attention_and_holds_its_dim() -> None:
    t = Tracer()
    x = t.leaf("x", (2, 5, 12))
    q, k, v = (t.transpose(_heads(t, x, t.weight(f"w{i}", 12, 12), 3), 0, 2, 1, 3) for i in "qkv")
    cos = t.leaf("cos", (5, 4), "constant")

    def turned(y: str) -> str:
        halves = t.concat(3, t.point("negate", t.slice(y, 3, 2, 2)), t.slice(y, 3, 0, 2))
        return t.point("add", t.point("multiply", y, cos), t.point("multiply", halves, cos))

    scores = t.einsum("bhsk,bhtk->bhst", turned(q), turned(k))
    found = run_passes(t.trace(t.einsum("bhst,bhtk->bhsk", t.softmax(scores), v)))[-1]
    (node,) = [node for node in found.nodes if isinstance(node.op, ops.Attention)]
    assert set(node.whole) == {(0, 3), (1, 3)}
    assert _kinds(found) == {"Contract": 3, "Attention": 1}


def test_nothing_that_mixes_points_goes_into_a_product_that_makes_it() -> None:
    t = Tracer()
    x, w = t.leaf("x", (8, 4)), t.weight("w", 4, 6)
    y = t.linear(x, w)
    rolled = t.concat(1, t.slice(y, 1, 2, 4), t.slice(y, 1, 0, 2))
    found = run_passes(t.trace(t.point("add", t.point("tanh", y), rolled)))[-1]
    mixing = [node for node in found.nodes if isinstance(node.op, ops.Pointwise)]
    assert [node.op.mixes for node in mixing if isinstance(node.op, ops.Pointwise)] == [(1,)]


def test_an_input_and_a_transposed_input_that_are_returned() -> None:
    t = Tracer()
    x = t.leaf("x", (2, 3))
    y = t.point("tanh", x)
    found = run_passes(t.trace(y, "x", t.transpose(x, 1, 0)))[-1]
    assert _kinds(found) == {"Pointwise": 1, "Transpose": 1}
    assert isinstance(found.nodes[-1].op, ops.Transpose)
