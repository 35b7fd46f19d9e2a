"""The plan's placement beside the paper's greedy one and plain order, and the levels that they cross."""

from itertools import product

import numpy as np
import pytest

from pase.analysis.differences import (
    PLACEMENTS,
    PlacementTraffic,
    bytes_by_level,
    compare_placements,
    greedy_order,
    placed_anew,
    plain_order,
)
from pase.graph import Graph
from pase.machine import load_machine
from pase.models import build
from pase.planning.plan import Plan
from pase.planning.planner import search
from tests.moved import edge_overlaps
from tests.networks import small_graph
from tests.runtime.networks import small
from tests.runtime.plans import random_plan


def greedy_by_elements(graph: Graph, plan: Plan) -> list[list[int]]:
    """The greedy assignment on counted sets of elements: the largest overlap of a part and a device first."""
    p = plan.num_devices
    common = edge_overlaps(graph, [layer.splits for layer in plan.layers], p)
    placed: dict[str, list[int]] = {}
    for operator in graph.operators:
        gain = np.zeros((p, p))
        for item in common:
            if item.edge.consumer == operator.name:
                for part, source in product(range(p), range(p)):
                    gain[part, placed[item.edge.producer][source]] += item.common[part, source]
        where: dict[int, int] = {}
        for part, device in sorted(product(range(p), range(p)), key=lambda pair: (-gain[pair], pair)):
            if part not in where and device not in where.values():
                where[part] = device
        placed[operator.name] = [where[part] for part in range(p)]
    return list(placed.values())


@pytest.mark.parametrize("name", ["mlp", "rnnlm"])
@pytest.mark.parametrize(("num_devices", "seed"), [(6, 1), (8, 2)])
def test_the_greedy_assignment_takes_the_largest_overlaps(name: str, num_devices: int, seed: int) -> None:
    plan = random_plan(small(name), num_devices, seed)
    assert [list(devices) for devices in greedy_order(plan)] == greedy_by_elements(plan.graph, plan)


@pytest.mark.parametrize("name", ["alexnet", "transformer"])
def test_every_placement_gives_every_device_one_part(name: str) -> None:
    plan = random_plan(small_graph(name), 8, 0)
    for place in PLACEMENTS.values():
        assert all(sorted(devices) == list(range(8)) for devices in place(plan))


def edge_bytes(placement: PlacementTraffic, *, phases: tuple[str, ...] = ("forward", "backward")) -> int:
    return sum(flow.total_bytes for flow in placement.flows if flow.is_of_edge and flow.movement.phase in phases)


def test_alexnet_on_32_devices() -> None:
    """Forward, as docs/method.md has it: 34.3 MB where the plain order of devices moves 54.8 MB."""
    plan = search(build("alexnet"), 32)
    ours, greedy, plain = compare_placements(plan)
    assert (ours.name, greedy.name, plain.name) == ("plan", "greedy", "device order")
    assert edge_bytes(ours, phases=("forward",)) / 1e6 == pytest.approx(34.3, abs=0.05)
    assert edge_bytes(plain, phases=("forward",)) / 1e6 == pytest.approx(54.8, abs=0.05)
    assert edge_bytes(ours) <= edge_bytes(greedy) <= edge_bytes(plain)
    # Sums within a layer are as large wherever its parts lie.
    inner = {sum(f.total_bytes for f in placement.flows if not f.is_of_edge) for placement in (ours, greedy, plain)}
    assert len(inner) == 1


def test_what_crosses_nodes_is_told_apart() -> None:
    levels = load_machine("1080ti").levels_spanned(32)
    pairs = {(0, 1): 1, (7, 0): 10, (7, 8): 100, (31, 24): 1000, (31, 0): 10000}
    assert [level.name for level in levels] == ["node", "cluster"]
    assert bytes_by_level(pairs, levels) == (1011, 10100)


def test_a_plan_placed_anew_is_the_same_but_for_its_devices() -> None:
    plan = random_plan(small("mlp"), 4, 0)
    moved = placed_anew(plan, plain_order(plan))
    assert all(layer.devices == (0, 1, 2, 3) for layer in moved.layers)
    assert [layer.splits for layer in moved.layers] == [layer.splits for layer in plan.layers]
    assert plain_order(plan) != tuple(layer.devices for layer in plan.layers)
