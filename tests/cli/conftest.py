"""The command line as a function: what it printed where, and its status."""

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from typing import Any

import pytest

from pase.cli import progress
from pase.cli.main import run
from tests.networks import staged_plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """What a command left behind."""

    status: int
    out: str
    err: str


Command = Callable[..., Finished]


@pytest.fixture
def pase(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Command:
    """Return a function that runs one command in this process.

    Without progress, which work that takes long shows: on a busy machine that is any. A test of the progress itself
    sets the time after which it appears.
    """
    monkeypatch.setattr(progress, "QUIET_S", inf)

    def call(*arguments: object) -> Finished:
        status = run([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return Finished(status=status, out=captured.out, err=captured.err)

    return call


Shown = Callable[..., str]


@pytest.fixture
def terminal(pase: Command, monkeypatch: pytest.MonkeyPatch) -> Shown:
    """Return a function that runs one command in this process and returns what a terminal of some columns is shown."""

    def call(*arguments: object, columns: int = 80, **environment: str) -> str:
        for name, value in {"TERM": "xterm-256color", "COLUMNS": str(columns), **environment}.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
        finished = pase(*arguments)
        assert finished.status == 0
        return finished.out

    return call


@pytest.fixture
def staged(monkeypatch: pytest.MonkeyPatch) -> str:
    """Have every file be a plan in stages, which takes a second to read: that its figures are checked, others try."""
    for command in ("explain", "simulate"):
        monkeypatch.setattr(f"pase.cli.{command}.chosen_plan", lambda *_, **__: staged_plan())
    return "stages.json"


def document_of(pase: Command, *arguments: object) -> dict[str, Any]:
    """Return what a command writes as JSON; it says nothing besides."""
    finished = pase(*arguments, "--json")
    assert (finished.status, finished.err) == (0, "")
    document: dict[str, Any] = json.loads(finished.out)
    return document
