"""Translations of JAX primitives: elementwise functions, products, windows, reductions, and data movement."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from math import prod
from typing import Any

from pase.importers.ir import ops
from pase.importers.ir.call import letters, table
from pase.importers.ir.shared import FUNCTIONS, concatenate, run
from pase.importers.ir.shared import reduction as reduction_name
from pase.importers.ir.trace import Value
from pase.importers.jax.call import JaxCall, whole


def pointwise(call: JaxCall, function: str = "") -> None:
    """Write a function of all inputs, point by point; of one input and a number where the others are numbers."""
    function = function or FUNCTIONS[call.name]
    if call.name == "integer_pow":
        call.give(ops.Pointwise(functions=(function,), constant=float(call.arguments["y"])), call.x)
        return
    given = call.tensors
    tensors = [value for i, value in enumerate(given) if value.shape or call.constant(i) is None] or list(given)
    numbers = [call.number(i) for i, value in enumerate(given) if value not in tensors]
    is_one = len(tensors) == 1 and len(numbers) == 1
    op = ops.Pointwise(
        functions=(function,),
        constant=numbers[0] if is_one else None,
        constant_first=is_one and call.x not in tensors,
    )
    call.give(op, *tensors)


def maximum(call: JaxCall) -> None:
    """Write the larger of two; of one and zero it is a rectifier."""
    others = [value for i, value in enumerate(call.tensors) if call.number(i) != 0.0 or value.shape]
    if len(others) == 1:
        call.point("relu", *others, out=call.result)
    else:
        pointwise(call)


def select(call: JaxCall) -> None:
    """Write the second or the third of two where a condition holds or does not; JAX has them the other way round."""
    if len(call.tensors) == 3 and call.x.dtype == "bool":
        which, otherwise, chosen = call.tensors
        call = replace(call, inputs=(which, chosen, otherwise))
    pointwise(call, "where")


def clamp(call: JaxCall) -> None:
    """Write the input between two bounds."""
    low, x, high = call.tensors
    bounds = call.number(0), call.number(2)
    if bounds[0] is None or bounds[1] is None:
        call.point("clip", x, low, high, out=call.result)
    else:
        call.point("clip", x, numbers=bounds, out=call.result)


def divide(call: JaxCall) -> None:
    """Write a quotient; that of sums over windows by how many elements they have is part of the pooling."""
    x, divisor = call.tensors
    # A sum over windows of ones is how many elements each of them has, without those that it is padded with.
    pooled, is_of_ones = call.maker(x), isinstance(call.maker(divisor), ops.Pool)
    if isinstance(pooled, ops.Pool) and (is_of_ones or call.constant(1) is not None):
        if is_of_ones:
            call.writer.amend(x, replace(pooled, counts_padding=False))
        call.give(ops.Identity(), x)
    else:
        pointwise(call, "divide")


def cast(call: JaxCall) -> None:
    """Append a cast; it is an identity where both types are differentiable, or neither."""
    is_same = call.x.shape == call.result.shape and call.x.is_float == call.result.is_float
    call.give(ops.Identity() if is_same else ops.Pointwise(functions=("cast",)), call.x)


def same(call: JaxCall) -> None:
    """Append an identity for every input."""
    for value, result in zip(call.tensors, call.results, strict=False):
        call.add(ops.Identity(), value, out=result)


def reduction(call: JaxCall) -> None:
    """Write a reduction over some dims."""
    call.give(ops.Reduce(function=reduction_name(call.name), over=call.numbers("axes")), call.x)


def reduction_by(call: JaxCall) -> None:
    """Write a reduction by a function of the user's."""
    if len(call.results) == 1:
        call.give(ops.Reduce(function="any", over=call.numbers("dimensions")), call.x)
    else:
        call.opaque(passes=())


def along(call: JaxCall) -> None:
    """Write what works along the dim that a parameter names: a running sum, a sort, the largest elements."""
    call.opaque(over=[int(call.get("dimension", call.get("axis", -1)))])


ELEMENTWISE = dict.fromkeys(FUNCTIONS, pointwise) | table(
    (maximum, "max"),
    (select, "select_n"),
    (clamp, "clamp"),
    (divide, "div"),
    (cast, "convert_element_type bitcast_convert_type reduce_precision"),
    (same, "copy copy_p stop_gradient optimization_barrier device_put name sharding_constraint mesh_cast reshard"),
    (same, "layout_constraint pvary ad_barrier"),
    (reduction, "argmax argmin reduce_and reduce_max reduce_min reduce_or reduce_prod reduce_sum reduce_xor"),
    (reduction_by, "reduce"),
    (along, "cumsum cumprod cummax cummin cumlogsumexp sort top_k approx_top_k"),
    (lambda call: call.opaque(over=call.numbers("dimensions")), "rev"),
    (lambda call: call.opaque(over=range(-len(call.arguments["fft_lengths"]), 0)), "fft"),
)
"""By the primitive's name."""


# -- data movement


def broadcast(call: JaxCall) -> None:
    """Write a tensor repeated to a shape; one that is repeated nowhere is a reshape."""
    is_same = prod(call.x.shape) == prod(call.result.shape)
    call.give(ops.Reshape() if is_same else ops.Broadcast(places=call.numbers("broadcast_dimensions")), call.x)


def dynamic_slice(call: JaxCall) -> None:
    """Append a slice of a tensor; with a data-dependent start it can be split along the unsliced dims."""
    x, out = call.x.shape, call.result.shape
    starts = [(0,) if x[i] == out[i] else call.integers(1 + i) for i in range(len(x))]
    if None in starts:
        call.opaque(passes=_alike(call.x, call.result))
        return
    # A slice that would exceed the tensor is moved back into it.
    begin = [min(max(start[0], 0), a - b) for start, a, b in zip(starts, x, out, strict=True) if start is not None]
    call.box(call.x, begin, out, out=call.result)


def _alike(x: Value, y: Value) -> list[tuple[int, int]]:
    """Return the dims that two tensors have of one extent."""
    return [(i, i) for i, (old, new) in enumerate(zip(x.shape, y.shape, strict=True)) if old == new]


def tile(call: JaxCall) -> None:
    """Append a tiling, in which each dim is repeated as a whole."""
    repeats = call.numbers("reps")
    if len(repeats) != len(call.x.shape):
        call.opaque(passes=())
    else:
        call.repeat(call.x, repeats, out=call.result)


def pad(call: JaxCall) -> None:
    """Append a padded tensor, or, where all padding is negative, a slice of it.

    With interior padding, it can be split along the unchanged dims.
    """
    config = [whole(one) for one in call.arguments["padding_config"]]
    is_within = any(inner for *_, inner in config)
    if not is_within and all(low >= 0 and high >= 0 for low, high, _ in config):
        call.give(ops.Pad(before=tuple(low for low, *_ in config)), call.x)
    elif not is_within and all(low <= 0 and high <= 0 for low, high, _ in config):
        call.box(call.x, [-low for low, *_ in config], call.result.shape, out=call.result)
    else:
        call.opaque(passes=[(i, i) for i, one in enumerate(config) if one == (0, 0, 0)])


def positions(call: JaxCall) -> None:
    """Append integers that depend on no input."""
    call.give(ops.Generic(is_index=not call.result.is_float), *call.tensors)


# -- look-ups


def gather(call: JaxCall) -> None:
    """Append a look-up of rows along one dim; a slice where the indices are known and consecutive.

    For other look-ups, dims that are read completely pass through.
    """
    spec = call.arguments["dimension_numbers"]
    axes, sizes = whole(spec.start_index_map), call.numbers("slice_sizes")
    if _is_row(call, spec, axes, sizes):
        if not _piece(call, spec, axes[0]):
            _rows(call, spec, axes[0])
    elif not _of_rows(call, spec, axes) and not _of_every_row(call, spec, axes):
        gone = {*spec.collapsed_slice_dims, *spec.operand_batching_dims}
        kept = [i for i in range(len(call.x.shape)) if i not in gone]
        passes = [
            (i, int(place)) for i, place in zip(kept, spec.offset_dims, strict=True) if sizes[i] == call.x.shape[i]
        ]
        # Batch dims are among those of the indices: the result's dims that are not offsets.
        others = [i for i in range(len(call.result.shape)) if i not in spec.offset_dims]
        batch = zip(spec.operand_batching_dims, spec.start_indices_batching_dims, strict=True)
        call.opaque(passes=sorted([*passes, *((int(dim), others[int(place)]) for dim, place in batch)]))


def scatter(call: JaxCall) -> None:
    """Append a tensor with replaced or increased elements: dims that the updates have completely pass through."""
    x, _, updates = call.tensors[:3]
    spec = call.arguments["dimension_numbers"]
    gone = {*spec.inserted_window_dims, *spec.operand_batching_dims}
    kept = zip((i for i in range(len(x.shape)) if i not in gone), spec.update_window_dims, strict=True)
    moved = spec.scatter_dims_to_operand_dims
    call.opaque(passes=[(i, i) for i, place in kept if updates.shape[place] == x.shape[i] and i not in moved])


def _is_row(call: JaxCall, spec: Any, axes: tuple[int, ...], sizes: tuple[int, ...]) -> bool:
    """Whether each index reads one element along an axis and everything along the others."""
    if len(axes) != 1 or spec.operand_batching_dims or tuple(spec.collapsed_slice_dims) != axes:
        return False
    return all(size == (1 if i in axes else call.x.shape[i]) for i, size in enumerate(sizes))


def _piece(call: JaxCall, spec: Any, axis: int) -> bool:
    """Append the slice that known indices read; False where they are unknown, or not consecutive."""
    table, indices = call.tensors[:2]
    found = run(call.constant(1), table.shape[axis])
    if found is None or len(indices.shape) > 2:
        return False
    piece = call.cut(table, axis, *found)
    if len(indices.shape) == 1:
        call.reshape(piece, out=call.result)
        return True
    order = [axis] * len(piece.shape)
    for dim, place in zip((i for i in range(len(order)) if i != axis), spec.offset_dims, strict=True):
        order[int(place)] = dim
    call.transpose(piece, order, out=call.result)
    return True


def _rows(call: JaxCall, spec: Any, axis: int) -> None:
    table, indices = call.tensors[:2]
    count = len(indices.shape) - 1
    rows = call.transpose(table, (axis, *(i for i in range(len(table.shape)) if i != axis)))
    places = call.reshape(indices, indices.shape[:-1])
    found = call.add(ops.Lookup(), rows, places, shape=(*places.shape, *rows.shape[1:]))
    offsets, lead = whole(spec.offset_dims), iter(range(count))
    order = [count + offsets.index(i) if i in offsets else next(lead) for i in range(len(call.result.shape))]
    call.transpose(found, order, out=call.result)


def _of_rows(call: JaxCall, spec: Any, axes: tuple[int, ...]) -> bool:
    """Append elements along one axis at an index for each point of the other dims; False for other look-ups.

    `jnp.take_along_axis` is of this kind, and so are cross-entropies with class indices.
    """
    table, indices = call.tensors[:2]
    if len(axes) != 1 or tuple(spec.collapsed_slice_dims) != axes or len(spec.offset_dims):
        return False
    (axis,) = axes
    others = tuple(i for i in range(len(table.shape)) if i != axis)
    if tuple(spec.operand_batching_dims) != others:
        return False
    places = whole(spec.start_indices_batching_dims)
    count = prod(call.result.shape) // max(1, prod(table.shape[i] for i in others))
    if places not in (others, tuple(range(len(others)))) or (count > 1 and places != others):
        return False
    box = (*table.shape[:axis], count, *table.shape[axis + 1 :])
    taken = call.gather(table, call.reshape(indices, box), axis)
    call.reshape(taken, out=call.result)
    return True


def _of_every_row(call: JaxCall, spec: Any, axes: tuple[int, ...]) -> bool:
    """Append one element of each row of a table, ``x[arange(n), places]``; False for other look-ups."""
    table, indices = call.tensors[:2]
    joined = call.writer.joined.get(indices.name, ())
    is_plain = axes == tuple(spec.collapsed_slice_dims) == (0, 1) and not spec.operand_batching_dims
    if not is_plain or len(table.shape) != 2 or len(joined) != 2:
        return False
    (_, rows), (places, _) = joined
    count = table.shape[0]
    if rows is None or places.shape != (count, 1) or rows.reshape(-1).tolist() != list(range(count)):
        return False
    taken = call.gather(table, places, 1)
    call.reshape(taken, out=call.result)
    return True


MOVEMENT = table(
    (lambda call: call.reshape(call.x, out=call.result), "reshape squeeze expand_dims"),
    (lambda call: call.transpose(call.x, call.numbers("permutation"), out=call.result), "transpose"),
    (broadcast, "broadcast_in_dim"),
    (
        lambda call: call.box(
            call.x, call.numbers("start_indices"), call.result.shape, call.numbers("strides"), out=call.result
        ),
        "slice",
    ),
    (lambda call: call.split(call.x, int(call.arguments["axis"])), "split unstack"),
    (dynamic_slice, "dynamic_slice"),
    (lambda call: call.opaque(passes=_alike(call.x, call.value(1))), "dynamic_update_slice"),
    (lambda call: concatenate(call, int(call.arguments["dimension"])), "concatenate"),
    (pad, "pad"),
    (lambda call: call.stack(call.tensors, int(call.arguments["axis"]), out=call.result), "stack"),
    (tile, "tile"),
    (positions, "iota zeros_like empty"),
    (gather, "gather"),
    (scatter, "scatter scatter-sub scatter-add scatter_add scatter-mul scatter_mul scatter-min scatter_min"),
    (scatter, "scatter-max scatter_max scatter_apply"),
)
"""By the primitive's name."""


# -- products, convolutions, pooling


def dot_general(call: JaxCall) -> None:
    """Write a sum of products: the batch dims come first in the result, then those of the left, then the right."""
    x, y = call.tensors[:2]
    (over_x, over_y), (batch_x, batch_y) = call.arguments["dimension_numbers"]
    names = iter(letters(len(x.shape) + len(y.shape)))
    left = {i: next(names) for i in range(len(x.shape))}
    right = {int(j): left[int(i)] for i, j in zip((*batch_x, *over_x), (*batch_y, *over_y), strict=True)}
    right |= {j: next(names) for j in range(len(y.shape)) if j not in right}
    batch = "".join(left[int(i)] for i in batch_x)
    summed = {left[int(i)] for i in over_x}
    free = [letter for letter in (*left.values(), *right.values()) if letter not in summed and letter not in batch]
    spare = _spare(call, (left, right), free) if batch else ""
    output = batch + "".join(dict.fromkeys(free))
    reads, told = [], []
    for value, own in ((x, left), (y, right)):
        kept = [i for i in range(len(own)) if own[i] not in spare]
        reads.append(call.reshape(value, [value.shape[i] for i in kept]))
        told.append("".join(own[i] for i in kept))
    kept = [i for i, letter in enumerate(output) if letter not in spare]
    op = ops.Contract(operands=(told[0], told[1]), output="".join(output[i] for i in kept))
    if spare:
        shape = [call.result.shape[i] for i in kept]
        call.reshape(call.add(op, *reads, shape=shape, dtype=call.result.dtype), out=call.result)
    else:
        call.give(op, *reads)


def _spare(call: JaxCall, names: Sequence[Mapping[int, str]], free: Sequence[str]) -> str:
    """Return the letters of dims of extent 1 that an operand has in addition to its own.

    In attention with grouped heads and one head in each group, the product is then an ordinary one.
    """
    found = ""
    for value, own in zip(call.tensors, names, strict=False):
        mine = [i for i, letter in own.items() if letter in free]
        ones = [own[i] for i in mine if value.shape[i] == 1]
        found += "".join(ones if len(ones) < len(mine) else ones[1:])
    return found


def convolution(call: JaxCall) -> None:
    """Append a convolution in the layout of its input; one with a dilated input is the gradient of another.

    With batch groups, with a dilated input and groups, and with both dilated, only the shapes are known.
    """
    x, w = call.tensors[:2]
    spec = call.arguments["dimension_numbers"]
    lhs, rhs, out = whole(spec.lhs_spec), whole(spec.rhs_spec), whole(spec.out_spec)
    stride, spread, dilation = (call.numbers(key) for key in ("window_strides", "lhs_dilation", "rhs_dilation"))
    groups, is_plain = int(call.arguments["feature_group_count"]), call.arguments["batch_group_count"] == 1
    is_transposed = any(d != 1 for d in spread)
    is_known = is_plain and len(lhs) in (3, 4, 5)
    if not is_known or (is_transposed and (groups != 1 or any(s != 1 for s in stride))):
        call.opaque(passes=((lhs[0], out[0]),) if is_plain else ())
        return
    pads = tuple((int(first), int(last)) for first, last in call.arguments["padding"])
    if is_transposed:
        reach = [d * (w.shape[place] - 1) for d, place in zip(dilation, rhs[2:], strict=True)]
        pads = tuple((r - first, r - last) for r, (first, last) in zip(reach, pads, strict=True))
    op = ops.Convolve(
        batch=lhs[0],
        channels=lhs[1],
        spatial=lhs[2:],
        filters=(rhs[1], rhs[0], *rhs[2:]) if is_transposed else rhs,
        stride=spread if is_transposed else stride,
        dilation=dilation,
        pads=pads,
        groups=groups,
        is_transposed=is_transposed,
        is_reversed=is_transposed,
    )
    # The vocabulary has the result's dims in the order of the input's.
    place = dict(zip(lhs, out, strict=True))
    source = dict(zip(out, lhs, strict=True))
    if lhs == out:
        call.give(op, x, w)
    else:
        shape = [call.result.shape[place[i]] for i in range(len(lhs))]
        own = call.add(op, x, w, shape=shape, dtype=call.result.dtype)
        call.transpose(own, [source[i] for i in range(len(lhs))], out=call.result)


def ragged_dot(call: JaxCall) -> None:
    """Write a product of rows, each with one of several matrices: as many FLOP as with a single one."""
    x, w = call.tensors[:2]
    if len(x.shape) != 2 or len(w.shape) != 3 or call.result.shape != (x.shape[0], w.shape[2]):
        call.opaque()
    else:
        call.give(ops.Contract(operands=("mk", "gkn"), output="mn", share=1.0 / w.shape[0]), *call.tensors[:3])


_POOLS = {"reduce_window_sum": "mean", "reduce_window_max": "max", "reduce_window_min": "max", "reduce_window": "max"}
"""A sum over windows touches what their mean does; the division after it is part of the pooling."""


def pooling(call: JaxCall) -> None:
    """Write a maximum, minimum or sum over windows; over an input that is dilated only the shapes are known."""
    shape = call.x.shape
    kernel, stride, dilation = (call.numbers(key) for key in ("window_dimensions", "window_strides", "window_dilation"))
    pads = tuple((int(first), int(last)) for first, last in call.arguments["padding"])
    moved = [i for i, k in enumerate(kernel) if k != 1 or stride[i] != 1 or pads[i] != (0, 0)]
    # Batch and channels are not spatial: other dims of extent 1 are omitted.
    others = [i for i in range(len(shape)) if i not in moved]
    ones = [i for i in others if shape[i] == 1]
    gone = ones[max(0, len(ones) - (len(others) - 2)) :] if len(others) > 2 else []
    is_dilated = any(d != 1 for d in call.arguments["base_dilation"])
    if len(call.results) != 1 or is_dilated or not 1 <= len(moved) <= 3 or len(others) - len(gone) != 2:
        call.opaque(over=moved)
        return
    kept = [i for i in range(len(shape)) if i not in gone]
    op = ops.Pool(
        function=_POOLS[call.name],  # type: ignore[arg-type]
        spatial=tuple(kept.index(i) for i in moved),
        kernel=tuple(kernel[i] for i in moved),
        stride=tuple(stride[i] for i in moved),
        dilation=tuple(dilation[i] for i in moved),
        pads=tuple(pads[i] for i in moved),
        counts_padding=True,
    )
    seen = call.reshape(call.x, [shape[i] for i in kept])
    if seen is call.x:
        call.give(op, seen)
    else:
        call.reshape(call.add(op, seen, shape=[call.result.shape[i] for i in kept]), out=call.result)


PRODUCTS = table(
    (dot_general, "dot_general"),
    (convolution, "conv_general_dilated"),
    (ragged_dot, "ragged_dot ragged_dot_general"),
    (pooling, " ".join(_POOLS)),
    # A decomposition or a solution of matrices can be split along the dims before the last two.
    (
        lambda call: call.opaque(over=(-2, -1)),
        """
        cholesky eig eigh lu qr schur svd triangular_solve geqrf geqp3 hessenberg householder_product tridiagonal_solve
        """,
    ),
)
"""By the primitive's name."""


# -- operators that JAX lacks


def stated(
    jax: Any,
    name: str,
    write: Callable[[JaxCall], object],
    tensors: Sequence[Any],
    results: Sequence[tuple[Sequence[int], Any]],
) -> list[Any]:
    """Return the results of an operator that is not a JAX primitive: it is traced as one, and read by its translation.

    Args:
        jax: The module.
        name: Name of the operator.
        write: Translates it when the program is read.
        tensors: Its inputs.
        results: Shape and type of each result.
    """
    shapes = tuple(jax.core.ShapedArray(tuple(shape), jax.numpy.dtype(dtype)) for shape, dtype in results)
    found: list[Any] = _stated_primitive().bind(*tensors, name=name, write=write, results=shapes)
    return found


@cache
def _stated_primitive() -> Any:
    from jax.extend.core import Primitive

    primitive = Primitive("stated")
    primitive.multiple_results = True
    primitive.def_abstract_eval(lambda *_, results, **__: results)
    return primitive


STATED = {"stated": lambda call: call.arguments["write"](replace(call, name=call.arguments["name"]))}
"""By the primitive's name."""
