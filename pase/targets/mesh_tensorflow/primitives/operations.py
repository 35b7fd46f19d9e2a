"""The primitives as Mesh-TensorFlow operations: each is linear, and its gradient is the operation that is its adjoint.

Every operation takes the sum of all the source's parts that overlap a target's box; its adjoint exchanges source and
target, which transposes that map exactly (section 3): where the forward operation copies, the adjoint adds.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, ClassVar

from pase.sharding.boxes import Box, Partition, extents, whole
from pase.sharding.halos import Buffers
from pase.sharding.layouts import Layout, partition_layout
from pase.sharding.reshard import ReshardStep
from pase.targets.mesh_tensorflow.primitives.buffers import Shape, framed, from_slices, mesh_shape, to_slices
from pase.targets.mesh_tensorflow.primitives.pieces import run_map
from pase.targets.mesh_tensorflow.runtime.assemble import assembled
from pase.targets.mesh_tensorflow.runtime.compat import mtf, tf
from pase.targets.mesh_tensorflow.runtime.mesh import LayerMesh
from pase.targets.mesh_tensorflow.runtime.traffic import Account


class LinearOperation(mtf.Operation):
    """Turns the parts of one tensor into those of another, without arithmetic but sums.

    x: the Mesh-TensorFlow tensor. source, target: [workers] shapes of the parts. mesh: the workers of the result.
    """

    NAME: ClassVar[str]

    def __init__(
        self, x: Any, source: Sequence[Shape], mesh: LayerMesh, target: Sequence[Shape], *, shape: Any = None
    ) -> None:
        super().__init__([x], mesh=mesh, name=f"{mesh.name}/{self.NAME}")
        self._source, self._target = tuple(source), tuple(target)
        self._outputs = [mtf.Tensor(self, shape or mesh_shape(mesh, target), x.dtype)]
        self._splittable_dims, self._unsplittable_dims = self._initialize_splittable_and_unsplittable_dims(
            "unsplittable"
        )

    def gradient(self, grad_ys: Sequence[Any]) -> list[Any]:
        """Return the adjoint of the operation, applied to the output's gradient."""
        return [*self.adjoint(grad_ys[0]).outputs]

    def lower(self, lowering: Any) -> None:
        """Take the parts out of their slices, move them, put what arrives into slices."""
        (x,), (y,) = self.inputs, self.outputs
        implementation = lowering.mesh_impl(self)
        parts = self.taken(lowering.tensors[x].to_laid_out_tensor().tensor_list)
        moved = self.moved(parts, implementation.traffic.coming_from(x.mesh.layer))
        lowering.set_tensor_lowering(y, implementation.LaidOutTensor(self.put(moved)))

    def taken(self, slices: list[Any]) -> list[Any]:
        """Return [source workers] the parts in the input's slices."""
        return from_slices(slices, self._source, self.inputs[0].mesh)

    def put(self, parts: list[Any]) -> list[Any]:
        """Return [target workers] the output's slices."""
        return to_slices(parts, self._target, self.mesh)

    def adjoint(self, grad_y: Any) -> "LinearOperation":
        """Return the operation that is the adjoint of this one, applied to a tensor like the output."""
        raise NotImplementedError

    def moved(self, parts: list[Any], traffic: Account) -> list[Any]:
        """Return [target workers] the parts of the result."""
        raise NotImplementedError


class Movement(LinearOperation):
    """Moves boxes along a path of partitions, summing parts that overlap; the adjoint goes the path back."""

    ADJOINT: ClassVar[type["Movement"]]

    def __init__(self, x: Any, path: Sequence[Partition], mesh: LayerMesh) -> None:
        super().__init__(x, path[0].extents, mesh, path[-1].extents)
        self._path = tuple(path)

    def adjoint(self, grad_y: Any) -> LinearOperation:
        """Return the movement along the path in reverse, back to the input's workers."""
        return self.ADJOINT(grad_y, self._path[::-1], self.inputs[0].mesh)

    def moved(self, parts: list[Any], traffic: Account) -> list[Any]:
        """Return what arrives at the end of the path; what it passes through lies on the result's workers."""
        meshes = [self.inputs[0].mesh, *[self.mesh] * (len(self._path) - 1)]
        stops = [
            (partition_layout(stop, mesh.devices.devices), mesh.device_names)
            for stop, mesh in zip(self._path, meshes, strict=True)
        ]
        for (source, source_names), (target, target_names) in pairwise(stops):
            parts = run_map(
                parts,
                ReshardStep(source, target),
                source_names=source_names,
                target_names=target_names,
                traffic=traffic,
            )
        return parts


class SendReceive(Movement):
    """Each worker's part goes to the worker in the same place of another set; the adjoint sends it back."""

    NAME = "send_receive"


class Scatter(Movement):
    """Parts of one worker's tensor go to many; the adjoint is `Gather`."""

    NAME = "scatter"


class Gather(Movement):
    """Many workers' parts come together on one; the adjoint is `Scatter`."""

    NAME = "gather"


class Broadcast(Movement):
    """Copies go to many workers (Eq. 8); the adjoint is `SumReduce` (Eq. 9)."""

    NAME = "broadcast"


class SumReduce(Movement):
    """Many workers' tensors are added up on one; the adjoint is `Broadcast`."""

    NAME = "sum_reduce"


class AllReduce(Movement):
    """Every worker gets the sum of all; its own adjoint.

    Each of k workers adds up a k-th of the n bytes and sends it to the others, 2 (k-1) n bytes in all.
    """

    NAME = "all_reduce"


class AllToAll(Movement):
    """A tensor goes from one partition to another; the adjoint takes it back."""

    NAME = "all_to_all"


SendReceive.ADJOINT = SendReceive
Scatter.ADJOINT, Gather.ADJOINT = Gather, Scatter
Broadcast.ADJOINT, SumReduce.ADJOINT = SumReduce, Broadcast
AllReduce.ADJOINT = AllReduce
AllToAll.ADJOINT = AllToAll


class HaloExchange(LinearOperation):
    """Overwrites the halos of every buffer with what the neighbours own, in place (Eq. 11).

    The boxes go straight to whoever needs them, corners and those beyond a neighbour included.
    """

    NAME = "halo_exchange"

    def __init__(self, x: Any, buffers: Buffers) -> None:
        super().__init__(x, buffers.extents, x.mesh, buffers.extents)
        self._buffers = buffers

    def adjoint(self, grad_y: Any) -> LinearOperation:
        """Return the exchange that adds halos to the bulk that they are copies of."""
        return HaloAdjoint(grad_y, self._buffers)

    def moved(self, parts: list[Any], traffic: Account) -> list[Any]:
        """Return the buffers with their halos filled."""
        names = self.mesh.device_names
        shapes = self._buffers.extents
        bulk = [framed(*item) for item in zip(parts, shapes, self._buffers.bulk_boxes, names, strict=True)]
        hop, owners = _exchange(self._buffers, self.mesh)
        target_names = [names[i] for i in owners]
        arrived = run_map(bulk, hop, source_names=names, target_names=target_names, traffic=traffic)
        placed: list[list[tuple[Box, Any]]] = [[] for _ in names]
        at = [box for segments in self._buffers.segments for _, box in segments]
        for i, box, tensor in zip(owners, at, arrived, strict=True):
            placed[i].append((box, tensor))
        return [
            _joined(items, shape, name, parts[0].dtype)
            for items, shape, name in zip(placed, shapes, names, strict=True)
        ]


class HaloAdjoint(LinearOperation):
    """Adds every halo to the bulk that it is a copy of, and clears the halos (Eq. 12)."""

    NAME = "halo_adjoint"

    def __init__(self, x: Any, buffers: Buffers) -> None:
        super().__init__(x, buffers.extents, x.mesh, buffers.extents)
        self._buffers = buffers

    def adjoint(self, grad_y: Any) -> LinearOperation:
        """Return the forward exchange."""
        return HaloExchange(grad_y, self._buffers)

    def moved(self, parts: list[Any], traffic: Account) -> list[Any]:
        """Return the buffers with the sums in their bulk and zeros in their halos."""
        names = self.mesh.device_names
        shapes = self._buffers.extents
        hop, owners = _exchange(self._buffers, self.mesh)
        at = [box for segments in self._buffers.segments for _, box in segments]
        cut = [framed(parts[i], shapes[i], box, names[i]) for i, box in zip(owners, at, strict=True)]
        bulk = run_map(cut, hop.adjoint, source_names=[names[i] for i in owners], target_names=names, traffic=traffic)
        boxes = self._buffers.bulk_boxes
        return [
            _joined([(box, tensor)], shape, name, tensor.dtype)
            for box, tensor, shape, name in zip(boxes, bulk, shapes, names, strict=True)
        ]


class Frame(LinearOperation):
    """Each worker keeps the part of its own that a box encloses, with zeros where the box sticks out.

    This is allocation and deallocation (Eq. 3, 4), and the shims that cut unused points and add padding (Appendix B).
    frames: [workers] boxes in the parts' own coordinates. fill: stands instead of the zeros, and has no gradient.
    """

    NAME = "frame"

    def __init__(self, x: Any, source: Sequence[Shape], frames: Sequence[Box], *, fill: float = 0.0) -> None:
        super().__init__(x, source, x.mesh, [extents(frame) for frame in frames])
        self._frames = tuple(frames)
        self._fill = fill

    def adjoint(self, grad_y: Any) -> LinearOperation:
        """Return the framing that puts each point back where it came from."""
        back = [
            tuple((-low, n - low) for (low, _), n in zip(frame, shape, strict=True))
            for frame, shape in zip(self._frames, self._source, strict=True)
        ]
        return Frame(grad_y, self._target, back)

    def moved(self, parts: list[Any], traffic: Account) -> list[Any]:
        """Return what the frames enclose; nothing goes to another worker."""
        names = self.mesh.device_names
        return [framed(*item, self._fill) for item in zip(parts, self._source, self._frames, names, strict=True)]


def _exchange(buffers: Buffers, mesh: LayerMesh) -> tuple[ReshardStep, list[int]]:
    """Return the movement from the bulks to the segments of all buffers, and whose each segment is."""
    devices = mesh.devices.devices
    owners = [i for i, segments in enumerate(buffers.segments) for _ in segments]
    boxes = tuple(box for segments in buffers.segments for box, _ in segments)
    target = Layout(
        shape=buffers.shape, devices=tuple(devices[i] for i in owners), parts=tuple(range(len(boxes))), boxes=boxes
    )
    return ReshardStep(partition_layout(buffers.bulk, devices), target), owners


def _joined(placed: Sequence[tuple[Box, Any]], shape: Shape, device: str, dtype: Any) -> Any:
    with tf.device(device):
        return assembled(placed, whole(shape), 0, dtype)
