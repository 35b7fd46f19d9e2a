"""`cut_of`: the tensor from which a node is sliced, by views only, and the points of it that the node has."""

from collections.abc import Container, Sequence
from dataclasses import dataclass
from operator import getitem
from typing import Any

import torch
from torch import fx

_ATEN = torch.ops.aten

COPIES = {_ATEN.clone.default, _ATEN.contiguous.default}
_VIEWS = {
    *(_ATEN.reshape.default, _ATEN.unsqueeze.default, _ATEN.squeeze.dim, _ATEN.transpose.int, _ATEN.permute.default),
    *(_ATEN.select.int, *COPIES),
}
_CUTTING = {
    *(_ATEN.chunk.default, _ATEN.split.Tensor, _ATEN.split_with_sizes.default, _ATEN.unbind.int),
    _ATEN.split.sizes,
}


@dataclass(frozen=True, slots=True)
class Cut:
    """Which points of a tensor one has that is cut out of it: the first, and the extents and steps from there on."""

    start: int
    steps: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, x: Any) -> "Cut":
        """Return the points of its storage that a tensor has; contiguous dims are merged."""
        steps: list[tuple[int, int]] = []
        for extent, stride in zip(x.shape, x.stride(), strict=True):
            if extent == 1:
                continue
            if steps and steps[-1][1] == extent * stride:
                steps[-1] = steps[-1][0] * extent, stride
            else:
                steps.append((extent, stride))
        return cls(x.storage_offset(), tuple(steps))

    @classmethod
    def of_range(cls, shape: Sequence[int], dim: int, start: int, size: int) -> "Cut":
        """Return that of a range of a dim of a tensor whose elements are row-major."""
        return cls.of(torch.empty(tuple(shape), device="meta").narrow(dim, start, size))


def cut_of(node: fx.Node, wholes: Container[fx.Node]) -> tuple[fx.Node, Cut] | None:
    """Return the tensor, row-major as `wholes` have it, from which a node is sliced by views only; None for none."""
    whole = _source_of_cut(node)
    if whole is None:
        return None
    views = [node]
    while whole not in wholes:
        source = _source_of_cut(whole) or (whole.args[0] if whole.target in _VIEWS else None)
        if source is None:
            return None
        views.append(whole)
        whole = source
    base = torch.empty(tuple(whole.meta["val"].shape), device="meta")
    found = base
    for view in reversed(views):
        if view.target is getitem:
            split, number = view.args
            found = split.target(found, *split.args[1:], **split.kwargs)[number]
        # A copy has the same points in the same order of dims.
        elif view.target not in COPIES:
            found = view.target(found, *view.args[1:], **view.kwargs)
    if found.untyped_storage()._cdata != base.untyped_storage()._cdata:
        return None
    return whole, Cut.of(found)


def _source_of_cut(node: fx.Node) -> Any:
    """Return the tensor from which one operator slices a node, None for other operators."""
    if node.target is getitem and node.args[0].target in _CUTTING:
        return node.args[0].args[0]
    return node.args[0] if node.target in (_ATEN.select.int, _ATEN.slice.Tensor) else None
