from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from pase.sharding.boxes import Box, extents, intersection, num_points, offsets, whole

RANGES = st.tuples(st.integers(-4, 6), st.integers(1, 5)).map(lambda pair: (pair[0], pair[0] + pair[1]))


def boxes(rank: int) -> st.SearchStrategy[Box]:
    return st.tuples(*[RANGES] * rank)


def points(box: Box) -> set[tuple[int, ...]]:
    return set(product(*(range(low, high) for low, high in box)))


@given(st.integers(1, 3).flatmap(lambda rank: st.tuples(boxes(rank), boxes(rank))))
def test_intersection_is_that_of_the_sets_of_points(pair: tuple[Box, Box]) -> None:
    first, second = pair
    shared = intersection(first, second)
    assert (points(shared) if shared else set()) == points(first) & points(second)
    assert intersection(second, first) == shared


@given(st.integers(0, 3).flatmap(boxes))
def test_counts_are_those_of_the_set_of_points(box: Box) -> None:
    assert num_points(box) == len(points(box))
    assert whole(extents(box)) == tuple((0, high - low) for low, high in box)
    assert offsets(box, box) == (0,) * len(box)
