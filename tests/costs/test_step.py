"""The `step` cost model: what hides and behind what, by hand and one layer at a time; searches, files, explanations."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pase
from pase import Graph, Plan, load, load_machine, load_plan, search
from pase.analysis.baselines.compare import compare
from pase.analysis.baselines.registry import chosen
from pase.analysis.explanation import ExplainOptions, PartKind, every_choice, explain, overview
from pase.analysis.explanation.sensitivity import sensitivity
from pase.costs import cost_model, traffic_of
from pase.errors import MachineError, PlanError
from pase.graph.operators import with_fan_outs
from pase.machine import Machine, Overlap
from pase.machine.files import machine_text, parse_machine
from pase.planning.problems import data_parallel_choice, problem_of
from pase.planning.session import Session
from pase.views.reports.document import report_document
from tests.networks import small_graph
from tests.simulation.machines import machine


def slow(share: float = 1.0, flop_per_s: float = 1e9) -> Machine:
    """Return eight slow devices on slow links."""
    return replace(machine((0, 1e-6, 1e8), flop_per_s=flop_per_s), overlap=Overlap(share=share, source="a test"))


def parts(graph: Graph, plan: Plan) -> tuple[float, float, float]:
    """Return S, A and B of a plan's strategy, layer by layer from what each computes and sends.

    A layer's sums can hide if there is backward computation in a layer before it, and its own computation hides others'
    if a layer after it has weights: followed along the edges here.
    """
    graph = with_fan_outs(graph)
    model = cost_model("alpha_beta", plan.machine, plan.num_devices)
    assert plan.machine.overlap is not None

    def reached(start: str, ahead: bool) -> set[str]:
        found: set[str] = set()
        waiting = [start]
        while waiting:
            name = waiting.pop()
            for edge in graph.edges:
                end, other = (edge.producer, edge.consumer) if ahead else (edge.consumer, edge.producer)
                if end == name and other not in found:
                    found.add(other)
                    waiting.append(other)
        return found

    hideable = cover = 0.0
    for layer in plan:
        operator = graph[layer.name]
        traffic = traffic_of(graph, operator, np.array([list(layer.splits.values())], dtype=np.int32))
        back = float(model.work(traffic.backward)[0])
        if any(any(graph.read_gradients(graph[name])) for name in reached(layer.name, ahead=False)):
            for message, cost in zip(traffic.messages, model.messages(traffic), strict=True):
                of_parameter = [f"gradient of {access.tensor}" for access in operator.parameters]
                hideable += float(cost[0]) if message.tensor in of_parameter else 0.0
        if any(graph[name].parameters for name in reached(layer.name, ahead=True)):
            cover += plan.machine.overlap.share * back
        hideable += sum(
            transfer.cost for transfer in layer.transfers if (layer.name, transfer.input) not in graph.incoming
        )
    total = sum(layer.layer_cost + layer.transfer_cost for layer in plan)
    return total, hideable, cover


def test_three_layers_by_hand() -> None:
    """Data parallelism of a perceptron: the first layer's sum cannot hide, and the last one hides nothing."""
    graph = load("mlp", arguments={"batch": 8, "inputs": 16, "hidden": 32, "classes": 4, "layers": 3})
    where = slow(share=0.5)
    plan = pase.evaluate(graph, "data_parallel", 8, machine=where, cost_model="step")
    names = [layer.name for layer in plan]
    assert names == ["fc1", "fc2", "fc3", "softmax"]
    sums = [plan[name].communication_cost for name in names[:3]]
    # Each device has one example: a product of k · n numbers takes 2 k n FLOP for either gradient; the first layer's
    # data have none. Biases and activations are a FLOP or so for each number beside that.
    back_s = [2 * k * n * times / 1e9 for k, n, times in ((16, 32, 1), (32, 32, 2), (32, 4, 2))]
    hideable = [plan[name].hideable_cost for name in names]
    assert hideable == pytest.approx([0.0, sums[1], sums[2], 0.0], rel=1e-12)
    cover = [plan[name].cover_cost for name in names]
    assert cover[:2] == pytest.approx([0.5 * t for t in back_s[:2]], rel=0.1)
    assert cover[2:] == [0.0, 0.0]
    both = plan.total_cost + plan.hidden_cost
    assert both == pytest.approx(sum(layer.layer_cost + layer.transfer_cost for layer in plan), rel=1e-12)
    assert plan.hidden_cost == min(sum(hideable), sum(cover)) > 0  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["alexnet", "rnnlm", "gpt", pytest.param("resnet101", marks=pytest.mark.full)])
def test_plans_cost_the_larger_of_two_sums(name: str) -> None:
    graph = small_graph(name)
    for where in (slow(share=0.7), slow(flop_per_s=1e11), replace(load_machine("v100"), kernels=None)):
        plan = search(graph, 8, machine=where, cost_model="step")
        assert plan.exact
        total, hideable, cover = parts(graph, plan)
        assert sum(layer.hideable_cost or 0.0 for layer in plan) == pytest.approx(hideable, rel=1e-9, abs=1e-15)
        assert sum(layer.cover_cost or 0.0 for layer in plan) == pytest.approx(cover, rel=1e-9, abs=1e-15)
        assert plan.total_cost == pytest.approx(total - min(hideable, cover), rel=1e-12)
        assert plan.total_cost <= plan.baselines["data_parallel"] * (1 + 1e-12)


@pytest.mark.parametrize("name", ["alexnet", "gpt"])
def test_where_nothing_overlaps_it_is_alpha_beta(name: str) -> None:
    graph, where = small_graph(name), replace(load_machine("v100"), overlap=None, kernels=None)
    ours, sums = (search(graph, 8, machine=where, cost_model=model) for model in ("step", "alpha_beta"))
    assert ours.total_cost == sums.total_cost
    assert ours.layers == sums.layers
    assert ours.hidden_cost == 0
    assert all(layer.hideable_cost is None for layer in ours)
    overlapping = replace(where, overlap=load_machine("v100").overlap)
    best = search(graph, 8, machine=overlapping, cost_model="step")
    assert best.total_cost <= sums.total_cost
    assert best.machine.overlap == load_machine("v100").overlap


def test_more_overlap_costs_no_more() -> None:
    graph = small_graph("gpt")
    costs = [search(graph, 8, machine=slow(share), cost_model="step").total_cost for share in (0.0, 0.3, 0.6, 1.0)]
    assert costs == sorted(costs, reverse=True)
    assert costs[0] > costs[-1]


# -- files


def saved(tmp_path: Path) -> tuple[Plan, dict[str, Any]]:
    plan = search(small_graph("alexnet"), 8, machine=slow(), cost_model="step")
    assert plan.hidden_cost > 0
    plan.save(tmp_path / "plan.json")
    return plan, json.loads((tmp_path / "plan.json").read_text())


def test_a_plan_is_read_as_it_was_written(tmp_path: Path) -> None:
    plan, document = saved(tmp_path)
    assert load_plan(tmp_path / "plan.json") == plan
    assert document["hidden_cost"] == plan.hidden_cost
    assert document["machine"]["overlap"] == {"share": 1.0, "source": "a test"}
    sums = search(small_graph("alexnet"), 8, machine=slow(), cost_model="alpha_beta")
    sums.save(tmp_path / "sums.json")
    text = (tmp_path / "sums.json").read_text()
    assert not any(key in text for key in ("hidden_cost", "hideable_cost", "cover_cost"))
    again = pase.evaluate(small_graph("alexnet"), tmp_path / "plan.json")
    assert (again.total_cost, again.layers, again.exact) == (plan.total_cost, plan.layers, True)


def test_what_was_edited_is_told(tmp_path: Path) -> None:
    _, document = saved(tmp_path)

    def read(change: Any) -> None:
        edited = json.loads(json.dumps(document))
        change(edited)
        (tmp_path / "edited.json").write_text(json.dumps(edited))
        load_plan(tmp_path / "edited.json")

    def halve(edited: dict[str, Any]) -> None:
        edited["machine"]["overlap"]["share"] = 0.5

    cases = [
        (lambda edited: edited.update(hidden_cost=edited["hidden_cost"] * 1.01), "hidden_cost is .*, but the rest"),
        (lambda edited: edited.update(total_cost=edited["total_cost"] * 0.99), "total_cost is .*, but the rest"),
        (lambda edited: edited.pop("hidden_cost"), "hidden_cost is 0.0, but the rest"),
        (lambda edited: edited["layers"][4].pop("cover_cost"), r"layers\[4\].cover_cost is missing"),
        (lambda edited: edited["layers"][4].update(hideable_cost=1.0), r"layers\[4\].hideable_cost is 1.0, but"),
        (halve, "cover_cost is .*, but the rest"),
        (lambda edited: edited["machine"].pop("overlap"), "hideable_cost is .*, but the rest .* it nothing"),
    ]
    for change, message in cases:
        with pytest.raises(PlanError, match=message):
            read(change)


def test_a_machine_says_how_much_overlaps(tmp_path: Path) -> None:
    text = machine_text(slow(share=0.25))
    assert parse_machine(text, source="x.toml").overlap == Overlap(share=0.25, source="a test")
    with pytest.raises(MachineError, match=r"x.toml: overlap.share is 1.5; expected a number from 0 to 1"):
        parse_machine(text.replace("share = 0.25", "share = 1.5"), source="x.toml")
    with pytest.raises(MachineError, match=r"overlap.omega is not a key of a machine file"):
        parse_machine(text.replace("share", "omega"), source="x.toml")


# -- what else looks at costs


def test_what_explains_says_what_it_costs() -> None:
    graph = small_graph("rnnlm")
    plan = search(graph, 8, machine=slow(), cost_model="step")
    found = explain(plan, options=ExplainOptions())
    assert (found.is_optimal, found.is_proven) == (True, True)
    assert found.plan_cost == pytest.approx(plan.total_cost, rel=1e-12)
    assert found.searched == (1.0, 1.0)
    problem = problem_of(graph, 8, plan.machine, "step")
    # What is paid of all parts, transfers once, with their consumers, is T.
    ahead = [part for layer in found.layers for part in layer.parts if part.kind is not PartKind.RESHARD_TO]
    shared = sum(part.paid for part in ahead if part.kind is PartKind.SHARED_WEIGHT) / 2
    paid = sum(part.paid for part in ahead if part.kind is not PartKind.SHARED_WEIGHT) + shared
    assert paid == pytest.approx(plan.total_cost, rel=1e-9)
    shown = 0
    for vertex, layer in enumerate(found.layers):
        assert layer.below is layer.above is None
        if layer.runner_up is None:
            continue
        # What it would cost, by a search in which the layer has the runner-up's configuration alone.
        pin = " ".join(f"{dim}={k}" for dim, k in layer.runner_up.choice.splits.items() if k > 1) or "not split"
        pinned = search(graph, 8, machine=plan.machine, cost_model="step", constraints={"pin": {layer.name: pin}})
        assert layer.runner_up.total_cost == pytest.approx(pinned.total_cost, rel=1e-9), problem.graph.operators[vertex]
        assert layer.runner_up.total_cost >= plan.total_cost * (1 - 1e-9)
        difference = sum(rise.cost for rise in layer.runner_up.rises) - layer.runner_up.hidden
        assert difference == pytest.approx(pinned.total_cost - plan.total_cost, abs=1e-9 * plan.total_cost)
        hidden = pinned.hidden_cost - plan.hidden_cost
        changed = {name: choice.splits for name, choice in layer.runner_up.changes or ()}
        changed[layer.name] = layer.runner_up.choice.splits
        is_same = {one.name: one.splits for one in pinned} == {one.name: one.splits for one in plan} | changed
        assert not is_same or layer.runner_up.hidden == pytest.approx(hidden, abs=1e-9 * plan.total_cost)
        shown += 1
    assert shown > 2
    assert overview(plan).optimum_cost == pytest.approx(plan.total_cost, rel=1e-12)
    with pytest.raises(PlanError, match="not known under cost model 'step', whose costs do not add up"):
        every_choice(plan)
    assert any(figure.time_change for figure in sensitivity(plan))
    (about,) = report_document({"step": plan}, interactive=True)["plans"]
    assert (about["cost_model"], about["total_cost"]) == ("step", plan.total_cost)
    assert "whose costs do not add up" in about["choices_note"]


def test_a_change_is_proposed_by_what_it_saves() -> None:
    graph, where = small_graph("alexnet"), slow(flop_per_s=1e11)
    found = explain(pase.evaluate(graph, "data_parallel", 8, machine=where, cost_model="step"), [])
    assert not found.is_optimal
    assert found.improvement is not None
    problem = problem_of(graph, 8, where, "step")
    choice = list(data_parallel_choice(problem))
    for name, other in found.improvement.changes:
        changed = problem.choice(problem.graph.index[name], tuple(other.splits.values()))
        assert changed is not None
        choice[problem.graph.index[name]] = changed
    saved_s = problem.tables.evaluate(data_parallel_choice(problem)) - problem.tables.evaluate(choice)
    assert found.improvement.saving == pytest.approx(saved_s, rel=1e-9)


def test_comparisons_and_sessions_agree_with_searches() -> None:
    graph, where = small_graph("gpt"), slow(flop_per_s=1e10)
    plan = search(graph, 8, machine=where, cost_model="step")
    others = chosen(["data_parallel", "megatron"])
    found = compare(graph, 8, machine=where, cost_model="step", baselines=others)
    for contender in found.contenders:
        assert contender.plan.total_cost >= plan.total_cost * (1 - 1e-12)
        assert contender.compute + contender.communication == pytest.approx(contender.plan.total_cost, rel=1e-9)
    session = Session(graph, 8, where, cost_model="step")
    assert session.answer.total_cost == pytest.approx(plan.total_cost, rel=1e-9)
    for changes in ({"constraints": {"forbid": {"*": "h"}}}, {"constraints": None, "devices": 4}):
        answer = session.replan(**changes)
        fresh = search(graph, answer.step.num_devices, machine=where, cost_model="step", constraints=answer.constraints)
        assert answer.exact
        assert answer.total_cost == pytest.approx(fresh.total_cost, rel=1e-9)
        assert answer.plan.total_cost == pytest.approx(fresh.total_cost, rel=1e-9)


def test_within_memory_the_plan_says_what_is_proven() -> None:
    graph, where = small_graph("alexnet"), slow(flop_per_s=1e10)
    free = search(graph, 8, machine=where, cost_model="step")
    limit = int(free.memory.total_bytes * 0.9)
    plan = search(graph, 8, machine=where, cost_model="step", device_memory_bytes=limit)
    assert plan.memory.total_bytes <= limit
    assert free.total_cost * (1 - 1e-9) <= plan.lower_bound <= plan.total_cost
    assert plan.exact == (plan.gap == 0)
    assert plan.gap < 0.05
    assert plan.baselines["without_memory_limit"] == pytest.approx(free.total_cost, rel=1e-9)
