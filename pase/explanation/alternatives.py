"""The cheapest strategy under a condition on one layer, for every layer in turn: runner-ups and what a choice costs.

Solving the whole problem once for each layer would do. What the answer needs is less: strategies within a few per
cent of the optimum leave most layers one configuration (`pase.solver.near_optimal`), and between those the problem
falls apart into islands, of which only the layer's own has to be solved again. An answer above the limit proves
nothing, and is looked for again under a higher one, at last in the whole problem.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pase.explanation.searching import Searching
from pase.explanation.subproblems import Island, costs_beside, edges_of, islands
from pase.solver import Solution, near_optimal
from pase.tables import CostTables, IndexArray, restricted

SLACKS = (3e-5, 3e-4, 0.001, 0.003, 0.007, 0.015, 0.03, 0.06, 0.12, 0.3)
"""Limits that are tried one after the other, above the optimum, as parts of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """A cheapest strategy under a condition. is_exact: whether that is proven."""

    total_cost: float
    choice: tuple[int, ...]
    is_exact: bool


class Alternatives:
    """Finds cheapest strategies under a condition on one vertex; narrowed problems are made when first needed."""

    def __init__(self, tables: CostTables, optimum: Solution, search: Searching | None = None) -> None:
        """Take a problem, its solution, and how to search for others; memory is no matter here."""
        self._tables = tables
        self._optimum = optimum
        self._search = search or Searching()
        self._best = self._answer(optimum.choice, optimum.exact)
        self._stages: dict[int, tuple[tuple[IndexArray, ...], dict[int, Island]]] = {}

    def without(self, vertex: int, configuration: int) -> Alternative | None:
        """Return the cheapest strategy in which a vertex has another configuration; None if it has no other."""
        rows = np.arange(self._tables.domain_sizes[vertex], dtype=np.int32)
        return self.among(vertex, np.delete(rows, configuration))

    def among(self, vertex: int, rows: IndexArray) -> Alternative | None:
        """Return the cheapest strategy in which a vertex has one of some configurations; None if there are none."""
        if not len(rows):
            return None
        if self._optimum.choice[vertex] in rows:
            return self._best
        enough = 0.0  # once a search was in vain, the limit that what it found is sure to be within
        for number, slack in enumerate(SLACKS):
            limit = self._optimum.cost * (1 + slack)
            if limit < enough:
                continue
            found = self._near(number, vertex, rows)
            if found is not None and found.total_cost <= limit:
                return found
            if found is not None:
                enough = min(enough or found.total_cost, found.total_cost)
        start = list(self._optimum.choice)
        beside = costs_beside(self._tables, vertex, start, edges_of(self._tables)[vertex])[rows]
        start[vertex] = int(beside.argmin())
        solution = self._search.unlimited(restricted(self._tables, {vertex: rows}), [start])
        choice = list(solution.choice)
        choice[vertex] = int(rows[choice[vertex]])
        return self._answer(choice, solution.exact)

    def _near(self, number: int, vertex: int, rows: IndexArray) -> Alternative | None:
        """Return the cheapest of what a stage has left, the answer if it is within the limit; None if nothing is."""
        kept, parts = self._stage(number)
        left = np.flatnonzero(np.isin(kept[vertex], rows)).astype(np.int32)
        if not len(left) or vertex not in parts:
            return None
        island = parts[vertex]
        at = island.vertices.index(vertex)
        present = island.present(self._optimum.choice)
        beside = costs_beside(island.tables, at, present, edges_of(island.tables)[at])[left]
        present[at] = int(beside.argmin())  # a start: the others as they are
        solution = self._search.unlimited(restricted(island.tables, {at: left}), [present])
        choice = list(solution.choice)
        choice[at] = int(left[choice[at]])
        whole = list(self._optimum.choice)
        for v, c in island.numbered(choice).items():
            whole[v] = c
        return self._answer(whole, solution.exact and self._optimum.exact)

    def _stage(self, number: int) -> tuple[tuple[IndexArray, ...], dict[int, Island]]:
        if number not in self._stages:
            kept = near_optimal(self._tables, self._optimum.cost * (1 + SLACKS[number]))
            self._stages[number] = kept, dict(islands(self._tables, kept))
        return self._stages[number]

    def _answer(self, choice: Sequence[int], is_exact: bool) -> Alternative:
        return Alternative(total_cost=self._tables.evaluate(choice), choice=tuple(choice), is_exact=is_exact)
