"""Pipelines: schedules and how long a step takes, the stages of a plan as plans of their own, links between groups.

Stage s belongs to group s mod S of the S groups. A group that has several stages, its chunks, takes micro-batches in
rounds of S: of a round first all for its first chunk, then all for its second (Megatron-LM's interleaved schedule).

S stages, m micro-batches, t_s the time of one of them on stage s, forward and backward, with what it takes to have
tensors of its neighbours. Under GPipe and 1F1B a step takes

    Σ_s t_s + (m - 1) · max_s t_s

and what each stage does once, of which the longest counts. With v chunks of layers on each group of devices, one
after the other (*interleaved*), the pipeline fills in a v-th of the time where all stages are alike, m · max t +
(Σ t - max t) / v, t being of all chunks of a group; where they are not, it takes what its passes do (`passes`).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, permutations
from typing import Literal

import numpy as np

from pase.costs.collectives import Link
from pase.errors import PlanError
from pase.graph import ITEMSIZES
from pase.graph.parts import stage
from pase.machine import Machine
from pase.planning.plan import LayerPlan, Plan
from pase.sharding.edges import SharedWeight, edge_steps
from pase.sharding.reshard import moved_pairs
from pase.sharding.shards import IntArray
from pase.sharding.traffic import Flow, HeldWeight, Movement, Phase, bytes_by_movement, edge_flows, flows, held_weights

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


Kind = Literal["forward", "backward", "inputs", "weights"]


@dataclass(frozen=True, slots=True)
class Action:
    """A pass of a micro-batch through a stage: forward, backward, or, of the latter, the gradient of what the stage
    received (inputs) and those of its weights.
    """

    kind: Kind
    stage: int
    micro_batch: int


def check_stages(plan: Plan) -> None:
    """Raise PlanError where the stages of a plan are none that its groups of devices can have in turns."""
    numbers = [layer.stage for layer in plan.layers]
    is_ascending = numbers[0] == 0 and all(0 <= later - earlier <= 1 for earlier, later in pairwise(numbers))
    is_even = not (plan.num_stages % plan.num_groups or plan.num_devices % plan.num_groups)
    if not is_ascending or not is_even or plan.num_groups == 1:
        raise PlanError(
            f"the stages of the plan are {sorted(set(numbers))}, for {plan.num_groups} groups of {plan.num_devices} "
            "devices; expected stages that count up from 0 in the order of the layers, as many for each group, and "
            "groups of one size"
        )
    for layer in plan.layers if plan.schedule == "zero_bubble" else ():
        if layer.is_recomputed or layer.state == "zero3":
            what = "is recomputed" if layer.is_recomputed else "has its weights in pieces (zero3)"
            raise PlanError(
                f"layer {layer.name!r} {what}, and under the schedule zero_bubble a backward pass goes through layers "
                "twice; expected another schedule: 1f1b, interleaved or gpipe"
            )
    for layer in plan.layers:
        if sorted(layer.devices) != list(group_devices(plan, layer.stage)):
            own = group_devices(plan, layer.stage)
            raise PlanError(
                f"layer {layer.name!r} of stage {layer.stage} is on devices {sorted(layer.devices)}; expected those of "
                f"its group, {own.start} to {own.stop - 1}"
            )


def group_devices(plan: Plan, number: int) -> range:
    """Return the devices of the group that a stage belongs to."""
    size = plan.num_devices // plan.num_groups
    first = number % plan.num_groups * size
    return range(first, first + size)


def stage_layers(plan: Plan, number: int) -> tuple[LayerPlan, ...]:
    """Return the layers of a stage, their devices counted from the first one of its group."""
    first = group_devices(plan, number).start
    return tuple(
        replace(layer, stage=0, devices=tuple(device - first for device in layer.devices))
        for layer in plan.layers
        if layer.stage == number
    )


def stage_plan(plan: Plan, number: int) -> Plan:
    """Return a stage as a plan of its own for the devices of its group, counted from 0."""
    layers = stage_layers(plan, number)
    first = plan.index[layers[0].name]
    names = {layer.name for layer in layers}
    return replace(
        plan,
        graph=stage(plan.graph, first, first + len(layers)),
        num_devices=plan.num_devices // plan.num_groups,
        layers=tuple(
            replace(layer, transfers=tuple(each for each in layer.transfers if each.producer in names))
            for layer in layers
        ),
        schedule="",
        num_groups=1,
    )


def actions(schedule: str, *, group: int, num_groups: int, num_stages: int, micro_batches: int) -> tuple[Action, ...]:
    """Return what a group of devices does in a step, one action after the other.

    Args:
        schedule: "gpipe": all micro-batches forward, then all backward. "1f1b", "interleaved": as soon as the first
            micro-batch can come back, one forward and one backward in turns. "zero_bubble": likewise, with the
            gradients of weights put off by as many micro-batches as there are groups before this one (ZB-H1), so that
            gradients of inputs go on to the stage before at once.
        group: its number.
        num_groups: of devices.
        num_stages: of the pipeline; the group has those whose numbers are `group` mod `num_groups`.
        micro_batches: of the step.
    """
    own = range(group, num_stages, num_groups)
    numbers = range(micro_batches)
    # What is left over goes with the first round: others would wait for more than there is in a last, short one.
    first = micro_batches if schedule == "gpipe" else min(micro_batches, num_groups + micro_batches % num_groups)
    rounds = [numbers[:first], *(numbers[at : at + num_groups] for at in range(first, micro_batches, num_groups))]
    forwards = [Action("forward", each, i) for some in rounds for each in own for i in some]
    backwards = [(each, i) for some in rounds for each in reversed(own) for i in some]
    # How many micro-batches go forward before one comes back.
    later = num_groups - 1 - group
    begun = later if len(own) == 1 else 2 * later + (len(own) - 1) * first
    begun = len(forwards) if schedule == "gpipe" else min(begun, len(forwards))
    put_off = group if schedule == "zero_bubble" else None
    return tuple(_in_turns(forwards, backwards, begun, put_off))


def _in_turns(
    forwards: list[Action], backwards: list[tuple[int, int]], begun: int, put_off: int | None
) -> Iterator[Action]:
    yield from forwards[:begun]
    for number, (stage_number, micro_batch) in enumerate(backwards):
        yield from forwards[begun + number : begun + number + 1]
        if put_off is None:
            yield Action("backward", stage_number, micro_batch)
            continue
        yield Action("inputs", stage_number, micro_batch)
        if number >= put_off:
            yield Action("weights", *backwards[number - put_off])
    if put_off:
        yield from (Action("weights", *each) for each in backwards[-put_off:])


def paired_sends(before: Sequence[Action], after: Sequence[Action]) -> tuple[frozenset[int], frozenset[int]]:
    """Return the sends between two neighbouring stages that begin in one call with the next receive.

    A communicator takes one call after the other. Where both stages send, neither comes to receive, unless each of the
    two calls has its next receive from the other stage in it, too: what 1F1B does with the output of one micro-batch
    and the gradient of another.

    Args:
        before: What a stage does in a step, in order.
        after: What the stage behind it does.

    Returns:
        Of either stage, the micro-batches of which it sends the output, or the gradient, together with a receive.
    """
    sends = [[(each.kind == "forward", each.micro_batch) for each in before if each.kind != "weights"]]
    sends.append([(each.kind != "forward", each.micro_batch) for each in after if each.kind != "weights"])
    at, begun, paired = [0, 0], [0, 0], (set[int](), set[int]())
    while True:
        for side, messages in enumerate(sends):
            while begun[side] and not messages[at[side]][0]:
                begun[side] -= 1
                at[side] += 1
        if at == [len(messages) for messages in sends]:
            return frozenset(paired[0]), frozenset(paired[1])
        current = [messages[place] for messages, place in zip(sends, at, strict=True)]
        assert any(is_sent for is_sent, _ in current), "a schedule in which two stages wait for each other"
        are_both_sent = all(is_sent for is_sent, _ in current)
        for side, (_, micro_batch) in enumerate(current):
            at[side] += 1
            if are_both_sent:
                paired[side].add(micro_batch)
                begun[side] += 1


def under_way(schedule: str, *, group: int, num_groups: int, num_stages: int, micro_batches: int) -> IntArray:
    """Return [moments, stages of the group] of how many micro-batches have gone forward, and not back by then.

    No two moments are alike; arguments: `actions`'s.
    """
    own = range(group, num_stages, num_groups)
    order = actions(schedule, group=group, num_groups=num_groups, num_stages=num_stages, micro_batches=micro_batches)
    # Where they are put off, gradients of weights end what is kept.
    last = "weights" if any(each.kind == "weights" for each in order) else "backward"
    changes = np.zeros((len(order), len(own)), dtype=np.int64)
    for at, each in enumerate(order):
        changes[at, own.index(each.stage)] = (each.kind == "forward") - (each.kind == last)
    return np.unique(np.cumsum(changes, axis=0), axis=0)


# -- what a step moves


def step_flows(plan: Plan) -> tuple[Flow, ...]:
    """Return what a step moves between devices, as programs for PyTorch send it.

    Copies that several groups have of a weight go from each to each. Under "zero_bubble", what layers exchange inside
    themselves backward (the sums of a normalisation that is split) is sent for the weights once more, and not counted
    here.
    """
    if plan.num_stages == 1:
        return flows(plan)
    cut = [edge for edge in plan.graph.edges if plan[edge.producer].stage != plan[edge.consumer].stage]
    handed = (flow for edge in cut for flow in edge_flows(plan, edge) if flow.bytes_by_pair)
    return (*_within_stages(plan), *handed, *_copies(plan))


def _within_stages(plan: Plan) -> Iterator[Flow]:
    for number in range(plan.num_stages):
        first = group_devices(plan, number).start
        # Layers that move alike share one table, and do so still.
        moved: dict[int, dict[tuple[int, int], int]] = {}
        for flow in flows(stage_plan(plan, number)):
            pairs = flow.bytes_by_pair
            if id(pairs) not in moved:
                moved[id(pairs)] = {(first + giver, first + taker): size for (giver, taker), size in pairs.items()}
            yield replace(flow, bytes_by_pair=moved[id(pairs)])


def _copies(plan: Plan) -> Iterator[Flow]:
    """Yield what gradients of weights move that layers of several groups of devices read."""
    readers: dict[str, dict[int, tuple[str, int]]] = {}
    for operator in plan.graph.operators:
        for position, read in enumerate(operator.reads):
            if read.shared and read.is_trained:
                group = plan[operator.name].stage % plan.num_groups
                readers.setdefault(read.shared, {}).setdefault(group, (operator.name, position))
    itemsize = ITEMSIZES[plan.precision.gradients]
    for weight, own in readers.items():
        for (giver, output), (taker, position) in permutations(own.values(), 2):
            ends = SharedWeight(producer=giver, output=output, consumer=taker, input=position)
            pairs = moved_pairs(edge_steps(plan, ends))
            yield Flow(
                tensor=weight,
                movement=Movement(producer=giver, consumer=taker, phase=Phase.BACKWARD),
                bytes_by_pair={between: count * itemsize for between, count in pairs.items() if count},
            )


def step_bytes(plan: Plan) -> dict[Movement, int]:
    """Return the bytes that a step moves between devices (`step_flows`), by whose they are."""
    return bytes_by_movement(step_flows(plan))


def most_held(plan: Plan, count: Callable[[Sequence[HeldWeight]], int]) -> int:
    """Return the most that a group of devices has of something that is counted of the weights of a stage."""
    if plan.num_groups == 1:
        return count(held_weights(plan))
    of_groups = [0] * plan.num_groups
    for number in range(plan.num_stages):
        of_groups[number % plan.num_groups] += count(held_weights(stage_plan(plan, number)))
    return max(of_groups)


def group_links(machine: Machine, num_devices: int, num_groups: int, chunks: int = 1) -> tuple[Link | None, ...]:
    """Return what a device has of the link before each stage, and behind the last one: none at the ends.

    Groups of devices have the stages in turns, each as many as there are chunks.
    """
    numbers = range(1, num_groups * chunks)
    between = [_link(machine, num_devices, num_devices // num_groups, number % num_groups) for number in numbers]
    return (None, *between, None)


def _link(machine: Machine, num_devices: int, group: int, number: int) -> Link:
    """Return what each device of a group has of the link to the group before, of the first to the last one."""
    device, behind = number * group, 1
    other = (device or num_devices) - 1
    for level in machine.levels_for(num_devices):
        size = level.num_devices or num_devices
        if other // size == device // size:
            break
        behind = size
    link = Link(latency_s=level.latency_s, s_per_byte=1 / level.bandwidth_bytes_per_s)
    return link.shared(min(group, behind))
