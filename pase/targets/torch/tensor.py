"""`Tensor`: a tensor with named dims as a rank holds it, and the one rule by which functions of tensors are sharded.

Everybody who holds a part of a tensor has the whole gradient of this part. A function that brings together dims which
one of its operands lacks uses this operand for other points on other ranks: its gradient there is a part of a sum, and
`spread` adds these parts. A result whose points are parts of sums is `partial` until somebody needs the sums. So what a
rank computes of its shards is differentiated by PyTorch, whatever the function.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING, Any

from pase.errors import ProgramError
from pase.sharding.layouts import DeviceMesh, Layout, PlainDim, layout_of

if TYPE_CHECKING:
    from pase.targets.torch.program import Program


@dataclass(frozen=True, slots=True)
class Dim:
    """A dim of a tensor with its extent on all ranks together."""

    name: str
    size: int


@dataclass(frozen=True, eq=False)
class LayerMesh:
    """The ranks of a layer as a grid. program: that it belongs to. is_host: whether it holds the model's inputs."""

    layer: str
    devices: DeviceMesh
    program: "Program"
    is_host: bool = False

    @cached_property
    def point(self) -> dict[str, int]:
        """The coordinates of this rank."""
        return self.devices.coordinates[self.devices.devices.index(self.program.rank)]

    def part(self, dim: Dim) -> int:
        """Return how many points of a dim this rank holds."""
        return dim.size // self.devices.size(dim.name)

    def begin(self, dim: Dim) -> int:
        """Return which point of a dim is the first that this rank holds."""
        return self.point.get(dim.name, 0) * self.part(dim)

    def split(self, names: Iterable[str]) -> frozenset[str]:
        """Return those of some dims that are split."""
        return frozenset(names) & frozenset(self.devices.split_axes)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Tensor:
    """A tensor on a mesh: dims in the order of the value's.

    value: what stands for this rank's shard while the program is traced. partial: dims over whose parts the points are
    parts of sums. is_index: whether it holds whole numbers. spreads: the tensor as functions use it that bring other
    dims, by these. over: dims over which readers may leave parts of its gradient, None where they sum their own.
    """

    value: Any
    mesh: LayerMesh
    dims: tuple[Dim, ...]
    partial: frozenset[str] = frozenset()
    is_index: bool = False
    spreads: dict[frozenset[str], Any] = field(default_factory=dict, repr=False)
    over: frozenset[str] | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the dims."""
        return tuple(dim.name for dim in self.dims)

    @property
    def size(self) -> int:
        """How many points all ranks have together."""
        return prod(dim.size for dim in self.dims)

    @property
    def shard(self) -> tuple[int, ...]:
        """The shape of this rank's shard."""
        return tuple(map(self.mesh.part, self.dims))

    @property
    def layout(self) -> Layout:
        """Which rank holds which box."""
        return layout_of(self.mesh.devices, [PlainDim(d.name, d.size) for d in self.dims], layer=self.mesh.layer)

    def __add__(self, other: Any) -> "Tensor":
        from pase.targets.torch.layers.points import apply

        return apply("add", self, other)

    __radd__ = __add__


def local(
    function: Callable[..., Any],
    xs: Sequence[Tensor],
    dims: Iterable[Dim],
    *,
    partial_over: Iterable[str] = (),
    is_linear: bool = False,
    is_index: bool = False,
) -> Tensor:
    """Return what a PyTorch function of this rank's shards makes.

    Args:
        function: of one shard of each tensor.
        xs: tensors of one mesh.
        dims: of the result.
        partial_over: names of dims of the operands; where they are split, the result's points are parts of sums.
        is_linear: whether parts of sums may be taken for sums: the function of a single tensor with parts is that of
            the sums, in parts.
        is_index: whether the result holds whole numbers.

    Raises:
        ProgramError: the tensors are on several meshes.
    """
    mesh = one_mesh(xs)
    dims = tuple(dims)
    if not is_linear:
        xs = [resolved(x) for x in xs]
    over = mesh.split(partial_over)
    brought = {*over, *mesh.split(name for x in xs for name in x.names), *mesh.split(dim.name for dim in dims)}
    value = function(*(spread(x, brought - {*x.names, *x.partial}).value for x in xs))
    partial = over.union(*(x.partial for x in xs))
    return Tensor(value=value, mesh=mesh, dims=dims, partial=partial, is_index=is_index)


def one_mesh(xs: Sequence[Tensor]) -> LayerMesh:
    """Return the mesh of tensors; ProgramError where they are on several."""
    mesh = xs[0].mesh
    for x in xs:
        if x.mesh is not mesh:
            raise ProgramError(
                f"a function reads tensors of two meshes, those of layers {mesh.layer!r} and {x.mesh.layer!r}; "
                "reshard one of them"
            )
    return mesh


def spread(x: Tensor, over: Iterable[str]) -> Tensor:
    """Return a tensor whose gradient arrives in parts over some dims that it lacks; they are added."""
    axes = x.mesh.split(over)
    if not axes or x.is_index:
        return x
    if axes not in x.spreads:
        value = x.mesh.program.gradient_sum(x, axes)
        x.spreads[axes] = replace(x, value=value, spreads={}, over=None)
    found: Tensor = x.spreads[axes]
    return found


def resolved(x: Tensor) -> Tensor:
    """Return a tensor with its points' sums in place of their parts."""
    if not x.partial:
        return x
    if x.partial not in x.spreads:
        value = x.mesh.program.sum(x)
        x.spreads[x.partial] = replace(x, value=value, partial=frozenset(), spreads={})
    found: Tensor = x.spreads[x.partial]
    return found
