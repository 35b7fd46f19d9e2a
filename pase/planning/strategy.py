"""From one configuration for each layer to what a plan says of it: costs, transfers, placement, memory."""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from pase.common.frozen import FrozenDict
from pase.costs import (
    DEFAULT_OPTIMISER,
    CostModel,
    LayerTraffic,
    edge_cost,
    edge_layouts,
    edge_signature,
    hiding_layers,
    kept_by_layer,
    layer_cost,
    layer_hiding,
    signature,
    traffic_of,
    transfer_bytes,
)
from pase.graph import Edge, Graph
from pase.planning.plan import LayerPlan, Transfer, hidden_cost
from pase.sharding.edges import SharedWeight, table_edges
from pase.sharding.placement import place


def plan_layers(
    graph: Graph,
    num_devices: int,
    model: CostModel,
    splits: Sequence[Mapping[str, int]],
    devices: Sequence[tuple[int, ...]] | None = None,
    *,
    group_sizes: Sequence[int] = (),
    by_hand: Mapping[str, tuple[int, ...]] = FrozenDict(),
    optimiser: str = DEFAULT_OPTIMISER,
) -> tuple[LayerPlan, ...]:
    """Return the placed plan of every layer; splits: for each layer, a factor for each iteration dim.

    devices: for each layer, the device of each part; placed anew where they are not given, so that groups of so many
    consecutive devices (those of a node) have the least to exchange. by_hand: devices of some layers, by name, beside
    which the others are placed. optimiser: whose state counts as memory.
    """
    if devices is None:
        devices = place(graph, num_devices, splits, group_sizes=group_sizes, by_level=model.sums_by_level)
        devices = _placed_by_hand(devices, {graph.index[name]: parts for name, parts in by_hand.items()})
    rows = {
        operator.name: np.array([[split[dim] for dim in operator.extents]], dtype=np.int32)
        for operator, split in zip(graph.operators, splits, strict=True)
    }
    into: dict[str, list[Edge]] = {name: [] for name in rows}
    for edge in table_edges(graph):
        into[edge.consumer].append(edge)
    does: dict[str, LayerTraffic] = {}
    # Repeated layers under equal configurations cost the same: each distinct one is costed once. They are numbered,
    # because what tells them apart is long to compare.
    numbers: dict[Hashable, int] = {}
    kinds = {
        op.name: numbers.setdefault((signature(graph, op), rows[op.name].tobytes()), len(numbers))
        for op in graph.operators
    }
    distinct: dict[Hashable, LayerTraffic] = {}
    for operator in graph.operators:
        kind = kinds[operator.name]
        if kind not in distinct:
            distinct[kind] = traffic_of(graph, operator, rows[operator.name])
        does[operator.name] = distinct[kind]
    costs: dict[Hashable, tuple[float, float]] = {}
    traffic: dict[Hashable, Transfer] = {}
    hides = hiding_layers(graph) if model.overlap else ()
    layers = []
    memory = kept_by_layer(graph, splits, optimiser=optimiser)
    for operator, split, where, kept_bytes in zip(graph.operators, splits, devices, memory, strict=True):
        kind = kinds[operator.name]
        if kind not in costs:
            costs[kind] = _layer_costs(does[operator.name], model)
        compute, communication = costs[kind]
        transfers = []
        shared_cost = 0.0
        for edge in into[operator.name]:
            key = kinds[edge.producer], kind, edge_signature(graph, edge)
            if key not in traffic:
                traffic[key] = _transfer(graph, edge, does, model)
            transfers.append(replace(traffic[key], producer=edge.producer, input=edge.input))
            if isinstance(edge, SharedWeight):
                shared_cost += traffic[key].cost
        hideable_cost = cover_cost = None
        if hides:
            can_hide, covers = hides[graph.index[operator.name]]
            hiding = layer_hiding(does[operator.name], model)
            hideable_cost = float(hiding.hideable[0]) * can_hide + shared_cost
            cover_cost = float(hiding.cover[0]) * covers
        layers.append(
            LayerPlan(
                name=operator.name,
                kind=operator.kind,
                dims=dict(operator.extents),
                splits={dim: int(split[dim]) for dim in operator.extents},
                devices=where,
                layer_cost=compute + communication,
                compute_cost=compute,
                communication_cost=communication,
                memory_bytes=kept_bytes,
                transfers=tuple(transfers),
                hideable_cost=hideable_cost,
                cover_cost=cover_cost,
            )
        )
    return tuple(layers)


def _placed_by_hand(
    placed: Sequence[tuple[int, ...]], by_hand: Mapping[int, tuple[int, ...]]
) -> tuple[tuple[int, ...], ...]:
    """Return a placement with other devices for some layers; all are renamed for the first, so that as much stays."""
    if not by_hand:
        return tuple(placed)
    first = min(by_hand)
    renamed = dict(zip(placed[first], by_hand[first], strict=True))
    return tuple(by_hand.get(v, tuple(renamed[device] for device in row)) for v, row in enumerate(placed))


def total_cost(layers: Sequence[LayerPlan]) -> float:
    """Return F(G, φ) (Eq. 1): all layer costs and all transfer costs, less what is hidden of them."""
    return sum(layer.layer_cost + layer.transfer_cost for layer in layers) - hidden_cost(layers)


def _layer_costs(traffic: LayerTraffic, model: CostModel) -> tuple[float, float]:
    """Return (compute cost, communication cost) of one configuration."""
    cost = layer_cost(traffic, model)
    return float(cost.compute[0]), float(cost.communication[0])


def _transfer(graph: Graph, edge: Edge, traffic: Mapping[str, LayerTraffic], model: CostModel) -> Transfer:
    u, v = traffic[edge.producer], traffic[edge.consumer]
    moved = transfer_bytes(graph, edge, *edge_layouts(graph, edge, u.splits.values, v.splits.values))
    return Transfer(
        producer=edge.producer,
        input=edge.input,
        cost=float(edge_cost(graph, edge, u, v, model).values[0, 0]),
        forward_bytes=float(moved.forward[0, 0]),
        backward_bytes=float(moved.backward[0, 0]),
    )
