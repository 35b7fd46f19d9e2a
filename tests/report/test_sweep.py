"""Costs on other numbers of devices, against a search on each."""

import pytest

from pase import search
from pase.errors import ConfigurationError
from pase.views.reports.document import device_numbers, sweep
from tests.networks import slow_machine, small_graph


def test_it_is_a_search_on_each_number() -> None:
    plan = search(small_graph("rnnlm"), 4, machine=slow_machine())
    found = sweep(plan, (1, 2, 4, 8))
    ours, data_parallel = found["strategies"]
    for number, devices in enumerate(found["devices"]):
        alone = search(small_graph("rnnlm"), devices, machine=slow_machine())
        assert ours["total_cost"][number] == alone.total_cost
        assert data_parallel["total_cost"][number] == alone.baselines["data_parallel"]
        assert found["memory_bytes"][number] == alone.memory.total_bytes
        assert found["exact"][number] == alone.exact
    assert ours["total_cost"][2] == plan.total_cost
    assert found["problems"] == [""] * 4


def test_a_number_that_cannot_be_searched_says_why() -> None:
    plan = search(small_graph("rnnlm"), 4, machine=slow_machine())
    found = sweep(plan, (4, 7919))
    assert found["strategies"][0]["total_cost"][0] is not None
    assert found["strategies"][0]["total_cost"][1] is None
    assert found["memory_bytes"][1] is None
    assert "7919" in found["problems"][1]


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("1..64", (1, 2, 4, 8, 16, 32, 64)),
        ("8..8", (8,)),
        ("3..20", (3, 6, 12, 20)),
        ("4,8,12", (4, 8, 12)),
        ("16", (16,)),
    ],
)
def test_numbers_of_devices(text: str, numbers: tuple[int, ...]) -> None:
    assert device_numbers(text) == numbers


@pytest.mark.parametrize("text", ["", "x", "0..4", "8..4", "4,4", "8,4", "1..", "..8", "-1", "1..99999999999", "1.5"])
def test_text_that_says_no_numbers(text: str) -> None:
    with pytest.raises(ConfigurationError, match=r"says no numbers of devices; expected 1\.\.64"):
        device_numbers(text)
