"""What a report says, against the plan, the program's own layouts, and the traffic that programs are held to."""

import json
from dataclasses import replace
from itertools import product
from math import prod
from typing import Any

import pytest

from pase import Plan, load_machine, search
from pase.analysis.explanation import explain
from pase.analysis.figures import BUSIEST
from pase.costs import cost_model
from pase.errors import EmitError
from pase.graph import Window
from pase.graph.operator import access_dims
from pase.planning.planner import SearchOptions
from pase.planning.stages import step_bytes
from pase.planning.steps import plan_layers
from pase.sharding.layouts import device_mesh, layout_of, tensor_dims
from pase.sharding.traffic import flows
from pase.views.reports.document import report_document
from tests.explanation.test_explain import data_parallel_plan
from tests.explanation.test_schemes import free_plan
from tests.hostile import hostile_plan
from tests.networks import slow_machine, small_graph, small_plan, staged_plan
from tests.runtime.plans import random_plan

NAMES = ("alexnet", "rnnlm", "gpt")


def document(*plans: Plan, **options: Any) -> dict[str, Any]:
    named = {f"plan {number}": plan for number, plan in enumerate(plans)}
    return report_document(named, **options)


def random_costed_plan(name: str, seed: int) -> Plan:
    """Return a plan of random splits and devices, with its costs."""
    plan = random_plan(small_graph(name), 8, seed)
    splits, devices = [layer.splits for layer in plan.layers], [layer.devices for layer in plan.layers]
    layers = plan_layers(plan.graph, 8, cost_model("paper", plan.machine, 8), splits, devices)
    return replace(plan, layers=layers, cost_unit="FLOP", exact=False)


def only(plan: Plan, **options: Any) -> dict[str, Any]:
    (found,) = document(plan, **options)["plans"]
    assert isinstance(found, dict)
    return found


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("model", ["paper", "alpha_beta"])
def test_costs_add_up_to_the_plan(name: str, model: str) -> None:
    plan = search(small_graph(name), 8, machine=slow_machine(), options=SearchOptions(cost_model=model))
    found = only(plan, explains=False)
    assert found["total_cost"] == plan.total_cost
    assert sum(sum(layer["costs"]) for layer in found["layers"]) == pytest.approx(plan.total_cost)
    compute = found["cost_parts"].index("compute")
    moved = found["cost_parts"].index("re-sharding")
    for layer, of in zip(found["layers"], plan.layers, strict=True):
        assert layer["costs"][compute] == pytest.approx(of.compute_cost)
        assert layer["costs"][moved] == pytest.approx(sum(transfer.cost for transfer in of.transfers))
        assert sum(layer["costs"]) - layer["costs"][moved] == pytest.approx(of.layer_cost)
        assert sum(part["cost"] for part in layer["parts"]) == pytest.approx(of.layer_cost)


@pytest.mark.parametrize("name", NAMES)
def test_bytes_are_those_of_the_program(name: str) -> None:
    plan = random_costed_plan(name, 1)
    found = only(plan, explains=False)
    moved = flows(plan)
    shown = sum(edge["forward_bytes"] + edge["backward_bytes"] for edge in found["edges"]) + sum(
        layer["moved_bytes"] for layer in found["layers"]
    )
    assert shown == found["moved_bytes"] == sum(flow.total_bytes for flow in moved)
    by_pair: dict[tuple[int, int], int] = {}
    for flow in moved:
        for ends, size in flow.bytes_by_pair.items():
            by_pair[ends] = by_pair.get(ends, 0) + size
    assert {(a, b): size for a, b, size in found["traffic"]["bytes"]} == by_pair
    for edge in found["edges"]:
        ends = plan.layers[edge["from"]].name, plan.layers[edge["to"]].name
        same = [f for f in moved if (f.movement.producer, f.movement.consumer, f.tensor) == (*ends, edge["tensor"])]
        assert edge["forward_bytes"] + edge["backward_bytes"] == sum(flow.total_bytes for flow in same)


@pytest.mark.parametrize(("name", "seed"), [("alexnet", 0), ("transformer", 1), ("rnnlm", 0)])
def test_tensors_lie_as_their_layouts_say(name: str, seed: int) -> None:
    """Devices that the page puts on one part of a tensor hold the same box of it; on different parts, others."""
    plan = random_costed_plan(name, seed)
    found = only(plan, explains=False)
    for operator, layer, of in zip(plan.graph.operators, found["layers"], plan.layers, strict=True):
        mesh = device_mesh(of.name, of.splits.items(), plan.num_devices, of.devices)
        order = found["device_orders"][layer["devices"]]
        for access, tensor in zip((*operator.reads, *operator.writes), layer["tensors"], strict=True):
            assert [dim["extent"] for dim in tensor["dims"]] == list(access.shape)
            if any(axis is None or not isinstance(axis, str | Window) for axis in access.index_map):
                continue
            layout = layout_of(mesh, tensor_dims(operator, access), layer=of.name)
            box_of = dict(zip(layout.devices, layout.boxes, strict=True))
            kernels = {axis.kernel for axis in access.index_map if isinstance(axis, Window)}
            if any(of.splits[kernel] > 1 for kernel in kernels):
                continue  # a part of a kernel reads a window of its own, which the drawing leaves out
            part_of = _parts(layer, tensor, order)
            for a, b in product(order, order):
                assert (part_of[a] == part_of[b]) == (box_of[a] == box_of[b])


def _parts(layer: dict[str, Any], tensor: dict[str, Any], order: list[int]) -> dict[int, tuple[int, ...]]:
    """Return the part of a tensor on each device, as the interface says that it is to be read."""
    split = [position for position, factor in enumerate(layer["splits"]) if factor > 1]
    digits = product(*(range(layer["splits"][position]) for position in split), range(layer["replicas"]))
    found = {}
    for device, digit in zip(order, digits, strict=True):
        at = dict(zip(split, digit, strict=False))
        found[device] = tuple(at[position] for dim in tensor["dims"] for position in dim["by"])
    return found


def test_parts_of_a_tensor_are_the_splits_of_its_dims() -> None:
    plan = random_costed_plan("alexnet", 0)
    for operator, layer in zip(plan.graph.operators, only(plan, explains=False)["layers"], strict=True):
        for access, tensor in zip((*operator.reads, *operator.writes), layer["tensors"], strict=True):
            splits = plan[layer["name"]].splits
            assert prod(dim["parts"] for dim in tensor["dims"]) == prod(splits[dim] for dim in access_dims(access))


@pytest.mark.parametrize("name", NAMES)
def test_every_layer_and_edge_is_drawn(name: str) -> None:
    plan = small_plan(name, 8)
    drawn = only(plan, explains=False)["drawings"]
    for which in ("folded", "full"):
        members = [layer for vertex in drawn[which]["vertices"] for layer in vertex["members"]]
        assert sorted(members) == list(range(len(plan.layers)))
        edges = [number for edge in drawn[which]["edges"] for number in edge["edges"]]
        assert sorted(edges) == list(range(len(plan.graph.edges)))
        for vertex in drawn[which]["vertices"]:
            assert 0 <= vertex["x"] - vertex["w"] / 2 <= vertex["x"] + vertex["w"] / 2 <= drawn[which]["width"] + 0.2
            assert vertex["count"] == len(vertex["members"])
    assert len(drawn["full"]["vertices"]) == len(plan.layers)
    for block in drawn["folded"]["blocks"]:
        inside = [
            vertex
            for vertex in drawn["folded"]["vertices"]
            if block["x"] <= vertex["x"] <= block["x"] + block["w"]
            and block["y"] <= vertex["y"] <= block["y"] + block["h"]
        ]
        assert {vertex["count"] for vertex in inside} >= {block["count"]}


def test_many_devices_are_shown_by_node() -> None:
    plan = search(small_graph("alexnet"), 16)
    assert only(plan, explains=False)["traffic"]["label"] == "device"
    many = search(small_graph("alexnet"), 128, options=SearchOptions(keep_batch=True))
    traffic = only(many, explains=False)["traffic"]
    size = load_machine("1080ti").levels[0].num_devices
    assert (traffic["groups"], traffic["group_size"]) == (128 // size, size)
    assert traffic["label"] == load_machine("1080ti").levels[0].name
    assert sum(size for *_, size in traffic["bytes"]) == sum(flow.total_bytes for flow in flows(many))


def test_where_no_program_could_be_laid_out_the_predicted_bytes_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_plan: Plan) -> None:
        raise EmitError("no mesh")

    plan = small_plan("rnnlm", 8)
    monkeypatch.setattr("pase.analysis.figures.step_flows", refuse)
    found = only(plan, explains=False)
    assert found["moved_are"] == BUSIEST
    assert {layer["moved_bytes"] for layer in found["layers"]} == {None}
    assert found["traffic"] is None
    transfers = [transfer for layer in plan.layers for transfer in layer.transfers]
    forward = {(layer.name, t.input): round(t.forward_bytes) for layer in plan.layers for t in layer.transfers}
    assert len(transfers) >= len(found["edges"])
    for edge, of in zip(found["edges"], plan.graph.edges, strict=True):
        assert edge["forward_bytes"] == forward[of.consumer, of.input]


def test_it_says_why() -> None:
    plan = small_plan("rnnlm", 8)
    found = only(plan)
    assert found["why_note"] == ""
    for layer in found["layers"]:
        assert layer["why"].startswith(f"{layer['why_of']}: ")
        if layer["runner_up"] is not None:
            assert layer["runner_up"]["splits"] != layer["splits"]
            assert layer["runner_up"]["relative"] == pytest.approx(layer["runner_up"]["difference"] / plan.total_cost)


def test_it_says_what_stands_in_the_way_of_saying_why() -> None:
    plan = small_plan("rnnlm", 8)
    first, *rest = plan.layers
    odd = replace(first, splits=dict.fromkeys(first.splits, 1) | {next(iter(first.splits)): 8, "d": 3})
    found = only(replace(plan, layers=(odd, *rest), exact=False))
    assert "nothing to compare it with" in found["why_note"]
    assert {layer["why"] for layer in found["layers"]} == {None}


def test_the_same_plans_give_the_same_document() -> None:
    plans = small_plan("alexnet", 8), data_parallel_plan("alexnet", 8, "paper")
    first, second = document(*plans), document(*plans)
    assert json.dumps(first) == json.dumps(second)
    assert [plan["name"] for plan in first["plans"]] == ["plan 0", "plan 1"]


def test_names_of_any_kind_are_kept_as_they_are() -> None:
    plan = hostile_plan()
    found = only(plan)
    assert [layer["name"] for layer in found["layers"]] == [layer.name for layer in plan.layers]
    assert json.loads(json.dumps(found)) == found


def test_a_plan_in_stages_says_what_each_stage_does() -> None:
    plan = staged_plan()
    found = only(plan, explains=False)
    assert (found["micro_batches"], found["schedule"], found["num_groups"]) == (4, "1f1b", 2)
    assert found["cost_parts"] == ["compute", "recompute", "communication", "re-sharding"]
    assert [name for name, _ in found["step_parts"]] == [*found["cost_parts"], "waiting"]
    assert sum(cost for _, cost in found["step_parts"]) == pytest.approx(plan.total_cost)
    for layer, of in zip(found["layers"], plan.layers, strict=True):
        assert (layer["state"], layer["is_recomputed"], layer["stage"]) == (of.state, of.is_recomputed, of.stage)
        assert sum(layer["costs"]) + layer["overlapped"] == pytest.approx(of.layer_cost + of.transfer_cost)
        assert layer["costs"][1] > 0 or not of.is_recomputed or of.kind == "fan_out"
        assert layer["costs"][1] == 0 or of.is_recomputed
    stages = found["stages"]
    assert stages["step_time_s"] == pytest.approx(plan.total_cost, rel=0.05)
    first, second = stages["stages"]
    assert (first["layers"][0], first["devices"], second["devices"]) == (0, [0, 3], [4, 7])
    assert second["layers"] == [first["layers"][1] + 1, len(plan) - 1]
    assert stages["num_passes"] == len(stages["passes"])
    for one in stages["stages"]:
        own = [until - begin for stage, _, _, begin, until in stages["passes"] if stage == one["stage"]]
        assert sum(own) == pytest.approx(one["busy_s"])
        assert one["busy_s"] + one["waiting_s"] == pytest.approx(stages["step_time_s"])


def test_a_plan_in_stages_says_why() -> None:
    plan = free_plan()
    found = explain(plan)
    for layer, own in zip(only(plan)["layers"], plan, strict=True):
        assert layer["why"] == found[layer["why_of"]].reason
        assert sum(part["cost"] for part in layer["parts"]) == pytest.approx(own.layer_cost)
        assert layer["runner_up"]["state"] == "replicated"


def test_bytes_of_a_plan_in_stages_are_those_of_its_programs() -> None:
    plan = staged_plan()
    found = only(plan, explains=False)
    total = sum(size for *_, size in found["traffic"]["bytes"])
    assert total == sum(step_bytes(plan).values()) == found["moved_bytes"]
    crossing = [
        edge
        for edge in found["edges"]
        if found["layers"][edge["from"]]["stage"] != found["layers"][edge["to"]]["stage"]
    ]
    between = sum(size for sender, receiver, size in found["traffic"]["bytes"] if (sender < 4) != (receiver < 4))
    assert sum(edge["forward_bytes"] + edge["backward_bytes"] for edge in crossing) <= between


def test_a_long_step_is_shown_from_its_beginning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pase.views.reports.document.MOST_PASSES", 7)
    stages = only(staged_plan(), explains=False)["stages"]
    assert len(stages["passes"]) == 7 < stages["num_passes"]
