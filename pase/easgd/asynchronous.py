"""Asynchronous methods: a master who serves workers, each of whom exchanges with it alone and waits for nobody else."""

import json
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue
from types import MappingProxyType

import numpy as np

from pase.easgd.actors import Keeper, Part, Worker, is_finite
from pase.easgd.algorithms import Array, Exchange, MasterState, Sends
from pase.easgd.messages import Kind, Message
from pase.errors import TrainingError

_GONE = frozenset({Kind.LOST, Kind.FAILED})

# -- workers


def run_worker(worker: Worker) -> None:
    """Take steps until the master says that it is enough."""
    algorithm = worker.job.algorithm
    if algorithm.exchange is Exchange.ROUND_ROBIN:
        _in_turn(worker)
    elif algorithm.sends is Sends.WEIGHTS:
        _send_weights(worker)
    else:
        _send_gradients(worker)
    worker.tell_end()


def _send_weights(worker: Worker) -> None:
    """Async EASGD (Section 5.1): the weights go to the master, the gradient is computed while its answer comes."""
    while True:
        _send(worker, Kind.SENT, worker.weights)
        found = worker.gradient_or_refusal()
        centre = _centre(worker)
        if centre is None:
            return
        worker.step(found, centre)


def _send_gradients(worker: Worker) -> None:
    """Async SGD (Section 3.1): the gradient at the copy goes to the master, the new weights come back."""
    while True:
        found = worker.gradient_or_refusal()
        if found is None:
            # A copy of the master's weights cannot be wrong for every batch: go on with the next one.
            worker.step(None, worker.weights)
            continue
        _send(worker, Kind.SENT, found.vector)
        centre = _centre(worker)
        if centre is None:
            return
        worker.step(found, centre)


def _in_turn(worker: Worker) -> None:
    """Original EASGD (Algorithm 1, lines 11 to 14): nothing happens until the centre comes."""
    while (centre := _centre(worker)) is not None:
        found = worker.gradient_or_refusal()
        if found is None:
            _send(worker, Kind.REFUSED, None)
        else:
            _send(worker, Kind.SENT, worker.weights)
        worker.step(found, centre)


def _send(worker: Worker, kind: Kind, vector: Array | None) -> None:
    with worker.exchanging():
        worker.endpoint.send(worker.job.master, kind, vector)


def _centre(worker: Worker) -> Array | None:
    """Wait for the centre and return it; None where the training is over.

    What the coordinator wants to know of the state comes in order with the centres: so it is the state after the last
    exchange that the master counted before.
    """
    heard = (Kind.CENTRE, Kind.STATE_WANTED, Kind.STOP)
    while True:
        with worker.exchanging():
            message = worker.endpoint.receive(lambda message: message.kind in heard)
        if message.kind is not Kind.STATE_WANTED:
            return message.vector if message.kind is Kind.CENTRE else None
        worker.tell_state(message.number)


# -- the master


def _is_for_now(expected: int | None, message: Message) -> bool:
    """Whether a message is to be looked at while a worker is expected; None for any."""
    if message.kind in (Kind.SENT, Kind.REFUSED):
        return expected in (None, message.sender)
    return message.kind in _GONE or message.kind is Kind.STOP


@dataclass(slots=True)
class Master(Keeper):
    """Serves one worker at a time, in the order in which they come or in the one that the job names.

    live: workers that may still come.
    """

    live: set[int] = field(default_factory=set)
    _turn: int = 0
    _is_over: bool = False

    def __post_init__(self) -> None:
        self.live = set(range(self.job.num_workers))
        self._turn = self.num_events

    def run(self) -> None:
        """Serve until all events are done; TrainingError where no worker is left."""
        while self.num_events < self.job.num_events and not self._is_over:
            if not self.live:
                raise TrainingError(f"no worker is left after {self.num_events} of {self.job.num_events} events")
            expected = self._expected(self.job.arrivals)
            with self.clock.measuring(Part.HOST_EXCHANGE):
                self._invite(expected)
                message = self.endpoint.receive(partial(_is_for_now, expected))
            if message.kind is Kind.STOP:
                break
            if message.kind in _GONE:
                self.live.discard(message.sender)
            elif message.kind is Kind.REFUSED:
                # A turn without a step: it counts, so that whose turn it is follows from the number of events.
                self._count()
            else:
                assert message.vector is not None
                if is_finite(message.vector):
                    self._serve(message.sender, message.vector)
                else:
                    self._refuse(message.sender)
        self._settle()
        if self.job.is_last_save_due(self.num_events):
            self._save()
        for worker in sorted(self.live):
            self.endpoint.send(worker, Kind.STOP)
        self.tell(Kind.ENDED, self.live)

    # -- who is next

    def _expected(self, order: tuple[int, ...]) -> int | None:
        """Return the worker to be served, None for whoever comes first."""
        if not order:
            return None
        while order[self._turn % len(order)] not in self.live:
            self._turn += 1
        return order[self._turn % len(order)]

    def _invite(self, worker: int | None) -> None:
        """Tell a worker that it is its turn; those that come of themselves need not be told."""

    # -- what is done

    def _serve(self, worker: int, vector: Array) -> None:
        """Answer a worker and change the centre."""
        is_before = self.job.algorithm.sends is Sends.WEIGHTS
        if is_before:
            # At once: what the worker needs is the centre before the change.
            self._answer(worker)
        self.update(vector, 1)
        if not is_before:
            self._answer(worker)
        self._count()

    def _answer(self, worker: int) -> None:
        with self.clock.measuring(Part.HOST_EXCHANGE):
            self.endpoint.send(worker, Kind.CENTRE, self.centre())

    def _refuse(self, worker: int) -> None:
        """Leave the centre as it is; the worker gets it, so that it can go on."""
        text = json.dumps({"worker": worker, "step": None, "what": "it sent values that are not finite"})
        self.endpoint.send(self.job.coordinator, Kind.REFUSED, text=text)
        self._answer(worker)

    def _count(self) -> None:
        self.num_events += 1
        self._turn += 1
        if self.job.is_due(self.job.save_every, self.num_events):
            self._save()
        if self.job.is_due(self.job.test_every, self.num_events):
            if self.job.until_accuracy is not None:
                self._settle()
            verdict = self.have_tested()
            if verdict is not None:
                self._is_over = verdict.kind is Kind.STOP or bool(verdict.number)

    def _settle(self) -> None:
        """Wait until nothing is half done."""

    def _save(self) -> None:
        """Tell the coordinator the state, and have all workers tell theirs after the last answer that they got."""
        self._settle()
        self.tell(Kind.STATE, self.live)
        for worker in sorted(self.live):
            self.endpoint.send(worker, Kind.STATE_WANTED, number=self.num_events)


class RoundRobin(Master):
    """Serves the workers in turn: one begins when the one before has sent its weights (Algorithm 1)."""

    __slots__ = ("_invited",)

    def __post_init__(self) -> None:
        Master.__post_init__(self)
        self._invited: int | None = None

    def _expected(self, order: tuple[int, ...]) -> int | None:
        return Master._expected(self, order or tuple(range(self.job.num_workers)))

    def _invite(self, worker: int | None) -> None:
        if self._invited != self._turn:
            assert worker is not None
            self._invited = self._turn
            # Line 11: the centre goes to the worker whose turn it is.
            self.endpoint.send(worker, Kind.CENTRE, self.state.centre)

    def _answer(self, worker: int) -> None:
        """It has its answer already."""

    def _refuse(self, worker: int) -> None:
        Master._refuse(self, worker)
        self._count()


class LockFree(Master):
    """Serves all that come at the same time, each in a thread of its own, that change the centre without a lock.

    What a thread reads may be half of another one's change, and changes may be lost: that is the method (Section 3.2).
    The time of changes is hidden: they go on beside the master's waiting, and beside one another.
    """

    __slots__ = ("_handed", "_idle", "_num_busy")

    def __post_init__(self) -> None:
        Master.__post_init__(self)
        # A centre of its own, which is changed in place.
        self.state = MasterState(centre=self.state.centre.copy(), velocity=self.state.velocity)
        self._handed: dict[int, SimpleQueue[Array | None]] = {}
        self._idle = threading.Condition()
        self._num_busy = 0

    def run(self) -> None:
        """Serve until all events are done; TrainingError where no worker is left."""
        try:
            Master.run(self)
        finally:
            for handed in self._handed.values():
                handed.put(None)

    def centre(self) -> Array:
        """Return a copy of the centre."""
        return self.state.centre.copy()

    def _serve(self, worker: int, vector: Array) -> None:
        if worker not in self._handed:
            self._handed[worker] = SimpleQueue()
            name = f"handler of worker {worker}"
            threading.Thread(target=self._handle, args=(worker, self._handed[worker]), name=name, daemon=True).start()
        with self._idle:
            self._num_busy += 1
        self._handed[worker].put(vector)
        if self.job.arrivals:
            # In the order that was asked for: one is done before the next begins.
            self._settle()
        self._count()

    def _handle(self, worker: int, handed: "SimpleQueue[Array | None]") -> None:
        algorithm, rates, centre = self.job.algorithm, self.job.rates, self.state.centre
        while (vector := handed.get()) is not None:
            update_s = 0.0
            try:
                if algorithm.sends is Sends.WEIGHTS:
                    self.endpoint.send(worker, Kind.CENTRE, centre.copy())
                begin_s = self.clock.now()
                np.add(centre, algorithm.master(rates, self.state, vector, 1).centre, out=centre)
                update_s = self.clock.now() - begin_s
                if algorithm.sends is Sends.GRADIENTS:
                    self.endpoint.send(worker, Kind.CENTRE, centre.copy())
            except Exception as error:  # noqa: BLE001 its worker would wait for ever, and nobody know why
                text = f"the master: {type(error).__name__}: {error}"
                self.endpoint.send(self.job.coordinator, Kind.FAILED, text=text)
            finally:
                with self._idle:
                    self.clock.hidden_s += update_s
                    self._num_busy -= 1
                    self._idle.notify_all()

    def _settle(self) -> None:
        with self._idle:
            self._idle.wait_for(lambda: self._num_busy == 0)


MASTERS: Mapping[Exchange, Callable[..., Master]] = MappingProxyType(
    {Exchange.ROUND_ROBIN: RoundRobin, Exchange.FIRST_COME: Master, Exchange.LOCK_FREE: LockFree}
)
"""Who serves, by how an algorithm exchanges."""
