"""Some 300 changed files, spread over all readers; `scripts/fuzz` makes as many more as one likes."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

import pytest

from pase.errors import PlanError
from tests.fuzz import harness
from tests.fuzz.__main__ import TARGETS
from tests.fuzz.harness import Outcome, Target, problem_of, run

INPUTS = 300
ROOT = Path(__file__).parents[2]


@cache
def _outcomes(names: tuple[str, ...]) -> Any:
    """Return what came of all inputs, by target."""
    # A process of its own: this one may have threads, and frameworks that take memory.
    targets = [text for name in names for text in ("--target", name)]
    count = round(INPUTS * sum(t.share for t in TARGETS if t.name in names) / sum(t.share for t in TARGETS))
    finished = subprocess.run(
        [sys.executable, "-m", "tests.fuzz", "--inputs", str(count), "--json", *targets],
        cwd=ROOT,
        env={**os.environ, "OPENBLAS_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert finished.stdout, finished.stderr
    return json.loads(finished.stdout)


PLAIN = tuple(target.name for target in TARGETS if target.name != "keras")


@pytest.mark.parametrize("name", [*PLAIN, pytest.param("keras", marks=pytest.mark.full)])  # Keras takes long to load
def test_a_reader_gives_a_result_or_one_clean_line(name: str) -> None:
    found = _outcomes(PLAIN if name in PLAIN else (name,))[name]
    assert found["failures"] == []
    assert found["accepted"] + found["refused"] == found["inputs"]
    assert found["accepted"] > 0
    assert found["refused"] > 0


# -- the harness itself


class _OtherError(PlanError):
    """One that says what it was given as it is."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __str__(self) -> str:
        return self.text


def _busy() -> None:
    while True:
        pass


def _raise(error: Exception) -> NoReturn:
    raise error


WAYS: dict[str, tuple[Callable[[], object], str]] = {
    "well": (lambda: None, ""),
    "refused": (lambda: _raise(PlanError("no plan")), ""),
    "traceback": (lambda: _raise(KeyError("x")), "KeyError"),
    "lines": (lambda: _raise(_OtherError("two\nlines")), "a message of characters that are not printable"),
    "long": (lambda: _raise(_OtherError("x" * 1001)), "a message of 1,001 characters"),
    "abort": (os.abort, signal.Signals.SIGABRT.name),
    "exit": (lambda: os._exit(3), "exit status 3"),
    "memory": (lambda: bytearray(1 << 34), "MemoryError"),
    "asleep": (lambda: time.sleep(60), "more than 3 s"),
    "busy": (_busy, "more than 0 s of CPU time"),
}
"""What an input may do, and what is said of it."""


def test_each_failure_is_that_of_its_input(monkeypatch: pytest.MonkeyPatch) -> None:
    ways = list(WAYS.values())
    monkeypatch.setattr(harness, "generator", lambda _target, _seed, number: number)

    def read(number: Any, _folder: Path) -> None:
        ways[number][0]()

    def outcome(first: int, count: int) -> Outcome:
        return run(Target(name="fails", prepare=lambda: read), read, seed=0, first=first, count=count)

    with monkeypatch.context() as patch:
        patch.setattr(harness, "WALL_S", 3.0)
        found = outcome(0, len(ways) - 1)
    # The last one takes time, of which a machine that is at work has less than the clock.
    monkeypatch.setattr(harness, "CPU_S", 0)
    found.add(outcome(len(ways) - 1, 1))
    assert (found.accepted, found.refused) == (1, 1)
    expected = [(number, what) for number, (_, what) in enumerate(ways) if what]
    assert [failure.number for failure in found.failures] == [number for number, _ in expected]
    for failure, (_, what) in zip(found.failures, expected, strict=True):
        assert failure.what.startswith(what)


def test_an_input_is_the_same_whenever_it_is_made() -> None:
    assert [harness.generator("plan", 3, 7).random() for _ in range(2)] == [
        harness.generator("plan", 3, 7).random()
    ] * 2
    assert problem_of(PlanError("as it is to be")) == ""
