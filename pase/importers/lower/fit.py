"""Fit a read to the tensor behind its view: the iteration dims are told in the dims of the producer's tensor.

A dim of the operator that the view puts together from several places of the tensor (heads and channels, gathered to one
dim after a transpose) is refined: it becomes as many iteration dims. What cannot be told so is None, and
the view stays a vertex that moves the data.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from math import prod

from pase.graph import Access, AllReduce, Dim, Handoff, Operator, Relayout, SliceOf, Window
from pase.graph.access import DimIndex
from pase.importers.ir import View

Pieces = Mapping[str, tuple[str, ...]]
"""What a refined dim has become."""


def fitted(operator: Operator, views: Sequence[View | None]) -> Operator | None:
    """Return the operator with every read that has a view in the shape of that view's base; None where it cannot.

    views: [reads], each of the very shape of the read.
    """
    cuts: dict[str, set[int]] = {}
    for access, view in zip(operator.reads, views, strict=True):
        if view is not None and not view.is_reshape:
            found = _cuts(access, view)
            if found is None:
                return None
            for dim, inner in found.items():
                cuts.setdefault(dim, set()).update(inner)
    refined = _refined(operator, cuts)
    if refined is None:
        return None
    operator = refined
    reads = []
    for access, view in zip(operator.reads, views, strict=True):
        new = access if view is None else _on_base(access, view, operator.extents)
        if new is None:
            return None
        reads.append(new)
    return replace(operator, reads=tuple(reads))


def _cuts(access: Access, view: View) -> dict[str, set[int]] | None:
    """Return where the dims of an operator must be cut: for each, the extents that lie within a cut."""
    runs = view.runs()
    found: dict[str, set[int]] = {}
    for dim, (axis, factors) in enumerate(zip(access.index_map, view.dims, strict=True)):
        starts = {own[0] for run_dim, own in runs if run_dim == dim}
        # A cut before each factor that begins a run or is broadcast, and after each that ends one.
        bounds: set[int] = set()
        for i, factor in enumerate(factors):
            begins = factor in starts and factor.base is not None
            is_apart = factor.base is None or (i > 0 and factors[i - 1].base is None)
            if i > 0 and (begins or is_apart):
                bounds.add(prod(f.extent for f in factors[i:]))
        if not bounds:
            continue
        match axis:
            case str():
                found.setdefault(axis, set()).update(bounds)
            case _:
                return None
    return found


def _refined(operator: Operator, cuts: Mapping[str, set[int]]) -> Operator | None:
    pieces: dict[str, tuple[str, ...]] = {}
    extents: dict[str, int] = {}
    for dim, bounds in cuts.items():
        whole = operator.extents[dim]
        chain = [whole, *sorted((b for b in bounds if 1 < b < whole), reverse=True), 1]
        if any(outer % inner for outer, inner in pairwise(chain)):
            return None
        if len(chain) == 2:
            continue
        names = _parts(dim, len(chain) - 1, operator.extents)
        pieces[dim] = names
        extents |= {name: chain[i] // chain[i + 1] for i, name in enumerate(names)}
    if not pieces:
        return operator
    used: list[Sequence[DimIndex]] = [access.index_map for access in (*operator.reads, *operator.writes)]
    used += [work.dims for work in operator.work]
    if any(isinstance(a, Window | SliceOf) and not {*_named(a)}.isdisjoint(pieces) for axes in used for a in axes):
        return None

    def expanded(names: Sequence[str]) -> tuple[str, ...]:
        return tuple(part for name in names for part in pieces.get(name, (name,)))

    def points(dims: Sequence[str | SliceOf]) -> tuple[str | SliceOf, ...]:
        return tuple(new for dim in dims for new in ((dim,) if isinstance(dim, SliceOf) else expanded([dim])))

    def axes(old: tuple[DimIndex, ...]) -> tuple[DimIndex, ...]:
        return tuple(_axis(axis, pieces) for axis in old)

    def access(old: Access) -> Access:
        over = None if old.partial_over is None else expanded(old.partial_over)
        return replace(old, index_map=axes(old.index_map), partial_over=over)

    def exchange(old: AllReduce | Relayout | Handoff) -> AllReduce | Relayout | Handoff | None:
        match old:
            case AllReduce():
                return replace(old, index_map=axes(old.index_map), over=expanded(old.over))
            case _:
                return None

    exchanges = [exchange(old) for old in operator.exchanges]
    if any(new is None for new in exchanges):
        return None
    dims = tuple(
        Dim(part, extents.get(part, dim.extent)) for dim in operator.dims for part in pieces.get(dim.name, (dim.name,))
    )
    return replace(
        operator,
        dims=dims,
        reads=tuple(access(old) for old in operator.reads),
        writes=tuple(access(old) for old in operator.writes),
        work=tuple(replace(work, dims=points(work.dims)) for work in operator.work),
        unsplittable=expanded(operator.unsplittable),
        exchanges=tuple(new for new in exchanges if new is not None),
        intermediates=tuple(replace(old, index_map=axes(old.index_map)) for old in operator.intermediates),
    )


def _named(axis: Window | SliceOf) -> tuple[str, ...]:
    return (axis.out, axis.kernel) if isinstance(axis, Window) else (axis.dim,)


def _axis(axis: DimIndex, pieces: Pieces) -> DimIndex:
    match axis:
        case str():
            parts = pieces.get(axis, (axis,))
            return parts[0] if len(parts) == 1 else parts
        case tuple():
            return tuple(part for name in axis for part in pieces.get(name, (name,)))
        case _:
            return axis


def _parts(dim: str, count: int, taken: Mapping[str, int]) -> tuple[str, ...]:
    names: list[str] = []
    number = 0
    while len(names) < count:
        number += 1
        if f"{dim}{number}" not in taken:
            names.append(f"{dim}{number}")
    return tuple(names)


def _on_base(access: Access, view: View, extents: Mapping[str, int]) -> Access | None:
    """Return a read in the shape of the tensor behind its view."""
    if view.is_reshape:
        return access
    shape: list[int] = []
    axes: list[DimIndex] = []
    done: dict[int, int] = {}
    for dim, factors in view.runs():
        size = prod(factor.extent for factor in factors)
        axis = access.index_map[dim]
        match axis:
            case None:
                found: DimIndex = None
            case Window() | SliceOf():
                if size != access.shape[dim]:
                    return None
                found = axis
            case _:
                names = (axis,) if isinstance(axis, str) else axis
                own = _covered(names, extents, view.dims[dim], factors)
                if own is None:
                    return None
                found = own[0] if len(own) == 1 else own
        shape.append(size)
        axes.append(found)
        done[dim] = done.get(dim, 0) + 1
    for dim, factors in enumerate(view.dims):
        # Of one element: where it stands does not matter.
        if not factors and isinstance(access.index_map[dim], str | Window):
            shape.append(1)
            axes.append(access.index_map[dim])
    return replace(access, shape=tuple(shape), index_map=tuple(axes))


def _covered(
    names: tuple[str, ...], extents: Mapping[str, int], every: Sequence[object], factors: Sequence[object]
) -> tuple[str, ...] | None:
    """Return those of the dims that a run of a view's factors covers; None where they do not end where it does."""
    start = every.index(factors[0])
    before = prod(factor.extent for factor in every[:start])  # type: ignore[attr-defined]
    size = prod(factor.extent for factor in factors)  # type: ignore[attr-defined]
    outer, found, at = 1, list[str](), 1
    for name in names:
        if outer == before and at < size:
            found.append(name)
            at *= extents[name]
        elif outer < before:
            outer *= extents[name]
    return tuple(found) if at == size and outer == before else None
