"""Closed forms of pipelines, beside a simulation of their schedules pass by pass."""

import random

import pytest

from pase.planning.stages import GPIPE, INTERLEAVED, ONE_FORWARD_ONE_BACKWARD, in_flight, step_s

Pass = tuple[str, int, int]
"""f or b, the stage of all, the micro-batch."""


def order_of(schedule: str, groups: int, group: int, micro_batches: int, chunks: int = 1) -> list[Pass]:
    """The passes of a group of devices, in order: all forward first, or, once the pipeline is full, in turns.

    With several chunks in Megatron-LM's order: as many micro-batches as groups for one chunk, then for the next.
    """

    def number(kind: str, at: int) -> Pass:
        chunk = at % (groups * chunks) // groups
        chunk = chunk if kind == "f" else chunks - 1 - chunk
        return kind, chunk * groups + group, at // (groups * chunks) * groups + at % groups

    total = micro_batches * chunks
    if schedule == INTERLEAVED:
        forward, backward = ([number(kind, at) for at in range(total)] for kind in "fb")
        ahead = 2 * (groups - group - 1) + (chunks - 1) * groups
    else:
        forward, backward = ([(kind, group, i) for i in range(total)] for kind in "fb")
        ahead = total if schedule == GPIPE else groups - group - 1
    ahead = min(ahead, total)
    order = forward[:ahead]
    for one, other in zip(forward[ahead:], backward, strict=False):
        order += [one, other]
    return order + backward[total - ahead :]


def simulated(
    schedule: str,
    forward: list[float],
    backward: list[float],
    m: int,
    chunks: int = 1,
    once: list[float] | None = None,
) -> tuple[float, list[int]]:
    """When the last pass ends, and how many micro-batches each group has under way at most, all chunks of it.

    forward, backward: of each stage of all groups' chunks; once: what each does behind all passes of its group.
    """
    groups, last = len(forward) // chunks, len(forward) - 1
    orders = [order_of(schedule, groups, g, m, chunks) for g in range(groups)]
    ends: dict[Pass, float] = {}
    free, at = [0.0] * groups, [0] * groups
    while any(at[g] < len(orders[g]) for g in range(groups)):
        before = list(at)
        for g in range(groups):
            while at[g] < len(orders[g]):
                kind, s, i = orders[g][at[g]]
                needs = [("f", s - 1, i)] if kind == "f" and s else []
                needs += [("f", s, i), *([("b", s + 1, i)] if s < last else [])] if kind == "b" else []
                if any(need not in ends for need in needs):
                    break
                start = max([free[g], *(ends[need] for need in needs)])
                free[g] = ends[kind, s, i] = start + (forward[s] if kind == "f" else backward[s])
                at[g] += 1
        assert at != before, "the schedule waits for itself"
    held = []
    for order in orders:
        under_way = most = 0
        for kind, _, _ in order:
            under_way += 1 if kind == "f" else -1
            most = max(most, under_way)
        held.append(most)
    once = once or [0.0] * len(forward)
    return max(end + sum(once[g::groups]) for g, end in enumerate(free)), held


@pytest.mark.parametrize("schedule", [GPIPE, ONE_FORWARD_ONE_BACKWARD])
def test_stages_of_one_length_take_what_the_closed_form_says(schedule: str) -> None:
    for stages in range(1, 6):
        for m in range(1, 9):
            found, held = simulated(schedule, [1.0] * stages, [2.0] * stages, m)
            assert found == pytest.approx(step_s([3.0] * stages, [0.0] * stages, m))
            assert held == [in_flight(schedule, stages, s, m) for s in range(stages)]


def test_no_schedule_is_longer_than_the_closed_form_says_by_more_than_the_stages_differ() -> None:
    """Stages of different lengths: the form is a lower bound of what waits for one another, and near it."""
    numbers = random.Random(1)
    for _ in range(200):
        stages, m = numbers.randint(2, 5), numbers.randint(2, 12)
        forward = [numbers.uniform(0.8, 1.2) for _ in range(stages)]
        backward = [2 * f for f in forward]
        found, _ = simulated(GPIPE, forward, backward, m)
        predicted = step_s([f + b for f, b in zip(forward, backward, strict=True)], [0.0] * stages, m)
        assert found == pytest.approx(predicted, rel=1e-9)


def test_what_is_done_once_counts_with_the_longest() -> None:
    assert step_s([3.0, 3.0], [1.0, 2.0], 4) == 4 * 3 + 3 + 2


@pytest.mark.parametrize(("groups", "m", "chunks"), [(1, 3, 2), (2, 4, 2), (4, 8, 2), (3, 9, 3), (4, 16, 3)])
def test_chunks_fill_the_pipeline_sooner(groups: int, m: int, chunks: int) -> None:
    found, _ = simulated(INTERLEAVED, [0.7] * groups * chunks, [1.9] * groups * chunks, m, chunks)
    assert found == pytest.approx(step_s([2.6 * chunks] * groups, [0.0] * groups, m, chunks), rel=1e-12)


def test_the_slowest_stage_sets_the_pace() -> None:
    forward, backward = [1.0, 1.0, 1.0, 1.5], [2.0, 2.0, 2.0, 3.0]
    found, _ = simulated(ONE_FORWARD_ONE_BACKWARD, forward, backward, 32)
    assert step_s([3.0, 3.0, 3.0, 4.5], [0.0] * 4, 32) == pytest.approx(found, rel=0.02)


@pytest.mark.parametrize(("stages", "m"), [(4, 4), (8, 40)])
def test_each_stage_pays_for_what_it_receives(stages: int, m: int) -> None:
    receiving = 0.3
    forward = [1.0 + receiving * (stage > 0) for stage in range(stages)]
    backward = [2.0 + receiving * (stage < stages - 1) for stage in range(stages)]
    found, _ = simulated(ONE_FORWARD_ONE_BACKWARD, forward, backward, m)
    closed = step_s([3.0 + 2 * receiving] * stages, [0.0] * stages, m)
    # The first stage receives nothing forward, the last one nothing backward: so much less, however many there are.
    assert closed - 4 * receiving <= found <= closed
