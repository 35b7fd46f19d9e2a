"""For all tests: Python looks for cycles seldom, and not among what collecting the tests has imported.

TensorFlow's graphs are made of hundreds of thousands of small objects, and the frameworks' modules of as many: with
Python's own settings a tenth of the suite's time went into looking through them.

What tests start is interrupted by SIGINT, even where a shell runs them in the background, which has them ignore it.

Libraries compute with one thread: tests are small, and several processes share the cores; threads that wait for each
other took an eighth of the suite's processor time.

Of two processes that share the tests, one has all tests with ranks: so one pool is started, and its ranks trace each
module once. They begin its half, so that what is left at the end is short.

Compiled modules are written and read, even where PYTHONDONTWRITEBYTECODE is set: some hundred processes that tests
start load the same ones, and half of the time of collecting is that of rewriting the assertions of test modules.
"""

import gc
import os
import signal
import sys
from collections.abc import Iterator

import pytest

os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

from hypothesis import settings  # noqa: E402

from tests.targets.jax.devices import Devices  # noqa: E402
from tests.targets.torch.ranks import Pool  # noqa: E402

THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS")


def pytest_configure() -> None:
    for name in THREADS:
        os.environ.setdefault(name, "1")
    # A machine that does something else is slow, which is no fault.
    settings.register_profile("pase", deadline=None, max_examples=50)
    settings.load_profile("pase")
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 10)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    # A process of pytest-xdist begins with an equal part of the tests, in their order; others take from its end.
    if hasattr(config, "workerinput"):
        with_ranks = [item for item in items if "ranks" in getattr(item, "fixturenames", ())]
        others = [item for item in items if "ranks" not in getattr(item, "fixturenames", ())]
        middle = len(items) // 2
        items[:] = [*others[:middle], *with_ranks, *others[middle:]]


@pytest.fixture(scope="session")
def ranks() -> Iterator[Pool]:
    """Processes that run functions as the ranks of a PyTorch process group, and stay until the session ends."""
    pool = Pool()
    yield pool
    pool.end()


@pytest.fixture(scope="session")
def devices() -> Iterator[Devices]:
    """A process of JAX with eight virtual devices, which stays until the session ends."""
    found = Devices()
    yield found
    found.end()
