"""`pase emit`: a plan as a Mesh-TensorFlow program."""

from pathlib import Path
from typing import Any

import click

from pase.cli.names import complete_models
from pase.cli.options import check_writable, chosen_plan, json_option, plan_options
from pase.cli.output import print_json, warn
from pase.cli.progress import progress
from pase.common.documents import write_atomically
from pase.errors import EmitError
from pase.targets.mesh_tensorflow.emitter import emit, emit_forward, outputs_left_out


@click.command("emit", epilog="Example: pase emit plan.json -o train.py")
@click.argument("plan", metavar="PLAN|MODEL", shell_complete=complete_models)
@plan_options
@click.option("--output", "-o", type=click.Path(path_type=Path), help="Write the program here, not on standard output.")
@click.option("--forward", is_flag=True, help="Of an imported model: a program that computes its outputs.")
@json_option
def command(plan: str, output: Path | None, forward: bool, as_json: bool, **model: Any) -> None:
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
        try:
            write_atomically(output, source)
        except OSError as error:
            raise EmitError(f"{output} cannot be written: {error.strerror or error}") from None
        how = "--weights weights.npz --data inputs.npz" if forward else "--steps 10"
        warn(f"program written to {output}; try: python {output} {how}")
    if as_json:
        print_json({"source": source, "output": str(output) if output else None, "left_out": list(left_out)})
    elif not output:
        click.echo(source, nl=False)
