"""Common parts of all drawings of a plan: its folded graph, the bytes of its edges, and colours for splits.

Colours are distinguishable with any colour vision, and each has a label. The light ones are Paul Tol's qualitative
"light" scheme (SRON/EPS/TN/09-002), made for dark text on them; the dark ones have the same hues, for light text.
"""

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from math import sqrt

from pase.analysis.figures import CostFigures, StepBytes, cost_figures, step_bytes_of
from pase.common.words import quantity, short
from pase.graph import Graph
from pase.planning.plan import LayerPlan, Plan, configuration_text
from pase.views.drawing.folding import FoldedEdge, FoldedGraph, Repeat, fold, folded

PALETTE = (
    ("#77aadd", "#2c63d3"),
    ("#ee8866", "#7b2e06"),
    ("#eedd88", "#76720d"),
    ("#44bb99", "#237153"),
    ("#ffaabb", "#b0063f"),
    ("#bbcc33", "#353c20"),
    ("#99ddff", "#274968"),
)
"""Fill in light and in dark mode."""

UNSPLIT = ("#eceff1", "#626a77")
"""Fill of layers that are not split, in light and in dark mode."""

FILLS = tuple(colour for pair in (*PALETTE, UNSPLIT) for colour in pair)
"""All fills."""

PATTERNS = ("plain", "stripes", "dots", "grid", "waves")
"""Patterns drawn over a colour that is used for a second, third, … class."""

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
    """Classes in descending order of their number of layers, and [V] the class of each layer."""

    classes: tuple[SplitClass, ...]
    of_layer: tuple[int, ...]


def split_classes(layers: Sequence[LayerPlan]) -> SplitClasses:
    """Return the layers' classes by the names of the dims that are split.

    The class without splits is grey. If there are more classes than colours, colours are reused with another pattern.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnPlan:
    """The contents of a plan's drawing.

    Attributes:
        plan: The plan.
        graph: Its layers, by number, with each repeated block merged.
        repeats: The repeated blocks.
        classes: Its layers by what is split.
        costs: Costs of its layers.
        transferred: Bytes transferred in a step.
    """

    plan: Plan
    graph: FoldedGraph
    repeats: tuple[Repeat, ...]
    classes: SplitClasses
    costs: CostFigures
    transferred: StepBytes

    @property
    def most_bytes(self) -> int:
        """Bytes of the edge that transfers most, forward and backward."""
        return max(map(sum, self.transferred.edges), default=0)

    def total_bytes(self, edge: FoldedEdge) -> int:
        """Return the total bytes of all the edges that one represents."""
        return sum(sum(self.transferred.edges[number]) for number in edge.edges)

    def edge_bytes(self, edge: FoldedEdge) -> int:
        """Return the largest bytes of the edges that one represents."""
        return max(sum(self.transferred.edges[number]) for number in edge.edges)

    def layer_text(self, number: int) -> tuple[str, str]:
        """Return the cost of a layer and its transfers, and its memory, as text."""
        figures, unit = self.costs.layers[number], self.plan.cost_unit
        cost = quantity(figures.paid, unit)
        if figures.overlapped:
            cost += f" ({quantity(figures.overlapped, unit)} more overlaps with compute)"
        return cost, f"{quantity(self.plan.layers[number].memory_bytes, 'B')} on each device"


def repeated_blocks(graph: Graph, signatures: Sequence[Hashable]) -> tuple[Repeat, ...]:
    """Return the consecutive repeated blocks of a graph's layers; signatures: [V] values that must be equal."""
    return fold(signatures, _numbered_edges(graph))


def _numbered_edges(graph: Graph) -> list[tuple[int, int]]:
    return [(graph.index[edge.producer], graph.index[edge.consumer]) for edge in graph.edges]


def drawn_plan(
    plan: Plan, *, is_folded: bool = True, costs: CostFigures | None = None, transferred: StepBytes | None = None
) -> DrawnPlan:
    """Return the contents of a plan's drawing.

    Args:
        plan: The plan.
        is_folded: Whether repeated blocks with equal layers, splits and modes are drawn once.
        costs: Costs of its layers, if known already.
        transferred: Bytes of a step, likewise.
    """
    layer_keys = [
        (layer.kind, tuple(layer.dims.items()), tuple(layer.splits.items()), plan.modes_of(layer))
        for layer in plan.layers
    ]
    repeats = repeated_blocks(plan.graph, layer_keys) if is_folded else ()
    return DrawnPlan(
        plan=plan,
        graph=folded(len(plan.layers), _numbered_edges(plan.graph), repeats),
        repeats=repeats,
        classes=split_classes(plan.layers),
        costs=costs or cost_figures(plan),
        transferred=transferred or step_bytes_of(plan),
    )


def extents_text(dims: Mapping[str, int]) -> str:
    """Return the extents of dims: "b=64 n=10"."""
    return " ".join(f"{dim}={extent}" for dim, extent in dims.items())


def split_text(plan: Plan, layer: LayerPlan) -> str:
    """Return a layer's split and modes as text: "b=8  stage 1  zero2"."""
    return "  ".join([configuration_text(layer.splits, len(layer.devices)), *plan.modes_of(layer)])


# -- common parts of DOT and Mermaid, in which drawings are text

_WIDEST = 6.0
"""Width of the edge with the most bytes, where 1 is that of an edge without transfers."""


def title_lines(drawn: DrawnPlan) -> tuple[str, ...]:
    """Return the lines above a drawing."""
    plan = drawn.plan
    return (
        f"{short(plan.graph.name)} on {plan.num_devices} × {short(plan.machine.device.name)}",
        f"total cost {quantity(plan.total_cost, plan.cost_unit)}, {plan.certificate}",
        f"edges: bytes of a step, {drawn.transferred.what}",
    )


def vertex_lines(drawn: DrawnPlan, number: int) -> tuple[str, str]:
    """Return the lines in a layer's box: its name and its configuration."""
    layer = drawn.plan.layers[number]
    return short(layer.name), short(configuration_text(layer.splits, len(layer.devices)))


def edge_label(drawn: DrawnPlan, edge: FoldedEdge) -> str:
    """Return the bytes transferred along all edges that one represents, as text; "" for none."""
    total = drawn.total_bytes(edge)
    times = f" in {len(edge.edges)}" if len(edge.edges) > 1 else ""
    return f"{quantity(total, 'B')}{times}" if total else ""


def edge_width(drawn: DrawnPlan, edge: FoldedEdge) -> float:
    """Return the width of an edge, at least 1, by the square root of its bytes, so that small transfers are visible."""
    most = drawn.most_bytes
    return 1 + (_WIDEST - 1) * sqrt(drawn.edge_bytes(edge) / most) if most else 1.0
