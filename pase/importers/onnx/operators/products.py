"""Sums of products: matrix products, Gemm and Einsum."""

from collections.abc import Mapping
from types import MappingProxyType

from pase.importers.ir import Contract, Pointwise, Reduce, Reshape, Step, Transpose, Value
from pase.importers.onnx.operators.call import Call, Translation, generic, inner, node, step

_LETTERS = "abcdefghij"


def matmul(call: Call) -> list[Step]:
    """Return a product as NumPy's matmul has it."""
    return product(call, call.value(0), call.value(1), call.out)


def product(call: Call, x: Value, y: Value, out: Value) -> list[Step]:
    """Return out = x · y; leading dims of one element, or that one operand lacks, are read again and again."""
    if not x.shape or not y.shape:
        raise ValueError("a product needs matrices")
    last_x = "mk" if len(x.shape) > 1 else "k"
    last_y = "kn" if len(y.shape) > 1 else "k"
    rank = max(len(x.shape) - len(last_x), len(y.shape) - len(last_y))
    if rank > len(_LETTERS):
        return generic(call)
    full = out.shape[:rank]
    steps: list[Step] = []
    operands: list[str] = []
    values: list[Value] = []
    for tag, value, last in (("x", x, last_x), ("y", y, last_y)):
        lead = value.shape[: len(value.shape) - len(last)]
        first = rank - len(lead)
        keeps = [i for i, extent in enumerate(lead) if extent == full[first + i]]
        if len(keeps) < len(lead):
            shape = (*(lead[i] for i in keeps), *value.shape[len(lead) :])
            seen = inner(call, tag, shape, value.dtype)
            steps.append(node(Reshape(), (value,), seen))
            value = seen
        values.append(value)
        operands.append("".join(_LETTERS[first + i] for i in keeps) + last)
    output = _LETTERS[:rank] + ("m" if "m" in last_x else "") + ("n" if "n" in last_y else "")
    op = Contract(operands=(operands[0], operands[1]), output=output)
    return [*steps, node(op, (values[0], values[1]), out)]


def gemm(call: Call) -> list[Step]:
    """Return alpha · x · y + beta · c, either of the factors perhaps transposed."""
    x, y, out = call.value(0), call.value(1), call.out
    operands = ("km" if call.whole("transA", 0) else "mk", "nk" if call.whole("transB", 0) else "kn")
    alpha, beta = call.number("alpha", 1.0), call.number("beta", 1.0)
    if not call.has(2) or beta == 0:
        return _scaled(call, Contract(operands=operands, output="mn"), (x, y), alpha, out)
    c = call.value(2)
    steps: list[Step] = []
    if beta != 1:
        scaled = inner(call, "beta", c.shape, c.dtype)
        steps.append(node(Pointwise(functions=("multiply",), constant=beta), (c,), scaled))
        c = scaled
    if alpha == 1 and c.shape in ((out.shape[1],), (1, out.shape[1])):
        if len(c.shape) == 2:
            flat = inner(call, "bias", c.shape[1:], c.dtype)
            steps.append(node(Reshape(), (c,), flat))
            c = flat
        op = Contract(operands=operands, output="mn", has_bias=True)
        return [*steps, node(op, (x, y, c), out)]
    plain = inner(call, "product", out.shape)
    op = Contract(operands=operands, output="mn")
    return [*steps, *_scaled(call, op, (x, y), alpha, plain), node(Pointwise(functions=("add",)), (plain, c), out)]


def _scaled(call: Call, op: Contract, inputs: tuple[Value, Value], scale: float, out: Value) -> list[Step]:
    """Return out = scale · product."""
    if scale == 1:
        return [node(op, inputs, out)]
    plain = inner(call, "unscaled", out.shape)
    return [node(op, inputs, plain), node(Pointwise(functions=("multiply",), constant=scale), (plain,), out)]


def fused_matmul(call: Call) -> list[Step]:
    """Return alpha · x · y with the last two dims of either perhaps transposed."""
    steps: list[Step] = []
    values = []
    for i, name in enumerate(("transA", "transB")):
        value = call.value(i)
        rank = len(value.shape)
        if call.whole(name, 0) and rank > 1:
            shape = (*value.shape[:-2], value.shape[-1], value.shape[-2])
            turned = inner(call, name, shape, value.dtype)
            steps.append(node(Transpose(order=(*range(rank - 2), rank - 1, rank - 2)), (value,), turned))
            value = turned
        values.append(value)
    alpha = call.number("alpha", 1.0)
    if alpha == 1:
        return [*steps, *product(call, values[0], values[1], call.out)]
    plain = inner(call, "unscaled", call.out.shape)
    scaled = node(Pointwise(functions=("multiply",), constant=alpha), (plain,), call.out)
    return [*steps, *product(call, values[0], values[1], plain), scaled]


def einsum(call: Call) -> list[Step]:
    """Return a sum of products of two tensors, or a sum and transposition of one; of more it is not known."""
    equation = call.text("equation", "").replace(" ", "")
    left, arrow, output = equation.partition("->")
    operands = left.split(",")
    values = call.given
    if "." in equation:
        expanded = _without_ellipsis(operands, output, [len(value.shape) for value in values])
        if expanded is None or not arrow:
            return generic(call)
        operands, output = expanded
    if not arrow:
        letters = sorted(set("".join(operands)))
        output = "".join(c for c in letters if "".join(operands).count(c) == 1)
    if any(len(set(o)) != len(o) or len(o) != len(v.shape) for o, v in zip(operands, values, strict=True)):
        return generic(call)
    if len(operands) == 1:
        return _single(call, operands[0], output)
    extents = [dict(zip(o, v.shape, strict=True)) for o, v in zip(operands, values, strict=True)]
    if len(operands) != 2 or any(extents[1].get(c, e) != e for c, e in extents[0].items()):
        return generic(call)
    if any((c in operands[0]) != (c in operands[1]) and c not in output for c in set("".join(operands))):
        # A letter that one operand alone has is summed before the product.
        return generic(call)
    return step(call, Contract(operands=(operands[0], operands[1]), output=output), *values)


def _without_ellipsis(operands: list[str], output: str, ranks: list[int]) -> tuple[list[str], str] | None:
    """Return the letters with those that "..." stands for written out; None where the operands' differ in number."""
    spare = "ABCDEFGHIJ"
    counts = {rank - len(o.replace("...", "")) for o, rank in zip(operands, ranks, strict=True) if "..." in o}
    if len(counts) != 1 or not 0 <= (count := counts.pop()) <= len(spare) or set(spare) & set("".join(operands)):
        return None
    return [o.replace("...", spare[:count]) for o in operands], output.replace("...", spare[:count])


def _single(call: Call, operand: str, output: str) -> list[Step]:
    x = call.x
    if not set(output) <= set(operand):
        return generic(call)
    kept = [c for c in operand if c in output]
    over = tuple(i for i, c in enumerate(operand) if c not in output)
    order = tuple(kept.index(c) for c in output)
    if not over:
        return step(call, Transpose(order=order), x)
    summed = inner(call, "sum", tuple(e for i, e in enumerate(x.shape) if i not in over))
    return [node(Reduce(function="sum", over=over), (x,), summed), *step(call, Transpose(order=order), summed)]


PRODUCTS: Mapping[str, Translation] = MappingProxyType(
    {
        "MatMul": matmul,
        "Gemm": gemm,
        "Einsum": einsum,
        **dict.fromkeys(("FusedMatMul", "TransposeMatMul"), fused_matmul),
    }
)
"""By the operator's name."""
