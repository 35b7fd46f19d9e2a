"""Modules of which something else is traced than they compute: what `pase.check` is to find, and where."""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional


def _is_traced(x: Any) -> bool:
    return torch.compiler.is_exporting() or isinstance(x, FakeTensor)


class Net(nn.Module):
    """An embedding whose weights are those of the scores, too, batch normalisation, dropout and a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.first, self.norm = nn.Embedding(12, 8), nn.Linear(8, 16), nn.BatchNorm1d(16)
        self.drop, self.last, self.scores = nn.Dropout(0.3), nn.Linear(16, 8), nn.Linear(8, 12, bias=False)
        self.scores.weight = self.table.weight

    def between(self, x: Any) -> Any:
        return torch.tanh(x)

    def forward(self, tokens: Any, labels: Any) -> Any:
        x = self.between(self.norm(self.first(self.table(tokens))))
        logits = self.scores(self.last(self.drop(x)))
        return {"loss": functional.cross_entropy(logits, labels), "logits": logits}


class OtherValue(Net):
    """Its loss is another one by a share of 10⁻⁹, which float32 does not show."""

    def between(self, x: Any) -> Any:
        return torch.tanh(x) * (1 + 1e-9 * _is_traced(x))


class OtherGradient(Net):
    """Its values are right."""

    def between(self, x: Any) -> Any:
        y = torch.tanh(x)
        return y if _is_traced(x) else 2 * y - y.detach()


class OtherBuffer(Net):
    """Its statistics of batches are kept by another share."""

    def forward(self, tokens: Any, labels: Any) -> Any:
        self.norm.momentum = 0.2 if _is_traced(tokens) else 0.1
        return super().forward(tokens, labels)


class OtherOnRanks(Net):
    """By itself it computes something else on the second rank."""

    def between(self, x: Any) -> Any:
        is_second = dist.is_initialized() and dist.get_rank() == 1
        return torch.tanh(x) * (1.5 if is_second and not _is_traced(x) else 1.25)


class OfOneType(Net):
    """It computes in float32 alone."""

    def between(self, x: Any) -> Any:
        if x.dtype != torch.float32:
            raise TypeError(f"these are {x.dtype}")
        return torch.tanh(x)


KINDS = {kind.__name__: kind for kind in (Net, OtherValue, OtherGradient, OtherBuffer, OtherOnRanks, OfOneType)}


def given(batch: int = 4) -> dict[str, Any]:
    numbers = torch.arange(batch)
    return {"tokens": (5 * numbers + 2) % 12, "labels": (7 * numbers) % 12}


def make(kind: str = "Net", batch: int = 4) -> Any:
    return KINDS[kind](), given(batch)
