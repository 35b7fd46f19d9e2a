"""DOT: the graph of a plan for Graphviz, coloured by what is split, wide where many bytes move."""

from collections.abc import Iterator

from pase.common.names import short, visible
from pase.planning.plan import Plan
from pase.targets.emitter.text import Grammar, Text, figure, joined
from pase.views.drawing.plans import DrawnPlan, drawn_plan, edge_label, edge_width, title_lines, vertex_lines
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
    yield dot('    graph [label="{}", labelloc=t, fontname=Helvetica];', title_lines(drawn.plan))
    yield dot('    node [shape=box, style="filled,rounded", fontname=Helvetica, fontcolor=black];')
    yield dot("    edge [fontname=Helvetica, fontsize=10, arrowsize=0.7];")
    for number in drawn.graph.vertices:
        fill = drawn.classes.classes[drawn.classes.of_layer[number]].light
        about = ", ".join((short(drawn.plan.layers[number].kind), *drawn.layer_text(number)))
        form = '    n{} [label="{}", fillcolor="{}", tooltip="{}"];'
        yield dot(form, number, vertex_lines(drawn, number), fill, about)
    for number, repeat in enumerate(drawn.repeats):
        yield dot("    subgraph cluster_{} {", number)
        yield dot('        label="×{}"; labeljust=r; style=dashed;', repeat.count)
        yield from (dot("        n{};", vertex) for vertex in repeat.first_block)
        yield dot("    }")
    for edge in drawn.graph.edges:
        text = edge_label(drawn, edge)
        label = dot(', label="  {}"', text) if text else dot("")
        # Back to a block that stands for the next one, too: it must not turn the drawing over.
        back = dot(", style=dashed, constraint=false") if edge.is_loop_back else dot("")
        width = figure(edge_width(drawn, edge), ".2f")
        yield dot("    n{} -> n{} [penwidth={}{}{}];", edge.source, edge.target, width, label, back)
    yield dot("}")
