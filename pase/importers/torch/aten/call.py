"""`Call` and `Step`: an operator as an exported program calls it, and the nodes that it is translated into."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

from pase.importers.ir import Generic, Identity, Op, Reshape, Step, Use, Value

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """An operator as the exported program calls it.

    name: without its overload ("linear"). arguments: by the names of its schema ("input" for "self"), those that are
    not given left out; tensors are values, lists of tensors lists of them. results: what it returns; None for what is
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
    def result(self) -> Value:
        """The first tensor that it returns."""
        return self.results[0]

    @property
    def function(self) -> str:
        """Its name, without the mark of an operator that writes its result into its input."""
        return self.name if self.name.startswith("__") else self.name.rstrip("_")

    def value(self, name: str) -> Value:
        """Return a tensor that it is called with."""
        found = self.arguments[name]
        assert isinstance(found, Value), f"argument {name} of {self.name} is no tensor"
        return found

    def maybe(self, name: str) -> tuple[Value, ...]:
        """Return a tensor that it may be called with, or nothing."""
        found = self.arguments.get(name)
        return (found,) if isinstance(found, Value) else ()

    def get(self, name: str, default: Any = None) -> Any:
        """Return an argument, or the default where it is not given."""
        found = self.arguments.get(name)
        return default if found is None else found

    def first_of_run(self, value: Value, extent: int) -> int | None:
        """Return the first of places in a dim that go up by one, all in the last dim; None where that is not known."""
        found = [place % extent if extent else place for place in self.numbers.get(value.name, ())]
        if not found or prod(value.shape[:-1]) != 1 or found[-1] >= extent:
            return None
        return found[0] if found == list(range(found[0], found[0] + len(found))) else None

    @property
    def tensors(self) -> tuple[Value, ...]:
        """All tensors that it is called with, in order."""
        found: list[Value] = []
        for argument in self.arguments.values():
            items = argument if isinstance(argument, list | tuple) else [argument]
            found += [item for item in items if isinstance(item, Value)]
        return tuple(found)


Translation = Callable[[Call], list[Step]]


def step(call: Call, op: Op, *inputs: Value) -> list[Step]:
    """Return one node that gives the operator's results."""
    return [Step(op=op, inputs=uses(*inputs), outputs=call.results)]


def step_to(op: Op, output: Value, *inputs: Value) -> Step:
    """Return one node that gives a value."""
    return Step(op=op, inputs=uses(*inputs), outputs=(output,))


def uses(*values: Value) -> tuple[Use, ...]:
    """Return values as they are."""
    return tuple(Use(value=value.name) for value in values)


def inner(call: Call, suffix: str, shape: Sequence[int], dtype: str = "") -> Value:
    """Return a value between the steps of a translation, of the result's type."""
    return Value(name=f"{call.result.name}:{suffix}", shape=tuple(shape), dtype=dtype or call.result.dtype)


def reshaped(call: Call, value: Value, shape: Sequence[int], suffix: str = "") -> tuple[list[Step], Value]:
    """Return the step that gives a value another shape, if it needs one, and the value in that shape."""
    if value.shape == tuple(shape):
        return [], value
    seen = inner(call, suffix or f"{value.name}:seen", shape, value.dtype)
    return [step_to(Reshape(), seen, value)], seen


def identity(call: Call) -> list[Step]:
    """Return the first tensor as it is."""
    return step(call, Identity(), *call.tensors[:1])


def constant(call: Call) -> list[Step]:
    """Return values that no tensor's values reach: zeros of another's shape, a range, noise."""
    return step(call, Generic(is_index=not call.result.is_float))


def generic(call: Call) -> list[Step]:
    """Return a node of which only the shapes are known: the leading dim is taken to pass through where it stays."""
    ordered = floats_first(call.tensors)
    passes: tuple[tuple[int, int], ...] = ()
    floats = [value for value in call.results if value.is_float]
    if ordered and ordered[0].shape and floats:
        first = ordered[0].shape
        passes = ((0, 0),) if all(value.shape[:1] == first[:1] for value in floats) else ()
    return step(call, Generic(passes=passes, is_index=not floats), *ordered)


def generic_along(call: Call, over: Iterable[int], flop_per_point: float = 1.0) -> list[Step]:
    """Return a node that works along some dims of its first tensor alone; the others pass through where they stay."""
    ordered = floats_first(call.tensors)
    x = ordered[0]
    within = {dim % max(1, len(x.shape)) for dim in over}
    floats = [value for value in call.results if value.is_float]
    shapes = [value.shape for value in floats or call.results]
    passes = tuple(
        (i, i)
        for i, extent in enumerate(x.shape)
        if i not in within and all(len(shape) > i and shape[i] == extent for shape in shapes)
    )
    return step(call, Generic(passes=passes, flop_per_point=flop_per_point, is_index=not floats), *ordered)


def floats_first(values: Iterable[Value]) -> tuple[Value, ...]:
    """Return values with those that have a gradient first."""
    return tuple(sorted(values, key=lambda value: not value.is_float))


def letters(count: int, without: str = "") -> str:
    """Return so many letters for dims."""
    alphabet = [c for c in "abcdefghijlmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ" if c not in without]
    assert count <= len(alphabet), f"a tensor of {count} dims"
    return "".join(alphabet[:count])


def each(value: int | Sequence[int], rank: int) -> Shape:
    """Return one number for each of some dims."""
    values = tuple(value) if isinstance(value, list | tuple) else (value,)
    return values * rank if len(values) == 1 else values


def as_list(value: Any) -> list[Any]:
    """Return a list of what may be one item."""
    return list(value) if isinstance(value, list | tuple) else [value]


def spatial_rank(name: str) -> int:
    """Return the number of spatial dims that an operator's name tells ("max_pool2d")."""
    return int(next(c for c in name if c.isdigit()))


def table(*families: tuple[Translation, str]) -> dict[str, Translation]:
    """Return translations by the names of operators, which are given as words of a text."""
    return {name: found for found, names in families for name in names.split()}
