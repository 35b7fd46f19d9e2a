"""`Session`: what a search has worked out is kept, so that planning again costs what has changed.

Steps of one stage and a known number of micro-batches, plain plans above all, are one problem of costs
(`pase.planning.one_stage`), of which each part depends on more than those before it. Which layers are alike depends on
the graph; what they compute and send, and how far layouts overlap, on the numbers of devices and micro-batches besides;
cost tables on the machine and the modes besides (under the `paper` model another bandwidth is another factor); and
constraints only leave out some of the choices. Along with the tables the session keeps the messages of the solver's
bound (`pase.solver.WarmStart`): among the strategies that constraints leave they prove at once nearly all that there is
to prove.

Steps of several stages, or of numbers that are to be chosen, are searched each time (`pase.planning.pipelines`).
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from math import inf
from time import perf_counter
from typing import Any, TypedDict, Unpack

import numpy as np

from pase.common.containers import FrozenDict
from pase.common.documents import StrPath
from pase.costs import STATES, Allowance, Problem, cost_model
from pase.costs.choice_tables import KnownChoices
from pase.costs.choices import LayerChoices
from pase.costs.edges import KnownTransfers
from pase.costs.states import ModeSpace
from pase.errors import ConfigurationError, SolverError, unknown_name
from pase.graph import Graph, Operator, precision_of
from pase.graph.operators import with_fan_outs
from pase.graph.precision import FLOAT32
from pase.importers import load
from pase.machine import DEFAULT_MACHINE, Machine, load_machine
from pase.planning.constraints import Allowed, Constraints, allowed, with_ties
from pase.planning.memory_limit import MemoryLimit, cheapest_within, limit_of, nothing_fits
from pase.planning.one_stage import problem_of_setting, step_cost
from pase.planning.pipelines import found_as_one, nothing_known_to_fit, plan_of_step, schemes
from pase.planning.plan import Plan
from pase.planning.planner import (
    AUTO_NUMBER,
    GATHER,
    RING,
    WITHOUT_LIMIT,
    SearchOptions,
    SearchSettings,
    check_memory,
    check_search,
    chosen_options,
    number_of,
    prepared,
    reload_of,
    search,
    setting_of,
)
from pase.planning.problems import data_parallel_choice, plan_of
from pase.planning.spans import CLOSE, EXACT, Setting
from pase.planning.steps import TrainingStep, chosen_layers
from pase.solver import (
    CutShortError,
    NothingFitsError,
    Solution,
    WarmStart,
    default_solver_memory_bytes,
    nearest,
    solve,
    solve_again,
    warm_start,
    warm_start_from,
)
from pase.tables.cost_tables import IndexArray

MAX_KEPT = 4
"""Numbers of devices and micro-batches, and batches, whose tables are kept, and sets of modes of each: some 20 MB each
for a network of a few hundred layers without modes."""

OF_SEARCH = ("constraints", "device_memory_bytes", "stages", "micro_batches", "modes")
"""The changes that are options of a search, by their names there."""


class Changes(TypedDict, total=False):
    """What `Session.replan` changes; each stays until it is changed again.

    constraints: all that hold from now on, in place of those before, as for `pase.search`; None: none do. batch:
    examples in a step, of a model that `pase.load` builds; None: as many as it has by itself. devices: how many there
    are. machine: a `Machine`, the name of a preset, or the path of a file. bandwidth_bytes_per_s: of the slowest link
    that the devices use; None: the machine's. flop_per_byte: r of Eq. 1, which sets that bandwidth; None: as it is.
    device_memory_bytes: what a training step may take on each device; None: no limit. stages, micro_batches, modes: as
    for `pase.search`.
    """

    constraints: object
    batch: int | None
    devices: int
    machine: Machine | StrPath
    bandwidth_bytes_per_s: float | None
    flop_per_byte: float | None
    device_memory_bytes: int | None
    stages: int | str
    micro_batches: int | str
    modes: Sequence[str]


@dataclass(frozen=True, kw_only=True, eq=False)
class Answer:
    """A cheapest step with its certificate, as `Session.replan` returns it: what a plan says before it is placed.

    Costs, bounds and baselines are those of a plan. Which device has which part of each layer is worked out when
    `plan` is first asked for: for large networks that takes longer than to find the strategy.

    Attributes:
        step: The strategy: of each layer its splits, stage and modes; how many micro-batches and stages there are.
        total_cost: F(G, φ) (Eq. 1), or what a step of several parts takes, in `cost_unit`.
        lower_bound: No strategy that was to choose from costs less.
        exact: Whether the strategy is proven to be a cheapest one.
        constraints: What it was to keep to.
        device_memory_bytes: What it was to fit, or None.
        baselines: Total cost of other strategies by name.
        time_s: What finding it took.
        placed: Returns its plan.
    """

    step: TrainingStep
    total_cost: float
    lower_bound: float
    exact: bool
    cost_unit: str
    constraints: Constraints
    device_memory_bytes: int | None
    baselines: Mapping[str, float]
    time_s: float
    placed: Callable[[], Plan]

    def __post_init__(self) -> None:
        object.__setattr__(self, "baselines", FrozenDict(self.baselines))

    @classmethod
    def of(cls, plan: Plan) -> "Answer":
        """Return a plan that was searched as an answer."""
        return cls(
            step=TrainingStep.of(plan),
            total_cost=plan.total_cost,
            lower_bound=plan.lower_bound,
            exact=plan.exact,
            cost_unit=plan.cost_unit,
            constraints=plan.constraints,
            device_memory_bytes=plan.device_memory_bytes,
            baselines=plan.baselines,
            time_s=plan.search.time_s,
            placed=lambda: plan,
        )

    @property
    def gap(self) -> float:
        """(total_cost - lower_bound) / total_cost, 0 where exact."""
        return 0.0 if self.exact or self.total_cost == 0 else (self.total_cost - self.lower_bound) / self.total_cost

    @property
    def machine(self) -> Machine:
        """That it is planned for, with the bandwidth that was wanted."""
        return self.step.machine

    @cached_property
    def splits(self) -> Mapping[str, Mapping[str, int]]:
        """The split factor of each dim of each layer, by names."""
        return FrozenDict(
            {name: layer.splits for name, layer in zip(self.step.graph.index, self.step.layers, strict=True)}
        )

    @cached_property
    def plan(self) -> Plan:
        """The placed plan, as `pase.search` returns it."""
        return self.placed()


@dataclass(slots=True, kw_only=True, eq=False)
class _Tables:
    """The tables of steps with some modes, on one machine, and what is known of them.

    Attributes:
        machine: That costs are of.
        problem: Of all strategies, whatever constraints leave.
        unit: Of costs.
        data_parallel: The choice that is data parallelism.
        free: A cheapest strategy of all; None where it is not known yet.
        memory: What strategies hold; of tables on other machines, too.
        start: What starts searches; None where nothing does.
        start_before: What started them in the tables before these.
        is_tight: Whether that proves what it can; that pays when there is a second search.
        is_used: Whether there was a search yet.
        last: The choice that was found last, in these tables or in those before.
    """

    machine: Machine
    problem: Problem
    unit: str
    data_parallel: tuple[int, ...]
    free: Solution | None = None
    memory: MemoryLimit | None = None
    start: WarmStart | None = None
    start_before: WarmStart | None = None
    is_tight: bool = False
    is_used: bool = False
    last: tuple[int, ...] | None = None

    @property
    def data_parallel_cost(self) -> float:
        """What data parallelism costs."""
        return step_cost(self.problem, self.data_parallel)


@dataclass(slots=True, kw_only=True, eq=False)
class _Kept:
    """What is kept of steps of so many micro-batches of a graph on so many devices.

    Attributes:
        only: The configurations of layers, where splits that do not divide their dims are among them.
        machine: That `known` has costs of.
        known: What tables have in common.
        tables: By the modes that there are to choose from.
    """

    only: Callable[[Graph, Operator], IndexArray] | None
    machine: Machine | None = None
    known: KnownChoices = field(default_factory=lambda: KnownChoices(transfers=KnownTransfers()))
    tables: dict[ModeSpace, _Tables] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Wanted:
    """What is planned for; bandwidth, flop_per_byte: None for those of the machine."""

    options: SearchOptions
    batch: int | None
    devices: int
    machine: Machine
    bandwidth: float | None = None
    flop_per_byte: float | None = None

    def changed(self, changes: Changes) -> "_Wanted":
        """Return it after some changes."""
        found = self
        given: dict[str, Any] = {name: value for name, value in changes.items() if name in OF_SEARCH}
        if "constraints" in given:
            given["constraints"] = given["constraints"] or ()
        options = chosen_options(replace(self.options, **given), SearchSettings())
        check_memory(options)
        if "machine" in changes:
            found = replace(found, machine=_machine(changes["machine"]))
        bandwidth, flop_per_byte = changes.get("bandwidth_bytes_per_s"), changes.get("flop_per_byte")
        if bandwidth is not None and flop_per_byte is not None:
            raise ConfigurationError("bandwidth_bytes_per_s and flop_per_byte set the same; give one of them")
        if "bandwidth_bytes_per_s" in changes or "flop_per_byte" in changes:
            found = replace(
                found,
                bandwidth=_positive("bandwidth_bytes_per_s", bandwidth),
                flop_per_byte=_positive("flop_per_byte", flop_per_byte),
            )
        batch, devices = changes.get("batch", self.batch), changes.get("devices", self.devices)
        return replace(found, options=options, batch=batch, devices=devices)

    def machine_now(self) -> Machine:
        """Return the machine with the bandwidth that is wanted."""
        machine, bandwidth = self.machine, self.bandwidth
        if self.flop_per_byte is not None:
            products = precision_of(self.options.precision or FLOAT32).products
            bandwidth = machine.peak_flop_per_s(products) / self.flop_per_byte
        if bandwidth is None:
            return machine
        slowest = min(machine.levels_spanned(self.devices), key=lambda level: level.bandwidth_bytes_per_s)
        faster = replace(slowest, bandwidth_bytes_per_s=bandwidth)
        return replace(machine, levels=tuple(faster if level is slowest else level for level in machine.levels))


def _machine(given: Machine | StrPath) -> Machine:
    return given if isinstance(given, Machine) else load_machine(given)


def _positive(name: str, value: float | None) -> float | None:
    if value is not None and not (isinstance(value, int | float) and 0 < value < inf):
        raise ConfigurationError(f"{name} is {value!r}; expected a positive number")
    return value


class Session:
    """Plans one model again and again, while constraints, the machine, the number of devices and the batch change.

    A session has state, and serves one thread. What it answers costs what a search of the same would find, with the
    same certificate; of several strategies that cost the same it may have another one. Settings and errors are those of
    `pase.search`; a limit of time is for the search of each answer, without its tables.
    """

    def __init__(
        self,
        model: object,
        devices: int,
        machine: Machine | StrPath = DEFAULT_MACHINE,
        *,
        batch: int | None = None,
        reload: Callable[[int], Graph] | None = None,
        options: SearchOptions | Mapping[str, Any] | None = None,
        **settings: Unpack[SearchSettings],
    ) -> None:
        """Search once, and keep what that has worked out.

        Args:
            model: As for `pase.load`.
            devices: Their number.
            machine: As for `pase.search`.
            batch: As for `pase.load`.
            reload: As for `pase.search`.
            options: All settings of searches at once.
            **settings: Each by its name in `SearchOptions`, before those.
        """
        chosen = chosen_options(options, settings)
        check_memory(chosen)
        if chosen.attention == AUTO_NUMBER:
            raise ConfigurationError(
                f"a session keeps tables of one way of attention, and {AUTO_NUMBER!r} is both: "
                f"use {GATHER!r} or {RING!r}"
            )
        self._model = model
        self._reload = reload or reload_of(model)
        self._graphs: dict[int | None, Graph] = {batch: self._loaded(batch, chosen)}
        self._kept: dict[tuple[Any, ...], _Kept] = {}
        self._has_answered = False
        self._wanted = _Wanted(options=chosen, batch=batch, devices=devices, machine=_machine(machine))
        self.answer = self._answer(self._wanted)
        """The last one."""

    @property
    def plan(self) -> Plan:
        """The placed plan of the last answer."""
        return self.answer.plan

    def replan(self, **changes: Unpack[Changes]) -> Answer:
        """Return the cheapest strategy after some changes; what they do not name stays as it was.

        Where that fails, the session stays as it was, too.

        Args:
            **changes: each by its name in `Changes`.

        Raises:
            PaseError: what is asked for makes no sense, or nothing satisfies it.
        """
        unknown = [name for name in changes if name not in Changes.__annotations__]
        if unknown:
            raise ConfigurationError(unknown_name("change of a session", unknown[0], Changes.__annotations__))
        wanted = self._wanted.changed(changes)
        answer = self._answer(wanted)
        self._wanted, self.answer = wanted, answer
        return answer

    def _answer(self, wanted: _Wanted) -> Answer:
        started_s = perf_counter()
        options, graph = wanted.options, self._graph(wanted)
        devices = check_search(graph, wanted.devices, keep_batch=options.keep_batch)
        machine = wanted.machine_now()
        searched = partial(search, graph, devices, machine=machine, reload=self._reload)
        if options.stages != 1 or options.micro_batches == AUTO_NUMBER:
            return Answer.of(searched(options=options))
        setting = setting_of(graph, devices, machine, options, reload=self._reload)
        answer = self._of_one_stage(wanted, setting, started_s)
        if not options.has_parts or answer.lower_bound >= answer.total_cost * (1 - CLOSE):
            return answer
        # The search of steps looks closer at what streams in every micro-batch, and at layers that are recomputed.
        if options.time_limit_s is not None:
            left_s = options.time_limit_s - (perf_counter() - started_s)
            if left_s <= 0:
                return answer
            options = replace(options, time_limit_s=left_s)
        with suppress(SolverError):  # no time was left to find anything
            closer = Answer.of(searched(options=options))
            answer = min(closer, answer, key=lambda found: found.total_cost)
        return answer

    def _of_one_stage(self, wanted: _Wanted, setting: Setting, started_s: float) -> Answer:
        """Return the cheapest step of one stage that tables tell of."""
        options = wanted.options
        tables = self._tables(wanted, setting)
        found = _Search(tables=tables, setting=setting, options=options)
        free = found.cheapest()
        solution, limit_bytes = found.within_memory(free)
        tables.last = solution.choice
        # Costs of tables are what a step takes if what streams in every micro-batch overlaps, and bounds otherwise.
        cost = step_cost(tables.problem, solution.choice) if options.has_parts else solution.cost
        is_exact = solution.exact and cost <= solution.cost * (1 + EXACT)
        baselines = {"data_parallel": tables.data_parallel_cost}
        if limit_bytes is not None and not options.has_parts:
            baselines[WITHOUT_LIMIT] = min(free.cost, solution.cost)
        time_s = perf_counter() - started_s
        if not self._has_answered:
            found.prepare()
            self._has_answered = True
        kept_to = replace(setting, limit_bytes=inf if limit_bytes is None else float(limit_bytes))
        return Answer(
            step=_step_of(tables.problem, solution.choice, setting),
            total_cost=cost,
            lower_bound=solution.lower_bound,
            exact=is_exact,
            cost_unit=tables.unit,
            constraints=options.constraints,
            device_memory_bytes=limit_bytes,
            baselines=baselines,
            time_s=time_s,
            placed=partial(
                _placed, tables.problem, solution, kept_to, baselines, time_s=time_s, has_parts=options.has_parts
            ),
        )

    def _tables(self, wanted: _Wanted, setting: Setting) -> _Tables:
        """Return the tables for a setting, those that are kept where they are its."""
        count = number_of("micro_batches", wanted.options.micro_batches)
        assert count is not None, "numbers that are to be chosen are searched"
        schemes(setting, 1, count)  # which raises where the batch has no such micro-batches
        graph, devices = setting.of_micro_batch(count, 1).graph, setting.num_devices
        # Tables have splits that divide their dims, and those that pins name.
        left = allowed(setting.constraints, graph, devices)
        uneven = left.uneven(graph)
        key = wanted.batch, devices, count, uneven
        kept = self._kept.pop(key, None) or _Kept(only=left.with_pinned if uneven else None)
        self._kept[key] = kept  # the last one that was used
        _drop_oldest(self._kept)
        if kept.machine != setting.machine:
            kept.machine, kept.known = setting.machine, kept.known.for_another_model()
        space = replace(setting.space, layers=FrozenDict())
        before = kept.tables.pop(space, None)
        if before is not None and before.machine == setting.machine:
            kept.tables[space] = before
            return before
        memory_bytes = wanted.options.solver_memory_bytes
        allowance = Allowance(memory_bytes=default_solver_memory_bytes() if memory_bytes is None else memory_bytes)
        problem = problem_of_setting(
            replace(setting, constraints=(), space=space),
            count,
            allowance=allowance,
            only=kept.only,
            known=kept.known,
            # With modes a limit may be set later.
            is_whole=not space.is_plain,
        )
        found = _Tables(
            machine=setting.machine,
            problem=problem,
            unit=cost_model(setting.cost_model, setting.machine, devices, graph.precision).unit,
            data_parallel=data_parallel_choice(problem) if before is None else before.data_parallel,
        )
        if before is not None:
            found.memory, found.last = before.memory, before.last
            found.start_before = before.start or before.start_before
        kept.tables[space] = found
        _drop_oldest(kept.tables)
        return found

    def _graph(self, wanted: _Wanted) -> Graph:
        if wanted.batch not in self._graphs:
            self._graphs[wanted.batch] = self._loaded(wanted.batch, wanted.options)
        return self._graphs[wanted.batch]

    def _loaded(self, batch: int | None, options: SearchOptions) -> Graph:
        return with_fan_outs(prepared(load(self._model, batch=batch), options))


def _drop_oldest(kept: dict[Any, Any]) -> None:
    while len(kept) > MAX_KEPT:
        del kept[next(iter(kept))]


def _step_of(problem: Problem, choice: Sequence[int], setting: Setting) -> TrainingStep:
    """Return the strategy of some choices."""
    return TrainingStep(
        graph=problem.graph,
        num_devices=problem.num_devices,
        machine=setting.machine,
        cost_model=setting.cost_model,
        optimiser=setting.optimiser,
        micro_batches=problem.micro_batches,
        schedule="",
        layers=chosen_layers(problem.choices, choice),
    )


def _placed(
    problem: Problem,
    solution: Solution,
    setting: Setting,
    baselines: Mapping[str, float],
    *,
    time_s: float,
    has_parts: bool,
) -> Plan:
    """Return the placed plan of a solution; setting: with the limit that it keeps to."""
    if has_parts:
        found = found_as_one(problem, solution.choice, solution.lower_bound)
        return plan_of_step(setting, found, found.bound, time_s)
    plan = plan_of(
        problem,
        solution,
        setting.machine,
        setting.cost_model,
        time_s=time_s,
        optimiser=setting.optimiser,
        constraints=setting.constraints,
    )
    limit_bytes = None if setting.limit_bytes == inf else int(setting.limit_bytes)
    return replace(plan, device_memory_bytes=limit_bytes, baselines=baselines)


def _choices_left(configurations: IndexArray, left: IndexArray, modes: LayerChoices, space: ModeSpace) -> IndexArray:
    """Return the choices of a layer that are of some configurations, [K, D], and in modes that it may have."""
    wanted = {row.tobytes() for row in left}
    is_wanted = np.array([row.tobytes() in wanted for row in configurations])[modes.rows]
    has_state = np.isin(modes.state, [STATES.index(state) for state in space.states])
    if has_state.any():  # a layer whose weights are not sharded in any case has one state
        is_wanted &= has_state
    if not space.recompute:
        is_wanted &= ~modes.again
    return np.flatnonzero(is_wanted).astype(np.int32)


@dataclass(frozen=True, kw_only=True, eq=False)
class _Search:
    """One search in tables that are kept; solutions are numbered as these are."""

    tables: _Tables
    setting: Setting
    options: SearchOptions

    @property
    def _limits(self) -> dict[str, Any]:
        return {"solver_memory_bytes": self.options.solver_memory_bytes, "time_limit_s": self.options.time_limit_s}

    @cached_property
    def _near(self) -> tuple[int, ...]:
        """A strategy that is likely to be good, of those without constraints."""
        now = self.tables
        known = [now.data_parallel]
        if now.free is not None:
            known.append(now.free.choice)
        if now.last is not None:
            known.append(now.last)
        return min(known, key=now.problem.tables.evaluate)

    @cached_property
    def _left(self) -> Allowed:
        problem, graph = self.tables.problem, self.tables.problem.graph
        return allowed(
            self.setting.constraints,
            graph,
            problem.num_devices,
            lambda _, operator: problem.configurations[graph.index[operator.name]],
        )

    @cached_property
    def _rows(self) -> dict[int, IndexArray]:
        """Which choices constraints leave, of the vertices that do not have all; one array for those alike."""
        problem, left, space = self.tables.problem, self._left, self.setting.space
        tied = {name for _, names in left.ties for name in names}
        known: dict[Hashable, IndexArray] = {}
        found: dict[int, IndexArray] = {}
        for vertex, operator in enumerate(problem.graph.operators):
            if not left.of[operator.name] and operator.name not in tied:
                continue
            every, some = problem.configurations[vertex], left.configurations(problem.graph, operator)
            modes, own = problem.choices.layers[vertex], space.of(operator.name)
            key = id(every), id(some), id(modes), own
            if key not in known:
                known[key] = _choices_left(every, some, modes, own)
            if len(known[key]) < len(modes):
                found[vertex] = known[key]
        return found

    def _narrowed(self) -> Problem:
        """Return the problem of the strategies that constraints leave, numbered by position among these."""
        problem, rows = self.tables.problem, self._rows
        if not self.setting.constraints:
            return problem
        return with_ties(problem.restricted(rows), (names for _, names in self._left.ties))

    def _in_tables(self, solution: Solution) -> Solution:
        """Return a solution of the narrowed problem, numbered as in the tables."""
        rows = self._rows
        choice = (int(rows[v][c]) if v in rows else c for v, c in enumerate(solution.choice))
        return replace(solution, choice=tuple(choice))

    def _known(self) -> list[list[int]]:
        """Return a good strategy of the narrowed problem, where layers are not tied."""
        if self._left.ties:
            return []
        choice, rows = nearest(self.tables.problem.tables, self._near, self._rows), self._rows
        return [[int(np.searchsorted(rows[v], c)) if v in rows else c for v, c in enumerate(choice)]]

    def _free(self) -> Solution:
        """Return a cheapest strategy of all."""
        now = self.tables
        if now.free is None:
            start = self._start()
            if start is None:
                now.free = solve(now.problem.tables, known=[self._near], **self._limits)
            else:
                now.free = solve_again(now.problem.tables, start, {}, self._near, **self._limits)
        return now.free

    def _start(self) -> WarmStart | None:
        """Return what starts searches, by what started those in the tables before these."""
        now = self.tables
        if now.start is None and now.start_before is not None:
            now.start = warm_start_from(now.start_before, now.problem.tables, self._near)
        return now.start

    def prepare(self) -> None:
        """Find a cheapest strategy of all, and what starts searches among some of them."""
        now, free = self.tables, self._free()
        if free.exact and not now.is_tight:
            now.start, now.is_tight = warm_start(now.problem.tables, free, now.start), True

    def cheapest(self) -> Solution:
        """Return the cheapest strategy that constraints leave, whatever memory it takes."""
        now = self.tables
        is_used, now.is_used = now.is_used, True
        if not self.setting.constraints or not (self._rows or self._left.ties):
            return self._free()
        if is_used:
            self.prepare()
        start = None if self._left.ties else self._start()
        if start is not None:
            return solve_again(now.problem.tables, start, self._rows, self._near, **self._limits)
        return self._in_tables(solve(self._narrowed().tables, known=self._known(), **self._limits))

    def within_memory(self, free: Solution) -> tuple[Solution, int | None]:
        """Return the cheapest strategy that fits a device, too, and the limit that it keeps to; None for none.

        free: A cheapest of all that constraints leave.
        """
        options, tables = self.options, self.tables.problem.tables
        told = options.device_memory_bytes
        if self.setting.limit_bytes == inf:
            return free, None
        limit_bytes = int(self.setting.limit_bytes)
        if self.tables.memory is None:
            self.tables.memory = limit_of(self.tables.problem, limit_bytes, self.setting.optimiser)
        limit = replace(self.tables.memory, limit_bytes=limit_bytes)
        if limit.fits(free.choice):
            # A plain plan that fits whatever it is not told to is not limited.
            return free, limit_bytes if options.has_parts else told
        narrowed = self._narrowed()
        if narrowed.tables is not tables:
            limit = limit_of(narrowed, limit_bytes, self.setting.optimiser)
        try:
            found = cheapest_within(narrowed.tables, limit, known=self._known(), **self._limits)
        except (NothingFitsError, CutShortError) as error:
            if told is None:
                return free, None
            if isinstance(error, CutShortError):
                raise
            if options.has_parts:
                raise nothing_known_to_fit(self.setting) from None
            raise nothing_fits(narrowed, limit, is_constrained=bool(self.setting.constraints)) from None
        return self._in_tables(found.solution), limit_bytes
