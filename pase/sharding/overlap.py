"""What a device fetches when a tensor is redistributed, under the best assignment of parts to devices.

An assignment gives each device one part of the producer's layout u and one part of the consumer's layout v, so that
every part is placed on as many devices as it has replicas. The objective, minimised over all assignments, is
max_d forward fetch + max_d backward fetch.

1. The producer's and the consumer's shapes may differ by a reshape, so their dims are first collected into groups of
   equal size. Sizes of parts, and of overlaps of parts, are products over groups.
2. Equivalent parts of a group form one *type*: equal size, and equal overlaps with equally many parts of each type of
   the other side (the coarsest equitable partition, by colour refinement). Of the possible overlaps between two types
   only the largest matters, as it never fetches more. Each part of a type has equally many such partners, so a flow
   between types can be spread evenly over parts, and flows between parts sum to a flow between types.
   Products of the types of several groups are types of the combined group, with the same property.
3. Where a group has one type on either side (nested splits that divide the extent, such as any power of two of a whole
   dim), its overlap is extent ÷ max(split_u, split_v).
4. Otherwise, bounds on both fetches determine which types may be paired, and whether all parts can be placed is a
   transportation problem. A part has a whole number of devices, and the vertices of a transport polytope are integral:
   a fractional solution implies an assignment. If there is none, a set of types has too few partners (Hall), and the
   bounds are raised just enough to allow others; bounds are tried in the order of their sum. The problems are small and
   few: for a group with one type per side, only the ratio of sizes to overlaps matters.
5. A device fetches one message from each part of the other side that its own part overlaps with, except the one that
   it holds: the product over groups of the number of overlapping parts, which is equal for parts of one type.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from heapq import heappop, heappush
from itertools import accumulate, pairwise, product
from math import gcd, prod
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pase.graph import SliceOf
from pase.graph.operator import split_dim
from pase.sharding.boxes import aligned_dims, common_dims, even_bounds
from pase.sharding.shards import Component, FloatArray, IndexArray, IntArray, distinct_rows, part_labels

_MIXER = np.uint64(0x9E3779B97F4A7C15)
"""Odd, with bits set everywhere: multiplication spreads the bits of a number over all higher positions."""


class Overlap(NamedTuple):
    """For each pair of layouts, [L_u, L_v]: elements that devices need and already hold, under the best assignment.

    Both directions refer to one assignment: among the best ones, one with the least forward fetch, then with the fewest
    messages. Figures are those of the device that fetches most; ties go to the one with most messages, then to the one
    that needs most.

    Attributes:
        produced: Elements of the largest part of the producer.
        consumed: Elements of the largest part of the consumer.
        needed_forward: Elements of the consumer's part on the device that fetches most.
        kept_forward: Elements of that part that it already holds.
        needed_backward: As `needed_forward`, of the gradient and the producer's part.
        kept_backward: As `kept_forward`, of the gradient and the producer's part.
        messages_forward: Other parts from which that device fetches elements, each in one message.
        messages_backward: As `messages_forward`, of the gradient.
        reached_forward: [L_u, L_v, levels] devices, itself included, that it reaches at each level to fetch parts from
            their actual places; None where parts may be placed anywhere, and thus as near as there is room.
        reached_backward: As `reached_forward`, of the gradient.
    """

    produced: FloatArray
    consumed: FloatArray
    needed_forward: FloatArray
    kept_forward: FloatArray
    needed_backward: FloatArray
    kept_backward: FloatArray
    messages_forward: FloatArray
    messages_backward: FloatArray
    reached_forward: FloatArray | None = None
    reached_backward: FloatArray | None = None


def layout_overlap(
    u: tuple[Component, ...],
    u_splits: IndexArray,
    v: tuple[Component, ...],
    v_splits: IndexArray,
    *,
    has_gradient: bool = True,
) -> Overlap:
    """Return the overlap of layouts u_splits [L_u, components of u] with v_splits [L_v, components of v].

    Args:
        u: Components of the producer's tensor.
        u_splits: Split factors of each layout of the producer.
        v: Components of the consumer's tensor.
        v_splits: Split factors of each layout of the consumer.
        has_gradient: Whether a gradient is fetched backward; if not, only the forward fetch is minimised.
    """
    common, u_ratio, v_ratio = (np.ones((len(u_splits), len(v_splits))) for _ in range(3))
    known: dict[_Types, int] = {}
    numbers: list[IntArray] = []
    for of_u, of_v in _groups(u, v):
        us, u_of = distinct_rows(u_splits[:, of_u])
        vs, v_of = distinct_rows(v_splits[:, of_v])
        # All pairs of the group's own layouts, of which there are far fewer than of the tensor's.
        for table in _tables(list(u[of_u]), us, list(v[of_v]), vs, known):
            common *= table.common.take(v_of, axis=1).take(u_of, axis=0)
            u_ratio *= table.u_ratio.take(v_of, axis=1).take(u_of, axis=0)
            v_ratio *= table.v_ratio.take(v_of, axis=1).take(u_of, axis=0)
            if table.types.any():
                numbers.append(table.types.take(v_of, axis=1).take(u_of, axis=0))
    produced, consumed = u_ratio * common, v_ratio * common
    # Where parts nest, the larger of two overlaps with (its size ÷ size of the overlap) parts of the other side.
    messages = v_ratio - 1, u_ratio - 1
    if not numbers:
        return Overlap(produced, consumed, consumed, common, produced, common, *messages)
    found = np.stack([produced, consumed, consumed, common, produced, common, *messages])
    # The pairs that have several types.
    keys, every = np.stack([u_ratio, v_ratio, *numbers]), tuple(known)
    where = np.nonzero(keys[2:].any(axis=0))
    distinct, number = distinct_rows(keys[:, where[0], where[1]].T.astype(np.int32))
    solved = [
        _least(tuple(sorted(every[i - 1] for i in types if i)), u_ratio, v_ratio, has_gradient)
        for u_ratio, v_ratio, *types in distinct.tolist()
    ]
    elements, messages_of = np.split(np.array(solved, dtype=np.float64)[number].T, [6])
    found[:6, where[0], where[1]] = found[3, where[0], where[1]] * elements
    found[6:, where[0], where[1]] = messages_of
    return Overlap(*found)


def of_classes(values: Any, layout_of: NDArray[np.intp], axis: int) -> Any:
    """Expand values from layouts to classes along an axis; `layout_of` is [L] the layout of each class."""
    is_same = len(layout_of) == values.shape[axis] and (layout_of == np.arange(len(layout_of))).all()
    return values if is_same else values.take(layout_of, axis=axis)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Redistribution:
    """What the device that fetches most needs, for each pair of layouts [L_u, L_v].

    Attributes:
        needed_bytes: Size of its part in the target layout.
        kept_bytes: Bytes of that part that it already holds.
        held_bytes: Size of the largest part in the source layout.
        messages: Number of devices from which it fetches the rest, one message each.
        sum_members: [L_u, L_v, levels], or an array that broadcasts to it: how the devices that have just reduced this
            tensor are spread over the machine, for models in which the edge performs the all-gather of an all-reduce.
            With no columns, or ones only, there is nothing to gather.
        reached: [L_u, L_v, levels] devices, itself included, that it reaches at each level; None where those from which
            it fetches are as near as there is room.
    """

    needed_bytes: FloatArray
    kept_bytes: FloatArray
    held_bytes: FloatArray
    messages: FloatArray
    sum_members: IntArray = field(default_factory=lambda: np.empty((1, 1, 0), dtype=np.int64))
    reached: FloatArray | None = None

    @property
    def moved_bytes(self) -> FloatArray:
        """Bytes that are fetched."""
        return np.maximum(self.needed_bytes - self.kept_bytes, 0.0)

    def of_classes(self, layout_of: NDArray[np.intp], axis: int, sums: IntArray) -> "Redistribution":
        """Return the redistribution between classes of layouts on one side, and layouts on the other.

        Args:
            layout_of: [L] layout of each class.
            axis: 0 for classes of the producer, 1 for those of the consumer.
            sums: [L, levels] how the devices that have reduced this tensor are spread over the machine.
        """
        return Redistribution(
            needed_bytes=of_classes(self.needed_bytes, layout_of, axis),
            kept_bytes=of_classes(self.kept_bytes, layout_of, axis),
            held_bytes=of_classes(self.held_bytes, layout_of, axis),
            messages=of_classes(self.messages, layout_of, axis),
            sum_members=np.expand_dims(sums, 1 - axis),
            reached=None if self.reached is None else of_classes(self.reached, layout_of, axis),
        )

    def distinct(self) -> tuple["Redistribution", IndexArray]:
        """Return the distinct fetches, as 1 × N pairs, and [L_u, L_v] the index of each pair of layouts among them."""
        members = np.moveaxis(self.sum_members, -1, 0).astype(np.float64)
        columns = np.broadcast_arrays(self.needed_bytes, self.kept_bytes, self.held_bytes, self.messages, *members)
        shape, rows = columns[0].shape, [column.reshape(-1) for column in columns]
        # Sorting one number for each fetch is much faster than sorting fetches; collisions are possible but rare.
        key = np.zeros(len(rows[0]), dtype=np.uint64)
        for row in rows:
            key = (key ^ row.view(np.uint64)) * _MIXER
            key ^= key >> np.uint64(29)
        first, number = np.unique(key, return_index=True, return_inverse=True)[1:]
        if any((row[first][number] != row).any() for row in rows):
            first, number = np.unique(np.stack(rows), axis=1, return_index=True, return_inverse=True)[1:]
        needed, kept, held, messages, *sums = (row[first][None, :] for row in rows)
        no_sums = np.empty((1, 1, 0), dtype=np.int64)
        found = Redistribution(
            needed_bytes=needed,
            kept_bytes=kept,
            held_bytes=held,
            messages=messages,
            sum_members=np.stack(sums, axis=-1).astype(np.int64) if sums else no_sums,
        )
        return found, number.reshape(shape).astype(np.int32)


def forward_fetch(common: Overlap, itemsize: int) -> Redistribution:
    """Return the redistribution to the consumer's layout; `itemsize` is the bytes per number."""
    return Redistribution(
        needed_bytes=common.needed_forward * itemsize,
        kept_bytes=common.kept_forward * itemsize,
        held_bytes=common.produced * itemsize,
        messages=common.messages_forward,
        reached=common.reached_forward,
    )


def backward_fetch(common: Overlap, itemsize: int) -> Redistribution:
    """Return the redistribution of the gradient back to the producer's layout; `itemsize` is the bytes per number."""
    return Redistribution(
        needed_bytes=common.needed_backward * itemsize,
        kept_bytes=common.kept_backward * itemsize,
        held_bytes=common.consumed * itemsize,
        messages=common.messages_backward,
        reached=common.reached_backward,
    )


# -- groups of dims


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class _Types:
    """Types of the parts of either side.

    Attributes:
        u_count: Number of parts of the producer of each type.
        u_size: Their size.
        u_meets: Number of the consumer's parts that each of them overlaps with.
        v_count: As `u_count`, of the consumer.
        v_size: As `u_size`, of the consumer.
        v_meets: As `u_meets`: number of the producer's parts.
        common: [u][v] the largest overlap of a part of either type.
    """

    u_count: tuple[int, ...]
    u_size: tuple[int, ...]
    u_meets: tuple[int, ...]
    v_count: tuple[int, ...]
    v_size: tuple[int, ...]
    v_meets: tuple[int, ...]
    common: tuple[tuple[int, ...], ...]

    @property
    def ratios(self) -> tuple[int, int] | None:
        """Size of each side's parts divided by the overlap, where each side has one type and all overlaps are equal."""
        if len(self.u_size) > 1 or len(self.v_size) > 1:
            return None
        overlap = self.common[0][0]
        sizes = self.u_meets[0] * overlap, self.v_meets[0] * overlap
        return (self.u_meets[0], self.v_meets[0]) if sizes == (self.u_size[0], self.v_size[0]) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Table:
    """[layouts of u, layouts of v] of a group: overlap; sizes of u's and v's parts by overlap; number of its types.

    Where there is one type on either side, that number is 0. Otherwise the ratios are 1, and `overlap` is the unit of
    the sizes.
    """

    common: FloatArray
    u_ratio: FloatArray
    v_ratio: FloatArray
    types: IntArray


def _tables(
    u: list[Component], us: IndexArray, v: list[Component], vs: IndexArray, known: dict[_Types, int]
) -> Iterator[_Table]:
    """Yield tables whose product is the group's: one for each stretch of it that both sides split separately."""
    plain = not any(isinstance(c.axis, SliceOf) for c in (*u, *v))
    everywhere = np.ones((len(us), len(vs)), dtype=np.bool_)
    if plain and len(u) == len(v) == 1:
        yield _stretch_table(u[0].length, us[:, 0], vs[:, 0], everywhere, known)
        return
    aligned = ~everywhere
    if plain and (atoms := common_dims([c.length for c in u], [c.length for c in v])) is not None:
        (u_factors, u_aligned), (v_factors, v_aligned) = _atom_factors(u, us, atoms), _atom_factors(v, vs, atoms)
        aligned = u_aligned[:, None] & v_aligned
        for extent, a, b in zip(atoms, u_factors.T, v_factors.T, strict=True):
            yield _stretch_table(extent, a, b, aligned, known)
    if not aligned.all():
        u_rows, v_rows = us.tolist(), vs.tolist()

        def types_of(i: int, j: int) -> tuple[int, _Types]:
            if len(u) == len(v) == 1:
                return _interval_types(_runs(u[0], u_rows[i][0]), _runs(v[0], v_rows[j][0]))
            return _counted_types((*u,), (*u_rows[i],), (*v,), (*v_rows[j],))

        ones = np.ones(everywhere.shape)
        yield _typed(ones, ones, ones, ~aligned, types_of, known)


def _stretch_table(
    extent: int, us: IndexArray, vs: IndexArray, where: NDArray[np.bool_], known: dict[_Types, int]
) -> _Table:
    """Return the table of a stretch split us ways, [L_u], against vs ways, [L_v]; ones for pairs outside `where`."""
    a, b = us[:, None].astype(np.int64), vs[None, :].astype(np.int64)
    finer = np.maximum(a, b)
    nests = (finer % np.minimum(a, b) == 0) & (extent % finer == 0)
    common, u_ratio, v_ratio = extent / finer, finer / a, finer / b
    if not (is_closed := where & nests).all():
        common, u_ratio, v_ratio = (np.where(is_closed, x, 1.0) for x in (common, u_ratio, v_ratio))
    whole = Component(length=extent, axis=None, dim_extent=extent)

    def types_of(i: int, j: int) -> tuple[int, _Types]:
        return _interval_types(_runs(whole, int(us[i])), _runs(whole, int(vs[j])))

    return _typed(common, u_ratio, v_ratio, where & ~nests, types_of, known)


def _typed(
    common: FloatArray,
    u_ratio: FloatArray,
    v_ratio: FloatArray,
    where: NDArray[np.bool_],
    types_of: Callable[[int, int], tuple[int, _Types]],
    known: dict[_Types, int],
) -> _Table:
    """Return the table in which the given pairs use types_of(i, j), (unit, types), instead of the closed form."""
    numbers = np.zeros(where.shape, dtype=np.int64)
    if not where.any():
        return _Table(common=common, u_ratio=u_ratio, v_ratio=v_ratio, types=numbers)
    common, u_ratio, v_ratio = common.copy(), u_ratio.copy(), v_ratio.copy()
    for i, j in np.argwhere(where).tolist():
        common[i, j], types = types_of(i, j)
        if ratios := types.ratios:
            common[i, j] *= types.common[0][0]
            u_ratio[i, j], v_ratio[i, j] = ratios
        else:
            numbers[i, j] = known.setdefault(types, len(known) + 1)
    return _Table(common=common, u_ratio=u_ratio, v_ratio=v_ratio, types=numbers)


# -- types of parts


@lru_cache(maxsize=1 << 14)
def _runs(part: Component, split: int) -> tuple[tuple[int, ...], int]:
    """Return the sizes of a component's non-empty parts, in order, and the number of empty parts."""
    extent, offset = (part.dim_extent, part.axis.offset) if isinstance(part.axis, SliceOf) else (part.length, 0)
    bounds = np.clip(even_bounds(extent, split), offset, offset + part.length)
    sizes = np.diff(bounds)
    return tuple(sizes[sizes > 0].tolist()), int((sizes == 0).sum())


def _interval_types(u: tuple[tuple[int, ...], int], v: tuple[tuple[int, ...], int]) -> tuple[int, _Types]:
    """Return (unit, types) for consecutive parts on both sides, as `_runs` returns them."""
    unit = gcd(*u[0], *v[0])
    return unit, _consecutive_types(tuple(s // unit for s in u[0]), u[1], tuple(s // unit for s in v[0]), v[1])


@lru_cache(maxsize=1 << 16)
def _consecutive_types(u: tuple[int, ...], num_empty_u: int, v: tuple[int, ...], num_empty_v: int) -> _Types:
    u_ends, v_ends = list(accumulate(u)), list(accumulate(v))
    between = pairwise([0, *sorted({*u_ends, *v_ends})])
    pairs = [(bisect_right(u_ends, low), bisect_right(v_ends, low), high - low) for low, high in between]
    return _types(pairs, num_empty_u, num_empty_v)


@lru_cache(maxsize=1 << 12)
def _counted_types(
    u: tuple[Component, ...], u_split: tuple[int, ...], v: tuple[Component, ...], v_split: tuple[int, ...]
) -> tuple[int, _Types]:
    """Return (unit, types) of arbitrary parts, counted element by element."""
    (a, num_empty_u), (b, num_empty_v) = _labels(u, u_split), _labels(v, v_split)
    width = int(b.max()) + 1
    overlaps = np.bincount(a * width + b)
    codes = np.flatnonzero(overlaps)
    unit = int(np.gcd.reduce(overlaps))
    pairs = zip(*(x.tolist() for x in (codes // width, codes % width, overlaps[codes] // unit)), strict=True)
    return unit, _types(list(pairs), num_empty_u, num_empty_v)


def _labels(parts: tuple[Component, ...], splits: tuple[int, ...]) -> tuple[IntArray, int]:
    """Return, for each element of a group, row-major, the number of its part; and the number of empty parts.

    Non-empty parts are numbered without gaps.
    """
    labels = np.zeros(1, dtype=np.int64)
    for part, split in zip(parts, splits, strict=True):
        labels = (labels[:, None] * split + part_labels(part, split)[None, :]).reshape(-1)
    holds = np.bincount(labels, minlength=prod(splits)) > 0
    return (np.cumsum(holds) - 1)[labels], int((~holds).sum())


def _types(pairs: Sequence[tuple[int, int, int]], num_empty_u: int, num_empty_v: int) -> _Types:
    """Return the types of parts, given the pairs (part of u, part of v, overlap > 0) that overlap."""
    of_u: list[list[tuple[int, int]]] = [[] for _ in range(1 + max(i for i, _, _ in pairs))]
    of_v: list[list[tuple[int, int]]] = [[] for _ in range(1 + max(j for _, j, _ in pairs))]
    for i, j, overlap in pairs:
        of_u[i].append((overlap, j))
        of_v[j].append((overlap, i))
    u_size, v_size = ([sum(overlap for overlap, _ in row) for row in side] for side in (of_u, of_v))
    u_type, v_type = _numbered(u_size), _numbered(v_size)
    num_types, is_stable = max(u_type) + max(v_type), False
    while not is_stable:
        u_type = _numbered([(u_type[i], *sorted((o, v_type[j]) for o, j in row)) for i, row in enumerate(of_u)])
        v_type = _numbered([(v_type[j], *sorted((o, u_type[i]) for o, i in row)) for j, row in enumerate(of_v)])
        before, num_types = num_types, max(u_type) + max(v_type)
        is_stable = before == num_types
    common = [[0] * (max(v_type) + 1 + (num_empty_v > 0)) for _ in range(max(u_type) + 1 + (num_empty_u > 0))]
    for i, j, overlap in pairs:
        row = common[u_type[i]]
        row[v_type[j]] = max(row[v_type[j]], overlap)
    u_count, u_sizes, u_meets = _described(u_type, u_size, of_u, num_empty_u)
    v_count, v_sizes, v_meets = _described(v_type, v_size, of_v, num_empty_v)
    return _Types(
        u_count=u_count,
        u_size=u_sizes,
        u_meets=u_meets,
        v_count=v_count,
        v_size=v_sizes,
        v_meets=v_meets,
        common=tuple(tuple(row) for row in common),
    )


def _numbered(keys: Sequence[Hashable]) -> list[int]:
    """Return a number for each key, in order of first occurrence; equal keys have equal numbers."""
    numbers: dict[Hashable, int] = {}
    return [numbers.setdefault(key, len(numbers)) for key in keys]


def _described(
    types: list[int], sizes: list[int], met: Sequence[Sequence[object]], num_empty: int
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Return the number of parts of each type, their size, and how many parts they overlap with; empty parts come last.

    Args:
        types: Type of each non-empty part.
        sizes: Size of each non-empty part.
        met: For each non-empty part, the overlapping parts of the other side.
        num_empty: Number of empty parts.
    """
    counts = Counter(types)
    size_of, meets_of = dict(zip(types, sizes, strict=True)), dict(zip(types, map(len, met), strict=True))
    rows = [(counts[number], size_of[number], meets_of[number]) for number in range(len(counts))]
    if num_empty:
        rows.append((num_empty, 0, 0))
    count, size, meets = zip(*rows, strict=True)
    return count, size, meets


# -- the least fetch of types


@lru_cache(maxsize=1 << 17)
def _least(groups: tuple[_Types, ...], u_ratio: int, v_ratio: int, has_gradient: bool) -> tuple[int, ...]:
    """Return the fields of `Overlap`, in order, of groups of several types.

    Args:
        groups: Types of each group.
        u_ratio, v_ratio: Sizes of parts by their overlaps in all other groups; overlaps there count as 1.
        has_gradient: As for `layout_overlap`.
    """
    types = groups[0] if len(groups) == 1 else _joined(groups)
    u_size, v_size = [u_ratio * size for size in types.u_size], [v_ratio * size for size in types.v_size]
    u_meets, v_meets = [u_ratio * count for count in types.u_meets], [v_ratio * count for count in types.v_meets]
    # [u][v] elements fetched, messages and elements needed, of a device with a part of either type.
    forward = [
        [(v_size[j] - overlap, v_meets[j] - (overlap > 0), v_size[j]) for j, overlap in enumerate(row)]
        for row in types.common
    ]
    backward = [
        [(u_size[i] - overlap, u_meets[i] - (overlap > 0), u_size[i]) for overlap in row]
        for i, row in enumerate(types.common)
    ]
    # Order by bytes of both directions, then forward bytes, messages of both, forward messages: one number encodes all.
    base = 1 + max(*u_size, *v_size, *u_meets, *v_meets)
    forward_costs = [[fetch * (base + 1) * base**2 + count * (base + 1) for fetch, count, _ in row] for row in forward]
    backward_costs = [[(fetch * base**2 + count) * base * has_gradient for fetch, count, _ in row] for row in backward]
    # The unit is 1 ÷ (product of both sides' numbers of parts) of the devices.
    supply = [count * sum(types.v_count) for count in types.u_count]
    demand = [count * sum(types.u_count) for count in types.v_count]
    met = _cheapest(forward_costs, backward_costs, supply, demand)
    fetched, sent, needed = max(forward[i][j] for i, j in met)
    fetched_back, sent_back, needed_back = max(backward[i][j] for i, j in met)
    kept = needed - fetched, needed_back - fetched_back
    return max(u_size), max(v_size), needed, kept[0], needed_back, kept[1], sent, sent_back


def _joined(groups: tuple[_Types, ...]) -> _Types:
    """Return the types of several groups combined: each is one type of every group."""

    def products(sides: list[tuple[int, ...]]) -> tuple[int, ...]:
        return tuple(prod(chosen) for chosen in product(*sides))

    return _Types(
        u_count=products([types.u_count for types in groups]),
        u_size=products([types.u_size for types in groups]),
        u_meets=products([types.u_meets for types in groups]),
        v_count=products([types.v_count for types in groups]),
        v_size=products([types.v_size for types in groups]),
        v_meets=products([types.v_meets for types in groups]),
        common=tuple(products(list(rows)) for rows in product(*(types.common for types in groups))),
    )


def _cheapest(
    forward: list[list[int]], backward: list[list[int]], supply: list[int], demand: list[int]
) -> list[tuple[int, int]]:
    """Return the pairs of types, [u][v], of the assignment that minimises max forward + max backward."""
    first = (
        max(_least_for(column, supply, need) for column, need in zip(zip(*forward, strict=True), demand, strict=True)),
        max(_least_for(row, demand, need) for row, need in zip(backward, supply, strict=True)),
    )
    bounds = [(sum(first), *first)]
    seen = {first}
    while True:
        _, most_forward, most_backward = heappop(bounds)
        allowed = [
            [j for j, (f, b) in enumerate(zip(*rows, strict=True)) if f <= most_forward and b <= most_backward]
            for rows in zip(forward, backward, strict=True)
        ]
        met, needy, closed = _transport(supply, demand, allowed)
        if not needy:
            return met
        # Some part of one set must be paired with one of the other: the bounds rise at least that far.
        raised = sorted(
            {(max(most_forward, forward[i][j]), max(most_backward, backward[i][j])) for i in needy for j in closed}
        )
        least_backward = None
        for f, b in raised:
            if least_backward is None or b < least_backward:
                least_backward = b
                if (f, b) not in seen:
                    seen.add((f, b))
                    heappush(bounds, (f + b, f, b))


def _least_for(fetches: Sequence[int], there_are: Sequence[int], need: int) -> int:
    """Return the most that parts of one type fetch if they may choose their partners, each partner only once."""
    for fetch, count in sorted(zip(fetches, there_are, strict=True)):
        need -= count
        if need <= 0:
            return fetch
    raise AssertionError


def _transport(
    supply: list[int], demand: list[int], allowed: list[list[int]]
) -> tuple[list[tuple[int, int]], set[int], set[int]]:
    """Solve a transportation problem of equal total supply and demand, or return the sets that make it infeasible.

    Args:
        supply: [suppliers] amounts.
        demand: [receivers] amounts.
        allowed: [suppliers] receivers that each may serve.

    Returns:
        (pairs with a flow, {}, {}), or ([], suppliers, receivers): these suppliers may serve none of these receivers,
        and have more than all other receivers need.
    """
    wanted = list(demand)
    served: list[dict[int, int]] = [{} for _ in demand]
    for first, amount in enumerate(supply):
        while amount:
            # Shortest augmenting path to a receiver with unmet demand.
            taken_over, supplier_of, queue, last = {first: -1}, dict[int, int](), [first], -1
            for supplier in queue:
                for receiver in allowed[supplier]:
                    if receiver in supplier_of:
                        continue
                    supplier_of[receiver] = supplier
                    if wanted[receiver]:
                        last = receiver
                        break
                    for other in served[receiver]:
                        if other not in taken_over:
                            taken_over[other] = receiver
                            queue.append(other)
                if last >= 0:
                    break
            else:
                return [], set(taken_over), set(range(len(demand))) - set(supplier_of)
            way = [(supplier_of[last], last)]
            while way[-1][0] != first:
                receiver = taken_over[way[-1][0]]
                way.append((supplier_of[receiver], receiver))
            moved = min(amount, wanted[last], *(served[taken_over[supplier]][supplier] for supplier, _ in way[:-1]))
            for supplier, receiver in way:
                served[receiver][supplier] = served[receiver].get(supplier, 0) + moved
                if supplier != first:
                    before = served[taken_over[supplier]]
                    before[supplier] -= moved
                    if not before[supplier]:
                        del before[supplier]
            wanted[last] -= moved
            amount -= moved
    return [(supplier, receiver) for receiver, row in enumerate(served) for supplier in row], set(), set()


# -- reshapes


def _groups(u: tuple[Component, ...], v: tuple[Component, ...]) -> Iterator[tuple[slice, slice]]:
    """Yield pairs of slices of the components of either side that cover the same elements."""
    for of_u, of_v in aligned_dims([part.length for part in u], [part.length for part in v]):
        yield slice(*of_u), slice(*of_v)


def _atom_factors(
    parts: list[Component], splits: IndexArray, atoms: Sequence[int]
) -> tuple[IndexArray, NDArray[np.bool_]]:
    """Return [L, atoms] how the components' splits divide the atoms; and [L] whether all cuts are at their bounds.

    The even parts of a component are runs of its leading atoms, so those are split first.
    """
    factors = np.ones((len(splits), len(atoms)), dtype=np.int32)
    is_aligned = np.ones(len(splits), dtype=np.bool_)
    position = 0
    for column, part in enumerate(parts):
        left, rest = part.length, splits[:, column].astype(np.int64)
        while left > 1:
            extent = atoms[position]
            here = np.minimum(rest, extent)
            is_aligned &= (rest % here == 0) & (extent % here == 0)
            factors[:, position] = here
            rest = rest // here
            left, position = left // extent, position + 1
        is_aligned &= rest == 1
    return factors, is_aligned


class SharedSplit(NamedTuple):
    """Splits of both sides that cut one stretch of a tensor at the same bounds.

    Attributes:
        u, v: The component on either side.
        u_dim, v_dim: Iteration dim that indexes it.
        u_above, v_above: Factor of the component's split that cuts dims before the stretch.
        u_factor, v_factor: Factor that splits the stretch itself.
    """

    u: int
    v: int
    u_dim: str
    v_dim: str
    u_above: int
    v_above: int
    u_factor: int
    v_factor: int


def shared_splits(
    u: tuple[Component, ...], u_split: IndexArray, v: tuple[Component, ...], v_split: IndexArray
) -> tuple[SharedSplit, ...]:
    """Return the stretches of the tensor that one layout of either side, [components], splits at the same bounds."""
    found: list[SharedSplit] = []
    for of_u, of_v in _groups(u, v):
        us, vs = list(u[of_u]), list(v[of_v])
        atoms = common_dims([c.length for c in us], [c.length for c in vs])
        if atoms is None:
            continue
        left = _atom_owners(us, u_split[of_u], atoms)
        right = _atom_owners(vs, v_split[of_v], atoms)
        if left is None or right is None:
            continue
        for (i, u_above, u_factor), (j, v_above, v_factor) in zip(left, right, strict=True):
            dims = split_dim(us[i].axis), split_dim(vs[j].axis)
            above_and_factors = u_above, v_above, u_factor, v_factor
            found.append(SharedSplit(of_u.start + i, of_v.start + j, *dims, *above_and_factors))
    return tuple(found)


def _choosing_factor(part: Component, split: int) -> int | None:
    """Return the factor of a component's split that selects its slice, 1 where it is the whole dim.

    One of A equal slices is within one part of a split of up to A ways; any further factor splits the slice itself.
    None where the parts cross the slice's bounds.
    """
    if not isinstance(part.axis, SliceOf):
        return 1
    if part.dim_extent % part.length or part.axis.offset % part.length:
        return None
    pieces = part.dim_extent // part.length
    return None if pieces % split and split % pieces else min(pieces, split)


def _atom_owners(parts: list[Component], split: IndexArray, atoms: Sequence[int]) -> list[tuple[int, int, int]] | None:
    """Return, for each atom, (component, factor of its split above the atom, factor at the atom)."""
    choosing = [_choosing_factor(part, int(k)) for part, k in zip(parts, split, strict=True)]
    if any(factor is None for factor in choosing):
        return None
    factors, is_aligned = _atom_factors(parts, (split // np.array(choosing, dtype=np.int64))[None, :], atoms)
    if not is_aligned[0]:
        return None
    owners, position = [], 0
    for number, (part, first) in enumerate(zip(parts, choosing, strict=True)):
        left, above = part.length, first or 1
        while left > 1:
            factor = int(factors[0, position])
            owners.append((number, above, factor))
            left, above, position = left // atoms[position], above * factor, position + 1
    return owners
