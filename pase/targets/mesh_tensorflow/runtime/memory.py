"""Memory that each device held at most in a step, from what TensorFlow's allocators recorded."""

from math import prod
from typing import Any

from pase.sharding.layouts import HOST
from pase.targets.mesh_tensorflow.runtime.compat import tf
from pase.targets.mesh_tensorflow.runtime.devices import Devices, place


def peak_bytes(run_metadata: Any, graph: Any, devices: Devices) -> list[int]:
    """Return [devices] the bytes of a device's weights and of the most that was allocated on it at a time.

    run_metadata: of a step run with a full trace. What was alive before the step, the weights apart, is not counted,
    nor is scratch memory that an operation frees before it ends.
    """
    numbers = devices.numbers

    def number(name: str) -> int | None:
        """Return the number of a device; None for the host and what is none of the program's."""
        found = place(name)
        known = HOST if found is None else numbers.get(found, HOST)
        return None if known == HOST else known

    weights = [0] * len(devices.names)
    for operation in graph.get_operations():
        device = number(operation.device)
        if operation.type == "VarHandleOp" and device is not None:
            shape = operation.get_attr("shape").dim
            weights[device] += prod(dim.size for dim in shape) * tf.as_dtype(operation.get_attr("dtype")).size
    records: list[list[tuple[int, int]]] = [[] for _ in weights]
    for of_device in run_metadata.step_stats.dev_stats:
        device = number(of_device.device)
        if device is not None:
            records[device] += [
                (record.alloc_micros, record.alloc_bytes)
                for node in of_device.node_stats
                for memory in node.memory
                for record in memory.allocation_records
            ]
    return [held + _highest(changes) for held, changes in zip(weights, records, strict=True)]


def _highest(changes: list[tuple[int, int]]) -> int:
    """Return the largest sum of bytes up to any time; what is freed at a time is so before what is allocated then."""
    held = most = 0
    for _, size in sorted(changes):
        held += size
        most = max(most, held)
    return most
