"""`pase export`: a plan in formats that other programs read."""

from collections import Counter
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Any

import click

from pase.cli.options import (
    check_writable,
    chosen_plan,
    complete_models,
    json_option,
    output_option,
    plan_options,
    time_limit_option,
)
from pase.cli.output import print_json, say, warn
from pase.cli.progress import progress
from pase.common.documents import write_atomically
from pase.planning.plan_file import plan_schema
from pase.views.exports import FORMATS, ExportOptions, export
from pase.views.reports.document import render, report_document
from pase.views.reports.sweep import device_numbers, sweep

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
@output_option("Write it here, not on standard output.")
@click.option(
    "--fold/--no-fold",
    default=True,
    show_default=True,
    help="Draw blocks that repeat once, with their number (dot, mermaid, svg).",
)
@click.option("--schema", is_flag=True, help="Print the JSON Schema of plan files.")
@json_option
def export_command(
    plan: str | None, name: str | None, output: Path | None, fold: bool, schema: bool, as_json: bool, **model: Any
) -> None:
    """Write a plan in another format, or print the schema of plans."""
    if schema:
        if plan is not None or name is not None or output is not None:
            raise click.UsageError("--schema is of all plans; give --schema alone")
        for line in plan_schema().splitlines():
            say(line)
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


@click.command("report", epilog="Example: pase report plan.json -o report.html")
@click.argument("plans", metavar="PLAN|MODEL…", nargs=-1, required=True, shell_complete=complete_models)
@plan_options
@output_option(default=Path("report.html"), show_default=True, metavar="FILE")
@click.option(
    "--sweep", "numbers", metavar="A..B", help="Search the first plan's model on other numbers of devices, too: 1..64."
)
@click.option("--why/--no-why", "explains", default=True, help="Say why each layer is as it is.")
@click.option("--interactive", is_flag=True, help="Carry what other configurations of each layer would cost.")
@time_limit_option(
    "Seconds for saying why, and as many for --interactive; layers that are not reached are left out.",
    default=30.0,
    show_default=True,
)
@json_option
def report_command(
    plans: Sequence[str],
    output: Path,
    numbers: str | None,
    explains: bool,
    interactive: bool,
    time_limit_s: float,
    as_json: bool,
    **model: Any,
) -> None:
    """Write a page that shows one plan, or several beside one another; of a MODEL, the best one on --devices.

    It is one file that works without a network: the graph to zoom and search, what each layer costs and why it is
    split as it is, how its tensors lie over the devices, memory, and what the devices send one another.
    """
    devices = None if numbers is None else device_numbers(numbers)
    if not as_json:
        check_writable(output)
    names = _names([Path(plan) for plan in plans])
    with progress() as on_progress:
        found = [chosen_plan(plan, model, on_progress) for plan in plans]
        named = dict(zip(names, found, strict=True))
        document = report_document(
            named,
            sweep=None if devices is None else sweep(found[0], devices, on_progress=on_progress),
            explains=explains,
            interactive=interactive,
            time_limit_s=time_limit_s,
            on_progress=on_progress,
        )
        if as_json:
            print_json(document)
            return
        page = render(document)
        write_atomically(output, page)
    say(f"report of {', '.join(named)} written to {output} ({len(page.encode()) / 1e6:.1f} MB)")


def _names(paths: Sequence[Path]) -> list[str]:
    """Return a name for each file: its stem, with its folder where two share it, and a number where that is too."""
    stems = Counter(path.stem for path in paths)
    names = [path.stem if stems[path.stem] == 1 else f"{path.parent.name}/{path.stem}" for path in paths]
    unique: list[str] = []
    for name in names:
        numbered = (name if number == 1 else f"{name} ({number})" for number in count(1))
        unique.append(next(one for one in numbered if one not in unique))
    return unique
