"""From a model to a program that trains: `search`, `emit` and `run`, each as a user calls it."""

import ast
import json
import re
import subprocess
import sys
from math import prod
from pathlib import Path
from typing import Any

import pytest

from pase.targets.mesh_tensorflow.runtime.devices import physical_gpus
from tests.cli.conftest import Command, document_of
from tests.cli.processes import CLEAN, in_pipe

# Devices this slow are worth using even for tiny layers, so that there is something to move between them.
MLP = (
    "mlp",
    "-p",
    "4",
    "-b",
    "8",
    *["--arg", "inputs=8", "--arg", "hidden=16", "--arg", "classes=4", "--flops", "1e9"],
)
LENET = ("lenet5", "-p", "4", "-b", "8", "--flops", "1e9")


def test_emit_writes_a_program_that_is_read_as_python(pase: Command, tmp_path: Path) -> None:
    plan, program = tmp_path / "plan.json", tmp_path / "train.py"
    assert pase("search", *MLP, "-o", plan).status == 0
    shown = pase("emit", plan)
    assert (shown.status, shown.err) == (0, "")
    ast.parse(shown.out)
    written = pase("emit", plan, "-o", program)
    assert (written.status, written.out) == (0, "")
    assert program.read_text(encoding="utf-8") == shown.out
    assert str(program) in written.err
    document = json.loads(pase("emit", plan, "--json").out)
    assert document["source"] == shown.out
    blocks = re.findall(r"^ *# -- (\S+) ", shown.out, re.MULTILINE)
    assert blocks == [layer["name"] for layer in json.loads(plan.read_text(encoding="utf-8"))["layers"]]


def test_emit_keeps_the_old_program_when_the_plan_is_no_plan(pase: Command, tmp_path: Path) -> None:
    plan, program = tmp_path / "plan.json", tmp_path / "train.py"
    plan.write_text("{", encoding="utf-8")
    program.write_text("mine", encoding="utf-8")
    finished = pase("emit", plan, "-o", program)
    assert finished.status == 1
    assert program.read_text(encoding="utf-8") == "mine"


SHOWN_OF_A_PLAN = {
    "emit": [],
    "explain": ["--json"],
    "export": ["--to", "dot"],
    "report": ["--json", "--no-why"],
    "simulate": ["--json"],
}


@pytest.mark.parametrize("command", SHOWN_OF_A_PLAN)
def test_a_model_is_taken_wherever_a_plan_is(pase: Command, tmp_path: Path, command: str) -> None:
    """It gives what the plan of its search gives, but for what tells how long that took and what the file is called."""
    plan = tmp_path / "lenet5.json"
    assert pase("search", *LENET, "-o", plan).status == 0
    of_plan, of_model = (pase(command, *given, *SHOWN_OF_A_PLAN[command]) for given in ([plan], LENET))
    assert (of_plan.status, of_model.status) == (0, 0), of_model.err

    def timeless(text: str) -> object:
        if not text.startswith("{"):
            return text
        # As values: a number of bytes may be written with a point or without.
        return json.loads(re.sub(r'("time_s"|"peak_memory_bytes"): [0-9.e-]+', r"\1: 0", text))

    assert timeless(of_model.out) == timeless(of_plan.out)
    without_devices = pase(command, "lenet5", *SHOWN_OF_A_PLAN[command])
    assert without_devices.status == 2
    assert "--devices is needed to search a strategy for model 'lenet5'" in without_devices.err
    unused = pase(command, plan, "--batch", "4", *SHOWN_OF_A_PLAN[command])
    assert unused.status == 0
    assert "a plan names its own model and devices" in unused.err


@pytest.mark.slow
def test_a_plan_runs_and_its_program_runs_on_its_own(pase: Command, tmp_path: Path) -> None:
    plan, program = tmp_path / "plan.json", tmp_path / "train.py"
    assert pase("search", *MLP, "-o", plan).status == 0
    options = ("--steps", "3", "--dtype", "float64", "--optimizer", "momentum")
    finished = pase("run", plan, *options, "--measure", "--json")
    assert finished.status == 0, finished.err
    result = json.loads(finished.out)
    assert {
        "losses",
        "reference_losses",
        "max_relative_difference",
        "predicted_bytes",
        "measured_bytes",
        "step_time_s",
    } <= set(result)
    assert len(result["losses"]) == len(result["reference_losses"]) == 3
    assert result["losses"] == pytest.approx(result["reference_losses"], rel=1e-12)
    assert result["max_relative_difference"] <= 1e-12
    assert result["losses"][2] != result["losses"][0]
    assert 0 < result["measured_bytes"] <= result["predicted_bytes"]
    assert result["accuracies"] == pytest.approx(result["reference_accuracies"], abs=1e-15)
    # Two hidden layers or more: what 8 inputs, 16 units and 4 classes need, once or split.
    parameters = result["parameters"]
    assert parameters["total"] == sum(prod(weight["shape"]) for weight in parameters["weights"])
    assert len(parameters["per_device"]) == len(parameters["weights"][0]["parts"]) == 4
    assert all(0 < held <= parameters["total"] for held in parameters["per_device"])
    kept = result["predicted_memory"]["optimiser_bytes"]
    assert kept == 8 * parameters["per_device"][0] == result["predicted_memory"]["weights_bytes"]
    check_bytes(result, document_of(pase, "explain", plan))

    assert pase("emit", plan, "-o", program).status == 0
    alone = subprocess.run(
        [sys.executable, program.name, *options],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        env=CLEAN,
    )
    assert alone.returncode == 0, alone.stderr
    # The same weights and data as those of `pase run`: what it prints are the same losses.
    printed = [float(loss) for loss in re.findall(r"^step \d+ +loss (\S+)", alone.stdout, re.MULTILINE)]
    assert printed == pytest.approx(result["losses"], rel=1e-7)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["plan.json", "train.py"]


def check_bytes(result: dict[str, Any], explained: dict[str, Any]) -> None:
    """What a run in float64 counts between devices is twice what is explained, of float32, edge by edge."""
    rows = [*result["edges"], *result["layers"]]
    ours = explained["placements"][0]
    assert result["predicted_bytes"] == sum(row["predicted_bytes"] for row in rows)
    assert result["predicted_bytes"] == 2 * (ours["edge_bytes"] + ours["layer_bytes"])
    assert result["measured_bytes"] == sum(row["measured_bytes"] for row in rows)
    assert all(row["measured_bytes"] <= row["predicted_bytes"] for row in rows)
    assert result["host_bytes"] > 0
    moved = {(edge["producer"], edge["consumer"]): edge["placements"][0]["bytes"] for edge in explained["edges"]}
    for row in result["edges"]:
        assert 2 * moved[row["producer"], row["consumer"]] == row["predicted_bytes"]
    for row in rows:
        assert row["measured_bytes"] == sum(row[phase]["measured_bytes"] for phase in ("forward", "backward", "update"))


@pytest.mark.slow
def test_a_model_runs_in_one_command() -> None:
    pytest.importorskip("sklearn")
    finished = in_pipe("run", *LENET, "--steps", "2", "--data", "digits", "--test-data", "digits")
    assert finished.returncode == 0, finished.stderr
    header, first, second = finished.stdout.splitlines()[:3]
    assert re.split(r"  +", header) == ["step", "loss", "on one device", "difference", "accuracy"]
    for step, row in enumerate((first, second), start=1):
        number, ours, reference, difference, accuracy = row.split()
        assert int(number) == step
        assert float(ours) == pytest.approx(float(reference), rel=1e-5)
        assert float(difference) < 1e-5
        assert 0 <= float(accuracy.removesuffix("%")) <= 100
    assert "lenet5 on 4 virtual CPU devices, float32" in finished.stdout
    assert re.search(r"^  parameters +61,706, of which each worker holds [\d,]+$", finished.stdout, re.MULTILINE)
    assert re.search(r"^weight +shape +worker 0 holds .* worker 3 holds$", finished.stdout, re.MULTILINE)
    assert re.search(r"^conv1/w +6 × 1 × 5 × 5 +all +all +all +all$", finished.stdout, re.MULTILINE)
    assert re.search(r"^  bytes between devices +[1-9].* a step predicted$", finished.stdout, re.MULTILINE)
    # 357 digits are kept to test with: 44 batches of 8.
    assert re.search(r"^ +2 +352 +", finished.stdout, re.MULTILINE)
    assert "\x1b" not in finished.stdout + finished.stderr
    assert "Traceback" not in finished.stderr
    assert "tensorflow" not in finished.stderr.lower()


@pytest.mark.skipif(bool(physical_gpus()), reason="there is a GPU")
def test_without_a_gpu_the_program_says_so(pase: Command) -> None:
    """The choice of devices reaches the program, and what it says is what is shown."""
    finished = pase("run", *MLP, "--steps", "1", "--device", "GPU")
    assert (finished.status, finished.out) == (1, "")
    assert finished.err.startswith("pase: 4 GPUs are needed and TensorFlow found none; leave out --device")
    assert len(finished.err.splitlines()) == 1
