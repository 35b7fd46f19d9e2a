"""What another machine would change: the search again with each of its figures a fifth lower and higher."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from types import MappingProxyType

import numpy as np

from pase.analysis.explanation.optimum import optimum_near, planned_choice, present_optimum
from pase.analysis.explanation.searching import Searching, searching
from pase.errors import SolverError
from pase.machine import Device, Level, Machine
from pase.planning.plan import Plan
from pase.planning.planner import Progress, problem_of
from pase.solver import Solution
from pase.tables.cost_tables import CostTables

CHANGE = 0.2
"""Figures are taken this much lower and higher."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One figure of a plan's machine: its name, and the plan with that figure times a factor, its strategy as it is."""

    name: str
    scaled: Callable[[float], Plan]


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
    moves: tuple[tuple[str, dict[str, int]], ...] = ()


def sensitivity(
    plan: Plan, *, change: float = CHANGE, time_limit_s: float | None = None, on_progress: Progress | None = None
) -> tuple[Sensitivity, ...]:
    """Return what each figure of the plan's machine, `change` lower and higher, would change.

    The plan's own strategy stands for the present where it is a cheapest one; else the cheapest nearest to it does.
    """
    problem = problem_of(plan.graph, plan.num_devices, plan.machine, plan.cost_model)
    choice = planned_choice(plan, problem)
    search = searching(plan, problem, time_limit_s)
    present = present_optimum(plan, problem.tables, choice, search, on_progress)
    present_s = present.cost * _seconds(plan.machine, plan.cost_unit)
    found = []
    every = [(figure, factor) for figure in figures(plan) for factor in (1 - change, 1 + change)]
    for number, (figure, factor) in enumerate(every):
        other = figure.scaled(factor)
        tables = problem_of(plan.graph, plan.num_devices, other.machine, plan.cost_model).tables
        limit = other.memory_limit_bytes_per_device
        there = search
        if search.limited is not None and limit is not None:
            there = replace(search, limited=replace(search.limited, limit=float(limit)))
        is_used = (
            limit != plan.memory_limit_bytes_per_device
            or not _are_same(problem.tables, tables)
            or _seconds(other.machine, plan.cost_unit) != _seconds(plan.machine, plan.cost_unit)
        )
        best = _optimum(tables, present.choice, there)
        if best is None:
            found.append(Sensitivity(figure=figure.name, factor=factor, is_used=is_used, is_proven=True))
            continue
        moves = [(v, c) for v, c in enumerate(best.choice) if c != present.choice[v]]
        found.append(
            Sensitivity(
                figure=figure.name,
                factor=factor,
                is_used=is_used,
                is_proven=best.exact,
                time_change=_relative(best.cost * _seconds(other.machine, plan.cost_unit), present_s),
                regret=_relative(tables.evaluate(choice), best.cost) if there.fits(choice) else None,
                moves=tuple((plan.layers[v].name, problem.splits(v, c)) for v, c in moves),
            )
        )
        if on_progress:
            on_progress(f"searching with another {figure.name}", (number + 1) / len(every))
    return tuple(found)


def figures(plan: Plan) -> Iterator[Figure]:
    """Yield the figures of a plan's machine that a cost may depend on: those of levels that the devices use."""
    for name, scale_device in _DEVICE.items():
        yield Figure(name=name, scaled=_of_device(plan, scale_device))
    for i, level in enumerate(plan.machine.levels_spanned(plan.num_devices)):
        for name, scale in _LEVEL.items():
            yield Figure(name=f"{level.name} {name}", scaled=_of_level(plan, i, scale))
    if plan.memory_limit_bytes_per_device is not None:
        yield Figure(name="device memory limit", scaled=_of_limit(plan, plan.memory_limit_bytes_per_device))


def _of_device(plan: Plan, scale: Callable[[Device, float], Device]) -> Callable[[float], Plan]:
    return lambda factor: replace(plan, machine=replace(plan.machine, device=scale(plan.machine.device, factor)))


def _of_level(plan: Plan, number: int, scale: Callable[[Level, float], Level]) -> Callable[[float], Plan]:
    def scaled(factor: float) -> Plan:
        levels = list(plan.machine.levels)
        levels[number] = scale(levels[number], factor)
        return replace(plan, machine=replace(plan.machine, levels=tuple(levels)))

    return scaled


def _of_limit(plan: Plan, limit_bytes: int) -> Callable[[float], Plan]:
    return lambda factor: replace(plan, memory_limit_bytes_per_device=int(limit_bytes * factor))


def _optimum(tables: CostTables, choice: Sequence[int], search: Searching) -> Solution | None:
    """Return the cheapest strategy, the nearest to a given one of equals; None where nothing was found that fits."""
    try:
        return optimum_near(tables, choice, search) if search.fits(choice) else search.cheapest(tables)
    except SolverError:
        return None


def _with_peak(device: Device, factor: float) -> Device:
    return replace(device, peak_flop_per_s={dtype: peak * factor for dtype, peak in device.peak_flop_per_s.items()})


def _with_memory_bandwidth(device: Device, factor: float) -> Device:
    given = device.memory_bandwidth_bytes_per_s
    return device if given is None else replace(device, memory_bandwidth_bytes_per_s=given * factor)


def _with_latency(level: Level, factor: float) -> Level:
    return replace(level, latency_s=level.latency_s * factor)


def _with_bandwidth(level: Level, factor: float) -> Level:
    return replace(level, bandwidth_bytes_per_s=level.bandwidth_bytes_per_s * factor)


_DEVICE: Mapping[str, Callable[[Device, float], Device]] = MappingProxyType(
    {"device peak FLOP/s": _with_peak, "device memory bandwidth": _with_memory_bandwidth}
)
_LEVEL: Mapping[str, Callable[[Level, float], Level]] = MappingProxyType(
    {"latency": _with_latency, "bandwidth": _with_bandwidth}
)


def _seconds(machine: Machine, unit: str) -> float:
    """Return the seconds of one unit of cost: FLOP take a device's peak, which is one of the figures."""
    return 1 / machine.peak_flop_per_s() if unit == "FLOP" else 1.0


def _relative(new: float, old: float) -> float:
    return new / old - 1 if old else 0.0


def _are_same(a: CostTables, b: CostTables) -> bool:
    return all(
        np.array_equal(x, y)
        for x, y in chain(
            zip(a.vertex_costs, b.vertex_costs, strict=True),
            ((x.values, y.values) for x, y in zip(a.edge_tables, b.edge_tables, strict=True)),
        )
    )
