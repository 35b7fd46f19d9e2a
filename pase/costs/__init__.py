"""Costs: how accesses become traffic, and how a cost model turns traffic into cost tables."""

from pase.costs.alpha_beta import AlphaBetaCostModel
from pase.costs.build import (
    Allowance,
    LayerCost,
    Problem,
    TimeUpError,
    TransferBytes,
    build_problem,
    edge_cost,
    edge_layouts,
    edge_signature,
    layer_cost,
    signature,
    traffic_of,
    transfer_bytes,
)
from pase.costs.memory import (
    DEFAULT_OPTIMISER,
    OPTIMISER_STATE,
    DeviceMemory,
    MemoryTables,
    device_memory,
    kept_by_layer,
    memory_tables,
    strategy_memory,
)
from pase.costs.model import COST_MODELS, CostModel, cost_model
from pase.costs.paper import PaperCostModel
from pase.costs.traffic import Communication, LayerTraffic, PassWork, Pattern, ReadTraits, layer_traffic

__all__ = [
    "COST_MODELS",
    "DEFAULT_OPTIMISER",
    "OPTIMISER_STATE",
    "Allowance",
    "AlphaBetaCostModel",
    "Communication",
    "CostModel",
    "DeviceMemory",
    "LayerCost",
    "LayerTraffic",
    "MemoryTables",
    "PaperCostModel",
    "PassWork",
    "Pattern",
    "Problem",
    "ReadTraits",
    "TimeUpError",
    "TransferBytes",
    "build_problem",
    "cost_model",
    "device_memory",
    "edge_cost",
    "edge_layouts",
    "edge_signature",
    "kept_by_layer",
    "layer_cost",
    "layer_traffic",
    "memory_tables",
    "signature",
    "strategy_memory",
    "traffic_of",
    "transfer_bytes",
]
