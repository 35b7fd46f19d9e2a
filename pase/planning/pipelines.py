"""The search over micro-batches, stages and modes of layers: for each number of both, the cheapest stages there are.

A step of m micro-batches on S stages of p / S devices each takes Σ t + (m - 1) max t + max o (`pase.planning.stages`),
with several chunks of layers for each group of devices what its passes take in their order (`passes`), which is no less
than m t + o of any group, t and o being of all its chunks.
The stages are cut where a single tensor goes on, so that, with what handing it over takes told by either end, each is a
problem of its own (`stage_problem`): α t + o for α = m - 1, or m, whose answers for equal stretches of layers are the
same. With chunks a group's are one problem, and of cuts those are looked at that share out the work most evenly.
Schemes are bounded more and more closely (`spans`), the one that may be best is looked at next, and of a scheme the
cuts that may be best, until those with the least bound consist of stages that are solved.
"""

import pickle
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from heapq import heapify, heappop, heappush
from itertools import pairwise, product
from math import inf
from multiprocessing import get_context
from time import perf_counter, time
from typing import Any, NamedTuple

import numpy as np

from pase._version import __version__
from pase.common.words import quantity
from pase.costs import Allowance, Problem, TimeUpError, cost_model
from pase.costs.choice_tables import ChoiceTables
from pase.costs.states import STATES, ModeSpace
from pase.errors import ConfigurationError, MachineError, MemoryLimitError, SolverError
from pase.graph import Graph
from pase.graph.operators.products import with_rings
from pase.graph.parts import cuts, with_cuts
from pase.planning.constraints import DevicesOf, Tie, allowed, devices_by_hand
from pase.planning.memory_limit import NothingFoundError
from pase.planning.one_stage import problem_of_setting, search_one_stage, step_cost, sums_of
from pase.planning.plan import STAGES, STAGES_IN_TURNS, Plan, SearchRecord
from pase.planning.spans import (
    CLOSE,
    EXACT,
    MIN_RESTRICTED,
    SLACKS,
    Scheme,
    Setting,
    Spans,
    Stages,
    by_layers,
    by_segments,
    known_choices,
    works_s,
)
from pase.planning.stage_problem import Choice, StageProblem, StageSums
from pase.planning.stage_search import StageFound, stage_front
from pase.planning.stages import INTERLEAVED, schedule_of, step_s
from pase.planning.steps import LayerChoice, TrainingStep
from pase.sharding.shards import data_parallel_splits, divisors
from pase.solver import NothingFitsError

CLOSE_ENOUGH = 0.01
"""Share of a large step's time up to which a better one is not looked for."""
CHUNKS = (1, 2, 3, 4, 6, 8, 12)
"""Stages of each group of devices, under the interleaved schedule."""
MAX_LOOKS, MAX_MISSES = 16, 3
"""At cuts, for one number of stages and micro-batches; and at cuts of which nothing fits, before any does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePart:
    """Layers of a stage, and their choices.

    chunks: of each the position of its first layer, and the one beyond the last. configuration: for each layer its
    split factors; states, again, rings: its modes, as in `LayerChoices`.
    """

    chunks: tuple[tuple[int, int], ...]
    configurations: tuple[tuple[int, ...], ...]
    states: tuple[int, ...]
    again: tuple[bool, ...]
    rings: tuple[bool, ...]
    sums: StageSums


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The cheapest step of a scheme that is known; no parts where none fits. bound: none of the scheme takes less."""

    scheme: Scheme
    cost: float
    bound: float
    parts: tuple[StagePart, ...]


def schemes(setting: Setting, stages: int | None, micro_batches: int | None) -> list[Scheme]:
    """Return the numbers of stages and of micro-batches to look at; None: all that divide devices and batch.

    With several chunks the groups of devices divide the micro-batches. Of numbers that are chosen those are left out at
    which constraints leave a layer nothing. What ties layers, or names the devices of their parts, is kept to by steps
    of one stage alone.
    """
    graph, devices = setting.graph, setting.num_devices
    whole = next((each for each in setting.constraints if isinstance(each, Tie | DevicesOf)), None)
    if whole is not None and stages not in (None, 1):
        raise ConfigurationError(
            f"{whole.where}: layers are tied, and have devices by hand, in steps of one stage alone; pin them instead, "
            "or leave stages out"
        )
    if whole is not None:
        stages = 1
    most = len(cuts(with_cuts(graph))) + 1
    if stages is not None and (devices % stages or stages > most):
        raise ConfigurationError(
            f"{graph.name!r} cannot be cut into {stages} stages for {devices} devices: their number must divide the "
            f"devices, and there are {most} at most"
        )
    if micro_batches is not None and setting.batch % micro_batches:
        raise ConfigurationError(
            f"a batch of {setting.batch} has no {micro_batches} equal micro-batches: use a divisor of it"
        )
    found = list[Scheme]()
    failed: ConfigurationError | None = None
    for num in [stages] if stages is not None else [s for s in divisors(devices) if s <= most]:
        try:
            cost_model(setting.cost_model, setting.machine, devices // num, graph.precision)
        except MachineError:
            if stages is not None:
                raise
            continue
        counts = list[int]()
        for m in [micro_batches] if micro_batches is not None else divisors(setting.batch):
            try:
                _check_constraints(setting, num, m)
            except ConfigurationError as error:
                failed = failed or error
            else:
                counts.append(m)
        chunks = CHUNKS if setting.schedule == INTERLEAVED and num > 1 else CHUNKS[:1]
        found += [
            Scheme(stages=num, micro_batches=m, chunks=v)
            for m, v in product(counts, chunks)
            if v == 1 or (num * v <= most and not m % num)
        ]
    if failed is not None and not found:
        raise failed
    return found


def _check_constraints(setting: Setting, stages: int, micro_batches: int) -> None:
    """Raise ConfigurationError where constraints leave a layer nothing with so many stages and micro-batches."""
    if setting.constraints:
        graph = setting.of_micro_batch(micro_batches, stages).graph
        allowed(setting.constraints, graph, setting.num_devices // stages).mapping(graph)


def search_schemes(
    setting: Setting,
    stages: int | None,
    micro_batches: int | None,
    *,
    jobs: int = 1,
    executor: Executor | None = None,
    gap: float | None = None,
    on_progress: Callable[[str, float], None] | None = None,
) -> tuple[Found, float]:
    """Return the cheapest step of all schemes, and a bound on all.

    Args:
        setting: what is searched for.
        stages, micro_batches: how many; None to choose them, too.
        jobs: how many schemes are looked at a time; what is found does not depend on it.
        executor: of the jobs; by default as many processes of this machine.
        gap: up to which share of its cost a step that is known is good enough; None: 0, and `CLOSE_ENOUGH` where
            tables leave choices out.
        on_progress: called with what is being done and the fraction that is done.

    Schemes that are not looked at before the setting's deadline count with the bound that is known of them.

    Raises:
        MemoryLimitError: no step is known that fits.
        SolverError: the deadline came before any was known.
    """
    begin_s = perf_counter()
    every = schemes(setting, stages, micro_batches)
    # What differs in chunks alone is looked at together: its tables are the same.
    most_chunks = {(each.stages, each.micro_batches): each.chunks for each in every}
    best: Found | None = None
    bound = inf
    with _asking(setting, jobs, executor) as ask:
        works = _works(ask, [each.micro_batches for each in every], may_leave=micro_batches is None)
        waiting = []
        for scheme in every:
            m = scheme.micro_batches
            if m in works:
                # With stages in turns some pipelines fill while others work.
                filling = scheme.stages - 1 if most_chunks[scheme.stages, m] == 1 else 0
                least = (m + filling) * works[m] / setting.num_devices
                waiting.append(_Waiting(least, 0, scheme.stages, m, scheme.chunks))
        heapify(waiting)
        gap = max(tolerance(setting, gap), EXACT)
        num, done = len(waiting) * (len(_LOOKS) + 1), 0
        while waiting:
            below = inf if best is None else best.cost
            if waiting[0].bound >= below * (1 - gap) or setting.is_late:
                # In the order of what they take at least: the rest is no better, or is not looked at any more.
                bound = min(bound, waiting[0].bound)
                break
            spent_s, allowed_s = perf_counter() - begin_s, setting.deadline_s - begin_s
            wave = _wave(waiting, below, is_deep=best is None and spent_s > UNTIL_DEEP * allowed_s)
            level = wave[0].level
            asked = [ask(partial(_look, level=level, waiting=each, below=below * (1 - gap))) for each in wave]
            for each, answer in zip(wave, asked, strict=True):
                found: Found = answer()
                least = max(each.bound, found.bound)
                done += 1
                if level < len(_LOOKS):
                    heappush(waiting, each._replace(bound=least, level=level + 1))
                    continue
                bound = min(bound, least)
                if found.parts and (best is None or found.cost < best.cost):
                    best = found
            if on_progress:
                on_progress(f"looking at {num // (len(_LOOKS) + 1):,} schemes", done / num)
    if best is None and setting.is_late:
        known = f"no step takes less than {quantity(bound, 's')}" if 0 < bound < inf else "no bound is known"
        raise SolverError(
            f"no plan of {setting.graph.name!r} yet: the time limit was reached before a step was found that fits a "
            f"device's memory ({known}); give more time, or fewer stages, micro-batches and modes to choose from"
        )
    if best is None:
        raise nothing_known_to_fit(setting)
    return best, min(best.cost, bound)


def nothing_known_to_fit(setting: Setting) -> MemoryLimitError:
    """Return the error of a search for steps that has found none within the memory limit."""
    return MemoryLimitError(
        f"no strategy of {setting.graph.name!r} is known that fits {setting.limit_bytes:.3g} bytes on each of "
        f"{setting.num_devices} devices: use more devices, allow more modes, stages or micro-batches, or a smaller "
        "batch"
    )


def tolerance(setting: Setting, gap: float | None) -> float:
    """Return up to which share of its cost a step that is known is good enough; gap: as `search_schemes` has it."""
    if gap is None:
        return CLOSE_ENOUGH if is_large(setting) else 0.0
    return gap


def is_large(setting: Setting) -> bool:
    """Return whether tables are made of some choices alone, the others bounded, or take longer than there is time."""
    try:
        layers = Stages.of(setting, Scheme(stages=1, micro_batches=1)).choices()[0]
    except ConfigurationError:  # constraints leave a layer nothing in steps of one stage, or are about a cut
        return is_large(replace(setting, constraints=()))
    except TimeUpError:
        return True
    return sum(map(len, {id(layer): layer for layer in layers}.values())) > MIN_RESTRICTED


def _wave(waiting: list["_Waiting"], below: float, *, is_deep: bool) -> list["_Waiting"]:
    """Take the schemes to look at next from a heap: of one level those that may be best, below a cost.

    is_deep: whether the one that is looked at most comes first, since no step is known and time is short.
    """
    if is_deep:
        deepest = max(waiting, key=lambda each: (each.level, -each.bound))
        waiting.remove(deepest)
        heapify(waiting)
        return [deepest]
    level, wave = waiting[0].level, list[_Waiting]()
    # What is far behind the first is likely to be passed over once that is known.
    most = min(below, waiting[0].bound * WAVE_BEHIND)
    while waiting and waiting[0].level == level and waiting[0].bound < most and len(wave) < WAVES[level]:
        wave.append(heappop(waiting))
    return wave


class _Waiting(NamedTuple):
    """A scheme that is to be looked at; of equal bounds those that were looked at least come first."""

    bound: float
    level: int
    stages: int
    micro_batches: int
    chunks: int


_Ask = Callable[[Callable[[Setting], Any]], Callable[[], Any]]
"""Begins some work on a setting, and returns what waits for its result."""


@contextmanager
def _asking(setting: Setting, jobs: int, executor: Executor | None) -> Iterator[_Ask]:
    """Give what has work done: one after the other here, or in several processes at a time."""
    own = ProcessPoolExecutor(jobs, get_context("spawn")) if executor is None and jobs > 1 else None
    chosen = executor or own
    try:
        if chosen is None:
            yield lambda work: partial(work, setting)
        else:
            until_s = time() + setting.deadline_s - perf_counter()
            written = pickle.dumps((setting, until_s))
            yield lambda work: chosen.submit(_elsewhere, written, work).result
    finally:
        by_segments.cache_clear()
        known_choices.cache_clear()
        if own:
            own.shutdown(cancel_futures=True)


def _works(ask: _Ask, counts: Sequence[int], *, may_leave: bool) -> dict[int, float]:
    """Return what one of so many micro-batches takes on one device, by their number.

    may_leave: whether numbers but 1 are left out that the batch of some layer cannot be divided by, as divisors of the
    whole batch may be.
    """
    asked = {m: ask(partial(work_s, micro_batches=m)) for m in dict.fromkeys(counts)}
    works = {}
    for m, answer in asked.items():
        try:
            works[m] = answer()
        except ConfigurationError:
            if not may_leave or m == 1:
                raise
    return works


def _elsewhere(written: bytes, work: Callable[[Setting], Any]) -> Any:
    """Do some work in another process, which keeps what it knows of the setting from one to the next."""
    return work(_read(written))


@lru_cache(maxsize=1)
def _read(written: bytes) -> Setting:
    setting: Setting
    setting, until_s = pickle.loads(written)
    # Elsewhere `perf_counter` may count from another moment.
    return replace(setting, deadline_s=perf_counter() + until_s - time())


def _look(setting: Setting, *, level: int, waiting: _Waiting, below: float) -> Found:
    """Look at a scheme more closely than before: at its layers, at what is between cuts, at its stages."""
    scheme = Scheme(stages=waiting.stages, micro_batches=waiting.micro_batches, chunks=waiting.chunks)
    if level == len(_LOOKS):
        return solve_scheme(setting, scheme, below=below)
    bound = 0.0
    if scheme.stages > 1:
        with suppress(TimeUpError):
            bound = _LOOKS[level](setting, scheme)
    return Found(scheme=scheme, cost=inf, bound=bound, parts=())


def work_s(setting: Setting, micro_batches: int) -> float:
    """Return what the work of one of so many micro-batches takes on one device; 0 where there is no time to tell.

    Shared out it takes no less in all. Parts may fit caches that the whole does not: what is read beyond these is left
    out.
    """
    machine = setting.machine
    if setting.is_late:
        return 0.0
    if machine.kernels:
        machine = replace(machine, kernels=replace(machine.kernels, beyond=None, cache_bytes=0))
    return sum(works_s(setting.of_micro_batch(micro_batches, 1).graph, setting.cost_model, machine))


# -- one scheme


_LOOKS: tuple[Callable[[Setting, Scheme], float], ...] = (
    lambda setting, scheme: by_layers(Stages.of(setting, scheme))[1],
    lambda setting, scheme: by_segments(setting, scheme)[1],
)
"""Bounds of a scheme, the quicker ones first."""
UNTIL_DEEP = 0.3
"""Share of the time in which schemes are bounded before one is solved, whatever others may take."""
WAVES, WAVE_BEHIND = (8, 4, 2), 1.1
"""Schemes that are looked at before others may be told to take longer, by how closely; and how far behind the first."""


def solve_scheme(setting: Setting, scheme: Scheme, *, below: float = inf) -> Found:
    """Return the cheapest step of a scheme, as far as it is known; below: of no interest if it takes no less."""
    whole = _of_one_stage(setting, scheme) if scheme.stages == 1 else None
    is_tied = any(isinstance(each, Tie) for each in setting.constraints)
    if whole is not None and (is_tied or whole.bound >= min(whole.cost, below) * (1 - CLOSE)):
        return whole
    answers = (_solved(setting, scheme, below, slack) for slack in SLACKS)
    found = next(found for found in answers if found is not None)
    if whole is None:
        return found
    # What streams is not hidden in all micro-batches, or layers that are recomputed hold more than is bounded.
    bound = max(whole.bound, min(found.bound, whole.cost))
    return replace(min(whole, found, key=lambda each: each.cost), bound=min(bound, whole.cost, found.cost))


def _of_one_stage(setting: Setting, scheme: Scheme) -> Found:
    """Return the answer of a scheme of one stage, which is exact where what streams in micro-batches is hidden.

    Where that leaves a gap, it is no worse than the answer without modes.
    """
    try:
        problem, choice, bound = _solved_as_one(setting, scheme)
    except TimeUpError:
        return Found(scheme=scheme, cost=inf, bound=0.0, parts=())
    cost = step_cost(problem, choice) if choice else inf
    has_modes = any(layer.state.any() or layer.again.any() for layer in problem.choices.layers)
    if has_modes and bound < cost * (1 - EXACT):
        with suppress(TimeUpError):
            without, chosen, _ = _solved_as_one(replace(setting, space=ModeSpace(rings=setting.space.rings)), scheme)
            plain = _without_modes(problem.choices, without.choices, chosen)
            if plain and step_cost(problem, plain) < cost:
                choice = plain
    if not choice:
        return Found(scheme=scheme, cost=inf, bound=bound, parts=())
    return found_as_one(problem, choice, bound)


def found_as_one(problem: Problem, choice: Choice, bound: float) -> Found:
    """Return a step of one stage; bound: none of the problem's takes less."""
    cost = step_cost(problem, choice)
    part = _part(problem.choices, choice, sums_of(problem, choice), ((0, len(choice)),))
    scheme = Scheme(stages=1, micro_batches=problem.micro_batches)
    return Found(scheme=scheme, cost=cost, bound=min(bound, cost), parts=(part,))


def _solved_as_one(setting: Setting, scheme: Scheme) -> tuple[Problem, Choice, float]:
    """Return the problem of one stage, the cheapest step, none where none is known to fit, and a bound on all."""
    allowance = Allowance(deadline_s=setting.deadline_s)
    problem = problem_of_setting(setting, scheme.micro_batches, allowance=allowance)
    time_limit_s = None if setting.deadline_s == inf else max(setting.deadline_s - perf_counter(), 1e-9)
    try:
        found = search_one_stage(setting, problem, time_limit_s=time_limit_s).solution
    except NothingFitsError:
        return problem, (), inf
    except NothingFoundError as nothing:
        return problem, (), nothing.bound
    return problem, found.choice, found.lower_bound


def _without_modes(tables: ChoiceTables, plain: ChoiceTables, chosen: Choice) -> Choice:
    """Return the choices that some of tables without states and recomputation are here; none where one is not."""
    found = []
    for layer, other, c in zip(tables.layers, plain.layers, chosen, strict=False):
        is_same = (layer.rows == other.rows[c]) & (layer.ring == other.ring[c])
        found += np.flatnonzero(is_same & (layer.state == 0) & ~layer.again)[:1].tolist()
    return tuple(found) if len(found) == len(tables.layers) else ()


def _solved(setting: Setting, scheme: Scheme, below: float, slack: float) -> Found | None:
    """Return a scheme's answer; None where choices that tables leave out stand in its way, and fewer may be."""
    best, bound, parts = inf, 0.0, tuple[StagePart, ...]()
    with suppress(TimeUpError):
        spans, bound, path = by_segments(setting, scheme, slack)
        stages = spans.stages
        misses = 0

        def is_closed() -> bool:
            return bound >= min(best * (1 - CLOSE / 2), below)

        for _ in range(MAX_LOOKS):
            if is_closed() or bound == inf or setting.is_late:
                break
            found, is_known, longest = list[tuple[StageProblem, StageFound]](), True, spans.least_longest()
            for number, (i, j) in enumerate(pairwise(path)):
                is_known &= stages.is_solved(i, j, number)
                point = spans.point(number, i, j)
                if found and found[-1][1].at is not None:
                    point = found[-1][1].at.copy()
                    point[-1] *= sum(stages.in_flight(number - 1)) / sum(stages.in_flight(number))
                enough = below - (spans.least_total() if scheme.stages > 1 and scheme.chunks == 1 else 0.0)
                found.append(stages.solve(i, j, number, point, enough, longest=longest, may_widen=slack < SLACKS[-1]))
                answer = found[-1][1]
                if answer.is_held_back:
                    return None
                if answer.at is not None and not is_known:
                    spans.by_segments(number, answer.at)
                spans.solved(number, j - i, stages.key(i, j, number), answer.bound)
                if answer.bound >= enough or (answer.sums is None and setting.is_late):
                    # With this stage none of the others matters, or there is no time for them.
                    break
            sums = [answer.sums for _, answer in found if answer.sums is not None]
            if len(sums) == scheme.stages:
                new = tuple(
                    _part(problem.tables, answer.choice, own, stages.chunks(i, j))
                    for (problem, answer), own, (i, j) in zip(found, sums, pairwise(path), strict=True)
                )
                cost = _step_s(setting, scheme, new)
                if cost < best:
                    best, parts = cost, new
            before = bound
            bound, path = spans.bound()
            bound = max(bound, before)
            if len(found) == scheme.stages:
                is_still = bound <= before * (1 + (EXACT if is_known else CLOSE / 4)) and best < inf
                misses += best == inf
                if is_still or misses == MAX_MISSES:
                    break
        if scheme.chunks == 1 and bound < min(best, below) * (1 - EXACT):
            closed = _closed(stages, spans, min(best, below))
            if closed is not None:
                bound = min(best, below)
                if closed:
                    best = _step_s(setting, scheme, closed)
                    bound, parts = best, closed
    return Found(scheme=scheme, cost=best, bound=min(bound, best), parts=parts)


def _step_s(setting: Setting, scheme: Scheme, parts: Sequence[StagePart]) -> float:
    """Return how long a step takes: of stages in turns by the order of their passes, of others by the closed form."""
    if scheme.chunks > 1:
        return _step_of(setting, scheme, parts).cost
    sums = [part.sums for part in parts]
    return step_s([own.micro_batch for own in sums], [own.step for own in sums], scheme.micro_batches)


@dataclass(frozen=True, slots=True)
class _Way:
    """Stages up to a cut: what their t add to the step, the longest t, the longest o, and the stages."""

    total: float
    longest: float
    once: float
    parts: tuple[StagePart, ...]

    def beats(self, other: "_Way") -> bool:
        return self.total <= other.total and self.longest <= other.longest and self.once <= other.once


def _closed(stages: "Stages", spans: "Spans", below: float) -> tuple[StagePart, ...] | None:
    """Return the cheapest stages of a scheme by going through all that may take less than a step that is known.

    None where these are too many; no stages where none takes less.
    """
    scheme, last, per_stage = stages.scheme, len(stages.places) - 1, stages.per_stage
    rest_s = spans.least_total() * (1 - EXACT) if scheme.micro_batches > 1 else 0.0
    often = scheme.micro_batches - per_stage
    ways: dict[int, list[_Way]] = {0: [_Way(0.0, 0.0, 0.0, ())]}
    fronts: dict[Hashable, list[tuple[StagePart, float, float]] | None] = {}
    for number in range(scheme.stages):
        reached: dict[int, list[_Way]] = {}
        for i, before in ways.items():
            for j in range(last if number == scheme.stages - 1 else i + 1, last + 1):
                if not stages.has(number, i, j) or spans.longest[number][i, j] + rest_s > below:
                    continue
                front = _front(stages, i, j, number, below - rest_s, fronts)
                if front is None:
                    return None
                for way in before:
                    for part, t, o in front:
                        total = way.total + per_stage * t
                        own = _Way(total, max(way.longest, t), max(way.once, o), (*way.parts, part))
                        if own.total + often * own.longest + own.once < below * (1 - EXACT):
                            _add(reached.setdefault(j, []), own)
        ways = reached
    best = min(ways.get(last, []), key=lambda way: way.total + often * way.longest + way.once, default=None)
    return best.parts if best else ()


def _add(ways: list[_Way], own: _Way) -> None:
    """Keep a way unless another beats it, in the place of those that it beats."""
    if not any(way.beats(own) for way in ways):
        ways[:] = [*(way for way in ways if not own.beats(way)), own]


def _front(
    stages: Stages,
    i: int,
    j: int,
    number: int,
    limit: float,
    known: dict[Hashable, list[tuple[StagePart, float, float]] | None],
) -> list[tuple[StagePart, float, float]] | None:
    """Return a stage's strategies that no other beats, with t and o; None where there are too many to go through."""
    key = i, j, number
    if key not in known:
        problem = stages.problem(i, j, number)
        front = stage_front(problem, limit)
        known[key] = None
        if front is not None:
            known[key] = [
                (_part(problem.tables, choice, sums, stages.chunks(i, j)), t, o) for t, o, choice, sums in front
            ]
    return known[key]


def _part(tables: ChoiceTables, choice: Choice, sums: StageSums, chunks: tuple[tuple[int, int], ...]) -> StagePart:
    rows = [layer.rows[c] for layer, c in zip(tables.layers, choice, strict=True)]
    return StagePart(
        chunks=chunks,
        configurations=tuple(
            tuple(int(k) for k in splits[row]) for splits, row in zip(tables.configurations, rows, strict=True)
        ),
        states=tuple(int(layer.state[c]) for layer, c in zip(tables.layers, choice, strict=True)),
        again=tuple(bool(layer.again[c]) for layer, c in zip(tables.layers, choice, strict=True)),
        rings=tuple(bool(layer.ring[c]) for layer, c in zip(tables.layers, choice, strict=True)),
        sums=sums,
    )


def plan_of_step(setting: Setting, found: Found, bound: float, time_s: float) -> Plan:
    """Return the placed plan of a step; bound: no step takes less."""
    scheme = found.scheme
    graph = setting.of_micro_batch(scheme.micro_batches, scheme.stages).graph
    step = _step_of(setting, scheme, found.parts)
    assert abs(step.cost - found.cost) <= 1e-9 * found.cost, f"the step costs {step.cost}, found was {found.cost}"
    ordering = STAGES_IN_TURNS if setting.schedule == INTERLEAVED else STAGES
    return Plan(
        graph=graph,
        machine=setting.machine,
        num_devices=setting.num_devices,
        cost_model=setting.cost_model,
        cost_unit=cost_model(setting.cost_model, setting.machine, setting.num_devices, graph.precision).unit,
        layers=step.plans(by_hand=devices_by_hand(setting.constraints, graph)),
        total_cost=step.cost,
        lower_bound=min(bound, step.cost),
        # Bounds of the solver leave out as much for rounding.
        exact=bound >= step.cost * (1 - 2 * EXACT),
        baselines={"data_parallel": data_parallel_step(step).cost},
        search=SearchRecord(ordering=ordering, largest_dependent_set=0, time_s=time_s, peak_memory_bytes=0),
        tool_version=__version__,
        optimiser=setting.optimiser,
        device_memory_bytes=None if setting.limit_bytes == inf else int(setting.limit_bytes),
        constraints=setting.constraints,
        micro_batches=scheme.micro_batches,
        schedule=step.schedule,
        num_groups=scheme.stages,
    )


def with_chosen_rings(setting: Setting, found: Found) -> Setting:
    """Return the setting in which attention is a ring wherever a step has chosen it, and nowhere else."""
    if not setting.space.rings:
        return setting
    graph = setting.of_micro_batch(found.scheme.micro_batches, found.scheme.stages).graph
    return replace(setting, rings=_rings(graph, found.parts), space=setting.space.without_rings())


def _rings(graph: Graph, parts: Sequence[StagePart]) -> frozenset[str]:
    """Return the layers that have chosen to be rings."""
    names = set[str]()
    for part in parts:
        layers = [v for ends in part.chunks for v in range(*ends)]
        names.update(graph.operators[v].name for v, is_ring in zip(layers, part.rings, strict=True) if is_ring)
    return frozenset(names)


def _step_of(setting: Setting, scheme: Scheme, parts: Sequence[StagePart]) -> TrainingStep:
    graph = setting.of_micro_batch(scheme.micro_batches, scheme.stages).graph
    if rings := _rings(graph, parts):
        graph = with_rings(graph, rings)
    layers: dict[int, LayerChoice] = {}
    for group, part in enumerate(parts):
        choices = zip(part.configurations, part.states, part.again, strict=True)
        for chunk, ends in enumerate(part.chunks):
            for v, (splits, state, again) in zip(range(*ends), choices, strict=False):
                layers[v] = LayerChoice(
                    splits=dict(zip(graph.operators[v].extents, splits, strict=True)),
                    state=STATES[state],
                    is_recomputed=again,
                    stage=group + chunk * scheme.stages,
                )
    schedule = schedule_of(scheme.chunks) if setting.schedule == INTERLEAVED else setting.schedule
    return TrainingStep(
        graph=graph,
        num_devices=setting.num_devices,
        machine=setting.machine,
        cost_model=setting.cost_model,
        optimiser=setting.optimiser,
        micro_batches=scheme.micro_batches,
        schedule=schedule if scheme.stages > 1 else "",
        layers=tuple(layers[v] for v in sorted(layers)),
        chunks=scheme.chunks,
    )


def data_parallel_step(step: TrainingStep) -> TrainingStep:
    """Return the step of the same micro-batches in data parallelism: one stage, weights whole, nothing recomputed."""
    splits = data_parallel_splits(step.graph, step.num_devices)
    layers = (LayerChoice(splits=split, state=STATES[0], is_recomputed=False, stage=0) for split in splits)
    return replace(step, schedule="", layers=tuple(layers), chunks=1)
