"""What is held back of a plan because XLA computes it wrong."""

from dataclasses import replace
from math import prod

from pase.graph import Operator, Window
from pase.graph.access import access_dims
from pase.planning.plan import Plan
from pase.targets.named_mesh import NamedLayer, NamedMesh, NamedTensor

_REASON = "held back, because XLA (jaxlib 0.10.2) computes a convolution wrong that is split so"


def without_miscomputed(plan: Plan, mesh: NamedMesh) -> NamedMesh:
    """Return what can be said to XLA: some convolutions are not split by position, a few are not split at all."""
    layers = tuple(
        _without(layer, _held_back(operator, layer, plan.num_devices))
        for operator, layer in zip(plan.graph.operators, mesh.layers, strict=True)
    )
    return replace(mesh, layers=layers)


def _held_back(operator: Operator, layer: NamedLayer, num_devices: int) -> frozenset[str]:
    """Return the dims whose splits are not to be said.

    Wrong are positions that are split together with channels or the kernel, or on some of the devices alone; and
    grouped convolutions on some of the devices alone. Splits within a group end the process by a failed check.
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

    def told(tensor: NamedTensor) -> NamedTensor:
        dims = (
            replace(dim, axes=tuple(axis for axis in dim.axes if axis not in held), reason=_REASON)
            if held.intersection(dim.axes)
            else dim
            for dim in tensor.dims
        )
        return replace(tensor, dims=tuple(dims), sums=tuple(axis for axis in tensor.sums if axis not in held))

    return replace(layer.with_tensors(told), axes={dim: axes for dim, axes in layer.axes.items() if dim not in dims})
