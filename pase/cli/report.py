"""`pase report`: plans as one page to look at, a file that needs nothing else."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from pase.cli.names import complete_models
from pase.cli.options import check_writable, chosen_plan, json_option, plan_options
from pase.cli.output import print_json, say
from pase.cli.progress import progress
from pase.common.documents import write_atomically
from pase.views.reports import NamedPlan, device_numbers, render, report_document, sweep


@click.command("report", epilog="Example: pase report plan.json -o report.html")
@click.argument("plans", metavar="PLAN|MODEL…", nargs=-1, required=True, shell_complete=complete_models)
@plan_options
@click.option(
    "--output", "-o", type=click.Path(path_type=Path), default=Path("report.html"), show_default=True, metavar="FILE"
)
@click.option(
    "--sweep", "numbers", metavar="A..B", help="Search the first plan's model on other numbers of devices, too: 1..64."
)
@click.option("--why/--no-why", "explains", default=True, help="Say why each layer is as it is.")
@click.option(
    "--time-limit",
    "time_limit_s",
    type=click.FloatRange(min=0, min_open=True),
    default=30.0,
    show_default=True,
    help="Seconds for saying why, after which the rest of the layers is left out.",
)
@json_option
def command(
    plans: Sequence[str],
    output: Path,
    numbers: str | None,
    explains: bool,
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
        named = [NamedPlan(name=name, plan=plan) for name, plan in zip(names, found, strict=True)]
        document = report_document(
            named,
            sweep=None if devices is None else sweep(named[0].plan, devices, on_progress=on_progress),
            explains=explains,
            time_limit_s=time_limit_s,
            on_progress=on_progress,
        )
        if as_json:
            print_json(document)
            return
        page = render(document)
        write_atomically(output, page)
    say(f"report of {', '.join(one.name for one in named)} written to {output} ({len(page.encode()) / 1e6:.1f} MB)")


def _names(paths: Sequence[Path]) -> list[str]:
    """Return a name for each file: its stem, with its folder where two share it, and a number where that is too."""
    stems = Counter(path.stem for path in paths)
    names = [path.stem if stems[path.stem] == 1 else f"{path.parent.name}/{path.stem}" for path in paths]
    seen: Counter[str] = Counter()
    unique = []
    for name in names:
        seen[name] += 1
        unique.append(name if seen[name] == 1 else f"{name} ({seen[name]})")
    return unique
