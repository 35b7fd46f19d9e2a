"""What notebooks show: as a reader of HTML sees it, and frames and networks that say what the plan says."""

import re
import sys
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import networkx
import pandas
import pytest

from pase import Graph, Plan
from pase.common.words import quantity, short, visible
from pase.errors import ExportError, MissingExtraError, PaseError
from pase.graph.graph import MOST_ROWS, SHOWN_ROWS, page_html
from pase.views.exports import ExportOptions, export
from tests.hostile import HOSTILE_NAMES, hostile_plan
from tests.networks import small_graph, small_plan, tiny_plan

ELEMENTS = {"div", "p", "strong", "br", "table", "thead", "tbody", "tr", "th", "td", "span", "details", "summary"}
VOID = {"br"}


class Page(HTMLParser):
    """Reads HTML; what is not well formed, or is none of the elements and attributes that there may be, is an error."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.rows: list[list[str]] = []
        self.text = ""
        self.titles: list[str] = []
        self.collapsed = 0
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in ELEMENTS
        assert {name for name, _ in attrs} <= ({"style", "title"} if tag == "span" else {"style"})
        for name, value in attrs:
            assert value is not None
            if name == "style":
                assert re.fullmatch(r"[a-z0-9:;.% -]+", value, re.IGNORECASE)
            else:
                self.titles.append(value)
        if tag == "tr":
            self.rows.append([])
            self.collapsed += "details" in self._open
        if tag in ("td", "th"):
            self.rows[-1].append("")
        if tag not in VOID:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data
        if {"td", "th"} & set(self._open):
            self.rows[-1][-1] += data

    def handle_comment(self, data: str) -> None:
        raise AssertionError(data)

    def handle_decl(self, decl: str) -> None:
        raise AssertionError(decl)

    def handle_pi(self, data: str) -> None:
        raise AssertionError(data)

    def unknown_decl(self, data: str) -> None:
        raise AssertionError(data)


def page(shown: Plan | Graph) -> Page:
    return Page(shown._repr_html_())


# ------------------------------------------------------------------------------------------------------------ plans


def test_a_plan_is_a_table_with_its_certificate() -> None:
    plan = small_plan("alexnet", 8)
    found = page(plan)
    header, *rows = found.rows
    assert header == ["layer", "kind", "iteration space", "configuration", "cost", "share"]
    assert [row[0] for row in rows] == [layer.name for layer in plan.layers]
    assert sum(float(row[-1].rstrip("%")) for row in rows) == pytest.approx(100, abs=0.1 * len(rows))
    for row, layer in zip(rows, plan.layers, strict=True):
        assert row[2] == " ".join(f"{dim}={extent}" for dim, extent in layer.dims.items())
        splits = " ".join(f"{dim}={n}" for dim, n in layer.splits.items() if n > 1)
        assert row[3].split(" ×")[0] == (splits or "not split")
    assert "alexnet on 8 × NVIDIA GeForce GTX 1080 Ti" in found.text
    assert "proven optimal under cost model paper" in found.text
    gap = page(replace(plan, exact=False, lower_bound=plan.total_cost * 0.9))
    assert f"gap 10.00%, lower bound {quantity(0.9 * plan.total_cost, plan.cost_unit)}" in gap.text


def test_a_plan_that_costs_nothing_is_shown_too() -> None:
    layers = tuple(replace(layer, layer_cost=0.0, transfers=()) for layer in tiny_plan().layers)
    free = replace(tiny_plan(), layers=layers, total_cost=0.0, baselines={"data_parallel": 0.0})
    assert "total cost 0 FLOP" in page(free).text


def test_a_terminal_shows_one_line() -> None:
    plan = small_plan("alexnet", 8)
    assert repr(plan) == "<Plan of alexnet on 8 devices: 93.9 MFLOP, proven optimal>"
    assert repr(replace(plan, exact=False, lower_bound=plan.total_cost / 2)).endswith(
        ", gap 50.00%, lower bound 46.9 MFLOP>"
    )
    assert repr(plan.graph) == "<Graph alexnet: 12 operators, 11 edges>"
    assert repr(hostile_plan()).isprintable()


def test_long_tables_are_collapsed() -> None:
    plan = small_plan("inception_v3", 4)
    found = page(plan)
    assert len(plan.layers) > SHOWN_ROWS
    # Each of the two tables has a header.
    assert len(found.rows) == len(plan.layers) + 2
    assert found.collapsed == len(plan.layers) - SHOWN_ROWS + 1
    assert f"{len(plan.layers) - SHOWN_ROWS} more" in found.text
    assert page(tiny_plan()).collapsed == 0
    many = Page(page_html("many", [], ("a",), [[str(i)] for i in range(MOST_ROWS + 7)]))
    assert len(many.rows) == MOST_ROWS + 2
    assert "and 7 that are not shown" in many.text


@pytest.mark.parametrize("everywhere", [False, True])
def test_hostile_names_are_text(everywhere: bool) -> None:
    plan = hostile_plan(everywhere=everywhere)
    for found in (page(plan), page(plan.graph)):
        names = [row[0] for row in found.rows if row[0] not in ("layer", "operator")]
        assert names == [short(layer.name) for layer in plan.layers]
        # What is cut stands whole in a title.
        assert visible(HOSTILE_NAMES[-1]) in found.titles
        assert all(c.isprintable() for c in found.text)


def test_the_page_is_for_light_and_dark_notebooks() -> None:
    html = tiny_plan()._repr_html_()
    assert not re.search(r"#[0-9a-f]{3,6}|rgb|white|black", html)
    assert "<script" not in html


# ----------------------------------------------------------------------------------------------------------- graphs


def test_a_graph_is_a_table_of_operators() -> None:
    graph = small_graph("alexnet")
    found = page(graph)
    header, *rows = found.rows
    assert header == ["operator", "kind", "iteration space", "reads", "writes"]
    assert [row[0] for row in rows] == [operator.name for operator in graph.operators]
    by_name = {row[0]: row for row in rows}
    assert by_name["conv1"][3].startswith("x 16×3×64×64, data")
    assert "from conv1" in by_name["pool1"][3]
    assert "w " in by_name["fc1"][3]
    assert f"{graph.num_parameters:,} parameters" in found.text


# ----------------------------------------------------------------------------------------------- frames and networks


def test_a_data_frame_has_the_layers_for_rows() -> None:
    plan = small_plan("transformer", 8)
    frame = plan.to_dataframe()
    assert isinstance(frame, pandas.DataFrame)
    assert frame.index.tolist() == [layer.name for layer in plan.layers]
    assert frame.index.name == "layer"
    assert frame["splits"].tolist() == [layer.splits for layer in plan.layers]
    assert (frame["layer_cost"] + frame["transfer_cost"]).sum() == pytest.approx(plan.total_cost)
    assert ((frame["compute_cost"] + frame["communication_cost"]) - frame["layer_cost"]).abs().max() < 1e-3
    columns = pandas.read_csv(Path("/dev/null"), names=_header(plan)).columns
    assert [*frame.columns] == [column for column in columns if column != "layer"]
    assert hostile_plan(everywhere=True).to_dataframe().index.tolist() == [*HOSTILE_NAMES, "loss"]


def _header(plan: Plan) -> list[str]:
    return [name.strip('"') for name in export(plan, "csv").text.partition("\r\n")[0].split(",")]


@pytest.mark.parametrize(("package", "make"), [("pandas", Plan.to_dataframe), ("networkx", Plan.to_networkx)])
def test_a_missing_package_is_told_with_what_to_type(
    package: str, make: Callable[[Plan], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    assert issubclass(MissingExtraError, PaseError)
    with pytest.raises(MissingExtraError, match=f"{package}, .* not installed; PaSE's extra 'notebook' brings"):
        make(tiny_plan())


def test_a_network_has_every_cost_on_a_node_or_an_edge() -> None:
    plan = small_plan("transformer", 8)
    network = plan.to_networkx()
    assert isinstance(network, networkx.MultiDiGraph)
    assert [*network] == [layer.name for layer in plan.layers]
    assert networkx.is_directed_acyclic_graph(network)
    total = sum(cost for _, cost in network.nodes(data="layer_cost")) + sum(
        cost for *_, cost in network.edges(data="cost")
    )
    assert total == pytest.approx(plan.total_cost)
    own = {(u, v, key) for u, v, key, shared in network.edges(keys=True, data="is_shared_weight") if not shared}
    assert own == {(edge.producer, edge.consumer, edge.input) for edge in plan.graph.edges}
    for u, v, data in network.edges(data=True):
        transfers = [t for t in plan[v].transfers if t.producer == u and t.forward_bytes == data["forward_bytes"]]
        assert transfers
    assert all(network.nodes[layer.name]["splits"] == layer.splits for layer in plan)


# --------------------------------------------------------------------------------------------------------- pictures


def test_a_plan_is_drawn_and_saved(tmp_path: Path) -> None:
    plan = small_plan("gpt", 4)
    drawn = plan.plot()
    svg = drawn._repr_svg_()
    assert ElementTree.fromstring(svg).tag == "{http://www.w3.org/2000/svg}svg"
    assert svg == export(plan, "svg").text
    whole = plan.plot(fold=False)._repr_svg_()
    assert whole == export(plan, "svg", ExportOptions(fold=False)).text != svg
    drawn.save(tmp_path / "plan.svg")
    assert (tmp_path / "plan.svg").read_text(encoding="utf-8") == svg
    drawn.save(str(tmp_path / "text.SVG"))
    with pytest.raises(ExportError, match=r"plan.png is not an .svg file"):
        drawn.save("plan.png")
    with pytest.raises(ExportError, match="cannot be written: No such file or directory"):
        drawn.save(tmp_path / "missing" / "plan.svg")


# -------------------------------------------------------------------------------------------------- a real notebook


def test_notebooks_find_what_there_is_to_show() -> None:
    formatters = pytest.importorskip("IPython.core.formatters", reason="IPython is not installed")
    plan = tiny_plan()
    for shown, kind in ((plan, "text/html"), (plan.graph, "text/html"), (plan.plot(), "image/svg+xml")):
        data, _ = formatters.DisplayFormatter().format(shown)
        assert {kind, "text/plain"} <= set(data)
