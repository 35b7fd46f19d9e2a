"""`Tensor`: a rank's shard of a tensor with named dims, and the rule by which all functions are sharded.

Every rank with a part of a tensor has the complete gradient of this part. A function that combines dims which one of
its operands lacks uses this operand for other points on other ranks: its gradient there is a partial sum, and `spread`
all-reduces it. A result whose points are partial sums is `partial` until a consumer needs the sums. PyTorch can
therefore differentiate a rank's computation on its shards, whatever the function.

`torch.autocast` computes products in low types, and on a GPU inaccurate functions in float32. Here both are done on any
device, so that communication uses the plan's types (`pase.graph.precision`).
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from typing import Any

import torch
from torch import nn

from pase.errors import ProgramError
from pase.sharding.boxes import even_part
from pase.sharding.layouts import DeviceMesh, Layout, PlainDim, TensorDim, WindowDim, layout_of
from pase.sharding.reshard import reshard_steps, sum_groups
from pase.sharding.traffic import Movement, Phase


@dataclass(frozen=True, slots=True)
class Dim:
    """A dim of a tensor with its global extent.

    parts: number of points of each part, where that is not the balanced partition.
    """

    name: str
    size: int
    parts: tuple[int, ...] = ()


@dataclass(frozen=True, eq=False)
class LayerMesh:
    """The ranks of a layer as a grid.

    Attributes:
        program: The `Program` that it belongs to.
        is_host: Whether it holds the model's inputs.
        state: State of the layer's weights, a name of `pase.planning.plan.STATES`.
    """

    layer: str
    devices: DeviceMesh
    program: Any
    is_host: bool = False
    state: str = "replicated"

    @cached_property
    def point(self) -> dict[str, int]:
        if self.is_host:  # every rank has the complete inputs
            return {}
        return self.devices.coordinates[self.devices.devices.index(self.program.rank)]

    def part(self, dim: Dim) -> int:
        number = self.point.get(dim.name, 0)
        if dim.parts:
            return dim.parts[number]
        low, high = even_part(dim.size, self.devices.size(dim.name), number)
        return high - low

    def begin(self, dim: Dim) -> int:
        """Return which point of a dim is the first that this rank holds."""
        return even_part(dim.size, self.devices.size(dim.name), self.point.get(dim.name, 0))[0]

    def split(self, names: Iterable[str]) -> frozenset[str]:
        """Return the dims, of those given, that are split."""
        return frozenset(names) & frozenset(self.devices.split_axes)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Tensor:
    """A tensor on a mesh: dims in the order of the value's.

    Attributes:
        value: Proxy of this rank's shard while the program is traced.
        partial: Dims over whose parts the points are partial sums.
        is_index: Whether it has integers.
        spreads: Versions of the tensor for functions that combine other dims, by these dims.
        over: Dims over which consumers may leave its gradient partial, None where they reduce it themselves.
        is_product: Whether it is the result of a product, so that an added weight is its bias.
    """

    value: Any
    mesh: LayerMesh
    dims: tuple[Dim, ...]
    partial: frozenset[str] = frozenset()
    is_index: bool = False
    spreads: dict[frozenset[str], Any] = field(default_factory=dict, repr=False)
    over: frozenset[str] | None = None
    is_product: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(dim.name for dim in self.dims)

    @property
    def size(self) -> int:
        return prod(dim.size for dim in self.dims)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(dim.size for dim in self.dims)

    @property
    def shard(self) -> tuple[int, ...]:
        return tuple(map(self.mesh.part, self.dims))

    @property
    def layout(self) -> Layout:
        return layout_of(self.mesh.devices, [PlainDim(d.name, d.size) for d in self.dims], layer=self.mesh.layer)

    def __add__(self, other: Any) -> "Tensor":
        if not isinstance(other, Tensor):
            return local(lambda x: x + other, [self], self.dims, is_index=self.is_index and float(other).is_integer())
        xs = (self, other)
        dims = joined_dims(xs)
        program = self.mesh.program
        is_bias = self.is_product and any(other is weight.tensor for weight in program.weights.values())

        def add(x: Any, y: Any) -> Any:
            if is_bias and program.low:
                y = called(as_low, y, x)
            added = in_order(y, other, dims)
            found = in_order(x, self, dims) + added
            # The bias of a product (`fuse_biases`), and whether it was laid out for the sum.
            found.node.meta["added"] = other.names, added is not y
            return found

        found = local(add, xs, dims, is_index=self.is_index and other.is_index)
        return replace(found, is_product=is_bias)

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
    """Return the result of a PyTorch function on this rank's shards.

    Args:
        function: Function of one shard of each tensor.
        xs: Tensors on one mesh.
        dims: Dims of the result.
        partial_over: Names of dims of the operands; where they are split, the result's points are partial sums.
        is_linear: Whether the function commutes with sums: applied to a single partial tensor, the result is partial.
        is_index: Whether the result has integers.

    Raises:
        ProgramError: The tensors are on several meshes.
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


def in_float32(x: Tensor) -> Tensor:
    """Return a tensor in float32 where the program has products in a low type."""
    if not x.mesh.program.low or x.is_index:
        return x
    return local(lambda shard: called(widened, shard), [x], x.dims)


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
    """Return a tensor whose partial gradients over some dims that it lacks are all-reduced."""
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


# -- dims of several tensors


def joined_dims(tensors: Sequence[Tensor]) -> tuple[Dim, ...]:
    """Return the dims of several tensors, the most dims first, each once; ProgramError where extents differ."""
    found: dict[str, Dim] = {}
    mesh = one_mesh(tensors)
    for tensor in sorted(tensors, key=lambda x: -len(x.dims)):
        for dim in tensor.dims:
            if found.setdefault(dim.name, dim) != dim:
                raise ProgramError(
                    f"layer {mesh.layer!r} brings tensors together whose dim {dim.name} has {dim.size} points "
                    f"and {found[dim.name].size}; give them one extent"
                )
    return tuple(found.values())


def shaped(x: Any, now: Sequence[int], shape: Sequence[int]) -> Any:
    """Return a shard in a shape; now: that which it has."""
    return x if tuple(now) == tuple(shape) else x.reshape(tuple(shape))


def in_order(shard: Any, x: Tensor, dims: Sequence[Dim], *, keeps_rank: bool = False) -> Any:
    """Return a shard of a tensor with dims in an order, extent 1 for those that it lacks; leading ones are omitted.

    keeps_rank: whether leading dims that it lacks are kept, too.
    """
    own = list(x.names)
    kept = [dim.name for dim in dims if dim.name in own]
    extents = dict(zip(own, x.shard, strict=True))
    now = list(x.shard)
    if len(kept) < len(own):
        now = [extents[name] for name in own if name in kept]
        shard = shard.reshape(now)
        own = [name for name in own if name in kept]
    if own != kept:
        shard = shard.permute([own.index(name) for name in kept])
        now = [extents[name] for name in kept]
    shape = [extents.get(dim.name, 1) for dim in dims]
    while shape and not keeps_rank and dims[len(dims) - len(shape)].name not in own:
        shape.pop(0)
    return shard if now == shape else shard.reshape(shape)


# -- from mesh to mesh


def reshard(x: Tensor, mesh: LayerMesh, dims: Sequence[Dim | WindowDim], *, fill: float = 0.0) -> Tensor:
    """Return a tensor with other dims on another mesh, up to a reshape.

    Args:
        x: The tensor; an input of the model is on no layer's mesh yet.
        mesh: Mesh of the layer that reads it.
        dims: Dims of the result; a `window` gives the points that this rank's windows read, with halo and padding. Its
            dim in the result has the parts' points concatenated; where the kernel is split, too, a dim of the kernel's
            name precedes it.
        fill: Value of the padding.

    Raises:
        ProgramError: Sizes differ, or a dim has more parts than points.
    """
    x = resolved(x)
    wanted = [dim if isinstance(dim, WindowDim) else PlainDim(dim.name, dim.size) for dim in dims]
    own = tuple(dim for one in wanted for dim in _result_dims(one, mesh))
    target = layout_of(mesh.devices, wanted, layer=mesh.layer)
    program = mesh.program
    if x.mesh.is_host:
        return Tensor(value=program.take(x, target, own, mesh, fill), mesh=mesh, dims=own, is_index=x.is_index)
    steps = reshard_steps(x.layout, target)
    shape = tuple(map(mesh.part, own))
    value = program.move(x, mesh, steps, made=shape, fill=fill, read=tuple(wanted))
    return Tensor(value=value, mesh=mesh, dims=own, is_index=x.is_index)


def _result_dims(dim: TensorDim, mesh: LayerMesh) -> list[Dim]:
    if isinstance(dim, PlainDim):
        return [Dim(dim.name, dim.extent)]
    parts, kernel_parts = mesh.devices.size(dim.out), mesh.devices.size(dim.kernel)
    # Of a kernel that is split, this rank's part decides.
    kernel = mesh.point.get(dim.kernel, 0)
    reaches = tuple(dim.reach(mesh.devices, {dim.out: number, dim.kernel: kernel}) for number in range(parts))
    points = Dim(dim.out, sum(reaches), reaches if len(set(reaches)) > 1 else ())
    return [points] if kernel_parts == 1 else [Dim(dim.kernel, kernel_parts), points]


def fan_out(x: Tensor, over: Sequence[Dim]) -> Tensor:
    """Return x for its consumers, whose gradients are reduced once.

    over: the dims of its mesh over which its gradient is reduced: consumers' gradients that are partial over them are
    added first.
    """
    return replace(resolved(x), over=x.mesh.split(dim.name for dim in over), spreads={})


# -- types


_LOW = (torch.bfloat16, torch.float16)


def computing_in(low: str, device: torch.device) -> AbstractContextManager[Any]:
    """Return the context of a program whose products are in a low type; "" for none."""
    return torch.autocast(device.type, getattr(torch, low)) if low else nullcontext()


def widened(x: Any) -> Any:
    """Return a tensor of a low type in float32, any other one unchanged."""
    return x.float() if x.dtype in _LOW else x


def as_low(x: Any, like: Any) -> Any:
    """Return a tensor in the type of another one if that is low, otherwise unchanged."""
    return x.to(like.dtype) if like.dtype in _LOW else x


def called(function: Any, *shards: Any) -> Any:
    """Add the call of a function on shards to the graph of a program, and return its result."""
    return shards[0].tracer.create_proxy("call_function", function, shards, {})


# -- functions with gradients of their own


class Differentiated(nn.Module):
    """A step of a graph that a function of autograd's computes: of tensors and, last, of this, with its options."""

    def __init__(self, function: Any, **options: Any) -> None:
        super().__init__()
        self.function = function
        self.__dict__.update(options)

    def forward(self, *xs: Any) -> Any:
        return self.function.apply(*xs, self)


class Along(nn.Module):
    """The ranks that differ along a dim only.

    Attributes:
        parts: Points of the dim on each of these, in their order along it.
        place: Position of this rank among them.
        order: For each rank of the group, its position.
    """

    def __init__(self, mesh: LayerMesh, dim: Dim) -> None:
        super().__init__()
        program = mesh.program
        count = mesh.devices.size(dim.name)
        self.place = mesh.point.get(dim.name, 0)
        self.parts = [even_part(dim.size, count, number) for number in range(count)]
        self.traffic, self.movement = program.traffic, Movement.within(mesh.layer, Phase.FORWARD)
        self.group = program.groups.of(sum_groups(mesh.devices, mesh.split([dim.name])))
        along = dict(zip(mesh.devices.devices, mesh.devices.coordinates, strict=True))
        self.order = [along[rank].get(dim.name, 0) for rank in self.group.ranks]

    def count(self, sent: Any) -> None:
        """Count the bytes that this rank sends in either pass, as forward, like all exchanges within a layer."""
        if self.traffic.is_counted:
            self.traffic.add(self.movement, sent.numel() * sent.element_size())
