"""For all tests: Python looks for cycles seldom, and not among what collecting the tests has imported.

TensorFlow's graphs are made of hundreds of thousands of small objects, and the frameworks' modules of as many: with
Python's own settings a tenth of the suite's time went into looking through them.
"""

import gc
from collections.abc import Iterator

import pytest

from tests.targets.torch.ranks import Pool


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 10)


@pytest.fixture(scope="session")
def ranks() -> Iterator[Pool]:
    """Processes that run functions as the ranks of a PyTorch process group, and stay until the session ends."""
    pool = Pool()
    yield pool
    pool.end()
