"""Budget, state and result of a search: the strategy and what is proven about it."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from pase.tables.cost_tables import CostTables

Progress = Callable[[str, float], None]

RELATIVE_TOLERANCE = 1e-9
"""Rounding allowance, relative to the best strategy's cost: nothing is dropped for being dearer by less."""

PROGRESS_INTERVAL_S = 0.1


CELLS_OF_A_STEP = 4096
"""Work charged for each step of a search, in cells: a step of few cells takes as long as evaluating this many."""


class OutOfTimeError(Exception):
    """The limit on time or work was reached; the search ends with its best result so far."""


@dataclass(slots=True, kw_only=True)
class SearchBudget:
    """Limits of one search, and the amounts used so far.

    Attributes:
        max_work: Table cells that may be evaluated; unlike a deadline it gives the same answer on any machine.
        work: Cells that were evaluated, with `CELLS_OF_A_STEP` added for each step.
    """

    started_s: float
    deadline_s: float | None
    solver_memory_bytes: int
    on_progress: Progress | None
    max_work: float = np.inf
    work: int = 0
    peak_bytes: int = 0
    sweeps: int = 0
    operations: int = 0
    nodes: int = 0
    reported_s: float = 0.0

    def check(self, cells: int = 0) -> None:
        """Count a step that evaluates some table cells; raise OutOfTimeError when a limit has been reached."""
        self.work += cells + CELLS_OF_A_STEP
        if self.work > self.max_work:
            raise OutOfTimeError
        if self.deadline_s is not None and time.perf_counter() > self.deadline_s:
            raise OutOfTimeError

    def holds(self, num_bytes: int) -> None:
        """Record that the solver's arrays take this much memory."""
        self.peak_bytes = max(self.peak_bytes, num_bytes)

    def progress(self, message: str, fraction: float) -> None:
        """Report progress, at most ten times a second."""
        if self.on_progress is None:
            return
        now = time.perf_counter()
        if now - self.reported_s >= PROGRESS_INTERVAL_S:
            self.reported_s = now
            self.on_progress(message, fraction)


@dataclass(slots=True, kw_only=True)
class Outcome:
    """Best strategy and lower bound so far, and statistics of the elimination.

    Attributes:
        ordering: Name of the ordering of the final elimination.
        best: Cost of the best strategy (+inf before the first), and its configuration numbers in the tables. The cost
            is evaluated on the original tables, not on a reduced problem.
    """

    tables: CostTables
    ordering: str
    lower_bound: float = 0.0
    exact: bool = False
    num_configurations_left: int = 0
    num_vertices_left: int = 0
    best: tuple[float, tuple[int, ...]] = (np.inf, ())

    @property
    def cost(self) -> float:
        """The best strategy's cost."""
        return self.best[0]

    @property
    def choice(self) -> tuple[int, ...]:
        """[V] the best strategy; empty before the first."""
        return self.best[1]

    @property
    def limit(self) -> float:
        """Cost above which strategies are ignored."""
        return self.cost + RELATIVE_TOLERANCE * abs(self.cost)

    @property
    def gap(self) -> float:
        """Largest relative saving that a cheaper strategy could still bring; 1 before the first strategy."""
        return (self.cost - self.lower_bound) / self.cost if 0 < self.cost < np.inf else float(self.cost > 0)

    def offer(self, choice: Mapping[int, int]) -> None:
        """Adopt a strategy if it is cheaper."""
        found = self._costed(choice)
        if found[0] < self.cost:
            self.best = found  # one assignment: an interrupt sees the old strategy or the new one

    def settle(self, choice: Mapping[int, int]) -> None:
        """Adopt a strategy proven to be cheapest, also at equal cost, so that ties follow the tie rule."""
        found = self._costed(choice)
        if found[0] <= self.cost:
            self.best = found
        self.prove()

    def raise_bound(self, bound: float) -> None:
        """Adopt a proven lower bound if it is higher."""
        self.lower_bound = max(self.lower_bound, min(bound, self.cost))

    def prove(self) -> None:
        """Record that no strategy is cheaper than the best one."""
        self.lower_bound, self.exact = self.cost, True

    def _costed(self, choice: Mapping[int, int]) -> tuple[float, tuple[int, ...]]:
        strategy = tuple([choice[v] for v in range(self.tables.num_vertices)])
        return self.tables.evaluate(strategy), strategy


@dataclass(frozen=True, slots=True, kw_only=True)
class Statistics:
    """Statistics of a search; deterministic for the same input and limits, unless a time limit was hit.

    Attributes:
        num_configurations: Total number of configurations in the tables.
        num_configurations_left: Configurations that remained when the final elimination (or the branching) began.
        num_vertices_left: Vertices with more than one remaining configuration.
        sweeps: Passes of the bound.
        operations: Combinations that the eliminations evaluated, repeated blocks counted once.
        nodes: Subproblems of the branching; 0 when one elimination sufficed.
    """

    num_configurations: int = 0
    num_configurations_left: int = 0
    num_vertices_left: int = 0
    sweeps: int = 0
    operations: int = 0
    nodes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """A strategy and its certificate.

    Attributes:
        cost: F(G, φ) of `choice` (Eq. 1), in the unit of the tables.
        lower_bound: No strategy costs less than this; equals `cost` when `exact`.
        exact: Whether `choice` is proven to be cheapest, up to the rounding of 8-byte floating-point sums.
        choice: [V] configuration index of each vertex.
        ordering: Name of the ordering. With "auto", the one selected for the remaining elimination, which is
            GenerateSeq's where little or nothing remained.
        largest_dependent_set: M of section III-B for that ordering on the whole graph.
        time_s: Wall-clock time from tables in memory to this answer.
        peak_memory_bytes: Size of the given tables plus the peak size of the tables that the solver made, by its own
            count.
    """

    cost: float
    lower_bound: float
    exact: bool
    choice: tuple[int, ...]
    ordering: str
    largest_dependent_set: int
    time_s: float
    peak_memory_bytes: int
    statistics: Statistics = field(default_factory=Statistics)

    @property
    def gap(self) -> float:
        """(cost - lower bound) ÷ cost: largest relative saving that a cheaper strategy could bring; 0 when exact."""
        return 0.0 if self.exact or self.cost == 0 else (self.cost - self.lower_bound) / self.cost
