"""PyTorch's operators in the vocabulary of the intermediate form: here, how they are called."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

from pase.importers.ir import Generic, Identity, Value
from pase.importers.ir.steps import Shape, StepBuilder


@dataclass(frozen=True, kw_only=True)
class TorchCall(StepBuilder):
    """An operator as the exported program calls it.

    name: without its overload ("linear"). arguments: by the names of its schema ("input" for "self"), those that are
    not given left out; tensors are values, lists of tensors lists of them. outputs: what it returns; None for what is
    no tensor. numbers: values, row-major, of whole numbers among the tensors, where they depend on no input.
    """

    name: str
    arguments: Mapping[str, Any]
    outputs: tuple[Value | None, ...]
    numbers: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    @property
    def results(self) -> tuple[Value, ...]:
        """The tensors that it returns."""
        return tuple(value for value in self.outputs if value is not None)

    @property
    def function(self) -> str:
        """Its name, without the mark of an operator that writes its result into its input."""
        return self.name if self.name.startswith("__") else self.name.rstrip("_")

    @property
    def tensors(self) -> tuple[Value, ...]:
        """All tensors that it is called with, in order."""
        items = (item for argument in self.arguments.values() for item in as_list(argument))
        return tuple(item for item in items if isinstance(item, Value))

    @property
    def x(self) -> Value:
        """The first tensor that it is called with."""
        return self.tensors[0]

    def value(self, name: str) -> Value:
        """Return a tensor that it is called with."""
        found = self.arguments[name]
        assert isinstance(found, Value), f"argument {name} of {self.name} is no tensor"
        return found

    def maybe(self, *names: str) -> tuple[Value, ...]:
        """Return those of some tensors that it is called with."""
        return tuple(found for name in names if isinstance(found := self.arguments.get(name), Value))

    def get(self, name: str, default: Any = None) -> Any:
        """Return an argument, or the default where it is not given."""
        found = self.arguments.get(name)
        return default if found is None else found

    def dim(self, default: int = 0, name: str = "dim") -> int:
        """Return the dim of the first tensor that an argument names."""
        dim: int = self.get(name, default) % max(1, len(self.x.shape))
        return dim

    def first_of_run(self, value: Value, extent: int) -> int | None:
        """Return the first of places in a dim that go up by one, all in the last dim; None where that is not known."""
        found = [place % extent if extent else place for place in self.numbers.get(value.name, ())]
        if not found or prod(value.shape[:-1]) != 1 or found[-1] >= extent:
            return None
        return found[0] if found == list(range(found[0], found[0] + len(found))) else None


Translation = Callable[[TorchCall], object]
"""Writes the steps of a call; what it returns is of no matter."""


def identity(call: TorchCall) -> None:
    """Write the first tensor as it is."""
    call.give(Identity(), *call.tensors[:1])


def constant(call: TorchCall) -> None:
    """Write values that no tensor's values reach: zeros of another's shape, a range, noise."""
    call.give(Generic(is_index=not call.result.is_float))


def each(value: int | Sequence[int], rank: int) -> Shape:
    """Return one number for each of some dims."""
    values = tuple(value) if isinstance(value, list | tuple) else (value,)
    return values * rank if len(values) == 1 else values


def as_list(value: Any) -> list[Any]:
    """Return a list of what may be one item."""
    return list(value) if isinstance(value, list | tuple) else [value]


def table(*families: tuple[Translation, str]) -> dict[str, Translation]:
    """Return translations by the names of operators, which are given as words of a text."""
    return {name: found for found, names in families for name in names.split()}
