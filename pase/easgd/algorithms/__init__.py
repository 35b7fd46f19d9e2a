"""The algorithms, by name. A new one is one module and one line here."""

from collections.abc import Mapping
from types import MappingProxyType

from pase.easgd.algorithms.async_easgd import ASYNC_EASGD
from pase.easgd.algorithms.async_measgd import ASYNC_MEASGD
from pase.easgd.algorithms.async_msgd import ASYNC_MSGD
from pase.easgd.algorithms.async_sgd import ASYNC_SGD
from pase.easgd.algorithms.base import Algorithm, Exchange, Place, Sends
from pase.easgd.algorithms.hogwild_easgd import HOGWILD_EASGD
from pase.easgd.algorithms.hogwild_sgd import HOGWILD_SGD
from pase.easgd.algorithms.original_easgd import ORIGINAL_EASGD
from pase.easgd.algorithms.sync_easgd1 import SYNC_EASGD1
from pase.easgd.algorithms.sync_easgd2 import SYNC_EASGD2
from pase.easgd.algorithms.sync_easgd3 import SYNC_EASGD3
from pase.easgd.algorithms.sync_sgd import SYNC_SGD
from pase.errors import TrainingError, unknown_name

__all__ = ["ALGORITHMS", "Algorithm", "Exchange", "Place", "Sends", "algorithm_named"]

_ALL = (
    ORIGINAL_EASGD,
    ASYNC_EASGD,
    ASYNC_MEASGD,
    HOGWILD_EASGD,
    SYNC_EASGD1,
    SYNC_EASGD2,
    SYNC_EASGD3,
    ASYNC_SGD,
    ASYNC_MSGD,
    HOGWILD_SGD,
    SYNC_SGD,
)

ALGORITHMS: Mapping[str, Algorithm] = MappingProxyType({algorithm.name: algorithm for algorithm in _ALL})


def algorithm_named(name: str) -> Algorithm:
    """Return an algorithm; TrainingError lists them where there is none of that name."""
    if name not in ALGORITHMS:
        raise TrainingError(unknown_name("algorithm", name, ALGORITHMS))
    return ALGORITHMS[name]
