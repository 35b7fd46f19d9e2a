"""Activation functions that operators apply to what they produce."""

from pase.errors import GraphError, unknown_name
from pase.graph.body import Body, Step
from pase.graph.operator import Work

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


def epilogue(dims: tuple[str, ...], *, has_bias: bool, activation: str, num_reads: int) -> tuple[Work, ...]:
    """Return the work of a bias and an activation, of either that there is, on what an operator computes of its reads.

    The gradient of a sum is copied, that of an activation worked out.
    """
    added = (Work(dims=dims, flop_per_point=1),) if has_bias else ()
    applied = (Work(dims=dims, flop_per_point=1, inputs=(tuple(range(num_reads)),)),) if activation else ()
    return (*added, *applied)
