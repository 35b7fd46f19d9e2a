"""What a layer pays for, what else it could have, and the sentence that says why it does not.

A layer's cost is made of computing, of each kind of message inside it, and of each edge to another layer.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from math import prod
from types import MappingProxyType

from pase.analysis.explanation.alternatives import Alternative
from pase.analysis.explanation.constrained_search import TIE, Improvement
from pase.common.words import percent, quantity
from pase.costs import (
    CostModel,
    LayerTraffic,
    Pattern,
    Problem,
    edge_layouts,
    hiding_layers,
    traffic_of,
    transfer_bytes,
)
from pase.costs.traffic import sum_name
from pase.graph import Operator, Role
from pase.planning.constraints import splits_text
from pase.planning.plan import Plan
from pase.sharding.edges import table_edges
from pase.sharding.shards import data_parallel
from pase.tables.cost_tables import CostTables


class PartKind(StrEnum):
    """What a part of a layer's cost pays for."""

    COMPUTE = "compute"
    GRADIENTS = "gradient all-reduce"
    PARTIAL_SUMS = "partial sums"
    INPUT_GRADIENTS = "input-gradient sums"
    HALO = "halo"
    EXCHANGE = "exchange"
    RESHARD_FROM = "re-sharding from"
    RESHARD_TO = "re-sharding to"
    SHARED_WEIGHT = "weight shared with"


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One part of the cost that a layer has a say in: of its own layer cost, or of an edge on either side of it.

    other: the layer at the other end of an edge, or "". cost: in the unit of the plan's total. size_bytes: that a
    device sends or fetches in a step, before any collective's factor; 0 for computing. group: devices that take part
    in a collective; 0 where it is none. hideable: what of its cost is communication that can hide; cover: computation
    that others can hide behind; hidden: what of `hideable` is hidden in a strategy, where the part is of one.
    """

    kind: PartKind
    other: str = ""
    cost: float
    size_bytes: float = 0.0
    group: int = 0
    hideable: float = 0.0
    cover: float = 0.0
    hidden: float = 0.0

    @property
    def name(self) -> str:
        """Kind, with the layer at the other end."""
        return f"{self.kind} {self.other}".rstrip()

    @property
    def paid(self) -> float:
        """What of its cost is not hidden."""
        return self.cost - self.hidden


class CostParts:
    """Takes costs apart; what each configuration computes and sends is kept once it is known."""

    def __init__(self, problem: Problem, model: CostModel) -> None:
        self._problem = problem
        self._model = model
        self._incident = problem.tables.incident
        self._table_edges = table_edges(problem.graph)
        self._traffic: dict[tuple[int, int], LayerTraffic] = {}
        self._own: dict[tuple[int, int], tuple[Part, ...]] = {}
        self._bytes: dict[tuple[int, int, int], float] = {}
        self._hides = hiding_layers(problem.graph)

    def of(self, vertex: int, choice: Sequence[int]) -> tuple[Part, ...]:
        """Return the parts of a layer's cost under a strategy; their costs add up to its layer cost and its edges'.

        The dearest first, by what is paid.
        """
        share = self._problem.tables.hidden_share(choice)
        found = _merged([*self.own(vertex, choice[vertex]), *self._edges(vertex, choice)])
        return tuple(
            sorted((replace(part, hidden=share * part.hideable) for part in found), key=lambda part: -part.paid)
        )

    def rises(self, before: Sequence[int], after: Sequence[int]) -> tuple["Rise", ...]:
        """Return what one strategy costs more than another, part by part; the largest difference first.

        They add up to the difference of all layer and transfer costs. An edge's part is that of its consumer.
        """
        changed = [v for v, (b, a) in enumerate(zip(before, after, strict=True)) if b != a]
        found: dict[tuple[str, str], float] = {}
        for sign, choice in ((-1, before), (1, after)):
            parts = [(v, part) for v in changed for part in self.own(v, choice[v])]
            consumers = {self._problem.tables.edges[number][1] for v in changed for number in self._incident[v]}
            parts += [(v, part) for v in consumers for part in self._edges(v, choice, into=True)]
            for v, part in parts:
                key = self._problem.tables.vertex_names[v], part.name
                found[key] = found.get(key, 0.0) + sign * part.cost
        rises = [Rise(layer=layer, part=name, cost=cost) for (layer, name), cost in found.items() if cost]
        return tuple(sorted(rises, key=lambda rise: -abs(rise.cost)))

    def own(self, vertex: int, configuration: int) -> tuple[Part, ...]:
        """Return the parts of the layer cost t_l of one configuration."""
        key = self._problem.tables.vertex_table[vertex], configuration  # repeated layers share it
        if key not in self._own:
            self._own[key] = own_parts(
                self._problem.graph.operators[vertex],
                self._traffic_of(vertex, configuration),
                self._model,
                hides=self._hides[vertex],
            )
        return self._own[key]

    def _edges(self, vertex: int, choice: Sequence[int], *, into: bool = False) -> list[Part]:
        """Return the parts of a vertex's edges; into: of those to it alone."""
        tables, graph = self._problem.tables, self._problem.graph
        found = []
        for number in self._incident[vertex]:
            if number >= len(self._table_edges):
                continue  # a tie, which costs nothing
            u, v = tables.edges[number]
            if into and v != vertex:
                continue
            cost = tables.edge(number).cost(choice[u], choice[v])
            other = tables.vertex_names[u if v == vertex else v]
            if number >= len(graph.edges):
                kind = PartKind.SHARED_WEIGHT
            else:
                kind = PartKind.RESHARD_FROM if v == vertex else PartKind.RESHARD_TO
            size = self._moved_bytes(number, choice[u], choice[v]) if cost else 0.0
            hideable = cost if kind is PartKind.SHARED_WEIGHT and tables.hiding is not None else 0.0
            found.append(Part(kind=kind, other=other, cost=cost, size_bytes=size, hideable=hideable))
        return found

    def _moved_bytes(self, number: int, from_row: int, to_row: int) -> float:
        """Return the bytes that the device which fetches most fetches on an edge, both ways together."""
        key = self._problem.tables.edge_table[number], from_row, to_row
        if key not in self._bytes:
            graph = self._problem.graph
            u, v = self._problem.tables.edges[number]
            sides = self._traffic_of(u, from_row), self._traffic_of(v, to_row)
            edge = self._table_edges[number]
            layouts = edge_layouts(graph, edge, sides[0].splits.values, sides[1].splits.values)
            moved = transfer_bytes(graph, edge, *layouts)
            self._bytes[key] = float(moved.forward[0, 0] + moved.backward[0, 0])
        return self._bytes[key]

    def _traffic_of(self, vertex: int, configuration: int) -> LayerTraffic:
        key = self._problem.tables.vertex_table[vertex], configuration
        if key not in self._traffic:
            row = self._problem.configurations[vertex][configuration : configuration + 1]
            graph = self._problem.graph
            self._traffic[key] = traffic_of(graph, graph.operators[vertex], row)
        return self._traffic[key]


def own_parts(
    operator: Operator, traffic: LayerTraffic, model: CostModel, *, hides: tuple[bool, bool] = (False, False)
) -> tuple[Part, ...]:
    """Return the parts of the layer cost t_l of a layer of one configuration, the dearest first.

    hides: whether its sums of weights' gradients can hide, and whether it can hide others' (`hiding_layers`).
    """
    can_hide, covers = (bool(model.overlap) and one for one in hides)
    # What each sum inside a layer is of, by its name.
    kinds = {sum_name(access.tensor, is_gradient=False): PartKind.PARTIAL_SUMS for access in operator.writes}
    for access in operator.reads:
        is_weight = access.role is Role.PARAMETER
        name = sum_name(access.tensor, is_gradient=True)
        kinds[name] = PartKind.GRADIENTS if is_weight else PartKind.INPUT_GRADIENTS
    forward, backward = (float(model.work(work)[0]) for work in (traffic.forward, traffic.backward))
    parts = [Part(kind=PartKind.COMPUTE, cost=forward + backward, cover=model.overlap * backward * covers)]
    for message, cost in zip(traffic.messages, model.messages(traffic), strict=True):
        is_sum = message.pattern is Pattern.ALL_REDUCE
        exchanged = PartKind.HALO if message.pattern is Pattern.HALO else PartKind.EXCHANGE
        parts.append(
            Part(
                kind=kinds.get(message.tensor, PartKind.EXCHANGE) if is_sum else exchanged,
                cost=float(cost[0]),
                size_bytes=message.times * float(message.size_bytes[0]),
                group=int(message.group[0]) if is_sum else 0,
                hideable=float(cost[0]) if can_hide and message.is_of_weight else 0.0,
            )
        )
    return _merged(parts)


def _merged(parts: Iterable[Part]) -> tuple[Part, ...]:
    """Return one part for each kind and other end, those of no cost left out, the dearest first."""
    found: dict[tuple[PartKind, str], Part] = {}
    for part in parts:
        key = part.kind, part.other
        before = found.get(key)
        if before is not None:
            part = replace(
                before,
                cost=before.cost + part.cost,
                size_bytes=before.size_bytes + part.size_bytes,
                group=max(before.group, part.group),
                hideable=before.hideable + part.hideable,
                cover=before.cover + part.cover,
            )
        found[key] = part
    return tuple(sorted((part for part in found.values() if part.cost), key=lambda part: -part.cost))


@dataclass(frozen=True, slots=True, kw_only=True)
class Rise:
    """By how much a part of a layer's cost, an edge's to it included, is more in another strategy; less: below 0."""

    layer: str
    part: str
    cost: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerUp:
    """The cheapest strategy in which a layer has another configuration.

    difference: its cost less that of the cheapest strategy that keeps the layer's own; below 0 where the layer's own
    is not the best. is_tie: they cost the same. is_exact: whether that is proven. changes: the other layers whose
    configuration differs with it, and what it becomes; None where that was not looked at. alone, alone_difference:
    the best other configuration while all other layers stay as they are (None where none fits), and what that costs
    more than the plan. rises: what the difference is made of, less what is hidden more (`hidden`, below 0 where it is
    less); () where that was not looked at.
    """

    splits: Mapping[str, int]
    total_cost: float
    difference: float
    is_tie: bool
    is_exact: bool
    changes: tuple[tuple[str, dict[str, int]], ...] | None = None
    alone: dict[str, int] | None = None
    alone_difference: float = 0.0
    rises: tuple[Rise, ...] = ()
    hidden: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Flip:
    """scale: by how much slower the links are when the layer's choice changes; splits: what it becomes."""

    scale: float
    splits: Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryBinding:
    """A configuration that a layer would have at a lower cost if it fitted.

    difference: what it costs more than the plan, below 0. is_alone: with all other layers as they are; else in the
    cheapest strategy without a limit. needed_bytes, limit_bytes: on each device.
    """

    splits: Mapping[str, int]
    difference: float
    is_alone: bool
    needed_bytes: float
    limit_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerExplanation:
    """Why a layer has its configuration.

    parts: of the cost it has a say in, the one of which most is paid first. best: its configuration in the cheapest
    strategy, which is its own where `is_best`. kept_total_cost: of the cheapest strategy with its own. runner_up:
    None where it has no other configuration that fits. memory: None where memory makes no difference to it. below,
    above: the nearest flips with faster and slower links; None where there is none. reason: one sentence.
    """

    name: str
    kind: str
    splits: Mapping[str, int]
    num_configurations: int
    parts: tuple[Part, ...]
    is_best: bool
    best: Mapping[str, int]
    kept_total_cost: float
    runner_up: RunnerUp | None
    memory: MemoryBinding | None
    below: Flip | None
    above: Flip | None
    reason: str

    @property
    def binding(self) -> Part | None:
        """The part of which most is paid; None where nothing is."""
        return self.parts[0] if self.parts and self.parts[0].paid > 0 else None

    @property
    def share(self) -> float:
        """The binding part's share of all that is paid, 0 to 1."""
        paid = sum(part.paid for part in self.parts)
        return self.parts[0].paid / paid if paid else 0.0


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """Why a plan is as it is.

    optimum_cost: of the cheapest strategy found now; is_proven: whether it is proven to be cheapest. is_optimal:
    the plan costs no more than that. flop_per_byte: r of Eq. 1, None for a cost model in seconds. searched: the
    scales, from and to, within which flips are complete; has_flips: whether they were looked for. improvement: what to
    change first; None where nothing is.
    """

    plan_cost: float
    optimum_cost: float
    is_optimal: bool
    is_proven: bool
    cost_unit: str
    flop_per_byte: float | None
    searched: tuple[float, float]
    has_flips: bool
    layers: tuple[LayerExplanation, ...]
    improvement: Improvement | None = None

    @cached_property
    def index(self) -> dict[str, int]:
        """Position of each explained layer by name."""
        return {layer.name: i for i, layer in enumerate(self.layers)}

    def __getitem__(self, name: str) -> LayerExplanation:
        """Return what is said of a layer."""
        return self.layers[self.index[name]]

    def relative(self, difference: float) -> float:
        """Return a difference in cost as a part of the plan's cost."""
        return difference / self.plan_cost if self.plan_cost else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Excess:
    """The part that costs most more under another choice than under a layer's own.

    layer: whose part it is, "" for the layer itself. part: as it is under the other choice. before: the same part
    under the layer's own; None where it costs nothing there. paid: by how much more of it is paid, as far as one part
    can be told from the others: where all that can hide does under the other choice, of communication what cannot;
    where more can hide than there is to hide behind, of computation what nothing hides behind.
    """

    layer: str = ""
    part: Part
    before: Part | None
    paid: float

    @property
    def cost(self) -> float:
        return self.part.cost - (self.before.cost if self.before else 0.0)


def configuration_text(splits: Mapping[str, int], num_devices: int) -> str:
    """Return a configuration in words: "b=4 n=2", with "×4" where four devices hold each part, or "not split"."""
    text = splits_text(splits)
    replicas = num_devices // prod(splits.values())
    return text if replicas == 1 else f"{text} ×{replicas}"


def memory_reason(other: str, memory: MemoryBinding, plan_cost: float) -> str:
    """Return what is added to a layer's sentence where its cheaper configuration does not fit."""
    when = "" if memory.is_alone else " together with others"
    return (
        f"; memory binds: {other}{when} would cost {percent(memory.difference / plan_cost)} but takes "
        f"{quantity(memory.needed_bytes, 'B')} on each device, over the limit of {quantity(memory.limit_bytes, 'B')}"
    )


def would(excess: Excess, unit: str) -> str:
    """Return what the other choice would do: "all-reduce 151 MB of weight gradients over 32 devices"."""
    part, before = excess.part, excess.before
    action = _ACTIONS[part.kind](part, excess, unit)
    if before is not None and before.size_bytes and part.kind is not PartKind.COMPUTE:
        if before.size_bytes < part.size_bytes:
            over = f" over {before.group}" if before.group not in (0, part.group) else ""
            action += f", not {quantity(before.size_bytes, 'B')}{over}"
        else:  # it is not the bytes: more devices, or links further out
            action += f" at {quantity(excess.cost, unit)} more"
    return f"make {excess.layer} {action}" if excess.layer else action


def _compute(_part: Part, excess: Excess, unit: str) -> str:
    return f"compute {'' if unit == 'FLOP' else 'for '}{quantity(excess.cost, unit)} more on each device"


def _summed(what: str) -> "_Action":
    def action(part: Part, _excess: Excess, _unit: str) -> str:
        return f"all-reduce {quantity(part.size_bytes, 'B')} of {what} over {part.group} devices"

    return action


def _sent(verb: str, what: str) -> "_Action":
    def action(part: Part, _excess: Excess, _unit: str) -> str:
        return f"{verb} {quantity(part.size_bytes, 'B')}{what}{part.other}"

    return action


_Action = Callable[[Part, Excess, str], str]

_ACTIONS: Mapping[PartKind, _Action] = MappingProxyType(
    {
        PartKind.COMPUTE: _compute,
        PartKind.GRADIENTS: _summed("weight gradients"),
        PartKind.PARTIAL_SUMS: _summed("partial sums"),
        PartKind.INPUT_GRADIENTS: _summed("its input's gradient"),
        PartKind.HALO: _sent("exchange", " of halo"),
        PartKind.EXCHANGE: _sent("exchange", " inside it"),
        PartKind.RESHARD_FROM: _sent("re-shard", " from "),
        PartKind.RESHARD_TO: _sent("re-shard", " to "),
        PartKind.SHARED_WEIGHT: _sent("move", " of the weight that it shares with "),
    }
)


class Reasons:
    """Finds reasons: the layer is compared with data parallelism where its own part is what that would cost.

    Else, and where data parallelism is the runner-up, or its own choice, it is compared with the runner-up.
    """

    def __init__(self, plan: Plan, problem: Problem, choice: tuple[int, ...], parts: CostParts) -> None:
        """Take a plan, its problem, its strategy by configuration index, and what takes its costs apart."""
        self._plan = plan
        self._problem = problem
        self._choice = choice
        self._parts = parts
        self._plan_cost = problem.tables.evaluate(choice)

    def sentence(self, vertex: int, kept: Alternative, runner_up: RunnerUp | None, other: Alternative | None) -> str:
        """Return the sentence of a layer; kept: the cheapest strategy with its own configuration, other: without."""
        name, unit = self._plan.layers[vertex].name, self._plan.cost_unit
        own = self._text(vertex, self._choice[vertex])
        if runner_up is None or other is None:
            is_only = self._problem.tables.domain_sizes[vertex] == 1
            among = " within the constraints" if is_only and self._plan.constraints else ""
            found = among if is_only else " for which a strategy was found that fits"
            return f"{name}: {own}, its only configuration{found}"
        relative = runner_up.difference / self._plan_cost if self._plan_cost else 0.0
        next_best = self._text(vertex, other.choice[vertex])
        if relative < 0 and not runner_up.is_tie:
            excess = self._excess(vertex, other.choice, kept.choice)
            keeping = f": keeping {own} would {would(excess, unit)}" if excess else ""
            saved = percent(-relative).lstrip("+")
            return f"{name}: {own} is not the best, {next_best} would save {saved} of the plan's cost{keeping}"
        because = self._against_data_parallel(vertex)
        if runner_up.is_tie:
            return f"{name}: {own}{because}; {next_best} costs the same"
        if not because or self._problem.choice(vertex, self._data_parallel(vertex)) == other.choice[vertex]:
            excess = self._excess(vertex, kept.choice, other.choice)
            if excess is not None:
                action = would(excess, unit) + self._hides(kept.choice, other.choice)
                return f"{name}: {own}, because the next best, {next_best}, would {action}: {percent(relative)} in all"
        return f"{name}: {own}{because}; next best {next_best} costs {percent(relative)}"

    def _text(self, vertex: int, configuration: int) -> str:
        return self.text(self._problem.splits(vertex, configuration))

    def text(self, splits: Mapping[str, int]) -> str:
        return configuration_text(splits, self._plan.num_devices)

    def _data_parallel(self, vertex: int) -> tuple[int, ...]:
        graph = self._problem.graph
        return data_parallel(graph, graph.operators[vertex], self._plan.num_devices)

    def _against_data_parallel(self, vertex: int) -> str:
        """Return what splitting this layer's batch alone would cost it; "" if it is split so, or nothing would."""
        configuration = self._problem.choice(vertex, self._data_parallel(vertex))
        if configuration is None or configuration == self._choice[vertex]:
            return ""
        choice = (*self._choice[:vertex], configuration, *self._choice[vertex + 1 :])
        excess = self._excess(vertex, self._choice, choice)
        if excess is None or excess.part.other:
            return ""  # what an edge costs depends on the neighbours, which would not stay as they are
        text = self._text(vertex, configuration)
        action = "not splitting it" if text.startswith("not split") else f"splitting the batch alone ({text})"
        return f", because {action} would {would(excess, self._plan.cost_unit)}{self._hides(self._choice, choice)}"

    def _hides(self, before: Sequence[int], after: Sequence[int]) -> str:
        """Return what is said of how much more, or less, is hidden after a change; "" where that stays."""
        more = hidden_more(self._problem.tables, before, after)
        if abs(more) <= TIE * self._plan_cost:
            return ""
        return f", with {quantity(abs(more), self._plan.cost_unit)} {'more' if more > 0 else 'less'} hidden"

    def _excess(self, vertex: int, before: Sequence[int], after: Sequence[int]) -> Excess | None:
        """Return the part of which most more is paid after a change: of the layer, or of others that change with it."""
        hideable, cover = self._problem.tables.hidden(after)
        all_hides = hideable <= cover

        def most_more(layer: str, v: int) -> Excess | None:
            return _most_more(layer, self._parts.of(v, before), self._parts.of(v, after), all_hides=all_hides)

        found = [most_more("", vertex)]
        for v, (b, a) in enumerate(zip(before, after, strict=True)):
            if b != a and v != vertex:
                found.append(most_more(self._plan.layers[v].name, v))
        return max((excess for excess in found if excess), key=lambda excess: excess.paid, default=None)


def hidden_more(tables: CostTables, before: Sequence[int], after: Sequence[int]) -> float:
    """Return how much more is hidden under one strategy than under another."""
    return min(tables.hidden(after)) - min(tables.hidden(before))


def _most_more(layer: str, before: Iterable[Part], after: Iterable[Part], *, all_hides: bool) -> Excess | None:
    def paid(part: Part) -> float:
        return part.cost - (part.hideable if all_hides else part.cover)

    known = {(part.kind, part.other): part for part in before}
    rises = []
    for part in after:
        own = known.get((part.kind, part.other))
        excess = Excess(layer=layer, part=part, before=own, paid=paid(part) - (paid(own) if own else 0.0))
        if excess.cost > 0 and excess.paid > 0:
            rises.append(excess)
    return max(rises, key=lambda excess: excess.paid, default=None)
