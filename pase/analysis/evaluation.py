"""`evaluate`: what a strategy costs that somebody wrote or that has a name, and how far it is from the cheapest one.

A strategy file (TOML, or the same as JSON) is a file of constraints (`pase.planning.constraints`) that says, too, what
layers have of which no pin speaks: `rest`, the cheapest that there is or data parallelism, or `start`, what they have
in a known strategy or in a plan.

    start = "megatron"

    [pin]
    "head" = "n=4 c=2"

    [devices]
    "head" = [0, 2, 4, 6, 1, 3, 5, 7]
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from math import inf, isclose
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any, TypedDict, Unpack

import numpy as np
from msgspec import UNSET, UnsetType

from pase._version import __version__
from pase.analysis.baselines.registry import BASELINES, baseline_of
from pase.analysis.explanation.constrained_search import PATIENT_TIME_S, Improvement, improvement, nearest
from pase.analysis.explanation.planned_stages import planned_stages
from pase.common.documents import DocumentSource, StrPath, read_text, toml_document
from pase.common.structs import choice, read
from pase.common.words import short
from pase.costs import DEFAULT_OPTIMISER, Allowance, Problem, TimeUpError, cost_model
from pase.costs.states import EVERY_MODE
from pase.errors import ConfigurationError, MemoryLimitError, PlanError, SolverError, unknown_name
from pase.graph import Graph, Precision
from pase.graph.operators import with_fan_outs
from pase.graph.parts import micro_batch, with_fan_outs_of
from pase.importers import load
from pase.machine import DEFAULT_MACHINE, Machine, load_machine
from pase.planning.constraints import (
    Constraint,
    Constraints,
    ConstraintsDocument,
    DevicesOf,
    Pin,
    allowed,
    constraints_of,
    devices_by_hand,
    mode_space,
)
from pase.planning.pipelines import data_parallel_step, search_schemes
from pase.planning.plan import NOT_SEARCHED, Plan, SearchRecord
from pase.planning.plan_file import plan_from_document
from pase.planning.planner import Progress, check_search, check_seconds, search, settings_of, usable_bytes, whole_graph
from pase.planning.problems import (
    PROOF,
    configurations_beside,
    data_parallel_choice,
    given_solution,
    plan_of,
    problem_of,
)
from pase.planning.spans import Setting
from pase.planning.stages import schedule_of
from pase.planning.steps import TrainingStep
from pase.sharding.shards import data_parallel_splits
from pase.solver import RELATIVE_TOLERANCE, default_solver_memory_bytes, solve

OPTIMAL, DATA_PARALLEL = "optimal", "data_parallel"
"""What layers may have of which a strategy does not speak: the cheapest that there is, or their batch split alone."""

BOUND_TIME_S = 60.0
"""How long the cheapest strategy is looked for, with which a given one is compared."""

KEPT = "kept"
"""Instead of the cheapest rest: all other layers as they are."""

STRATEGY_SUFFIXES = (".toml", ".json")


@dataclass(frozen=True, slots=True, kw_only=True)
class Strategy:
    """What somebody says of a strategy.

    constraints: what it keeps to: pinned layers, above all. rest: what the layers have that no pin is about: a known
    strategy, by name, or those of a plan. where: what messages call that.
    """

    constraints: Constraints = ()
    rest: str | Plan = OPTIMAL
    where: str = "the strategy"

    @property
    def plan(self) -> Plan | None:
        return self.rest if isinstance(self.rest, Plan) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """A strategy's plan beside the cheapest strategy.

    optimum_cost: of the cheapest one known; None where there was no time to look for it. improvement: what to change;
    None where no cheaper strategy is known.
    """

    plan: Plan
    optimum_cost: float | None
    improvement: Improvement | None


class EvaluationSettings(TypedDict, total=False):
    """How a strategy is evaluated.

    machine: as `search` takes it; that of a plan, or the default one. cost_model: by name; that of a plan, or the
    paper's. optimiser: whose state counts as memory; that of a plan, or the default one. precision: as `search` takes
    it; that of a plan, or the model's own. time_limit_s: for the cheapest strategy, from which the plan's lower bound
    is; `BOUND_TIME_S` by default, None for no limit. on_progress: called with what is being done and the fraction of it
    that is done.
    """

    machine: Machine | StrPath | None
    cost_model: str | None
    optimiser: str | None
    precision: Precision | str | None
    time_limit_s: float | None
    on_progress: Progress | None


def evaluate(
    model: object, strategy: object, devices: int | None = None, **settings: Unpack[EvaluationSettings]
) -> Plan:
    """Return the plan of a strategy: its costs, memory and bytes, and by its gap how far it is from the cheapest one.

    Args:
        model: a `Graph`, or anything that `load` takes.
        strategy: the name of a known one ("megatron", "grid 8x4", "optimal"), a plan, the path of a strategy file or
            of a plan, or a dict as such files hold ({"pin": {"fc1": "n=4 c=2"}, "rest": "data_parallel"}).
        devices: their number; those of a plan by default.
        **settings: each by its name in `EvaluationSettings`.

    Raises:
        PaseError: a strategy that cannot be read, or that the model does not have on so many devices.
    """
    return evaluation(model, strategy, devices, **settings).plan


def evaluation(
    model: object, strategy: object, devices: int | None = None, **settings: Unpack[EvaluationSettings]
) -> Evaluation:
    """Return the plan of a strategy with what to change in it; arguments and errors as for `evaluate`."""
    chosen, time_limit_s = strategy_of(strategy), settings.get("time_limit_s", BOUND_TIME_S)
    on_progress = settings.get("on_progress")
    setting = _Setting.of(model, chosen, devices, settings)
    start_s = perf_counter()
    deadline_s = inf if time_limit_s is None else start_s + time_limit_s
    if chosen.plan is not None and chosen.plan.has_parts:
        plan = setting.plan_of_step(chosen, chosen.plan)
        optimum_cost, bound = setting.cheapest_step(plan, deadline_s, on_progress)
        found = _improvement(plan, deadline_s, on_progress)
        certified = replace(_certified(plan, bound), device_memory_bytes=None)
        return Evaluation(plan=certified, optimum_cost=optimum_cost, improvement=found)
    problem, bound = setting.problem(Allowance(deadline_s=deadline_s), on_progress)
    plan = setting.plan_of(chosen, problem, time_limit_s, on_progress)
    if problem is not None and (only := configurations_beside(plan)) is not None:
        problem, bound = setting.problem(Allowance(deadline_s=deadline_s), on_progress, only=only)
    if problem is None:
        return Evaluation(plan=_certified(plan, bound), optimum_cost=None, improvement=None)
    choice = problem.strategy(layer.splits for layer in plan)
    known = [data_parallel_choice(problem), *([choice] if choice else [])]
    left_s = None if time_limit_s is None else max(1e-9, deadline_s - perf_counter())
    optimum = solve(problem.tables, known=known, time_limit_s=left_s, on_progress=on_progress)
    found = None
    if choice:
        found = improvement(problem, choice, nearest([problem.tables], choice, optimum.choice))
    return Evaluation(plan=_certified(plan, optimum.lower_bound), optimum_cost=optimum.cost, improvement=found)


def _certified(plan: Plan, bound: float) -> Plan:
    """Return a plan with what is proven of it among all strategies, not among those that keep to its constraints."""
    bound = min(bound, plan.total_cost)
    exact = isclose(bound, plan.total_cost, rel_tol=PROOF)
    return replace(plan, constraints=(), exact=exact, lower_bound=plan.total_cost if exact else bound)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Setting:
    """For what a strategy is evaluated."""

    graph: Graph
    devices: int
    machine: Machine
    cost_model: str
    optimiser: str

    @classmethod
    def of(cls, model: object, strategy: Strategy, devices: int | None, settings: EvaluationSettings) -> "_Setting":
        """Return what is asked for, the rest as in the strategy's plan if it has one."""
        plan, machine, precision = strategy.plan, settings.get("machine"), settings.get("precision")
        graph = load(model).in_precision(plan.precision if plan and precision is None else precision)
        if devices is None:
            if plan is None:
                raise ConfigurationError(f"the number of devices is missing, which {strategy.where} does not say")
            devices = plan.num_devices
        if machine is None:
            machine = plan.machine if plan else DEFAULT_MACHINE
        return cls(
            graph=with_fan_outs(graph),
            devices=check_search(graph, devices, keep_batch=True),
            machine=machine if isinstance(machine, Machine) else load_machine(machine),
            cost_model=settings.get("cost_model") or (plan.cost_model if plan else "paper"),
            optimiser=settings.get("optimiser") or (plan.optimiser if plan else DEFAULT_OPTIMISER),
        )

    def problem(
        self, allowance: Allowance, on_progress: Progress | None, **others: Any
    ) -> tuple[Problem | None, float]:
        """Return the problem of all strategies, None where there is not the time, and a bound on what they cost."""
        allowance = replace(allowance, memory_bytes=default_solver_memory_bytes())
        try:
            return self._problem(on_progress, allowance=allowance, **others), 0.0
        except TimeUpError as stopped:
            return None, stopped.bound * (1 - RELATIVE_TOLERANCE)

    def _problem(self, on_progress: Progress | None, **others: Any) -> Problem:
        return problem_of(self.graph, self.devices, self.machine, self.cost_model, on_progress, **others)

    def plan_of(
        self, strategy: Strategy, problem: Problem | None, time_limit_s: float | None, on_progress: Progress | None
    ) -> Plan:
        """Return the plan of a strategy, its certificate among those that keep to it. problem: of all strategies."""
        pinned = allowed(strategy.constraints, self.graph, self.devices).of
        open_layers = [name for name, about in pinned.items() if not any(isinstance(each, Pin) for each in about)]
        rest = tuple(self._rest(strategy, open_layers, problem, on_progress))
        start_s = perf_counter()
        if problem is not None and rest and not strategy.constraints:
            choice = problem.strategy(each.splits for each in rest if isinstance(each, Pin))
            if choice:
                return plan_of(
                    problem,
                    given_solution(problem, choice, time_s=0.0),
                    self.machine,
                    self.cost_model,
                    time_s=perf_counter() - start_s,
                    optimiser=self.optimiser,
                    constraints=tuple(each for each in rest if isinstance(each, DevicesOf)),
                )
        plan = search(
            self.graph,
            self.devices,
            machine=self.machine,
            cost_model=self.cost_model,
            optimiser=self.optimiser,
            keep_batch=True,
            constraints=(*strategy.constraints, *rest),
            # What is pinned as a whole is not searched for.
            time_limit_s=None if rest else time_limit_s,
            on_progress=on_progress,
        )
        if not rest:
            return plan
        time_s = perf_counter() - start_s
        return replace(
            plan,
            search=SearchRecord(ordering=NOT_SEARCHED, largest_dependent_set=0, time_s=time_s, peak_memory_bytes=0),
        )

    def _rest(
        self, strategy: Strategy, names: Sequence[str], problem: Problem | None, on_progress: Progress | None
    ) -> Iterator[Constraint]:
        """Yield what pins the layers that a strategy's own pins leave open."""
        graph, rest, where = self.graph, strategy.rest, strategy.where
        if rest == OPTIMAL:
            return
        if isinstance(rest, Plan):
            _check_same_layers(rest, graph, where)
            splits = [dict(rest[name].splits) for name in graph.index]
        elif rest == DATA_PARALLEL:
            splits = data_parallel_splits(graph, self.devices)
        else:
            splits = self._scheme(rest, where, problem or self._problem(on_progress))
        is_placed = any(isinstance(each, DevicesOf) for each in strategy.constraints)
        for name in names:
            # Fan-outs, of which no expert speaks, follow their neighbours where these are others.
            if strategy.constraints and graph[name].is_fan_out:
                continue
            yield Pin(layers=(name,), splits=splits[graph.index[name]], where=where)
            if isinstance(rest, Plan) and rest.num_devices == self.devices and not is_placed:
                yield DevicesOf(layers=(name,), devices=rest[name].devices, where=where)

    def _scheme(self, name: str, where: str, problem: Problem) -> list[dict[str, int]]:
        scheme = baseline_of(name)
        choice = scheme.choose(problem, self.machine)
        if choice is None:
            raise ConfigurationError(
                f"{where} does not apply to {short(self.graph.name)!r} on {self.devices} devices: it needs "
                f"{scheme.needs}"
            )
        return [problem.splits(vertex, index) for vertex, index in enumerate(choice)]

    def plan_of_step(self, strategy: Strategy, plan: Plan) -> Plan:
        """Return a plan with micro-batches, stages or modes for what is asked, with the limit that others must fit.

        That is the plan's own limit on memory, or the devices that are asked for, but no less than it needs.
        """
        if self.devices != plan.num_devices:
            raise PlanError(
                f"{strategy.where} has micro-batches, stages or modes of layers, for {plan.num_devices} devices; with "
                f"{self.devices} devices it is another step: search it (pase search with --stages, --micro-batches, "
                "--modes)"
            )
        check_seconds(self.cost_model)
        graph = with_fan_outs_of(micro_batch(self.graph, plan.micro_batches), plan.graph)
        _check_same_layers(plan, graph, strategy.where)
        if any(list(plan[name].dims.values()) != list(graph[name].extents.values()) for name in graph.index):
            raise PlanError(
                f"{strategy.where} is of {plan.micro_batches} micro-batches of another size than those of "
                f"{short(graph.name)!r} with this batch: give the batch that it was searched with (--batch)"
            )
        step = replace(
            TrainingStep.of(plan),
            graph=graph,
            machine=self.machine,
            cost_model=self.cost_model,
            optimiser=self.optimiser,
        )
        devices: list[tuple[int, ...]] | None = [layer.devices for layer in plan]
        if strategy.constraints:
            step, devices = _kept_to(step, strategy.constraints), None
        limit = max(plan.device_memory_bytes or usable_bytes(self.machine) or 0, step.peak.bytes)
        return replace(planned_step(plan, step, devices, strategy.constraints), device_memory_bytes=int(limit))

    def cheapest_step(self, plan: Plan, deadline_s: float, on_progress: Progress | None) -> tuple[float | None, float]:
        """Return what the cheapest step of all numbers and modes costs that fits a plan's limit, and a bound on it."""
        found, bound = None, 0.0
        with suppress(MemoryLimitError, SolverError):  # nothing is known to fit, or by the deadline
            found, bound = search_schemes(
                Setting(
                    graph=self.graph,
                    num_devices=self.devices,
                    machine=self.machine,
                    cost_model=self.cost_model,
                    space=EVERY_MODE,
                    optimiser=self.optimiser,
                    limit_bytes=float(plan.device_memory_bytes or inf),
                    schedule=schedule_of(plan.num_stages // plan.num_groups),
                    deadline_s=deadline_s,
                ),
                None,
                None,
                on_progress=on_progress,
            )
        return None if found is None else min(found.cost, plan.total_cost), bound


def _improvement(plan: Plan, deadline_s: float, on_progress: Progress | None) -> Improvement | None:
    """Return what to change first in a plan with parts, in one of its stages; None where nothing cheaper is known."""
    left_s = deadline_s - perf_counter()
    if left_s <= 0:
        return None
    stages = planned_stages(plan, time_limit_s=left_s if left_s < PATIENT_TIME_S else None, on_progress=on_progress)
    found = [stage.improvement(stage.optimum(on_progress).choice) for stage in stages]
    return max(filter(None, found), key=lambda one: one.saving, default=None)


def _kept_to(step: TrainingStep, constraints: Constraints) -> TrainingStep:
    """Return a step as constraints have it: layers that do not keep to them have the nearest that they leave.

    Stages, micro-batches and other layers stay as they are.
    """
    graph = step.graph
    left = allowed(constraints, graph, step.group)
    space = mode_space(EVERY_MODE, constraints, graph)
    tied = {name: names[0] for _, names in left.ties for name in names}
    layers = list(step.layers)
    for number, operator in enumerate(graph.operators):
        name, own = operator.name, layers[number]
        # Of tied layers the first one decides.
        splits = np.array(list(layers[graph.index[tied.get(name, name)]].splits.values()))
        if left.of[name] or name in tied:
            rows = left.configurations(graph, operator)
            splits = rows[np.abs(np.log2(rows / splits)).sum(axis=1).argmin()]
        modes = space.of(name)
        layers[number] = replace(
            own,
            splits=dict(zip(operator.extents, splits.tolist(), strict=True)),
            state=own.state if own.state in modes.states else modes.states[0],
            is_recomputed=own.is_recomputed and modes.recompute,
        )
    return replace(step, layers=tuple(layers))


def planned_step(
    plan: Plan,
    step: TrainingStep,
    devices: Sequence[tuple[int, ...]] | None = None,
    constraints: Constraints = (),
) -> Plan:
    """Return the plan of a step that was given, otherwise as another.

    Args:
        plan: The other one.
        step: That was given.
        devices: Of the parts of each layer; placed anew where they are not given.
        constraints: Those that name the devices of layers are kept to.
    """
    return replace(
        plan,
        graph=step.graph,
        machine=step.machine,
        cost_model=step.cost_model,
        cost_unit=cost_model(step.cost_model, step.machine, step.num_devices, step.graph.precision).unit,
        optimiser=step.optimiser,
        layers=step.plans(devices, by_hand=devices_by_hand(constraints, step.graph)),
        total_cost=step.cost,
        lower_bound=0.0,
        exact=False,
        baselines={"data_parallel": data_parallel_step(step).cost},
        search=SearchRecord(ordering=NOT_SEARCHED, largest_dependent_set=0, time_s=0.0, peak_memory_bytes=0),
        device_memory_bytes=None,
        constraints=(),
        num_groups=step.num_groups,
        micro_batches=step.micro_batches,
        schedule=step.schedule,
        tool_version=__version__,
    )


def _replaced_in_step(plan: Plan, layer: str, pin: Pin) -> Plan:
    """Return a plan with parts in which a layer has another configuration, all others kept."""
    step = TrainingStep.of(plan)
    allowed((pin,), plan.graph, step.group).configurations(plan.graph, plan.graph[layer])
    splits = {dim: pin.splits.get(dim, 1) for dim in plan[layer].dims}
    at = plan.index[layer]
    layers = (*step.layers[:at], replace(step.layers[at], splits=splits), *step.layers[at + 1 :])
    found = _certified(planned_step(plan, replace(step, layers=layers)), plan.lower_bound)
    return replace(found, constraints=plan.constraints, baselines=plan.baselines)


def replaced(plan: Plan, layer: str, rest: str = OPTIMAL, **splits: int) -> Plan:
    """Return a plan in which a layer has another configuration, as `Plan.replace` does."""
    if rest not in (OPTIMAL, KEPT):
        raise ConfigurationError(f"rest is {rest!r}; expected {OPTIMAL!r} or {KEPT!r}")
    if layer not in plan:
        raise PlanError(unknown_name("layer", layer, plan.index))
    for dim, factor in splits.items():
        if isinstance(factor, bool) or not isinstance(factor, int) or factor < 1:
            raise ConfigurationError(f"{layer}: {dim} is {factor!r}; expected a whole number of 1 or more")
    own = Pin(layers=(layer,), splits=splits, where=f"replacing {layer!r}")
    if plan.has_parts and rest == KEPT:
        return _replaced_in_step(plan, layer, own)
    pins: list[Constraint] = [own]
    if rest == KEPT:
        for other in plan:
            # Fan-outs follow their neighbours.
            if other.name != layer and not plan.graph[other.name].is_fan_out:
                where = f"layer {other.name!r} of the plan"
                pins.append(Pin(layers=(other.name,), splits=other.splits, where=where))
                pins.append(DevicesOf(layers=(other.name,), devices=other.devices, where=where))
    found = search(
        whole_graph(plan),
        plan.num_devices,
        machine=plan.machine,
        options={**settings_of(plan), "constraints": (*plan.constraints, *pins)},
    )
    # No strategy that keeps to what the plan keeps to costs less than its own bound.
    return replace(_certified(found, plan.lower_bound), constraints=plan.constraints, baselines=plan.baselines)


def _check_same_layers(plan: Plan, graph: Graph, where: str) -> None:
    """Raise PlanError unless a plan has the layers and dims of a model."""
    other = next((name for name in graph.index if name not in plan), None) or next(
        (name for name in plan.index if name not in graph.index), None
    )
    if other is not None:
        has, lacks = (plan.graph.name, graph.name) if other in plan else (graph.name, plan.graph.name)
        raise PlanError(
            f"{where} is of another model: {short(has)!r} has a layer {short(other)!r}, {short(lacks)!r} has none"
        )
    for layer in plan:
        if list(layer.dims) != list(graph[layer.name].extents):
            raise PlanError(
                f"{where} is of another model: its layer {short(layer.name)!r} has the dims {', '.join(layer.dims)}; "
                f"expected {', '.join(graph[layer.name].extents)}"
            )


# -- from names, files and Python


def strategy_of(given: object) -> Strategy:
    """Return the strategy that a caller gives: a name, a plan, the path of a file, or a dict as files hold.

    Raises:
        ConfigurationError: what is none of these, or wrong in a file, by its field.
        PlanError: a plan's file that is not whole, or not consistent.
    """
    if isinstance(given, Strategy):
        return given
    if isinstance(given, Plan):
        return Strategy(rest=given, where=f"the plan of {short(given.graph.name)!r}")
    if isinstance(given, Mapping):
        said = {key: given[key] for key in ("start", "rest") if key in given}
        found = _from_document(said, DocumentSource(ConfigurationError, "strategy"), Path())
        return replace(found, constraints=constraints_of({key: given[key] for key in given if key not in said}))
    if isinstance(given, str) and _is_scheme(given):
        return Strategy(rest=given, where=f"strategy {given!r}")
    if isinstance(given, str | Path):
        path = Path(given)
        if isinstance(given, str) and path.suffix.lower() not in STRATEGY_SUFFIXES and not path.exists():
            raise ConfigurationError(f"{unknown_name('scheme', given, _SCHEMES)}; or name a .toml or .json file")
        return _from_file(path)
    raise ConfigurationError(
        f"a strategy is {given!r:.60}; expected a name, a plan, the path of a file, or a dict such as "
        "{'pin': {'fc1': 'n=4 c=2'}}"
    )


_SCHEMES = (OPTIMAL, *BASELINES, "grid PRxPC")


def _is_scheme(name: str) -> bool:
    if name == OPTIMAL:
        return True
    try:
        baseline_of(name)
    except ConfigurationError:
        return False
    return True


def _from_file(path: Path) -> Strategy:
    source = DocumentSource(ConfigurationError, f"strategy file {path}")
    text = read_text(path, source.error, source.name)
    if path.suffix.lower() != ".json" and not text.lstrip().startswith("{"):
        return _from_document(toml_document(text, source), source, path.parent)
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(f"{source.name} is not complete JSON ({error}); it may be truncated") from None
    if isinstance(document, dict) and "schema_version" in document:
        where = DocumentSource(PlanError, f"plan file {path}")
        return Strategy(rest=plan_from_document(document, where), where=where.name)
    return _from_document(document, source, path.parent)


class StrategyDocument(ConstraintsDocument, forbid_unknown_fields=True):
    """A strategy: what is pinned, and what layers have that no pin is about."""

    start: str | UnsetType = UNSET
    """Name of a scheme, or a plan's file."""
    rest: Annotated[str, choice((OPTIMAL, DATA_PARALLEL))] | UnsetType = UNSET
    """What other layers have."""


def _from_document(given: object, source: DocumentSource, folder: Path) -> Strategy:
    document = read(StrategyDocument, given, source)
    start, rest = document.start, document.rest
    if start and rest:
        raise source.fail("start", "says what layers have that no pin is about, and so does rest; give one of them")
    found = Strategy(constraints=document.constraints(f"{source.name}: "), where=source.name)
    if not start:
        return replace(found, rest=rest) if rest else found
    if _is_scheme(start):
        return replace(found, rest=start, where=f"{source.name}: start {start!r}")
    begun = _from_file(folder / start) if (folder / start).is_file() else None
    if begun is None or begun.plan is None or begun.constraints:
        what = "it is no plan" if begun else unknown_name("scheme", start, _SCHEMES)
        raise source.fail("start", f"is {start!r}; expected a scheme or a plan's file: {what}")
    return replace(found, rest=begun.rest, where=begun.where)
