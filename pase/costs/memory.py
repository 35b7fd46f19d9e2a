"""Memory that a layer takes on each device in a training step, as arrays over its configurations.

It adds up over layers, and each layer's depends on its own configuration alone, so that a limit on it is one linear
constraint on a strategy. Sizes are those of what a program holds: windows with their halos and padding.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from pase.costs.build import Problem
from pase.costs.layouts import FloatArray, IndexArray, IntArray, Splits, splits_of
from pase.errors import CostError, unknown_name
from pase.graph import Access, Graph, Operator, Part, Role, Window

LOSS_KINDS = frozenset({"softmax_loss"})
"""Kinds whose output is one number: the loss is all that a program keeps of it."""

DEFAULT_OPTIMISER = "sgd"

Parts = Sequence[tuple[int, IntArray]]
"""For each dim of a weight: its extent, and the [K] extents of a device's part of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMemory:
    """Bytes on each device (parts are of one size, so that all devices need the same).

    weights_bytes: parts of weights. gradients_bytes: theirs. optimiser_bytes: what the optimiser keeps for them.
    activations_bytes: outputs of layers and their gradients. buffers_bytes: what layers read as they need it, halos
    and data included, and its gradients. Their sum is an upper bound where every tensor is kept to the end of the step.
    """

    weights_bytes: int
    gradients_bytes: int
    optimiser_bytes: int = 0
    activations_bytes: int
    buffers_bytes: int

    @property
    def total_bytes(self) -> int:
        """All of it."""
        kept = self.weights_bytes + self.gradients_bytes + self.optimiser_bytes
        return kept + self.activations_bytes + self.buffers_bytes


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayerMemory:
    """The same of one layer, [K] bytes each: an entry for each configuration."""

    weights: IntArray
    gradients: IntArray
    optimiser: IntArray
    activations: IntArray
    buffers: IntArray

    @property
    def total(self) -> IntArray:
        """[K] all of it."""
        return self.weights + self.gradients + self.optimiser + self.activations + self.buffers


def layer_memory(
    graph: Graph,
    operator: Operator,
    splits: IndexArray,
    *,
    optimiser: str = DEFAULT_OPTIMISER,
    word_bytes: int | None = None,
) -> LayerMemory:
    """Return what a layer takes on each device under configurations [K, D].

    optimiser: a name in `OPTIMISER_STATE`; CostError for another. word_bytes: of an element, by default the graph's.
    A weight that several layers share is kept by the first; every other one has a copy of it, a buffer, and a gradient.
    """
    state, configurations = optimiser_state(optimiser), splits_of(operator, splits)
    weights, gradients, kept, activations, buffers = (np.zeros(len(splits), dtype=np.int64) for _ in range(5))
    has_gradient = bool(operator.parameters)
    for position, read in enumerate(operator.reads):
        parts = _parts(operator, read, configurations)
        points = _points(parts, len(splits))
        if read.role is Role.PARAMETER:
            gradients += points
            if read.shared and graph.owners[read.shared] != operator.name:
                buffers += points
            else:
                weights += points
                kept += state(parts, len(splits))
            continue
        flows_back = graph.has_gradient(operator, position)
        has_gradient = has_gradient or flows_back
        buffers += points * (2 if flows_back else 1)
    if operator.kind not in LOSS_KINDS:
        for write in operator.writes:
            points = _points(_parts(operator, write, configurations), len(splits))
            activations += points * (2 if has_gradient else 1)
    size = word_bytes or graph.word_bytes
    return LayerMemory(
        weights=weights * size,
        gradients=gradients * size,
        optimiser=kept * size,
        activations=activations * size,
        buffers=buffers * size,
    )


def strategy_memory(
    graph: Graph,
    splits: Sequence[Mapping[str, int]],
    *,
    optimiser: str = DEFAULT_OPTIMISER,
    word_bytes: int | None = None,
) -> DeviceMemory:
    """Return what a whole strategy takes on each device; splits: for each layer, a factor for each iteration dim."""
    total = np.zeros(5, dtype=np.int64)
    for operator, split in zip(graph.operators, splits, strict=True):
        row = np.array([[split[dim] for dim in operator.extents]], dtype=np.int32)
        found = layer_memory(graph, operator, row, optimiser=optimiser, word_bytes=word_bytes)
        kinds = (found.weights, found.gradients, found.optimiser, found.activations, found.buffers)
        total += np.concatenate(kinds)
    weights, gradients, kept, activations, buffers = total.tolist()
    return DeviceMemory(
        weights_bytes=weights,
        gradients_bytes=gradients,
        optimiser_bytes=kept,
        activations_bytes=activations,
        buffers_bytes=buffers,
    )


def memory_tables(problem: Problem, *, optimiser: str = DEFAULT_OPTIMISER) -> tuple[FloatArray, ...]:
    """Return, for each vertex, the [K] bytes that its layer takes on each device; repeated layers share an array."""
    graph, known = problem.graph, dict[int, FloatArray]()
    found = []
    for operator, vertex_table, configurations in zip(
        graph.operators, problem.tables.vertex_table, problem.configurations, strict=True
    ):
        if vertex_table not in known:
            memory = layer_memory(graph, operator, configurations.splits, optimiser=optimiser)
            known[vertex_table] = memory.total.astype(np.float64)
        found.append(known[vertex_table])
    return tuple(found)


def optimiser_state(name: str) -> "State":
    """Return what an optimiser keeps for a weight; CostError where there is none of that name."""
    if name not in OPTIMISER_STATE:
        raise CostError(unknown_name("optimiser", name, OPTIMISER_STATE))
    return OPTIMISER_STATE[name]


def _parts(operator: Operator, access: Access, splits: Splits) -> list[tuple[int, IntArray]]:
    """Return a tensor's dims as a program holds them: each one's extent, and the [K] extents of the largest part."""

    def part(extent: int, dim: str) -> tuple[int, IntArray]:
        return extent, -(-extent // splits.of(dim).astype(np.int64))

    found: list[tuple[int, IntArray]] = []
    for extent, axis in zip(access.shape, access.axes, strict=True):
        match axis:
            case str():
                found.append(part(extent, axis))
            case tuple():
                found += [part(operator.extents[dim], dim) for dim in axis]
            case Window():
                outs, kernel = (part(operator.extents[dim], dim)[1] for dim in (axis.out, axis.kernel))
                found.append((extent, (outs - 1) * axis.stride + (kernel - 1) * axis.dilation + 1))
            case Part() if axis.extent > 1:
                found.append(part(axis.extent, axis.dim))
            case None if extent > 1:
                found.append((extent, np.full(len(splits.values), extent, dtype=np.int64)))
            case _:  # a single point is no dim of a program
                pass
    return found


def _points(parts: Parts, num_configurations: int) -> IntArray:
    """Return the [K] points of the largest part."""
    points = np.ones(num_configurations, dtype=np.int64)
    for _, size in parts:
        points = points * size
    return points


State = Callable[[Parts, int], IntArray]
"""From a weight's parts and K to the [K] numbers that an optimiser keeps for it on each device."""


def _copies(count: int) -> State:
    return lambda parts, num_configurations: count * _points(parts, num_configurations)


def _factored(parts: Parts, num_configurations: int) -> IntArray:
    """Return the means of the rows and columns of a weight's two largest dims, the later ones of equal ones.

    What has one dim keeps a number for each of its own.
    """
    if len(parts) < 2:
        return _points(parts, num_configurations)
    first, second = sorted(range(len(parts)), key=lambda dim: (parts[dim][0], dim))[-2:]
    rows, columns = ([part for i, part in enumerate(parts) if i != left_out] for left_out in (second, first))
    return _points(rows, num_configurations) + _points(columns, num_configurations)


OPTIMISER_STATE: Mapping[str, State] = MappingProxyType(
    {"sgd": _copies(0), "momentum": _copies(1), "adam": _copies(2), "adamw": _copies(2), "adafactor": _factored}
)
"""What each optimiser keeps, by the name that training knows it by."""
