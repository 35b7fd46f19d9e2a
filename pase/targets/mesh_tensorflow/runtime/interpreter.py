"""The interpreter of bodies: what an operator computes, on one device, in plain TensorFlow, by definition.

A tensor is an array and the names of its dims; nothing here knows of shards.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from itertools import product
from math import inf
from typing import Any

from pase.errors import ProgramError
from pase.graph import Access, Operator, SliceOf, Window
from pase.graph.body import MOVES, POINTWISE, Body, Step
from pase.targets.mesh_tensorflow.primitives.compat import tf
from pase.targets.mesh_tensorflow.runtime.layers.points import functions_of_points

Named = tuple[Any, tuple[str, ...]]
"""An array and the name of each of its dims."""

_LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"


def interpret(operator: Operator, body: Body, tensors: Mapping[str, Any]) -> Any:
    """Return what an operator writes first.

    Args:
        operator: how its tensors are indexed.
        body: its elementary steps.
        tensors: of what it reads, by name, in the shapes that it reads; of the body's constants, [dims].

    Raises:
        ProgramError: a step is none that can be interpreted.
    """
    known: dict[str, Named] = {
        access.tensor: named(operator, access, tensors[access.tensor])
        for access in operator.reads
        if access.tensor in tensors
    }
    for constant in body.constants:
        if constant.name in tensors:
            shape = [operator.extents[dim] for dim in constant.dims]
            known[constant.name] = tf.reshape(tensors[constant.name], shape), constant.dims
    for step in body.steps:
        known[step.result] = _step(operator, step, known)
    write = operator.writes[0]
    y, _ = _arranged(known[body.steps[-1].result], _dims(operator, write), operator)
    return tf.reshape(y, write.shape)


def named(operator: Operator, access: Access, array: Any) -> Named:
    """Return a tensor with the names of its dims: one for each iteration dim, a window's is that of its positions."""
    dims = _dims(operator, access)
    shape: list[int] = []
    for axis, extent in zip(access.index_map, access.shape, strict=True):
        shape += [operator.extents[dim] for dim in axis] if isinstance(axis, tuple) else [extent]
    named_shape = [extent for extent, axis in zip(shape, _flat(access), strict=True) if axis is not None]
    return tf.reshape(array, named_shape), dims


def _flat(access: Access) -> list[Any]:
    return [one for axis in access.index_map for one in (axis if isinstance(axis, tuple) else (axis,))]


def _dims(operator: Operator, access: Access) -> tuple[str, ...]:
    found = []
    for axis, extent in ((a, e) for a, e in zip(access.index_map, access.shape, strict=True)):
        match axis:
            case None:
                if extent > 1:
                    raise ProgramError(
                        f"layer {operator.name!r} reads tensor {access.tensor!r} whole, which the reference cannot do"
                    )
            case Window():
                found.append(axis.out)
            case SliceOf():
                found.append(axis.dim)
            case tuple():
                found += axis
            case _:
                found.append(axis)
    return tuple(found)


def _step(operator: Operator, step: Step, known: Mapping[str, Named]) -> Named:
    operands: list[Any] = [known[operand] if isinstance(operand, str) else operand for operand in step.operands]
    if step.function in POINTWISE:
        return _points(step.function, operands)
    if step.function in MOVES:
        return _MOVES[step.function](operator, step, operands)
    if step.function in _OVER:
        x, dims = operands[0]
        places = [dims.index(dim) for dim in step.dims]
        keeps = step.function in ("softmax", "log_softmax")
        return _OVER[step.function](x, places), dims if keeps else tuple(dim for dim in dims if dim not in step.dims)
    if step.function in _OTHERS:
        return _OTHERS[step.function](operator, step, operands)
    raise ProgramError(f"layer {operator.name!r}: the reference cannot compute {step.function!r}")


def _points(function: str, operands: Sequence[Any]) -> Named:
    tensors = [operand for operand in operands if isinstance(operand, tuple)]
    dims = tuple(dict.fromkeys(dim for _, own in sorted(tensors, key=lambda x: -len(x[1])) for dim in own))
    dtype = tensors[0][0].dtype
    spread = [_broadcast(operand, dims) if isinstance(operand, tuple) else operand for operand in operands]
    return tf.cast(functions_of_points()[function](*spread), dtype), dims


def _broadcast(x: Named, dims: Sequence[str]) -> Any:
    array, own = x
    array = tf.transpose(array, [own.index(dim) for dim in dims if dim in own])
    return tf.reshape(array, [x[0].shape[own.index(dim)] if dim in own else 1 for dim in dims])


def _arranged(x: Named, dims: tuple[str, ...], operator: Operator) -> Named:
    """Return a tensor with its dims in an order, repeated along those that it lacks."""
    array, own = x
    lost = [dim for dim in own if dim not in dims]
    array = tf.squeeze(array, [own.index(dim) for dim in lost]) if lost else array
    kept = tuple(dim for dim in own if dim in dims)
    extents = {dim: int(array.shape[i]) for i, dim in enumerate(kept)}
    shape = [extents.get(dim, operator.extents[dim]) for dim in dims]
    return tf.broadcast_to(_broadcast((array, kept), dims), shape), dims


def _einsum(_: Operator, step: Step, operands: Sequence[Any]) -> Named:
    letters = dict(zip(dict.fromkeys(dim for _, own in operands for dim in own), _LETTERS, strict=False))
    told = ",".join("".join(letters[dim] for dim in own) for _, own in operands)
    dims = tuple(dim for dim in step.dims if dim in letters)
    return tf.einsum(f"{told}->{''.join(letters[dim] for dim in dims)}", *(x for x, _ in operands)), dims


def _causal(_: Operator, step: Step, operands: Sequence[Any]) -> Named:
    x, dims = operands[0]
    query, key = (dims.index(dim) for dim in step.dims)
    ranges = [
        tf.reshape(tf.range(int(x.shape[place])), [-1 if i == place else 1 for i in range(len(dims))])
        for place in (query, key)
    ]
    return tf.where_v2(ranges[1] > ranges[0], tf.constant(-1e30, x.dtype), x), dims


def _embedding(_: Operator, __: Step, operands: Sequence[Any]) -> Named:
    (table, rows), (indices, dims) = operands
    return tf.gather(table, indices), (*dims, *rows[1:])


def _pick(_: Operator, step: Step, operands: Sequence[Any]) -> Named:
    (x, own), (places, dims) = operands
    order = [own.index(dim) for dim in (*dims, *step.dims)]
    chosen = tf.one_hot(places, int(x.shape[order[-1]]), dtype=x.dtype)
    return tf.reduce_sum(tf.transpose(x, order) * chosen, axis=-1), dims


def _windows(operator: Operator, x: Named, fill: float) -> list[tuple[tuple[int, ...], Any]]:
    """Return, for each point of the kernels, what it reads of x for all positions."""
    access = next(access for access in operator.reads if any(isinstance(axis, Window) for axis in access.index_map))
    array, dims = x
    windows = [axis for axis in access.index_map if isinstance(axis, Window)]
    places = {axis.out: dims.index(axis.out) for axis in windows}
    pads = [(0, 0)] * len(dims)
    for axis in windows:
        place, kernel = places[axis.out], operator.extents[axis.kernel]
        end = (operator.extents[axis.out] - 1) * axis.stride + (kernel - 1) * axis.dilation + 1
        pads[place] = axis.pad, max(0, end - axis.pad - int(array.shape[place]))
    array = tf.pad(array, pads, constant_values=tf.constant(fill, array.dtype))
    found = []
    for points in product(*(range(operator.extents[axis.kernel]) for axis in windows)):
        index = [slice(None)] * len(dims)
        for point, axis in zip(points, windows, strict=True):
            first = point * axis.dilation
            index[places[axis.out]] = slice(
                first, first + (operator.extents[axis.out] - 1) * axis.stride + 1, axis.stride
            )
        found.append((points, array[tuple(index)]))
    return found


def _convolve(operator: Operator, _: Step, operands: Sequence[Any]) -> Named:
    x, (filters, own) = operands
    kernels = [axis.kernel for access in operator.reads for axis in access.index_map if isinstance(axis, Window)]
    rest = tuple(dim for dim in own if dim not in kernels)
    filters = tf.transpose(filters, [own.index(dim) for dim in (*kernels, *rest)])
    written = _dims(operator, operator.writes[0])
    step = Step(result="", function="einsum", dims=written)
    parts = [
        _einsum(operator, step, [(part, x[1]), (filters[points], rest)]) for points, part in _windows(operator, x, 0.0)
    ]
    return tf.add_n([part for part, _ in parts]), parts[0][1]


def _pool(operator: Operator, step: Step, operands: Sequence[Any]) -> Named:
    x = operands[0]
    if step.option("reduction", "max") == "max":
        # Of equal values the first counts.
        return reduce(tf.maximum, [part for _, part in _windows(operator, x, -inf)]), x[1]
    parts = [part for _, part in _windows(operator, x, 0.0)]
    counts = [part for _, part in _windows(operator, (tf.ones_like(x[0]), x[1]), 0.0)]
    divisor = len(parts) if step.option("count_padding", False) else tf.add_n(counts)
    return tf.add_n(parts) / divisor, x[1]


def _concat(operator: Operator, step: Step, operands: Sequence[Any]) -> Named:
    dims = _dims(operator, operator.writes[0])
    arrays = [tf.transpose(x, [own.index(dim) for dim in dims]) for x, own in operands]
    return tf.concat(arrays, axis=dims.index(str(step.option("along", "")))), dims


def _padded(operator: Operator, _: Step, operands: Sequence[Any]) -> Named:
    x, dims = operands[0]
    pads = [(0, 0)] * len(dims)
    for axis in operator.reads[0].index_map:
        if isinstance(axis, SliceOf):
            pads[dims.index(axis.dim)] = axis.offset, operator.extents[axis.dim] - axis.offset - axis.extent
    return tf.pad(x, pads), dims


def _piece(operator: Operator, _: Step, operands: Sequence[Any]) -> Named:
    return operands[0][0][piece_of(operands[0][1], operator.writes[0])], operands[0][1]


def piece_of(dims: Sequence[str], access: Access) -> tuple[slice, ...]:
    """Return the index of the pieces that an access takes of a tensor with these dims."""
    index = [slice(None)] * len(dims)
    for axis in access.index_map:
        if isinstance(axis, SliceOf):
            index[list(dims).index(axis.dim)] = slice(axis.offset, axis.offset + axis.extent)
    return tuple(index)


_OVER: Mapping[str, Callable[[Any, list[int]], Any]] = {
    "sum": tf.reduce_sum,
    "mean": tf.reduce_mean,
    "max": tf.reduce_max,
    "min": tf.reduce_min,
    "softmax": lambda x, places: tf.exp(_log_softmax(x, places)),
    "log_softmax": lambda x, places: _log_softmax(x, places),
}


def _log_softmax(x: Any, places: list[int]) -> Any:
    return x - tf.reduce_logsumexp(x, places, keepdims=True)


_MOVES: Mapping[str, Callable[[Operator, Step, Sequence[Any]], Named]] = {
    "concat": _concat,
    "copy": lambda _, __, operands: operands[0],
    "padded": _padded,
    "piece": _piece,
}

_OTHERS: Mapping[str, Callable[[Operator, Step, Sequence[Any]], Named]] = {
    "causal": _causal,
    "convolve": _convolve,
    "einsum": _einsum,
    "embedding": _embedding,
    "pick": _pick,
    "pool": _pool,
}
