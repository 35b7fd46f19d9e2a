"""A plan on one named mesh: for each tensor of each layer, the mesh axes that split each of its dims.

Frameworks describe a tensor's layout by mesh axes that split some of its dims evenly, so that the parts of a dim are
contiguous and of equal size. This module expresses a plan in these terms, or gives the reason where that is impossible.
It also withholds shardings for which XLA computes wrong results.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import prod

from pase.common.words import listed
from pase.graph import Access, DimIndex, Operator, Role, SliceOf, Window
from pase.graph.operator import access_dims
from pase.planning.plan import Plan
from pase.sharding.mesh_axes import Assignment, mesh_axes
from pase.targets.emitter.text import printable


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedDim:
    """A tensor dim on the mesh.

    Attributes:
        axes: Axes that split it, coarsest first.
        reason: Why they do not express how the plan splits it; empty where they do.
        is_open: Whether they express nothing, because parts have different sizes.
    """

    extent: int
    axes: tuple[str, ...] = ()
    reason: str = ""
    is_open: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedTensor:
    """A tensor of a layer on the mesh.

    Attributes:
        is_made: Whether a layer computes it, as opposed to data and parameters.
        sums: For an output, the axes over which it has partial sums before the all-reduce.
        shared: Name of a parameter that several layers share.
    """

    name: str
    dims: tuple[NamedDim, ...]
    is_made: bool = False
    sums: tuple[str, ...] = ()
    shared: str = ""

    @property
    def shape(self) -> tuple[int, ...]:
        """Extents of the whole tensor."""
        return tuple(dim.extent for dim in self.dims)


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedLayer:
    """A layer on the mesh.

    Attributes:
        splits: Split factors of the dims that are split.
        axes: For each of these dims the mesh axes, coarsest first.
        keeps_devices: Whether each device holds the part that the plan gives it.
        inputs, parameters, outputs: Its tensors.
    """

    name: str
    kind: str
    splits: Mapping[str, int]
    axes: Mapping[str, tuple[str, ...]]
    keeps_devices: bool
    inputs: tuple[NamedTensor, ...]
    parameters: tuple[NamedTensor, ...]
    outputs: tuple[NamedTensor, ...]

    @property
    def tensors(self) -> tuple[NamedTensor, ...]:
        """Return the layer's inputs, parameters and outputs."""
        return (*self.inputs, *self.parameters, *self.outputs)

    @property
    def reasons(self) -> tuple[str, ...]:
        """Return what the mesh does not express of the layer's tensors, and why."""
        return tuple(
            f"{tensor.name}, dim {number}: {dim.reason}"
            for tensor in self.tensors
            for number, dim in enumerate(tensor.dims)
            if dim.reason
        )

    def with_tensors(self, change: Callable[[NamedTensor], NamedTensor]) -> "NamedLayer":
        """Return the layer with `change` applied to each of its tensors."""
        groups = (self.inputs, self.parameters, self.outputs)
        inputs, parameters, outputs = (tuple(map(change, tensors)) for tensors in groups)
        return replace(self, inputs=inputs, parameters=parameters, outputs=outputs)


@dataclass(frozen=True, kw_only=True)
class NamedMesh:
    """A plan on a mesh.

    Attributes:
        names, sizes: Names and sizes of its axes.
        devices: [p] the plan's number of each device, row-major over the axes.
        layers: Layers in the plan's order.
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    devices: tuple[int, ...]
    layers: tuple[NamedLayer, ...]


def named_mesh(plan: Plan) -> NamedMesh:
    """Return a plan on one mesh with named axes: every layer's splits, and wherever possible its devices.

    A split of a window's output positions splits its input at the same places, evenly; the halo is fetched when the
    layer is computed. Raises nothing: whatever cannot be expressed carries its reason.
    """
    size, devices, assignments = mesh_axes(plan)
    layers = tuple(
        _layer(plan, operator, assignment, size)
        for operator, assignment in zip(plan.graph.operators, assignments, strict=True)
    )
    return NamedMesh(names=tuple(size), sizes=tuple(size.values()), devices=devices, layers=layers)


def _layer(plan: Plan, operator: Operator, assignment: Assignment, size: Mapping[str, int]) -> NamedLayer:
    splits = {dim: split for dim, split in plan[operator.name].splits.items() if split > 1}

    def named(access: Access, *, is_made: bool = False, sums: tuple[str, ...] = ()) -> NamedTensor:
        dims = tuple(
            _dim(axis, extent, operator, assignment.axes, size)
            for axis, extent in zip(access.index_map, access.shape, strict=True)
        )
        return NamedTensor(
            name=access.tensor,
            dims=dims,
            is_made=is_made,
            sums=sums,
            shared=access.shared,
        )

    return NamedLayer(
        name=operator.name,
        kind=operator.kind,
        splits=splits,
        axes=assignment.axes,
        keeps_devices=assignment.keeps_devices,
        inputs=tuple(
            named(read, is_made=(operator.name, position) in plan.graph.incoming)
            for position, read in enumerate(operator.reads)
            if read.role is not Role.PARAMETER
        ),
        parameters=tuple(named(read) for read in operator.parameters),
        outputs=tuple(
            named(
                write,
                is_made=True,
                sums=tuple(axis for dim in operator.partial_dims(write) for axis in assignment.axes.get(dim, ())),
            )
            for write in operator.writes
        ),
    )


def _dim(
    axis: DimIndex, extent: int, operator: Operator, axes: Mapping[str, tuple[str, ...]], size: Mapping[str, int]
) -> NamedDim:
    match axis:
        case None:
            return NamedDim(extent=extent)
        case str():
            return NamedDim(extent=extent, axes=axes.get(axis, ()))
        case Window():
            return _window(axis, extent, axes.get(axis.out, ()), size)
        case SliceOf():
            return _part(axis, extent, operator, axes.get(axis.dim, ()))
        case _:
            return _product(axis, extent, operator, axes, size)


def _window(axis: Window, extent: int, axes: tuple[str, ...], size: Mapping[str, int]) -> NamedDim:
    parts = prod(size[name] for name in axes)
    if extent % parts == 0:
        return NamedDim(extent=extent, axes=axes)
    reason = f"{parts} parts of {axis.out} read windows of {extent} points, which {parts} does not divide"
    return NamedDim(extent=extent, reason=reason, is_open=True)


def _part(axis: SliceOf, extent: int, operator: Operator, axes: tuple[str, ...]) -> NamedDim:
    if not axes or extent == operator.extents[axis.dim]:
        return NamedDim(extent=extent, axes=axes)
    if extent == 1:
        return NamedDim(extent=extent)  # Every part holds the single point.
    piece = f"the piece {axis.offset} to {axis.offset + extent} of {axis.dim}"
    return NamedDim(extent=extent, reason=f"{piece}, the whole of which is split", is_open=True)


def _product(
    names: tuple[str, ...],
    extent: int,
    operator: Operator,
    axes: Mapping[str, tuple[str, ...]],
    size: Mapping[str, int],
) -> NamedDim:
    # Parts of a product, row-major, are contiguous where every dim before a split one is split into single points.
    said: tuple[str, ...] = ()
    is_contiguous = True
    for name in names:
        own = axes.get(name, ())
        if own and not is_contiguous:
            return NamedDim(
                extent=extent,
                axes=said,
                reason=f"the product {'·'.join(names)} is split by {name}: its parts are not contiguous",
            )
        said += own
        is_contiguous = is_contiguous and prod(size[axis] for axis in own) == operator.extents[name]
    return NamedDim(extent=extent, axes=said)


def notes(mesh: NamedMesh) -> tuple[str, ...]:
    """Return what the mesh does not express of the plan: one line per reason, and one for the placement."""
    concerned: dict[tuple[str, ...], list[str]] = {}
    for layer in mesh.layers:
        if layer.reasons:
            concerned.setdefault(layer.reasons, []).append(layer.name)
    found = [f"{listed(names)}: {printable('; '.join(reasons), 500)}" for reasons, names in concerned.items()]
    elsewhere = [layer.name for layer in mesh.layers if not layer.keeps_devices]
    if elsewhere:
        found.append(
            f"on other devices than the plan's: {listed(elsewhere)}; they are split as planned, but no one mesh holds "
            "the placement of all layers: the same numbers, other traffic"
        )
    return tuple(found)


# -- shardings for which XLA computes wrong results

_REASON = "held back, because XLA (jaxlib 0.10.2) computes convolutions with this split incorrectly"


def without_miscomputed(plan: Plan, mesh: NamedMesh) -> NamedMesh:
    """Return the shardings that are safe under XLA: some convolutions are not split by position, a few not at all."""
    layers = tuple(
        _without(layer, _held_back(operator, layer, plan.num_devices))
        for operator, layer in zip(plan.graph.operators, mesh.layers, strict=True)
    )
    return replace(mesh, layers=layers)


def _held_back(operator: Operator, layer: NamedLayer, num_devices: int) -> frozenset[str]:
    """Return the dims whose splits must be withheld.

    XLA is wrong for positions that are split together with channels or the kernel, or on some of the devices only; and
    for grouped convolutions on some of the devices only. Splits within a group abort the process by a failed check.
    """
    windows = [(read, axis) for read in operator.reads for axis in read.index_map if isinstance(axis, Window)]
    kernels = {window.kernel for _, window in windows}
    weights = [access for access in operator.parameters if access_dims(access) & kernels]
    if not weights or all(operator.extents[kernel] == 1 for kernel in kernels):
        return frozenset()
    positions = frozenset(window.out for _, window in windows)
    read = frozenset[str]().union(*(access_dims(access) for access, _ in windows))
    written = frozenset[str]().union(*(access_dims(access) for access in operator.writes))
    weighed = frozenset[str]().union(*(access_dims(access) for access in weights))
    groups = read & written & weighed
    batch = (read & written) - weighed
    split = frozenset(layer.splits)
    if split <= batch | groups | positions and prod(layer.splits.values()) == num_devices:
        return frozenset()
    return split if groups else split & positions


def _without(layer: NamedLayer, dims: frozenset[str]) -> NamedLayer:
    held = {axis for dim in dims for axis in layer.axes[dim]}
    if not held:
        return layer

    def stripped(tensor: NamedTensor) -> NamedTensor:
        dims = (
            replace(dim, axes=tuple(axis for axis in dim.axes if axis not in held), reason=_REASON)
            if held.intersection(dim.axes)
            else dim
            for dim in tensor.dims
        )
        return replace(tensor, dims=tuple(dims), sums=tuple(axis for axis in tensor.sums if axis not in held))

    return replace(
        layer.with_tensors(stripped), axes={dim: axes for dim, axes in layer.axes.items() if dim not in dims}
    )
