"""Explanations of whole plans: parts that add up, runner-ups of all strategies, sentences with the tables' numbers."""

import re
from dataclasses import replace
from functools import cache
from itertools import product

import numpy as np
import pytest

from pase import Plan, load, search
from pase.analysis.explanation import (
    CostParts,
    ExplainOptions,
    Explanation,
    Part,
    PartKind,
    explain,
)
from pase.analysis.explanation.constrained_search import planned_choice
from pase.analysis.explanation.sensitivity import FARTHEST, scaled_links
from pase.common.words import percent, quantity
from pase.costs import COST_MODELS, cost_model
from pase.errors import PlanError
from pase.planning.plan import configuration_text
from pase.planning.problems import data_parallel_choice, given_solution, plan_of, problem_of
from pase.solver import solve
from tests.networks import slow_machine, small_graph, tiny_graph
from tests.solver.problems import total_cost
from tests.solver.test_hiding import step_cost


@cache
def planned(name: str, num_devices: int, model: str) -> Plan:
    graph = tiny_graph() if name == "tiny" else small_graph(name)
    return search(graph, num_devices, machine=slow_machine(), cost_model=model)


@cache
def explained(name: str, num_devices: int, model: str) -> Explanation:
    return explain(planned(name, num_devices, model))


def data_parallel_plan(name: str, num_devices: int, model: str) -> Plan:
    plan = planned(name, num_devices, model)
    problem = problem_of(plan.graph, num_devices, plan.machine, model)
    found = given_solution(problem, data_parallel_choice(problem), time_s=0.0)
    return plan_of(problem, found, plan.machine, model, time_s=0.0)


@pytest.mark.parametrize("model", sorted(COST_MODELS))
@pytest.mark.parametrize(
    "name", ["alexnet", *(pytest.param(name, marks=pytest.mark.full) for name in ("transformer", "rnnlm"))]
)
def test_parts_are_the_costs_of_the_plan(name: str, model: str) -> None:
    plan, explanation = planned(name, 8, model), explained(name, 8, model)
    for layer in plan.layers:
        found = explanation[layer.name]
        inner = [part for part in found.parts if not part.other]
        assert sum(part.cost for part in inner) == pytest.approx(layer.layer_cost, rel=1e-9)
        compute = sum(part.cost for part in inner if part.kind is PartKind.COMPUTE)
        assert compute == pytest.approx(layer.compute_cost, rel=1e-9)
        # Edges: those into the layer as the plan has them, and those out of it as their consumers have them.
        edges = [(t.producer, t) for t in layer.transfers]
        edges += [(other.name, t) for other in plan.layers for t in other.transfers if t.producer == layer.name]
        for key in {other for other, _ in edges}:
            parts = [part for part in found.parts if part.other == key]
            moved = [t for other, t in edges if other == key]
            assert sum(part.cost for part in parts) == pytest.approx(sum(t.cost for t in moved), rel=1e-9, abs=1e-30)
            if parts:
                total = sum(t.forward_bytes + t.backward_bytes for t in moved)
                assert sum(part.size_bytes for part in parts) == pytest.approx(total, rel=1e-9)
        assert list(found.parts) == sorted(found.parts, key=lambda part: part.hidden - part.cost)
        if found.binding:
            assert 0 < found.share <= 1
            assert found.share == pytest.approx(
                (found.binding.cost - found.binding.hidden) / sum(part.cost - part.hidden for part in found.parts)
            )


@pytest.mark.parametrize("model", sorted(COST_MODELS))
def test_runner_ups_and_flips_of_a_network_are_those_of_all_its_strategies(model: str) -> None:
    plan, explanation = planned("tiny", 4, model), explained("tiny", 4, model)
    problem = problem_of(plan.graph, 4, plan.machine, model)
    cost_of = step_cost if problem.tables.hiding else total_cost
    every = list(product(*(range(k) for k in problem.tables.domain_sizes)))
    costs = np.array([cost_of(problem.tables, choice) for choice in every])
    rows = np.array(every)
    assert explanation.optimum_cost == pytest.approx(costs.min())
    own = planned_choice(plan, problem)
    for vertex, layer in enumerate(explanation.layers):
        least = costs[rows[:, vertex] != own[vertex]].min()
        assert layer.runner_up is not None
        assert layer.runner_up.total_cost == pytest.approx(least)
        assert layer.runner_up.difference == pytest.approx(least - costs.min(), abs=1e-9 * costs.min())
        assert layer.runner_up.is_tie == (least <= costs.min() * (1 + 1e-9))
        # Alone: all the others as they are.
        beside = [cost_of(problem.tables, (*own[:vertex], c, *own[vertex + 1 :])) for c in set(rows[:, vertex])]
        others = sorted(beside)
        assert layer.runner_up.alone_difference == pytest.approx(others[1] - others[0], abs=1e-9 * others[0])
        assert layer.runner_up.changes is not None
        changed = {name: other.splits for name, other in layer.runner_up.changes}
        changed[layer.name] = layer.runner_up.choice.splits
        choice = tuple(
            problem.choice(v, tuple(changed.get(one.name, one.splits).values())) for v, one in enumerate(plan.layers)
        )
        assert cost_of(problem.tables, choice) == pytest.approx(least)  # type: ignore[arg-type]
    # Flips: just short of one, the present configuration is still part of a cheapest strategy; just after it, the new.
    flips = 0
    for vertex, layer in enumerate(explanation.layers):
        for flip, outwards in ((layer.below, 1 / 1.001), (layer.above, 1.001)):
            if flip is None:
                continue
            flips += 1
            new = problem.choice(vertex, tuple(flip.choice.splits.values()))
            for scale, expected in ((flip.scale / outwards, own[vertex]), (flip.scale * outwards, new)):
                tables = problem_of(plan.graph, 4, scaled_links(plan.machine, scale), model).tables
                at = np.array([total_cost(tables, choice) for choice in every])
                assert expected in rows[at <= at.min() * (1 + 1e-9)][:, vertex]
                if expected == new:
                    assert at[rows[:, vertex] == own[vertex]].min() > at.min()
    if problem.tables.hiding:  # none are looked for
        assert (flips, explanation.searched) == (0, (1.0, 1.0))
        return
    # Where sums go in a ring, no speed of the links changes a layer of this one.
    assert flips > 0 or model == "ring"
    assert explanation.searched == (1 / FARTHEST, FARTHEST)


def test_repeated_layers_are_explained_like_the_first() -> None:
    explanation = explained("gpt", 8, "paper")
    assert [layer.name for layer in explanation.layers] == [layer.name for layer in planned("gpt", 8, "paper")]
    alone = explain(planned("gpt", 8, "paper"), [explanation.layers[9].name])
    assert alone.layers == (explanation.layers[9],)


# -- sentences


@pytest.mark.parametrize(
    ("name", "model"),
    [
        *(("alexnet", model) for model in sorted(COST_MODELS)),
        ("rnnlm", "alpha_beta"),
        pytest.param("transformer", "alpha_beta", marks=pytest.mark.full),
    ],
)
def test_sentences_say_what_the_tables_say(name: str, model: str) -> None:
    plan, explanation = planned(name, 8, model), explained(name, 8, model)
    problem = problem_of(plan.graph, 8, plan.machine, model)
    parts = CostParts(problem, cost_model(model, plan.machine, 8))
    own = planned_choice(plan, problem)
    num_checked = 0
    for vertex, layer in enumerate(explanation.layers):
        assert layer.reason.startswith(f"{layer.name}: {configuration_text(layer.choice.splits, 8)}")
        if layer.runner_up is None:
            continue
        relative = layer.runner_up.difference / plan.total_cost
        assert layer.runner_up.is_tie or percent(relative) in layer.reason
        assert configuration_text(layer.runner_up.choice.splits, 8) in layer.reason
        summed = re.search(
            r"because splitting the batch alone \((.*?)\) would all-reduce ([\d.]+ .?B) of weight gradients over (\d+)",
            layer.reason,
        )
        if summed:
            rows = range(problem.tables.domain_sizes[vertex])
            (row,) = (c for c in rows if configuration_text(problem.splits(vertex, c), 8) == summed[1])
            (part,) = (p for p in parts.own(vertex, row) if p.kind is PartKind.GRADIENTS)
            assert summed[2] == quantity(part.size_bytes, "B")
            assert int(summed[3]) == part.group
            # Nothing about that choice costs more than this does, over what the layer has now.
            mine = {p.name: p.cost for p in parts.of(vertex, own)}
            other = parts.of(vertex, (*own[:vertex], row, *own[vertex + 1 :]))
            rises = {p.name: p.cost - mine.get(p.name, 0.0) for p in other}
            assert max(rises, key=lambda key: rises[key]) == part.name
            num_checked += 1
    assert num_checked > 0


def test_the_published_reason_for_dense_layers() -> None:
    """AlexNet's fc1 has 9216 × 4096 weights of 4 bytes: 151 MB, which data parallelism all-reduces."""
    plan = search(load("alexnet"), 32)
    reason = explain(plan, ["fc1"])["fc1"].reason
    assert "splitting the batch alone (b=32) would all-reduce 151 MB of weight gradients over 32 devices" in reason


@pytest.mark.parametrize(
    ("fraction", "text"),
    [(0.0123, "+1.2%"), (-0.5, "-50%"), (12.34, "+1234%"), (0.00171, "+0.17%"), (1e-7, "+<0.0001%"), (0.0, "+0%")],
)
def test_percent(fraction: float, text: str) -> None:
    assert percent(fraction) == text


def test_configurations_in_words() -> None:
    assert configuration_text({"b": 4, "n": 2, "c": 1}, 8) == "b=4 n=2"
    assert configuration_text({"b": 2, "n": 1}, 8) == "b=2 ×4"
    assert configuration_text({"b": 1}, 1) == "not split"


# -- plans that are not the optimum


@pytest.mark.parametrize("model", ["paper", "step"])
def test_a_plan_that_is_not_the_optimum(model: str) -> None:
    plan = data_parallel_plan("alexnet", 8, model)
    best = planned("alexnet", 8, model)
    explanation = explain(plan)
    assert not explanation.is_optimal
    assert explanation.is_proven
    assert explanation.optimum_cost == pytest.approx(best.total_cost)
    worse = [layer for layer in explanation.layers if not layer.is_best]
    assert worse
    for layer in worse:
        assert layer.runner_up is not None
        assert layer.runner_up.total_cost == pytest.approx(best.total_cost)
        assert layer.runner_up.difference < 0
        assert layer.kept_total_cost > best.total_cost
        assert layer.best == layer.runner_up.choice
        assert "is not the best" in layer.reason
        saved = percent(-layer.runner_up.difference / plan.total_cost).lstrip("+")
        assert f"would save {saved} of the plan's cost: keeping " in layer.reason
    for layer in explanation.layers:
        if layer.is_best:
            assert layer.kept_total_cost == pytest.approx(best.total_cost)


def test_a_plan_on_one_device_has_nothing_to_choose() -> None:
    explanation = explain(search(tiny_graph(), 1))
    for layer in explanation.layers:
        assert layer.runner_up is None
        assert layer.below is None
        assert layer.above is None
        assert layer.reason == f"{layer.name}: not split, its only configuration"


def test_a_search_cut_short_says_so() -> None:
    plan = planned("transformer", 8, "paper")
    explanation = explain(plan, [plan.layers[0].name], options=ExplainOptions(time_limit_s=1e-9, max_solutions=1))
    assert not explanation.is_proven
    assert explanation.layers[0].runner_up is not None
    assert not explanation.layers[0].runner_up.is_exact
    assert explanation.searched == (1.0, 1.0)


def test_layers_and_configurations_that_are_not_there() -> None:
    plan = planned("tiny", 4, "paper")
    with pytest.raises(PlanError, match="unknown layer 'fc9'"):
        explain(plan, ["fc9"])
    first = replace(plan.layers[0], splits={**plan.layers[0].splits, "b": 3})
    with pytest.raises(PlanError, match="a search on 4 devices does not consider"):
        explain(replace(plan, layers=(first, *plan.layers[1:])))


def test_equal_costs_are_said_to_be_equal() -> None:
    """Where no link costs anything, splitting rows or columns of a product costs the same."""
    machine = scaled_links(slow_machine(), 2.0**-200)
    plan = search(tiny_graph(), 4, machine=machine)
    explanation = explain(plan)
    ties = [layer for layer in explanation.layers if layer.runner_up and layer.runner_up.is_tie]
    assert ties
    for layer in ties:
        assert layer.reason.endswith("costs the same")


def test_solving_again_gives_the_plan_itself() -> None:
    plan = planned("alexnet", 8, "paper")
    problem = problem_of(plan.graph, 8, plan.machine, "paper")
    assert planned_choice(plan, problem) == solve(problem.tables).choice


def test_the_name_of_a_part_says_where_an_edge_leads() -> None:
    assert Part(kind=PartKind.RESHARD_FROM, other="conv5", cost=1.0).name == "re-sharding from conv5"
    assert Part(kind=PartKind.COMPUTE, cost=1.0).name == "compute"
