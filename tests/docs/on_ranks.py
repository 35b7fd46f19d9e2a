"""What a page runs on several processes, run on those that stay for the whole session of tests."""

import json
import re
from argparse import ArgumentParser
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from pase.targets.training.script import program_events
from tests.cli.conftest import Finished
from tests.docs.files import forget_modules
from tests.targets.torch.ranks import Pool


def torchrun(ranks: Pool, folder: Path, arguments: list[str]) -> Finished:
    """Run a Python file as `torchrun ARGUMENT…` does; what is printed is rank 0's."""
    parser = ArgumentParser()
    parser.add_argument("--nproc-per-node", type=int)
    parser.add_argument("--local-ranks-filter", choices=["0"])
    own, command = parser.parse_known_args(arguments)
    return ranks.run(_emitted, str(folder), command, world=own.nproc_per_node)[0]


@contextmanager
def calls_on(ranks: Pool, folder: Path) -> Iterator[None]:
    """Run functions and emitted programs on the ranks of the pool, which otherwise have processes of their own."""

    def events(source: str, arguments: list[str]) -> Iterator[dict[str, Any]]:
        if "from pase.targets.torch.script import main" not in source:
            yield from program_events(source, arguments)
            return
        (number,) = re.findall(r"^    main\(.*num_devices=(\d+)", source, re.MULTILINE)
        (folder / "emitted_program.py").write_text(source, encoding="utf-8")
        command = ["emitted_program.py", *arguments, "--json"]
        finished = pool.run(_emitted, str(folder), command, world=int(number))[0]
        assert finished.status == 0, finished.err
        yield from map(json.loads, finished.out.splitlines())

    def call(function: Callable[..., Any], *arguments: object, ranks: int, **_: object) -> list[Any]:
        return pool.run(_called, str(folder), function, arguments, world=ranks)

    pool = ranks
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pase.targets.torch.launch.call", call)
        patch.setattr("pase.targets.execute.program_events", events)
        yield


def _program(rank: int, world: int, folder: str, command: list[str]) -> Finished:
    from tests.docs.programs import run_program

    with _in_folder(rank, world, folder):
        return run_program(Path(folder) / command[0], command[1:])


def _emitted(rank: int, world: int, folder: str, command: list[str]) -> Finished:
    with pytest.MonkeyPatch.context() as patch:
        # Which would end the process.
        patch.setattr("pase.targets.torch.script.leave", lambda: None)
        return _program(rank, world, folder, command)


def _called(rank: int, world: int, folder: str, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    with _in_folder(rank, world, folder):
        return function(*arguments)


@contextmanager
def _in_folder(rank: int, world: int, folder: str) -> Iterator[None]:
    """Be in a page's folder, with what torchrun tells a process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.syspath_prepend(folder)
        for name, value in (("RANK", rank), ("LOCAL_RANK", rank), ("WORLD_SIZE", world), ("LOCAL_WORLD_SIZE", world)):
            patch.setenv(name, str(value))
        try:
            yield
        finally:
            forget_modules(Path(folder))
