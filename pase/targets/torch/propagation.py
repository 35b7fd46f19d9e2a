"""Sharding propagation: the splits of an operator's results, given those of its operands.

A dim of a tensor is expressed by the factors that it consists of, the outermost first, as views merge and split dims:
batch and sequence in one dim, or heads and their channels, may each be split separately. Names of factors are those of
the layer's iteration dims, by which its mesh splits.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from pase.importers.torch.sharding_rules import Factor, ShardingRule
from pase.targets.torch.tensor import Dim

Dims = tuple[tuple[Dim, ...], ...]
"""For each dim of a tensor its factors, the outermost first; none for a dim of one point."""

Splits = Mapping[str, int]
"""In how many parts each name of a factor is split."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Propagated:
    """Execution of an operator on shards.

    Attributes:
        operands: Required layout of each operand.
        results: Layout of each result.
        sums: Names of the factors over whose parts results are partial sums.
        factors: Factors of dims that make up each factor of the rule.
        gathered: Numbers of operands of which ranks hold less than they need.
    """

    operands: tuple[Dims, ...]
    results: tuple[Dims, ...]
    sums: frozenset[str]
    factors: Mapping[Factor, tuple[Dim, ...]]
    gathered: tuple[int, ...]


def propagated(rule: ShardingRule, operands: Sequence[Dims], splits: Splits) -> Propagated:
    """Return the execution of an operator with operands in these layouts.

    The largest operand first determines how a factor is split. A factor that the rule needs unsplit, or whose split
    name already splits another factor, is not split.
    """
    told = [_factors_of(rule, number, dims, splits) for number, dims in enumerate(operands)]
    bound: dict[Factor, tuple[Dim, ...]] = {}
    plain: dict[Factor, tuple[Dim, ...]] = {}
    used: set[str] = set()
    sizes = [prod(dim.size for dims in operand for dim in dims) for operand in operands]
    for number in sorted(range(len(operands)), key=lambda i: -sizes[i]):
        for factor, dims in told[number].items():
            names = [dim.name for dim in dims if splits.get(dim.name, 1) > 1]
            if not names:
                plain.setdefault(factor, dims)
            elif factor not in bound and factor not in rule.whole and used.isdisjoint(names):
                bound[factor] = dims
                used.update(names)
    for factor, extent in rule.extents.items():
        if factor not in bound:
            bound[factor] = plain.get(factor, (Dim(f"{factor}*", extent),))

    def layout_of(factors: Sequence[Sequence[Factor]]) -> Dims:
        return tuple(tuple(dim for factor in own for dim in bound[factor]) for own in factors)

    wanted = tuple(layout_of(own) for own in rule.operands)
    return Propagated(
        operands=wanted,
        results=tuple(layout_of(own) for own in rule.results),
        sums=frozenset(dim.name for factor in rule.sums for dim in bound[factor] if splits.get(dim.name, 1) > 1),
        factors=bound,
        gathered=tuple(
            i for i, (have, need) in enumerate(zip(operands, wanted, strict=True)) if _is_less(have, need, splits)
        ),
    )


def lies_alike(one: Dims, other: Dims, splits: Splits) -> bool:
    """Return whether ranks hold the same points of a tensor either way, each in the same order."""
    return len(one) == len(other) and all(
        _canonical(mine, splits) == _canonical(others, splits) for mine, others in zip(one, other, strict=True)
    )


def refined(dims: Sequence[Dim], extents: Sequence[int], splits: Splits) -> tuple[tuple[Dim, ...], ...] | None:
    """Return the factors of a dim, regrouped to dims of the same total size; None where parts do not match.

    A split factor is only divided such that its parts are those of the outer one.
    """
    left, found = list(dims), list[tuple[Dim, ...]]()
    for extent in extents:
        own, size = list[Dim](), 1
        while size != extent:
            if not left or not size or extent % size:
                return None
            dim, needed = left.pop(0), extent // size
            if dim.size > needed:
                if not needed or dim.size % needed or dim.parts or needed % splits.get(dim.name, 1):
                    return None
                left.insert(0, Dim(f"{dim.name}*{needed}", dim.size // needed))
                dim = Dim(dim.name, needed)
            own.append(dim)
            size *= dim.size
        found.append(tuple(own))
    return None if left else tuple(found)


def _factors_of(rule: ShardingRule, number: int, dims: Dims, splits: Splits) -> dict[Factor, tuple[Dim, ...]]:
    """Return the composition of an operand's factors; factors of dims whose parts do not match are omitted."""
    found: dict[Factor, tuple[Dim, ...]] = {}
    for own, factors in zip(dims, rule.operands[number], strict=True):
        extents = [rule.extents[factor] for factor in factors]
        fitted = refined(own, extents, splits) if prod(extents) == prod(dim.size for dim in own) else None
        found |= dict(zip(factors, fitted, strict=True)) if fitted is not None else {}
    return found


def _canonical(dims: Sequence[Dim], splits: Splits) -> list[object]:
    """Return a dim's factors, with unsplit ones merged into those before them.

    The even parts of a factor, with all of the factors after it, are those of one factor as large as these together.
    """
    found: list[object] = [1]
    for dim in dims:
        parts, last = splits.get(dim.name, 1), found[-1]
        if parts > 1:
            is_even = dim.size % parts == 0 and not dim.parts
            found += [dim.name, dim.size] if is_even else [dim, 1]
        else:
            assert isinstance(last, int)
            found[-1] = last * dim.size
    return found


def _is_less(have: Dims, need: Dims, splits: Splits) -> bool:
    """Return whether points that a rank needs of a tensor may be none that it has."""
    if lies_alike(have, need, splits):
        return False
    return any(splits.get(dim.name, 1) > 1 for dims in have for dim in dims)
