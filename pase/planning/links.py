"""The links between the groups of devices that have the stages of a pipeline."""

from pase.costs.collectives import Link
from pase.machine import Machine


def group_links(machine: Machine, num_devices: int, num_groups: int, chunks: int = 1) -> tuple[Link | None, ...]:
    """Return what a device has of the link before each stage, and behind the last one: none at the ends.

    Groups of devices have the stages in turns, each as many as there are chunks.
    """
    numbers = range(1, num_groups * chunks)
    between = [_link(machine, num_devices, num_devices // num_groups, number % num_groups) for number in numbers]
    return (None, *between, None)


def _link(machine: Machine, num_devices: int, group: int, number: int) -> Link:
    """Return what each device of a group has of the link to the group before, of the first to the last one."""
    device, behind = number * group, 1
    other = (device or num_devices) - 1
    for level in machine.levels_for(num_devices):
        size = level.num_devices or num_devices
        if other // size == device // size:
            break
        behind = size
    link = Link(latency_s=level.latency_s, s_per_byte=1 / level.bandwidth_bytes_per_s)
    return link.shared(min(group, behind))
