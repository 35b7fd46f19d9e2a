"""docs/explain.md: its examples are what `pase explain` prints now."""

import re

import pytest

from pase.cli import progress
from scripts.benchmarks.explain import examples
from scripts.benchmarks.tables import ROOT


def test_the_examples_are_what_the_command_prints(monkeypatch: pytest.MonkeyPatch) -> None:
    page = (ROOT / "docs" / "explain.md").read_text(encoding="utf-8")
    monkeypatch.setattr(progress, "QUIET_S", 1e9)
    for name, text in examples().items():
        (shown,) = re.findall(rf"<!-- {name} -->\n\n(.*?)\n\n<!-- /{name} -->", page, re.DOTALL)
        assert shown == text, "docs/explain.md is out of date: scripts/bench explain --write"
