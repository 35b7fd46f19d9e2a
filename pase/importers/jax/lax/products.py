"""Products and convolutions."""

from collections.abc import Mapping, Sequence
from typing import Any

from pase.importers.ir import Contract, Convolve, Reshape, Transpose
from pase.importers.jax.lax.call import Call, Step, Translation, generic, reshaped, step

_LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"


def dot_general(call: Call) -> list[Step]:
    """Return a sum of products: the batch dims come first in the result, then those of the left, then the right."""
    x, y = call.inputs[:2]
    (over_x, over_y), (batch_x, batch_y) = call.params["dimension_numbers"]
    letters = iter(_LETTERS)
    left = {int(i): next(letters) for i in range(len(x.shape))}
    right = {int(j): left[int(i)] for i, j in zip((*batch_x, *over_x), (*batch_y, *over_y), strict=True)}
    right |= {j: next(letters) for j in range(len(y.shape)) if j not in right}
    batch = "".join(left[int(i)] for i in batch_x)
    summed = {left[int(i)] for i in over_x}
    free = [letter for letter in (*left.values(), *right.values()) if letter not in summed and letter not in batch]
    operands = tuple("".join(own[i] for i in range(len(own))) for own in (left, right))
    output = batch + "".join(dict.fromkeys(free))
    spare = _spare(call, (left, right), batch, free) if batch else ""
    if not spare:
        return step(call, Contract(operands=(operands[0], operands[1]), output=output), x, y)
    steps: list[Step] = []
    reads = []
    for value, own in zip((x, y), operands, strict=True):
        shape = [extent for extent, letter in zip(value.shape, own, strict=True) if letter not in spare]
        more, seen = reshaped(call, value, shape, f"of_{own}")
        steps += more
        reads.append(seen)
    told = ["".join(letter for letter in own if letter not in spare) for own in (*operands, output)]
    shape = [e for e, letter in zip(call.results[0].shape, output, strict=True) if letter not in spare]
    product = call.inner("product", shape)
    op = Contract(operands=(told[0], told[1]), output=told[2])
    steps.append(Step(op=op, inputs=(reads[0].name, reads[1].name), outputs=(product,)))
    return [*steps, *step(call, Reshape(), product)]


def _spare(call: Call, letters: Sequence[Mapping[int, str]], batch: str, free: Sequence[str]) -> str:
    """Return the letters of dims of one element that an operand has besides others of its own.

    Attention of grouped heads, where each group has one: the product is that of plain heads.
    """
    found = ""
    for value, own in zip(call.inputs, letters, strict=False):
        mine = [i for i, letter in own.items() if letter in free and letter not in batch]
        ones = [own[i] for i in mine if value.shape[i] == 1]
        found += "".join(ones if len(ones) < len(mine) else ones[1:])
    return found


def convolution(call: Call) -> list[Step]:
    """Return a convolution in the layout of its input; one whose input is dilated is the gradient of another.

    Of groups of the batch, of a dilated input with groups, and where both are dilated, only the shapes are known.
    """
    x, w = call.inputs[:2]
    numbers = call.params["dimension_numbers"]
    lhs, rhs, out = (_whole(spec) for spec in (numbers.lhs_spec, numbers.rhs_spec, numbers.out_spec))
    stride, pads = _whole(call.params["window_strides"]), call.params["padding"]
    spread, dilation = _whole(call.params["lhs_dilation"]), _whole(call.params["rhs_dilation"])
    groups = int(call.params["feature_group_count"])
    is_transposed = any(d != 1 for d in spread)
    if (
        call.params["batch_group_count"] != 1
        or (is_transposed and (groups != 1 or any(s != 1 for s in stride)))
        or len(lhs) not in (3, 4, 5)
    ):
        return generic(call, ((lhs[0], out[0]),) if call.params["batch_group_count"] == 1 else ())
    filters = (rhs[1], rhs[0], *rhs[2:]) if is_transposed else rhs
    before = tuple((int(first), int(last)) for first, last in pads)
    if is_transposed:
        reach = [d * (w.shape[place] - 1) for d, place in zip(dilation, rhs[2:], strict=True)]
        before = tuple((r - first, r - last) for r, (first, last) in zip(reach, before, strict=True))
    op = Convolve(
        batch=lhs[0],
        channels=lhs[1],
        spatial=lhs[2:],
        filters=filters,
        stride=spread if is_transposed else stride,
        dilation=dilation,
        pads=before,
        groups=groups,
        is_transposed=is_transposed,
    )
    if lhs == out:
        return step(call, op, x, w)
    # The vocabulary has the result's dims in the order of the input's.
    shape = [0] * len(lhs)
    for place, source in zip(lhs, out, strict=True):
        shape[place] = call.results[0].shape[source]
    own = call.inner("own", shape)
    order = [0] * len(lhs)
    for place, source in zip(lhs, out, strict=True):
        order[source] = place
    first = Step(op=op, inputs=(x.name, w.name), outputs=(own,))
    return [first, *step(call, Transpose(order=tuple(order)), own)]


def ragged_dot(call: Call) -> list[Step]:
    """Return a product of rows, each with one of several matrices: as many FLOP as with a single one."""
    x, w = call.inputs[:2]
    if len(x.shape) != 2 or len(w.shape) != 3 or call.results[0].shape != (x.shape[0], w.shape[2]):
        return generic(call)
    op = Contract(operands=("mk", "gkn"), output="mn", share=1.0 / w.shape[0])
    return step(call, op, x, w, *call.inputs[2:3])


def _whole(numbers: Sequence[Any]) -> tuple[int, ...]:
    return tuple(int(number) for number in numbers)


PRODUCTS: dict[str, Translation] = {
    "dot_general": dot_general,
    "conv_general_dilated": convolution,
    **dict.fromkeys(("ragged_dot", "ragged_dot_general"), ragged_dot),
}
