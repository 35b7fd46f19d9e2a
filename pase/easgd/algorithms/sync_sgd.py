"""Sync SGD: one step along the sum of all gradients (Section 2.3)."""

from pase.easgd.algorithms.base import Algorithm, Exchange, Sends
from pase.easgd.algorithms.rules import copying_worker, sgd_master

SYNC_SGD = Algorithm(
    name="sync-sgd",
    title="Sync SGD",
    equations="Section 2.3",
    exchange=Exchange.TOGETHER,
    sends=Sends.GRADIENTS,
    worker=copying_worker,
    master=sgd_master,
    has_average=True,
)
