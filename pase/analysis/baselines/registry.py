"""The strategies to compare with, by name: experts' rules that are a few lines each, and one line here for everyone.

A rule completes what people do with networks of a kind for any network of it. It looks at costs only to choose between
a few sizes of its own.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType

from pase.analysis.baselines import mcmc
from pase.analysis.baselines.mcmc import Sampling
from pase.analysis.baselines.rules import (
    ATTENTION,
    Choose,
    TransformerDims,
    cheapest,
    choice_of,
    dense_product,
    follows,
    is_convolution,
    largest_split,
    largest_splits,
    leads_to,
    same_dims,
    split_in_turn,
    transformer_dims,
    with_best_fan_outs,
)
from pase.costs import Problem
from pase.errors import ConfigurationError, IntegratedError, unknown_name
from pase.graph import Access, Graph, Operator, Window
from pase.graph import Role as AccessRole
from pase.graph.operator import axis_dims
from pase.machine import Machine
from pase.planning.problems import data_parallel_choice
from pase.sharding.shards import data_parallel, divisors
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


def integrated_grid(problem: Problem, machine: Machine) -> tuple[int, ...] | None:
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
    found = problem.strategy(splits)
    return None if found is None else with_best_fan_outs(problem, found)


def _strategy(
    graph: Graph, chain: Chain, pr: int, pc: int, roles: Mapping[str, Role] | None, convolutions: Grid | None = None
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Baseline:
    """A strategy that others use or suggest.

    source: where it is from. needs: what a network must have for it to apply. choose: finds it.
    """

    name: str
    description: str
    source: str
    needs: str
    choose: Choose


def one_weird_trick(problem: Problem, _machine: Machine) -> tuple[int, ...] | None:
    """Return one weird trick (Krizhevsky 2014): dense layers split what they make p ways, and nothing else.

    The dense part: dense layers from which no path leads to a convolution, and all layers behind them. What is no dense
    layer there is split as the dense layer is that it reads from. A dim that p does not divide is split by the largest
    divisor of p that does, and what then is left of the devices holds replicas. None for a network without
    convolutions or without such dense layers, or with attention: the rule is one for convolutional networks.
    """
    graph, p = problem.graph, problem.num_devices
    to_convolutions = leads_to(graph, is_convolution)
    products = {operator.name: dense_product(operator) for operator in graph.operators}
    dense = {name: product.out for name, product in products.items() if product and name not in to_convolutions}
    if not dense or not any(map(is_convolution, graph.operators)) or any(o.kind == ATTENTION for o in graph.operators):
        return None
    classes = same_dims(graph)
    made = frozenset(classes[name, dim] for name, dims in dense.items() for dim in dims)
    behind = follows(graph, lambda operator: operator.name in dense)

    def splits(operator: Operator) -> dict[str, int]:
        if operator.name in dense:
            return split_in_turn(operator, dense[operator.name], p)
        if operator.name in behind:
            return largest_splits(operator, classes, [(made, p)])
        return dict(zip(operator.extents, data_parallel(graph, operator, p), strict=True))

    return choice_of(problem, [splits(operator) for operator in graph.operators])


def pipelined_rnn(problem: Problem, _machine: Machine) -> tuple[int, ...] | None:
    """Return data and pipeline parallelism, as GNMT uses it (Wu et al. 2016, section 3; PaSE section IV).

    The layers of a recurrent stack lie on different devices, as far as p allows, which work as a pipeline; each of them
    is repeated on the devices that are left, which share the batch. Other layers are data parallel. None for a network
    without a stack of several recurrent layers that pipelines.
    """
    operators = problem.graph.operators
    if not any(op.pipeline and op.extents[op.pipeline.stage] > 1 for op in operators):
        return None
    return choice_of(problem, [_rnn_splits(problem.graph, operator, problem.num_devices) for operator in operators])


def _rnn_splits(graph: Graph, operator: Operator, num_devices: int) -> dict[str, int]:
    if operator.pipeline is None:
        return dict(zip(operator.extents, data_parallel(graph, operator, num_devices), strict=True))
    stages = largest_split(operator, operator.pipeline.stage, num_devices)
    rest = data_parallel(graph, operator, num_devices // stages)
    return dict(zip(operator.extents, rest, strict=True)) | {operator.pipeline.stage: stages}


def mesh_tensorflow(problem: Problem, _machine: Machine) -> tuple[int, ...] | None:
    """Return the cheapest n by m of all with n · m = p (Shazeer et al. 2018; PaSE section IV-D).

    The batch of every layer is split n ways; the model's dims, the vocabulary, the hidden units of feed-forward layers
    and the attention heads, are split m ways. None for a network without attention.
    """
    dims = transformer_dims(problem.graph)
    return None if dims is None else cheapest(problem, meshes(problem, dims, divisors(problem.num_devices)))


def meshes(problem: Problem, dims: TransformerDims, model_ways: Sequence[int]) -> list[tuple[int, ...]]:
    """Return the strategy of each number of ways to split the model, the batch split by the rest of the devices.

    A dim that a number does not divide is split by the largest of its divisors that does.
    """
    model = dims.vocabulary | dims.hidden | dims.heads
    found = []
    for m in model_ways:
        rule = [(dims.batch, problem.num_devices // m), (model, m)]
        found.append(choice_of(problem, [largest_splits(o, dims.classes, rule) for o in problem.graph.operators]))
    return found


def megatron(problem: Problem, machine: Machine) -> tuple[int, ...] | None:
    """Return the cheapest t by d of all with t · d = p that Megatron-LM allows (Shoeybi et al. 2019).

    Of each pair of products the first is split by columns, the second by rows: the projections to queries, keys and
    values by heads, the one behind the attention by the same; the first feed-forward layer by hidden units, the second
    too. The embedding and the head are split by vocabulary; normalisations and residuals are repeated on all t devices
    (Narayanan et al. 2021). t is at most the devices of a node, and divides all heads and hidden units. None for a
    network without attention.
    """
    dims = transformer_dims(problem.graph)
    if dims is None:
        return None
    node = machine.levels[0].num_devices or problem.num_devices
    split = dims.heads | dims.hidden
    extents = [problem.graph[name].extents[dim] for (name, dim), number in dims.classes.items() if number in split]
    ways = [t for t in divisors(problem.num_devices) if t <= node and all(extent % t == 0 for extent in extents)]
    return cheapest(problem, meshes(problem, dims, ways))


EXPERTS: Mapping[str, Baseline] = MappingProxyType(
    {
        expert.name: expert
        for expert in (
            Baseline(
                name="data_parallel",
                choose=lambda problem, _machine: data_parallel_choice(problem),
                source="the standard practice",
                needs="anything",
                description="the batch of every layer over all devices",
            ),
            Baseline(
                name="owt",
                choose=one_weird_trick,
                source="one weird trick, Krizhevsky 2014",
                needs="convolutions, dense layers behind them, no attention",
                description="convolutions data parallel, dense layers split by what they make",
            ),
            Baseline(
                name="rnn",
                choose=pipelined_rnn,
                source="GNMT, Wu et al. 2016",
                needs="a stack of several recurrent layers that pipelines",
                description="recurrent layers one behind the other on different devices, the batch over the rest",
            ),
            Baseline(
                name="mesh_tensorflow",
                choose=mesh_tensorflow,
                source="Shazeer et al. 2018",
                needs="attention",
                description="the cheapest mesh: batch n ways; vocabulary, hidden units and heads m ways",
            ),
            Baseline(
                name="megatron",
                choose=megatron,
                source="Shoeybi et al. 2019",
                needs="attention",
                description="pairs of products split by columns and rows within a node, the batch over the rest",
            ),
            Baseline(
                name="integrated_grid",
                choose=integrated_grid,
                source="Gholami et al. 2018",
                needs="no weights but those of convolutions and dense layers",
                description="the cheapest grid: batch pc ways; channels, or rows of images, pr ways",
            ),
        )
    }
)
"""Experts' rules, by name."""


def baselines(sampling: Sampling | None = None) -> Mapping[str, Baseline]:
    """Return every baseline by name; sampling: how the random search is done."""
    experts = tuple(expert.choose for expert in EXPERTS.values())
    random_search = Baseline(
        name="mcmc",
        choose=partial(mcmc.choose, options=sampling or Sampling(), experts=experts),
        source="FlexFlow, Jia et al. 2018",
        needs="anything",
        description="random search by Metropolis-Hastings, as in FlexFlow",
    )
    return MappingProxyType({**EXPERTS, random_search.name: random_search})


BASELINES: Mapping[str, Baseline] = baselines()


def baseline_of(name: str) -> Baseline:
    """Return the baseline of a name, or "grid 8x4", that grid of processes; ConfigurationError for another name."""
    grid = re.fullmatch(r"grid ([1-9][0-9]{0,6})x([1-9][0-9]{0,6})", name)
    if grid is None:
        return chosen([name])[0]
    pr, pc = int(grid[1]), int(grid[2])
    return Baseline(
        name=name,
        choose=lambda problem, _machine: _indices(problem, grid_strategy(problem.graph, problem.num_devices, pr, pc)),
        source="Gholami et al. 2018",
        needs="dims that it divides",
        description=f"the batch {pc} ways, the out-channels of weighted layers {pr} ways",
    )


def chosen(names: Iterable[str] = (), sampling: Sampling | None = None) -> tuple[Baseline, ...]:
    """Return the baselines of some names, or all for none; ConfigurationError for a name that none has."""
    every = baselines(sampling)
    names = tuple(names)
    for name in names:
        if name not in every:
            raise ConfigurationError(unknown_name("baseline", name, every))
    return tuple(entry for name, entry in every.items() if not names or name in names)
