"""Every format: text that is UTF-8 and ends in a newline, the same each time, whatever the plan."""

from pathlib import Path

import pytest

from pase.errors import ExportError
from pase.planning.plan_file import read_plan, write_plan
from pase.views.exports import FORMATS, ExportOptions, export
from tests.hostile import HOSTILE_NAMES, hostile_plan
from tests.networks import small_plan, tiny_plan


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("fold", [True, False])
def test_text_can_be_written_and_does_not_steer_a_terminal(name: str, fold: bool) -> None:
    for plan in (tiny_plan(), small_plan("transformer", 4), hostile_plan(), hostile_plan(everywhere=True)):
        exported = export(plan, name, ExportOptions(fold=fold))
        assert exported == export(plan, name, ExportOptions(fold=fold))
        assert exported.text.endswith("\n")
        assert exported.text.encode().decode() == exported.text
        assert {c for c in exported.text if ord(c) < 32 or 127 <= ord(c) < 160} <= {"\t", "\r", "\n"}
        for note in exported.notes:
            assert note
            assert "\n" not in note


def test_no_name_is_refused_and_all_are_kept(tmp_path: Path) -> None:
    plan = hostile_plan(everywhere=True)
    write_plan(plan, tmp_path / "plan.json")
    assert read_plan(tmp_path / "plan.json") == plan
    assert [layer.name for layer in plan.layers] == [*HOSTILE_NAMES, "loss"]


def test_an_unknown_format_is_told_with_those_there_are() -> None:
    with pytest.raises(
        ExportError, match=r"unknown format 'mermade': did you mean 'mermaid'\? known formats are csv, "
    ):
        export(tiny_plan(), "mermade")


def test_formats_are_these() -> None:
    # What others have written relies on the names: to add one, add it here.
    assert list(FORMATS) == ["csv", "dot", "mermaid", "svg", "mesh-tensorflow-layout", "jax", "torch"]
    for name, found in FORMATS.items():
        assert len(f"  {name:22}  {found.summary}") <= 80
