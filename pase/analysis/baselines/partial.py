"""Partial strategies: some layers' configurations are given, the others are chosen as well as they can be."""

from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np

from pase.costs import Problem
from pase.errors import ConfigurationError, TablesError
from pase.solver import Solution, solve
from pase.tables.cost_tables import CostTables, restricted


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
