"""The search over micro-batches, stages and modes of layers: for each number of both, the cheapest stages there are.

A step of m micro-batches on S stages of p / S devices each takes Σ t + (m - 1) max t + max o (`pase.costs.schedules`).
The stages are cut where a single tensor goes on, so that, with what handing it over takes told by either end, each is a
problem of its own (`stage_problem`): α t + o for α = m - 1, whose answers for equal stretches of layers are the same.
For all cuts at once, the least of the longest stage's (m - 1) t + o, and the sum of the least t of all layers, bound
the step from below; cuts are looked at in the order of that bound, stages of bounds are replaced by stages that are
solved, until the cuts with the least bound consist of these. Numbers of stages and micro-batches whose work alone
would take longer than the best step known are passed over.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache, partial
from heapq import heapify, heappop, heappush
from itertools import pairwise
from math import inf
from multiprocessing import get_context
from time import perf_counter
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pase._version import __version__
from pase.costs import CostModel, cost_model, hiding_layers, signature, traffic_of
from pase.costs.collectives import Link
from pase.costs.memory import Keeping, keeping
from pase.costs.modes import STATES, BoolArray, KnownModes, LayerModes, Links, ModeSpace, layer_choices, mode_tables
from pase.costs.schedules import ONE_FORWARD_ONE_BACKWARD, in_flight, step_s
from pase.costs.traffic import LayerTraffic
from pase.errors import ConfigurationError, MachineError, MemoryLimitError
from pase.graph import Graph
from pase.graph.micro_batch import micro_batch
from pase.graph.stages import cuts, stage, with_cuts
from pase.machine import Machine
from pase.planning.constraints import Constraints, allowed
from pase.planning.links import group_links
from pase.planning.plan import Plan, SearchRecord
from pase.planning.stage_problem import (
    CRITERIA,
    Choice,
    Looked,
    StageFound,
    StageProblem,
    StageSums,
    climb,
    memory_weights,
    sides_of,
    sides_of_time,
    solve_stage,
    stage_front,
)
from pase.planning.steps import LayerChoice, Step
from pase.sharding.configurations import data_parallel_splits, divisors
from pase.sharding.shards import FloatArray, IndexArray

MAX_LOOKS, MAX_MISSES = 16, 3
"""At cuts, for one number of stages and micro-batches; and at cuts of which nothing fits, before any does."""
MIN_RESTRICTED, SLACK = 12_000, 0.3
"""Choices of different layers from which on tables are made of some of them, which come within so much of the layers
between cuts; the others count with what they come to by themselves."""
PRICES = np.geomspace(0.02, 20.0, 11)
"""Of a device's memory, beside what a stage takes where memory costs nothing."""
MAX_CLIMB = 12
"""Points at most at which layers are looked at by themselves to find where they take most."""
MAX_IN_FLIGHT = 12
"""Numbers of micro-batches under way that are told apart where layers are looked at by themselves."""
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
    waiting: list[_Waiting] = []
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
            least = (m + scheme.stages - 1) * works[m] / setting.num_devices
            waiting.append(_Waiting(least, 0, scheme.stages, m))
    heapify(waiting)
    best: Found | None = None
    bound = inf
    num, done = len(waiting) * (len(_LOOKS) + 1), 0
    own = ProcessPoolExecutor(jobs, get_context("spawn")) if executor is None and jobs > 1 else None
    chosen = executor or own
    try:
        while waiting:
            below = inf if best is None else best.cost
            if waiting[0].bound >= below * (1 - EXACT) or (perf_counter() > deadline_s and best is not None):
                # In the order of what they take at least: the rest is no better, or is not looked at any more.
                bound = min(bound, waiting[0].bound)
                break
            level = waiting[0].level
            wave: list[_Waiting] = []
            while waiting and waiting[0].level == level and waiting[0].bound < below and len(wave) < WAVES[level]:
                wave.append(heappop(waiting))
            look = partial(_look, setting, level, below=below)
            asked = [chosen.submit(look, each) for each in wave] if chosen else []
            answers = [each.result() for each in asked] or [look(each) for each in wave]
            for each, found in zip(wave, answers, strict=True):
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
    finally:
        if own:
            own.shutdown(cancel_futures=True)
    if best is None:
        raise MemoryLimitError(
            f"no strategy of {setting.graph.name!r} is known that fits {setting.limit_bytes:.3g} bytes on each of "
            f"{setting.num_devices} devices: use more devices, allow more modes, stages or micro-batches, or a smaller "
            "batch"
        )
    return best, min(best.cost, bound)


class _Waiting(NamedTuple):
    """A scheme that is to be looked at; of equal bounds those that were looked at least come first."""

    bound: float
    level: int
    stages: int
    micro_batches: int


def _look(setting: Setting, level: int, waiting: _Waiting, *, below: float) -> "Found":
    """Look at a scheme more closely than before: at its layers, at what is between cuts, at its stages."""
    scheme = Scheme(stages=waiting.stages, micro_batches=waiting.micro_batches)
    if level < len(_LOOKS):
        return Found(scheme=scheme, cost=inf, bound=_LOOKS[level](setting, scheme), parts=())
    return solve_scheme(setting, scheme, below=below)


def work_s(setting: Setting, micro_batches: int) -> float:
    """Return what the work of one of so many micro-batches takes on one device.

    Shared out it takes no less in all. Parts may fit caches that the whole does not: what is read beyond these is left
    out.
    """
    machine = setting.machine
    if machine.kernels:
        machine = replace(machine, kernels=replace(machine.kernels, beyond=None, cache_bytes=0))
    graph = _batch(setting.graph, micro_batches).graph
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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Batch:
    """The graph of a micro-batch, with cuts, and what it has under every scheme.

    at: before which layers it can be cut. kinds: [V] numbers, equal where all that a stage's answer depends on is.
    fixed: layers that are not recomputed, so that runs of layers that are end there. hides: as `hiding_layers` has it.
    """

    graph: Graph
    keeps: Keeping
    at: tuple[int, ...]
    kinds: tuple[int, ...]
    fixed: frozenset[str]
    hides: tuple[tuple[bool, bool], ...]


@lru_cache(maxsize=32)
def _batch(whole: Graph, micro_batches: int) -> _Batch:
    graph = with_cuts(micro_batch(whole, micro_batches))
    keeps, at = keeping(graph), cuts(graph)
    kinds = _kinds(graph, keeps)
    return _Batch(
        graph=graph,
        keeps=keeps,
        at=at,
        kinds=kinds,
        fixed=frozenset(graph.operators[v].name for v in _run_ends(kinds, at)),
        hides=hiding_layers(graph),
    )


def _told_apart(batch: _Batch, only: Mapping[str, IndexArray], space: ModeSpace) -> _Batch:
    """Return a batch whose kinds tell apart layers that are left other configurations or modes."""
    if not only and not space.layers:
        return batch
    numbers: dict[Hashable, int] = {}
    kinds = []
    for operator, kind in zip(batch.graph.operators, batch.kinds, strict=True):
        left = only.get(operator.name)
        key = kind, space.of(operator.name), None if left is None else left.tobytes()
        kinds.append(numbers.setdefault(key, len(numbers)))
    return replace(batch, kinds=tuple(kinds))


@dataclass
class _Stages:
    """The stages of a scheme: what they are made of, and those that are solved by now.

    only: the configurations of some layers that tables have. beyond: [V] of each layer, what the choices that they
    leave out take, as in `StageProblem`; () where none is left out. pool: strategies of parts of stages.
    """

    setting: Setting
    scheme: Scheme
    batch: _Batch
    model: CostModel
    links: tuple[Link | None, ...]
    only: Mapping[str, IndexArray]
    beyond: tuple[FloatArray, ...] = ()
    known: KnownModes = field(default_factory=KnownModes)
    pool: dict[Hashable, list[Looked]] = field(default_factory=dict)
    tables: dict[Hashable, StageProblem] = field(default_factory=dict)
    solved: dict[tuple[Hashable, int], tuple[StageProblem, StageFound]] = field(default_factory=dict)

    @classmethod
    def of(cls, setting: Setting, scheme: Scheme) -> "_Stages":
        batch, devices = _batch(setting.graph, scheme.micro_batches), setting.num_devices // scheme.stages
        only = _allowed(setting.constraints, batch.graph, devices)
        return cls(
            setting=setting,
            scheme=scheme,
            batch=_told_apart(batch, only, setting.space),
            model=cost_model(setting.cost_model, setting.machine, devices, batch.graph.precision),
            links=group_links(setting.machine, setting.num_devices, scheme.stages),
            only=only,
        )

    @property
    def devices(self) -> int:
        """Of each stage."""
        return self.setting.num_devices // self.scheme.stages

    @cached_property
    def places(self) -> tuple[int, ...]:
        """Where stages may begin and end."""
        return (0, *(self.batch.at if self.scheme.stages > 1 else ()), len(self.batch.kinds))

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
        kinds = self.batch.kinds
        return kinds[first:beyond], first == 0, beyond == len(kinds), self.links_of(number)

    def choices(self) -> tuple[list[LayerModes], list[LayerTraffic]]:
        """Return the choices of all layers, wherever they are, and their traffic: in a stage none takes less."""
        setting, batch = self.setting, self.batch
        alike = [(kind, op.name in batch.fixed) for kind, op in zip(batch.kinds, batch.graph.operators, strict=True)]
        first = {key: v for v, key in reversed(list(enumerate(alike)))}
        which = {key: n for n, (key, _) in enumerate(sorted(first.items(), key=lambda item: item[1]))}
        layers, traffic = layer_choices(
            batch.graph,
            self.devices,
            self.model,
            setting.space,
            known=self.known,
            keeps=batch.keeps,
            fixed=batch.fixed,
            optimiser=setting.optimiser,
            only=self.only,
            hides=batch.hides,
            among=frozenset(batch.graph.operators[v].name for v in first.values()),
        )
        return [layers[which[key]] for key in alike], [traffic[which[key]] for key in alike]

    def problem(self, first: int, beyond: int, number: int) -> StageProblem:
        """Return the problem of a stage."""
        key = self.key(first, beyond, number)
        if key not in self.tables:
            self.tables[key] = self._problem(first, beyond, self.links_of(number), None)
        return replace(self.tables[key], in_flight=self.in_flight(number))

    def segment(self, first: int, beyond: int) -> StageProblem:
        """Return the problem of layers wherever a stage begins and ends: it takes no more than they do there."""
        kinds = self.batch.kinds
        key = kinds[first:beyond], first == 0, beyond == len(kinds)
        if key not in self.tables:
            self.tables[key] = self._problem(first, beyond, (None, None), self.batch.hides[first:beyond])
        return self.tables[key]

    def _problem(
        self, first: int, beyond: int, links: Links, hides: Sequence[tuple[bool, bool]] | None
    ) -> StageProblem:
        batch = self.batch
        tables = mode_tables(
            batch.graph if (first, beyond) == (0, len(batch.kinds)) else stage(batch.graph, first, beyond),
            self.devices,
            self.model,
            self.setting.space,
            known=self.known,
            keeps=batch.keeps,
            fixed=batch.fixed,
            optimiser=self.setting.optimiser,
            links=links,
            only=self.only,
            hides=hides,
        )
        return StageProblem(
            tables=tables,
            weight=self.weight,
            in_flight=1,
            limit_bytes=self.setting.limit_bytes,
            beyond=self.beyond[first:beyond],
        )

    def solve(self, first: int, beyond: int, number: int, near: FloatArray | None) -> tuple[StageProblem, StageFound]:
        """Return the answer to a stage; near: shares of the sides and a price to begin at."""
        key = self.key(first, beyond, number), self.in_flight(number)
        if key not in self.solved:
            problem = self.problem(first, beyond, number)
            # What fits with more micro-batches under way fits with fewer.
            alike = [
                answer.choice for (kind, _), (_, answer) in self.solved.items() if kind == key[0] and answer.choice
            ]
            found = solve_stage(problem, known=alike, tolerance=CLOSE, pool=self.pool, near=near)
            self.solved[key] = problem, found
        return self.solved[key]


class _Spans:
    """What stages take at least, from one place to another, by relaxations of all of them.

    At a point, shares of the sides of α t + o and a price of a byte, layers come to sums that add up (`stage_problem`).

    longest, totals: of each stage by number, [places, places] of α t + o and of t; infinite where no stage is.
    """

    def __init__(self, stages: _Stages) -> None:
        self.stages = stages
        num = len(stages.places)
        nothing = np.where(np.arange(num)[None, :] > np.arange(num)[:, None], 0.0, np.inf)
        self.longest = [nothing.copy() for _ in range(stages.scheme.stages)]
        self.totals = [nothing.copy() for _ in range(stages.scheme.stages)]
        self._at = [np.full((num, num), -1) for _ in range(stages.scheme.stages)]
        self._points: list[FloatArray] = []
        hides = stages.model.overlap > 0
        self._sides = sides_of(stages.weight, hides=hides), sides_of_time(hides=hides)

    def point(self, number: int, i: int, j: int) -> FloatArray:
        """Return the shares and the price at which a stage is known to take most."""
        found: FloatArray = self._points[int(self._at[number][i, j])]
        return found

    def weights(self, number: int, point: FloatArray) -> FloatArray:
        """Return the [criteria] of a point for the layers of a stage."""
        sides, shares = self._sides[0], point[:-1]
        # A stage in which nothing streams has fewer sides.
        first, others = sides[0], sides[1 : 1 + len(shares)]
        costs: FloatArray = first + shares @ (others - first)
        weights: FloatArray = costs + point[-1] * self._memory(number)
        return weights

    def _memory(self, number: int) -> FloatArray:
        return memory_weights(self.stages.in_flight(number))

    def by_layers(self, layers: Sequence[LayerModes], kinds: Mapping[int, FloatArray]) -> None:
        """Raise what stages take to what their layers do by themselves, edges left out; kinds: columns by identity."""
        stages, limit = self.stages, self.stages.setting.limit_bytes
        number_of = {key: n for n, key in enumerate(kinds)}
        which = np.array([number_of[id(layer)] for layer in layers])
        free = np.array([max((columns @ self._sides[0][0]).min(), 0.0) for columns in kinds.values()])[which].sum()
        prices = np.zeros(1)
        if limit < np.inf and limit > 0:
            prices = np.concatenate([prices, free / stages.scheme.stages / limit * PRICES])
        for numbers in self._alike():
            ways = list(zip(self._sides, (self.longest, self.totals), strict=True))
            for sides, spans in ways[: 1 if stages.scheme.stages == 1 else 2]:
                scale = sides[0, 0] / self._sides[0][0, 0]
                weights = [side + scale * price * self._memory(numbers[0]) for side in sides for price in prices]
                matrix = np.stack(weights, axis=1)
                points = [
                    np.array([*np.eye(len(sides))[k, 1:], scale * price]) for k in range(len(sides)) for price in prices
                ]
                each = np.stack([np.maximum(own @ matrix, 0.0).min(axis=0) for own in kinds.values()])
                up_to = np.concatenate([np.zeros((1, len(points))), np.cumsum(each[which], axis=0)])
                self._raise(spans, numbers, points, up_to[list(stages.places)])

    def by_layers_at(
        self, layers: Sequence[LayerModes], columns: Mapping[int, FloatArray], path: Sequence[int]
    ) -> None:
        """Raise what stages take as `by_layers` does, where what those of some cuts take is highest."""
        stages, limit = self.stages, self.stages.setting.limit_bytes
        for number, (i, j) in enumerate(pairwise(path)):
            if number and stages.in_flight(number) == stages.in_flight(number - 1):
                continue
            own = Counter(id(layer) for layer in layers[stages.places[i] : stages.places[j]])

            def least(weights: FloatArray, own: Mapping[int, int] = own) -> tuple[FloatArray, float]:
                found = np.zeros(len(CRITERIA))
                for key, count in own.items():
                    found += count * columns[key][np.maximum(columns[key] @ weights, 0.0).argmin()]
                return found, float(found @ weights)

            point = climb(
                least,
                sides=self._sides[0],
                memory=self._memory(number),
                room=limit,
                tolerance=CLOSE,
                most=MAX_CLIMB,
                near=self.point(number, i, j),
            ).at
            weights = self.weights(number, point)
            each = {key: float(np.maximum(own @ weights, 0.0).min()) for key, own in columns.items()}
            up_to = np.concatenate([[0.0], np.cumsum([each[id(layer)] for layer in layers])])[list(stages.places)]
            self._raise(self.longest, self._fuller(number), [point], up_to[:, None])

    def _fuller(self, number: int) -> list[int]:
        """Return the stages that have at least as many micro-batches under way."""
        stages = self.stages
        return [n for n in range(stages.scheme.stages) if stages.in_flight(n) >= stages.in_flight(number)]

    def by_segments(self, number: int, point: FloatArray) -> None:
        """Raise what this stage and others take to what the layers between cuts do, at a point.

        Edges over cuts are left out. The others have at least as many micro-batches under way.
        """
        stages, batch = self.stages, self.stages.batch
        numbers = self._fuller(number)
        places, at = (0, *batch.at, len(batch.kinds)), set(stages.places)
        price = point[-1] / self._sides[0][0, 0]
        ways = [(self.longest, self.weights(number, point), point)]
        if stages.scheme.stages > 1:
            # Of the sides of α t + o the last one alone has what does not hide in any micro-batch.
            shares = point[1:-1] if len(self._sides[1]) > 1 else point[:0]
            sides = self._sides[1]
            costs: FloatArray = sides[0] + shares @ (sides[1 : 1 + len(shares)] - sides[0])
            ways.append((self.totals, costs + price * self._memory(number), np.array([price])))
        for spans, weights, own in ways:
            up_to, total, least = [0.0], 0.0, dict[int, float]()
            for first, beyond in pairwise(places):
                segment = stages.segment(first, beyond)
                if id(segment) not in least:
                    least[id(segment)] = segment.least(weights, stages.pool)
                total += least[id(segment)]
                if beyond in at:
                    up_to.append(total)
            self._raise(spans, numbers, [own], np.array(up_to)[:, None])

    def _raise(
        self, spans: list[FloatArray], numbers: Sequence[int], points: Sequence[FloatArray], up_to: FloatArray
    ) -> None:
        """Raise spans of stages to the differences of [places, points] sums, less what a device's memory is worth."""
        limit, num = self.stages.setting.limit_bytes, len(up_to)
        most, by = np.full((num, num), -np.inf), np.zeros((num, num), dtype=np.intp)
        for n, (point, sums) in enumerate(zip(points, up_to.T, strict=True)):
            own = sums[None, :] - sums[:, None] - (point[-1] * limit if point[-1] > 0 else 0.0)
            by[own > most] = n
            np.maximum(most, own, out=most)
        for number in numbers:
            # Where no stage is they are infinite.
            if spans is self.longest:
                is_higher = (most > spans[number]) | (self._at[number] < 0)
                self._at[number][is_higher] = len(self._points) + by[is_higher]
            np.maximum(spans[number], most, out=spans[number])
        self._points += points

    def solved(self, number: int, width: int, key: Hashable, bound: float) -> None:
        """Raise what a stage takes, wherever the same layers are, to what is known once it is solved."""
        stages, places = self.stages, self.stages.places
        for i in range(len(places) - width):
            if stages.key(places[i], places[i + width], number) == key:
                self.longest[number][i, i + width] = max(self.longest[number][i, i + width], bound)

    def _alike(self) -> list[list[int]]:
        """Return groups of stages that have about as many micro-batches under way, the first of each fewest."""
        flights: dict[int, list[int]] = {}
        for number in range(self.stages.scheme.stages):
            flights.setdefault(self.stages.in_flight(number), []).append(number)
        ordered = [flights[count] for count in sorted(flights)]
        step = -(-len(ordered) // MAX_IN_FLIGHT)
        groups = [ordered[k : k + step] for k in range(0, len(ordered), step)]
        return [[number for numbers in group for number in numbers] for group in groups]

    def bound(self) -> tuple[float, tuple[int, ...]]:
        """Return what every step of the scheme takes at least, and cuts that may take no more: places by number."""
        scheme = self.stages.scheme
        value, path = _least_longest(self.longest)
        if scheme.stages == 1 or not 0 < value < inf:
            return value, path
        if scheme.micro_batches == 1:
            return max(value, self.least_total()), path
        # Whatever O, the longest o, is: (m - 1) t >= ((m - 1) t + o) - O, of which less is known the more of t is.
        weight = self.stages.weight
        share = scheme.stages / (scheme.stages + weight)
        both = [(1 - share) * own + share * weight * t for own, t in zip(self.longest, self.totals, strict=True)]
        apart = self._bound(self.longest, self.totals)
        return max(apart, self._bound(both, [own / weight for own in both]), key=lambda found: found[0])

    @staticmethod
    def _bound(longest: Sequence[FloatArray], totals: Sequence[FloatArray]) -> tuple[float, tuple[int, ...]]:
        """Return the least sum of stages, and the longest of others, over all cuts, as far as it is told apart."""
        value, path = _least_longest(longest)
        least = _least_total(totals, [spans < np.inf for spans in longest])[0]
        # The longest stage lies between two of these values: then no stage is longer than the higher one.
        best, low = inf, value
        while low + least < best:
            high = low * (1 + CLOSE / 4)
            total, own = _least_total(totals, [spans <= high for spans in longest])
            if low + total < best:
                best, path = low + total, own
            low = high
        return best, path

    def least_total(self) -> float:
        """Return what a micro-batch takes on all stages at least."""
        return _least_total(self.totals, [spans < np.inf for spans in self.longest])[0]


def _restricted(stages: _Stages, spans: _Spans, path: Sequence[int]) -> None:
    """Leave configurations out of the tables that come to much more than others at the points of some cuts."""
    batch = stages.batch
    layers, traffic = stages.choices()
    if sum(map(len, {id(layer): layer for layer in layers}.values())) <= MIN_RESTRICTED:
        return
    weights = [
        spans.weights(number, np.array([*point[:-1], factor * point[-1]]))
        for number, (i, j) in enumerate(pairwise(path))
        for point in (spans.point(number, i, j),)
        for factor in (0.7, 1.0, 1.5)
    ]
    matrix = np.stack(weights, axis=1)
    kinds = {id(layer): (layer, own.splits.values) for layer, own in zip(layers, traffic, strict=True)}
    sums = {key: np.maximum(layer.figures.columns(CRITERIA) @ matrix, 0.0) for key, (layer, _) in kinds.items()}
    room: dict[int, FloatArray] = {}
    for first, beyond in pairwise((0, *batch.at, len(layers))):
        total = sum(sums[id(layer)].min(axis=0) for layer in layers[first:beyond])
        for layer in layers[first:beyond]:
            room[id(layer)] = np.maximum(room.get(id(layer), 0.0), SLACK * total)
    only: dict[int, IndexArray] = {}
    left_out: dict[int, FloatArray] = {}
    for key, (layer, configurations) in kinds.items():
        is_near = (sums[key] - sums[key].min(axis=0) <= room[key]).any(axis=1)
        rows = np.unique(layer.rows[is_near])
        only[key] = configurations[rows]
        left_out[key] = layer.figures.columns(CRITERIA)[~np.isin(layer.rows, rows)]
    stages.only = {
        operator.name: only[id(layer)] for operator, layer in zip(batch.graph.operators, layers, strict=True)
    }
    stages.beyond = tuple(left_out[id(layer)] for layer in layers)


def _by_layers(stages: _Stages) -> tuple[_Spans, float, tuple[int, ...]]:
    """Return what stages take by their layers alone, the bound of the scheme, and cuts that may take no more."""
    spans, layers = _Spans(stages), stages.choices()[0]
    columns = {key: layer.figures.columns(CRITERIA) for key, layer in {id(layer): layer for layer in layers}.items()}
    spans.by_layers(layers, columns)
    for _ in range(2):
        spans.by_layers_at(layers, columns, spans.bound()[1])
    return spans, *spans.bound()


@lru_cache(maxsize=4)
def _by_segments(setting: Setting, scheme: Scheme) -> tuple[_Spans, float, tuple[int, ...]]:
    """Return what stages take by what is between cuts, the bound of the scheme, and cuts that may take no more."""
    stages = _Stages.of(setting, scheme)
    spans, _, path = _by_layers(stages)
    _restricted(stages, spans, path)
    for number, (i, j) in enumerate(pairwise(path)):
        if number == 0 or stages.in_flight(number) != stages.in_flight(number - 1):
            spans.by_segments(number, spans.point(number, i, j))
    return spans, *spans.bound()


_LOOKS: tuple[Callable[[Setting, Scheme], float], ...] = (
    lambda setting, scheme: _by_layers(_Stages.of(setting, scheme))[1],
    lambda setting, scheme: _by_segments(setting, scheme)[1],
)
"""Bounds of a scheme, the quicker ones first."""
WAVES = (8, 4, 2)
"""Schemes that are looked at before others may be told to take longer, by how closely."""


def solve_scheme(setting: Setting, scheme: Scheme, *, below: float = inf) -> Found:
    """Return the cheapest step of a scheme, as far as it is known; below: of no interest if it takes longer."""
    spans, bound, path = _by_segments(setting, scheme)
    stages, places = spans.stages, spans.stages.places
    best, parts = inf, tuple[StagePart, ...]()

    def is_closed() -> bool:
        return bound >= min(best, below) * (1 - CLOSE / 2)

    for look in range(MAX_LOOKS):
        if is_closed() or bound == inf:
            break
        found, is_known = list[tuple[StageProblem, StageFound]](), True
        for number, (i, j) in enumerate(pairwise(path)):
            is_known &= (stages.key(places[i], places[j], number), stages.in_flight(number)) in stages.solved
            point = spans.point(number, i, j)
            if found and found[-1][1].at is not None:
                point = found[-1][1].at.copy()
                point[-1] *= stages.in_flight(number - 1) / stages.in_flight(number)
            found.append(stages.solve(places[i], places[j], number, point))
            answer = found[-1][1]
            if answer.at is not None and not is_known:
                spans.by_segments(number, answer.at)
            spans.solved(number, j - i, stages.key(places[i], places[j], number), answer.bound)
        sums = [answer.sums for _, answer in found if answer.sums is not None]
        if len(sums) == len(found) and _step(sums, scheme) < best:
            best = _step(sums, scheme)
            parts = tuple(
                _part(problem, answer.choice, own, places[i], places[j])
                for (problem, answer), own, (i, j) in zip(found, sums, pairwise(path), strict=True)
            )
        before = bound
        bound, path = spans.bound()
        bound = max(bound, before)
        is_still = bound <= before * (1 + (EXACT if is_known else CLOSE / 4)) and best < inf
        if is_still or (best == inf and look + 1 == MAX_MISSES):
            break
    if bound < min(best, below) * (1 - EXACT):
        closed = _closed(stages, spans, min(best, below))
        if closed is not None:
            bound = min(best, below)
            if closed:
                best = _step([part.sums for part in closed], scheme)
                bound, parts = best, closed
    return Found(scheme=scheme, cost=best, bound=min(bound, best), parts=parts)


def _step(sums: Sequence[StageSums], scheme: Scheme) -> float:
    return step_s([s.micro_batch for s in sums], [s.step for s in sums], scheme.micro_batches)


def _least_longest(spans: Sequence[FloatArray]) -> tuple[float, tuple[int, ...]]:
    """Return the least longest stage of all cuts, and where these are: places by number, the ends among them."""
    reach = np.full(len(spans[0]), np.inf)
    reach[0] = 0.0
    origins = []
    for own in spans:
        longest = np.maximum(reach[:, None], own)
        # Of equal ones the evenest: what a stage takes beyond the others' longest does not matter.
        ties = longest + 1e-9 * np.where(np.isfinite(own), own, 0.0)
        origins.append(ties.argmin(axis=0))
        reach = longest[origins[-1], np.arange(len(reach))]
    return float(reach[-1]), _back(origins)


def _least_total(spans: Sequence[FloatArray], is_allowed: Sequence[BoolArray]) -> tuple[float, tuple[int, ...]]:
    """Return the least sum of stages of all cuts, of stages that are allowed, and where these are."""
    reach = np.full(len(spans[0]), np.inf)
    reach[0] = 0.0
    origins = []
    for own, allowed_here in zip(spans, is_allowed, strict=True):
        sums = reach[:, None] + np.where(allowed_here, own, np.inf)
        origins.append(sums.argmin(axis=0))
        reach = sums[origins[-1], np.arange(len(reach))]
    return float(reach[-1]), _back(origins)


def _back(origins: Sequence[NDArray[np.intp]]) -> tuple[int, ...]:
    path = [len(origins[0]) - 1]
    for origin in reversed(origins):
        path.append(int(origin[path[-1]]))
    return tuple(reversed(path))


@dataclass(frozen=True, slots=True)
class _Way:
    """Stages up to a cut: the sum of their t, the longest t, the longest o, and the stages."""

    total: float
    longest: float
    once: float
    parts: tuple[StagePart, ...]

    def beats(self, other: "_Way") -> bool:
        return self.total <= other.total and self.longest <= other.longest and self.once <= other.once


def _closed(stages: "_Stages", spans: "_Spans", below: float) -> tuple[StagePart, ...] | None:
    """Return the cheapest stages of a scheme by going through all that may take less than a step that is known.

    None where these are too many; no stages where none takes less.
    """
    scheme, m, places = stages.scheme, stages.scheme.micro_batches, stages.places
    rest_s = spans.least_total() * (1 - EXACT) if m > 1 else 0.0
    ways: dict[int, list[_Way]] = {0: [_Way(0.0, 0.0, 0.0, ())]}
    fronts: dict[Hashable, list[tuple[StagePart, float, float]] | None] = {}
    for number in range(scheme.stages):
        reached: dict[int, list[_Way]] = {}
        for i, before in ways.items():
            ends = [len(places) - 1] if number == scheme.stages - 1 else range(i + 1, len(places))
            for j in ends:
                if j <= i or spans.longest[number][i, j] + rest_s > below:
                    continue
                front = _front(stages, places[i], places[j], number, below - rest_s, fronts)
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
            known[key] = [(_part(problem, choice, sums, first, beyond), t, o) for t, o, choice, sums in front]
    return known[key]


def _part(problem: StageProblem, choice: Choice, sums: StageSums, first: int, beyond: int) -> StagePart:
    tables = problem.tables
    rows = [layer.rows[c] for layer, c in zip(tables.layers, choice, strict=True)]
    return StagePart(
        first=first,
        beyond=beyond,
        configurations=tuple(
            tuple(int(k) for k in splits[row]) for splits, row in zip(tables.configurations, rows, strict=True)
        ),
        states=tuple(int(layer.state[c]) for layer, c in zip(tables.layers, choice, strict=True)),
        again=tuple(bool(layer.again[c]) for layer, c in zip(tables.layers, choice, strict=True)),
        sums=sums,
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
