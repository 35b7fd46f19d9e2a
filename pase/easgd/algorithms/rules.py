"""The rules of workers and masters, made of the equations: what several algorithms share."""

from pase.easgd.equations import Array, Rates, eq1, eq2_change, eq3, eq6, sgd_change
from pase.easgd.states import Change, MasterState, WorkerState


def elastic_worker(rates: Rates, state: WorkerState, gradient: Array, centre: Array) -> WorkerState:
    """Eq. 1: a step along the gradient and towards the centre."""
    return WorkerState(weights=eq1(rates, state.weights, gradient, centre))


def elastic_momentum_worker(rates: Rates, state: WorkerState, gradient: Array, centre: Array) -> WorkerState:
    """Eq. 5 and 6: a step along the momentum and towards the centre."""
    assert state.velocity is not None
    velocity = eq3(rates, state.velocity, gradient)
    return WorkerState(weights=eq6(rates, state.weights, velocity, centre), velocity=velocity)


def copying_worker(_rates: Rates, _state: WorkerState, _gradient: Array, centre: Array) -> WorkerState:
    """Take the master's weights (Section 3.1)."""
    return WorkerState(weights=centre)


def elastic_master(rates: Rates, state: MasterState, total: Array, num_workers: int) -> Change:
    """Eq. 2: the centre goes towards the workers whose weights were summed."""
    return Change(centre=eq2_change(rates, total, num_workers, state.centre), velocity=state.velocity)


def sgd_master(rates: Rates, state: MasterState, total: Array, num_workers: int) -> Change:
    """Section 2.3: a step along the sum of gradients, or their mean."""
    return Change(centre=sgd_change(rates, total, num_workers), velocity=state.velocity)


def momentum_master(rates: Rates, state: MasterState, total: Array, _num_workers: int) -> Change:
    """Eq. 3 and 4: a step along the momentum that the master keeps."""
    assert state.velocity is not None
    velocity = eq3(rates, state.velocity, total)
    return Change(centre=velocity, velocity=velocity)
