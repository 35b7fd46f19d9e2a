"""What training programs and those of a forward pass have in common: which layers they hold, checks, head and foot."""

import ast
from collections.abc import Iterable, Sequence

from pase.emitter.text import INDENT, WIDTH
from pase.errors import EmitError
from pase.graph import Graph, Operator
from pase.plan import LayerPlan


def leading_to(graph: Graph, ends: Iterable[str]) -> set[str]:
    """Return the layers that some layers need, themselves included."""
    producers: dict[str, list[str]] = {}
    for edge in graph.edges:
        producers.setdefault(edge.consumer, []).append(edge.producer)
    wanted: set[str] = set()
    frontier = list(ends)
    while frontier:
        name = frontier.pop()
        if name not in wanted:
            wanted.add(name)
            frontier.extend(producers.get(name, ()))
    return wanted


def check_splits(layer: LayerPlan, operator: Operator) -> None:
    """Raise EmitError where a layer's splits are none that a program can have."""
    for dim, parts in layer.splits.items():
        extent = operator.extents.get(dim, 0)
        if not extent or extent % parts or (parts != 1 and dim in operator.unsplittable):
            raise EmitError(
                f"layer {layer.name!r} splits {dim} = {extent} in {parts} parts; a program needs splits that divide "
                f"their dims (of {', '.join(d for d in operator.extents if d not in operator.unsplittable)})"
            )


def layers_import(module: str, names: Iterable[str], body: Sequence[str]) -> str:
    """Return the import of those of some names that a program's body uses."""
    used = {node.id for node in ast.walk(ast.parse("\n".join(body))) if isinstance(node, ast.Name)}
    imports = [name for name in names if name in used]
    line = f"from {module} import {', '.join(imports)}"
    if len(line) > WIDTH:
        return "\n".join([f"from {module} import (", *(f"{INDENT}{name}," for name in imports), ")"])
    return line


def assembled(head: Sequence[str], body: Sequence[str], num_devices: int) -> str:
    """Return the source of a program, which is checked to be Python's."""
    foot = ['if __name__ == "__main__":', f"{INDENT}main(build, num_devices={num_devices})"]
    source = "\n".join([*head, "", "", *body, "", "", *foot, ""])
    compile(source, "<emitted>", "exec", dont_inherit=True)
    return source
