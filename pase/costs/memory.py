"""What a device holds of tensors: parts of weights with the optimiser's state, and what is kept for the backward pass.

What the backward pass needs follows from the kind of operator (`saved`). Each tensor is kept once in each layout that
it has. When all of it is in memory `pase.costs.liveness` says.

Sizes are those of what a program holds: windows with their halos and padding.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from pase.errors import CostError, unknown_name
from pase.graph import ITEMSIZES, Access, Edge, Graph, Operator, Precision, Role, SliceOf, Window
from pase.graph.functions import POINTWISE, REDUCTIONS, Saves, function_of
from pase.graph.operator import FAN_OUT, Indexed, named_dims
from pase.sharding.edges import SharedWeight, edge_itemsizes, edge_sides, shared_weights
from pase.sharding.shards import (
    IndexArray,
    IntArray,
    Splits,
    components,
    distinct_rows,
    held_extents,
    splits_of,
)
from pase.tables.cost_tables import EdgeTable

PLACE_BYTES = 8
"""Of a place that maximum pooling found: PyTorch's indices."""

DEFAULT_OPTIMISER = "sgd"

Parts = Sequence[tuple[int, IntArray]]
"""For each dim of a tensor: its extent, and the [K] extents of a device's part of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMemory:
    """Bytes on each device at the peak of a step (parts are of one size, so that all devices need the same).

    weights_bytes: parts of weights. gradients_bytes: theirs. optimiser_bytes: what the optimiser keeps for them.
    activations_bytes: what else is kept for the backward pass. buffers_bytes: the rest, freed within the same pass,
    which belongs to no single layer.
    """

    weights_bytes: int
    gradients_bytes: int
    optimiser_bytes: int = 0
    activations_bytes: int
    buffers_bytes: int

    @property
    def kept_bytes(self) -> int:
        """All but the buffers: the sum of what each layer has (`LayerPlan.memory_bytes`)."""
        return self.weights_bytes + self.gradients_bytes + self.optimiser_bytes + self.activations_bytes

    @property
    def total_bytes(self) -> int:
        """The peak of a step."""
        return self.kept_bytes + self.buffers_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """What the backward pass of an operator needs: positions of reads and of writes, and how many more tensors it made.

    results: of the shape of its first write, beside it: what activations were applied to. places: of that shape, too:
    where each of its points comes from.
    """

    reads: frozenset[int] = frozenset()
    writes: frozenset[int] = frozenset()
    results: int = 0
    places: int = 0

    def results_bytes(self, itemsize: int) -> int:
        """Return the bytes that are kept for each point of the first write, beside it."""
        return self.results * itemsize + self.places * PLACE_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class Keeping:
    """Which tensors of a graph are kept, each once in a layout, by layer and position.

    writes: those of which the writer's part is kept. reads: those of which the reader's part is. copies: of which it is
    where it has a layout of its own.
    """

    writes: frozenset[tuple[str, int]]
    reads: frozenset[tuple[str, int]]
    copies: frozenset[tuple[str, int]]
    saved: Mapping[str, Saved]


_BY_POINTS = ("elementwise", "pointwise")
"""Kinds that compute functions of points alone."""

_MOVES = frozenset(
    {FAN_OUT, "add_parameter", "concat", "dropout", "global_pool", "outputs", "padded", "piece", "reorder"}
)
"""Kinds whose gradient needs nothing that they read or write: sums, moves, and masks that are drawn again."""


def saved(graph: Graph, operator: Operator) -> Saved:
    """Return what the backward pass of an operator needs of the forward pass; what nothing is known of needs all."""
    if operator.name not in graph.trained:
        return Saved()
    inputs = [i for i, read in enumerate(operator.reads) if read.role is not Role.PARAMETER]
    applied = _saving(operator.attribute("activation", ""))
    by_result = bool(applied) and function_of(applied[-1]).saves is Saves.RESULT
    results, kind = len(applied) - by_result, operator.kind
    if not applied and kind not in _BY_POINTS:
        results, by_result = _applied_in_steps(operator)
    places = 0
    reads, writes = set[int](), {0} if by_result else set[int]()
    if kind in _BY_POINTS:
        factors = [(i,) for i in range(len(operator.reads))]
        functions = _saving(operator.attribute("function", ""))
        saves_result = bool(functions) and function_of(functions[-1]).saves is Saves.RESULT
        is_product = functions[:1] == ["multiply"]
        if saves_result and len(inputs) == len(functions) == 1 and not applied:
            writes.add(0)
        elif functions:
            reads.update(i for i in inputs if not is_product or _partner_has_gradient(graph, operator, (i,), factors))
            # What each function but the last made for the next.
            results += len(functions) - 1 + bool(applied) * saves_result
    elif kind.startswith("pool"):
        is_maximum = operator.attribute("reduction", "max") == "max"
        reads, places = (reads | {0}, 1) if is_maximum else (reads, 0)
    elif kind == "reduction":
        is_sum = operator.attribute("function", "") in ("sum", "mean")
        reads, writes = (reads, writes) if is_sum else (reads | {0}, writes | {0})
    elif kind == "softmax":
        writes.add(0)
    elif kind == "lstm" or kind in _MOVES:
        pass  # an LSTM's own input is one of its intermediates
    elif kind == "gather":
        reads.update(i for i in inputs if operator.reads[i].role is Role.INDEX)
    elif kind == "embedding" or kind == "statistics" or kind.endswith("_norm"):
        reads.add(0)
    elif kind != "opaque" and any(work.contraction for work in operator.work):
        products = [work.origins for work in operator.work if work.contraction]
        reads.update(i for at in products for i in inputs if _partner_has_gradient(graph, operator, (i,), at))
        # Attention without its softmax computes that again, from its result among others.
        if kind == "attention" and all(tensor.tensor != "softmax" for tensor in operator.intermediates):
            writes.add(0)
    else:
        reads.update(inputs)
        if not operator.is_loss:
            writes.update(range(len(operator.writes)))
    return Saved(reads=frozenset(reads), writes=frozenset(writes), results=results, places=places)


def _saving(functions: str) -> list[str]:
    """Return those of some functions, with commas between them, whose gradients need a tensor."""
    return [f for f in functions.split(",") if f and function_of(f).saves is not Saves.NOTHING]


def _applied_in_steps(operator: Operator) -> tuple[int, bool]:
    """Return how many tensors functions of points keep between an operator's steps, and whether one is what it writes.

    As large as that is, that is: what a mean or a sum is made into (a deviation) is left out.
    """
    steps = operator.body.steps if operator.body and not operator.is_loss and operator.kind != "attention" else ()
    made, small, kept = set[str](), set[str](), set[str]()
    for step in steps:
        tensors = [operand for operand in step.operands if isinstance(operand, str)]
        if step.function in REDUCTIONS or (tensors and small.issuperset(tensors)):
            small.add(step.result)
        is_scaled = step.function in ("multiply", "divide") and len(tensors) == 1
        saves = function_of(step.function).saves
        if step.function in POINTWISE and saves is not Saves.NOTHING and not is_scaled:
            kept.update([step.result] if saves is Saves.RESULT else made.intersection(tensors))
        made.add(step.result)
    kept -= small
    last = steps[-1].result if steps else ""
    return len(kept - {last}), last in kept


def _partner_has_gradient(
    graph: Graph, operator: Operator, factor: tuple[int, ...], factors: Sequence[tuple[int, ...]]
) -> bool:
    """Return whether a product needs a factor for another's gradient; factors: the reads that each comes of."""
    if factor not in factors:
        return False
    rest = [*factors]
    rest.remove(factor)
    return any(graph.has_gradient(operator, read) for other in rest for read in other)


def keeping(graph: Graph) -> Keeping:
    """Return which tensors of a graph are kept to the backward pass."""
    known: dict[tuple[int, tuple[bool, ...]], Saved] = {}
    saved_of = {}
    for operator, like in zip(graph.operators, graph.repeated, strict=True):
        key = like, graph.read_gradients(operator)
        if key not in known:
            known[key] = saved(graph, operator)
        saved_of[operator.name] = known[key]
    writes, copies = set[tuple[str, int]](), set[tuple[str, int]]()
    # What is read and comes from no layer is data: the reader's part of it is all that there is.
    reads = {(name, i) for name, of in saved_of.items() for i in of.reads if (name, i) not in graph.incoming}
    passed_on = set[str]()
    for operator in reversed(graph.operators):
        for output in range(len(operator.writes)):
            tensor = operator.name, output
            readers = [(edge.consumer, edge.input) for edge in graph.readers.get(tensor, ())]
            needing = [(name, i) for name, i in readers if i in saved_of[name].reads or name in passed_on]
            # Who computes with it in another type keeps it in that.
            casting = [(name, i) for name, i in needing if graph.types[name].is_cast(i)]
            reads.update(casting)
            needing = [reader for reader in needing if reader not in casting]
            if operator.is_fan_out:
                # It writes what it reads, and that is kept as such; here are copies alone.
                passed_on.update([operator.name] if needing else [])
                copies.update(needing)
            elif output in saved_of[operator.name].writes or len(needing) > 1:
                writes.add(tensor)
                copies.update(needing)
            else:
                reads.update(needing)
    copies.update((weight.consumer, weight.input) for weight in shared_weights(graph))
    return Keeping(writes=frozenset(writes), reads=frozenset(reads), copies=frozenset(copies), saved=saved_of)


def edge_memory(graph: Graph, edge: Edge, us: IndexArray, vs: IndexArray) -> EdgeTable:
    """Return the bytes of a reader's copy, where it has a layout of its own; of a shared weight, with its gradient's.

    us, vs: [K_u, D_u], [K_v, D_v] configurations of the writer and of the reader.
    """
    sides = zip(edge_sides(graph, edge), (us, vs), strict=True)
    numbers: dict[Hashable, int] = {}
    (row_class, u_layouts, _), (col_class, v_layouts, points) = (
        _classes(operator, access, values, numbers) for (operator, access), values in sides
    )
    differ = u_layouts[:, None] != v_layouts[None, :]
    there, back = edge_itemsizes(graph, edge)
    size = there + back * isinstance(edge, SharedWeight)
    return EdgeTable(row_class=row_class, col_class=col_class, values=(differ * points * size).astype(np.float64))


def _classes(
    operator: Operator, access: Access, values: IndexArray, numbers: dict[Hashable, int]
) -> tuple[IndexArray, IntArray, IntArray]:
    """Return [K] the class of each configuration by what a tensor depends on; [L] its layout's number and points."""
    dims = named_dims(access)
    columns = [i for i, dim in enumerate(operator.extents) if dim in dims]
    _, class_of = distinct_rows(values[:, columns])
    _, first = np.unique(class_of, return_index=True)
    splits = splits_of(operator, values[first])
    layouts = [
        numbers.setdefault(_layout(operator, access, dict(zip(operator.extents, row, strict=True))), len(numbers))
        for row in splits.values.tolist()
    ]
    points = held_points(operator, access, splits)
    return class_of.astype(np.int32), np.array(layouts, dtype=np.int64), points


def _layout(operator: Operator, access: Access, split: Mapping[str, int]) -> Hashable:
    """Return how a tensor lies, whatever the shape in which it is seen: equal for equal parts of its elements.

    Elements are numbered row by row. A split of a dim in even parts decides by some of the digits of that number, those
    from its elements below a part to its own; splits of neighbouring dims that decide by all digits between are one.
    """
    cuts: list[tuple[int, int]] = []
    below = 1
    for part in reversed(components(access, operator.extents)):
        axis = part.axis
        if isinstance(axis, Window):
            reach = (operator.extents[axis.out] - 1) * axis.stride + (part.kernel_extent - 1) * axis.dilation + 1
            if axis.pad or reach != part.length or split[axis.out] > 1 or split[axis.kernel] > 1:
                return operator.name, access.tensor, tuple(split.items())
        elif axis is not None:
            parts = split[axis.dim if isinstance(axis, SliceOf) else axis]
            if parts > 1 and (isinstance(axis, SliceOf) or part.length % parts):
                return operator.name, access.tensor, tuple(split.items())
            if parts > 1:
                low, high = below * part.length // parts, below * part.length
                if cuts and cuts[-1][1] == low:
                    low, _ = cuts.pop()
                cuts.append((low, high))
        below *= part.length
    return tuple(cuts)


def optimiser_state(name: str) -> "State":
    """Return what an optimiser keeps for a weight; CostError where there is none of that name."""
    if name not in OPTIMISER_STATE:
        raise CostError(unknown_name("optimiser", name, OPTIMISER_STATE))
    return OPTIMISER_STATE[name]


def state_size(parts: Parts, num: int, precision: Precision, optimiser: str) -> IntArray:
    """Return the [K] bytes that an optimiser keeps for the parts of a weight, copies that it updates among them.

    num: K.
    """
    masters = num_points(parts, num) * ITEMSIZES[precision.masters] if precision.masters else 0
    return optimiser_state(optimiser)(parts, num) * ITEMSIZES[precision.moments] + masters


def held_parts(operator: Operator, tensor: Indexed, splits: Splits) -> Parts:
    """Return the parts of a tensor that a device holds under configurations."""

    def largest(dim: str, extent: int) -> IntArray:
        return -(-extent // splits.of(dim).astype(np.int64))

    return held_extents(operator, tensor, largest)


def held_points(operator: Operator, tensor: Indexed, splits: Splits) -> IntArray:
    """Return the [K] points of a tensor that a device holds under configurations."""
    return num_points(held_parts(operator, tensor, splits), len(splits.values))


def num_points(parts: Parts, num_configurations: int) -> IntArray:
    """Return the [K] points of the largest part."""
    points = np.ones(num_configurations, dtype=np.int64)
    for _, size in parts:
        points = points * size
    return points


State = Callable[[Parts, int], IntArray]
"""From a weight's parts and K to the [K] numbers that an optimiser keeps for it on each device."""


def _copies(count: int) -> State:
    return lambda parts, num_configurations: count * num_points(parts, num_configurations)


def _factored(parts: Parts, num_configurations: int) -> IntArray:
    """Return the means of the rows and columns of a weight's two largest dims, the later ones of equal ones.

    What has one dim keeps a number for each of its own.
    """
    if len(parts) < 2:
        return num_points(parts, num_configurations)
    first, second = sorted(range(len(parts)), key=lambda dim: (parts[dim][0], dim))[-2:]
    rows, columns = ([part for i, part in enumerate(parts) if i != left_out] for left_out in (second, first))
    return num_points(rows, num_configurations) + num_points(columns, num_configurations)


OPTIMISER_STATE: Mapping[str, State] = MappingProxyType(
    {"sgd": _copies(0), "momentum": _copies(1), "adam": _copies(2), "adamw": _copies(2), "adafactor": _factored}
)
"""What each optimiser keeps, by the name that training knows it by."""
