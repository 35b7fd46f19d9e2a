"""The time of one iteration of each algorithm, in closed form, as the parts of You et al. 2017, Table 3."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from types import MappingProxyType

from pase.easgd.algorithms import Exchange, Place
from pase.studies.easgd_costs.algorithms import Algorithm
from pase.studies.easgd_costs.platform import Platform, Weights


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
        """All parts."""
        return self.communication_s + self.compute_s + self.worker_update_s + self.host_update_s

    @property
    def communication_ratio(self) -> float:
        """Communication ÷ total, 0 where nothing takes any time."""
        return self.communication_s / self.total_s if self.total_s else 0.0

    def times(self, factor: float) -> "Breakdown":
        """Return every part so many times."""
        return Breakdown(**{name: value * factor for name, value in self.as_dict().items()})

    def as_dict(self) -> dict[str, float]:
        """Return the parts by name."""
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
        """Of one iteration."""
        return self.breakdown.total_s

    @property
    def round_s(self) -> float:
        """Until every worker has trained one batch: what stays the same in perfect weak scaling."""
        return self.time_s * self.num_workers / self.num_batches

    def times(self, num_iterations: int) -> Breakdown:
        """Return the breakdown of so many iterations."""
        return self.breakdown.times(num_iterations)


def iteration(
    algorithm: Algorithm, num_workers: int, platform: Platform, weights: Weights, *, packed: bool = True
) -> Iteration:
    """Return one iteration of an algorithm; packed: all weights in one message, not one for each array."""
    assert num_workers >= 1
    return _FORMS[algorithm.exchange](algorithm, num_workers, platform, weights, packed)


def num_stages(num_workers: int) -> int:
    """Return ⌈log2 P⌉: the stages of a broadcast or a reduction by tree among P, the one with the centre included."""
    return (num_workers - 1).bit_length()


def _parts(algorithm: Algorithm, platform: Platform, exchange_s: float, *, num_data: int = 1) -> Breakdown:
    """Return all work of an iteration, one part after the other."""
    at_master = algorithm.place is Place.MASTER
    worker_passes = algorithm.worker_passes + (0 if at_master else algorithm.centre_passes)
    return Breakdown(
        worker_exchange_s=0.0 if at_master else exchange_s,
        data_s=num_data * platform.data_s,
        host_exchange_s=exchange_s if at_master else 0.0,
        compute_s=platform.compute_s,
        worker_update_s=worker_passes * platform.worker_pass_s,
        host_update_s=algorithm.centre_passes * platform.host_pass_s if at_master else 0.0,
    )


def _overlapped(algorithm: Algorithm, work: Breakdown) -> tuple[Breakdown, float]:
    """Return what is seen of the parts, and the seconds that are not."""
    overlap = algorithm.overlap
    if overlap is None:
        return work, 0.0
    parts = work.as_dict()
    hidden_s = min(parts[overlap.hidden], sum(parts[name] for name in overlap.behind))
    return Breakdown(**{**parts, overlap.hidden: parts[overlap.hidden] - hidden_s}), hidden_s


def _round_robin(
    algorithm: Algorithm, num_workers: int, platform: Platform, weights: Weights, packed: bool
) -> Iteration:
    """Algorithm 1: the centre to one worker and that worker's weights back, 2(α+|W|β); the others wait."""
    message_s = weights.message_s(platform.host_link, packed=packed)
    seen, hidden_s = _overlapped(algorithm, _parts(algorithm, platform, 2 * message_s))
    return _made(algorithm, num_workers, seen, hidden_s, weights, num_transfers=2, packed=packed)


def _together(algorithm: Algorithm, num_workers: int, platform: Platform, weights: Weights, packed: bool) -> Iteration:
    """Algorithms 2 to 4: a broadcast and a reduction by tree, 2⌈log2 P⌉(α+|W|β); every worker gets a batch in turn."""
    link = platform.host_link if algorithm.place is Place.MASTER else platform.worker_link
    exchange_s = 2 * num_stages(num_workers) * weights.message_s(link, packed=packed)
    seen, hidden_s = _overlapped(algorithm, _parts(algorithm, platform, exchange_s, num_data=num_workers))
    return _made(algorithm, num_workers, seen, hidden_s, weights, num_transfers=2 * (num_workers - 1), packed=packed)


def _first_come(
    algorithm: Algorithm, num_workers: int, platform: Platform, weights: Weights, packed: bool
) -> Iteration:
    """The master takes, updates and answers one worker at a time: its service is both messages and its update."""
    work = _parts(algorithm, platform, 2 * weights.message_s(platform.host_link, packed=packed))
    return _queued(algorithm, num_workers, work, work.host_exchange_s + work.host_update_s, weights, packed)


def _lock_free(algorithm: Algorithm, num_workers: int, platform: Platform, weights: Weights, packed: bool) -> Iteration:
    """Nothing of the master is locked; its link carries the bytes of one worker at a time in each direction."""
    work = _parts(algorithm, platform, 2 * weights.message_s(platform.host_link, packed=packed))
    return _queued(algorithm, num_workers, work, weights.num_bytes * platform.host_link.s_per_byte, weights, packed)


def _queued(
    algorithm: Algorithm, num_workers: int, work: Breakdown, bottleneck_s: float, weights: Weights, packed: bool
) -> Iteration:
    """Return one of P workers' iterations in a closed queue.

    A worker is back at the same point after max(work, P · bottleneck): of fixed times that is exact, of times that vary
    a bound from below. What it waits counts as communication with the master.
    """
    waiting_s = max(0.0, num_workers * bottleneck_s - work.total_s)
    cycle = replace(work, host_exchange_s=work.host_exchange_s + waiting_s)
    return _made(algorithm, num_workers, cycle.times(1 / num_workers), 0.0, weights, num_transfers=2, packed=packed)


def _made(
    algorithm: Algorithm,
    num_workers: int,
    seen: Breakdown,
    hidden_s: float,
    weights: Weights,
    *,
    num_transfers: int,
    packed: bool,
) -> Iteration:
    return Iteration(
        algorithm=algorithm,
        num_workers=num_workers,
        breakdown=seen,
        hidden_s=hidden_s,
        num_messages=num_transfers * weights.num_messages(packed=packed),
        num_bytes=num_transfers * weights.num_bytes,
        num_batches=algorithm.num_batches(num_workers),
    )


_FORMS: Mapping[Exchange, Callable[[Algorithm, int, Platform, Weights, bool], Iteration]] = MappingProxyType(
    {
        Exchange.ROUND_ROBIN: _round_robin,
        Exchange.FIRST_COME: _first_come,
        Exchange.LOCK_FREE: _lock_free,
        Exchange.TOGETHER: _together,
    }
)
