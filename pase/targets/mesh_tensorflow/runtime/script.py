"""A training program: its steps from the first to the last, and `main`, the command line of an emitted file."""

import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import click

from pase.common.options import ProgramCommand, option
from pase.errors import PaseError
from pase.targets.mesh_tensorflow.primitives.compat import tf
from pase.targets.mesh_tensorflow.primitives.mesh import ProgramGraph
from pase.targets.mesh_tensorflow.runtime.devices import Devices, local_devices, virtual_cpus
from pase.targets.mesh_tensorflow.runtime.measure import crossed, peak_bytes
from pase.targets.mesh_tensorflow.runtime.program import Program
from pase.targets.mesh_tensorflow.runtime.training import Training
from pase.targets.training.checkpointing import stopped_text
from pase.targets.training.data import held_out_batches, read_arrays
from pase.targets.training.options import TrainingOptions, device_choice, device_options, training_options
from pase.targets.training.script import (
    MetricsFile,
    Report,
    Steps,
    chosen_batches,
    reporting,
    script_flags,
    tabulated,
)

Build = Callable[[Program], Any]


def train(
    build: Build,
    options: TrainingOptions,
    *,
    num_devices: int,
    devices: Devices | None = None,
    generator: str | None = None,
    metrics_path: Path | None = None,
    measure: bool = False,
    keep_alive: bool = False,
    report: Report | None = None,
    progress: bool = False,
) -> list[float]:
    """Build a program, train it and return the loss of every step, before its update.

    devices: which ones, by default virtual CPUs of this process.
    generator: ``package.module:function`` that yields the data, instead of a file of them; its module is executed.

    Reports events: ``built`` (build_time_s, predicted_bytes) and those of `Steps.take`, of what was measured
    measured_bytes, host_bytes and whose they are: edges, layers.
    measure: count the bytes that cross devices in a step. keep_alive: move replicas that nobody uses too.
    """
    report = report or _silent
    dtype = options.dtype
    begin = time.perf_counter()
    devices = devices or virtual_cpus(num_devices)
    with ProgramGraph().as_default(), ExitStack() as opened:
        program = Program(num_devices=num_devices, dtype=dtype, devices=devices)
        loss = build(program)
        given = None if options.weights_path is None else read_arrays(options.weights_path)
        seed = options.seed or 0
        batches = chosen_batches(program.inputs, seed, options.data_path, generator, 0)
        test = held_out_batches(program.inputs, options.test_data_path) if options.test_data_path else None
        metrics = opened.enter_context(MetricsFile(metrics_path, num_steps=0, resume=False)) if metrics_path else None
        training = Training.start(
            program,
            loss,
            learning_rate=options.schedule.peak,
            seed=seed,
            rule=options.rule,
            keep_alive=keep_alive,
            values=given,
        )
        opened.enter_context(closing(training))
        predicted_bytes = training.traffic.total_bytes
        report({"event": "built", "build_time_s": time.perf_counter() - begin, "predicted_bytes": predicted_bytes})

        def measured(record: Any) -> dict[str, Any]:
            moved = crossed(record, tf.get_default_graph(), training.traffic)
            return {
                "measured_bytes": moved.total_bytes,
                "host_bytes": moved.host_bytes,
                **tabulated(training.traffic.bytes_by_movement, moved.by_movement),
                "peak_memory_bytes": peak_bytes(record, tf.get_default_graph(), devices),
            }

        steps = Steps(
            options=options,
            batches=batches,
            test=(test, training.evaluate) if test else None,
            num_examples=program.inputs[0].shape[0] if program.inputs else 1,
            measured=measured if measure else None,
            metrics=metrics,
            progress=progress,
        )
        return steps.take(training, report)


def _silent(_: dict[str, Any]) -> None:
    """Report nothing."""


def main(build: Build, *, num_devices: int, arguments: Sequence[str] | None = None) -> None:
    """Train as the command line says; exit with status 1 and one line where that cannot be done.

    build: declares the layers on a program and returns the loss. arguments: by default those of the process.
    """
    values = command_of_program.read(arguments)
    try:
        train(
            build,
            training_options(values),
            num_devices=num_devices,
            devices=local_devices(device_choice(values), num_devices),
            generator=values["data_generator"],
            metrics_path=values["metrics"],
            measure=values["measure"],
            keep_alive=values["keep_alive"],
            report=reporting(values),
            progress=True,
        )
    except PaseError as error:
        sys.stderr.write(f"error: {error}\n")
        raise SystemExit(1) from None
    except KeyboardInterrupt:
        sys.stderr.write(stopped_text(None))
        raise SystemExit(130) from None


@click.command(cls=ProgramCommand, help="Train this program on virtual CPU devices, or on GPUs.")
@script_flags
@option("--keep-alive", is_flag=True, help="Move all that was planned, also replicas that nobody uses.")
@device_options
def command_of_program(**values: Any) -> None:
    """Declare the command line of an emitted program, which `main` reads."""
