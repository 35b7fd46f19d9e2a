"""One page's blocks in their order: files are written, commands and snippets run, outputs compared."""

import json
import os
import re
import shlex
import tomllib
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import click

from pase.cli.main import cli
from tests.cli.conftest import Command, Finished
from tests.docs.files import patched
from tests.docs.kinds import Kind, commands, file_name, kind_of
from tests.docs.markdown import ROOT, Code
from tests.docs.output import difference
from tests.docs.rules import READERS, SHOWN, rule_of
from tests.docs.scaled import scaled
from tests.docs.snippets import run_snippet
from tests.targets.torch.ranks import Pool


class PageRun:
    """The folder, the names and the commands of a page, one block after the other."""

    def __init__(self, folder: Path, pase: Command, ranks: Pool, namespace: dict[str, Any]) -> None:
        self._folder = folder
        self._pase = pase
        self._ranks = ranks
        self.namespace = {"__name__": "snippet", **namespace}

    def block(self, block: Code) -> None:
        """Run a block, or check it as what it is; AssertionError where it is wrong."""
        _HANDLERS[kind_of(block)](self, block)

    def _file(self, block: Code) -> None:
        name = file_name(block)
        assert name is not None
        path = self._folder / name
        text = patched(path.read_text(encoding="utf-8"), block.text) if block.language == "diff" else block.text
        _CHECKS.get(path.suffix, lambda _: None)(text)
        path.write_text(text, encoding="utf-8")

    def _python(self, block: Code) -> None:
        with self._on_ranks("run_" in block.text):
            run_snippet(block.text, self.namespace, block.where)

    def _commands(self, block: Code) -> None:
        for command in commands(block.text):
            finished = self._command(command, block.where)
            assert finished is None or finished.status == 0, f"{block.where}: {command}: {finished}"

    def _session(self, block: Code) -> None:
        _, *parts = re.split(r"^\$ ", block.text, flags=re.MULTILINE)
        for part in parts:
            command, _, shown = part.partition("\n")
            finished = self._command(command, block.where)
            if finished is not None:
                _check(shown, finished, f"{block.where}: {command}")

    def _command(self, command: str, where: str) -> Finished | None:
        """Run a command, or parse it where a rule says so: then there is no result."""
        program, *arguments = _without_reader(shlex.split(command, comments=True))
        assert not {"|", ">", "&&", ";"} & set(arguments), f"{where}: a shell is needed for {command!r}"
        name = Path(program).name
        assert name in _PROGRAMS, f"{where}: {program!r} is no program that these tests know"
        parse, run = _PROGRAMS[name]
        if rule_of(command):
            parse(self, arguments)
            return None
        return run(self, scaled(arguments))

    def _parse_pase(self, arguments: list[str]) -> None:
        parse_pase(arguments)

    def _run_pase(self, arguments: list[str]) -> Finished:
        with self._on_ranks(arguments[0] == "run"):
            return self._pase(*arguments)

    def _on_ranks(self, starts_processes: bool) -> AbstractContextManager[None]:
        from tests.docs.on_ranks import calls_on

        return calls_on(self._ranks, self._folder) if starts_processes else nullcontext()

    def _parse_python(self, arguments: list[str]) -> None:
        """Check the options of an emitted program; that of the forward pass has its own."""
        from pase.targets.mesh_tensorflow.runtime import script

        script.command_of_program.read(arguments[1:])

    def _run_python(self, arguments: list[str]) -> Finished:
        from tests.docs.programs import run_module, run_program

        first, *others = arguments
        return run_module(*others) if first == "-m" else run_program(self._folder / first, others)

    def _run_torchrun(self, arguments: list[str]) -> Finished:
        from tests.docs.on_ranks import torchrun

        return torchrun(self._ranks, self._folder, arguments)

    def _parse_script(self, arguments: list[str]) -> None:
        from tests.docs.programs import parse_bench

        parse_bench(arguments)

    def _parse_fuzz(self, arguments: list[str]) -> None:
        from tests.fuzz.__main__ import parser

        parser().parse_args(arguments)

    def _parse_gpu_check(self, arguments: list[str]) -> None:
        from scripts.gpu_check import parser

        parser().parse_args(arguments)

    def _parse_nothing(self, arguments: list[str]) -> None:
        pass

    def _run_nothing(self, arguments: list[str]) -> Finished:
        raise AssertionError(f"{arguments} needs a rule")

    def _excerpt(self, block: Code) -> None:
        if (block.page, block.first_line) in SHOWN:
            return
        written = ["\n".join(_stripped(path.read_text(encoding="utf-8"))) for path in self._folder.glob("*.py")]
        excerpt = "\n".join(_stripped(block.text))
        assert excerpt, f"{block.where}: the block is empty"
        assert any(excerpt in text for text in written), f"{block.where}: in no program that this page wrote"

    def _toml(self, block: Code) -> None:
        tomllib.loads(block.text)

    def _json(self, block: Code) -> None:
        json.loads(block.text)

    def _other(self, block: Code) -> None:
        key = (block.page, block.first_line)
        assert key in SHOWN, f"{block.where}: nothing is known of this block; run it, or say in SHOWN what it is: {key}"


_HANDLERS: Mapping[Kind, Callable[[PageRun, Code], None]] = {
    Kind.FILE: PageRun._file,
    Kind.SESSION: PageRun._session,
    Kind.COMMANDS: PageRun._commands,
    Kind.EXCERPT: PageRun._excerpt,
    Kind.JSON: PageRun._json,
    Kind.TOML: PageRun._toml,
    Kind.PYTHON: PageRun._python,
    Kind.OTHER: PageRun._other,
}

_CHECKS: Mapping[str, Callable[[str], object]] = {
    ".py": lambda text: compile(text, "page", "exec"),
    ".toml": tomllib.loads,
    ".json": json.loads,
}

_Parse = Callable[[PageRun, list[str]], None]
_Run = Callable[[PageRun, list[str]], Finished]
_PROGRAMS: Mapping[str, tuple[_Parse, _Run]] = {
    "pase": (PageRun._parse_pase, PageRun._run_pase),
    "python": (PageRun._parse_python, PageRun._run_python),
    "torchrun": (PageRun._parse_nothing, PageRun._run_torchrun),
    "bench": (PageRun._parse_script, PageRun._run_nothing),
    "fuzz": (PageRun._parse_fuzz, PageRun._run_nothing),
    "gpu-check": (PageRun._parse_gpu_check, PageRun._run_nothing),
    "test": (PageRun._parse_nothing, PageRun._run_nothing),
    "docs": (PageRun._parse_nothing, PageRun._run_nothing),
    "pip": (PageRun._parse_nothing, PageRun._run_nothing),
}


def parse_pase(arguments: list[str]) -> None:
    """Parse a command line of pase as far as it goes without running it."""
    verb, *others = arguments
    command = cli.get_command(click.Context(cli), verb)
    assert command is not None, f"pase {verb} is no command"
    # As the program calls it: a command keeps the flags of the first help that it was asked for.
    with command.make_context(verb, others, parent=click.Context(cli, **cli.context_settings)) as context:
        assert not context.args


def _without_reader(words: list[str]) -> list[str]:
    """Leave out what reads the output, where that is a program which need not be there."""
    return words[: words.index("|")] if "|" in words and words[words.index("|") + 1] in READERS else words


def _check(shown: str, finished: Finished, where: str) -> None:
    """AssertionError where a command printed other than what a page shows; a page need not show anything.

    Lines of PaSE's own are those of standard error. Of them, what says that something is being done stands there
    where that takes long.
    """
    lines = shown.splitlines()
    own = [number for number, line in enumerate(lines) if line.startswith("pase: ")]
    is_error = own[:1] == [0]
    assert bool(finished.status) == is_error, f"{where}: {finished}"
    if is_error:
        found = difference(shown, finished.err)
    else:
        said = [lines[number] for number in own if not lines[number].endswith("…")]
        assert all(line in finished.err.splitlines() for line in said), f"{where}: {said} is not in {finished.err}"
        left = [line for number, line in enumerate(lines) if number not in own]
        found = difference("\n".join(left), finished.out) if any(map(str.strip, left)) else ""
    assert not found, f"{where}\n{found}"


def _stripped(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if line.strip()]


def program_exists(name: str) -> bool:
    """Whether a program of scripts/ is there and can be run."""
    return os.access(ROOT / "scripts" / name, os.X_OK)
