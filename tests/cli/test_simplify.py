"""`pase search --simplify`: plans that are more regular than the cheapest ones, and what that costs."""

from pathlib import Path

import pytest

from pase.errors import ConfigurationError
from pase.planning.plan import CHEAPEST
from pase.planning.plan_file import load_plan
from pase.planning.planner import search
from tests.cli.conftest import Command
from tests.planning.test_regular import of_roles


def test_a_search_says_what_regularity_costs(tmp_path: Path, pase: Command) -> None:
    arguments = ["search", "gpt", "--arg", "layers=4", "--batch", "16", "--devices", "4", "--machine", "a100"]
    arguments += ["--cost-model", "step", "--stages", "2", "--micro-batches", "4", "--modes", "all"]
    plans, told = {}, {}
    for share in ("0", "10%"):
        finished = pase(*arguments, "--simplify", share, "-o", str(tmp_path / "plan.json"))
        assert finished.status == 0
        plans[share], told[share] = load_plan(tmp_path / "plan.json"), finished.out
    cheapest, simplest = plans["0"], plans["10%"]
    assert "simplest" not in told["0"]
    assert CHEAPEST not in cheapest.baselines
    assert cheapest.total_cost <= simplest.total_cost <= 1.1 * simplest.baselines[CHEAPEST] * (1 + 1e-8)
    assert simplest.lower_bound <= cheapest.total_cost
    assert not simplest.exact or simplest.total_cost == pytest.approx(cheapest.total_cost, rel=1e-9)
    record = simplest.search
    assert record.simplify == 0.1
    assert of_roles(simplest) <= of_roles(cheapest)
    assert 0 < record.configurations <= record.cheapest_configurations
    more = f"{simplest.total_cost / simplest.baselines[CHEAPEST] - 1:+.2%}"
    assert f"within 10% of the cheapest known: {more}, {record.configurations} configurations" in told["10%"]


def test_shares_that_are_none_are_refused(pase: Command) -> None:
    with pytest.raises(ConfigurationError, match=r"simplify is -0\.1; expected a share of the cost, 0 or more"):
        search("mlp", 2, simplify=-0.1)
    finished = pase("search", "mlp", "--devices", "2", "--simplify", "much")
    assert finished.status == 2
    assert "'much' is not a share; expected a number such as 0.005, or 0.5%" in finished.err
