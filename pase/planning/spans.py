"""What the stages of a pipeline take at least, wherever the graph is cut: bounds of schemes before stages are solved.

At shares of the sides of α t + o and a price of memory (`stage_problem`) layers come to sums that add up, so that all
stages between all cuts are bounded at once: by what layers take alone, then by what lies between neighbouring cuts, at
the points where stages take most, then by stages that are solved. Over all cuts the longest stage and the sum of t
bound the step.
"""

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from heapq import heapify, heappop, heappush
from itertools import accumulate, pairwise
from math import inf
from time import perf_counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pase.common.containers import FrozenDict
from pase.costs import (
    Allowance,
    CostModel,
    GroupMemory,
    StepMemory,
    TimeUpError,
    cost_model,
    hiding_layers,
    layer_signatures,
    traffic_of,
)
from pase.costs.choice_tables import ChoiceTables, KnownChoices, choice_tables, choices_of_layers
from pase.costs.choices import CRITERIA, LayerChoices, Links
from pase.costs.collectives import Link
from pase.costs.memory import Keeping, keeping
from pase.costs.states import BoolArray, ModeSpace
from pase.costs.traffic import LayerTraffic
from pase.graph import Graph
from pase.graph.operators import with_fan_outs
from pase.graph.operators.products import with_rings
from pase.graph.parts import cuts, micro_batch, narrow_writers, stage, with_cuts
from pase.machine import Machine
from pase.planning.constraints import Constraints, allowed
from pase.planning.stage_problem import (
    Looked,
    StageProblem,
    between,
    memory_weights,
    side_by_side,
    sides_of,
    sides_of_time,
    times,
)
from pase.planning.stage_search import StageFound, climb, solve_stage
from pase.planning.stages import INTERLEAVED, ONE_FORWARD_ONE_BACKWARD, group_links, in_flight, under_way
from pase.sharding.shards import FloatArray, IndexArray, IntArray

MIN_RESTRICTED, SLACKS = 12_000, (0.12, 0.35)
"""Choices of different layers from which on tables are made of some of them, which come within so much of the layers
between cuts, or within so much more where the others, which count with what they come to by themselves, hold a bound
back."""
PRICES = np.geomspace(0.05, 8.0, 5)
"""Of a device's memory, beside what a stage takes where memory costs nothing."""
MAX_CLIMB = 12
"""Points at most at which layers are looked at by themselves to find where they take most."""
MAX_IN_FLIGHT, MAX_CLIMBED = 12, 6
"""Numbers of micro-batches under way that are told apart where layers are looked at by themselves, at some prices and
where they take most."""
MEMORY = memory_weights(1)
"""[criteria] as they count for memory, of what a layer keeps for all micro-batches under way."""
EXACT = 1e-9
"""Up to which share of the cost a bound is as good as reached."""
CLOSE = 2e-3
"""Up to which share of the step's time bounds and strategies are brought together."""
MAX_LOOSE = 4.0
"""By how much more at most those of stages that are shorter than the longest may be apart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """Of how many stages and micro-batches a step is. chunks: how many stages each group of devices has in turns.

    With several, `stages` are of as many layers as the chunks of a group have together.
    """

    stages: int
    micro_batches: int
    chunks: int = 1


@dataclass(frozen=True, kw_only=True, eq=False)
class Setting:
    """What a step is searched for.

    Attributes:
        graph: Of the whole batch.
        limit_bytes: Of a device, infinite for no limit.
        schedule: Of pipelines; "interleaved" includes 1F1B, where a group of devices has a single stage.
        deadline_s: By `perf_counter`, after which searching raises TimeUpError, or ends with what is known by then.
        imported: Graphs of micro-batches, by their number, of a model that was imported with that batch; they replace
            what is derived from `graph`.
        rings: Attention that passes keys and values round in any case.
    """

    graph: Graph
    num_devices: int
    machine: Machine
    cost_model: str
    space: ModeSpace
    optimiser: str
    limit_bytes: float
    schedule: str = ONE_FORWARD_ONE_BACKWARD
    constraints: Constraints = ()
    deadline_s: float = inf
    imported: Mapping[int, Graph] = field(default_factory=FrozenDict)
    rings: frozenset[str] = frozenset()

    @property
    def batch(self) -> int:
        """How many examples a step has."""
        return max(self.graph.batch[operator.name].examples for operator in self.graph.operators)

    def check_time(self) -> None:
        """Raise TimeUpError where the time is over."""
        if self.is_late:
            raise TimeUpError(0.0)

    @property
    def is_late(self) -> bool:
        """Whether the time is over."""
        return perf_counter() > self.deadline_s

    def of_micro_batch(self, micro_batches: int, stages: int) -> "Batch":
        """Return the graph of one of so many micro-batches, cut for several stages, and what schemes have of it."""
        imported, has_cuts = self.imported.get(micro_batches), stages > 1
        if imported is not None:
            return batch_of(imported, 1, has_cuts=has_cuts, rings=self.rings)
        return batch_of(self.graph, micro_batches, has_cuts=has_cuts, rings=self.rings)


@dataclass(frozen=True, kw_only=True, eq=False)
class Batch:
    """The graph of a micro-batch, and what it has under every scheme.

    Attributes:
        graph: With fan-outs.
        has_cuts: Whether it has those, too, that stages can be cut at.
    """

    graph: Graph
    has_cuts: bool

    @cached_property
    def keeps(self) -> Keeping:
        """What is saved for the backward pass."""
        return keeping(self.graph)

    @cached_property
    def at(self) -> tuple[int, ...]:
        """Before which layers it can be cut."""
        return cuts(self.graph)

    @cached_property
    def kinds(self) -> tuple[int, ...]:
        """[V] numbers, equal where all that a stage's answer depends on is."""
        return _kinds(self.graph, self.keeps)

    @cached_property
    def fixed(self) -> frozenset[str]:
        """Layers that are not recomputed, so that runs of layers that are end there."""
        # Without cuts a run ends with what the layers behind it read, which is kept in any case.
        at = self.at if self.has_cuts else narrow_writers(self.graph)
        return frozenset(self.graph.operators[v].name for v in _run_ends(self.kinds, at))

    @cached_property
    def hides(self) -> tuple[tuple[bool, bool], ...]:
        """As `hiding_layers` has it."""
        return hiding_layers(self.graph)


@lru_cache(maxsize=32)
def batch_of(whole: Graph, micro_batches: int, *, has_cuts: bool, rings: frozenset[str] = frozenset()) -> Batch:
    """Return the graph of one of so many micro-batches, and what it has under every scheme."""
    graph = micro_batch(whole, micro_batches)
    graph = with_cuts(graph) if has_cuts else with_fan_outs(graph)
    return Batch(graph=with_rings(graph, rings) if rings else graph, has_cuts=has_cuts)


@lru_cache(maxsize=4)
def known_choices(setting: Setting, stages: int, micro_batches: int) -> KnownChoices:
    """Return what tables of schemes have in common that differ in their chunks alone; filled as they are made."""
    del setting, stages, micro_batches
    return KnownChoices()


def _told_apart(batch: Batch, only: Mapping[str, IndexArray], space: ModeSpace) -> tuple[int, ...]:
    """Return the kinds of a batch's layers, told apart where layers are left other configurations or modes."""
    if not only and not space.layers:
        return batch.kinds
    numbers: dict[Hashable, int] = {}
    kinds = []
    for operator, kind in zip(batch.graph.operators, batch.kinds, strict=True):
        left = only.get(operator.name)
        key = kind, space.of(operator.name), None if left is None else left.tobytes()
        kinds.append(numbers.setdefault(key, len(numbers)))
    return tuple(kinds)


@dataclass
class Stages:
    """The stages of a scheme: what they are made of, and those that are solved by now.

    kinds: [V] as `Batch` has them, told apart by constraints. only: the configurations of some layers that tables
    have. beyond: [V] of each layer, what the choices that they
    leave out take, as in `StageProblem`; () where none is left out. pool: strategies of parts of stages. several:
    what is kept for several micro-batches, as `side_by_side` has it. holding: choices with what they hold, as
    `ChoiceTables.holding` has it. is_whole: whether tables have choices that others beat in all costs, too, as they do
    within a memory limit.
    """

    setting: Setting
    scheme: Scheme
    batch: Batch
    kinds: tuple[int, ...]
    model: CostModel
    links: tuple[Link | None, ...]
    only: Mapping[str, IndexArray]
    known: KnownChoices
    beyond: tuple[FloatArray, ...] = ()
    pool: dict[Hashable, list[Looked]] = field(default_factory=dict)
    tables: dict[Hashable, tuple[StageProblem, StepMemory | None]] = field(default_factory=dict)
    several: dict[Hashable, Any] = field(default_factory=dict)
    holding: dict[Hashable, Any] = field(default_factory=dict)
    is_whole: bool = False
    solved: dict[tuple[Hashable, tuple[int, ...]], tuple[StageProblem, StageFound]] = field(default_factory=dict)

    @classmethod
    def of(cls, setting: Setting, scheme: Scheme) -> "Stages":
        batch, devices = (
            setting.of_micro_batch(scheme.micro_batches, scheme.stages),
            setting.num_devices // scheme.stages,
        )
        only = _allowed(setting.constraints, batch.graph, devices)
        return cls(
            setting=setting,
            scheme=scheme,
            batch=batch,
            kinds=_told_apart(batch, only, setting.space),
            model=cost_model(setting.cost_model, setting.machine, devices, batch.graph.precision),
            links=group_links(setting.machine, setting.num_devices, scheme.stages, scheme.chunks),
            only=only,
            known=known_choices(setting, scheme.stages, scheme.micro_batches),
            is_whole=setting.limit_bytes < inf,
        )

    @property
    def keeps(self) -> Keeping | None:
        """What is saved for backward passes; None where memory is not limited."""
        return self.batch.keeps if self.setting.limit_bytes < inf else None

    @property
    def devices(self) -> int:
        """Of each stage."""
        return self.setting.num_devices // self.scheme.stages

    @cached_property
    def stretches(self) -> tuple[tuple[tuple[int, int, int], ...], ...]:
        """From each place where stages may begin and end to the next, the layers between neighbouring cuts.

        Of each (first, beyond, which chunk of its group). With chunks places are between groups alone.
        """
        scheme, ends = self.scheme, (0, *self.batch.at, len(self.kinds))
        between = tuple((first, beyond, 0) for first, beyond in pairwise(ends))
        if scheme.stages == 1:
            return (between,)
        if scheme.chunks == 1:
            return tuple((each,) for each in between)
        works = _works_s(self.setting, scheme.micro_batches)
        at = even_cuts(self.batch.at, works, scheme.stages * scheme.chunks)
        chunks = list(pairwise((0, *at, len(self.kinds))))
        return tuple(
            tuple(
                (low, high, c)
                for c, (first, beyond) in enumerate(chunks[group :: scheme.stages])
                for low, high, _ in between
                if first <= low < beyond
            )
            for group in range(scheme.stages)
        )

    @cached_property
    def places(self) -> tuple[int, ...]:
        """How many layers are before each place."""
        sizes = (sum(beyond - first for first, beyond, _ in stretch) for stretch in self.stretches)
        return tuple(accumulate(sizes, initial=0))

    @cached_property
    def order(self) -> IndexArray:
        """[V, 2] layers in the order of the places, and which chunk of its group each is in."""
        layers = ((v, c) for stretch in self.stretches for first, beyond, c in stretch for v in range(first, beyond))
        return np.array(list(layers), dtype=np.int32)

    def has(self, number: int, i: int, j: int) -> bool:
        """Return whether a stage may be from one place to another."""
        return i < j and (self.scheme.chunks == 1 or (i, j) == (number, number + 1))

    def chunks(self, i: int, j: int) -> tuple[tuple[int, int], ...]:
        """Return the layers of a stage from one place to another, (first, beyond): of its chunks where it has any."""
        found: list[tuple[int, int]] = []
        for first, beyond, _ in (each for stretch in self.stretches[i:j] for each in stretch):
            if found and found[-1][1] == first:
                found[-1] = found[-1][0], beyond
            else:
                found.append((first, beyond))
        return tuple(found)

    @property
    def weight(self) -> float:
        """α of α t + o: of the longest stage every micro-batch, but for what each stage has once (`per_stage`)."""
        m = self.scheme.micro_batches
        if self.scheme.stages == 1 or self.scheme.chunks > 1:
            return float(m)
        return float(max(m - self.per_stage, 1))

    @property
    def per_stage(self) -> float:
        """How often a step takes t of each stage, beside the longest one: while the pipeline fills."""
        return 1 / self.scheme.chunks

    @cached_property
    def _moments(self) -> tuple[IntArray, ...]:
        """Of each stage [moments, chunks] of how many micro-batches are under way, the one at which most are first."""
        scheme, numbers = self.scheme, range(self.scheme.stages)
        if scheme.chunks == 1:
            own = [in_flight(self.setting.schedule, scheme.stages, number, scheme.micro_batches) for number in numbers]
            return tuple(np.array([[each]]) for each in own)
        # After three rounds nothing is under way that was not before.
        m = min(scheme.micro_batches, 3 * scheme.stages)
        asked = {"num_stages": scheme.stages * scheme.chunks, "micro_batches": m}
        each = [under_way(INTERLEAVED, group=number, num_groups=scheme.stages, **asked) for number in numbers]
        # Of those the evenest: chunks that hold less of what counts for more do then hold most.
        return tuple(rows[np.lexsort(((rows**2).sum(axis=1), -rows.sum(axis=1)))] for rows in each)

    def _counted(self, number: int) -> IntArray:
        """Return the moments of a stage as they count beside gradients of weights, which the first to go back has not.

        A later one is one of fewer.
        """
        return np.minimum(self._moments[number], max(self.scheme.micro_batches - 1, 1))

    def in_flight(self, number: int) -> tuple[int, ...]:
        """Return how many micro-batches of each chunk of a stage are under way where they are most."""
        return tuple(self._moments[number][0].tolist())

    def counted(self, number: int) -> tuple[int, ...]:
        """Return how many of these count beside gradients of weights."""
        return tuple(self._counted(number)[0].tolist())

    def key(self, i: int, j: int, number: int) -> Hashable:
        """Return what a stage's answer depends on, beside the micro-batches that are under way."""
        return tuple(self._chunk_key(*own, at) for own, at in self._numbered(i, j, number))

    def _numbered(self, i: int, j: int, number: int) -> list[tuple[tuple[int, int], int]]:
        """Return the chunks of a stage, and which of all they are."""
        return [(own, number + c * self.scheme.stages) for c, own in enumerate(self.chunks(i, j))]

    def _chunk_key(self, first: int, beyond: int, number: int) -> Hashable:
        kinds = self.kinds
        return kinds[first:beyond], first == 0, beyond == len(kinds), self.links[number : number + 2]

    def is_solved(self, i: int, j: int, number: int) -> bool:
        """Return whether a stage's answer is known."""
        return (self.key(i, j, number), self.in_flight(number)) in self.solved

    def choices(self) -> tuple[list[LayerChoices], list[LayerTraffic]]:
        """Return the choices of all layers, wherever they are, and their traffic: in a stage none takes less."""
        first, which, layers, traffic = self._of_all()
        if self.keeps is not None:
            tables = ChoiceTables(
                graph=self.batch.graph,
                num_devices=self.devices,
                configurations=(),
                layers=tuple(layers),
                ends=(),
                edges=(),
                hides=self.model.overlap > 0,
            )
            layers = list(self._held(tables, self.memory_of_all(), first).layers)
        return [layers[n] for n in which], [traffic[n] for n in which]

    def _of_all(self) -> tuple[list[int], list[int], list[LayerChoices], list[LayerTraffic]]:
        """Return the first of equal layers, [V] which of these each one is like, and their choices and traffic."""
        setting, batch = self.setting, self.batch
        alike = [(kind, op.name in batch.fixed) for kind, op in zip(self.kinds, batch.graph.operators, strict=True)]
        first = {key: v for v, key in reversed(list(enumerate(alike)))}
        which = {key: n for n, (key, _) in enumerate(sorted(first.items(), key=lambda item: item[1]))}
        layers = choices_of_layers(
            batch.graph,
            self.devices,
            self.model,
            setting.space,
            known=self.known,
            fixed=batch.fixed,
            only=self.only,
            hides=batch.hides,
            micro_batches=self.scheme.micro_batches,
            is_whole=self.is_whole,
            allowance=Allowance(deadline_s=setting.deadline_s),
            among=frozenset(batch.graph.operators[v].name for v in first.values()),
        )
        choices, traffic = [layer.choices for layer in layers], [layer.traffic for layer in layers]
        return sorted(first.values()), [which[key] for key in alike], choices, traffic

    def memory_of_all(self) -> StepMemory:
        """Return what all layers have in memory, wherever stages are cut: no less than there."""
        key = "all", id(self.only)
        if key not in self.holding:
            _, which, _, traffic = self._of_all()
            memory = StepMemory(
                graph=self.batch.graph,
                keeps=self.batch.keeps,
                configurations=[traffic[n].splits.values for n in which],
                optimiser=self.setting.optimiser,
                recomputes=self.setting.space.recomputes,
                micro_batches=self.scheme.micro_batches,
            )
            self.holding[key] = self.only, memory
        found: StepMemory = self.holding[key][1]
        return found

    def _held(self, tables: ChoiceTables, memory: StepMemory, positions: Sequence[int]) -> ChoiceTables:
        """Return tables with what their choices hold when micro-batches begin to go back, at least.

        positions: Of their layers among those that the memory is of.
        """
        held = []
        known: dict[Hashable, tuple[FloatArray, FloatArray]] = {}
        for v, layer in zip(positions, tables.layers, strict=True):
            operator = memory.graph.operators[v]
            is_shared = any(read.shared for read in operator.parameters)
            key: Hashable = v if is_shared else (self.kinds[self.batch.graph.index[operator.name]], id(layer))
            if key not in known:
                # Chunks have weights in another type while they are at work alone.
                lasting = memory.lasting(v, layer, has_casts=self.scheme.chunks == 1)
                known[key] = lasting.astype(np.float64), memory.waiting(v, layer).astype(np.float64)
            held.append(known[key])
        return tables.holding(held, [edge.kept for edge in tables.edges], self.holding)

    def problem(self, i: int, j: int, number: int) -> StageProblem:
        """Return the problem of a stage."""
        found, memories = [], list[StepMemory]()
        for (first, beyond), at in self._numbered(i, j, number):
            key = self._chunk_key(first, beyond, at)
            if key not in self.tables:
                self.tables[key] = self._problem(first, beyond, (self.links[at], self.links[at + 1]), None)
            problem, memory = self.tables[key]
            found.append(problem)
            memories += [memory] if memory is not None else []
        device = GroupMemory(stages=tuple(memories), under_way=self._moments[number]) if memories else None
        counted = self.counted(number)
        if len(found) == 1:
            return replace(found[0], in_flight=counted[0], device=device)
        return side_by_side(found, counted, self._counted(number), device, self.several)

    def segment(self, first: int, beyond: int) -> StageProblem:
        """Return the problem of layers wherever a stage begins and ends: it takes no more than they do there."""
        kinds = self.kinds
        key = kinds[first:beyond], first == 0, beyond == len(kinds)
        if key not in self.tables:
            self.tables[key] = self._problem(first, beyond, (None, None), self.batch.hides[first:beyond])
        return self.tables[key][0]

    def _problem(
        self,
        first: int,
        beyond: int,
        links: Links,
        hides: Sequence[tuple[bool, bool]] | None,
    ) -> tuple[StageProblem, StepMemory | None]:
        """Return the problem of layers, and what they have in memory, None without a limit.

        hides: Of layers that are no stage, which hold as much as they do wherever stages are cut; None of a stage.
        """
        batch = self.batch
        tables = choice_tables(
            batch.graph if (first, beyond) == (0, len(self.kinds)) else stage(batch.graph, first, beyond),
            self.devices,
            self.model,
            self.setting.space,
            known=self.known,
            keeps=self.keeps,
            recomputes=self.setting.space.recomputes,
            fixed=batch.fixed,
            links=links,
            only=self.only,
            hides=hides,
            micro_batches=self.scheme.micro_batches,
            is_whole=self.is_whole,
            allowance=Allowance(deadline_s=self.setting.deadline_s),
        )
        memory = None
        if self.keeps is not None and hides is None:
            memory = StepMemory(
                graph=tables.graph,
                keeps=batch.keeps,
                configurations=tables.configurations,
                optimiser=self.setting.optimiser,
                modes=tables.layers,
                edges=tables.edges,
                recomputes=self.setting.space.recomputes,
                micro_batches=self.scheme.micro_batches,
            )
            tables = self._held(tables, memory, range(beyond - first))
        elif self.keeps is not None:
            tables = self._held(tables, self.memory_of_all(), range(first, beyond))
        problem = StageProblem(
            tables=tables,
            weight=self.weight,
            in_flight=1,
            limit_bytes=self.setting.limit_bytes,
            beyond=self.beyond[first:beyond],
            deadline_s=self.setting.deadline_s,
        )
        return problem, memory

    def solve(
        self, i: int, j: int, number: int, near: FloatArray | None, enough: float, *, longest: float, may_widen: bool
    ) -> tuple[StageProblem, StageFound]:
        """Return the answer to a stage; longest: what some stage takes at least; the rest as `solve_stage` has it."""
        key = self.key(i, j, number), self.in_flight(number)
        if key not in self.solved:
            problem = self.problem(i, j, number)
            # What fits with more micro-batches under way fits with fewer.
            alike = [
                answer.choice for (kind, _), (_, answer) in self.solved.items() if kind == key[0] and answer.choice
            ]
            # A stage that is not the longest counts while the pipeline fills alone.
            loose = CLOSE * min(max(self.weight / self.scheme.stages, 1.0), MAX_LOOSE)
            found = solve_stage(
                problem,
                known=alike,
                tolerance=CLOSE,
                pool=self.pool,
                near=near,
                enough=enough,
                may_widen=may_widen,
                loose=(loose, longest if self.scheme.stages > 1 else 0.0),
            )
            self.solved[key] = problem, found
        return self.solved[key]


class Spans:
    """What stages take at least, from one place to another, by relaxations of all of them.

    At a point, shares of the sides of α t + o and a price of a byte, layers come to sums that add up (`stage_problem`).

    longest, totals: of each stage by number, [places, places] of α t + o and of what it adds to the sum of t (of t its
    share `per_stage`); infinite where no stage is.
    """

    def __init__(self, stages: Stages) -> None:
        self.stages = stages
        num, numbers = len(stages.places), range(stages.scheme.stages)
        nothing = np.where(np.arange(num)[None, :] > np.arange(num)[:, None], 0.0, np.inf)
        if stages.scheme.chunks > 1:
            nothing = np.where(np.eye(num, k=1) > 0, nothing, np.inf)
        self.longest, self.totals = ([nothing.copy() for _ in numbers] for _ in range(2))
        self._raised: list[tuple[frozenset[int], Sequence[FloatArray], FloatArray]] = []
        hides = stages.model.overlap > 0
        self._sides = sides_of(stages.weight, hides=hides), stages.per_stage * sides_of_time(hides=hides)

    def point(self, number: int, i: int, j: int) -> FloatArray:
        """Return the shares and the price of a byte at which a stage is known to take most."""
        most, found = -np.inf, np.zeros(len(self._sides[0]))
        for numbers, points, less in self._raised:
            if number in numbers:
                own = less[:, j] - less[:, i] - self._worth(points)
                if own.max() > most:
                    most, found = own.max(), points[int(own.argmax())]
        return found

    def _worth(self, points: Sequence[FloatArray]) -> FloatArray:
        """Return what a device's memory is worth at some points."""
        limit = self.stages.setting.limit_bytes
        return np.array([point[-1] * limit if point[-1] > 0 else 0.0 for point in points])

    def weights(self, number: int, point: FloatArray) -> list[FloatArray]:
        """Return the [criteria] of a point for the layers of each chunk of a stage."""
        weights = self._priced(point)
        return [weights * times(count) for count in self.stages.counted(number)]

    def _priced(self, point: FloatArray) -> FloatArray:
        """Return the [criteria] of a point, of what is kept for all micro-batches under way."""
        # A stage in which nothing streams has fewer sides.
        weights: FloatArray = between(self._sides[0], point[:-1]) + point[-1] * MEMORY
        return weights

    def by_layers(self, layers: Sequence[LayerChoices], kinds: Mapping[int, FloatArray]) -> None:
        """Raise what stages take to what their layers do by themselves, edges left out; kinds: columns by identity."""
        stages, limit = self.stages, self.stages.setting.limit_bytes
        number_of = {key: n for n, key in enumerate(kinds)}
        which = np.array([number_of[id(layers[v])] for v in stages.order[:, 0]])
        free = np.array([max((columns @ self._sides[0][0]).min(), 0.0) for columns in kinds.values()])[which].sum()
        prices = np.zeros(1)
        if limit < np.inf and limit > 0:
            prices = np.concatenate([prices, free / stages.scheme.stages / limit * PRICES])
        for numbers in self._alike(MAX_IN_FLIGHT):
            fewest = np.min([stages.counted(number) for number in numbers], axis=0).tolist()
            ways = list(zip(self._sides, (self.longest, self.totals), strict=True))
            for sides, spans in ways[: 1 if stages.scheme.stages == 1 else 2]:
                scale = sides[0, 0] / self._sides[0][0, 0]
                matrix = np.stack([side + scale * price * MEMORY for side in sides for price in prices], axis=1)
                points = [
                    np.array([*np.eye(len(sides))[k, 1:], scale * price]) for k in range(len(sides)) for price in prices
                ]
                each = {
                    count: [
                        np.maximum(own @ (times(count)[:, None] * matrix), 0.0).min(axis=0) for own in kinds.values()
                    ]
                    for count in set(fewest)
                }
                of_layers = np.array([each[count] for count in fewest])[stages.order[:, 1], which]
                up_to = np.concatenate([np.zeros((1, len(points))), np.cumsum(of_layers, axis=0)])
                self._raise(spans, numbers, points, up_to[list(stages.places)])

    def by_layers_at(
        self, layers: Sequence[LayerChoices], columns: Mapping[int, FloatArray], path: Sequence[int]
    ) -> None:
        """Raise what stages take as `by_layers` does, where what those of some cuts take is highest."""
        stages, limit = self.stages, self.stages.setting.limit_bytes
        for number in (numbers[0] for numbers in self._alike(MAX_CLIMBED)):
            i, j = path[number : number + 2]
            in_flight = stages.counted(number)
            kinds = [(id(layers[v]), in_flight[c]) for v, c in stages.order.tolist()]
            scaled = {(key, count): columns[key] * times(count) for key, count in set(kinds)}
            own = Counter(kinds[stages.places[i] : stages.places[j]])

            def least(
                weights: FloatArray,
                own: Mapping[tuple[int, int], int] = own,
                scaled: Mapping[tuple[int, int], FloatArray] = scaled,
            ) -> tuple[FloatArray, float]:
                stages.setting.check_time()
                found = np.zeros(len(CRITERIA))
                for key, many in own.items():
                    found += many * scaled[key][np.maximum(scaled[key] @ weights, 0.0).argmin()]
                return found, float(found @ weights)

            point = climb(
                least,
                sides=self._sides[0],
                memory=MEMORY,
                room=limit,
                tolerance=CLOSE,
                most=MAX_CLIMB,
                near=self.point(number, i, j),
            ).at
            weights = self._priced(point)
            each = {key: float(np.maximum(own @ weights, 0.0).min()) for key, own in scaled.items()}
            up_to = np.concatenate([[0.0], np.cumsum([each[key] for key in kinds])])[list(stages.places)]
            self._raise(self.longest, self._fuller(number), [point], up_to[:, None])

    def _fuller(self, number: int) -> list[int]:
        """Return the stages that have at least as many micro-batches under way."""
        flights = [self.stages.in_flight(n) for n in range(self.stages.scheme.stages)]
        return [n for n, own in enumerate(flights) if all(np.greater_equal(own, flights[number]))]

    def by_segments(self, number: int, point: FloatArray) -> None:
        """Raise what this stage and others take to what the layers between cuts do, at a point.

        Edges over cuts are left out. The others have at least as many micro-batches under way.
        """
        stages = self.stages
        numbers, in_flight = self._fuller(number), stages.counted(number)
        price = point[-1] * self._sides[1][0, 0] / self._sides[0][0, 0]
        ways = [(self.longest, self.weights(number, point), point)]
        if stages.scheme.stages > 1:
            # Of the sides of α t + o the last one alone has what does not hide in any micro-batch.
            shares = point[1:-1] if len(self._sides[1]) > 1 else point[:0]
            weights = between(self._sides[1], shares) + price * MEMORY
            ways.append((self.totals, [weights * times(count) for count in in_flight], np.array([price])))
        for spans, of_chunks, own in ways:
            up_to, least = [0.0], dict[tuple[int, int], float]()
            for stretch in stages.stretches:
                up_to.append(up_to[-1])
                for first, beyond, c in stretch:
                    segment = stages.segment(first, beyond)
                    key = id(segment), in_flight[c]
                    if key not in least:
                        least[key] = segment.least(of_chunks[c], stages.pool)
                    up_to[-1] += least[key]
            self._raise(spans, numbers, [own], np.array(up_to)[:, None])

    def _raise(
        self, spans: list[FloatArray], numbers: Sequence[int], points: Sequence[FloatArray], up_to: FloatArray
    ) -> None:
        """Raise spans of stages to the differences of [places, points] sums, less what a device's memory is worth."""
        sums = np.ascontiguousarray(up_to.T)
        most = np.full((len(up_to), len(up_to)), -np.inf)
        for own, worth in zip(sums, self._worth(points), strict=True):
            np.maximum(most, own[None, :] - (own + worth)[:, None], out=most)
        for number in numbers:
            # Where no stage is they are infinite.
            np.maximum(spans[number], most, out=spans[number])
        if spans is self.longest:
            self._raised.append((frozenset(numbers), points, sums))

    def solved(self, number: int, width: int, key: Hashable, bound: float) -> None:
        """Raise what a stage takes, wherever the same layers are, to what is known once it is solved."""
        stages = self.stages
        for i in range(len(stages.places) - width):
            if stages.has(number, i, i + width) and stages.key(i, i + width, number) == key:
                self.longest[number][i, i + width] = max(self.longest[number][i, i + width], bound)

    def _alike(self, most: int) -> list[list[int]]:
        """Return groups of stages that have about as many micro-batches under way, so many at most; fewest first."""
        flights: dict[tuple[int, ...], list[int]] = {}
        for number in range(self.stages.scheme.stages):
            flights.setdefault(self.stages.in_flight(number), []).append(number)
        ordered = [flights[count] for count in sorted(flights)]
        step = -(-len(ordered) // most)
        groups = [ordered[k : k + step] for k in range(0, len(ordered), step)]
        return [[number for numbers in group for number in numbers] for group in groups]

    def bound(self) -> tuple[float, tuple[int, ...]]:
        """Return what every step of the scheme takes at least, and cuts that may take no more: places by number."""
        scheme = self.stages.scheme
        value, path = _least_longest(self.longest)
        # Stages in turns take what the order of their passes does: no less than the passes of any group of devices.
        if scheme.stages == 1 or scheme.chunks > 1 or not 0 < value < inf:
            return value, path
        if scheme.micro_batches == 1:
            return max(value, self.least_total()), path
        # Whatever O, the longest o, is: α t >= (α t + o) - O, of which less is known the more of t is.
        weight = self.stages.weight / self.stages.per_stage
        share = scheme.stages / (scheme.stages + weight)
        both = [(1 - share) * own + share * weight * t for own, t in zip(self.longest, self.totals, strict=True)]
        apart = self._bound(self.longest, self.totals)
        return max(apart, self._bound(both, [own / weight for own in both]), key=lambda found: found[0])

    def _bound(self, longest: Sequence[FloatArray], totals: Sequence[FloatArray]) -> tuple[float, tuple[int, ...]]:
        """Return the least sum of stages, and the longest of others, over all cuts, as far as it is told apart."""
        value = _least_longest(longest)[0]
        least = _least_total(totals, [spans < np.inf for spans in longest])[0]

        def ranged(low: float, high: float) -> tuple[float, float, float, tuple[int, ...]]:
            """Return what steps take at least whose longest stage is in a range; (bound, low, high, cuts)."""
            self.stages.setting.check_time()
            total, own = _least_total(totals, [spans <= high for spans in longest])
            return low + total, low, high, own

        width = value * CLOSE / 4
        first = ranged(value, value + width)
        # With a longer stage than this the step takes longer even if the others take least.
        waiting, last = [first], first[0] - least
        if last > value + width:
            waiting.append(ranged(value + width, last))
        heapify(waiting)
        while waiting[0][2] - waiting[0][1] > 1.5 * width:
            _, low, high, _ = heappop(waiting)
            middle = 0.5 * (low + high)
            heappush(waiting, ranged(low, middle))
            heappush(waiting, ranged(middle, high))
        return waiting[0][0], waiting[0][3]

    def least_longest(self) -> float:
        """Return what the longest stage takes at least."""
        return _least_longest(self.longest)[0]

    def least_total(self) -> float:
        """Return what filling the pipeline takes at least: a micro-batch on all stages, or one of their chunks."""
        return _least_total(self.totals, [spans < np.inf for spans in self.longest])[0]


def _restricted(stages: Stages, spans: Spans, path: Sequence[int], slack: float) -> None:
    """Leave configurations out of the tables that come to so much more than others at the points of some cuts."""
    batch = stages.batch
    layers, traffic = stages.choices()
    if sum(map(len, {id(layer): layer for layer in layers}.values())) <= MIN_RESTRICTED:
        return
    weights = [
        weights
        for number, (i, j) in enumerate(pairwise(path))
        for point in (spans.point(number, i, j),)
        for factor in (0.7, 1.0, 1.5)
        for weights in spans.weights(number, np.array([*point[:-1], factor * point[-1]]))
    ]
    matrix = np.unique(weights, axis=0).T
    kinds = {id(layer): (layer, own.splits.values) for layer, own in zip(layers, traffic, strict=True)}
    sums = {key: np.maximum(layer.columns @ matrix, 0.0) for key, (layer, _) in kinds.items()}
    room: dict[int, FloatArray] = {}
    for first, beyond in pairwise((0, *batch.at, len(layers))):
        total = sum(sums[id(layer)].min(axis=0) for layer in layers[first:beyond])
        for layer in layers[first:beyond]:
            room[id(layer)] = np.maximum(room.get(id(layer), 0.0), slack * total)
    only: dict[int, IndexArray] = {}
    left_out: dict[int, FloatArray] = {}
    for key, (layer, configurations) in kinds.items():
        is_near = (sums[key] - sums[key].min(axis=0) <= room[key]).any(axis=1)
        rows = np.unique(layer.rows[is_near])
        only[key] = configurations[rows]
        left_out[key] = layer.columns[~np.isin(layer.rows, rows)]
    stages.only = {
        operator.name: only[id(layer)] for operator, layer in zip(batch.graph.operators, layers, strict=True)
    }
    stages.beyond = tuple(left_out[id(layer)] for layer in layers)


def by_layers(stages: Stages) -> tuple[Spans, float, tuple[int, ...]]:
    """Return what stages take by their layers alone, the bound of the scheme, and cuts that may take no more."""
    spans, layers = Spans(stages), stages.choices()[0]
    columns = {key: layer.columns for key, layer in {id(layer): layer for layer in layers}.items()}
    spans.by_layers(layers, columns)
    bound, path = spans.bound()
    for _ in range(2):
        spans.by_layers_at(layers, columns, path)
        before = bound
        bound, path = spans.bound()
        if bound <= before * (1 + CLOSE):
            break
    return spans, bound, path


@lru_cache(maxsize=4)
def by_segments(setting: Setting, scheme: Scheme, slack: float = SLACKS[0]) -> tuple[Spans, float, tuple[int, ...]]:
    """Return what stages take by what is between cuts, the bound of the scheme, and cuts that may take no more.

    slack: as `SLACKS` has it.
    """
    stages = Stages.of(setting, scheme)
    spans, _, path = by_layers(stages)
    _restricted(stages, spans, path, slack)
    for number, (i, j) in enumerate(pairwise(path)):
        if number == 0 or stages.in_flight(number) != stages.in_flight(number - 1):
            spans.by_segments(number, spans.point(number, i, j))
    return spans, *spans.bound()


def _least_longest(spans: Sequence[FloatArray]) -> tuple[float, tuple[int, ...]]:
    """Return the least longest stage of all cuts, and where these are: places by number, the ends among them."""
    reach = np.full(len(spans[0]), np.inf)
    reach[0] = 0.0
    origins = []
    for own in spans:
        longest = np.maximum(reach[:, None], own)
        # Of equal ones the evenest: what a stage takes beyond the others' longest does not matter.
        ties = longest + 1e-9 * np.where(np.isfinite(own), own, 0.0)
        origins.append(ties.argmin(axis=0))
        reach = longest[origins[-1], np.arange(len(reach))]
    return float(reach[-1]), _back(origins)


def _least_total(spans: Sequence[FloatArray], is_allowed: Sequence[BoolArray]) -> tuple[float, tuple[int, ...]]:
    """Return the least sum of stages of all cuts, of stages that are allowed, and where these are."""
    reach = np.full(len(spans[0]), np.inf)
    reach[0] = 0.0
    origins = []
    for own, allowed_here in zip(spans, is_allowed, strict=True):
        sums = reach[:, None] + np.where(allowed_here, own, np.inf)
        origins.append(sums.argmin(axis=0))
        reach = sums[origins[-1], np.arange(len(reach))]
    return float(reach[-1]), _back(origins)


def _back(origins: Sequence[NDArray[np.intp]]) -> tuple[int, ...]:
    path = [len(origins[0]) - 1]
    for origin in reversed(origins):
        path.append(int(origin[path[-1]]))
    return tuple(reversed(path))


def even_cuts(places: Sequence[int], costs: Sequence[float], num: int) -> list[int]:
    """Return the cuts, of some places, at which each of some stages costs as nearly as can be as much as the others.

    costs: [V] of layers.
    """
    up_to = np.concatenate([[0.0], np.cumsum(costs)])
    at: list[int] = []
    for number in range(1, num):
        # As many places are left free as there are cuts to come.
        free = [place for place in places[: len(places) - (num - 1 - number)] if not at or place > at[-1]]
        at.append(min(free, key=lambda place: abs(up_to[place] - up_to[-1] * number / num)))
    return at


def works_s(graph: Graph, name: str, machine: Machine) -> list[float]:
    """Return what the work of each layer takes on one device, under a cost model by name."""
    model = cost_model(name, machine, 1, graph.precision)
    known: dict[Hashable, float] = {}
    found = []
    for operator, key in zip(graph.operators, layer_signatures(graph), strict=True):
        if key not in known:
            traffic = traffic_of(graph, operator, np.ones((1, len(operator.extents)), dtype=np.int32))
            known[key] = float(model.work(traffic.forward)[0] + model.work(traffic.backward)[0])
        found.append(known[key])
    return found


@lru_cache(maxsize=32)
def _works_s(setting: Setting, micro_batches: int) -> list[float]:
    return works_s(setting.of_micro_batch(micro_batches, 2).graph, setting.cost_model, setting.machine)


def _kinds(graph: Graph, keeps: Keeping) -> tuple[int, ...]:
    """Return [V] a number for each layer: equal where all that a stage's answer depends on is."""
    numbers: dict[Hashable, int] = {}
    hides = hiding_layers(graph)
    found = []
    for v, (operator, signature) in enumerate(zip(graph.operators, layer_signatures(graph), strict=True)):
        name = operator.name
        sources = tuple(
            v - graph.index[edge.producer] if (edge := graph.incoming.get((name, i))) else 0
            for i in range(len(operator.reads))
        )
        reads = tuple(((name, i) in keeps.reads, (name, i) in keeps.copies) for i in range(len(operator.reads)))
        writes = tuple((name, i) in keeps.writes for i in range(len(operator.writes)))
        key = signature, hides[v], sources, reads, writes
        found.append(numbers.setdefault(key, len(numbers)))
    return tuple(found)


def _run_ends(kinds: Sequence[int], at: Sequence[int]) -> tuple[int, ...]:
    """Return the layers that are not recomputed, so that what is before them is a run of its own: of cuts some.

    Where stretches between cuts repeat with a period, one cut of each period; else all of them.
    """
    segments = [tuple(kinds[i:j]) for i, j in pairwise((*at, len(kinds)))]
    for period in range(1, 9):
        alike = [i for i in range(len(segments) - period) if segments[i] == segments[i + period]]
        if alike and len(alike) >= len(segments) / 2:
            return tuple(at[i] for i in range(alike[0] % period, len(at), period))
    return tuple(at)


def _allowed(constraints: Constraints, graph: Graph, devices: int) -> dict[str, IndexArray]:
    """Return the configurations of the layers that constraints are about."""
    return allowed(constraints, graph, devices).mapping(graph)
