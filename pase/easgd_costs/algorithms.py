"""The algorithms as their cost sees them (You et al. 2017): who talks to whom, where the centre lies, what overlaps."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType

from pase.errors import TrainingError, unknown_name


class Exchange(Enum):
    """Who is served when.

    ROUND_ROBIN: one worker in an iteration, each after the one before. FIRST_COME: one at a time behind a lock, in the
    order in which they arrive. LOCK_FREE: all that arrive, at the same time. TOGETHER: all in every iteration, by tree.
    """

    ROUND_ROBIN = "round-robin"
    FIRST_COME = "first come, first served"
    LOCK_FREE = "lock-free"
    TOGETHER = "together"


class Place(Enum):
    """Where the centre is kept: with a master of its own (in section 6.1 the CPU), or with the first worker."""

    MASTER = "master"
    WORKER = "worker 0"


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

CENTRE, GRADIENT, MOMENTUM = 3, 3, 5
"""Of the centre. Eq. 2, and a step of SGD: two arrays are read, one is written. Eqs. 3 and 4: V, ΔW, W; V, W."""

_BEHIND_EXCHANGE = Overlap(hidden="compute_s", behind=("host_exchange_s",))
"""Table 3's caption: for/backward with the parameters' way between CPU and GPU; it keeps the latter whole."""

_BEHIND_COMPUTATION = Overlap(hidden="worker_exchange_s", behind=("data_s", "compute_s"))
"""Section 6.1.3: steps 11 and 12 of Algorithm 3 with its steps 7 to 10."""

_ALL = (
    Algorithm(
        name="original-easgd-star",
        title="Original EASGD*",
        equations="Algorithm 1, nothing overlapped",
        exchange=Exchange.ROUND_ROBIN,
        worker_passes=ELASTIC,
        centre_passes=CENTRE,
    ),
    Algorithm(
        name="original-easgd",
        title="Original EASGD",
        equations="Algorithm 1",
        exchange=Exchange.ROUND_ROBIN,
        worker_passes=ELASTIC,
        centre_passes=CENTRE,
        overlap=_BEHIND_EXCHANGE,
    ),
    Algorithm(
        name="async-easgd",
        title="Async EASGD",
        equations="Eqs. 1 and 2",
        exchange=Exchange.FIRST_COME,
        worker_passes=ELASTIC,
        centre_passes=CENTRE,
    ),
    Algorithm(
        name="async-measgd",
        title="Async MEASGD",
        equations="Eqs. 2, 5 and 6",
        exchange=Exchange.FIRST_COME,
        worker_passes=ELASTIC_MOMENTUM,
        centre_passes=CENTRE,
    ),
    Algorithm(
        name="hogwild-easgd",
        title="Hogwild EASGD",
        equations="Eqs. 1 and 2",
        exchange=Exchange.LOCK_FREE,
        worker_passes=ELASTIC,
        centre_passes=CENTRE,
    ),
    Algorithm(
        name="sync-easgd1",
        title="Sync EASGD1",
        equations="Algorithm 2",
        exchange=Exchange.TOGETHER,
        worker_passes=ELASTIC,
        centre_passes=CENTRE,
    ),
    Algorithm(
        name="sync-easgd2",
        title="Sync EASGD2",
        equations="Algorithm 3",
        exchange=Exchange.TOGETHER,
        worker_passes=ELASTIC,
        centre_passes=CENTRE,
        place=Place.WORKER,
    ),
    Algorithm(
        name="sync-easgd3",
        title="Sync EASGD3",
        equations="Algorithms 3 and 4, overlapped",
        exchange=Exchange.TOGETHER,
        worker_passes=ELASTIC,
        centre_passes=CENTRE,
        place=Place.WORKER,
        overlap=_BEHIND_COMPUTATION,
    ),
    Algorithm(
        name="async-sgd",
        title="Async SGD",
        equations="section 3.1",
        exchange=Exchange.FIRST_COME,
        worker_passes=NOTHING,
        centre_passes=GRADIENT,
    ),
    Algorithm(
        name="async-msgd",
        title="Async MSGD",
        equations="Eqs. 3 and 4",
        exchange=Exchange.FIRST_COME,
        worker_passes=NOTHING,
        centre_passes=MOMENTUM,
    ),
    Algorithm(
        name="hogwild-sgd",
        title="Hogwild SGD",
        equations="section 3.2",
        exchange=Exchange.LOCK_FREE,
        worker_passes=NOTHING,
        centre_passes=GRADIENT,
    ),
    Algorithm(
        name="sync-sgd",
        title="Sync SGD",
        equations="section 2.3",
        exchange=Exchange.TOGETHER,
        worker_passes=NOTHING,
        centre_passes=GRADIENT,
    ),
)

ALGORITHMS: Mapping[str, Algorithm] = MappingProxyType({algorithm.name: algorithm for algorithm in _ALL})


def algorithm_named(name: str) -> Algorithm:
    """Return an algorithm; TrainingError lists them where there is none of that name."""
    if name not in ALGORITHMS:
        raise TrainingError(unknown_name("algorithm", name, ALGORITHMS))
    return ALGORITHMS[name]
