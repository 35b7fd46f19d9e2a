"""The layers of a plan as a table: CSV (RFC 4180), safe to open in a spreadsheet, and `Plan`'s notebook display."""

import csv
import io
import json
from dataclasses import dataclass, field
from html import escape
from importlib import import_module
from pathlib import Path
from typing import Any

from pase.analysis.figures import cost_figures
from pase.common.documents import attributes, write_or_fail
from pase.common.words import quantity, short, visible
from pase.errors import ExportError, missing_extra
from pase.graph.graph import bar_html, name_html, page_html
from pase.planning.plan import Plan, configuration_text
from pase.views.drawing.plans import split_text
from pase.views.exports import Exported, ExportOptions, export


def layer_rows(plan: Plan) -> list[dict[str, Any]]:
    """Return one row for each layer, in the order of the plan; the names of the columns are part of the interface.

    position: number in the plan, from 0. parts, replicas: number of parts of its iteration space, and of devices with
    each part. Costs are in cost_unit: layer_cost is compute_cost + communication_cost. transfer_cost, forward_bytes,
    backward_bytes: transfers from earlier layers. memory_bytes: on each device. is_recomputed: 1 or 0. The sum of layer
    and transfer costs is the plan's total, except for plans with micro-batches, stages or modes.
    """
    return [
        {
            "position": position,
            **attributes(layer, "layer=name kind dims splits"),
            "configuration": configuration_text(layer.splits, len(layer.devices)),
            **attributes(layer, "parts=num_parts replicas=num_replicas layer_cost compute_cost communication_cost"),
            "transfer_cost": layer.transfer_cost,
            "cost_unit": plan.cost_unit,
            "forward_bytes": sum((transfer.forward_bytes for transfer in layer.transfers), 0.0),
            "backward_bytes": sum((transfer.backward_bytes for transfer in layer.transfers), 0.0),
            **attributes(layer, "memory_bytes stage state"),
            "is_recomputed": int(layer.is_recomputed),
        }
        for position, layer in enumerate(plan.layers)
    ]


_FORMULA = tuple("=+-@＝＋－＠")  # noqa: RUF001
"""First characters that make a spreadsheet interpret a cell as a formula, including full-width forms."""

_KEPT = "\t\r\n"
"""Control characters that a quoted cell may contain."""


def write(plan: Plan, options: ExportOptions) -> Exported:
    """Return one row for each layer of a plan, in its order, after a row of names."""
    stream = io.StringIO(newline="")
    # Text is quoted and numbers are not, so that readers can distinguish them.
    writer = csv.writer(stream, quoting=csv.QUOTE_NONNUMERIC)
    rows = layer_rows(plan)
    writer.writerow(rows[0])
    writer.writerows(map(_cell, row.values()) for row in rows)
    return Exported(text=stream.getvalue())


def text_cell(text: str) -> str:
    """Return a text that no spreadsheet treats as a formula, by prefixing ' where needed, or where it starts with one.

    To recover the text, remove one ' at the start of the cell.
    """
    shown = visible(text, keeping=_KEPT)
    is_risky = shown.lstrip().startswith(_FORMULA) or shown.startswith(("'", *_KEPT))
    return f"'{shown}" if is_risky else shown


def _cell(value: str | float | dict[str, int]) -> str | float:
    if isinstance(value, dict):
        # In ASCII, so that nothing needs escaping: it is read back exactly.
        return json.dumps(value)
    return text_cell(value) if isinstance(value, str) else value


_HEADERS = ("layer", "kind", "iteration space", "configuration", "cost", "share")


@dataclass(frozen=True, slots=True)
class Picture:
    """A plan as a picture, which notebooks display; text: SVG."""

    text: str = field(repr=False)

    def _repr_svg_(self) -> str:
        return self.text

    def save(self, path: str | Path) -> None:
        """Write the picture to an .svg file, replacing an old one atomically; ExportError where that fails."""
        if Path(path).suffix.lower() != ".svg":
            raise ExportError(f"{path} is not an .svg file, and pictures are saved as SVG; name one that ends in .svg")
        write_or_fail(path, self.text, ExportError)


def html(plan: Plan) -> str:
    """Return a plan as an HTML fragment: its cost, with its certificate, and a table of the layers."""
    figures = cost_figures(plan).layers
    largest = max(own.share for own in figures)
    return page_html(
        f"{name_html(plan.graph.name)} on {plan.num_devices} × {name_html(plan.machine.device.name)}",
        list(map(escape, _lines(plan))),
        _HEADERS,
        [
            [
                name_html(layer.name),
                name_html(layer.kind),
                " ".join(f"{name_html(dim)}={extent}" for dim, extent in layer.dims.items()),
                name_html(split_text(plan, layer)),
                escape(quantity(own.paid, plan.cost_unit)),
                bar_html(own.share, largest),
            ]
            for layer, own in zip(plan.layers, figures, strict=True)
        ],
    )


def data_frame(plan: Plan) -> Any:
    """Return a pandas.DataFrame with one row for each layer (`layer_rows`); MissingExtraError."""
    pandas = _of_notebook("pandas", "a data frame")
    return pandas.DataFrame(layer_rows(plan)).set_index("layer")


def network(plan: Plan) -> Any:
    """Return a networkx.MultiDiGraph: layers with the fields of their rows, and the transfers between them.

    Raises MissingExtraError.
    """
    networkx = _of_notebook("networkx", "a graph of it")
    found = networkx.MultiDiGraph(
        name=plan.graph.name, num_devices=plan.num_devices, total_cost=plan.total_cost, cost_unit=plan.cost_unit
    )
    for row in layer_rows(plan):
        found.add_node(row.pop("layer"), **row)
    for layer in plan.layers:
        for transfer in layer.transfers:
            edge = plan.graph.incoming.get((layer.name, transfer.input))
            found.add_edge(
                transfer.producer,
                layer.name,
                key=transfer.input,
                tensor=plan.graph[layer.name].reads[transfer.input].tensor,
                is_shared_weight=edge is None,
                cost=transfer.cost,
                forward_bytes=transfer.forward_bytes,
                backward_bytes=transfer.backward_bytes,
            )
    return found


def _of_notebook(package: str, what: str) -> Any:
    """Return a package of the extra `notebook`, which something needs; MissingExtraError."""
    try:
        return import_module(package)
    except ModuleNotFoundError as error:
        if error.name != package:
            raise
        raise missing_extra(f"{what} needs {package}, which is not installed", "notebook") from None


def picture(plan: Plan, *, fold: bool) -> Picture:
    """Return a plan as a picture; fold: show repeated blocks once, with their number."""
    return Picture(export(plan, "svg", ExportOptions(fold=fold)).text)


def _lines(plan: Plan) -> list[str]:
    data_parallel = plan.baselines.get("data_parallel", 0.0)
    ratio = f"; data parallelism costs {data_parallel / plan.total_cost:.2f} × as much" if plan.total_cost else ""
    limit = plan.device_memory_bytes
    within = f", within the limit of {quantity(limit, 'B')}" if limit else ""
    cost = f"total cost {quantity(plan.total_cost, plan.cost_unit)}"
    memory = f"{quantity(plan.memory.total_bytes, 'B')} on each device with {plan.optimiser}"
    return [
        f"{cost}, {plan.certificate} under cost model {plan.cost_model}{ratio}",
        f"{memory}{within}; {len(plan.layers)} layers; machine {short(plan.machine.name)}",
    ]
