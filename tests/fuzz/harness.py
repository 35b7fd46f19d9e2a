"""Many inputs for one reader, each made from its seed and read in a forked process with limits.

A reader may give a correct result or refuse its input by a PaseError of one line. All else is a failure: another
exception, a warning, a process that dies, that takes too long, or that needs too much memory.
"""

import faulthandler
import json
import os
import resource
import select
import signal
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
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
    outcome, at, end = Outcome(), first, first + count
    with tempfile.TemporaryDirectory(prefix="pase-fuzz-") as folder:
        while at < end and (until_s is None or time.monotonic() < until_s):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of threads, which numpy's BLAS and JAX have
                receiving, sending = os.pipe()
                child = os.fork()
            if child == 0:
                status = 1
                try:
                    os.close(receiving)
                    os.setpgid(0, 0)
                    _read_inputs(target, reader, seed, range(at, end), sending, Path(folder), until_s)
                    status = 0
                finally:
                    os._exit(status)
            os.close(sending)
            at = _heard(child, receiving, outcome, target, seed, at)
    return outcome


def _heard(child: int, receiving: int, outcome: Outcome, target: Target, seed: int, at: int) -> int:
    """Add what a process says of each input from one on until it ends, and how it died; return the next input."""

    def failed(what: str) -> None:
        outcome.failures.append(Failure(target=target.name, seed=seed, number=at, what=what))

    left, last_s, is_killed = b"", time.monotonic(), False
    with os.fdopen(receiving, "rb", buffering=0) as stream:
        while True:
            if not select.select([stream], [], [], 1.0)[0]:
                if time.monotonic() - last_s > WALL_S:
                    is_killed = True
                    with suppress(ProcessLookupError):
                        os.killpg(child, signal.SIGKILL)
                continue
            data = stream.read(1 << 16)
            if not data:
                break
            *lines, left = (left + data).split(b"\n")
            for line in lines:
                problem, is_refused = json.loads(line)
                if problem:
                    failed(problem)
                outcome.refused += is_refused and not problem
                outcome.accepted += not is_refused
                at += 1
            last_s = time.monotonic()
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code == 0:
        return at
    if is_killed:
        failed(f"more than {WALL_S:g} s")
    elif code == -signal.SIGXCPU:
        failed(f"more than {CPU_S} s of CPU time")
    else:
        failed(signal.Signals(-code).name if code < 0 else f"exit status {code}")
    return at + 1


def _read_inputs(
    target: Target, reader: Reader, seed: int, numbers: range, sending: int, folder: Path, until_s: float | None
) -> None:
    """Read inputs within the limits, and say of each what is wrong ("" for nothing), and whether it was refused."""
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
    for number in numbers:
        if until_s is not None and time.monotonic() > until_s:
            break
        used = resource.getrusage(resource.RUSAGE_SELF)
        most_s = int(used.ru_utime + used.ru_stime) + CPU_S + 1
        resource.setrlimit(resource.RLIMIT_CPU, (most_s, resource.RLIM_INFINITY))
        problem, is_refused = "", False
        try:
            reader(generator(target.name, seed, number), folder)
        except Exception as error:  # noqa: BLE001 whatever it is
            problem, is_refused = problem_of(error), True
        os.write(sending, json.dumps([problem, is_refused]).encode() + b"\n")
