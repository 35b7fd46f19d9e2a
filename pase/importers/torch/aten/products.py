"""Products: linear layers, matrix products, einsum."""

from pase.importers.ir import Contract, Op, Pad, Pointwise, Reduce, Reshape, Slice, Step, Transpose, Value
from pase.importers.torch.aten.call import Call, generic, inner, letters, reshaped, step, step_to, table, uses


def linear(call: Call) -> list[Step]:
    """Return x · wᵀ + bias."""
    x, w, bias = call.value("input"), call.value("weight"), call.maybe("bias")
    lead = letters(len(x.shape) - 1, without="kn")
    if len(w.shape) == 1:
        return step(call, Contract(operands=(f"{lead}k", "k"), output=lead), x, w)
    return step(call, Contract(operands=(f"{lead}k", "nk"), output=f"{lead}n", has_bias=bool(bias)), x, w, *bias)


def matmul(call: Call) -> list[Step]:
    """Return a product as NumPy's matmul has it; batch dims that only one operand has are read again and again."""
    x, y = call.tensors[:2]
    ranks = len(x.shape), len(y.shape)
    lead = letters(max(*ranks, 2) - 2, without="kmn")
    left = "k" if ranks[0] == 1 else lead[len(lead) - (ranks[0] - 2) :] + "mk"
    right = "k" if ranks[1] == 1 else lead[len(lead) - (ranks[1] - 2) :] + "kn"
    output = lead + ("m" if ranks[0] > 1 else "") + ("n" if ranks[1] > 1 else "")
    if ranks[1] == 1:
        return _weighted_sum(call, x, y)
    return _product(call, [x, y], [left, right], output)


def addmm(call: Call) -> list[Step]:
    """Return input + mat1 · mat2."""
    bias, x, w = call.value("input"), call.value("mat1"), call.value("mat2")
    if len(bias.shape) == 1 and bias.shape[0] == w.shape[1]:
        return step(call, Contract(operands=("mk", "kn"), output="mn", has_bias=True), x, w, bias)
    return _added(call, bias, Contract(operands=("mk", "kn"), output="mn"), x, w)


def baddbmm(call: Call) -> list[Step]:
    """Return input + batch1 · batch2."""
    bias, x, y = call.value("input"), call.value("batch1"), call.value("batch2")
    return _added(call, bias, Contract(operands=("amk", "akn"), output="amn"), x, y)


def _weighted_sum(call: Call, x: Value, vector: Value, result: Value | None = None) -> list[Step]:
    """Return the last dim summed, weighted by a vector: a pass over a tensor, which no matrix product is."""
    result = result or call.result
    terms = inner(call, "terms", x.shape)
    return [
        step_to(Pointwise(functions=("multiply",)), terms, x, vector),
        step_to(Reduce(function="sum", over=(len(x.shape) - 1,)), result, terms),
    ]


def addmv(call: Call) -> list[Step]:
    """Return input + mat · vec."""
    summed = inner(call, "summed", call.result.shape)
    steps = _weighted_sum(call, call.value("mat"), call.value("vec"), summed)
    return [*steps, *step(call, Pointwise(functions=("add",)), summed, call.value("input"))]


def outer(call: Call) -> list[Step]:
    """Return the product of every pair."""
    x, y = call.tensors[:2]
    steps, column = reshaped(call, x, (x.shape[0], 1), "column")
    return [*steps, *step(call, Pointwise(functions=("multiply",)), column, y)]


def bilinear(call: Call) -> list[Step]:
    """Return x₁ · w · x₂ + bias as two products."""
    x, y, w = call.value("input1"), call.value("input2"), call.value("weight")
    bias = call.maybe("bias")
    lead = letters(len(x.shape) - 1, without="nxy")
    first = inner(call, "first", (*x.shape[:-1], w.shape[0], y.shape[-1]))
    second = Contract(operands=(f"{lead}ny", f"{lead}y"), output=f"{lead}n", has_bias=bool(bias))
    return [
        step_to(Contract(operands=(f"{lead}x", "nxy"), output=f"{lead}ny"), first, x, w),
        *step(call, second, first, y, *bias),
    ]


def einsum(call: Call) -> list[Step]:
    """Return a sum of products of tensors, two at a time from the left; a diagonal is not known."""
    tensors = list(call.tensors)
    parsed = _parsed(str(call.get("equation", "")), tensors)
    if parsed is None:
        return generic(call)
    operands, output = parsed
    extents = _extents(tensors, operands)
    steps: list[Step] = []
    while len(tensors) > 2:
        rest = set("".join(operands[2:]) + output)
        kept = "".join(c for c in dict.fromkeys(operands[0] + operands[1]) if c in rest)
        made = inner(call, f"product{len(tensors)}", tuple(extents[c] for c in kept))
        steps += _product(call, tensors[:2], operands[:2], kept, made)
        tensors, operands = [made, *tensors[2:]], [kept, *operands[2:]]
    if len(tensors) == 1:
        return _single(call, tensors[0], operands[0], output)
    return [*steps, *_product(call, tensors, operands, output)]


def _parsed(equation: str, tensors: list[Value]) -> tuple[list[str], str] | None:
    """Return the letters of each tensor's dims and of the result's; None where one has a letter twice."""
    inputs, arrow, output = equation.replace(" ", "").partition("->")
    operands = inputs.split(",")
    if len(operands) != len(tensors):
        return None
    spare = letters(8, without=equation)
    if not arrow:
        every = inputs.replace(",", "").replace("...", "")
        output = ("..." if "..." in inputs else "") + "".join(sorted(c for c in set(every) if every.count(c) == 1))
    widths = [len(v.shape) - len(o.replace("...", "")) for v, o in zip(tensors, operands, strict=True) if "..." in o]
    width = max(widths, default=0)
    full = [
        operand.replace("...", spare[width - (len(value.shape) - len(operand.replace("...", ""))) : width])
        for value, operand in zip(tensors, operands, strict=True)
    ]
    if any(len(set(operand)) != len(operand) for operand in full):
        return None
    return full, output.replace("...", spare[:width])


def _extents(tensors: list[Value], operands: list[str]) -> dict[str, int]:
    """Return the extent of every letter: a dim of one element is repeated to the other's."""
    found: dict[str, int] = {}
    for value, operand in zip(tensors, operands, strict=True):
        for letter, extent in zip(operand, value.shape, strict=True):
            found[letter] = max(extent, found.get(letter, 1))
    return found


def _single(call: Call, x: Value, operand: str, output: str) -> list[Step]:
    """Return one tensor summed over some dims, the others in another order."""
    over = tuple(i for i, c in enumerate(operand) if c not in output)
    left = [c for c in operand if c in output]
    order = tuple(left.index(c) for c in output)
    if not over:
        return step(call, Transpose(order=order), x)
    summed = inner(call, "summed", tuple(e for i, e in enumerate(x.shape) if i not in over))
    return [step_to(Reduce(function="sum", over=over), summed, x), *step(call, Transpose(order=order), summed)]


def _product(
    call: Call, tensors: list[Value], operands: list[str], output: str, result: Value | None = None
) -> list[Step]:
    """Return a product of two tensors.

    Dims of one element that the other has more of are seen through; those that one alone has are summed before.
    """
    result = result or call.result
    steps: list[Step] = []
    found: list[Value] = []
    extents = _extents(tensors, operands)
    told = list(operands)
    for i, value in enumerate(tensors):
        alone = tuple(place for place, c in enumerate(operands[i]) if c not in output and c not in operands[1 - i])
        if alone:
            shape = tuple(e for place, e in enumerate(value.shape) if place not in alone)
            summed = inner(call, f"{result.name}:summed{i}", shape, value.dtype)
            steps.append(step_to(Reduce(function="sum", over=alone), summed, value))
            value = summed
            told[i] = "".join(c for place, c in enumerate(operands[i]) if place not in alone)
        kept = [
            place
            for place, (c, extent) in enumerate(zip(told[i], value.shape, strict=True))
            if extent == extents[c] or c not in operands[1 - i]
        ]
        more, value = reshaped(call, value, [value.shape[place] for place in kept], f"{result.name}:operand{i}")
        steps += more
        told[i] = "".join(told[i][place] for place in kept)
        found.append(value)
    if set(told[0] + told[1]) <= set(output):
        return [*steps, *_multiplied(call, found, told, output, result)]
    op: Op = Contract(operands=(told[0], told[1]), output=output)
    return [*steps, Step(op=op, inputs=uses(*found), outputs=(result,))]


def _multiplied(call: Call, tensors: list[Value], operands: list[str], output: str, result: Value) -> list[Step]:
    """Return a product without a sum: both tensors are brought to the dims of the result, where they lack none."""
    steps: list[Step] = []
    found: list[Value] = []
    for i, (value, operand) in enumerate(zip(tensors, operands, strict=True)):
        order = tuple(operand.index(c) for c in output if c in operand)
        turned = inner(call, f"{result.name}:turned{i}", tuple(value.shape[j] for j in order), value.dtype)
        steps.append(step_to(Transpose(order=order), turned, value))
        extents = dict(zip(operand, value.shape, strict=True))
        more, seen = reshaped(call, turned, tuple(extents.get(c, 1) for c in output), f"{result.name}:wide{i}")
        steps += more
        found.append(seen)
    return [*steps, step_to(Pointwise(functions=("multiply",)), result, *found)]


def _added(call: Call, bias: Value, product: Contract, *operands: Value) -> list[Step]:
    between = inner(call, "product", call.result.shape)
    if call.get("beta", 1) == 0:
        return step(call, product, *operands)
    return [step_to(product, between, *operands), *step(call, Pointwise(functions=("add",)), between, bias)]


def tensordot(call: Call) -> list[Step]:
    """Return a product summed over given dims of both."""
    x, y = call.tensors[:2]
    mine = [d % len(x.shape) for d in call.get("dims_self", [])]
    other = [d % len(y.shape) for d in call.get("dims_other", [])]
    left = letters(len(x.shape))
    fresh = letters(len(x.shape) + len(y.shape))[len(x.shape) :]
    right = "".join(left[mine[other.index(i)]] if i in other else fresh[i] for i in range(len(y.shape)))
    output = "".join(c for i, c in enumerate(left) if i not in mine)
    output += "".join(c for i, c in enumerate(right) if i not in other)
    return _product(call, [x, y], [left, right], output)


def inner_product(call: Call) -> list[Step]:
    """Return the products of last dims, summed over them."""
    x, y = call.tensors[:2]
    fresh = letters(len(x.shape) + len(y.shape) - 2, without="k")
    left, right = fresh[: len(x.shape) - 1], fresh[len(x.shape) - 1 :]
    return step(call, Contract(operands=(f"{left}k", f"{right}k"), output=left + right), x, y)


def grouped_mm(call: Call) -> list[Step]:
    """Return rows, each multiplied by the matrix of its own group: inputs [m, k], [groups, k, n], ends of the groups.

    Every group is taken to have as many rows, which are made more where they cannot be shared out evenly.
    """
    x, w = call.tensors[:2]
    if len(x.shape) != 2 or len(w.shape) != 3:
        return generic(call)
    (rows, width), (groups, _, columns) = x.shape, w.shape
    each = -(-rows // groups)
    steps: list[Step] = []
    if each * groups != rows:
        padded = inner(call, "padded", (each * groups, width))
        steps, x = [step_to(Pad(before=(0, 0)), padded, x)], padded
    apart, told = reshaped(call, x, (groups, each, width), "rows")
    made = inner(call, "groups", (groups, each, columns))
    steps += [*apart, step_to(Contract(operands=("gmk", "gkn"), output="gmn"), made, told, w)]
    if each * groups == rows:
        return [*steps, *step(call, Reshape(), made)]
    together = inner(call, "together", (each * groups, columns))
    cut = Slice(starts=(0, 0), steps=(1, 1))
    return [*steps, step_to(Reshape(), together, made), *step(call, cut, together)]


TRANSLATIONS = table(
    (linear, "linear"),
    (matmul, "matmul mm bmm mv dot vdot __matmul__ linalg_matmul"),
    (addmm, "addmm _addmm_activation"),
    (baddbmm, "baddbmm"),
    (addmv, "addmv"),
    (outer, "outer ger"),
    (bilinear, "bilinear"),
    (einsum, "einsum"),
    (tensordot, "tensordot"),
    (inner_product, "inner"),
    (grouped_mm, "_grouped_mm grouped_mm grouped_mm_fallback"),
)
"""Of products, by the operator's name."""
