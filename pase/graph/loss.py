"""Which layer of a network is its loss, and which layers lead to it."""

from collections.abc import Iterable
from math import prod

from pase.common.names import listed, short
from pase.errors import EmitError
from pase.graph.body import is_loss
from pase.graph.graph import Graph


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
    """Return whether a network is an imported model: its layers say which inputs and outputs of it they have."""
    return any(operator.body and (operator.body.inputs or operator.body.outputs) for operator in graph.operators)


def loss_layer(graph: Graph) -> str:
    """Return the layer that computes the loss.

    Of an imported model that of its one output which is a single number, otherwise the one whose body ends with a
    loss; EmitError where there is none or are several.
    """
    if is_imported(graph):
        return _loss_among_outputs(graph)
    found = [operator.name for operator in graph.operators if is_loss(operator.body)]
    if len(found) != 1:
        raise EmitError(
            f"network {short(graph.name)!r} has {len(found)} losses; a training program needs exactly one "
            "(a softmax_loss layer)"
        )
    return found[0]


def _loss_among_outputs(graph: Graph) -> str:
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
