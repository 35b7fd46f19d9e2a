"""What every drawing of a plan begins with: its graph, folded, the bytes of its edges, its certificate in words."""

from pase.planning.plan import Plan
from pase.views.drawing.folded import FoldedGraph, folded
from pase.views.drawing.folding import Repeat, fold


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
