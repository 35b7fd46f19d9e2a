"""Sync EASGD1: all workers in rounds, the centre with the master (Algorithm 2)."""

from pase.easgd.algorithms.base import Algorithm, Exchange, Sends
from pase.easgd.algorithms.rules import elastic_master, elastic_worker

SYNC_EASGD1 = Algorithm(
    name="sync-easgd1",
    title="Sync EASGD1",
    equations="Eq. 1 and 2",
    exchange=Exchange.TOGETHER,
    sends=Sends.WEIGHTS,
    worker=elastic_worker,
    master=elastic_master,
    counterpart="sync-sgd",
)
