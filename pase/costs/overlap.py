"""What two layouts of one tensor have in common: the volume that stays on a device when the layout changes.

The producer's and the consumer's shapes may differ by a reshape, so their dims are first brought to groups of
equal size. A group of one dim on either side is a plain box partition: |A(u,d) ∩ A(v,d)| along it is
extent ÷ max(split_u, split_v) under the assignment that maximises locality, where one split divides the other.
Every other group is counted out. Where all parts nest, as they do on a power of two of devices, what moves is
exactly the least that any assignment of parts to devices can reach; where parts cross, it is an estimate.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import lcm

import numpy as np
from numpy.typing import NDArray

from pase.costs.layouts import (
    Component,
    FloatArray,
    IndexArray,
    IntArray,
    distinct_rows,
    even_bounds,
    holding_fraction,
    part_labels,
)
from pase.graph import Part


@dataclass(frozen=True, slots=True, kw_only=True)
class Volumes:
    """For each pair of layouts, [L_u, L_v]: elements held on either side and in common, on the worst-placed device.

    produced, consumed: the largest shard on either side. kept_forward: of the consumer's shard, what its device
    already holds; kept_backward: of the producer's gradient shard.
    """

    produced: FloatArray
    consumed: FloatArray
    kept_forward: FloatArray
    kept_backward: FloatArray

    def of_classes(self, u: NDArray[np.intp] | None = None, v: NDArray[np.intp] | None = None) -> "Volumes":
        """Return the volumes for classes of layouts on either side; u, v: [L_u], [L_v] layout of each class."""

        def chosen(table: FloatArray) -> FloatArray:
            rows = table if u is None else table[u]
            return rows if v is None else rows[:, v]

        return Volumes(
            produced=chosen(self.produced),
            consumed=chosen(self.consumed),
            kept_forward=chosen(self.kept_forward),
            kept_backward=chosen(self.kept_backward),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Group:
    """Components of either side, by position, that cover the same elements."""

    u: tuple[int, ...]
    v: tuple[int, ...]


def volumes(u: tuple[Component, ...], u_splits: IndexArray, v: tuple[Component, ...], v_splits: IndexArray) -> Volumes:
    """Return the volumes for layouts u_splits [L_u, components of u] against v_splits [L_v, components of v]."""
    shape = (len(u_splits), len(v_splits))
    produced, consumed, forward, backward = (np.ones(shape) for _ in range(4))
    for group in _groups(u, v):
        us, u_of = distinct_rows(u_splits[:, group.u])
        vs, v_of = distinct_rows(v_splits[:, group.v])
        # All pairs of the group's own layouts, of which there are far fewer than of the tensor's.
        table = _group_volumes([u[i] for i in group.u], us, [v[i] for i in group.v], vs)
        spread = table[:, u_of[:, None], v_of[None, :]]
        for total, factor in zip((produced, consumed, forward, backward), spread, strict=True):
            total *= factor
    u_share, v_share = holding_fraction(u, u_splits)[:, None], holding_fraction(v, v_splits)[None, :]
    # Where fewer devices hold the tensor than need it, some device holds nothing of it.
    forward[u_share < v_share] = 0.0
    backward[v_share < u_share] = 0.0
    return Volumes(produced=produced, consumed=consumed, kept_forward=forward, kept_backward=backward)


def _groups(u: tuple[Component, ...], v: tuple[Component, ...]) -> Iterator[_Group]:
    """Yield the finest groups of consecutive components of equal size on both sides; extents of 1 stand alone."""
    i = j = 0
    while i < len(u) or j < len(v):
        first_i, first_j = i, j
        u_is_one = i < len(u) and u[i].length == 1
        v_is_one = j < len(v) and v[j].length == 1
        size_u = size_v = 1
        if i < len(u) and (u_is_one or not v_is_one):
            size_u, i = u[i].length, i + 1
        if j < len(v) and (v_is_one or not u_is_one):
            size_v, j = v[j].length, j + 1
        while size_u != size_v:
            if size_u < size_v:
                size_u, i = size_u * u[i].length, i + 1
            else:
                size_v, j = size_v * v[j].length, j + 1
        yield _Group(u=tuple(range(first_i, i)), v=tuple(range(first_j, j)))


def _group_volumes(u: list[Component], us: IndexArray, v: list[Component], vs: IndexArray) -> NDArray[np.float64]:
    """Return [4, len(us), len(vs)]: produced, consumed, kept forward, kept backward of one group."""
    plain = all(not isinstance(c.axis, Part) for c in (*u, *v))
    if plain and len(u) == 1 and len(v) == 1:
        return _box_volumes(u[0].length, us[:, 0], vs[:, 0])
    if plain and (aligned := _aligned_volumes(u, us, v, vs)) is not None:
        return aligned
    result = np.empty((4, len(us), len(vs)))
    u_labels = [_labels(u, row) for row in us.tolist()]
    v_labels = [_labels(v, row) for row in vs.tolist()]
    for i, a in enumerate(u_labels):
        for j, b in enumerate(v_labels):
            result[:, i, j] = _counted_volumes(a, b)
    return result


def _box_volumes(extent: int, us: IndexArray, vs: IndexArray) -> NDArray[np.float64]:
    a, b = us[:, None].astype(np.float64), vs[None, :].astype(np.float64)
    kept = np.ceil(extent / np.maximum(a, b))
    result = np.stack(np.broadcast_arrays(np.ceil(extent / a), np.ceil(extent / b), kept, kept))
    # Parts that are no parts of each other (2 against 3) lie across each other: these few pairs are counted.
    for i, j in np.argwhere(np.maximum(a, b) % np.minimum(a, b) != 0):
        result[:, i, j] = _crossing_volumes(extent, int(us[i]), int(vs[j]))
    return result


def _crossing_volumes(extent: int, a: int, b: int) -> tuple[float, float, float, float]:
    """Return the volumes of one stretch of a tensor split a ways by one side and b ways by the other.

    Devices hold the parts of both sides in order, the assignment that keeps most where it is.
    """
    device = np.arange(lcm(a, b))
    ours, theirs = even_bounds(extent, a), even_bounds(extent, b)
    i, j = device // (len(device) // a), device // (len(device) // b)
    common = np.minimum(ours[i + 1], theirs[j + 1]) - np.maximum(ours[i], theirs[j])
    kept = np.clip(common, 0, None)
    produced, consumed = ours[i + 1] - ours[i], theirs[j + 1] - theirs[j]
    forward, backward = int(np.argmax(consumed - kept)), int(np.argmax(produced - kept))
    return float(produced[backward]), float(consumed[forward]), float(kept[forward]), float(kept[backward])


def _aligned_volumes(
    u: list[Component], us: IndexArray, v: list[Component], vs: IndexArray
) -> NDArray[np.float64] | None:
    """Return the volumes of a group in which every split falls on bounds of a common refinement, else None."""
    atoms = _common_atoms([c.length for c in u], [c.length for c in v])
    if atoms is None:
        return None
    u_factors = _atom_factors(u, us, atoms)
    v_factors = _atom_factors(v, vs, atoms)
    if u_factors is None or v_factors is None:
        return None
    result = np.ones((4, len(us), len(vs)))
    for position, extent in enumerate(atoms):
        result *= _box_volumes(extent, u_factors[:, position], v_factors[:, position])
    return result


def _common_atoms(left: list[int], right: list[int]) -> list[int] | None:
    """Return extents, row-major, of which both lists are products of runs; None where there are none."""
    atoms: list[int] = []
    left, right = [e for e in left if e > 1], [e for e in right if e > 1]
    while left and right:
        a, b = left[0], right[0]
        small = min(a, b)
        if a % small or b % small:
            return None
        atoms.append(small)
        left[:1] = [a // small] if a > small else []
        right[:1] = [b // small] if b > small else []
    return atoms


def _atom_factors(parts: list[Component], splits: IndexArray, atoms: list[int]) -> IndexArray | None:
    """Return [L, atoms]: how each split of the components splits the atoms; None where one falls between bounds.

    The even parts of a component are runs of its leading atoms: those are split first.
    """
    factors = np.ones((len(splits), len(atoms)), dtype=np.int32)
    position = 0
    for column, part in enumerate(parts):
        left, rest = part.length, splits[:, column].astype(np.int64)
        while left > 1:
            extent = atoms[position]
            here = np.minimum(rest, extent)
            if np.any(rest % here) or np.any(extent % here):
                return None
            factors[:, position] = here
            rest = rest // here
            left, position = left // extent, position + 1
    return factors


def _labels(parts: list[Component], splits: list[int]) -> IntArray:
    """Return, for each element of a group, row-major, the number of the part that holds it."""
    labels = np.zeros(1, dtype=np.int64)
    for part, split in zip(parts, splits, strict=True):
        labels = (labels[:, None] * split + part_labels(part, split)[None, :]).reshape(-1)
    return labels


def _counted_volumes(a: IntArray, b: IntArray) -> tuple[float, float, float, float]:
    width = int(b.max()) + 1
    # [parts of u, parts of v] elements in common
    common = np.bincount(a * width + b, minlength=(int(a.max()) + 1) * width).reshape(-1, width)
    consumed, kept_forward = _worst(common)
    produced, kept_backward = _worst(common.T)
    return produced, consumed, kept_forward, kept_backward


def _worst(common: IntArray) -> tuple[float, float]:
    """Return (size, kept) of the column that has most to fetch, each fetched where most of it lies."""
    sizes, kept = common.sum(axis=0), common.max(axis=0)
    worst = int(np.lexsort((-sizes, -(sizes - kept)))[0])
    return float(sizes[worst]), float(kept[worst])


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedSplit:
    """Splits of both sides that cut one stretch of a tensor at the same bounds.

    u, v: the component on either side. u_above, v_above: factors of that component's split that lie above
    the stretch. u_factor, v_factor: how it is split itself.
    """

    u: int
    v: int
    u_above: int
    v_above: int
    u_factor: int
    v_factor: int


def shared_splits(
    u: tuple[Component, ...], u_split: IndexArray, v: tuple[Component, ...], v_split: IndexArray
) -> tuple[SharedSplit, ...]:
    """Return where one layout of either side, [components], splits the same stretches of the tensor."""
    found: list[SharedSplit] = []
    for group in _groups(u, v):
        us, vs = [u[i] for i in group.u], [v[j] for j in group.v]
        atoms = _common_atoms([c.length for c in us], [c.length for c in vs])
        if atoms is None:
            continue
        left = _atom_owners(us, u_split[list(group.u)], atoms)
        right = _atom_owners(vs, v_split[list(group.v)], atoms)
        if left is None or right is None:
            continue
        for (i, u_above, u_factor), (j, v_above, v_factor) in zip(left, right, strict=True):
            found.append(
                SharedSplit(
                    u=group.u[i], v=group.v[j], u_above=u_above, v_above=v_above, u_factor=u_factor, v_factor=v_factor
                )
            )
    return tuple(found)


def _choosing_factor(part: Component, split: int) -> int | None:
    """Return the factor of a component's split that tells its piece from the others, 1 where it is the whole dim.

    A piece that is one of A equal pieces lies within one part of a split of up to A; what is beyond A splits
    the piece itself. None where the parts cross the piece's bounds.
    """
    if not isinstance(part.axis, Part):
        return 1
    if part.dim_extent % part.length or part.axis.offset % part.length:
        return None
    pieces = part.dim_extent // part.length
    return None if pieces % split and split % pieces else min(pieces, split)


def _atom_owners(parts: list[Component], split: IndexArray, atoms: list[int]) -> list[tuple[int, int, int]] | None:
    """Return, for each atom, (component, factor of its split above the atom, factor at the atom)."""
    choosing = [_choosing_factor(part, int(k)) for part, k in zip(parts, split, strict=True)]
    if any(factor is None for factor in choosing):
        return None
    factors = _atom_factors(parts, (split // np.array(choosing, dtype=np.int64))[None, :], atoms)
    if factors is None:
        return None
    owners, position = [], 0
    for number, (part, first) in enumerate(zip(parts, choosing, strict=True)):
        left, above = part.length, first or 1
        while left > 1:
            factor = int(factors[0, position])
            owners.append((number, above, factor))
            left, above, position = left // atoms[position], above * factor, position + 1
    return owners
