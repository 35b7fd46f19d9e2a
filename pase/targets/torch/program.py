"""`Program`: collects the layers that an emitted file declares, and builds one rank's graph of PyTorch calls.

A program is traced once: its layers' functions are called on proxies of shards, and produce a graph of PyTorch's own
functions of local tensors, of transfers and of all-reduces. Passes over this graph merge gradient all-reduces, and
remove transfers without communication. Steps run the graph, which has no named dims.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from itertools import count as counted
from itertools import pairwise
from math import prod
from operator import getitem
from typing import Any

import torch
from torch import fx, nn

from pase.costs import REPLICATED, STATES
from pase.errors import ProgramError, unknown_name
from pase.sharding.boxes import Box, extents
from pase.sharding.layouts import (
    HOST,
    DeviceMesh,
    Layout,
    PlainDim,
    TensorDim,
    check_shared,
    device_mesh,
)
from pase.sharding.reshard import ReshardStep, SumEnd, joint_steps, sum_groups
from pase.sharding.traffic import Movement, Phase, shard_dim
from pase.targets.torch.collectives import (
    Adder,
    GradientSum,
    Greatest,
    Groups,
    Move,
    Sum,
    Take,
    Traffic,
    exchange,
)
from pase.targets.torch.states import Gather, GatheredLayers, Pieces, WeightSum, gather_runs
from pase.targets.torch.tensor import Dim, LayerMesh, Tensor, reshard, resolved
from pase.targets.training.data import DataInput


@dataclass(frozen=True, slots=True, kw_only=True)
class Weight:
    """A persistent tensor. tensor: on the mesh of the layer that declared it.

    Attributes:
        kind: "trained" by steps; "frozen", a weight that they do not change; "constant" of the model; "statistic", a
            running statistic.
        deviation, mean: Of its initial values.
    """

    name: str
    tensor: Tensor
    kind: str
    deviation: float = 0.0
    mean: float = 0.0

    @property
    def is_trained(self) -> bool:
        return self.kind == "trained"


@dataclass(frozen=True, slots=True, kw_only=True)
class Received:
    """The input of a stage from the previous one.

    Attributes:
        steps: Transfers from its layout there, on devices numbered after the stage's own.
        made: Shape of this rank's part.
        fill: Value of padding.
        movement: Owner of the bytes.
    """

    steps: tuple[ReshardStep, ...]
    made: tuple[int, ...]
    fill: float
    movement: Movement


@dataclass(frozen=True, slots=True, kw_only=True)
class Correct:
    """How many labels are right. num_points: of all ranks. num_holders: how many ranks have the same ones."""

    count: Any
    num_points: int
    num_holders: int


@dataclass(frozen=True, kw_only=True)
class Traced:
    """A program of one rank.

    Attributes:
        module: Takes values of `arguments`, in order, returns (loss or None, outputs, values of `keeps`).
        arguments: What each is: "input x", "weight w", "piece w" (this rank's shard of a weight that the graph
            gathers), "received 0" (from the previous stage), "mask_key"; a live module has others (`LiveProgram`).
        inputs, weights: By name.
        keeps: Statistics with their momentum, and buffers that become the value, with None.
        results: The outputs by name.
        sums: How the gradient of each weight is reduced, by name, in the order of the layers.
        pieces: The weights that ranks hold sharded.
        gathered: The layers whose weights the graph gathers; the module runs within its `freed`.
        taken: How layers read each input.
        takes: The modules that take parts of each input.
        correct: What this rank counts, its count the last of the outputs; None where there is none.
    """

    module: fx.GraphModule
    arguments: tuple[str, ...]
    inputs: Mapping[str, DataInput]
    weights: Mapping[str, Weight]
    keeps: tuple[tuple[str, float | None], ...]
    results: Mapping[str, Tensor]
    sums: Mapping[str, WeightSum]
    pieces: Mapping[str, Pieces]
    gathered: GatheredLayers
    taken: Mapping[str, tuple[Layout, ...]]
    takes: Mapping[str, tuple[Take, ...]]
    correct: Correct | None = None


class _Graph(fx.Graph):
    """A graph of PyTorch's calls. layer: the one that nodes are made for from now on, which their `meta` names."""

    layer = ""

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        node = super().create_node(*args, **kwargs)
        node.meta["layer"] = self.layer
        return node


class Program:
    """Collects the layers of a network for one rank.

    Attributes:
        rank, num_devices: Of the group.
        trains: Whether dropout is active, and normalisation uses the batch's statistics.
        groups: Process groups, which several programs of one process share.
        traffic: Counts transferred bytes.
        counts: Whether to count correct labels.
        is_of_one_type: Whether to compute in one type, ignoring `types`.
        drops_nothing: Whether dropout keeps every point, with its usual scale.
        received: Input from the previous stage, by argument.
        sources: Argument of the graph from which each trained tensor, by name, is computed.
        dtype: Type of weights.
        low: Type of products where it differs, "".
        pieces: Sharding of weights, if another program of the same layers has determined it; else this one does.
        device: Device of a step's tensors.
        copied: Weights with copies in other stages, which are not sharded.
        notes: Weights whose state is not the one in their layer's mesh, and why.
    """

    def __init__(
        self,
        *,
        rank: int,
        num_devices: int,
        trains: bool = True,
        groups: Groups | None = None,
        traffic: Traffic | None = None,
        counts: bool = False,
        is_of_one_type: bool = False,
        pieces: Mapping[str, Pieces] | None = None,
        device: Any = None,
    ) -> None:
        self.dtype, self.low, self.device = "float32", "", device
        self.is_of_one_type, self.drops_nothing = is_of_one_type, False
        self.rank, self.num_devices, self.trains = rank, num_devices, trains
        self.groups = groups or Groups(rank, num_devices)
        self.traffic = traffic or Traffic()
        self.counts = counts
        self.pieces, self.copied, self.notes = pieces, set[str](), list[str]()
        self._correct: dict[fx.Node, Correct] = {}
        self.inputs: dict[str, DataInput] = {}
        self.weights: dict[str, Weight] = {}
        self.sources: dict[str, str] = {}
        self.received: dict[str, Received] = {}
        self._shared: set[str] = set()
        self._taken: dict[str, list[tuple[Layout, Take]]] = {}
        self._arguments: dict[str, fx.Node] = {}
        self._numbers = counted()
        self._keeps: dict[str, tuple[Tensor, float | None]] = {}
        self._runs: list[list[str]] = []
        self._is_in_run = False
        self._root = nn.Module()
        self._graph = _Graph()
        self._tracer = fx.proxy.GraphAppendingTracer(self._graph)
        self._host = LayerMesh("", DeviceMesh((), (HOST,)), self, is_host=True)
        self._mask_key: Any = None

    # -- declarations of emitted programs

    def types(self, *, weights: str, products: str) -> None:
        """Set the types in which the program computes; others follow (`pase.graph.precision`)."""
        if not self.is_of_one_type:
            self.dtype, self.low = weights, products if products != weights else ""

    def mesh(
        self,
        layer: str,
        axes: Sequence[tuple[str, int]],
        devices: Sequence[int] | None = None,
        *,
        state: str = REPLICATED,
        recompute: bool = False,
    ) -> LayerMesh:
        """Return the mesh of a layer: (dim, number of parts) for each dim that is split.

        Args:
            layer: Name of the layer.
            axes: The split dims.
            devices: A permutation of the program's ranks, row-major over the axes and then the replicas.
            state: How ranks with the same part of a weight store it: "replicated"; or sharded: "zero1", the optimizer
                state; "zero2", also the gradient; "zero3", also the weight, which is gathered when the layer computes.
            recompute: Whether saved tensors of the layer are recomputed in its backward pass. Consecutive layers with
                this flag are recomputed together, and only save their inputs from other layers.

        Raises:
            ProgramError: The parts do not divide the ranks, or the list is not a permutation.
        """
        if state not in STATES:
            raise ProgramError(f"layer {layer!r}: {unknown_name('state', state, STATES)}")
        if recompute and not self._is_in_run:
            self._runs.append([])
        if recompute:
            self._runs[-1].append(layer)
        self._is_in_run, self._graph.layer = recompute, layer
        return LayerMesh(layer, device_mesh(layer, axes, self.num_devices, devices), self, state=state)

    def floats(self, name: str, shape: Sequence[int]) -> Tensor:
        return self._input(DataInput(name=name, shape=tuple(shape)))

    def indices(self, name: str, shape: Sequence[int], *, below: int) -> Tensor:
        """Return an integer input with values from 0 to below - 1."""
        return self._input(DataInput(name=name, shape=tuple(shape), below=below))

    def weight(
        self,
        mesh: LayerMesh,
        name: str,
        dims: Sequence[Dim],
        deviation: float = 0.0,
        *,
        mean: float = 0.0,
        is_frozen: bool = False,
    ) -> Tensor:
        """Return a trained tensor on a mesh, its initial values normal with the given standard deviation and mean.

        A name that another layer declared gives that layer's tensor, redistributed to this mesh: a shared weight.
        is_frozen: whether it keeps its initial values.
        """
        return self._kept(mesh, name, dims, "frozen" if is_frozen else "trained", deviation, mean)

    def constant(self, mesh: LayerMesh, name: str, dims: Sequence[Dim]) -> Tensor:
        return self._kept(mesh, name, dims, "constant")

    def statistic(self, mesh: LayerMesh, name: str, dims: Sequence[Dim], *, initial: float = 0.0) -> Tensor:
        """Return a running statistic on a mesh, which is not trained; initial: its first value."""
        return self._kept(mesh, name, dims, "statistic", mean=initial)

    def keep(self, statistic: Tensor, value: Tensor, *, momentum: float) -> None:
        """Move a statistic towards a value in every step, by the share `momentum` of their difference."""
        name = next(name for name, weight in self.weights.items() if weight.tensor is statistic)
        self._keeps[name] = resolved(value), momentum

    @property
    def mask_key(self) -> Any:
        """Key of a step's dropout masks, for layers with dropout: two integers."""
        if self._mask_key is None:
            self._mask_key = self.argument("mask_key")
        return self._mask_key

    # -- building blocks of layers

    def run(self, module: nn.Module, value: Any, name: str, *more: Any, **meta: Any) -> Any:
        """Add the call of a module on a value, and on further ones, to the graph, and return its result.

        meta: annotations for passes.
        """
        unique = self._new(name)
        self._root.add_module(unique, module)
        operands = tuple(None if x is None else x.node for x in (value, *more))
        node = self._graph.call_module(unique, operands)
        node.meta.update(meta)
        return fx.Proxy(node, self._tracer)

    def call(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Add the call of a function on nodes of the graph, and return its result."""
        return self.of(self._graph.call_function(function, args, dict(kwargs)))

    def of(self, node: fx.Node) -> Any:
        """Return the proxy of a node of the graph."""
        return fx.Proxy(node, self._tracer)

    def held(self, value: Any, name: str) -> Any:
        """Return a constant tensor of steps, which is stored on the program's device."""
        unique = self._new(name)
        self._root.register_buffer(unique, value.to(self.device), persistent=False)
        return fx.Proxy(self._graph.get_attr(unique), self._tracer)

    def adder(self, mesh: LayerMesh, over: Iterable[str], gradients_of: Iterable[Tensor] = ()) -> Adder:
        """Return the all-reduce over the ranks that differ along some dims, for a layer."""
        group = self.groups.of(sum_groups(mesh.devices, mesh.split(over)))
        weights, is_exchange = self._origin([x.value.node for x in gradients_of])
        return Adder(mesh.layer, group, self.traffic, weights, self._shared, is_exchange)

    def sum(self, x: Tensor) -> Any:
        # Attributed to the layer that computed the partial sums, for any consumer of the result.
        return self.run(Sum(self.adder(x.mesh, x.partial)), x.value, "sum", layer=x.value.node.meta["layer"])

    def greatest(self, x: Tensor, over: Iterable[str]) -> Any:
        """Return the maximum of a tensor's values over the parts of some dims, without a gradient."""
        axes = x.mesh.split(over)
        return self.run(Greatest(self.adder(x.mesh, axes)), x.value, "greatest") if axes else x.value.detach()

    def gradient_sum(self, x: Tensor, axes: frozenset[str]) -> Any:
        """Return a tensor's value, with its partial gradients all-reduced over some axes of its mesh."""
        module, layer = GradientSum(self.adder(x.mesh, axes, [x])), x.value.node.meta["layer"]
        return self.run(module, x.value, "gradient_sum", mesh=x.mesh, axes=axes, layer=layer)

    def move(
        self,
        x: Tensor,
        mesh: LayerMesh,
        steps: Sequence[ReshardStep],
        *,
        made: Sequence[int],
        fill: float = 0.0,
        read: tuple[TensorDim, ...] | None = None,
    ) -> Any:
        """Return a tensor's value on another mesh.

        made: shape of this rank's shard there. read: its dims there, windows included, if its gradient may remain
        partial.
        """
        movement = Movement(producer=x.mesh.layer, consumer=mesh.layer, phase=Phase.FORWARD)
        if x.value is None:
            name = f"received {len(self.received)}"
            self.received[name] = Received(steps=tuple(steps), made=tuple(made), fill=fill, movement=movement)
            value = self.argument(name)
            value.node.meta["is_received"] = True
            return value
        taken = getattr(x.value, "node", None)
        if taken is not None and taken.meta.get("is_piece"):
            # A piece is taken for the layer that reads it.
            self._root.get_submodule(str(taken.target)).movement = movement
            taken.meta["layer"] = mesh.layer
        module = Move(
            movement=movement,
            traffic=self.traffic,
            held=x.shard,
            made=made,
            there=[exchange(step, self.groups) for step in steps],
            back=[exchange(step.adjoint, self.groups) for step in reversed(steps)],
            fill=fill,
        )
        giver = x if x.over is not None and read is not None else None
        # Persistent tensors are redistributed before any layer.
        layer = self._graph.layer and mesh.layer
        return self.run(module, x.value, "move", giver=giver, mesh=mesh, read=read, layer=layer)

    def take(self, x: Tensor, target: Layout, dims: tuple[Dim, ...], mesh: LayerMesh, fill: float) -> Any:
        box: Box = target.by_device[self.rank]
        source = x.value.node
        while source.op != "placeholder":  # functions of points are applied before a layer lays its input out
            (source,) = source.all_input_nodes
        argument = next(name for name, node in self._arguments.items() if node is source)
        module = Take(shape=target.shape, box=box, made=tuple(map(mesh.part, dims)), fill=fill)
        self._taken.setdefault(argument.removeprefix("input "), []).append((target, module))
        return self.run(module, x.value, "take")

    def count_correct(self, loss: Tensor, labels: Tensor, count: Callable[[], Any]) -> None:
        """Mark a loss as one of labels; count: counts this rank's correct ones."""
        if self.counts:
            parts = prod(labels.mesh.devices.size(dim.name) for dim in labels.dims)
            self._correct[loss.value.node] = Correct(
                count=count(), num_points=labels.size, num_holders=self.num_devices // parts
            )

    # -- the graph

    def traced(self, loss: Tensor | None, outputs: Mapping[str, Tensor] | None = None) -> Traced:
        """Return the rank's program, whose layers have all been called."""
        results = {name: resolved(x) for name, x in (outputs or {}).items()}
        correct = None if loss is None else self._correct.get(loss.value.node)
        loss = None if loss is None else resolved(loss)
        found = (
            None if loss is None else loss.value.node,
            (*(x.value.node for x in results.values()), *([correct.count.node] if correct else [])),
            tuple(x.value.node for x, _ in self._keeps.values()),
        )
        self._graph.layer = ""
        self._graph.output(found)
        if self.pieces is None:
            self.pieces = self.cut(self.sources)
        self.bind()
        self._hoist()
        held = {name: self._arguments[source] for name, source in self.sources.items()}
        join_sums(self._graph, self._root, self)
        axes = lift_sums(self._graph, self._root, held)
        remove_still_moves(self._graph, self._root)
        gathered = self._gather(self.pieces)
        fuse_biases(self._graph)
        merge_reshapes(self._graph)
        module = fx.GraphModule(self._root, self._graph, "RankProgram")
        module.graph.eliminate_dead_code()
        gather_runs(module, self._runs, gathered)
        module.graph.lint()
        module.delete_all_unused_submodules()
        module.recompile()
        return Traced(
            module=module,
            arguments=tuple(self._arguments),
            inputs=self.inputs,
            weights=self.weights,
            keeps=tuple((name, momentum) for name, (_, momentum) in self._keeps.items()),
            results=results,
            sums={name: self._weight_sum(name, over) for name, over in axes.items()},
            pieces=self.pieces,
            gathered=gathered,
            taken={name: tuple(layout for layout, _ in own) for name, own in self._taken.items()},
            takes={name: tuple(module for _, module in own) for name, own in self._taken.items()},
            correct=correct,
        )

    def _hoist(self) -> None:
        # Inputs may have gradients, too.
        arguments = (*self.sources.values(), *(f"input {name}" for name in self.inputs), *self.received)
        moving = {self._arguments[name] for name in arguments if name in self._arguments}
        remove_idle_sums(self._graph, self._root, moving)
        hoist_sums(self._graph, self._root, self, self._held())

    def _held(self) -> set[fx.Node]:
        return {self._arguments[source] for source in self.sources.values()}

    def cut(self, names: Iterable[str]) -> dict[str, Pieces]:
        """Return the shards of weights, as their layers' meshes specify.

        names: of the weights that may be sharded; one that several layers share is not. All layers have been called.
        """
        found: dict[str, Pieces] = {}
        names = [n for n in names if self.weights[n].tensor.mesh.state != REPLICATED]
        names = [n for n in names if n not in self._shared | self.copied]
        if not names:
            return found
        self._hoist()
        fixed, groups = _fixed(self._graph, self._root, self._held()), self.groups.separate("gathers")
        for name in names:
            mesh, layout = self.weights[name].tensor.mesh, self.weights[name].tensor.layout
            sums = _sums_after(self._arguments[self.sources[name]], fixed)
            own = self._weight_sum(name, frozenset[str]().union(*(node.meta["axes"] for node in sums)))
            if not own.groups:
                continue
            dim = shard_dim(layout, len(own.groups[0]))
            if dim is None:
                continue  # A single element.
            group = groups.of(own.groups)
            found[name] = Pieces(
                state=mesh.state, layer=mesh.layer, group=group, dim=dim, parts=layout, groups=own.groups
            )
        return found

    def _gather(self, pieces: Mapping[str, Pieces]) -> GatheredLayers:
        """Make the graph gather the weights of each layer that do not stay gathered, before their first use."""
        layers, first = GatheredLayers(self.traffic), dict[str, int]()
        places = {node: place for place, node in enumerate(self._graph.nodes)}
        names: dict[str, list[str]] = {}
        for name, own in pieces.items():
            leaf = None if own.is_kept else self._arguments.get(self.sources[name])
            if leaf is not None and leaf.users:
                names.setdefault(own.layer, []).append(name)
                place = min(map(places.__getitem__, leaf.users))
                first[own.layer] = min(first.get(own.layer, place), place)
        order = sorted(names, key=first.__getitem__)
        users, nodes = {place: node for node, place in places.items()}, list[fx.Node]()
        runs = {layer: number for number, own_layers in enumerate(self._runs) for layer in own_layers}
        for layer in order:
            user = users[first[layer]]
            # It is computed again with what first uses it.
            self._graph.layer = user.meta["layer"]
            leaves = [self._arguments[self.sources[name]] for name in names[layer]]
            own_pieces = [self.argument(f"piece {name}").node for name in names[layer]]
            unique = self._new(f"gather_{layer}".replace(".", "_").replace("/", "_"))
            self._root.add_module(
                unique, Gather(layers, [pieces[name] for name in names[layer]], runs.get(self._graph.layer))
            )
            with self._graph.inserting_before(user):
                node = self._graph.call_module(unique, (leaves, own_pieces, ()))
                for number, leaf in enumerate(leaves):
                    whole = self._graph.call_function(getitem, (node, number))
                    leaf.replace_all_uses_with(whole, delete_user_cb=lambda user, node=node: user is not node)
            nodes.append(node)
        self._graph.layer = ""
        for node, following in pairwise(nodes):
            node.args = (*node.args[:2], following.args[1])
        return layers

    def _weight_sum(self, name: str, over: frozenset[str]) -> WeightSum:
        mesh, boxes = self.weights[name].tensor.mesh, self.weights[name].tensor.layout.boxes
        return WeightSum(
            groups=tuple(map(tuple, sum_groups(mesh.devices, over))) if over else (),
            points=max(prod(extents(box)) for box in boxes),
            # Gradients of weights shared by several layers are reduced on the way back.
            movement=Movement.within(mesh.layer, Phase.BACKWARD if name in self._shared else Phase.UPDATE),
        )

    def _new(self, name: str) -> str:
        unique, number = name, 1
        while hasattr(self._root, unique):
            number += 1
            unique = f"{name}_{number}"
        return unique

    def _origin(self, nodes: Iterable[fx.Node]) -> tuple[frozenset[str], bool]:
        """Return the weights that values are computed from, if nothing else; whether the layer has reduced them."""
        trained = {weight.tensor.value.node: name for name, weight in self.weights.items()}
        found, is_exchange, is_read = set[str](), False, False
        left, known = list(nodes), set[fx.Node]()
        while left:
            node = left.pop()
            module = self._root.get_submodule(str(node.target)) if node.op == "call_module" else None
            is_exchange |= isinstance(module, (Sum, Greatest))
            is_read |= "is_received" in node.meta
            if isinstance(module, (Move, Take)):
                # Another layer's, or a weight's from there.
                node = node.args[0] if node.args[0] in trained else node
                is_read |= node not in trained
            if node in trained:
                found |= {trained[node]} if self.weights[trained[node]].is_trained else set()
            elif not isinstance(module, (Move, Take)):
                left += (before for before in node.all_input_nodes if before not in known)
                known.update(node.all_input_nodes)
        return (frozenset() if is_read else frozenset(found)), is_exchange

    def declared(self, name: str, tensor: Tensor, kind: str) -> Any:
        """Return the value of a persistent tensor: an argument of the graph, in the dims of the layer."""
        source = f"weight {name}"
        if kind == "trained":
            self.sources[name] = source
        return self.argument(source)

    def bind(self) -> None:
        """Connect persistent tensors to their storage; called once, when all layers are known."""

    def bound(self, name: str, value: Callable[[], Any], users: Sequence[fx.Node] = ()) -> None:
        """Replace an argument by a value computed from others.

        Args:
            name: Name of the argument.
            value: Computes the value, as nodes of the graph.
            users: Its users, in the order of the graph, before the first of which the value is computed. By default it
                is computed first of all, outside of recomputed regions.
        """
        node = self._arguments.pop(name)
        first = next(iter(users), None) or next(other for other in self._graph.nodes if other.op != "placeholder")
        layers = {user.meta["layer"] for user in users}
        self._graph.layer = layers.pop() if len(layers) == 1 else ""
        with self._graph.inserting_before(first):
            made = value()
        self._graph.layer = ""
        made.node.meta["is_weight"] = True
        node.replace_all_uses_with(made.node)
        self._graph.erase_node(node)

    def argument(self, name: str) -> Any:
        """Return the proxy of an argument of the graph, the same for the same name."""
        if name in self._arguments:
            return fx.Proxy(self._arguments[name], self._tracer)
        # Arguments precede all computations.
        last = next(reversed(self._arguments.values()), None)
        first = next(iter(self._graph.nodes), None)
        where = self._graph.inserting_after(last) if last else self._graph.inserting_before(first)
        with where:
            node = self._graph.placeholder(f"argument_{next(self._numbers)}")
        self._arguments[name] = node
        return fx.Proxy(node, self._tracer)

    def _input(self, item: DataInput) -> Tensor:
        if item.name in self.inputs:
            raise ProgramError(f"two inputs of the program are named {item.name!r}; names must be unique")
        self.inputs[item.name] = item
        dims = tuple(Dim(f"dim{i}", extent) for i, extent in enumerate(item.shape))
        return Tensor(value=self.argument(f"input {item.name}"), mesh=self._host, dims=dims, is_index=bool(item.below))

    def _kept(
        self, mesh: LayerMesh, name: str, dims: Sequence[Dim], kind: str, deviation: float = 0.0, mean: float = 0.0
    ) -> Tensor:
        if name in self.weights:
            first = self.weights[name].tensor
            self._shared.add(name)
            check_shared(name, first.mesh.layer, first.dims, mesh.layer, dims)
            return reshard(first, mesh, dims)
        is_trained = kind == "trained"
        lacking = frozenset(mesh.devices.split_axes) - {dim.name for dim in dims} if is_trained else None
        tensor = Tensor(value=None, mesh=mesh, dims=tuple(dims), over=lacking)
        tensor = replace(tensor, value=self.declared(name, tensor, kind))
        tensor.value.node.meta["is_weight"] = is_trained
        self.weights[name] = Weight(name=name, tensor=tensor, kind=kind, deviation=deviation, mean=mean)
        return tensor


# -- passes

_LOCAL = ("call_function", "call_method")
"""Operations of nodes without communication."""


def remove_idle_sums(graph: fx.Graph, root: nn.Module, moving: Iterable[fx.Node]) -> None:
    """Take away the sums of gradients of constants, which have none. moving: the arguments that may have some."""
    found = set(moving)
    for node in list(graph.nodes):
        if not found.isdisjoint(node.all_input_nodes):
            found.add(node)
        elif node.op == "call_module" and isinstance(root.get_submodule(str(node.target)), GradientSum):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)


def hoist_sums(graph: fx.Graph, root: nn.Module, program: Program, weights: Set[fx.Node]) -> None:
    """Move gradient all-reduces from values derived from only a weight (rows of it, a view) to the weight itself.

    The ranks that are reduced over derive the same values. Several uses are then reduced once, and so are remaining
    axes after others. weights: the arguments with weights.
    """
    fixed = _fixed(graph, root, weights)
    ends = {node for node in graph.nodes if node.meta.get("is_weight")}
    ends |= {node for node in graph.nodes if "giver" in node.meta and node.args[0] in ends}
    known: dict[tuple[fx.Node, LayerMesh, frozenset[str]], fx.Node] = {}
    done = set[fx.Node]()
    # The last first, which takes those before it along.
    for node in [node for node in reversed(graph.nodes) if "axes" in node.meta]:
        mesh, axes, passed = node.meta["mesh"], node.meta["axes"], list[fx.Node]()
        after, before = node, node.args[0]
        while node not in done and before not in ends and _only_user(before) is after:
            own = set(before.all_input_nodes) - fixed
            if before.meta.get("axes") and before.meta["mesh"] is mesh:
                passed.append(before)
            elif before.op not in _LOCAL or len(own) != 1:
                break
            after, (before,) = before, own
        if node in done or before not in ends:
            continue
        axes = axes.union(*(other.meta["axes"] for other in passed))
        same = known.setdefault((before, mesh, axes), node)
        done |= {node, *passed}
        if after is not node:
            node.replace_all_uses_with(node.args[0])
            after.replace_input_with(before, same)
        elif same is not node:
            node.replace_all_uses_with(same)
        if same is node:
            module = root.get_submodule(str(node.target))
            assert isinstance(module, GradientSum)
            group = program.groups.of(sum_groups(mesh.devices, axes))
            module.adder, node.meta["axes"] = replace(module.adder, group=group), axes
            node.args = (before,)
            _next_call(before).prepend(node)
        else:
            graph.erase_node(node)
        for other in passed:
            other.replace_all_uses_with(other.args[0])
            graph.erase_node(other)


def join_sums(graph: fx.Graph, root: nn.Module, program: Program) -> None:
    """Reduce gradients of several consumers at the producer, where they would be reduced over the same groups.

    A consumer that reduces its gradient right after the transfer leaves it partial: partial gradients are sent back.
    """
    joint: dict[fx.Node, fx.Node] = {}
    for node in list(graph.nodes):
        giver, after = node.meta.get("giver"), _only_sum(node)
        if giver is None or giver.over is None or after is None:
            continue
        ends = (
            SumEnd(giver.mesh.devices, tuple(PlainDim(dim.name, dim.size) for dim in giver.dims), giver.over),
            SumEnd(node.meta["mesh"].devices, node.meta["read"], after.meta["axes"]),
        )
        back = joint_steps(*ends)
        if back is None:
            continue
        axes = frozenset(ends[0].axes)
        handed = joint.get(node.args[0])
        if handed is None:
            # One all-reduce for the consumers' gradients, and that of the producer's own layer.
            handed = next((n for n in node.args[0].users if n.meta.get("axes") == axes), None)
        if handed is None:
            module = GradientSum(program.adder(giver.mesh, axes, [giver]))
            with graph.inserting_before(_next_call(node.args[0])):
                handed = program.run(
                    module,
                    fx.Proxy(node.args[0]),
                    "gradient_sum",
                    mesh=giver.mesh,
                    axes=axes,
                    layer=node.args[0].meta["layer"],
                ).node
        elif handed not in joint.values():
            _next_call(node.args[0]).prepend(handed)
        joint[node.args[0]] = handed
        node.args = (handed,)
        move = root.get_submodule(str(node.target))
        assert isinstance(move, Move)
        # Each is between some of the ranks; all ranks create all groups.
        found = [exchange(step, program.groups) for step in back]
        move.back = tuple(own for step, own in zip(back, found, strict=True) if program.rank in step.source.devices)
        after.replace_all_uses_with(node)
        graph.erase_node(after)


def lift_sums(graph: fx.Graph, root: nn.Module, weights: Mapping[str, fx.Node]) -> dict[str, frozenset[str]]:
    """Remove the gradient all-reduces of whole weights from the graph: they are executed in buckets, outside of it.

    Values that a rank derives from only a weight (rows of it, a view) are the same on the other ranks that are reduced
    over, so the gradients of the weight itself may be reduced instead. Return the axes of the mesh for each weight.
    """
    found = dict.fromkeys(weights, frozenset[str]())
    fixed = _fixed(graph, root, set(weights.values()))
    for name, node in weights.items():
        for each in list(_sums_after(node, fixed)):
            found[name] |= each.meta["axes"]
            each.replace_all_uses_with(each.args[0])
            graph.erase_node(each)
    return found


def _sums_after(weight: fx.Node, fixed: Set[fx.Node]) -> Iterator[fx.Node]:
    """Yield the gradient all-reduces of values derived from only a weight, up to where other values are combined."""
    after = _only_user(weight)
    while after is not None:
        if "axes" in after.meta:
            yield after
        elif after.op not in _LOCAL or len(set(after.all_input_nodes) - fixed) > 1:
            return
        after = _only_user(after)


def _fixed(graph: fx.Graph, root: nn.Module, weights: Set[fx.Node]) -> set[fx.Node]:
    """Return the nodes computed from only inputs and constants, without communication."""
    found = set[fx.Node]()
    for node in graph.nodes:
        is_local = node.op != "call_module" or isinstance(root.get_submodule(str(node.target)), Take)
        if (
            node not in weights
            and "is_received" not in node.meta
            and is_local
            and found.issuperset(node.all_input_nodes)
        ):
            found.add(node)
    return found


def _only_user(node: fx.Node) -> fx.Node | None:
    users = list(node.users)
    return users[0] if len(users) == 1 else None


def _next_call(node: fx.Node) -> fx.Node:
    """Return the first node at or after one that is not an argument of the graph."""
    node = node.next
    while node.op == "placeholder":
        node = node.next
    return node


def _only_sum(node: fx.Node) -> fx.Node | None:
    user = _only_user(node)
    return user if user is not None and "axes" in user.meta else None


def remove_still_moves(graph: fx.Graph, root: nn.Module) -> None:
    """Remove the transfers in which this rank keeps its part."""
    for node in list(graph.nodes):
        module = root.get_submodule(str(node.target)) if node.op == "call_module" else None
        if isinstance(module, Move) and module.is_still:
            if module.held == module.made:
                node.replace_all_uses_with(node.args[0])
            else:
                with graph.inserting_before(node):
                    shaped = graph.call_method("reshape", (node.args[0], module.made))
                shaped.meta["layer"] = node.meta["layer"]
                node.replace_all_uses_with(shaped)
            graph.erase_node(node)


def merge_reshapes(graph: fx.Graph) -> None:
    """Make a reshape of a reshape read the first one's input."""
    for node in graph.nodes:
        while _is_reshape(node) and isinstance(node.args[0], fx.Node) and _is_reshape(node.args[0]):
            node.replace_input_with(node.args[0], node.args[0].args[0])


def _is_reshape(node: fx.Node) -> bool:
    is_method = node.op == "call_method" and node.target == "reshape"
    return is_method or node.target is torch.ops.aten.reshape.default


def fuse_biases(graph: fx.Graph) -> None:
    """Fuse a bias into the product or convolution whose result is only used in the addition."""
    for node in list(graph.nodes):
        if "added" not in node.meta:
            continue
        (names, is_laid_out), (shown, bias) = node.meta["added"], node.args
        if len(shown.users) != 1:
            continue
        is_reshaped = shown.op == "call_method" and shown.target == "reshape"
        product = shown.args[0] if is_reshaped else shown
        if len(product.users) != 1 or list(names) != product.meta.get("biased"):
            continue
        with graph.inserting_before(node):
            bias = bias.args[0] if is_laid_out else bias
            flat = bias if len(names) == 1 else graph.call_method("reshape", (bias, -1))
            x, matrix, *rest = product.args
            fused = graph.call_function(product.target, (x, matrix, flat, *rest[1:]), dict(product.kwargs))
            found = graph.call_method("reshape", (fused, *shown.args[1:])) if is_reshaped else fused
        for made in {flat, fused, found} - {bias}:
            made.meta["layer"] = node.meta["layer"]
        node.replace_all_uses_with(found)
        graph.erase_node(node)
