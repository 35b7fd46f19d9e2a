"""Section 4's layers on any boxes, and the paper's LeNet-5 as the page on primitives has it, beside one device."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pase.errors import PrimitiveError
from pase.sharding.boxes import Box, Partition, blocks, copies, extents, partition, whole
from pase.sharding.halos import Kernel
from pase.targets.mesh_tensorflow.primitives.compat import tf
from pase.targets.mesh_tensorflow.primitives.data_movement import Workspace
from pase.targets.mesh_tensorflow.primitives.parts import Distributed
from pase.targets.mesh_tensorflow.runtime.layers.partitioned import affine, convolution, local, pooling
from tests.docs.markdown import blocks as code_of
from tests.primitives.lab import Array, covers, crossed_pairs, together

numbers = np.random.default_rng(7)


def drawn(*shape: int) -> Array:
    return numbers.standard_normal(shape)


def ran(space: Workspace, y: Distributed, xs: Sequence[Distributed], cotangent: Array) -> list[Array]:
    """The whole result and gradients. TensorFlow sends what was planned, but for what lies in padding alone."""
    assert isinstance(y.held, Partition)
    found = space.gradients(y, xs, space.share(y.mesh, y.held, cotangent))
    metadata = tf.RunMetadata()
    parts = space.run(y, *found, options=tf.RunOptions(output_partition_graphs=True), run_metadata=metadata)
    planned = space.predicted_bytes
    for ends, size in crossed_pairs(metadata, tf.get_default_graph()).items():
        assert size <= planned[ends]
    wholes = []
    for tensor, of_workers in zip((y, *found), parts, strict=True):
        assert isinstance(tensor.held, Partition)
        assert [part.shape for part in of_workers] == list(tensor.held.extents)
        wholes.append(together(of_workers, tensor.held))
    return wholes


def on_one_device(function: Any, values: Sequence[Array], cotangent: Array) -> list[Array]:
    with tf.Graph().as_default(), tf.Session() as session:
        xs = [tf.constant(value) for value in values]
        y = function(*xs)
        result: list[Array] = session.run([y, *tf.gradients([y], xs, [tf.constant(cotangent)])])
    return result


def assert_equal(found: Sequence[Array], expected: Sequence[Array]) -> None:
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-12, atol=1e-12, strict=True)


def convolved(x: Any, w: Any, b: Any, kernels: Sequence[Kernel]) -> Any:
    """Point by point: every tap of the kernel times the points that it sees."""
    padded = tf.pad(x, [[0, 0], [0, 0], *(kernel.padding for kernel in kernels)])
    outs = [kernel.num_outputs(n) for kernel, n in zip(kernels, x.shape.as_list()[2:], strict=True)]
    y = b[None, :, None, None] * tf.ones([x.shape[0], 1, *outs], x.dtype)
    for at in np.ndindex(*(kernel.extent for kernel in kernels)):
        seen = padded
        for axis, (tap, out, kernel) in enumerate(zip(at, outs, kernels, strict=True), start=2):
            seen = tf.gather(seen, tap * kernel.dilation + kernel.stride * np.arange(out), axis=axis)
        y += tf.einsum("bchw,nc->bnhw", seen, w[:, :, at[0], at[1]])
    return y


@st.composite
def spatial(draw: st.DrawFn) -> tuple[list[int], list[Kernel]]:
    kernels = [
        Kernel(
            extent=draw(st.integers(1, 3)),
            stride=draw(st.integers(1, 2)),
            dilation=draw(st.integers(1, 2)),
            padding=(draw(st.integers(0, 2)), draw(st.integers(0, 2))),
        )
        for _ in range(2)
    ]
    return [draw(st.integers(kernel.reach, 8)) for kernel in kernels], kernels


def cuts(draw: Any, extent: int, most: int) -> list[tuple[int, int]]:
    """Ranges of a dim, one after the other, of any lengths of 1 or more."""
    inner = draw(st.lists(st.integers(1, extent - 1), max_size=most - 1, unique=True)) if extent > 1 else []
    bounds = [0, *sorted(inner), extent]
    return list(pairwise(bounds))


@settings(max_examples=4)
@given(st.data(), spatial())
def test_convolution_on_an_unbalanced_grid(data: st.DataObject, given_: tuple[list[int], list[Kernel]]) -> None:
    """Channels of both sides split, as well as the image: halos, broadcasts and sums at once."""
    (height, width), kernels = given_
    ci, co = cuts(data.draw, 3, 2), cuts(data.draw, 4, 2)
    rows, columns = cuts(data.draw, height, 2), cuts(data.draw, width, 2)
    images = partition([2, 3, height, width], [((0, 2), c, h, w) for c in ci for h in rows for w in columns])
    extents_of_kernel = [kernel.extent for kernel in kernels]
    taps = [(0, n) for n in extents_of_kernel]
    filters = partition([4, 3, *extents_of_kernel], [(n, c, *taps) for n in co for c in ci])
    values = [drawn(2, 3, height, width), drawn(4, 3, *extents_of_kernel), drawn(4)]
    outs = [kernel.num_outputs(n) for kernel, n in zip(kernels, (height, width), strict=True)]
    cotangent = drawn(2, 4, *outs)
    num_spatial = len(rows) * len(columns)
    with Workspace() as space:
        x = space.share(space.workers(range(len(images.boxes))), images, values[0])
        w = space.share(space.workers(range(len(filters.boxes))), filters, values[1])
        b = space.share(space.workers(range(len(co))), partition([4], [(n,) for n in co]), values[2])
        work = space.workers(range(len(co) * len(ci) * num_spatial))
        result = space.workers(range(len(co) * num_spatial)) if len(ci) > 1 else None
        found = ran(space, convolution(x, w, b, kernels, work, result=result), [x, w, b], cotangent)
    assert_equal(found, on_one_device(lambda *xs: convolved(*xs, kernels), values, cotangent))


@settings(max_examples=5)
@given(st.data(), st.sampled_from(["max", "mean"]))
def test_pooling_of_boxes_that_form_no_grid(data: st.DataObject, how: str) -> None:
    """Any boxes own the image, and any other boxes cut its result up."""
    height, width = data.draw(st.integers(3, 7)), data.draw(st.integers(3, 7))
    kernels = [Kernel(extent=2, stride=data.draw(st.integers(1, 2))), Kernel(extent=3, padding=(1, 1))]
    outs = [kernel.num_outputs(n) for kernel, n in zip(kernels, (height, width), strict=True)]
    own = [box for box in data.draw(covers([height, width])).boxes if 0 not in extents(box)]
    computed = [box for box in data.draw(covers(outs)).boxes if 0 not in extents(box)]
    # As many workers on either side; those left over own, or compute, nothing.
    count = max(len(own), len(computed))
    nothing: Box = ((0, 0), (0, 0))
    both = [[*boxes, *[nothing] * (count - len(boxes))] for boxes in (own, computed)]
    lead: Box = ((0, 2), (0, 3))
    held, outputs = ([(*lead, *box) for box in boxes] for boxes in both)
    value, cotangent = drawn(2, 3, height, width), drawn(2, 3, *outs)
    with Workspace() as space:
        x = space.share(space.workers(range(count)), partition([2, 3, height, width], held), value)
        found = ran(space, pooling(x, kernels, how, outputs=outputs), [x], cotangent)

    def pooled(x: Any) -> Any:
        padded = tf.pad(x, [[0, 0], [0, 0], [0, 0], [1, 1]], constant_values=-np.inf if how == "max" else 0.0)
        seen = [
            padded[:, :, i : i + (outs[0] - 1) * kernels[0].stride + 1 : kernels[0].stride, j : j + outs[1]]
            for i in range(2)
            for j in range(3)
        ]
        return tf.reduce_max(tf.stack(seen), axis=0) if how == "max" else tf.add_n(seen) / 6

    assert_equal(found, on_one_device(pooled, [value], cotangent))


@settings(max_examples=5)
@given(st.data())
def test_affine_layers_on_unbalanced_parts(data: st.DataObject) -> None:
    batch, inputs, outputs = cuts(data.draw, 4, 2), cuts(data.draw, 5, 2), cuts(data.draw, 6, 2)
    features = partition([4, 5], [(b, c) for c in inputs for b in batch])
    matrix = partition([6, 5], [(n, c) for n in outputs for c in inputs])
    values, cotangent = [drawn(4, 5), drawn(6, 5), drawn(6)], drawn(4, 6)
    with Workspace() as space:
        x = space.share(space.workers(range(len(features.boxes))), features, values[0])
        w = space.share(space.workers(range(len(matrix.boxes))), matrix, values[1])
        b = space.share(space.workers([5, 2][: len(outputs)]), partition([6], [(n,) for n in outputs]), values[2])
        work = space.workers(range(len(outputs) * len(inputs) * len(batch)))
        result = space.workers(range(len(outputs) * len(batch))) if len(inputs) > 1 else None
        found = ran(space, affine(x, w, b, work, result=result), [x, w, b], cotangent)
    assert_equal(found, on_one_device(lambda x, w, b: tf.matmul(x, w, transpose_b=True) + b, values, cotangent))


def test_what_does_not_fit_is_refused() -> None:
    kernels = [Kernel(extent=1)] * 2
    with Workspace() as space:
        two, four = space.workers([0, 1]), space.workers(range(4))
        image = space.share(two, blocks([1, 4, 2, 2], [1, 2, 1, 1]), np.zeros((1, 4, 2, 2)))
        filters = space.share(two, blocks([4, 4, 1, 1], [2, 1, 1, 1]), np.zeros((4, 4, 1, 1)))
        halves = space.share(two, blocks([4, 4, 1, 1], [1, 2, 1, 1]), np.zeros((4, 4, 1, 1)))
        bias = space.share(two, blocks([4], [2]), np.zeros(4))
        with pytest.raises(PrimitiveError, match=r"convolution: weights .* make 0 pairs of parts .* for 4 workers"):
            convolution(image, filters, None, kernels, four)
        with pytest.raises(PrimitiveError, match=r"make 2 pairs of parts .* for 4 workers; split channels alike"):
            convolution(image, halves, None, kernels, four)
        with pytest.raises(PrimitiveError, match=r"the bias is split in .* the output channels of the weights in"):
            convolution(image, halves, bias, kernels, two)
        with pytest.raises(PrimitiveError, match="2 workers have parts of 1 sums; say where these go"):
            convolution(image, halves, None, kernels, two)
        with pytest.raises(PrimitiveError, match="give each one outputs of its own batch and channels"):
            pooling(image, kernels, "max", outputs=[whole([1, 4, 2, 2])] * 2)
        wrong = local(lambda part: part[:, :1], image, name="first")
        with pytest.raises(PrimitiveError, match=r"first: the result of worker 0 has shape \[1, 1, 2, 2\], not"):
            space.run(wrong)


# -- the paper's LeNet-5

# Table 1: learnable parameters, their shapes and those on each of four workers. A bias of an affine layer is on two.
TABLE_1: Mapping[str, tuple[tuple[int, ...], tuple[tuple[int, ...] | None, ...]]] = {
    "C1 w": ((6, 1, 5, 5), ((6, 1, 5, 5), None, None, None)),
    "C1 b": ((6,), ((6,), None, None, None)),
    "C3 w": ((16, 6, 5, 5), ((16, 6, 5, 5), None, None, None)),
    "C3 b": ((16,), ((16,), None, None, None)),
    "C5 w": ((120, 400), ((60, 200),) * 4),
    "C5 b": ((120,), ((60,), None, (60,), None)),
    "F6 w": ((84, 120), ((42, 60),) * 4),
    "F6 b": ((84,), ((42,), None, (42,), None)),
    "Output w": ((10, 84), ((5, 42),) * 4),
    "Output b": ((10,), ((5,), None, (5,), None)),
}
BATCH = 4


def page() -> dict[str, Any]:
    """What the program on the page on primitives defines."""
    (program,) = [code.text for code in code_of("docs/primitives.md") if code.title == "lenet5.py"]
    found: dict[str, Any] = {}
    exec(compile(program, "docs/primitives.md", "exec"), found)
    return found


@dataclass(frozen=True)
class LeNet5:
    """The program on 2 x 2 workers, with data and weights. forward_bytes: what its forward pass moves."""

    space: Workspace
    loss: Distributed
    weights: Mapping[str, Distributed]
    images: Array
    labels: Array
    arrays: Mapping[str, Array]
    forward_bytes: int


@pytest.fixture(scope="module")
def lenet5() -> Iterator[LeNet5]:
    drawing = np.random.default_rng(11)
    arrays = {
        name: drawing.standard_normal(shape) / np.sqrt(np.prod(shape[1:])) for name, (shape, _) in TABLE_1.items()
    }
    images, labels = drawing.standard_normal((BATCH, 1, 28, 28)), drawing.integers(0, 10, BATCH, dtype=np.int32)
    with Workspace() as space:
        loss, weights = page()["lenet5"](space, images, labels, arrays)
        yield LeNet5(space, loss, weights, images, labels, arrays, sum(space.predicted_bytes.values()))


def sequential(images: Any, labels: Array, w: Mapping[str, Any]) -> Any:
    """The same network on one device, in TensorFlow's own words."""

    def convolved(x: Any, name: str, pad: int) -> Any:
        filters = tf.transpose(w[f"{name} w"], [2, 3, 1, 0])
        x = tf.pad(x, [[0, 0], [pad, pad], [pad, pad], [0, 0]])
        return tf.nn.max_pool2d(tf.nn.relu(tf.nn.conv2d(x, filters, 1, "VALID") + w[f"{name} b"]), 2, 2, "VALID")

    x = convolved(convolved(tf.transpose(images, [0, 2, 3, 1]), "C1", 2), "C3", 0)
    x = tf.reshape(tf.transpose(x, [0, 3, 1, 2]), [BATCH, 400])
    for name in ("C5", "F6", "Output"):
        x = tf.matmul(x, w[f"{name} w"], transpose_b=True) + w[f"{name} b"]
        x = x if name == "Output" else tf.nn.relu(x)
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=x))


def test_lenet5_has_the_weights_of_table_1(lenet5: LeNet5) -> None:
    assert list(lenet5.weights) == list(TABLE_1)
    for name, (_, of_workers) in TABLE_1.items():
        tensor = lenet5.weights[name]
        held = dict(zip(tensor.mesh.devices.devices, tensor.held.extents, strict=True))
        assert tuple(held.get(worker) for worker in range(4)) == of_workers, name
        assert isinstance(tensor.held, Partition)
        assert tensor.held.is_cover
    # A worker's numbers: all filters are on worker 0.
    sizes = [sum(int(np.prod(of[worker] or 0)) for _, of in TABLE_1.values()) for worker in range(4)]
    assert (sizes, sum(sizes)) == ([17_409, 14_730, 14_837, 14_730], 61_706)


def test_lenet5_pools_5_rows_as_3_and_2(lenet5: LeNet5) -> None:
    pooled = [operation for operation in lenet5.space.graph.operations if "max_pooling" in operation.name]
    # Slices are as large as the largest part: 14 rows as 7 + 7, 5 as 3 + 2.
    assert [each.outputs[0].shape.to_integer_list[-2:] for each in pooled[:2]] == [[7, 7], [3, 3]]
    assert blocks([BATCH, 16, 5, 5], [1, 1, 2, 2]).extents[-1] == (BATCH, 16, 2, 2)


def bytes_of_a_convolution(image: int, pad: int, channels: int, filters: int) -> int:
    """Forward, on 2 x 2 workers, from the sets of points: halos of the image, and copies of weights to 3 workers."""
    half, outs = image // 2, image + 2 * pad - 4
    halos = 0
    for row in range(2):
        for column in range(2):
            needs = [
                {p for p in range(at * outs // 2 - pad, (at + 1) * outs // 2 + 4 - pad) if 0 <= p < image}
                for at in (row, column)
            ]
            own = [{*range(at * half, at * half + half)} for at in (row, column)]
            halos += len(needs[0]) * len(needs[1]) - len(needs[0] & own[0]) * len(needs[1] & own[1])
    return 8 * (BATCH * channels * halos + 3 * (filters * channels * 25 + filters))


def test_lenet5_moves_what_the_sets_of_points_say(lenet5: LeNet5) -> None:
    scattered = 8 * BATCH * 3 * 14 * 14
    # Row 5 of 10 and column 5: the third of the outputs' windows reads one beyond what the first worker owns.
    pooled = 8 * BATCH * 16 * (6 * 6 - 5 * 5 + 2 * (6 * 5 - 5 * 5))
    # Workers 0 and 1 get 8 of 16 channels of all four parts, 9 + 6 + 6 + 4 points.
    transposed = 8 * BATCH * 8 * (25 - 9 + 25 - 6)
    # x goes from workers 0, 1 to 2, 3, biases lie where they are used; parts of the sums go to workers 0 and 1.
    affine_layers = sum(
        8 * BATCH * (features + outs + outs // 2) for features, outs in ((400, 120), (120, 84), (84, 10))
    )
    gathered = 8 * BATCH * 5
    assert lenet5.forward_bytes == (
        scattered
        + bytes_of_a_convolution(28, 2, 1, 6)
        + bytes_of_a_convolution(14, 0, 6, 16)
        + pooled
        + transposed
        + affine_layers
        + gathered
    )


def test_lenet5_computes_what_one_device_does(lenet5: LeNet5) -> None:
    space, arrays = lenet5.space, lenet5.arrays
    gradients = space.gradients(lenet5.loss, list(lenet5.weights.values()))
    metadata = tf.RunMetadata()
    options = tf.RunOptions(output_partition_graphs=True)
    ((found,), *slopes) = space.run(lenet5.loss, *gradients, options=options, run_metadata=metadata)
    executed = crossed_pairs(metadata, tf.get_default_graph())
    with tf.Graph().as_default(), tf.Session() as session:
        whole_weights = {name: tf.constant(array) for name, array in arrays.items()}
        alone = sequential(tf.constant(lenet5.images), lenet5.labels, whole_weights)
        expected, back = session.run([alone, tf.gradients([alone], list(whole_weights.values()))])
    np.testing.assert_allclose(found[0], expected, rtol=1e-12)
    for tensor, parts, same in zip(lenet5.weights.values(), slopes, back, strict=True):
        assert isinstance(tensor.held, Partition)
        np.testing.assert_allclose(together(parts, tensor.held), same, rtol=1e-12, atol=1e-12 * np.abs(same).max())
    # What every worker sends and receives, there and back, is what the movements of the primitives say.
    assert executed == space.predicted_bytes
    assert {worker for ends in executed for worker in ends} == {0, 1, 2, 3}


def test_copies_of_a_batch() -> None:
    """What several workers do alike is not added: one of them counts."""
    with Workspace() as space:
        x = space.share(space.workers([0]), copies([3], 1), np.arange(3.0))
        y = local(lambda part: part * 2.0, x)
        ((found,), (slope,)) = space.run(y, *space.gradients(y, [x]))
    assert (found.tolist(), slope.tolist()) == ([0.0, 2.0, 4.0], [2.0, 2.0, 2.0])
