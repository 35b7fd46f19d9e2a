"""`pase evaluate` and `pase diff`: strategies of one's own as tables, as JSON and as plans."""

from pathlib import Path

import pytest

from pase import load_plan
from tests.cli.conftest import Command, document_of

MODEL = ("alexnet", "-b", "16", "--arg", "image=64", "--arg", "width=8", "--arg", "classes=16")
ALEXNET = (*MODEL, "-p", "8")
OF_ALEXNET = ("--model", *ALEXNET)

HAND = """\
rest = "data_parallel"

[pin]
"fc*" = "n=2 c=4"
"""


def test_a_file_is_evaluated_written_and_read(pase: Command, tmp_path: Path) -> None:
    strategy, plan = tmp_path / "hand.toml", tmp_path / "plan.json"
    strategy.write_text(HAND)
    model, *others = ALEXNET
    document = document_of(pase, "evaluate", model, strategy, *others, "-o", plan)
    assert load_plan(plan).total_cost == document["total_cost"]
    splits = {layer["name"]: layer["splits"] for layer in document["layers"]}
    assert splits["fc2"] == {"b": 1, "n": 2, "c": 4}
    assert splits["conv1"]["b"] == 8
    best = document_of(pase, "search", *ALEXNET)
    assert document["optimum"]["total_cost"] == pytest.approx(best["total_cost"])
    assert document["lower_bound"] == pytest.approx(best["total_cost"])
    assert document["improvement"]["saving"] > 0
    assert document["improvement"]["total_cost"] < document["total_cost"]
    # A plan's devices, machine and cost model are its own.
    again = document_of(pase, "evaluate", *MODEL[:1], plan, *MODEL[1:])
    times = {"search": None, "tool_version": None}
    assert again | times == document | times


def test_what_is_printed(pase: Command) -> None:
    finished = pase("evaluate", "alexnet", "owt", "-p", 32)
    assert finished.status == 0
    for line in (
        "  total cost              57.4 GFLOP, 5.06 ms at a device's peak   (gap 40.57%, lower bound 34.1 GFLOP)",
        "  cheapest strategy       34.1 GFLOP   (this one costs 1.68 × that)",
        "  largest excess          fc1: 10.2 GFLOP more than in the cheapest strategy",
        "  change first            fc1 to n=2 c=16: -19%, 46.5 GFLOP in all",
    ):
        assert line in finished.out.splitlines()
    best = pase("evaluate", "alexnet", "optimal", "-p", 32).out
    assert "(proven optimal)" in best
    assert "change first" not in best


def test_explain_says_what_to_change_first(pase: Command, tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    model, *others = ALEXNET
    evaluated = document_of(pase, "evaluate", model, "data_parallel", *others, "-o", plan)
    assert document_of(pase, "explain", plan)["improvement"] == evaluated["improvement"]
    assert "  change first  " in pase("explain", plan).out


def test_differences_of_two_schemes_add_up(pase: Command) -> None:
    document = document_of(pase, "diff", "data_parallel", "optimal", *OF_ALEXNET)
    first, second = (plan["total_cost"] for plan in document["plans"])
    assert document["difference"] == pytest.approx(second - first)
    assert sum(row["difference"] for row in document["layers"]) == pytest.approx(second - first)
    for row in document["layers"]:
        assert row["difference"] == row["costs"][1] - row["costs"][0]
    printed = pase("diff", "data_parallel", "optimal", *OF_ALEXNET).out
    for row in document["layers"]:
        assert row["name"] in printed
    assert "all 12 layers" in printed


def test_a_plan_beside_a_file_that_starts_from_it(pase: Command, tmp_path: Path) -> None:
    plan, other = tmp_path / "plan.json", tmp_path / "other.toml"
    assert pase("search", *ALEXNET, "-o", plan).status == 0
    other.write_text('start = "plan.json"\n[pin]\nconv2 = "not split"\n')
    document = document_of(pase, "diff", plan, other)
    assert document["plans"][0]["total_cost"] == load_plan(plan).total_cost
    assert "conv2" in [row["name"] for row in document["layers"]]
    same = pase("diff", plan, plan).out
    assert "0 of 12 layers have another configuration" in same
