"""ONNX's operators in the vocabulary of the intermediate form: a module for each family; here, how they are called."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from pase.importers.ir import Identity, Value
from pase.importers.ir.steps import StepBuilder

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, kw_only=True)
class OnnxCall(StepBuilder):
    """An operator of the model.

    domain: of the operator, "" for ONNX's own. name: of the node. attributes: numbers, texts, tuples of them, arrays.
    inputs, outputs: None for those left out. constants: [inputs] values of those that are known. opset: of the domain.
    read: results that are read.
    """

    operator: str
    domain: str
    name: str
    attributes: Mapping[str, Any]
    inputs: tuple[Value | None, ...]
    outputs: tuple[Value | None, ...]
    constants: tuple[Array | None, ...]
    opset: int
    read: frozenset[str]

    @property
    def tensors(self) -> tuple[Value, ...]:
        """All inputs that are not left out."""
        return tuple(value for value in self.inputs if value is not None)

    @property
    def results(self) -> tuple[Value, ...]:
        """All results that are not left out."""
        return tuple(value for value in self.outputs if value is not None)

    @property
    def where(self) -> str:
        """The operator, for messages."""
        return f"operator {self.operator} {self.name!r}" + (f" of domain {self.domain}" if self.domain else "")

    @property
    def x(self) -> Value:
        """The first input."""
        return self.value(0)

    @property
    def result(self) -> Value:
        """The first result; ValueError where it is left out."""
        found = self.outputs[0] if self.outputs else None
        if found is None:
            raise ValueError(f"{self.operator} has no first result")
        return found

    def further(self, position: int) -> Value | None:
        """Return a result; None where nobody reads it."""
        found = self.outputs[position] if position < len(self.outputs) else None
        return found if found is not None and found.name in self.read else None

    def has(self, position: int) -> bool:
        """Return whether an input is given."""
        return position < len(self.inputs) and self.inputs[position] is not None

    def value(self, position: int) -> Value:
        """Return an input; ValueError where it is left out."""
        found = self.inputs[position] if position < len(self.inputs) else None
        if found is None:
            raise ValueError(f"{self.operator} lacks input {position}")
        return found

    def maybe(self, *positions: int) -> tuple[Value, ...]:
        """Return those of some inputs that are given."""
        return tuple(self.value(position) for position in positions if self.has(position))

    def constant(self, position: int) -> Array | None:
        """Return the values of an input, if they are known."""
        return self.constants[position] if position < len(self.constants) else None

    def whole(self, name: str, default: int) -> int:
        """Return an attribute that is a whole number."""
        return int(self._attribute(name, default, int, "a whole number"))

    def number(self, name: str, default: float) -> float:
        """Return an attribute that is a number."""
        return float(self._attribute(name, default, int | float, "a number"))

    def text(self, name: str, default: str) -> str:
        """Return an attribute that is a text."""
        return str(self._attribute(name, default, str, "a text"))

    def _attribute(self, name: str, default: object, kind: Any, expected: str) -> Any:
        found = self.attributes.get(name, default)
        if not isinstance(found, kind):
            raise TypeError(f"attribute {name} is {found!r}; expected {expected}")
        return found

    def wholes(self, name: str, position: int | None = None) -> tuple[int, ...] | None:
        """Return whole numbers, given as an attribute or as the constant input at a position; None if not given."""
        found = self.attributes.get(name)
        if found is None and position is not None:
            array = self.constant(position)
            found = None if array is None else tuple(array.ravel().tolist())
        if found is None:
            return None
        if not isinstance(found, tuple) or not all(isinstance(value, int) for value in found):
            raise TypeError(f"{name} is {found!r}; expected whole numbers")
        return found

    def axis(self, default: int) -> int:
        """Return the attribute axis, counted from 0."""
        return place(self.whole("axis", default), len(self.x.shape))


Translation = Callable[[OnnxCall], object]
"""Writes the steps of a call; what it returns is of no matter."""

UNFIT = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, MemoryError)
"""What is raised where attributes, inputs and shapes do not fit together, or take more memory than there is."""


def place(axis: int, rank: int) -> int:
    """Return an axis counted from 0; ValueError where it lies outside of the rank."""
    if not -rank <= axis < max(1, rank):
        raise ValueError(f"axis {axis} lies outside of a tensor of {rank} dims")
    return axis % rank if rank else 0


def identity(call: OnnxCall) -> None:
    """Write the first input as it is."""
    call.add(Identity(), call.x, out=call.result)


def table(*families: tuple[Translation, str]) -> dict[str, Translation]:
    """Return translations by the names of operators, which are given as words of a text."""
    return {name: found for found, names in families for name in names.split()}
