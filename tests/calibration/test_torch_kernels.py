"""Figures of kernels: found again from times that they make, and measured on this processor."""

from dataclasses import replace
from pathlib import Path

import pytest

from pase.errors import CalibrationError
from pase.machine import Device, load_machine

pytest.importorskip("torch")

from pase.calibration.kernels import calibrated, fit_kernels, measure_kernels
from tests.calibration.synthetic import TRUE, made

DEVICE = Device(
    name="made up",
    peak_flop_per_s={"float32": 1e11},
    memory_bytes=2**33,
    memory_bandwidth_bytes_per_s=1e10,
    source="a test",
)


def test_figures_are_found_again() -> None:
    found = fit_kernels([*made()], DEVICE, "a test")
    assert found.error is not None
    assert found.error < 0.01
    for name in ("launch_s", "products", "convolutions", "attention", "half_extent", "half_depth"):
        assert getattr(found, name) == pytest.approx(getattr(TRUE, name), rel=0.05), name
    for name in ("memory", "norms", "functions"):
        assert getattr(found, name) == pytest.approx(getattr(TRUE, name), rel=0.05), name


def test_a_few_that_fall_out_do_not_decide() -> None:
    samples = [*made()]
    samples[3] = replace(samples[3], time_s=10 * samples[3].time_s)
    samples[20] = replace(samples[20], time_s=5 * samples[20].time_s)
    found = fit_kernels(samples, DEVICE, "a test")
    assert found.products == pytest.approx(TRUE.products, rel=0.1)


def test_every_kind_has_to_be_there() -> None:
    samples = [sample for sample in made() if sample.what != "attention"]
    with pytest.raises(CalibrationError, match="no attention were timed; expected kernels of every kind"):
        fit_kernels(samples, DEVICE, "a test")


def test_there_has_to_be_a_gpu() -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(CalibrationError, match="PyTorch finds no GPU on this machine"):
        measure_kernels("cuda")


def test_this_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few and short ones here: that they are timed, fitted and put into a machine, not how well."""
    monkeypatch.setattr("pase.calibration.kernels._TIMED_S", 0.0)
    from pase.calibration import kernels

    effort = replace(kernels._ON_CPU, extents=(16, 64), depths=(64,), copies=((4, 16),), arrays=(2**12, 2**14))
    effort = replace(effort, convolutions=((1, 8, 8, 8, 3),), attentions=((2, 16, 8),))
    monkeypatch.setattr(kernels, "_ON_CPU", effort)
    alone = calibrated(None, "cpu")
    assert alone.kernels is not None
    assert {sample.what for sample in alone.kernels.samples} == set(kernels.KERNELS)
    assert alone.device.peak_flop_per_s["float32"] > 1e6
    kept = calibrated(load_machine("v100"), "cpu", name="mine")
    assert (kept.name, kept.device, kept.levels) == ("mine", load_machine("v100").device, load_machine("v100").levels)
    assert kept.kernels is not None
    assert kept.kernels.samples != load_machine("v100").kernels.samples  # type: ignore[union-attr]


def test_the_base_has_to_have_the_types(tmp_path: Path) -> None:
    from pase.calibration import kernels

    lacking = [replace(sample, dtype="bfloat16") for sample in made()]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(kernels, "measure_kernels", lambda *_: tuple(lacking))
        with pytest.raises(CalibrationError, match="machine '1080ti' gives no peak for bfloat16, which was timed"):
            calibrated(load_machine("1080ti"), "cpu")
