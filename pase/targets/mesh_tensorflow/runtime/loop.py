"""`train`: a program built and trained, with its checkpoints, metrics and reports."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from pase.errors import RuntimeFailure
from pase.targets.mesh_tensorflow.runtime.checkpoint import Checkpoint, Checkpointing, check_fits
from pase.targets.mesh_tensorflow.runtime.compat import tf
from pase.targets.mesh_tensorflow.runtime.data import (
    Array,
    Batches,
    DataInput,
    GeneratedBatches,
    evaluated,
    held_out_batches,
    load_function,
    read_arrays,
)
from pase.targets.mesh_tensorflow.runtime.devices import Devices, virtual_cpus
from pase.targets.mesh_tensorflow.runtime.measure import crossed, peak_bytes, tabulated
from pase.targets.mesh_tensorflow.runtime.metrics import MetricsFile, ProgressLine
from pase.targets.mesh_tensorflow.runtime.options import TrainingOptions
from pase.targets.mesh_tensorflow.runtime.program import Program
from pase.targets.mesh_tensorflow.runtime.training import Training, TrainingState

Build = Callable[[Program], Any]
Report = Callable[[dict[str, Any]], None]


def train(
    build: Build,
    options: TrainingOptions,
    *,
    num_devices: int,
    devices: Devices | None = None,
    generator: str | None = None,
    checkpointing: Checkpointing | None = None,
    metrics_path: Path | None = None,
    measure: bool = False,
    keep_alive: bool = False,
    report: Report | None = None,
    progress: bool = False,
) -> list[float]:
    """Build a program, train it and return the loss of every step, before its update.

    devices: which ones, by default virtual CPUs of this process.
    generator: ``package.module:function`` that yields the data, instead of a file of them; its module is executed.

    Reports events: ``resumed`` (step, checkpoint), ``built`` (build_time_s, predicted_bytes), ``step`` (step, loss,
    accuracy, learning_rate, examples_per_s, time_s), ``tested`` (step, loss, accuracy, num_examples), ``saved`` (step,
    path), ``done`` (step_time_s, median without the first; where asked for measured_bytes, host_bytes and whose they
    are: edges, layers).
    measure: count the bytes that cross devices in a step. keep_alive: move replicas that nobody uses too.
    """
    report = report or _silent
    steps, dtype = options.steps, options.dtype
    # Before anything expensive: what is wrong is found out at once.
    found = checkpointing.found() if checkpointing else None
    begin = time.perf_counter()
    devices = devices or virtual_cpus(num_devices)
    with tf.Graph().as_default(), tf.device(devices.scope), ExitStack() as opened:
        program = Program(num_devices=num_devices, dtype=dtype, devices=devices)
        loss = build(program)
        given = initial_values(program, options.weights_path)
        used_seed = found.seed if found else options.seed or 0
        first = found.step if found else 0
        batches = _batches(program.inputs, used_seed, options.data_path, generator, first)
        test = options.test_data_path and held_out_batches(program.inputs, options.test_data_path)
        if found and checkpointing:
            data = batches.description
            check_fits(found, checkpointing, program, options, data=data)
        resume = checkpointing is not None and checkpointing.resume is not None
        metrics = metrics_path and opened.enter_context(MetricsFile(metrics_path, num_steps=first, resume=resume))
        training = Training.start(
            program,
            loss,
            learning_rate=options.schedule.peak,
            seed=used_seed,
            rule=options.rule,
            keep_alive=keep_alive,
            values=found.weights if found else given,
        )
        opened.enter_context(closing(training))
        if found:
            training.restore(_state(found))
            report({"event": "resumed", "step": found.step})
        predicted_bytes = training.traffic.total_bytes
        report({"event": "built", "build_time_s": time.perf_counter() - begin, "predicted_bytes": predicted_bytes})
        losses, times = [], []
        measured: dict[str, Any] = {"measured_bytes": None}
        line = ProgressLine(steps) if progress else None
        num_examples = program.inputs[0].shape[0] if program.inputs else 1
        for step in range(first, steps):
            batch = batches.batch(step)
            rate = options.schedule.rate(step)
            begin = time.perf_counter()
            wants_metadata = measure and step == steps - 1
            with _told_of_the_checkpoint(checkpointing, line):
                result = training.step(batch, learning_rate=rate, with_metadata=wants_metadata)
            times.append(time.perf_counter() - begin)
            losses.append(result.loss)
            values = {
                "step": step + 1,
                "loss": result.loss,
                "accuracy": result.accuracy,
                "learning_rate": rate,
                "examples_per_s": num_examples / times[-1],
                "time_s": times[-1],
            }
            report({"event": "step", **values})
            if line:
                line.show(step + 1, result.loss, num_examples / times[-1], accuracy=result.accuracy)
            shown: dict[str, Any] = {}
            if test and options.is_test_due(step + 1):
                with _told_of_the_checkpoint(checkpointing, line):
                    on_test = evaluated(test, training.evaluate, step=step + 1)
                shown = {"test_loss": on_test.loss, "test_accuracy": on_test.accuracy}
                report({"event": "tested", **asdict(on_test)})
            if metrics:
                metrics.write({**values, **shown, "unix_time_s": time.time()})
            if checkpointing and checkpointing.is_due(step + 1, steps):
                with _told_of_the_checkpoint(checkpointing, line):
                    path = checkpointing.save(
                        training.state(), dtype=dtype, seed=used_seed, rule=options.rule, data=batches.description
                    )
                report({"event": "saved", "step": step + 1, "path": str(path)})
            if wants_metadata:
                moved = crossed(result.run_metadata, tf.get_default_graph(), training.traffic)
                measured = {"measured_bytes": moved.total_bytes, "host_bytes": moved.host_bytes}
                measured["between_processes_bytes"] = moved.between_processes_bytes
                measured |= tabulated(training.traffic, moved)
                measured["peak_memory_bytes"] = peak_bytes(result.run_metadata, tf.get_default_graph(), devices)
        if line:
            line.end()
    step_time_s = median(times[1:] or times)
    report({"event": "done", "step_time_s": step_time_s, **measured})
    return losses


def initial_values(program: Program, path: Path | None) -> Mapping[str, Array] | None:
    """Return the weights and constants of a file to begin with; None where all are drawn.

    Raises RuntimeFailure where a program has constants and no file is given.
    """
    if path is not None:
        return read_arrays(path)
    constants = [name for name, weight in program.weights.items() if not weight.is_trained]
    if constants:
        raise RuntimeFailure(
            f"the network is computed with constants of its model, such as {constants[0]!r}; write them with: pase "
            "weights MODEL -o weights.npz, and give --weights weights.npz"
        )
    return None


def _batches(
    inputs: list[DataInput], seed: int, data_path: Path | None, generator: str | None, first: int
) -> Batches | GeneratedBatches:
    if generator is None:
        arrays = None if data_path is None else read_arrays(data_path)
        return Batches(inputs, seed=seed, arrays=arrays)
    if data_path is not None:
        raise RuntimeFailure("both --data and --data-generator are given; choose one of them")
    return GeneratedBatches(inputs, load_function(generator), name=generator, start=first)


def _state(found: Checkpoint) -> TrainingState:
    return TrainingState(num_steps=found.step, weights=found.weights, slots=found.slots)


@contextmanager
def _told_of_the_checkpoint(checkpointing: Checkpointing | None, line: ProgressLine | None) -> Iterator[None]:
    """Have a failure end the line of progress, and name the checkpoint that is left."""
    try:
        yield
    except RuntimeFailure as error:
        if line:
            line.end()
        kept = checkpointing.newest() if checkpointing else None
        if kept is None:
            raise
        raise RuntimeFailure(f"{error}; the last checkpoint, {kept}, is as it was") from None


def _silent(_: dict[str, Any]) -> None:
    """Report nothing."""
