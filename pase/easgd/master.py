"""The master of asynchronous methods: who is served next, and what is done with what came."""

import json
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue
from types import MappingProxyType

import numpy as np

from pase.easgd.algorithms import Exchange, Sends
from pase.easgd.clock import Clock
from pase.easgd.equations import Array
from pase.easgd.job import Job
from pase.easgd.messages import Endpoint, Kind, Message
from pase.easgd.states import MasterState, changed
from pase.easgd.telling import have_tested, tell_state
from pase.easgd.worker import is_finite
from pase.errors import TrainingError

_GONE = frozenset({Kind.LOST, Kind.FAILED})


def _is_for_now(expected: int | None, message: Message) -> bool:
    """Whether a message is to be looked at while a worker is expected; None for any."""
    if message.kind in (Kind.SENT, Kind.REFUSED):
        return expected in (None, message.sender)
    return message.kind in _GONE or message.kind is Kind.STOP


@dataclass(slots=True)
class Master:
    """Serves one worker at a time, in the order in which they come or in the one that the job names.

    num_events: done so far. live: workers that may still come.
    """

    job: Job
    endpoint: Endpoint
    state: MasterState
    num_events: int = 0
    live: set[int] = field(default_factory=set)
    clock: Clock = field(default_factory=Clock)
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
            expected = self._expected()
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
                self._serve(message)
        self._end()

    # -- who is next

    def _expected(self) -> int | None:
        """Return the worker to be served, None for whoever comes first."""
        order = self.job.arrivals
        if not order:
            return None
        while order[self._turn % len(order)] not in self.live:
            self._turn += 1
        return order[self._turn % len(order)]

    def _invite(self, worker: int | None) -> None:
        """Tell a worker that it is its turn; those that come of themselves need not be told."""

    # -- what is done

    def _serve(self, message: Message) -> None:
        """Answer a worker and change the centre."""
        assert message.vector is not None
        if not is_finite(message.vector):
            self._refuse(message.sender)
            return
        algorithm, rates = self.job.algorithm, self.job.rates
        if algorithm.sends is Sends.WEIGHTS:
            # At once: what the worker needs is the centre before the change.
            self._answer(message.sender, self.state.centre)
        self.state = changed(self.state, algorithm.master(rates, self.state, message.vector, 1))
        if algorithm.sends is Sends.GRADIENTS:
            self._answer(message.sender, self.state.centre)
        self._count()

    def _answer(self, worker: int, centre: Array) -> None:
        self.endpoint.send(worker, Kind.CENTRE, centre)

    def _refuse(self, worker: int) -> None:
        """Leave the centre as it is; the worker gets it, so that it can go on."""
        what = "it sent values that are not finite"
        text = json.dumps({"worker": worker, "step": None, "what": what})
        self.endpoint.send(self.job.coordinator, Kind.REFUSED, text=text)
        self._answer(worker, self._centre())

    def _count(self) -> None:
        self.num_events += 1
        self._turn += 1
        if self.job.is_due(self.job.save_every, self.num_events):
            self._save()
        if self.job.is_due(self.job.test_every, self.num_events):
            self._test()

    def _test(self) -> None:
        """Have the centre tested; wait for it where it depends on that how to go on."""
        if self.job.until_accuracy is not None:
            self._settle()
        verdict = have_tested(self.job, self.endpoint, self._centre(), num_events=self.num_events, clock=self.clock)
        if verdict is not None:
            self._is_over = verdict.kind is Kind.STOP or bool(verdict.number)

    def _settle(self) -> None:
        """Wait until nothing is half done."""

    def _save(self) -> None:
        """Tell the coordinator the state, and have all workers tell theirs after the last answer that they got."""
        self._tell(Kind.STATE)
        for worker in sorted(self.live):
            self.endpoint.send(worker, Kind.STATE_WANTED, number=self.num_events)

    def _tell(self, kind: Kind) -> None:
        state = MasterState(centre=self._centre(), velocity=self.state.velocity)
        tell_state(
            self.job,
            self.endpoint,
            kind,
            state,
            num_events=self.num_events,
            workers=self.live,
            clock=self.clock,
        )

    def _centre(self) -> Array:
        """Return the centre, which nobody changes afterwards."""
        return self.state.centre

    def _end(self) -> None:
        if self.job.save_every is not None and not self.job.is_due(self.job.save_every, self.num_events):
            self._save()
        for worker in sorted(self.live):
            self.endpoint.send(worker, Kind.STOP)
        self._tell(Kind.ENDED)


class RoundRobin(Master):
    """Serves the workers in turn: one begins when the one before has sent its weights (Algorithm 1)."""

    __slots__ = ("_invited",)

    def __post_init__(self) -> None:
        Master.__post_init__(self)
        self._invited: int | None = None

    def _expected(self) -> int:
        order = self.job.arrivals or tuple(range(self.job.num_workers))
        while order[self._turn % len(order)] not in self.live:
            self._turn += 1
        return order[self._turn % len(order)]

    def _invite(self, worker: int | None) -> None:
        if self._invited != self._turn:
            assert worker is not None
            self._invited = self._turn
            # Line 11: the centre goes to the worker whose turn it is.
            self.endpoint.send(worker, Kind.CENTRE, self.state.centre)

    def _answer(self, worker: int, centre: Array) -> None:
        """It has its answer already."""

    def _refuse(self, worker: int) -> None:
        Master._refuse(self, worker)
        self._count()


class LockFree(Master):
    """Serves all that come at the same time, each in a thread of its own, that change the centre without a lock.

    What a thread reads may be half of another one's change, and changes may be lost: that is the method (Section 3.2).
    """

    __slots__ = ("_handed", "_idle", "_num_busy")

    def __post_init__(self) -> None:
        Master.__post_init__(self)
        # A centre of its own, which is changed in place.
        self.state = MasterState(centre=self.state.centre.copy(), velocity=self.state.velocity)
        self._handed: dict[int, SimpleQueue[Message | None]] = {}
        self._idle = threading.Condition()
        self._num_busy = 0

    def run(self) -> None:
        """Serve until all events are done; TrainingError where no worker is left."""
        try:
            Master.run(self)
        finally:
            for handed in self._handed.values():
                handed.put(None)

    def _serve(self, message: Message) -> None:
        assert message.vector is not None
        if not is_finite(message.vector):
            self._refuse(message.sender)
            return
        if message.sender not in self._handed:
            self._handed[message.sender] = SimpleQueue()
            name = f"handler of worker {message.sender}"
            threading.Thread(target=self._handle, args=(self._handed[message.sender],), name=name, daemon=True).start()
        with self._idle:
            self._num_busy += 1
        self._handed[message.sender].put(message)
        if self.job.arrivals:
            # In the order that was asked for: one is done before the next begins.
            self._settle()
        self._count()

    def _handle(self, handed: "SimpleQueue[Message | None]") -> None:
        algorithm, rates, centre = self.job.algorithm, self.job.rates, self.state.centre
        while (message := handed.get()) is not None:
            assert message.vector is not None
            try:
                if algorithm.sends is Sends.WEIGHTS:
                    self._answer(message.sender, centre.copy())
                change = algorithm.master(rates, self.state, message.vector, 1)
                np.add(centre, change.centre, out=centre)
                if algorithm.sends is Sends.GRADIENTS:
                    self._answer(message.sender, centre.copy())
            except Exception as error:  # noqa: BLE001 its worker would wait for ever, and nobody know why
                text = f"the master: {type(error).__name__}: {error}"
                self.endpoint.send(self.job.coordinator, Kind.FAILED, text=text)
            finally:
                with self._idle:
                    self._num_busy -= 1
                    self._idle.notify_all()

    def _settle(self) -> None:
        with self._idle:
            self._idle.wait_for(lambda: self._num_busy == 0)

    def _centre(self) -> Array:
        return self.state.centre.copy()

    def _save(self) -> None:
        # A moment that was: nothing half done.
        self._settle()
        Master._save(self)

    def _end(self) -> None:
        self._settle()
        Master._end(self)


MASTERS: Mapping[Exchange, type[Master]] = MappingProxyType(
    {Exchange.ROUND_ROBIN: RoundRobin, Exchange.FIRST_COME: Master, Exchange.LOCK_FREE: LockFree}
)
"""Who serves, by how an algorithm exchanges."""
