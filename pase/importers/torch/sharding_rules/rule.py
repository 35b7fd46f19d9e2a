"""`ShardingRule`, the call that it describes, and `relate`, which creates one from a name for each dim."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

Factor = str
Shape = tuple[int, ...]
Dims = tuple[tuple[Factor, ...], ...]
"""The factors of each dim of a tensor, the outermost first."""

Labels = Sequence[Factor | Sequence[Factor] | None]
"""A name for each dim of a tensor; several for a dim of several factors, None for one that must be unsplit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardingRule:
    """How the dims of an operator's operands and results correspond, in the form of Shardy's op sharding rules.

    A shard along a factor has a range of its points, in every operand and result with the factor. The call on shards
    returns the shards of the results, with these exceptions: along a factor of `sums`, a result of `summed` is the sum
    of the results of all parts; arguments of `sizes` are those of the shard.

    In the backward pass, the shards' gradients are shards of the whole call's gradient if the operand has the factor,
    and addends of it otherwise.

    Attributes:
        operands: For each tensor operand, in the order of the flattened arguments (positional, then by name; lists of
            tensors flattened; None omitted), the factors of each dim, the outermost first; () for a dim of extent 1,
            which may be broadcast.
        results: Likewise for each tensor that it returns.
        extents: The extent of each factor. None is 1.
        sums: Factors over whose parts the results of `summed` are sums.
        summed: Numbers of the results that are such sums; the others have the factor, or are equal on all parts.
        is_mean: Whether a part's results must be multiplied by its share of the points of `sums` before they are added.
        whole: Factors that must not be split: the operator mixes their points, or is unknown.
        once: Numbers of operands that are added to a sum over a factor of `sums` which they lack, such as a bias: along
            that factor, one part receives the operand and the others zeros.
        linear: Numbers of operands that may be given as addends of a sum: results are then addends of the results.
        added: Numbers of operands that are added to the result of the others. Where an operand of `linear` is given as
            addends, these are, too, or one part receives them and the others zeros.
        sizes: (name in the schema, value) of arguments that are extents and must be those of the shard: a tuple of the
            factors of each dim, each as in `results`; for an argument that is one number, such as `groups`, a tuple of
            factors. No entry where none of them may be split.
        is_known: False for an unknown operator: everything is unsplit.
    """

    operands: tuple[Dims, ...]
    results: tuple[Dims, ...]
    extents: Mapping[Factor, int]
    sums: frozenset[Factor] = frozenset()
    summed: tuple[int, ...] = ()
    is_mean: bool = False
    whole: frozenset[Factor] = frozenset()
    once: tuple[int, ...] = ()
    linear: tuple[int, ...] = ()
    added: tuple[int, ...] = ()
    sizes: tuple[tuple[str, Dims | tuple[Factor, ...]], ...] = ()
    is_known: bool = True

    @property
    def splittable(self) -> tuple[Factor, ...]:
        """Factors that may be split, in the order in which operands and results name them."""
        return tuple(factor for factor in self.extents if factor not in self.whole)


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A call of an operator, without values.

    Attributes:
        name: Name of the operator without namespace and overload.
        arguments: Arguments by their name in the schema, defaults included.
        numbers: By the name of an argument, the numbers of the operands in it.
        operands: Shapes of the tensor operands.
        results: Shapes of the tensors that it returns.
        are_floating: For each operand, whether it has real or complex numbers.
        results_are_floating: Likewise for each result.
    """

    name: str
    arguments: Mapping[str, Any]
    numbers: Mapping[str, tuple[int, ...]]
    operands: tuple[Shape, ...]
    results: tuple[Shape, ...]
    are_floating: tuple[bool, ...]
    results_are_floating: tuple[bool, ...]

    def get(self, name: str, default: Any = None) -> Any:
        """Return an argument, or the default where it is None or the schema has no argument of that name."""
        value = self.arguments.get(name)
        return default if value is None else value

    def shape(self, name: str) -> Shape | None:
        """Return the shape of the tensor that is given by this name; None where none is."""
        numbers = self.numbers.get(name, ())
        return self.operands[numbers[0]] if numbers else None

    def rank(self, name: str) -> int:
        """Return the number of dims of a tensor by name; 0 where it is not given."""
        return len(self.shape(name) or ())

    def dims(self, name: str = "dim", rank: int | None = None) -> tuple[int, ...]:
        """Return the dims that an argument names, counted from 0; all where it is None or empty."""
        rank = len(self.operands[0]) if rank is None else rank
        value = self.get(name)
        if isinstance(value, int):
            value = [value]
        return tuple(dim % rank for dim in value) if value and rank else tuple(range(rank))

    def dim(self, name: str = "dim", rank: int | None = None) -> int:
        """Return the one dim that an argument names, counted from 0."""
        rank = len(self.operands[0]) if rank is None else rank
        return int(self.get(name, 0)) % max(1, rank)


Rule = Callable[[Call], ShardingRule]
"""Returns the rule of a call of one family of operators."""


def positions(rank: int, prefix: str = "d") -> list[Factor | None]:
    """Return names for the dims of a tensor, counted from the last: tensors that broadcast share them."""
    return [f"{prefix}{rank - 1 - i}" for i in range(rank)]


def relate(
    call: Call,
    operands: Mapping[str, Labels] | Sequence[Labels | None] = (),
    results: Sequence[Labels | None] = (),
    *,
    extents: Mapping[Factor, int] | None = None,
    sums: Iterable[Factor] = (),
    summed: Iterable[int] | None = None,
    is_mean: bool = False,
    whole: Iterable[Factor] = (),
    linear: Iterable[str | int] = (),
    added: Iterable[str | int] = (),
    sizes: Mapping[str, Labels] | None = None,
    is_known: bool = True,
) -> ShardingRule:
    """Return the rule for given names of dims.

    Args:
        call: The call.
        operands: Names of the dims of each operand, by the argument's name or in order. Omitted operands are unsplit.
        results: Likewise for each result.
        extents: Extents of factors that share a dim with others.
        sums: As in `ShardingRule`, as are the others; `linear` and `added` may be names of arguments. Integer operands
            are never linear.
        summed: By default all results.
        is_mean: See there.
        whole: See there; a factor that one tensor has twice is always unsplit.
        linear: See there.
        added: See there; those that lack a factor of `sums` are added once.
        sizes: See there.
        is_known: See there.

    Raises:
        ValueError: Shapes do not fit the names.
    """
    if sizes and not all(map(prod, call.results)):
        # Extents of 0 have no factors from which arguments could be computed.
        return relate(call)
    if isinstance(operands, Mapping):
        by_number = {n: labels for name, labels in operands.items() for n in call.numbers.get(name, ())}
    else:
        by_number = {n: labels for n, labels in enumerate(operands) if labels is not None}
    reader = _Reader(dict(extents or {}), set(whole))
    read_operands = tuple(reader.read(shape, by_number.get(n)) for n, shape in enumerate(call.operands))
    read_results = tuple(
        reader.read(shape, results[n] if n < len(results) else None) for n, shape in enumerate(call.results)
    )
    named = {factor: reader.extents[factor] for factor in reader.seen}
    whole = frozenset(reader.whole & named.keys())
    summed_over = frozenset(set(sums) & named.keys()) - whole
    added_numbers = _numbers(call, added)
    return ShardingRule(
        operands=read_operands,
        results=read_results,
        extents=named,
        sums=summed_over,
        summed=tuple(range(len(call.results)) if summed is None else summed),
        is_mean=is_mean,
        whole=whole,
        linear=tuple(n for n in _numbers(call, linear) if call.are_floating[n] and all(call.results_are_floating)),
        once=tuple(n for n in added_numbers if not summed_over <= {f for dim in read_operands[n] for f in dim}),
        added=added_numbers,
        sizes=_sizes(call, sizes or {}, named, whole),
        is_known=is_known,
    )


def unknown(call: Call) -> ShardingRule:
    """Return the rule of an unknown operator."""
    return relate(call, is_known=False)


def _numbers(call: Call, inputs: Iterable[str | int]) -> tuple[int, ...]:
    numbers: list[int] = []
    for item in inputs:
        numbers += [item] if isinstance(item, int) else call.numbers.get(item, ())
    return tuple(sorted(set(numbers)))


def _sizes(
    call: Call, sizes: Mapping[str, Labels], extents: Mapping[Factor, int], whole: frozenset[Factor]
) -> tuple[tuple[str, Dims | tuple[Factor, ...]], ...]:
    entries: list[tuple[str, Dims | tuple[Factor, ...]]] = []
    for name, labels in sizes.items():
        dims = tuple(tuple(f for f in _names(label) if f in extents) for label in labels)
        if name not in call.arguments or all(f in whole for dim in dims for f in dim):
            continue
        entries.append((name, dims[0] if isinstance(call.arguments[name], int) else dims))
    return tuple(entries)


def _names(label: Factor | Sequence[Factor] | None) -> tuple[Factor, ...]:
    if label is None:
        return ()
    return (label,) if isinstance(label, str) else tuple(label)


class _Reader:
    """Matches names of dims with shapes.

    Attributes:
        extents: Extents of all factors, as far as they are known.
        whole: Factors that must not be split.
        seen: Factors in the order of first use by tensors.
    """

    def __init__(self, extents: dict[Factor, int], whole: set[Factor]) -> None:
        self.extents = extents
        self.whole = whole
        self.seen: dict[Factor, None] = {}

    def read(self, shape: Shape, labels: Labels | None) -> Dims:
        """Return the factors of the dims of a tensor."""
        if labels is None:
            labels = [None] * len(shape)
        if len(labels) != len(shape):
            raise ValueError(f"{len(labels)} names for a tensor of {len(shape)} dims")
        dims = tuple(self._dim(extent, label) for extent, label in zip(shape, labels, strict=True))
        counts = Counter(factor for dim in dims for factor in dim)
        self.whole.update(factor for factor, count in counts.items() if count > 1)
        self.seen.update(dict.fromkeys(counts))
        return dims

    def _dim(self, extent: int, label: Factor | Sequence[Factor] | None) -> tuple[Factor, ...]:
        if extent == 1:
            return ()
        if label is None or extent == 0:
            private = f"whole{len(self.extents)}"
            self.extents[private] = extent
            self.whole.add(private)
            return (private,)
        if isinstance(label, str):
            if self.extents.setdefault(label, extent) != extent:
                raise ValueError(f"extent {extent} of factor {label}, which has {self.extents[label]} elsewhere")
            return (label,)
        factors = tuple(factor for factor in label if self.extents[factor] != 1)
        if prod(self.extents[factor] for factor in factors) != extent:
            raise ValueError(f"factors {factors} of a dim of extent {extent}")
        return factors
