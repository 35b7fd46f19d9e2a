"""One stage of a pipeline: the cheapest configurations and modes of its layers within a device's memory.

What a strategy costs and holds are sums over its choices (`StageSums`): what each micro-batch takes, t, and what a step
takes once, o. Communication that can hide counts with what is left of it beside the computation that hides it, in each
micro-batch, and in the last one with the sums of weights' gradients. So the cost α t + o is the largest of three sums,
and memory is one more sum, with a limit: for shares μ of the three, and a price λ of memory, the least of the sums so
weighed is an ordinary problem, which bounds every strategy that fits (Lagrangian relaxation), and its optimum is a
strategy. The best μ and λ are found by cutting planes: each strategy is a plane above the bound as a function of them.

Strategies that fit come of those optima, and of pairs of them: one up to a layer, the other from there on. What comes
and goes, and what a run of recomputed layers makes again, are no sums: strategies are checked with them, and sought
within so much less; the bound is without all but the least of them. What is then left between bound and strategy is
closed by going through all choices that the bound leaves, where these are few.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations
from math import prod
from typing import NamedTuple

import numpy as np

from pase.costs.modes import EdgeModes, ModeTables
from pase.solver import near_optimal, solve
from pase.solver.constrained import joint_classes
from pase.tables.cost_tables import CostTables, EdgeTable, FloatArray, IndexArray

Choice = tuple[int, ...]

CRITERIA = ("repeated", "streamed", "once", "summed", "cover", "static", "kept")
"""What adds up over layers and edges, in the order of the columns of arrays here."""

MAX_PLANES, MAX_WHOLE_PLANES = 24, 8
"""Optima at most by which a bound is raised: of segments, and of whole stages."""
MAX_SOLVE_S = 3.0
"""For one optimum; what is known by then counts."""
MAX_ENUMERATED = 300_000
"""Strategies that are gone through at most to close a gap."""
MAX_CHECKED = 12
"""Of the strategies that two make together, those that are looked at in full."""
MIN_BLOCK, MAX_BLOCK, MIN_REPEATS = 4, 64, 3
"""Layers of a block that repeats, and how often it does at least to be taken apart."""
TOLERANCE = 1e-9


class StageSums(NamedTuple):
    """What a strategy of a stage takes: sums of `Figures`, edges included, and of what is held.

    kept: bytes for one micro-batch. again: of the run of recomputed layers that makes most again. buffers: the most of
    what else comes and goes.
    """

    repeated: float
    streamed: float
    once: float
    summed: float
    cover: float
    static: float
    kept: float
    again: float = 0.0
    buffers: float = 0.0

    @property
    def micro_batch(self) -> float:
        """t: the cost of a micro-batch, less what hides."""
        return self.repeated + max(0.0, self.streamed - self.cover)

    @property
    def step(self) -> float:
        """o: what is paid once a step, less what hides beside the last micro-batch."""
        exposed = max(0.0, self.streamed + self.summed - self.cover)
        return self.once + exposed - max(0.0, self.streamed - self.cover)

    def memory_bytes(self, in_flight: int) -> float:
        """Return what a device needs, with so many micro-batches under way."""
        return self.static + in_flight * self.kept + self.again + self.buffers


@dataclass(frozen=True, kw_only=True, eq=False)
class StageProblem:
    """A stage's choices, how much a micro-batch counts, and what a device may hold.

    weight: α of the cost α t + o. in_flight: micro-batches that are under way. limit_bytes: of a device's memory,
    infinite where there is none.
    """

    tables: ModeTables
    weight: float
    in_flight: int
    limit_bytes: float

    def cost(self, sums: StageSums) -> float:
        """Return α t + o."""
        return self.weight * sums.micro_batch + sums.step

    def fits(self, sums: StageSums) -> bool:
        """Return whether a strategy is within the limit."""
        return sums.memory_bytes(self.in_flight) <= self.limit_bytes

    def sums(self, choice: Sequence[int]) -> StageSums:
        """Return what a strategy takes."""
        own, of_edges = self._parts(choice)
        layers = self.tables.layers
        peaks = max_of([self._peaks[id(layer)][:, c] for layer, c in zip(layers, choice, strict=True)])
        again = longest_run([float(layer.figures.again[c]) for layer, c in zip(layers, choice, strict=True)])
        return StageSums(*[*(own.sum(axis=0) + of_edges.sum(axis=0)).tolist(), again, float(peaks.sum())])

    def _parts(self, choice: Sequence[int]) -> tuple[FloatArray, FloatArray]:
        """Return [V, criteria] and [E, criteria] of a strategy."""
        own = np.array([self._columns[id(layer)][c] for layer, c in zip(self.tables.layers, choice, strict=True)])
        edges = np.zeros((len(self.tables.edges), len(CRITERIA)))
        for row, (u, v), edge in zip(edges, self.tables.ends, self.tables.edges, strict=True):
            row += self._edge_part(edge, choice[u], choice[v])
        return own, edges

    def _edge_part(self, edge: EdgeModes, u: int, v: int) -> FloatArray:
        part = np.zeros(len(CRITERIA))
        part[1 if edge.is_weight and self.tables.hides else 0] = edge.cost.cost(u, v)
        if edge.kept is not None:
            part[5 if edge.is_weight else 6] = edge.kept.cost(u, v)
        return part

    @cached_property
    def _columns(self) -> dict[int, FloatArray]:
        """[C, criteria] of each distinct layer."""
        distinct = {id(layer): layer.figures for layer in self.tables.layers}
        return {
            key: np.column_stack([getattr(figures, name) for name in CRITERIA]) for key, figures in distinct.items()
        }

    @cached_property
    def _peaks(self) -> dict[int, FloatArray]:
        """[kinds, C] of each distinct layer: of each kind of what comes and goes the largest of all layers counts."""
        distinct = {id(layer): layer.figures for layer in self.tables.layers}
        return {key: np.stack([own.work, own.gathered, *own.waiting]) for key, own in distinct.items()}

    @cached_property
    def least_buffers(self) -> float:
        """What comes and goes under any strategy, at least."""
        return float(max_of([peaks.min(axis=1) for peaks in self._peaks.values()]).sum())

    # -- relaxations

    @cached_property
    def sides(self) -> FloatArray:
        """[sides, criteria]: the sums of which the largest is α t + o: all hides, not in the last one, in no one."""
        a = self.weight
        all_hides = [a, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0]
        if not self.tables.hides:
            return np.array([[a, a, 1.0, 1.0, 0.0, 0.0, 0.0]])
        streams = any(layer.figures.streamed.any() for layer in self.tables.layers)
        streams |= any(edge.is_weight for edge in self.tables.edges)
        found = [all_hides, [a, 1.0, 1.0, 1.0, -1.0, 0.0, 0.0]]
        return np.array(found + [[a, a, 1.0, 1.0, -a, 0.0, 0.0]] * (streams and a > 1))

    @property
    def memory(self) -> FloatArray:
        """[criteria] as they count for memory."""
        return np.array([0.0, 0.0, 0.0, 0.0, 0.0, 1.0, float(self.in_flight)])

    def weighed(self, weights: FloatArray, cap: float = np.inf) -> CostTables:
        """Return the problem of sums with [criteria] weights; what works with more than a cap is left out."""
        numbers: dict[int, int] = {}
        costs: list[FloatArray] = []
        for layer in self.tables.layers:
            if id(layer) not in numbers:
                numbers[id(layer)] = len(numbers)
                own = np.maximum(self._columns[id(layer)] @ weights, 0.0)
                costs.append(np.where(layer.figures.work <= max(cap, layer.figures.work.min()), own, np.inf))
        edge_numbers: dict[int, int] = {}
        edge_tables: list[EdgeTable] = []
        for edge in self.tables.edges:
            if id(edge) not in edge_numbers:
                edge_numbers[id(edge)] = len(edge_numbers)
                edge_tables.append(self._weighed_edge(edge, weights))
        ends, edge_table = list(self.tables.ends), [edge_numbers[id(edge)] for edge in self.tables.edges]
        for first, other in _joins(self.tables):
            # Nothing lies between parts of a stage that stand apart.
            rows, cols = (np.zeros(len(self.tables.layers[v]), dtype=np.int32) for v in (first, other))
            ends.append((first, other))
            edge_table.append(len(edge_tables))
            edge_tables.append(EdgeTable(row_class=rows, col_class=cols, values=np.zeros((1, 1))))
        return CostTables(
            vertex_names=tuple(map(str, range(len(self.tables.layers)))),
            vertex_costs=tuple(costs),
            vertex_table=tuple(numbers[id(layer)] for layer in self.tables.layers),
            edges=tuple(ends),
            edge_tables=tuple(edge_tables),
            edge_table=tuple(edge_table),
        )

    def _weighed_edge(self, edge: EdgeModes, weights: FloatArray) -> EdgeTable:
        price, held = weights[1 if edge.is_weight and self.tables.hides else 0], weights[5 if edge.is_weight else 6]
        if edge.kept is None or held == 0:
            return replace(edge.cost, values=price * edge.cost.values)
        joint = self._joint.get(id(edge))
        if joint is None:
            joint = self._joint[id(edge)] = _joined(edge.cost, edge.kept)
        table, kept = joint
        return replace(table, values=price * table.values + held * kept)

    @cached_property
    def segments(self) -> tuple[tuple["StageProblem", int], ...]:
        """Parts of the stage, and how often each is there: what they cost adds up to no more than the stage does.

        Blocks of layers that repeat are such parts, and what is before and behind them; else the stage itself.
        """
        first, length, count = _repeats(self.tables)
        if count < MIN_REPEATS:
            return ((self, 1),)
        beyond = first + length * count
        ends = [(0, first), (beyond, len(self.tables.layers))]
        parts = [(replace(self, tables=_slice(self.tables, first, first + length)), count)]
        return (
            *parts,
            *((replace(self, tables=_slice(self.tables, low, high)), 1) for low, high in ends if low < high),
        )

    @cached_property
    def _joint(self) -> dict[int, tuple[EdgeTable, FloatArray]]:
        return {}


def max_of(rows: Sequence[FloatArray]) -> FloatArray:
    """Return the largest of each column."""
    found: FloatArray = np.max(np.stack(rows), axis=0)
    return found


def longest_run(again: Sequence[float]) -> float:
    """Return the most bytes that are made again together: of layers that follow one another, none of which makes 0."""
    longest = run = 0.0
    for size in again:
        run = run + size if size else 0.0
        longest = max(longest, run)
    return longest


def _joined(cost: EdgeTable, kept: EdgeTable) -> tuple[EdgeTable, FloatArray]:
    """Return a table whose classes tell apart what either table does, and the kept bytes in its shape."""

    row_class, rows, kept_rows = joint_classes(cost.row_class, kept.row_class)
    col_class, cols, kept_cols = joint_classes(cost.col_class, kept.col_class)
    table = EdgeTable(row_class=row_class, col_class=col_class, values=cost.values[np.ix_(rows, cols)])
    return table, kept.values[np.ix_(kept_rows, kept_cols)]


def _slice(tables: ModeTables, first: int, beyond: int) -> ModeTables:
    """Return the layers from one position to another, and what is between them."""
    inside = [
        (e, ends) for e, ends in zip(tables.edges, tables.ends, strict=True) if first <= min(ends) <= max(ends) < beyond
    ]
    return replace(
        tables,
        configurations=tables.configurations[first:beyond],
        layers=tables.layers[first:beyond],
        ends=tuple((u - first, v - first) for _, (u, v) in inside),
        edges=tuple(edge for edge, _ in inside),
    )


def _repeats(tables: ModeTables) -> tuple[int, int, int]:
    """Return (first layer, layers of a block, how many) of the blocks that repeat one after the other, most layers."""
    edges_into: list[list[tuple[int, int]]] = [[] for _ in tables.layers]
    for (u, v), edge in zip(tables.ends, tables.edges, strict=True):
        edges_into[max(u, v)].append((abs(u - v), id(edge)))
    kinds = [(id(layer), *sorted(edges)) for layer, edges in zip(tables.layers, edges_into, strict=True)]
    best = (0, 0, 0)
    for length in range(MIN_BLOCK, min(MAX_BLOCK, len(kinds) // MIN_REPEATS) + 1):
        run = 0
        for v in range(len(kinds) - length, -1, -1):
            run = run + 1 if v + length < len(kinds) and kinds[v] == kinds[v + length] else 0
            count = 1 + run // length
            if length * count > best[1] * best[2]:
                best = v, length, count
    return best


def _joins(tables: ModeTables) -> list[tuple[int, int]]:
    """Return pairs of layers that join the parts of a stage that no edge does."""
    part = list(range(len(tables.layers)))

    def root(v: int) -> int:
        while part[v] != v:
            part[v] = part[part[v]]
            v = part[v]
        return v

    for u, v in tables.ends:
        part[root(u)] = root(v)
    roots = sorted({root(v) for v in range(len(part))})
    return [(roots[0], other) for other in roots[1:]]


# -- the search


@dataclass(frozen=True, slots=True, kw_only=True)
class StageFound:
    """The answer to a stage. bound: no strategy that fits has a lower α t + o; infinite where none fits.

    choice: none where none is known to fit.
    """

    choice: Choice
    sums: StageSums | None
    bound: float


@dataclass(slots=True)
class _Search:
    """One search: its problem, the optima that it came by, and the best strategy that fits."""

    problem: StageProblem
    optima: list[tuple[Choice, StageSums]]
    cost: float = np.inf
    choice: Choice = ()
    sums: StageSums | None = None

    def offer(self, choice: Choice, sums: StageSums) -> None:
        if self.problem.fits(sums) and self.problem.cost(sums) < self.cost:
            self.cost, self.choice, self.sums = self.problem.cost(sums), choice, sums

    def at(self, weights: FloatArray, cap: float = np.inf) -> tuple[StageSums, float]:
        """Return the optimum of a problem of sums, which is noted, and a bound on its cost."""
        known = [self.choice] if self.choice and cap == np.inf else []
        found = solve(self.problem.weighed(weights, cap), known=known, time_limit_s=MAX_SOLVE_S)
        sums = self.problem.sums(found.choice)
        self.optima.append((found.choice, sums))
        self.offer(found.choice, sums)
        return sums, found.lower_bound

    def apart(self, weights: FloatArray) -> tuple[StageSums, float]:
        """Return the sums of the optima of the segments, and a bound on the cost of every strategy."""
        total, bound = np.zeros(len(CRITERIA)), 0.0
        for segment, count in self.problem.segments:
            found = solve(segment.weighed(weights), time_limit_s=MAX_SOLVE_S)
            total += count * np.array(segment.sums(found.choice)[: len(CRITERIA)])
            bound += count * found.lower_bound
        return StageSums(*total.tolist()), bound

    def relax(self, room: float, tolerance: float, cap: float = np.inf) -> tuple[float, FloatArray]:
        """Return the best bound on all strategies that need no more than some room, by sums; and at which weights.

        room: where that is infinite whole strategies are sought, else segments' where the stage has any. cap: of what a
        layer works with in whole strategies. An infinite bound: there are none.
        """
        sides, memory = self.problem.sides, self.problem.memory
        is_apart = room < np.inf and len(self.problem.segments) > 1
        scale = room if 0 < room < np.inf else 1.0
        planes: list[FloatArray] = []

        def optimum(weights: FloatArray) -> tuple[StageSums, float]:
            return self.apart(weights) if is_apart else self.at(weights, cap)

        def plane(sums: StageSums) -> FloatArray:
            criteria = np.array(sums[: len(CRITERIA)])
            over = (criteria @ memory - room) / scale if room < np.inf else 0.0
            first, *others = (sides @ criteria).tolist()
            return np.array([first, *(other - first for other in others), over])

        if room < np.inf:
            lightest, least = optimum(memory)
            if least > room * (1 + TOLERANCE):
                return np.inf, memory
            planes.append(plane(lightest))
        bound, point, best = 0.0, np.zeros(len(sides)), sides[0]
        for _ in range(MAX_PLANES if is_apart else MAX_WHOLE_PLANES):
            weights = sides[0] + point[:-1] @ (sides[1:] - sides[0])
            price = point[-1]
            if price > 0:
                weights = weights + price / scale * memory
            sums, low = optimum(weights)
            low -= price * room / scale if price > 0 else 0.0
            if low > bound:
                bound, best = low, weights
            planes.append(plane(sums))
            most, point = _highest(np.array(planes), is_limited=room < np.inf)
            if most <= bound * (1 + tolerance) or bound >= self.cost * (1 - tolerance):
                break
        return bound, best

    def lightest(self) -> bool:
        """Return whether any strategy is known to fit, once one of those that hold least was looked at."""
        for cap in (0.0, np.inf):
            if not self.choice:
                self.at(self.problem.memory, cap)
        return bool(self.choice)

    def look(self, weights: FloatArray, is_close: Callable[[], bool], cap: float = np.inf) -> None:
        """Look at whole strategies on either side of a price, which the limit is between, and what they make."""
        for factor in (1.0, 0.97, 1.03) if len(self.problem.segments) > 1 else ():
            if not is_close():
                self.at(_repriced(self.problem, weights, factor), cap)
        if not is_close():
            self.splice()

    def splice(self) -> None:
        """Look at strategies that follow one optimum up to a layer and another from there on."""
        problem = self.problem
        recent = self.optima[-8:]
        for (first, _), (second, _) in combinations(recent, 2):
            for before, after in ((first, second), (second, first)):
                for choice in _spliced(problem, before, after):
                    self.offer(choice, problem.sums(choice))


def solve_stage(problem: StageProblem, *, known: Iterable[Choice] = (), tolerance: float = 1e-4) -> StageFound:
    """Return the cheapest strategy of a stage that fits, as far as it is found, and a bound on all that fit.

    Args:
        problem: the stage.
        known: strategies to start from.
        tolerance: up to which share of the cost bound and strategy are worth to be brought together.
    """
    search = _Search(problem, [])
    for choice in known:
        search.offer(tuple(choice), problem.sums(choice))
    bound, weights = search.relax(np.inf, tolerance)

    def is_close() -> bool:
        return search.cost <= bound * (1 + tolerance)

    if not is_close() and problem.limit_bytes < np.inf:
        least, own = search.relax(problem.limit_bytes - problem.least_buffers, tolerance)
        if least == np.inf:
            return StageFound(choice=(), sums=None, bound=least)
        bound, weights = max((bound, weights), (least, own), key=lambda found: found[0])
        if search.lightest():
            search.look(own, is_close)
            for share in (1.0, 0.1):
                # What comes and goes, and is made again, of the strategy that fits most nearly.
                nearest = min((sums for _, sums in search.optima), key=lambda sums: abs(_excess(problem, sums)))
                room = problem.limit_bytes - nearest.again - nearest.buffers
                if is_close() or room <= 0:
                    break
                least, own = search.relax(room, tolerance, share * problem.limit_bytes)
                if least < np.inf:
                    search.look(own, is_close, share * problem.limit_bytes)
    elif not is_close():
        search.splice()
    if search.cost > bound * (1 + TOLERANCE):
        closed = _closed(problem, search, weights)
        bound = bound if closed is None else closed
    return StageFound(choice=search.choice, sums=search.sums, bound=float(min(bound, search.cost)))


def _repriced(problem: StageProblem, weights: FloatArray, factor: float) -> FloatArray:
    """Return weights with another price of memory, by a factor."""
    memory = problem.memory
    price = weights @ memory / (memory @ memory)
    return weights + (factor - 1.0) * price * memory


def _excess(problem: StageProblem, sums: StageSums) -> float:
    return sums.memory_bytes(problem.in_flight) - problem.limit_bytes


def _highest(planes: FloatArray, *, is_limited: bool) -> tuple[float, FloatArray]:
    """Return where the lowest of some planes is highest, and how high that is.

    planes: [N, 1 + d] the height at 0, and the slopes. Of d the last is a price of 0 or more, 0 where nothing is
    limited; the others are shares, whose sum is at most 1.
    """
    num, width = planes.shape
    d = width - 1
    # Rows (a, c) of a · (x, height) <= c, of which d + 1 meet in the point.
    rows = [np.concatenate([-planes[:, 1:], np.ones((num, 1))], axis=1)]
    limits = [planes[:, 0]]
    rows.append(np.concatenate([-np.eye(d), np.zeros((d, 1))], axis=1))
    limits.append(np.zeros(d))
    extra = np.zeros((2, width))
    extra[0, : d - 1] = 1.0
    extra[1, d - 1] = 1.0
    keep = [0] * (d > 1) + [1] * (not is_limited)
    rows.append(extra[keep])
    limits.append(np.array([1.0, 0.0])[keep])
    a, c = np.concatenate(rows), np.concatenate(limits)
    subsets = np.array(list(combinations(range(len(a)), width)))
    systems = a[subsets]
    is_point = np.abs(np.linalg.det(systems)) > 1e-12
    points = np.linalg.solve(systems[is_point], c[subsets[is_point]][..., None])[..., 0]
    slack = c + 1e-9 * (1 + np.abs(c)) - points @ a.T
    points = points[(slack >= -1e-9 * (1 + np.abs(points[:, -1:]))).all(axis=1)]
    if not len(points):
        return float(planes[:, 0].min()), np.zeros(d)
    best = points[points[:, -1].argmax()]
    return float(best[-1]), np.maximum(best[:-1], 0.0)


def _spliced(problem: StageProblem, first: Choice, second: Choice) -> list[Choice]:
    """Return the most promising strategies that follow one up to a layer and another from there on."""
    (own_a, edges_a), (own_b, edges_b) = problem._parts(first), problem._parts(second)
    num = len(first)
    changes = np.zeros((num + 2, len(CRITERIA)))
    changes[0] = own_b.sum(axis=0) + edges_b.sum(axis=0)
    changes[1 : num + 1] += own_a - own_b
    for (u, v), edge, part_a, part_b in zip(problem.tables.ends, problem.tables.edges, edges_a, edges_b, strict=True):
        low, high = min(u, v), max(u, v)
        mixed = problem._edge_part(edge, (first if u < v else second)[u], (second if u < v else first)[v])
        changes[low + 1] += mixed - part_b
        changes[high + 1] += part_a - mixed
    sums = np.cumsum(changes, axis=0)[: num + 1]
    costs = (sums @ problem.sides.T).max(axis=1)
    room = problem.limit_bytes - problem.least_buffers
    costs = np.where(sums @ problem.memory <= room, costs, np.inf)
    order = [k for k in np.argsort(costs, kind="stable")[:MAX_CHECKED].tolist() if np.isfinite(costs[k])]
    return [(*first[:k], *second[k:]) for k in order]


def _closed(problem: StageProblem, search: _Search, weights: FloatArray) -> float | None:
    """Go through all strategies that the bound leaves; the bound that is then known, None where they are too many."""
    price = float(weights @ problem.memory / (problem.memory @ problem.memory))
    room = problem.limit_bytes - problem.least_buffers
    found = _left(problem, weights, search.cost + (price * room if price > 0 else 0.0))
    if found is None:
        return None
    choices, sums = found
    costs = np.where(_held(problem, sums) <= problem.limit_bytes, _costs(problem, sums), np.inf)
    best = int(costs.argmin()) if len(costs) else 0
    if len(costs) and costs[best] < search.cost:
        choice = tuple(choices[best].tolist())
        search.offer(choice, problem.sums(choice))
    return search.cost


def stage_front(problem: StageProblem, limit: float) -> list[tuple[float, float, Choice, StageSums]] | None:
    """Return the strategies that fit of which none other has a lower t and a lower o: (t, o, choice, sums), by t.

    limit: of α t + o, beyond which they are of no interest. None where there are too many to go through.
    """
    found = _left(problem, problem.sides[0], limit)
    if found is None:
        return None
    choices, sums = found
    fits = np.flatnonzero(_held(problem, sums) <= problem.limit_bytes)
    each = [StageSums(*row) for row in sums[fits].tolist()]
    order = sorted(range(len(each)), key=lambda n: (each[n].micro_batch, each[n].step))
    front: list[tuple[float, float, Choice, StageSums]] = []
    for n in order:
        if not front or each[n].step < front[-1][1]:
            front.append((each[n].micro_batch, each[n].step, tuple(choices[fits[n]].tolist()), each[n]))
    return front


def _costs(problem: StageProblem, sums: FloatArray) -> FloatArray:
    costs: FloatArray = (sums[:, : len(CRITERIA)] @ problem.sides.T).max(axis=1)
    return costs


def _held(problem: StageProblem, sums: FloatArray) -> FloatArray:
    held: FloatArray = sums[:, : len(CRITERIA)] @ problem.memory + sums[:, -2] + sums[:, -1]
    return held


def _left(problem: StageProblem, weights: FloatArray, limit: float) -> tuple[IndexArray, FloatArray] | None:
    """Return all strategies whose sum, so weighed, is up to a limit, and perhaps others; None: they are too many."""
    left = [np.arange(len(layer), dtype=np.int32) for layer in problem.tables.layers]
    if np.isfinite(limit):
        left = list(near_optimal(problem.weighed(weights), limit))
    if not all(map(len, left)):
        return np.zeros((0, len(left)), dtype=np.int32), np.zeros((0, len(CRITERIA) + 2))
    return None if prod(map(len, left)) > MAX_ENUMERATED else _enumerated(problem, left)


def _enumerated(problem: StageProblem, left: Sequence[IndexArray]) -> tuple[IndexArray, FloatArray]:
    """Return all strategies of some choices of each layer, [N, V], and their `StageSums`, [N, …]."""
    layers, sizes = problem.tables.layers, [len(own) for own in left]
    number, beyond = np.arange(prod(sizes)), np.cumprod([1, *reversed(sizes)])[-2::-1].tolist()
    choices = np.stack([own[number // stride % len(own)] for own, stride in zip(left, beyond, strict=True)], axis=1)
    sums = np.zeros((len(choices), len(CRITERIA)))
    for v, layer in enumerate(layers):
        sums += problem._columns[id(layer)][choices[:, v]]
    for (u, v), edge in zip(problem.tables.ends, problem.tables.edges, strict=True):
        cost = edge.cost.values[edge.cost.row_class[choices[:, u]], edge.cost.col_class[choices[:, v]]]
        sums[:, 1 if edge.is_weight and problem.tables.hides else 0] += cost
        if edge.kept is not None:
            kept = edge.kept.values[edge.kept.row_class[choices[:, u]], edge.kept.col_class[choices[:, v]]]
            sums[:, 5 if edge.is_weight else 6] += kept
    peaks = max_of([problem._peaks[id(layer)][:, choices[:, v]] for v, layer in enumerate(layers)]).sum(axis=0)
    longest, run = np.zeros(len(choices)), np.zeros(len(choices))
    for v, layer in enumerate(layers):
        again = layer.figures.again[choices[:, v]]
        run = np.where(again > 0, run + again, 0.0)
        longest = np.maximum(longest, run)
    return choices, np.column_stack([sums, longest, peaks])
