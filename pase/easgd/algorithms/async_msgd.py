"""Async MSGD: Async SGD whose master keeps a momentum (Eq. 3 and 4)."""

from pase.easgd.algorithms.base import Algorithm, Exchange, Sends
from pase.easgd.algorithms.rules import copying_worker, momentum_master

ASYNC_MSGD = Algorithm(
    name="async-msgd",
    title="Async MSGD",
    equations="Eq. 3 and 4",
    exchange=Exchange.FIRST_COME,
    sends=Sends.GRADIENTS,
    worker=copying_worker,
    master=momentum_master,
    master_velocity=True,
)
