"""Storage of parameters on one mesh of ranks: the part of each rank, and its expression in DTensor's terms.

Layers hold parameters, or slices of them, in layouts of their own. A parameter that consists of several slices, or
whose dim a layer splits by an inner factor, is stored in runs along a dim. The ranks, in order, form one grid for all
parameters. DTensor describes for each axis of it which dim it splits, into how many strided chunks (its `Shard` for one
chunk, its `_StridedShard` otherwise). Where no axes express what a rank's layers need, the rank stores more than that,
up to all of it, and the layers slice it: their gradients are then transferred between ranks.
"""

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, combinations, permutations, product
from math import prod

from pase.errors import ProgramError
from pase.importers.ir.views import View
from pase.sharding.boxes import Box, Range, aligned_dims, chunk, extents, whole
from pase.sharding.layouts import Layout, sharded_layout
from pase.sharding.mesh_axes import orders
from pase.sharding.reshard import ReshardStep, moved_pairs, reshard_steps
from pase.sharding.shards import prime_factors

Runs = tuple[Range, ...]
"""Points of a dim: half-open ranges that ascend and do not touch."""

Held = tuple[Runs, ...]
"""[rank of the tensor] the held part of a tensor: ranges of points of each dim, in all combinations."""

_MAX_RUNS = 4096
"""With more runs in one dim, a parameter is stored replicated."""


@dataclass(frozen=True, slots=True)
class Split:
    """The effect of a mesh axis on a parameter: it splits each of several equal chunks of a dim."""

    dim: int
    chunks: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """A layer's weight as a slice of a parameter.

    Attributes:
        weight: Name of the weight in the program.
        box: Its box in the parameter.
        layout: Layout in the layer, with the same elements, row-major.
        view: Permutation or repetition in the layer: ranks then need all elements.
        groups, dim: Ranks that shard their box of that layout, and the dim along which they do (`sharded_layout`);
            empty where each needs all of it.
    """

    weight: str
    box: Box
    layout: Layout
    view: View | None = None
    groups: tuple[tuple[int, ...], ...] = ()
    dim: int = 0

    def on(self, sizes: tuple[int, ...]) -> "Need":
        """Return the need of ranks on a mesh with axes of given sizes: for a box that they shard, their shards."""
        if not self.groups:
            return self
        return replace(self, layout=sharded_layout(self.layout, self.groups, self.dim, sizes=sizes), groups=())


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """How a rank reads its slice of a weight from its shard of the parameter.

    Attributes:
        weight, parameter: Their names.
        cuts: For each rank, the slice of each dim of the shard, to be reshaped.
        steps: Transfers that fetch the slice instead, where gradients of other slices belong to other ranks.
        view: See `Need`, for a box.
    """

    weight: str
    parameter: str
    cuts: tuple[Box, ...] = ()
    steps: tuple[ReshardStep, ...] = ()
    box: Box = ()
    view: View | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """A parameter on the mesh.

    Attributes:
        splits: [axes] effect of each axis, None for none.
        held: [ranks] part of each rank.
        is_contiguous: Whether each part is one box.
        moved: Number of gradient elements transferred between ranks in every step, for layers that need other parts.
        note: Reason for these transfers, "" if there are none.
    """

    name: str
    shape: tuple[int, ...]
    splits: tuple[Split | None, ...]
    held: tuple[Held, ...]
    moved: int = 0
    note: str = ""

    @property
    def is_contiguous(self) -> bool:
        return all(len(runs) == 1 for held in self.held for runs in held)

    def layout(self) -> Layout:
        """Return the boxes of the ranks; must not be called where they are not boxes."""
        assert self.is_contiguous
        return _on_ranks(self.shape, [tuple(runs[0] for runs in held) for held in self.held])


@dataclass(frozen=True, slots=True, kw_only=True)
class Storage:
    """All parameters on one mesh: the sizes of its axes, ranks row-major; parameters and weights by name."""

    sizes: tuple[int, ...]
    stored: Mapping[str, Stored]
    readings: Mapping[str, Reading]


def storage(
    shapes: Mapping[str, tuple[int, ...]],
    needs: Mapping[str, Sequence[Need]],
    num_ranks: int,
    *,
    apart: bool = True,
    sizes: tuple[int, ...] = (),
) -> Storage:
    """Return the storage of parameters on one mesh, with as few elements on each rank as can be expressed.

    Args:
        shapes: Shapes of the parameters, by name.
        needs: For each parameter, the needs of layers; others are stored replicated.
        num_ranks: Number of ranks, which the layouts call devices 0 to num_ranks - 1.
        apart: Whether a rank may hold non-contiguous parts of a dim.
        sizes: Sizes of the mesh, if given.
    """
    for name, own in needs.items():
        for need in own:
            _check(name, shapes[name], need, num_ranks)
    found = _Found(shapes, needs, num_ranks, apart)
    if not sizes:
        sizes = _joined(min(orders(prime_factors(num_ranks) or (1,)), key=found.cost), found)
    stored = {name: found.stored(name, sizes) for name in shapes}
    return Storage(
        sizes=sizes,
        stored={name: own for name, (own, _) in stored.items()},
        readings={reading.weight: reading for _, readings in stored.values() for reading in readings},
    )


def held_as(need: Need, shape: tuple[int, ...], sizes: tuple[int, ...]) -> Stored | None:
    """Return the storage of a tensor with a layout on a mesh; None where no placement expresses it."""
    found, readings = _Found({need.weight: shape}, {need.weight: [need]}, prod(sizes), True).stored(need.weight, sizes)
    return None if any(reading.steps or reading.view for reading in readings) else found


def _check(name: str, shape: tuple[int, ...], need: Need, num_ranks: int) -> None:
    size = prod(extents(need.box))
    inside = len(shape) == len(need.box) and all(
        0 <= low <= high <= n for (low, high), n in zip(need.box, shape, strict=True)
    )
    if not inside or (size != prod(need.layout.shape) and not need.view):
        raise ProgramError(
            f"parameter {name!r} has shape {list(shape)}; weight {need.weight!r} of shape {list(need.layout.shape)} "
            f"reads {list(need.box)} of it: the plan is of another model"
        )
    if sorted(need.layout.devices) != list(range(num_ranks)):
        raise ProgramError(
            f"weight {need.weight!r} is on ranks {list(need.layout.devices)}, expected 0 to {num_ranks - 1}"
        )


def _joined(sizes: tuple[int, ...], found: "_Found") -> tuple[int, ...]:
    """Return the axes with neighbours made one where parameters are held as well so: fewer are less to go through."""
    cost, at = found.cost(sizes), 0
    while at + 1 < len(sizes):
        fewer = (*sizes[:at], sizes[at] * sizes[at + 1], *sizes[at + 2 :])
        if found.cost(fewer) <= cost:
            sizes = fewer
        else:
            at += 1
    return sizes


class _Found:
    """Cache of storages of parameters; equal parameters are computed once."""

    def __init__(
        self, shapes: Mapping[str, tuple[int, ...]], needs: Mapping[str, Sequence[Need]], num_ranks: int, apart: bool
    ) -> None:
        self._shapes, self._needs, self._num_ranks, self._apart = shapes, needs, num_ranks, apart
        self._known: dict[object, tuple[tuple[Split | None, ...], tuple[Held, ...]]] = {}
        self._parts: dict[object, tuple[Held | None, ...]] = {}

    def cost(self, sizes: tuple[int, ...]) -> int:
        """Return how many elements all ranks hold of all parameters."""
        return sum(
            sum(_count(held) for held in self._best(name, sizes)[1]) for name in self._shapes if self._needs.get(name)
        )

    def stored(self, name: str, sizes: tuple[int, ...]) -> tuple[Stored, list[Reading]]:
        """Return the storage of a parameter on a mesh, and the readings of its weights."""
        splits, held = self._best(name, sizes)
        stored = Stored(name=name, shape=self._shapes[name], splits=splits, held=held)
        readings = [self._reading(stored, need) for need in self._needs_on(name, sizes)]
        # A weight that is cut out and reshaped has its gradient where the parameter is; others' goes back.
        moved = sum(sum(moved_pairs(step.adjoint for step in reversed(reading.steps)).values()) for reading in readings)
        moving = [reading.weight for reading in readings if reading.steps]
        note = ""
        if moving:
            share = _count(held[0]) / max(prod(stored.shape), 1)
            kept = "all of it" if share == 1 else f"{share:.3g} of it"
            note = (
                f"parameter {name!r}: each rank holds {kept}, since no placement of DTensor says which parts "
                f"{', '.join(moving)} {'read' if len(moving) > 1 else 'reads'}"
            )
        return Stored(name=name, shape=stored.shape, splits=splits, held=held, moved=moved, note=note), readings

    def _needs_on(self, name: str, sizes: tuple[int, ...]) -> Sequence[Need]:
        return [need.on(sizes) for need in self._needs.get(name, ())]

    def _best(self, name: str, sizes: tuple[int, ...]) -> tuple[tuple[Split | None, ...], tuple[Held, ...]]:
        shape, needs = self._shapes[name], self._needs_on(name, sizes)
        key = (sizes, shape, tuple((need.box, need.layout, need.view) for need in needs))
        if key not in self._known:
            self._known[key] = self._searched(shape, needs, sizes)
        return self._known[key]

    def _searched(
        self, shape: tuple[int, ...], needs: Sequence[Need], sizes: tuple[int, ...]
    ) -> tuple[tuple[Split | None, ...], tuple[Held, ...]]:
        coordinates = list(product(*map(range, sizes)))
        parts = [self._needed(need) for need in needs]
        nothing: tuple[Split | None, ...] = (None,) * len(sizes)
        everything: Held = tuple(((0, extent),) if extent else () for extent in shape)
        best = (nothing, (everything,) * self._num_ranks)
        if not parts or 0 in shape:
            return best
        # The most axes first, since they give the smallest parts.
        for count in range(len(sizes), 0, -1):
            for axes in combinations(range(len(sizes)), count):
                held = _coarser(shape, parts, coordinates, axes)
                splits = _said(shape, held, coordinates, sizes)
                if splits is None or not (self._is_local(needs, parts, held) or _contiguous(held)):
                    continue
                if not self._apart and not _contiguous(held):
                    continue
                if sum(map(_count, held)) < sum(map(_count, best[1])):
                    best = splits, held
            if count == len(sizes) and best[0] != nothing:
                break  # Fewer axes do not give smaller parts.
        return best

    def _needed(self, need: Need) -> tuple[Held | None, ...]:
        """Return the part of the parameter that each rank's layer needs; None where it is not a product of ranges."""
        key = (need.box, need.layout, need.view)
        if key not in self._parts:
            boxes, known = need.layout.by_device, dict[Box, Held | None]()
            for box in set(boxes.values()):
                part = None if need.view else held_of(extents(need.box), need.layout.shape, box)
                known[box] = None if part is None else _moved(part, need.box)
            self._parts[key] = tuple(known[boxes[rank]] for rank in range(self._num_ranks))
        return self._parts[key]

    def _is_local(self, needs: Sequence[Need], parts: Sequence[Sequence[Held | None]], held: Sequence[Held]) -> bool:
        """Return whether each rank has what its layers need, and nothing else of the slices that they read."""
        return all(
            tuple(_within(runs, span) for runs, span in zip(own, need.box, strict=True)) == wanted
            for need, part in zip(needs, parts, strict=True)
            for own, wanted in zip(held, part, strict=True)
        )

    def _reading(self, stored: Stored, need: Need) -> Reading:
        parts = self._needed(need)
        cuts = tuple(
            tuple(place(runs, span) for runs, span in zip(held, need.box, strict=True)) for held in stored.held
        )
        if need.view is not None:
            return Reading(weight=need.weight, parameter=stored.name, box=need.box, view=need.view)
        if self._is_local([need], [parts], stored.held):
            return Reading(weight=need.weight, parameter=stored.name, cuts=cuts)
        # Parts are then boxes (`_searched`), which may be larger than the layer's need or, for shards, different.
        layout, count = stored.layout(), self._num_ranks
        boxed = [None if part is None or any(len(runs) != 1 for runs in part) else part for part in parts]
        if None not in boxed:
            wanted = _on_ranks(stored.shape, [tuple(runs[0] for runs in part) for part in boxed if part is not None])
            return Reading(weight=need.weight, parameter=stored.name, steps=(ReshardStep(layout, wanted),))
        piece = extents(need.box)
        gathered, alone = _on_ranks(stored.shape, [need.box] * count), _on_ranks(piece, [whole(piece)] * count)
        steps = (ReshardStep(layout, gathered), *reshard_steps(alone, need.layout))
        return Reading(weight=need.weight, parameter=stored.name, steps=steps)


def _on_ranks(shape: tuple[int, ...], boxes: Sequence[Box]) -> Layout:
    """Return the layout of a tensor of which each rank has a box."""
    numbers = {box: number for number, box in enumerate(dict.fromkeys(boxes))}
    parts = tuple(numbers[box] for box in boxes)
    return Layout(shape=shape, devices=tuple(range(len(boxes))), parts=parts, boxes=tuple(boxes))


# -- points of dims


def held_of(shape: Sequence[int], seen_as: Sequence[int], box: Box) -> Held | None:
    """Return the part of a reshaped tensor that a box of it covers; None where that is not a product of ranges."""
    found: list[Runs] = []
    for (first, last), (begin, end) in aligned_dims(shape, seen_as):
        runs = _flat(box[begin:end], seen_as[begin:end])
        own = None if runs is None else _unflat(runs, tuple(shape[first:last]))
        if own is None:
            return None
        found.extend(own)
    return tuple(found)


def _flat(box: Box, shape: Sequence[int]) -> Runs | None:
    runs: list[Range] = [(0, 1)]
    for (low, high), extent in zip(box, shape, strict=True):
        if (low, high) == (0, extent):
            runs = [(first * extent, last * extent) for first, last in runs]
        elif sum(last - first for first, last in runs) > _MAX_RUNS:
            return None
        else:
            runs = [(at * extent + low, at * extent + high) for first, last in runs for at in range(first, last)]
    return _merged(runs)


def _unflat(runs: Runs, shape: tuple[int, ...]) -> Held | None:
    if len(shape) <= 1:
        return (runs,) if shape else ()
    inner = prod(shape[1:])
    if all(low % inner == 0 and high % inner == 0 for low, high in runs):
        rows = tuple((low // inner, high // inner) for low, high in runs)
        return (rows, *(((0, extent),) for extent in shape[1:]))
    if sum(-(-high // inner) - low // inner for low, high in runs) > _MAX_RUNS:
        return None
    by_row: dict[int, list[Range]] = {}
    for low, high in runs:
        for row in range(low // inner, -(-high // inner)):
            first, last = max(low, row * inner), min(high, (row + 1) * inner)
            by_row.setdefault(row, []).append((first - row * inner, last - row * inner))
    inside = set(map(_merged, by_row.values()))
    if len(inside) != 1:
        return None
    rest = _unflat(inside.pop(), shape[1:])
    return None if rest is None else (_merged([(row, row + 1) for row in by_row]), *rest)


def _merged(runs: Iterable[Range]) -> Runs:
    found: list[Range] = []
    for low, high in sorted(run for run in runs if run[0] < run[1]):
        if found and low <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], high))
        else:
            found.append((low, high))
    return tuple(found)


def _moved(held: Held, box: Box) -> Held:
    """Return a part of a box in the coordinates of the box."""
    return tuple(
        tuple((low + first, high + first) for low, high in runs) for runs, (first, _) in zip(held, box, strict=True)
    )


def _within(runs: Runs, span: Range) -> Runs:
    return tuple(
        (max(low, span[0]), min(high, span[1])) for low, high in runs if max(low, span[0]) < min(high, span[1])
    )


def place(runs: Runs, span: Range) -> Range:
    """Return where the points of a span are among those of runs."""
    before = sum(high - low for low, high in _within(runs, (0, span[0])))
    return before, before + sum(high - low for low, high in _within(runs, span))


def _count(held: Held) -> int:
    return prod(sum(high - low for low, high in runs) for runs in held)


def _contiguous(held: Sequence[Held]) -> bool:
    return all(len(runs) == 1 for own in held for runs in own)


# -- DTensor's description


def _coarser(
    shape: tuple[int, ...],
    parts: Sequence[Sequence[Held | None]],
    coordinates: Sequence[tuple[int, ...]],
    axes: Sequence[int],
) -> tuple[Held, ...]:
    """Return parts of ranks that only depend on some axes: the union of the needs of ranks that differ in others."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank, point in enumerate(coordinates):
        groups.setdefault(tuple(point[axis] for axis in axes), []).append(rank)
    everything: Held = tuple(((0, extent),) for extent in shape)
    found: dict[int, Held] = {}
    for ranks in groups.values():
        own = [everything if part[rank] is None else part[rank] for part in parts for rank in ranks]
        together = tuple(_merged(run for held in own if held is not None for run in held[i]) for i in range(len(shape)))
        found |= dict.fromkeys(ranks, together)
    # Points that no rank needs are stored, too, by all equally.
    unread = [
        _left_out(_merged(run for held in found.values() for run in held[i]), extent) for i, extent in enumerate(shape)
    ]
    return tuple(
        tuple(_merged((*runs, *more)) for runs, more in zip(found[rank], unread, strict=True))
        for rank in range(len(coordinates))
    )


def _left_out(runs: Runs, extent: int) -> Runs:
    bounds = [0, *(at for run in runs for at in run), extent]
    return tuple((low, high) for low, high in zip(bounds[::2], bounds[1::2], strict=True) if low < high)


def _said(
    shape: tuple[int, ...], held: Sequence[Held], coordinates: Sequence[tuple[int, ...]], sizes: tuple[int, ...]
) -> tuple[Split | None, ...] | None:
    """Return the effect of each axis that gives each rank exactly its part; None where it cannot be expressed."""
    splits: list[Split | None] = [None] * len(sizes)
    for dim, extent in enumerate(shape):
        runs = [own[dim] for own in held]
        axes = [
            axis
            for axis in range(len(sizes))
            if any(runs[rank] != runs[_first_along(rank, point, axis, sizes)] for rank, point in enumerate(coordinates))
        ]
        if any(splits[axis] is not None for axis in axes):
            return None
        factors = _factors(extent, runs, coordinates, axes, sizes)
        if factors is None or not is_gathered(factors, [sizes[axis] for axis in axes]):
            return None
        for axis, chunks in zip(axes, factors, strict=True):
            splits[axis] = Split(dim, chunks)
    return tuple(splits)


def is_gathered(factors: Sequence[int], sizes: Sequence[int]) -> bool:
    """Return whether PyTorch correctly gathers a dim that axes of some sizes split, each in so many chunks.

    For other splits `full_tensor` and `redistribute` are wrong (torch 2.13): they treat an axis that splits chunks,
    unless it is the last one, as one that splits the dim after others.
    """
    if all(chunks == 1 for chunks in factors[:-1]):
        return True
    axes = range(len(sizes))
    return any(
        list(factors) == [prod(sizes[j] for j in axes[i + 1 :] if order[j] < order[i]) for i in axes]
        for order in permutations(axes)
    )


def _first_along(rank: int, point: tuple[int, ...], axis: int, sizes: tuple[int, ...]) -> int:
    """Return the first rank that differs along an axis only."""
    return rank - point[axis] * prod(sizes[axis + 1 :])


def _factors(
    extent: int, runs: Sequence[Runs], coordinates: Sequence[tuple[int, ...]], axes: Sequence[int], sizes: Sequence[int]
) -> list[int] | None:
    """Return for each axis the number of chunks that it splits in earlier parts; None where there is no such number."""
    if not axes:
        return [] if all(own == ((0, extent),) for own in runs) else None
    factors: list[int] = []
    for number, axis in enumerate(axes):
        before = axes[:number]
        # One group of ranks that agree in the previous axes; the other groups are checked at the end.
        first = [rank for rank, point in enumerate(coordinates) if all(point[other] == 0 for other in before)]
        left = _merged(run for rank in first for run in runs[rank])
        lowest = _merged(run for rank in first if coordinates[rank][axis] == 0 for run in runs[rank])
        if not lowest:
            return None
        # Runs among the points that are left: each is the first part of a chunk.
        factors.append(len(_merged(_positions(left, lowest))))
    for rank, point in enumerate(coordinates):
        held: Runs = ((0, extent),)
        for axis, chunks in zip(axes, factors, strict=True):
            part = chunk_part(held, chunks, sizes[axis], point[axis])
            if part is None:
                return None
            held = part
        if held != runs[rank]:
            return None
    return factors


def chunk_part(runs: Runs, chunks: int, parts: int, number: int) -> Runs | None:
    """Return a part of each of several equal chunks of points, as DTensor divides them; None for invalid numbers.

    Parts are those of `chunk`: the last ones may be shorter, or empty.
    """
    total = sum(high - low for low, high in runs)
    if total % chunks:
        return None
    size = total // chunks
    low, high = chunk(size, parts, number)
    return _merged(_chosen(runs, [(place * size + low, place * size + high) for place in range(chunks)]))


def _chosen(runs: Runs, positions: Sequence[Range]) -> Iterator[Range]:
    """Yield the points at some positions, which ascend, among those of runs."""
    at = number = 0
    for first, last in runs:
        end = at + last - first
        while number < len(positions) and positions[number][0] < end:
            low, high = positions[number]
            yield first + max(low, at) - at, first + min(high, end) - at
            if high > end:
                break
            number += 1
        at = end


def _positions(runs: Runs, own: Runs) -> Iterator[Range]:
    """Yield where the points of runs that are among others are among these."""
    before = list(accumulate((high - low for low, high in runs), initial=0))
    for low, high in own:
        number = bisect_right(runs, (low, high + 1)) - 1
        first = before[number] + low - runs[number][0]
        yield first, first + high - low
