"""The dims of a Transformer that experts split, found from its attentions outwards."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod

from pase.analysis.baselines.same_dims import DimClass, same_dims
from pase.analysis.baselines.structure import ATTENTION, EMBEDDING, dense_product, leads_to
from pase.graph import Graph, Operator

_VOCABULARY_SHARE = 0.5
"""A table with more rows than this share of the largest one's is a vocabulary, not one of positions or segments."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformerDims:
    """Classes of dims that are the same, and of which kind they are. classes: that of each (layer, dim)."""

    classes: dict[tuple[str, str], DimClass]
    batch: frozenset[DimClass]
    heads: frozenset[DimClass]
    hidden: frozenset[DimClass]
    vocabulary: frozenset[DimClass]


def transformer_dims(graph: Graph) -> TransformerDims | None:
    """Return the batch, the heads, the hidden units of feed-forward pairs and the vocabularies; None without attention.

    Heads: the dim of that meaning of every attention. Hidden: what one dense layer makes and another sums over, with
    nothing between them that must see all of it. Vocabulary: the rows of embedding tables, and what the last dense
    layers make where that is more than they sum over. The model's width, which the projections of attentions read and
    write, is none of them.
    """
    classes = same_dims(graph)
    attentions = [operator.name for operator in graph.operators if operator.kind == ATTENTION]
    if not attentions:
        return None
    batch = frozenset(classes[name, dim] for name in attentions for dim in graph.batch[name].dims)
    heads = frozenset(classes[name, _first(graph[name], "h")] for name in attentions)
    made, summed, width = set[DimClass](), set[DimClass](), set[DimClass]()
    inner = leads_to(graph, lambda operator: operator.kind == ATTENTION or dense_product(operator) is not None)
    last = set[DimClass]()
    for operator in graph.operators:
        product = dense_product(operator)
        if product is None:
            continue
        out = {classes[operator.name, dim] for dim in product.out}
        reduced = {classes[operator.name, dim] for dim in product.reduce}
        made |= out
        summed |= reduced
        width |= reduced if out & heads else out if reduced & heads else set()
        if operator.name not in inner and _num_points(operator, product.out) > _num_points(operator, product.reduce):
            last |= out
    attended = {classes[name, dim] for name in attentions for dim in graph[name].extents}
    vocabulary = last | {classes[dim] for dim in _large_tables(graph)}
    whole = {classes[dim] for dim in _seen_whole(graph)}
    return TransformerDims(
        classes=classes,
        batch=batch,
        heads=heads,
        hidden=frozenset(made & summed - whole - width - attended - vocabulary),
        vocabulary=frozenset(vocabulary - width - attended),
    )


def _first(operator: Operator, letter: str) -> str:
    """Return an attention's dim of a meaning; where heads share keys, h1 are the groups of heads that do, h2 these."""
    return next(dim for dim in operator.extents if dim.rstrip("0123456789") == letter)


def _num_points(operator: Operator, dims: Iterable[str]) -> int:
    return prod(operator.extents[dim] for dim in dims)


def _large_tables(graph: Graph) -> Iterable[tuple[str, str]]:
    """Return the rows of the embedding tables that are vocabularies, as (layer, dim)."""
    rows = {op.name: op.extents["v"] for op in graph.operators if op.kind == EMBEDDING and op.parameters}
    return [(name, "v") for name, extent in rows.items() if extent > _VOCABULARY_SHARE * max(rows.values())]


def _seen_whole(graph: Graph) -> Iterator[tuple[str, str]]:
    """Yield the dims over which a layer reduces something inside itself, as normalisations do."""
    for operator in graph.operators:
        for exchange in operator.exchanges:
            for dim in getattr(exchange, "over", ()):
                yield operator.name, dim
