"""`Operator`: a vertex of the computation graph, one layer of a network, as data.

All costs derive from one description: how it indexes its tensors (`Access`). Its floating-point work follows from its
computation by the rules of the method (docs/method.md, FLOP). A product costs 2 per point, and as much again for each
factor that has a gradient. A sum of n tensors costs n - 1, and nothing backward. A function of one number costs 1, and
1 backward.
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

    A split of `out` requires a halo exchange.

    Attributes:
        out, kernel: Iteration dims.
        pad: Zeros before the first element; the number after the last one follows from the extents.
        beyond: Number of zeros after the last element at which a window may start (where there are as many as the
            kernel spans).
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
"""Index of one tensor dim: an iteration dim, a product of them (row-major), a window, a slice, or None (no index)."""


class Role(StrEnum):
    """Role of a tensor for the operator that reads it."""

    ACTIVATION = "activation"
    PARAMETER = "parameter"
    INDEX = "index"


@dataclass(frozen=True, slots=True, kw_only=True)
class Indexed:
    """A tensor indexed by the iteration space of an operator.

    Attributes:
        tensor: Name within the operator ("x", "w", "y").
        shape: [rank] extents of the whole tensor.
        index_map: [rank] how each tensor dim is indexed.
    """

    tensor: str
    shape: tuple[int, ...]
    index_map: tuple[DimIndex, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Access(Indexed):
    """A tensor that an operator reads or writes.

    Attributes:
        role: Role of the tensor.
        partial_over: Iteration dims whose split leaves partial sums of this tensor (of its gradient, for a read), which
            are all-reduced. None means every dim that the access lacks, which is right for contractions.
        shared: Common name of a parameter that several operators share.
        is_trained: Whether training changes the parameter; a frozen one has no gradient.
        batch: For inputs of the network, (blocks, examples): the tensor is, row-major, this many blocks of this many
            examples each. None without examples, or if unknown (then the first dim is the batch).
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
    """Return the extents of a tensor by the names of its dims; GraphError where their numbers differ."""
    if len(shape) != len(names):
        raise GraphError(f"layer {layer!r} reads shape {tuple(shape)}; expected dims {', '.join(names)}")
    return dict(zip(names, shape, strict=True))


def dims_of(extents: Mapping[str, int]) -> tuple[Dim, ...]:
    """Return iteration dims with these extents, in order."""
    return tuple(Dim(name, extent) for name, extent in extents.items())


def axis_dims(axis: DimIndex) -> tuple[str, ...]:
    """Return the iteration dims whose split also splits this tensor dim.

    A window's kernel dim is not one of them. Each part of the kernel reads almost the whole input, so the input counts
    as replicated over it, and the input's gradient as all-reduced over it.
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
    """Return the iteration dim whose split also splits this tensor dim, "" for none or for a product of dims."""
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

    Attributes:
        dims: Dims that the work runs over (an embedding's look-ups do not run over the vocabulary); a `SliceOf`
            restricts it to that slice of a dim (the first layer of a stack).
        flop_per_point: FLOP in the forward pass. The backward pass costs as much again for each entry of `inputs` that
            has a gradient. A sum has no such entries, as its gradients are copies.
        inputs: For each operand, the position in `Operator.reads`, or the positions of all reads that it was computed
            from within the operator: it has a gradient if any of them has.
        contraction: Whether it is multiply-add work (what FLOP counters count), not elementwise work.
    """

    dims: tuple[str | SliceOf, ...]
    flop_per_point: float
    inputs: tuple[int | tuple[int, ...], ...] = ()
    contraction: bool = False

    @property
    def origins(self) -> tuple[tuple[int, ...], ...]:
        """For each of its inputs, the reads that it is computed from."""
        return tuple((origin,) if isinstance(origin, int) else origin for origin in self.inputs)

    @property
    def reads(self) -> frozenset[int]:
        """All reads that it depends on."""
        return frozenset(read for origin in self.origins for read in origin)

    def num_gradients(self, has_gradient: Sequence[bool]) -> int:
        """Return how many of its inputs have a gradient, given whether each read has one."""
        return sum(any(has_gradient[read] for read in origin) for origin in self.origins)


def work_of_body(
    body: Body, *, layer: str, extents: Mapping[str, int], reads: Sequence[Access], writes: Sequence[Access]
) -> tuple[Work, ...]:
    """Return the work of an operator, derived from its body.

    Data movement is not counted, nor are pointwise functions of weights only (such as a scale stored minus 1).

    Args:
        body: Body of the operator.
        layer: Name of the operator, for messages.
        extents: Extents of its iteration dims.
        reads: Its reads.
        writes: Its writes.

    Raises:
        GraphError: The work of a step cannot be derived.
    """
    try:
        verify_body(body, layer=layer, reads=[read.tensor for read in reads], dims=tuple(extents))
    except GraphError:
        # Verification of the operator reports this, together with all other errors.
        return ()
    counted = _Counted(body, extents, reads, writes)
    for step in _countable_steps(body):
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


def _countable_steps(body: Body) -> Iterable[Step]:
    """Yield the steps of a body, with masked attention replaced by elementary steps."""
    for step in body.steps:
        yield from (
            elementary(Body(steps=(step,)), trains=True).steps if step.function == "masked_attention" else (step,)
        )


@dataclass(frozen=True, slots=True)
class _Tensor:
    """A tensor of a body: its dims, the reads that its gradient flows to, and whether it depends on weights only."""

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
    """Accumulates the work of steps; `known` are the tensors so far, `written` the dims of the operator's output."""

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
        """Add work over some dims; it is repeated for the gradient of each of the inputs."""
        over = set(dims)
        flop *= prod(extent for dim, extent in self.inner.items() if dim in over)
        if flop:
            points = tuple(dim for dim in self.extents if dim in over and dim not in self.inner)
            origins = tuple(x.origins[0] if len(x.origins) == 1 else x.origins for x in inputs if x.origins)
            self.works.append(Work(dims=points, flop_per_point=flop, inputs=origins, contraction=is_contraction))


_Rule = Callable[[_Counted, Step, Sequence[_Tensor]], tuple[str, ...]]
"""Counts the work of a step, given its tensors, and returns the dims of its result."""


def _count_points(counted: _Counted, step: Step, operands: Sequence[_Tensor]) -> None:
    every = _joined(operands)
    if step.function == "identity" or every.is_weight:
        return
    counts = function_of(step.function).counts
    # The gradient of a sum is a copy.
    inputs = () if counts is Arithmetic.SUM else operands
    counted.add(every.dims, 1 if counts is Arithmetic.ONE else len(step.operands) - 1, *inputs)


def _each_once(flop: int, *, keeps: bool) -> _Rule:
    """Return the rule of a function that does this many operations for each element of its first operand."""

    def rule(counted: _Counted, step: Step, operands: Sequence[_Tensor]) -> tuple[str, ...]:
        counted.add(operands[0].dims, flop, operands[0])
        return tuple(dim for dim in operands[0].dims if keeps or dim not in step.dims)

    return rule


def _product(counted: _Counted, step: Step, operands: Sequence[_Tensor]) -> tuple[str, ...]:
    # n factors take n - 1 products and a sum.
    counted.add(_joined(operands).dims, len(operands), *operands, is_contraction=True)
    return step.dims if step.function == "einsum" else counted.written


def _spread(counted: _Counted, step: Step, operands: Sequence[_Tensor]) -> tuple[str, ...]:
    # The whole window, at every position that it reads.
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
    """Return the rule of a function that replaces its first dims by the remaining ones."""
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
"""Counting rules of all other functions."""


Scalar = str | int | float | bool
ScalarT = TypeVar("ScalarT", str, int, float, bool)


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange(Indexed):
    """Communication between devices within an operator.

    Attributes:
        times: Number of times in one training step, forward and backward together.
        backward_times: Number of these that only occur if any of the reads `gradient_of` has a gradient.
    """

    times: int
    backward_times: int = 0
    gradient_of: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class AllReduce(Exchange):
    """A small tensor that an operator all-reduces internally: softmax's maximum and sum, a normalisation's mean.

    Attributes:
        over: Iteration dims whose split makes the all-reduce necessary.
    """

    over: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Relayout(Exchange):
    """A tensor that an operator writes in one layout and reads in another (a recurrent layer's hidden state).

    Attributes:
        index_map: How it is indexed when written.
        read: How it is indexed when read.
        is_ring: Whether parts circulate in a ring of devices and are read as they arrive, while the operator computes
            with the previous ones.
    """

    read: tuple[DimIndex, ...]
    is_ring: bool = False

    @property
    def changes(self) -> tuple[tuple[DimIndex, DimIndex], ...]:
        """Pairs of indices of a dim, when written and when read, that differ."""
        return tuple((a, b) for a, b in zip(self.index_map, self.read, strict=True) if a != b)


@dataclass(frozen=True, slots=True, kw_only=True)
class Handoff(Exchange):
    """A tensor that is sent to the next part along a split dim (the stages of a recurrent layer)."""

    across: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AllToAll(Exchange):
    """Rows whose destination device depends on the data: tokens, which are sent to their experts and back.

    Attributes:
        shape, index_map: Those of the rows on arrival.
        over: Iteration dims whose parts send to each other.
        copies: Number of rows that may be copies of one row, which is sent to each device once.
        excess: None where rows are in any order, so that a device receives equally many from each other one. Otherwise
            rows are already in place if all groups have equally many, and this is the excess of the largest group over
            an equal share, as a fraction of it.
    """

    over: tuple[str, ...]
    copies: int = 1
    excess: float | None = None


FAN_OUT = "fan_out"
"""Kind of vertices that pass a tensor to several consumers, and reduce its gradient once (`operators.fan_out`)."""

EPILOGUE = "epilogue"
"""Attribute of imported layers that names the functions applied to their result."""

SCANNED = "scanned"
"""Attribute of layers that a source has in the body of a loop: their position in it, equal for all iterations."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Intermediate(Indexed):
    """A temporary tensor of an operator: attention's probabilities, an LSTM's gates.

    Attributes:
        kept: Number of copies saved for the backward pass.
        working: Number of further copies that exist at the same time while the operator computes, forward or backward.
    """

    kept: int = 0
    working: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """Dims whose splits run as a wavefront: each part waits for the previous one in both dims."""

    stage: str
    """The dim of the stages."""
    sequence: str
    """The dim of the steps."""


WORK_OF_BODY: tuple[Work, ...] = (Work(dims=(), flop_per_point=0),)
"""Placeholder for work that is derived from an operator's body when the operator is created."""


@dataclass(frozen=True, kw_only=True)
class Operator:
    """A layer: an iteration space and how it indexes its tensors.

    Attributes:
        dims: The iteration space.
        reads, writes: Tensors. Reads that are not parameters are the inputs, in the order of the edges that feed them.
        work: FLOP, derived from the body by default.
        unsplittable: Dims that must not be split.
        exchanges, pipeline, intermediates: Properties that do not follow from the accesses.
        body: Its computation, if that is expressed as steps.
        attributes: Further attributes for executors.
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
        # Operators are looked up often, and their hash is expensive.
        return hash(tuple(getattr(self, field.name) for field in fields(self)))

    @cached_property
    def unnamed(self) -> "Operator":
        """The operator without its name, and without references to others by name: equal for repeated layers."""
        body = self.body
        return replace(self, name="", body=replace(body, problem="…") if body and body.problem else body)

    @cached_property
    def extents(self) -> Mapping[str, int]:
        """Extent of each iteration dim, in order."""
        return FrozenDict({dim.name: dim.extent for dim in self.dims})

    @property
    def is_fan_out(self) -> bool:
        """Whether it passes one tensor to several consumers and reduces its gradient; decided by its kind."""
        return self.kind == FAN_OUT

    @property
    def is_loss(self) -> bool:
        """Whether it computes the loss, one number; without a body, as in plans of 0.2.0, decided by its kind."""
        return (self.body.steps[-1].function if self.body and self.body.steps else self.kind) in LOSSES

    @property
    def parameters(self) -> tuple[Access, ...]:
        """The reads that are weights, trained or frozen."""
        return tuple(access for access in self.reads if access.role is Role.PARAMETER)

    @cached_property
    def wholes(self) -> Mapping[int, int]:
        """Return, for each write, by position, the write that it is a slice of, which is reduced and stored once.

        Of several candidates it is the one whose name precedes the bracket in its name.
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
        """The exchange that circulates in a ring during its computation; None if there is none."""
        return next((x for x in self.exchanges if isinstance(x, Relayout) and x.is_ring), None)

    def attribute(self, name: str, default: ScalarT) -> ScalarT:
        """Return an attribute, or the default if the operator does not have it."""
        value = dict(self.attributes).get(name, default)
        assert isinstance(value, type(default)), f"attribute {name} of {self.name} is {value!r}"
        return value

    def work_points(self, work: Work) -> int:
        """Return the number of points that a piece of work runs over, if one device does all of it."""
        return prod(dim.extent if isinstance(dim, SliceOf) else self.extents[dim] for dim in work.dims)

    def exchanges_with(self, has_gradient: Sequence[bool], *, forward_passes: int = 1) -> tuple[Exchange, ...]:
        """Return the exchanges with the number of times that they occur.

        Args:
            has_gradient: For each read, whether it has a gradient.
            forward_passes: Number of times that the forward pass runs.
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
