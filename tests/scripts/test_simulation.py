"""The rank correlation of `scripts/bench simulation`, and that its strategies and Fig. 6's can be simulated."""

from math import sqrt

import pytest

from pase import load, search
from pase.analysis.simulation.simulation import simulate
from scripts.benchmarks.figure6 import ASSUMPTIONS, DEVICES, EXPERTS, PAPER, PAPER_LARGEST
from scripts.benchmarks.simulation import NETWORKS, spearman
from scripts.benchmarks.trials import random_strategy
from tests.networks import slow_machine


def test_spearman_compares_ranks_alone() -> None:
    assert spearman([1, 2, 3, 4], [10, 20, 300, 4000]) == pytest.approx(1)
    assert spearman([1, 2, 3, 4], [4, 3, 2, -7]) == pytest.approx(-1)
    # Ranks 0, 1½, 1½, 3 and 0, 2, 1, 3: 4.5 / √(4.5 · 5).
    assert spearman([1, 2, 2, 4], [1, 3, 2, 4]) == pytest.approx(4.5 / sqrt(4.5 * 5))
    assert spearman([1, 2, 3, 4, 5], [2, 1, 4, 3, 5]) == pytest.approx(1 - 6 * 4 / (5 * 24))


@pytest.mark.parametrize("network", ["mlp", *(pytest.param(n, marks=pytest.mark.full) for n in NETWORKS if n != "mlp")])
def test_random_strategies_take_different_times(network: str) -> None:
    plan = search(load(network, arguments=NETWORKS[network]), 4, machine=slow_machine())
    times = {simulate(random_strategy(plan, seed), collectives="program").step_time_s for seed in range(3)}
    assert len(times) == 3


def test_the_papers_figure_is_whole() -> None:
    assert set(EXPERTS) == set(PAPER) >= set(PAPER_LARGEST)
    assert {len(speedups) for speedups in PAPER.values()} == {len(DEVICES)}
    assert all(speedup > 1 for speedups in PAPER.values() for speedup in speedups)
    (unchanged, *changed) = ASSUMPTIONS
    for assumption in changed:
        fields = ("peak", "collectives", "overlaps")
        assert sum(getattr(assumption, name) != getattr(unchanged, name) for name in fields) == 1
