"""The command as a process: pipes that close, full disks, odd encodings; and what goes into a pipe."""

import json
import os
import stat
import subprocess
from pathlib import Path

import pytest

from tests.cli.conftest import Command
from tests.cli.processes import CLEAN, ENTRY

SEARCH = ("search", "lenet5", "-p", "4", "-b", "16")
COMMANDS = [("models",), ("--help",)]


def test_into_a_pipe_goes_plain_text_in_whole_lines(pase: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    finished = pase(*SEARCH)
    assert finished.status == 0
    assert "\x1b" not in finished.out + finished.err
    assert len(finished.out.split("\n\n")[0].splitlines()) == 9
    assert "\nconv2    b=16 n=16 h=10 w=10 c=6 r=5 s=5  b=4 " in finished.out
    assert [line for line in finished.out.splitlines() if line != line.rstrip()] == []


def test_a_device_is_written_to_and_not_replaced(pase: Command) -> None:
    finished = pase(*SEARCH, "--json", "-o", "/dev/null")
    assert json.loads(finished.out)["model"]["name"] == "lenet5"
    assert stat.S_ISCHR(Path("/dev/null").stat().st_mode)


@pytest.mark.parametrize("arguments", COMMANDS, ids=" ".join)
def test_a_pipe_that_nobody_reads_is_no_fault(arguments: tuple[str, ...]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        finished = subprocess.run(
            [*ENTRY, *arguments], stdout=writer, stderr=subprocess.PIPE, text=True, check=False, env=CLEAN
        )
    finally:
        os.close(writer)
    assert (finished.returncode, finished.stderr) == (0, "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full on this system")
@pytest.mark.parametrize("arguments", COMMANDS, ids=" ".join)
def test_a_full_disk_is_said(arguments: tuple[str, ...]) -> None:
    with Path("/dev/full").open("wb") as full:
        finished = subprocess.run(
            [*ENTRY, *arguments], stdout=full, stderr=subprocess.PIPE, text=True, check=False, env=CLEAN
        )
    assert finished.returncode == 1
    assert finished.stderr == "pase: the output cannot be written: No space left on device\n"


def test_a_closed_output_is_no_fault() -> None:
    finished = subprocess.run(
        ["sh", "-c", '"$@" >&-', "sh", *ENTRY, "models", "--json"],
        stderr=subprocess.PIPE,
        text=True,
        check=False,
        env=CLEAN,
    )
    assert (finished.returncode, finished.stderr) == (0, "")


@pytest.mark.parametrize(
    ("encoding", "written"),
    # Where the environment says ASCII, it most likely says nothing: click then writes UTF-8.
    [("ascii", " µs".encode()), ("koi8-r", b" ?s")],
)
def test_an_encoding_that_lacks_characters_is_no_fault(encoding: str, written: bytes) -> None:
    finished = subprocess.run(
        [*ENTRY, "machines", "--show", "1080ti"],
        capture_output=True,
        check=False,
        env=CLEAN | {"PYTHONIOENCODING": encoding},
    )
    assert finished.returncode == 0
    assert written in finished.stdout
