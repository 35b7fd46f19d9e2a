"""`main`: the command line of an emitted program."""

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from pase.errors import PaseError, RuntimeFailure
from pase.runtime.compat import tf
from pase.runtime.data import Batches, read_arrays
from pase.runtime.measure import crossed_bytes
from pase.runtime.program import Program, Training

Build = Callable[[Program], Any]
Report = Callable[[dict[str, Any]], None]


def main(build: Build, *, num_devices: int, arguments: Sequence[str] | None = None) -> None:
    """Train as the command line says; exit with status 1 and one line where that cannot be done.

    build: declares the layers on a program and returns the loss. arguments: by default those of the process.
    """
    options = _parser().parse_args(arguments)
    report = _json_line if options.json else _text_line
    try:
        train(
            build,
            num_devices=num_devices,
            steps=options.steps,
            dtype=options.dtype,
            seed=options.seed,
            learning_rate=options.learning_rate,
            data_path=options.data,
            measure=options.measure,
            report=report,
        )
    except PaseError as error:
        sys.stderr.write(f"error: {error}\n")
        raise SystemExit(1) from None


def train(
    build: Build,
    *,
    num_devices: int,
    steps: int,
    dtype: str = "float32",
    seed: int = 0,
    learning_rate: float = 0.01,
    data_path: Path | None = None,
    measure: bool = False,
    report: Report | None = None,
) -> list[float]:
    """Build a program, train it and return the loss of every step, before its update.

    Reports events: ``built`` (build_time_s, predicted_bytes), ``step`` (step, loss, time_s), ``done`` (step_time_s,
    median without the first, measured_bytes where asked for). measure: count the bytes that cross devices in a step.
    """
    if learning_rate <= 0 or steps < 1:
        raise RuntimeFailure(f"steps is {steps} and the learning rate {learning_rate}; both must be above 0")
    report = report or _silent
    arrays = None if data_path is None else read_arrays(data_path)
    begin = time.perf_counter()
    with tf.Graph().as_default():
        program = Program(num_devices=num_devices, dtype=dtype)
        loss = build(program)
        # Before anything expensive: a wrong file is found out at once.
        batches = Batches(program.inputs, seed=seed, arrays=arrays)
        training = Training.start(program, loss, learning_rate=learning_rate, seed=seed)
        predicted_bytes = training.traffic.total_bytes
        report({"event": "built", "build_time_s": time.perf_counter() - begin, "predicted_bytes": predicted_bytes})
        losses, times, measured_bytes = [], [], None
        for step in range(steps):
            batch = batches.batch(step)
            begin = time.perf_counter()
            wants_metadata = measure and step == steps - 1
            result = training.step(batch, with_metadata=wants_metadata)
            times.append(time.perf_counter() - begin)
            losses.append(result.loss)
            report({"event": "step", "step": step + 1, "loss": result.loss, "time_s": times[-1]})
            if wants_metadata:
                measured_bytes = crossed_bytes(result.run_metadata, tf.get_default_graph())
        training.close()
    step_time_s = median(times[1:] or times)
    report({"event": "done", "step_time_s": step_time_s, "measured_bytes": measured_bytes})
    return losses


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Train this program on virtual CPU devices.")
    parser.add_argument("--steps", type=int, default=10, help="training steps (default: %(default)s)")
    parser.add_argument(
        "--data", type=Path, help="an .npz file with an array [N, ...] for each input; synthetic otherwise"
    )
    parser.add_argument("--dtype", choices=["float32", "float64"], default="float32")
    parser.add_argument("--learning-rate", type=float, default=0.01, help="(default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the initial weights and of synthetic data")
    parser.add_argument("--measure", action="store_true", help="count the bytes that cross devices in a step")
    parser.add_argument("--json", action="store_true", help="print a line of JSON for each event")
    return parser


def _silent(_: dict[str, Any]) -> None:
    """Report nothing."""


def _json_line(event: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(event) + "\n")
    sys.stdout.flush()


def _text_line(event: dict[str, Any]) -> None:
    match event:
        case {"event": "built", "build_time_s": seconds, "predicted_bytes": moved}:
            text = f"built in {seconds:.1f} s; {moved:,} bytes to move between devices in a step"
        case {"event": "step", "step": step, "loss": loss, "time_s": seconds}:
            text = f"step {step}  loss {loss:.8g}  {seconds:.3f} s"
        case {"event": "done", "step_time_s": seconds, "measured_bytes": None}:
            text = f"median step {seconds:.3f} s"
        case {"step_time_s": seconds, "measured_bytes": moved}:
            text = f"median step {seconds:.3f} s; {moved:,} bytes moved between devices in a step"
        case _:
            raise AssertionError(f"unknown event {event}")
    sys.stdout.write(text + "\n")
    sys.stdout.flush()
