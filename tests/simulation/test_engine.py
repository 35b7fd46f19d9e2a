"""The engine on tasks written out by hand: when each one ends was worked out on paper."""

import pytest

from pase.analysis.simulation.engine import (
    Collective,
    Compute,
    Direction,
    Fabric,
    Label,
    PointToPoint,
    Schedule,
    TaskGraph,
    run,
)
from pase.analysis.simulation.simulation import Activity, critical_path
from pase.sharding.traffic import Phase
from tests.simulation.machines import machine

LABEL = Label(producer="a", consumer="b", tensor="x", phase=Phase.FORWARD)

# Nodes of two devices with ports of 10 B/s and α = 1 s; links of a node of 5 B/s and α = 2 s.
NODES = Fabric.of(machine((2, 1.0, 10.0), (0, 2.0, 5.0)), 4)


def message(fabric: Fabric, sender: int, receiver: int, size_bytes: float) -> PointToPoint:
    path = fabric.path(sender, receiver)
    return PointToPoint(LABEL, sender, receiver, path, size_bytes, path.latency_s)


def played(fabric: Fabric, graph: TaskGraph) -> Schedule:
    return run(graph, fabric.links, fabric.num_devices)


def independent(fabric: Fabric, *pairs: tuple[int, int, float]) -> list[float]:
    """Return when messages end that are all ready at the start."""
    graph = TaskGraph()
    for sender, receiver, size_bytes in pairs:
        graph.add(message(fabric, sender, receiver, size_bytes), ())
    return list(played(fabric, graph).end_s)


def test_a_message_takes_alpha_and_the_slowest_link() -> None:
    assert independent(NODES, (0, 1, 20)) == [1 + 2]
    assert independent(NODES, (0, 2, 20)) == [2 + 4]


def test_the_devices_of_a_node_share_its_link() -> None:
    """Each of two messages has its own ports; over the node's link the second one goes when the first one has gone."""
    assert independent(NODES, (0, 2, 20), (1, 3, 20)) == [6, 4 + 6]
    # Within the nodes they do not meet.
    assert independent(NODES, (0, 1, 20), (2, 3, 20)) == [3, 3]


def test_links_carry_both_directions_at_once() -> None:
    assert independent(NODES, (0, 2, 20), (2, 0, 20), (1, 0, 30), (0, 1, 30)) == [
        *(6, 6),
        # Into device 0, 20 bytes from outside hold its port for 2 s.
        *(2 + 1 + 3, 2 + 1 + 3),
    ]


def test_alpha_does_not_hold_a_link() -> None:
    assert independent(NODES, (0, 1, 20), (0, 1, 20), (0, 1, 20)) == [3, 5, 7]


def test_a_message_that_waits_does_not_keep_its_sender_from_sending() -> None:
    """1 → 0 is queued behind 2 → 0 at device 0's port, but its own way out is free after its bytes."""
    flat = Fabric.of(machine((0, 0.0, 10.0)), 4)
    graph = TaskGraph()
    first = graph.add(message(flat, 2, 0, 100), ())
    queued = graph.add(message(flat, 1, 0, 20), ())
    other = graph.add(message(flat, 1, 3, 20), ())
    ends = played(flat, graph).end_s
    assert (ends[first], ends[queued], ends[other]) == (10, 12, 4)


def test_a_message_comes_to_the_next_link_when_it_has_the_one_before() -> None:
    """0 → 1 waits for its sender; meanwhile 2 → 1 is received, though it became ready later."""
    flat = Fabric.of(machine((0, 0.0, 10.0)), 4)
    graph = TaskGraph()
    graph.add(message(flat, 0, 3, 100), ())
    late = graph.add(message(flat, 0, 1, 20), ())
    wait = graph.add(Compute(LABEL, 2, 1.0), ())
    between = graph.add(message(flat, 2, 1, 20), (wait,))
    ends = played(flat, graph).end_s
    assert (ends[between], ends[late]) == (3, 12)


def test_a_device_computes_in_the_order_of_the_program_among_what_is_ready() -> None:
    graph = TaskGraph()
    first = graph.add(Compute(LABEL, 0, 2.0), ())
    later = graph.add(Compute(LABEL, 0, 4.0), (first,))
    free = graph.add(Compute(LABEL, 0, 1.0), ())
    other = graph.add(Compute(LABEL, 1, 0.5), ())
    schedule = played(NODES, graph)
    assert [schedule.start_s[task] for task in (first, later, free, other)] == [0, 2, 6, 0]


def test_messages_do_not_keep_a_device_from_computing() -> None:
    graph = TaskGraph()
    first = graph.add(Compute(LABEL, 0, 1.0), ())
    graph.add(message(NODES, 0, 1, 90), (first,))
    graph.add(Compute(LABEL, 0, 10.0), (first,))
    assert played(NODES, graph).step_time_s == 11


def collective(devices: tuple[int, ...], size_bytes: float, duration_s: float) -> Collective:
    links = tuple(NODES.link(0, device, direction) for device in devices for direction in Direction)
    return Collective(LABEL, devices, links, (size_bytes,) * len(links), duration_s, 0.0, 0)


def test_collectives_that_share_a_member_follow_one_another() -> None:
    graph = TaskGraph()
    for devices in ((0, 1), (1, 2), (2, 3)):
        graph.add(collective(devices, 20, 5.0), ())
    # Links are held for 2 s of the 5, each one from when it is free: the second waits for that of device 1 and has that
    # of device 2 before, for which the third waits.
    assert list(played(NODES, graph).end_s) == [5, 2 + 5, 2 + 5]


def test_the_critical_path_names_what_was_waited_for() -> None:
    graph = TaskGraph()
    graph.add(message(NODES, 0, 2, 20), ())
    behind = graph.add(message(NODES, 1, 3, 20), ())
    graph.add(Compute(LABEL, 3, 3.0), (behind,))
    schedule = played(NODES, graph)
    path = critical_path(graph, schedule)
    assert [(part.activity, part.begin_s, part.end_s) for part in path] == [
        (Activity.QUEUE, 0, 4),
        (Activity.TRANSFER, 4, 8),
        (Activity.LATENCY, 8, 10),
        (Activity.FORWARD, 10, 13),
    ]
    assert [part.device for part in path] == [0, 1, 1, 3]


def test_nothing_to_do_takes_no_time() -> None:
    schedule = played(NODES, TaskGraph())
    assert schedule.step_time_s == 0
    assert critical_path(TaskGraph(), schedule) == ()


def test_tasks_in_a_circle_are_found() -> None:
    graph = TaskGraph()
    graph.add(Compute(LABEL, 0, 1.0), ())
    graph.num_awaited[0] = 1
    with pytest.raises(AssertionError, match="in a circle"):
        played(NODES, graph)


def test_the_links_of_a_fabric() -> None:
    links = NODES.links
    assert [(link.level, link.devices) for link in links if link.direction is Direction.OUT] == [
        *((0, (device, device + 1)) for device in range(4)),
        *((1, (0, 2)), (1, (2, 4))),
    ]
    for level, behind in ((0, 1), (1, 2)):
        for device in range(4):
            for direction in Direction:
                found = links[NODES.link(level, device, direction)]
                assert (found.level, found.direction) == (level, direction)
                assert found.devices == (device // behind * behind, device // behind * behind + behind)
    path = NODES.path(1, 2)
    assert [(links[i].level, links[i].direction.value, links[i].devices[0]) for i in path.links] == [
        *((0, "out", 1), (1, "out", 0), (1, "in", 2), (0, "in", 2))
    ]
