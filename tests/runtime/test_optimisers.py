"""Update rules: against the papers' equations written out in numpy, and against Keras where it has the same rule."""

import os
import random
from collections.abc import Callable, Iterator, Mapping
from math import prod
from typing import Any

import numpy as np
import pytest

from pase.errors import ProgramError
from pase.targets.execute import max_relative_difference
from pase.targets.mesh_tensorflow.primitives.compat import mtf, tf
from pase.targets.mesh_tensorflow.runtime.layers import dims, reshard
from pase.targets.mesh_tensorflow.runtime.program import Program
from pase.targets.mesh_tensorflow.runtime.reference import ReferenceUpdates, reference_training
from pase.targets.mesh_tensorflow.runtime.training import Training
from pase.targets.training.counted import initial_value
from pase.targets.training.optimisers import OPTIMISERS, make_rule, name_of, options_of
from pase.targets.training.options import Schedule, TrainingOptions
from tests.runtime.networks import small

Array = np.ndarray[Any, Any]
Rates = Callable[[int], float]

SHAPES = {"matrix": (6, 4), "filters": (4, 6, 3, 2), "bias": (12,)}
STEPS = 5


def rates(step: int) -> float:
    """A different one for each step."""
    return 0.05 / (1 + step)


# -- the rules, as the papers write them: (weight, gradients of the steps, rates) -> weight


def sgd(w: Array, gradients: list[Array], decay: float = 0.0) -> Array:
    for t, g in enumerate(gradients):
        w = w - rates(t) * (g + decay * w)
    return w


def momentum(w: Array, gradients: list[Array], mu: float = 0.9, nesterov: bool = False, decay: float = 0.0) -> Array:
    v = np.zeros_like(w)
    for t, g in enumerate(gradients):
        step = rates(t) * (g + decay * w)
        v = mu * v - step
        w = w + (mu * v - step if nesterov else v)
    return w


def adam(
    w: Array, gradients: list[Array], b1: float = 0.9, b2: float = 0.999, eps: float = 1e-8, decay: float = 0.0
) -> Array:
    m = v = np.zeros_like(w)
    for t, g in enumerate(gradients, start=1):
        m = b1 * m + (1 - b1) * g
        v = b2 * v + (1 - b2) * g**2
        m_hat, v_hat = m / (1 - b1**t), v / (1 - b2**t)
        w = w - rates(t - 1) * (m_hat / (np.sqrt(v_hat) + eps) + decay * w)
    return w


def adafactor(w: Array, gradients: list[Array], clip: float = 1.0, decay: float = -0.8, floor: float = 1e-3) -> Array:
    def rms(x: Array) -> float:
        return float(np.sqrt((x**2).sum() / x.size))

    # Row and column sums, as in the paper, of the two largest dims, brought to the end.
    last = sorted(np.argsort(w.shape, kind="stable")[-2:])
    order = [i for i in range(w.ndim) if i not in last] + last
    back = np.argsort(order)
    rows = columns = v = np.float64(0)
    for t, g in enumerate(gradients, start=1):
        beta = 1 - t**decay
        square = g**2 + 1e-30
        if w.ndim >= 2:
            square = square.transpose(order)
            rows = beta * rows + (1 - beta) * square.sum(-1, keepdims=True)
            columns = beta * columns + (1 - beta) * square.sum(-2, keepdims=True)
            v = (rows * columns / rows.sum(-2, keepdims=True)).transpose(back)
        else:
            v = beta * v + (1 - beta) * square
        u = g / np.sqrt(v)
        u = u / max(1.0, rms(u) / clip)
        w = w - max(floor, rms(w)) * min(rates(t - 1), 1 / np.sqrt(t)) * u
    return w


CASES: dict[str, tuple[str, dict[str, float | bool | None], Callable[[Array, list[Array]], Array]]] = {
    "sgd": ("sgd", {}, sgd),
    "sgd with decay": ("sgd", {"weight_decay": 0.3}, lambda w, g: sgd(w, g, 0.3)),
    "momentum": ("momentum", {"momentum": 0.8}, lambda w, g: momentum(w, g, 0.8)),
    "nesterov": (
        "momentum",
        {"nesterov": True, "weight_decay": 0.2},
        lambda w, g: momentum(w, g, nesterov=True, decay=0.2),
    ),
    "adam": ("adam", {"beta1": 0.7, "epsilon": 1e-3}, lambda w, g: adam(w, g, 0.7, eps=1e-3)),
    "adamw": ("adamw", {"weight_decay": 0.4}, lambda w, g: adam(w, g, decay=0.4)),
    "adafactor": ("adafactor", {}, adafactor),
    "adafactor with options": (
        "adafactor",
        {"clip": 0.7, "decay": -0.6, "epsilon2": 0.3},
        lambda w, g: adafactor(w, g, 0.7, -0.6, 0.3),
    ),
}


def given_gradients() -> dict[str, list[Array]]:
    numbers = np.random.default_rng(3)
    # Of very different sizes, so that clipping and epsilon matter in some.
    return {
        name: [numbers.standard_normal(shape) * 10.0 ** numbers.integers(-6, 4) for _ in range(STEPS)]
        for name, shape in SHAPES.items()
    }


def random_mesh(program: Program, layer: str, extents: Mapping[str, int], numbers: random.Random) -> Any:
    parts = dict.fromkeys(extents, 1)
    for _ in range(6):
        name = numbers.choice(list(extents))
        more = {**parts, name: parts[name] * numbers.choice([2, 3])}
        if extents[name] % more[name] == 0 and program.num_devices % prod(more.values()) == 0:
            parts = more
    devices = numbers.sample(range(program.num_devices), program.num_devices)
    return program.mesh(layer, [(name, size) for name, size in parts.items() if size > 1], devices)


def trained(optimiser: str, options: Mapping[str, float | bool | None], seed: int) -> dict[str, Array]:
    """Weights after some steps with gradients that are given: the loss is Σ w·g, g being fed."""
    numbers = random.Random(seed)
    gradients = given_gradients()
    with tf.Graph().as_default():
        program = Program(num_devices=6, dtype="float64")
        losses = []
        for name, shape in SHAPES.items():
            extents = {f"d{i}": extent for i, extent in enumerate(shape)}
            mesh, named = random_mesh(program, name, extents, numbers), list(dims(**extents))
            w = program.weight(mesh, name, named, 0.5)
            losses.append(mtf.reduce_sum(w * reshard(program.floats(f"g_{name}", shape), mesh, named)))
        mesh = program.mesh("loss", [])
        loss = sum((reshard(x, mesh, []) for x in losses[1:]), reshard(losses[0], mesh, []))
        training = Training.start(program, loss, learning_rate=1.0, seed=7, rule=make_rule(optimiser, options))
        for t in range(STEPS):
            training.step({f"g_{name}": of[t] for name, of in gradients.items()}, learning_rate=rates(t))
        weights = training.weights()
        training.close()
    return weights


@pytest.mark.parametrize(
    ("case", "seed"),
    [
        *((case, 9) for case in CASES),
        *(pytest.param(case, 16, marks=pytest.mark.full) for case in CASES),
    ],
)
def test_five_steps_are_those_of_the_paper_under_random_strategies(case: str, seed: int) -> None:
    optimiser, options, expected = CASES[case]
    weights = trained(optimiser, options, seed)
    for name, gradients in given_gradients().items():
        start = initial_value(name, SHAPES[name], 0.5, 7).astype(np.float64)
        after = expected(start, gradients)
        assert np.abs(after - start).max() > 1e-4
        np.testing.assert_allclose(weights[name], after, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("case", CASES)
def test_the_updates_of_the_reference_are_those_of_the_paper(case: str) -> None:
    """Written apart from those of programs."""
    optimiser, options, expected = CASES[case]
    with tf.Graph().as_default(), tf.Session() as session:
        updates, fed, variables = ReferenceUpdates(make_rule(optimiser, options)), {}, {}
        for name, shape in SHAPES.items():
            start = initial_value(name, shape, 0.5, 7).astype(np.float64)
            variables[name] = tf.get_variable(name, initializer=start, use_resource=True)
            fed[name] = tf.placeholder(tf.float64, shape)
            updates.add(variables[name], variables[name].read_value(), fed[name])
        session.run(tf.global_variables_initializer())
        for t in range(STEPS):
            feeds = {fed[name]: of[t] for name, of in given_gradients().items()}
            session.run(updates.operations, feeds | {updates.step: t + 1, updates.learning_rate: rates(t)})
        weights = session.run(variables)
    for name, gradients in given_gradients().items():
        after = expected(initial_value(name, SHAPES[name], 0.5, 7).astype(np.float64), gradients)
        np.testing.assert_allclose(weights[name], after, rtol=1e-12, atol=1e-14)


def test_float32_is_close_after_many_steps() -> None:
    """Powers of numbers near 1 are computed in 64 bits on both sides."""
    results = []
    for dtype in ("float32", "float64"):
        given = TrainingOptions(steps=200, dtype=dtype, rule=make_rule("adam", {}), schedule=Schedule(peak=1e-4))
        results.append(reference_training(small("mlp"), given).losses)
    assert max_relative_difference(*results) < 1e-4


def test_the_meshes_of_these_tests_do_split_what_adafactor_reduces() -> None:
    split = set()
    with tf.Graph().as_default():
        for seed in (9, 16):
            numbers, program = random.Random(seed), Program(num_devices=6)
            for name, shape in SHAPES.items():
                mesh = random_mesh(program, f"{name}{seed}", {f"d{i}": e for i, e in enumerate(shape)}, numbers)
                split |= {(name, axis) for axis, _ in mesh.devices.axes}
    expected = {("matrix", "d0"), ("matrix", "d1"), ("filters", "d0"), ("filters", "d1"), ("filters", "d2")}
    assert {*expected, ("bias", "d0"), ("matrix", "replica")} <= split


@pytest.fixture
def float64_keras() -> Iterator[Any]:
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    keras = pytest.importorskip("keras")
    before = keras.config.floatx()
    keras.config.set_floatx("float64")
    yield keras
    keras.config.set_floatx(before)


TINY = 2.0**-600
"""Keras adds epsilon to what is not corrected for its bias; without an epsilon both are the same rule."""

# Keras rounds options to float32: these are the same in it.
RATE, B1, B2 = 2.0**-7, 0.875, 1 - 2.0**-10

KERAS: dict[str, tuple[dict[str, float | bool | None], Callable[[Any], Any]]] = {
    "adam": (
        {"beta1": B1, "beta2": B2, "epsilon": TINY},
        lambda o: o.Adam(RATE, beta_1=B1, beta_2=B2, epsilon=TINY),
    ),
    "adafactor": (
        {"epsilon1": 2.0**-100, "epsilon2": 2.0**-10, "decay": -0.75},
        lambda o: o.Adafactor(RATE, epsilon_1=2.0**-100, epsilon_2=2.0**-10, beta_2_decay=-0.75),
    ),
}


@pytest.mark.parametrize("optimiser", KERAS)
def test_keras_agrees_where_it_has_the_same_rule(
    optimiser: str, float64_keras: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Keras factors the last two dims, which are the largest of this shape.
    monkeypatch.setitem(SHAPES, "filters", (2, 3, 4, 6))
    monkeypatch.setattr(f"{__name__}.rates", lambda _: RATE)
    options, make = KERAS[optimiser]
    weights = trained(optimiser, options, 9)
    theirs = make(float64_keras.optimizers)
    variables = {
        name: float64_keras.Variable(initial_value(name, shape, 0.5, 7).astype(np.float64), dtype="float64")
        for name, shape in SHAPES.items()
    }
    gradients = given_gradients()
    for t in range(STEPS):
        given = [tf.convert_to_tensor(gradients[name][t]) for name in variables]
        theirs.apply(given, list(variables.values()))
    for name, variable in variables.items():
        np.testing.assert_allclose(weights[name], variable.numpy(), rtol=1e-12, atol=1e-14)


# -- what is kept, and what is refused


def test_adafactor_keeps_a_row_and_a_column() -> None:
    rule = make_rule("adafactor", {})
    assert rule.slots((6, 4)) == {"row_means": (0,), "column_means": (1,)}
    assert rule.slots((64, 3, 11, 12)) == {"row_means": (0, 1, 2), "column_means": (1, 2, 3)}
    assert rule.slots((5,)) == {"second_moment": (0,)}
    assert rule.slots(()) == {"second_moment": ()}


def test_rules_have_names_and_options() -> None:
    for name in OPTIMISERS:
        assert name_of(make_rule(name, {})) == name
    assert {rule for rule, _, _ in CASES.values()} == set(OPTIMISERS)
    assert options_of(make_rule("momentum", {"momentum": 0.5, "nesterov": None})) == {
        "momentum": 0.5,
        "nesterov": False,
        "weight_decay": 0.0,
    }


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("adm", {}, r"unknown optimiser 'adm': did you mean 'adam'"),
        ("sgd", {"momentum": 0.9}, r"optimiser sgd has no momentum; it has weight decay; momentum would"),
        (
            "adam",
            {"weight_decay": 0.1},
            r"adam has no weight decay; it has .*; sgd and momentum and adamw would",
        ),
        ("momentum", {"momentum": 1.0}, r"momentum of optimiser momentum is 1; expected from 0 to below 1"),
        ("adam", {"beta2": -0.1}, r"beta2 of optimiser adam is -0.1; expected from 0 to below 1"),
        ("adamw", {"weight_decay": -1.0}, r"weight decay of optimiser adamw is -1; expected 0 or more"),
        ("adam", {"epsilon": float("nan")}, r"epsilon of optimiser adam is nan; expected 0 or more"),
    ],
)
def test_options_that_do_not_fit_are_refused(name: str, options: dict[str, float], message: str) -> None:
    with pytest.raises(ProgramError, match=message):
        make_rule(name, options)
