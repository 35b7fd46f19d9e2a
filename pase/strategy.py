"""From one configuration for each layer to what a plan says of it: costs, transfers, placement, memory."""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from pase.costs import (
    CostModel,
    SharedWeight,
    edge_layouts,
    layer_cost,
    memory_bytes,
    shared_traffic,
    shared_weights,
    signature,
    transfer_bytes,
)
from pase.costs.layouts import IndexArray
from pase.graph import Edge, Graph, Operator
from pase.placement import place
from pase.plan import LayerPlan, Transfer


def plan_layers(
    graph: Graph,
    num_devices: int,
    model: CostModel,
    splits: Sequence[Mapping[str, int]],
    devices: Sequence[tuple[int, ...]] | None = None,
    *,
    group_sizes: Sequence[int] = (),
) -> tuple[LayerPlan, ...]:
    """Return the placed plan of every layer; splits: for each layer, a factor for each iteration dim.

    devices: for each layer, the device of each part; placed anew where they are not given, so that groups of so many
    consecutive devices (those of a node) have the least to exchange.
    """
    if devices is None:
        devices = place(graph, num_devices, splits, group_sizes=group_sizes)
    rows = {
        operator.name: np.array([[split[dim] for dim in operator.extents]], dtype=np.int32)
        for operator, split in zip(graph.operators, splits, strict=True)
    }
    into: dict[str, list[Edge]] = {name: [] for name in rows}
    for edge in graph.edges:
        into[edge.consumer].append(edge)
    shared: dict[str, list[SharedWeight]] = {}
    for weight in shared_weights(graph):
        shared.setdefault(weight.user, []).append(weight)
    # Repeated layers under equal configurations cost the same: each distinct one is costed once.
    kinds = {op.name: (signature(graph, op), rows[op.name].tobytes()) for op in graph.operators}
    costs: dict[Hashable, tuple[float, float, float]] = {}
    traffic: dict[Hashable, Transfer] = {}
    layers = []
    for operator, split, where in zip(graph.operators, splits, devices, strict=True):
        kind = kinds[operator.name]
        if kind not in costs:
            costs[kind] = _layer_costs(graph, operator, rows[operator.name], model)
        compute, communication, memory = costs[kind]
        transfers = []
        for edge in into[operator.name]:
            key = kinds[edge.producer], edge.output, kind, edge.input
            if key not in traffic:
                traffic[key] = _transfer(graph, edge, rows, model)
            transfers.append(replace(traffic[key], producer=edge.producer))
        transfers += [_shared_transfer(graph, weight, rows, model) for weight in shared.get(operator.name, ())]
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
                memory_bytes=memory,
                transfers=tuple(transfers),
            )
        )
    return tuple(layers)


def total_cost(layers: Sequence[LayerPlan]) -> float:
    """Return F(G, φ) (Eq. 1): all layer costs and all transfer costs."""
    return sum(layer.layer_cost + sum(transfer.cost for transfer in layer.transfers) for layer in layers)


def _layer_costs(graph: Graph, operator: Operator, row: IndexArray, model: CostModel) -> tuple[float, float, float]:
    """Return (compute cost, communication cost, bytes of memory) of one configuration."""
    cost = layer_cost(graph, operator, row, model)
    memory = memory_bytes(operator, row, word_bytes=graph.word_bytes)
    return float(cost.compute[0]), float(cost.communication[0]), float(memory[0])


def _transfer(graph: Graph, edge: Edge, rows: Mapping[str, IndexArray], model: CostModel) -> Transfer:
    moved = transfer_bytes(graph, edge, *edge_layouts(graph, edge, rows[edge.producer], rows[edge.consumer]))
    return Transfer(
        producer=edge.producer,
        input=edge.input,
        cost=float((model.transfer(moved.forward) + model.transfer(moved.backward))[0, 0]),
        forward_bytes=float(moved.forward[0, 0]),
        backward_bytes=float(moved.backward[0, 0]),
    )


def _shared_transfer(graph: Graph, weight: SharedWeight, rows: Mapping[str, IndexArray], model: CostModel) -> Transfer:
    traffic = shared_traffic(graph, weight, rows[weight.owner], rows[weight.user])
    moved = model.transfer(traffic.forward_bytes) + model.transfer(traffic.backward_bytes)
    return Transfer(
        producer=weight.owner,
        input=weight.user_read,
        cost=float((moved + model.message(traffic.reduction) * traffic.is_reduced)[0, 0]),
        forward_bytes=float(traffic.forward_bytes[0, 0]),
        backward_bytes=float(traffic.backward_bytes[0, 0]),
    )
