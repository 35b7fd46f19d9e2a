"""What every drawing of a plan shows: its graph, folded, the bytes of its edges, and colours for what is split.

Colours are ones that people with any colour vision tell apart, each with a label. The light ones are Paul Tol's
qualitative "light" scheme (SRON/EPS/TN/09-002), made for dark text on them; the dark ones have the same hues, for light
text.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from typing import Protocol

from pase.analysis.explanation.why_not import configuration_text
from pase.common.quantities import quantity
from pase.graph.names import short
from pase.planning.plan import Plan
from pase.views.drawing.folding import FoldedEdge, FoldedGraph, Repeat, fold, folded


class SplitLayer(Protocol):
    """A layer of a plan, as far as colours need it; splits: the factor of each iteration dim."""

    @property
    def splits(self) -> Mapping[str, int]: ...


PALETTE = (
    ("#77aadd", "#2c63d3"),
    ("#ee8866", "#7b2e06"),
    ("#eedd88", "#76720d"),
    ("#44bb99", "#237153"),
    ("#ffaabb", "#b0063f"),
    ("#bbcc33", "#353c20"),
    ("#99ddff", "#274968"),
)
"""Fill in light and in dark surroundings."""

UNSPLIT = ("#eceff1", "#626a77")
"""Of layers that are not split."""

FILLS = tuple(colour for pair in (*PALETTE, UNSPLIT) for colour in pair)
"""All of these."""

PATTERNS = ("plain", "stripes", "dots", "grid", "waves")
"""What is drawn over a colour that stands for a second, third, … class."""

NOT_SPLIT = "not split"


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitClass:
    """Layers in which the same dims are split; light, dark: fill as #rrggbb."""

    dims: tuple[str, ...]
    label: str
    num_layers: int
    light: str
    dark: str
    pattern: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitClasses:
    """Classes in order of how many layers they have, and [V] the class of each layer."""

    classes: tuple[SplitClass, ...]
    of_layer: tuple[int, ...]


def split_classes(layers: Sequence[SplitLayer]) -> SplitClasses:
    """Return the layers' classes by the names of the dims that are split.

    The class without any is grey. With more classes than colours, colours come again under another pattern.
    """
    dims = [tuple(sorted(name for name, factor in layer.splits.items() if factor > 1)) for layer in layers]
    counts = Counter(dims)
    found = sorted(counts, key=lambda of: (-counts[of], of))
    looks = iter(range(len(found)))
    classes = []
    for of in found:
        number = next(looks) if of else None
        light, dark = UNSPLIT if number is None else PALETTE[number % len(PALETTE)]
        pattern = 0 if number is None else min(number // len(PALETTE), len(PATTERNS) - 1)
        classes.append(
            SplitClass(
                dims=of,
                label=" ".join(of) or NOT_SPLIT,
                num_layers=counts[of],
                light=light,
                dark=dark,
                pattern=PATTERNS[pattern],
            )
        )
    return SplitClasses(classes=tuple(classes), of_layer=tuple(found.index(of) for of in dims))


def folded_plan(plan: Plan, *, is_folded: bool = True) -> tuple[FoldedGraph, tuple[Repeat, ...]]:
    """Return a plan's graph, vertices by the number of their layer, and its repeats; is_folded: whether it has any."""
    edges = [(plan.graph.index[edge.producer], plan.graph.index[edge.consumer]) for edge in plan.graph.edges]
    alike = [(layer.kind, tuple(layer.dims.items()), tuple(layer.splits.items())) for layer in plan.layers]
    repeats = fold(alike, edges) if is_folded else ()
    return folded(len(plan.layers), edges, repeats), repeats


def edge_bytes(plan: Plan) -> tuple[float, ...]:
    """Return the bytes that move over each edge of a plan's graph, forward and backward, as the plan predicts them."""
    by_read = {
        (layer.name, transfer.input): transfer.forward_bytes + transfer.backward_bytes
        for layer in plan.layers
        for transfer in layer.transfers
    }
    return tuple(by_read.get((edge.consumer, edge.input), 0.0) for edge in plan.graph.edges)


def certificate_text(plan: Plan) -> str:
    """Return in words how far a plan may be from the optimum."""
    return "proven optimal" if plan.exact else f"at most {plan.gap:.2%} above the optimum"


_WIDEST = 6.0
"""Width of the edge over which most bytes move, where 1 is that of an edge over which none do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnVertex:
    """A layer, or those at the same place of blocks that repeat.

    number: of the layer that stands for all. lines: of text, as `short` shows it. about: more, on one line.
    """

    number: int
    lines: tuple[str, ...]
    about: str
    split_class: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnEdge:
    """An edge, or those at the same place of blocks that repeat.

    label: the bytes that move over all of them, "" where none do. width: at least 1. is_back: to a later block.
    """

    source: int
    target: int
    label: str
    width: float
    is_back: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnBlock:
    """A block that is drawn once for all: the numbers of its vertices, and how often it is there."""

    vertices: tuple[int, ...]
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnPlan:
    """Everything that a drawing of a plan holds; title: lines of text."""

    title: tuple[str, ...]
    vertices: tuple[DrawnVertex, ...]
    edges: tuple[DrawnEdge, ...]
    blocks: tuple[DrawnBlock, ...]
    classes: tuple[SplitClass, ...]


def drawn_plan(plan: Plan, *, is_folded: bool) -> DrawnPlan:
    """Return what is drawn of a plan; is_folded: blocks of layers that are alike, and split alike, are drawn once."""
    shown, repeats = folded_plan(plan, is_folded=is_folded)
    colours = split_classes(plan.layers)
    moved = edge_bytes(plan)
    most = max(moved, default=0.0)
    return DrawnPlan(
        title=_title(plan),
        vertices=tuple(_vertex(plan, v, colours.of_layer[v]) for v in shown.vertices),
        edges=tuple(_edge(edge, moved, most) for edge in shown.edges),
        blocks=tuple(
            DrawnBlock(vertices=tuple(range(repeat.first, repeat.first + repeat.period)), count=repeat.count)
            for repeat in repeats
        ),
        classes=colours.classes,
    )


def _title(plan: Plan) -> tuple[str, ...]:
    return (
        f"{short(plan.graph.name)} on {plan.num_devices} × {short(plan.machine.device.name)}",
        f"total cost {quantity(plan.total_cost, plan.cost_unit)}, {certificate_text(plan)}",
    )


def _vertex(plan: Plan, number: int, split_class: int) -> DrawnVertex:
    layer = plan.layers[number]
    configuration = configuration_text(layer.splits, plan.num_devices)
    cost = layer.layer_cost + sum(transfer.cost for transfer in layer.transfers)
    about = (short(layer.kind), quantity(cost, plan.cost_unit), f"{quantity(layer.memory_bytes, 'B')} on each device")
    return DrawnVertex(
        number=number,
        lines=(short(layer.name), short(configuration)),
        about=", ".join(about),
        split_class=split_class,
    )


def _edge(edge: FoldedEdge, moved: Sequence[float], most: float) -> DrawnEdge:
    total = sum(moved[number] for number in edge.edges)
    largest = max(moved[number] for number in edge.edges)
    times = f" in {len(edge.edges)}" if len(edge.edges) > 1 else ""
    return DrawnEdge(
        source=edge.source,
        target=edge.target,
        label=f"{quantity(total, 'B')}{times}" if total else "",
        # By the root, so that of bytes that differ a hundredfold the fewer are seen, too.
        width=1 + (_WIDEST - 1) * sqrt(largest / most) if most else 1.0,
        is_back=edge.is_loop_back,
    )
