"""From one configuration for each layer to what a plan says of it: costs, transfers, placement, memory."""

from collections.abc import Mapping, Sequence

import numpy as np

from pase.costs import CostModel, edge_layouts, layer_cost, memory_bytes, transfer_bytes
from pase.costs.layouts import IndexArray
from pase.graph import Edge, Graph
from pase.placement import place
from pase.plan import LayerPlan, Transfer


def plan_layers(
    graph: Graph, num_devices: int, model: CostModel, splits: Sequence[Mapping[str, int]]
) -> tuple[LayerPlan, ...]:
    """Return the placed plan of every layer; splits: for each layer, a factor for each iteration dim."""
    devices = place(graph, num_devices, splits)
    rows = {
        operator.name: np.array([[split[dim] for dim in operator.extents]], dtype=np.int32)
        for operator, split in zip(graph.operators, splits, strict=True)
    }
    into: dict[str, list[Edge]] = {name: [] for name in rows}
    for edge in graph.edges:
        into[edge.consumer].append(edge)
    layers = []
    for operator, split, where in zip(graph.operators, splits, devices, strict=True):
        cost = layer_cost(graph, operator, rows[operator.name], model)
        compute, communication = float(cost.compute[0]), float(cost.communication[0])
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
                memory_bytes=float(memory_bytes(operator, rows[operator.name], word_bytes=graph.word_bytes)[0]),
                transfers=tuple(_transfer(graph, edge, rows, model) for edge in into[operator.name]),
            )
        )
    return tuple(layers)


def total_cost(layers: Sequence[LayerPlan]) -> float:
    """Return F(G, φ) (Eq. 1): all layer costs and all transfer costs."""
    return sum(layer.layer_cost + sum(transfer.cost for transfer in layer.transfers) for layer in layers)


def _transfer(graph: Graph, edge: Edge, rows: Mapping[str, IndexArray], model: CostModel) -> Transfer:
    moved = transfer_bytes(graph, edge, *edge_layouts(graph, edge, rows[edge.producer], rows[edge.consumer]))
    return Transfer(
        producer=edge.producer,
        input=edge.input,
        cost=float((model.transfer(moved.forward) + model.transfer(moved.backward))[0, 0]),
        forward_bytes=float(moved.forward[0, 0]),
        backward_bytes=float(moved.backward[0, 0]),
    )
