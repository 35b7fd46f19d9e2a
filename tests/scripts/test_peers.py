"""Other solvers of the benchmarks, on small problems with forbidden combinations; those that are not installed wait.

Each has a process of its own: next to TensorFlow's, its libraries are not always the ones that it was built with.
"""

from concurrent.futures import ProcessPoolExecutor
from importlib.util import find_spec
from multiprocessing import get_context

import numpy as np
import pytest

from pase.tables.cost_tables import CostTables
from scripts.benchmarks.peers import PEERS, Answer
from tests.solver.problems import brute_force, cycle, random_tables, tree

MODULES = {"toulbar2": "pytoulbar2", "CP-SAT": "ortools", "HiGHS": "highspy", "CBC": "cbcbox"}


def problems() -> list[CostTables]:
    rng = np.random.default_rng(5)
    return [
        random_tables(rng, 5, edges, forbidden=forbidden, smallest_domain=2)
        for edges in (tree(rng, 5), cycle(5))
        for forbidden in (0.0, 0.3)
    ]


def answers(peer: str) -> list[Answer]:
    return [PEERS[peer](tables, 20.0) for tables in problems()]


@pytest.mark.parametrize("peer", PEERS)
def test_a_peer_finds_the_optimum(peer: str) -> None:
    if peer in MODULES and find_spec(MODULES[peer]) is None:
        pytest.skip(f"{MODULES[peer]} is not installed")
    with ProcessPoolExecutor(max_workers=1, mp_context=get_context("spawn")) as process:
        found = process.submit(answers, peer).result()
    for tables, answer in zip(problems(), found, strict=True):
        assert answer.exact
        assert answer.cost == pytest.approx(brute_force(tables), rel=1e-6)
