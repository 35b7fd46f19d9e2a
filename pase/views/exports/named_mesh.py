"""A plan for frameworks with named meshes: a Python module with the mesh, and a table of layers' tensors.

For JAX the table has the PartitionSpec of each tensor, for PyTorch the placements of a DTensor.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from pase.common.words import listed, quantity
from pase.costs import STATES
from pase.graph import Graph, Operator
from pase.graph.operator import SCANNED
from pase.planning.constraints import with_ties
from pase.planning.plan import Plan, check_even, check_one_stage
from pase.planning.problems import problem_of_plan
from pase.solver import solve
from pase.targets.emitter.text import Part as TextPart
from pase.targets.emitter.text import Text, code, comment, docstring, joined, printable
from pase.targets.named_mesh import NamedDim, NamedLayer, NamedMesh, NamedTensor, named_mesh, notes, without_miscomputed
from pase.views.exports import Exported, ExportOptions

_WIDTH = 110
"""Characters in a row of device numbers."""

TensorText = Callable[[NamedTensor], Text | None]
"""Returns the sharding of a tensor, as an expression; None where it is not expressed."""


def _heading(plan: Plan, framework: Text, notes: Sequence[str], usage: Text) -> list[Text]:
    """Return the docstring of a module: the plan, its usage, and what the module does not express."""
    title = f"{printable(plan.graph.name)} on {plan.num_devices} devices: its strategy for {framework}, by PaSE."
    missing = ["", "Not said here:", *(f"- {printable(note, 1000)}" for note in notes)] if notes else []
    return [*docstring([title, "", usage, *missing]), code("")]


def _constants(mesh: NamedMesh, about: str) -> list[Text]:
    """Return the lines that define MESH_SHAPE, AXIS_NAMES and DEVICE_ORDER; about: contents of DEVICE_ORDER."""
    return [
        code("MESH_SHAPE = {}", _tuple(mesh.sizes)),
        code("AXIS_NAMES = {}", _tuple(mesh.names)),
        comment(about),
        *_devices(mesh.devices),
        code(""),
    ]


def _tuple(members: Sequence[TextPart]) -> Text:
    return code("({})" if len(members) > 1 else "({},)", members)


def _devices(devices: Sequence[int]) -> Iterator[Text]:
    if list(devices) == list(range(len(devices))):
        yield code("DEVICE_ORDER = tuple(range({}))", len(devices))
        return
    yield code("DEVICE_ORDER = (")
    row: list[int] = []
    for device in devices:
        if len(code("{}, ", row)) > _WIDTH:
            yield code("    {},", row)
            row = []
        row.append(device)
    yield code("    {},", row)
    yield code(")")


def _table(name: Text, layers: Sequence[NamedLayer], groups: Mapping[str, TensorText], plan: Plan) -> list[Text]:
    """Return the lines of a dict: for each layer, the shardings of its inputs, parameters and outputs.

    Args:
        name: Name of the dict.
        layers: Layers on the mesh.
        groups: How tensors are written in "inputs", "parameters", "outputs", and in further lists of outputs, which a
            layer has only where they are not empty.
        plan: The plan of the layers.
    """
    lines = [code("{} = {", name)]
    for layer in layers:
        lines += _entry(layer, groups, plan.modes_of(plan[layer.name]))
    return [*lines, code("}")]


def _entry(layer: NamedLayer, groups: Mapping[str, TensorText], modes: Sequence[str]) -> Iterator[Text]:
    splits = " ".join(f"{printable(dim)}={split}" for dim, split in layer.splits.items()) or "not split"
    splits = ", ".join([splits, *modes])
    elsewhere = "" if layer.keeps_devices else "; on other devices than the plan's"
    yield code("    {}", comment(f"{printable(layer.name)} ({printable(layer.kind)}): {splits}{elsewhere}"))
    for reason in layer.reasons:
        yield code("    {}", comment(f"not said: {printable(reason, 160)}"))
    yield code("    {}: {", layer.name)
    tensors = {"inputs": layer.inputs, "parameters": layer.parameters}
    for group, text in groups.items():
        members = [(tensor, text(tensor)) for tensor in tensors.get(group, layer.outputs)]
        if group not in _ALWAYS and not any(said for _, said in members):
            continue
        is_named = group == "parameters"
        begin, end = (code("{"), code("}")) if is_named else (code("["), code("]"))
        if not members:
            yield code("        {}: {}{},", group, begin, end)
            continue
        yield code("        {}: {}", group, begin)
        for tensor, said in members:
            key = code("{}: ", tensor.name) if is_named else code("")
            shared = f", shared as {printable(tensor.shared)}" if tensor.shared else ""
            about = f"{'' if is_named else printable(tensor.name) + ' '}{list(tensor.shape)}{shared}"
            yield code("            {}{},  {}", key, code("None") if said is None else said, comment(about))
        yield code("        {},", end)
    yield code("    },")


_ALWAYS = ("inputs", "parameters", "outputs")


def step_notes(plan: Plan, wrapper: str) -> tuple[str, ...]:
    """Return what tensors' specs do not express of a step: its micro-batches and layer modes.

    wrapper: wrapper of a recomputed layer.
    """
    found = []
    m = plan.micro_batches
    if m > 1:
        found.append(f"a step has {m} micro-batches: shapes are of one of them, and their gradients are added up")
    for state in STATES[1:]:
        names = [layer.name for layer in plan if layer.state == state]
        if names:
            found.append(
                f"state of weights {state}: {listed(names)}; their parameters are as these layers read them, not as "
                "their devices store them between steps"
            )
    recomputed = [layer.name for layer in plan if layer.is_recomputed]
    if recomputed:
        found.append(f"recomputed in the backward pass ({wrapper}): {listed(recomputed)}")
    return tuple(found)


# -- JAX

_TIME_LIMIT_S = 10.0


def scan_notes(plan: Plan) -> tuple[str, ...]:
    """Return a note that names the layers of a loop whose splits differ between iterations, if there are any."""
    places = scanned_layers(plan.graph)
    unlike = [
        name for names in places.values() if len({tuple(plan[n].splits.items()) for n in names}) > 1 for name in names
    ]
    if not unlike:
        return ()
    problem = problem_of_plan(plan)
    solution = solve(with_ties(problem, places.values()).tables, time_limit_s=_TIME_LIMIT_S)
    found = "the cheapest strategy" if solution.exact else "a strategy"
    note = (
        f"split differently in iterations of one lax.scan: {listed(unlike)}; a scan has one body, and so one spec for "
        f"all iterations: unroll the loop, or give all the specs of one; {found} with equal iterations costs "
        f"{quantity(solution.cost, plan.cost_unit)}, this one {quantity(plan.total_cost, plan.cost_unit)}"
    )
    return (note,)


def scanned_layers(graph: Graph) -> Mapping[str, tuple[str, ...]]:
    """Return the layers of all iterations of a loop, by their place in its body, if they can be split equally."""
    found: dict[str, list[Operator]] = {}
    for operator in graph.operators:
        place = operator.attribute(SCANNED, "")
        if place:
            found.setdefault(place, []).append(operator)
    return {
        place: tuple(operator.name for operator in turns)
        for place, turns in found.items()
        if len({(operator.dims, operator.unsplittable) for operator in turns}) == 1
    }


_USE_OF_JAX = code(
    """\
    mesh = make_mesh()
    w = jax.device_put(w, sharding(mesh, SPECS[layer]["parameters"]["w"]))
    x = jax.lax.with_sharding_constraint(x, sharding(mesh, SPECS[layer]["inputs"][0]))   # within jax.jit

A spec has an entry for each dim of the tensor, in the order of its shape, which follows it."""
)

_IMPORTS_OF_JAX = code(
    """\
import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
"""
)

_FUNCTIONS_OF_JAX = code(
    '''
def make_mesh(devices=None):
    """Return the mesh; devices: those that the plan numbers from 0; default: jax.devices()."""
    devices = list(jax.devices() if devices is None else devices)
    if len(devices) < len(DEVICE_ORDER):
        raise ValueError(f"the plan is for {len(DEVICE_ORDER)} devices; found {len(devices)}")
    ordered = np.empty(len(DEVICE_ORDER), dtype=object)
    ordered[:] = [devices[number] for number in DEVICE_ORDER]
    return Mesh(ordered.reshape(MESH_SHAPE), AXIS_NAMES)


def sharding(mesh, spec):
    """Return the sharding of a tensor on the mesh."""
    return NamedSharding(mesh, spec)

'''
)


def write_jax(plan: Plan, options: ExportOptions) -> Exported:
    """Return a Python module that defines a mesh and SPECS, the PartitionSpec of each tensor of each layer.

    Where a spec cannot express how the plan splits a dim of a tensor that a layer computes, the dim is left to the
    compiler. Such dims of data and parameters are not split; neither are those that XLA would compute incorrectly
    (`without_miscomputed`). Notes name the layers.
    """
    check_one_stage(plan, "a table of specs on one mesh")
    check_even(plan, "JAX")
    mesh = without_miscomputed(plan, named_mesh(plan))
    found = (*step_notes(plan, "jax.checkpoint"), *scan_notes(plan), *notes(mesh))
    groups = {"inputs": _spec, "parameters": _spec, "outputs": _spec}
    lines = [
        *_heading(plan, code("JAX"), found, _USE_OF_JAX),
        _IMPORTS_OF_JAX,
        *_constants(mesh, "The plan's number of the device at each place of the mesh, row-major."),
        _FUNCTIONS_OF_JAX,
        *_table(code("SPECS"), mesh.layers, groups, plan),
        code(""),
    ]
    return Exported(text=joined(lines), notes=found)


def _spec(tensor: NamedTensor) -> Text:
    return code("P({})", [_spec_entry(dim, is_made=tensor.is_made) for dim in tensor.dims])


def _spec_entry(dim: NamedDim, *, is_made: bool) -> Text:
    if dim.is_open and is_made:
        return code("P.UNCONSTRAINED")
    match dim.axes:
        case ():
            return code("None")
        case (axis,):
            return code("{}", axis)
        case axes:
            return code("({})", axes)


# -- PyTorch

_USE_OF_TORCH = code(
    """\
    torch.cuda.set_device(DEVICE_ORDER[rank])   # where the host's devices are those of the plan
    mesh = device_mesh("cuda")
    w = distribute_tensor(w, mesh, PLACEMENTS[layer]["parameters"]["w"])
    x = x.redistribute(mesh, PLACEMENTS[layer]["inputs"][0])

Placements have an entry for each dim of the mesh. "partial_outputs" are the outputs of a layer that splits what it sums
over, before the parts are added up; "outputs" are what the plan has after that."""
)

_IMPORTS_OF_TORCH = code(
    """\
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate, Shard
"""
)

_FUNCTIONS_OF_TORCH = code(
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


def write_torch(plan: Plan, options: ExportOptions) -> Exported:
    """Return a Python module that defines a device mesh and PLACEMENTS, those of each tensor of each layer.

    Where placements cannot express how the plan splits a dim, the dim is not split. Notes name the layers.
    """
    # Ranks are in the order of the mesh, and devices are assigned to them: DTensor sends shards to the wrong processes
    # where the ranks of a mesh do not ascend (PyTorch 2.13: it scatters and gathers in the order of a group's ranks).
    check_one_stage(plan, "a table of placements")
    check_even(plan, "a table of placements")
    mesh = named_mesh(plan)
    ordered = in_mesh_order(mesh)
    found = (*step_notes(plan, "torch.utils.checkpoint"), *notes(mesh), *_reordered(mesh, ordered))
    groups: Mapping[str, TensorText] = {
        **dict.fromkeys(("inputs", "parameters", "outputs"), lambda tensor: _placements(tensor, mesh.names, ())),
        "partial_outputs": lambda tensor: _placements(tensor, mesh.names, tensor.sums) if tensor.sums else None,
    }
    lines = [
        *_heading(plan, code("PyTorch's DTensor"), found, _USE_OF_TORCH),
        _IMPORTS_OF_TORCH,
        *_constants(mesh, "The plan's number of the device that the process of each rank uses."),
        _FUNCTIONS_OF_TORCH,
        *_table(code("PLACEMENTS"), ordered.layers, groups, plan),
        code(""),
    ]
    return Exported(text=joined(lines), notes=found)


def _placements(tensor: NamedTensor, names: tuple[str, ...], sums: tuple[str, ...]) -> Text:
    by_axis = {axis: code("Shard({})", number) for number, dim in enumerate(tensor.dims) for axis in dim.axes}
    by_axis |= dict.fromkeys(sums, code("Partial()"))
    return code("[{}]", [by_axis.get(name, code("Replicate()")) for name in names])


def in_mesh_order(mesh: NamedMesh) -> NamedMesh:
    """Return the mesh with the axes of every dim in the order of the mesh, the only order that placements have."""
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
