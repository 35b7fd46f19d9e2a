"""Mesh-TensorFlow's own words for a strategy: mesh shapes and layout rules, each for the layers that share them.

A layout of Mesh-TensorFlow maps names of dims to axes of one mesh, whatever the layer. The strategies that PaSE finds
split a dim of one name differently in different layers: those need several layouts.
"""

import re
from collections.abc import Iterator, Mapping, Sequence

from pase.graph.names import listed, short, visible
from pase.planning.plan import Plan
from pase.targets.mesh_tensorflow.emitter.text import Grammar, Text, joined
from pase.views.exports.registry import Exported, ExportOptions
from pase.views.exports.shared_meshes import SharedMesh, different_splits, shared_meshes

_MOST_DIMS = 12
"""Dims that the notes tell of."""


def write(plan: Plan, options: ExportOptions) -> Exported:
    """Return a TOML document with one table for each mesh and its layout, the one that says most layers first."""
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
    """Return a basic string of TOML; what does not show stands in it as backslash and code."""
    shown = visible(text).replace("\\", "\\\\").replace('"', '\\"')
    return f'"{shown}"'


toml = Grammar(_quoted).write
"""Returns text of TOML."""


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
    """Return a name for each axis: of the first dim on it, with a 0, so that it is never taken for the dim."""
    first: dict[int, str] = {}
    for dim, i in mesh.axis_of.items():
        first.setdefault(i, f"{written[dim]}0")
    replicas = "replicas0"
    while replicas in first.values():
        replicas += "0"
    return [first.get(i, replicas) for i in range(len(mesh.sizes))]


def _written_dims(dims: set[str]) -> dict[str, str]:
    """Return what each dim is called in a layout, in which , . ; : and white space part names from one another."""
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
