"""Every primitive: what arrives where, and the adjoint test of Eq. 13, over random shapes, partitions and workers."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pase.errors import PrimitiveError
from pase.sharding.boxes import Partition, blocks, copies, partition
from pase.targets.mesh_tensorflow.primitives.compat import mtf, tf
from pase.targets.mesh_tensorflow.primitives.data_movement import (
    all_reduce,
    all_to_all,
    broadcast,
    gather,
    scatter,
    send_receive,
    sum_reduce,
)
from pase.targets.mesh_tensorflow.primitives.parts import Distributed, from_parts
from tests.primitives.lab import (
    NUM_DEVICES,
    TOLERANCE,
    Array,
    Lab,
    assert_coherent,
    assert_parts,
    covers,
    cut,
    dtypes,
    outcome,
    shapes,
    together,
    worker_sets,
)

few = settings(max_examples=15)


@few
@given(st.data(), shapes, dtypes)
def test_all_reduce_is_self_adjoint(data: st.DataObject, shape: list[int], dtype: Any) -> None:
    """Workers that hold the same box get its sum, as do the gradients; 2 (k-1) n bytes go for each group of k."""
    parts = data.draw(covers(shape))
    of = [*range(len(parts.boxes))]
    of += data.draw(st.lists(st.sampled_from(of), max_size=NUM_DEVICES - len(of)))
    held = partition(shape, [parts.boxes[i] for i in of])
    result = outcome(held, data.draw(worker_sets(len(of))), lambda _, x: all_reduce(x), dtype=dtype)
    same = [[j for j, other in enumerate(held.boxes) if other == box] for box in held.boxes]
    for values, found in ((result.x, result.forward), (result.y, result.adjoint)):
        for members, one in zip(same, found, strict=True):
            expected = np.sum([values[j] for j in members], axis=0)
            np.testing.assert_allclose(one, expected, rtol=0, atol=20 * TOLERANCE[dtype], strict=True)
    assert_coherent(result, dtype)
    assert result.operations == ["all_reduce", "all_reduce"]
    once = sum(
        2 * (len(members) - 1) * values.size / len(members) for members, values in zip(same, result.x, strict=True)
    )
    assert result.moved_bytes == pytest.approx(2 * once * np.dtype(dtype).itemsize)


@settings(max_examples=40)
@given(st.data(), shapes, dtypes)
def test_all_to_all(data: st.DataObject, shape: list[int], dtype: Any) -> None:
    held, target = data.draw(covers(shape)), data.draw(covers(shape))
    devices, to = data.draw(worker_sets(len(held.boxes))), data.draw(worker_sets(len(target.boxes)))
    result = outcome(held, devices, lambda lab, x: all_to_all(x, lab.workers(to), target), dtype=dtype)
    assert_parts(result.forward, [cut(together(result.x, held), box) for box in target.boxes])
    assert_parts(result.adjoint, [cut(together(result.y, target), box) for box in held.boxes])
    assert_coherent(result, dtype)
    assert result.operations == ["all_to_all", "all_to_all"]
    # What a worker gets and did not have, there and back: element by element.
    before, after = owners(held, devices), owners(target, to)
    assert result.moved_bytes == 2 * int((before != after).sum()) * np.dtype(dtype).itemsize


def owners(held: Partition, devices: list[int]) -> Array:
    """The device of each element."""
    return together([np.full(shape, device) for shape, device in zip(held.extents, devices, strict=True)], held)


def test_boxes_that_form_no_grid() -> None:
    """Five boxes around each other: no cut goes through from side to side."""
    pinwheel = partition(
        [3, 3], [((0, 1), (0, 2)), ((0, 2), (2, 3)), ((2, 3), (1, 3)), ((1, 3), (0, 1)), ((1, 2), (1, 2))]
    )
    assert pinwheel.is_cover
    for source, target in (
        (pinwheel, blocks([3, 3], [1, 1])),
        (pinwheel, blocks([3, 3], [2, 2])),
        (pinwheel, pinwheel),
    ):
        devices, to = range(len(source.boxes)), range(len(target.boxes))
        result = outcome(source, devices, lambda lab, x: all_to_all(x, lab.workers(to), target))  # noqa: B023
        assert_parts(result.forward, [cut(together(result.x, source), box) for box in target.boxes])
        assert_parts(result.adjoint, [cut(together(result.y, target), box) for box in source.boxes])
        assert_coherent(result, np.float64)


# ------------------------------------------------------------------------------------------- how primitives compose


def test_all_reduce_is_sum_reduce_then_broadcast() -> None:
    held, devices = copies([3, 5], 4), [3, 0, 2, 1]
    composed = outcome(held, devices, lambda lab, x: broadcast(sum_reduce(x, lab.workers([0])), x.mesh))
    at_once = outcome(held, devices, lambda _, x: all_reduce(x))
    for one, other in ((composed.forward, at_once.forward), (composed.adjoint, at_once.adjoint)):
        np.testing.assert_allclose(one, other, rtol=1e-14)
    assert composed.operations == ["sum_reduce", "broadcast", "sum_reduce", "broadcast"]


def test_all_to_all_is_gather_then_scatter() -> None:
    held, target = blocks([6, 5], [3, 1]), blocks([6, 5], [2, 2])
    devices, to = [0, 1, 2], [2, 3, 4, 5]
    composed = outcome(held, devices, lambda lab, x: scatter(gather(x, lab.workers([8])), lab.workers(to), target))
    at_once = outcome(held, devices, lambda lab, x: all_to_all(x, lab.workers(to), target))
    assert_parts(composed.forward, at_once.forward)
    assert_parts(composed.adjoint, at_once.adjoint)


def test_the_adjoint_of_a_copy_adds() -> None:
    """C_{a→b} keeps the original: where both are used, the gradient is the sum of both (Appendix A.2)."""
    held = copies([4], 1)
    value, first, second = (np.random.default_rng(i).standard_normal(4) for i in range(3))
    with tf.Graph().as_default():
        lab = Lab()
        x = lab.put(lab.workers([0]), held, [value])
        copy = send_receive(x, lab.workers([1]))
        dy, dx = lab.put(copy.mesh, held, [second]), lab.put(x.mesh, held, [first])
        original = Distributed(x.tensor * 1.0, held)
        (gradient,) = mtf.gradients([original.tensor, copy.tensor], [x.tensor], grad_ys=[dx.tensor, dy.tensor])
        ((found,),) = lab.get(Distributed(gradient, held))
    np.testing.assert_allclose(found, first + second, rtol=1e-15)


def test_operations_on_elements_stand_between_primitives() -> None:
    """Parts of different shapes: what stands behind a part does not leak into results or gradients."""
    held, target = blocks([7], [3]), blocks([7], [2])
    result = outcome(
        held,
        [0, 1, 2],
        lambda lab, x: all_to_all(Distributed(mtf.exp(x.tensor) + 1.0, held), lab.workers([3, 4]), target),
    )
    whole = together(result.x, held)
    assert_parts(result.forward, [cut(np.exp(whole) + 1, box) for box in target.boxes])
    expected = together(result.y, target) * np.exp(whole)
    np.testing.assert_allclose(np.concatenate(result.adjoint), expected, rtol=1e-14)


def test_workers_in_a_grid_with_several_axes() -> None:
    held, target = blocks([4, 6], [2, 3]), blocks([4, 6], [3, 2])
    result = outcome(
        held,
        [5, 4, 3, 2, 1, 0],
        lambda lab, x: all_to_all(x, lab.workers(range(6), [("b", 3), ("h", 2)]), target),
        axes=[("h", 2), ("w", 3)],
    )
    assert_parts(result.forward, [cut(together(result.x, held), box) for box in target.boxes])
    assert_coherent(result, np.float64)


# ----------------------------------------------------------------------------------------------------- what is refused


def test_what_does_not_fit_is_refused() -> None:
    with tf.Graph().as_default():
        lab = Lab()
        two, one = lab.workers([0, 1]), lab.workers([2])
        halves, both = blocks([4], [2]), copies([4], 2)
        x = lab.put(two, halves, [np.zeros(2), np.zeros(2)])
        y = lab.put(two, both, [np.zeros(4), np.zeros(4)])
        with pytest.raises(PrimitiveError, match=r"send_receive: 2 parts for the 1 workers of 'workers1'"):
            send_receive(x, one)
        with pytest.raises(PrimitiveError, match=r"scatter: one worker must hold the whole tensor; 2 hold"):
            scatter(x, two, halves)
        with pytest.raises(PrimitiveError, match=r"all_to_all: the partition is of a tensor of shape \[5\], not \[4\]"):
            all_to_all(x, two, blocks([5], [2]))
        with pytest.raises(PrimitiveError, match=r"gather: the boxes .* must hold every element of \[4\] once"):
            gather(y, one)
        with pytest.raises(PrimitiveError, match=r"broadcast: the roots \[2\] must be workers 0 to 1 of x"):
            broadcast(x, one, [2])
        with pytest.raises(PrimitiveError, match=r"sum_reduce: workers hold .*; every box must be one of the targets'"):
            sum_reduce(x, one)
        with pytest.raises(PrimitiveError, match=r"worker 1 holds a part of shape \[2\], not \[3\]"):
            from_parts(two, halves, [tf.zeros([2]), tf.zeros([3])])
        with pytest.raises(
            PrimitiveError, match=r"3 parts of a partition for 2 workers on mesh 'workers0', which has 2"
        ):
            from_parts(two, halves, [tf.zeros([2])] * 3)
        overlapping = partition([4], [((0, 3),), ((1, 4),)])
        with pytest.raises(PrimitiveError, match=r"all_reduce: parts .* overlap"):
            all_reduce(lab.put(two, overlapping, [np.zeros(3), np.zeros(3)]))


def test_what_is_no_partition_is_refused() -> None:
    with pytest.raises(PrimitiveError, match=r"shape \[\] cannot be parted; give a scalar the shape \[1\]"):
        copies([], 2)
    with pytest.raises(PrimitiveError, match=r"worker 1 holds \[\(3, 5\)\], which is no part of .* shape \[4\]"):
        partition([4], [((0, 3),), ((3, 5),)])
    with pytest.raises(PrimitiveError, match="needs at least one worker"):
        partition([4], [])
    with pytest.raises(PrimitiveError, match=r"parts \[2\] for a tensor of shape \[4, 4\]; give each dim a number"):
        blocks([4, 4], [2])
