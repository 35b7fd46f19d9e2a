"""Sync EASGD3: Sync EASGD2 with the exchange beside the gradient (Section 6.1.3; Algorithm 4)."""

from pase.easgd.algorithms.base import Algorithm, Exchange, Place, Sends
from pase.easgd.algorithms.rules import elastic_master, elastic_worker

SYNC_EASGD3 = Algorithm(
    name="sync-easgd3",
    title="Sync EASGD3",
    equations="Eq. 1 and 2",
    exchange=Exchange.TOGETHER,
    sends=Sends.WEIGHTS,
    worker=elastic_worker,
    master=elastic_master,
    counterpart="sync-sgd",
    place=Place.WORKER,
    overlaps=True,
)
