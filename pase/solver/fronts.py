"""Fronts: of entries with a cost and a weight, those that no other one of their group beats in both."""

import numpy as np
from numpy.typing import NDArray

from pase.tables.cost_tables import FloatArray

Numbers = NDArray[np.intp]

MAX_ENTRIES = 1 << 19
"""Entries that are looked at together: with more, the caller asks for less."""


class TooManyError(Exception):
    """There are too many entries."""


def front(group: Numbers, cost: FloatArray, weight: FloatArray, slack: float) -> Numbers:
    """Return the numbers of a front for each group, by group and then by weight.

    Every entry has one in its group's front that is no heavier, and dearer by less than `slack`, if at all.
    """
    order = np.lexsort((cost, weight, group))
    if len(order) < 2:
        return order
    group, cost = group[order], cost[order]
    ranked = np.argsort(cost, kind="stable")
    rank = np.empty(len(cost), dtype=np.int64)
    rank[ranked] = np.arange(len(cost))
    is_first = np.ones(len(cost), dtype=bool)
    is_first[1:] = group[1:] != group[:-1]
    # Ranks are lower for every later group, so that one running minimum serves all of them.
    shift = (np.cumsum(is_first) - 1) * len(cost)
    least = np.minimum.accumulate(rank - shift)
    best = cost[ranked[least[:-1] + shift[:-1]]]  # of the lighter ones, in the group of the one before
    keep = is_first
    keep[1:] |= cost[1:] < best
    order, group, cost = order[keep], group[keep], cost[keep]
    if slack > 0:
        # Along a front cost falls as weight rises: of those in one step of cost the first is the lightest.
        step = np.floor(cost / slack)
        keep = np.ones(len(order), dtype=bool)
        keep[1:] = (step[1:] != step[:-1]) | (group[1:] != group[:-1])
        order = order[keep]
    return order


def runs(keys: Numbers, num_keys: int) -> tuple[Numbers, Numbers]:
    """Return where the run of each key starts among sorted keys, and its length; [num_keys] each."""
    count = np.bincount(keys, minlength=num_keys)
    return np.cumsum(count) - count, count


def expanded(keys: Numbers, start: Numbers, count: Numbers) -> tuple[Numbers, Numbers]:
    """Return, for each entry of each key's run, the key's position and the entry; TooManyError beyond MAX_ENTRIES."""
    times = count[keys]
    total = int(times.sum())
    if total > MAX_ENTRIES:
        raise TooManyError
    position = np.repeat(np.arange(len(keys)), times)
    first = np.repeat(start[keys] - (np.cumsum(times) - times), times)
    return position, first + np.arange(total)
