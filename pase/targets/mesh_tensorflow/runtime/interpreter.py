"""The interpreter of bodies: what an operator computes, on one device, in plain TensorFlow, by definition.

A tensor is an array and the names of its dims; nothing here knows of shards.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from itertools import product
from math import inf, prod
from typing import Any

from pase.errors import ProgramError
from pase.graph import Access, Operator, SliceOf, Window
from pase.graph.body import Body, Step
from pase.graph.functions import POINTWISE
from pase.targets.mesh_tensorflow.primitives.compat import tf
from pase.targets.mesh_tensorflow.runtime.layers.points import functions_of_points

Named = tuple[Any, tuple[str, ...]]
"""An array and the name of each of its dims."""

Extents = Mapping[str, int]
"""Of the iteration dims and of those that steps have of their own."""

_LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"


Draw = Callable[[Step, tuple[int, ...]], Any]
"""Takes a step that drops points and the shape of its tensor; returns what each point is multiplied by."""


def interpret(operator: Operator, body: Body, tensors: Mapping[str, Any], draw: Draw | None = None) -> Any:
    """Return what an operator writes first, or its loss, where it computes one.

    Args:
        operator: how its tensors are indexed.
        body: its elementary steps.
        tensors: of what it reads, by name, in the shapes that it reads.
        draw: gives the factors of the points that are dropped.

    Raises:
        ProgramError: a step is none that can be interpreted.
    """
    known: dict[str, Named] = {}
    extents = operator.extents
    # Of an LSTM, operands are tensors in the shapes in which they are read.
    told = {operand for step in body.steps if step.function != "lstm" for operand in step.operands}
    for access in operator.reads:
        if access.tensor in tensors:
            array = tensors[access.tensor]
            known[access.tensor] = named(operator, access, array) if access.tensor in told else (array, ())
    for step in body.steps:
        operands: list[Any] = [known[operand] if isinstance(operand, str) else operand for operand in step.operands]
        if step.function == "dropout":
            (x,) = (operand for operand in operands if isinstance(operand, tuple))
            known[step.result] = _dropped(step, x, draw)
        else:
            known[step.result] = _step(operator, extents, step, operands)
    last = known[body.steps[-1].result]
    if operator.is_loss:
        return last[0]
    write = operator.writes[0]
    y, _ = _arranged(last, _dims(operator, write), operator)
    return _shaped(y, write.shape)


def _dropped(step: Step, x: Named, draw: Draw | None) -> Named:
    if draw is None:
        raise ProgramError(f"{step.result!r} drops points, and nothing tells which")
    array = _broadcast(x, step.dims)
    return array * draw(step, tuple(array.shape.as_list())), step.dims


def named(operator: Operator, access: Access, array: Any) -> Named:
    """Return a tensor with the names of its dims: one for each iteration dim, a window's is that of its positions."""
    dims = _dims(operator, access)
    shape: list[int] = []
    for axis, extent in zip(access.index_map, access.shape, strict=True):
        shape += [operator.extents[dim] for dim in axis] if isinstance(axis, tuple) else [extent]
    named_shape = [extent for extent, axis in zip(shape, _flat(access), strict=True) if axis is not None]
    return _shaped(array, named_shape), dims


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


def _step(operator: Operator, extents: Extents, step: Step, operands: Sequence[Any]) -> Named:
    if step.function in POINTWISE:
        return _points(step.function, operands)
    if step.function in _OVER:
        x, dims = operands[0]
        places = [dims.index(dim) for dim in step.dims]
        keeps = step.function in ("softmax", "log_softmax")
        return _OVER[step.function](x, places), dims if keeps else tuple(dim for dim in dims if dim not in step.dims)
    if step.function not in _OF_STEP:
        raise ProgramError(f"layer {operator.name!r}: the reference cannot compute {step.function!r}")
    return _OF_STEP[step.function](operator, extents, step, operands)


def _points(function: str, operands: Sequence[Any]) -> Named:
    tensors = [operand for operand in operands if isinstance(operand, tuple)]
    dims = tuple(dict.fromkeys(dim for _, own in sorted(tensors, key=lambda x: -len(x[1])) for dim in own))
    dtype = tensors[0][0].dtype
    spread = [_broadcast(operand, dims) if isinstance(operand, tuple) else operand for operand in operands]
    return tf.cast(functions_of_points()[function](*spread), dtype), dims


def _broadcast(x: Named, dims: Sequence[str]) -> Any:
    array, own = x
    array = _turned(array, own, [dim for dim in dims if dim in own])
    return _shaped(array, [x[0].shape[own.index(dim)] if dim in own else 1 for dim in dims])


def _shaped(array: Any, shape: Sequence[int]) -> Any:
    return array if array.shape.as_list() == list(shape) else tf.reshape(array, shape)


def _turned(array: Any, own: Sequence[str], order: Sequence[str]) -> Any:
    return array if list(own) == list(order) else tf.transpose(array, [own.index(dim) for dim in order])


def _arranged(x: Named, dims: tuple[str, ...], operator: Operator) -> Named:
    """Return a tensor with its dims in an order, repeated along those that it lacks."""
    array, own = x
    lost = [dim for dim in own if dim not in dims]
    array = tf.squeeze(array, [own.index(dim) for dim in lost]) if lost else array
    kept = tuple(dim for dim in own if dim in dims)
    extents = {dim: int(array.shape[i]) for i, dim in enumerate(kept)}
    shape = [extents.get(dim, operator.extents[dim]) for dim in dims]
    array = _broadcast((array, kept), dims)
    return array if array.shape.as_list() == shape else tf.broadcast_to(array, shape), dims


def _einsum(_: Operator, __: Extents, step: Step, operands: Sequence[Any]) -> Named:
    letters = dict(zip(dict.fromkeys(dim for _, own in operands for dim in own), _LETTERS, strict=False))
    told = ",".join("".join(letters[dim] for dim in own) for _, own in operands)
    dims = tuple(dim for dim in step.dims if dim in letters)
    return tf.einsum(f"{told}->{''.join(letters[dim] for dim in dims)}", *(x for x, _ in operands)), dims


def _causal(_: Operator, __: Extents, step: Step, operands: Sequence[Any]) -> Named:
    x, dims = operands[0]
    query, key = (dims.index(dim) for dim in step.dims)
    ranges = [
        tf.reshape(tf.range(int(x.shape[place])), [-1 if i == place else 1 for i in range(len(dims))])
        for place in (query, key)
    ]
    return tf.where_v2(ranges[1] > ranges[0], tf.constant(-1e30, x.dtype), x), dims


def _embedding(_: Operator, __: Extents, step: Step, operands: Sequence[Any]) -> Named:
    (table, rows), (indices, dims) = operands
    frozen = int(step.option("frozen", -1))
    if frozen >= 0:
        table = tf.concat([table[:frozen], tf.stop_gradient(table[frozen : frozen + 1]), table[frozen + 1 :]], axis=0)
    return tf.gather(table, indices), (*dims, *rows[1:])


def _pick(_: Operator, __: Extents, step: Step, operands: Sequence[Any]) -> Named:
    x, (places, dims) = operands
    rows = _broadcast(x, (*dims, *step.dims))
    return tf.reduce_sum(rows * tf.one_hot(places, int(rows.shape[-1]), dtype=rows.dtype), axis=-1), dims


def _windowed(operator: Operator) -> Access:
    return next(access for access in operator.reads if any(isinstance(axis, Window) for axis in access.index_map))


def _padded_windows(operator: Operator, x: Named, fill: float) -> tuple[Any, list[int]]:
    """Return a tensor padded or cut to what its windows read, and how many points that is for each window."""
    array, dims = x
    pads = [(0, 0)] * len(dims)
    cuts = [slice(None)] * len(dims)
    ends = []
    for axis in _windowed(operator).index_map:
        if isinstance(axis, Window):
            place, kernel = dims.index(axis.out), operator.extents[axis.kernel]
            ends.append((operator.extents[axis.out] - 1) * axis.stride + (kernel - 1) * axis.dilation + 1)
            pads[place] = axis.pad, max(0, ends[-1] - axis.pad - int(array.shape[place]))
            cuts[place] = slice(0, ends[-1])
    if any(map(any, pads)):
        array = tf.pad(array, pads, constant_values=tf.constant(fill, array.dtype))
    reached = [extent if cut.stop is None else cut.stop for extent, cut in zip(array.shape, cuts, strict=True)]
    return array if array.shape.as_list() == reached else array[tuple(cuts)], ends


def _windows(operator: Operator, x: Named, fill: float) -> list[Any]:
    """Return, for each point of the kernels, what it reads of x for all positions."""
    windows = [axis for axis in _windowed(operator).index_map if isinstance(axis, Window)]
    array, _ = _padded_windows(operator, x, fill)
    found = []
    for points in product(*(range(operator.extents[axis.kernel]) for axis in windows)):
        index = [slice(None)] * len(x[1])
        for point, axis in zip(points, windows, strict=True):
            first = point * axis.dilation
            last = first + (operator.extents[axis.out] - 1) * axis.stride
            index[x[1].index(axis.out)] = slice(first, last + 1, axis.stride)
        found.append(array[tuple(index)])
    return found


def _convolve(operator: Operator, _: Extents, __: Step, operands: Sequence[Any]) -> Named:
    """A sum of products over windows, as TensorFlow's convolution of [batch, positions, channels], group by group."""
    x, (filters, own) = operands
    access = _windowed(operator)
    windows = [axis for axis in access.index_map if isinstance(axis, Window)]
    kernels, positions = [axis.kernel for axis in windows], [axis.out for axis in windows]
    extents = operator.extents
    written = _dims(operator, operator.writes[0])
    rest = [dim for dim in own if dim not in kernels]
    groups = [dim for dim in rest if dim in x[1] and dim in written]
    inputs = [dim for dim in rest if dim not in written]
    outputs = [dim for dim in rest if dim in written and dim not in x[1]]
    batch = [dim for dim in x[1] if dim not in (*rest, *positions)]
    padded, ends = _padded_windows(operator, x, 0.0)
    image = _broadcast((padded, x[1]), [*batch, *positions, *groups, *inputs])
    num_groups, num_inputs, num_outputs = (prod(extents[dim] for dim in dims) for dims in (groups, inputs, outputs))
    image = _shaped(image, [prod(extents[dim] for dim in batch), *ends, num_groups * num_inputs])
    filters = _turned(filters, own, (*kernels, *groups, *inputs, *outputs))
    filters = _shaped(filters, [*(extents[dim] for dim in kernels), num_groups * num_inputs, num_outputs])
    strides, dilations = [axis.stride for axis in windows], [axis.dilation for axis in windows]
    # TensorFlow has either, not both: what it computes with dilation alone, at every stride.
    steps = strides if max(strides) > 1 and max(dilations) > 1 else [1] * len(strides)
    strides = [1] * len(strides) if steps is strides else strides
    parts = [
        tf.nn.convolution(a, w, strides=strides, dilation_rate=dilations, padding="VALID")
        for a, w in zip(_split(image, num_groups, -1), _split(filters, num_groups, -2), strict=True)
    ]
    y = parts[0] if num_groups == 1 else tf.concat(parts, axis=-1)
    if max(steps) > 1:
        y = y[(slice(None), *(slice(None, None, step) for step in steps))]
    dims = (*batch, *positions, *groups, *outputs)
    return _shaped(y, [extents[dim] for dim in dims]), dims


def _split(array: Any, num_parts: int, axis: int) -> list[Any]:
    return [array] if num_parts == 1 else tf.split(array, num_parts, axis)


def _convolve_transposed(operator: Operator, _: Extents, step: Step, operands: Sequence[Any]) -> Named:
    """A sum of products: a point that is read is spread over those that its window's points write."""
    (x, own), (filters, names) = operands
    rank = len(step.dims) // 3
    lists = [step.option(name, ()) for name in ("strides", "dilations", "pads")]
    written = _dims(operator, operator.writes[0])
    letters = dict(zip(dict.fromkeys((*own, *names, *written)), _LETTERS, strict=False))
    told, arrays = ["".join(letters[dim] for dim in dims) for dims in (own, names)], [x, filters]
    for i, (stride, dilation, pad) in enumerate(zip(*lists, strict=True)):
        dims = [step.dims[i + rank * j] for j in range(3)]
        read, out, kernel = (tf.range(operator.extents[dim]) for dim in dims)
        kernel = tf.reverse(kernel, [0]) if step.option("backwards", False) else kernel
        place = read[:, None, None] * stride + kernel[None, None, :] * dilation - pad
        arrays.append(tf.cast(tf.equal(place, out[None, :, None]), x.dtype))
        told.append("".join(letters[dim] for dim in dims))
    return tf.einsum(f"{','.join(told)}->{''.join(letters[dim] for dim in written)}", *arrays), written


def _pool(operator: Operator, _: Extents, step: Step, operands: Sequence[Any]) -> Named:
    x = operands[0]
    if step.option("reduction", "max") == "max":
        # Of equal values the first counts.
        return reduce(tf.maximum, _windows(operator, x, -inf)), x[1]
    parts = _windows(operator, x, 0.0)
    counts = _windows(operator, (tf.ones_like(x[0]), x[1]), 0.0)
    divisor = len(parts) if step.option("count_padding", False) else tf.add_n(counts)
    return tf.add_n(parts) / divisor, x[1]


def _concat(operator: Operator, _: Extents, step: Step, operands: Sequence[Any]) -> Named:
    dims = _dims(operator, operator.writes[0])
    along = str(step.option("along", ""))
    arrays = []
    for x, own in operands:
        # What is laid out for this has a dim of its own in place of the one that is joined.
        names = [dim if dim in dims else along for dim in own]
        arrays.append(_turned(x, names, dims))
    return tf.concat(arrays, axis=dims.index(along)), dims


def _padded(operator: Operator, _: Extents, __: Step, operands: Sequence[Any]) -> Named:
    x, dims = operands[0]
    pads = [(0, 0)] * len(dims)
    for axis in operator.reads[0].index_map:
        if isinstance(axis, SliceOf):
            pads[dims.index(axis.dim)] = axis.offset, operator.extents[axis.dim] - axis.offset - axis.extent
    return tf.pad(x, pads), dims


def _piece(operator: Operator, _: Extents, __: Step, operands: Sequence[Any]) -> Named:
    return operands[0][0][piece_of(operands[0][1], operator.writes[0])], operands[0][1]


def piece_of(dims: Sequence[str], access: Access) -> tuple[slice, ...]:
    """Return the index of the pieces that an access takes of a tensor with these dims."""
    index = [slice(None)] * len(dims)
    for axis in access.index_map:
        if isinstance(axis, SliceOf):
            index[list(dims).index(axis.dim)] = slice(axis.offset, axis.offset + axis.extent)
    return tuple(index)


def _lstm(operator: Operator, _: Extents, __: Step, operands: Sequence[Any]) -> Named:
    """A stack of layers, step by step; of its weights, [layers, …, gates, units], the candidate is the last gate."""
    x, *weights = (array for array, _ in operands)
    sequence = tf.unstack(x[0], axis=1)
    for w, u, bias in zip(*map(tf.unstack, weights), strict=True):
        columns = 4 * w.shape.as_list()[-1]
        hidden = cell = tf.zeros([sequence[0].shape[0], w.shape[-1]], x.dtype)
        outputs = []
        for read in sequence:
            gates = tf.matmul(read, tf.reshape(w, [-1, columns])) + tf.matmul(hidden, tf.reshape(u, [-1, columns]))
            into, forget, out, candidate = tf.split(gates + tf.reshape(bias, [columns]), 4, axis=1)
            cell = tf.sigmoid(forget) * cell + tf.sigmoid(into) * tf.tanh(candidate)
            hidden = tf.sigmoid(out) * tf.tanh(cell)
            outputs.append(hidden)
        sequence = outputs
    dims = _dims(operator, operator.writes[0])
    y = tf.stack(sequence, axis=1)
    return tf.reshape(y, [1] * (len(dims) - 3) + y.shape.as_list()), dims


def _log_softmax(x: Any, places: list[int]) -> Any:
    return x - tf.reduce_logsumexp(x, places, keepdims=True)


_OVER: Mapping[str, Callable[[Any, list[int]], Any]] = {
    "sum": tf.reduce_sum,
    "mean": tf.reduce_mean,
    "max": tf.reduce_max,
    "min": tf.reduce_min,
    "softmax": lambda x, places: tf.exp(_log_softmax(x, places)),
    "log_softmax": _log_softmax,
}


_OF_STEP: Mapping[str, Callable[[Operator, Extents, Step, Sequence[Any]], Named]] = {
    "causal": _causal,
    "concat": _concat,
    "convolve": _convolve,
    "convolve_transposed": _convolve_transposed,
    "copy": lambda _, __, ___, operands: operands[0],
    "einsum": _einsum,
    "embedding": _embedding,
    "lstm": _lstm,
    "fan_out": lambda _, __, ___, operands: operands[0],
    "padded": _padded,
    "pick": _pick,
    "piece": _piece,
    "pool": _pool,
}
