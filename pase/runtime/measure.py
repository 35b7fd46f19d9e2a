"""Bytes that crossed devices in a step, counted in the graphs that TensorFlow ran."""

from typing import Any

from pase.errors import RuntimeFailure
from pase.runtime.layouts import HOST
from pase.runtime.program import virtual_cpu


def crossed_bytes(run_metadata: Any, graph: Any) -> int:
    """Return the bytes of all tensors sent from one device to another, the host apart.

    run_metadata: of a step run with partition graphs. graph: the graph that was run, which knows the tensors' shapes.
    """
    total = 0
    for partition in run_metadata.partition_graphs:
        for node in partition.node:
            if node.op in {"_Send", "_HostSend"} and not _stays(node) and not node.input[0].startswith("^"):
                total += _tensor_bytes(graph, node)
    return total


def _stays(node: Any) -> bool:
    sender, receiver = (node.attr[key].s.decode() for key in ("send_device", "recv_device"))
    return sender == receiver or any(device.endswith(virtual_cpu(HOST)) for device in (sender, receiver))


def _tensor_bytes(graph: Any, node: Any) -> int:
    name = node.attr["tensor_name"].s.decode()
    # edge_<number>_<operation>, and the output's number where it is not the first.
    source = node.input[0]
    tensor_name = source if ":" in source else f"{source}:0"
    try:
        tensor = graph.get_tensor_by_name(tensor_name)
    except (KeyError, ValueError):
        # A control edge is sent as an empty tensor that the partitioner made.
        if node.attr["T"].type and "control" in name.lower():
            return 0
        raise RuntimeFailure(f"the graph has no tensor {tensor_name!r}, which was sent as {name!r}") from None
    return int(tensor.shape.num_elements() * tensor.dtype.size)
