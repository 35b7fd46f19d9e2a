"""`Session`: what a search has worked out is kept, so that planning again costs what has changed.

Of what a search does, each stage depends on more than those before it. Which layers are alike depends on the graph;
what they compute and send, and how far layouts overlap, on the number of devices besides; cost tables on the machine
besides (under the `paper` model another bandwidth is another factor); and constraints only leave some of the
configurations out. Beside the tables stand the messages of the solver's bound (`pase.solver.WarmStart`): among the
strategies that constraints leave they prove at once nearly all that there is to prove.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import inf
from operator import is_
from time import perf_counter
from typing import Any, TypedDict, Unpack

import numpy as np

from pase.common.containers import FrozenDict
from pase.common.documents import StrPath
from pase.costs import Allowance, Problem, build_problem, cost_model
from pase.costs.build import KnownTransfers
from pase.costs.modes import KnownModes
from pase.errors import ConfigurationError, unknown_name
from pase.graph import Graph, Operator, precision_of
from pase.graph.operators import with_fan_outs
from pase.graph.precision import FLOAT32
from pase.importers import load
from pase.machine import DEFAULT_MACHINE, Machine, load_machine
from pase.planning.constraints import Allowed, Constraints, allowed, constraints_of, with_ties
from pase.planning.memory_limit import MemoryLimit, cheapest_within, limit_of, nothing_fits
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
    data_parallel_choice,
    fitting_limit,
    plan_of,
    prepared,
)
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
"""Numbers of devices, and batches, whose tables are kept: some 20 MB each for a network of a few hundred layers."""


class Changes(TypedDict, total=False):
    """What `Session.replan` changes; each stays until it is changed again.

    constraints: all that hold from now on, in place of those before, as for `pase.search`; None: none do. batch:
    examples in a step, of a model that `pase.load` builds; None: as many as it has by itself. devices: how many there
    are. machine: a `Machine`, the name of a preset, or the path of a file. bandwidth_bytes_per_s: of the slowest link
    that the devices use; None: the machine's. flop_per_byte: r of Eq. 1, which sets that bandwidth; None: as it is.
    device_memory_bytes: what a training step may take on each device; None: no limit.
    """

    constraints: object
    batch: int | None
    devices: int
    machine: Machine | StrPath
    bandwidth_bytes_per_s: float | None
    flop_per_byte: float | None
    device_memory_bytes: int | None


@dataclass(frozen=True, kw_only=True, eq=False)
class Answer:
    """A cheapest strategy with its certificate, as `Session.replan` returns it: what a plan says before it is placed.

    problem: the tables of all strategies. solution: by their configurations, of the strategies that constraints leave.
    Costs, bounds and baselines are those of a plan. Which device has which part of each layer is worked out when
    `plan` is first asked for: for large networks that takes longer than to find the strategy.
    """

    problem: Problem
    solution: Solution
    machine: Machine
    cost_model: str
    cost_unit: str
    optimiser: str
    constraints: Constraints
    device_memory_bytes: int | None
    baselines: Mapping[str, float]
    time_s: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "baselines", FrozenDict(self.baselines))

    @property
    def total_cost(self) -> float:
        """F(G, φ) (Eq. 1), in `cost_unit`."""
        return self.solution.cost

    @property
    def lower_bound(self) -> float:
        """No strategy that was to choose from costs less."""
        return self.solution.lower_bound

    @property
    def exact(self) -> bool:
        """Whether the strategy is proven to be a cheapest one."""
        return self.solution.exact

    @property
    def gap(self) -> float:
        """(total_cost - lower_bound) / total_cost, 0 where exact."""
        return self.solution.gap

    @cached_property
    def splits(self) -> Mapping[str, Mapping[str, int]]:
        """The split factor of each dim of each layer, by names."""
        choice = self.solution.choice
        return FrozenDict({name: self.problem.splits(v, choice[v]) for v, name in enumerate(self.problem.graph.index)})

    @cached_property
    def plan(self) -> Plan:
        """The placed plan, as `pase.search` returns it."""
        plan = plan_of(
            self.problem,
            self.solution,
            self.machine,
            self.cost_model,
            time_s=self.time_s,
            optimiser=self.optimiser,
            constraints=self.constraints,
        )
        return replace(plan, device_memory_bytes=self.device_memory_bytes, baselines=self.baselines)


@dataclass(slots=True, kw_only=True, eq=False)
class _Costed:
    """Tables for one machine, and what is known of them.

    data_parallel: its cost. free: a cheapest strategy of all. start: None where there is none. is_tight: whether it
    proves what it can; that pays when there is a second search. is_used: whether there was one yet.
    """

    machine: Machine
    problem: Problem
    unit: str
    data_parallel: float
    free: Solution | None = None
    start: WarmStart | None = None
    is_tight: bool = False
    is_used: bool = False


@dataclass(slots=True, kw_only=True, eq=False)
class _Kept:
    """What is kept of a graph on so many devices.

    only: the configurations of layers, where splits that do not divide their dims are among them. memory: by optimiser.
    start: of the tables before these.
    """

    graph: Graph
    num_devices: int
    only: Callable[[Graph, Operator], IndexArray] | None
    known: KnownModes = field(default_factory=lambda: KnownModes(transfers=KnownTransfers()))
    data_parallel: tuple[int, ...] | None = None
    memory: dict[str, MemoryLimit] = field(default_factory=dict)
    costed: _Costed | None = None
    start: WarmStart | None = None


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
        found, options = self, self.options
        if "constraints" in changes:
            options = replace(options, constraints=constraints_of(changes["constraints"] or ()))
        if "device_memory_bytes" in changes:
            options = replace(options, device_memory_bytes=changes["device_memory_bytes"])
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


def _are_same(these: tuple[IndexArray, ...], those: tuple[IndexArray, ...]) -> bool:
    return len(these) == len(those) and all(map(is_, these, those))


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
        options: SearchOptions | Mapping[str, Any] | None = None,
        **settings: Unpack[SearchSettings],
    ) -> None:
        """Search once, and keep what that has worked out; model, batch: as for `pase.load`."""
        chosen = chosen_options(options, settings)
        check_memory(chosen)
        if chosen.has_parts:
            raise ConfigurationError(
                "a session plans without micro-batches, stages and modes of layers; search for each of its questions "
                "(pase.search), or leave micro_batches, stages and modes out"
            )
        if chosen.attention == AUTO_NUMBER:
            raise ConfigurationError(
                f"a session keeps tables of one way of attention, and {AUTO_NUMBER!r} is both: "
                f"use {GATHER!r} or {RING!r}"
            )
        self._model = model
        self._graphs: dict[int | None, Graph] = {batch: self._loaded(batch, chosen)}
        self._kept: dict[tuple[Any, ...], _Kept] = {}
        self._wanted = _Wanted(options=chosen, batch=batch, devices=devices, machine=_machine(machine))
        self.answer = self._answer(self._wanted, None)
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
        answer = self._answer(wanted, self.answer)
        self._wanted, self.answer = wanted, answer
        return answer

    def _answer(self, wanted: _Wanted, last: Answer | None) -> Answer:
        started_s = perf_counter()
        options, kept = wanted.options, self._kept_of(wanted)
        now = _costed(kept, wanted)
        search = _Search(kept=kept, now=now, options=options, last=last)
        free = search.cheapest()
        solution, limit_bytes = search.within_memory(free)
        baselines = {"data_parallel": now.data_parallel}
        if limit_bytes is not None:
            baselines[WITHOUT_LIMIT] = min(free.cost, solution.cost)
        time_s = perf_counter() - started_s
        if last is None:
            search.prepare()
        return Answer(
            problem=now.problem,
            solution=solution,
            machine=now.machine,
            cost_model=options.cost_model,
            cost_unit=now.unit,
            optimiser=options.optimiser,
            constraints=options.constraints,
            device_memory_bytes=limit_bytes,
            baselines=baselines,
            time_s=time_s,
        )

    def _kept_of(self, wanted: _Wanted) -> _Kept:
        batch = wanted.batch
        if batch not in self._graphs:
            self._graphs[batch] = self._loaded(batch, wanted.options)
        graph = self._graphs[batch]
        devices = check_search(graph, wanted.devices, keep_batch=wanted.options.keep_batch)
        # Tables have splits that divide their dims, beside those that pins name.
        left = allowed(wanted.options.constraints, graph, devices)
        uneven = left.uneven(graph)
        kept = self._kept.pop((batch, devices, uneven), None)
        if kept is None:
            kept = _Kept(graph=graph, num_devices=devices, only=left.with_pinned if uneven else None)
        self._kept[batch, devices, uneven] = kept  # the last one that was used
        while len(self._kept) > MAX_KEPT:
            del self._kept[next(iter(self._kept))]
        return kept

    def _loaded(self, batch: int | None, options: SearchOptions) -> Graph:
        return with_fan_outs(prepared(load(self._model, batch=batch), options))


def _costed(kept: _Kept, wanted: _Wanted) -> _Costed:
    """Return the tables for a machine, those that are kept where they are its."""
    machine = wanted.machine_now()
    if kept.costed is None or kept.costed.machine != machine:
        memory = wanted.options.solver_memory_bytes
        allowance = Allowance(memory_bytes=default_solver_memory_bytes() if memory is None else memory)
        # Absurd figures of a machine overflow; the tables are then refused.
        with np.errstate(over="ignore", invalid="ignore"):
            model = cost_model(wanted.options.cost_model, machine, kept.num_devices, kept.graph.precision)
            kept.known = kept.known.for_another_model()
            problem = build_problem(
                kept.graph, kept.num_devices, model, allowance=allowance, only=kept.only, known=kept.known
            )
        if kept.data_parallel is None:
            kept.data_parallel = data_parallel_choice(problem)
        cost = problem.tables.evaluate(kept.data_parallel)
        if kept.costed is not None and kept.costed.start is not None:
            kept.start = kept.costed.start
        kept.costed = _Costed(machine=machine, problem=problem, unit=model.unit, data_parallel=cost)
    return kept.costed


@dataclass(frozen=True, kw_only=True, eq=False)
class _Search:
    """One search in tables that are kept; solutions are numbered as these are. last: the answer before."""

    kept: _Kept
    now: _Costed
    options: SearchOptions
    last: Answer | None

    @property
    def _limits(self) -> dict[str, Any]:
        return {"solver_memory_bytes": self.options.solver_memory_bytes, "time_limit_s": self.options.time_limit_s}

    @cached_property
    def _near(self) -> tuple[int, ...]:
        """A strategy that is likely to be good, of those without constraints."""
        assert self.kept.data_parallel is not None
        known = [self.kept.data_parallel]
        if self.now.free is not None:
            known.append(self.now.free.choice)
        if self.last is not None and _are_same(self.last.problem.configurations, self.now.problem.configurations):
            known.append(self.last.solution.choice)
        return min(known, key=self.now.problem.tables.evaluate)

    @cached_property
    def _left(self) -> Allowed:
        problem, graph = self.now.problem, self.now.problem.graph
        return allowed(
            self.options.constraints,
            graph,
            problem.num_devices,
            lambda _, operator: problem.configurations[graph.index[operator.name]],
        )

    @cached_property
    def _rows(self) -> dict[int, IndexArray]:
        """Which configurations constraints leave, of the vertices that do not have all; one array for those alike."""
        problem, left = self.now.problem, self._left
        tied = {name for _, names in left.ties for name in names}
        known: dict[tuple[int, int], IndexArray] = {}
        found: dict[int, IndexArray] = {}
        for vertex, operator in enumerate(problem.graph.operators):
            if not left.of[operator.name] and operator.name not in tied:
                continue
            every, some = problem.configurations[vertex], left.configurations(problem.graph, operator)
            if len(some) == len(every):
                continue
            key = id(every), id(some)
            if key not in known:
                wanted = {row.tobytes() for row in some}
                known[key] = np.array([i for i, row in enumerate(every) if row.tobytes() in wanted], dtype=np.int32)
            found[vertex] = known[key]
        return found

    def _narrowed(self) -> Problem:
        """Return the problem of the strategies that constraints leave, numbered by position among these."""
        problem, rows = self.now.problem, self._rows
        if not self.options.constraints:
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
        choice, rows = nearest(self.now.problem.tables, self._near, self._rows), self._rows
        return [[int(np.searchsorted(rows[v], c)) if v in rows else c for v, c in enumerate(choice)]]

    def _free(self) -> Solution:
        """Return a cheapest strategy of all."""
        now = self.now
        if now.free is None:
            start = self._start()
            if start is None:
                now.free = solve(now.problem.tables, known=[self._near], **self._limits)
            else:
                now.free = solve_again(now.problem.tables, start, {}, self._near, **self._limits)
        return now.free

    def _start(self) -> WarmStart | None:
        """Return what starts searches, by what started those in the tables before these."""
        now = self.now
        if now.start is None and self.kept.start is not None:
            now.start = warm_start_from(self.kept.start, now.problem.tables, self._near)
        return now.start

    def prepare(self) -> None:
        """Find a cheapest strategy of all, and what starts searches among some of them."""
        now, free = self.now, self._free()
        if free.exact and not now.is_tight:
            now.start, now.is_tight = warm_start(now.problem.tables, free, now.start), True

    def cheapest(self) -> Solution:
        """Return the cheapest strategy that constraints leave, whatever memory it takes."""
        now = self.now
        is_used, now.is_used = now.is_used, True
        if not self.options.constraints or not (self._rows or self._left.ties):
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
        options, tables = self.options, self.now.problem.tables
        told = options.device_memory_bytes
        limit_bytes = told or fitting_limit(self.now.machine, options.cost_model)
        if limit_bytes is None:
            return free, None
        memory = self.kept.memory.get(options.optimiser)
        if memory is None:
            memory = self.kept.memory[options.optimiser] = limit_of(self.now.problem, limit_bytes, options.optimiser)
        limit = replace(memory, limit_bytes=limit_bytes)
        if limit.fits(free.choice):
            return free, told
        narrowed = self._narrowed()
        if narrowed.tables is not tables:
            limit = limit_of(narrowed, limit_bytes, options.optimiser)
        try:
            found = cheapest_within(narrowed.tables, limit, known=self._known(), **self._limits)
        except (NothingFitsError, CutShortError) as error:
            if told is None:
                return free, None
            if isinstance(error, CutShortError):
                raise
            raise nothing_fits(narrowed, limit, is_constrained=bool(options.constraints)) from None
        return self._in_tables(found.solution), limit_bytes
