"""The zoo: a sample of it in the suite, the rest with `-m full`, or by `python -m tests.zoo`."""

from dataclasses import replace

import pytest
import torch

from tests.targets.torch.ranks import Pool
from tests.zoo.registry import zoo
from tests.zoo.runner import EQUAL, PLANS, REFUSED, Training, differing, run

SAMPLE = (
    # What a layer reads out of order; splits that no rule carries.
    "shuffled groups of channels",
    "deformable sampling",
    # What translations leave out.
    "attention, padded on the left",
    "padding rows and scaled gradients",
    "squares of what dropout leaves",
)

OTHERS = [pytest.param(name, marks=pytest.mark.full) for name in zoo() if name not in SAMPLE]


@pytest.mark.parametrize("name", SAMPLE)
def test_a_model_trains_under_plans_as_by_itself(name: str, ranks: Pool) -> None:
    (report,) = run(ranks, [name], (2,), PLANS)
    assert report.kind == EQUAL, report.text()


@pytest.mark.parametrize("name", OTHERS)
def test_a_model_trains_as_by_itself_or_is_refused(name: str, ranks: Pool) -> None:
    (report,) = run(ranks, [name], (2, 4), PLANS)
    assert report.kind in (EQUAL, REFUSED), report.text()


def test_what_differs_is_told() -> None:
    gradients = {"w": torch.tensor([1.0, 2.0], dtype=torch.float64), "frozen": None}
    state = {"w": torch.tensor([0.5, -4.0], dtype=torch.float64), "count": torch.tensor(3)}
    expected = Training(losses=[1.0, 0.5, 0.25], gradients=gradients, state=state)
    assert differing(expected, expected) == ("", 0.0)
    near = {**state, "w": state["w"] * (1 + 1e-13)}
    assert differing(replace(expected, state=near), expected)[0] == ""
    for changed, told in (
        ({"losses": [1.0, 0.5, 0.25 + 1e-9]}, "1 of 7 differ, the first: loss of step 3"),
        ({"losses": [1.0, 0.5, float("nan")]}, "1 of 7 differ, the first: loss of step 3"),
        ({"gradients": {**gradients, "w": gradients["w"] + 1e-9}}, "gradient of w"),
        ({"gradients": {**gradients, "frozen": torch.zeros(2)}}, "gradient of frozen"),
        ({"gradients": {**gradients, "w": None}}, "gradient of w"),
        ({"state": {**state, "count": torch.tensor(4)}}, "value of count"),
        ({"state": {"w": state["w"]}}, "values have other names"),
    ):
        assert told in differing(replace(expected, **changed), expected)[0], changed
