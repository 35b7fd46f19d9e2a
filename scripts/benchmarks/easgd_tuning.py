"""Rates of every algorithm, found by one procedure: equally many settings, on seeds that are not reported."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from math import inf
from statistics import mean
from types import MappingProxyType

from pase.easgd.algorithms import Algorithm, Rates
from scripts.benchmarks.easgd_trials import Bench, samples_until

SEEDS = (100, 101, 102)
MOST = 20_000
"""Samples after which a trial ends; it counts as so many."""
GIVEN_UP = 1.6
"""A setting is given up where it needs this many times the samples of the best one before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """What is tried. learning_rates: η. elastic_rates: η·ρ, (0,) where there is no ρ. momentum: μ."""

    learning_rates: tuple[float, ...]
    elastic_rates: tuple[float, ...] = (0.0,)
    momentum: float = 0.0

    def __iter__(self) -> Iterator[Rates]:
        for rate, elastic in product(self.learning_rates, self.elastic_rates):
            yield Rates(learning_rate=rate, rho=elastic / rate, momentum=self.momentum)


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """One setting. samples: until the target, on each tuning seed; None for a setting that was given up."""

    rates: Rates
    samples: tuple[int, ...] | None

    @property
    def mean(self) -> float:
        """Over the seeds."""
        return mean(self.samples) if self.samples else inf


_SGD = (0.0125, 0.0157, 0.0198, 0.025, 0.0315, 0.0397, 0.05, 0.063, 0.0794)
_EASGD = (0.14, 0.2, 0.28)
_ELASTIC = (0.1, 0.225, 0.4)

_IN_TURN = Grid(learning_rates=_EASGD, elastic_rates=_ELASTIC)

GRIDS: Mapping[str, Grid] = MappingProxyType(
    {
        "async-sgd": Grid(learning_rates=_SGD),
        "sync-sgd": Grid(learning_rates=_SGD),
        "async-msgd": Grid(learning_rates=tuple(rate / 10 for rate in _SGD), momentum=0.9),
        "async-easgd": _IN_TURN,
        "original-easgd": _IN_TURN,
        "sync-easgd1": _IN_TURN,
        "async-measgd": Grid(learning_rates=(0.02, 0.032, 0.05), elastic_rates=_ELASTIC, momentum=0.9),
    }
)
"""Nine settings of each algorithm that is tried; `SAME` take theirs."""

SAME: Mapping[str, str] = MappingProxyType(
    {
        "hogwild-easgd": "async-easgd",
        "hogwild-sgd": "async-sgd",
        "sync-easgd2": "sync-easgd1",
        "sync-easgd3": "sync-easgd1",
    }
)
"""One event at a time, these take the very same steps as another one."""


def tuned(bench: Bench, algorithm: Algorithm, grid: Grid) -> list[Found]:
    """Return all settings, the one with the fewest samples first."""
    found: list[Found] = []
    for rates in grid:
        limit = GIVEN_UP * min((each.mean for each in found), default=inf)
        samples: list[int] = []
        while len(samples) < len(SEEDS) and sum(samples) <= limit * len(SEEDS):
            (reached,) = samples_until(bench, algorithm, rates, seed=SEEDS[len(samples)], most=MOST)
            samples.append(reached or MOST)
        found.append(Found(rates=rates, samples=tuple(samples) if len(samples) == len(SEEDS) else None))
        print(f"{algorithm.name}: {rates}: {found[-1].samples}", flush=True)
    return sorted(found, key=lambda each: each.mean)
