"""`svg`: the graph of a plan as one self-contained picture."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from math import dist

from pase.analysis.explanation.reasons import configuration_text
from pase.common.quantities import quantity
from pase.graph.names import visible
from pase.planning.plan import LayerPlan, Plan
from pase.targets.mesh_tensorflow.emitter.text import Text, joined
from pase.views.drawing.arrangement import Arrangement, Frame, arranged
from pase.views.drawing.colours import PATTERNS, SplitClasses, split_classes
from pase.views.drawing.folded import FoldedEdge, FoldedGraph
from pase.views.drawing.legend import class_entries, legend, line_entries
from pase.views.drawing.lettering import shortened, text_width, xml
from pase.views.drawing.plans import certificate_text, edge_bytes, folded_plan
from pase.views.drawing.strokes import (
    LabelPlace,
    head_data,
    label_place,
    longest_piece,
    number,
    path_data,
    stroke_width,
    towards,
)
from pase.views.drawing.style import patterns, style

MARGIN = 20.0
"""Around everything."""

_BOX_HEIGHT, _BOX_PAD = 38.0, 9.0
_LEAST_BOX, _MOST_BOX = 76.0, 220.0
_NAME_SIZE, _TEXT_SIZE, _TITLE_SIZE, _BYTES_SIZE = 13.2, 11.0, 17.6, 10.0
"""Of letters; of bold ones as much larger as they are wider."""

_HEADING = 56.0
"""Height of the title and what stands below it."""

_LEAST_WIDTH = 480.0
"""Of the picture, so that its legend has room."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Subject:
    """What a picture shows: moved_bytes: [E] of the plan's graph, forward and backward."""

    plan: Plan
    graph: FoldedGraph
    classes: SplitClasses
    moved_bytes: tuple[float, ...]

    @property
    def most_bytes(self) -> float:
        return max(self.moved_bytes, default=0.0)


def svg(plan: Plan, *, fold: bool = True) -> str:
    """Return the graph of a plan as the text of an SVG file; fold: whether blocks that repeat are drawn once, framed.

    Boxes are layers, coloured by which dims are split; wide edges move many bytes. Names are text, whatever they hold.
    """
    graph, repeats = folded_plan(plan, is_folded=fold)
    subject = _Subject(plan=plan, graph=graph, classes=split_classes(plan.layers), moved_bytes=edge_bytes(plan))
    lines = [_lines(plan, plan.layers[v]) for v in graph.vertices]
    drawing = arranged(graph, repeats, [(_box_width(*line), _BOX_HEIGHT) for line in lines])
    width = max(drawing.width, _LEAST_WIDTH)
    has_loops = any(edge.is_loop_back for edge in graph.edges)
    signs, signs_height = legend(
        [
            list(class_entries(subject.classes.classes)),
            list(line_entries(subject.most_bytes, has_blocks=bool(repeats), has_loops=has_loops)),
        ],
        width,
    )
    head = _HEADING + signs_height + MARGIN
    body = [
        *_heading(plan, width),
        xml('<g transform="translate({} {})">', number(MARGIN), number(MARGIN + _HEADING)),
        signs,
        xml("</g>"),
        xml('<g transform="translate({} {})">', number(MARGIN + (width - drawing.width) / 2), number(MARGIN + head)),
        *(_frame(frame, plan) for frame in drawing.frames),
        *_edges(subject, drawing),
        *_vertices(subject, drawing, lines),
        xml("</g>"),
    ]
    return _document(subject, joined(body), width + 2 * MARGIN, drawing.height + head + 2 * MARGIN)


def _document(subject: _Subject, body: Text, width: float, height: float) -> Text:
    classes = subject.classes.classes
    own = xml("pase-{}", sha256(body.encode()).hexdigest()[:10])
    size = number(width), number(height)
    lines = [
        xml('<svg xmlns="http://www.w3.org/2000/svg" id="{}" viewBox="0 0 {} {}" ', own, *size),
        xml('width="{}" height="{}" role="img" aria-labelledby="{}-title {}-desc">\n', *size, own, own),
        xml('<title id="{}-title">{}</title>\n', own, _title(subject.plan)),
        xml('<desc id="{}-desc">{}</desc>\n', own, _description(subject)),
        xml("<style>\n{}\n</style>\n", style(own, classes)),
        xml("<defs>{}</defs>\n", patterns(own, classes)),
        xml('<rect class="paper" width="100%" height="100%"/>\n{}\n</svg>\n', body),
    ]
    return xml("{}", lines)


def _title(plan: Plan) -> str:
    return f"{visible(plan.graph.name)} {_where(plan)}"


def _where(plan: Plan) -> str:
    return f"on {plan.num_devices} × {visible(plan.machine.device.name)}"


def _verdict(plan: Plan) -> str:
    cost = quantity(plan.total_cost, plan.cost_unit)
    return f"total cost {cost} a step, {certificate_text(plan)} (cost model {plan.cost_model})"


def _description(subject: _Subject) -> str:
    """Return what the picture shows, for those who do not see it."""
    plan, graph = subject.plan, subject.graph
    parts = [f"{_verdict(plan)}. {len(plan.layers)} layers"]
    if len(graph.vertices) < len(plan.layers):
        parts[0] += f", drawn as {len(graph.vertices)} because blocks repeat"
    split = (
        f"{of.num_layers} {f'split in {visible(of.label)}' if of.dims else of.label}" for of in subject.classes.classes
    )
    return f"{parts[0]}: {', '.join(split)}. {quantity(sum(subject.moved_bytes), 'B')} move between layouts in a step."


def _heading(plan: Plan, width: float) -> Iterator[Text]:
    name = shortened(visible(plan.graph.name), _TITLE_SIZE, width / 2)
    title = shortened(f"{name} {_where(plan)}", _TITLE_SIZE, width)
    yield xml('<text class="title" x="{}" y="{}">{}</text>', number(MARGIN), number(MARGIN + 16), title)
    verdict = shortened(_verdict(plan), _NAME_SIZE, width)
    yield xml('<text class="muted verdict" x="{}" y="{}">{}</text>', number(MARGIN), number(MARGIN + 36), verdict)


def _lines(plan: Plan, layer: LayerPlan) -> tuple[str, str]:
    """Return the two lines of text in a layer's box."""
    room = _MOST_BOX - 2 * _BOX_PAD
    configuration = configuration_text({visible(dim): k for dim, k in layer.splits.items()}, plan.num_devices)
    return shortened(visible(layer.name) or "(no name)", _NAME_SIZE, room), shortened(configuration, _TEXT_SIZE, room)


def _box_width(name: str, text: str) -> float:
    return max(_LEAST_BOX, text_width(name, _NAME_SIZE) + 2 * _BOX_PAD, text_width(text, _TEXT_SIZE) + 2 * _BOX_PAD)


def _frame(frame: Frame, plan: Plan) -> Text:
    repeat = frame.repeat
    ends = plan.layers[repeat.first].name, plan.layers[repeat.end - 1].name
    box = xml(
        '<rect class="frame" x="{}" y="{}" width="{}" height="{}" rx="8"/>',
        *map(number, (frame.x, frame.y, frame.width, frame.height)),
    )
    times = xml('<text class="times" x="{}" y="{}">×{}</text>', number(frame.x + 9), number(frame.y + 18), repeat.count)
    form = "<g><title>{} blocks of {} layers: {} … {}</title>{}{}</g>"
    return xml(form, repeat.count, repeat.period, *ends, box, times)


def _edges(subject: _Subject, drawing: Arrangement) -> Iterator[Text]:
    """Yield edges with little on them before those with much, and the labels after all of them."""
    graph, plan = subject.graph, subject.plan
    num_out = Counter(edge.source for edge in graph.edges)
    num_in = Counter(edge.target for edge in graph.edges)
    labels = []
    order = sorted(range(len(graph.edges)), key=lambda n: (_most(subject, graph.edges[n]), n))
    for n in order:
        edge, route = graph.edges[n], drawing.routes[n]
        total, most = sum(subject.moved_bytes[e] for e in edge.edges), _most(subject, edge)
        ends = f"{plan.layers[edge.source].name} → {plan.layers[edge.target].name}"
        about = f"{ends}: {_amount(total, most, len(edge.edges)) or 'nothing moves'}"
        width = stroke_width(most, subject.most_bytes)
        head, end = head_data(route[-2], route[-1], width)
        heads = [head]
        if edge.is_loop_back:
            start, tip = longest_piece(route)
            heads.append(head_data(start, towards(start, tip, dist(start, tip) / 2), width)[0])
        yield xml(
            '<g class="{}"><title>{}</title><path class="edge{}" d="{}" stroke-width="{}"/>'
            '<path class="head" d="{}"/></g>',
            "moving" if total else "still",
            about,
            " back" if edge.is_loop_back else "",
            path_data([*route[:-1], end]),
            number(width),
            heads,
        )
        if total:
            amount = _amount(total, most, len(edge.edges))
            place = label_place(route, width, near_target=num_out[edge.source] >= num_in[edge.target])
            labels.append(_label(place, amount, drawing.width))
    yield from labels


def _most(subject: _Subject, edge: FoldedEdge) -> float:
    return max(subject.moved_bytes[e] for e in edge.edges)


def _amount(total: float, most: float, count: int) -> str:
    """Return what moves over the edges that one stands for."""
    if not total:
        return ""
    if count == 1:
        return quantity(total, "B")
    return f"{quantity(most, 'B')} ×{count}" if total > 0.999 * most * count else f"{quantity(total, 'B')} in {count}"


def _label(place: LabelPlace, text: str, width: float) -> Text:
    """Return the bytes beside an edge, within the picture's margins; width: of what is drawn."""
    x, is_left = place.x, place.is_left
    room = text_width(text, _BYTES_SIZE)
    x = max(x, room - MARGIN) if is_left else min(x, width + MARGIN - room)
    look = "bytes left" if is_left else "bytes"
    return xml('<text class="{}" x="{}" y="{}">{}</text>', look, number(x), number(place.y), text)


def _vertices(subject: _Subject, drawing: Arrangement, lines: Sequence[tuple[str, str]]) -> Iterator[Text]:
    for v, (x, y), (name, text) in zip(subject.graph.vertices, drawing.positions, lines, strict=True):
        layer, number_of_class = subject.plan.layers[v], subject.classes.of_layer[v]
        width = _box_width(name, text)
        left, top = x - width / 2, y - _BOX_HEIGHT / 2
        box = xml(
            '<rect class="box c{}" x="{}" y="{}" width="{}" height="{}" rx="5"/>',
            number_of_class,
            *map(number, (left, top, width, _BOX_HEIGHT)),
        )
        if subject.classes.classes[number_of_class].pattern != PATTERNS[0]:
            # Beside the text, not behind it.
            box = xml(
                '{}<rect class="overlay p{}" x="{}" y="{}" width="{}" height="{}" rx="4"/>',
                box,
                number_of_class,
                *map(number, (left + 1, top + 1, _BOX_PAD - 1, _BOX_HEIGHT - 2)),
            )
        shown = [
            xml('<text class="name" x="{}" y="{}">{}</text>', number(x), number(y - 3), name),
            xml('<text class="text" x="{}" y="{}">{}</text>', number(x), number(y + 12), text),
        ]
        yield xml("<g><title>{}</title>{}{}</g>", _about(subject, v, layer), box, shown)


def _about(subject: _Subject, v: int, layer: LayerPlan) -> str:
    """Return all of what is said of a layer, its whole name first."""
    plan = subject.plan
    count = len(subject.graph.members[v])
    cost = layer.layer_cost + sum(transfer.cost for transfer in layer.transfers)
    lines = [
        layer.name,
        f"{layer.kind}: {' '.join(f'{dim}={extent}' for dim, extent in layer.dims.items())}",
        configuration_text(layer.splits, plan.num_devices),
        f"cost {quantity(cost, plan.cost_unit)}, {quantity(layer.memory_bytes, 'B')} on each device",
    ]
    if count > 1:
        lines.append(f"and {count - 1} more like it, to {plan.layers[subject.graph.members[v][-1]].name}")
    return "\n".join(lines)
