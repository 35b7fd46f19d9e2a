from hypothesis import given, settings

from pase.sharding.layouts import HOST, DeviceMesh, Layout, PlainDim, TensorDim, device_mesh, layout_of
from pase.sharding.reshard import Piece, ReshardStep, pieces, point_to_point, reshard_steps
from tests.runtime.geometry import held, numbered, transfers

Transfer = tuple[list[TensorDim], DeviceMesh, list[TensorDim], DeviceMesh]


def elements(layout: Layout) -> dict[int, set[float]]:
    """The numbers of the elements that each device holds; 0 is padding."""
    slices = held(numbered(layout.shape), layout)
    return {device: set(x.ravel()) - {0.0} for device, x in zip(layout.devices, slices, strict=True)}


@settings(max_examples=300, deadline=None)
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
