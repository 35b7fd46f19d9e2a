"""Original EASGD: workers in turn (Algorithm 1)."""

from pase.easgd.algorithms.base import Algorithm, Exchange, Sends
from pase.easgd.algorithms.rules import elastic_master, elastic_worker

ORIGINAL_EASGD = Algorithm(
    name="original-easgd",
    title="Original EASGD",
    equations="Eq. 1; Algorithm 1, line 15",
    exchange=Exchange.ROUND_ROBIN,
    sends=Sends.WEIGHTS,
    worker=elastic_worker,
    master=elastic_master,
    counterpart="async-sgd",
)
