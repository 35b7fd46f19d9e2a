"""`connected`: items in groups of those that pairs of them connect."""

from collections.abc import Hashable, Iterable
from typing import TypeVar

T = TypeVar("T", bound=Hashable)


def connected(items: Iterable[T], pairs: Iterable[tuple[T, T]]) -> list[list[T]]:
    """Return the items in groups of those that pairs connect, directly or by others; items and groups in their order.

    items: each one once. pairs: of them.
    """
    above = {item: item for item in items}

    def root(item: T) -> T:
        while above[item] != item:
            above[item] = above[above[item]]
            item = above[item]
        return item

    for one, other in pairs:
        above[root(one)] = root(other)
    found: dict[T, list[T]] = {}
    for item in above:
        found.setdefault(root(item), []).append(item)
    return [*found.values()]
