"""Mean 0 and deviation 1, against the standard library's exact statistics."""

import statistics
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pase.datasets import Moments, moments, normalised
from pase.errors import DatasetError


@given(st.lists(st.integers(0, 255), min_size=2, max_size=60).filter(lambda values: len(set(values)) > 1))
def test_moments_are_those_of_exact_arithmetic(values: list[int]) -> None:
    found = moments(np.array(values, np.uint8))
    exact = [Fraction(value) for value in values]
    assert found.mean == pytest.approx(float(statistics.mean(exact)), rel=1e-14)
    assert found.deviation == pytest.approx(statistics.pstdev(exact), rel=1e-14)


def test_moments_of_more_numbers_than_are_read_at_a_time() -> None:
    # Large and close together: squares of the numbers themselves would have lost all digits.
    numbers = 1e8 + np.arange(200_001).reshape(3, -1)
    found = moments(numbers)
    assert found.mean == pytest.approx(1e8 + 100_000, rel=1e-12)
    assert found.deviation == pytest.approx(np.sqrt((200_001**2 - 1) / 12), rel=1e-9)


def test_a_training_set_gets_mean_0_and_deviation_1() -> None:
    pixels = np.random.default_rng(0).integers(0, 200, (50, 3, 8, 8), np.uint8)
    result = normalised(pixels, moments(pixels))
    assert (result.dtype, result.shape) == (np.float32, pixels.shape)
    assert abs(result.mean(dtype=float)) < 1e-6
    assert abs(result.std(dtype=float) - 1) < 1e-6
    assert pixels.max() == 199  # the argument is left alone


def test_others_are_normalised_by_the_moments_given() -> None:
    result = normalised(np.array([[0, 10, 255]], np.uint8), Moments(mean=10.0, deviation=4.0))
    assert result.tolist() == [[-2.5, 0.0, 61.25]]


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        (np.full((3, 4), 7, np.uint8), r"are all 7, so that they cannot be normalised; expected images that differ"),
        (np.array([1.0, np.nan]), r"are not all finite, so that they cannot be normalised"),
        (np.zeros((0, 4)), r"there are no inputs to normalise"),
    ],
)
def test_inputs_that_have_no_scale_are_refused(inputs: np.ndarray, message: str) -> None:
    with pytest.raises(DatasetError, match=message):
        moments(inputs)
