"""`Clock`: how much of a worker's time went by waiting for others, seen from its own computation."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass(slots=True)
class Clock:
    """The time of one rank since it began. waited_s: not spent on its own computation, what was overlapped excluded."""

    began_s: float = field(default_factory=time.perf_counter)
    waited_s: float = 0.0

    @property
    def time_s(self) -> float:
        """Time since the beginning."""
        return time.perf_counter() - self.began_s

    @property
    def waited_share(self) -> float:
        """The share of it that was spent waiting."""
        return self.waited_s / max(self.time_s, 1e-9)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count what happens within as waiting."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.waited_s += time.perf_counter() - begin
