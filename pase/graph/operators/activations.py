"""Activation functions that operators apply to what they produce."""

from pase.errors import GraphError, unknown_name
from pase.graph.body import Body, Step

ACTIVATIONS = ("relu", "gelu", "tanh", "sigmoid")


def check_activation(name: str, activation: str) -> str:
    """Return the activation of a layer, "" for none; GraphError where there is no such function."""
    if activation and activation not in ACTIVATIONS:
        raise GraphError(f"layer {name!r}: {unknown_name('activation', activation, ACTIVATIONS)}")
    return activation


def finished(*steps: Step, has_bias: bool = False, activation: str = "") -> Body:
    """Return the body of some steps, of a bias that is added to the last one's result, and of an activation."""
    found = list(steps)
    if has_bias:
        found.append(Step(result="sums", function="add", operands=(found[-1].result, "bias")))
    if activation:
        found.append(Step(result="activated", function=activation, operands=(found[-1].result,)))
    return Body(steps=tuple(found))
