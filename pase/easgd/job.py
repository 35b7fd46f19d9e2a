"""`Job`: what is trained how, one value for every runtime; and `Snapshot`, all that training changes."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum, StrEnum
from itertools import pairwise
from math import inf, isfinite
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pase.common.documents import LARGEST_INTEGER
from pase.datasets import has_parts
from pase.easgd.algorithms import ALGORITHMS, Algorithm, Array, MasterState, Place, Rates, WorkerState, algorithm_named
from pase.easgd.checkpoint import Checkpointing
from pase.errors import TrainingError
from pase.graph import Scalar
from pase.machine import DEFAULT_MACHINE, Machine
from pase.targets.training.options import ITEMSIZES, DeviceChoice


class DataSplit(StrEnum):
    """Whether each worker has a part of the data of its own (Section 2.3), or all of them (Algorithms 1 to 4)."""

    PARTITION = "partition"
    REPLICATE = "replicate"


class Reduction(Enum):
    """How a synchronous round sums and broadcasts: in ⌈log2 P⌉ steps, or with one worker after the other."""

    TREE = "tree"
    ROUND_ROBIN = "round-robin"


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A training across workers.

    num_steps: of each worker; asynchronous methods serve num_steps × num_workers events, whoever they are of.
    arrivals: the order in which an asynchronous master serves, repeated; () for the order in which workers come.
    report_every, test_every, save_every: in steps of each worker, counted from the first; None for never.
    until_accuracy: end with the first test that reaches it; nobody goes on while the centre is tested. tests_wait: test
    what was kept for it after the last step, so that tests do not slow the training. Raises TrainingError for what
    cannot be.
    """

    algorithm: Algorithm
    rates: Rates
    num_workers: int
    num_steps: int
    arrivals: tuple[int, ...] = ()
    reduction: Reduction = Reduction.TREE
    report_every: int = 10
    test_every: int | None = None
    save_every: int | None = None
    until_accuracy: float | None = None
    tests_wait: bool = False

    def __post_init__(self) -> None:
        for name in ("the number of workers", "the number of steps", "report-every", "test-every", "save-every"):
            value = getattr(self, name.replace("the number of ", "num_").replace("-", "_"))
            if value is not None and value < 1:
                raise TrainingError(f"{name} is {value}; expected 1 or more")
        if self.until_accuracy is not None and (self.tests_wait or self.test_every is None):
            raise TrainingError(
                "to end at an accuracy, tests are needed between the steps: give test-every, and let them not wait"
            )
        if self.arrivals and self.algorithm.is_synchronous:
            raise TrainingError(
                f"{self.algorithm.name} takes every step with all workers together; --arrivals is for asynchronous "
                "methods, leave it out"
            )
        for worker in self.arrivals:
            if not 0 <= worker < self.num_workers:
                raise TrainingError(
                    f"arrivals name worker {worker}; expected 0 to {self.num_workers - 1}, the first worker is 0"
                )
        if self.arrivals and set(self.arrivals) != set(range(self.num_workers)):
            missing = min(set(range(self.num_workers)) - set(self.arrivals))
            raise TrainingError(f"arrivals never name worker {missing}; name each of {self.num_workers} workers")

    @property
    def num_events(self) -> int:
        """How often the centre changes in all: rounds of a synchronous method, exchanges of another one."""
        return self.num_steps * self.events_per_step

    @property
    def events_per_step(self) -> int:
        """How many events are a step of each worker."""
        return 1 if self.algorithm.is_synchronous else self.num_workers

    @property
    def master(self) -> int:
        """The master's rank."""
        return self.num_workers

    def called(self, rank: int) -> str:
        """Return what messages call a rank."""
        return f"worker {rank}" if rank < self.num_workers else "the master"

    @property
    def coordinator(self) -> int:
        """The coordinator's rank: who shows, tests and saves."""
        return self.num_workers + 1

    def is_due(self, every: int | None, event: int) -> bool:
        """Whether what happens every so many steps is due after an event, counted from 1; after the last one, too."""
        return every is not None and (event % (every * self.events_per_step) == 0 or event == self.num_events)

    def is_last_save_due(self, num_events: int) -> bool:
        """Whether a checkpoint of the end is still to be written: it came early, and none was due just now."""
        return self.save_every is not None and not self.is_due(self.save_every, num_events)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerProgress:
    """A worker between two exchanges. num_steps: whose batches it has used up."""

    state: WorkerState
    num_steps: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """All that training changes, at one moment that could have been. num_events: done so far."""

    master: MasterState
    workers: tuple[WorkerProgress, ...]
    num_events: int = 0


def begun(job: Job, weights: Array) -> Snapshot:
    """Return what a training begins with: workers and centre have the same weights (Algorithm 1, lines 3 to 6)."""
    algorithm = job.algorithm
    worker = WorkerProgress(state=algorithm.worker_state(weights))
    return Snapshot(master=algorithm.master_state(weights), workers=(worker,) * job.num_workers)


# -- what is asked for

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


OPTIONS: Mapping[str, tuple[str, Callable[[Algorithm], bool]]] = MappingProxyType(
    {
        "rho": ("--rho", lambda algorithm: algorithm.has_rho),
        "momentum": ("--momentum", lambda algorithm: algorithm.has_momentum),
        "averages": ("--average", lambda algorithm: algorithm.has_average),
        "arrivals": ("--arrivals", lambda algorithm: not algorithm.is_synchronous),
        "reduction": ("--reduction", lambda algorithm: algorithm.is_synchronous),
    }
)
"""The options that only some algorithms take, by field: the flag, and whether an algorithm takes it."""


def make_job(
    *,
    algorithm: str = DEFAULT_ALGORITHM,
    num_workers: int = DEFAULT_WORKERS,
    num_steps: int = DEFAULT_STEPS,
    learning_rate: float = DEFAULT_LEARNING_RATE,
    report_every: int = DEFAULT_REPORT_EVERY,
    test_every: int | None = None,
    until_accuracy: float | None = None,
    **options: Any,
) -> Job:
    """Return the job that is asked for.

    Args:
        algorithm: by name. Others: as Job and Rates have them.
        options: those that only some algorithms take: rho, momentum, averages, arrivals, reduction (by its value); None
            for what is left open.

    Raises:
        TrainingError: for an unknown algorithm, an option that it does not take, a value out of range.
    """
    chosen = algorithm_named(algorithm)
    for name, (flag, takes) in OPTIONS.items():
        if options.get(name) is not None and not takes(chosen):
            *others, last = [each.name for each in ALGORITHMS.values() if takes(each)]
            who = f"{', '.join(others)} and {last} do" if others else f"{last} does"
            raise TrainingError(f"{chosen.name} takes no {flag}; {who}: leave it out")
    if not 1 <= num_workers <= MOST_WORKERS:
        raise TrainingError(f"the number of workers is {num_workers}; expected 1 to {MOST_WORKERS}")
    _check("the learning rate", learning_rate, above=0)
    rho, momentum, reduction = options.get("rho"), options.get("momentum"), options.get("reduction")
    if rho is None and chosen.has_rho:
        # So that a round of all workers moves the centre by β towards their mean.
        rho = ELASTICITY / (num_workers * learning_rate)
    if momentum is None and chosen.has_momentum:
        momentum = DEFAULT_MOMENTUM
    return Job(
        algorithm=chosen,
        rates=Rates(
            learning_rate=learning_rate,
            rho=_check("ρ", rho or 0.0, minimum=0),
            momentum=_check("the momentum", momentum or 0.0, minimum=0, below=1),
            averages=bool(options.get("averages")),
        ),
        num_workers=num_workers,
        num_steps=num_steps,
        arrivals=options.get("arrivals") or (),
        reduction=Reduction(reduction) if reduction else Reduction.TREE,
        # Where there are fewer steps, the last one is shown all the same.
        report_every=min(report_every, max(1, num_steps)),
        test_every=test_every,
        until_accuracy=_until(until_accuracy, test_every),
    )


def _until(accuracy: float | None, test_every: int | None) -> float | None:
    if accuracy is None:
        return None
    if test_every is None:
        raise TrainingError("--until-accuracy needs --test-every K, how often to look, and data to test on")
    if not 0 < accuracy <= 1:
        raise TrainingError(f"until-accuracy is {accuracy:g}; expected a fraction above 0, at most 1")
    return accuracy


def _check(what: str, value: float, *, above: float = -inf, minimum: float = -inf, below: float = inf) -> float:
    if isfinite(value) and value > above and minimum <= value < below:
        return value
    bounds = [
        f"above {above:g}" if isfinite(above) else "",
        f"of {minimum:g} or more" if isfinite(minimum) else "",
        f"below {below:g}" if isfinite(below) else "",
    ]
    raise TrainingError(f"{what} is {value:g}; expected a number {' and '.join(filter(None, bounds))}")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingRequest:
    """What is trained, how, and with what.

    source: a model, a plan or an emitted program, and devices, batch, arguments, machine: as `load_build` has them.
    packed: one message for all weights, not one for each weight array. seed: of weights, samples and made-up data; None
    for 0, or the checkpoint's. data, test_data: as `load_dataset` has them; data None for made-up numbers, test_data
    None for the test part of the data, where these have one. data_split: of the data among the workers. choice: of each
    replica's devices. metrics_path: of a file with a line of JSON for each event that is one of a step. trace_path: of
    a file with the arrays of every step, of a training in one process. Raises PaseError for what cannot be.
    """

    job: Job
    source: str
    devices: int = 1
    batch: int | None = None
    arguments: Mapping[str, Scalar] | None = None
    machine: Machine | str = DEFAULT_MACHINE
    packed: bool = True
    dtype: str = "float32"
    seed: int | None = None
    data: str | None = None
    data_split: DataSplit = DataSplit.PARTITION
    test_data: str | None = None
    choice: DeviceChoice = field(default_factory=DeviceChoice)
    checkpointing: Checkpointing | None = None
    metrics_path: Path | None = None
    trace_path: Path | None = None

    def __post_init__(self) -> None:
        if self.dtype not in ITEMSIZES:
            raise TrainingError(f"the number type is {self.dtype!r}; expected {' or '.join(ITEMSIZES)}")
        if self.seed is not None and not 0 <= self.seed <= LARGEST_INTEGER:
            raise TrainingError(f"the seed is {self.seed}; expected 0 to {LARGEST_INTEGER}")
        tests_on = self.tests_on
        if self.job.test_every is not None and tests_on is None:
            raise TrainingError("--test-every needs data to test on: --test-data PATH, or --data that have a test part")

    @property
    def tests_on(self) -> str | None:
        """The data to test on, None for none."""
        if self.test_data is not None:
            return self.test_data
        return self.data if self.data is not None and has_parts(self.data) else None

    @property
    def whole_job(self) -> Job:
        """The job with what follows from the rest: a last test where there are data for it, checkpoints."""
        test_every = self.job.test_every or (self.job.num_steps if self.tests_on else None)
        save_every = self.checkpointing.save_every if self.checkpointing else None
        return replace(self.job, test_every=test_every, save_every=save_every)


def count_tasks(job: Job, num_processes: int) -> int:
    """Return how many tasks a job has on processes for its workers: one more where the centre is a master's.

    Raises TrainingError where there are fewer workers than processes.
    """
    if not 1 <= num_processes <= job.num_workers:
        raise TrainingError(
            f"{num_processes} processes were asked for, for {job.num_workers} workers; expected 1 to {job.num_workers}"
        )
    return num_processes + _num_apart(job)


def task_ranks(job: Job, num_tasks: int) -> tuple[tuple[int, ...], ...]:
    """Return the ranks of each task: workers in contiguous blocks, as equal as can be, and the coordinator on task 0.

    A master is with the coordinator, on a task of its own. Raises TrainingError for too few or too many tasks.
    """
    apart = _num_apart(job)
    num_processes = num_tasks - apart
    if not 1 <= num_processes <= job.num_workers:
        raise TrainingError(
            f"{job.algorithm.name} with {job.num_workers} workers runs in {1 + apart} to {job.num_workers + apart} "
            f"tasks{', the first of them the master' if apart else ''}; found {num_tasks}"
        )
    each, more = divmod(job.num_workers, num_processes)
    bounds = [number * each + min(number, more) for number in range(num_processes + 1)]
    blocks = [tuple(range(begin, end)) for begin, end in pairwise(bounds)]
    first = (job.master, job.coordinator)
    return (first, *blocks) if apart else ((*blocks[0], *first), *blocks[1:])


def _num_apart(job: Job) -> int:
    """Return how many tasks have no worker."""
    return 1 if job.algorithm.place is Place.MASTER else 0
