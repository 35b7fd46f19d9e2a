"""Predicted bytes against sets of elements, closed forms and small cases written out."""

from collections import Counter
from dataclasses import replace
from itertools import product
from math import prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pase.costs import edge_layouts, transfer_bytes
from pase.graph import Graph
from pase.planning.plan import Plan
from pase.sharding.edges import shared_weights
from pase.sharding.layouts import DeviceMesh
from pase.sharding.reshard import all_reduce_pairs
from pase.sharding.traffic import Phase, flows
from tests.moved import edge_overlaps, moved
from tests.networks import SMALL, small_graph, small_plan
from tests.runtime.networks import small
from tests.runtime.plans import make_plan, random_plan


def edge_flows(plan: Plan, phase: Phase) -> dict[tuple[str, str], int]:
    return {
        (flow.movement.producer, flow.movement.consumer): flow.total_bytes
        for flow in flows(plan)
        if flow.is_of_edge and flow.movement.phase is phase
    }


@pytest.mark.parametrize("graph", [small("mlp"), small("rnnlm")], ids=lambda g: g.name)
@pytest.mark.parametrize(("num_devices", "seed"), [(4, 0), (6, 1), (8, 2), (12, 3)])
def test_edges_move_the_elements_that_their_ends_lack(graph: Graph, num_devices: int, seed: int) -> None:
    plan = random_plan(graph, num_devices, seed)
    splits = [layer.splits for layer in plan.layers]
    expected = moved(graph, edge_overlaps(graph, splits, num_devices), [layer.devices for layer in plan.layers])
    forward, backward = edge_flows(plan, Phase.FORWARD), edge_flows(plan, Phase.BACKWARD)
    for edge, (fetched, returned) in zip(graph.edges, expected, strict=True):
        ends = edge.producer, edge.consumer
        assert forward.get(ends, 0) == 4 * fetched.sum()
        assert backward.get(ends, 0) == 4 * returned.sum()


@pytest.mark.parametrize("name", ["densenet121", "alexnet", "gpt"])
@pytest.mark.parametrize(("num_devices", "seed"), [(6, 1), (8, 2)])
def test_no_edge_costs_more_than_the_program_moves_on_its_busiest_device(
    name: str, num_devices: int, seed: int
) -> None:
    plan = random_plan(small_graph(name), num_devices, seed)
    received: Counter[tuple[str, str, Phase, int]] = Counter()
    for flow in flows(plan):
        for (_, receiver), size in flow.bytes_by_pair.items():
            received[flow.tensor, flow.movement.consumer, flow.movement.phase, receiver] += size
    rows = {layer.name: np.array([list(layer.splits.values())], dtype=np.int32) for layer in plan.layers}
    total = 0.0
    for edge in plan.graph.edges:
        read = plan.graph[edge.consumer].reads[edge.input]
        busiest = [
            max(received[read.tensor, edge.consumer, phase, device] for device in range(num_devices))
            for phase in (Phase.FORWARD, Phase.BACKWARD)
        ]
        layouts = edge_layouts(plan.graph, edge, rows[edge.producer], rows[edge.consumer])
        costed = transfer_bytes(plan.graph, edge, *layouts)
        assert costed.forward.item() + costed.backward.item() <= sum(busiest), edge
        total += costed.forward.item()
    assert total > 0
    for weight in shared_weights(plan.graph):
        shared = transfer_bytes(
            plan.graph, weight, *edge_layouts(plan.graph, weight, rows[weight.producer], rows[weight.consumer])
        )
        tensor = plan.graph[weight.consumer].reads[weight.input].shared
        busiest = [
            max(received[tensor, weight.consumer, phase, device] for device in range(num_devices))
            for phase in (Phase.FORWARD, Phase.BACKWARD)
        ]
        assert shared.forward.item() + shared.backward.item() <= sum(busiest), weight


@pytest.mark.parametrize("name", ["gpt", "densenet121"])
def test_repeated_layers_move_what_each_would_alone(name: str) -> None:
    """What the first of equal layers moves is worked out once; with every layer made another, nothing changes."""
    plan = small_plan(name, 8)
    others = tuple(
        replace(operator, attributes=(*operator.attributes, ("mark", number)))
        for number, operator in enumerate(plan.graph.operators)
    )
    apart = replace(plan, graph=replace(plan.graph, operators=others))
    assert len({replace(operator, name="") for operator in plan.graph.operators}) < len(plan.layers)
    assert flows(plan) == flows(apart)


@settings(max_examples=40)
@given(st.lists(st.integers(1, 3), min_size=1, max_size=3), st.data(), st.sampled_from([1, 7, 1023, 1024, 5000]))
def test_an_all_reduce_moves_twice_what_the_others_have(sizes: list[int], data: st.DataObject, points: int) -> None:
    axes = tuple((f"a{i}", size) for i, size in enumerate(sizes))
    over = data.draw(st.lists(st.sampled_from([name for name, _ in axes]), unique=True))
    count = prod(sizes)
    devices = tuple(data.draw(st.permutations(range(count))))
    pairs = all_reduce_pairs(DeviceMesh(axes, devices), over, dict.fromkeys(devices, points))
    group = prod(size for name, size in axes if name in over)
    assert sum(pairs.values()) == 2 * (group - 1) * points * (count // group)
    # Only devices whose other coordinates are the same take part.
    place = dict(zip(devices, product(*map(range, sizes)), strict=True))
    fixed = [i for i, (name, _) in enumerate(axes) if name not in over]
    assert all(sender != receiver for sender, receiver in pairs)
    assert all(place[a][i] == place[b][i] for a, b in pairs for i in fixed)
    # Every device gets what it gives: sums are of one size.
    given_, got = np.zeros(count, int), np.zeros(count, int)
    for (sender, receiver), size in pairs.items():
        given_[sender] += size
        got[receiver] += size
    np.testing.assert_array_equal(given_, got)


def test_a_layer_of_each_kind_of_split() -> None:
    """fc1 with b = 2, n = 2, c = 3 on 12 devices: 24 x 24 outputs of 12 inputs."""
    plan = make_plan(small("mlp"), 12, {"fc1": {"b": 2, "n": 2, "c": 3}})
    own = {flow.tensor: flow for flow in flows(plan) if not flow.is_of_edge and flow.movement.consumer == "fc1"}
    # A part of y [12, 12] is added up over the 3 parts of c; of the weight's gradient [12, 4] over the 2 of b.
    assert own["y"].total_bytes == 4 * 4 * 2 * (3 - 1) * (12 * 12)
    assert own["gradient of w"].total_bytes == 6 * 4 * 2 * (2 - 1) * (12 * 4)
    assert own["gradient of w"].movement.phase is Phase.UPDATE
    assert "gradient of x" not in own


@pytest.mark.parametrize("name", SMALL)
def test_every_network_is_laid_out(name: str) -> None:
    """Whatever the kinds of its layers: with all devices on the batch, nothing but sums moves between like layers."""
    graph = small_graph(name)
    splits = {operator.name: {"b": 4} for operator in graph.operators if "b" in operator.extents}
    found = flows(make_plan(graph, 4, splits))
    updated = {flow.movement.consumer for flow in found if flow.movement.phase is Phase.UPDATE}
    shared = {operator.name for operator in graph.operators for access in operator.parameters if access.shared}
    trained = {operator.name for operator in graph.operators if operator.parameters and operator.name in splits}
    assert trained - shared <= updated
    assert all(a != b for flow in found for a, b in flow.bytes_by_pair)


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("num_devices", [4, 8])
def test_every_network_is_laid_out_under_any_strategy(name: str, num_devices: int) -> None:
    graph = small_graph(name)
    for seed in range(2):
        for flow in flows(random_plan(graph, num_devices, seed)):
            assert flow.total_bytes > 0
            assert all(0 <= a < num_devices and 0 <= b < num_devices for a, b in flow.bytes_by_pair)
