"""What experts' rules are made of: the dims that they speak of, and splits of these.

Layers and dims are recognised by what layers do, not by their names. Dims of different layers are the same where both
index one dim of a tensor that flows between the layers. The heads of an attention, for instance, are a produced dim of
the three projections before it and a reduced dim of the one behind it. What Mesh-TensorFlow's layouts and Megatron's
rule name once is found here in any network.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from pase.common.containers import connected
from pase.costs import Problem
from pase.graph import Access, Graph, Operator, Role, Window
from pase.graph.operator import access_dims, split_dim
from pase.machine import Machine
from pase.sharding.boxes import aligned_dims
from pase.sharding.edges import shared_weights
from pase.sharding.shards import Component, components, divisors

DimClass = int
"""A set of dims that are the same, by number."""


def same_dims(graph: Graph) -> dict[tuple[str, str], DimClass]:
    """Return the class of every dim, by (layer, dim).

    Where a view takes a dim apart (a width into heads and channels), its first factor is the same as the whole: a split
    of either into as many parts gives the same parts. A split of a concatenation counts as one of its pieces.
    """
    dims = [(operator.name, dim) for operator in graph.operators for dim in operator.extents]
    numbers = {dim: number for number, group in enumerate(connected(dims, _pairs(graph))) for dim in group}
    return {dim: numbers[dim] for dim in dims}


def _pairs(graph: Graph) -> Iterator[tuple[tuple[str, str], tuple[str, str]]]:
    for edge in graph.edges:
        u, v = graph[edge.producer], graph[edge.consumer]
        written, read = _components(u, u.writes[edge.output]), _components(v, v.reads[edge.input])
        # Dims that begin at the same place of the tensor, row-major, taken apart by its producer and consumer.
        for (i, _), (j, _) in aligned_dims([part.length for part in written], [part.length for part in read]):
            one, other = split_dim(written[i].axis), split_dim(read[j].axis)
            if one and other:
                yield (u.name, one), (v.name, other)
    for weight in shared_weights(graph):
        owned, used = graph[weight.producer].reads[weight.output], graph[weight.consumer].reads[weight.input]
        # The one may read it transposed, dims named alike.
        axes = owned.index_map if set(owned.index_map) == set(used.index_map) else used.index_map
        for mine, theirs in zip(owned.index_map, axes, strict=False):
            if isinstance(mine, str) and isinstance(theirs, str):
                yield (weight.producer, mine), (weight.consumer, theirs)


def _components(operator: Operator, access: Access) -> list[Component]:
    return [part for part in components(access, operator.extents) if part.length > 1]


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
    return any(isinstance(axis, Window) for access in accesses for axis in access.index_map) and any(
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


_VOCABULARY_SHARE = 0.5
"""A table with more rows than this share of the largest one's is a vocabulary, not one of positions or segments."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformerDims:
    """Classes of dims that are the same, and of which kind they are. classes: that of each (layer, dim)."""

    classes: dict[tuple[str, str], DimClass]
    batch: frozenset[DimClass]
    sequence: frozenset[DimClass]
    heads: frozenset[DimClass]
    hidden: frozenset[DimClass]
    vocabulary: frozenset[DimClass]


def transformer_dims(graph: Graph) -> TransformerDims | None:
    """Return batch, sequence, heads, hidden units of feed-forward pairs and vocabularies; None without attention.

    Sequence, heads: the dims of that meaning of every attention. Hidden: what one dense layer makes and another sums
    over, with nothing between them that must see all of it. Vocabulary: the rows of embedding tables, and what the last
    dense layers make where that is more than they sum over. The model's width, which the projections of attentions read
    and write, is none of them.
    """
    classes = same_dims(graph)
    attentions = [operator.name for operator in graph.operators if operator.kind == ATTENTION]
    if not attentions:
        return None
    batch = frozenset(classes[name, dim] for name in attentions for dim in graph.batch[name].dims)
    sequence, heads = (frozenset(classes[name, _first(graph[name], dim)] for name in attentions) for dim in "sh")
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
    rows = {op.name: op.extents["v"] for op in graph.operators if op.kind == EMBEDDING and op.parameters}
    large = [name for name, extent in rows.items() if extent > _VOCABULARY_SHARE * max(rows.values())]
    vocabulary = last | {classes[name, "v"] for name in large}
    # The dims over which a layer reduces something inside itself, as normalisations do.
    whole = {
        classes[operator.name, dim]
        for operator in graph.operators
        for exchange in operator.exchanges
        for dim in getattr(exchange, "over", ())
    }
    return TransformerDims(
        classes=classes,
        batch=batch,
        sequence=sequence,
        heads=heads,
        hidden=frozenset(made & summed - whole - width - attended - vocabulary),
        vocabulary=frozenset(vocabulary - width - attended),
    )


def _first(operator: Operator, letter: str) -> str:
    """Return an attention's dim of a meaning; where heads share keys, h1 are the groups of heads that do, h2 these."""
    return next(dim for dim in operator.extents if dim.rstrip("0123456789") == letter)


def _num_points(operator: Operator, dims: Iterable[str]) -> int:
    return prod(operator.extents[dim] for dim in dims)


Choose = Callable[[Problem, Machine], tuple[int, ...] | None]
"""Returns the configuration index of each vertex; None where the strategy does not apply to the network."""

Splits = Mapping[str, int]
"""The split factor of each dim of a layer that is split."""


def largest_split(operator: Operator, dim: str, ways: int) -> int:
    """Return the largest divisor of `ways` that a dim can be split by: parts are of one size."""
    if dim in operator.unsplittable:
        return 1
    return max(f for f in divisors(ways) if operator.extents[dim] % f == 0)


def split_in_turn(operator: Operator, dims: Iterable[str], ways: int) -> dict[str, int]:
    """Return the splits of some dims, the first ones first, by the largest divisors of what is left of `ways`."""
    splits = {}
    for dim in dims:
        splits[dim] = largest_split(operator, dim, ways)
        ways //= splits[dim]
    return splits


def largest_splits(
    operator: Operator, classes: Mapping[tuple[str, str], DimClass], rule: Sequence[tuple[frozenset[DimClass], int]]
) -> dict[str, int]:
    """Return the splits of a layer by a rule: (dims, ways) for each axis of a mesh of devices.

    An axis splits one dim of a layer: of several that the rule allows, the one that takes the most of its ways, the
    first of equals.
    """
    splits: dict[str, int] = {}
    for split_classes, ways in rule:
        dims = [dim for dim in operator.extents if classes[operator.name, dim] in split_classes and dim not in splits]
        if dims:
            dim = max(dims, key=lambda name: largest_split(operator, name, ways))
            splits[dim] = largest_split(operator, dim, ways)
    return splits


def choice_of(problem: Problem, splits: Sequence[Splits]) -> tuple[int, ...]:
    """Return the configuration indices of a strategy; splits: for each layer, its factors beyond 1.

    Fan-outs, of which no expert speaks, follow their neighbours.
    """
    choice = []
    for vertex, (operator, split) in enumerate(zip(problem.graph.operators, splits, strict=True)):
        index = problem.choice(vertex, tuple(split.get(dim, 1) for dim in operator.extents))
        assert index is not None, f"{dict(split)} is no configuration of {operator.name}"
        choice.append(index)
    return with_best_fan_outs(problem, choice)


def with_best_fan_outs(problem: Problem, choice: Sequence[int]) -> tuple[int, ...]:
    """Return a strategy in which each fan-out has the configuration that is cheapest between its neighbours."""
    found = list(choice)
    for vertex, operator in enumerate(problem.graph.operators):
        # No two of them are neighbours.
        if operator.is_fan_out:
            found[vertex] = int(problem.tables.costs_beside(vertex, choice).argmin())
    return tuple(found)


def cheapest(problem: Problem, choices: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """Return the cheapest of some strategies, the first of equals."""
    return min(choices, key=problem.tables.evaluate)
