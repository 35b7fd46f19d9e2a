"""`folded_plan`: the graph of a plan in which blocks of layers that are alike, and split alike, are one."""

from pase.drawing.folded import FoldedGraph, folded
from pase.drawing.folding import Repeat, fold
from pase.plan import Plan


def folded_plan(plan: Plan, *, is_folded: bool = True) -> tuple[FoldedGraph, tuple[Repeat, ...]]:
    """Return a plan's graph, vertices by the number of their layer, and its repeats; is_folded: whether it has any."""
    edges = [(plan.graph.index[edge.producer], plan.graph.index[edge.consumer]) for edge in plan.graph.edges]
    alike = [(layer.kind, tuple(layer.dims.items()), tuple(layer.splits.items())) for layer in plan.layers]
    repeats = fold(alike, edges) if is_folded else ()
    return folded(len(plan.layers), edges, repeats), repeats
