"""What a layer pays for: its cost taken apart into computing, each kind of message inside it, and each of its edges."""

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from math import inf

from pase.analysis.explanation.constrained_search import TIE
from pase.analysis.figures import CommunicationOverlap, overlap_of
from pase.costs import REPLICATED, CostModel, Pattern, Problem, hiding_layers
from pase.costs.choice_tables import ChoiceTables
from pase.costs.choices import sharded_messages
from pase.costs.states import GATHERED_OFTEN, SCATTERED_OFTEN, STATES
from pase.costs.traffic import Communication, sum_name
from pase.graph import Role
from pase.graph.parts import Stage
from pase.planning.plan import Transfer
from pase.planning.stage_problem import StageProblem
from pase.planning.steps import edge_transfer
from pase.sharding.edges import table_edges
from pase.sharding.traffic import is_needed_backward


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
    RECOMPUTE = "recompute"
    SCATTERED_GRADIENTS = "gradient reduce-scatter"
    GATHERED_WEIGHTS = "weight all-gather"
    STAGES = "transfers of other stages"


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
    """Takes costs apart; what each choice computes and sends is kept once it is known."""

    def __init__(self, problem: Problem, model: CostModel) -> None:
        """Take the problem of a step of one stage, or of a stage, and the cost model that its costs are of."""
        self._tables = problem.choices
        self._micro_batches = problem.micro_batches
        self._model = model
        self._sums_of = StageProblem(tables=problem.choices, weight=1.0, in_flight=1, limit_bytes=inf).sums
        self._table_edges = table_edges(problem.graph)
        self._incident: list[list[int]] = [[] for _ in problem.graph.operators]
        for number, (u, v) in enumerate(self._tables.ends):
            self._incident[u].append(number)
            self._incident[v].append(number)
        self._own: dict[tuple[int, int], tuple[Part, ...]] = {}
        self._transfers: dict[Hashable, Transfer] = {}
        self._overlaps: dict[tuple[int, ...], CommunicationOverlap] = {}
        self._hides = hiding_layers(problem.graph)

    def overlap(self, choice: Sequence[int]) -> CommunicationOverlap:
        """Return how communication overlaps with compute under a strategy."""
        key = tuple(choice)
        if key not in self._overlaps:
            self._overlaps[key] = overlap_of(self._sums_of(choice), self._micro_batches)
        return self._overlaps[key]

    def hidden_more(self, before: Sequence[int], after: Sequence[int]) -> float:
        """Return how much more overlaps with compute under one strategy than under another."""
        if not self._tables.hides:
            return 0.0
        was, now = self.overlap(before), self.overlap(after)
        return (now.overlappable - now.exposed) - (was.overlappable - was.exposed)

    def of(self, vertex: int, choice: Sequence[int]) -> tuple[Part, ...]:
        """Return the parts of a layer's cost under a strategy; their costs add up to its layer cost and its edges'.

        The dearest first, by what is paid.
        """
        share = self.overlap(choice).share if self._tables.hides else 0.0
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
            consumers = {self._tables.ends[number][1] for v in changed for number in self._incident[v]}
            parts += [(v, part) for v in consumers for part in self._edges(v, choice, into=True)]
            for v, part in parts:
                key = self._tables.graph.operators[v].name, part.name
                found[key] = found.get(key, 0.0) + sign * part.cost
        rises = [Rise(layer=layer, part=name, cost=cost) for (layer, name), cost in found.items() if cost]
        return tuple(sorted(rises, key=lambda rise: -abs(rise.cost)))

    def own(self, vertex: int, choice: int) -> tuple[Part, ...]:
        """Return the parts of the layer cost t_l of one choice."""
        key = id(self._tables.layers[vertex]), choice  # repeated layers share it
        if key not in self._own:
            self._own[key] = own_parts(
                self._tables, vertex, choice, self._model, micro_batches=self._micro_batches, hides=self._hides[vertex]
            )
        return self._own[key]

    def _edges(self, vertex: int, choice: Sequence[int], *, into: bool = False) -> list[Part]:
        """Return the parts of a vertex's edges; into: of those to it alone."""
        tables, found = self._tables, []
        for number in self._incident[vertex]:
            u, v = tables.ends[number]
            if into and v != vertex:
                continue
            edge = tables.edges[number]
            cost = self._micro_batches * edge.cost.cost(choice[u], choice[v])
            other = tables.graph.operators[u if v == vertex else v].name
            if number >= len(tables.graph.edges):
                kind = PartKind.SHARED_WEIGHT
            else:
                kind = PartKind.RESHARD_FROM if v == vertex else PartKind.RESHARD_TO
            size_bytes = 0.0
            if cost:
                key = id(edge), id(tables.layers[u]), choice[u], id(tables.layers[v]), choice[v]
                if key not in self._transfers:
                    self._transfers[key] = edge_transfer(tables, number, (choice[u], choice[v]), self._micro_batches)
                moved = self._transfers[key]
                size_bytes = moved.forward_bytes + moved.backward_bytes
            hideable = cost if kind is PartKind.SHARED_WEIGHT and tables.hides else 0.0
            found.append(Part(kind=kind, other=other, cost=cost, size_bytes=size_bytes, hideable=hideable))
        return found


def own_parts(
    tables: ChoiceTables,
    vertex: int,
    choice: int,
    model: CostModel,
    *,
    micro_batches: int = 1,
    hides: tuple[bool, bool] = (False, False),
) -> tuple[Part, ...]:
    """Return the parts of the layer cost t_l of one choice of a layer, the dearest first.

    Args:
        tables: Of the graph, or of a stage.
        vertex: Of the layer.
        choice: Of the layer's.
        model: Of costs.
        micro_batches: Of a step.
        hides: Whether its sums of weights' gradients can overlap, and whether others' can with its computation
            (`hiding_layers`).
    """
    graph, layer, m = tables.graph, tables.layers[vertex], micro_batches
    operator, every, row = graph.operators[vertex], tables.traffic[vertex], int(layer.rows[choice])
    traffic = every.under(row)
    can_hide, covers = (bool(model.overlap) and one for one in hides)
    # What each sum inside a layer is of, by its name.
    kinds = {sum_name(access.tensor, is_gradient=False): PartKind.PARTIAL_SUMS for access in operator.writes}
    for access in operator.reads:
        is_weight = access.role is Role.PARAMETER
        name = sum_name(access.tensor, is_gradient=True)
        kinds[name] = PartKind.GRADIENTS if is_weight else PartKind.INPUT_GRADIENTS
    forward, backward = (float(model.work(work)[row]) for work in (every.forward, every.backward))
    parts = [Part(kind=PartKind.COMPUTE, cost=m * (forward + backward), cover=m * model.overlap * backward * covers)]

    def kind_of(message: Communication) -> PartKind:
        if message.is_of_weight and message.pattern is Pattern.REDUCE_SCATTER:
            return PartKind.SCATTERED_GRADIENTS
        if message.is_of_weight and message.pattern is Pattern.ALL_GATHER:
            return PartKind.GATHERED_WEIGHTS
        if message.pattern is Pattern.ALL_REDUCE:
            return kinds.get(message.tensor, PartKind.EXCHANGE)
        return PartKind.HALO if message.pattern is Pattern.HALO else PartKind.EXCHANGE

    # Messages, and how often each is sent in a step: the traffic has a micro-batch's share of weights' gradient sums.
    sent = [(message, m) for message in traffic.messages]
    repeated = list[Communication]()
    is_again = bool(layer.again[choice])
    state = STATES[layer.state[choice]]
    if is_again:
        others = [message for message in traffic.messages if not message.is_of_weight]
        repeated = [replace(message, times=message.forward_times) for message in others]
    if state != REPLICATED:
        gathers = 1 + is_needed_backward(graph, operator) + is_again
        often = 1, m if state in SCATTERED_OFTEN else 1, m * gathers if state in GATHERED_OFTEN else 1
        sent = [(message, m * (not message.is_of_weight)) for message in traffic.messages]
        for messages, times in zip(sharded_messages(graph, operator, traffic, m), often, strict=True):
            sent += [(message, times) for message in messages]
    more = [message for message, _ in sent[len(traffic.messages) :]]
    costs = [float(cost[0]) for cost in model.messages(traffic, [*more, *repeated])]
    for (message, times), cost in zip(sent, costs, strict=False):
        kind = kind_of(message)
        parts.append(
            Part(
                kind=kind,
                cost=times * cost,
                size_bytes=times * message.times * float(message.size_bytes[0]),
                group=int(message.group[0]) if kind not in (PartKind.HALO, PartKind.EXCHANGE) else 0,
                hideable=times * cost if can_hide and message.is_of_weight else 0.0,
            )
        )
    if is_again:
        parts.append(Part(kind=PartKind.RECOMPUTE, cost=m * (forward + sum(costs[len(sent) :]))))
    if isinstance(graph, Stage):
        own = layer.figures
        whole = m * float(own.repeated[choice] + own.streamed[choice]) + float(own.once[choice] + own.summed[choice])
        rest = whole - sum(part.cost for part in parts)
        parts.append(Part(kind=PartKind.STAGES, cost=rest if rest > TIE * whole else 0.0))
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
