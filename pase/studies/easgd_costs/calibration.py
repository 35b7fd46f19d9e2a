"""Table 3 predicted from six of its own cells: what they calibrate, and every row that follows."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from pase.studies.easgd_costs.algorithms import ALGORITHMS, CENTRE, ELASTIC
from pase.studies.easgd_costs.iteration import Iteration, iteration, num_stages
from pase.studies.easgd_costs.paper import TABLE_3, TABLE_3_WORKERS, MeasuredRow
from pase.studies.easgd_costs.platform import Platform, Weights
from pase.studies.integrated.network import Network

WHOLE = Weights(num_bytes=1.0, num_arrays=1)
"""All weights as one unit: the table tells the time of a message, not of what in it is latency."""

CALIBRATED: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "original-easgd-star": ("data_s", "host_exchange_s", "compute_s", "worker_update_s", "host_update_s"),
        "sync-easgd2": ("worker_exchange_s",),
    }
)
"""The cells that are taken from the table; everything else is predicted."""


def row_of(name: str) -> MeasuredRow:
    """Return Table 3's row of an algorithm."""
    return next(row for row in TABLE_3 if row.algorithm == name)


def gpu_platform() -> Platform:
    """Return the 4 GPUs of Table 3, as the calibrated cells have them.

    Original EASGD* moves the weights twice between CPU and GPU, and nothing of it overlaps; its other parts are those
    of one worker. Sync EASGD2 moves them 2⌈log2 P⌉ times between GPUs.
    """
    alone, together = row_of("original-easgd-star"), row_of("sync-easgd2")
    between_gpus_s = together.part_s("worker_exchange_s") / (2 * num_stages(TABLE_3_WORKERS))
    return Platform(
        worker_link=Network(latency_s=0.0, s_per_byte=between_gpus_s),
        host_link=Network(latency_s=0.0, s_per_byte=alone.part_s("host_exchange_s") / 2),
        compute_s=alone.part_s("compute_s"),
        data_s=alone.part_s("data_s"),
        worker_pass_s=alone.part_s("worker_update_s") / ELASTIC,
        host_pass_s=alone.part_s("host_update_s") / CENTRE,
    )


def predicted(name: str) -> Iteration:
    """Return an iteration of any algorithm on these GPUs."""
    return iteration(ALGORITHMS[name], TABLE_3_WORKERS, gpu_platform(), WHOLE)


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictedRow:
    """A row of Table 3 and what is predicted for it. uses: its cells that calibrate the model."""

    measured: MeasuredRow
    iteration: Iteration
    uses: tuple[str, ...]

    @property
    def time_s(self) -> float:
        """Of as many iterations as the paper's row has."""
        return self.iteration.time_s * self.measured.num_iterations


def table_3() -> tuple[PredictedRow, ...]:
    """Return every row of Table 3 with its prediction."""
    return tuple(
        PredictedRow(measured=row, iteration=predicted(row.algorithm), uses=CALIBRATED.get(row.algorithm, ()))
        for row in TABLE_3
    )


def message_s(row: MeasuredRow) -> Mapping[str, float]:
    """Return what a row's exchange gives for one message of all weights, by the part that holds it."""
    algorithm = ALGORITHMS[row.algorithm]
    messages = 2 * num_stages(TABLE_3_WORKERS) if algorithm.is_synchronous else 2
    parts = ("worker_exchange_s", "host_exchange_s")
    return {name: row.part_s(name) / messages for name in parts if row.percent[name].value >= 2}
