"""Dims of a layer's tensors, told by their names whatever framework holds them: windows, filters, and what is wrong."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Protocol

import numpy as np

from pase.errors import ProgramError
from pase.sharding.layouts import DeviceMesh, WindowDim
from pase.sharding.shards import FloatArray


class NamedDim(Protocol):
    """A dim as a framework has it: its name, and its extent on all devices together."""

    @property
    def name(self) -> str:
        """Its name."""

    @property
    def size(self) -> int:
        """Its extent."""


def window(out: NamedDim, kernel: NamedDim, *, of: int, stride: int = 1, dilation: int = 1, pad: int = 0) -> WindowDim:
    """Return a tensor dim of extent `of` that output dim `out` reads through a window of dim `kernel`.

    Output o reads points ``o·stride + k·dilation - pad``, k = 0 … kernel - 1.
    """
    return WindowDim(
        out=out.name,
        out_extent=out.size,
        kernel=kernel.name,
        kernel_extent=kernel.size,
        extent=of,
        stride=stride,
        dilation=dilation,
        pad=pad,
    )


# -- filters of convolutions


@dataclass(frozen=True, slots=True, kw_only=True)
class FilterDims:
    """What the dims of a convolution are, by name; those of its windows are none of them.

    groups: in all three tensors. inputs: channels of what it reads. outputs: those of its result. batch: of the result,
    dims that the filters lack.
    """

    groups: tuple[str, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    batch: tuple[str, ...]

    def extents(self, sizes: Mapping[str, int]) -> tuple[int, int, int, int]:
        """Return the points of groups, inputs, outputs and batch where dims have these sizes, others one point."""
        groups, inputs, outputs, batch = (
            prod(sizes.get(name, 1) for name in names) for names in (self.groups, self.inputs, self.outputs, self.batch)
        )
        return groups, inputs, outputs, batch


def filter_dims(
    read: Collection[str], filters: Sequence[str], written: Sequence[str], spatial: Collection[str]
) -> FilterDims:
    """Return what the dims of filters are; spatial: the dims of windows, their positions and their points."""
    own = [name for name in filters if name not in spatial]
    return FilterDims(
        groups=tuple(name for name in own if name in read and name in written),
        inputs=tuple(name for name in own if name not in written),
        outputs=tuple(name for name in own if name in written and name not in read),
        batch=tuple(name for name in written if name not in filters and name not in spatial),
    )


def check_filters(
    layer: str,
    read: Collection[str],
    filters: Sequence[NamedDim],
    windows: Sequence[WindowDim],
    written: Sequence[NamedDim],
) -> None:
    """Raise ProgramError where a convolution's result has dims that neither what it reads nor its filters have."""
    # A channel of one point may be left out of any of the three.
    given = {*read, *(dim.name for dim in filters), *(window.out for window in windows)}
    wrong = [dim for dim in written if dim.name not in given and dim.size > 1]
    wrong = wrong or [a for a in written for b in filters if a.name == b.name and a.size != b.size]
    if wrong:
        raise ProgramError(
            f"conv{len(windows)}d of layer {layer!r}: filters of {named(filters)} do not produce "
            f"{', '.join(dim.name for dim in wrong)}; give the same dims to both"
        )


def check_transposed(layer: str, mesh: DeviceMesh, windows: Iterable[Iterable[NamedDim]]) -> None:
    """Raise ProgramError where a transposed convolution's windows, positions or points, are split."""
    split = [dim.name for dims in windows for dim in dims if mesh.size(dim.name) != 1]
    if split:
        raise ProgramError(
            f"layer {layer!r} is a transposed convolution, of which {', '.join(split)} cannot be split; split its "
            "batch or its channels"
        )


# -- pooling


def check_pooled(layer: str, mesh: DeviceMesh, windows: Iterable[WindowDim]) -> None:
    """Raise ProgramError where the points of a pooling's windows are split."""
    for dim in windows:
        if mesh.size(dim.kernel) != 1:
            raise ProgramError(
                f"layer {layer!r} pools windows of {dim.kernel}, which cannot be split; take {dim.kernel} out of the "
                "mesh's axes"
            )


def mean_weights(
    windows: Sequence[WindowDim], mesh: DeviceMesh, point: Mapping[str, int], *, count_padding: bool
) -> FloatArray:
    """Return [outputs of the part…] what means over all points of a window are multiplied by at a point of a mesh.

    count_padding: whether points of padding count; without, a mean is one of the points that there are.
    """
    found = np.ones(())
    for dim in windows:
        low, high = dim.parts(mesh, point)[0]
        num_outs = high - low
        first = np.arange(low, high) * dim.stride - dim.pad
        points = first[:, np.newaxis] + np.arange(dim.kernel_extent) * dim.dilation
        inside = np.maximum(((points >= 0) & (points < dim.extent)).sum(axis=1), 1)
        found = np.multiply.outer(found, np.full(num_outs, dim.kernel_extent) if count_padding else inside)
    return prod(dim.kernel_extent for dim in windows) / found


# -- tensors put together and taken apart


def not_joined(layer: str, lengths: Iterable[int], along: NamedDim) -> ProgramError:
    """Return the error of tensors that are put end to end along a dim of another extent."""
    return ProgramError(
        f"layer {layer!r} joins {' + '.join(map(str, lengths))} points along {along.name} = {along.size}; correct the "
        "dims so that they add up"
    )


def check_cut(layer: str, along: NamedDim, start: int, step: int, last: int) -> None:
    """Raise ProgramError where each `step`-th point of [start, last) is not all in a dim."""
    if start < 0 or step < 1 or last > along.size:
        raise ProgramError(f"layer {layer!r} cuts [{start}, {last}) from {along.name} = {along.size}; correct the cut")


def place_of_piece(layer: str, dims: Sequence[NamedDim], along: str, start: int, size: int) -> int:
    """Return which of the dims is called `along`; ProgramError where none has the points [start, start + size)."""
    for position, dim in enumerate(dims):
        if dim.name == along and 0 <= start < start + size <= dim.size:
            return position
    raise ProgramError(f"layer {layer!r}: {named(dims)} has no [{start}, {start + size}) of {along}; correct the piece")


def place_along(layer: str, dims: Sequence[NamedDim], mesh: DeviceMesh, along: NamedDim) -> int:
    """Return which of the dims one is along which points move; ProgramError where it is none of them, or is split."""
    if along not in dims or mesh.size(along.name) > 1:
        raise ProgramError(
            f"layer {layer!r}: {along.name} of {named(dims)} is moved along, which needs all of it on every device; "
            "do not split it"
        )
    return dims.index(along)


def check_shared(weight: str, first: str, dims: Sequence[NamedDim], layer: str, others: Sequence[NamedDim]) -> None:
    """Raise ProgramError where two layers share a weight and dims of theirs have not as many points."""
    shape, other = ([dim.size for dim in own] for own in (dims, others))
    if prod(shape) != prod(other):
        raise ProgramError(
            f"layers {first!r} and {layer!r} share weight {weight!r} with shapes {shape} and {other}; "
            "give them one shape"
        )


def named(dims: Iterable[NamedDim]) -> str:
    """Return dims as messages have them."""
    return ", ".join(f"{dim.name}={dim.size}" for dim in dims)
