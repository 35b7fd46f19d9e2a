"""`pase export`: a plan in formats that other programs read."""

from pathlib import Path

import click

from pase.cli.options import check_writable, json_option
from pase.cli.output import print_json, say, warn
from pase.documents import write_atomically
from pase.errors import ExportError
from pase.exports import FORMATS, ExportOptions, export
from pase.plan_file import plan_schema, read_plan

_WIDTH = max(map(len, FORMATS))
_HELP = "\n".join(
    [
        "Write PLAN, a file that 'pase search -o' made, in a format that other programs read.",
        "",
        "What a format cannot say of the plan is told on standard error.",
        "",
        "\b",
        *(f"{name:{_WIDTH}}  {found.summary}" for name, found in FORMATS.items()),
    ]
)


@click.command("export", help=_HELP, epilog="Example: pase export plan.json --to dot -o plan.dot")
@click.argument("plan", type=click.Path(path_type=Path), required=False)
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
def command(plan: Path | None, name: str | None, output: Path | None, fold: bool, schema: bool, as_json: bool) -> None:
    """Write a plan in another format, or print the schema of plans."""
    if schema:
        _print_schema(plan is not None or name is not None or output is not None)
        return
    if plan is None or name is None:
        missing = "'PLAN'" if plan is None else f"'--to': one of {', '.join(FORMATS)}"
        raise click.UsageError(f"Missing {missing}.")
    if output:
        check_writable(output)
    exported = export(read_plan(plan), name, ExportOptions(fold=fold))
    for note in exported.notes:
        warn(note)
    if output:
        _write(exported.text, output)
    if as_json:
        written = str(output) if output else None
        print_json({"format": name, "text": exported.text, "notes": list(exported.notes), "output": written})
    elif not output:
        # As bytes, so that the same text is written whatever the encoding of the terminal.
        click.echo(exported.text.encode(), nl=False)


def _write(text: str, output: Path) -> None:
    try:
        write_atomically(output, text)
    except OSError as error:
        raise ExportError(f"{output} cannot be written: {error.strerror or error}") from None


def _print_schema(has_more: bool) -> None:
    if has_more:
        raise click.UsageError("--schema is of all plans; give --schema alone")
    for line in plan_schema().splitlines():
        say(line)
