"""Memory that each device held at most in a step, from what TensorFlow's allocators recorded."""

import re
from math import prod
from typing import Any

from pase.runtime.compat import tf

_DEVICE = re.compile(r"/device:CPU:(\d+)$", re.IGNORECASE)


def peak_bytes(run_metadata: Any, graph: Any, num_devices: int) -> list[int]:
    """Return [devices] the bytes of a device's weights and of the most that was allocated on it at a time.

    run_metadata: of a step run with a full trace. What was alive before the step, the weights apart, is not counted,
    nor is scratch memory that an operation frees before it ends.
    """
    weights = [0] * num_devices
    for operation in graph.get_operations():
        device = _number(operation.device)
        if operation.type == "VarHandleOp" and device is not None:
            shape = operation.get_attr("shape").dim
            weights[device] += prod(dim.size for dim in shape) * tf.as_dtype(operation.get_attr("dtype")).size
    records: list[list[tuple[int, int]]] = [[] for _ in weights]
    for of_device in run_metadata.step_stats.dev_stats:
        device = _number(of_device.device)
        if device is not None:
            records[device] += [
                (record.alloc_micros, record.alloc_bytes)
                for node in of_device.node_stats
                for memory in node.memory
                for record in memory.allocation_records
            ]
    return [held + _highest(changes) for held, changes in zip(weights, records, strict=True)]


def _number(device: str) -> int | None:
    """Return the number of a device by TensorFlow's name; None for the host, which is the first one."""
    found = _DEVICE.search(device)
    return int(found[1]) - 1 if found and int(found[1]) > 0 else None


def _highest(changes: list[tuple[int, int]]) -> int:
    """Return the largest sum of bytes up to any time; what is freed at a time is so before what is allocated then."""
    held = most = 0
    for _, size in sorted(changes):
        held += size
        most = max(most, held)
    return most
