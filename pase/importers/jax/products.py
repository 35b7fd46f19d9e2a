"""Products, convolutions, pooling, and decompositions of matrices."""

from collections.abc import Mapping, Sequence

from pase.importers.ir import Contract, Convolve, Pool
from pase.importers.ir.steps import letters
from pase.importers.jax.call import JaxCall, Translation, whole


def dot_general(call: JaxCall) -> None:
    """Write a sum of products: the batch dims come first in the result, then those of the left, then the right."""
    x, y = call.inputs[:2]
    (over_x, over_y), (batch_x, batch_y) = call.params["dimension_numbers"]
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
    op = Contract(operands=(told[0], told[1]), output="".join(output[i] for i in kept))
    if spare:
        shape = [call.result.shape[i] for i in kept]
        call.reshape(call.add(op, *reads, shape=shape, dtype=call.result.dtype), out=call.result)
    else:
        call.give(op, *reads)


def _spare(call: JaxCall, names: Sequence[Mapping[int, str]], free: Sequence[str]) -> str:
    """Return the letters of dims of one element that an operand has besides others of its own.

    Attention of grouped heads, where each group has one: the product is that of plain heads.
    """
    found = ""
    for value, own in zip(call.inputs, names, strict=False):
        mine = [i for i, letter in own.items() if letter in free]
        ones = [own[i] for i in mine if value.shape[i] == 1]
        found += "".join(ones if len(ones) < len(mine) else ones[1:])
    return found


def convolution(call: JaxCall) -> None:
    """Write a convolution in the layout of its input; one whose input is dilated is the gradient of another.

    Of groups of the batch, of a dilated input with groups, and where both are dilated, only the shapes are known.
    """
    x, w = call.inputs[:2]
    spec = call.params["dimension_numbers"]
    lhs, rhs, out = whole(spec.lhs_spec), whole(spec.rhs_spec), whole(spec.out_spec)
    stride, spread, dilation = (call.numbers(key) for key in ("window_strides", "lhs_dilation", "rhs_dilation"))
    groups, is_plain = int(call.params["feature_group_count"]), call.params["batch_group_count"] == 1
    is_transposed = any(d != 1 for d in spread)
    is_known = is_plain and len(lhs) in (3, 4, 5)
    if not is_known or (is_transposed and (groups != 1 or any(s != 1 for s in stride))):
        call.opaque(passes=((lhs[0], out[0]),) if is_plain else ())
        return
    pads = tuple((int(first), int(last)) for first, last in call.params["padding"])
    if is_transposed:
        reach = [d * (w.shape[place] - 1) for d, place in zip(dilation, rhs[2:], strict=True)]
        pads = tuple((r - first, r - last) for r, (first, last) in zip(reach, pads, strict=True))
    op = Convolve(
        batch=lhs[0],
        channels=lhs[1],
        spatial=lhs[2:],
        filters=(rhs[1], rhs[0], *rhs[2:]) if is_transposed else rhs,
        stride=spread if is_transposed else stride,
        dilation=dilation,
        pads=pads,
        groups=groups,
        is_transposed=is_transposed,
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
    x, w = call.inputs[:2]
    if len(x.shape) != 2 or len(w.shape) != 3 or call.result.shape != (x.shape[0], w.shape[2]):
        call.opaque()
    else:
        call.give(Contract(operands=("mk", "gkn"), output="mn", share=1.0 / w.shape[0]), *call.inputs[:3])


_POOLS = {"reduce_window_sum": "mean", "reduce_window_max": "max", "reduce_window_min": "max", "reduce_window": "max"}
"""A sum over windows touches what their mean does; the division after it is part of the pooling."""


def pooling(call: JaxCall) -> None:
    """Write a maximum, minimum or sum over windows; over an input that is dilated only the shapes are known."""
    shape = call.x.shape
    kernel, stride, dilation = (call.numbers(key) for key in ("window_dimensions", "window_strides", "window_dilation"))
    pads = tuple((int(first), int(last)) for first, last in call.params["padding"])
    moved = [i for i, k in enumerate(kernel) if k != 1 or stride[i] != 1 or pads[i] != (0, 0)]
    # Two dims are not spatial, batch and channels: others of one element are left out.
    others = [i for i in range(len(shape)) if i not in moved]
    ones = [i for i in others if shape[i] == 1]
    gone = ones[max(0, len(ones) - (len(others) - 2)) :] if len(others) > 2 else []
    is_dilated = any(d != 1 for d in call.params["base_dilation"])
    if len(call.results) != 1 or is_dilated or not 1 <= len(moved) <= 3 or len(others) - len(gone) != 2:
        call.opaque(over=moved)
        return
    kept = [i for i in range(len(shape)) if i not in gone]
    op = Pool(
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


def _matrices(call: JaxCall) -> None:
    """Write a decomposition or a solution of matrices: it can be split along the dims before the last two."""
    call.opaque(over=(-2, -1))


PRODUCTS: dict[str, Translation] = {
    "dot_general": dot_general,
    "conv_general_dilated": convolution,
    **dict.fromkeys(("ragged_dot", "ragged_dot_general"), ragged_dot),
    **dict.fromkeys(_POOLS, pooling),
    **dict.fromkeys(("cholesky", "eig", "eigh", "lu", "qr", "schur", "svd", "triangular_solve"), _matrices),
    **dict.fromkeys(("geqrf", "geqp3", "hessenberg", "householder_product", "tridiagonal_solve"), _matrices),
}
"""By the primitive's name."""
