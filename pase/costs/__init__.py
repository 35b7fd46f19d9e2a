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
from pase.costs.sharing import SharedTraffic, SharedWeight, shared_traffic, shared_weights
from pase.costs.traffic import LayerTraffic, Message, Pattern, ReadTraits, layer_traffic, memory_bytes

__all__ = [
    "COST_MODELS",
    "CostModel",
    "LayerCost",
    "LayerTraffic",
    "Message",
    "PaperCostModel",
    "Pattern",
    "Problem",
    "ReadTraits",
    "SharedTraffic",
    "SharedWeight",
    "TransferBytes",
    "build_problem",
    "cost_model",
    "edge_layouts",
    "layer_cost",
    "layer_traffic",
    "memory_bytes",
    "shared_traffic",
    "shared_weights",
    "signature",
    "transfer_bytes",
]
