"""`AtenLayers`: the layers of a plan, computed on a rank's shards by the nodes of the module's own exported graph.

A layer reads and writes tensors with the layouts of its plan. The nodes between them in the exported graph are run
unchanged, on shards, as far as the operators' sharding rules propagate the splits from inputs to output. The importer's
translation of the layer is not used, so an error in it can make a plan slow, but never wrong.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from functools import cached_property, partial
from itertools import count
from math import prod
from operator import getitem
from typing import Any

from torch import fx

from pase.errors import ModelError
from pase.graph import Graph, Role
from pase.importers.torch.capture import in_both
from pase.importers.torch.live import LiveModel, Part
from pase.importers.torch.sharding_rules import ShardingRule
from pase.importers.torch.sharding_rules.rule import Dims as RuleDims
from pase.planning.plan import LayerPlan, Plan
from pase.targets.programs import PlanProgram, plan_program, trains_as_written
from pase.targets.torch.aten_graph import (
    WITHOUT_ADDEND,
    AtenGraph,
    AtenLayer,
    LayerSplits,
    NotCarriedError,
    at,
    flat_factors,
    has_gradient,
    in_places,
    is_cut,
    operands_of,
    operator_name,
    statistics_of,
)
from pase.targets.torch.draws import is_random, rate_of, seeded
from pase.targets.torch.layers.points import arrange, dropout
from pase.targets.torch.propagation import Dims, Propagated, lies_alike
from pase.targets.torch.tensor import (
    Dim,
    LayerMesh,
    Tensor,
    as_low,
    called,
    in_float32,
    local,
    reshard,
    resolved,
    shaped,
    spread,
)
from pase.targets.training.counted import shared_order, weight_name


class AtenLayers:
    """The layers of a plan that a module's own graphs compute.

    Attributes:
        layers: Layers by name, by whether the graph is that of training.
        others: Why each of the other layers is not among them.
        notes: Deviations of the computation from the plan.
        updates: By whether it trains, the nodes of buffers' values after a call, by name; nodes that are not known
            before the layers come with the splits of their computation.
        problem: Why the plan does not train the module as it trains itself, "" for no reason.
    """

    def __init__(self, live: LiveModel, plan: Plan) -> None:
        """Find the layers in the graphs of a module; there are none where its translation is run."""
        self.plan = plan
        self.graphs = {trains: AtenGraph(live, captured) for trains, captured in live.graphs.items()}
        self.layers: dict[str, dict[bool, LayerSplits]] = {}
        self.others: dict[str, str] = {}
        self.notes: list[str] = []
        self._refused: list[str] = []
        for layer in plan.layers if self.graphs else ():
            if not plan.graph[layer.name].is_fan_out:
                self._add(layer)
        self._unneeded: set[str] = set()
        for name in list(self.others):
            if name in self.graphs[True].targets and not self._is_translated(live, name):
                self._add_whole(name)
        self.updates = {trains: dict(self._updates(graph)) for trains, graph in self.graphs.items()}
        self._moved = {trains: dict(self._moved_outputs(graph)) for trains, graph in self.graphs.items()}
        if plan.num_stages > 1:
            self._refuse_updates()
        self.problem = next(self._problems(), "") if self.graphs else live.model.graph.untrained

    def _add(self, layer: LayerPlan) -> None:
        """Add a layer whose splits are carried through."""
        operator, splits = self.plan.graph[layer.name], _splits(layer)
        try:
            self._checked(layer.name, {t: g.layer(operator, self.plan.graph, splits) for t, g in self.graphs.items()})
        except NotCarriedError as error:
            self.others[layer.name] = str(error)

    def _add_whole(self, name: str) -> None:
        """Add a layer that only the graph can compute, replicated where its splits cannot be propagated."""
        graph, first = self.plan.graph, self._first(name)
        operator, splits = graph[first], _splits(self.plan[first])
        try:
            found = {t: g.whole_layer(name, operator, graph, splits) for t, g in self.graphs.items()}
            self._checked(name, found)
        except NotCarriedError as error:
            self.others[name] = str(error)
        else:
            self._unneeded |= self._steps_of(name) - {name}
            why = self.others.pop(name)
            self.notes.append(f"layer {name!r} is computed whole where its splits are not carried through: {why}")

    def _checked(self, name: str, found: dict[bool, AtenLayer]) -> None:
        layer_splits = {trains: LayerSplits(self.graphs[trains], own) for trains, own in found.items()}
        for own in layer_splits.values():
            own.check()
        self.layers[name] = layer_splits

    def _first(self, name: str) -> str:
        """Return the first of the layers that are one operator of the module together, of which one is the last."""
        found, stage = self._steps_of(name), self.plan[name].stage
        return next(layer.name for layer in self.plan.layers if layer.name in found and layer.stage == stage)

    def _steps_of(self, name: str) -> set[str]:
        """Return the layers that are one operator of the module together, of which one is the last."""
        graph, found = self.plan.graph, {name}
        for layer in reversed(self.plan.layers):
            if layer.name in found:
                read = (graph.incoming.get((layer.name, i)) for i in range(len(graph[layer.name].reads)))
                found |= {e.producer for e in read if e is not None and not self._is_written(e.producer)}
        return found

    def _is_translated(self, live: LiveModel, name: str) -> bool:
        """Return whether a program of the importer's steps trains a layer, and those that are one operator with it."""
        for layer in self._steps_of(name):
            if not trains_as_written(self.plan.graph, layer, "torch"):
                return False
            try:
                live.part(item.use.value for (owner, _), item in live.constants.items() if owner == layer)
            except ModelError:
                return False
        return not self._untranslated(name)

    def translated(self, live: LiveModel) -> LiveModel:
        """Return a module with the inputs of translated layers, and the inputs that the other layers read directly."""
        others = {*self.layers, *self._unneeded}
        return replace(
            live,
            constants={key: x for key, x in live.constants.items() if key[0] not in others},
            inputs={key: x for key, x in live.inputs.items() if x.is_given or key[0] not in others},
        )

    def _is_written(self, name: str) -> bool:
        return self.plan.graph[name].is_fan_out or any(name in graph.targets for graph in self.graphs.values())

    def _refuse_updates(self) -> None:
        """Refuse buffers that are written, which the stages of a pipeline do not do, but for counts of batches."""
        for name, (node, _) in [item for own in self.updates.values() for item in own.items()]:
            if not name.endswith("num_batches_tracked"):
                self._refused.append(f"buffer {name!r} is written at {at(node)}, which stages of a pipeline do not do")
        self.updates = {trains: {} for trains in self.updates}

    @cached_property
    def program(self) -> PlanProgram:
        """The plan's program."""
        return plan_program(self.plan, target="torch", aten=self.calls(), updated=self.updated)

    def detached(self, *, trains: bool) -> frozenset[int]:
        """Return the numbers of the module's outputs that have no gradient."""
        if not self.graphs:
            return frozenset()
        graph = self.graphs[trains]
        outputs = [graph.named[name] for name in graph.captured.outputs]
        return frozenset(i for i, node in enumerate(outputs) if node not in graph.carrying)

    def known_updates(self, *, trains: bool) -> dict[str, str]:
        """Return which known values become those of which buffers, by the names of these."""
        own = self.updates.get(trains, {}).items()
        return {name: f"known {node.name}" for name, (node, layer_splits) in own if layer_splits is None}

    @property
    def updated(self) -> tuple[str, ...] | None:
        """The layers that new values of buffers are computed of, None where all of these are known before."""
        computed = [
            layer_splits
            for own in self.updates.values()
            for _, layer_splits in own.values()
            if layer_splits is not None
        ]
        if not computed:
            return None
        return tuple(
            dict.fromkeys(layer_splits.graph.writers[node] for layer_splits in computed for node in layer_splits.others)
        )

    def calls(self) -> dict[str, tuple[str, tuple[int, ...], tuple[str, ...]]]:
        """Return for each layer the layer whose mesh it uses, the reads of that one that it needs, and others."""
        return {
            name: (
                found[True].first,
                # A stage takes all that the one before it sends.
                tuple(
                    number
                    for number in range(len(self.plan.graph[found[True].first].reads))
                    if self.plan.num_stages > 1 or any(number in own.read for own in found.values())
                ),
                tuple(dict.fromkeys(own.graph.writers[node] for own in found.values() for node in own.others)),
            )
            for name, found in self.layers.items()
        }

    def _updates(self, graph: AtenGraph) -> Iterator[tuple[str, tuple[fx.Node, LayerSplits | None]]]:
        """Yield the buffers that a call writes, except running statistics of translated layers."""
        owners = {owner for layer, owner in graph.live.statistics.items() if layer not in self.layers}
        kept = {name for owner in owners for name in statistics_of(owner)}
        for name, node_name in graph.captured.written.items():
            node = graph.named[node_name]
            if name in kept:
                continue
            layer_splits = None
            if node not in graph.known:
                layer_splits = _whole(graph, node)
                try:
                    layer_splits.check()
                except NotCarriedError as error:
                    self._refused.append(f"buffer {name!r} is written at {at(node)}, and {error}")
            yield name, (node, layer_splits)

    def _moved_outputs(self, graph: AtenGraph) -> Iterator[tuple[int, LayerSplits]]:
        """Yield the outputs, by number, that have a layer's elements in an order other than by permuting dims."""
        for number, output in enumerate(graph.live.outputs):
            if output.is_moved and output.layer in self.layers:
                layer_splits = _whole(graph, graph.named[graph.captured.outputs[number]])
                try:
                    layer_splits.check()
                except NotCarriedError as error:
                    self._refused.append(f"output {number} of the module is {output.problem}, and {error}")
                yield number, layer_splits

    def _untranslated(self, name: str) -> str:
        """Return an effect of a layer in training that its translation lacks, "" for none."""
        graph, other = self.graphs[True], self.graphs[False]
        owner = graph.live.statistics.get(name)
        if owner is not None and not graph.keeps_plainly(owner):
            return f"{owner!r} keeps its moments otherwise than by one call"
        if name not in graph.targets:
            return f"{at(other.targets[name])} is computed in evaluation alone" if name in other.targets else ""
        return next(
            filter(None, (graph.untranslated(n, name, self._alike) for n in graph.cone(graph.targets[name]))), ""
        )

    @cached_property
    def _alike(self) -> frozenset[str]:
        """The nodes of the graph of training, by name, that are computed in evaluation, too."""
        return in_both(self.graphs[True].captured, self.graphs[False].captured)

    def _problems(self) -> Iterator[str]:
        """Yield effects in training that no layer computed by nodes of the graph has."""
        yield from self._refused
        graph = self.graphs[True]
        if graph.captured.computes_gradients:
            yield from _computed_apart(graph)
        for name, why in self.others.items():
            told = self._untranslated(name)
            if told:
                yield f"{told} (layer {name!r} is translated: {why})"
        for name in graph.captured.outputs:
            output = graph.named[name]
            for node in graph.cone(output, is_whole=False):
                # Where the gradient of an output that has none would end makes no difference.
                if output in graph.carrying or not is_cut(node):
                    yield from filter(None, [graph.untranslated(node, "", self._alike)])

    def run(
        self, program: Any, mesh: LayerMesh, name: str, sources: Mapping[int, Tensor], others: Mapping[str, Tensor]
    ) -> Tensor:
        """Return a layer's output.

        Args:
            program: Program of the rank, for training or for evaluation.
            mesh: Mesh of the layer.
            name: Name of the layer.
            sources: Its inputs in their producers' layouts, by the number of the read.
            others: Additional inputs, by the layers that write them.
        """
        return _Run(self.layers[name][program.trains], self.plan.graph, program, mesh, sources, others).written()

    def update(self, program: Any, mesh: LayerMesh, results: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Yield the values of buffers after a call, by name, where they are computed from layers' outputs.

        Args:
            program: Program of the rank.
            mesh: A mesh on which every rank has the whole tensor.
            results: Outputs of the layers of `updated`.
        """
        for name, (_, layer_splits) in self.updates[program.trains].items():
            if layer_splits is not None:
                others = {layer: detached(x) for layer, x in results.items()}
                yield name, detached(_Run(layer_splits, self.plan.graph, program, mesh, {}, others).written())

    def returned(self, program: Any, mesh: LayerMesh, number: int, results: Mapping[str, Tensor]) -> Tensor:
        """Return an output of the module, replicated, as its own nodes compute it from a layer's output.

        Args:
            program: Program of the rank.
            mesh: A mesh on which every rank has the whole tensor.
            number: Number of the output.
            results: Outputs of layers, by name.
        """
        return _Run(self._moved[program.trains][number], self.plan.graph, program, mesh, {}, results).written()

    def part(self, layers: Collection[str], *, trains: bool, is_fixed: bool, device: object) -> Part:
        """Return the graph that computes the values that layers read and that are known before any layer.

        Args:
            layers: Names of the layers.
            trains: Whether it is for training.
            is_fixed: Whether to compute the values that only change with buffers, or the others.
            device: Device to run it on.
        """
        if not self.graphs:
            return Part(graph=lambda: (), inputs=(), state=(), names=(), draws=False)
        graph = self.graphs[trains]
        nodes = [node for name, found in self.layers.items() if name in layers for node in found[trains].known]
        for node, layer_splits in self.updates[trains].values():
            nodes += [node] if layer_splits is None else layer_splits.known
        for layer_splits in self._moved[trains].values():
            nodes += layer_splits.known
        wanted = [node for node in dict.fromkeys(nodes) if (node in graph.fixed) == is_fixed]
        return graph.part(wanted, device)


def _computed_apart(graph: AtenGraph) -> Iterator[str]:
    """Yield what gives several tensors with gradients, which several layers compute.

    A normalisation that a backward pass reads statistics of is such: PyTorch's own gradient of these is that of all
    results together.
    """
    readers: dict[fx.Node, set[str]] = {}
    for layer, target in graph.targets.items():
        for node in graph.cone(target):
            schema, values = getattr(node.target, "_schema", None), node.meta["val"]
            has_several = schema is not None and len(schema.returns) > 1
            if has_several and sum(x is not None and has_gradient(x) for x in values) > 1:
                readers.setdefault(node, set()).add(layer)
    for node, layers in readers.items():
        if len(layers) > 1:
            yield f"the forward pass computes gradients through {at(node)}, of which layers would compute parts"


def _whole(graph: AtenGraph, node: fx.Node) -> LayerSplits:
    """Return the splits of a node that no layer writes, computed replicated from layers' outputs."""
    return LayerSplits(
        graph,
        AtenLayer(operator=None, splits={}, pins={}, target=node, written=None, is_whole=True, orders=graph.orders),
    )


def _splits(layer: LayerPlan) -> dict[str, int]:
    return {dim: parts for dim, parts in layer.splits.items() if parts > 1}


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


# -- a layer, run


class _Run:
    """Writes the nodes of a layer into the graph of a rank."""

    def __init__(
        self,
        layer_splits: LayerSplits,
        graph: Graph,
        program: Any,
        mesh: LayerMesh,
        sources: Mapping[int, Tensor],
        others: Mapping[str, Tensor],
    ) -> None:
        self._layer_splits, self._graph, self._layer = layer_splits, graph, layer_splits.layer
        self._program, self._mesh, self._sources, self._others = program, mesh, sources, others
        self._values: dict[fx.Node, Any] = {}
        self._reads: dict[int, Tensor] = {}

    def written(self) -> Tensor:
        """Return the layer's output, in the dims of its plan."""
        target = self._layer.target
        layout, wanted = self._layer_splits.of(target), self._layer_splits.wanted
        found = self._operand(target, self._of(target), layout, wanted)
        if self._layer.operator is None:
            return found
        found, written = self._as_written(found), self._layer.written
        if written is None:
            return found
        dims = tuple(dim for dim in written if dim.size != 1)
        return reshard(found, self._mesh, dims) if self._layer_splits.is_apart else self._as(found, dims)

    def _of(self, node: fx.Node) -> Any:
        """Return the tensor of a node, its dims flat; a list for one that gives several."""
        if node not in self._values:
            self._values[node] = self._made(node)
        return self._values[node]

    def _made(self, node: fx.Node) -> Any:
        layer = self._layer
        if node in layer.pins:
            return self._laid(self._read(layer.pins[node]), node)
        if node in self._layer_splits.graph.known:
            value = node.meta["val"]
            known = self._program.known(node.name, _flat(self._layer_splits.of(node)), is_index=not has_gradient(value))
            return replace(known, mesh=self._mesh)
        if node in self._layer_splits.others:
            other = self._others[self._layer_splits.graph.writers[node]]
            return self._laid(self._whole(other, node), node) if node in layer.orders else other
        if node.op == "placeholder":
            layer_name, tensor = self._layer_splits.graph.weights[node]
            operator = self._graph[layer_name]
            access = next(access for access in operator.parameters if access.tensor == tensor)
            return self._program.weight(
                self._mesh, weight_name(self._graph, operator, access), _flat(self._layer_splits.of(node))
            )
        if node.target is getitem:
            return self._of(node.args[0])[node.args[1]]
        rate = rate_of(node)
        if rate is None:
            return self._step(node)
        x = resolved(self._of(node.args[0]))
        return dropout(x, self._program.mask_key, rate=rate, of=self._layer_splits.graph.drop_name(node)) if rate else x

    def _laid(self, x: Tensor, node: fx.Node) -> Tensor:
        """Return a layer's output, on this mesh, in the layout of its node."""
        layer = self._layer
        if layer.laid(node, x.dims) is None:
            x = self._whole(x, node)
        if node in layer.orders:
            factors, dims = layer.factors(node, x.dims), layer.ordered(node, x.dims)
            assert factors is not None
            assert dims is not None
            x = arrange(self._as(x, _flat(factors)), dims)
        return self._as(x, _flat(self._layer_splits.of(node)))

    def _as_written(self, x: Tensor) -> Tensor:
        """Return the result of the layer's node in the layout of the layer's output."""
        layer, node = self._layer, self._layer.target
        if node not in layer.orders:
            return x
        found = layer.by_factor(node, x.dims)
        if found is None:
            x = self._whole(x, node)
            found = layer.by_factor(node, x.dims)
        assert found is not None
        x = self._as(x, _flat(found))
        dims: dict[int, tuple[Dim, ...]] = {}
        for factor, own in zip(flat_factors(layer.orders[node]), found, strict=True):
            if factor.base is not None:
                dims[factor.base] = own
            for dim in own if factor.base is None else ():
                # Repeated points are equal.
                place = x.dims.index(dim)
                x = local(partial(_first, place=place), [x], [other for other in x.dims if other != dim])
        return arrange(x, [dim for _, own in sorted(dims.items()) for dim in own])

    def _whole(self, x: Tensor, node: fx.Node) -> Tensor:
        return reshard(x, self._mesh, [Dim(f"{node.name}:{i}", dim.size) for i, dim in enumerate(x.dims)])

    def _read(self, number: int) -> Tensor:
        if number not in self._reads:
            operator, dims = self._layer.operator, self._layer.read(number)
            assert operator is not None
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
        rule, found = self._layer_splits.step(node)
        # An operand added once to a sum is added when its addends are reduced, or, if the operator needs it, on one
        # rank only.
        added, once = self._layer_splits.added(node), set(rule.once) if found.sums else set()
        operands = [
            self._operand(x, self._of(x), self._layer_splits.of(x), need)
            for x, need in zip(tensors, found.operands, strict=True)
        ]
        if self._program.low and operator_name(node) in _IN_FLOAT32:
            operands = [in_float32(x) for x in operands]
        shards = {
            i: self._shard(spread(x, self._layer_splits.spreads[node, i] - {*x.names}), found.operands[i])
            for i, x in enumerate(operands)
            if i not in added
        }
        if any(mesh.point.get(axis, 0) for axis in found.sums):
            shards |= {i: (self._program.of(shards[i]) * 0.0).node for i in once - added}
        numbers = count()
        args, kwargs = fx.map_arg(self._with_sizes(node, rule, found), lambda _: shards.get(next(numbers)))
        target = node.target
        if added and target in WITHOUT_ADDEND:
            target, args = WITHOUT_ADDEND[target], args[1:]
        if is_random(node):
            number = self._layer_splits.graph.numbers[node]
            made = self._program.call(seeded(target, number), (self._program.draw_key.node, *args), kwargs)
        else:
            made = self._program.call(target, args, kwargs)
        if rule.is_mean and found.sums:
            points = [dim for factor in rule.sums for dim in found.factors[factor]]
            made = made * (prod(map(mesh.part, points)) / prod(dim.size for dim in points))
        values = node.meta["val"]
        is_one = hasattr(values, "shape")
        given = [(values, made)] if is_one else [(x, made[i]) for i, x in enumerate(values) if x is not None]
        results = []
        for i, ((value, shard), dims) in enumerate(zip(given, found.results, strict=True)):
            flat = _flat(dims)
            shard = shaped(shard, self._local(dims), tuple(map(mesh.part, flat)))
            partial = found.sums if i in rule.summed else frozenset[str]()
            x = Tensor(value=shard, mesh=mesh, dims=flat, partial=partial, is_index=not has_gradient(value))
            for number in added:
                x = self._plus(x, operands[number], rule.operands[number], rule.results[i], found)
            results.append(x)
        return results[0] if is_one else in_places(node, results)

    def _shard(self, x: Tensor, dims: Dims) -> fx.Node:
        shard: fx.Node = shaped(x.value, x.shard, self._local(dims)).node
        return shard

    def _plus(self, x: Tensor, other: Tensor, given: RuleDims, made: RuleDims, found: Propagated) -> Tensor:
        """Add an operand that lacks some of a result's factors."""
        mesh, x = self._mesh, resolved(x)
        own, factors = ([factor for dim in dims for factor in dim] for dims in (given, made))
        assert own == [factor for factor in factors if factor in own], f"{own} are not in the order of {factors}"
        shape = [mesh.part(dim) if factor in own else 1 for factor in factors for dim in found.factors[factor]]
        value = spread(other, mesh.split(x.names) - {*other.names}).value.reshape(shape)
        value = called(as_low, value, x.value) if self._program.low else value
        return replace(x, value=x.value + value, spreads={})

    def _as(self, x: Tensor, dims: tuple[Dim, ...]) -> Tensor:
        """Return a tensor whose dims are renamed, or divided differently, equally on every rank."""
        if x.dims == dims:
            return x
        shape = tuple(map(self._mesh.part, dims))
        return replace(x, value=shaped(x.value, x.shard, shape), dims=dims, spreads={})

    def _brought(self, x: Tensor, have: Dims, need: Dims) -> Tensor:
        """Return an operand as a node needs it."""
        is_here = x.mesh is self._mesh and lies_alike(have, need, self._layer.splits)
        return self._as(x, _flat(need)) if is_here else reshard(x, self._mesh, _flat(need))

    def _operand(self, node: fx.Node, x: Tensor, have: Dims, need: Dims) -> Tensor:
        """Return an operand in the layout that a node needs.

        From values that every rank knows, or computes from only weights, each rank slices its part: the parts'
        gradients are all-reduced as those of the weights are.
        """
        mesh, dims, is_known = self._mesh, _flat(need), node in self._layer_splits.graph.known
        x = resolved(x)
        is_cut = mesh.split(dim.name for dim in dims) and not mesh.split(x.names)
        if not is_cut or x.mesh is not mesh or not (is_known or self._layer_splits.is_of_weights(node)):
            return self._brought(x, have, need)
        x = x if is_known else spread(x, [dim.name for dim in dims])
        value = x.value.reshape([dim.size for dim in dims])
        for place, dim in enumerate(dims):
            if mesh.part(dim) != dim.size:
                value = value.narrow(place, mesh.begin(dim), mesh.part(dim))
        return replace(x, value=value, dims=dims, spreads={})

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


def detached(x: Tensor) -> Tensor:
    """Return a tensor through which no gradient flows."""
    x = resolved(x)
    return replace(x, value=x.value.detach(), spreads={})


def _first(shard: Any, *, place: int) -> Any:
    return shard.select(place, 0)


def _flat(dims: Dims) -> tuple[Dim, ...]:
    return tuple(dim for own in dims for dim in own)
