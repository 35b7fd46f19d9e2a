"""What commands print: tables and JSON on standard output, progress and warnings on standard error."""

import json
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from time import monotonic
from typing import Any

import click

from pase.quantities import duration as duration
from pase.quantities import quantity as quantity
from pase.search import Progress

QUIET_S = 1.0
"""Work that is done sooner than this shows no progress."""

REDRAW_S = 0.1
"""A progress line is redrawn no more often than this."""


def print_json(document: dict[str, Any]) -> None:
    """Print one JSON object on standard output."""
    click.echo(json.dumps(document, indent=1))


def say(text: str = "") -> None:
    """Print a line on standard output."""
    click.echo(printable(text))


def warn(text: str) -> None:
    """Print a warning on standard error."""
    click.echo(f"pase: {printable(text)}", err=True)


def printable(text: str) -> str:
    """Return a text with whatever could steer a terminal written out: names in files come from anywhere."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def print_table(headers: Sequence[tuple[str, str]], rows: Sequence[Sequence[str]]) -> None:
    """Print a table; headers: (text, "left" or "right"). Plain text into a pipe, folded to the width of a terminal.

    What folds, between words, are the left columns but the first. Where that is not enough lines are as long as they
    need to be, and the terminal folds them.
    """
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    cells = [[printable(cell) for cell in row] for row in rows]
    folds = [i > 0 and justify == "left" for i, (_, justify) in enumerate(headers)]
    terminal = sys.stdout.isatty()
    console = Console(
        force_terminal=terminal,
        color_system="auto" if terminal and not os.environ.get("NO_COLOR") else None,
        highlight=False,
    )
    # Into a pipe nothing is folded for a screen that is not there.
    widths, gap = _widths([text for text, _ in headers], cells, folds, console.width if terminal else None)
    table = Table(box=None, pad_edge=False, collapse_padding=gap == 1, header_style="bold")
    for (text, justify), width in zip(headers, widths, strict=True):
        table.add_column(Text(text), justify="left" if justify == "left" else "right", overflow="fold", width=width)
    for row in cells:
        table.add_row(*map(Text, row))
    console.width = sum(widths) + gap * len(widths)
    with console.capture() as captured:
        console.print(table)
    for line in captured.get().splitlines():
        click.echo(line.rstrip())


def _widths(
    headers: Sequence[str], rows: Sequence[Sequence[str]], folds: Sequence[bool], available: int | None
) -> tuple[list[int], int]:
    """Return the width of each column and of the gap between two: less where that is too much for what is available.

    What gives way first are the columns with most to fold.
    """
    from rich.cells import cell_len

    def longest(texts: Iterable[str]) -> int:
        return max(map(cell_len, texts), default=0)

    columns = [[row[i] for row in rows] for i in range(len(headers))]
    widths = [longest((header, *column)) for header, column in zip(headers, columns, strict=True)]
    if available is None:
        return widths, 2
    least = [
        max(
            longest(header.split()),
            longest(word for cell in column for word in cell.split()) if fold else longest(column),
        )
        for header, column, fold in zip(headers, columns, folds, strict=True)
    ]
    gap = 2 if sum(least) + 2 * (len(least) - 1) <= available else 1
    excess = sum(widths) + gap * (len(widths) - 1) - available
    while excess > 0 and widths != least:
        slack = [width - minimum for width, minimum in zip(widths, least, strict=True)]
        widths[slack.index(max(slack))] -= 1
        excess -= 1
    return widths, gap


@contextmanager
def progress() -> Iterator[Progress]:
    """Give a function that shows progress on standard error, once the work has taken longer than a second."""
    terminal = sys.stderr.isatty()
    start_s = monotonic()
    shown_s, last = 0.0, ""

    def show(what: str, fraction: float) -> None:
        nonlocal shown_s, last
        now_s = monotonic()
        if now_s - start_s < QUIET_S:
            return
        if terminal and now_s - shown_s >= REDRAW_S:
            click.echo(f"\r\x1b[K{printable(what)} {fraction:4.0%}", err=True, nl=False)
            shown_s = now_s
        elif not terminal and what != last:
            click.echo(f"pase: {printable(what)} …", err=True)
        last = what

    try:
        yield show
    finally:
        if terminal and shown_s:
            click.echo("\r\x1b[K", err=True, nl=False)
