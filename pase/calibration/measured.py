"""`calibrate` and `MeasuredMachine`: run the measuring process, and make a machine of its samples.

`measured_links` does the same with samples of several processes and the links between them.
"""

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from math import sqrt
from pathlib import Path
from statistics import harmonic_mean, median
from types import MappingProxyType

import numpy as np

from pase.common.documents import DocumentSource
from pase.common.structs import AboveZero, Positive, read
from pase.common.words import binary
from pase.costs.collectives import Link, hierarchical_all_reduce
from pase.errors import CalibrationError, ProgramError, missing_extra
from pase.machine import Device, KernelSample, Level, Machine, Overlap
from pase.machine.machine import RING
from pase.planning.planner import Progress
from pase.targets.training.options import CPU, GPU, KINDS, DeviceChoice
from pase.targets.training.script import program_events

KIB, MIB = 2**10, 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Convolution:
    """A 3 × 3 convolution: batch, height and width of its output, channels in and out."""

    batch: int
    extent: int
    channels: int

    @property
    def flop(self) -> float:
        """A multiplication and an addition for each point."""
        return 2.0 * self.batch * self.extent**2 * self.channels**2 * 9

    @property
    def shape(self) -> str:
        """Description of the shape."""
        return f"{self.batch} × {self.extent} × {self.extent} × {self.channels}, 3 × 3"


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """Sizes and repetitions; each size is run num_runs times and for at least time_s, and the fastest run counts."""

    matmul_extents: tuple[int, ...]
    convolutions: tuple[Convolution, ...]
    stream_bytes: tuple[int, ...]
    copy_bytes: tuple[int, ...]
    all_reduce_bytes: tuple[int, ...]
    time_s: float
    num_runs: int


_CONVOLUTIONS = (
    Convolution(batch=8, extent=56, channels=32),
    Convolution(batch=8, extent=28, channels=64),
    Convolution(batch=8, extent=14, channels=128),
    Convolution(batch=8, extent=28, channels=128),
)

EFFORTS: Mapping[str, Effort] = MappingProxyType(
    {
        # A smoke test: takes a second in addition to the start of TensorFlow, with inaccurate figures.
        "glance": Effort(
            matmul_extents=(64,),
            convolutions=(Convolution(batch=1, extent=8, channels=8),),
            stream_bytes=(MIB,),
            copy_bytes=(KIB, MIB),
            all_reduce_bytes=(64 * KIB,),
            time_s=0.01,
            num_runs=2,
        ),
        "quick": Effort(
            matmul_extents=(256, 512, 1024),
            convolutions=_CONVOLUTIONS[:2],
            stream_bytes=(32 * MIB,),
            copy_bytes=tuple(KIB * 4**i for i in range(8)),
            all_reduce_bytes=tuple(16 * KIB * 8**i for i in range(4)),
            time_s=0.1,
            num_runs=2,
        ),
        "full": Effort(
            matmul_extents=(128, 256, 512, 1024, 2048),
            convolutions=_CONVOLUTIONS,
            stream_bytes=(16 * MIB, 64 * MIB),
            copy_bytes=tuple(KIB * 2**i for i in range(16)),
            all_reduce_bytes=tuple(4 * KIB * 4**i for i in range(7)),
            time_s=0.4,
            num_runs=2,
        ),
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """Timing of a kernel: description of its shape, FLOP or bytes of one device, and duration."""

    shape: str
    amount: AboveZero
    time_s: AboveZero

    @property
    def per_s(self) -> float:
        """FLOP or bytes a second."""
        return self.amount / self.time_s


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferSample:
    """Timing of a copy to the next device, or of an all-reduce among all: bytes of each device, and duration."""

    size_bytes: Positive
    time_s: AboveZero


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """All measurements, with every device working at the same time.

    Attributes:
        matmul, convolution: By element type.
        stream: Memory, read and written.
        copies, all_reduces: In order of size.
    """

    kind: str
    device_name: str
    num_devices: Positive
    memory_bytes: Positive
    tensorflow_version: str
    matmul: Mapping[str, tuple[Rate, ...]]
    convolution: Mapping[str, tuple[Rate, ...]]
    stream: tuple[Rate, ...]
    copies: tuple[TransferSample, ...]
    all_reduces: tuple[TransferSample, ...]


_LEAST_SHARE = 1e-6
"""Least time of the longest message's bytes, relative to the latency, to be distinguishable from rounding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkFit:
    """α and 1/β of a link; relative_error: root mean square of (fitted - measured) / measured."""

    latency_s: float
    bandwidth_bytes_per_s: float
    relative_error: float

    def time_s(self, size_bytes: float) -> float:
        """Return the fitted time of a message."""
        return self.latency_s + size_bytes / self.bandwidth_bytes_per_s


def fit_link(sizes_bytes: Sequence[float], times_s: Sequence[float]) -> LinkFit:
    """Return the α ≥ 0 and β > 0 for which α + n β fits the times of messages of n bytes best.

    The fit minimises the sum of squared *relative* errors: message sizes span several orders of magnitude, and in
    absolute terms the short messages, which determine the latency, would not matter. Where noise would make α negative,
    it is 0.

    Raises:
        CalibrationError: There are fewer than two different sizes, times are not above 0, or longer messages did not
            take longer.
    """
    sizes, times = np.asarray(sizes_bytes, dtype=np.float64), np.asarray(times_s, dtype=np.float64)
    if sizes.shape != times.shape or sizes.ndim != 1 or len(set(sizes.tolist())) < 2 or sizes.min() <= 0:
        raise CalibrationError(
            f"latency and bandwidth need the times of messages of two sizes or more; found sizes {sizes.tolist()}"
        )
    if not np.all(np.isfinite(times) & (times > 0)):
        raise CalibrationError(f"messages took {times.tolist()} s; expected times above 0: measure again")
    # Divide every equation α + n β = t by its t.
    ones, slopes = 1 / times, sizes / times
    matrix = np.stack([ones, slopes], axis=1)
    # Normalise the columns: n is up to 1e8 times as large as 1.
    scales = np.linalg.norm(matrix, axis=0)
    (alpha, beta), *_ = np.linalg.lstsq(matrix / scales, np.ones_like(times), rcond=None)
    alpha, beta = alpha / scales[0], beta / scales[1]
    if beta * sizes.max() <= _LEAST_SHARE * alpha:
        raise CalibrationError(
            f"messages of {sizes.max():.0f} B took no longer than those of {sizes.min():.0f} B, so that no bandwidth "
            "can be determined; measure again while nothing else runs"
        )
    if alpha < 0:
        alpha, beta = 0.0, slopes.sum() / np.square(slopes).sum()
    errors = alpha * ones + beta * slopes - 1
    return LinkFit(
        latency_s=float(alpha),
        bandwidth_bytes_per_s=float(1 / beta),
        relative_error=float(np.sqrt(np.mean(np.square(errors)))),
    )


_MEMORY_LIMIT = Path("/sys/fs/cgroup/memory.max")


def memory_share_bytes(count: int) -> int:
    """Return each device's share of the memory that this process may use."""
    memory_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with suppress(OSError, ValueError):  # no limit is set
        memory_bytes = min(memory_bytes, int(_MEMORY_LIMIT.read_text(encoding="ascii")))
    return max(memory_bytes // count, 1)


def processor_name() -> str:
    """Return the name of the processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return next(filter(None, names), "CPU")


# TensorFlow never releases memory and threads, and reads some options only once: it runs in a separate process.
_PROGRAM = "from pase.calibration.child import main\n\nmain()\n"


def calibrate(
    num_devices: int | None = None,
    device: DeviceChoice | None = None,
    effort: str = "full",
    *,
    on_progress: Progress | None = None,
) -> Samples:
    """Measure the devices of this machine; CalibrationError where that is not possible.

    Args:
        num_devices: Number of devices; None for all.
        device: Kind of devices.
        effort: "quick" or "full".
        on_progress: Called with the current activity and the fraction that is complete.
    """
    arguments = [*(device or DeviceChoice()).command_line(), f"--effort={effort}"]
    if num_devices is not None:
        arguments.append(f"--devices={num_devices}")
    samples = None
    if find_spec("tensorflow") is None or find_spec("mesh_tensorflow") is None:
        raise missing_extra("measuring needs TensorFlow and Mesh-TensorFlow", "mesh")
    try:
        for event in program_events(_PROGRAM, arguments):
            match event:
                case {"event": "progress", "what": str(what), "fraction": float() | int() as fraction}:
                    if on_progress:
                        on_progress(what, float(fraction))
                case {"event": "measured", "samples": found}:
                    samples = read(Samples, found, DocumentSource(CalibrationError, "what was measured"))
    except ProgramError as error:
        raise CalibrationError(f"the machine was not measured: {error}") from None
    if samples is None:
        raise CalibrationError("the measuring process ended without a result; run the command again")
    return samples


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """A measured all-reduce, and the time that its closed form predicts from the link's α and β."""

    size_bytes: int
    measured_s: float
    predicted_s: float

    @property
    def relative_error(self) -> float:
        """Relative error of the prediction: above 0 where it is too slow."""
        return self.predicted_s / self.measured_s - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredMachine:
    """A machine made from measurements.

    Attributes:
        fits: Fits of its levels.
        all_reduces: All-reduces with the predictions of their closed form, in order of size.
    """

    machine: Machine
    fits: tuple[LinkFit, ...]
    all_reduces: tuple[Prediction, ...]

    @property
    def all_reduce_error(self) -> float:
        """Root mean square of the predictions' relative errors."""
        return root_mean_square(self.all_reduces)


def measured_machine(samples: Samples, *, date: str, name: str = "measured") -> MeasuredMachine:
    """Return the machine that samples describe; CalibrationError where they do not suffice.

    The peak of an element type is the best rate over all shapes of both kernels: cost models count FLOP of every layer
    at this rate. Figures have four digits.

    Args:
        samples: The measurements.
        date: Date of the measurement, for the sources.
        name: Name of the machine.
    """
    if not samples.all_reduces or not samples.stream or "float32" not in samples.matmul:
        raise CalibrationError("no matrix product, memory or all-reduce was measured; measure again")
    fit = fit_link([copy.size_bytes for copy in samples.copies], [copy.time_s for copy in samples.copies])
    link = Link(latency_s=fit.latency_s, s_per_byte=1 / fit.bandwidth_bytes_per_s)
    predictions = predicted(samples.all_reduces, [samples.num_devices], [link])
    how = (
        f"measured on {date} with TensorFlow {samples.tensorflow_version}, "
        f"with all {samples.num_devices} devices at work at once"
    )
    level = Level(
        name="machine",
        num_devices=samples.num_devices,
        latency_s=rounded(fit.latency_s),
        bandwidth_bytes_per_s=rounded(fit.bandwidth_bytes_per_s),
        source=(
            f"{how}: messages of {described_span(samples.copies)} from each device to the next"
            f"{_RECEIVED[samples.kind]}; least squares of the relative errors, whose root mean square is "
            f"{fit.relative_error:.0%}. All-reduces of {described_span(samples.all_reduces)} differ from what these "
            f"figures predict by {root_mean_square(predictions):.0%} (root mean square)"
        ),
    )
    machine = Machine(
        name=name,
        description=f"{samples.num_devices} {KINDS[samples.kind]}, {how}",
        device=_device(samples, how),
        levels=(level,),
    )
    return MeasuredMachine(machine=machine, fits=(fit,), all_reduces=predictions)


def predicted(
    messages: Sequence[TransferSample], members: Sequence[int], links: Sequence[Link]
) -> tuple[Prediction, ...]:
    """Return all-reduces with the predictions of their closed form, given as in `hierarchical_all_reduce`."""
    return tuple(
        Prediction(
            size_bytes=message.size_bytes,
            measured_s=message.time_s,
            predicted_s=float(hierarchical_all_reduce(message.size_bytes, members, links)),
        )
        for message in messages
    )


def _device(samples: Samples, how: str) -> Device:
    peaks = {
        dtype: rounded(max(rate.per_s for rate in (*rates, *samples.convolution.get(dtype, ()))))
        for dtype, rates in samples.matmul.items()
    }
    kernels = [
        f"{dtype} {what}, {described_rates(rates, 'GFLOP/s')}"
        for what, by_dtype in (("matrix products", samples.matmul), ("convolutions", samples.convolution))
        for dtype, rates in by_dtype.items()
    ]
    return Device(
        name=samples.device_name,
        peak_flop_per_s=peaks,
        memory_bytes=samples.memory_bytes,
        memory_bandwidth_bytes_per_s=rounded(max(rate.per_s for rate in samples.stream)),
        source=f"{how}{_SHARED[samples.kind]}. Each peak is the best of its type: {'; '.join(kernels)}. "
        f"Memory: one array added to another, {described_rates(samples.stream, 'GB/s')}",
    )


_SHARED: Mapping[str, str] = MappingProxyType(
    {
        CPU: "; virtual devices share the cores, and a device's rates are its share of them",
        GPU: "; float32 is what TensorFlow makes of it by default, TF32 on the GPUs that have it",
    }
)
_RECEIVED: Mapping[str, str] = MappingProxyType(
    {CPU: ", written anew by the receiver because virtual devices hand tensors over without a copy", GPU: ""}
)


def root_mean_square(predictions: Sequence[Prediction]) -> float:
    """Return the root mean square of the predictions' relative errors."""
    return sqrt(sum(prediction.relative_error**2 for prediction in predictions) / len(predictions))


def rounded(figure: float) -> float:
    """Return a figure to four digits."""
    return float(f"{figure:.4g}")


def described_rates(rates: Sequence[Rate], unit: str) -> str:
    """Describe the rate of each kernel; `unit` has the prefix giga."""
    return ", ".join(f"{rate.per_s / 1e9:.3g} {unit} at {rate.shape}" for rate in rates)


def described_span(messages: Sequence[TransferSample]) -> str:
    """Describe the sizes of the shortest and the longest message."""
    sizes = [message.size_bytes for message in messages]
    return f"{binary(min(sizes))} to {binary(max(sizes))}"


# -- links between processes
#
# All levels are measured in the same way: each rank sends to the rank at its own position in the next group of the
# level below, all at the same time. All ranks behind a link then share it, as in a training step, and the measured
# speed is that of all of them together.

LEVEL_NAMES = ("node", "cluster")


@dataclass(frozen=True, slots=True, kw_only=True)
class OverlapSample:
    """Times of matrix products, of an all-reduce among all ranks, and of both at the same time."""

    computing_s: float
    summing_s: float
    both_s: float

    @property
    def share(self) -> float:
        """ω: the fraction of the overlappable time (all of the products or of the all-reduce) that is overlapped."""
        hidden_s = self.computing_s + self.summing_s - self.both_s
        return min(max(hidden_s / min(self.computing_s, self.summing_s), 0.0), 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSamples:
    """All measurements, with every rank working at the same time.

    Attributes:
        level_sizes: Ranks in a group of each level, innermost first; the last one contains all.
        matmul, convolution: Rates in float32 FLOP/s, forward and backward.
        stream: Memory, read and written.
        kernels: Samples for the figures of `[kernels]`.
        launch_s: Launch time of each kernel in a chain of layers.
        exchanges: [levels] messages of each rank to the next group.
        all_reduces: All-reduces among all ranks, by the bytes of each rank.
        overlap: How far an all-reduce overlaps with computation.
    """

    backend: str
    torch_version: str
    device_name: str
    memory_bytes: int
    level_sizes: tuple[int, ...]
    matmul: tuple[Rate, ...]
    convolution: tuple[Rate, ...]
    stream: tuple[Rate, ...]
    kernels: tuple[KernelSample, ...]
    launch_s: float
    exchanges: tuple[tuple[TransferSample, ...], ...]
    all_reduces: tuple[TransferSample, ...]
    overlap: OverlapSample


def level_sizes(num_ranks: int, ranks_per_node: int) -> tuple[int, ...]:
    """Return the ranks in a group of each level; CalibrationError where nodes have different numbers of ranks.

    With one rank per node, or all ranks in one node, there is one level.
    """
    if num_ranks < 2:
        raise CalibrationError(f"links need 2 processes or more; found {num_ranks}")
    if ranks_per_node < 1 or num_ranks % ranks_per_node:
        raise CalibrationError(
            f"{num_ranks} processes in nodes of {ranks_per_node}: expected as many processes in every node"
        )
    return (ranks_per_node, num_ranks) if 1 < ranks_per_node < num_ranks else (num_ranks,)


def sent_to(rank: int, level: int, sizes: Sequence[int]) -> int:
    """Return the rank to which a rank sends at a level: its counterpart in the next group of the level below."""
    group, inner = sizes[level], 1 if level == 0 else sizes[level - 1]
    first = rank // group * group
    return first + (rank - first + inner) % group


def behind(level: int, sizes: Sequence[int]) -> int:
    """Return how many ranks share a link of a level."""
    return 1 if level == 0 else sizes[level - 1]


def fit_level(samples: Sequence[TransferSample], sharing: int) -> LinkFit:
    """Return α and 1/β of a link that some ranks share, each sending the bytes of a sample.

    The bandwidth follows from the longest message relative to the shortest. The latency is the median excess time of
    messages dominated by latency. Processes share cores, and the times of short messages vary by more than the time of
    their bytes: a fit through all messages would distort the bandwidth, which is known precisely. Raises
    CalibrationError as `fit_link` does.
    """
    sizes, times = [sharing * sample.size_bytes for sample in samples], [sample.time_s for sample in samples]
    fit_link(sizes, times)
    shortest_s, size_bytes, longest_s = times[0], sizes[-1] - sizes[0], times[-1]
    s_per_byte = (longest_s - shortest_s) / size_bytes
    left = [time_s - size * s_per_byte for size, time_s in zip(sizes, times, strict=True)]
    short = [rest for rest, time_s in zip(left, times, strict=True) if rest > time_s / 2]
    latency_s = median(short or [max(left[0], 0.0)])
    fitted = [latency_s + size * s_per_byte for size in sizes]
    squares = [(found / time_s - 1) ** 2 for found, time_s in zip(fitted, times, strict=True)]
    return LinkFit(
        latency_s=latency_s, bandwidth_bytes_per_s=1 / s_per_byte, relative_error=sqrt(sum(squares) / len(squares))
    )


def measured_links(samples: RankSamples, *, date: str, name: str = "measured") -> MeasuredMachine:
    """Return the machine that samples describe; CalibrationError where they do not suffice.

    Cost models count FLOP of every layer at one rate: that at which equal FLOP of each shape of both kernels take the
    measured time. Figures have four digits.
    """
    if not (samples.matmul and samples.stream and samples.all_reduces):
        raise CalibrationError("no matrix product, memory or all-reduce was measured; measure again")
    sizes = samples.level_sizes
    fits = tuple(fit_level(found, behind(level, sizes)) for level, found in enumerate(samples.exchanges))
    members = [size // behind(level, sizes) for level, size in enumerate(sizes)]
    links = [
        Link(latency_s=fit.latency_s, s_per_byte=behind(level, sizes) / fit.bandwidth_bytes_per_s)
        for level, fit in enumerate(fits)
    ]
    how = (
        f"measured on {date} with PyTorch {samples.torch_version} and {samples.backend}, "
        f"with all {sizes[-1]} processes at work at once"
    )
    names = LEVEL_NAMES[-len(sizes) :]
    levels = tuple(
        Level(
            name=level_name,
            num_devices=size,
            latency_s=rounded(fit.latency_s),
            bandwidth_bytes_per_s=rounded(fit.bandwidth_bytes_per_s),
            source=(
                f"{how}: messages of {described_span(found)} from each process to one of the next group, "
                f"{behind(number, sizes)} behind a link; bandwidth by the longest, latency by the short ones, the root "
                f"mean square of the relative errors of all is {fit.relative_error:.0%}"
            ),
        )
        for number, (level_name, size, fit, found) in enumerate(zip(names, sizes, fits, samples.exchanges, strict=True))
    )
    rates = (*samples.matmul, *samples.convolution)
    device = Device(
        name=samples.device_name,
        peak_flop_per_s={"float32": rounded(harmonic_mean(rate.per_s for rate in rates))},
        memory_bytes=samples.memory_bytes,
        memory_bandwidth_bytes_per_s=rounded(max(rate.per_s for rate in samples.stream)),
        source=(
            f"{how}; processes share the cores, and a device's rates are its share of them. The peak is the mean, for "
            f"equal FLOP, of float32 matrix products, {described_rates(samples.matmul, 'GFLOP/s')}, and convolutions, "
            f"{described_rates(samples.convolution, 'GFLOP/s')}, each forward and backward. "
            f"Memory: one array added to another, {described_rates(samples.stream, 'GB/s')}"
        ),
    )
    concurrent = samples.overlap
    machine = Machine(
        name=name,
        description=f"{sizes[-1]} processes, {how}",
        device=device,
        levels=levels,
        collectives=RING,
        overlap=Overlap(
            share=rounded(concurrent.share),
            source=(
                f"{how}: products take {concurrent.computing_s:.3g} s, a sum among all {concurrent.summing_s:.3g} s, "
                f"both at once {concurrent.both_s:.3g} s"
            ),
        ),
    )
    return MeasuredMachine(machine=machine, fits=fits, all_reduces=predicted(samples.all_reduces, members, links))
