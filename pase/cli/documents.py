"""Write plans for other programs and for people: `pase export`, and the pages of `pase report` and `pase serve`."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import click

from pase.cli.options import (
    ModelArguments,
    check_writable,
    choice_option,
    chosen_plan,
    complete_models,
    flag,
    is_plan_file,
    json_option,
    model_options,
    other_search_options,
    output_option,
    plan_argument,
    schema_option,
    time_limit_option,
)
from pase.cli.output import print_json, say, warn
from pase.cli.progress import progress
from pase.common.documents import write_atomically
from pase.common.options import WholeNumber, option
from pase.errors import ConfigurationError
from pase.planning.plan_file import plan_schema
from pase.views.exports import FORMATS, ExportOptions, export
from pase.views.reports.document import device_numbers, render, report_document, sweep

_HELP = "\n".join(
    [
        "Write PLAN, a file that 'pase search -o' made, or the best one for MODEL on --devices, in another format.",
        "",
        "What a format cannot express of the plan is listed on standard error.",
        "",
        "\b",
        *(f"{name:{max(map(len, FORMATS))}}  {found.summary}" for name, found in FORMATS.items()),
    ]
)


@click.command("export", help=_HELP, epilog="Example: pase export plan.json --to dot -o plan.dot")
@plan_argument
@model_options()
@choice_option("--to", FORMATS, "name", required=True, metavar="FORMAT", help="One of those above.")
@output_option("Write it here, not on standard output.")
@option("--fold/--no-fold", default=True, help="Draw blocks that repeat once, with their number (dot, mermaid, svg).")
@schema_option(plan_schema, "plan files")
@json_option
def export_command(plan: str, model: ModelArguments, name: str, output: Path | None, fold: bool, as_json: bool) -> None:
    """Write a plan in another format."""
    with progress() as on_progress:
        found = chosen_plan(plan, model, on_progress)
    exported = export(found, name, ExportOptions(fold=fold))
    for note in exported.notes:
        warn(note)
    if output:
        exported.save(output)
    if as_json:
        written = str(output) if output else None
        print_json({"format": name, "text": exported.text, "notes": exported.notes, "output": written})
    elif not output:
        # As bytes, so that the text does not depend on the encoding of the terminal.
        click.echo(exported.text.encode(), nl=False)


@click.command("report", epilog="Example: pase report plan.json -o report.html")
@click.argument("plans", metavar="PLAN|MODEL…", nargs=-1, required=True, shell_complete=complete_models)
@model_options()
@output_option(default=Path("report.html"), metavar="FILE", callback=None)
@option("--sweep", "numbers", metavar="A..B", help="Search the first plan's model on other numbers of devices: 1..64.")
@option("--why/--no-why", "explains", default=True, show_default=False, help="Say why each layer is as it is.")
@flag("--interactive", help="Carry what other configurations of each layer would cost.")
@other_search_options
@time_limit_option(
    "Seconds for saying why, and as many for --interactive; layers that are not reached are left out.", default=30.0
)
@json_option
def report_command(
    plans: Sequence[str],
    model: ModelArguments,
    output: Path,
    numbers: str | None,
    settings: dict[str, Any],
    as_json: bool,
    **options: Any,
) -> None:
    """Write a page that shows one plan, or several side by side; for a MODEL, the best one on --devices.

    It is one file that works without a network: the graph to zoom and search, what each layer costs and why it is
    split as it is, how its tensors are distributed over the devices, memory, and transfers between the devices.

    --cost-model, --stages, --micro-batches, --schedule and --modes apply to searches: of a MODEL, and of --sweep, where
    options that are not given are those of the first plan.
    """
    devices = None if numbers is None else device_numbers(numbers)
    if settings and numbers is None and all(map(is_plan_file, plans)):
        warn("nothing is searched for these plans: --cost-model, --stages, --modes and others are not used")
    if not as_json:
        check_writable(output)
    with progress() as on_progress:
        found = [chosen_plan(plan, model, on_progress, settings=settings) for plan in plans]
        named = dict(zip(_names([Path(plan) for plan in plans]), found, strict=True))
        swept = None
        if devices is not None:
            reload = None if is_plan_file(plans[0]) else replace(model, model=plans[0]).reload
            swept = sweep(found[0], devices, reload=reload, on_progress=on_progress, **settings)
        document = report_document(named, sweep=swept, on_progress=on_progress, **options)
        if as_json:
            print_json(document)
            return
        page = render(document)
        write_atomically(output, page)
    say(f"report of {', '.join(named)} written to {output} ({len(page.encode()) / 1e6:.1f} MB)")


def _names(paths: Sequence[Path]) -> list[str]:
    """Return a name for each file: its stem, with its folder if stems are equal, and a number if folders are, too."""
    stems = Counter(path.stem for path in paths)
    names = [path.stem if stems[path.stem] == 1 else f"{path.parent.name}/{path.stem}" for path in paths]
    unique: list[str] = []
    for name in names:
        numbered = (name if number == 1 else f"{name} ({number})" for number in count(1))
        unique.append(next(one for one in numbered if one not in unique))
    return unique


@click.command("serve", epilog="Example: pase serve plan.json")
@plan_argument
@model_options()
@other_search_options
@option("--port", type=WholeNumber(min=0, max=65535), default=0, show_default="any that is free", help="Of the page.")
@time_limit_option("Seconds for each answer: what is found by then is shown with its gap.", default=5.0)
def serve_command(plan: str, model: ModelArguments, settings: dict[str, Any], port: int, time_limit_s: float) -> None:
    """Show PLAN, or the best one for MODEL on --devices, on a page that plans again while its controls are moved.

    With a cost model that has time (alpha_beta, step) stages, micro-batches, the state of weights (ZeRO) and
    recomputation are moved, too; --stages and others say where they stand at first.

    The page is for this machine alone, and for those who have the address that is printed. Ctrl-C ends it.
    """
    from pase.views.reports.served import serve  # what plans again, which writing does without

    with progress() as on_progress:
        found = chosen_plan(plan, model, on_progress, settings=settings)
    reload = None if is_plan_file(plan) else replace(model, model=plan).reload
    try:
        serve(found, port=port, reload=reload, time_limit_s=time_limit_s, settings=settings, on_ready=say)
    except OSError as error:
        raise ConfigurationError(f"port {port} cannot be listened on: {error.strerror}; give another one") from None
