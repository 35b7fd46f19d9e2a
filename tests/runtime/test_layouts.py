import pytest

from pase.errors import ProgramError
from pase.sharding.layouts import DeviceMesh, PlainDim, WindowDim, device_mesh, layout_of, shifted


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


def test_windows_overlap_and_stick_out() -> None:
    # Five outputs would not divide: six windows of three points with stride two, one point of padding.
    window = WindowDim(out="h", out_extent=6, kernel="r", kernel_extent=3, extent=11, stride=2, pad=1)
    layout = layout_of(DeviceMesh((("h", 3),), (0, 1, 2)), [window])
    assert [box for (box,) in layout.boxes] == [(-1, 4), (3, 8), (7, 12)]
    assert len(set(layout.parts)) == 3


def test_a_split_kernel_moves_the_window_and_counts_as_a_part() -> None:
    window = WindowDim(out="h", out_extent=4, kernel="r", kernel_extent=3, extent=8, dilation=2)
    layout = layout_of(DeviceMesh((("r", 3),), (2, 0, 1)), [window])
    assert [box for (box,) in layout.boxes] == [(0, 4), (2, 6), (4, 8)]
    assert len(set(layout.parts)) == 3


@pytest.mark.parametrize(
    ("axes", "devices", "message"),
    [
        ([("b", 3)], None, r"split in b=3 = 3 parts, which do not divide 4 devices"),
        ([("b", 2), ("b", 2)], None, r"are no mesh; name each dim once"),
        ([("b", 0)], None, r"are no mesh"),
        ([("b", 2.5)], None, r"are no mesh"),
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


def test_windows_of_parts_of_other_sizes() -> None:
    mesh = device_mesh("pool", [("h", 2)], 2)
    dim = WindowDim(out="h", out_extent=5, kernel="r", kernel_extent=2, extent=10, stride=2)
    assert [box for (box,) in layout_of(mesh, [dim], layer="pool").boxes] == [(0, 6), (6, 10)]


def test_shifted_is_in_the_coordinates_of_the_whole() -> None:
    layout = layout_of(device_mesh("x", [("c", 2)], 2), [PlainDim("b", 3), PlainDim("c", 4)])
    moved = shifted(layout, (3, 10), 1, 5)
    assert moved.boxes == (((0, 3), (5, 7)), ((0, 3), (7, 9)))
    assert moved.shape == (3, 10)
