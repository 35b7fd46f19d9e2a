"""State of weights and gradients on ranks: ZeRO sharding, recomputation, and bucketed gradient all-reduces.

The ranks that hold the same part of a weight, and have partial gradients of it, shard that part along a dim. Each
updates its own shard. Under `zero1` and `zero2` the whole part stays gathered, with the shard in it, and is
all-gathered in place after the update. Under `zero3` it exists while its layer computes: `Gather`, a node of a rank's
graph, gathers the weights of one layer, and prefetches those of the next one. Instead of these, autograd saves
references to them for the backward pass, which gathers them again on demand, and prefetches those of the layer before.

Consecutive recomputed layers form a run, which only saves its inputs. When all gradients of its outputs are available,
its forward pass runs again, with its transfers and all-reduces, on all ranks at the same position among these; then its
backward pass runs.

Gradients of weights are reduced once, in buckets, during the backward pass (`Gradients`). Where ranks that hold the
same part of a weight have partial gradients, each bucket is reduced over them as soon as all of it is available, in an
order that all ranks know beforehand (`pase.sharding.buckets`). For a sharded weight each rank keeps the sum of its own
shard, and the rest is freed once the next bucket has been launched. At the end of the backward pass every parameter has
its gradient in its `grad`.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from math import prod
from operator import getitem
from typing import Any

import torch
import torch.distributed as dist
from torch import fx, nn
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from pase.errors import ProgramError
from pase.sharding.boxes import Range, extents
from pase.sharding.buckets import gradient_buckets
from pase.sharding.layouts import Layout, sharded_layout
from pase.sharding.traffic import Movement, Phase
from pase.targets.torch.collectives import Group, Groups, Traffic, as_stored, begun, gathered, ring_bytes, scattered


@dataclass(frozen=True, kw_only=True, eq=False)
class Pieces:
    """How ranks that all have the same part of a weight shard it.

    Attributes:
        state: State of the weight, a name of `pase.planning.plan.STATES`.
        layer: Layer of the weight.
        group: The ranks, in the order of the shards.
        dim: Dim along which they shard the part.
        parts: Layout of the parts, over all ranks.
        groups: All groups of ranks that shard a part.
        sizes: Sizes of the mesh of all ranks, see `sharded_layout`.
    """

    state: str
    layer: str
    group: Group
    dim: int
    parts: Layout
    groups: tuple[tuple[int, ...], ...]
    sizes: tuple[int, ...] = ()

    @cached_property
    def layout(self) -> Layout:
        """Layout of the shards, over all ranks."""
        return sharded_layout(self.parts, self.groups, self.dim, sizes=self.sizes)

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """Shape of this rank's part."""
        return extents(self.parts.by_device[self.group.rank])

    @cached_property
    def bounds(self) -> tuple[Range, ...]:
        """Range of the dim for each rank of the group; the last ones may be smaller than the others, or empty."""
        boxes, start = self.layout.by_device, self.parts.by_device[self.group.rank][self.dim][0]
        shards = (boxes[rank][self.dim] for rank in self.group.ranks)
        return tuple((low - start, high - start) for low, high in shards)

    @property
    def count(self) -> int:
        return len(self.group.ranks)

    @cached_property
    def number(self) -> int:
        """Place of this rank in the group."""
        return self.group.ranks.index(self.group.rank)

    @cached_property
    def piece_shape(self) -> tuple[int, ...]:
        """Shape of this rank's shard."""
        low, high = self.bounds[self.number]
        return (*self.shape[: self.dim], high - low, *self.shape[self.dim + 1 :])

    @cached_property
    def row_points(self) -> int:
        """Elements of the largest shard: in a collective the others are padded to as many."""
        return self._slice_points * max(high - low for low, high in self.bounds)

    @property
    def is_kept(self) -> bool:
        return self.state != "zero3"

    @property
    def is_summed_each_time(self) -> bool:
        """Whether every backward pass shares its gradient out, whether or not it is the last one before an update."""
        return self.state != "zero1"

    @cached_property
    def is_in_order(self) -> bool:
        """Whether the shards are contiguous in memory, with padding only at the end."""
        size = self.bounds[0][1]
        extent = self.shape[self.dim]
        is_prefix = all(low == min(number * size, extent) for number, (low, _) in enumerate(self.bounds))
        return is_prefix and prod(self.shape[: self.dim]) == 1

    @cached_property
    def _slice_points(self) -> int:
        return prod(extent for dim, extent in enumerate(self.shape) if dim != self.dim)

    @cached_property
    def _runs(self) -> tuple[tuple[int, int, int, int], ...]:
        """Consecutive ranks with equally large shards: the first rank, their number, their start, and the extent."""
        runs: list[tuple[int, int, int, int]] = []
        for number, (low, high) in enumerate(self.bounds):
            if runs and runs[-1][3] == high - low:
                first, count, start, size = runs[-1]
                runs[-1] = (first, count + 1, start, size)
            else:
                runs.append((number, 1, low, high - low))
        return tuple(run for run in runs if run[3])

    def of(self, whole: Any) -> Any:
        """Return this rank's shard of a part, as a view."""
        low, high = self.bounds[self.number]
        return whole.narrow(self.dim, low, high - low)

    def empty(self, like: Any) -> Any:
        """Return a part without values, with room for the padding of an all-gather into it."""
        if not self.is_in_order:
            return like.new_empty(self.shape)
        return like.new_empty(self.count * self.row_points)[: prod(self.shape)].view(self.shape)

    def rows_in(self, whole: Any) -> Any:
        """Return the rows of a part that `empty` made, padding included: [ranks, elements of the largest shard]."""
        return whole.as_strided((self.count, self.row_points), (self.row_points, 1), whole.storage_offset())

    def padded(self, piece: Any) -> Any:
        """Return this rank's shard as its row in a collective."""
        flat = piece.reshape(-1)
        return flat if len(flat) == self.row_points else nn.functional.pad(flat, (0, self.row_points - len(flat)))

    def stacked(self, whole: Any) -> Any:
        """Return the shards of a part as rows, zeros behind those that are shorter."""
        if self._runs[0][1] == self.count:
            return self._stacked(whole, *self._runs[0][1:])
        if self.is_in_order:
            flat = whole.reshape(-1)
            padding = self.count * self.row_points - len(flat)
            return nn.functional.pad(flat, (0, padding)).view(self.count, self.row_points)
        rows = whole.new_zeros(self.count, self.row_points)
        for first, count, start, size in self._runs:
            found = self._stacked(whole, count, start, size)
            rows[first : first + count, : found.shape[1]] = found
        return rows

    def _stacked(self, whole: Any, count: int, start: int, size: int) -> Any:
        part = whole.narrow(self.dim, start, count * size)
        return part.unflatten(self.dim, (count, size)).movedim(self.dim, 0).reshape(count, -1)

    def joined(self, rows: Any) -> Any:
        """Return the part whose shards are rows: a view of these, if the shards follow one another in memory."""
        if self.is_in_order:
            return rows.view(-1)[: prod(self.shape)].view(self.shape)
        parts = []
        for first, count, _, size in self._runs:
            own = rows[first : first + count, : size * self._slice_points]
            shape = (*self.shape[: self.dim], size, *self.shape[self.dim + 1 :])
            part = own.reshape(count, *shape).movedim(0, self.dim)
            parts.append(part.reshape(*self.shape[: self.dim], count * size, *self.shape[self.dim + 1 :]))
        return parts[0] if len(parts) == 1 else torch.cat(parts, self.dim)

    def count_bytes(self, traffic: Traffic, phase: Phase, itemsize: int) -> None:
        """Count the bytes that a rank sends in the all-gather, or in the reduce-scatter."""
        if traffic.is_counted:
            sent = (self.count - 1) * self.row_points * itemsize
            traffic.add(Movement.within(self.layer, phase), sent)


def held_whole(pieces: Pieces, piece: Any) -> tuple[Any, Any]:
    """Return a stand-in for the whole part in a rank's graph, and the rank's shard, within the part if that stays.

    The first is the part itself, to be gathered, or an empty tensor with its shape. A shard that is not contiguous in
    the part is stored separately, because fused kernels of optimizers do not support strides.
    """
    if not pieces.is_kept:
        return piece.new_empty(()).expand(pieces.shape), piece
    whole = pieces.empty(piece)
    inside = pieces.of(whole)
    inside.copy_(piece.reshape(inside.shape))
    return whole, inside if pieces.is_in_order else piece


_GATHERS_AHEAD = 2
"""Number of weights gathered concurrently before a step: each needs temporary memory until its shards are in order."""


def gather_in_place(held: Iterable[tuple[Pieces, Any, Any]], traffic: Traffic) -> None:
    """All-gather parts that stay gathered; held: for each its sharding, the whole part and this rank's shard."""
    pending: deque[tuple[Pieces, Any, Callable[[], Any]]] = deque()

    def finish() -> None:
        pieces, whole, rows_of = pending.popleft()
        rows = rows_of()
        if not pieces.is_in_order:
            whole.copy_(pieces.joined(rows))

    for pieces, part, piece in held:
        whole = part.detach()
        rows = pieces.rows_in(whole) if pieces.is_in_order else None
        pending.append((pieces, whole, gathered(pieces.padded(piece.detach()), pieces.group, rows)))
        pieces.count_bytes(traffic, Phase.UPDATE, whole.element_size())
        if len(pending) > _GATHERS_AHEAD:
            finish()
    while pending:
        finish()


# -- weights that are there while their layer computes


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, module: "Gather", own: Sequence[Any], following: Sequence[Any], *_leaves: Any) -> Any:
        ctx.module = module
        ctx.set_materialize_grads(False)
        return module.gathered(own, following)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        # All computations with the weights have finished.
        ctx.module.wholes = None
        return (None, None, None, *gradients)


class _Joined(torch.autograd.Function):
    """Gathers in a compiled graph, which saves the result."""

    @staticmethod
    def forward(_ctx: Any, _leaf: Any, whole: Any) -> Any:
        return whole.view_as(whole)

    @staticmethod
    def backward(_ctx: Any, gradient: Any) -> Any:
        return gradient, None


class Gather(nn.Module):
    """Gathers the weights of a layer from the ranks' shards; their gradients are those of the whole parts.

    Attributes:
        wholes: Gathered weights of the backward pass, while its layer computes.
        is_saved: Whether the backward pass needs any.
        run: Run of recomputed layers that it belongs to; None for none.
    """

    def __init__(self, layers: "GatheredLayers", pieces: Sequence[Pieces], run: int | None) -> None:
        super().__init__()
        self.run = run
        self.layers, self.pieces, self.number = layers, tuple(pieces), len(layers.modules)
        self.wholes: tuple[Any, ...] | None = None
        self.is_saved = False
        self._own: tuple[Any, ...] = ()
        self._begun: list[Callable[[], Any]] = []
        layers.modules.append(self)

    def forward(self, leaves: Sequence[Any], own: Sequence[Any], following: Sequence[Any]) -> Any:
        """Return the whole parts.

        Args:
            leaves: Leaves that receive the gradients.
            own: This rank's shards.
            following: This rank's shards of the next layer.
        """
        if torch.compiler.is_compiling():
            found = [
                pieces.joined(gathered(pieces.padded(piece), pieces.group)())
                for pieces, piece in zip(self.pieces, own, strict=True)
            ]
            return tuple(_Joined.apply(leaf, whole) for leaf, whole in zip(leaves, found, strict=True))
        return _Gathered.apply(self, own, following, *leaves)

    def gathered(self, own: Sequence[Any], following: Sequence[Any]) -> tuple[Any, ...]:
        """Return the whole parts in the forward pass, and prefetch those of the next layer."""
        self.begin(own, Phase.FORWARD)
        # A recomputation is not followed by the next layer of the forward pass.
        if following and torch._C._current_graph_task_id() < 0:
            self.layers.modules[self.number + 1].begin(following, Phase.FORWARD)
        found = self._ended()
        self.layers.remember(self, found)
        return found

    def again(self) -> tuple[Any, ...]:
        """Return the whole parts in the backward pass, and prefetch those of the layer before that needs its own."""
        if self.wholes is None:
            self.begin(self._own, Phase.BACKWARD)
            before = next((module for module in reversed(self.layers.modules[: self.number]) if module.is_saved), None)
            # Those of another run are gathered when this is computed again.
            if before is not None and before.wholes is None and before.run in (None, self.run):
                before.begin(before._own, Phase.BACKWARD)
            self.wholes = self._ended()
        return self.wholes

    def begin(self, own: Sequence[Any], phase: Phase) -> None:
        """Begin to gather, if that has not begun; own: this rank's pieces."""
        if self._begun:
            return
        self._own = tuple(own)
        for pieces, piece in zip(self.pieces, own, strict=True):
            self._begun.append(gathered(pieces.padded(piece), pieces.group))
            pieces.count_bytes(self.layers.traffic, phase, piece.element_size())

    def reset(self) -> None:
        self._ended()
        self.wholes = None

    def _ended(self) -> tuple[Any, ...]:
        begun, self._begun = self._begun, []
        rows_of = deque(begun)
        # Rows are freed as soon as they have been copied in order.
        begun.clear()
        return tuple(pieces.joined(rows_of.popleft()()) for pieces in self.pieces if rows_of)


@dataclass(frozen=True, slots=True)
class _Kept:
    """Reference to a gathered weight that autograd saves: which weight, and its view."""

    module: Gather
    number: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


class GatheredLayers:
    """The layers of a program whose weights are gathered when they compute; modules: in the order of computation."""

    def __init__(self, traffic: Traffic) -> None:
        self.traffic = traffic
        self.modules: list[Gather] = []
        self._owners: dict[StorageWeakRef, tuple[Gather, int]] = {}
        self._storages: dict[tuple[Gather, int], StorageWeakRef] = {}
        self._is_queued = False

    def check_compiled(self) -> None:
        """Raise ProgramError where a compiled graph would save gathered weights for the backward pass."""
        kept = next((module for module in self.modules if module.run is None), None)
        if kept is not None:
            raise ProgramError(
                f"layer {kept.pieces[0].layer!r} is zero3, and a compiled graph would keep its whole weights until the "
                "backward pass: train without torch.compile, or search for a plan that recomputes such layers, or with "
                "another state (zero2)"
            )

    def remember(self, module: Gather, wholes: Sequence[Any]) -> None:
        """Register gathered weights, to recognise them when autograd saves them."""
        for number, whole in enumerate(wholes):
            before = self._storages.pop((module, number), None)
            if before is not None:
                del self._owners[before]
            # While a storage is referenced, no other one gets its address.
            storage = self._storages[module, number] = StorageWeakRef(whole.untyped_storage())
            self._owners[storage] = module, number

    @contextmanager
    def freed(self) -> Iterator[None]:
        """Run a program such that autograd saves none of the gathered weights."""
        if not self.modules or torch.compiler.is_compiling():
            yield
            return
        for module in self.modules:
            module.reset()
            module.is_saved = False
        with self.freed_here():
            yield

    @contextmanager
    def freed_here(self) -> Iterator[None]:
        """Make autograd save references for gathered weights, and everything else as usual."""
        if not self.modules or torch.compiler.is_compiling():
            yield
            return
        # PyTorch only calls the innermost hooks.
        keep, give = torch._C._autograd._top_saved_tensors_default_hooks(False) or (_as_it_is, _as_it_is)

        def packed(tensor: Any) -> Any:
            found = self._packed(tensor)
            return keep(tensor) if found is None else found

        def unpacked(kept: Any) -> Any:
            return self._unpacked(kept) if isinstance(kept, _Kept) else give(kept)

        with torch.autograd.graph.saved_tensors_hooks(packed, unpacked):
            yield

    def _packed(self, tensor: Any) -> _Kept | None:
        owner = self._owners.get(StorageWeakRef(tensor.untyped_storage()))
        if owner is None:
            return None
        module, number = owner
        module.is_saved = True
        return _Kept(module, number, tuple(tensor.size()), tuple(tensor.stride()), tensor.storage_offset())

    def _unpacked(self, kept: _Kept) -> Any:
        if not self._is_queued and torch._C._current_graph_task_id() >= 0:
            self._is_queued = True
            torch.autograd.Variable._execution_engine.queue_callback(self._finish)
        whole = kept.module.again()[kept.number]
        return whole.as_strided(kept.size, kept.stride, kept.offset)

    def _finish(self) -> None:
        self._is_queued = False
        for module in self.modules:
            module.reset()


def _as_it_is(x: Any) -> Any:
    return x


# -- layers that are computed again


class Recomputed(nn.Module):
    """A part of a rank's graph that only saves its inputs.

    body: returns a tuple. gathered: the layers whose weights exist while these compute; none of them are saved.
    """

    def __init__(self, body: nn.Module, gathered: GatheredLayers) -> None:
        super().__init__()
        self.body, self.gathered = body, gathered

    def forward(self, *values: Any) -> Any:
        # Run it to its end, as a rank that stopped early would leave others waiting in an all-reduce. It has no random
        # numbers.
        return checkpoint(self._begun, *values, use_reentrant=False, preserve_rng_state=False, early_stop=False)

    def _begun(self, *values: Any) -> tuple[Any, ...]:
        # The backward pass gathers each weight again on demand: otherwise a run would have all of its weights at once.
        with self.gathered.freed_here():
            made = self.body(*values)
        if torch.compiler.is_compiling():
            # A compiled backward pass has one order.
            return tuple(made)
        moving = [x for x in made if x.requires_grad]
        passed = iter(_Begin.apply(*moving) if moving else ())
        return tuple(next(passed) if x.requires_grad else x for x in made)


class _Begin(torch.autograd.Function):
    """An identity; being the first function of a run in the backward pass, it triggers the run's recomputation.

    Otherwise the run would be recomputed where a function first needs a saved tensor, which may be at different
    positions among transfers and all-reduces on different ranks.
    """

    @staticmethod
    def forward(ctx: Any, *made: Any) -> tuple[Any, ...]:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(made[0].new_empty(0))
        return tuple(x.view_as(x) for x in made)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        assert ctx.saved_tensors
        return gradients


def gather_runs(module: fx.GraphModule, runs: Sequence[Sequence[str]], gathered: GatheredLayers) -> None:
    """Replace the nodes of each run, by the names of its layers, by one call of a recomputed module."""
    for number, layers in enumerate(runs):
        names = frozenset(layers)
        own = [n for n in module.graph.nodes if n.op.startswith("call") and n.meta["layer"] in names]
        if own:
            _gather(module, own, f"run_{number + 1}", gathered)


def _gather(module: fx.GraphModule, own: Sequence[fx.Node], name: str, gathered: GatheredLayers) -> None:
    graph, members = module.graph, set(own)
    # Nodes that depend on the run are moved after it, all others in between before it.
    behind, node, last = set[fx.Node](), own[0], own[-1]
    while node is not last:
        following = node.next
        if node not in members:
            if behind.isdisjoint(node.all_input_nodes) and members.isdisjoint(node.all_input_nodes):
                own[0].prepend(node)
            else:
                behind.add(node)
        node = following
    assert behind.isdisjoint(x for node in own for x in node.all_input_nodes), f"{name} needs what is computed of it"
    given = list(dict.fromkeys(x for node in own for x in node.all_input_nodes if x not in members))
    made = [node for node in own if not members.issuperset(node.users)]
    body = fx.Graph()
    inside = {x: body.placeholder(x.name) for x in given}
    for node in own:
        inside[node] = body.node_copy(node, inside.__getitem__)
    body.output(tuple(inside[node] for node in made))
    module.add_submodule(name, Recomputed(fx.GraphModule(module, body, "Run"), gathered))
    with graph.inserting_before(own[0]):
        found = graph.call_module(name, tuple(given))
        values = [graph.call_function(getitem, (found, place)) for place in range(len(made))]
    for node, value in zip(made, values, strict=True):
        node.replace_all_uses_with(value, delete_user_cb=lambda user: user not in members)
    for node in reversed(own):
        graph.erase_node(node)


# -- gradients of weights


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightSum:
    """The gradient all-reduce of a weight that is executed outside of the graph.

    Attributes:
        groups: Groups of ranks with partial gradients; empty where the gradient is complete.
        points: Size of the largest part of the weight on any rank.
        movement: Owner of the bytes.
    """

    groups: tuple[tuple[int, ...], ...]
    points: int
    movement: Movement


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a rank's part of a parameter or a buffer."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor.data


@dataclass(frozen=True, slots=True, eq=False)
class Entry:
    """A weight whose gradient is reduced.

    Attributes:
        parameter: Parameter that receives it.
        sum: The reduction.
        pieces: Sharding of this rank's part of the parameter, None if it is not sharded.
    """

    parameter: Any
    sum: WeightSum
    pieces: Pieces | None = None

    @property
    def local(self) -> Any:
        """This rank's part of the parameter."""
        return local_of(self.parameter)

    @property
    def bytes(self) -> int:
        """Size of its gradient before it is reduced, the same number on all ranks although their parts may differ."""
        return self.sum.points * int(self.local.element_size())

    @property
    def summed_points(self) -> int:
        """Elements that this rank has of the sum, padding included."""
        return int(self.local.numel()) if self.pieces is None else self.pieces.row_points

    @property
    def is_held(self) -> bool:
        return self.pieces is None or not self.pieces.is_summed_each_time


@dataclass(slots=True, kw_only=True, eq=False)
class _Bucket:
    """Weights whose gradients are reduced together over one group.

    Attributes:
        arrived: Gradients that are available, by the weights' positions.
        sums: Waits for their sums, which are concatenated.
        parts: Their owners, and the shapes of this rank's parts.
    """

    group: Group
    entries: list[Entry]
    arrived: dict[int, Any] = field(default_factory=dict)
    parts: list[tuple[Entry, tuple[int, ...]]] = field(default_factory=list)
    sums: Callable[[], Any] | None = None

    @property
    def is_in_pieces(self) -> bool:
        return self.entries[0].pieces is not None


class Gradients:
    """Reduces the gradients of weights.

    Attributes:
        entries: Weights in the order in which layers use them.
        give: Adds a rank's part of a gradient to a parameter's.
        num_passes: Number of backward passes after which all gradients were reduced.
    """

    def __init__(
        self, entries: Sequence[Entry], groups: Groups, traffic: Traffic, give: Callable[[Any, Any], None]
    ) -> None:
        self._traffic, self._rank, self.give = traffic, groups.rank, give
        self._is_held = self._is_queued = False
        self.num_passes = 0
        self._next = 0
        self._waiting: dict[int, Any] = {}
        self._entries = {id(entry.parameter): entry for entry in entries}
        self._places: dict[int, tuple[_Bucket, int]] = {}
        self._buckets: list[_Bucket] = []
        summed = [
            entry for entry in entries if entry.parameter.requires_grad and len(groups.of(entry.sum.groups).ranks) > 1
        ]
        ranks = [groups.of(entry.sum.groups) for entry in summed]
        keys = [
            (group.ranks, entry.local.dtype, entry.local.device, entry.pieces is None, entry.is_held)
            for group, entry in zip(ranks, summed, strict=True)
        ]
        for positions in gradient_buckets(keys, [entry.bytes for entry in summed]):
            bucket = _Bucket(group=ranks[positions[0]], entries=[summed[position] for position in positions])
            self._buckets.append(bucket)
            self._places |= {id(entry.parameter): (bucket, place) for place, entry in enumerate(bucket.entries)}

    @property
    def is_held(self) -> bool:
        """Whether backward passes leave gradients partial."""
        return self._is_held

    @property
    def is_waiting(self) -> bool:
        """Whether there are partial gradients of earlier backward passes."""
        return bool(self._waiting)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Leave gradients partial: the next backward pass outside of this context reduces them with its own.

        Those of which ranks only keep shards are reduced nevertheless.
        """
        before, self._is_held = self._is_held, True
        try:
            yield
        finally:
            self._is_held = before

    def arrived(self, parameter: Any, gradient: Any) -> None:
        """Take a rank's part of a parameter's gradient that the backward pass has finished; it is ours from now on."""
        key = id(parameter)
        before = self._waiting.pop(key, None)
        gradient = gradient if before is None else before.add_(gradient)
        if self._is_held and self._entries[key].is_held:
            self._waiting[key] = gradient
            return
        if not self._is_queued:
            self._is_queued = True
            torch.autograd.Variable._execution_engine.queue_callback(self._finish)
        found = self._places.get(key)
        if found is None:
            self.give(parameter, gradient)
            return
        bucket, place = found
        bucket.arrived[place] = gradient
        # In the order of the buckets, whichever is full first on a rank.
        while self._next < len(self._buckets):
            bucket = self._buckets[self._next]
            if not (self._is_held and bucket.entries[0].is_held):
                if len(bucket.arrived) < len(bucket.entries):
                    return
                self._launch(bucket)
            self._next += 1

    def flush(self) -> None:
        """Reduce the remaining partial gradients (`held`), and give every parameter its gradient."""
        waiting, self._waiting = self._waiting, {}
        with self.finished():
            while waiting:
                # Nothing else refers to a gradient that is being reduced.
                key = next(iter(waiting))
                self.arrived(self._entries[key].parameter, waiting.pop(key))

    @contextmanager
    def finished(self) -> Iterator[None]:
        """Take gradients that arrive within while no backward pass is at work, whose end would finish this."""
        self._is_queued = True
        yield
        self._finish()

    def _launch(self, bucket: _Bucket) -> None:
        gradients = [as_stored(bucket.arrived[place]) for place in sorted(bucket.arrived)]
        entries = [bucket.entries[place] for place in sorted(bucket.arrived)]
        bucket.arrived.clear()
        if bucket.is_in_pieces:
            # The send and receive buffers of the previous bucket are no longer needed.
            for other in self._buckets:
                if other.is_in_pieces:
                    self._give(other)
            bucket.parts = [(entry, tuple(entry.local.shape)) for entry in entries]
            rows = [e.pieces.stacked(g) for e, g in zip(entries, gradients, strict=True) if e.pieces is not None]
            gradients.clear()
            whole = rows[0].contiguous() if len(rows) == 1 else torch.cat(rows, dim=1)
            rows.clear()
            bucket.sums = scattered(whole, bucket.group)
            for entry in entries:
                if entry.pieces is not None:
                    entry.pieces.count_bytes(self._traffic, entry.sum.movement.phase, entry.local.element_size())
            return
        bucket.parts = [(e, tuple(gradient.shape)) for e, gradient in zip(entries, gradients, strict=True)]
        flat = [gradient.reshape(-1) for gradient in gradients]
        # A single one is reduced in place.
        total = flat[0] if len(flat) == 1 else torch.cat(flat)
        reduce = partial(dist.all_reduce, total, group=bucket.group.handle, async_op=True)
        bucket.sums = begun(reduce, lambda: total)
        if self._traffic.is_counted:
            number = bucket.group.ranks.index(self._rank)
            for entry in entries:
                sent = ring_bytes(entry.local, len(bucket.group.ranks), number)
                self._traffic.add(entry.sum.movement, sent)

    def _give(self, bucket: _Bucket) -> None:
        if bucket.sums is None:
            return
        sums_of, parts = bucket.sums, bucket.parts
        bucket.sums, bucket.parts = None, []
        sums = sums_of().split([entry.summed_points for entry, _ in parts])
        for (entry, shape), total in zip(parts, sums, strict=True):
            self.give(entry.parameter, total[: prod(shape)].view(shape))

    def _finish(self) -> None:
        for bucket in self._buckets[self._next :]:
            if bucket.arrived:
                self._launch(bucket)
        for bucket in self._buckets:
            self._give(bucket)
        self._next, self._is_queued = 0, False
        self.num_passes += not self._is_held
