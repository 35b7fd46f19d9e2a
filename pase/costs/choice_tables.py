"""The table of choices: what those of all layers of a graph, and its edges, cost and hold; and its search problem."""

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from pase.common.containers import FrozenDict
from pase.common.words import quantity, visible
from pase.costs.choices import (
    CRITERIA,
    CountedOnEdge,
    EdgeChoices,
    LayerChoices,
    Links,
    choices_of_layer,
    criteria_weights,
    edge_choices,
    elsewhere,
    kept_on_edge,
    once_a_step,
    ring_rows,
)
from pase.costs.edges import (
    BYTES_OF_COSTS,
    Allowance,
    KnownTransfers,
    between,
    edge_signatures,
    held_tables,
    hiding_layers,
    layer_signatures,
    traffic_of,
)
from pase.costs.memory import Keeping
from pase.costs.model import CostModel
from pase.costs.states import REPLICATED, ModeSpace
from pase.costs.traffic import LayerTraffic
from pase.graph import Edge, Graph, Operator
from pase.graph.operators import with_fan_outs
from pase.graph.operators.products import with_rings
from pase.graph.parts import Stage
from pase.sharding.edges import SharedWeight, table_edges
from pase.sharding.levels import PlacedAxes
from pase.sharding.shards import (
    FloatArray,
    IndexArray,
    enumerate_configurations,
)
from pase.tables.cost_tables import CostTables, EdgeTable, Hiding, joint_classes, restricted, restricted_edge


@dataclass(frozen=True, kw_only=True, eq=False)
class ChoiceTables:
    """The choices of every layer of a graph, and what they and its edges cost and hold.

    Attributes:
        graph: With fan-outs.
        num_devices: That it has.
        configurations: [V] the [K, D] splits.
        layers: [V]; equal layers share a value.
        ends: [E] (producer, consumer) by number.
        edges: [E]; equal ones share a value.
        hides: Whether communication can overlap at all.
        traffic: [V] of each layer under its configurations; () of tables that are parts of others.
    """

    graph: Graph
    num_devices: int
    configurations: tuple[IndexArray, ...]
    layers: tuple[LayerChoices, ...]
    ends: tuple[tuple[int, int], ...]
    edges: tuple[EdgeChoices, ...]
    hides: bool
    traffic: tuple[LayerTraffic, ...] = ()

    def splits(self, vertex: int, choice: int) -> dict[str, int]:
        """Return the split factor of each dim of a vertex under one of its choices."""
        row = self.configurations[vertex][self.layers[vertex].rows[choice]]
        return {dim: int(k) for dim, k in zip(self.graph.operators[vertex].extents, row, strict=True)}

    def weighed(self, weights: FloatArray, left: Mapping[int, IndexArray] = FrozenDict()) -> CostTables:
        """Return the problem of the weighted sum of all criteria.

        Args:
            weights: [criteria].
            left: [N] choices that distinct layers have, by identity; by default all.
        """
        numbers = {key: number for number, key in enumerate(dict.fromkeys(map(id, self.layers)))}
        costs = list[FloatArray]()
        for layer in {id(layer): layer for layer in self.layers}.values():
            own = np.maximum(layer.columns @ weights, 0.0)
            costs.append(own[left[id(layer)]] if left else own)
        edges: dict[tuple[int, int, int], int] = {}
        tables, ends, edge_table = list[EdgeTable](), list(self.ends), list[int]()
        for edge, (u, v) in zip(self.edges, self.ends, strict=True):
            key = id(edge), id(self.layers[u]), id(self.layers[v])
            if key not in edges:
                edges[key] = len(tables)
                among = (left[key[1]], left[key[2]]) if left else None
                tables.append(self._weighed_edge(edge, weights, among))
            edge_table.append(edges[key])
        for first, other in self._joins:
            # Parts of a graph that are not connected exchange nothing.
            rows, cols = (np.zeros(len(costs[numbers[id(self.layers[v])]]), dtype=np.int32) for v in (first, other))
            ends.append((first, other))
            edge_table.append(len(tables))
            tables.append(EdgeTable(row_class=rows, col_class=cols, values=np.zeros((1, 1))))
        return CostTables(
            vertex_names=tuple(operator.name for operator in self.graph.operators)
            if len(self.graph.operators) == len(self.layers)
            else tuple(map(str, range(len(self.layers)))),
            vertex_costs=tuple(costs),
            vertex_table=tuple(numbers[id(layer)] for layer in self.layers),
            edges=tuple(ends),
            edge_tables=tuple(tables),
            edge_table=tuple(edge_table),
        )

    @cached_property
    def _joins(self) -> list[tuple[int, int]]:
        """Pairs of layers that join the parts of the graph that no edge does."""
        part = list(range(len(self.layers)))

        def root(v: int) -> int:
            while part[v] != v:
                part[v] = part[part[v]]
                v = part[v]
            return v

        for u, v in self.ends:
            part[root(u)] = root(v)
        roots = sorted({root(v) for v in range(len(part))})
        return [(roots[0], other) for other in roots[1:]]

    def _weighed_edge(
        self, edge: EdgeChoices, weights: FloatArray, among: tuple[IndexArray, IndexArray] | None
    ) -> EdgeTable:
        price = weights[edge.criterion(hides=self.hides)]
        held = weights[CRITERIA.index("kept")]
        cost = edge.cost if among is None else restricted_edge(edge.cost, *among)
        if edge.kept is None or held == 0:
            return cost if price == 1 else replace(cost, values=price * cost.values)
        kept = edge.kept if among is None else restricted_edge(edge.kept, *among)
        row_class, rows, kept_rows = joint_classes(cost.row_class, kept.row_class)
        col_class, cols, kept_cols = joint_classes(cost.col_class, kept.col_class)
        # Weighed before they grow: these are the largest arrays of all.
        values = (price * cost.values).take(rows, axis=0).take(cols, axis=1)
        values += (held * kept.values).take(kept_cols, axis=1).take(kept_rows, axis=0)
        return EdgeTable(row_class=row_class, col_class=col_class, values=values)

    def holding(
        self,
        held: Sequence[tuple[FloatArray, FloatArray]],
        edges: Sequence[EdgeTable | None],
        known: dict[Hashable, Any],
    ) -> "ChoiceTables":
        """Return the tables with what choices have in memory in a turn.

        Args:
            held: [V] `Held.static` and `Held.kept` of layers.
            edges: [E] what is kept on edges; None for nothing.
            known: Layers and edges with what they hold, of which equal ones are one object; more are added.
        """
        layers = list[LayerChoices]()
        for layer, (static, kept) in zip(self.layers, held, strict=True):
            key: Hashable = id(layer), static.tobytes(), kept.tobytes()
            if key not in known:
                # The layer stays, so that no other one has its number.
                known[key] = layer, layer.holding(static, kept)
            layers.append(known[key][1])
        on_edges = list[EdgeChoices]()
        for edge, own in zip(self.edges, edges, strict=True):
            key = id(edge), id(own)
            if own is not edge.kept and key not in known:
                known[key] = edge, own, replace(edge, kept=own)
            on_edges.append(edge if own is edge.kept else known[key][-1])
        return replace(self, layers=tuple(layers), edges=tuple(on_edges))

    def restricted(self, kept: Mapping[int, IndexArray]) -> "ChoiceTables":
        """Return the tables in which some vertices have some choices alone, numbered by position in `kept`."""
        known: dict[tuple[int, ...], Any] = {}
        layers, edges = list(self.layers), list(self.edges)
        for vertex, own in kept.items():
            key: tuple[int, ...] = id(layers[vertex]), id(own)
            if key not in known:
                known[key] = layers[vertex].restricted(own)
            layers[vertex] = known[key]
        for number, (u, v) in enumerate(self.ends):
            if u in kept or v in kept:
                ends = kept.get(u), kept.get(v)
                key = id(edges[number]), *map(id, ends)
                if key not in known:
                    known[key] = edges[number].restricted(*ends)
                edges[number] = known[key]
        return replace(self, layers=tuple(layers), edges=tuple(edges))

    def of_one_stage(self, micro_batches: int) -> CostTables:
        """Return what a step of one stage costs at least by the choices of its layers.

        What streams in each micro-batch counts once, as if it overlapped in all but the last: a strategy of which it
        does costs no more.
        """
        tables = self.weighed(criteria_weights(repeated=micro_batches, streamed=1.0, once=1.0, summed=1.0))
        if not self.hides:
            return tables
        layers = {id(layer): layer.figures for layer in self.layers}
        # The last edges join parts of a graph that are not connected.
        is_weight = dict(zip(tables.edge_table, (edge.is_weight for edge in self.edges), strict=False))
        edge_tables = enumerate(tables.edge_tables)
        hiding = Hiding(
            hideable=tuple(own.streamed + own.summed for own in layers.values()),
            cover=tuple(own.cover for own in layers.values()),
            edges=tuple(table.values if is_weight.get(number) else None for number, table in edge_tables),
        )
        return replace(tables, hiding=hiding)


@dataclass(frozen=True, slots=True, eq=False)
class KnownChoices:
    """What tables of graphs under one cost model and one space of modes have in common; filled as they are made.

    numbers: Of signatures, which are long to compare.
    transfers: What costs of edges under other models follow from, too; None where there is one model. Of graphs under
        several models the numbers of all layers and edges are known, too.
    """

    numbers: dict[Hashable, int] = field(default_factory=dict)
    graphs: dict[tuple[int, str], tuple[Graph, tuple[int, ...]]] = field(default_factory=dict)
    traffic: dict[Hashable, LayerTraffic] = field(default_factory=dict)
    layers: dict[Hashable, LayerChoices] = field(default_factory=dict)
    edges: dict[Hashable, EdgeChoices] = field(default_factory=dict)
    transfers: KnownTransfers | None = None

    def for_another_model(self) -> "KnownChoices":
        """Return what tables under another cost model have in common with these."""
        return KnownChoices(numbers=self.numbers, graphs=self.graphs, traffic=self.traffic, transfers=self.transfers)

    def numbers_of_layers(self, graph: Graph) -> tuple[int, ...]:
        """Return numbers of the layers of a graph that are equal where signatures are."""
        return self._numbers(graph, "layers", lambda: layer_signatures(graph))

    def numbers_of_edges(self, graph: Graph) -> tuple[int, ...]:
        """Return numbers of the edges of a graph's tables that are equal where signatures are."""
        return self._numbers(graph, "edges", lambda: edge_signatures(graph, table_edges(graph)))

    def joined_edge(self, blocks: Sequence[Sequence[Hashable]]) -> EdgeChoices:
        """Return an edge by the keys of its blocks, [kinds of the producer][kinds of the consumer]."""
        if len(blocks) == len(blocks[0]) == 1:
            return self.edges[blocks[0][0]]
        key = tuple(map(tuple, blocks))
        if key not in self.edges:
            self.edges[key] = EdgeChoices.joined([[self.edges[block] for block in row] for row in blocks])
        return self.edges[key]

    def _numbers(self, graph: Graph, of: str, signatures: Callable[[], Iterable[Hashable]]) -> tuple[int, ...]:
        key = id(graph), of
        if key in self.graphs:
            return self.graphs[key][1]
        found = tuple(self.numbers.setdefault(own, len(self.numbers)) for own in signatures())
        if self.transfers is not None:
            self.graphs[key] = graph, found
        return found


@dataclass(frozen=True, slots=True, eq=False)
class CostedLayer:
    """What a layer can choose from.

    Attributes:
        choices: All of its choices.
        kinds: Choices and traffic of the layer as the graph has it and, if it is attention that has some choices as a
            ring, of it as a ring.
    """

    choices: LayerChoices
    kinds: tuple[tuple[LayerChoices, LayerTraffic], ...]

    @property
    def traffic(self) -> LayerTraffic:
        """Of all configurations of the layer as the graph has it."""
        return self.kinds[0][1]


def choices_of_layers(
    graph: Graph,
    num_devices: int,
    model: CostModel,
    space: ModeSpace,
    *,
    known: KnownChoices,
    fixed: frozenset[str] = frozenset(),
    only: Mapping[str, IndexArray] = FrozenDict(),
    links: Links = (None, None),
    hides: Sequence[tuple[bool, bool]] | None = None,
    among: frozenset[str] | None = None,
    micro_batches: int = 1,
    is_whole: bool = False,
    has_passes: bool = False,
    allowance: Allowance | None = None,
    axes: Mapping[str, PlacedAxes] = FrozenDict(),
    on_progress: Callable[[str, float], None] | None = None,
) -> list[CostedLayer]:
    """Return the choices of all layers of a graph with fan-outs, and the traffic of their configurations.

    Args:
        graph: Of one micro-batch; a stage of a pipeline, perhaps.
        num_devices: That the graph has.
        model: Of costs.
        space: Which modes there are.
        known: Of the same model and space.
        fixed: Layers that are not recomputed in any case.
        only: The configurations of some layers, [K, D] by name; of others, all.
        links: To the devices of the stages before and behind.
        hides: Of each layer as `hiding_layers` has it, of a larger graph perhaps; by default the graph's own.
        among: Of the layers by name those that are of interest, in the graph's order; by default all.
        micro_batches: Of a step, which sums gradients of weights once.
        is_whole: Whether choices that others beat stay.
        has_passes: Whether costs are told apart by passes.
        allowance: Of time and memory; TimeUpError or SolverError is raised beyond that.
        axes: Where the devices of layers with one configuration lie; of others, as suits them.
        on_progress: Called with what is being done and the fraction of it that is done.
    """
    allowance = allowance or Allowance()
    if not model.overlap:
        hides = ((False, False),) * len(graph.operators)
    hides = hiding_layers(graph) if hides is None else hides
    crossing = {(edge.consumer, edge.input) for edge in graph.received} if isinstance(graph, Stage) else set()
    leaving = {edge.producer for edge in graph.sent} if isinstance(graph, Stage) else set()
    told = {id(chosen): chosen.tobytes() for chosen in only.values()}

    def of_kind(
        graph: Graph, operator: Operator, number: int, hides: tuple[bool, bool], chosen: IndexArray | None
    ) -> tuple[LayerChoices, LayerTraffic]:
        """Return the choices of a layer, and the traffic of its configurations; chosen: these, None for all."""
        name = operator.name
        rows = None if chosen is None else told.get(id(chosen)) or chosen.tobytes()
        kind: Hashable = number, rows, axes.get(name)
        if kind not in known.traffic:
            splits = enumerate_configurations(operator, num_devices) if chosen is None else chosen
            what = f"the costs of the {len(splits):,} configurations of layer {visible(name)}"
            allowance.hold(splits.nbytes + BYTES_OF_COSTS * len(splits), what)
            traffic = replace(traffic_of(graph, operator, splits), axes=axes.get(name))
            known.traffic[kind] = once_a_step(traffic, micro_batches)
        own_space = space.of(name)
        may_repeat = own_space.recompute and name not in fixed
        is_stage = isinstance(graph, Stage)
        copies = tuple(elsewhere(graph, operator, i) for i in range(len(operator.reads))) if is_stage else ()
        key = (
            kind,
            hides,
            own_space.states,
            may_repeat,
            tuple((name, i) in crossing for i in range(len(operator.reads))) if crossing else (),
            name in leaving,
            copies,
            links if any(copies) or name in leaving or any(consumer == name for consumer, _ in crossing) else None,
        )
        if key not in known.layers:
            known.layers[key] = choices_of_layer(
                graph,
                operator,
                known.traffic[kind],
                model,
                replace(own_space, recompute=may_repeat),
                hides=hides,
                links=links,
                micro_batches=micro_batches,
                is_whole=is_whole,
                has_passes=has_passes,
            )
        return known.layers[key], known.traffic[kind]

    numbers = known.numbers_of_layers(graph)
    ringed, ring_numbers = graph, numbers
    if space.rings:
        ringed = with_rings(graph)
        ring_numbers = known.numbers_of_layers(ringed)
    layers = list[CostedLayer]()
    least: dict[int, float] = {}
    for v, operator in enumerate(graph.operators):
        if among is not None and operator.name not in among:
            continue
        kinds = [of_kind(graph, operator, numbers[v], hides[v], only.get(operator.name))]
        choices, traffic = kinds[0]
        ring = ringed.operators[v]
        rows = ring_rows(operator, ring, traffic.splits)
        if len(rows):
            kinds.append(of_kind(ringed, ring, ring_numbers[v], hides[v], traffic.splits.values[rows]))
            key = id(choices), id(kinds[1][0])
            if key not in known.layers:
                known.layers[key] = choices.with_rings(kinds[1][0], rows)
            choices = known.layers[key]
        if id(choices) not in least:
            # What streams or is summed may be hidden.
            least[id(choices)] = float((micro_batches * choices.figures.repeated + choices.figures.once).min())
        allowance.bound += least[id(choices)]
        allowance.check()
        layers.append(CostedLayer(choices, tuple(kinds)))
        if on_progress:
            on_progress("costing layers", len(layers) / len(graph.operators))
    return layers


def choice_tables(
    graph: Graph,
    num_devices: int,
    model: CostModel,
    space: ModeSpace,
    *,
    known: KnownChoices,
    keeps: Keeping | None = None,
    recomputes: bool | None = None,
    has_passes: bool = False,
    has_bytes: bool = False,
    allowance: Allowance | None = None,
    on_progress: Callable[[str, float], None] | None = None,
    **asked: Any,
) -> ChoiceTables:
    """Return the choices of all layers of a graph with fan-outs, and of its edges; arguments: `choices_of_layers`'s.

    keeps: what the graph saves for its backward pass; None where what edges keep is not asked for. recomputes:
    whether layers can be recomputed, of a larger graph perhaps; by default the graph's. has_bytes: whether what edges
    move is asked for. An edge of the tables is an edge of that graph, in its order, or a
    weight that two layers share, after them.
    """
    allowance = allowance or Allowance()
    layers = choices_of_layers(
        graph, num_devices, model, space, known=known, has_passes=has_passes,
        allowance=allowance, on_progress=on_progress, **asked,
    )  # fmt: skip
    if recomputes is None:
        recomputes = any(layer.choices.again.any() for layer in layers)
    ends = [(graph.index[edge.producer], graph.index[edge.consumer]) for edge in table_edges(graph)]
    # What a ring changes is what it reads: an edge is of the graph of its consumer's kind.
    graphs = (graph, with_rings(graph)) if any(len(layer.kinds) > 1 for layer in layers) else (graph,)
    numbers = [known.numbers_of_edges(own) for own in graphs]
    keys = list[list[list[Hashable]]]()
    unmade: dict[Hashable, _Block] = {}
    for position, (edge, (u, v)) in enumerate(zip(table_edges(graph), ends, strict=True)):
        kept_key: Hashable = None
        if keeps is not None:
            is_copied, is_weight = (edge.consumer, edge.input) in keeps.copies, isinstance(edge, SharedWeight)
            counted = CountedOnEdge() if is_weight or not recomputes else CountedOnEdge.of(graph, edge, keeps)
            kept_key = edge.output, edge.input, is_copied, counted
        blocks = list[list[Hashable]]()
        for u_choices, u_traffic in layers[u].kinds:
            blocks.append([])
            for kind, (v_choices, v_traffic) in enumerate(layers[v].kinds):
                number = numbers[kind][position]
                key = id(u_choices), id(v_choices), number, kept_key
                if key not in known.edges:
                    sides = (u_choices, v_choices), (u_traffic, v_traffic)
                    unmade.setdefault(key, _Block(graphs[kind], edge, number, *sides))
                blocks[-1].append(key)
        keys.append(blocks)
    # Sizes are known long before costs: what does not fit is refused before any edge is costed.
    every = [(block.graph, block.edge, block.traffic) for block in unmade.values()]
    tables = [] if known.transfers else held_tables(every, model, allowance)
    if on_progress and tables:
        on_progress(f"cost tables of {quantity(allowance.held_bytes, 'B')}", 0.0)
    for number, (name, block) in enumerate(unmade.items()):
        edge, is_weight = block.edge, isinstance(block.edge, SharedWeight)
        by_pass = None
        if has_passes or has_bytes or (block.choices[1].again.any() and not is_weight):
            own = tables[number] if tables else between(block.graph, edge, *block.traffic, model, allowance)
            table, forward, moved = own.costs()
            by_pass = forward, moved
        elif known.transfers:
            kind_and_ends = *map(id, block.traffic), block.number
            table = known.transfers.table(kind_and_ends, block.graph, edge, block.traffic, model, allowance)
        else:
            table = tables[number].total()
        kept = None
        if keeps is not None:
            kept = kept_on_edge(block.graph, edge, block.traffic, block.choices, keeps, recomputes=recomputes)
        known.edges[name] = edge_choices(table, by_pass, kept, block.choices, is_weight=is_weight)
        if on_progress:
            on_progress("costing edges", (number + 1) / len(unmade))
    return ChoiceTables(
        graph=graph,
        num_devices=num_devices,
        configurations=tuple(layer.traffic.splits.values for layer in layers),
        layers=tuple(layer.choices for layer in layers),
        ends=tuple(ends),
        edges=tuple(known.joined_edge(blocks) for blocks in keys),
        hides=model.overlap > 0,
        traffic=tuple(layer.traffic for layer in layers),
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Block:
    """An edge between choices of one kind of its producer and of one of its consumer.

    Attributes:
        graph: With operators of these kinds.
        edge: The edge.
        number: As `KnownChoices.numbers_of_edges` has it.
        choices: Of either end.
        traffic: Of either end.
    """

    graph: Graph
    edge: Edge
    number: int
    choices: tuple[LayerChoices, LayerChoices]
    traffic: tuple[LayerTraffic, LayerTraffic]


# -- the problem of a step of one stage


@dataclass(frozen=True, kw_only=True, eq=False)
class Problem:
    """The search problem of a step of one stage.

    A plain plan is such a step: one micro-batch, whose layers have one mode.

    Attributes:
        choices: The choices of its layers, what they cost and hold.
        tables: What these cost altogether.
        micro_batches: Of a step.
    """

    choices: ChoiceTables
    tables: CostTables
    micro_batches: int = 1

    @classmethod
    def of(cls, choices: ChoiceTables, micro_batches: int = 1) -> "Problem":
        """Return the problem of some tables."""
        return cls(choices=choices, tables=choices.of_one_stage(micro_batches), micro_batches=micro_batches)

    @property
    def graph(self) -> Graph:
        """Of one micro-batch, with a fan-out wherever one is needed (`with_fan_outs`)."""
        return self.choices.graph

    @property
    def num_devices(self) -> int:
        """That the graph has."""
        return self.choices.num_devices

    @property
    def configurations(self) -> tuple[IndexArray, ...]:
        """[V] the [K, D] splits."""
        return self.choices.configurations

    def splits(self, vertex: int, choice: int) -> dict[str, int]:
        """Return the split factor of each dim of a vertex under one of its choices."""
        return self.choices.splits(vertex, choice)

    def choice(
        self, vertex: int, splits: tuple[int, ...], state: str = REPLICATED, *, is_recomputed: bool = False
    ) -> int | None:
        """Return the choice of a vertex with a configuration and the nearest mode; None without the configuration."""
        layer = self.choices.layers[vertex]
        has_splits = (self.configurations[vertex] == np.array(splits)).all(axis=1)[layer.rows]
        if not has_splits.any():
            return None
        return int(np.where(has_splits, layer.nearness(state, is_recomputed=is_recomputed), -1).argmax())

    def strategy(self, splits: Iterable[Mapping[str, int]]) -> tuple[int, ...] | None:
        """Return the choices of all vertices with some configurations; None where one is not among them."""
        choice = []
        for vertex, factors in enumerate(splits):
            found = self.choice(vertex, tuple(factors.values()))
            if found is None:
                return None
            choice.append(found)
        return tuple(choice)

    def restricted(self, kept: Mapping[int, IndexArray]) -> "Problem":
        """Return the problem in which some vertices have some choices alone, numbered by position in `kept`."""
        return replace(self, choices=self.choices.restricted(kept), tables=restricted(self.tables, kept))


def build_problem(
    graph: Graph,
    num_devices: int,
    model: CostModel,
    on_progress: Callable[[str, float], None] | None = None,
    *,
    allowance: Allowance | None = None,
    only: Callable[[Graph, Operator], IndexArray] | None = None,
    known: KnownChoices | None = None,
) -> Problem:
    """Return the search problem of a plain plan (Eq. 1's t_l and r · t_x for every configuration).

    Args:
        graph: To be planned.
        num_devices: p.
        model: Of costs.
        on_progress: Called with what is being done and the fraction that is done.
        allowance: Of time and memory.
        only: Returns the configurations, [K, D], that are considered of each layer of the graph with fan-outs; None:
            every one.
        known: Of the same graph, devices and cost model.

    Raises:
        ConfigurationError: A layer has too many configurations.
        SolverError: Tables need more memory than is allowed.
        TimeUpError: They take longer.
    """
    graph = with_fan_outs(graph)
    tables = choice_tables(
        graph,
        num_devices,
        model,
        ModeSpace(),
        known=known or KnownChoices(),
        only={} if only is None else {operator.name: only(graph, operator) for operator in graph.operators},
        allowance=allowance,
        on_progress=on_progress,
    )
    return Problem.of(tables)
