"""Machines from TOML files: presets by name, a user's own by path."""

import difflib
import json
import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import replace
from importlib import resources
from math import isfinite
from pathlib import Path
from types import MappingProxyType

from pase.common.documents import Field, StrPath
from pase.errors import MachineError, unknown_name
from pase.machine.lines import field_lines
from pase.machine.machine import Device, Level, Machine, Origin

DTYPES = ("float64", "float32", "tf32", "bfloat16", "float16", "float8", "int8")
"""Element types that a peak may be given for; tf32 is float32 on units that round its factors to 10 bits."""


REQUIRED_DTYPE = "float32"
"""What costs are computed for unless something else is said."""


_BANDWIDTH = "in bytes per second, without a prefix: 10 GB/s is 10e9"


UNITS: Mapping[str, str] = MappingProxyType(
    {
        "memory_bytes": "in bytes: 16 GiB is 17_179_869_184",
        "memory_bandwidth_bytes_per_s": _BANDWIDTH,
        "bandwidth_bytes_per_s": _BANDWIDTH,
        "latency_s": "in seconds: 2 µs is 2e-6",
        "devices": "devices in one group of this level, 0 for a level without bound",
        **dict.fromkeys(DTYPES, "in FLOP per second: 10 TFLOP/s is 10e12"),
    }
)
"""What a figure counts, by key."""


SCHEMA_VERSION = 1


DEFAULT_MACHINE = "1080ti"


def preset_names() -> tuple[str, ...]:
    """Return the names of the machines that come with PaSE, sorted."""
    folder = resources.files("pase.machine") / "presets"
    return tuple(sorted(entry.name.removesuffix(".toml") for entry in folder.iterdir() if entry.name.endswith(".toml")))


def machines() -> tuple[Machine, ...]:
    """Return the machines that come with PaSE, by name."""
    return tuple(map(load_machine, preset_names()))


def load_machine(name_or_path: StrPath) -> Machine:
    """Return a preset by its name, or the machine that a .toml file describes; MachineError where neither fits."""
    name_or_path = os.fspath(name_or_path)
    if name_or_path.endswith(".toml"):
        path = Path(name_or_path)
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:  # no UTF-8, or a path that none can have
            raise MachineError(f"machine file {name_or_path} cannot be read: {error}") from None
        return _parse(text, f"machine file {name_or_path}")
    if name_or_path not in preset_names():
        raise MachineError(unknown_name("machine", name_or_path, preset_names()) + "; or give the path of a .toml file")
    preset = resources.files("pase.machine") / "presets" / f"{name_or_path}.toml"
    return _parse(preset.read_text(encoding="utf-8"), f"machine {name_or_path}")


def parse_machine(text: str, *, source: str) -> Machine:
    """Return the machine that a TOML text describes; source: what messages call it."""
    return _parse(text, f"machine file {source}")


def machine_schema() -> str:
    """Return the JSON Schema of machine files, as text.

    It says nothing of what only several values together show: that the devices of each level are a multiple of those of
    the one before.
    """
    return (resources.files("pase.machine") / "machine.schema.json").read_text(encoding="utf-8")


def _parse(text: str, source: str) -> Machine:
    try:
        document = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # numbers of thousands of digits, brackets thousands deep
        raise MachineError(f"{source} is not TOML: {error}{_quoted_line(text, str(error))}") from None
    field = Field(document, "", MachineError, source, field_lines(text, document))
    refuse_unknown_keys(field)
    machine = machine_from_document(field)
    if REQUIRED_DTYPE not in machine.device.peak_flop_per_s:
        raise field["device"]["peak_flop_per_s"].fail(
            f"has no {REQUIRED_DTYPE}, which costs are computed for; expected {REQUIRED_DTYPE}, {UNITS[REQUIRED_DTYPE]}"
        )
    return machine


def _quoted_line(text: str, error: str) -> str:
    """Return the line of a text that an error of the TOML parser names by its number."""
    found = re.search(r"\(at line (\d+), column \d+\)", error)
    lines = text.split("\n")
    if not found or int(found[1]) > len(lines):
        return ""
    return f": {lines[int(found[1]) - 1].strip()[:60]!r}"


def machine_from_document(document: Field) -> Machine:
    """Return the machine that a parsed document describes; the document's error names the field that is wrong.

    Keys that are not known are passed over, as plans do that another version wrote; `parse_machine` refuses them.
    """
    version = document["schema_version"]
    if version.integer() != SCHEMA_VERSION:
        raise version.fail(f"is {version.value}; this version of PaSE reads {SCHEMA_VERSION}")
    device = document["device"]
    memory_bandwidth = device.get("memory_bandwidth_bytes_per_s")
    peaks = {dtype: figure(field, above=0) for dtype, field in device["peak_flop_per_s"].members()}
    if not peaks:
        raise device["peak_flop_per_s"].fail("is empty; give at least float32")
    levels = document["levels"].items()
    if not levels:
        raise document["levels"].fail("is empty; expected one [[levels]] table for each level, the innermost first")
    sizes = [level["devices"].integer() for level in levels]
    for level, inner, outer in zip(levels[1:], sizes, sizes[1:], strict=False):
        if inner == 0 or (outer and (outer % inner or outer <= inner)):
            raise level["devices"].fail(
                f"is {outer}, after {inner}; each level holds several whole groups of the one before "
                "(0, without bound, comes last)"
            )
    return Machine(
        name=document["name"].text(),
        description=document["description"].text(),
        device=Device(
            name=device["name"].text(),
            peak_flop_per_s=peaks,
            memory_bytes=device["memory_bytes"].integer(1),
            memory_bandwidth_bytes_per_s=figure(memory_bandwidth, above=0) if memory_bandwidth else None,
            source=device["source"].text(),
        ),
        levels=tuple(
            Level(
                name=level["name"].text(),
                num_devices=size,
                latency_s=figure(level["latency_s"]),
                bandwidth_bytes_per_s=figure(level["bandwidth_bytes_per_s"], above=0),
                source=level["source"].text(),
            )
            for level, size in zip(levels, sizes, strict=True)
        ),
        origin=Origin(source=document.source, path=document.path, lines=document.lines),
    )


def override_machine(machine: Machine, *, flop_per_s: float | None, bandwidth_bytes_per_s: float | None) -> Machine:
    """Return the machine with another peak for every element type, another bandwidth at every level, or both."""
    for what, value in (("FLOP/s", flop_per_s), ("bandwidth", bandwidth_bytes_per_s)):
        if value is not None and not (isfinite(value) and value > 0):
            raise MachineError(f"{what} of {value:g} is not possible; expected a number above 0")
    device, levels = machine.device, machine.levels
    if flop_per_s is not None:
        device = replace(
            device, peak_flop_per_s=dict.fromkeys(device.peak_flop_per_s, flop_per_s), source="given by the user"
        )
    if bandwidth_bytes_per_s is not None:
        levels = tuple(
            replace(level, bandwidth_bytes_per_s=bandwidth_bytes_per_s, source="given by the user") for level in levels
        )
    changed = device is not machine.device or levels is not machine.levels
    return replace(
        machine, device=device, levels=levels, name=f"{machine.name} (overridden)" if changed else machine.name
    )


def machine_document(machine: Machine) -> dict[str, object]:
    """Return the document that `machine_from_document` reads back."""
    device = machine.device
    memory_bandwidth = device.memory_bandwidth_bytes_per_s
    return {
        "schema_version": SCHEMA_VERSION,
        "name": machine.name,
        "description": machine.description,
        "device": {
            "name": device.name,
            "memory_bytes": device.memory_bytes,
            **({"memory_bandwidth_bytes_per_s": memory_bandwidth} if memory_bandwidth is not None else {}),
            "source": device.source,
            "peak_flop_per_s": dict(device.peak_flop_per_s),
        },
        "levels": [
            {
                "name": level.name,
                "devices": level.num_devices,
                "latency_s": level.latency_s,
                "bandwidth_bytes_per_s": level.bandwidth_bytes_per_s,
                "source": level.source,
            }
            for level in machine.levels
        ],
    }


_SHORT_DTYPES: Mapping[str, str] = MappingProxyType(
    {"fp64": "float64", "fp32": "float32", "fp16": "float16", "half": "float16", "bf16": "bfloat16", "fp8": "float8"}
)
"""What others call the element types."""


_TABLES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "": ("schema_version", "name", "description", "device", "levels"),
        "device": ("name", "memory_bytes", "memory_bandwidth_bytes_per_s", "peak_flop_per_s", "source"),
        "device.peak_flop_per_s": DTYPES,
        "levels": ("name", "devices", "latency_s", "bandwidth_bytes_per_s", "source"),
    }
)
"""Keys of each table; of `levels`, those of each element."""


def refuse_unknown_keys(document: Field) -> None:
    """Raise the document's error for a key that no table of a machine has; what has a wrong type is passed over.

    It is refused, never passed over: `latency_us = 2` must not leave a machine without latency.
    """
    _refuse(document, "")
    device = _member(document, "device")
    if device:
        _refuse(device, "device")
        peaks = _member(device, "peak_flop_per_s")
        if peaks:
            _refuse(peaks, "device.peak_flop_per_s")
    levels = _member(document, "levels")
    if levels and isinstance(levels.value, list):
        for level in levels.items():
            _refuse(level, "levels")


def figure(field: Field, *, above: float | None = None) -> float:
    """Return a number of 0 or more, or above one; what is text, a figure with its unit, is answered with ours."""
    if isinstance(field.value, str):
        key = field.path.rpartition(".")[2]
        expected = "a number of 0 or more" if above is None else f"a number above {above:g}"
        raise field.fail(f"is {field.value[:60]!r}; expected {expected}, {UNITS.get(key, 'without a unit')}")
    return field.number() if above is None else field.number(above=above)


def _member(table: Field, key: str) -> Field | None:
    return table.get(key) if isinstance(table.value, dict) else None


def _refuse(table: Field, name: str) -> None:
    if not isinstance(table.value, dict):
        return
    known = _TABLES[name]
    for key, field in table.members():
        if key not in known:
            raise field.fail(f"is not a key of a machine file{_suggestion(key, known)}")


def _suggestion(key: str, known: tuple[str, ...]) -> str:
    short = _SHORT_DTYPES.get(key)
    near = [short] if short in known else difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    if not near:
        return f"; known here are {', '.join(known)}"
    unit = f" ({UNITS[near[0]]})" if near[0] in UNITS else ""
    return f"; did you mean {near[0]}{unit}?"


def machine_text(machine: Machine) -> str:
    """Return the text of a machine file; `parse_machine` returns an equal machine."""
    document = machine_document(machine)
    device, levels = document.pop("device"), document.pop("levels")
    assert isinstance(device, dict)
    assert isinstance(levels, list)
    peaks = device.pop("peak_flop_per_s")
    tables = [
        _assignments(document),
        f"[device]\n{_assignments(device)}",
        f"[device.peak_flop_per_s]\n{_assignments(peaks)}",
        *(f"[[levels]]\n{_assignments(level)}" for level in levels),
    ]
    return "\n".join(tables)


def _assignments(table: Mapping[str, object]) -> str:
    return "".join(f"{key} = {_value(value)}\n" for key, value in table.items())


def _value(value: object) -> str:
    if isinstance(value, str):
        # A string of JSON is one of TOML, but for DEL, which TOML wants escaped, and surrogates, which it has not.
        text = value.encode("utf-8", "replace").decode()
        return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
    assert isinstance(value, int | float)
    return repr(value)
