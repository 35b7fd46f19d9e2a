"""From a step's communication to its time beside computation, and to an epoch."""

from math import ceil

from pase.integrated.options import Options

BACKWARD_SHARE = 2 / 3
"""Of a step's three matrix products two are the backward pass's; the paper says so of the communication as well."""


def step_time(communication_s: float, compute_s: float, *, overlap: bool = False) -> float:
    """Return the time of a training step (section 3, Fig. 8).

    overlap: perfect, of two thirds of the communication with the backward pass, two thirds of the computation.
    """
    hidden_s = BACKWARD_SHARE * min(communication_s, compute_s) if overlap else 0.0
    return compute_s + communication_s - hidden_s


def num_iterations(num_samples: int, batch: int, options: Options) -> float:
    """Return the steps of an epoch, N/B."""
    return ceil(num_samples / batch) if options.whole_iterations else num_samples / batch
