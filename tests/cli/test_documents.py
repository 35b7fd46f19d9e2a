"""`pase export`, every format, to a file and to standard output; `pase report`, files that were written whole."""

import json
from pathlib import Path

import pytest

from pase.planning.plan_file import plan_schema, read_plan, write_plan
from pase.views.exports import FORMATS, ExportOptions, export
from tests.cli.conftest import Command
from tests.hostile import hostile_plan
from tests.networks import small_plan, tiny_plan


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    path = tmp_path / "plan.json"
    write_plan(tiny_plan(), path)
    return path


def _names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_is_printed_and_written_alike(name: str, pase: Command, plan: Path, tmp_path: Path) -> None:
    expected = export(read_plan(plan), name)
    shown = pase("export", plan, "--to", name)
    assert (shown.status, shown.out) == (0, expected.text)
    assert shown.err == "".join(f"pase: {note}\n" for note in expected.notes)
    path = tmp_path / "out"
    written = pase("export", plan, "--to", name, "-o", path)
    assert (written.status, written.out, written.err) == (0, "", shown.err)
    assert path.read_bytes().decode() == expected.text
    document = json.loads(pase("export", plan, "--to", name, "--json").out)
    assert document == {"format": name, "text": expected.text, "notes": list(expected.notes), "output": None}


def test_hostile_names_are_written_as_they_are(pase: Command, tmp_path: Path) -> None:
    write_plan(hostile_plan(), tmp_path / "hostile.json")
    finished = pase("export", tmp_path / "hostile.json", "--to", "csv", "-o", tmp_path / "out.csv")
    assert (finished.status, finished.out, finished.err) == (0, "", "")
    assert (tmp_path / "out.csv").read_bytes() == export(read_plan(tmp_path / "hostile.json"), "csv").text.encode()


def test_blocks_are_folded_unless_told_otherwise(pase: Command, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    plan = small_plan("gpt", 4)
    write_plan(plan, path)
    for name in ("dot", "mermaid", "svg"):
        whole = export(plan, name, ExportOptions(fold=False)).text
        assert pase("export", path, "--to", name, "--no-fold").out == whole
        folded = pase("export", path, "--to", name).out
        assert pase("export", path, "--to", name, "--fold").out == folded
        assert len(folded) < len(whole)


def test_the_schema_is_printed(pase: Command) -> None:
    shown = pase("export", "--schema")
    assert (shown.status, shown.err) == (0, "")
    assert shown.out == plan_schema()


def test_an_old_file_stays_where_the_new_one_cannot_be_written(pase: Command, plan: Path, tmp_path: Path) -> None:
    before = _names(tmp_path)
    (tmp_path / "broken.json").write_text("{", encoding="utf-8")
    out = tmp_path / "out.csv"
    out.write_text("old", encoding="utf-8")
    finished = pase("export", tmp_path / "broken.json", "--to", "csv", "-o", out)
    assert (finished.status, finished.out) == (1, "")
    assert "is not complete JSON" in finished.err
    assert out.read_text(encoding="utf-8") == "old"
    assert _names(tmp_path) == sorted([*before, "broken.json", "out.csv"])


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
