"""What a traced step tells: bytes that crossed devices, and whose they were; memory that each device held at most."""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from pase.sharding.layouts import HOST
from pase.sharding.traffic import Movement
from pase.targets.mesh_tensorflow.primitives.compat import tf
from pase.targets.mesh_tensorflow.primitives.mesh import Traffic
from pase.targets.mesh_tensorflow.runtime.devices import HOST_PLACE, Devices, place

_FED = re.compile(r"_arg_(.+)_(\d+)_\d+(?::0)?")
"""The node that stands for what is fed: the operation's name, the number of its output and of the feed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Crossed:
    """Bytes that crossed devices in a step.

    by_movement: of each edge and layer, by phase. elsewhere_bytes: of operations that were to move nothing.
    host_bytes: between the host and the devices (feeds, the loss).
    """

    by_movement: Mapping[Movement, int]
    elsewhere_bytes: int
    host_bytes: int

    @property
    def total_bytes(self) -> int:
        """All bytes between devices, the host apart."""
        return sum(self.by_movement.values()) + self.elsewhere_bytes


def crossed(run_metadata: Any, graph: Any, traffic: Traffic) -> Crossed:
    """Return what crossed devices, told apart by the name scopes of the operations that received it.

    run_metadata: of a step run with partition graphs. graph: the graph that was run, which knows the tensors' shapes.
    What several movements received together, as TensorFlow sends a tensor to a device once, counts for the first.
    """
    receivers = _receivers(run_metadata.partition_graphs)
    ranks = {scope: rank for rank, scope in enumerate(traffic.movements)}
    by_movement: dict[Movement, int] = {}
    elsewhere_bytes = host_bytes = 0
    for sending in _sends(run_metadata, graph):
        size = sending.size_bytes
        if sending.is_of_host:
            host_bytes += size
            continue
        found = [_scope(name, ranks) for name in receivers.get(sending.key, ())]
        scopes = [scope for scope in found if scope]
        if scopes:
            movement = traffic.movements[min(scopes, key=ranks.__getitem__)]
            by_movement[movement] = by_movement.get(movement, 0) + size
        else:
            elsewhere_bytes += size
    return Crossed(by_movement=by_movement, elsewhere_bytes=elsewhere_bytes, host_bytes=host_bytes)


_Key = tuple[bytes, bytes, bytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sending:
    """A tensor sent from one device to another. key: what the receiving operation has in common with the sending one.

    is_of_host: whether it began or ends there.
    """

    key: _Key
    size_bytes: int
    is_of_host: bool


def _sends(run_metadata: Any, graph: Any) -> Iterator[_Sending]:
    """Yield each sending of a tensor from one device to another."""
    for partition in run_metadata.partition_graphs:
        nodes = {node.name: node for node in partition.node}
        for node in partition.node:
            if node.op == "_Send" and node.attr["send_device"].s != node.attr["recv_device"].s:
                sent = nodes[node.input[0].partition(":")[0]]
                yield _Sending(
                    key=_key(node),
                    size_bytes=_tensor_bytes(graph, sent, node.input[0]),
                    is_of_host=HOST_PLACE in (_place(node, "send"), _place(node, "recv")),
                )


def _place(node: Any, end: str) -> tuple[str, int] | None:
    return place(node.attr[f"{end}_device"].s.decode())


def _key(node: Any) -> _Key:
    """Return what a sending and a receiving have in common; of an operation that is neither, what no sending has."""
    return node.attr["tensor_name"].s, node.attr["send_device"].s, node.attr["recv_device"].s


def _receivers(partitions: Iterable[Any]) -> dict[_Key, list[str]]:
    """Return the operations that use what is received, by what it has in common with the sending."""
    found: dict[_Key, list[str]] = {}
    for partition in partitions:
        receiving = {node.name: found.setdefault(_key(node), []) for node in partition.node if node.op == "_Recv"}
        for node in partition.node:
            for name in node.input:
                users = receiving.get(name.lstrip("^").partition(":")[0])
                if users is not None and node.op != "_Send":
                    users.append(node.name)
    return found


def _scope(operation: str, scopes: Mapping[str, int]) -> str:
    """Return the innermost of the scopes that an operation is in, "" if it is in none."""
    scope = operation
    while scope and scope not in scopes:
        scope = scope.rpartition("/")[0]
    return scope


def _tensor_bytes(graph: Any, sender: Any, name: str) -> int:
    """Return the size of an operation's output; 0 for the empty constant that stands for a control edge."""
    if sender.op == "Const":
        value = sender.attr["value"].tensor
        return int(prod(dim.size for dim in value.tensor_shape.dim) * tf.as_dtype(value.dtype).size)
    fed = _FED.fullmatch(name)
    if fed:
        name = f"{fed[1]}:{fed[2]}"
    tensor = graph.get_tensor_by_name(name if ":" in name else f"{name}:0")
    return int(tensor.shape.num_elements() * tensor.dtype.size)


# -- memory


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
                (record.alloc_micros, record.alloc_bytes) for node in of_device.node_stats for record in _lasting(node)
            ]
    return [held + _highest(changes) for held, changes in zip(weights, records, strict=True)]


def _lasting(node: Any) -> Iterator[Any]:
    """Yield what an operation allocated and when it was freed, without what it freed itself before it ended.

    That is the workspace of a kernel, of a size that goes by the processor's caches: TensorFlow's own convolutions take
    24 MB each where oneDNN's take none.
    """
    end = node.all_start_micros + node.op_end_rel_micros
    for memory in node.memory:
        records = sorted(memory.allocation_records, key=lambda record: record.alloc_micros)
        by_itself = [record for record in records if record.alloc_bytes < 0 and record.alloc_micros <= end]
        workspaces = Counter(-record.alloc_bytes for record in by_itself)
        for record in records:
            if workspaces[record.alloc_bytes] > 0:
                workspaces[record.alloc_bytes] -= 1
            elif record not in by_itself:
                yield record


def _highest(changes: list[tuple[int, int]]) -> int:
    """Return the largest sum of bytes up to any time; what is freed at a time is so before what is allocated then."""
    held = most = 0
    for _, size in sorted(changes):
        held += size
        most = max(most, held)
    return most
