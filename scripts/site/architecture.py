"""Write docs/architecture.md and its drawing from the code: `python -m scripts.site.architecture`."""

import ast
from graphlib import TopologicalSorter
from pathlib import Path

from pase.views.drawing.layered import layered

ROOT = Path(__file__).resolve().parents[2]
PAGE, DRAWING = "docs/architecture.md", "docs/images/architecture.svg"

_TEXT = """\
# Architecture

The packages of PaSE, in the order in which data flows through them: each imports only those above it in the table, and
`tests/test_architecture.py` fails where one does not. An arrow leads from a package to one that it uses; those that
follow from other arrows are left out.

![Packages of PaSE, and which uses which](images/architecture.svg)

| package | what it holds |
|---|---|
{}

This page is made from the code: `python -m scripts.site.architecture`.
"""

_SVG = """\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="-8 -8 {} {}" width="{}" font-family="sans-serif" font-size="13">
<style>rect,path{{fill:none;stroke:#5b6b7f}}rect{{fill:#dfe8f3}}text{{text-anchor:middle;fill:#1c2733}}</style>
<defs><marker id="a" markerWidth="8" markerHeight="8" refX="6" refY="3" orient="auto">
<path d="M0 0L6 3L0 6"/></marker></defs>
{}
</svg>
"""


def packages() -> dict[str, list[Path]]:
    """Return the modules of each package."""
    folders = {path.parent.name: path.parent for path in sorted((ROOT / "pase").glob("*/__init__.py"))}
    return {name: sorted(folder.resolve().rglob("*.py")) for name, folder in folders.items()}


def imports(modules: dict[str, list[Path]]) -> dict[str, list[str]]:
    """Return which other packages each one imports."""
    found: dict[str, list[str]] = {}
    for package, paths in modules.items():
        nodes = (node for path in paths for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
        names = (node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module)
        used = {name.split(".")[1] for name in names if name.startswith("pase.")}
        found[package] = sorted(used & modules.keys() - {package})
    return found


def page() -> str:
    """Return the page."""
    modules = packages()
    rows = []
    for name in TopologicalSorter(imports(modules)).static_order():
        (init,) = (path for path in modules[name] if path.name == "__init__.py" and path.parent.name == name)
        sentence = (ast.get_docstring(ast.parse(init.read_text(encoding="utf-8"))) or "").split("\n\n")[0]
        rows.append(f"| `pase.{name}` | {' '.join(sentence.split())} |")
    return _TEXT.format("\n".join(rows))


def drawing() -> str:
    """Return the drawing: an arrow for each import that does not follow from others."""
    direct = imports(packages())
    names = list(TopologicalSorter(direct).static_order())[::-1]
    below: dict[str, set[str]] = {}
    for name in reversed(names):
        below[name] = {*direct[name]}.union(*(below[other] for other in direct[name]))
    kept = [
        (names.index(name), names.index(other))
        for name in names
        for other in direct[name]
        if not any(other in below[between] for between in direct[name])
    ]
    sizes = [(16 + 8.0 * len(name), 26.0) for name in names]
    found = layered(sizes, kept)
    parts = [
        f'<path d="M{"L".join(f"{x:.0f} {y:.0f}" for x, y in route)}" marker-end="url(#a)"/>' for route in found.routes
    ]
    for name, (x, y), (width, height) in zip(names, found.positions, sizes, strict=True):
        box = f'x="{x - width / 2:.0f}" y="{y - height / 2:.0f}" width="{width:.0f}" height="{height:.0f}" rx="4"'
        parts.append(f'<rect {box}/><text x="{x:.0f}" y="{y + 4:.0f}">{name}</text>')
    width = found.width + 16
    return _SVG.format(f"{width:.0f}", f"{found.height + 16:.0f}", f"{width:.0f}", "\n".join(parts))


if __name__ == "__main__":
    (ROOT / PAGE).write_text(page(), encoding="utf-8")
    (ROOT / DRAWING).write_text(drawing(), encoding="utf-8")
