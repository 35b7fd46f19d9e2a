"""Primitives on arrays, without a program around them: what every worker gets, what comes back, and Eq. 13."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from pase.errors import PrimitiveError
from pase.sharding.boxes import Partition
from pase.sharding.halos import Buffers, Kernel, halo_buffers
from pase.sharding.layouts import DeviceMesh
from pase.sharding.reshard import Pairs, add_pairs, moved_pairs
from pase.targets.mesh_tensorflow.primitives.compat import mtf, tf
from pase.targets.mesh_tensorflow.primitives.data_movement import allocate, halo_exchange, windows
from pase.targets.mesh_tensorflow.primitives.mesh import LayerMesh, ProgramGraph, Traffic
from pase.targets.mesh_tensorflow.primitives.parts import Distributed, Reshard, from_parts, part_tensors

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


class Workspace:
    """Sets of workers on virtual CPUs, in a graph of their own: arrays go in, primitives between them, arrays come out.

    A context in which operations are added to that graph.
    """

    def __init__(self) -> None:
        self.graph = mtf.Graph()
        self.traffic = Traffic()
        self._tensorflow = ProgramGraph()
        self.meshes: list[LayerMesh] = []

    def __enter__(self) -> Self:
        self._context = self._tensorflow.as_default()
        self._context.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._context.__exit__(*error)

    def workers(self, devices: Sequence[int], axes: Sequence[tuple[str, int]] | None = None) -> LayerMesh:
        """Return a set of workers on these devices, in a row or in a grid of some axes."""
        name = f"workers{len(self.meshes)}"
        grid = DeviceMesh(tuple(axes or [("worker", len(devices))]), tuple(devices))
        mesh = LayerMesh(self.graph, name=name, layer=name, devices=grid, device_name=lambda i: f"/device:CPU:{i + 1}")
        self.meshes.append(mesh)
        return mesh

    def put(self, mesh: LayerMesh, held: Partition | Buffers, parts: Sequence[Array]) -> Distributed:
        """Return the tensor of which each worker holds an array."""
        tensors = []
        for part, name in zip(parts, mesh.device_names, strict=False):
            with tf.device(name):
                tensors.append(tf.constant(part))
        return from_parts(mesh, held, tensors)

    def share(self, mesh: LayerMesh, held: Partition, array: Array) -> Distributed:
        """Return the tensor of which each worker holds its box of an array."""
        return self.put(mesh, held, [array[tuple(slice(*limits) for limits in box)] for box in held.boxes])

    def gradients(
        self, y: Distributed, xs: Sequence[Distributed], dy: Distributed | None = None
    ) -> tuple[Distributed, ...]:
        """Return the gradients of y, by default of a number that one worker holds, as the xs lie."""
        found = mtf.gradients([y.tensor], [x.tensor for x in xs], grad_ys=None if dy is None else [dy.tensor])
        return tuple(Distributed(tensor, x.held) for tensor, x in zip(found, xs, strict=True))

    def run(self, *xs: Distributed, **options: Any) -> list[list[Array]]:
        """Return [tensors][workers] the parts. options: of TensorFlow's session."""
        lowering = mtf.Lowering(
            self.graph, {mesh: mesh.implementation(self.traffic) for mesh in self.meshes}, autostack=False
        )
        tensors = [part_tensors(lowering, x) for x in xs]
        config = tf.ConfigProto(device_count={"CPU": 2 + max(max(mesh.devices.devices) for mesh in self.meshes)})
        # Where a process has fewer virtual CPUs than workers, these share some.
        config.allow_soft_placement = True
        # Nothing folded or merged: what is sent is what was planned.
        config.graph_options.rewrite_options.disable_meta_optimizer = True
        config.graph_options.optimizer_options.opt_level = tf.OptimizerOptions.L0
        with tf.Session(config=config) as session:
            found: list[list[Array]] = session.run(tensors, **options)
        return found

    @property
    def operations(self) -> tuple[Reshard, ...]:
        """The primitives that were made, adjoints included."""
        return tuple(operation for operation in self.graph.operations if isinstance(operation, Reshard))

    @property
    def predicted_bytes(self) -> Pairs:
        """What these move between devices: (sender, receiver) → bytes."""
        total: Pairs = {}
        for operation in self.operations:
            size = operation.inputs[0].dtype.size
            add_pairs(total, ((ends, points * size) for ends, points in moved_pairs(operation.steps).items()))
        return total


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
    with Workspace() as space:
        x = space.put(space.workers(range(len(held.extents)) if devices is None else devices), held, parts)
        result = primitive(x, space.workers)
        if cotangent is None:
            numbers = np.random.default_rng(0)
            cotangent = [numbers.standard_normal(shape).astype(parts[0].dtype) for shape in result.held.extents]
        (dx,) = space.gradients(result, [x], space.put(result.mesh, result.held, cotangent))
        forward, adjoint = space.run(result, dx)
    return Evaluation(
        x=tuple(parts),
        forward=tuple(forward),
        y=tuple(cotangent),
        adjoint=tuple(adjoint),
        primitives=tuple(operation.primitive for operation in space.operations),
        moved_bytes=sum(space.predicted_bytes.values()),
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
