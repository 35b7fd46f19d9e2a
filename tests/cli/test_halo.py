"""`pase halo`: the paper's worked examples as a user sees them, and what is refused."""

import json
import re

import pytest

from tests.cli.conftest import Command

B2 = ("halo", "--extent", 11, "--kernel", 5, "--stride", 1, "--padding", 2, "--workers", 3)


def test_the_table_of_figure_b2(pase: Command) -> None:
    finished = pase(*B2)
    assert (finished.status, finished.err) == (0, "")
    first, _, header, *rows, _, legend = finished.out.splitlines()
    assert first == "input 11, output 11: kernel 5, stride 1, dilation 1, padding 2"
    assert header.split() == ["worker", "output", "owns", "needs", "halo", "unused", "padding"]
    assert [re.split(r"  +", row.strip()) for row in rows] == [
        ["0", "[0, 4)", "[0, 4)", "[0, 6)", "0 | 2", "0 | 0", "2 | 0"],
        ["1", "[4, 8)", "[4, 8)", "[2, 10)", "2 | 2", "0 | 0", "0 | 0"],
        ["2", "[8, 11)", "[8, 11)", "[6, 11)", "2 | 0", "0 | 0", "0 | 2"],
    ]
    assert "left | right" in legend


def test_the_json_of_figure_b5(pase: Command) -> None:
    finished = pase("halo", "--extent", 20, "--kernel", 2, "--stride", 2, "--workers", 6, "--json")
    assert (finished.status, finished.err) == (0, "")
    document = json.loads(finished.out)
    assert {key: value for key, value in document.items() if key != "workers"} == {
        "extent": 20,
        "kernel": 2,
        "stride": 2,
        "dilation": 1,
        "padding": 0,
        "output_extent": 10,
    }
    assert len(document["workers"]) == 6
    assert document["workers"][3] == {
        "output": [6, 8],
        "owned_input": [11, 14],
        "needed_input": [12, 16],
        "halo_left": 0,
        "halo_right": 2,
        "unused_left": 1,
        "unused_right": 0,
        "padding_left": 0,
        "padding_right": 0,
    }


def test_dilation_reaches_the_geometry(pase: Command) -> None:
    document = json.loads(pase("halo", "--extent", 9, "--kernel", 2, "--dilation", 4, "--workers", 2, "--json").out)
    assert [worker["needed_input"] for worker in document["workers"]] == [[0, 7], [3, 9]]


@pytest.mark.parametrize("extent", [1, 64, 99_999])
def test_the_table_fits_80_columns(extent: int, pase: Command) -> None:
    finished = pase("halo", "--extent", extent, "--kernel", 1, "--workers", 12, "--padding", 3)
    assert max(map(len, finished.out.splitlines())) <= 80


def test_workers_with_nothing_to_do_are_shown(pase: Command) -> None:
    finished = pase("halo", "--extent", 3, "--kernel", 2, "--workers", 4)
    assert finished.status == 0
    assert finished.out.splitlines()[-3].split() == ["3", "none", "none", "none", *(["0", "|", "0"] * 3)]
