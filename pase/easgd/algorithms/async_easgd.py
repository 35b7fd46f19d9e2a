"""Async EASGD: a parameter server of the centre, first come, first served (Section 5.1)."""

from pase.easgd.algorithms.base import Algorithm, Exchange, Sends
from pase.easgd.algorithms.rules import elastic_master, elastic_worker

ASYNC_EASGD = Algorithm(
    name="async-easgd",
    title="Async EASGD",
    equations="Eq. 1; Eq. 2, one term an event",
    exchange=Exchange.FIRST_COME,
    sends=Sends.WEIGHTS,
    worker=elastic_worker,
    master=elastic_master,
    counterpart="async-sgd",
)
