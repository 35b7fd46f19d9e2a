"""Sync EASGD2: the centre with worker 0, nothing on the host (Algorithm 3)."""

from pase.easgd.algorithms.base import Algorithm, Exchange, Place, Sends
from pase.easgd.algorithms.rules import elastic_master, elastic_worker

SYNC_EASGD2 = Algorithm(
    name="sync-easgd2",
    title="Sync EASGD2",
    equations="Eq. 1 and 2",
    exchange=Exchange.TOGETHER,
    sends=Sends.WEIGHTS,
    worker=elastic_worker,
    master=elastic_master,
    counterpart="sync-sgd",
    place=Place.WORKER,
)
