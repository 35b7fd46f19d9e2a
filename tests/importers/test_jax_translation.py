"""JAX's primitives: a trace, run in NumPy operator by operator, gives what the function itself gives."""

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest

from pase.importers.ir import ops
from pase.importers.ir.trace import Node, Trace, Use
from pase.importers.jax.function import JaxFrontEnd
from pase.importers.passes import PASSES, run_passes
from tests.importers.traces import Array, evaluate

jax = pytest.importorskip("jax")
import jax.numpy as jnp  # noqa: E402
from jax import lax  # noqa: E402

Function = Callable[..., Any]


def trace_of(function: Function, *arrays: Any) -> Trace:
    """The trace of a function, none of whose arguments are parameters."""
    return JaxFrontEnd().trace({"function": function, "inputs": arrays}, batch=None, arguments={})


def shaped(*shape: int, low: int = 0, high: int = 0) -> Array:
    """Random numbers; whole ones where there is a limit."""
    rng = np.random.default_rng(len(shape) + sum(shape))
    if high:
        return rng.integers(low, high, shape).astype(np.int32)
    return rng.standard_normal(shape).astype(np.float32)


def run(trace: Trace, arrays: tuple[Array, ...]) -> Array:
    """What a trace computes. Of constants, those that are read are numbers, which the operators tell."""
    inputs = [leaf.value for leaf in trace.leaves if leaf.role == "input"]
    held = {value.name: array for value, array in zip(inputs, arrays, strict=False)}
    # Indices that were computed of those that are fed are fed instead.
    held |= {value.name: arrays[1].reshape(value.shape) for value in inputs[len(arrays) :]}
    (output,) = trace.outputs
    return evaluate(trace, held)[output]


MOVES: dict[str, tuple[Function, tuple[Array, ...]]] = {
    "reshape": (lambda x: x.reshape(6, 4), (shaped(2, 3, 4),)),
    "squeeze": (lambda x: jnp.squeeze(x, 1), (shaped(2, 1, 4),)),
    "expand": (lambda x: x[:, None, :], (shaped(2, 4),)),
    "transpose": (lambda x: jnp.transpose(x, (2, 0, 1)), (shaped(2, 3, 4),)),
    "broadcast": (lambda x: jnp.broadcast_to(x[:, None], (3, 5, 4)), (shaped(3, 4),)),
    "unstack": (lambda x: lax.unstack(x, axis=1)[2] if hasattr(lax, "unstack") else x[:, 2], (shaped(4, 7),)),
    "tile": (lambda x: jnp.tile(x, (2, 3)), (shaped(3, 4),)),
    "repeat": (lambda x: jnp.repeat(x, 3, axis=1), (shaped(3, 4),)),
    "slice": (lambda x: x[1:3, ::2], (shaped(4, 7),)),
    "last": (lambda x: x[:, -1], (shaped(4, 7),)),
    "split": (lambda x: jnp.split(x, [2, 5], axis=1)[1], (shaped(4, 7),)),
    "stack": (lambda x, y: jnp.stack([x, y, x], axis=1), (shaped(4, 7), shaped(4, 7) + 1)),
    "concatenate": (lambda x, y: jnp.concatenate([x, y], axis=1), (shaped(4, 7), shaped(4, 2))),
    "roll": (lambda x: jnp.roll(x, 2, axis=1), (shaped(4, 7),)),
    "pad": (lambda x: jnp.pad(x, ((1, 0), (2, 3))), (shaped(4, 7),)),
    "crop": (lambda x: lax.pad(x, 0.0, ((-1, 0, 0), (0, -2, 0))), (shaped(4, 7),)),
    "dynamic slice": (lambda x: lax.dynamic_slice(x, (1, 9), (2, 3)), (shaped(4, 7),)),
    "dynamic index": (lambda x: lax.dynamic_index_in_dim(x, 2, axis=1), (shaped(4, 7),)),
    "piece of known places": (lambda x: x[:, jnp.arange(3) + 2], (shaped(4, 7, 2),)),
    "one known place": (lambda x: jnp.take(x, jnp.asarray(3), axis=1), (shaped(4, 7, 2),)),
    "known places from the front": (lambda x: x[jnp.arange(2)], (shaped(4, 7),)),
    "rows": (lambda x, i: x[i], (shaped(5, 3), shaped(2, 4, high=5))),
    "rows of tables": (lambda x, i: x[i], (shaped(5, 3, 2), shaped(4, high=5))),
    "columns": (lambda x, i: x[:, i], (shaped(5, 3, 2), shaped(2, 4, high=3))),
    "take along": (lambda x, i: jnp.take_along_axis(x, i, axis=1), (shaped(3, 4, 5), shaped(3, 2, 5, high=4))),
    "take one along": (lambda x, i: jnp.take_along_axis(x, i[..., None], axis=-1), (shaped(3, 4), shaped(3, high=4))),
    "take along the first": (lambda x, i: jnp.take_along_axis(x, i, axis=0), (shaped(3, 4), shaped(2, 4, high=3))),
    "one of every row": (lambda x, i: x[jnp.arange(5), i], (shaped(5, 3), shaped(5, high=3))),
    "take": (lambda x, i: jnp.take(x, i, axis=2), (shaped(5, 3, 4), shaped(6, high=4))),
}


@pytest.mark.parametrize("name", MOVES)
def test_what_moves_data_moves_it_there(name: str) -> None:
    function, arrays = MOVES[name]
    trace = trace_of(function, *arrays)
    assert not any(isinstance(node.op, ops.Generic) and node.inputs for node in trace.nodes)
    # Known places are computed of nothing, and are nobody's any more once the piece is told.
    dropped = run_passes(trace)[1 + list(PASSES).index("drop constants and indices")]
    for told in (replace(trace, nodes=_needed(trace)), dropped):
        np.testing.assert_array_equal(run(told, arrays), np.asarray(function(*arrays)))


def _needed(trace: Trace) -> tuple[Node, ...]:
    """The nodes that the outputs are computed of."""
    wanted, kept = set(trace.outputs), []
    for node in reversed(trace.nodes):
        if any(value.name in wanted for value in node.outputs):
            kept.append(_plain_index(trace, node))
            wanted.update(use.value for use in kept[-1].inputs)
    return tuple(reversed(kept))


def _plain_index(trace: Trace, node: Node) -> Node:
    """A look-up by the indices that are fed: JAX makes negative ones count from the end before it."""
    if not isinstance(node.op, ops.Lookup | ops.Gather):
        return node
    indices = next(leaf.value for leaf in trace.leaves if leaf.role == "input" and not leaf.value.is_float)
    return replace(node, inputs=(node.inputs[0], Use(value=indices.name)))


EQUATIONS = ("ij,jk->ik", "ij,jk->ki", "bij,bkj->bki", "abc,cbd->bad", "bshk,bthk->bhst", "bhst,bthk->bshk", "i,j->ij")


@pytest.mark.parametrize("equation", [*EQUATIONS, "bij,bj->bi", "bsd,dhk->bshk", "bshk,hkd->bsd", "gecm,gsec->gsm"])
def test_products_sum_over_the_right_dims(equation: str) -> None:
    first, _, second = equation.partition("->")[0].partition(",")
    extents = {letter: 2 + i for i, letter in enumerate(sorted(set(first + second)))}
    arrays = tuple(shaped(*(extents[letter] for letter in own)) for own in (first, second))
    trace = trace_of(lambda x, y: jnp.einsum(equation, x, y), *arrays)
    assert sum(isinstance(node.op, ops.Contract) for node in trace.nodes) == 1
    np.testing.assert_allclose(run(trace, arrays), np.einsum(equation, *arrays), rtol=1e-4, atol=1e-5)


POINTS: dict[str, tuple[Function, tuple[Array, ...]]] = {
    "arithmetic": (lambda x, y: (x + y) * (x - y) / (y * y + 3), (shaped(3, 4), shaped(3, 4) + 1)),
    "broadcast": (lambda x, y: x + y, (shaped(3, 4), shaped(4))),
    "square": (lambda x: x**2, (shaped(3, 4),)),
    "silu": (jax.nn.silu, (shaped(3, 4),)),
    "relu": (jax.nn.relu, (shaped(3, 4),)),
    "where": (lambda m, x, y: jnp.where(m > 0, x, y), (shaped(3, 1), shaped(3, 4), shaped(3, 4) + 1)),
    "softmax": (lambda x: jnp.exp(x) / jnp.sum(jnp.exp(x), axis=-1, keepdims=True), (shaped(3, 4),)),
    "mean": (lambda x: jnp.mean(x, axis=(0, 2)), (shaped(3, 4, 5),)),
    "maximum": (lambda x: jnp.max(x, axis=1), (shaped(3, 4, 5),)),
    "argmax": (lambda x: jnp.argmax(x, axis=1), (shaped(3, 4, 5),)),
    "cast": (lambda x: x.astype(jnp.bfloat16).astype(jnp.float32) * 0 + x, (shaped(3, 4),)),
}


@pytest.mark.parametrize("name", POINTS)
def test_functions_of_points_and_reductions(name: str) -> None:
    function, arrays = POINTS[name]
    found = run(trace_of(function, *arrays), arrays)
    np.testing.assert_allclose(found, np.asarray(function(*arrays)), rtol=1e-5, atol=1e-6)


CONVOLUTIONS: dict[str, tuple[tuple[str, str, str], dict[str, Any], tuple[int, ...], tuple[int, ...]]] = {
    "channels last": (("NHWC", "HWIO", "NHWC"), {"padding": "SAME"}, (2, 7, 6, 3), (3, 3, 3, 5)),
    "channels first": (("NCHW", "OIHW", "NCHW"), {"window_strides": (2, 1)}, (2, 3, 7, 6), (5, 3, 3, 2)),
    "mixed": (("NHWC", "OIHW", "NCHW"), {"padding": ((1, 2), (0, 1))}, (2, 7, 6, 3), (5, 3, 3, 2)),
    "groups": (("NHWC", "HWIO", "NHWC"), {"feature_group_count": 2}, (2, 7, 6, 4), (3, 3, 2, 6)),
    "depthwise": (("NHWC", "HWIO", "NHWC"), {"feature_group_count": 4}, (2, 7, 6, 4), (3, 3, 1, 4)),
    "dilated": (("NHWC", "HWIO", "NHWC"), {"rhs_dilation": (2, 1)}, (2, 7, 6, 3), (3, 3, 3, 5)),
    "one dim": (("NWC", "WIO", "NWC"), {"window_strides": (3,)}, (2, 9, 3), (3, 3, 5)),
}


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolutions_name_the_dims_of_any_layout(name: str) -> None:
    layout, options, x_shape, w_shape = CONVOLUTIONS[name]
    options = {"window_strides": (1,) * (len(x_shape) - 2), "padding": "VALID"} | options
    arrays = shaped(*x_shape), shaped(*w_shape)

    def function(x: Any, w: Any) -> Any:
        return lax.conv_general_dilated(x, w, dimension_numbers=layout, **options)

    trace = trace_of(function, *arrays)
    node, *turned = trace.nodes
    assert isinstance(node.op, ops.Convolve)
    value = _convolved(node.op, *arrays)
    assert value.shape == node.outputs[0].shape
    rest = replace(trace, nodes=tuple(turned))
    found = evaluate(rest, {node.outputs[0].name: value})[trace.outputs[0]]
    np.testing.assert_allclose(found, np.asarray(function(*arrays)), rtol=1e-4, atol=1e-5)


def _convolved(op: ops.Convolve, x: Array, w: Array) -> Array:
    """A convolution as the vocabulary defines it, one output element at a time."""
    x = x.transpose(op.batch, op.channels, *op.spatial)
    w = w.transpose(op.filters)
    x = np.pad(x, ((0, 0), (0, 0), *op.pads))
    reach = [d * (k - 1) + 1 for d, k in zip(op.dilation, w.shape[2:], strict=True)]
    out = [(e - r) // s + 1 for e, r, s in zip(x.shape[2:], reach, op.stride, strict=True)]
    found = np.zeros((x.shape[0], w.shape[0], *out), dtype=np.float64)
    own, made = x.shape[1] // op.groups, w.shape[0] // op.groups
    for channel, place in product(range(w.shape[0]), product(*map(range, out))):
        first = channel // made * own
        cut = tuple(slice(p * s, p * s + r, d) for p, s, r, d in zip(place, op.stride, reach, op.dilation, strict=True))
        window = x[(slice(None), slice(first, first + own), *cut)]
        found[(slice(None), channel, *place)] = (window * w[channel]).sum(axis=tuple(range(1, window.ndim)))
    order = [0] * x.ndim
    for i, dim in enumerate((op.batch, op.channels, *op.spatial)):
        order[dim] = i
    return found.transpose(order)


def test_a_transposed_convolution_is_the_gradient_of_one() -> None:
    x, w = shaped(2, 5, 4, 3), shaped(3, 3, 3, 6)
    trace = trace_of(lambda x, w: lax.conv_transpose(x, w, (2, 2), "SAME"), x, w)
    (node,) = trace.nodes
    assert isinstance(node.op, ops.Convolve)
    assert node.op.is_transposed
    assert (node.op.stride, node.op.filters) == ((2, 2), (2, 3, 0, 1))
    # The convolution whose gradient it is has these pads: 2 · (5 - 1) + 3 - 10 of them are left out of the result.
    assert [before + after for before, after in node.op.pads] == [1, 1]


@pytest.mark.parametrize("padding", ["SAME", "VALID"])
@pytest.mark.parametrize("kind", ["max", "mean"])
def test_pooling_is_over_the_dims_that_windows_move_over(kind: str, padding: str) -> None:
    linen = pytest.importorskip("flax.linen")
    x = shaped(2, 7, 6, 3)
    pool = linen.max_pool if kind == "max" else linen.avg_pool
    trace = trace_of(lambda x: pool(x, (3, 2), (2, 1), padding), x)
    node, *rest = trace.nodes
    # The division by the size of the window is part of the pooling.
    assert all(isinstance(other.op, ops.Identity) for other in rest)
    assert isinstance(node.op, ops.Pool)
    assert (node.op.function, node.op.spatial, node.op.kernel, node.op.stride) == (kind, (1, 2), (3, 2), (2, 1))
    fill = -np.inf if kind == "max" else 0.0
    padded = np.pad(x, ((0, 0), *node.op.pads, (0, 0)), constant_values=fill)
    windows = np.lib.stride_tricks.sliding_window_view(padded, (3, 2), axis=(1, 2))[:, ::2, ::1]
    found = windows.max(axis=(-1, -2)) if kind == "max" else windows.mean(axis=(-1, -2))
    np.testing.assert_allclose(found, np.asarray(pool(x, (3, 2), (2, 1), padding)), rtol=1e-5)


GENERIC: dict[str, tuple[Function, tuple[Array, ...], tuple[tuple[int, int], ...]]] = {
    "cumsum": (lambda x: jnp.cumsum(x, axis=1), (shaped(3, 4, 5),), ((0, 0), (2, 2))),
    "sort": (lambda x: jnp.sort(x, axis=0), (shaped(3, 4),), ((1, 1),)),
    "top_k": (lambda x: lax.top_k(x, 2)[0], (shaped(3, 4),), ((0, 0),)),
    "flip": (lambda x: jnp.flip(x, 1), (shaped(3, 4),), ((0, 0),)),
    "fft": (lambda x: jnp.fft.fft(x).real, (shaped(3, 4),), ((0, 0),)),
    "scatter": (lambda x, y: x.at[:, 1].add(y), (shaped(3, 4), shaped(3)), ((0, 0),)),
    "update": (
        lambda x, y, i: lax.dynamic_update_slice(x, y, (0, i)),
        (shaped(3, 4), shaped(3, 2), np.int32(1)),
        ((0, 0),),
    ),
    "slice at": (lambda x, i: lax.dynamic_slice(x, (0, i), (3, 2)), (shaped(3, 4), np.int32(1)), ((0, 0),)),
    "between": (lambda x: lax.pad(x, 0.0, ((0, 0, 0), (0, 0, 1))), (shaped(3, 4),), ((0, 0),)),
}


@pytest.mark.parametrize("name", GENERIC)
def test_what_is_not_known_passes_the_dims_through_that_it_leaves_alone(name: str) -> None:
    """Along such a dim, what is computed of a part of the input is that part of the output."""
    function, arrays, passes = GENERIC[name]
    trace = trace_of(function, *arrays)
    (node,) = [node for node in trace.nodes if isinstance(node.op, ops.Generic) and not node.op.is_index]
    assert isinstance(node.op, ops.Generic)
    assert node.op.passes == passes
    whole = np.asarray(function(*map(jnp.asarray, arrays)))
    for dim, place in passes:
        order = np.random.default_rng(0).permutation(arrays[0].shape[dim])
        shuffled = [
            np.take(array, order, axis=dim) if array.ndim > dim and array.shape[dim] == len(order) else array
            for array in arrays
        ]
        np.testing.assert_array_equal(
            np.asarray(function(*map(jnp.asarray, shuffled))), np.take(whole, order, axis=place)
        )


def test_an_operator_that_nothing_is_known_of_keeps_its_batch() -> None:
    trace = trace_of(lambda x: jnp.linalg.cholesky(x), shaped(5, 3, 3))
    found = [node.op for node in trace.nodes if isinstance(node.op, ops.Generic) and not node.op.is_index]
    assert [op.passes for op in found] == [((0, 0),)]


def test_splits_are_pieces() -> None:
    trace = trace_of(lambda x: [y * 2 for y in jnp.split(x, 3, axis=1)], shaped(2, 6))
    pieces = [node.op for node in trace.nodes if isinstance(node.op, ops.Slice)]
    assert [op.starts for op in pieces] == [(0, 0), (0, 2), (0, 4)]
