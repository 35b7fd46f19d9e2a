"""The networks of tests in JAX, as PaSE's graphs describe them: one function for each kind of layer."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from pase.graph import Access, Graph, Operator, Role, Window
from pase.sharding.traffic import parameter_name
from pase.targets.training.initial import shared_order

Array = Any
Constrain = Callable[[str, str, int | str, Array], Array]
"""Takes a layer, "inputs", "parameters" or "outputs", which of them, and the tensor; returns it as it is to lie."""

ACTIVATIONS: Mapping[str, Callable[[Array], Array]] = {
    "": lambda x: x,
    "relu": jax.nn.relu,
    "tanh": jnp.tanh,
    "sigmoid": jax.nn.sigmoid,
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
}


def run(graph: Graph, weights: Mapping[str, Array], data: Mapping[str, Array], constrain: Constrain) -> Any:
    """Return (loss, {layer: output}); weights: by name (`parameter_name`), data: by "layer/position"."""
    values: dict[str, Array] = {}
    for operator in graph.operators:
        inputs, parameters = [], {}
        for position, read in enumerate(operator.reads):
            if read.role is Role.PARAMETER:
                weight = weights[parameter_name(operator, read)].transpose(shared_order(graph, operator, read))
                parameters[read.tensor] = constrain(operator.name, "parameters", read.tensor, weight)
                continue
            edge = graph.incoming.get((operator.name, position))
            x = data[f"{operator.name}/{position}"] if edge is None else values[edge.producer].reshape(read.shape)
            inputs.append(constrain(operator.name, "inputs", len(inputs), x))
        y = KINDS[operator.kind](operator, inputs, parameters)
        y = ACTIVATIONS[operator.attribute("activation", "")](y)
        values[operator.name] = constrain(operator.name, "outputs", 0, y)
    last = graph.operators[-1]
    labels = data[f"{last.name}/1"]
    return -jnp.take_along_axis(values[last.name], labels[..., None], -1).mean(), values


def _letters(operator: Operator, access: Access) -> str:
    names = list(operator.extents)
    return "".join(chr(ord("a") + names.index(axis)) for axis in access.index_map if isinstance(axis, str))


def _dense(operator: Operator, inputs: list[Array], parameters: dict[str, Array]) -> Array:
    x, w, *_ = operator.reads
    equation = f"{_letters(operator, x)},{_letters(operator, w)}->{_letters(operator, operator.writes[0])}"
    y = jnp.einsum(equation, inputs[0], parameters["w"])
    return y + parameters["bias"] if "bias" in parameters else y


def _windows(operator: Operator) -> tuple[list[int], list[int], list[tuple[int, int]], list[int]]:
    """Kernel, strides, padding before and after, dilation, of each dim of the input that windows read."""
    kernel, strides, padding, dilation = [], [], [], []
    for axis, extent in zip(operator.reads[0].index_map, operator.reads[0].shape, strict=True):
        if isinstance(axis, Window):
            out, size = operator.extents[axis.out], operator.extents[axis.kernel]
            reach = (out - 1) * axis.stride + (size - 1) * axis.dilation + 1
            kernel.append(size)
            strides.append(axis.stride)
            padding.append((axis.pad, reach - axis.pad - extent))
            dilation.append(axis.dilation)
    return kernel, strides, padding, dilation


def _conv2d(operator: Operator, inputs: list[Array], parameters: dict[str, Array]) -> Array:
    _, strides, padding, dilation = _windows(operator)
    y = jax.lax.conv_general_dilated(
        inputs[0],
        parameters["w"],
        strides,
        padding,
        rhs_dilation=dilation,
        feature_group_count=operator.attribute("groups", 1),
        dimension_numbers=("NCHW", "OIHW", "NCHW"),
    )
    return y + parameters["bias"][None, :, None, None] if "bias" in parameters else y


def _pool2d(operator: Operator, inputs: list[Array], parameters: dict[str, Array]) -> Array:
    kernel, strides, padding, _ = _windows(operator)
    shape = (1, 1, *kernel), (1, 1, *strides), ((0, 0), (0, 0), *padding)
    if operator.attribute("reduction", "max") == "max":
        return jax.lax.reduce_window(inputs[0], -jnp.inf, jax.lax.max, *shape)
    total = jax.lax.reduce_window(inputs[0], 0.0, jax.lax.add, *shape)
    points = jnp.ones_like(inputs[0])
    if operator.attribute("count_padding", False):
        return total / (kernel[0] * kernel[1])
    return total / jax.lax.reduce_window(points, 0.0, jax.lax.add, *shape)


def _elementwise(operator: Operator, inputs: list[Array], parameters: dict[str, Array]) -> Array:
    match operator.attribute("function", ""):
        case "add":
            return sum(inputs)
        case "multiply":
            y = inputs[0]
            for x in inputs[1:]:
                y = y * x
            return y
        case function:
            return ACTIVATIONS[function](inputs[0])


def _add_parameter(operator: Operator, inputs: list[Array], parameters: dict[str, Array]) -> Array:
    axes = operator.parameters[0].index_map
    shape = [extent if dim in axes else 1 for dim, extent in operator.extents.items()]
    return inputs[0] + parameters["p"].reshape(shape)


def _normalised(x: Array, over: tuple[int, ...]) -> Array:
    centred = x - x.mean(over, keepdims=True)
    return centred / jnp.sqrt((centred**2).mean(over, keepdims=True) + 1e-5)


def _batch_norm(operator: Operator, inputs: list[Array], parameters: dict[str, Array]) -> Array:
    shape = (1, -1, 1, 1)
    return _normalised(inputs[0], (0, 2, 3)) * parameters["scale"].reshape(shape) + parameters["shift"].reshape(shape)


def _layer_norm(operator: Operator, inputs: list[Array], parameters: dict[str, Array]) -> Array:
    return _normalised(inputs[0], (-1,)) * parameters["scale"] + parameters["shift"]


def _attention(operator: Operator, inputs: list[Array], parameters: dict[str, Array]) -> Array:
    q, k, v = inputs
    scores = jnp.einsum("bshk,bthk->bhst", q, k) / q.shape[-1] ** 0.5
    if operator.attribute("causal", False):
        scores = jnp.where(jnp.tri(*scores.shape[-2:], dtype=bool), scores, -jnp.inf)
    return jnp.einsum("bhst,bthk->bshk", jax.nn.softmax(scores, -1), v)


KINDS: Mapping[str, Callable[[Operator, list[Array], dict[str, Array]], Array]] = {
    "dense": _dense,
    "conv2d": _conv2d,
    "pool2d": _pool2d,
    "elementwise": _elementwise,
    "add_parameter": _add_parameter,
    "batch_norm": _batch_norm,
    "layer_norm": _layer_norm,
    "attention": _attention,
    "embedding": lambda _, inputs, parameters: parameters["table"][inputs[0]],
    "fan_out": lambda _, inputs, __: inputs[0],
    "concat": lambda _, inputs, __: jnp.concatenate(inputs, 1),
    "global_pool": lambda _, inputs, __: inputs[0].mean((2, 3)),
    "softmax_loss": lambda _, inputs, __: jax.nn.log_softmax(inputs[0], -1),
}
"""What a layer writes, before its activation, from its inputs and parameters; a loss: logarithms of probabilities."""
