"""What the modules for JAX and PyTorch have that is the same in both: a mesh, and a table of layers' tensors."""

from collections.abc import Callable, Iterator, Mapping, Sequence

from pase.planning.plan import Plan
from pase.targets.emitter.text import Part as TextPart
from pase.targets.emitter.text import Text, code, comment, docstring, printable
from pase.targets.named_mesh import NamedLayer, NamedMesh, NamedTensor

_WIDTH = 110
"""Characters in a row of device numbers."""

TensorText = Callable[[NamedTensor], Text | None]
"""What is said of a tensor, as an expression; None where nothing is."""


def heading(plan: Plan, framework: Text, notes: Sequence[str], usage: Text) -> list[Text]:
    """Return the docstring of a module: of what plan it is, how it is used, and what it does not say."""
    title = f"{printable(plan.graph.name)} on {plan.num_devices} devices: its strategy for {framework}, by PaSE."
    missing = ["", "Not said here:", *(f"- {printable(note, 1000)}" for note in notes)] if notes else []
    return [*docstring([title, "", usage, *missing]), code("")]


def constants(mesh: NamedMesh, about: str) -> list[Text]:
    """Return the lines that define MESH_SHAPE, AXIS_NAMES and DEVICE_ORDER; about: what the last of them holds."""
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


def table(name: Text, layers: Sequence[NamedLayer], groups: Mapping[str, TensorText]) -> list[Text]:
    """Return the lines of a dict: for each layer, what is said of its inputs, parameters and outputs.

    groups: how tensors are written in "inputs", "parameters", "outputs", and in further lists of outputs, which a layer
    has only where that is not empty.
    """
    lines = [code("{} = {", name)]
    for layer in layers:
        lines += _entry(layer, groups)
    return [*lines, code("}")]


def _entry(layer: NamedLayer, groups: Mapping[str, TensorText]) -> Iterator[Text]:
    splits = " ".join(f"{printable(dim)}={split}" for dim, split in layer.splits.items()) or "not split"
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
