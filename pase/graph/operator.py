"""`Operator`: a vertex of the computation graph, one layer of a network, as data."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from math import prod
from typing import TypeVar

from pase.common.frozen import FrozenDict
from pase.graph.access import Access, Dim, DimIndex, Indexed, Role, SliceOf, access_dims
from pase.graph.body import LOSSES, Body
from pase.graph.work import Work, work_of_body

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
    """Splits of `stage` and `sequence` run as a wavefront: a part waits for the one before it in both dims."""

    stage: str
    sequence: str


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
