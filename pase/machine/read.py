"""Machines from TOML files: presets by name, a user's own by path."""

import os
import re
import tomllib
from dataclasses import replace
from importlib import resources
from math import isfinite
from pathlib import Path

from pase.common.documents import Field, StrPath
from pase.errors import MachineError, unknown_name
from pase.machine.keys import REQUIRED_DTYPE, UNITS, figure, refuse_unknown_keys
from pase.machine.lines import field_lines
from pase.machine.machine import Device, Level, Machine, Origin

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
