"""Lowering: which elements each vertex reads, beside NumPy; that nothing is lost; the vertices of each operator."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from math import prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pase import search
from pase.costs import Pattern, ReadTraits, layer_traffic
from pase.costs.traffic import LayerTraffic
from pase.errors import GraphError, ModelError
from pase.graph import Access, Graph, Operator, Role, SliceOf, verify
from pase.graph.operators import contract, pointwise, softmax
from pase.graph.precision import FLOAT32, uniform_types
from pase.importers.frameworks import imported
from pase.importers.ir import ops
from pase.importers.ir.trace import Piece, Trace, Use, live_parameters, product_flop
from pase.importers.ir.views import View
from pase.importers.lower import lower
from pase.importers.lower.build import fitted
from pase.importers.passes import run_passes
from tests.importers.test_passes import qkv, traces, turned
from tests.importers.test_views import chains
from tests.importers.traces import Array, Tracer, seen


def _graph(t: Tracer, *outputs: str) -> Graph:
    return _lowered(t.trace(*outputs))


def _lowered(trace: Trace) -> Graph:
    model = imported(trace, arguments={})
    assert model.differences == ()
    return verify(model.lowered.graph)


# -- fitting reads to the tensors behind their views


def _points(operator: Operator) -> Iterator[dict[str, int]]:
    for point in product(*(range(extent) for extent in operator.extents.values())):
        yield dict(zip(operator.extents, point, strict=True))


def _position(access: Access, point: dict[str, int], extents: dict[str, int]) -> tuple[int, ...]:
    """Where in a tensor a point of the iteration space reads."""
    found = []
    for axis in access.index_map:
        match axis:
            case None:
                found.append(0)
            case str():
                found.append(point[axis])
            case tuple():
                at = 0
                for name in axis:
                    at = at * extents[name] + point[name]
                found.append(at)
            case _:
                raise AssertionError(axis)
    return tuple(found)


def _coarse(point: dict[str, int], fine: Operator, operator: Operator) -> dict[str, int]:
    """A point of the refined iteration space as one of the operator's own: its dims stand where they stood."""
    names, found = iter(fine.extents.items()), {}
    for dim, extent in operator.extents.items():
        at = size = 0
        size = 1
        while size < extent or (extent == 1 and size == 1 and dim not in found):
            name, own = next(names)
            at, size = at * own + point[name], size * own
            found[dim] = at
    return found


def _check(operator: Operator, views: list[View | None], bases: list[Array | None]) -> bool:
    fine = fitted(operator, views)
    if fine is None:
        return False
    assert prod(fine.extents.values()) == prod(operator.extents.values())
    assert [w.size for w in fine.writes] == [w.size for w in operator.writes]
    for old, new, view, base in zip(operator.reads, fine.reads, views, bases, strict=True):
        if view is None or base is None:
            assert new.shape == old.shape
            continue
        assert new.size == base.size, "an edge needs what its producer makes, element by element"
        elements, flat = seen(view, base), base.ravel().reshape(new.shape)
        for point in _points(fine):
            wanted = elements[_position(old, _coarse(point, fine, operator), operator.extents)]
            assert flat[_position(new, point, fine.extents)] == wanted
    return True


@given(chains(), st.booleans())
@settings(max_examples=80)
def test_a_read_through_a_view_reads_the_elements_of_the_view(chain: tuple[Array, View, Array], reduces: bool) -> None:
    base, view, array = chain
    names = tuple("abcdefgh"[: array.ndim])
    if not names or array.size > 300:
        return
    if reduces:
        operator = softmax("v", array.shape, dims=names, over=names[-1])
    else:
        operator = pointwise("v", array.shape, dims=names, out=array.shape, function="relu")
    _check(operator, [view], [base])


@given(st.data())
@settings(max_examples=80)
def test_two_reads_through_views_read_their_elements(data: st.DataObject) -> None:
    (x, seen_x, a), (y, seen_y, b) = data.draw(chains()), data.draw(chains())
    if not a.ndim or not b.ndim or a.shape[-1] != b.shape[0] or a.size * b.size > 2000:
        return
    letters = "abcdefghijklmnop"
    first, second = tuple(letters[: a.ndim]), tuple(letters[a.ndim - 1 : a.ndim - 1 + b.ndim])
    out = tuple(name for name in (*first, *second) if name != first[-1])
    operator = contract("v", a.shape, b.shape, axes=(first, second), out=out)
    _check(operator, [seen_x, seen_y], [x, y])


def test_heads_gathered_from_a_transpose_refine_the_width() -> None:
    heads = View.plain((2, 3, 5, 4)).transposed((0, 2, 1, 3)).reshaped((2, 5, 12))
    assert heads is not None
    operator = contract("v", (2, 5, 12), (12, 6), axes=(("b", "s", "c"), ("c", "n")), out=("b", "s", "n"))
    assert _check(operator, [heads, None], [np.arange(120).reshape(2, 3, 5, 4), None])
    fine = fitted(operator, [heads, None])
    assert fine is not None
    assert fine.extents == {"b": 2, "s": 5, "n": 6, "c1": 3, "c2": 4}
    assert fine.reads[1].index_map == (("c1", "c2"), "n")


def test_repeated_heads_are_read_by_their_group() -> None:
    apart = View.plain((2, 2, 5, 4)).reshaped((2, 2, 1, 5, 4))
    assert apart is not None
    wide = apart.broadcast((2, 2, 3, 5, 4)).reshaped((2, 6, 5, 4))
    assert wide is not None
    operator = pointwise("v", (2, 6, 5, 4), dims=("b", "h", "s", "k"), out=(2, 6, 5, 4), function="relu")
    assert _check(operator, [wide], [np.arange(80).reshape(2, 2, 5, 4)])


# -- nothing is lost


@given(traces())
@settings(max_examples=80)
def test_every_trace_becomes_a_graph_with_its_products_and_weights(trace: Trace) -> None:
    final = run_passes(trace)[-1]
    if not final.nodes:
        with pytest.raises(ModelError, match="has no operator that computes with floats; there is nothing to split"):
            lower(final)
        return
    graph = _lowered(trace)
    assert graph.forward_flop(contractions_only=True) == pytest.approx(product_flop(final), rel=1e-12)
    assert graph.num_parameters == live_parameters(final)
    for operator in graph.operators:
        read = [i for i, access in enumerate(operator.reads) if access.role is not Role.PARAMETER]
        fed = [i for i in read if (operator.name, i) in graph.incoming]
        # What nobody feeds is an input of the model.
        assert all(operator.reads[i].size <= 2000 for i in set(read) - set(fed))


@given(traces())
@settings(max_examples=40)
def test_every_graph_can_be_searched(trace: Trace) -> None:
    final = run_passes(trace)[-1]
    if final.nodes:
        graph = _lowered(trace)
        if any(
            extent % 2 == 0 for op in graph.operators for d, extent in op.extents.items() if d not in op.unsplittable
        ):
            assert search(graph, devices=2).exact


# -- the vertices of each operator


def test_pieces_of_a_projection_are_written_as_such() -> None:
    t = Tracer()
    x = t.leaf("x", (2, 5, 4))
    y = t.linear(x, t.weight("w", 4, 12))
    parts = [t.slice(y, 2, 4 * i, 4) for i in range(3)]
    graph = _graph(t, t.point("multiply", t.point("add", parts[0], parts[1]), parts[2]))
    first = graph.operators[0]
    pieces = [axis for write in first.writes for axis in write.index_map if isinstance(axis, SliceOf)]
    assert [(piece.offset, piece.extent) for piece in pieces] == [(0, 4), (4, 4), (8, 4)]
    assert len(graph.operators) == 3


def test_tied_weights_are_one_parameter() -> None:
    t = Tracer()
    tokens = t.leaf("tokens", (2, 5), dtype="int64")
    t.leaf("table", (10, 4), "parameter", storage="s")
    t.leaf("head", (10, 4), "parameter", storage="s")
    rows = t.add(ops.Lookup(), "table", tokens, shape=(2, 5, 4))
    graph = _graph(t, t.einsum("bsk,nk->bsn", t.point("tanh", rows), "head"))
    assert graph.num_parameters == 40
    assert {access.shared for op in graph.operators for access in op.parameters} == {"s"}


def test_pieces_of_a_weight_are_weights_of_their_own_only_where_they_make_it_up() -> None:
    def of(sizes: list[tuple[int, int]], *, whole: bool) -> int:
        t = Tracer()
        x, w = t.leaf("x", (2, 4)), t.weight("w", 4, 12)
        parts = [t.linear(x, t.slice(w, 1, start, size)) for start, size in sizes]
        parts += [t.linear(x, w)] * whole
        return _graph(t, t.point("relu", t.concat(1, *parts))).num_parameters

    assert of([(0, 4), (4, 8)], whole=False) == 48
    assert of([(0, 4), (4, 8)], whole=True) == 48
    assert of([(0, 6), (4, 8)], whole=False) == 48
    assert of([(0, 6), (8, 2)], whole=False) == 48


def test_a_weight_that_is_computed_of_others_is_held_whole() -> None:
    t = Tracer()
    x, v, g = t.leaf("x", (2, 4)), t.weight("v", 4, 6), t.weight("g", 6)
    model = imported(t.trace(t.linear(x, t.point("multiply", v, g))), arguments={})
    graph = model.lowered.graph
    assert graph.num_parameters == 30
    assert graph.operators[0].reads[1].index_map == ("c", "n")
    assert any("every device holds all of it" in text for _, text in model.lowered.approximations)


def test_towers_that_share_nothing_are_joined_at_no_cost() -> None:
    def tower(t: Tracer, name: str) -> str:
        return t.linear(t.leaf(name, (8, 4)), t.weight(f"w{name}", 4, 8))

    t, a, b = Tracer(), Tracer(), Tracer()
    graph = _graph(t, tower(t, "a"), tower(t, "b"))
    assert [op.kind for op in graph.operators] == ["dense", "dense", "outputs"]
    alone = [search(_graph(one, tower(one, name)), devices=4).total_cost for one, name in ((a, "a"), (b, "b"))]
    assert search(graph, devices=4).total_cost == pytest.approx(sum(alone), rel=1e-12)


def test_a_rotary_embedding_keeps_heads_whole() -> None:
    t = Tracer()
    q, k, v = (t.transpose(x, 0, 2, 1, 3) for x in qkv(t))
    q = turned(t, q, t.leaf("cos", (5, 4), "constant"))
    y = t.einsum("bhst,bhtk->bhsk", t.softmax(t.einsum("bhsk,bhtk->bhst", q, k)), v)
    (attention,) = [op for op in _graph(t, y).operators if op.kind == "attention"]
    assert "k" in attention.unsplittable


def test_a_bias_of_scores_lies_along_them() -> None:
    t = Tracer()
    q, k, v = qkv(t)
    scores = t.point("add", t.einsum("bshk,bthk->bhst", q, k), t.weight("bias", 3, 5, 5))
    y = t.einsum("bhst,bthk->bshk", t.softmax(scores), v)
    (attention,) = [op for op in _graph(t, y).operators if op.kind == "attention"]
    assert attention.parameters[0].index_map == ("h", "s", "t")


@pytest.mark.parametrize(
    ("cell", "layers", "both", "products"),
    [
        ("lstm", 1, False, 4 * (3 + 5) * 5),
        ("lstm", 2, True, 2 * 4 * ((3 + 5) * 5 + (10 + 5) * 5)),
        ("gru", 1, True, 2 * 3 * (3 + 5) * 5),
        ("rnn", 3, False, (3 + 5) * 5 + 2 * (5 + 5) * 5),
    ],
)
def test_recurrent_layers_have_their_products_and_split_their_units(
    cell: str, layers: int, both: bool, products: int
) -> None:
    t = Tracer()
    gates = {"lstm": 4, "gru": 3, "rnn": 1}[cell]
    x = t.leaf("x", (2, 7, 3))
    ways = 1 + both
    weights = []
    for layer in range(layers):
        for way in range(ways):
            width = 3 if layer == 0 else 5 * ways
            weights += [t.weight(f"i{layer}{way}", gates * 5, width), t.weight(f"h{layer}{way}", gates * 5, 5)]
            weights.append(t.weight(f"b{layer}{way}", gates * 5))
    op = ops.Recurrent(cell=cell, units=5, layers=layers, is_bidirectional=both)  # type: ignore[arg-type]
    y = t.add(op, x, *weights, shape=(2, 7, 5 * ways))
    graph = _graph(t, t.point("relu", y))
    (vertex,) = graph.operators
    assert graph.forward_flop(contractions_only=True) == 2 * 2 * 7 * products
    assert {d for d in vertex.extents if d not in vertex.unsplittable} == {"b", "e"}
    assert search(graph, devices=2).exact


_CONVOLUTION = ops.Convolve(
    channels=1, spatial=(2, 3), filters=(0, 1, 2, 3), stride=(1, 1), dilation=(1, 1), pads=((1, 1), (1, 1))
)


@pytest.mark.parametrize("groups", [1, 2])
def test_a_transposed_convolution_has_its_channels(groups: int) -> None:
    t = Tracer()
    x, w, b = t.leaf("x", (2, 4, 5, 5)), t.weight("w", 4, 6 // groups, 3, 3), t.weight("b", 6)
    op = replace(_CONVOLUTION, stride=(2, 2), groups=groups, is_transposed=True, has_bias=True)
    graph = _graph(t, t.add(op, x, w, b, shape=(2, 6, 9, 9)))
    (vertex,) = graph.operators
    assert graph.forward_flop(contractions_only=True) == 2 * 2 * 4 * 25 * (6 // groups) * 9
    assert {"b", "n", "c"} <= {d for d in vertex.extents if d not in vertex.unsplittable}


def test_a_convolution_with_computed_filters_is_a_convolution() -> None:
    t = Tracer()
    x, w, s = t.leaf("x", (2, 4, 5, 5)), t.weight("w", 6, 4, 3, 3), t.leaf("s", (6, 1, 1, 1))
    graph = _graph(t, t.add(_CONVOLUTION, x, t.point("multiply", w, s), shape=(2, 6, 5, 5)))
    assert [op.kind for op in graph.operators] == ["pointwise", "conv2d"]
    assert graph.operators[1].parameters == ()


def test_a_product_with_experts_counts_those_that_are_asked() -> None:
    t = Tracer()
    x, w = t.leaf("x", (16, 4)), t.weight("w", 8, 4, 6)
    y = t.add(ops.Contract(operands=("tk", "ekn"), output="tn", share=1 / 8), x, w, shape=(16, 6))
    graph = _graph(t, y)
    (vertex,) = graph.operators
    assert vertex.kind == "experts"
    assert graph.forward_flop(contractions_only=True) == 2 * 16 * 4 * 6
    assert search(graph, devices=2).exact


def test_rows_beyond_an_equal_share_move_to_their_groups_and_back() -> None:
    """Which rows a group has is told by data: 8 groups of 4 rows of 6 features on average, products of 10 columns."""
    t = Tracer()
    x, w, ends = t.leaf("x", (8, 4, 6)), t.weight("w", 8, 10, 6), t.leaf("ends", (8,), dtype="int32")
    op = ops.Contract(operands=("gmk", "gnk"), output="gmn", has_ends=True)
    graph = _graph(t, t.point("tanh", t.add(op, t.point("relu", x), w, ends, shape=(8, 4, 10))))
    with pytest.raises(GraphError, match=r"imbalance is 0\.5; expected a number of 1 or more"):
        graph.with_imbalance(0.5)
    assert (graph.imbalance, graph.with_imbalance(1.25).imbalance) == (1.0, 1.25)
    vertex = next(op for op in graph.with_imbalance(1.25).operators if op.parameters)
    even = next(op for op in graph.operators if op.parameters)
    assert [(read.role, read.index_map) for read in vertex.reads[2:]] == [(Role.INDEX, (None,))]
    groups, rows = vertex.reads[0].index_map[:2]
    assert isinstance(groups, str)
    assert isinstance(rows, str)

    def traffic(of: Operator, traits: tuple[bool, bool], **splits: int) -> LayerTraffic:
        reads = [ReadTraits(has_gradient=own, is_fed=False, is_owned=True) for own in (*traits, False)]
        values = np.array([[splits.get(dim, 1) for dim in of.extents]], dtype=np.int32)
        return layer_traffic(of, values, tuple(reads), types=uniform_types(of, FLOAT32))

    def moved(traits: tuple[bool, bool], **splits: int) -> list[tuple[str, float, int]]:
        messages = traffic(vertex, traits, **splits).messages
        return [(m.tensor, m.size_bytes.item(), m.times) for m in messages if m.pattern is Pattern.MOVE]

    assert moved((True, True), **{rows: 4}) == []
    # A device has 8 rows of 2 groups, or 4 of these; a quarter as many more go to the device with most of them.
    assert moved((True, True), **{groups: 4}) == [("rows", 2 * 6 * 4, 2), ("products", 2 * 10 * 4, 2)]
    assert moved((True, True), **{groups: 4, rows: 2}) == [("rows", 1 * 6 * 4, 2), ("products", 1 * 10 * 4, 2)]
    assert moved((False, True), **{groups: 4}) == [("rows", 2 * 6 * 4, 1), ("products", 2 * 10 * 4, 2)]
    assert moved((False, False), **{groups: 4}) == [("rows", 2 * 6 * 4, 1), ("products", 2 * 10 * 4, 1)]
    # It computes as much more; where no groups are split every device has rows of all.
    for splits, factor in (({groups: 4}, 1.25), ({rows: 4}, 1.0)):
        found, least = (traffic(of, (True, True), **splits).flop.item() for of in (vertex, even))
        assert found == factor * least
    assert not any(m.pattern is Pattern.MOVE for m in traffic(even, (True, True), **{groups: 4}).messages)


def test_generic_operators_pass_what_passes() -> None:
    t = Tracer()
    x, w, other = t.leaf("x", (4, 6)), t.weight("w", 4, 6), t.leaf("other", (4, 3))
    op = ops.Generic(passes=((0, 0),), product_flop=100.0)
    y = t.add(op, t.point("relu", x), t.point("tanh", other), w, shape=(4, 2))
    model = imported(t.trace(y), arguments={})
    vertex = model.lowered.graph.operators[-1]
    assert [access.index_map for access in vertex.reads] == [("p0", None), ("p0", None), (None, None)]
    assert vertex.parameters[0].size == 24
    assert model.lowered.graph.forward_flop(contractions_only=True) == pytest.approx(100)
    assert list(model.generic) == [(vertex.name, "Generic")]
    with pytest.raises(ModelError, match="operators that nothing is known of: Generic; without --strict"):
        imported(t.trace(y), arguments={}, is_strict=True)


def test_a_generic_operator_of_a_constant_passes_nothing() -> None:
    t = Tracer()
    x, c = t.leaf("x", (4, 6)), t.leaf("c", (4, 6), "constant")
    y = t.add(ops.Generic(passes=((0, 0),)), c, t.point("relu", x), shape=(4, 2))
    vertex = _graph(t, y).operators[-1]
    assert set(vertex.unsplittable) == set(vertex.extents)


def test_choices_are_read_along_an_edge_without_gradient() -> None:
    t = Tracer()
    x, w, codes = t.leaf("x", (8, 4)), t.weight("w", 4, 16), t.weight("codes", 16, 4)
    nearest = t.add(ops.Reduce(function="argmax", over=(1,)), t.linear(x, w), shape=(8,), dtype="int64")
    graph = _graph(t, t.add(ops.Lookup(), codes, nearest, shape=(8, 4)))
    assert [op.kind for op in graph.operators] == ["dense", "reduction", "embedding"]
    assert graph.operators[2].reads[0].role is Role.INDEX
    assert ("reduction" in graph.incoming[graph.operators[2].name, 0].producer) or len(graph.edges) == 2


def test_rows_of_any_tensor_are_looked_up_alike() -> None:
    t = Tracer()
    x, at = t.leaf("x", (8, 4, 6)), t.leaf("at", (3,), dtype="int64")
    graph = _graph(t, t.add(ops.Lookup(), t.point("relu", x), at, shape=(3, 4, 6)))
    vertex = graph.operators[-1]
    assert (vertex.kind, vertex.unsplittable) == ("embedding", ())
    assert vertex.writes[0].shape == (3, 4, 6)


SMALL: list[tuple[ops.Op, tuple[int, ...], tuple[int, ...]]] = [
    (ops.Pointwise(functions=("relu",)), (), ()),
    (ops.Pointwise(functions=("relu",)), (1, 1), (1, 1)),
    (ops.Reduce(function="sum", over=(0,)), (4,), ()),
    (ops.Reduce(function="sum", over=()), (), ()),
    (ops.Reduce(function="mean", over=(0, 1), keeps_dims=True), (1, 1), (1, 1)),
    (ops.Normalise(kind="layer", over=(1,), channels=(1,), has_scale=False, has_shift=False), (1, 1), (1, 1)),
    (ops.Slice(starts=(0, 1), steps=(1, 2)), (4, 6), (4, 3)),
    (ops.Slice(starts=(1, 1), steps=(1, 1)), (4, 6), (3, 5)),
]


@pytest.mark.parametrize(("op", "shape", "out"), SMALL)
def test_scalars_and_dims_of_one_element_are_vertices_too(
    op: ops.Op, shape: tuple[int, ...], out: tuple[int, ...]
) -> None:
    t = Tracer()
    y = t.add(op, t.point("relu", t.leaf("x", shape)), shape=out)
    graph = _graph(t, t.point("tanh", y))
    assert graph.num_parameters == 0
    assert graph.operators


def test_every_other_element_is_a_piece_of_a_finer_dim() -> None:
    t = Tracer()
    x = t.leaf("x", (2, 8, 8, 4))
    y = t.add(ops.Slice(starts=(0, 1, 2, 0), steps=(1, 2, 1, 1)), t.point("relu", x), shape=(2, 4, 5, 4))
    vertex = _graph(t, t.linear(y, t.weight("w", 4, 4))).operators[1]
    assert (vertex.kind, vertex.unsplittable) == ("piece", ())
    # Beside NumPy: which element of x each point of the iteration space writes, and where.
    held, found = np.arange(512).reshape(2, 8, 8, 4), {}
    for point in _points(vertex):
        at, parts = [], zip(vertex.writes[0].index_map, vertex.writes[0].shape, strict=True)
        for axis, extent in parts:
            place = point[axis.dim] - axis.offset if isinstance(axis, SliceOf) else point[str(axis)]
            if not 0 <= place < extent:
                break
            at.append(place)
        else:
            found[tuple(at)] = held[_position(vertex.reads[0], point, vertex.extents)]
    written = np.array([found[tuple(at)] for at in np.ndindex(*vertex.writes[0].shape)])
    assert np.array_equal(written, held[:, 1::2, 2:7].ravel())


def test_names_say_where_and_what() -> None:
    t = Tracer()
    x = t.leaf("x", (4, 8))
    y = t.linear(x, t.weight("h.0.fc.weight", 8, 8), scope="h.0.fc")
    y = t.point("add", y, x, scope="h.0")
    z = t.linear(y, t.weight("h.0.out.weight", 8, 8), scope="h.0.out")
    y = t.point("add", y, z, scope="h.0")
    graph = _graph(t, t.reduce("max", y, 0, keeps=False))
    assert [op.name for op in graph.operators] == ["h.0.fc", "h.0/add", "h.0.out", "h.0/add_2", t.nodes[-1].name]


def test_a_piece_is_read_where_its_producer_wrote_it() -> None:
    """The use of a piece of a value that is itself seen otherwise."""
    t = Tracer()
    y = t.linear(t.leaf("x", (2, 5, 4)), t.weight("w", 4, 12))
    apart = t.reshape(y, 2, 5, 3, 4)
    q = t.transpose(t.reshape(t.slice(apart, 2, 1, 1), 2, 5, 4), 0, 2, 1)
    trace = t.trace(t.point("relu", q))
    final = run_passes(trace)[-1]
    read = final.nodes[-1].inputs[0]
    assert read == Use(value=y, piece=Piece(dim=2, start=4, size=4), view=View.plain((2, 5, 4)).transposed((0, 2, 1)))
    assert len(_lowered(trace).operators) == 2
