"""What a search may use, what it has found so far, and what it answers: a strategy, and what is proven about it."""

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
"""A step of a search that looks at hardly any cells of tables takes about as long as looking at so many."""


class OutOfTimeError(Exception):
    """The limit of time, or of work, was reached; the search ends with what it has."""


@dataclass(slots=True, kw_only=True)
class SearchBudget:
    """Limits of one search, and what it has used so far.

    Attributes:
        max_work: Cells of tables that may be looked at; unlike a deadline it gives the same answer on any machine.
        work: Cells that were looked at, with `CELLS_OF_A_STEP` for each step.
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
        """Count a step that looks at some cells of tables; raise OutOfTimeError when a limit has been reached."""
        self.work += cells + CELLS_OF_A_STEP
        if self.work > self.max_work:
            raise OutOfTimeError
        if self.deadline_s is not None and time.perf_counter() > self.deadline_s:
            raise OutOfTimeError

    def holds(self, num_bytes: int) -> None:
        """Note that the solver's arrays take this much memory."""
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
    """What is known so far: the best strategy, a bound below every strategy, and how much was left to decide.

    ordering: the name of the ordering by which that was, or is to be, eliminated. best: the cost of the best strategy,
    +inf before the first, and the strategy, as configuration numbers in the tables. The cost is what the tables
    themselves say of it, whatever a reduced problem made of it.
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
        """[V] the best strategy; without entries before the first."""
        return self.best[1]

    @property
    def limit(self) -> float:
        """The cost above which a strategy is of no interest."""
        return self.cost + RELATIVE_TOLERANCE * abs(self.cost)

    @property
    def gap(self) -> float:
        """How much of the cost a cheaper strategy could at most save; 1 while there is no strategy."""
        return (self.cost - self.lower_bound) / self.cost if 0 < self.cost < np.inf else float(self.cost > 0)

    def offer(self, choice: Mapping[int, int]) -> None:
        """Take a strategy over if it is cheaper."""
        found = self._costed(choice)
        if found[0] < self.cost:
            self.best = found  # one assignment: an interrupt leaves the old strategy or the new one

    def settle(self, choice: Mapping[int, int]) -> None:
        """Take over what is proven to be cheapest, at equal cost, too: the tie rule decides, not what came first."""
        found = self._costed(choice)
        if found[0] <= self.cost:
            self.best = found
        self.prove()

    def raise_bound(self, bound: float) -> None:
        """Take a proven lower bound over if it is higher."""
        self.lower_bound = max(self.lower_bound, min(bound, self.cost))

    def prove(self) -> None:
        """Note that no strategy is cheaper than the best one."""
        self.lower_bound, self.exact = self.cost, True

    def _costed(self, choice: Mapping[int, int]) -> tuple[float, tuple[int, ...]]:
        strategy = tuple([choice[v] for v in range(self.tables.num_vertices)])
        return self.tables.evaluate(strategy), strategy


@dataclass(frozen=True, slots=True, kw_only=True)
class Statistics:
    """How the work went; every number is deterministic for the same input and limits, unless a time limit was hit.

    num_configurations: configurations of all vertices together, as given.
    num_configurations_left: those that no reduction dropped, when the final elimination (or the branching) began.
    num_vertices_left: vertices with more than one of them.
    sweeps: passes of the bound.
    operations: combinations that the eliminations looked at, repeated blocks counted once.
    nodes: subproblems of the branching; 0 when one elimination sufficed.
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

    cost: F(G, φ) of `choice` (Eq. 1), in the unit of the tables.
    lower_bound: no strategy costs less than this; equals `cost` when `exact`.
    exact: `choice` is proven to be cheapest, up to the rounding of 8-byte floating-point sums.
    choice: [V] configuration index of each vertex.
    ordering: the ordering's name; with "auto", that of the one picked for what was left to eliminate, which is
        GenerateSeq's where little or nothing was.
    largest_dependent_set: M of section III-B for that ordering on the whole graph.
    time_s: wall-clock time from tables in memory to this answer.
    peak_memory_bytes: the tables it was given, and the most that the tables it made held at once, by its own count.
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
        """(cost - lower bound) ÷ cost: how much of the cost a cheaper strategy could at most save; 0 when exact."""
        return 0.0 if self.exact or self.cost == 0 else (self.cost - self.lower_bound) / self.cost
