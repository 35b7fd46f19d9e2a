"""How tensors lie over devices: shard sizes, halos, and what two layouts of one tensor have in common.

Everything works on arrays of configurations: a `splits` argument is [K, D], a result is [K] or [K_u, K_v].
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
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

    Outputs and inputs are both split evenly; a device needs the inputs from the first to the last under its
    outputs' windows, clipped to the tensor, and owns its even part of them.
    """
    parts = components(access.shape, access.axes, splits.extents)
    windows = tuple(part for part in parts if isinstance(part.axis, Window))
    others = np.ones(len(splits.values))
    for part in parts:
        if part not in windows:
            others *= by_split(_split_of(part.axis, splits), lambda k, c=part: _largest_part(c, k))  # type: ignore[misc]
    rows, inverse = distinct_rows(split_columns(windows, splits))
    others *= np.array([_window_fetch(windows, tuple(row)) for row in rows.tolist()])[inverse]
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


def _window_fetch(windows: tuple[Component, ...], split: tuple[int, ...]) -> float:
    """Return the most positions of all windows together that any device needs and does not own."""
    needed, owned = np.ones(1), np.ones(1)
    for window, k in zip(windows, split, strict=True):
        need, own = _window_need(window, k)
        needed, owned = np.outer(needed, need).reshape(-1), np.outer(owned, own).reshape(-1)
    return float((needed - owned).max())


def _window_need(component: Component, split: int) -> tuple[IntArray, IntArray]:
    """Return (needed, of which owned) along one window axis for each of its parts."""
    window = component.axis
    assert isinstance(window, Window)
    if split == 1:
        return np.array([component.length]), np.array([component.length])
    out, own = even_bounds(component.dim_extent, split), even_bounds(component.length, split)
    reach = window.dilation * (component.kernel_extent - 1)
    low = np.clip(out[:-1] * window.stride - window.pad, 0, component.length)
    high = np.clip((out[1:] - 1) * window.stride - window.pad + reach + 1, 0, component.length)
    owned = np.clip(np.minimum(high, own[1:]) - np.maximum(low, own[:-1]), 0, None)
    return high - low, owned


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
