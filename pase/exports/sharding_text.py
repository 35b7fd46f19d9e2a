"""What the modules for JAX and PyTorch have in common: a mesh, and a table of what is said of each layer's tensors."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from pase.emitter.names import printable, quoted
from pase.exports.named_mesh import NamedLayer, NamedMesh, NamedTensor
from pase.plan import Plan

_WIDTH = 110
"""Of a row of device numbers."""

TensorText = Callable[[NamedTensor], str]
"""What is said of a tensor, as an expression."""


def docstring(plan: Plan, framework: str, notes: Sequence[str], lines: Sequence[str]) -> list[str]:
    """Return the docstring of a module: of what plan it is, how it is used, and what it does not say."""
    title = f"{printable(plan.graph.name)} on {plan.num_devices} devices: its strategy for {framework}, by PaSE"
    missing = ["", "Not said here:", *(f"- {printable(note, 1000)}" for note in notes)] if notes else []
    return [f'"""{title}.', "", *lines, *missing, '"""', ""]


def constants(mesh: NamedMesh, comment: str) -> list[str]:
    """Return the lines that define MESH_SHAPE, AXIS_NAMES and DEVICE_ORDER; comment: what the last of them holds."""
    return [
        f"MESH_SHAPE = {_tuple(map(str, mesh.sizes))}",
        f"AXIS_NAMES = {_tuple(map(quoted, mesh.names))}",
        f"# {comment}",
        *_devices(mesh.devices),
        "",
    ]


def _tuple(members: Iterable[str]) -> str:
    written = ", ".join(members)
    return f"({written})" if ", " in written else f"({written},)"


def _devices(devices: Sequence[int]) -> Iterator[str]:
    if list(devices) == list(range(len(devices))):
        yield f"DEVICE_ORDER = tuple(range({len(devices)}))"
        return
    yield "DEVICE_ORDER = ("
    row = ""
    for device in devices:
        if len(row) > _WIDTH:
            yield f"    {row.rstrip()}"
            row = ""
        row += f"{device}, "
    yield f"    {row.rstrip()}"
    yield ")"


def table(name: str, layers: Sequence[NamedLayer], groups: Mapping[str, TensorText]) -> list[str]:
    """Return the lines of a dict: for each layer, what is said of its inputs, parameters and outputs.

    groups: how tensors are written in "inputs", "parameters", "outputs", and in further lists of outputs, which a layer
    has only where that is not empty.
    """
    lines = [f"{name} = {{"]
    for layer in layers:
        lines += _entry(layer, groups)
    return [*lines, "}"]


def _entry(layer: NamedLayer, groups: Mapping[str, TensorText]) -> Iterator[str]:
    splits = " ".join(f"{printable(dim)}={split}" for dim, split in layer.splits.items()) or "not split"
    elsewhere = "" if layer.keeps_devices else "; on other devices than the plan's"
    yield f"    # {printable(layer.name)} ({printable(layer.kind)}): {splits}{elsewhere}"
    for reason in layer.reasons:
        yield f"    # not said: {printable(reason, 160)}"
    yield f"    {quoted(layer.name)}: {{"
    tensors = {"inputs": layer.inputs, "parameters": layer.parameters}
    for group, text in groups.items():
        members = [(tensor, text(tensor)) for tensor in tensors.get(group, layer.outputs)]
        if group not in _ALWAYS and not any(said for _, said in members):
            continue
        is_named = group == "parameters"
        begin, end = "{}" if is_named else "[]"
        if not members:
            yield f"        {quoted(group)}: {begin}{end},"
            continue
        yield f"        {quoted(group)}: {begin}"
        for tensor, said in members:
            key = f"{quoted(tensor.name)}: " if is_named else ""
            yield f"            {key}{said},  # {_comment(tensor, is_named=is_named)}"
        yield f"        {end},"
    yield "    },"


_ALWAYS = ("inputs", "parameters", "outputs")


def _comment(tensor: NamedTensor, *, is_named: bool) -> str:
    shape = str(list(tensor.shape))
    shared = f", shared as {printable(tensor.shared)}" if tensor.shared else ""
    return f"{'' if is_named else printable(tensor.name) + ' '}{shape}{shared}"
