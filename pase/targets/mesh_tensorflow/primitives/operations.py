"""The primitives as Mesh-TensorFlow operations: each is linear, and its gradient is the operation that is its adjoint.

Every movement takes the sum of all the source's parts that overlap a target's box; its adjoint exchanges source and
target, which transposes that map exactly (section 3): where the forward operation copies, the adjoint adds.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np

from pase.sharding.boxes import Box, extents, partition, whole
from pase.sharding.halos import Buffers
from pase.sharding.layouts import HOST, Layout, partition_layout
from pase.sharding.reshard import ReshardStep
from pase.targets.mesh_tensorflow.primitives.mesh import LayerMesh
from pase.targets.mesh_tensorflow.primitives.parts import (
    Shape,
    assembled,
    framed,
    from_slices,
    mesh_shape,
    run_step,
    to_slices,
)
from pase.targets.mesh_tensorflow.primitives.traffic import Account
from pase.targets.mesh_tensorflow.runtime.compat import mtf, tf

ADJOINTS: Mapping[str, str] = MappingProxyType(
    {
        one: other
        for pair in (("scatter", "gather"), ("broadcast", "sum_reduce"), ("to_parts", "to_tensor"))
        for one, other in (pair, pair[::-1])
    }
)
"""The adjoint of each primitive that is not its own."""


class LinearOperation(mtf.Operation):
    """Turns what the workers of one tensor hold into what those of another do, without arithmetic but sums.

    Args:
        x: the Mesh-TensorFlow tensor.
        primitive: the name of what is done.
        mesh: the workers of the result.
        source: [workers] shapes of the parts of a `Distributed` x; None for a plain tensor.
        target: the same of the result.
        shape: of a plain result.
        name: of the operation, by default the primitive's.
    """

    def __init__(
        self,
        x: Any,
        primitive: str,
        *,
        mesh: LayerMesh,
        source: Sequence[Shape] | None = None,
        target: Sequence[Shape] | None = None,
        shape: Any = None,
        name: str = "",
    ) -> None:
        super().__init__([x], mesh=mesh, name=name or f"{mesh.name}/{primitive}")
        self.primitive = primitive
        self._source, self._target = source, target
        shape = mtf.ops.convert_to_shape(shape) if target is None else mesh_shape(mesh, target)
        self._outputs = [mtf.Tensor(self, shape, x.dtype)]

    def gradient(self, grad_ys: Sequence[Any]) -> list[Any]:
        """Return the adjoint of the operation, applied to the output's gradient."""
        return [*self.adjoint(grad_ys[0]).outputs]

    def lower(self, lowering: Any) -> None:
        """Take the parts out of their slices, move them, put what arrives into slices."""
        (x,) = self.inputs
        parts = lowering.tensors[x].to_laid_out_tensor().tensor_list
        if self._source is not None:
            parts = from_slices(parts, self._source, x.mesh)
        # The host's part is not counted: what is left of a movement from or to it is the layer's own.
        layers = [mesh.layer for mesh in (x.mesh, self.mesh) if HOST not in mesh.devices.devices]
        traffic = lowering.mesh_impl(self).traffic.coming_from(layers[0] if layers else self.mesh.layer)
        lowering.set_tensor_lowering(self.outputs[0], self.laid_out(lowering, self.moved(parts, traffic)))

    def laid_out(self, lowering: Any, parts: Sequence[Any]) -> Any:
        """Return the workers' parts as Mesh-TensorFlow lays a tensor out."""
        implementation = lowering.mesh_impl(self)
        if self._target is not None:
            return implementation.LaidOutTensor(to_slices(parts, self._target, self.mesh))
        slice_shape = implementation.slice_shape(self.outputs[0].shape)
        shaped = []
        for tensor, device in zip(parts, self.mesh.device_names, strict=True):
            with tf.device(device):
                same = tensor.shape.as_list() == slice_shape
                shaped.append(tensor if same else tf.reshape(tensor, slice_shape))
        return implementation.LaidOutTensor(shaped)

    def adjoint(self, grad_y: Any) -> "LinearOperation":
        """Return the operation that is the adjoint of this one, applied to a tensor like the output."""
        raise NotImplementedError

    def moved(self, parts: Sequence[Any], traffic: Account) -> Sequence[Any]:
        """Return [target workers] the parts of the result."""
        raise NotImplementedError


class Reshard(LinearOperation):
    """Takes a tensor along some steps, adding parts that overlap; the adjoint goes back along the adjoint steps.

    These are send, scatter, gather, broadcast, sum-reduce, all-reduce, all-to-all and the re-sharding of plain tensors.
    Replicas of a plain tensor count once: the gradients of these are equal, and are not added. fill: what stands where
    a window sticks out of the tensor; it has no gradient.
    """

    def __init__(
        self,
        x: Any,
        steps: Sequence[ReshardStep],
        *,
        mesh: LayerMesh,
        primitive: str = "reshard",
        source: Sequence[Shape] | None = None,
        target: Sequence[Shape] | None = None,
        shape: Any = None,
        fill: float = 0.0,
        name: str = "",
    ) -> None:
        super().__init__(x, primitive, mesh=mesh, source=source, target=target, shape=shape, name=name)
        self._steps = tuple(steps)
        self._fill = fill

    def adjoint(self, grad_y: Any) -> LinearOperation:
        """Return the movement back to the input's workers."""
        (x,) = self.inputs
        return Reshard(
            grad_y,
            [step.adjoint for step in reversed(self._steps)],
            mesh=x.mesh,
            primitive=ADJOINTS.get(self.primitive, self.primitive),
            source=self._target,
            target=self._source,
            shape=x.shape,
        )

    def moved(self, parts: Sequence[Any], traffic: Account) -> Sequence[Any]:
        """Return what arrives at the end of the steps."""
        for step in self._steps:
            parts = self.carried(parts, step, traffic)
        return parts

    def carried(self, parts: Sequence[Any], step: ReshardStep, traffic: Account) -> list[Any]:
        """Return what one step delivers."""
        (x,) = self.inputs
        names = {
            device: name
            for mesh in (x.mesh, self.mesh)
            for device, name in zip(mesh.devices.devices, mesh.device_names, strict=True)
        }
        return run_step(
            parts,
            step,
            source_names=[names[device] for device in step.source.devices],
            target_names=[names[device] for device in step.target.devices],
            fill=self._fill,
            traffic=traffic,
        )


class HaloExchange(LinearOperation):
    """Overwrites the halos of every buffer with what the neighbours own, in place (Eq. 11).

    The boxes go straight to whoever needs them, corners and those beyond a neighbour included. Its adjoint adds every
    halo to the bulk that it is a copy of, and clears the halos (Eq. 12).
    """

    def __init__(self, x: Any, buffers: Buffers, *, is_adjoint: bool = False) -> None:
        primitive = "halo_adjoint" if is_adjoint else "halo_exchange"
        super().__init__(x, primitive, mesh=x.mesh, source=buffers.extents, target=buffers.extents)
        self._buffers = buffers
        self._is_adjoint = is_adjoint

    def adjoint(self, grad_y: Any) -> LinearOperation:
        """Return the exchange the other way."""
        return HaloExchange(grad_y, self._buffers, is_adjoint=not self._is_adjoint)

    def moved(self, parts: Sequence[Any], traffic: Account) -> Sequence[Any]:
        """Return the buffers: bulks go to the segments of all buffers, or, back, these to the bulks."""
        buffers, names, devices = self._buffers, self.mesh.device_names, self.mesh.devices.devices
        # [boxes] whose each is, and where in its buffer.
        bulks = list(enumerate(buffers.bulk_boxes))
        segments = [(i, at) for i, placed in enumerate(buffers.segments) for _, at in placed]
        boxes = tuple(box for placed in buffers.segments for box, _ in placed)
        target = Layout(
            shape=buffers.shape,
            devices=tuple(devices[i] for i, _ in segments),
            parts=tuple(range(len(boxes))),
            boxes=boxes,
        )
        step = ReshardStep(partition_layout(buffers.bulk, devices), target)
        if self._is_adjoint:
            bulks, segments, step = segments, bulks, step.adjoint
        arrived = run_step(
            [framed(parts[i], buffers.extents[i], at, names[i]) for i, at in bulks],
            step,
            source_names=[names[i] for i, _ in bulks],
            target_names=[names[i] for i, _ in segments],
            fill=0.0,
            traffic=traffic,
        )
        placed: list[list[tuple[Box, Any]]] = [[] for _ in names]
        for (i, at), tensor in zip(segments, arrived, strict=True):
            placed[i].append((at, tensor))
        results = []
        for items, shape, name in zip(placed, buffers.extents, names, strict=True):
            with tf.device(name):
                results.append(assembled(items, whole(shape), 0, parts[0].dtype))
        return results


class Frame(LinearOperation):
    """Each worker keeps the part of its own that a box encloses, with zeros where the box sticks out.

    This is allocation and deallocation (Eq. 3, 4), and the shims that cut unused points and add padding (Appendix B).
    frames: [workers] boxes in the parts' own coordinates. fill: stands instead of the zeros, and has no gradient.
    """

    def __init__(self, x: Any, source: Sequence[Shape], frames: Sequence[Box], *, fill: float = 0.0) -> None:
        self._shapes, self._frames, self._fill = tuple(source), tuple(frames), fill
        super().__init__(x, "frame", mesh=x.mesh, source=self._shapes, target=[extents(frame) for frame in frames])

    def adjoint(self, grad_y: Any) -> LinearOperation:
        """Return the framing that puts each point back where it came from."""
        back = [
            tuple((-low, n - low) for (low, _), n in zip(frame, shape, strict=True))
            for frame, shape in zip(self._frames, self._shapes, strict=True)
        ]
        return Frame(grad_y, [extents(frame) for frame in self._frames], back)

    def moved(self, parts: Sequence[Any], traffic: Account) -> Sequence[Any]:
        """Return what the frames enclose; nothing goes to another worker."""
        names = self.mesh.device_names
        return [framed(*item, self._fill) for item in zip(parts, self._shapes, self._frames, names, strict=True)]


Place = tuple[int, Box]
"""A subset of what workers hold: (worker, box in the coordinates of its part)."""


class Clear(LinearOperation):
    """Sets some subsets to zero (Eq. 5); its own adjoint. places: the subsets."""

    def __init__(self, x: Any, shapes: Sequence[Shape], places: Sequence[Place]) -> None:
        self._shapes, self._places = tuple(shapes), tuple(places)
        super().__init__(x, "clear", mesh=x.mesh, source=self._shapes, target=self._shapes)

    def adjoint(self, grad_y: Any) -> LinearOperation:
        """Return the same clearing."""
        return Clear(grad_y, self._shapes, self._places)

    def moved(self, parts: Sequence[Any], traffic: Account) -> Sequence[Any]:
        """Return the parts with zeros in the subsets, whatever stood there."""
        results = list(parts)
        for worker, box in self._places:
            kept = np.ones(self._shapes[worker], dtype=np.bool_)
            kept[tuple(slice(*limits) for limits in box)] = False
            with tf.device(self.mesh.device_names[worker]):
                results[worker] = tf.where(tf.constant(kept), results[worker], tf.zeros_like(results[worker]))
        return results


class Add(LinearOperation):
    """Adds one subset to another in place, S_{a→b} (Eq. 6); the adjoint is S_{b→a}. source, target: a and b."""

    def __init__(self, x: Any, shapes: Sequence[Shape], source: Place, target: Place) -> None:
        self._shapes, self._from, self._to = tuple(shapes), source, target
        super().__init__(x, "add", mesh=x.mesh, source=self._shapes, target=self._shapes)

    def adjoint(self, grad_y: Any) -> LinearOperation:
        """Return the addition the other way."""
        return Add(grad_y, self._shapes, self._to, self._from)

    def moved(self, parts: Sequence[Any], traffic: Account) -> Sequence[Any]:
        """Return the parts with one subset sent to the other's worker and added there."""
        (sender, source), (receiver, target) = self._from, self._to
        names, devices = self.mesh.device_names, self.mesh.devices.devices
        subset = partition(extents(source), [whole(extents(source))])
        (arrived,) = run_step(
            [framed(parts[sender], self._shapes[sender], source, names[sender])],
            ReshardStep(partition_layout(subset, [devices[sender]]), partition_layout(subset, [devices[receiver]])),
            source_names=[names[sender]],
            target_names=[names[receiver]],
            fill=0.0,
            traffic=traffic,
        )
        results = list(parts)
        with tf.device(names[receiver]):
            results[receiver] += assembled([(target, arrived)], whole(self._shapes[receiver]), 0, arrived.dtype)
        return results
