"""Cost model `step` where sums go in one ring: hop by hop as docs/method.md has it, searches against all strategies."""

from dataclasses import replace
from math import prod

import numpy as np
import pytest

from pase import load, load_machine, search
from pase.costs import cost_model, traffic_of
from pase.costs.alpha_beta import layer_members
from pase.costs.traffic import Pattern
from pase.machine import Machine, Overlap, machine_text, parse_machine
from pase.planning.problems import problem_of
from tests.networks import small_graph
from tests.simulation.machines import machine

SIZES = (2, 8)
"""Devices of a node, and of all nodes."""


def rings(flop_per_s: float = 1e9, share: float = 0.6) -> Machine:
    """Return four nodes of two devices."""
    where = machine((SIZES[0], 1e-4, 4e7), (SIZES[1], 5e-4, 3e7), flop_per_s=flop_per_s)
    return replace(where, collectives="ring", overlap=Overlap(share=share, source="a test"))


def ring_s(where: Machine, size_bytes: float, inside: int, outside: int, *, is_of_weight: bool) -> float:
    """Return the time of one of the rings that go on at once: every device is in one, devices in their order.

    inside: members that are in one node; outside: nodes of a ring. Each of k devices hands a k-th to the next,
    2 (k - 1) times; what all rings together put on a link is counted hop by hop.
    """
    k, (node, cluster) = inside * outside, where.levels
    per_node = node.num_devices // inside  # rings that a node's devices are in
    loads = {"device": 0.0, "node": 0.0}
    alpha = 0.0
    for _ in range(per_node):
        members = [(group, place) for group in range(outside) for place in range(inside)]
        for (sender, _), (receiver, _) in zip(members, [*members[1:], members[0]], strict=True):
            loads["device"] = size_bytes / k
            if sender != receiver:
                alpha = max(alpha, cluster.latency_s)
                if sender == 0:  # one node stands for all of them
                    loads["node"] += size_bytes / k
            elif k > 1:
                alpha = max(alpha, node.latency_s)
    slowest = max(loads["device"] / node.bandwidth_bytes_per_s, loads["node"] / cluster.bandwidth_bytes_per_s)
    return 2 * (k - 1) * (slowest + (0.0 if is_of_weight else alpha))


@pytest.mark.parametrize("name", ["mlp", "alexnet", "gpt"])
def test_each_sum_goes_round_hop_by_hop(name: str) -> None:
    graph = load("mlp", arguments={"batch": 8, "inputs": 16, "hidden": 32, "classes": 8, "layers": 3})
    graph = graph if name == "mlp" else small_graph(name)
    where, seen = rings(), set()
    model = cost_model("step", where, SIZES[1])
    problem = problem_of(graph, SIZES[1], where, "step")
    for vertex, operator in enumerate(problem.graph.operators):
        choices = range(problem.tables.domain_sizes[vertex])
        rows = np.array([list(problem.splits(vertex, choice).values()) for choice in choices], dtype=np.int32)
        traffic = traffic_of(problem.graph, operator, rows)
        members = layer_members(traffic, (2, 4))
        dims = list(operator.extents)
        for message, found in zip(traffic.messages, model.messages(traffic), strict=True):
            if message.pattern is not Pattern.ALL_REDUCE:
                continue
            for row in choices:
                inside, outside = (prod(int(level[row, dims.index(dim)]) for dim in message.over) for level in members)
                size = float(message.size_bytes[row])
                expected = ring_s(where, size, inside, outside, is_of_weight=message.is_of_weight) if size else 0.0
                assert found[row] == pytest.approx(message.times * expected, rel=1e-12)
                seen.add((inside, outside, message.is_of_weight, message.ends_on_edge))
    assert {(2, 4, True, False), (2, 1, False, True)} <= seen


def test_without_overlap_and_kernels_it_is_the_cost_model_ring() -> None:
    where = replace(load_machine("v100"), collectives="ring", overlap=None, kernels=None)
    for name in ("alexnet", "gpt"):
        step, ring = (search(small_graph(name), 16, machine=where, cost_model=model) for model in ("step", "ring"))
        assert step.total_cost == pytest.approx(ring.total_cost, rel=1e-9)


def test_a_machine_file_says_it() -> None:
    text = machine_text(rings())
    assert 'collectives = "ring"' in text
    assert parse_machine(text, source="x.toml") == rings()
    assert "collectives" not in machine_text(load_machine("v100"))
