"""Transfer volumes against the best of all assignments of parts to devices, found by bottleneck matching."""

from itertools import product
from math import prod

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.sparse import csr_matrix
from scipy.sparse.csgraph import maximum_bipartite_matching

from pase.configurations import enumerate_configurations
from pase.costs import edge_layouts, transfer_bytes
from pase.costs.layouts import components, split_columns, splits_of
from pase.costs.overlap import Volumes, shared_splits, volumes
from pase.graph import Access, Axis, Builder, Dim, Operator, Part
from pase.graph.operators import dense, softmax_loss
from tests.moved import holdings, overlaps, sizes


def _operator(name: str, dims: dict[str, int], shape: tuple[int, ...], axes: tuple[Axis, ...]) -> Operator:
    access = Access(tensor="x", shape=shape, axes=axes)
    return Operator(
        name=name, kind="test", dims=tuple(Dim(n, e) for n, e in dims.items()), reads=(access,), writes=(access,)
    )


def _volumes(u: Operator, v: Operator, us: NDArray[np.int32], vs: NDArray[np.int32]) -> Volumes:
    sides = []
    for operator, access, rows in ((u, u.writes[0], us), (v, v.reads[0], vs)):
        parts = components(access.shape, access.axes, operator.extents)
        sides += [parts, split_columns(parts, splits_of(operator, rows))]
    return volumes(*sides)  # type: ignore[arg-type]


def _least_worst(fetch: NDArray[np.float64]) -> float:
    """Return the smallest bound within which every row can be matched to a column of its own."""
    for bound in np.unique(fetch):
        matched = maximum_bipartite_matching(csr_matrix((fetch <= bound).astype(np.int8)), perm_type="column")
        if (matched >= 0).all():
            return float(bound)
    raise AssertionError


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
        _operator("v", {"b": 4, "c": 8}, (4, 4), ("b", Part(dim="c", offset=4, extent=4))),
    ),
    "slice, held by some": (
        _operator("u", {"l": 2, "b": 4}, (1, 4), (Part(dim="l", offset=1, extent=1), "b")),
        _operator("v", {"b": 4}, (1, 4), (None, "b")),
    ),
    "slices of both": (
        _operator("u", {"l": 4, "b": 4}, (1, 4), (Part(dim="l", offset=1, extent=1), "b")),
        _operator("v", {"l": 2, "b": 4}, (1, 4), (Part(dim="l", offset=0, extent=1), "b")),
    ),
}


def _best(u: Operator, v: Operator, a: dict[str, int], b: dict[str, int], p: int) -> tuple[float, float]:
    holds, needs = holdings(u, u.writes[0], a, p), holdings(v, v.reads[0], b, p)
    common = overlaps(holds, needs)
    return _least_worst(sizes(needs)[:, None] - common), _least_worst(sizes(holds)[:, None] - common.T)


@pytest.mark.parametrize("case", NESTED)
@pytest.mark.parametrize("p", [2, 4, 8])
def test_nested_parts_move_exactly_the_least_that_any_assignment_can_reach(case: str, p: int) -> None:
    u, v = NESTED[case]
    us, vs = (enumerate_configurations(o, p).splits for o in (u, v))
    found = _volumes(u, v, us, vs)
    for (i, a), (j, b) in product(enumerate(us.tolist()), enumerate(vs.tolist())):
        moved = found.consumed[i, j] - found.kept_forward[i, j], found.produced[i, j] - found.kept_backward[i, j]
        best = _best(u, v, dict(zip(u.extents, a, strict=True)), dict(zip(v.extents, b, strict=True)), p)
        assert moved == best, (a, b)


@pytest.mark.parametrize(("p", "extent"), [(6, 12), (6, 6), (12, 24), (15, 30)])
def test_crossing_parts_of_one_dim_move_the_least_too(p: int, extent: int) -> None:
    u, v = (_operator(name, {"c": extent, "x": extent}, (extent,), ("c",)) for name in "uv")
    us, vs = (enumerate_configurations(o, p).splits for o in (u, v))
    found = _volumes(u, v, us, vs)
    for (i, a), (j, b) in product(enumerate(us.tolist()), enumerate(vs.tolist())):
        moved = found.consumed[i, j] - found.kept_forward[i, j], found.produced[i, j] - found.kept_backward[i, j]
        assert moved == _best(u, v, dict(zip("cx", a, strict=True)), dict(zip("cx", b, strict=True)), p), (a, b)


def test_crossing_parts_of_two_dims_are_estimated_from_above() -> None:
    # Dim by dim each is at its best; together another assignment can do a little better: 8 elements, not 10.
    u, v = (_operator(name, {"b": 12, "c": 6}, (12, 6), ("b", "c")) for name in "uv")
    us, vs = (enumerate_configurations(o, 6).splits for o in (u, v))
    found = _volumes(u, v, us, vs)
    over = []
    for (i, a), (j, b) in product(enumerate(us.tolist()), enumerate(vs.tolist())):
        best, _ = _best(u, v, dict(zip("bc", a, strict=True)), dict(zip("bc", b, strict=True)), 6)
        moved = found.consumed[i, j] - found.kept_forward[i, j]
        assert best <= moved
        if best < moved:
            over.append((a, b, best, moved))
    assert over == [([2, 3], [3, 2], 8, 10), ([3, 2], [2, 3], 8, 10)]


@pytest.mark.parametrize("p", [2, 4, 8])
def test_pieces_that_parts_cross_are_estimated_from_below(p: int) -> None:
    u = _operator("u", {"b": 4, "c": 6}, (4, 6), ("b", "c"))
    v = _operator("v", {"b": 4, "c": 16}, (4, 6), ("b", Part(dim="c", offset=4, extent=6)))
    us, vs = (enumerate_configurations(o, p).splits for o in (u, v))
    found = _volumes(u, v, us, vs)
    for (i, a), (j, b) in product(enumerate(us.tolist()), enumerate(vs.tolist())):
        best = _best(u, v, dict(zip("bc", a, strict=True)), dict(zip("bc", b, strict=True)), p)
        assert found.consumed[i, j] - found.kept_forward[i, j] == best[0]
        assert best[1] / 2 <= found.produced[i, j] - found.kept_backward[i, j] <= best[1]


@pytest.mark.parametrize("case", NESTED)
@pytest.mark.parametrize("p", [8, 12])
def test_an_edge_costs_the_same_in_either_direction(case: str, p: int) -> None:
    u, v = NESTED[case]
    us, vs = (enumerate_configurations(o, p).splits for o in (u, v))
    one, other = _volumes(u, v, us, vs), _volumes(v, u, vs, us)
    forward, backward = one.consumed - one.kept_forward, one.produced - one.kept_backward
    assert np.array_equal(forward, (other.produced - other.kept_backward).T)
    assert np.array_equal(backward, (other.consumed - other.kept_forward).T)
    # Footnote 2: t_x(u, v) = t_x(v, u), both ways together.
    swapped = other.consumed - other.kept_forward + other.produced - other.kept_backward
    assert np.array_equal(forward + backward, swapped.T)


@pytest.mark.parametrize("p", [2, 3, 4, 6, 8, 12])
def test_what_lies_alike_does_not_move(p: int) -> None:
    dims = {"b": 12, "h": 24, "g": 2, "n": 6}
    operator = _operator("o", dims, (12, 24, 12), ("b", "h", ("g", "n")))
    rows = enumerate_configurations(operator, p).splits
    found = _volumes(operator, operator, rows, rows)
    alike = np.arange(len(rows))
    assert not (found.consumed - found.kept_forward)[alike, alike].any()
    assert not (found.produced - found.kept_backward)[alike, alike].any()


def test_fully_connected_layers_that_alternate_move_nothing() -> None:
    # Table II: FC 1 and FC 3 n 4, c 8; FC 2 n 8, c 4. Each layer's n is the next one's c.
    net = Builder("net")
    x = net.input((128, 4096))
    for number in (1, 2, 3):
        x = net.add(dense, f"fc{number}", x, out=(("n", 4096),))
    net.add(softmax_loss, "softmax", x)
    graph = net.build()
    splits = {"fc1": (1, 4, 8), "fc2": (1, 8, 4), "fc3": (1, 4, 8)}
    for edge in graph.edges[:2]:
        rows = (np.array([splits[name]], dtype=np.int32) for name in (edge.producer, edge.consumer))
        moved = transfer_bytes(graph, edge, *edge_layouts(graph, edge, *rows))
        assert moved.forward == 0
        assert moved.backward == 0
    # Without the alternation all but a quarter of the eighth that is needed, 128 · 4096 / 4 words, stays away.
    same = (np.array([splits["fc1"]], dtype=np.int32),) * 2
    moved = transfer_bytes(graph, graph.edges[0], *edge_layouts(graph, graph.edges[0], *same))
    assert moved.forward == 0  # an eighth lies within the quarter that is held
    assert moved.backward == 4 * 128 * (4096 // 4 - 4096 // 8)


def test_an_edge_by_hand() -> None:
    # x[16, 32] from b 4 to c 4 on 4 devices: each device needs 16 x 8 and holds 4 x 8 of it, both ways.
    net = Builder("net", word_bytes=2)
    x = net.add(dense, "u", net.input((16, 8)), out=(("n", 32),))
    net.add(dense, "v", x, out=(("n", 8),))
    graph = net.build()
    rows = np.array([[4, 1, 1]], dtype=np.int32), np.array([[1, 1, 4]], dtype=np.int32)
    moved = transfer_bytes(graph, graph.edges[0], *edge_layouts(graph, graph.edges[0], *rows))
    assert (moved.forward.item(), moved.backward.item()) == (2 * (128 - 32), 2 * (128 - 32))


# -- cuts that two layouts share, from which layers are placed


@pytest.mark.parametrize("case", ["boxes", "flattened", "heads", "product of dims", "concatenation"])
def test_shared_cuts_lie_on_the_same_bounds(case: str) -> None:
    u, v = NESTED[case]
    us, vs = (enumerate_configurations(o, 8).splits for o in (u, v))
    ups = components(u.writes[0].shape, u.writes[0].axes, u.extents)
    vps = components(v.reads[0].shape, v.reads[0].axes, v.extents)
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
