"""Passes of micro-batches through stages, in the order of a schedule: how long each takes, and when it begins.

A group of devices does what `pase.planning.stages.actions` says, one action after the other, each as soon as what it
needs of other stages is there.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from pase.common.containers import FrozenDict
from pase.planning.stage_problem import StageProblem
from pase.planning.stages import Action, Kind, actions


class Work(StrEnum):
    """What a stage does at a time."""

    RECEIVE = "receive"
    FORWARD = "forward"
    TAKE_BACK = "receive gradient"
    RECOMPUTE = "recompute"
    BACKWARD = "backward"
    WEIGHTS = "gradients of weights"
    ONCE = "once a step"


_WORKS: dict[Kind, tuple[Work, ...]] = {
    "forward": (Work.RECEIVE, Work.FORWARD),
    "backward": (Work.TAKE_BACK, Work.RECOMPUTE, Work.BACKWARD),
    "inputs": (Work.TAKE_BACK, Work.RECOMPUTE, Work.BACKWARD),
    "weights": (Work.WEIGHTS,),
}
"""What an action consists of, one after the other."""

NONE = -1
"""The number that stands for no pass."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """Something that a stage does. micro_batch: None for what a step does once.

    awaited: the number of the pass at whose end it begins, `NONE` at the start of the step.
    """

    work: Work
    stage: int
    micro_batch: int | None
    begin_s: float
    end_s: float
    awaited: int

    @property
    def duration_s(self) -> float:
        return self.end_s - self.begin_s


def stage_times(
    problem: StageProblem, choice: Sequence[int], *, overlaps: bool = True, splits_backward: bool = False
) -> Mapping[Work, float]:
    """Return what a micro-batch takes of a stage, by work, and what the stage does once; together t and o.

    Communication that can hide and does not is waited for in the backward pass. overlaps: whether any hides.
    splits_backward: whether gradients of weights are works of their own.
    """
    tables, sums = problem.tables, problem.sums(choice)
    forward = remade = received = returned = weights = 0.0
    for layer, c in zip(tables.layers, choice, strict=True):
        assert layer.passes is not None
        own = layer.passes
        forward += float(own.forward[c])
        remade += float(own.remade[c])
        received += float(own.received[c])
        returned += float(own.returned[c])
        weights += float(own.weights[c])
    for (u, v), edge in zip(tables.ends, tables.edges, strict=True):
        if not (edge.is_weight and tables.hides):
            assert edge.forward is not None
            there = float(edge.forward[edge.cost.row_class[choice[u]], edge.cost.col_class[choice[v]]])
            forward += there
            remade += there * bool(tables.layers[v].again[choice[v]] and not edge.is_weight)
    micro_batch, once = sums.micro_batch, sums.step
    if not overlaps:
        micro_batch, once = sums.repeated + sums.streamed, sums.once + sums.summed
    if not splits_backward:
        weights = 0.0
    # Of what goes forward and back, the rest, free of what rounding leaves of nothing.
    backward = micro_batch - forward - remade - received - returned - weights
    return FrozenDict(
        {
            Work.RECEIVE: received,
            Work.FORWARD: forward,
            Work.TAKE_BACK: returned,
            Work.RECOMPUTE: remade,
            Work.BACKWARD: backward if backward > 1e-12 * micro_batch else 0.0,
            Work.WEIGHTS: weights,
            Work.ONCE: once,
        }
    )


def run_passes(orders: Sequence[Sequence[Action]], times_s: Sequence[Mapping[Work, float]]) -> tuple[Pass, ...]:
    """Return when groups of devices do what they do, each in its order, as soon as it can.

    Args:
        orders: [groups] the actions of each.
        times_s: [stages] what each work takes.
    """
    found: list[Pass] = []
    ends: dict[tuple[bool, int, int], int] = {}  # the last pass forward, or back, of a stage and a micro-batch
    latest, at = [NONE] * len(orders), [0] * len(orders)

    def add(work: Work, stage: int, micro_batch: int | None, awaited: int) -> int:
        duration_s = times_s[stage][work]
        if duration_s <= 0 and work not in (Work.FORWARD, Work.BACKWARD):
            return awaited
        begin_s = found[awaited].end_s if awaited != NONE else 0.0
        found.append(
            Pass(
                work=work,
                stage=stage,
                micro_batch=micro_batch,
                begin_s=begin_s,
                end_s=begin_s + duration_s,
                awaited=awaited,
            )
        )
        return len(found) - 1

    def end_s(number: int) -> float:
        return found[number].end_s if number != NONE else 0.0

    while any(done < len(order) for done, order in zip(at, orders, strict=True)):
        before = sum(at)
        for group, order in enumerate(orders):
            while at[group] < len(order):
                action = order[at[group]]
                needed = _needed(action, len(times_s))
                if needed is not None and needed not in ends:
                    break
                awaited = max(latest[group], NONE if needed is None else ends[needed], key=end_s)
                for work in _WORKS[action.kind]:
                    awaited = add(work, action.stage, action.micro_batch, awaited)
                latest[group] = awaited
                if action.kind != "weights":
                    ends[action.kind == "forward", action.stage, action.micro_batch] = awaited
                at[group] += 1
        assert sum(at) > before, "groups wait for one another in a circle"
    for group, last in enumerate(latest):
        for stage in range(group, len(times_s), len(orders)):
            last = add(Work.ONCE, stage, None, last)
    return tuple(found)


def _needed(action: Action, num_stages: int) -> tuple[bool, int, int] | None:
    """Return which pass of another stage an action waits for: whether it is one forward, the stage, the micro-batch."""
    match action.kind:
        case "forward" if action.stage:
            return True, action.stage - 1, action.micro_batch
        case "backward" | "inputs" if action.stage < num_stages - 1:
            return False, action.stage + 1, action.micro_batch
    return None


def step_of_passes_s(
    schedule: str, times_s: Sequence[Mapping[Work, float]], *, num_groups: int, micro_batches: int
) -> float:
    """Return when the last pass of a step ends.

    Args:
        schedule: As `actions` has it.
        times_s: [stages] what each work takes.
        num_groups: Groups of devices, which have the stages in turns.
        micro_batches: In the step.
    """
    shape = {"num_groups": num_groups, "num_stages": len(times_s), "micro_batches": micro_batches}
    orders = [actions(schedule, group=group, **shape) for group in range(num_groups)]
    return max(each.end_s for each in run_passes(orders, times_s))
