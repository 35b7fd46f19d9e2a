"""Async MEASGD: Async EASGD whose workers have momentum (Section 5.1)."""

from pase.easgd.algorithms.base import Algorithm, Exchange, Sends
from pase.easgd.algorithms.rules import elastic_master, elastic_momentum_worker

ASYNC_MEASGD = Algorithm(
    name="async-measgd",
    title="Async MEASGD",
    equations="Eq. 5 and 6; Eq. 2, one term an event",
    exchange=Exchange.FIRST_COME,
    sends=Sends.WEIGHTS,
    worker=elastic_momentum_worker,
    master=elastic_master,
    counterpart="async-msgd",
    worker_velocity=True,
)
