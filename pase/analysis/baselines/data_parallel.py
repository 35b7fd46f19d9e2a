"""Data parallelism: every layer's batch is split over all devices, every device holds every weight."""

from pase.costs import Problem
from pase.machine import Machine
from pase.planning.planner import data_parallel_choice


def choose(problem: Problem, _machine: Machine) -> tuple[int, ...] | None:
    """Return data parallelism, by configuration index: the batch as many ways as p and its extent allow."""
    return data_parallel_choice(problem)
