"""The site: built strictly, without a network; links, anchors and entries are looked at in what was built."""

import fcntl
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

import pase
from pase.cli.main import COMMANDS, cli
from pase.machine import machine_schema
from pase.planning.plan_file import plan_schema
from scripts.site import architecture
from tests.docs.html import Page, Site
from tests.docs.markdown import ROOT, pages

pytest.importorskip("mkdocs")
pytest.importorskip("material")
pytest.importorskip("mkdocstrings")

FROM_THEME = {"404.html"}
"""Made by the theme, not of a page."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Site:
    """The site, built once, by whichever of pytest's processes comes first."""
    own = tmp_path_factory.getbasetemp()
    folder = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "site"
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            _build(folder)
    return Site(folder)


def _build(folder: Path) -> None:
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "no_proxy": "", "https_proxy": "http://127.0.0.1:9"}
    new = folder.with_suffix(".new")
    done = subprocess.run(
        # Not --quiet: it would also keep warnings from being counted.
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(new)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        env=environment,
        timeout=300,
    )
    said = [line for line in done.stderr.splitlines() if line.strip() and not line.startswith("INFO ")]
    assert (done.returncode, done.stdout, said) == (0, "", [])
    new.rename(folder)


def page_of(source: str) -> str:
    """Where the site has a page of docs/."""
    path = Path(source).relative_to("docs")
    folder = path.parent if path.stem == "index" else path.with_suffix("")
    return (folder / "index.html").as_posix()


SOURCES = [page for page in pages() if page.startswith("docs/")]


def test_every_page_is_there(site: Site) -> None:
    assert set(site.pages) == {page_of(source) for source in SOURCES} | FROM_THEME


def test_the_architecture_is_that_of_the_code() -> None:
    for path, text in ((architecture.PAGE, architecture.page()), (architecture.DRAWING, architecture.drawing())):
        assert (ROOT / path).read_text(encoding="utf-8") == text, "run: python -m scripts.site.architecture"


def test_every_page_is_in_the_navigation() -> None:
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    # Tags name Python functions, which a safe loader does not know.
    nav = yaml.safe_load(re.sub(r"!!python\S*", "", text))["nav"]
    found = list(_pages_of(nav))
    assert sorted(found) == sorted(source.removeprefix("docs/") for source in SOURCES)


def _pages_of(nav: object) -> "list[str]":
    if isinstance(nav, str):
        return [nav]
    below = nav.values() if isinstance(nav, dict) else nav
    return [page for one in below for page in _pages_of(one)]  # type: ignore[attr-defined]


def test_links_and_anchors_lead_somewhere(site: Site) -> None:
    assert sum(len(page.links) for page in site.pages.values()) > 500
    assert site.broken == []


def test_nothing_is_loaded_from_elsewhere(site: Site) -> None:
    assert all(page.loaded for page in site.pages.values())
    assert site.foreign == []
    styles = [path.read_text(encoding="utf-8") for path in site.folder.rglob("*.css")]
    assert styles
    named = re.compile(r"(?:@import|url\()\s*[\"']?(?:https?:)?//[^)]*")
    assert not [found for style in styles for found in named.findall(style)]
    # The theme's script fetches Mermaid where a page has such a drawing, and figures of a repository if one is named.
    assert not [name for name, page in site.pages.items() if page.classes & {"mermaid", "md-source"}]


def test_every_command_and_its_options_have_an_entry(site: Site) -> None:
    page = site.pages["reference/commands/index.html"]
    text = page.path.read_text(encoding="utf-8")
    context = cli.make_context("pase", ["models"])
    for name in COMMANDS:
        assert name in page.anchors
        command = cli.get_command(context, name)
        assert command is not None
        section = re.split(r"<h2", text[text.index(f'<h2 id="{name}"') + 1 :])[0]
        for parameter in command.params:
            for flag in parameter.opts if parameter.param_type_name == "option" else ():
                assert re.search(rf"<code>[^<]*{re.escape(flag)}\b", section), f"{name} {flag}"


def test_every_public_name_has_an_entry(site: Site) -> None:
    anchors = site.pages["reference/python/index.html"].anchors
    assert {f"pase.{name}" for name in pase.__all__} <= anchors


PACKAGES = {"operators": "graph.", "explanation": "analysis.", "exports": "views."}
"""Where a documented module stands, if not at the root."""


@pytest.mark.parametrize("module", ["graph", "operators", "machine", "costs", "solver", "explanation", "exports"])
def test_every_name_of_a_documented_module_has_an_entry(site: Site, module: str) -> None:
    full = f"pase.{PACKAGES.get(module, '')}{module}"
    names = [name for name in __import__(full, fromlist=["__all__"]).__all__ if name not in pase.__all__]
    anchors = site.pages[f"reference/{module}/index.html"].anchors
    assert names
    assert {f"{full}.{name}" for name in names} <= anchors


def test_every_error_has_an_entry(site: Site) -> None:
    from pase import errors

    found = [name for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, Exception)]
    assert {f"pase.errors.{name}" for name in found} - {"pase.errors.PaseError"} <= (
        site.pages["reference/errors/index.html"].anchors
    )


@pytest.mark.parametrize(
    ("page", "name", "made"),
    [
        ("plan-file", "plan", plan_schema),
        ("machine-file", "machine", machine_schema),
    ],
)
def test_schemas_are_published_and_every_field_is_told(
    site: Site, page: str, name: str, made: Callable[[], str]
) -> None:
    schema = json.loads(made())
    published = site.folder / "schemas" / f"{name}.schema.json"
    assert json.loads(published.read_text(encoding="utf-8")) == schema
    text = site.pages[f"reference/{page}/index.html"].path.read_text(encoding="utf-8")
    shown = {part for code in re.findall(r"<code>([^<]+)</code>", text) for part in re.split(r"[.\[\]]+", code)}
    assert _fields(schema) <= shown


def _fields(node: object) -> set[str]:
    """The names of all properties in a schema."""
    if isinstance(node, list):
        return set().union(*map(_fields, node))
    if not isinstance(node, dict):
        return set()
    own = set(node["properties"]) if isinstance(node.get("properties"), dict) else set()
    return own.union(*map(_fields, node.values()))


def test_no_markdown_is_left_as_it_was_written(site: Site) -> None:
    """What GitHub takes for a list, a table or a link, and MkDocs did not."""
    left = re.compile(r"\n\s*([-*]|\d+\.) \S|\|\s*-{3}|\]\(|\*\*|`|^\s*\|.*\|\s*$", re.MULTILINE)
    found = [(name, text) for name, page in site.pages.items() for _, text in page.texts if left.search(text)]
    assert not found, found


def test_tables_and_lists_of_the_help_are_as_they_are_printed(site: Site) -> None:
    text = site.pages["reference/commands/index.html"].path.read_text(encoding="utf-8")
    code = re.findall(r"<code>([^<]*)</code>", text)
    assert "--machine NAME|FILE" in code
    assert not [one for one in code if "\\|" in one]
    # Lines that click is told not to wrap.
    assert "original-easgd  async-easgd  async-measgd  hogwild-easgd\n" in text
    assert "\b" not in text


def test_no_doctest_becomes_a_quotation(site: Site) -> None:
    text = "".join(page.path.read_text(encoding="utf-8") for page in site.pages.values())
    assert "<blockquote>" not in text


# -- the checks can fail


@pytest.fixture
def small(tmp_path: Path) -> Site:
    (tmp_path / "a").mkdir()
    (tmp_path / "index.html").write_text(
        '<a href="a/#there">1</a><a href="a/#nowhere">2</a><a href="b.html">3</a><a href="../../x">4</a>'
        '<a href="#5">5</a>'
        '<link rel="stylesheet" href="https://example.org/x.css"><script src="own.js"></script>'
        '<article><p>a **b**<code>c **d**</code></p></article><a href="https://example.org">6</a>',
        encoding="utf-8",
    )
    (tmp_path / "a" / "index.html").write_text('<h1 id="there">x</h1>', encoding="utf-8")
    return Site(tmp_path)


def test_broken_links_are_found(small: Site) -> None:
    assert small.broken == [f"index.html: {link}" for link in ("a/#nowhere", "b.html", "../../x", "#5")]


def test_foreign_files_are_found(small: Site) -> None:
    assert small.foreign == ["index.html: https://example.org/x.css"]
    assert isinstance(small.pages["index.html"], Page)
    assert small.pages["index.html"].texts == [("p", "a **b**")]


# -- what the build refuses


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[x](../pase/nowhere.py)", r"docs/page.md: the link to ../pase/nowhere.py leads to pase/nowhere.py"),
        ("<!-- generated: nothing at-all -->", "page.md: nothing is generated by the name 'nothing'"),
    ],
)
def test_a_wrong_page_fails(text: str, message: str) -> None:
    from types import SimpleNamespace

    from mkdocs.exceptions import PluginError

    from scripts.site.hooks import on_page_markdown

    page = SimpleNamespace(file=SimpleNamespace(src_uri="page.md"))
    with pytest.raises(PluginError, match=re.escape(message)):
        on_page_markdown(text, page, None, None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("page", "link", "expected"),
    [
        ("method.md", "[schema](reference/plan-file.md)", "[schema](reference/plan-file.md)"),
        ("how-to/x.md", "[log](../../CHANGELOG.md#a)", "[log](../changelog.md#a)"),
        ("how-to/x.md", "[m](../method.md)", "[m](../method.md)"),
        ("method.md", "[pase/solver](../pase/solver)", "`pase/solver`"),
        ("method.md", "[`checkpoint.py`](../pase/easgd/checkpoint.py)", "`checkpoint.py`"),
        ("method.md", "[readme](../README.md)", "[readme](index.md)"),
    ],
)
def test_links_out_of_the_documentation(page: str, link: str, expected: str) -> None:
    from scripts.site.links import relinked

    assert relinked(link, page) == expected


@pytest.mark.parametrize(("arguments", "status"), [((), 2), (("bild",), 2), (("serve", "x"), 2), (("--help",), 0)])
def test_the_program_says_how_to_use_it(arguments: tuple[str, ...], status: int) -> None:
    done = subprocess.run([ROOT / "scripts" / "docs", *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == status
    assert "scripts/docs build [DIR]" in (done.stderr if status else done.stdout)
    assert "set -" not in done.stderr + done.stdout
