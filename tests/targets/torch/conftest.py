"""For tests of PyTorch programs: what would start ranks of its own runs on those that stay."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.on_ranks import calls_on
from tests.targets.torch.ranks import Pool


@pytest.fixture
def on_ranks(ranks: Pool, tmp_path: Path) -> Iterator[None]:
    with calls_on(ranks, tmp_path):
        yield
