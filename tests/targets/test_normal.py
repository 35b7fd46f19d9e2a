"""Normal random numbers by a counter, against the standard library's inverse of the distribution."""

from collections.abc import Sequence
from statistics import NormalDist

import numpy as np
import pytest

from pase.targets.training.counted import BLOCK, WORD, layer_key, normal_part, words

KEY = layer_key("some weight")
NORMAL = NormalDist()
Held = Sequence[Sequence[tuple[int, int]]]


def drawn(shape: Sequence[int], held: Held, *, threads: int = 1) -> np.ndarray:
    return normal_part(shape, held, KEY, mean=0, deviation=1, threads=threads)


def expected(numbers: np.ndarray) -> np.ndarray:
    """The values of elements by their numbers: the inverse, float64, of each one's word in the order of integers."""
    places = words(numbers.astype(np.uint64).reshape(-1), KEY).view(np.int32)
    found = [NORMAL.inv_cdf((int(place) + WORD / 2 + 0.5) / WORD) for place in places]
    return np.array(found).reshape(numbers.shape)


@pytest.mark.parametrize(
    ("shape", "held"),
    [
        ((), ()),
        ((7,), (((2, 5),),)),
        ((90, 40), (((0, 2), (30, 33)), ((4, 8), (39, 40)))),
        ((3, 4, 5, 7), (((0, 3),), ((0, 4),), ((1, 3), (4, 5)), ((0, 7),))),
        ((3, 4, 5, 7), (((1, 3),), ((0, 4),), ((0, 5),), ((1, 2), (5, 7)))),
        ((3, 4, 5, 7), (((0, 1), (2, 3)), ((1, 4),), ((2, 4),), ((0, 2),))),
        # Numbers of more than 32 bits, and a row that begins below and ends above.
        ((3, WORD), (((1, 3),), ((WORD - 5, WORD),))),
        ((3 * WORD,), (((2 * WORD - 5, 2 * WORD + 5),),)),
    ],
)
def test_a_part_has_the_values_of_its_elements(shape: Sequence[int], held: Held) -> None:
    found = drawn(shape, held)
    points = [np.concatenate([np.arange(*run) for run in runs]) for runs in held]
    numbers = np.ravel_multi_index(np.ix_(*points), tuple(shape)) if shape else np.array(0)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, expected(numbers), rtol=1e-6, atol=1e-9)


def test_blocks_and_threads_change_nothing() -> None:
    rows, columns = 5, BLOCK + 77
    whole = drawn((rows, columns), (((0, rows),), ((0, columns),)))
    assert np.array_equal(drawn((rows, columns), (((0, rows),), ((0, columns),)), threads=3), whole)
    for low, high in ((3, columns), (columns - 9, columns)):
        assert np.array_equal(drawn((rows, columns), (((1, rows),), ((low, high),)), threads=2), whole[1:, low:high])
    tall = drawn((columns, rows), (((0, columns),), ((0, rows),)))
    assert np.array_equal(tall.reshape(-1), whole.reshape(-1))
    assert np.array_equal(drawn((columns, rows), (((8, columns),), ((2, 4),))), tall[8:, 2:4])


def test_they_are_normal() -> None:
    count = 1_000_000
    found = drawn((count,), (((0, count),),))
    # Kolmogorov and Smirnov: beyond 1.95 / √n once in a thousand times.
    ordered = np.sort(found)[::100].astype(float)
    shares = np.array([NORMAL.cdf(value) for value in ordered])
    assert np.abs(shares - np.arange(0, count, 100) / count).max() < 1.95 / count**0.5
    powers = [float((found.astype(float) ** power).mean()) for power in (1, 2, 3, 4)]
    np.testing.assert_allclose(powers, [0, 1, 0, 3], atol=5 * (96 / count) ** 0.5)
    # Neighbours, in a row and in a column, have nothing to do with each other.
    for apart in (1, 1000):
        assert abs(float((found[apart:] * found[:-apart]).mean())) < 5 / count**0.5


def test_moments() -> None:
    held: Held = (((0, 6),),)
    np.testing.assert_array_equal(normal_part((6,), held, KEY, mean=1.5, deviation=0), np.full(6, np.float32(1.5)))
    scaled = normal_part((6,), held, KEY, mean=1.5, deviation=0.25)
    np.testing.assert_allclose(scaled, 1.5 + 0.25 * drawn((6,), held), rtol=1e-6)
    assert not np.array_equal(normal_part((6,), held, layer_key("another"), mean=0, deviation=1), drawn((6,), held))
