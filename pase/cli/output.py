"""What commands print: tables and JSON on standard output, progress and warnings on standard error."""

import json
import os
import re
import sys
from collections.abc import Iterable, Sequence
from shutil import get_terminal_size
from typing import TYPE_CHECKING, Any, TextIO

import click

from pase.common.names import visible
from pase.common.quantities import duration as duration
from pase.common.quantities import quantity as quantity

if TYPE_CHECKING:  # plans need NumPy, which `pase --help` does not wait for
    from pase.planning.plan import Plan

_LEAST_TEXT = 12
"""A column of names or text is not made narrower than this."""

_MOST_LINES = 20
"""What would fold into more lines in its column is shortened."""


def print_json(document: dict[str, Any]) -> None:
    """Print one JSON object on standard output."""
    click.echo(json.dumps(document, indent=1))


def say(text: str = "") -> None:
    """Print a line on standard output; on a terminal that is narrower it goes on below, where its last part began."""
    text = visible(text)
    for line in _folded(text, _columns()) if is_terminal(sys.stdout) else [text]:
        click.echo(line)


def say_whole(text: str) -> None:
    """Print a line that is to be copied, a command, whole on any terminal."""
    click.echo(visible(text))


def warn(text: str) -> None:
    """Print a warning on standard error."""
    click.echo(f"pase: {visible(text)}", err=True)


def is_terminal(stream: TextIO) -> bool:
    """Return whether a stream is a terminal that can move its cursor."""
    return stream.isatty() and os.environ.get("TERM", "").lower() not in {"dumb", "unknown"}


def has_colour(stream: TextIO) -> bool:
    """Return whether to write in colours and bold to a stream: to a terminal, unless NO_COLOR is set."""
    return is_terminal(stream) and not os.environ.get("NO_COLOR")


def shortened(text: str, columns: int) -> str:
    """Return a text in some columns of a terminal, with an ellipsis in its middle for what does not fit."""
    from rich.cells import cell_len, set_cell_size

    if cell_len(text) <= columns:
        return text
    begin = set_cell_size(text, (columns - 1) - (columns - 1) // 2).rstrip()
    end = text[max(len(text) - (columns - 1) // 2, 0) :] if columns > 2 else ""
    while cell_len(begin) + 1 + cell_len(end) > columns:
        end = end[1:]
    return f"{begin}…{end}"


def hidden_text(plan: "Plan") -> str:
    """Return what of a plan's communication is hidden: "8.20 ms of 8.21 ms that can hide"."""
    unit = plan.cost_unit
    return f"{quantity(plan.hidden_cost, unit)} of {quantity(plan.hideable_cost, unit)} that can hide"


def step_text(plan: "Plan") -> str:
    """Return how a step is made up."""
    micro_batches = f"{plan.micro_batches} micro-batch{'es' * (plan.micro_batches > 1)}"
    if plan.num_groups == 1:
        return micro_batches
    group = plan.num_devices // plan.num_groups
    if plan.num_stages > plan.num_groups:
        each = plan.num_stages // plan.num_groups
        devices = f"{plan.num_groups} groups of {group} devices with {each} stages each"
        return f"{micro_batches} through {devices} ({plan.schedule})"
    return f"{micro_batches} through {plan.num_groups} stages of {group} devices ({plan.schedule})"


def total_cost_text(plan: "Plan") -> str:
    """Return what a plan costs and, where that is in FLOP, the seconds that these take at the peak of its machine."""
    if plan.cost_unit != "FLOP":
        return quantity(plan.total_cost, plan.cost_unit)
    time_s = plan.total_cost / plan.machine.peak_flop_per_s()
    return f"{quantity(plan.total_cost, 'FLOP')}, {quantity(time_s, 's')} at a device's peak"


def print_table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table; headers: those of columns of text, at the left, begin with "<".

    Into a pipe it is plain text, else folded to the width of a terminal.

    What folds there, between words, are the headers and the left columns but the first. Where that is not enough, long
    names are shortened, and then all columns fold. On a terminal that is narrower still lines are as long as they need
    to be, and it folds them.
    """
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    cells = [[visible(cell) for cell in row] for row in rows]
    terminal = sys.stdout.isatty()
    # Into a pipe nothing is folded for a screen that is not there.
    is_text = [header.startswith("<") for header in headers]
    titles = [header.removeprefix("<") for header in headers]
    widths, gap = _widths(titles, cells, is_text, _columns() if terminal else None)
    console = Console(
        force_terminal=terminal,
        color_system="auto" if has_colour(sys.stdout) else None,
        highlight=False,
    )
    table = Table(box=None, pad_edge=False, collapse_padding=gap == 1, header_style="bold")
    for title, is_left, width in zip(titles, is_text, widths, strict=True):
        table.add_column(Text(title), justify="left" if is_left else "right", overflow="fold", width=width)
    for row in cells:
        table.add_row(*(Text(_fitting(cell, i, widths[i])) for i, cell in enumerate(row)))
    console.width = sum(widths) + gap * len(widths)
    with console.capture() as captured:
        console.print(table)
    for line in captured.get().splitlines():
        click.echo(line.rstrip())


def _columns() -> int:
    """Return the width of the terminal at standard output."""
    return max(get_terminal_size().columns, 1)


def _fitting(cell: str, column: int, width: int) -> str:
    """Return a cell whose words fit: the first column's do not fold."""
    if column == 0:
        return shortened(cell, width)
    return " ".join(shortened(word, width) for word in shortened(cell, _MOST_LINES * width).split(" "))


def _widths(
    headers: Sequence[str], rows: Sequence[Sequence[str]], is_text: Sequence[bool], available: int | None
) -> tuple[list[int], int]:
    """Return the width of each column and of the gap between two: less where that is too much for what is available.

    What gives way first are the columns with most to fold, then the widest ones.
    """
    columns = [[row[i] for row in rows] for i in range(len(headers))]
    widths = [_longest((header, *column)) for header, column in zip(headers, columns, strict=True)]
    if available is None:
        return widths, 2
    in_header = [_longest(header.split()) for header in headers]
    in_words = [
        max(head, _longest(word for cell in column for word in cell.split()))
        for head, column in zip(in_header, columns, strict=True)
    ]
    # What each column may be narrowed to: as long as nothing is cut and no figure folds; with long names cut; at all.
    whole = [
        words if is_text[i] and i else max(head, _longest(column))
        for i, (head, words, column) in enumerate(zip(in_header, in_words, columns, strict=True))
    ]
    cut = [
        max(head, min(width, _LEAST_TEXT)) if text else width
        for head, width, text in zip(in_header, whole, is_text, strict=True)
    ]
    least = [min(width, words) for width, words in zip(cut, in_words, strict=True)]
    gap = 2 if sum(whole) + 2 * (len(whole) - 1) <= available else 1
    for limits in (whole, cut, least):
        widths = _narrowed(widths, limits, available - gap * (len(widths) - 1))
    return widths, gap


def _narrowed(widths: Sequence[int], least: Sequence[int], room: int) -> list[int]:
    """Return widths that add up to the room, or are the least: what has most to give gives first."""
    found = list(widths)
    for _ in range(sum(widths) - room):
        slack = [width - minimum for width, minimum in zip(found, least, strict=True)]
        if max(slack) <= 0:
            break
        found[slack.index(max(slack))] -= 1
    return found


def _longest(texts: Iterable[str]) -> int:
    from rich.cells import cell_len

    return max(map(cell_len, texts), default=0)


def _folded(text: str, columns: int) -> list[str]:
    """Return a line as lines of some columns; those after the first begin below what stands after its first gap."""
    from rich.cells import cell_len, chop_cells

    if cell_len(text) <= columns:
        return [text]
    gap = re.search(r"\S {2,}(?=\S)", text)
    indent = gap.end() if gap and gap.end() <= columns // 2 else len(text) - len(text.lstrip(" ")) + 2
    lines, line = [], ""
    for word in re.findall(r" *[^ ]+", text):
        if line.strip() and cell_len(line) + cell_len(word) > columns:
            lines.append(line)
            line = " " * indent + word.lstrip(" ")
        else:
            line += word
        *whole, line = chop_cells(line, columns)
        lines += whole
    return [*lines, line]
