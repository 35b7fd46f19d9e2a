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


class Packed(nn.Module):
    """Attention under a causal mask that is told for each example apart, as libraries that pack examples make it."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(4, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, steps, _ = x.shape
        places = torch.arange(steps).unsqueeze(0).expand(batch, -1)
        examples = (places.diff(prepend=places[:, :1] - 1, dim=-1) != 1).cumsum(-1)
        numbers = torch.arange(batch)[:, None, None, None]
        queries, keys = torch.arange(steps)[None, None, :, None], torch.arange(steps)[None, None, None, :]
        mask = (examples[numbers, queries] == examples[numbers, keys]) & (
            places[numbers, keys] <= places[numbers, queries]
        )
        q, k, v = (part.unsqueeze(1) for part in self.qkv(x).split(4, 2))
        return functional.scaled_dot_product_attention(q, k, v, attn_mask=mask).squeeze(1)


def test_a_mask_is_as_well_known_of_a_large_batch_as_of_a_small_one() -> None:
    """What a step costs does not depend on whether the model is imported with its batch or with a micro-batch."""
    of_batch = {batch: pase.load((Packed(), (torch.zeros(batch, 640, 4),))) for batch in (2, 256)}
    for graph in of_batch.values():
        assert dict(_attention(graph).attributes)["causal"] is True
