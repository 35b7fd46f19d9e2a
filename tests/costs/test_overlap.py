"""Transfer volumes and messages against the least of all assignments of parts to devices (`tests.costs.assignments`).

As many pairs of layouts as one likes are compared with their number in the environment: ``TRANSFER_PAIRS=250000``.
"""

import os
import random
from itertools import product
from math import prod

import numpy as np
import pytest
from numpy.typing import NDArray

from pase import load, search
from pase.costs import edge_layouts, transfer_bytes
from pase.graph import Access, Builder, Dim, DimIndex, Edge, Graph, Operator, SliceOf
from pase.graph.operators import dense
from pase.sharding.overlap import Overlap, layout_overlap, shared_splits
from pase.sharding.shards import Splits, components, enumerate_configurations, split_columns, splits_of
from tests.costs.assignments import (
    Fetches,
    Side,
    fetches,
    least_by_matching,
    least_by_permutations,
    pieces,
    random_pair,
)
from tests.moved import holdings
from tests.networks import SMALL


def _operator(name: str, dims: dict[str, int], shape: tuple[int, ...], axes: tuple[DimIndex, ...]) -> Operator:
    access = Access(tensor="x", shape=shape, index_map=axes)
    return Operator(
        name=name, kind="test", dims=tuple(Dim(n, e) for n, e in dims.items()), reads=(access,), writes=(access,)
    )


def _volumes(
    u: Operator, v: Operator, us: NDArray[np.int32], vs: NDArray[np.int32], *, written: int = 0, read: int = 0
) -> Overlap:
    sides = []
    for operator, access, rows in ((u, u.writes[written], us), (v, v.reads[read], vs)):
        parts = components(access, operator.extents)
        sides += [parts, split_columns(parts, splits_of(operator, rows))]
    return layout_overlap(*sides)  # type: ignore[arg-type]


NESTED = {
    "boxes": (
        _operator("u", {"b": 8, "c": 4}, (8, 4), ("b", "c")),
        _operator("v", {"b": 8, "n": 4, "k": 4}, (8, 4), ("b", "n")),
    ),
    "flattened": (
        _operator("u", {"b": 4, "c": 8, "h": 2, "w": 2}, (4, 8, 2, 2), ("b", "c", "h", "w")),
        _operator("v", {"b": 4, "c": 32}, (4, 32), ("b", "c")),
    ),
    "flattened with odd extents": (
        _operator("u", {"b": 4, "c": 8, "h": 3, "w": 3}, (4, 8, 3, 3), ("b", "c", "h", "w")),
        _operator("v", {"b": 4, "c": 72}, (4, 72), ("b", "c")),
    ),
    "heads": (
        _operator("u", {"b": 4, "d": 16}, (4, 16), ("b", "d")),
        _operator("v", {"b": 4, "h": 4, "k": 4}, (4, 4, 4), ("b", "h", "k")),
    ),
    "product of dims": (
        _operator("u", {"g": 2, "n": 8}, (16,), (("g", "n"),)),
        _operator("v", {"c": 16}, (16,), ("c",)),
    ),
    "reshape without common factors": (
        _operator("u", {"b": 4, "c": 6}, (4, 6), ("b", "c")),
        _operator("v", {"m": 6, "n": 4}, (6, 4), ("m", "n")),
    ),
    "concatenation": (
        _operator("u", {"b": 4, "c": 4}, (4, 4), ("b", "c")),
        _operator("v", {"b": 4, "c": 8}, (4, 4), ("b", SliceOf(dim="c", offset=4, extent=4))),
    ),
    "slice, held by some": (
        _operator("u", {"l": 2, "b": 4}, (1, 4), (SliceOf(dim="l", offset=1, extent=1), "b")),
        _operator("v", {"b": 4}, (1, 4), (None, "b")),
    ),
    "slices of both": (
        _operator("u", {"l": 4, "b": 4}, (1, 4), (SliceOf(dim="l", offset=1, extent=1), "b")),
        _operator("v", {"l": 2, "b": 4}, (1, 4), (SliceOf(dim="l", offset=0, extent=1), "b")),
    ),
}


# -- every pair of layouts


def _volumes_of_sides(u: Side, v: Side, p: int, *, has_gradient: bool) -> Overlap:
    columns = []
    for side in (u, v):
        rows = [[layout.get(dim, 1) for dim in side.extents] for layout in side.layouts(p)]
        parts = components(side.access, side.extents)
        values = np.array(rows, dtype=np.int32).reshape(len(rows), len(side.extents))
        columns += [parts, split_columns(parts, Splits(values=values, extents=side.extents))]
    return layout_overlap(*columns, has_gradient=has_gradient)  # type: ignore[arg-type]


def _check(found: Overlap, i: int, j: int, expected: Fetches, *, has_gradient: bool) -> None:
    """Compare one pair of layouts with the best of all assignments, and that some device's parts are as is said."""
    try_all = len(expected.held) <= 6
    least = (least_by_permutations if try_all else least_by_matching)(expected, has_gradient=has_gradient)
    forward = found.needed_forward[i, j], found.kept_forward[i, j]
    backward = found.needed_backward[i, j], found.kept_backward[i, j]
    sent, sent_back = found.messages_forward[i, j], found.messages_backward[i, j] * has_gradient
    assert (forward[0] - forward[1], (backward[0] - backward[1]) * has_gradient, sent, sent_back) == least
    assert ((expected.needed[None, :] == forward[0]) & (expected.kept == forward[1])).any()
    assert ((expected.held[:, None] == backward[0]) & (expected.kept == backward[1])).any()
    assert (found.produced[i, j], found.consumed[i, j]) == (expected.held.max(), expected.needed.max())


def _check_sides(u: Side, v: Side, p: int, *, has_gradient: bool) -> int:
    """Compare all pairs of two sides' layouts; return their number."""
    found = _volumes_of_sides(u, v, p, has_gradient=has_gradient)
    held, needed = u.holdings(p), v.holdings(p)
    for (i, a), (j, b) in product(enumerate(held), enumerate(needed)):
        _check(found, i, j, fetches(a, b), has_gradient=has_gradient)
    return len(held) * len(needed)


@pytest.mark.parametrize("p", range(2, 13))
def test_any_pair_of_layouts_costs_what_the_best_assignment_fetches(p: int) -> None:
    rng, count = random.Random(p), 0
    while count < int(os.environ.get("TRANSFER_PAIRS", "3300")) / 11:
        u, v = random_pair(rng)
        for has_gradient in (True, False):
            count += _check_sides(u, v, p, has_gradient=has_gradient)


@pytest.mark.parametrize("p", [2, 4, 6, 12])
@pytest.mark.parametrize("has_gradient", [True, False])
def test_any_two_pieces_of_small_dims_cost_what_the_best_assignment_fetches(p: int, has_gradient: bool) -> None:
    assert sum(_check_sides(u, v, p, has_gradient=has_gradient) for u, v in pieces(4)) > 146


@pytest.mark.parametrize("seed", range(3))
def test_trying_all_assignments_and_matching_under_bounds_agree(seed: int) -> None:
    rng = random.Random(seed)
    for p in (3, 4, 6, 6, 6):
        u, v = random_pair(rng)
        for a, b in product(u.holdings(p), v.holdings(p)):
            found = fetches(a, b)
            for has_gradient in (True, False):
                tried = least_by_permutations(found, has_gradient=has_gradient)
                assert least_by_matching(found, has_gradient=has_gradient) == tried


def _check_edge(graph: Graph, edge: Edge, p: int, count: int, rng: random.Random) -> int:
    """Compare so many layouts of either side of an edge of a graph, each with each; return the number of pairs."""
    u, v = graph[edge.producer], graph[edge.consumer]
    write, read = u.writes[edge.output], v.reads[edge.input]
    us, vs = (enumerate_configurations(o, p) for o in (u, v))
    us, vs = us[rng.choices(range(len(us)), k=count)], vs[rng.choices(range(len(vs)), k=count)]
    found = _volumes(u, v, us, vs, written=edge.output, read=edge.input)
    for (i, a), (j, b) in product(enumerate(us.tolist()), enumerate(vs.tolist())):
        held = holdings(u.extents, write, dict(zip(u.extents, a, strict=True)), p)
        needed = holdings(v.extents, read, dict(zip(v.extents, b, strict=True)), p)
        _check(found, i, j, fetches(held, needed), has_gradient=True)
    return count**2


@pytest.mark.parametrize(
    ("name", "p"),
    [
        ("densenet121", 32),
        *(pytest.param(*case, marks=pytest.mark.full) for case in [("inception_v3", 16), ("googlenet", 24)]),
    ],
)
def test_edges_of_built_in_networks_cost_what_the_best_assignment_fetches(name: str, p: int) -> None:
    graph = load(name, arguments={"batch": 192} if p % 3 == 0 else {})
    rng = random.Random(p)
    # What is not split in the same places is rare, and most of it is at concatenations.
    joined = [
        e for e in graph.edges if any(isinstance(axis, SliceOf) for axis in graph[e.consumer].reads[e.input].index_map)
    ]
    for edge in [*rng.sample(graph.edges, 8), *rng.sample(joined, min(16, len(joined)))]:
        _check_edge(graph, edge, p, 4, rng)


@pytest.mark.full
@pytest.mark.parametrize("p", [6, 8, 12, 16, 24])
@pytest.mark.parametrize("name", SMALL)
def test_every_edge_of_small_networks_costs_what_the_best_assignment_fetches(name: str, p: int) -> None:
    rng = random.Random(p)
    graph = load(name, arguments=SMALL[name] | ({"batch": 24} if p % 3 == 0 else {}))
    assert sum(_check_edge(graph, edge, p, 4, rng) for edge in graph.edges) == 16 * len(graph.edges)


@pytest.mark.parametrize(("name", "p"), [("googlenet", 12), pytest.param("inception_v3", 16, marks=pytest.mark.full)])
def test_the_edges_of_a_strategy_found_cost_what_the_best_assignments_fetch(name: str, p: int) -> None:
    plan = search(load(name, arguments={"batch": 192} if p % 3 == 0 else {}), p)
    graph, layers = plan.graph, {layer.name: layer for layer in plan.layers}
    for edge in graph.edges:
        (transfer,) = (t for t in layers[edge.consumer].transfers if t.input == edge.input)
        u, v = graph[edge.producer], graph[edge.consumer]
        held = holdings(u.extents, u.writes[edge.output], layers[u.name].splits, p)
        needed = holdings(v.extents, v.reads[edge.input], layers[v.name].splits, p)
        least = least_by_matching(fetches(held, needed), has_gradient=edge.producer in graph.trained)
        assert (transfer.forward_bytes, transfer.backward_bytes) == (4 * least.forward, 4 * least.backward), edge


# -- by hand


@pytest.mark.parametrize("case", NESTED)
@pytest.mark.parametrize("p", [8, 12])
def test_an_edge_costs_the_same_in_either_direction(case: str, p: int) -> None:
    u, v = NESTED[case]
    us, vs = (enumerate_configurations(o, p) for o in (u, v))
    # Footnote 2: t_x(u, v) = t_x(v, u), both ways together.
    one, other = (
        found.needed_forward - found.kept_forward + found.needed_backward - found.kept_backward
        for found in (_volumes(u, v, us, vs), _volumes(v, u, vs, us))
    )
    assert np.array_equal(one, other.T)


def test_an_edge_by_hand() -> None:
    # x[16, 32] from b 4 to c 4 on 4 devices: each device needs 16 x 8 and holds 4 x 8 of it, both ways.
    net = Builder("net", precision="bf16")
    x = net.add(dense, "u", net.input((16, 8)), out=(("n", 32),))
    net.add(dense, "v", x, out=(("n", 8),))
    graph = net.build()
    rows = np.array([[4, 1, 1]], dtype=np.int32), np.array([[1, 1, 4]], dtype=np.int32)
    moved = transfer_bytes(graph, graph.edges[0], *edge_layouts(graph, graph.edges[0], *rows))
    assert (moved.forward.item(), moved.backward.item()) == (2 * (128 - 32), 2 * (128 - 32))


def test_messages_by_hand() -> None:
    # Halves of 20 channels and of w, to halves of 30 channels of which these are the first: whoever needs the first 15
    # of every w has a quarter of all, and the other quarters all have some of it. Back, a quarter lacks 5 channels.
    u = _operator("u", {"c": 20, "w": 4}, (20, 4), ("c", "w"))
    v = _operator("v", {"c": 30, "w": 4}, (20, 4), (SliceOf(dim="c", offset=0, extent=20), "w"))
    found = _volumes(u, v, np.array([[2, 2]], dtype=np.int32), np.array([[2, 1]], dtype=np.int32))
    assert (found.messages_forward.item(), found.messages_backward.item()) == (3, 1)
    # Halves to thirds: the middle third and either half lie in two parts of the other side, of which one is there.
    u, v = _operator("u", {"n": 6}, (6,), ("n",)), _operator("v", {"c": 6}, (6,), ("c",))
    found = _volumes(u, v, np.array([[2]], dtype=np.int32), np.array([[3]], dtype=np.int32))
    assert (found.messages_forward.item(), found.messages_backward.item()) == (1, 1)


# -- cuts that two layouts share, from which layers are placed


@pytest.mark.parametrize("case", ["boxes", "flattened", "heads", "product of dims", "concatenation"])
def test_shared_cuts_lie_on_the_same_bounds(case: str) -> None:
    u, v = NESTED[case]
    us, vs = (enumerate_configurations(o, 8) for o in (u, v))
    ups = components(u.writes[0], u.extents)
    vps = components(v.reads[0], v.extents)
    num_shared = 0
    for a, b in product(split_columns(ups, splits_of(u, us)), split_columns(vps, splits_of(v, vs))):
        for shared in shared_splits(ups, a, vps, b):
            common = min(shared.u_factor, shared.v_factor)
            if common == 1:
                continue
            num_shared += 1
            # The stride of the first cut of either side, in elements of the whole tensor, is the same.
            u_stride = (
                ups[shared.u].dim_extent // (shared.u_above * common) * prod(c.length for c in ups[shared.u + 1 :])
            )
            v_stride = (
                vps[shared.v].dim_extent // (shared.v_above * common) * prod(c.length for c in vps[shared.v + 1 :])
            )
            assert u_stride == v_stride, (a, b, shared)
    assert num_shared > 0
