"""Re-sharding: the movements that take a tensor from one layout to another, which box goes where, and partial sums.

The two layouts may see the tensor with different dims. A reshape keeps the row-major order of the points, so that
ranges of ``[c, h, w]`` can be compared with ranges of ``[c·h·w]``: both are ranges of finer dims or of the one flat
dim. Where a box of one is no box of the other (a third of 256 channels, seen flat, beside a split of h), the tensor
first goes to a layout on its own devices in which the reshape is local: only the leading dim stays split.

An all-reduce goes in pieces between all pairs of devices: each of k devices adds a k-th and sends the others the sum.
What a fan-out hands on, or a weight that several layers share, has one sum of its gradient. A reader that holds the
tensor as the other end does, and would sum its gradient over the same groups of devices, leaves its parts as they are:
they are added on each device. What its windows reach beyond its own part goes to the neighbours before that.
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
    """One movement between layouts with the same dims."""

    source: Layout
    target: Layout

    @property
    def adjoint(self) -> "ReshardStep":
        """The movement that takes gradients back."""
        return ReshardStep(self.target, self.source)

    def clipped(self, dim: int) -> "ReshardStep":
        """Return the movement to what the source covers of the target's boxes along a dim, possibly nothing of some."""
        low = min(box[dim][0] for box in self.source.boxes)
        high = max(box[dim][1] for box in self.source.boxes)

        def cut(box: Box) -> Box:
            first, last = max(box[dim][0], low), min(box[dim][1], high)
            return (*box[:dim], (first, max(first, last)), *box[dim + 1 :])

        return ReshardStep(self.source, replace(self.target, boxes=tuple(map(cut, self.target.boxes))))


def reshard_steps(source: Layout, target: Layout) -> tuple[ReshardStep, ...]:
    """Return the movements, one or at most three, that take a tensor from one layout to another.

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
        # Each device takes what it needs from itself, whatever the others hold.
        ReshardStep(*(apart(enumerate(layout.boxes), layout.devices) for layout in (last, target))),
    )


# -- what moves


@dataclass(frozen=True, slots=True)
class Piece:
    """A box that a target position takes from a source position; coordinates of the whole tensor."""

    source: int
    box: Box


def pieces(step: ReshardStep) -> tuple[tuple[Piece, ...], ...]:
    """Return [target positions] the pieces that make up what each one holds.

    Every part of the source that overlaps the target's box gives one piece, from the replica on the same device
    if there is one, from the nearest device otherwise. Where the parts of the source overlap (windows, on the way
    back), the pieces do too, and are to be added.
    """
    source, target = step.source, step.target
    holders: dict[int, list[int]] = {}
    for position, part in enumerate(source.parts):
        holders.setdefault(part, []).append(position)
    parts = list(holders.values())
    # Of many replicas one is mostly on the target's own device.
    own = [{source.devices[position]: position for position in reversed(positions)} for positions in parts]
    # By their ranges of the first dim: of many parts few have anything in common with a box.
    rows: dict[Range, list[int]] = {}
    for number, positions in enumerate(parts):
        rows.setdefault(_first(source.boxes[positions[0]]), []).append(number)
    ranges = sorted(rows)
    longest = max((high - low for low, high in ranges), default=0)
    # Replicas of the target have one box between them.
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
"""Points, or bytes, that go from one device to another."""


def point_to_point(step: ReshardStep, taken: Sequence[Sequence[Piece]] | None = None) -> Pairs:
    """Return the points that a movement takes from one device to another; the host's do not count. taken: `pieces`."""
    pairs: Pairs = {}
    for device, own in zip(step.target.devices, pieces(step) if taken is None else taken, strict=True):
        for piece in own:
            sender = step.source.devices[piece.source]
            if sender != device and HOST not in (sender, device):
                pairs[sender, device] = pairs.get((sender, device), 0) + num_points(piece.box)
    return pairs


def moved_pairs(steps: Iterable[ReshardStep]) -> Pairs:
    """Return the points that movements take between devices, all together."""
    total: Pairs = {}
    for step in steps:
        add_pairs(total, point_to_point(step).items())
    return total


def add_pairs(pairs: Pairs, more: Iterable[tuple[tuple[int, int], int]]) -> None:
    """Add points to others."""
    for ends, points in more:
        pairs[ends] = pairs.get(ends, 0) + points


# -- movements of what workers hold, each in coordinates of its own


Shapes = Sequence[Sequence[int]]
"""[workers] of what they hold."""


def framing(shapes: Shapes, frames: Sequence[Box], devices: Sequence[int]) -> tuple[ReshardStep, ...]:
    """Return the movement by which workers, [workers], keep what a box in their part's coordinates encloses."""
    return (ReshardStep(_wholes(shapes, devices), apart(enumerate(frames), devices)),)


def clearing(
    shapes: Sequence[Sequence[int]], places: Sequence[Place], devices: Sequence[int]
) -> tuple[ReshardStep, ...]:
    """Return the movements that leave zeros in some subsets: everything else is taken out and put back."""
    kept: list[Place] = []
    for worker, shape in enumerate(shapes):
        left = [whole(shape)]
        for at, box in places:
            left = [rest for one in left for rest in difference(one, box)] if at == worker else left
        kept += [(worker, box) for box in left or [whole([0] * len(shape))]]
    out = ReshardStep(_wholes(shapes, devices), apart(kept, [devices[worker] for worker, _ in kept]))
    return out, out.adjoint


def addition(shapes: Shapes, source: Place, target: Place, devices: Sequence[int]) -> tuple[ReshardStep, ...]:
    """Return the movements that send one subset to another's device and add it there."""
    wholes = _wholes(shapes, devices)

    def beside(place: Place) -> Layout:
        return apart([*enumerate(map(whole, shapes)), place], [*devices, devices[target[0]]])

    return ReshardStep(wholes, beside(source)), ReshardStep(beside(target), wholes)


def _wholes(shapes: Shapes, devices: Sequence[int]) -> Layout:
    return apart(enumerate(map(whole, shapes)), devices)


# -- seeing through reshapes


_Group = tuple[Range, Range]
"""Neighbouring dims of the source's and the target's shape that hold the same points."""

_Convert = Callable[[Box], Box | None]


@dataclass(frozen=True, slots=True)
class _View:
    """Common dims of a group, and how a box of either side is written in them."""

    shape: tuple[int, ...]
    source: _Convert
    target: _Convert


def _view(source: Layout, target: Layout, group: _Group) -> _View | None:
    """Return dims in which every box of both layouts is a box; None if there are none."""
    a, b = source.shape[slice(*group[0])], target.shape[slice(*group[1])]
    if a == b:
        return _View(a, lambda box: box, lambda box: box)
    # The flat dim first: it has the fewest pieces.
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
    """Return a box as one range of the flat index, None where its points are not neighbours."""
    low, high = 0, 1
    is_run = True
    for (first, last), extent in zip(box, shape, strict=True):
        # After the first dim that is a proper range, all dims must be whole; before it, single points.
        if high - low > 1 and (first, last) != (0, extent):
            is_run = False
        if first < 0 or last > extent:
            is_run = False
        low, high = low * extent + first, (high - 1) * extent + last
    return ((low, high),) if is_run else None


def _refined(box: Box, shape: Sequence[int], fine: Sequence[int]) -> Box | None:
    """Return a box of `shape` as a box of its factors `fine`, None where it is none."""
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
            # A window that sticks out of a dim which the common dims leave out.
            return None
    # Shapes without a dim larger than 1.
    return tuple(ranges) if ranges else whole(fine)


def _factored(first: int, last: int, factors: Sequence[int]) -> list[Range] | None:
    """Return the range [first, last) of a product as ranges of its factors, None where it is no box."""
    if first < 0 or last > prod(factors):
        return None
    ranges: list[Range] = []
    for i, factor in enumerate(factors):
        inner = prod(factors[i + 1 :])
        if first % inner == 0 and last % inner == 0:
            # Whole blocks of the rest: a range of this factor, if it does not wrap around.
            low, high = first // inner, last // inner
            return [*ranges, (low, high), *whole(factors[i + 1 :])] if high <= factor else None
        if first // inner != (last - 1) // inner:
            return None
        ranges.append((first // inner, first // inner + 1))
        first, last = first % inner, (last - 1) % inner + 1
    raise AssertionError("the last factor is whole blocks of nothing")


def _gathered(layout: Layout, groups: Sequence[Range]) -> Layout:
    """Return the layout in which only the leading dim of each group stays split, by whole boxes of what was there."""
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
    """Return the layout with equal boxes counted as replicas of one part."""
    numbers: dict[Box, int] = {}
    return replace(layout, parts=tuple(numbers.setdefault(box, len(numbers)) for box in layout.boxes))


SMALL_POINTS = 1024
"""Below this size an all-reduce adds on one device: as many bytes, and far fewer operations."""

Stage = Iterable[tuple[tuple[int, int], int]]
"""Points that go from one device to another, all at once."""


def sum_groups(mesh: DeviceMesh, over: Iterable[str]) -> list[list[int]]:
    """Return the groups of several devices that differ along some axes alone."""
    return [[mesh.devices[i] for i in group] for group in mesh.groups(over) if len(group) > 1]


def all_reduce_stages(group: Sequence[int], shard_points: int) -> tuple[Stage, Stage]:
    """Return what the devices of a group send to have shards added, then to have the sums back."""
    count = len(group)
    if shard_points < max(SMALL_POINTS, count):
        first, *others = group
        return [((other, first), shard_points) for other in others], [
            ((first, other), shard_points) for other in others
        ]
    shares = [shard_points // count + (i < shard_points % count) for i in range(count)]
    # To the one that adds this share, and from it.
    there = [((other, to), share) for to, share in zip(group, shares, strict=True) for other in group if other != to]
    return there, [((adder, other), share) for (other, adder), share in there]


def all_reduce_pairs(mesh: DeviceMesh, over: Iterable[str], shard_points: Mapping[int, int]) -> Pairs:
    """Return the points that an all-reduce along some axes of shards, of so many points by device, takes to others."""
    pairs: Pairs = {}
    for group in sum_groups(mesh, over):
        for stage in all_reduce_stages(group, shard_points[group[0]]):
            add_pairs(pairs, stage)
    return pairs


@dataclass(frozen=True, slots=True)
class SumEnd:
    """A layer at one end of a tensor. dims: of the tensor there. over: dims whose parts leave parts of its gradient."""

    mesh: DeviceMesh
    dims: tuple[TensorDim, ...]
    over: frozenset[str]

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes of the mesh that the gradient is summed over, those of kernels included."""
        kernels = {dim.kernel for dim in self.dims if isinstance(dim, WindowDim)}
        return tuple(axis for axis in self.mesh.split_axes if axis in self.over or axis in kernels)


def joint_steps(giver: SumEnd, reader: SumEnd) -> tuple[ReshardStep, ...] | None:
    """Return the movements that take a reader's parts of a gradient to the devices of the giver's sum, as parts.

    Each is between some of the devices; together they are between all. None where the reader has to sum its gradient
    itself: it has the whole of it, or other devices hold other parts of the tensor, or its groups are others.
    """
    axes = reader.axes
    groups = [[giver.mesh.devices[i] for i in group] for group in giver.mesh.groups(giver.axes)]
    if not axes or any(len(group) != prod(map(reader.mesh.size, axes)) for group in groups):
        return None
    own = tuple(PlainDim(dim.out, dim.extent) if isinstance(dim, WindowDim) else dim for dim in reader.dims)
    if any(dim.extent % reader.mesh.size(dim.name) for dim in own):
        return None  # The giver's parts are of one size.
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
    # Devices that differ along the tensor's own dims alone have the same part of the whole gradient between them.
    place = {device: position for position, device in enumerate(back.target.devices)}
    return tuple(
        ReshardStep(back.source.at(alike), back.target.at([place[back.source.devices[i]] for i in alike]))
        for alike in reader.mesh.groups(dim.name for dim in own)
    )
