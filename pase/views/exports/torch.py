"""A plan for PyTorch: a module with a device mesh and the DTensor placements of each tensor of each layer."""

from collections.abc import Mapping
from dataclasses import replace

from pase.common.names import listed
from pase.planning.plan import Plan, check_even, check_plain
from pase.targets.emitter.text import Text, code, joined
from pase.targets.named_mesh import NamedLayer, NamedMesh, NamedTensor, named_mesh, notes
from pase.views.exports.named_mesh import TensorText, constants, heading, table
from pase.views.exports.registry import Exported, ExportOptions

_USE = code(
    """\
    torch.cuda.set_device(DEVICE_ORDER[rank])   # where the host's devices are those of the plan
    mesh = device_mesh("cuda")
    w = distribute_tensor(w, mesh, PLACEMENTS[layer]["parameters"]["w"])
    x = x.redistribute(mesh, PLACEMENTS[layer]["inputs"][0])

Placements have an entry for each dim of the mesh. "partial_outputs" are the outputs of a layer that splits what it sums
over, before the parts are added up; "outputs" are what the plan has after that."""
)

_IMPORTS = code(
    """\
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate, Shard
"""
)

_FUNCTIONS = code(
    '''
def device_mesh(device_type="cuda"):
    """Return the mesh; every process of the group calls it, after torch.distributed.init_process_group."""
    world_size = torch.distributed.get_world_size()
    if world_size != len(DEVICE_ORDER):
        raise ValueError(f"the plan is for {len(DEVICE_ORDER)} processes; the group has {world_size}")
    ranks = torch.arange(world_size).reshape(MESH_SHAPE)
    return DeviceMesh(device_type, ranks, mesh_dim_names=AXIS_NAMES)

'''
)


def write(plan: Plan, options: ExportOptions) -> Exported:
    """Return a Python module that defines a device mesh and PLACEMENTS, those of each tensor of each layer.

    Where placements cannot say how the plan splits a dim, the dim is not split. Notes name the layers.
    """
    # Ranks are in the order of the mesh, and devices are given to them: DTensor sends parts to the wrong processes
    # where a mesh has ranks that do not ascend (PyTorch 2.13: it scatters and gathers in the order of a group's ranks).
    check_plain(plan, "a table of placements")
    check_even(plan, "a table of placements")
    mesh = named_mesh(plan)
    ordered = in_mesh_order(mesh)
    found = (*notes(mesh), *_reordered(mesh, ordered))
    groups: Mapping[str, TensorText] = {
        **dict.fromkeys(("inputs", "parameters", "outputs"), lambda tensor: _placements(tensor, mesh.names, ())),
        "partial_outputs": lambda tensor: _placements(tensor, mesh.names, tensor.sums) if tensor.sums else None,
    }
    lines = [
        *heading(plan, code("PyTorch's DTensor"), found, _USE),
        _IMPORTS,
        *constants(mesh, "The plan's number of the device that the process of each rank uses."),
        _FUNCTIONS,
        *table(code("PLACEMENTS"), ordered.layers, groups),
        code(""),
    ]
    return Exported(text=joined(lines), notes=found)


def _placements(tensor: NamedTensor, names: tuple[str, ...], sums: tuple[str, ...]) -> Text:
    by_axis = {axis: code("Shard({})", number) for number, dim in enumerate(tensor.dims) for axis in dim.axes}
    by_axis |= dict.fromkeys(sums, code("Partial()"))
    return code("[{}]", [by_axis.get(name, code("Replicate()")) for name in names])


def in_mesh_order(mesh: NamedMesh) -> NamedMesh:
    """Return the mesh with every dim split by its axes in the order of the mesh, the one order that placements have."""
    place = {name: number for number, name in enumerate(mesh.names)}

    def sorted_axes(axes: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(sorted(axes, key=place.__getitem__))

    def changed(tensor: NamedTensor) -> NamedTensor:
        return replace(tensor, dims=tuple(replace(dim, axes=sorted_axes(dim.axes)) for dim in tensor.dims))

    def in_order(layer: NamedLayer) -> NamedLayer:
        axes = {dim: sorted_axes(of_dim) for dim, of_dim in layer.axes.items()}
        if axes == layer.axes:
            return layer
        return replace(layer.with_tensors(changed), axes=axes, keeps_devices=False)

    return replace(mesh, layers=tuple(map(in_order, mesh.layers)))


def _reordered(mesh: NamedMesh, ordered: NamedMesh) -> tuple[str, ...]:
    names = [
        before.name
        for before, after in zip(mesh.layers, ordered.layers, strict=True)
        if before.keeps_devices and not after.keeps_devices
    ]
    if not names:
        return ()
    note = (
        f"on other devices than the plan's: {listed(names)}; DTensor counts the parts of a dim in the order of the "
        "mesh's dims, the plan in another: the same numbers, other traffic"
    )
    return (note,)
