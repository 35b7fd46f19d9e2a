"""`LoweredOperator`: a vertex as its kind defines it, its dims in the usual order, and where its tensors are from."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from pase.graph import Operator
from pase.graph.attributes import IMPORTED_FUNCTIONS, OTHER_FUNCTION
from pase.importers.ir import Node, Trace, Use, View
from pase.importers.passes.uses import composed


@dataclass(frozen=True, slots=True, kw_only=True)
class LoweredOperator:
    """operator: reads and writes in the shapes of its kind. sources: [reads] what each one reads, in that very shape.

    orders: [writes] for each dim of the value in the trace, the dim of the write; None where they are alike.
    approximations: what is not charged as it is, in words.
    """

    operator: Operator
    sources: tuple[Use, ...]
    orders: tuple[tuple[int, ...] | None, ...] = (None,)
    approximations: tuple[str, ...] = field(default=())


def functions_text(functions: Sequence[str]) -> str:
    """Return names of functions as an attribute holds them; what is in no vocabulary has one name for all."""
    return ",".join(name if name in IMPORTED_FUNCTIONS else OTHER_FUNCTION for name in functions)


def shaped(trace: Trace, use: Use, shape: tuple[int, ...]) -> Use:
    """Return a use in another shape of the same size."""
    if trace.shape(use) == shape:
        return use
    view = View.plain(trace.shape(use)).reshaped(shape) if use.seen_as is None else None
    seen = None if view is None else composed(Use(value=use.value, view=view), use, trace.values[use.value].shape)
    return seen or replace(use, piece=None, view=None, seen_as=shape)


def spare(taken: Sequence[str], count: int, letters: str) -> tuple[str, ...]:
    """Return so many names of dims that are not taken, the letters first."""
    found: list[str] = []
    number = 0
    for letter in letters:
        if len(found) < count and letter not in taken:
            found.append(letter)
    while len(found) < count:
        number += 1
        if f"i{number}" not in taken:
            found.append(f"i{number}")
    return tuple(found)


def is_parameter(trace: Trace, use: Use) -> bool:
    """Return whether a use reads a weight."""
    leaf = trace.leaf.get(use.value)
    return leaf is not None and leaf.role == "parameter"


def repeated(trace: Trace, use: Use, heads: int) -> Use:
    """Return a use of [b, g, t, k] with each of the g heads repeated to give so many."""
    shape = trace.shape(use)
    if use.seen_as is not None:
        return replace(use, seen_as=(shape[0], heads, *shape[2:]))
    plain = View.plain(shape)
    apart = plain.reshaped((*shape[:2], 1, *shape[2:]))
    assert apart is not None
    wide = apart.broadcast((*shape[:2], heads // shape[1], *shape[2:]), range(5))
    view = wide.reshaped((shape[0], heads, *shape[2:]))
    assert view is not None
    seen = composed(Use(value=use.value, view=view), use, trace.values[use.value].shape)
    return seen or replace(use, piece=None, view=None, seen_as=view.shape)


def reordered(trace: Trace, use: Use, order: Sequence[int]) -> Use:
    """Return a use with its dims in another order."""
    shape = trace.shape(use)
    if tuple(order) == tuple(range(len(shape))):
        return use
    if use.seen_as is not None:
        return replace(use, seen_as=tuple(shape[i] for i in order))
    view = View.plain(shape).transposed(order)
    seen = composed(Use(value=use.value, view=view), use, trace.values[use.value].shape)
    assert seen is not None, "dims can always be put in another order"
    return seen


def shapes(trace: Trace, node: Node) -> list[tuple[int, ...]]:
    """Return the shapes in which a node reads its inputs."""
    return [trace.shape(use) for use in node.inputs]
