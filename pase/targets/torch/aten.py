"""`AtenLayers`: the layers of a plan, computed by the nodes of the module's own exported graph on a rank's shards.

A layer reads tensors that lie as its plan says, and writes one. What stands between them in the exported graph is run
as it is, every node on shards, as far as the operators' sharding rules carry the splits of what is read to what is
written. The importer's idea of what a layer computes is not asked for, so that it can make a plan dear, never wrong.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, count
from math import prod
from operator import getitem
from typing import Any

import torch
from torch import fx

from pase.errors import EmitError
from pase.graph import Graph, Operator, Role, SliceOf
from pase.importers.ir import ops
from pase.importers.torch.capture import Captured, corresponding, in_both
from pase.importers.torch.live import LiveModel, Part
from pase.importers.torch.program import behind, location, origin_of
from pase.importers.torch.sharding_rules import ShardingRule, sharding_rule
from pase.importers.torch.sharding_rules.rule import Dims as RuleDims
from pase.planning.plan import LayerPlan, Plan
from pase.sharding.layouts import WHOLE, PlainDim, tensor_dims
from pase.targets.torch.layers.points import arrange, dropout
from pase.targets.torch.propagation import Dims, Propagated, Splits, lies_alike, propagated, refined
from pase.targets.torch.tensor import (
    Dim,
    LayerMesh,
    Tensor,
    as_low,
    called,
    in_float32,
    reshard,
    resolved,
    shaped,
    spread,
)
from pase.targets.training.counted import shared_order, weight_name

_ATEN = torch.ops.aten


class _NotCarriedError(Exception):
    """The sharding rules do not carry a layer's splits from what it reads to what it writes."""


# -- the layers in the graph


@dataclass(frozen=True, slots=True, kw_only=True)
class AtenLayer:
    """A layer as a part of an exported graph.

    Attributes:
        operator: Of the plan's graph. Where one operator of the module is several layers, that of the first.
        splits: In how many parts each of its dims is split.
        pins: Numbers of reads by the nodes of the graph that they are.
        target: The node that it writes.
        written: How the plan has that; None where it is left as it comes.
        is_whole: Whether ranks compute all of what splits are not carried through.
    """

    operator: Operator
    splits: Splits
    pins: Mapping[fx.Node, int]
    target: fx.Node
    written: tuple[Dim, ...] | None
    is_whole: bool

    def read(self, number: int) -> tuple[Dim, ...]:
        """Return the dims of what it reads, as its mesh has them; _NotCarriedError where a window is split."""
        found = []
        for place, dim in enumerate(tensor_dims(self.operator, self.operator.reads[number])):
            if isinstance(dim, PlainDim):
                name = dim.name if dim.name != WHOLE else f"{number}.{place}*"
                found.append(Dim(name, dim.extent))
            elif self.splits.get(dim.out, 1) == self.splits.get(dim.kernel, 1) == 1:
                found.append(Dim(f"{number}.{place}*", dim.extent))
            else:
                raise _NotCarriedError(f"windows over {dim.out} are split")
        return tuple(found)

    def pinned(self, node: fx.Node) -> Dims:
        """Return how what it reads lies, as the graph has it."""
        return _over(self.read(self.pins[node]), _shape(node), self.splits)


class AtenGraph:
    """One of a module's own graphs, with the nodes that layers write in it.

    Attributes:
        captured: The graph.
        targets: By layer, the node that it writes.
    """

    def __init__(self, live: LiveModel, captured: Captured) -> None:
        self.live, self.captured = live, captured
        self.nodes: list[fx.Node] = list(captured.graph.graph.nodes)
        self.named = {node.name: node for node in self.nodes}
        self.targets = dict(self._targets())
        self.writers = {node: layer for layer, node in self.targets.items()}
        self.known = self._known()
        self._placed = {name: node for node, name in self._leaves()}
        self._pieces: dict[tuple[fx.Node, int, int, int], list[fx.Node]] = {}
        for node in self.nodes:
            piece = _piece_of(node)
            if piece is not None:
                self._pieces.setdefault(piece, []).append(node)

    def layer(self, operator: Operator, graph: Graph, splits: Splits) -> AtenLayer:
        """Return a layer; _NotCarriedError where it is no part of the graph."""
        name = operator.name
        if any(not _is_piece(access.index_map) for access in operator.writes[1:]):
            raise _NotCarriedError("it writes several tensors")
        if name not in self.targets:
            raise _NotCarriedError("what it writes is no node of the exported graph")
        owner = self.live.statistics.get(name)
        if owner is not None and f"{owner}.running_mean".removeprefix(".") in self.live.graphs[True].written:
            raise _NotCarriedError("it keeps statistics")
        write = operator.writes[0]
        if any(axis is None and extent > 1 for axis, extent in zip(write.index_map, write.shape, strict=True)):
            raise _NotCarriedError("it writes dims that are none of its own")
        named = [each for axis in write.index_map for each in (axis if isinstance(axis, tuple) else (axis,))]
        if not all(each is None or isinstance(each, str) for each in named):
            raise _NotCarriedError("it writes a part of its dims")
        return AtenLayer(
            operator=operator,
            splits=splits,
            pins=dict(self._pins(operator, graph)),
            target=self.targets[name],
            written=tuple(Dim(each, operator.extents[each]) for each in named if isinstance(each, str)),
            is_whole=False,
        )

    def whole_layer(self, name: str, first: Operator, graph: Graph, splits: Splits) -> AtenLayer:
        """Return a layer of which ranks compute all that splits are not carried through.

        Args:
            name: Of the layer.
            first: The first of the layers that are one operator of the module together, of which it is the last.
            graph: Of the plan.
            splits: Of the first layer.
        """
        found = self.layer(graph[name], graph, splits)
        if first.name == name:
            return replace(found, is_whole=True)
        pins = dict(self._pins(first, graph))
        return replace(found, operator=first, pins=pins, written=None, is_whole=True)

    def cone(self, target: fx.Node, *, is_whole: bool = True) -> Iterator[fx.Node]:
        """Yield the nodes that one is computed by, up to what layers write.

        Args:
            target: The node.
            is_whole: Whether the node itself is among them though a layer writes it.
        """
        found, frontier = set[fx.Node](), [target]
        while frontier:
            node = frontier.pop()
            if node in found or (node in self.writers and not (is_whole and node is target)):
                continue
            found.add(node)
            if node.op == "call_function":
                yield node
                frontier += node.all_input_nodes

    def untranslated(self, node: fx.Node, alike: Collection[str]) -> str:
        """Return what a node does that no translation of the module in evaluation does, "" for nothing.

        alike: The nodes, by name, that are computed in evaluation, too.
        """
        if node in self.known or node.target is getitem:
            return ""
        if node.target is _ATEN.detach.default:
            return f"{at(node)} detaches what depends on weights"
        if not isinstance(node.target, torch._ops.OpOverload):
            return f"torch.autograd.Function {node.target.__name__!r} at {at(node)} has a backward pass of its own"
        if rate_of(node) == 0.0 and node.args[1]:
            return f"dropout at {at(node)} drops nothing in training"
        if node.target in _BY_KEPT_STATISTICS or (node.target in _NORMALISING and not node.args[5]):
            return f"batch_norm at {at(node)} normalises by kept statistics in training"
        if origin_of(node) is not None and node.name not in alike:
            return f"{at(node)} is computed in training alone"
        if is_random(node) and rate_of(node) is None and not is_idle(node):
            return f"{at(node)} draws numbers in training"
        return ""

    def part(self, nodes: Sequence[fx.Node], device: object) -> Part:
        """Return what computes nodes that depend on inputs, buffers and literals alone."""
        graph, root, env = fx.Graph(), torch.nn.Module(), dict[fx.Node, fx.Node]()
        needed = behind(self.captured.graph, nodes)
        inputs = [node for node in needed if node.name in self.captured.inputs]
        state = [node for node in needed if node.name in self.captured.buffers]
        for node in (*inputs, *state):
            env[node] = graph.placeholder(node.name)

        def placed(item: Any) -> Any:
            return torch.device(str(device)) if isinstance(item, torch.device) else item

        for node in needed:
            if node in env:
                continue
            if node.op == "placeholder":
                root.register_buffer(node.name, self.captured.constants[node.name].to(device))
                env[node] = graph.get_attr(node.name)
                continue
            made = env[node] = graph.node_copy(node, env.__getitem__)
            made.args, made.kwargs = (fx.node.map_aggregate(item, placed) for item in (made.args, made.kwargs))
        graph.output(tuple(env[node] for node in nodes))
        return Part(
            graph=fx.GraphModule(root, graph),
            inputs=tuple(self.captured.inputs[node.name] for node in inputs),
            state=tuple(self.captured.buffers[node.name] for node in state),
            names=tuple(node.name for node in nodes),
        )

    def _pins(self, operator: Operator, graph: Graph) -> Iterator[tuple[fx.Node, int]]:
        """Yield the nodes that a layer reads, each with the number of the read.

        What another layer computes is the node that this one writes, or a piece of it: whatever the importer takes
        them for, they are the same numbers.
        """
        for number, access in enumerate(operator.reads):
            if access.role is Role.PARAMETER:
                weight = self.live.weights.get((operator.name, access.tensor))
                node = None if weight is None or weight.row is not None else self._placed.get(weight.parameter)
                piece = None if weight is None else weight.use.piece
                cut = None if piece is None else (piece.dim, piece.start, piece.size)
            else:
                node, cut = self._read(operator.name, number, graph)
            if node is None:
                continue
            if cut is None:
                yield node, number
                continue
            for user in self._pieces.get((node, *cut), ()):
                yield user, number

    def _read(self, layer: str, number: int, graph: Graph) -> tuple[fx.Node | None, tuple[int, int, int] | None]:
        """Return the node that a layer reads, perhaps a piece (dim, start, size) of it; None for none."""
        edge = graph.incoming.get((layer, number))
        while edge is not None and graph[edge.producer].is_fan_out:
            edge = graph.incoming[edge.producer, 0]
        if edge is None:
            fed = self.live.inputs.get((layer, number))
            is_given = fed is not None and fed.is_given and fed.use.piece is None
            return self._placed.get(f"input {fed.use.value}") if is_given and fed else None, None
        node = self.targets.get(edge.producer)
        producer = graph[edge.producer]
        write = producer.writes[edge.output]
        if node is None or edge.output == 0:
            return node, None
        cuts = [(dim, axis) for dim, axis in enumerate(write.index_map) if isinstance(axis, SliceOf)]
        if len(cuts) != 1 or producer.writes[0].shape != _shape(node):
            return None, None
        ((dim, part),) = cuts
        return node, (dim, part.offset, part.extent)

    def _leaves(self) -> Iterator[tuple[fx.Node, str]]:
        for node in self.nodes:
            if node.name in self.captured.parameters:
                yield node, self.captured.parameters[node.name]
            elif node.name in self.captured.inputs:
                yield node, f"input {self.captured.inputs[node.name]}"

    def _targets(self) -> Iterator[tuple[str, fx.Node]]:
        """Yield each layer with the node that it writes."""
        lowered, own = self.live.model.lowered, self.live.program
        nodes = {node.name: node for node in self.live.model.traces[-1].nodes}
        names = corresponding(own.program, self.captured)
        for layer, name in lowered.nodes.items():
            use, made = lowered.written.get((layer, 0)), nodes[name].elementary[-1]
            if use is None or use.piece is not None or _is_lying(made):
                continue
            node, item = own.made.get(made.outputs[0].name, (None, None))
            if item is not None:
                node = next((user for user in node.users if user.target is getitem and user.args[1] == item), None)
            target = _first_result(self.named[names[node.name]]) if node is not None and node.name in names else None
            if target is not None and nodes[name].rate:
                # What the layer writes are the points that are left.
                target = next((user for user in target.users if rate_of(user) is not None), None)
            if target is not None:
                yield layer, target

    def _known(self) -> set[fx.Node]:
        """Return the nodes that depend on inputs, buffers and literals alone: every rank has all of them."""
        found: set[fx.Node] = set()
        written = {self.captured.buffers.get(node.name) for node in self.nodes} & set(self.captured.written)
        for node in self.nodes:
            if node.op == "placeholder":
                name = self.captured.buffers.get(node.name)
                if node.name not in self.captured.parameters and (name is None or name not in written):
                    found.add(node)
            elif node.op == "call_function" and not is_random(node) and found.issuperset(node.all_input_nodes):
                found.add(node)
        return found


class AtenLayers:
    """The layers of a plan that a module's own graphs compute.

    Attributes:
        layers: By name, by whether the graph is that of training.
        others: Why each of the others is not among them.
        notes: What is computed otherwise than the plan says.
        problem: Why the plan does not train the module as it trains itself, "" for no reason.
    """

    def __init__(self, live: LiveModel, plan: Plan) -> None:
        """Find the layers in the graphs of a module, of which there are none where its translation trains it."""
        self.plan = plan
        self.graphs = {trains: AtenGraph(live, captured) for trains, captured in live.graphs.items()}
        self.layers: dict[str, dict[bool, _Propagation]] = {}
        self.others: dict[str, str] = {}
        self.notes: list[str] = []
        for layer in plan.layers if self.graphs else ():
            if not plan.graph[layer.name].is_fan_out:
                self._add(layer)
        untrained = live.model.graph.untrained
        is_known = bool(self.graphs) and not live.is_stateful
        self.problem = "" if is_known else untrained
        if untrained and is_known:
            for name in list(self.others):
                if self._untranslated(name) and name in self.graphs[True].targets:
                    self._add_whole(name)
            self.problem = next(self._problems(), "")

    def _add(self, layer: LayerPlan) -> None:
        """Add a layer whose splits are carried through."""
        operator, splits = self.plan.graph[layer.name], _splits(layer)
        try:
            self._checked(layer.name, {t: g.layer(operator, self.plan.graph, splits) for t, g in self.graphs.items()})
        except (_NotCarriedError, EmitError) as error:
            self.others[layer.name] = str(error)

    def _add_whole(self, name: str) -> None:
        """Add a layer that no translation of the module computes, whatever becomes of its splits."""
        graph, first = self.plan.graph, self._first(name)
        operator, splits = graph[first], _splits(self.plan[first])
        try:
            found = {t: g.whole_layer(name, operator, graph, splits) for t, g in self.graphs.items()}
            self._checked(name, found)
        except (_NotCarriedError, EmitError) as error:
            self.others[name] = str(error)
        else:
            why = self.others.pop(name)
            self.notes.append(f"layer {name!r} is computed whole where its splits are not carried through: {why}")

    def _checked(self, name: str, found: dict[bool, AtenLayer]) -> None:
        lies = {trains: _Propagation(self.graphs[trains], own) for trains, own in found.items()}
        for own in lies.values():
            own.check()
        self.layers[name] = lies

    def _first(self, name: str) -> str:
        """Return the first of the layers that are one operator of the module together, of which one is the last."""
        graph, found = self.plan.graph, {name}
        for layer in reversed(self.plan.layers):
            if layer.name in found:
                read = (graph.incoming.get((layer.name, i)) for i in range(len(graph[layer.name].reads)))
                found |= {e.producer for e in read if e is not None and not self._is_written(e.producer)}
        stage = self.plan[name].stage
        return next(layer.name for layer in self.plan.layers if layer.name in found and layer.stage == stage)

    def _is_written(self, name: str) -> bool:
        return self.plan.graph[name].is_fan_out or any(name in graph.targets for graph in self.graphs.values())

    def calls(self) -> dict[str, tuple[str, tuple[str, ...]]]:
        """Return for each layer whose mesh it is on, and the layers that it reads beside those of the plan."""
        return {
            name: (
                found[True].layer.operator.name,
                tuple(dict.fromkeys(own.graph.writers[node] for own in found.values() for node in own.others)),
            )
            for name, found in self.layers.items()
        }

    def _untranslated(self, name: str) -> str:
        """Return what a layer does in training that its translation does not, "" for nothing."""
        graph, other = self.graphs[True], self.graphs[False]
        if name not in graph.targets:
            return f"{at(other.targets[name])} is computed in evaluation alone" if name in other.targets else ""
        return next(filter(None, (graph.untranslated(n, self._alike) for n in graph.cone(graph.targets[name]))), "")

    @cached_property
    def _alike(self) -> frozenset[str]:
        """The nodes of the graph of training, by name, that are computed in evaluation, too."""
        return in_both(self.graphs[True].captured, self.graphs[False].captured)

    def _problems(self) -> Iterator[str]:
        """Yield what is done in training by no layer that nodes of the graph compute."""
        for name, why in self.others.items():
            told = self._untranslated(name)
            if told:
                yield f"{told} (layer {name!r} is translated: {why})"
        graph = self.graphs[True]
        for name in graph.captured.outputs:
            nodes = graph.cone(graph.named[name], is_whole=False)
            yield from filter(None, (graph.untranslated(node, self._alike) for node in nodes))

    def run(
        self, program: Any, mesh: LayerMesh, name: str, sources: Mapping[int, Tensor], others: Mapping[str, Tensor]
    ) -> Tensor:
        """Return what a layer writes.

        Args:
            program: Of the rank, for training or for evaluation.
            mesh: That it is computed on.
            name: Of the layer.
            sources: What it reads of others, as these have it, by the number of the read.
            others: What it reads besides, by the layers that write it.
        """
        return _Run(self.layers[name][program.trains], self.plan.graph, program, mesh, sources, others).written()

    def part(self, layers: Collection[str], *, trains: bool, device: object) -> Part:
        """Return what computes all that some layers read and that is computed of inputs and buffers alone."""
        if not self.graphs:
            return Part(graph=lambda: (), inputs=(), state=(), names=())
        nodes = dict.fromkeys(
            node for name, found in self.layers.items() if name in layers for node in found[trains].known
        )
        return self.graphs[trains].part(list(nodes), device)


def at(node: fx.Node) -> str:
    """Return the line of the user's source that a node comes from, with its text; its operator where none is known."""
    line, source = location(node.meta.get("stack_trace") or "")
    return f"{line} ({source})" if source else line or str(node.target)


def _splits(layer: LayerPlan) -> dict[str, int]:
    return {dim: parts for dim, parts in layer.splits.items() if parts > 1}


def is_random(node: fx.Node) -> bool:
    """Return whether what a node gives is drawn anew in every call."""
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def _is_lying(node: Any) -> bool:
    return isinstance(node.op, ops.Identity) and node.name.endswith(":held")


def _is_piece(index_map: Sequence[Any]) -> bool:
    return any(isinstance(axis, SliceOf) for axis in index_map)


def _name(node: fx.Node) -> str:
    """Return the name of a node's operator, without namespace and overload."""
    schema = getattr(node.target, "_schema", None)
    return str(schema.name).partition("::")[2] if schema else str(getattr(node.target, "__name__", ""))


def _shape(node: fx.Node) -> tuple[int, ...]:
    return tuple(node.meta["val"].shape)


_BY_KEPT_STATISTICS = {_ATEN._native_batch_norm_legit_no_training.default}
_NORMALISING = {_ATEN.batch_norm.default, _ATEN._native_batch_norm_legit_functional.default}

_WIDE = """
    acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow softplus layer_norm group_norm
    native_layer_norm native_group_norm rms_norm norm linalg_vector_norm linalg_matrix_norm cosine_similarity nll_loss
    nll_loss2d nll_loss_nd cross_entropy_loss poisson_nll_loss cosine_embedding_loss hinge_embedding_loss kl_div l1_loss
    smooth_l1_loss huber_loss mse_loss margin_ranking_loss multilabel_margin_loss multi_margin_loss soft_margin_loss
    triplet_margin_loss binary_cross_entropy_with_logits dist pdist cdist renorm logsumexp softmax log_softmax cumprod
    cumsum prod sum
"""
_IN_FLOAT32 = frozenset(_WIDE.split())
"""Operators that `torch.autocast` computes in float32 on GPUs (PyTorch's list), and here on either device."""


def _first_result(node: fx.Node) -> fx.Node:
    """Return a node, or what gives the first of its tensors where it gives several."""
    if hasattr(node.meta["val"], "shape"):
        return node
    return next((user for user in node.users if user.target is getitem and user.args[1] == 0), node)


def _piece_of(node: fx.Node) -> tuple[fx.Node, int, int, int] | None:
    """Return the node that one is a piece of, along which dim, from where and of what size; None for no piece."""
    if node.target is getitem:
        source, number = node.args
        if _name(source) not in ("chunk", "split", "split_with_sizes"):
            return None
        whole = source.args[0]
        dim = source.args[2] if len(source.args) > 2 else source.kwargs.get("dim", 0)
        dim %= len(_shape(whole))
        sizes = [part.shape[dim] for part in source.meta["val"]]
        return whole, dim, [0, *accumulate(sizes)][number], sizes[number]
    if node.target is _ATEN.slice.Tensor and (len(node.args) < 5 or node.args[4] == 1):
        whole = node.args[0]
        dim = node.args[1] if len(node.args) > 1 else 0
        start = (node.args[2] if len(node.args) > 2 else None) or 0
        dim %= len(_shape(whole))
        start = start if start >= 0 else start + _shape(whole)[dim]
        return whole, dim, start, _shape(node)[dim]
    return None


def _whole(shape: Sequence[int], name: str) -> Dims:
    return tuple((Dim(f"{name}.{i}*", extent),) if extent > 1 else () for i, extent in enumerate(shape))


def _over(dims: Sequence[Dim], shape: Sequence[int], splits: Splits) -> Dims:
    """Return the dims of a tensor, row-major, as those of a shape of as many elements."""
    found = refined([dim for dim in dims if dim.size > 1], shape, splits)
    if found is None:
        raise _NotCarriedError(f"{[dim.size for dim in dims]} is read as {list(shape)}")
    return found


# -- the way of the splits through a layer


class _Propagation:
    """Follows a layer's splits from what it reads to what it writes, without anything to compute.

    Attributes:
        known: Nodes that the layer reads and that every rank has all of.
        others: Nodes that it reads though the plan does not say so, and that other layers write.
    """

    def __init__(self, graph: AtenGraph, layer: AtenLayer) -> None:
        self.graph, self.layer = graph, layer
        self.known: dict[fx.Node, None] = {}
        self.others: dict[fx.Node, None] = {}
        self._lies: dict[fx.Node, Any] = {}
        self._steps: dict[fx.Node, tuple[ShardingRule, Propagated]] = {}

    def check(self) -> None:
        """Raise _NotCarriedError where what is written does not lie as the plan has it."""
        lies = self.of(self.layer.target)
        if not self.layer.is_whole and not lies_alike(lies, self.wanted, self.layer.splits):
            raise _NotCarriedError(f"it writes {lies}, which the plan has as {self.layer.written}")

    @property
    def wanted(self) -> Dims:
        """How the plan has what the layer writes."""
        written, target = self.layer.written, self.layer.target
        return self.of(target) if written is None else _over(written, _shape(target), self.layer.splits)

    def of(self, node: fx.Node) -> Any:
        """Return how a node lies; a list for one that gives several tensors."""
        if node not in self._lies:
            self._lies[node] = self._lie(node)
        return self._lies[node]

    def step(self, node: fx.Node) -> tuple[ShardingRule, Propagated]:
        """Return a node's rule, and how it is run."""
        if node not in self._steps:
            rule = rule_of(node)
            operands = [self.of(other) for other in operands_of(node)]
            self._steps[node] = rule, propagated(rule, operands, self.layer.splits)
        return self._steps[node]

    def _lie(self, node: fx.Node) -> Any:
        layer = self.layer
        if node in layer.pins:
            return layer.pinned(node)
        if node in self.graph.known:
            self.known[node] = None
            return _whole(_shape(node), node.name)
        if node.op != "call_function":
            raise _NotCarriedError(f"{node.name} is none of its reads")
        writer = self.graph.writers.get(node, "")
        if writer and node is not layer.target and layer.is_whole:
            self.others[node] = None
            return _whole(_shape(node), node.name)
        if writer and node is not layer.target:
            raise _NotCarriedError(f"it reads {node.name}, which layer {writer} writes")
        if node.target is getitem:
            return self.of(node.args[0])[node.args[1]]
        if rate_of(node) is not None:
            return self.of(node.args[0])
        if is_random(node) and not is_idle(node):
            raise _NotCarriedError(f"{node.target} at {node.name} draws numbers")
        _, found = self.step(node)
        for i in found.gathered if not layer.is_whole else ():
            raise _NotCarriedError(f"{node.target} at {node.name} needs more of operand {i} than ranks have")
        return found.results[0] if hasattr(node.meta["val"], "shape") else list(found.results)


def operands_of(node: fx.Node) -> list[fx.Node]:
    """Return the tensors that a node reads, in the order of its arguments; one that is read twice, twice."""
    return _nodes_in((node.args, dict(node.kwargs)))


def rule_of(node: fx.Node) -> ShardingRule:
    """Return how the dims of what a node reads and gives go together."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return _whole_rule(node)
    args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), lambda other: other.meta["val"])
    return sharding_rule(node.target, args, kwargs, node.meta["val"])


def _whole_rule(node: fx.Node) -> ShardingRule:
    """Return the rule of a function of the user's own, of which nothing is known: it is given all of its operands."""
    extents: dict[str, int] = {}

    def named(shape: Sequence[int]) -> RuleDims:
        found = []
        for extent in shape:
            name = f"d{len(extents)}"
            extents[name] = extent
            found.append((name,) if extent > 1 else ())
        return tuple(found)

    operands = tuple(named(_shape(other)) for other in operands_of(node))
    values = node.meta["val"]
    results = tuple(named(x.shape) for x in ([values] if hasattr(values, "shape") else values))
    extents = {name: extent for name, extent in extents.items() if extent > 1}
    return ShardingRule(operands=operands, results=results, extents=extents, whole=frozenset(extents), is_known=False)


def _is_optional(node: fx.Node, number: int) -> bool:
    """Return whether an operator can do without one of its tensors, by its number."""
    left, arguments = number, node.target._schema.arguments
    for place, argument in enumerate(arguments):
        value = node.args[place] if place < len(node.args) else node.kwargs.get(argument.name)
        count_of = len(_nodes_in(value))
        if left < count_of:
            return str(argument.type).startswith("Optional")
        left -= count_of
    raise AssertionError(f"{node.target} has no tensor {number}")


def _nodes_in(value: Any) -> list[fx.Node]:
    found: list[fx.Node] = []

    def add(other: fx.Node) -> fx.Node:
        found.append(other)
        return other

    fx.map_arg(value, add)
    return found


def rate_of(node: fx.Node) -> float | None:
    """Return the share of single points that a node drops; None for a node that drops none."""
    if node.target is not _ATEN.dropout.default:
        return None
    _, rate, trains = node.args
    return float(rate) if trains else 0.0


def is_idle(node: fx.Node) -> bool:
    """Return whether an operator that may draw numbers draws none: attention and recurrent layers that drop nothing."""
    schema = node.target._schema
    defaults = {each.name: each.default_value for each in schema.arguments if each.has_default_value()}
    given = dict(zip((each.name for each in schema.arguments), node.args, strict=False)) | dict(node.kwargs)
    rates = {name: value for name, value in (defaults | given).items() if name in ("dropout_p", "dropout")}
    return bool(rates) and not any(rates.values())


# -- a layer, run


class _Run:
    """Writes the nodes of a layer into the graph of a rank."""

    def __init__(
        self,
        lies: _Propagation,
        graph: Graph,
        program: Any,
        mesh: LayerMesh,
        sources: Mapping[int, Tensor],
        others: Mapping[str, Tensor],
    ) -> None:
        self._lies, self._graph, self._layer = lies, graph, lies.layer
        self._program, self._mesh, self._sources, self._others = program, mesh, sources, others
        self._values: dict[fx.Node, Any] = {}
        self._reads: dict[int, Tensor] = {}
        self._drops = 0

    def written(self) -> Tensor:
        """Return what the layer writes, in the dims of its plan."""
        lies, wanted = self._lies.of(self._layer.target), self._lies.wanted
        found = self._brought(resolved(self._of(self._layer.target)), lies, wanted)
        written = self._layer.written
        return found if written is None else self._as(found, tuple(dim for dim in written if dim.size > 1))

    def _of(self, node: fx.Node) -> Any:
        """Return the tensor of a node, its dims flat; a list for one that gives several."""
        if node not in self._values:
            self._values[node] = self._made(node)
        return self._values[node]

    def _made(self, node: fx.Node) -> Any:
        layer = self._layer
        if node in layer.pins:
            return self._as(self._read(layer.pins[node]), _flat(self._lies.of(node)))
        if node in self._lies.graph.known:
            value = node.meta["val"]
            return self._program.known(node.name, _flat(self._lies.of(node)), is_index=not value.is_floating_point())
        if node in self._lies.others:
            return self._others[self._lies.graph.writers[node]]
        if node.target is getitem:
            return self._of(node.args[0])[node.args[1]]
        rate = rate_of(node)
        if rate is None:
            return self._step(node)
        x, name = resolved(self._of(node.args[0])), layer.operator.name
        self._drops += 1
        of = name if self._drops == 1 else f"{name}/{self._drops}"
        return dropout(x, self._program.mask_key, rate=rate, of=of) if rate else x

    def _read(self, number: int) -> Tensor:
        if number not in self._reads:
            operator, dims = self._layer.operator, self._layer.read(number)
            access = operator.reads[number]
            if access.role is Role.PARAMETER:
                order = shared_order(self._graph, operator, access)
                own = tuple(dims[order.index(i)] for i in range(len(order))) if len(order) == len(dims) else dims
                x = self._program.weight(self._mesh, weight_name(self._graph, operator, access), own)
                x = x if own == dims else arrange(x, dims)
            else:
                x = reshard(self._sources[number], self._mesh, dims)
            self._reads[number] = x
        return self._reads[number]

    def _step(self, node: fx.Node) -> Any:
        mesh, tensors = self._mesh, operands_of(node)
        rule, found = self._lies.step(node)
        # What is added once to a sum is added when its addends are, or, where the operator needs it, on one rank alone.
        once = set(rule.once) if found.sums else set()
        added = {number for number in once if _is_optional(node, number)}
        operands = [
            resolved(self._brought(self._of(x), self._lies.of(x), need))
            for x, need in zip(tensors, found.operands, strict=True)
        ]
        lies = [*(dims for i, dims in enumerate(found.operands) if i not in added), *found.results]
        brought = found.sums | mesh.split(dim.name for dims in lies for dim in _flat(dims))
        if self._program.low and _name(node) in _IN_FLOAT32:
            operands = [in_float32(x) for x in operands]
        shards = {
            i: self._shard(spread(x, brought - {*x.names}), found.operands[i])
            for i, x in enumerate(operands)
            if i not in added
        }
        if any(mesh.point.get(axis, 0) for axis in found.sums):
            shards |= {i: (self._program.of(shards[i]) * 0.0).node for i in once - added}
        numbers = count()
        args, kwargs = fx.map_arg(self._with_sizes(node, rule, found), lambda _: shards.get(next(numbers)))
        made = self._program.call(node.target, args, kwargs)
        if rule.is_mean and found.sums:
            points = [dim for factor in rule.sums for dim in found.factors[factor]]
            made = made * (prod(map(mesh.part, points)) / prod(dim.size for dim in points))
        values = node.meta["val"]
        is_one = hasattr(values, "shape")
        results = []
        for i, (value, dims) in enumerate(zip([values] if is_one else values, found.results, strict=True)):
            flat = _flat(dims)
            shard = shaped(made if is_one else made[i], self._local(dims), tuple(map(mesh.part, flat)))
            partial = found.sums if i in rule.summed else frozenset[str]()
            x = Tensor(value=shard, mesh=mesh, dims=flat, partial=partial, is_index=not value.is_floating_point())
            for number in added:
                x = self._plus(x, operands[number], rule.operands[number], rule.results[i], found)
            results.append(x)
        return results[0] if is_one else results

    def _shard(self, x: Tensor, dims: Dims) -> fx.Node:
        shard: fx.Node = shaped(x.value, x.shard, self._local(dims)).node
        return shard

    def _plus(self, x: Tensor, other: Tensor, given: RuleDims, made: RuleDims, found: Propagated) -> Tensor:
        """Return a result plus an operand that lacks some of its factors."""
        mesh, x = self._mesh, resolved(x)
        own, factors = ([factor for dim in dims for factor in dim] for dims in (given, made))
        assert own == [factor for factor in factors if factor in own], f"{own} are not in the order of {factors}"
        shape = [mesh.part(dim) if factor in own else 1 for factor in factors for dim in found.factors[factor]]
        value = spread(other, mesh.split(x.names) - {*other.names}).value.reshape(shape)
        value = called(as_low, value, x.value) if self._program.low else value
        return replace(x, value=x.value + value, spreads={})

    def _as(self, x: Tensor, dims: tuple[Dim, ...]) -> Tensor:
        """Return a tensor whose dims have other names, or are taken apart otherwise, on every rank alike."""
        if x.dims == dims:
            return x
        shape = tuple(map(self._mesh.part, dims))
        return replace(x, value=shaped(x.value, x.shard, shape), dims=dims, spreads={})

    def _brought(self, x: Tensor, have: Dims, need: Dims) -> Tensor:
        """Return an operand as a node needs it."""
        is_here = x.mesh is self._mesh and lies_alike(have, need, self._layer.splits)
        return self._as(x, _flat(need)) if is_here else reshard(x, self._mesh, _flat(need))

    def _local(self, dims: Dims) -> tuple[int, ...]:
        return tuple(prod(map(self._mesh.part, own)) for own in dims)

    def _with_sizes(self, node: fx.Node, rule: ShardingRule, found: Propagated) -> tuple[Any, Any]:
        """Return a node's arguments with the extents of a shard."""
        args, kwargs = list(node.args), dict(node.kwargs)
        if not rule.sizes:
            return tuple(args), kwargs
        names = [argument.name for argument in node.target._schema.arguments]
        extents = {factor: prod(map(self._mesh.part, dims)) for factor, dims in found.factors.items()}
        for name, told in rule.sizes:
            of_dims = [prod(extents[factor] for factor in own) for own in told if isinstance(own, tuple)]
            of_one = [extents[own] for own in told if isinstance(own, str)]
            value: Any = prod(of_one) if of_one else of_dims
            place = names.index(name)
            if place < len(args):
                args[place] = value
            else:
                kwargs[name] = value
        return tuple(args), kwargs


def _flat(dims: Dims) -> tuple[Dim, ...]:
    return tuple(dim for own in dims for dim in own)
