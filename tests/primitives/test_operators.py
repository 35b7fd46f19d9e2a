"""Clear, add, copy and move against matrices; primitives on arrays, and the check of Eq. 13."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pase.errors import PrimitiveError
from pase.sharding.boxes import Box, Partition, blocks, whole
from pase.sharding.halos import Kernel
from pase.targets.mesh_tensorflow.primitives.data_movement import (
    add,
    adjoint_defect,
    clear,
    copy,
    evaluate,
    halo,
    move,
    sum_reduce,
)
from tests.primitives.lab import Array, Outcome, assert_is_matrix, cut, outcome, worker_sets

Place = tuple[int, Box]


@st.composite
def subsets(draw: st.DrawFn) -> tuple[Partition, Place, Place]:
    """A tensor in parts, and two boxes of one shape on two workers, or the two halves of what one holds."""
    columns = draw(st.integers(2, 5))
    held = blocks([draw(st.integers(4, 9)), columns], [2, draw(st.integers(1, 2))])
    workers = draw(st.permutations(range(len(held.boxes))))[:2]
    if draw(st.booleans()):
        rows, width = held.extents[workers[0]]
        half = rows // 2
        return held, (workers[0], ((0, half), (0, width))), (workers[0], ((half, 2 * half), (0, width)))
    shapes = [held.extents[worker] for worker in workers]
    size = [draw(st.integers(1, min(pair))) for pair in zip(*shapes, strict=True)]
    boxes = []
    for shape in shapes:
        lows = [draw(st.integers(0, n - k)) for n, k in zip(shape, size, strict=True)]
        boxes.append(tuple((low, low + k) for low, k in zip(lows, size, strict=True)))
    return held, (workers[0], boxes[0]), (workers[1], boxes[1])


def _numbers(held: Partition, place: Place) -> Array:
    """The positions of a subset among all numbers that workers hold, one worker after the other."""
    worker, box = place
    before = sum(int(np.prod(shape)) for shape in held.extents[:worker])
    own = np.arange(int(np.prod(held.extents[worker]))).reshape(held.extents[worker])
    return before + cut(own, box).reshape(-1)


def _assert_is(result: Outcome, matrix: Array) -> None:
    assert_is_matrix(result, matrix, atol=1e-14, defect=5e-15)


@settings(max_examples=5)
@given(st.data(), subsets())
def test_operators_are_their_matrices(data: st.DataObject, given_: tuple[Partition, Place, Place]) -> None:
    held, a, b = given_
    devices = data.draw(worker_sets(len(held.boxes)))
    of_a, of_b = _numbers(held, a), _numbers(held, b)
    identity = np.eye(sum(int(np.prod(shape)) for shape in held.extents))
    clear_a, clear_b, add_ab = identity.copy(), identity.copy(), identity.copy()
    clear_a[of_a, of_a] = 0
    clear_b[of_b, of_b] = 0
    add_ab[of_b, of_a] = 1
    _assert_is(outcome(held, devices, lambda _, x: clear(x, a, b)), clear_a @ clear_b)
    _assert_is(outcome(held, devices, lambda _, x: add(x, a, b)), add_ab)
    _assert_is(outcome(held, devices, lambda _, x: copy(x, a, b)), add_ab @ clear_b)
    moved = outcome(held, devices, lambda _, x: move(x, a, b))
    _assert_is(moved, clear_a @ add_ab @ clear_b)
    assert moved.operations == ["clear", "add", "clear", "clear", "add", "clear"]


def test_clearing_leaves_nothing_of_what_stood_there() -> None:
    held = blocks([4], [2])
    found = evaluate(lambda x, _: clear(x, (0, ((0, 1),))), held, [np.array([np.nan, 1.0]), np.array([2.0, 3.0])])
    assert found.forward[0].tolist() == [0.0, 1.0]
    assert found.moved_bytes == 0


@pytest.mark.parametrize(
    ("places", "message"),
    [
        (((2, ((0, 1),)), (0, ((0, 1),))), "worker 2 is none of the 2 that hold the tensor"),
        (((0, ((0, 3),)), (1, ((0, 1),))), r"is no box of worker 0's part, of shape \[2\]"),
        (((0, ((0, 2),)), (1, ((0, 1),))), r"subsets of shapes \[2\] and \[1\]"),
        (((0, ((0, 2),)), (0, ((0, 2),))), "of worker 0 overlap"),
    ],
)
def test_subsets_that_do_not_fit_are_refused(places: tuple[Place, Place], message: str) -> None:
    held = blocks([4], [2])
    with pytest.raises(PrimitiveError, match=message):
        evaluate(lambda x, _: add(x, *places), held, [np.zeros(2), np.zeros(2)])


# -- on arrays


def test_a_sum_goes_back_as_copies() -> None:
    held = Partition(shape=(3,), boxes=(whole([3]),) * 2)
    cotangent = [np.array([1.0, 2.0, 3.0])]
    found = evaluate(
        lambda x, workers: sum_reduce(x, workers([2])), held, [np.ones(3), np.full(3, 4.0)], cotangent=cotangent
    )
    assert [part.tolist() for part in found.forward] == [[5.0, 5.0, 5.0]]
    assert [part.tolist() for part in found.adjoint] == [[1.0, 2.0, 3.0]] * 2
    assert found.moved_bytes == 2 * 2 * 3 * 8
    assert found.primitives == ("sum_reduce", "broadcast")
    assert found.defect < 5e-15


def test_what_is_no_adjoint_is_told() -> None:
    x, y = [np.array([1.0, 2.0])], [np.array([3.0, 1.0])]
    assert adjoint_defect(x, [np.array([2.0, 1.0])], y, [np.array([1.0, 3.0])]) == 0
    assert adjoint_defect(x, [np.array([2.0, 1.0])], y, [np.array([3.0, 1.0])]) > 0.1
    assert adjoint_defect([np.zeros(2)], [np.zeros(2)], y, [np.zeros(2)]) == 0


@pytest.mark.parametrize(
    ("shape", "kernels", "counts"),
    [
        ((20,), [Kernel(extent=2, stride=2)], [6]),
        ((11, 9), [Kernel(extent=7, padding=(4, 2)), Kernel(extent=4, padding=(3, 0))], [2, 2]),
        ((5, 4), [Kernel(extent=3, padding=(1, 1)), Kernel(extent=1)], [2, 1]),
    ],
)
def test_the_halo_of_an_array(shape: tuple[int, ...], kernels: list[Kernel], counts: list[int]) -> None:
    x = np.random.default_rng(3).standard_normal(shape)
    padded = np.pad(x, [kernel.padding for kernel in kernels], constant_values=7.0)
    results = iter(halo(x, kernels, counts, fill=7.0))
    for at in np.ndindex(*counts):
        ranges = []
        for i, kernel, count, extent in zip(at, kernels, counts, padded.shape, strict=True):
            outputs = np.array_split(np.arange((extent - kernel.reach) // kernel.stride + 1), count)[i]
            ranges.append(slice(outputs[0] * kernel.stride, outputs[-1] * kernel.stride + kernel.reach))
        np.testing.assert_array_equal(next(results), padded[tuple(ranges)], strict=True)


def test_a_halo_needs_a_number_of_parts_for_each_dim() -> None:
    with pytest.raises(PrimitiveError, match="give each dim a number"):
        halo(np.zeros((4, 4)), [Kernel(extent=1)] * 2, [2])
