"""Normalisation of inputs to a mean of 0 and a standard deviation of 1 (You et al. 2017, Algorithm 1, line 1)."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from pase.errors import DatasetError

Array = np.ndarray[Any, Any]

_PIECE = 1 << 16
"""Numbers that are worked on at a time, in float64: few enough for a cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Moments:
    """mean and (population) standard deviation of a set of numbers, in their unit."""

    mean: float
    deviation: float


def moments(inputs: Array) -> Moments:
    """Return mean and deviation of all numbers of an array of any shape, one of each for all channels.

    Raises DatasetError where the numbers are all the same, or not finite: nothing can be scaled by their deviation.
    """
    flat = inputs.reshape(-1)
    if not flat.size:
        raise DatasetError("there are no inputs to normalise; expected at least one example")
    pieces = [flat[first : first + _PIECE] for first in range(0, flat.size, _PIECE)]
    mean = float(sum(piece.sum(dtype=np.float64) for piece in pieces)) / flat.size
    squares = 0.0
    for piece in pieces:
        # Differences from the mean: squares of the numbers themselves would lose digits where the mean is large.
        difference = piece - np.float64(mean)
        # No product of BLAS: its threads wait for one another, and the last digit depends on how many they are.
        squares += float(np.square(difference, out=difference).sum())
    deviation = float(np.sqrt(squares / flat.size))
    if not 0 < deviation < np.inf:
        found = f"all {flat[0]}" if deviation == 0 else "not all finite"
        raise DatasetError(
            f"the inputs to train on are {found}, so that they cannot be normalised; expected images that differ: "
            "check the files"
        )
    return Moments(mean=mean, deviation=deviation)


def normalised(inputs: Array, by: Moments) -> Array:
    """Return (X - mean) / deviation as float32, in the shape of X.

    With the moments of X itself, E(X) = 0 and σ(X) = 1 (You et al. 2017, Algorithm 1, line 1). What is tested with is
    normalised by the moments of what was trained on, or the network would see it on another scale.
    """
    result: Array = np.subtract(inputs, by.mean, dtype=np.float32)
    result /= np.float32(by.deviation)
    return result
