"""The most regular of the steps that cost about as much as the best one known, beside brute force over all."""

import re
from dataclasses import replace
from functools import cache
from math import inf

import pytest

from pase.costs.states import STATES, ModeSpace
from pase.graph import Builder, Graph
from pase.graph.operators import dense, elementwise, softmax_loss
from pase.machine import Machine
from pase.machine.machine import Overlap
from pase.planning.pipelines import Found, plan_of_step, solve_scheme
from pase.planning.plan import Plan
from pase.planning.regular import runs_of_blocks, simplified
from pase.planning.spans import Scheme, Setting, batch_of
from pase.planning.steps import LayerChoice, TrainingStep
from tests.networks import with_layer
from tests.planning.test_pipelines import _expected
from tests.simulation.machines import machine

SHARES = (0.0, 0.01, 0.05, 0.3)
SEEDS = range(4)


@cache
def _case(seed: int) -> tuple[Setting, Scheme, float]:
    """The first random step from some number on whose least cost brute force can tell, and which fits."""
    number = 100 * seed
    while True:
        case = _expected(number, in_turns=False)
        if case is not None and case[2] < inf:
            return case
        number += 1


def _blocks(count: int, width: int = 4) -> Graph:
    """Equal blocks of two products and a sum, behind one product and before a loss."""
    net = Builder("blocks")
    x = net.add(dense, "first", net.input((8, 4)), out=(("n", width),))
    for block in range(count):
        y = net.add(dense, f"up{block}", x, out=(("n", width),), activation="relu")
        y = net.add(dense, f"down{block}", y, out=(("n", width),))
        x = net.add(elementwise, f"add{block}", x, y, dims=("b", "n"))
    net.add(softmax_loss, "loss", net.add(dense, "head", x, out=(("n", width),)))
    return net.build()


def _slow() -> Machine:
    """A machine on which sending takes about as long as computing."""
    overlap = Overlap(share=0.5, source="made up")
    return replace(machine((0, 1e-6, 1e8), flop_per_s=1e9), overlap=overlap)


def of_roles(plan: Plan) -> int:
    """How many configurations, with modes, the layers of all blocks have, by their names without numbers."""
    found = set()
    for layer in plan:
        role = re.sub(r"\d+", "", layer.name)
        if re.search(r"\d", layer.name):
            found.add((role, tuple(layer.splits.items()), layer.state, layer.is_recomputed))
    return len(found)


def test_blocks_that_repeat_are_found_with_those_at_their_ends() -> None:
    batch = batch_of(_blocks(4), 1, has_cuts=True)
    (run,) = runs_of_blocks(batch.graph, batch.kinds)
    names = [operator.name for operator in batch.graph.operators]
    within = names[run.first : run.beyond]
    places = {re.sub(r"\d+", "", name) for name in within if "fan_out" not in name}
    assert {"up", "down", "add"} <= places
    assert run.size == 4
    for place, name in enumerate(within[run.size :], start=run.size):
        before = within[place - run.size]
        if "fan_out" not in name and "fan_out" not in before:
            assert re.sub(r"\d+", "", name) == re.sub(r"\d+", "", before)
    assert sum(name.startswith("up") for name in within) == 4


def test_what_does_not_repeat_has_no_blocks() -> None:
    net = Builder("apart")
    x = net.add(dense, "a", net.input((8, 5)), out=(("n", 3),))
    net.add(softmax_loss, "loss", net.add(dense, "b", x, out=(("n", 7),)))
    batch = batch_of(net.build(), 1, has_cuts=True)
    assert runs_of_blocks(batch.graph, batch.kinds) == ()


def _peak(setting: Setting, found: Found) -> int:
    return TrainingStep.of(plan_of_step(setting, found, 0.0, 0.0)).peak.bytes


@pytest.mark.parametrize("seed", SEEDS)
def test_steps_cost_no_more_than_allowed_and_fit(seed: int) -> None:
    setting, scheme, least = _case(seed)
    found = solve_scheme(setting, scheme)
    before = None
    for share in SHARES:
        simpler = simplified(setting, found, share)
        if simpler is None:
            continue
        assert least * (1 - 1e-9) <= simpler.found.cost <= simpler.cheapest * (1 + share) * (1 + 1e-8)
        assert least * (1 - 1e-9) <= simpler.cheapest <= found.cost * (1 + 1e-9)
        assert _peak(setting, simpler.found) <= setting.limit_bytes
        if before is not None:
            assert simpler.irregularity <= before
        before = simpler.irregularity


@pytest.mark.parametrize("scheme", [Scheme(stages=1, micro_batches=2), Scheme(stages=2, micro_batches=2)])
def test_a_block_that_is_otherwise_for_little_becomes_as_the_others(scheme: Scheme) -> None:
    """A layer that is recomputed where its like are not costs more; within that it is as they are."""
    setting = Setting(
        graph=_blocks(3),
        num_devices=4,
        machine=_slow(),
        cost_model="step",
        space=ModeSpace(states=STATES, recompute=True),
        optimiser="adamw",
        limit_bytes=inf,
    )
    found = solve_scheme(setting, scheme)
    plan = plan_of_step(setting, found, 0.0, 0.0)
    at = plan.index["up1"]
    layer = plan.layers[at]
    other = LayerChoice(
        splits=layer.splits, state=layer.state, is_recomputed=not layer.is_recomputed, stage=layer.stage
    )
    cost = with_layer(TrainingStep.of(plan), at, other).cost
    assert cost > found.cost
    first = found.parts[layer.stage].chunks[0][0]
    again = tuple(own != (v == at) for v, own in enumerate(found.parts[layer.stage].again, start=first))
    parts = list(found.parts)
    parts[layer.stage] = replace(parts[layer.stage], again=again)
    crumbled = replace(found, parts=tuple(parts), cost=cost)
    before = of_roles(plan_of_step(setting, crumbled, 0.0, 0.0))
    simpler = simplified(setting, crumbled, 0.05)
    assert simpler is not None
    after = plan_of_step(setting, simpler.found, 0.0, 0.0)
    assert after.total_cost <= 1.05 * cost
    assert of_roles(after) < before
    assert not after["up1"].is_recomputed
    assert simpler.configurations < simpler.configurations_before
    assert simpler.irregularity < simpler.irregularity_before
