"""The batch of a model: input shapes for a given batch, and operators that contain the exported batch size.

Dims that the file leaves open are given by the user. An exporter may have written the batch size of its example into
the targets of reshapes and similar operators. Given the shapes with the exported batch (the reference), a dim of an
input that has grown with the batch must also grow in the output; where the stored target prevents that, it is changed.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

from pase.errors import ModelError, unknown_name
from pase.graph import Scalar
from pase.importers.ir.call import Array, Shape, with_extent
from pase.importers.ir.trace import Value
from pase.importers.onnx.model import Declared, OnnxModel

_BATCH_NAME = re.compile(r"n|b|bs|.*batch.*", re.IGNORECASE)
_MAX_EXTENT = 2**31 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class InputShapes:
    """Shapes of a model's inputs.

    Attributes:
        shapes: Shape of each input to import.
        reference: Shapes with the exported batch, if that differs.
        old_batch: Batch of the reference.
        notes: Assumptions.
    """

    shapes: Mapping[str, tuple[int, ...]]
    reference: Mapping[str, tuple[int, ...]] | None = None
    old_batch: int = 1
    batch: int = 1
    notes: tuple[str, ...] = ()


def input_shapes(model: OnnxModel, *, batch: int | None, arguments: Mapping[str, Scalar]) -> InputShapes:
    """Return the shapes of a model's inputs.

    Args:
        model: The model.
        batch: Replaces the batch dim: the one with that name, otherwise the leading one of every input that has the
            first input's.
        arguments: Extents by the name of a dim ("sequence"), or of an input's dim by its position ("tokens.1").

    Raises:
        ModelError: A dim has no extent.
    """
    values = _extents(model.inputs, arguments)
    if batch is None:
        return _without_batch(model.inputs, values)
    if not 1 <= batch <= _MAX_EXTENT:
        raise ModelError(f"batch={batch} is not usable; expected a whole number from 1 to {_MAX_EXTENT}")
    places = _batch_places(model.inputs)
    if not places:
        raise ModelError("the model has no input with a dim that could be the batch; import it without --batch")
    fixed = {extent for d in model.inputs for i, extent in enumerate(d.dims) if (d.name, i) in places}
    old = next((extent for extent in fixed if isinstance(extent, int)), 1)
    shapes = {d.name: _shape(d, values, dict.fromkeys(places, batch)) for d in model.inputs}
    reference = {d.name: _shape(d, values, dict.fromkeys(places, old)) for d in model.inputs}
    said = ", ".join(f"dim {i} of {name!r}" for name, i in sorted(places))
    return InputShapes(
        shapes=shapes,
        reference=None if batch == old else reference,
        old_batch=old,
        batch=batch,
        notes=(f"the batch is {said}",),
    )


def _without_batch(inputs: tuple[Declared, ...], values: Mapping[str, int]) -> InputShapes:
    """Return the shapes unchanged; a single fixed dim that an argument changes is treated as the batch."""
    shapes = {d.name: _shape(d, values, {}) for d in inputs}
    changed = {
        (dim, shapes[d.name][i])
        for d in inputs
        for i, dim in enumerate(d.dims)
        if isinstance(dim, int) and dim != shapes[d.name][i]
    }
    if len(changed) != 1:
        return InputShapes(shapes=shapes)
    ((old, new),) = changed
    fixed = {f"{d.name}.{i}" for d in inputs for i, dim in enumerate(d.dims) if isinstance(dim, int)}
    others = {name: extent for name, extent in values.items() if name not in fixed}
    reference = {d.name: _shape(d, others, {}) for d in inputs}
    return InputShapes(shapes=shapes, reference=reference, old_batch=old, batch=new)


def _batch_places(inputs: tuple[Declared, ...]) -> frozenset[tuple[str, int]]:
    """Return the dims (input, position) that are the batch."""
    named = {dim for d in inputs for dim in d.dims if isinstance(dim, str) and _BATCH_NAME.fullmatch(dim)}
    if named:
        found = {(d.name, i) for d in inputs for i, dim in enumerate(d.dims) if dim in named}
        told = {name for name, _ in found}
        return frozenset(found | {(d.name, 0) for d in inputs if d.name not in told and d.dims[:1] == (None,)})
    first = next((d.dims[0] for d in inputs if d.dims), None)
    # Dims that are left open have names of their own in every input, or none.
    is_open = not isinstance(first, int)
    return frozenset(
        (d.name, 0) for d in inputs if d.dims and (d.dims[0] == first or (is_open and not isinstance(d.dims[0], int)))
    )


def _extents(inputs: tuple[Declared, ...], arguments: Mapping[str, Scalar]) -> dict[str, int]:
    """Return the arguments as integers; ModelError where one is not an integer, or names no dim."""
    symbols = {part for d in inputs for dim in d.dims if isinstance(dim, str) for part in (dim, *_terms(dim))}
    positions = {f"{d.name}.{i}" for d in inputs for i in range(len(d.dims))}
    found = {}
    for name, value in arguments.items():
        if name not in symbols | positions:
            raise ModelError(unknown_name("dim", name, symbols or positions))
        try:
            extent = int(value)
        except (TypeError, ValueError):
            extent = -1
        if str(extent) != str(value).strip() or not 0 <= extent <= _MAX_EXTENT:
            raise ModelError(f"{name}={value} is not usable; expected a whole number from 0 to {_MAX_EXTENT}")
        found[name] = extent
    return found


def _shape(d: Declared, values: Mapping[str, int], batch: Mapping[tuple[str, int], int]) -> tuple[int, ...]:
    return tuple(_extent(d, i, values, batch) for i in range(len(d.dims)))


def _extent(d: Declared, i: int, values: Mapping[str, int], batch: Mapping[tuple[str, int], int]) -> int:
    dim = d.dims[i]
    given = values.get(f"{d.name}.{i}")
    if given is not None:
        return given
    if (d.name, i) in batch:
        return batch[d.name, i]
    if isinstance(dim, int):
        return dim
    if isinstance(dim, str):
        if dim in values:
            return values[dim]
        terms = _terms(dim)
        if len(terms) > 1 and all(term in values or term.isdecimal() for term in terms):
            return sum(values[term] if term in values else int(term) for term in terms)
    raise ModelError(_open_dim(d, i))


def _terms(dim: str) -> tuple[str, ...]:
    """Return the terms of a dim such as "past + current"."""
    return tuple(term.strip() for term in dim.split("+"))


def _open_dim(d: Declared, i: int) -> str:
    dim = d.dims[i]
    found = f"dim {i} of input {d.name!r}" + (f", {dim!r}," if dim is not None else "") + " has no fixed extent"
    is_batch = i == 0 or (isinstance(dim, str) and _BATCH_NAME.fullmatch(dim))
    way = f"--arg {dim}=N" if isinstance(dim, str) else f"--arg {d.name}.{i}=N"
    return f"{found}; give it as {'--batch N or ' if is_batch else ''}{way}"


# -- a batch that is written into the model

RESHAPES = frozenset({"Reshape", "Flatten", "Squeeze", "Unsqueeze"})
"""Operators that leave the elements in order."""

TARGETS: Mapping[str, int] = {"Reshape": 1, "Expand": 1, "Resize": 3}
"""Which input is an operator's target, by its name."""


@dataclass(frozen=True, kw_only=True)
class Rebatch:
    """The exported (old) batch of a model with a new one.

    Attributes:
        values, constants: Those with the exported batch.
        outside: Factor before the batch in the dim of a tensor that contains it, where it is above 1.
    """

    values: Mapping[str, Value]
    constants: Mapping[str, Array]
    old: int
    new: int
    outside: dict[str, int] = field(default_factory=dict)

    def target(self, operator: str, x: Value, output: str, target: Shape) -> Shape:
        """Return a target with the new batch; the stored one where it does not contain the exported batch.

        Args:
            operator: "Reshape", "Expand" or "Resize".
            x: Its input with the new batch.
            output: Name of its output.
            target: The stored target.
        """
        place = self._grown(x)
        if operator == "Expand":
            # A leading dim that was the batch, of more than one.
            is_batch = self.old > 1 and target[:1] == (self.old,)
            return (self.new, *target[1:]) if is_batch else target
        if operator == "Resize":
            is_batch = place == 0 and target[:1] == self.values[x.name].shape[:1]
            return (x.shape[0], *target[1:]) if is_batch else target
        dim = None if place is None else self._batch_dim(x.name, place, self.values[output].shape, len(target))
        if dim is None or target[dim] in (0, -1) or target[dim] % self.old:
            return target
        if -1 not in target:
            if prod(x.shape[i] if extent == 0 else extent for i, extent in enumerate(target)) == prod(x.shape):
                return target
        elif place or self.outside.get(x.name, 1) > 1:
            # An open dim absorbs the batch.
            return target
        return with_extent(target, dim, target[dim] // self.old * self.new)

    def _grown(self, now: Value) -> int | None:
        """Return the dim that has grown with the batch; None where there is no such dim, or several."""
        then = self.values[now.name].shape
        if len(now.shape) != len(then):
            return None
        changed = [i for i, (a, b) in enumerate(zip(now.shape, then, strict=True)) if a != b]
        alone = len(changed) == 1 and now.shape[changed[0]] * self.old == then[changed[0]] * self.new
        return changed[0] if alone else None

    def _before(self, name: str, place: int) -> int:
        """Return the number of elements before the batch within a dim, with the exported batch; row-major."""
        return prod(self.values[name].shape[:place]) * self.outside.get(name, 1)

    def _batch_dim(self, name: str, place: int, result: Shape, rank: int) -> int | None:
        """Return the dim of a reshape's result that contains the batch.

        It is the leading one if the batch was leading in the input. Otherwise it is the one whose elements contain the
        batch. A batch of 1 leaves that open: dims of extent 1 are then preferred, then results that preserve the number
        of dims.
        """
        if place == 0 and self.outside.get(name, 1) == 1:
            return 0 if rank else None
        before, ends = self._before(name, place), [prod(result[:i]) for i in range(rank + 1)]
        if self.old > 1:
            last = before * self.old
            return next((i for i in range(rank) if ends[i] <= before and ends[i + 1] >= last), None)
        fits = [i for i in range(rank) if ends[i] == before]
        if fits and rank < len(self.values[name].shape) and result[fits[0]] != 1:
            return fits[0] - 1
        return fits[0] if fits else None

    def follow(self, operator: str, inputs: Sequence[Value], result: Value) -> None:
        """Note what comes before the batch in the dim that has it, where a reshape has put the two together."""
        place = self._grown(result) if result.name in self.values else None
        if place is None:
            return
        then, known = self.values[result.name].shape, [x for x in inputs if x.name in self.values]
        outside = 1
        if operator not in RESHAPES or inputs[0] not in known:
            for x in known:
                if then[place] in self.values[x.name].shape:
                    outside = self.outside.get(x.name, outside)
        elif (source := self._grown(inputs[0])) is not None and (before := prod(then[:place])):
            outside, rest = divmod(self._before(inputs[0].name, source), before)
            outside = outside if not rest and outside and then[place] % outside == 0 else 1
        if outside > 1:
            self.outside[result.name] = outside
