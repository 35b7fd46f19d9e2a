"""Functions as people train them in JAX: a loss of weights and a batch, with numbers for both."""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tests.importers import jax_zoo as zoo

Tree = Any


@dataclass(frozen=True, kw_only=True)
class Model:
    """A loss of weights and a batch.

    Attributes:
        loss: Of (weights, *batch); it returns the loss, or (loss, some of what its layers give).
        weights: With numbers.
        batch: With numbers.
        layers: Names of the layers that give what is returned besides the loss.
    """

    loss: Callable[..., Any]
    weights: Tree
    batch: tuple[Any, ...]
    layers: tuple[str, ...] = field(default=())


def numbers(shapes: Tree, seed: int = 0) -> Tree:
    """Return arrays of random numbers, smaller where more of them are added up."""
    random = np.random.default_rng(seed)

    def of(leaf: Any) -> Any:
        spread = max(1, int(np.prod(leaf.shape)) // max(leaf.shape, default=1)) ** 0.5
        return jnp.asarray(random.normal(size=leaf.shape) / spread)

    return jax.tree_util.tree_map(of, shapes)


def whole(high: int, *shape: int, seed: int = 1) -> Any:
    """Return random whole numbers."""
    return jnp.asarray(np.random.default_rng(seed).integers(0, high, shape))


def cross_entropy(logits: Any, labels: Any) -> Any:
    """Return the mean of what the labels' logarithms of probabilities lack."""
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), labels[..., None], -1).mean()


def mlp() -> Model:
    """Three dense layers, which are returned."""

    def loss(weights: Tree, x: Any, labels: Any) -> Any:
        found = []
        for name in ("fc1", "fc2"):
            x = jax.nn.relu(x @ weights[name]["w"] + weights[name]["b"])
            found.append(x)
        return cross_entropy(x @ weights["fc3"]["w"] + weights["fc3"]["b"], labels), found

    sizes = {"fc1": (16, 32), "fc2": (32, 24), "fc3": (24, 8)}
    weights = numbers({name: {"w": zoo.f32(*size), "b": zoo.f32(size[1])} for name, size in sizes.items()})
    return Model(loss=loss, weights=weights, batch=(numbers(zoo.f32(16, 16), 3), whole(8, 16)), layers=("fc1", "fc2"))


def cnn() -> Model:
    """Convolutions with strides and groups, poolings and a batch normalisation, of images with channels last."""

    def convolved(w: Any, x: Any, stride: int = 1, groups: int = 1) -> Any:
        numbers = ("NHWC", "HWIO", "NHWC")
        return jax.lax.conv_general_dilated(
            x, w, (stride, stride), "SAME", dimension_numbers=numbers, feature_group_count=groups
        )

    def loss(weights: Tree, x: Any, labels: Any) -> Any:
        x = first = jax.nn.relu(convolved(weights["conv1"], x))
        x = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
        x = convolved(weights["conv2"], x, groups=2)
        centred = x - x.mean((0, 1, 2))
        x = centred * jax.lax.rsqrt((centred**2).mean((0, 1, 2)) + 1e-5) * weights["norm"]["g"] + weights["norm"]["b"]
        x = third = jnp.tanh(convolved(weights["conv3"], x, stride=2))
        x = x.reshape(x.shape[0], -1) @ weights["fc"]["w"] + weights["fc"]["b"]
        return cross_entropy(x, labels), [first, third]

    weights = numbers(
        {
            "conv1": zoo.f32(3, 3, 4, 8),
            "conv2": zoo.f32(3, 5, 4, 16),
            "norm": {"g": zoo.f32(16), "b": zoo.f32(16)},
            "conv3": zoo.f32(3, 3, 16, 8),
            "fc": {"w": zoo.f32(4 * 4 * 8, 8), "b": zoo.f32(8)},
        }
    )
    batch = (numbers(zoo.f32(8, 16, 16, 4), 3), whole(8, 8))
    return Model(loss=loss, weights=weights, batch=batch, layers=("conv1", "conv3"))


def gpt() -> Model:
    """GPT-2, whose queries, keys and values are one product, and whose table of tokens is read twice."""
    apply, shapes = zoo.gpt2(layers=1, width=16, heads=4, vocabulary=32, positions=16)

    def loss(weights: Tree, ids: Any, labels: Any) -> Any:
        return cross_entropy(apply(weights, ids), labels)

    return Model(loss=loss, weights=numbers(shapes), batch=(whole(32, 4, 8), whole(32, 4, 8, seed=2)))


def scanned() -> Model:
    """Llama, whose layers are one loop, recomputed in the backward pass."""
    apply, shapes = zoo.llama(layers=2, width=16, heads=4, groups=2, inner=24, vocabulary=32, is_recomputed=True)

    def loss(weights: Tree, ids: Any, labels: Any) -> Any:
        return cross_entropy(apply(weights, ids), labels)

    return Model(loss=loss, weights=numbers(shapes), batch=(whole(32, 4, 8), whole(32, 4, 8, seed=2)))


def flax() -> Model:
    """An encoder of flax's modules."""
    module = zoo.flax_transformer(layers=1, width=16, heads=4, vocabulary=32)
    ids = whole(32, 4, 8)
    shapes = jax.eval_shape(lambda: module.init(jax.random.key(0), ids))

    def loss(variables: Tree, ids: Any, labels: Any) -> Any:
        return cross_entropy(module.apply(variables, ids), labels)

    return Model(loss=loss, weights=numbers(shapes), batch=(ids, whole(32, 4, 8, seed=2)))


def equinox() -> Model:
    """Attention of equinox's with a layer norm: the model is its weights."""
    import equinox as eqx

    model, _ = zoo.equinox_attention()
    arrays, rest = eqx.partition(model, lambda leaf: hasattr(leaf, "dtype"))
    x, target = numbers(zoo.f32(4, 8, 16), 3), numbers(zoo.f32(4, 8, 16), 4)

    def loss(arrays: Tree, x: Any, target: Any) -> Any:
        return ((eqx.combine(arrays, rest)(x) - target) ** 2).mean()

    return Model(loss=loss, weights=numbers(arrays), batch=(x, target))


def nested() -> Model:
    """Functions in functions: with a gradient of its own, recomputed in part, called twice; a loop backwards."""

    @jax.custom_vjp
    def halved(w: Any, x: Any) -> Any:
        return jnp.tanh(x @ w) @ w.T

    def forward(w: Any, x: Any) -> Any:
        return halved(w, x), (w, x)

    def backward(kept: Any, gradient: Any) -> Any:
        # Not what it would be without a rule.
        w, x = kept
        return 0.5 * (x.T @ (gradient @ w)), 0.5 * gradient

    halved.defvjp(forward, backward)

    @jax.jit
    def block(w: Any, x: Any) -> Any:
        return jax.nn.silu(x @ w) + jax.nn.relu(x)

    @functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.dots_saveable)
    def recomputed(w: Any, x: Any) -> Any:
        return block(w, jnp.sin(block(w, x)))

    def turn(x: Any, w: Any) -> tuple[Any, Any]:
        x = jnp.tanh(x @ w)
        return x, x.sum(-1)

    def loss(weights: Tree, x: Any, labels: Any) -> Any:
        x = halved(weights["halved"], recomputed(weights["block"], x))
        x, sums = jax.lax.scan(turn, x, weights["turns"], reverse=True)
        return cross_entropy(x, labels) + (sums**2).mean()

    shapes = {"halved": zoo.f32(8, 16), "block": zoo.f32(8, 8), "turns": zoo.f32(3, 8, 8)}
    return Model(loss=loss, weights=numbers(shapes), batch=(numbers(zoo.f32(8, 8), 3), whole(8, 8)))


MODELS: Mapping[str, Callable[[], Model]] = {
    "mlp": mlp,
    "cnn": cnn,
    "gpt": gpt,
    "scanned": scanned,
    "flax": flax,
    "equinox": equinox,
    "nested": nested,
}
