"""Every equation, and every algorithm's rules, against steps taken by hand in exact fractions."""

from fractions import Fraction as Q
from typing import Any

import numpy as np
import pytest

from pase.easgd.algorithms import (
    ALGORITHMS,
    Algorithm,
    Array,
    Change,
    MasterState,
    Rates,
    WorkerState,
    changed,
    eq1,
    eq2_change,
    eq3,
    eq6,
    sgd_change,
)
from tests.training.by_hand import GRADIENTS, WORKED, Worked

SERVED = [case for case, (_, worked) in WORKED.items() if worked.order]
TOGETHER = [case for case, (_, worked) in WORKED.items() if not worked.order]


def _exact(value: Q | int) -> Array:
    return np.array([Q(value)], dtype=object)


def _value(array: Array) -> Q:
    """Return the one number of an array; it is still a fraction, nothing was rounded."""
    assert array.shape == (1,)
    assert type(array[0]) is Q
    return array[0]


def test_equation_1() -> None:
    # 5 − 1/2 (3 + 1/3 (5 − 2)) = 5 − 1/2 · 4
    rates = Rates(learning_rate=Q(1, 2), rho=Q(1, 3))
    assert _value(eq1(rates, _exact(5), _exact(3), _exact(2))) == 3


def test_equation_2() -> None:
    # Workers at 5, 1 and −4, W̄ = 2: 1/2 (1/3 · 3 + 1/3 · (−1) + 1/3 · (−6)) = −2/3; the one at 5 alone: 1/2.
    rates = Rates(learning_rate=Q(1, 2), rho=Q(1, 3))
    assert _value(eq2_change(rates, _exact(5 + 1 - 4), 3, _exact(2))) == Q(-2, 3)
    assert _value(eq2_change(rates, _exact(5), 1, _exact(2))) == Q(1, 2)


def test_equations_3_and_5() -> None:
    # 3/4 · 5 − 1/2 · 3
    rates = Rates(learning_rate=Q(1, 2), rho=Q(1, 3), momentum=Q(3, 4))
    assert _value(eq3(rates, _exact(5), _exact(3))) == Q(9, 4)


def test_equation_4() -> None:
    after = changed(MasterState(centre=_exact(5)), Change(centre=_exact(-7), velocity=_exact(-7)))
    assert after.velocity is not None
    assert (_value(after.centre), _value(after.velocity)) == (Q(-2), Q(-7))


def test_equation_6() -> None:
    # 5 + 7 − 1/2 · 1/3 (5 − 2): V enters as it is, only once.
    rates = Rates(learning_rate=Q(1, 2), rho=Q(1, 3), momentum=Q(3, 4))
    assert _value(eq6(rates, _exact(5), _exact(7), _exact(2))) == Q(23, 2)


def test_the_sum_of_section_2_3_and_its_mean() -> None:
    # Gradients 5, 1 and −4 at η = 1/2: −1/2 · 2, or −1/2 · 2/3.
    assert _value(sgd_change(Rates(learning_rate=Q(1, 2)), _exact(2), 3)) == -1
    assert _value(sgd_change(Rates(learning_rate=Q(1, 2), averages=True), _exact(2), 3)) == Q(-1, 3)


# ------------------------------------------------------------------------------------------------ whole algorithms


def _begun(algorithm: Algorithm, worked: Worked) -> tuple[list[WorkerState], MasterState]:
    workers = [algorithm.worker_state(_exact(weights)) for weights in worked.workers]
    return workers, algorithm.master_state(_exact(worked.centre))


@pytest.mark.parametrize("case", SERVED)
def test_rules_one_worker_after_another(case: str) -> None:
    # Who sends weights gets the centre before the event (Section 5.1); who sends a gradient, the one after it (3.1).
    name, worked = WORKED[case]
    algorithm, rates = ALGORITHMS[name], worked.rates
    workers, master = _begun(algorithm, worked)
    left: list[tuple[Any, ...]] = []
    for i in worked.order:
        before, worker = master, workers[i]
        gradient = GRADIENTS[i](worker.weights)
        master = changed(before, algorithm.master(rates, before, worker.weights if algorithm.has_rho else gradient, 1))
        workers[i] = algorithm.worker(rates, worker, gradient, (before if algorithm.has_rho else master).centre)
        velocities = [state.velocity for state in (workers[i], master) if state.velocity is not None]
        left.append(tuple(_value(array) for array in (workers[i].weights, master.centre, *velocities)))
    assert tuple(left) == worked.left


@pytest.mark.parametrize("case", TOGETHER)
def test_rules_in_rounds(case: str) -> None:
    name, worked = WORKED[case]
    algorithm, rates = ALGORITHMS[name], worked.rates
    workers, master = _begun(algorithm, worked)
    left: list[tuple[Any, ...]] = []
    for _ in worked.left:
        gradients = [gradient(worker.weights) for gradient, worker in zip(GRADIENTS, workers, strict=True)]
        total = sum([worker.weights for worker in workers] if algorithm.has_rho else gradients, start=_exact(0))
        before = master
        master = changed(before, algorithm.master(rates, before, total, len(workers)))
        centre = (before if algorithm.has_rho else master).centre
        workers = [algorithm.worker(rates, w, g, centre) for w, g in zip(workers, gradients, strict=True)]
        left.append((*(_value(worker.weights) for worker in workers), _value(master.centre)))
    assert tuple(left) == worked.left


def test_every_algorithm_was_stepped_by_hand() -> None:
    assert {name for name, _ in WORKED.values()} == set(ALGORITHMS)
