"""Machines: the compute and memory of a device, and the bandwidth and latency of its links."""

from pase.machine.files import (
    AUTO,
    DEFAULT_MACHINE,
    load_machine,
    machine_document,
    machine_from_document,
    machine_schema,
    machine_text,
    machines,
    override_machine,
    parse_machine,
    preset_names,
)
from pase.machine.machine import Device, Kernels, KernelSample, Level, Machine, Origin, Overlap

__all__ = [
    "AUTO",
    "DEFAULT_MACHINE",
    "Device",
    "KernelSample",
    "Kernels",
    "Level",
    "Machine",
    "Origin",
    "Overlap",
    "load_machine",
    "machine_document",
    "machine_from_document",
    "machine_schema",
    "machine_text",
    "machines",
    "override_machine",
    "parse_machine",
    "preset_names",
]
