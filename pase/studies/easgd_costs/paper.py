"""The figures that You et al. 2017 print, as they print them, each with its place."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

CORES_OF_A_NODE = 68
"""Section 6.2 and Table 4's columns: 68, 136, …, 4352 cores are 1, 2, …, 64 nodes."""


@dataclass(frozen=True, slots=True)
class Printed:
    """A number as it is printed; what was measured lies within half of its last digit."""

    text: str

    @property
    def value(self) -> float:
        return float(self.text)

    @property
    def half_digit(self) -> float:
        """Half of the last digit."""
        return 0.5 * 10.0 ** -len(self.text.partition(".")[2])

    def holds(self, number: float) -> bool:
        """Return whether a number may be printed so."""
        return abs(number - self.value) <= self.half_digit * (1 + 1e-9)


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRow:
    """A row of Table 3; time: s. percent: of it, by the fields of `Breakdown`. ratio: communication, in percent."""

    algorithm: str
    num_iterations: int
    time: Printed
    percent: Mapping[str, Printed]
    ratio: Printed

    def part_s(self, name: str) -> float:
        """Return the seconds of one iteration in which a part was seen."""
        return self.percent[name].value / 100 * self.time.value / self.num_iterations

    def part_interval_s(self, name: str) -> tuple[float, float]:
        """Return what that may be, as the time and the percentage are rounded."""
        percent, time = self.percent[name], self.time
        low, high = (
            (percent.value + sign * percent.half_digit) / 100 * (time.value + sign * time.half_digit)
            for sign in (-1, 1)
        )
        return low / self.num_iterations, high / self.num_iterations

    @property
    def iteration_s(self) -> float:
        return self.time.value / self.num_iterations


PARTS: Mapping[str, str] = MappingProxyType(
    {
        "worker_exchange_s": "gpu-gpu para",
        "data_s": "cpu-gpu data",
        "host_exchange_s": "cpu-gpu para",
        "compute_s": "for/backward",
        "worker_update_s": "gpu update",
        "host_update_s": "cpu update",
    }
)
"""Table 3's columns, in their order."""


def _row(algorithm: str, num_iterations: int, time: str, *percents: str) -> MeasuredRow:
    *parts, ratio = map(Printed, percents)
    return MeasuredRow(
        algorithm=algorithm,
        num_iterations=num_iterations,
        time=Printed(time),
        percent=MappingProxyType(dict(zip(PARTS, parts, strict=True))),
        ratio=ratio,
    )


TABLE_3 = (
    _row("original-easgd-star", 5000, "69", "0", "0.5", "51", "44", "0.5", "4", "52"),
    _row("original-easgd", 5000, "41", "0", "1", "86", "3", "1", "9", "87"),
    _row("sync-easgd1", 1000, "11", "1", "3", "21", "55", "4", "16", "25"),
    _row("sync-easgd2", 1000, "8.2", "16", "4", "0", "74", "6", "0", "20"),
    _row("sync-easgd3", 1000, "7.7", "10", "4", "0", "79", "7", "0", "14"),
)
"""Mnist on 4 GPUs, all to an accuracy of 0.988."""

TABLE_3_WORKERS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingSeries:
    """A network of Table 4; times: s, and efficiencies: percent, by number of nodes.

    claimed: section 7.1's efficiency on 32 nodes. caffe: Intel Caffe's, by number of nodes.
    """

    network: str
    num_iterations: int
    times: Mapping[int, Printed]
    efficiencies: Mapping[int, Printed]
    claimed: Printed
    caffe: Mapping[int, Printed]

    @property
    def iteration_s(self) -> float:
        return self.times[1].value / self.num_iterations

    def excess_s(self, num_nodes: int) -> float:
        """Return how much longer an iteration is than on one node."""
        return self.times[num_nodes].value / self.num_iterations - self.iteration_s


def _series(
    network: str, num_iterations: int, times: str, efficiencies: str, *, claimed: str, caffe: str
) -> ScalingSeries:
    def by_nodes(text: str) -> Mapping[int, Printed]:
        return MappingProxyType({1 << i: Printed(word) for i, word in enumerate(text.split())})

    return ScalingSeries(
        network=network,
        num_iterations=num_iterations,
        times=by_nodes(times),
        efficiencies=by_nodes(efficiencies),
        claimed=Printed(claimed),
        caffe=MappingProxyType({32: Printed(caffe)}),
    )


TABLE_4: Mapping[str, ScalingSeries] = MappingProxyType(
    {
        series.network: series
        for series in (
            _series(
                "googlenet",
                300,
                "1533 1590 1608 1641 1630 1662 1674",
                "100 96.4 95.3 93.4 94.0 92.3 91.6",
                claimed="92",
                caffe="87",
            ),
            _series(
                "vgg19",
                80,
                "1318 1440 1482 1524 1634 1679 1642",
                "100 91.5 89.0 86.5 80.7 78.5 80.2",
                claimed="78.5",
                caffe="62",
            ),
        )
    }
)
"""ImageNet on Cori; VGG is the network of 19 layers (section 4.2)."""

TABLE_2: Mapping[str, tuple[float, float]] = MappingProxyType(
    {"Mellanox FDR": (56e9, 0.2e-9), "Intel QDR": (40e9, 0.3e-9), "Intel 10GbE": (10e9, 0.9e-9)}
)
"""Line rate in bits a second, as the name of the network has it, and β."""
