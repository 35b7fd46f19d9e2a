"""Samples of a machine with known figures give that machine, and a file that says how it was measured."""

import json
import tomllib
from dataclasses import asdict

import pytest
from jsonschema import Draft202012Validator

from pase.calibration.measured import EFFORTS, Samples, binary, measured_machine
from pase.common.documents import DocumentSource
from pase.common.structs import read
from pase.errors import CalibrationError
from pase.machine import load_machine, machine_schema, machine_text, parse_machine
from pase.targets.training.options import GPU
from tests.calibration.synthetic import BANDWIDTH_BYTES_PER_S, LATENCY_S, synthetic


@pytest.mark.parametrize("num_devices", [2, 4])
def test_the_machine_has_the_figures_that_made_the_samples(num_devices: int) -> None:
    measured = measured_machine(synthetic(num_devices=num_devices), date="2026-01-31", name="mine")
    machine = measured.machine
    assert machine.name == "mine"
    assert machine.device.peak_flop_per_s == {"float32": 3e10, "float64": 1e10}
    assert machine.device.memory_bandwidth_bytes_per_s == 3e10
    (level,) = machine.levels
    assert level.num_devices == num_devices
    assert level.latency_s == pytest.approx(LATENCY_S, rel=1e-3)
    assert level.bandwidth_bytes_per_s == pytest.approx(BANDWIDTH_BYTES_PER_S, rel=1e-3)
    assert measured.fits[0].relative_error < 1e-9
    # For large vectors the ring is the best algorithm, and the samples take twice as long.
    assert [p.relative_error for p in measured.all_reduces] == pytest.approx([-0.5, -0.5], abs=0.02)
    assert measured.all_reduce_error == pytest.approx(0.5, abs=0.02)


def test_the_sources_say_what_was_measured_when_and_how_well_it_fits() -> None:
    machine = measured_machine(synthetic(), date="2026-01-31").machine
    device, level = machine.device.source, machine.levels[0].source
    for source in (device, level):
        assert source.startswith("measured on 2026-01-31 with TensorFlow 2.21.0, with all 2 devices at work at once")
    assert "virtual devices share the cores" in device
    assert "float32 matrix products, 10 GFLOP/s at 64 × 64, 30 GFLOP/s at 9 × 9" in device
    assert "30 GB/s at 1 MiB" in device
    assert "messages of 1 KiB to 16 MiB from each device to the next, written anew by the receiver" in level
    assert "root mean square is 0%" in level
    assert "All-reduces of 4 MiB to 16 MiB differ from what these figures predict by 50% (root mean square)" in level
    of_gpus = measured_machine(synthetic(kind=GPU), date="2026-01-31").machine
    assert "virtual" not in of_gpus.device.source + of_gpus.levels[0].source + of_gpus.description


def test_the_text_is_a_machine_file() -> None:
    machine = measured_machine(synthetic(), date="2026-01-31").machine
    text = machine_text(machine)
    assert parse_machine(text, source="measured.toml") == machine
    assert Draft202012Validator(json.loads(machine_schema())).is_valid(tomllib.loads(text))


def test_names_of_any_characters_can_be_written() -> None:
    from dataclasses import replace

    machine = replace(load_machine("1080ti"), name='a"\\\n\t\x00\x1b\x7f\x85\u2028 é 𝄞', description="")
    assert parse_machine(machine_text(machine), source="t") == machine


def test_samples_come_back_from_json() -> None:
    samples = synthetic()
    document = json.loads(json.dumps(asdict(samples)))
    assert read(Samples, document, DocumentSource(CalibrationError, "m")) == samples
    document["copies"][1]["time_s"] = -1
    with pytest.raises(CalibrationError, match=r"^m: copies\[1\].time_s is -1; expected a number above 0"):
        read(Samples, document, DocumentSource(CalibrationError, "m"))
    del document["stream"]
    with pytest.raises(CalibrationError, match=r"^m: .* is "):
        read(Samples, document, DocumentSource(CalibrationError, "m"))


@pytest.mark.parametrize("field", ["stream", "all_reduces", "matmul"])
def test_samples_that_do_not_suffice(field: str) -> None:
    from dataclasses import replace

    nothing = replace(synthetic(), **{field: {} if field == "matmul" else ()})  # type: ignore[arg-type]
    with pytest.raises(CalibrationError, match="measure again"):
        measured_machine(nothing, date="2026-01-31")


def test_efforts_differ_in_effort() -> None:
    glance, quick, full = (EFFORTS[name] for name in ("glance", "quick", "full"))
    for less, more in ((glance, quick), (quick, full)):
        assert len(less.copy_bytes) < len(more.copy_bytes)
        assert less.time_s < more.time_s
    assert max(full.stream_bytes) >= 64 * 2**20  # more than caches hold
    assert [binary(n) for n in (100, 1024, 1536, 2**20, 3 * 2**25)] == ["100 B", "1 KiB", "1.5 KiB", "1 MiB", "96 MiB"]
