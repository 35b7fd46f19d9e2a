"""What layers cost of which nothing is known but the dims that pass through them: they may keep all others whole."""

from dataclasses import dataclass, replace

import numpy as np

from pase.analysis.explanation.padding import LEAST_GAIN
from pase.costs import Problem
from pase.graph import Operator, Role
from pase.planning.plan import Plan
from pase.planning.planner import problem_of
from pase.solver import solve
from pase.tables.cost_tables import CostTables, EdgeTable, FloatArray

OPAQUE = "opaque"
"""The kind of such a layer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """Layers that make a plan dearer because nothing more is known of them.

    layers: (layer, its function) of those whose dims cannot all be split. lower_bound: what the cheapest strategy would
    cost at least, in the unit of the plan, if each of them could be split into as many parts as there are devices in
    any way, and read and wrote its tensors as they lie.
    """

    layers: tuple[tuple[str, str], ...]
    lower_bound: float


def held_by_opaque_layers(plan: Plan, *, time_limit_s: float | None = None) -> Held | None:
    """Return the layers of which nothing is known, and what is cheaper without that; None where that is too little.

    Args:
        plan: of a graph; its cost is what counts.
        time_limit_s: for the second search.
    """
    graph = plan.graph
    held = [operator for operator in graph.operators if operator.kind == OPAQUE and _keeps_whole(operator)]
    if not held or plan.num_devices == 1:
        return None
    problem = problem_of(graph, plan.num_devices, plan.machine, plan.cost_model)
    tables = _freed(problem, frozenset(graph.index[operator.name] for operator in held))
    solution = solve(tables, time_limit_s=time_limit_s)
    bound = solution.cost if solution.exact else solution.lower_bound
    if bound >= (1 - LEAST_GAIN) * plan.total_cost:
        return None
    return Held(layers=tuple((op.name, op.attribute("function", "")) for op in held), lower_bound=bound)


def _keeps_whole(operator: Operator) -> bool:
    """Return whether a layer has a dim that it cannot split, or reads one whole."""
    is_held = any(operator.extents[dim] > 1 for dim in operator.unsplittable)
    reads = (zip(read.axes, read.shape, strict=True) for read in operator.reads if read.role is not Role.PARAMETER)
    return is_held or any(axis is None and extent > 1 for axes in reads for axis, extent in axes)


def _freed(problem: Problem, freed: frozenset[int]) -> CostTables:
    """Return the tables with one configuration of some layers: its share of their work, and no transfers."""
    tables, count = problem.tables, len(problem.tables.vertex_costs)
    shares: dict[int, FloatArray] = {}
    for v in sorted(freed):
        whole = problem.choice(v, (1,) * len(problem.graph.operators[v].dims))
        assert whole is not None, "a layer may always be left whole"
        shares[v] = tables.layer_costs(v)[[whole]] / problem.num_devices
    number = {v: count + i for i, v in enumerate(shares)}
    edge_tables, edge_table = list(tables.edge_tables), list(tables.edge_table)
    for i, (u, v) in enumerate(tables.edges):
        if u in freed or v in freed:
            sizes = (1 if end in freed else tables.domain_sizes[end] for end in (u, v))
            rows, cols = (np.zeros(size, dtype=np.int32) for size in sizes)
            edge_table[i] = len(edge_tables)
            edge_tables.append(EdgeTable(row_class=rows, col_class=cols, values=np.zeros((1, 1))))
    return replace(
        tables,
        vertex_costs=(*tables.vertex_costs, *shares.values()),
        vertex_table=tuple(number.get(v, table) for v, table in enumerate(tables.vertex_table)),
        edge_tables=tuple(edge_tables),
        edge_table=tuple(edge_table),
    )
