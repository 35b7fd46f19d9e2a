"""Schedules of pipelines in closed form: how long a step takes, and how many micro-batches a stage has under way.

S stages, m micro-batches, t_s the time of one of them on stage s, forward and backward, with what it takes to have
tensors of its neighbours. Under GPipe and 1F1B a step takes

    Σ_s t_s + (m - 1) · max_s t_s

and what each stage does once, of which the longest counts. With v chunks of layers on each group of devices, one
after the other (*interleaved*), the pipeline fills in a v-th of the time: m · max t + (Σ t - max t) / v, t being of all
chunks of a group.
"""

from collections.abc import Sequence

GPIPE, ONE_FORWARD_ONE_BACKWARD, INTERLEAVED = "gpipe", "1f1b", "interleaved"
SEARCHED_SCHEDULES = (ONE_FORWARD_ONE_BACKWARD, GPIPE, INTERLEAVED)
"""Those that searches have, the default first."""


def schedule_of(chunks: int) -> str:
    """Return the schedule of groups of devices with so many chunks of layers each, that is or includes 1F1B."""
    return INTERLEAVED if chunks > 1 else ONE_FORWARD_ONE_BACKWARD


def step_s(stages: Sequence[float], once: Sequence[float], micro_batches: int, chunks: int = 1) -> float:
    """Return how long a step takes.

    Args:
        stages: of each group of devices, the time of one micro-batch, forward and backward, all its chunks.
        once: of each, what it does once a step, behind its last micro-batch.
        micro_batches: in the step; with several chunks a multiple of the groups.
        chunks: of layers on each group.
    """
    slowest = max(stages)
    return micro_batches * slowest + (sum(stages) - slowest) / chunks + max(once)


def in_flight(schedule: str, stages: int, stage: int, micro_batches: int) -> int:
    """Return of how many micro-batches a stage keeps what the backward pass needs, at most."""
    return micro_batches if schedule == GPIPE else min(micro_batches, stages - stage)
