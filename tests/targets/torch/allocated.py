"""What PyTorch allocates in a step."""

from typing import Any

import torch
from torch._C._profiler import _EventType


def most_allocated(step: Any) -> int:
    """The most that a step allocates, in bytes, without what gloo copies within a collective, which NCCL does not."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiled:
        step()
    assert profiled.profiler is not None
    changes: list[tuple[int, int, int]] = []

    def walk(events: Any, is_of_gloo: bool) -> None:
        for event in events:
            if event.tag == _EventType.Allocation:
                own = event.extra_fields
                changes.append((event.start_time_ns, own.ptr, 0 if is_of_gloo else own.alloc_size))
            walk(event.children, is_of_gloo or event.name.startswith("gloo:"))

    walk(profiled.profiler.kineto_results.experimental_event_tree(), False)
    live: dict[int, int] = {}
    total = most = 0
    for _, address, size in sorted(changes):
        # What gloo's threads free is recorded nowhere: it has ended where its address is allocated again.
        total += max(size, 0) - live.pop(address, 0)
        if size > 0:
            live[address] = size
        most = max(most, total)
    return most
