"""The binomial tree, against sums of exact numbers and against its definition by rounds."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pase.easgd.algorithms import num_rounds
from pase.easgd.synchronous import children, parent, tree_sum


@pytest.mark.parametrize(("num_workers", "rounds"), [(1, 0), (2, 1), (3, 2), (4, 2), (5, 3), (8, 3), (9, 4), (64, 6)])
def test_rounds_are_the_logarithm(num_workers: int, rounds: int) -> None:
    assert num_rounds(num_workers) == rounds
    depth = [0] * num_workers
    for worker in range(1, num_workers):
        depth[worker] = depth[parent(worker)] + 1
    assert max(depth) <= rounds


def by_rounds(vectors: list[np.ndarray]) -> np.ndarray:
    """The definition: in round k, worker i takes what worker i + 2^k has."""
    held = dict(enumerate(vectors))
    distance = 1
    while distance < len(vectors):
        for worker in range(0, len(vectors), 2 * distance):
            if worker + distance in held:
                held[worker] = held[worker] + held[worker + distance]
        distance *= 2
    return held[0]


def up_the_tree(vectors: list[np.ndarray], worker: int = 0) -> np.ndarray:
    total = vectors[worker]
    for child in children(worker, len(vectors)):
        total = total + up_the_tree(vectors, child)
    return total


@given(st.integers(1, 40), st.integers(0, 1000))
def test_a_sum_in_the_order_of_workers_has_the_bits_of_the_tree(num_workers: int, seed: int) -> None:
    numbers = np.random.default_rng(seed)
    # Of magnitudes so different that the order of additions shows.
    vectors = [numbers.normal(size=3) * 10.0 ** numbers.integers(-8, 8) for _ in range(num_workers)]
    expected = by_rounds(vectors)
    np.testing.assert_array_equal(tree_sum(iter(vectors)), expected)
    np.testing.assert_array_equal(up_the_tree(vectors), expected)
    exact = [sum((Fraction(float(v[i])) for v in vectors), Fraction(0)) for i in range(3)]
    scale = sum(float(np.abs(v).max()) for v in vectors)
    assert all(abs(Fraction(float(expected[i])) - exact[i]) <= scale * num_workers * 2e-16 for i in range(3))
