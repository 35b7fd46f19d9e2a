"""`pase report`: files that were written whole, what it refuses, and what programs get."""

import json
from pathlib import Path

import pytest

from pase.planning.plan_file import write_plan
from tests.cli.conftest import Command
from tests.networks import small_plan


@pytest.fixture
def plan_file(tmp_path: Path) -> Path:
    path = tmp_path / "plan.json"
    write_plan(small_plan("rnnlm", 8), path)
    return path


def test_a_page_is_written(pase: Command, plan_file: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    finished = pase("report", plan_file, "-o", page)
    assert (finished.status, finished.err) == (0, "")
    assert finished.out.startswith(f"report of plan written to {page} (")
    text = page.read_text(encoding="utf-8")
    assert text.lower().startswith("<!doctype html>")
    assert text.rstrip().endswith("</html>")
    # The same plan gives the same bytes.
    pase("report", plan_file, "-o", tmp_path / "again.html")
    assert (tmp_path / "again.html").read_bytes() == page.read_bytes()


def test_the_default_name(pase: Command, plan_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert pase("report", plan_file).status == 0
    assert (tmp_path / "report.html").is_file()


def test_json_is_what_the_page_shows(pase: Command, plan_file: Path) -> None:
    other = plan_file.parent / "other" / "plan.json"
    other.parent.mkdir()
    write_plan(small_plan("rnnlm", 4), other)
    finished = pase("report", plan_file, other, plan_file, "--sweep", "1..8", "--json")
    assert finished.status == 0
    found = json.loads(finished.out)
    folder = plan_file.parent.name
    assert [plan["name"] for plan in found["plans"]] == [f"{folder}/plan", "other/plan", f"{folder}/plan (2)"]
    assert [plan["num_devices"] for plan in found["plans"]] == [8, 4, 8]
    assert found["sweep"]["devices"] == [1, 2, 4, 8]
    assert found["sweep"]["strategies"][0]["total_cost"][3] == found["plans"][0]["total_cost"]
    assert all(layer["why"] for layer in found["plans"][0]["layers"])


def test_without_saying_why(pase: Command, plan_file: Path) -> None:
    found = json.loads(pase("report", plan_file, "--no-why", "--json").out)
    assert {layer["why"] for layer in found["plans"][0]["layers"]} == {None}
