"""`pase explain`: figures that agree with the plan and with one another."""

import json
import re
from dataclasses import replace
from math import inf
from pathlib import Path

import pytest

from pase import search
from pase.analysis.explanation import ExplainOptions, SchemeOutcome, explain
from pase.planning.plan_file import read_plan, write_plan
from pase.planning.planner import SearchOptions
from pase.planning.problems import data_parallel_choice, plan_of, problem_of
from pase.planning.stages import step_bytes
from pase.solver import solve
from tests.cli.conftest import Command, document_of
from tests.networks import limited_staged_plan
from tests.plain_memory import plain_memory

# Devices this slow are worth using even for tiny layers.
MLP = ("mlp", "-b", "16", "--arg", "inputs=16", "--arg", "hidden=32", "--arg", "classes=8", "--flops", "1e9")


@pytest.fixture
def plan(pase: Command, tmp_path: Path) -> Path:
    path = tmp_path / "plan.json"
    assert pase("search", *MLP, "-p", "4", "-o", path).status == 0
    return path


def test_costs_are_those_of_the_plan(pase: Command, plan: Path) -> None:
    document = document_of(pase, "explain", plan)
    written = json.loads(plan.read_text(encoding="utf-8"))
    assert document["num_devices"] == 4
    assert [layer["name"] for layer in document["layers"]] == [layer["name"] for layer in written["layers"]]
    for layer, own in zip(document["layers"], written["layers"], strict=True):
        assert layer["splits"] == own["splits"]
        assert layer["devices"] == own["devices"]
        assert layer["memory_bytes"] == own["memory_bytes"]
    total = sum(
        layer["compute_cost"] + layer["communication_cost"] + layer["transfer_cost"] for layer in document["layers"]
    )
    assert total == pytest.approx(written["total_cost"])


def test_bytes_add_up(pase: Command, plan: Path) -> None:
    document = document_of(pase, "explain", plan)
    names = [placement["name"] for placement in document["placements"]]
    assert names == ["plan", "greedy", "device order"]
    for i, placement in enumerate(document["placements"]):
        assert placement["edge_bytes"] == sum(edge["placements"][i]["bytes"] for edge in document["edges"])
        assert placement["layer_bytes"] == sum(layer["placements"][i]["bytes"] for layer in document["layers"])
        assert placement["layer_bytes"] == sum(placement["layer_bytes_by_level"])
        assert placement["edge_bytes"] == sum(placement["edge_bytes_by_level"])
    ours, _, plain = (placement["edge_bytes"] for placement in document["placements"])
    assert ours <= plain
    assert document["placements"][0]["layer_bytes"] > 0


def test_a_layer_alone(pase: Command, plan: Path) -> None:
    whole, document = document_of(pase, "explain", plan), document_of(pase, "explain", plan, "fc2")
    assert document["layers"] == [layer for layer in whole["layers"] if layer["name"] == "fc2"]
    assert document["edges"] == [edge for edge in whole["edges"] if "fc2" in (edge["producer"], edge["consumer"])]
    assert len(document["edges"]) == 2
    shown = pase("explain", plan, "fc2")
    assert (shown.status, shown.err) == (0, "")
    assert shown.out.startswith("fc2 (dense) of mlp on 4 devices\n")
    # Every device stands beside the part that it holds.
    held = re.findall(r"^(?:whole|\w+=\d.*?)  +([\d, ]+)$", shown.out, re.MULTILINE)
    assert sorted(int(device) for row in held for device in row.split(",")) == [0, 1, 2, 3]
    for title in ("as placed by the plan", "under the paper's greedy assignment", "on the devices in order"):
        assert title in shown.out
    assert re.search(r"^fc1 → fc2 ", shown.out, re.MULTILINE)


def test_costs_and_bytes_alone_are_a_table(pase: Command, plan: Path) -> None:
    shown = pase("explain", plan, "--no-why")
    assert (shown.status, shown.err) == (0, "")
    header, *rows = shown.out.splitlines()
    assert re.split(r"  +", header)[:5] == ["layer", "configuration", "compute", "communication", "transfers"]
    assert [row.split()[0] for row in rows[:4]] == ["fc1", "fc2", "fc3", "softmax"]
    assert re.search(r"^device order ", shown.out, re.MULTILINE)


def test_nodes_are_told_apart(pase: Command, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    assert pase("search", "alexnet", "-p", "16", "-o", path).status == 0
    document = document_of(pase, "explain", path)
    assert document["levels"] == [{"name": "node", "devices": 8}, {"name": "cluster", "devices": 0}]
    within, across = document["placements"][0]["layer_bytes_by_level"]
    assert within > 0
    assert across > 0
    assert "edges across nodes" in pase("explain", path).out


# -- why


def test_why_comes_first(pase: Command, plan: Path) -> None:
    shown, document = pase("explain", plan), document_of(pase, "explain", plan)
    assert (shown.status, shown.err) == (0, "")
    lines = shown.out.splitlines()
    assert lines[0] == "mlp on 4 × NVIDIA GeForce GTX 1080 Ti (1080ti (overridden))"
    assert "proven optimal   (cost model paper)" in lines[1]
    header, rows = re.split(r"  +", lines[4]), [re.split(r"  +", line) for line in lines[5:9]]
    assert header == [
        *("layer", "configuration", "what binds", "runner-up", "costs"),
        *("flips below at r", "flips above at r"),
    ]
    assert "Bytes that a step moves" in shown.out
    reasons = lines[lines.index("Why:") + 1 :]
    for row, reason, layer in zip(rows, reasons, document["layers"], strict=False):
        why = layer["why"]
        assert row[0] == layer["name"]
        assert row[2] == f"{why['binding']} {why['binding_share']:.0%}"
        assert reason == f"  {why['reason']}"
        difference = why["runner_up"]["relative_difference"]
        assert (
            row[4] == "the same"
            if why["runner_up"]["is_tie"]
            else float(row[4].rstrip("%")) / 100 == pytest.approx(difference, rel=0.06)
        )
        for cell, flip in zip(row[5:], (why["flips"]["below"], why["flips"]["above"]), strict=True):
            assert (cell == "never") == (flip is None)
            if flip:
                assert float(cell.partition(":")[0].replace(",", "")) == pytest.approx(flip["flop_per_byte"], rel=0.01)


def test_why_of_a_layer_in_full(pase: Command, plan: Path) -> None:
    shown, document = pase("explain", plan, "fc2"), document_of(pase, "explain", plan, "fc2")
    why = document["layers"][0]["why"]
    assert f"Why: {why['reason']}." in shown.out
    for part in why["parts"]:
        assert re.search(rf"^{part['name']} +[\d.]+ .?FLOP +[\d.]+%", shown.out, re.MULTILINE)
    total = sum(part["cost"] for part in why["parts"])
    assert why["binding_share"] == pytest.approx(max(part["cost"] for part in why["parts"]) / total)
    assert re.search(r"^  runner-up +\S", shown.out, re.MULTILINE)
    assert re.search(r"^    all others kept +\S", shown.out, re.MULTILINE)
    assert "with faster links" in shown.out
    assert "with slower links" in shown.out


def test_a_certificate_is_part_of_the_document(pase: Command, plan: Path) -> None:
    document = document_of(pase, "explain", plan)
    written = json.loads(plan.read_text(encoding="utf-8"))
    assert document["total_cost"] == pytest.approx(written["total_cost"])
    assert document["optimum"] == {"total_cost": pytest.approx(written["total_cost"]), "exact": True}
    assert document["is_optimal"] is True
    assert document["flips_searched"] == {"from_scale": 1 / 32, "to_scale": 32}
    for key in ("optimum", "is_optimal", "flip_range"):
        assert key not in document_of(pase, "explain", plan, "--no-why")


def test_sensitivity_says_what_does_not_matter(pase: Command, plan: Path) -> None:
    shown, document = pase("explain", plan, "--sensitivity"), document_of(pase, "explain", plan, "--sensitivity")
    assert "Costs by paper do not depend on: device memory bandwidth, node latency" in shown.out
    used = [one for one in document["sensitivity"] if one["is_used"]]
    assert {(one["figure"], one["factor"]) for one in used} >= {("node bandwidth", 0.8), ("device peak FLOP/s", 1.2)}
    for one in used:
        assert re.search(rf"^{re.escape(one['figure'])} +[+-]20% ", shown.out, re.MULTILINE)
    assert "sensitivity" not in document_of(pase, "explain", plan)


def test_a_plan_that_is_not_the_best_is_explained_as_such(pase: Command, plan: Path) -> None:
    worse = data_parallel_file(plan)
    document = document_of(pase, "explain", worse)
    best = json.loads(plan.read_text(encoding="utf-8"))["total_cost"]
    assert document["is_optimal"] is False
    assert document["optimum"] == {"total_cost": pytest.approx(best), "exact": True}
    assert not all(layer["why"]["is_best"] for layer in document["layers"])
    shown = pase("explain", worse)
    assert (shown.status, shown.err) == (0, "")
    assert "not optimal: the optimum costs" in shown.out
    assert "is not the best" in shown.out
    name = next(layer["name"] for layer in document["layers"] if not layer["why"]["is_best"])
    assert re.search(
        r"^  this configuration +no cheapest strategy has it", pase("explain", worse, name).out, re.MULTILINE
    )


def data_parallel_file(plan: Path) -> Path:
    """Write the plan with data parallelism for its strategy, and return where."""
    found = read_plan(plan)
    problem = problem_of(found.graph, found.num_devices, found.machine, found.cost_model)
    choice = data_parallel_choice(problem)
    solution = replace(solve(problem.tables), choice=choice, cost=problem.tables.evaluate(choice), exact=False)
    path = plan.with_name("data_parallel.json")
    write_plan(plan_of(problem, solution, found.machine, found.cost_model, time_s=0.0), path)
    return path


def test_memory_binds(pase: Command, plan: Path) -> None:
    found = read_plan(plan)
    free = found.memory.total_bytes
    options = SearchOptions(device_memory_bytes=free - 1)
    limited = search(found.graph, found.num_devices, machine=found.machine, options=options)
    path = plan.with_name("limited.json")
    write_plan(limited, path)
    document = document_of(pase, "explain", path)
    bound = [layer for layer in document["layers"] if layer["why"]["memory"]]
    assert bound
    for layer in bound:
        memory = layer["why"]["memory"]
        assert memory["limit_bytes"] == free - 1 < memory["needed_bytes"]
        assert memory["difference"] < 0
        assert "memory binds" in layer["why"]["reason"]
        if not memory["others_kept"]:
            assert memory["difference"] == pytest.approx(found.total_cost - limited.total_cost)
    # No runner-up takes more than there is.
    for layer in document["layers"]:
        other = layer["why"]["runner_up"]
        if other is not None:
            assert other["total_cost"] >= limited.total_cost * (1 - 1e-9)
            changed = {one["name"]: one["splits"] for one in other["changes"]} | {layer["name"]: other["splits"]}
            splits = [changed.get(one.name, one.splits) for one in limited.layers]
            assert plain_memory(found.graph, splits, "sgd").peak().bytes < free
    header = next(line for line in pase("explain", path).out.splitlines() if line.startswith("layer "))
    assert "would save" in header
    less = document_of(pase, "explain", path, "--sensitivity")["sensitivity"]
    assert {one["figure"] for one in less if one["is_used"]} >= {"device memory limit"}
    (more,) = (one for one in less if (one["figure"], one["factor"]) == ("device memory limit", 1.2))
    assert more["relative_time_change"] == pytest.approx(found.total_cost / limited.total_cost - 1)


# -- plans in stages


@pytest.fixture
def limited(monkeypatch: pytest.MonkeyPatch) -> str:
    """Have every file be a small plan in stages within a memory limit."""
    monkeypatch.setattr("pase.cli.explain.chosen_plan", lambda *_, **__: limited_staged_plan())
    return "stages.json"


def test_a_plan_in_stages_says_what_bounds_the_step(pase: Command, limited: str) -> None:
    shown = pase("explain", limited, "--time-limit", "0.01")
    assert (shown.status, shown.err) == (0, "")
    for text in ("longest stage ", "devices wait ", "limited by              memory: ", "\nlayer ", "does not fit"):
        assert text in shown.out
    header = next(line for line in shown.out.splitlines() if line.startswith("layer "))
    assert re.split(r"  +", header) == [
        *("layer", "configuration", "mode", "what binds", "runner-up", "costs"),
        *("other mode", "costs", "does not fit", "would save"),
    ]
    document = document_of(pase, "explain", limited, "--time-limit", "0.01")
    assert (document["step"]["micro_batches"], document["step"]["limited_by"]) == (4, "memory")
    plan = limited_staged_plan()
    for layer, own in zip(document["layers"], plan, strict=True):
        assert layer["why"]["reason"].startswith(f"{layer['why']['like']}: ")
        modes = layer["why"].get("modes", [])
        assert [mode["is_recomputed"] for mode in modes if mode["is_own"]] == [own.is_recomputed] * bool(modes)
    (placement,) = document["placements"]
    assert placement["edge_bytes"] + placement["layer_bytes"] == sum(step_bytes(plan).values())


def test_a_layer_of_a_stage_alone(pase: Command, limited: str) -> None:
    plan = limited_staged_plan()
    (name, *_) = (layer.name for layer in plan if layer.is_recomputed)
    shown = pase("explain", limited, name, "--time-limit", "0.01")
    assert (shown.status, shown.err) == (0, "")
    assert "recomputed" in shown.out
    assert f"Why: {name}: " in shown.out
    assert re.search(r"^\w+, recomputed +the plan's +the plan's .* yes$", shown.out, re.MULTILINE)
    held = re.findall(r"^(?:whole|\w+=\d.*?)  +([\d, ]+)$", shown.out, re.MULTILINE)
    assert {int(device) for row in held for device in row.split(",")} == {*plan[name].devices}
    (layer,) = document_of(pase, "explain", limited, name, "--time-limit", "0.01")["layers"]
    found = explain(plan, [name], options=ExplainOptions(time_limit_s=0.01))[name]
    told = [
        (mode["state"], mode["is_recomputed"], mode["others_kept"]["memory_bytes"]) for mode in layer["why"]["modes"]
    ]
    assert told == [(one.choice.state, one.choice.is_recomputed, one.memory_bytes) for one in found.outcomes]


def test_other_schemes_are_searched_where_they_are_asked_for(
    pase: Command, staged: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = SchemeOutcome(stages=2, micro_batches=4, chunks=1, step_s=1e-3, bound_s=9e-4, is_own=True)
    schemes = (own, replace(own, stages=4, step_s=None, bound_s=inf, is_own=False))
    asked = "explain", staged, "tokens", "--no-why"
    assert "schemes" not in document_of(pase, *asked)
    monkeypatch.setattr("pase.cli.explain.other_schemes", lambda *_, **__: schemes)
    told = document_of(pase, *asked, "--schemes")["schemes"]
    assert [(one["stages"], one["is_own"], one["bound_s"]) for one in told] == [(2, True, 9e-4), (4, False, None)]
    shown = pase(*asked, "--schemes").out
    assert "With other numbers of stages" in shown
    assert re.search(r"^ +2 +4 +1\.00 ms +the plan's", shown, re.MULTILINE)
    assert re.search(r"^ +4 +4 +none is known to fit +nothing fits", shown, re.MULTILINE)


def test_schemes_are_of_cost_models_with_time(pase: Command, plan: Path) -> None:
    refused = pase("explain", plan, "--schemes")
    assert refused.status == 1
    assert "cost model 'paper' counts FLOP and bytes, and knows no time" in refused.err
