"""`Machine`: devices and the levels that join them, each figure with its source."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from pase.common.containers import FrozenDict
from pase.errors import MachineError

BY_LEVEL, RING = "hierarchical", "ring"
"""How sums go: within the groups of a level before between them, or in one ring of all that take part."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Where a machine was read from.

    source: what messages call the file. path: of the machine in it, "" where it is all of it. lines: line numbers by
    path of a field, as far as they are known.
    """

    source: str
    path: str
    lines: Mapping[str, int]

    def __post_init__(self) -> None:
        object.__setattr__(self, "lines", FrozenDict(self.lines))

    def fail(self, path: str, problem: str) -> MachineError:
        """Return the error that says what is wrong with a field of the machine."""
        full = ".".join(filter(None, [self.path, path]))
        line = self.lines.get(full)
        return MachineError(f"{self.source}{f', line {line}' if line else ''}: {full} {problem}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One accelerator.

    peak_flop_per_s: by element type. memory_bytes: its own memory. memory_bandwidth_bytes_per_s: of that memory, None
    where it is not modelled. source: where the figures are from.
    """

    name: str
    peak_flop_per_s: Mapping[str, float]
    memory_bytes: int
    source: str
    memory_bandwidth_bytes_per_s: float | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "peak_flop_per_s", FrozenDict(self.peak_flop_per_s))


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """A group of devices that one kind of link joins, counted from the inside out.

    num_devices: devices in one group; 0 for a level without bound. latency_s: α, seconds for a message.
    bandwidth_bytes_per_s: 1/β, bytes a second, in each direction, of the link by which one group of the level below (at
    the first level, one device) is attached; all devices behind a link share it.
    """

    name: str
    num_devices: int
    latency_s: float
    bandwidth_bytes_per_s: float
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlap:
    """How far communication runs beside computation.

    share: ω, of the time that the backward pass computes the part in which sums of weights' gradients go on, 0 to 1.
    source: where the figure is from.
    """

    share: float
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelSample:
    """A kernel that was timed.

    what: of those of `Kernels`. extents: rows, columns and depth of a
    product, and in how many copies. flop: 0 of what multiplies nothing. predicted_s: what the figures make of it.
    """

    what: str
    dtype: str
    extents: tuple[int, ...]
    flop: float
    touched_bytes: float
    time_s: float
    predicted_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """What kernels reach of a device's peaks.

    dtype: of products that half_extent and half_depth are of; of another, whose peak is a fraction of its, these are
    that fraction. launch_s: time that each takes besides its work. products, convolutions, attention: of the peak of
    the type that they multiply in, the share that matrices without bound reach. half_extent: rows, or columns, with
    which a product reaches half of that; half_depth: likewise, of what it sums over. least: of the peak of float32,
    what products of any extents reach. memory, norms, functions: share of the
    memory's bandwidth at which kernels go that move and add, that normalise, and that compute exponentials and the
    like. beyond: likewise, what bytes after the first cache_bytes of a kernel take besides; None: nothing. source:
    where the figures are from. error: median of the samples' relative errors; None where they are not fitted. samples:
    what they were fitted to, in machine files.
    """

    dtype: str
    launch_s: float
    products: float
    convolutions: float
    attention: float
    half_extent: float
    half_depth: float
    least: float
    memory: float
    norms: float
    functions: float
    source: str
    beyond: float | None = None
    cache_bytes: float = 0.0
    error: float | None = None
    samples: tuple[KernelSample, ...] = field(default=(), compare=False, repr=False)


def level_between(levels: Sequence[Level], one: int, other: int) -> int:
    """Return the number of the innermost level that has two devices in one group; of the last one where none has."""
    for number, level in enumerate(levels):
        if level.num_devices == 0 or one // level.num_devices == other // level.num_devices:
            return number
    return len(levels) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """A cluster: identical devices, levels from the inside out.

    collectives: how sums go, for the cost model `step` and simulation, `BY_LEVEL` or `RING`.
    overlap: of communication and computation; None where nothing is known of it, which counts as none. kernels: what
    they reach of the peaks; None where nothing is known of it: all of them. origin: the file that it was read from, for
    messages; it is no part of the machine.
    """

    name: str
    description: str
    device: Device
    levels: tuple[Level, ...]
    collectives: str = BY_LEVEL
    overlap: Overlap | None = None
    kernels: Kernels | None = None
    origin: Origin | None = field(default=None, compare=False, repr=False)

    def peak_flop_per_s(self, dtype: str = "float32") -> float:
        """Return the peak FLOP/s of one device for an element type; MachineError where it is not given."""
        if dtype not in self.device.peak_flop_per_s:
            known = ", ".join(sorted(self.device.peak_flop_per_s))
            raise self.fail(
                "device.peak_flop_per_s",
                f"has no peak for {dtype}; it is given for {known}: take another precision or machine, or give that "
                "peak in a machine file of your own",
            )
        return self.device.peak_flop_per_s[dtype]

    def levels_spanned(self, num_devices: int) -> tuple[Level, ...]:
        """Return the levels that a group of the first `num_devices` devices uses, the innermost first."""
        for i, level in enumerate(self.levels):
            if level.num_devices == 0 or num_devices <= level.num_devices:
                return self.levels[: i + 1]
        outermost = self.levels[-1]
        raise self.fail(
            f"levels[{len(self.levels) - 1}].devices",
            f"is {outermost.num_devices}, at the outermost level {outermost.name!r}, and {num_devices} were asked for; "
            "add a level around it, or write 0 for a level without bound",
        )

    def levels_for(self, num_devices: int) -> tuple[Level, ...]:
        """Return `levels_spanned`, for devices that fill whole groups of every level but the last one.

        MachineError names the line and the field of a level whose groups would be left part empty: with such groups the
        messages of a collective differ from group to group, and no closed form holds.
        """
        spanned = self.levels_spanned(num_devices)
        for index, level in enumerate(spanned[:-1]):
            if num_devices % level.num_devices:
                below = num_devices // level.num_devices * level.num_devices
                raise self.fail(
                    f"levels[{index}].devices",
                    f"is {level.num_devices}, which does not divide {num_devices} devices: the last group of level "
                    f"{level.name!r} would be part empty; use {below} or {below + level.num_devices} devices",
                )
        return spanned

    def fail(self, path: str, problem: str) -> MachineError:
        """Return the error that says what is wrong with one figure, with its file and line where they are known."""
        origin = self.origin or Origin(source=f"machine {self.name!r}", path="", lines={})
        return origin.fail(path, problem)

    def flop_per_byte(self, num_devices: int, dtype: str = "float32") -> float:
        """Return r of Eq. 1: peak FLOP/s of a device ÷ bytes/s of the slowest link that the devices use."""
        slowest = min(level.bandwidth_bytes_per_s for level in self.levels_spanned(num_devices))
        return self.peak_flop_per_s(dtype) / slowest
