"""Trainings of LeNet-5 in threads, and what they came to: samples and time until an accuracy, and communication."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean

from pase.easgd.algorithms import ALGORITHMS, Rates
from pase.easgd.job import Job, begun
from pase.easgd.ranks import train_in_threads
from pase.errors import TrainingError
from scripts.benchmarks.easgd_charts import Point
from scripts.benchmarks.easgd_trials import NUM_WORKERS, TARGET, Bench


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One training. points: its tests. communication: the share of the workers' time, on the mean of them.

    No points and no share for a training that ended because nothing was finite any more.
    """

    points: tuple[Point, ...]
    communication: float | None

    @property
    def reached(self) -> Point | None:
        """The first test that reached the target, None where none did."""
        return next((point for point in self.points if point.error <= 1 - TARGET + 1e-9), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The runs of one algorithm, [seeds][repeats]: methods whose arrivals are nobody's choice differ each time."""

    name: str
    rates: Rates
    runs: tuple[tuple[Run, ...], ...]

    @property
    def all_runs(self) -> tuple[Run, ...]:
        """Of every seed."""
        return tuple(run for own in self.runs for run in own)

    @property
    def samples(self) -> tuple[float | None, ...]:
        """Until the target, by seed, the mean of its repeats; None where one did not reach it."""
        return tuple(
            mean_of_all([run.reached.num_samples if run.reached else None for run in own]) for own in self.runs
        )

    @property
    def mean_samples(self) -> float | None:
        """None where a seed did not reach the target."""
        return mean_of_all(self.samples)

    @property
    def mean_time_s(self) -> float | None:
        """Until the target; None where a seed did not reach it."""
        return mean_of_all([run.reached.time_s if run.reached else None for run in self.all_runs])

    @property
    def communication(self) -> float | None:
        """The mean of the runs; None where one ended early."""
        return mean_of_all([run.communication for run in self.all_runs])


def mean_of_all(values: Sequence[float | None]) -> float | None:
    """Return the mean, None where a value is missing."""
    known = [value for value in values if value is not None]
    return mean(known) if len(known) == len(values) else None


def train(bench: Bench, name: str, rates: Rates, *, seed: int, num_steps: int, test_every: int = 1) -> Run:
    """Return what a training in threads came to; tests, after so many steps of each worker, wait for its end."""
    job = Job(
        algorithm=ALGORITHMS[name],
        rates=rates,
        num_workers=NUM_WORKERS,
        num_steps=num_steps,
        report_every=num_steps,
        test_every=test_every,
        tests_wait=True,
    )
    try:
        outcome = train_in_threads(
            job,
            begun(job, bench.network.initial(seed)),
            objectives=bench.objectives(seed),
            layout=bench.network.packing.layout(packed=True),
            evaluator=bench.evaluator,
        )
    except TrainingError as error:
        print(f"{name}, seed {seed}: {error}")
        return Run(points=(), communication=None)
    return Run(
        points=tuple(
            Point(num_samples=test.num_samples, time_s=test.time_s, error=1 - (test.accuracy or 0))
            for test in outcome.tests
        ),
        communication=mean(worker.communication_share for worker in outcome.workers if worker is not None),
    )
