"""The code of a Markdown page: blocks and spans, with the lines where they stand, as GitHub reads Markdown."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from markdown_it import MarkdownIt
from markdown_it.token import Token

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True, slots=True, kw_only=True)
class Code:
    """A block, or a span, of code.

    page: from the root. line: of its first line, from 1. language, title: what its fence says, "" where nothing.
    """

    page: str
    line: int
    text: str
    language: str = ""
    title: str = ""

    @property
    def where(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def first_line(self) -> str:
        return self.text.strip().partition("\n")[0].strip()


def pages() -> list[str]:
    """The README and all pages of docs/, from the root."""
    return ["README.md", *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md"))]


@cache
def blocks(page: str, text: str | None = None) -> tuple[Code, ...]:
    """The blocks of a page, fenced and indented ones, those within lists too."""
    return tuple(
        Code(
            page=page,
            line=_first_line(token) + 1,
            text=token.content,
            language=_found(r"([\w+-]+)", token.info),
            title=_found(r'.*\btitle="([^"]*)"', token.info),
        )
        for token in _tokens(page, text)
        if token.type in ("fence", "code_block")
    )


def spans(page: str, text: str | None = None) -> list[Code]:
    """The spans of a page: code within a line."""
    return [
        Code(page=page, line=_first_line(token) + 1, text=" ".join(child.content.split()))
        for token in _tokens(page, text)
        for child in token.children or ()
        if child.type == "code_inline"
    ]


def _tokens(page: str, text: str | None) -> Iterator[Token]:
    text = (ROOT / page).read_text(encoding="utf-8") if text is None else text
    yield from MarkdownIt("commonmark").enable("table").parse(text)


def _first_line(token: Token) -> int:
    assert token.map is not None
    return token.map[0] + (token.type == "fence")


def _found(pattern: str, info: str) -> str:
    found = re.match(pattern, info.strip())
    return found[1] if found else ""
