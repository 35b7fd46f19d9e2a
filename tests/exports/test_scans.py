"""Layers in the body of a loop: which they are, what a strategy costs that splits all turns alike, and what is said."""

import itertools
from dataclasses import replace

import numpy as np
import pytest

import pase
from pase.common.quantities import quantity
from pase.graph.operator import SCANNED
from pase.planning.planner import problem_of
from pase.sharding.configurations import enumerate_configurations
from pase.tables.cost_tables import CostTables, EdgeTable
from pase.views.exports import export
from pase.views.exports.jax import cheapest_alike, scanned_layers
from tests.networks import slow_machine
from tests.runtime.plans import make_plan

pytest.importorskip("jax")
from tests.importers import jax_zoo as zoo


@pytest.mark.parametrize("seed", range(40))
def test_the_cheapest_of_all_strategies_that_are_alike(seed: int) -> None:
    """Against all of them, one by one: random tables, chains of turns with a vertex at each end and skips."""
    random = np.random.default_rng(seed)
    turns, body = int(random.integers(2, 4)), int(random.integers(1, 4))
    sizes = [int(n) for n in random.integers(1, 4, size=body)]
    domains = [2, *(sizes * turns), 3]
    last = len(domains) - 1
    edges = [(i, i + 1) for i in range(last)]
    edges += [(i, i + body) for i in range(1, last - body) if random.random() < 0.5]
    edges += [(0, last)] * int(random.integers(0, 2))
    tables = CostTables(
        vertex_names=tuple(f"v{i}" for i in range(len(domains))),
        vertex_costs=tuple(random.random(n) for n in domains),
        vertex_table=tuple(range(len(domains))),
        edges=tuple(edges),
        edge_tables=tuple(EdgeTable.from_dense(random.random((domains[u], domains[v]))) for u, v in edges),
        edge_table=tuple(range(len(edges))),
    )
    groups = [[1 + turn * body + i for turn in range(turns)] for i in range(body)]
    found = cheapest_alike(tables, groups)
    every = itertools.product(range(2), *(range(n) for n in sizes), range(3))
    least = min(tables.evaluate((head, *(inner * turns), tail)) for head, *inner, tail in every)
    assert found.exact
    assert found.cost == pytest.approx(least)
    assert tables.evaluate(found.choice) == pytest.approx(least)
    assert all(len({found.choice[vertex] for vertex in group}) == 1 for group in groups)


def _llama(layers: int) -> pase.Graph:
    apply, params = zoo.llama(layers=layers)
    return pase.load((apply, params, zoo.tokens(2, 16)))


def test_the_layers_of_a_scan_know_their_place_in_its_body() -> None:
    places = scanned_layers(_llama(3))
    assert len(places) == 13
    assert ("layers.0.wq", "layers.1.wq", "layers.2.wq") in places.values()
    assert all(len(names) == 3 for names in places.values())


def test_layers_of_their_own_have_none() -> None:
    apply, params = zoo.gpt2(layers=2)
    assert not scanned_layers(pase.load((apply, params, zoo.tokens(2, 16))))


def test_layers_that_cannot_be_split_alike_are_no_turns_of_one_body() -> None:
    """A file may say of any layer that it has a place in a body."""
    graph = _llama(2)
    told = tuple(replace(op, attributes=((SCANNED, "1.0"),)) for op in graph.operators)
    assert not scanned_layers(replace(graph, operators=told))


def test_turns_that_are_split_differently_are_named_with_what_the_same_splits_cost() -> None:
    graph = _llama(2)
    dims = {op.name: op.extents for op in graph.operators}
    (split,) = ({dim: 2} for dim, extent in dims["layers.1.gate"].items() if extent == 48)
    plan = make_plan(graph, 2, {"layers.1.gate": split})
    (note,) = (note for note in export(plan, "jax").notes if "lax.scan" in note)
    assert note.startswith("split differently in the turns of one lax.scan: layers.0.gate, layers.1.gate; ")
    # The cost of the cheapest strategy that a scan can say stands beside the plan's own, and is that of a strategy.
    problem = problem_of(graph, 2, plan.machine, plan.cost_model)
    groups = [[problem.graph.index[name] for name in names] for names in scanned_layers(graph).values()]
    tied = problem.tables.evaluate(cheapest_alike(problem.tables, groups).choice)
    costs = (quantity(cost, plan.cost_unit) for cost in (tied, plan.total_cost))
    assert note.endswith("the cheapest strategy with all turns alike costs {}, this one {}".format(*costs))


def test_a_searched_plan_of_a_scan_tells_both_costs() -> None:
    """The optimum splits the turns differently: what a scan can say, and what that costs, stands beside it."""
    plan = pase.search(_llama(3), 8, machine=slow_machine())
    exported = export(plan, "jax")
    (note,) = (note for note in exported.notes if "lax.scan" in note)
    assert "the cheapest strategy with all turns alike costs" in note
    assert note.endswith(f", this one {quantity(plan.total_cost, plan.cost_unit)}")
    assert note in exported.text


def test_the_note_tells_the_cost_of_the_best_among_those_that_are_alike() -> None:
    """The plan that it speaks of exists: its parts are configurations, and no plan is cheaper than the optimum."""
    graph = _llama(2)
    plan = pase.search(graph, 4, machine=slow_machine())
    problem = problem_of(plan.graph, 4, plan.machine, plan.cost_model)
    groups = [[plan.graph.index[name] for name in names] for names in scanned_layers(plan.graph).values()]
    for group in groups:
        assert len({enumerate_configurations(plan.graph.operators[v], 4).tobytes() for v in group}) == 1
    assert cheapest_alike(problem.tables, groups).cost >= plan.total_cost * (1 - 1e-9)


def test_nothing_is_said_where_all_turns_are_alike() -> None:
    assert not any("lax.scan" in note for note in export(make_plan(_llama(2), 2, {}), "jax").notes)
