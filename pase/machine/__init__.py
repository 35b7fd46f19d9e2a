"""Machines: what a device computes and what its links carry."""

from pase.machine.machine import Device, Level, Machine
from pase.machine.read import (
    DEFAULT_MACHINE,
    load_machine,
    machine_document,
    machine_from_document,
    override_machine,
    parse_machine,
    preset_names,
)

__all__ = [
    "DEFAULT_MACHINE",
    "Device",
    "Level",
    "Machine",
    "load_machine",
    "machine_document",
    "machine_from_document",
    "override_machine",
    "parse_machine",
    "preset_names",
]
