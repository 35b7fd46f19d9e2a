"""`View`: how the dims of a reshaped, transposed or broadcast tensor correspond to those of the tensor itself.

Both are expressed in common factors. A view of shape [b, h, s, k] on a base of shape [b, s, h·k] has the factors b, s,
h and k in the order of the base; the dims of the view consist of them in its own order. Broadcast factors belong to no
dim of the base.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod


@dataclass(frozen=True, slots=True)
class Factor:
    """A factor of a dim's extent; base: its row-major position in the base, None if it is broadcast."""

    extent: int
    base: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """A tensor in another shape.

    Attributes:
        base: Shape of the tensor.
        dims: [rank of the view] factors of each dim, row-major; none of extent 1.
    """

    base: tuple[int, ...]
    dims: tuple[tuple[Factor, ...], ...]

    @classmethod
    def plain(cls, shape: Sequence[int]) -> "View":
        """Return the identity view of a tensor."""
        dims, count = [], 0
        for extent in shape:
            dims.append((Factor(extent, count),) if extent > 1 else ())
            count += extent > 1
        return cls(base=tuple(shape), dims=tuple(dims))

    @property
    def shape(self) -> tuple[int, ...]:
        """Extents of the view."""
        return tuple(prod(factor.extent for factor in dim) for dim in self.dims)

    @property
    def factors(self) -> tuple[int, ...]:
        """Extents of the base's factors, row-major in the base."""
        found = {f.base: f.extent for dim in self.dims for f in dim if f.base is not None}
        return tuple(found[i] for i in range(len(found)))

    @property
    def homes(self) -> tuple[range, ...]:
        """For each dim of the base, the positions of its factors."""
        extents, found, position = self.factors, list[range](), 0
        for extent in self.base:
            first, size = position, 1
            while size < extent:
                size *= extents[position]
                position += 1
            found.append(range(first, position))
        return tuple(found)

    @property
    def is_plain(self) -> bool:
        """Whether the view is the tensor itself."""
        return self.is_reshape and self.shape == self.base

    @property
    def is_reshape(self) -> bool:
        """Whether nothing is transposed or broadcast: the elements are in the base's order."""
        order = [factor.base for dim in self.dims for factor in dim]
        return order == list(range(len(order)))

    @property
    def repeats(self) -> bool:
        """Whether elements are read several times."""
        return any(factor.base is None for dim in self.dims for factor in dim)

    def transposed(self, order: Sequence[int]) -> "View":
        """Return the view with its dims in another order."""
        assert sorted(order) == list(range(len(self.dims))), f"{order} does not permute {len(self.dims)} dims"
        return View(base=self.base, dims=tuple(self.dims[i] for i in order))

    def broadcast(self, shape: Sequence[int], places: Sequence[int] | None = None) -> "View":
        """Return the view repeated to a shape; places: the new position of each dim, by default the last ones."""
        offset = len(shape) - len(self.dims)
        places = range(offset, len(shape)) if places is None else places
        dims: list[tuple[Factor, ...]] = [(Factor(extent, None),) if extent > 1 else () for extent in shape]
        for place, dim, extent in zip(places, self.dims, self.shape, strict=True):
            if extent == shape[place]:
                dims[place] = dim
            else:
                assert extent == 1, f"{self.shape} cannot be broadcast to {tuple(shape)}"
        return View(base=self.base, dims=tuple(dims))

    def reshaped(self, shape: Sequence[int]) -> "View | None":
        """Return the view in another shape of the same size; None where a dim would cut across the factors."""
        assert prod(shape) == prod(self.shape), f"{self.shape} cannot be seen as {tuple(shape)}"
        if prod(shape) == 0:
            return None
        # Factors not yet assigned to a dim, the next one last: (extent, position in the base, extent inside of it).
        left = [(f.extent, f.base, 1) for dim in reversed(self.dims) for f in reversed(dim)]
        dims: list[list[tuple[int, int | None, int]]] = []
        for extent in shape:
            dims.append([])
            while extent > 1:
                size, base, inside = left.pop()
                if extent % size and size % extent:
                    return None
                if extent % size:
                    # The dim ends within the factor, whose inner part is left for the next one.
                    left.append((size // extent, base, inside))
                    inside, size = inside * (size // extent), extent
                dims[-1].append((size, base, inside))
                extent //= size
        places = sorted({(base, -inside) for own in dims for _, base, inside in own if base is not None})
        number = {place: i for i, place in enumerate(places)}
        return View(
            base=self.base,
            dims=tuple(
                tuple(Factor(size, None if base is None else number[base, -inside]) for size, base, inside in own)
                for own in dims
            ),
        ).simplified()

    def simplified(self) -> "View":
        """Return the view with factors merged that are adjacent both in it and in a dim of its base.

        Equivalent views are equal then.
        """
        home = [dim for dim, own in enumerate(self.homes) for _ in own]
        joins: set[int] = set()
        dims: list[list[Factor]] = []
        for factors in self.dims:
            own: list[Factor] = []
            for factor in factors:
                last = own[-1] if own else None
                if last is not None and factor.base is None and last.base is None:
                    own[-1] = Factor(last.extent * factor.extent, None)
                elif last is not None and factor.base and _follows(home, joins, last, factor):
                    own[-1] = Factor(last.extent * factor.extent, last.base)
                    joins.add(factor.base)
                else:
                    own.append(factor)
            dims.append(own)
        # Positions in the base, without those that have become part of the one before.
        place = {base: base - sum(other < base for other in joins) for base in range(len(home))}
        return View(
            base=self.base,
            dims=tuple(
                tuple(f if f.base is None else Factor(f.extent, place[f.base]) for f in factors) for factors in dims
            ),
        )

    def of(self, inner: "View") -> "View | None":
        """Return this view, of a tensor that is itself the view `inner` of another one, as a view of that one.

        None where the factors of the two cut across each other.
        """
        assert inner.shape == self.base, f"a view of {self.base} cannot be composed with one of shape {inner.shape}"
        flat = inner.reshaped(self.factors)
        if flat is None:
            return None
        assert len(flat.dims) == len(self.factors)
        return View(
            base=flat.base,
            dims=tuple(
                tuple(
                    part
                    for factor in dim
                    for part in (flat.dims[factor.base] if factor.base is not None else (factor,))
                )
                for dim in self.dims
            ),
        ).simplified()

    def sliced(self, dim: int, start: int, size: int) -> "tuple[tuple[int, int, int], View] | None":
        """Return the piece (dim, start, size) of the base that holds a piece of the view, and the view of that piece.

        None where the piece is scattered over the base.
        """
        factors = self.dims[dim]
        bases = [factor.base for factor in factors]
        # The dim of the base that starts with these factors, and may continue with others inside of them.
        found = next(((i, own) for i, own in enumerate(self.homes) if bases and bases == [*own[: len(bases)]]), None)
        if found is None:
            return None
        at, own = found
        first = own.start
        inner = prod(self.factors[first + len(factors) : own.stop])
        base = (*self.base[:at], size * inner, *self.base[at + 1 :])
        dims = [(Factor(size, first),) if i == dim else other for i, other in enumerate(self.dims)]
        # Of a single element no factor is left.
        shift = len(factors) - (size > 1)
        moved = tuple(
            tuple(
                Factor(f.extent, f.base - shift if f.base is not None and f.base > first else f.base)
                for f in dim_factors
                if size > 1 or f.base != first
            )
            for dim_factors in dims
        )
        return (at, start * inner, size * inner), View(base=base, dims=moved).simplified()

    def runs(self) -> tuple[tuple[int, tuple[Factor, ...]], ...]:
        """Return maximal runs of factors that are adjacent in one dim, in the base's order: (dim, factors).

        A dim of the view that occurs more than once is scattered over the base.
        """
        where = {
            factor.base: (dim, place)
            for dim, factors in enumerate(self.dims)
            for place, factor in enumerate(factors)
            if factor.base is not None
        }
        found: list[tuple[int, list[Factor]]] = []
        last: tuple[int, int] | None = None
        for base in range(len(where)):
            dim, place = where[base]
            factor = self.dims[dim][place]
            if last == (dim, place - 1):
                found[-1][1].append(factor)
            else:
                found.append((dim, [factor]))
            last = dim, place
        return tuple((dim, tuple(factors)) for dim, factors in found)


def _follows(home: Sequence[int], joins: set[int], last: Factor, factor: Factor) -> bool:
    """Whether a factor comes right after another one, which others may have joined, in the same dim of the base."""
    assert factor.base is not None
    if last.base is None or home[factor.base] != home[last.base]:
        return False
    end = last.base + 1
    while end in joins:
        end += 1
    return end == factor.base
