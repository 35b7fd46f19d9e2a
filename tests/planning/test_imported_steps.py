"""Steps of imported models, whose graph may differ with the batch that they are imported with."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import pase

WIDTH, STEPS = 8, 64


class Attending(nn.Module):
    """Attention that is causal for a few examples at a time, and not for more."""

    def __init__(self, most_causal: int) -> None:
        super().__init__()
        self.most_causal = most_causal
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.unsqueeze(1) for part in self.qkv(x).split(WIDTH, 2))
        is_causal = x.shape[0] <= self.most_causal
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=is_causal).squeeze(1)
        return self.head(y).mean(1)


def _model(most_causal: int, batch: int) -> Any:
    return Attending(most_causal), (torch.zeros(batch, STEPS, WIDTH),)


SETTINGS: dict[str, Any] = {"devices": 1, "machine": "h100", "cost_model": "step"}


@pytest.mark.parametrize("most_causal", [0, 2, 8])
def test_a_step_costs_what_its_micro_batches_do_that_are_imported_alone(most_causal: int) -> None:
    """On one device a step of four micro-batches takes four times as long as one of them."""
    plan = pase.search(_model(most_causal, batch=8), micro_batches=4, **SETTINGS)
    alone = pase.search(_model(most_causal, batch=2), **SETTINGS)
    assert plan.total_cost == pytest.approx(4 * alone.total_cost, rel=1e-9)
    assert plan.exact


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved"])
def test_numbers_of_micro_batches_are_chosen_by_what_the_imported_ones_cost(schedule: str) -> None:
    """The plan has the graph that runs, and no number of micro-batches that is imported takes less."""
    whole, settings = _model(2, batch=8), SETTINGS | {"devices": 2, "stages": 2, "schedule": schedule}
    plan = pase.search(whole, micro_batches="auto", **settings)
    each = {m: pase.search(whole, micro_batches=m, **settings).total_cost for m in (1, 2, 4, 8)}
    assert plan.total_cost == pytest.approx(each[plan.micro_batches], rel=1e-9)
    assert plan.total_cost == pytest.approx(min(each.values()), rel=1e-9)
    assert plan.lower_bound <= min(each.values()) * (1 + 1e-9)
