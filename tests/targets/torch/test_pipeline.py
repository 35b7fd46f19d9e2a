"""Pipelines: the order of passes, modules in stages on ranks beside the unmodified ones, and emitted programs."""

import copy
import json
import subprocess
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import pase
from pase.errors import ModelError, PlanError, ProgramError
from pase.graph.parts import Stage
from pase.planning.plan import SCHEDULES, Plan
from pase.planning.stages import Action, actions, paired_sends, stage_plan
from pase.targets.programs import emit
from pase.targets.torch.parallel import parallelize
from tests.runtime.networks import tied
from tests.runtime.plans import random_plan
from tests.simulation.machines import machine
from tests.targets.torch.equality import assert_close, assert_same_state, full, micro_batches_of, of_step
from tests.targets.torch.modules import MODULES, Batch, made
from tests.targets.torch.plans import in_stages
from tests.targets.torch.ranks import Pool


@cache
def staged_plan(name: str, world: int, groups: int, count: int, schedule: str, seed: int) -> Plan:
    graph = pase.load((made(name), MODULES[name].batch(0)))
    return in_stages(graph, world, groups, count, schedule, seed)


STEPS = 2


def parallel(name: str, plan: Plan) -> Any:
    return parallelize((made(name), MODULES[name].batch(0)), plan)


def together(name: str, step: int, count: int) -> Batch:
    return of_step(micro_batches_of(name, step, count))


def _on_rank(_rank: int, _world: int, name: str, plan: Plan) -> list[float]:
    module, losses = parallel(name, plan), []
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    for step in range(STEPS):
        losses.append(module.accumulate(**together(name, step, plan.micro_batches)).item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


@pytest.mark.full
@pytest.mark.parametrize("name", ["mlp", "gpt"])
def test_stages_in_turns_that_a_search_finds_train_as_the_module_does(ranks: Pool, name: str) -> None:
    slow = machine((0, 1e-6, 1e9), flop_per_s=1e6)
    asked: dict[str, Any] = {"devices": 4, "machine": slow, "cost_model": "alpha_beta", "schedule": "interleaved"}
    plan = pase.search((made(name), together(name, 0, 4)), stages=2, micro_batches=4, **asked)
    assert (plan.schedule, plan.num_groups, plan.num_stages > 2) == ("interleaved", 2, True)
    module = made(name)
    optimizer, losses = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9), []
    for step in range(STEPS):
        loss = sum(module(**batch) for batch in micro_batches_of(name, step, 4)) / 4
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert all(own == pytest.approx(losses, rel=1e-12) for own in ranks.run(_on_rank, name, plan, world=4))


# -- the order of passes


def of_stage(schedule: str, group: int, groups: int, count: int) -> str:
    """The passes of a group with one stage, as F0 F1 B0 …"""
    found = actions(schedule, group=group, num_groups=groups, num_stages=groups, micro_batches=count)
    return " ".join(f"{each.kind[0].upper()}{each.micro_batch}" for each in found)


def test_passes_are_in_the_order_of_the_schedules() -> None:
    """GPipe (Huang et al., figure 2), 1F1B (Narayanan et al., figure 4) and zero bubble (Qi et al., figure 2)."""
    for group in range(3):
        assert of_stage("gpipe", group, 3, 3) == "F0 F1 F2 B0 B1 B2"
    assert [of_stage("1f1b", group, 4, 4) for group in range(4)] == [
        "F0 F1 F2 F3 B0 B1 B2 B3",
        "F0 F1 F2 B0 F3 B1 B2 B3",
        "F0 F1 B0 F2 B1 F3 B2 B3",
        "F0 B0 F1 B1 F2 B2 F3 B3",
    ]
    assert [of_stage("zero_bubble", group, 2, 3) for group in range(2)] == [
        "F0 F1 I0 W0 F2 I1 W1 I2 W2",
        "F0 I0 F1 I1 W0 F2 I2 W1 W2",
    ]


def test_chunks_take_micro_batches_in_rounds() -> None:
    """Narayanan et al. 2021, figure 4: two chunks on each of two groups, four micro-batches."""
    found = actions("interleaved", group=0, num_groups=2, num_stages=4, micro_batches=4)
    passes = " ".join(f"{each.kind[0].upper()}{each.stage}.{each.micro_batch}" for each in found)
    assert passes == ("F0.0 F0.1 F2.0 F2.1 F0.2 B2.0 F0.3 B2.1 F2.2 B0.0 F2.3 B0.1 B2.2 B2.3 B0.2 B0.3")


@given(st.sampled_from(SCHEDULES), st.integers(2, 5), st.integers(1, 3), st.integers(1, 12))
def test_no_schedule_waits_for_ever(schedule: str, groups: int, chunks: int, count: int) -> None:
    """Every pass is done once, each after those that it needs, whatever the numbers."""
    stages = groups * chunks
    left = [
        list(actions(schedule, group=group, num_groups=groups, num_stages=stages, micro_batches=count))
        for group in range(groups)
    ]
    done = set[tuple[str, int, int]]()
    most = dict.fromkeys(range(stages), 0)

    def is_ready(kind: str, stage: int, i: int) -> bool:
        if kind == "forward":
            return stage == 0 or ("forward", stage - 1, i) in done
        if kind == "weights":
            return ("inputs", stage, i) in done
        return ("forward", stage, i) in done and (stage == stages - 1 or (kind, stage + 1, i) in done)

    while any(left):
        before = len(done)
        for own in left:
            while own and is_ready(own[0].kind, own[0].stage, own[0].micro_batch):
                action = own.pop(0)
                done.add((action.kind, action.stage, action.micro_batch))
                ways = [
                    sum(key[:2] == (kind, action.stage) for key in done) for kind in ("forward", "backward", "inputs")
                ]
                most[action.stage] = max(most[action.stage], ways[0] - ways[1] - ways[2])
        assert len(done) > before
    kinds = 3 if schedule == "zero_bubble" else 2
    assert len(done) == kinds * stages * count
    if chunks == 1 and schedule != "gpipe":
        assert most == {stage: min(count, groups - stage) for stage in range(stages)}


class Wire:
    """A communicator of two stages: of each side, calls in the order in which they are begun, one after the other.

    A call is a set of "s" and "r", sends and receives; it is over once the other side's call that is first by then has
    had the counterpart of each.
    """

    def __init__(self) -> None:
        self.calls: tuple[list[set[str]], list[set[str]]] = ([], [])
        self.received = [0, 0]

    def meet(self) -> bool:
        """Carry out what both sides have begun, and return whether that was anything."""
        is_moved = False
        while all(self.calls):
            one, two = (calls[0] for calls in self.calls)
            done = [("s", "r")] * ("s" in one and "r" in two) + [("r", "s")] * ("r" in one and "s" in two)
            for mine, theirs in done:
                one.discard(mine)
                two.discard(theirs)
                self.received[0] += mine == "r"
                self.received[1] += theirs == "r"
            for calls in self.calls:
                if not calls[0]:
                    calls.pop(0)
            if not done:
                break
            is_moved = True
        return is_moved


def ends(schedule: str, groups: int, chunks: int, count: int, *, is_paired: bool) -> bool:
    """Return whether a step comes to its end where each pair of stages has one communicator."""
    stages = groups * chunks
    orders = [
        list(actions(schedule, group=group, num_groups=groups, num_stages=stages, micro_batches=count))
        for group in range(groups)
    ]
    of_stage = [[each for each in orders[number % groups] if each.stage == number] for number in range(stages)]
    wires = {number: Wire() for number in range(1, stages)}
    paired = {
        number: paired_sends(*of_stage[number - 1 : number + 1]) if is_paired else (frozenset(), frozenset())
        for number in wires
    }
    begun = dict.fromkeys(((number, side) for number in wires for side in (0, 1)), 0)
    needed = dict(begun)
    waiting: set[tuple[int, int]] = set()

    def has_come(number: int, side: int) -> bool:
        """Begin the receive that an action needs, if it has not, and return whether it is over."""
        wire = wires[number]
        if (number, side) not in waiting:
            waiting.add((number, side))
            needed[number, side] += 1
            if begun[number, side] < needed[number, side]:
                begun[number, side] += 1
                wire.calls[side].append({"r"})
            wire.meet()
        if wire.received[side] < needed[number, side]:
            return False
        waiting.discard((number, side))
        return True

    def send(number: int, side: int, micro_batch: int) -> None:
        with_receive = micro_batch in paired[number][side]
        begun[number, side] += with_receive
        wires[number].calls[side].append({"s", "r"} if with_receive else {"s"})

    is_moved = True
    while any(orders) and is_moved:
        is_moved = False
        for wire in wires.values():
            is_moved |= wire.meet()
        for order in orders:
            while order:
                action, number = order[0], order[0].stage
                is_forward = action.kind == "forward"
                come, go = ((number, 1), (number + 1, 0)) if is_forward else ((number + 1, 0), (number, 1))
                if action.kind != "weights":
                    if come[0] in wires and not has_come(*come):
                        break
                    if go[0] in wires:
                        send(*go, action.micro_batch)
                order.pop(0)
                is_moved = True
    return not any(orders) and not any(calls for wire in wires.values() for calls in wire.calls)


@given(st.sampled_from(SCHEDULES), st.integers(2, 5), st.integers(1, 3), st.integers(1, 12))
def test_one_communicator_for_both_ways_holds_nothing_up(schedule: str, groups: int, chunks: int, count: int) -> None:
    assert ends(schedule, groups, chunks, count, is_paired=True)


def test_sends_that_wait_for_each_other_are_begun_with_receives() -> None:
    """What Megatron-LM has as send_forward_recv_backward and send_backward_recv_forward."""
    assert not ends("1f1b", 2, 1, 4, is_paired=False)
    before, after = (actions("1f1b", **SMALL, group=group) for group in range(2))
    assert paired_sends(before, after) == ({1, 2, 3}, {0, 1, 2})
    before, after = (actions("gpipe", **SMALL, group=group) for group in range(2))
    assert paired_sends(before, after) == (set(), set())


SMALL: dict[str, Any] = {"num_groups": 2, "num_stages": 2, "micro_batches": 4}


def _done(rank: int, _world: int, name: str, plan: Plan) -> Any:
    module, done = parallel(name, plan), list[Action]()
    module._stages.done = done.append
    module.accumulate(**together(name, 0, plan.micro_batches))
    return done == list(
        actions(plan.schedule, group=rank, num_groups=2, num_stages=2, micro_batches=plan.micro_batches)
    )


def test_ranks_do_what_the_schedule_says(ranks: Pool) -> None:
    assert all(ranks.run(_done, "mlp", staged_plan("mlp", 2, 2, 4, "1f1b", 1), world=2))


# -- what else a module does


def _evaluated(_rank: int, _world: int, plan: Plan) -> Any:
    module, by_hand = parallel("cnn", plan), made("cnn")
    for each in micro_batches_of("cnn", 0, 2):
        by_hand(**each)
    module.accumulate(**together("cnn", 0, 2))
    module.eval()
    by_hand.eval()
    batch = MODULES["cnn"].batch(7)
    with torch.no_grad():
        return float(module(**batch)), float(by_hand(**batch))


def test_evaluation_goes_through_the_stages(ranks: Pool) -> None:
    for found, expected in ranks.run(_evaluated, staged_plan("cnn", 2, 2, 2, "1f1b", 2), world=2):
        assert found == pytest.approx(expected, rel=1e-12)


def _clipped(_rank: int, _world: int, plan: Plan) -> Any:
    module = parallel("gpt", plan)
    with module.no_sync():
        module.accumulate(**together("gpt", 0, 2))
    module.accumulate(**together("gpt", 1, 2))
    norm = module.clip_grad_norm_(0.5)
    return float(norm), {key: full(p.grad).clone() for key, p in module.named_parameters()}


def test_gradients_are_left_unsummed_and_clipped_over_all_stages(ranks: Pool) -> None:
    module = made("gpt")
    for step in range(2):
        (sum(module(**batch) for batch in micro_batches_of("gpt", step, 2)) / 2).backward()
    norm = float(nn.utils.clip_grad_norm_(module.parameters(), 0.5))
    expected = {key: p.grad for key, p in module.named_parameters()}
    for found, gradients in ranks.run(_clipped, staged_plan("gpt", 4, 2, 2, "1f1b", 3), world=4):
        assert found == pytest.approx(norm, rel=1e-12)
        for key, gradient in gradients.items():
            if expected[key].norm() > 1e-12 * norm:
                assert_close(gradient, expected[key], key)


def _loads(_rank: int, _world: int, plan: Plan) -> Any:
    module, other = parallel("gpt", plan), made("gpt")
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(0.5)
    module.load_state_dict(other.state_dict())
    twin = copy.deepcopy(module)
    return twin.full_state_dict(on_all=True), {**other.state_dict()}


def test_a_whole_state_is_loaded(ranks: Pool) -> None:
    for found, expected in ranks.run(_loads, staged_plan("gpt", 4, 2, 2, "1f1b", 3), world=4):
        assert_same_state(found, expected)


def _first_values(_rank: int, _world: int, name: str, plan: Plan) -> Any:
    with torch.device("meta"):
        module = MODULES[name].make()
    return parallelize((module, MODULES[name].batch(0)), plan, seed=3).full_state_dict(on_all=True)


def test_first_values_are_those_without_stages(ranks: Pool) -> None:
    """A module without values draws the same numbers in stages, on any rank."""
    plan = staged_plan("gpt", 4, 2, 2, "1f1b", 3)
    (alone,) = ranks.run(_first_values, "gpt", random_plan(plan.graph, 1, 1), world=1)
    for state in ranks.run(_first_values, "gpt", plan, world=4):
        assert list(state) == list(alone)
        assert all(torch.equal(x, alone[key]) for key, x in state.items())


def _refused(_rank: int, _world: int, plan: Plan) -> Any:
    module, batch = parallel("mlp", plan), MODULES["mlp"].batch(0)
    with pytest.raises(ProgramError, match=r"trains by loss = module\.accumulate"):
        module(**batch)
    with pytest.raises(ModelError, match="has 4 examples; a step has 8, 2 micro-batches of 4"):
        module.accumulate(**batch)


def test_what_a_pipeline_does_not_do_is_said(ranks: Pool) -> None:
    plan = staged_plan("mlp", 2, 2, 2, "1f1b", 1)
    ranks.run(_refused, plan, world=2)
    layers = tuple(replace(layer, devices=(0,)) for layer in plan.layers)
    with pytest.raises(PlanError, match=r"is on devices \[0\]; expected those of its group, 1 to 1"):
        emit(replace(plan, layers=layers), target="torch")
    with pytest.raises(PlanError, match="for 1 groups of 2 devices; expected stages that count up from 0"):
        emit(replace(plan, num_groups=1), target="torch")
    for what, changes in (("is recomputed", {"is_recomputed": True}), ("has its weights in", {"state": "zero3"})):
        layers = (replace(plan.layers[0], **changes), *plan.layers[1:])
        with pytest.raises(PlanError, match=f"{what}.*under the schedule zero_bubble a backward pass goes through"):
            emit(replace(plan, layers=layers, schedule="zero_bubble"), target="torch")


# -- emitted programs


def test_a_stage_is_a_plan_of_its_own() -> None:
    plan = staged_plan("gpt", 4, 2, 2, "1f1b", 3)
    for number in range(2):
        own = stage_plan(plan, number)
        assert own.num_devices == 2
        assert [layer.name for layer in own] == [layer.name for layer in plan if layer.stage == number]
        assert all(sorted(layer.devices) == [0, 1] for layer in own)
        assert isinstance(own.graph, Stage)
        assert own.graph.whole is plan.graph


def _printed(program: Path, *arguments: str) -> list[float]:
    command = [sys.executable, str(program), "--dtype", "float64", "--json", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert not done.returncode, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    return [line["loss"] for line in lines if line["event"] == "step"]


@pytest.mark.full
def test_an_emitted_program_goes_on_from_a_checkpoint(tmp_path: Path) -> None:
    program, kept = tmp_path / "program.py", str(tmp_path / "kept")
    program.write_text(emit(in_stages(tied(), 2, 2, 2, "1f1b", 4), target="torch"))
    _printed(program, "--steps", "2", "--checkpoint", kept, "--optimizer", "adam")
    more = _printed(program, "--steps", "4", "--checkpoint", kept, "--resume", "--optimizer", "adam")
    whole = _printed(program, "--steps", "4", "--optimizer", "adam")
    assert more == pytest.approx(whole[2:], rel=1e-12)
