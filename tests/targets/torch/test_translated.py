"""Operators of PyTorch that are translated into steps train as PyTorch does, on one device and split over two."""

import copy
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from pase.importers.torch.live import trace_live
from pase.targets.torch.parallel import parallelize
from tests.runtime.plans import random_plan
from tests.targets.torch.equality import difference, full
from tests.targets.torch.ranks import Pool

Function = Callable[..., Any]
Functions = Mapping[str, tuple[Function, tuple[tuple[int, ...], ...]]]
"""By a name, a function of rows [4, 6] that depend on the input, and of weights of these shapes."""


def images(x: Any) -> Any:
    return x.reshape(4, 2, 3)


def heads(x: Any) -> Any:
    return x.reshape(4, 2, 1, 3)


DISTANCES: Functions = {
    "cosine": (functional.cosine_similarity, ((4, 6),)),
    "cosine of pairs": (lambda x, w: functional.cosine_similarity(x[:, None], w, dim=-1), ((5, 6),)),
    "cosine of zeros": (lambda x, w: functional.cosine_similarity(0 * x, w), ((4, 6),)),
    "cosine with a large epsilon": (lambda x, w: functional.cosine_similarity(x, w, eps=2.0), ((4, 6),)),
    "distance": (functional.pairwise_distance, ((4, 6),)),
    "largest distance": (lambda x, w: functional.pairwise_distance(x, w, p=float("inf")), ((4, 6),)),
    "distance of cubes": (lambda x, w: functional.pairwise_distance(x, w, p=3.0), ((4, 6),)),
    "triplet": (lambda x, w: functional.triplet_margin_loss(x, w, w.flip(0), swap=True), ((4, 6),)),
    "embedding": (
        lambda x, w: functional.cosine_embedding_loss(x, w, torch.tensor([1.0, -1, -1, 1]), margin=0.1),
        ((4, 6),),
    ),
}
PRODUCTS: Functions = {
    "addmm": (lambda x, b, w: torch.addmm(b, x, w, alpha=2.0, beta=0.5), ((3,), (6, 3))),
    "addmm of a column": (lambda x, b, w: torch.addmm(b, x, w, alpha=-1, beta=3), ((4, 1), (6, 3))),
    "addmm without": (lambda x, b, w: torch.addmm(b, x, w, alpha=0.5, beta=0) + b.sum(), ((3,), (6, 3))),
    "baddbmm": (
        lambda x, b, w: torch.baddbmm(b, images(x), w, alpha=2.0, beta=0.5),
        ((4, 2, 5), (4, 3, 5)),
    ),
    "addmv": (lambda x, b, w: torch.addmv(b, x, w, alpha=2.0, beta=0.5), ((4,), (6,))),
    "softplus": (lambda x: functional.softplus(x, beta=2.0, threshold=0.5), ()),
    "softmax of one": (lambda x: functional.softmax(x.reshape(4, 1, 6), 1) * x[:, None], ()),
    "logarithm of one": (lambda x: functional.log_softmax(x.reshape(4, 1, 6), 1) + x[:, None], ()),
    "one key": (lambda x, w: functional.scaled_dot_product_attention(heads(x), heads(w), heads(w)), ((4, 6),)),
}
CONDITIONS: Functions = {
    "two numbers": (lambda x: torch.where(x > 0, 2.0, 3.0) * x, ()),
    "not": (lambda x: torch.where(~(x > 0), x, 2 * x), ()),
    "and": (lambda x: ((x > -0.5) & (x < 0.5)) * x, ()),
    "or": (lambda x: ((x < -0.5) | (x > 0.5)).to(x.dtype) * x, ()),
    "xor": (lambda x: ((x < -0.5) ^ (x < 0.5)).to(x.dtype) * x, ()),
    "one less": (lambda x: (1 - (x > 0).float()) * x, ()),
    "differences": (lambda x: ((x > 0).long() - (x > 0.5).long()) * x, ()),
    "sum of truths": (lambda x: ((x > 0) + (x > 0.5)) * x, ()),
    "logical": (lambda x: torch.logical_or(x > 0, torch.logical_and(x, x < -0.5)) * x, ()),
    "mean of some": (lambda x: (x * ~(x > 0)).sum(1) / (~(x > 0)).sum(1).clamp(min=1), ()),
    "filled": (lambda x: x.masked_fill(~(x > 0) & (x > -1), 0.25), ()),
    "whole": (lambda x: (3 * x).long() * x, ()),
}
WINDOWS: Functions = {
    "cut": (lambda x: functional.pad(x, (-1, -2)) ** 2, ()),
    "cut and padded": (lambda x: functional.pad(x, (2, -1, 0, 0)), ()),
    "cut and filled": (lambda x: functional.pad(x, (-1, 2), value=3.0), ()),
    "causal": (
        lambda x, w: functional.conv1d(functional.pad(images(x).transpose(1, 2), (2, 0)), w),
        ((5, 3, 3),),
    ),
    "causal of channels": (
        lambda x, w: functional.conv1d(functional.pad(x.reshape(4, 3, 2).mT, (1, 0)), w, groups=2).mT,
        ((2, 1, 2),),
    ),
    "slopes of channels": (
        lambda x, w, a: functional.prelu(functional.conv1d(images(x), w, padding=1), a),
        ((3, 2, 3), (3,)),
    ),
    "slopes of columns": (functional.prelu, ((6,),)),
    "uneven maxima": (lambda x: functional.adaptive_max_pool1d(x[:, None], 4), ()),
    "uneven means": (lambda x: functional.adaptive_avg_pool2d(images(x)[:, None], (2, 2)), ()),
}
GROUPS = {"distances": DISTANCES, "products": PRODUCTS, "conditions": CONDITIONS, "windows": WINDOWS}


class Computing(nn.Module):
    """The sum of what functions of one layer's rows give, none of which makes up for another."""

    def __init__(self, functions: Functions) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.functions = [function for function, _ in functions.values()]
        self.layer = nn.Linear(6, 6)
        self.given = nn.ModuleList(
            nn.ParameterList(torch.randn(shape) for shape in shapes) for _, shapes in functions.values()
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layer(x)
        made = [function(x, *given) for function, given in zip(self.functions, self.given, strict=True)]
        return torch.stack([(y.square() + y).mean() * number for number, y in enumerate(made, start=1)]).sum()


def differences(_rank: int, world: int, group: str) -> list[float]:
    """Return how the loss and the gradients under a random plan differ from those of the module by itself."""
    module, x = Computing(GROUPS[group]).double(), torch.linspace(-2, 3, 24, dtype=torch.float64).sin().reshape(4, 6)
    own = copy.deepcopy(module)
    plan = random_plan(trace_live((module, x)).model.graph, world, 0)
    parallel = parallelize((module, x), plan, check=False)
    losses = [each(x) for each in (parallel, own)]
    for loss in losses:
        loss.backward()
    pairs = zip(parallel.parameters(), own.parameters(), strict=True)
    return [difference(*losses), *(difference(full(one.grad), other.grad) for one, other in pairs)]


@pytest.mark.full
@pytest.mark.parametrize("group", GROUPS)
def test_operators_train_as_by_themselves(group: str) -> None:
    found = differences(0, 1, group)
    assert max(found) < 1e-12, found


@pytest.mark.parametrize("group", GROUPS)
def test_operators_train_split_as_by_themselves(ranks: Pool, group: str) -> None:
    for found in ranks.run(differences, group, world=2):
        assert max(found) < 1e-12, found
