"""Our strategy beside the others, every one costed, placed and planned alike; and steps in parts, likewise."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from time import perf_counter

import numpy as np

from pase.analysis.baselines.registry import BASELINES, Baseline
from pase.analysis.evaluation import planned_step
from pase.analysis.figures import COMMUNICATION, COMPUTE, RECOMPUTE, REDISTRIBUTION, cost_figures
from pase.common.documents import StrPath
from pase.costs import STATES
from pase.graph import Graph
from pase.graph.parts import cuts
from pase.importers import load
from pase.machine import DEFAULT_MACHINE, Machine, load_machine
from pase.planning.pipelines import data_parallel_step
from pase.planning.plan import Plan
from pase.planning.planner import (
    Progress,
    SearchOptions,
    check_search,
    data_parallel_choice,
    given_solution,
    plan_of,
    problem_of,
    search,
)
from pase.planning.spans import even_cuts
from pase.planning.steps import LayerChoice, Step
from pase.sharding.shards import data_parallel_splits
from pase.solver import solve

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
    cost_model: str = "paper",
    baselines: Iterable[Baseline] = tuple(BASELINES.values()),
    keep_batch: bool = False,
    on_progress: Progress | None = None,
) -> Comparison:
    """Return our strategy and the baselines' for a model on a number of devices of a machine.

    model, machine: as `search` takes them. Raises a PaseError for what cannot be searched, as `search` does.
    """
    graph = load(model)
    machine = machine if isinstance(machine, Machine) else load_machine(machine)
    devices = check_search(graph, devices, keep_batch=keep_batch)
    start_s = perf_counter()
    problem = problem_of(graph, devices, machine, cost_model, on_progress)
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
    # Where the search ends without a proof its strategy is still none of the others' worse.
    known = [data_parallel_choice(problem), *(choice for _, choice, _ in found)]
    ours = solve(problem.tables, known=known, on_progress=on_progress)
    # No cheaper one than ours exists, or than its bound.
    solutions = [
        (OURS, ours),
        *(
            (entry.name, given_solution(problem, choice, lower_bound=ours.lower_bound, time_s=time_s))
            for entry, choice, time_s in found
        ),
    ]
    return Comparison(
        contenders=tuple(
            Contender(
                name=name,
                plan=plan_of(problem, solution, machine, cost_model, time_s=solution.time_s),
                search_time_s=solution.time_s,
            )
            for name, solution in solutions
        ),
        absent=tuple(absent),
        tables_time_s=tables_time_s,
    )


# -- steps of micro-batches, stages and modes, beside those that people train with, of as many micro-batches


def compare_steps(
    graph: Graph,
    devices: int,
    *,
    machine: Machine,
    options: SearchOptions,
    on_progress: Progress | None = None,
    reload: Callable[[int], Graph] | None = None,
) -> Comparison:
    """Return the cheapest step and those of `others`; arguments and errors as for `search`."""
    plan = search(graph, devices, machine=machine, options=options, on_progress=on_progress, reload=reload)
    contenders = [Contender(name=OURS, plan=plan, search_time_s=plan.search.time_s)]
    for name, make in others(plan):
        start_s = perf_counter()
        other = planned_step(plan, make())
        contenders.append(Contender(name=name, plan=other, search_time_s=perf_counter() - start_s))
    return Comparison(contenders=tuple(contenders), absent=(), tables_time_s=0.0)


def others(plan: Plan) -> Iterator[tuple[str, Callable[[], Step]]]:
    """Yield other steps by name, each with what makes it: of as many micro-batches, and stages where there are any.

    Data parallelism, with weights whole and in ZeRO's states; in the last one with all layers recomputed, block by
    block; and stages whose computation is as even as cuts allow, data parallel within.
    """
    plain = data_parallel_step(Step.of(plan))
    yield "data_parallel", lambda: plain
    for state in STATES[1:]:
        yield state, partial(_in_state, plain, state)
    yield f"{STATES[-1]}_recompute", partial(_recomputed, _in_state(plain, STATES[-1]))
    if plan.num_stages > 1:
        yield "even_stages", partial(_even_stages, plain, plan)


def _in_state(step: Step, state: str) -> Step:
    return replace(step, layers=tuple(replace(layer, state=state) for layer in step.layers))


def _recomputed(step: Step) -> Step:
    """Return a step all of whose layers are recomputed, but for those at whose beginning it could be cut."""
    kept = {0, *cuts(step.graph)}
    layers = (replace(layer, is_recomputed=number not in kept) for number, layer in enumerate(step.layers))
    return replace(step, layers=tuple(layers))


def _even_stages(step: Step, plan: Plan) -> Step:
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
