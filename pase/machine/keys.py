"""The keys of a machine file, each with the unit of its value, and the refusal of others.

A key that is not known is refused, never passed over: `latency_us = 2` must not leave a machine without latency.
"""

import difflib
from collections.abc import Mapping
from types import MappingProxyType

from pase.common.documents import Field

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
    """Raise the document's error for a key that no table of a machine has; what has a wrong type is passed over."""
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
