"""Convolutions that XLA's partitioner gets wrong, and what of their splits is held back so that it does not.

The partitioner adds parts of a convolution up over all devices, also where some of these hold equal parts: the result
is then a multiple of the right one. Found with jaxlib 0.10.2 by trying all pairs of splits of convolutions of several
kernels, strides and groups, values and both gradients, beside a single device; what is not held back here was right.
A test fails as soon as XLA computes these correctly.
"""

from dataclasses import replace
from math import prod

from pase.graph import Operator, Window
from pase.graph.access import access_dims
from pase.planning.plan import Plan
from pase.views.exports.named_mesh import NamedLayer, NamedMesh, NamedTensor

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
    windows = [(read, axis) for read in operator.reads for axis in read.axes if isinstance(axis, Window)]
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

    def told(tensors: tuple[NamedTensor, ...]) -> tuple[NamedTensor, ...]:
        return tuple(
            replace(
                tensor,
                dims=tuple(
                    replace(dim, axes=tuple(axis for axis in dim.axes if axis not in held), reason=_REASON)
                    if held.intersection(dim.axes)
                    else dim
                    for dim in tensor.dims
                ),
                sums=tuple(axis for axis in tensor.sums if axis not in held),
            )
            for tensor in tensors
        )

    return replace(
        layer,
        axes={dim: axes for dim, axes in layer.axes.items() if dim not in dims},
        inputs=told(layer.inputs),
        parameters=told(layer.parameters),
        outputs=told(layer.outputs),
    )
