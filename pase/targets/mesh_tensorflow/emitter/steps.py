"""Steps of a body as expressions: what is used once and is short stands in the expression that uses it."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from types import MappingProxyType

from pase.errors import EmitError
from pase.graph import Access, DimIndex, Operator, SliceOf, Window
from pase.graph.body import MOVES, POINTWISE, Body, Step
from pase.sharding.layouts import WHOLE
from pase.targets.mesh_tensorflow.emitter.text import Text, call, code, word

_INLINED = 48


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """The names that a block uses.

    dims: variable of each iteration dim. names: of the tensors that are read. windows: of the sliding windows.
    result: of what the layer computes. new: makes another name.
    """

    operator: Operator
    dims: Mapping[str, Text]
    names: Mapping[str, Text]
    windows: tuple[Text, ...]
    result: Text
    new: Callable[[str], Text]

    def listed(self, names: Sequence[str]) -> Text:
        """Return dims as a list of their variables."""
        return code("[{}]", [self.dims[name] for name in names])

    @property
    def result_dims(self) -> Text:
        """The dims of what the layer writes, as a list of their variables."""
        found: list[str] = []
        for axis in self.operator.writes[0].index_map:
            match axis:
                case str():
                    found.append(axis)
                case tuple():
                    found += axis
        return self.listed(found)


@dataclass(frozen=True, slots=True)
class _Call:
    """A call of a function."""

    function: Text
    arguments: tuple[Text, ...]

    @property
    def text(self) -> Text:
        return code("{}({})", self.function, self.arguments)


def written_steps(body: Body, block: Written) -> list[Text]:
    """Return the lines that compute the steps; the last one gives the result its dims' order."""
    uses = Counter(name for step in body.steps for name in step.operands if isinstance(name, str))
    expressions: dict[str, Text] = dict(block.names)
    lines: list[Text] = []
    for i, step in enumerate(body.steps):
        found = _call(step, _operands(step, expressions), block)
        if i == len(body.steps) - 1:
            return [*lines, *_assigned(block.result, _last(step, found, block))]
        if uses[step.result] == 1 and len(found.text) <= _INLINED:
            expressions[step.result] = found.text
            continue
        expressions[step.result] = block.new(step.result)
        lines += _assigned(expressions[step.result], found)
    raise EmitError(f"layer {block.operator.name!r} has no steps")


_INFIX = {"add": " + ", "subtract": " - ", "multiply": " · ", "divide": " / "}
_LONGEST_FORMULA = 60


def formula(operator: Operator, body: Body) -> str:
    """Return what a body computes as a formula, for a comment; the names of its functions where that is long."""
    reads = {access.tensor: _indexed(access.tensor, access.index_map) for access in operator.reads}
    known = reads | {item.name: _indexed(item.name, item.dims) for item in body.constants}
    is_sum = set[str]()
    for step in body.steps:
        operands = [known[operand] if isinstance(operand, str) else f"{operand:g}" for operand in step.operands]
        if step.function in _INFIX:
            if step.function in ("multiply", "divide"):
                operands = [
                    f"({text})" if name in is_sum else text for name, text in zip(step.operands, operands, strict=True)
                ]
            known[step.result] = _INFIX[step.function].join(operands)
            if step.function in ("add", "subtract"):
                is_sum.add(step.result)
        elif step.function == "einsum":
            known[step.result] = " ".join(operands)
        else:
            over = f" over {','.join(step.dims)}" if step.dims else ""
            known[step.result] = f"{step.function}({', '.join(operands)}{over})"
        if len(known[step.result]) > _LONGEST_FORMULA:
            return f"{operator.kind}: {', '.join(step.function for step in body.steps)}"
    write = operator.writes[0]
    return (
        f"{_indexed(write.tensor, write.index_map)} = {known[body.steps[-1].result]}" if body.steps else operator.kind
    )


def _indexed(tensor: str, axes: Sequence[DimIndex]) -> str:
    names: list[str] = []
    for axis in axes:
        match axis:
            case Window():
                names.append(f"{axis.out}~")
            case SliceOf():
                names.append(axis.dim)
            case tuple():
                names += axis
            case str():
                names.append(axis)
    return f"{tensor}[{','.join(names)}]"


def nested(steps: Sequence[Step], names: Mapping[str, Text]) -> Text:
    """Return functions of points as one expression."""
    expressions = dict(names)
    for step in steps:
        expressions[step.result] = _of_points(step, _operands(step, expressions)).text
    return expressions[steps[-1].result]


def _last(step: Step, found: _Call, block: Written) -> _Call:
    if step.function in MOVES or step.function in ("einsum", "convolve", "pool"):
        # Their dims are those of the result already.
        return found
    return _Call(code("arrange"), (found.text, block.result_dims))


def _assigned(variable: Text, found: _Call) -> list[Text]:
    return call(code("{} = {}", variable, found.function), found.arguments)


def _operands(step: Step, expressions: Mapping[str, Text]) -> tuple[Text, ...]:
    return tuple(expressions[operand] if isinstance(operand, str) else _number(operand) for operand in step.operands)


def _number(value: float) -> Text:
    return code("{}", int(value) if isfinite(value) and value == int(value) and abs(value) < 1e15 else value)


def _call(step: Step, operands: tuple[Text, ...], block: Written) -> _Call:
    if step.function in POINTWISE:
        return _of_points(step, operands)
    if step.function in _OVER:
        return _Call(_OVER[step.function], (operands[0], block.listed(step.dims)))
    if step.function in _WRITTEN:
        return _WRITTEN[step.function](step, operands, block)
    raise EmitError(f"layer {block.operator.name!r}: its body has a step {step.function!r} that is not known")


def _of_points(step: Step, operands: tuple[Text, ...]) -> _Call:
    return _Call(code("fn.{}", word(step.function, POINTWISE, "function of points")), operands)


def _product(step: Step, operands: tuple[Text, ...], block: Written) -> _Call:
    return _Call(code("product"), (*operands, block.listed(step.dims)))


def _causal(step: Step, operands: tuple[Text, ...], block: Written) -> _Call:
    if len(step.dims) != 2:
        raise _unwritten(block, f"hides later keys along {len(step.dims)} dims; expected queries and keys")
    query, key = (block.dims[name] for name in step.dims)
    return _Call(code("without_later_keys"), (operands[0], query, key))


def _pick(step: Step, operands: tuple[Text, ...], block: Written) -> _Call:
    return _Call(code("pick"), (*operands, block.dims[step.dims[0]]))


def _convolve(_: Step, operands: tuple[Text, ...], block: Written) -> _Call:
    return _Call(code("convolve"), (operands[0], operands[1], code("[{}]", block.windows), block.result_dims))


def _pool(step: Step, operands: tuple[Text, ...], block: Written) -> _Call:
    function = code("function={}", step.option("reduction", "max"))
    counted = [code("count_padding=True")] if step.option("count_padding", False) else []
    return _Call(code("pool"), (operands[0], code("[{}]", block.windows), block.result_dims, function, *counted))


def _embedding(_: Step, operands: tuple[Text, ...], block: Written) -> _Call:
    axes = next((access.index_map for access in block.operator.reads if access.tensor == "table"), ())
    names = [axis for axis in axes if isinstance(axis, str)]
    if len(names) != 2 or len(axes) != 2:
        raise _unwritten(block, "looks up a table whose dims are put together of others")
    return _Call(code("lookup"), (operands[0], operands[1], *(block.dims[name] for name in names)))


def _concat(step: Step, operands: tuple[Text, ...], block: Written) -> _Call:
    dim = str(step.option("along", ""))
    if dim not in block.dims:
        raise _unwritten(block, f"joins tensors along {dim!r}, which is none of its dims")
    along = code("along={}", block.dims[dim])
    return _Call(code("concat"), (code("[{}]", operands), code("mesh"), block.result_dims, along))


def _padded(_: Step, operands: tuple[Text, ...], block: Written) -> _Call:
    read = _read(block)
    before = code("before=[{}]", [axis.offset if isinstance(axis, SliceOf) else 0 for axis in read.index_map])
    shape = code("shape=[{}]", read.shape)
    return _Call(code("padded"), (operands[0], code("mesh"), block.result_dims, before, shape))


def _piece(_: Step, operands: tuple[Text, ...], block: Written) -> _Call:
    read = _read(block)
    names = [axis for axis in read.index_map if isinstance(axis, str)]
    parts = [axis for axis in block.operator.writes[0].index_map if isinstance(axis, SliceOf)]
    if len(parts) != 1 or len(names) != len(read.index_map):
        raise _unwritten(block, "takes a box of a tensor, which cannot be written yet")
    whole = _brought(operands[0], block.listed(names)).text
    return _Call(code("piece"), (whole, code("{}, {}, {}", parts[0].dim, parts[0].offset, parts[0].extent)))


def _copy(_: Step, operands: tuple[Text, ...], block: Written) -> _Call:
    read = _read(block)
    names: list[str] = []
    for axis in read.index_map:
        names += [axis] if isinstance(axis, str) else list(axis) if isinstance(axis, tuple) else [WHOLE]
    if block.operator.is_fan_out:
        over = block.listed(read.partial_over or ())
        return _Call(code("fan_out"), (_brought(operands[0], block.result_dims).text, over))
    if block.operator.kind != "reorder":
        return _brought(operands[0], block.result_dims)
    return _Call(code("arrange"), (_brought(operands[0], block.listed(names)).text, block.result_dims))


def _read(block: Written) -> Access:
    """Return the one tensor that a layer reads which moves data."""
    if len(block.operator.reads) != 1:
        raise _unwritten(block, f"moves {len(block.operator.reads)} tensors as if they were one")
    return block.operator.reads[0]


def _unwritten(block: Written, problem: str) -> EmitError:
    return EmitError(f"layer {block.operator.name!r} {problem}")


def _brought(operand: Text, dims: Text) -> _Call:
    return _Call(code("reshard"), (operand, code("mesh"), dims))


_OVER: Mapping[str, Text] = MappingProxyType(
    {
        "log_softmax": code("log_softmax"),
        "max": code("greatest"),
        "mean": code("mean"),
        "min": code("least"),
        "softmax": code("softmax"),
        "sum": code("total"),
    }
)
"""Functions over some dims of one tensor."""

_WRITTEN: Mapping[str, Callable[[Step, tuple[Text, ...], Written], _Call]] = MappingProxyType(
    {
        "causal": _causal,
        "concat": _concat,
        "convolve": _convolve,
        "copy": _copy,
        "einsum": _product,
        "embedding": _embedding,
        "padded": _padded,
        "pick": _pick,
        "piece": _piece,
        "pool": _pool,
    }
)
"""How the other functions that are none of points are written."""
