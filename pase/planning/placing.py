"""Placement by cost: from layers placed where most stays (`pase.sharding.placement`), each is placed anew while that
makes a step between these devices cheaper.

Where the machine has several levels, which dims of a layer lie within a node is decided by its neighbours as much as by
its own messages: what a layer gains may be lost on its edges. A move exchanges two digits of a layer's device numbers.
"""

from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations

import numpy as np

from pase.costs import CostModel, LayerTraffic, edge_cost, edge_signatures
from pase.graph import Edge, Graph
from pase.sharding.edges import table_edges
from pase.sharding.levels import PlacedAxes
from pase.sharding.shards import prime_factors

MAX_COSTED = 500
"""Layers and edges that are costed between devices at most; about a millisecond each."""

MAX_COSTED_DEVICES = 400_000
"""Likewise, times the devices: those of many take longer."""

_SWEEPS = 4
"""How often every layer is placed anew at most."""

_ROUNDING = 1e-9

Devices = tuple[int, ...]
"""The device of each part of a layer."""


def placed_axes(splits: Mapping[str, int], devices: Devices) -> PlacedAxes:
    """Return where a layer's mesh lies; splits: of its dims, in their order; devices: of each part."""
    return PlacedAxes(tuple((dim, factor) for dim, factor in splits.items() if factor > 1), devices)


@dataclass(slots=True, kw_only=True)
class _Prices:
    """What layers and edges of a graph communicate between devices; equal ones are costed once.

    Attributes:
        graph: With fan-outs.
        model: Of costs.
        splits: [V] of each layer.
        traffic: [V] of each layer.
        kinds: [V] equal for layers that do the same.
        edges: Of the graph, and weights that layers share.
        edge_kinds: [E] equal for edges that cost the same between equal ends.
        ends: [E] producer and consumer of each edge.
        costed: How many layers and edges were costed.
        known: What they cost.
    """

    graph: Graph
    model: CostModel
    splits: Sequence[Mapping[str, int]]
    traffic: Sequence[LayerTraffic]
    kinds: Sequence[Hashable]
    edges: Sequence[Edge]
    edge_kinds: Sequence[int]
    ends: Sequence[tuple[int, int]]
    costed: int = 0
    known: dict[Hashable, float] = field(default_factory=dict)

    def layer(self, vertex: int, devices: Devices | None) -> float:
        """Return what the messages of a layer cost; devices: None where its axes are over the levels as suits it."""
        key = self.kinds[vertex], devices
        if key not in self.known:
            self.costed += 1
            messages = self.model.messages(self._on(vertex, devices))
            self.known[key] = sum(float(cost[0]) for cost in messages)
        return self.known[key]

    def edge(self, number: int, placed: Sequence[Devices | None]) -> float:
        """Return what an edge costs; placed: None for layers whose axes are over the levels as suits them."""
        edge, (u, v) = self.edges[number], self.ends[number]
        key = self.kinds[u], self.kinds[v], self.edge_kinds[number], placed[u], placed[v]
        if key not in self.known:
            self.costed += 1
            table = edge_cost(self.graph, edge, self._on(u, placed[u]), self._on(v, placed[v]), self.model)
            self.known[key] = float(table.values[0, 0])
        return self.known[key]

    def _on(self, vertex: int, devices: Devices | None) -> LayerTraffic:
        if devices is None:
            return self.traffic[vertex]
        return replace(self.traffic[vertex], axes=placed_axes(self.splits[vertex], devices))


def placed_by_cost(
    graph: Graph,
    model: CostModel,
    splits: Sequence[Mapping[str, int]],
    traffic: Sequence[LayerTraffic],
    kinds: Sequence[Hashable],
    placed: Sequence[Devices],
    fixed: Collection[int] = (),
    *,
    assumed: Sequence[float | None] = (),
) -> tuple[Devices, ...]:
    """Return, for each layer, the device of each of its parts.

    Args:
        graph: With fan-outs.
        model: Of costs; where it knows no levels, layers stay where they are.
        splits: For each layer, a factor for each iteration dim.
        traffic: Of each layer.
        kinds: Of each layer; equal for layers that do the same under equal splits.
        placed: Where the layers are to begin with.
        fixed: Layers that stay there.
        assumed: [E] what edges cost where axes are over the levels as suits each; None where that is to be worked out.
    """
    if len(model.fanouts) < 2:
        return tuple(placed)
    edges = table_edges(graph)
    ends = [(graph.index[edge.producer], graph.index[edge.consumer]) for edge in edges]
    numbers: dict[Hashable, int] = {}
    prices = _Prices(
        graph=graph,
        model=model,
        splits=splits,
        traffic=traffic,
        kinds=kinds,
        edges=edges,
        edge_kinds=[numbers.setdefault(own, len(numbers)) for own in edge_signatures(graph, edges)],
        ends=ends,
    )
    incident: list[list[int]] = [[] for _ in placed]
    for number, (u, v) in enumerate(ends):
        incident[u].append(number)
        incident[v].append(number)
    current = list(placed)
    anywhere: list[Devices | None] = [None] * len(placed)
    most = min(MAX_COSTED, MAX_COSTED_DEVICES // len(placed[0]))

    def is_dearer(vertex: int) -> bool:
        """Whether a layer or an edge of it costs more than the search assumed."""
        if prices.layer(vertex, current[vertex]) > prices.layer(vertex, None) * (1 + _ROUNDING):
            return True
        return any(prices.edge(number, current) > least_of(number) * (1 + _ROUNDING) for number in incident[vertex])

    def least_of(number: int) -> float:
        """What the search assumed that an edge costs."""
        known = assumed[number] if assumed else None
        return prices.edge(number, anywhere) if known is None else known

    def cost(vertex: int) -> float:
        """What a layer and its edges cost where all layers are now."""
        return prices.layer(vertex, current[vertex]) + sum(prices.edge(number, current) for number in incident[vertex])

    exchanges = _exchanges(model.fanouts)
    for sweep in range(_SWEEPS):
        changed = False
        order = range(len(current)) if sweep % 2 == 0 else reversed(range(len(current)))
        for vertex in order:
            if vertex in fixed or not is_dearer(vertex):
                continue
            before = best = current[vertex]
            least = cost(vertex)
            for exchange in exchanges:
                if prices.costed > most:
                    current[vertex] = best
                    return tuple(current)
                current[vertex] = tuple(exchange[device] for device in before)
                if cost(vertex) < least * (1 - _ROUNDING):
                    best, least = current[vertex], cost(vertex)
            current[vertex] = best
            changed |= best != before
        if not changed:
            break
    return tuple(current)


def _exchanges(fanouts: Sequence[int]) -> list[list[int]]:
    """Return the permutations of the devices that exchange two digits of their numbers, of one base."""
    bases = [prime for fanout in reversed(fanouts) for prime in prime_factors(fanout)]
    digits = np.stack(np.unravel_index(np.arange(np.prod(bases)), bases))
    found = []
    for first, second in combinations(range(len(bases)), 2):
        if bases[first] == bases[second]:
            exchanged = digits.copy()
            exchanged[[first, second]] = digits[[second, first]]
            found.append(np.ravel_multi_index(tuple(exchanged), bases).tolist())
    return found
