"""How an operator touches a tensor: the one description from which every cost is derived."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import prod

from pase.errors import GraphError


@dataclass(frozen=True, slots=True)
class Dim:
    """A named dimension of an operator's iteration space; extent: number of points, at least 1."""

    name: str
    extent: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """A tensor dim read through a sliding window: output o and kernel point k read ``o·stride + k·dilation - pad``.

    out, kernel: iteration dims. pad: zeros before the first element; those after the last one follow from
    the extents. beyond: of these, how many a window may begin at (where there are as many as the kernel reaches over).
    A split of `out` exchanges halos.
    """

    out: str
    kernel: str
    stride: int = 1
    dilation: int = 1
    pad: int = 0
    beyond: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SliceOf:
    """A tensor dim that is the piece ``[offset, offset + extent)`` of an iteration dim: concatenation, split, slice."""

    dim: str
    offset: int
    extent: int


DimIndex = str | tuple[str, ...] | Window | SliceOf | None
"""One tensor dim: an iteration dim, a product of them (row-major), a window, a part, or None (not indexed)."""


class Role(StrEnum):
    """What a tensor is to the operator that reads it."""

    ACTIVATION = "activation"
    PARAMETER = "parameter"
    INDEX = "index"


@dataclass(frozen=True, slots=True, kw_only=True)
class Indexed:
    """A tensor over the iteration space of an operator.

    tensor: its name within the operator ("x", "w", "y"). shape: [rank] extents of the whole tensor.
    index_map: [rank] how each tensor dim is indexed.
    """

    tensor: str
    shape: tuple[int, ...]
    index_map: tuple[DimIndex, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Access(Indexed):
    """One tensor that an operator reads or writes.

    role: what it is. partial_over: iteration dims whose split leaves partial sums of this tensor (of its gradient, for
    a read), to be all-reduced; None means every dim that the access lacks, which is right for contractions.
    shared: for a parameter that several operators use, the name that they share. is_trained: of a parameter, whether
    training changes it; one that is frozen has no gradient.
    batch: of data that the network is given: (blocks, examples), where the tensor is, row-major, so many blocks of
    so many examples each; None where there are none, or it is not told (then the first dim is the batch).
    """

    role: Role = Role.ACTIVATION
    partial_over: tuple[str, ...] | None = None
    shared: str = ""
    is_trained: bool = True
    batch: tuple[int, int] | None = None

    @property
    def size(self) -> int:
        """Number of elements of the whole tensor."""
        return prod(self.shape)

    @property
    def is_differentiable(self) -> bool:
        """Whether the tensor can have a gradient (indices cannot)."""
        return self.role is not Role.INDEX


def extents_of(layer: str, shape: Sequence[int], names: Sequence[str]) -> dict[str, int]:
    """Return the extents of a tensor by the names of its dims; GraphError where there are not as many of both."""
    if len(shape) != len(names):
        raise GraphError(f"layer {layer!r} reads shape {tuple(shape)}; expected dims {', '.join(names)}")
    return dict(zip(names, shape, strict=True))


def dims_of(extents: Mapping[str, int]) -> tuple[Dim, ...]:
    """Return iteration dims of these extents, in order."""
    return tuple(Dim(name, extent) for name, extent in extents.items())


def axis_dims(axis: DimIndex) -> tuple[str, ...]:
    """Return the iteration dims whose split also splits this tensor dim.

    A window's kernel dim is not among them: each of its parts reads nearly the whole input, so that the
    input counts as replicated over it and its gradient as summed over it.
    """
    match axis:
        case None:
            return ()
        case str():
            return (axis,)
        case Window():
            return (axis.out,)
        case SliceOf():
            return (axis.dim,)
        case _:
            return axis


def split_dim(axis: DimIndex) -> str:
    """Return the iteration dim whose split also splits this tensor dim, "" where there is none, or for a product."""
    return "" if isinstance(axis, tuple) else next(iter(axis_dims(axis)), "")


def access_dims(access: Indexed) -> frozenset[str]:
    """Return the iteration dims whose split also splits the tensor."""
    return frozenset(dim for axis in access.index_map for dim in axis_dims(axis))


def named_dims(access: Indexed) -> frozenset[str]:
    """Return every iteration dim that the access names, kernels of windows included."""
    kernels = {axis.kernel for axis in access.index_map if isinstance(axis, Window)}
    return access_dims(access) | kernels
