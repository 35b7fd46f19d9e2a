"""`BodyBuilder`: builds the steps of a body, tracking the iteration dims that make up each tensor's dims."""

from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, fields, replace
from math import gcd, prod
from typing import Any

from pase.graph import Access, Operator, SliceOf, Window
from pase.graph.body import Borrowed, Constant, InnerDim, Operand, Step
from pase.graph.functions import Option
from pase.importers.ir.trace import Use
from pase.importers.ir.views import View


@dataclass(frozen=True, slots=True)
class Atom:
    """An iteration dim, or points with equal values if it has no name."""

    name: str
    extent: int


Axis = tuple[Atom, ...]
"""The atoms of one dim, row-major; none of extent 1."""

Axes = tuple[Axis, ...]


def atoms_of(operator: Operator, access: Access) -> Axis | None:
    """Return the atoms of a tensor in row-major order; None where one of its dims is not in the iteration space.

    A window is one atom, named after its outputs with a mark.
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


def behind(view: View, axes: Axes) -> Axis | None:
    """Return the atoms of the tensor behind a view with these dims; None where they divide a factor."""
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
    """The computation cannot be expressed as steps; the text gives the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorRef:
    """A tensor, or a number: its operand, and the atoms of each of its dims.

    Attributes:
        source: For a constant, its use of the source; its dims are unknown until it is combined with a tensor.
        is_given: As in a body's constant.
        dtype: For a constant, the type in which it is computed with, "" for its own.
        is_truth: Whether it has truth values (a boolean mask), not numbers.
    """

    operand: Operand
    shape: tuple[int, ...]
    axes: Axes | None = None
    source: Use | None = None
    is_truth: bool = False
    is_given: bool = False
    dtype: str = ""

    @property
    def dims(self) -> Axes:
        """The atoms of each of its dims, which are known except for constants."""
        assert self.axes is not None, f"the dims of {self.operand!r} are not told yet"
        return self.axes


@dataclass(slots=True)
class BodyBuilder:
    """Builder of a body.

    Attributes:
        steps, constants, inner: Those written so far.
        numbers: Last number used, by the letter of names.
        sources: Uses of the source, by constant.
        untrained: Why the steps differ from those of training, "" if they do not.
        fixed: Iteration dims that are not split, with their extents: data may be moved along these and inner dims.
        is_own: Whether steps of the source's own framework are allowed, which can gather data along any dims.
        bound: Why such steps are required, "" if they are not.
        borrowed, others: As in a body.
    """

    taken: set[str]
    numbers: dict[str, int] = field(default_factory=dict)
    fixed: Mapping[str, int] = field(default_factory=dict)
    steps: list[Step] = field(default_factory=list)
    constants: list[Constant] = field(default_factory=list)
    sources: dict[str, Use] = field(default_factory=dict)
    inner: dict[str, InnerDim] = field(default_factory=dict)
    untrained: str = ""
    is_own: bool = False
    bound: str = ""
    borrowed: dict[str, Borrowed] = field(default_factory=dict)
    others: tuple[str, ...] = ()
    # For results of slicing a dim, that dim.
    _whole: dict[str, Atom] = field(default_factory=dict)

    def step(self, function: str, operands: Sequence[Operand], dims: Sequence[str] = (), **options: Option) -> str:
        """Append a step and return the name of its result."""
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
        dims = names(flat(aligned))
        self.constants.append(Constant(name=name, dims=dims, is_given=known.is_given))
        self.sources[name] = known.source
        if known.dtype:
            name = self.cast(name, known.dtype)
        return replace(known, operand=name, axes=aligned, source=None)

    def cast(self, operand: str, dtype: str) -> str:
        """Return a tensor converted to another number type, once; other results keep their names."""
        for step in self.steps:
            if step.function == "cast" and step.operands == (operand,) and step.option("to", "") == dtype:
                return step.result
        name = self._new("d")
        self.steps.append(Step(result=name, function="cast", operands=(operand,), options=(("to", dtype),)))
        return name

    def borrow(self, value: str, layer: str, output: int, shape: Sequence[int]) -> TensorRef:
        """Return integers that another layer computes and every device holds completely."""
        name = next((name for name, told in self.borrowed.items() if (told.layer, told.output) == (layer, output)), "")
        if not name:
            name = self._new("n")
            self.borrowed[name] = Borrowed(name=name, layer=layer, output=output)
            self.bound = self.bound or f"it reads {value!r}, which another layer computes"
        return self.whole(name, shape)

    def read(self, tensor: str, dims: Sequence[Axis], shape: Sequence[int]) -> TensorRef:
        """Return an input of the operator; dims that no iteration dim indexes are unsplit on every device."""
        axes = tuple(
            tuple(atom for atom in axis if atom.extent > 1)
            or (() if extent == 1 else (self._dim_of(tensor, i, extent),))
            for i, (axis, extent) in enumerate(zip(dims, shape, strict=True))
        )
        return TensorRef(operand=tensor, shape=tuple(shape), axes=axes)

    def from_where_it_is(self, tensor: str, axes: Sequence[Axis | None], shape: Sequence[int]) -> TensorRef:
        """Return an input of the operator with other dims than in its producer's layout; None: all points of a dim."""
        found = tuple(
            (self.dim(extent),) if axis is None and extent > 1 else axis or ()
            for axis, extent in zip(axes, shape, strict=True)
        )
        self.bound = self.bound or f"{tensor!r} is read whole"
        name = self.step("whole", [tensor], names(flat(found)), replaced=0)
        return TensorRef(operand=name, shape=tuple(shape), axes=found)

    def unsplit(self, known: TensorRef, axis: Axis) -> tuple[TensorRef, Axis]:
        """Return a tensor of which every device has all points along some dims, and what has become of these."""
        told = {atom.name: self.dim(atom.extent) for atom in axis if not self.is_whole((atom,)) and atom.name}
        if not told:
            return known, axis
        if not self.is_own or any(name.endswith("~") for name in told):
            raise NoBodyError(f"data are moved along {', '.join(names(axis)) or 'a dim'}, which may be split")
        self.bound = self.bound or f"data are moved along {', '.join(told)}, which may be split"
        dims = (*told, *(atom.name for atom in told.values()))
        name = self.step("whole", [known.operand], dims, replaced=len(told))
        axes = tuple(tuple(told.get(atom.name, atom) for atom in own) for own in known.dims)
        return replace(known, operand=name, axes=axes), tuple(told.get(atom.name, atom) for atom in axis)

    def named(self, known: TensorRef) -> TensorRef:
        """Return a tensor with unnamed atoms replaced by inner dims, along which it is broadcast."""
        if all(atom.name for atom in flat(known.dims)):
            return known
        axes = tuple(tuple(atom if atom.name else self.dim(atom.extent) for atom in axis) for axis in known.dims)
        return replace(known, operand=self.step("repeat", [known.operand], names(flat(axes))), axes=axes)

    def _named_dim(self, known: TensorRef, axis: Axis) -> tuple[TensorRef, Axis]:
        """Return a tensor, and one of its dims, with unnamed atoms replaced by inner dims."""
        if all(atom.name for atom in axis):
            return known, axis
        own = tuple(atom if atom.name else self.dim(atom.extent) for atom in axis)
        dims = dict.fromkeys((*names(flat(known.dims)), *names(own)))
        return replace(known, operand=self.step("repeat", [known.operand], tuple(dims))), own

    def dim(self, extent: int, tensor: str = "", axis: int = 0) -> Atom:
        """Return a new inner dim, optionally that of a weight which every device holds completely."""
        name = self._new("i")
        self.inner[name] = InnerDim(name=name, extent=extent, tensor=tensor, axis=axis)
        return Atom(name, extent)

    def whole(self, tensor: str, shape: Sequence[int]) -> TensorRef:
        """Return a weight that every device holds completely."""
        return self.read(tensor, [()] * len(shape), shape)

    def _dim_of(self, tensor: str, axis: int, extent: int) -> Atom:
        found = (dim.name for dim in self.inner.values() if (dim.tensor, dim.axis) == (tensor, axis))
        name = next(found, None)
        return self.dim(extent, tensor, axis) if name is None else Atom(name, extent)

    def is_whole(self, axis: Axis) -> bool:
        """Whether every device has all points of a dim."""
        return all(atom.name in self.inner or atom.name in self.fixed for atom in axis)

    def is_inner(self, axis: Axis) -> bool:
        """Return whether a dim consists of inner dims only."""
        return bool(axis) and all(atom.name in self.inner for atom in axis)

    def seen(self, known: TensorRef, view: View) -> TensorRef:
        """Return a view of a tensor; unsplit dims may be divided."""
        known = self.grouped(known, view.factors)
        axes = tuple(
            tuple(
                atom
                for factor in dim
                for atom in (known.dims[factor.base] if factor.base is not None else (Atom("", factor.extent),))
            )
            for dim in view.dims
        )
        return replace(known, shape=view.shape, axes=axes)

    def grouped(self, known: TensorRef, shape: Sequence[int]) -> TensorRef:
        """Return a tensor in another shape of the same elements."""
        axes = grouped(flat(known.dims), shape)
        if axes is not None:
            return replace(known, shape=tuple(shape), axes=axes)
        atoms, rest = list[Atom](), [extent for extent in shape if extent > 1]
        for atom in flat(known.dims):
            parts = _parts(atom.extent, rest)
            if parts is None:
                if not self.is_own:
                    raise NoBodyError("a view does not align with dims")
                return self._across(known, shape)
            if len(parts) == 1 or not atom.name:
                atoms += [atom] if len(parts) == 1 else [Atom("", part) for part in parts]
                continue
            new = tuple(self.dim(part) for part in parts)
            known = replace(known, operand=self._viewed(known, (atom,), new))
            atoms += new
        axes = grouped(tuple(atoms), shape)
        if axes is None:
            raise NoBodyError(f"a tensor of {prod(atom.extent for atom in atoms)} elements is read as {list(shape)}")
        return replace(known, shape=tuple(shape), axes=axes)

    def _across(self, known: TensorRef, shape: Sequence[int]) -> TensorRef:
        """Return a tensor reshaped across its dims, which are gathered for that."""
        known = self.named(known)
        known, old = self.unsplit(known, flat(known.dims))
        axes = tuple((self.dim(extent),) if extent > 1 else () for extent in shape)
        name = self.step("view", [known.operand], (*names(old), *names(flat(axes))), replaced=len(old))
        return replace(known, operand=name, shape=tuple(shape), axes=axes)

    def _viewed(self, known: TensorRef, old: Axis, new: Axis) -> str:
        """Append a reshape of unsplit dims to others."""
        if self.is_own and all(atom.name for atom in new):
            known, old = self.unsplit(*self._named_dim(known, old))
        if any(not atom.name for atom in (*old, *new)) or not self.is_whole(old):
            raise NoBodyError(f"data are moved along {', '.join(names(old)) or 'a dim'}, which may be split")
        return self.step("view", [known.operand], (*names(old), *names(new)), replaced=len(old))

    def laid(self, known: TensorRef, axes: Axes) -> TensorRef:
        """Return a tensor with its unsplit dims replaced by those of axes that it is broadcast to.

        A constant receives its dims.
        """
        if known.source is not None:
            return self.constant(known, axes)
        offset = len(axes) - len(known.dims)
        for i, axis in enumerate(known.dims):
            if not axis or offset + i < 0 or axes[offset + i] == axis:
                continue
            target = axes[offset + i]
            if merged(axis, target) is None:
                known = self._along(known, i, target)
        return known

    def _along(self, known: TensorRef, place: int, target: Axis) -> TensorRef:
        name = self._viewed(known, known.dims[place], target)
        return replace(known, operand=name, axes=(*known.dims[:place], target, *known.dims[place + 1 :]))

    def together(self, first: Axis, second: Axis) -> Axis:
        """Return the common dims of two tensors along a dim: iteration dims, which replace unsplit ones."""
        both = merged(first, second)
        if both is not None:
            return both
        if self.is_whole(second) and not self.is_inner(first):
            return first
        if self.is_whole(first):
            return second
        if self.is_own:
            # All points of the second are gathered when it is laid out as the first.
            return first if all(atom.name for atom in first) else second
        raise NoBodyError("points of different dims meet")

    def single(self, known: TensorRef, place: int) -> TensorRef:
        """Return a tensor with a dim that data are moved along as one inner or iteration dim."""
        axis = known.dims[place]
        if len(axis) == 1 and axis[0].name and self.is_whole(axis):
            return known
        return self._along(known, place, (self.dim(size(axis)),))

    def cut(self, known: TensorRef, place: int, start: int, extent: int, step: int = 1) -> TensorRef:
        """Return each `step`-th of a tensor's points along a dim."""
        known = self.single(known, place)
        (atom,) = known.dims[place]
        part = self.dim(extent)
        self._whole[part.name] = atom
        name = self.step("cut", [known.operand], (atom.name, part.name), start=start, step=step)
        axes = (*known.dims[:place], (part,), *known.dims[place + 1 :])
        return replace(known, operand=name, shape=tuple(size(axis) or 1 for axis in axes), axes=axes)

    def joined(self, knowns: Sequence[TensorRef], place: int) -> TensorRef:
        """Return tensors end to end along a dim: as the one that they were cut from, if they make it up."""
        knowns = [self.single(known, place) for known in knowns]
        axes = result_axes(
            self,
            [replace(known, axes=_without(known.axes, place)) for known in knowns],
            _without(knowns[0].shape, place),
        )
        own: list[Atom] = []
        operands: list[str] = []
        for known in knowns:
            own.append(known.dims[place][0])
            target = (*axes[:place], known.dims[place], *axes[place:])
            laid = self.laid(known, target)
            told = names(flat(target))
            if self.is_own and {*names(flat(laid.axes or ()))} != {*told}:
                # Tensors that are repeated for the others are laid out like them.
                laid = replace(laid, operand=self.step("repeat", [laid.operand], told))
            operands.append(str(laid.operand))
        extent = sum(atom.extent for atom in own)
        wholes = {self._whole.get(atom.name) for atom in own}
        whole = wholes.pop() if len(wholes) == 1 else None
        joined = whole if whole is not None and whole.extent == extent else self.dim(extent)
        name = self.step("join", operands, (*(atom.name for atom in own), joined.name))
        found = (*axes[:place], (joined,), *axes[place:])
        return TensorRef(operand=name, shape=tuple(size(axis) for axis in found), axes=found)

    def mark(self) -> "BodyBuilder":
        """Return what there is so far, to which `reset` goes back."""
        return replace(self, **{own.name: copy(getattr(self, own.name)) for own in fields(self)})

    def reset(self, mark: "BodyBuilder") -> None:
        """Forget what was written since a mark."""
        for own in fields(self):
            setattr(self, own.name, getattr(mark, own.name))

    def _new(self, letter: str) -> str:
        number = self.numbers.get(letter, 1)
        while f"{letter}{number}" in self.taken:
            number += 1
        self.numbers[letter] = number
        self.taken.add(f"{letter}{number}")
        return f"{letter}{number}"


def _parts(extent: int, rest: list[int]) -> tuple[int, ...] | None:
    """Return the factors that the first dims of a shape take of an extent, which are taken off them; None across."""
    found: list[int] = []
    while extent > 1:
        if not rest:
            return None
        part = gcd(extent, rest[0])
        if part not in (extent, rest[0]):
            return None
        found.append(part)
        extent //= part
        rest[0] //= part
        if rest[0] == 1:
            rest.pop(0)
    return tuple(found)


def _without(items: Sequence[Any] | None, place: int) -> tuple[Any, ...]:
    assert items is not None
    return (*items[:place], *items[place + 1 :])


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


def result_axes(sheet: BodyBuilder, knowns: Sequence[TensorRef], shape: Sequence[int]) -> Axes:
    """Return the axes of the result of elementwise functions of these tensors, broadcast to a shape.

    Where dims differ, those of the iteration space replace unsplit ones, which are laid out accordingly.
    """
    found: list[Axis] = [() if extent == 1 else (Atom("", extent),) for extent in shape]
    for known in knowns:
        if known.axes is None:
            continue
        offset = len(shape) - len(known.axes)
        for i, axis in enumerate(known.axes):
            if axis and offset + i >= 0:
                found[offset + i] = sheet.together(found[offset + i], axis)
    return tuple(found)


def seen(sheet: BodyBuilder, known: TensorRef, use: Use) -> TensorRef:
    """Return a tensor as a use of it reads it."""
    if use.seen_as is not None:
        raise NoBodyError("a tensor is read within the layer in a way that is not told")
    if known.axes is None:
        assert known.source is not None
        if use.piece is not None:
            raise NoBodyError("a piece of a constant is read within the layer")
        return (
            known
            if use.view is None
            else replace(known, shape=use.view.shape, source=replace(known.source, view=use.view))
        )
    if use.piece is not None:
        known = sheet.cut(known, use.piece.dim, use.piece.start, use.piece.size)
    return known if use.view is None else sheet.seen(known, use.view)
