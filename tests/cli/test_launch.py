"""`pase launch`: what is wrong with a command is said before anything is started."""

from pathlib import Path

import pytest

from tests.cli.conftest import Command


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train.py"], "give --processes N for this machine, or --hosts with --task K for several"),
        (["--processes", "2", "--hosts", "a:1", "train.py"], "give --processes N for this machine, or"),
        (["--hosts", "a:1,b:1", "train.py"], "--hosts and --task belong together"),
        (["--processes", "2", "--task", "1", "train.py"], "--hosts and --task belong together"),
        (["--processes", "0", "train.py"], "Invalid value for '--processes'"),
        (["--processes", "2", "--timeout", "0", "train.py"], "Invalid value for '--timeout'"),
        (["--processes", "2"], "Missing argument 'PROGRAM...'"),
    ],
)
def test_wrong_usage(arguments: list[str], message: str, pase: Command) -> None:
    finished = pase("launch", *arguments)
    assert (finished.status, finished.out) == (2, "")
    assert message in finished.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--processes", "2", "nothing.py"], "there is no program nothing.py"),
        (
            ["--processes", "2", "--bind", "lo", "nothing.py"],
            "the address to listen on is 'lo'; expected an IP address",
        ),
        (["--hosts", "a:1,b", "--task", "0", "train.py"], "host list a:1,b: 'b' is no address of a process"),
        (["--hosts", "nowhere", "--task", "0", "train.py"], "cannot read host list nowhere"),
        (["--hosts", "127.0.0.1:1", "--task", "1", "train.py"], "task 1 is none of the 1 that there are"),
        (["--hosts", "a:1,b:1", "--task", "0", "train.py"], "a:1 is another host, which cannot reach a process"),
    ],
)
def test_input_at_fault(arguments: list[str], message: str, pase: Command) -> None:
    finished = pase("launch", *arguments)
    assert (finished.status, finished.out) == (1, "")
    assert message in finished.err
    assert len(finished.err.splitlines()) == 1


@pytest.mark.parametrize(
    ("bind", "warns"), [("127.0.0.1", False), ("::1", False), ("0.0.0.0", True), ("10.0.0.7", True)]
)
def test_whoever_listens_beyond_this_machine_is_warned(bind: str, warns: bool, tmp_path: Path, pase: Command) -> None:
    program = tmp_path / "program.py"
    program.write_text("", encoding="utf-8")
    finished = pase("launch", "--processes", "1", "--bind", bind, program)
    assert finished.status == 0
    assert ("has no authentication" in finished.err) == warns
