"""A plan as it is drawn: vertices, edges with their bytes, blocks that repeat. What DOT and Mermaid have in common."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt

from pase.analysis.explanation.reasons import configuration_text
from pase.common.quantities import quantity
from pase.graph.names import short
from pase.planning.plan import Plan
from pase.views.drawing import SplitClass, certificate_text, edge_bytes, folded_plan, split_classes
from pase.views.drawing.folded import FoldedEdge

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
