"""Links between processes: what was measured on all ranks at once, and the machine, with its levels, that it makes.

Every level is measured alike: each rank sends to the rank of its own place in the next group of the level before, all
at once. All ranks behind a link then share it, as in a training step, and a link is as fast as all of them together.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt
from statistics import harmonic_mean, median

from pase.calibration.measured import (
    LinkFit,
    MeasuredMachine,
    Rate,
    TransferSample,
    described_rates,
    described_span,
    fit_link,
    predicted,
    rounded,
)
from pase.costs.collectives import Link
from pase.errors import CalibrationError
from pase.machine import Device, KernelSample, Level, Machine, Overlap
from pase.machine.machine import RING

LEVEL_NAMES = ("node", "cluster")


@dataclass(frozen=True, slots=True, kw_only=True)
class OverlapSample:
    """Products, a sum among all ranks, and both at once."""

    computing_s: float
    summing_s: float
    both_s: float

    @property
    def share(self) -> float:
        """ω: of what could hide, be it all of the products or all of the sum, the part that does."""
        hidden_s = self.computing_s + self.summing_s - self.both_s
        return min(max(hidden_s / min(self.computing_s, self.summing_s), 0.0), 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSamples:
    """All that was measured, every rank at work at once.

    level_sizes: ranks in a group of each level, the innermost first; the last one has all. matmul, convolution: FLOP of
    float32, forward and backward. stream: memory, read and written. kernels: for the figures of `[kernels]`. launch_s:
    of each in a chain of layers. exchanges: [levels] messages of each rank to the next group. all_reduces: among all
    ranks, of the bytes that each one has before them. overlap: how far a sum goes on beside computation.
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
    """Return the ranks in a group of each level; CalibrationError where nodes have not as many ranks each.

    Ranks that are a node each, or in one node all, have one level.
    """
    if num_ranks < 2:
        raise CalibrationError(f"links need 2 processes or more; found {num_ranks}")
    if ranks_per_node < 1 or num_ranks % ranks_per_node:
        raise CalibrationError(
            f"{num_ranks} processes in nodes of {ranks_per_node}: expected as many processes in every node"
        )
    return (ranks_per_node, num_ranks) if 1 < ranks_per_node < num_ranks else (num_ranks,)


def sent_to(rank: int, level: int, sizes: Sequence[int]) -> int:
    """Return the rank to which a rank sends at a level: of its own place in the next group of the level before."""
    group, inner = sizes[level], 1 if level == 0 else sizes[level - 1]
    first = rank // group * group
    return first + (rank - first + inner) % group


def behind(level: int, sizes: Sequence[int]) -> int:
    """Return how many ranks share a link of a level."""
    return 1 if level == 0 else sizes[level - 1]


def fit_level(samples: Sequence[TransferSample], sharing: int) -> LinkFit:
    """Return α and 1/β of a link that some ranks share, each sending as many bytes as a sample says.

    The longest message, beside the shortest, has the bandwidth; the latency is what the middle one of those takes
    longer that are most of it latency. Processes share cores, and the time of a short message differs from one to the
    next by more than its bytes add: a line through all of them would bend the bandwidth, which is sharp.
    Raises CalibrationError as `fit_link` does.
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
    """Return the machine that samples make; CalibrationError where they do not suffice.

    Costs count FLOP at one rate, whatever the layer: that at which as many FLOP of each shape of both kernels take what
    they take. Figures have four digits.
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
    beside = samples.overlap
    machine = Machine(
        name=name,
        description=f"{sizes[-1]} processes, {how}",
        device=device,
        levels=levels,
        collectives=RING,
        overlap=Overlap(
            share=rounded(beside.share),
            source=(
                f"{how}: products take {beside.computing_s:.3g} s, a sum among all {beside.summing_s:.3g} s, "
                f"both at once {beside.both_s:.3g} s"
            ),
        ),
    )
    return MeasuredMachine(machine=machine, fits=fits, all_reduces=predicted(samples.all_reduces, members, links))
