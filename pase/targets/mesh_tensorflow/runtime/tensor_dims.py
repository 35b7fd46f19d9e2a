"""From an operator's accesses to the dims of the tensors that a program lays out."""

from pase.errors import EmitError
from pase.graph import Access, Operator, Part, Window
from pase.targets.mesh_tensorflow.runtime.layouts import PlainDim, TensorDim, WindowDim

WHOLE = "whole dim"
"""Name of a tensor dim that no iteration dim indexes; with a space, as no dim of ours has."""


def tensor_dims(operator: Operator, access: Access) -> tuple[TensorDim, ...]:
    """Return the dims of a tensor as its layer's mesh holds it: a product of iteration dims is one dim for each.

    A single point of a dim (what the first layer of a stack reads, what is broadcast) is none: every part holds it.
    Raises EmitError for an axis that no layout expresses (a larger piece of a dim).
    """
    dims: list[TensorDim] = []
    for axis, extent in zip(access.axes, access.shape, strict=True):
        match axis:
            case str():
                dims.append(PlainDim(axis, operator.extents[axis]))
            case tuple():
                dims.extend(PlainDim(name, operator.extents[name]) for name in axis)
            case Window():
                dims.append(
                    WindowDim(
                        out=axis.out,
                        out_extent=operator.extents[axis.out],
                        kernel=axis.kernel,
                        kernel_extent=operator.extents[axis.kernel],
                        extent=extent,
                        stride=axis.stride,
                        dilation=axis.dilation,
                        pad=axis.pad,
                    )
                )
            case None if extent > 1:
                dims.append(PlainDim(WHOLE, extent))
            case None | Part(extent=1):
                pass
            case _:
                raise EmitError(
                    f"layer {operator.name!r} ({operator.kind}): tensor {access.tensor!r} is indexed by {axis!r}, "
                    "which programs cannot lay out yet"
                )
    return tuple(dims)
