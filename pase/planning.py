"""The whole search, as one readable sequence of stages: graph → cost tables → strategy → placed plan."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from operator import index
from time import perf_counter

import numpy as np

from pase._version import __version__
from pase.configurations import check_batch, check_devices, check_splittable, data_parallel
from pase.costs import DEFAULT_OPTIMISER, Problem, build_problem, cost_model
from pase.costs.memory import optimiser_state
from pase.errors import ConfigurationError, MemoryLimitError
from pase.graph import Graph, verify
from pase.machine import DEFAULT_MACHINE, Machine, load_machine
from pase.memory_limit import search_within
from pase.plan import Plan, SearchRecord
from pase.solver import Solution, solve
from pase.strategy import plan_layers, total_cost

MAX_DEVICES = 1 << 20
"""Every layer of a plan lists all devices: a plan for a million of them is a file of 100 MB."""

WITHOUT_LIMIT = "without_memory_limit"
"""Among a plan's baselines: the cheapest strategy where memory is no matter."""

Progress = Callable[[str, float], None]
"""Called with what is being done and the fraction of it that is done, 0 to 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchOptions:
    """What a search can be told.

    cost_model: a name in `COST_MODELS`. ordering: a name in `ORDERINGS`, or "auto". memory_limit_bytes (of the solver's
    tables), time_limit_s: None for the solver's own. keep_batch: search although the batch cannot be split at all.
    memory_per_device_bytes: what a training step may take on each device, None for no limit. optimiser: a name in
    `OPTIMISER_STATE`, whose state counts as memory.
    """

    cost_model: str = "paper"
    ordering: str = "auto"
    memory_limit_bytes: int | None = None
    time_limit_s: float | None = None
    keep_batch: bool = False
    memory_per_device_bytes: int | None = None
    optimiser: str = DEFAULT_OPTIMISER


def search(
    graph: Graph,
    devices: int,
    *,
    machine: Machine | str = DEFAULT_MACHINE,
    options: SearchOptions | None = None,
    on_progress: Progress | None = None,
) -> Plan:
    """Return the cheapest strategy for training a graph on a number of devices, with its certificate.

    machine: a `Machine`, the name of a preset, or the path of a machine file. Raises a PaseError for what
    cannot be searched: no devices, nothing to split, an invalid graph, an unknown name, no memory for any strategy.
    """
    options = options or SearchOptions()
    _check_memory(options)
    verify(graph)
    devices = check_search(graph, devices, keep_batch=options.keep_batch)
    machine = load_machine(machine) if isinstance(machine, str) else machine
    start_s = perf_counter()
    problem = problem_of(graph, devices, machine, options.cost_model, on_progress)
    limit, known = options.memory_per_device_bytes, [data_parallel_choice(problem)]
    if limit is None:
        solution = solve(
            problem.tables,
            ordering=options.ordering,
            memory_limit_bytes=options.memory_limit_bytes,
            time_limit_s=options.time_limit_s,
            known=known,
            on_progress=on_progress,
        )
        time_s = perf_counter() - start_s
        return plan_of(problem, solution, machine, options.cost_model, time_s=time_s, optimiser=options.optimiser)
    limited = search_within(
        problem,
        limit,
        optimiser=options.optimiser,
        ordering=options.ordering,
        memory_limit_bytes=options.memory_limit_bytes,
        time_limit_s=options.time_limit_s,
        known=known,
        on_progress=on_progress,
    )
    time_s = perf_counter() - start_s
    plan = plan_of(problem, limited.solution, machine, options.cost_model, time_s=time_s, optimiser=options.optimiser)
    # What fits is a strategy without a limit, too: no search for one that was cut short need be dearer.
    free = min(limited.unlimited.cost, plan.total_cost)
    return replace(
        plan,
        memory_limit_bytes_per_device=limit,
        baselines={**plan.baselines, WITHOUT_LIMIT: free},
    )


def _check_memory(options: SearchOptions) -> None:
    """Raise CostError for an unknown optimiser, MemoryLimitError for a limit that is none."""
    optimiser_state(options.optimiser)
    limit = options.memory_per_device_bytes
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


def problem_of(
    graph: Graph, devices: int, machine: Machine, model: str, on_progress: Progress | None = None
) -> Problem:
    """Return the search problem of a graph under a cost model, by its name."""
    # Absurd figures of a machine overflow; the tables are then refused.
    with np.errstate(over="ignore", invalid="ignore"):
        return build_problem(graph, devices, cost_model(model, machine, devices), on_progress)


def plan_of(
    problem: Problem,
    solution: Solution,
    machine: Machine,
    model: str,
    *,
    time_s: float,
    optimiser: str = DEFAULT_OPTIMISER,
) -> Plan:
    """Return the placed plan of a solution; optimiser: whose state counts as memory."""
    graph, devices = problem.graph, problem.num_devices
    costs = cost_model(model, machine, devices)
    splits = [problem.splits(vertex, choice) for vertex, choice in enumerate(solution.choice)]
    sizes = [level.num_devices for level in machine.levels_spanned(devices)[:-1]]
    layers = plan_layers(graph, devices, costs, splits, group_sizes=sizes, optimiser=optimiser)
    total = total_cost(layers)
    assert abs(total - solution.cost) <= 1e-9 * total, f"plan costs {total}, solution {solution.cost}"
    return Plan(
        graph=graph,
        machine=machine,
        num_devices=devices,
        cost_model=model,
        cost_unit=costs.unit,
        layers=layers,
        total_cost=total,
        lower_bound=total if solution.exact else min(solution.lower_bound, total),
        exact=solution.exact,
        baselines={"data_parallel": data_parallel_cost(problem)},
        search=SearchRecord(
            ordering=solution.ordering,
            largest_dependent_set=solution.largest_dependent_set,
            time_s=time_s,
            peak_memory_bytes=solution.peak_memory_bytes,
        ),
        tool_version=__version__,
        optimiser=optimiser,
    )


def data_parallel_cost(problem: Problem) -> float:
    """Return the total cost of data parallelism."""
    return problem.tables.evaluate(data_parallel_choice(problem))


def data_parallel_choice(problem: Problem) -> tuple[int, ...]:
    """Return data parallelism, by configuration index: each layer's batch split as far as it goes, nothing else."""
    choice = []
    for vertex, operator in enumerate(problem.graph.operators):
        index = problem.choice(vertex, data_parallel(problem.graph, operator, problem.num_devices))
        assert index is not None, f"data parallelism is no configuration of {operator.name}"
        choice.append(index)
    return tuple(choice)
