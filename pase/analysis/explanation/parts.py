"""What a layer's cost is made of: computing, each kind of message inside it, and each edge to another layer."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from pase.costs import (
    CostModel,
    LayerTraffic,
    Pattern,
    Problem,
    edge_layouts,
    layer_cost,
    shared_cost,
    traffic_of,
    transfer_bytes,
)
from pase.costs.traffic import sum_name
from pase.graph import Operator, Role
from pase.sharding.edges import SharedWeight, shared_weights


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
    in a collective; 0 where it is none.
    """

    kind: PartKind
    other: str = ""
    cost: float
    size_bytes: float = 0.0
    group: int = 0

    @property
    def name(self) -> str:
        """Kind, with the layer at the other end."""
        return f"{self.kind} {self.other}".rstrip()


class CostParts:
    """Takes costs apart; what each configuration computes and sends is kept once it is known."""

    def __init__(self, problem: Problem, model: CostModel) -> None:
        """Take a search problem and the cost model of its tables."""
        self._problem = problem
        self._model = model
        self._incident = problem.tables.incident
        self._shared = shared_weights(problem.graph)
        self._traffic: dict[tuple[int, int], LayerTraffic] = {}
        self._own: dict[tuple[int, int], tuple[Part, ...]] = {}
        self._bytes: dict[tuple[int, int, int], float] = {}

    def of(self, vertex: int, choice: Sequence[int]) -> tuple[Part, ...]:
        """Return the parts of a layer's cost under a strategy; their costs add up to its layer cost and its edges'."""
        return _merged([*self.own(vertex, choice[vertex]), *self._edges(vertex, choice)])

    def own(self, vertex: int, configuration: int) -> tuple[Part, ...]:
        """Return the parts of the layer cost t_l of one configuration."""
        key = self._problem.tables.vertex_table[vertex], configuration  # repeated layers share it
        if key not in self._own:
            self._own[key] = own_parts(
                self._problem.graph.operators[vertex], self._traffic_of(vertex, configuration), self._model
            )
        return self._own[key]

    def _edges(self, vertex: int, choice: Sequence[int]) -> list[Part]:
        tables, graph = self._problem.tables, self._problem.graph
        found = []
        for number in self._incident[vertex]:
            u, v = tables.edges[number]
            cost = tables.edge(number).cost(choice[u], choice[v])
            other = tables.vertex_names[u if v == vertex else v]
            if number >= len(graph.edges):
                kind = PartKind.SHARED_WEIGHT
            else:
                kind = PartKind.RESHARD_FROM if v == vertex else PartKind.RESHARD_TO
            size = self._moved_bytes(number, choice[u], choice[v]) if cost else 0.0
            found.append(Part(kind=kind, other=other, cost=cost, size_bytes=size))
        return found

    def _moved_bytes(self, number: int, from_row: int, to_row: int) -> float:
        """Return the bytes that the device which fetches most fetches on an edge, both ways together."""
        key = self._problem.tables.edge_table[number], from_row, to_row
        if key not in self._bytes:
            graph = self._problem.graph
            u, v = self._problem.tables.edges[number]
            sides = self._traffic_of(u, from_row), self._traffic_of(v, to_row)
            if number < len(graph.edges):
                edge = graph.edges[number]
                layouts = edge_layouts(graph, edge, sides[0].splits.values, sides[1].splits.values)
                moved = transfer_bytes(graph, edge, *layouts)
            else:
                weight: SharedWeight = self._shared[number - len(graph.edges)]
                _, moved = shared_cost(graph, weight, *sides, self._model)
            self._bytes[key] = float(moved.forward[0, 0] + moved.backward[0, 0])
        return self._bytes[key]

    def _traffic_of(self, vertex: int, configuration: int) -> LayerTraffic:
        key = self._problem.tables.vertex_table[vertex], configuration
        if key not in self._traffic:
            row = self._problem.configurations[vertex].splits[configuration : configuration + 1]
            graph = self._problem.graph
            self._traffic[key] = traffic_of(graph, graph.operators[vertex], row)
        return self._traffic[key]


def own_parts(operator: Operator, traffic: LayerTraffic, model: CostModel) -> tuple[Part, ...]:
    """Return the parts of the layer cost t_l of a layer of one configuration, the dearest first."""
    kinds = _sums(operator)
    parts = [Part(kind=PartKind.COMPUTE, cost=float(layer_cost(traffic, model).compute[0]))]
    for message, cost in zip(traffic.messages, model.messages(traffic), strict=True):
        is_sum = message.pattern is Pattern.ALL_REDUCE
        exchanged = PartKind.HALO if message.pattern is Pattern.HALO else PartKind.EXCHANGE
        parts.append(
            Part(
                kind=kinds.get(message.tensor, PartKind.EXCHANGE) if is_sum else exchanged,
                cost=float(cost[0]),
                size_bytes=message.times * float(message.size_bytes[0]),
                group=int(message.group[0]) if is_sum else 0,
            )
        )
    return _merged(parts)


def _sums(operator: Operator) -> Mapping[str, PartKind]:
    """Return what each sum inside a layer is of, by its name."""
    kinds = {sum_name(access.tensor, is_gradient=False): PartKind.PARTIAL_SUMS for access in operator.writes}
    for access in operator.reads:
        is_weight = access.role is Role.PARAMETER
        name = sum_name(access.tensor, is_gradient=True)
        kinds[name] = PartKind.GRADIENTS if is_weight else PartKind.INPUT_GRADIENTS
    return kinds


def _merged(parts: Iterable[Part]) -> tuple[Part, ...]:
    """Return one part for each kind and other end, those of no cost left out, the dearest first."""
    found: dict[tuple[PartKind, str], Part] = {}
    for part in parts:
        key = part.kind, part.other
        before = found.get(key)
        found[key] = part if before is None else _sum(before, part)
    return tuple(sorted((part for part in found.values() if part.cost), key=lambda part: -part.cost))


def _sum(a: Part, b: Part) -> Part:
    return Part(
        kind=a.kind,
        other=a.other,
        cost=a.cost + b.cost,
        size_bytes=a.size_bytes + b.size_bytes,
        group=max(a.group, b.group),
    )
