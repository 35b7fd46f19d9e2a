"""`StepMemory`: what every strategy of a step has in a device's memory, in each turn (`pase.costs.liveness`).

The peak of one strategy is exact. What all of them have in one turn is given as sums over layers and edges, which
a search can limit: no strategy has a lower peak. Left out of these are buckets of gradients, and of layers that are
recomputed what they hold while another layer goes back.
"""

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from pase.costs.choices import EdgeChoices
from pase.costs.liveness import (
    GRADIENTS,
    KEPT,
    OPTIMISER,
    PASSING,
    UPDATE_TENSORS,
    WEIGHTS,
    AllocatedWeight,
    Span,
    Timeline,
    Turn,
    allocated_weights,
    bucket_spans,
    input_spans,
    layer_spans,
    weight_spans,
)
from pase.costs.memory import DeviceMemory, Keeping, edge_memory, keeping, state_size
from pase.costs.states import STATES, BoolArray
from pase.graph import ITEMSIZES, Graph
from pase.graph.operators.products import with_rings
from pase.sharding.edges import LayerMode, table_edges
from pase.sharding.shards import FloatArray, IndexArray, IntArray
from pase.tables.cost_tables import EdgeTable, joined_edge


@dataclass(frozen=True, slots=True, kw_only=True)
class Peak:
    """The most that is in a device's memory at once.

    Attributes:
        layer: In whose turn that is, "" for the update.
        phase: "forward", "backward" or "update".
        turn: Which turn it is.
        memory: What it is of.
        kept_by_layer: [V] the bytes of each layer but for buffers.
    """

    layer: str
    phase: str
    turn: Turn = field(repr=False)
    memory: DeviceMemory
    kept_by_layer: tuple[int, ...] = field(repr=False)

    @property
    def bytes(self) -> int:
        """How much that is."""
        return self.memory.total_bytes


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TurnUsage:
    """What strategies have in a device's memory in one turn of a step, in bytes, at least.

    Attributes:
        layers: [V] the [C] bytes of each layer, for its choices; equal ones are one array.
        edges: [E] those of copies, for each edge of the tables; None where there are none.
        peaks: [groups, V] the [C] bytes of each layer, of which the greatest counts.
    """

    layers: tuple[FloatArray, ...]
    edges: tuple[EdgeTable | None, ...]
    peaks: tuple[tuple[FloatArray, ...], ...]


class _Part(NamedTuple):
    """Bytes of a strategy that are in memory from one turn to another, what they are of, and whose."""

    first: int
    last: int
    size: int
    of: int
    layer: int

    def crosses(self, num_layers: int) -> bool:
        """Return whether they are there between the forward and the backward pass."""
        return self.first < num_layers <= self.last


class Choices(Protocol):
    """The choices of a layer: [C] the configuration, the number of the state in `STATES`, whether recomputed, whether
    a ring."""

    @property
    def rows(self) -> NDArray[np.intp]: ...

    @property
    def state(self) -> NDArray[np.intp]: ...

    @property
    def again(self) -> BoolArray: ...

    @property
    def ring(self) -> BoolArray: ...


class _Configurations(NamedTuple):
    """All configurations of a layer, with its weights whole and nothing recomputed."""

    rows: NDArray[np.intp]
    state: NDArray[np.intp]
    again: BoolArray
    ring: BoolArray

    @classmethod
    def of(cls, configurations: IndexArray) -> "_Configurations":
        num = len(configurations)
        return cls(np.arange(num), np.zeros(num, dtype=np.intp), *np.zeros((2, num), dtype=np.bool_))


@dataclass(frozen=True, kw_only=True, eq=False)
class StepMemory:
    """What is in a device's memory in each turn of a step, for every strategy that some choices make.

    Attributes:
        graph: Of one micro-batch; a stage where it is of a pipeline.
        keeps: Which tensors are kept; of the whole graph, where it is a stage.
        configurations: [V] the [K, D] splits that each layer can have.
        optimiser: Whose state counts.
        modes: [V] the choices of each layer; by default its configurations, with all weights whole.
        edges: [E] what edges keep by these, as `pase.costs.choices` has it, where layers can be recomputed.
        micro_batches: In a step.
        in_flight: Of how many a stage has something at once.
    """

    graph: Graph
    keeps: Keeping
    configurations: Sequence[IndexArray]
    optimiser: str
    modes: Sequence[Choices] = ()
    edges: Sequence[EdgeChoices] = ()
    micro_batches: int = 1
    in_flight: int = 1

    # -- strategies

    def peak(self, choice: Sequence[int]) -> Peak:
        """Return the most that is in a device's memory under a strategy, by the choices of the layers."""
        rows = [int(layer.rows[c]) for layer, c in zip(self.layers, choice, strict=True)]
        states = [STATES[layer.state[c]] for layer, c in zip(self.layers, choice, strict=True)]
        again = [bool(layer.again[c]) for layer, c in zip(self.layers, choice, strict=True)]
        rings = [v for v, (layer, c) in enumerate(zip(self.layers, choice, strict=True)) if layer.ring[c]]
        if not rings and not any(again) and all(state == STATES[0] for state in states):
            return self._of_configurations.peak(rows)
        chosen = [own[row : row + 1] for own, row in zip(self.configurations, rows, strict=True)]
        graph = with_rings(self.graph, {self.graph.operators[v].name for v in rings}) if rings else self.graph
        return self._strategies(graph, chosen, states, again).peak()

    @cached_property
    def layers(self) -> Sequence[Choices]:
        """[V] the choices of each layer; equal layers share a value."""
        if self.modes:
            return self.modes
        own = {id(rows): _Configurations.of(rows) for rows in self.configurations}
        return [own[id(rows)] for rows in self.configurations]

    @cached_property
    def _of_configurations(self) -> "Strategies":
        """The strategies in which all weights are whole, and nothing is recomputed, nor a ring by choice."""
        return self._whole(self.graph)

    @cached_property
    def _of_rings(self) -> "Strategies":
        """The same where all attention is a ring that can be one; where none is chosen that is the former."""
        is_chosen = any(layer.ring.any() for layer in self.layers)
        return self._whole(with_rings(self.graph)) if is_chosen else self._of_configurations

    def _whole(self, graph: Graph) -> "Strategies":
        num = len(self.configurations)
        return self._strategies(graph, self.configurations, [STATES[0]] * num, [False] * num)

    def _strategies(
        self, graph: Graph, configurations: Sequence[IndexArray], states: Sequence[str], recomputed: Sequence[bool]
    ) -> "Strategies":
        return Strategies(
            timeline=Timeline(graph, self.keeps, configurations, recomputed),
            states=states,
            optimiser=self.optimiser,
            micro_batches=self.micro_batches,
            in_flight=self.in_flight,
        )

    def least_state_bytes(self) -> int:
        """Return the least that weights, their gradients and the optimizer's state take, at any batch size."""
        at, total = self._of_configurations.timeline.update, 0
        for v in range(len(self.configurations)):
            total += min(int(self._held(v, state, at)[0].min()) for state in self._states_of(v))
        return total

    # -- one turn

    def usage(self, turn: Turn) -> TurnUsage:
        """Return what strategies have in memory in one turn."""
        plain = self._of_configurations
        at, timeline = plain.timeline.number(turn), plain.timeline
        is_back = turn.phase in ("functions", "product")
        num = len(self.configurations)
        # A later pass of several finds gradients, and no more micro-batches than there are.
        others = (self.in_flight if self.micro_batches == 1 else min(self.in_flight, self.micro_batches - 1)) - 1
        known: dict[Hashable, FloatArray] = {}

        def shared(v: int, values: IntArray) -> FloatArray:
            """Return an array, the same one for equal layers."""
            own = values.astype(np.float64)
            return known.setdefault((id(self.layers[v]), own.tobytes()), own)

        layers, largest = list[FloatArray](), list[FloatArray]()
        for v, rows in enumerate(self.configurations):
            nothing = np.zeros(len(rows), dtype=np.int64)
            own, is_there = self.layers[v], ~self.layers[v].again | (is_back and v == turn.position)
            there = np.zeros(len(own.rows), dtype=np.int64)
            for is_ring in np.unique(own.ring).tolist():
                strategies = self._of_rings if is_ring else plain
                given = sum((span.size for span in strategies.inputs_of(v)), nothing) * self.micro_batches
                made = sum((span.size for span in strategies.made_by(v) if span.first <= at <= span.last), nothing)
                # Of other micro-batches in flight what is there between their passes.
                between = [span.size for span in strategies.made_by(v) if span.first < num <= span.last]
                waiting = sum(between, nothing) * others
                passing = made[own.rows] * is_there + waiting[own.rows] * ~own.again
                there += (given[own.rows] + passing) * (own.ring == is_ring)
            held, most = np.zeros((2, len(own.rows)), dtype=np.int64)
            for state in self._states_of(v):
                has_state = own.state == STATES.index(state)
                for found, values in zip((held, most), self._held(v, state, at), strict=True):
                    found[has_state] = values[own.rows[has_state]]
            layers.append(shared(v, there + held))
            largest.append(shared(v, most))
        is_update = at == timeline.update and any(most.any() for most in largest)
        return TurnUsage(
            layers=tuple(layers),
            edges=tuple(self._edges_at(turn, at)),
            peaks=(tuple(largest),) if is_update else (),
        )

    def _states_of(self, v: int) -> list[str]:
        return [STATES[number] for number in np.unique(self.layers[v].state).tolist()]

    def _held(self, v: int, state: str, at: int) -> tuple[IntArray, IntArray]:
        """Return [K] the bytes of a layer's weights in a turn, at least, and the most that the update of one takes."""
        plain, precision, num = self._of_configurations, self.graph.precision, len(self.configurations[v])
        timeline, itemsize = plain.timeline, ITEMSIZES[precision.gradients]
        held, most = np.zeros(num, dtype=np.int64), np.zeros(num, dtype=np.int64)
        for span in plain.casts_of(v):
            held = held + span.size * (span.first <= at <= span.last)
        for weight in self._weights[state].get(v, ()):
            held = held + weight.part.held_points * precision.itemsize
            if not weight.read.is_trained:
                continue
            held = held + state_size(weight.part.shard, num, precision, self.optimiser)
            update = UPDATE_TENSORS.get(self.optimiser, 0) * precision.itemsize
            most = np.maximum(most, weight.part.shard_points * update)
            if weight.operator.name not in self.graph.trained:
                continue
            last = timeline.last_user[weight.read.shared] if weight.read.shared else weight.position
            product = timeline.backward(last)[1]
            # There are those of micro-batches before; of this one from the layer's turn on, sharded at last ones.
            is_summed = self.micro_batches > 1 or product <= at
            is_scattered = self.micro_batches > 1 or at == timeline.update
            shard, whole = weight.part.shard_points * is_scattered, weight.part.points * is_summed
            held = held + itemsize * np.where(weight.part.is_cut, shard, whole)
            if state == "zero3" and at == timeline.backward(v)[1]:
                held = held + weight.part.gathered_points * weight.part.is_cut * precision.itemsize
        return held, most

    @cached_property
    def _weights(self) -> dict[str, dict[int, list[AllocatedWeight]]]:
        """The weights of each layer, by state."""
        num = len(self.configurations)
        found: dict[str, dict[int, list[AllocatedWeight]]] = {}
        for state in {state for v in range(num) for state in self._states_of(v)}:
            own = found.setdefault(state, {})
            for weight in allocated_weights(self._of_configurations.timeline, [state] * num):
                own.setdefault(weight.position, []).append(weight)
        return found

    @cached_property
    def _num_edges(self) -> int:
        return len(table_edges(self.graph))

    @cached_property
    def _copies(self) -> dict[int, EdgeTable]:
        """What copies on edges take, by the number of the edge, by the choices of its ends."""
        known: dict[Hashable, EdgeTable] = {}
        found = {}
        # How a ring differs is by what it reads: a copy is of its consumer's kind.
        kinds = zip(self._of_configurations.copies, self._of_rings.copies, strict=True)
        for (number, (producer, consumer), _, _, table), (*_, of_rings) in kinds:
            u, v = self.layers[producer], self.layers[consumer]
            key = id(table), id(of_rings), id(u), id(v)
            if key not in known:
                known[key] = _by_choices(table, of_rings, u, v)
            found[number] = known[key]
        return found

    def _edges_at(self, turn: Turn, at: int) -> Iterator[EdgeTable | None]:
        if not any(layer.again.any() for layer in self.layers):
            there = {number for number, _, first, last, _ in self._of_configurations.copies if first <= at <= last}
            yield from (self._copies.get(number) if number in there else None for number in range(self._num_edges))
            return
        timeline = self._of_configurations.timeline
        for edge, modes in zip(table_edges(self.graph), self.edges, strict=True):
            u, v = self.graph.index[edge.producer], self.graph.index[edge.consumer]
            is_there = timeline.again(v) <= at <= timeline.backward(v)[1]
            # Of layers that are recomputed what these read, until the first of them goes back.
            is_there &= modes.is_weight or (turn.phase in ("functions", "product") and u <= turn.position)
            yield modes.kept if is_there else None


@dataclass(frozen=True, kw_only=True, eq=False)
class Strategies:
    """Strategies in which layers have one mode each.

    Attributes:
        timeline: Turns, and [V] the configurations of layers.
        states: [V] how devices hold weights; one of `STATES`.
        optimiser: As the others, see `StepMemory`.
    """

    timeline: Timeline
    states: Sequence[str]
    optimiser: str
    micro_batches: int
    in_flight: int

    @cached_property
    def weights(self) -> list[AllocatedWeight]:
        """All weights."""
        return list(allocated_weights(self.timeline, self.states))

    @cached_property
    def _inputs(self) -> list[tuple[int, Span]]:
        return list(input_spans(self.timeline))

    @cached_property
    def _of_pass(self) -> list[tuple[int, Span]]:
        """What is there in a pass of a micro-batch, with the layer whose configuration it depends on."""
        timeline = self.timeline
        found = [(v, span) for v, op in enumerate(timeline.graph.operators) for span in layer_spans(timeline, op)]
        if self.micro_batches > 1:
            # Each has its own copy of its part of the step's inputs.
            found += [(v, Span(0, timeline.update - 1, span.size)) for v, span in self._inputs]
        return found

    @cached_property
    def _by_layer(self) -> tuple[list[list[Span]], list[list[Span]], list[list[Span]]]:
        num = len(self.timeline.rows)
        inputs, made, casts = ([list[Span]() for _ in range(num)] for _ in range(3))
        for v, span in self._inputs:
            inputs[v].append(span)
        for v, span in self._of_pass:
            made[v].append(span)
        for v, span in weight_spans(self.timeline, (), self.optimiser, is_first=True, is_last=True):
            casts[v].append(span)
        return inputs, made, casts

    def inputs_of(self, v: int) -> list[Span]:
        """Return what a micro-batch is given for a layer."""
        return self._by_layer[0][v]

    def made_by(self, v: int) -> list[Span]:
        """Return what a layer makes in a pass of a micro-batch."""
        return self._by_layer[1][v]

    def casts_of(self, v: int) -> list[Span]:
        """Return what a layer makes of weights beside these: in another type, or to be added."""
        return self._by_layer[2][v]

    @cached_property
    def copies(self) -> list[tuple[int, tuple[int, int], int, int, EdgeTable]]:
        """Copies of what layers read: number of the edge, its ends, from which turn to which one, and how large."""
        timeline, found = self.timeline, []
        graph = timeline.graph
        known: dict[Hashable, EdgeTable] = {}
        for number, edge in enumerate(table_edges(graph)):
            if (edge.consumer, edge.input) in timeline.keeps.copies:
                ends = u, v = graph.index[edge.producer], graph.index[edge.consumer]
                key = type(edge), timeline.kinds[u], timeline.kinds[v], edge.output, edge.input
                if key not in known:
                    known[key] = edge_memory(graph, edge, timeline.rows[u], timeline.rows[v])
                found.append((number, ends, timeline.again(v), timeline.backward(v)[1], known[key]))
        return found

    @property
    def _passes(self) -> tuple[tuple[bool, bool, int], ...]:
        """Of the passes that take most: whether it is the first and the last one, and how many are in flight."""
        if self.micro_batches == 1:
            return ((True, True, self.in_flight),)
        # The first backward pass finds no gradients; a later one these, and no more micro-batches than there are.
        return (True, False, self.in_flight), (False, True, min(self.in_flight, self.micro_batches - 1))

    def peak(self, rows: Sequence[int] = ()) -> Peak:
        """Return the most that is in a device's memory under a strategy.

        rows: [V] the configurations of layers; () where each has one.
        """
        timeline, num = self.timeline, len(self.timeline.rows)
        rows = rows or [0] * num
        weights = [weight.under(rows[weight.position]) for weight in self.weights]
        of_pass = list(self._in_pass(rows))
        # What a micro-batch has in flight between its passes.
        waiting = [_Part(0, timeline.update, part.size, KEPT, part.layer) for part in of_pass if part.crosses(num)]
        inputs = _chosen(self._inputs, rows) * self.micro_batches
        largest = max((int(weight.part.shard_points[0]) for weight in weights if weight.read.is_trained), default=0)
        update = UPDATE_TENSORS.get(self.optimiser, 0) * largest * timeline.graph.precision.itemsize
        of_step = [*inputs, _Part(timeline.update, timeline.update, update, PASSING, 0)]
        found = []
        for is_first, is_last, in_flight in self._passes:
            held = weight_spans(timeline, weights, self.optimiser, is_first=is_first, is_last=is_last)
            buckets = ((0, span) for span in bucket_spans(timeline, weights, is_last=is_last))
            parts = [*of_step, *of_pass, *waiting * (in_flight - 1), *_chosen([*held, *buckets], [0] * num)]
            found.append(self._peak_of(parts))
        return max(found, key=lambda peak: peak.bytes)

    def waiting_bytes(self) -> tuple[int, int]:
        """Return the bytes in memory between the turns of a stage: for its weights, and for a micro-batch in flight.

        Every layer has one configuration. Gradients count as they are between micro-batches.
        """
        rows, end = [0] * len(self.timeline.rows), self.timeline.update
        spans = weight_spans(self.timeline, self.weights, self.optimiser, is_first=True, is_last=False)
        state = sum(int(span.size[0]) for _, span in spans if span.last == end)
        return state, sum(part.size for part in self._in_pass(rows) if part.crosses(len(rows)))

    def _in_pass(self, rows: Sequence[int]) -> Iterator[_Part]:
        yield from _chosen(self._of_pass, rows)
        for _, (u, v), first, last, table in self.copies:
            yield _Part(first, last, int(table.cost(rows[u], rows[v])), PASSING, v)

    def _peak_of(self, parts: Sequence[_Part]) -> Peak:
        timeline, num = self.timeline, len(self.timeline.rows)
        first, last, sizes, of, layer = np.array(parts, dtype=np.int64).reshape(-1, 5).T
        changes = np.zeros(timeline.update + 2, dtype=np.int64)
        is_any = last >= first
        np.add.at(changes, first[is_any], sizes[is_any])
        np.subtract.at(changes, last[is_any] + 1, sizes[is_any])
        at = int(np.cumsum(changes[:-1]).argmax())
        turn = timeline.turn(at)
        of = np.where((of == PASSING) & (first < num) & (last >= num), KEPT, of)
        there = (first <= at) & (at <= last)
        by_kind = _totals(of[there], sizes[there], 5)
        held = there & (of != PASSING)
        return Peak(
            layer=timeline.layer_of(at),
            phase="forward" if at < num else "backward" if at < timeline.update else "update",
            turn=turn,
            memory=DeviceMemory(
                weights_bytes=by_kind[WEIGHTS],
                gradients_bytes=by_kind[GRADIENTS],
                optimiser_bytes=by_kind[OPTIMISER],
                activations_bytes=by_kind[KEPT],
                buffers_bytes=by_kind[PASSING],
            ),
            kept_by_layer=tuple(_totals(layer[held], sizes[held], num)),
        )


def memory_of_layers(
    graph: Graph,
    layers: Sequence[LayerMode],
    *,
    optimiser: str,
    micro_batches: int = 1,
    in_flight: int = 1,
    keeps: Keeping | None = None,
) -> Strategies:
    """Return what is in a device's memory in a step of a strategy, whose layers have one configuration each.

    Args:
        graph: Of one micro-batch; a stage where it is of a pipeline.
        layers: How each of its layers is split and what modes it has, in its order.
        optimiser: Whose state counts.
        micro_batches: In a step.
        in_flight: Of how many a stage has something at once.
        keeps: Of the whole graph, where it is a stage.
    """
    rows = [
        np.array([[layer.splits[dim] for dim in operator.extents]], dtype=np.int32)
        for operator, layer in zip(graph.operators, layers, strict=True)
    ]
    return Strategies(
        timeline=Timeline(graph, keeps or keeping(graph), rows, [layer.is_recomputed for layer in layers]),
        states=[layer.state for layer in layers],
        optimiser=optimiser,
        micro_batches=micro_batches,
        in_flight=in_flight,
    )


def _by_choices(table: EdgeTable, of_rings: EdgeTable, u: Choices, v: Choices) -> EdgeTable:
    """Return the table of an edge by the choices of its ends; table, of_rings: by configurations, of either kind."""
    if not v.ring.any():
        return replace(table, row_class=table.row_class[u.rows], col_class=table.col_class[v.rows])
    of_gathered = replace(table, row_class=table.row_class[u.rows])
    every = joined_edge([[of_gathered, replace(of_rings, row_class=of_rings.row_class[u.rows])]])
    return replace(every, col_class=every.col_class[v.rows + len(table.col_class) * v.ring])


def _chosen(spans: Iterable[tuple[int, Span]], rows: Sequence[int]) -> list[_Part]:
    """Return spans under the configurations that layers have."""
    # A size may be the same under all configurations.
    return [
        _Part(first, last, int(size[rows[v] if len(size) > 1 else 0]), of, v) for v, (first, last, size, of) in spans
    ]


def _totals(numbers: NDArray[np.int64], sizes: NDArray[np.int64], count: int) -> list[int]:
    found = np.zeros(count, dtype=np.int64)
    np.add.at(found, numbers, sizes)
    totals: list[int] = found.tolist()
    return totals
