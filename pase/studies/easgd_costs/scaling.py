"""Weak scaling: every worker trains as many batches as one alone does (You et al. 2017, Table 4)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pase.errors import TrainingError
from pase.studies.easgd_costs.algorithms import Algorithm
from pase.studies.easgd_costs.iteration import Iteration, iteration, num_stages
from pase.studies.easgd_costs.platform import Platform, Weights

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
    messages = 2 * num_stages(num_workers)
    left_s = exchange_s - messages * latency_s
    return messages * weights.num_bytes / left_s if messages and left_s > 0 else None
