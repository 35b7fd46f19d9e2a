"""Machine files: every mistake is answered with the field; the schema refuses what the reader refuses."""

import json
import re
import tomllib
from copy import deepcopy
from importlib import resources
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from pase.common.documents import DocumentSource
from pase.errors import MachineError
from pase.machine import (
    Machine,
    load_machine,
    machine_document,
    machine_from_document,
    machine_schema,
    machine_text,
    parse_machine,
    preset_names,
)
from tests.machine.test_machine import TEXT

PRESETS = {
    name: (resources.files("pase.machine") / "presets" / f"{name}.toml").read_text(encoding="utf-8")
    for name in preset_names()
}


# ----------------------------------------------------------------------------------------------------------- fields


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        (
            "bandwidth_bytes_per_s = 4e9",
            "bandwidth_bytes_per_s = 0",
            r"levels[0].bandwidth_bytes_per_s is 0; expected a number above 0",
        ),
        ("bandwidth_bytes_per_s = 1e9", "bandwidth_bytes_per_s = -1e9", "levels[1].bandwidth_bytes_per_s is -10"),
        ("bandwidth_bytes_per_s = 1e9", "bandwidth_bytes_per_s = inf", "levels[1].bandwidth_bytes_per_s is inf;"),
        ("latency_s = 1e-6", "latency_s = nan", "levels[1].latency_s is nan; expected a number of 0 or more"),
        ("latency_s = 1e-6", "latency_s = [1e-6]", "levels[1].latency_s is an array; expected a number"),
        ("latency_s = 1e-6", "latency_s.us = 1", "levels[1].latency_s is an object; expected a number"),
        (
            "bandwidth_bytes_per_s = 4e9",
            "bandwidth_gb_per_s = 4",
            "levels[0].bandwidth_gb_per_s is not a key of a machine file; did you mean bandwidth_bytes_per_s (in by",
        ),
        (
            "bandwidth_bytes_per_s = 4e9",
            'bandwidth_bytes_per_s = "4 GB/s"',
            "levels[0].bandwidth_bytes_per_s is '4 GB/s'; expected a number above 0, in bytes per second, w",
        ),
        ("latency_s = 1e-6", "latency_us = 1", "levels[1].latency_us is not a key of a machine file; did you mean l"),
        (
            "latency_s = 1e-6",
            'latency_s = "1 µs"',
            "levels[1].latency_s is '1 µs'; expected a number of 0 or more, in s",
        ),
        (
            "memory_bytes = 1024",
            "memory_gb = 1",
            "device.memory_gb is not a key of a machine file; did you mean memory_",
        ),
        (
            "float32 = 1e12",
            "fp32 = 1e12",
            "device.peak_flop_per_s.fp32 is not a key of a machine file; did you mean flo",
        ),
        (
            "float32 = 1e12",
            'float32 = "1 TFLOP/s"',
            "device.peak_flop_per_s.float32 is '1 TFLOP/s'; expected a number ab",
        ),
        ("devices = 4", "devices = 3", "levels[1].devices is 3, after 2; each level holds several whole groups"),
        ("devices = 4", "devices =  2", "levels[1].devices is 2, after 2; each level"),
        ("devices = 2", "devices = 2.0", "levels[0].devices is 2.0; expected a whole number of 0 or more"),
        ("devices = 2", "devices = true", "levels[0].devices is True; expected a whole number of 0 or more"),
        ("memory_bytes = 1024", "memory_bytes = 0", "device.memory_bytes is 0; expected a whole number of 1 or more"),
        ("memory_bytes = 1024", "memory_bytes = 1e9", "device.memory_bytes is 1000000000.0; expected a whole number"),
        ('name = "chip"', "name = 1", "device.name is 1; expected text"),
        ("schema_version = 1", "schema_version = 2", "schema_version is 2; this version of PaSE reads 1"),
        ('name = "box"', 'nmae = "box"', "levels[1].nmae is not a key of a machine file; did you mean name?"),
        ('name = "box"', "zzz = 1", "levels[1].zzz is not a key of a machine file; known here are name, devices"),
    ],
)
def test_a_wrong_value_is_told_with_its_field(old: str, new: str, problem: str) -> None:
    text = TEXT.replace(old, new)
    assert text != TEXT
    with pytest.raises(MachineError, match=f"^machine file t: {re.escape(problem)}"):
        parse_machine(text, source="t")


def test_what_is_missing_is_told_with_its_field() -> None:
    lines, checked = TEXT.split("\n"), 0
    for number, line in enumerate(lines, start=1):
        key, equals, _ = line.partition(" = ")
        if equals and key not in ("float32", "float16"):
            with pytest.raises(MachineError, match=rf"^machine file t: \S*{key} is missing$"):
                parse_machine("\n".join([*lines[: number - 1], "", *lines[number:]]), source="t")
            checked += 1
    assert checked == 16


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (TEXT[: TEXT.index("[[levels]]")], "machine file t: levels is missing"),
        (
            TEXT[: TEXT.index("[device]")] + "levels = []\ndevice = {}",
            "machine file t: levels is empty; expected one",
        ),
        (
            "levels = []\n" + TEXT[: TEXT.index("[[levels]]")],
            r"machine file t: levels is empty; expected one \[\[levels\]\] table for each level",
        ),
        (TEXT.replace("float32 = 1e12", ""), "machine file t: device.peak_flop_per_s has no float32, which"),
        (
            TEXT.replace("devices = 2", "devices = 2\ndevices = 4"),
            r"machine file t is not TOML: Cannot overwrite a value \(at line 18, column \d+\): 'devices = 4'",
        ),
        (
            TEXT.replace("[device.peak_flop_per_s]", "[device]"),
            r"machine file t is not TOML: Cannot declare .* twice \(at line 11, column \d+\): '\[device\]'",
        ),
        (
            TEXT.replace("latency_s = 0", "latency_s = 2 µs"),
            r"machine file t is not TOML: .* \(at line 18, column \d+\): 'latency_s = 2 µs'",
        ),
    ],
)
def test_what_concerns_more_than_a_value(text: str, message: str) -> None:
    with pytest.raises(MachineError, match=f"^{message}"):
        parse_machine(text, source="t")


def test_levels_for_refuses_groups_that_are_part_empty() -> None:
    machine = parse_machine(TEXT.replace("devices = 4", "devices = 0"), source="t")
    for num_devices, names in ((1, 1), (2, 1), (4, 2), (6, 2), (100, 2)):
        assert machine.levels_for(num_devices) == machine.levels_spanned(num_devices)
        assert len(machine.levels_for(num_devices)) == names
    with pytest.raises(
        MachineError,
        match=r"^machine file t: levels\[0\].devices is 2, which does not divide 7 devices: the last group of "
        "level 'pair' would be part empty; use 6 or 8 devices$",
    ):
        machine.levels_for(7)
    with pytest.raises(MachineError, match=r"^machine 1080ti: levels\[0\].devices is 8, which does not divide 12"):
        load_machine("1080ti").levels_for(12)
    with pytest.raises(MachineError, match=r"is 4, at the outermost level 'box', and 5 were asked"):
        parse_machine(TEXT, source="t").levels_for(5)


def test_where_it_was_read_from_is_no_part_of_a_machine() -> None:
    one, other = parse_machine(TEXT, source="a"), parse_machine("\n\n" + TEXT, source="b")
    assert one == other
    assert one.origin != other.origin
    assert "origin" not in repr(one)
    made = Machine(name=one.name, description=one.description, device=one.device, levels=one.levels)
    assert made == one
    with pytest.raises(MachineError, match=r"^machine 'small': levels\[0\].devices is 2, which does not divide 3"):
        made.levels_for(3)


# ---------------------------------------------------------------------------------------------------------- schema

VALIDATOR = Draft202012Validator(json.loads(machine_schema()))


def _accepts(document: object) -> bool:
    """Whether the reader takes a document: written as TOML, by hand, because the library only reads it."""
    try:
        parse_machine(_toml(document), source="t")
    except MachineError:
        return False
    return True


def _toml(value: Any) -> str:
    return "\n".join(f"{json.dumps(key)} = {_toml_value(member)}" for key, member in value.items())


def _toml_value(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(key)} = {_toml_value(member)}" for key, member in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml_value, value)) + "]"
    return json.dumps(value).replace("Infinity", "inf").replace("NaN", "nan")


def test_the_schema_is_one() -> None:
    Draft202012Validator.check_schema(json.loads(machine_schema()))


@pytest.mark.parametrize("name", preset_names())
def test_presets_come_back_and_fit_the_schema(name: str) -> None:
    machine = load_machine(name)
    assert machine.name == name
    document = machine_document(machine)
    assert machine_from_document(document, DocumentSource(MachineError, name)) == machine
    assert parse_machine(machine_text(machine), source="t") == machine
    assert [error.message for error in VALIDATOR.iter_errors(tomllib.loads(PRESETS[name]))] == []
    assert VALIDATOR.is_valid(document)
    assert _accepts(tomllib.loads(PRESETS[name]))


WRONG = [None, True, -1, 0, 0.0, 1.5, 2**63, 10**400, float("inf"), "x", "", [], {}, [1], {"a": 1}]


def _places(value: Any, path: tuple[str | int, ...] = ()) -> list[tuple[str | int, ...]]:
    members = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [p for key, member in members for p in ((*path, key), *_places(member, (*path, key)))]


@pytest.mark.parametrize("place", _places(machine_document(load_machine("h100"))), ids=str)
def test_the_schema_refuses_what_the_reader_refuses(place: tuple[str | int, ...]) -> None:
    """One value is changed, taken out, or has a neighbour that is not known."""
    original = machine_document(load_machine("h100"))
    changes: list[tuple[str, Any]] = [("set", wrong) for wrong in WRONG if wrong is not None]
    for change, value in [*changes, ("delete", None), ("add", 1)]:
        document: Any = deepcopy(original)
        table = document
        for step in place[:-1]:
            table = table[step]
        if change == "set":
            table[place[-1]] = value
        elif change == "delete":
            del table[place[-1]]
        elif isinstance(table, dict):
            table["unknown"] = value
        # Whether levels are nested, or kernels of a type that has a peak, is for several values to show: no schema of
        # JSON tells.
        if place[-1] == "devices" and change == "set":
            continue
        several = ("levels", 0), ("levels", 1), ("device", "peak_flop_per_s", "bfloat16")
        if place in several and change == "delete":
            continue
        assert VALIDATOR.is_valid(document) == _accepts(document), (place, change, value)


# ------------------------------------------------------------------------------------------------------------ noise


def _mutated(text: str, random: Random) -> str:
    """A few pieces of a text taken out, doubled, moved or replaced."""
    for _ in range(random.randint(1, 4)):
        i, j = sorted(random.randrange(len(text) + 1) for _ in range(2))
        j = min(j, i + random.choice([1, 3, 30]))
        pieces = [
            "",
            text[i:j] * 2,
            *("\n", "[", "]]", '"', "'''", "=", "nan", "-1", "1e999", "{", "#", ".", "\x00", "9" * 5000),
        ]
        piece = random.choice(pieces)
        text = text[:i] + piece + text[j:]
    return text


@given(st.randoms(use_true_random=False), st.sampled_from(sorted(PRESETS)))
@settings(max_examples=300)
def test_a_file_that_was_tampered_with_is_read_or_refused(random: Random, name: str) -> None:
    text = _mutated(PRESETS[name], random)
    message = None
    try:
        machine = parse_machine(text, source="t")
    except MachineError as error:
        message = str(error)
    if message is None:
        assert parse_machine(_toml(machine_document(machine)), source="again") == machine
        return
    assert re.match(r"machine file t(:| is not TOML:) ", message)
