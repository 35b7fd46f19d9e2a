"""The problems of these tests are small, and still have layout classes, as large ones do."""

from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="package")
def classes_of_few_configurations() -> Iterator[None]:
    """Tell layouts apart, not configurations, however few configurations there are."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pase.solver.pairwise.FEW_CONFIGURATIONS", 0)
        yield
