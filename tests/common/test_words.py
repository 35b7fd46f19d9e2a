"""Values in words and in JSON: numbers, sizes, shortened names, attributes of a value as members of an object."""

import json
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pase.cli.output import print_facts
from pase.common.documents import attributes
from pase.common.words import binary, clock, duration, large, listed, quantity, shortened, signed


def test_attributes_are_members_under_their_own_name_or_another() -> None:
    machine = SimpleNamespace(name="1080ti", levels=("node", "cluster"))
    plan = SimpleNamespace(machine=machine, total_cost=2.5, is_exact=True)
    found = attributes(plan, "total_cost exact=is_exact machine.name levels=machine.levels")
    assert found == {"total_cost": 2.5, "exact": True, "name": "1080ti", "levels": ["node", "cluster"]}
    assert json.loads(json.dumps(found)) == found
    with pytest.raises(AttributeError, match="has no attribute 'gap'"):
        attributes(plan, "gap")


@pytest.mark.parametrize(("value", "text"), [(0.0, "0 B"), (1500.0, "+1.50 kB"), (-2e6, "-2.00 MB")])
def test_a_difference_has_its_sign(value: float, text: str) -> None:
    assert signed(value, "B") == text


@pytest.mark.parametrize(
    ("size", "text"), [(0, "0 B"), (999, "999 B"), (1024, "1 KiB"), (3 << 19, "1.5 MiB"), (11 << 30, "11 GiB")]
)
def test_a_size_in_binary_units(size: int, text: str) -> None:
    assert binary(size) == text


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (999_999, "", "999,999"),
        (1_000_000, "", "1.0e+6"),
        (12 * 10**33, "", "1.2e+34"),
        (10**20, "B", "100 EB"),
        (10**34, "B", "1.0e+34 B"),
    ],
)
def test_a_whole_number_of_any_size(value: int, unit: str, text: str) -> None:
    assert large(value, unit) == text


def test_what_is_shortened_keeps_both_ends() -> None:
    assert shortened("encoder1_self_attention", 9) == "enco…tion"
    assert shortened("fc1", 3) == "fc1"
    assert shortened("fc1", 0) == "…"
    # Of characters that are twice as wide half as many.
    assert shortened("abcdefgh", 9, lambda text: 2.0 * len(text)) == "ab…h"


def test_names_that_are_left_out_are_counted() -> None:
    assert listed(["a", "b", ""], most=3) == "a, b, ''"
    assert listed(["a", "b", "c"], most=2) == "a, b and 1 more"


def test_facts_stand_below_one_another_and_empty_ones_do_not(capsys: pytest.CaptureFixture[str]) -> None:
    print_facts({"cost": "1 s", "hidden": "", "step": None, "moved": ["1 B", "2 B"], "none": ()}, width=6)
    assert capsys.readouterr().out == "  cost    1 s\n  moved   1 B\n          2 B\n"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        *((0, "0 B"), (1, "1.00 B"), (999.4, "999 B"), (999.6, "1.00 kB"), (9994, "9.99 kB"), (9996, "10.0 kB")),
        *((99_960, "100 kB"), (3.4e10, "34.0 GB"), (1e24, "1000 ZB"), (2e-6, "2.00 µB"), (0.0009996, "1.00 mB")),
    ],
)
def test_a_quantity_has_three_digits(value: float, text: str) -> None:
    assert quantity(value, "B") == text


@given(st.floats(1e-12, 1e23))
def test_a_quantity_is_right_to_three_digits(value: float) -> None:
    number, unit = quantity(value, "B").split(" ")
    factor = {"p": 1e-12, "n": 1e-9, "µ": 1e-6, "m": 1e-3, "": 1, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
    factor |= {"E": 1e18, "Z": 1e21}
    assert float(number) * factor[unit[:-1]] == pytest.approx(value, rel=0.0051)
    assert len(number.replace(".", "")) == 3


@pytest.mark.parametrize(
    ("time_s", "expected"), [(0, "0 ms"), (0.0123, "12 ms"), (0.9994, "999 ms"), (3.44, "3.4 s"), (125, "2 min 5 s")]
)
def test_a_duration_has_a_fitting_unit(time_s: float, expected: str) -> None:
    assert duration(time_s) == expected


@pytest.mark.parametrize(("time_s", "shown"), [(0, "0:00"), (7.9, "0:07"), (754, "12:34"), (3723, "1:02:03")])
def test_a_clock(time_s: float, shown: str) -> None:
    assert clock(time_s) == shown
