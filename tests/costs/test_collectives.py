"""Closed forms of collectives against runs of the algorithms on vectors, round by round."""

from collections.abc import Callable
from itertools import product
from math import ceil, log2

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import ArrayLike

from pase.costs.collectives import (
    ALL_GATHER,
    ALL_REDUCE_WHOLE,
    REDUCE_SCATTER,
    Algorithm,
    Link,
    hierarchical_all_gather,
    hierarchical_all_reduce,
    hierarchical_reduce_scatter,
    point_to_point,
)
from pase.sharding.shards import FloatArray

ALPHA, BETA = 3e-6, 2e-9
LINK = Link(latency_s=ALPHA, s_per_byte=BETA)
WORDS = 5 * 7 * 48  # divisible by every group size below


def all_reduce(size_bytes: ArrayLike, group: ArrayLike, link: Link) -> FloatArray:
    """The all-reduce among devices of one level."""
    return hierarchical_all_reduce(size_bytes, [group], [link])


def reduce_scatter(size_bytes: ArrayLike, group: ArrayLike, link: Link) -> FloatArray:
    return hierarchical_reduce_scatter(size_bytes, [group], [link])


def all_gather(size_bytes: ArrayLike, group: ArrayLike, link: Link) -> FloatArray:
    return hierarchical_all_gather(size_bytes, [group], [link])


def time_of(algorithm: Algorithm, size: float, count: int, link: Link) -> float:
    messages, vectors = algorithm(count)
    return messages * link.latency_s + vectors * size * link.s_per_byte


Blocks = dict[int, np.ndarray[tuple[int], np.dtype[np.float64]]]
"""What a device holds: block number → values."""

Round = list[tuple[int, int, Blocks]]
"""(sender, receiver, blocks sent) of messages that go at the same time."""


class _Run:
    """Devices that hold blocks of a vector, and the time that their rounds of messages have taken."""

    def __init__(self, count: int, *, full: bool) -> None:
        rng = np.random.default_rng(count)
        self.vectors = rng.normal(size=(count, WORDS))
        self.count = count
        blocks = np.split(np.arange(WORDS), count)
        self.held: list[Blocks] = [
            {b: self.vectors[d][blocks[b]].copy() for b in (range(count) if full else [d])} for d in range(count)
        ]
        self.blocks = blocks
        self.time_s = 0.0

    def round(self, messages: Round, *, add: bool) -> None:
        assert len({s for s, _, _ in messages}) == len(messages), "a device sends one message at a time"
        assert len({r for _, r, _ in messages}) == len(messages), "a device receives one message at a time"
        sent = [(r, {b: v.copy() for b, v in blocks.items()}) for _, r, blocks in messages]
        for receiver, blocks in sent:
            for block, values in blocks.items():
                mine = self.held[receiver]
                mine[block] = mine[block] + values if add else values
        self.time_s += max(ALPHA + sum(len(v) * 8 for v in blocks.values()) * BETA for _, _, blocks in messages)

    def total(self, block: int) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        return self.vectors[:, self.blocks[block]].sum(axis=0)


def _some(run: _Run, device: int, blocks: list[int]) -> Blocks:
    return {b: run.held[device][b] for b in blocks}


def _ring_reduce_scatter(run: _Run, first: int | None = None) -> None:
    """Rings of `first` devices, or of all, share the vector out, then rings across these what each has left."""
    k, first = run.count, first or run.count
    # Device d is number d % first of its first ring, and d // first of its second.
    for size, stride, share in ((first, 1, k // first), (k // first, first, 1)):
        for step in range(size - 1):
            messages: Round = []
            for d in range(k):
                own = d // stride % size
                to = d + ((own + 1) % size - own) * stride
                piece = (own - step) % size
                blocks = [b for b in run.held[d] if b // share % size == piece]
                messages.append((d, to, _some(run, d, blocks)))
            run.round(messages, add=True)
        for d in range(k):
            piece = (d // stride % size + 1) % size
            run.held[d] = {b: v for b, v in run.held[d].items() if b // share % size == piece}


def _ring_all_gather(run: _Run) -> None:
    k = run.count
    for step in range(k - 1):
        run.round([(d, (d + 1) % k, _some(run, d, [(d - step) % k])) for d in range(k)], add=False)


def _halving(run: _Run, least: int = 1) -> None:
    """Share the vector out between devices as far apart as `least`, or farther."""
    k, distance = run.count, run.count // 2
    while distance >= least:
        messages: Round = []
        for d in range(k):
            partner = d ^ distance
            theirs = [b for b in run.held[d] if (b & distance) == (partner & distance)]
            messages.append((d, partner, _some(run, d, theirs)))
        run.round(messages, add=True)
        for d in range(k):
            run.held[d] = {b: v for b, v in run.held[d].items() if (b & distance) == (d & distance)}
        distance //= 2


def _recursive_doubling(run: _Run, nearest: int = 1, beyond: int | None = None, *, add: bool = True) -> None:
    """Exchange, between devices from `nearest` to less than `beyond` apart, all that they have."""
    distance = nearest
    while distance < (beyond or run.count):
        run.round([(d, d ^ distance, _some(run, d, list(run.held[d]))) for d in range(run.count)], add=add)
        distance *= 2


def _bruck(run: _Run) -> None:
    k, have = run.count, 1
    while have < k:
        more = min(have, k - have)
        run.round(
            [
                ((d + have) % k, d, _some(run, (d + have) % k, [(d + have + i) % k for i in range(more)]))
                for d in range(k)
            ],
            add=False,
        )
        have += more


def _assert_reduced(run: _Run, *, everywhere: bool) -> None:
    for held in run.held:
        assert len(held) == (run.count if everywhere else 1)
        for block, values in held.items():
            np.testing.assert_allclose(values, run.total(block), atol=1e-12)


RUNS: list[tuple[Algorithm, Callable[[_Run], None], bool, bool, tuple[int, ...]]] = [
    (REDUCE_SCATTER["ring"], _ring_reduce_scatter, True, False, (2, 3, 5, 8)),
    (REDUCE_SCATTER["recursive halving"], _halving, True, False, (2, 4, 8, 16)),
    (ALL_REDUCE_WHOLE["recursive doubling"], _recursive_doubling, True, True, (2, 4, 8, 16)),
    (ALL_GATHER["ring"], _ring_all_gather, False, True, (2, 3, 5, 7, 8)),
    (ALL_GATHER["recursive doubling"], _bruck, False, True, (2, 3, 5, 7, 8)),
]
"""Algorithms, what devices do, whether each has a whole vector before and all blocks after it, on how many devices."""


@pytest.mark.parametrize(("algorithm", "run_it", "adds", "everywhere", "counts"), RUNS)
def test_an_algorithm_takes_as_long_as_its_rounds(
    algorithm: Algorithm, run_it: Callable[[_Run], None], adds: bool, everywhere: bool, counts: tuple[int, ...]
) -> None:
    for count in counts:
        run = _Run(count, full=adds)
        run_it(run)
        if adds:
            _assert_reduced(run, everywhere=everywhere)
        for held in () if adds else run.held:
            assert sorted(held) == list(range(count))
            for block, values in held.items():
                np.testing.assert_array_equal(values, run.vectors[block][run.blocks[block]])
        assert time_of(algorithm, WORDS * 8.0, count, LINK) == pytest.approx(run.time_s, rel=1e-12)


@pytest.mark.parametrize("count", [2, 3, 6, 8, 13])
def test_a_tree_sums_and_hands_down_in_as_many_rounds_as_it_takes_to_double(count: int) -> None:
    reached, rounds = 1, 0
    while reached < count:
        reached, rounds = min(2 * reached, count), rounds + 1
    found = time_of(ALL_REDUCE_WHOLE["tree"], 100.0, count, LINK)
    assert found == pytest.approx(2 * rounds * (ALPHA + 100 * BETA))


@given(size=st.floats(1, 1e9), group=st.integers(2, 300), alpha=st.floats(0, 1e-3), beta=st.floats(1e-12, 1e-6))
def test_no_algorithm_beats_the_bounds_of_its_collective(size: float, group: int, alpha: float, beta: float) -> None:
    # Chan et al. 2007: every device is reached in log2 k rounds, and what it lacks must come over its link.
    link = Link(latency_s=alpha, s_per_byte=beta)
    share, rounds = (group - 1) / group, ceil(log2(group))
    for function, times in ((all_reduce, 2), (reduce_scatter, 1), (all_gather, 1)):
        assert function(size, group, link) >= times * share * size * beta * (1 - 1e-12)
        assert function(size, group, link) >= rounds * alpha * (1 - 1e-12)
    assert all_reduce(size, group, link) <= reduce_scatter(size, group, link) + all_gather(size, group, link) + 1e-12


def test_the_algorithm_goes_by_size() -> None:
    link = Link(latency_s=1e-5, s_per_byte=1e-9)
    for size, best in ((10.0, ALL_REDUCE_WHOLE["recursive doubling"]), (1e8, None)):
        whole = min(time_of(algorithm, size, 16, link) for algorithm in ALL_REDUCE_WHOLE.values())
        shared = time_of(REDUCE_SCATTER["recursive halving"], size, 16, link) + time_of(
            ALL_GATHER["recursive doubling"], size, 16, link
        )
        assert (whole < shared) == (best is not None)
        assert float(all_reduce(size, 16, link)) <= min(whole, shared) * (1 + 1e-12)
    # On 15 devices halving first folds 7 of them onto the others, which the ring need not.
    ring, halving = (time_of(algorithm, 1e8, 15, link) for algorithm in REDUCE_SCATTER.values())
    assert ring < halving


def test_nothing_to_send_and_nobody_to_send_it_to_take_no_time() -> None:
    for function in (all_reduce, reduce_scatter, all_gather):
        assert function([0.0, 10.0, 10.0], [8, 1, 2], LINK).tolist()[:2] == [0, 0]
        assert function([0.0, 10.0, 10.0], [8, 1, 2], LINK)[2] > 0
    assert point_to_point([0.0, 10.0], LINK).tolist() == [0, ALPHA + 10 * BETA]


# -- several levels

NODE, NET = Link(latency_s=1e-6, s_per_byte=1e-10), Link(latency_s=5e-6, s_per_byte=1e-9).shared(8)


def test_one_level_is_the_plain_collective() -> None:
    assert hierarchical_all_reduce(1e6, [8], [NODE]) == all_reduce(1e6, 8, NODE)
    assert hierarchical_all_reduce(1e6, [8, 1], [NODE, NET]) == all_reduce(1e6, 8, NODE)
    assert hierarchical_all_reduce(1e6, [1, 4], [NODE, NET]) == all_reduce(1e6, 4, NET)
    assert hierarchical_reduce_scatter(1e6, [1, 4], [NODE, NET]) == reduce_scatter(1e6, 4, NET)
    assert hierarchical_all_gather(1e6, [4, 1], [NODE, NET]) == all_gather(1e6, 4, NODE)


def test_a_large_sum_over_nodes_crosses_their_links_once_for_each_node() -> None:
    # 8 devices of each of 4 nodes: 1/8 of the vector each, eight at a time over one link: all of it once.
    n = 1e8
    expected = 2 * (7 / 8 * n * 1e-10) + 2 * (3 / 4 * n / 8 * 8e-9)
    # The last two of a node, or of the nodes, exchange what they have left in one message instead of two.
    latencies = 2 * 3 * 1e-6 + 3 * 5e-6
    assert float(hierarchical_all_reduce(n, [8, 4], [NODE, NET])) == pytest.approx(expected + latencies, rel=1e-12)
    # Groups that lie across the nodes put eight vectors on each link.
    across = hierarchical_all_reduce(n, [1, 4], [NODE, NET])
    assert float(across) > 7 * float(hierarchical_all_reduce(n, [8, 4], [NODE, NET]) - 2 * 7 / 8 * n * 1e-10)


def test_a_small_sum_goes_whole_from_level_to_level() -> None:
    n = 8.0
    whole = 3 * (1e-6 + n * 1e-10) + 2 * (5e-6 + n * 8e-9)
    assert float(hierarchical_all_reduce(n, [8, 4], [NODE, NET])) == pytest.approx(whole)


@given(size=st.floats(1, 1e9), members=st.lists(st.sampled_from([1, 2, 3, 4, 8]), min_size=3, max_size=3))
def test_levels_never_cost_less_than_their_bytes(size: float, members: list[int]) -> None:
    links = [Link(latency_s=0.0, s_per_byte=b) for b in (1e-10, 1e-9, 4e-9)]
    total, part = 0.0, size
    for count, link in zip(members, links, strict=True):
        total += 2 * (count - 1) / count * part * link.s_per_byte
        part /= count
    assert float(hierarchical_all_reduce(size, members, links)) >= total * (1 - 1e-12)
    halves = hierarchical_reduce_scatter(size, members, links) + hierarchical_all_gather(size, members, links)
    assert float(halves) >= total * (1 - 1e-12)


def test_arrays_are_costed_element_by_element() -> None:
    sizes, groups = np.array([1e3, 1e6, 1e6]), np.array([2, 8, 6])
    whole = hierarchical_all_reduce(sizes, [groups, [1, 4, 2]], [NODE, NET])
    for i, (n, k, m) in enumerate(zip(sizes, groups, [1, 4, 2], strict=True)):
        assert whole[i] == hierarchical_all_reduce(n, [k, m], [NODE, NET])
    assert all_reduce(sizes[:, None], groups[None, :], NODE).shape == (3, 3)
    for (i, n), (j, k) in product(enumerate(sizes), enumerate(groups)):
        assert all_reduce(sizes[:, None], groups[None, :], NODE)[i, j] == all_reduce(n, k, NODE)


# -- stages


@pytest.mark.parametrize("count", [4, 8, 16])
def test_an_all_reduce_is_the_best_of_those_that_share_out_some_or_all_of_the_vector(count: int) -> None:
    times = []
    for share in (2**i for i in range(int(log2(count)) + 1)):
        run = _Run(count, full=True)
        # Halve the vector between `share` devices; double what each has left across them; gather it back.
        _halving(run, count // share)
        _recursive_doubling(run, beyond=count // share)
        _recursive_doubling(run, count // share, add=False)
        _assert_reduced(run, everywhere=True)
        times.append(run.time_s)
    assert float(all_reduce(WORDS * 8.0, count, LINK)) == pytest.approx(min(times), rel=1e-12)


@pytest.mark.parametrize(("count", "first"), [(6, 2), (6, 3), (15, 3), (15, 5), (21, 7)])
def test_a_reduce_scatter_may_go_in_stages(count: int, first: int) -> None:
    run = _Run(count, full=True)
    _ring_reduce_scatter(run, first)
    _assert_reduced(run, everywhere=False)
    rounds, share = first - 1 + count // first - 1, (count - 1) / count
    assert run.time_s == pytest.approx(rounds * ALPHA + share * WORDS * 8 * BETA, rel=1e-12)
    assert float(reduce_scatter(WORDS * 8.0, count, LINK)) <= run.time_s * (1 + 1e-12)


@given(
    size=st.floats(1, 1e9),
    levels=st.lists(st.integers(1, 12), min_size=1, max_size=3),
    slower=st.lists(st.tuples(st.floats(1, 10), st.floats(1, 10)), min_size=3, max_size=3),
)
def test_levels_are_never_faster_than_one_of_the_fastest_link(
    size: float, levels: list[int], slower: list[tuple[float, float]]
) -> None:
    whole = int(np.prod(levels))
    equal = [LINK] * len(levels)
    links = [Link(latency_s=a * ALPHA, s_per_byte=b * BETA) for a, b in slower[: len(levels)]]
    slowest = Link(latency_s=max(link.latency_s for link in links), s_per_byte=max(link.s_per_byte for link in links))
    for function in (hierarchical_all_reduce, hierarchical_reduce_scatter, hierarchical_all_gather):
        flat = float(function(size, [whole], [LINK]))
        assert float(function(size, levels, equal)) == pytest.approx(flat, rel=1e-12)
        assert float(function(size, levels, links)) >= flat * (1 - 1e-12)
        # Nor slower than all on the slowest.
        assert float(function(size, levels, links)) <= float(function(size, [whole], [slowest])) * (1 + 1e-12)
