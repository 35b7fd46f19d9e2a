"""The report as one file: shell, style, program, charts and data in one HTML text that loads nothing."""

import html
import json
import re
from base64 import b64encode
from collections.abc import Iterable, Mapping
from hashlib import sha256
from importlib.resources import files
from pathlib import Path
from typing import Any

from pase.common.documents import StrPath, write_atomically
from pase.errors import PlanError
from pase.planning.plan import Plan
from pase.views.reports.document import NamedPlan, report_document

MODULES = (
    "elements",
    "quantities",
    "report",
    "theme",
    "tables",
    "marks",
    "summary",
    "drawing",
    "viewport",
    "paint",
    "overview",
    "pointer",
    "journey",
    "legend",
    "finder",
    "shards",
    "panel",
    "panel_parts",
    "charts",
    "costs",
    "memory",
    "traffic",
    "beside",
    "sweep",
    "help",
    "paper",
    "main",
)
"""The program's modules, in the order in which they are joined: each may use the functions of all others."""

CHARTS = "vendor/echarts.min.js"
LICENCES = ("vendor/NOTICE.txt", "vendor/LICENSE.txt", "vendor/LICENSE-d3.txt")


def report(
    plans: Plan | Mapping[str, Plan], path: StrPath | None = None, *, explains: bool = True, time_limit_s: float = 30.0
) -> str:
    """Return a page that shows a plan, or several by name beside one another, as HTML that needs nothing else.

    path: where it is written, too. explains: whether it says why each layer is as it is; time_limit_s: for saying so.
    Raises PlanError where the file cannot be written.
    """
    by_name = plans if isinstance(plans, Mapping) else {plans.graph.name: plans}
    named = [NamedPlan(name=name, plan=plan) for name, plan in by_name.items()]
    page = render(report_document(named, explains=explains, time_limit_s=time_limit_s))
    if path is not None:
        try:
            write_atomically(Path(path), page)
        except OSError as error:
            raise PlanError(f"{path} cannot be written: {error.strerror or error}") from None
    return page


def render(document: Mapping[str, Any]) -> str:
    """Return the report as the text of one HTML file; the same document gives the same bytes.

    document: what the page shows, as JSON values; docs/report.md names its fields. Names in it are data: they are
    escaped here and become text nodes there. Every script and style is allowed by its hash alone, so that nothing
    which slipped into the page could run. Raises ValueError where a number is not finite.
    """
    style = _text("style.css")
    program = _program()
    charts = _text(CHARTS)
    pieces = {
        "title": html.escape(str(document["title"])).encode("ascii", "xmlcharrefreplace").decode("ascii"),
        "policy": _policy(scripts=(program, charts), styles=(style,)),
        "style": style,
        "data": embedded(document),
        "licences": embedded("\n\n".join(_text(name).strip() for name in LICENCES)),
        "program": program,
        "charts": charts,
    }
    # In one pass: what is put in is not looked at again.
    return re.sub(r"\{\{(\w+)\}\}", lambda found: pieces[found[1]], _text("index.html"))


def embedded(value: object) -> str:
    r"""Return a value as JSON that can stand in a script element: without `<`, `>`, `&` or anything beyond ASCII."""
    text = json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _program() -> str:
    # One function around all modules: their names are theirs alone, and the charts' library cannot meet them.
    modules = "\n".join(_text(f"{name}.js").strip() for name in MODULES)
    return f'\n(() => {{\n"use strict";\n{modules}\n}})();\n'


def _policy(*, scripts: Iterable[str], styles: Iterable[str]) -> str:
    directives = {
        "default-src": ("'none'",),
        "script-src": tuple(map(_hash, scripts)),
        "style-src": tuple(map(_hash, styles)),
        "img-src": ("data:",),
        "base-uri": ("'none'",),
        "form-action": ("'none'",),
    }
    return "; ".join(f"{name} {' '.join(sources)}" for name, sources in directives.items())


def _hash(text: str) -> str:
    return f"'sha256-{b64encode(sha256(text.encode('utf-8')).digest()).decode('ascii')}'"


def _text(name: str) -> str:
    return files("pase.views.reports").joinpath("page", *name.split("/")).read_text(encoding="utf-8")
