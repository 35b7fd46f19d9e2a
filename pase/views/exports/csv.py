"""CSV: a table of the layers (RFC 4180), safe to open in a spreadsheet.

Its rows are the one source of CSV, data frames and what notebooks show.
"""

import csv
import io
import json
from collections.abc import Mapping
from dataclasses import dataclass, fields

from pase.analysis.explanation.why_not import configuration_text
from pase.graph.names import visible
from pase.planning.plan import LayerPlan, Plan
from pase.views.exports.registry import Exported, ExportOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One layer: the field names are those of the columns, and part of the interface.

    position: in the plan, from 0. parts, replicas: into how many its iteration space is split, and on how many devices
    each part is. Costs are in cost_unit: layer_cost is compute_cost + communication_cost. transfer_cost, forward_bytes,
    backward_bytes: of all that the layer fetches from earlier ones. memory_bytes: on each device.
    """

    position: int
    layer: str
    kind: str
    dims: Mapping[str, int]
    splits: Mapping[str, int]
    configuration: str
    parts: int
    replicas: int
    layer_cost: float
    compute_cost: float
    communication_cost: float
    transfer_cost: float
    cost_unit: str
    forward_bytes: float
    backward_bytes: float
    memory_bytes: float

    @property
    def cost(self) -> float:
        """Return what the layer adds to the plan's total."""
        return self.layer_cost + self.transfer_cost


def layer_rows(plan: Plan) -> tuple[Row, ...]:
    """Return one row for each layer, in the order of the plan; the sum of their costs is the plan's total."""
    return tuple(_row(plan, i, layer) for i, layer in enumerate(plan.layers))


def _row(plan: Plan, position: int, layer: LayerPlan) -> Row:
    return Row(
        position=position,
        layer=layer.name,
        kind=layer.kind,
        dims=layer.dims,
        splits=layer.splits,
        configuration=configuration_text(layer.splits, plan.num_devices),
        parts=layer.num_parts,
        replicas=layer.num_replicas,
        layer_cost=layer.layer_cost,
        compute_cost=layer.compute_cost,
        communication_cost=layer.communication_cost,
        transfer_cost=layer.transfer_cost,
        cost_unit=plan.cost_unit,
        forward_bytes=sum((transfer.forward_bytes for transfer in layer.transfers), 0.0),
        backward_bytes=sum((transfer.backward_bytes for transfer in layer.transfers), 0.0),
        memory_bytes=layer.memory_bytes,
    )


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
