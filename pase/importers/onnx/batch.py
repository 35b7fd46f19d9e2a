"""The batch of a model: shapes of its inputs with one that is given, and operators into which another one is written.

Dims that the file leaves open are what the user gives. An exporter may have written the batch that it saw into the
targets of reshapes and the like: with the shapes of the exported batch at hand (the reference), a dim of an input that
has grown with the batch must be found again in the output; where the stored target does not let it, it is changed.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from pase.errors import ModelError, unknown_name
from pase.graph import Scalar
from pase.importers.ir import Value
from pase.importers.ir.call import Shape
from pase.importers.onnx.inference import Rebatch, Tensors
from pase.importers.onnx.model import Declared, OnnxModel

_BATCH_NAME = re.compile(r"n|b|bs|.*batch.*", re.IGNORECASE)
_MAX_EXTENT = 2**31 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class InputShapes:
    """shapes: of each input, as it is to be imported. reference: with the batch that was exported, where that differs.

    old_batch: of the reference. notes: what was assumed.
    """

    shapes: Mapping[str, tuple[int, ...]]
    reference: Mapping[str, tuple[int, ...]] | None = None
    old_batch: int = 1
    batch: int = 1
    notes: tuple[str, ...] = ()


def input_shapes(model: OnnxModel, *, batch: int | None, arguments: Mapping[str, Scalar]) -> InputShapes:
    """Return the shapes of a model's inputs.

    batch: in place of the batch dim: the one that is named so, else the leading one of every input that has the first
    input's. arguments: extents by the name of a dim ("sequence"), or of an input's dim by its position ("tokens.1").
    Raises ModelError where a dim has no extent.
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
    """Return the shapes as they are; a fixed dim that an argument changes, and no other, is treated as the batch is."""
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
    """Return the arguments as whole numbers; ModelError where one is none, or names no dim."""
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
    """Return what a dim such as "past + current" is the sum of."""
    return tuple(term.strip() for term in dim.split("+"))


def _open_dim(d: Declared, i: int) -> str:
    dim = d.dims[i]
    found = f"dim {i} of input {d.name!r}" + (f", {dim!r}," if dim is not None else "") + " has no fixed extent"
    is_batch = i == 0 or (isinstance(dim, str) and _BATCH_NAME.fullmatch(dim))
    way = f"--arg {dim}=N" if isinstance(dim, str) else f"--arg {d.name}.{i}=N"
    return f"{found}; give it as {'--batch N or ' if is_batch else ''}{way}"


# -- a batch that is written into the model

_RESHAPES = frozenset({"Reshape", "Flatten", "Squeeze", "Unsqueeze"})
"""Operators that leave the elements in order."""

_TARGETS: Mapping[str, int] = {"Reshape": 1, "Expand": 1, "Resize": 3}
"""Which input is an operator's target, by its name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Baked:
    """An operator that takes a target. shape: of its input now; before, result: of input and output in the reference.

    target: the stored one. old, new: batches. outside: what comes before the batch in the dim of the input that has it.
    """

    shape: Shape
    before: Shape
    result: Shape
    target: Shape
    old: int
    new: int
    outside: int

    @property
    def grown(self) -> int | None:
        """The dim of the input that has grown with the batch; None where it is none, or not one alone."""
        return _grown(self.shape, self.before, self.old, self.new)

    @property
    def outer(self) -> int:
        """Elements that come before the batch in the reference, row-major."""
        return prod(self.before[: self.grown or 0]) * self.outside

    def reshaped(self) -> Shape:
        """Return the target of a Reshape with the new batch."""
        place = self.grown
        dim = None if place is None else self._where(place)
        if place is None or dim is None or self.target[dim] in (0, -1) or self.target[dim] % self.old:
            return self.target
        if -1 not in self.target:
            sizes = [self.shape[i] if extent == 0 else extent for i, extent in enumerate(self.target)]
            if prod(sizes) == prod(self.shape):
                return self.target
        elif place > 0 or self.outside > 1:
            # What is left open takes the batch up.
            return self.target
        return (*self.target[:dim], self.target[dim] // self.old * self.new, *self.target[dim + 1 :])

    def expanded(self) -> Shape:
        """Return the target of an Expand with a leading dim that was the batch, of more than one, as the new one."""
        is_batch = self.old > 1 and self.target[:1] == (self.old,)
        return (self.new, *self.target[1:]) if is_batch else self.target

    def resized(self) -> Shape:
        """Return the target of a Resize with the new batch."""
        is_batch = self.grown == 0 and self.target[:1] == self.before[:1]
        return (self.shape[0], *self.target[1:]) if is_batch else self.target

    def _where(self, dim: int) -> int | None:
        """Return the dim of the output that the batch is in.

        It is the leading one if the batch was leading in the input. Else it is the one whose elements take the batch
        in; a batch of one leaves that open, so that a dim of one element is preferred there, then what keeps the number
        of dims.
        """
        rank = len(self.target)
        if dim == 0 and self.outside == 1:
            return 0 if rank else None
        ends = [prod(self.result[:i]) for i in range(rank + 1)]
        if self.old > 1:
            last = self.outer * self.old
            return next((i for i in range(rank) if ends[i] <= self.outer and ends[i + 1] >= last), None)
        fits = [i for i in range(rank) if ends[i] == self.outer]
        if fits and rank < len(self.before) and self.result[fits[0]] != 1:
            return fits[0] - 1
        return fits[0] if fits else None

    def outside_after(self, shape: Shape) -> int:
        """Return what comes before the batch in its dim of a reshape's output, whose shape is now this one."""
        place = _grown(shape, self.result, self.old, self.new)
        if place is None or self.grown is None:
            return 1
        before = prod(self.result[:place])
        outside, rest = divmod(self.outer, before) if before else (1, 1)
        return outside if not rest and outside and self.result[place] % outside == 0 else 1


def _grown(now: Shape, then: Shape, old: int, new: int) -> int | None:
    """Return the dim that has grown with the batch; None where it is none, or not one alone."""
    if len(now) != len(then):
        return None
    changed = [i for i, (a, b) in enumerate(zip(now, then, strict=True)) if a != b]
    return changed[0] if len(changed) == 1 and now[changed[0]] * old == then[changed[0]] * new else None


class Rebatching:
    """Changes operators while they are walked. changes: what was changed, in words."""

    def __init__(self, tensors: Tensors, rebatch: Rebatch, add: Callable[[str, str, list[str], Value], None]) -> None:
        """add: adds a call to the model: operator, name, inputs, result."""
        self._tensors, self._rebatch, self._add = tensors, rebatch, add
        # What comes before the batch in the dim of a tensor that has it, where that is more than one element.
        self._outside: dict[str, int] = {}
        self.changes: list[str] = []

    def inputs(
        self, operator: str, name: str, inputs: list[str], output: str, attributes: Mapping[str, Any]
    ) -> list[str]:
        """Return an operator's inputs where the exported batch is not written into them."""
        if not inputs or not inputs[0] or not output:
            return inputs
        if operator == "Concat":
            return self._concatenated(name, inputs, output, attributes)
        position = _TARGETS.get(operator, len(inputs))
        reference = self._rebatch.reference
        if position >= len(inputs) or inputs[0] not in reference.values or output not in reference.values:
            return inputs
        now, then = (known.get(inputs[position]) for known in (self._tensors.constants, reference.constants))
        target = None if now is None else tuple(int(extent) for extent in now.ravel())
        if target is None or then is None or tuple(int(extent) for extent in then.ravel()) != target:
            # The model computes it from the batch already.
            return inputs
        baked = self._baked(inputs[0], reference.values[output].shape, target)
        change = {"Reshape": baked.reshaped, "Expand": baked.expanded, "Resize": baked.resized}[operator]
        changed = change()
        if changed == target:
            return inputs
        self.changes.append(f"{operator} {name!r} to {list(changed)} instead of {list(target)}")
        target_name = self._tensors.know_shape(f"{output}:target", changed)
        return [*inputs[:position], target_name, *inputs[position + 1 :]]

    def _baked(self, source: str, result: Shape, target: Shape) -> Baked:
        return Baked(
            shape=self._tensors.values[source].shape,
            before=self._rebatch.reference.values[source].shape,
            result=result,
            target=target,
            old=self._rebatch.old,
            new=self._rebatch.new,
            outside=self._outside.get(source, 1),
        )

    def _concatenated(self, name: str, inputs: list[str], output: str, attributes: Mapping[str, Any]) -> list[str]:
        """Return a concatenation's inputs, those of one example repeated to the batch of the others."""
        references, new = self._rebatch.reference.values, self._rebatch.new
        known = {i: self._tensors.values[key] for i, key in enumerate(inputs) if key in references}
        shapes = {i: (value.shape, references[value.name].shape) for i, value in known.items()}
        leading = {i: (now[0], then[0]) for i, (now, then) in shapes.items() if now and then}
        rank, axis = len(self._tensors.values[inputs[0]].shape), attributes.get("axis", 1)
        is_leading = not rank or not isinstance(axis, int) or axis % rank == 0
        if is_leading or not any(now == new != then for now, then in leading.values()):
            return inputs
        found = list(inputs)
        for i in (i for i, (now, _) in leading.items() if now == 1 != new):
            value = known[i]
            shape = (new, *value.shape[1:])
            wide = self._tensors.define(f"{output}:repeated{i}", shape, value.dtype)
            target = self._tensors.know_shape(f"{output}:batch{i}", shape)
            self._add("Expand", wide.name, [inputs[i], target], wide)
            self.changes.append(f"{inputs[i]!r} is repeated {new} times for Concat {name!r}")
            found[i] = wide.name
        return found

    def follow(self, operator: str, inputs: list[str], results: Iterable[Value | None]) -> None:
        """Note what comes before the batch in the dim that has it, where a reshape has put the two together."""
        known = self._rebatch.reference.values
        for value in results:
            if value is None or value.name not in known:
                continue
            then, outside = known[value.name].shape, 1
            if operator in _RESHAPES and inputs[0] in known:
                outside = self._baked(inputs[0], then, ()).outside_after(value.shape)
            else:
                place = _grown(value.shape, then, self._rebatch.old, self._rebatch.new)
                for i in inputs:
                    if place is not None and i in self._outside and then[place] in known[i].shape:
                        outside = self._outside[i]
            if outside > 1:
                self._outside[value.name] = outside
