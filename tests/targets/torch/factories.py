"""Factories of PyTorch modules, as users name them."""

from typing import Any

import torch
from torch import nn


class Tagger(nn.Module):
    """Returns its loss and its logits."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.table, self.first = nn.Embedding(20, width), nn.Linear(width, 4 * width)
        self.norm, self.last = nn.LayerNorm(4 * width), nn.Linear(4 * width, 20)

    def forward(self, tokens: Any, labels: Any) -> Any:
        logits = self.last(self.norm(torch.relu(self.first(self.table(tokens)))))
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


def tagger(batch: int = 8, width: int = 16) -> Any:
    tokens = torch.zeros(batch, 6, dtype=torch.long)
    return Tagger(width), {"tokens": tokens, "labels": tokens.clone()}


def images(batch: int = 8) -> Any:
    """A module and its loss apart."""
    module = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.Tanh(), nn.Flatten(), nn.Linear(8 * 64, 10))
    return module, (torch.zeros(batch, 3, 8, 8), torch.zeros(batch, dtype=torch.long)), nn.CrossEntropyLoss()


def without_loss() -> Any:
    return nn.Linear(4, 4), torch.zeros(2, 4)
