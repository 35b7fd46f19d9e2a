"""The machine at hand: what a driver lists, and which preset that is."""

import os
from pathlib import Path

import pytest

from pase.errors import MachineError
from pase.machine import load_machine, machine_text, parse_machine


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A stand-in for nvidia-smi on the path: it prints what is written to this file."""
    said = tmp_path / "said"
    program = tmp_path / "nvidia-smi"
    program.write_text(f'#!/bin/sh\ncat "{said}"\ntest ! -e "{said}.fails"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    return said


@pytest.mark.parametrize(
    ("line", "preset"),
    [
        # As drivers list them, with their MiB.
        ("NVIDIA H100 80GB HBM3, 81559", "h100"),
        ("NVIDIA H200, 143771", "h200"),
        ("NVIDIA A100-SXM4-80GB, 81920", "a100"),
        ("Tesla V100-SXM2-32GB, 32768", "v100"),
        ("NVIDIA GeForce GTX 1080 Ti, 11264", "1080ti"),
        ("NVIDIA GeForce RTX 2080 Ti, 11264", "2080ti"),
    ],
)
def test_gpus_of_a_preset(driver: Path, line: str, preset: str) -> None:
    driver.write_text(f"{line}\n" * 4)
    found, known = load_machine("auto"), load_machine(preset)
    assert found.name == f"{preset} (found)"
    assert found.description.startswith(f"4 × {line.partition(',')[0]} of this machine")
    assert (found.device, found.overlap, found.kernels) == (known.device, known.overlap, known.kernels)
    assert [level.num_devices for level in found.levels] == [4, 0]
    assert [level.bandwidth_bytes_per_s for level in found.levels] == [
        level.bandwidth_bytes_per_s for level in known.levels
    ]
    assert parse_machine(machine_text(found), source="a text") == found


def test_one_gpu_has_no_links_within(driver: Path) -> None:
    driver.write_text("NVIDIA H100 80GB HBM3, 81559\n")
    assert [level.name for level in load_machine("auto").levels] == ["cluster"]


@pytest.mark.parametrize(
    "line",
    [
        "NVIDIA A100-SXM4-40GB, 40960",
        "NVIDIA A100 80GB PCIe, 81920",
        "NVIDIA H100 PCIe, 81559",
        "NVIDIA H100 NVL, 95830",
        "NVIDIA GH200 480GB, 97871",
        "NVIDIA GeForce GTX 1080, 8192",
        "NVIDIA L40S, 46068",
    ],
)
def test_others_are_not_taken_for_one(driver: Path, line: str) -> None:
    driver.write_text(f"{line}\n")
    name = line.partition(",")[0]
    with pytest.raises(
        MachineError, match=rf"no preset is of {name} with \d+ GiB, of which there are 1 here; measure it"
    ):
        load_machine("auto")


def test_gpus_that_differ(driver: Path) -> None:
    driver.write_text("NVIDIA H100 80GB HBM3, 81559\nNVIDIA H200, 143771\n")
    with pytest.raises(
        MachineError, match=r"2 GPUs differ .NVIDIA H100 80GB HBM3 with 80 GiB, NVIDIA H200 with 140 GiB"
    ):
        load_machine("auto")


def test_a_driver_that_lists_none(driver: Path) -> None:
    driver.write_text("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.\n")
    Path(f"{driver}.fails").touch()
    with pytest.raises(MachineError, match="nvidia-smi lists no GPUs; it said: NVIDIA-SMI has failed because"):
        load_machine("auto")


def test_no_driver(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(MachineError, match=r"no GPU was found .* name a preset .* pase calibrate -o here.toml"):
        load_machine("auto")
