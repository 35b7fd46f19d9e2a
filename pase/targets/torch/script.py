"""Entry points of emitted programs for PyTorch: training, outputs for data, and `main`, the command line."""

import inspect
import os
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from shlex import quote
from typing import Any

import click
import torch.distributed as dist

from pase.common.options import PATH, ProgramCommand, option
from pase.errors import PaseError, ProgramError
from pase.targets.torch.checkpoints import found_checkpoint, save_checkpoint
from pase.targets.torch.emitted import Build, Outputs
from pase.targets.torch.failures import tell_failure
from pase.targets.torch.launch import Ranks, join, leave, run_program
from pase.targets.torch.pipeline import Pipeline
from pase.targets.torch.stepping import measured_bytes
from pase.targets.torch.training import program_training
from pase.targets.torch.watch import agree, digest, versions
from pase.targets.training.checkpointing import CheckpointFolder, Kept, check_fits, checkpoint_flags, stopped_text
from pase.targets.training.data import (
    Array,
    filled_batches,
    held_out_batches,
    joined_rows,
    read_arrays,
    write_arrays,
)
from pase.targets.training.options import GPU, TrainingOptions, device_choice, device_options, training_options
from pase.targets.training.script import (
    Keeping,
    MetricsFile,
    Report,
    Steps,
    chosen_batches,
    reporting,
    script_flags,
)

__all__ = ["Outputs", "compute", "main", "program_training", "train"]


def train(
    build: Build | Pipeline,
    options: TrainingOptions,
    *,
    num_devices: int,
    micro_batches: int = 1,
    device: str | None = None,
    generator: str | None = None,
    checkpointing: CheckpointFolder | None = None,
    metrics_path: Path | None = None,
    measure: bool = False,
    report: Report | None = None,
    progress: bool = False,
) -> list[float]:
    """Train a program on this rank and return the loss of every step, before its update.

    Rank 0 reports events: ``resumed`` (step), ``built`` (build_time_s, predicted_bytes None) and those of `Steps.take`.

    Args:
        build: Declares the layers; or the stages.
        options: Training options.
        num_devices: Number of ranks.
        micro_batches: Micro-batches of a step, each with the program's batch; a batch of the data is all of them.
        device: "cpu" or "cuda".
        generator: ``package.module:function`` that yields the data, instead of a file; its module is executed.
        measure: Whether to count the bytes that ranks send in a step.
    """
    begin = time.perf_counter()
    ranks = _joined(num_devices, device)
    agree(lambda: (None, _same_on_all_ranks(build, options, num_devices, micro_batches, checkpointing)))
    is_first = ranks.rank == 0
    shown = report if report and is_first else _silent
    # Before anything expensive, so that errors are found immediately.
    found = found_checkpoint(checkpointing) if checkpointing else None
    kept = found[0] if found else None
    asked, options = options, replace(options, seed=kept.seed if kept else options.seed or 0)
    first = kept.step if kept else 0
    with ExitStack() as opened:
        training = program_training(build, ranks, options, micro_batches=micro_batches, is_restored=found is not None)
        module, inputs = training.module, training.module.step_inputs
        batches = chosen_batches(inputs, options.seed or 0, options.data_path, generator, first)
        test = (
            held_out_batches(module.program_inputs.values(), options.test_data_path) if options.test_data_path else None
        )
        if found:
            kept, opened_checkpoint = found
            shapes, data = module.weight_shapes, batches.description
            weights = opened_checkpoint.shapes
            check_fits(kept, opened_checkpoint.path, asked, weights=weights, expected=shapes, data=data)
        metrics = None
        if metrics_path and is_first:
            resume = checkpointing is not None and checkpointing.resume is not None
            metrics = opened.enter_context(MetricsFile(metrics_path, num_steps=first, resume=resume))
        if found:
            training.restore(found[1])
            shown({"event": "resumed", "step": first})
        for note in module.notes if progress and is_first else ():
            sys.stderr.write(f"note: {note}\n")
        shown({"event": "built", "build_time_s": time.perf_counter() - begin, "predicted_bytes": None})

        def save(step: int) -> Path | None:
            if checkpointing is None or not checkpointing.is_due(step, options.steps):
                return None
            training.check_finite()
            extra = Kept.of(options, step=step, seed=options.seed or 0, data=batches.description).document()
            folder, keep = checkpointing.folder, checkpointing.keep
            return save_checkpoint(folder, module, training.optimizer, step=step, extra=extra, keep=keep)

        steps = Steps(
            options=options,
            first=first,
            batches=batches,
            test=(test, training.evaluate) if test else None,
            num_examples=inputs[0].shape[0] if inputs else 1,
            measured=measured_bytes if measure else None,
            keeping=Keeping(save=save, newest=checkpointing.newest) if checkpointing else None,
            metrics=metrics,
            progress=progress and is_first,
        )
        return steps.take(training, shown)


def _same_on_all_ranks(
    build: Build | Pipeline,
    options: TrainingOptions,
    num_devices: int,
    micro_batches: int,
    checkpointing: CheckpointFolder | None,
) -> dict[str, object]:
    """Return the values that must be equal on all ranks, by their names in messages."""
    builds = [build] if not isinstance(build, Pipeline) else [*build.stages, build.schedule, build.micro_batches]
    kept = checkpointing and (checkpointing.save_every, checkpointing.keep, checkpointing.resume is None)
    return {
        **versions(),
        "the program": digest([_text_of(part) for part in builds]),
        "the number of devices": num_devices,
        "micro-batches": micro_batches,
        "--steps": options.steps,
        "--dtype": options.dtype,
        "--seed": options.seed or 0,
        "the optimizer or its options": repr(options.rule),
        "the learning rate or its schedule": repr(options.schedule),
        "--test-every": options.test_every,
        "--data": options.data_path is None,
        "--test-data": options.test_data_path is None,
        "--weights": options.weights_path is None,
        "the options of checkpoints": kept,
    }


def _text_of(part: Any) -> str:
    """Return the text of the program that declares layers, or its bytecode where there is no file of it."""
    if not callable(part):
        return str(part)
    try:
        return inspect.getsource(inspect.getmodule(part) or part)
    except (OSError, TypeError):
        code = getattr(part, "__code__", None)
        return "" if code is None else repr((code.co_code, code.co_names, code.co_varnames))


def _joined(num_devices: int, device: str | None) -> Ranks:
    ranks = join(device=device)
    if ranks.world_size != num_devices:
        raise ProgramError(
            f"the program is one of {num_devices} ranks, and {ranks.world_size} were started; start it with: torchrun "
            f"--nproc-per-node {num_devices} {quote(Path(sys.argv[0]).name)}"
        )
    return ranks


def compute(
    build: Build, options: TrainingOptions, data: Mapping[str, Array], *, num_devices: int, device: str | None = None
) -> dict[str, Array]:
    """Return the outputs of a program for all examples of some data, a batch at a time; the last one is filled up."""
    training = program_training(build, _joined(num_devices, device), options)
    inputs = list(training.module.program_inputs.values())
    batch = max((item.shape[0] for item in inputs if item.shape), default=1)
    num_examples, batches = filled_batches(inputs, data, batch)
    found = [training.outputs(arrays) for arrays in batches]
    return {name: joined_rows(name, [of[name] for of in found], num_examples, batch) for name in found[0]}


def _silent(_: dict[str, Any]) -> None:
    """Report nothing."""


# -- the command line


def main(
    build: Build | Pipeline, *, num_devices: int, micro_batches: int = 1, arguments: Sequence[str] | None = None
) -> None:
    """Train, or compute outputs, as the command line specifies; exit with status 1 and one line on failure.

    A process started directly starts the ranks on this machine, and is not one of them if there are several.

    Args:
        build: Declares the layers on a program and returns the loss, the outputs, or both; or the stages that do so.
        num_devices: Number of ranks.
        micro_batches: Micro-batches of a training step, where stages do not specify them.
        arguments: Default: those of the process.
    """
    given = sys.argv[1:] if arguments is None else list(arguments)
    values = command_of_program.read(given)
    is_rank = "RANK" in os.environ or num_devices == 1
    try:
        options = training_options(values)
        if values["output"] and options.data_path is None:
            raise ProgramError("--output needs --data PATH, the inputs to compute the outputs of")
        checkpointing = CheckpointFolder.asked(values)
        if is_rank:
            _run_rank(build, num_devices, micro_batches, values, options, checkpointing)
        else:
            run_program([sys.argv[0], *given], ranks=num_devices)
    except PaseError as error:
        # The process that started this rank reports its failure.
        if not (is_rank and tell_failure(error)):
            sys.stderr.write(f"error: {error}\n")
        raise SystemExit(1) from None
    except KeyboardInterrupt:
        sys.stderr.write(stopped_text(values["checkpoint"]))
        raise SystemExit(130) from None
    if is_rank:
        leave()


def _run_rank(
    build: Build | Pipeline,
    num_devices: int,
    micro_batches: int,
    values: Mapping[str, Any],
    options: TrainingOptions,
    checkpointing: CheckpointFolder | None,
) -> None:
    device = "cuda" if device_choice(values).kind == GPU else "cpu"
    if values["output"] and options.data_path:
        if isinstance(build, Pipeline):
            raise ProgramError("--output needs a program that returns outputs, and stages lead to the loss alone")
        found = compute(build, options, read_arrays(options.data_path), num_devices=num_devices, device=device)
        if dist.get_rank() == 0:
            write_arrays(values["output"], found)
        return
    train(
        build,
        options,
        num_devices=num_devices,
        micro_batches=micro_batches,
        device=device,
        generator=values["data_generator"],
        checkpointing=checkpointing,
        metrics_path=values["metrics"],
        measure=values["measure"],
        report=reporting(values),
        progress=True,
    )


@click.command(cls=ProgramCommand, help="Train this program on local processes, or as a rank of torchrun's.")
@script_flags
@option(
    "--output",
    heading="Data",
    type=PATH,
    metavar="FILE",
    help="Write the model's outputs for --data here; do not train.",
)
@device_options
@checkpoint_flags
def command_of_program(**values: Any) -> None:
    """Declare the command line of an emitted program, which `main` reads."""
