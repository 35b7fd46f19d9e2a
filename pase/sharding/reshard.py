"""Resharding: the transfers that take a tensor from one layout to another, box by box, and reductions.

The two layouts may index the tensor with different dims. A reshape preserves the row-major order of the points, so
ranges of ``[c, h, w]`` can be compared with ranges of ``[c·h·w]``: both are ranges of finer common dims or of the flat
dim. Where a box of one layout is not a box of the other (a third of 256 flattened channels, against a split of h), the
tensor is first redistributed to a layout on its own devices in which the reshape is local: only the leading dim stays
split.

An all-reduce is a reduce-scatter and an all-gather between all pairs of devices: each of k devices reduces 1/k of the
tensor and sends the sum to the others. A fan-out, or a weight that several layers share, has one reduction of its
gradient. A consumer that holds the tensor as the other end does, and would reduce its gradient over the same groups of
devices, leaves its gradients partial: they are added on each device first. Gradients of halos are sent to the
neighbours before that.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

from pase.errors import ProgramError
from pase.sharding.boxes import Box, Range, aligned_dims, common_dims, difference, intersection, num_points, whole
from pase.sharding.layouts import HOST, DeviceMesh, Layout, Place, PlainDim, TensorDim, WindowDim, apart, layout_of


@dataclass(frozen=True, slots=True)
class ReshardStep:
    """One transfer between layouts with the same dims."""

    source: Layout
    target: Layout

    @property
    def adjoint(self) -> "ReshardStep":
        """The transfer that takes gradients back."""
        return ReshardStep(self.target, self.source)

    def clipped(self, dim: int) -> "ReshardStep":
        """Return the transfer restricted to the part of the target's boxes that the source covers along a dim."""
        low = min(box[dim][0] for box in self.source.boxes)
        high = max(box[dim][1] for box in self.source.boxes)

        def cut(box: Box) -> Box:
            first, last = max(box[dim][0], low), min(box[dim][1], high)
            return (*box[:dim], (first, max(first, last)), *box[dim + 1 :])

        return ReshardStep(self.source, replace(self.target, boxes=tuple(map(cut, self.target.boxes))))


def reshard_steps(source: Layout, target: Layout) -> tuple[ReshardStep, ...]:
    """Return the transfers, at most three, that take a tensor from one layout to another.

    The shapes may differ by a reshape. Raises ProgramError where their sizes differ.
    """
    if source.shape == target.shape:
        return (ReshardStep(source, target),)
    if prod(source.shape) != prod(target.shape):
        raise ProgramError(
            f"a tensor of shape {list(source.shape)} cannot be read as {list(target.shape)}: their sizes differ; "
            "correct the dims"
        )
    groups = [*aligned_dims(source.shape, target.shape)]
    views = [_view(source, target, group) for group in groups]
    if None not in views:
        return (_seen(source, target, groups, views),)
    bad = [group for group, view in zip(groups, views, strict=True) if view is None]
    first = _gathered(source, [group[0] for group in bad])
    last = _gathered(target, [group[1] for group in bad])
    views = [_view(first, last, group) for group in groups]
    assert None not in views
    return (
        ReshardStep(source, _renumbered(first)),
        _seen(_renumbered(first), last, groups, views),
        # Each device first takes what it needs from itself, independent of the others.
        ReshardStep(*(apart(enumerate(layout.boxes), layout.devices) for layout in (last, target))),
    )


# -- transfers


@dataclass(frozen=True, slots=True)
class Piece:
    """A box that a target position takes from a source position; coordinates of the whole tensor."""

    source: int
    box: Box


def pieces(step: ReshardStep) -> tuple[tuple[Piece, ...], ...]:
    """Return [target positions] the pieces that make up each target's box.

    Every part of the source that overlaps the target's box gives one piece, from the replica on the same device if
    there is one, otherwise from the nearest device. Where source parts overlap (windows, in the backward pass), so do
    the pieces, which must then be added.
    """
    source, target = step.source, step.target
    holders: dict[int, list[int]] = {}
    for position, part in enumerate(source.parts):
        holders.setdefault(part, []).append(position)
    parts = list(holders.values())
    # Usually one of many replicas is on the target's own device.
    own = [{source.devices[position]: position for position in reversed(positions)} for positions in parts]
    # Index by range of the first dim, since a box overlaps with few of many parts.
    rows: dict[Range, list[int]] = {}
    for number, positions in enumerate(parts):
        rows.setdefault(_first(source.boxes[positions[0]]), []).append(number)
    ranges = sorted(rows)
    longest = max((high - low for low, high in ranges), default=0)
    # Replicas of the target have the same box.
    shared: dict[Box, list[tuple[int, Box]]] = {}
    for box in target.boxes:
        if box in shared:
            continue
        low, high = _first(box)
        near = ranges[bisect_left(ranges, (low - longest + 1,)) : bisect_left(ranges, (high,))]
        numbers = sorted(number for along in near for number in rows[along])
        both = [(number, intersection(source.boxes[parts[number][0]], box)) for number in numbers]
        shared[box] = [(number, common) for number, common in both if common is not None]
    result = []
    for device, box in zip(target.devices, target.boxes, strict=True):
        taken = []
        for number, common in shared[box]:
            nearest = own[number].get(device)
            if nearest is None:
                # Numbers that agree in their first digits are closest: those of one node, where these have 2^k.
                nearest = min(parts[number], key=lambda position: (source.devices[position] ^ device, position))
            taken.append(Piece(nearest, common))
        result.append(tuple(taken))
    return tuple(result)


def _first(box: Box) -> Range:
    return box[0] if box else (0, 1)


Pairs = dict[tuple[int, int], int]
"""Points, or bytes, sent from one device to another."""


def point_to_point(step: ReshardStep, taken: Sequence[Sequence[Piece]] | None = None) -> Pairs:
    """Return the points that a transfer sends between devices, without the host; `taken` is `pieces(step)`."""
    pairs: Pairs = {}
    for device, own in zip(step.target.devices, pieces(step) if taken is None else taken, strict=True):
        for piece in own:
            sender = step.source.devices[piece.source]
            if sender != device and HOST not in (sender, device):
                pairs[sender, device] = pairs.get((sender, device), 0) + num_points(piece.box)
    return pairs


def moved_pairs(steps: Iterable[ReshardStep]) -> Pairs:
    """Return the total points that transfers send between devices."""
    total: Pairs = {}
    for step in steps:
        add_pairs(total, point_to_point(step).items())
    return total


def add_pairs(pairs: Pairs, more: Iterable[tuple[tuple[int, int], int]]) -> None:
    """Add points to existing totals."""
    for ends, points in more:
        pairs[ends] = pairs.get(ends, 0) + points


# -- transfers within workers' parts, each in its own coordinates


Shapes = Sequence[Sequence[int]]
"""[workers] shapes of their parts."""


def framing(shapes: Shapes, frames: Sequence[Box], devices: Sequence[int]) -> tuple[ReshardStep, ...]:
    """Return the transfer that crops each worker's part to a box in its own coordinates, [workers]."""
    return (ReshardStep(_wholes(shapes, devices), apart(enumerate(frames), devices)),)


def clearing(
    shapes: Sequence[Sequence[int]], places: Sequence[Place], devices: Sequence[int]
) -> tuple[ReshardStep, ...]:
    """Return the transfers that zero some boxes: everything else is taken out and put back."""
    kept: list[Place] = []
    for worker, shape in enumerate(shapes):
        left = [whole(shape)]
        for at, box in places:
            left = [rest for one in left for rest in difference(one, box)] if at == worker else left
        kept += [(worker, box) for box in left or [whole([0] * len(shape))]]
    out = ReshardStep(_wholes(shapes, devices), apart(kept, [devices[worker] for worker, _ in kept]))
    return out, out.adjoint


def addition(shapes: Shapes, source: Place, target: Place, devices: Sequence[int]) -> tuple[ReshardStep, ...]:
    """Return the transfers that send one box to another's device and add it there."""
    wholes = _wholes(shapes, devices)

    def placed_apart(place: Place) -> Layout:
        return apart([*enumerate(map(whole, shapes)), place], [*devices, devices[target[0]]])

    return ReshardStep(wholes, placed_apart(source)), ReshardStep(placed_apart(target), wholes)


def _wholes(shapes: Shapes, devices: Sequence[int]) -> Layout:
    return apart(enumerate(map(whole, shapes)), devices)


# -- common dims of two shapes


_Group = tuple[Range, Range]
"""Neighbouring dims of the source's and of the target's shape that hold the same points."""

_Convert = Callable[[Box], Box | None]


@dataclass(frozen=True, slots=True)
class _View:
    """Common dims of a group, and the conversion of either side's boxes to them."""

    shape: tuple[int, ...]
    source: _Convert
    target: _Convert


def _view(source: Layout, target: Layout, group: _Group) -> _View | None:
    """Return dims in which every box of both layouts is a box; None if there are none."""
    a, b = source.shape[slice(*group[0])], target.shape[slice(*group[1])]
    if a == b:
        return _View(a, lambda box: box, lambda box: box)
    # The flat dim first: it gives the fewest pieces.
    flat = _View((prod(a),), lambda box: _flat(box, a), lambda box: _flat(box, b))
    candidates = [flat]
    if (common := common_dims(a, b)) is not None:
        fine = common or (1,)
        candidates.append(_View(fine, lambda box: _refined(box, a, fine), lambda box: _refined(box, b, fine)))
    for view in candidates:
        sources = all(view.source(box[slice(*group[0])]) is not None for box in source.boxes)
        if sources and all(view.target(box[slice(*group[1])]) is not None for box in target.boxes):
            return view
    return None


def _seen(source: Layout, target: Layout, groups: list[_Group], views: Sequence[_View | None]) -> ReshardStep:
    """Return the step between two layouts, written in the common dims."""
    pairs = [(group, view) for group, view in zip(groups, views, strict=True) if view is not None]
    shape = tuple(extent for _, view in pairs for extent in view.shape)

    def written(box: Box, of_source: bool) -> Box:
        ranges: list[Range] = []
        for group, view in pairs:
            part = box[slice(*group[not of_source])]
            seen = (view.source if of_source else view.target)(part)
            assert seen is not None
            ranges.extend(seen)
        return tuple(ranges)

    return ReshardStep(
        replace(source, shape=shape, boxes=tuple(written(box, True) for box in source.boxes)),
        replace(target, shape=shape, boxes=tuple(written(box, False) for box in target.boxes)),
    )


def _flat(box: Box, shape: Sequence[int]) -> Box | None:
    """Return a box as one range of the flat index, None where its points are not contiguous."""
    low, high = 0, 1
    is_run = True
    for (first, last), extent in zip(box, shape, strict=True):
        # After the first dim that is a proper range, all dims must be complete; before it, single points.
        if high - low > 1 and (first, last) != (0, extent):
            is_run = False
        if first < 0 or last > extent:
            is_run = False
        low, high = low * extent + first, (high - 1) * extent + last
    return ((low, high),) if is_run else None


def _refined(box: Box, shape: Sequence[int], fine: Sequence[int]) -> Box | None:
    """Return a box of `shape` as a box of its factors `fine`, None where it is not one."""
    ranges: list[Range] = []
    position = 0
    for (first, last), extent in zip(box, shape, strict=True):
        begin, covered = position, 1
        while covered < extent:
            covered *= fine[position]
            position += 1
        if position - begin == 1:
            ranges.append((first, last))
        elif extent > 1:
            factors = _factored(first, last, fine[begin:position])
            if factors is None:
                return None
            ranges.extend(factors)
        elif (first, last) != (0, 1):
            # A window that extends past a dim which the common dims omit.
            return None
    # Shapes without a dim larger than 1.
    return tuple(ranges) if ranges else whole(fine)


def _factored(first: int, last: int, factors: Sequence[int]) -> list[Range] | None:
    """Return the range [first, last) of a product as ranges of its factors, None where it is not a box."""
    if first < 0 or last > prod(factors):
        return None
    ranges: list[Range] = []
    for i, factor in enumerate(factors):
        inner = prod(factors[i + 1 :])
        if first % inner == 0 and last % inner == 0:
            # Complete blocks of the remaining factors: a range of this factor, if it does not wrap around.
            low, high = first // inner, last // inner
            return [*ranges, (low, high), *whole(factors[i + 1 :])] if high <= factor else None
        if first // inner != (last - 1) // inner:
            return None
        ranges.append((first // inner, first // inner + 1))
        first, last = first % inner, (last - 1) % inner + 1
    raise AssertionError("the last factor always gives a range")


def _gathered(layout: Layout, groups: Sequence[Range]) -> Layout:
    """Return the layout in which only the leading dim of each group stays split; the others are gathered."""
    boxes = []
    for box in layout.boxes:
        ranges = list(box)
        for begin, end in groups:
            lead = next((i for i in range(begin, end) if layout.shape[i] > 1), begin)
            for i in range(begin, end):
                inside = i == lead and box[i][0] >= 0 and box[i][1] <= layout.shape[i]
                if not inside:
                    ranges[i] = (0, layout.shape[i])
        boxes.append(tuple(ranges))
    return replace(layout, boxes=tuple(boxes))


def _renumbered(layout: Layout) -> Layout:
    """Return the layout with equal boxes treated as replicas of one part."""
    numbers: dict[Box, int] = {}
    return replace(layout, parts=tuple(numbers.setdefault(box, len(numbers)) for box in layout.boxes))


SMALL_POINTS = 1024
"""Below this size an all-reduce reduces on one device: the bytes are the same, and the operations far fewer."""

Stage = Iterable[tuple[tuple[int, int], int]]
"""Points sent from one device to another, all at the same time."""


def sum_groups(mesh: DeviceMesh, over: Iterable[str]) -> list[list[int]]:
    """Return the groups of two or more devices that differ only along the given axes."""
    return [[mesh.devices[i] for i in group] for group in mesh.groups(over) if len(group) > 1]


def all_reduce_stages(group: Sequence[int], shard_points: int) -> tuple[Stage, Stage]:
    """Return the transfers of a group's reduce-scatter, then those of its all-gather."""
    count = len(group)
    if shard_points < max(SMALL_POINTS, count):
        first, *others = group
        return [((other, first), shard_points) for other in others], [
            ((first, other), shard_points) for other in others
        ]
    shares = [shard_points // count + (i < shard_points % count) for i in range(count)]
    # To the device that reduces this share, and back from it.
    there = [((other, to), share) for to, share in zip(group, shares, strict=True) for other in group if other != to]
    return there, [((adder, other), share) for (other, adder), share in there]


def all_reduce_pairs(mesh: DeviceMesh, over: Iterable[str], shard_points: Mapping[int, int]) -> Pairs:
    """Return the points that an all-reduce along some axes sends, for shards of `shard_points` by device."""
    pairs: Pairs = {}
    for group in sum_groups(mesh, over):
        for stage in all_reduce_stages(group, shard_points[group[0]]):
            add_pairs(pairs, stage)
    return pairs


@dataclass(frozen=True, slots=True)
class SumEnd:
    """A layer at one end of a tensor.

    Attributes:
        dims: Dims of the tensor there.
        over: Dims whose parts leave partial gradients of it.
    """

    mesh: DeviceMesh
    dims: tuple[TensorDim, ...]
    over: frozenset[str]

    @property
    def axes(self) -> tuple[str, ...]:
        """Axes of the mesh over which the gradient is reduced, including those of kernels."""
        kernels = {dim.kernel for dim in self.dims if isinstance(dim, WindowDim)}
        return tuple(axis for axis in self.mesh.split_axes if axis in self.over or axis in kernels)


def joint_steps(giver: SumEnd, reader: SumEnd) -> tuple[ReshardStep, ...] | None:
    """Return the transfers that take a consumer's partial gradients to the devices of the giver's reduction.

    The gradients remain partial. Each transfer is between some of the devices; together they cover all. None where the
    consumer must reduce its gradient itself: its gradient is complete, or devices hold different parts of the tensor,
    or its groups differ.
    """
    axes = reader.axes
    groups = [[giver.mesh.devices[i] for i in group] for group in giver.mesh.groups(giver.axes)]
    if not axes or any(len(group) != prod(map(reader.mesh.size, axes)) for group in groups):
        return None
    own = tuple(PlainDim(dim.out, dim.extent) if isinstance(dim, WindowDim) else dim for dim in reader.dims)
    if any(dim.extent % reader.mesh.size(dim.name) for dim in own):
        return None  # The giver's parts must have equal sizes.
    held, read = layout_of(giver.mesh, giver.dims), layout_of(reader.mesh, own)
    there = reshard_steps(held, read)
    if len(there) != 1 or there[0].source.by_device != there[0].target.by_device:
        return None
    part_of = {
        device: tuple(point[axis] for axis in axes)
        for device, point in zip(reader.mesh.devices, reader.mesh.coordinates, strict=True)
    }
    if any(len({part_of[device] for device in group}) != len(group) for group in groups):
        return None
    windowed = reshard_steps(held, layout_of(reader.mesh, reader.dims))
    if len(windowed) != 1:
        return None
    back = windowed[0].adjoint
    # Devices that differ only along the tensor's own dims together hold one complete partial gradient.
    place = {device: position for position, device in enumerate(back.target.devices)}
    return tuple(
        ReshardStep(back.source.at(positions), back.target.at([place[back.source.devices[i]] for i in positions]))
        for positions in reader.mesh.groups(dim.name for dim in own)
    )
