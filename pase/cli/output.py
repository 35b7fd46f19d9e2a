"""What commands print: tables and JSON on standard output, progress and warnings on standard error."""

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from time import monotonic
from typing import Any

import click

from pase.search import Progress

QUIET_S = 1.0
"""Work that is done sooner than this shows no progress."""

REDRAW_S = 0.1
"""A progress line is redrawn no more often than this."""


def print_json(document: dict[str, Any]) -> None:
    """Print one JSON object on standard output."""
    click.echo(json.dumps(document, indent=1))


def warn(text: str) -> None:
    """Print a warning on standard error."""
    click.echo(f"pase: {text}", err=True)


def print_table(headers: Sequence[tuple[str, str]], rows: Sequence[Sequence[str]], title: str = "") -> None:
    """Print a table; headers: (text, "left" or "right"). Plain text into a pipe, colours and width of a terminal."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    terminal = sys.stdout.isatty()
    table = Table(title=title or None, title_justify="left", box=None, pad_edge=False, header_style="bold")
    for text, justify in headers:
        is_left = justify == "left"
        table.add_column(Text(text), justify="left" if is_left else "right", overflow="fold", no_wrap=not is_left)
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    # Into a pipe lines are as long as they need to be: nothing is cut or folded for a screen that is not there.
    console = Console(width=None if terminal else 100_000, highlight=False, soft_wrap=not terminal)
    console.print(table)


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
            click.echo(f"\r\x1b[K{what} {fraction:4.0%}", err=True, nl=False)
            shown_s = now_s
        elif not terminal and what != last:
            click.echo(f"pase: {what} …", err=True)
        last = what

    try:
        yield show
    finally:
        if terminal and shown_s:
            click.echo("\r\x1b[K", err=True, nl=False)


def quantity(value: float, unit: str) -> str:
    """Return a number with three digits and a decimal prefix: 1.23 GFLOP."""
    if value == 0:
        return f"0 {unit}"
    prefixes = ("p", "n", "µ", "m", "", "k", "M", "G", "T", "P", "E", "Z")
    exponent = 0
    while abs(value) >= 999.5 and exponent < len(prefixes) - 5:
        value, exponent = value / 1000, exponent + 1
    while abs(value) < 0.9995 and exponent > -4:
        value, exponent = value * 1000, exponent - 1
    digits = 2 if abs(value) < 9.995 else 1 if abs(value) < 99.95 else 0
    return f"{value:.{digits}f} {prefixes[exponent + 4]}{unit}"


def duration(time_s: float) -> str:
    """Return a time with a fitting unit: 12 ms, 3.4 s, 2 min 5 s."""
    if time_s < 1:
        return f"{time_s * 1000:.0f} ms"
    if time_s < 100:
        return f"{time_s:.1f} s"
    return f"{int(time_s) // 60} min {int(time_s) % 60} s"
