"""Re-sharding without a framework: boxes, layouts, movements of pieces and their adjoints, on numpy arrays."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pase.errors import ProgramError
from pase.sharding.boxes import Box, extents, intersection, num_points, offsets, whole
from pase.sharding.layouts import (
    HOST,
    DeviceMesh,
    Layout,
    PlainDim,
    TensorDim,
    WindowDim,
    device_mesh,
    layout_of,
    shifted,
)
from pase.sharding.reshard import Piece, ReshardStep, pieces, point_to_point, reshard_steps
from tests.runtime.geometry import Array, distinct_dot, held, moved, numbered, transfers

RANGES = st.tuples(st.integers(-4, 6), st.integers(1, 5)).map(lambda pair: (pair[0], pair[0] + pair[1]))


def boxes(rank: int) -> st.SearchStrategy[Box]:
    return st.tuples(*[RANGES] * rank)


def points(box: Box) -> set[tuple[int, ...]]:
    return set(product(*(range(low, high) for low, high in box)))


@given(st.integers(1, 3).flatmap(lambda rank: st.tuples(boxes(rank), boxes(rank))))
def test_intersection_is_that_of_the_sets_of_points(pair: tuple[Box, Box]) -> None:
    first, second = pair
    shared = intersection(first, second)
    assert (points(shared) if shared else set()) == points(first) & points(second)
    assert intersection(second, first) == shared


@given(st.integers(0, 3).flatmap(boxes))
def test_counts_are_those_of_the_set_of_points(box: Box) -> None:
    assert num_points(box) == len(points(box))
    assert whole(extents(box)) == tuple((0, high - low) for low, high in box)
    assert offsets(box, box) == (0,) * len(box)


def test_parts_are_row_major_over_the_axes_and_then_the_replicas() -> None:
    mesh = device_mesh("layer", [("b", 2), ("n", 1), ("c", 3)], 12)
    assert mesh.axes == (("b", 2), ("c", 3), ("replica", 2))
    assert mesh.coordinates[7] == {"b": 1, "c": 0, "replica": 1}
    layout = layout_of(mesh, [PlainDim("c", 6), PlainDim("n", 5)])
    assert layout.boxes[2] == layout.boxes[3] == layout.boxes[8] == ((2, 4), (0, 5))
    assert layout.parts[2] == layout.parts[3] == layout.parts[8] != layout.parts[4]
    assert layout.shape == (6, 5)


def test_a_dim_named_replica_keeps_its_axis() -> None:
    mesh = device_mesh("layer", [("replica", 2)], 4)
    assert mesh.axes == (("replica", 2), ("replica_", 2))
    assert mesh.has_replicas


@pytest.mark.parametrize(
    ("axes", "window", "boxes"),
    [
        # Six windows of three points with stride two, one point of padding: they overlap and stick out.
        ((("h", 3),), {"out": 6, "kernel": 3, "extent": 11, "stride": 2, "pad": 1}, [(-1, 4), (3, 8), (7, 12)]),
        # A split kernel moves the window and counts as a part.
        ((("r", 3),), {"out": 4, "kernel": 3, "extent": 8, "dilation": 2}, [(0, 4), (2, 6), (4, 8)]),
        # Parts of other sizes.
        ((("h", 2),), {"out": 5, "kernel": 2, "extent": 10, "stride": 2}, [(0, 6), (6, 10)]),
    ],
)  # fmt: skip
def test_windows_of_parts(axes: tuple[tuple[str, int]], window: dict[str, int], boxes: list[tuple[int, int]]) -> None:
    extents = {f"{name}_extent": window[name] for name in ("out", "kernel")}
    others = {name: number for name, number in window.items() if name not in ("out", "kernel")}
    dim = WindowDim(out="h", kernel="r", **extents, **others)
    layout = layout_of(DeviceMesh(axes, tuple(range(len(boxes)))), [dim])
    assert [box for (box,) in layout.boxes] == boxes
    assert len(set(layout.parts)) == len(boxes)


@pytest.mark.parametrize(
    ("axes", "devices", "message"),
    [
        ([("b", 3)], None, r"split in b=3 = 3 parts, which do not divide 4 devices"),
        ([("b", 2), ("b", 2)], None, r"are not a mesh; name each dim once"),
        ([("b", 0)], None, r"are not a mesh"),
        ([("b", 2.5)], None, r"are not a mesh"),
        ([("b", 2)], [0, 1, 2], r"must name each of 0 to 3 once"),
        ([("b", 2)], [0, 1, 2, 2], r"devices \[0, 1, 2, 2\] must name each"),
    ],
)
def test_what_is_no_mesh_is_refused(axes: list[tuple[str, int]], devices: list[int] | None, message: str) -> None:
    with pytest.raises(ProgramError, match=message):
        device_mesh("fc1", axes, 4, devices)


def test_a_split_that_does_not_divide_leaves_the_first_parts_a_point_more() -> None:
    mesh = device_mesh("fc1", [("b", 4)], 4)
    assert [box for (box,) in layout_of(mesh, [PlainDim("b", 6)], layer="fc1").boxes] == [
        (0, 2),
        (2, 4),
        (4, 5),
        (5, 6),
    ]
    with pytest.raises(ProgramError, match=r"layer 'fc1' splits b = 3 in 4 parts; choose at most as many as points"):
        layout_of(mesh, [PlainDim("b", 3)], layer="fc1")


def test_shifted_is_in_the_coordinates_of_the_whole() -> None:
    layout = layout_of(device_mesh("x", [("c", 2)], 2), [PlainDim("b", 3), PlainDim("c", 4)])
    moved = shifted(layout, (3, 10), 1, 5)
    assert moved.boxes == (((0, 3), (5, 7)), ((0, 3), (7, 9)))
    assert moved.shape == (3, 10)


Transfer = tuple[list[TensorDim], DeviceMesh, list[TensorDim], DeviceMesh]


def elements(layout: Layout) -> dict[int, set[float]]:
    """The numbers of the elements that each device holds; 0 is padding."""
    slices = held(numbered(layout.shape), layout)
    return {device: set(x.ravel()) - {0.0} for device, x in zip(layout.devices, slices, strict=True)}


@settings(max_examples=120)
@given(transfers())
def test_no_device_gets_what_it_has_and_every_device_gets_what_it_lacks(transfer: Transfer) -> None:
    source, target = layout_of(transfer[1], transfer[0]), layout_of(transfer[3], transfer[2])
    steps = reshard_steps(source, target)
    has, needs = elements(source), elements(target)
    lacking = sum(len(needs[device] - has[device]) for device in needs)
    moved = sum(sum(point_to_point(hop).values()) for hop in steps)
    assert moved >= lacking
    # A part comes from one replica: with replicas of parts in other places, some of it may be there already.
    if len(steps) == 1 and len(set(source.parts)) == len(source.parts):
        assert moved == lacking


def test_the_replica_on_the_same_device_is_taken_else_the_nearest() -> None:
    source = layout_of(device_mesh("a", [("b", 2)], 4, [0, 3, 1, 2]), [PlainDim("b", 4)])
    target = layout_of(device_mesh("b", [], 4, [0, 1, 2, 3]), [PlainDim("b", 4)])
    # Devices 0 and 3 hold the first half, 1 and 2 the second.
    assert pieces(ReshardStep(source, target)) == (
        (Piece(0, ((0, 2),)), Piece(2, ((2, 4),))),
        (Piece(0, ((0, 2),)), Piece(2, ((2, 4),))),
        (Piece(1, ((0, 2),)), Piece(3, ((2, 4),))),
        (Piece(1, ((0, 2),)), Piece(3, ((2, 4),))),
    )
    assert sum(point_to_point(ReshardStep(source, target)).values()) == 8


def test_traffic_with_the_host_does_not_count() -> None:
    source = layout_of(DeviceMesh((), (HOST,)), [PlainDim("b", 4)])
    target = layout_of(device_mesh("b", [("b", 2)], 2), [PlainDim("b", 4)])
    assert sum(point_to_point(ReshardStep(source, target)).values()) == 0


Transfer = tuple[list[TensorDim], DeviceMesh, list[TensorDim], DeviceMesh]


def filled(layout: Layout, seed: int) -> list[Array]:
    """Numbers for every part, the same for its replicas."""
    numbers = np.random.default_rng(seed)
    parts = {part: position for position, part in enumerate(layout.parts)}
    values = {part: numbers.standard_normal(held(numbered(layout.shape), layout)[i].shape) for part, i in parts.items()}
    return [values[part] for part in layout.parts]


@settings(max_examples=200)
@given(transfers())
def test_every_device_ends_up_with_its_box(transfer: Transfer) -> None:
    source, target = layout_of(transfer[1], transfer[0]), layout_of(transfer[3], transfer[2])
    tensor = numbered(source.shape)
    results = moved(held(tensor, source), reshard_steps(source, target), fill=-1.0)
    for result, expected in zip(results, held(tensor, target, fill=-1.0), strict=True):
        np.testing.assert_array_equal(result.reshape(expected.shape), expected)


@settings(max_examples=120)
@given(transfers())
def test_the_way_back_is_the_adjoint(transfer: Transfer) -> None:
    source, target = layout_of(transfer[1], transfer[0]), layout_of(transfer[3], transfer[2])
    forth = reshard_steps(source, target)
    back = tuple(hop.adjoint for hop in reversed(forth))
    x, y = filled(source, 1), filled(target, 2)
    there, home = moved(x, forth), moved(y, back)
    home = [part.reshape(own.shape) for part, own in zip(home, x, strict=True)]
    assert distinct_dot(there, y, target) == pytest.approx(distinct_dot(x, home, source), rel=1e-12, abs=1e-9)
    # Replicas of a gradient are equal.
    for part, position in {part: i for i, part in enumerate(source.parts)}.items():
        for i in (i for i, other in enumerate(source.parts) if other == part):
            np.testing.assert_array_equal(home[i], home[position])


def test_leading_splits_are_seen_through_in_one_movement() -> None:
    source = layout_of(device_mesh("pool", [("c", 4)], 4), [PlainDim("b", 2), PlainDim("c", 8), PlainDim("h", 9)])
    target = layout_of(device_mesh("fc", [("k", 4)], 4), [PlainDim("b", 2), PlainDim("k", 72)])
    (hop,) = reshard_steps(source, target)
    assert hop.source.boxes == hop.target.boxes


def test_what_has_no_common_dims_goes_by_a_layout_in_which_the_reshape_is_local() -> None:
    # A third of four channels is no box of channels and rows once the rows are split.
    source = layout_of(device_mesh("pool", [("h", 3)], 3), [PlainDim("c", 4), PlainDim("h", 3)])
    target = layout_of(device_mesh("fc", [("k", 3)], 3), [PlainDim("k", 12)])
    assert len(reshard_steps(source, target)) == 3


def test_scalars_are_seen_with_any_number_of_dims() -> None:
    mesh = device_mesh("a", [], 2)
    source, target = layout_of(mesh, []), layout_of(mesh, [PlainDim("b", 1), PlainDim("c", 1)])
    for first, second in ((source, target), (target, source)):
        (result, _) = moved([np.array(7.0)] * 2, reshard_steps(first, second))
        assert result.ravel() == [7.0]


def test_other_sizes_are_refused() -> None:
    source = layout_of(device_mesh("a", [], 2), [PlainDim("b", 6)])
    target = layout_of(device_mesh("b", [], 2), [PlainDim("b", 4)])
    with pytest.raises(ProgramError, match=r"a tensor of shape \[6\] cannot be read as \[4\]"):
        reshard_steps(source, target)
