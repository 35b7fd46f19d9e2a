"""From an expert's rule, so many ways along such dims, to a configuration of every layer."""

from collections.abc import Mapping, Sequence

from pase.analysis.baselines.same_dims import DimClass
from pase.costs import Problem
from pase.costs.configurations import divisors
from pase.graph import Operator

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
