"""Integrated model, batch and domain parallelism on one grid of processes, as a strategy (Gholami et al. 2018)."""

from collections.abc import Iterable, Mapping

from pase.analysis.baselines.rules import split_in_turn, with_best_fan_outs
from pase.costs import Problem
from pase.errors import IntegratedError
from pase.graph import Access, Graph, Operator, Window
from pase.graph import Role as AccessRole
from pase.graph.access import axis_dims
from pase.machine import Machine
from pase.studies.integrated.chain import CONVOLUTIONS, DENSE, Chain, chain_of
from pase.studies.integrated.equations import Grid, Network, Role, network_of
from pase.studies.integrated.study import study

BATCH = "b"

Splits = dict[str, int]


def grid_strategy(
    graph: Graph, num_devices: int, pr: int, pc: int, *, roles: Mapping[str, Role] | None = None
) -> tuple[Splits, ...]:
    """Return the split factor of every dim of every layer on a grid of pr x pc = num_devices processes.

    The batch is split pc ways; pr processes share, by a weighted layer's role, its out-channels or the first spatial
    dim of a convolution; a layer that is not in roles has its batch split num_devices ways. roles: Role.MODEL for all
    weighted layers by default. Layers without weights keep the layout that the layer before them writes. A dim whose
    extent the factor does not divide is split by the largest divisor of the factor that does. Raises IntegratedError
    where the grid has another number of processes, or the network other weighted layers than these two kinds.
    """
    if pr * pc != num_devices:
        raise IntegratedError(
            f"a grid of {pr}x{pc} has {pr * pc} processes, not {num_devices}; choose factors whose product is that"
        )
    return _strategy(graph, _chain(graph), pr, pc, roles)


def choose(problem: Problem, machine: Machine) -> tuple[int, ...] | None:
    """Return the cheapest strategy of all grids and all variants of Eqs. 8 and 9, by configuration index.

    None where a weighted layer is neither a convolution nor a dense one. The machine's α and β decide which layers
    share rows and which weights, where that is chosen layer by layer; what is cheapest is what the problem says.
    """
    try:
        chain = _chain(problem.graph)
    except IntegratedError:
        return None
    network = network_of(machine, problem.num_devices)
    found = {
        choice: problem.tables.evaluate(choice)
        for splits in _strategies(problem.graph, chain, problem.num_devices, network)
        if (choice := _indices(problem, splits)) is not None
    }
    return min(found, key=lambda choice: found[choice], default=None)


def _chain(graph: Graph) -> Chain:
    """Return the weighted layers of a network of convolutions and dense layers; IntegratedError for another."""
    chain = chain_of(graph)
    for layer in chain.layers:
        kind = graph[layer.name].kind if layer.name in graph.index else "part of a stack"
        if kind not in (DENSE, *CONVOLUTIONS):
            raise IntegratedError(
                f"layer {layer.name!r} is of kind {kind}; a grid's strategy is for convolutions and dense layers"
            )
    return chain


def _strategies(graph: Graph, chain: Chain, num_devices: int, network: Network) -> Iterable[tuple[Splits, ...]]:
    found = study(chain, num_devices, chain.batch, network)
    for candidates in found.candidates.values():
        for candidate in candidates:
            grid, own = candidate.grid, candidate.convolutions
            yield _strategy(graph, chain, grid.num_rows, grid.num_columns, candidate.roles, own)


def _indices(problem: Problem, splits: tuple[Splits, ...]) -> tuple[int, ...] | None:
    found = [problem.choice(vertex, tuple(factors.values())) for vertex, factors in enumerate(splits)]
    indices = tuple(index for index in found if index is not None)
    return with_best_fan_outs(problem, indices) if len(indices) == len(found) else None


def _strategy(
    graph: Graph,
    chain: Chain,
    pr: int,
    pc: int,
    roles: Mapping[str, Role] | None,
    convolutions: Grid | None = None,
) -> tuple[Splits, ...]:
    weighted = {layer.name: layer for layer in chain.layers}
    splits: dict[str, Splits] = {}
    for operator in graph.operators:
        if operator.name not in weighted:
            splits[operator.name] = _followed(graph, operator, splits, pc)
            continue
        role = Role.MODEL if roles is None else roles.get(operator.name)
        factors = Splits(dict.fromkeys(operator.extents, 1))
        if role is None:
            factors |= split_in_turn(operator, (BATCH,), pr * pc)
        else:
            own = convolutions if weighted[operator.name].is_convolution else None
            factors |= split_in_turn(operator, (BATCH,), own.num_columns if own else pc)
            factors |= split_in_turn(operator, _SHARED[role](operator), own.num_rows if own else pr)
        splits[operator.name] = factors
    return tuple(splits[operator.name] for operator in graph.operators)


def _out_channels(operator: Operator) -> tuple[str, ...]:
    """Return the dims of what a layer writes that index its weights, so that a part of them holds a part of these."""
    (weights, *_) = (access for access in operator.parameters if len(access.shape) > 1)
    held = _dims(weights)
    return tuple(dim for dim in _dims(operator.writes[0]) if dim in held)


def _rows(operator: Operator) -> tuple[str, ...]:
    """Return the first dim along which a convolution's windows slide."""
    windows = (axis for access in operator.reads for axis in access.index_map if isinstance(axis, Window))
    return (next(windows).out,)


_SHARED = {Role.MODEL: _out_channels, Role.DOMAIN: _rows}


def _dims(access: Access) -> list[str]:
    return [dim for axis in access.index_map for dim in axis_dims(axis)]


def _followed(graph: Graph, operator: Operator, done: Mapping[str, Splits], pc: int) -> Splits:
    """Return the layout of the first tensor that a layer reads of another one, as far as its dims are the same.

    A layer that reads data alone has its batch split, pc ways.
    """
    factors = Splits(dict.fromkeys(operator.extents, 1))
    for i, access in enumerate(operator.reads):
        edge = graph.incoming.get((operator.name, i))
        if edge is None or access.role is not AccessRole.ACTIVATION:
            continue
        written = graph[edge.producer].writes[edge.output]
        above = done[edge.producer]
        for extents, here, there in zip(
            zip(access.shape, written.shape, strict=False), access.index_map, written.index_map, strict=False
        ):
            if extents[0] != extents[1]:
                break  # a reshape: what comes after it are other dims
            ways = 1
            for dim in axis_dims(there):
                ways *= above[dim]
            factors |= split_in_turn(operator, axis_dims(here), ways)
        return factors
    factors |= split_in_turn(operator, (BATCH,) if BATCH in operator.extents else (), pc)
    return factors
