"""Atoms: the iteration dims that make up each dim of a tensor, however it is reshaped, transposed or broadcast."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod

from pase.graph import Access, Operator, Part, Window
from pase.importers.ir import View


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
    for axis, extent in zip(access.axes, access.shape, strict=True):
        match axis:
            case str():
                found.append(Atom(axis, extent))
            case tuple():
                found += [Atom(name, operator.extents[name]) for name in axis]
            case Window():
                found.append(Atom(f"{axis.out}~", extent))
            case Part():
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
