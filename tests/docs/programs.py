"""Emitted programs, modules and benchmarks as a page calls them, in this process."""

import contextlib
import io
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from scripts.benchmarks import __main__ as bench
from tests.cli.conftest import Finished


def run_program(script: Path, arguments: list[str]) -> Finished:
    """Run a Python file as `python FILE ARGUMENT…` does."""
    return _finished(lambda: runpy.run_path(str(script), run_name="__main__"), [str(script), *arguments])


def run_module(name: str, *arguments: str) -> Finished:
    """Run a module as `python -m NAME ARGUMENT…` does."""
    with pytest.MonkeyPatch.context() as patch:
        # As in a process of its own, where nothing has imported it before.
        patch.delitem(sys.modules, name, raising=False)
        return _finished(lambda: runpy.run_module(name, run_name="__main__"), [name, *arguments])


def parse_bench(arguments: list[str]) -> None:
    """Parse the command line of scripts/bench, and do nothing."""
    # The others are not loaded: together they take seconds.
    found = {n: _without_main(n) if n == arguments[0] else SimpleNamespace() for n in bench.BENCHMARKS}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bench, "_module", found.__getitem__)
        patch.setattr(sys, "argv", ["bench", *arguments])
        bench.main()


def _without_main(name: str) -> SimpleNamespace:
    add_arguments = getattr(bench._module(name), "add_arguments", None)
    return SimpleNamespace(main=lambda **_: None, add_arguments=add_arguments)


def _finished(run: object, argv: list[str]) -> Finished:
    out, err, status = io.StringIO(), io.StringIO(), 0
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        patch.setattr(sys, "argv", argv)
        try:
            run()
        except SystemExit as ended:
            status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    return Finished(status=status, out=out.getvalue(), err=err.getvalue())
