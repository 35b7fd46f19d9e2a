"""Random search as FlexFlow does it (Jia, Zaharia and Aiken 2018, section 6): Metropolis-Hastings over strategies.

A step proposes another configuration for one layer, both drawn uniformly, and takes it with probability
min(1, exp(-β Δ)), Δ the change of the strategy's cost: strategies are then visited with probabilities that are
proportional to exp(-β cost). The best one that was visited is the result, with no proof of anything.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from types import MappingProxyType

import numpy as np

from pase.analysis.baselines.rules import Choose, cheapest, with_best_fan_outs
from pase.costs import Problem
from pase.errors import ConfigurationError, unknown_name
from pase.machine import Machine
from pase.planning.problems import data_parallel_choice
from pase.tables.cost_tables import CostTables

Start = Callable[[Problem, Machine, Sequence[Choose], int], Sequence[int]]

MAX_STEPS = 250_000
"""Steps after which FlexFlow's search was stopped for PaSE's Table I."""

COLDNESS = 20.0
"""β times the mean cost of a layer: a strategy dearer by a twentieth of a layer is taken with probability 1/e.

FlexFlow leaves β to be chosen. Of 5 to 160, tried on seven networks: hotter walks than this do not settle in large
networks (ResNet-101 on 32 devices: 7 % above the optimum at 5, 2.5 % at 20), colder ones are stuck in small ones
(RNNLM on 8: 6 % at 80, under 0.5 % at 20).
"""

_BLOCK = 4096
_ROUNDING = 1e-12
"""Strategies whose costs differ by less than this share are equally good: costs of a walk are sums of differences."""


def _experts(problem: Problem, machine: Machine, experts: Sequence[Choose], _seed: int) -> Sequence[int]:
    choices = (choose_one(problem, machine) for choose_one in experts)
    return cheapest(problem, [data_parallel_choice(problem), *(choice for choice in choices if choice is not None)])


def _data_parallel(problem: Problem, _machine: Machine, _experts: Sequence[Choose], _seed: int) -> Sequence[int]:
    return data_parallel_choice(problem)


def _random(problem: Problem, _machine: Machine, _experts: Sequence[Choose], seed: int) -> Sequence[int]:
    generator = np.random.default_rng(seed)
    return [int(generator.integers(size)) for size in problem.tables.domain_sizes]


STARTS: Mapping[str, Start] = MappingProxyType(
    {"experts": _experts, "data_parallel": _data_parallel, "random": _random}
)
"""Where a walk begins: the cheapest of the experts' strategies that apply, as in PaSE's evaluation, or elsewhere."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How to search. seed: of the random numbers. steps: at most. start: a name in `STARTS`.

    coldness: β times the mean cost of a layer and its edges in the first strategy. Raises ConfigurationError for a
    figure that is out of range or a start that does not exist.
    """

    seed: int = 0
    steps: int = MAX_STEPS
    coldness: float = COLDNESS
    start: str = "experts"

    def __post_init__(self) -> None:
        for name, least in (("seed", 0), ("steps", 0), ("coldness", 0)):
            value = getattr(self, name)
            if not least <= value < inf:
                raise ConfigurationError(f"{name} {value} is not usable; expected a number of {least} or more")
        if self.start not in STARTS:
            raise ConfigurationError(unknown_name("start", self.start, STARTS))


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """The best strategy of a walk. choice: [V] configuration indices; cost: F(G, φ) (Eq. 1). steps: that it took."""

    choice: tuple[int, ...]
    cost: float
    steps: int


class Walk:
    """A strategy that is changed one layer at a time, and its cost: a step looks at one layer and its edges alone."""

    def __init__(self, tables: CostTables, choice: Sequence[int]) -> None:
        """Start from a strategy, by configuration index."""
        self.choice = list(choice)
        self.cost = tables.evaluate(choice)
        self._sizes = tables.domain_sizes
        # Views of the arrays: their entries are read as numbers of Python, without copies.
        self._layers = [tables.layer_costs(v).data for v in range(tables.num_vertices)]
        self._edges: list[list[tuple[int, memoryview, memoryview, memoryview]]] = [[] for _ in self._layers]
        views = [
            (table.values.data, table.values.T.data, table.row_class.data, table.col_class.data)
            for table in tables.edge_tables
        ]
        for (u, v), number in zip(tables.edges, tables.edge_table, strict=True):
            values, transposed, rows, cols = views[number]
            self._edges[u].append((v, rows, cols, values))
            self._edges[v].append((u, cols, rows, transposed))

    def change(self, vertex: int, configuration: int) -> float:
        """Return by how much the cost changes where a vertex takes another configuration."""
        old, choice, layer = self.choice[vertex], self.choice, self._layers[vertex]
        change: float = layer[configuration] - layer[old]
        for other, own, others, values in self._edges[vertex]:
            column = others[choice[other]]
            change += values[own[configuration], column] - values[own[old], column]
        return change

    def steps(self, beta: float, generator: np.random.Generator) -> Iterator[bool]:
        """Walk without end; yield after each step whether its proposal was taken."""
        num_vertices = len(self.choice)
        while True:
            vertices = generator.integers(num_vertices, size=_BLOCK).tolist()
            shares = generator.random(_BLOCK).tolist()
            # u < exp(-x) for a uniform u, and x < e for an exponential e, are equally likely.
            bounds = generator.exponential(size=_BLOCK).tolist()
            for vertex, share, bound in zip(vertices, shares, bounds, strict=True):
                configuration = int(share * self._sizes[vertex])
                change = self.change(vertex, configuration)
                is_taken = beta * change <= bound
                if is_taken:
                    self.choice[vertex] = configuration
                    self.cost += change
                yield is_taken


def choose(
    problem: Problem, machine: Machine, *, options: Sampling, experts: Sequence[Choose]
) -> tuple[int, ...] | None:
    """Return the best strategy that a walk from the start that the options name visits.

    The walk looks at a layer and its edges alone, so that what hides counts as paid.
    """
    start = STARTS[options.start](problem, machine, experts, options.seed)
    return with_best_fan_outs(problem, sample(replace(problem.tables, hiding=None), start, options).choice)


def sample(tables: CostTables, start: Sequence[int], options: Sampling) -> Sampled:
    """Return the best strategy that a walk from a first one visits.

    The walk ends after so many steps as are allowed, or once the best has not improved for half of the steps so far
    (FlexFlow's rule; PaSE section IV-B), but not before a tenth of them: the half of a few steps says nothing.
    """
    walk = Walk(tables, start)
    generator = np.random.default_rng(options.seed)
    beta = options.coldness * tables.num_vertices / walk.cost if walk.cost else 0.0
    best, best_cost = tuple(start), walk.cost
    improved = taken = 0
    least = options.steps // 10
    for is_taken in walk.steps(beta, generator):
        if taken >= options.steps or taken >= max(least, 2 * improved):
            break
        taken += 1
        if is_taken and walk.cost < best_cost * (1 - _ROUNDING):
            best, best_cost, improved = tuple(walk.choice), walk.cost, taken
    return Sampled(choice=best, cost=tables.evaluate(best), steps=taken)
