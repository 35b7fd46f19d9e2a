"""Mermaid: the graph of a plan as a flowchart, which Markdown on many sites shows as a picture."""

import re
from collections.abc import Iterator

from pase.exports.drawn import DrawnEdge, DrawnPlan, DrawnVertex, drawn_plan
from pase.exports.registry import Exported, ExportOptions
from pase.graph.names import visible
from pase.plan import Plan

MOST_CHARACTERS = 50_000
MOST_EDGES = 500
"""What Mermaid draws unless its configuration (maxTextSize, maxEdges) says otherwise."""

_INDENT = "    "


def write(plan: Plan, options: ExportOptions) -> Exported:
    """Return a flowchart: layers are nodes n0, n1, …, and their names are labels; notes tell where it is too large."""
    drawn = drawn_plan(plan, is_folded=options.fold)
    text = "\n".join(_lines(drawn)) + "\n"
    is_too_large = len(text) > MOST_CHARACTERS or len(drawn.edges) > MOST_EDGES
    return Exported(text=text, notes=(_size_note(text, drawn, options),) if is_too_large else ())


def quoted(*lines: str) -> str:
    """Return a label that shows lines of text as they are, without markup or entities of its own."""
    return '"' + "<br>".join(_MARKS.sub(_entity, visible(line)) for line in lines) + '"'


def _size_note(text: str, drawn: DrawnPlan, options: ExportOptions) -> str:
    return (
        f"the flowchart has {len(text):,} characters and {len(drawn.edges):,} edges; Mermaid draws "
        f"{MOST_CHARACTERS:,} and {MOST_EDGES:,} unless maxTextSize and maxEdges are set to more: "
        f"{'use dot or svg' if options.fold else 'fold it, or use dot or svg'}"
    )


_MARKS = re.compile(r"[^\w ]|(?<![^\W_])_|_(?![^\W_])")
"""All but letters, digits and spaces. A single _ within a word, which is common, is no markup either."""


def _entity(found: re.Match[str]) -> str:
    return f"#{ord(found[0])};"


def _lines(drawn: DrawnPlan) -> Iterator[str]:
    yield "flowchart TD"
    vertices = {vertex.number: vertex for vertex in drawn.vertices}
    in_block = {number for block in drawn.blocks for number in block.vertices}
    for vertex in drawn.vertices:
        if vertex.number not in in_block:
            yield f"{_INDENT}{_node(vertex)}"
    for number, block in enumerate(drawn.blocks):
        yield f"{_INDENT}subgraph block{number}[{quoted(f'×{block.count}')}]"
        yield from (f"{_INDENT * 2}{_node(vertices[vertex])}" for vertex in block.vertices)
        yield f"{_INDENT}end"
    for edge in drawn.edges:
        yield f"{_INDENT}{_link(edge)}"
    for i, edge in enumerate(drawn.edges):
        if edge.width > 1:
            yield f"{_INDENT}linkStyle {i} stroke-width:{edge.width:.1f}px"
    for i, split_class in enumerate(drawn.classes):
        yield f"{_INDENT}classDef split{i} fill:{split_class.light},stroke:#333333,color:#000000"


def _node(vertex: DrawnVertex) -> str:
    return f"n{vertex.number}[{quoted(*vertex.lines)}]:::split{vertex.split_class}"


def _link(edge: DrawnEdge) -> str:
    arrow = "-.->" if edge.is_back else "-->"
    label = f"|{quoted(edge.label)}|" if edge.label else ""
    return f"n{edge.source} {arrow}{label} n{edge.target}"
