"""What programs are written with: values and gradients beside PyTorch's of the same functions, under many splits."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

from pase.errors import ProgramError
from pase.graph.functions import POINTWISE
from pase.targets.mesh_tensorflow.primitives.compat import tf
from pase.targets.mesh_tensorflow.runtime import layers
from pase.targets.mesh_tensorflow.runtime.layers import dims, fn
from pase.targets.mesh_tensorflow.runtime.program import Program
from pase.targets.mesh_tensorflow.runtime.training import Training

Array = np.ndarray[Any, Any]
Axes = Sequence[tuple[str, int]]
Shape = dict[str, int]

TOLERANCE = 1e-12


@dataclass(frozen=True)
class Case:
    """A layer of a mesh and tensors, and the same function in PyTorch.

    shapes: of the tensors, the extents of their dims by name. values: of the tensors; without them they are drawn.
    """

    layer: Callable[..., Any]
    oracle: Callable[..., Any]
    shapes: Sequence[Shape]
    values: Sequence[Array] = ()

    def tensors(self) -> list[Any]:
        numbers = np.random.default_rng(0)
        values = self.values or [numbers.standard_normal(tuple(shape.values())) for shape in self.shapes]
        return [torch.tensor(value.astype(np.float32).astype(np.float64), requires_grad=True) for value in values]


def trained(build: Callable[..., Any], weights: Mapping[str, tuple[Shape, Array]], axes: Axes, batch: Any) -> Any:
    """Return the loss of a program of weights and their gradients; build takes program, mesh and a dict of tensors."""
    with tf.Graph().as_default():
        program = Program(num_devices=int(np.prod([size for _, size in axes])), dtype="float64")
        mesh = program.mesh("layer", list(axes))
        tensors = {name: program.weight(mesh, name, dims(*shape.items())) for name, (shape, _) in weights.items()}
        loss = build(program, mesh, tensors)
        values = {name: value for name, (_, value) in weights.items()}
        training = Training.start(program, loss, learning_rate=1.0, seed=0, values=values)
        before, value, after = training.weights(), training.step(batch).loss, training.weights()
        training.close()
    return value, {name: before[name] - after[name] for name in before}


def weighed(program: Program, mesh: Any, name: str, y: Any) -> Any:
    """Return the sum of a tensor's points, each with a factor of its own, which is fed."""
    own = layers.reshard(program.floats(name, y.shape.to_integer_list), mesh, y.shape.dims)
    return layers.arrange(layers.total(fn.multiply(y, own), y.shape.dims), [])


def check(cases: Mapping[str, Case], axes: Axes, batch: Mapping[str, Array] | None = None) -> None:
    """Compare the sum of what layers compute, each point with a factor of its own, and its gradients with PyTorch's.

    batch: inputs that layers declare.
    """
    given = {name: case.tensors() for name, case in cases.items()}
    results = {name: cases[name].oracle(*tensors) for name, tensors in given.items()}
    factors = {f"{name} factors": np.cos(np.arange(y.numel())).reshape(y.shape) for name, y in results.items()}
    expected = sum((y * torch.tensor(factors[f"{name} factors"])).sum() for name, y in results.items())
    expected.backward()

    def build(program: Program, mesh: Any, weights: dict[str, Any]) -> Any:
        own = {name: [weights[f"{name}/{i}"] for i in range(len(case.shapes))] for name, case in cases.items()}
        first, *others = (
            weighed(program, mesh, f"{name} factors", case.layer(program, mesh, *own[name]))
            for name, case in cases.items()
        )
        return sum(others, first)

    weights = {
        f"{name}/{i}": (shape, tensor.detach().numpy())
        for name, case in cases.items()
        for i, (shape, tensor) in enumerate(zip(case.shapes, given[name], strict=True))
    }
    value, found = trained(build, weights, axes, {**factors, **(batch or {})})
    assert abs(value - expected.item()) <= TOLERANCE * max(1, *(abs(y).max().item() for y in results.values()))
    for name, tensors in given.items():
        for i, x in enumerate(tensors):
            gradient = np.zeros(x.shape) if x.grad is None else x.grad.numpy()
            close = {"rtol": TOLERANCE, "atol": TOLERANCE, "err_msg": f"{name}/{i}"}
            np.testing.assert_allclose(found[f"{name}/{i}"], gradient, **close)


# -- functions of points

ONE: dict[str, Callable[..., Any]] = {
    "abs": torch.abs, "acos": torch.acos, "acosh": torch.acosh, "asin": torch.asin, "asinh": torch.asinh,
    "atan": torch.atan, "atanh": torch.atanh, "ceil": torch.ceil, "cos": torch.cos, "cosh": torch.cosh,
    "erf": torch.erf, "erfc": torch.erfc, "exp": torch.exp, "expm1": torch.expm1, "floor": torch.floor,
    "gelu": functional.gelu, "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "hard_swish": functional.hardswish, "identity": torch.clone, "log": torch.log, "log1p": torch.log1p,
    "log_sigmoid": functional.logsigmoid, "mish": functional.mish, "negate": torch.neg,
    "reciprocal": torch.reciprocal, "relu": torch.relu, "relu6": functional.relu6, "round": torch.round,
    "rsqrt": torch.rsqrt, "selu": functional.selu, "sigmoid": torch.sigmoid, "sign": torch.sign,
    "silu": functional.silu, "sin": torch.sin, "sinh": torch.sinh, "softsign": functional.softsign,
    "sqrt": torch.sqrt, "square": torch.square, "tan": torch.tan, "tanh": torch.tanh,
    "tanh_shrink": functional.tanhshrink,
}  # fmt: skip

NUMBERS: dict[str, tuple[tuple[float, ...], Callable[..., Any]]] = {
    "clip": ((-0.5, 0.1), lambda x: torch.clamp(x, -0.5, 0.1)),
    "leaky_relu": ((0.1,), lambda x: functional.leaky_relu(x, 0.1)),
    "elu": ((0.7,), lambda x: functional.elu(x, 0.7)),
    # PyTorch's own gradients of this one and of hard_sigmoid have a factor in 32 bits.
    "celu": ((0.7,), lambda x: torch.where(x > 0, x, 0.7 * torch.expm1(x.clamp(max=0) / 0.7))),
    "power": ((2.0,), torch.square),
    "softplus": ((2.0,), lambda x: torch.logaddexp(2 * x, torch.zeros(())) / 2),
    "thresholded_relu": ((0.5,), lambda x: torch.where(x > 0.5, x, 0.0)),
    "hard_sigmoid": ((1 / 6, 0.5), lambda x: torch.clamp(x / 6 + 0.5, 0, 1)),
    "quick_gelu": ((1.702,), lambda x: x * torch.sigmoid(1.702 * x)),
}

# The second operand is the same for all of b, the third for all of n.
SEVERAL: dict[str, Callable[..., Any]] = {
    "add": lambda x, y, z: x + y + z[:, None], "average": lambda x, y, z: (x + y + z[:, None]) / 3,
    "divide": torch.div, "equal": torch.eq, "floor_divide": lambda x, y: torch.floor(x / y), "greater": torch.gt,
    "greater_equal": torch.ge, "less": torch.lt, "less_equal": torch.le,
    "maximum": lambda x, y, z: torch.maximum(torch.maximum(x, y), z[:, None]),
    "minimum": lambda x, y, z: torch.minimum(torch.minimum(x, y), z[:, None]),
    "multiply": lambda x, y, z: x * y * z[:, None], "not_equal": torch.ne,
    "prelu": lambda x, y: torch.where(x > 0, x, y * x), "subtract": torch.sub,
    "where": lambda x, y, z: torch.where(x > 0, y, z[:, None]),
}  # fmt: skip

THREE = ("add", "average", "maximum", "minimum", "multiply", "where")
COMPARED = ("equal", "greater", "greater_equal", "less", "less_equal", "not_equal")


def points() -> dict[str, Case]:
    """Every function of points: of one tensor, with numbers, of several, of which some lack a dim."""
    x = np.random.default_rng(1).standard_normal((4, 6)) * 3
    narrow, positive = np.tanh(x) * 0.9, np.abs(x) + 0.01
    domains = {"acos": narrow, "asin": narrow, "atanh": narrow, "tan": narrow, "acosh": 1 + positive}
    domains |= dict.fromkeys(("log", "log1p", "rsqrt", "sqrt"), positive)
    found = {name: Case(of(name), oracle, [BN], [domains.get(name, x)]) for name, oracle in ONE.items()}
    found |= {name: Case(of(name, *numbers), oracle, [BN], [x]) for name, (numbers, oracle) in NUMBERS.items()}
    for name, oracle in SEVERAL.items():
        # Some points are equal to those that they are compared with.
        operands = [np.maximum(x, 0) if name == "where" else x, x[2] if name in COMPARED else x[1] * 0.7, x[:, 3] * 0.6]
        number = 3 if name in THREE else 2
        found[name] = Case(of(name), truths(oracle), [BN, {"n": 6}, {"b": 4}][:number], operands[:number])
    return found


BN: Shape = {"b": 4, "n": 6}


def of(name: str, *numbers: float) -> Callable[..., Any]:
    return lambda _, __, *xs: getattr(fn, name)(*xs, *numbers)


def truths(oracle: Callable[..., Any]) -> Callable[..., Any]:
    """What is true or false as a number, of which nothing depends on the operands."""
    return lambda *xs: oracle(*xs).double() + 0 * xs[0]


SPLITS: tuple[Axes, ...] = ((("n", 2),), (("b", 2), ("n", 3)))


def test_functions_of_points() -> None:
    """Where b is split, what lacks it gets the sum of what its copies get."""
    cases = points()
    assert set(cases) == set(POINTWISE)
    check(cases, [("b", 2)])


# -- functions over dims, and moves


def over(function: Any) -> Callable[..., Any]:
    return lambda _, __, x: function(x, [x.shape.dims[1]])


MATRIX: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "one tensor in two places": (lambda _, __, x: fn.multiply(x, fn.add(x, x)), lambda x: x * (x + x)),
    "total": (over(layers.total), lambda x: x.sum(1)),
    "mean": (over(layers.mean), lambda x: x.mean(1)),
    "greatest": (over(layers.greatest), lambda x: x.amax(1)),
    "greatest of equals": (over(lambda x, d: layers.greatest(fn.round(x), d)), lambda x: x.round().amax(1)),
    "equal parts": (over(lambda x, d: layers.greatest(fn.clip(x, -9.0, 0.1), d)), lambda x: x.clamp(-9, 0.1).amax(1)),
    "least": (over(layers.least), lambda x: x.amin(1)),
    "softmax": (over(layers.softmax), lambda x: x.softmax(1)),
    "log_softmax": (over(layers.log_softmax), lambda x: x.log_softmax(1)),
    "turned": (lambda _, __, x: layers.arrange(x, x.shape.dims[::-1]), lambda x: x.T),
    "repeated": (
        lambda _, __, x: layers.arrange(x, [*x.shape.dims, *dims(k=3)]),
        lambda x: x[..., None].expand(4, 6, 3),
    ),
    "piece": (lambda _, __, x: layers.piece(x, "n", 1, 4), lambda x: x[:, 1:5]),
    "padded": (
        lambda _, m, x: layers.padded(x, m, [x.shape.dims[0], *dims(n=12)], [0, 2], [4, 6]),
        lambda x: functional.pad(x, (2, 4)),
    ),
    "concat": (
        lambda _, m, x: layers.concat([x, fn.square(x)], m, [x.shape.dims[0], *dims(n=12)], along=dims(n=12)[0]),
        lambda x: torch.cat([x, x * x], 1),
    ),
    "causal": (
        lambda _, __, x: layers.softmax(layers.without_later_keys(x, *x.shape.dims), [x.shape.dims[1]]),
        lambda x: x.masked_fill(torch.ones(4, 6).triu(1).bool(), float("-inf")).softmax(1),
    ),
}


def normalisation(over: int, oracle: Callable[..., Any]) -> Case:
    def layer(_: Any, __: Any, x: Any, scale: Any, shift: Any) -> Any:
        return layers.normalise(x, scale, shift, [x.shape.dims[over]], epsilon=0.1)

    return Case(layer, oracle, [BN, {"n": 6}, {"n": 6}])


@pytest.mark.parametrize("axes", SPLITS)
def test_functions_over_dims_and_moves(axes: Axes) -> None:
    labels = np.array([0, 5, 2, 2], np.int32)

    def loss(program: Program, mesh: Any, x: Any) -> Any:
        b, n = x.shape.dims
        return layers.softmax_loss(x, layers.reshard(program.indices("labels", [4], below=6), mesh, [b]), n)

    cases = {name: Case(*functions, [BN]) for name, functions in MATRIX.items()}
    cases["layer normalisation"] = normalisation(1, lambda x, w, b: functional.layer_norm(x, [6], w, b, eps=0.1))
    cases["batch normalisation"] = normalisation(
        0, lambda x, w, b: functional.batch_norm(x, None, None, w, b, training=True, eps=0.1)
    )
    cases["loss"] = Case(loss, lambda x: functional.cross_entropy(x, torch.tensor(labels).long()), [BN])
    check(cases, axes, {"labels": labels})


@pytest.mark.parametrize("axes", [(), (("c", 2),), (("b", 2), ("n", 3)), (("c", 2), ("n", 3))])
def test_products(axes: Axes) -> None:
    def layer(_: Any, __: Any, x: Any, w: Any) -> Any:
        return layers.product(x, w, [x.shape.dims[0], w.shape.dims[1]])

    check({"product": Case(layer, lambda x, w: x @ w, [{"b": 4, "c": 2}, {"c": 2, "n": 6}])}, axes)


@pytest.mark.parametrize("axes", [(), (("v", 3), ("d", 2)), (("b", 2), ("v", 2)), (("s", 3),)])
def test_looking_up(axes: Axes) -> None:
    indices = np.array([[0, 5, 3], [3, 3, 1]], np.int32)

    def layer(program: Program, mesh: Any, table: Any) -> Any:
        own = layers.reshard(program.indices("indices", [2, 3], below=6), mesh, dims(b=2, s=3))
        return layers.lookup(table, own, *table.shape.dims)

    case = Case(layer, lambda table: table[torch.tensor(indices).long()], [{"v": 6, "d": 4}])
    check({"lookup": case}, axes, {"indices": indices})


# -- windows


def image(size: int = 8) -> Shape:
    return {"b": 2, "c": 4, "y": size, "z": size}


def laid(mesh: Any, x: Any, outs: int, **options: int) -> tuple[Any, list[Any], list[Any]]:
    """Return an image as windows of 3 by 3 points read it, the windows and the dims of what is computed."""
    b, c, *_ = x.shape.dims
    h, w, r, s = dims(h=outs, w=outs, r=3, s=3)
    windows = [layers.window(out, own, of=x.shape.dims[2].size, **options) for out, own in ((h, r), (w, s))]
    return layers.reshard(x, mesh, [b, c, *windows]), windows, [b, c, h, w]


def pooling(function: str, dilation: int) -> Case:
    def layer(_: Any, mesh: Any, x: Any) -> Any:
        own, windows, out = laid(mesh, x, 6 if dilation == 1 else 4, dilation=dilation)
        return layers.pool(own, windows, out, function=function)

    def oracle(x: Any) -> Any:
        if function == "max":
            return functional.max_pool2d(x, 3, 1, dilation=dilation)
        kernel = torch.full((4, 1, 3, 3), 1 / 9, dtype=torch.float64)
        return functional.conv2d(x, kernel, dilation=dilation, groups=4)

    return Case(layer, oracle, [image()])


WINDOWED: tuple[Axes, ...] = ((("h", 2),), (("b", 2), ("c", 2)), (("h", 2), ("w", 2)))


@pytest.mark.parametrize("axes", WINDOWED)
def test_pooling(axes: Axes) -> None:
    check({f"{function} {n}": pooling(function, n) for function in ("max", "mean") for n in (1, 2)}, axes)


def convolution(size: int, outs: int, **options: int) -> Case:
    def layer(_: Any, mesh: Any, x: Any, w: Any) -> Any:
        own, windows, (b, _, *spatial) = laid(mesh, x, outs, **options)
        return layers.convolve(own, w, windows, [b, w.shape.dims[0], *spatial])

    shapes = [image(size), {"n": 6, "c": 4, "r": 3, "s": 3}]
    return Case(layer, lambda x, w: functional.conv2d(x, w, **options), shapes)


@pytest.mark.parametrize("axes", [*WINDOWED, (("n", 3),), (("r", 3),)])
def test_convolutions(axes: Axes) -> None:
    check(
        {"plain": convolution(8, 6), "dilated": convolution(8, 4, dilation=2), "strided": convolution(9, 4, stride=2)},
        axes,
    )


def grouped(inputs: int) -> Case:
    def layer(_: Any, mesh: Any, x: Any, w: Any) -> Any:
        b, g, c, *_ = x.shape.dims
        h, v, r, s = dims(h=6, w=6, r=3, s=3)
        windows = [layers.window(h, r, of=8), layers.window(v, s, of=8)]
        return layers.convolve(layers.reshard(x, mesh, [b, g, c, *windows]), w, windows, [b, g, w.shape.dims[1], h, v])

    def oracle(x: Any, w: Any) -> Any:
        y = functional.conv2d(x.reshape(2, 4 * inputs, 8, 8), w.reshape(12, inputs, 3, 3), groups=4)
        return y.reshape(2, 4, 3, 6, 6)

    return Case(
        layer, oracle, [{"b": 2, "g": 4, "c": inputs, "y": 8, "z": 8}, {"g": 4, "n": 3, "c": inputs, "r": 3, "s": 3}]
    )


@pytest.mark.parametrize("axes", [(), (("g", 4), ("h", 2)), (("b", 2),)])
def test_convolutions_in_groups(axes: Axes) -> None:
    check({f"of {inputs}": grouped(inputs) for inputs in (1, 2)}, axes)


# -- kernels


@pytest.mark.parametrize("axes", SPLITS)
def test_dropout_drops_the_same_points_of_the_gradient(axes: Axes) -> None:
    """The mask is drawn again for the gradient; a point's factor is what its gradient is."""
    x = np.random.default_rng(0).standard_normal((4, 6)).astype(np.float32)
    value, found = trained(
        lambda p, m, xs: weighed(p, m, "ones", layers.dropout(xs["x"], p.mask_key, rate=0.5)),
        {"x": (BN, x)},
        axes,
        {"ones": np.ones((4, 6))},
    )
    assert set(np.unique(found["x"])) == {0.0, 2.0}
    np.testing.assert_allclose(value, (x * found["x"]).sum(), rtol=TOLERANCE)


def attending(causal: bool) -> Case:
    def oracle(*tensors: Any) -> Any:
        # PyTorch has the heads before the positions.
        q, k, v = (x.transpose(1, 2) for x in tensors)
        return functional.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=0.3).transpose(1, 2)

    keys = {"b": 2, "t": 4, "h": 2, "k": 2}
    layer = lambda _, __, q, k, v: layers.attention(q, k, v, scale=0.3, causal=causal)  # noqa: E731
    return Case(layer, oracle, [{"b": 2, "s": 4, "h": 2, "k": 2}, keys, keys])


@pytest.mark.parametrize("axes", [(), (("t", 2),), (("s", 2), ("h", 2)), (("k", 2), ("t", 2)), (("b", 2),)])
def test_attention(axes: Axes) -> None:
    check({"whole": attending(causal=False), "causal": attending(causal=True)}, axes)


# -- what is refused


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (lambda x, _: fn.nothing(x), "'nothing' of 1 tensors cannot be computed"),
        (lambda x, _: layers.piece(x, "n", 4, 3), r"has no \[4, 7\) of n; correct the piece"),
        (lambda x, named: layers.arrange(x, [named[0]]), "cannot be laid out as b=4"),
        (lambda x, named: layers.mean(layers.mean(x, [named[1]]), [named[1]]), "over n, which it has not"),
    ],
)
def test_layers_that_do_not_fit_are_refused(layer: Any, message: str) -> None:
    with tf.Graph().as_default():
        program, named = Program(num_devices=2), dims(b=4, n=6)
        x = layers.reshard(program.floats("x", [4, 6]), program.mesh("layer", [("n", 2)]), named)
        with pytest.raises(ProgramError, match=message):
            layer(x, named)
