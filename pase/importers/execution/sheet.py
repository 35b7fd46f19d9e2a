"""`BodyBuilder`: the steps of a body while they are written, and the iteration dims that make up each tensor's dims."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from math import prod

from pase.graph import Access, Operator, SliceOf, Window
from pase.graph.body import Constant, Operand, Option, Step
from pase.importers.ir import Use, View


@dataclass(frozen=True, slots=True)
class Atom:
    """An iteration dim, or points that are all alike where it has no name."""

    name: str
    extent: int


Axis = tuple[Atom, ...]
"""The atoms of one dim, row-major; none of extent 1."""

Axes = tuple[Axis, ...]


def atoms_of(operator: Operator, access: Access) -> Axis | None:
    """Return the atoms of a tensor in row-major order; None where a dim of it is none of the iteration space.

    A window is one atom, of the name of its outputs with a mark.
    """
    found: list[Atom] = []
    for axis, extent in zip(access.index_map, access.shape, strict=True):
        match axis:
            case str():
                found.append(Atom(axis, extent))
            case tuple():
                found += [Atom(name, operator.extents[name]) for name in axis]
            case Window():
                found.append(Atom(f"{axis.out}~", extent))
            case SliceOf():
                return None
            case None:
                if extent > 1:
                    return None
    return _larger(found)


def grouped(atoms: Axis, shape: Sequence[int]) -> Axes | None:
    """Return atoms, row-major, as the dims of a shape; None where a dim would cut one."""
    rest = list(_larger(atoms))
    axes: list[Axis] = []
    for extent in shape:
        own: list[Atom] = []
        size = 1
        while size < extent:
            if not rest or extent % (size * rest[0].extent):
                return None
            own.append(rest.pop(0))
            size *= own[-1].extent
        axes.append(tuple(own))
    return None if rest else tuple(axes)


def flat(axes: Axes) -> Axis:
    """Return the atoms of all dims, row-major."""
    return tuple(atom for axis in axes for atom in axis)


def through(view: View, atoms: Axis) -> Axes | None:
    """Return the dims of a view of a tensor with these atoms; None where the view cuts one."""
    factors = grouped(atoms, view.factors)
    if factors is None:
        return None
    return tuple(
        tuple(
            atom
            for factor in dim
            for atom in (factors[factor.base] if factor.base is not None else (Atom("", factor.extent),))
        )
        for dim in view.dims
    )


def behind(view: View, axes: Axes) -> Axis | None:
    """Return the atoms of the tensor behind a view that has these dims; None where they cut a factor."""
    found: dict[int, Axis] = {}
    for dim, axis in zip(view.dims, axes, strict=True):
        own = grouped(axis, [factor.extent for factor in dim])
        if own is None:
            return None
        found |= {factor.base: part for factor, part in zip(dim, own, strict=True) if factor.base is not None}
    return tuple(atom for _, part in sorted(found.items()) for atom in part)


def merged(first: Axis, second: Axis) -> Axis | None:
    """Return what two dims of one extent are together: a name wherever one has it; None where the names differ."""
    one, other = list(first), list(second)
    found: list[Atom] = []
    while one and other:
        a, b = one.pop(0), other.pop(0)
        if a.extent == b.extent and (a.name == b.name or not b.name or not a.name):
            found.append(a if a.name else b)
        elif not a.name and a.extent % b.extent == 0:
            found.append(b)
            one.insert(0, Atom("", a.extent // b.extent))
        elif not b.name and b.extent % a.extent == 0:
            found.append(a)
            other.insert(0, Atom("", b.extent // a.extent))
        else:
            return None
    return tuple(found) if not one and not other else None


def size(axis: Axis) -> int:
    """Return the extent of a dim."""
    return prod(atom.extent for atom in axis)


def names(atoms: Iterable[Atom]) -> tuple[str, ...]:
    """Return the names of atoms that have one."""
    return tuple(atom.name for atom in atoms if atom.name)


def _larger(atoms: Iterable[Atom]) -> Axis:
    return tuple(atom for atom in atoms if atom.extent > 1)


class NoBodyError(Exception):
    """What is computed cannot be told as steps; the text says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorRef:
    """A tensor, or a number: by what operand it is read, and the atoms of each of its dims.

    source: of a constant, what it is of the source; its dims are not known before it meets a tensor. is_truth: it holds
    truth values (a mask that says what is kept), not numbers.
    """

    operand: Operand
    shape: tuple[int, ...]
    axes: Axes | None = None
    source: Use | None = None
    is_truth: bool = False


@dataclass(slots=True)
class BodyBuilder:
    """steps, constants: so far. sources: of the constants, what they are of the source."""

    taken: set[str]
    steps: list[Step] = field(default_factory=list)
    constants: list[Constant] = field(default_factory=list)
    sources: dict[str, Use] = field(default_factory=dict)

    def step(self, function: str, operands: Sequence[Operand], dims: Sequence[str] = (), **options: Option) -> str:
        """Add a step and return the name of what it computes."""
        name = self._new("t")
        numbers = tuple(operand if isinstance(operand, str) else float(operand) for operand in operands)
        self.steps.append(
            Step(result=name, function=function, operands=numbers, dims=tuple(dims), options=tuple(options.items()))
        )
        return name

    def constant(self, known: TensorRef, axes: Axes) -> TensorRef:
        """Return a constant with its dims, those of axes that it is broadcast to (its last ones)."""
        assert known.source is not None
        aligned = broadcast_axes(axes, known.shape)
        if any(not atom.name for atom in flat(aligned)):
            raise NoBodyError("a constant meets a tensor whose dims are not told")
        name = self._new("c")
        self.constants.append(Constant(name=name, dims=names(flat(aligned))))
        self.sources[name] = known.source
        return replace(known, operand=name, axes=aligned, source=None)

    def _new(self, letter: str) -> str:
        number = 1
        while f"{letter}{number}" in self.taken:
            number += 1
        self.taken.add(f"{letter}{number}")
        return f"{letter}{number}"


def broadcast_axes(axes: Axes, shape: Sequence[int]) -> Axes:
    """Return the axes of a tensor that is broadcast to one with such axes, as NumPy does."""
    if len(shape) > len(axes):
        # More dims, of one element each.
        if any(extent != 1 for extent in shape[: len(shape) - len(axes)]):
            raise NoBodyError("a tensor of more dims is broadcast")
        return ((),) * (len(shape) - len(axes)) + broadcast_axes(axes, shape[len(shape) - len(axes) :])
    last = axes[len(axes) - len(shape) :]
    if any(extent != 1 and extent != size(axis) for axis, extent in zip(last, shape, strict=True)):
        raise NoBodyError(f"a tensor of shape {tuple(shape)} cannot be broadcast")
    return tuple(() if extent == 1 else axis for axis, extent in zip(last, shape, strict=True))


def result_axes(knowns: Sequence[TensorRef], shape: Sequence[int]) -> Axes:
    """Return the axes of what point functions of these tensors, broadcast to a shape, give."""
    found: list[Axis] = [() if extent == 1 else (Atom("", extent),) for extent in shape]
    for known in knowns:
        if known.axes is None:
            continue
        offset = len(shape) - len(known.axes)
        for i, axis in enumerate(known.axes):
            if axis and offset + i >= 0:
                both = merged(found[offset + i], axis)
                if both is None:
                    raise NoBodyError("points of different dims meet")
                found[offset + i] = both
    return tuple(found)


def seen(known: TensorRef, use: Use) -> TensorRef:
    """Return a tensor as a use of it reads it."""
    if use.piece is not None or use.seen_as is not None:
        raise NoBodyError("a piece is read within the layer")
    if use.view is None:
        return known
    if known.axes is None:
        assert known.source is not None
        return replace(known, shape=use.view.shape, source=replace(known.source, view=use.view))
    axes = through(use.view, flat(known.axes))
    if axes is None:
        raise NoBodyError("a view cuts a dim")
    return replace(known, shape=use.view.shape, axes=axes)


def as_shape(known: TensorRef, shape: Sequence[int]) -> TensorRef:
    """Return a tensor in another shape of the same elements."""
    assert known.axes is not None
    axes = grouped(flat(known.axes), shape)
    if axes is None:
        raise NoBodyError("a reshape cuts a dim")
    return replace(known, shape=tuple(shape), axes=axes)
