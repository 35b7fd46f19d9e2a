"""Sums: their times against formulas written out, their bytes against what a ring of every level sends."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pase.analysis.simulation.engine import Fabric, Label, Schedule, TaskGraph, run
from pase.analysis.simulation.simulation import link_bytes as bytes_of_links
from pase.analysis.simulation.step import COLLECTIVES, FabricTasks, group_members, link_bytes
from pase.sharding.layouts import DeviceMesh
from pase.sharding.reshard import all_reduce_pairs
from pase.sharding.traffic import Phase
from tests.simulation.machines import machine

LABEL = Label(producer="a", consumer="a", tensor="gradient of w", phase=Phase.UPDATE)


def summed(fabric: Fabric, groups: list[list[int]], points: int, mode: str) -> tuple[TaskGraph, Schedule]:
    network = FabricTasks(TaskGraph(), fabric)
    front: list[tuple[int, ...]] = [()] * fabric.num_devices
    for group in groups:
        COLLECTIVES[mode](network, LABEL, group, points, 4, 1, front)
    return network.tasks, run(network.tasks, fabric.links, fabric.num_devices)


@pytest.mark.parametrize("points", [4, 4096, 4 * 10**6])
def test_within_one_level_the_time_is_that_of_the_best_algorithm(points: int) -> None:
    """8 devices at α = 1 µs and 1 GB/s: doubling for the short; the long is halved between 4 of them first."""
    alpha, beta, size = 1e-6, 1e-9, 4 * points
    best = min(3 * (alpha + size * beta), (2 * 2 + 1) * alpha + (2 * 3 / 4 + 1 / 4) * size * beta)
    _, schedule = summed(Fabric.of(machine((0, alpha, 1 / beta)), 8), [list(range(8))], points, "hierarchical")
    assert schedule.step_time_s == pytest.approx(best)


def test_across_nodes_each_level_carries_a_share() -> None:
    """A vector of 4 MB over two nodes of four: 2 · 3/4 of it within them, 2 · 1/2 of it over each node's link."""
    fabric = Fabric.of(machine((4, 0.0, 1e9), (0, 0.0, 0.5e9)), 8)
    graph, schedule = summed(fabric, [list(range(8))], 10**6, "hierarchical")
    size = 4e6
    sizes = bytes_of_links(graph, fabric)
    ports = [sizes[i] for i, link in enumerate(fabric.links) if link.level == 0]
    nodes = [sizes[i] for i, link in enumerate(fabric.links) if link.level == 1]
    assert ports == pytest.approx([1.5 * size + 1.0 * size / 4] * 16)
    assert nodes == pytest.approx([size] * 4)
    assert schedule.step_time_s == pytest.approx(1.5 * size / 1e9 + size / 0.5e9)


def test_groups_across_nodes_share_the_links_of_their_nodes() -> None:
    """Four pairs, each of one device in either node: their sums go over the same two links, one after the other."""
    fabric = Fabric.of(machine((4, 0.0, 1e9), (0, 0.0, 0.5e9)), 8)
    one = summed(fabric, [[0, 4]], 10**6, "hierarchical")[1].step_time_s
    four = summed(fabric, [[i, i + 4] for i in range(4)], 10**6, "hierarchical")[1].step_time_s
    assert one == pytest.approx(4e6 / 0.5e9)
    assert four == pytest.approx(4 * one)
    within = summed(fabric, [[0, 1], [2, 3], [4, 5], [6, 7]], 10**6, "hierarchical")[1].step_time_s
    assert within == pytest.approx(4e6 / 1e9)


@pytest.mark.parametrize("group", [[0, 1, 2, 3], [2, 0, 3, 1]])
def test_in_a_ring_every_link_on_the_way_carries_as_much(group: list[int]) -> None:
    """Two nodes of two: of 4 MB 2 · 3/4 go over each port, and over the link of each node, which is slower, once."""
    fabric = Fabric.of(machine((2, 1e-4, 1e9), (0, 1e-3, 0.5e9)), 4)
    graph, schedule = summed(fabric, [group], 10**6, "ring")
    assert bytes_of_links(graph, fabric) == pytest.approx([6e6] * len(fabric.links))
    assert schedule.step_time_s == pytest.approx(6 * 1e-3 + 6e6 / 0.5e9)


def test_rings_that_cross_a_link_share_it_and_those_within_a_node_do_not_touch_it() -> None:
    fabric = Fabric.of(machine((2, 1e-4, 1e9), (0, 1e-3, 0.5e9)), 4)
    across = summed(fabric, [[0, 2], [1, 3]], 10**6, "ring")[1].step_time_s
    assert across == pytest.approx(2 * 1e-3 + 2 * 4e6 / 0.5e9, rel=2e-3)
    graph, within = summed(fabric, [[0, 1], [2, 3]], 10**6, "ring")
    assert within.step_time_s == pytest.approx(2 * 1e-4 + 4e6 / 1e9)
    sizes = bytes_of_links(graph, fabric)
    assert all((size > 0) == (link.level == 0) for size, link in zip(sizes, fabric.links, strict=True))


def test_as_a_program_adds_two_devices_exchange_halves_twice() -> None:
    """α + half a vector to be added, α + half of the sum back."""
    fabric = Fabric.of(machine((0, 1e-3, 1e6)), 2)
    _, schedule = summed(fabric, [[0, 1]], 10**5, "program")
    assert schedule.step_time_s == pytest.approx(2 * (1e-3 + 2e5 / 1e6))


def test_as_a_program_adds_small_sums_meet_on_the_first_device() -> None:
    """Three devices send 400 bytes each through one port; then the sum goes out by it three times."""
    fabric = Fabric.of(machine((0, 1e-3, 1e6)), 4)
    graph, schedule = summed(fabric, [[2, 0, 1, 3]], 100, "program")
    assert schedule.step_time_s == pytest.approx(2 * (1e-3 + 3 * 400 / 1e6))
    assert sum(bytes_of_links(graph, fabric)[i] for i in (4, 5)) == 6 * 400


@settings(max_examples=30)
@given(st.permutations(range(8)), st.sampled_from([1, 2, 4, 8]), st.sampled_from([3, 1023, 1024, 9000]))
def test_as_a_program_adds_the_bytes_are_those_of_the_predicted_traffic(
    devices: list[int], size: int, points: int
) -> None:
    mesh = DeviceMesh((("a", 8 // size), ("b", size)), tuple(devices))
    groups = [devices[i : i + size] for i in range(0, 8, size)] if size > 1 else []
    fabric = Fabric.of(machine((4, 1e-6, 1e9), (0, 1e-6, 1e9)), 8)
    graph, _ = summed(fabric, groups, points, "program")
    sizes = bytes_of_links(graph, fabric)
    sent = [0] * 8
    for (sender, _), count in all_reduce_pairs(mesh, ["b"], dict.fromkeys(devices, points)).items():
        sent[sender] += 4 * count
    assert [sizes[2 * device] for device in range(8)] == sent


@pytest.mark.parametrize(
    ("group", "members"),
    [
        ([0, 1, 2, 3], (4, 1, 1)),
        ([0, 4], (1, 2, 1)),
        ([0, 8], (1, 1, 2)),
        ([0, 1, 4, 5, 8, 9, 12, 13], (2, 2, 2)),
        ([0, 1, 2, 4], (3, 2, 1)),
        (list(range(16)), (4, 2, 2)),
    ],
)
def test_how_a_group_lies_over_the_levels(group: list[int], members: tuple[int, ...]) -> None:
    fabric = Fabric.of(machine((4, 0.0, 1e9), (8, 0.0, 1e9), (0, 0.0, 1e9)), 16)
    assert group_members(fabric, group) == members


def test_no_level_beyond_the_last_with_several_members_carries_anything() -> None:
    assert link_bytes(8.0, (2, 2, 1)) == (8.0 + 4.0, 8.0, 0.0)
    assert link_bytes(8.0, (1, 1, 2)) == (8.0, 8.0, 8.0)
