"""`pase calibrate`: what it prints and writes, its errors, and once for real."""

import json
import sys
import tomllib
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from pase.calibration import child, measured
from pase.calibration.measured import Samples, calibrate, measured_machine
from pase.cli import calibrate as command
from pase.errors import CalibrationError, ProgramError
from pase.machine import load_machine, machine_schema, parse_machine
from pase.targets.training.options import GPU, DeviceChoice
from tests.calibration.synthetic import TRUE, made, synthetic
from tests.cli.conftest import Command


@pytest.fixture
def choices(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What the command asked to be measured: it gets synthetic samples."""
    asked: list[tuple[Any, ...]] = []

    def measured(*choice: Any, **_: Any) -> Samples:
        asked.append(choice)
        return synthetic(num_devices=choice[0] or 2)

    monkeypatch.setattr(command, "calibrate", measured)
    return asked


def test_the_file_is_one_that_search_takes(pase: Command, choices: list[tuple[Any, ...]], tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    finished = pase("calibrate", "--devices", 4, "--quick", "-o", path)
    assert finished.status == 0
    assert choices == [(4, DeviceChoice(), "quick")]
    assert f"machine written to {path}; try: pase search alexnet -p 4 --machine {path}" in finished.err
    assert [p.name for p in tmp_path.iterdir()] == ["mine.toml"]
    assert load_machine(str(path)).name == "mine"
    Draft202012Validator(json.loads(machine_schema())).validate(tomllib.loads(path.read_text(encoding="utf-8")))
    assert "error of the fit   0%" in finished.out
    assert "of all-reduces     5" in finished.out or "of all-reduces     4" in finished.out
    assert max(map(len, finished.out.splitlines())) <= 100
    searched = pase("search", "lenet5", "-p", 4, "-b", 8, "--machine", path)
    assert searched.status == 0
    assert "4 × made up (mine)" in searched.out


def test_without_a_file_the_machine_goes_to_standard_output(pase: Command, choices: list[tuple[Any, ...]]) -> None:
    finished = pase("calibrate")
    assert (finished.status, finished.err) == (0, "")
    assert choices == [(None, DeviceChoice(), "full")]
    assert parse_machine(finished.out, source="t").levels[0].num_devices == 2


def test_json_has_the_samples_and_the_errors(pase: Command, choices: list[tuple[Any, ...]]) -> None:
    document = json.loads(pase("calibrate", "--json").out)
    assert list(document) == ["machine", "link", "all_reduces", "all_reduce_error", "samples", "time_s", "output"]
    assert Draft202012Validator(json.loads(machine_schema())).is_valid(document["machine"])
    assert set(document["link"]) == {"latency_s", "bandwidth_bytes_per_s", "relative_error"}
    for row in document["all_reduces"]:
        assert row["relative_error"] == pytest.approx(row["predicted_s"] / row["measured_s"] - 1)
    assert len(document["samples"]["copies"]) == len(synthetic().copies)


def test_failures_of_the_measuring_process_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(_source: str, _arguments: list[str]) -> Any:
        yield {"event": "text", "text": "hello"}
        raise ProgramError("2 GPUs are needed and TensorFlow found none")

    monkeypatch.setattr(measured, "program_events", failing)
    with pytest.raises(
        CalibrationError, match="the machine was not measured: 2 GPUs are needed and TensorFlow found none"
    ):
        calibrate(device=DeviceChoice(kind=GPU))
    monkeypatch.setattr(measured, "program_events", lambda _source, _arguments: iter([]))
    with pytest.raises(CalibrationError, match="ended without a result"):
        calibrate()
    broken = {"event": "measured", "samples": {"kind": "CPU"}}
    monkeypatch.setattr(measured, "program_events", lambda _source, _arguments: iter([broken]))
    with pytest.raises(CalibrationError, match="what was measured: device_name is missing"):
        calibrate()


@pytest.mark.slow
def test_this_machine_is_measured() -> None:
    told: list[tuple[str, float]] = []
    samples = calibrate(2, effort="glance", on_progress=lambda what, done: told.append((what, done)))
    assert samples.num_devices == 2
    assert samples.memory_bytes > 2**20
    assert [done for _, done in told] == sorted(done for _, done in told)
    assert {what for what, _ in told} >= {
        "copying between devices",
        "adding up over devices",
        "reading and writing memory",
    }
    machine = measured_machine(samples, date="2026-01-31").machine
    assert set(machine.device.peak_flop_per_s) == {"float32", "float64"}
    assert 1e6 < machine.peak_flop_per_s() < 1e15
    assert 1e6 < machine.levels[0].bandwidth_bytes_per_s < 1e13
    assert len(machine.levels_for(2)) == 1


def _child(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["calibrate.py", "--gpu-memory=1024", "--effort=glance", "--json", *arguments])
    child.main()


def test_the_measuring_process_reports_lines_of_json(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(child, "MOST_CPU_DEVICES", 3)
    monkeypatch.setattr(child.os, "sched_getaffinity", lambda _: set(range(64)))
    _child(monkeypatch)
    *told, last = map(json.loads, capsys.readouterr().out.splitlines())
    assert {event["event"] for event in told} == {"progress"}
    assert last["event"] == "measured"
    assert last["samples"]["num_devices"] == 3
    assert last["samples"]["device_name"].endswith("(one of 3 virtual devices)")


def test_the_measuring_process_says_in_a_line_what_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pase.targets.mesh_tensorflow.runtime.devices.physical_gpus", lambda: ())
    with pytest.raises(SystemExit, match=r"^error: 2 GPUs are needed and TensorFlow found none"):
        _child(monkeypatch, "--device=GPU")


def test_memory_is_that_which_the_process_may_use(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    limit = tmp_path / "memory.max"
    monkeypatch.setattr(measured, "_MEMORY_LIMIT", limit)
    _, whole = child._described_cpu(None, 1)
    limit.write_text("max\n")
    assert child._described_cpu(None, 1)[1] == whole
    limit.write_text(f"{2**20}\n")
    assert child._described_cpu(None, 4)[1] == 2**18


def test_a_gpu_is_described_by_its_driver_and_the_least_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    listed = [
        SimpleNamespace(device_type="CPU", memory_limit_bytes=1),
        SimpleNamespace(device_type="GPU", memory_limit_bytes=300),
        SimpleNamespace(device_type="GPU", memory_limit_bytes=200),
    ]
    session = nullcontext(SimpleNamespace(list_devices=lambda: listed))
    details = {"a": {"device_name": "first"}, "b": {"device_name": "second"}}
    fake = SimpleNamespace(
        config=SimpleNamespace(
            experimental=SimpleNamespace(list_physical_devices=lambda _: ["a", "b"], get_device_details=details.get)
        ),
        Graph=lambda: SimpleNamespace(as_default=nullcontext),
        Session=lambda **_: session,
    )
    monkeypatch.setattr(child, "tf", fake)
    devices = SimpleNamespace(visible_gpus=(1, 0), config=lambda: None)
    assert child._described_gpu(devices, 2) == ("second", 200)


def test_kernels_of_this_device(pase: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Times and figures are made up; the machine keeps what another has of links and peaks."""
    kernels = pytest.importorskip("pase.calibration.kernels")
    monkeypatch.setattr(kernels, "measure_kernels", lambda *_: tuple(made()))
    monkeypatch.setattr(
        kernels, "fit_kernels", lambda samples, *_: replace(TRUE, samples=tuple(samples), error=0.01, beyond=None)
    )
    path = tmp_path / "mine.toml"
    finished = pase("calibrate", "--kernels", "--machine", "v100", "-o", path)
    assert finished.status == 0
    assert f"machine written to {path}; try: pase search MODEL --machine {path} --cost-model step" in finished.err
    assert "error of the fit" in finished.out
    assert "attention" in finished.out
    assert max(map(len, finished.out.splitlines())) <= 100
    found = load_machine(str(path))
    assert found.kernels is not None
    assert len(found.kernels.samples) == len([*made()])
    assert (found.device, found.levels) == (load_machine("v100").device, load_machine("v100").levels)
    Draft202012Validator(json.loads(machine_schema())).validate(tomllib.loads(path.read_text(encoding="utf-8")))
    searched = pase("search", "lenet5", "-p", 4, "-b", 8, "--machine", path, "--cost-model", "step", "--json")
    assert searched.status == 0
    alone = pase("calibrate", "--kernels", "--json")
    assert alone.status == 0
    document = json.loads(alone.out)
    assert len(document["samples"]) == len([*made()])
    assert "samples" not in document["machine"]["kernels"]
