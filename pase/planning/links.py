"""The links between the groups of devices that the stages of a pipeline have."""

from pase.costs.collectives import Link
from pase.machine import Machine


def group_links(machine: Machine, num_devices: int, num_groups: int) -> tuple[Link | None, ...]:
    """Return what a device has of the link before each group of devices, and behind the last one: none at the ends."""
    between = [_link(machine, num_devices, num_devices // num_groups, number) for number in range(1, num_groups)]
    return (None, *between, None)


def _link(machine: Machine, num_devices: int, group: int, number: int) -> Link:
    """Return what each device of a group has of the link to the group before while all of them send."""
    device, behind = number * group, 1
    for level in machine.levels_for(num_devices):
        size = level.num_devices or num_devices
        if (device - 1) // size == device // size:
            break
        behind = size
    link = Link(latency_s=level.latency_s, s_per_byte=1 / level.bandwidth_bytes_per_s)
    return link.shared(min(group, behind))
