"""Hogwild SGD: Async SGD without the lock on the weights (Section 3.2)."""

from pase.easgd.algorithms.base import Algorithm, Exchange, Sends
from pase.easgd.algorithms.rules import copying_worker, sgd_master

HOGWILD_SGD = Algorithm(
    name="hogwild-sgd",
    title="Hogwild SGD",
    equations="Section 3.2",
    exchange=Exchange.LOCK_FREE,
    sends=Sends.GRADIENTS,
    worker=copying_worker,
    master=sgd_master,
)
