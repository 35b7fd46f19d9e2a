"""What a strategy costs and holds: layer by layer, and as a whole a step of micro-batches, stages and modes."""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby, pairwise

import numpy as np

from pase.common.containers import FrozenDict
from pase.costs import (
    CostModel,
    LayerTraffic,
    Peak,
    cost_model,
    edge_layouts,
    memory_of_layers,
    transfer_bytes,
)
from pase.costs.choice_tables import ChoiceTables, KnownChoices, choice_tables
from pase.costs.choices import Links
from pase.costs.memory import keeping
from pase.costs.states import EVERY_MODE, STATES, ModeSpace
from pase.costs.step_memory import StrategyMemory, bytes_of_others
from pase.graph import Edge, Graph
from pase.graph.parts import stages
from pase.machine import Machine
from pase.planning.passes import Work, stage_times, step_of_passes_s
from pase.planning.placing import placed_axes, placed_by_cost
from pase.planning.plan import LayerPlan, Plan, Transfer, hidden_cost
from pase.planning.stage_problem import StageProblem, StageSums, together
from pase.planning.stages import group_links, in_flight, step_s, under_way
from pase.sharding.edges import table_edges
from pase.sharding.levels import PlacedAxes
from pase.sharding.placement import place
from pase.sharding.shards import IndexArray, IntArray


def plan_layers(
    graph: Graph,
    num_devices: int,
    model: CostModel,
    splits: Sequence[Mapping[str, int]],
    devices: Sequence[tuple[int, ...]] | None = None,
    *,
    group_sizes: Sequence[int] = (),
    by_hand: Mapping[str, tuple[int, ...]] = FrozenDict(),
    kept_bytes: Sequence[int] = (),
    as_placed: bool = False,
) -> tuple[LayerPlan, ...]:
    """Return the placed plan of every layer.

    Args:
        graph: With fan-outs.
        num_devices: In use.
        model: Of costs.
        splits: For each layer, a factor for each iteration dim.
        devices: For each layer, the device of each part; placed anew where they are not given.
        group_sizes: Consecutive devices that are to have little to exchange with others where layers are placed: those
            of a node.
        by_hand: Devices of some layers, by name, next to which the others are placed.
        kept_bytes: [V] what each layer has in memory at the peak; 0 by default.
        as_placed: Whether communication is costed between these devices; else each layer's axes lie over the levels of
            the machine as suits it, and each edge has the best assignment, as in a search.
    """
    axes = {}
    if as_placed:
        assert devices is not None
        placed = zip(graph.operators, splits, devices, strict=True)
        axes = {operator.name: placed_axes(split, where) for operator, split, where in placed}
    rows = _rows(graph, splits)
    tables = choice_tables(
        graph, num_devices, model, ModeSpace(), known=KnownChoices(), only=rows, axes=axes, has_bytes=not as_placed
    )
    if devices is None:
        devices = place_layers(tables, (0,) * len(splits), model, group_sizes=group_sizes, by_hand=by_hand)
    return tuple(layer_plans(tables, (0,) * len(splits), devices, kept_bytes=kept_bytes))


def plan_layers_beside(
    graph: Graph,
    num_devices: int,
    model: CostModel,
    splits: Sequence[Mapping[str, int]],
    devices: Sequence[tuple[int, ...]],
    other: Sequence[Mapping[str, int]],
    *,
    kept_bytes: Sequence[int] = (),
) -> tuple[tuple[LayerPlan, ...], float]:
    """Return the plan of every layer, as `plan_layers` does, and what another strategy costs.

    other: the splits of its layers. The costs of both are worked out together.
    """
    rows = _rows(graph, splits, other)
    tables = choice_tables(graph, num_devices, model, ModeSpace(), known=KnownChoices(), only=rows, has_bytes=True)
    layers = layer_plans(tables, (0,) * len(splits), devices, kept_bytes=kept_bytes)
    # Where both are alike a layer has one configuration.
    beside = [len(configurations) - 1 for configurations in tables.configurations]
    return tuple(layers), tables.of_one_stage(1).evaluate(beside)


def _rows(graph: Graph, *strategies: Sequence[Mapping[str, int]]) -> dict[str, IndexArray]:
    """Return the configurations that a layer has in some strategies, in their order, [K, D] by name.

    Equal configurations count once, and equal arrays are one.
    """
    known: dict[tuple[tuple[int, ...], ...], IndexArray] = {}
    found = {}
    for operator, *splits in zip(graph.operators, *strategies, strict=True):
        rows = tuple(dict.fromkeys(tuple(split[dim] for dim in operator.extents) for split in splits))
        if rows not in known:
            known[rows] = np.array(rows, dtype=np.int32)
        found[operator.name] = known[rows]
    return found


def layer_plans(
    tables: ChoiceTables,
    choice: Sequence[int],
    devices: Sequence[tuple[int, ...]],
    *,
    micro_batches: int = 1,
    kept_bytes: Sequence[int] = (),
) -> list[LayerPlan]:
    """Return the plans of layers as tables have their costs.

    Args:
        tables: Of a graph, or of a stage.
        choice: [V] of each layer.
        devices: [V] of the parts of each layer.
        micro_batches: Of a step.
        kept_bytes: [V] what each layer has in memory at the peak; 0 by default.
    """
    graph, m = tables.graph, micro_batches
    has_modes = any(tables.layers[v].state[c] or tables.layers[v].again[c] for v, c in enumerate(choice))
    overlaps = tables.hides and m == 1 and not has_modes
    into: list[list[int]] = [[] for _ in choice]
    for number, (_, v) in enumerate(tables.ends):
        into[v].append(number)
    edges = table_edges(graph)
    known: dict[Hashable, Transfer] = {}
    layers = []
    for v, (operator, c) in enumerate(zip(graph.operators, choice, strict=True)):
        modes, splits = tables.layers[v], tables.splits(v, c)
        own = modes.figures
        streamed, summed = m * float(own.streamed[c]), float(own.summed[c])
        total = m * float(own.repeated[c]) + streamed + float(own.once[c]) + summed
        compute = min(m * float(own.compute[c]), total)
        transfers, shared_cost = [], 0.0
        for number in into[v]:
            edge, costs, u = edges[number], tables.edges[number], tables.ends[number][0]
            key = id(costs), id(tables.layers[u]), choice[u], id(modes), c
            if key not in known:
                known[key] = edge_transfer(tables, number, (choice[u], c), m)
            like = known[key]
            transfers.append(
                Transfer(
                    producer=edge.producer,
                    input=edge.input,
                    cost=like.cost,
                    forward_bytes=like.forward_bytes,
                    backward_bytes=like.backward_bytes,
                )
            )
            if costs.is_weight:
                shared_cost += like.cost
        layers.append(
            LayerPlan(
                name=operator.name,
                kind=operator.kind,
                dims=operator.extents,
                splits=splits,
                devices=devices[v],
                layer_cost=total,
                compute_cost=compute,
                communication_cost=total - compute,
                memory_bytes=kept_bytes[v] if kept_bytes else 0,
                transfers=tuple(transfers),
                # Of a step in parts what overlaps is no sum over layers.
                hideable_cost=streamed + summed + shared_cost if overlaps else None,
                cover_cost=float(own.cover[c]) if overlaps else None,
                state=STATES[modes.state[c]],
                is_recomputed=bool(modes.again[c]),
            )
        )
    return layers


def edge_transfer(tables: ChoiceTables, number: int, choices: tuple[int, int], micro_batches: int) -> Transfer:
    """Return what is transferred over an edge of tables in a step; choices: of its producer and of its consumer."""
    edge, own, ends = table_edges(tables.graph)[number], tables.edges[number], tables.ends[number]
    moved, at = own.moved, (own.cost.row_class[choices[0]], own.cost.col_class[choices[1]])
    cost = micro_batches * float(own.cost.values[at])
    if moved is None:
        rows = (
            tables.configurations[end][tables.layers[end].rows[choice]][None, :]
            for end, choice in zip(ends, choices, strict=True)
        )
        moved, at = transfer_bytes(tables.graph, edge, *edge_layouts(tables.graph, edge, *rows)), (0, 0)
    return Transfer(
        producer=edge.producer,
        input=edge.input,
        cost=cost,
        forward_bytes=micro_batches * float(moved.forward[at]),
        backward_bytes=micro_batches * float(moved.backward[at]),
    )


def place_layers(
    tables: ChoiceTables,
    choice: Sequence[int],
    model: CostModel,
    *,
    group_sizes: Sequence[int] = (),
    by_hand: Mapping[str, tuple[int, ...]] = FrozenDict(),
) -> tuple[tuple[int, ...], ...]:
    """Return, for each layer, the device of each part: where most stays, and then where a step is cheapest.

    Args:
        tables: That layers have their costs of.
        choice: [V] of each layer.
        model: Of costs.
        group_sizes: As for `plan_layers`.
        by_hand: As for `plan_layers`.
    """
    graph = tables.graph
    splits = [tables.splits(v, c) for v, c in enumerate(choice)]
    by_number = {graph.index[name]: parts for name, parts in by_hand.items()}
    devices = place(graph, tables.num_devices, splits, group_sizes=group_sizes, by_level=model.sums_by_level)
    devices = _placed_by_hand(devices, by_number)
    traffic: dict[Hashable, LayerTraffic] = {}
    kinds = []
    for v, c in enumerate(choice):
        row = int(tables.layers[v].rows[c])
        kind = id(tables.traffic[v]), row
        if kind not in traffic:
            traffic[kind] = tables.traffic[v].under(row)
        kinds.append(kind)
    assumed = []
    for edge, (u, v) in zip(tables.edges, tables.ends, strict=True):
        # What a layer that is recomputed reads is moved once more, wherever it is placed.
        is_again = bool(tables.layers[v].again[choice[v]])
        assumed.append(None if is_again else edge.cost.cost(choice[u], choice[v]))
    by_layer = [traffic[kind] for kind in kinds]
    return placed_by_cost(graph, model, splits, by_layer, kinds, devices, by_number, assumed=assumed)


def _placed_by_hand(
    placed: Sequence[tuple[int, ...]], by_hand: Mapping[int, tuple[int, ...]]
) -> tuple[tuple[int, ...], ...]:
    """Return a placement with other devices for some layers; all are renamed for the first, so that as much stays."""
    if not by_hand:
        return tuple(placed)
    first = min(by_hand)
    renamed = dict(zip(placed[first], by_hand[first], strict=True))
    return tuple(by_hand.get(v, tuple(renamed[device] for device in row)) for v, row in enumerate(placed))


def placed_cost_of(plan: Plan) -> float:
    """Return what a step costs between the devices that a plan places its layers on."""
    if plan.has_parts:
        return TrainingStep.of(plan, as_placed=True).cost
    model = cost_model(plan.cost_model, plan.machine, plan.num_devices, plan.precision)
    splits, devices = [layer.splits for layer in plan], [layer.devices for layer in plan]
    return total_cost(plan_layers(plan.graph, plan.num_devices, model, splits, devices, as_placed=True))


def total_cost(layers: Sequence[LayerPlan]) -> float:
    """Return F(G, φ) (Eq. 1): all layer costs and all transfer costs, less what is hidden of them."""
    return sum(layer.layer_cost + layer.transfer_cost for layer in layers) - hidden_cost(layers)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerChoice:
    """One layer's part of the strategy of a step; fields as those of `LayerPlan`."""

    splits: Mapping[str, int]
    state: str
    is_recomputed: bool
    stage: int


def chosen_layer(tables: ChoiceTables, vertex: int, choice: int, stage: int = 0) -> LayerChoice:
    """Return what a layer has under one of its choices."""
    layer = tables.layers[vertex]
    return LayerChoice(
        splits=tables.splits(vertex, choice),
        state=STATES[layer.state[choice]],
        is_recomputed=bool(layer.again[choice]),
        stage=stage,
    )


def chosen_layers(tables: ChoiceTables, choice: Sequence[int]) -> tuple[LayerChoice, ...]:
    """Return the strategy of a step of one stage, by [V] choices in its tables."""
    return tuple(chosen_layer(tables, v, c) for v, c in enumerate(choice))


@dataclass(frozen=True, kw_only=True)
class TrainingStep:
    """The strategy of a step.

    graph: of one micro-batch, with cuts. schedule: "" with one stage. layers: [V]. chunks: stages of each group of
    devices, which the groups have in turns. devices: [V] of the parts of each layer, between which communication is
    costed; None: as suits each layer and edge, as in a search.
    """

    graph: Graph
    num_devices: int
    machine: Machine
    cost_model: str
    optimiser: str
    micro_batches: int
    schedule: str
    layers: tuple[LayerChoice, ...]
    chunks: int = 1
    devices: tuple[tuple[int, ...], ...] | None = None

    @classmethod
    def of(cls, plan: Plan, *, as_placed: bool = False) -> "TrainingStep":
        """Return the strategy of a plan; as_placed: costed between the plan's devices."""
        return cls(
            graph=plan.graph,
            num_devices=plan.num_devices,
            machine=plan.machine,
            cost_model=plan.cost_model,
            optimiser=plan.optimiser,
            micro_batches=plan.micro_batches,
            schedule=plan.schedule,
            layers=tuple(
                LayerChoice(
                    splits=layer.splits, state=layer.state, is_recomputed=layer.is_recomputed, stage=layer.stage
                )
                for layer in plan
            ),
            chunks=plan.num_stages // plan.num_groups,
            devices=tuple(layer.devices for layer in plan) if as_placed else None,
        )

    @cached_property
    def bounds(self) -> tuple[tuple[int, int], ...]:
        """Of each stage, the first layer and the one behind the last."""
        runs = [len(list(run)) for _, run in groupby(self.layers, key=lambda layer: layer.stage)]
        beyond = np.cumsum(runs).tolist()
        return tuple(zip([0, *beyond[:-1]], beyond, strict=True))

    @property
    def is_plain(self) -> bool:
        """Whether it is a strategy alone: one stage and micro-batch, weights whole, nothing recomputed."""
        has_modes = any(layer.state != STATES[0] or layer.is_recomputed for layer in self.layers)
        return self.micro_batches == len(self.bounds) == 1 and not has_modes

    @property
    def num_groups(self) -> int:
        """How many groups of devices there are."""
        return len(self.bounds) // self.chunks if self.schedule else 1

    @property
    def group(self) -> int:
        """How many devices a stage has."""
        return self.num_devices // self.num_groups

    @cached_property
    def links(self) -> tuple[Links, ...]:
        """Of each stage those to the stages before and behind."""
        return tuple(pairwise(group_links(self.machine, self.num_devices, self.num_groups, self.chunks)))

    @cached_property
    def stages(self) -> tuple[Graph, ...]:
        """The stages."""
        return stages(self.graph, [first for first, _ in self.bounds[1:]])

    @cached_property
    def problems(self) -> tuple[tuple[StageProblem, tuple[int, ...]], ...]:
        """Each stage with the one configuration of each layer, in all modes, and which of these each layer has."""
        model = cost_model(self.cost_model, self.machine, self.group, self.graph.precision)
        known, found = KnownChoices(), []
        for number, (graph, (first, beyond)) in enumerate(zip(self.stages, self.bounds, strict=True)):
            layers = self.layers[first:beyond]
            rows = _rows(graph, [layer.splits for layer in layers])
            tables = choice_tables(
                graph,
                self.group,
                model,
                EVERY_MODE,
                known=known,
                only=rows,
                links=self.links[number],
                micro_batches=self.micro_batches,
                is_whole=True,
                has_passes=True,
                axes=self._axes(number),
            )
            choice = []
            for modes, layer in zip(tables.layers, layers, strict=True):
                choice.append(int(modes.nearness(layer.state, is_recomputed=layer.is_recomputed).argmax()))
            problem = StageProblem(tables=tables, weight=1.0, in_flight=1, limit_bytes=np.inf)
            found.append((problem, tuple(choice)))
        return tuple(found)

    def _axes(self, number: int) -> Mapping[str, PlacedAxes]:
        """Return where the layers of a stage lie, by name, their devices counted from the first of its group."""
        if self.devices is None:
            return {}
        first, start = self.bounds[number][0], number % self.num_groups * self.group
        found = {}
        for at, operator in enumerate(self.stages[number].operators, start=first):
            own = tuple(device - start for device in self.devices[at])
            found[operator.name] = placed_axes(self.layers[at].splits, own)
        return found

    def in_flight(self, number: int) -> int:
        """Return how many micro-batches are under way on a stage, at most."""
        return int(self.under_way[number % self.num_groups][:, number // self.num_groups].max())

    @cached_property
    def under_way(self) -> tuple[IntArray, ...]:
        """Of each group [moments, chunks] of how many micro-batches are under way."""
        groups, m = range(self.num_groups), self.micro_batches
        if self.chunks == 1:
            return tuple(np.array([[in_flight(self.schedule, len(groups), group, m)]]) for group in groups)
        asked = {"num_groups": len(groups), "num_stages": len(self.bounds), "micro_batches": m}
        return tuple(under_way(self.schedule, group=group, **asked) for group in groups)

    @cached_property
    def sums(self) -> tuple[StageSums, ...]:
        """What each stage takes."""
        return tuple(problem.sums(choice) for problem, choice in self.problems)

    @cached_property
    def cost(self) -> float:
        """How long the step takes."""
        return self.cost_of(self.sums)

    def cost_of(self, sums: Sequence[StageSums]) -> float:
        """Return how long the step takes where stages take [S] other sums.

        Stages in turns take what their order of passes does, since no closed form holds where they are not alike. What
        other sums take more or less is of the backward pass.
        """
        if self.chunks > 1:
            times_s = []
            for times, own, other in zip(self._pass_times, self.sums, sums, strict=True):
                backward = max(0.0, times[Work.BACKWARD] + other.micro_batch - own.micro_batch)
                times_s.append({**times, Work.BACKWARD: backward, Work.ONCE: other.step})
            shape = {"num_groups": self.num_groups, "micro_batches": self.micro_batches}
            return step_of_passes_s(self.schedule, times_s, **shape)
        groups = [self._of_group(group, sums) for group in range(self.num_groups)]
        often, once = [own.micro_batch for own in groups], [own.step for own in groups]
        return step_s(often, once, self.micro_batches)

    @cached_property
    def _pass_times(self) -> tuple[Mapping[Work, float], ...]:
        """What each work of a stage takes."""
        return tuple(stage_times(problem, choice) for problem, choice in self.problems)

    def _of_group(self, group: int, sums: Sequence[StageSums]) -> StageSums:
        """Return what the stages of a group take together."""
        return StageSums(*together(np.array(sums[group :: self.num_groups]), self.under_way[group]).tolist())

    def memory_of_stage(self, number: int) -> StrategyMemory:
        """Return what is in the memory of the devices of a stage."""
        first, beyond = self.bounds[number]
        return memory_of_layers(
            self.stages[number],
            self.layers[first:beyond],
            optimiser=self.optimiser,
            micro_batches=self.micro_batches,
            in_flight=self.in_flight(number),
            keeps=keeping(self.graph),
        )

    def peak_of_stage(self, number: int) -> Peak:
        """Return the most that a device of a stage holds at once.

        With several stages in turns that is at most so much: what the others hold, at any time, is there beside it.
        """
        group, position = number % self.num_groups, number // self.num_groups
        own = [self.memory_of_stage(each) for each in range(group, len(self.bounds), self.num_groups)]
        peak, more = own[position].peak(), bytes_of_others(own, self.under_way[group])[position]
        return replace(peak, memory=replace(peak.memory, activations_bytes=peak.memory.activations_bytes + more))

    @cached_property
    def peaks(self) -> tuple[Peak, ...]:
        """The most that a device of each stage holds at once."""
        return tuple(map(self.peak_of_stage, range(len(self.bounds))))

    @property
    def kept_by_layer(self) -> tuple[int, ...]:
        """[V] what each layer has in memory at the peak of its stage, but for buffers."""
        return tuple(kept for peak in self.peaks for kept in peak.kept_by_layer)

    @property
    def fullest(self) -> int:
        """The group whose devices need most memory."""
        sizes = [peak.bytes for peak in self.peaks]
        return sizes.index(max(sizes)) % self.num_groups

    @property
    def peak(self) -> Peak:
        """The most that a device holds at once, of the stage whose devices hold most."""
        return max(self.peaks, key=lambda peak: peak.bytes)

    def plans(
        self,
        devices: Sequence[tuple[int, ...]] | None = None,
        *,
        by_hand: Mapping[str, tuple[int, ...]] = FrozenDict(),
    ) -> tuple[LayerPlan, ...]:
        """Return the plan of every layer.

        Args:
            devices: Of each part, where they are given.
            by_hand: Devices of some layers, by name, counted from the first of the stage's group; the others are placed
                next to them.
        """
        model = cost_model(self.cost_model, self.machine, self.group, self.graph.precision)
        sizes = [level.num_devices for level in self.machine.levels_spanned(self.group)[:-1]]
        m, plans = self.micro_batches, list[LayerPlan]()
        for number, (graph, (problem, choice)) in enumerate(zip(self.stages, self.problems, strict=True)):
            first, beyond = self.bounds[number]
            layers, start = self.layers[first:beyond], number % self.num_groups * self.group
            if devices is None:
                own_by_hand = {name: row for name, row in by_hand.items() if name in graph.index}
                placed: Sequence[tuple[int, ...]] = place_layers(
                    problem.tables, choice, model, group_sizes=sizes, by_hand=own_by_hand
                )
            else:
                placed = [tuple(device - start for device in row) for row in devices[first:beyond]]
            kept = self.peaks[number].kept_by_layer
            found = layer_plans(problem.tables, choice, placed, micro_batches=m, kept_bytes=kept)
            if self.is_plain:
                return tuple(found)
            crossing = {edge.consumer: edge for edge in getattr(graph, "received", ())}
            for own, layer in zip(found, layers, strict=True):
                edge = crossing.get(own.name)
                handed = () if edge is None else (_handed_over(edge),)
                plans.append(
                    replace(
                        own,
                        devices=tuple(device + start for device in own.devices),
                        transfers=(*own.transfers, *handed),
                        hideable_cost=None,
                        cover_cost=None,
                        # As it was chosen: with one device for each part no state differs from another.
                        state=layer.state,
                        is_recomputed=layer.is_recomputed,
                        stage=layer.stage,
                    )
                )
        return tuple(plans)


def _handed_over(edge: Edge) -> Transfer:
    """Return the transfer of a tensor of the stage before, which costs nothing beside what its reader pays."""
    return Transfer(producer=edge.producer, input=edge.input, cost=0.0, forward_bytes=0.0, backward_bytes=0.0)


def peak_of(plan: Plan) -> Peak:
    """Return the most that a device holds at once."""
    return TrainingStep.of(plan).peak
