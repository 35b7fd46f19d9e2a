"""A strategy in Mesh-TensorFlow's terms: mesh shapes and layout rules, each for the layers that share them.

A layout of Mesh-TensorFlow maps names of dims to axes of one mesh, for all layers. PaSE's strategies may split a dim of
one name differently in different layers: those need several layouts.
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from pase.common.words import listed, short, visible
from pase.planning.plan import Plan, check_even, check_plain
from pase.targets.emitter.text import Grammar, Text, joined
from pase.views.exports import Exported, ExportOptions

Splits = Mapping[str, int]
"""Split factor of each iteration dim of a layer."""

_MOST_TRIED_DIMS = 24
_MOST_TRIALS = 5_000
"""Up to this many split dims, as many assignments of them to axes are tried, which covers practical networks. Above it,
a dim is assigned to the first free axis."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedMesh:
    """A mesh and a layout, and the layers that they express.

    Attributes:
        sizes: Sizes of the axes; their product is the number of devices, and the last one may hold only replicas.
        axis_of: Axis that splits each dim; other dims are not split.
        layers: Positions of the layers.
    """

    sizes: tuple[int, ...]
    axis_of: Mapping[str, int]
    layers: tuple[int, ...]


def shared_meshes(layers: Sequence[Splits], num_devices: int) -> tuple[SharedMesh, ...]:
    """Return meshes that together express all layers, each layer once, the one with most layers first.

    Layers share a mesh if dims of one name have the same split in all of them, and the dims of each layer are on
    different axes. The most frequent splits are placed first, so the first mesh covers at least the layers with those.
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
    """Return, for each dim with different splits, the layers with each split: no single layout can express these."""
    found: dict[str, dict[int, list[int]]] = {}
    for position, splits in enumerate(layers):
        for dim, parts in splits.items():
            found.setdefault(dim, {}).setdefault(parts, []).append(position)
    return {dim: dict(sorted(by.items(), reverse=True)) for dim, by in found.items() if len(by) > 1}


Kind = tuple[tuple[str, int], ...]
"""The splits of a layer."""


_Axes = tuple[tuple[int, ...], Mapping[str, int]]
"""The sizes of axes, and the axis of each dim that is split."""


class _Group:
    """Collects layers that share a mesh."""

    def __init__(self, num_devices: int) -> None:
        self._num_devices = num_devices
        self._kinds: list[Kind] = []
        self._splits: dict[str, int] = {}
        self._axes: _Axes = (), {}

    def takes(self, kind: Kind) -> bool:
        """Add layers with these splits if one mesh can express them and all present ones; return whether it can."""
        if any(self._splits.get(dim, parts) != parts for dim, parts in kind):
            return False
        axes = self._extended(kind) or self._arranged_anew(kind)
        if axes is None:
            return False
        self._kinds.append(kind)
        self._splits.update(kind)
        self._axes = axes
        return True

    def mesh(self, layers: tuple[int, ...]) -> SharedMesh:
        """Return the mesh for the layers at these positions."""
        sizes, axis_of = self._axes
        replicas = self._num_devices // prod(sizes)
        sizes = sizes if sizes and replicas == 1 else (*sizes, replicas)
        return SharedMesh(sizes=sizes, axis_of=axis_of, layers=layers)

    def _extended(self, kind: Kind) -> _Axes | None:
        """Return axes with the dims of one more layer, keeping the other assignments; None if that is impossible."""
        sizes, axis_of = self._axes
        split = [(dim, parts) for dim, parts in kind if parts > 1]
        used = [axis_of[dim] for dim, _ in split if dim in axis_of]
        if len(set(used)) < len(used):
            return None
        for dim, size in split:
            if dim in axis_of:
                continue
            axis = next((i for i, of in enumerate(sizes) if of == size and i not in used), len(sizes))
            if axis == len(sizes):
                if self._num_devices // prod(sizes) % size:
                    return None
                sizes = (*sizes, size)
            axis_of = {**axis_of, dim: axis}
            used.append(axis)
        return sizes, axis_of

    def _arranged_anew(self, kind: Kind) -> _Axes | None:
        splits = {**self._splits, **dict(kind)}
        dims = [dim for dim, parts in splits.items() if parts > 1]
        if len(dims) > _MOST_TRIED_DIMS:
            return None
        together: dict[str, set[str]] = {dim: set() for dim in dims}
        for layer in (*self._kinds, kind):
            split = {dim for dim, parts in layer if parts > 1}
            for dim in split:
                together[dim] |= split - {dim}
        trials = iter(range(_MOST_TRIALS))

        def assignments(dims: Sequence[str], free: int, axes: _Axes) -> Iterator[_Axes]:
            """Yield assignments of dims to distinct axes for each layer; free: devices not yet covered by axes."""
            if not dims:
                yield axes
                return
            (dim, *rest), (sizes, axis_of) = dims, axes
            size = splits[dim]
            taken = {axis_of[other] for other in together[dim] if other in axis_of}
            for i, of in enumerate(sizes):
                if next(trials, None) is None:
                    return
                if of == size and i not in taken:
                    yield from assignments(rest, free, (sizes, {**axis_of, dim: i}))
            if free % size == 0:
                yield from assignments(rest, free // size, ((*sizes, size), {**axis_of, dim: len(sizes)}))

        return next(assignments(dims, self._num_devices, ((), {})), None)


_MOST_DIMS = 12
"""Maximum number of dims listed in the notes."""


def write(plan: Plan, options: ExportOptions) -> Exported:
    """Return a TOML document with one table for each mesh and its layout, the one with most layers first."""
    check_plain(plan, "Mesh-TensorFlow")
    check_even(plan, "Mesh-TensorFlow")
    layers = [layer.splits for layer in plan.layers]
    meshes = shared_meshes(layers, plan.num_devices)
    written = _written_dims({dim for splits in layers for dim in splits})
    lines = [
        toml("# Mesh shapes and layout rules of Mesh-TensorFlow, for the layers that share them."),
        toml(
            "# Dims that a layout does not name are not split. Axes that split no dim of a layer hold replicas of it."
        ),
        toml("model = {}", plan.graph.name),
        toml("tool_version = {}", plan.tool_version),
        toml("num_devices = {}", plan.num_devices),
    ]
    for mesh in meshes:
        lines += [toml(""), *_table(plan, mesh, written)]
    notes = _notes(plan, meshes, different_splits(layers), written)
    return Exported(text=joined([*lines, toml("")]), notes=tuple(notes))


def _quoted(text: str) -> str:
    """Return a basic TOML string; invisible characters are escaped."""
    shown = visible(text).replace("\\", "\\\\").replace('"', '\\"')
    return f'"{shown}"'


toml = Grammar(_quoted).write
"""Returns TOML text."""


def _table(plan: Plan, mesh: SharedMesh, written: Mapping[str, str]) -> Iterator[Text]:
    axes = _axis_names(mesh, written)
    shape = ";".join(f"{axis}:{size}" for axis, size in zip(axes, mesh.sizes, strict=True))
    layout = ";".join(f"{written[dim]}:{axes[i]}" for dim, i in mesh.axis_of.items())
    yield toml("[[layouts]]")
    yield toml("mesh_shape = {}", shape)
    yield toml("layout = {}", layout)
    yield toml("layers = [")
    yield from (toml("    {},", plan.layers[i].name) for i in mesh.layers)
    yield toml("]")
    renamed = {written[dim]: dim for dim in mesh.axis_of if written[dim] != dim}
    if renamed:
        yield toml("[layouts.dims]  # as the plan calls them")
        yield from (toml("{} = {}", name, dim) for name, dim in renamed.items())


def _axis_names(mesh: SharedMesh, written: Mapping[str, str]) -> list[str]:
    """Return a name for each axis: that of the first dim on it, with a 0 appended to differ from the dim's."""
    first: dict[int, str] = {}
    for dim, i in mesh.axis_of.items():
        first.setdefault(i, f"{written[dim]}0")
    replicas = "replicas0"
    while replicas in first.values():
        replicas += "0"
    return [first.get(i, replicas) for i in range(len(mesh.sizes))]


def _written_dims(dims: set[str]) -> dict[str, str]:
    """Return the name of each dim in a layout, where , . ; : and white space are separators."""
    found = {dim: dim for dim in dims if re.fullmatch(r"[^\s,.;:]+", dim) and visible(dim) == dim}
    taken = set(found)
    for dim in sorted(dims - taken):
        plain = name = re.sub(r"\W+", "_", dim, flags=re.ASCII)[:40].strip("_") or "dim"
        count = 1
        while name in taken:
            count += 1
            name = f"{plain}_{count}"
        found[dim] = name
        taken.add(name)
    return found


def _notes(
    plan: Plan,
    meshes: Sequence[SharedMesh],
    different: Mapping[str, Mapping[int, Sequence[int]]],
    written: Mapping[str, str],
) -> Iterator[str]:
    if len(meshes) > 1:
        others = sorted(i for mesh in meshes[1:] for i in mesh.layers)
        yield (
            f"one layout cannot say this strategy: it takes {len(meshes)}. The first one is for "
            f"{len(meshes[0].layers)} of {len(plan.layers)} layers, not for {_layers(plan, others)}"
        )
        for dim, by_parts in list(different.items())[:_MOST_DIMS]:
            ways = "; ".join(f"{_ways(parts)} in {_layers(plan, found, most=3)}" for parts, found in by_parts.items())
            yield f"dim {short(dim)} is split {ways}"
        if len(different) > _MOST_DIMS:
            yield f"{len(different) - _MOST_DIMS} more dims are split differently in different layers"
        if not different:
            yield "no dim is split in two ways, but no one mesh has axes for all of them"
    changed = sorted(dim for dim in {dim for mesh in meshes for dim in mesh.axis_of} if written[dim] != dim)
    if changed:
        yield f"dims whose names cannot stand in a layout have others, which the file tells: {listed(changed)}"
    if any(layer.devices != tuple(range(plan.num_devices)) for layer in plan.layers):
        yield "a layout does not say which device holds which part: the plan's placement is left out"


def _ways(parts: int) -> str:
    return "not at all" if parts == 1 else f"{parts} ways"


def _layers(plan: Plan, positions: Sequence[int], *, most: int = 8) -> str:
    return listed([plan.layers[i].name for i in positions], most=most)
