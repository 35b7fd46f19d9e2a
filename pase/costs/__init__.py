"""Costs: how accesses become traffic, and how a cost model turns traffic into cost tables."""

from pase.costs.alpha_beta import AlphaBetaCostModel
from pase.costs.choice_tables import Problem, build_problem
from pase.costs.edges import (
    Allowance,
    TimeUpError,
    edge_cost,
    edge_layouts,
    edge_signatures,
    hiding_layers,
    layer_signatures,
    traffic_of,
    transfer_bytes,
)
from pase.costs.memory import (
    DEFAULT_OPTIMISER,
    OPTIMISER_STATE,
    DeviceMemory,
)
from pase.costs.model import COST_MODELS, CostModel, PaperCostModel, cost_model
from pase.costs.states import REPLICATED, STATES
from pase.costs.step_memory import GroupMemory, Peak, StepMemory, TurnUsage, memory_of_layers
from pase.costs.traffic import Communication, LayerTraffic, PassWork, Pattern, ReadTraits, layer_traffic

__all__ = [
    "COST_MODELS",
    "DEFAULT_OPTIMISER",
    "OPTIMISER_STATE",
    "REPLICATED",
    "STATES",
    "Allowance",
    "AlphaBetaCostModel",
    "Communication",
    "CostModel",
    "DeviceMemory",
    "GroupMemory",
    "LayerTraffic",
    "PaperCostModel",
    "PassWork",
    "Pattern",
    "Peak",
    "Problem",
    "ReadTraits",
    "StepMemory",
    "TimeUpError",
    "TurnUsage",
    "build_problem",
    "cost_model",
    "edge_cost",
    "edge_layouts",
    "edge_signatures",
    "hiding_layers",
    "layer_signatures",
    "layer_traffic",
    "memory_of_layers",
    "traffic_of",
    "transfer_bytes",
]
