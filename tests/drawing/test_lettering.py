from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pase.views.exports.svg import shortened, text_width, xml_text

# Advance widths in units of 1/2048 em in DejaVu Sans, the widest of the usual fonts, from its own metrics.
DEJAVU = {"a": 1255, "e": 1260, "i": 569, "m": 1995, "n": 1298, "W": 2025, "0": 1303, "_": 1024, "=": 1716, " ": 651}


@pytest.mark.parametrize(("character", "units"), DEJAVU.items())
def test_no_character_is_wider_than_it_is_taken_for(character: str, units: int) -> None:
    assert text_width(character, 2048.0) >= units
    assert text_width(character, 2048.0) <= 2 * units


@given(st.text(max_size=80), st.floats(20, 400))
@settings(max_examples=100)
def test_shortened_text_fits_and_keeps_both_ends(text: str, widest: float) -> None:
    found = shortened(text, 11.0, widest)
    assert text_width(found, 11.0) <= widest
    if text_width(text, 11.0) <= widest:
        assert found == text
    else:
        begin, end = found.split("…", 1) if "…" not in text else (found[:1], found[-1:])
        assert text.startswith(begin) or begin == "…"
        assert text.endswith(end) or end == "…"


def test_a_very_long_name_takes_no_longer() -> None:
    found = shortened("layer" * 2_000_000, 11.0, 100.0)
    assert 8 < len(found) < 30
    assert "…" in found


def test_a_shortened_name_tells_layers_apart() -> None:
    names = [f"decoder_{i}_encoder_attention_output_layer_dense_{kind}" for i in (1, 2) for kind in "ab"]
    found = {shortened(name, 11.0, 250.0) for name in names}
    assert len(found) == 4


@given(st.text(st.characters(exclude_categories=())))
@settings(max_examples=100)
def test_a_parser_reads_the_text_back(text: str) -> None:
    root = ElementTree.fromstring(f'<a b="{xml_text(text)}">{xml_text(text)}</a>')
    assert root.text in (None, "") if not text else len(root.text or "") == len(text)
    assert (root.text or "") == root.get("b")
    for given_, read in zip(text, root.text or "", strict=True):
        assert read in (given_, "\ufffd")
        assert read == given_ or not given_.isprintable()
    assert "\ufffd" not in (root.text or "") or any(not c.isprintable() or c == "\ufffd" for c in text)
