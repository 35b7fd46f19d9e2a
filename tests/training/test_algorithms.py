"""The registry against a table written from the paper, and what the rules keep whatever the numbers."""

import ast
import re
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pase.easgd import algorithms
from pase.easgd.algorithms import (
    ALGORITHMS,
    Algorithm,
    Array,
    Exchange,
    MasterState,
    Place,
    Rates,
    Sends,
    WorkerState,
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

SYNC_EASGD = ("sync-easgd1", "sync-easgd2", "sync-easgd3")
ONE_AT_A_TIME = ("original-easgd", "async-easgd", "async-measgd", "hogwild-easgd")
NUM_WEIGHTS = 3


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


def test_what_is_registered_cannot_be_changed() -> None:
    with pytest.raises(TypeError, match="does not support item assignment"):
        ALGORITHMS["mine"] = ALGORITHMS["sync-sgd"]  # type: ignore[index]
    with pytest.raises(AttributeError, match="cannot assign to field 'sends'"):
        ALGORITHMS["sync-sgd"].sends = WEIGHTS  # type: ignore[misc]


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


def _vector(twelfths: Sequence[int]) -> Array:
    return np.array([Fraction(n, 12) for n in twelfths], dtype=object)


def _crowd(workers: Sequence[tuple[Sequence[int], Sequence[int]]], centre: Array) -> "Crowd":
    return [_vector(weights) for weights, _ in workers], [_vector(gradient) for _, gradient in workers], centre


triples = st.tuples(*[st.integers(-96, 96)] * NUM_WEIGHTS)
vectors = triples.map(_vector)
crowds = st.builds(_crowd, st.lists(st.tuples(triples, triples), min_size=1, max_size=5), vectors)
"""Some workers' weights and gradients, and a centre; exact."""
rates_drawn = st.builds(
    Rates,
    learning_rate=st.integers(1, 128).map(lambda n: Fraction(n, 64)),
    rho=st.integers(0, 48).map(lambda n: Fraction(n, 16)),
    momentum=st.integers(0, 16).map(lambda n: Fraction(n, 16)),
)
few = settings(max_examples=30, deadline=None)

Crowd = tuple[list[Array], list[Array], Array]


def _round(
    algorithm: Algorithm, rates: Rates, weights: Sequence[Array], gradients: Sequence[Array], centre: Array
) -> tuple[list[Array], Array]:
    """Take one round of a synchronous method; return the workers' weights and the centre after it."""
    master = MasterState(centre=centre)
    total = sum(weights if algorithm.has_rho else gradients, start=centre * 0)
    after = changed(master, algorithm.master(rates, master, total, len(weights))).centre
    seen = centre if algorithm.has_rho else after
    states = [algorithm.worker(rates, WorkerState(weights=w), g, seen) for w, g in zip(weights, gradients, strict=True)]
    return [state.weights for state in states], after


@few
@given(rates_drawn, vectors, vectors, vectors)
def test_with_one_worker_and_no_rho_it_is_sgd(rates: Rates, weights: Array, gradient: Array, centre: Array) -> None:
    rates = replace(rates, rho=Fraction(0))
    sgd = weights - rates.learning_rate * gradient
    for name in SYNC_EASGD:
        (after,), centre_after = _round(ALGORITHMS[name], rates, [weights], [gradient], centre)
        assert (after == sgd).all()
        assert (centre_after == centre).all()  # nothing ties it to the worker
    for averages in (False, True):
        plain = replace(rates, averages=averages)
        (copy,), after = _round(ALGORITHMS["sync-sgd"], plain, [weights], [gradient], weights)
        assert (copy == sgd).all()
        assert (after == sgd).all()


@few
@given(rates_drawn, crowds)
def test_workers_at_the_centre_are_not_drawn_to_it(rates: Rates, crowd: Crowd) -> None:
    _, gradients, centre = crowd
    algorithm = ALGORITHMS["sync-easgd1"]
    workers, after = _round(algorithm, rates, [centre] * len(gradients), gradients, centre)
    assert (after == centre).all()
    for worker, gradient in zip(workers, gradients, strict=True):
        assert (worker == centre - rates.learning_rate * gradient).all()


@few
@given(rates_drawn, crowds)
def test_a_rate_of_one_over_p_brings_the_centre_to_the_mean(rates: Rates, crowd: Crowd) -> None:
    # W̄ + 1/P Σ(W^i − W̄) = 1/P ΣW^i.
    weights, gradients, centre = crowd
    rates = replace(rates, rho=1 / (len(weights) * rates.learning_rate))
    _, after = _round(ALGORITHMS["sync-easgd2"], rates, weights, gradients, centre)
    assert (after == sum(weights) / Fraction(len(weights))).all()


@few
@given(rates_drawn, crowds)
def test_what_eq_1_takes_from_the_workers_eq_2_gives_to_the_centre(rates: Rates, crowd: Crowd) -> None:
    # Without gradients the sum of all weights, the centre's among them, stays.
    weights, gradients, centre = crowd
    nothing = [gradient * 0 for gradient in gradients]
    workers, after = _round(ALGORITHMS["sync-easgd3"], rates, weights, nothing, centre)
    assert (sum(workers) + after == sum(weights) + centre).all()


@pytest.mark.parametrize("name", ONE_AT_A_TIME)
@few
@given(rates=rates_drawn, weights=vectors, gradient=vectors, centre=vectors)
def test_an_event_gives_the_centre_what_it_takes_from_the_worker(
    name: str, rates: Rates, weights: Array, gradient: Array, centre: Array
) -> None:
    algorithm = ALGORITHMS[name]
    master = algorithm.master_state(centre)
    after = changed(master, algorithm.master(rates, master, weights, 1)).centre
    worker = algorithm.worker(rates, algorithm.worker_state(weights), gradient, centre).weights
    assert (worker + after == weights + centre - rates.learning_rate * gradient).all()


@few
@given(rates_drawn, crowds)
def test_without_momentum_measgd_is_easgd(rates: Rates, crowd: Crowd) -> None:
    # Eq. 5 and 6 with μ = 0 are Eq. 1, however the velocity was.
    (weights, *_), (gradient, *_), centre = crowd
    rates = replace(rates, momentum=Fraction(0))
    plain = ALGORITHMS["async-easgd"].worker(rates, WorkerState(weights=weights), gradient, centre)
    before = WorkerState(weights=weights, velocity=weights * 7 + 1)
    assert (ALGORITHMS["async-measgd"].worker(rates, before, gradient, centre).weights == plain.weights).all()


@few
@given(rates_drawn, st.lists(vectors, min_size=2, max_size=5))
def test_a_constant_gradient_gathers_momentum(rates: Rates, gradients: list[Array]) -> None:
    # Eq. 3 and 4 from V = 0: the displacements are −η Σ_k μ^(t−k) ΔW_k.
    algorithm = ALGORITHMS["async-msgd"]
    states = [algorithm.master_state(gradients[0] * 0)]
    for gradient in gradients:
        states.append(changed(states[-1], algorithm.master(rates, states[-1], gradient, 1)))
    for t, (before, after) in enumerate(pairwise(states)):
        expected = -rates.learning_rate * sum(rates.momentum ** (t - k) * gradients[k] for k in range(t + 1))
        assert (after.centre - before.centre == expected).all()


@few
@given(rates_drawn, crowds)
def test_the_mean_is_the_sum_with_a_rate_p_times_smaller(rates: Rates, crowd: Crowd) -> None:
    weights, gradients, centre = crowd
    algorithm = ALGORITHMS["sync-sgd"]
    smaller = replace(rates, learning_rate=rates.learning_rate / len(weights))
    _, mean = _round(algorithm, replace(rates, averages=True), weights, gradients, centre)
    copies, summed = _round(algorithm, smaller, weights, gradients, centre)
    assert (mean == summed).all()
    assert all((copy == summed).all() for copy in copies)  # the second part: the broadcast of W


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


def test_the_centre_of_sync_easgd_2_and_3_is_with_the_first_worker() -> None:
    assert {name for name, a in ALGORITHMS.items() if a.place is Place.WORKER} == {"sync-easgd2", "sync-easgd3"}
