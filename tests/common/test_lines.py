"""Lines of fields: against texts whose writer knows where it put what, and against nothing where the text is odd."""

import tomllib
from contextlib import suppress
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pase.common.documents import field_lines

SCALARS = [
    "1",
    "-0.5e-3",
    "0x1f",
    "true",
    "nan",
    "1979-05-27 07:32:00",
    "07:32:00",
    '"a # b ] } = \\" \\\\"',
    "'it\\'",
    '""',
    "''",
]
LONG_STRINGS = [
    '"""\n[levels]\nname = 3\n# none \\""" \\\\"""',
    '"""one "" two"""""',
    "'''\n[[x]] \\\n'''",
    "''''a'''''",
    '""""""',
    '"""a\\\n   b"""',
]
KEYS = ["key{}", "{}", "'lit # {}'", '"bas = {}"', '"esc \\u00e9 \\" {}"', '"[{}]"']


class Writer:
    """Writes a TOML text and notes the line of everything that it writes, by path."""

    def __init__(self, random: Random) -> None:
        self.random = random
        self.text = ""
        self.lines: dict[tuple[str | int, ...], int] = {}
        self.count = 0

    @property
    def line(self) -> int:
        return self.text.count("\n") + 1

    def note(self, path: tuple[str | int, ...], line: int | None = None) -> None:
        self.lines.setdefault(path, line or self.line)

    def key(self) -> tuple[str, str]:
        self.count += 1
        text = self.random.choice(KEYS).format(self.count)
        (key,) = tomllib.loads(f"{text} = 0")
        return key, text

    def break_line(self) -> None:
        """Perhaps begin a new line, with a comment in between."""
        self.text += self.random.choice(["", " ", "\n", " # a, ] } comment\n\n  "])

    def value(self, path: tuple[str | int, ...], depth: int, *, on_one_line: bool) -> None:
        kinds = ["scalar", "scalar", "array", "table"] if depth else ["scalar"]
        kind = self.random.choice(kinds if on_one_line else [*kinds, "long"])
        if kind == "scalar":
            self.text += self.random.choice(SCALARS)
        elif kind == "long":
            self.text += self.random.choice(LONG_STRINGS)
        elif kind == "array":
            self.array(path, depth, on_one_line=on_one_line)
        else:
            self.text += "{ "
            for i in range(self.random.randrange(3)):
                self.text += ", " if i else ""
                self.assignment(path, depth - 1, on_one_line=True)
            self.text += " }"

    def array(self, path: tuple[str | int, ...], depth: int, *, on_one_line: bool) -> None:
        self.text += "["
        length = self.random.randrange(4)
        for i in range(length):
            if not on_one_line:
                self.break_line()
            self.note((*path, i))
            self.value((*path, i), depth - 1, on_one_line=on_one_line)
            if i + 1 < length or self.random.random() < 0.3:
                if not on_one_line:
                    self.break_line()
                self.text += ","
        if not on_one_line:
            self.break_line()
        self.text += "]"

    def assignment(self, path: tuple[str | int, ...], depth: int, *, on_one_line: bool) -> None:
        dots = self.random.choice([0, 0, 0, 1, 2])
        for i in range(dots + 1):
            key, text = self.key()
            path = (*path, key)
            self.note(path)
            self.text += text + (self.random.choice([".", " . "]) if i < dots else "")
        self.text += self.random.choice([" = ", "=", "\t=  "])
        self.value(path, depth, on_one_line=on_one_line)

    def body(self, path: tuple[str | int, ...]) -> None:
        for _ in range(self.random.randrange(4)):
            self.text += self.random.choice(["", "\n", "  # [not.a.table]\n", "  "])
            self.assignment(path, 3, on_one_line=False)
            self.text += self.random.choice(["\n", "  # comment = 1\n"])

    def document(self) -> str:
        self.body(())
        tables = [self.key() for _ in range(3)]
        arrays: dict[str, int] = {}
        for _ in range(self.random.randrange(5)):
            key, text = self.random.choice(tables)
            inner, inner_text = self.key()
            self.text += self.random.choice(["", " ", "\n\n"])
            if self.random.random() < 0.5 and ((key,) not in self.lines or key in arrays):
                self.note((key,))
                path: tuple[str | int, ...] = (key, arrays.setdefault(key, 0))
                arrays[key] += 1
                self.note(path)
                self.text += f"[[ {text} ]]\n"
            else:
                self.note((key,))
                path = (key, arrays[key] - 1, inner) if key in arrays else (key, inner)
                self.note(path)
                self.text += f"[{text} . {inner_text}] # ]\n"
            self.body(path)
        return self.text


def name(path: tuple[str | int, ...]) -> str:
    joined = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path)
    return joined.removeprefix(".")


@given(st.randoms(use_true_random=False), st.sampled_from(["\n", "\r\n"]))
@settings(max_examples=150)
def test_lines_are_those_where_the_writer_put_the_fields(random: Random, line_end: str) -> None:
    writer = Writer(random)
    text = writer.document()
    document = tomllib.loads(text)
    expected = {name(path): line for path, line in writer.lines.items()}
    assert field_lines(text.replace("\n", line_end), document) == expected


def test_a_table_is_where_its_header_is() -> None:
    text = "[a.b]\nx = 1\n[a]\ny.z = 2\n\n[[c]]\n[c.d]\n[[c]]\n[[c.e]]\n[[c.e]]\nf = [\n 1,\n {g = 3}]\n"
    assert field_lines(text, tomllib.loads(text)) == {
        "a": 3,
        "a.b": 1,
        "a.b.x": 2,
        "a.y": 4,
        "a.y.z": 4,
        "c": 6,
        "c[0]": 6,
        "c[0].d": 7,
        "c[1]": 8,
        "c[1].e": 9,
        "c[1].e[0]": 9,
        "c[1].e[1]": 10,
        "c[1].e[1].f": 11,
        "c[1].e[1].f[0]": 12,
        "c[1].e[1].f[1]": 13,
        "c[1].e[1].f[1].g": 13,
    }


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('a.b = 1\nc = 0\n"a.b" = 2\n', {"a": 1, "c": 2}),  # two fields are called a.b
        ('a = [1]\n"a[0]" = 2\n', {"a": 1}),
        ('"" = 1\nb = 2\n', {"b": 2}),  # what the whole document is called
    ],
)
def test_what_two_fields_are_called_has_no_line(text: str, expected: dict[str, int]) -> None:
    assert field_lines(text, tomllib.loads(text)) == expected


def test_a_text_that_is_another_documents_has_no_lines() -> None:
    assert field_lines("a = 1\nb = 2\n", {"a": 1}) == {}
    assert field_lines("a = 1\n", {"a": 1, "b": 2}) == {}
    assert field_lines("a = [1, 2]\n", {"a": [1]}) == {}
    assert field_lines("a = ?", {"a": 1}) == {"a": 1}  # the value is the parser's affair


@given(st.text("a.[]{}=,\"'#\n\\ 1", max_size=30))
@settings(max_examples=300)
def test_any_text_that_the_parser_takes_has_the_lines_of_its_fields_or_none(text: str) -> None:
    """Another oracle: a field's line is the last one without which the text has the field no more."""
    try:
        document = tomllib.loads(text)
    except ValueError:
        assert isinstance(field_lines(text, {}), dict)
        return
    lines = text.split("\n")
    for path, line in field_lines(text, document).items():
        assert 1 <= line <= len(lines)
        if path in document:  # a field of the root
            before = "\n".join(lines[: line - 1])
            with suppress(ValueError):  # a text cut within a value
                assert path not in tomllib.loads(before)
