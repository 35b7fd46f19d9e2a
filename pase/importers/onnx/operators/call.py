"""`Call`: an ONNX operator with shapes, attributes and constants; `Step`: a node that a translation makes of it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from pase.importers.ir import Generic, Op, Step, Use, Value

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """An operator of the model.

    name: of the node. attributes: numbers, texts, tuples of them, arrays. inputs, results: None for those left out.
    constants: [inputs] values of those that are known. opset: of the operator's domain. read: results that are read.
    """

    operator: str
    name: str
    attributes: Mapping[str, Any]
    inputs: tuple[Value | None, ...]
    results: tuple[Value | None, ...]
    constants: tuple[Array | None, ...]
    opset: int
    read: frozenset[str]

    @property
    def x(self) -> Value:
        """The first input."""
        return self.value(0)

    @property
    def out(self) -> Value:
        """The first result."""
        found = self.results[0] if self.results else None
        if found is None:
            raise ValueError(f"{self.operator} has no first result")
        return found

    @property
    def given(self) -> tuple[Value, ...]:
        """All inputs that are not left out."""
        return tuple(value for value in self.inputs if value is not None)

    def has(self, position: int) -> bool:
        """Return whether an input is given."""
        return position < len(self.inputs) and self.inputs[position] is not None

    def value(self, position: int) -> Value:
        """Return an input; ValueError where it is left out."""
        found = self.inputs[position] if position < len(self.inputs) else None
        if found is None:
            raise ValueError(f"{self.operator} lacks input {position}")
        return found

    def constant(self, position: int) -> Array | None:
        """Return the values of an input, if they are known."""
        return self.constants[position] if position < len(self.constants) else None

    def result(self, position: int) -> Value | None:
        """Return a result; None where nobody reads it."""
        found = self.results[position] if position < len(self.results) else None
        return found if found is not None and found.name in self.read else None

    def whole(self, name: str, default: int) -> int:
        """Return an attribute that is a whole number."""
        found = self.attributes.get(name, default)
        if not isinstance(found, int):
            raise TypeError(f"attribute {name} is {found!r}; expected a whole number")
        return found

    def number(self, name: str, default: float) -> float:
        """Return an attribute that is a number."""
        found = self.attributes.get(name, default)
        if not isinstance(found, int | float):
            raise TypeError(f"attribute {name} is {found!r}; expected a number")
        return float(found)

    def text(self, name: str, default: str) -> str:
        """Return an attribute that is a text."""
        found = self.attributes.get(name, default)
        if not isinstance(found, str):
            raise TypeError(f"attribute {name} is {found!r}; expected a text")
        return found

    def wholes(self, name: str, position: int | None = None) -> tuple[int, ...] | None:
        """Return whole numbers, given as an attribute or as the constant input at a position; None if not given."""
        found = self.attributes.get(name)
        if found is None and position is not None:
            array = self.constant(position)
            if array is None:
                return None
            found = tuple(array.ravel().tolist())
        if found is None:
            return None
        if not isinstance(found, tuple) or not all(isinstance(value, int) for value in found):
            raise TypeError(f"{name} is {found!r}; expected whole numbers")
        return found

    def axis(self, default: int, *, rank: int | None = None) -> int:
        """Return the attribute axis, counted from 0."""
        return place(self.whole("axis", default), len(self.x.shape) if rank is None else rank)


Translation = Callable[[Call], list[Step]]

UNFIT = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, MemoryError)
"""What is raised where attributes, inputs and shapes do not fit together, or take more memory than there is."""


def place(axis: int, rank: int) -> int:
    """Return an axis counted from 0; ValueError where it lies outside of the rank."""
    if not -rank <= axis < max(1, rank):
        raise ValueError(f"axis {axis} lies outside of a tensor of {rank} dims")
    return axis % rank if rank else 0


def step(call: Call, op: Op, *inputs: Value) -> list[Step]:
    """Return one node that gives the operator's first result."""
    return [node(op, (*inputs,), call.out)]


def node(op: Op, inputs: tuple[Value, ...], *outputs: Value) -> Step:
    """Return one node."""
    return Step(op=op, inputs=tuple(Use(value=value.name) for value in inputs), outputs=outputs)


def inner(call: Call, tag: str, shape: tuple[int, ...], dtype: str = "") -> Value:
    """Return a value within a translation; tag: unique in it."""
    return Value(name=f"{call.out.name}:{tag}", shape=shape, dtype=dtype or call.out.dtype)


def generic(call: Call, passes: tuple[tuple[int, int], ...] | None = None, flop: float = 1.0) -> list[Step]:
    """Return a node of which only the shapes are known; by default the leading dim passes, where it is everywhere."""
    inputs = call.given
    floats = [value for value in inputs if value.is_float]
    order = (*floats, *(value for value in inputs if not value.is_float))
    results = tuple(value for value in call.results if value is not None)
    is_index = not any(value.is_float for value in results)
    if passes is None:
        lead = order[0].shape[:1] if order else ()
        is_shared = bool(lead) and all(value.shape[:1] == lead for value in results if value.is_float)
        passes = ((0, 0),) if is_shared else ()
    return [node(Generic(passes=passes, flop_per_point=flop, is_index=is_index), order, *results)]
