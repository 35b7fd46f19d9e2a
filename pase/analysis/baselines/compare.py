"""Our strategy compared with others; all are costed, placed and planned in the same way."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from time import perf_counter
from typing import Any, Unpack

import numpy as np

from pase.analysis.baselines.registry import BASELINES, Baseline
from pase.analysis.evaluation import planned_step
from pase.analysis.figures import COMMUNICATION, COMPUTE, RECOMPUTE, REDISTRIBUTION, cost_figures
from pase.common.documents import StrPath
from pase.costs import STATES, Problem
from pase.graph import Graph
from pase.graph.parts import cuts, micro_batch
from pase.importers import load
from pase.machine import DEFAULT_MACHINE, Machine, load_machine
from pase.planning.memory_limit import limit_of, nothing_fits
from pase.planning.one_stage import step_cost
from pase.planning.pipelines import data_parallel_step
from pase.planning.plan import Plan
from pase.planning.planner import (
    Limits,
    Progress,
    SearchOptions,
    SearchSettings,
    check_search,
    chosen_options,
    plan_within,
    prepared,
    search,
)
from pase.planning.problems import PROOF, data_parallel_choice, given_solution, plan_of, problem_of
from pase.planning.spans import even_cuts
from pase.planning.steps import LayerChoice, TrainingStep
from pase.sharding.shards import data_parallel_splits
from pase.solver import NothingFitsError

OURS = "pase"
"""What our strategy is called beside the others."""


@dataclass(frozen=True, kw_only=True)
class Contender:
    """One strategy. plan: whole, so that it can be emitted and run; its bound is that of the cheapest strategy.

    search_time_s: to find it, once costs are known.
    """

    name: str
    plan: Plan
    search_time_s: float

    @cached_property
    def _parts(self) -> Mapping[str, float]:
        return cost_figures(self.plan).parts

    @property
    def compute(self) -> float:
        """Cost of the computation in all layers, recomputation included; mean over all devices."""
        return self._parts[COMPUTE] + self._parts[RECOMPUTE]

    @property
    def communication(self) -> float:
        """Cost of the communication within layers and between them that no computation overlaps; mean over devices."""
        return self._parts[COMMUNICATION] + self._parts[REDISTRIBUTION]

    @property
    def memory_bytes(self) -> int:
        """What a step needs on each device."""
        return self.plan.memory.total_bytes

    @property
    def fits_device(self) -> bool:
        """Whether that is no more than a device of the machine has."""
        return self.memory_bytes <= self.plan.machine.device.memory_bytes

    @property
    def ratio_to_data_parallel(self) -> float:
        """This one's cost ÷ data parallelism's: below 1 where a step is faster, by the cost model."""
        data_parallel = self.plan.baselines["data_parallel"]
        return self.plan.total_cost / data_parallel if data_parallel else 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Strategies under one cost model, ours first. absent: baselines that do not apply to the network.

    tables_time_s: to work out all costs, which are the same for all of them.
    """

    contenders: tuple[Contender, ...]
    absent: tuple[Baseline, ...]
    tables_time_s: float


def compare(
    model: object,
    devices: int,
    *,
    machine: Machine | StrPath = DEFAULT_MACHINE,
    baselines: Iterable[Baseline] = tuple(BASELINES.values()),
    options: SearchOptions | Mapping[str, Any] | None = None,
    on_progress: Progress | None = None,
    reload: Callable[[int], Graph] | None = None,
    **settings: Unpack[SearchSettings],
) -> Comparison:
    """Return our strategy and the baselines' for a model on a number of devices of a machine.

    Where micro-batches, stages or modes are asked for, baselines are of as many micro-batches as ours, and data
    parallelism in ZeRO's states, and even stages, are among them. Nothing holds baselines to a limit on memory.

    Args:
        model: As `search` takes it.
        devices: How many.
        machine: As `search` takes it.
        baselines: To compare with.
        options: Of our search.
        on_progress: Called with what is being done and the fraction that is done.
        reload: As for `search`.
        **settings: Each by its name in `SearchOptions`.

    Raises:
        PaseError: As `search` does.
    """
    chosen = chosen_options(options, settings)
    graph = prepared(load(model), chosen)
    machine = machine if isinstance(machine, Machine) else load_machine(machine)
    devices = check_search(graph, devices, keep_batch=chosen.keep_batch)
    ours: Plan | None = None
    if chosen.has_parts:
        ours = search(graph, devices, machine=machine, options=chosen, on_progress=on_progress, reload=reload)
        graph = micro_batch(graph, ours.micro_batches)
    micro_batches = 1 if ours is None else ours.micro_batches
    start_s = perf_counter()
    problem = problem_of(graph, devices, machine, chosen.cost_model, on_progress, micro_batches=micro_batches)
    tables_time_s = perf_counter() - start_s
    found: list[tuple[Baseline, tuple[int, ...], float]] = []
    absent = []
    for baseline in baselines:
        if on_progress:
            on_progress(f"looking for the strategy {baseline.name}", 0.0)
        start_s = perf_counter()
        choice = baseline.choose(problem, machine)
        time_s = perf_counter() - start_s
        if choice is None:
            absent.append(baseline)
        else:
            found.append((baseline, choice, time_s))
    if ours is None:
        # Where the search ends without a proof its strategy is still none of the others' worse.
        known = [data_parallel_choice(problem), *(choice for _, choice, _ in found)]
        ours = _ours_among(problem, machine, chosen, known, on_progress)
    contenders = [Contender(name=OURS, plan=ours, search_time_s=ours.search.time_s)]
    for baseline, choice, time_s in found:
        # No cheaper one than ours exists, or than its bound, but for what does not fit.
        cost = step_cost(problem, choice)
        bound = ours.lower_bound if cost >= ours.lower_bound * (1 - PROOF) else 0.0
        solution = given_solution(problem, choice, lower_bound=bound, time_s=time_s)
        plan = plan_of(problem, solution, machine, chosen.cost_model, time_s=time_s, optimiser=chosen.optimiser)
        contenders.append(Contender(name=baseline.name, plan=plan, search_time_s=time_s))
    for name, make in other_steps(ours) if chosen.has_parts else ():
        start_s = perf_counter()
        plan = planned_step(ours, make())
        contenders.append(Contender(name=name, plan=plan, search_time_s=perf_counter() - start_s))
    return Comparison(contenders=tuple(contenders), absent=tuple(absent), tables_time_s=tables_time_s)


def _ours_among(
    problem: Problem,
    machine: Machine,
    options: SearchOptions,
    known: Sequence[tuple[int, ...]],
    on_progress: Progress | None,
) -> Plan:
    """Return the cheapest plain plan that fits, of a problem whose constraints are none."""
    if options.constraints:
        return search(problem.graph, problem.num_devices, machine=machine, options=options, on_progress=on_progress)
    start_s = perf_counter()
    limits = Limits.of(options, start_s)
    try:
        return plan_within(
            problem, machine, options, known=known, limits=limits, start_s=start_s, on_progress=on_progress
        )
    except NothingFitsError:
        assert options.device_memory_bytes is not None
        limit = limit_of(problem, options.device_memory_bytes, options.optimiser)
        raise nothing_fits(problem, limit, is_constrained=False) from None


def other_steps(plan: Plan) -> Iterator[tuple[str, Callable[[], TrainingStep]]]:
    """Yield other steps than a plan's by name, each with what makes it: of as many micro-batches, and stages if any.

    Data parallelism in ZeRO's states, in the last one with all layers recomputed, block by block, too; and stages whose
    computation is as even as cuts allow, data parallel within.
    """
    plain = data_parallel_step(TrainingStep.of(plan))
    for state in STATES[1:]:
        yield state, partial(_in_state, plain, state)
    yield f"{STATES[-1]}_recompute", partial(_recomputed, _in_state(plain, STATES[-1]))
    if plan.num_stages > 1:
        yield "even_stages", partial(_even_stages, plain, plan)


def _in_state(step: TrainingStep, state: str) -> TrainingStep:
    return replace(step, layers=tuple(replace(layer, state=state) for layer in step.layers))


def _recomputed(step: TrainingStep) -> TrainingStep:
    """Return a step all of whose layers are recomputed, but for those at whose beginning it could be cut."""
    kept = {0, *cuts(step.graph)}
    layers = (replace(layer, is_recomputed=number not in kept) for number, layer in enumerate(step.layers))
    return replace(step, layers=tuple(layers))


def _even_stages(step: TrainingStep, plan: Plan) -> TrainingStep:
    """Return a pipeline whose cuts are nearest to where each stage has as much to compute as the others."""
    graph, num, groups = step.graph, plan.num_stages, plan.num_groups
    at = even_cuts(cuts(graph), [layer.compute_cost for layer in step.plans()], num)
    stages = np.searchsorted(at, np.arange(len(graph.operators)), side="right").tolist()
    splits = data_parallel_splits(graph, plan.num_devices // groups)
    layers = tuple(
        LayerChoice(splits=split, state=STATES[0], is_recomputed=False, stage=stage)
        for split, stage in zip(splits, stages, strict=True)
    )
    return replace(step, schedule=plan.schedule, layers=layers, chunks=num // groups)
