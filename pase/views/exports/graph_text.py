"""The graph of a plan as text that other programs draw: DOT, for Graphviz, and Mermaid, for Markdown.

Colours show what is split, the width of an edge its bytes.
"""

import re
from collections.abc import Iterator

from pase.analysis.figures import SCOPES
from pase.common.words import short, visible
from pase.planning.plan import Plan
from pase.targets.emitter.text import Grammar, Text, figure, joined, word
from pase.views.drawing.plans import (
    FILLS,
    DrawnPlan,
    drawn_plan,
    edge_label,
    edge_width,
    title_lines,
    vertex_lines,
)
from pase.views.exports import Exported, ExportOptions


def write_dot(plan: Plan, options: ExportOptions) -> Exported:
    """Return a directed graph: layers are nodes n0, n1, …, and their names are labels."""
    return Exported(text=joined([*_dot_lines(drawn_plan(plan, is_folded=options.fold)), dot("")]))


def _escaped_dot(line: str) -> str:
    # Graphviz reads escapes such as \N, and entities of HTML, in every label.
    return visible(line).replace("&", "&amp;").replace("\\", "\\\\").replace('"', '\\"')


dot = Grammar(_escaped_dot, between="\\n").write
"""Returns DOT text. Values are quoted and displayed literally: no escapes, entities or markup."""


def _dot_lines(drawn: DrawnPlan) -> Iterator[Text]:
    yield dot("digraph plan {")
    yield dot('    graph [label="{}", labelloc=t, fontname=Helvetica];', title_lines(drawn))
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
        # An edge back to the block that also represents the next one must not affect the ranks.
        back = dot(", style=dashed, constraint=false") if edge.is_loop_back else dot("")
        width = figure(edge_width(drawn, edge), ".2f")
        yield dot("    n{} -> n{} [penwidth={}{}{}];", edge.source, edge.target, width, label, back)
    yield dot("}")


MOST_CHARACTERS = 50_000
MOST_EDGES = 500
"""Mermaid's default limits (maxTextSize, maxEdges)."""


def write_mermaid(plan: Plan, options: ExportOptions) -> Exported:
    """Return a flowchart: layers are nodes n0, n1, …, with names as labels; a note warns if it is too large."""
    drawn = drawn_plan(plan, is_folded=options.fold)
    text = joined([*_mermaid_lines(drawn), mermaid("")])
    if len(text) <= MOST_CHARACTERS and len(drawn.graph.edges) <= MOST_EDGES:
        return Exported(text=text)
    note = (
        f"the flowchart has {len(text):,} characters and {len(drawn.graph.edges):,} edges; Mermaid draws "
        f"{MOST_CHARACTERS:,} and {MOST_EDGES:,} unless maxTextSize and maxEdges are set to more: "
        f"{'use dot or svg' if options.fold else 'fold it, or use dot or svg'}"
    )
    return Exported(text=text, notes=(note,))


_MARKS = re.compile(r"[^\w ]|(?<![^\W_])_|_(?![^\W_])")
"""All but letters, digits and spaces. A single _ within a word, which is common, is not markup, either."""


def _entity(found: re.Match[str]) -> str:
    return f"#{ord(found[0])};"


def _escaped_mermaid(line: str) -> str:
    return _MARKS.sub(_entity, visible(line))


mermaid = Grammar(_escaped_mermaid, between="<br>").write
"""Returns Mermaid text. Values are quoted and displayed literally: no markup or entities."""


def _mermaid_lines(drawn: DrawnPlan) -> Iterator[Text]:
    yield mermaid("flowchart TD")
    yield mermaid("    %% labels of edges are bytes of a step, {}", word(drawn.transferred.what, SCOPES))
    in_block = {number for repeat in drawn.repeats for number in repeat.first_block}
    for number in drawn.graph.vertices:
        if number not in in_block:
            yield mermaid("    {}", _node(drawn, number))
    for place, repeat in enumerate(drawn.repeats):
        yield mermaid('    subgraph block{}["{}"]', place, f"×{repeat.count}")
        yield from (mermaid("        {}", _node(drawn, number)) for number in repeat.first_block)
        yield mermaid("    end")
    for edge in drawn.graph.edges:
        arrow = mermaid("-.->") if edge.is_loop_back else mermaid("-->")
        text = edge_label(drawn, edge)
        label = mermaid('|"{}"|', text) if text else mermaid("")
        yield mermaid("    n{} {}{} n{}", edge.source, arrow, label, edge.target)
    for i, edge in enumerate(drawn.graph.edges):
        width = edge_width(drawn, edge)
        if width > 1:
            yield mermaid("    linkStyle {} stroke-width:{}px", i, figure(width, ".1f"))
    for i, split_class in enumerate(drawn.classes.classes):
        yield mermaid("    classDef split{} fill:{},stroke:#333333,color:#000000", i, word(split_class.light, FILLS))


def _node(drawn: DrawnPlan, number: int) -> Text:
    split_class = drawn.classes.of_layer[number]
    return mermaid('n{}["{}"]:::split{}', number, vertex_lines(drawn, number), split_class)
