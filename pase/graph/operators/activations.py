"""Activation functions that operators apply to what they produce."""

from pase.errors import GraphError, unknown_name

ACTIVATIONS = ("relu", "gelu", "tanh", "sigmoid")


def check_activation(name: str, activation: str) -> str:
    """Return the activation of a layer, "" for none; GraphError where there is no such function."""
    if activation and activation not in ACTIVATIONS:
        raise GraphError(f"layer {name!r}: {unknown_name('activation', activation, ACTIVATIONS)}")
    return activation
