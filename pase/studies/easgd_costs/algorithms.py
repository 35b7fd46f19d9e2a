"""The algorithms as their cost sees them (You et al. 2017): who talks to whom, where the centre lies, what overlaps."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from pase.easgd import algorithms as training
from pase.easgd.algorithms import Exchange, Place
from pase.errors import TrainingError, unknown_name


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlap:
    """A part of a breakdown, by its field's name, that goes on while others do: what is longer than these is seen."""

    hidden: str
    behind: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Algorithm:
    """What an iteration of an algorithm consists of.

    equations: that it applies. worker_passes, centre_passes: how often its update rules read or write an array of the
    weights' size, at a worker and at the centre. overlap: None where its parts follow one another.
    """

    name: str
    title: str
    equations: str
    exchange: Exchange
    worker_passes: int
    centre_passes: int
    place: Place = Place.MASTER
    overlap: Overlap | None = None

    @property
    def is_synchronous(self) -> bool:
        """Whether all workers take every iteration together."""
        return self.exchange is Exchange.TOGETHER

    def num_batches(self, num_workers: int) -> int:
        """Return the batches of one iteration: in the paper's tables one, or one of every worker."""
        return num_workers if self.is_synchronous else 1


ELASTIC, ELASTIC_MOMENTUM, NOTHING = 4, 6, 0
"""Of a worker. Eq. 1: W, ΔW and the centre are read, W is written. Eqs. 5 and 6: V is read and written too."""

CENTRE, MOMENTUM = 3, 5
"""Of the centre. Eq. 2, and a step of SGD: two arrays are read, one is written. Eqs. 3 and 4: V, ΔW, W; V, W."""

_BEHIND_EXCHANGE = Overlap(hidden="compute_s", behind=("host_exchange_s",))
"""Table 3's caption: for/backward with the parameters' way between CPU and GPU; it keeps the latter whole."""

_BEHIND_COMPUTATION = Overlap(hidden="worker_exchange_s", behind=("data_s", "compute_s"))
"""Section 6.1.3: steps 11 and 12 of Algorithm 3 with its steps 7 to 10."""


def _costed(algorithm: training.Algorithm) -> Algorithm:
    """Return what an iteration of an algorithm consists of: it follows from how it is declared."""
    is_in_turn = algorithm.exchange is Exchange.ROUND_ROBIN
    worker_passes = ELASTIC_MOMENTUM if algorithm.worker_velocity else ELASTIC if algorithm.has_rho else NOTHING
    return Algorithm(
        name=algorithm.name,
        title=algorithm.title,
        equations=algorithm.equations,
        exchange=algorithm.exchange,
        worker_passes=worker_passes,
        centre_passes=MOMENTUM if algorithm.master_velocity else CENTRE,
        place=algorithm.place,
        overlap=_BEHIND_COMPUTATION if algorithm.overlaps else _BEHIND_EXCHANGE if is_in_turn else None,
    )


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


def algorithm_named(name: str) -> Algorithm:
    """Return an algorithm; TrainingError lists them where there is none of that name."""
    if name not in ALGORITHMS:
        raise TrainingError(unknown_name("algorithm", name, ALGORITHMS))
    return ALGORITHMS[name]
