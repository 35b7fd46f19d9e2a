"""Other solvers of the benchmarks, on small problems with forbidden combinations; those that are not installed wait."""

import numpy as np
import pytest

from pase.tables.cost_tables import CostTables
from scripts.benchmarks.peers import PEERS
from tests.solver.problems import brute_force, cycle, random_tables, tree

MODULES = {"toulbar2": "pytoulbar2", "CP-SAT": "ortools", "HiGHS": "highspy", "CBC": "cbcbox"}


def problems() -> list[CostTables]:
    rng = np.random.default_rng(5)
    return [
        random_tables(rng, 5, edges, forbidden=forbidden, smallest_domain=2)
        for edges in (tree(rng, 5), cycle(5))
        for forbidden in (0.0, 0.3)
    ]


@pytest.mark.parametrize("peer", PEERS)
def test_a_peer_finds_the_optimum(peer: str) -> None:
    if peer in MODULES:
        pytest.importorskip(MODULES[peer])
    for tables in problems():
        answer = PEERS[peer](tables, 20.0)
        assert answer.exact
        assert answer.cost == pytest.approx(brute_force(tables), rel=1e-6)
