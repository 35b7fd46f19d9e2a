"""Least squares: latency and bandwidth from the times of messages."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pase.errors import CalibrationError

_LEAST_SHARE = 1e-6
"""Of the latency: what the bytes of the longest message must take, to be more than a rounding error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkFit:
    """α and 1/β; relative_error: root of the mean square of (fitted - measured) / measured."""

    latency_s: float
    bandwidth_bytes_per_s: float
    relative_error: float

    def time_s(self, size_bytes: float) -> float:
        """Return the fitted time of a message."""
        return self.latency_s + size_bytes / self.bandwidth_bytes_per_s


def fit_link(sizes_bytes: Sequence[float], times_s: Sequence[float]) -> LinkFit:
    """Return the α ≥ 0 and β > 0 for which α + n β comes closest to the times of messages of n bytes.

    What is made small is the sum of the squared *relative* errors: messages span factors of thousands, and in absolute
    terms the short ones, which show the latency, would not count. Where noise would make α negative, it is 0.
    Raises CalibrationError for fewer than two different sizes, for times that are not above 0, and where longer
    messages did not take longer.
    """
    sizes, times = np.asarray(sizes_bytes, dtype=np.float64), np.asarray(times_s, dtype=np.float64)
    if sizes.shape != times.shape or sizes.ndim != 1 or len(set(sizes.tolist())) < 2 or sizes.min() <= 0:
        raise CalibrationError(
            f"latency and bandwidth need the times of messages of two sizes or more; found sizes {sizes.tolist()}"
        )
    if not np.all(np.isfinite(times) & (times > 0)):
        raise CalibrationError(f"messages took {times.tolist()} s; expected times above 0: measure again")
    # Every equation α + n β = t divided by its t.
    ones, slopes = 1 / times, sizes / times
    matrix = np.stack([ones, slopes], axis=1)
    # Columns of one length: n is up to 1e8 times as large as 1.
    scales = np.linalg.norm(matrix, axis=0)
    (alpha, beta), *_ = np.linalg.lstsq(matrix / scales, np.ones_like(times), rcond=None)
    alpha, beta = alpha / scales[0], beta / scales[1]
    if beta * sizes.max() <= _LEAST_SHARE * alpha:
        raise CalibrationError(
            f"messages of {sizes.max():.0f} B took no longer than those of {sizes.min():.0f} B, so that no bandwidth "
            "can be told; measure again while nothing else runs"
        )
    if alpha < 0:
        alpha, beta = 0.0, slopes.sum() / np.square(slopes).sum()
    errors = alpha * ones + beta * slopes - 1
    return LinkFit(
        latency_s=float(alpha),
        bandwidth_bytes_per_s=float(1 / beta),
        relative_error=float(np.sqrt(np.mean(np.square(errors)))),
    )
