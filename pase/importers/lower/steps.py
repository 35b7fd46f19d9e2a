"""Steps of bodies for each operation of the intermediate representation, on tensors with named dims.

`with_own_dims` rewrites a body so that groups of source dims which always occur together become the operator's own
dims, of which each device keeps its part: nothing is gathered just to be divided and merged again.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from itertools import count
from math import prod, sqrt
from types import MappingProxyType
from typing import Any

from pase.graph.body import MASKED, Body, Operand, Step
from pase.graph.functions import POINTWISE, REDUCTIONS, Option
from pase.importers.ir import ops
from pase.importers.ir.trace import Node
from pase.importers.lower.builder import (
    Atom,
    Axes,
    Axis,
    BodyBuilder,
    NoBodyError,
    TensorRef,
    broadcast_axes,
    flat,
    grouped,
    names,
    result_axes,
    size,
)

Compute = Callable[[BodyBuilder, Any, Node, Sequence[TensorRef]], TensorRef]
"""Writes the steps of an operator that a node is, given its inputs; returns its first output."""

_OF_TRUTHS: Mapping[str, str] = MappingProxyType(
    {"and": "multiply", "not": "equal", "or": "maximum", "xor": "not_equal"}
)
"""Functions of truth values, and their equivalents for 0 and 1; "not" compares with 0."""

_SAME: Mapping[str, str] = MappingProxyType({"exponential": "exp", "hard_silu": "hard_swish", "hard_tanh": "clip"})
"""Functions with other names in graphs than in bodies."""


def pointwise(sheet: BodyBuilder, op: ops.Pointwise, node: Node, inputs: Sequence[TensorRef]) -> TensorRef:
    """An elementwise function; further functions are applied to its result only."""
    shape = node.outputs[0].shape
    axes = result_axes(sheet, inputs, shape)
    if all(known.axes is None for known in inputs):
        raise NoBodyError("it is computed of constants alone")
    knowns = [sheet.laid(known, axes) for known in inputs]
    operands: list[Operand] = [known.operand for known in knowns]
    if op.constant is not None and op.functions == ("where",) and op.constant_first:
        # After the number that distinguishes them.
        operands = [operands[0], op.constant, *operands[1:]]
    elif op.constant is not None and len(op.functions) == 1:
        operands = [op.constant, *operands] if op.constant_first else [*operands, op.constant]
    first, *others = op.functions or ("identity",)
    if first in _OF_TRUTHS and node.outputs[0].dtype == "bool" and not others:
        first, operands = _OF_TRUTHS[first], [*operands, *([0.0] if first == "not" else [])]
    if first == "where" and not others and len(operands) == 3 and isinstance(operands[0], float):
        # Choices by data that programs do not have as input are not distinguished.
        return replace(knowns[1 if operands[0] else 2], shape=shape, axes=axes)
    name = sheet.step(_function(first), _operands(first, operands, op.numbers))
    for function in others:
        name = sheet.step(_function(function), _operands(function, [name], ()))
    return TensorRef(operand=name, shape=shape, axes=axes)


def _function(function: str) -> str:
    name = _SAME.get(function, function)
    if name not in POINTWISE:
        raise NoBodyError(f"function {function!r} is not known")
    return name


def _operands(function: str, operands: Sequence[Operand], numbers: Sequence[float]) -> list[Operand]:
    found = [*operands, *numbers]
    fewest, most = POINTWISE[_function(function)].operands
    if not fewest <= len(found) <= most:
        raise NoBodyError(f"function {function!r} has {len(found)} operands that are known; expected {fewest}")
    return found


def reduce(sheet: BodyBuilder, op: ops.Reduce, node: Node, inputs: Sequence[TensorRef]) -> TensorRef:
    """A mean, a sum, a maximum or a minimum."""
    x = _tensor(inputs[0])
    over = [axis for i, axis in enumerate(x.dims) if i in op.over]
    # PyTorch's variance divides by one point less by default.
    name = _reduced(sheet, op.function, x.operand, over, is_exact=not node.origin.operator.startswith("aten."))
    kept = tuple(() if i in op.over else axis for i, axis in enumerate(x.dims) if op.keeps_dims or i not in op.over)
    return TensorRef(operand=name, shape=node.outputs[0].shape, axes=kept)


def _reduced(sheet: BodyBuilder, function: str, x: Operand, over: Sequence[Axis], *, is_exact: bool = True) -> str:
    if any(not atom.name for axis in over for atom in axis):
        raise NoBodyError("a dim that is reduced is not told")
    dims = names(flat(tuple(over)))
    if function == "variance" and not is_exact:
        raise NoBodyError("by how many points a variance is divided is not told")
    if function == "variance":
        centred = sheet.step("subtract", [x, sheet.step("mean", [x], dims)])
        return sheet.step("mean", [sheet.step("square", [centred])], dims)
    if function not in REDUCTIONS:
        raise NoBodyError(f"reduction {function!r} is not known")
    return sheet.step(function, [x], dims)


def softmax(sheet: BodyBuilder, op: ops.Softmax, node: Node, inputs: Sequence[TensorRef]) -> TensorRef:
    """A softmax or its logarithm."""
    x = _tensor(inputs[0])
    name = _softmax(sheet, x.operand, x.dims[op.dim], is_log=op.is_log)
    return TensorRef(operand=name, shape=x.shape, axes=x.dims)


def _softmax(sheet: BodyBuilder, x: Operand, axis: Axis, *, is_log: bool = False) -> str:
    if axis:
        return sheet.step("log_softmax" if is_log else "softmax", [x], _named(axis))
    # Of one point it is 1, whose gradient is 0.
    zero = sheet.step("multiply", [x, 0.0])
    return zero if is_log else sheet.step("add", [zero, 1.0])


def normalise(sheet: BodyBuilder, op: ops.Normalise, node: Node, inputs: Sequence[TensorRef]) -> TensorRef:
    """A normalisation, with running statistics if it has them, otherwise with those of its input."""
    x, *rest = inputs
    x = _tensor(x)
    if op.response is not None:
        return _by_neighbours(sheet, x, op.channels[0], *op.response)
    channels = tuple(x.dims[i] for i in op.channels)
    along = [_along(sheet, known, channels) for known in rest]
    weights, statistics = along[: op.has_scale + op.has_shift], along[op.has_scale + op.has_shift :]
    over = [_within_groups(x.dims[i], op.groups) if i in op.channels else x.dims[i] for i in op.over]
    scale, shift = (weights[0] if op.has_scale else 1.0), (weights[-1] if op.has_shift else 0.0)
    dims = names(flat(tuple(over)))
    if op.num_statistics == 2 and len(statistics) >= 2:
        points = prod(size(axis) for axis in over)
        factor = points / (points - 1) if op.is_unbiased and points > 1 else 1.0
        is_kept = op.momentum and all(isinstance(statistic, str) for statistic in statistics[:2])
        moments = {"momentum": op.momentum, "factor": factor} if is_kept else {}
        operands = [x.operand, scale, shift, *statistics[:2]]
        name = sheet.step("batch_norm", operands, dims, epsilon=float(op.epsilon), **moments)
    elif op.kind == "rms":
        spread = _reduced(sheet, "mean", sheet.step("square", [x.operand]), over)
        root = sheet.step("rsqrt", [sheet.step("add", [spread, op.epsilon])])
        name = sheet.step("multiply", [x.operand, root])
        name = sheet.step("multiply", [name, scale]) if op.has_scale else name
        name = sheet.step("add", [name, shift]) if op.has_shift else name
    else:
        name = sheet.step("normalise", [x.operand, scale, shift], dims, epsilon=float(op.epsilon))
    return TensorRef(operand=name, shape=x.shape, axes=x.dims)


def _by_neighbours(
    sheet: BodyBuilder, x: TensorRef, place: int, count: int, alpha: float, beta: float, bias: float
) -> TensorRef:
    """Return each point divided by a power of the mean square of its neighbours along a dim, with zero padding."""
    extent = x.shape[place]
    before, after = min((count - 1) // 2, extent - 1), min(count // 2, extent - 1)
    squares = sheet.single(replace(x, operand=sheet.step("square", [x.operand])), place)
    parts = [sheet.cut(squares, place, 0, size) for size in (before, after) if size]
    zeros = [replace(part, operand=sheet.step("multiply", [part.operand, 0.0])) for part in parts]
    padded = sheet.joined([*zeros[: bool(before)], squares, *zeros[bool(before) :]], place) if zeros else squares
    dims = names((*padded.dims[place], *squares.dims[place]))
    near = [sheet.step("cut", [padded.operand], dims, start=start, step=1) for start in range(before + after + 1)]
    total = sheet.laid(replace(squares, operand=sheet.step("add", near) if zeros else squares.operand), x.dims)
    scaled = sheet.step("add", [sheet.step("multiply", [total.operand, alpha / count]), bias])
    made = sheet.step("divide", [x.operand, sheet.step("power", [scaled, beta])])
    return TensorRef(operand=made, shape=x.shape, axes=x.dims)


def _within_groups(channels: Axis, groups: int) -> Axis:
    """Return the dims of the channels of a group."""
    if groups == 1:
        return channels
    found = grouped(channels, (groups, size(channels) // groups))
    if found is None:
        raise NoBodyError("the groups of its channels are none of its iteration space")
    return found[1]


def _along(sheet: BodyBuilder, known: TensorRef, channels: Axes) -> Operand:
    """Return a weight or a statistic of the channels."""
    if known.source is None:
        return known.operand
    squeezed = tuple(extent for extent in known.shape if extent > 1)
    return sheet.constant(
        TensorRef(operand="", shape=squeezed, source=known.source), tuple(a for a in channels if a)
    ).operand


def contract(sheet: BodyBuilder, op: ops.Contract, node: Node, inputs: Sequence[TensorRef]) -> TensorRef:
    """A product, and the bias that is added to it."""
    if op.has_ends:
        return _grouped_product(sheet, op, node, inputs)
    x, y = _tensor(inputs[0]), _tensor(inputs[1])
    made = _product(sheet, (x, y), op.operands, op.output)
    if op.has_bias:
        bias = sheet.laid(inputs[2], made.dims)
        made = TensorRef(operand=sheet.step("add", [made.operand, bias.operand]), shape=made.shape, axes=made.dims)
    return made


def _grouped_product(sheet: BodyBuilder, op: ops.Contract, node: Node, inputs: Sequence[TensorRef]) -> TensorRef:
    """Rows, each multiplied with the matrix of its group, given the end of each group."""
    ends = _tensor(inputs[2])
    knowns = [_tensor(known) for known in inputs[:2]]
    found = _together(sheet, knowns, op.operands)
    letters = tuple(dict.fromkeys(op.operands[0] + op.operands[1]))
    if len(op.output) != 3 or len(letters) != 4 or any(len(found[letter]) > 1 for letter in letters):
        raise NoBodyError("rows of groups are of several dims")
    told = {letter: found[letter] or (sheet.dim(1),) for letter in letters}
    order = (*op.output, *(letter for letter in letters if letter not in op.output))
    x, w = (
        sheet.laid(known, tuple(found[letter] for letter in own))
        for known, own in zip(knowns, op.operands, strict=True)
    )
    sheet.bound = sheet.bound or "groups are of as many rows as are routed to them"
    name = sheet.step("grouped", [x.operand, w.operand, ends.operand], [told[letter][0].name for letter in order])
    axes = tuple(found[letter] for letter in op.output)
    return TensorRef(operand=name, shape=node.outputs[0].shape, axes=axes)


def _together(sheet: BodyBuilder, tensors: Sequence[TensorRef], operands: Sequence[str]) -> dict[str, Axis]:
    """Return the dims for each letter of some tensors' dims."""
    found: dict[str, Axis] = {}
    for known, letters in zip(tensors, operands, strict=True):
        for letter, axis in zip(letters, known.dims, strict=True):
            found[letter] = sheet.together(found.get(letter, axis), axis)
    return found


def _product(sheet: BodyBuilder, operands: Sequence[TensorRef], letters: Sequence[str], output: str) -> TensorRef:
    found = _together(sheet, operands, letters)
    operands = [
        sheet.laid(known, tuple(found[letter] for letter in own)) for known, own in zip(operands, letters, strict=True)
    ]
    axes = tuple(found[letter] for letter in output)
    summed = [found[letter] for letter in found if letter not in output]
    if any(not atom.name for axis in (*axes, *summed) for atom in axis):
        raise NoBodyError("a dim of a product is not told")
    used = [name for axis in (*axes, *summed) for name in names(axis)]
    if len(set(used)) != len(used):
        raise NoBodyError("a product reads one dim twice")
    shape = tuple(prod(atom.extent for atom in axis) for axis in axes)
    name = sheet.step("einsum", [known.operand for known in operands], names(flat(axes)))
    return TensorRef(operand=name, shape=shape, axes=axes)


def attention(sheet: BodyBuilder, op: ops.Attention, node: Node, inputs: Sequence[TensorRef]) -> TensorRef:
    """softmax(q · kᵀ · scale + masks) · v; fewer heads of keys and values are each read by several of the queries."""
    q, k, v, *masks = inputs
    q, k, v = (_tensor(known) for known in (q, k, v))
    scale = 1 / sqrt(q.shape[3]) if op.scale is None else op.scale
    batch, heads, queries, features, keys = axes = (*q.dims, k.dims[2])
    is_plain = k.dims == v.axes == (batch, heads, keys, features) and all(len(axis) == 1 for axis in axes)
    if is_plain and not masks and queries != keys:
        order = _named(flat((batch, heads, queries, keys, features)))
        name = sheet.step("attention", [q.operand, k.operand, v.operand], order, causal=op.is_causal, scale=scale)
        return TensorRef(operand=name, shape=q.shape, axes=q.dims)
    k, v = (_with_heads(known, q.dims[1]) for known in (k, v))
    fused = _masked_attention(sheet, (q, k, v), masks, causal=op.is_causal, scale=scale)
    if fused is not None:
        return fused
    scores = _product(sheet, (q, k), ("bhsk", "bhtk"), "bhst")
    name = sheet.step("multiply", [scores.operand, scale])
    for mask in masks:
        own = sheet.laid(mask, scores.dims)
        broadcast_axes(scores.dims, own.shape)
        is_truth = own.is_truth
        name = sheet.step("where", [own.operand, name, MASKED]) if is_truth else sheet.step("add", [name, own.operand])
    if op.is_causal:
        order = _named(scores.dims[2] + scores.dims[3])
        if len(scores.dims[2]) != 1 or len(scores.dims[3]) != 1:
            raise NoBodyError("queries and keys of a causal attention are more than one dim each")
        name = sheet.step("causal", [name], order)
    name = _softmax(sheet, name, scores.dims[3])
    weights = TensorRef(operand=name, shape=scores.shape, axes=scores.dims)
    return _product(sheet, (weights, v), ("bhst", "bhte"), "bhse")


def _masked_attention(
    sheet: BodyBuilder, tensors: Sequence[TensorRef], masks: Sequence[TensorRef], *, causal: bool, scale: float
) -> TensorRef | None:
    """Return attention as one step; None where its queries, its keys or its features are not one dim each."""
    operands = ("bhsk", "bhtk", "bhte")
    found = _together(sheet, tensors, operands)
    used = names(flat(tuple(found[letter] for letter in "bhstk")))
    is_named = all(atom.name for axis in found.values() for atom in axis)
    if not is_named or any(len(found[letter]) != 1 for letter in "stke") or len({*used}) < len(used):
        return None
    q, k, v = (
        sheet.laid(known, tuple(found[letter] for letter in letters))
        for known, letters in zip(tensors, operands, strict=True)
    )
    scores = tuple(found[letter] for letter in "bhst")
    laid = [sheet.laid(mask, scores) for mask in masks]
    for own in laid:
        broadcast_axes(scores, own.shape)
    truths = [own.operand for own in laid if own.is_truth]
    added = [own.operand for own in laid if not own.is_truth]
    told: dict[str, Option] = {"truths": len(truths)} if truths else {}
    told |= {"causal": True} if causal else {}
    dims = names(flat((*scores, found["e"])))
    given = [q.operand, k.operand, v.operand, *truths, *added]
    name = sheet.step("masked_attention", given, dims, **told, scale=scale)
    axes = (*scores[:3], found["e"])
    return TensorRef(operand=name, shape=tuple(prod(atom.extent for atom in axis) for axis in axes), axes=axes)


def _with_heads(known: TensorRef, heads: Axis) -> TensorRef:
    """Return keys or values with as many heads as the queries have."""
    own = known.dims[1]
    whole = prod(atom.extent for atom in heads)
    if prod(atom.extent for atom in own) == whole:
        return known
    if names(heads)[: len(names(own))] != names(own):
        raise NoBodyError("the heads of queries and keys do not align")
    axes = (known.dims[0], heads, *known.dims[2:])
    return TensorRef(operand=known.operand, shape=(known.shape[0], whole, *known.shape[2:]), axes=axes)


def moved(sheet: BodyBuilder, op: ops.Op, node: Node, inputs: Sequence[TensorRef]) -> TensorRef:
    """Return data moved along dims that are unsplit on every device."""
    x, *rest = inputs
    shape = node.outputs[0].shape
    match op:
        case ops.Concat(dim=place):
            return sheet.joined([_joinable(sheet, known, inputs, place) for known in inputs], place)
        case ops.Lookup():
            return _rows(sheet, _tensor(x), rest[0])
    if isinstance(x.operand, float):
        return x
    x = _tensor(x)
    match op:
        case ops.Reshape():
            return sheet.grouped(x, shape)
        case ops.Transpose(order=order):
            return replace(x, shape=shape, axes=tuple(x.dims[i] for i in order))
        case ops.Broadcast(places=places):
            axes: list[Axis] = [() if extent == 1 else (Atom("", extent),) for extent in shape]
            for own, place in zip(x.dims, places, strict=True):
                axes[place] = own or axes[place]
            return replace(x, shape=shape, axes=tuple(axes))
        case ops.Slice(starts=starts, steps=steps):
            before = x.shape
            for place, (start, extent, step) in enumerate(zip(starts, shape, steps, strict=True)):
                if step < 1:
                    raise NoBodyError("a tensor is read backwards")
                if extent != before[place]:
                    x = sheet.cut(x, place, start, extent, step)
            return x
    raise NoBodyError(f"{type(op).__name__.lower()} within a layer cannot be written yet")


def _joinable(sheet: BodyBuilder, known: TensorRef, all_of_them: Sequence[TensorRef], place: int) -> TensorRef:
    """Return an input of a concatenation; constants get the dims of the others."""
    if known.source is None:
        if isinstance(known.operand, float):
            raise NoBodyError("numbers are joined to a tensor within the layer")
        return known
    axes = next((other.axes for other in all_of_them if other.axes is not None), None)
    if axes is None or len(axes) != len(known.shape):
        raise NoBodyError("constants are joined within the layer")
    return sheet.constant(known, (*axes[:place], (sheet.dim(known.shape[place]),), *axes[place + 1 :]))


def _rows(sheet: BodyBuilder, table: TensorRef, places: TensorRef) -> TensorRef:
    """Return rows of a table by indices that depend on no input."""
    table = sheet.single(table, 0)
    if places.source is not None:
        places = sheet.constant(places, tuple((sheet.dim(e),) if e > 1 else () for e in places.shape))
    if isinstance(places.operand, float) or places.axes is None:
        raise NoBodyError("one row is looked up by its number")
    name = sheet.step("rows", [table.operand, places.operand], [table.dims[0][0].name])
    return TensorRef(operand=name, shape=(*places.shape, *table.shape[1:]), axes=(*places.axes, *table.dims[1:]))


def _tensor(known: TensorRef) -> TensorRef:
    if known.axes is None or isinstance(known.operand, float):
        raise NoBodyError("a constant takes the place of a tensor")
    return known


def _named(axis: Axis) -> tuple[str, ...]:
    if any(not atom.name for atom in axis):
        raise NoBodyError("a dim is not told")
    return names(axis)


COMPUTE: Mapping[type[ops.Op], Compute] = MappingProxyType(
    {
        ops.Attention: attention,
        ops.Contract: contract,
        ops.Normalise: normalise,
        ops.Pointwise: pointwise,
        ops.Reduce: reduce,
        ops.Softmax: softmax,
        **dict.fromkeys((ops.Broadcast, ops.Concat, ops.Lookup, ops.Pad, ops.Reshape, ops.Slice, ops.Transpose), moved),
    }
)
"""Operators whose steps need only the dims of their inputs."""


Dims = tuple[str, ...]

_OF_ANY_DIMS = frozenset({"einsum", "log_softmax", "normalise", "repeat", "softmax", *REDUCTIONS})
"""Functions over as many dims as there are."""

_LISTED = frozenset({"einsum", "repeat"})
"""Functions whose results have the dims that they list, no others."""


_ATTENTION = "masked_attention"
"""Function whose last dims are identified by position: the queries, the keys and the features."""


class _TakenApartError(Exception):
    """Dims that represent operator dims are used partially, or together with what they represent."""

    def __init__(self, own: Dims) -> None:
        super().__init__()
        self.own = own


def with_own_dims(body: Body, dims: Sequence[str], reads: Mapping[str, Set[str]]) -> Body:
    """Return a body without steps that gather an operator's dims and divide them, as far as they stay together.

    Args:
        body: Body of the operator.
        dims: Names of the operator's iteration dims.
        reads: Dims of each tensor that the operator reads.

    Raises:
        NoBodyError: The next attempt would have no fewer dims, so that it would fail in the same way.
    """
    candidates = frozenset(dims)
    while candidates:
        try:
            return _Rewriting(body=body, own=candidates, dims=dict(reads)).rewritten()
        except _TakenApartError as error:
            if candidates.isdisjoint(error.own):
                raise NoBodyError(f"{list(error.own)} of its dims {list(dims)} are taken apart") from None
            candidates -= {*error.own}
    return body


@dataclass(slots=True)
class _Rewriting:
    """Rewrites a body in the operator's dims.

    Attributes:
        own: Dims that replace others.
        dims: Source dims of each tensor.
        groups: Consecutive source dims, and the dims that they represent.
        renamed: Source dims that equal others, by those.
        names: Renamed tensors.
    """

    body: Body
    own: frozenset[str]
    dims: dict[str, Set[str]]
    groups: dict[Dims, Dims] = field(default_factory=dict)
    renamed: dict[str, str] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)

    def rewritten(self) -> Body:
        """Return the body; _TakenApartError where others cannot replace some of the dims."""
        self._find_groups()
        if not self.groups:
            return self.body
        self.dims |= {item.name: {*item.dims} for item in self.body.constants}
        inner = {dim.name for dim in self.body.inner if dim.tensor}
        self._check_none([*inner, *(dim for output in self.body.outputs for dim in output.dims)])
        steps = self._of_constants()
        for step in self.body.steps:
            self._check_apart(step)
            steps += self._step(step)
        last = self.body.steps[-1].result
        if not steps or steps[-1].result != self.names.get(last, last):
            return self.body
        others = tuple(self.names.get(name, name) for name in self.body.others)
        named = {name for step in steps for name in step.dims}
        named |= {name for item in self.body.constants for name in item.dims}
        gone = {name for group in self.groups for name in group} - named
        kept = tuple(dim for dim in self.body.inner if dim.name not in gone | {*self.renamed} - named)
        return replace(self.body, steps=tuple(steps), inner=kept, others=others)

    def _find_groups(self) -> None:
        inner = {dim.name for dim in self.body.inner if not dim.tensor}
        for step in self.body.steps:
            if step.function not in ("view", "whole"):
                continue
            before, after = self._sides(step)
            if step.function == "whole":
                if len(before) == len(after) and self.own.issuperset(before):
                    self.groups |= {(other,): (dim,) for dim, other in zip(before, after, strict=True)}
                continue
            own = self._known(before)
            # Dims of extent 1 that a step adds represent none of the operator's.
            if own == after or before == after or not before:
                continue
            if own is not None:
                if not self.own.isdisjoint(after) or self.groups.setdefault(after, own) != own:
                    raise _TakenApartError(own)
            elif len(before) == len(after) == 1 and inner.issuperset((*before, *after)):
                within = {name for group in self.groups for name in group}
                if before[0] in within and after[0] not in within:
                    self.renamed[after[0]] = before[0]
                elif before[0] in within:
                    # Both belong to groups: the same position in equal groups.
                    one, other = (next(g for g in self.groups if name in g) for name in (before[0], after[0]))
                    is_same = one != other and self.groups[one] == self.groups[other]
                    if is_same and one.index(before[0]) == other.index(after[0]):
                        self._unite(one, other)

    def _unite(self, one: Dims, other: Dims) -> None:
        self.renamed |= dict(zip(other, one, strict=True))
        del self.groups[other]

    def _first(self, name: str) -> str:
        while name in self.renamed:
            name = self.renamed[name]
        return name

    def _sides(self, step: Step) -> tuple[Dims, Dims]:
        """Return the dims that a step replaces, and those that it has instead."""
        number = step.option("replaced", 0)
        dims = tuple(map(self._first, step.dims))
        return dims[:number], dims[number:]

    def _known(self, dims: Dims) -> Dims | None:
        """Return the dims that dims represent; None where they are not consecutive groups."""
        found: list[str] = []
        while dims:
            group = next((dims[:i] for i in range(1, len(dims) + 1) if dims[:i] in self.groups), None)
            if group is None:
                return None
            found += self.groups[group]
            dims = dims[len(group) :]
        return tuple(found)

    def _named(self, dims: Dims) -> Dims:
        """Return dims with groups replaced by what they represent."""
        found: list[str] = []
        while dims:
            group = next((dims[:i] for i in range(len(dims), 0, -1) if dims[:i] in self.groups), None)
            if group is None:
                self._check_none(dims[:1])
            found += self.groups[group] if group else dims[:1]
            dims = dims[len(group or dims[:1]) :]
        return tuple(found)

    def _check_none(self, dims: Sequence[str]) -> None:
        for group, own in self.groups.items():
            if not {*group}.isdisjoint(map(self._first, dims)):
                raise _TakenApartError(own)

    def _check_apart(self, step: Step) -> None:
        """Raise _TakenApartError where two dims of a step represent the same one; record the dims of its result."""
        listed = {*step.dims}
        present = {name for operand in step.operands for name in self.dims.get(str(operand), ())}
        if step.function in ("view", "whole"):
            number = step.option("replaced", 0)
            present = made = (present - {*step.dims[:number]}) | {*step.dims[number:]}
        else:
            present = present | listed
            made = listed if step.function in _LISTED else present - (listed if step.function in REDUCTIONS else set())
            made = listed - {step.dims[-2]} if step.function == _ATTENTION else made
        self.dims[step.result] = made
        found = Counter(present & self.own)
        for group, own in self.groups.items():
            names = [name for name in present if self._first(name) in group]
            # Another name of a dim is another dim here.
            if len({*map(self._first, names)}) < len(names):
                raise _TakenApartError(own)
            found.update(own if names else ())
        twice = tuple(name for name, times in found.items() if times > 1)
        if twice:
            raise _TakenApartError(twice)

    def _of_constants(self) -> list[Step]:
        """Return the steps by which devices have their parts of constants, of which each one holds all."""
        steps: list[Step] = []
        taken = {*self.dims, *(step.result for step in self.body.steps)}
        for item in self.body.constants:
            given = {self._first(dim): dim for dim in item.dims}
            own = [
                (tuple(given.get(dim, dim) for dim in group), dims)
                for group, dims in self.groups.items()
                if not given.keys().isdisjoint(group)
            ]
            name = item.name
            lacking = tuple(dim for group, _ in own for dim in group if dim not in item.dims)
            made = [Step(result="", function="repeat", dims=(*lacking, *item.dims))] if lacking else []
            made += [
                Step(result="", function="view", dims=(*group, *dims), options=(("replaced", len(group)),))
                for group, dims in own
            ]
            for step in made:
                result = next(found for i in count(1) if (found := f"{item.name}_{i}") not in taken)
                taken.add(result)
                steps.append(replace(step, result=result, operands=(name,)))
                name = result
            self.names[item.name] = name
        return steps

    def _step(self, step: Step) -> list[Step]:
        """Return a step in the operator's dims; nothing where it has become redundant."""
        operands = tuple(self.names.get(own, own) if isinstance(own, str) else own for own in step.operands)
        if step.function in ("view", "whole"):
            before, after = self._sides(step)
            own = before if step.function == "whole" or before == after else self._named(before)
            made = after if before == after else self._named(after)
            if own == made:
                self.names[step.result] = str(operands[0])
                return []
            options: tuple[tuple[str, Option], ...] = (("replaced", len(own)),)
            return [replace(step, operands=operands, dims=(*own, *made), options=options)]
        if step.function in _OF_ANY_DIMS:
            return [replace(step, operands=operands, dims=self._named(tuple(map(self._first, step.dims))))]
        if step.function == _ATTENTION:
            dims = tuple(map(self._first, step.dims))
            last = [self._named((dim,)) for dim in dims[-3:]]
            if all(len(own) == 1 for own in last):
                return [replace(step, operands=operands, dims=(*self._named(dims[:-3]), *(own for (own,) in last)))]
        layouts = step.option("layouts", "")
        named = [dim.name for dim in self.body.inner if f'"{dim.name}"' in layouts]
        self._check_none([*step.dims, *named])
        return [replace(step, operands=operands)]
