"""Translate body steps to expressions: a short expression that is used once is nested where it is used."""

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from types import MappingProxyType

from pase.errors import EmitError
from pase.graph import Access, DimIndex, Operator, SliceOf, Window
from pase.graph.body import Body, Step
from pase.graph.functions import CELLS, LOSSES, MOVES, POINTWISE
from pase.graph.sources import TYPES, source_call
from pase.targets.emitter.statements import Call, Statement, Sum, Value, nonzero, written
from pase.targets.emitter.text import Text, code, word

_INLINED = 56
"""Maximum length (`_length`) of an expression that is nested in another one."""

_LONGEST_SUM = 100
"""Maximum length (`_length`) of a sum that is written with plus signs."""

_NAME = re.compile(r"[^\W\d]\w*")


Dims = tuple[str, ...] | None
"""Iteration dims of a tensor in its order; None if unknown."""


@dataclass(frozen=True, slots=True)
class Expression:
    """An expression whose value is a tensor or a number."""

    value: Value
    dims: Dims = None
    is_index: bool = False


def called(function: Text, arguments: Sequence[Value], dims: Dims = None, /, **keywords: Value) -> Expression:
    """Return a call of a function."""
    return Expression(Call(function, arguments, keywords), dims)


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """The names that a block uses.

    Attributes:
        dims: Variable of each iteration dim.
        names: Expressions of the tensors that are read.
        windows: Variables of the sliding windows.
        target: Target of the result (see `Statement`).
        others: Variable and dims of further results, by the step that computes them.
        result_names: Iteration dims of the result.
        new: Returns a new variable name.
    """

    operator: Operator
    dims: Mapping[str, Text]
    names: Mapping[str, Expression]
    windows: tuple[Text, ...]
    target: Text
    result_names: tuple[str, ...]
    others: Mapping[str, tuple[Text, tuple[str, ...]]]
    new: Callable[[str], Text]

    def listed(self, names: Sequence[str]) -> list[Text]:
        """Return dims as a list of their variables."""
        return [self.dims[name] for name in names]

    def ordered(self, x: Expression, dims: Sequence[str]) -> Value:
        """Return a tensor with its dims permuted to a given order."""
        return x.value if x.dims == tuple(dims) else self.arranged(x.value, dims).value

    def arranged(self, x: Value, dims: Sequence[str]) -> Expression:
        """Return a tensor with its dims permuted to a given order, and broadcast along missing ones."""
        return called(code("arrange"), [x, self.listed(dims)], tuple(dims))

    @property
    def result_dims(self) -> list[Text]:
        """Dims of the layer's output, as a list of their variables."""
        return self.listed(self.result_names)


def named_dims(access: Access) -> tuple[str, ...]:
    """Return the iteration dims that fully index a tensor, in order; for windows, those of their positions."""
    found: list[str] = []
    for axis in access.index_map:
        match axis:
            case str():
                found.append(axis)
            case Window():
                found.append(axis.out)
            case tuple():
                found += axis
    return tuple(found)


def written_steps(body: Body, block: Written) -> list[Statement]:
    """Return the statements that compute the steps; the last one permutes the result's dims to their final order."""
    uses = Counter(name for step in body.steps for name in step.operands if isinstance(name, str))
    known = dict(block.names)
    statements: list[Statement] = []
    for i, step in enumerate(body.steps):
        if step.function == "keep":
            statements.append(_kept(step, _operands(step, known), block))
            continue
        found = _expression(step, _operands(step, known), block)
        if i == len(body.steps) - 1:
            return [*statements, Statement(block.target, _last(step, found, block).value)]
        if step.result in block.others:
            name, order = block.others[step.result]
            is_placed = found.dims == order or not {*(found.dims or ())} <= {*order}
            found = found if is_placed else block.arranged(found.value, order)
        elif uses[step.result] == 1 and _length(found.value) <= _INLINED:
            known[step.result] = found
            continue
        else:
            name = block.new(step.result)
        known[step.result] = Expression(name, found.dims)
        statements.append(Statement(name, found.value))
    raise EmitError(f"layer {block.operator.name!r} has no steps")


def _length(value: Value) -> int:
    """Return the length of a value's text with every name counted as four letters, independent of actual names."""
    return len(_NAME.sub("name", written(value)))


def _kept(step: Step, operands: tuple[Expression, ...], block: Written) -> Statement:
    """Return the statement that updates a running statistic."""
    kept, new = operands
    # Its operand may have further dims of extent 1.
    value = new.value if kept.dims is None else block.ordered(new, kept.dims)
    momentum = float(step.option("momentum", 0.0))
    return Statement(None, Call(code("program.keep"), [kept.value, value], {"momentum": momentum}))


def nested(steps: Sequence[Step], names: Mapping[str, Expression]) -> Value:
    """Return a chain of pointwise functions as one expression."""
    known = dict(names)
    for step in steps:
        known[step.result] = _of_points(step, _operands(step, known))
    return known[steps[-1].result].value


def _last(step: Step, found: Expression, block: Written) -> Expression:
    is_placed = step.function in MOVES or step.function in LOSSES or found.dims == block.result_names
    # The output may have dims of extent 1 that are not dims of the layer.
    is_placed |= step.function == "repeat" and not {*step.dims} <= {*block.result_names}
    return found if is_placed else block.arranged(found.value, block.result_names)


def _operands(step: Step, known: Mapping[str, Expression]) -> tuple[Expression, ...]:
    return tuple(
        known[operand] if isinstance(operand, str) else Expression(_number(operand), ()) for operand in step.operands
    )


def _number(value: float) -> float:
    return int(value) if isfinite(value) and value == int(value) and abs(value) < 1e15 else value


def _expression(step: Step, operands: tuple[Expression, ...], block: Written) -> Expression:
    if step.function in POINTWISE:
        return _of_points(step, operands)
    if step.function in _OVER:
        name, keeps = _OVER[step.function]
        (x,) = operands
        dims = x.dims if x.dims is None or keeps else tuple(dim for dim in x.dims if dim not in step.dims)
        return called(name, [x.value, block.listed(step.dims)], dims)
    if step.function in _WRITTEN:
        return _WRITTEN[step.function](step, operands, block)
    raise EmitError(f"layer {block.operator.name!r}: its body has a step {step.function!r} that is not known")


def _of_points(step: Step, operands: tuple[Expression, ...]) -> Expression:
    tensors = [x for x, operand in zip(operands, step.operands, strict=True) if isinstance(operand, str)]
    own = [x.dims for x in tensors]
    dims = None if None in own else _joined([x for x in own if x is not None])
    if step.function == "add" and not any(x.is_index for x in tensors) and _is_sum(own, dims):
        # The first operand of a sum is a tensor.
        terms = sorted(zip(operands, step.operands, strict=True), key=lambda pair: not isinstance(pair[1], str))
        total = Sum([x.value for x, _ in terms])
        if _length(total) <= _LONGEST_SUM:
            return Expression(total, dims)
    function = code("fn.{}", word(step.function, POINTWISE, "function of points"))
    return called(function, _values(operands), dims)


def _joined(tensors: Sequence[tuple[str, ...]]) -> tuple[str, ...]:
    """Return the dims of a pointwise function's result: those of its tensors, the largest first, each once."""
    return tuple(dict.fromkeys(dim for own in sorted(tensors, key=lambda x: -len(x)) for dim in own))


def _is_sum(tensors: Sequence[Dims], dims: Dims) -> bool:
    """Return whether a sum has these dims: the first term has all of them, the others a subset in the same order."""
    if dims is None or not tensors or tensors[0] != dims:
        return False
    return all(own is not None and own == tuple(dim for dim in dims if dim in own) for own in tensors)


def _convolve_transposed(step: Step, operands: tuple[Expression, ...], block: Written) -> Expression:
    rank = len(step.dims) // 3
    dims = [[block.dims[step.dims[i + rank * j]] for j in range(3)] for i in range(rank)]
    options: dict[str, Value] = {name: [*step.option(name, ())] for name in ("strides", "dilations", "pads")}
    options |= nonzero(backwards=bool(step.option("backwards", False)))
    arguments = [*_values(operands), dims, block.result_dims]
    return called(code("convolve_transposed"), arguments, block.result_names, **options)


def _pool(step: Step, operands: tuple[Expression, ...], block: Written) -> Expression:
    function = word(str(step.option("reduction", "max")), ("max", "mean"), "reduction")
    counts = bool(step.option("count_padding", False))
    arguments = [operands[0].value, _windows(block), block.result_dims]
    options = nonzero(function=str(function), count_padding=counts)
    return called(code("pool"), arguments, block.result_names, **options)


def _values(operands: Sequence[Expression]) -> list[Value]:
    return [x.value for x in operands]


def _windows(block: Written) -> list[Text]:
    if not block.windows:
        raise _unwritten(block, "computes with windows, which none of its tensors is read through")
    return [*block.windows]


def _embedding(step: Step, operands: tuple[Expression, ...], block: Written) -> Expression:
    table, indices = operands
    access = next((access for access in block.operator.reads if access.tensor == step.operands[0]), None)
    if access is None or not all(isinstance(axis, str) for axis in access.index_map):
        raise _unwritten(block, "looks up a table whose dims are put together of others")
    rows, *columns = named_dims(access)
    dims = None if indices.dims is None else (*indices.dims, *columns)
    frozen = int(step.option("frozen", -1))
    options: dict[str, Value] = {"frozen": frozen} if frozen >= 0 else {}
    return called(code("lookup"), [table.value, indices.value, *block.listed((rows, *columns))], dims, **options)


def _concat(step: Step, operands: tuple[Expression, ...], block: Written) -> Expression:
    dim = str(step.option("along", ""))
    if dim not in block.dims:
        raise _unwritten(block, f"joins tensors along {dim!r}, which is none of its dims")
    reads = {access.tensor: access for access in block.operator.reads}
    orders = [_order(reads[str(x)], block.operator.writes[0]) if x in reads else () for x in step.operands]
    arguments = [_values(operands), code("mesh"), block.result_dims]
    return called(code("concat"), arguments, along=block.dims[dim], **nonzero(orders=orders if any(orders) else []))


def _order(read: Access, write: Access) -> tuple[int, ...]:
    """Return for each dim of the input its position in the output; nothing if the order is the same."""
    own, written = _names(read), _names(write)
    order = tuple(written.index(name) for name in own if name in written)
    return () if order == tuple(range(len(written))) or len(order) != len(written) else order


def _names(access: Access) -> list[str]:
    """Return the iteration dims that index a tensor, fully or partly; "" for a dim that none indexes."""
    axes = [axis if isinstance(axis, tuple) else (_name(axis),) for axis in access.index_map]
    return [name for axis in axes for name in axis]


def _name(axis: DimIndex) -> str:
    return axis.dim if isinstance(axis, SliceOf) else axis if isinstance(axis, str) else ""


def _replaced(x: Expression, old: Sequence[str], new: Sequence[str]) -> Dims:
    """Return the dims of a tensor with a run of adjacent ones replaced."""
    return None if x.dims is None else (*(dim for dim in x.dims if dim not in old), *new)


def _cut(step: Step, operands: tuple[Expression, ...], block: Written) -> Expression:
    old, new = step.dims
    start, by = int(step.option("start", 0)), int(step.option("step", 1))
    options = nonzero(start=start, step=by if by != 1 else 0)
    (x,) = operands
    dims = None if x.dims is None else tuple(new if dim == old else dim for dim in x.dims)
    return called(code("cut"), [x.value, block.dims[old], block.dims[new]], dims, **options)


def _join(step: Step, operands: tuple[Expression, ...], block: Written) -> Expression:
    *own, whole = step.dims
    first = operands[0].dims
    dims = None if first is None else tuple(whole if dim == own[0] else dim for dim in first)
    return called(code("end_to_end"), [_values(operands), block.listed(own), block.dims[whole]], dims)


def _view(step: Step, operands: tuple[Expression, ...], block: Written) -> Expression:
    replaced = int(step.option("replaced", 1))
    old, new = step.dims[:replaced], step.dims[replaced:]
    arguments = [operands[0].value, block.listed(old), block.listed(new)]
    return called(code("view"), arguments, _replaced(operands[0], old, new))


def _rows(step: Step, operands: tuple[Expression, ...], block: Written) -> Expression:
    table, places = operands
    rest = _replaced(table, step.dims, ())
    dims = None if places.dims is None or rest is None else (*places.dims, *rest)
    return called(code("select_rows"), [table.value, places.value, block.dims[step.dims[0]]], dims)


def _padded(_: Step, operands: tuple[Expression, ...], block: Written) -> Expression:
    read, write = _read(block), block.operator.writes[0]
    inside = {axis.dim: axis for axis in read.index_map if isinstance(axis, SliceOf)}
    dims = _names(write)
    before = [inside[dim].offset if dim in inside else 0 for dim in dims]
    shape = [inside[dim].extent if dim in inside else block.operator.extents[dim] for dim in dims]
    arguments = [operands[0].value, code("mesh"), block.result_dims]
    return called(code("padded"), arguments, before=before, shape=shape, **nonzero(order=_order(read, write)))


def _piece(_: Step, operands: tuple[Expression, ...], block: Written) -> Expression:
    read = _read(block)
    axes = [(axis,) if isinstance(axis, str) else axis for axis in read.index_map]
    names = [name for axis in axes if isinstance(axis, tuple) for name in axis]
    parts = [axis for axis in block.operator.writes[0].index_map if isinstance(axis, SliceOf)]
    if len(parts) != 1 or not all(isinstance(axis, tuple) for axis in axes):
        raise _unwritten(block, "takes a box of a tensor, which cannot be written yet")
    whole = _brought(operands[0], names, block)
    kept = [axis.dim if isinstance(axis, SliceOf) else axis for axis in block.operator.writes[0].index_map]
    order = [name for name in kept if name in names]
    if order != [name for name in names if name in order]:
        # The sliced tensor has its dims in the order of the slice.
        whole = block.arranged(whole.value, [*order, *(name for name in names if name not in order)])
    return called(code("piece"), [whole.value, parts[0].dim, parts[0].offset, parts[0].extent])


def _copy(_: Step, operands: tuple[Expression, ...], block: Written) -> Expression:
    read, written = _read(block), block.result_names
    names = named_dims(read)
    kept = tuple(name for name in names if name in written)
    is_told = all(axis is not None or extent == 1 for axis, extent in zip(read.index_map, read.shape, strict=True))
    # A tensor whose layout changes is first read in its own order.
    if is_told and kept != written and all(name in kept or block.operator.extents[name] == 1 for name in names):
        return block.arranged(_brought(operands[0], names, block).value, written)
    return _brought(operands[0], written, block)


def _read(block: Written) -> Access:
    """Return the only tensor that a data-moving layer reads."""
    if len(block.operator.reads) != 1:
        raise _unwritten(block, f"moves {len(block.operator.reads)} tensors as if they were one")
    return block.operator.reads[0]


def _unwritten(block: Written, problem: str) -> EmitError:
    return EmitError(f"layer {block.operator.name!r} {problem}")


def _brought(operand: Expression, names: Sequence[str], block: Written) -> Expression:
    return called(code("reshard"), [operand.value, code("mesh"), block.listed(names)], tuple(names))


def _attention(step: Step, operands: tuple[Expression, ...], block: Written) -> Expression:
    batch, heads, query, key, feature = step.dims
    orders = ((batch, query, heads, feature), (batch, key, heads, feature), (batch, key, heads, feature))
    tensors = [block.ordered(x, order) for x, order in zip(operands, orders, strict=True)]
    return called(code("attention"), tensors, orders[0], **_of_scores(step))


def _of_scores(step: Step) -> dict[str, Value]:
    """Return keyword arguments for the scale of attention scores and the causal mask."""
    return {"scale": float(step.option("scale", 1.0)), **nonzero(causal=bool(step.option("causal", False)))}


def _masked_attention(step: Step, operands: tuple[Expression, ...], block: Written) -> Expression:
    *over, query, key, feature = step.dims
    out, truths = (*over, query, feature), step.option("truths", 0)
    tensors, masks = _values(operands[:3]), _values(operands[3:])
    arguments = [*tensors, block.listed(out), block.dims[key]]
    options = nonzero(masks=masks[:truths], biases=masks[truths:]) | _of_scores(step)
    return called(code("masked_attention"), arguments, out, **options)


def _normalise(step: Step, operands: tuple[Expression, ...], block: Written) -> Expression:
    tensors, moments = _values(operands[:3]), _values(operands[3:])
    arguments, epsilon = [*tensors, block.listed(step.dims)], float(step.option("epsilon", 0.0))
    return called(code("normalise"), arguments, operands[0].dims, epsilon=epsilon, **nonzero(moments=moments))


def _batch_norm(step: Step, operands: tuple[Expression, ...], block: Written) -> Expression:
    tensors, kept = _values(operands[:3]), _values(operands[3:])
    options: dict[str, Value] = {"kept": kept, "epsilon": float(step.option("epsilon", 0.0))}
    momentum, factor = float(step.option("momentum", 0.0)), float(step.option("factor", 1.0))
    if momentum:
        options |= {"momentum": momentum, "factor": factor}
    arguments = [code("program"), *tensors, block.listed(step.dims)]
    return called(code("batch_norm"), arguments, operands[0].dims, **options)


def _recurrent(step: Step, operands: tuple[Expression, ...], block: Written) -> Expression:
    states = [name for name in ("hidden", "kept") if step.option(name, False)]
    count = len(operands) - len(states)
    x, *weights = _values(operands[:count])
    batch, steps, directions, gate, unit = step.dims
    cell, layers = word(str(step.option("cell", "lstm")), CELLS, "cell"), int(step.option("layers", 1))
    options = nonzero(cell=str(cell), layers=layers if layers != 1 else 0)
    options |= zip(states, _values(operands[count:]), strict=True)
    out = (batch, steps, directions, unit)
    arguments = [x, weights, block.dims[gate], block.listed(out)]
    return called(code("recurrent"), arguments, out, **options)


def _softmax_loss(step: Step, operands: tuple[Expression, ...], block: Written) -> Expression:
    logits, labels = operands
    *points, classes = step.dims
    tensors = block.ordered(logits, step.dims), block.ordered(labels, points)
    return called(code("softmax_loss"), [*tensors, block.dims[classes]], ())


def _routed(step: Step, operands: tuple[Expression, ...], block: Written) -> Expression:
    table, numbers = operands
    places, rows = step.dims[: step.option("rows", 1)], step.dims[step.option("rows", 1) :]
    rest = _replaced(table, rows, ())
    arguments = [table.value, numbers.value, block.listed(places), block.listed(rows)]
    return called(code("routed"), arguments, None if rest is None else (*places, *rest))


def _source(step: Step, operands: tuple[Expression, ...], block: Written) -> Expression:
    call = source_call(dict(step.options), step.operands, f"layer {block.operator.name!r}")
    layouts = [[block.listed(axis) for axis in layout] for layout in call.layouts]
    options = nonzero(number=call.number, is_index=bool(step.option("is_index", False)))
    arguments = [call.operator, _values(operands), step.option("arguments", ""), layouts]
    return called(code("source"), arguments, step.dims, **options)


def _whole(step: Step, operands: tuple[Expression, ...], block: Written) -> Expression:
    number, (x,) = step.option("replaced", 0), operands
    if not number:
        return _brought(x, step.dims, block)
    if x.dims is None:
        raise _unwritten(block, "brings all points of a tensor together whose dims are not told")
    told = dict(zip(step.dims[:number], step.dims[number:], strict=True))
    return _brought(x, [told.get(dim, dim) for dim in x.dims], block)


_OVER: Mapping[str, tuple[Text, bool]] = MappingProxyType(
    {
        "log_softmax": (code("log_softmax"), True),
        "max": (code("greatest"), False),
        "mean": (code("mean"), False),
        "min": (code("least"), False),
        "softmax": (code("softmax"), True),
        "sum": (code("total"), False),
    }
)
"""Functions over some dims of one tensor, and whether the result retains these dims."""

_WRITTEN: Mapping[str, Callable[[Step, tuple[Expression, ...], Written], Expression]] = MappingProxyType(
    {
        "attention": _attention,
        "batch_norm": _batch_norm,
        "cast": lambda step, xs, _: called(
            code("cast"), [xs[0].value, str(word(step.option("to", ""), TYPES, "type"))], xs[0].dims
        ),
        "causal": lambda step, xs, block: called(
            code("without_later_keys"), [xs[0].value, *block.listed(step.dims)], xs[0].dims
        ),
        "concat": _concat,
        "convolve": lambda _, xs, block: called(
            code("convolve"), [*_values(xs), _windows(block), block.result_dims], block.result_names
        ),
        "convolve_transposed": _convolve_transposed,
        "copy": _copy,
        "cut": _cut,
        "dropout": lambda step, xs, block: called(
            code("dropout"),
            [block.ordered(xs[0], step.dims), code("program.mask_key")],
            step.dims,
            rate=float(step.option("rate", 0.0)),
        ),
        "einsum": lambda step, xs, block: called(code("product"), [*_values(xs), block.listed(step.dims)], step.dims),
        "embedding": _embedding,
        "fan_out": lambda step, xs, block: called(code("fan_out"), [xs[0].value, block.listed(step.dims)], xs[0].dims),
        "grouped": lambda step, xs, block: called(
            code("grouped"), [*_values(xs), block.listed(step.dims)], step.dims[:3]
        ),
        "join": _join,
        "lstm": lambda _, xs, block: called(code("lstm"), [*_values(xs), block.result_dims], block.result_names),
        "masked_attention": _masked_attention,
        "normalise": _normalise,
        "padded": _padded,
        "pick": lambda step, xs, block: called(code("pick"), [*_values(xs), block.dims[step.dims[0]]], xs[1].dims),
        "piece": _piece,
        "pool": _pool,
        "recurrent": _recurrent,
        "repeat": lambda step, xs, block: block.arranged(xs[0].value, step.dims),
        "routed": _routed,
        "rows": _rows,
        "softmax_loss": _softmax_loss,
        "source": _source,
        "view": _view,
        "whole": _whole,
    }
)
"""Translations of the other functions that are not pointwise."""


# -- formulas, for comments

_INFIX = {"add": " + ", "subtract": " - ", "multiply": " · ", "divide": " / "}
_LONGEST_FORMULA = 90


def formula(operator: Operator, body: Body) -> str:
    """Return a body's computation as a formula, for a comment; only the names of its functions if that is too long."""
    known = {access.tensor: _indexed(access.tensor, access.index_map) for access in operator.reads}
    known |= {item.name: _indexed(item.name, item.dims) for item in body.constants}
    sums = set[str]()
    for step in body.steps:
        texts = [
            known.get(operand, operand) if isinstance(operand, str) else f"{operand:g}" for operand in step.operands
        ]
        if step.function in ("multiply", "divide", "normalise", "batch_norm"):
            texts = [f"({text})" if name in sums else text for name, text in zip(step.operands, texts, strict=True)]
        if step.function in ("add", "subtract"):
            sums.add(step.result)
        known[step.result] = _formula_of_step(operator, step, texts)
        if len(known[step.result]) > _LONGEST_FORMULA:
            return f"{operator.kind}: {', '.join(step.function for step in body.steps)}"
    if not body.steps:
        return operator.kind
    write, last = operator.writes[0], body.steps[-1]
    left = "loss" if last.function in LOSSES else _indexed(write.tensor, write.index_map)
    return f"{left} = {known[last.result]}"


def _formula_of_step(operator: Operator, step: Step, texts: Sequence[str]) -> str:
    if step.function in _INFIX:
        return _INFIX[step.function].join(texts)
    if step.function in _FORMULAS:
        return _FORMULAS[step.function](operator, step, texts)
    over = f" over {','.join(step.dims)}" if step.dims else ""
    return f"{step.function}({', '.join(texts)}{over})"


def _masked_attention_formula(_: Operator, step: Step, texts: Sequence[str]) -> str:
    q, k, v, *masks = texts
    truths = step.option("truths", 0)
    return _softmax_formula(step, f"{q} {k}", masks[truths:], masks[:truths], step.dims[-2], v)


def _softmax_formula(
    step: Step, product: str, added: Sequence[str], masks: Sequence[str], key: str, values: str
) -> str:
    scores = " + ".join((f"{product} · {float(step.option('scale', 1.0)):.4g}", *added))
    where = "".join(f", where {mask}" for mask in masks)
    causal = f", no later {key}" if step.option("causal", False) else ""
    return f"softmax({scores}{where}{causal}) {values}"


def _sizes(operator: Operator) -> str:
    windows = (axis for access in operator.reads for axis in access.index_map if isinstance(axis, Window))
    return " x ".join(str(operator.extents[window.kernel]) for window in windows)


_FORMULAS: Mapping[str, Callable[[Operator, Step, Sequence[str]], str]] = MappingProxyType(
    {
        "attention": lambda _, step, texts: _softmax_formula(
            step, f"{texts[0]} {texts[1]}", [], [], step.dims[3], texts[2]
        ),
        "batch_norm": lambda _, __, texts: f"normal({texts[0]}) {texts[1]} + {texts[2]}",
        "concat": lambda _, step, texts: f"{len(texts)} tensors end to end along {step.option('along', '')}",
        "convolve": lambda _, __, texts: " ".join(texts),
        "convolve_transposed": lambda _, __, texts: f"{texts[0]} spread by {texts[1]}",
        "dropout": lambda _, step, texts: f"{texts[0]} / {1 - float(step.option('rate', 0.0)):g} or 0",
        "einsum": lambda _, __, texts: " ".join(texts),
        "embedding": lambda _, step, texts: f"{step.operands[0]}[{texts[1]}]",
        "fan_out": lambda _, __, texts: f"{texts[0]} for several layers",
        "lstm": lambda operator, step, texts: (
            f"{next(a for a in operator.reads if a.tensor == step.operands[1]).shape[0]} LSTM layers of {texts[0]}"
        ),
        "masked_attention": _masked_attention_formula,
        "normalise": lambda _, __, texts: f"normal({texts[0]}) {texts[1]} + {texts[2]}",
        "pool": lambda operator, step, _: f"{step.option('reduction', 'max')} of {_sizes(operator)} windows",
        "recurrent": lambda _, step, texts: (
            f"{step.option('layers', 1)} recurrent layers ({step.option('cell', '')}) of {texts[0]}"
        ),
        "softmax_loss": lambda _, __, texts: f"mean of -log softmax({texts[0]}) at {texts[1]}",
    }
)


def _indexed(tensor: str, axes: Sequence[DimIndex]) -> str:
    names: list[str] = []
    for axis in axes:
        match axis:
            case Window():
                names.append(_position(axis))
            case SliceOf(extent=1):
                pass
            case SliceOf():
                names.append(axis.dim)
            case tuple():
                names += axis
            case str():
                names.append(axis)
    return f"{tensor}[{','.join(names)}]"


def _position(axis: Window) -> str:
    """Return the index of a tensor that a window reads at a position and a kernel point."""
    stride, dilation = (str(step) if step != 1 else "" for step in (axis.stride, axis.dilation))
    return f"{stride}{axis.out}+{dilation}{axis.kernel}{f'-{axis.pad}' if axis.pad else ''}"
