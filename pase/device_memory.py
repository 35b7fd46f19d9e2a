"""Memory that a device needs for a step of a plan, by what it is for."""

from pase.costs.memory import DeviceMemory, strategy_memory
from pase.planning.plan import Plan

__all__ = ["DeviceMemory", "device_memory"]


def device_memory(plan: Plan, *, word_bytes: int | None = None) -> DeviceMemory:
    """Return what a step of a plan needs on each device, what an optimiser keeps left out; word_bytes: see below.

    word_bytes: size of an element, by default that of the plan's graph: a program may run in another precision.
    """
    return strategy_memory(plan.graph, [layer.splits for layer in plan.layers], word_bytes=word_bytes)
