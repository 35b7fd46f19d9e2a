"""What the blocks of all programs begin with: a comment, the dims, the mesh, the windows."""

from collections.abc import Mapping, Sequence

from pase.graph import Operator
from pase.planning.plan import LayerPlan, Plan
from pase.sharding.layouts import WindowDim
from pase.targets.mesh_tensorflow.emitter.text import (
    INDENT,
    WIDTH,
    Text,
    call,
    code,
    comment,
    devices_argument,
    printable,
    together,
)


def commented(layer: LayerPlan, formula: str) -> Text:
    """Return the comment that a block begins with: its name, its splits, what it computes."""
    splits = " ".join(f"{dim}={parts}" for dim, parts in layer.splits.items() if parts != 1) or "not split"
    head = f"-- {printable(layer.name)}   {printable(splits)}"
    room = WIDTH - len(INDENT) - len("# ")
    padded = f"{head:<49} {formula}"
    return code("{}{}", INDENT, comment(padded if len(padded) <= room else f"{head}   {formula}"[:room].rstrip()))


def block_dims(operator: Operator, variables: Mapping[str, Text]) -> list[Text]:
    """Return the lines that declare an iteration space."""
    # Extents by keyword where the name is what the variable is called, as pairs before them otherwise.
    pairs = [dim for dim in operator.dims if variables[dim.name] != dim.name]
    plain = [dim for dim in operator.dims if variables[dim.name] == dim.name]
    targets = [variables[dim.name] for dim in (*pairs, *plain)]
    arguments = [code("({}, {})", dim.name, dim.extent) for dim in pairs]
    arguments += [code("{}={}", variables[dim.name], dim.extent) for dim in plain]
    return call(code("{}, = dims" if len(targets) == 1 else "{} = dims", targets), arguments)


def block_mesh(plan: Plan, layer: LayerPlan) -> list[Text]:
    """Return the lines that declare a layer's mesh."""
    axes = [code("({}, {})", dim, parts) for dim, parts in layer.splits.items() if parts != 1]
    head = code("mesh = program.mesh")
    arguments = [code("{}", layer.name), code("[{}]", axes)]
    if tuple(layer.devices) == tuple(range(plan.num_devices)):
        return call(head, arguments)
    short, wrapped = devices_argument(layer.devices)
    lines = call(head, [*arguments, short])
    if all(len(line) <= WIDTH for line in lines):
        return lines
    inner = [code("{}{}{},", INDENT, INDENT, argument) for argument in arguments]
    return [code("{}{}(", INDENT, head), *inner, *wrapped, code("{})  # fmt: skip", INDENT)]


WINDOWS = (code("planes"), code("rows"), code("columns"))
"""Variables of sliding windows: of a line the last alone, of an image the last two."""


def window_variables(dims: Sequence[WindowDim]) -> dict[WindowDim, Text]:
    """Return the variable of each sliding window that a layer reads through."""
    return dict(zip(dims, WINDOWS[-len(dims) :], strict=True)) if dims else {}


def declared_windows(windows: Mapping[WindowDim, Text], variables: Mapping[str, Text]) -> list[Text]:
    """Return the lines that declare sliding windows."""
    return together([(name, code("window"), _window_arguments(dim, variables)) for dim, name in windows.items()])


def _window_arguments(dim: WindowDim, variables: Mapping[str, Text]) -> list[Text]:
    found = [variables[dim.out], variables[dim.kernel], code("of={}", dim.extent)]
    found += [code("stride={}", dim.stride)] if dim.stride != 1 else []
    found += [code("dilation={}", dim.dilation)] if dim.dilation != 1 else []
    return [*found, code("pad={}", dim.pad)] if dim.pad else found
