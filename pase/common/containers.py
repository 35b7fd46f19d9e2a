"""Containers: an immutable dict, and grouping of items into connected components."""

from collections.abc import Hashable, Iterable, Mapping
from typing import Any, NoReturn, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class FrozenDict(dict[K, V]):
    """An immutable dict, so that what was proven of a plan stays true of it.

    It is read, compared, copied, pickled and written as JSON like any dict; `dict` and `|` return a mutable one.
    """

    __slots__ = ()

    def __init__(self, items: Mapping[K, V] | Iterable[tuple[K, V]] = ()) -> None:
        super().__init__(items)

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        raise TypeError("this is part of a value that cannot be changed; make a dict of it and change that: dict(…)")

    __setitem__ = __delitem__ = __ior__ = clear = pop = popitem = setdefault = update = _refuse

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (dict(self),)

    def __copy__(self) -> "FrozenDict[K, V]":
        return self

    def __deepcopy__(self, _: object) -> "FrozenDict[K, V]":
        return self


T = TypeVar("T", bound=Hashable)


def connected(items: Iterable[T], pairs: Iterable[tuple[T, T]]) -> list[list[T]]:
    """Return the connected components of a graph, with components and items in the order of the input.

    Args:
        items: The vertices, each one once.
        pairs: The edges.
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
