"""`Machine`: devices and the levels that join them, each figure with its source."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated

from msgspec import Meta

from pase.common.containers import FrozenDict
from pase.common.structs import AboveZero, Number, Positive, Whole, choice
from pase.errors import MachineError

DTYPES = ("float64", "float32", "tf32", "bfloat16", "float16", "float8", "int8")
"""Element types that a peak may be given for; tf32 is float32 on units that round its factors to 10 bits."""

KERNELS = ("products", "convolutions", "attention", "memory", "norms", "functions")
"""What kernels do: of each, a machine says what share of its peak they reach."""

REQUIRED_DTYPE = "float32"
"""What costs are computed for unless something else is said."""

BY_LEVEL, RING = "hierarchical", "ring"
"""How sums go: within the groups of a level before between them, or in one ring of all that take part."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Where a machine was read from.

    source: what messages call the file. path: of the machine in it, "" where it is all of it.
    """

    source: str
    path: str

    def fail(self, path: str, problem: str) -> MachineError:
        """Return the error that says what is wrong with a field of the machine."""
        return MachineError(f"{self.source}: {'.'.join(filter(None, [self.path, path]))} {problem}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One accelerator."""

    name: str
    """Name of the device."""
    memory_bytes: Positive
    """Its own memory, in bytes."""
    memory_bandwidth_bytes_per_s: AboveZero | None = None
    """Bandwidth of that memory, in bytes per second; None where it is not modelled."""
    source: str
    """Where these figures are from."""
    peak_flop_per_s: Annotated[
        Mapping[str, AboveZero],
        Meta(min_length=1, extra_json_schema={"propertyNames": {"enum": DTYPES}, "required": [REQUIRED_DTYPE]}),
    ]
    """Peak by element type, in FLOP/s; tf32 is float32 on units that round its factors to 10 bits."""

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
    """How far communication overlaps with computation, for the cost model step."""

    share: Annotated[float, Meta(ge=0, le=1)]
    """ω: of the time that the backward pass computes, the part in which gradients are all-reduced, 0 to 1."""
    source: str
    """Where this figure is from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelSample:
    """A kernel that was timed."""

    what: Annotated[str, choice(KERNELS)]
    """What it does."""
    dtype: str
    """Type of its numbers."""
    extents: tuple[Whole, ...]
    """Rows, columns and depth of a product, and in how many copies; none of others."""
    flop: Number
    """What it computes, in FLOP; 0 where it multiplies nothing."""
    touched_bytes: Number
    """What it reads and writes, in bytes."""
    time_s: AboveZero
    """How long it took, in seconds."""
    predicted_s: AboveZero
    """What the figures of `Kernels` predict for it, in seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """What kernels reach of a device's peaks, for the cost model step."""

    dtype: Annotated[str, choice(DTYPES)]
    """Type of the products that half_extent and half_depth are of; with another type's, whose peak is a fraction of
    that type's, these are that fraction."""
    launch_s: Number
    """Time that each kernel takes besides its work, in seconds."""
    products: AboveZero
    """Of the peak of the type that they multiply in, the share that products of large matrices reach."""
    convolutions: AboveZero
    """That share of convolutions."""
    attention: AboveZero
    """That share of attention in one kernel."""
    memory: AboveZero
    """Of the memory's bandwidth, the share at which kernels go that move and add."""
    norms: AboveZero
    """That share of normalisations, softmax and losses."""
    functions: AboveZero
    """That share of exponentials and the like."""
    half_extent: Number
    """Rows of a product, and likewise columns, with which it reaches half of its share."""
    half_depth: Number
    """Extent over which a product sums, with which it reaches half of its share."""
    least: Number
    """Of the peak for float32, the share that products reach whatever their extents."""
    beyond: AboveZero | None = None
    """Of the memory's bandwidth, the share at which bytes after the first cache_bytes of a kernel take more time; None
    for no more."""
    cache_bytes: Number = 0.0
    """How many bytes of a kernel are in caches."""
    error: Number | None = None
    """Median of the relative errors of the samples that the figures were fitted to; None where they were not fitted."""
    source: str
    """Where these figures are from."""
    samples: tuple[KernelSample, ...] = field(default=(), compare=False, repr=False)
    """Kernels that were timed, in machine files."""


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

        MachineError names the field of a level whose groups would be left part empty: with such groups the
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
        origin = self.origin or Origin(source=f"machine {self.name!r}", path="")
        return origin.fail(path, problem)

    def flop_per_byte(self, num_devices: int, dtype: str = "float32") -> float:
        """Return r of Eq. 1: peak FLOP/s of a device ÷ bytes/s of the slowest link that the devices use."""
        slowest = min(level.bandwidth_bytes_per_s for level in self.levels_spanned(num_devices))
        return self.peak_flop_per_s(dtype) / slowest
