"""The memory of plain strategies, from their splits alone."""

from collections.abc import Mapping, Sequence

from pase.costs import memory_of_layers
from pase.costs.step_memory import StrategyMemory
from pase.graph import Graph
from pase.planning.steps import LayerChoice


def plain_memory(graph: Graph, splits: Sequence[Mapping[str, int]], optimiser: str) -> StrategyMemory:
    """Return what is in a device's memory where all weights are whole and nothing is recomputed."""
    layers = [LayerChoice(splits=own, state="replicated", is_recomputed=False, stage=0) for own in splits]
    return memory_of_layers(graph, layers, optimiser=optimiser)
