"""α and β from times: those that made the times, and never a worse fit than another program's."""

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from scipy.optimize import lsq_linear

from pase.calibration.measured import fit_link
from pase.errors import CalibrationError

SIZES = [float(2**i) for i in range(10, 26)]


@given(st.floats(1e-7, 1e-3), st.floats(1e8, 1e12))
def test_exact_times_give_back_what_made_them(latency_s: float, bandwidth: float) -> None:
    fit = fit_link(SIZES, [latency_s + size / bandwidth for size in SIZES])
    # A latency of which no message shows more than some billionths cannot be had more exactly.
    shortest_s = SIZES[0] / bandwidth
    assert fit.latency_s == pytest.approx(latency_s, rel=1e-8, abs=1e-8 * shortest_s)
    assert fit.bandwidth_bytes_per_s == pytest.approx(bandwidth, rel=1e-8 + 1e-8 * latency_s * bandwidth / SIZES[-1])
    assert fit.relative_error < 1e-9
    assert fit.time_s(1e6) == pytest.approx(latency_s + 1e6 / bandwidth, rel=1e-6)


@pytest.mark.parametrize("noise", [0.02, 0.1])
@pytest.mark.parametrize("seed", range(5))
def test_noise_moves_the_figures_by_as_much_and_is_reported(noise: float, seed: int) -> None:
    factors = 1 + noise * np.random.default_rng(seed).standard_normal(len(SIZES))
    fit = fit_link(SIZES, [(8e-6 + size / 2e9) * factor for size, factor in zip(SIZES, factors, strict=True)])
    assert fit.latency_s == pytest.approx(8e-6, rel=2 * noise)
    assert fit.bandwidth_bytes_per_s == pytest.approx(2e9, rel=2 * noise)
    assert noise / 2 < fit.relative_error < 2 * noise


@given(st.lists(st.floats(0.1, 10.0), min_size=3, max_size=8))
def test_no_other_figures_fit_better(factors: list[float]) -> None:
    """Against scipy's bounded least squares."""
    sizes = np.array(SIZES[: len(factors)])
    times = (3e-6 + sizes / 1e9) * np.array(factors)
    matrix = np.stack([1 / times, sizes / times], axis=1)
    scales = np.linalg.norm(matrix, axis=0)
    other = lsq_linear(matrix / scales, np.ones(len(times)), bounds=(0, np.inf), tol=1e-12).x / scales
    least = float(np.sqrt(np.mean(np.square(matrix @ other - 1))))
    assume(other[1] * sizes.max() > 1e-3 * other[0])
    fit = fit_link(sizes.tolist(), times.tolist())
    ours = np.array([fit.latency_s, 1 / fit.bandwidth_bytes_per_s])
    assert (ours >= 0).all()
    assert fit.relative_error == pytest.approx(float(np.sqrt(np.mean(np.square(matrix @ ours - 1)))), abs=1e-9)
    assert fit.relative_error <= least + 1e-6


def test_a_latency_below_nothing_is_nothing() -> None:
    # Large messages are faster than small ones would have it: the line would cross zero.
    fit = fit_link([1e6, 2e6, 4e6], [1e-3, 3e-3, 9e-3])
    assert fit.latency_s == 0
    assert 4e8 < fit.bandwidth_bytes_per_s < 1e9
    assert fit.relative_error > 0.1


@pytest.mark.parametrize("times", [[2e-6, 1e-6], [1e-6, 1e-6]])
def test_times_that_do_not_grow_with_the_size(times: list[float]) -> None:
    with pytest.raises(
        CalibrationError, match=r"messages of 1000000 B took no longer than those of 1000 B, .*measure again"
    ):
        fit_link([1e3, 1e6], times)


@pytest.mark.parametrize(
    ("sizes", "times"), [([], []), ([1e3], [1e-6]), ([1e3, 1e3], [1e-6, 2e-6]), ([0.0, 1.0], [1, 1])]
)
def test_too_few_sizes(sizes: list[float], times: list[float]) -> None:
    with pytest.raises(CalibrationError, match="need the times of messages of two sizes or more; found sizes"):
        fit_link(sizes, times)


@pytest.mark.parametrize("wrong", [0.0, -1e-6, float("nan"), float("inf")])
def test_times_that_are_none(wrong: float) -> None:
    with pytest.raises(CalibrationError, match="expected times above 0: measure again"):
        fit_link([1e3, 1e6], [1e-6, wrong])
