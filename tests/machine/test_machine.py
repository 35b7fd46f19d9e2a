"""Machines: presets, files, and a message with the field's path for everything that can be wrong in one."""

from pathlib import Path

import pytest

from pase.common.documents import DocumentSource
from pase.errors import MachineError
from pase.machine import (
    DEFAULT_MACHINE,
    Machine,
    load_machine,
    machine_document,
    machine_from_document,
    override_machine,
    parse_machine,
    preset_names,
)

TEXT = """
schema_version = 1
name = "small"
description = "two pairs"

[device]
name = "chip"
memory_bytes = 1024
source = "its data sheet"

[device.peak_flop_per_s]
float32 = 1e12
float16 = 2e12

[[levels]]
name = "pair"
devices = 2
latency_s = 0
bandwidth_bytes_per_s = 4e9
source = "measured"

[[levels]]
name = "box"
devices = 4
latency_s = 1e-6
bandwidth_bytes_per_s = 1e9
source = "measured"
"""


@pytest.fixture
def machine() -> Machine:
    return parse_machine(TEXT, source="small.toml")


# -- presets


def test_the_machines_of_the_paper_are_among_them() -> None:
    assert {"1080ti", "2080ti", DEFAULT_MACHINE} <= set(preset_names())
    # 8 devices a node; the second machine has more FLOP for each byte (section IV-B: a lower machine balance).
    one, other = load_machine("1080ti"), load_machine("2080ti")
    assert one.levels[0].num_devices == other.levels[0].num_devices == 8
    assert other.flop_per_byte(8) > one.flop_per_byte(8)


# -- what a machine answers


def test_levels_spanned(machine: Machine) -> None:
    names = {n: [level.name for level in machine.levels_spanned(n)] for n in (1, 2, 3, 4)}
    assert names == {1: ["pair"], 2: ["pair"], 3: ["pair", "box"], 4: ["pair", "box"]}
    with pytest.raises(
        MachineError,
        match=r"small.toml: levels\[1\].devices is 4, at the outermost level 'box', and 5 were asked",
    ):
        machine.levels_spanned(5)
    unbounded = load_machine("1080ti")
    assert len(unbounded.levels_spanned(10**6)) == 2


def test_r_is_peak_by_the_slowest_link_in_use(machine: Machine) -> None:
    assert machine.flop_per_byte(2) == 1e12 / 4e9
    assert machine.flop_per_byte(3) == 1e12 / 1e9
    assert machine.flop_per_byte(3, "float16") == 2e12 / 1e9
    with pytest.raises(
        MachineError,
        match=r"small.toml: device.peak_flop_per_s has no peak for int8; it is given for float16, float32",
    ):
        machine.flop_per_byte(2, "int8")


def test_override(machine: Machine) -> None:
    both = override_machine(machine, flop_per_s=5e12, bandwidth_bytes_per_s=1e10)
    assert both.flop_per_byte(4) == both.flop_per_byte(2) == both.flop_per_byte(2, "float16") == 500
    assert both.name == "small (overridden)"
    assert both.device.source == both.levels[1].source == "given by the user"
    assert machine.flop_per_byte(2) == 250
    one = override_machine(machine, flop_per_s=5e12, bandwidth_bytes_per_s=None)
    assert one.levels == machine.levels
    other = override_machine(machine, flop_per_s=None, bandwidth_bytes_per_s=1e10)
    assert other.device == machine.device
    assert override_machine(machine, flop_per_s=None, bandwidth_bytes_per_s=None) == machine


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_what_cannot_override(machine: Machine, value: float) -> None:
    with pytest.raises(MachineError, match=r"FLOP/s of \S+ is not possible; expected a number above 0"):
        override_machine(machine, flop_per_s=value, bandwidth_bytes_per_s=None)
    with pytest.raises(MachineError, match=r"bandwidth of \S+ is not possible; expected a number above 0"):
        override_machine(machine, flop_per_s=None, bandwidth_bytes_per_s=value)


# -- files


def test_a_file_of_ones_own(tmp_path: Path, machine: Machine) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(TEXT)
    assert load_machine(str(path)) == machine
    assert machine_from_document(machine_document(machine), DocumentSource(MachineError, "m")) == machine


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(MachineError, match=r"machine file .*absent\.toml cannot be read: .*No such file"):
        load_machine(str(tmp_path / "absent.toml"))
    (tmp_path / "folder.toml").mkdir()
    with pytest.raises(MachineError, match=r"folder\.toml cannot be read"):
        load_machine(str(tmp_path / "folder.toml"))
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(MachineError, match=r"binary\.toml cannot be read"):
        load_machine(str(tmp_path / "binary.toml"))
    with pytest.raises(MachineError, match="cannot be read: embedded null"):
        load_machine("no\0path.toml")
    (tmp_path / "half.toml").write_text(TEXT[:40])
    with pytest.raises(MachineError, match=r"half\.toml is not TOML: "):
        load_machine(str(tmp_path / "half.toml"))


def test_an_unknown_name_is_answered_with_the_nearest() -> None:
    with pytest.raises(
        MachineError, match=r"unknown machine '1080to': did you mean '1080ti'.* or give the path of a .toml"
    ):
        load_machine("1080to")


def test_numbers_of_any_length_are_answered() -> None:
    # TOML reads hexadecimal numbers of any length, which Python declines to write out in decimal.
    huge = "0x" + "f" * 5000
    for field in ("memory_bytes = 1024", "float32 = 1e12", "devices = 4", "latency_s = 1e-6", 'name = "box"'):
        key = field.split(" = ")[0]
        with pytest.raises(MachineError, match=f"{key} is .*; expected"):
            parse_machine(TEXT.replace(field, f"{key} = {huge}"), source="t")


@pytest.mark.parametrize("value", ["9" * 5000, "[" * 20_000], ids=["digits", "brackets"])
def test_values_that_no_parser_takes_are_answered(value: str) -> None:
    with pytest.raises(MachineError, match="machine file t is not TOML: "):
        parse_machine(TEXT.replace("1024", value), source="t")
