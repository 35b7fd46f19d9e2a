"""The ranks that tests of the PyTorch target run functions on."""

from collections.abc import Iterator

import pytest

from tests.targets.torch.ranks import Pool


@pytest.fixture(scope="session")
def ranks() -> Iterator[Pool]:
    """Processes that stay until the session of tests ends."""
    pool = Pool()
    yield pool
    pool.end()
