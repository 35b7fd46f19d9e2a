"""Load machines from TOML: presets by name, a user's own by path, or "auto", which detects this machine's GPUs."""

import json
import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import resources
from itertools import pairwise
from math import isfinite
from types import MappingProxyType
from typing import Annotated, Any, Literal, Self

from msgspec import UNSET, Meta, UnsetType, field

from pase.common.documents import DocumentSource, StrPath, read_text, toml_document
from pase.common.structs import (
    AboveZero,
    Document,
    Number,
    Whole,
    choice,
    describes,
    fields_of,
    json_schema,
    read,
    unknown_key,
)
from pase.errors import MachineError, unknown_name
from pase.machine.machine import (
    BY_LEVEL,
    DTYPES,
    REQUIRED_DTYPE,
    RING,
    Device,
    Kernels,
    Level,
    Machine,
    Origin,
    Overlap,
)

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
"""Unit of each figure, by key."""


DEFAULT_MACHINE = "1080ti"


AUTO = "auto"
"""Name of the machine that is detected from this host's GPUs."""


@describes(Level)
class LevelDocument(Document):
    """A level of the network: groups of devices joined by one kind of link."""

    name: str
    """Name of the level, such as node."""
    num_devices: Whole = field(name="devices")
    """Number of devices in one group; 0 for a level without bound, which comes last."""
    latency_s: Number
    """Time of an empty message, α, in seconds."""
    bandwidth_bytes_per_s: AboveZero
    """Bandwidth, 1/β, in bytes per second and direction, of the link by which one group of the level below (one device,
    at the first level) is attached; all devices behind it share it."""
    source: str
    """Source of these figures."""


@describes(Machine)
class MachineDocument(Document):
    """A cluster of identical devices, for the cost models of PaSE. A machine file is this document in TOML."""

    schema_version: Annotated[Literal[1], Meta(extra_json_schema={"type": "integer"})]
    """Version of the format."""
    name: str
    """Name of the machine."""
    description: str
    """One-line description."""
    device: Device
    """One device."""
    levels: Annotated[
        tuple[LevelDocument, ...],
        Meta(min_length=1, title="one [[levels]] table for each level, the innermost first"),
    ]
    """Levels of the network, innermost first. The number of devices of each level is a multiple of that of the one
    before, and larger."""
    collectives: Annotated[str, choice((BY_LEVEL, RING))] = BY_LEVEL
    """Algorithm of all-reduces, for the cost model step and simulation: hierarchical, level by level, or ring, in one
    ring of all participants."""
    overlap: Overlap | UnsetType = UNSET
    """How far communication overlaps with computation, for the cost model step; absent where it is not modelled."""
    kernels: Kernels | UnsetType = UNSET
    """Share of a device's peaks that kernels reach, for the cost model step; absent where unknown: then they reach all
    of it."""

    @classmethod
    def of(cls, value: Machine, **others: Any) -> Self:
        # Samples that figures were fitted to are written to machine files only.
        kernels = fields_of(replace(value.kernels, samples=())) if value.kernels else UNSET
        return super().of(value, schema_version=1, kernels=kernels, **others)

    def checked(self, source: DocumentSource, path: str = "") -> Machine:
        """Return the machine at `path`; raise the source's error for inconsistent levels and types."""
        prefix = f"{path}." if path else ""
        if self.kernels and self.kernels.dtype not in self.device.peak_flop_per_s:
            raise source.fail(
                f"{prefix}kernels.dtype", f"is {self.kernels.dtype}, for which device.peak_flop_per_s has no peak"
            )
        for number, (inner, outer) in enumerate(pairwise(level.num_devices for level in self.levels), start=1):
            if inner == 0 or (outer and (outer % inner or outer <= inner)):
                raise source.fail(
                    f"{prefix}levels[{number}].devices",
                    f"is {outer}, after {inner}; each level holds several whole groups of the one before "
                    "(0, without bound, comes last)",
                )
        machine: Machine = self.value(origin=Origin(source=source.name, path=path))
        return machine


def preset_names() -> tuple[str, ...]:
    """Return the names of the machines that come with PaSE, sorted."""
    folder = resources.files("pase.machine") / "presets"
    return tuple(sorted(entry.name.removesuffix(".toml") for entry in folder.iterdir() if entry.name.endswith(".toml")))


def machines() -> tuple[Machine, ...]:
    """Return the machines that come with PaSE, by name."""
    return tuple(map(load_machine, preset_names()))


def load_machine(name_or_path: StrPath) -> Machine:
    """Return a preset by its name, or the machine that a .toml file describes; MachineError where neither exists.

    "auto" is this machine: the preset of its GPUs.
    """
    name_or_path = os.fspath(name_or_path)
    if name_or_path == AUTO:
        return local_machine(machines())
    if name_or_path.endswith(".toml"):
        called = f"machine file {name_or_path}"
        return _parse(read_text(name_or_path, MachineError, called), called)
    if name_or_path not in preset_names():
        raise MachineError(
            unknown_name("machine", name_or_path, preset_names()) + "; or give the path of a .toml file, or auto"
        )
    preset = resources.files("pase.machine") / "presets" / f"{name_or_path}.toml"
    return _parse(preset.read_text(encoding="utf-8"), f"machine {name_or_path}")


def parse_machine(text: str, *, source: str) -> Machine:
    """Return the machine that a TOML text describes; source: what messages call it."""
    return _parse(text, f"machine file {source}")


def machine_schema() -> str:
    """Return the JSON Schema of machine files, as text.

    The schema cannot express constraints between values: that the devices of each level are a multiple of those of the
    one before.
    """
    return json_schema(MachineDocument, identifier="urn:pase:machine:1", title="PaSE machine", is_closed=True)


def machine_document(machine: Machine) -> dict[str, Any]:
    """Return the document that `machine_from_document` reads back."""
    return MachineDocument.of(machine).builtins()


def machine_from_document(document: object, source: DocumentSource) -> Machine:
    """Return the machine of a document; errors name the invalid field. Unknown keys are ignored."""
    return read(MachineDocument, document, source, hint=_unit).checked(source)


def _parse(text: str, name: str) -> Machine:
    source = DocumentSource(MachineError, name)
    # An unknown key is an error: `latency_us = 2` must not leave a machine without latency.
    document = read(MachineDocument, toml_document(text, source), source, hint=_unit, unknown=_suggestion)
    peaks, path = document.device.peak_flop_per_s, "device.peak_flop_per_s"
    for dtype in peaks:
        if dtype not in DTYPES:
            raise source.fail(f"{path}.{dtype}", _suggestion(dtype, DTYPES))
    if REQUIRED_DTYPE not in peaks:
        expected = f"expected {REQUIRED_DTYPE}, {UNITS[REQUIRED_DTYPE]}"
        raise source.fail(path, f"has no {REQUIRED_DTYPE}, which costs are computed for; {expected}")
    return document.checked(source)


def _unit(path: str, value: object) -> str:
    """Return the expected unit of a figure, where text was found in place of a number."""
    unit = UNITS.get(path.rpartition(".")[2])
    return f", {unit}" if unit and isinstance(value, str) else ""


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


_SHORT_DTYPES: Mapping[str, str] = MappingProxyType(
    {"fp64": "float64", "fp32": "float32", "fp16": "float16", "half": "float16", "bf16": "bfloat16", "fp8": "float8"}
)
"""Common names of the element types elsewhere."""


def _suggestion(key: str, known: Sequence[str]) -> str:
    return unknown_key(_SHORT_DTYPES.get(key, key), known, "of a machine file", UNITS)


def machine_text(machine: Machine) -> str:
    """Return the text of a machine file; `parse_machine` returns an equal machine."""
    document = machine_document(machine)
    device, levels, overlap = document.pop("device"), document.pop("levels"), document.pop("overlap", None)
    kernels, samples = document.pop("kernels", None), machine.kernels.samples if machine.kernels else ()
    peaks = device.pop("peak_flop_per_s")
    tables = [
        _assignments(document),
        f"[device]\n{_assignments(device)}",
        f"[device.peak_flop_per_s]\n{_assignments(peaks)}",
        *(f"[[levels]]\n{_assignments(level)}" for level in levels),
        *([] if overlap is None else [f"[overlap]\n{_assignments(overlap)}"]),
        *([] if kernels is None else [f"[kernels]\n{_assignments(kernels)}"]),
        *(f"[[kernels.samples]]\n{_assignments(fields_of(sample))}" for sample in samples),
    ]
    return "\n".join(tables)


def _assignments(table: Mapping[str, object]) -> str:
    return "".join(f"{key} = {_value(value)}\n" for key, value in table.items())


def _value(value: object) -> str:
    if isinstance(value, str):
        # A JSON string is a valid TOML string, except that TOML requires DEL to be escaped and forbids surrogates.
        text = value.encode("utf-8", "replace").decode()
        return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_value, value))}]"
    assert isinstance(value, int | float)
    return repr(value)


# -- detecting this machine

_LISTING = ("nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits")
_LONGEST_S = 30
_NEAR = 0.1
"""Relative tolerance when comparing a GPU's memory with a preset's: drivers reserve some, and count differently."""

_MEASURE = "measure it: pase calibrate --device GPU -o here.toml, and --kernels for the efficiency of kernels"


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU as its driver describes it."""

    name: str
    memory_bytes: int


def local_machine(presets: Sequence[Machine]) -> Machine:
    """Return the machine of this host: the preset of its GPUs, with the actual number of them in a node.

    Raises:
        MachineError: There is no GPU, they differ, or no preset matches them.
    """
    gpus = listed_gpus()
    first, count = gpus[0], len(gpus)
    if any(gpu != first for gpu in gpus):
        names = ", ".join(dict.fromkeys(_described(gpu) for gpu in gpus))
        raise MachineError(f"machine 'auto': this machine's {count} GPUs differ ({names}); expected equal ones")
    fitting = [machine for machine in presets if _is_of(machine.device, first)]
    if not fitting:
        raise MachineError(
            f"machine 'auto': no preset is of {_described(first)}, of which there are {count} here; {_MEASURE}"
        )
    machine, (node, *others) = fitting[0], fitting[0].levels
    found = f"{count} × {first.name}" if count > 1 else first.name
    # A group of one has no links within it: the next level's links then join the devices themselves.
    levels = (replace(node, num_devices=count), *others) if count > 1 else tuple(others) or (node,)
    return replace(
        machine,
        name=f"{machine.name} (found)",
        description=f"{found} of this machine; all else as preset {machine.name!r}: {machine.description}",
        levels=levels,
        origin=None,
    )


def listed_gpus() -> tuple[Gpu, ...]:
    """Return this machine's GPUs; MachineError where none is found or the driver does not answer."""
    if shutil.which(_LISTING[0]) is None:
        raise MachineError(
            "machine 'auto': no GPU was found (there is no nvidia-smi); name a preset (pase machines), or measure this "
            "machine: pase calibrate -o here.toml"
        )
    try:
        done = subprocess.run(_LISTING, capture_output=True, text=True, timeout=_LONGEST_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise MachineError(f"machine 'auto': nvidia-smi did not answer: {error}") from None
    rows = [re.fullmatch(r"\s*(\S.*?)\s*,\s*(\d+)\s*", line) for line in done.stdout.splitlines() if line.strip()]
    gpus = tuple(Gpu(row[1], int(row[2]) * 2**20) for row in rows if row)
    if done.returncode or not gpus or len(gpus) < len(rows):
        said = (done.stderr or done.stdout).strip().splitlines()[:1] or ["nothing"]
        raise MachineError(f"machine 'auto': nvidia-smi lists no GPUs; it said: {said[0][:200]}")
    return gpus


def _described(gpu: Gpu) -> str:
    return f"{gpu.name} with {gpu.memory_bytes / 2**30:.0f} GiB"


def _is_of(device: Device, gpu: Gpu) -> bool:
    """Return whether a preset's device matches a GPU: same model, same memory, same form factor."""
    here, words = _words(gpu.name), _words(device.name)
    model = {word for word in words if _MODEL.fullmatch(word)}
    return (
        bool(model)
        and model <= here
        and not here & _FORMS - words
        and abs(gpu.memory_bytes / device.memory_bytes - 1) <= _NEAR
    )


_FORMS = frozenset({"pcie", "nvl", "ti", "super", "max"})
"""Words that distinguish variants from the GPU of the same name without them."""

_MODEL = re.compile(r"[a-z]?\d{3,4}")


def _words(name: str) -> frozenset[str]:
    return frozenset(re.split(r"[\s-]+", name.lower()))
