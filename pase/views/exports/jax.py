"""A plan for JAX: a module with a mesh and the PartitionSpec of each tensor of each layer."""

from pase.planning.plan import Plan
from pase.targets.mesh_tensorflow.emitter.text import Text, code, joined
from pase.views.exports.named_mesh import NamedDim, NamedTensor, named_mesh, notes
from pase.views.exports.registry import Exported, ExportOptions
from pase.views.exports.scans import scan_notes
from pase.views.exports.sharding_text import constants, heading, table
from pase.views.exports.xla_convolutions import without_miscomputed

_USE = code(
    """\
    mesh = make_mesh()
    w = jax.device_put(w, sharding(mesh, SPECS[layer]["parameters"]["w"]))
    x = jax.lax.with_sharding_constraint(x, sharding(mesh, SPECS[layer]["inputs"][0]))   # within jax.jit

A spec has an entry for each dim of the tensor, in the order of its shape, which stands beside it."""
)

_IMPORTS = code(
    """\
import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
"""
)

_FUNCTIONS = code(
    '''
def make_mesh(devices=None):
    """Return the mesh; devices: that the plan numbers from 0, by default those of JAX."""
    devices = list(jax.devices() if devices is None else devices)
    if len(devices) < len(DEVICE_ORDER):
        raise ValueError(f"the plan is for {len(DEVICE_ORDER)} devices; found {len(devices)}")
    ordered = np.empty(len(DEVICE_ORDER), dtype=object)
    ordered[:] = [devices[number] for number in DEVICE_ORDER]
    return Mesh(ordered.reshape(MESH_SHAPE), AXIS_NAMES)


def sharding(mesh, spec):
    """Return how a tensor lies on the mesh."""
    return NamedSharding(mesh, spec)

'''
)


def write(plan: Plan, options: ExportOptions) -> Exported:
    """Return a Python module that defines a mesh and SPECS, the PartitionSpec of each tensor of each layer.

    Where a spec cannot say how the plan splits a dim of a tensor that a layer makes, it leaves the dim to the compiler;
    data and parameters are not split there, nor what XLA would compute wrong (`without_miscomputed`). Notes name the
    layers.
    """
    mesh = without_miscomputed(plan, named_mesh(plan))
    found = (*scan_notes(plan), *notes(mesh))
    groups = {"inputs": _spec, "parameters": _spec, "outputs": _spec}
    lines = [
        *heading(plan, code("JAX"), found, _USE),
        _IMPORTS,
        *constants(mesh, "The plan's number of the device at each place of the mesh, row-major."),
        _FUNCTIONS,
        *table(code("SPECS"), mesh.layers, groups),
        code(""),
    ]
    return Exported(text=joined(lines), notes=found)


def _spec(tensor: NamedTensor) -> Text:
    return code("P({})", [_entry(dim, is_made=tensor.is_made) for dim in tensor.dims])


def _entry(dim: NamedDim, *, is_made: bool) -> Text:
    if dim.is_open and is_made:
        return code("P.UNCONSTRAINED")
    match dim.axes:
        case ():
            return code("None")
        case (axis,):
            return code("{}", axis)
        case axes:
            return code("({})", axes)
