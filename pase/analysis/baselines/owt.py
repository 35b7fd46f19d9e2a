"""One weird trick (Krizhevsky 2014): convolutions are data parallel, the dense layers behind them model parallel."""

from pase.analysis.baselines.layout import choice_of, largest_split, largest_splits
from pase.analysis.baselines.same_dims import same_dims
from pase.analysis.baselines.structure import ATTENTION, dense_product, follows, is_convolution, leads_to
from pase.costs import Problem
from pase.costs.configurations import data_parallel
from pase.graph import Graph, Operator
from pase.machine import Machine


def choose(problem: Problem, _machine: Machine) -> tuple[int, ...] | None:
    """Return the strategy: dense layers split what they make p ways, and nothing else.

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
            return _model_parallel(operator, dense[operator.name], p)
        if operator.name in behind:
            return largest_splits(operator, classes, [(made, p)])
        return dict(zip(operator.extents, data_parallel(graph, operator, p), strict=True))

    return choice_of(problem, [splits(operator) for operator in graph.operators])


def _dense_layers(graph: Graph) -> dict[str, tuple[str, ...]]:
    """Return the dims that each layer of the dense part makes, by its name."""
    to_convolutions = leads_to(graph, is_convolution)
    products = {operator.name: dense_product(operator) for operator in graph.operators}
    return {name: product.out for name, product in products.items() if product and name not in to_convolutions}


def _model_parallel(operator: Operator, out: tuple[str, ...], num_devices: int) -> dict[str, int]:
    """Return the splits of what a dense layer makes, over as many devices as its first dims take."""
    splits, left = {}, num_devices
    for dim in out:
        splits[dim] = largest_split(operator, dim, left)
        left //= splits[dim]
    return splits
