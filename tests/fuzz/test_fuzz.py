"""Some 1,000 changed files, spread over all readers; `scripts/fuzz` makes as many more as one likes."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from random import Random
from typing import Any

import pytest

from pase.errors import PlanError
from tests.fuzz import harness
from tests.fuzz.harness import Reader, Target, problem_of, run
from tests.fuzz.targets import TARGETS

INPUTS = 1_000
SEED = 31
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def outcomes() -> Any:
    """What came of all inputs, by target."""
    # A process of its own: this one may have threads, and frameworks that take memory.
    finished = subprocess.run(
        [sys.executable, "-m", "tests.fuzz", "--inputs", str(INPUTS), "--json"],
        cwd=ROOT,
        env={**os.environ, "OPENBLAS_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert finished.stdout, finished.stderr
    return json.loads(finished.stdout)


@pytest.mark.parametrize("name", [target.name for target in TARGETS])
def test_a_reader_gives_a_result_or_one_clean_line(name: str, outcomes: Any) -> None:
    found = outcomes[name]
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


def _fails(numbers: Random, folder: Path) -> None:
    match numbers.choice(
        ("well", "refused", "traceback", "lines", "long", "abort", "exit", "memory", "asleep", "busy")
    ):
        case "refused":
            raise PlanError("no plan")
        case "traceback":
            raise KeyError("x")
        case "lines":
            raise _OtherError("two\nlines")
        case "long":
            raise _OtherError("x" * 1001)
        case "abort":
            os.abort()
        case "exit":
            os._exit(3)
        case "memory":
            bytearray(1 << 34)
        case "asleep":
            time.sleep(60)
        case "busy":
            while True:
                pass


def _reader() -> Reader:
    return _fails


def test_each_failure_is_that_of_its_input(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "WALL_S", 8.0)
    monkeypatch.setattr(harness, "CPU_S", 0)
    target = Target(name="fails", prepare=_reader)
    outcome = run(target, _fails, seed=SEED, first=0, count=12)
    choices = ("well", "refused", "traceback", "lines", "long", "abort", "exit", "memory", "asleep", "busy")
    expected = [harness.generator("fails", SEED, number).choice(choices) for number in range(12)]
    assert set(expected) == set(choices)
    assert (outcome.accepted, outcome.refused) == (expected.count("well"), expected.count("refused"))
    whats = {
        "traceback": "KeyError",
        "lines": "a message of characters that are not printable",
        "long": "a message of 1,001 characters",
        "abort": signal.Signals.SIGABRT.name,
        "exit": "exit status 3",
        "memory": "MemoryError",
        "asleep": "more than 8 s",
        "busy": "more than 0 s of CPU time",
    }
    found = {failure.number: failure.what for failure in outcome.failures}
    assert found.keys() == {number for number, choice in enumerate(expected) if choice in whats}
    for number, what in found.items():
        assert what.startswith(whats[expected[number]]), (number, what)


def test_an_input_is_the_same_whenever_it_is_made() -> None:
    assert [harness.generator("plan", 3, 7).random() for _ in range(2)] == [
        harness.generator("plan", 3, 7).random()
    ] * 2
    assert problem_of(PlanError("as it is to be")) == ""
