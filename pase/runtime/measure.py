"""Bytes that crossed devices in a step, counted in the graphs that TensorFlow ran."""

from typing import Any

from pase.runtime.layouts import HOST
from pase.runtime.program import virtual_cpu


def crossed_bytes(run_metadata: Any, graph: Any) -> int:
    """Return the bytes of all tensors sent from one device to another, the host apart.

    run_metadata: of a step run with partition graphs. graph: the graph that was run, which knows the tensors' shapes.
    """
    total = 0
    for partition in run_metadata.partition_graphs:
        nodes = {node.name: node for node in partition.node}
        for node in partition.node:
            if node.op == "_Send" and not _stays(node):
                total += _tensor_bytes(graph, nodes[node.input[0].partition(":")[0]], node.input[0])
    return total


def _stays(node: Any) -> bool:
    sender, receiver = (node.attr[key].s.decode() for key in ("send_device", "recv_device"))
    return sender == receiver or any(device.endswith(virtual_cpu(HOST)) for device in (sender, receiver))


def _tensor_bytes(graph: Any, sender: Any, name: str) -> int:
    """Return the size of an operation's output; 0 for the empty constant that stands for a control edge."""
    if sender.op == "Const" and 0 in [dim.size for dim in sender.attr["value"].tensor.tensor_shape.dim]:
        return 0
    tensor = graph.get_tensor_by_name(name if ":" in name else f"{name}:0")
    return int(tensor.shape.num_elements() * tensor.dtype.size)
