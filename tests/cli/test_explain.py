"""`pase explain`: figures that agree with the plan, with one another and with what `pase run` counts."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Command
from tests.cli.processes import in_pipe

# Devices this slow are worth using even for tiny layers.
MLP = ("mlp", "-b", "16", "--arg", "inputs=16", "--arg", "hidden=32", "--arg", "classes=8", "--flops", "1e9")


@pytest.fixture
def plan(pase: Command, tmp_path: Path) -> Path:
    path = tmp_path / "plan.json"
    assert pase("search", *MLP, "-p", "4", "-o", path).status == 0
    return path


def explained(pase: Command, *arguments: object) -> dict[str, Any]:
    finished = pase("explain", *arguments, "--json")
    assert (finished.status, finished.err) == (0, "")
    document: dict[str, Any] = json.loads(finished.out)
    return document


def test_costs_are_those_of_the_plan(pase: Command, plan: Path) -> None:
    document = explained(pase, plan)
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
    document = explained(pase, plan)
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
    whole, document = explained(pase, plan), explained(pase, plan, "fc2")
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


def test_the_whole_plan_is_a_table(pase: Command, plan: Path) -> None:
    shown = pase("explain", plan)
    assert (shown.status, shown.err) == (0, "")
    header, *rows = shown.out.splitlines()
    assert re.split(r"  +", header)[:5] == ["layer", "configuration", "compute", "communication", "transfers"]
    assert [row.split()[0] for row in rows[:4]] == ["fc1", "fc2", "fc3", "softmax"]
    assert re.search(r"^device order ", shown.out, re.MULTILINE)


def test_nodes_are_told_apart(pase: Command, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    assert pase("search", "alexnet", "-p", "16", "-o", path).status == 0
    document = explained(pase, path)
    assert document["levels"] == [{"name": "node", "devices": 8}, {"name": "cluster", "devices": 0}]
    within, across = document["placements"][0]["layer_bytes_by_level"]
    assert within > 0
    assert across > 0
    assert "edges across nodes" in pase("explain", path).out


def test_a_layer_that_is_not_there(pase: Command, plan: Path) -> None:
    finished = pase("explain", plan, "fc9")
    assert (finished.status, finished.out) == (1, "")
    assert finished.err.startswith("pase: unknown layer 'fc9': did you mean 'fc")


@pytest.mark.slow
def test_what_is_explained_is_what_a_run_moves(pase: Command, plan: Path, tmp_path: Path) -> None:
    document = explained(pase, plan)
    finished = in_pipe("run", "plan.json", "--steps", "1", "--measure", "--json", folder=tmp_path)
    assert finished.returncode == 0, finished.stderr
    result = json.loads(finished.stdout)
    rows = [*result["edges"], *result["layers"]]
    ours = document["placements"][0]
    assert result["predicted_bytes"] == sum(row["predicted_bytes"] for row in rows)
    assert result["predicted_bytes"] == ours["edge_bytes"] + ours["layer_bytes"]
    assert result["measured_bytes"] == sum(row["measured_bytes"] for row in rows)
    assert all(row["measured_bytes"] <= row["predicted_bytes"] for row in rows)
    assert result["host_bytes"] > 0
    for row in result["edges"]:
        (edge,) = (e for e in document["edges"] if (e["producer"], e["consumer"]) == (row["producer"], row["consumer"]))
        assert edge["placements"][0]["bytes"] == row["predicted_bytes"]
    for row in rows:
        assert row["measured_bytes"] == sum(row[phase]["measured_bytes"] for phase in ("forward", "backward", "update"))
