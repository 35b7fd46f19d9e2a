"""Buckets of gradients: what each may have, and that none waits for a later one."""

from random import Random

import pytest

from pase.sharding.buckets import BUCKET_BYTES, gradient_buckets


def drawn(seed: int) -> tuple[list[str], list[int]]:
    numbers = Random(seed)
    count = numbers.randrange(1, 40)
    sizes = [numbers.choice((64, 4 * 2**20, 30 * 2**20)) for _ in range(count)]
    return [numbers.choice("ab") for _ in range(count)], sizes


@pytest.mark.parametrize("seed", range(20))
def test_every_bucket_begins_as_soon_as_its_last_gradient_is_there(seed: int) -> None:
    keys, sizes = drawn(seed)
    buckets = gradient_buckets(keys, sizes)
    assert sorted(position for bucket in buckets for position in bucket) == list(range(len(keys)))
    # Gradients arrive one by one, those of the last weights first; buckets begin in order.
    arrived, begun = set[int](), 0
    for position in reversed(range(len(keys))):
        arrived.add(position)
        while begun < len(buckets) and arrived.issuperset(buckets[begun]):
            begun += 1
        waiting = arrived.difference(*buckets[:begun])
        for key in "ab":
            of_key = [other for other in waiting if keys[other] == key]
            # No more than one bucket of a kind waits, and that is not full.
            assert sum(sizes[other] for other in of_key) <= BUCKET_BYTES
    assert begun == len(buckets)


@pytest.mark.parametrize("seed", range(20))
def test_a_bucket_has_gradients_of_one_kind_up_to_the_limit(seed: int) -> None:
    keys, sizes = drawn(seed)
    for bucket in gradient_buckets(keys, sizes):
        assert len({keys[position] for position in bucket}) == 1
        assert len(bucket) == 1 or sum(sizes[position] for position in bucket) <= BUCKET_BYTES


def test_a_bucket_of_both_ends_goes_last() -> None:
    """As biases and embeddings have it that are replicated while all between them is sharded."""
    size = 4 * 2**20
    assert gradient_buckets("abbba", [64, size, size, size, 64]) == ((3,), (2,), (1,), (4, 0))
