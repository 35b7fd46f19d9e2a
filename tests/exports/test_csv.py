"""CSV: what readers get of it, and what spreadsheets take for a formula."""

import csv
import io
import json
import re

import pandas
import pytest

from pase import Plan
from pase.common.words import visible
from pase.errors import PlanError
from pase.views.exports import export
from pase.views.exports.tables import text_cell
from tests.hostile import HOSTILE_NAMES, hostile_plan
from tests.networks import small_plan, staged_plan

FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n", "＝", "＋", "－", "＠")  # noqa: RUF001
COLUMNS = (
    *("position", "layer", "kind", "dims", "splits", "configuration", "parts", "replicas", "layer_cost"),
    *("compute_cost", "communication_cost", "transfer_cost", "cost_unit", "forward_bytes", "backward_bytes"),
    *("memory_bytes", "stage", "state", "is_recomputed"),
)


def table(plan: Plan) -> list[dict[str, str]]:
    text = export(plan, "csv").text
    return list(csv.DictReader(io.StringIO(text, newline=""), strict=True))


def read_back(cell: str) -> str:
    """Return what docs/export.md tells a reader to do with a cell of text."""
    return cell[1:] if cell.startswith("'") else cell


def test_the_first_columns_are_these() -> None:
    # Others read them: columns may be added at the end.
    assert tuple(table(small_plan("mlp", 4))[0])[: len(COLUMNS)] == COLUMNS


@pytest.mark.parametrize("name", ["alexnet", "transformer"])
def test_rows_are_the_layers_and_costs_add_up(name: str) -> None:
    plan = small_plan(name, 8)
    rows = table(plan)
    assert [(row["layer"], int(row["position"])) for row in rows] == [
        (layer.name, i) for i, layer in enumerate(plan.layers)
    ]
    assert [json.loads(row["dims"]) for row in rows] == [layer.dims for layer in plan.layers]
    assert [json.loads(row["splits"]) for row in rows] == [layer.splits for layer in plan.layers]
    assert sum(float(row["layer_cost"]) + float(row["transfer_cost"]) for row in rows) == pytest.approx(plan.total_cost)
    for row in rows:
        assert float(row["layer_cost"]) == pytest.approx(float(row["compute_cost"]) + float(row["communication_cost"]))
        assert int(row["parts"]) * int(row["replicas"]) == 8


def test_rows_say_stages_and_modes() -> None:
    plan = staged_plan()
    for row, layer in zip(table(plan), plan, strict=True):
        assert (row["stage"], row["state"]) == (str(layer.stage), layer.state)
        assert row["is_recomputed"] == ("1" if layer.is_recomputed else "0")
        assert int(row["parts"]) * int(row["replicas"]) == 4
    shown = plan._repr_html_()
    assert "stage 1" in shown
    assert {"recomputed", *(layer.state for layer in plan)} - {"replicated"} <= set(re.findall(r"\w+", shown))
    for name in ("jax", "torch", "mesh-tensorflow-layout"):
        with pytest.raises(PlanError, match=r"the plan has 2 stages; .* takes no such plan"):
            export(plan, name)


def test_numbers_are_numbers_to_other_readers() -> None:
    plan = small_plan("alexnet", 8)
    frame = pandas.read_csv(io.StringIO(export(plan, "csv").text))
    assert frame["layer"].tolist() == [layer.name for layer in plan.layers]
    numbers = frame.select_dtypes("number")
    assert {"position", "parts", "replicas", "layer_cost", "memory_bytes", "forward_bytes"} <= set(numbers.columns)
    # Quotes tell text from numbers, so that a name such as 007 stays text.
    unquoted = list(csv.reader(io.StringIO(export(plan, "csv").text, newline=""), quoting=csv.QUOTE_NONNUMERIC))
    assert [type(cell) for cell in unquoted[1]] == [float if c in numbers.columns else str for c in frame.columns]


def test_hostile_names_stay_text_and_are_read_back() -> None:
    plan = hostile_plan(everywhere=True)
    rows = table(plan)
    assert len(rows) == len(plan.layers) == len(HOSTILE_NAMES) + 1
    for row, layer in zip(rows, plan.layers, strict=True):
        for cell in row.values():
            assert not cell.lstrip(" ").startswith(FORMULA)
        assert read_back(row["layer"]) == visible(layer.name, keeping="\t\r\n")
        assert json.loads(read_back(row["dims"])) == layer.dims
        assert json.loads(read_back(row["splits"])) == layer.splits
    assert "\x00" not in export(plan, "csv").text


@pytest.mark.parametrize("text", ["=1+1", "+1", "-1", "@A1", "\t=1", "\r=1", "\n=1", " =1", "＝1", "'=1", "'", "''"])  # noqa: RUF001
def test_a_quote_is_put_before_what_might_be_a_formula_and_taken_away_again(text: str) -> None:
    cell = text_cell(text)
    assert cell == f"'{text}"
    assert read_back(cell) == text


@pytest.mark.parametrize("text", ["", "conv1", "a=b", "x'y", "1-1", "Ωmega"])
def test_other_text_is_left_as_it_is(text: str) -> None:
    assert text_cell(text) == text
