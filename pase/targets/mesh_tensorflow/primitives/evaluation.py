"""One primitive on arrays, without a program around it: what every worker gets, what comes back, and Eq. 13."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pase.errors import PrimitiveError
from pase.sharding.boxes import Partition
from pase.sharding.halos import Buffers, Kernel, halo_buffers
from pase.sharding.layouts import DeviceMesh
from pase.targets.mesh_tensorflow.primitives.data_movement import allocate, halo_exchange, windows
from pase.targets.mesh_tensorflow.primitives.mesh import LayerMesh
from pase.targets.mesh_tensorflow.primitives.parts import Distributed, from_parts, part_tensors
from pase.targets.mesh_tensorflow.primitives.traffic import Traffic
from pase.targets.mesh_tensorflow.runtime.compat import mtf, tf

Array = np.ndarray[Any, Any]

Workers = Callable[[Sequence[int]], LayerMesh]
"""From devices to a set of workers on them."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Evaluation:
    """What a primitive F gave.

    x, forward: [workers] the parts that went in, and those of F x. y, adjoint: a cotangent, and F* y. primitives: what
    was done, there and back. moved_bytes: between devices, there and back.
    """

    x: tuple[Array, ...]
    forward: tuple[Array, ...]
    y: tuple[Array, ...]
    adjoint: tuple[Array, ...]
    primitives: tuple[str, ...]
    moved_bytes: int

    @property
    def defect(self) -> float:
        """The left side of Eq. 13, which rounding alone keeps from zero."""
        return adjoint_defect(self.x, self.forward, self.y, self.adjoint)


def adjoint_defect(x: Sequence[Array], fx: Sequence[Array], y: Sequence[Array], fty: Sequence[Array]) -> float:
    """Return |⟨F x, y⟩ - ⟨x, F* y⟩| / max(‖F x‖ ‖y‖, ‖x‖ ‖F* y‖) (Eq. 13), each tensor as its workers' parts."""
    flat = [np.concatenate([part.astype(np.float64).reshape(-1) for part in parts]) for parts in (x, fx, y, fty)]
    of_x, of_fx, of_y, of_fty = flat
    difference = abs(float(of_fx @ of_y) - float(of_x @ of_fty))
    norms = [float(np.linalg.norm(values)) for values in flat]
    largest = max(norms[1] * norms[2], norms[0] * norms[3])
    return difference / largest if largest else difference


def evaluate(
    primitive: Callable[[Distributed, Workers], Distributed],
    held: Partition | Buffers,
    parts: Sequence[Array],
    *,
    devices: Sequence[int] | None = None,
    cotangent: Sequence[Array] | None = None,
) -> Evaluation:
    """Return what a primitive, or several in a row, makes of arrays, and its adjoint of a cotangent.

    Args:
        primitive: from the tensor, and what makes further sets of workers, to the result.
        held: what each worker holds.
        parts: [workers] the arrays.
        devices: [workers] the device of each one, by default in order.
        cotangent: [workers of the result] of its parts' shapes; by default drawn, the same each time.

    Raises:
        PrimitiveError: where partitions and workers do not fit together.
    """
    with tf.Graph().as_default():
        graph, traffic, meshes = mtf.Graph(), Traffic(), list[LayerMesh]()

        def workers(of: Sequence[int]) -> LayerMesh:
            name = f"workers{len(meshes)}"
            grid = DeviceMesh((("worker", len(of)),), tuple(of))
            mesh = LayerMesh(graph, name=name, layer=name, devices=grid, device_name=lambda i: f"/device:CPU:{i + 1}")
            meshes.append(mesh)
            return mesh

        def placed(mesh: LayerMesh, of: Partition | Buffers, arrays: Sequence[Array]) -> Distributed:
            return from_parts(mesh, of, [tf.constant(array) for array in arrays])

        x = placed(workers(range(len(held.extents)) if devices is None else devices), held, parts)
        result = primitive(x, workers)
        if cotangent is None:
            numbers = np.random.default_rng(0)
            cotangent = [numbers.standard_normal(shape).astype(parts[0].dtype) for shape in result.held.extents]
        dy = placed(result.mesh, result.held, cotangent)
        (dx,) = mtf.gradients([result.tensor], [x.tensor], grad_ys=[dy.tensor])
        lowering = mtf.Lowering(graph, {mesh: mesh.implementation(traffic) for mesh in meshes}, autostack=False)
        tensors = part_tensors(lowering, result), part_tensors(lowering, Distributed(dx, held))
        # Where a process has fewer virtual CPUs than workers, these share some.
        config = tf.ConfigProto(device_count={"CPU": 1 + max(max(mesh.devices.devices) for mesh in meshes) + 1})
        config.allow_soft_placement = True
        with tf.Session(config=config) as session:
            forward, adjoint = session.run(tensors)
        names = tuple(operation.primitive for operation in graph.operations if hasattr(operation, "primitive"))
    return Evaluation(
        x=tuple(parts),
        forward=tuple(forward),
        y=tuple(cotangent),
        adjoint=tuple(adjoint),
        primitives=names,
        moved_bytes=traffic.total_bytes,
    )


def halo(x: Array, kernels: Sequence[Kernel], counts: Sequence[int], *, fill: float = 0.0) -> tuple[Array, ...]:
    """Return [workers] what each one's kernel is applied to, after the halo exchange of an array in balanced blocks.

    Args:
        x: the whole array.
        kernels: what slides along each dim; `Kernel(extent=1)` where nothing does.
        counts: in how many parts each dim is split; workers are row-major over the parts.
        fill: what stands in the padding.

    Raises:
        PrimitiveError: where a kernel does not fit, or there is not one for each dim.
    """
    if x.ndim != len(counts):
        raise PrimitiveError(f"parts {list(counts)} for an array of shape {list(x.shape)}; give each dim a number")
    buffers = halo_buffers(x.shape, kernels, counts)
    blocks = [x[tuple(slice(*limits) for limits in box)] for box in buffers.bulk.boxes]
    found = evaluate(lambda y, _: windows(halo_exchange(allocate(y, buffers)), fill=fill), buffers.bulk, blocks)
    return found.forward
