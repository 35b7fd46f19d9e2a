"""The search within a limit on the memory of a device, and what is said where nothing fits.

What is limited is the peak of a step (`pase.costs.liveness`): the most that is there in any of its turns. In each turn
that is a sum over layers and edges, but for buckets of gradients, so that the cheapest strategy of which some turn fits
costs no more than any that fits altogether: a problem with a limit on one resource (`pase.solver`), whose answer is the
optimum where its peak fits. Otherwise it is over the limit in another turn: that one is limited instead, or weighted
sums of several are, at the weights where the bound is highest. What is then left between bound and strategy is closed
by going through all that may cost less, where these are few.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from math import gcd, prod
from time import perf_counter
from typing import Any, TypedDict, Unpack

import numpy as np

from pase.common.words import quantity
from pase.costs import Peak, Problem, StepMemory, TurnUsage
from pase.costs.liveness import Turn
from pase.costs.memory import Keeping, keeping
from pase.errors import ConfigurationError, MemoryLimitError
from pase.graph import Graph
from pase.sharding.edges import table_edges
from pase.sharding.shards import IndexArray, enumerate_configurations
from pase.solver import (
    MAX_PARTS,
    RELATIVE_TOLERANCE,
    ConstrainedProblem,
    CutShortError,
    LimitedSolution,
    NothingFitsError,
    Progress,
    Solution,
    lightest_strategy,
    near_optimal,
    solve,
    solve_limited,
)
from pase.tables.cost_tables import CostTables, EdgeTable, FloatArray

MAX_TURNS, MAX_SHARE = 4, 8
"""Most turns that are limited at once, and the parts into which the weights of two turns are divided."""
MAX_TIGHTER, CLOSE_BYTES = 10, 1e-3
"""How often a tighter limit of the sums is tried, as they leave out some of a peak; and to which share of the limit."""
FIRST_GAP = 5e-3
"""Share of the cost up to which relaxations are solved at first, so that something that fits is known soon."""
MAX_PARTS_OF_MODES = 8
"""Parts into which a relaxation is split at most without a time limit where layers can be recomputed: there are many
strategies that cost nearly the same, and each part takes longer."""
MAX_MORE_DEVICES = 64
"""How many times the devices are looked at for a number that would do."""
MAX_ENUMERATED, MAX_PEAKS = 20_000, 2_000
"""Strategies that are gone through at most to close a gap, and those of which peaks are worked out."""

Choice = tuple[int, ...]


class NothingFoundError(CutShortError):
    """No strategy was found that fits. bound: none that does costs less."""

    def __init__(self, bound: float) -> None:
        """Note the bound."""
        super().__init__("no strategy was found that fits the limit; give the search more time, or a higher limit")
        self.bound = bound


@dataclass(frozen=True, kw_only=True, eq=False)
class MemoryLimit:
    """A limit on the peak of a step.

    Attributes:
        memory: What strategies have in memory.
        limit_bytes: The most that is to be there.
        in_flight: Of how many micro-batches there is something at once.
    """

    memory: StepMemory
    limit_bytes: int
    in_flight: int = 1
    _peaks: dict[Choice, Peak] = field(default_factory=dict)
    _usage: dict[Turn, TurnUsage] = field(default_factory=dict)

    def peak(self, choice: Sequence[int]) -> Peak:
        """Return the peak of a strategy."""
        key = tuple(choice)
        if key not in self._peaks:
            self._peaks[key] = self.memory.peak(key, self.in_flight)
        return self._peaks[key]

    def fits(self, choice: Sequence[int]) -> bool:
        """Return whether the peak of a strategy is within the limit."""
        return self.peak(choice).bytes <= self.limit_bytes

    def usage(self, turn: Turn) -> TurnUsage:
        """Return what strategies have in memory in one turn."""
        if turn not in self._usage:
            self._usage[turn] = self.memory.usage(turn, self.in_flight)
        return self._usage[turn]

    def relaxed(
        self, tables: CostTables, weights: Mapping[Turn, int], limit_bytes: int | None = None
    ) -> ConstrainedProblem:
        """Return the problem in which the weighted sum of some turns is limited.

        Args:
            tables: Costs of the same configurations.
            weights: Whole numbers, by turn.
            limit_bytes: Another limit than the own one.
        """
        limit = self.limit_bytes if limit_bytes is None else limit_bytes
        rows = [(weight, self.usage(turn)) for turn, weight in weights.items() if weight]
        known: dict[tuple[int, ...], Any] = {}

        def weighted(arrays: Sequence[FloatArray]) -> FloatArray:
            key = tuple(map(id, arrays))
            if key not in known:
                known[key] = sum((w * own for (w, _), own in zip(rows, arrays, strict=True)), np.zeros(len(arrays[0])))
            own: FloatArray = known[key]
            return own

        edges = list[EdgeTable | None]()
        for number in range(len(tables.edges)):
            copies = [
                (w, usage.edges[number]) for w, usage in rows if number < len(usage.edges) and usage.edges[number]
            ]
            if not copies:
                edges.append(None)
                continue
            total, (_, first) = sum(w for w, _ in copies), copies[0]
            key = total, id(first)
            if key not in known:
                assert first is not None
                known[key] = replace(first, values=total * first.values)
            edges.append(known[key])
        return ConstrainedProblem(
            tables=tables,
            resource_usage=tuple(weighted(arrays) for arrays in zip(*(usage.layers for _, usage in rows), strict=True)),
            edge_usage=tuple(edges),
            peaks=tuple(tuple(w * own for own in group) for w, usage in rows for group in usage.peaks),
            limit=float(limit * sum(w for w, _ in rows)),
        )


class SolverOptions(TypedDict, total=False):
    """What `pase.solver.solve` can be told."""

    ordering: str
    solver_memory_bytes: int | None
    on_progress: Progress | None


def cheapest_within(
    tables: CostTables,
    limit: MemoryLimit,
    *,
    known: Iterable[Sequence[int]] = (),
    unlimited: Solution | None = None,
    time_limit_s: float | None = None,
    **options: Unpack[SolverOptions],
) -> LimitedSolution:
    """Return the cheapest strategy whose peak is within a limit, with its proof or a gap.

    Args:
        tables: Of the strategies that are considered.
        limit: Of the same strategies.
        known: Strategies to begin with.
        unlimited: The cheapest strategy without the limit, if it is known.
        time_limit_s: Of the search.
        **options: Of the solver.

    Raises:
        NothingFitsError: Nothing does (`nothing_fits` says by how much).
        CutShortError: There was no time to find anything that does.
    """
    deadline_s = None if time_limit_s is None else perf_counter() + time_limit_s
    start = [tuple(choice) for choice in known]
    unlimited = unlimited or solve(tables, time_limit_s=time_limit_s, known=start, **options)
    search = _Search(tables=tables, limit=limit, deadline_s=deadline_s, options=options, unlimited=unlimited)
    return search.run(start)


@dataclass(kw_only=True)
class _Search:
    """One search: what it was asked, the best strategy that fits, and a bound on all that do.

    gap: up to which relaxations are solved; has_gaps: whether some was not solved exactly.
    """

    tables: CostTables
    limit: MemoryLimit
    deadline_s: float | None
    options: SolverOptions
    unlimited: Solution
    bound: float = 0.0
    cost: float = np.inf
    best: Choice = ()
    is_late: bool = False
    gap: float = FIRST_GAP
    has_gaps: bool = False

    def run(self, known: Iterable[Choice]) -> LimitedSolution:
        started_s = perf_counter()
        self.bound = self.unlimited.lower_bound
        for choice in (*known, self.unlimited.choice):
            self.offer(choice)
        if not self.is_closed():
            self.bind()
        if self.has_gaps and not self.is_closed() and not self.is_late:
            self.gap = 0.0
            self.bind()
        if not self.is_closed():
            self.go_through()
        if not self.best:
            if self.bound == np.inf:
                raise NothingFitsError("the peak of no strategy is within the limit")
            raise NothingFoundError(self.bound)
        is_exact = self.is_closed()
        solution = replace(
            self.unlimited,
            cost=self.cost,
            lower_bound=self.cost if is_exact else max(0.0, self.bound * (1 - RELATIVE_TOLERANCE)),
            exact=is_exact,
            choice=self.best,
            time_s=self.unlimited.time_s + perf_counter() - started_s,
        )
        usage, most = self.limit.peak(self.best).bytes, self.limit.limit_bytes
        return LimitedSolution(solution=solution, unlimited=self.unlimited, usage=usage, limit=most)

    def offer(self, choice: Sequence[int]) -> bool:
        """Keep a strategy if it fits and is the cheapest; return whether it fits."""
        if not choice or not self.limit.fits(choice):
            return False
        cost = self.tables.evaluate(choice)
        if cost < self.cost:
            self.cost, self.best = cost, tuple(choice)
        return True

    def is_closed(self) -> bool:
        return self.bound >= self.cost * (1 - RELATIVE_TOLERANCE)

    def asked(self, weights: Mapping[Turn, int], limit_bytes: int | None = None) -> Choice | None:
        """Return the optimum within a limit on some turns, which is offered; None where there is none.

        Within the own limit it raises the bound.
        """
        left_s = None if self.deadline_s is None else self.deadline_s - perf_counter()
        if left_s is not None and left_s <= 0:
            self.is_late = True
            return None
        relaxed = self.limit.relaxed(self.tables, weights, limit_bytes)
        try:
            found = solve_limited(
                relaxed,
                known=[self.best] if self.best else [],
                time_limit_s=left_s,
                gap=self.gap,
                max_parts=MAX_PARTS_OF_MODES if self.limit.memory.recomputes else MAX_PARTS,
                **self.options,
            ).solution
        except CutShortError:
            self.is_late = True
            return None
        except NothingFitsError:
            if limit_bytes is None:
                self.bound = np.inf
            return None
        self.has_gaps |= not found.exact
        self.is_late |= not found.exact and self.deadline_s is not None and perf_counter() > self.deadline_s
        if limit_bytes is None:
            self.bound = max(self.bound, found.lower_bound)
        self.offer(found.choice)
        return found.choice

    def bind(self) -> None:
        """Limit the turns that bind, and weighted sums of them, until the optimum fits or nothing is gained."""
        weights = {self.limit.peak(self.unlimited.choice).turn: 1}
        for _ in range(MAX_TURNS):
            choice = self.asked(weights)
            if choice is None or self.is_closed() or self.is_late:
                break
            peak = self.limit.peak(choice)
            if peak.turn in weights:
                break
            weights = self.balanced(weights, peak.turn)
            if self.is_closed() or self.is_late or self.bound == np.inf:
                break
        self.tighten(weights)

    def balanced(self, weights: Mapping[Turn, int], turn: Turn) -> dict[Turn, int]:
        """Return the weights of some turns and another one at which the bound is highest, as far as is looked for."""
        low, high, best = 0, MAX_SHARE, (self.bound, {turn: 1})
        while low < high - 1 or high == MAX_SHARE:
            share = high if low == 0 and high == MAX_SHARE else (low + high) // 2
            mixed = _mixed(weights, turn, share)
            choice = self.asked(mixed)
            if choice is None or self.is_closed() or self.is_late:
                return mixed
            if self.bound > best[0]:
                best = self.bound, mixed
            is_over = self.limit.peak(choice).turn in weights
            if share == MAX_SHARE:
                if not is_over:
                    return mixed
                high = MAX_SHARE - 1
                continue
            low, high = (low, share) if is_over else (share, high)
        return best[1]

    def tighten(self, weights: Mapping[Turn, int]) -> None:
        """Search within tighter limits on some turns: other turns, and what the sums leave out, may take more."""
        limit = self.limit.limit_bytes
        least, most, within = 0, limit, limit
        for _ in range(MAX_TIGHTER):
            if self.is_closed() or self.is_late or self.bound == np.inf or most - least < limit * CLOSE_BYTES:
                break
            choice = self.asked(weights, within)
            if choice is None or self.limit.fits(choice):
                least, within = within, (within + most) // 2
                continue
            peak = self.limit.peak(choice)
            if peak.turn not in weights:
                weights = {**weights, peak.turn: max(weights.values())}
            most, within = within, within - (peak.bytes - limit)
            if within <= least:
                within = (least + most) // 2

    def go_through(self) -> None:
        """Go through all strategies that may be cheaper than the best, where these are few."""
        tables = self.tables
        kept = tuple(np.arange(size, dtype=np.int32) for size in tables.domain_sizes)
        if self.best and tables.hiding is None:
            kept = near_optimal(tables, self.cost)
        if not all(map(len, kept)) or prod(map(len, kept)) > MAX_ENUMERATED:
            return
        every = sorted((tables.evaluate(choice), choice) for choice in product(*(own.tolist() for own in kept)))
        for number, (cost, choice) in enumerate(every):
            if cost >= self.cost or number == MAX_PEAKS:
                self.bound = max(self.bound, min(cost, self.cost))
                return
            if np.isfinite(cost) and self.offer(choice):
                break
        self.bound = self.cost


def _mixed(weights: Mapping[Turn, int], turn: Turn, share: int) -> dict[Turn, int]:
    """Return weights in which a turn has so many parts of `MAX_SHARE`, and others the rest as they share it."""
    total = sum(weights.values())
    found = {other: weight * (MAX_SHARE - share) for other, weight in weights.items() if share < MAX_SHARE}
    found[turn] = found.get(turn, 0) + share * total
    common = gcd(*found.values())
    return {other: weight // common for other, weight in found.items() if weight}


# -- where nothing fits


def lightest_within(tables: CostTables, limit: MemoryLimit) -> tuple[Choice, float]:
    """Return the strategy with the lowest peak that is found, first of those that have least in one turn.

    Returns:
        The strategy, and the bytes that every strategy takes at least.
    """
    weights, best, least = {Turn("update", -1): 1}, Choice(), 0.0
    for _ in range(MAX_TURNS):
        problem = limit.relaxed(tables, weights)
        choice = lightest_strategy(problem)
        least = max(least, problem.usage(choice) / sum(weights.values()))
        peak = limit.peak(choice)
        if not best or peak.bytes < limit.peak(best).bytes:
            best = choice
        if peak.turn in weights:
            break
        weights = {peak.turn: 1} if len(weights) == 1 else {**weights, peak.turn: max(weights.values())}
    return best, least


def limit_of(
    problem: Problem, limit_bytes: int, optimiser: str, *, keeps: Keeping | None = None, in_flight: int = 1
) -> MemoryLimit:
    """Return a limit on the peaks of a problem's strategies.

    Args:
        problem: Of a step of one stage, or of one stage of several.
        limit_bytes: The most that is to be in a device's memory.
        optimiser: Whose state counts.
        keeps: Of the whole graph, where the problem is of one stage of it.
        in_flight: Micro-batches of which the stage has something at once.
    """
    memory = StepMemory(
        graph=problem.graph,
        configurations=problem.configurations,
        optimiser=optimiser,
        keeps=keeping(problem.graph) if keeps is None else keeps,
        modes=problem.choices.layers,
        edges=problem.choices.edges,
        recomputes=any(layer.again.any() for layer in problem.choices.layers),
        micro_batches=problem.micro_batches,
    )
    return MemoryLimit(memory=memory, limit_bytes=limit_bytes, in_flight=in_flight)


def nothing_fits(problem: Problem, limit: MemoryLimit, *, is_constrained: bool) -> MemoryLimitError:
    """Return the error that says by how much no strategy fits, which layer binds, and on how many devices one would.

    is_constrained: Whether the problem has other constraints.
    """
    graph, devices, most = problem.graph, problem.num_devices, limit.limit_bytes
    lightest, least = lightest_within(problem.tables, limit)
    peak = limit.peak(lightest)
    binding = max(range(len(graph.operators)), key=lambda v: (peak.kept_by_layer[v], -v))
    # More devices have other configurations, which constraints may not allow.
    enough = None if is_constrained else _enough_devices(graph, devices, limit)
    advice = f"{enough} devices would do" if enough else "use more devices"
    if is_constrained:
        advice = f"loosen the constraints, or {advice}"
    state = limit.memory.least_state_bytes()
    if state <= most:
        advice += ", or try a smaller batch"
    else:
        advice += f" (no smaller batch does: weights with their gradients and state take {quantity(state, 'B')})"
    among = " that keeps to the constraints" if is_constrained else ""
    kept = peak.kept_by_layer[binding]
    takes = f"the least that one takes is {quantity(peak.bytes, 'B')}"
    if least < peak.bytes * (1 - CLOSE_BYTES):
        takes = f"the least found takes {quantity(peak.bytes, 'B')}, none takes less than {quantity(least, 'B')}"
    return MemoryLimitError(
        f"no strategy of {graph.name!r}{among} fits {quantity(most, 'B')} on each of {devices} devices: {takes}, "
        f"{quantity(peak.bytes - most, 'B')} too much; layer "
        f"{graph.operators[binding].name!r} binds with {quantity(kept, 'B')} of it ({kept / peak.bytes:.0%}); {advice}"
    )


def _enough_devices(graph: Graph, num_devices: int, limit: MemoryLimit) -> int | None:
    """Return the first of 2, 4, … times as many devices on which a strategy would fit; None where there is none."""
    factor, before = 2, float("inf")
    while factor <= MAX_MORE_DEVICES:
        try:
            tables, configurations = _without_costs(graph, factor * num_devices)
        except ConfigurationError:
            return None
        memory = replace(limit.memory, configurations=configurations, modes=(), edges=(), recomputes=False)
        there = MemoryLimit(memory=memory, limit_bytes=limit.limit_bytes)
        least = there.peak(lightest_within(tables, there)[0]).bytes
        if least <= limit.limit_bytes:
            return factor * num_devices
        if least >= before:
            return None
        factor, before = 2 * factor, least
    return None


def _without_costs(graph: Graph, num_devices: int) -> tuple[CostTables, tuple[IndexArray, ...]]:
    """Return tables in which nothing costs anything, and the configurations: memory depends on these alone."""
    distinct = {like: number for number, like in enumerate(dict.fromkeys(graph.repeated))}
    found = [enumerate_configurations(graph.operators[like], num_devices) for like in distinct]
    references = [distinct[like] for like in graph.repeated]
    edges = [(graph.index[edge.producer], graph.index[edge.consumer]) for edge in table_edges(graph)]
    kinds = list(dict.fromkeys((references[u], references[v]) for u, v in edges))
    nothing = [np.zeros(len(configurations)) for configurations in found]
    tables = CostTables(
        vertex_names=tuple(graph.index),
        vertex_costs=tuple(nothing),
        vertex_table=tuple(references),
        edges=tuple(edges),
        edge_tables=tuple(
            EdgeTable(
                row_class=nothing[u].astype(np.int32), col_class=nothing[v].astype(np.int32), values=np.zeros((1, 1))
            )
            for u, v in kinds
        ),
        edge_table=tuple(kinds.index((references[u], references[v])) for u, v in edges),
    )
    return tables, tuple(found[number] for number in references)
