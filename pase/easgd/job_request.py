"""`make_job`: a job from what was asked for, with defaults, and refusals that say which algorithms take an option."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf, isfinite
from types import MappingProxyType
from typing import Any

from pase.easgd.algorithms import ALGORITHMS, Algorithm, algorithm_named
from pase.easgd.equations import Rates
from pase.easgd.job import Job, Reduction
from pase.errors import TrainingError

DEFAULT_ALGORITHM = "sync-easgd3"
DEFAULT_WORKERS = 4
DEFAULT_STEPS = 100
DEFAULT_LEARNING_RATE = 0.01
DEFAULT_MOMENTUM = 0.9
DEFAULT_REPORT_EVERY = 10

MOST_WORKERS = 1024
"""Each has weights, and a thread, of its own."""

ELASTICITY = 0.9
"""β: how far a round moves the centre towards the mean of the workers, P·η·ρ (Zhang, Choromanska and LeCun 2015)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRequest:
    """What may be asked of a training across workers; None for what was left open.

    The fields are those of Job and Rates, and mean the same.
    """

    algorithm: str = DEFAULT_ALGORITHM
    num_workers: int = DEFAULT_WORKERS
    num_steps: int = DEFAULT_STEPS
    learning_rate: float = DEFAULT_LEARNING_RATE
    rho: float | None = None
    momentum: float | None = None
    averages: bool | None = None
    arrivals: tuple[int, ...] | None = None
    reduction: str | None = None
    report_every: int = DEFAULT_REPORT_EVERY
    test_every: int | None = None
    until_accuracy: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Option:
    """An option that some algorithms take. takes: whether one does."""

    flag: str
    takes: Any


_OPTIONS: Mapping[str, _Option] = MappingProxyType(
    {
        "rho": _Option(flag="--rho", takes=lambda algorithm: algorithm.has_rho),
        "momentum": _Option(flag="--momentum", takes=lambda algorithm: algorithm.has_momentum),
        "averages": _Option(flag="--average", takes=lambda algorithm: algorithm.has_average),
        "arrivals": _Option(flag="--arrivals", takes=lambda algorithm: not algorithm.is_synchronous),
        "reduction": _Option(flag="--reduction", takes=lambda algorithm: algorithm.is_synchronous),
    }
)
"""The options that only some algorithms take, by field."""


def make_job(request: JobRequest) -> Job:
    """Return the job that was asked for.

    Raises TrainingError for an unknown algorithm, an option that it does not take, a value out of range.
    """
    algorithm = algorithm_named(request.algorithm)
    for name, option in _OPTIONS.items():
        if getattr(request, name) is not None and not option.takes(algorithm):
            raise TrainingError(_not_taken(algorithm, option))
    if not 1 <= request.num_workers <= MOST_WORKERS:
        raise TrainingError(f"the number of workers is {request.num_workers}; expected 1 to {MOST_WORKERS}")
    _check("the learning rate", request.learning_rate, above=0)
    return Job(
        algorithm=algorithm,
        rates=Rates(
            learning_rate=request.learning_rate,
            rho=_rho(algorithm, request),
            momentum=_momentum(algorithm, request),
            averages=bool(request.averages),
        ),
        num_workers=request.num_workers,
        num_steps=request.num_steps,
        arrivals=request.arrivals or (),
        reduction=Reduction(request.reduction) if request.reduction else Reduction.TREE,
        # Where there are fewer steps, the last one is shown all the same.
        report_every=min(request.report_every, max(1, request.num_steps)),
        test_every=request.test_every,
        until_accuracy=_until(request),
    )


def default_rho(num_workers: int, learning_rate: float) -> float:
    """Return ρ = β / (P·η), so that a round of all workers moves the centre by β towards their mean."""
    return ELASTICITY / (num_workers * learning_rate)


def _rho(algorithm: Algorithm, request: JobRequest) -> float:
    if not algorithm.has_rho:
        return 0.0
    rho = default_rho(request.num_workers, request.learning_rate) if request.rho is None else request.rho
    return _check("ρ", rho, minimum=0)


def _momentum(algorithm: Algorithm, request: JobRequest) -> float:
    if not algorithm.has_momentum:
        return 0.0
    return (
        DEFAULT_MOMENTUM if request.momentum is None else _check("the momentum", request.momentum, minimum=0, below=1)
    )


def _until(request: JobRequest) -> float | None:
    if request.until_accuracy is None:
        return None
    if request.test_every is None:
        raise TrainingError("--until-accuracy needs --test-every K, how often to look, and data to test on")
    if not 0 < request.until_accuracy <= 1:
        raise TrainingError(f"until-accuracy is {request.until_accuracy:g}; expected a fraction above 0, at most 1")
    return request.until_accuracy


def _check(what: str, value: float, *, above: float = -inf, minimum: float = -inf, below: float = inf) -> float:
    if isfinite(value) and value > above and minimum <= value < below:
        return value
    bounds = [
        f"above {above:g}" if isfinite(above) else "",
        f"of {minimum:g} or more" if isfinite(minimum) else "",
        f"below {below:g}" if isfinite(below) else "",
    ]
    raise TrainingError(f"{what} is {value:g}; expected a number {' and '.join(filter(None, bounds))}")


def _not_taken(algorithm: Algorithm, option: _Option) -> str:
    takers = [each.name for each in ALGORITHMS.values() if option.takes(each)]
    *others, last = takers
    who = f"{', '.join(others)} and {last} do" if others else f"{last} does"
    return f"{algorithm.name} takes no {option.flag}; {who}: leave it out"
