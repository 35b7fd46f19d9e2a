"""Gradients of what programs are written with: beside PyTorch's of the same function, under many splits."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

from pase.targets.mesh_tensorflow.primitives.compat import tf
from pase.targets.mesh_tensorflow.runtime.layers import (
    arrange,
    attention,
    concat,
    convolve,
    dims,
    dropout,
    fn,
    greatest,
    least,
    log_softmax,
    lookup,
    mean,
    normalise,
    padded,
    piece,
    pool,
    product,
    reshard,
    softmax,
    softmax_loss,
    total,
    window,
    without_later_keys,
)
from pase.targets.mesh_tensorflow.runtime.program import Program
from pase.targets.mesh_tensorflow.runtime.training import Training

Array = np.ndarray[Any, Any]
Axes = Sequence[tuple[str, int]]
Shape = dict[str, int]

TOLERANCE = 1e-12


def trained(build: Callable[..., Any], shapes: dict[str, Shape], axes: Axes, batch: Any = None) -> tuple[Any, ...]:
    """Return the loss of a program of weights, these, and their gradients; build takes program, mesh and tensors."""
    num_devices = int(np.prod([size for _, size in axes]))
    with tf.Graph().as_default():
        program = Program(num_devices=num_devices, dtype="float64")
        mesh = program.mesh("layer", list(axes))
        weights = {
            name: program.weight(mesh, name, dims(*shape.items()), deviation=1.0) for name, shape in shapes.items()
        }
        loss = build(program, mesh, *weights.values())
        training = Training.start(program, loss, learning_rate=1.0, seed=0)
        before = training.weights()
        value = training.step(batch or {}).loss
        after = training.weights()
        training.close()
    return value, before, {name: before[name] - after[name] for name in before}


def factors(shape: Sequence[int]) -> Array:
    """Numbers that tell every point of a result from every other."""
    return np.cos(np.arange(np.prod(shape))).reshape(shape)


def weighed(program: Program, mesh: Any, y: Any) -> Any:
    """Return the sum of a tensor's points, each with a factor of its own."""
    name = f"factors_{len(program.inputs)}"
    own = reshard(program.floats(name, y.shape.to_integer_list), mesh, y.shape.dims)
    return arrange(total(fn.multiply(y, own), y.shape.dims), [])


def check(
    layer: Callable[..., Any],
    oracle: Callable[..., Any],
    shapes: dict[str, Shape],
    axes: Axes,
    out: Sequence[int],
) -> None:
    """Compare a function of weights, weighed, with PyTorch's; layer takes the mesh and the tensors."""
    batch = {"factors_0": factors(out)}
    value, before, found = trained(lambda p, m, *xs: weighed(p, m, layer(m, *xs)), shapes, axes, batch)
    own = {name: torch.tensor(array, requires_grad=True) for name, array in before.items()}
    y = (oracle(*own.values()) * torch.tensor(batch["factors_0"])).sum()
    y.backward()
    assert abs(value - y.item()) <= TOLERANCE * max(1, abs(y.item()))
    for name, tensor in own.items():
        expected = np.zeros(tensor.shape) if tensor.grad is None else tensor.grad.numpy()
        np.testing.assert_allclose(found[name], expected, rtol=TOLERANCE, atol=TOLERANCE, err_msg=name)


MATRIX: dict[str, Shape] = {"x": {"b": 4, "n": 6}}
SPLITS: tuple[Axes, ...] = ((("n", 2),), (("b", 2), ("n", 3)))

POINTS: dict[str, Callable[..., Any]] = {
    "abs": torch.abs, "atan": torch.atan, "cos": torch.cos, "erf": torch.erf, "exp": torch.exp,
    "gelu": functional.gelu, "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "hard_swish": functional.hardswish, "identity": torch.clone, "log_sigmoid": functional.logsigmoid,
    "mish": functional.mish, "negate": torch.neg, "reciprocal": torch.reciprocal, "relu": torch.relu,
    "relu6": functional.relu6, "round": torch.round, "selu": functional.selu, "sigmoid": torch.sigmoid,
    "sign": torch.sign, "silu": functional.silu, "softsign": functional.softsign, "square": torch.square,
    "tanh": torch.tanh, "tanh_shrink": functional.tanhshrink,
}  # fmt: skip


@pytest.mark.parametrize("name", POINTS)
def test_functions_of_points(name: str) -> None:
    check(lambda _, x: getattr(fn, name)(x), POINTS[name], MATRIX, [("b", 2), ("n", 2)], [4, 6])


TWO: dict[str, Callable[..., Any]] = {
    "add": torch.add, "subtract": torch.sub, "multiply": torch.mul, "divide": torch.div,
    "maximum": torch.maximum, "minimum": torch.minimum, "prelu": lambda x, y: torch.where(x > 0, x, y * x),
    "average": lambda x, y: (x + y) / 2, "less": lambda x, y: (x < y).double() + 0 * (x + y),
}  # fmt: skip


@pytest.mark.parametrize("axes", SPLITS)
@pytest.mark.parametrize("name", TWO)
def test_a_tensor_that_lacks_a_dim_gets_the_sum_of_what_its_copies_get(name: str, axes: Axes) -> None:
    """The second operand is the same for all of b."""
    check(lambda _, x, y: getattr(fn, name)(x, y), TWO[name], {**MATRIX, "y": {"n": 6}}, axes, [4, 6])


NUMBERS: dict[str, tuple[tuple[float, ...], Callable[..., Any]]] = {
    "clip": ((-0.5, 0.1), lambda x: torch.clamp(x, -0.5, 0.1)),
    "leaky_relu": ((0.1,), lambda x: functional.leaky_relu(x, 0.1)),
    "elu": ((0.7,), lambda x: functional.elu(x, 0.7)),
    # PyTorch's own gradients of this one and of hard_sigmoid have a factor in 32 bits.
    "celu": ((0.7,), lambda x: torch.where(x > 0, x, 0.7 * torch.expm1(x.clamp(max=0) / 0.7))),
    "power": ((2.0,), torch.square),
    "softplus": ((2.0,), lambda x: functional.softplus(x, 2.0)),
    "thresholded_relu": ((0.5,), lambda x: torch.where(x > 0.5, x, 0.0)),
    "hard_sigmoid": ((1 / 6, 0.5), lambda x: torch.clamp(x / 6 + 0.5, 0, 1)),
    "quick_gelu": ((1.702,), lambda x: x * torch.sigmoid(1.702 * x)),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_functions_with_numbers(name: str) -> None:
    numbers, oracle = NUMBERS[name]
    check(lambda _, x: getattr(fn, name)(x, *numbers), oracle, MATRIX, [("n", 2)], [4, 6])


@pytest.mark.parametrize("axes", SPLITS)
def test_one_tensor_in_two_places(axes: Axes) -> None:
    check(lambda _, x: fn.multiply(x, fn.add(x, x)), lambda x: x * (x + x), MATRIX, axes, [4, 6])


def over(function: Any) -> Callable[..., Any]:
    return lambda _, x: function(x, [x.shape.dims[1]])


REDUCTIONS: dict[str, tuple[Callable[..., Any], Callable[..., Any], list[int]]] = {
    "total": (over(total), lambda x: x.sum(1), [4]),
    "mean": (over(mean), lambda x: x.mean(1), [4]),
    "greatest": (over(greatest), lambda x: x.amax(1), [4]),
    "greatest of equals": (over(lambda x, d: greatest(fn.round(x), d)), lambda x: x.round().amax(1), [4]),
    "equal parts": (over(lambda x, d: greatest(fn.clip(x, -9.0, 0.1), d)), lambda x: x.clamp(-9, 0.1).amax(1), [4]),
    "least": (over(least), lambda x: x.amin(1), [4]),
    "softmax": (over(softmax), lambda x: x.softmax(1), [4, 6]),
    "log_softmax": (over(log_softmax), lambda x: x.log_softmax(1), [4, 6]),
    "turned": (lambda _, x: arrange(x, x.shape.dims[::-1]), lambda x: x.T, [6, 4]),
    "repeated": (
        lambda _, x: arrange(x, [*x.shape.dims, *dims(k=3)]), lambda x: x[..., None].expand(4, 6, 3), [4, 6, 3]
    ),
    "piece": (lambda _, x: piece(x, "n", 1, 4), lambda x: x[:, 1:5], [4, 4]),
    "padded": (
        lambda m, x: padded(x, m, [x.shape.dims[0], *dims(n=12)], [0, 2], [4, 6]),
        lambda x: functional.pad(x, (2, 4)),
        [4, 12],
    ),
    "concat": (
        lambda m, x: concat([x, fn.square(x)], m, [x.shape.dims[0], *dims(n=12)], along=dims(n=12)[0]),
        lambda x: torch.cat([x, x * x], 1),
        [4, 12],
    ),
    "causal": (
        lambda _, x: softmax(without_later_keys(x, *x.shape.dims), [x.shape.dims[1]]),
        lambda x: x.masked_fill(torch.ones(4, 6).triu(1).bool(), float("-inf")).softmax(1),
        [4, 6],
    ),
}  # fmt: skip


@pytest.mark.parametrize("axes", SPLITS)
@pytest.mark.parametrize("name", REDUCTIONS)
def test_functions_over_dims_and_moves(name: str, axes: Axes) -> None:
    layer, oracle, out = REDUCTIONS[name]
    check(layer, oracle, MATRIX, axes, out)


@pytest.mark.parametrize("axes", [(), (("c", 2),), (("b", 2), ("n", 3)), (("c", 2), ("n", 3))])
def test_products(axes: Axes) -> None:
    shapes = {"x": {"b": 4, "c": 2}, "w": {"c": 2, "n": 6}}
    check(lambda _, x, w: product(x, w, [x.shape.dims[0], w.shape.dims[1]]), lambda x, w: x @ w, shapes, axes, [4, 6])


@pytest.mark.parametrize("axes", [(), (("v", 2),), (("v", 3), ("d", 2)), (("b", 2), ("v", 2)), (("s", 3),)])
def test_looking_up(axes: Axes) -> None:
    indices = np.array([[0, 5, 3], [3, 3, 1]], np.int32)

    def build(program: Program, mesh: Any, table: Any) -> Any:
        b, s = dims(b=2, s=3)
        own = reshard(program.indices("indices", [2, 3], below=6), mesh, [b, s])
        found = lookup(table, own, *table.shape.dims)
        weights = reshard(program.floats("factors", [2, 3, 4]), mesh, found.shape.dims)
        return arrange(total(fn.multiply(found, weights), found.shape.dims), [])

    batch = {"indices": indices, "factors": factors([2, 3, 4])}
    _, _, found = trained(build, {"table": {"v": 6, "d": 4}}, axes, batch)
    expected = np.zeros((6, 4))
    np.add.at(expected, indices, batch["factors"])
    np.testing.assert_allclose(found["table"], expected, rtol=TOLERANCE, atol=TOLERANCE)


def image(size: int = 8) -> dict[str, Shape]:
    return {"x": {"b": 2, "c": 4, "y": size, "z": size}}


def laid(mesh: Any, x: Any, kernel: int, outs: int, **options: int) -> tuple[Any, list[Any], list[Any]]:
    """Return an image as windows read it, the windows and the dims of what is computed."""
    b, c, *_ = x.shape.dims
    h, w, r, s = dims(h=outs, w=outs, r=kernel, s=kernel)
    windows = [window(out, own, of=x.shape.dims[2].size, **options) for out, own in ((h, r), (w, s))]
    fill = float("-inf") if options.get("pad") else 0.0
    return reshard(x, mesh, [b, c, *windows], fill=fill), windows, [b, c, h, w]


WINDOWED: tuple[Axes, ...] = ((("h", 2),), (("b", 2), ("c", 2)), (("h", 2), ("w", 2)))


@pytest.mark.parametrize("axes", WINDOWED)
@pytest.mark.parametrize("function", ["max", "mean"])
@pytest.mark.parametrize("dilation", [1, 2])
def test_pooling(function: str, dilation: int, axes: Axes) -> None:
    outs = 6 if dilation == 1 else 4

    def layer(mesh: Any, x: Any) -> Any:
        own, windows, out = laid(mesh, x, 3, outs, dilation=dilation)
        return pool(own, windows, out, function=function)

    def oracle(x: Any) -> Any:
        if function == "max":
            return functional.max_pool2d(x, 3, 1, dilation=dilation)
        kernel = torch.full((4, 1, 3, 3), 1 / 9, dtype=torch.float64)
        return functional.conv2d(x, kernel, dilation=dilation, groups=4)

    check(layer, oracle, image(), axes, [2, 4, outs, outs])


@pytest.mark.parametrize("axes", [*WINDOWED, (("n", 3),), (("r", 3),)])
@pytest.mark.parametrize("options", [{}, {"dilation": 2}, {"stride": 2}])
def test_convolutions(options: dict[str, int], axes: Axes) -> None:
    outs = {"dilation": 4, "stride": 3}.get(next(iter(options), ""), 6)
    axes = [(name, 1 if outs % size and name in ("h", "w") else size) for name, size in axes]
    axes = [(name, size) for name, size in axes if size > 1]

    def layer(mesh: Any, x: Any, w: Any) -> Any:
        own, windows, (b, _, *spatial) = laid(mesh, x, 3, outs, **options)
        return convolve(own, w, windows, [b, w.shape.dims[0], *spatial])

    shapes = {**image(), "w": {"n": 6, "c": 4, "r": 3, "s": 3}}
    check(layer, lambda x, w: functional.conv2d(x, w, **options), shapes, axes, [2, 6, outs, outs])


@pytest.mark.parametrize("axes", [(), (("g", 2),), (("g", 4), ("h", 2)), (("b", 2),)])
@pytest.mark.parametrize("inputs", [1, 2])
def test_convolutions_in_groups(inputs: int, axes: Axes) -> None:
    def layer(mesh: Any, x: Any, w: Any) -> Any:
        b, g, c, *_ = x.shape.dims
        h, v, r, s = dims(h=6, w=6, r=3, s=3)
        windows = [window(h, r, of=8), window(v, s, of=8)]
        return convolve(reshard(x, mesh, [b, g, c, *windows]), w, windows, [b, g, w.shape.dims[1], h, v])

    shapes: dict[str, Shape] = {
        "x": {"b": 2, "g": 4, "c": inputs, "y": 8, "z": 8}, "w": {"g": 4, "n": 3, "c": inputs, "r": 3, "s": 3},
    }  # fmt: skip

    def oracle(x: Any, w: Any) -> Any:
        y = functional.conv2d(x.reshape(2, 4 * inputs, 8, 8), w.reshape(12, inputs, 3, 3), groups=4)
        return y.reshape(2, 4, 3, 6, 6)

    check(layer, oracle, shapes, axes, [2, 4, 3, 6, 6])


@pytest.mark.parametrize("axes", SPLITS)
def test_dropout_drops_the_same_points_of_the_gradient(axes: Axes) -> None:
    """The mask is drawn again for the gradient; a point's factor is what its gradient is."""
    value, before, found = trained(
        lambda p, m, x: weighed(p, m, dropout(x, p.mask_key, rate=0.5)), MATRIX, axes, {"factors_0": np.ones((4, 6))}
    )
    assert set(np.unique(found["x"])) == {0.0, 2.0}
    np.testing.assert_allclose(value, (before["x"] * found["x"]).sum(), rtol=TOLERANCE)


# -- fused kernels


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("axes", [(), (("t", 2),), (("s", 2), ("h", 2)), (("k", 2), ("t", 2)), (("b", 2),)])
def test_attention(axes: Axes, causal: bool) -> None:
    def oracle(*tensors: Any) -> Any:
        # PyTorch has the heads before the positions.
        q, k, v = (x.transpose(1, 2) for x in tensors)
        return functional.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=0.3).transpose(1, 2)

    shapes = {"q": {"b": 2, "s": 4, "h": 2, "k": 2}, "k": {"b": 2, "t": 4, "h": 2, "k": 2}}
    shapes["v"] = shapes["k"]
    check(lambda _, q, k, v: attention(q, k, v, scale=0.3, causal=causal), oracle, shapes, axes, [2, 4, 2, 2])


@pytest.mark.parametrize("axes", SPLITS)
@pytest.mark.parametrize("over", [0, 1], ids=["batch", "layer"])
def test_normalisations(over: int, axes: Axes) -> None:
    def oracle(x: Any, scale: Any, shift: Any) -> Any:
        if over == 0:
            return functional.batch_norm(x, None, None, scale, shift, training=True, eps=0.1)
        return functional.layer_norm(x, [6], scale, shift, eps=0.1)

    def layer(_: Any, x: Any, scale: Any, shift: Any) -> Any:
        return normalise(x, scale, shift, [x.shape.dims[over]], epsilon=0.1)

    check(layer, oracle, {**MATRIX, "scale": {"n": 6}, "shift": {"n": 6}}, axes, [4, 6])


@pytest.mark.parametrize("axes", SPLITS)
def test_softmax_with_its_loss(axes: Axes) -> None:
    labels = np.array([0, 5, 2, 2], np.int32)

    def fused(program: Program, mesh: Any, x: Any) -> Any:
        b, n = x.shape.dims
        return softmax_loss(x, reshard(program.indices("labels", [4], below=6), mesh, [b]), n)

    value, before, found = trained(fused, MATRIX, axes, {"labels": labels})
    x = torch.tensor(before["x"], requires_grad=True)
    expected = functional.cross_entropy(x, torch.tensor(labels, dtype=torch.int64))
    expected.backward()
    np.testing.assert_allclose(value, expected.item(), rtol=TOLERANCE)
    np.testing.assert_allclose(found["x"], x.grad.numpy(), rtol=TOLERANCE, atol=TOLERANCE)
