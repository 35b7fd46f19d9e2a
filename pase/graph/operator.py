"""`Operator`: a vertex of the computation graph, one layer of a network, as data.

How it touches its tensors (`Access`) is the one description from which every cost is derived; its floating-point work
follows from what it computes, by the rules of the method (docs/method.md, FLOP): a product costs 2 a point and as much
again for each factor that has a gradient; a sum of n tensors n - 1 and nothing backward; a function of one number 1,
and 1 backward.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from functools import cached_property
from math import prod
from types import MappingProxyType
from typing import TypeVar

from pase.common.containers import FrozenDict
from pase.common.structs import Positive, Whole
from pase.common.words import short
from pase.errors import GraphError
from pase.graph.body import Body, Step, elementary, verify_body
from pase.graph.functions import COMPARISONS, LOSSES, MOVES, POINTWISE, REDUCTIONS, Arithmetic, function_of


@dataclass(frozen=True, slots=True)
class Dim:
    """A named dimension of an operator's iteration space; extent: number of points, at least 1."""

    name: str
    extent: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """A tensor dim read through a sliding window: output o and kernel point k read ``o·stride + k·dilation - pad``.

    out, kernel: iteration dims. pad: zeros before the first element; those after the last one follow from
    the extents. beyond: of these, how many a window may begin at (where there are as many as the kernel reaches over).
    A split of `out` exchanges halos.
    """

    out: str
    kernel: str
    stride: int = 1
    dilation: int = 1
    pad: int = 0
    beyond: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SliceOf:
    """The points [offset, offset + extent) of an iteration dim: concatenation, split, slice."""

    dim: str
    """Name of the iteration dim."""
    offset: Whole
    """First point, from 0."""
    extent: Positive
    """Number of points."""


DimIndex = str | tuple[str, ...] | Window | SliceOf | None
"""One tensor dim: an iteration dim, a product of them (row-major), a window, a part, or None (not indexed)."""


class Role(StrEnum):
    """What a tensor is to the operator that reads it."""

    ACTIVATION = "activation"
    PARAMETER = "parameter"
    INDEX = "index"


@dataclass(frozen=True, slots=True, kw_only=True)
class Indexed:
    """A tensor over the iteration space of an operator.

    tensor: its name within the operator ("x", "w", "y"). shape: [rank] extents of the whole tensor.
    index_map: [rank] how each tensor dim is indexed.
    """

    tensor: str
    shape: tuple[int, ...]
    index_map: tuple[DimIndex, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Access(Indexed):
    """One tensor that an operator reads or writes.

    role: what it is. partial_over: iteration dims whose split leaves partial sums of this tensor (of its gradient, for
    a read), to be all-reduced; None means every dim that the access lacks, which is right for contractions.
    shared: for a parameter that several operators use, the name that they share. is_trained: of a parameter, whether
    training changes it; one that is frozen has no gradient.
    batch: of data that the network is given: (blocks, examples), where the tensor is, row-major, so many blocks of
    so many examples each; None where there are none, or it is not told (then the first dim is the batch).
    """

    role: Role = Role.ACTIVATION
    partial_over: tuple[str, ...] | None = None
    shared: str = ""
    is_trained: bool = True
    batch: tuple[int, int] | None = None

    @property
    def size(self) -> int:
        """Number of elements of the whole tensor."""
        return prod(self.shape)

    @property
    def is_differentiable(self) -> bool:
        """Whether the tensor can have a gradient (indices cannot)."""
        return self.role is not Role.INDEX


def extents_of(layer: str, shape: Sequence[int], names: Sequence[str]) -> dict[str, int]:
    """Return the extents of a tensor by the names of its dims; GraphError where there are not as many of both."""
    if len(shape) != len(names):
        raise GraphError(f"layer {layer!r} reads shape {tuple(shape)}; expected dims {', '.join(names)}")
    return dict(zip(names, shape, strict=True))


def dims_of(extents: Mapping[str, int]) -> tuple[Dim, ...]:
    """Return iteration dims of these extents, in order."""
    return tuple(Dim(name, extent) for name, extent in extents.items())


def axis_dims(axis: DimIndex) -> tuple[str, ...]:
    """Return the iteration dims whose split also splits this tensor dim.

    A window's kernel dim is not among them: each of its parts reads nearly the whole input, so that the
    input counts as replicated over it and its gradient as summed over it.
    """
    match axis:
        case None:
            return ()
        case str():
            return (axis,)
        case Window():
            return (axis.out,)
        case SliceOf():
            return (axis.dim,)
        case _:
            return axis


def split_dim(axis: DimIndex) -> str:
    """Return the iteration dim whose split also splits this tensor dim, "" where there is none, or for a product."""
    return "" if isinstance(axis, tuple) else next(iter(axis_dims(axis)), "")


def access_dims(access: Indexed) -> frozenset[str]:
    """Return the iteration dims whose split also splits the tensor."""
    return frozenset(dim for axis in access.index_map for dim in axis_dims(axis))


def named_dims(access: Indexed) -> frozenset[str]:
    """Return every iteration dim that the access names, kernels of windows included."""
    kernels = {axis.kernel for axis in access.index_map if isinstance(axis, Window)}
    return access_dims(access) | kernels


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


def _count_points(counted: _Counted, step: Step, operands: Sequence[_Tensor]) -> None:
    every = _joined(operands)
    if step.function == "identity" or every.is_weight:
        return
    counts = function_of(step.function).counts
    # The gradient of a sum is a copy.
    inputs = () if counts is Arithmetic.SUM else operands
    counted.add(every.dims, 1 if counts is Arithmetic.ONE else len(step.operands) - 1, *inputs)


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


Scalar = str | int | float | bool
ScalarT = TypeVar("ScalarT", str, int, float, bool)


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange(Indexed):
    """What an operator moves between devices inside itself.

    times: in one training step, forward and backward together. backward_times: how many of them take place only where
    any of the reads `gradient_of` has a gradient.
    """

    times: int
    backward_times: int = 0
    gradient_of: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class AllReduce(Exchange):
    """A small tensor that an operator reduces inside itself: softmax's maximum and sum, a normalisation's mean.

    over: the iteration dims whose split makes the all-reduce necessary.
    """

    over: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Relayout(Exchange):
    """A tensor that an operator writes in one layout and reads back in another (a recurrent layer's hidden state).

    index_map: as it is written; read: as it is read. is_ring: whether parts go round, from each device to the next one,
    and are read as they come, while the operator computes with those that came before.
    """

    read: tuple[DimIndex, ...]
    is_ring: bool = False

    @property
    def changes(self) -> tuple[tuple[DimIndex, DimIndex], ...]:
        """How dims are indexed when they are written and when they are read, where that differs."""
        return tuple((a, b) for a, b in zip(self.index_map, self.read, strict=True) if a != b)


@dataclass(frozen=True, slots=True, kw_only=True)
class Handoff(Exchange):
    """A tensor that goes to the next part along a split dim (a recurrent layer's stages)."""

    across: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AllToAll(Exchange):
    """Rows of which the data tell on which device they are needed: those of tokens, which go to their experts and back.

    shape, index_map: of the rows as they arrive. over: the iteration dims whose parts send each other. copies: how many
    rows may be of one, of which each device is sent one. excess: None where rows come in any order, so that a device
    gets as many from each other one; otherwise they lie where they are needed if all groups have as many, and it is
    what the group with most has beyond that, as a part of it.
    """

    over: tuple[str, ...]
    copies: int = 1
    excess: float | None = None


FAN_OUT = "fan_out"
"""The kind of the vertices that hand a tensor to its readers, and sum its gradient once (`operators.fan_out`)."""

EPILOGUE = "epilogue"
"""Attribute of imported layers that names the functions which are applied to what they compute."""

SCANNED = "scanned"
"""Attribute of layers that a source has in the body of a loop: their place in it, which those of all turns share."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Intermediate(Indexed):
    """A tensor that an operator makes for itself: attention's probabilities, an LSTM's gates.

    kept: how many of it are kept for the backward pass. working: how many more there are at once while the operator
    works, forward or backward.
    """

    kept: int = 0
    working: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """Dims whose splits run as a wavefront: a part waits for the one before it in both."""

    stage: str
    """The dim of the stages."""
    sequence: str
    """The dim of the steps."""


WORK_OF_BODY: tuple[Work, ...] = (Work(dims=(), flop_per_point=0),)
"""Stands for the work that follows from an operator's body, until the operator is made."""


@dataclass(frozen=True, kw_only=True)
class Operator:
    """A layer: an iteration space and how it touches its tensors.

    dims: the iteration space. reads, writes: tensors; the reads that are not parameters are the inputs, in
    the order of the edges that feed them. work: FLOP, by default what follows from the body. unsplittable: dims that
    no configuration may split. exchanges, pipeline, intermediates: what the accesses alone do not say. body: what it
    computes, where that is told as steps. attributes: what an executor needs besides.
    """

    name: str
    kind: str
    dims: tuple[Dim, ...]
    reads: tuple[Access, ...]
    writes: tuple[Access, ...]
    work: tuple[Work, ...] = WORK_OF_BODY
    unsplittable: tuple[str, ...] = ()
    exchanges: tuple[Exchange, ...] = ()
    pipeline: Pipeline | None = None
    intermediates: tuple[Intermediate, ...] = ()
    body: Body | None = None
    attributes: tuple[tuple[str, Scalar], ...] = ()

    def __post_init__(self) -> None:
        if self.work is WORK_OF_BODY:
            work = work_of_body(
                self.body or Body(), layer=self.name, extents=self.extents, reads=self.reads, writes=self.writes
            )
            object.__setattr__(self, "work", work)

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        # Operators are looked up often, and have much to hash.
        return hash(tuple(getattr(self, field.name) for field in fields(self)))

    @cached_property
    def unnamed(self) -> "Operator":
        """The operator without its name, and what its body says of others by theirs: equal for repeated layers."""
        body = self.body
        return replace(self, name="", body=replace(body, problem="…") if body and body.problem else body)

    @cached_property
    def extents(self) -> Mapping[str, int]:
        """Extent of each iteration dim, in order."""
        return FrozenDict({dim.name: dim.extent for dim in self.dims})

    @property
    def is_fan_out(self) -> bool:
        """Whether it hands one tensor to several readers, and sums its gradient; its kind says so, body or none."""
        return self.kind == FAN_OUT

    @property
    def is_loss(self) -> bool:
        """Whether what it computes is the loss, one number; without steps, as in plans of 0.2.0, its kind says it."""
        return (self.body.steps[-1].function if self.body and self.body.steps else self.kind) in LOSSES

    @property
    def parameters(self) -> tuple[Access, ...]:
        """The reads that are weights, trained or frozen."""
        return tuple(access for access in self.reads if access.role is Role.PARAMETER)

    @cached_property
    def wholes(self) -> Mapping[int, int]:
        """Return for each write that is a piece of another one, by position, that one: it is summed and written once.

        Of several that it may be cut from, it is of the one whose name it has before a bracket.
        """
        found: dict[int, int] = {}
        for i, write in enumerate(self.writes):
            index_map = tuple(axis.dim if isinstance(axis, SliceOf) else axis for axis in write.index_map)
            fits = [j for j, other in enumerate(self.writes) if other.index_map == index_map != write.index_map]
            named = [j for j in fits if self.writes[j].tensor == write.tensor.partition("[")[0]]
            if fits:
                found[i] = (named or fits)[0]
        return FrozenDict(found)

    @property
    def ring(self) -> Relayout | None:
        """What goes round between devices while it computes; None for nothing."""
        return next((x for x in self.exchanges if isinstance(x, Relayout) and x.is_ring), None)

    def attribute(self, name: str, default: ScalarT) -> ScalarT:
        """Return an attribute, or the default where the operator does not have it."""
        value = dict(self.attributes).get(name, default)
        assert isinstance(value, type(default)), f"attribute {name} of {self.name} is {value!r}"
        return value

    def work_points(self, work: Work) -> int:
        """Return how many points a piece of work runs over, on one device that does it all."""
        return prod(dim.extent if isinstance(dim, SliceOf) else self.extents[dim] for dim in work.dims)

    def exchanges_with(self, has_gradient: Sequence[bool], *, forward_passes: int = 1) -> tuple[Exchange, ...]:
        """Return the exchanges as often as they take place.

        has_gradient: of each read. forward_passes: how often the forward pass runs.
        """
        found = []
        for exchange in self.exchanges:
            goes_back = any(has_gradient[read] for read in exchange.gradient_of)
            times = forward_passes * (exchange.times - exchange.backward_times)
            times += exchange.backward_times if goes_back else 0
            if times:
                found.append(exchange if times == exchange.times else replace(exchange, times=times))
        return tuple(found)

    def partial_dims(self, access: Access) -> tuple[str, ...]:
        """Return the iteration dims whose split leaves partial sums of a tensor (of a read's gradient)."""
        if access.partial_over is not None:
            return access.partial_over
        used = access_dims(access)
        return tuple(dim.name for dim in self.dims if dim.name not in used)
