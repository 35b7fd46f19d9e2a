"""Costs: how accesses become traffic, and how a cost model turns traffic into cost tables."""

from pase.costs.build import (
    LayerCost,
    Problem,
    TransferBytes,
    build_problem,
    edge_layouts,
    layer_cost,
    signature,
    transfer_bytes,
)
from pase.costs.model import COST_MODELS, CostModel, cost_model
from pase.costs.paper import PaperCostModel
from pase.costs.traffic import LayerTraffic, Message, Pattern, layer_traffic, memory_bytes

__all__ = [
    "COST_MODELS",
    "CostModel",
    "LayerCost",
    "LayerTraffic",
    "Message",
    "PaperCostModel",
    "Pattern",
    "Problem",
    "TransferBytes",
    "build_problem",
    "cost_model",
    "edge_layouts",
    "layer_cost",
    "layer_traffic",
    "memory_bytes",
    "signature",
    "transfer_bytes",
]
