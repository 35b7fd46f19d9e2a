"""Layers in the body of a loop: which they are, what a strategy costs that splits all turns alike, and what is said."""

from dataclasses import replace

import pytest

import pase
from pase.common.words import quantity
from pase.graph.operator import SCANNED
from pase.planning.constraints import with_ties
from pase.planning.problems import problem_of
from pase.solver import solve
from pase.views.exports import export
from pase.views.exports.named_mesh import scanned_layers
from tests.networks import slow_machine
from tests.runtime.plans import make_plan

pytest.importorskip("jax")
from tests.importers import jax_zoo as zoo


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
    assert note.startswith("split differently in iterations of one lax.scan: layers.0.gate, layers.1.gate; ")
    # The cost of the cheapest strategy that a scan can say stands beside the plan's own, and is that of a strategy.
    problem = problem_of(graph, 2, plan.machine, plan.cost_model)
    choice = solve(with_ties(problem, scanned_layers(graph).values()).tables).choice
    for names in scanned_layers(graph).values():
        assert len({choice[graph.index[name]] for name in names}) == 1
    tied = problem.tables.evaluate(choice)
    costs = (quantity(cost, plan.cost_unit) for cost in (tied, plan.total_cost))
    assert note.endswith("the cheapest strategy with equal iterations costs {}, this one {}".format(*costs))


def test_a_searched_plan_of_a_scan_tells_both_costs() -> None:
    """The optimum splits the turns differently: what a scan can say, and what that costs, stands beside it."""
    plan = pase.search(_llama(3), 8, machine=slow_machine())
    exported = export(plan, "jax")
    (note,) = (note for note in exported.notes if "lax.scan" in note)
    assert "the cheapest strategy with equal iterations costs" in note
    assert note.endswith(f", this one {quantity(plan.total_cost, plan.cost_unit)}")
    assert note in exported.text


def test_nothing_is_said_where_all_turns_are_alike() -> None:
    assert not any("lax.scan" in note for note in export(make_plan(_llama(2), 2, {}), "jax").notes)
