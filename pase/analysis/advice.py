"""What a model could change so that its plans cost less: extents to pad, operators of which nothing is known."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import gcd, prod

import numpy as np

from pase.costs import Problem
from pase.errors import PaseError
from pase.graph import Access, Dim, DimIndex, Graph, Operator, Role, SliceOf, Window
from pase.planning.plan import Plan
from pase.planning.planner import SearchOptions, search
from pase.planning.problems import problem_of_plan
from pase.sharding.shards import divisors
from pase.solver import solve
from pase.tables.cost_tables import CostTables, EdgeTable, FloatArray, Hiding

MOST_PADDING = 0.05
"""An extent is made larger by this share of it at most."""

LEAST_GAIN = 0.01
"""A change that saves a smaller share of the cost is not worth telling."""

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
            operators = tuple(_padded_operator(operator, extent, padded) for operator in graph.operators)
            rounded = replace(graph, operators=operators)
            other = search(rounded, plan.num_devices, machine=plan.machine, options=share)
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
        for axis in access.index_map:
            if isinstance(axis, Window):
                yield from (axis.out, axis.kernel)
            elif isinstance(axis, SliceOf):
                yield axis.dim


def _padded_operator(operator: Operator, extent: int, padded: int) -> Operator:
    if extent not in operator.extents.values():
        return operator
    extents = {name: padded if size == extent else size for name, size in operator.extents.items()}

    def shape(before: tuple[int, ...], axes: tuple[DimIndex, ...]) -> tuple[int, ...]:
        return tuple(_length(size, axis, extents) for size, axis in zip(before, axes, strict=True))

    def access(before: Access) -> Access:
        return replace(before, shape=shape(before.shape, before.index_map))

    return replace(
        operator,
        dims=tuple(Dim(name, size) for name, size in extents.items()),
        reads=tuple(map(access, operator.reads)),
        writes=tuple(map(access, operator.writes)),
        exchanges=tuple(replace(x, shape=shape(x.shape, x.index_map)) for x in operator.exchanges),
        intermediates=tuple(replace(x, shape=shape(x.shape, x.index_map)) for x in operator.intermediates),
    )


def _length(size: int, axis: DimIndex, extents: Mapping[str, int]) -> int:
    match axis:
        case str():
            return extents[axis]
        case tuple():
            return prod(extents[name] for name in axis)
        case _:
            return size


OPAQUE = "opaque"
"""The kind of such a layer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """Layers that make a plan dearer because nothing more is known of them.

    layers: (layer, its function) of those whose dims cannot all be split. lower_bound: what the cheapest strategy would
    cost at least, in the unit of the plan, if each of them could be split into as many parts as there are devices in
    any way, and read and wrote its tensors as they lie.
    """

    layers: tuple[tuple[str, str], ...]
    lower_bound: float


def held_by_opaque_layers(plan: Plan, *, time_limit_s: float | None = None) -> Held | None:
    """Return the layers of which nothing is known, and what is cheaper without that; None where that is too little.

    Args:
        plan: of a graph; its cost is what counts.
        time_limit_s: for the second search.
    """
    graph = plan.graph
    held = [operator for operator in graph.operators if operator.kind == OPAQUE and _keeps_whole(operator)]
    if not held or plan.num_devices == 1 or plan.constraints:
        return None
    problem = problem_of_plan(plan)
    tables = _freed(problem, frozenset(graph.index[operator.name] for operator in held))
    solution = solve(tables, time_limit_s=time_limit_s)
    bound = solution.cost if solution.exact else solution.lower_bound
    if bound >= (1 - LEAST_GAIN) * plan.total_cost:
        return None
    return Held(layers=tuple((op.name, op.attribute("function", "")) for op in held), lower_bound=bound)


def _keeps_whole(operator: Operator) -> bool:
    """Return whether a layer has a dim that it cannot split, or reads one whole."""
    is_held = any(operator.extents[dim] > 1 for dim in operator.unsplittable)
    reads = (zip(read.index_map, read.shape, strict=True) for read in operator.reads if read.role is not Role.PARAMETER)
    return is_held or any(axis is None and extent > 1 for axes in reads for axis, extent in axes)


def _freed(problem: Problem, freed: frozenset[int]) -> CostTables:
    """Return the tables with one configuration of some layers: its share of their work, and no transfers."""
    tables, count = problem.tables, len(problem.tables.vertex_costs)
    hiding = tables.hiding
    shares: dict[int, FloatArray] = {}
    hideable, cover = [], []
    for v in sorted(freed):
        whole = problem.choice(v, (1,) * len(problem.graph.operators[v].dims))
        assert whole is not None, "a layer may always be left whole"
        shares[v] = tables.layer_costs(v)[[whole]] / problem.num_devices
        if hiding is not None:
            hideable.append(hiding.hideable[tables.vertex_table[v]][[whole]] / problem.num_devices)
            cover.append(hiding.cover[tables.vertex_table[v]][[whole]] / problem.num_devices)
    number = {v: count + i for i, v in enumerate(shares)}
    edge_tables, edge_table = list(tables.edge_tables), list(tables.edge_table)
    for i, (u, v) in enumerate(tables.edges):
        if u in freed or v in freed:
            sizes = (1 if end in freed else tables.domain_sizes[end] for end in (u, v))
            rows, cols = (np.zeros(size, dtype=np.int32) for size in sizes)
            edge_table[i] = len(edge_tables)
            edge_tables.append(EdgeTable(row_class=rows, col_class=cols, values=np.zeros((1, 1))))
    return replace(
        tables,
        vertex_costs=(*tables.vertex_costs, *shares.values()),
        vertex_table=tuple(number.get(v, table) for v, table in enumerate(tables.vertex_table)),
        edge_tables=tuple(edge_tables),
        edge_table=tuple(edge_table),
        hiding=hiding
        and Hiding(
            hideable=(*hiding.hideable, *hideable),
            cover=(*hiding.cover, *cover),
            edges=(*hiding.edges, *(None,) * (len(edge_tables) - len(tables.edge_tables))),
        ),
    )
