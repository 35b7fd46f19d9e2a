"""A program in a process of its own, and the events that it reports."""

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pase.common.processes import package_environment
from pase.errors import ProgramError

_LAST_LINES = 15


def program_events(source: str, arguments: list[str]) -> Iterator[dict[str, Any]]:
    """Run a program with some arguments and --json, and yield its lines of JSON as they come.

    What is no object of JSON comes as an event "text". Raises ProgramError with the program's last lines where it
    fails. The process is ended when the iterator is closed, or fails.
    """
    with tempfile.TemporaryDirectory(prefix="pase-run-") as folder:
        script = Path(folder) / "train.py"
        script.write_text(source, encoding="utf-8")
        with (Path(folder) / "errors").open("w+", encoding="utf-8", errors="replace") as errors:
            process = subprocess.Popen(
                [sys.executable, str(script), *arguments, "--json"],
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                encoding="utf-8",
                env=package_environment({}),
            )
            try:
                assert process.stdout is not None
                for line in process.stdout:
                    yield _event(line)
                status = process.wait()
            finally:
                if process.poll() is None:
                    process.kill()
                    process.wait()
                if process.stdout is not None:
                    process.stdout.close()
            errors.seek(0)
            if status != 0:
                raise ProgramError(_why_it_ended(status, errors.read()))


def _event(line: str) -> dict[str, Any]:
    try:
        event = json.loads(line)
    except ValueError:
        event = None
    return event if isinstance(event, dict) else {"event": "text", "text": line}


def _why_it_ended(status: int, errors: str) -> str:
    lines = [line for line in errors.splitlines() if line.strip()]
    if status == 1 and lines and lines[-1].startswith("error: "):
        return lines[-1].removeprefix("error: ")
    if status < 0:
        return f"the program was ended by signal {-status}" + (
            " (perhaps for want of memory: use a smaller batch or fewer devices)" if status == -9 else ""
        )
    shown = "\n".join(lines[-_LAST_LINES:]) or "it wrote nothing"
    return f"the program ended with status {status}; its last lines:\n{shown}"
