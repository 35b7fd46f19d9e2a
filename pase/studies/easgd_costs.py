"""The time of one iteration of each algorithm, in closed form, as the parts of You et al. 2017, Table 3."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from types import MappingProxyType

import numpy as np

from pase.costs.edges import traffic_of
from pase.easgd import algorithms as training
from pase.easgd.algorithms import Exchange, Place, num_rounds
from pase.errors import TrainingError
from pase.graph import Graph, Operator
from pase.machine import Machine
from pase.studies.integrated.equations import Network, network_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlap:
    """A part of a breakdown, by its field's name, that goes on while others do: what is longer than these is seen."""

    hidden: str
    behind: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Algorithm(training.Algorithm):
    """An algorithm as training declares it; overlap: None where the parts of an iteration follow one another."""

    overlap: Overlap | None = None

    @property
    def worker_passes(self) -> int:
        """How often its update rule reads or writes an array of the weights' size at a worker."""
        if self.worker_velocity:
            return ELASTIC_MOMENTUM
        return ELASTIC if self.has_rho else NOTHING

    @property
    def centre_passes(self) -> int:
        """How often it reads or writes one at the centre."""
        return MOMENTUM if self.master_velocity else CENTRE


ELASTIC, ELASTIC_MOMENTUM, NOTHING = 4, 6, 0
"""Of a worker. Eq. 1: W, ΔW and the centre are read, W is written. Eqs. 5 and 6: V is read and written too."""


CENTRE, MOMENTUM = 3, 5
"""Of the centre. Eq. 2, and a step of SGD: two arrays are read, one is written. Eqs. 3 and 4: V, ΔW, W; V, W."""


_BEHIND_EXCHANGE = Overlap(hidden="compute_s", behind=("host_exchange_s",))
"""Table 3's caption: for/backward with the parameters' way between CPU and GPU; it keeps the latter whole."""


_BEHIND_COMPUTATION = Overlap(hidden="worker_exchange_s", behind=("data_s", "compute_s"))
"""Section 6.1.3: steps 11 and 12 of Algorithm 3 with its steps 7 to 10."""


def _costed(algorithm: training.Algorithm) -> Algorithm:
    """Return an algorithm with its overlap, which follows from how it is declared."""
    is_in_turn = algorithm.exchange is Exchange.ROUND_ROBIN
    declared = {field.name: getattr(algorithm, field.name) for field in fields(algorithm)}
    overlap = _BEHIND_COMPUTATION if algorithm.overlaps else _BEHIND_EXCHANGE if is_in_turn else None
    return Algorithm(**declared, overlap=overlap)


def _with_star(algorithms: Iterable[Algorithm]) -> Iterator[Algorithm]:
    """Give the algorithms, and before Original EASGD what the paper's Table 3 sets beside it, without its overlap."""
    for algorithm in algorithms:
        if algorithm.name == "original-easgd":
            yield replace(
                algorithm,
                name="original-easgd-star",
                title="Original EASGD*",
                equations=f"{algorithm.equations}; nothing overlapped",
                overlap=None,
            )
        yield algorithm


ALGORITHMS: Mapping[str, Algorithm] = MappingProxyType(
    {algorithm.name: algorithm for algorithm in _with_star(map(_costed, training.ALGORITHMS.values()))}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """|W|: num_bytes, of all parameters. num_arrays: those that need a message of their own when nothing is packed."""

    num_bytes: float
    num_arrays: int

    def num_messages(self, *, packed: bool) -> int:
        """Return the messages by which all weights go from one to another: one, or one for each array (section 5.2)."""
        return 1 if packed else self.num_arrays

    def message_s(self, link: Network, *, packed: bool) -> float:
        """Return the time of that: α for each message, and |W|β."""
        return self.num_messages(packed=packed) * link.latency_s + self.num_bytes * link.s_per_byte


@dataclass(frozen=True, slots=True, kw_only=True)
class Platform:
    """P equal workers and a master.

    worker_link: between two workers. host_link: between a worker and the master; both carry each direction by itself.
    data_s: to bring one batch to one worker. compute_s: forward and backward propagation of one batch. worker_pass_s,
    host_pass_s: to read or write an array of the weights' size once, at a worker and at the master.
    """

    worker_link: Network
    host_link: Network
    compute_s: float
    data_s: float = 0.0
    worker_pass_s: float = 0.0
    host_pass_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Computation:
    """One iteration of one worker alone. has_update: whether time_s holds the worker's own update too."""

    time_s: float
    source: str
    has_update: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Breakdown:
    """Seconds by Table 3's columns.

    worker_exchange_s: gpu-gpu para. data_s: cpu-gpu data. host_exchange_s: cpu-gpu para, waiting for the master
    included. compute_s: for/backward. worker_update_s: gpu update. host_update_s: cpu update.
    """

    worker_exchange_s: float = 0.0
    data_s: float = 0.0
    host_exchange_s: float = 0.0
    compute_s: float = 0.0
    worker_update_s: float = 0.0
    host_update_s: float = 0.0

    @property
    def communication_s(self) -> float:
        """Parts (3), (4) and (5) of section 6.1.1."""
        return self.worker_exchange_s + self.data_s + self.host_exchange_s

    @property
    def total_s(self) -> float:
        return self.communication_s + self.compute_s + self.worker_update_s + self.host_update_s

    @property
    def communication_ratio(self) -> float:
        """Communication ÷ total, 0 where nothing takes any time."""
        return self.communication_s / self.total_s if self.total_s else 0.0

    def times(self, factor: float) -> "Breakdown":
        return Breakdown(**{name: value * factor for name, value in self.as_dict().items()})

    def as_dict(self) -> dict[str, float]:
        return {part.name: getattr(self, part.name) for part in fields(self)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Iteration:
    """One iteration: of one worker, or of all together, as the algorithm has it.

    breakdown: what of each part is seen. hidden_s: what overlaps with it, and is not. num_messages, num_bytes: of
    weights or gradients. num_batches: that it trains.
    """

    algorithm: Algorithm
    num_workers: int
    breakdown: Breakdown
    hidden_s: float
    num_messages: int
    num_bytes: float
    num_batches: int

    @property
    def time_s(self) -> float:
        return self.breakdown.total_s

    @property
    def round_s(self) -> float:
        """Until every worker has trained one batch: what stays the same in perfect weak scaling."""
        return self.time_s * self.num_workers / self.num_batches

    def times(self, num_iterations: int) -> Breakdown:
        return self.breakdown.times(num_iterations)


def iteration(
    algorithm: Algorithm, num_workers: int, platform: Platform, weights: Weights, *, packed: bool = True
) -> Iteration:
    """Return one iteration of an algorithm; packed: all weights in one message, not one for each array.

    In turn (Algorithm 1) the centre goes to one worker and that worker's weights come back, 2(α+|W|β); the others wait.
    Together (Algorithms 2 to 4) there are a broadcast and a reduction by tree, 2⌈log2 P⌉(α+|W|β), and every worker gets
    a batch in turn. First come, first served, the master takes, updates and answers one worker at a time: its service
    is both messages and its update. Without a lock nothing of the master is locked; its link carries the bytes of one
    worker at a time in each direction.
    """
    assert num_workers >= 1
    at_master = algorithm.place is Place.MASTER
    link = platform.host_link if at_master else platform.worker_link
    is_together = algorithm.is_synchronous
    exchange_s = 2 * (num_rounds(num_workers) if is_together else 1) * weights.message_s(link, packed=packed)
    worker_passes = algorithm.worker_passes + (0 if at_master else algorithm.centre_passes)
    # All work, one part after the other.
    work = Breakdown(
        worker_exchange_s=0.0 if at_master else exchange_s,
        data_s=(num_workers if is_together else 1) * platform.data_s,
        host_exchange_s=exchange_s if at_master else 0.0,
        compute_s=platform.compute_s,
        worker_update_s=worker_passes * platform.worker_pass_s,
        host_update_s=algorithm.centre_passes * platform.host_pass_s if at_master else 0.0,
    )
    seen, hidden_s, overlap = work, 0.0, algorithm.overlap
    if overlap is not None:
        parts = work.as_dict()
        hidden_s = min(parts[overlap.hidden], sum(parts[name] for name in overlap.behind))
        seen = Breakdown(**{**parts, overlap.hidden: parts[overlap.hidden] - hidden_s})
    if algorithm.exchange is Exchange.FIRST_COME:
        seen = _queued(work, num_workers, work.host_exchange_s + work.host_update_s)
    elif algorithm.exchange is Exchange.LOCK_FREE:
        seen = _queued(work, num_workers, weights.num_bytes * link.s_per_byte)
    num_transfers = 2 * (num_workers - 1) if is_together else 2
    return Iteration(
        algorithm=algorithm,
        num_workers=num_workers,
        breakdown=seen,
        hidden_s=hidden_s,
        num_messages=num_transfers * weights.num_messages(packed=packed),
        num_bytes=num_transfers * weights.num_bytes,
        num_batches=num_workers if is_together else 1,
    )


def _queued(work: Breakdown, num_workers: int, bottleneck_s: float) -> Breakdown:
    """Return the parts of one of P workers' iterations in a closed queue.

    A worker is back at the same point after max(work, P · bottleneck): of fixed times that is exact, of times that vary
    a bound from below. What it waits counts as communication with the master.
    """
    waiting_s = max(0.0, num_workers * bottleneck_s - work.total_s)
    cycle = replace(work, host_exchange_s=work.host_exchange_s + waiting_s)
    return cycle.times(1 / num_workers)


def weights_of(graph: Graph) -> Weights:
    """Return the weights of a network: one array for each matrix or kernel, with its bias inside.

    A layer whose parameters are all vectors (a normalisation's scale and shift) counts as one array. What several
    layers share counts once. Raises TrainingError where there are none.
    """
    num_arrays = sum(_num_arrays(operator, graph.owners) for operator in graph.operators)
    if not num_arrays:
        raise TrainingError(
            f"model {graph.name!r} has no weights, so there is nothing to exchange; use one that trains"
        )
    return Weights(num_bytes=graph.num_parameters * graph.precision.itemsize, num_arrays=num_arrays)


def _num_arrays(operator: Operator, owners: Mapping[str, str]) -> int:
    owned = [a for a in operator.parameters if owners.get(a.shared, operator.name) == operator.name]
    return sum(len(access.shape) > 1 for access in owned) or min(len(owned), 1)


def step_flop(graph: Graph) -> float:
    """Return the FLOP of forward and backward propagation of one batch on one device."""
    whole = ((op, np.ones((1, len(op.dims)), dtype=np.int32)) for op in graph.operators)
    return sum((float(traffic_of(graph, op, splits).flop[0]) for op, splits in whole), 0.0)


def computation_of(graph: Graph, machine: Machine) -> Computation:
    """Return what an iteration takes at the machine's peak; no network reaches it."""
    return Computation(
        time_s=step_flop(graph) / machine.peak_flop_per_s(),
        source=f"FLOP of a step ÷ peak of {machine.device.name}: no real program is as fast",
        has_update=False,
    )


def platform_of(machine: Machine, num_workers: int, weights: Weights, computation: Computation) -> Platform:
    """Return workers and master on equal devices of a machine, joined by the slowest level that they span.

    Every worker has its data in its own memory (Algorithm 4, line 9). Updates go at the speed of the memory, and take
    no time where the machine does not give it. Raises MachineError for more workers than the machine has devices.
    """
    network = network_of(machine, max(num_workers, 2))
    bandwidth = machine.device.memory_bandwidth_bytes_per_s
    pass_s = weights.num_bytes / bandwidth if bandwidth else 0.0
    return Platform(
        worker_link=network,
        host_link=network,
        compute_s=computation.time_s,
        worker_pass_s=0.0 if computation.has_update else pass_s,
        host_pass_s=pass_s,
    )


MAX_WORKERS = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingRow:
    """time_s: until every worker has trained all its batches. efficiency: the time of one worker ÷ that."""

    num_workers: int
    iteration: Iteration
    time_s: float
    efficiency: float


def weak_scaling(
    algorithm: Algorithm,
    workers: Sequence[int],
    platform_for: Callable[[int], Platform],
    weights: Weights,
    *,
    num_batches: int,
    packed: bool = True,
) -> tuple[ScalingRow, ...]:
    """Return a row for each number of workers, of which each trains num_batches.

    platform_for: what so many workers run on. Raises TrainingError for a number of workers out of 1 to MAX_WORKERS.
    """
    for num_workers in workers:
        check_workers(num_workers)

    def of(num_workers: int) -> Iteration:
        return iteration(algorithm, num_workers, platform_for(num_workers), weights, packed=packed)

    alone_s = of(1).round_s
    rows = []
    for num_workers in workers:
        found = of(num_workers)
        efficiency = alone_s / found.round_s if found.round_s else 1.0
        rows.append(
            ScalingRow(
                num_workers=num_workers, iteration=found, time_s=found.round_s * num_batches, efficiency=efficiency
            )
        )
    return tuple(rows)


def check_workers(num_workers: int) -> None:
    """Raise TrainingError unless there are 1 to MAX_WORKERS workers."""
    if not 1 <= num_workers <= MAX_WORKERS:
        raise TrainingError(f"{num_workers} workers were asked for; expected a whole number from 1 to {MAX_WORKERS}")


def bandwidth_for(weights: Weights, num_workers: int, exchange_s: float, *, latency_s: float) -> float | None:
    """Return the bytes a second at which 2⌈log2 P⌉ packed messages take so long; None where no bandwidth does."""
    messages = 2 * num_rounds(num_workers)
    left_s = exchange_s - messages * latency_s
    return messages * weights.num_bytes / left_s if messages and left_s > 0 else None
