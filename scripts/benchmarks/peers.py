"""Other exact solvers on the same tables, each behind one signature: tables and a time limit in, an `Answer` out.

`time_s` runs from the problem in the solver's own memory to its answer; handing it over is not counted. Every
answer's cost is that of its strategy in our tables, not what the solver says.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from time import perf_counter, process_time
from typing import Any

import numpy as np

from pase.errors import SolverError
from pase.solver import Solution, solve
from pase.solver.ordering import breadth_first, generate_seq
from pase.tables.cost_tables import CostTables, EdgeTable
from scripts.benchmarks.recurrences import find_best_strategy, naive_recurrence

REPEAT_BELOW_S = 0.5
"""Our own solver is timed as the best of several runs below this: the peers' warm-up is not in their figures either."""


FORBIDDEN = 1e16
"""toulbar2's upper bound on costs, which represents an infinite one: in hundredths, it must fit a 64-bit integer."""

MAX_PAIRS = 1_500_000
"""Pairs of layouts that the linear models are built with at most: more fill the memory of a machine of 24 GB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """cost: of the strategy found, None for none; exact: whether the solver says that it is proven."""

    cost: float | None
    exact: bool
    time_s: float
    note: str = ""


def ours(tables: CostTables, limit_s: float) -> Answer:
    """PaSE's solver."""
    answer = _of(solve(tables, time_limit_s=limit_s))
    if answer.time_s < REPEAT_BELOW_S:
        answer = min((_of(solve(tables)) for _ in range(5)), key=lambda found: found.time_s)
    return answer


def recurrence_2(tables: CostTables, limit_s: float) -> Answer:
    """Recurrence (2) with breadth-first ordering."""
    return _recurrence(naive_recurrence, breadth_first, tables)


def figure_4(tables: CostTables, limit_s: float) -> Answer:
    """FindBestStrategy of Fig. 4 with GenerateSeq, as plain array operations."""
    return _recurrence(find_best_strategy, generate_seq, tables)


def toulbar2(tables: CostTables, limit_s: float) -> Answer:
    """toulbar2 with its default options, on costs in units of which the dearest strategy has 10^15 at most, to 1/100.

    It does not report whether a search ended by itself, and its dual bound is not updated by the proof: an answer that
    took less processor time than the limit is proven.
    """
    import pytoulbar2

    scale = FORBIDDEN / 10 / (_largest(tables) * (tables.num_vertices + len(tables.edges)))
    problem = pytoulbar2.CFN(FORBIDDEN, resolution=2)
    problem.Option.verbose = -1
    for v, size in enumerate(tables.domain_sizes):
        problem.AddVariable(f"v{v}", [f"c{k}" for k in range(size)])
        problem.AddFunction([v], list(np.minimum(tables.layer_costs(v) * scale, FORBIDDEN)))
    for e, (u, v) in enumerate(tables.edges):
        problem.AddFunction([u, v], list(np.minimum(tables.edge(e).dense().ravel() * scale, FORBIDDEN)))
    limit_s = max(1, int(limit_s))
    start_s, start_cpu_s = perf_counter(), process_time()
    found = problem.Solve(timeLimit=limit_s)
    time_s, cpu_s = perf_counter() - start_s, process_time() - start_cpu_s
    if found is None:
        return Answer(cost=None, exact=False, time_s=time_s)
    return Answer(cost=tables.evaluate(found[0]), exact=cpu_s < limit_s, time_s=time_s)


def cp_sat(tables: CostTables, limit_s: float) -> Answer:
    """OR-Tools CP-SAT on the local polytope; it takes integers alone: costs in steps of the largest one ÷ 2^40."""
    from ortools.sat.python import cp_model

    if num_pairs(tables) > MAX_PAIRS:
        return _too_large(tables)
    model = cp_model.CpModel()
    chosen = [[model.new_bool_var("") for _ in range(size)] for size in tables.domain_sizes]
    scale = (1 << 40) / _largest(tables)
    terms: list[Any] = []
    for v, row in enumerate(chosen):
        model.add_exactly_one(row)
        terms += _integer_terms(model, tables.layer_costs(v), row, scale)
    for e, (u, v) in enumerate(tables.edges):
        table = tables.edge(e)
        pairs = [[model.new_bool_var("") for _ in row] for row in table.values]
        for i, row in enumerate(pairs):
            model.add(sum(row) == sum(chosen[u][k] for k in np.flatnonzero(table.row_class == i)))
        for j in range(table.values.shape[1]):
            column = [row[j] for row in pairs]
            model.add(sum(column) == sum(chosen[v][k] for k in np.flatnonzero(table.col_class == j)))
        terms += _integer_terms(model, table.values, chain.from_iterable(pairs), scale)
    model.minimize(sum(terms))
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = limit_s
    solver.parameters.num_workers = 2
    start_s = perf_counter()
    status = solver.solve(model)
    time_s = perf_counter() - start_s
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return Answer(cost=None, exact=False, time_s=time_s)
    choice = [next(k for k, x in enumerate(row) if solver.value(x)) for row in chosen]
    return Answer(cost=tables.evaluate(choice), exact=status == cp_model.OPTIMAL, time_s=time_s)


def _integer_terms(model: Any, costs: np.ndarray, variables: Iterable[Any], scale: float) -> list[Any]:
    """Return the terms of some costs, and forbid what has an infinite one."""
    terms = []
    for cost, x in zip(costs.ravel().tolist(), variables, strict=True):
        if cost == np.inf:
            model.add(x == 0)
        elif cost:
            terms.append(round(cost * scale) * x)
    return terms


def highs(tables: CostTables, limit_s: float) -> Answer:
    """HiGHS on the local polytope: binary choices, continuous pairs of layouts."""
    import highspy

    if num_pairs(tables) > MAX_PAIRS:
        return _too_large(tables)
    solver = highspy.Highs()
    solver.setOptionValue("output_flag", False)
    solver.setOptionValue("time_limit", float(limit_s))
    solver.setOptionValue("mip_rel_gap", 0.0)
    # HiGHS wants costs near 1.
    scale = 1.0 / _largest(tables)
    first = np.concatenate([[0], np.cumsum(tables.domain_sizes)])
    costs = [np.concatenate([tables.layer_costs(v) for v in range(tables.num_vertices)]) * scale]
    rows: list[tuple[np.ndarray, np.ndarray, float]] = [
        (np.arange(a, b), np.ones(b - a), 1.0) for a, b in pairwise(first)
    ]
    num_columns = int(first[-1])
    for e, (u, v) in enumerate(tables.edges):
        table = tables.edge(e)
        rows += _pair_rows(table, num_columns, first[u], first[v])
        costs.append(table.values.ravel() * scale)
        num_columns += table.values.size
    cost = np.concatenate(costs)
    is_allowed = np.isfinite(cost)
    cost = np.where(is_allowed, cost, 0.0)
    solver.addVars(num_columns, np.zeros(num_columns), is_allowed.astype(float))
    solver.changeColsCost(num_columns, np.arange(num_columns, dtype=np.int32), cost)
    integers = np.arange(first[-1], dtype=np.int32)
    solver.changeColsIntegrality(len(integers), integers, np.full(len(integers), highspy.HighsVarType.kInteger))
    starts = np.concatenate([[0], np.cumsum([len(columns) for columns, _, _ in rows])])[:-1].astype(np.int32)
    right = np.array([value for _, _, value in rows])
    columns = np.concatenate([columns for columns, _, _ in rows]).astype(np.int32)
    values = np.concatenate([values for _, values, _ in rows])
    solver.addRows(len(rows), right, right, len(columns), starts, columns, values)
    start_s = perf_counter()
    solver.run()
    time_s = perf_counter() - start_s
    solution = np.array(solver.getSolution().col_value)
    if len(solution) < first[-1] or not solver.getSolution().value_valid:
        return Answer(cost=None, exact=False, time_s=time_s)
    choice = [int(np.argmax(solution[a:b])) for a, b in pairwise(first)]
    exact = solver.getModelStatus() == highspy.HighsModelStatus.kOptimal
    return Answer(cost=tables.evaluate(choice), exact=exact, time_s=time_s)


def cbc(tables: CostTables, limit_s: float) -> Answer:
    """CBC on the local polytope, by PuLP, which hands problem and answer over in files: the time includes both."""
    import pulp
    from cbcbox import cbc_bin_path

    if num_pairs(tables) > MAX_PAIRS:
        return _too_large(tables)
    # CBC, too, wants costs near 1.
    scale = 1.0 / _largest(tables)
    problem = pulp.LpProblem("strategy", pulp.LpMinimize)
    terms: list[tuple[Any, float]] = []

    def variables(name: str, costs: np.ndarray, category: str) -> list[Any]:
        """Return a variable for each cost; an infinite one forbids it."""
        found = []
        for number, cost in enumerate(costs.tolist()):
            highest = 1 if np.isfinite(cost) else 0
            found.append(problem.add_variable(f"{name}_{number}", 0, highest, category))
            if highest and cost:
                terms.append((found[-1], cost * scale))
        return found

    chosen = [variables(f"v{v}", tables.layer_costs(v), pulp.LpInteger) for v in range(tables.num_vertices)]
    ones = [[(x, 1) for x in row] for row in chosen]
    equal = [(row, 1) for row in ones]
    for e, (u, v) in enumerate(tables.edges):
        table = tables.edge(e)
        pairs = np.array(variables(f"e{e}", table.values.ravel(), pulp.LpContinuous), dtype=object)
        pairs = pairs.reshape(table.values.shape)
        for rows, classes, end in ((pairs, table.row_class, u), (pairs.T, table.col_class, v)):
            for number, row in enumerate(rows):
                own = [(chosen[end][k], -1) for k in np.flatnonzero(classes == number)]
                equal.append(([(x, 1) for x in row] + own, 0))
    problem.setObjective(pulp.LpAffineExpression(terms))
    for row, right in equal:
        problem.addConstraint(pulp.LpConstraint(pulp.LpAffineExpression(row), sense=pulp.LpConstraintEQ, rhs=right))
    start_s = perf_counter()
    problem.solve(pulp.COIN_CMD(path=cbc_bin_path(), msg=False, timeLimit=limit_s, gapRel=0.0))
    time_s = perf_counter() - start_s
    if problem.sol_status not in (pulp.LpSolutionOptimal, pulp.LpSolutionIntegerFeasible):
        return Answer(cost=None, exact=False, time_s=time_s)
    choice = [int(np.argmax([x.varValue or 0.0 for x in row])) for row in chosen]
    return Answer(cost=tables.evaluate(choice), exact=problem.sol_status == pulp.LpSolutionOptimal, time_s=time_s)


PEERS: dict[str, Callable[[CostTables, float], Answer]] = {
    "ours": ours,
    "recurrence (2), breadth-first": recurrence_2,
    "Fig. 4, GenerateSeq": figure_4,
    "toulbar2": toulbar2,
    "CP-SAT": cp_sat,
    "HiGHS": highs,
    "CBC": cbc,
}


def num_pairs(tables: CostTables) -> int:
    """Return how many pairs of layouts all edges have, the variables of a linear model beside the choices."""
    return sum(tables.edge(e).values.size for e in range(len(tables.edges)))


def _largest(tables: CostTables) -> float:
    """Return the largest finite cost, 1 where all are 0."""
    values = (*tables.vertex_costs, *(table.values for table in tables.edge_tables))
    return max(float(costs[np.isfinite(costs)].max()) for costs in values) or 1.0


def _too_large(tables: CostTables) -> Answer:
    return Answer(
        cost=None, exact=False, time_s=0.0, note=f"not tried: {num_pairs(tables) / 1e6:.1f} million variables"
    )


def _of(solution: Solution) -> Answer:
    return Answer(cost=solution.cost, exact=solution.exact, time_s=solution.time_s)


def _recurrence(
    recurrence: Callable[..., Solution],
    ordering: Callable[[Sequence[frozenset[int]], Sequence[int]], tuple[int, ...]],
    tables: CostTables,
) -> Answer:
    start_s = perf_counter()
    try:
        return _of(recurrence(tables, ordering(tables.neighbours, tables.domain_sizes)))
    except SolverError:
        return Answer(cost=None, exact=False, time_s=perf_counter() - start_s, note="needs more than 4 GiB")


def _pair_rows(
    table: EdgeTable, first_pair: int, first_u: int, first_v: int
) -> list[tuple[np.ndarray, np.ndarray, float]]:
    """Return the rows Σ_j pair[i, j] = Σ of u's choices of layout i, and the same for columns."""
    num_rows, num_cols = table.values.shape
    numbers = np.arange(first_pair, first_pair + table.values.size).reshape(num_rows, num_cols)
    rows = []
    for pairs, classes, first in (
        *((numbers[i], np.flatnonzero(table.row_class == i), first_u) for i in range(num_rows)),
        *((numbers[:, j], np.flatnonzero(table.col_class == j), first_v) for j in range(num_cols)),
    ):
        columns = np.concatenate([pairs, classes + first])
        rows.append((columns, np.concatenate([np.ones(len(pairs)), -np.ones(len(classes))]), 0.0))
    return rows
