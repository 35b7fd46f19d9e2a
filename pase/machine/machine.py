"""`Machine`: devices and the levels of links that join them, each figure with its source."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated

from msgspec import Meta

from pase.common.containers import FrozenDict
from pase.common.structs import AboveZero, Number, Positive, Whole, choice
from pase.errors import MachineError

DTYPES = ("float64", "float32", "tf32", "bfloat16", "float16", "float8", "int8")
"""Element types for which a peak may be given; tf32 is float32 on units that round its factors to 10 bits."""

KERNELS = ("products", "convolutions", "attention", "memory", "norms", "functions")
"""Kinds of kernels; for each, a machine gives the share of its peak that they reach."""

REQUIRED_DTYPE = "float32"
"""Element type that costs are computed for by default."""

BY_LEVEL, RING = "hierarchical", "ring"
"""Algorithms of all-reduces: within the groups of a level before between them, or in one ring of all participants."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Where a machine was read from.

    Attributes:
        source: What messages call the file.
        path: Path of the machine in the file, "" where it is the whole file.
    """

    source: str
    path: str

    def fail(self, path: str, problem: str) -> MachineError:
        """Return the error that names an invalid field of the machine."""
        return MachineError(f"{self.source}: {'.'.join(filter(None, [self.path, path]))} {problem}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One accelerator."""

    name: str
    """Name of the device."""
    memory_bytes: Positive
    """Memory of the device, in bytes."""
    memory_bandwidth_bytes_per_s: AboveZero | None = None
    """Bandwidth of that memory, in bytes per second; None where it is not modelled."""
    source: str
    """Source of these figures."""
    peak_flop_per_s: Annotated[
        Mapping[str, AboveZero],
        Meta(min_length=1, extra_json_schema={"propertyNames": {"enum": DTYPES}, "required": [REQUIRED_DTYPE]}),
    ]
    """Peak by element type, in FLOP/s; tf32 is float32 on units that round its factors to 10 bits."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "peak_flop_per_s", FrozenDict(self.peak_flop_per_s))


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """A level of the network: groups of devices joined by one kind of link.

    Attributes:
        num_devices: Devices in one group; 0 for a level without bound.
        latency_s: α, seconds for a message.
        bandwidth_bytes_per_s: 1/β, bytes per second and direction of the link by which one group of the level below (at
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
    """ω: the fraction of the backward pass's compute time that overlaps with gradient all-reduces, 0 to 1."""
    source: str
    """Source of this figure."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelSample:
    """Timing of one kernel."""

    what: Annotated[str, choice(KERNELS)]
    """Kind of the kernel."""
    dtype: str
    """Element type."""
    extents: tuple[Whole, ...]
    """Rows, columns, depth and batch of a matrix product; empty for other kernels."""
    flop: Number
    """Arithmetic work, in FLOP; 0 for kernels that multiply nothing."""
    touched_bytes: Number
    """Bytes that it reads and writes."""
    time_s: AboveZero
    """Measured time, in seconds."""
    predicted_s: AboveZero
    """Time that the figures of `Kernels` predict, in seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """Share of a device's peaks that kernels reach, for the cost model step."""

    dtype: Annotated[str, choice(DTYPES)]
    """Element type of the products to which half_extent and half_depth apply; for a type with a lower peak they scale
    with the ratio of the peaks."""
    launch_s: Number
    """Launch overhead of each kernel, in seconds."""
    products: AboveZero
    """Share of the peak of their element type that products of large matrices reach."""
    convolutions: AboveZero
    """Share of the peak that convolutions reach."""
    attention: AboveZero
    """Share of the peak that attention in one kernel reaches."""
    memory: AboveZero
    """Share of the memory bandwidth that copies and additions reach."""
    norms: AboveZero
    """Share of the memory bandwidth that normalisations, softmax and losses reach."""
    functions: AboveZero
    """Share of the memory bandwidth that exponentials and similar functions reach."""
    half_extent: Number
    """Number of rows, and likewise of columns, at which a product reaches half of its share."""
    half_depth: Number
    """Extent of the reduction at which a product reaches half of its share."""
    least: Number
    """Least share of the float32 peak, which products of any extents reach."""
    beyond: AboveZero | None = None
    """Share of the memory bandwidth at which a kernel's bytes after the first cache_bytes take additional time; None
    for no additional time."""
    cache_bytes: Number = 0.0
    """Number of a kernel's bytes that caches serve."""
    error: Number | None = None
    """Median relative error on the samples that the figures were fitted to; None where they were not fitted."""
    source: str
    """Source of these figures."""
    samples: tuple[KernelSample, ...] = field(default=(), compare=False, repr=False)
    """Kernels that were timed; written to machine files only."""


def level_between(levels: Sequence[Level], one: int, other: int) -> int:
    """Return the number of the innermost level that has two devices in one group; the last level if there is none."""
    for number, level in enumerate(levels):
        if level.num_devices == 0 or one // level.num_devices == other // level.num_devices:
            return number
    return len(levels) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """A cluster of identical devices, with levels of links from the inside out.

    Attributes:
        collectives: Algorithm of all-reduces, for the cost model `step` and simulation: `BY_LEVEL` or `RING`.
        overlap: Overlap of communication and computation; None where unknown, which counts as none.
        kernels: Efficiency of kernels; None where unknown: they reach the peaks.
        origin: The file that it was read from, for messages; ignored in comparisons.
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

        Raises:
            MachineError: Some group of a level would be partly empty. The messages of a collective would then differ
                from group to group, and no closed form holds.
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
        """Return the error about one figure, with its file and line where they are known."""
        origin = self.origin or Origin(source=f"machine {self.name!r}", path="")
        return origin.fail(path, problem)

    def flop_per_byte(self, num_devices: int, dtype: str = "float32") -> float:
        """Return r of Eq. 1: peak FLOP/s of a device ÷ bytes/s of the slowest link that the devices use."""
        slowest = min(level.bandwidth_bytes_per_s for level in self.levels_spanned(num_devices))
        return self.peak_flop_per_s(dtype) / slowest
