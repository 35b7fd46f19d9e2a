"""Levels as placed, device by device: who takes part in what, who fetches what from whom, counted from device lists.

Nothing of `pase.costs` or `pase.planning` counts here; plans are searched, and costed in the last part, where times are
worked out by hand.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import combinations, pairwise
from math import prod

import numpy as np
import pytest

from pase import Plan, search
from pase.analysis.simulation.pipeline import simulate_stages
from pase.costs import cost_model
from pase.graph import Builder, Graph
from pase.graph.operators import add_parameter, dense, elementwise
from pase.machine import Machine
from pase.planning.placing import placed_axes
from pase.planning.steps import plan_layers, total_cost
from pase.sharding.edges import edge_sides, table_edges
from pase.sharding.levels import group_members, placed_overlap
from pase.sharding.placement import place
from pase.sharding.shards import components
from tests.moved import holdings, overlaps, sizes
from tests.networks import SMALL, small_graph, whole_splits
from tests.runtime.plans import random_plan
from tests.simulation.machines import machine

A1, B1, A2, B2, A3, B3 = 1e-6, 1e-11, 1e-5, 1e-10, 5e-5, 1e-9


def _machine(*sizes: int) -> Machine:
    """Levels of so many devices, each ten times slower than the one before, and one around them."""
    figures = [(A1, 1 / B1), (A2, 1 / B2), (A3, 1 / B3)]
    return machine(*((size, *of) for size, of in zip((*sizes, 0), figures, strict=False)), flop_per_s=1e12)


def _fanouts(p: int, *sizes: int) -> tuple[int, ...]:
    return tuple(outer // inner for inner, outer in pairwise((1, *sizes, p)))


# -- groups


def _members(
    extents: Mapping[str, int], splits: Mapping[str, int], devices: Sequence[int], over: set[str], bounds: Sequence[int]
) -> list[int]:
    """For each level, into how many groups of the level before a group of those that communicate falls, at most."""
    counts = [splits[dim] for dim in extents]
    groups = defaultdict(set)
    for part, device in enumerate(devices):
        *index, replica = np.unravel_index(part, (*counts, len(devices) // prod(counts)))
        others = (int(i) for dim, i in zip(extents, index, strict=True) if dim not in over)
        groups[*others, int(replica)].add(device)
    found = []
    for inner, outer in pairwise(bounds):
        nodes = [
            Counter(node * inner // outer for node in {device // inner for device in own}) for own in groups.values()
        ]
        found.append(max(max(count.values()) for count in nodes))
    return found


def _check_groups(plan: Plan, *sizes: int) -> int:
    """Compare all groups of all layers; return how many were compared."""
    count, bounds = 0, (1, *sizes, plan.num_devices)
    for layer in plan:
        axes = placed_axes(layer.splits, layer.devices)
        split = [dim for dim, factor in layer.splits.items() if factor > 1]
        for over in (set(some) for k in range(1, len(split) + 1) for some in combinations(split, k)):
            found = group_members(axes, over, _fanouts(plan.num_devices, *sizes)).tolist()
            assert found == _members(layer.dims, layer.splits, layer.devices, over, bounds), (layer.name, over)
            count += 1
    return count


# -- edges


def _reach(
    lacks: np.ndarray[tuple[int], np.dtype[np.float64]],
    common: np.ndarray[tuple[int, int], np.dtype[np.float64]],
    part_of: Sequence[int],
    has: Sequence[int],
    sizes_of_groups: Sequence[int],
) -> tuple[float, list[int]]:
    """What the device fetches that fetches most, and from how many devices of each level, each part from the nearest.

    lacks: [devices] elements. common: [devices, devices] elements that one needs and another has. part_of: [devices]
    equal for those that have the same. has: those that have the part that a device has itself.
    """
    furthest: tuple[float, list[int]] = 0.0, [0] * len(sizes_of_groups)
    for device in np.flatnonzero(lacks == lacks.max()).tolist():
        nearest: dict[int, int] = {}
        for other in np.flatnonzero(common[device] > 0).tolist():
            if part_of[other] == has[device]:
                continue
            level = next(i for i, size in enumerate(sizes_of_groups) if other // size == device // size)
            nearest[part_of[other]] = min(level, nearest.get(part_of[other], level))
        counts = Counter(nearest.values())
        furthest = max(furthest, (float(lacks[device]), [counts[i] for i in reversed(range(len(sizes_of_groups)))]))
    return furthest[0], furthest[1][::-1]


def _check_edges(plan: Plan, *sizes_of_groups: int) -> int:
    """Compare all edges; return how many were compared."""
    p, graph = plan.num_devices, plan.graph
    fanouts, bounds = _fanouts(p, *sizes_of_groups), (*sizes_of_groups, p)
    known: set[object] = set()
    edges = table_edges(graph)
    for edge in edges:
        (producer, write), (consumer, read) = edge_sides(graph, edge)
        ends = [(plan[op.name], op, access) for op, access in ((producer, write), (consumer, read))]
        key = tuple((repr(op.extents), access, repr(layer.splits), layer.devices) for layer, op, access in ends)
        if key in known:
            continue
        known.add(key)
        own = [holdings(op.extents, access, layer.splits, p) for layer, op, access in ends]
        where = [np.argsort(layer.devices) for layer, _, _ in ends]
        # [devices, devices] elements that the consumer's part of one and the producer's part of another have in common.
        common = overlaps(*own)[np.ix_(where[1], where[0])]
        held, needed = sizes(own[0])[where[0]], sizes(own[1])[where[1]]
        kept = common.diagonal()
        numbers = [
            np.unique(np.concatenate(side.owned, axis=1), axis=0, return_inverse=True)[1].reshape(-1)[at].tolist()
            for side, at in zip(own, where, strict=True)
        ]
        axes = [placed_axes(layer.splits, layer.devices) for layer, _, _ in ends]
        parts = [components(access, op.extents) for _, op, access in ends]
        found = placed_overlap(parts[0], axes[0], parts[1], axes[1], fanouts)
        forward = _reach(needed - kept, common, numbers[0], numbers[0], bounds)
        backward = _reach(held - kept, common.T, numbers[1], numbers[1], bounds)
        ways = (
            (found.needed_forward - found.kept_forward, found.reached_forward, found.messages_forward),
            (found.needed_backward - found.kept_backward, found.reached_backward, found.messages_backward),
        )
        for (lacks, reached, messages), (most, senders) in zip(ways, (forward, backward), strict=True):
            assert reached is not None
            assert (lacks.item(), np.diff([1, *reached[0, 0]]).tolist()) == (most, senders), edge
            assert messages.item() == sum(senders)
        assert (found.produced.item(), found.consumed.item()) == (held.max(), needed.max())
    return len(edges)


@pytest.mark.parametrize(
    ("name", "p", "sizes_of_groups"),
    [("transformer", 8, (2, 4)), ("alexnet", 12, (3,)), ("inception_v3", 16, (4, 8)), ("gpt", 48, (8,))],
)
def test_groups_and_fetches_are_those_of_the_devices(name: str, p: int, sizes_of_groups: tuple[int, ...]) -> None:
    plan = random_plan(small_graph(name), p, 0)
    assert _check_groups(plan, *sizes_of_groups) > len(plan)
    assert _check_edges(plan, *sizes_of_groups) >= len(plan) - 1


@pytest.mark.full
@pytest.mark.parametrize("p", [16, 64, 96, 256])
@pytest.mark.parametrize("name", SMALL)
def test_groups_and_fetches_of_plans_are_those_of_the_devices(name: str, p: int) -> None:
    plan = search(small_graph(name), p, machine=_machine(8), cost_model="alpha_beta", time_limit_s=20)
    _check_groups(plan, 8)
    assert _check_edges(plan, 8) > 0


def test_devices_that_are_no_digits_are_counted_too() -> None:
    """A person may give any devices: pairs of which one lies in a node and three do not."""
    plan = random_plan(small_graph("mlp"), 8, 3)
    rng = np.random.default_rng(0)
    for _ in range(5):
        layers = tuple(replace(layer, devices=tuple(rng.permutation(8).tolist())) for layer in plan)
        moved = replace(plan, layers=layers)
        assert _check_groups(moved, 2, 4) > 0
        assert _check_edges(moved, 2, 4) > 0


# -- what a step costs between devices


def test_a_sum_between_nodes_is_costed_between_nodes() -> None:
    net = Builder("one product")
    net.add(dense, "fc", net.input((16, 64)), out=(("n", 32),), bias=False)
    graph, n = net.build(), 4 * 16 * 32
    splits = whole_splits(graph, {"fc": {"c": 2}})
    model = cost_model("alpha_beta", _machine(2), 4)
    times = []
    # Halves of c, each twice: with the halves in one node, then each half in a node of its own.
    for devices in ((0, 2, 1, 3), (0, 1, 2, 3)):
        (layer,) = plan_layers(graph, 4, model, splits, [devices], as_placed=True)
        times.append(layer.communication_cost)
    assert times == pytest.approx([A1 + n * B1, A2 + 2 * n * B2], rel=1e-12)


def test_an_edge_between_nodes_is_costed_between_nodes() -> None:
    net = Builder("halves")
    x = net.add(add_parameter, "rows", net.input((16, 64)), dims=("b", "d"), over=("d",))
    net.add(elementwise, "columns", x, dims=("b", "d"), function="relu")
    graph, n = net.build(), 4 * 16 * 64
    splits = whole_splits(graph, {"rows": {"b": 2}, "columns": {"d": 2}})
    model = cost_model("alpha_beta", _machine(2), 4)
    inside, between, costs = A1 + n / 4 * B1, A2 + 2 * n / 4 * B2, []
    # Both halves of the rows in each node, and of the columns; each half of the rows in a node of its own, so that what
    # is lacking of the gradient alone is near; each half of either in a node of its own.
    for rows, columns in (((0, 2, 1, 3), (0, 2, 1, 3)), ((0, 1, 2, 3), (0, 2, 1, 3)), ((0, 1, 2, 3), (0, 1, 2, 3))):
        layers = plan_layers(graph, 4, model, splits, [rows, columns], as_placed=True)
        costs.append(layers[1].transfers[0].cost)
    assert costs == pytest.approx([2 * inside, between + inside, 2 * between], rel=1e-12)


def _blocks(count: int, batch: int) -> tuple[Graph, list[dict[str, int]]]:
    """Blocks of two products, 48 parts of the batch and a pair that shares out what lies between them."""
    net, splits = Builder("blocks"), {}
    x = net.input((batch, 64))
    for number in range(count):
        x = net.add(dense, f"up{number}", x, out=(("n", 256),), bias=False)
        x = net.add(dense, f"down{number}", x, out=(("n", 64),), bias=False)
        splits |= {f"up{number}": {"b": 48, "n": 2}, f"down{number}": {"b": 48, "c": 2}}
    graph = net.build()
    return graph, whole_splits(graph, splits)


def test_a_pair_that_sends_most_lies_within_a_node_where_devices_are_no_power_of_two() -> None:
    # 96 devices in nodes of 8. With 9,600 examples a pair adds up more than the 48 do of the weights' gradients.
    graph, splits = _blocks(4, 9600)
    model = cost_model("alpha_beta", _machine(8), 96)
    layers = plan_layers(graph, 96, model, splits, group_sizes=[8])
    for layer in layers:
        assert all(a // 8 == b // 8 for a, b in zip(layer.devices[::2], layer.devices[1::2], strict=True)), layer.name
    # With 96 examples the sums over 48 lie inside, as costs have it, and what is costed is what is placed.
    graph, splits = _blocks(4, 96)
    layers = plan_layers(graph, 96, model, splits, group_sizes=[8])
    placed = plan_layers(graph, 96, model, splits, [layer.devices for layer in layers], as_placed=True)
    assert total_cost(placed) == pytest.approx(total_cost(layers), rel=1e-12)


@pytest.mark.parametrize("name", ["alexnet", "rnnlm", "transformer"])
def test_placing_by_cost_makes_no_step_dearer(name: str) -> None:
    plan = random_plan(small_graph(name), 16, 1)
    graph, splits = plan.graph, [layer.splits for layer in plan]
    model = cost_model("alpha_beta", _machine(4), 16)

    def cost(devices: Sequence[tuple[int, ...]]) -> float:
        return total_cost(plan_layers(graph, 16, model, splits, devices, as_placed=True))

    before = place(graph, 16, splits, group_sizes=[4], by_level=True)
    after = [layer.devices for layer in plan_layers(graph, 16, model, splits, group_sizes=[4])]
    assert cost(after) < cost(before)


def test_a_plan_s_cost_between_devices_and_its_simulated_stages_are_of_its_own_devices() -> None:
    plan = search(
        small_graph("mlp"),
        8,
        machine=_machine(2),
        cost_model="step",
        stages=2,
        micro_batches=4,
        constraints={"pin": {"*": "b=4"}},
    )
    assert plan.num_stages == 2
    found = simulate_stages(plan)
    assert found.closed_form_s == pytest.approx(plan.placed_cost, rel=1e-12)
    # Neighbours of a node change places with the devices of the other one.
    exchanged = (0, 2, 1, 3, 4, 6, 5, 7)
    far = replace(
        plan,
        layers=tuple(
            replace(layer, devices=tuple(exchanged[device] for device in layer.devices)) if number % 2 else layer
            for number, layer in enumerate(plan)
        ),
    )
    assert far.placed_cost > 1.05 * plan.placed_cost
    assert far.total_cost == plan.total_cost
    assert simulate_stages(far).closed_form_s == pytest.approx(far.placed_cost, rel=1e-12)


def test_without_levels_it_makes_no_difference_which_devices_are_near() -> None:
    plan = search(small_graph("alexnet"), 8, machine=machine((0, A2, 1 / B2), flop_per_s=1e12), cost_model="alpha_beta")
    order = np.random.default_rng(0).permutation(8)
    renamed = replace(
        plan, layers=tuple(replace(layer, devices=tuple(order[list(layer.devices)].tolist())) for layer in plan)
    )
    assert renamed.placed_cost == pytest.approx(plan.placed_cost, rel=1e-12)
    assert plan.placed_cost >= plan.total_cost * (1 - 1e-12)
