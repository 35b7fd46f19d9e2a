"""The benchmark of programs: ratios of the bytes that two plans move."""

import pytest

from scripts.benchmarks.runtime import Moved, ratio_row


def moved(predicted: int, measured: int, kept_alive: int) -> Moved:
    return Moved(strategy="any", predicted_bytes=predicted, measured_bytes=measured, kept_alive_bytes=kept_alive)


def test_ratios_are_set_beside_the_prediction() -> None:
    row = ratio_row(moved(500, 495, 500), moved(1000, 1000, 1000))
    assert row == ["0.5000", "0.4950", "-1.00%", "0.5000", "+0.00%", "fewer bytes"]


def test_what_is_beyond_the_tolerance_or_moves_more_is_marked() -> None:
    row = ratio_row(moved(1100, 1200, 1100), moved(1000, 1000, 1000))
    assert row == ["1.1000", "1.2000", "+9.09% **beyond 2%**", "1.1000", "+0.00%", "**more bytes**"]


@pytest.mark.parametrize("other", [Moved(strategy="any", error="no"), moved(0, 0, 0)])
def test_without_two_numbers_there_is_no_ratio(other: Moved) -> None:
    assert ratio_row(moved(5, 5, 5), other) == ["no ratio", "", "", "", "", ""]
