"""What workers do, and whoever keeps the centre, whatever the algorithm: steps, tests, states, and where time goes."""

import json
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol

import numpy as np

from pase.easgd.algorithms import Array, MasterState, Place, WorkerState, changed
from pase.easgd.job import Job, WorkerProgress
from pase.easgd.messages import Endpoint, Kind, Message
from pase.errors import TrainingError

MOST_REFUSED = 3
"""An asynchronous worker whose gradients were not finite so many times one after another ends."""


class StopAskedError(Exception):
    """The coordinator asked this rank to end at once."""


# -- what workers compute with: training knows nothing else of networks


@dataclass(frozen=True, slots=True, kw_only=True)
class Gradient:
    """What a replica found of a batch.

    vector: [n]. loss, accuracy: before the step; None where there is none. data_s: how long it took to have the batch.
    """

    loss: float
    vector: Array
    accuracy: float | None = None
    data_s: float = 0.0


class Objective(Protocol):
    """One worker's replica and its share of the data.

    batch_size: examples of a step. May be called by one thread at a time, not always the same one.
    """

    @property
    def batch_size(self) -> int: ...

    def gradient(self, weights: Array, step: int) -> Gradient:
        """Return the gradient at weights [n] on this worker's batch of a step, counted from 0."""
        ...


class Evaluator(Protocol):
    """Tests weights on data that are not trained on."""

    def evaluate(self, weights: Array) -> tuple[float, float | None, int]:
        """Return (loss, accuracy, number of examples) of weights [n]."""
        ...


# -- where time goes


class Part(StrEnum):
    """The parts of the time of a step: the columns of You et al. 2017, Table 3, named as `easgd-model` names them."""

    WORKER_EXCHANGE = "worker_exchange_s"
    """gpu-gpu para: exchanging weights or gradients, or waiting to, where the centre is with a worker."""
    DATA = "data_s"
    """cpu-gpu data: having the batch."""
    HOST_EXCHANGE = "host_exchange_s"
    """cpu-gpu para: the same as the first, where the centre is with a master."""
    COMPUTE = "compute_s"
    """for/backward: loss and gradient."""
    WORKER_UPDATE = "worker_update_s"
    """gpu update: a worker's weights, and a centre that is with a worker."""
    HOST_UPDATE = "host_update_s"
    """cpu update: the centre, by a master."""


EXCHANGES = (Part.WORKER_EXCHANGE, Part.HOST_EXCHANGE)


class Clock:
    """Where the time of one rank goes since it began.

    What is overlapped with a rank's own computation is none of its time: hidden_s. now: a monotonic clock, in seconds.
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self.now = now
        self.hidden_s = 0.0
        self._began_s = now()
        self._parts_s = dict.fromkeys(Part, 0.0)
        self._lap: dict[str, float] = {}

    @property
    def time_s(self) -> float:
        """Time since the beginning."""
        return self.now() - self._began_s

    @property
    def communication_s(self) -> float:
        """The time that exchanges took, without what the rank's own computation hid."""
        return sum(self._parts_s[part] for part in EXCHANGES)

    @contextmanager
    def measuring(self, part: Part) -> Iterator[None]:
        """Count what happens within as a part; not to be nested."""
        begin_s = self.now()
        try:
            yield
        finally:
            self._parts_s[part] += self.now() - begin_s

    def move(self, time_s: float, giver: Part, taker: Part) -> None:
        """Count some of the time of a part as another one's."""
        self._parts_s[giver] -= time_s
        self._parts_s[taker] += time_s

    def parts(self) -> dict[str, float]:
        """Return the seconds of each part, ``other_s``, which no part has, ``time_s``, their sum, and ``hidden_s``."""
        time_s = self.time_s
        parts_s = {part.value: seconds for part, seconds in self._parts_s.items()}
        other_s = time_s - sum(parts_s.values())
        return {**parts_s, "other_s": other_s, "time_s": time_s, "hidden_s": self.hidden_s}

    def lap(self) -> dict[str, float]:
        """Return `parts` of the time since it was asked for last."""
        before, self._lap = self._lap, self.parts()
        return {name: seconds - before.get(name, 0.0) for name, seconds in self._lap.items()}


def exchange_part(job: Job) -> Part:
    """Return which part the exchanges of a job are."""
    return Part.HOST_EXCHANGE if job.algorithm.place is Place.MASTER else Part.WORKER_EXCHANGE


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerOutcome:
    """What a worker did.

    communication_s: waited for exchanges. num_messages, num_bytes: sent by it in exchanges. parts: see `Clock.parts`.
    """

    num_steps: int
    time_s: float
    communication_s: float
    num_messages: int
    num_bytes: int
    parts: dict[str, float]

    @property
    def communication_share(self) -> float:
        """The share of its time that exchanges took."""
        return self.communication_s / max(self.time_s, 1e-9)


# -- what is told of states


def joined(weights: Array, velocity: Array | None) -> Array:
    """Return weights and, where there is one, the velocity behind them, as one vector."""
    return weights if velocity is None else np.concatenate([weights, velocity])


def parted(vector: Array, *, has_velocity: bool) -> tuple[Array, Array | None]:
    """Return the weights and the velocity of a vector that `joined` made."""
    half = len(vector) // 2
    return (vector[:half], vector[half:]) if has_velocity else (vector, None)


def is_finite(vector: Array) -> bool:
    """Whether all numbers are finite; exact fractions are."""
    return vector.dtype == object or bool(np.isfinite(vector).all())


@dataclass(slots=True)
class Keeper:
    """Whoever keeps the centre. num_events: done so far."""

    job: Job
    endpoint: Endpoint
    state: MasterState
    num_events: int = 0
    clock: Clock = field(default_factory=Clock)

    def update(self, total: Array, num_workers: int) -> None:
        """Change the centre by the sum of what some workers sent."""
        is_host = self.job.algorithm.place is Place.MASTER
        with self.clock.measuring(Part.HOST_UPDATE if is_host else Part.WORKER_UPDATE):
            self.state = changed(self.state, self.job.algorithm.master(self.job.rates, self.state, total, num_workers))

    def centre(self) -> Array:
        """Return the centre, which nobody changes afterwards."""
        return self.state.centre

    def tell(self, kind: Kind, workers: Collection[int]) -> None:
        """Tell the coordinator the state, for a checkpoint or in the end. workers: those that take part."""
        told = {
            "role": "master",
            "workers": sorted(workers),
            "time_s": self.clock.time_s,
            "num_messages": self.endpoint.tally.exchanged_messages,
            "num_bytes": self.endpoint.tally.exchanged_bytes,
            "parts": self.clock.parts(),
        }
        vector = joined(self.centre(), self.state.velocity)
        self.endpoint.send(self.job.coordinator, kind, vector, number=self.num_events, text=json.dumps(told))

    def have_tested(self) -> Message | None:
        """Have the centre tested; where it depends on that how to go on, wait for the answer: TESTED, or STOP."""
        text = json.dumps({"time_s": self.clock.time_s})
        self.endpoint.send(self.job.coordinator, Kind.TEST, self.centre(), number=self.num_events, text=text)
        if self.job.until_accuracy is None:
            return None
        return self.endpoint.receive(lambda message: message.kind in (Kind.TESTED, Kind.STOP))


# -- workers

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

    @contextmanager
    def exchanging(self) -> Iterator[None]:
        """Count what happens within as exchanging."""
        with self.clock.measuring(exchange_part(self.job)):
            yield

    def gradient(self) -> Gradient:
        """Return the gradient at its weights; TrainingError where it is not finite."""
        found, problem = self._computed()
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
        found, problem = self._computed()
        if not problem:
            self._num_refused = 0
            return found
        self._num_refused += 1
        text = json.dumps({"worker": self.number, "step": self.progress.num_steps + 1, "what": problem})
        self.endpoint.send(self.job.coordinator, Kind.REFUSED, text=text)
        if self._num_refused == MOST_REFUSED:
            raise TrainingError(
                f"{self.called}: {problem}, {MOST_REFUSED} times in a row; this worker takes no more part"
            )
        return None

    def _computed(self) -> tuple[Gradient, str]:
        """Return the gradient, and what is wrong with it."""
        with self.clock.measuring(Part.COMPUTE):
            found = self.objective.gradient(self.weights, self.progress.num_steps)
            problem = "" if is_finite(found.vector) else "the gradient is not finite"
            if not np.isfinite(found.loss):
                problem = f"the loss is {found.loss}"
        self.clock.move(found.data_s, Part.COMPUTE, Part.DATA)
        return found, problem

    def step(self, found: Gradient | None, centre: Array) -> None:
        """Take a step with a gradient and the centre; with None, only pass the batch over.

        Raises TrainingError where the weights would not be finite any more.
        """
        state = self.progress.state
        if found is not None:
            # What overflows is found right below; a warning would say less.
            with self.clock.measuring(Part.WORKER_UPDATE), np.errstate(over="ignore", invalid="ignore"):
                state = self.job.algorithm.worker(self.job.rates, state, found.vector, centre)
                is_usable = is_finite(state.weights)
            if not is_usable:
                raise TrainingError(
                    f"{self.called}: the weights after the step are not finite; use a smaller learning rate; the step "
                    "was not taken, nothing of it is kept"
                )
            self._last = found
            self._keep(found.vector, centre, state)
        self.progress = WorkerProgress(state=state, num_steps=self.progress.num_steps + 1)
        if self._last is not None and self.progress.num_steps % self.job.report_every == 0:
            self._report(self._last)

    def _report(self, found: Gradient) -> None:
        """Have the coordinator show a step."""
        num_examples = (self.progress.num_steps - self._first_step) * self.objective.batch_size
        time_s = self.clock.time_s
        event = {
            "event": "step",
            "worker": self.number,
            "step": self.progress.num_steps,
            "loss": found.loss,
            "accuracy": found.accuracy,
            "communication_share": self.clock.communication_s / max(time_s, 1e-9),
            "examples_per_s": num_examples / time_s,
            "time_s": time_s,
            "parts": self.clock.lap(),
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
        state = joined(self.weights, self.progress.state.velocity)
        text = json.dumps({"role": "worker", "num_steps": self.progress.num_steps})
        self.endpoint.send(self.job.coordinator, Kind.STATE, state, number=number, text=text)

    def tell_end(self) -> None:
        """Send the coordinator what it did in all."""
        parts = self.clock.parts()
        told: dict[str, Any] = {
            "role": "worker",
            "num_steps": self.progress.num_steps,
            "time_s": parts["time_s"],
            "communication_s": self.clock.communication_s,
            "num_messages": self.endpoint.tally.exchanged_messages,
            "num_bytes": self.endpoint.tally.exchanged_bytes,
            "parts": parts,
        }
        self.endpoint.send(self.job.coordinator, Kind.ENDED, text=json.dumps(told))
