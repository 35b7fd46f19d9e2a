"""Metrics: a line of JSON for each step in a file, and a line that says how far the training is on a terminal."""

import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import IO, Any, TextIO

from pase.common.documents import write_atomically
from pase.errors import ProgramError


class MetricsFile:
    """A file of lines of JSON, one for each step, that a training which goes on continues.

    num_steps: done so far; where lines name a worker, those of each, and of None for lines that name none.
    resume: whether the file may hold lines; those of steps after num_steps, which will be trained again, and a line
    that was cut off are taken out. Raises ProgramError where the file is not one of metrics or cannot be written.
    """

    def __init__(self, path: Path, *, num_steps: int | Mapping[int | None, int], resume: bool) -> None:
        self._path = path
        try:
            old = path.read_text(encoding="utf-8") if path.is_file() else ""
            if old and not resume:
                raise ProgramError(
                    f"{path} holds the metrics of another training; name another file, or go on with --resume"
                )
            kept = "".join(_kept_lines(path, old, num_steps))
            if kept != old:
                write_atomically(path, kept)
            self._stream: IO[str] = path.open("a", encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ProgramError(f"cannot write metrics to {path}: {error}") from None

    def __enter__(self) -> "MetricsFile":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stream.close()

    def write(self, values: Mapping[str, Any]) -> None:
        """Append a line."""
        try:
            self._stream.write(json.dumps(values) + "\n")
            self._stream.flush()
        except OSError as error:
            raise ProgramError(f"cannot write metrics to {self._path}: {error}") from None


def _kept_lines(path: Path, text: str, num_steps: int | Mapping[int | None, int]) -> list[str]:
    done: Mapping[int | None, int] = {None: num_steps} if isinstance(num_steps, int) else num_steps
    lines = text.splitlines(keepends=True)
    if lines and not lines[-1].endswith("\n"):
        # The process ended in the midst of it.
        lines.pop()
    kept = []
    for number, line in enumerate(lines, start=1):
        try:
            values = json.loads(line)
            step, worker = values["step"], values.get("worker")
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            step = worker = None
        if not isinstance(step, int) or not isinstance(worker, int | None) or worker not in done:
            raise ProgramError(f"{path}, line {number}, is no line of metrics of this training; name another file")
        if step <= done[worker]:
            kept.append(line)
    return kept


class ProgressLine:
    """One line on a terminal that is written over and over; nothing where the stream is none."""

    def __init__(self, num_steps: int, stream: TextIO | None = None) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._num_steps = num_steps
        self._is_terminal = self._stream.isatty()
        self._width = 0
        self._last_s = 0.0

    def show(self, step: int, loss: float, examples_per_s: float, *, accuracy: float | None = None) -> None:
        """Show a step, ten times a second at most and the last one in any case."""
        now = time.monotonic()
        if not self._is_terminal or (now - self._last_s < 0.1 and step < self._num_steps):
            return
        self._last_s = now
        right = "" if accuracy is None else f"accuracy {accuracy:.1%}  "
        text = f"step {step}/{self._num_steps}  loss {loss:.6g}  {right}{examples_per_s:,.0f} examples/s"
        self._stream.write(f"\r{text:<{self._width}}")
        self._width = len(text)
        self._stream.flush()

    def end(self) -> None:
        """Leave the line as it is and go on below it."""
        if self._width:
            self._stream.write("\n")
            self._stream.flush()
            self._width = 0
