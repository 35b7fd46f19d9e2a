"""Shapes of a model's inputs: what the file says, what the user gives for dims that it leaves open, and the batch."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from pase.errors import ModelError, unknown_name
from pase.graph import Scalar
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
    fixed = {name: extent for name, extent in values.items() if not _is_fixed(inputs, name)}
    reference = {d.name: _shape(d, fixed, {}) for d in inputs}
    return InputShapes(shapes=shapes, reference=reference, old_batch=old, batch=new)


def _is_fixed(inputs: tuple[Declared, ...], name: str) -> bool:
    return any(name == f"{d.name}.{i}" and isinstance(dim, int) for d in inputs for i, dim in enumerate(d.dims))


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
    ways = list(_ways(d, i))
    return f"{found}; give it as {' or '.join(ways)}"


def _ways(d: Declared, i: int) -> Iterator[str]:
    dim = d.dims[i]
    if i == 0 or (isinstance(dim, str) and _BATCH_NAME.fullmatch(dim)):
        yield "--batch N"
    yield f"--arg {dim}=N" if isinstance(dim, str) else f"--arg {d.name}.{i}=N"
