"""Which extents of a model are worth padding: a split must divide its dim, and 50,257 words divide by nothing."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import gcd, prod

from pase.costs.configurations import divisors
from pase.errors import PaseError
from pase.graph import Access, Axis, Dim, Graph, Operator, Part, Relayout, Window
from pase.planning.plan import Plan
from pase.planning.planner import SearchOptions, search

MOST_PADDING = 0.05
"""An extent is made larger by this share of it at most."""

LEAST_GAIN = 0.01
"""What saves a smaller share of the cost is not worth telling."""

_MOST_TRIED = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Padding:
    """An extent that the model would better round up.

    extent, padded: before and after. dims: (layer, dim) of every dim that has it. ways: into how many parts it can be
    cut then, most. total_cost: of the cheapest strategy with it, in the unit of the plan.
    """

    extent: int
    padded: int
    dims: tuple[tuple[str, str], ...]
    ways: int
    total_cost: float


def worthwhile_padding(plan: Plan, graph: Graph, *, time_limit_s: float) -> tuple[Padding, ...]:
    """Return the extents whose padding makes the cheapest strategy cheaper, the one that saves most first.

    Extents of windows, of pieces and of the batch are left alone: they are no choice of the model's. Every one that is
    left is tried by a search of the padded network under the plan's cost model.

    Args:
        plan: of the graph; its cost is what padding has to beat.
        graph: the model's.
        time_limit_s: for all searches together.
    """
    options = SearchOptions(cost_model=plan.cost_model, optimiser=plan.optimiser, keep_batch=True)
    found = []
    for extent, ways in list(_candidates(graph, plan.num_devices))[:_MOST_TRIED]:
        padded = -(-extent // ways) * ways
        share = replace(options, time_limit_s=time_limit_s / _MOST_TRIED)
        try:
            other = search(_padded(graph, extent, padded), plan.num_devices, machine=plan.machine, options=share)
        except PaseError:
            # What is computed from the extent (a product that a reshape sees through) no longer fits: not ours to pad.
            continue
        if other.total_cost < (1 - LEAST_GAIN) * plan.total_cost:
            dims = tuple((op.name, dim.name) for op in graph.operators for dim in op.dims if dim.extent == extent)
            found.append(Padding(extent=extent, padded=padded, dims=dims, ways=ways, total_cost=other.total_cost))
    return tuple(sorted(found, key=lambda padding: padding.total_cost))


def _candidates(graph: Graph, num_devices: int) -> Iterator[tuple[int, int]]:
    """Yield (extent, into how many parts it can be cut once padded), the largest extents first."""
    fixed = {operator.extents[name] for operator in graph.operators for name in _fixed_dims(operator)}
    free = {
        dim.extent
        for op in graph.operators
        for dim in op.dims
        if dim.name not in op.unsplittable and dim.name not in graph.batch[op.name].dims
    }
    for extent in sorted(free - fixed, reverse=True):
        ways = max(f for f in divisors(num_devices) if -(-extent // f) * f <= extent * (1 + MOST_PADDING))
        if ways > gcd(extent, num_devices):
            yield extent, ways


def _fixed_dims(operator: Operator) -> Iterator[str]:
    for access in (*operator.reads, *operator.writes):
        for axis in access.axes:
            if isinstance(axis, Window):
                yield from (axis.out, axis.kernel)
            elif isinstance(axis, Part):
                yield axis.dim


def _padded(graph: Graph, extent: int, padded: int) -> Graph:
    """Return a graph with one extent in place of another, wherever a dim has it."""
    return replace(graph, operators=tuple(_padded_operator(operator, extent, padded) for operator in graph.operators))


def _padded_operator(operator: Operator, extent: int, padded: int) -> Operator:
    if extent not in operator.extents.values():
        return operator
    extents = {name: padded if size == extent else size for name, size in operator.extents.items()}

    def shape(before: tuple[int, ...], axes: tuple[Axis, ...]) -> tuple[int, ...]:
        return tuple(_length(size, axis, extents) for size, axis in zip(before, axes, strict=True))

    def access(before: Access) -> Access:
        return replace(before, shape=shape(before.shape, before.axes))

    return replace(
        operator,
        dims=tuple(Dim(name, size) for name, size in extents.items()),
        reads=tuple(map(access, operator.reads)),
        writes=tuple(map(access, operator.writes)),
        exchanges=tuple(
            replace(x, shape=shape(x.shape, x.written if isinstance(x, Relayout) else x.axes))
            for x in operator.exchanges
        ),
        intermediates=tuple(replace(x, shape=shape(x.shape, x.axes)) for x in operator.intermediates),
    )


def _length(size: int, axis: Axis, extents: Mapping[str, int]) -> int:
    match axis:
        case str():
            return extents[axis]
        case tuple():
            return prod(extents[name] for name in axis)
        case _:
            return size
