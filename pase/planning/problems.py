"""Problems of steps of one stage, and the plans of their solutions."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import inf, isclose

import numpy as np

from pase._version import __version__
from pase.costs import DEFAULT_OPTIMISER, Allowance, CostModel, Problem, cost_model, memory_of_layers
from pase.costs.choice_tables import KnownChoices, choice_tables
from pase.costs.states import STATES, ModeSpace
from pase.errors import PlanError
from pase.graph import Graph, Operator
from pase.graph.operators.products import with_rings
from pase.machine import Machine
from pase.planning.constraints import (
    Constraints,
    DevicesOf,
    Pin,
    allowed,
    devices_by_hand,
)
from pase.planning.one_stage import problem_of_setting, step_cost
from pase.planning.plan import NOT_SEARCHED, Plan, SearchRecord
from pase.planning.spans import Setting
from pase.planning.steps import chosen_layers, layer_plans, place_layers, total_cost
from pase.sharding.shards import data_parallel, data_parallel_splits
from pase.solver import (
    Progress,
    Solution,
)
from pase.tables.cost_tables import IndexArray

PROOF = 1e-12
"""Costs that differ by no more than this part of them are the same sum in another order."""


def problem_of(
    graph: Graph,
    devices: int,
    machine: Machine,
    model: str,
    on_progress: Progress | None = None,
    *,
    allowance: Allowance | None = None,
    only: Callable[[Graph, Operator], IndexArray] | None = None,
    constraints: Constraints = (),
    micro_batches: int = 1,
    rings: bool = False,
) -> Problem:
    """Return the problem of steps of one stage and mode under a cost model, by its name; graph: of one micro-batch.

    rings: as in `ModeSpace`. Other arguments as for `problem_of_setting`; of what they leave of a layer, constraints
    leave what they allow.
    """
    setting = Setting(
        graph=graph,
        num_devices=devices,
        machine=machine,
        cost_model=model,
        space=ModeSpace(rings=rings),
        optimiser=DEFAULT_OPTIMISER,
        limit_bytes=inf,
        constraints=constraints,
    )
    if micro_batches > 1:
        setting = replace(setting, imported={micro_batches: graph})
    return problem_of_setting(setting, micro_batches, allowance=allowance, only=only, on_progress=on_progress)


def problem_of_plan(
    plan: Plan,
    on_progress: Progress | None = None,
    *,
    machine: Machine | None = None,
    allowance: Allowance | None = None,
    space: ModeSpace | None = None,
) -> Problem:
    """Return the search problem that a plan answers.

    Args:
        plan: Of one stage.
        on_progress: Called with what is being done and the fraction that is done.
        machine: Another one than the plan's.
        allowance: Of its tables.
        space: Modes that layers choose from; None: each layer keeps its own.

    Raises:
        PlanError: The plan has several stages, whose costs are no sum over layers, or costs more than tables tell.
    """
    if plan.num_groups > 1:
        raise PlanError(
            f"the plan has {plan.num_groups} stages, of which the longest counts: what is asked of it here is worked "
            "out for plans of one stage alone"
        )
    m, own_space = plan.micro_batches, modes_of_layers(plan)
    setting = Setting(
        graph=plan.graph,
        num_devices=plan.num_devices,
        machine=plan.machine if machine is None else machine,
        cost_model=plan.cost_model,
        space=own_space if space is None else space,
        optimiser=plan.optimiser,
        limit_bytes=inf,
        constraints=plan.constraints,
        imported={m: plan.graph} if m > 1 else {},
    )
    problem = problem_of_setting(
        setting,
        m,
        allowance=allowance,
        only=configurations_beside(plan),
        recomputed=frozenset(layer.name for layer in plan if layer.is_recomputed),
        is_whole=not setting.space.is_plain,
        on_progress=on_progress,
    )
    return problem.restricted(_in_modes_of(plan, problem)) if space is None and not own_space.is_plain else problem


def modes_of_layers(plan: Plan) -> ModeSpace:
    """Return the modes that some layer of a plan has, and the usual one."""
    states = {layer.state for layer in plan}
    return ModeSpace(
        states=tuple(state for state in STATES if state == STATES[0] or state in states),
        recompute=any(layer.is_recomputed for layer in plan),
    )


def _in_modes_of(plan: Plan, problem: Problem) -> dict[int, IndexArray]:
    """Return the choices of layers that have some, in the modes of a plan; in the nearest that each layer has."""
    known: dict[tuple[int, str, bool], IndexArray] = {}
    kept = {}
    for vertex, (modes, layer) in enumerate(zip(problem.choices.layers, plan.layers, strict=True)):
        key = id(modes), layer.state, layer.is_recomputed
        if key not in known:
            own = int(modes.nearness(layer.state, is_recomputed=layer.is_recomputed).argmax())
            is_alike = (modes.state == modes.state[own]) & (modes.again == modes.again[own])
            known[key] = np.flatnonzero(is_alike).astype(np.int32)
        kept[vertex] = known[key]
    return kept


def configurations_beside(plan: Plan) -> Callable[[Graph, Operator], IndexArray] | None:
    """Return the configurations of each layer that a plan is compared with, its own included; None for all there are.

    A search looks at splits that divide their dims alone, which those of a plan need not do.
    """
    own = tuple(Pin(layers=(layer.name,), splits=layer.splits) for layer in plan if layer.uneven_dims)
    return allowed(own, plan.graph, plan.group_size).with_pinned if own else None


def plan_of(
    problem: Problem,
    solution: Solution,
    machine: Machine,
    model: str,
    *,
    time_s: float,
    optimiser: str = DEFAULT_OPTIMISER,
    constraints: Constraints = (),
) -> Plan:
    """Return the placed plan of a solution.

    Args:
        problem: Of steps of one stage.
        solution: Of the problem.
        machine: That it was made for.
        model: Of costs, by its name.
        time_s: What finding it took.
        optimiser: Whose state counts as memory.
        constraints: Of the problem.
    """
    costs = cost_model(model, machine, problem.num_devices, problem.graph.precision)
    problem, solution = _with_chosen_rings(problem, solution, costs)
    graph, devices, m = problem.graph, problem.num_devices, problem.micro_batches
    chosen = chosen_layers(problem.choices, solution.choice)
    sizes = [level.num_devices for level in machine.levels_spanned(devices)[:-1]]
    is_constrained = any(not isinstance(each, DevicesOf) for each in constraints)
    free = _data_parallel_problem(problem, costs) if is_constrained else problem
    by_hand = devices_by_hand(constraints, graph)
    placed = place_layers(problem.choices, solution.choice, costs, group_sizes=sizes, by_hand=by_hand)
    peak = memory_of_layers(graph, chosen, optimiser=optimiser, micro_batches=m).peak()
    kept = peak.kept_by_layer
    layers = tuple(layer_plans(problem.choices, solution.choice, placed, micro_batches=m, kept_bytes=kept))
    total = total_cost(layers) if m == 1 else step_cost(problem, solution.choice)
    assert m > 1 or abs(total - solution.cost) <= 1e-9 * total, f"plan costs {total}, solution {solution.cost}"
    plan = Plan(
        graph=graph,
        machine=machine,
        num_devices=devices,
        cost_model=model,
        cost_unit=costs.unit,
        layers=layers,
        total_cost=total,
        lower_bound=total if solution.exact and m == 1 else min(solution.lower_bound, total),
        exact=solution.exact and solution.lower_bound >= total * (1 - PROOF),
        baselines={"data_parallel": data_parallel_cost(free)},
        search=SearchRecord(
            ordering=solution.ordering,
            largest_dependent_set=solution.largest_dependent_set,
            time_s=time_s,
            peak_memory_bytes=solution.peak_memory_bytes,
        ),
        tool_version=__version__,
        optimiser=optimiser,
        constraints=constraints,
        micro_batches=m,
    )
    vars(plan)["peak"] = peak  # a cached property, which is known already
    return plan


def _with_chosen_rings(problem: Problem, solution: Solution, costs: CostModel) -> tuple[Problem, Solution]:
    """Return a problem whose attention is a ring where a solution has chosen it, and the solution of that.

    Of other strategies the problem has data parallelism alone. Where no ring is to choose both are as they were.
    """
    if not any(layer.ring.any() for layer in problem.choices.layers):
        return problem, solution
    chosen = list(zip(problem.graph.operators, problem.choices.layers, solution.choice, strict=True))
    graph = with_rings(problem.graph, {operator.name for operator, layer, c in chosen if layer.ring[c]})
    only = {}
    for operator, rows, (_, layer, c) in zip(graph.operators, problem.configurations, chosen, strict=True):
        by_batch = data_parallel(graph, operator, problem.num_devices)
        only[operator.name] = np.unique(np.array([rows[layer.rows[c]], by_batch], dtype=np.int32), axis=0)
    tables = choice_tables(
        graph,
        problem.num_devices,
        costs,
        ModeSpace(),
        known=KnownChoices(),
        only=only,
        micro_batches=problem.micro_batches,
    )
    settled = Problem.of(tables, problem.micro_batches)
    choice = []
    for v, (_, layer, c) in enumerate(chosen):
        own = settled.choice(v, tuple(problem.configurations[v][layer.rows[c]].tolist()))
        assert own is not None
        choice.append(own)
    return settled, replace(solution, choice=tuple(choice))


def given_solution(problem: Problem, choice: Sequence[int], *, lower_bound: float = 0.0, time_s: float) -> Solution:
    """Return a strategy that was not searched for; lower_bound: of all; time_s: what finding it took."""
    cost = step_cost(problem, choice)
    bound = min(lower_bound, cost)
    return Solution(
        cost=cost,
        lower_bound=bound,
        exact=isclose(cost, bound, rel_tol=PROOF),
        choice=tuple(choice),
        ordering=NOT_SEARCHED,
        largest_dependent_set=0,
        time_s=time_s,
        peak_memory_bytes=0,
    )


def data_parallel_cost(problem: Problem) -> float:
    """Return the total cost of data parallelism."""
    return step_cost(problem, data_parallel_choice(problem))


def _data_parallel_problem(problem: Problem, costs: CostModel) -> Problem:
    """Return the problem whose one strategy is data parallelism, which constraints need not allow."""
    graph, devices = problem.graph, problem.num_devices
    only = {op.name: np.array([data_parallel(graph, op, devices)], dtype=np.int32) for op in graph.operators}
    modes = choice_tables(
        graph, devices, costs, ModeSpace(), known=KnownChoices(), only=only, micro_batches=problem.micro_batches
    )
    return Problem.of(modes, problem.micro_batches)


def data_parallel_choice(problem: Problem) -> tuple[int, ...]:
    """Return data parallelism, by configuration index: each layer's batch split as far as it goes, nothing else."""
    choice = problem.strategy(data_parallel_splits(problem.graph, problem.num_devices))
    assert choice is not None, "data parallelism is among all configurations"
    return choice
