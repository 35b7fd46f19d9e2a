"""Putting pieces together on the device that needs them, and cutting them on the device that has them."""

from collections.abc import Sequence
from typing import Any

from pase.sharding.boxes import Box, extents, num_points, offsets
from pase.sharding.layouts import HOST
from pase.sharding.reshard import ReshardStep, pieces
from pase.targets.mesh_tensorflow.runtime.compat import tf
from pase.targets.mesh_tensorflow.runtime.traffic import Account

_Placed = tuple[Box, Any]
"""A tensor and the box that it fills."""


def run_hop(
    slices: Sequence[Any],
    hop: ReshardStep,
    *,
    source_names: Sequence[str],
    target_names: Sequence[str],
    fill: float,
    traffic: Account,
) -> list[Any]:
    """Return [target positions] the tensors of a layout, made from the slices of another.

    slices: [source positions], in any shape with as many points as their boxes. fill: what stands where a box
    sticks out of the tensor. Pieces that overlap are added, in the order of the source's parts.
    """
    # A scope of its own for each movement: what crosses devices is told apart by it.
    with tf.name_scope("move") as scope:
        local = [
            _as_shape(x, extents(box), name, is_own=traffic.keeps_alive)
            for x, box, name in zip(slices, hop.source.boxes, source_names, strict=True)
        ]
        cuts: dict[tuple[int, Box], Any] = {}
        results = []
        moved_bytes = 0
        for position, taken in enumerate(pieces(hop)):
            box, device = hop.target.boxes[position], hop.target.devices[position]
            placed: list[_Placed] = []
            for piece in taken:
                key = (piece.source, piece.box)
                if key not in cuts:
                    held = hop.source.boxes[piece.source]
                    cuts[key] = _cut(local[piece.source], held, piece.box, source_names[piece.source])
                placed.append((piece.box, cuts[key]))
                sender = hop.source.devices[piece.source]
                if sender != device and HOST not in (sender, device):
                    moved_bytes += num_points(piece.box) * slices[0].dtype.size
            with tf.device(target_names[position]):
                whole = assembled(placed, box, fill, slices[0].dtype)
                is_sent = len(placed) == 1 and whole is placed[0][1] and hop.source.devices[taken[0].source] != device
                # Brought here once, whoever uses it.
                results.append(tf.identity(whole) if is_sent else whole)
        traffic.add(scope.rstrip("/"), moved_bytes)
        traffic.keep(results)
    return results


def assembled(placed: Sequence[_Placed], box: Box, fill: float, dtype: Any) -> Any:
    """Return the tensor of a box made of pieces that form a grid; they overlap only where they are to be added."""
    if not placed:
        return tf.fill(extents(box), tf.constant(fill, dtype))
    for dim in reversed(range(len(box))):
        rows: dict[Box, list[_Placed]] = {}
        for part, tensor in placed:
            rows.setdefault(part[:dim] + part[dim + 1 :], []).append((part, tensor))
        placed = [_merged(row, dim, box) for row in rows.values()]
    ((part, tensor),) = placed
    return _padded(tensor, part, box, fill)


def _merged(row: list[_Placed], dim: int, box: Box) -> _Placed:
    """Return pieces that differ along one dim as one: laid end to end, or added where they overlap."""
    if len(row) == 1:
        return row[0]
    layers: list[list[_Placed]] = []
    for part, tensor in sorted(row, key=lambda item: item[0][dim]):
        # The first layer of pieces that ends before this one begins.
        for layer in layers:
            if layer[-1][0][dim][1] <= part[dim][0]:
                layer.append((part, tensor))
                break
        else:
            layers.append([(part, tensor)])
    if len(layers) == 1:
        return _joined(layers[0], dim)
    # Zeros around each layer: what is added must be as long.
    low = min(layer[0][0][dim][0] for layer in layers)
    high = max(layer[-1][0][dim][1] for layer in layers)
    terms = []
    for layer in layers:
        part, tensor = _joined(layer, dim)
        whole_row = (*part[:dim], (low, high), *part[dim + 1 :])
        terms.append(_padded(tensor, part, whole_row, 0))
    return whole_row, tf.add_n(terms)


def _joined(layer: list[_Placed], dim: int) -> _Placed:
    """Return pieces in order along one dim as one, zeros in the gaps."""
    if len(layer) == 1:
        return layer[0]
    tensors: list[Any] = []
    first, last = layer[0][0], layer[-1][0]
    position = first[dim][0]
    for part, tensor in layer:
        low, high = part[dim]
        if low > position:
            gap = list(extents(part))
            gap[dim] = low - position
            tensors.append(tf.zeros(gap, tensor.dtype))
        tensors.append(tensor)
        position = high
    return (*first[:dim], (first[dim][0], last[dim][1]), *first[dim + 1 :]), tf.concat(tensors, dim)


def _padded(tensor: Any, part: Box, box: Box, fill: float) -> Any:
    if part == box:
        return tensor
    before = offsets(part, box)
    after = [high - last for (_, last), (_, high) in zip(part, box, strict=True)]
    return tf.pad(tensor, list(zip(before, after, strict=True)), constant_values=tf.constant(fill, tensor.dtype))


def _cut(tensor: Any, held: Box, wanted: Box, device: str) -> Any:
    if held == wanted:
        return tensor
    with tf.device(device):
        return tf.slice(tensor, offsets(wanted, held), extents(wanted))


def _as_shape(tensor: Any, shape: tuple[int, ...], device: str, *, is_own: bool) -> Any:
    """Return a tensor in a shape; is_own: as one of its own, so that TensorFlow does not send it for several uses."""
    if tuple(tensor.shape.as_list()) == shape:
        if not is_own:
            return tensor
        with tf.device(device):
            return tf.identity(tensor)
    with tf.device(device):
        return tf.reshape(tensor, shape)
