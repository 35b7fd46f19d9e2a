"""Bytes of weights, gradients and optimizer state in every state of ZeRO, counted element by element.

The oracle numbers the elements of a weight, gives each device its part, and each device of a group that holds the same
part its shard, and counts; it knows nothing of configurations as arrays, nor of `pase.costs`.
"""

from dataclasses import replace
from itertools import product
from random import Random

import numpy as np
import pytest
from numpy.typing import NDArray

import pase
from pase.costs import StepMemory, cost_model, liveness, memory_of_layers
from pase.costs.choice_tables import KnownChoices, choice_tables
from pase.costs.memory import keeping
from pase.costs.states import STATES, ModeSpace
from pase.graph import Builder, Graph
from pase.graph.operators import dense, softmax_loss
from pase.graph.parts import with_cuts
from pase.planning.plan import Plan
from pase.sharding.boxes import chunk
from pase.sharding.shards import shard_dims
from pase.sharding.traffic import Phase, Purpose, Sent, layer_movements
from pase.targets.training.optimisers import make_rule
from tests.runtime.plans import MACHINE, make_plan
from tests.targets.torch.plans import with_states

FLOAT = 4
SLOTS = {"sgd": 0, "momentum": 1, "adam": 2}


def owners(shape: tuple[int, ...], count: int) -> tuple[NDArray[np.int64], int]:
    """Which of so many devices has each element of a part in its shard, and the points of the largest shard.

    Along the first dim whose largest shard is at most a 64th larger than the smallest along any dim.
    """
    places = np.indices(shape)
    found = []
    for dim, extent in enumerate(shape):
        size = next(size for size in range(1, extent + 1) if size * count >= extent)
        owner = places[dim] // size
        found.append((owner, int(np.bincount(owner.ravel(), minlength=count).max())))
    least = min(points for _, points in found)
    return next(own for own in found if own[1] * 64 <= least * 64 + least)


def graph() -> Graph:
    """Three products; their extents have the divisors 2, 3, 4 and 5, and few dims one in common with a group."""
    net = Builder("odd")
    x = net.add(dense, "fc1", net.input((60, 10)), out=(("n", 18),))
    x = net.add(dense, "fc2", x, out=(("n", 7),), bias=False)
    x = net.add(dense, "fc3", x, out=(("n", 15),))
    net.add(softmax_loss, "loss", x)
    return net.build()


WEIGHTS = {"fc1": (("c", "n"), ("n",)), "fc2": (("c", "n"),), "fc3": (("c", "n"), ("n",))}
"""The dims of the layers' weights; the loss has none."""


def counted(layer: str, dims: dict[str, int], splits: dict[str, int], state: str, slots: int) -> tuple[int, int, int]:
    """The most bytes of weights, gradients and optimizer state on a device, of one layer."""
    total = np.zeros(3, dtype=np.int64)
    for weight in WEIGHTS.get(layer, ()):
        shape = tuple(dims[dim] // splits[dim] for dim in weight)
        part = int(np.prod(shape))
        # Devices with other examples have other parts of the gradient's sum.
        count = splits["b"]
        shard = kept = part
        if state != "replicated" and count > 1 and part > 1:
            owner, shard = owners(shape, count)
            # What is gathered is as many shards as devices; it stays in the whole part, the shard in it or beside it.
            flat = owner.ravel()
            in_order = bool((np.diff(flat) >= 0).all())
            kept = shard if state == "zero3" else shard * count + shard * (not in_order)
        gradient = shard if state in ("zero2", "zero3") else part
        moments = slots * (part if state == "replicated" else shard)
        total += np.array([kept, gradient, moments]) * FLOAT
    weights, gradients, moments_bytes = total.tolist()
    return weights, gradients, moments_bytes


@pytest.mark.parametrize("devices", [2, 3, 5, 6, 12])
@pytest.mark.parametrize("optimiser", SLOTS)
def test_tables_hold_what_the_definition_counts(devices: int, optimiser: str) -> None:
    own = with_cuts(graph())
    model = cost_model("alpha_beta", MACHINE, devices)
    tables = choice_tables(
        own,
        devices,
        model,
        ModeSpace(states=STATES),
        known=KnownChoices(),
        is_whole=True,
    )
    memory = StepMemory(
        graph=own,
        keeps=keeping(own),
        configurations=tables.configurations,
        optimiser=optimiser,
        modes=tables.layers,
        micro_batches=2,
    )
    compared = 0
    for v, operator in enumerate(own.operators):
        configurations, modes = tables.configurations[v], tables.layers[v]
        held = memory.lasting(v, modes, has_casts=True)
        for choice in range(len(modes)):
            splits = dict(zip(operator.extents, configurations[modes.rows[choice]].tolist(), strict=True))
            state = STATES[int(modes.state[choice])]
            expected = sum(counted(operator.name, dict(operator.extents), splits, state, SLOTS[optimiser]))
            # Data and labels of both micro-batches.
            given = {"fc1": 60 * 10 / splits["b"] / splits.get("c", 1), "loss": 60 / splits["b"]}
            assert held[choice] == expected + 2 * FLOAT * given.get(operator.name, 0), (operator.name, splits, state)
            compared += state != "replicated" and expected > 0
    assert compared > 3


def random_state_plan(devices: int, seed: int) -> Plan:
    """A plan of random splits and states."""
    numbers, own = Random(seed), graph()
    splits = {}
    for operator in own.operators:
        factors: dict[str, int] = {}
        remaining = devices
        for dim, extent in numbers.sample(list(operator.extents.items()), len(operator.extents)):
            possible = [k for k in range(1, remaining + 1) if remaining % k == 0 and extent % k == 0]
            factors[dim] = numbers.choice(possible)
            remaining //= factors[dim]
        splits[operator.name] = factors
    return with_states(make_plan(own, devices, splits), *(numbers.choice(STATES) for _ in own.operators))


@pytest.mark.parametrize(("devices", "optimiser"), list(product((3, 4, 6), SLOTS)))
def test_plans_hold_what_the_definition_counts(devices: int, optimiser: str) -> None:
    for seed in range(20):
        plan = replace(random_state_plan(devices, seed), optimiser=optimiser)
        expected = np.zeros(3, dtype=np.int64)
        for operator in plan.graph.operators:
            layer = plan[operator.name]
            expected += counted(operator.name, dict(operator.extents), layer.splits, layer.state, SLOTS[optimiser])
        memory = replace(plan, micro_batches=1).memory
        assert (memory.weights_bytes, memory.optimiser_bytes) == (expected[0], expected[2]), seed
        # At the peak gradients may not be there yet, or not be shared out; in the update those of zero1 are, too.
        is_whole = not any(layer.state == "zero1" for layer in plan)
        assert (_at_update(plan) == expected.sum()) if is_whole else (_at_update(plan) <= expected.sum()), seed


def _at_update(plan: Plan) -> int:
    """Return what weights, gradients and the optimizer's state take when the optimizer begins."""
    memory = memory_of_layers(plan.graph, plan.layers, optimiser=plan.optimiser)
    spans = liveness.weight_spans(memory.spans.timeline, memory.weights, plan.optimiser, is_first=True, is_last=True)
    there = (span for _, span in spans if span.first <= memory.spans.timeline.update <= span.last)
    state = liveness.WEIGHTS, liveness.GRADIENTS, liveness.OPTIMISER
    return sum(int(span.size[0]) for span in there if span.of in state)


def test_ranks_send_what_the_largest_shard_has() -> None:
    for seed in range(30):
        plan = random_state_plan(6, seed)
        for operator in plan.graph.operators:
            layer, sent = plan[operator.name], {}
            for found in layer_movements(plan, operator):
                if isinstance(found, Sent) and found.purpose is Purpose.WEIGHT and found.phase is Phase.UPDATE:
                    sent[found.tensor.removeprefix("gradient of ")] = found.pairs
            expected = {}
            for read in operator.parameters:
                dims = [str(axis) for axis in read.index_map]
                count = layer.splits["b"]
                shape = tuple(operator.extents[dim] // layer.splits[dim] for dim in dims)
                if layer.state != "replicated" and count > 1 and np.prod(shape) > 1:
                    expected[read.tensor] = owners(shape, count)[1], count
            assert sent.keys() == expected.keys(), (seed, operator.name)
            for name, (points, count) in expected.items():
                assert set(sent[name].values()) == {points}
                # All devices are in a group, replicas of the computation, too.
                assert len(sent[name]) == 6 * (count - 1)


def test_shards_are_those_of_torch() -> None:
    torch = pytest.importorskip("torch")
    for extent, count in product(range(1, 40), range(1, 13)):
        whole = torch.arange(extent)
        expected = [own.tolist() for own in torch.chunk(whole, count)]
        expected += [[]] * (count - len(expected))
        assert [whole[slice(*chunk(extent, count, number))].tolist() for number in range(count)] == expected


def test_the_dim_of_shards_is_the_same_for_numbers_and_arrays() -> None:
    numbers = Random(1)
    for _ in range(200):
        rank, num = numbers.randint(1, 3), 5
        parts = [np.array([numbers.randint(1, 40) for _ in range(num)]) for _ in range(rank)]
        counts = np.array([numbers.randint(1, 60) for _ in range(num)])
        found = shard_dims(parts, counts).tolist()
        for k in range(num):
            shape = tuple(int(part[k]) for part in parts)
            assert found[k] == shard_dims(shape, int(counts[k]))
            if np.prod(shape) == 1 or counts[k] == 1:
                assert found[k] == -1
                continue
            _, points = owners(shape, int(counts[k]))
            along = found[k]
            assert -(-shape[along] // counts[k]) * np.prod(shape) // shape[along] == points


def test_forty_eight_replicas_keep_a_forty_eighth() -> None:
    """Extents that have no divisor 3."""
    graph = pase.load("gpt", batch=48, arguments={"layers": 2, "model_width": 512, "heads": 8, "steps": 4})
    whole = pase.evaluate(graph, "data_parallel", 48, optimiser="adamw")
    plan = with_states(whole, "zero1")
    shared = [operator.name for operator in graph.operators if any(read.shared for read in operator.parameters)]
    assert shared == ["tokens", "fc"]
    kept = 2 * FLOAT * 50257 * 512
    ratio = (plan.memory.optimiser_bytes - kept) / (whole.memory.optimiser_bytes - kept)
    assert 1 / 48 <= ratio < 1.05 / 48


def test_the_rule_of_an_optimiser_keeps_as_much() -> None:
    """Adafactor's means of rows and columns are those of the shard."""
    plan = replace(with_states(make_plan(graph(), 4, {"fc1": {"b": 4}}), "zero1"), optimiser="adafactor")
    # 18 x 10 over 4: 5 rows, of which means over both dims; a bias of 18: 5. Others are replicated: nobody shares.
    rows = make_rule("adafactor", {}).slots((18, 10))
    assert sorted(rows.values()) == [(0,), (1,)]
    others = (7 + 18) + (15 + 7) + 15
    assert plan.memory.optimiser_bytes == FLOAT * ((5 + 10) + 5 + others)
