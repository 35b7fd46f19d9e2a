"""What experts' rules speak of, recognised by what layers do, not by their names."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from pase.graph import Graph, Operator, Role, Window
from pase.graph.access import access_dims

ATTENTION = "attention"
EMBEDDING = "embedding"


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """The dims of a dense layer: those of its input that stay, those that it makes, those that it sums over."""

    lead: tuple[str, ...]
    out: tuple[str, ...]
    reduce: tuple[str, ...]


def dense_product(operator: Operator) -> Product | None:
    """Return the dims of a dense layer; None for any other layer."""
    if operator.kind != "dense":
        return None
    work = next(work for work in operator.work if work.contraction)
    weights, inputs, outputs = (
        frozenset[str]().union(*map(access_dims, accesses))
        for accesses in (
            [operator.reads[i] for i in work.reads if operator.reads[i].role is Role.PARAMETER],
            [operator.reads[i] for i in work.reads if operator.reads[i].role is not Role.PARAMETER],
            operator.writes,
        )
    )
    return Product(
        lead=tuple(dim for dim in operator.extents if dim in inputs - weights),
        out=tuple(dim for dim in operator.extents if dim in weights - inputs),
        reduce=tuple(dim for dim in operator.extents if dim in (weights & inputs) - outputs),
    )


def is_convolution(operator: Operator) -> bool:
    """Return whether a layer multiplies what lies under sliding windows with trained weights."""
    accesses = (*operator.reads, *operator.writes)
    return any(isinstance(axis, Window) for access in accesses for axis in access.axes) and any(
        work.contraction and any(operator.reads[i].role is Role.PARAMETER for i in work.reads) for work in operator.work
    )


def leads_to(graph: Graph, wanted: Callable[[Operator], bool]) -> frozenset[str]:
    """Return the layers from which a path leads to a wanted layer behind them."""
    return _next_to(graph, [(edge.consumer, edge.producer) for edge in graph.edges], wanted)


def follows(graph: Graph, wanted: Callable[[Operator], bool]) -> frozenset[str]:
    """Return the layers to which a path leads from a wanted layer before them."""
    return _next_to(graph, [(edge.producer, edge.consumer) for edge in graph.edges], wanted)


def _next_to(graph: Graph, steps: Iterable[tuple[str, str]], wanted: Callable[[Operator], bool]) -> frozenset[str]:
    """Return the layers that steps lead to from wanted ones."""
    after: dict[str, list[str]] = {}
    for one, other in steps:
        after.setdefault(one, []).append(other)
    found: set[str] = set()
    frontier = [operator.name for operator in graph.operators if wanted(operator)]
    while frontier:
        new = set(after.get(frontier.pop(), ())) - found
        found |= new
        frontier.extend(new)
    return frozenset(found)
