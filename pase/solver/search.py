"""The search: bound and prune until the remaining problem can be eliminated exactly; branch where it cannot.

A small problem is eliminated as it is. Otherwise passes of the bound (`bounds`) alternate with decoding strategies
from it; configurations that cannot be part of a cheapest strategy disappear, vertices with one left are decided, and
what remains is eliminated exactly. Where the elimination would not fit the memory, or would take longer than
branching can hope to, the problem is reduced further (`reductions`) and then split (`branching`).
"""

import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from heapq import heapify, heappop, heappush
from itertools import count

import numpy as np

from pase.errors import SolverError
from pase.solver.elimination import (
    Ordered,
    eliminate_exactly,
    eliminate_tree,
    optimal_strategy,
    plan_elimination,
)
from pase.solver.ordering import (
    AUTO,
    NOT_WORTH_WEIGHING,
    OrderingReport,
    choose_ordering,
    dependent_sets,
    ordering_named,
    report_ordering,
)
from pase.solver.pairwise import PairwiseModel
from pase.solver.reductions import contract, decode, drop_dominated, merge_alike, sweep, tighten_bounds
from pase.solver.solution import (
    RELATIVE_TOLERANCE,
    Outcome,
    OutOfTimeError,
    Progress,
    SearchBudget,
    Solution,
    Statistics,
)
from pase.tables.cost_tables import CostTables, IndexArray, verify_tables

DIRECT_OPERATIONS = NOT_WORTH_WEIGHING
"""A problem whose elimination evaluates at most this many combinations is not worth bounding first."""
QUICK_OPERATIONS = 500_000_000
"""An elimination of about a second; larger ones are preceded by the slower reductions."""
MAX_OPERATIONS = 20_000_000_000
"""An elimination of more combinations than this (tens of seconds) is left to branching."""
CONTRACTIONS = 8
"""Number of steps in which the limit on the operations of one elimination rises."""
PASSES = 8
"""A problem of repeated parts is reduced before it is bounded if that evaluates at most as many cells as this many
passes."""


def solve(
    tables: CostTables,
    *,
    ordering: str = AUTO,
    solver_memory_bytes: int | None = None,
    time_limit_s: float | None = None,
    max_work: float = np.inf,
    known: Iterable[Sequence[int]] = (),
    on_progress: Progress | None = None,
) -> Solution:
    """Return a cheapest strategy with its proof, or the best found, a lower bound and their gap.

    The same input gives the same strategy for any number of threads. Ties go to the lowest configuration index:
    vertices are decided in the reverse of the elimination order, and of configurations that a reduction finds equally
    good the first stays.

    Args:
        tables: The cost tables.
        ordering: A name of `pase.solver.ordering.ORDERINGS`, or "auto" for the one predicted to be cheapest.
        solver_memory_bytes: Limit on the memory of the solver's own tables; default: half of the machine's memory.
        time_limit_s: Wall-clock time after which the best strategy so far is returned; Ctrl-C has the same effect.
        max_work: Table cells that may be evaluated, after which the best strategy so far is returned. Unlike a time
            limit it gives the same result on any machine.
        known: Strategies, each a configuration index for each vertex; the answer is never worse than the best of them.
        on_progress: Called now and then with the current activity and the fraction of it that is complete.

    Raises:
        TablesError: The tables are malformed.
        SolverError: The limits or the ordering are invalid, or no strategy has a finite cost.
    """
    started_s = time.perf_counter()
    limit_bytes = default_solver_memory_bytes() if solver_memory_bytes is None else solver_memory_bytes
    check_limits(limit_bytes, time_limit_s)
    if ordering != AUTO:
        ordering_named(ordering)
    verify_tables(tables)
    budget = SearchBudget(
        started_s=started_s,
        deadline_s=None if time_limit_s is None else started_s + time_limit_s,
        solver_memory_bytes=limit_bytes,
        on_progress=on_progress,
        max_work=max_work,
    )
    # The predicted work of eliminating everything decides the approach. With "auto", the orderings are compared again
    # for the vertices that remain to be eliminated, once these are known.
    report = report_ordering("generate_seq" if ordering == AUTO else ordering, tables.neighbours, tables.domain_sizes)
    if ordering == AUTO and not _is_direct(report):
        # It takes microseconds a vertex to find, where reducing and bounding a problem takes ten times as much.
        lightest = report_ordering("min_weight", tables.neighbours, tables.domain_sizes)
        report = lightest if _is_direct(lightest) else report
    outcome = Outcome(tables=tables, ordering=report.name)
    for strategy in known:
        tables.evaluate(strategy)  # it may be none
        outcome.offer(dict(enumerate(strategy)))
    try:
        _search(tables, report, ordering, budget, outcome)
    except (OutOfTimeError, KeyboardInterrupt):
        if not budget.sweeps:  # nothing was decoded or bounded yet
            outcome.raise_bound(sum(float(tables.layer_costs(v).min()) for v in range(tables.num_vertices)))
            outcome.offer(decode(PairwiseModel.of_tables(tables), forward=True)[1])
    if outcome.ordering != report.name:
        report = report_ordering(outcome.ordering, tables.neighbours, tables.domain_sizes)
    return _solution(tables, report, budget, outcome)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WarmStart:
    """Messages of a search that later searches start from: same tables, fewer configurations at some vertices.

    Messages that bound all strategies also bound a subset of them, so they remain valid.

    Attributes:
        model: All configurations, with messages that prove about as high a bound as they can.
        forward: Direction of the last pass.
        report: Report of the ordering named in solutions.
    """

    model: PairwiseModel
    forward: bool
    report: OrderingReport

    @property
    def bound(self) -> float:
        """Lower bound on every strategy's cost that the messages prove."""
        assert self.model.least is not None
        return self.model.offset + sum(self.model.least.values())


WARM_SWEEPS = 24
"""Maximum number of passes that prepare a warm start."""
PROVEN = 1e-12
"""A strategy counts as cheapest if the bound is within this share of its cost: the rounding error of sums of costs."""


def warm_start(tables: CostTables, solution: Solution, start: WarmStart | None = None) -> WarmStart | None:
    """Return a warm start for restricted searches; None if costs are too far apart or not additive.

    Passes continue until the bound reaches the solution's cost, or hardly rises.

    Args:
        tables: The cost tables.
        solution: A solution for them.
        start: An earlier warm start for them, which is improved.
    """
    if tables.hiding is not None or cost_ceiling(tables, solution.cost) < np.inf:
        return None
    if start is None:
        model, forward, gap = PairwiseModel.of_tables(tables), False, np.inf
        report = report_ordering(solution.ordering, tables.neighbours, tables.domain_sizes)
    else:
        model, forward, gap, report = start.model, start.forward, solution.cost - start.bound, start.report
    for _ in range(WARM_SWEEPS // 2):
        if gap <= PROVEN * solution.cost:
            break
        sweep(model, np.inf, not forward, lambda _: None)
        before, gap = gap, solution.cost - sweep(model, np.inf, forward, lambda _: None)
        if gap >= 0.9 * before:
            break
    return WarmStart(model=model, forward=forward, report=report)


def warm_start_from(start: WarmStart, tables: CostTables, known: Sequence[int]) -> WarmStart | None:
    """Return a warm start for tables with other costs but the same graph; None where costs are too far apart.

    Each table's messages are scaled by the ratio of its costs. The result is valid for any guess: a pass recomputes the
    message to the other end of an edge from the one that it finds.

    Args:
        start: Warm start for the old tables.
        tables: The new tables.
        known: A strategy.

    Raises:
        TablesError: The tables are malformed.
    """
    verify_tables(tables)
    if cost_ceiling(tables, tables.evaluate(known)) < np.inf:
        return None
    model, grown = PairwiseModel.of_tables(tables), dict[tuple[int, int], float]()
    for edge, before in zip(model.edges(), start.model.edges(), strict=True):
        if edge.values.shape != before.values.shape:
            continue  # the layout classes differ: start with zero messages
        key = id(edge.values), id(before.values)
        if key not in grown:
            total = float(before.values.sum())
            grown[key] = float(edge.values.sum()) / total if total else 0.0
        factor = np.array(grown[key])
        edge.messages = [message * factor for message in before.messages]
    model.least = dict.fromkeys(model.live, 0.0)
    forward = not start.forward
    sweep(model, np.inf, forward, lambda _: None)
    return WarmStart(model=model, forward=forward, report=start.report)


def solve_again(
    tables: CostTables,
    start: WarmStart,
    kept: Mapping[int, IndexArray],
    near: Sequence[int],
    *,
    solver_memory_bytes: int | None = None,
    time_limit_s: float | None = None,
) -> Solution:
    """Return a cheapest strategy in which some vertices are restricted to given configurations, with its proof.

    Ties may go to another strategy than with `solve`. Other arguments and errors are as for `solve`.

    Args:
        tables: The cost tables.
        start: Warm start for them.
        kept: Allowed configurations of restricted vertices, ascending.
        near: A strategy to start from, which need not satisfy the restriction.

    Returns:
        The solution, numbered as in the tables.
    """
    started_s = time.perf_counter()
    limit_bytes = default_solver_memory_bytes() if solver_memory_bytes is None else solver_memory_bytes
    check_limits(limit_bytes, time_limit_s)
    budget = SearchBudget(
        started_s=started_s,
        deadline_s=None if time_limit_s is None else started_s + time_limit_s,
        solver_memory_bytes=limit_bytes,
        on_progress=None,
    )
    outcome = Outcome(tables=tables, ordering=start.report.name)
    outcome.offer(dict(enumerate(nearest(tables, near, kept))))
    bound = start.bound
    if not kept and not _is_proven(outcome, bound):
        outcome.offer(decode(start.model, not start.forward)[1])
    if _is_proven(outcome, bound):
        return _solution(tables, start.report, budget, outcome)
    model = start.model.copy()
    model.least = dict(start.model.least or {})
    for v, rows in kept.items():
        if len(rows) < tables.domain_sizes[v]:
            keep = np.zeros(tables.domain_sizes[v], dtype=bool)
            keep[rows] = True
            model.restrict(v, keep)
            model.least[v] = float(model.reparametrised(v).min())
    try:
        for forward in (not start.forward, start.forward):
            bound = sweep(model, outcome.limit, forward, budget.check)
            budget.sweeps += 1
            if _is_proven(outcome, bound):
                break
            model.fix_singles()
            outcome.raise_bound(bound)
            outcome.offer(model.complete(decode(model, not forward)[1]))
        else:
            _narrow(model, partial(_ordered, AUTO, outcome), budget, outcome)
    except (OutOfTimeError, KeyboardInterrupt):
        pass
    return _solution(tables, start.report, budget, outcome)


def _is_proven(outcome: Outcome, bound: float) -> bool:
    """Return whether the best strategy's cost equals the bound; if so, record the proof."""
    is_proven = bound >= outcome.cost * (1 - PROVEN)
    if is_proven:
        outcome.prove()
    return is_proven


def nearest(tables: CostTables, near: Sequence[int], kept: Mapping[int, IndexArray]) -> list[int]:
    """Return a good strategy that satisfies a restriction, close to a given strategy.

    The vertices are improved one after the other, given the choices of all others. Arguments are as for `solve_again`.
    """
    choice = list(near)
    waiting = dict.fromkeys(v for v, rows in kept.items() if choice[v] not in rows)
    for v in waiting:
        choice[v] = int(kept[v][tables.costs_beside(v, choice)[kept[v]].argmin()])
    waiting = dict.fromkeys(w for v in waiting for w in (v, *sorted(tables.neighbours[v])))
    for _ in range(DESCENT_STEPS * len(waiting)):
        if not waiting:
            break
        v = next(iter(waiting))
        del waiting[v]
        costs = tables.costs_beside(v, choice)
        best = int(costs.argmin()) if v not in kept else int(kept[v][costs[kept[v]].argmin()])
        if costs[best] < costs[choice[v]]:
            choice[v] = best
            waiting |= dict.fromkeys(sorted(tables.neighbours[v]))
    return choice


DESCENT_STEPS = 20
"""Maximum improvement steps for each vertex that has to change, or is next to one."""


def check_limits(solver_memory_bytes: int | None, time_limit_s: float | None) -> None:
    """Raise SolverError for limits that make no sense."""
    if solver_memory_bytes is not None and solver_memory_bytes <= 0:
        raise SolverError(f"the memory limit is {solver_memory_bytes} bytes; give a positive number")
    if time_limit_s is not None and not time_limit_s > 0:
        raise SolverError(f"the time limit is {time_limit_s} s; give a positive number")


def default_solver_memory_bytes() -> int:
    """Return half of the machine's memory."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


def _search(tables: CostTables, report: OrderingReport, ordering: str, budget: SearchBudget, outcome: Outcome) -> None:
    ordered = partial(_ordered, ordering, outcome)
    if report.largest_dependent_set <= 1:
        best = eliminate_tree(PairwiseModel.of_tables(tables), report.order, budget.check)
        if best is not None:
            budget.operations += report.operations
            outcome.num_configurations_left, outcome.num_vertices_left = sum(tables.domain_sizes), tables.num_vertices
            outcome.settle(best[1])
            return
    if _is_direct(report):
        whole = PairwiseModel.of_tables(tables)
        if eliminate_exactly(whole, lambda _: report.order, DIRECT_OPERATIONS * 1000, budget, outcome):
            return
    model = PairwiseModel.of_tables(tables)
    outcome.offer(decode(model, forward=True)[1])
    ceiling = cost_ceiling(tables, outcome.cost)
    if ceiling < np.inf:
        model.lower_ceiling(ceiling)
    if _repeats_much(tables):
        with model.repeating():
            _reduce(model, budget)
    _narrow(model, ordered, budget, outcome, whole=tables)


def _is_direct(report: OrderingReport) -> bool:
    """Return whether to eliminate a problem in this sequence without bounding it first."""
    return report.largest_dependent_set <= 1 or report.operations <= DIRECT_OPERATIONS


def _narrow(
    model: PairwiseModel,
    ordered: Ordered,
    budget: SearchBudget,
    outcome: Outcome,
    *,
    whole: CostTables | None = None,
) -> None:
    """Bound and reduce a model until the rest can be eliminated; split it where that would take too long.

    whole: The tables of which the model is all; None where some vertices are restricted.
    """
    tighten_bounds(model, budget, outcome)
    if eliminate_exactly(model, ordered, QUICK_OPERATIONS, budget, outcome):
        return
    if whole is not None and _contract_whole(whole, model, ordered, budget, outcome):
        return
    while True:
        before = model.num_configurations(), len(model.live)
        _reduce(model, budget)
        tighten_bounds(model, budget, outcome)
        if eliminate_exactly(model, ordered, QUICK_OPERATIONS, budget, outcome):
            return
        if model.num_configurations() > 0.9 * before[0] and len(model.live) > 0.9 * before[1]:
            break
    if eliminate_exactly(model, ordered, MAX_OPERATIONS, budget, outcome):
        return
    branch(model, ordered, QUICK_OPERATIONS, budget, outcome)


def _contract_whole(
    tables: CostTables, narrowed: PairwiseModel, ordered: Ordered, budget: SearchBudget, outcome: Outcome
) -> bool:
    """Eliminate a problem of repeated parts, each of them once, if that is cheaper than eliminating the bounded model.

    Bounds hardly prune many equal parts, because each part has its share of the gap.

    Returns:
        Whether elimination was done.
    """
    whole = PairwiseModel.of_tables(tables)
    order = report_ordering("generate_seq", *whole.neighbours()).order
    plan = plan_elimination(whole.costs, whole.edges(), [whole.live[i] for i in order])
    held_bytes = whole.own_bytes() + plan.table_bytes
    if plan.operations > MAX_OPERATIONS or held_bytes > budget.solver_memory_bytes:
        return False
    left = plan_elimination(narrowed.costs, narrowed.edges(), ordered(narrowed))
    if plan.operations > left.operations:
        return False
    budget.holds(held_bytes)
    with whole.repeating():
        # Cheap eliminations go first, and make later ones cheaper.
        for limit in np.geomspace(QUICK_OPERATIONS // 10, MAX_OPERATIONS, CONTRACTIONS):
            budget.progress(f"eliminating {len(whole.live)} layers", 1 - len(whole.live) / tables.num_vertices)
            contract(whole, int(limit), budget.solver_memory_bytes - held_bytes, budget.check)
    return eliminate_exactly(whole, ordered, MAX_OPERATIONS, budget, outcome)


def _ordered(ordering: str, outcome: Outcome, model: PairwiseModel) -> list[int]:
    """Return the elimination order of the live vertices of a model, and record the ordering's name."""
    around, sizes = model.neighbours()
    chosen = choose_ordering(ordering, around, sizes)
    outcome.ordering = chosen.name
    return [model.live[i] for i in chosen.order]


def _repeats_much(tables: CostTables) -> bool:
    """Return whether comparing the layouts of all distinct vertices costs at most about one pass over all vertices."""
    kinds = {
        (t, *(tables.edge_table[e] for e in edges)): v
        for v, (t, edges) in enumerate(zip(tables.vertex_table, tables.incident, strict=True))
    }
    pairs = 0
    for v in kinds.values():
        for e in tables.incident[v]:
            rows, cols = tables.edge(e).values.shape
            pairs += rows * cols * (rows if tables.edges[e][0] == v else cols)
    cells = [table.values.size for table in tables.edge_tables]
    return pairs <= PASSES * sum(cells[t] for t in tables.edge_table)


def _reduce(model: PairwiseModel, budget: SearchBudget) -> None:
    """Apply the reductions that need no bound; repeated parts of the problem are reduced once."""
    merge_alike(model)
    drop_dominated(model, budget.check)
    contract(model, QUICK_OPERATIONS // 10, budget.solver_memory_bytes // 4, budget.check)


def cost_ceiling(tables: CostTables, known: float) -> float:
    """Return a cost to which every higher one can be lowered; +inf if none is needed.

    No cheapest strategy contains such a cost. Infinite costs cannot be moved between edges and vertices, and huge ones
    cost the others their precision. Costs are not negative, so any cost above that of a known strategy can be replaced
    by any other above it.

    Args:
        tables: The cost tables.
        known: Cost of a known strategy; +inf if none is known.
    """
    entries = [*tables.vertex_costs, *(t.values for t in tables.edge_tables)]
    largest = max(float(values.max()) for values in entries)
    least = [float(costs.min()) for costs in tables.vertex_costs]
    if np.isfinite(largest) and largest <= 1e3 * sum(least[t] for t in tables.vertex_table):
        return np.inf
    if np.isfinite(known):
        return 2 * known or 1.0
    dearest = max(float(values[np.isfinite(values)].max()) for values in entries)
    return 1 + 2 * (tables.num_vertices + len(tables.edges)) * dearest


def _solution(tables: CostTables, report: OrderingReport, budget: SearchBudget, outcome: Outcome) -> Solution:
    choice, cost = outcome.choice, outcome.cost
    if not np.isfinite(cost):
        raise SolverError(
            "every strategy has an infinite cost: the combinations that the tables forbid leave none; allow at least "
            "one configuration for each vertex together with its neighbours'"
            if outcome.exact
            else "no strategy of finite cost was found within the limits; give more time or memory, or forbid less"
        )
    return Solution(
        cost=cost,
        lower_bound=cost if outcome.exact else max(0.0, min(cost, outcome.lower_bound * (1 - RELATIVE_TOLERANCE))),
        exact=outcome.exact,
        choice=choice,
        ordering=report.name,
        largest_dependent_set=report.largest_dependent_set,
        time_s=time.perf_counter() - budget.started_s,
        peak_memory_bytes=budget.peak_bytes + tables.num_bytes,
        statistics=Statistics(
            num_configurations=sum(tables.domain_sizes),
            num_configurations_left=outcome.num_configurations_left,
            num_vertices_left=outcome.num_vertices_left,
            sweeps=budget.sweeps,
            operations=budget.operations,
            nodes=budget.nodes,
        ),
    )


SWEEPS_EACH = 12
MAX_OPEN = 2000
"""With more open parts than this, search depth-first (last split first), which bounds the memory."""


def branch(model: PairwiseModel, ordered: Ordered, max_operations: int, budget: SearchBudget, outcome: Outcome) -> None:
    """Search the whole model by branch and bound; the outcome is exact when this returns.

    Args:
        model: The model to split.
        ordered: Returns the elimination order of a model's live vertices.
        max_operations: A part whose elimination evaluates at most this many combinations is eliminated.
        budget: Limits of the search.
        outcome: Best strategy and bound so far; updated.
    """
    number = count()
    open_parts: list[tuple[float, int, PairwiseModel]] = [(outcome.lower_bound, next(number), model)]
    while open_parts:
        bound, _, part = _take(open_parts)
        if bound <= outcome.limit:
            for piece in _split(part, ordered(part)):
                budget.nodes += 1
                budget.check()
                piece_bound = max(bound, tighten_bounds(piece, budget, outcome, max_sweeps=SWEEPS_EACH, whole=False))
                if piece_bound > outcome.limit:
                    continue
                best = optimal_strategy(piece, ordered, max_operations, budget)
                if best is None:
                    heappush(open_parts, (piece_bound, next(number), piece))
                else:
                    outcome.offer(best[1])
        least = min((b for b, _, _ in open_parts), default=np.inf)
        outcome.raise_bound(least)
        budget.progress(f"branching: {len(open_parts)} parts open, gap {outcome.gap:.2%}", 1 - outcome.gap)
    outcome.prove()


def _take(open_parts: list[tuple[float, int, PairwiseModel]]) -> tuple[float, int, PairwiseModel]:
    if len(open_parts) <= MAX_OPEN:
        return heappop(open_parts)
    last = max(range(len(open_parts)), key=lambda i: open_parts[i][1])
    taken = open_parts.pop(last)
    heapify(open_parts)
    return taken


def _split(model: PairwiseModel, order: Sequence[int]) -> list[PairwiseModel]:
    """Split the configurations of the vertex that contributes most to the elimination's tables; return both models.

    The half with the smaller reparametrised costs comes first; ties go to the lowest index.
    """
    v = _heaviest(model, order)
    ranked = np.argsort(model.reparametrised(v), kind="stable")
    pieces = []
    for half in (ranked[: len(ranked) // 2], ranked[len(ranked) // 2 :]):
        piece = model.copy()
        keep = np.zeros(len(ranked), dtype=bool)
        keep[half] = True
        piece.restrict(v, keep)
        piece.fix_singles()
        pieces.append(piece)
    return pieces


def _heaviest(model: PairwiseModel, order: Sequence[int]) -> int:
    """Return the vertex with more than one configuration whose tables, in all steps, have the most combinations."""
    around, sizes = model.neighbours()
    position = {v: i for i, v in enumerate(model.live)}
    places = [position[v] for v in order]
    weight = np.zeros(len(sizes))
    for i, d in zip(places, dependent_sets(around, places), strict=True):
        scope = [i, *d]
        cells = float(np.prod([float(sizes[w]) for w in scope]))
        weight[scope] += cells
    weight[np.array(sizes) == 1] = -1
    return model.live[int(weight.argmax())]
