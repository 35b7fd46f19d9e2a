"""Moves: which device sends which box to which, when a tensor goes from one layout to another."""

from dataclasses import dataclass

from pase.targets.mesh_tensorflow.runtime.boxes import Box, intersection, num_points
from pase.targets.mesh_tensorflow.runtime.layouts import HOST, Layout
from pase.targets.mesh_tensorflow.runtime.refine import Hop


@dataclass(frozen=True, slots=True)
class Piece:
    """A box that a target position takes from a source position; coordinates of the whole tensor."""

    source: int
    box: Box


def pieces(hop: Hop) -> tuple[tuple[Piece, ...], ...]:
    """Return [target positions] the pieces that make up what each one holds.

    Every part of the source that overlaps the target's box gives one piece, from the replica on the same device
    if there is one, from the nearest device otherwise. Where the parts of the source overlap (windows, on the way
    back), the pieces do too, and are to be added.
    """
    source, target = hop.source, hop.target
    if hop.is_local:
        return tuple(_own(hop, i) for i in range(len(target.boxes)))
    holders: dict[int, list[int]] = {}
    for position, part in enumerate(source.parts):
        holders.setdefault(part, []).append(position)
    result = []
    for device, box in zip(target.devices, target.boxes, strict=True):
        taken = []
        for positions in holders.values():
            shared = intersection(source.boxes[positions[0]], box)
            if shared is not None:
                taken.append(Piece(_nearest(source, positions, device), shared))
        result.append(tuple(taken))
    return tuple(result)


def _own(hop: Hop, position: int) -> tuple[Piece, ...]:
    shared = intersection(hop.source.boxes[position], hop.target.boxes[position])
    return () if shared is None else (Piece(position, shared),)


def _nearest(source: Layout, positions: list[int], device: int) -> int:
    # Numbers that agree in their first binary digits are closest: those of one node, where nodes have 2^k devices.
    return min(positions, key=lambda position: (source.devices[position] ^ device, position))


def moved_points(hop: Hop) -> int:
    """Return how many points go from one device to another; what the host sends or gets does not count."""
    total = 0
    for device, taken in zip(hop.target.devices, pieces(hop), strict=True):
        for piece in taken:
            sender = hop.source.devices[piece.source]
            if sender != device and HOST not in (sender, device):
                total += num_points(piece.box)
    return total
