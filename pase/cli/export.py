"""`pase export`: a plan in formats that other programs read."""

from pathlib import Path
from typing import Any

import click

from pase.cli.names import complete_models
from pase.cli.options import check_writable, chosen_plan, json_option, plan_options
from pase.cli.output import print_json, say, warn
from pase.cli.progress import progress
from pase.planning.plan_file import plan_schema
from pase.views.exports import FORMATS, ExportOptions, export

_WIDTH = max(map(len, FORMATS))
_HELP = "\n".join(
    [
        "Write PLAN, a file that 'pase search -o' made, or the best one for MODEL on --devices, in another format.",
        "",
        "What a format cannot say of the plan is told on standard error.",
        "",
        "\b",
        *(f"{name:{_WIDTH}}  {found.summary}" for name, found in FORMATS.items()),
    ]
)


@click.command("export", help=_HELP, epilog="Example: pase export plan.json --to dot -o plan.dot")
@click.argument("plan", metavar="PLAN|MODEL", required=False, shell_complete=complete_models)
@plan_options
@click.option("--to", "name", type=click.Choice(list(FORMATS)), metavar="FORMAT", help="One of those above.")
@click.option("--output", "-o", type=click.Path(path_type=Path), help="Write it here, not on standard output.")
@click.option(
    "--fold/--no-fold",
    default=True,
    show_default=True,
    help="Draw blocks that repeat once, with their number (dot, mermaid, svg).",
)
@click.option("--schema", is_flag=True, help="Print the JSON Schema of plan files.")
@json_option
def command(
    plan: str | None, name: str | None, output: Path | None, fold: bool, schema: bool, as_json: bool, **model: Any
) -> None:
    """Write a plan in another format, or print the schema of plans."""
    if schema:
        _print_schema(plan is not None or name is not None or output is not None)
        return
    if plan is None or name is None:
        missing = "'PLAN'" if plan is None else f"'--to': one of {', '.join(FORMATS)}"
        raise click.UsageError(f"Missing {missing}.")
    if output:
        check_writable(output)
    with progress() as on_progress:
        found = chosen_plan(plan, model, on_progress)
    exported = export(found, name, ExportOptions(fold=fold))
    for note in exported.notes:
        warn(note)
    if output:
        exported.save(output)
    if as_json:
        written = str(output) if output else None
        print_json({"format": name, "text": exported.text, "notes": list(exported.notes), "output": written})
    elif not output:
        # As bytes, so that the same text is written whatever the encoding of the terminal.
        click.echo(exported.text.encode(), nl=False)


def _print_schema(has_more: bool) -> None:
    if has_more:
        raise click.UsageError("--schema is of all plans; give --schema alone")
    for line in plan_schema().splitlines():
        say(line)
