"""The parameters of a model under a plan: DTensors with the model's names, of which layers read local slices.

`install` registers `nn.Parameter`s that are DTensors on one mesh, under all of the names that the model has for them:
plain tensors where each rank has all of every parameter, as in data parallelism, and likewise for replicated buffers. A
leaf shares the storage of its parameter. When a backward pass has computed its gradient, this is added to
`parameter.grad`, in the parameter's kind, and the leaf's is cleared: `zero_grad`, clipping, scaling and accumulation
only deal with the parameters.

`part_of` returns what a layer reads from a leaf, or from a `torch.fx.Proxy` in its place. Where the layer reads other
slices than the rank holds (`steps` of the reading; `notes_on` gives the reason), this is a transfer of the program,
whose adjoint returns the gradient.

The result of `part_of` is differentiable, but the gradients of slices are not reduced: a layer whose mesh splits dims
that the weight lacks leaves partial sums, as for `Program.weight`, which `Gradients` all-reduces.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from math import prod
from typing import Any
from weakref import ref

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from pase.errors import ProgramError
from pase.importers.ir.trace import Piece
from pase.importers.ir.views import View
from pase.sharding.boxes import Box, Range, extents, whole
from pase.sharding.layouts import device_mesh
from pase.sharding.reshard import reshard_steps
from pase.targets.torch.collectives import Groups, carried, exchange, made_once
from pase.targets.torch.parts import Original, Part, Resembling, originals
from pase.targets.torch.placements import Held, Need, Reading, Runs, Split, Storage, Stored, chunk_part
from pase.targets.torch.program import Weight
from pase.targets.torch.states import Pieces, held_whole, local_of
from pase.targets.torch.tensor import Dim, LayerMesh, Tensor
from pase.targets.torch.values import Source, cut

# -- the state of a model


@dataclass(frozen=True, slots=True, kw_only=True)
class Declared:
    """A parameter or a buffer of a model. names: all that it has, the first one as `named_parameters` yields it."""

    names: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool = True
    is_buffer: bool = False
    is_persistent: bool = True


@dataclass(frozen=True, kw_only=True)
class State:
    """All parameters and buffers of a model, by their first names.

    Attributes:
        declared: By the first name of each.
        order: All names, in the model's order.
        parts: Descriptions of the model and its submodules, by their paths.
    """

    declared: Mapping[str, Declared]
    order: tuple[str, ...]
    parts: Mapping[str, Original] = field(default_factory=dict)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: declared.shape for name, declared in self.declared.items()}

    @cached_property
    def first(self) -> dict[str, str]:
        """By any name, the first one of the same tensor."""
        return {name: key for key, declared in self.declared.items() for name in declared.names}


def state_of(model: nn.Module) -> State:
    """Return what parameters and buffers a module has; their values may be on any device, meta included."""
    names: dict[int, list[str]] = {}
    first: dict[int, tuple[torch.Tensor, bool]] = {}
    order = []
    for prefix, module in model.named_modules(remove_duplicate=False):
        for own, is_buffer in ((module._parameters, False), (module._buffers, True)):
            for last, tensor in own.items():
                if tensor is not None:
                    order.append(f"{prefix}.{last}" if prefix else last)
                    names.setdefault(id(tensor), []).append(order[-1])
                    first.setdefault(id(tensor), (tensor, is_buffer))
    found = {}
    for key, (tensor, is_buffer) in first.items():
        found[names[key][0]] = Declared(
            names=tuple(names[key]),
            shape=tuple(tensor.shape),
            dtype=tensor.dtype,
            requires_grad=tensor.requires_grad,
            is_buffer=is_buffer,
            is_persistent=not is_buffer or any(_is_persistent(model, name) for name in names[key]),
        )
    return State(declared=found, order=tuple(order), parts=originals(model))


def _is_persistent(model: nn.Module, name: str) -> bool:
    owner, _, own = name.rpartition(".")
    return own not in model.get_submodule(owner)._non_persistent_buffers_set


@dataclass(frozen=True, slots=True, kw_only=True)
class Read:
    """How a weight of a program reads a parameter or a buffer: some rows of it, sliced and reshaped.

    Attributes:
        parameter: Any of its names.
        rows: Rows of its first dim. The elements, row-major, are those of the weight.
    """

    parameter: str
    rows: Range | None = None
    piece: Piece | None = None
    view: View | None = None


def needs_of(
    state: State, weights: Mapping[str, Weight], reads: Mapping[str, Read], pieces: Mapping[str, Pieces] | None = None
) -> dict[str, list[Need]]:
    """Return the slices of each parameter that the weights of a program need.

    Args:
        state: State of the model.
        weights: Weights of the program.
        reads: How each weight, by its name in the program, reads the model.
        pieces: Sharding of weights that ranks shard.

    Raises:
        ProgramError: The model lacks a name.
    """
    found: dict[str, list[Need]] = {}
    for name, read in reads.items():
        weight = weights[name]
        if read.parameter not in state.first:
            raise ProgramError(f"weight {name!r} is {read.parameter!r} of the model, which the model does not have")
        key = state.first[read.parameter]
        box = whole(state.declared[key].shape)
        if read.rows is not None:
            box = (read.rows, *box[1:])
        if read.piece is not None:
            dim, low = read.piece.dim, box[read.piece.dim][0] + read.piece.start
            box = (*box[:dim], (low, low + read.piece.size), *box[dim + 1 :])
        is_seen = read.view is not None and not read.view.is_reshape
        need = Need(weight=name, box=box, layout=weight.tensor.layout, view=read.view if is_seen else None)
        own = (pieces or {}).get(name)
        if own is not None:
            need = replace(need, groups=own.groups, dim=own.dim)
        found.setdefault(key, []).append(need)
    return found


# -- DTensors


Axes = tuple[int, ...]
"""Of a mesh, by number."""


def split_axes(stored: Storage) -> tuple[set[Axes], set[Axes]]:
    """Return which axes of the mesh split the same parameter, and of these, which split a dim of it unevenly."""
    every, uneven = set[Axes](), set[Axes]()
    for own in stored.stored.values():
        every.add(tuple(axis for axis, split in enumerate(own.splits) if split))
        for dim in range(len(own.shape)):
            axes = tuple(axis for axis, split in enumerate(own.splits) if split and split.dim == dim)
            extents_of = {sum(high - low for low, high in held[dim]) for held in own.held}
            if len(axes) > 1 and len(extents_of) > 1:
                uneven.add(axes)
    return every, uneven


def mesh_of(stored: Storage, device_type: str) -> DeviceMesh:
    """Return the mesh of all parameters; every rank calls it."""
    return mesh_in_groups(stored.sizes, *split_axes(stored), 1, device_type)


def mesh_in_groups(
    sizes: tuple[int, ...], split: Set[Axes], uneven: Set[Axes], num_groups: int, device_type: str
) -> DeviceMesh:
    """Return the mesh of the parameters of this rank's group; every rank calls it.

    sizes: sizes of its axes, in every group. split, uneven: see `split_axes`, in any group.
    """
    names = tuple(f"m{number}" for number in range(len(sizes)))
    every = ((num_groups, *sizes), ("group", *names)) if num_groups > 1 else (sizes, names)
    ranks = torch.arange(prod(every[0])).reshape(every[0])
    # PyTorch caches flattened meshes with the mesh.
    key = device_type, *every, tuple(sorted(uneven))
    mesh = made_once(key, lambda: DeviceMesh(device_type, ranks, mesh_dim_names=every[1]))
    mesh = mesh[names] if num_groups > 1 else mesh
    for axes in sorted(axes for axes in split if len(axes) > 1):
        # Over flattened axes `full_tensor` takes all shards of a dim for those of a single axis (torch 2.13), which
        # differ where they are uneven.
        if any(len(set(own) & set(axes)) > 1 for own in uneven):
            continue
        # Norms of such parameters are then one sum and not one for each axis, which PyTorch would warn of.
        (mesh if len(axes) == len(names) else mesh[tuple(names[axis] for axis in axes)])._flatten()
    return mesh


def placements_of(splits: Iterable[Split | None]) -> tuple[Placement, ...]:
    """Return what DTensor calls what axes do to a tensor."""
    return tuple(_placement(split) for split in splits)


def _placement(split: Split | None) -> Placement:
    if split is None:
        return Replicate()
    return Shard(split.dim) if split.chunks == 1 else _StridedShard(split.dim, split_factor=split.chunks)


def distributed(local: torch.Tensor, stored: Stored, mesh: DeviceMesh) -> DTensor:
    """Return a rank's shard as a DTensor, whose storage it is."""
    stride = torch.empty(stored.shape, device="meta").stride()
    return _dtensor(local, mesh, placements_of(stored.splits), torch.Size(stored.shape), stride)


def _dtensor(local: torch.Tensor, mesh: Any, placements: Any, shape: torch.Size, stride: tuple[int, ...]) -> DTensor:
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)


def held_by(tensor: DTensor) -> Held:
    """Return what this rank holds of a tensor."""
    held: list[Runs] = [((0, extent),) for extent in tensor.shape]
    sizes, coordinate = tensor.device_mesh.shape, tensor.device_mesh.get_coordinate()
    assert coordinate is not None, "all ranks are in the mesh"
    for placement, parts, number in zip(tensor.placements, sizes, coordinate, strict=True):
        if isinstance(placement, Shard | _StridedShard):
            chunks = int(placement.split_factor) if isinstance(placement, _StridedShard) else 1
            part = chunk_part(held[placement.dim], chunks, parts, number)
            if part is None:
                raise ProgramError(f"a tensor of shape {list(tensor.shape)} is split unevenly by {placement}")
            held[placement.dim] = part
    return tuple(held)


def install(
    root: Resembling, state: State, stored: Storage, mesh: DeviceMesh, source: Source, *, device: object = None
) -> None:
    """Register the parameters, buffers and submodules of a model, its `state`, on a module.

    Args:
        root: The module.
        state: State of the model.
        stored: Storage of each; unnamed ones belong to other ranks only.
        mesh: Mesh of the parameters.
        source: Source of values, by name.
        device: Device of the shards; default: that of the mesh.

    Raises:
        ProgramError: The source lacks a value, or has it in another shape.
    """
    # Groups of ranks follow one another.
    rank = dist.get_rank() % prod(stored.sizes) if dist.is_initialized() else 0
    where = torch.device(mesh.device_type if device is None else str(device))
    made: dict[str, torch.Tensor] = {}
    # Optimizers and clipping want parameters of one kind, and are faster with plain tensors.
    is_any_split = any(
        split is not None
        for name, declared in state.declared.items()
        if not declared.is_buffer and name in stored.stored
        for split in stored.stored[name].splits
    )
    for name, declared in state.declared.items():
        if name not in stored.stored:
            # All ranks request values at the same time.
            source(declared.names, declared.shape, (((0, 0),),) * len(declared.shape))
            continue
        own = stored.stored[name]
        is_plain = not any(own.splits) if declared.is_buffer else not is_any_split
        local = source(declared.names, declared.shape, own.held[rank])
        local = local.to(device=where, dtype=declared.dtype).contiguous()
        held = local if is_plain else distributed(local, own, mesh)
        made[name] = held if declared.is_buffer else nn.Parameter(held, declared.requires_grad)
    for path, original in state.parts.items():
        if path:
            holder, last = owner_of(root, path)
            holder._modules[last] = Part(original)
        else:
            root._original = original
    for name in state.order:
        key = state.first[name]
        if key not in made:
            continue
        holder, last = owner_of(root, name)
        value, declared = made[key], state.declared[key]
        if isinstance(value, nn.Parameter):
            holder._parameters[last] = value
        else:
            holder._buffers[last] = value
            if not declared.is_persistent:
                holder._non_persistent_buffers_set.add(last)
    root.register_load_state_dict_pre_hook(_taking(stored, rank, state.first))


def notes_on(state: State, stored: Storage) -> tuple[str, ...]:
    """Return notes on the parameters and buffers that are not held as layers read them."""
    # Transferred tensors are gradients of parameters, and new values of statistics.
    sizes = {name: declared.dtype.itemsize for name, declared in state.declared.items()}
    return tuple(
        f"{own.note}: {own.moved * sizes[name]} bytes of it go between ranks in every step for that"
        for name, own in stored.stored.items()
        if own.note
    )


def owner_of(root: nn.Module, name: str) -> tuple[nn.Module, str]:
    """Return the module that holds a tensor, and the tensor's name there; modules that are not there are made."""
    *path, last = name.split(".")
    for part in path:
        # Not by attributes: these may be the root's own ones.
        root = root._modules.setdefault(part, Part())
    return root, last


def _taking(stored: Storage, rank: int, first: Mapping[str, str]) -> Callable[..., None]:
    """Return a hook that slices a rank's parts of full tensors as they are loaded; first: first name of each name."""

    def take(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_others: object) -> None:
        for name, key in first.items():
            if key not in stored.stored:
                state_dict.pop(prefix + name, None)
                continue
            own, given = stored.stored[key], state_dict.get(prefix + name)
            if not isinstance(given, torch.Tensor) or isinstance(given, DTensor) or tuple(given.shape) != own.shape:
                continue  # PyTorch reports missing tensors and other shapes.
            owner, last = owner_of(module, name)
            now = owner._parameters.get(last, owner._buffers.get(last))
            if isinstance(now, DTensor):
                local = cut(given.detach(), own.held[rank]).to(now.device)
                state_dict[prefix + name] = distributed(local.contiguous(), own, now.device_mesh)

    return take


def full_state_dict(root: nn.Module, *, on_all: bool = False) -> dict[str, torch.Tensor]:
    """Return the state_dict of the model that a module runs, with full tensors on the CPU; all ranks call it.

    on_all: whether every rank gets it; by default only rank 0, and the others get an empty dict. Tied parameters are
    one tensor, as in the model.
    """
    is_kept = on_all or not dist.is_initialized() or dist.get_rank() == 0
    made: dict[int, torch.Tensor] = {}
    found: dict[str, torch.Tensor] = {}
    for name, tensor in root.state_dict(keep_vars=True).items():
        if id(tensor) not in made:
            value = tensor.detach()
            value = value.full_tensor() if isinstance(value, DTensor) else value
            made[id(tensor)] = value.to("cpu", copy=True) if is_kept else value.new_empty(0)
        if is_kept:
            found[name] = made[id(tensor)]
    return found


# -- what layers read


def part_of(stored: Storage, reading: Reading, shard: Any, weight: Tensor) -> Any:
    """Return a rank's slice of a weight as its layer reads it, from the rank's shard of the parameter.

    shard: a tensor, or its proxy in a graph. weight: as the program declared it, on its layer's mesh.
    """
    program = weight.mesh.program
    own = stored.stored[reading.parameter]
    if reading.view is not None:
        # All ranks have all of it: each slices its part, and the gradients of all parts are gathered.
        seen = viewed(_narrowed(shard, own.shape, reading.box), reading.view).reshape(weight.layout.shape)
        everywhere = device_mesh(own.name, (), len(weight.mesh.devices.devices))
        there = Tensor(value=seen, mesh=LayerMesh(own.name, everywhere, program), dims=weight.dims)
        steps = reshard_steps(there.layout, weight.layout)
        return program.move(there, weight.mesh, steps, made=weight.shard)
    if reading.steps:
        return program.move(_as_tensor(own, shard, weight.mesh), weight.mesh, reading.steps, made=weight.shard)
    sizes = [sum(high - low for low, high in runs) for runs in own.held[program.rank]]
    box = reading.cuts[program.rank]
    part = _narrowed(shard, sizes, box)
    return part if extents(box) == weight.shard else part.reshape(weight.shard)


def keeping(stored: Storage, reading: Reading, groups: Groups) -> Callable[[torch.Tensor, torch.Tensor, float], None]:
    """Return a function that moves a statistic, in its storage, towards a new value.

    Its arguments are this rank's shard of the statistic, the layer's part of the new value, and the share of the
    difference.

    Args:
        stored: Storage of the model.
        reading: How the layer reads the statistic.
        groups: Process groups for transfers, where ranks store other parts than the layer has; all ranks then call it.

    Raises:
        ProgramError: The statistic is read as a view of the buffer.
    """
    if reading.view is not None:
        raise ProgramError(f"statistic {reading.parameter!r} is read as a view of it; read the buffer as it is")
    steps = [exchange(step.adjoint, groups) for step in reversed(reading.steps)]
    sizes = [sum(high - low for low, high in runs) for runs in stored.stored[reading.parameter].held[groups.rank]]

    def keep(shard: torch.Tensor, value: torch.Tensor, momentum: float) -> None:
        place = shard if steps else _narrowed(shard, sizes, reading.cuts[groups.rank])
        value = carried(value, steps, 0.0, None)
        place.lerp_(value.reshape(place.shape).to(place.dtype), momentum)

    return keep


def _narrowed(x: Any, shape: Sequence[int], box: Box) -> Any:
    for dim, ((low, high), extent) in enumerate(zip(box, shape, strict=True)):
        if (low, high) != (0, extent):
            x = x.narrow(dim, low, high - low)
    return x


def viewed(x: Any, view: View) -> Any:
    """Return a tensor with its elements as a view has them."""
    factors = [factor for dim in view.dims for factor in dim]
    order = [factor.base for factor in factors if factor.base is not None]
    x = x.reshape(view.factors).permute(order)
    x = x.reshape([1 if factor.base is None else factor.extent for factor in factors])
    return x.expand([factor.extent for factor in factors]).reshape(view.shape)


def _as_tensor(stored: Stored, shard: Any, mesh: LayerMesh) -> Tensor:
    """Return a parameter as a tensor of the program, on a mesh of its own."""
    layout = stored.layout()
    dims = [Dim(f"dim{i}", extent) for i, extent in enumerate(stored.shape)]
    ranges = [sorted({box[i] for box in layout.boxes}) for i in range(len(dims))]
    places = [tuple(own.index(part) for own, part in zip(ranges, box, strict=True)) for box in layout.boxes]
    order = sorted(range(len(places)), key=lambda rank: (places[rank], rank))
    axes = [(dim.name, len(own)) for dim, own in zip(dims, ranges, strict=True)]
    grid = device_mesh(stored.name, axes, len(places), order)
    return Tensor(value=shard, mesh=LayerMesh(stored.name, grid, mesh.program), dims=tuple(dims))


# -- leaves


def splitting_axes(parameter: torch.Tensor, dims: Iterable[int]) -> list[int]:
    """Return the axes of a parameter's mesh, by number, that split some of its dims."""
    if not isinstance(parameter, DTensor):
        return []
    wanted = set(dims)
    return [
        axis
        for axis, placement in enumerate(parameter.placements)
        if isinstance(placement, Shard | _StridedShard) and placement.dim in wanted
    ]


def reduced_like(parameter: torch.Tensor, shape: Sequence[int], dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return zeros, split as a parameter is. shape: the parameter's, but for dims that may have extent 1 instead."""
    reduced = [dim for dim, extent in enumerate(parameter.shape) if shape[dim] != extent]
    local = local_of(parameter)
    made = local.new_zeros([1 if dim in reduced else n for dim, n in enumerate(local.shape)], dtype=dtype)
    if not isinstance(parameter, DTensor):
        return made
    joined = splitting_axes(parameter, reduced)
    placements = [Replicate() if axis in joined else own for axis, own in enumerate(parameter.placements)]
    stride = torch.empty(tuple(shape), device="meta").stride()
    return _dtensor(made, parameter.device_mesh, placements, torch.Size(shape), stride)


def _wrapped_like(parameter: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """Wrap a rank's part of a tensor as large as a parameter in the parameter's kind."""
    if not isinstance(parameter, DTensor):
        return local
    return _dtensor(local, parameter.device_mesh, parameter.placements, parameter.shape, parameter.stride())


def receive(parameter: torch.Tensor, gradient: torch.Tensor) -> None:
    """Add a rank's part of a gradient, which must not change later, to a parameter's.

    The parameter's hooks are run before and after it.
    """
    if parameter._backward_hooks:
        gradient = _hooked(parameter, gradient)
    local = gradient.detach()
    if parameter.grad is not None:
        local_of(parameter.grad).add_(local)
    else:
        parameter.grad = _wrapped_like(parameter, local)
    hooks: Mapping[int, Callable[[torch.Tensor], None]] | None = parameter._post_accumulate_grad_hooks
    for hook in list((hooks or {}).values()):
        hook(parameter)


def _hooked(parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """Return a gradient after the hooks registered by `parameter.register_hook`."""
    given = _wrapped_like(parameter, gradient.detach())
    for hook in list((parameter._backward_hooks or {}).values()):
        changed = hook(given)
        if changed is None:
            continue
        if isinstance(changed, DTensor) != isinstance(parameter, DTensor) or changed.shape != parameter.shape:
            raise ProgramError(
                f"a hook of a parameter of shape {list(parameter.shape)} returned a {type(changed).__name__} of shape "
                f"{list(changed.shape)}; expected one like the gradient that it was given, a {type(given).__name__}"
            )
        given = changed
    found: torch.Tensor = local_of(given)
    return found


@dataclass(slots=True)
class _Leaf:
    # No weak reference: a module could not give a parameter another type then, as PyTorch does it.
    parameter: torch.Tensor
    local: torch.Tensor
    leaf: torch.Tensor


@dataclass(slots=True, weakref_slot=True)
class Leaves:
    """Local tensors of parameters, by name.

    Attributes:
        receive: Called with a parameter and its gradient.
        num_made: Number of leaves created.
        pieces: Sharding of parameters; the stand-in for the whole part is then their leaf.
    """

    receive: Callable[[torch.Tensor, torch.Tensor], None] = receive
    pieces: Mapping[str, Pieces] = field(default_factory=dict)
    num_made: int = 0
    _made: dict[str, _Leaf] = field(default_factory=dict)

    def of(self, name: str, parameter: torch.Tensor) -> torch.Tensor:
        """Return the leaf of a parameter, of which autograd makes the gradient; made again where the old one is not it.

        A parameter has another leaf once it is another one, or is on another device, of another type, or frozen.
        """
        local = local_of(parameter)
        is_trained: bool = parameter.requires_grad
        known = self._made.get(name)
        if known is not None and known.parameter is parameter:
            is_same = known.local is local or _is_same(known.local, local)
            if is_same and known.leaf.requires_grad == is_trained:
                return known.leaf
        leaf: torch.Tensor = local.detach()
        if name in self.pieces:
            with torch.no_grad():
                leaf, piece = held_whole(self.pieces[name], leaf)
                local = _put(parameter, piece) if self.pieces[name].is_in_order else local
            leaf = leaf.detach()
        if is_trained:
            leaf.requires_grad_()
            leaf.register_post_accumulate_grad_hook(partial(_hand, parameter, ref(self)))
        self._made[name] = _Leaf(parameter=parameter, local=local, leaf=leaf)
        self.num_made += 1
        return leaf

    def all(self) -> list[torch.Tensor]:
        return [each.leaf for each in self._made.values() if each.leaf.requires_grad]

    def collect(self) -> None:
        """Pass on the gradients that leaves have, as a backward pass does by itself."""
        for each in self._made.values():
            _hand(each.parameter, ref(self), each.leaf)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Leaves":
        # Of a copied module, whose own parameters have gradients of their own.
        return Leaves(receive=deepcopy(self.receive, memo), pieces=self.pieces)

    def kept(self) -> Iterator[tuple[Pieces, torch.Tensor, torch.Tensor]]:
        """Yield the parts that stay gathered, of sharded parameters: sharding, whole part, local tensor."""
        for name, made in self._made.items():
            if name in self.pieces and self.pieces[name].is_kept:
                yield self.pieces[name], made.leaf, made.local


def _is_same(before: torch.Tensor, local: torch.Tensor) -> bool:
    return before.data_ptr() == local.data_ptr() and (before.dtype, before.device) == (local.dtype, local.device)


def _put(parameter: torch.Tensor, piece: torch.Tensor) -> torch.Tensor:
    """Make a parameter use the memory of its shard within the whole part."""
    own = piece.view(local_of(parameter).shape)
    if isinstance(parameter, DTensor):
        parameter._local_tensor = own
    return own


def _hand(parameter: torch.Tensor, leaves: "ref[Leaves]", leaf: torch.Tensor) -> None:
    """Pass a leaf's gradient to its parameter.

    leaves: weak reference to its owner; Python cannot see the reference from a leaf to its hook, and would free
    neither.
    """
    gradient, leaf.grad = leaf.grad, None
    if gradient is None:
        return
    if torch.is_grad_enabled() and torch._C._current_graph_task_id() >= 0:
        raise ProgramError(
            "gradients of a module under a plan cannot be differentiated again (create_graph=True): collectives bring "
            "them together, which have no gradient of their own. Go backward without it"
        )
    own = leaves()
    if own is None:
        raise ProgramError("the parallel module is gone that this backward pass is of; keep it until that is over")
    own.receive(parameter, gradient)
