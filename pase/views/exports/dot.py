"""DOT: the graph of a plan for Graphviz, coloured by what is split, wide where many bytes move."""

from collections.abc import Iterator

from pase.graph.names import visible
from pase.planning.plan import Plan
from pase.targets.mesh_tensorflow.emitter.text import Grammar, Text, figure, joined
from pase.views.drawing.plans import DrawnEdge, DrawnPlan, DrawnVertex, drawn_plan
from pase.views.exports.registry import Exported, ExportOptions


def write(plan: Plan, options: ExportOptions) -> Exported:
    """Return a directed graph: layers are nodes n0, n1, …, and their names are labels."""
    return Exported(text=joined([*_lines(drawn_plan(plan, is_folded=options.fold)), dot("")]))


def _escaped(line: str) -> str:
    # Graphviz reads escapes such as \N, and entities of HTML, in every label.
    return visible(line).replace("&", "&amp;").replace("\\", "\\\\").replace('"', '\\"')


dot = Grammar(_escaped, between="\\n").write
"""Returns text of DOT. Text from outside stands between quotes, and shows as it is: no escapes, entities, markup."""


def _lines(drawn: DrawnPlan) -> Iterator[Text]:
    yield dot("digraph plan {")
    yield dot('    graph [label="{}", labelloc=t, fontname=Helvetica];', drawn.title)
    yield dot('    node [shape=box, style="filled,rounded", fontname=Helvetica, fontcolor=black];')
    yield dot("    edge [fontname=Helvetica, fontsize=10, arrowsize=0.7];")
    for vertex in drawn.vertices:
        yield _node(drawn, vertex)
    for number, block in enumerate(drawn.blocks):
        yield dot("    subgraph cluster_{} {", number)
        yield dot('        label="×{}"; labeljust=r; style=dashed;', block.count)
        yield from (dot("        n{};", vertex) for vertex in block.vertices)
        yield dot("    }")
    yield from map(_arc, drawn.edges)
    yield dot("}")


def _node(drawn: DrawnPlan, vertex: DrawnVertex) -> Text:
    fill = drawn.classes[vertex.split_class].light
    form = '    n{} [label="{}", fillcolor="{}", tooltip="{}"];'
    return dot(form, vertex.number, vertex.lines, fill, vertex.about)


def _arc(edge: DrawnEdge) -> Text:
    label = dot(', label="  {}"', edge.label) if edge.label else dot("")
    # Back to a block that stands for the next one, too: it must not turn the drawing over.
    back = dot(", style=dashed, constraint=false") if edge.is_back else dot("")
    return dot("    n{} -> n{} [penwidth={}{}{}];", edge.source, edge.target, figure(edge.width, ".2f"), label, back)
