"""Configurations against all tuples, and every message for what cannot be split."""

from itertools import product
from math import prod

import pytest

import pase.sharding.shards as configurations
from pase.errors import ConfigurationError
from pase.graph import Builder, Dim, Graph, Operator
from pase.graph.operators import dense, pool2d
from pase.models import build
from pase.sharding.shards import (
    check_batch,
    check_devices,
    check_splittable,
    data_parallel,
    divisors,
    enumerate_configurations,
)


def _operator(extents: tuple[int, ...], unsplittable: tuple[str, ...] = ()) -> Operator:
    dims = tuple(Dim(name, extent) for name, extent in zip("abcde", extents, strict=False))
    return Operator(name="o", kind="test", dims=dims, reads=(), writes=(), unsplittable=unsplittable)


def test_configurations_are_all_tuples_whose_product_divides_p() -> None:
    operator = _operator((12, 7, 64, 60))
    for p in range(1, 65):
        choices = ([k for k in range(1, min(p, e) + 1) if e % k == 0] for e in operator.extents.values())
        expected = [row for row in product(*choices) if p % prod(row) == 0]
        found = enumerate_configurations(operator, p)
        assert [tuple(row) for row in found.tolist()] == expected  # product is in lexicographic order
        assert expected[0] == (1, 1, 1, 1)


def test_for_a_power_of_two_products_are_at_most_p() -> None:
    powers = [1 << i for i in range(7)]
    for p in powers[1:]:
        found = enumerate_configurations(_operator((64, 128, 256)), p)
        assert {tuple(row) for row in found.tolist()} == {row for row in product(powers, repeat=3) if prod(row) <= p}


def test_unsplittable_dims_stay_whole() -> None:
    found = enumerate_configurations(_operator((8, 8), unsplittable=("a",)), 8)
    assert found.tolist() == [[1, 1], [1, 2], [1, 4], [1, 8]]
    pool = pool2d("pool", (8, 8, 8, 8), kernel=2, stride=2)
    assert (enumerate_configurations(pool, 8)[:, -2:] == 1).all()


@pytest.mark.parametrize("number", [1, 2, 12, 36, 97, 1024, 1000003])
def test_divisors(number: int) -> None:
    expected = [k for k in range(1, number + 1) if number % k == 0]
    assert list(divisors(number)) == expected


def test_too_many_configurations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(configurations, "MAX_CONFIGURATIONS", 100)
    with pytest.raises(
        ConfigurationError, match="layer 'o' has more than 100 configurations on 1024 devices; use fewer"
    ):
        enumerate_configurations(_operator((1024,) * 4), 1024)


def test_data_parallelism_splits_the_batch_as_far_as_it_goes() -> None:
    net = Builder("net")
    net.add(dense, "fc", net.input((48, 64)), out=(("n", 64),))
    graph = net.build()
    for p, expected in ((32, (16, 1, 1)), (12, (12, 1, 1)), (5, (1, 1, 1))):
        assert data_parallel(graph, graph["fc"], p) == expected


# -- errors


def _mlp(batch: int, width: int) -> Graph:
    net = Builder("net")
    x = net.add(dense, "fc1", net.input((batch, width)), out=(("n", width),))
    net.add(dense, "fc2", x, out=(("n", width),))
    return net.build({"batch": batch})


@pytest.mark.parametrize("devices", [0, -3])
def test_there_must_be_devices(devices: int) -> None:
    with pytest.raises(ConfigurationError, match=f"{devices} devices were asked for; expected a whole number of 1 or"):
        check_devices(devices)
    check_devices(1)


def test_a_prime_that_divides_nothing() -> None:
    graph = build("alexnet")
    message = "no layer of 'alexnet' can be split over 1000003 devices: .* use a number of devices that 2 divides"
    with pytest.raises(ConfigurationError, match=message):
        check_splittable(graph, 1_000_003)
    check_splittable(graph, 1)
    check_splittable(graph, 1_000_002)
    check_splittable(graph, 13)  # the convolutions' positions
    with pytest.raises(ConfigurationError, match="can be split over 3 devices"):
        check_splittable(_mlp(4, 8), 3)


@pytest.mark.parametrize(("batch", "devices", "nearest"), [(127, 8, 128), (3, 8, 8), (125, 6, 126)])
def test_a_batch_that_nothing_divides(batch: int, devices: int, nearest: int) -> None:
    with pytest.raises(
        ConfigurationError, match=f"a batch of {batch} cannot be split over {devices} .* such as {nearest},"
    ):
        check_batch(_mlp(batch, 8), batch, devices)
    check_batch(_mlp(nearest, 8), nearest, devices)


def test_a_single_example_or_device_is_let_through() -> None:
    check_batch(_mlp(1, 8), 1, 8)
    check_batch(_mlp(127, 8), 127, 1)
