"""A site as files: its pages' links, anchors and what they load, read without MkDocs."""

from dataclasses import dataclass, field
from functools import cached_property
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag, urlsplit

_LOADED = dict.fromkeys(("audio", "embed", "iframe", "img", "script", "source", "video"), "src")
_SHOWN_RELATIONS = {"canonical", "prev", "next", "alternate", "edit"}
"""What a <link> may name without loading it."""

_CODE = {"code", "pre", "script", "style"}
_VOID = {"br", "hr", "img", "input", "link", "meta", "source", "wbr"}


@dataclass
class Page(HTMLParser):
    """One page. links: of <a>. loaded: what a browser fetches to show it. texts: in the article, outside code."""

    path: Path
    links: list[str] = field(default_factory=list)
    loaded: list[str] = field(default_factory=list)
    anchors: set[str] = field(default_factory=set)
    classes: set[str] = field(default_factory=set)
    texts: list[tuple[str, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()
        self._open: list[str] = []
        self.feed(self.path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        if tag not in _VOID:
            self._open.append(tag)
        self.anchors.update(values[name] for name in ("id", "name") if name in values and (name == "id" or tag == "a"))
        self.classes.update(values.get("class", "").split())
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
        if tag in _LOADED and values.get(_LOADED[tag]):
            self.loaded.append(values[_LOADED[tag]])
        if tag == "link" and not set(values.get("rel", "").split()) & _SHOWN_RELATIONS:
            self.loaded.append(values["href"])

    def handle_endtag(self, tag: str) -> None:
        while self._open and self._open.pop() != tag:
            pass

    def handle_data(self, data: str) -> None:
        if "article" in self._open and not _CODE & set(self._open):
            self.texts.append((self._open[-1], data))


class Site:
    """The pages of a folder by their paths."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.pages = {path.relative_to(folder).as_posix(): Page(path) for path in sorted(folder.rglob("*.html"))}

    def target(self, page: str, link: str) -> str:
        """The file that a link of a page leads to, from the folder."""
        path = unquote(urldefrag(link).url)
        start = self.folder / page
        found = self.folder / path.lstrip("/") if path.startswith("/") else start.parent / path if path else start
        found = found.resolve()
        return (found / "index.html" if found.is_dir() else found).relative_to(self.folder.resolve()).as_posix()

    @cached_property
    def broken(self) -> list[str]:
        """Links that lead to no file, or to no anchor of a page."""
        links = [(page, link) for page, found in self.pages.items() for link in found.links]
        return [f"{page}: {link}" for page, link in links if self._is_broken(page, link)]

    def _is_broken(self, page: str, link: str) -> bool:
        parts = urlsplit(link)
        if parts.scheme or parts.netloc:
            return False
        try:
            target = self.target(page, link)
        except ValueError:
            return True
        anchor = unquote(parts.fragment)
        if not (self.folder / target).is_file():
            return True
        return bool(anchor) and target in self.pages and anchor not in self.pages[target].anchors

    @cached_property
    def foreign(self) -> list[str]:
        """What pages load from another host."""
        loaded = [(page, one) for page, found in self.pages.items() for one in found.loaded]
        return [f"{page}: {one}" for page, one in loaded if urlsplit(one).netloc]
