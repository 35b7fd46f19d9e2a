"""Python programs in a process of their own, which report by lines of JSON on their standard output."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pase.errors import RuntimeFailure, missing_extra

_LAST_LINES = 15


def check_packages() -> None:
    """Raise MissingExtraError where what programs run on is not installed; nothing is imported."""
    if find_spec("tensorflow") is None or find_spec("mesh_tensorflow") is None:
        raise missing_extra("running a program needs TensorFlow and Mesh-TensorFlow", "mesh")


def program_events(source: str, arguments: list[str]) -> Iterator[dict[str, Any]]:
    """Run a program with some arguments and --json, and yield its lines of JSON as they come.

    What is no object of JSON comes as an event "text". Raises RuntimeFailure with the program's last lines where it
    fails, MissingExtraError where it could not. The process is ended when the iterator is closed, or fails.
    """
    check_packages()
    with tempfile.TemporaryDirectory(prefix="pase-run-") as folder:
        script = Path(folder) / "train.py"
        script.write_text(source, encoding="utf-8")
        # The child must find the very package that wrote the program.
        here = str(Path(__file__).resolve().parents[4])
        path = os.pathsep.join([here, *filter(None, [os.environ.get("PYTHONPATH", "")])])
        with (Path(folder) / "errors").open("w+", encoding="utf-8", errors="replace") as errors:
            process = subprocess.Popen(
                [sys.executable, str(script), *arguments, "--json"],
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                encoding="utf-8",
                env={**os.environ, "PYTHONPATH": path},
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
                raise RuntimeFailure(_failure(status, errors.read()))


def _event(line: str) -> dict[str, Any]:
    try:
        event = json.loads(line)
    except ValueError:
        event = None
    return event if isinstance(event, dict) else {"event": "text", "text": line}


def _failure(status: int, errors: str) -> str:
    lines = [line for line in errors.splitlines() if line.strip()]
    if status == 1 and lines and lines[-1].startswith("error: "):
        return lines[-1].removeprefix("error: ")
    if status < 0:
        return f"the program was ended by signal {-status}" + (
            " (perhaps for want of memory: use a smaller batch or fewer devices)" if status == -9 else ""
        )
    shown = "\n".join(lines[-_LAST_LINES:]) or "it wrote nothing"
    return f"the program ended with status {status}; its last lines:\n{shown}"
