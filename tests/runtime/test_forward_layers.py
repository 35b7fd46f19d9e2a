"""What programs of a forward pass are written with: functions of points beside NumPy and SciPy, errors."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from scipy import special

from pase.errors import ProgramError
from pase.graph.body import POINTWISE
from pase.targets.mesh_tensorflow.primitives.compat import tf
from pase.targets.mesh_tensorflow.runtime.forward_pass import compute
from pase.targets.mesh_tensorflow.runtime.layers import (
    arrange,
    dims,
    fn,
    mean,
    piece,
    reshard,
)
from pase.targets.mesh_tensorflow.runtime.layers.points import functions_of_points
from pase.targets.mesh_tensorflow.runtime.program import Program

Array = np.ndarray[Any, Any]


def normal(x: Array) -> Array:
    return special.ndtr(x)


ORACLES: dict[str, tuple[Callable[..., Any], tuple[float, ...]]] = {
    "abs": (np.abs, ()),
    "celu": (lambda x, a: np.where(x > 0, x, a * (np.exp(x / a) - 1)), (0.7,)),
    "clip": (np.clip, (-0.5, 1.0)),
    "elu": (lambda x, a: np.where(x > 0, x, a * (np.exp(x) - 1)), (0.7,)),
    "erf": (special.erf, ()),
    "gelu": (lambda x: x * normal(x), ()),
    "gelu_tanh": (lambda x: 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))), ()),
    "hard_sigmoid": (lambda x, a, b: np.clip(a * x + b, 0, 1), (0.2, 0.5)),
    "hard_swish": (lambda x: x * np.clip(x + 3, 0, 6) / 6, ()),
    "leaky_relu": (lambda x, a: np.where(x > 0, x, a * x), (0.1,)),
    "mish": (lambda x: x * np.tanh(np.logaddexp(0, x)), ()),
    "power": (np.power, (2.0,)),
    "quick_gelu": (lambda x, a: x * special.expit(a * x), (1.702,)),
    "reciprocal": (np.reciprocal, ()),
    "round": (np.round, ()),
    "selu": (lambda x: 1.0507009873554805 * np.where(x > 0, x, 1.6732632423543772 * (np.exp(x) - 1)), ()),
    "silu": (lambda x: x * special.expit(x), ()),
    "softplus": (lambda x, b: np.logaddexp(0, b * x) / b, (2.0,)),
    "softsign": (lambda x: x / (1 + np.abs(x)), ()),
    "square": (np.square, ()),
    "thresholded_relu": (lambda x, a: np.where(x > a, x, 0), (0.5,)),
}


OF_ONE: dict[str, Callable[..., Any]] = {
    "acos": np.arccos, "acosh": lambda x: np.arccosh(1 + x), "asin": np.arcsin, "asinh": np.arcsinh, "atan": np.arctan,
    "atanh": np.arctanh, "ceil": np.ceil, "cos": np.cos, "cosh": np.cosh, "erfc": special.erfc, "exp": np.exp,
    "expm1": np.expm1, "floor": np.floor, "identity": np.copy, "log": np.log, "log1p": np.log1p,
    "log_sigmoid": special.log_expit, "negate": np.negative, "relu": lambda x: x * (x > 0),
    "relu6": lambda x: np.clip(x, 0, 6), "rsqrt": lambda x: x**-0.5, "sigmoid": special.expit, "sign": np.sign,
    "sin": np.sin, "sinh": np.sinh, "sqrt": np.sqrt, "tan": np.tan, "tanh": np.tanh,
    "tanh_shrink": lambda x: x - np.tanh(x),
}  # fmt: skip

OF_TWO: dict[str, Callable[..., Any]] = {
    "divide": np.divide, "equal": np.equal, "floor_divide": np.floor_divide, "greater": np.greater,
    "greater_equal": np.greater_equal, "less": np.less, "less_equal": np.less_equal, "not_equal": np.not_equal,
    "prelu": lambda x, slope: np.where(x > 0, x, slope * x), "subtract": np.subtract,
}  # fmt: skip

OF_THREE: dict[str, Callable[..., Any]] = {
    "add": lambda *xs: np.sum(xs, 0), "average": lambda *xs: np.mean(xs, 0), "maximum": lambda *xs: np.max(xs, 0),
    "minimum": lambda *xs: np.min(xs, 0), "multiply": lambda *xs: np.prod(xs, 0), "where": np.where,
}  # fmt: skip


def test_the_table_that_the_reference_shares_is_numpy_s() -> None:
    """Every function of points, apart from layers: the reference and the programs compute them by one table."""
    x = np.random.default_rng(1).uniform(-0.9, 0.9, (5, 7))
    y, z = np.where(np.arange(7) % 3, x[::-1] * 1.7, x), np.cos(np.arange(35.0)).reshape(5, 7)
    every = {name: (oracle, [x, *own]) for name, (oracle, own) in ORACLES.items()}
    every |= {name: (oracle, [x]) for name, oracle in OF_ONE.items()}
    every |= {name: (oracle, [np.abs(x) + 0.01]) for name, oracle in OF_ONE.items() if name in POSITIVE}
    every |= {name: (oracle, [x, y]) for name, oracle in OF_TWO.items()}
    every |= {name: (oracle, [x, y, z]) for name, oracle in OF_THREE.items()}
    every["where"] = np.where, [(x > y).astype(float), x, y]
    assert set(every) == set(POINTWISE)
    with tf.Graph().as_default(), tf.Session() as session:
        tensors = {
            name: [tf.constant(o) if isinstance(o, np.ndarray) else o for o in operands]
            for name, (_, operands) in every.items()
        }
        tensors["acosh"] = [1 + tensors["acosh"][0]]
        computed = {name: functions_of_points()[name](*own) for name, own in tensors.items()}
        found = session.run({name: tf.cast(value, tf.float64) for name, value in computed.items()})
    for name, (oracle, operands) in every.items():
        np.testing.assert_allclose(found[name], oracle(*operands), rtol=1e-12, atol=1e-13, err_msg=name)


POSITIVE = ("acosh", "log", "log1p", "rsqrt", "sqrt")


def outputs(build: Callable[[Any, Any], dict[str, Any]], x: Array, num_devices: int = 2) -> dict[str, Array]:
    """build: takes the tensor, with dims b and n, on a mesh that is split along n; returns tensors by name."""

    def declared(program: Program) -> Any:
        b, n = dims(b=x.shape[0], n=x.shape[1])
        mesh = program.mesh("layer", [("n", num_devices)])
        found = build(reshard(program.floats("x", list(x.shape)), mesh, [b, n]), (b, n))
        return {name: (tensor, tuple(tensor.shape.to_integer_list)) for name, tensor in found.items()}

    return dict(compute(declared, {}, {"x": x}, num_devices=num_devices, dtype="float64").outputs)


def numbers() -> Array:
    return np.random.default_rng(0).standard_normal((4, 6)) * 2


def test_outputs_without_the_batch_are_of_one_batch() -> None:
    def build(program: Program) -> Any:
        b, n = dims(b=4, n=6)
        x = reshard(program.floats("x", [4, 6]), program.mesh("layer", []), [b, n])
        return {"turned": (arrange(x, [n, b]), (6, 4))}

    with pytest.raises(ProgramError, match=r"output 'turned' has shape \[6, 4\], .* give exactly 4 examples, found 5"):
        compute(build, {}, {"x": np.ones((5, 6))}, num_devices=1)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda t, _: {"y": fn.nothing(t)}, "'nothing' of 1 tensors cannot be computed"),
        (lambda t, _: {"y": piece(t, "n", 4, 3)}, r"has no \[4, 7\) of n; correct the piece"),
        (lambda t, d: {"y": arrange(t, [d[0]])}, "cannot be laid out as b=4"),
        (lambda t, d: {"y": mean(mean(t, [d[1]]), [d[1]])}, "over n, which it has not"),
    ],
)
def test_errors(build: Any, message: str) -> None:
    with pytest.raises(ProgramError, match=message):
        outputs(build, numbers())
