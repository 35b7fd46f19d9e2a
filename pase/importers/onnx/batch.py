"""Another batch in a model whose exporter wrote the one that it saw into the targets of reshapes and the like.

Shapes with the exported batch are at hand (the reference). A dim of an input that has grown with the batch must be
found again in the output; where the stored target does not let it, the target is changed.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from types import MappingProxyType

Shape = tuple[int, ...]

RESHAPES = frozenset({"Reshape", "Flatten", "Squeeze", "Unsqueeze"})
"""Operators that leave the elements in order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Baked:
    """An operator that takes a target. shape: of its input now; before, result: of input and output in the reference.

    target: the stored one. old, new: batches. outside: what comes before the batch in the dim of the input that has it.
    """

    shape: Shape
    before: Shape
    result: Shape
    target: Shape
    old: int
    new: int
    outside: int = 1

    @property
    def grown(self) -> int | None:
        """The dim of the input that has grown with the batch; None where it is none, or not one alone."""
        return grown(self.shape, self.before, self.old, self.new)

    @property
    def outer(self) -> int:
        """Elements that come before the batch in the reference, row-major."""
        return prod(self.before[: self.grown or 0]) * self.outside


def unbaked(operator: str, baked: Baked) -> Shape | None:
    """Return the target with the new batch; None where it is right as it is, or nothing is known of the operator."""
    change = _TARGETS.get(operator)
    found = change(baked) if change is not None else None
    return None if found == baked.target else found


def target_position(operator: str, num_inputs: int) -> int | None:
    """Return which input is an operator's target, if it takes one."""
    if operator == "Resize":
        return 3 if num_inputs > 3 else None
    return 1 if operator in _TARGETS and num_inputs > 1 else None


def must_be_repeated(shapes: Mapping[int, Shape], references: Mapping[int, Shape], axis: int, new: int) -> list[int]:
    """Return which inputs of a concatenation lack the batch that the others have as their leading dim: by position."""
    grown = [i for i, shape in shapes.items() if shape and shape[0] == new and references[i][0] != new]
    if axis == 0 or not grown:
        return []
    return [i for i, shape in shapes.items() if shape and shape[0] == 1 != new]


def grown(now: Shape, then: Shape, old: int, new: int) -> int | None:
    """Return the dim that has grown with the batch; None where it is none, or not one alone."""
    if len(now) != len(then):
        return None
    changed = [i for i, (a, b) in enumerate(zip(now, then, strict=True)) if a != b]
    return changed[0] if len(changed) == 1 and now[changed[0]] * old == then[changed[0]] * new else None


def outside_after(baked: Baked, shape: Shape) -> int:
    """Return what comes before the batch in its dim of a reshape's output, whose shape is now this one."""
    place = grown(shape, baked.result, baked.old, baked.new)
    if place is None or baked.grown is None:
        return 1
    before = prod(baked.result[:place])
    outside, rest = divmod(baked.outer, before) if before else (1, 1)
    return outside if not rest and outside and baked.result[place] % outside == 0 else 1


def _reshape(baked: Baked) -> Shape | None:
    place = baked.grown
    if place is None:
        return None
    dim = _where(baked, place)
    if dim is None or baked.target[dim] in (0, -1):
        return None
    if -1 not in baked.target:
        sizes = [baked.shape[i] if extent == 0 else extent for i, extent in enumerate(baked.target)]
        if prod(sizes) == prod(baked.shape):
            return None
    elif place > 0 or baked.outside > 1:
        # What is left open takes the batch up.
        return None
    return _scaled(baked, dim)


def _expand(baked: Baked) -> Shape | None:
    """Return the target with a leading dim that was the batch, of more than one, as the new one."""
    if baked.old == 1 or not baked.target or baked.target[0] != baked.old:
        return None
    return (baked.new, *baked.target[1:])


def _resize(baked: Baked) -> Shape | None:
    if not baked.target or baked.grown != 0 or baked.target[0] != baked.before[0]:
        return None
    return (baked.shape[0], *baked.target[1:])


def _where(baked: Baked, dim: int) -> int | None:
    """Return the dim of the output that the batch is in.

    It is the leading one if the batch was leading in the input. Else it is the one whose elements take the batch in; a
    batch of one leaves that open, so that a dim of one element is preferred there, then what keeps the number of dims.
    """
    rank = len(baked.target)
    if dim == 0 and baked.outside == 1:
        return 0 if rank else None
    ends = [prod(baked.result[:i]) for i in range(rank + 1)]
    if baked.old > 1:
        return next((i for i in range(rank) if ends[i] <= baked.outer and ends[i + 1] >= baked.outer * baked.old), None)
    fits = [i for i in range(rank) if ends[i] == baked.outer]
    if not fits:
        return None
    if rank < len(baked.before) and baked.result[fits[0]] != 1:
        return fits[0] - 1
    return fits[0]


def _scaled(baked: Baked, dim: int) -> Shape | None:
    extent = baked.target[dim]
    if extent % baked.old:
        return None
    return (*baked.target[:dim], extent // baked.old * baked.new, *baked.target[dim + 1 :])


_TARGETS: Mapping[str, Callable[[Baked], Shape | None]] = MappingProxyType(
    {"Reshape": _reshape, "Expand": _expand, "Resize": _resize}
)
