"""CSV: a table of the layers (RFC 4180), safe to open in a spreadsheet."""

import csv
import io
import json
from dataclasses import fields

from pase.graph.names import visible
from pase.planning.plan import Plan
from pase.views.exports.registry import Exported, ExportOptions
from pase.views.exports.rows import Row, layer_rows

COLUMNS = tuple(field.name for field in fields(Row))

_FORMULA = tuple("=+-@＝＋－＠")  # noqa: RUF001
"""What a spreadsheet takes for the start of a formula, full-width forms included."""

_KEPT = "\t\r\n"
"""Control characters that a quoted cell may hold."""


def write(plan: Plan, options: ExportOptions) -> Exported:
    """Return one row for each layer of a plan, in its order, after a row of names."""
    stream = io.StringIO(newline="")
    # Text is quoted and numbers are not, so that readers can tell them apart.
    writer = csv.writer(stream, quoting=csv.QUOTE_NONNUMERIC)
    writer.writerow(COLUMNS)
    writer.writerows([_cell(getattr(row, column)) for column in COLUMNS] for row in layer_rows(plan))
    return Exported(text=stream.getvalue())


def text_cell(text: str) -> str:
    """Return a text that no spreadsheet takes for a formula: with a ' before it where it might, or begins with one.

    A reader has the text back by taking one ' away wherever a cell begins with it.
    """
    shown = visible(text, keeping=_KEPT)
    is_risky = shown.lstrip().startswith(_FORMULA) or shown.startswith(("'", *_KEPT))
    return f"'{shown}" if is_risky else shown


def _cell(value: str | float | dict[str, int]) -> str | float:
    if isinstance(value, dict):
        # In ASCII, so that there is nothing in it to write out: it is read back exactly.
        return json.dumps(value)
    return text_cell(value) if isinstance(value, str) else value
