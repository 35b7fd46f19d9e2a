"""Stages of a pipeline: parts of a graph, one after the other, each of them a graph of its own.

A graph is cut between two of its layers, in their order, where a single tensor goes from what is before to what is
after, for one layer there. A stage reads what the stages before it wrote as it reads data, but for the gradient, which
it sends back.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from pase.common.frozen import FrozenDict
from pase.graph.batch import Batch
from pase.graph.graph import Edge, Graph
from pase.graph.operators import with_fan_outs
from pase.graph.precision import LayerTypes


@dataclass(frozen=True, kw_only=True)
class Stage(Graph):
    """Some layers of a graph, in its order. whole: that graph. A weight that stages share belongs to each of them."""

    whole: Graph

    @cached_property
    def received(self) -> tuple[Edge, ...]:
        """The edges on which it has tensors of earlier stages."""
        return tuple(e for e in self.whole.edges if e.consumer in self.index and e.producer not in self.index)

    @cached_property
    def sent(self) -> tuple[Edge, ...]:
        """The edges on which later stages have tensors of it."""
        return tuple(e for e in self.whole.edges if e.producer in self.index and e.consumer not in self.index)

    @cached_property
    def types(self) -> Mapping[str, LayerTypes]:
        """The types of each layer's tensors, by its name."""
        return FrozenDict({name: self.whole.types[name] for name in self.index})

    @cached_property
    def batch(self) -> Mapping[str, Batch]:
        """Where the batch lies in the iteration space of each layer, by its name."""
        return FrozenDict({name: self.whole.batch[name] for name in self.index})

    @cached_property
    def _gradients(self) -> frozenset[tuple[str, int]]:
        return frozenset(read for read in self.whole._gradients if read[0] in self.index)


def with_cuts(graph: Graph) -> Graph:
    """Return a graph with a fan-out wherever one is needed, and where several layers read all that goes on from before.

    It can be cut there then.
    """
    graph = with_fan_outs(graph)
    return with_fan_outs(graph, behind={tensor for _, tensor in _narrow(graph)})


def cuts(graph: Graph) -> tuple[int, ...]:
    """Return before which layers, by position, a graph can be cut: one layer alone reads one tensor from before."""
    return tuple(at for at, tensor in _narrow(graph) if len(graph.readers[tensor]) == 1)


def _narrow(graph: Graph) -> Iterator[tuple[int, tuple[str, int]]]:
    """Yield each position with the one tensor that goes on to the layers from there on, by layer and output."""
    last = {tensor: max(graph.index[edge.consumer] for edge in edges) for tensor, edges in graph.readers.items()}
    under_way: set[tuple[str, int]] = set()
    for position, operator in enumerate(graph.operators):
        under_way = {tensor for tensor in under_way if last[tensor] >= position}
        if len(under_way) == 1:
            yield position, next(iter(under_way))
        under_way.update((operator.name, o) for o in range(len(operator.writes)) if (operator.name, o) in last)


def stages(graph: Graph, at: Sequence[int]) -> tuple[Graph, ...]:
    """Return the stages of a graph that is cut before some layers, by position; the graph itself without any."""
    between = pairwise((0, *at, len(graph.operators)))
    return tuple(stage(graph, first, beyond) for first, beyond in between) if at else (graph,)


def stage(graph: Graph, first: int, beyond: int) -> Stage:
    """Return the layers of a graph from one position to another, which is none of them, as a graph."""
    operators = graph.operators[first:beyond]
    names = {operator.name for operator in operators}
    return Stage(
        name=graph.name,
        operators=operators,
        edges=tuple(edge for edge in graph.edges if edge.producer in names and edge.consumer in names),
        arguments=graph.arguments,
        precision=graph.precision,
        framework=graph.framework,
        call=graph.call,
        whole=graph,
    )
