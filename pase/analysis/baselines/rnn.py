"""Data and pipeline parallelism for recurrent networks, as GNMT uses it (Wu et al. 2016, section 3; PaSE section IV).

The layers of a recurrent stack lie on different devices, which work as a pipeline; each of them is repeated on the
devices that are left, which share the batch.
"""

from pase.analysis.baselines.layout import choice_of, largest_split
from pase.costs import Problem
from pase.costs.configurations import data_parallel
from pase.graph import Graph, Operator
from pase.machine import Machine


def choose(problem: Problem, _machine: Machine) -> tuple[int, ...] | None:
    """Return the strategy: stacks split by layers as far as p allows and their batch by the rest, others data parallel.

    None for a network without a stack of several recurrent layers that pipelines.
    """
    operators = problem.graph.operators
    if not any(_num_stages(operator) > 1 for operator in operators):
        return None
    return choice_of(problem, [_splits(problem.graph, operator, problem.num_devices) for operator in operators])


def _num_stages(operator: Operator) -> int:
    return operator.extents[operator.pipeline.stage] if operator.pipeline else 1


def _splits(graph: Graph, operator: Operator, num_devices: int) -> dict[str, int]:
    if operator.pipeline is None:
        return dict(zip(operator.extents, data_parallel(graph, operator, num_devices), strict=True))
    stages = largest_split(operator, operator.pipeline.stage, num_devices)
    rest = data_parallel(graph, operator, num_devices // stages)
    return dict(zip(operator.extents, rest, strict=True)) | {operator.pipeline.stage: stages}
