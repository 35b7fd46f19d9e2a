"""What a block of code is, told by its language and what stands in it."""

import ast
import json
import re
import tomllib
from collections.abc import Callable
from contextlib import suppress
from enum import StrEnum, auto

from tests.docs.markdown import Code


class Kind(StrEnum):
    FILE = auto()  # the title of its fence, or a comment in its first line, is its name
    SESSION = auto()  # commands after "$ ", and what they print
    COMMANDS = auto()
    EXCERPT = auto()  # of a program that PaSE wrote
    JSON = auto()
    TOML = auto()
    PYTHON = auto()
    OTHER = auto()


_PROGRAM = re.compile(r"(\./)?(scripts/)?(pase|bench|test|docs|fuzz|gpu-check)(\s|$)|(\S*/)?(python|pip|torchrun)\s")
_FILE = re.compile(r"# ([\w.-]+\.\w+)")


def file_name(block: Code) -> str | None:
    """The name of the file that a block is."""
    found = _FILE.fullmatch(block.first_line)
    return block.title or (found[1] if found else None)


def commands(text: str) -> list[str]:
    """The commands of lines, those that go on after a backslash as one; comments and empty lines left out."""
    lines = re.sub(r"\\\n\s*", "", text).splitlines()
    return [line.strip() for line in lines if line.strip() and not line.strip().startswith("#")]


def _is_commands(block: Code) -> bool:
    lines = commands(block.text)
    return bool(lines) and all(_PROGRAM.match(line) for line in lines)


def _parses(parse: Callable[[str], object]) -> Callable[[Code], bool]:
    def does(block: Code) -> bool:
        with suppress(ValueError, SyntaxError):
            return bool(parse(block.text))
        return False

    return does


def _is_python(block: Code) -> bool:
    # Words and numbers alone parse, too.
    return bool(re.search(r"[=(]|^import ", block.text, re.MULTILINE)) and _parses(lambda t: ast.parse(t).body)(block)


_TESTS: tuple[tuple[Kind, Callable[[Code], bool]], ...] = (
    (Kind.FILE, lambda block: file_name(block) is not None),
    (Kind.SESSION, lambda block: block.first_line.startswith("$ ")),
    (Kind.COMMANDS, _is_commands),
    (Kind.EXCERPT, lambda block: block.first_line.startswith("# -- ")),
    (Kind.JSON, _parses(json.loads)),
    (Kind.TOML, _parses(tomllib.loads)),
    (Kind.PYTHON, _is_python),
)

_LANGUAGES = {"python": Kind.PYTHON, "toml": Kind.TOML, "json": Kind.JSON}
"""What a fence says that it is; anything else is looked at."""


def kind_of(block: Code) -> Kind:
    """What a block is; of one that could be several things, the first."""
    found = next((kind for kind, is_it in _TESTS if is_it(block)), Kind.OTHER)
    return found if found in (Kind.FILE, Kind.EXCERPT) else _LANGUAGES.get(block.language, found)
