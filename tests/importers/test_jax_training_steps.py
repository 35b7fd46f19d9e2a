"""Functions of JAX that are training steps already, however they are written, and those that only look like one."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

from pase.errors import ModelError
from pase.importers.frameworks import import_model

jax = pytest.importorskip("jax")
import jax.numpy as jnp  # noqa: E402

from tests.importers import jax_zoo as zoo  # noqa: E402
from tests.importers.jax_zoo import Tree, f32, tokens  # noqa: E402

PARAMS = {"up": {"w": f32(8, 16), "b": f32(16)}, "down": {"w": f32(16, 4), "b": f32(4)}}
X, Y = f32(32, 8), f32(32, 4)


def forward(params: Tree, x: Any) -> Any:
    hidden = jnp.tanh(x @ params["up"]["w"] + params["up"]["b"])
    return hidden @ params["down"]["w"] + params["down"]["b"]


def loss(params: Tree, x: Any, y: Any) -> Any:
    return jnp.mean((forward(params, x) - y) ** 2)


def sgd(params: Tree, x: Any, y: Any) -> Any:
    value, gradients = jax.value_and_grad(loss)(params, x, y)
    return value, jax.tree_util.tree_map(lambda p, g: p - 0.1 * g, params, gradients)


class State(NamedTuple):
    """As training states are, of flax's or one's own."""

    step: Any
    params: Any
    moments: Any


def adam(state: State, x: Any, y: Any) -> Any:
    value, gradients = jax.value_and_grad(loss)(state.params, x, y)
    moments = jax.tree_util.tree_map(lambda m, g: 0.9 * m + 0.1 * g, state.moments, gradients)
    params = jax.tree_util.tree_map(lambda p, m: p - 0.1 * m, state.params, moments)
    return State(state.step + 1, params, moments), {"loss": value}


STATE = State(tokens(), PARAMS, PARAMS)


def of_the_state(state: State, x: Any, y: Any) -> Any:
    return jax.value_and_grad(loss)(state.params, x, y)


def in_a_list(params: Tree, x: Any, y: Any) -> Any:
    return jax.tree_util.tree_leaves(jax.grad(loss)(params, x, y))[::-1]


def by_vjp(params: Tree, x: Any, y: Any) -> Any:
    out, pull = jax.vjp(lambda p: forward(p, x), params)
    return pull(out - y)


def by_hand(params: Tree, x: Any, y: Any) -> Any:
    hidden = jnp.tanh(x @ params["up"]["w"] + params["up"]["b"])
    error = hidden @ params["down"]["w"] + params["down"]["b"] - y
    inner = error @ params["down"]["w"].T * (1 - hidden**2)
    return {
        "up": {"w": params["up"]["w"] - x.T @ inner, "b": params["up"]["b"] - inner.sum(0)},
        "down": {"w": params["down"]["w"] - hidden.T @ error, "b": params["down"]["b"] - error.sum(0)},
    }


def many_steps(params: Tree, x: Any, y: Any) -> Any:
    return jax.lax.scan(lambda p, _: sgd(p, x, y)[::-1], params, None, length=3)


STEPS: dict[str, tuple[Callable[..., Any], Any]] = {
    "gradients": (jax.grad(loss), PARAMS),
    "loss and gradients": (jax.value_and_grad(loss), PARAMS),
    "compiled": (jax.jit(jax.value_and_grad(loss)), PARAMS),
    "of a compiled loss": (jax.value_and_grad(jax.jit(loss)), PARAMS),
    "with recomputation": (jax.grad(jax.checkpoint(loss)), PARAMS),
    "updated": (sgd, PARAMS),
    "updated, compiled": (jax.jit(sgd), PARAMS),
    "a training state": (adam, STATE),
    "gradients of a training state": (of_the_state, STATE),
    "gradients in a list": (in_a_list, PARAMS),
    "pulled back": (by_vjp, PARAMS),
    "by hand": (by_hand, PARAMS),
    "several steps": (many_steps, PARAMS),
}


def refused() -> Any:
    return pytest.raises(ModelError, match=r"is a training step already: .* give the function that returns the loss")


@pytest.mark.parametrize("name", STEPS)
def test_a_training_step_is_refused(name: str) -> None:
    step, params = STEPS[name]
    with refused():
        import_model((step, params, X, Y))


def test_the_refusal_names_the_function_and_the_parameters() -> None:
    with pytest.raises(ModelError, match=r"^function 'sgd' is a training step .* \(down\.b, down\.w, up\.b, …"):
        import_model((sgd, PARAMS, X, Y))


def test_a_step_of_one_array_or_of_scanned_layers_is_refused() -> None:
    given = {"function": jax.value_and_grad(lambda w, x: jnp.mean((x @ w) ** 2)), "parameters": f32(8, 4), "inputs": X}
    apply, params = zoo.llama()
    for source in (given, (jax.value_and_grad(lambda p, ids: jnp.mean(apply(p, ids) ** 2)), params, tokens(2, 16))):
        with refused():
            import_model(source)


@pytest.mark.parametrize("optimizer", ["sgd", "adamw", "adafactor"])
def test_a_step_of_optax_is_refused(optimizer: str) -> None:
    optax = pytest.importorskip("optax")
    chosen = getattr(optax, optimizer)(1e-3)
    moments = jax.eval_shape(chosen.init, PARAMS)

    def step(params: Tree, moments: Any, x: Any, y: Any) -> Any:
        value, gradients = jax.value_and_grad(loss)(params, x, y)
        updates, moments = chosen.update(gradients, moments, params)
        return optax.apply_updates(params, updates), moments, value

    with refused():
        import_model((step, PARAMS, moments, X, Y))


@pytest.mark.parametrize("is_updated", [False, True])
def test_a_step_of_a_model_of_equinox_is_refused(is_updated: bool) -> None:
    equinox = pytest.importorskip("equinox")
    model, x = zoo.equinox_mlp()

    def step(model: Any, x: Any, y: Any) -> Any:
        value, gradients = equinox.filter_value_and_grad(lambda m: jnp.mean((m(x) - y) ** 2))(model)
        return (value, equinox.apply_updates(model, gradients) if is_updated else gradients)

    with refused():
        import_model({"function": step, "parameters": model, "inputs": (x, f32(6, 4))})


# -- what is no training step


def tied_autoencoder(params: Tree, x: Any) -> Any:
    code = jnp.tanh(x @ params["up"]["w"])
    return code @ params["up"]["w"].T, code


def with_intermediates(params: Tree, x: Any) -> Any:
    """Return values of the very shapes and names of the parameters (a batch of 8)."""
    hidden = jnp.tanh(x @ params["up"]["w"])
    out = hidden @ params["down"]["w"]
    return out, {"up": {"w": hidden}}


def with_everything_named_alike(params: Tree, x: Any) -> Any:
    hidden = jnp.tanh(x @ params["up"]["w"] + params["up"]["b"])
    out = hidden @ params["down"]["w"] + params["down"]["b"]
    return {
        "up": {"w": hidden, "b": hidden.mean(0)},
        "down": {"w": hidden.T @ out, "b": out.mean(0)},
        "loss": jnp.mean(out**2),
    }


def with_its_parameters(params: Tree, x: Any) -> Any:
    return forward(params, x), params


def with_statistics(params: Tree, x: Any) -> Any:
    """Return running means that are kept among the parameters, as programs without a framework have them."""
    out = forward(params, x)
    kept = params["down"] | {"b": 0.9 * params["down"]["b"] + 0.1 * out.mean(0)}
    return out, params | {"down": kept}


def with_averages(params: Tree, x: Any) -> Any:
    return forward(params, x), jax.tree_util.tree_map(lambda p: 0.999 * p, params)


FORWARD: dict[str, tuple[Callable[..., Any], Any]] = {
    "plain": (forward, f32(32, 8)),
    "tied autoencoder": (tied_autoencoder, f32(32, 8)),
    "intermediate values": (with_intermediates, f32(8, 8)),
    "the output is as wide as the weight": (lambda p, x: (x @ p["up"]["w"], jnp.tanh(x)), f32(8, 8)),
    "its parameters, too": (with_its_parameters, f32(32, 8)),
    "running statistics": (with_statistics, f32(32, 8)),
    "averages of parameters": (with_averages, f32(32, 8)),
    "a penalty of them": (lambda p, x: forward(p, x).sum() + sum(jnp.sum(w**2) for w in p["up"].values()), X),
    "recomputed": (jax.jit(jax.checkpoint(forward)), X),
    "named as the parameters, of other shapes": (with_everything_named_alike, X),
}


@pytest.mark.parametrize("name", FORWARD)
def test_what_only_looks_like_a_step_is_imported(name: str) -> None:
    function, x = FORWARD[name]
    model = import_model((function, PARAMS, x))
    assert model.graph.operators
    assert not any("gradients" in note for note in model.traces[0].notes)


def test_forces_are_gradients_that_are_no_step() -> None:
    """The gradient of an energy by positions, which have the shape of a weight: it is part of what is computed."""

    def energy(params: Tree, positions: Any) -> Any:
        return jnp.sum(jnp.tanh(positions @ params["w"]) @ params["v"])

    def apply(params: Tree, positions: Any) -> Any:
        value, gradient = jax.value_and_grad(energy, argnums=1)(params, positions)
        return value, -gradient

    params = {"w": f32(3, 3), "v": f32(3, 1)}
    model = import_model((apply, params, f32(3, 3)))
    assert any("takes gradients within what it computes" in note for note in model.traces[0].notes)


def test_a_loss_after_a_step_within_is_no_step() -> None:
    """Learning to learn: gradients are taken inside, a loss comes out."""

    def apply(params: Tree, x: Any, y: Any) -> Any:
        return loss(sgd(params, x, y)[1], x, y)

    model = import_model((apply, PARAMS, X, Y))
    assert any("takes gradients within what it computes" in note for note in model.traces[0].notes)


def test_fast_weights_of_a_layer_are_no_step() -> None:
    """A layer that trains a small model of its own on what it reads, and hands that on."""

    def apply(params: Tree, x: Any) -> Any:
        def inner(fast: Tree) -> Any:
            return jnp.mean((jnp.tanh(x @ fast["w"]) @ fast["v"] - x) ** 2)

        fast = jax.tree_util.tree_map(lambda p, g: p - g, params["fast"], jax.grad(inner)(params["fast"]))
        return jnp.tanh(x @ fast["w"]) @ fast["v"] @ params["out"], fast

    params = {"fast": {"w": f32(8, 4), "v": f32(4, 8)}, "out": f32(8, 64)}
    assert import_model((apply, params, X)).graph.operators
