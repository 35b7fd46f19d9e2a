"""One stage of a pipeline: its choices, what strategies cost and hold, and problems of sums that bound them.

What a strategy costs are sums over its choices (`StageSums`): what each micro-batch takes, t, and what a step takes
once, o. Communication that can hide counts with what is left of it beside the computation that hides it, in each
micro-batch, and in the last one with the sums of weights' gradients. So the cost α t + o is the largest of three sums.

Whether a strategy fits is decided by the peak of its memory (`pase.costs.step_memory`), which is no sum. What all
strategies have in memory in one turn, at least, is one: for shares μ of the three sums of costs, and a price λ of
memory in that turn, the least of the sums so weighed is an ordinary problem, which bounds every strategy that fits
(Lagrangian relaxation), and its optimum is a strategy. By itself a stage's problem has the turn in which micro-batches
begin to go back, which is told by each layer alone, wherever stages begin and end (`Stages`); `at` has another one.

Blocks of layers that repeat are problems of their own, whose sums add up to no more than the stage's.

Where a group of devices has several stages in turns, its chunks, these are one problem: layers side by side, without
edges from one chunk to another, within one memory. What is kept counts there by how many micro-batches of its chunk are
under way at the moment when they are most, and most evenly so; other moments count where a strategy is looked at.
"""

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from math import inf
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np

from pase.common.containers import FrozenDict
from pase.costs import GroupMemory, TimeUpError
from pase.costs.choice_tables import ChoiceTables
from pase.costs.choices import CRITERIA, EdgeChoices, LayerChoices
from pase.costs.states import BoolArray
from pase.costs.step_memory import GroupTurn
from pase.sharding.shards import IntArray
from pase.solver.search import solve
from pase.tables.cost_tables import CostTables, FloatArray, IndexArray

Choice = tuple[int, ...]

MAX_SOLVE_WORK = 1_000_000_000
"""Cells of tables that are looked at for one optimum, some seconds' worth; what is known by then counts."""
MIN_BLOCK, MAX_BLOCK, MIN_REPEATS = 4, 64, 3
"""Layers of a block that repeats, and how often it does at least to be taken apart."""
TOLERANCE = 1e-9


class StageSums(NamedTuple):
    """What a strategy of a stage takes: sums of `Figures`, edges included, and of what is held in a turn, at least.

    static: bytes, however many micro-batches are under way. kept: for one micro-batch, of chunks for all that are.
    """

    repeated: float
    streamed: float
    once: float
    summed: float
    cover: float
    static: float
    kept: float

    @property
    def micro_batch(self) -> float:
        """t: the cost of a micro-batch, less what hides."""
        return self.repeated + max(0.0, self.streamed - self.cover)

    @property
    def step(self) -> float:
        """o: what is paid once a step, less what hides beside the last micro-batch."""
        exposed = max(0.0, self.streamed + self.summed - self.cover)
        return self.once + exposed - max(0.0, self.streamed - self.cover)

    def least_bytes(self, in_flight: int) -> float:
        """Return what a device has in memory at least, with so many micro-batches under way."""
        return self.static + in_flight * self.kept


def together(chunks: FloatArray, moments: FloatArray | IntArray) -> FloatArray:
    """Return [..., sums] of what chunks take that a group of devices has in turns.

    Each hides by itself, so that t and o stand where nothing hides.

    Args:
        chunks: [..., chunks, sums] in the order of `StageSums`.
        moments: [moments, chunks] of how many micro-batches are under way, in what each chunk's `kept` is of.
    """
    repeated, streamed, once, summed, cover, static, kept = np.moveaxis(chunks, -1, 0)
    exposed = np.maximum(0.0, streamed - cover)
    found = np.zeros((*chunks.shape[:-2], chunks.shape[-1]))
    found[..., 0] = (repeated + exposed).sum(axis=-1)
    found[..., 2] = (once + np.maximum(0.0, streamed + summed - cover) - exposed).sum(axis=-1)
    found[..., 5] = static.sum(axis=-1)
    found[..., 6] = (kept @ moments.T).max(axis=-1)
    return found


@dataclass(frozen=True, kw_only=True, eq=False)
class StageProblem:
    """A stage's choices, how much a micro-batch counts, and what a device may hold.

    weight: α of the cost α t + o. in_flight: micro-batches that are under way in the turn of which tables have what is
    held. limit_bytes: of a device's memory, infinite where there is none. device: what strategies have in a device's
    memory; None for a part of a stage, and without a limit. beyond: [V] of each layer, [N, criteria] of what choices
    that the tables leave out take at least: the bound counts them; () where none is left out. light: [C] of distinct
    layers, by identity, the choices that may be looked at; empty for all. chunks: behind which layers chunks end; ()
    for a single one. moments: [moments, chunks] as `together` has it. deadline_s: by `perf_counter`, after which
    searching for an optimum raises TimeUpError.
    """

    tables: ChoiceTables
    weight: float
    in_flight: int
    limit_bytes: float
    device: GroupMemory | None = None
    beyond: tuple[FloatArray, ...] = ()
    light: Mapping[int, BoolArray] = field(default_factory=FrozenDict)
    chunks: tuple[int, ...] = ()
    moments: FloatArray = field(default_factory=lambda: np.ones((1, 1)))
    deadline_s: float = inf

    def check_time(self, _cells: int = 0) -> None:
        """Raise TimeUpError where the time is over."""
        if perf_counter() > self.deadline_s:
            raise TimeUpError(0.0)

    def cost(self, sums: StageSums) -> float:
        """Return α t + o."""
        return self.weight * sums.micro_batch + sums.step

    def may_fit(self, sums: StageSums) -> bool:
        """Return whether a strategy may be within the limit, by what it has in memory in one turn."""
        return sums.least_bytes(self.in_flight) <= self.limit_bytes * (1 + TOLERANCE)

    def fits(self, choice: Choice) -> bool:
        """Return whether the peak of a strategy is within the limit."""
        return self.device is None or self.device.peak(choice).bytes <= self.limit_bytes

    def at(self, turn: GroupTurn) -> "StageProblem":
        """Return the problem whose tables have what is held in another turn.

        Of choices that tables leave out it counts for nothing.
        """
        assert self.device is not None
        usage = self.device.usage(turn)
        held = [(own, np.zeros(len(own))) for own in usage.layers]
        tables = self.tables.holding(held, usage.edges, {})
        pairs = zip(tables.layers, self.tables.layers, strict=True)
        light = {id(own): self.light[id(before)] for own, before in pairs} if self.light else {}
        of_costs = np.array([name not in ("static", "kept") for name in CRITERIA], dtype=np.float64)
        costs = {id(rows): rows * of_costs for rows in self.beyond}
        return replace(
            self,
            tables=tables,
            in_flight=1,
            beyond=tuple(costs[id(rows)] for rows in self.beyond),
            light=FrozenDict(light),
            moments=np.ones((1, len(self.bounds))),
        )

    def sums(self, choice: Sequence[int]) -> StageSums:
        """Return what a strategy takes."""
        return self.looked_at(choice).sums

    def looked_at(self, choice: Sequence[int]) -> "Looked":
        """Return a strategy with what each of its layers and edges takes."""
        chosen = np.array(choice)
        starts, columns = self._stacked
        own = columns[starts + chosen]
        edges = self.edge_parts(chosen, chosen)
        parts = np.array(
            [
                own[first:beyond].sum(axis=0) + edges[inside].sum(axis=0)
                for (first, beyond), inside in zip(self.bounds, self._edges_of_chunks, strict=True)
            ]
        )
        sums = parts[0] if len(parts) == 1 else together(parts, self.moments)
        return Looked(tuple(choice), StageSums(*sums.tolist()), parts.sum(axis=0), own, edges, parts)

    @cached_property
    def bounds(self) -> tuple[tuple[int, int], ...]:
        """The first layer of each chunk, and the one behind the last."""
        return tuple(pairwise((0, *(self.chunks or (len(self.tables.layers),)))))

    @cached_property
    def _edges_of_chunks(self) -> list[IndexArray | slice]:
        """The numbers of the edges of each chunk."""
        if len(self.bounds) == 1:
            return [slice(None)]
        ends = np.array([u for u, _ in self.tables.ends], dtype=np.int32)
        inside = ((first <= ends) & (ends < beyond) for first, beyond in self.bounds)
        return [np.flatnonzero(own).astype(np.int32) for own in inside]

    def edge_parts(self, of_producers: IndexArray, of_consumers: IndexArray) -> FloatArray:
        """Return [E, criteria] of what edges take; their ends' choices are [V] of one strategy, or of two."""
        found = np.zeros((len(self.tables.edges), len(CRITERIA)))
        for edge, numbers, us, vs in self._equal_edges:
            found[numbers] = self.edge_part(edge, of_producers[us], of_consumers[vs])
        return found

    def edge_part(self, edge: EdgeChoices, us: IndexArray, vs: IndexArray) -> FloatArray:
        """Return [..., criteria] of what an edge takes, by [...] choices of its producer and of its consumer."""
        found = np.zeros((*np.broadcast_shapes(us.shape, vs.shape), len(CRITERIA)))
        found[..., edge.criterion(hides=self.tables.hides)] = edge.cost.values[
            edge.cost.row_class[us], edge.cost.col_class[vs]
        ]
        if edge.kept is not None:
            kept = edge.kept.values[edge.kept.row_class[us], edge.kept.col_class[vs]]
            found[..., CRITERIA.index("kept")] = kept
        return found

    @cached_property
    def _equal_edges(self) -> list[tuple[EdgeChoices, IndexArray, IndexArray, IndexArray]]:
        """Each distinct edge, the numbers of those that are alike, and their producers and consumers."""
        numbers: dict[int, list[int]] = {}
        for e, edge in enumerate(self.tables.edges):
            numbers.setdefault(id(edge), []).append(e)
        ends = np.array(self.tables.ends, dtype=np.int32).reshape(-1, 2)
        return [(self.tables.edges[own[0]], np.array(own), ends[own, 0], ends[own, 1]) for own in numbers.values()]

    @cached_property
    def _stacked(self) -> tuple[IndexArray, FloatArray]:
        """[V] the first row of each layer's choices in the columns of all."""
        distinct = {id(layer): layer for layer in self.tables.layers}
        ends = np.cumsum([0, *map(len, distinct.values())])
        first = dict(zip(distinct, ends, strict=False))
        starts = np.array([first[id(layer)] for layer in self.tables.layers])
        return starts, np.concatenate([layer.columns for layer in distinct.values()])

    # -- relaxations

    @cached_property
    def sides(self) -> FloatArray:
        """[sides, criteria]: the sums of which the largest is α t + o: all hides, not in the last one, in no one."""
        streams = any(layer.figures.streamed.any() for layer in self.tables.layers)
        streams |= any(edge.is_weight for edge in self.tables.edges)
        return sides_of(self.weight, hides=self.tables.hides)[: None if streams and self.weight > 1 else 2]

    @property
    def memory(self) -> FloatArray:
        """[criteria] as they count for memory."""
        return memory_weights(self.in_flight)

    def weighed(self, weights: FloatArray, below: float = np.inf) -> tuple[CostTables, list[IndexArray]]:
        """Return the problem of sums with [criteria] weights, and [V] the choices of each layer that it has.

        below: choices that are in no strategy of this cost are left out.
        """
        layers = self.tables.layers
        costs = {id(layer): np.maximum(layer.columns @ weights, 0.0) for layer in layers}
        # What layers take at least, those that are not looked at among them.
        room = below * (1 + TOLERANCE) - sum(costs[id(layer)].min() for layer in layers)
        left: dict[int, IndexArray] = {}
        for layer in layers:
            if id(layer) not in left:
                own = np.where(self.light.get(id(layer), True), costs[id(layer)], np.inf)
                left[id(layer)] = np.flatnonzero(own - own.min() <= max(room, 0.0)).astype(np.int32)
        return self.tables.weighed(weights, left), [left[id(layer)] for layer in layers]

    def optimum(self, weights: FloatArray, known: Iterable["Looked"] = ()) -> tuple[Choice, float]:
        """Return the optimum of a problem of sums, and a bound on it, left-out choices left out; known: strategies."""
        self.check_time()
        nearest = min(known, key=lambda own: own.criteria @ weights, default=None)
        below = np.inf if nearest is None else float(nearest.criteria @ weights)
        tables, left = self.weighed(weights, below)
        start = []
        if nearest is not None:
            at = [int(np.searchsorted(own, c)) for own, c in zip(left, nearest.choice, strict=True)]
            if all(c < len(own) and own[c] == d for c, own, d in zip(at, left, nearest.choice, strict=True)):
                start = [tuple(at)]
        left_s = None if self.deadline_s == inf else max(self.deadline_s - perf_counter(), 1e-9)
        found = solve(tables, known=start, max_work=MAX_SOLVE_WORK, time_limit_s=left_s)
        choice = tuple(int(own[c]) for own, c in zip(left, found.choice, strict=True))
        return choice, found.lower_bound

    def least(self, weights: FloatArray, pool: dict[Hashable, list["Looked"]]) -> float:
        """Return a bound on the sum of every strategy; pool: strategies by the keys of problems; one is added."""
        return min(self.looked_for(weights, pool)[1], self.least_alone(weights))

    def looked_for(self, weights: FloatArray, pool: dict[Hashable, list["Looked"]]) -> tuple["Looked", float]:
        """Return what `optimum` does, the strategy with what it takes; pool: as in `least`."""
        known = pool.setdefault(self.key, [])
        choice, low = self.optimum(weights, known=known)
        looked = next((own for own in known if own.choice == choice), None)
        if looked is None:
            looked = self.looked_at(choice)
            known.append(looked)
        return looked, low

    def least_beyond(self, weights: FloatArray, pool: dict[Hashable, list["Looked"]]) -> float:
        """Return what strategies with a choice that the tables leave out come to at least; infinite without any.

        One of the parts between which a single edge goes has such a choice, the others come to what they do.
        """
        if not any(map(len, self.beyond)):
            return np.inf
        lows = [part.least(weights, pool) for part in self.narrow_parts]
        more = (part.least_alone(weights) - low for part, low in zip(self.narrow_parts, lows, strict=True))
        return sum(lows) + min(more)

    @cached_property
    def narrow_parts(self) -> tuple["StageProblem", ...]:
        """The layers between places over which a single edge goes, or none, some at least."""
        num = len(self.tables.layers)
        over = np.zeros(num + 1, dtype=np.int64)
        for u, v in self.tables.ends:
            over[min(u, v) + 1 : max(u, v) + 1] += 1
        at = [0]
        for v in range(MIN_BLOCK, num - MIN_BLOCK + 1):
            if over[v] <= 1 and v - at[-1] >= MIN_BLOCK:
                at.append(v)
        return tuple(self._part(*ends) for ends in pairwise((*at, num))) if len(at) > 1 else (self,)

    def least_alone(self, weights: FloatArray) -> float:
        """Return what strategies with a choice that is left out come to at least by their layers alone."""
        if not any(map(len, self.beyond)):
            return np.inf
        least: dict[tuple[int, int], tuple[float, float]] = {}
        for layer, beyond in zip(self.tables.layers, self.beyond, strict=True):
            if (id(layer), id(beyond)) not in least:
                own = float(max((layer.columns @ weights).min(), 0.0))
                least[id(layer), id(beyond)] = own, float(max((beyond @ weights).min(initial=np.inf), 0.0))
        each = [least[id(layer), id(beyond)] for layer, beyond in zip(self.tables.layers, self.beyond, strict=True)]
        return sum(min(pair) for pair in each) + min(beyond - min(own, beyond) for own, beyond in each)

    @cached_property
    def repeats(self) -> tuple[int, int, int]:
        """The first layer of blocks that repeat, how many layers one has, and how many blocks there are.

        Of the chunk in which most layers are in such blocks.
        """
        each = [(first, *_repeats(_slice(self.tables, first, beyond))) for first, beyond in self.bounds]
        chunk, first, length, count = max(each, key=lambda own: own[2] * own[3])
        return chunk + first, length, count

    @cached_property
    def parts(self) -> tuple["StageProblem", ...]:
        """Its chunks, each of them a problem."""
        return tuple(self._part(*ends) for ends in self.bounds) if self.chunks else (self,)

    @cached_property
    def segments(self) -> tuple[tuple["StageProblem", int], ...]:
        """Parts of the stage, one after the other, and how often each is there: they add up to no more than it.

        Blocks of layers that repeat are such parts, and what is before and behind them; else the stage itself. Of
        chunks those of each.
        """
        if len(self.bounds) > 1:
            return tuple(own for part in self.parts for own in part.segments)
        first, length, count = self.repeats
        if count < MIN_REPEATS:
            return ((self, 1),)
        beyond, last = first + length * count, len(self.tables.layers)
        # What is before and behind in parts that are as long.
        before = [max(0, at) for at in range(first, -length, -length)][::-1]
        behind = [min(last, at) for at in range(beyond, last + length, length)]
        parts = [*pairwise(before), (first, first + length), *pairwise(behind)]
        counts = [1] * (len(before) - 1) + [count] + [1] * (len(behind) - 1)
        return tuple((self._part(*ends), times) for ends, times in zip(parts, counts, strict=True))

    @cached_property
    def looped(self) -> "StageProblem | None":
        """The block that repeats, with what lies between one and the next in itself; None where there is none."""
        first, length, count = self.repeats
        if count < MIN_REPEATS:
            return None
        block, beyond = _slice(self.tables, first, first + length), range(first + length, first + 2 * length)
        between = [
            (edge, (u - first) % length, (v - first) % length)
            for edge, (u, v) in zip(self.tables.edges, self.tables.ends, strict=True)
            if min(u, v) in range(first, first + length) and max(u, v) in beyond
        ]
        if any(u == v for _, u, v in between):
            # A layer that reads of its like.
            return None
        tables = replace(
            block,
            ends=(*block.ends, *((u, v) for _, u, v in between)),
            edges=(*block.edges, *(edge for edge, _, _ in between)),
        )
        return self._of(tables)

    def within(self, choice: Choice) -> "StageProblem":
        """Return the block that repeats between two of its like that have some choices."""
        first, length, _ = self.repeats
        block = _slice(self.tables, first, first + length)
        layers = list(block.layers)
        for edge, (u, v) in zip(self.tables.edges, self.tables.ends, strict=True):
            low, high = min(u, v) - first, max(u, v) - first
            if not 0 <= low < length <= high < 2 * length:
                continue
            # As it is read by the block, and as it reads of the one before.
            for own, other in ((low, high - length), (high - length, low)):
                every, chosen = (
                    np.arange(len(block.layers[own]), dtype=np.int32),
                    np.array(choice[other], dtype=np.int32),
                )
                is_producer = (own == low) == (u < v)
                part = self.edge_part(edge, *((every, chosen) if is_producer else (chosen, every)))
                layers[own] = layers[own].with_columns(layers[own].columns + part)
        return self._of(replace(block, layers=tuple(layers)))

    @property
    def columns(self) -> list[tuple["StageProblem", int]]:
        """The segments, with the block that repeats as it is behind its like."""
        if len(self.bounds) > 1:
            return [own for part in self.parts for own in part.columns]
        looped = self.looped
        return [(looped if looped and count > 1 else segment, count) for segment, count in self.segments]

    def _part(self, first: int, beyond: int) -> "StageProblem":
        return self._of(_slice(self.tables, first, beyond), self.beyond[first:beyond])

    def _of(self, tables: ChoiceTables, beyond: tuple[FloatArray, ...] = ()) -> "StageProblem":
        """Return the problem of some layers of a chunk."""
        return replace(self, tables=tables, device=None, beyond=beyond, chunks=(), moments=np.ones((1, 1)))

    @cached_property
    def key(self) -> Hashable:
        """What strategies of this problem are those of another one by."""
        light = tuple(own.tobytes() for own in self.light.values())
        return tuple(map(id, self.tables.layers)), tuple(map(id, self.tables.edges)), self.tables.ends, light


def side_by_side(
    chunks: Sequence[StageProblem],
    in_flight: Sequence[int],
    moments: IntArray,
    device: GroupMemory | None,
    known: dict[Hashable, Any],
) -> StageProblem:
    """Return the problem of the chunks of a group of devices, within one memory.

    Args:
        chunks: problems of stages.
        in_flight: micro-batches of each that are under way at the moment at which most are.
        moments: [moments, chunks] of micro-batches under way at all moments, as `pase.planning.stages` has them.
        device: what strategies of all chunks have in memory.
        known: tables with what is kept for several micro-batches, by the identity of those for one; more are added.
    """

    def for_all(value: Any, count: int, make: Callable[[Any, int], Any]) -> Any:
        if count > 1 and (id(value), count) not in known:
            known[id(value), count] = make(value, count)
        return known[id(value), count] if count > 1 else value

    layers: list[LayerChoices] = []
    edges: list[EdgeChoices] = []
    ends: list[tuple[int, int]] = []
    beyond: list[FloatArray] = []
    up_to = [0]
    for chunk, n in zip(chunks, in_flight, strict=True):
        layers += [for_all(layer, n, _layer_times) for layer in chunk.tables.layers]
        edges += [for_all(edge, n, _edge_times) for edge in chunk.tables.edges]
        ends += [(up_to[-1] + u, up_to[-1] + v) for u, v in chunk.tables.ends]
        beyond += [for_all(rows, n, _rows_times) for rows in chunk.beyond]
        up_to.append(len(layers))
    tables = replace(
        chunks[0].tables,
        configurations=tuple(rows for chunk in chunks for rows in chunk.tables.configurations),
        traffic=(),
        layers=tuple(layers),
        ends=tuple(ends),
        edges=tuple(edges),
    )
    shares = moments / np.array(in_flight)
    return replace(
        chunks[0],
        tables=tables,
        in_flight=1,
        device=device,
        beyond=tuple(beyond),
        chunks=tuple(up_to[1:]),
        moments=shares,
    )


def _layer_times(layer: LayerChoices, count: int) -> LayerChoices:
    return layer.with_columns(layer.columns * times(count))


def _rows_times(rows: FloatArray, count: int) -> FloatArray:
    return rows * times(count)


def _edge_times(edge: EdgeChoices, count: int) -> EdgeChoices:
    if edge.kept is None:
        return edge
    return replace(edge, kept=replace(edge.kept, values=count * edge.kept.values))


def times(in_flight: int) -> FloatArray:
    """Return [criteria] factors of what is kept for one micro-batch, for several."""
    return np.array([1.0] * (len(CRITERIA) - 1) + [float(in_flight)])


def sides_of(weight: float, *, hides: bool) -> FloatArray:
    """Return [sides, criteria]: the sums of which the largest is α t + o; hides: whether communication can hide."""
    a = weight
    if not hides:
        return np.array([[a, a, 1.0, 1.0, 0.0, 0.0, 0.0]])
    return np.array(
        [[a, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0], [a, 1.0, 1.0, 1.0, -1.0, 0.0, 0.0], [a, a, 1.0, 1.0, -a, 0.0, 0.0]]
    )


def between(sides: FloatArray, shares: FloatArray) -> FloatArray:
    """Return [criteria] between sides: shares are of those behind the first, which has the rest; of others it is 0."""
    found: FloatArray = sides[0] + shares @ (sides[1 : 1 + len(shares)] - sides[0])
    return found


def memory_weights(in_flight: int) -> FloatArray:
    """Return [criteria] as they count for memory, with so many micro-batches under way."""
    return np.array([0.0, 0.0, 0.0, 0.0, 0.0, 1.0, float(in_flight)])


def sides_of_time(*, hides: bool) -> FloatArray:
    """Return [sides, criteria]: the sums of which the largest is t."""
    if not hides:
        return np.array([[1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0]])
    return np.array([[1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0], [1.0, 1.0, 0.0, 0.0, -1.0, 0.0, 0.0]])


class Looked(NamedTuple):
    """A strategy, and what it takes.

    criteria: [criteria] of all layers and edges. own, edges: [V, criteria] of layers, [E, criteria] of edges. parts:
    [chunks, sums] of chunks.
    """

    choice: Choice
    sums: StageSums
    criteria: FloatArray
    own: FloatArray
    edges: FloatArray
    parts: FloatArray


def _slice(tables: ChoiceTables, first: int, beyond: int) -> ChoiceTables:
    """Return the layers from one position to another, and what is between them."""
    inside = [
        (e, ends) for e, ends in zip(tables.edges, tables.ends, strict=True) if first <= min(ends) <= max(ends) < beyond
    ]
    return replace(
        tables,
        configurations=tables.configurations[first:beyond],
        traffic=tables.traffic[first:beyond],
        layers=tables.layers[first:beyond],
        ends=tuple((u - first, v - first) for _, (u, v) in inside),
        edges=tuple(edge for edge, _ in inside),
    )


def _repeats(tables: ChoiceTables) -> tuple[int, int, int]:
    """Return (first layer, layers of a block, how many) of the blocks that repeat one after the other, most layers."""
    edges_into: list[list[tuple[int, int]]] = [[] for _ in tables.layers]
    for (u, v), edge in zip(tables.ends, tables.edges, strict=True):
        edges_into[max(u, v)].append((abs(u - v), id(edge)))
    kinds = [(id(layer), *sorted(edges)) for layer, edges in zip(tables.layers, edges_into, strict=True)]
    best = longest_repeat(kinds, range(MIN_BLOCK, min(MAX_BLOCK, len(kinds) // MIN_REPEATS) + 1))
    first, length, count = best
    if count <= MIN_REPEATS:
        return best
    # Blocks that begin where fewest edges lead into them, one fewer of them: more of the costs are within.
    into = [sum(min(u, v) < at <= max(u, v) for u, v in tables.ends) for at in range(first, first + length)]
    shift = into.index(min(into))
    return first + shift, length, count - (shift > 0)


def longest_repeat(kinds: Sequence[Hashable], lengths: Iterable[int]) -> tuple[int, int, int]:
    """Return the equal blocks, one after the other, that have most layers together.

    Args:
        kinds: [V] of layers, equal where layers are.
        lengths: That blocks may have; of blocks of as many layers in all the first counts.

    Returns:
        The first layer, how many layers a block has, and how many blocks there are; zeros where nothing repeats.
    """
    numbers = dict[Hashable, int]()
    classes = np.array([numbers.setdefault(kind, len(numbers)) for kind in kinds])
    best, covered = (0, 0, 0), 0
    for length in lengths:
        is_equal = np.concatenate([[False], classes[length:] == classes[:-length], [False]])
        changes = np.flatnonzero(is_equal[1:] != is_equal[:-1]).tolist()
        for low, high in zip(changes[::2], changes[1::2], strict=True):
            more = (high - low) // length
            own = length * (1 + more)
            if more and (own > covered or (own == covered and length == best[1])):
                best, covered = (high - more * length, length, 1 + more), own
    return best
