"""Steps of a recipe as expressions: what is used once and is short stands in the expression that uses it."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from pase.emitter.text import INDENT, call
from pase.errors import EmitError
from pase.graph import Operator, Part
from pase.graph.recipe import POINTWISE, Recipe, Step
from pase.runtime.tensor_dims import WHOLE

LAYOUTS = ("concat", "padded", "piece", "copy")
"""Functions that take tensors from other meshes as they are."""

_INLINED = 48


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """The names that a block uses.

    dims: variable of each iteration dim. names: of the tensors that are read. windows: of the sliding windows.
    result: of what the layer computes. new: makes another name.
    """

    operator: Operator
    dims: Mapping[str, str]
    names: Mapping[str, str]
    windows: tuple[str, ...]
    result: str
    new: Callable[[str], str]

    def listed(self, names: Sequence[str]) -> str:
        """Return dims as a list of their variables."""
        return f"[{', '.join(self.dims[name] for name in names)}]"

    @property
    def result_dims(self) -> tuple[str, ...]:
        """Names of the dims of what the layer writes."""
        found: list[str] = []
        for axis in self.operator.writes[0].axes:
            match axis:
                case str():
                    found.append(axis)
                case tuple():
                    found += axis
        return tuple(found)


def written_steps(recipe: Recipe, block: Written) -> list[str]:
    """Return the lines that compute the steps; the last one gives the result its dims' order."""
    uses = Counter(name for step in recipe.steps for name in step.of if isinstance(name, str))
    expressions: dict[str, str] = dict(block.names)
    lines: list[str] = []
    for i, step in enumerate(recipe.steps):
        operands = [expressions[o] if isinstance(o, str) else _number(o) for o in step.of]
        text = _expression(step, operands, block)
        if i == len(recipe.steps) - 1:
            return [*lines, *_last(step, text, block)]
        if uses[step.name] == 1 and len(text) <= _INLINED:
            expressions[step.name] = text
            continue
        variable = block.new(step.name)
        expressions[step.name] = variable
        lines += _assigned(variable, text)
    raise EmitError(f"layer {block.operator.name!r} has no steps")


def nested(steps: Sequence[Step], names: Mapping[str, str]) -> str:
    """Return functions of points as one expression."""
    expressions = dict(names)
    for step in steps:
        operands = [expressions[o] if isinstance(o, str) else _number(o) for o in step.of]
        expressions[step.name] = f"fn.{step.function}({', '.join(operands)})"
    return expressions[steps[-1].name]


def _last(step: Step, text: str, block: Written) -> list[str]:
    if step.function in LAYOUTS or step.function in ("einsum", "convolve", "pool"):
        # Their dims are those of the result already.
        return _assigned(block.result, text)
    return _assigned(block.result, f"arrange({text}, {block.listed(block.result_dims)})")


def _assigned(variable: str, text: str) -> list[str]:
    return (
        call(f"{variable} = {text[: text.index('(')]}", _arguments(text))
        if "(" in text
        else [f"{INDENT}{variable} = {text}"]
    )


def _arguments(text: str) -> list[str]:
    """Return the arguments of a call, as they stand."""
    inner = text[text.index("(") + 1 : -1]
    found, depth, begin, quoted = [], 0, 0, False
    for i, character in enumerate(inner):
        quoted ^= character == '"'
        if not quoted:
            depth += character in "([{"
            depth -= character in ")]}"
            if character == "," and depth == 0:
                found.append(inner[begin:i].strip())
                begin = i + 1
    return [*found, inner[begin:].strip()]


def _number(value: float) -> str:
    if value != value or value in (float("inf"), float("-inf")):
        return f'float("{value}")'
    return repr(int(value)) if value == int(value) and abs(value) < 1e15 else repr(value)


def _expression(step: Step, operands: list[str], block: Written) -> str:
    if step.function in POINTWISE:
        return f"fn.{step.function}({', '.join(operands)})"
    if step.function not in _WRITTEN:
        raise EmitError(f"layer {block.operator.name!r}: its recipe has a step {step.function!r} that is not known")
    return _WRITTEN[step.function](step, operands, block)


def _over(function: str) -> "_Write":
    return lambda step, operands, block: f"{function}({operands[0]}, {block.listed(step.dims)})"


def _product(step: Step, operands: list[str], block: Written) -> str:
    return f"product({operands[0]}, {operands[1]}, {block.listed(step.dims)})"


def _causal(step: Step, operands: list[str], block: Written) -> str:
    query, key = (block.dims[name] for name in step.dims)
    return f"without_later_keys({operands[0]}, {query}, {key})"


def _convolve(_: Step, operands: list[str], block: Written) -> str:
    return f"convolve({operands[0]}, {operands[1]}, [{', '.join(block.windows)}], {block.listed(block.result_dims)})"


def _pool(_: Step, operands: list[str], block: Written) -> str:
    function = block.operator.attribute("reduction", "max")
    counted = ", count_padding=True" if block.operator.attribute("count_padding", False) else ""
    windows = f"[{', '.join(block.windows)}]"
    return f'pool({operands[0]}, {windows}, {block.listed(block.result_dims)}, function="{function}"{counted})'


def _embedding(_: Step, operands: list[str], block: Written) -> str:
    (table,) = (access for access in block.operator.reads if access.tensor == "table")
    rows, columns = table.axes
    if not isinstance(rows, str) or not isinstance(columns, str):
        raise EmitError(f"layer {block.operator.name!r} looks up a table whose dims are put together of others")
    return f"lookup({operands[0]}, {operands[1]}, {block.dims[rows]}, {block.dims[columns]})"


def _concat(_: Step, operands: list[str], block: Written) -> str:
    along = block.operator.attribute("along", "")
    dims = block.listed(block.result_dims)
    return f"concat([{', '.join(operands)}], mesh, {dims}, along={block.dims[along]})"


def _padded(_: Step, operands: list[str], block: Written) -> str:
    (read,) = block.operator.reads
    before = [axis.offset if isinstance(axis, Part) else 0 for axis in read.axes]
    shape = list(read.shape)
    return f"padded({operands[0]}, mesh, {block.listed(block.result_dims)}, before={before}, shape={shape})"


def _piece(_: Step, operands: list[str], block: Written) -> str:
    (read,) = block.operator.reads
    names = [axis for axis in read.axes if isinstance(axis, str)]
    parts = [axis for axis in block.operator.writes[0].axes if isinstance(axis, Part)]
    if len(parts) != 1 or len(names) != len(read.axes):
        raise EmitError(f"layer {block.operator.name!r} takes a box of a tensor, which cannot be written yet")
    part = parts[0]
    return f'piece(reshard({operands[0]}, mesh, {block.listed(names)}), "{part.dim}", {part.offset}, {part.extent})'


def _copy(_: Step, operands: list[str], block: Written) -> str:
    (read,) = block.operator.reads
    names: list[str] = []
    for axis in read.axes:
        names += [axis] if isinstance(axis, str) else list(axis) if isinstance(axis, tuple) else [WHOLE]
    dims = block.listed(block.result_dims)
    if block.operator.kind != "reorder":
        return f"reshard({operands[0]}, mesh, {dims})"
    return f"arrange(reshard({operands[0]}, mesh, {block.listed(names)}), {dims})"


_Write = Callable[[Step, list[str], Written], str]

_WRITTEN: Mapping[str, _Write] = MappingProxyType(
    {
        "causal": _causal,
        "concat": _concat,
        "convolve": _convolve,
        "copy": _copy,
        "einsum": _product,
        "embedding": _embedding,
        "log_softmax": _over("log_softmax"),
        "max": _over("greatest"),
        "mean": _over("mean"),
        "min": _over("least"),
        "padded": _padded,
        "piece": _piece,
        "pool": _pool,
        "softmax": _over("softmax"),
        "sum": _over("total"),
    }
)
"""How the functions that are none of points are written."""
