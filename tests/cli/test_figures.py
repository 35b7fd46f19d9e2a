"""The figures of one plan agree in all of its views, and with sums that are taken here from the plan's JSON alone."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from pase import Plan, load, search
from pase.cli.search import print_plan
from pase.common.words import quantity
from pase.planning.plan_file import plan_document
from pase.views.exports import ExportOptions, export
from pase.views.reports.document import report_document
from tests.cli.conftest import Command
from tests.networks import slow_machine, small_graph, small_plan, staged_plan

MLP = {"layers": 8, "inputs": 32, "hidden": 64, "classes": 32}
STATES = {"fc1": "zero3", "fc2": "zero2", "fc3": "zero1", "fc4": "zero3"}


def _mlp(**options: Any) -> Plan:
    return search(load("mlp", batch=64, arguments=MLP), 8, machine="v100", **options)


def _imported() -> Plan:
    torch = pytest.importorskip("torch")
    layers = torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 16), torch.nn.Softmax(-1)
    return search((torch.nn.Sequential(*layers), torch.zeros(16, 16)), 4)


PLANS: Mapping[str, Callable[[], Plan]] = {
    "paper": lambda: small_plan("transformer", 8),
    "alpha_beta": lambda: search(small_graph("alexnet"), 8, machine=slow_machine(), cost_model="alpha_beta"),
    "step": lambda: search(small_graph("gpt"), 8, machine="v100", cost_model="step"),
    "stages": lambda: _mlp(cost_model="alpha_beta", stages=2, micro_batches=4),
    "micro-batches": lambda: _mlp(cost_model="step", micro_batches=4),
    "interleaved": lambda: _mlp(cost_model="step", stages=2, micro_batches=4, schedule="interleaved"),
    "zero": lambda: _mlp(cost_model="step", modes=["zero1", "zero2", "zero3"], constraints={"pin": STATES}),
    "recompute within a limit, in stages": staged_plan,
    "limit": lambda: _mlp(cost_model="alpha_beta", optimiser="adamw", device_memory_bytes=140_000),
    "pinned": lambda: search(small_graph("alexnet"), 8, constraints={"pin": {"fc1": "n=4 c=2"}}),
    "imported": _imported,
}


@cache
def plan_of(name: str) -> Plan:
    return PLANS[name]()


@cache
def report_of(name: str) -> dict[str, Any]:
    (report,) = report_document({"plan": plan_of(name)}, explains=False)["plans"]
    assert isinstance(report, dict)
    return report


Document = Mapping[str, Any]


class Sums:
    """Sums over the layers of a plan's JSON."""

    def __init__(self, plan: Plan) -> None:
        document = json.loads(json.dumps(plan_document(plan)))
        self.unit = document["cost_unit"]
        self.total = document["total_cost"]
        self.groups = document.get("num_groups", 1)
        self.micro_batches = document.get("micro_batches", 1)
        self.layers = document["layers"]
        self.gross = [layer["layer_cost"] + sum(t["cost"] for t in layer["transfers"]) for layer in self.layers]
        self.compute = sum(layer["compute_cost"] for layer in self.layers) / self.groups
        self.memory = document["memory"]["total_bytes"]
        overlappable = [layer.get("hideable_cost") or 0.0 for layer in self.layers]
        share = document.get("hidden_cost", 0.0) / (sum(overlappable) or 1)
        self.overlapped = [share * cost for cost in overlappable]
        self.is_staged = self.groups > 1 or self.micro_batches > 1 or any("state" in layer for layer in self.layers)
        self.may_overlap = document["cost_model"] == "step"


@pytest.mark.parametrize("name", PLANS)
def test_layers_and_parts_of_a_step_sum_to_its_cost(name: str) -> None:
    """In the report: of one group of devices the layers alone do, of several with the time in which these wait."""
    plan = plan_of(name)
    sums = Sums(plan)
    report = report_of(name)
    parts = dict(report["step_parts"])
    assert report["total_cost"] == sums.total
    assert sum(parts.values()) == pytest.approx(sums.total, rel=1e-9)
    assert all(cost >= 0 for cost in parts.values())
    assert parts["compute"] == pytest.approx(sums.compute, rel=1e-9)
    paid = [sum(layer["costs"]) for layer in report["layers"]]
    for layer, gross, own in zip(report["layers"], sums.gross, paid, strict=True):
        assert own + layer["overlapped"] == pytest.approx(gross, rel=1e-9, abs=1e-15)
        assert layer["share"] == pytest.approx(own / (sums.total * sums.groups), rel=1e-9)
    if not sums.is_staged:
        assert [layer["overlapped"] for layer in report["layers"]] == pytest.approx(sums.overlapped)
    if not sums.may_overlap:
        assert report["overlapped"] == 0
    if sums.groups == 1:
        assert sum(paid) == pytest.approx(sums.total, rel=1e-9)
    for group in range(sums.groups):
        own = sum(cost for cost, layer in zip(paid, sums.layers, strict=True) if _group(layer, sums) == group)
        assert own <= sums.total * (1 + 1e-9)
    assert report["overlapped"] == pytest.approx(sum(layer["overlapped"] for layer in report["layers"]) / sums.groups)
    assert report["memory"]["total_bytes"] == sums.memory


def _group(layer: Mapping[str, Any], sums: Sums) -> int:
    stage = layer.get("stage", 0)
    assert isinstance(stage, int)
    return stage % int(sums.groups)


@pytest.mark.parametrize("name", PLANS)
def test_the_table_of_a_search_has_the_same_costs_and_shares(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    plan = plan_of(name)
    sums = Sums(plan)
    report = report_of(name)
    print_plan(plan, shows_all=True)
    table, *rest = capsys.readouterr().out.split("\n\n")
    cells = [re.split(r" {2,}", line.strip()) for line in table.splitlines()[1:]]
    for row, layer, shown in zip(cells, sums.layers, report["layers"], strict=True):
        *_, own, transfer, share = row
        assert row[0] == layer["name"]
        assert own == quantity(layer["layer_cost"], sums.unit)
        assert transfer == quantity(sum(t["cost"] for t in layer["transfers"]), sums.unit)
        assert float(share.rstrip("%")) == pytest.approx(100 * shown["share"], abs=0.051)
    text = "\n\n".join(rest)
    assert f"total cost              {quantity(sums.total, sums.unit)}" in text
    assert f"({report['certificate']})" in text
    assert f"memory of a device      {quantity(sums.memory, 'B')}" in text
    if report["overlapped"]:
        assert f"overlapped              {quantity(report['overlapped'], sums.unit)} of " in text
    assert ("shares those of the time of all devices" in text) == (sums.groups > 1)
    assert (f"one of {sums.micro_batches} micro-batches" in text) == (sums.micro_batches > 1)
    assert ("Costs include communication that overlaps" in text) == (report["overlapped"] > 0)


@pytest.mark.parametrize("name", PLANS)
def test_every_view_has_the_same_bytes_and_costs(name: str, tmp_path: Path, pase: Command) -> None:
    plan_of(name).save(tmp_path / "plan.json")
    explained = json.loads(pase("explain", tmp_path / "plan.json", "--no-why", "--json").out)
    simulated = json.loads(pase("simulate", tmp_path / "plan.json", "--json").out)
    drawing = unescape(export(plan_of(name), "svg", ExportOptions(fold=False)).text)
    check_bytes(report_of(name), explained, simulated, drawing)
    check_costs(report_of(name), Sums(plan_of(name)), explained, simulated, drawing)


def check_bytes(report: Document, explained: Document, simulated: Document, drawing: str) -> None:
    edges = [edge["forward_bytes"] + edge["backward_bytes"] for edge in report["edges"]]
    within = [layer["moved_bytes"] for layer in report["layers"]]
    assert report["moved_are"] == "between all devices"
    assert report["moved_bytes"] == sum(edges) + sum(within) == sum(size for *_, size in report["traffic"]["bytes"])

    moved = explained["placements"][0]
    assert (moved["edge_bytes"], moved["layer_bytes"]) == (sum(edges), sum(within))
    assert [layer["placements"][0]["bytes"] for layer in explained["layers"]] == within

    names = [layer["name"] for layer in report["layers"]]
    of_graph = [(edge, size) for edge, size in zip(report["edges"], edges, strict=True) if not edge["is_weight"]]
    total = quantity(sum(size for _, size in of_graph), "B")
    assert f"Edges transfer {total} in a step, between all devices." in drawing
    titles = re.findall(r"<title>([^<]* → [^<]*)</title>", drawing)
    shown = (quantity(size, "B") if size else "nothing moves" for _, size in of_graph)
    ends = (f"{names[edge['from']]} → {names[edge['to']]}" for edge, _ in of_graph)
    assert sorted(titles) == sorted(f"{end}: {size}" for end, size in zip(ends, shown, strict=True))

    if "phases" in simulated:
        assert sum(phase["moved_bytes"] for phase in simulated["phases"]) == report["moved_bytes"]


def check_costs(report: Document, sums: Sums, explained: Document, simulated: Document, drawing: str) -> None:
    for layer, own, told in zip(report["layers"], sums.layers, explained["layers"], strict=True):
        assert told["share"] == layer["share"]
        assert told["hidden_cost"] == layer["overlapped"]
        assert told["memory_bytes"] == layer["memory_bytes"] == own["memory_bytes"]
        assert told["compute_cost"] == own["compute_cost"]
    assert explained["hidden_cost"] == report["overlapped"]

    assert f"total cost {quantity(sums.total, sums.unit)} a step, {report['certificate']}" in drawing
    costs = re.findall(r"^cost of a step ([^,(]*?)(?: \(.*\))?, ([^,]*) on each device", drawing, re.MULTILINE)
    expected = [
        (quantity(sum(layer["costs"]), sums.unit), quantity(layer["memory_bytes"], "B")) for layer in report["layers"]
    ]
    assert sorted(costs) == sorted(expected)

    if "stages" in simulated and sums.unit == "s":
        # Stages in turns have no closed form that holds.
        is_in_turns = len(simulated["stages"]) > sums.groups
        told = simulated["step_time_s" if is_in_turns else "closed_form_s"]
        assert told == pytest.approx(sums.total, rel=1e-9)
        busy = [0.0] * sums.groups
        for layer, own in zip(sums.layers, report["layers"], strict=True):
            busy[_group(layer, sums)] += sum(own["costs"])
        assert _by_group(simulated["stages"], sums.groups) == pytest.approx(busy, rel=1e-6)


def _by_group(stages: Sequence[Mapping[str, Any]], groups: int) -> list[float]:
    found = [0.0] * groups
    for stage in stages:
        found[stage["stage"] % groups] += stage["busy_s"]
    return found


def test_the_batch_is_that_of_the_step() -> None:
    assert dict(plan_of("stages").graph.arguments)["batch"] == 16
    assert report_of("stages")["arguments"]["batch"] == "64 (4 micro-batches of 16)"


def test_differences_of_layers_sum_to_that_of_the_totals(tmp_path: Path, pase: Command) -> None:
    plan = plan_of("step")
    plan.save(tmp_path / "a.json")
    plan.replace("fc", rest="kept", v=8).save(tmp_path / "b.json")
    found = json.loads(pase("diff", tmp_path / "a.json", tmp_path / "b.json", "--json").out)
    first, second = found["plans"]
    overlapped = second["hidden_cost"] - first["hidden_cost"]
    total = second["total_cost"] - first["total_cost"]
    assert overlapped != 0
    assert found["difference"] == total
    assert sum(layer["difference"] for layer in found["layers"]) - overlapped == pytest.approx(total, rel=1e-9)


def test_a_pinned_plan_says_at_which_links_it_changes(tmp_path: Path, pase: Command) -> None:
    """A layer changes between searches, pinned likewise, with links a little faster and a little slower than that."""
    graph, pinned = small_graph("alexnet"), {"pin": {"fc1": "n=4 c=2"}}
    plan = search(graph, 8, constraints=pinned)
    plan.save(tmp_path / "plan.json")
    explained = json.loads(pase("explain", tmp_path / "plan.json", "--json").out)
    assert explained["flips_searched"] == {"from_scale": 1 / 32, "to_scale": 32}
    why = {layer["name"]: layer["why"] for layer in explained["layers"]}
    assert why["fc1"]["reason"] == "fc1: n=4 c=2, its only configuration within the constraints"
    flips = {name: one["flips"]["above"] for name, one in why.items() if one["flips"]["above"]}
    assert "fc1" not in flips
    for name in ("conv1", "conv2"):
        for factor, expected in ((0.99, plan[name].splits), (1.01, flips[name]["splits"])):
            scale = factor * flips[name]["scale"]
            levels = plan.machine.levels
            slower = tuple(replace(a, bandwidth_bytes_per_s=a.bandwidth_bytes_per_s / scale) for a in levels)
            found = search(graph, 8, machine=replace(plan.machine, levels=slower), constraints=pinned)
            assert dict(found[name].splits) == dict(expected)
