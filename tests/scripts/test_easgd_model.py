"""docs/easgd-model.md: it is what `scripts/bench easgd-model --write` makes now, and its text says what that shows."""

from pase.studies.easgd_paper import TABLE_4, scaled_s
from scripts.benchmarks.easgd_model import tables
from scripts.benchmarks.tables import ROOT

PAGE = (ROOT / "docs" / "easgd-model.md").read_text(encoding="utf-8")


def test_the_tables_are_up_to_date() -> None:
    for name, text in tables().items():
        assert f"<!-- {name} -->\n\n{text}\n\n<!-- /{name} -->" in PAGE, (
            f"run scripts/bench easgd-model --write: {name}"
        )


def test_every_row_of_a_table_has_as_many_cells_as_its_head() -> None:
    for name, text in tables().items():
        assert len({line.count("|") for line in text.splitlines()}) == 1, name


def test_the_text_says_what_the_tables_show() -> None:
    """Figures in the prose, from the model and from the paper's times."""
    google, vgg = TABLE_4["googlenet"], TABLE_4["vgg19"]
    seen = {name: 100 * TABLE_4[name].times[1].value / scaled_s(name, 64, "sync-easgd2") for name in TABLE_4}
    assert f"GoogLeNet keeps {seen['googlenet']:.1f} % and VGG-19 {seen['vgg19']:.1f} % on 64" in PAGE
    assert round(vgg.excess_s(64) / google.excess_s(64)) == 9
    assert "loses 9 times as much" in PAGE
    # The straight line through 2 nodes, one stage, and 64, six.
    offsets = [series.excess_s(2) - (series.excess_s(64) - series.excess_s(2)) / 5 for series in (google, vgg)]
    assert f"leaves {offsets[0]:.2f} s of GoogLeNet's 5.1 s iteration and {offsets[1]:.1f} s of VGG's 16.5 s" in PAGE
    assert google.excess_s(64) / google.excess_s(8) < 1.35
