"""Closed forms of pipelines, beside a simulation of their schedules pass by pass."""

import random

import pytest

from pase.costs.schedules import GPIPE, ONE_FORWARD_ONE_BACKWARD, in_flight, step_s


def order_of(schedule: str, stages: int, stage: int, micro_batches: int) -> list[tuple[str, int]]:
    """The passes of a stage, in order: all forward first, or, once the pipeline is full, in turns."""
    if schedule == GPIPE:
        return [("f", i) for i in range(micro_batches)] + [("b", i) for i in range(micro_batches)]
    ahead = min(stages - stage - 1, micro_batches)
    order = [("f", i) for i in range(ahead)]
    for i in range(micro_batches - ahead):
        order += [("f", ahead + i), ("b", i)]
    return order + [("b", i) for i in range(micro_batches - ahead, micro_batches)]


def simulated(schedule: str, forward: list[float], backward: list[float], m: int) -> tuple[float, list[int]]:
    """When the last pass ends, and how many micro-batches each stage has under way at most."""
    stages = len(forward)
    orders = [order_of(schedule, stages, s, m) for s in range(stages)]
    ends: dict[tuple[str, int, int], float] = {}
    free, at = [0.0] * stages, [0] * stages
    while any(at[s] < len(orders[s]) for s in range(stages)):
        before = list(at)
        for s in range(stages):
            while at[s] < len(orders[s]):
                kind, i = orders[s][at[s]]
                needs = [("f", s - 1, i)] if kind == "f" and s else []
                needs += [("f", s, i), *([("b", s + 1, i)] if s < stages - 1 else [])] if kind == "b" else []
                if any(need not in ends for need in needs):
                    break
                start = max([free[s], *(ends[need] for need in needs)])
                free[s] = ends[kind, s, i] = start + (forward[s] if kind == "f" else backward[s])
                at[s] += 1
        assert at != before, "the schedule waits for itself"
    held = []
    for order in orders:
        under_way = most = 0
        for kind, _ in order:
            under_way += 1 if kind == "f" else -1
            most = max(most, under_way)
        held.append(most)
    return max(free), held


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


def test_chunks_fill_the_pipeline_sooner() -> None:
    assert step_s([3.0] * 4, [0.0] * 4, 8, chunks=3) == 8 * 3 + 3 * 3 / 3
