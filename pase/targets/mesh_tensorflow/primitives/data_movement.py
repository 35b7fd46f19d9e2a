"""Data movement between sets of workers, for programs to call; the gradient of each is its adjoint.

Names and adjoints are those of section 3 of Hewett and Grady (2020). A set of workers is a `LayerMesh`; a tensor on it
is `Distributed`. Every function raises PrimitiveError where partitions and workers do not fit together. A `Workspace`
runs primitives on arrays, without a program around them, and `evaluate` tells how far one is from Eq. 13.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Self

import numpy as np

from pase.errors import PrimitiveError
from pase.sharding.boxes import (
    Box,
    Partition,
    blocks,
    expect_cover,
    expect_shape,
    extents,
    intersection,
    partition,
    whole,
)
from pase.sharding.halos import Buffers, Kernel, exchange_steps, halo_buffers
from pase.sharding.layouts import DeviceMesh, Layout, Place, PlainDim, apart, check_split, layout_of, partition_layout
from pase.sharding.reshard import Pairs, ReshardStep, add_pairs, addition, clearing, framing, moved_pairs
from pase.targets.mesh_tensorflow.primitives.compat import mtf, tf
from pase.targets.mesh_tensorflow.primitives.mesh import LayerMesh, ProgramGraph, Traffic
from pase.targets.mesh_tensorflow.primitives.parts import Distributed, Reshard, expect_workers, from_parts, part_tensors


def send_receive(x: Distributed, mesh: LayerMesh) -> Distributed:
    """Return x on other workers, each of which receives the part of the one in its place; the copy C_{a→b}.

    The sender's part may still be used: its gradient is then the sum of both.
    """
    return _copied("send_receive", x, range(len(x.held.extents)), mesh)


def scatter(x: Distributed, mesh: LayerMesh, parts: Partition) -> Distributed:
    """Return parts of a tensor that one worker holds, on many workers; the adjoint gathers.

    Parts may overlap, or leave elements out: the adjoint adds what came from one element, and none is zero.
    """
    held = _partition(x, "scatter")
    _expect_one(held, "scatter")
    expect_shape(parts, held.shape, "scatter")
    return _moved("scatter", x, (held, parts), mesh)


def gather(x: Distributed, mesh: LayerMesh) -> Distributed:
    """Return the whole of a partitioned tensor, on the one worker of a mesh; the adjoint is `scatter`."""
    held = _partition(x, "gather")
    expect_cover(held, held.shape, "gather")
    return _moved("gather", x, (held, partition(held.shape, [whole(held.shape)])), mesh)


def broadcast(x: Distributed, mesh: LayerMesh, roots: Sequence[int | None] | None = None) -> Distributed:
    """Return copies of parts on many workers (Eq. 8); the adjoint is `sum_reduce` (Eq. 9).

    roots: [workers of the mesh] which worker of x each one copies, None for one that gets an empty part; by default x
    has one worker.
    """
    held = _partition(x, "broadcast")
    if roots is None:
        _expect_one(held, "broadcast")
        roots = [0] * len(mesh.device_names)
    if any(root is not None and not 0 <= root < len(held.boxes) for root in roots):
        raise PrimitiveError(f"broadcast: the roots {list(roots)} must be workers 0 to {len(held.boxes) - 1} of x")
    return _copied("broadcast", x, roots, mesh)


def sum_reduce(x: Distributed, mesh: LayerMesh, parts: Partition | None = None) -> Distributed:
    """Return the sums of equal boxes, each on one worker; the adjoint is `broadcast`.

    parts: [workers of the mesh] the box that each one sums up; by default the workers of x hold one box, and one
    worker gets the sum.
    """
    held = _partition(x, "sum_reduce")
    target = parts or partition(held.shape, held.boxes[:1])
    _expect_disjoint(target, "sum_reduce")
    missing = [box for box in held.boxes if box not in target.boxes]
    if missing or target.shape != held.shape:
        raise PrimitiveError(
            f"sum_reduce: workers hold {sorted(set(held.boxes))} and the sums go to {list(target.boxes)}; "
            "every box must be one of the targets'"
        )
    return _moved("sum_reduce", x, (held, target), mesh)


def all_reduce(x: Distributed) -> Distributed:
    """Return, for every worker, the sum over all workers that hold the same box; its own adjoint.

    Boxes must be equal or disjoint.
    """
    held = _partition(x, "all_reduce")
    groups: dict[Box, list[int]] = {}
    for i, box in enumerate(held.boxes):
        groups.setdefault(box, []).append(i)
    _expect_disjoint(Partition(shape=held.shape, boxes=tuple(groups)), "all_reduce")
    shares: list[Box] = list(held.boxes)
    for box, members in groups.items():
        for i, share in zip(members, _shares(box, len(members)), strict=True):
            shares[i] = share
    return _moved("all_reduce", x, (held, partition(held.shape, shares), held), x.mesh)


def all_to_all(x: Distributed, mesh: LayerMesh, parts: Partition, *, fill: float = 0.0) -> Distributed:
    """Return a partitioned tensor in other parts, on any workers; the adjoint takes it back.

    The workers of x hold each element once. The parts that are asked for may overlap, or leave elements out: the
    adjoint adds what came from one element, and none is zero. fill: what stands where a part sticks out of the tensor.
    """
    held = _partition(x, "all_to_all")
    expect_cover(held, held.shape, "all_to_all")
    expect_shape(parts, held.shape, "all_to_all")
    return _moved("all_to_all", x, (held, parts), mesh, fill=fill)


def allocate(x: Distributed, buffers: Buffers) -> Distributed:
    """Return the bulks with room for halos, zeros for now (Eq. 3); the adjoint is deallocation (Eq. 4)."""
    held = _partition(x, "allocate")
    if held != buffers.bulk:
        raise PrimitiveError(
            f"allocate: workers hold {list(held.boxes)}, the bulks of the buffers are {list(buffers.bulk.boxes)}; "
            "partition the tensor as the buffers have it first"
        )
    frames = [
        tuple((-low, n - low) for (low, _), n in zip(bulk, shape, strict=True))
        for bulk, shape in zip(buffers.bulk_boxes, buffers.extents, strict=True)
    ]
    return _within("frame", x, framing(held.extents, frames, x.mesh.devices.devices), buffers)


def halo_exchange(x: Distributed) -> Distributed:
    """Return buffers whose halos hold what other workers own (Eq. 11); what stood in the halos is overwritten.

    In the adjoint (Eq. 12) halos are added to the bulk that they are copies of.
    """
    buffers = _buffers(x, "halo_exchange")
    return _within("halo_exchange", x, exchange_steps(buffers, x.mesh.devices.devices), buffers)


def windows(x: Distributed, *, fill: float = 0.0) -> Distributed:
    """Return what each worker's kernel is applied to: buffers without what is unused, with `fill` as padding."""
    buffers = _buffers(x, "windows")
    steps = framing(buffers.extents, buffers.window_boxes, x.mesh.devices.devices)
    return _within("frame", x, steps, buffers.windows, fill=fill)


def clear(x: Distributed, *places: Place) -> Distributed:
    """Return x with zeros in some subsets (Eq. 5); its own adjoint. places: (worker, box in its part's coordinates)."""
    for place in places:
        _expect_place(x, place, "clear")
    return _within("clear", x, clearing(x.held.extents, places, x.mesh.devices.devices), x.held)


def add(x: Distributed, source: Place, target: Place) -> Distributed:
    """Return x with one subset added to another one of its shape, in place (Eq. 6); the adjoint adds them back.

    Args:
        x: the tensor.
        source: the worker that holds what is added, and the box of it in the coordinates of its part.
        target: the same of what it is added to.
    """
    for place in (source, target):
        _expect_place(x, place, "add")
    if extents(source[1]) != extents(target[1]):
        raise PrimitiveError(
            f"add: subsets of shapes {list(extents(source[1]))} and {list(extents(target[1]))}; give boxes of one shape"
        )
    if source[0] == target[0] and intersection(source[1], target[1]) is not None:
        raise PrimitiveError(
            f"add: {list(source[1])} and {list(target[1])} of worker {source[0]} overlap; give boxes that share nothing"
        )
    return _within("add", x, addition(x.held.extents, source, target, x.mesh.devices.devices), x.held)


def copy(x: Distributed, source: Place, target: Place) -> Distributed:
    """Return x with one subset in the place of another, C_{a→b} = S_{a→b} K_b; arguments as for `add`."""
    return add(clear(x, target), source, target)


def move(x: Distributed, source: Place, target: Place) -> Distributed:
    """Return x with one subset in the place of another and zeros in its own, M_{a→b} = K_a S_{a→b} K_b."""
    return clear(copy(x, source, target), source)


def to_parts(x: Any, mesh: LayerMesh, parts: Partition) -> Distributed:
    """Return a plain tensor in a partition, on any workers, each part from the nearest replica.

    A plain tensor lies evenly on its mesh and the replicas. The adjoint is `to_tensor`. Raises PrimitiveError where the
    partition is no cover.
    """
    expect_cover(parts, x.shape.to_integer_list, "to_parts")
    expect_workers(parts, mesh, "to_parts")
    step = ReshardStep(_plain(x.mesh, x.shape), partition_layout(parts, mesh.devices.devices))
    moved = Reshard(x, [step], mesh=mesh, primitive="to_parts", target=parts.extents)
    return Distributed(moved.outputs[0], parts)


def to_tensor(x: Distributed, mesh: LayerMesh, dims: Sequence[Any]) -> Any:
    """Return a partitioned tensor as a plain one, on every replica, split by the mesh's axes of its dims' names.

    The adjoint is `to_parts`. Raises PrimitiveError where x does not hold each element once, ProgramError where a
    split does not divide its dim.
    """
    if not isinstance(x.held, Partition):
        raise PrimitiveError("to_tensor: the workers hold buffers with halos; take their windows or a partition first")
    expect_cover(x.held, [dim.size for dim in dims], "to_tensor")
    shape = mtf.Shape(list(dims))
    step = ReshardStep(partition_layout(x.held, x.mesh.devices.devices), _plain(mesh, shape))
    moved = Reshard(x.tensor, [step], mesh=mesh, primitive="to_tensor", source=x.held.extents, shape=shape)
    return moved.outputs[0]


def _plain(mesh: LayerMesh, shape: Any) -> Layout:
    dims = [PlainDim(dim.name, dim.size) for dim in shape.dims]
    check_split(mesh.layer, mesh.devices, [axis for dim in dims for axis in dim.axes])
    return layout_of(mesh.devices, dims, layer=mesh.layer)


def _moved(
    primitive: str, x: Distributed, path: Sequence[Partition], mesh: LayerMesh, *, fill: float = 0.0
) -> Distributed:
    """Move along a path of partitions; what it passes through lies on the result's workers."""
    expect_workers(path[-1], mesh, primitive)
    meshes = [x.mesh, *[mesh] * (len(path) - 1)]
    stops = [partition_layout(stop, at.devices.devices) for stop, at in zip(path, meshes, strict=True)]
    return _within(primitive, x, [ReshardStep(*ends) for ends in pairwise(stops)], path[-1], mesh, fill=fill)


def _copied(primitive: str, x: Distributed, roots: Sequence[int | None], mesh: LayerMesh) -> Distributed:
    """Give each worker of a mesh the part of one of x's workers, whether parts overlap or not."""
    boxes = _partition(x, primitive).boxes
    nothing = whole([0] * len(x.held.shape))
    target = Partition(shape=x.held.shape, boxes=tuple(nothing if root is None else boxes[root] for root in roots))
    expect_workers(target, mesh, primitive)
    step = ReshardStep(
        apart(enumerate(boxes), x.mesh.devices.devices),
        apart(((root or 0, box) for root, box in zip(roots, target.boxes, strict=True)), mesh.devices.devices),
    )
    return _within(primitive, x, [step], target, mesh)


def _within(
    primitive: str,
    x: Distributed,
    steps: Sequence[ReshardStep],
    held: Partition | Buffers,
    mesh: LayerMesh | None = None,
    *,
    fill: float = 0.0,
) -> Distributed:
    """Return what workers, by default those of x, hold after some steps."""
    made = Reshard(
        x.tensor,
        steps,
        mesh=mesh or x.mesh,
        primitive=primitive,
        source=x.held.extents,
        target=held.extents,
        fill=fill,
    )
    return Distributed(made.outputs[0], held)


def _shares(box: Box, num_workers: int) -> list[Box]:
    """Return a box cut in balanced pieces along its longest dim."""
    sizes = [high - low for low, high in box]
    longest = sizes.index(max(sizes))
    if not sizes[longest]:
        return [box] * num_workers
    cuts = blocks([sizes[longest]], [num_workers]).boxes
    low = box[longest][0]
    return [(*box[:longest], (low + a, low + b), *box[longest + 1 :]) for ((a, b),) in cuts]


def _partition(x: Distributed, name: str) -> Partition:
    if not isinstance(x.held, Partition):
        raise PrimitiveError(f"{name}: the workers hold buffers with halos; exchange them and take their windows first")
    return x.held


def _buffers(x: Distributed, name: str) -> Buffers:
    if not isinstance(x.held, Buffers):
        raise PrimitiveError(f"{name}: the workers hold no buffers with halos; allocate them first")
    return x.held


def _expect_one(held: Partition, name: str) -> None:
    if held.boxes != (whole(held.shape),):
        raise PrimitiveError(
            f"{name}: one worker must hold the whole tensor; {len(held.boxes)} hold {list(held.boxes)}"
        )


def _expect_disjoint(parts: Partition, name: str) -> None:
    boxes = parts.boxes
    for i, box in enumerate(boxes):
        for other in boxes[:i]:
            if intersection(box, other) is not None:
                raise PrimitiveError(
                    f"{name}: parts {list(other)} and {list(box)} overlap; give parts that have no element in common"
                )


def _expect_place(x: Distributed, place: Place, name: str) -> None:
    worker, box = place
    shapes = x.held.extents
    if not 0 <= worker < len(shapes):
        raise PrimitiveError(f"{name}: worker {worker} is none of the {len(shapes)} that hold the tensor")
    inside = len(box) == len(shapes[worker]) and all(
        0 <= low < high <= n for (low, high), n in zip(box, shapes[worker], strict=True)
    )
    if not inside:
        raise PrimitiveError(
            f"{name}: {list(box)} is no box of worker {worker}'s part, of shape {list(shapes[worker])}; "
            "give one half-open range for each dim, in the part's own coordinates"
        )


# -- on arrays


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
