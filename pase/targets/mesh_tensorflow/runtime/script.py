"""A training program: its steps from the first to the last, and `main`, the command line of an emitted file."""

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Any

import click

from pase.common.options import ProgramCommand, option
from pase.errors import PaseError, ProgramError
from pase.targets.mesh_tensorflow.primitives.compat import tf
from pase.targets.mesh_tensorflow.primitives.mesh import ProgramGraph
from pase.targets.mesh_tensorflow.runtime.checkpoint import Checkpoint, Checkpointing
from pase.targets.mesh_tensorflow.runtime.cluster import Cluster, cluster_of, kept_text
from pase.targets.mesh_tensorflow.runtime.cluster_server import (
    Watch,
    run_in_cluster,
    serve,
    start_server,
    wait_for_others,
)
from pase.targets.mesh_tensorflow.runtime.devices import Devices, local_devices, share, virtual_cpus
from pase.targets.mesh_tensorflow.runtime.measure import crossed, peak_bytes
from pase.targets.mesh_tensorflow.runtime.program import Program
from pase.targets.mesh_tensorflow.runtime.training import Training, TrainingState
from pase.targets.training.checkpointing import check_fits, checkpoint_flags, stopped_text
from pase.targets.training.data import held_out_batches
from pase.targets.training.options import TrainingOptions, device_choice, device_options, training_options
from pase.targets.training.script import (
    Keeping,
    MetricsFile,
    Report,
    Steps,
    chosen_batches,
    given_values,
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

    Reports events: ``resumed`` (step), ``built`` (build_time_s, predicted_bytes) and those of `Steps.take`, of what was
    measured measured_bytes, host_bytes and whose they are: edges, layers.
    measure: count the bytes that cross devices in a step. keep_alive: move replicas that nobody uses too.
    """
    report = report or _silent
    dtype = options.dtype
    # Before anything expensive: what is wrong is found out at once.
    found = checkpointing.found() if checkpointing else None
    begin = time.perf_counter()
    devices = devices or virtual_cpus(num_devices)
    with ProgramGraph().as_default(), tf.device(devices.scope), ExitStack() as opened:
        program = Program(num_devices=num_devices, dtype=dtype, devices=devices)
        loss = build(program)
        kept = program.weights.values()
        constants = [each.name for each in kept if not (each.is_trained or each.is_frozen or each.is_statistic)]
        given = given_values(options.weights_path, constants)
        used_seed = found.seed if found else options.seed or 0
        first = found.step if found else 0
        batches = chosen_batches(program.inputs, used_seed, options.data_path, generator, first)
        test = held_out_batches(program.inputs, options.test_data_path) if options.test_data_path else None
        if found and checkpointing:
            check_fits(
                found,
                checkpointing.path_of(found),
                options,
                weights=found.shapes,
                expected={name: weight.shape for name, weight in program.weights.items()},
                data=batches.description,
            )
        resume = checkpointing is not None and checkpointing.resume is not None
        metrics = (
            opened.enter_context(MetricsFile(metrics_path, num_steps=first, resume=resume)) if metrics_path else None
        )
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

        def save(step: int) -> Path | None:
            if checkpointing is None or not checkpointing.is_due(step, options.steps):
                return None
            return checkpointing.save(training.state(), options, seed=used_seed, data=batches.description)

        def measured(record: Any) -> dict[str, Any]:
            moved = crossed(record, tf.get_default_graph(), training.traffic)
            return {
                "measured_bytes": moved.total_bytes,
                "host_bytes": moved.host_bytes,
                "between_processes_bytes": moved.between_processes_bytes,
                **tabulated(training.traffic.bytes_by_movement, moved.by_movement),
                "peak_memory_bytes": peak_bytes(record, tf.get_default_graph(), devices),
            }

        steps = Steps(
            options=options,
            first=first,
            batches=batches,
            test=(test, training.evaluate) if test else None,
            num_examples=program.inputs[0].shape[0] if program.inputs else 1,
            measured=measured if measure else None,
            keeping=Keeping(save=save, newest=checkpointing.newest) if checkpointing else None,
            metrics=metrics,
            progress=progress,
        )
        return steps.take(training, report)


def _state(found: Checkpoint) -> TrainingState:
    return TrainingState(num_steps=found.step, weights=found.weights, slots=found.slots)


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
    report = reporting(options)
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
        sys.stderr.write(stopped_text(options["checkpoint"]))
        raise SystemExit(130) from None


@click.command(cls=ProgramCommand, help="Train this program on virtual CPU devices, or on GPUs.")
@script_flags
@option("--keep-alive", is_flag=True, help="Move all that was planned, also replicas that nobody uses.")
@device_options
@checkpoint_flags
def command_of_program(**values: Any) -> None:
    """Declare the command line of an emitted program, which `main` reads."""
