"""Dense layers, products of tensors and embeddings."""

from pase.importers.ir import Contract, Lookup, Pointwise, Reduce, Transpose
from pase.importers.keras.layers.call import Call, Translation, UntranslatableError, Value

_LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"


def dense(call: Call) -> None:
    """Write x · kernel + bias."""
    layer = call.operation
    _check_plain(layer)
    lead = _LETTERS[: len(call.x.shape) - 1]
    op = Contract(operands=(f"{lead}y", "yz"), output=f"{lead}z", has_bias=layer.bias is not None)
    call.emit_activated(op, call.x, *call.parameters(layer._kernel, layer.bias), activation=layer.activation)


def einsum_dense(call: Call) -> None:
    """Write an einsum with a kernel, and a bias."""
    layer = call.operation
    _check_plain(layer)
    kernel, bias = call.parameter(layer._kernel), layer.bias
    operands, output = equation(layer.equation, (call.x, kernel))
    out = call.result.shape
    is_last = bias is not None and tuple(bias.shape) == out[len(out) - len(bias.shape) :]
    op = Contract(operands=(operands[0], operands[1]), output=output, has_bias=is_last)
    if bias is None or is_last:
        call.emit_activated(op, call.x, kernel, *call.parameters(bias), activation=layer.activation)
        return
    product = call.then(op, call.x, kernel, shape=out)
    add = Pointwise(functions=("add",))
    call.emit_activated(add, product, call.parameter(bias), activation=layer.activation)


def embedding(call: Call) -> None:
    """Write rows of a table."""
    layer = call.operation
    _check_plain(layer)
    call.emit(Lookup(), call.parameter(layer._embeddings), call.x)


def reversible_embedding(call: Call) -> None:
    """Write rows of a table, or the product with it that gives logits."""
    layer = call.operation
    if not call.argument(1, "reverse", False):
        return embedding(call)
    _check_plain(layer)
    lead = _LETTERS[: len(call.x.shape) - 1]
    table = call.parameter(layer._embeddings if layer.tie_weights else layer.reverse_embeddings)
    op = Contract(operands=(f"{lead}y", "zy" if layer.tie_weights else "yz"), output=f"{lead}z")
    if layer.logit_soft_cap is None:
        call.emit(op, call.x, table)
    else:
        logits = call.then(op, call.x, table, shape=call.result.shape)
        call.emit(Pointwise(functions=("divide", "tanh", "multiply"), flop_per_point=3), logits)
    return None


def dot(call: Call) -> None:
    """Write the layer's product of two tensors along one dim of each."""
    layer = call.operation
    x, y = call.tensors[:2]
    axes = layer.axes
    if layer.normalize:
        raise UntranslatableError
    first, second = (axes, axes) if isinstance(axes, int) else axes
    first, second = first % len(x.shape), second % len(y.shape)
    letters = _LETTERS[: len(x.shape)]
    others = iter(_LETTERS[len(x.shape) :])
    left = letters
    # The first dim is the batch of both.
    right = "".join("a" if i == 0 else letters[first] if i == second else next(others) for i in range(len(y.shape)))
    output = "".join(c for c in left if c != letters[first]) + "".join(
        c for c in right if c not in ("a", letters[first])
    )
    _emit_product(call, x, y, (left, right), output)


def matmul(call: Call) -> None:
    """Write a product as NumPy's matmul has it; batch dims that only one operand has are read again and again."""
    x, y = _two(call)
    rows, columns = len(x.shape) > 1, len(y.shape) > 1
    batch = call.result.shape[: len(call.result.shape) - rows - columns]
    lead = _LETTERS[: len(batch)]
    found = []
    for value, last in ((x, "XY" if rows else "Y"), (y, "YZ" if columns else "Y")):
        own = value.shape[: len(value.shape) - len(last)]
        place = len(batch) - len(own)
        kept = [i for i, extent in enumerate(own) if extent == batch[place + i]]
        shape = (*(own[i] for i in kept), *value.shape[len(own) :])
        found.append((call.reshaped(value, shape), "".join(lead[place + i] for i in kept) + last))
    output = lead + ("X" if rows else "") + ("Z" if columns else "")
    call.emit(Contract(operands=(found[0][1], found[1][1]), output=output), found[0][0], found[1][0])


def einsum(call: Call) -> None:
    """Write an einsum of one or two tensors; of more it is not known."""
    tensors = call.tensors
    if len(tensors) > 2:
        raise UntranslatableError
    operands, output = equation(call.operation.subscripts, tensors)
    if len(tensors) == 2:
        _emit_product(call, tensors[0], tensors[1], (operands[0], operands[1]), output)
        return
    kept = "".join(letter for letter in operands[0] if letter in output)
    over = tuple(i for i, letter in enumerate(operands[0]) if letter not in output)
    value = tensors[0]
    if over:
        shape = [value.shape[operands[0].index(letter)] for letter in kept]
        value = call.then(Reduce(function="sum", over=over), value, shape=shape)
    call.emit(Transpose(order=tuple(kept.index(c) for c in output)), value)


def tensordot(call: Call) -> None:
    """Write a product over some dims of both operands."""
    x, y = _two(call)
    axes = call.operation.axes
    if isinstance(axes, int):
        axes = (range(len(x.shape) - axes, len(x.shape)), range(axes))
    first, second = ([axis] if isinstance(axis, int) else list(axis) for axis in axes)
    left = _LETTERS[: len(x.shape)]
    others = iter(_LETTERS[len(x.shape) :])
    shared = {d % len(y.shape): left[c % len(x.shape)] for c, d in zip(first, second, strict=True)}
    right = "".join(shared.get(i) or next(others) for i in range(len(y.shape)))
    output = "".join(c for c in left + right if (c in left) != (c in right))
    _emit_product(call, x, y, (left, right), output)


def dot_operation(call: Call) -> None:
    """Write NumPy's dot: over the last dim of the first, the last but one of the second."""
    x, y = _two(call)
    if not x.shape or not y.shape:
        call.emit(Pointwise(functions=("multiply",)), x, y)
        return
    left = _LETTERS[: len(x.shape)]
    others = iter(_LETTERS[len(x.shape) :])
    at = max(0, len(y.shape) - 2)
    right = "".join(left[-1] if i == at else next(others) for i in range(len(y.shape)))
    _emit_product(call, x, y, (left, right), "".join(c for c in left + right if c != left[-1]))


def equation(text: str, tensors: tuple[Value, ...]) -> tuple[tuple[str, ...], str]:
    """Return the letters of an einsum's operands and of its result, with those that an ellipsis stands for.

    Raises UntranslatableError where a letter occurs twice in one of them.
    """
    left, arrow, output = text.replace(" ", "").partition("->")
    operands = left.split(",")
    if len(operands) != len(tensors):
        raise UntranslatableError
    spare = [letter for letter in _LETTERS if letter not in text]
    # How many dims the ellipsis of each operand stands for.
    counts = [len(v.shape) - len(o) + 3 if "..." in o else 0 for o, v in zip(operands, tensors, strict=True)]
    dots = "".join(spare[: max(counts)])
    found = [operand.replace("...", dots[len(dots) - count :]) for operand, count in zip(operands, counts, strict=True)]
    if not arrow:
        letters = "".join(operands).replace("...", "")
        output = ("..." if "..." in left else "") + "".join(sorted(c for c in letters if letters.count(c) == 1))
    output = output.replace("...", dots)
    if any(len(set(letters)) < len(letters) for letters in (*found, output)):
        raise UntranslatableError
    return tuple(found), output


def _emit_product(call: Call, x: Value, y: Value, operands: tuple[str, str], output: str) -> None:
    if not output or not call.result.shape:
        raise UntranslatableError
    if len(output) == len(call.result.shape):
        call.emit(Contract(operands=operands, output=output), x, y)
        return
    extents = dict(zip(operands[0] + operands[1], x.shape + y.shape, strict=True))
    product = call.then(Contract(operands=operands, output=output), x, y, shape=[extents[c] for c in output])
    call.activate(call.reshaped(product, call.result.shape), None)


def _two(call: Call) -> tuple[Value, Value]:
    if len(call.tensors) != 2:
        raise UntranslatableError
    return call.tensors[0], call.tensors[1]


def _check_plain(layer: object) -> None:
    """Low-rank additions and quantised weights are no plain product any more."""
    if getattr(layer, "lora_enabled", False) or getattr(layer, "quantization_mode", None):
        raise UntranslatableError


PRODUCTS: dict[str, Translation] = {
    "Dense": dense,
    "Dot": dot,
    "EinsumDense": einsum_dense,
    "Embedding": embedding,
    "ReversibleEmbedding": reversible_embedding,
}
"""Layers."""
