"""The whole search, as one readable sequence of stages: graph → cost tables → strategy → placed plan."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, fields, replace
from functools import partial
from math import inf
from operator import index
from time import perf_counter
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

import numpy as np

from pase.common.documents import StrPath
from pase.common.words import quantity
from pase.costs import DEFAULT_OPTIMISER, Allowance, Problem, StepMemory, TimeUpError
from pase.costs.memory import keeping, optimiser_state
from pase.costs.states import STATES, ModeSpace
from pase.errors import ConfigurationError, MemoryLimitError, PlanError, SolverError, unknown_name
from pase.graph import Graph, Operator, Precision
from pase.graph.operators import with_fan_outs
from pase.graph.operators.products import with_fused_attention, with_rings
from pase.graph.parts import micro_batch, with_cuts, with_fan_outs_of
from pase.importers import load
from pase.machine import DEFAULT_MACHINE, Machine, load_machine
from pase.models import MODELS
from pase.planning.constraints import (
    MODES,
    RECOMPUTE,
    Allowed,
    Constraints,
    allowed,
    constraints_of,
    mode_space,
)
from pase.planning.memory_limit import SolverOptions, cheapest_within, limit_of, nothing_fits
from pase.planning.plan import CHEAPEST, SCHEDULES, Plan
from pase.planning.problems import data_parallel_choice, plan_of, problem_of
from pase.planning.spans import Setting
from pase.planning.stages import ONE_FORWARD_ONE_BACKWARD, SEARCHED_SCHEDULES
from pase.sharding.shards import check_batch, check_devices, check_splittable, data_parallel, divisors
from pase.solver import (
    RELATIVE_TOLERANCE,
    CutShortError,
    NothingFitsError,
    Solution,
    check_limits,
    default_solver_memory_bytes,
    solve,
)
from pase.tables.cost_tables import IndexArray

if TYPE_CHECKING:
    from pase.planning.pipelines import Found

MAX_DEVICES = 1 << 20
"""Every layer of a plan lists all devices: a plan for a million of them is a file of 100 MB."""

TIME_WITHOUT_TABLES_S = 1.0
"""Where the time ends before the tables are made, the strategies that are known by then are weighed for so long."""

PLANNING_S = 2.5e-3
"""For each layer of a step in parts, about what placing and costing it in the plan takes."""

PROPOSAL_S = 10.0
"""How long it is looked for what fits otherwise, where nothing fits."""

WITHOUT_LIMIT = "without_memory_limit"
"""Among a plan's baselines: the cheapest strategy where memory is no matter."""

WITHOUT_TIME = "paper"
"""The cost model that counts FLOP and bytes alone; under all others plans fit the machine's devices by default."""

RESERVED_SHARE = 0.1
"""Of a device's memory: what is left to the framework, its kernels' workspaces and what lies unused between tensors."""

AUTO_NUMBER = "auto"

GATHER, RING = "gather", "ring"

ATTENTION = (GATHER, RING, AUTO_NUMBER)
"""How devices that have parts of a sequence's queries come by all keys and values."""

Progress = Callable[[str, float], None]
"""Called with what is being done and the fraction of it that is done, 0 to 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchOptions:
    """What a search can be told.

    cost_model: a name in `COST_MODELS`. ordering: a name in `ORDERINGS`, or "auto". solver_memory_bytes: of all cost
    tables, None for half of the machine's memory. time_limit_s: for making the tables and the search. keep_batch:
    search although the batch cannot be split at all. device_memory_bytes: what a training step may take on each device,
    None for no limit. optimiser: a name in `OPTIMISER_STATE`, whose state counts as memory. precision: a policy, or its
    name in `PRECISIONS`; None: the model's own. imbalance: how many times an equal share of a mixture's rows the device
    has whose experts are asked most, 1 or more; None: as the graph has it (1). attention: whether devices that split
    its queries "gather" keys and values, or pass them round in a "ring"; "auto": in each layer what makes the step
    cheapest. constraints: what a strategy must keep to (`pase.planning.constraints`). micro_batches, stages: how many a
    step has, or "auto" to choose them, too; schedule: of the stages, in `SEARCHED_SCHEDULES`, where "interleaved" has
    groups of devices with several stages in turns, too, if that is faster. modes: of layers that may be chosen:
    "zero1", "zero2", "zero3", "recompute". jobs: how many numbers of stages and of micro-batches are looked at at a
    time, in processes of their own; executor: in one of `concurrent.futures` instead. gap: of a step with parts, up to
    which share of its cost a better one is not looked for; None: 0, and where there are many choices 0.01. simplify: by
    which share a step with parts may be dearer than the cheapest one known, so that it is more regular
    (`pase.planning.regular`); None: as gap, and 0 where the step is proven to be the cheapest.
    """

    cost_model: str = "paper"
    ordering: str = "auto"
    solver_memory_bytes: int | None = None
    time_limit_s: float | None = None
    keep_batch: bool = False
    device_memory_bytes: int | None = None
    optimiser: str = DEFAULT_OPTIMISER
    precision: Precision | str | None = None
    imbalance: float | None = None
    attention: str = GATHER
    constraints: Constraints = ()
    micro_batches: int | str = 1
    stages: int | str = 1
    schedule: str = ONE_FORWARD_ONE_BACKWARD
    modes: tuple[str, ...] = ()
    jobs: int = 1
    executor: Executor | None = None
    gap: float | None = None
    simplify: float | None = None

    @property
    def has_parts(self) -> bool:
        """Whether micro-batches, stages or modes are asked for."""
        return self.micro_batches != 1 or self.stages != 1 or bool(self.modes)


class SearchSettings(TypedDict, total=False):
    """The fields of `SearchOptions`, as keywords."""

    cost_model: str
    ordering: str
    solver_memory_bytes: int | None
    time_limit_s: float | None
    keep_batch: bool
    device_memory_bytes: int | None
    optimiser: str
    precision: Precision | str | None
    imbalance: float | None
    attention: str
    constraints: object
    micro_batches: int | str
    stages: int | str
    schedule: str
    modes: Sequence[str]
    jobs: int
    executor: Executor | None
    gap: float | None
    simplify: float | None


def search(
    model: object,
    devices: int,
    *,
    machine: Machine | StrPath = DEFAULT_MACHINE,
    options: SearchOptions | Mapping[str, Any] | None = None,
    on_progress: Progress | None = None,
    reload: Callable[[int], Graph] | None = None,
    **settings: Unpack[SearchSettings],
) -> Plan:
    """Return the cheapest strategy for training a model on a number of devices, with its certificate.

    model: a `Graph`, or anything that `load` takes. machine: a `Machine`, the name of a preset, or the path of a
    machine file. options: all settings at once; settings, each by its name in `SearchOptions`, come before them.
    reload: returns the graph of the model with another batch, where the model is given as an imported graph.
    Constraints may be a dict as their files hold ({"pin": {"fc1": "n=4 c=2"}}), or the path of such a file. Raises
    a PaseError for what cannot be searched: no devices, nothing to split, an invalid graph, an unknown name, no memory
    for any strategy, constraints that leave none.
    """
    options = chosen_options(options, settings)
    check_memory(options)
    graph = prepared(load(model), options)
    devices = check_search(graph, devices, keep_batch=options.keep_batch)
    machine = machine if isinstance(machine, Machine) else load_machine(machine)
    start_s = perf_counter()
    reload = reload or reload_of(model)
    if reload is not None and options.attention == AUTO_NUMBER:
        reload = partial(_fused_after, reload)
    if options.has_parts:
        return _search_step(graph, devices, machine, options, start_s, on_progress, reload)
    _modes(options, graph)
    limits = Limits.of(options, start_s)
    rings = options.attention == AUTO_NUMBER
    bound, make = None, partial(problem_of, graph, devices, machine, options.cost_model, rings=rings)
    try:
        problem = make(on_progress, allowance=limits.for_tables(), constraints=options.constraints)
    except TimeUpError as stopped:
        bound = stopped.bound * (1 - RELATIVE_TOLERANCE)
        whole = with_fan_outs(graph)
        left, memory = allowed(options.constraints, whole, devices), None
        if options.device_memory_bytes is not None:
            memory = StepMemory(
                graph=whole,
                keeps=keeping(whole),
                configurations=[left.configurations(whole, operator) for operator in whole.operators],
                optimiser=options.optimiser,
            )
        only = partial(_known_configurations, left=left, memory=memory)
        problem = make(only=only, constraints=options.constraints)
    known = [] if options.constraints else [data_parallel_choice(problem)]
    try:
        return plan_within(
            problem, machine, options, known=known, limits=limits, start_s=start_s, bound=bound, on_progress=on_progress
        )
    except NothingFitsError:
        if bound is not None:
            raise SolverError(
                f"the time limit of {options.time_limit_s} s was reached before {graph.name!r} had its cost tables, "
                "and no strategy is known that fits the memory of a device: give more time, or use more devices"
            ) from None
        assert options.device_memory_bytes is not None
        limit = limit_of(problem, options.device_memory_bytes, options.optimiser)
        failed = nothing_fits(problem, limit, is_constrained=bool(options.constraints))
        if options.constraints:
            raise failed from None
        more = _in_other_modes(graph, devices, machine, options, on_progress, reload)
        raise MemoryLimitError(f"{failed}{more}") from None


def plan_within(
    problem: Problem,
    machine: Machine,
    options: SearchOptions,
    *,
    known: Sequence[Sequence[int]] = (),
    limits: "Limits",
    start_s: float,
    bound: float | None = None,
    on_progress: Progress | None = None,
) -> Plan:
    """Return the plan of the cheapest strategy in a problem's tables that fits.

    Where no limit is given that is the machine's memory, if any strategy is known to fit it (`fitting_limit`).

    Args:
        problem: Of steps of one stage.
        machine: That it was made for.
        options: Of the search.
        known: Strategies to begin with.
        limits: Of the solver.
        start_s: When planning began, by `perf_counter`.
        bound: On all strategies, where there was no time for tables of more than those that are known.
        on_progress: Called with what is being done and the fraction that is done.

    Raises:
        NothingFitsError: Nothing fits the limit that was given.
        CutShortError: Nothing is known to.
    """

    def finished(solution: Solution) -> Plan:
        if bound is not None:
            solution = replace(solution, exact=False, lower_bound=min(bound, solution.cost))
        return plan_of(
            problem,
            solution,
            machine,
            options.cost_model,
            time_s=perf_counter() - start_s,
            optimiser=options.optimiser,
            constraints=options.constraints,
        )

    def left() -> tuple[int, float | None]:
        return limits.for_search(problem) if bound is None else (limits.memory_bytes, TIME_WITHOUT_TABLES_S)

    solver_memory_bytes, time_limit_s = left()
    solver: SolverOptions = {
        "ordering": options.ordering,
        "solver_memory_bytes": solver_memory_bytes,
        "on_progress": on_progress,
    }
    cheapest = solve(problem.tables, known=known, time_limit_s=time_limit_s, **solver)
    told, fitting = options.device_memory_bytes, fitting_limit(machine, options.cost_model)
    plan: Plan | None = None
    if told is None:
        plan = finished(cheapest)
        if fitting is None or plan.peak.bytes <= fitting:
            return plan
    limit = told or fitting
    assert limit is not None
    try:
        limited = cheapest_within(
            problem.tables,
            limit_of(problem, limit, options.optimiser),
            known=[*known, cheapest.choice],
            unlimited=cheapest,
            time_limit_s=left()[1],
            **solver,
        )
    except (NothingFitsError, CutShortError):
        if plan is None:
            raise
        # Nothing is known to fit: the cheapest of all says so itself.
        return plan
    plan = finished(limited.solution)
    # What fits is a strategy without a limit, too: no search for one that was cut short need be dearer.
    without_limit = min(limited.unlimited.cost, plan.total_cost)
    return replace(plan, device_memory_bytes=limit, baselines={**plan.baselines, WITHOUT_LIMIT: without_limit})


def usable_bytes(machine: Machine) -> int | None:
    """Return what a step may take of a device's memory; None where the machine does not tell how much that is."""
    return int((machine.device.memory_bytes or 0) * (1 - RESERVED_SHARE)) or None


def fitting_limit(machine: Machine, cost_model: str) -> int | None:
    """Return what a strategy may take on each device where no limit is given; None for as much as it needs."""
    return None if cost_model == WITHOUT_TIME else usable_bytes(machine)


def prepared(graph: Graph, options: SearchOptions) -> Graph:
    """Return a model's graph as options say that it is trained."""
    graph = graph.in_precision(options.precision).with_imbalance(options.imbalance)
    if options.attention == AUTO_NUMBER:
        # Both ways are PyTorch's, whose kernel has no whole scores.
        return with_fused_attention(graph)
    return with_rings(graph) if options.attention == RING else graph


def setting_of(
    graph: Graph,
    devices: int,
    machine: Machine,
    options: SearchOptions,
    *,
    start_s: float | None = None,
    reload: Callable[[int], Graph] | None = None,
) -> Setting:
    """Return what a search with options is for; with no limit told, within the devices' memory.

    Args:
        graph: Of the whole batch, as options have it trained.
        devices: Their number.
        machine: That they are of.
        options: Of the search.
        start_s: When it began, from which its time limit counts; None where that is not for the whole search.
        reload: As for `search`.

    Raises:
        PaseError: Options that make no sense for steps of micro-batches, stages or modes, or leave a layer no mode.
    """
    _, count = number_of("stages", options.stages), number_of("micro_batches", options.micro_batches)
    space = _modes(options, graph)
    limit = options.device_memory_bytes
    if limit is None:
        limit = fitting_limit(machine, options.cost_model)
    if options.has_parts:
        check_seconds(options.cost_model)
    check_limits(options.solver_memory_bytes, options.time_limit_s)
    if graph.framework and options.micro_batches != 1 and reload is None:
        raise ConfigurationError(
            f"graph {graph.name!r} is of an imported model, whose numbers may depend on the batch: search the model "
            "itself, or give reload=, which returns its graph with another batch"
        )
    deadline_s = inf
    if start_s is not None and options.time_limit_s is not None:
        deadline_s = start_s + _search_s(options.time_limit_s, graph)
    setting = Setting(
        graph=graph,
        num_devices=devices,
        machine=machine,
        cost_model=options.cost_model,
        space=space,
        optimiser=options.optimiser,
        limit_bytes=inf if limit is None else float(limit),
        schedule=options.schedule,
        constraints=options.constraints,
        deadline_s=deadline_s,
    )
    if reload is not None and graph.framework and count and count > 1:
        setting = replace(setting, imported={count: _imported_part(setting, reload, count)})
    return setting


def _search_step(
    graph: Graph,
    devices: int,
    machine: Machine,
    options: SearchOptions,
    start_s: float,
    on_progress: Progress | None,
    reload: Callable[[int], Graph] | None,
) -> Plan:
    """Return the cheapest step of micro-batches, stages and modes; with no limit told, within the devices' memory."""
    # Here: plans without these need none of it.
    from pase.planning.pipelines import plan_of_step, search_schemes, tolerance, with_chosen_rings

    setting = setting_of(graph, devices, machine, options, start_s=start_s, reload=reload)
    stages, count = number_of("stages", options.stages), number_of("micro_batches", options.micro_batches)
    imported = None if reload is None or not graph.framework else partial(_imported_part, setting, reload)
    seek = partial(
        search_schemes,
        stages=stages,
        micro_batches=count,
        jobs=options.jobs,
        executor=options.executor,
        gap=options.gap,
        on_progress=on_progress,
    )
    try:
        found, bound = seek(setting)
    except MemoryLimitError:
        if options.device_memory_bytes is not None:
            raise
        # Nothing is known to fit: the cheapest of all says so itself.
        setting = replace(setting, limit_bytes=inf)
        found, bound = seek(setting)
    m = found.scheme.micro_batches
    if imported and m > 1 and m not in setting.imported:
        part = imported(m)
        if _costs_alike(part, micro_batch(graph, m)):
            setting = replace(setting, imported={m: part})
        else:
            # The model differs with the batch that it is imported with: all micro-batches are imported.
            setting = replace(setting, imported={n: imported(n) for n in divisors(setting.batch) if n > 1})
            found, bound = seek(setting)
    setting, share = with_chosen_rings(setting, found), options.simplify
    if bound >= found.cost * (1 - RELATIVE_TOLERANCE) and not share:
        return plan_of_step(setting, found, bound, perf_counter() - start_s)
    if share is None:
        share = tolerance(setting, options.gap)
    return _simplest(setting, found, bound, share, start_s)


def _simplest(setting: Setting, found: "Found", bound: float, share: float, start_s: float) -> Plan:
    """Return the plan of the most regular step that costs at most so much more than the cheapest one known."""
    from pase.planning.pipelines import plan_of_step
    from pase.planning.regular import simplified

    simpler = simplified(setting, found, share)
    if simpler is None:
        return plan_of_step(setting, found, bound, perf_counter() - start_s)
    plan = plan_of_step(setting, simpler.found, bound, perf_counter() - start_s)
    if share == 0:
        return plan
    record = replace(
        plan.search,
        simplify=share,
        configurations=simpler.configurations,
        cheapest_configurations=simpler.configurations_before,
    )
    cheapest = min(simpler.cheapest, plan.total_cost)
    return replace(plan, search=record, baselines={**plan.baselines, CHEAPEST: cheapest})


def _in_other_modes(
    graph: Graph,
    devices: int,
    machine: Machine,
    options: SearchOptions,
    on_progress: Progress | None,
    reload: Callable[[int], Graph] | None,
) -> str:
    """Return with which micro-batches and modes a model fits as many devices, in words; "" where none are found."""
    model = "alpha_beta" if options.cost_model == WITHOUT_TIME else options.cost_model
    wider = replace(
        options,
        cost_model=model,
        micro_batches=AUTO_NUMBER if reload is not None or not graph.framework else 1,
        modes=MODES,
        time_limit_s=PROPOSAL_S,
        simplify=0.0,
    )
    try:
        plan = _search_step(graph, devices, machine, wider, perf_counter(), on_progress, reload)
        free = search(
            graph,
            devices,
            machine=machine,
            cost_model=model,
            keep_batch=True,
            attention=options.attention,
            on_progress=on_progress,
        )
    except (ConfigurationError, MemoryLimitError, SolverError):
        return ""
    used = {layer.state for layer in plan} | {RECOMPUTE for layer in plan if layer.is_recomputed}
    modes = [mode for mode in MODES if mode in used]
    flags = []
    if model != options.cost_model:
        flags.append(f"--cost-model {model}")
    if plan.micro_batches > 1:
        flags.append(f"--micro-batches {plan.micro_batches}")
    if modes:
        flags.append(f"--modes {','.join(modes)}")
    return (
        f"; or keep these {devices} with {' '.join(flags)}: {quantity(plan.peak.bytes, 'B')}, at "
        f"{plan.total_cost / free.total_cost:.2f} × the cost without a limit"
    )


def _search_s(time_limit_s: float, graph: Graph) -> float:
    """Return what of a time limit is for the search, so that the plan of what it finds is made within it, too."""
    return time_limit_s - min(time_limit_s / 2, PLANNING_S * len(graph.operators))


def _imported_part(setting: Setting, reload: Callable[[int], Graph], micro_batches: int) -> Graph:
    """Return the graph of a micro-batch, imported with that batch; ConfigurationError if its layers are others."""
    derived = micro_batch(setting.graph, micro_batches)
    part = reload(setting.batch // micro_batches).in_precision(derived.precision).with_imbalance(derived.imbalance)
    part = with_rings(part, _rings(derived))
    if [operator.extents for operator in part.operators] != [operator.extents for operator in derived.operators]:
        raise ConfigurationError(
            f"{part.name!r} with one of {micro_batches} micro-batches has other layers than with the whole batch: "
            "search it with the micro-batch alone"
        )
    return part


def _rings(graph: Graph) -> set[str]:
    """Return the attention of a graph that passes keys and values round."""
    return {operator.name for operator in graph.operators if operator.ring}


def _costs_alike(one: Graph, other: Graph) -> bool:
    """Return whether two graphs are equal in all that costs depend on: all but the code of their layers."""
    bare = [tuple(replace(operator, body=None) for operator in graph.operators) for graph in (one, other)]
    return bare[0] == bare[1] and one.edges == other.edges and one.precision == other.precision


def check_seconds(cost_model: str) -> None:
    """Raise ConfigurationError for a cost model that has no time, which steps of micro-batches and stages take."""
    if cost_model == WITHOUT_TIME:
        raise ConfigurationError(
            "cost model 'paper' counts FLOP and bytes, and knows no time in which stages wait or messages hide; use "
            "alpha_beta or step beside micro-batches, stages and modes"
        )


def _modes(options: SearchOptions, graph: Graph) -> ModeSpace:
    """Return the modes to choose from; ConfigurationError where constraints leave a layer none."""
    space = ModeSpace(
        states=(STATES[0], *(state for state in STATES[1:] if state in options.modes)),
        recompute=RECOMPUTE in options.modes,
        rings=options.attention == AUTO_NUMBER,
    )
    return mode_space(space, options.constraints, with_cuts(graph)) if options.constraints else space


def reload_of(model: object) -> Callable[[int], Graph] | None:
    """Return what loads a model with another batch; None for a graph, which is of one batch."""
    return None if isinstance(model, Graph) else partial(_reloaded, model)


def _reloaded(model: object, batch: int) -> Graph:
    return load(model, batch=batch)


def _fused_after(reload: Callable[[int], Graph], batch: int) -> Graph:
    return with_fused_attention(reload(batch))


def number_of(what: str, told: int | str) -> int | None:
    """Return how many there are to be; None: that is to be chosen."""
    if told == AUTO_NUMBER:
        return None
    if not isinstance(told, int) or told < 1:
        raise ConfigurationError(f'{what} is {told!r}; expected a whole number of 1 or more, or "{AUTO_NUMBER}"')
    return told


def settings_of(plan: Plan) -> SearchSettings:
    """Return the settings of a search that a plan answers, or others on another machine or number of devices do.

    Modes to choose from are those that layers of the plan have. The search is of `whole_graph`.

    Raises:
        PlanError: The plan has a schedule that is not searched.
    """
    if plan.schedule and plan.schedule not in SEARCHED_SCHEDULES:
        raise PlanError(
            f"the plan's schedule {plan.schedule!r} is of plans made by hand and is not searched; searched are "
            f"{', '.join(SEARCHED_SCHEDULES)}"
        )
    states = {layer.state for layer in plan}
    modes = [state for state in STATES[1:] if state in states]
    if any(layer.is_recomputed for layer in plan):
        modes.append(RECOMPUTE)
    return SearchSettings(
        cost_model=plan.cost_model,
        keep_batch=True,
        device_memory_bytes=plan.device_memory_bytes,
        optimiser=plan.optimiser,
        constraints=plan.constraints,
        micro_batches=plan.micro_batches,
        stages=plan.num_groups,
        schedule=plan.schedule or ONE_FORWARD_ONE_BACKWARD,
        modes=tuple(modes),
    )


def whole_graph(plan: Plan, reload: Callable[[int], Graph] | None = None) -> Graph:
    """Return the graph of a plan's whole batch, of which its own is one micro-batch.

    Args:
        plan: Whose network is wanted.
        reload: As for `search`; built-in networks are built again without.

    Raises:
        PlanError: It is not known how the network is made with another batch, or it is another one then.
    """
    arguments, m = dict(plan.graph.arguments), plan.micro_batches
    if m == 1:
        return plan.graph
    batch = arguments.get("batch")
    whole = None
    if reload is not None:
        whole = reload(m * max(plan.graph.batch[operator.name].examples for operator in plan.graph.operators))
    elif isinstance(batch, int) and not plan.graph.framework and plan.graph.name in MODELS:
        whole = load(plan.graph.name, arguments=arguments | {"batch": batch * m})
    if whole is not None:
        whole = whole.in_precision(plan.precision).with_imbalance(plan.graph.imbalance)
        whole = with_rings(whole, _rings(plan.graph))
        part = with_fan_outs_of(micro_batch(whole, m), plan.graph)
        if part == plan.graph or (plan.graph.framework and part.index.keys() == plan.graph.index.keys()):
            return whole
    raise PlanError(
        f"the plan has the graph of one of {m} micro-batches of {plan.graph.name!r}, and other numbers of them are "
        "worked out from that of the whole batch: search the model again with other --micro-batches and --stages"
    )


def chosen_options(options: SearchOptions | Mapping[str, Any] | None, settings: SearchSettings) -> SearchOptions:
    """Return the options of a search; ConfigurationError for those that no search has."""
    given: dict[str, Any] = {**options, **settings} if isinstance(options, Mapping) else {**settings}
    known = [field.name for field in fields(SearchOptions)]
    unknown = [name for name in given if name not in known]
    if unknown:
        raise ConfigurationError(unknown_name("option of a search", unknown[0], known))
    base = options if isinstance(options, SearchOptions) else SearchOptions()
    if options is not None and not isinstance(options, SearchOptions | Mapping):
        raise ConfigurationError(f"options are a {type(options).__name__}; expected SearchOptions, or a dict of these")
    chosen = replace(base, **given)
    wrong = [mode for mode in chosen.modes if mode not in MODES]
    if wrong:
        raise ConfigurationError(unknown_name("mode", str(wrong[0]), MODES))
    if chosen.schedule not in SEARCHED_SCHEDULES:
        raise ConfigurationError(
            f"schedule {chosen.schedule!r} is not searched, though plans that are written by hand may have it; search "
            f"with {', '.join(SEARCHED_SCHEDULES)}"
            if chosen.schedule in SCHEDULES
            else unknown_name("schedule", str(chosen.schedule), SEARCHED_SCHEDULES)
        )
    simplify = chosen.simplify
    if simplify is not None and not (isinstance(simplify, int | float) and 0 <= simplify < inf):
        raise ConfigurationError(f"simplify is {simplify!r}; expected a share of the cost, 0 or more, such as 0.005")
    if chosen.attention not in ATTENTION:
        raise ConfigurationError(unknown_name("way of attention", str(chosen.attention), ATTENTION))
    return replace(chosen, constraints=constraints_of(chosen.constraints), modes=tuple(chosen.modes))


def check_memory(options: SearchOptions) -> None:
    """Raise CostError for an unknown optimiser, MemoryLimitError for a limit that is none."""
    optimiser_state(options.optimiser)
    limit = options.device_memory_bytes
    if limit is not None and not (isinstance(limit, int) and limit >= 1):
        raise MemoryLimitError(f"the memory of a device is {limit!r}; expected a whole number of bytes, 1 or more")


def check_search(graph: Graph, devices: int, *, keep_batch: bool = False) -> int:
    """Return the number of devices; ConfigurationError where a graph cannot be searched for it at all."""
    try:
        devices = index(devices)
    except TypeError:
        raise ConfigurationError(f"{devices!r} devices were asked for; expected a whole number of 1 or more") from None
    check_devices(devices)
    if devices > MAX_DEVICES:
        raise ConfigurationError(f"{devices} devices were asked for; at most {MAX_DEVICES} can be planned for")
    check_splittable(graph, devices)
    batch = dict(graph.arguments).get("batch")
    if isinstance(batch, int) and not keep_batch:
        check_batch(graph, batch, devices)
    return devices


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Of a whole search, tables included: until when, and how many bytes; None for no limit of time."""

    deadline_s: float | None
    memory_bytes: int

    @classmethod
    def of(cls, options: SearchOptions, start_s: float) -> "Limits":
        """Return what options ask for; SolverError where that makes no sense."""
        memory_bytes, time_s = options.solver_memory_bytes, options.time_limit_s
        check_limits(memory_bytes, time_s)
        return cls(
            deadline_s=None if time_s is None else start_s + time_s,
            memory_bytes=default_solver_memory_bytes() if memory_bytes is None else memory_bytes,
        )

    def for_tables(self) -> Allowance:
        """Return what making the tables may take."""
        return Allowance(deadline_s=inf if self.deadline_s is None else self.deadline_s, memory_bytes=self.memory_bytes)

    def for_search(self, problem: Problem) -> tuple[int, float | None]:
        """Return what is left for the solver: bytes and seconds."""
        left_bytes = max(1, self.memory_bytes - problem.tables.num_bytes)
        return left_bytes, None if self.deadline_s is None else max(1e-9, self.deadline_s - perf_counter())


def _known_configurations(graph: Graph, operator: Operator, *, left: Allowed, memory: StepMemory | None) -> IndexArray:
    """Return the configurations of a layer that need no search, of those that constraints leave.

    The nearest to data parallelism and, given what configurations have in memory, the lightest; of tied layers those of
    the first.
    """
    tied = next((names for _, names in left.ties if operator.name in names), ())
    operator = graph[tied[0]] if tied else operator
    known = np.array([data_parallel(graph, operator, left.num_devices)], dtype=np.int32)
    if memory is None and not tied and not left.of[operator.name]:
        return known
    splits = left.configurations(graph, operator)
    known = splits[[np.abs(np.log2(splits / known)).sum(axis=1).argmin()]]
    if memory is not None:
        v = memory.graph.index[operator.name]
        held = memory.lasting(v, memory.layers[v], has_casts=True) + memory.waiting(v, memory.layers[v])
        known = np.concatenate([known, splits[[held.argmin()]]])
    return np.unique(known, axis=0)
