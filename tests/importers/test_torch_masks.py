"""Masks of attention that a module makes of the lengths of its inputs alone, and those that it does not."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import pase
from pase.graph import Graph

BATCH, STEPS, WIDTH, HEADS = 2, 6, 8, 2

Mask = Callable[[torch.Tensor], Any]


class Attending(nn.Module):
    """Attention with a mask that is made of what it reads."""

    def __init__(self, mask: Mask) -> None:
        super().__init__()
        self.mask = mask
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            part.view(BATCH, STEPS, HEADS, WIDTH // HEADS).transpose(1, 2) for part in self.qkv(x).split(WIDTH, 2)
        )
        y = functional.scaled_dot_product_attention(q, k, v, attn_mask=self.mask(x))
        return y.transpose(1, 2).reshape(x.shape)


def _places(x: torch.Tensor) -> torch.Tensor:
    return torch.arange(x.shape[1], device=x.device)


def _causal(x: torch.Tensor) -> torch.Tensor:
    return (_places(x)[None, :] <= _places(x)[:, None])[None, None].expand(BATCH, 1, -1, -1)


def _functions(graph: Graph) -> set[str]:
    return {step.function for operator in graph.operators if operator.body for step in operator.body.steps}


def _attention(graph: Graph) -> Any:
    (found,) = [operator for operator in graph.operators if operator.kind == "attention"]
    return found


@pytest.mark.parametrize(
    ("mask", "is_causal"),
    [
        (_causal, True),
        (lambda x: _causal(x)[0, 0], True),
        (lambda x: _places(x)[:, None] >= 0, False),
        (lambda _: torch.ones(STEPS, STEPS, dtype=torch.bool), False),
        (lambda _: torch.ones(BATCH, 1, 1, STEPS, dtype=torch.bool).expand(-1, -1, STEPS, -1), False),
    ],
)
def test_a_mask_that_is_known_is_left_out(mask: Mask, is_causal: bool) -> None:
    graph = pase.load((Attending(mask), (torch.randn(BATCH, STEPS, WIDTH),)))
    assert "attention" in _functions(graph)
    assert "masked_attention" not in _functions(graph)
    assert dict(_attention(graph).attributes)["causal"] is is_causal


@pytest.mark.parametrize(
    "mask",
    [
        lambda x: x[:, None, None, :, 0] > 0,
        lambda x: _causal(x).tril(-1) | torch.eye(STEPS, dtype=torch.bool).flip(0),
        lambda x: _places(x)[None, :] >= _places(x)[:, None],
        lambda x: _places(x)[None, :] < 1,
        lambda x: torch.zeros(STEPS, STEPS).masked_fill(~_causal(x)[0, 0], -1e4),
    ],
)
def test_other_masks_stay(mask: Mask) -> None:
    graph = pase.load((Attending(mask), (torch.randn(BATCH, STEPS, WIDTH),)))
    assert "masked_attention" in _functions(graph)
