"""Machines: presets, files, and a message with the field's path for everything that can be wrong in one."""

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from pase.common.documents import Field
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


@pytest.mark.parametrize("name", preset_names())
def test_presets_load_and_round_trip(name: str) -> None:
    preset = load_machine(name)
    assert preset.name == name
    assert preset.peak_flop_per_s() > 1e12
    assert preset.device.source
    assert all(level.source for level in preset.levels)
    document = Field(machine_document(preset), "", MachineError, name)
    assert machine_from_document(document) == preset


def test_the_machines_of_the_paper_are_among_them() -> None:
    assert {"1080ti", "2080ti"} <= set(preset_names())
    assert DEFAULT_MACHINE in preset_names()
    # 8 devices a node; the second machine has more FLOP for each byte (section IV-B: a lower machine balance).
    one, other = load_machine("1080ti"), load_machine("2080ti")
    assert one.levels[0].num_devices == other.levels[0].num_devices == 8
    assert other.flop_per_byte(8) > one.flop_per_byte(8)


def test_published_figures_of_the_devices() -> None:
    # cores · 2 FLOP · boost clock
    assert load_machine("1080ti").peak_flop_per_s() == pytest.approx(3584 * 2 * 1.582e9, rel=1e-3)
    assert load_machine("2080ti").peak_flop_per_s() == pytest.approx(4352 * 2 * 1.545e9, rel=1e-3)
    # PCI Express 3.0 x16: 8 GT/s on each of 16 lanes, 128 of 130 bits.
    assert load_machine("1080ti").levels[0].bandwidth_bytes_per_s == pytest.approx(8e9 * 16 * 128 / 130 / 8, rel=1e-3)


# -- what a machine answers


def test_levels_spanned(machine: Machine) -> None:
    names = {n: [level.name for level in machine.levels_spanned(n)] for n in (1, 2, 3, 4)}
    assert names == {1: ["pair"], 2: ["pair"], 3: ["pair", "box"], 4: ["pair", "box"]}
    with pytest.raises(
        MachineError,
        match=r"small.toml, line 24: levels\[1\].devices is 4, at the outermost level 'box', and 5 were asked",
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
        match=r"small.toml, line 11: device.peak_flop_per_s has no peak for int8; it is given for float16, float32",
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
    assert machine_from_document(Field(machine_document(machine), "", MachineError, "m")) == machine


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


def _document() -> dict[str, Any]:
    return machine_document(parse_machine(TEXT, source="t"))


def _changed(path: tuple[str | int, ...], value: object) -> dict[str, Any]:
    document = deepcopy(_document())
    at: Any = document
    for step in path[:-1]:
        at = at[step]
    at[path[-1]] = value
    return document


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("schema_version",), 2, "schema_version is 2; this version of PaSE reads 1"),
        (("schema_version",), "1", "schema_version is '1'; expected a whole number of 0 or more"),
        (("name",), 3, "name is 3; expected text"),
        (("description",), None, "description is None; expected text"),
        (("device",), [], "device is an array; expected an object"),
        (("device", "name"), 1.5, "device.name is 1.5; expected text"),
        (("device", "memory_bytes"), 0, "device.memory_bytes is 0; expected a whole number of 1 or more"),
        (("device", "memory_bytes"), 1e9, "device.memory_bytes is 1000000000.0; expected a whole number"),
        (("device", "source"), {}, "device.source is an object; expected text"),
        (("device", "peak_flop_per_s"), {}, "device.peak_flop_per_s is empty; give at least float32"),
        (("device", "peak_flop_per_s"), 1e12, "device.peak_flop_per_s is 1000000000000.0; expected an object"),
        (("device", "peak_flop_per_s", "float32"), 0, "peak_flop_per_s.float32 is 0; expected a number above 0"),
        (("device", "peak_flop_per_s", "float32"), float("nan"), "peak_flop_per_s.float32 is nan; expected"),
        (("levels",), [], r"levels is empty; expected one \[\[levels\]\] table"),
        (("levels",), {}, "levels is an object; expected an array"),
        (("levels", 0), "pair", r"levels\[0\] is 'pair'; expected an object"),
        (("levels", 0, "devices"), -1, r"levels\[0\].devices is -1; expected a whole number of 0 or more"),
        (("levels", 0, "devices"), True, r"levels\[0\].devices is True; expected a whole number"),
        (("levels", 0, "devices"), 0, r"levels\[1\].devices is 4, after 0; each level holds several whole groups"),
        (("levels", 1, "devices"), 3, r"levels\[1\].devices is 3, after 2; each level"),
        (("levels", 1, "devices"), 2, r"levels\[1\].devices is 2, after 2; each level"),
        (("levels", 1, "devices"), 1, r"levels\[1\].devices is 1, after 2; each level"),
        (("levels", 1, "name"), False, r"levels\[1\].name is False; expected text"),
        (("levels", 1, "latency_s"), -1e-6, r"levels\[1\].latency_s is -1e-06; expected a number of 0 or more"),
        (("levels", 1, "latency_s"), "fast", r"levels\[1\].latency_s is 'fast'; expected a number"),
        (
            ("levels", 1, "bandwidth_bytes_per_s"),
            0,
            r"levels\[1\].bandwidth_bytes_per_s is 0; expected a number above 0",
        ),
        (("levels", 1, "bandwidth_bytes_per_s"), float("inf"), r"levels\[1\].bandwidth_bytes_per_s is inf; expected"),
        (("levels", 1, "source"), 7, r"levels\[1\].source is 7; expected text"),
    ],
)
def test_a_wrong_field_is_named(path: tuple[str | int, ...], value: object, message: str) -> None:
    with pytest.raises(MachineError, match=f"^m: .*{message}"):
        machine_from_document(Field(_changed(path, value), "", MachineError, "m"))


@pytest.mark.parametrize(
    ("path", "named"),
    [
        (("schema_version",), "schema_version"),
        (("name",), "name"),
        (("description",), "description"),
        (("device",), "device"),
        (("device", "name"), "device.name"),
        (("device", "memory_bytes"), "device.memory_bytes"),
        (("device", "source"), "device.source"),
        (("device", "peak_flop_per_s"), "device.peak_flop_per_s"),
        (("levels",), "levels"),
        (("levels", 1, "name"), r"levels\[1\].name"),
        (("levels", 0, "devices"), r"levels\[0\].devices"),
        (("levels", 1, "latency_s"), r"levels\[1\].latency_s"),
        (("levels", 1, "bandwidth_bytes_per_s"), r"levels\[1\].bandwidth_bytes_per_s"),
        (("levels", 1, "source"), r"levels\[1\].source"),
    ],
)
def test_a_missing_field_is_named(path: tuple[str | int, ...], named: str) -> None:
    document: Any = _document()
    at = document
    for step in path[:-1]:
        at = at[step]
    del at[path[-1]]
    with pytest.raises(MachineError, match=f"^m: {named} is missing$"):
        machine_from_document(Field(document, "", MachineError, "m"))


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
