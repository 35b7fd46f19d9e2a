"""What the blocks of all programs begin with: a comment, the dims, the mesh, the windows."""

from collections.abc import Mapping

from pase.emitter.names import printable, quoted
from pase.emitter.text import INDENT, WIDTH, call, devices_argument
from pase.graph import Operator
from pase.plan import LayerPlan, Plan
from pase.runtime.layouts import WindowDim


def commented(layer: LayerPlan, formula: str) -> str:
    """Return the comment that a block begins with: its name, its splits, what it computes."""
    splits = " ".join(f"{dim}={parts}" for dim, parts in layer.splits.items() if parts != 1) or "not split"
    head = f"{INDENT}# -- {printable(layer.name)}   {printable(splits)}"
    text = printable(formula, WIDTH)
    padded = f"{head:<55} {text}"
    return padded if len(padded) <= WIDTH else f"{head}   {text}"[:WIDTH].rstrip()


def block_dims(operator: Operator, variables: Mapping[str, str]) -> list[str]:
    """Return the lines that declare an iteration space."""
    # Extents by keyword where the name is what the variable is called, as pairs before them otherwise.
    pairs = [dim for dim in operator.dims if variables[dim.name] != dim.name]
    plain = [dim for dim in operator.dims if variables[dim.name] == dim.name]
    targets = ", ".join(variables[dim.name] for dim in (*pairs, *plain))
    arguments = [f"({quoted(dim.name)}, {dim.extent})" for dim in pairs]
    arguments += [f"{dim.name}={dim.extent}" for dim in plain]
    return call(f"{targets}{',' if len(operator.dims) == 1 else ''} = dims", arguments)


def block_mesh(plan: Plan, layer: LayerPlan) -> list[str]:
    """Return the lines that declare a layer's mesh."""
    axes = ", ".join(f"({quoted(dim)}, {parts})" for dim, parts in layer.splits.items() if parts != 1)
    arguments = [quoted(layer.name), f"[{axes}]"]
    if tuple(layer.devices) == tuple(range(plan.num_devices)):
        return call("mesh = program.mesh", arguments)
    short, wrapped = devices_argument(layer.devices)
    lines = call("mesh = program.mesh", [*arguments, short])
    if all(len(line) <= WIDTH for line in lines):
        return lines
    inner = [f"{INDENT}{INDENT}{argument}," for argument in arguments]
    return [f"{INDENT}mesh = program.mesh(", *inner, *wrapped, f"{INDENT})  # fmt: skip"]


def window_arguments(dim: WindowDim, variables: Mapping[str, str]) -> list[str]:
    """Return the arguments of a sliding window."""
    arguments = [variables[dim.out], variables[dim.kernel], f"of={dim.extent}"]
    for name, value, default in (("stride", dim.stride, 1), ("dilation", dim.dilation, 1), ("pad", dim.pad, 0)):
        if value != default:
            arguments.append(f"{name}={value}")
    return arguments
