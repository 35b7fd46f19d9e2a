"""What the solver answers: a strategy, and what is proven about it."""

from dataclasses import dataclass, field


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
