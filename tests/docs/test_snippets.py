"""Every command and snippet of the README and of docs/ runs, and prints what the page shows."""

import os
import re
from pathlib import Path
from unittest.mock import patch

import click
import pytest

from pase.cli.main import COMMANDS, cli
from pase.importers import OPERATORS
from tests.cli.conftest import Command, pase
from tests.docs.files import forget_modules
from tests.docs.kinds import Kind, commands, file_name, kind_of
from tests.docs.markdown import Code, blocks, pages, spans
from tests.docs.prepared import PREPARED, prepare
from tests.docs.rules import FILES, PARSED, SHOWN, rule_of
from tests.docs.runner import PageRun, program_exists
from tests.targets.torch.ranks import Pool

__all__ = ["pase"]

PAGES = pages()


LONG = {"docs/how-to/transformers.md"}
"""Pages whose programs load transformers in each of their processes, which takes ten seconds."""


@pytest.mark.parametrize(
    "page", [pytest.param(page, marks=[pytest.mark.full] * (page in LONG)) for page in PAGES if blocks(page)]
)
def test_what_a_page_shows_runs(
    page: str, pase: Command, ranks: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    run = PageRun(tmp_path, pase, ranks, prepare(page, tmp_path))
    try:
        with patch.dict(os.environ):
            for block in blocks(page):
                run.block(block)
    finally:
        forget_modules(tmp_path)
        OPERATORS.clear()


# -- nothing is left out in silence


def _commands() -> list[str]:
    shown = [block for page in PAGES for block in blocks(page)]
    lines = [line for block in shown if kind_of(block) is Kind.COMMANDS for line in commands(block.text)]
    sessions = [block.text for block in shown if kind_of(block) is Kind.SESSION]
    return [*lines, *(line for text in sessions for line in re.findall(r"^\$ (.*)$", text, re.MULTILINE))]


def test_every_exception_is_needed() -> None:
    found = _commands()
    used = {rule_of(command) for command in found}
    unused = [rule.command.pattern for rule in PARSED if rule not in used]
    assert not unused, f"no page has such a command, or another rule takes it: {unused}"
    there = {(block.page, block.first_line) for page in PAGES for block in blocks(page)}
    assert set(SHOWN) <= there, f"no page has such a block: {set(SHOWN) - there}"
    assert set(PREPARED) <= set(PAGES)


def test_every_program_of_a_page_is_used_by_it() -> None:
    programs = {
        (block.page, name): block
        for page in PAGES
        for block in blocks(page)
        if (name := file_name(block)) and name.endswith(".py")
    }
    assert len(programs) > 5
    unused = {key for key, block in programs.items() if not _is_used(block, key[1].removesuffix(".py"))}
    assert unused == set(FILES)


def _is_used(program: Code, module: str) -> bool:
    """Whether a block of the same page imports a module, runs it or names it on a command line."""
    use = re.compile(
        rf"\b(from|import) {module}\b|\bpython {module}\.py\b|\btorchrun .*\b{module}\.py\b|\bpase \w+ {module}:"
    )
    return any(use.search(block.text) for block in blocks(program.page) if block is not program)


def test_most_commands_are_run() -> None:
    run = [command for command in _commands() if not rule_of(command)]
    assert len(run) > 60
    verbs = {command.split()[1] for command in run if re.match(r"(\./scripts/)?pase ", command)}
    not_run = {"run", "launch", "calibrate", "doctor", "completion", "serve"}
    assert set(COMMANDS) - verbs <= not_run, f"no page runs {set(COMMANDS) - verbs - not_run}"


def test_programs_of_the_checkout_are_there() -> None:
    named = {found[1] for command in _commands() if (found := re.match(r"(?:\./)?scripts/([\w-]+)", command))}
    assert {"pase", "test", "bench"} <= named
    assert all(map(program_exists, named)), named


def _said_commands() -> list[Code]:
    return [span for page in PAGES for span in spans(page) if re.match(r"pase [a-z][a-z-]*(\s|$)", span.text)]


def test_commands_within_sentences_have_such_verbs_and_options() -> None:
    said = _said_commands()
    assert len(said) > 30
    for span in said:
        words = span.text.partition(" -- ")[0].split()
        assert words[1] in COMMANDS, f"{span.where}: `{span.text}`: no such command"
        command = cli.get_command(cli.make_context("pase", [words[1]]), words[1])
        assert command is not None
        known = {flag for parameter in command.params for flag in (*parameter.opts, *parameter.secondary_opts)}
        flags = {word.rstrip("…,") for word in words if re.match(r"--?[a-z]", word)}
        assert flags <= known | {"--help"}, f"{span.where}: `{span.text}`: no option {flags - known}"


def _block(text: str, page: str = "page.md") -> Code:
    (found,) = blocks(page, text)
    return found


@pytest.fixture
def run(pase: Command, ranks: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PageRun:
    monkeypatch.chdir(tmp_path)
    return PageRun(tmp_path, pase, ranks, {})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("    some words that\n    are no code\n", "nothing is known of this block"),
        ("```python\n1 + 1  # 3\n```\n", r"1 \+ 1 gives 2; the page says 3"),
        ("    $ pase halo --extent 9 --kernel 3 --workers 3\n    input 9, output 8: …\n", r"(?s)shown.*output 7"),
        ("    pase search alexnet --devices 2 --machine nowhere\n", "unknown machine"),
        ("    pase search alexnet --device 2\n", "No such option"),
        ("    pase serach alexnet\n", "unknown command 'serach'"),
        ("    pase models | head\n", "a shell is needed"),
        ("    $ pase machines --show nowhere\n", "unknown machine"),
        ("    # -- fc1   n=2\n    x = reshard(y)\n", "in no program that this page wrote"),
        ("    pip install pase | cat\n", "a shell is needed"),
    ],
)
def test_what_is_wrong_on_a_page_is_found(text: str, message: str, run: PageRun) -> None:
    with pytest.raises(AssertionError, match=message):
        run.block(_block(text))


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("pase run alexnet --stops 3", "No such option"),
        ("./scripts/pase calibrate --quickly", "No such option"),
        ("pase train mlp --processes 2 --hosts a:1", "No such option"),
        ("scripts/bench serach", "2"),
        ("scripts/fuzz --minuts 3", "2"),
    ],
)
def test_what_is_parsed_alone_is_parsed(command: str, message: str, run: PageRun) -> None:
    with pytest.raises((click.UsageError, SystemExit), match=message):
        run.block(_block(f"    {command}\n"))
