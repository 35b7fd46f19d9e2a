"""`AtenGraph`: a module's own exported graph, with the nodes that correspond to reads and writes of a plan's layers.

`LayerSplits` propagates the splits of a layer through its nodes by the operators' sharding rules, without computing.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from operator import getitem
from typing import Any

import torch
from torch import fx

from pase.errors import EmitError
from pase.graph import Graph, Operator, Role, SliceOf
from pase.importers.ir import ops
from pase.importers.ir.trace import Use
from pase.importers.ir.views import Factor, View
from pase.importers.torch.capture import Captured, corresponding
from pase.importers.torch.live import LiveModel, Part
from pase.importers.torch.program import behind, location, origin_of
from pase.importers.torch.sharding_rules import ShardingRule, sharding_rule
from pase.importers.torch.sharding_rules.rule import Dims as RuleDims
from pase.sharding.layouts import WHOLE, PlainDim, tensor_dims
from pase.targets.torch.cuts import COPIES, Cut, cut_of
from pase.targets.torch.draws import is_random, rate_of, seeded
from pase.targets.torch.propagation import Dims, Propagated, Splits, lies_alike, propagated, refined
from pase.targets.torch.tensor import (
    Dim,
)

_ATEN = torch.ops.aten


class NotCarriedError(Exception):
    """The sharding rules cannot propagate a layer's splits from its inputs to its output."""


# -- the layers in the graph


@dataclass(frozen=True, slots=True, kw_only=True)
class AtenLayer:
    """A layer as a part of an exported graph.

    Attributes:
        operator: Operator of the plan's graph; the first if one operator of the module is several layers. None for the
            new value of a buffer, which no layer computes.
        splits: Number of parts of each of its dims.
        pins: Numbers of reads, by the corresponding nodes of the graph.
        target: The node that it writes.
        written: Layout of that in the plan; None to accept any.
        is_whole: Whether ranks replicate the computation where splits cannot be propagated.
        orders: For nodes in another order than the layer's output, their correspondence to it.
    """

    operator: Operator | None
    splits: Splits
    pins: Mapping[fx.Node, int]
    target: fx.Node
    written: tuple[Dim, ...] | None
    is_whole: bool
    orders: Mapping[fx.Node, View]

    def read(self, number: int) -> tuple[Dim, ...]:
        """Return the dims of an input, as its mesh has them.

        Where a window is split, or dims are unknown, a replicated layer has all of it.

        Raises:
            NotCarriedError: The layer is not replicated.
        """
        found = []
        assert self.operator is not None
        access = self.operator.reads[number]
        try:
            dims = tensor_dims(self.operator, access)
        except EmitError as error:
            if not self.is_whole:
                raise NotCarriedError(str(error)) from None
            return tuple(Dim(f"{number}.{place}*", extent) for place, extent in enumerate(access.shape))
        for place, dim in enumerate(dims):
            if isinstance(dim, PlainDim):
                name = dim.name if dim.name != WHOLE else f"{number}.{place}*"
                found.append(Dim(name, dim.extent))
            elif self.is_whole or self.splits.get(dim.out, 1) == self.splits.get(dim.kernel, 1) == 1:
                found.append(Dim(f"{number}.{place}*", dim.extent))
            else:
                raise NotCarriedError(f"windows over {dim.out} are split")
        return tuple(found)

    def pinned(self, node: fx.Node) -> Dims:
        """Return the layout of an input, in the dims of the graph."""
        dims = self.read(self.pins[node])
        found = self.laid(node, dims)
        if found is None and not self.is_whole:
            raise NotCarriedError(f"{[dim.size for dim in dims]} is read as {list(shape_of(node))}")
        return whole_dims(shape_of(node), node.name) if found is None else found

    def laid(self, node: fx.Node, dims: Sequence[Dim]) -> Dims | None:
        """Convert dims of a layer's output to those of its node; None where the parts do not match."""
        own: Sequence[Dim] | None = [dim for dim in dims if dim.size != 1]
        if node in self.orders:
            own = self.ordered(node, dims)
        return None if own is None else refined(own, shape_of(node), self.splits)

    def factors(self, node: fx.Node, dims: Sequence[Dim]) -> Dims | None:
        """Return dims of a layer's output, row-major, by the factors that express the order of its node."""
        return refined([dim for dim in dims if dim.size != 1], self.orders[node].factors, self.splits)

    def ordered(self, node: fx.Node, dims: Sequence[Dim]) -> list[Dim] | None:
        """Return dims of a layer's output in the order of its node, with unsplit ones where the node repeats points."""
        factors = self.factors(node, dims)
        if factors is None:
            return None
        found: list[Dim] = []
        for place, factor in enumerate(flat_factors(self.orders[node])):
            found += [Dim(f"repeated {place}", factor.extent)] if factor.base is None else factors[factor.base]
        return found

    def by_factor(self, node: fx.Node, dims: Sequence[Dim]) -> Dims | None:
        """Return dims of a node, row-major, by the factors of its order; None where the parts do not match."""
        extents = [factor.extent for factor in flat_factors(self.orders[node])]
        return refined([dim for dim in dims if dim.size != 1], extents, self.splits)


class AtenGraph:
    """One of a module's own graphs, with the nodes that layers write in it.

    Attributes:
        captured: The graph.
        targets: The node that each layer writes, by layer.
        orders: For nodes in another order than their layer's output, their correspondence to it.
        writers: The layer that writes a node.
        known: Nodes that every rank has completely before any layer: inputs, buffers, and values computed from these.
        numbers: Position of each node.
        weights: For the nodes of parameters, a layer and its tensor that is the whole parameter.
    """

    def __init__(self, live: LiveModel, captured: Captured) -> None:
        self.live, self.captured = live, captured
        self.nodes: list[fx.Node] = list(captured.graph.graph.nodes)
        self.named = {node.name: node for node in self.nodes}
        self.targets: dict[str, fx.Node] = {}
        self.orders: dict[fx.Node, View] = {}
        for layer, node, order in self._targets():
            self.targets[layer] = node
            if not order.is_reshape:
                self.orders[node] = order
        self.writers = {node: layer for layer, node in self.targets.items()}
        self.known = self._known()
        self.numbers = {node: number for number, node in enumerate(self.nodes)}
        self._placed = {name: node for node, name in self._leaves()}
        self.weights = dict(self._weights())
        self._cuts: dict[tuple[fx.Node, Cut], list[fx.Node]] = {}
        wholes = {*self.writers, *self._placed.values()}
        for node in self.nodes:
            found = cut_of(node, wholes)
            if found is not None:
                self._cuts.setdefault(found, []).append(node)

    def layer(self, operator: Operator, graph: Graph, splits: Splits, *, is_whole: bool = False) -> AtenLayer:
        """Return a layer; NotCarriedError where it is not a part of the graph."""
        name = operator.name
        if self._read_besides(operator, graph):
            raise NotCarriedError("it writes several tensors that are read")
        if name not in self.targets:
            raise NotCarriedError("what it writes is not a node of the exported graph")
        owner = self.live.statistics.get(name)
        if owner is not None and not is_whole and self.live.graphs[True].written.keys() & statistics_of(owner):
            raise NotCarriedError("it keeps statistics")
        write = operator.writes[0]
        if any(axis is None and extent > 1 for axis, extent in zip(write.index_map, write.shape, strict=True)):
            raise NotCarriedError("it writes dims that are none of its own")
        named = [each for axis in write.index_map for each in (axis if isinstance(axis, tuple) else (axis,))]
        if not all(each is None or isinstance(each, str) for each in named):
            raise NotCarriedError("it writes a part of its dims")
        return AtenLayer(
            operator=operator,
            splits=splits,
            pins=dict(self._pins(operator, graph)),
            target=self.targets[name],
            written=tuple(Dim(each, operator.extents[each]) for each in named if isinstance(each, str)),
            is_whole=False,
            orders=self.orders,
        )

    def _read_besides(self, operator: Operator, graph: Graph) -> bool:
        """Return whether further outputs of a layer are read, other than slices of its first output."""
        others = [i for i, access in enumerate(operator.writes) if i and not _is_piece(access.index_map)]
        if not others:
            return False
        written = self.live.model.lowered.written
        values = {written[operator.name, i].value for i in others if (operator.name, i) in written}
        if values & {output.name for output in self.live.outputs}:
            return True
        read = [edge.output for edge in graph.edges if edge.producer == operator.name]
        return any(operator.wholes.get(output, output) in others for output in read)

    def whole_layer(self, name: str, first: Operator, graph: Graph, splits: Splits) -> AtenLayer:
        """Return a layer of which ranks compute all that splits are not carried through.

        Args:
            name: Of the layer.
            first: The first of the layers that are one operator of the module together, of which it is the last.
            graph: Of the plan.
            splits: Of the first layer.
        """
        found = self.layer(graph[name], graph, splits, is_whole=True)
        if first.name == name:
            return replace(found, is_whole=True)
        # The first layer itself is not computed, and its own inputs are not inputs of the program.
        pins = {node: number for node, number in self._pins(first, graph) if node not in self.known}
        return replace(found, operator=first, pins=pins, written=None, is_whole=True)

    def keeps_plainly(self, owner: str) -> bool:
        """Return whether each layer that normalises for a module, by name, is one call that updates its statistics."""
        layers = [layer for layer, other in self.live.statistics.items() if other == owner]
        for node in self.nodes:
            if self.captured.buffers.get(node.name) in statistics_of(owner) and self._kept_in(node) != len(layers):
                return False
        return True

    def _kept_in(self, held: fx.Node) -> int:
        """Return how many consecutive normalisations update a statistic; -1 where it is also read elsewhere."""
        calls = [user for user in held.users if user.op != "output"]
        if not calls:
            return 0
        if len(calls) > 1 or calls[0] not in self._normalising:
            return -1
        # The new moments are the results behind those of the batch, in the order of the old ones.
        number = calls[0].args.index(held)
        new = [user for user in calls[0].users if user.target is getitem and user.args[1] == number]
        later = [self._kept_in(node) for node in new]
        return -1 if -1 in later else 1 + sum(later)

    @cached_property
    def _normalising(self) -> set[fx.Node]:
        return {node for node in self.nodes if node.target in _NORMALISING and node.args[5]}

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

    @cached_property
    def carrying(self) -> set[fx.Node]:
        """The nodes that a gradient flows through, where parameters and inputs have one."""
        found: set[fx.Node] = set()
        for node in self.nodes:
            if node.op == "output" or not _is_float(node):
                continue
            if node.op == "placeholder":
                carries = node.name in self.captured.parameters or node.name in self.captured.inputs
            else:
                carries = not is_cut(node) and not found.isdisjoint(node.all_input_nodes)
            if carries:
                found.add(node)
        return found

    @cached_property
    def fixed(self) -> set[fx.Node]:
        """Known nodes computed from only unwritten buffers and literals, without random numbers."""
        found: set[fx.Node] = set()
        for node in self.nodes:
            if node not in self.known or is_random(node):
                continue
            if node.op == "placeholder":
                is_written = self.captured.buffers.get(node.name) in self.captured.written
                if node.name not in self.captured.inputs and not is_written:
                    found.add(node)
            elif found.issuperset(node.all_input_nodes):
                found.add(node)
        return found

    @cached_property
    def readers(self) -> Mapping[fx.Node, Sequence[str]]:
        """The layers that compute each node that drops single points."""
        found: dict[fx.Node, list[str]] = {}
        for layer, target in self.targets.items():
            for node in self.cone(target):
                if rate_of(node):
                    found.setdefault(node, []).append(layer)
        return found

    def _is_dropped_alike(self, node: fx.Node, layer: str) -> bool:
        """Return whether the translation of a layer drops points where a node of it does, and no other layer does."""
        if len(self.readers.get(node, ())) != 1 or layer not in self.live.model.lowered.nodes:
            return False
        name = self.live.model.lowered.nodes[layer]
        steps = next(each for each in self.live.model.traces[-1].nodes if each.name == name).elementary
        drops = [other for other, layers in self.readers.items() if layer in layers]
        return len(drops) == sum(step.rate > 0 for step in steps)

    def drop_name(self, node: fx.Node) -> str:
        """Return the name by which a node's dropout mask is drawn: that of its layer, as in its translation."""
        layers = self.readers.get(node, ())
        if len(layers) != 1:
            return f"dropout {self.numbers[node]}"
        equal_layers = sorted(
            (other for other, own in self.readers.items() if own == layers), key=self.numbers.__getitem__
        )
        place = equal_layers.index(node)
        return layers[0] if place == 0 else f"{layers[0]}/{place + 1}"

    def untranslated(self, node: fx.Node, layer: str, alike: Collection[str]) -> str:
        """Return an effect of a node that no translation of the module in evaluation has, "" for none.

        Args:
            node: The node.
            layer: Layer that it is computed for, "" for none.
            alike: Names of nodes that are also computed in evaluation.
        """
        if is_random(node):
            return f"{at(node)} draws numbers"
        if node in self.known or node.target is getitem:
            return ""
        if is_cut(node):
            return f"{at(node)} detaches what depends on weights"
        if operator_name(node) == "as_strided":
            return f"as_strided at {at(node)} tells elements by their places in memory"
        if not isinstance(node.target, torch._ops.OpOverload):
            return f"torch.autograd.Function {node.target.__name__!r} at {at(node)} has a backward pass of its own"
        if rate_of(node) == 0.0 and node.args[1]:
            return f"dropout at {at(node)} drops nothing in training"
        if rate_of(node) and not self._is_dropped_alike(node, layer):
            return f"{at(node)} drops points otherwise than its layer's translation does"
        if node.target in _BY_KEPT_STATISTICS or (node.target in _NORMALISING and not node.args[5]):
            return f"batch_norm at {at(node)} normalises by kept statistics in training"
        if told := _beyond_translation(node):
            return told
        if origin_of(node) is not None and node.name not in alike and node.target not in COPIES:
            return f"{at(node)} is computed in training alone"
        return ""

    def part(self, nodes: Sequence[fx.Node], device: object) -> Part:
        """Return the graph that computes nodes which depend on only inputs, buffers and literals."""
        graph, root, env = fx.Graph(), torch.nn.Module(), dict[fx.Node, fx.Node]()
        needed = behind(self.captured.graph, nodes)
        inputs = [node for node in needed if node.name in self.captured.inputs]
        state = [node for node in needed if node.name in self.captured.buffers]
        for node in (*inputs, *state):
            env[node] = graph.placeholder(node.name)
        for node in state:
            if self.captured.buffers[node.name] in self.captured.written:
                # Tensors saved for backward must not change.
                env[node] = graph.call_function(_ATEN.clone.default, (env[node],))
        draws = any(map(is_random, needed))
        key = graph.placeholder("draw_key") if draws else None

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
            if is_random(node):
                made.target, made.args = seeded(node.target, self.numbers[node]), (key, *made.args)
        graph.output(tuple(env[node] for node in nodes))
        return Part(
            graph=fx.GraphModule(root, graph),
            inputs=tuple(self.captured.inputs[node.name] for node in inputs),
            state=tuple(self.captured.buffers[node.name] for node in state),
            names=tuple(node.name for node in nodes),
            draws=draws,
        )

    def _pins(self, operator: Operator, graph: Graph) -> Iterator[tuple[fx.Node, int]]:
        """Yield the nodes that a layer reads, each with the number of the read.

        The output of another layer is the node which that one writes, or a slice of it: the numbers are the same,
        regardless of how the importer interprets them.
        """
        for number, access in enumerate(operator.reads):
            if access.role is Role.PARAMETER:
                weight = self.live.weights.get((operator.name, access.tensor))
                if weight is None or weight.row is not None or not _is_in_order(weight.use):
                    continue
                node, piece = self._placed.get(weight.parameter), weight.use.piece
                cut = None if piece is None else Cut.of_range(weight.shape, piece.dim, piece.start, piece.size)
            else:
                node, cut = self._read(operator.name, number, graph)
            if node is None:
                continue
            if cut is None:
                yield node, number
                continue
            for user in self._cuts.get((node, cut), ()):
                yield user, number

    def _read(self, layer: str, number: int, graph: Graph) -> tuple[fx.Node | None, Cut | None]:
        """Return the node that a layer reads, perhaps a piece of it; None for none."""
        edge = graph.incoming.get((layer, number))
        while edge is not None and graph[edge.producer].is_fan_out:
            edge = graph.incoming[edge.producer, 0]
        if edge is None:
            fed = self.live.inputs.get((layer, number))
            is_given = fed is not None and fed.is_given and fed.use.piece is None and _is_in_order(fed.use)
            return self._placed.get(f"input {fed.use.value}") if is_given and fed else None, None
        node = self.targets.get(edge.producer)
        producer = graph[edge.producer]
        write = producer.writes[edge.output]
        if node is None or edge.output == 0:
            return node, None
        cuts = [(dim, axis) for dim, axis in enumerate(write.index_map) if isinstance(axis, SliceOf)]
        whole = producer.writes[0].shape
        if len(cuts) != 1 or prod(whole) != prod(shape_of(node)) or node in self.orders:
            return None, None
        ((dim, part),) = cuts
        return node, Cut.of_range(whole, dim, part.offset, part.extent)

    def _weights(self) -> Iterator[tuple[fx.Node, tuple[str, str]]]:
        """Yield the parameters that are layers' weights without changes, with a layer and its tensor."""
        for (layer, tensor), weight in self.live.weights.items():
            node = self._placed.get(weight.parameter)
            is_all = weight.row is None and weight.use.piece is None and _is_in_order(weight.use)
            if node is not None and is_all and weight.shape == shape_of(node):
                yield node, (layer, tensor)

    def _leaves(self) -> Iterator[tuple[fx.Node, str]]:
        for node in self.nodes:
            if node.name in self.captured.parameters:
                yield node, self.captured.parameters[node.name]
            elif node.name in self.captured.inputs:
                yield node, f"input {self.captured.inputs[node.name]}"

    def _targets(self) -> Iterator[tuple[str, fx.Node, View]]:
        """Yield each layer with the node that it writes, and the node's correspondence to the layer's output."""
        lowered, own = self.live.model.lowered, self.live.program
        nodes = {node.name: node for node in self.live.model.traces[-1].nodes}
        names = corresponding(own.program, self.captured)
        for layer, name in lowered.nodes.items():
            use, made = lowered.written.get((layer, 0)), nodes[name].elementary[-1]
            value = made.inputs[0].value if _is_lying(made) else made.outputs[0].name
            order = _order(nodes[name], value)
            if use is None or use.piece is not None or order is None:
                continue
            node, item = own.made.get(value, (None, None))
            if item is not None:
                node = next((user for user in node.users if user.target is getitem and user.args[1] == item), None)
            target = _first_result(self.named[names[node.name]]) if node is not None and node.name in names else None
            if target is not None and (nodes[name].rate or made.rate) and self.captured.trains:
                # Where nothing follows the dropout, the layer's output is the result of the dropout.
                target = _dropped(target) or target
            target = target and _before_readers(target)
            if target is not None and order.is_reshape:
                target = _before_taken_apart(target)
            is_all = prod(order.base) == prod(self.live.model.graph[layer].writes[0].shape)
            if target is not None and is_all and prod(shape_of(target)) == prod(order.shape):
                yield layer, target, order

    def _known(self) -> set[fx.Node]:
        """Return the nodes that depend on only inputs, buffers and literals: every rank has them completely."""
        found: set[fx.Node] = set()
        for node in self.nodes:
            if node.op == "placeholder":
                if node.name not in self.captured.parameters:
                    found.add(node)
            elif node.op == "call_function" and not rate_of(node) and found.issuperset(node.all_input_nodes):
                found.add(node)
        return found


def at(node: fx.Node) -> str:
    """Return the line of the user's source that a node comes from, with its text; its operator where none is known."""
    line, source = location(node.meta.get("stack_trace") or "")
    return f"{line} ({source})" if source else line or str(node.target)


def _is_in_order(use: Use) -> bool:
    """Return whether the elements that are read are in the order that they have in the module."""
    return use.view is None or use.view.is_reshape


def _order(node: Any, value: str) -> View | None:
    """Return the correspondence of a value to a layer's output; None where it is unknown.

    Args:
        node: Node of the trace that the layer represents.
        value: Result of one of its operators, by name.
    """
    views: dict[str, View] = {}
    for step in node.elementary:
        made = step.outputs[0]
        if made.name == node.outputs[0].name:
            views[made.name] = View.plain(made.shape)
            if _is_lying(step) and (inverse := _inverse(step.inputs[0].view)) is not None:
                views[step.inputs[0].value] = inverse
            continue
        for use in step.inputs:
            inner = views.get(use.value) if use.piece is None and use.seen_as is None else None
            if inner is not None and use.view is not None:
                inner = inner.reshaped(use.view.base)
                inner = None if inner is None else use.view.of(inner)
            if inner is not None and prod(inner.shape) == prod(made.shape):
                views[made.name] = inner
                break
    return views.get(value)


def _inverse(view: View | None) -> View | None:
    """Return the correspondence of a tensor to the row-major result of its view; None where that repeats points."""
    if view is None or view.repeats:
        return None
    flat = flat_factors(view)
    places = {factor.base: place for place, factor in enumerate(flat)}
    dims = tuple((Factor(extent, places[base]),) for base, extent in enumerate(view.factors))
    return View(base=tuple(factor.extent for factor in flat), dims=dims)


def flat_factors(view: View) -> list[Factor]:
    """Return the factors of a view, row-major."""
    return [factor for own in view.dims for factor in own]


def _beyond_translation(node: fx.Node) -> str:
    """Return an effect of an operator that its translation omits, "" for none."""
    names = [argument.name for argument in node.target._schema.arguments]
    given = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    if node.target is _ATEN.scaled_dot_product_attention.default and given.get("attn_mask") is not None:
        return f"attention at {at(node)} gives zeros where a mask leaves no key"
    if node.target is _ATEN.embedding.default and given.get("scale_grad_by_freq"):
        return f"the gradient of {at(node)} is scaled by how often a row is read"
    return ""


def statistics_of(owner: str) -> set[str]:
    """Return the names of the buffers in which a module that normalises has its moments, by the module's name."""
    return {f"{owner}.running_mean".removeprefix("."), f"{owner}.running_var".removeprefix(".")}


def _is_lying(node: Any) -> bool:
    return isinstance(node.op, ops.Identity) and node.name.endswith(":held")


def _is_piece(index_map: Sequence[Any]) -> bool:
    return any(isinstance(axis, SliceOf) for axis in index_map)


def is_cut(node: fx.Node) -> bool:
    """Return whether a gradient ends at a node."""
    return node.target is _ATEN.detach.default


def _is_float(node: fx.Node) -> bool:
    values = node.meta["val"]
    return any(map(has_gradient, [values] if hasattr(values, "shape") else values))


def has_gradient(x: Any) -> bool:
    """Return whether a tensor, real or fake, holds numbers that gradients are of."""
    return bool(x.is_floating_point() or x.is_complex())


def operator_name(node: fx.Node) -> str:
    """Return the name of a node's operator, without namespace and overload."""
    schema = getattr(node.target, "_schema", None)
    return str(schema.name).partition("::")[2] if schema else str(getattr(node.target, "__name__", ""))


def shape_of(node: fx.Node) -> tuple[int, ...]:
    """Return the shape of the tensor that a node gives."""
    return tuple(node.meta["val"].shape)


_BY_KEPT_STATISTICS = {_ATEN._native_batch_norm_legit_no_training.default}
_RESHAPING = {_ATEN.reshape.default, _ATEN.unsqueeze.default, _ATEN.squeeze.dim, _ATEN.flatten.using_ints}
_CASTS = {_ATEN.to.dtype, _ATEN.to.device, _ATEN.to.dtype_layout, _ATEN.to.other, _ATEN.type_as.default}
_NORMALISING = {_ATEN.batch_norm.default, _ATEN._native_batch_norm_legit_functional.default}


def _first_result(node: fx.Node) -> fx.Node:
    """Return a node, or the getter of its first tensor where it returns several."""
    if hasattr(node.meta["val"], "shape"):
        return node
    return next((user for user in node.users if user.target is getitem and user.args[1] == 0), node)


def _before_readers(node: fx.Node) -> fx.Node:
    """Return the last cast of a node to the type that it already has, which each consumer would otherwise repeat."""
    while len(node.users) == 1:
        (user,) = node.users
        if user.target not in _CASTS or user.args[0] is not node or user.meta["val"].dtype != node.meta["val"].dtype:
            break
        node = user
    return node


def _before_taken_apart(node: fx.Node) -> fx.Node:
    """Return the tensor whose dims a node divides, so that its consumers divide them by their own splits."""
    while node.target in _RESHAPING and len(node.args[0].users) == 1 and node.args[0].op == "call_function":
        source = node.args[0]
        if len(shape_of(source)) >= len(shape_of(node)):
            break
        node = source
    return node


def _dropped(node: fx.Node) -> fx.Node | None:
    """Return the dropout that reads a node's result, possibly reshaped; None for none."""
    for user in node.users:
        if rate_of(user) is not None:
            return user
        if user.target in _RESHAPING and (found := _dropped(user)) is not None:
            return found
    return None


def whole_dims(shape: Sequence[int], name: str) -> Dims:
    """Return dims of a replicated tensor, whose names begin with one."""
    return tuple((Dim(f"{name}.{i}*", extent),) if extent != 1 else () for i, extent in enumerate(shape))


# -- the way of the splits through a layer


class LayerSplits:
    """Propagates a layer's splits from its inputs to its output, without computing.

    Attributes:
        known: Nodes that the layer reads and that every rank has completely.
        others: Nodes that it reads in addition to the plan's reads, and that other layers write.
    """

    def __init__(self, graph: AtenGraph, layer: AtenLayer) -> None:
        self.graph, self.layer = graph, layer
        self.known: dict[fx.Node, None] = {}
        self.others: dict[fx.Node, None] = {}
        self._lies: dict[fx.Node, Any] = {}
        self._steps: dict[fx.Node, tuple[ShardingRule, Propagated]] = {}

    @property
    def first(self) -> str:
        """The layer whose mesh it is on."""
        assert self.layer.operator is not None
        return self.layer.operator.name

    @property
    def read(self) -> set[int]:
        """The numbers of the reads by which it gets nodes that it needs, once its target's way is known."""
        return {self.layer.pins[node] for node in self._lies if node in self.layer.pins}

    def check(self) -> None:
        """Raise NotCarriedError where the output's layout differs from the plan's."""
        layout, wanted = self.of(self.layer.target), self.wanted
        if not self.layer.is_whole and not lies_alike(layout, wanted, self.layer.splits):
            raise NotCarriedError(f"it writes {layout}; the plan has {self.layer.written}")

    @property
    def wanted(self) -> Dims:
        """Layout of the layer's output in the plan; replicated where its parts do not match the node's dims."""
        written, target = self.layer.written, self.layer.target
        if written is None:
            layout: Dims = self.of(target)
            return layout
        found = self.layer.laid(target, written)
        if found is not None:
            return found
        if self.is_apart:
            return whole_dims(shape_of(target), target.name)
        raise NotCarriedError(f"{[dim.size for dim in written]} is written as {list(shape_of(target))}")

    @property
    def is_apart(self) -> bool:
        """Whether the plan splits a replicated layer as its node cannot be split."""
        layer, written = self.layer, self.layer.written
        if written is None or not layer.is_whole:
            return False
        order = layer.orders.get(layer.target)
        size = prod(shape_of(layer.target) if order is None else order.base)
        return size == prod(dim.size for dim in written) and layer.laid(layer.target, written) is None

    def of(self, node: fx.Node) -> Any:
        """Return the layout of a node; a list for one that returns several tensors."""
        if node not in self._lies:
            self._lies[node] = self._lie(node)
        return self._lies[node]

    def step(self, node: fx.Node) -> tuple[ShardingRule, Propagated]:
        """Return a node's rule, and its propagated layouts."""
        if node not in self._steps:
            rule = rule_of(node)
            operands = [self.of(other) for other in operands_of(node)]
            self._steps[node] = rule, propagated(rule, operands, self.layer.splits)
        return self._steps[node]

    def added(self, node: fx.Node) -> set[int]:
        """Return the operands of a node that are added to its result where that is a sum, by their numbers."""
        rule, found = self.step(node)
        return {number for number in rule.once if _is_optional(node, number)} if found.sums else set()

    @cached_property
    def spreads(self) -> Mapping[tuple[fx.Node, int], frozenset[str]]:
        """By node and number of an operand, the splits that the operand lacks, over which its gradient is reduced.

        A tensor that is expanded on the way to a node has its gradient reduced before the expansion, where it is
        smaller.
        """
        needed = {
            (node, i): self._split(node)
            for node in self._steps
            for i, _ in enumerate(operands_of(node))
            if i not in self.added(node)
        }
        for (node, i), names in list(needed.items()):
            operand = operands_of(node)[i]
            first = self._before_repeated(operand)
            if first is not None and self._is_as_needed(node, i):
                lacking = names - {dim.name for dims in self.of(operand) for dim in dims}
                needed[first, 0] |= lacking
                needed[node, i] -= lacking
        return needed

    def _split(self, node: fx.Node) -> frozenset[str]:
        """Return the dims by which a node's work is split."""
        _, found = self.step(node)
        added = self.added(node)
        layouts = [*(dims for i, dims in enumerate(found.operands) if i not in added), *found.results]
        names = {dim.name for dims in layouts for own in dims for dim in own}
        return found.sums | {name for name in names if self.layer.splits.get(name, 1) > 1}

    def _is_as_needed(self, node: fx.Node, number: int) -> bool:
        """Return whether ranks hold the part of an operand that a node needs."""
        operand = operands_of(node)[number]
        return lies_alike(self.of(operand), self.step(node)[1].operands[number], self.layer.splits)

    def is_of_weights(self, node: fx.Node) -> bool:
        """Return whether a node depends on only weights and known values, and is read by a single node."""
        if node in self.layer.pins:
            operator = self.layer.operator
            assert operator is not None
            return operator.reads[self.layer.pins[node]].role is Role.PARAMETER
        if node.op == "placeholder":
            return node not in self.graph.known
        if sum(user in self._lies for user in node.users) > 1 or is_random(node) or rate_of(node) is not None:
            return False
        if node.target is getitem:
            return self.is_of_weights(node.args[0])
        if node not in self._steps or self.step(node)[1].sums:
            return False
        operands = [other for other in operands_of(node) if other not in self.graph.known]
        return bool(operands) and all(map(self.is_of_weights, operands))

    def _before_repeated(self, node: fx.Node) -> fx.Node | None:
        """Return the node that first repeats what one gives, which is used nowhere else; None for none."""
        first, smallest = None, prod(shape_of(node)) if hasattr(node.meta["val"], "shape") else 0
        while node in self._steps and len(node.users) == 1 and len(operands_of(node)) == 1:
            (operand,) = operands_of(node)
            if not isinstance(node.target, torch._ops.OpOverload) or not self._is_as_needed(node, 0):
                break
            if prod(shape_of(operand)) < smallest:
                first, smallest = node, prod(shape_of(operand))
            node = operand
        return first

    def _lie(self, node: fx.Node) -> Any:
        layer = self.layer
        if node in layer.pins:
            return layer.pinned(node)
        if node in self.graph.known:
            self.known[node] = None
            return whole_dims(shape_of(node), node.name)
        if node.op != "call_function":
            if not layer.is_whole or node not in self.graph.weights:
                raise NotCarriedError(f"{node.name} is none of its reads")
            return whole_dims(shape_of(node), node.name)
        writer = self.graph.writers.get(node, "")
        if writer and layer.is_whole and (node is not layer.target or layer.operator is None):
            self.others[node] = None
            return whole_dims(shape_of(node), node.name)
        if writer and node is not layer.target:
            raise NotCarriedError(f"it reads {node.name}, which layer {writer} writes")
        if node.target is getitem:
            return self.of(node.args[0])[node.args[1]]
        if rate_of(node) is not None:
            return self.of(node.args[0])
        if is_random(node) and not layer.is_whole:
            raise NotCarriedError(f"{node.target} at {node.name} draws numbers")
        _, found = self.step(node)
        for i in found.gathered if not layer.is_whole else ():
            raise NotCarriedError(f"{node.target} at {node.name} needs more of operand {i} than ranks have")
        return found.results[0] if hasattr(node.meta["val"], "shape") else in_places(node, found.results)


def in_places(node: fx.Node, results: Sequence[Any]) -> list[Any]:
    """Distribute items to the tensor results of a node, with None for results that are not tensors."""
    items = iter(results)
    return [None if value is None else next(items) for value in node.meta["val"]]


def operands_of(node: fx.Node) -> list[fx.Node]:
    """Return the tensors that a node reads, in the order of its arguments, with repetitions."""
    return nodes_in((node.args, dict(node.kwargs)))


def rule_of(node: fx.Node) -> ShardingRule:
    """Return the sharding rule of a node."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return _whole_rule(node)
    args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), lambda other: other.meta["val"])
    return sharding_rule(node.target, args, kwargs, node.meta["val"])


def _whole_rule(node: fx.Node) -> ShardingRule:
    """Return the rule of an unknown user function: it receives all of its operands completely."""
    extents: dict[str, int] = {}

    def named(shape: Sequence[int]) -> RuleDims:
        found = []
        for extent in shape:
            name = f"d{len(extents)}"
            extents[name] = extent
            found.append((name,) if extent > 1 else ())
        return tuple(found)

    operands = tuple(named(shape_of(other)) for other in operands_of(node))
    values = node.meta["val"]
    results = tuple(named(x.shape) for x in ([values] if hasattr(values, "shape") else values))
    extents = {name: extent for name, extent in extents.items() if extent > 1}
    return ShardingRule(operands=operands, results=results, extents=extents, whole=frozenset(extents), is_known=False)


WITHOUT_ADDEND = {
    _ATEN.addmm.default: _ATEN.mm.default,
    _ATEN.addmv.default: _ATEN.mv.default,
    _ATEN.baddbmm.default: _ATEN.bmm.default,
}
"""What operators compute before they add their first operand."""


def _is_optional(node: fx.Node, number: int) -> bool:
    """Return whether one of an operator's tensors, by its number, is optional."""
    if node.target in WITHOUT_ADDEND:
        return number == 0 and not node.kwargs
    left, arguments = number, node.target._schema.arguments
    for place, argument in enumerate(arguments):
        value = node.args[place] if place < len(node.args) else node.kwargs.get(argument.name)
        count_of = len(nodes_in(value))
        if left < count_of:
            return str(argument.type).startswith("Optional")
        left -= count_of
    raise AssertionError(f"{node.target} has no tensor {number}")


def nodes_in(value: Any) -> list[fx.Node]:
    """Return the nodes in arguments of a call, in order, with repetitions."""
    found: list[fx.Node] = []

    def add(other: fx.Node) -> fx.Node:
        found.append(other)
        return other

    fx.map_arg(value, add)
    return found
