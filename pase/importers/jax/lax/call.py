"""`Call`: a primitive as a program calls it; `Step`: a node of its translation."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pase.importers.ir import Generic, Op, Pointwise, Reshape, Slice, Transpose, Value

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One node of a translation. inputs: names of values; outputs: values; the last step's are the primitive's own."""

    op: Op
    inputs: tuple[str, ...]
    outputs: tuple[Value, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """name: of the primitive. params: its parameters. inputs, results: what it reads and gives.

    known: arrays of those inputs whose values are known without the model's weights or data: numbers in the program's
    text, and small whole numbers computed from them. makers: the operators that computed the inputs, by their names.
    joined: whole numbers that were put end to end to give an input, by its name, each with its values where known.
    """

    name: str
    params: Mapping[str, Any]
    inputs: tuple[Value, ...]
    results: tuple[Value, ...]
    known: Mapping[str, Any] = field(default_factory=dict)
    makers: Mapping[str, Op] = field(default_factory=dict)
    joined: Mapping[str, tuple[tuple[Value, Any], ...]] = field(default_factory=dict)

    def integers(self, position: int) -> tuple[int, ...] | None:
        """Return the whole numbers of an input, row-major; None where they are not known."""
        found = self.known.get(self.inputs[position].name)
        return None if found is None else tuple(int(number) for number in found.reshape(-1))

    def number(self, position: int) -> float | None:
        """Return the number that an input is; None where it is none, or not known."""
        found = self.known.get(self.inputs[position].name)
        return float(found) if found is not None and found.size == 1 else None

    def inner(self, suffix: str, shape: Sequence[int], dtype: str = "") -> Value:
        """Return a value between two steps."""
        result = self.results[0]
        return Value(name=f"{result.name}:{suffix}", shape=tuple(shape), dtype=dtype or result.dtype)


Translation = Callable[[Call], list[Step]]


def step(call: Call, op: Op, *inputs: Value) -> list[Step]:
    """Return one node that gives the primitive's results."""
    return [Step(op=op, inputs=tuple(value.name for value in inputs), outputs=call.results)]


def generic(call: Call, passes: Sequence[tuple[int, int]] | None = None) -> list[Step]:
    """Return a node of which only the shapes are known.

    passes: dims that pass through; where they are not told, the leading one if all results have it.
    """
    floats = [value for value in call.inputs if value.is_float]
    order = (*floats, *(value for value in call.inputs if not value.is_float))
    results = [value for value in call.results if value.is_float]
    if passes is None:
        leading = order[0].shape[:1] if order else ()
        passes = ((0, 0),) if leading and all(value.shape[:1] == leading for value in results) else ()
    return step(call, Generic(passes=tuple(passes), is_index=not results), *order)


def reshaped(call: Call, value: Value, shape: Sequence[int], suffix: str) -> tuple[list[Step], Value]:
    """Return the steps that see a value in another shape (none where it is that already), and the value so seen."""
    if tuple(shape) == value.shape:
        return [], value
    seen = call.inner(suffix, shape, value.dtype)
    return [Step(op=Reshape(), inputs=(value.name,), outputs=(seen,))], seen


def transposed(call: Call, value: Value, order: Sequence[int], suffix: str) -> tuple[list[Step], Value]:
    """Return the steps that put a value's dims in another order (none where it is that already), and the value."""
    if list(order) == list(range(len(value.shape))):
        return [], value
    seen = call.inner(suffix, [value.shape[i] for i in order], value.dtype)
    return [Step(op=Transpose(order=tuple(order)), inputs=(value.name,), outputs=(seen,))], seen


def cut(call: Call, value: Value, starts: Sequence[int], steps: Sequence[int] | None = None) -> list[Step]:
    """Return the box of a value that has the shape of the result."""
    op = Slice(starts=tuple(starts), steps=tuple(steps) if steps else (1,) * len(value.shape))
    return step(call, op, value)


def pointwise(call: Call, function: str) -> list[Step]:
    """Return a function of all inputs, point by point; of one input and a number where the others are numbers."""
    tensors = [value for value in call.inputs if value.shape or value.name not in call.known] or list(call.inputs)
    numbers = [call.number(i) for i, value in enumerate(call.inputs) if value not in tensors]
    is_one = len(tensors) == 1 and len(numbers) == 1
    op = Pointwise(
        functions=(function,),
        constant=numbers[0] if is_one else None,
        constant_first=is_one and call.inputs[0] not in tensors,
    )
    return step(call, op, *tensors)
