"""Whole strategies from parts of them: from so many ways along such dims, or from some layers' configurations."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from pase.analysis.baselines.recognition import DimClass
from pase.costs import Problem
from pase.errors import ConfigurationError, TablesError
from pase.graph import Operator
from pase.machine import Machine
from pase.sharding.configurations import divisors
from pase.solver import Solution, solve
from pase.tables.cost_tables import CostTables, restricted

Choose = Callable[[Problem, Machine], tuple[int, ...] | None]
"""Returns the configuration index of each vertex; None where the strategy does not apply to the network."""

Splits = Mapping[str, int]
"""Of one layer: the split factor of each dim that is split."""


def largest_split(operator: Operator, dim: str, ways: int) -> int:
    """Return the largest divisor of `ways` that a dim can be split by: parts are of one size."""
    if dim in operator.unsplittable:
        return 1
    return max(f for f in divisors(ways) if operator.extents[dim] % f == 0)


def largest_splits(
    operator: Operator,
    classes: Mapping[tuple[str, str], DimClass],
    rule: Sequence[tuple[frozenset[DimClass], int]],
) -> dict[str, int]:
    """Return the splits of a layer by a rule: (dims, ways) for each axis of a mesh of devices.

    An axis splits one dim of a layer: of several that the rule allows, the one that takes the most of its ways, the
    first of equals.
    """
    splits: dict[str, int] = {}
    for split_classes, ways in rule:
        dims = [dim for dim in operator.extents if classes[operator.name, dim] in split_classes and dim not in splits]
        if dims:
            dim = max(dims, key=lambda name: largest_split(operator, name, ways))
            splits[dim] = largest_split(operator, dim, ways)
    return splits


def choice_of(problem: Problem, splits: Sequence[Splits]) -> tuple[int, ...]:
    """Return the configuration indices of a strategy; splits: for each layer, its factors beyond 1.

    Fan-outs, of which no expert speaks, follow their neighbours.
    """
    choice = []
    for vertex, (operator, split) in enumerate(zip(problem.graph.operators, splits, strict=True)):
        index = problem.choice(vertex, tuple(split.get(dim, 1) for dim in operator.extents))
        assert index is not None, f"{dict(split)} is no configuration of {operator.name}"
        choice.append(index)
    return with_best_fan_outs(problem, choice)


def with_best_fan_outs(problem: Problem, choice: Sequence[int]) -> tuple[int, ...]:
    """Return a strategy in which each fan-out has the configuration that is cheapest between its neighbours."""
    found = list(choice)
    for vertex, operator in enumerate(problem.graph.operators):
        # No two of them are neighbours.
        if operator.is_fan_out:
            found[vertex] = int(problem.tables.costs_beside(vertex, choice).argmin())
    return tuple(found)


def cheapest(problem: Problem, choices: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """Return the cheapest of some strategies, the first of equals."""
    return min(choices, key=problem.tables.evaluate)


def complete(
    problem: Problem, fixed: Mapping[str, Mapping[str, int]], on_progress: Callable[[str, float], None] | None = None
) -> Solution:
    """Return the cheapest strategy in which the named layers have the given configurations.

    fixed: for a layer, the split factor of each dim that is split. Raises ConfigurationError for a layer or a
    dim that does not exist, or a configuration that the number of devices does not allow.
    """
    choice = {}
    for name, splits in fixed.items():
        if name not in problem.graph.index:
            raise ConfigurationError(f"there is no layer {name!r} in graph {problem.graph.name!r}")
        operator = problem.graph[name]
        unknown = set(splits) - set(operator.extents)
        if unknown:
            raise ConfigurationError(
                f"layer {name!r} has no dim {', '.join(sorted(unknown))}; its dims are {', '.join(operator.extents)}"
            )
        vertex = problem.graph.index[name]
        found = problem.choice(vertex, tuple(splits.get(dim, 1) for dim in operator.extents))
        if found is None:
            raise ConfigurationError(
                f"{dict(splits)} is no configuration of layer {name!r} ({operator.extents}) "
                f"on {problem.num_devices} devices"
            )
        choice[vertex] = found
    solution = solve(restrict(problem.tables, choice), on_progress=on_progress)
    return replace(solution, choice=tuple(choice.get(v, c) for v, c in enumerate(solution.choice)))


def restrict(tables: CostTables, choice: Mapping[int, int]) -> CostTables:
    """Return the problem in which the given vertices have one configuration left, that of the given index.

    Raises TablesError for a vertex or a configuration that does not exist.
    """
    for vertex, index in choice.items():
        if not 0 <= vertex < tables.num_vertices:
            raise TablesError(f"there is no vertex {vertex}; they are 0 to {tables.num_vertices - 1}")
        if not 0 <= index < tables.domain_sizes[vertex]:
            raise TablesError(
                f"vertex {tables.vertex_names[vertex]!r} has no configuration {index}; "
                f"they are 0 to {tables.domain_sizes[vertex] - 1}"
            )
    return restricted(tables, {vertex: np.array([index], dtype=np.int32) for vertex, index in choice.items()})
