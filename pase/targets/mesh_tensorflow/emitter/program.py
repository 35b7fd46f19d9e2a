"""What training programs and those of a forward pass have in common: which layers they hold, checks, head and foot."""

import ast
from collections.abc import Iterable, Mapping, Sequence

from pase.errors import EmitError
from pase.graph import Operator
from pase.graph.loss import is_imported
from pase.planning.plan import LayerPlan, Plan
from pase.targets.mesh_tensorflow.emitter.text import INDENT, WIDTH, Text, code, docstring, joined, printable, word

TRAINING = (
    "A block is a layer: its dims, its mesh, what it reads, what it computes. The axes of a mesh are the dims that",
    "are split, with their numbers of parts; the parts go to the devices row-major, and devices left over hold",
    "replicas. Edit the axes of a mesh and run again: the losses stay the same. Bytes are those of a float32 step.",
    "",
    "    python FILE --steps 10 [--data batches.npz] [--dtype float64] [--learning-rate 0.01] [--json]",
)
"""What the head of every training program says."""


def check_splits(layer: LayerPlan, operator: Operator) -> None:
    """Raise EmitError where a layer's splits are none that a program can have."""
    for dim, parts in layer.splits.items():
        extent = operator.extents.get(dim, 0)
        if not extent or extent % parts or (parts != 1 and dim in operator.unsplittable):
            raise EmitError(
                f"layer {layer.name!r} splits {dim} = {extent} in {parts} parts; a program needs splits that divide "
                f"their dims (of {', '.join(d for d in operator.extents if d not in operator.unsplittable)})"
            )


def training_head(plan: Plan, body: Sequence[Text], layers: Mapping[Text, Sequence[str]]) -> list[Text]:
    """Return the head of a training program; layers: what it may import, by module."""
    arguments = ", ".join(f"{name}={value}" for name, value in plan.graph.arguments)
    title = f"{printable(plan.graph.name, 50)} on {plan.num_devices} devices"
    made = "imported" if is_imported(plan.graph) else "built"
    built = [f"The network was {made} with {printable(arguments, 90)}.", ""] if arguments else []
    imports = [line for module, names in layers.items() for line in layers_import(module, names, body)]
    return [
        *docstring([f"{title}: a training program for Mesh-TensorFlow.", "", *built, *TRAINING]),
        code(""),
        code("from pase.targets.mesh_tensorflow.primitives.compat import mtf"),
        *imports,
        code("from pase.targets.mesh_tensorflow.runtime.program import Program"),
        code("from pase.targets.mesh_tensorflow.runtime.script import main"),
    ]


def layers_import(module: Text, names: Iterable[str], body: Sequence[Text]) -> list[Text]:
    """Return the import of those of some names that a program's body uses."""
    used = {node.id for node in ast.walk(ast.parse(joined(body))) if isinstance(node, ast.Name)}
    imports = [word(name, names) for name in names if name in used]
    line = code("from {} import {}", module, imports)
    if len(line) <= WIDTH:
        return [line]
    return [code("from {} import (", module), *(code("{}{},", INDENT, name) for name in imports), code(")")]


def assembled(head: Sequence[Text], body: Sequence[Text], num_devices: int) -> str:
    """Return the source of a program, which is checked to be Python's."""
    apart = (code(""), code(""))
    foot = [code('if __name__ == "__main__":'), code("{}main(build, num_devices={})", INDENT, num_devices), code("")]
    source = str(joined([*head, *apart, *body, *apart, *foot]))
    compile(source, "<emitted>", "exec", dont_inherit=True)
    return source
