"""Output of commands: tables, facts and JSON on standard output, warnings on standard error."""

import json
import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from shutil import get_terminal_size
from typing import Any, TextIO

import click

from pase.common.words import shortened as shortened_text
from pase.common.words import visible

_LEAST_TEXT = 12
"""Least width of a column of names or text."""

_MOST_LINES = 20
"""Maximum number of lines of a cell; longer text is shortened."""

_TITLE = 22
"""Width of a fact's title, in columns."""


def print_json(document: Mapping[str, Any]) -> None:
    """Print one JSON object on standard output."""
    click.echo(json.dumps(document, indent=1))


def say(text: str = "") -> None:
    """Print a line on standard output; on a narrower terminal it continues below, aligned with its last part."""
    text = visible(text)
    for line in _folded(text, _columns()) if is_terminal(sys.stdout) else [text]:
        click.echo(line)


def say_all(lines: Iterable[str]) -> None:
    """Print lines that are to be copied, unfolded on any terminal."""
    for line in lines:
        click.echo(visible(line))


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
    """Return a text that fits some columns of a terminal, with an ellipsis in place of its middle if necessary."""
    from rich.cells import cell_len

    return shortened_text(text, columns, cell_len, narrowest=0.1)


def print_facts(facts: Mapping[str, str | Sequence[str] | None], *, width: int = _TITLE) -> None:
    """Print facts by title, on one or several lines each; empty ones are omitted."""
    for title, texts in facts.items():
        for i, text in enumerate([texts] if isinstance(texts, str) and texts else texts or ()):
            say(f"  {'' if i else title:<{width}}  {text}")


def print_table(headers: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print a table.

    A pipe receives plain text; on a terminal the table is folded to its width. Headers and the left columns except the
    first are folded between words. If that is not enough, long names are shortened, then all columns are folded. On an
    even narrower terminal, lines have the length that they need, and the terminal folds them.

    Args:
        headers: Headers; those of left-aligned text columns start with "<".
        rows: Cells; None is empty.
    """
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    cells = [["" if c is None else f"{c:,}" if isinstance(c, int) else visible(str(c)) for c in row] for row in rows]
    is_text = [header.startswith("<") for header in headers]
    titles = [header.removeprefix("<") for header in headers]
    terminal = sys.stdout.isatty()
    # Output to a pipe is not folded.
    widths, gap = _widths(titles, cells, is_text, _columns() if terminal else None)
    colours: Any = "auto" if has_colour(sys.stdout) else None
    console = Console(force_terminal=terminal, color_system=colours, highlight=False)
    console.width = sum(widths) + gap * len(widths)
    table = Table(box=None, pad_edge=False, collapse_padding=gap == 1, header_style="bold")
    for title, is_left, width in zip(titles, is_text, widths, strict=True):
        table.add_column(Text(title), justify="left" if is_left else "right", overflow="fold", width=width)
    for name, *others in cells:
        # The first column is not folded between words.
        folding = (
            " ".join(shortened(word, width) for word in shortened(cell, _MOST_LINES * width).split(" "))
            for cell, width in zip(others, widths[1:], strict=True)
        )
        table.add_row(*map(Text, (shortened(name, widths[0]), *folding)))
    with console.capture() as captured:
        console.print(table)
    for line in captured.get().splitlines():
        click.echo(line.rstrip())


def _columns() -> int:
    """Return the width of the terminal at standard output."""
    return max(get_terminal_size().columns, 1)


def _widths(
    headers: Sequence[str], rows: Sequence[Sequence[str]], is_text: Sequence[bool], available: int | None
) -> tuple[list[int], int]:
    """Return the width of each column and of the gap between two, reduced if the available width is exceeded."""
    columns = [[row[i] for row in rows] for i in range(len(headers))]
    widths = [_longest((header, *column)) for header, column in zip(headers, columns, strict=True)]
    if available is None:
        return widths, 2
    # Least widths of the columns: without cutting names or folding figures; with long names cut; absolute minimum.
    whole, cut, least = [], [], []
    for i, (header, column) in enumerate(zip(headers, columns, strict=True)):
        head = _longest(header.split())
        words = max(head, _longest(word for cell in column for word in cell.split()))
        whole.append(words if is_text[i] and i else max(head, _longest(column)))
        cut.append(max(head, min(whole[-1], _LEAST_TEXT)) if is_text[i] else whole[-1])
        least.append(min(cut[-1], words))
    gap = 2 if sum(whole) + 2 * (len(whole) - 1) <= available else 1
    for limits in (whole, cut, least):
        # Shrink the column with the most slack first.
        for _ in range(sum(widths) + gap * (len(widths) - 1) - available):
            slack = [width - limit for width, limit in zip(widths, limits, strict=True)]
            if max(slack) > 0:
                widths[slack.index(max(slack))] -= 1
    return widths, gap


def _longest(texts: Iterable[str]) -> int:
    from rich.cells import cell_len

    return max(map(cell_len, texts), default=0)


def _folded(text: str, columns: int) -> list[str]:
    """Fold a line; continuation lines are indented to the text after the first gap."""
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
