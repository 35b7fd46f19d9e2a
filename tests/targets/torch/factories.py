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


class Annealed(nn.Module):
    """Weighs its loss by how often it was called, from the fourth call on, which no graph has."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.calls = nn.Linear(4, 4), 0

    def forward(self, x: Any) -> Any:
        self.calls += not torch.compiler.is_exporting()
        return self.layer(x).square().mean() / max(1, self.calls - 2)


def annealed(batch: int = 8) -> Any:
    return Annealed(), torch.zeros(batch, 4)


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.scores = nn.Embedding(10, 8), nn.Linear(8, 6)

    def forward(self, tokens: Any, labels: Any) -> Any:
        return nn.functional.cross_entropy(self.scores(self.table(tokens)), labels)


def classifier(batch: int = 8) -> Any:
    return Classifier(), (torch.zeros(batch, dtype=torch.long), torch.zeros(batch, dtype=torch.long))
