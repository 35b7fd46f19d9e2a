"""Weights of vertices: which tensor of the source each one is, what is shared, and what is read in pieces."""

from dataclasses import dataclass, replace

from pase.graph import Access, Role
from pase.importers.ir import Leaf, Piece, Trace, Use


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightSource:
    """Where the values of a vertex's weight come from: a tensor of the source, perhaps a piece, perhaps seen otherwise.

    The elements, in row-major order of what is read, are those of the weight in its own.
    """

    layer: str
    tensor: str
    source: str
    piece: Piece | None = None


class Weights:
    """How often each weight of a trace is read, and in which pieces."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._pieces = pieces_read(trace)
        reads: dict[str, list[tuple[Leaf, Use]]] = {}
        for node in trace.nodes:
            for use in node.inputs:
                leaf = trace.leaf.get(use.value)
                if leaf is not None and leaf.role == "parameter":
                    reads.setdefault(_storage(leaf), []).append((leaf, use))
        self._tiled = {name for name, uses in reads.items() if self._is_tiled(uses)}
        self._readers: dict[str, int] = {}
        for uses in reads.values():
            for leaf, use in uses:
                key = self._key(leaf, use)
                self._readers[key] = self._readers.get(key, 0) + 1

    def read(self, access: Access, use: Use, layer: str) -> tuple[Access, WeightSource]:
        """Return a read of a weight, and where that is from.

        One that is read in part, or as something computed of it, is held whole, and its gradient is added up
        everywhere, unless the parts make it up.
        """
        leaf = self._trace.leaf[use.value]
        is_part = use.piece is not None and _storage(leaf) in self._tiled
        if use.seen_as is not None or (use.piece is not None and not is_part):
            access = replace(
                access, shape=leaf.value.shape, index_map=(None,) * len(leaf.value.shape), partial_over=None
            )
        key = self._key(leaf, use)
        source = WeightSource(
            layer=layer, tensor=access.tensor, source=leaf.value.name, piece=use.piece if is_part else None
        )
        return replace(access, role=Role.PARAMETER, shared=key if self._readers[key] > 1 else ""), source

    def is_held_whole(self, use: Use) -> bool:
        """Return whether a weight is read in a way that tells nothing of its parts."""
        return use.seen_as is not None or (
            use.piece is not None and _storage(self._trace.leaf[use.value]) not in self._tiled
        )

    def _key(self, leaf: Leaf, use: Use) -> str:
        storage = _storage(leaf)
        if use.piece is None or storage not in self._tiled:
            return storage
        return f"{storage}[{use.piece.dim}:{use.piece.start}:{use.piece.start + use.piece.size}]"

    def _is_tiled(self, uses: list[tuple[Leaf, Use]]) -> bool:
        """Whether the pieces in which a weight is read make it up, each element once, and are all that is read."""
        pieces = {use.piece for _, use in uses if use.piece is not None}
        if any(use.piece is None for _, use in uses) or len({piece.dim for piece in pieces}) != 1:
            return False
        at = 0
        for piece in sorted(pieces, key=lambda p: p.start):
            if piece.start != at:
                return False
            at += piece.size
        shapes = {leaf.value.shape for leaf, _ in uses}
        (dim,) = {piece.dim for piece in pieces}
        return all(shape[dim] == at for shape in shapes)


def pieces_read(trace: Trace) -> dict[str, tuple[Piece, ...]]:
    """Return the pieces in which each value is read."""
    found: dict[str, dict[Piece, None]] = {}
    for node in trace.nodes:
        for use in node.inputs:
            if use.piece is not None:
                found.setdefault(use.value, {})[use.piece] = None
    return {name: tuple(pieces) for name, pieces in found.items()}


def _storage(leaf: Leaf) -> str:
    return leaf.storage or leaf.value.name
