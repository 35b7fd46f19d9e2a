"""Halos of a sliding kernel along one dim: what every worker owns, what it needs, and the widths in between.

Outputs and inputs are both balanced over the workers, so that kernels without "nice" padding, stride and extent give
halos of different widths, or points that a worker owns and does not use (Hewett and Grady 2020, Appendix B.1). Ranges
are half-open, from 0, and clipped to the tensor; the padding beyond its ends is counted apart.
"""

from dataclasses import dataclass

from pase.costs.layouts import even_bounds
from pase.errors import PrimitiveError
from pase.targets.mesh_tensorflow.runtime.boxes import Range

MAX_WORKERS = 1 << 20
MAX_EXTENT = 10**12
"""More than this is a slip of the keyboard, and would not fit where bounds are computed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """A kernel that slides along a dim: output o reads ``o·stride + k·dilation - padding[0]`` for k below `extent`.

    padding: points before the tensor's first and after its last.
    """

    extent: int
    stride: int = 1
    dilation: int = 1
    padding: tuple[int, int] = (0, 0)

    @property
    def reach(self) -> int:
        """From the first to the last point that one output reads, both included."""
        return (self.extent - 1) * self.dilation + 1

    def num_outputs(self, extent: int) -> int:
        """Return how many outputs a tensor of that extent gives, at most 0 where the kernel does not fit."""
        return (extent + sum(self.padding) - self.reach) // self.stride + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """One worker's part of a dim: the outputs that it computes, the inputs that it owns and those that it needs.

    needed: from the first to the last point under its windows, clipped to the tensor; empty where its windows lie
    in the padding, or would begin there if it had an output. padding_left, padding_right: the points clipped off.
    """

    output: Range
    owned: Range
    needed: Range
    padding_left: int
    padding_right: int

    @property
    def halo_left(self) -> int:
        """Points that it needs of those before its own."""
        return max(0, min(self.needed[1], self.owned[0]) - self.needed[0])

    @property
    def halo_right(self) -> int:
        """Points that it needs of those after its own."""
        return max(0, self.needed[1] - max(self.needed[0], self.owned[1]))

    @property
    def unused_left(self) -> int:
        """Its own points before those that it needs."""
        return max(0, min(self.needed[0], self.owned[1]) - self.owned[0])

    @property
    def unused_right(self) -> int:
        """Its own points after those that it needs."""
        return max(0, self.owned[1] - max(self.needed[1], self.owned[0]))

    @property
    def buffer_extent(self) -> int:
        """Points of its buffer, [left halo | bulk | right halo]."""
        return self.halo_left + self.owned[1] - self.owned[0] + self.halo_right

    @property
    def window(self) -> Range:
        """What its kernel is applied to: the needed range and its padding, which sticks out of the tensor."""
        return self.needed[0] - self.padding_left, self.needed[1] + self.padding_right

    @property
    def segments(self) -> tuple[Range, ...]:
        """The ranges that its buffer holds, one after the other; one unless its halo begins beyond a neighbour."""
        ranges = (
            (self.owned[0] - self.halo_left, self.owned[0]),
            self.owned,
            (self.owned[1], self.owned[1] + self.halo_right),
        )
        if self.needed[1] < self.owned[0]:
            ranges = (self.needed, *ranges[1:])
        if self.needed[0] > self.owned[1]:
            ranges = (*ranges[:2], self.needed)
        joined: list[Range] = []
        for low, high in ranges:
            if low == high:
                continue
            if joined and joined[-1][1] == low:
                joined[-1] = (joined[-1][0], high)
            else:
                joined.append((low, high))
        return tuple(joined)


def regions(extent: int, kernel: Kernel, num_workers: int) -> tuple[Region, ...]:
    """Return [num_workers] the parts of a dim of that extent under a sliding kernel (Appendix B.1).

    Of n points on P workers the first n mod P own one more; workers beyond the number of points or outputs have empty
    ranges. Raises PrimitiveError for numbers that are no kernel and for a kernel beyond the padded input.
    """
    _check(extent, kernel, num_workers)
    num_outputs = kernel.num_outputs(extent)
    outputs = even_bounds(num_outputs, num_workers).tolist()
    owned = even_bounds(extent, num_workers).tolist()
    result = []
    for i in range(num_workers):
        first = outputs[i] * kernel.stride - kernel.padding[0]
        num_own = outputs[i + 1] - outputs[i]
        last = first + (num_own - 1) * kernel.stride + kernel.reach if num_own else first
        result.append(
            Region(
                output=(outputs[i], outputs[i + 1]),
                owned=(owned[i], owned[i + 1]),
                needed=(_clipped(first, extent), _clipped(last, extent)),
                padding_left=min(last, 0) - min(first, 0),
                padding_right=max(last, extent) - max(first, extent),
            )
        )
    return tuple(result)


def _clipped(position: int, extent: int) -> int:
    return min(max(position, 0), extent)


def _check(extent: int, kernel: Kernel, num_workers: int) -> None:
    least = {
        "extent": (extent, 1),
        "kernel": (kernel.extent, 1),
        "stride": (kernel.stride, 1),
        "dilation": (kernel.dilation, 1),
        "padding": (min(kernel.padding), 0),
    }
    for name, (value, lowest) in least.items():
        if value < lowest:
            article = "an" if name == "extent" else "a"
            raise PrimitiveError(f"{article} {name} of {value} is not possible; expected {lowest} or more")
    largest = max(extent, kernel.extent, kernel.stride, kernel.dilation, *kernel.padding)
    if largest > MAX_EXTENT:
        raise PrimitiveError(f"{largest} points are too many; expected at most {MAX_EXTENT}")
    if not 1 <= num_workers <= MAX_WORKERS:
        raise PrimitiveError(f"{num_workers} workers were asked for; expected 1 to {MAX_WORKERS}")
    padded = extent + sum(kernel.padding)
    if kernel.reach > padded:
        raise PrimitiveError(
            f"a kernel that reaches over {kernel.reach} points (kernel {kernel.extent}, dilation {kernel.dilation}) "
            f"does not fit an extent of {extent} with padding, {padded} points; use a smaller one or more padding"
        )
