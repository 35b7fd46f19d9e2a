"""What every worker does, whatever the algorithm: gradients that are checked, steps that are counted and told."""

import json
from dataclasses import asdict, dataclass, field

import numpy as np

from pase.easgd.clock import Clock
from pase.easgd.equations import Array
from pase.easgd.job import Job, WorkerProgress
from pase.easgd.messages import Endpoint, Kind
from pase.easgd.objective import Gradient, Objective
from pase.easgd.states import WorkerState
from pase.easgd.telling import joined
from pase.errors import TrainingError

MOST_REFUSED = 3
"""An asynchronous worker whose gradients were not finite so many times one after another ends."""


class StopAskedError(Exception):
    """The coordinator asked this rank to end at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerOutcome:
    """What a worker did. communication_s: waited for exchanges. num_messages, num_bytes: sent by it in exchanges."""

    num_steps: int
    time_s: float
    communication_s: float
    num_messages: int
    num_bytes: int

    @property
    def communication_share(self) -> float:
        """The share of its time that exchanges took."""
        return self.communication_s / max(self.time_s, 1e-9)


Trace = dict[str, Array]
"""Arrays [n] by name, ``worker 0, step 1: gradient``: what each step had, and what it made of it."""


@dataclass(slots=True)
class Worker:
    """A worker that takes steps. progress: after the last one. trace: what the arrays of its steps are added to."""

    job: Job
    number: int
    objective: Objective
    endpoint: Endpoint
    progress: WorkerProgress
    trace: Trace | None = None
    clock: Clock = field(default_factory=Clock)
    _first_step: int = 0
    _last: Gradient | None = None
    _num_refused: int = 0

    def __post_init__(self) -> None:
        self._first_step = self.progress.num_steps

    @property
    def weights(self) -> Array:
        """Its weights as they are now, [n]."""
        return self.progress.state.weights

    @property
    def called(self) -> str:
        """What messages call it, and the step that it is at."""
        return f"worker {self.number}, step {self.progress.num_steps + 1}"

    def gradient(self) -> Gradient:
        """Return the gradient at its weights; TrainingError where it is not finite."""
        found = self.objective.gradient(self.weights, self.progress.num_steps)
        problem = _problem(found)
        if problem:
            raise TrainingError(
                f"{self.called}: {problem}; use a smaller learning rate, or look for it in the data; the step was not "
                "taken, nothing of it is kept"
            )
        return found

    def gradient_or_refusal(self) -> Gradient | None:
        """Return the gradient at its weights; where it is not finite, say so and return None.

        Raises TrainingError where that happened several times in a row.
        """
        found = self.objective.gradient(self.weights, self.progress.num_steps)
        problem = _problem(found)
        if not problem:
            self._num_refused = 0
            return found
        self._num_refused += 1
        self.refuse(problem)
        if self._num_refused == MOST_REFUSED:
            raise TrainingError(
                f"{self.called}: {problem}, {MOST_REFUSED} times in a row; this worker takes no more part"
            )
        return None

    def refuse(self, problem: str) -> None:
        """Tell the coordinator that a step is not taken."""
        text = json.dumps({"worker": self.number, "step": self.progress.num_steps + 1, "what": problem})
        self.endpoint.send(self.job.coordinator, Kind.REFUSED, text=text)

    def step(self, found: Gradient | None, centre: Array) -> None:
        """Take a step with a gradient and the centre; with None, only pass the batch over.

        Raises TrainingError where the weights would not be finite any more.
        """
        state = self.progress.state
        if found is not None:
            # What overflows is found right below; a warning would say less.
            with np.errstate(over="ignore", invalid="ignore"):
                state = self.job.algorithm.worker(self.job.rates, state, found.vector, centre)
            if not is_finite(state.weights):
                raise TrainingError(
                    f"{self.called}: the weights after the step are not finite; use a smaller learning rate; the step "
                    "was not taken, nothing of it is kept"
                )
            self._last = found
            self._keep(found.vector, centre, state)
        self.progress = WorkerProgress(state=state, num_steps=self.progress.num_steps + 1)
        if self._last is not None and self.progress.num_steps % self.job.report_every == 0:
            num_examples = (self.progress.num_steps - self._first_step) * self.objective.batch_size
            event = {
                "event": "step",
                "worker": self.number,
                "step": self.progress.num_steps,
                "loss": self._last.loss,
                "accuracy": self._last.accuracy,
                "communication_share": self.clock.waited_share,
                "examples_per_s": num_examples / self.clock.time_s,
                "time_s": self.clock.time_s,
            }
            self.endpoint.send(self.job.coordinator, Kind.REPORT, text=json.dumps(event))

    def _keep(self, gradient: Array, centre: Array, after: WorkerState) -> None:
        """Add a step to the trace, where there is one; weights may be changed in place by then, so it has copies."""
        if self.trace is None:
            return
        before = self.progress.state
        arrays = {"weights": before.weights, "gradient": gradient, "centre": centre, "weights after": after.weights}
        if before.velocity is not None and after.velocity is not None:
            arrays |= {"velocity": before.velocity, "velocity after": after.velocity}
        self.trace |= {f"{self.called}: {name}": np.array(array) for name, array in arrays.items()}

    def tell_state(self, number: int) -> None:
        """Send the coordinator its state for the checkpoint of an event."""
        state = self.progress.state
        text = json.dumps({"role": "worker", "num_steps": self.progress.num_steps})
        self.endpoint.send(
            self.job.coordinator, Kind.STATE, joined(state.weights, state.velocity), number=number, text=text
        )

    def tell_end(self) -> None:
        """Send the coordinator what it did in all."""
        outcome = WorkerOutcome(
            num_steps=self.progress.num_steps,
            time_s=self.clock.time_s,
            communication_s=self.clock.waited_s,
            num_messages=self.endpoint.tally.exchanged_messages,
            num_bytes=self.endpoint.tally.exchanged_bytes,
        )
        text = json.dumps({"role": "worker", **asdict(outcome)})
        self.endpoint.send(self.job.coordinator, Kind.ENDED, text=text)


def _problem(found: Gradient) -> str:
    if not np.isfinite(found.loss):
        return f"the loss is {found.loss}"
    return "" if is_finite(found.vector) else "the gradient is not finite"


def is_finite(vector: Array) -> bool:
    """Whether all numbers are finite; exact fractions are."""
    return vector.dtype == object or bool(np.isfinite(vector).all())
