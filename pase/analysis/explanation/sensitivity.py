"""What another machine or another model would change: links by any factor, each figure by a fifth, other extents.

A strategy's cost is A(φ) + s · B(φ), computation and communication, where links are s times as slow as the machine's,
in latency and in bytes/s: under every cost model here a time for messages is proportional to latencies and inverse
bandwidths, and r of Eq. 1 to the latter. The least cost over all strategies is then a concave, piecewise linear
function of s. Two strategies that are optimal at two scales meet at a scale between them: where the optimum there costs
as much as they do, they are neighbours and this is a breakpoint; where it costs less, it is a third strategy, and both
sides are looked at in turn (Eisner & Severance 1976). Every breakpoint takes two solutions. It is walked from the
machine itself, scale 1, outwards, so that what is found is complete up to where it ends.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain

import numpy as np

from pase.analysis.explanation.constrained_search import (
    TIE,
    constrained_search,
    nearest,
    optimum_near,
    planned_choice,
    present_optimum,
)
from pase.costs import Problem
from pase.errors import MemoryLimitError, SolverError
from pase.machine import Machine
from pase.planning.plan import Plan
from pase.planning.planner import Progress, SearchSettings, search, settings_of, whole_graph
from pase.planning.problems import problem_of_plan
from pase.planning.steps import LayerChoice, TrainingStep, chosen_layer
from pase.solver import Solution
from pase.tables.cost_tables import CostTables

_FAR = 2.0**200


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A strategy and its cost at any scale, compute + s · communication."""

    choice: tuple[int, ...]
    compute: float
    communication: float

    def at(self, scale: float) -> float:
        return self.compute + scale * self.communication

    def is_parallel_to(self, other: "Line") -> bool:
        """Whether two strategies cost the same at every scale, as far as the solver can tell."""
        return abs(self.compute - other.compute) <= TIE * max(self.compute, other.compute) and abs(
            self.communication - other.communication
        ) <= TIE * max(self.communication, other.communication)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ScaledTables:
    """compute, communication: cost tables of one structure, which add up to the machine's own problem."""

    compute: CostTables
    communication: CostTables

    def at(self, scale: float) -> CostTables:
        return replace(
            self.compute,
            vertex_costs=tuple(
                a + scale * b for a, b in zip(self.compute.vertex_costs, self.communication.vertex_costs, strict=True)
            ),
            edge_tables=tuple(
                replace(a, values=a.values + scale * b.values)
                for a, b in zip(self.compute.edge_tables, self.communication.edge_tables, strict=True)
            ),
        )

    def line(self, choice: Sequence[int]) -> Line:
        return Line(
            choice=tuple(choice),
            compute=self.compute.evaluate(choice),
            communication=self.communication.evaluate(choice),
        )


def scaled_tables(problem_on: Callable[[Machine], Problem], machine: Machine) -> ScaledTables:
    """Return a problem at every communication scale.

    Args:
        problem_on: Returns the problem on a machine; it has the same configurations and edges on each.
        machine: The machine at scale 1.
    """
    free = problem_on(scaled_links(machine, 1 / _FAR)).tables
    slow = problem_on(scaled_links(machine, _FAR)).tables
    communication = replace(
        slow,
        vertex_costs=tuple(costs / _FAR for costs in slow.vertex_costs),
        edge_tables=tuple(replace(table, values=table.values / _FAR) for table in slow.edge_tables),
    )
    assert communication.vertex_table == free.vertex_table
    assert communication.edge_table == free.edge_table
    return ScaledTables(compute=free, communication=communication)


def scaled_links(machine: Machine, scale: float) -> Machine:
    """Return the machine with every latency × scale and every bandwidth ÷ scale."""
    return replace(
        machine,
        levels=tuple(
            replace(level, latency_s=level.latency_s * scale, bandwidth_bytes_per_s=level.bandwidth_bytes_per_s / scale)
            for level in machine.levels
        ),
    )


FARTHEST = 32.0
"""Scales from 1/32 to 32 are looked at."""
MAX_SOLUTIONS = 200
"""Searches for the flips of one side."""


Optimise = Callable[[CostTables, Sequence[Sequence[int]]], Solution]
"""Returns a cheapest strategy of a problem; given strategies to start from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """Breakpoints from scale 1 outwards; searched_to: they are complete up to this scale.

    A breakpoint is (scale, choice): from there on, away from 1, the choice is a cheapest strategy, which differs least
    from the one before.
    """

    breakpoints: tuple[tuple[float, tuple[int, ...]], ...]
    searched_to: float

    def flip(self, vertex: int, configuration: int) -> tuple[float, int] | None:
        """Return (scale, configuration) at which a vertex first has another than the given one; None: nowhere."""
        for scale, choice in self.breakpoints:
            if choice[vertex] != configuration:
                return scale, choice[vertex]
        return None


NO_FLIPS = Side(breakpoints=(), searched_to=1.0)
"""The flips of a side where none were looked for."""


class _EnoughError(Exception):
    """The number of solutions is used up, or one was not proven."""


def breakpoints(
    problem: ScaledTables,
    start: Sequence[int],
    optimise: Optimise,
    *,
    farthest: float = FARTHEST,
    max_solutions: int = MAX_SOLUTIONS,
    fits: Callable[[Sequence[int]], bool] = lambda _choice: True,
) -> Side:
    """Return the breakpoints between scale 1, where `start` is cheapest, and `farthest`, above 1 or below it.

    optimise: answers with strategies that fit, if not all do.
    """
    left, complete_to = max_solutions, 1.0

    def best(scale: float, known: Sequence[Line]) -> Line:
        nonlocal left
        if not left:
            raise _EnoughError
        left -= 1
        solution = optimise(problem.at(scale), [line.choice for line in known])
        if not solution.exact:
            raise _EnoughError
        return problem.line(solution.choice)

    def between(start: float, near: Line, end: float, far: Line) -> Iterator[tuple[float, Line]]:
        """Yield (scale, strategy from there on) from `start`, where `near` is cheapest, to `end`, where `far` is."""
        nonlocal complete_to
        if not near.is_parallel_to(far) and near.at(end) > far.at(end) * (1 + TIE):
            low, high = sorted((start, end))
            meeting = (far.compute - near.compute) / (near.communication - far.communication)
            meeting = min(max(meeting, low), high)
            middle = best(meeting, (near, far))
            if middle.at(meeting) >= near.at(meeting) * (1 - TIE):
                yield meeting, far
            else:
                yield from between(start, near, meeting, middle)
                yield from between(meeting, middle, end, far)
        complete_to = end

    first, choice = problem.line(start), tuple(start)
    found: list[tuple[float, tuple[int, ...]]] = []
    try:
        for scale, line in between(1.0, first, farthest, best(farthest, (first,))):
            near = nearest((problem.compute, problem.communication), choice, line.choice)
            choice = near if fits(near) else line.choice
            if choice != (found[-1][1] if found else tuple(start)):
                found.append((scale, choice))
    except _EnoughError:
        return Side(breakpoints=tuple(found), searched_to=complete_to)
    return Side(breakpoints=tuple(found), searched_to=farthest)


CHANGE = 0.2
"""Figures are taken this much lower and higher."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sensitivity:
    """What one changed figure does.

    figure: its name. factor: what it is multiplied by. is_used: times, or what fits, depend on it at all; nothing
    moves where they do not. is_proven: the best strategy is proven to be. time_change: of the best strategy's time, as
    a part of that with the machine's own figures; None where nothing was found that fits. regret: by how much the
    present plan would be dearer than the best one then, as a part of the latter; None where it does not fit then.
    moves: the layers whose configuration would be another, and what it would be.
    """

    figure: str
    factor: float
    is_used: bool
    is_proven: bool
    time_change: float | None = None
    regret: float | None = None
    moves: tuple[tuple[str, LayerChoice], ...] = ()


def sensitivity(
    plan: Plan, *, change: float = CHANGE, time_limit_s: float | None = None, on_progress: Progress | None = None
) -> tuple[Sensitivity, ...]:
    """Return what each figure of the plan's machine, `change` lower and higher, would change.

    The plan's own strategy stands for the present where it is a cheapest one; else the cheapest nearest to it does.
    Layers of a plan of one stage keep their modes. With several stages the plan's own strategy stands for the present
    in any case; each figure takes a search, of as many stages and micro-batches and the modes that its layers have.
    """
    under = _within_modes(plan, time_limit_s, on_progress) if plan.num_groups == 1 else _searched(plan, time_limit_s)
    every = [(*figure, factor) for figure in figures(plan) for factor in (1 - change, 1 + change)]
    found = []
    for number, (figure, scaled, factor) in enumerate(every):
        found.append(under(Sensitivity(figure=figure, factor=factor, is_used=True, is_proven=True), scaled(factor)))
        if on_progress:
            on_progress(f"searching with another {figure}", (number + 1) / len(every))
    return tuple(found)


_Under = Callable[[Sensitivity, Plan], Sensitivity]
"""Returns what a changed figure does, given its name and factor, and the plan with it."""


def _within_modes(plan: Plan, time_limit_s: float | None, on_progress: Progress | None) -> _Under:
    """Return what a changed figure does to a plan of one stage, whose layers keep their modes."""
    problem = problem_of_plan(plan)
    choice = planned_choice(plan, problem)
    search = constrained_search(plan, problem, time_limit_s)
    present = present_optimum(plan, problem.tables, choice, search, on_progress)
    present_s = present.cost * _seconds(plan.machine, plan.cost_unit)

    def under(figure: Sensitivity, other: Plan) -> Sensitivity:
        tables = problem_of_plan(plan, machine=other.machine).tables
        limit, there = other.device_memory_bytes, search
        if search.limit is not None and limit is not None:
            there = replace(search, limit=replace(search.limit, limit_bytes=limit))
        seconds = _seconds(other.machine, plan.cost_unit)
        is_used = limit != plan.device_memory_bytes or not _are_same(problem.tables, tables)
        is_used |= seconds != _seconds(plan.machine, plan.cost_unit)
        try:
            # Of equals the nearest to the present one.
            fits = there.fits(present.choice)
            best = optimum_near(tables, present.choice, there) if fits else there.cheapest(tables)
        except SolverError:  # nothing was found that fits
            return replace(figure, is_used=is_used)
        moves = [(v, c) for v, c in enumerate(best.choice) if c != present.choice[v]]
        return replace(
            figure,
            is_used=is_used,
            is_proven=best.exact,
            time_change=_relative(best.cost * seconds, present_s),
            regret=_relative(tables.evaluate(choice), best.cost) if there.fits(choice) else None,
            moves=tuple((plan.layers[v].name, chosen_layer(problem.choices, v, c)) for v, c in moves),
        )

    return under


def _searched(plan: Plan, time_limit_s: float | None) -> _Under:
    """Return what a changed figure does to a plan with several stages: each takes a search."""
    settings: SearchSettings = {**settings_of(plan), "time_limit_s": time_limit_s}
    whole, step = whole_graph(plan), TrainingStep.of(plan)

    def under(figure: Sensitivity, other: Plan) -> Sensitivity:
        limit = other.device_memory_bytes
        present_s = replace(step, machine=other.machine).cost
        is_used = limit != plan.device_memory_bytes or present_s != plan.total_cost
        fits = limit is None or plan.peak.bytes <= limit
        best: Plan | None = None
        with suppress(MemoryLimitError, SolverError):  # nothing was found that fits
            there: SearchSettings = {**settings, "device_memory_bytes": limit}
            best = search(whole, plan.num_devices, machine=other.machine, options=there)
        if best is None and not fits:
            return replace(figure, is_used=is_used)
        moves: tuple[tuple[str, LayerChoice], ...] = ()
        best_s, is_proven = present_s, best is not None and best.lower_bound >= present_s * (1 - TIE)
        if best is not None and (not fits or best.total_cost < present_s * (1 - TIE)):
            best_s, is_proven = best.total_cost, best.exact
            chosen = zip(best, TrainingStep.of(best).layers, strict=True)
            moves = tuple((own.name, choice) for own, choice in chosen if own.splits != plan[own.name].splits)
        return replace(
            figure,
            is_used=is_used,
            is_proven=is_proven,
            time_change=_relative(best_s, plan.total_cost),
            regret=_relative(present_s, best_s) if fits else None,
            moves=moves,
        )

    return under


def figures(plan: Plan) -> Iterator[tuple[str, Callable[[float], Plan]]]:
    """Yield the figures of a plan's machine that a cost may depend on: those of levels that the devices use.

    Each with what returns the plan with that figure times a factor, its strategy as it is.
    """
    machine, device, limit = plan.machine, plan.machine.device, plan.device_memory_bytes

    def of_device(factor: float, name: str) -> Plan:
        memory = device.memory_bandwidth_bytes_per_s
        other = (
            replace(device, peak_flop_per_s={dtype: peak * factor for dtype, peak in device.peak_flop_per_s.items()})
            if name == "peak FLOP/s"
            else replace(device, memory_bandwidth_bytes_per_s=None if memory is None else memory * factor)
        )
        return replace(plan, machine=replace(machine, device=other))

    def of_level(factor: float, number: int, field: str) -> Plan:
        levels = list(machine.levels)
        levels[number] = replace(levels[number], **{field: getattr(levels[number], field) * factor})
        return replace(plan, machine=replace(machine, levels=tuple(levels)))

    for name in ("peak FLOP/s", "memory bandwidth"):
        yield f"device {name}", partial(of_device, name=name)
    for i, level in enumerate(machine.levels_spanned(plan.num_devices)):
        for name, field in (("latency", "latency_s"), ("bandwidth", "bandwidth_bytes_per_s")):
            yield f"{level.name} {name}", partial(of_level, number=i, field=field)
    if limit is not None:
        yield "device memory limit", lambda factor: replace(plan, device_memory_bytes=int(limit * factor))


def _seconds(machine: Machine, unit: str) -> float:
    """Return the seconds of one unit of cost: FLOP take a device's peak, which is one of the figures."""
    return 1 / machine.peak_flop_per_s() if unit == "FLOP" else 1.0


def _relative(new: float, old: float) -> float:
    return new / old - 1 if old else 0.0


def _are_same(a: CostTables, b: CostTables) -> bool:
    covers = ([], []) if a.hiding is None or b.hiding is None else (a.hiding.cover, b.hiding.cover)
    return all(
        np.array_equal(x, y)
        for x, y in chain(
            zip(a.vertex_costs, b.vertex_costs, strict=True),
            ((x.values, y.values) for x, y in zip(a.edge_tables, b.edge_tables, strict=True)),
            zip(*covers, strict=True),
        )
    )
