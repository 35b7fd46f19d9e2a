"""Which layer of a network is its loss, and which layers lead to it."""

from collections.abc import Iterable
from math import prod

from pase.errors import EmitError
from pase.graph.graph import Graph
from pase.graph.names import listed, short


def leading_to(graph: Graph, ends: Iterable[str]) -> set[str]:
    """Return the layers that some layers need, themselves included."""
    producers: dict[str, list[str]] = {}
    for edge in graph.edges:
        producers.setdefault(edge.consumer, []).append(edge.producer)
    wanted: set[str] = set()
    frontier = list(ends)
    while frontier:
        name = frontier.pop()
        if name not in wanted:
            wanted.add(name)
            frontier.extend(producers.get(name, ()))
    return wanted


def is_imported(graph: Graph) -> bool:
    """Return whether all layers of a network say themselves what they compute: those of an imported model do."""
    return all(operator.body is not None for operator in graph.operators)


def loss_layer(graph: Graph) -> str:
    """Return the layer of an imported model that computes its loss: the one output that is a single number."""
    found = [
        (operator.name, output.name)
        for operator in graph.operators
        for output in (operator.body.outputs if operator.body else ())
        if prod(output.shape) == 1
    ]
    if len(found) != 1:
        told = "none of its outputs is a single number"
        if found:
            told = f"{len(found)} of its outputs are single numbers: {listed([name for _, name in found])}"
        raise EmitError(
            f"network {short(graph.name)!r} has no loss that is known: {told}; to train it let its forward pass return "
            "the loss alone or besides its outputs, or have a factory return (model, inputs, loss); --forward writes "
            "a program of its outputs"
        )
    return found[0][0]
