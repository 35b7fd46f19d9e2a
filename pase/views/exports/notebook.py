"""What `Plan` shows in a notebook, and what it becomes there: a page, a data frame, a network, a picture."""

from dataclasses import asdict, dataclass, field
from html import escape
from importlib import import_module
from pathlib import Path
from typing import Any

from pase.common.documents import write_or_fail
from pase.common.quantities import quantity
from pase.errors import ExportError, missing_extra
from pase.graph.html import bar_html, name_html, page_html
from pase.graph.names import short
from pase.planning.plan import Plan
from pase.views.drawing import certificate_text
from pase.views.exports.csv import Row, layer_rows
from pase.views.exports.registry import ExportOptions, export

_HEADERS = ("layer", "kind", "iteration space", "configuration", "cost", "share")


@dataclass(frozen=True, slots=True)
class Picture:
    """A plan as a picture: notebooks show it; text: SVG."""

    text: str = field(repr=False)

    def _repr_svg_(self) -> str:
        return self.text

    def save(self, path: str | Path) -> None:
        """Write the picture to an .svg file, replacing an old one as a whole; ExportError where that cannot be."""
        if Path(path).suffix.lower() != ".svg":
            raise ExportError(f"{path} is no .svg file, and pictures are saved as SVG; name one that ends in .svg")
        write_or_fail(path, self.text, ExportError)


def html(plan: Plan) -> str:
    """Return a plan as a piece of HTML: what it costs, with its certificate, and a table of the layers."""
    rows = layer_rows(plan)
    total = plan.total_cost or 1.0
    largest = max(row.cost for row in rows) / total
    return page_html(
        f"{name_html(plan.graph.name)} on {plan.num_devices} × {name_html(plan.machine.device.name)}",
        list(map(escape, _lines(plan))),
        _HEADERS,
        [_cells(row, bar_html(row.cost / total, largest)) for row in rows],
    )


def data_frame(plan: Plan) -> Any:
    """Return a pandas.DataFrame with one row for each layer (`pase.views.exports.csv.Row`); MissingExtraError."""
    try:
        pandas = import_module("pandas")
    except ModuleNotFoundError as error:
        if error.name != "pandas":
            raise
        raise missing_extra("a data frame needs pandas, which is not installed", "notebook") from None
    return pandas.DataFrame([asdict(row) for row in layer_rows(plan)]).set_index("layer")


def network(plan: Plan) -> Any:
    """Return a networkx.MultiDiGraph: layers with the fields of their rows, and what each one fetches from others."""
    networkx = import_module("networkx")
    found = networkx.MultiDiGraph(
        name=plan.graph.name, num_devices=plan.num_devices, total_cost=plan.total_cost, cost_unit=plan.cost_unit
    )
    for row in layer_rows(plan):
        found.add_node(row.layer, **{key: value for key, value in asdict(row).items() if key != "layer"})
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


def picture(plan: Plan, *, fold: bool) -> Picture:
    """Return a plan as a picture; fold: show blocks that repeat once, with their number."""
    return Picture(export(plan, "svg", ExportOptions(fold=fold)).text)


def _lines(plan: Plan) -> list[str]:
    data_parallel = plan.baselines.get("data_parallel", 0.0)
    ratio = f"; data parallelism costs {data_parallel / plan.total_cost:.2f} × as much" if plan.total_cost else ""
    limit = plan.device_memory_bytes
    within = f", within the limit of {quantity(limit, 'B')}" if limit else ""
    cost = f"total cost {quantity(plan.total_cost, plan.cost_unit)}"
    memory = f"{quantity(plan.memory.total_bytes, 'B')} on each device with {plan.optimiser}"
    return [
        f"{cost}, {certificate_text(plan)} under cost model {plan.cost_model}{ratio}",
        f"{memory}{within}; {len(plan.layers)} layers; machine {short(plan.machine.name)}",
    ]


def _cells(row: Row, share_html: str) -> list[str]:
    return [
        name_html(row.layer),
        name_html(row.kind),
        " ".join(f"{name_html(dim)}={extent}" for dim, extent in row.dims.items()),
        name_html(row.configuration),
        escape(quantity(row.cost, row.cost_unit)),
        share_html,
    ]
