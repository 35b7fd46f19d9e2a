"""A training program: its steps from the first to the last, and `main`, the command line of an emitted file."""

import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import click

from pase.errors import PaseError, ProgramError
from pase.targets.mesh_tensorflow.primitives.compat import tf
from pase.targets.mesh_tensorflow.primitives.mesh import ProgramGraph
from pase.targets.mesh_tensorflow.runtime.checkpoint import NEWEST, Checkpoint, Checkpointing, check_fits
from pase.targets.mesh_tensorflow.runtime.cluster import Cluster, cluster_of, kept_text
from pase.targets.mesh_tensorflow.runtime.cluster_server import (
    Watch,
    run_in_cluster,
    serve,
    start_server,
    wait_for_others,
)
from pase.targets.mesh_tensorflow.runtime.devices import Devices, local_devices, share, virtual_cpus
from pase.targets.mesh_tensorflow.runtime.measure import crossed, peak_bytes, tabulated
from pase.targets.mesh_tensorflow.runtime.metrics import MetricsFile, ProgressLine
from pase.targets.mesh_tensorflow.runtime.program import Program
from pase.targets.mesh_tensorflow.runtime.training import Training, TrainingState
from pase.targets.training.data import (
    Array,
    Batches,
    DataInput,
    GeneratedBatches,
    evaluated,
    held_out_batches,
    load_function,
    read_arrays,
)
from pase.targets.training.options import (
    PATH,
    ProgramCommand,
    TrainingOptions,
    device_choice,
    device_options,
    option,
    training_flags,
    training_options,
)

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
    with ProgramGraph().as_default(), tf.device(devices.scope), ExitStack() as opened:
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

    Raises ProgramError where a program has constants and no file is given.
    """
    if path is not None:
        return read_arrays(path)
    constants = [name for name, weight in program.weights.items() if not weight.is_trained and not weight.is_statistic]
    if constants:
        raise ProgramError(
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
        raise ProgramError("both --data and --data-generator are given; choose one of them")
    return GeneratedBatches(inputs, load_function(generator), name=generator, start=first)


def _state(found: Checkpoint) -> TrainingState:
    return TrainingState(num_steps=found.step, weights=found.weights, slots=found.slots)


@contextmanager
def _told_of_the_checkpoint(checkpointing: Checkpointing | None, line: ProgressLine | None) -> Iterator[None]:
    """Have a failure end the line of progress, and name the checkpoint that is left."""
    try:
        yield
    except ProgramError as error:
        if line:
            line.end()
        kept = checkpointing.newest() if checkpointing else None
        if kept is None:
            raise
        raise ProgramError(f"{error}; the last checkpoint, {kept}, is as it was") from None


def _silent(_: dict[str, Any]) -> None:
    """Report nothing."""


def main(build: Build, *, num_devices: int, arguments: Sequence[str] | None = None) -> None:
    """Train as the command line says; exit with status 1 and one line where that cannot be done.

    build: declares the layers on a program and returns the loss. arguments: by default those of the process.
    """
    options = command_of_program.read(arguments)
    try:
        cluster = cluster_of()
    except ProgramError as error:
        sys.stderr.write(f"error: {error}\n")
        raise SystemExit(1) from None
    if cluster is None:
        _train(build, num_devices, options)
    else:
        run_in_cluster(partial(_take_part, build, num_devices, options, cluster), partial(_last_checkpoint, options))


def _take_part(build: Build, num_devices: int, options: Mapping[str, Any], cluster: Cluster) -> None:
    """Train as the chief of a cluster, or serve it."""
    local = local_devices(device_choice(options), share(num_devices, len(cluster.addresses)), cluster.local_task)
    devices = start_server(cluster, num_devices, local)
    if cluster.task != 0:
        serve(cluster)
        return
    wait_for_others(cluster)
    watch = Watch(cluster, partial(_last_checkpoint, options))
    watch.start()
    _train(build, num_devices, options, devices, watch)
    watch.stop()


def _last_checkpoint(options: Mapping[str, Any]) -> str:
    """Return what to say of the newest checkpoint where a training ends early."""
    return kept_text(options["checkpoint"])


def _train(
    build: Build,
    num_devices: int,
    options: Mapping[str, Any],
    devices: Devices | None = None,
    watch: Watch | None = None,
) -> None:
    report = _json_line if options["json"] else _text_line
    if options["data_generator"]:
        module = options["data_generator"].partition(":")[0]
        sys.stderr.write(f"note: --data-generator executes the code of module {module}\n")
    try:
        train(
            build,
            training_options(options),
            num_devices=num_devices,
            devices=devices or local_devices(device_choice(options), num_devices),
            generator=options["data_generator"],
            checkpointing=Checkpointing.asked(options),
            metrics_path=options["metrics"],
            measure=options["measure"],
            keep_alive=options["keep_alive"],
            report=watch.reporting(report) if watch else report,
            progress=True,
        )
    except PaseError as error:
        sys.stderr.write(f"error: {error}\n")
        raise SystemExit(1) from None
    except KeyboardInterrupt:
        hint = f"; go on with --checkpoint {options['checkpoint']} --resume" if options["checkpoint"] else ""
        sys.stderr.write(f"\nstopped{hint}\n")
        raise SystemExit(130) from None


@click.command(cls=ProgramCommand, help="Train this program on virtual CPU devices, or on GPUs.")
@option("--steps", type=int, default=10, help="Training steps in all.")
@option("--measure", is_flag=True, help="Count the bytes that cross devices in a step.")
@option("--keep-alive", is_flag=True, help="Move all that was planned, also replicas that nobody uses.")
@option("--json", is_flag=True, help="Print a line of JSON for each event.")
@option("--metrics", type=PATH, metavar="FILE", help="Append a line of JSON for each step to a file.")
@option(
    "--data-generator",
    metavar="PACKAGE.MODULE:FUNCTION",
    help="A function that yields a dict of arrays for each step; the module's code is executed.",
)
@training_flags
@device_options
@option("--checkpoint", "Checkpoints", type=PATH, metavar="DIR", help="The folder to keep checkpoints in.")
@option("--save-every", "Checkpoints", type=int, metavar="N", help="Steps [100]; the last one is saved too.")
@option("--keep", "Checkpoints", type=int, default=3, metavar="K", help="Keep the last K.")
@option(
    "--resume",
    "Checkpoints",
    is_flag=False,
    flag_value=NEWEST,
    metavar="[FILE]",
    help="Go on from the newest checkpoint in DIR, or from a file; begin with step 1 where there is none.",
)
def command_of_program(**values: Any) -> None:
    """Declare the command line of an emitted program, which `main` reads."""


def _json_line(event: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(event) + "\n")
    sys.stdout.flush()


def _text_line(event: dict[str, Any]) -> None:
    match event:
        case {"event": "built", "build_time_s": seconds, "predicted_bytes": moved}:
            text = f"built in {seconds:.1f} s; {moved:,} bytes to move between devices in a step"
        case {"event": "resumed", "step": step}:
            text = f"going on after step {step}"
        case {"event": "saved", "step": step, "path": path}:
            text = f"saved step {step} in {path}"
        case {"event": "step"} if sys.stdout.isatty() and sys.stderr.isatty():
            # The line of progress says it.
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
