"""A tiny event simulation: workers, a master and trees, message by message; an oracle for the closed forms."""

import heapq
from collections.abc import Callable
from itertools import count


class Clock:
    """Runs what is planned, in the order of time and, at the same time, in that of planning."""

    def __init__(self) -> None:
        self.now = 0.0
        self._planned: list[tuple[float, int, Callable[[], None]]] = []
        self._number = count()

    def after(self, delay: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._planned, (self.now + delay, next(self._number), action))

    def run(self, until: Callable[[], bool]) -> float:
        while self._planned and not until():
            self.now, _, action = heapq.heappop(self._planned)
            action()
        return self.now


class Server:
    """Serves one at a time, in the order of arrival."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._busy = False
        self._waiting: list[tuple[float, Callable[[], None]]] = []

    def serve(self, time: float, done: Callable[[], None]) -> None:
        self._waiting.append((time, done))
        self._next()

    def _next(self) -> None:
        if self._busy or not self._waiting:
            return
        self._busy = True
        time, done = self._waiting.pop(0)

        def finished() -> None:
            self._busy = False
            done()
            self._next()

        self._clock.after(time, finished)


def queue(num_workers: int, stages: list[tuple[int | None, float]], rounds: int) -> float:
    """Return the time between two events of P workers that go round through stages for ever, once that is steady.

    stages: (number of a server that all share, or None for time of a worker's own, time).
    """
    clock = Clock()
    servers = {number: Server(clock) for number, _ in stages if number is not None}
    finished: list[float] = []

    def step(stage: int) -> None:
        if stage == len(stages):
            finished.append(clock.now)
            stage = 0
        number, time = stages[stage]
        if number is None:
            clock.after(time, lambda: step(stage + 1))
        else:
            servers[number].serve(time, lambda: step(stage + 1))

    for _ in range(num_workers):
        step(0)
    events = num_workers * rounds
    clock.run(lambda: len(finished) >= events)
    half = num_workers * (rounds // 2)
    return (finished[-1] - finished[half - 1]) / (len(finished) - half)


def round_robin(num_workers: int, parts: list[float]) -> float:
    """Return the time until every one of P workers had its turn, all of them holding one token."""
    clock, turns = Clock(), []

    def turn(worker: int, part: int) -> None:
        if part < len(parts):
            clock.after(parts[part], lambda: turn(worker, part + 1))
            return
        turns.append(worker)
        if worker + 1 < num_workers:
            turn(worker + 1, 0)

    turn(0, 0)
    time = clock.run(lambda: len(turns) == num_workers)
    assert turns == list(range(num_workers))
    return time


def broadcast(num_workers: int, message: float) -> tuple[float, int]:
    """Return the time until all P have it and the messages: whoever has it sends to one that has not, again and again.

    A reduction is the same, backwards in time.
    """
    clock, missing, sent = Clock(), list(range(1, num_workers)), [0]
    have = {0}

    def offer() -> None:
        if missing:
            target = missing.pop(0)
            sent[0] += 1

            def arrived() -> None:
                have.add(target)
                offer()  # the sender's next one
                offer()  # the receiver's first one

            clock.after(message, arrived)

    offer()
    time = clock.run(lambda: len(have) == num_workers)
    return (time, sent[0]) if num_workers > 1 else (0.0, 0)
