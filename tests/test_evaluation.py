"""Strategies of one's own: beside the search, the baselines' plans and all strategies one by one; what is refused."""

import json
from collections.abc import Mapping
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pase
from pase import Graph, Plan
from pase.analysis.baselines.compare import compare
from pase.analysis.baselines.registry import BASELINES, baseline_of, grid_strategy
from pase.analysis.differences import difference
from pase.analysis.evaluation import evaluation, strategy_of
from pase.costs import Problem
from pase.errors import ConfigurationError, IntegratedError, MemoryLimitError, PaseError, PlanError
from pase.models import MODELS
from pase.planning.problems import problem_of
from pase.planning.steps import TrainingStep
from pase.views.reports.document import sweep
from tests.networks import SMALL, slow_machine, small_graph, small_plan, tiny_graph, tiny_plan, with_layer

TINY = {"machine": slow_machine()}


def _choice(problem: Problem, plan: Plan) -> list[int]:
    found = [problem.choice(vertex, tuple(layer.splits.values())) for vertex, layer in enumerate(plan)]
    return [index for index in found if index is not None]


def _all(problem: Problem) -> list[tuple[int, ...]]:
    return list(product(*(range(size) for size in problem.tables.domain_sizes)))


# -- what is evaluated


COST_MODELS = ("paper", "alpha_beta")
DEEP = {"inception_v3", "resnet101", "densenet121", "googlenet"}
"""Of a hundred layers and more: all of their schemes take half a minute, however small the layers are."""


@pytest.mark.parametrize(
    ("name", "cost_model"),
    [
        *[("alexnet", "paper"), ("rnnlm", "paper"), ("gpt", "alpha_beta")],
        *(
            pytest.param(name, cost_model, marks=pytest.mark.full)
            for name in SMALL
            if name not in DEEP
            for cost_model in COST_MODELS
        ),
    ],
)
def test_a_plan_and_all_schemes_cost_what_they_were_said_to(name: str, cost_model: str) -> None:
    check_known_strategies(small_graph(name), 4, cost_model)


@pytest.mark.parametrize(
    "name", ["densenet121", *(pytest.param(name, marks=pytest.mark.full) for name in DEEP - {"densenet121"})]
)
def test_so_do_plans_of_deep_networks(name: str) -> None:
    check_plan(pase.search(small_graph(name), 4, cost_model="alpha_beta"))


@pytest.mark.full
@pytest.mark.parametrize("cost_model", COST_MODELS)
@pytest.mark.parametrize("name", MODELS)
def test_so_they_do_at_full_size(name: str, cost_model: str) -> None:
    check_known_strategies(pase.load(name), 8, cost_model)


def check_plan(plan: Plan) -> None:
    """A plan costs the same when it is evaluated, to the last digit."""
    found = pase.evaluate(plan.graph, plan)
    assert (found.total_cost, found.layers) == (plan.total_cost, plan.layers)
    assert (found.exact, found.gap, found.lower_bound) == (True, 0.0, plan.total_cost)


def check_known_strategies(graph: Graph, devices: int, cost_model: str) -> None:
    """So does every scheme of a comparison, by its name."""
    check_plan(pase.search(graph, devices, cost_model=cost_model))
    comparison = compare(graph, devices, cost_model=cost_model)
    for contender in comparison.contenders[1:]:
        found = pase.evaluate(graph, contender.name, devices, cost_model=cost_model)
        assert (found.total_cost, found.layers) == (contender.plan.total_cost, contender.plan.layers)
        assert found.lower_bound == pytest.approx(contender.plan.lower_bound, rel=1e-12)
        assert found.exact == contender.plan.exact
        assert found.memory == contender.plan.memory
    for absent in comparison.absent if cost_model == "paper" else ():
        with pytest.raises(ConfigurationError, match=absent.needs[:30]):
            pase.evaluate(graph, absent.name, devices)
    assert {entry.name for entry in comparison.absent} | {c.name for c in comparison.contenders[1:]} == set(BASELINES)


@pytest.mark.parametrize(("pr", "pc"), [(1, 8), (2, 4), (8, 1)])
def test_a_grid_has_a_name(pr: int, pc: int) -> None:
    graph = small_graph("alexnet")
    found = pase.evaluate(graph, f"grid {pr}x{pc}", 8)
    assert [layer.splits for layer in found] == list(grid_strategy(graph, 8, pr, pc))
    with pytest.raises(IntegratedError, match="choose factors"):
        pase.evaluate(graph, "grid 3x2", 8)


def test_pins_are_completed_at_the_least_cost() -> None:
    problem = problem_of(tiny_graph(), 4, slow_machine(), "paper")
    costs = {choice: problem.tables.evaluate(choice) for choice in _all(problem)}
    for vertex, layer in enumerate(problem.graph.operators):
        for index in range(problem.tables.domain_sizes[vertex]):
            splits = problem.splits(vertex, index)
            pin = " ".join(f"{dim}={k}" for dim, k in splits.items())
            plan = pase.evaluate(tiny_graph(), {"pin": {layer.name: pin}}, 4, **TINY)
            least = min(cost for choice, cost in costs.items() if choice[vertex] == index)
            assert plan[layer.name].splits == splits
            assert plan.total_cost == pytest.approx(least, rel=1e-12)
            assert plan.lower_bound == pytest.approx(min(costs.values()), rel=1e-12)
            assert plan.exact == (least == pytest.approx(min(costs.values()), rel=1e-12))
            assert plan.constraints == ()


def test_the_rest_is_as_asked() -> None:
    graph, pin = small_graph("alexnet"), {"fc1": "n=2 c=4"}
    optimal, batch, owt, plan = (
        pase.evaluate(graph, {"pin": pin, **rest}, 8)
        for rest in ({}, {"rest": "data_parallel"}, {"start": "owt"}, {"rest": "optimal"})
    )
    others = [layer.name for layer in optimal if layer.name != "fc1"]
    for found in (optimal, batch, owt, plan):
        assert dict(found["fc1"].splits) == {"b": 1, "n": 2, "c": 4}
    for found, scheme in ((batch, "data_parallel"), (owt, "owt")):
        whole = pase.evaluate(graph, scheme, 8)
        assert [found[name].splits for name in others] == [whole[name].splits for name in others]
    assert optimal == plan.__class__(**{**_fields(plan), "search": optimal.search})
    assert optimal.total_cost <= min(batch.total_cost, owt.total_cost)


def _fields(plan: Plan) -> dict[str, Any]:
    return {name: getattr(plan, name) for name in plan.__dataclass_fields__}


def test_devices_are_those_given_by_hand(tmp_path: Path) -> None:
    order = [3, 1, 0, 2]
    plan = pase.evaluate(tiny_graph(), {"rest": "data_parallel", "devices": {"fc1": order}}, 4, **TINY)
    assert plan["fc1"].devices == tuple(order)
    plan.save(tmp_path / "plan.json")
    again = pase.evaluate(tiny_graph(), tmp_path / "plan.json")
    assert again.layers == plan.layers
    assert pase.load_plan(tmp_path / "plan.json") == plan


def test_a_plan_is_evaluated_on_another_machine_and_as_a_start(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    tiny_plan().save(path)
    there = pase.evaluate(tiny_graph(), path, machine="h100", cost_model="alpha_beta")
    assert (there.machine.name, there.cost_model, there.num_devices) == ("h100", "alpha_beta", 4)
    assert [layer.splits for layer in there] == [layer.splits for layer in tiny_plan()]
    file = tmp_path / "strategy.toml"
    file.write_text('start = "plan.json"\n[pin]\nfc1 = "b=4"\n')
    changed = pase.evaluate(tiny_graph(), file)
    assert [layer.name for layer in changed if layer.splits != tiny_plan()[layer.name].splits] == ["fc1"]
    assert changed.total_cost > tiny_plan().total_cost


def test_without_time_there_is_a_bound_all_the_same() -> None:
    plan = pase.evaluate(small_graph("transformer"), "data_parallel", 8, time_limit_s=1e-9)
    full = pase.evaluate(small_graph("transformer"), "data_parallel", 8)
    assert plan.total_cost == full.total_cost
    assert 0 <= plan.lower_bound <= full.lower_bound * (1 + 1e-9)
    assert not plan.exact


# -- what to change first


@pytest.mark.parametrize("name", ["data_parallel", "owt", "mcmc"])
@pytest.mark.parametrize("network", ["alexnet", "mlp"])
def test_what_to_change_first_saves_what_is_said(name: str, network: str) -> None:
    if baseline_of(name).choose(problem_of(small_graph(network), 8, slow_machine(), "paper"), slow_machine()) is None:
        return
    found = evaluation(small_graph(network), name, 8)
    plan, best = found.plan, pase.search(small_graph(network), 8)
    assert found.optimum_cost == pytest.approx(best.total_cost, rel=1e-12)
    if found.improvement is None:
        assert plan.exact
        return
    problem = problem_of(plan.graph, 8, plan.machine, "paper")
    own = _choice(problem, plan)
    other = list(own)
    for layer, changed in found.improvement.changes:
        index = problem.choice(plan.index[layer], tuple(changed.splits.values()))
        assert index is not None
        other[plan.index[layer]] = index
    saving = problem.tables.evaluate(own) - problem.tables.evaluate(other)
    assert found.improvement.saving == pytest.approx(saving, rel=1e-9)
    assert sum(a != b for a, b in zip(own, other, strict=True)) == len(found.improvement.changes)
    # No layer alone saves more than what is advised does for each of its layers.
    for vertex in range(len(own)):
        alone = problem.tables.costs_beside(vertex, own)
        assert alone[own[vertex]] - alone.min() <= saving / len(found.improvement.changes) * (1 + 1e-9)
    rows = difference(best, plan).layers
    assert max(row.cost for row in rows) >= found.improvement.excess * (1 - 1e-9)


def test_explain_says_what_to_change_first() -> None:
    plan = pase.evaluate(small_graph("alexnet"), "data_parallel", 8)
    why = pase.explain(plan, ["fc1"])
    assert why.improvement == evaluation(small_graph("alexnet"), plan).improvement
    assert why.improvement is not None
    assert why.improvement.layer.startswith("fc")
    assert pase.explain(small_plan("alexnet", 8), ["fc1"]).improvement is None


# -- another configuration in a plan


@pytest.mark.parametrize("rest", ["optimal", "kept"])
def test_a_layer_is_replaced(rest: str, tmp_path: Path) -> None:
    plan = tiny_plan()
    problem = problem_of(plan.graph, 4, plan.machine, plan.cost_model)
    own = _choice(problem, plan)
    costs = {choice: problem.tables.evaluate(choice) for choice in _all(problem)}
    for vertex, layer in enumerate(plan):
        for index in range(problem.tables.domain_sizes[vertex]):
            found = plan.replace(layer.name, rest=rest, **problem.splits(vertex, index))
            kept = (*own[:vertex], index, *own[vertex + 1 :])
            expected = (
                costs[kept]
                if rest == "kept"
                else min(cost for choice, cost in costs.items() if choice[vertex] == index)
            )
            assert found.total_cost == pytest.approx(expected, rel=1e-12)
            assert found.lower_bound == pytest.approx(plan.total_cost, rel=1e-12)
            assert found.exact == (found.total_cost <= plan.total_cost * (1 + 1e-12))
            if rest == "kept":
                assert [x.devices for x in found if x.name != layer.name] == [
                    x.devices for x in plan if x.name != layer.name
                ]
            found.save(tmp_path / "plan.json")
            assert pase.load_plan(tmp_path / "plan.json") == found


def test_replacing_keeps_to_what_the_plan_keeps_to() -> None:
    graph = small_graph("alexnet")
    plan = pase.search(graph, 8, constraints={"forbid": {"fc2": "n"}})
    found = plan.replace("fc1", n=8)
    assert found.constraints == plan.constraints
    assert found["fc2"].splits["n"] == 1
    with pytest.raises(ConfigurationError, match="with the constraints before it"):
        plan.replace("fc2", n=8)
    tight = pase.search(graph, 8, device_memory_bytes=small_plan("alexnet", 8).memory.total_bytes)
    with pytest.raises(MemoryLimitError):
        tight.replace("conv1", rest="kept")


@pytest.mark.parametrize(
    ("layer", "splits", "says"),
    [
        ("fc9", {"n": 2}, "unknown layer 'fc9': did you mean"),
        ("fc1", {"z": 2}, "has no dim 'z'; it has b=16, n="),
        ("fc1", {"n": 3}, "leaves layer 'fc1' no configuration"),
        ("fc1", {"n": 0}, "n is 0; expected a whole number of 1 or more"),
        ("fc1", {"n": 2.0}, "n is 2.0; expected a whole number"),
        ("fc1", {"rest": "data_parallel"}, "rest is 'data_parallel'; expected 'optimal' or 'kept'"),
    ],
)
def test_what_cannot_be_replaced_is_named(layer: str, splits: dict[str, Any], says: str) -> None:
    with pytest.raises(PaseError) as failure:
        small_plan("alexnet", 8).replace(layer, **splits)
    assert says in str(failure.value)
    assert "\n" not in str(failure.value)


# -- two plans


@pytest.mark.parametrize("network", ["alexnet", "rnnlm"])
def test_differences_add_up(network: str) -> None:
    graph = small_graph(network)
    first, second = pase.evaluate(graph, "data_parallel", 8), small_plan(network, 8)
    found = difference(first, second)
    assert found.cost == pytest.approx(second.total_cost - first.total_cost, rel=1e-9)
    assert {row.name for row in found.layers} >= {x.name for x in first if x.splits != second[x.name].splits}
    for row in found.layers:
        before, after = first[row.name], second[row.name]
        assert row.costs == (before.layer_cost + before.transfer_cost, after.layer_cost + after.transfer_cost)
    assert difference(second, first).cost == pytest.approx(-found.cost)
    assert difference(first, first).layers == ()


def test_plans_of_other_models_are_not_compared() -> None:
    with pytest.raises(PlanError, match="different models"):
        difference(small_plan("alexnet", 8), small_plan("vgg16", 8))
    with pytest.raises(PlanError, match="not comparable"):
        difference(small_plan("mlp", 8), pase.search(small_graph("mlp"), 8, cost_model="alpha_beta"))


# -- what is refused

WRONG = {
    "unknown layer": (
        '[pin]\nfc1 = "n=2"\nfc7 = "n=2"\n',
        ": pin.fc7: no layer of 'alexnet' is 'fc7'; there are",
    ),
    "impossible": ('[pin]\nfc1 = "n=3"\n', ": pin.fc1: that leaves layer 'fc1' no configuration; it has"),
    "unknown key": ('[layers]\nfc1 = "n=2"\n', ": layers is not a key here; known here are pin, forbid"),
    "unknown start": (
        '\nstart = "owtt"\n',
        ": start is 'owtt'; expected a scheme or a plan's file: unknown scheme",
    ),
    "a start that is no text": ("start = 3\n", ": start is 3; expected text"),
    "a start that does not apply": (
        'start = "rnn"\n',
        ": start 'rnn' does not apply to 'alexnet' on 8 devices: it needs",
    ),
    "unknown rest": ('rest = "foo"\n', ": rest is 'foo'; expected one of optimal, data_parallel"),
    "start and rest": ('start = "owt"\nrest = "optimal"\n', ": start says what layers have that no pin is about"),
    "no TOML": ("[pin\n", "is not TOML: Expected ']' at the end of a table declaration (at line 1, column 5)"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_a_wrong_file_is_told_by_its_field(kind: str, tmp_path: Path) -> None:
    text, says = WRONG[kind]
    path = tmp_path / "strategy.toml"
    path.write_text(text)
    with pytest.raises(ConfigurationError) as failure:
        pase.evaluate(small_graph("alexnet"), path, 8)
    message = str(failure.value)
    assert says in message
    assert message.startswith(f"strategy file {path}")
    assert "\n" not in message


def test_a_wrong_plan_is_told(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    small_plan("alexnet", 8).save(path)
    whole = path.read_text()
    for text, says in (
        (whole[:2000], "is not complete JSON"),
        ("[1]", "expected an object"),
        (whole.replace('"total_cost": ', '"total_cost": 1', 1), "total_cost is"),
    ):
        path.write_text(text)
        with pytest.raises(PaseError, match=says) as failure:
            pase.evaluate(small_graph("alexnet"), path)
        assert str(path) in str(failure.value)
        assert "\n" not in str(failure.value)
    path.write_text(whole)
    with pytest.raises(PlanError, match="of another model: 'vgg16' has a layer 'conv1_1', 'alexnet' has none"):
        pase.evaluate(small_graph("vgg16"), path)
    with pytest.raises(ConfigurationError, match="leaves layer"):
        pase.evaluate(small_graph("alexnet"), path, 4)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("megatorn", "unknown scheme 'megatorn': did you mean 'megatron'?"),
        ("missing.toml", "strategy file missing.toml cannot be read: No such file"),
        (3, "a strategy is 3; expected a name, a plan"),
        ({"pin": {"fc1": 4}}, "pin.fc1 is 4; expected text"),
        ({"pins": {}}, "pins is not a key here"),
    ],
)
def test_what_is_no_strategy_is_told(given: object, says: str) -> None:
    with pytest.raises(ConfigurationError) as failure:
        strategy_of(given)
    assert says in str(failure.value)


def test_a_number_of_devices_is_needed() -> None:
    with pytest.raises(ConfigurationError, match="number of devices is missing"):
        pase.evaluate(small_graph("mlp"), "owt")


def test_json_says_the_same_as_toml(tmp_path: Path) -> None:
    graph: Graph = small_graph("alexnet")
    document = {"start": "owt", "pin": {"fc1": "n=4 c=2"}, "devices": {"fc1": [7, 6, 5, 4, 3, 2, 1, 0]}}
    (tmp_path / "a.json").write_text(json.dumps(document))
    (tmp_path / "a.toml").write_text(
        'start = "owt"\n[pin]\nfc1 = "n=4 c=2"\n[devices]\nfc1 = [7, 6, 5, 4, 3, 2, 1, 0]\n'
    )
    plans = [pase.evaluate(graph, given, 8) for given in (document, tmp_path / "a.json", tmp_path / "a.toml")]
    assert len({tuple(layer.devices for layer in plan) for plan in plans}) == 1
    assert len({plan.total_cost for plan in plans}) == 1
    assert np.array_equal(plans[0]["fc1"].devices, document["devices"]["fc1"])


# -- plans with micro-batches, stages and modes


def _free_graph(batch: int = 32) -> Graph:
    return pase.load("mlp", batch=batch, arguments={"layers": 4, "inputs": 64, "hidden": 64, "classes": 64})


def _text(splits: Mapping[str, int]) -> str:
    return " ".join(f"{dim}={k}" for dim, k in splits.items() if k > 1) or "not split"


def _step_plan(**settings: Any) -> Plan:
    chosen = {"machine": "v100", "cost_model": "alpha_beta", "stages": 2, "micro_batches": 4, "modes": ["recompute"]}
    return pase.search(_free_graph(), 4, **{**chosen, **settings})


def test_a_plan_in_stages_is_evaluated_beside_all_numbers_of_stages(tmp_path: Path) -> None:
    plan = _step_plan()
    found = evaluation(_free_graph(), plan)
    assert found.plan.total_cost == plan.total_cost
    assert [layer.devices for layer in found.plan] == [layer.devices for layer in plan]
    modes = ["zero1", "zero2", "zero3", "recompute"]
    settings: dict[str, Any] = {"machine": "v100", "cost_model": "alpha_beta", "modes": modes}
    best = pase.search(_free_graph(), 4, stages="auto", micro_batches="auto", **settings)
    assert found.optimum_cost == pytest.approx(best.total_cost, rel=2e-3)
    assert found.plan.lower_bound <= best.total_cost * (1 + 1e-9)
    found.plan.save(tmp_path / "plan.json")
    assert pase.load_plan(tmp_path / "plan.json") == found.plan


@pytest.mark.parametrize("settings", [{"stages": 1, "micro_batches": 2}, {"stages": 2, "modes": ["zero1", "zero3"]}])
def test_the_plan_of_a_search_is_evaluated_as_it_is(settings: dict[str, Any]) -> None:
    plan = _step_plan(**settings)
    found = pase.evaluate(_free_graph(), plan, time_limit_s=1)
    assert (found.total_cost, found.layers, found.baselines) == (plan.total_cost, plan.layers, plan.baselines)


@pytest.mark.parametrize("stages", [1, 2])
def test_what_to_change_first_in_a_step_saves_what_it_says(stages: int) -> None:
    plan = _step_plan(stages=stages)
    other = plan.replace("fc2", rest="kept", **({"n": 2} if plan["fc2"].splits["n"] == 1 else {"b": 2}))
    found = evaluation(_free_graph(), other, time_limit_s=10).improvement
    assert found is not None
    step = TrainingStep.of(other)
    for name, choice in found.changes:
        step = with_layer(step, other.index[name], choice)
    assert found.saving == pytest.approx(other.total_cost - step.cost, rel=1e-9)
    assert found.saving >= (other.total_cost - plan.total_cost) * (1 - 1e-9)
    assert evaluation(_free_graph(), plan, time_limit_s=10).improvement is None


def test_a_plan_in_stages_is_evaluated_for_another_machine() -> None:
    plan = _step_plan()
    found = pase.evaluate(_free_graph(), plan, machine="a100", cost_model="step", time_limit_s=1)
    own = pase.search(_free_graph(), 4, machine="a100", cost_model="step", stages=2, micro_batches=4)
    assert found.machine.name == "a100"
    assert found.total_cost >= own.lower_bound
    assert [layer.splits for layer in found] == [layer.splits for layer in plan]


def test_a_plan_in_stages_is_evaluated_with_other_layers(tmp_path: Path) -> None:
    graph = small_graph("gpt")
    settings: dict[str, Any] = {"machine": slow_machine(), "cost_model": "step", "micro_batches": 2, "stages": 2}
    plan = pase.search(graph, 8, **settings)
    plan.save(tmp_path / "plan.json")
    (tmp_path / "other.toml").write_text(
        'start = "plan.json"\ntie = ["layer1_ff_1, layer2_ff_1"]\n'
        '[pin]\n"layer1_ff_1" = "s=4"\n"layer2_self_q" = "zero2 *"\n[forbid]\n"layer1_self_o" = "b"\n'
    )
    found = pase.evaluate(graph, tmp_path / "other.toml", time_limit_s=1)
    assert [dict(found[name].splits) for name in ("layer1_ff_1", "layer2_ff_1")] == [
        {"b": 1, "s": 4, "e": 1, "d": 1}
    ] * 2
    assert (found["layer2_self_q"].state, found["layer2_self_q"].splits) == ("zero2", plan["layer2_self_q"].splits)
    assert found["layer1_self_o"].splits["b"] == 1
    changed = {"layer1_ff_1", "layer2_ff_1", "layer1_self_o"}
    assert [layer.splits for layer in found if layer.name not in changed] == [
        layer.splits for layer in plan if layer.name not in changed
    ]
    assert [layer.stage for layer in found] == [layer.stage for layer in plan]
    whole = {
        "pin": {layer.name: f"{_text(layer.splits)} {layer.state}" for layer in found if layer.name in graph.index}
    }
    fresh = pase.search(graph, 8, constraints=whole, modes=["zero2"], **settings)
    assert [layer.stage for layer in fresh] == [layer.stage for layer in found]
    assert found.total_cost == pytest.approx(fresh.total_cost, rel=1e-9)


def test_what_is_another_step_is_not_evaluated() -> None:
    plan = _step_plan()
    with pytest.raises(PlanError, match="with 8 devices it is another step: search it"):
        pase.evaluate(_free_graph(), plan, 8)
    with pytest.raises(PlanError, match="give the batch that it was searched with"):
        pase.evaluate(_free_graph(64), plan)
    with pytest.raises(ConfigurationError, match="cost model 'paper' counts FLOP and bytes"):
        pase.evaluate(_free_graph(), plan, cost_model="paper")


def test_a_layer_of_a_stage_is_replaced_and_all_others_kept() -> None:
    plan = _step_plan()
    other = {"n": 2} if plan["fc2"].splits["n"] == 1 else {"b": 2}
    found = plan.replace("fc2", rest="kept", **other)
    assert {dim: k for dim, k in found["fc2"].splits.items() if k > 1} == other
    assert [layer.splits for layer in found if layer.name != "fc2"] == [
        layer.splits for layer in plan if layer.name != "fc2"
    ]
    assert found.total_cost >= plan.lower_bound
    assert found.replace("fc2", rest="kept", **plan["fc2"].splits).total_cost == plan.total_cost
    with pytest.raises(ConfigurationError, match="leaves layer 'fc2' no configuration"):
        plan.replace("fc2", rest="kept", n=4)


def test_plans_in_stages_differ_by_what_their_steps_take() -> None:
    plan = _step_plan()
    other = plan.replace("fc2", rest="kept", **({"n": 2} if plan["fc2"].splits["n"] == 1 else {"b": 2}))
    found = difference(plan, other)
    assert found.cost == other.total_cost - plan.total_cost
    assert "fc2" in [layer.name for layer in found.layers if not layer.is_split_alike]


def test_a_layer_of_a_step_is_replaced_and_all_others_chosen_anew() -> None:
    graph = small_graph("gpt")
    settings: dict[str, Any] = {"machine": slow_machine(), "cost_model": "step", "micro_batches": 2, "stages": 2}
    plan = pase.search(graph, 8, **settings)
    name, other = "layer1_ff_1", {"b": 1, "s": 4}
    found = plan.replace(name, **other)
    fresh = pase.search(graph, 8, constraints={"pin": {name: "s=4"}}, **settings)
    assert {dim: found[name].splits[dim] for dim in other} == other
    assert found.total_cost == pytest.approx(fresh.total_cost, rel=2e-3)
    assert (found.num_stages, found.micro_batches, found.lower_bound) == (2, 2, min(plan.lower_bound, found.total_cost))


def test_a_sweep_is_a_search_of_steps_on_each_number() -> None:
    graph = small_graph("gpt")
    settings: dict[str, Any] = {"machine": slow_machine(), "cost_model": "step", "modes": ["zero1"]}
    plan = pase.search(graph, 4, stages=2, micro_batches=2, **settings)
    for changes in ({}, {"stages": "auto", "micro_batches": "auto", "modes": ("zero1",)}):
        found = sweep(plan, (1, 4), **changes)
        asked = {"stages": 2, "micro_batches": 2, **changes}
        limit = plan.device_memory_bytes
        alone = pase.search(graph, 4, device_memory_bytes=limit, **{**settings, **asked})
        assert found["strategies"][0]["total_cost"][1] == alone.total_cost
        assert (found["stages"][1], found["micro_batches"][1]) == (alone.num_groups, alone.micro_batches)
    assert found["stages"][0] == 1
    with pytest.raises(PlanError, match="other numbers of them are worked out from that of the whole batch"):
        sweep(replace(plan, graph=replace(plan.graph, name="mine")), (1, 2))
