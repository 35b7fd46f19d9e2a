"""The communication scales at which the cheapest strategy changes, exactly.

The least cost over all strategies of A(φ) + s · B(φ) is a concave, piecewise linear function of s. Two strategies that
are optimal at two scales meet at a scale between them: where the optimum there costs as much as they do, they are
neighbours and this is a breakpoint; where it costs less, it is a third strategy, and both sides are looked at in turn
(Eisner & Severance 1976). Every breakpoint takes two solutions. It is walked from the machine itself, scale 1,
outwards, so that what is found is complete up to where it ends.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from pase.analysis.explanation.nearest import TIE, nearest
from pase.analysis.explanation.scaling import Line, ScaledTables
from pase.tables.cost_tables import CostTables

FARTHEST = 32.0
"""Scales from 1/32 to 32 are looked at."""
MAX_SOLUTIONS = 200
"""Of one side."""


class Optimum(Protocol):
    """What a solver has to give: a strategy, and whether it is proven to be cheapest."""

    @property
    def choice(self) -> tuple[int, ...]:
        """[V] configuration index of each vertex."""
        ...

    @property
    def exact(self) -> bool:
        """Whether no strategy is cheaper."""
        ...


class Optimise(Protocol):
    """A solver; known: strategies to start from."""

    def __call__(self, tables: CostTables, known: Sequence[Sequence[int]]) -> Optimum:
        """Return a cheapest strategy."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Breakpoint:
    """scale: from here on, away from 1, `choice` is a cheapest strategy, which differs least from the one before."""

    scale: float
    choice: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """Breakpoints from scale 1 outwards; searched_to: they are complete up to this scale."""

    breakpoints: tuple[Breakpoint, ...]
    searched_to: float

    def flip(self, vertex: int, configuration: int) -> tuple[float, int] | None:
        """Return (scale, configuration) at which a vertex first has another than the given one; None: nowhere."""
        for point in self.breakpoints:
            if point.choice[vertex] != configuration:
                return point.scale, point.choice[vertex]
        return None


NO_FLIPS = Side(breakpoints=(), searched_to=1.0)
"""Where none were looked for."""


def _everything_fits(_choice: Sequence[int]) -> bool:
    return True


def breakpoints(
    problem: ScaledTables,
    start: Sequence[int],
    optimise: Optimise,
    *,
    farthest: float = FARTHEST,
    max_solutions: int = MAX_SOLUTIONS,
    fits: Callable[[Sequence[int]], bool] = _everything_fits,
) -> Side:
    """Return the breakpoints between scale 1, where `start` is cheapest, and `farthest`, above 1 or below it.

    optimise: answers with strategies that fit, if not all do.
    """
    walk = _Walk(problem, optimise, max_solutions)
    first = problem.line(start)
    found: list[Breakpoint] = []
    choice, searched_to = tuple(start), farthest
    try:
        last = walk.best(farthest, (first,))
        for scale, line in walk.between(1.0, first, farthest, last):
            near = nearest((problem.compute, problem.communication), choice, line.choice)
            choice = near if fits(near) else line.choice
            if choice != (found[-1].choice if found else tuple(start)):
                found.append(Breakpoint(scale=scale, choice=choice))
    except _EnoughError:
        searched_to = walk.complete_to
    return Side(breakpoints=tuple(found), searched_to=searched_to)


class _EnoughError(Exception):
    """The number of solutions is used up, or one was not proven."""


class _Walk:
    """Finds optima, and counts them; complete_to: up to this scale all breakpoints are found."""

    def __init__(self, problem: ScaledTables, optimise: Optimise, max_solutions: int) -> None:
        self._problem = problem
        self._optimise = optimise
        self._left = max_solutions
        self.complete_to = 1.0

    def best(self, scale: float, known: Sequence[Line]) -> Line:
        """Return an optimum at a scale."""
        if not self._left:
            raise _EnoughError
        self._left -= 1
        solution = self._optimise(self._problem.at(scale), [line.choice for line in known])
        if not solution.exact:
            raise _EnoughError
        return self._problem.line(solution.choice)

    def between(self, start: float, near: Line, end: float, far: Line) -> Iterator[tuple[float, Line]]:
        """Yield (scale, strategy from there on) from `start`, where `near` is cheapest, to `end`, where `far` is."""
        if not near.is_parallel_to(far) and near.at(end) > far.at(end) * (1 + TIE):
            low, high = sorted((start, end))
            meeting = (far.compute - near.compute) / (near.communication - far.communication)
            meeting = min(max(meeting, low), high)
            middle = self.best(meeting, (near, far))
            if middle.at(meeting) >= near.at(meeting) * (1 - TIE):
                yield meeting, far
            else:
                yield from self.between(start, near, meeting, middle)
                yield from self.between(meeting, middle, end, far)
        self.complete_to = end
