"""Bytes that crossed devices in a step, counted in the graphs that TensorFlow ran, and whose they were."""

import re
from collections.abc import Iterable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from math import prod
from typing import Any

from pase.runtime.compat import tf
from pase.runtime.layouts import HOST
from pase.runtime.program import virtual_cpu
from pase.runtime.traffic import NOTHING_MOVED, Movement, Traffic

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
    for node, size in _sends(run_metadata, graph):
        if _is_of_host(node):
            host_bytes += size
            continue
        found = [_scope(name, ranks) for name in receivers.get(_key(node), ())]
        scopes = [scope for scope in found if scope]
        if scopes:
            movement = traffic.movements[min(scopes, key=ranks.__getitem__)]
            by_movement[movement] = by_movement.get(movement, 0) + size
        else:
            elsewhere_bytes += size
    return Crossed(by_movement=by_movement, elsewhere_bytes=elsewhere_bytes, host_bytes=host_bytes)


def crossed_bytes(run_metadata: Any, graph: Any) -> int:
    """Return the bytes of all tensors sent from one device to another, the host apart."""
    return sum(size for node, size in _sends(run_metadata, graph) if not _is_of_host(node))


def tabulated(traffic: Traffic, measured: Crossed) -> dict[str, list[dict[str, Any]]]:
    """Return rows of edges and of layers, predicted beside measured, with their phases; as JSON has them."""
    movements = dict.fromkeys([*traffic.bytes_by_movement, *measured.by_movement])
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for movement in movements:
        predicted = traffic.bytes_by_movement.get(movement, 0)
        counted = measured.by_movement.get(movement, 0)
        row = rows.setdefault((movement.producer, movement.consumer), deepcopy(dict(NOTHING_MOVED)))
        for part in (row, row[movement.phase]):
            part["predicted_bytes"] += predicted
            part["measured_bytes"] += counted
    kept = {key: row for key, row in rows.items() if row["predicted_bytes"] or row["measured_bytes"]}
    return {
        "edges": [{"producer": u, "consumer": v} | row for (u, v), row in kept.items() if u != v],
        "layers": [{"name": u} | row for (u, v), row in kept.items() if u == v],
    }


def _sends(run_metadata: Any, graph: Any) -> Iterator[tuple[Any, int]]:
    """Yield each sending of a tensor from one device to another, and its bytes."""
    for partition in run_metadata.partition_graphs:
        nodes = {node.name: node for node in partition.node}
        for node in partition.node:
            if node.op == "_Send" and node.attr["send_device"].s != node.attr["recv_device"].s:
                yield node, _tensor_bytes(graph, nodes[node.input[0].partition(":")[0]], node.input[0])


def _is_of_host(node: Any) -> bool:
    ends = (node.attr[key].s.decode() for key in ("send_device", "recv_device"))
    return any(device.endswith(virtual_cpu(HOST)) for device in ends)


def _key(node: Any) -> tuple[bytes, bytes]:
    return node.attr["tensor_name"].s, node.attr["recv_device"].s


def _receivers(partitions: Iterable[Any]) -> dict[tuple[bytes, bytes], list[str]]:
    """Return the operations that use what is received, by the name under which it is sent and the device."""
    found: dict[tuple[bytes, bytes], list[str]] = {}
    for partition in partitions:
        receiving = {node.name: found.setdefault(_key(node), []) for node in partition.node if node.op == "_Recv"}
        for node in partition.node:
            for name in node.input:
                users = receiving.get(name.lstrip("^").partition(":")[0])
                if users is not None:
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
