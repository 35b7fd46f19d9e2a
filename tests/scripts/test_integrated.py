"""docs/integrated.md and its figures: they are what `scripts/bench integrated --write` makes of the equations now."""

from xml.etree import ElementTree

import pytest

from pase.studies.integrated.chain import Options
from pase.studies.integrated.equations import Grid, Network, model_and_batch, pure_batch
from scripts.benchmarks.integrated import FOLDER, tables
from scripts.benchmarks.integrated_figures import alexnet, figures
from scripts.benchmarks.integrated_statements import compute_for, statements
from scripts.benchmarks.tables import ROOT

SVG = "{http://www.w3.org/2000/svg}"
PAGE = (ROOT / "docs" / "integrated.md").read_text(encoding="utf-8")


def test_the_tables_are_up_to_date() -> None:
    for name, text in tables().items():
        assert f"<!-- {name} -->\n\n{text}\n\n<!-- /{name} -->" in PAGE, f"run scripts/bench integrated --write: {name}"


def test_the_figures_are_up_to_date_and_shown() -> None:
    made = figures()
    assert {path.name for path in FOLDER.iterdir()} == set(made)
    for name, text in made.items():
        assert (FOLDER / name).read_text(encoding="utf-8") == text, f"run scripts/bench integrated --write: {name}"
        assert f"(integrated/{name})" in PAGE
        assert ElementTree.fromstring(text).tag == f"{SVG}svg"


def test_what_does_not_follow_is_said() -> None:
    failed = {(s.where, s.paper) for s in statements() if "**no**" in s.verdict}
    assert failed == {
        ("Fig. 6(d)", "16x32"),
        ("Fig. 6(d)", "5.0×"),
        ("Fig. 6(d)", "2.1×"),
        ("Fig. 7(d)", "9.7×"),
        ("section 2.4, Fig. 10", "much less"),
    }
    assert "Two of the headline speed-ups do not follow" in PAGE


def test_no_network_gives_the_headline_on_16x32() -> None:
    """The page's bound: Eq. 4 is at most 1.56 times Eq. 8 in words, and less in messages, so in any mixture of them."""
    assert "no more than 1.56\ntimes less, whatever α and β are" in PAGE
    ratios = []
    for latency_s, s_per_byte in ((1.0, 0.0), (0.0, 1.0)):
        network = Network(latency_s=latency_s, s_per_byte=s_per_byte)
        integrated = model_and_batch(alexnet(), 2048, Grid(16, 32), network, Options()).time_s
        ratios.append(pure_batch(alexnet(), 512, network, Options()).time_s / integrated)
    assert ratios[0] < 1
    assert 1.55 < ratios[1] < 1.56


def test_a_computation_time_is_found_where_there_is_one() -> None:
    # (10 + c) / (2 + c) = 3 for c = 2; hidden: 10 + 2 − 4/3 over 2 + 2 − 4/3.
    assert compute_for(10.0, 2.0, 3.0) == pytest.approx(2.0)
    assert compute_for(10.0, 2.0, (12 - 4 / 3) / (4 - 4 / 3), overlap=True) == pytest.approx(2.0)
    assert compute_for(10.0, 2.0, 5.1) is None
