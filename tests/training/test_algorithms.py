"""The registry against a table from the paper, and what rules keep whatever the numbers."""

import ast
import re
from pathlib import Path

import numpy as np
import pytest

from pase.easgd import algorithms
from pase.easgd.algorithms import (
    ALGORITHMS,
    Algorithm,
    Exchange,
    Rates,
    Sends,
    algorithm_named,
    changed,
)
from pase.easgd.job import DEFAULT_ALGORITHM, Job, begun
from pase.errors import TrainingError

TURN, FIRST, FREE, ALL = Exchange.ROUND_ROBIN, Exchange.FIRST_COME, Exchange.LOCK_FREE, Exchange.TOGETHER
WEIGHTS, GRADIENTS = Sends.WEIGHTS, Sends.GRADIENTS

PAPER = {
    # Who is served when, what is sent, where the centre is, whether the exchange runs beside the gradient, who keeps a
    # velocity, and what it is measured against.
    "original-easgd": (TURN, WEIGHTS, "master", False, "nobody", "async-sgd"),  # Algorithm 1; Section 3.3
    "async-easgd": (FIRST, WEIGHTS, "master", False, "nobody", "async-sgd"),  # Section 5.1; Fig. 6.1
    "async-measgd": (FIRST, WEIGHTS, "master", False, "workers", "async-msgd"),  # Eq. 5, 6; Fig. 6.2
    "hogwild-easgd": (FREE, WEIGHTS, "master", False, "nobody", "hogwild-sgd"),  # Section 5.1; Fig. 6.3
    "sync-easgd1": (ALL, WEIGHTS, "master", False, "nobody", "sync-sgd"),  # Algorithm 2: the CPU holds W̄
    "sync-easgd2": (ALL, WEIGHTS, "worker 0", False, "nobody", "sync-sgd"),  # Algorithm 3: GPU 1 holds W̄
    "sync-easgd3": (ALL, WEIGHTS, "worker 0", True, "nobody", "sync-sgd"),  # Section 6.1.3: with overlap
    "async-sgd": (FIRST, GRADIENTS, "master", False, "nobody", ""),  # Section 3.1
    "async-msgd": (FIRST, GRADIENTS, "master", False, "master", ""),  # Eq. 3, 4
    "hogwild-sgd": (FREE, GRADIENTS, "master", False, "nobody", ""),  # Section 3.2
    "sync-sgd": (ALL, GRADIENTS, "master", False, "nobody", ""),  # Section 2.3: "the master updates W"
}


def _keeper(algorithm: Algorithm) -> str:
    return {(False, False): "nobody", (True, False): "workers", (False, True): "master"}[
        algorithm.worker_velocity, algorithm.master_velocity
    ]


def test_the_algorithms_are_those_of_the_paper() -> None:
    assert {
        name: (a.exchange, a.sends, a.place.value, a.overlaps, _keeper(a), a.counterpart)
        for name, a in ALGORITHMS.items()
    } == PAPER


def test_what_follows_from_it() -> None:
    for name, (exchange, sends, _, _, keeper, _) in PAPER.items():
        algorithm = algorithm_named(name)
        assert algorithm.name == name
        assert algorithm.is_synchronous == (exchange is ALL)
        assert algorithm.has_rho == (sends is WEIGHTS)
        assert algorithm.has_momentum == (keeper != "nobody")
        assert algorithm.has_average == (name == "sync-sgd")
        # Only EASGD has a counterpart, and a counterpart has none and is exchanged in the same way (but round-robin,
        # for which the paper has no plain method).
        if algorithm.counterpart:
            other = ALGORITHMS[algorithm.counterpart]
            assert (other.counterpart, other.sends) == ("", GRADIENTS)
            assert other.exchange is (FIRST if exchange is TURN else exchange)
            assert other.has_momentum == algorithm.has_momentum


def test_each_is_one_declaration_and_training_names_it_nowhere_else() -> None:
    home = Path(algorithms.__file__)
    named: dict[str, list[str]] = {}
    for path in sorted(home.parent.glob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        found = [node.elts[0] for node in ast.walk(tree) if isinstance(node, ast.Tuple) and len(node.elts) == 6]
        for node in found if path == home else ast.walk(tree):
            if isinstance(node, ast.Constant) and (path == home or node.value in PAPER):
                named.setdefault(str(node.value), []).append(path.name)
    # One of them is the default.
    assert named == {name: [home.name, "job.py"] if name == DEFAULT_ALGORITHM else [home.name] for name in PAPER}


def test_an_unknown_name_lists_the_valid_ones() -> None:
    with pytest.raises(TrainingError, match=re.escape(", ".join(sorted(PAPER)))):
        algorithm_named("elastic")
    with pytest.raises(TrainingError, match="unknown algorithm 'sync-easgd': did you mean 'sync-easgd"):
        algorithm_named("sync-easgd")


@pytest.mark.parametrize("name", PAPER)
def test_all_begin_with_the_same_weights_and_without_momentum(name: str) -> None:
    # Algorithm 1, lines 3 to 6.
    weights = np.array([1.5, -2.0, 0.25])
    start = begun(Job(algorithm=ALGORITHMS[name], rates=Rates(learning_rate=0.1), num_workers=3, num_steps=1), weights)
    assert (len(start.workers), start.num_events) == (3, 0)
    states = [progress.state for progress in start.workers]
    for array in (start.master.centre, *(state.weights for state in states)):
        np.testing.assert_array_equal(array, weights)
    kept = [v for v in (start.master.velocity, *(state.velocity for state in states)) if v is not None]
    assert len(kept) == {"nobody": 0, "workers": 3, "master": 1}[PAPER[name][4]]
    for velocity in kept:
        np.testing.assert_array_equal(velocity, np.zeros(3))


# ------------------------------------------------------------------------------------------- whatever the numbers


@pytest.mark.parametrize("name", PAPER)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_numbers_keep_their_type_and_inputs_their_values(name: str, dtype: type[np.floating]) -> None:
    algorithm = ALGORITHMS[name]
    rates = Rates(learning_rate=0.1, rho=0.3, momentum=0.9, averages=algorithm.has_average)
    rng = np.random.default_rng(3)
    weights, gradient, centre, total = rng.standard_normal((4, 7)).astype(dtype)
    for array in (weights, gradient, centre, total):
        array.setflags(write=False)  # a rule that changed what it was given would raise
    worker, master = algorithm.worker_state(weights), algorithm.master_state(centre)
    for _ in range(2):
        master = changed(master, algorithm.master(rates, master, total, 3))
        worker = algorithm.worker(rates, worker, gradient, master.centre)
        for array in (worker.weights, worker.velocity, master.centre, master.velocity):
            assert array is None or (array.dtype, array.shape) == (dtype, (7,))


# ------------------------------------------------------------------------------------------------------- the job


def _job(name: str = "async-easgd", **changes: object) -> Job:
    values = {"rates": Rates(learning_rate=0.1), "num_workers": 2, "num_steps": 3} | changes
    return Job(algorithm=ALGORITHMS[name], **values)  # type: ignore[arg-type]


def test_events_are_exchanges_or_rounds() -> None:
    # Algorithm 1 serves one worker an iteration; Algorithms 2 to 4 all of them.
    assert (_job().num_events, _job("sync-easgd1").num_events) == (6, 3)
    assert [e for e in range(1, 7) if _job().is_due(2, e)] == [4, 6]
    assert [e for e in range(1, 4) if _job("sync-sgd").is_due(2, e)] == [2, 3]
    assert not any(_job().is_due(None, e) for e in range(1, 7))
