"""The search over micro-batches, stages and modes of layers: for each number of both, the cheapest stages there are.

A step of m micro-batches on S stages of p / S devices each takes Σ t + (m - 1) max t + max o (`pase.costs.schedules`).
The stages are cut where a single tensor goes on, so that, with what handing it over takes told by either end, each is a
problem of its own (`stage_problem`): α t + o for α = m - 1, whose answers for equal stretches of layers are the same.
For all cuts at once, the least of the longest stage's (m - 1) t + o, and the sum of the least t of all layers, bound
the step from below; cuts are looked at in the order of that bound, stages of bounds are replaced by stages that are
solved, until the cuts with the least bound consist of these. Numbers of stages and micro-batches whose work alone
would take longer than the best step known are passed over.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from math import inf
from multiprocessing import get_context
from time import perf_counter

import numpy as np

from pase._version import __version__
from pase.costs import CostModel, cost_model, hiding_layers, signature, traffic_of
from pase.costs.collectives import Link
from pase.costs.memory import Keeping, keeping
from pase.costs.modes import STATES, KnownModes, Links, ModeSpace, mode_tables
from pase.costs.schedules import ONE_FORWARD_ONE_BACKWARD, in_flight, step_s
from pase.errors import ConfigurationError, MachineError, MemoryLimitError
from pase.graph import Graph
from pase.graph.micro_batch import micro_batch
from pase.graph.stages import cuts, stage, with_cuts
from pase.machine import Machine
from pase.planning.constraints import Constraints, allowed
from pase.planning.links import group_links
from pase.planning.plan import Plan, SearchRecord
from pase.planning.stage_problem import StageFound, StageProblem, StageSums, solve_stage, stage_front
from pase.planning.steps import LayerChoice, Step
from pase.sharding.configurations import data_parallel_splits, divisors
from pase.sharding.shards import IndexArray

MAX_LOOKS, MAX_MISSES = 16, 3
"""At cuts, for one number of stages and micro-batches; and at cuts of which nothing fits, before any does."""
EXACT = 1e-9
"""Up to which share of the cost a bound is as good as reached."""
CLOSE = 2e-3
"""Up to which share of the step's time bounds and strategies are brought together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """Of how many stages and micro-batches a step is."""

    stages: int
    micro_batches: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePart:
    """Layers of a stage, from the first position to the one beyond the last, and their choices.

    configuration: for each layer its split factors; state, again: its modes, as in `LayerModes`.
    """

    first: int
    beyond: int
    configurations: tuple[tuple[int, ...], ...]
    states: tuple[int, ...]
    again: tuple[bool, ...]
    sums: StageSums


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The cheapest step of a scheme that is known; no parts where none fits. bound: none of the scheme takes less."""

    scheme: Scheme
    cost: float
    bound: float
    parts: tuple[StagePart, ...]


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What a step is searched for. graph: of the whole batch. limit_bytes: of a device, infinite for no limit."""

    graph: Graph
    num_devices: int
    machine: Machine
    cost_model: str
    space: ModeSpace
    optimiser: str
    limit_bytes: float
    schedule: str = ONE_FORWARD_ONE_BACKWARD
    constraints: Constraints = ()

    @property
    def batch(self) -> int:
        """How many examples a step has."""
        return max(self.graph.batch[operator.name].examples for operator in self.graph.operators)


def schemes(setting: Setting, stages: int | None, micro_batches: int | None) -> list[Scheme]:
    """Return the numbers of stages and of micro-batches to look at; None: all that divide devices and batch."""
    graph, devices = setting.graph, setting.num_devices
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
    found = []
    for num in [stages] if stages is not None else [s for s in divisors(devices) if s <= most]:
        try:
            cost_model(setting.cost_model, setting.machine, devices // num, graph.precision)
        except MachineError:
            if stages is not None:
                raise
            continue
        counts = [micro_batches] if micro_batches is not None else divisors(setting.batch)
        found += [Scheme(stages=num, micro_batches=m) for m in counts]
    return found


def search_schemes(
    setting: Setting,
    stages: int | None,
    micro_batches: int | None,
    *,
    jobs: int = 1,
    executor: Executor | None = None,
    deadline_s: float = inf,
    on_progress: Callable[[str, float], None] | None = None,
) -> tuple[Found, float]:
    """Return the cheapest step of all schemes, and a bound on all.

    Args:
        setting: what is searched for.
        stages, micro_batches: how many; None to choose them, too.
        jobs: how many schemes are looked at a time; what is found does not depend on it.
        executor: of the jobs; by default as many processes of this machine.
        deadline_s: by `perf_counter`; schemes that are not looked at by then count with what their work takes.
        on_progress: called with what is being done and the fraction that is done.

    Raises:
        MemoryLimitError: no step is known that fits.
    """
    works: dict[int, float] = {}
    waiting: list[tuple[float, Scheme]] = []
    for scheme in schemes(setting, stages, micro_batches):
        m = scheme.micro_batches
        if m not in works:
            try:
                works[m] = work_s(setting, m)
            except ConfigurationError:
                # Not every divisor of the batch need be one of what each layer has of it.
                if micro_batches is not None or m == 1:
                    raise
                works[m] = inf
        if works[m] < inf:
            waiting.append(((m + scheme.stages - 1) * works[m] / setting.num_devices, scheme))
    waiting.sort(key=_first)
    best: Found | None = None
    bounds: list[float] = []
    own = ProcessPoolExecutor(jobs, get_context("spawn")) if executor is None and jobs > 1 else None
    chosen = executor or own
    try:
        for start in range(0, len(waiting), jobs):
            wave = waiting[start : start + jobs]
            below = inf if best is None else best.cost
            if wave[0][0] >= below * (1 - CLOSE / 2) or (perf_counter() > deadline_s and best is not None):
                # In the order of what they take at least: the rest is no better, or is not looked at any more.
                bounds.append(wave[0][0])
                break
            solve_one = partial(solve_scheme, setting, below=below)
            asked = [chosen.submit(solve_one, scheme) for _, scheme in wave] if chosen else []
            answers = [each.result() for each in asked] or [solve_one(scheme) for _, scheme in wave]
            for (least, _), found in zip(wave, answers, strict=True):
                bounds.append(max(least, found.bound))
                if found.parts and (best is None or found.cost < best.cost):
                    best = found
            if on_progress:
                on_progress(f"looking at {len(waiting):,} schemes", (start + len(wave)) / len(waiting))
    finally:
        if own:
            own.shutdown(cancel_futures=True)
    if best is None:
        raise MemoryLimitError(
            f"no strategy of {setting.graph.name!r} is known that fits {setting.limit_bytes:.3g} bytes on each of "
            f"{setting.num_devices} devices: use more devices, allow more modes, stages or micro-batches, or a smaller "
            "batch"
        )
    return best, min(best.cost, *bounds)


def _first(entry: tuple[float, Scheme]) -> tuple[float, int, int]:
    return entry[0], entry[1].stages, entry[1].micro_batches


def work_s(setting: Setting, micro_batches: int) -> float:
    """Return what the work of one of so many micro-batches takes on one device.

    Shared out it takes no less in all. Parts may fit caches that the whole does not: what is read beyond these is left
    out.
    """
    machine = setting.machine
    if machine.kernels:
        machine = replace(machine, kernels=replace(machine.kernels, beyond=None, cache_bytes=0))
    graph = micro_batch(setting.graph, micro_batches)
    model = cost_model(setting.cost_model, machine, 1, graph.precision)
    known: dict[Hashable, float] = {}
    total = 0.0
    for operator in graph.operators:
        key = signature(graph, operator)
        if key not in known:
            traffic = traffic_of(graph, operator, np.ones((1, len(operator.extents)), dtype=np.int32))
            known[key] = float(model.work(traffic.forward)[0] + model.work(traffic.backward)[0])
        total += known[key]
    return total


# -- one scheme


@dataclass
class _Stages:
    """The stages of a scheme: graph with cuts, where these are, and the stages that are solved by now."""

    setting: Setting
    scheme: Scheme
    graph: Graph
    model: CostModel
    keeps: Keeping
    at: tuple[int, ...]
    kinds: tuple[int, ...]
    fixed: frozenset[str]
    links: tuple[Link | None, ...]
    only: Mapping[str, IndexArray]
    known: KnownModes = field(default_factory=KnownModes)
    solved: dict[tuple[Hashable, int], tuple[StageProblem, StageFound]] = field(default_factory=dict)

    @classmethod
    def of(cls, setting: Setting, scheme: Scheme) -> "_Stages":
        graph = with_cuts(micro_batch(setting.graph, scheme.micro_batches))
        devices = setting.num_devices // scheme.stages
        keeps = keeping(graph)
        at = cuts(graph)
        kinds = _kinds(graph, keeps)
        ends = _run_ends(kinds, at)
        return cls(
            setting=setting,
            scheme=scheme,
            graph=graph,
            model=cost_model(setting.cost_model, setting.machine, devices, graph.precision),
            keeps=keeps,
            at=at if scheme.stages > 1 else (),
            kinds=kinds,
            fixed=frozenset(graph.operators[v].name for v in ends),
            links=group_links(setting.machine, setting.num_devices, scheme.stages),
            only=_allowed(setting.constraints, graph, devices),
        )

    @property
    def weight(self) -> float:
        """α of α t + o: of the longest stage every micro-batch but one, which each stage has once."""
        m = self.scheme.micro_batches
        return float(m if self.scheme.stages == 1 else max(m - 1, 1))

    def links_of(self, number: int) -> Links:
        """Return the links to the stages before and behind one."""
        return self.links[number], self.links[number + 1]

    def in_flight(self, number: int) -> int:
        """Return how many micro-batches are under way on a stage."""
        scheme = self.scheme
        return in_flight(self.setting.schedule, scheme.stages, number, scheme.micro_batches)

    def key(self, first: int, beyond: int, number: int) -> Hashable:
        """Return what a stage's answer depends on."""
        return self.kinds[first:beyond], first == 0, beyond == len(self.kinds), self.links_of(number)

    def problem(self, first: int, beyond: int, number: int, *, is_apart: bool = False) -> StageProblem:
        """Return the problem of a stage; is_apart: without what it hands over and is handed."""
        is_all = (first, beyond) == (0, len(self.kinds))
        tables = mode_tables(
            self.graph if is_all else stage(self.graph, first, beyond),
            self.setting.num_devices // self.scheme.stages,
            self.model,
            self.setting.space,
            known=self.known,
            keeps=self.keeps,
            fixed=self.fixed,
            optimiser=self.setting.optimiser,
            links=(None, None) if is_apart else self.links_of(number),
            only=self.only,
        )
        return StageProblem(
            tables=tables,
            weight=self.weight,
            in_flight=self.in_flight(number),
            limit_bytes=self.setting.limit_bytes,
        )

    def solve(self, first: int, beyond: int, number: int) -> tuple[StageProblem, StageFound]:
        """Return the answer to a stage."""
        key = self.key(first, beyond, number), self.in_flight(number)
        if key not in self.solved:
            problem = self.problem(first, beyond, number)
            # What fits with more micro-batches under way fits with fewer.
            alike = [
                answer.choice for (kind, _), (_, answer) in self.solved.items() if kind == key[0] and answer.choice
            ]
            self.solved[key] = problem, solve_stage(problem, known=alike, tolerance=CLOSE / 4)
        return self.solved[key]


def solve_scheme(setting: Setting, scheme: Scheme, *, below: float = inf) -> Found:
    """Return the cheapest step of a scheme, as far as it is known; below: of no interest if it takes longer."""
    stages = _Stages.of(setting, scheme)
    if scheme.stages == 1:
        problem, found = stages.solve(0, len(stages.kinds), 0)
        if found.sums is None:
            return Found(scheme=scheme, cost=inf, bound=found.bound, parts=())
        part = _part(problem, found, 0, len(stages.kinds))
        return Found(scheme=scheme, cost=_step([found.sums], scheme), bound=found.bound, parts=(part,))
    return _cut(stages, below)


def _step(sums: Sequence[StageSums], scheme: Scheme) -> float:
    return step_s([s.micro_batch for s in sums], [s.step for s in sums], scheme.micro_batches)


def _cut(stages: _Stages, below: float) -> Found:
    """Return the cheapest cuts of a scheme, and their stages."""
    scheme, places = stages.scheme, (0, *stages.at, len(stages.kinds))
    longest, fastest = _least_of_segments(stages, places)
    after = np.concatenate([[0.0], np.cumsum(longest)])
    # Of one micro-batch the longest stage's t is in α t + o as it is.
    rest_s = float(fastest.sum()) if scheme.micro_batches > 1 else 0.0
    solved: list[dict[tuple[int, int], float]] = [{} for _ in range(scheme.stages)]
    best, bound = inf, 0.0
    parts: tuple[StagePart, ...] = ()
    for look in range(MAX_LOOKS):
        value, path = _least_longest(after, solved, scheme.stages)
        bound = max(bound, value + rest_s)
        if bound >= min(best, below) * (1 - CLOSE / 2) or value == inf:
            break
        found = []
        for number, (i, j) in enumerate(pairwise(path)):
            found.append(stages.solve(places[i], places[j], number))
            key = stages.key(places[i], places[j], number)
            for a in range(len(places) - 1):
                b = a + j - i
                if b < len(places) and stages.key(places[a], places[b], number) == key:
                    solved[number][a, b] = found[-1][1].bound
        sums = [answer.sums for _, answer in found if answer.sums is not None]
        if len(sums) == len(found) and _step(sums, scheme) < best:
            best = _step(sums, scheme)
            parts = tuple(
                _part(problem, answer, places[i], places[j])
                for (problem, answer), (i, j) in zip(found, pairwise(path), strict=True)
            )
        if best == inf and look + 1 == MAX_MISSES:
            break
        if max(solved[number][i, j] for number, (i, j) in enumerate(pairwise(path))) <= value * (1 + 1e-9):
            break
    if bound < best * (1 - EXACT) and bound < below * (1 - EXACT):
        closed = _closed(stages, places, after, rest_s, min(best, below))
        if closed is not None:
            bound = min(best, below)
            if closed:
                best = _step([part.sums for part in closed], scheme)
                bound, parts = best, closed
    return Found(scheme=scheme, cost=best, bound=min(bound, best), parts=parts)


@dataclass(frozen=True, slots=True)
class _Way:
    """Stages up to a cut: the sum of their t, the longest t, the longest o, and the stages."""

    total: float
    longest: float
    once: float
    parts: tuple[StagePart, ...]

    def beats(self, other: "_Way") -> bool:
        return self.total <= other.total and self.longest <= other.longest and self.once <= other.once


def _closed(
    stages: _Stages, places: Sequence[int], after: np.ndarray, rest_s: float, below: float
) -> tuple[StagePart, ...] | None:
    """Return the cheapest stages of a scheme by going through all that may take less than a step that is known.

    None where these are too many; no stages where none takes less.
    """
    scheme, m = stages.scheme, stages.scheme.micro_batches
    least_s = rest_s * (1 - EXACT)
    ways: dict[int, list[_Way]] = {0: [_Way(0.0, 0.0, 0.0, ())]}
    fronts: dict[Hashable, list[tuple[StagePart, float, float]] | None] = {}
    for number in range(scheme.stages):
        reached: dict[int, list[_Way]] = {}
        for i, before in ways.items():
            ends = [len(places) - 1] if number == scheme.stages - 1 else range(i + 1, len(places))
            for j in ends:
                if j <= i or after[j] - after[i] + least_s > below:
                    continue
                front = _front(stages, places[i], places[j], number, below - least_s, fronts)
                if front is None:
                    return None
                for way in before:
                    for part, t, o in front:
                        own = _Way(way.total + t, max(way.longest, t), max(way.once, o), (*way.parts, part))
                        if own.total + (m - 1) * own.longest + own.once < below * (1 - EXACT):
                            _add(reached.setdefault(j, []), own)
        ways = reached
    last = ways.get(len(places) - 1, [])
    best = min(last, key=lambda way: way.total + (m - 1) * way.longest + way.once, default=None)
    return best.parts if best else ()


def _add(ways: list[_Way], own: _Way) -> None:
    """Keep a way unless another beats it, in the place of those that it beats."""
    if not any(way.beats(own) for way in ways):
        ways[:] = [*(way for way in ways if not own.beats(way)), own]


def _front(
    stages: _Stages,
    first: int,
    beyond: int,
    number: int,
    limit: float,
    known: dict[Hashable, list[tuple[StagePart, float, float]] | None],
) -> list[tuple[StagePart, float, float]] | None:
    """Return a stage's strategies that no other beats, with t and o; None where there are too many to go through."""
    key = first, beyond, number
    if key not in known:
        problem = stages.problem(first, beyond, number)
        front = stage_front(problem, limit)
        known[key] = None
        if front is not None:
            known[key] = [
                (_part(problem, StageFound(choice=choice, sums=sums, bound=0.0), first, beyond), t, o)
                for t, o, choice, sums in front
            ]
    return known[key]


def _least_of_segments(stages: _Stages, places: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Return, for what is between neighbouring cuts, the least (m - 1) t + o and the least t, whatever is around it."""
    known: dict[Hashable, tuple[float, float]] = {}
    found = []
    for first, beyond in pairwise(places):
        key = stages.kinds[first:beyond], first == 0, beyond == len(stages.kinds)
        if key not in known:
            problem = stages.problem(first, beyond, 0, is_apart=True)
            free = StageProblem(tables=problem.tables, weight=problem.weight, in_flight=1, limit_bytes=inf)
            shortest = StageProblem(tables=problem.tables, weight=1e6, in_flight=1, limit_bytes=inf)
            quick = solve_stage(shortest, tolerance=CLOSE)
            least = quick.bound / 1e6
            if quick.sums is not None:
                # What is paid once is no part of it.
                least = max(0.0, least - quick.sums.step / 1e6)
            known[key] = solve_stage(free, tolerance=CLOSE).bound, least
        found.append(known[key])
    return np.array([q for q, _ in found]), np.array([t for _, t in found])


def _least_longest(
    after: np.ndarray, solved: Sequence[dict[tuple[int, int], float]], num_stages: int
) -> tuple[float, tuple[int, ...]]:
    """Return the least longest stage of all cuts, and where these are: places by number, the ends among them.

    after: [places] sums of what segments take at least, up to each. solved: of each stage, what stretches are known to.
    """
    num = len(after)
    spans = np.where(np.arange(num)[None, :] > np.arange(num)[:, None], after[None, :] - after[:, None], np.inf)
    reach = np.full(num, np.inf)
    reach[0] = 0.0
    origins = []
    for number in range(num_stages):
        own = spans.copy()
        for (i, j), value in solved[number].items():
            own[i, j] = max(own[i, j], value)
        # Of equal ones the evenest: what a stage takes beyond the others' longest does not matter.
        longest = np.maximum(reach[:, None], own)
        ties = longest + 1e-9 * np.where(np.isfinite(own), own, 0.0)
        origins.append(ties.argmin(axis=0))
        reach = longest[origins[-1], np.arange(num)]
    path = [num - 1]
    for origin in reversed(origins):
        path.append(int(origin[path[-1]]))
    return float(reach[-1]), tuple(reversed(path))


def _part(problem: StageProblem, found: StageFound, first: int, beyond: int) -> StagePart:
    assert found.sums is not None
    tables = problem.tables
    rows = [layer.rows[c] for layer, c in zip(tables.layers, found.choice, strict=True)]
    return StagePart(
        first=first,
        beyond=beyond,
        configurations=tuple(
            tuple(int(k) for k in splits[row]) for splits, row in zip(tables.configurations, rows, strict=True)
        ),
        states=tuple(int(layer.state[c]) for layer, c in zip(tables.layers, found.choice, strict=True)),
        again=tuple(bool(layer.again[c]) for layer, c in zip(tables.layers, found.choice, strict=True)),
        sums=found.sums,
    )


def _kinds(graph: Graph, keeps: Keeping) -> tuple[int, ...]:
    """Return [V] a number for each layer: equal where all that a stage's answer depends on is."""
    numbers: dict[Hashable, int] = {}
    hides = hiding_layers(graph)
    found = []
    for v, operator in enumerate(graph.operators):
        name = operator.name
        sources = tuple(
            v - graph.index[edge.producer] if (edge := graph.incoming.get((name, i))) else 0
            for i in range(len(operator.reads))
        )
        reads = tuple(((name, i) in keeps.reads, (name, i) in keeps.copies) for i in range(len(operator.reads)))
        writes = tuple((keeps.lanes.get((name, i), 0), (name, i) in keeps.writes) for i in range(len(operator.writes)))
        key = signature(graph, operator), hides[v], sources, reads, writes
        found.append(numbers.setdefault(key, len(numbers)))
    return tuple(found)


def _run_ends(kinds: Sequence[int], at: Sequence[int]) -> tuple[int, ...]:
    """Return the layers that are not recomputed, so that what is before them is a run of its own: of cuts some.

    Where stretches between cuts repeat with a period, one cut of each period; else all of them.
    """
    segments = [tuple(kinds[i:j]) for i, j in pairwise((*at, len(kinds)))]
    for period in range(1, 9):
        alike = [i for i in range(len(segments) - period) if segments[i] == segments[i + period]]
        if len(alike) >= len(segments) / 2:
            return tuple(at[i] for i in range(alike[0] % period, len(at), period))
    return tuple(at)


def _allowed(constraints: Constraints, graph: Graph, devices: int) -> dict[str, IndexArray]:
    """Return the configurations of the layers that constraints are about."""
    left = allowed(constraints, graph, devices)
    if left.ties:
        raise ConfigurationError(
            "layers cannot be tied, nor all be on one mesh, beside micro-batches, stages or modes: pin them instead"
        )
    return {op.name: left.configurations(graph, op) for op in graph.operators if left.of[op.name]}


def plan_of_step(setting: Setting, found: Found, bound: float, time_s: float, graph: Graph | None = None) -> Plan:
    """Return the placed plan of a step; bound: no step takes less; graph: of a micro-batch, where it was imported."""
    scheme = found.scheme
    expected = with_cuts(micro_batch(setting.graph, scheme.micro_batches))
    graph = expected if graph is None else with_cuts(graph)
    if [operator.extents for operator in graph.operators] != [operator.extents for operator in expected.operators]:
        raise ConfigurationError(
            f"{graph.name!r} with one of {scheme.micro_batches} micro-batches has other layers than with the whole "
            "batch: search it with the micro-batch alone"
        )
    layers = tuple(
        LayerChoice(
            splits=dict(zip(operator.extents, splits, strict=True)),
            state=STATES[state],
            is_recomputed=again,
            stage=number,
        )
        for number, part in enumerate(found.parts)
        for operator, splits, state, again in zip(
            graph.operators[part.first : part.beyond], part.configurations, part.states, part.again, strict=True
        )
    )
    step = Step(
        graph=graph,
        num_devices=setting.num_devices,
        machine=setting.machine,
        cost_model=setting.cost_model,
        optimiser=setting.optimiser,
        micro_batches=scheme.micro_batches,
        schedule=setting.schedule if scheme.stages > 1 else "",
        layers=layers,
    )
    assert abs(step.cost - found.cost) <= 1e-9 * found.cost, f"the step costs {step.cost}, found was {found.cost}"
    return Plan(
        graph=graph,
        machine=setting.machine,
        num_devices=setting.num_devices,
        cost_model=setting.cost_model,
        cost_unit=cost_model(setting.cost_model, setting.machine, setting.num_devices, graph.precision).unit,
        layers=step.plans(),
        total_cost=step.cost,
        lower_bound=min(bound, step.cost),
        exact=bound >= step.cost * (1 - EXACT),
        baselines={"data_parallel": data_parallel_step(step).cost},
        search=SearchRecord(ordering="stages", largest_dependent_set=0, time_s=time_s, peak_memory_bytes=0),
        tool_version=__version__,
        optimiser=setting.optimiser,
        device_memory_bytes=None if setting.limit_bytes == inf else int(setting.limit_bytes),
        constraints=setting.constraints,
        micro_batches=scheme.micro_batches,
        schedule=step.schedule,
        num_groups=scheme.stages,
    )


def data_parallel_step(step: Step) -> Step:
    """Return the step of the same micro-batches in data parallelism: one stage, weights whole, nothing recomputed."""
    splits = data_parallel_splits(step.graph, step.num_devices)
    layers = (LayerChoice(splits=split, state=STATES[0], is_recomputed=False, stage=0) for split in splits)
    return replace(step, schedule="", layers=tuple(layers))
