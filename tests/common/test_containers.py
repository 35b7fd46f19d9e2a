"""Items in groups of those that pairs connect, against reachability by powers of the matrix of pairs."""

import numpy as np
import pytest

from pase.common.containers import connected


@pytest.mark.parametrize("seed", range(20))
def test_groups_are_those_of_items_that_reach_each_other(seed: int) -> None:
    rng = np.random.default_rng(seed)
    items = [int(item) for item in rng.permutation(12)]
    pairs = [(int(a), int(b)) for a, b in rng.integers(12, size=(seed // 2, 2))]
    reached = np.eye(12, dtype=int)
    for a, b in pairs:
        reached[a, b] = reached[b, a] = 1
    reached = np.linalg.matrix_power(reached, 12)
    expected = dict.fromkeys(tuple(other for other in items if reached[item, other]) for item in items)
    assert connected(items, pairs) == [list(group) for group in expected]
    assert connected([], []) == []
