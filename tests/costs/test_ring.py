"""The `ring` cost model: sums that go round in one ring each, against the simulator's, which takes links one by one."""

from itertools import product

import numpy as np
import pytest

from pase import load
from pase.analysis.simulation.engine import Fabric, Label, TaskGraph, run
from pase.analysis.simulation.simulation import simulate
from pase.analysis.simulation.step import COLLECTIVES, FabricTasks
from pase.costs.alpha_beta import ring_all_reduce
from pase.costs.collectives import Link
from pase.planning.planner import search
from pase.sharding.layouts import device_mesh
from pase.sharding.reshard import sum_groups
from pase.sharding.traffic import Phase
from tests.networks import small_graph
from tests.simulation.machines import machine

LABEL = Label(producer="a", consumer="a", tensor="x", phase=Phase.FORWARD)


def simulated_s(groups: list[list[int]], points: int, fabric: Fabric) -> float:
    network = FabricTasks(TaskGraph(), fabric)
    front: list[tuple[int, ...]] = [()] * fabric.num_devices
    for group in groups:
        COLLECTIVES["ring"](network, LABEL, group, points, 4, 1, front)
    return run(network.tasks, fabric.links, fabric.num_devices).step_time_s


@pytest.mark.parametrize(("inside", "outside"), list(product([1, 2, 4], [1, 2, 4])))
@pytest.mark.parametrize(("inner", "outer"), [(1e9, 1e9), (1e9, 1e8), (2e8, 1e8)])
def test_rings_of_all_devices_at_once_take_as_long_as_in_the_simulator(
    inside: int, outside: int, inner: float, outer: float
) -> None:
    """Nodes of 4, of which some devices, in some nodes, are in one ring; the other devices have rings of their own."""
    p, points = 16, 10**6
    fabric = Fabric.of(machine((4, 0.0, inner), (0, 0.0, outer)), p)
    # One axis within nodes, one between them; rings lie along both, the rest of the devices in other rings.
    axes = [("outside", outside), ("node", 4 // outside), ("inside", inside), ("rest", 4 // inside)]
    groups = sum_groups(device_mesh("layer", axes, p, list(range(p))), ["outside", "inside"])
    links = [Link(latency_s=0.0, s_per_byte=1 / inner), Link(latency_s=0.0, s_per_byte=4 / outer)]
    found = ring_all_reduce(np.array([4.0 * points]), [np.array([inside]), np.array([outside])], links)
    assert found[0] == pytest.approx(simulated_s(groups, points, fabric), rel=1e-9)


def test_latencies_are_those_of_the_outermost_link_once_a_hand_over() -> None:
    links = [Link(latency_s=1.0, s_per_byte=0.0), Link(latency_s=5.0, s_per_byte=0.0)]
    members = [np.array([4, 4, 1, 1]), np.array([1, 2, 2, 1])]
    assert ring_all_reduce(np.array([8.0, 8.0, 8.0, 8.0]), members, links).tolist() == [6.0, 70.0, 10.0, 0.0]
    assert ring_all_reduce(np.array([0.0]), [np.array([4])], links[:1]).tolist() == [0.0]


def test_gradients_of_weights_have_no_latency_of_their_own() -> None:
    """Data parallelism on machines with and without α: a product's step differs by none, its loss's sum by six."""
    graph = load("mlp", arguments={"batch": 8, "inputs": 8, "hidden": 8, "classes": 8, "layers": 3})
    costs = []
    for latency_s in (0.0, 1.0):
        alone = machine((0, latency_s, 1e9))
        costs.append(
            {
                name: search(graph, 4, machine=alone, cost_model=name).baselines["data_parallel"]
                for name in ("program", "ring")
            }
        )
    added = {name: costs[1][name] - costs[0][name] for name in ("program", "ring")}
    # 2 · 3 hand-overs for the loss; for three layers' weights and biases as many each where they are summed alone.
    assert added["ring"] == pytest.approx(added["program"] - 6 * 6.0)


def test_where_sums_are_slow_its_strategies_are_faster_in_a_ring() -> None:
    """What `paper` finds, which knows of no levels, beside what `ring` finds: steps whose sums go round in rings."""
    graph, slow = small_graph("gpt"), machine((2, 1e-4, 5e7), (0, 5e-4, 1.25e7), flop_per_s=1e10)
    steps = {
        model: simulate(search(graph, 8, machine=slow, cost_model=model), collectives="ring").step_time_s
        for model in ("paper", "ring")
    }
    assert steps["ring"] <= steps["paper"]
