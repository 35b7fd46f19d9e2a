"""Child processes on this machine: their environment, their lifetime, and messages about how they ended."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

_PR_SET_PDEATHSIG = 1


def package_environment(more: Mapping[str, str]) -> dict[str, str]:
    """Return this process's environment, updated so that a child imports the same installation of this package."""
    here = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join([here, *filter(None, [os.environ.get("PYTHONPATH", "")])])
    return {**os.environ, "PYTHONPATH": path, **more}


def dying_with_us(command: Sequence[str]) -> list[str]:
    """Return a command whose process the kernel kills when this process ends for any reason.

    The child requests this itself before it executes the program: `preexec_fn` would make Python fork, which frameworks
    with threads warn about.
    """
    if not sys.platform.startswith("linux"):
        return list(command)
    # Without site-packages and Python's environment variables, so that it takes some 20 ms.
    code = (
        f"import ctypes, os, signal, sys; ctypes.CDLL(None).prctl({_PR_SET_PDEATHSIG}, signal.SIGKILL); "
        f"os.getppid() == {os.getpid()} or os._exit(1); os.execvp(sys.argv[1], sys.argv[1:])"
    )
    return [sys.executable, "-I", "-S", "-c", code, *command]


def end_all(processes: Iterable["subprocess.Popen[bytes]"]) -> None:
    """Kill processes and everything that they started in their sessions, including processes stopped by a signal."""
    started = list(processes)
    for process in started:
        if process.poll() is None:
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                process.kill()
    for process in started:
        process.wait()


def ending_text(status: int) -> str:
    """Describe how a process ended: by which signal, or with which status."""
    if status >= 0:
        return f"ended with status {status}"
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = "unknown"
    return f"was ended by signal {-status} ({name})"
