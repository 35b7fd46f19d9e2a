"""`Weighted`: a problem whose configurations weigh something, with a limit on the weight of a strategy.

A price λ on weight makes an ordinary problem of it: every configuration costs λ times its weight more. Its optimum less
λ times the limit is a lower bound on every strategy within the limit (Lagrangian relaxation), for any λ of 0 or more.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import fsum

import numpy as np
from numpy.typing import NDArray

from pase.errors import SolverError
from pase.tables import CostTables, EdgeTable, FloatArray

LARGEST_SUM = 2.0**53
"""Sums of whole numbers up to this are exact."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Weighted:
    """Cost tables, and the weight of every configuration.

    weights: [V] the [K] weights of a vertex's configurations, whole numbers; vertices may share an array. limit: the
    most that a strategy may weigh.
    """

    tables: CostTables
    weights: tuple[FloatArray, ...]
    limit: float

    def weight(self, choice: Sequence[int]) -> float:
        """Return what a strategy weighs."""
        return fsum(float(weights[c]) for weights, c in zip(self.weights, choice, strict=True))

    def fits(self, choice: Sequence[int]) -> bool:
        """Return whether a strategy is within the limit."""
        return self.weight(choice) <= self.limit

    @cached_property
    def least_weight(self) -> float:
        """No strategy weighs less than this."""
        return fsum(float(weights.min()) for weights in self.weights)

    def above_least(self) -> "Weighted":
        """Return the same problem with every vertex's least weight taken off, and off the limit.

        Sums of priced weights are then no larger than they must be, so that little of the costs is rounded away.
        """
        known: dict[int, FloatArray] = {}
        for weights in self.weights:
            known.setdefault(id(weights), weights - weights.min())
        return Weighted(
            tables=self.tables,
            weights=tuple(known[id(weights)] for weights in self.weights),
            limit=self.limit - self.least_weight,
        )

    def priced(self, price: float) -> CostTables:
        """Return the tables with layer costs that hold the weight at a price; vertices that were alike stay alike."""
        return self._with_layers(lambda v: self.tables.layer_costs(v) + price * self.weights[v])

    def weight_alone(self) -> CostTables:
        """Return tables whose costs are weights, infinite where a cost is."""
        tables = self._with_layers(lambda v: np.where(np.isfinite(self.tables.layer_costs(v)), self.weights[v], np.inf))
        edges = tuple(
            EdgeTable(row_class=t.row_class, col_class=t.col_class, values=np.where(np.isfinite(t.values), 0.0, np.inf))
            for t in tables.edge_tables
        )
        return _replaced(tables, tables.vertex_costs, tables.vertex_table, edges)

    def with_alone(self, vertex: int, keep: NDArray[np.bool_]) -> "Weighted":
        """Return the problem in which a vertex has some of its configurations alone; numbers stay as they are."""
        weights = self.weights[vertex]
        least = np.where(keep, weights, weights[keep].max())  # what is left out must not count as light
        tables = self.tables
        costs = (*tables.vertex_costs, np.where(keep, tables.layer_costs(vertex), np.inf))
        references = (*tables.vertex_table[:vertex], len(costs) - 1, *tables.vertex_table[vertex + 1 :])
        return Weighted(
            tables=_replaced(tables, costs, references, tables.edge_tables),
            weights=(*self.weights[:vertex], least, *self.weights[vertex + 1 :]),
            limit=self.limit,
        )

    def _with_layers(self, costs_of: "LayerCosts") -> CostTables:
        numbers: dict[tuple[int, int], int] = {}
        costs: list[FloatArray] = []
        references = []
        for v, (table, weights) in enumerate(zip(self.tables.vertex_table, self.weights, strict=True)):
            key = table, id(weights)
            if key not in numbers:
                numbers[key] = len(costs)
                costs.append(costs_of(v))
            references.append(numbers[key])
        return _replaced(self.tables, tuple(costs), tuple(references), self.tables.edge_tables)


def verify_weighted(problem: Weighted) -> None:
    """Raise SolverError unless there is a whole number for every configuration, and a limit."""
    sizes = problem.tables.domain_sizes
    if [len(weights) for weights in problem.weights] != list(sizes):
        raise SolverError("weights must be one for each configuration of each vertex; make them for these tables")
    if not problem.limit >= 0:
        raise SolverError(f"the limit on weight is {problem.limit}; give a number of 0 or more")
    for weights in {id(weights): weights for weights in problem.weights}.values():
        if not (np.isfinite(weights).all() and (weights >= 0).all() and (weights == np.floor(weights)).all()):
            raise SolverError("a weight is not a whole number of 0 or more; give bytes, or scale them")
    if fsum(float(weights.max()) for weights in problem.weights) > LARGEST_SUM:
        raise SolverError(f"the weights add up to more than {LARGEST_SUM:.0f}; scale them")


LayerCosts = Callable[[int], FloatArray]


def _replaced(
    tables: CostTables, costs: tuple[FloatArray, ...], references: tuple[int, ...], edge_tables: tuple[EdgeTable, ...]
) -> CostTables:
    return CostTables(
        vertex_names=tables.vertex_names,
        vertex_costs=costs,
        vertex_table=references,
        edges=tables.edges,
        edge_tables=edge_tables,
        edge_table=tables.edge_table,
    )
