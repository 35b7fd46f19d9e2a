"""The plan that an expert would write down: the most regular step that costs about as much as the best one known.

Layers at the same place of blocks that repeat have one *role*. Within the gap that a search leaves, and among choices
that cost nearly the same, its answer has layers of one role in many configurations, for no reason that a reader could
find. A step is the more irregular the more there is to say of it (`StepCosts.irregularity`): the choices of each role,
the states of weights of each stage, the lengths of stages, and the splits of all layers.

Steps to begin with have the options of the one that was found, or one pattern for all blocks, with the cuts that were
found, or with as many blocks in each stage. From the best of them options are merged, always those that cost least for
each thing less to say; then stages are searched again among the options that are left, and without the rarest ones.
What is returned was costed exactly, and its peak is within the memory limit. None of that is a bound: nothing is
claimed of steps that are more regular.
"""

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from heapq import heapify, heappop, heappush
from itertools import pairwise, product
from math import inf
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pase.common.containers import FrozenDict
from pase.costs import TimeUpError
from pase.costs.choice_tables import KnownChoices
from pase.costs.states import STATES, BoolArray
from pase.graph import Graph
from pase.planning.constraints import allowed
from pase.planning.pipelines import Found, StagePart
from pase.planning.spans import CLOSE, EXACT, Batch, Scheme, Setting, Stages
from pase.planning.stage_problem import Choice, StageProblem, StageSums, longest_repeat
from pase.planning.stage_search import solve_stage
from pase.planning.stages import step_s
from pase.sharding.shards import IndexArray, enumerate_configurations

Ints = NDArray[np.int64]
Bounds = tuple[tuple[int, int], ...]
"""Of each stage the first layer, and the one behind the last."""

PRICES = np.geomspace(0.02, 8.0, 8)
"""Of all memory of a device, in parts of what a stage takes, at which patterns of blocks are sought."""
MAX_SPLITS = 24
"""Configurations of a layer that are looked at: those of its role, and those that other layers have."""
MAX_CUTS, MAX_STARTS, MAX_SEARCHED = 1, 2, 4
"""Of cuts at equal numbers of blocks; steps from which choices are merged; and how often stages are searched without
some options."""
MAX_COMMON = 3
"""Of the options that layers of a role have, and the patterns of blocks, those that others may have instead."""
MORE_EVEN = 0.02
"""By how much more than it may a step may seem to be dearer with equal stages, before options are chosen for these."""


class LayerOption(NamedTuple):
    """What a layer may be: its split factors, the state of its weights in `STATES`, and whether it is recomputed."""

    splits: tuple[int, ...]
    state: int
    again: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class RepeatedBlocks:
    """Blocks of equal layers that repeat. size: layers of a block. The first block and the last may be incomplete."""

    first: int
    beyond: int
    size: int


@dataclass(frozen=True, kw_only=True, eq=False)
class Candidate:
    """The strategy of a step. options: [V] numbers of options, as `StepCosts` has them."""

    bounds: Bounds
    options: Ints


def runs_of_blocks(graph: Graph, kinds: Sequence[int]) -> tuple[RepeatedBlocks, ...]:
    """Return the blocks that repeat one after the other, in the order of the graph.

    Args:
        graph: Whose blocks they are.
        kinds: [V] numbers, equal where layers are equal and read of the same places, as `Batch.kinds` has them.
    """
    alike = graph.repeated
    found: list[RepeatedBlocks] = []
    waiting = [(0, len(kinds))]
    while waiting:
        low, high = waiting.pop()
        first, size, count = longest_repeat(kinds[low:high], range(1, (high - low) // 2 + 1))
        if count < 2:
            continue
        first += low
        beyond = first + size * count
        # What is behind the first layers or the last ones is other than behind their like.
        while first > low and alike[first - 1] == alike[first - 1 + size]:
            first -= 1
        while beyond < high and alike[beyond] == alike[beyond - size]:
            beyond += 1
        found.append(RepeatedBlocks(first=first, beyond=beyond, size=size))
        waiting += [(low, first), (beyond, high)]
    return tuple(sorted(found, key=lambda run: run.first))


@dataclass(frozen=True, kw_only=True, eq=False)
class _Table:
    """The options of the layers of a stage.

    which: [V] the distinct layer that each one is. choice: [distinct layers, options] the choice in the tables that is
    an option in the plainest state that comes to the same, or comes nearest to it; -1 where that is not known yet.
    option: likewise, the option that this choice is. states: likewise, the state of its weights, -1 where these would
    not lie otherwise in another state.
    """

    which: Ints
    choice: Ints
    option: Ints
    states: Ints


@dataclass(kw_only=True, eq=False)
class StepCosts:
    """What steps of one scheme cost and hold, by the options of their layers.

    Attributes:
        stages: Of the scheme, with tables of the options that are looked at alone.
        runs: Blocks that repeat.
        roles: [V] the role of each layer, -1 of those that are in no block.
        options: By their numbers.
    """

    stages: Stages
    runs: tuple[RepeatedBlocks, ...]
    roles: Ints
    options: list[LayerOption] = field(default_factory=list)
    _numbers: dict[LayerOption, int] = field(default_factory=dict)
    _problems: dict[tuple[int, int, int], StageProblem] = field(default_factory=dict)
    _tables: dict[int, _Table] = field(default_factory=dict)
    _sums: dict[Hashable, StageSums] = field(default_factory=dict)
    _irregularity: dict[Hashable, int] = field(default_factory=dict)
    _cheapest: dict[Hashable, Ints | None] = field(default_factory=dict)
    _names: Ints = field(default_factory=lambda: np.zeros((0, 0), dtype=np.int64))
    named_splits: dict[frozenset[tuple[str, int]], int] = field(default_factory=dict)

    @classmethod
    def of(cls, setting: Setting, scheme: Scheme, options: Sequence[LayerOption]) -> "StepCosts":
        """Return the steps in which each layer may have what its role has, or be split as other layers are.

        options: [V] of a step that is known.
        """
        stages = Stages.of(setting, scheme)
        runs = runs_of_blocks(stages.batch.graph, stages.batch.kinds)
        roles = _roles(stages.batch, runs)
        only = _configurations(stages, roles, options)
        return cls(stages=replace(stages, only=only, known=KnownChoices(), is_whole=True), runs=runs, roles=roles)

    def option(self, option: LayerOption) -> int:
        """Return the number of an option."""
        if option not in self._numbers:
            self._numbers[option] = len(self.options)
            self.options.append(option)
        return self._numbers[option]

    def problem(self, number: int, first: int, beyond: int) -> StageProblem:
        """Return the problem of a stage of some layers."""
        key = number, first, beyond
        if key not in self._problems:
            self.stages.setting.check_time()
            places = self.stages.places
            if self.stages.scheme.stages == 1:
                own = self.stages.problem(0, len(places) - 1, 0)
            else:
                own = self.stages.problem(places.index(first), places.index(beyond), number)
            self._problems[key] = own
        return self._problems[key]

    def table(self, problem: StageProblem, options: Ints) -> _Table:
        """Return the table of a problem, which has all of some options of its layers, [V]."""
        if id(problem) not in self._tables:
            self._tables[id(problem)] = self._table(problem)
        table = self._tables[id(problem)]
        if len(self.options) > table.choice.shape[1]:
            more = ((0, 0), (0, len(self.options) - table.choice.shape[1]))
            grown = {name: np.pad(getattr(table, name), more, constant_values=-1) for name in ("choice", "option")}
            table = replace(table, states=np.pad(table.states, more, constant_values=-1), **grown)
            self._tables[id(problem)] = table
        for v in np.flatnonzero(table.choice[table.which, options] < 0).tolist():
            self._add(table, v, int(options[v]))
        return table

    def _table(self, problem: StageProblem) -> _Table:
        layers = {id(layer): v for v, layer in reversed(list(enumerate(problem.tables.layers)))}
        numbers = {key: n for n, key in enumerate(layers)}
        found: list[tuple[int, int, int, int, int]] = []
        for key, v in layers.items():
            layer, rows = problem.tables.layers[v], problem.tables.configurations[v]
            columns = layer.columns
            plainest: dict[Hashable, tuple[int, int]] = {}
            alike: dict[tuple[int, bool], set[int]] = {}
            own: list[tuple[int, int, tuple[int, bool]]] = []
            for c, (row, state, again) in enumerate(zip(layer.rows, layer.state, layer.again, strict=True)):
                option = self.option(LayerOption(tuple(rows[row].tolist()), int(state), bool(again)))
                first, there = plainest.setdefault((int(row), bool(again), columns[c].tobytes()), (c, option))
                alike.setdefault((int(row), bool(again)), set()).add(first)
                own.append((option, there, (int(row), bool(again))))
                found.append((numbers[key], option, first, there, -1))
            for n, (_, there, kind) in enumerate(own, start=len(found) - len(own)):
                if len(alike[kind]) > 1:
                    found[n] = (*found[n][:4], self.options[there].state)
        rows = np.array(found)
        arrays = np.full((3, len(layers), len(self.options)), -1)
        arrays[:, rows[:, 0], rows[:, 1]] = rows[:, 2:].T
        which = np.array([numbers[id(layer)] for layer in problem.tables.layers])
        return _Table(which=which, choice=arrays[0], option=arrays[1], states=arrays[2])

    def _add(self, table: _Table, v: int, number: int) -> None:
        """Add to a table what of a layer comes nearest to an option that it has not."""
        which = table.which[v]
        there = np.flatnonzero(table.choice[which] >= 0)
        wanted = self.options[number]
        own = [self.options[n] for n in there.tolist()]
        likeness = [
            4 * (each.splits == wanted.splits) + 2 * (each.again == wanted.again) + (each.state == wanted.state)
            for each in own
        ]
        nearest = there[int(np.argmax(likeness))]
        for array in (table.choice, table.option, table.states):
            array[which, number] = array[which, nearest]

    def as_there_are(self, strategy: Candidate) -> Candidate:
        """Return a strategy with each layer in the plainest state that comes to the same."""
        found = strategy.options.copy()
        for number, (first, beyond) in enumerate(strategy.bounds):
            options = found[first:beyond]
            table = self.table(self.problem(number, first, beyond), options)
            found[first:beyond] = table.option[table.which, options]
        return replace(strategy, options=found)

    def choice(self, strategy: Candidate, number: int) -> Choice:
        """Return the choices of the layers of a stage."""
        first, beyond = strategy.bounds[number]
        options = strategy.options[first:beyond]
        table = self.table(self.problem(number, first, beyond), options)
        return tuple(table.choice[table.which, options].tolist())

    def of_choices(self, strategy: Candidate, number: int, v: int) -> tuple[Ints, Ints]:
        """Return [C] the options of the choices of a layer of a stage, and the states of their weights."""
        first, beyond = strategy.bounds[number]
        problem = self.problem(number, first, beyond)
        layer, rows = problem.tables.layers[v], problem.tables.configurations[v]
        table = self.table(problem, strategy.options[first:beyond])
        own = [
            self.option(LayerOption(tuple(rows[row].tolist()), int(state), bool(again)))
            for row, state, again in zip(layer.rows, layer.state, layer.again, strict=True)
        ]
        return table.option[table.which[v], own], table.states[table.which[v], own]

    def states(self, strategy: Candidate, number: int) -> set[int]:
        """Return the states of weights of a stage, of those that would lie otherwise in another state."""
        first, beyond = strategy.bounds[number]
        options = strategy.options[first:beyond]
        table = self.table(self.problem(number, first, beyond), options)
        return set(np.flatnonzero(np.bincount(table.states[table.which, options] + 1)[1:]).tolist())

    def sums(self, strategy: Candidate, number: int) -> StageSums:
        """Return what a stage takes."""
        first, beyond = strategy.bounds[number]
        key = number, first, beyond, strategy.options[first:beyond].tobytes()
        if key not in self._sums:
            self.stages.setting.check_time()
            self._sums[key] = self.problem(number, first, beyond).sums(self.choice(strategy, number))
        return self._sums[key]

    def cost(self, strategy: Candidate) -> float:
        """Return how long a step takes."""
        sums = [self.sums(strategy, number) for number in range(len(strategy.bounds))]
        return step_s([own.micro_batch for own in sums], [own.step for own in sums], self.stages.scheme.micro_batches)

    def fits(self, strategy: Candidate) -> bool:
        """Return whether the peak of each stage is within the memory limit."""
        if self.stages.setting.limit_bytes == inf:
            return True
        numbers = range(len(strategy.bounds))
        problems = [self.problem(number, *strategy.bounds[number]) for number in numbers]
        if not all(own.may_fit(self.sums(strategy, number)) for number, own in zip(numbers, problems, strict=True)):
            return False
        return all(own.fits(self.choice(strategy, number)) for number, own in zip(numbers, problems, strict=True))

    def cheapest_stage(self, strategy: Candidate, number: int, allowed: Sequence[set[int]]) -> Ints | None:
        """Return the options of the cheapest stage that is found, of some for each layer; None where none fits."""
        first, beyond = strategy.bounds[number]
        key = number, first, beyond, tuple(map(frozenset, allowed))
        if key not in self._cheapest:
            self.stages.setting.check_time()
            problem = self.problem(number, first, beyond)
            light: dict[int, BoolArray] = {}
            for v, (layer, among) in enumerate(zip(problem.tables.layers, allowed, strict=True)):
                own = np.array(sorted(among))
                table = self.table(problem, np.full(len(problem.tables.layers), own[0]))
                missing = own[table.choice[table.which[v], own] < 0]
                for option in missing.tolist():
                    self._add(table, v, option)
                is_light = light.setdefault(id(layer), np.zeros(len(layer), dtype=np.bool_))
                is_light[table.choice[table.which[v], own]] = True
            limited = replace(problem, light=FrozenDict(light))
            known = [self.choice(strategy, number)] if self._is_among(strategy, number, allowed) else []
            found = solve_stage(limited, known=known, tolerance=CLOSE)
            self._cheapest[key] = None
            if found.choice:
                chosen = [self.of_choices(strategy, number, v)[0][c] for v, c in enumerate(found.choice)]
                self._cheapest[key] = np.array(chosen)
        return self._cheapest[key]

    def _is_among(self, strategy: Candidate, number: int, allowed: Sequence[set[int]]) -> bool:
        first, beyond = strategy.bounds[number]
        options = strategy.options[first:beyond].tolist()
        return all(option in own for option, own in zip(options, allowed, strict=True))

    def configurations(self, strategy: Candidate) -> int:
        """Return how many different configurations, with modes, layers of equal roles have, over all roles."""
        in_blocks = self.roles >= 0
        return len(np.unique(self.roles[in_blocks] * len(self.options) + strategy.options[in_blocks]))

    def irregularity(self, strategy: Candidate) -> int:
        """Return how many things have to be said of a strategy.

        The options of each role, the states of weights of each stage, the lengths of stages, the patterns of blocks,
        and all different splits, dims by their names.
        """
        key = strategy.bounds, strategy.options.tobytes()
        if key not in self._irregularity:
            self._irregularity[key] = self._count(strategy)
        return self._irregularity[key]

    def _count(self, strategy: Candidate) -> int:
        states = sum(len(self.states(strategy, number)) for number in range(len(strategy.bounds)))
        splits = len(np.unique(self.named(strategy)))
        patterns = sum(len(set(map(bytes, _in_blocks(strategy, run)))) for run in self.runs)
        return self.configurations(strategy) + states + len(self.lengths(strategy.bounds)) + splits + patterns

    def lengths(self, bounds: Bounds) -> set[int]:
        """Return how many blocks stages have."""
        if not self.runs or len(bounds) == 1:
            return {1}
        run = max(self.runs, key=lambda own: own.beyond - own.first)
        within = [min(beyond, run.beyond) - max(first, run.first) for first, beyond in bounds]
        return {round(max(0, layers) / run.size) for layers in within}

    def named(self, strategy: Candidate) -> Ints:
        """Return [V] numbers of splits, equal where dims of the same names are split alike."""
        more = (int(self._dims.max()) + 1, len(self.options))
        if more != self._names.shape:
            grown = np.full(more, -1)
            grown[: self._names.shape[0], : self._names.shape[1]] = self._names
            self._names = grown
        found: Ints = self._names[self._dims, strategy.options]
        missing = np.flatnonzero(found < 0)
        for v in missing.tolist():
            option = int(strategy.options[v])
            dims = self.stages.batch.graph.operators[v].extents
            splits = zip(dims, self.options[option].splits, strict=True)
            named = frozenset((dim, k) for dim, k in splits if k > 1)
            self._names[self._dims[v], option] = self.named_splits.setdefault(named, len(self.named_splits))
        return found if not len(missing) else self.named(strategy)

    @cached_property
    def _dims(self) -> Ints:
        """[V] numbers of the names of each layer's dims."""
        numbers: dict[tuple[str, ...], int] = {}
        operators = self.stages.batch.graph.operators
        return np.array([numbers.setdefault(tuple(operator.extents), len(numbers)) for operator in operators])


def _roles(batch: Batch, runs: Iterable[RepeatedBlocks]) -> Ints:
    roles = np.full(len(batch.kinds), -1, dtype=np.int64)
    for run in runs:
        roles[run.first : run.beyond] = roles.max() + 1 + np.arange(run.beyond - run.first) % run.size
    return roles


def _configurations(stages: Stages, roles: Ints, options: Sequence[LayerOption]) -> FrozenDict[str, IndexArray]:
    """Return the configurations of each layer that are looked at: its role's, and those that other layers have."""
    operators = stages.batch.graph.operators
    names: dict[tuple[tuple[str, int], ...], int] = {}
    own: dict[int, dict[tuple[int, ...], None]] = {}
    for v, (operator, option) in enumerate(zip(operators, options, strict=True)):
        named = tuple((dim, k) for dim, k in zip(operator.extents, option.splits, strict=True) if k > 1)
        names[named] = names.get(named, 0) + 1
        own.setdefault(_key(roles, v), {})[option.splits] = None
    common = sorted(names, key=lambda named: -names[named])
    found: dict[str, IndexArray] = {}
    for v, operator in enumerate(operators):
        key = _key(roles, v)
        allowed = stages.only.get(operator.name)
        if allowed is None:
            allowed = enumerate_configurations(operator, stages.devices)
        there = set(map(tuple, allowed.tolist()))
        rows = {row: None for row in own[key] if row in there or row == options[v].splits}
        for named in common:
            splits = dict(named)
            row = tuple(splits.pop(dim, 1) for dim in operator.extents)
            if len(rows) < MAX_SPLITS and not splits and row in there:
                rows[row] = None
        found[operator.name] = np.array(list(rows), dtype=np.int32)
    return FrozenDict(found)


def _key(roles: Ints, v: int) -> int:
    return int(roles[v]) if roles[v] >= 0 else -1 - v


# -- patterns of blocks


BlockPattern = tuple[int, ...]
"""By place in a block, the option of its layer."""


def _in_blocks(strategy: Candidate, run: RepeatedBlocks) -> Ints:
    """Return [blocks, layers] options of the whole blocks of a run."""
    count = (run.beyond - run.first) // run.size
    return strategy.options[run.first : run.first + count * run.size].reshape(count, run.size)


def blocks_of(strategy: Candidate, run: RepeatedBlocks) -> dict[BlockPattern, list[range]]:
    """Return the patterns of the whole blocks of a run, the most common one first, and the layers of their blocks."""
    found: dict[BlockPattern, list[range]] = {}
    for number, options in enumerate(_in_blocks(strategy, run).tolist()):
        at = run.first + number * run.size
        found.setdefault(tuple(options), []).append(range(at, at + run.size))
    return dict(sorted(found.items(), key=lambda item: -len(item[1])))


def _with(strategy: Candidate, run: RepeatedBlocks, pattern: BlockPattern) -> Candidate:
    """Return a strategy in which all blocks of a run have one pattern."""
    options = strategy.options.copy()
    options[run.first : run.beyond] = np.array(pattern)[np.arange(run.beyond - run.first) % run.size]
    return replace(strategy, options=options)


@dataclass(frozen=True, kw_only=True, eq=False)
class _Loop:
    """Equal blocks of a run, each the best behind its like (`StageProblem.looped`), at prices of memory.

    places: of each layer of the block its place in the run's blocks. options, states: likewise, [C] of its choices, as
    `_Table` has them.
    """

    steps: StepCosts
    problem: StageProblem
    places: tuple[int, ...]
    options: tuple[Ints, ...]
    states: tuple[Ints, ...]

    @classmethod
    def of(cls, steps: StepCosts, run: RepeatedBlocks, base: Candidate) -> "_Loop | None":
        """Return those of the stage that has most blocks; None where its blocks are others than the run's."""
        best: tuple[int, int, int] | None = None
        for number, (first, beyond) in enumerate(base.bounds):
            start, size, count = steps.problem(number, first, beyond).repeats
            is_run = size == run.size and run.first <= first + start < run.beyond
            if is_run and (best is None or count > best[0]):
                best = count, number, start
        if best is None:
            return None
        _, number, start = best
        first, beyond = base.bounds[number]
        problem = steps.problem(number, first, beyond)
        if problem.looped is None:
            return None
        own = [steps.of_choices(base, number, v) for v in range(start, start + run.size)]
        return cls(
            steps=steps,
            problem=problem.looped,
            places=tuple((first + start + i - run.first) % run.size for i in range(run.size)),
            options=tuple(options for options, _ in own),
            states=tuple(states for _, states in own),
        )

    def light(self, state: int) -> StageProblem | None:
        """Return the problem of blocks whose weights are all in one state; None where some cannot be."""
        layers = zip(self.problem.tables.layers, self.states, strict=True)
        light = {id(layer): (states < 0) | (states == state) for layer, states in layers}
        if not all(own.any() for own in light.values()):
            return None
        return replace(self.problem, light=FrozenDict(light))

    def weights(self) -> Iterator[NDArray[np.float64]]:
        """Yield weights of sums at which the best blocks are sought: of each side, at several prices of memory."""
        problem = self.problem
        for side in problem.sides:
            yield side
            limit = problem.limit_bytes
            if limit < inf:
                layers = problem.tables.layers
                least = sum(max(0.0, float((layer.columns @ side).min())) for layer in layers)
                blocks = max(1, len(self.steps.roles) // len(layers) // self.steps.stages.scheme.stages)
                for price in PRICES:
                    yield side + price * least * blocks / limit * problem.memory

    def patterns(self) -> list[BlockPattern]:
        """Return the best patterns, in any states and in one."""
        problems = [self.problem, *(self.light(state) for state in range(len(STATES)))]
        found = [
            self._pattern(problem, weights)
            for problem, weights in product(problems, self.weights())
            if problem is not None
        ]
        return list(dict.fromkeys(found))

    def _pattern(self, problem: StageProblem, weights: NDArray[np.float64]) -> BlockPattern:
        self.steps.stages.setting.check_time()
        choice, _ = problem.optimum(weights)
        pattern = [0] * len(self.places)
        for v, c in enumerate(choice):
            pattern[self.places[v]] = int(self.options[v][c])
        return tuple(pattern)


def _front(steps: StepCosts, strategies: Iterable[Candidate]) -> list[Candidate]:
    """Return the strategies of which no other is cheaper and no less regular, the most regular one first."""
    each = [(steps.irregularity(own), steps.cost(own), n, own) for n, own in enumerate(strategies)]
    front, lowest = list[Candidate](), inf
    for _, cost, _, own in sorted(each, key=lambda way: way[:3]):
        if cost < lowest:
            front.append(own)
            lowest = cost
    return front


def _even_bounds(steps: StepCosts, found: Candidate) -> list[Bounds]:
    """Return cuts at equal numbers of blocks, those first with which the found options would take least."""
    num, places = len(found.bounds), set(steps.stages.places)
    if num == 1 or not steps.runs:
        return []
    run = max(steps.runs, key=lambda own: own.beyond - own.first)
    blocks, last = round((run.beyond - run.first) / run.size), len(found.options)
    least, over = divmod(blocks, num)
    # Those that are left over in the middle: the ends have other layers, too.
    before = (num - over) // 2
    lengths = [least + (before <= number < before + over) for number in range(num)]
    each: list[tuple[float, Bounds]] = []
    for shift in range(-run.size, run.size):
        at = [run.first + shift + run.size * int(blocks) for blocks in np.cumsum(lengths)[:-1]]
        ends = (0, *at, last)
        if least and all(low < high and high in places for low, high in pairwise(ends)):
            bounds = tuple(pairwise(ends))
            each.append((steps.cost(replace(found, bounds=bounds)), bounds))
    return [bounds for _, bounds in sorted(each)[:MAX_CUTS]]


# -- merging


Change = tuple[tuple[bytes, int], ...]
"""Layers, as an array's bytes, with the option that all of them are to have."""


def _merged(steps: StepCosts, start: Candidate, most: float, dearer: dict[Change, float]) -> Candidate:
    """Return the step that merging options leads to, first those that cost least for what they make simpler.

    Args:
        steps: Of its scheme.
        start: A step that fits.
        most: What steps may cost.
        dearer: By which share changes made other steps dearer for each thing less to say; more are added.
    """
    path = [start]
    while True:
        num = len(path)
        # What changes cost before they are likely to cost still.
        waiting = [(dearer.get(change, 0.0), n, change) for n, change in enumerate(_changes(steps, path[-1]))]
        heapify(waiting)
        seen = set[Change]()
        while waiting:
            _, n, change = heappop(waiting)
            own = _changed(steps, path[-1], change)
            simpler = steps.irregularity(path[-1]) - steps.irregularity(own)
            if simpler <= 0:
                continue
            if change not in seen:
                seen.add(change)
                share = steps.cost(own) / steps.cost(path[-1]) - 1
                dearer[change] = share / simpler if share > EXACT else 0.0
                heappush(waiting, (dearer[change], n, change))
            elif steps.cost(own) <= most and steps.fits(own):
                path.append(own)
                seen.clear()
        if len(path) == num:
            return path[-1]


def _changed(steps: StepCosts, strategy: Candidate, change: Change) -> Candidate:
    options = strategy.options.copy()
    for layers, option in change:
        options[np.frombuffer(layers, dtype=np.int64)] = option
    return steps.as_there_are(replace(strategy, options=options))


def _changes(steps: StepCosts, strategy: Candidate) -> Iterator[Change]:
    """Yield changes after which some layers have another option that layers of their role, or their splits, have."""
    options, roles = strategy.options, steps.roles
    classes: dict[int, dict[int, Ints]] = {}
    for role in np.unique(roles[roles >= 0]).tolist():
        members = np.flatnonzero(roles == role)
        classes[role] = {option: members[options[members] == option] for option in np.unique(options[members]).tolist()}
    for run in steps.runs:
        together: dict[Hashable, list[tuple[bytes, int]]] = {}
        for role in np.unique(roles[run.first : run.beyond]).tolist():
            common = sorted(classes[role], key=lambda own: -len(classes[role][own]))[:MAX_COMMON]
            for option, other in product(classes[role], common):
                if option == other:
                    continue
                own = classes[role][option].tobytes(), other
                yield (own,)
                # Layers that are otherwise in the same blocks, and like their like in others, change together.
                blocks = [((classes[role][each] - run.first) // run.size).tobytes() for each in (option, other)]
                together.setdefault(tuple(blocks), []).append(own)
        yield from (tuple(change) for change in together.values() if len(change) > 1)
        yield from _whole_blocks(strategy, run)
    yield from _one_state(steps, strategy)
    yield from _other_splits(steps, strategy, classes)


def _whole_blocks(strategy: Candidate, run: RepeatedBlocks) -> Iterator[Change]:
    """Yield changes after which all blocks of one pattern have that of other blocks."""
    options, patterns = strategy.options, blocks_of(strategy, run)
    for pattern, other in product(patterns, list(patterns)[:MAX_COMMON]):
        if pattern == other:
            continue
        layers = np.concatenate([np.arange(part.start, part.stop) for part in patterns[pattern]])
        wanted = np.array(other)[(layers - run.first) % run.size]
        layers, wanted = layers[options[layers] != wanted], wanted[options[layers] != wanted]
        yield tuple((layers[wanted == option].tobytes(), option) for option in np.unique(wanted).tolist())


def _one_state(steps: StepCosts, strategy: Candidate) -> Iterator[Change]:
    """Yield changes after which all weights of the step, or of a stage, are in one state."""
    used = set[int]().union(*(steps.states(strategy, number) for number in range(len(strategy.bounds))))
    for bounds in dict.fromkeys([(0, len(strategy.options)), *strategy.bounds]):
        layers = np.arange(*bounds)
        numbers = strategy.options[bounds[0] : bounds[1]]
        for state in sorted(used):
            change = []
            for number in np.unique(numbers).tolist():
                option = steps.options[number]
                if option.state != state:
                    own = layers[numbers == number].tobytes()
                    change.append((own, steps.option(option._replace(state=state))))
            yield tuple(change)


def _other_splits(steps: StepCosts, strategy: Candidate, classes: dict[int, dict[int, Ints]]) -> Iterator[Change]:
    """Yield changes after which all layers of a role, or one in no block, have the splits of other layers."""
    options, named = strategy.options, steps.named(strategy)
    numbers, counts = np.unique(named, return_counts=True)
    splits_of = dict(zip(steps.named_splits.values(), steps.named_splits, strict=True))
    alone = [np.array([v]) for v in np.flatnonzero(steps.roles < 0).tolist()]
    for members in [*alone, *(np.concatenate(list(own.values())) for own in classes.values())]:
        operator = steps.stages.batch.graph.operators[int(members[0])]
        rows = set(map(tuple, steps.stages.only[operator.name].tolist()))
        own = [steps.options[n] for n in np.unique(options[members]).tolist()]
        for number in numbers[np.argsort(-counts, kind="stable")].tolist():
            splits = dict(splits_of[number])
            row = tuple(splits.pop(dim, 1) for dim in operator.extents)
            if splits or row not in rows:
                continue
            for state, again in dict.fromkeys((each.state, each.again) for each in own):
                yield ((members.tobytes(), steps.option(LayerOption(row, state, again))),)


# -- searching again


def _searched_again(
    steps: StepCosts, strategy: Candidate, without: Iterable[tuple[int, int]] = (), most: float = inf
) -> Candidate | None:
    """Return the cheapest step that is found of options that are in use; None where none is known to fit.

    Args:
        steps: Of its scheme.
        strategy: A step that need not fit.
        without: Roles (`_key`) and options that are no longer to be used.
        most: What it may cost.
    """
    used: dict[int, set[int]] = {}
    keys = [_key(steps.roles, v) for v in range(len(strategy.options))]
    for key, option in zip(keys, strategy.options.tolist(), strict=True):
        used.setdefault(key, set()).add(option)
    banned: dict[int, set[int]] = {}
    for key, option in without:
        banned.setdefault(key, set()).add(option)
    found = strategy
    for number, (first, beyond) in enumerate(strategy.bounds):
        own = keys[first:beyond]
        options = strategy.options[first:beyond].tolist()
        if banned and not any(o in banned.get(key, ()) for key, o in zip(own, options, strict=True)):
            continue
        allowed = [used[key] - banned.get(key, set()) for key in own]
        again = steps.cheapest_stage(strategy, number, allowed)
        if again is None:
            return None
        new = found.options.copy()
        new[first:beyond] = again
        found = replace(found, options=new)
        if steps.cost(found) > most:
            return None
    return found


def _without_options(steps: StepCosts, strategy: Candidate) -> list[list[tuple[int, int]]]:
    """Return what might no longer be used: options that few layers of a role have, alone and in the same blocks."""
    together: dict[tuple[int, bytes], list[tuple[int, int]]] = {}
    found: list[tuple[int, list[tuple[int, int]]]] = []
    for role in np.unique(steps.roles[steps.roles >= 0]).tolist():
        members = np.flatnonzero(steps.roles == role)
        run = next(run for run in steps.runs if run.first <= members[0] < run.beyond)
        numbers, counts = np.unique(strategy.options[members], return_counts=True)
        for option, count in zip(numbers.tolist(), counts.tolist(), strict=True):
            if len(numbers) > 1:
                blocks = (members[strategy.options[members] == option] - run.first) // run.size
                together.setdefault((run.first, blocks.tobytes()), []).append((role, option))
                found.append((count, [(role, option)]))
    found += [(len(own) * len(key[1]), own) for key, own in together.items() if len(own) > 1]
    return [own for _, own in sorted(found, key=lambda way: way[0])]


@dataclass(frozen=True, slots=True, kw_only=True)
class Simplified:
    """What was made of a step that a search found.

    Attributes:
        found: The most regular step.
        cheapest: What the cheapest step costs that is known.
        configurations: Of layers of equal roles, modes included, over all roles.
        configurations_before: Of the step that the search found.
        irregularity: How many things have to be said of the step (`StepCosts.irregularity`).
        irregularity_before: Of the step that the search found.
    """

    found: Found
    cheapest: float
    configurations: int
    configurations_before: int
    irregularity: int
    irregularity_before: int


def simplified(setting: Setting, found: Found, share: float) -> Simplified | None:
    """Return the most regular step that is known to cost at most so much more than the cheapest one known, and fits.

    Args:
        setting: What was searched for.
        found: What a search found.
        share: By which the step may be dearer; 0: the cheapest one that is known.

    Returns:
        The step; None where it is the one that was found, or steps are not simplified: those whose groups of devices
        have several stages in turns, those with tied layers, and where the time is over.
    """
    scheme = found.scheme
    graph = setting.of_micro_batch(scheme.micro_batches, scheme.stages).graph
    is_tied = bool(allowed(setting.constraints, graph, setting.num_devices // scheme.stages).ties)
    if scheme.chunks > 1 or is_tied or not found.parts or setting.is_late:
        return None
    options = [
        LayerOption(splits, int(state), bool(again))
        for part in found.parts
        for splits, state, again in zip(part.configurations, part.states, part.again, strict=True)
    ]
    try:
        steps = StepCosts.of(setting, scheme, options)
        numbers = np.array([steps.option(option) for option in options])
        before = Candidate(bounds=tuple(part.chunks[0] for part in found.parts), options=numbers)
        best, cheapest = most_regular(steps, before, share)
        before = steps.as_there_are(before)
        cost = steps.cost(best)
        if best is before or (steps.irregularity(best) >= steps.irregularity(before) and cost >= found.cost):
            return None
        parts = tuple(_part(steps, best, number) for number in range(len(best.bounds)))
    except TimeUpError:
        return None
    return Simplified(
        found=Found(scheme=scheme, cost=cost, bound=min(found.bound, cost), parts=parts),
        cheapest=cheapest,
        configurations=steps.configurations(best),
        configurations_before=steps.configurations(before),
        irregularity=steps.irregularity(best),
        irregularity_before=steps.irregularity(before),
    )


def _part(steps: StepCosts, strategy: Candidate, number: int) -> StagePart:
    first, beyond = strategy.bounds[number]
    own = [steps.options[option] for option in strategy.options[first:beyond].tolist()]
    return StagePart(
        chunks=((first, beyond),),
        configurations=tuple(option.splits for option in own),
        states=tuple(option.state for option in own),
        again=tuple(option.again for option in own),
        rings=(False,) * len(own),
        sums=steps.sums(strategy, number),
    )


def most_regular(steps: StepCosts, found: Candidate, share: float) -> tuple[Candidate, float]:
    """Return the most regular step that is known to cost at most so much more than the cheapest one known, and fits.

    Args:
        steps: Of its scheme.
        found: A step that fits.
        share: By which it may be dearer; 0: the cheapest one that is known.

    Returns:
        The step, and what the cheapest one costs that is known.
    """
    best = found = steps.as_there_are(found)
    cheapest = steps.cost(found)
    try:
        starts = [found]
        for start in _starts(steps, found, share):
            if steps.fits(start):
                cheapest = min(cheapest, steps.cost(start))
                starts.append(start)
        most = cheapest * (1 + max(share, EXACT))
        starts = [start for start in starts if steps.cost(start) <= most]
        best = min([best, *starts], key=lambda own: _order(steps, own, most))
        for start in _front(steps, starts)[:MAX_STARTS]:
            if share > 0:
                best = min(best, _simplified(steps, start, most), key=lambda own: _order(steps, own, most))
    except TimeUpError:
        pass
    return best, cheapest


def _starts(steps: StepCosts, found: Candidate, share: float) -> Iterator[Candidate]:
    """Yield steps to begin with: of the options that were found, and of equal blocks, with equal stages, too."""
    cost = steps.cost(found)
    if share == 0:
        again = _searched_again(steps, found) if len(found.bounds) > 1 else None
        yield from [again] if again is not None else []
        return
    for bounds in [found.bounds, *_even_bounds(steps, found)]:
        base = steps.as_there_are(replace(found, bounds=bounds))
        if steps.cost(base) > cost * (1 + share + MORE_EVEN):
            continue
        again = _searched_again(steps, base)
        if again is not None:
            yield again
        for run in steps.runs:
            patterns = list(blocks_of(found, run))
            loop = _Loop.of(steps, run, base)
            if loop is not None:
                patterns = list(dict.fromkeys([*patterns, *loop.patterns()]))
            equal = [steps.as_there_are(_with(base, run, own)) for own in patterns]
            near = [own for own in equal if steps.cost(own) <= cost * (1 + share) and steps.fits(own)]
            yield from _front(steps, near)[:MAX_STARTS]


def _simplified(steps: StepCosts, start: Candidate, most: float) -> Candidate:
    """Return the most regular step, up to a cost, that merging options and searching again lead to."""
    best = start
    num_searched, dearer = 0, dict[Change, float]()
    while True:
        best = _merged(steps, best, most, dearer)
        again = _searched_again(steps, best)
        if again is not None and steps.cost(again) < steps.cost(best) * (1 - EXACT) and steps.fits(again):
            best = again
        for without in _without_options(steps, best):
            num_searched += 1
            fewer = _searched_again(steps, best, without, most) if num_searched <= MAX_SEARCHED else None
            if fewer is None or not steps.fits(fewer):
                continue
            if steps.irregularity(fewer) < steps.irregularity(best):
                best = fewer
                break
        else:
            return best


def _order(steps: StepCosts, strategy: Candidate, most: float) -> tuple[bool, int, float]:
    return steps.cost(strategy) > most, steps.irregularity(strategy), steps.cost(strategy)
