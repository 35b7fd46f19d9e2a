"""Async SGD: a parameter server of the weights (Section 3.1)."""

from pase.easgd.algorithms.base import Algorithm, Exchange, Sends
from pase.easgd.algorithms.rules import copying_worker, sgd_master

ASYNC_SGD = Algorithm(
    name="async-sgd",
    title="Async SGD",
    equations="Section 3.1",
    exchange=Exchange.FIRST_COME,
    sends=Sends.GRADIENTS,
    worker=copying_worker,
    master=sgd_master,
)
