"""Losses of JAX functions, those of optax among them."""

from collections.abc import Callable
from typing import Any

import pytest

from pase.importers.frameworks import import_model
from tests.importers.agreement import check_apart

jax = pytest.importorskip("jax")
optax = pytest.importorskip("optax")
jnp = jax.numpy

BATCH, STEPS, CLASSES, WIDTH = 8, 16, 32, 64
_PARAMETERS = {
    "table": jax.ShapeDtypeStruct((CLASSES, WIDTH), "float32"),
    "body": jax.ShapeDtypeStruct((WIDTH, 2 * WIDTH), "float32"),
    "head": jax.ShapeDtypeStruct((2 * WIDTH, CLASSES), "float32"),
}
_TOKENS = jax.ShapeDtypeStruct((BATCH, STEPS), "int32")
_FLOATS = jax.ShapeDtypeStruct((BATCH, STEPS, CLASSES), "float32")


def _rows(x: Any) -> Any:
    return x.reshape(-1, CLASSES)


OF_TOKENS: dict[str, Callable[[Any, Any], Any]] = {
    "integer labels": lambda x, t: optax.softmax_cross_entropy_with_integer_labels(x, t).mean(),
    "integer labels of rows": lambda x, t: optax.softmax_cross_entropy_with_integer_labels(
        _rows(x), t.reshape(-1)
    ).mean(),
    "one hot": lambda x, t: optax.softmax_cross_entropy(x, jax.nn.one_hot(t, CLASSES)).mean(),
    "taken along": lambda x, t: -jnp.take_along_axis(jax.nn.log_softmax(x), t[..., None], -1).mean(),
    "of every row": lambda x, t: -jax.nn.log_softmax(_rows(x))[jnp.arange(BATCH * STEPS), t.reshape(-1)].mean(),
}
OF_FLOATS: dict[str, Callable[[Any, Any], Any]] = {
    "softmax": lambda x, t: optax.softmax_cross_entropy(x, t).mean(),
    "safe softmax": lambda x, t: optax.safe_softmax_cross_entropy(x, t).mean(),
    "smoothed": lambda x, t: optax.softmax_cross_entropy(x, optax.smooth_labels(t, 0.1)).mean(),
    "sigmoid": lambda x, t: optax.sigmoid_binary_cross_entropy(x, t).mean(),
    "focal": lambda x, t: optax.sigmoid_focal_loss(x, t).mean(),
    "squares": lambda x, t: optax.l2_loss(x, t).mean(),
    "huber": lambda x, t: optax.huber_loss(x, t).mean(),
    "log cosh": lambda x, t: optax.log_cosh(x, t).mean(),
    "cosine": lambda x, t: optax.cosine_distance(x, t, epsilon=1e-6).mean(),
    "divergence": lambda x, t: optax.kl_divergence(jax.nn.log_softmax(x), t).mean(),
    "hinge": lambda x, t: optax.hinge_loss(x, t).mean(),
}


@pytest.mark.parametrize("name", [*OF_TOKENS, *OF_FLOATS])
def test_a_loss_is_known_and_keeps_examples_and_steps_apart(name: str) -> None:
    loss = OF_TOKENS.get(name) or OF_FLOATS[name]

    def function(parameters: Any, tokens: Any, targets: Any) -> Any:
        x = jax.nn.relu(parameters["table"][tokens] @ parameters["body"]) @ parameters["head"]
        return loss(x, targets)

    model = import_model((function, _PARAMETERS, _TOKENS, _TOKENS if name in OF_TOKENS else _FLOATS), is_strict=True)
    assert sum(bool(op.parameters) for op in model.graph.operators) == 3
    check_apart((op for op in model.graph.operators if not op.parameters), BATCH, STEPS)
