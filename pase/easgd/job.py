"""`Job`: what is trained how, one value for every runtime; and `Snapshot`, all that training changes."""

from dataclasses import dataclass
from enum import Enum

from pase.easgd.algorithms import Algorithm
from pase.easgd.equations import Array, Rates
from pase.easgd.states import MasterState, WorkerState
from pase.errors import TrainingError


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
        for name, value in (
            ("the number of workers", self.num_workers),
            ("the number of steps", self.num_steps),
            ("report-every", self.report_every),
            ("test-every", self.test_every),
            ("save-every", self.save_every),
        ):
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

    @property
    def coordinator(self) -> int:
        """The coordinator's rank: who shows, tests and saves."""
        return self.num_workers + 1

    def is_due(self, every: int | None, event: int) -> bool:
        """Whether what happens every so many steps is due after an event, counted from 1; after the last one, too."""
        return every is not None and (event % (every * self.events_per_step) == 0 or event == self.num_events)


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
