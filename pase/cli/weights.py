"""`pase weights`: the weights of a model, for programs of its forward pass."""

import io
from pathlib import Path
from typing import Any

import click
import numpy as np

from pase.cli.names import complete_models
from pase.cli.options import arguments_option, batch_option, check_writable, json_option
from pase.cli.output import print_json, quantity, say
from pase.cli.progress import progress
from pase.common.documents import write_atomically
from pase.errors import ModelError
from pase.importers import is_builtin
from pase.importers.weights import read_weights


@click.command("weights", epilog="Example: pase weights model.onnx -o weights.npz")
@click.argument("model", shell_complete=complete_models)
@batch_option
@arguments_option
@click.option(
    "--output", "-o", type=click.Path(path_type=Path), required=True, help="Write the weights to this .npz file."
)
@json_option
def command(model: str, batch: int | None, arguments: dict[str, Any], output: Path, as_json: bool) -> None:
    """Write the weights of MODEL, an ONNX or .keras file or package.module:factory, as programs of its plan read them.

    The programs are those of 'pase emit --forward'.
    """
    check_writable(output)
    if is_builtin(model):
        raise ModelError(f"{model!r} is a built-in network: its weights are made when it is trained ('pase run')")
    with progress() as on_progress:
        on_progress("reading the weights", 0.0)
        found = read_weights(model, batch=batch, arguments=arguments)
    buffer = io.BytesIO()
    np.savez(buffer, **found)  # type: ignore[arg-type]
    try:
        write_atomically(output, buffer.getvalue())
    except OSError as error:
        raise ModelError(f"{output} cannot be written: {error.strerror or error}") from None
    size_bytes = sum(array.nbytes for array in found.values())
    if as_json:
        shapes = {name: list(array.shape) for name, array in found.items()}
        print_json({"output": str(output), "arrays": shapes, "size_bytes": size_bytes})
    else:
        say(f"{len(found)} arrays, {quantity(size_bytes, 'B')}, written to {output}")
