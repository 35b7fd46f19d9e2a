"""Machines from TOML files: presets by name, a user's own by path; and the one at hand, whose GPUs are a preset's."""

import difflib
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
from typing import Any

from pase.common.codecs import (
    POSITIVE,
    TEXT,
    WHOLE,
    Codec,
    array,
    choice,
    descriptions,
    json_schema,
    number,
    record,
    table,
    version,
)
from pase.common.documents import Field, StrPath, read_text, toml_field
from pase.errors import MachineError, unknown_name
from pase.machine.machine import BY_LEVEL, RING, Device, Kernels, KernelSample, Level, Machine, Origin, Overlap

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


KERNELS = ("products", "convolutions", "attention", "memory", "norms", "functions")
"""What kernels do: of each, a machine says what share of its peak they reach."""


DEFAULT_MACHINE = "1080ti"


AUTO = "auto"
"""The name of the machine at hand."""


def _figure(above: float | None = None, **schema: float) -> Codec[float]:
    """Return the codec of a number; what is text, a figure with its unit, is answered with ours."""
    codec = number(above=above, **schema)
    expected = "a number of 0 or more" if above is None else f"a number above {above:g}"

    def read(field: Field) -> float:
        if isinstance(field.value, str):
            unit = UNITS.get(field.path.rpartition(".")[2], "without a unit")
            raise field.fail(f"is {field.value[:60]!r}; expected {expected}, {unit}")
        return codec.read(field)

    return replace(codec, read=read)


_SAMPLE = record(
    KernelSample,
    what=choice(KERNELS),
    dtype=TEXT,
    extents=array(WHOLE),
    flop=_figure(),
    touched_bytes=_figure(),
    time_s=_figure(above=0),
    predicted_s=_figure(above=0),
)


def _machine(peaks: Codec[Any], *, with_samples: bool) -> Codec[Machine]:
    kernels: dict[str, Codec[Any]] = {
        "dtype": choice(DTYPES),
        "launch_s": _figure(),
        **{what: _figure(above=0) for what in KERNELS},
        "half_extent": _figure(),
        "half_depth": _figure(),
        "least": _figure(),
        "beyond": _figure(above=0).optional(None),
        "cache_bytes": _figure().optional(0.0),
        "error": _figure().optional(None),
        "source": TEXT,
        **({"samples": array(_SAMPLE).optional(())} if with_samples else {}),
    }
    device = record(
        Device,
        name=TEXT,
        memory_bytes=POSITIVE,
        memory_bandwidth_bytes_per_s=_figure(above=0).optional(None),
        source=TEXT,
        peak_flop_per_s=peaks,
    )
    level = record(
        Level,
        name=TEXT,
        devices=WHOLE.of("num_devices"),
        latency_s=_figure(),
        bandwidth_bytes_per_s=_figure(above=0),
        source=TEXT,
    )
    return record(
        Machine,
        schema_version=version(1),
        name=TEXT,
        description=TEXT,
        device=device,
        levels=array(level, minItems=1),
        collectives=choice((BY_LEVEL, RING)).optional(BY_LEVEL),
        overlap=record(Overlap, share=_figure(maximum=1), source=TEXT).optional(None),
        kernels=record(Kernels, **kernels).optional(None),
    )


def _checked(machine: Machine, document: Field) -> Machine:
    if machine.overlap is not None and machine.overlap.share > 1:
        raise document["overlap"]["share"].fail(f"is {machine.overlap.share:g}; expected a number from 0 to 1")
    if not machine.device.peak_flop_per_s:
        raise document["device"]["peak_flop_per_s"].fail("is empty; give at least float32")
    if machine.kernels is not None and machine.kernels.dtype not in machine.device.peak_flop_per_s:
        raise document["kernels"]["dtype"].fail(
            f"is {machine.kernels.dtype}, for which device.peak_flop_per_s has no peak"
        )
    if not machine.levels:
        raise document["levels"].fail("is empty; expected one [[levels]] table for each level, the innermost first")
    sizes = pairwise(level.num_devices for level in machine.levels)
    for level, (inner, outer) in zip(document["levels"].items()[1:], sizes, strict=True):
        if inner == 0 or (outer and (outer % inner or outer <= inner)):
            raise level["devices"].fail(
                f"is {outer}, after {inner}; each level holds several whole groups of the one before "
                "(0, without bound, comes last)"
            )
    return replace(machine, origin=Origin(source=document.source, path=document.path, lines=document.lines))


_ANY_PEAKS = table(_figure(above=0), minProperties=1)
MACHINE = _machine(_ANY_PEAKS, with_samples=False).checked(_checked)
"""Machines in plans, where another version of PaSE may know more: keys that are not known are passed over."""

_WITH_SAMPLES = _machine(_ANY_PEAKS, with_samples=True).checked(_checked)


def machine_document(machine: Machine) -> dict[str, Any]:
    """Return the document that `machine_from_document` reads back."""
    document: dict[str, Any] = MACHINE.write(machine)
    return document


def machine_from_document(document: Field) -> Machine:
    """Return the machine of a document; its error names the field that is wrong. Unknown keys are passed over."""
    return MACHINE.read(document)


_PEAKS = {dtype: _figure(above=0).optional(None) for dtype in DTYPES} | {REQUIRED_DTYPE: _figure(above=0)}
_FILE = _machine(record(dict, **_PEAKS), with_samples=True)
"""Machine files: what they may hold."""


def preset_names() -> tuple[str, ...]:
    """Return the names of the machines that come with PaSE, sorted."""
    folder = resources.files("pase.machine") / "presets"
    return tuple(sorted(entry.name.removesuffix(".toml") for entry in folder.iterdir() if entry.name.endswith(".toml")))


def machines() -> tuple[Machine, ...]:
    """Return the machines that come with PaSE, by name."""
    return tuple(map(load_machine, preset_names()))


def load_machine(name_or_path: StrPath) -> Machine:
    """Return a preset by its name, or the machine that a .toml file describes; MachineError where neither fits.

    "auto" is the machine at hand: the preset of its GPUs.
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

    It says nothing of what only several values together show: that the devices of each level are a multiple of those of
    the one before.
    """
    schema = json_schema(_FILE, identifier="urn:pase:machine:1", title="PaSE machine", described=machine_descriptions())
    return json.dumps(_closed(schema), indent=2, ensure_ascii=False) + "\n"


def machine_descriptions() -> dict[str, dict[str, str]]:
    """Return what is said of everything in a machine."""
    return descriptions("pase.machine", "machine.descriptions.toml")


def _closed(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return a schema whose objects have no other members than those that it tells of."""
    found = {key: _closed(value) if isinstance(value, dict) else value for key, value in schema.items()}
    return found | ({"additionalProperties": False} if isinstance(schema.get("required"), list) else {})


def _parse(text: str, source: str) -> Machine:
    field = toml_field(text, MachineError, source)
    _refuse_unknown_keys(field, _FILE)
    peaks = field["device"]["peak_flop_per_s"]
    if not peaks.get(REQUIRED_DTYPE):
        raise peaks.fail(
            f"has no {REQUIRED_DTYPE}, which costs are computed for; expected {REQUIRED_DTYPE}, {UNITS[REQUIRED_DTYPE]}"
        )
    return _WITH_SAMPLES.read(field)


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
"""What others call the element types."""


def _refuse_unknown_keys(document: Field, codec: Codec[Any]) -> None:
    """Raise the document's error for a key that no table of a machine has; what has a wrong type is passed over.

    It is refused, never passed over: `latency_us = 2` must not leave a machine without latency.
    """
    if codec.members and isinstance(document.value, dict):
        known = tuple(codec.members)
        for key, field in document.members():
            if key not in known:
                raise field.fail(f"is not a key of a machine file{_suggestion(key, known)}")
            _refuse_unknown_keys(field, codec.members[key])
    if codec.entries and isinstance(document.value, list):
        for entry in document.items():
            _refuse_unknown_keys(entry, codec.entries)


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
        *(f"[[kernels.samples]]\n{_assignments(_SAMPLE.write(sample))}" for sample in samples),
    ]
    return "\n".join(tables)


def _assignments(table: Mapping[str, object]) -> str:
    return "".join(f"{key} = {_value(value)}\n" for key, value in table.items())


def _value(value: object) -> str:
    if isinstance(value, str):
        # A string of JSON is one of TOML, but for DEL, which TOML wants escaped, and surrogates, which it has not.
        text = value.encode("utf-8", "replace").decode()
        return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_value, value))}]"
    assert isinstance(value, int | float)
    return repr(value)


# -- the machine at hand

_LISTING = ("nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits")
_LONGEST_S = 30
_NEAR = 0.1
"""Memory of a GPU and of a preset's device may differ by so much: drivers keep some, and count it otherwise."""

_MEASURE = "measure it: pase calibrate --device GPU -o here.toml, and --kernels for what kernels reach"


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU as its driver tells it."""

    name: str
    memory_bytes: int


def local_machine(presets: Sequence[Machine]) -> Machine:
    """Return the machine of this host: the preset of its GPUs, with as many in a node as there are.

    Raises MachineError where there is no GPU, where they differ, and where no preset is of them.
    """
    gpus = listed_gpus()
    first, count = gpus[0], len(gpus)
    if any(gpu != first for gpu in gpus):
        names = ", ".join(dict.fromkeys(_told(gpu) for gpu in gpus))
        raise MachineError(f"machine 'auto': this machine's {count} GPUs differ ({names}); expected equal ones")
    fitting = [machine for machine in presets if _is_of(machine.device, first)]
    if not fitting:
        raise MachineError(
            f"machine 'auto': no preset is of {_told(first)}, of which there are {count} here; {_MEASURE}"
        )
    machine, (node, *others) = fitting[0], fitting[0].levels
    found = f"{count} × {first.name}" if count > 1 else first.name
    # A group of one has no links within: those of the next level then join the devices themselves.
    levels = (replace(node, num_devices=count), *others) if count > 1 else tuple(others) or (node,)
    return replace(
        machine,
        name=f"{machine.name} (found)",
        description=f"{found} of this machine; all else as preset {machine.name!r}: {machine.description}",
        levels=levels,
        origin=None,
    )


def listed_gpus() -> tuple[Gpu, ...]:
    """Return this machine's GPUs; MachineError where there is none, or none that is told of."""
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


def _told(gpu: Gpu) -> str:
    return f"{gpu.name} with {gpu.memory_bytes / 2**30:.0f} GiB"


def _is_of(device: Device, gpu: Gpu) -> bool:
    """Return whether a preset's device is a GPU: the same model, as much memory, and no other form of it."""
    here, words = _words(gpu.name), _words(device.name)
    model = {word for word in words if _MODEL.fullmatch(word)}
    return (
        bool(model)
        and model <= here
        and not here & _FORMS - words
        and abs(gpu.memory_bytes / device.memory_bytes - 1) <= _NEAR
    )


_FORMS = frozenset({"pcie", "nvl", "ti", "super", "max"})
"""Words that tell other GPUs than those of the same name without them."""

_MODEL = re.compile(r"[a-z]?\d{3,4}")


def _words(name: str) -> frozenset[str]:
    return frozenset(re.split(r"[\s-]+", name.lower()))
