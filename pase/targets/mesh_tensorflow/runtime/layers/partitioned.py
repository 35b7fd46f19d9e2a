"""Layers of tensors in any boxes, balanced or not: primitives around TensorFlow's own layers (section 4).

Hewett and Grady (2020) put a distributed layer together from the halo exchange H, broadcasts B, what TensorFlow does
with each worker's parts, and sum-reductions R: a pooling is Pool ∘ H, a convolution R ∘ Conv ∘ (B H x, B w, B b), an
affine layer R ∘ Affine ∘ (B x, w, B b). Their gradients are the adjoints in the reverse order, around TensorFlow's own
gradient of what is local. Dims are [batch, channels, spatial…], filters [output channels, input channels, kernel…].
"""

from collections.abc import Callable, Sequence
from typing import Any

from pase.errors import PrimitiveError
from pase.sharding.boxes import Box, Partition, partition
from pase.sharding.halos import Kernel, buffers_of
from pase.sharding.layouts import WindowDim
from pase.targets.mesh_tensorflow.primitives.compat import tf
from pase.targets.mesh_tensorflow.primitives.data_movement import (
    allocate,
    broadcast,
    halo_exchange,
    sum_reduce,
    windows,
)
from pase.targets.mesh_tensorflow.primitives.mesh import LayerMesh
from pase.targets.mesh_tensorflow.primitives.parts import Distributed, capacity, from_slice, mesh_shape, to_slice
from pase.targets.mesh_tensorflow.runtime.layers.local import Shardwise
from pase.targets.mesh_tensorflow.runtime.layers.windows import convolved, pooled


def local(function: Callable[..., Any], *xs: Distributed, held: Partition | None = None, name: str = "") -> Distributed:
    """Return what a TensorFlow function makes of the parts of each worker; its gradient is TensorFlow's.

    Args:
        function: of one part of each of xs, returns one tensor; not called for a worker whose part of the result is
            empty.
        xs: tensors of one set of workers.
        held: what the workers hold of the result; by default as of the first of xs.
        name: of the operation.

    Raises:
        PrimitiveError: a part of the result has another shape.
    """
    held = _boxes(xs[0]) if held is None else held
    mesh, largest = xs[0].mesh, capacity(held.extents)

    def of_worker(worker: int, *slices: Any) -> Any:
        shape = held.extents[worker]
        if 0 in shape:
            return tf.zeros([*[1] * len(mesh.devices.axes), *largest], slices[0].dtype)
        result = function(*(from_slice(part, x.held.extents[worker]) for part, x in zip(slices, xs, strict=True)))
        if tuple(result.shape.as_list()) != shape:
            raise PrimitiveError(
                f"{name or 'local'}: the result of worker {worker} has shape {result.shape.as_list()}, "
                f"not {list(shape)}; correct what the workers hold of it"
            )
        return to_slice(result, shape, largest, len(mesh.devices.axes))

    operation = Shardwise(
        of_worker,
        [x.tensor for x in xs],
        shape=mesh_shape(mesh, held.extents),
        name=f"{mesh.name}/{name or 'local'}",
        per_position=lambda: range(len(held.extents)),
    )
    return Distributed(operation.outputs[0], held)


def pooling(
    x: Distributed, kernels: Sequence[Kernel], how: str, *, outputs: Sequence[Box] | None = None
) -> Distributed:
    """Return the "max" or the "mean" of each window of x, on the workers of x; padding counts for a mean.

    Args:
        x: [batch, channels, spatial…] in any boxes.
        kernels: of each spatial dim.
        how: "max" or "mean".
        outputs: [workers] the box of the result that each one computes, of which batch and channels are those of its
            part of x; by default the balanced part of its row, of its column.

    Raises:
        PrimitiveError: where boxes and kernels do not fit together.
    """
    seen, held = _windows(x, kernels, outputs, fill=float("-inf") if how == "max" else 0.0)

    def of_part(part: Any) -> Any:
        each = _slid(kernels, part)
        return _last_to_second(pooled(_second_to_last(part), each, [dim.out_extent for dim in each], how))

    return local(of_part, seen, held=held, name=f"{how}_pooling")


def convolution(
    x: Distributed,
    weights: Distributed,
    bias: Distributed | None,
    kernels: Sequence[Kernel],
    workers: LayerMesh,
    *,
    result: LayerMesh | None = None,
    outputs: Sequence[Box] | None = None,
) -> Distributed:
    """Return the convolution of x with weights, and a bias.

    Of the workers there is one for each part of the weights and each part of x with the same input channels, in this
    order. Those that share their part of the result have sums of different input channels, which are added.

    Args:
        x: [batch, input channels, spatial…] in any boxes.
        weights: [output channels, input channels, kernel…], of which channels are split.
        bias: [output channels], each part on one worker, split as in the weights.
        kernels: of each spatial dim.
        workers: the workers that convolve.
        result: those of the result, one for each part of it; by default those that convolve, where nothing is added.
        outputs: as for `pooling`, of the workers of x.

    Raises:
        PrimitiveError: where boxes, kernels and workers do not fit together.
    """
    seen, reached = _windows(x, kernels, outputs)

    def of_parts(part: Any, filters: Any, *added: Any) -> Any:
        turned = tf.transpose(filters, [*range(2, 2 + len(kernels)), 1, 0])
        y = convolved(_second_to_last(part), turned, _slid(kernels, part))
        return _last_to_second(_plus(y, *added))

    return _product("convolution", of_parts, seen, reached, weights, bias, workers, result)


def affine(
    x: Distributed,
    weights: Distributed,
    bias: Distributed | None,
    workers: LayerMesh,
    *,
    result: LayerMesh | None = None,
) -> Distributed:
    """Return x, [batch, input features], times weights, [output features, input features], plus a bias.

    Arguments and errors as for `convolution`; nothing is broadcast where the weights lie on the workers already.
    """

    def of_parts(part: Any, matrix: Any, *added: Any) -> Any:
        return _plus(tf.linalg.matmul(part, matrix, transpose_b=True), *added)

    return _product("affine", of_parts, x, _boxes(x), weights, bias, workers, result)


def _product(
    name: str,
    function: Callable[..., Any],
    x: Distributed,
    reached: Partition,
    weights: Distributed,
    bias: Distributed | None,
    workers: LayerMesh,
    result: LayerMesh | None,
) -> Distributed:
    """Return R f(B x, B w, B b); reached: [workers of x] what f reaches of the result with any part of the weights."""
    channels = [box[1] for box in _boxes(x).boxes]
    filters = _boxes(weights)
    work = [(i, j) for i, box in enumerate(filters.boxes) for j, own in enumerate(channels) if own == box[1]]
    if len(work) != len(workers.device_names) or {box[1] for box in filters.boxes} != set(channels):
        raise PrimitiveError(
            f"{name}: weights {list(filters.boxes)} and input channels {channels} make {len(work)} pairs of parts with "
            f"the same channels, for {len(workers.device_names)} workers; split channels alike, and give each pair one"
        )
    operands = [
        broadcast(x, workers, [j for _, j in work]),
        broadcast(weights, workers, [i for i, _ in work]),
    ]
    boxes = [(reached.boxes[j][0], filters.boxes[i][0], *reached.boxes[j][2:]) for i, j in work]
    if bias is not None:
        where = {box: i for i, (box,) in enumerate(_boxes(bias).boxes)}
        if set(where) != {box[0] for box in filters.boxes}:
            raise PrimitiveError(
                f"{name}: the bias is split in {sorted(where)}, the output channels of the weights in "
                f"{sorted({box[0] for box in filters.boxes})}; split them alike"
            )
        # Once for each sum.
        first = min(channels)
        roots = [where[filters.boxes[i][0]] if channels[j] == first else None for i, j in work]
        operands.append(broadcast(bias, workers, roots))
    shape = (reached.shape[0], filters.shape[0], *reached.shape[2:])
    partial = local(function, *operands, held=partition(shape, boxes), name=name)
    distinct = tuple(dict.fromkeys(boxes))
    if result is None and len(distinct) == len(boxes):
        return partial
    if result is None:
        raise PrimitiveError(f"{name}: {len(boxes)} workers have parts of {len(distinct)} sums; say where these go")
    return sum_reduce(partial, result, partition(shape, distinct))


def _windows(
    x: Distributed, kernels: Sequence[Kernel], outputs: Sequence[Box] | None, *, fill: float = 0.0
) -> tuple[Distributed, Partition]:
    """Return what each worker's kernel is applied to, H x, and the outputs that it computes of it."""
    held = _boxes(x)
    still = [Kernel(extent=1)] * 2
    buffers = buffers_of(held, [*still, *kernels], outputs)
    shape = [kernel.num_outputs(n) for kernel, n in zip([*still, *kernels], held.shape, strict=True)]
    computed = partition(shape, buffers.outputs)
    if any(out[:2] != own[:2] for out, own in zip(computed.boxes, held.boxes, strict=True)):
        raise PrimitiveError(
            f"workers own {list(held.boxes)} and compute {list(computed.boxes)}; "
            "give each one outputs of its own batch and channels"
        )
    return windows(halo_exchange(allocate(x, buffers)), fill=fill), computed


def _slid(kernels: Sequence[Kernel], part: Any) -> list[WindowDim]:
    """Return how kernels slide over what a worker has of the spatial dims, padding included."""
    return [
        WindowDim(
            out=f"out{i}",
            out_extent=(extent - kernel.reach) // kernel.stride + 1,
            kernel=f"kernel{i}",
            kernel_extent=kernel.extent,
            extent=extent,
            stride=kernel.stride,
            dilation=kernel.dilation,
        )
        for i, (kernel, extent) in enumerate(zip(kernels, part.shape.as_list()[2:], strict=True))
    ]


def _plus(y: Any, *added: Any) -> Any:
    """Return y with a bias of its last dim, which workers have whose channels are the first ones."""
    return y + added[0] if added and added[0].shape.num_elements() else y


def _second_to_last(x: Any) -> Any:
    return tf.transpose(x, [0, *range(2, x.shape.rank), 1])


def _last_to_second(x: Any) -> Any:
    return tf.transpose(x, [0, x.shape.rank - 1, *range(1, x.shape.rank - 1)])


def _boxes(x: Distributed) -> Partition:
    if not isinstance(x.held, Partition):
        raise PrimitiveError("the workers hold buffers with halos; take their windows first")
    return x.held
