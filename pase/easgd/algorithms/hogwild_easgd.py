"""Hogwild EASGD: Async EASGD without the lock on the centre (Section 5.1)."""

from pase.easgd.algorithms.base import Algorithm, Exchange, Sends
from pase.easgd.algorithms.rules import elastic_master, elastic_worker

HOGWILD_EASGD = Algorithm(
    name="hogwild-easgd",
    title="Hogwild EASGD",
    equations="Eq. 1; Eq. 2, one term an event",
    exchange=Exchange.LOCK_FREE,
    sends=Sends.WEIGHTS,
    worker=elastic_worker,
    master=elastic_master,
    counterpart="hogwild-sgd",
)
