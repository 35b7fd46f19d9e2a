"""The training loop, and what a program reports of it.

Events are lines of output, metrics are JSON lines in a file, and a progress line on a terminal shows the current step.
`program_events` runs a program in a separate process and reads its events.
"""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from types import MappingProxyType, TracebackType
from typing import IO, Any, Protocol, TextIO

from pase.common.documents import write_atomically
from pase.common.options import PATH, option, options_of_all
from pase.common.processes import package_environment
from pase.errors import ProgramError
from pase.sharding.traffic import Movement, Phase
from pase.targets.training.data import (
    Array,
    Batches,
    DataInput,
    Evaluation,
    GeneratedBatches,
    evaluated,
    load_function,
    read_arrays,
)
from pase.targets.training.options import TrainingOptions, training_flags


class MetricsFile:
    """A file of JSON lines, one for each step, that a resumed training continues.

    Args:
        path: The file.
        num_steps: Steps already done; where lines name a worker, by worker, with None for lines that name none.
        resume: Whether the file may contain lines. Incomplete lines, and those of steps after num_steps, which will be
            trained again, are removed.

    Raises:
        ProgramError: The file is not a file of metrics, or cannot be written.
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
        # The process ended while writing this line.
        lines.pop()
    kept = []
    for number, line in enumerate(lines, start=1):
        try:
            values = json.loads(line)
            step, worker = values["step"], values.get("worker")
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            step = worker = None
        if not isinstance(step, int) or not isinstance(worker, int | None) or worker not in done:
            raise ProgramError(f"{path}, line {number}, is not a line of this training's metrics; name another file")
        if step <= done[worker]:
            kept.append(line)
    return kept


class ProgressLine:
    """A line on a terminal that is overwritten repeatedly; no output where the stream is not a terminal."""

    def __init__(self, num_steps: int, stream: TextIO | None = None) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._num_steps = num_steps
        self._is_terminal = self._stream.isatty()
        self._width = 0
        self._last_s = 0.0

    def show(self, step: int, loss: float, examples_per_s: float, *, accuracy: float | None = None) -> None:
        """Show a step, at most ten times a second, and always the last one."""
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
        """Finish the line and continue below it."""
        if self._width:
            self._stream.write("\n")
            self._stream.flush()
            self._width = 0


Report = Callable[[dict[str, Any]], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """Result of a step.

    Attributes:
        loss: Loss before the update.
        accuracy: Fraction of points whose label has the largest logit; None where the loss is not a `softmax_loss`.
        record: Record of the transfers, in the form of the implementation, if requested.
    """

    loss: float
    accuracy: float | None = None
    record: Any = None


class StepBatches(Protocol):
    """Supplies the batch of each step."""

    def batch(self, step: int) -> Mapping[str, Array]:
        """Return the arrays of a step, counted from 0, by name; steps are requested in order."""


class Stepping(Protocol):
    """Executes the steps of a training."""

    def step(
        self, batch: Mapping[str, Array], *, learning_rate: float | None = None, with_record: bool = False
    ) -> StepResult:
        """Train on one batch; ProgramError where the loss or a gradient is not finite."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Keeping:
    """Checkpointing callbacks: `save` saves a checkpoint if one is due; `newest` returns the last path, if any."""

    save: Callable[[int], Path | None]
    newest: Callable[[], Path | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """The steps of a training from a first one on, and what is reported of each.

    Attributes:
        test: Batches to test on, and a function that evaluates one without side effects; None for none.
        measured: Extracts the transferred bytes from a record, if they are to be measured.
        metrics: The metrics file.
        progress: Whether to show a progress line.
    """

    options: TrainingOptions
    batches: StepBatches
    num_examples: int
    first: int = 0
    test: tuple[Batches, Callable[[Mapping[str, Array]], Evaluation]] | None = None
    measured: Callable[[Any], Mapping[str, Any]] | None = None
    keeping: Keeping | None = None
    metrics: MetricsFile | None = None
    progress: bool = False

    def take(self, training: Stepping, report: Report) -> list[float]:
        """Execute all steps and return the loss of each, before its update.

        Reports events: ``step`` (step, loss, accuracy, learning_rate, examples_per_s, time_s), ``tested`` (step, loss,
        accuracy, num_examples), ``saved`` (step, path), ``done`` (step_time_s, median without the first, and measured
        bytes).
        """
        options, losses, times = self.options, list[float](), list[float]()
        measured: dict[str, Any] = {"measured_bytes": None}
        line = ProgressLine(options.steps) if self.progress else None
        for step in range(self.first, options.steps):
            batch, rate = self.batches.batch(step), options.schedule.rate(step)
            begin = time.perf_counter()
            wants_record = self.measured is not None and step == options.steps - 1
            with self._naming_checkpoint(line):
                result = training.step(batch, learning_rate=rate, with_record=wants_record)
            times.append(time.perf_counter() - begin)
            losses.append(result.loss)
            values = {
                "step": step + 1,
                "loss": result.loss,
                "accuracy": result.accuracy,
                "learning_rate": rate,
                "examples_per_s": self.num_examples / times[-1],
                "time_s": times[-1],
            }
            report({"event": "step", **values})
            if line:
                line.show(step + 1, result.loss, self.num_examples / times[-1], accuracy=result.accuracy)
            shown: dict[str, Any] = {}
            if self.test and options.is_test_due(step + 1):
                with self._naming_checkpoint(line):
                    on_test = evaluated(*self.test, step=step + 1)
                shown = {"test_loss": on_test.loss, "test_accuracy": on_test.accuracy}
                report({"event": "tested", **asdict(on_test)})
            if self.metrics:
                self.metrics.write({**values, **shown, "unix_time_s": time.time()})
            if self.keeping:
                with self._naming_checkpoint(line):
                    path = self.keeping.save(step + 1)
                if path:
                    report({"event": "saved", "step": step + 1, "path": str(path)})
            if self.measured and wants_record:
                measured |= self.measured(result.record)
        if line:
            line.end()
        report({"event": "done", "step_time_s": median(times[1:] or times), **measured})
        return losses

    @contextmanager
    def _naming_checkpoint(self, line: ProgressLine | None) -> Iterator[None]:
        """On failure, end the progress line and name the last checkpoint."""
        try:
            yield
        except ProgramError as error:
            if line:
                line.end()
            kept = self.keeping.newest() if self.keeping else None
            if kept is None:
                raise
            raise ProgramError(f"{error}; the last checkpoint, {kept}, is as it was") from None


def chosen_batches(
    inputs: list[DataInput], seed: int, data_path: Path | None, generator: str | None, first: int = 0
) -> Batches | GeneratedBatches:
    """Return the batches of a file, of a function, or synthetic ones; ProgramError where two of these are named.

    Args:
        inputs: The inputs.
        seed: Seed of synthetic data.
        data_path: File or folder of arrays.
        generator: ``package.module:function`` that yields the data; its module is executed.
        first: First step.
    """
    if generator is None:
        arrays = None if data_path is None else read_arrays(data_path)
        return Batches(inputs, seed=seed, arrays=arrays)
    if data_path is not None:
        raise ProgramError("both --data and --data-generator are given; choose one of them")
    return GeneratedBatches(inputs, load_function(generator), name=generator, start=first)


def given_values(path: Path | None, constants: list[str]) -> Mapping[str, Array] | None:
    """Return initial weights and constants from a file; None where all are drawn from the seed.

    Raises ProgramError where a program has constants and no file is given.
    """
    if path is not None:
        return read_arrays(path)
    if constants:
        raise ProgramError(
            f"the network is computed with constants of its model, such as {constants[0]!r}; write them with: pase "
            "weights MODEL -o weights.npz, and give --weights weights.npz"
        )
    return None


script_flags = options_of_all(
    option("--steps", type=int, default=10, help="Training steps in all."),
    option("--measure", is_flag=True, help="Count the bytes that cross devices in a step."),
    option("--json", is_flag=True, help="Print a line of JSON for each event."),
    option("--metrics", type=PATH, metavar="FILE", help="Append a line of JSON for each step to a file."),
    option(
        "--data-generator",
        metavar="PACKAGE.MODULE:FUNCTION",
        help="A function that yields a dict of arrays for each step; the module's code is executed.",
    ),
    training_flags,
)
"""Adds the options of every training program."""


# -- output


NOTHING_MOVED: Mapping[str, Any] = MappingProxyType(
    {"predicted_bytes": 0, "measured_bytes": 0}
    | {phase.value: {"predicted_bytes": 0, "measured_bytes": 0} for phase in Phase}
)
"""Transferred bytes of an edge or a layer without transfers, as JSON."""


def tabulated(predicted: Mapping[Movement, int], measured: Mapping[Movement, int]) -> dict[str, list[dict[str, Any]]]:
    """Return rows of edges and of layers with predicted and measured bytes by phase, as JSON."""
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for movement in dict.fromkeys([*predicted, *measured]):
        row = rows.setdefault((movement.producer, movement.consumer), deepcopy(dict(NOTHING_MOVED)))
        for part in (row, row[movement.phase]):
            part["predicted_bytes"] += predicted.get(movement, 0)
            part["measured_bytes"] += measured.get(movement, 0)
    kept = {key: row for key, row in rows.items() if row["predicted_bytes"] or row["measured_bytes"]}
    return {
        "edges": [{"producer": u, "consumer": v} | row for (u, v), row in kept.items() if u != v],
        "layers": [{"name": u} | row for (u, v), row in kept.items() if u == v],
    }


def reporting(values: Mapping[str, Any]) -> Report:
    """Return the event reporter that a command line selects; announce that a data generator's code is executed."""
    if values["data_generator"]:
        module = values["data_generator"].partition(":")[0]
        sys.stderr.write(f"note: --data-generator executes the code of module {module}\n")
    return _json_line if values["json"] else _text_line


def _json_line(event: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(event) + "\n")
    sys.stdout.flush()


def _text_line(event: dict[str, Any]) -> None:
    match event:
        case {"event": "built", "build_time_s": seconds, "predicted_bytes": None}:
            text = f"built in {seconds:.1f} s"
        case {"event": "built", "build_time_s": seconds, "predicted_bytes": moved}:
            text = f"built in {seconds:.1f} s; {moved:,} bytes to move between devices in a step"
        case {"event": "resumed", "step": step}:
            text = f"going on after step {step}"
        case {"event": "saved", "step": step, "path": path}:
            text = f"saved step {step} in {path}"
        case {"event": "step"} if sys.stdout.isatty() and sys.stderr.isatty():
            # The progress line shows it.
            return
        case {"event": "step", "step": step, "loss": loss, "accuracy": accuracy, "time_s": seconds}:
            text = f"step {step}  loss {loss:.8g}  {_right(accuracy)}{seconds:.3f} s"
        case {"event": "tested", "step": step, "loss": loss, "accuracy": accuracy, "num_examples": examples}:
            text = f"tested after step {step}: loss {loss:.8g}  {_right(accuracy)}({examples} examples)"
        case {"event": "done", "step_time_s": seconds, "measured_bytes": None}:
            text = f"median step {seconds:.3f} s"
        case {"step_time_s": seconds, "measured_bytes": moved}:
            text = f"median step {seconds:.3f} s; {moved:,} bytes moved between devices in a step"
        case _:
            raise AssertionError(f"unknown event {event}")
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def _right(accuracy: float | None) -> str:
    return "" if accuracy is None else f"accuracy {accuracy:.1%}  "


# -- a program in a separate process


_LAST_LINES = 15


def program_events(source: str, arguments: list[str]) -> Iterator[dict[str, Any]]:
    """Run a program with some arguments and --json, and yield its JSON lines as they arrive.

    A line that is not a JSON object is yielded as an event "text". The process is terminated when the iterator is
    closed, or fails.

    Raises:
        ProgramError: The program fails; the message has its last lines.
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
