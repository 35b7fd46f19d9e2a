"""Machines from TOML files: presets by name, a user's own by path."""

import tomllib
from dataclasses import replace
from importlib import resources
from math import isfinite
from pathlib import Path

from pase.documents import Field
from pase.errors import MachineError, unknown_name
from pase.machine.machine import Device, Level, Machine

SCHEMA_VERSION = 1
DEFAULT_MACHINE = "1080ti"


def preset_names() -> tuple[str, ...]:
    """Return the names of the machines that come with PaSE, sorted."""
    folder = resources.files("pase.machine") / "presets"
    return tuple(sorted(entry.name.removesuffix(".toml") for entry in folder.iterdir() if entry.name.endswith(".toml")))


def load_machine(name_or_path: str) -> Machine:
    """Return a preset by its name, or the machine that a .toml file describes; MachineError where neither fits."""
    if name_or_path.endswith(".toml"):
        path = Path(name_or_path)
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise MachineError(f"machine file {name_or_path} cannot be read: {error}") from None
        return parse_machine(text, source=name_or_path)
    if name_or_path not in preset_names():
        raise MachineError(unknown_name("machine", name_or_path, preset_names()) + "; or give the path of a .toml file")
    return parse_machine(
        (resources.files("pase.machine") / "presets" / f"{name_or_path}.toml").read_text(encoding="utf-8"),
        source=name_or_path,
    )


def parse_machine(text: str, *, source: str) -> Machine:
    """Return the machine that a TOML text describes; source: what messages call it."""
    try:
        document = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # numbers of thousands of digits, brackets thousands deep
        raise MachineError(f"machine file {source} is not TOML: {error}") from None
    return machine_from_document(Field(document, "", MachineError, f"machine file {source}"))


def machine_from_document(document: Field) -> Machine:
    """Return the machine that a parsed document describes; the document's error names the field that is wrong."""
    version = document["schema_version"]
    if version.integer() != SCHEMA_VERSION:
        raise version.fail(f"is {version.value}; this version of PaSE reads {SCHEMA_VERSION}")
    device = document["device"]
    peaks = {dtype: field.number(above=0) for dtype, field in device["peak_flop_per_s"].members()}
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
            source=device["source"].text(),
        ),
        levels=tuple(
            Level(
                name=level["name"].text(),
                num_devices=size,
                latency_s=level["latency_s"].number(),
                bandwidth_bytes_per_s=level["bandwidth_bytes_per_s"].number(above=0),
                source=level["source"].text(),
            )
            for level, size in zip(levels, sizes, strict=True)
        ),
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
    return {
        "schema_version": SCHEMA_VERSION,
        "name": machine.name,
        "description": machine.description,
        "device": {
            "name": device.name,
            "memory_bytes": device.memory_bytes,
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
