"""`Wires`: what devices send each other within a layer, counted."""

from collections.abc import Sequence
from typing import Any

from pase.targets.mesh_tensorflow.runtime.compat import tf

Cells = dict[tuple[int, int], Any]
"""A tensor for each (d, e) of the devices that compute one layer's part of the steps."""

Positions = dict[tuple[int, int], int]
"""Position in the mesh for each of these devices."""


class Wires:
    """Sends tensors between positions of a mesh. sent: each tensor that arrived, at its target."""

    def __init__(self, mesh: Any) -> None:
        self._names = mesh.device_names
        self.sent: list[Any] = []

    def on(self, position: int) -> Any:
        """Return the context in which operations run at a position."""
        return tf.device(self._names[position])

    def send(self, x: Any, source: int, target: int) -> Any:
        """Return a tensor at another position."""
        if source == target:
            return x
        with self.on(target):
            self.sent.append(tf.identity(x))
        return self.sent[-1]

    def send_all(self, x: Cells, source: Positions, target: Positions) -> Cells:
        """Return tensors at other positions, each at that of its key."""
        return {key: self.send(tensor, source[key], target[key]) for key, tensor in x.items()}

    def summed(self, terms: Sequence[tuple[int, Any]]) -> dict[int, Any]:
        """Return at each of some positions the sum of what they hold."""
        root = terms[0][0]
        held = [self.send(x, position, root) for position, x in terms]
        with self.on(root):
            total = held[0] if len(held) == 1 else tf.add_n(held)
        return {position: self.send(total, root, position) for position, _ in terms}


def total_bytes(tensors: Sequence[Any]) -> int:
    """Return the bytes of tensors of known shapes."""
    return sum(int(x.shape.num_elements()) * int(x.dtype.size) for x in tensors)
