"""Programs of a plan: `pase emit` and `pase weights` write them, `pase run` trains with them."""

import io
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from shlex import quote
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import Any

import click
import numpy as np

from pase.cli.main import EXIT_INPUT
from pase.cli.options import (
    ModelArguments,
    arguments_option,
    batch_option,
    checked_factory,
    choice_option,
    chosen_plan,
    complete_models,
    flag,
    json_option,
    model_argument,
    model_options,
    output_option,
    plan_argument,
)
from pase.cli.output import print_facts, print_json, print_table, say, warn
from pase.cli.progress import progress
from pase.common.documents import write_or_fail
from pase.common.options import option
from pase.common.words import duration, percentage, quantity
from pase.datasets.dataset import Part, fit_to
from pase.datasets.registry import SOURCES, load_dataset
from pase.errors import EmitError, ModelError
from pase.importers import is_builtin
from pase.importers.front_end import is_factory
from pase.planning.plan import Plan
from pase.sharding.boxes import whole
from pase.sharding.traffic import HeldWeight, held_weights, parameters_per_device
from pase.targets.execute import RunResult, run_factory, run_plan
from pase.targets.factories import Factory, factory_of
from pase.targets.programs import TARGETS, emit, target_of
from pase.targets.training.data import data_inputs
from pase.targets.training.options import CPU, device_choice, device_options, training_flags, training_options

PHASES = ("forward", "backward", "update")

_FEW_WORKERS = 8
_FEW_WEIGHTS = 32
"""The parameters of each worker are tabulated for up to this many weights; --json always has them."""
_FEW_COLUMNS = 4
"""Up to this many workers, each has a column."""

_PARTS: Mapping[str, Part] = MappingProxyType({"data": "train", "test_data": "test"})
"""Options that name data, and the part of a data set that each of them uses."""

_target_option = choice_option(
    "--target", TARGETS, help="The framework that runs it [torch for an imported model, else mesh_tensorflow]."
)


@click.command("run", epilog="Example: pase run alexnet --devices 8 --steps 3")
@click.argument("plan_or_model", metavar="PLAN|MODEL", shell_complete=complete_models)
@option("--model", "factory", metavar="FACTORY", help="Of PLAN, package.module:function: train its module itself.")
@model_options()
@_target_option
@option("--steps", type=click.IntRange(min=1), default=5, help="Training steps.")
@training_flags
@device_options
@flag("--measure", help="Count the bytes that cross devices in a step.")
@json_option
def run_command(
    plan_or_model: str,
    factory: str | None,
    model: ModelArguments,
    target: str | None,
    measure: bool,
    as_json: bool,
    **others: Any,
) -> int:
    """Train with PLAN, a file, or with the best strategy for MODEL on --devices, and compare with one device.

    Emits the program, runs it on virtual CPUs or on GPUs, for PyTorch in a process for each device, and runs the
    single-device program on the same weights and data: the losses are equal up to rounding (try --dtype float64), or
    the exit status is 1. A PyTorch module that a factory makes, package.module:function as MODEL or as --model of PLAN,
    is trained as pase.parallelize has it, and by itself.
    """
    with progress() as on_progress, TemporaryDirectory(prefix="pase-data-") as folder:
        plan = chosen_plan(plan_or_model, model, on_progress)
        for name, part in _PARTS.items():
            others[name] = _as_file(others[name], part, plan, Path(folder))
        options = training_options(others)
        choice = device_choice(others)
        chosen = target_of(plan, target)

        def report(what: str, done: int, total: int) -> None:
            on_progress(what, done / total)

        made_by = _factory(plan_or_model, factory, model, plan) if chosen.takes_factories else None
        if made_by is not None:
            result = run_factory(plan, made_by, options, device=choice.kind, measure=measure, on_progress=report)
        else:
            result = run_plan(plan, options, target=chosen, choice=choice, measure=measure, on_progress=report)
    if as_json:
        _print_document(plan, result)
    else:
        _print_result(plan, result, f"{chosen.runs_on if choice.kind == CPU else choice.text}, {options.dtype}")
    if not result.disagreement:
        return 0
    is_exact = options.dtype == "float64"
    hint = (
        "the program computes something else than the model" if is_exact else "--dtype float64 tells it from rounding"
    )
    warn(f"{result.disagreement}; {hint}")
    return EXIT_INPUT


def _factory(plan_or_model: str, factory: str | None, model: ModelArguments, plan: Plan) -> Factory | None:
    """Return the factory of the module to train; None where the program of a plan is trained."""
    if is_factory(plan_or_model):
        if factory is not None:
            raise click.UsageError("--model is of a PLAN; leave it out")
        return Factory(name=plan_or_model, batch=model.batch, arguments=model.arguments)
    if factory is not None:
        return factory_of(plan, checked_factory(factory))
    if plan.graph.call:
        warn("this is the program of the plan; --model package.module:function trains the PyTorch module itself")
    return None


def _print_document(plan: Plan, result: RunResult) -> None:
    weights = held_weights(plan)
    document = asdict(result)
    optimiser_bytes = document.pop("optimiser_bytes")
    print_json(
        {
            **document,
            "parameters": {
                "total": sum(weight.size for weight in weights),
                "per_device": parameters_per_device(weights),
                "weights": [asdict(weight) for weight in weights],
            },
            "predicted_memory_bytes": _memory_bytes(result),
            "predicted_memory": {**document["predicted_memory"], "optimiser_bytes": optimiser_bytes},
            "peak_memory_bytes": result.peak_memory_bytes or None,
        }
    )


def _memory_bytes(result: RunResult) -> int:
    return result.predicted_memory.total_bytes + result.optimiser_bytes


def _print_result(plan: Plan, result: RunResult, devices: str) -> None:
    """Print the steps, the facts and the tables of a run; `devices` describes what it ran on, and in which type."""
    weights = held_weights(plan)
    _print_steps(result)
    say()
    say(f"{plan.graph.name} on {plan.num_devices} {devices}")
    moved = [f"{quantity(result.predicted_bytes, 'B')} a step predicted"]
    if result.measured_bytes is not None:
        ratio = result.measured_bytes / result.predicted_bytes if result.predicted_bytes else 1.0
        moved.append(f"{quantity(result.measured_bytes, 'B')} a step measured   ({ratio:.2%} of it)")
    memory = [f"{quantity(_memory_bytes(result), 'B')} predicted"]
    if peaks := result.peak_memory_bytes:
        low, high = quantity(min(peaks), "B"), quantity(max(peaks), "B")
        memory.append(f"{low} to {high} at most, as its allocator recorded")
    host = None if result.host_bytes is None else f"{quantity(result.host_bytes, 'B')} a step, and the loss to it"
    print_facts(
        {
            "largest difference": f"{result.max_relative_difference:.1e}   (relative)",
            "bytes between devices": moved,
            "bytes from the host": host,
            "parameters": _held(sum(weight.size for weight in weights), parameters_per_device(weights)),
            "memory of a device": memory,
            "building the program": duration(result.build_time_s),
            "one step": f"{duration(result.step_time_s)}   (they share this machine)",
        }
    )
    if plan.num_devices <= _FEW_WORKERS and 0 < len(weights) <= _FEW_WEIGHTS:
        say()
        _print_parameters(weights)
    if result.edges or result.layers:
        say()
        _print_moved(result)


def _as_file(named: Path | None, part: Part, plan: Plan, folder: Path) -> Path | None:
    """Return the file that a program reads for an option; a data set given by name is first written to it."""
    if named is None or str(named).partition(":")[0] not in SOURCES or named.exists():
        return named
    found = fit_to(load_dataset(str(named), part=part), data_inputs(plan.graph).values())
    path = folder / f"{part}.npz"
    np.savez(path, **found.arrays)  # type: ignore[arg-type]
    return path


def _print_steps(result: RunResult) -> None:
    """Print a row for each step, followed by one for each test, with the values of one device for comparison."""
    heads = ["loss", "on one device", "difference", "accuracy"]
    steps = zip(result.losses, result.reference_losses, result.accuracies, strict=True)
    print_table(
        ["step", *heads],
        [
            [step, *_compared(ours, reference), percentage(accuracy, 2)]
            for step, (ours, reference, accuracy) in enumerate(steps, start=1)
        ],
    )
    if result.tests:
        say()
        print_table(
            ["tested after step", "examples", *heads, "on one device"],
            [
                [
                    *(ours.step, ours.num_examples, *_compared(ours.loss, reference.loss)),
                    *(percentage(ours.accuracy, 2), percentage(reference.accuracy, 2)),
                ]
                for ours, reference in zip(result.tests, result.reference_tests, strict=True)
            ],
        )


def _compared(ours: float, reference: float) -> list[str]:
    return [f"{ours:.9g}", f"{reference:.9g}", f"{abs(ours - reference) / max(abs(reference), 1e-300):.1e}"]


def _held(total: int, held: Sequence[int]) -> str:
    """Return the number of parameters in all and on a worker, as text."""
    if not held:
        return "none"
    if min(held) == max(held):
        return f"{total:,}, of which each worker holds {held[0]:,}"
    return f"{total:,}, of which a worker holds {min(held):,} to {max(held):,}"


def _print_parameters(weights: Sequence[HeldWeight]) -> None:
    """Print the part of each weight that each worker holds; with many workers, the workers that hold each part."""
    num_workers = len(weights[0].parts)
    rows = []
    for weight in weights:
        shape, parts = " × ".join(map(str, weight.shape)), [_part(weight, worker) for worker in range(num_workers)]
        if num_workers <= _FEW_COLUMNS:
            rows.append([weight.name, shape, *parts])
            continue
        for number, part in enumerate(dict.fromkeys(parts)):
            workers = " ".join(str(worker) for worker in range(num_workers) if parts[worker] == part)
            rows.append([*(("", "") if number else (weight.name, shape)), part, workers])
    each = [f"worker {worker} holds" for worker in range(num_workers)]
    print_table(["<weight", "shape", *(each if num_workers <= _FEW_COLUMNS else ["<part", "<of workers"])], rows)


def _part(weight: HeldWeight, worker: int) -> str:
    part = weight.parts[worker]
    return "all" if part == whole(weight.shape) else f"[{', '.join(f'{low}:{high}' for low, high in part)}]"


def _print_moved(result: RunResult) -> None:
    """Print the bytes that crossed devices, for each edge and within each layer, with predictions by phase."""
    named = [(f"{row['producer']} → {row['consumer']}", row) for row in result.edges]
    named += [(str(row["name"]), row) for row in result.layers]
    print_table(
        ["<edge, or sums within a layer", *PHASES, "predicted, B", "measured, B"],
        [
            [name, *(row[phase]["predicted_bytes"] for phase in PHASES), row["predicted_bytes"], row["measured_bytes"]]
            for name, row in named
            if row["predicted_bytes"] or row["measured_bytes"]
        ],
    )


@click.command("emit", epilog="Example: pase emit plan.json -o train.py")
@plan_argument
@model_options()
@output_option("Write the program here, not on standard output.")
@_target_option
@json_option
def emit_command(plan: str, model: ModelArguments, output: Path | None, target: str | None, as_json: bool) -> None:
    """Write PLAN, a file that 'pase search -o' made, as a program.

    It trains the model; of an imported model it also returns the outputs, with the loss or alone. Programs for
    mesh_tensorflow are of built-in networks, and only train.

    For a MODEL, the best strategy on --devices is searched first.
    """
    with progress() as on_progress:
        read = chosen_plan(plan, model, on_progress)
        on_progress("writing the program", 0.0)
        source = emit(read, target=target)
    if output:
        write_or_fail(output, source, EmitError)
        how = "--steps 10" if _trains(read) else "--weights weights.npz --data inputs.npz --output outputs.npz"
        warn(f"program written to {output}; try: python {quote(str(output))} {how}")
    if as_json:
        print_json({"source": source, "output": str(output) if output else None})
    elif not output:
        click.echo(source, nl=False)


def _trains(plan: Plan) -> bool:
    """Return whether programs of a plan train: without a known loss they only compute outputs."""
    try:
        return bool(plan.graph.loss_layer)
    except EmitError:
        return False


@click.command("weights", epilog="Example: pase weights model.onnx -o weights.npz")
@model_argument
@batch_option
@arguments_option
@output_option("Write the weights to this .npz file.", required=True)
@json_option
def weights_command(model: str, batch: int | None, arguments: dict[str, Any], output: Path, as_json: bool) -> None:
    """Write the weights of MODEL, an ONNX or .keras file or package.module:factory, as programs of its plan read them.

    The programs are those of 'pase emit --target torch', which take the file as --weights.
    """
    from pase.importers.weights import read_weights  # every front end, which the other commands here do without

    if is_builtin(model):
        raise ModelError(f"{model!r} is a built-in network: its weights are made when it is trained ('pase run')")
    with progress("reading the weights"):
        found = read_weights(model, batch=batch, arguments=arguments)
    buffer = io.BytesIO()
    np.savez(buffer, **found)  # type: ignore[arg-type]
    write_or_fail(output, buffer.getvalue(), ModelError)
    size_bytes = sum(array.nbytes for array in found.values())
    if as_json:
        shapes = {name: array.shape for name, array in found.items()}
        print_json({"output": str(output), "arrays": shapes, "size_bytes": size_bytes})
    else:
        say(f"{len(found)} arrays, {quantity(size_bytes, 'B')}, written to {output}")
