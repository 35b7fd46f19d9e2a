"""Neighbours share a node first: what crosses nodes, counted from the boxes, under every order of the digits."""

from collections.abc import Sequence
from itertools import permutations
from math import prod

import numpy as np
import pytest

from pase.analysis.differences import bytes_by_level, placed_anew
from pase.machine import Level
from pase.models import build
from pase.planning.plan import Plan
from pase.planning.planner import search
from pase.sharding.placement import choose_order, place
from pase.sharding.shards import prime_factors
from pase.sharding.traffic import flows
from tests.networks import small_graph
from tests.runtime.plans import random_plan

Devices = Sequence[tuple[int, ...]]


def levels(*sizes: int) -> tuple[Level, ...]:
    return tuple(
        Level(name=f"level{i}", num_devices=size, latency_s=0.0, bandwidth_bytes_per_s=1.0, source="made up")
        for i, size in enumerate((*sizes, 0))
    )


def crossing_bytes(plan: Plan, devices: Devices, *sizes: int) -> int:
    """Bytes that go beyond the groups of the outermost size."""
    found = flows(placed_anew(plan, devices))
    return sum(bytes_by_level(flow.bytes_by_pair, levels(*sizes))[-1] for flow in found)


def renumbered(devices: Devices, order: Sequence[int], p: int) -> Devices:
    """The devices with their digits in another order."""
    bases = prime_factors(p)
    digits = np.stack(np.unravel_index(np.arange(p), bases))
    weights = [prod(bases[j] for j in order[order.index(i) + 1 :]) for i in range(len(bases))]
    new = (digits * np.array(weights)[:, None]).sum(axis=0)
    assert sorted(new.tolist()) == list(range(p))
    return [tuple(int(new[device]) for device in of_layer) for of_layer in devices]


@pytest.mark.parametrize(("name", "p", "node"), [("rnnlm", 32, 8), ("alexnet", 32, 4), ("mlp", 16, 4)])
def test_a_searched_plan_crosses_nodes_as_little_as_any_order_of_digits(name: str, p: int, node: int) -> None:
    graph = build(name)
    plan = search(graph, p)
    splits = [layer.splits for layer in plan.layers]
    plain = place(graph, p, splits)
    ours = crossing_bytes(plan, place(graph, p, splits, group_sizes=[node]), node)
    orders = {
        tuple(sorted(order[-len(prime_factors(node)) :])): order for order in permutations(range(len(prime_factors(p))))
    }
    best = min(crossing_bytes(plan, renumbered(plain, order, p), node) for order in orders.values())
    assert ours <= 1.01 * best


def test_rnnlm_exchanges_a_fifth_less_between_nodes() -> None:
    plan = search(build("rnnlm"), 64)
    plain = place(plan.graph, 64, [layer.splits for layer in plan.layers])
    placed = [layer.devices for layer in plan.layers]
    assert crossing_bytes(plan, placed, 8) < 0.8 * crossing_bytes(plan, plain, 8)
    # It only renumbers the devices: nothing else moves.
    totals = [sum(flow.total_bytes for flow in flows(placed_anew(plan, devices))) for devices in (placed, plain)]
    assert totals[0] == totals[1]


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(("p", "sizes"), [(8, (2, 4)), (12, (3,)), (12, (6,)), (16, (2, 8))])
def test_random_strategies_never_cross_much_more(p: int, sizes: tuple[int, ...], seed: int) -> None:
    plan = random_plan(small_graph("alexnet"), p, seed)
    splits = [layer.splits for layer in plan.layers]
    placed = place(plan.graph, p, splits, group_sizes=sizes)
    assert all(sorted(devices) == list(range(p)) for devices in placed)
    plain = crossing_bytes(plan, place(plan.graph, p, splits), *sizes)
    assert crossing_bytes(plan, placed, *sizes) <= 1.02 * plain


def test_groups_that_no_digits_make_are_left_out() -> None:
    # Twelve devices in nodes of eight: no digits of 2, 2 and 3 tell eight devices apart.
    heavy = [(frozenset({0}), 100.0)]
    assert choose_order((2, 2, 3), [8], heavy, []) == (0, 1, 2)


def test_heavy_digits_go_inside() -> None:
    sums = [(frozenset({0}), 100.0), (frozenset({2}), 1.0)]
    assert choose_order((2, 2, 2), [2], sums, []) == (1, 2, 0)
    fetches = [(frozenset({1, 0}), 10.0)]
    assert choose_order((2, 2, 2), [4], [], fetches) == (2, 0, 1)
    # The outermost level first, then the one within.
    assert choose_order((2, 2, 2), [2, 4], sums, fetches) == (2, 1, 0)


def test_where_nothing_is_gained_devices_keep_their_numbers() -> None:
    alike = [(frozenset({i}), 5.0) for i in range(3)]
    assert choose_order((2, 2, 2), [2], alike, []) == (0, 1, 2)
    assert choose_order((2, 2, 2), [2], [], []) == (0, 1, 2)


def _link_bytes(digits: frozenset[int], shard: float, order: Sequence[int], bases: Sequence[int], node: int) -> float:
    """Bytes that leave the busiest node when shards are added within it first, counted from its devices' groups."""
    p = prod(bases)
    numbers = np.array(np.unravel_index(np.arange(p), [bases[i] for i in order])).T
    digit_of = {i: numbers[:, position] for position, i in enumerate(order)}
    outside = [i for i in range(len(bases)) if i not in digits]
    key = [tuple(int(digit_of[i][device]) for i in outside) for device in range(p)]
    sent = [0.0] * (p // node)
    for group in {k: [d for d in range(p) if key[d] == k] for k in key}.values():
        nodes = {device // node for device in group}
        for where in nodes:
            members = sum(device // node == where for device in group)
            # Each member has shard / members of the node's sum, and all-reduces it with the other nodes.
            sent[where] += members * 2 * (len(nodes) - 1) / len(nodes) * shard / members
    return max(sent)


@pytest.mark.parametrize("seed", range(6))
def test_sums_by_level_cross_as_little_as_any_order_of_digits(seed: int) -> None:
    rng = np.random.default_rng(seed)
    bases, node = (2, 2, 2, 2, 2), 8
    sums = [(frozenset(np.flatnonzero(rng.random(5) < 0.5).tolist()), float(rng.integers(1, 1000))) for _ in range(4)]

    def crossing(order: Sequence[int]) -> float:
        return sum(_link_bytes(*term, order, bases, node) for term in sums)

    ours = choose_order(bases, [node], sums, [], by_level=True)
    best = min(crossing(order) for order in permutations(range(5)))
    assert crossing(ours) <= best / 0.99 + 1e-9
