"""The command line as a process of its own, with a pipe or a terminal at its output."""

import fcntl
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

NOTHING: Mapping[str, str] = MappingProxyType({})

ENTRY = [sys.executable, "-c", "from pase.cli import main; main()"]

WITHOUT_PROGRESS = [
    *(sys.executable, "-c"),
    "from math import inf; from pase.cli import main, progress; progress.QUIET_S = inf; main()",
]
"""On a busy machine a terminal would be shown bars, which are not what is looked at."""

IN_FOREGROUND = (
    "import fcntl, os, signal, sys, termios\n"
    "if os.isatty(0): fcntl.ioctl(0, termios.TIOCSCTTY, 0)\n"
    "signal.signal(signal.SIGINT, signal.SIG_DFL)\n"
    "os.execv(sys.argv[1], sys.argv[1:])"
)
"""A program that becomes another one, as a shell starts it: with a terminal of its own, and heeding Ctrl-C."""

CLEAN = {
    key: value
    for key, value in os.environ.items()
    if key not in {"COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TERM", "PYTHONIOENCODING"}
}


def in_pipe(
    *arguments: str, folder: Path | None = None, environment: Mapping[str, str] = NOTHING
) -> subprocess.CompletedProcess[str]:
    """Run a command whose output is read through pipes."""
    return subprocess.run(
        [*ENTRY, *arguments],
        capture_output=True,
        text=True,
        check=False,
        cwd=folder,
        env=CLEAN | dict(environment),
        timeout=300,
    )


def _rest(end: int) -> bytearray:
    """Read all that comes from a terminal or a pipe until its other end is closed."""
    written = bytearray()
    while True:
        try:
            piece = os.read(end, 65536)
        except OSError:  # what Linux answers when the other end of a terminal is closed
            return written
        if not piece:
            return written
        written += piece


def in_terminal(
    *arguments: str, columns: int = 80, command: list[str] | None = None, environment: Mapping[str, str] = NOTHING
) -> str:
    """Return what a command writes to a terminal of some columns, its standard error included."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
    with subprocess.Popen(
        [*(command or ENTRY), *arguments],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=CLEAN | {"TERM": "xterm-256color"} | dict(environment),
    ) as process:
        os.close(theirs)
        written = _rest(ours)
        process.wait(timeout=300)
    os.close(ours)
    return written.decode().replace("\r\n", "\n")


@dataclass(frozen=True, slots=True, kw_only=True)
class Interrupted:
    """What a command left behind that got Ctrl-C. written: on a terminal, or both streams; num_left: processes."""

    status: int
    written: str
    num_left: int


def interrupted(command: list[str], marker: str, *, times: int, at_terminal: bool) -> Interrupted:
    """Press Ctrl-C some times once a command has written a marker: at its terminal, or by a signal to its whole job."""
    ours, theirs = pty.openpty() if at_terminal else os.pipe()
    if at_terminal:
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, 80, 0, 0))
    with subprocess.Popen(
        [sys.executable, "-c", IN_FOREGROUND, *command],
        stdin=theirs if at_terminal else subprocess.DEVNULL,
        stdout=theirs,
        stderr=theirs,
        env=CLEAN | {"TERM": "xterm-256color"},
        start_new_session=True,
    ) as process:
        written = bytearray()
        while marker not in written.decode(errors="replace"):
            # Our own copy of its end is open: without a limit, a command that has ended would be waited for.
            assert select.select([ours], [], [], 120)[0], written.decode()
            piece = os.read(ours, 65536)
            assert piece, written.decode()
            written += piece
        for press in range(times):
            if press:
                time.sleep(0.05)
            if at_terminal:
                os.write(ours, b"\x03")
            elif process.poll() is None:
                os.killpg(process.pid, signal.SIGINT)
        process.wait(timeout=300)
        num_left = _num_in_session(process.pid)
    os.close(theirs)
    written += _rest(ours)
    os.close(ours)
    return Interrupted(status=process.returncode, written=written.decode(), num_left=num_left)


def _num_in_session(session: int) -> int:
    """Return how many processes a session has, but for those that have ended."""
    count = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, _, found = stat.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[:4]
        except OSError:  # it is gone
            continue
        count += int(found) == session and state != "Z"
    return count
