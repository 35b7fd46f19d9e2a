"""Closed forms of an iteration beside hand-computed sums and a simulation of events."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pase.easgd.algorithms import Exchange, Place
from pase.studies.easgd_costs import ALGORITHMS, Breakdown, Iteration, Platform, Weights, iteration
from pase.studies.integrated.equations import Network
from tests.easgd_costs.events import broadcast, queue, round_robin

HAND = Platform(
    worker_link=Network(latency_s=1.0, s_per_byte=0.1),
    host_link=Network(latency_s=2.0, s_per_byte=0.3),
    compute_s=50.0,
    data_s=3.0,
    worker_pass_s=1.0,
    host_pass_s=2.0,
)
"""10 bytes: 2 s between workers, 5 s to the master."""
TEN = Weights(num_bytes=10.0, num_arrays=4)


def _of(name: str, num_workers: int, platform: Platform = HAND, *, packed: bool = True) -> Iteration:
    return iteration(ALGORITHMS[name], num_workers, platform, TEN, packed=packed)


# -- by hand


def test_original_easgd_by_hand() -> None:
    """Data 3, two messages of 5, propagation 50, four passes of 1, three of 2; the exchange hides 10 of the 50."""
    star, hidden = _of("original-easgd-star", 4), _of("original-easgd", 4)
    assert star.breakdown == Breakdown(data_s=3, host_exchange_s=10, compute_s=50, worker_update_s=4, host_update_s=6)
    assert (star.time_s, star.round_s, star.hidden_s) == (73, 4 * 73, 0)
    assert hidden.breakdown == Breakdown(data_s=3, host_exchange_s=10, compute_s=40, worker_update_s=4, host_update_s=6)
    assert (hidden.time_s, hidden.hidden_s) == (63, 10)
    assert star.breakdown.communication_ratio == 13 / 73
    for found in (star, hidden):
        assert (found.num_messages, found.num_bytes, found.num_batches) == (2, 20.0, 1)
    assert star.times(5000).total_s == pytest.approx(5000 * 73)


def test_sync_easgd_by_hand() -> None:
    """Four workers: four batches of data, a broadcast and a reduction of two stages each."""
    first, second, third = (_of(f"sync-easgd{i}", 4) for i in (1, 2, 3))
    assert first.breakdown == Breakdown(data_s=12, host_exchange_s=20, compute_s=50, worker_update_s=4, host_update_s=6)
    # The centre's three passes are now a worker's; 2·2 messages of 2 s go between workers.
    assert second.breakdown == Breakdown(worker_exchange_s=8, data_s=12, compute_s=50, worker_update_s=7)
    assert third.breakdown == Breakdown(data_s=12, compute_s=50, worker_update_s=7)
    assert (second.hidden_s, third.hidden_s) == (0, 8)
    for found in (first, second, third):
        assert (found.num_messages, found.num_bytes, found.num_batches) == (6, 60.0, 4)
        assert found.round_s == found.time_s


def test_an_exchange_that_is_longer_than_what_hides_it_is_seen() -> None:
    slow = Platform(worker_link=Network(latency_s=0, s_per_byte=3.0), host_link=HAND.host_link, compute_s=50.0)
    found = _of("sync-easgd3", 4, slow)  # four messages of 30 s, of which 50 are hidden
    assert (found.breakdown.worker_exchange_s, found.hidden_s, found.time_s) == (70.0, 50.0, 120.0)
    assert found.breakdown.communication_ratio == 70 / 120
    other = Platform(worker_link=HAND.worker_link, host_link=Network(latency_s=0, s_per_byte=4.0), compute_s=50.0)
    assert _of("original-easgd", 4, other).breakdown == Breakdown(host_exchange_s=80.0)


def test_asynchronous_methods_by_hand() -> None:
    """Own work is 73 s, of which the master is busy for 16: with up to four workers they limit, with five it does."""
    for num_workers, cycle in ((1, 73), (4, 73), (5, 80), (10, 160)):
        found = _of("async-easgd", num_workers)
        assert found.round_s == pytest.approx(cycle)
        assert found.time_s == pytest.approx(cycle / num_workers)
        assert found.breakdown.host_exchange_s == pytest.approx((10 + max(0, cycle - 73)) / num_workers)
        assert found.breakdown.compute_s == pytest.approx(50 / num_workers)
    # Without a lock, the bytes of one direction alone queue: 3 s.
    assert _of("hogwild-easgd", 24).round_s == pytest.approx(73)
    assert _of("hogwild-easgd", 30).round_s == pytest.approx(90)
    # Momentum: two passes more at the worker, or at the master; SGD has no update at the worker.
    own = {name: _of(name, 1).time_s for name in ("async-measgd", "async-sgd", "async-msgd", "hogwild-sgd")}
    assert own == {"async-measgd": 75, "async-sgd": 69, "async-msgd": 73, "hogwild-sgd": 69}
    assert _of("async-msgd", 100).time_s == pytest.approx(10 + 5 * 2)


def test_sync_sgd_waits_for_its_gradients() -> None:
    found = _of("sync-sgd", 8)
    assert found.breakdown == Breakdown(data_s=24, host_exchange_s=30, compute_s=50, host_update_s=6)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_per_layer_moves_the_same_bytes_in_more_messages(name: str) -> None:
    """Four arrays: three latencies more, of 2 s or 1 s, for each transfer."""
    packed, apart = _of(name, 8), _of(name, 8, packed=False)
    assert apart.num_bytes == packed.num_bytes
    assert apart.num_messages == 4 * packed.num_messages
    alone = {True: _of("original-easgd-star", 1), False: _of("original-easgd-star", 1, packed=False)}
    assert alone[False].time_s - alone[True].time_s == 2 * 3 * 2.0
    assert apart.time_s + apart.hidden_s >= packed.time_s + packed.hidden_s


def test_a_single_synchronous_worker_exchanges_nothing() -> None:
    for name in ("sync-easgd1", "sync-easgd2", "sync-easgd3", "sync-sgd"):
        found = _of(name, 1)
        assert (found.num_messages, found.num_bytes) == (0, 0)
        assert found.breakdown.worker_exchange_s == found.breakdown.host_exchange_s == 0


# -- beside events

TIMES = st.integers(0, 40).map(float)
POSITIVE = st.integers(1, 40).map(float)
WORKERS = st.integers(1, 12)


@st.composite
def platforms(draw: st.DrawFn) -> Platform:
    return Platform(
        worker_link=Network(latency_s=draw(TIMES), s_per_byte=draw(POSITIVE) / 16),
        host_link=Network(latency_s=draw(TIMES), s_per_byte=draw(POSITIVE) / 16),
        compute_s=draw(POSITIVE),
        data_s=draw(TIMES),
        worker_pass_s=draw(TIMES) / 8,
        host_pass_s=draw(TIMES) / 8,
    )


def _message(link: Network) -> float:
    return link.latency_s + 10 * link.s_per_byte


@given(platforms(), WORKERS, st.sampled_from([n for n, a in ALGORITHMS.items() if a.exchange is Exchange.FIRST_COME]))
def test_first_come_is_what_a_queue_does(platform: Platform, num_workers: int, name: str) -> None:
    algorithm, message = ALGORITHMS[name], _message(platform.host_link)
    own = platform.data_s + platform.compute_s + algorithm.worker_passes * platform.worker_pass_s
    service = 2 * message + algorithm.centre_passes * platform.host_pass_s
    simulated = queue(num_workers, [(None, own), (0, service)], rounds=40)
    assert _of(name, num_workers, platform).time_s == pytest.approx(simulated)


@given(platforms(), WORKERS, st.sampled_from(["hogwild-easgd", "hogwild-sgd"]))
def test_hogwild_is_two_queues_one_for_each_direction(platform: Platform, num_workers: int, name: str) -> None:
    algorithm, link = ALGORITHMS[name], platform.host_link
    own = platform.data_s + platform.compute_s + algorithm.worker_passes * platform.worker_pass_s
    update = algorithm.centre_passes * platform.host_pass_s
    wire = 10 * link.s_per_byte
    stages = [(None, own + link.latency_s), (0, wire), (None, update + link.latency_s), (1, wire)]
    simulated = queue(num_workers, stages, rounds=60)
    assert _of(name, num_workers, platform).time_s == pytest.approx(simulated, rel=0.01)


@given(platforms(), WORKERS)
def test_round_robin_is_a_token_that_goes_round(platform: Platform, num_workers: int) -> None:
    message = _message(platform.host_link)
    parts = [
        platform.data_s,
        message,
        platform.compute_s,
        message,
        4 * platform.worker_pass_s,
        3 * platform.host_pass_s,
    ]
    assert _of("original-easgd-star", num_workers, platform).round_s == pytest.approx(round_robin(num_workers, parts))
    # Overlapped: the propagation begins with the first message, and the update when both have ended.
    parts = [platform.data_s, max(2 * message, platform.compute_s), *parts[4:]]
    assert _of("original-easgd", num_workers, platform).round_s == pytest.approx(round_robin(num_workers, parts))


@given(platforms(), st.integers(1, 200), st.sampled_from(["sync-easgd1", "sync-easgd2", "sync-sgd"]))
def test_a_tree_is_a_broadcast_and_the_same_backwards(platform: Platform, num_workers: int, name: str) -> None:
    link = platform.host_link if ALGORITHMS[name].place is Place.MASTER else platform.worker_link
    time, messages = broadcast(num_workers, _message(link))
    found = _of(name, num_workers, platform)
    assert found.breakdown.worker_exchange_s + found.breakdown.host_exchange_s == pytest.approx(2 * time)
    assert found.num_messages == 2 * messages


@given(platforms(), st.integers(1, 200), st.sampled_from(list(ALGORITHMS)))
def test_parts_add_up_and_nothing_is_negative(platform: Platform, num_workers: int, name: str) -> None:
    found = _of(name, num_workers, platform)
    parts = found.breakdown.as_dict()
    assert min(*parts.values(), found.hidden_s) >= 0
    assert found.time_s == pytest.approx(sum(parts.values()))
    assert found.round_s == pytest.approx(found.time_s * (1 if found.num_batches == num_workers else num_workers))
    assert 0 <= found.breakdown.communication_ratio <= 1
