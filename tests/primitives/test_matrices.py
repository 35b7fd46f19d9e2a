"""Every primitive against a matrix that is put together from the paper's blocks; the adjoint is the transposed matrix.

The memory of all workers is one vector, part after part. A copy C_{a→b} is S_{a→b} K_b (Eq. 5, 6), a halo exchange
K_T C_U C_E C_P K_S (Eq. 10); what is out of place has the rows of the new memory alone.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pase.errors import PrimitiveError
from pase.sharding.boxes import Box, Partition, blocks, copies, num_points, partition
from pase.sharding.halos import Kernel, buffers_of, halo_buffers
from pase.targets.mesh_tensorflow.primitives.compat import mtf, tf
from pase.targets.mesh_tensorflow.primitives.data_movement import (
    all_reduce,
    all_to_all,
    allocate,
    broadcast,
    gather,
    halo_exchange,
    scatter,
    send_receive,
    sum_reduce,
    windows,
)
from pase.targets.mesh_tensorflow.primitives.parts import Distributed, from_parts
from tests.primitives.lab import (
    NUM_DEVICES,
    Array,
    Lab,
    Outcome,
    assert_coherent,
    assert_is_matrix,
    assert_parts,
    covers,
    cut,
    outcome,
    together,
    worker_sets,
)

Point = tuple[int, ...]


def points(box: Box) -> list[Point]:
    """The coordinates of a box's elements, row-major."""
    return list(product(*(range(*limits) for limits in box)))


def memory(boxes: Sequence[Box]) -> list[tuple[int, Point]]:
    """The elements that workers hold, (worker, coordinates), in the order in which they stand in the vector."""
    return [(worker, point) for worker, box in enumerate(boxes) for point in points(box)]


def copying(source: Sequence[Box], target: Sequence[Box], copied: Callable[[int, int, Point], bool]) -> Array:
    """The matrix of copies C_{a→b}, one below the other: a row for each element of the target.

    copied: whether a worker of the target has its copy of an element from a worker of the source.
    """
    columns, rows = memory(source), memory(target)
    matrix = np.zeros((len(rows), len(columns)))
    for i, (to, wanted) in enumerate(rows):
        for j, (sender, point) in enumerate(columns):
            matrix[i, j] = point == wanted and copied(sender, to, point)
    return matrix


def always(_: int, __: int, ___: Point) -> bool:
    return True


def assert_is(result: Outcome, matrix: Array) -> None:
    assert_is_matrix(result, matrix, atol=1e-13, defect=1e-14)


def moved_bytes(
    matrix: Array, source: Sequence[Box], at: Sequence[int], target: Sequence[Box], to: Sequence[int]
) -> int:
    """Bytes there and back, as float64: the entries of a matrix between elements on two devices."""
    column = np.array([at[worker] for worker, _ in memory(source)])
    row = np.array([to[worker] for worker, _ in memory(target)])
    return int(2 * 8 * matrix[row[:, None] != column[None, :]].sum())


@st.composite
def overlapping(draw: st.DrawFn, shape: Sequence[int]) -> Partition:
    """Any boxes of a tensor: they overlap, are equal, empty, or leave elements out."""
    boxes = []
    for _ in range(draw(st.integers(1, 5))):
        box = []
        for extent in shape:
            low = draw(st.integers(0, extent))
            box.append((low, draw(st.integers(low, extent))))
        boxes.append(tuple(box))
    return partition(shape, boxes)


shapes = st.lists(st.integers(1, 4), min_size=1, max_size=3)


@st.composite
def moves(draw: st.DrawFn, name: str) -> tuple[Partition, Sequence[Box], Callable[..., Any], Callable[..., bool]]:
    """Of a primitive: what workers hold, what the result's are to hold, the call, and who has a copy from whom."""
    shape = draw(shapes)
    if name == "broadcast":
        # Eq. 8 for several roots; a worker without one holds nothing.
        held = draw(overlapping(shape))
        roots = draw(st.lists(st.none() | st.integers(0, len(held.boxes) - 1), min_size=1, max_size=6))
        nothing: Box = ((0, 0),) * len(shape)
        boxes = [nothing if root is None else held.boxes[root] for root in roots]
        return held, boxes, lambda x, to: broadcast(x, to, roots), lambda sender, to, _: sender == roots[to]
    if name == "send_receive":
        held = draw(overlapping(shape))
        return held, held.boxes, send_receive, lambda sender, to, _: sender == to
    if name == "gather":
        return draw(covers(shape)), copies(shape, 1).boxes, gather, always
    held, target = copies(shape, 1) if name == "scatter" else draw(covers(shape)), draw(overlapping(shape))
    function = scatter if name == "scatter" else all_to_all
    return held, target.boxes, lambda x, to: function(x, to, target), always


ADJOINTS = {"all_to_all": "all_to_all", "broadcast": "sum_reduce", "gather": "scatter", "scatter": "gather"}


@pytest.mark.parametrize("name", [*ADJOINTS, "send_receive"])
@settings(max_examples=8)
@given(st.data())
def test_copies_of_parts_that_overlap(name: str, data: st.DataObject) -> None:
    held, target, call, copied = data.draw(moves(name))
    at, to = data.draw(worker_sets(len(held.boxes))), data.draw(worker_sets(len(target)))
    result = outcome(held, at, lambda lab, x: call(x, lab.workers(to)))
    matrix = copying(held.boxes, target, copied)
    assert_is(result, matrix)
    assert result.operations == [name, ADJOINTS.get(name, name)]
    assert result.moved_bytes == moved_bytes(matrix, held.boxes, at, target, to)


@settings(max_examples=12)
@given(st.data(), shapes)
def test_sum_reduce_and_all_reduce(data: st.DataObject, shape: list[int]) -> None:
    # Some parts are held by several workers; empty ones, which have no elements, once.
    filled = [box for box in data.draw(covers(shape)).boxes if all(low < high for low, high in box)]
    held = partition(
        shape, [*filled, *data.draw(st.lists(st.sampled_from(filled), max_size=NUM_DEVICES - len(filled)))]
    )
    target = partition(shape, filled)
    devices = data.draw(worker_sets(len(held.boxes)))
    to = data.draw(worker_sets(len(filled)))
    reduction = copying(held.boxes, target.boxes, always)
    assert_is(outcome(held, devices, lambda lab, x: sum_reduce(x, lab.workers(to), target)), reduction)
    # R* = B, and A = B R.
    copied = copying(target.boxes, held.boxes, always)
    np.testing.assert_array_equal(reduction.T, copied)
    result = outcome(held, devices, lambda _, x: all_reduce(x))
    assert_is(result, copied @ reduction)
    assert result.operations == ["all_reduce", "all_reduce"]
    # There and back 2 (k-1) n bytes for each group of k.
    groups = Counter(held.boxes)
    assert result.moved_bytes == 2 * 8 * sum(2 * (k - 1) * num_points(box) for box, k in groups.items())


PINWHEEL = partition([3, 3], [((0, 1), (0, 2)), ((0, 2), (2, 3)), ((2, 3), (1, 3)), ((1, 3), (0, 1)), ((1, 2), (1, 2))])
"""Five boxes around each other: no cut goes through from side to side."""


@pytest.mark.parametrize("target", [blocks([3, 3], [1, 1]), blocks([3, 3], [2, 2]), PINWHEEL])
def test_boxes_that_form_no_grid(target: Partition) -> None:
    result = outcome(PINWHEEL, range(5), lambda lab, x: all_to_all(x, lab.workers(range(len(target.boxes))), target))
    assert_is(result, copying(PINWHEEL.boxes, target.boxes, always))


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


# -- the halo exchange in its five operators


def clearing(size: int, places: Sequence[int]) -> Array:
    matrix = np.eye(size)
    matrix[places, places] = 0
    return matrix


def copy_in_place(size: int, source: Sequence[int], target: Sequence[int]) -> Array:
    """S_{a→b} K_b, of several pairs that do not get in each other's way."""
    adding = np.eye(size)
    adding[target, source] += 1
    return adding @ clearing(size, target)


@pytest.mark.parametrize(
    ("extent", "kernel", "owned", "outputs"),
    [
        (11, Kernel(extent=5, padding=(2, 2)), [4, 8], [4, 8]),
        (11, Kernel(extent=5), [4, 8], [3, 5]),
        (10, Kernel(extent=2, stride=2), [5], [3]),
        (9, Kernel(extent=3, padding=(1, 1)), [2, 3], [5, 7]),
        (9, Kernel(extent=3, dilation=2), [7], [1]),
    ],
    ids=["B2", "B3", "5 rows as 3 + 2", "unbalanced", "unbalanced, dilated"],
)
def test_halo_exchange(extent: int, kernel: Kernel, owned: list[int], outputs: list[int]) -> None:
    """H = K_T C_U C_E C_P K_S: of every worker, with room to send and to receive beside the buffers (Eq. 10)."""

    def ranges(cuts: list[int], end: int) -> list[range]:
        return [range(a, b) for a, b in zip([0, *cuts], [*cuts, end], strict=True)]

    num_outputs = (extent + sum(kernel.padding) - (kernel.extent - 1) * kernel.dilation - 1) // kernel.stride + 1
    own, computed = ranges(owned, extent), ranges(outputs, num_outputs)
    reads = [
        {
            o * kernel.stride - kernel.padding[0] + k
            for o in out
            for k in range((kernel.extent - 1) * kernel.dilation + 1)
        }
        for out in computed
    ]
    held = [sorted({*mine, *(read & {*range(extent)})}) for mine, read in zip(own, reads, strict=True)]
    at = {(w, p): i for i, (w, p) in enumerate((w, p) for w, row in enumerate(held) for p in row)}
    halos = [(w, p) for w, p in at if p not in own[w]]
    bulk_of = {p: (w, p) for w, mine in enumerate(own) for p in mine}
    size = len(at) + 2 * len(halos)
    to_send = [len(at) + i for i in range(len(halos))]
    received = [len(at) + len(halos) + i for i in range(len(halos))]
    clear = clearing(size, [*to_send, *received])
    pack = copy_in_place(size, [at[bulk_of[p]] for _, p in halos], to_send)
    exchange = copy_in_place(size, to_send, received)
    unpack = copy_in_place(size, received, [at[halo] for halo in halos])
    matrix = (clear @ unpack @ exchange @ pack @ clear)[: len(at), : len(at)]
    boxes = [((mine.start, mine.stop),) for mine in own]
    buffers = buffers_of(partition([extent], boxes), [kernel], [((out.start, out.stop),) for out in computed])
    result = outcome(buffers, range(len(own)), lambda _, x: halo_exchange(x))
    assert_is(result, matrix)
    assert result.moved_bytes == 2 * 8 * len(halos)


# -- any boxes


@settings(max_examples=6)
@given(st.data(), st.lists(st.integers(2, 6), min_size=1, max_size=2))
def test_windows_of_any_boxes(data: st.DataObject, shape: list[int]) -> None:
    """Exchanged halos hold what an all-to-all takes straight to the windows, there and back, for as many bytes."""
    kernels = [
        Kernel(extent=k, stride=data.draw(st.integers(1, 2)), padding=(data.draw(st.integers(0, 1)), 1))
        for k in (data.draw(st.integers(1, 3)) for _ in shape)
    ]
    held = data.draw(covers(shape))
    extents = [kernel.num_outputs(n) for kernel, n in zip(kernels, shape, strict=True)]
    outputs = []
    for _ in held.boxes:
        box = []
        for extent in extents:
            low = data.draw(st.integers(0, extent - 1))
            box.append((low, data.draw(st.integers(low + 1, extent))))
        outputs.append(tuple(box))
    buffers = buffers_of(held, kernels, outputs)
    devices = data.draw(worker_sets(len(held.boxes)))
    exchanged = outcome(held, devices, lambda _, x: windows(halo_exchange(allocate(x, buffers)), fill=2.0))
    straight = outcome(held, devices, lambda _, x: all_to_all(x, x.mesh, buffers.windows, fill=2.0))
    assert [part.shape for part in exchanged.forward] == [
        tuple((high - low - 1) * k.stride + k.reach for (low, high), k in zip(box, kernels, strict=True))
        for box in outputs
    ]
    for one, other in ((exchanged.forward, straight.forward), (exchanged.adjoint, straight.adjoint)):
        for part, same in zip(one, other, strict=True):
            np.testing.assert_allclose(part, same, rtol=0, atol=1e-13, strict=True)
    assert straight.crossed_bytes == straight.moved_bytes <= exchanged.moved_bytes


def test_balanced_parts_are_the_default() -> None:
    held = blocks([10, 9], [2, 3])
    kernels = [Kernel(extent=2, stride=2), Kernel(extent=3, padding=(1, 1))]
    assert buffers_of(held, kernels) == halo_buffers([10, 9], kernels, [2, 3])
    # Rows of 7 and 3, which compute 3 and 2 of the 5 that there are.
    assert [
        region.output for (region,) in buffers_of(partition([10], [((0, 7),), ((7, 10),)]), kernels[:1]).workers
    ] == [
        (0, 3),
        (3, 5),
    ]


def test_what_does_not_slide_stays() -> None:
    uneven = partition([2, 10], [((0, 2), (0, 3)), ((0, 2), (3, 10))])
    assert buffers_of(uneven, [Kernel(extent=1)] * 2).outputs == uneven.boxes


def test_boxes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(PrimitiveError, match="of dim 0, which are not one after the other; give the outputs"):
        buffers_of(PINWHEEL, [Kernel(extent=2)] * 2)
    with pytest.raises(PrimitiveError, match="outputs of 1 workers, of which 2 own the tensor"):
        buffers_of(blocks([4], [2]), [Kernel(extent=3)], [((0, 2),)])
    with pytest.raises(PrimitiveError, match=r"worker 0 holds \[\(0, 3\)\], which is not within .* shape \[2\]"):
        buffers_of(blocks([4], [2]), [Kernel(extent=3)], [((0, 3),), ((1, 2),)])

    def refused(apply: Callable[[Lab, Distributed], Any], held: Partition) -> None:
        outcome(held, range(len(held.boxes)), apply)

    with pytest.raises(PrimitiveError, match=r"scatter: the partition is of a tensor of shape \[5\], not \[4\]"):
        refused(lambda lab, x: scatter(x, lab.workers([0, 1]), blocks([5], [2])), copies([4], 1))
    with pytest.raises(PrimitiveError, match=r"all_to_all: the boxes .* must hold every element of \[4\] once"):
        refused(lambda lab, x: all_to_all(x, lab.workers([0, 1]), blocks([4], [2])), copies([4], 2))


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
    with pytest.raises(PrimitiveError, match=r"shape \[\] cannot be partitioned; give a scalar the shape \[1\]"):
        copies([], 2)
    with pytest.raises(PrimitiveError, match=r"worker 1 holds \[\(3, 5\)\], which is not within .* shape \[4\]"):
        partition([4], [((0, 3),), ((3, 5),)])
    with pytest.raises(PrimitiveError, match="needs at least one worker"):
        partition([4], [])
    with pytest.raises(PrimitiveError, match=r"parts \[2\] for a tensor of shape \[4, 4\]; give each dim a number"):
        blocks([4, 4], [2])
