"""How tensors lie over devices: shard sizes, halos, and what two layouts of one tensor have in common.

Everything works on arrays of configurations: a `splits` argument is [K, D], a result is [K] or [K_u, K_v].
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from math import prod

import numpy as np
from numpy.typing import NDArray

from pase.graph import Access, Axis, Operator, Part, Window

FloatArray = NDArray[np.float64]
IndexArray = NDArray[np.int32]
IntArray = NDArray[np.int64]

SingleAxis = str | Window | Part | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Splits:
    """Configurations of one operator, by dim. values: [K, D]; extents: of each iteration dim, in the same order."""

    values: IndexArray
    extents: Mapping[str, int]

    def of(self, dim: str) -> IndexArray:
        """Return the [K] split factors of one dim."""
        return self.values[:, tuple(self.extents).index(dim)]

    def product(self, dims: tuple[str, ...]) -> IntArray:
        """Return the [K] number of parts that splits of these dims make together."""
        result = np.ones(len(self.values), dtype=np.int64)
        for dim in dims:
            result *= self.of(dim)
        return result


def splits_of(operator: Operator, values: IndexArray) -> Splits:
    """Return configurations of an operator, [K, D], with the extents that they split."""
    return Splits(values=values, extents=operator.extents)


def shard_size(shape: tuple[int, ...], axes: tuple[Axis, ...], splits: Splits) -> FloatArray:
    """Return the [K] number of elements in the largest shard of a tensor, halos left out."""
    size = np.ones(len(splits.values))
    for component in components(shape, axes, splits.extents):
        size *= by_split(_split_of(component.axis, splits), lambda k, c=component: _largest_part(c, k))  # type: ignore[misc]
    return size


def halo_size(access: Access, splits: Splits) -> FloatArray:
    """Return the [K] number of elements that the worst-placed device must fetch for its windows.

    Outputs, inputs and kernels are split evenly; a device needs the inputs that its outputs read through its part of
    the kernel, and owns its even part of all. Neither padding nor what strides and dilations skip is needed.
    """
    parts = components(access.shape, access.axes, splits.extents)
    windows = tuple(part for part in parts if isinstance(part.axis, Window))
    others = np.ones(len(splits.values))
    for part in parts:
        if part not in windows:
            others *= by_split(_split_of(part.axis, splits), lambda k, c=part: _largest_part(c, k))  # type: ignore[misc]
    kernels = [splits.of(part.axis.kernel) for part in windows if isinstance(part.axis, Window)]
    rows, inverse = distinct_rows(np.column_stack([split_columns(windows, splits), *kernels]))
    others *= np.array([_window_fetch(windows, row) for row in rows.tolist()])[inverse]
    return others


@dataclass(frozen=True, slots=True, kw_only=True)
class Component:
    """A factor of a tensor dim that one iteration dim indexes; length: its extent, dim_extent: the iteration dim's."""

    length: int
    axis: SingleAxis
    dim_extent: int
    kernel_extent: int = 1


def components(shape: tuple[int, ...], axes: tuple[Axis, ...], extents: Mapping[str, int]) -> tuple[Component, ...]:
    """Return a tensor's dims with products of iteration dims taken apart, row-major; extents: of the iteration dims."""
    result: list[Component] = []
    for length, axis in zip(shape, axes, strict=True):
        match axis:
            case tuple():
                result.extend(Component(length=extents[d], axis=d, dim_extent=extents[d]) for d in axis)
            case Window():
                result.append(
                    Component(
                        length=length, axis=axis, dim_extent=extents[axis.out], kernel_extent=extents[axis.kernel]
                    )
                )
            case Part():
                result.append(Component(length=length, axis=axis, dim_extent=extents[axis.dim]))
            case _:
                result.append(Component(length=length, axis=axis, dim_extent=length))
    return tuple(result)


def split_columns(parts: tuple[Component, ...], splits: Splits) -> IndexArray:
    """Return [K, number of components]: the split factor of each component under each configuration."""
    if not parts:
        return np.ones((len(splits.values), 0), dtype=np.int32)
    return np.column_stack([_split_of(part.axis, splits) for part in parts])


def by_split(split: IndexArray, function: Callable[[int], float]) -> FloatArray:
    """Return function(k) for each entry k, evaluated once for each distinct value."""
    values, inverse = np.unique(split, return_inverse=True)
    return np.array([function(int(k)) for k in values], dtype=np.float64)[inverse]


def distinct_rows(rows: IndexArray) -> tuple[IndexArray, NDArray[np.intp]]:
    """Return the distinct rows of [N, C] non-negative integers, in order, and [N] which one each row is."""
    base = rows.max(axis=0, initial=0).astype(np.int64) + 1
    if prod(base.tolist()) >= 1 << 62:
        values, inverse = np.unique(rows, axis=0, return_inverse=True)
        return values, inverse.reshape(-1)
    # One number for a row, its columns as digits: sorting numbers is much faster than sorting rows.
    weights = np.concatenate([np.cumprod(base[:0:-1])[::-1], np.ones(1, dtype=np.int64)]) if base.size else base
    _, first, inverse = np.unique(rows @ weights, return_index=True, return_inverse=True)
    return rows[first], inverse


def _split_of(axis: SingleAxis, splits: Splits) -> IndexArray:
    match axis:
        case None:
            return np.ones(len(splits.values), dtype=np.int32)
        case Window():
            return splits.of(axis.out)
        case Part():
            return splits.of(axis.dim)
        case _:
            return splits.of(axis)


def _largest_part(component: Component, split: int) -> float:
    if isinstance(component.axis, Part):
        return float(np.bincount(part_labels(component, split)).max())
    return float(-(-component.length // split))


def _window_fetch(windows: tuple[Component, ...], split: list[int]) -> float:
    """Return the most positions of all windows together that any device needs and does not own.

    split: of the outputs of each window, then of the kernel of each.
    """
    needed, owned = np.ones(1), np.ones(1)
    for window, outs, kernels in zip(windows, split, split[len(windows) :], strict=False):
        need, own = _window_need(window, outs, kernels)
        needed, owned = np.outer(needed, need).reshape(-1), np.outer(owned, own).reshape(-1)
    return float((needed - owned).max())


@cache
def _window_need(component: Component, outs: int, kernels: int) -> tuple[IntArray, IntArray]:
    """Return (needed, of which owned) along one window axis: for each part of its outputs, of each of its kernel."""
    window = component.axis
    assert isinstance(window, Window)
    out, own = even_bounds(component.dim_extent, outs), even_bounds(component.length, outs)
    kernel = even_bounds(component.kernel_extent, kernels)
    needed, owned = np.zeros((outs, kernels), dtype=np.int64), np.zeros((outs, kernels), dtype=np.int64)
    for i, j in np.ndindex(outs, kernels):
        is_read = np.zeros(component.length, dtype=np.bool_)
        for point in range(int(kernel[j]), int(kernel[j + 1])):
            offset = point * window.dilation - window.pad
            # The first output whose element is no padding, and the element of the last one.
            first = max(int(out[i]), -(offset // window.stride))
            last = (int(out[i + 1]) - 1) * window.stride + offset
            is_read[max(0, first * window.stride + offset) : max(0, last + 1) : window.stride] = True
        needed[i, j] = np.count_nonzero(is_read)
        owned[i, j] = np.count_nonzero(is_read[own[i] : own[i + 1]])
    return needed.reshape(-1), owned.reshape(-1)


def even_bounds(extent: int, parts: int) -> IntArray:
    """Return the [parts + 1] bounds of a balanced partition: the first extent mod parts get one more."""
    small, extra = divmod(extent, parts)
    return np.array([i * small + min(i, extra) for i in range(parts + 1)], dtype=np.int64)


def part_labels(component: Component, split: int) -> IntArray:
    """Return, for each position along a component, which part of the iteration dim it belongs to."""
    bounds = even_bounds(component.dim_extent if isinstance(component.axis, Part) else component.length, split)
    positions = np.arange(component.length)
    if isinstance(component.axis, Part):
        positions = positions + component.axis.offset
    return np.searchsorted(bounds, positions, side="right").astype(np.int64) - 1


def holding_fraction(parts: tuple[Component, ...], columns: IndexArray) -> FloatArray:
    """Return the [L] fractions of all devices that hold anything of a tensor.

    columns: [L, components], split factor of each component.
    """
    shares = np.ones(len(columns))
    for part, split in zip(parts, columns.T, strict=True):
        if isinstance(part.axis, Part):
            shares *= by_split(split, lambda k, c=part: len(np.unique(part_labels(c, k))) / k)  # type: ignore[misc]
    return shares
