"""`Weighted`: a problem whose configurations weigh something, with a limit on the weight of a strategy.

A strategy weighs what its configurations and its edges weigh, and of each group of peaks that of the configuration that
has the greatest.

Without peaks that is a sum, and a price λ on weight makes an ordinary problem of it: what weighs something costs λ
times its weight more. Its optimum less λ times the limit is a lower bound on every strategy within the limit
(Lagrangian relaxation), for any λ of 0 or more.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from math import fsum

import numpy as np
from numpy.typing import NDArray

from pase.errors import SolverError
from pase.tables.cost_tables import CostTables, EdgeTable, FloatArray, IndexArray

LARGEST_SUM = 2.0**53
"""Sums of whole numbers up to this are exact."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Weighted:
    """Cost tables, and the weight of every configuration.

    weights: [V] the [K] weights of a vertex's configurations, whole numbers; vertices may share an array. limit: the
    most that a strategy may weigh. edge_weights: [E] what an edge weighs, as its costs are told; None for one that
    weighs nothing, () where none does. peaks: [groups, V] the [K] peaks of a vertex's configurations; of each group the
    greatest of a strategy is part of its weight.
    """

    tables: CostTables
    weights: tuple[FloatArray, ...]
    limit: float
    edge_weights: tuple[EdgeTable | None, ...] = ()
    peaks: tuple[tuple[FloatArray, ...], ...] = ()

    def weight(self, choice: Sequence[int]) -> float:
        """Return what a strategy weighs."""
        own = [float(weights[c]) for weights, c in zip(self.weights, choice, strict=True)]
        return fsum([*own, *(self.edge_weight(e, choice) for e in self.weighing_edges), *self.greatest(choice)])

    def greatest(self, choice: Sequence[int]) -> tuple[float, ...]:
        """Return [groups] the greatest peak of a strategy's configurations."""
        return tuple(max(float(p[c]) for p, c in zip(group, choice, strict=True)) for group in self.peaks)

    def edge_weight(self, edge: int, choice: Sequence[int]) -> float:
        """Return what an edge of a strategy weighs."""
        (u, v), weights = self.tables.edges[edge], self.edge_weights[edge]
        return 0.0 if weights is None else weights.cost(choice[u], choice[v])

    def weights_beside(self, vertex: int, choice: Sequence[int]) -> FloatArray:
        """Return the [K] weights of the strategies that have any configuration of a vertex, and a choice elsewhere."""
        with_each = self.weight(choice) + self.changes(vertex, choice)
        for group, now in zip(self.peaks, self.greatest(choice), strict=True):
            others = (float(p[c]) for v, (p, c) in enumerate(zip(group, choice, strict=True)) if v != vertex)
            with_each += np.maximum(group[vertex], max(others, default=0.0)) - now
        return with_each

    def changes(self, vertex: int, choice: Sequence[int]) -> FloatArray:
        """Return by how much the [K] configurations of a vertex change the weight of a choice, peaks left out."""
        own = self.weights[vertex]
        for e in self.tables.incident[vertex] if self.edge_weights else ():
            weights = self.edge_weights[e]
            if weights is not None:
                u, v = self.tables.edges[e]
                own = own + (weights.column(choice[v]) if u == vertex else weights.row(choice[u]))
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
        for weights in self.weights:
            known.setdefault(id(weights), weights - weights.min())
        of_edges: dict[int, EdgeTable | None] = {}
        for table in self.edge_weights:
            least = table and replace(table, values=table.values - table.values.min())
            of_edges.setdefault(id(table), least)
        return replace(
            self,
            weights=tuple(known[id(weights)] for weights in self.weights),
            edge_weights=tuple(of_edges[id(table)] for table in self.edge_weights),
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

    def without_peaks(self, low: Sequence[float], high: Sequence[float]) -> "Weighted | None":
        """Return the problem of the strategies whose greatest peaks are from `low` to `high`, which count as `low`.

        It has those whose peaks are lower, too. low, high: [groups]. None where some vertex has only higher ones.
        """
        known: dict[tuple[int, ...], tuple[int, FloatArray]] = {}
        costs: list[FloatArray] = []
        found = []
        for v, (table, own) in enumerate(zip(self.tables.vertex_table, self.weights, strict=True)):
            key = table, id(own), *(id(group[v]) for group in self.peaks)
            if key not in known:
                keep = np.logical_and.reduce([group[v] <= most for group, most in zip(self.peaks, high, strict=True)])
                if not keep.any():
                    return None
                known[key] = len(costs), np.where(keep, own, own[keep].max())
                costs.append(np.where(keep, self.tables.vertex_costs[table], np.inf))
            found.append(known[key])
        return replace(
            self,
            tables=replace(self.tables, vertex_costs=tuple(costs), vertex_table=tuple(number for number, _ in found)),
            weights=tuple(weights for _, weights in found),
            limit=self.limit - fsum(low),
            peaks=(),
        )

    def _least_of_edge(self, edge: int) -> float:
        weights = self.edge_weights[edge]
        return 0.0 if weights is None else float(weights.values.min())

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
        joined, edge_table = self._joined
        edge_tables = (replace(table, values=cost_of(table.values, weights)) for table, weights in joined)
        return replace(
            tables,
            vertex_costs=tuple(costs),
            vertex_table=tuple(vertex_table),
            edge_tables=tuple(edge_tables),
            edge_table=edge_table,
        )

    @cached_property
    def _joined(self) -> tuple[list[tuple[EdgeTable, FloatArray]], tuple[int, ...]]:
        """Distinct edges' costs, layouts told apart as weights do, and the weights in their shape; [E] which one."""
        tables = self.tables
        numbers: dict[tuple[int, int], int] = {}
        found: list[tuple[EdgeTable, FloatArray]] = []
        edge_table = []
        for e, number in enumerate(tables.edge_table):
            weights = self.edge_weights[e] if self.edge_weights else None
            key = number, id(weights)
            if key not in numbers:
                numbers[key] = len(found)
                table = tables.edge_tables[number]
                if weights is None:
                    found.append((table, np.zeros(table.values.shape)))
                else:
                    row_class, rows = _pairs(table.row_class, weights.row_class)
                    col_class, cols = _pairs(table.col_class, weights.col_class)
                    values = table.values[rows[0]][:, cols[0]]
                    found.append(
                        (
                            EdgeTable(row_class=row_class, col_class=col_class, values=values),
                            weights.values[rows[1]][:, cols[1]],
                        )
                    )
            edge_table.append(numbers[key])
        return found, tuple(edge_table)


def _pairs(first: IndexArray, second: IndexArray) -> tuple[IndexArray, tuple[IndexArray, IndexArray]]:
    """Return [K] the number of each pair of classes, and the classes of either of each number."""
    width = int(second.max()) + 1
    values, number = np.unique(first.astype(np.int64) * width + second, return_inverse=True)
    return number.astype(np.int32), ((values // width).astype(np.int32), (values % width).astype(np.int32))


def verify_weighted(problem: Weighted) -> None:
    """Raise SolverError unless there is a whole number for every configuration, and a limit."""
    tables = problem.tables
    sizes = list(tables.domain_sizes)
    if any([len(of_vertex) for of_vertex in group] != sizes for group in (problem.weights, *problem.peaks)):
        raise SolverError("weights must be one for each configuration of each vertex; make them for these tables")
    shapes = [None if table is None else table.shape for table in problem.edge_weights]
    expected = [(sizes[u], sizes[v]) for u, v in tables.edges]
    if shapes and (
        len(shapes) != len(expected) or any(s not in (None, e) for s, e in zip(shapes, expected, strict=True))
    ):
        raise SolverError("weights of edges must be one for each pair of configurations; make them for these tables")
    if not problem.limit >= 0:
        raise SolverError(f"the limit on weight is {problem.limit}; give a number of 0 or more")
    summed = [*problem.weights, *(table.values for table in problem.edge_weights if table is not None)]
    for weights in {id(weights): weights for weights in (*summed, *chain(*problem.peaks))}.values():
        if not (np.isfinite(weights).all() and (weights >= 0).all() and (weights == np.floor(weights)).all()):
            raise SolverError("a weight is not a whole number of 0 or more; give bytes, or scale them")
    greatest = (max(float(peaks.max()) for peaks in group) for group in problem.peaks)
    if fsum([*(float(weights.max()) for weights in summed), *greatest]) > LARGEST_SUM:
        raise SolverError(f"the weights add up to more than {LARGEST_SUM:.0f}; scale them")


CostOf = Callable[[FloatArray, FloatArray], FloatArray]
