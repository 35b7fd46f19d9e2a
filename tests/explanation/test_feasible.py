"""Alternatives under a limit on memory: against all strategies that fit."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from pase.analysis.explanation import constrained_search
from pase.analysis.explanation.alternatives import Alternatives, FeasibleAlternatives
from pase.analysis.explanation.constrained_search import ConstrainedSearch
from pase.costs import DeviceMemory, Peak, StepMemory, TurnUsage
from pase.costs.liveness import Turn
from pase.planning.memory_limit import MemoryLimit
from pase.solver import solve
from pase.tables.cost_tables import CostTables
from tests.explanation.brute import every_strategy, others, random_problem


class Weights(StepMemory):
    """A memory of one turn, in which a strategy has the sum of its weights."""

    def __init__(self, weights: tuple[np.ndarray, ...]) -> None:
        object.__setattr__(self, "weights", weights)

    def peak(self, choice: Sequence[int], in_flight: int = 1) -> Peak:
        size = int(sum(w[c] for w, c in zip(self.weights, choice, strict=True)))
        memory = DeviceMemory(weights_bytes=size, gradients_bytes=0, activations_bytes=0, buffers_bytes=0)
        return Peak(layer="", phase="update", turn=Turn("update", -1), memory=memory, kept_by_layer=())

    def usage(self, turn: Turn, in_flight: int = 1) -> TurnUsage:
        assert turn == Turn("update", -1)
        return TurnUsage(layers=self.weights, edges=(), peaks=())


def weights_of(tables: CostTables, seed: int) -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(seed)
    return tuple(rng.integers(1, 50, size).astype(float) for size in tables.domain_sizes)


@pytest.mark.parametrize("part", [0.1, 0.4, 0.8])
@pytest.mark.parametrize("seed", range(6))
def test_runner_ups_that_fit_are_those_of_all_strategies_that_fit(seed: int, part: float) -> None:
    tables = random_problem(seed)
    weights = weights_of(tables, seed)
    least, most = (sum(float(pick(w)) for w in weights) for pick in (np.min, np.max))
    limit = round(least + part * (most - least))
    search = ConstrainedSearch(limit=MemoryLimit(memory=Weights(weights), limit_bytes=limit), time_limit_s=60.0)
    fitting = [
        (choice, cost)
        for choice, cost in every_strategy(tables)
        if sum(w[c] for w, c in zip(weights, choice, strict=True)) <= limit
    ]
    optimum = search.cheapest(tables)
    assert optimum.cost == pytest.approx(min(cost for _, cost in fitting))
    found = FeasibleAlternatives(
        tables=tables, optimum=optimum, search=search, free=Alternatives(tables, solve(tables))
    )
    num_limited = 0
    for vertex, size in enumerate(tables.domain_sizes):
        for configuration in range(size):
            other = found.among(vertex, others(tables, vertex, configuration))
            costs = [cost for choice, cost in fitting if choice[vertex] != configuration]
            assert (other is None) == (not costs)
            if other is not None:
                assert other.is_exact
                assert other.choice[vertex] != configuration
                assert search.fits(other.choice)
                assert other.total_cost == pytest.approx(min(costs), rel=1e-9)
                num_limited += 1
        costs = tables.costs_beside(vertex, optimum.choice)
        alone = search.cheapest_beside(tables, vertex, optimum.choice, costs)
        beside = [(*optimum.choice[:vertex], c, *optimum.choice[vertex + 1 :]) for c in range(size)]
        fit = [c for c, choice in enumerate(beside) if sum(w[k] for w, k in zip(weights, choice, strict=True)) <= limit]
        assert alone in fit
        assert costs[alone] == costs[fit].min()
    assert num_limited > 0 or max(tables.domain_sizes) == 1 or part == 0.1


def test_without_a_limit_everything_fits() -> None:
    assert ConstrainedSearch().fits((1, 2, 3))


def test_an_interrupted_search_ends_the_explanation(monkeypatch: pytest.MonkeyPatch) -> None:
    tables = random_problem(4)
    cut = replace(solve(tables), exact=False)
    monkeypatch.setattr(constrained_search, "solve", lambda *_args, **_kwargs: cut)
    with pytest.raises(KeyboardInterrupt, match=r"^$"):
        ConstrainedSearch().unlimited(tables)
    assert ConstrainedSearch(time_limit_s=1.0).unlimited(tables) is cut
