"""What notebooks show of a graph: HTML without script, of which no name can become part, for light pages and dark ones.

Colours are the page's own: bars are of the text's colour, thinned.
"""

from collections.abc import Mapping, Sequence
from html import escape

from pase.common.names import short, visible
from pase.graph.access import Access, Role
from pase.graph.operator import Operator

SHOWN_ROWS = 40
"""Rows of a table that stand open; the others open at a click."""

MOST_ROWS = 500
"""Rows of a table in all: a page is for people."""

_CELL = "text-align:left;vertical-align:top;padding:0.15em 0.8em 0.15em 0"
_NUMBER = "display:inline-block;min-width:3.5em"
_BAR = "display:inline-block;height:0.7em;background:currentColor;opacity:0.45"


def name_html(name: str) -> str:
    """Return a name as text in HTML; where it is too long to show, the whole of it is its title."""
    shown, whole = short(name), visible(name)
    return escape(shown) if shown == whole else f'<span title="{escape(whole)}">{escape(shown)}</span>'


def bar_html(share: float, largest: float) -> str:
    """Return a share between 0 and 1 with a bar, of which that of the largest share is the longest."""
    length = share / largest if largest else 0.0
    return f'<span style="{_NUMBER}">{share:.1%}</span><span style="{_BAR};width:{6 * length:.2f}em"></span>'


def page_html(title: str, lines: Sequence[str], headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a title, lines and a table; title, lines and rows are HTML already, headers are text.

    Of a long table the first rows stand open and the others are collapsed; of a very long one some are left out.
    """
    rest = rows[SHOWN_ROWS:MOST_ROWS]
    missing = len(rows) - SHOWN_ROWS - len(rest)
    parts = [f"<div><p><strong>{title}</strong>", *(f"<br>{line}" for line in lines), "</p>"]
    parts += [_table(headers, rows[:SHOWN_ROWS])]
    if rest:
        parts += [f"<details><summary>{len(rest)} more</summary>", _table(headers, rest), "</details>"]
    if missing > 0:
        parts += [f"<p>and {missing} that are not shown</p>"]
    return "".join((*parts, "</div>"))


def graph_html(
    name: str,
    counts: Sequence[str],
    operators: Sequence[Operator],
    producers: Mapping[tuple[str, int], str],
) -> str:
    """Return the operators of a graph as HTML; counts: lines of text. producers: by (operator, read)."""
    return page_html(
        name_html(name),
        list(map(escape, counts)),
        ("operator", "kind", "iteration space", "reads", "writes"),
        [_operator_cells(operator, producers) for operator in operators],
    )


def _operator_cells(operator: Operator, producers: Mapping[tuple[str, int], str]) -> list[str]:
    reads = [
        f"{_tensor(access)}{_origin(access, producers.get((operator.name, i)))}"
        for i, access in enumerate(operator.reads)
    ]
    return [
        name_html(operator.name),
        name_html(operator.kind),
        " ".join(f"{name_html(dim.name)}={dim.extent}" for dim in operator.dims),
        "<br>".join(reads),
        "<br>".join(map(_tensor, operator.writes)),
    ]


def _tensor(access: Access) -> str:
    return f"{name_html(access.tensor)} {'×'.join(map(str, access.shape))}"


def _origin(access: Access, producer: str | None) -> str:
    if producer is not None:
        return f" from {name_html(producer)}"
    if access.role is Role.PARAMETER:
        return f", weight shared as {name_html(access.shared)}" if access.shared else ", weight"
    return ", data"


def _table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f'<th style="{_CELL}">{escape(header)}</th>' for header in headers)
    cells = [[f'<td style="{_CELL}">{cell}</td>' for cell in row] for row in rows]
    body = "".join(f"<tr>{''.join(row)}</tr>" for row in cells)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
