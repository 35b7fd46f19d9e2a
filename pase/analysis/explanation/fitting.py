"""The same under a limit on the memory of a device: where the alternative without it does not fit, one that does."""

from dataclasses import dataclass
from math import inf

import numpy as np

from pase.analysis.explanation.alternatives import Alternative, Alternatives
from pase.analysis.explanation.searching import LIMITED_TIME_S, Searching
from pase.errors import SolverError
from pase.solver import Solution, solve_limited
from pase.tables.cost_tables import CostTables, FloatArray, IndexArray


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Fitting:
    """Finds cheapest strategies that fit, under a condition on one vertex.

    optimum: the cheapest that fits. free: finds them whether they fit or not, and is all there is without a limit.
    """

    tables: CostTables
    optimum: Solution
    search: Searching
    free: Alternatives

    def without(self, vertex: int, configuration: int) -> Alternative | None:
        """Return the cheapest strategy in which a vertex has another configuration; None if none is found that fits."""
        rows = np.arange(self.tables.domain_sizes[vertex], dtype=np.int32)
        return self.among(vertex, np.delete(rows, configuration))

    def among(self, vertex: int, rows: IndexArray) -> Alternative | None:
        """Return the cheapest strategy in which a vertex has one of some configurations; None if none is found."""
        if self.optimum.choice[vertex] in rows:
            return Alternative(total_cost=self.optimum.cost, choice=self.optimum.choice, is_exact=self.optimum.exact)
        found = self.free.among(vertex, rows)
        if found is None or self.search.fits(found.choice):
            return found
        return self._limited(vertex, rows)

    def _limited(self, vertex: int, rows: IndexArray) -> Alternative | None:
        weighted = self.search.weighted(self.tables)
        assert weighted is not None
        keep = np.zeros(self.tables.domain_sizes[vertex], dtype=bool)
        keep[rows] = True
        beside = self.tables.costs_beside(vertex, self.optimum.choice)
        fitting = weighted.weights_beside(vertex, self.optimum.choice) <= weighted.limit
        beside[~(keep & fitting)] = inf
        start = list(self.optimum.choice)
        start[vertex] = int(beside.argmin())
        try:
            limited = solve_limited(
                weighted.with_alone(vertex, keep),
                time_limit_s=self.search.time_limit_s or LIMITED_TIME_S,
                known=[start] if np.isfinite(beside.min()) else [],
            )
        except SolverError:  # nothing fits, or nothing that does was found in time
            return None
        solution = limited.solution
        return Alternative(total_cost=solution.cost, choice=solution.choice, is_exact=solution.exact)

    def weights_beside(self, vertex: int, choice: tuple[int, ...] | None = None) -> FloatArray:
        """Return the [K] bytes that a strategy, by default the optimum, takes with each configuration of a vertex."""
        assert self.search.limited is not None
        return self.search.limited.weights_beside(vertex, self.optimum.choice if choice is None else choice)
