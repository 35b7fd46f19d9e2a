"""`pase emit`, `pase weights`, `pase launch`: programs of plans, the weights that they read, and where they run."""

import io
from pathlib import Path
from typing import Any

import click
import numpy as np

from pase.cli.options import (
    arguments_option,
    batch_option,
    check_writable,
    chosen_clusters,
    chosen_plan,
    json_option,
    model_argument,
    output_option,
    plan_argument,
    plan_options,
    process_options,
)
from pase.cli.output import print_json, quantity, say, warn
from pase.cli.progress import progress
from pase.common.documents import write_or_fail
from pase.errors import EmitError, ModelError
from pase.importers import is_builtin
from pase.targets.mesh_tensorflow.emitter import emit, emit_forward, outputs_left_out
from pase.targets.mesh_tensorflow.runtime.launch import launch_tasks


@click.command("emit", epilog="Example: pase emit plan.json -o train.py")
@plan_argument
@plan_options
@output_option("Write the program here, not on standard output.")
@click.option("--forward", is_flag=True, help="Of an imported model: a program that computes its outputs.")
@json_option
def emit_command(plan: str, output: Path | None, forward: bool, as_json: bool, **model: Any) -> None:
    """Write PLAN, a file that 'pase search -o' made, as a Mesh-TensorFlow program that trains with it.

    Of a MODEL, the best strategy on --devices is searched first.
    """
    if output:
        check_writable(output)
    with progress() as on_progress:
        read = chosen_plan(plan, model, on_progress)
        on_progress("writing the program", 0.0)
        source = emit_forward(read) if forward else emit(read)
    left_out = outputs_left_out(read) if forward else ()
    for text in left_out:
        warn(text)
    if output:
        write_or_fail(output, source, EmitError)
        how = "--weights weights.npz --data inputs.npz" if forward else "--steps 10"
        warn(f"program written to {output}; try: python {output} {how}")
    if as_json:
        print_json({"source": source, "output": str(output) if output else None, "left_out": list(left_out)})
    elif not output:
        click.echo(source, nl=False)


@click.command("weights", epilog="Example: pase weights model.onnx -o weights.npz")
@model_argument
@batch_option
@arguments_option
@output_option("Write the weights to this .npz file.", required=True)
@json_option
def weights_command(model: str, batch: int | None, arguments: dict[str, Any], output: Path, as_json: bool) -> None:
    """Write the weights of MODEL, an ONNX or .keras file or package.module:factory, as programs of its plan read them.

    The programs are those of 'pase emit --forward'.
    """
    from pase.importers.weights import read_weights  # every front end, which the other commands here do without

    check_writable(output)
    if is_builtin(model):
        raise ModelError(f"{model!r} is a built-in network: its weights are made when it is trained ('pase run')")
    with progress() as on_progress:
        on_progress("reading the weights", 0.0)
        found = read_weights(model, batch=batch, arguments=arguments)
    buffer = io.BytesIO()
    np.savez(buffer, **found)  # type: ignore[arg-type]
    write_or_fail(output, buffer.getvalue(), ModelError)
    size_bytes = sum(array.nbytes for array in found.values())
    if as_json:
        shapes = {name: list(array.shape) for name, array in found.items()}
        print_json({"output": str(output), "arrays": shapes, "size_bytes": size_bytes})
    else:
        say(f"{len(found)} arrays, {quantity(size_bytes, 'B')}, written to {output}")


@click.command(
    "launch",
    context_settings={"allow_interspersed_args": False},
    epilog="Example: pase launch --processes 2 -- train.py --steps 20",
)
@process_options(
    processes="Processes of this machine; they share the devices evenly.",
    hosts="HOST:PORT of each task, one a line, or with commas between.",
    timeout="End the job where a step takes longer than S seconds [never].",
)
@click.argument("program", nargs=-1, required=True, type=click.UNPROCESSED)
def launch_command(program: tuple[str, ...], **values: Any) -> int:
    """Run PROGRAM, a file that pase emit wrote, in several processes.

    The devices are spread over them in equal blocks; the losses are those of one process. Task 0 trains and writes.
    When a process dies, the job ends. TensorFlow's server has no authentication, whoever reaches it can run anything
    as you: it takes what is sent to --bind, and no more.
    """
    return launch_tasks(program, chosen_clusters(values))
