"""Our step of micro-batches, stages and modes beside those that people train with, of as many micro-batches."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from time import perf_counter

import numpy as np

from pase.analysis.baselines.compare import OURS, Comparison, Contender
from pase.analysis.evaluation import planned_step
from pase.costs import STATES
from pase.graph import Graph
from pase.graph.stages import cuts
from pase.machine import Machine
from pase.planning.pipelines import data_parallel_step
from pase.planning.plan import Plan
from pase.planning.planner import Progress, SearchOptions, search
from pase.planning.spans import even_cuts
from pase.planning.steps import LayerChoice, Step
from pase.sharding.configurations import data_parallel_splits


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
