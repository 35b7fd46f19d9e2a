import ast
import keyword

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pase.targets.emitter.text import Identifiers, printable, quoted


@given(st.text())
def test_a_quoted_text_is_that_text(text: str) -> None:
    literal = quoted(text)
    assert ast.literal_eval(literal) == text
    assert literal.isprintable()


@pytest.mark.parametrize("text", ['"', "\\", '\\"', "\n", "\r", "\x00", "\u2028", "\ud800", "\U0001f600", "'''", '"""'])
def test_awkward_texts(text: str) -> None:
    assert ast.literal_eval(quoted(text)) == text
    shown = printable(f"a{text}b")
    assert shown.isprintable()
    assert '"' not in shown
    assert "\\" not in shown
    assert printable("x" * 99, 10) == "xxxxxxx..."


@given(st.lists(st.text(), max_size=20))
def test_identifiers_differ_and_are_usable(names: list[str]) -> None:
    identifiers = Identifiers(["mesh"])
    found = [identifiers.new(name) for name in names]
    assert len(set(found)) == len(found)
    for name in found:
        assert name.isidentifier()
        assert name.isascii()
        assert not keyword.iskeyword(name)
        assert name not in {"mesh", "list", "print", "l"}


def test_identifiers_read_like_the_names() -> None:
    identifiers = Identifiers()
    names = ["conv1", "conv1", "Block 1/conv", "1x1", "", "class", "print", "__import__('os')"]
    assert [identifiers.new(name) for name in names] == [
        "conv1", "conv1_2", "block_1_conv", "layer_1x1", "layer", "class_2", "print_2", "import____os",
    ]  # fmt: skip
