"""The strategies to compare with, by name: experts' rules that are a few lines each, and one line here for everyone.

A rule completes what people do with networks of a kind for any network of it. It looks at costs only to choose between
a few sizes of its own.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType

from pase.analysis.baselines import integrated_grid, mcmc
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
)
from pase.costs import Problem
from pase.errors import ConfigurationError, unknown_name
from pase.graph import Graph, Operator
from pase.machine import Machine
from pase.planning.planner import data_parallel_choice
from pase.sharding.configurations import data_parallel, divisors


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
    dense = _dense_layers(graph)
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


def _dense_layers(graph: Graph) -> dict[str, tuple[str, ...]]:
    """Return the dims that each layer of the dense part makes, by its name."""
    to_convolutions = leads_to(graph, is_convolution)
    products = {operator.name: dense_product(operator) for operator in graph.operators}
    return {name: product.out for name, product in products.items() if product and name not in to_convolutions}


def pipelined_rnn(problem: Problem, _machine: Machine) -> tuple[int, ...] | None:
    """Return data and pipeline parallelism, as GNMT uses it (Wu et al. 2016, section 3; PaSE section IV).

    The layers of a recurrent stack lie on different devices, as far as p allows, which work as a pipeline; each of them
    is repeated on the devices that are left, which share the batch. Other layers are data parallel. None for a network
    without a stack of several recurrent layers that pipelines.
    """
    operators = problem.graph.operators
    if not any(_num_stages(operator) > 1 for operator in operators):
        return None
    return choice_of(problem, [_rnn_splits(problem.graph, operator, problem.num_devices) for operator in operators])


def _num_stages(operator: Operator) -> int:
    return operator.extents[operator.pipeline.stage] if operator.pipeline else 1


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
    ways = [t for t in divisors(problem.num_devices) if t <= node and _divides(problem.graph, dims, t)]
    return cheapest(problem, meshes(problem, dims, ways))


def _divides(graph: Graph, dims: TransformerDims, ways: int) -> bool:
    """Return whether heads and hidden units of every layer can be split so many ways."""
    split = dims.heads | dims.hidden
    return all(graph[name].extents[dim] % ways == 0 for (name, dim), number in dims.classes.items() if number in split)


EXPERTS: Mapping[str, Baseline] = MappingProxyType(
    {
        "data_parallel": Baseline(
            name="data_parallel",
            choose=lambda problem, _machine: data_parallel_choice(problem),
            source="the standard practice",
            needs="anything",
            description="the batch of every layer over all devices",
        ),
        "owt": Baseline(
            name="owt",
            choose=one_weird_trick,
            source="one weird trick, Krizhevsky 2014",
            needs="convolutions, dense layers behind them, no attention",
            description="convolutions data parallel, dense layers split by what they make",
        ),
        "rnn": Baseline(
            name="rnn",
            choose=pipelined_rnn,
            source="GNMT, Wu et al. 2016",
            needs="a stack of several recurrent layers that pipelines",
            description="recurrent layers one behind the other on different devices, the batch over the rest",
        ),
        "mesh_tensorflow": Baseline(
            name="mesh_tensorflow",
            choose=mesh_tensorflow,
            source="Shazeer et al. 2018",
            needs="attention",
            description="the cheapest mesh: batch n ways; vocabulary, hidden units and heads m ways",
        ),
        "megatron": Baseline(
            name="megatron",
            choose=megatron,
            source="Shoeybi et al. 2019",
            needs="attention",
            description="pairs of products split by columns and rows within a node, the batch over the rest",
        ),
        "integrated_grid": Baseline(
            name="integrated_grid",
            choose=integrated_grid.choose,
            source="Gholami et al. 2018",
            needs="no weights but those of convolutions and dense layers",
            description="the cheapest grid: batch pc ways; channels, or rows of images, pr ways",
        ),
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


def chosen(names: Iterable[str] = (), sampling: Sampling | None = None) -> tuple[Baseline, ...]:
    """Return the baselines of some names, or all for none; ConfigurationError for a name that none has."""
    every = baselines(sampling)
    names = tuple(names)
    for name in names:
        if name not in every:
            raise ConfigurationError(unknown_name("baseline", name, every))
    return tuple(entry for name, entry in every.items() if not names or name in names)
