"""DOT: the graph of a plan for Graphviz, coloured by what is split, wide where many bytes move."""

from collections.abc import Iterator

from pase.exports.drawn import DrawnEdge, DrawnPlan, DrawnVertex, drawn_plan
from pase.exports.registry import Exported, ExportOptions
from pase.graph.names import visible
from pase.plan import Plan

_INDENT = "    "


def write(plan: Plan, options: ExportOptions) -> Exported:
    """Return a directed graph: layers are nodes n0, n1, …, and their names are labels."""
    return Exported(text="\n".join(_lines(drawn_plan(plan, is_folded=options.fold))) + "\n")


def quoted(*lines: str) -> str:
    """Return a quoted string of DOT that shows lines of text as they are: no escapes, no entities, no markup."""
    return '"' + "\\n".join(map(_escaped, lines)) + '"'


def _escaped(line: str) -> str:
    # Graphviz reads escapes such as \N, and entities of HTML, in every label.
    return visible(line).replace("&", "&amp;").replace("\\", "\\\\").replace('"', '\\"')


def _lines(drawn: DrawnPlan) -> Iterator[str]:
    yield "digraph plan {"
    yield f"{_INDENT}graph [label={quoted(*drawn.title)}, labelloc=t, fontname=Helvetica];"
    yield f'{_INDENT}node [shape=box, style="filled,rounded", fontname=Helvetica, fontcolor=black];'
    yield f"{_INDENT}edge [fontname=Helvetica, fontsize=10, arrowsize=0.7];"
    for vertex in drawn.vertices:
        yield f"{_INDENT}{_node(drawn, vertex)}"
    for number, block in enumerate(drawn.blocks):
        yield f"{_INDENT}subgraph cluster_{number} {{"
        yield f"{_INDENT * 2}label={quoted(f'×{block.count}')}; labeljust=r; style=dashed;"
        yield from (f"{_INDENT * 2}n{vertex};" for vertex in block.vertices)
        yield f"{_INDENT}}}"
    for edge in drawn.edges:
        yield f"{_INDENT}{_arc(edge)}"
    yield "}"


def _node(drawn: DrawnPlan, vertex: DrawnVertex) -> str:
    split_class = drawn.classes[vertex.split_class]
    return (
        f"n{vertex.number} [label={quoted(*vertex.lines)}, "
        f"fillcolor={quoted(split_class.light)}, tooltip={quoted(vertex.about)}];"
    )


def _arc(edge: DrawnEdge) -> str:
    attributes = [f"penwidth={edge.width:.2f}"]
    attributes += [f"label={quoted(f'  {edge.label}')}"] if edge.label else []
    # Back to a block that stands for the next one, too: it must not turn the drawing over.
    attributes += ["style=dashed", "constraint=false"] if edge.is_back else []
    return f"n{edge.source} -> n{edge.target} [{', '.join(attributes)}];"
