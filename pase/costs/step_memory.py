"""`StepMemory`: what every strategy of a step has in a device's memory, in each turn (`pase.costs.liveness`).

The peak of one strategy is exact. What all of them have in one turn is given as sums over layers and edges, which
a search can limit: no strategy has a lower peak. Left out of these are buckets of gradients, and of layers that are
recomputed what they hold while another layer goes back.
"""

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from pase.costs.choices import EdgeChoices, is_on_edge
from pase.costs.liveness import (
    GRADIENTS,
    KEPT,
    OPTIMISER,
    PASSING,
    UPDATE_TENSORS,
    WEIGHTS,
    AllocatedWeight,
    Span,
    StepTensors,
    Timeline,
    Turn,
    allocated_weights,
    bucket_spans,
    input_spans,
    layer_spans,
    weight_spans,
)
from pase.costs.memory import DeviceMemory, Keeping, keeping, state_size
from pase.costs.states import STATES, BoolArray
from pase.graph import ITEMSIZES, Graph
from pase.graph.operators.products import with_rings
from pase.sharding.edges import LayerMode, SharedWeight, table_edges
from pase.sharding.shards import FloatArray, IndexArray, IntArray
from pase.tables.cost_tables import EdgeTable, joined_edge, joint_classes

MAX_PATTERNS = 32
"""Ways of recomputing layers of which what is allocated when is kept."""


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


def _waits(span: Span | _Part, num_layers: int) -> bool:
    """Return whether a micro-batch has something in memory between its forward and its backward pass.

    What the last layer saves of the tensor that it reads may be made of it as late as the first turn backward.
    """
    return span.first <= num_layers <= span.last and (span.first < num_layers or span.of == KEPT)


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
        recomputes: Whether layers can be recomputed, as edges have it.
        micro_batches: In a step.
    """

    graph: Graph
    keeps: Keeping
    configurations: Sequence[IndexArray]
    optimiser: str
    modes: Sequence[Choices] = ()
    edges: Sequence[EdgeChoices] = ()
    recomputes: bool = False
    micro_batches: int = 1

    # -- strategies

    def peak(self, choice: Sequence[int], in_flight: int = 1) -> Peak:
        """Return the most that is in a device's memory under a strategy; arguments as for `of`."""
        return self.of(choice, in_flight).peak()

    def of(self, choice: Sequence[int], in_flight: int = 1) -> "StrategyMemory":
        """Return what a strategy has in memory, by the choices of the layers.

        in_flight: Of how many micro-batches a stage has something at once.
        """
        layers = list(zip(self.layers, choice, strict=True))
        rows = [int(layer.rows[c]) for layer, c in layers]
        weights = list[AllocatedWeight]()
        for v, (layer, c) in enumerate(layers):
            key = v, int(layer.state[c]), rows[v]
            if key not in self._weights:
                own = self._weights_in(STATES[key[1]]).get(v, ())
                self._weights[key] = [weight.under(rows[v]) for weight in own]
            weights += self._weights[key]
        rings = frozenset(v for v, (layer, c) in enumerate(layers) if layer.ring[c])
        return StrategyMemory(
            spans=self._where_recomputed(tuple([bool(layer.again[c]) for layer, c in layers]), rings),
            rows=rows,
            weights=weights,
            in_flight=in_flight,
        )

    @cached_property
    def _weights(self) -> dict[tuple[int, int, int], list[AllocatedWeight]]:
        """The weights of a layer, by its position, under one state and configuration."""
        return {}

    @cached_property
    def _recomputing(self) -> "dict[tuple[tuple[bool, ...], frozenset[int]], PassSpans]":
        return {}

    def _where_recomputed(self, again: tuple[bool, ...], rings: frozenset[int]) -> "PassSpans":
        """Return the spans of passes where [V] layers are recomputed, and some are rings."""
        key = self._plain.timeline.tensors.made_again(again), rings
        if key not in self._recomputing:
            if len(self._recomputing) == MAX_PATTERNS:
                del self._recomputing[next(iter(self._recomputing))]
            plain = self._plain
            if rings:
                plain = self._of_graph(with_rings(self.graph, {self.graph.operators[v].name for v in rings}))
            self._recomputing[key] = replace(plain, timeline=Timeline(plain.timeline.tensors, key[0]))
        return self._recomputing[key]

    @cached_property
    def layers(self) -> Sequence[Choices]:
        """[V] the choices of each layer; equal layers share a value."""
        if self.modes:
            return self.modes
        own = {id(rows): _Configurations.of(rows) for rows in self.configurations}
        return [own[id(rows)] for rows in self.configurations]

    @cached_property
    def _plain(self) -> "PassSpans":
        """The spans of passes where nothing is recomputed, nor a ring by choice."""
        return self._of_graph(self.graph)

    def _of_graph(self, graph: Graph) -> "PassSpans":
        tensors = StepTensors(graph, self.keeps, self.configurations)
        return PassSpans(
            timeline=Timeline(tensors, (False,) * len(self.configurations)),
            optimiser=self.optimiser,
            micro_batches=self.micro_batches,
        )

    @cached_property
    def _rings(self) -> "PassSpans":
        """The spans where all attention is a ring that can be one."""
        return self._of_graph(with_rings(self.graph))

    @cached_property
    def _on_layers(self) -> "tuple[PassSpans, PassSpans]":
        """Those, as the graph has attention and as rings, without what counts on edges."""
        graph, keeps = self.graph, self.keeps
        on_edges = frozenset[tuple[str, int]]()
        if self.recomputes:
            on_edges = frozenset((e.consumer, e.input) for e in graph.edges if is_on_edge(graph, e, keeps))
        return replace(self._plain, without=on_edges), replace(self._rings, without=on_edges)

    def _by_kind(self, v: int, choices: Choices, bytes_of: "Callable[[PassSpans], IntArray]") -> IntArray:
        """Return [C] bytes of a layer, as the graph has it or as a ring."""
        found = np.zeros(len(choices.rows), dtype=np.int64)
        for is_ring in np.unique(choices.ring).tolist():
            found += bytes_of(self._on_layers[is_ring]) * (choices.ring == is_ring)
        return found

    def least_state_bytes(self) -> int:
        """Return the least that weights, their gradients and the optimizer's state take, at any batch size."""
        at, total = self._plain.timeline.update, 0
        for v in range(len(self.configurations)):
            states = [STATES[number] for number in np.unique(self.layers[v].state).tolist()]
            total += min(int(self._held(v, state, at, finds_gradients=False)[0].min()) for state in states)
        return total

    # -- one turn

    def usage(self, turn: Turn, in_flight: int = 1) -> TurnUsage:
        """Return what strategies have in memory in one turn.

        Of a micro-batch but the first one that goes back gradients of weights are there, and of one fewer than there
        are at most something besides.

        Args:
            turn: Of the step.
            in_flight: Of how many micro-batches a stage has something at once.
        """
        timeline = self._plain.timeline
        waiting = waiting_besides(in_flight, self.micro_batches, is_first=turn.is_first)
        at = timeline.number(turn)
        is_back = turn.phase in ("functions", "product")
        finds_gradients = self.micro_batches > 1 and not turn.is_first
        known: dict[Hashable, FloatArray] = {}

        def shared(v: int, values: IntArray) -> FloatArray:
            """Return an array, the same one for equal layers."""
            own = values.astype(np.float64)
            return known.setdefault((id(self.layers[v]), own.tobytes()), own)

        layers, largest = list[FloatArray](), list[FloatArray]()
        for v, own in enumerate(self.layers):
            held, most = self._in_states(v, own, at, finds_gradients=finds_gradients)
            is_there = ~own.again | (is_back and v == turn.position)

            def made(spans: PassSpans, v: int = v, own: Choices = own, is_there: BoolArray = is_there) -> IntArray:
                found = [span for span in (*spans.made_by(v), *spans.casts_of(v)) if span.first <= at <= span.last]
                lasting = self._sum(v, [span for span in found if timeline.is_lasting(span)])
                saved = self._sum(v, [span for span in found if not timeline.is_lasting(span)])
                return lasting[own.rows] + saved[own.rows] * is_there

            used = held + self._by_kind(v, own, made)
            layers.append(shared(v, used + waiting * self.waiting(v, own) if waiting else used))
            largest.append(shared(v, most))
        is_update = at == timeline.update and any(most.any() for most in largest)
        return TurnUsage(
            layers=tuple(layers),
            edges=tuple(self._edges_at(turn, at, waiting)),
            peaks=(tuple(largest),) if is_update else (),
        )

    def usage_between_turns(self, in_flight: int) -> tuple[list[FloatArray], list[EdgeTable | None]]:
        """Return at least how many bytes layers, `[V][C]`, and edges, `[E]`, need between the turns of a stage.

        Args:
            in_flight: Number of micro-batches in flight.
        """
        known: dict[Hashable, Any] = {}
        layers = list[FloatArray]()
        for v, own in enumerate(self.layers):
            used = (self.lasting(v, own, has_casts=False) + in_flight * self.waiting(v, own)).astype(np.float64)
            layers.append(known.setdefault((id(own), used.tobytes()), used))
        edges = list[EdgeTable | None]()
        for table in self.copies:
            if table is not None and in_flight and id(table) not in known:
                known[id(table)] = replace(table, values=in_flight * table.values)
            edges.append(None if table is None or not in_flight else known[id(table)])
        return layers, edges

    def waiting(self, v: int, choices: Choices) -> IntArray:
        """Return [C] the bytes of a layer, of a micro-batch between its forward and its backward pass, at least.

        choices: Of the layer's configurations.
        """
        num = len(self.configurations)

        def waits(spans: PassSpans) -> IntArray:
            found = [span for span in spans.made_by(v) if _waits(span, num)]
            lasting = self._sum(v, [span for span in found if spans.timeline.is_lasting(span)])
            saved = self._sum(v, [span for span in found if not spans.timeline.is_lasting(span)])
            return lasting[choices.rows] + saved[choices.rows] * ~choices.again

        return self._by_kind(v, choices, waits)

    def lasting(self, v: int, choices: Choices, *, has_casts: bool) -> IntArray:
        """Return [C] the bytes of a layer when a micro-batch begins to go back, at least, besides what `waiting` has.

        Args:
            v: The layer.
            choices: Of its configurations.
            has_casts: Whether weights in another type count, which layers make anew in each pass.
        """
        at = self._plain.timeline.number(Turn("functions", len(self.configurations) - 1))
        held, _ = self._in_states(v, choices, at, finds_gradients=self.micro_batches > 1)
        casts = self._sum(v, [span for span in self._plain.casts_of(v) if span.first < at <= span.last])
        return held + casts[choices.rows] * ~choices.again * has_casts

    def _sum(self, v: int, spans: Iterable[Span]) -> IntArray:
        """Return [K] the bytes of some spans of a layer."""
        nothing = np.zeros(len(self.configurations[v]), dtype=np.int64)
        found: IntArray = sum((span.size for span in spans), nothing)
        return found

    def _in_states(self, v: int, choices: Choices, at: int, *, finds_gradients: bool) -> tuple[IntArray, IntArray]:
        """Return [C] what `_held` does, with what a step is given."""
        held, most = np.zeros((2, len(choices.rows)), dtype=np.int64)
        for number in np.unique(choices.state).tolist():
            has_state = choices.state == number
            in_state = self._held(v, STATES[number], at, finds_gradients=finds_gradients)
            for found, values in zip((held, most), in_state, strict=True):
                found[has_state] = values[choices.rows[has_state]]
        given = self._by_kind(v, choices, lambda spans: self._sum(v, spans.inputs_of(v))[choices.rows])
        return held + given * self.micro_batches, most

    def _held(self, v: int, state: str, at: int, *, finds_gradients: bool) -> tuple[IntArray, IntArray]:
        """Return [K] the bytes of a layer's weights in a turn, at least, and the most that the update of one takes.

        finds_gradients: Whether those of micro-batches before are there.
        """
        timeline, precision, num = self._plain.timeline, self.graph.precision, len(self.configurations[v])
        itemsize = ITEMSIZES[precision.gradients]
        held, most = np.zeros(num, dtype=np.int64), np.zeros(num, dtype=np.int64)
        for weight in self._weights_in(state).get(v, ()):
            held = held + weight.part.held_points * precision.itemsize
            if not weight.read.is_trained:
                continue
            held = held + state_size(weight.part.shard, num, precision, self.optimiser)
            update = UPDATE_TENSORS.get(self.optimiser, 0) * precision.itemsize
            most = np.maximum(most, weight.part.shard_points * update)
            if weight.operator.name not in self.graph.trained:
                continue
            last = timeline.tensors.last_user[weight.read.shared] if weight.read.shared else weight.position
            product = timeline.backward(last)[1]
            # Of this micro-batch they are there from the layer's turn on, sharded at last ones.
            is_summed = finds_gradients or product <= at
            is_scattered = finds_gradients or at == timeline.update
            shard, whole = weight.part.shard_points * is_scattered, weight.part.points * is_summed
            if state == "zero1" and finds_gradients and at <= product:
                # They are whole until the last ones are added to them.
                shard = whole
            held = held + itemsize * np.where(weight.part.is_cut, shard, whole)
            if state == "zero3" and at == timeline.backward(v)[1]:
                held = held + weight.part.gathered_points * weight.part.is_cut * precision.itemsize
        return held, most

    def _weights_in(self, state: str) -> dict[int, list[AllocatedWeight]]:
        """Return the weights of each layer in a state."""
        if state not in self._weights_by_state:
            own = self._weights_by_state.setdefault(state, {})
            for weight in allocated_weights(self._plain.timeline, [state] * len(self.configurations)):
                own.setdefault(weight.position, []).append(weight)
        return self._weights_by_state[state]

    @cached_property
    def _weights_by_state(self) -> dict[str, dict[int, list[AllocatedWeight]]]:
        return {}

    @cached_property
    def _ends(self) -> list[tuple[int, int]]:
        return [(self.graph.index[edge.producer], self.graph.index[edge.consumer]) for edge in table_edges(self.graph)]

    @cached_property
    def copies(self) -> list[EdgeTable | None]:
        """[E] what is kept of copies on edges, by the choices of their ends; None of those without."""
        if self.recomputes:
            return [modes.kept for modes in self.edges]
        found: list[EdgeTable | None] = [None] * len(self._ends)
        known: dict[Hashable, EdgeTable] = {}
        # How a ring differs is by what it reads: a copy is of its consumer's kind.
        plain, is_chosen = self._plain.timeline.tensors.copies, any(layer.ring.any() for layer in self.layers)
        rings = self._rings.timeline.tensors.copies if is_chosen else plain
        for (number, (producer, consumer), table), (*_, of_rings) in zip(plain, rings, strict=True):
            u, v = self.layers[producer], self.layers[consumer]
            key = id(table), id(of_rings), id(u), id(v)
            if key not in known:
                known[key] = _by_choices(table, of_rings, u, v)
            found[number] = known[key]
        return found

    def _edges_at(self, turn: Turn, at: int, waiting: int) -> Iterator[EdgeTable | None]:
        timeline, is_back = self._plain.timeline, turn.phase in ("functions", "product")
        known: dict[Hashable, EdgeTable | None] = {}
        for edge, (u, v), table in zip(table_edges(self.graph), self._ends, self.copies, strict=True):
            is_there = timeline.again(v) <= at <= timeline.backward(v)[1]
            if self.recomputes and not isinstance(edge, SharedWeight):
                # Of layers that are recomputed what these read, until the first of them goes back.
                is_there &= is_back and u <= turn.position
            is_at_work = is_there and self.recomputes and v == turn.position
            key = id(table), id(self.layers[v]), is_there + waiting, is_at_work
            if key not in known:
                known[key] = None
                if table is not None and is_there + waiting:
                    known[key] = self._of_edge(table, self.layers[v], is_there, waiting, is_at_work=is_at_work)
            yield known[key]

    def _of_edge(
        self, table: EdgeTable, reader: Choices, is_there: bool, waiting: int, *, is_at_work: bool
    ) -> EdgeTable | None:
        """Return what an edge has in memory in a turn; is_at_work: whether it is its reader's."""
        if not is_at_work or not reader.again.any():
            times = is_there + waiting
            return table if times == 1 else replace(table, values=times * table.values)
        # A layer at work has what it reads, whether it is recomputed or not.
        kinds = list(zip(reader.rows.tolist(), reader.ring.tolist(), strict=True))
        plain = {kind: c for c, kind in reversed(list(enumerate(kinds))) if not reader.again[c]}
        if not all(kind in plain for kind in kinds):
            return None
        at_work = table.col_class[[plain[kind] for kind in kinds]]
        col_class, own, other = joint_classes(at_work, table.col_class)
        return EdgeTable(
            row_class=table.row_class,
            col_class=col_class,
            values=table.values[:, own] + waiting * table.values[:, other],
        )


def waiting_besides(in_flight: int, micro_batches: int, *, is_first: bool) -> int:
    """Return of how many micro-batches there is something besides the one that is at work.

    Args:
        in_flight: Of how many there is at most.
        micro_batches: In a step.
        is_first: Whether that one is the first that goes back; a later one is one of fewer.
    """
    return (in_flight if is_first or micro_batches == 1 else min(in_flight, micro_batches - 1)) - 1


@dataclass(frozen=True, kw_only=True, eq=False)
class PassSpans:
    """What is allocated in a pass of a micro-batch, and when, under all configurations of layers.

    Attributes:
        timeline: Turns, and which layers are recomputed.
        optimiser: As the others, see `StepMemory`.
        micro_batches: In a step.
        without: Reads of which what is saved is left out.
    """

    timeline: Timeline
    optimiser: str
    micro_batches: int
    without: frozenset[tuple[str, int]] = frozenset()

    @cached_property
    def inputs(self) -> list[tuple[int, Span]]:
        """What a micro-batch is given, each with its layer."""
        return list(input_spans(self.timeline))

    @cached_property
    def of_pass(self) -> list[tuple[int, Span]]:
        """What is there in a pass, with the layer whose configuration it depends on."""
        return [(v, span) for v in range(len(self.timeline.recomputed)) for span in self.made_by(v)]

    def made_by(self, v: int) -> list[Span]:
        """Return what a layer makes in a pass of a micro-batch."""
        if v not in self._made:
            operator = self.timeline.graph.operators[v]
            self._made[v] = list(layer_spans(self.timeline, operator, self.without))
            if self.micro_batches > 1:
                # Each has its own copy of its part of the step's inputs.
                self._made[v] += [Span(0, self.timeline.update - 1, span.size) for span in self.inputs_of(v)]
        return self._made[v]

    @cached_property
    def _made(self) -> dict[int, list[Span]]:
        return {}

    @cached_property
    def _by_layer(self) -> tuple[list[list[Span]], list[list[Span]]]:
        inputs, casts = ([list[Span]() for _ in self.timeline.recomputed] for _ in range(2))
        for v, span in self.inputs:
            inputs[v].append(span)
        for v, span in weight_spans(self.timeline, (), self.optimiser, is_first=True, is_last=True):
            casts[v].append(span)
        return inputs, casts

    def inputs_of(self, v: int) -> list[Span]:
        """Return what a micro-batch is given for a layer."""
        return self._by_layer[0][v]

    def casts_of(self, v: int) -> list[Span]:
        """Return what a layer makes of weights beside these: in another type, or to be added."""
        return self._by_layer[1][v]


@dataclass(frozen=True, kw_only=True, eq=False)
class StrategyMemory:
    """What one strategy has in a device's memory.

    Attributes:
        spans: Of passes where its layers are recomputed that are.
        rows: [V] the configurations of its layers.
        weights: Of all layers, under these, in order.
        in_flight: Of how many micro-batches there is something at once.
    """

    spans: PassSpans
    rows: Sequence[int]
    weights: Sequence[AllocatedWeight]
    in_flight: int

    def peak(self) -> Peak:
        """Return the most that is in a device's memory."""
        spans, timeline, num = self.spans, self.spans.timeline, len(self.rows)
        of_pass = list(self._in_pass())
        # What a micro-batch has in flight between its passes.
        waiting = [_Part(0, timeline.update, part.size, KEPT, part.layer) for part in of_pass if _waits(part, num)]
        inputs = _chosen(spans.inputs, self.rows) * spans.micro_batches
        trained = [int(weight.part.shard_points[0]) for weight in self.weights if weight.read.is_trained]
        update = UPDATE_TENSORS.get(spans.optimiser, 0) * max(trained, default=0) * timeline.graph.precision.itemsize
        of_step = [*inputs, _Part(timeline.update, timeline.update, update, PASSING, 0)]
        found = []
        # The first backward pass finds no gradients; a later one these, and no more micro-batches than there are.
        for is_first, is_last in ((True, False), (False, True)) if spans.micro_batches > 1 else ((True, True),):
            besides = waiting_besides(self.in_flight, spans.micro_batches, is_first=is_first)
            held = weight_spans(timeline, self.weights, spans.optimiser, is_first=is_first, is_last=is_last)
            buckets = ((0, span) for span in bucket_spans(timeline, self.weights, is_last=is_last))
            parts = [*of_step, *of_pass, *waiting * besides, *_chosen([*held, *buckets], self.rows)]
            found.append(self._peak_of(parts, is_first=is_first and not is_last))
        return max(found, key=lambda peak: peak.bytes)

    def waiting_bytes(self) -> tuple[int, int]:
        """Return the bytes in memory between the turns of a stage: whatever is in flight, and of each micro-batch.

        Gradients count as they are between micro-batches.
        """
        spans, timeline, num = self.spans, self.spans.timeline, len(self.rows)
        held = weight_spans(timeline, self.weights, spans.optimiser, is_first=True, is_last=False)
        state = [part.size for part in _chosen(held, self.rows) if part.last == timeline.update]
        inputs = [part.size for part in _chosen(spans.inputs, self.rows)] * spans.micro_batches
        return sum(state) + sum(inputs), sum(part.size for part in self._in_pass() if _waits(part, num))

    def _in_pass(self) -> Iterator[_Part]:
        yield from _chosen(self.spans.of_pass, self.rows)
        timeline, rows = self.spans.timeline, self.rows
        for _, (u, v), table in timeline.tensors.copies:
            size = int(table.cost(rows[u], rows[v]))
            yield _Part(timeline.again(v), timeline.backward(v)[1], size, PASSING, v)

    def _peak_of(self, parts: Sequence[_Part], *, is_first: bool) -> Peak:
        timeline, num = self.spans.timeline, len(self.rows)
        first, last, sizes, of, layer = np.array(parts, dtype=np.int64).reshape(-1, 5).T
        changes = np.zeros(timeline.update + 2, dtype=np.int64)
        is_any = last >= first
        np.add.at(changes, first[is_any], sizes[is_any])
        np.subtract.at(changes, last[is_any] + 1, sizes[is_any])
        at = int(np.cumsum(changes[:-1]).argmax())
        turn = timeline.turn(at)._replace(is_first=is_first)
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


class GroupTurn(NamedTuple):
    """A turn of a stage, by the stage's number in its group of devices."""

    stage: int
    turn: Turn


class GroupPeak(NamedTuple):
    """The most bytes that a group of devices has in memory, and in which turn."""

    bytes: int
    at: GroupTurn


@dataclass(frozen=True, kw_only=True, eq=False)
class GroupMemory:
    """What a group of devices has in memory that has one stage of a pipeline, or several in turns.

    Attributes:
        stages: Of the group, in order.
        under_way: [moments, stages] of how many micro-batches of each stage are in flight.
    """

    stages: tuple[StepMemory, ...]
    under_way: IntArray

    @cached_property
    def bounds(self) -> tuple[tuple[int, int], ...]:
        """The first layer of each stage, and the one behind the last."""
        ends = np.cumsum([0, *(len(stage.configurations) for stage in self.stages)]).tolist()
        return tuple(pairwise(ends))

    @cached_property
    def _peaks(self) -> dict[tuple[int, ...], GroupPeak]:
        return {}

    def peak(self, choice: Sequence[int]) -> GroupPeak:
        """Return the peak of a strategy, by the choices of the layers of all stages."""
        key = tuple(choice)
        if key not in self._peaks:
            strategies = [
                stage.of(key[first:stop], in_flight)
                for stage, (first, stop), in_flight in zip(self.stages, self.bounds, self._in_flight, strict=True)
            ]
            besides = bytes_of_others(strategies, self.under_way)
            each = [(strategy.peak(), more) for strategy, more in zip(strategies, besides, strict=True)]
            found = [
                GroupPeak(peak.bytes + more, GroupTurn(number, peak.turn)) for number, (peak, more) in enumerate(each)
            ]
            self._peaks[key] = max(found, key=lambda own: own.bytes)
        return self._peaks[key]

    @property
    def _in_flight(self) -> list[int]:
        found: list[int] = self.under_way.max(axis=0).tolist()
        return found

    def usage(self, at: GroupTurn) -> TurnUsage:
        """Return what strategies have in memory in a turn, at least."""
        number, turn = at
        own = self.stages[number].usage(turn, self._in_flight[number])
        if len(self.stages) == 1:
            return own
        layers, edges = list[FloatArray](), list[EdgeTable | None]()
        known: dict[Hashable, FloatArray] = {}
        # Others hold no less than at any moment: at the one at which they have most micro-batches.
        moment = self.under_way[(self.under_way.sum(axis=1) - self.under_way[:, number]).argmax()].tolist()
        peaks: tuple[tuple[FloatArray, ...], ...] = own.peaks and ((),)
        for k, (stage, count) in enumerate(zip(self.stages, moment, strict=True)):
            used, on_edges = list(own.layers), list(own.edges)
            if k != number:
                used, on_edges = stage.usage_between_turns(count)
            layers += used
            edges += on_edges
            if own.peaks:
                nothing = [known.setdefault(len(rows), np.zeros(len(rows))) for rows in used]
                peaks = ((*peaks[0], *(own.peaks[0] if k == number else nothing)),)
        return TurnUsage(layers=tuple(layers), edges=tuple(edges), peaks=peaks)


def bytes_of_others(strategies: Sequence[StrategyMemory], under_way: IntArray) -> list[int]:
    """Return, for each stage of a group of devices, the most that its other stages have in memory while it is at work.

    under_way: [moments, stages], as in `GroupMemory`.
    """
    if len(strategies) == 1:
        return [0]
    states, kept = np.array([strategy.waiting_bytes() for strategy in strategies]).T
    found = []
    for number in range(len(strategies)):
        is_other = np.arange(len(strategies)) != number
        found.append(int(states[is_other].sum() + (under_way[:, is_other] @ kept[is_other]).max()))
    return found


def memory_of_layers(
    graph: Graph,
    layers: Sequence[LayerMode],
    *,
    optimiser: str,
    micro_batches: int = 1,
    in_flight: int = 1,
    keeps: Keeping | None = None,
) -> StrategyMemory:
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
    tensors = StepTensors(graph, keeps or keeping(graph), rows)
    timeline = Timeline(tensors, tensors.made_again([layer.is_recomputed for layer in layers]))
    return StrategyMemory(
        spans=PassSpans(timeline=timeline, optimiser=optimiser, micro_batches=micro_batches),
        rows=[0] * len(layers),
        weights=list(allocated_weights(timeline, [layer.state for layer in layers])),
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
