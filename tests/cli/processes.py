"""The command line as a process of its own, with a pipe or a terminal at its output."""

import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

NOTHING: Mapping[str, str] = MappingProxyType({})

ENTRY = [sys.executable, "-c", "from pase.cli import main; main()"]

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
        timeout=120,
    )


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
        written = bytearray()
        while True:
            try:
                piece = os.read(ours, 65536)
            except OSError:  # what Linux answers when the other end is closed
                break
            if not piece:
                break
            written += piece
        process.wait(timeout=120)
    os.close(ours)
    return written.decode().replace("\r\n", "\n")
