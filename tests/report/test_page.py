import json
import re
import shutil
import subprocess
from base64 import b64encode
from hashlib import sha256
from html.parser import HTMLParser
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from pase.views.reports.document import MODULES, render
from tests.hostile import HOSTILE_NAMES
from tests.report import handmade

PAGE = Path(str(files("pase.views.reports").joinpath("page")))


class Parsed(HTMLParser):
    """Elements with their attributes, and the text of each script and style, by an independent parser."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.raw: list[tuple[str, dict[str, str | None], str]] = []
        self.title = ""
        self._within: str | None = None
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self._within = tag
        if tag in ("script", "style"):
            self.raw.append((tag, dict(attrs), ""))

    def handle_endtag(self, tag: str) -> None:
        self._within = None

    def handle_data(self, data: str) -> None:
        if self._within in ("script", "style"):
            tag, attributes, text = self.raw[-1]
            self.raw[-1] = (tag, attributes, text + data)
        elif self._within == "title":
            self.title += data

    def json(self, identifier: str) -> Any:
        return json.loads(next(text for _, attributes, text in self.raw if attributes.get("id") == identifier))

    def policy(self) -> dict[str, list[str]]:
        (content,) = (a["content"] for _, a in self.elements if a.get("http-equiv") == "Content-Security-Policy")
        return {name: sources for name, *sources in (one.split() for one in (content or "").split("; "))}


def hash_of(text: str) -> str:
    return f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'"


def test_the_charts_library_is_the_one_that_was_published() -> None:
    vendored = json.loads((PAGE / "vendor/VENDORED.json").read_text(encoding="utf-8"))
    found = {path.name: sha256(path.read_bytes()).hexdigest() for path in (PAGE / "vendor").iterdir()}
    del found["VENDORED.json"]
    assert found == vendored["sha256"]
    assert f'version="{vendored["version"]}"' in (PAGE / "vendor/echarts.min.js").read_text(encoding="utf-8")
    assert "Apache License" in (PAGE / "vendor/LICENSE.txt").read_text(encoding="utf-8")


def test_every_module_is_joined_and_of_a_size_to_be_read() -> None:
    assert sorted(path.stem for path in PAGE.glob("*.js")) == sorted(MODULES)
    assert len(set(MODULES)) == len(MODULES)
    for name in MODULES:
        assert len((PAGE / f"{name}.js").read_text(encoding="utf-8").splitlines()) <= 300, name


def test_the_program_is_javascript(tmp_path: Path) -> None:
    node = shutil.which("node")
    if node is None:
        pytest.skip("no node to check the program's syntax with")
    program = tmp_path / "program.js"
    program.write_text(Parsed(render(handmade.small())).raw[-2][2], encoding="utf-8")
    # Each by itself, and joined, so that a name which two modules declare is found, too.
    paths = [*(PAGE / f"{name}.js" for name in MODULES), program]
    check = "for (const p of process.argv.slice(1)) new vm.Script(fs.readFileSync(p, 'utf8'), { filename: p })"
    result = subprocess.run([node, "-e", check, *map(str, paths)], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("name", MODULES)
def test_no_module_makes_markup_or_code_of_text(name: str) -> None:
    text = (PAGE / f"{name}.js").read_text(encoding="utf-8")
    unsafe = (
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|Function\(|DOMParser|srcdoc|\bfetch\b|XMLHttp"
    )
    assert re.findall(unsafe, text) == []
    assert re.findall(r"https?://(?!www\.w3\.org/2000/svg)", text) == []


def test_scripts_and_styles_are_allowed_by_their_hashes_alone() -> None:
    page = Parsed(render(handmade.small()))
    data = [text for tag, attributes, text in page.raw if attributes.get("type") == "application/json"]
    scripts = [text for tag, attributes, text in page.raw if tag == "script" and "type" not in attributes]
    styles = [text for tag, _, text in page.raw if tag == "style"]
    assert (len(data), len(scripts), len(styles)) == (2, 2, 1)
    assert page.policy() == {
        "default-src": ["'none'"],
        "script-src": [hash_of(text) for text in scripts],
        "style-src": [hash_of(text) for text in styles],
        "img-src": ["data:"],
        "base-uri": ["'none'"],
        "form-action": ["'none'"],
    }


def test_the_page_refers_to_nothing_elsewhere() -> None:
    for tag, attributes in Parsed(render(handmade.small())).elements:
        assert not {name for name in attributes if name.startswith("on") or name in ("style", "src", "srcset")}, tag
        assert (attributes.get("href") or "#").startswith(("#", "data:")), tag


def test_the_same_document_gives_the_same_bytes() -> None:
    assert render(handmade.beside()) == render(handmade.beside())


@pytest.mark.parametrize("name", [*HOSTILE_NAMES, "{{program}}", "\\g<0>", "&lt;script&gt;"])
def test_names_stay_data(name: str) -> None:
    document = handmade.small() | {"title": name}
    document["plans"][0]["layers"][0]["name"] = name
    plain, page = Parsed(render(handmade.small())), Parsed(render(document))
    assert [tag for tag, _ in page.elements] == [tag for tag, _ in plain.elements]
    assert page.policy() == plain.policy()
    assert page.json("pase-data") == document
    # HTML reads a line's end in one way and knows no surrogates or NUL.
    assert re.sub(r"[\r\n]+|[^\x20-\x7e]", "", page.title) == re.sub(r"[\r\n]+|[^\x20-\x7e]", "", name)


def test_the_file_is_text_for_any_encoding_of_ascii_names() -> None:
    text = render(handmade.hostile(HOSTILE_NAMES))
    assert "\ud800" not in text
    assert Parsed(text).json("pase-data") == handmade.hostile(HOSTILE_NAMES)
    text.encode("utf-8")


def test_licences_go_with_what_they_are_for() -> None:
    licences = Parsed(render(handmade.small())).json("pase-licences")
    for name in ("NOTICE.txt", "LICENSE.txt", "LICENSE-d3.txt"):
        assert (PAGE / "vendor" / name).read_text(encoding="utf-8").strip() in licences


def test_a_number_that_is_none_is_refused() -> None:
    document = handmade.small()
    document["plans"][0]["total_cost"] = float("nan")
    with pytest.raises(ValueError, match="JSON compliant"):
        render(document)
