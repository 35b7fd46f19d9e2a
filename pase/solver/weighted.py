"""`Weighted`: a problem whose configurations weigh something, with a limit on the weight of a strategy.

A strategy weighs what its configurations and its edges weigh, and the greatest of its configurations' peaks.

Without peaks that is a sum, and a price λ on weight makes an ordinary problem of it: what weighs something costs λ
times its weight more. Its optimum less λ times the limit is a lower bound on every strategy within the limit
(Lagrangian relaxation), for any λ of 0 or more.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
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
    most that a strategy may weigh. edge_weights: [E] what the pairs of an edge's layouts weigh, in the shape of its
    table's values, None for one that weighs nothing; () where no edge does. peaks: [V] the [K] peaks of a vertex's
    configurations, of which the greatest of a strategy is part of its weight; () where there are none.
    """

    tables: CostTables
    weights: tuple[FloatArray, ...]
    limit: float
    edge_weights: tuple[FloatArray | None, ...] = ()
    peaks: tuple[FloatArray, ...] = ()

    def weight(self, choice: Sequence[int]) -> float:
        """Return what a strategy weighs."""
        own = [float(weights[c]) for weights, c in zip(self.weights, choice, strict=True)]
        return fsum([*own, *(self.edge_weight(e, choice) for e in self.weighing_edges)]) + self.peak(choice)

    def peak(self, choice: Sequence[int]) -> float:
        """Return the greatest peak of a strategy's configurations."""
        return max((float(peaks[c]) for peaks, c in zip(self.peaks, choice, strict=False)), default=0.0)

    def edge_weight(self, edge: int, choice: Sequence[int]) -> float:
        """Return what an edge of a strategy weighs."""
        weights = self.edge_weights[edge]
        if weights is None:
            return 0.0
        (u, v), table = self.tables.edges[edge], self.tables.edge(edge)
        return float(weights[table.row_class[choice[u]], table.col_class[choice[v]]])

    def weights_beside(self, vertex: int, choice: Sequence[int]) -> FloatArray:
        """Return the [K] weights of the strategies that have any configuration of a vertex, and a choice elsewhere."""
        with_each = self.weight(choice) + self.changes(vertex, choice)
        if self.peaks:
            others = (float(p[c]) for v, (p, c) in enumerate(zip(self.peaks, choice, strict=True)) if v != vertex)
            with_each += np.maximum(self.peaks[vertex], max(others, default=0.0)) - self.peak(choice)
        return with_each

    def changes(self, vertex: int, choice: Sequence[int]) -> FloatArray:
        """Return by how much the [K] configurations of a vertex change the weight of a choice, peaks left out."""
        own = self.weights[vertex]
        for e in self.tables.incident[vertex] if self.edge_weights else ():
            weights = self.edge_weights[e]
            if weights is not None:
                (u, v), table = self.tables.edges[e], self.tables.edge(e)
                if u == vertex:
                    own = own + weights[:, table.col_class[choice[v]]].take(table.row_class)
                else:
                    own = own + weights[table.row_class[choice[u]]].take(table.col_class)
        changes: FloatArray = own - own[choice[vertex]]
        return changes

    def fits(self, choice: Sequence[int]) -> bool:
        """Return whether a strategy is within the limit."""
        return self.weight(choice) <= self.limit

    @cached_property
    def weighing_edges(self) -> tuple[int, ...]:
        """The numbers of the edges that weigh anything."""
        return tuple(e for e, weights in enumerate(self.edge_weights) if weights is not None)

    @cached_property
    def least_weight(self) -> float:
        """No strategy weighs less than this."""
        return fsum([*(float(w.min()) for w in self.weights), *(self._least_of_edge(e) for e in self.weighing_edges)])

    def above_least(self) -> "Weighted":
        """Return the same problem with the least weight of every vertex and edge taken off, and off the limit.

        Sums of priced weights are then no larger than they must be, so that little of the costs is rounded away.
        """
        known: dict[int, FloatArray] = {}
        for weights in (*self.weights, *self.edge_weights):
            if weights is not None:
                known.setdefault(id(weights), weights - weights.min())
        return replace(
            self,
            weights=tuple(known[id(weights)] for weights in self.weights),
            edge_weights=tuple(None if w is None else known[id(w)] for w in self.edge_weights),
            limit=self.limit - self.least_weight,
        )

    def priced(self, price: float) -> CostTables:
        """Return the tables with costs that hold the weight at a price; what was alike stays alike."""
        return self._with_costs(lambda costs, weights: costs + price * weights)

    def weight_alone(self) -> CostTables:
        """Return tables whose costs are weights, infinite where a cost is."""
        return self._with_costs(lambda costs, weights: np.where(np.isfinite(costs), weights, np.inf))

    def with_alone(self, vertex: int, keep: NDArray[np.bool_]) -> "Weighted":
        """Return the problem in which a vertex has some of its configurations alone; numbers stay as they are."""
        weights = self.weights[vertex]
        least = np.where(keep, weights, weights[keep].max())  # what is left out must not count as light
        tables = self.tables
        costs = (*tables.vertex_costs, np.where(keep, tables.layer_costs(vertex), np.inf))
        references = (*tables.vertex_table[:vertex], len(costs) - 1, *tables.vertex_table[vertex + 1 :])
        return replace(
            self,
            tables=replace(tables, vertex_costs=costs, vertex_table=references),
            weights=(*self.weights[:vertex], least, *self.weights[vertex + 1 :]),
        )

    def without_peaks(self, low: float, high: float) -> "Weighted | None":
        """Return the problem of the strategies whose greatest peak is from `low` to `high`, which counts as `low`.

        It has those whose peak is lower, too. None where some vertex has only higher ones.
        """
        number: dict[tuple[int, int, int], int] = {}
        costs: list[FloatArray] = []
        weights: list[FloatArray] = []
        for table, own, peaks in zip(self.tables.vertex_table, self.weights, self.peaks, strict=True):
            key = table, id(own), id(peaks)
            if key in number:
                continue
            number[key] = len(costs)
            keep = peaks <= high
            if not keep.any():
                return None
            costs.append(np.where(keep, self.tables.vertex_costs[table], np.inf))
            weights.append(np.where(keep, own, own[keep].max()))
        references = tuple(
            number[table, id(own), id(peaks)]
            for table, own, peaks in zip(self.tables.vertex_table, self.weights, self.peaks, strict=True)
        )
        return replace(
            self,
            tables=replace(self.tables, vertex_costs=tuple(costs), vertex_table=references),
            weights=tuple(weights[number] for number in references),
            limit=self.limit - low,
            peaks=(),
        )

    def _least_of_edge(self, edge: int) -> float:
        weights = self.edge_weights[edge]
        return 0.0 if weights is None else float(weights.min())

    def _with_costs(self, cost_of: "CostOf") -> CostTables:
        """Return the tables with other costs: those of costs and weights, of configurations and of pairs of layouts."""
        tables = self.tables
        numbers: dict[tuple[int, int], int] = {}
        costs: list[FloatArray] = []
        vertex_table = []
        for table, weights in zip(tables.vertex_table, self.weights, strict=True):
            key = table, id(weights)
            if key not in numbers:
                numbers[key] = len(costs)
                costs.append(cost_of(tables.vertex_costs[table], weights))
            vertex_table.append(numbers[key])
        edge_numbers: dict[tuple[int, int], int] = {}
        edge_tables: list[EdgeTable] = []
        edge_table = []
        for e, table in enumerate(tables.edge_table):
            of_edge = self.edge_weights[e] if self.edge_weights else None
            key = table, id(of_edge)
            if key not in edge_numbers:
                edge_numbers[key] = len(edge_tables)
                old = tables.edge_tables[table]
                nothing = np.zeros(old.values.shape) if of_edge is None else of_edge
                edge_tables.append(replace(old, values=cost_of(old.values, nothing)))
            edge_table.append(edge_numbers[key])
        return replace(
            tables,
            vertex_costs=tuple(costs),
            vertex_table=tuple(vertex_table),
            edge_tables=tuple(edge_tables),
            edge_table=tuple(edge_table),
        )


def verify_weighted(problem: Weighted) -> None:
    """Raise SolverError unless there is a whole number for every configuration, and a limit."""
    tables = problem.tables
    sizes = list(tables.domain_sizes)
    if [len(w) for w in problem.weights] != sizes or (problem.peaks and [len(p) for p in problem.peaks] != sizes):
        raise SolverError("weights must be one for each configuration of each vertex; make them for these tables")
    shapes = [None if w is None else w.shape for w in problem.edge_weights]
    if shapes and (
        len(shapes) != len(tables.edges)
        or any(shape not in (None, tables.edge(e).values.shape) for e, shape in enumerate(shapes))
    ):
        raise SolverError("weights of edges must be one for each pair of layouts; make them for these tables")
    if not problem.limit >= 0:
        raise SolverError(f"the limit on weight is {problem.limit}; give a number of 0 or more")
    summed = [w for w in (*problem.weights, *problem.edge_weights) if w is not None and w.size]
    for weights in {id(weights): weights for weights in (*summed, *problem.peaks)}.values():
        if not (np.isfinite(weights).all() and (weights >= 0).all() and (weights == np.floor(weights)).all()):
            raise SolverError("a weight is not a whole number of 0 or more; give bytes, or scale them")
    greatest = max((float(peaks.max()) for peaks in problem.peaks), default=0.0)
    if fsum(float(weights.max()) for weights in summed) + greatest > LARGEST_SUM:
        raise SolverError(f"the weights add up to more than {LARGEST_SUM:.0f}; scale them")


CostOf = Callable[[FloatArray, FloatArray], FloatArray]
