"""`Call`: an operator as its source calls it, and its translation into steps; common to all front ends.

A translation reads like a definition of the operator: ``call.reshape(call.transpose(x, order), out=call.result)``.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from pase.importers.ir import ops
from pase.importers.ir.trace import Step, Use, Value

Array = np.ndarray[Any, Any]
Shape = tuple[int, ...]

_ALPHABET = "abcdefghijlmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"


def letters(count: int, without: str = "") -> str:
    """Return `count` different letters for dims; ValueError where there are not enough."""
    found = [c for c in _ALPHABET if c not in without][:count]
    if len(found) < count:
        raise ValueError(f"a tensor has {count} dims; at most {len(found)} are known of")
    return "".join(found)


def with_extent(shape: Sequence[int], dim: int, extent: int) -> Shape:
    """Return a shape with one extent replaced."""
    return (*shape[:dim], extent, *shape[dim + 1 :])


def floats_first(values: Iterable[Value]) -> tuple[Value, ...]:
    """Return values with those that have a gradient first."""
    return tuple(sorted(values, key=lambda value: not value.is_float))


def values_of(structure: Any) -> list[Value]:
    """Return the values in nested arguments, in order."""
    if isinstance(structure, Value):
        return [structure]
    items = structure.values() if isinstance(structure, Mapping) else structure
    return [v for item in items for v in values_of(item)] if isinstance(structure, Mapping | list | tuple) else []


def as_list(value: Any) -> list[Any]:
    """Return a list of what may be one item."""
    return list(value) if isinstance(value, list | tuple) else [value]


def each(value: int | Sequence[int], count: int) -> Shape:
    """Return `count` numbers, repeating a single one."""
    values = tuple(as_list(value))
    return values * count if len(values) == 1 else values


def place(axis: int, rank: int) -> int:
    """Return an axis counted from 0; ValueError where it is out of range."""
    if not -rank <= axis < max(1, rank):
        raise ValueError(f"axis {axis} is out of range for a tensor of {rank} dims")
    return axis % rank if rank else 0


def places(axes: int | Sequence[int] | None, rank: int) -> Shape:
    """Return axes counted from 0, in order; all where none is given."""
    return tuple(range(rank) if axes is None else sorted({place(axis, rank) for axis in as_list(axes)} if rank else ()))


@dataclass(frozen=True, kw_only=True)
class Call:
    """An operator as its source calls it, and the steps of its translation so far.

    Each writing method appends one or several steps and returns the resulting value: `out` if given (a result of the
    operator), otherwise a new intermediate one. ValueError where shapes do not fit.

    Attributes:
        name: Name of the operator.
        arguments: Named arguments; tensors among them are values.
        inputs: Tensors that it reads, in order; None for omitted ones.
        outputs: Its results; None for results that are not tensors, or omitted.
        known: Values, by name, of tensors that depend on no input.
        steps: Steps of the translation.
    """

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    inputs: tuple[Value | None, ...]
    outputs: tuple[Value | None, ...]
    known: Mapping[str, Array] = field(default_factory=dict)
    steps: list[Step] = field(default_factory=list)

    @property
    def tensors(self) -> tuple[Value, ...]:
        """All tensors that it reads, in order."""
        return tuple(value for value in self.inputs if value is not None)

    @property
    def results(self) -> tuple[Value, ...]:
        """All tensors that it gives, in order."""
        return tuple(value for value in self.outputs if value is not None)

    @property
    def x(self) -> Value:
        """The first tensor that it reads."""
        return self.value(0)

    @property
    def result(self) -> Value:
        """The first tensor that it gives."""
        return self.results[0]

    # -- arguments

    def get(self, name: str, default: Any = None) -> Any:
        """Return an argument, or the default if it is not given."""
        found = self.arguments.get(name)
        return default if found is None else found

    def maybe(self, *keys: int | str) -> tuple[Value, ...]:
        """Return those of some tensors, by position or by name, that are given."""
        found = (
            self.arguments.get(key) if isinstance(key, str) else self.inputs[key] if key < len(self.inputs) else None
            for key in keys
        )
        return tuple(value for value in found if isinstance(value, Value))

    def has(self, key: int | str) -> bool:
        """Return whether a tensor is given."""
        return bool(self.maybe(key))

    def value(self, key: int | str) -> Value:
        """Return a tensor by position or by name; ValueError where it is omitted."""
        found = self.maybe(key)
        if not found:
            raise ValueError(f"{self.name} lacks input {key}")
        return found[0]

    def dim(self, default: int = 0, name: str = "dim", rank: int | None = None) -> int:
        """Return the dim that an argument names, of the first tensor or one of another rank."""
        return place(self.get(name, default), len(self.x.shape) if rank is None else rank)

    def constant(self, key: int | str) -> Array | None:
        """Return the values of a tensor; None where they are unknown, or it is omitted."""
        return next((self.known.get(value.name) for value in self.maybe(key)), None)

    def integers(self, key: int | str) -> Shape | None:
        """Return the values of an integer tensor, row-major; None where they are unknown."""
        found = self.constant(key)
        return None if found is None else tuple(found.ravel().tolist())

    def number(self, key: int | str) -> float | None:
        """Return the value of a scalar tensor; None where it is not a scalar, or unknown."""
        found = self.constant(key)
        return float(found.ravel()[0]) if found is not None and found.size == 1 and found.dtype.kind in "fiub" else None

    # -- one step

    def write(self, op: ops.Op, inputs: Iterable[Value], outputs: Iterable[Value]) -> None:
        """Write a step of any number of outputs."""
        self.steps.append(Step(op=op, inputs=tuple(Use(value=x.name) for x in inputs), outputs=tuple(outputs)))

    def give(self, op: ops.Op, *inputs: Value) -> None:
        """Write the step that makes all results."""
        self.write(op, inputs, self.results)

    def add(
        self,
        op: ops.Op,
        *inputs: Value,
        shape: Sequence[int] = (),
        dtype: str = "",
        out: Value | None = None,
        name: str = "",
    ) -> Value:
        """Append a step with one output.

        shape, dtype: those of a new value; default type: that of the first input. name: name of the value if it may be
        visible: integers that a model computes from its inputs are inputs of its program.
        """
        if out is None:
            dtype = dtype or next((x.dtype for x in floats_first(inputs)), self.result.dtype)
            out = self.between(shape, dtype, name)
        self.write(op, inputs, (out,))
        return out

    def between(self, shape: Sequence[int], dtype: str = "", name: str = "") -> Value:
        """Return a new value between two steps, by default of the result's type."""
        name = f":{name}" if name else f"~{len(self.steps)}"
        return Value(name=f"{self.result.name}{name}", shape=tuple(shape), dtype=dtype or self.result.dtype)

    def identity(self, x: Value, *, out: Value | None = None) -> Value:
        """Append an identity."""
        return self.add(ops.Identity(), x, shape=x.shape, out=out)

    def reshape(self, x: Value, shape: Sequence[int] = (), *, out: Value | None = None, name: str = "") -> Value:
        """Append a reshape; nothing if the shape is unchanged and no result is required."""
        is_same = out is None and x.shape == tuple(shape)
        return x if is_same else self.add(ops.Reshape(), x, shape=shape, out=out, name=name)

    def transpose(self, x: Value, order: Sequence[int], *, out: Value | None = None) -> Value:
        """Write the dims in another order."""
        return self.add(ops.Transpose(order=tuple(order)), x, shape=[x.shape[i] for i in order], out=out)

    def broadcast(
        self, x: Value, shape: Sequence[int] = (), places: Sequence[int] | None = None, *, out: Value | None = None
    ) -> Value:
        """Append a broadcast to a shape; places: positions of its dims there, by default the last ones."""
        rank = len(shape if out is None else out.shape)
        places = range(rank - len(x.shape), rank) if places is None else places
        return self.add(ops.Broadcast(places=tuple(places)), x, shape=shape, out=out)

    def cut(self, x: Value, dim: int, start: int, size: int = 1, *, stride: int = 1, out: Value | None = None) -> Value:
        """Write a piece along one dim, all of the others."""
        rank = len(x.shape)
        op = ops.Slice(starts=with_extent((0,) * rank, dim, start), steps=with_extent((1,) * rank, dim, stride))
        return self.add(op, x, shape=with_extent(x.shape, dim, size), out=out)

    def box(
        self, x: Value, starts: Sequence[int], shape: Sequence[int], by: Sequence[int] = (), *, out: Value | None = None
    ) -> Value:
        """Append a slice of a box, optionally strided; nothing if it is the whole tensor and no result is required."""
        op = ops.Slice(starts=tuple(starts), steps=tuple(by) or (1,) * len(x.shape))
        return x if out is None and x.shape == tuple(shape) else self.add(op, x, shape=shape, out=out)

    def split(self, x: Value, dim: int) -> None:
        """Write all results as pieces that make up a tensor along a dim, which results of one element may lack."""
        start = 0
        for result in self.results:
            if len(result.shape) == len(x.shape):
                self.cut(x, dim, start, result.shape[dim], out=result)
            else:
                self.reshape(self.cut(x, dim, start), out=result)
            start += result.shape[dim] if len(result.shape) == len(x.shape) else 1

    def stack(self, values: Sequence[Value], dim: int, *, out: Value | None = None) -> Value:
        """Write tensors side by side along a new dim."""
        return self.concat([self.reshape(x, (*x.shape[:dim], 1, *x.shape[dim:])) for x in values], dim, out=out)

    def concat(self, values: Sequence[Value], dim: int, *, out: Value | None = None) -> Value:
        """Append a concatenation; a single tensor is returned unchanged."""
        if len(values) == 1:
            return self.identity(values[0], out=out)
        shape = with_extent(values[0].shape, dim, sum(value.shape[dim] for value in values))
        return self.add(ops.Concat(dim=dim), *values, shape=shape, out=out)

    def point(
        self, function: str, *inputs: Value, out: Value | None = None, dtype: str = "", name: str = "", **details: Any
    ) -> Value:
        """Write a function point by point; details: of the Pointwise."""
        op = ops.Pointwise(functions=(function,), **details)
        return self.add(op, *inputs, shape=broadcast_shape(inputs), dtype=dtype, out=out, name=name)

    def softmax(self, x: Value, dim: int, *, is_log: bool = False, out: Value | None = None) -> Value:
        """Write exponentials divided by their sum over a dim, or the logarithms of that."""
        return self.add(ops.Softmax(dim=dim, is_log=is_log), x, shape=x.shape, out=out)

    def normalise(
        self,
        kind: Any,
        x: Value,
        over: Iterable[int],
        channels: Iterable[int],
        *,
        scale: Sequence[Value] = (),
        shift: Sequence[Value] = (),
        statistics: Sequence[Value] = (),
        **details: Any,
    ) -> None:
        """Append a normalisation, whose output is the first result.

        scale, shift: one value each, if present. statistics: running statistics. details: further fields of the
        Normalise.
        """
        op = ops.Normalise(
            kind=kind,
            over=tuple(over),
            channels=tuple(channels),
            has_scale=bool(scale),
            has_shift=bool(shift),
            num_statistics=len(statistics),
            **details,
        )
        self.add(op, x, *scale, *shift, *statistics, out=self.result)

    def reduce(
        self, function: str, x: Value, over: Iterable[int], *, keeps_dims: bool = False, out: Value | None = None
    ) -> Value:
        """Write a reduction over some dims."""
        gone = tuple(sorted(over))
        shape = [1 if i in gone else e for i, e in enumerate(x.shape) if keeps_dims or i not in gone]
        return self.add(ops.Reduce(function=function, over=gone, keeps_dims=keeps_dims), x, shape=shape, out=out)

    def contract(
        self, x: Value, y: Value, operands: tuple[str, str], output: str, *bias: Value, out: Value | None = None
    ) -> Value:
        """Write a sum of products, perhaps with a bias of the last dims."""
        extents = dict(zip("".join(operands), (*x.shape, *y.shape), strict=True))
        op = ops.Contract(operands=operands, output=output, has_bias=bool(bias))
        return self.add(op, x, y, *bias, shape=[extents[c] for c in output], out=out)

    def gather(self, x: Value, places: Value, dim: int, *, out: Value | None = None) -> Value:
        """Write elements at places along one dim."""
        return self.add(ops.Gather(dim=dim), x, places, shape=places.shape, out=out)

    # -- unknown operators

    def opaque(
        self,
        *inputs: Value,
        passes: Sequence[tuple[int, int]] | None = None,
        over: Iterable[int] | None = None,
        flop_per_point: float = 1.0,
    ) -> None:
        """Append a step of which only the shapes are known, with all results.

        Args:
            inputs: Its inputs; default: all tensors, those with a gradient first.
            passes: Pairs (dim of the first input, dim of the results) that pass through unchanged.
            over: Instead of passes, dims of the first input along which it works: the others pass through in place.
                Without either, the leading dim passes through if all results have it.
            flop_per_point: FLOP for each element of the first result.
        """
        inputs = inputs or floats_first(self.tensors)
        first = inputs[0].shape if inputs else ()
        floats = [value.shape for value in self.results if value.is_float]
        if over is not None:
            within = {dim % max(1, len(first)) for dim in over}
            shapes = floats or [value.shape for value in self.results]
            passes = [
                (i, i)
                for i, extent in enumerate(first)
                if i not in within and all(len(shape) > i and shape[i] == extent for shape in shapes)
            ]
        elif passes is None:
            passes = [(0, 0)] if first and floats and all(shape[:1] == first[:1] for shape in floats) else []
        self.give(ops.Generic(passes=tuple(passes), flop_per_point=flop_per_point, is_index=not floats), *inputs)

    def unread(self, values: Iterable[Value]) -> None:
        """Append results without inputs: indices of maxima, statistics and others that carry no gradient."""
        for value in values:
            self.write(ops.Generic(is_index=True), (), (value,))

    # -- several steps

    def rearrange(self, x: Value, apart: Sequence[int], order: Sequence[int], *, out: Value) -> Value:
        """Write a tensor seen in a shape, its dims in another order, in the shape of a result."""
        return self.reshape(self.transpose(self.reshape(x, apart), order), out=out)

    def repeat(self, x: Value, times: Sequence[int], *, out: Value) -> Value:
        """Append a tiling: a dim [n] repeated r times is [r, n] merged."""
        more = len(times) - len(x.shape)
        wide = [extent for pair in zip(times, (1,) * more + x.shape, strict=True) for extent in pair]
        places = [2 * (more + i) + 1 for i in range(len(x.shape))]
        return self.reshape(self.broadcast(x, wide, places), out=out)

    def total(self, x: Value, *, out: Value | None = None, name: str = "") -> Value:
        """Write the sum of all elements."""
        op = ops.Reduce(function="sum", over=tuple(range(len(x.shape)))) if x.shape else ops.Identity()
        return self.add(op, x, out=out, name=name)

    def matmul(self, x: Value, y: Value, *, out: Value | None = None) -> Value:
        """Write a product as NumPy's matmul has it; batch dims that only one operand has are read again and again."""
        ranks = len(x.shape), len(y.shape)
        if 0 in ranks:
            raise ValueError("a product needs matrices")
        lead = letters(max(*ranks, 2) - 2, without="kmn")
        left = "k" if ranks[0] == 1 else lead[len(lead) - (ranks[0] - 2) :] + "mk"
        right = "k" if ranks[1] == 1 else lead[len(lead) - (ranks[1] - 2) :] + "kn"
        output = lead + ("m" if ranks[0] > 1 else "") + ("n" if ranks[1] > 1 else "")
        return self.product((x, y), (left, right), output, out=out)

    def product(
        self, tensors: Sequence[Value], operands: Sequence[str], output: str, *, out: Value | None = None
    ) -> Value:
        """Append the einsum of two tensors.

        Dims of extent 1 that are larger in the other are squeezed; dims that only one tensor has are summed first.
        """
        extents = _extents(tensors, operands)
        found, told = list[Value](), list[str]()
        for x, own, other in zip(tensors, operands, operands[::-1], strict=True):
            alone = [i for i, c in enumerate(own) if c not in output and c not in other]
            if alone:
                x = self.reduce("sum", x, alone)
                own = "".join(c for i, c in enumerate(own) if i not in alone)
            kept = [i for i, c in enumerate(own) if x.shape[i] == extents[c] or c not in other]
            found.append(self.reshape(x, [x.shape[i] for i in kept]))
            told.append("".join(own[i] for i in kept))
        if not set(told[0] + told[1]) <= set(output):
            return self.contract(found[0], found[1], (told[0], told[1]), output, out=out)
        # Without a reduction both are broadcast to the dims of the result.
        wide = []
        for x, own in zip(found, told, strict=True):
            turned = self.transpose(x, [own.index(c) for c in output if c in own])
            lengths = dict(zip(own, x.shape, strict=True))
            wide.append(self.reshape(turned, [lengths.get(c, 1) for c in output]))
        return self.point("multiply", *wide, out=out)

    def einsum(self, equation: str, tensors: Sequence[Value], *, out: Value) -> bool:
        """Append a sum of products of tensors, two at a time from the left.

        Returns:
            Whether the equation is supported: diagonals are not, nor letters that do not fit; nothing is appended then.
        """
        parsed = parse_einsum(equation, tensors)
        if parsed is None:
            return False
        operands, output = parsed
        if len(tensors) == 1:
            over = [i for i, c in enumerate(operands[0]) if c not in output]
            left = [c for c in operands[0] if c in output]
            x = self.reduce("sum", tensors[0], over) if over else tensors[0]
            self.transpose(x, [left.index(c) for c in output], out=out)
            return True
        while len(tensors) > 2:
            rest = set("".join(operands[2:]) + output)
            kept = "".join(c for c in dict.fromkeys(operands[0] + operands[1]) if c in rest)
            made = self.product(tensors[:2], operands[:2], kept)
            tensors, operands = [made, *tensors[2:]], [kept, *operands[2:]]
        self.product(tensors, operands, output, out=out)
        return True


def broadcast_shape(values: Sequence[Value]) -> Shape:
    """Return the shape that tensors broadcast to, as in NumPy; ValueError where they do not."""
    rank = max((len(value.shape) for value in values), default=0)
    aligned = [(1,) * (rank - len(value.shape)) + value.shape for value in values]
    found = [{*extents} - {1} for extents in zip(*aligned, strict=True)]
    if any(len(extents) > 1 for extents in found):
        raise ValueError(f"shapes {', '.join(str(list(value.shape)) for value in values)} cannot be broadcast")
    return tuple(next(iter(extents), 1) for extents in found)


def _extents(tensors: Sequence[Value], operands: Sequence[str]) -> dict[str, int]:
    """Return the extent of every letter: a dim of one element is repeated to the other's; ValueError for others."""
    found: dict[str, int] = {}
    for value, operand in zip(tensors, operands, strict=True):
        for letter, extent in zip(operand, value.shape, strict=True):
            known = found.get(letter, 1)
            if 1 not in (known, extent) and known != extent:
                raise ValueError(f"a product meets dims of {known} and {extent} elements")
            found[letter] = known if extent == 1 else extent
    return found


def parse_einsum(equation: str, tensors: Sequence[Value]) -> tuple[list[str], str] | None:
    """Return the letters of each tensor's dims and of the result's; None for unsupported equations."""
    inputs, arrow, output = equation.replace(" ", "").partition("->")
    operands = inputs.split(",")
    bare = [operand.replace("...", "") for operand in operands]
    if len(operands) != len(tensors) or "." in "".join(bare):
        return None
    if not arrow:
        every = "".join(bare)
        output = ("..." if "..." in inputs else "") + "".join(sorted(c for c in set(every) if every.count(c) == 1))
    widths = [len(value.shape) - len(own) for value, own in zip(tensors, bare, strict=True)]
    width = max((w for w, operand in zip(widths, operands, strict=True) if "..." in operand), default=0)
    if any(w < 0 or (w and "..." not in operand) for w, operand in zip(widths, operands, strict=True)):
        return None
    spare = letters(width, without=equation)
    full = [operand.replace("...", spare[width - w :]) for operand, w in zip(operands, widths, strict=True)]
    output = output.replace("...", spare)
    if any(len(set(term)) != len(term) for term in (*full, output)) or not set(output) <= set("".join(full)):
        return None
    return full, output


Translation = Callable[[Any], object]
"""Appends the steps of a call; its result is ignored."""


Entry = TypeVar("Entry")


def table(*families: tuple[Entry, str]) -> dict[str, Entry]:
    """Return entries by the names of operators, words of a text; a star represents each of 1, 2 and 3."""
    words = ((found, name) for found, names in families for name in names.split())
    return {name.replace("*", number): found for found, name in words for number in ("123" if "*" in name else "1")}
