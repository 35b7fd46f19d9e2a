"""Many inputs for one reader, each made from its seed and read in a forked process with limits.

A reader may give a correct result or refuse its input by a PaseError of one line. All else is a failure: another
exception, a warning, a process that dies, that takes too long, or that needs too much memory.
"""

import faulthandler
import json
import mmap
import os
import resource
import select
import signal
import struct
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from pase.errors import PaseError

MOST_CHARACTERS = 1000
"""Of a message."""

CPU_S = 10
WALL_S = 40.0
MEMORY_BYTES = 1 << 30
"""Limits of one input: time, and memory beyond what the process has before it."""

Reader = Callable[[Random, Path], None]
"""Makes one input from random numbers and has it read; may write to a folder of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A reader of a stranger's files. prepare: does what is done once, and returns what is done for each input.

    share: of the suite's inputs, relative to other targets.
    """

    name: str
    prepare: Callable[[], Reader]
    share: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """What one input did that no input may do."""

    target: str
    seed: int
    number: int
    what: str


@dataclass(slots=True)
class Outcome:
    """Counts of inputs, and those that failed."""

    accepted: int = 0
    refused: int = 0
    failures: list[Failure] = field(default_factory=list)

    @property
    def total(self) -> int:
        """How many inputs there were."""
        return self.accepted + self.refused + len(self.failures)

    def add(self, other: "Outcome") -> None:
        """Add the counts of other inputs."""
        self.accepted += other.accepted
        self.refused += other.refused
        self.failures += other.failures


def generator(target: str, seed: int, number: int) -> Random:
    """Return the random numbers of one input: the same wherever and whenever it is made."""
    return Random(f"{target}/{seed}/{number}")


def problem_of(error: BaseException) -> str:
    """Return what is wrong with an exception that a reader ended with, "" for a refusal as it is to be."""
    text = str(error)
    if not isinstance(error, PaseError):
        frames = traceback.extract_tb(error.__traceback__)
        own = [frame for frame in frames if f"{os.sep}pase{os.sep}" in frame.filename] or frames
        where = f"{own[-1].filename.rpartition(f'{os.sep}pase{os.sep}')[2]}:{own[-1].lineno}" if own else "?"
        return f"{type(error).__name__} at {where}: {text[:300]!r}"
    if not text.strip():
        return "a message without text"
    if len(text) > MOST_CHARACTERS:
        return f"a message of {len(text):,} characters: {text[:200]!r}…"
    if not text.isprintable():
        return f"a message of characters that are not printable: {text[:300]!r}"
    return ""


def run(target: Target, reader: Reader, *, seed: int, first: int, count: int, until_s: float | None = None) -> Outcome:
    """Read `count` inputs from the one of number `first` on, in forked processes; until_s: of time.monotonic."""
    outcome = Outcome()
    at, end = first, first + count
    with tempfile.TemporaryDirectory(prefix="pase-fuzz-") as folder:
        while at < end and (until_s is None or time.monotonic() < until_s):
            at = _worker(target, reader, seed, at, end, outcome, Path(folder), until_s)
    return outcome


_COUNTS = struct.Struct("=qqqd")  # number of the input at work, accepted, refused, when it began


def _worker(
    target: Target,
    reader: Reader,
    seed: int,
    first: int,
    end: int,
    outcome: Outcome,
    folder: Path,
    until_s: float | None,
) -> int:
    """Fork a process that reads inputs until it dies or has no more; return the number of the next one."""
    shared = mmap.mmap(-1, _COUNTS.size)
    shared[:] = _COUNTS.pack(first, 0, 0, time.monotonic())
    receiving, sending = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of threads, which numpy's BLAS and JAX have
        child = os.fork()
    if child == 0:
        status = 1
        try:
            os.close(receiving)
            os.setpgid(0, 0)
            _work(target, reader, seed, first, end, shared, sending, folder, until_s)
            status = 0
        finally:
            os._exit(status)
    os.close(sending)
    died = _wait(child, receiving, shared, outcome)
    number, accepted, refused, _ = _COUNTS.unpack(shared[:])
    shared.close()
    outcome.accepted += accepted
    outcome.refused += refused
    if died:
        outcome.failures.append(Failure(target=target.name, seed=seed, number=number, what=died))
        return int(number) + 1
    return int(number)


def _wait(child: int, receiving: int, shared: mmap.mmap, outcome: Outcome) -> str:
    """Wait for a process, and return how it died, "" if it did not; failures that it reports are added."""
    kept = b""
    killed = False
    with os.fdopen(receiving, "rb", buffering=0) as stream:
        while True:
            ready, _, _ = select.select([stream], [], [], 1.0)
            if ready:
                data = stream.read(1 << 16)
                if not data:
                    break
                kept += data
            elif time.monotonic() - _COUNTS.unpack(shared[:])[3] > WALL_S:
                killed = True
                with suppress(ProcessLookupError):
                    os.killpg(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    outcome.failures += [Failure(**json.loads(line)) for line in kept.splitlines() if line]
    if killed:
        return f"more than {WALL_S:g} s"
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        return f"more than {CPU_S} s of CPU time" if number == signal.SIGXCPU else signal.Signals(number).name
    return "" if os.waitstatus_to_exitcode(status) == 0 else f"exit status {os.waitstatus_to_exitcode(status)}"


def _work(
    target: Target,
    reader: Reader,
    seed: int,
    first: int,
    end: int,
    shared: mmap.mmap,
    sending: int,
    folder: Path,
    until_s: float | None,
) -> None:
    faulthandler.disable()  # pytest's: a process that ends is told by its parent
    null = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(null, stream)
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    limit = pages * resource.getpagesize() + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 28, 1 << 28))
    warnings.simplefilter("error")
    accepted = refused = 0
    number = first
    while number < end:
        now = time.monotonic()
        if until_s is not None and now > until_s:
            break
        shared[:] = _COUNTS.pack(number, accepted, refused, now)
        used = resource.getrusage(resource.RUSAGE_SELF)
        resource.setrlimit(
            resource.RLIMIT_CPU, (int(used.ru_utime + used.ru_stime) + CPU_S + 1, resource.RLIM_INFINITY)
        )
        problem, refusal = outcome_of(reader, generator(target.name, seed, number), folder)
        if problem:
            failure = {"target": target.name, "seed": seed, "number": number, "what": problem}
            os.write(sending, json.dumps(failure).encode() + b"\n")
        elif refusal:
            refused += 1
        else:
            accepted += 1
        number += 1
    shared[:] = _COUNTS.pack(number, accepted, refused, time.monotonic())


def outcome_of(reader: Reader, numbers: Random, folder: Path) -> tuple[str, bool]:
    """Have one input read; return what is wrong ("" for nothing), and whether it was refused."""
    try:
        reader(numbers, folder)
    except Exception as error:  # noqa: BLE001 whatever it is
        return problem_of(error), True
    return "", False


def chunks(total: int, size: int) -> Iterator[tuple[int, int]]:
    """Yield (first, count) of pieces of a number of inputs."""
    for first in range(0, total, size):
        yield first, min(size, total - first)
