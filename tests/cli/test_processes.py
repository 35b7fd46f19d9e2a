"""The command as a process: pipes that close, full disks, Ctrl-C, odd encodings."""

import json
import os
import stat
import subprocess
from pathlib import Path

import pytest

from tests.cli.processes import CLEAN, ENTRY, in_pipe

SEARCH = ("search", "lenet5", "-p", "4", "-b", "16")
COMMANDS = [SEARCH, (*SEARCH, "--json"), ("--help",)]


def test_into_a_pipe_goes_plain_text() -> None:
    finished = in_pipe(*SEARCH)
    assert finished.returncode == 0
    assert "\x1b" not in finished.stdout + finished.stderr
    table = finished.stdout.split("\n\n")[0].splitlines()
    assert len(table) == 9
    assert [line for line in finished.stdout.splitlines() if line != line.rstrip()] == []


def test_into_a_pipe_lines_are_whole() -> None:
    finished = in_pipe("search", "transformer", "-p", "8", "--all-layers", environment={"COLUMNS": "20"})
    assert "decoder6_cross_attention  b=64 h=8 s=256 t=256 k=64  " in finished.stdout


def test_a_process_ends_with_its_status(tmp_path: Path) -> None:
    for arguments, status in (
        (["models"], 0),
        (["search", "alexnett", "-p", "8"], 1),
        (["search", "alexnet", "-p", "7.5"], 2),
    ):
        finished = in_pipe(*arguments, folder=tmp_path)
        assert finished.returncode == status
        assert "Traceback" not in finished.stderr
        assert (finished.stdout == "") == (status != 0)


def test_json_can_be_piped_from_one_command_to_the_next(tmp_path: Path) -> None:
    finished = in_pipe(*SEARCH, "--json", "-o", "/dev/null")
    assert json.loads(finished.stdout)["model"]["name"] == "lenet5"
    assert stat.S_ISCHR(Path("/dev/null").stat().st_mode)  # written to, not replaced


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
    assert finished.returncode == 0
    assert [line for line in finished.stderr.splitlines() if "have fewer configurations" not in line] == []


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
        ["sh", "-c", '"$@" >&-', "sh", *ENTRY, *SEARCH, "--json"],
        stderr=subprocess.PIPE,
        text=True,
        check=False,
        env=CLEAN,
    )
    assert (finished.returncode, finished.stderr) == (0, "")


@pytest.mark.parametrize(
    ("encoding", "written"),
    # Where the environment says ASCII, it most likely says nothing: click then writes UTF-8.
    [("ascii", "× NVIDIA".encode()), ("latin-1", b"\xd7 NVIDIA"), ("koi8-r", b"? NVIDIA")],
)
def test_an_encoding_that_lacks_characters_is_no_fault(encoding: str, written: bytes) -> None:
    finished = subprocess.run(
        [*ENTRY, *SEARCH], capture_output=True, check=False, env=CLEAN | {"PYTHONIOENCODING": encoding}
    )
    assert finished.returncode == 0
    assert b"on 4 " + written in finished.stdout
