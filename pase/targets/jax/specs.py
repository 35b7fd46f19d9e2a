"""How a tensor lies on a named mesh, and how views of it then lie."""

from collections.abc import Mapping, Sequence
from math import prod

from pase.importers.ir.views import Factor, View
from pase.targets.named_mesh import NamedTensor

Entry = tuple[str, ...] | None
"""The axes that split a dim, the coarsest first; None where nothing is said of it."""

Spec = tuple[Entry, ...]


def spec_of(tensor: NamedTensor) -> Spec:
    """Return how a tensor of a layer lies; what is not said of one that a layer makes is left open."""
    return tuple(None if dim.is_open and tensor.is_made else dim.axes for dim in tensor.dims)


def spec_through(spec: Spec, view: View, sizes: Mapping[str, int]) -> Spec:
    """Return how a view of a tensor lies where the tensor lies so; dims whose parts are not told are left open.

    Args:
        spec: Of the view's base.
        view: Of it.
        sizes: Of the mesh's axes.
    """
    found = _of_factors(spec, view, sizes)
    return tuple(_of_dim(factors, found, sizes) for factors in view.dims)


def spec_reshaped(spec: Spec, shape: Sequence[int], new: Sequence[int], sizes: Mapping[str, int]) -> Spec | None:
    """Return how a tensor of a shape lies in another shape; None where these do not lie over each other."""
    if tuple(shape) == tuple(new):
        return spec
    if not any(entry is None or entry for entry in spec):
        return ((),) * len(new)
    view = View.plain(shape).reshaped(new) if prod(shape) == prod(new) else None
    return None if view is None else spec_through(spec, view, sizes)


def inverse(view: View) -> View | None:
    """Return the tensor behind a view as a view of that; None where elements are repeated."""
    flat = [factor for dim in view.dims for factor in dim]
    places = {factor.base: place for place, factor in enumerate(flat)}
    if None in places:
        return None
    extents, position = view.factors, 0
    dims: list[tuple[Factor, ...]] = []
    for extent in view.base:
        own, size = [], 1
        while size < extent:
            own.append(Factor(extents[position], places[position]))
            size *= extents[position]
            position += 1
        dims.append(tuple(own))
    return View(base=view.shape, dims=tuple(dims)).simplified()


def _of_factors(spec: Spec, view: View, sizes: Mapping[str, int]) -> list[Entry]:
    """Return the axes that split each factor of a view's base."""
    extents = view.factors
    found: list[Entry] = [()] * len(extents)
    position = 0
    for extent, entry in zip(view.base, spec, strict=True):
        size, left = 1, list(entry or ())
        is_told = entry is not None
        while size < extent:
            room, own = extents[position], list[str]()
            while left and room % sizes[left[0]] == 0:
                room //= sizes[left[0]]
                own.append(left.pop(0))
            # An axis that splits this factor in part and the next one, too, says nothing of either.
            is_told = is_told and (not left or room == 1)
            found[position] = tuple(own) if is_told else None
            size *= extents[position]
            position += 1
    return found


def _of_dim(factors: Sequence[Factor], found: Sequence[Entry], sizes: Mapping[str, int]) -> Entry:
    axes: tuple[str, ...] = ()
    is_contiguous = True
    for factor in factors:
        own = () if factor.base is None else found[factor.base]
        if own is None or (own and not is_contiguous):
            return None
        axes += own
        is_contiguous = is_contiguous and prod(sizes[axis] for axis in own) == factor.extent
    return axes
