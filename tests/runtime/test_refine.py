import numpy as np
import pytest
from hypothesis import given, settings

from pase.errors import ProgramError
from pase.sharding.layouts import DeviceMesh, Layout, PlainDim, TensorDim, device_mesh, layout_of
from pase.sharding.reshard import reshard_steps
from tests.runtime.geometry import Array, distinct_dot, held, moved, numbered, transfers

Transfer = tuple[list[TensorDim], DeviceMesh, list[TensorDim], DeviceMesh]


def filled(layout: Layout, seed: int) -> list[Array]:
    """Numbers for every part, the same for its replicas."""
    numbers = np.random.default_rng(seed)
    parts = {part: position for position, part in enumerate(layout.parts)}
    values = {part: numbers.standard_normal(held(numbered(layout.shape), layout)[i].shape) for part, i in parts.items()}
    return [values[part] for part in layout.parts]


@settings(max_examples=500, deadline=None)
@given(transfers())
def test_every_device_ends_up_with_its_box(transfer: Transfer) -> None:
    source, target = layout_of(transfer[1], transfer[0]), layout_of(transfer[3], transfer[2])
    tensor = numbered(source.shape)
    results = moved(held(tensor, source), reshard_steps(source, target), fill=-1.0)
    for result, expected in zip(results, held(tensor, target, fill=-1.0), strict=True):
        np.testing.assert_array_equal(result.reshape(expected.shape), expected)


@settings(max_examples=300, deadline=None)
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
