"""The page on training across workers says what the command does."""

import json
import re
from pathlib import Path

import click

from pase.cli.main import cli
from pase.easgd.algorithms import ALGORITHMS
from tests.cli.conftest import Command

PAGE = (Path(__file__).parents[2] / "docs" / "training-across-workers.md").read_text(encoding="utf-8")


def rows(heading: str) -> list[list[str]]:
    """Return the cells of the first table below a heading."""
    lines = PAGE.split(f"## {heading}\n", 1)[1].splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("|"))
    table = lines[first:]
    table = table[: next(i for i, line in enumerate(table) if not line.startswith("|"))]
    return [[cell.strip() for cell in line.strip("|").split(" |")] for line in table[2:]]


def test_every_algorithm_is_described() -> None:
    described = {row[0].strip("` "): row[4].strip("` ") for row in rows("The algorithms")}
    assert described == {name: algorithm.counterpart for name, algorithm in ALGORITHMS.items()}


def test_every_option_is_described() -> None:
    command = cli.get_command(click.Context(cli), "train")
    assert command is not None
    opts = [flag for parameter in command.params for flag in (*parameter.opts, *parameter.secondary_opts)]
    assert set(re.findall(r"--[a-z][a-z-]*", PAGE)) == {flag for flag in opts if flag.startswith("--")}


def test_every_field_of_an_event_is_described(pase: Command, tmp_path: Path) -> None:
    small = ["mlp", "--batch", "4", "--arg", "inputs=6", "--arg", "hidden=8", "--arg", "classes=3", "--arg", "layers=2"]
    common = [*small, "--workers", "2", "--checkpoint", tmp_path, "--report-every", "1", "--json"]
    described = {row[0].strip("` "): set(re.findall(r"`(\w+)`", row[1])) for row in rows("Events")}
    lines = [pase("train", *common, "--steps", steps, "--resume").out.splitlines() for steps in (2, 3)]
    events = [json.loads(line) for part in lines for line in part]
    assert {event["event"] for event in events} == {"resumed", "started", "step", "saved", "done"}
    for event in events:
        inner = set(event["workers"][0]) if event["event"] == "done" else set()
        assert described[event["event"]] == (set(event) - {"event"}) | inner
