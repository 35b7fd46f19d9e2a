"""One mesh for many layers: which layers a single mesh, with one layout, can say."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

Splits = Mapping[str, int]
"""Split factor of each iteration dim of a layer."""

_MOST_DIMS = 24
_MOST_TRIALS = 5_000
"""Up to so many split dims, so many assignments of them to axes are tried: all, for networks that people write.
Beyond that a dim goes to the first axis that is free."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedMesh:
    """A mesh and a layout, and the layers that they say.

    sizes: of the axes; their product is the number of devices, the last one may hold replicas alone. axis_of: the axis
    that splits each dim; dims that are not in it are not split. layers: positions.
    """

    sizes: tuple[int, ...]
    axis_of: Mapping[str, int]
    layers: tuple[int, ...]


def shared_meshes(layers: Sequence[Splits], num_devices: int) -> tuple[SharedMesh, ...]:
    """Return meshes that together say all layers, each layer once, the one with most layers first.

    Layers share a mesh where dims of one name are split alike in all of them, and the dims of any layer lie on axes of
    their own. What most layers have in common is placed first, so the first mesh says as many as there are of those.
    """
    kinds = Counter(tuple(splits.items()) for splits in layers)
    groups: list[_Group] = []
    group_of: dict[Kind, int] = {}
    for kind, _ in kinds.most_common():
        found = next((i for i, group in enumerate(groups) if group.takes(kind)), None)
        if found is None:
            found = len(groups)
            groups.append(_Group(num_devices))
            assert groups[-1].takes(kind), "a layer alone has an axis for each of its dims"
        group_of[kind] = found
    members: list[list[int]] = [[] for _ in groups]
    for position, splits in enumerate(layers):
        members[group_of[tuple(splits.items())]].append(position)
    meshes = [group.mesh(tuple(of)) for group, of in zip(groups, members, strict=True)]
    return tuple(sorted(meshes, key=lambda mesh: -len(mesh.layers)))


def different_splits(layers: Sequence[Splits]) -> dict[str, dict[int, list[int]]]:
    """Return, for each dim that layers split differently, the layers with each split: what no one layout can say."""
    found: dict[str, dict[int, list[int]]] = {}
    for position, splits in enumerate(layers):
        for dim, parts in splits.items():
            found.setdefault(dim, {}).setdefault(parts, []).append(position)
    return {dim: dict(sorted(by.items(), reverse=True)) for dim, by in found.items() if len(by) > 1}


Kind = tuple[tuple[str, int], ...]
"""The splits of a layer."""


class _Group:
    """Layers that share a mesh, while more of them are found."""

    def __init__(self, num_devices: int) -> None:
        self._num_devices = num_devices
        self._kinds: list[Kind] = []
        self._splits: dict[str, int] = {}
        self._axes = _Axes(sizes=(), axis_of={})

    def takes(self, kind: Kind) -> bool:
        """Add layers with these splits if one mesh says them and all others that are here; return whether it does."""
        if any(self._splits.get(dim, parts) != parts for dim, parts in kind):
            return False
        axes = _extended(self._axes, kind, self._num_devices) or self._arranged_anew(kind)
        if axes is None:
            return False
        self._kinds.append(kind)
        self._splits.update(kind)
        self._axes = axes
        return True

    def mesh(self, layers: tuple[int, ...]) -> SharedMesh:
        """Return the mesh; layers: their positions."""
        sizes = self._axes.sizes
        replicas = self._num_devices // prod(sizes)
        return SharedMesh(
            sizes=sizes if sizes and replicas == 1 else (*sizes, replicas), axis_of=self._axes.axis_of, layers=layers
        )

    def _arranged_anew(self, kind: Kind) -> "_Axes | None":
        splits = {**self._splits, **dict(kind)}
        dims = [dim for dim, parts in splits.items() if parts > 1]
        if len(dims) > _MOST_DIMS:
            return None
        together: dict[str, set[str]] = {dim: set() for dim in dims}
        for layer in (*self._kinds, kind):
            split = {dim for dim, parts in layer if parts > 1}
            for dim in split:
                together[dim] |= split - {dim}
        trials = iter(range(_MOST_TRIALS))
        return next(_assignments(dims, splits, together, self._num_devices, _Axes(sizes=(), axis_of={}), trials), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Axes:
    """The sizes of axes, and the axis of each dim that is split."""

    sizes: tuple[int, ...]
    axis_of: dict[str, int]

    def with_dim(self, dim: str, axis: int, size: int) -> "_Axes":
        """Return these with one more dim; axis: one of these, or a new one of that size."""
        sizes = self.sizes if axis < len(self.sizes) else (*self.sizes, size)
        return _Axes(sizes=sizes, axis_of={**self.axis_of, dim: axis})


def _extended(axes: _Axes, kind: Kind, num_devices: int) -> _Axes | None:
    """Return axes with the dims of one more layer, where the others can stay as they are; None where they cannot."""
    split = [(dim, parts) for dim, parts in kind if parts > 1]
    used = [axes.axis_of[dim] for dim, _ in split if dim in axes.axis_of]
    if len(set(used)) < len(used):
        return None
    free = num_devices // prod(axes.sizes)
    for dim, size in split:
        if dim in axes.axis_of:
            continue
        own = [i for i, of in enumerate(axes.sizes) if of == size and i not in used]
        if not own and free % size:
            return None
        axis = own[0] if own else len(axes.sizes)
        free = free if own else free // size
        axes = axes.with_dim(dim, axis, size)
        used.append(axis)
    return axes


def _assignments(
    dims: Sequence[str],
    splits: Splits,
    together: Mapping[str, set[str]],
    free: int,
    axes: _Axes,
    trials: Iterator[int],
) -> Iterator[_Axes]:
    """Yield ways to put dims on axes; free: devices over which no axis goes yet. Dims of one layer stay apart."""
    if not dims:
        yield axes
        return
    dim, rest = dims[0], dims[1:]
    size = splits[dim]
    taken = {axes.axis_of[other] for other in together[dim] if other in axes.axis_of}
    for i, of in enumerate(axes.sizes):
        if next(trials, None) is None:
            return
        if of == size and i not in taken:
            yield from _assignments(rest, splits, together, free, axes.with_dim(dim, i, size), trials)
    if free % size == 0:
        larger = axes.with_dim(dim, len(axes.sizes), size)
        yield from _assignments(rest, splits, together, free // size, larger, trials)
