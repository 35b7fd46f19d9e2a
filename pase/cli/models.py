"""`pase models`: the built-in networks."""

import click

from pase.cli.options import json_option
from pase.cli.output import print_json, print_table
from pase.models import MODELS


@click.command("models", epilog="Example: pase models")
@json_option
def command(as_json: bool) -> None:
    """List the built-in networks, their default batch and the parameters that --arg reaches."""
    if as_json:
        print_json(
            {
                "models": [
                    {
                        "name": entry.name,
                        "description": entry.description,
                        "default_batch": entry.default_batch,
                        "parameters": dict(entry.parameters),
                    }
                    for entry in MODELS.values()
                ]
            }
        )
        return
    rows = [
        [
            entry.name,
            entry.description,
            str(entry.default_batch),
            " ".join(f"{name}={_text(value)}" for name, value in entry.parameters.items() if name != "batch"),
        ]
        for entry in MODELS.values()
    ]
    print_table([("name", "left"), ("network", "left"), ("batch", "right"), ("--arg", "left")], rows)


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
