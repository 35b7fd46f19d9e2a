"""From a step's communication to its time beside computation, and to an epoch."""

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil, log

from pase.studies.integrated.chain import Chain
from pase.studies.integrated.equations import Role
from pase.studies.integrated.network import Grid
from pase.studies.integrated.options import Options

BACKWARD_SHARE = 2 / 3
"""Of a step's three matrix products two are the backward pass's; the paper says so of the communication as well."""


def step_time(communication_s: float, compute_s: float, *, overlap: bool = False) -> float:
    """Return the time of a training step (section 3, Fig. 8).

    overlap: perfect, of two thirds of the communication with the backward pass, two thirds of the computation.
    """
    hidden_s = BACKWARD_SHARE * min(communication_s, compute_s) if overlap else 0.0
    return compute_s + communication_s - hidden_s


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeTimes:
    """How long one process computes a step, by its batch (Fig. 4): pairs of samples and seconds, ascending.

    Between them time is a power of the batch; beyond the last it grows with the samples, and a batch smaller than the
    first takes as long as that: matrices that are too thin leave a processor idle.
    """

    points: tuple[tuple[float, float], ...]

    def of_batch(self, batch: float) -> float:
        """Return the seconds of a step of so many samples; of a part of one sample, that part of one's time."""
        if batch < 1:
            return batch * self.of_batch(1)
        batches, times = zip(*self.points, strict=True)
        if batch >= batches[-1]:
            return float(times[-1] * batch / batches[-1])
        after = bisect_right(batches, batch)
        if not after:
            return float(times[0])
        low, high = self.points[after - 1 : after + 1]
        share = log(batch / low[0]) / log(high[0] / low[0])
        return float(low[1] * (high[1] / low[1]) ** share)

    def on_grid(self, chain: Chain, batch: int, grid: Grid, roles: Mapping[str, Role]) -> float:
        """Return the seconds that every process of a grid computes; roles: what its rows share of each layer.

        Rows that share a layer's weights multiply a part of them by all samples of their column: the time of the
        column's batch, over the rows (version 1, section 3: fatter matrices than with a part of the batch). Rows that
        share images, and layers in batch parallelism alone, have their part of the samples. Layers take the time by
        their FLOP.
        """
        whole = sum(layer.work_per_sample for layer in chain.layers)
        weights_s = self.of_batch(batch / grid.num_columns) / grid.num_rows
        samples_s = self.of_batch(batch / grid.num_processes)
        return sum(
            layer.work_per_sample / whole * (weights_s if roles.get(layer.name) is Role.MODEL else samples_s)
            for layer in chain.layers
        )


def num_iterations(num_samples: int, batch: int, options: Options) -> float:
    """Return the steps of an epoch, N/B."""
    return ceil(num_samples / batch) if options.whole_iterations else num_samples / batch
