"""Machines as TOML text, which the standard library reads and does not write."""

import json
from collections.abc import Mapping

from pase.machine.machine import Machine
from pase.machine.read import machine_document


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
