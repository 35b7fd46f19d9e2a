"""What You et al. 2017 print and state of costs, with its place, beside what follows from the model, with a verdict.

Table 3 follows from six of its own cells.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType

from pase.easgd.algorithms import num_rounds
from pase.importers import load
from pase.machine import Machine, load_machine
from pase.studies.easgd_costs import (
    ALGORITHMS,
    CENTRE,
    ELASTIC,
    Computation,
    Iteration,
    Platform,
    Weights,
    iteration,
    platform_of,
    step_flop,
    weights_of,
)
from pase.studies.integrated.equations import Network

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


# -- beside what follows

CLOSE = 0.1
"""A prediction as near as this to the printed figure, relatively, is called close."""


YES, CLOSE_WORD, NO, UNTOLD = "yes", "close", "**no**", "cannot be told"


@dataclass(frozen=True, slots=True, kw_only=True)
class Statement:
    """where: in the paper. what: it states. paper: the figure. ours: what follows. verdict: in words."""

    where: str
    what: str
    paper: str
    ours: str
    verdict: str


def judged(ours: float, printed: Printed) -> str:
    """Return the verdict on a prediction of a printed figure."""
    if printed.holds(ours):
        return f"{YES}, within rounding"
    difference = ours / printed.value - 1
    text = f"{difference:+.0%}" if abs(difference) < 1 else f"{ours / printed.value:.1f}×"
    return f"{CLOSE_WORD}, {text}" if abs(difference) <= CLOSE else f"{NO}, {text}"


WHOLE = Weights(num_bytes=1.0, num_arrays=1)
"""All weights as one unit: the table tells the time of a message, not of what in it is latency."""


CALIBRATED: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "original-easgd-star": ("data_s", "host_exchange_s", "compute_s", "worker_update_s", "host_update_s"),
        "sync-easgd2": ("worker_exchange_s",),
    }
)
"""The cells that are taken from the table; everything else is predicted."""


def row_of(name: str) -> MeasuredRow:
    """Return Table 3's row of an algorithm."""
    return next(row for row in TABLE_3 if row.algorithm == name)


def gpu_platform() -> Platform:
    """Return the 4 GPUs of Table 3, as the calibrated cells have them.

    Original EASGD* moves the weights twice between CPU and GPU, and nothing of it overlaps; its other parts are those
    of one worker. Sync EASGD2 moves them 2⌈log2 P⌉ times between GPUs.
    """
    alone, together = row_of("original-easgd-star"), row_of("sync-easgd2")
    between_gpus_s = together.part_s("worker_exchange_s") / (2 * num_rounds(TABLE_3_WORKERS))
    return Platform(
        worker_link=Network(latency_s=0.0, s_per_byte=between_gpus_s),
        host_link=Network(latency_s=0.0, s_per_byte=alone.part_s("host_exchange_s") / 2),
        compute_s=alone.part_s("compute_s"),
        data_s=alone.part_s("data_s"),
        worker_pass_s=alone.part_s("worker_update_s") / ELASTIC,
        host_pass_s=alone.part_s("host_update_s") / CENTRE,
    )


def predicted(name: str) -> Iteration:
    """Return an iteration of any algorithm on these GPUs."""
    return iteration(ALGORITHMS[name], TABLE_3_WORKERS, gpu_platform(), WHOLE)


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictedRow:
    """A row of Table 3 and what is predicted for it. uses: its cells that calibrate the model."""

    measured: MeasuredRow
    iteration: Iteration
    uses: tuple[str, ...]

    @property
    def time_s(self) -> float:
        """Of as many iterations as the paper's row has."""
        return self.iteration.time_s * self.measured.num_iterations


def table_3() -> tuple[PredictedRow, ...]:
    """Return every row of Table 3 with its prediction."""
    return tuple(
        PredictedRow(measured=row, iteration=predicted(row.algorithm), uses=CALIBRATED.get(row.algorithm, ()))
        for row in TABLE_3
    )


def message_s(row: MeasuredRow) -> Mapping[str, float]:
    """Return what a row's exchange gives for one message of all weights, by the part that holds it."""
    algorithm = ALGORITHMS[row.algorithm]
    messages = 2 * num_rounds(TABLE_3_WORKERS) if algorithm.is_synchronous else 2
    parts = ("worker_exchange_s", "host_exchange_s")
    return {name: row.part_s(name) / messages for name in parts if row.percent[name].value >= 2}


def statements() -> Iterator[Statement]:
    """Yield all that the paper states of costs: Table 3 and section 5, Table 4, then sizes, units and open ends."""
    yield from _rows()
    yield from _speedups()
    yield from _exchanges()
    yield from _other_algorithms()
    for series in TABLE_4.values():
        yield from _scaled(series)
    yield from _headlines()
    yield from _sizes()
    yield from _units()
    yield from _inconsistencies()


def _named(name: str) -> PredictedRow:
    return next(row for row in table_3() if row.measured.algorithm == name)


def _rows() -> Iterator[Statement]:
    for row in table_3():
        measured = row.measured
        calibrates = measured.algorithm == "original-easgd-star"
        yield Statement(
            where="Table 3",
            what=f"{row.iteration.algorithm.title}: {measured.num_iterations:,} iterations",
            paper=f"{measured.time.text} s",
            ours=f"{row.time_s:.1f} s",
            verdict="calibrates the model" if calibrates else judged(row.time_s, measured.time),
        )
    for row in table_3()[1:]:
        ratio = 100 * row.iteration.breakdown.communication_ratio
        yield Statement(
            where="Table 3",
            what=f"{row.iteration.algorithm.title}: communication ratio",
            paper=f"{row.measured.ratio.text} %",
            ours=f"{ratio:.0f} %",
            verdict=judged(ratio, row.measured.ratio),
        )


def _speedups() -> Iterator[Statement]:
    for before, after, printed, where in (
        ("original-easgd", "sync-easgd1", "3.7", "6.1.1"),
        ("sync-easgd1", "sync-easgd2", "1.3", "6.1.2"),
        ("sync-easgd2", "sync-easgd3", "1.1", "6.1.3"),
        ("original-easgd", "sync-easgd3", "5.3", "6.1.3"),
    ):
        first, second = _named(before), _named(after)
        ratio = first.time_s / second.time_s
        yield Statement(
            where=f"section {where}",
            what=f"{second.iteration.algorithm.title} over {first.iteration.algorithm.title}, in time",
            paper=f"{printed}×",
            ours=f"{ratio:.2f}× (the table's own times: {first.measured.time.value / second.measured.time.value:.2f}×)",
            verdict=judged(ratio, Printed(printed)),
        )
    original, sync = row_of("original-easgd"), row_of("sync-easgd3")
    an_iteration = original.iteration_s / sync.iteration_s
    iterations = original.num_iterations / sync.num_iterations
    batches = iterations / TABLE_3_WORKERS
    yield Statement(
        where="section 6.1.3",
        what="the 5.3×: time of an iteration, times number of iterations",
        paper="“for the same accuracy”",
        ours=f"{an_iteration:.2f}× an iteration, {iterations:.0f}× the iterations; as one of Original's is one batch, "
        f"one of Sync's four: {TABLE_3_WORKERS * an_iteration:.2f}× a batch, {batches:.2f}× the batches",
        verdict="it mixes the two; the second is no matter of cost",
    )
    star, sync = row_of("original-easgd-star"), row_of("sync-easgd1")
    yield Statement(
        where="Table 3",
        what="for/backward takes 30 s, not 6 s, because only one GPU works at each iteration",
        paper="5×",
        ours=f"an iteration: {1e3 * star.part_s('compute_s'):.2f} ms and {1e3 * sync.part_s('compute_s'):.2f} ms",
        verdict=f"{NO}: there are five times as many iterations, each as long",
    )


def _exchanges() -> Iterator[Statement]:
    """The tree against the messages that the rows themselves imply."""
    alone = message_s(row_of("original-easgd"))["host_exchange_s"]
    tree = message_s(row_of("sync-easgd1"))["host_exchange_s"]
    between = [message_s(row_of(name))["worker_exchange_s"] for name in ("sync-easgd2", "sync-easgd3")]
    rounds = TABLE_3_WORKERS * 2 * alone / row_of("sync-easgd1").part_s("host_exchange_s")
    yield Statement(
        where="section 6.1.1",
        what="a tree instead of P messages: weights of 4 GPUs exchanged once",
        paper="P ÷ log P = 2×",
        ours=f"the table's own times: {rounds:.1f}×",
        verdict=f"{NO}: {1e3 * alone:.2f} ms a message in Original EASGD, {1e3 * tree:.2f} ms in Sync EASGD1",
    )
    yield Statement(
        where="section 6.1.3",
        what="Sync EASGD3 hides the exchange between GPUs behind steps 7 to 10, which last longer",
        paper=f"{row_of('sync-easgd3').percent['worker_exchange_s'].text} % is still seen",
        ours=f"0 %; of {4e3 * between[0]:.2f} ms they hid {4e3 * (between[0] - between[1]):.2f} ms",
        verdict=f"{NO}: {1 - between[1] / between[0]:.0%} of it was hidden",
    )


def _other_algorithms() -> Iterator[Statement]:
    """Section 5.1 and Fig. 8, of which the text has no number; times of a batch."""
    batch_s = {name: found.round_s / found.num_workers for name in ALGORITHMS for found in [predicted(name)]}
    gain = batch_s["original-easgd"] / batch_s["async-easgd"]
    yield Statement(
        where="section 1, Fig. 8",
        what="Async EASGD is not significantly faster than Original EASGD",
        paper="not significantly",
        ours=f"{gain:.2f}× the batches a second: both wait for the master's link",
        verdict=YES if gain < 1.1 else NO,
    )
    gain = batch_s["original-easgd"] / batch_s["hogwild-easgd"]
    yield Statement(
        where="section 1, Fig. 8",
        what="Hogwild EASGD is much faster than Original EASGD",
        paper="much",
        ours=f"{gain:.2f}× the batches a second",
        verdict=YES if gain > 1.5 else NO,
    )
    gain = batch_s["hogwild-easgd"] / batch_s["sync-easgd3"]
    yield Statement(
        where="section 5.1, Fig. 8",
        what="Sync EASGD and Hogwild EASGD are tied for fastest",
        paper="tied",
        ours=f"Sync EASGD3 has {gain:.2f}× the batches a second; to the same accuracy the model says nothing",
        verdict=UNTOLD,
    )


LAST = 64
"""Nodes in Table 4's last column."""


@cache
def weights(network: str) -> Weights:
    """Return the weights of a network of Table 4."""
    return weights_of(load(network))


@cache
def machine(name: str) -> Machine:
    """Return a preset."""
    return load_machine(name)


def node(network: str, num_workers: int, preset: str) -> Platform:
    """Return what Table 4 ran on, as a preset has it, with the paper's own time of one node."""
    own = Computation(time_s=TABLE_4[network].iteration_s, source="You et al. 2017, Table 4", has_update=True)
    return platform_of(machine(preset), num_workers, weights(network), own)


def scaled_s(network: str, num_workers: int, name: str, *, preset: str = "knl-fdr") -> float:
    """Return the predicted seconds of Table 4's iterations on so many nodes."""
    platform = node(network, num_workers, preset)
    found = iteration(ALGORITHMS[name], num_workers, platform, weights(network))
    return found.round_s * TABLE_4[network].num_iterations


def _scaled(series: ScalingSeries) -> Iterator[Statement]:
    """The last column of Table 4, how what is lost grows, and what Caffe loses."""
    alone_s = series.times[1].value
    hidden_s, seen_s = (scaled_s(series.network, LAST, name) for name in ("sync-easgd3", "sync-easgd2"))
    lost_s, exchange_s = series.excess_s(LAST), (seen_s - alone_s) / series.num_iterations
    yield Statement(
        where="Table 4",
        what=f"{series.network}: {series.num_iterations} iterations on {LAST} nodes, by FDR InfiniBand",
        paper=f"{series.times[LAST].text} s, {series.efficiencies[LAST].text} %",
        ours=f"{seen_s:.0f} s, {100 * alone_s / seen_s:.1f} %; "
        f"overlapped {hidden_s:.0f} s, {100 * alone_s / hidden_s:.0f} %",
        verdict=f"{NO}: {lost_s:.2f} s an iteration are lost, {exchange_s:.2f} s are the exchange's",
    )
    share = num_rounds(2) / num_rounds(LAST)
    yield Statement(
        where="Table 4",
        what=f"{series.network}: what is lost grows as ⌈log2 P⌉, so that 2 nodes lose {share:.0%} of what 64 do",
        paper="Θ(log P)",
        ours=f"{series.excess_s(2) / series.excess_s(LAST):.0%}, by the table's own times",
        verdict=f"{NO}: no β gives both ends",
    )
    ((num_nodes, printed),) = series.caffe.items()
    caffe_s = series.iteration_s * (100 / printed.value - 1)
    times = caffe_s / series.excess_s(num_nodes)
    yield Statement(
        where="section 7.1",
        what=f"{series.network}: Intel Caffe on {num_nodes * CORES_OF_A_NODE} cores, beside the paper's own",
        paper=f"{printed.text} %, {series.claimed.text} %",
        ours=f"Caffe loses {caffe_s:.2f} s an iteration, {times:.1f} times Table 4's loss",
        verdict=f"{UNTOLD}: how it communicates is not said",
    )


def _headlines() -> Iterator[Statement]:
    google = TABLE_4["googlenet"]
    ratio = 100 * google.times[1].value / google.times[64].value
    yield Statement(
        where="abstract, section 8",
        what="weak scaling of GoogLeNet on 4253 cores (abstract), 4352 (Table 4)",
        paper="91.5 %, 91.6 %",
        ours=f"{google.times[1].text} ÷ {google.times[64].text} s = {ratio:.2f} %, and 64 · 68 = 4352",
        verdict="91.6 % on 4352; 91.5 % is that cut off, or VGG's on 136",
    )
    ratio = 100 * google.times[1].value / google.times[32].value
    yield Statement(
        where="sections 1 and 7.1, Table 4",
        what="weak scaling of GoogLeNet on 2176 cores",
        paper="92 %, 92.3 %",
        ours=f"{google.times[1].text} ÷ {google.times[32].text} s = {ratio:.2f} %",
        verdict=f"{YES}; 92.3 from times with more digits",
    )


def _sizes() -> Iterator[Statement]:
    size = weights("vgg19").num_bytes
    yield Statement(
        where="section 6.1.2",
        what="weights of VGG-19",
        paper="575 MB",
        ours=f"{size / 4:,.0f} · 4 B = {size / 1e6:.1f} MB",
        verdict=YES if round(size / 1e6) == 575 else NO,
    )
    size = weights_of(load("alexnet", arguments={"grouped": True})).num_bytes
    ungrouped = 4 * _UNGROUPED_ALEXNET
    yield Statement(
        where="section 6.1.1",
        what="weights of AlexNet",
        paper="249 MB",
        ours=f"{size / 1e6:.1f} MB; {ungrouped / 1e6:.1f} MB if no convolution had groups",
        verdict=f"{NO} with the groups of 2012, {YES} without",
    )
    yield Statement(
        where="section 6.1.1",
        what="64 Cifar samples",
        paper="768 KB",
        ours=f"{64 * 3 * 32 * 32 * 4:,} B = {64 * 3 * 32 * 32 * 4 // 1024} KiB",
        verdict=f"{YES}, in units of 1024, where VGG's and AlexNet's are of 1000",
    )


_UNGROUPED_ALEXNET = sum(
    out * (inputs + 1)
    for out, inputs in (
        *((96, 3 * 121), (256, 96 * 25), (384, 256 * 9), (384, 384 * 9), (256, 384 * 9)),
        *((4096, 256 * 36), (4096, 4096), (1000, 4096)),
    )
)
"""Parameters with the channels of 2012's two towers, and kernels over all of them."""


def _units() -> Iterator[Statement]:
    bits = {name: 8 / beta for name, (_, beta) in TABLE_2.items()}
    yield Statement(
        where="section 5.2, Table 2",
        what="β is of an “n-word message”; per word of 4 B, or per byte?",
        paper="words",
        ours="; ".join(
            f"{name} {rate / 1e9:.0f} Gb/s: {bits[name] / 1e9:.1f} per byte, {4 * bits[name] / 1e9:.0f} per word"
            for name, (rate, _) in TABLE_2.items()
        ),
        verdict="per byte: per word each is faster than its own line",
    )
    fdr = node("vgg19", 2, "knl-fdr").worker_link
    yield Statement(
        where="section 5.2",
        what="latency is the major overhead, so that packing pays (FDR, VGG-19, one exchange between two)",
        paper="α ≫ β",
        ours=f"{weights('vgg19').num_arrays} · α = {1e6 * weights('vgg19').num_arrays * fdr.latency_s:.1f} µs of "
        f"{1e3 * weights('vgg19').message_s(fdr, packed=False):.0f} ms",
        verdict=f"{NO}: the bytes take {weights('vgg19').num_bytes * fdr.s_per_byte / fdr.latency_s:,.0f} times α",
    )


def _inconsistencies() -> Iterator[Statement]:
    # What a node could train in one of Table 4's iterations at its peak.
    peak = machine("knl-fdr").peak_flop_per_s()
    images = {name: row.iteration_s * peak / step_flop(load(name, batch=1)) for name, row in TABLE_4.items()}
    yield Statement(
        where="section 6.1.1, Table 3",
        what="communication of Original EASGD: on how many GPUs",
        paper="87 % on 8, 87 % on 4",
        ours="round-robin: the model's ratio does not depend on P",
        verdict=UNTOLD,
    )
    yield Statement(
        where="Table 4",
        what="batch of one node",
        paper="not printed",
        ours="; ".join(f"{name} at most {most:,.0f}" for name, most in images.items()) + ", at the peak of 6.1 TFLOP/s",
        verdict=UNTOLD,
    )
