"""Each reduction keeps the optimum: what is left is solved by looking at every strategy of it."""

from dataclasses import replace
from itertools import pairwise, product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pase.solver import reductions, solve
from pase.solver.elimination import eliminate_exactly, eliminate_tree, plan_elimination, run_plan
from pase.solver.pairwise import ClassAlgebra, PairwiseModel, Partition
from pase.solver.reductions import contract, decode, drop_dominated, merge_alike, sweep
from pase.solver.search import branch
from pase.solver.solution import Outcome, SearchBudget
from pase.tables.cost_tables import CostTables, EdgeTable
from scripts.benchmarks.recurrences import find_best_strategy
from tests.solver.problems import (
    brute_force,
    complete,
    frustrated,
    random_tables,
    repeated_blocks,
    small_problems,
    tables_of,
    total_cost,
    tree,
)

finite_problems = small_problems(finite=True, max_vertices=5)


def no_check(_: int) -> None:
    """Nothing limits these tests."""


def model_of(tables: CostTables) -> PairwiseModel:
    return PairwiseModel.of_tables(tables)


def cost_of(model: PairwiseModel, choice: dict[int, int]) -> float:
    """Return what a model says that one of its strategies (live configuration numbers) costs."""
    total = model.offset + sum(float(model.costs[v][c]) for v, c in choice.items())
    for edge in model.edges():
        a, b = edge.ends
        total += float(edge.values[edge.of[0][choice[a]], edge.of[1][choice[b]]])
    return total


def cheapest_left(tables: CostTables, model: PairwiseModel) -> float:
    """Return the least cost in a reduced model, after checking that it is the tables' cost of the whole strategy."""
    least, best = np.inf, {}
    for numbers in product(*(range(len(model.costs[v])) for v in model.live)):
        choice = dict(zip(model.live, numbers, strict=True))
        if cost_of(model, choice) < least:
            least, best = cost_of(model, choice), choice
    whole = model.complete(best)
    strategy = [whole[v] for v in range(tables.num_vertices)]
    assert total_cost(tables, strategy) == pytest.approx(least, rel=1e-9, abs=1e-9)
    return least


@given(small_problems(max_vertices=5))
def test_merging_keeps_the_optimum_and_leaves_no_two_alike(tables):
    model = model_of(tables)
    before = model.num_configurations()
    dropped = merge_alike(model)
    assert model.num_configurations() == before - dropped
    least = brute_force(tables)
    if np.isfinite(least):
        assert cheapest_left(tables, model) == pytest.approx(least, rel=1e-9, abs=1e-9)
    for v in model.live:
        seen = {tuple(int(edge.of[s][c]) for edge, s in model.incident[v]) for c in range(len(model.costs[v]))}
        assert len(seen) == len(model.costs[v])


@given(finite_problems)
def test_dropping_dominated_configurations_keeps_the_optimum(tables):
    model = model_of(tables)
    before = model.num_configurations()
    dropped = drop_dominated(model, no_check)
    assert model.num_configurations() == before - dropped
    assert cheapest_left(tables, model) == pytest.approx(brute_force(tables), rel=1e-9, abs=1e-9)
    assert drop_dominated(model, no_check) == 0  # a fixed point


def test_dominance_drops_what_is_worse_whatever_the_neighbour_does_and_nothing_else():
    def left(costs: list[float]) -> list[int]:
        transfers = np.array([[0.0, 4.0], [3.0, 0.0], [1.0, 1.0]])
        model = model_of(tables_of([np.array(costs), np.zeros(2)], [(0, 1)], [transfers]))
        # Only v is looked at: w keeps both configurations as long as v keeps some that disagree about them.
        drop_dominated(model, no_check)
        return list(model.origin[0])

    # Changing 1 to 0 raises the transfer by 4 at worst, 0 to 1 by 3.
    assert left([0.0, 3.5, 9.0]) == [0, 1]
    assert left([0.0, 4.0, 9.0]) == [0]  # a tie: the lower index stays
    assert left([2.5, 0.0, 9.0]) == [0, 1]
    assert left([3.5, 0.0, 9.0]) == [1]
    assert left([3.0, 0.0, 9.0]) == [0, 1]  # a tie, but the higher index is not kept for it


def test_equal_configurations_leave_the_lowest_index():
    tables = random_tables(np.random.default_rng(0), 3, [(0, 1), (1, 2), (0, 2)], smallest_domain=4, unary=0.0)
    model = model_of(tables_of(tables.vertex_costs, tables.edges, [np.ones(t.shape) for t in tables.edge_tables]))
    drop_dominated(model, no_check)
    assert [list(model.origin[v]) for v in range(3)] == [[0], [0], [0]]


@given(small_problems(max_vertices=5))
def test_contraction_keeps_the_optimum(tables):
    model = model_of(tables)
    before = len(model.live)
    count = contract(model, 10**9, 10**9, no_check)
    assert len(model.live) == before - count
    for v in model.live:
        assert len({edge.ends[1 - side] for edge, side in model.incident[v]}) > 2
    least = brute_force(tables)
    if np.isfinite(least):
        assert cheapest_left(tables, model) == pytest.approx(least, rel=1e-9, abs=1e-9)


def test_contraction_leaves_what_is_beyond_its_limits():
    tables = random_tables(np.random.default_rng(1), 6, [(v, (v + 1) % 6) for v in range(6)], smallest_domain=4)
    assert contract(model_of(tables), 0, 10**9, no_check) == 0
    assert contract(model_of(tables), 10**9, 0, no_check) == 0
    assert contract(model_of(tables), 10**9, 10**9, no_check) == 6


@given(finite_problems, st.integers(1, 6), st.booleans())
def test_passes_keep_the_optimum_and_bound_it(tables, num_passes, prune):
    model = model_of(tables)
    optimum = brute_force(tables)
    limit = optimum * (1 + 1e-9) + 1e-12 if prune else np.inf
    bounds = [sweep(model, limit, number % 2 == 0, no_check) for number in range(num_passes)]
    assert all(b <= optimum + 1e-9 for b in bounds)
    assert all(b >= a - 1e-9 for a, b in pairwise(bounds))  # a pass never lowers the bound
    assert cheapest_left(tables, model) == pytest.approx(optimum, rel=1e-9, abs=1e-9)
    for edge in model.edges():  # the invariant behind the bound
        residual = edge.values - edge.messages[0][:, None] - edge.messages[1]
        assert residual.min() > -1e-9


@given(finite_problems, st.integers(0, 3), st.booleans())
def test_decoded_strategies_cost_what_is_said(tables, num_passes, forward):
    model = model_of(tables)
    for number in range(num_passes):
        sweep(model, np.inf, number % 2 == 0, no_check)
    cost, choice = decode(model, forward)
    choice = model.complete(choice)
    assert total_cost(tables, [choice[v] for v in range(tables.num_vertices)]) == pytest.approx(cost, rel=1e-12)


@given(st.integers(0, 2**16))
def test_on_a_tree_one_pass_is_the_optimum_and_decodes_it(seed):
    rng = np.random.default_rng(seed)
    # Numbered so that every vertex but the last has one neighbour with a higher number.
    tables = random_tables(rng, 6, [(5 - v, 5 - u) for u, v in tree(rng, 6)])
    model = model_of(tables)
    assert sweep(model, np.inf, True, no_check) == pytest.approx(brute_force(tables), rel=1e-12)
    assert decode(model, False)[0] == pytest.approx(brute_force(tables), rel=1e-12)


@given(finite_problems, st.data())
def test_the_reductions_together_keep_the_optimum(tables, data):
    model = model_of(tables)
    optimum = brute_force(tables)
    moves = {
        "merge": lambda: merge_alike(model),
        "dominate": lambda: drop_dominated(model, no_check),
        "contract": lambda: contract(model, data.draw(st.sampled_from([20, 10**9])), 10**9, no_check),
        "pass": lambda: sweep(model, optimum * (1 + 1e-9) + 1e-12, data.draw(st.booleans()), no_check),
        "fix": model.fix_singles,
    }
    for name in data.draw(st.lists(st.sampled_from(sorted(moves)), max_size=8)):
        moves[name]()
        assert cheapest_left(tables, model) == pytest.approx(optimum, rel=1e-9, abs=1e-9)
        assert sweep(model.copy(), np.inf, True, no_check) <= optimum + 1e-9


def test_shared_work_gives_what_separate_work_gives():
    # The same problem with shared arrays and with equal but distinct ones.
    shared = repeated_blocks(np.random.default_rng(5), 6, 5)
    separate = tables_of(
        [shared.layer_costs(v).copy() for v in range(shared.num_vertices)],
        shared.edges,
        [shared.edge(e).dense() for e in range(len(shared.edges))],
    )
    reductions = merge_alike, lambda n: drop_dominated(n, no_check), lambda n: contract(n, 10**9, 10**9, no_check)
    for reduction in reductions:
        one, other = model_of(shared), model_of(separate)
        assert reduction(one) == reduction(other)
        assert one.live == other.live
        assert one.offset == pytest.approx(other.offset)
        for v in range(shared.num_vertices):
            np.testing.assert_array_equal(one.origin[v], other.origin[v])


def test_a_table_larger_than_a_block_is_filled_block_by_block(monkeypatch):
    for seed in range(10):
        tables = random_tables(np.random.default_rng(seed), 6, complete(6), smallest_domain=2)
        calls = []
        model = model_of(tables)
        monkeypatch.setattr("pase.solver.elimination.BLOCK_CELLS", 5)
        monkeypatch.setattr("pase.solver.elimination.RESULT_CELLS", 3)
        plan = plan_elimination(model.costs, model.edges(), model.live)
        optimum, choice = run_plan(plan, calls.append)
        assert len(calls) > 6  # more than one block for a step
        assert optimum == pytest.approx(brute_force(tables), rel=1e-12)
        assert total_cost(tables, [choice[v] for v in range(6)]) == pytest.approx(optimum, rel=1e-12)


def test_a_step_first_takes_the_cheapest_of_each_class_of_a_table_that_tells_few_apart(monkeypatch):
    monkeypatch.setattr("pase.solver.pairwise.FEW_CONFIGURATIONS", 1)
    monkeypatch.setattr("pase.solver.elimination.BLOCK_CELLS", 5)
    by_class = saved = 0
    for seed in range(30):
        rng = np.random.default_rng(seed)
        tables = random_tables(rng, 4, complete(4), smallest_domain=4, largest_domain=7, whole=seed % 2 == 0)
        model = model_of(tables)
        plan = plan_elimination(model.costs, model.edges(), model.live)
        optimum, choice = run_plan(plan, no_check)
        assert optimum == pytest.approx(brute_force(tables), rel=1e-12)
        assert total_cost(tables, [choice[v] for v in range(4)]) == pytest.approx(optimum, rel=1e-12)
        for kernel in plan.kernels:
            by_class += kernel.coarse is not None
            saved += kernel._replace(coarse=None).operations - kernel.operations
    assert by_class > 0
    assert saved > 0


@given(st.integers(0, 2**16), st.integers(1, 300))
def test_a_product_of_partitions_tells_apart_what_either_does(seed, num_classes):
    rng = np.random.default_rng(seed)
    parts = []
    for _ in range(3):
        numbers, of = np.unique(rng.integers(0, num_classes, 20), return_inverse=True)
        parts.append(Partition(of, len(numbers)))
    joint, maps = ClassAlgebra().join(parts)
    assert joint.num_classes == len(set(zip(*(p.of.tolist() for p in parts), strict=True))) == len(set(joint.of))
    for part, classes in zip(parts, maps, strict=True):
        np.testing.assert_array_equal(part.of, joint.of if classes is None else classes[joint.of])


def test_equal_layouts_of_different_tables_are_one_array():
    rng = np.random.default_rng(0)
    layouts = np.array([2, 0, 2, 3], dtype=np.int32)  # no configuration has layout 1
    number = np.arange(3, dtype=np.int32)
    first = EdgeTable(row_class=number, col_class=layouts.copy(), values=rng.random((3, 4)))
    second = EdgeTable(row_class=layouts.copy(), col_class=number[::-1].copy(), values=rng.random((4, 3)))
    tables = tables_of([rng.random(k) for k in (3, 4, 3)], [(0, 1), (1, 2)], [first, second])
    edges = model_of(tables).edges()
    assert edges[0].of[1] is edges[1].of[0]
    assert edges[0].of[1].tolist() == [1, 0, 1, 2]
    assert edges[0].of[0] is edges[1].of[1]  # each configuration is a layout of its own, whatever its number
    np.testing.assert_array_equal(edges[0].values, first.values[:, [0, 2, 3]])
    np.testing.assert_array_equal(edges[1].values, second.values[[0, 2, 3]][:, ::-1])
    assert solve(tables).cost == pytest.approx(brute_force(tables), rel=1e-12)


@given(small_problems(finite=True, max_vertices=5), st.randoms(use_true_random=False))
def test_a_step_adds_its_tables_as_they_are(tables, random):
    model = model_of(tables)
    order = list(model.live)
    random.shuffle(order)
    plan = plan_elimination(model.costs, model.edges(), order)
    optimum, _ = run_plan(plan, no_check)
    assert optimum == pytest.approx(brute_force(tables), rel=1e-9, abs=1e-9)
    for step in plan.steps:
        assert [*step.scope] == sorted(step.scope, key=order.index)  # the sequence, in which no table is transposed
        for factor in step.factors:
            assert [*factor.scope] == [v for v in step.scope if v in factor.scope]


def budget_and_outcome(tables: CostTables) -> tuple[SearchBudget, Outcome]:
    budget = SearchBudget(started_s=0.0, deadline_s=None, solver_memory_bytes=1 << 30, on_progress=None)
    return budget, Outcome(tables=tables, ordering="given")


@pytest.mark.parametrize("seed", range(10))
def test_splitting_finds_the_optimum(seed):
    tables = frustrated(seed, 6, 3)
    budget, outcome = budget_and_outcome(tables)
    branch(model_of(tables), lambda model: model.live, 5, budget, outcome)
    assert outcome.exact
    assert budget.nodes > 0
    assert outcome.cost == pytest.approx(brute_force(tables), rel=1e-9, abs=1e-9)
    assert total_cost(tables, outcome.choice) == pytest.approx(outcome.cost, rel=1e-9, abs=1e-9)


def test_splitting_with_many_open_parts(monkeypatch):
    monkeypatch.setattr("pase.solver.search.MAX_OPEN", 1)
    tables = frustrated(3, 7, 4)
    budget, outcome = budget_and_outcome(tables)
    branch(model_of(tables), lambda model: model.live, 5, budget, outcome)
    assert outcome.cost == pytest.approx(brute_force(tables), rel=1e-9)


@given(small_problems())
def test_planned_elimination_says_what_it_takes(tables):
    budget, outcome = budget_and_outcome(tables)
    assert eliminate_exactly(model_of(tables), lambda model: model.live, 10**9, budget, outcome)
    assert outcome.cost == pytest.approx(brute_force(tables), rel=1e-9, abs=1e-9)
    refused, nothing = budget_and_outcome(tables)
    assert not eliminate_exactly(model_of(tables), lambda model: model.live, budget.operations - 1, refused, nothing)
    assert refused.operations == 0
    assert not nothing.exact


@given(st.integers(0, 2**16), st.booleans())
def test_trees_are_eliminated_leaves_first(seed, whole):
    rng = np.random.default_rng(seed)
    tables = random_tables(rng, 6, tree(rng, 6), whole=whole, forbidden=0.2)
    found = eliminate_tree(model_of(tables), range(5, -1, -1), no_check)
    assert found is not None
    cost, choice = found
    assert cost == pytest.approx(brute_force(tables), rel=1e-12)
    assert total_cost(tables, [choice[v] for v in range(6)]) == pytest.approx(cost, rel=1e-12)


def test_what_is_no_tree_is_not_eliminated_as_one():
    rng = np.random.default_rng(0)
    assert eliminate_tree(model_of(random_tables(rng, 3, complete(3))), range(3), no_check) is None
    assert eliminate_tree(model_of(random_tables(rng, 2, [(0, 1), (0, 1)])), range(2), no_check) is None


def test_layouts_that_no_configuration_has_are_ignored():
    table = EdgeTable(
        row_class=np.array([0, 2], np.int32), col_class=np.array([3, 3], np.int32), values=np.arange(16.0).reshape(4, 4)
    )
    tables = tables_of([np.zeros(2)] * 2, [(0, 1)] * 2, [table] * 2)
    model = model_of(tables)
    assert model.edges()[0].values.tolist() == [[3.0], [11.0]]
    assert cheapest_left(tables, model) == 6.0


def test_few_configurations_are_each_a_class_in_all_tables(monkeypatch):
    monkeypatch.setattr("pase.solver.pairwise.FEW_CONFIGURATIONS", 3)
    rng = np.random.default_rng(0)
    alike = np.array([0, 1, 0], dtype=np.int32)
    many = np.array([0, 1, 1, 0], dtype=np.int32)
    first = EdgeTable(row_class=alike, col_class=many, values=rng.random((2, 2)))
    second = EdgeTable(row_class=many, col_class=alike[::-1].copy(), values=rng.random((2, 2)))
    tables = tables_of([rng.random(k) for k in (3, 4, 3)], [(0, 1), (1, 2)], [first, second])
    edges = model_of(tables).edges()
    assert edges[0].of[0] is edges[1].of[1]
    assert (edges[0].values.shape, edges[1].values.shape) == ((3, 2), (2, 3))
    for edge, table in zip(edges, (first, second), strict=True):
        np.testing.assert_array_equal(edge.values[edge.of[0]][:, edge.of[1]], table.dense())


def test_what_repeats_is_reduced_once_and_stays_the_same_arrays():
    def reduced(num_blocks: int) -> tuple[CostTables, PairwiseModel]:
        tables = ladder(num_blocks)
        model = model_of(tables)
        with model.repeating():
            merge_alike(model)
            drop_dominated(model, no_check)
            contract(model, 10**6, 1 << 30, no_check)
        return tables, model

    (_, few), (tables, many) = reduced(20), reduced(40)
    assert len(many.live) >= 1.8 * len(few.live) > 20
    assert distinct(many) == distinct(few)
    assert solve(tables).cost == pytest.approx(find_best_strategy(tables, range(tables.num_vertices)).cost, rel=1e-12)
    _, choice = decode(many, True)
    strategy = many.complete(choice)
    assert sorted(strategy) == list(range(tables.num_vertices))
    assert tables.evaluate([strategy[v] for v in range(tables.num_vertices)]) < np.inf


def distinct(model: PairwiseModel) -> tuple[int, int]:
    """Return how many vectors of layer costs and tables of transfer costs there are, shared ones counted once."""
    return len({id(model.costs[v]) for v in model.live}), len({id(edge.values) for edge in model.edges()})


def test_passes_that_repeat_messages_keep_the_optimum_and_bound_it(monkeypatch):
    monkeypatch.setattr(reductions, "REPEATED_LOSS", 3.0)  # so that messages that differ by much are taken, too

    def check_least(_: int) -> None:
        for v, least in (model.least or {}).items():
            assert least <= model.reparametrised(v).min() + 1e-12

    num_repeated = 0
    for seed in range(266, 284):
        rng = np.random.default_rng(seed)
        tables = repeated_blocks(rng, 3, 3)
        if seed >= 272:  # equal tables between layers that differ
            costs = tuple(rng.random(3) * float(rng.choice([0.5, 2, 5])) for _ in range(tables.num_vertices))
            tables = replace(tables, vertex_costs=costs, vertex_table=tuple(range(tables.num_vertices)))
        model, optimum = model_of(tables), brute_force(tables)
        limit = optimum * (1.2 if seed >= 272 else 1 + 1e-9)
        for number in range(4):
            model.repeats = {}
            bound = sweep(model, limit, number % 2 == 0, check_least)
            check_least(0)
            assert bound == pytest.approx(model.offset + sum(model.least.values()), rel=1e-12)
            assert bound <= limit
            for edge in model.edges():
                assert (edge.values - edge.messages[0][:, None] - edge.messages[1]).min() > -1e-12
            num_repeated += len(model.edges()) - len({id(edge.messages[0]) for edge in model.edges()})
            assert cheapest_left(tables, model) == pytest.approx(optimum, rel=1e-9)
    assert num_repeated > 20


def test_a_layer_that_repeats_keeps_what_a_higher_limit_allows():
    costs, transfers = np.arange(10.0), np.ones((10, 2))
    tables = tables_of([costs, np.zeros(2)], [(0, 2), (1, 2)], [transfers], vertex_table=(0, 0, 1), edge_table=(0, 0))
    for limits, left in (((2.5, 6.5), [3, 7]), ((2.5, 2.5), [3, 3]), ((2.5, 2.0), [3, 3]), ((6.5, 2.5), [7, 3])):
        model = model_of(tables)
        model.repeats = {}
        repeated = reductions._Repeated(model, True, 0.0, no_check)
        for v, most in enumerate(limits):
            assert repeated.visit(v, most) == (0.0, [])
        assert [len(model.costs[v]) for v in (0, 1)] == left


def test_passes_over_more_repeated_blocks_take_no_more_work_and_leave_no_more_tables():
    def passed(num_blocks: int) -> tuple[PairwiseModel, int]:
        tables = repeated_blocks(np.random.default_rng(1), num_blocks, 30)
        tables = replace(tables, vertex_costs=tuple(3 * costs for costs in tables.vertex_costs))
        model, limit, cells = model_of(tables), 1.001 * solve(tables).cost, list[int]()
        for forward in (True, False):
            sweep(model, limit, forward, cells.append)
        return model, sum(cells)

    (few, few_cells), (many, many_cells) = passed(40), passed(80)
    assert 81 < few.num_configurations() < 0.7 * 30 * 81
    assert sum(distinct(many)) <= sum(distinct(few)) < len(few.live)
    assert many_cells <= 1.2 * few_cells


def ladder(num_blocks: int) -> CostTables:
    """Return three rails of layers with rungs, and a layer of one neighbour at each block; all blocks are the same."""
    rng = np.random.default_rng(3)
    edges, kinds = [], []
    for v in range(0, 4 * num_blocks, 4):
        own = [(v, v + 1), (v + 1, v + 2), (v + 1, v + 3)]
        ahead = [(v, v + 4), (v + 1, v + 5), (v + 2, v + 6)] if v + 4 < 4 * num_blocks else []
        edges += own + ahead
        kinds += range(len(own + ahead))
    costs, transfers = [rng.random(6) for _ in range(4)], [rng.random((6, 6)) for _ in range(6)]
    return tables_of(costs, edges, transfers, vertex_table=(0, 1, 2, 3) * num_blocks, edge_table=kinds)
