"""`Work`: the floating-point work of an operator, and how it follows from what the operator computes.

The rules are those of the method (docs/method.md, FLOP): a product costs 2 a point and as much again for each factor
that has a gradient; a sum of n tensors n - 1 and nothing backward; a function of one number 1, and 1 backward.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from types import MappingProxyType

from pase.common.names import short
from pase.errors import GraphError
from pase.graph.access import Access, Role, SliceOf, Window, axis_dims
from pase.graph.body import COMPARISONS, MOVES, POINTWISE, REDUCTIONS, Body, Step, elementary, verify_body


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Floating-point work done once for each point of some iteration dims.

    dims: the dims it runs over (an embedding's look-ups do not run over the vocabulary); of a `SliceOf`, that piece of
    its dim alone (a stack's first layer). flop_per_point: in the forward pass; the backward pass costs as much again
    for each entry of `inputs` that has a gradient, which a sum's copies of a gradient do not. inputs: for each number
    it works on, the position in `Operator.reads`, or the positions of all that it was computed from inside the
    operator: what comes of several reads has a gradient where any of them has. contraction: whether it multiplies and
    adds (what FLOP counters count) rather than works element by element.
    """

    dims: tuple[str | SliceOf, ...]
    flop_per_point: float
    inputs: tuple[int | tuple[int, ...], ...] = ()
    contraction: bool = False

    @property
    def origins(self) -> tuple[tuple[int, ...], ...]:
        """The reads that each of its inputs comes of."""
        return tuple((origin,) if isinstance(origin, int) else origin for origin in self.inputs)

    @property
    def reads(self) -> frozenset[int]:
        """All reads that it depends on."""
        return frozenset(read for origin in self.origins for read in origin)

    def num_gradients(self, has_gradient: Sequence[bool]) -> int:
        """Return how many of its inputs have a gradient; has_gradient: of each read."""
        return sum(any(has_gradient[read] for read in origin) for origin in self.origins)


def work_of_body(
    body: Body, *, layer: str, extents: Mapping[str, int], reads: Sequence[Access], writes: Sequence[Access]
) -> tuple[Work, ...]:
    """Return the work of an operator that computes a body.

    What moves data is not counted, nor functions of points of weights alone (a scale that is counted from 1).

    Args:
        body: what it computes.
        layer: its name, for messages.
        extents: of its iteration dims.
        reads: what it reads.
        writes: what it writes.

    Raises:
        GraphError: there is a step whose work does not follow from it.
    """
    try:
        verify_body(body, layer=layer, reads=[read.tensor for read in reads], dims=tuple(extents))
    except GraphError:
        # It is told where the operator is verified, as everything that is wrong with it.
        return ()
    counted = _Counted(body, extents, reads, writes)
    for step in _told_apart(body):
        operands = [counted.known[x] if isinstance(x, str) else _NUMBER for x in step.operands]
        every = _joined(operands)
        if step.function in POINTWISE:
            _count_points(counted, step, operands)
            dims = every.dims
        elif step.function in _COUNT:
            dims = _COUNT[step.function](counted, step, operands)
        elif step.function in MOVES:
            dims = counted.written
        else:
            raise GraphError(
                f"layer {short(layer)!r}: its work does not follow from a step {step.function!r}; declare it with work="
            )
        origins = () if step.function in COMPARISONS else every.origins
        counted.known[step.result] = _Tensor(tuple(dict.fromkeys(dims)), origins, every.is_weight)
    return tuple(counted.works)


def _told_apart(body: Body) -> Iterable[Step]:
    """Yield the steps of a body, elementary ones in place of attention with masks."""
    for step in body.steps:
        yield from (
            elementary(Body(steps=(step,)), trains=True).steps if step.function == "masked_attention" else (step,)
        )


@dataclass(frozen=True, slots=True)
class _Tensor:
    """A tensor of a body: its dims, the reads that its gradient flows to, whether it is made of weights alone."""

    dims: tuple[str, ...] = ()
    origins: tuple[int, ...] = ()
    is_weight: bool = False


_NUMBER = _Tensor(is_weight=True)


def _joined(tensors: Sequence[_Tensor]) -> _Tensor:
    return _Tensor(
        tuple(dict.fromkeys(dim for tensor in tensors for dim in tensor.dims)),
        tuple(sorted({origin for tensor in tensors for origin in tensor.origins})),
        all(tensor.is_weight for tensor in tensors),
    )


def _named(access: Access) -> tuple[str, ...]:
    return tuple(dim for axis in access.index_map for dim in axis_dims(axis))


class _Counted:
    """Work of steps as it is counted. known: the tensors so far. written: the dims of what the operator writes."""

    def __init__(
        self, body: Body, extents: Mapping[str, int], reads: Sequence[Access], writes: Sequence[Access]
    ) -> None:
        self.works: list[Work] = []
        self.written = _named(writes[0]) if writes else ()
        self.kernels = tuple(axis.kernel for read in reads for axis in read.index_map if isinstance(axis, Window))
        self.inner = {dim.name: dim.extent for dim in body.inner}
        self.extents = {**extents, **self.inner}
        self.known = {constant.name: _Tensor(constant.dims) for constant in body.constants}
        for i, read in enumerate(reads):
            own = tuple(dim.name for dim in body.inner if dim.tensor == read.tensor)
            self.known[read.tensor] = _Tensor(own or _named(read), (i,), read.role is Role.PARAMETER)

    def add(self, dims: Iterable[str], flop: int, *inputs: _Tensor, is_contraction: bool = False) -> None:
        """Add work over some dims; inputs: the tensors whose gradients take as much again."""
        over = set(dims)
        flop *= prod(extent for dim, extent in self.inner.items() if dim in over)
        if flop:
            points = tuple(dim for dim in self.extents if dim in over and dim not in self.inner)
            origins = tuple(x.origins[0] if len(x.origins) == 1 else x.origins for x in inputs if x.origins)
            self.works.append(Work(dims=points, flop_per_point=flop, inputs=origins, contraction=is_contraction))


_Rule = Callable[[_Counted, Step, Sequence[_Tensor]], tuple[str, ...]]
"""Counts a step of some tensors; returns the dims of its result."""

_SUMS = frozenset({"add", "subtract", "average"})
_CHAINS = frozenset({*_SUMS, "multiply", "maximum", "minimum"})
"""Functions of any number of operands: an operation for each but the first."""


def _count_points(counted: _Counted, step: Step, operands: Sequence[_Tensor]) -> None:
    every = _joined(operands)
    if step.function == "identity" or every.is_weight:
        return
    # The gradient of a sum is a copy.
    inputs = () if step.function in _SUMS else operands
    counted.add(every.dims, len(step.operands) - 1 if step.function in _CHAINS else 1, *inputs)


def _each_once(flop: int, *, keeps: bool) -> _Rule:
    """Return the rule of what works so often with each number of its first operand."""

    def rule(counted: _Counted, step: Step, operands: Sequence[_Tensor]) -> tuple[str, ...]:
        counted.add(operands[0].dims, flop, operands[0])
        return tuple(dim for dim in operands[0].dims if keeps or dim not in step.dims)

    return rule


def _product(counted: _Counted, step: Step, operands: Sequence[_Tensor]) -> tuple[str, ...]:
    # Of n factors n - 1 products, and a sum.
    counted.add(_joined(operands).dims, len(operands), *operands, is_contraction=True)
    return step.dims if step.function == "einsum" else counted.written


def _spread(counted: _Counted, step: Step, operands: Sequence[_Tensor]) -> tuple[str, ...]:
    # The whole window, at every position that is read.
    window = step.dims[-(len(step.dims) // 3) :]
    points = (dim for dim in _joined(operands).dims if dim not in window)
    counted.add(points, 2 * prod(counted.extents[dim] for dim in window), *operands, is_contraction=True)
    return counted.written


def _attention(counted: _Counted, step: Step, operands: Sequence[_Tensor]) -> tuple[str, ...]:
    queries, keys, values = operands
    *over, _ = step.dims
    scores = _joined((queries, keys))
    counted.add(step.dims, 2, queries, keys, is_contraction=True)
    counted.add((*over, *values.dims), 2, scores, values, is_contraction=True)
    counted.add(over, 1 + _SOFTMAX_FLOP, scores)
    return (*over[:-1], *(dim for dim in values.dims if dim != over[-1]))


def _normalise(counted: _Counted, step: Step, operands: Sequence[_Tensor]) -> tuple[str, ...]:
    x = operands[0]
    # Subtract the mean, square for the variance, divide.
    counted.add(x.dims, 3, x)
    if step.function == "normalise":
        counted.add(x.dims, 1, *operands[:2])
        counted.add(x.dims, 1)
    return x.dims


def _pool(counted: _Counted, _: Step, operands: Sequence[_Tensor]) -> tuple[str, ...]:
    counted.add((*operands[0].dims, *counted.kernels), 1, operands[0])
    return operands[0].dims


def _look_up(counted: _Counted, step: Step, operands: Sequence[_Tensor]) -> tuple[str, ...]:
    rows, places = operands
    dims = (*places.dims, *rows.dims[1:]) if step.function == "embedding" else places.dims
    counted.add(dims, 1, rows)
    return dims


def _replaced(num: Callable[[Step], int]) -> _Rule:
    """Return the rule of what puts the others of its dims in place of the first ones."""
    return lambda _, step, operands: (
        *(dim for dim in _joined(operands).dims if dim not in step.dims[: num(step)]),
        *step.dims[num(step) :],
    )


_SOFTMAX_FLOP = 4
"""Subtract the maximum, exponentiate, add up, divide."""

_COUNT: Mapping[str, _Rule] = MappingProxyType(
    dict.fromkeys(REDUCTIONS, _each_once(1, keeps=False))
    | dict.fromkeys(("softmax", "log_softmax"), _each_once(_SOFTMAX_FLOP, keeps=True))
    | dict.fromkeys(("einsum", "convolve"), _product)
    | dict.fromkeys(("normalise", "batch_norm"), _normalise)
    | dict.fromkeys(("embedding", "pick"), _look_up)
    | dict.fromkeys(("causal", "fan_out", "keep"), lambda _, __, operands: operands[0].dims)
    | {
        "attention": _attention,
        "convolve_transposed": _spread,
        "cut": _replaced(lambda _: 1),
        "dropout": _each_once(1, keeps=True),
        "join": _replaced(lambda step: len(step.dims) - 1),
        "pool": _pool,
        "repeat": lambda _, step, __: step.dims,
        "rows": lambda _, step, xs: (*xs[1].dims, *(dim for dim in xs[0].dims if dim not in step.dims)),
        "softmax_loss": _each_once(_SOFTMAX_FLOP, keeps=False),
        "view": _replaced(lambda step: int(step.option("replaced", 1))),
    }
)
"""How the steps of the other functions are counted."""
