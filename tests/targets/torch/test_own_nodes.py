"""Modules whose own nodes lie otherwise than the layers of a plan have it, split over ranks, beside the modules."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

import pase
from pase.graph import Graph
from pase.importers.torch.live import trace_live
from pase.planning.plan import Plan
from pase.targets.torch.aten import AtenLayers
from pase.targets.torch.parallel import parallelize
from tests.runtime.plans import make_plan, placed, random_plan
from tests.targets.torch.equality import descended, difference, predicted_of, sent_by, wrong_bytes
from tests.targets.torch.lockstep import Sent
from tests.targets.torch.ranks import Pool

X = torch.linspace(-2.0, 3.0, 64, dtype=torch.float64).reshape(4, 2, 8).sin() * 2


class Permuted(nn.Module):
    """What is squashed, and read by others, is in another order than the product's result, of which it is made."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 12), nn.Linear(6, 4)

    def forward(self, x: Any) -> Any:
        y = self.first(x).reshape(4, 2, 3, 4).permute(3, 0, 2, 1).tanh()
        return (self.last(y.reshape(4, 4, 6)) * y.sum((2, 3))[..., None]).square().mean()


class Repeated(nn.Module):
    """What is squashed is repeated before."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 6), nn.Linear(6, 4)

    def forward(self, x: Any) -> Any:
        y = self.first(x).reshape(4, 1, 2, 6).expand(4, 3, 2, 6).transpose(0, 2)
        return self.last(y.tanh() * y.detach()).square().mean()


class Joined(nn.Module):
    """A cache that is empty yet stands before the keys."""

    def __init__(self) -> None:
        super().__init__()
        self.keys = nn.Linear(8, 6)

    def forward(self, x: Any) -> Any:
        keys = self.keys(x)
        keys = torch.cat([keys.new_zeros(0), keys * keys.detach()], dim=-2)
        return keys.sigmoid().mean()


class Waves(nn.Module):
    """Weights are complex where they are used; a gradient of theirs is conjugated."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.last = nn.Parameter(torch.randn(8, 5, 2)), nn.Linear(4, 3)

    def forward(self, x: Any) -> Any:
        waves = torch.einsum("bsf,cf->bsc", torch.fft.rfft(x), torch.view_as_complex(self.weight))
        return self.last(torch.fft.irfft(waves.conj(), 4)).square().mean()


class Mirrored(nn.Module):
    """Its own scores are returned in two orders."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 6), nn.Linear(16, 6)

    def forward(self, x: Any) -> Any:
        scores = self.first(x.flatten(1)) @ self.last(x.flatten(1)).T * 2
        return {"loss": scores.square().mean(), "scores": scores, "back": scores.T}


class Remembering(nn.Module):
    """A part of an input, as it is given, is joined with what is computed of another part."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 6), nn.Linear(14, 4)

    def forward(self, x: Any) -> Any:
        return self.last(torch.cat([x[:, 0], self.first(x[:, 1])], -1)).square().mean()


class Normed(nn.Module):
    """Channels of examples that were put together in another order are normalised."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(8, 6), nn.BatchNorm1d(6), nn.Linear(6, 4)

    def forward(self, x: Any) -> Any:
        y = self.first(x.reshape(2, 2, 2, 8).permute(1, 0, 2, 3)).reshape(4, 2, 6)
        return self.last(self.norm(y.transpose(1, 2)).transpose(1, 2)).square().mean()


class Interleaved(nn.Module):
    """Examples are repeated, with the number of all of them told."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 6), nn.Linear(6, 4)

    def forward(self, x: Any) -> Any:
        y = torch.repeat_interleave(self.first(x), 2, dim=0, output_size=8)
        return self.last(y.tanh()).square().mean()


class Overlapping(nn.Module):
    """Windows are told by places in memory, of a tensor that is transposed there."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 6), nn.Linear(4, 3)

    def forward(self, x: Any) -> Any:
        y = self.first(x).transpose(1, 2).tanh()
        windows = y.as_strided((4, 2, 2, 4), (12, 4, 2, 1))
        return self.last(windows.softmax(-1)).square().mean()


class Chosen(nn.Module):
    """The best two of each are chosen; their numbers are read in part."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.tables = nn.Linear(8, 6), nn.Parameter(torch.randn(6, 3))

    def forward(self, x: Any) -> Any:
        values, chosen = self.first(x).softmax(-1).topk(2, -1)
        return (values * self.tables[chosen[..., 0]][..., :2]).square().sum()


class Scattered(nn.Module):
    """Bands of a product are written into another tensor and scaled: moves that no dims tell."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 6), nn.Linear(6, 3)

    def forward(self, x: Any) -> Any:
        y, z = self.first(x), torch.zeros(4, 2, 6, dtype=x.dtype)
        z[:, :1, 2:] = y[:, 1:, :4]
        z[:, 1:, :3] = y[:, :1, 3:]
        return self.last(z.sin()).square().mean()


class Placed(nn.Module):
    """Rows of a table are added to a product that is taken apart, and what is computed of the input is multiplied."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.table, self.last = nn.Linear(8, 12), nn.Embedding(5, 12), nn.Linear(3, 4)
        self.register_buffer("places", torch.tensor([3, 0]))

    def forward(self, x: Any) -> Any:
        y = (self.first(x) + self.table(self.places)).reshape(4, 2, 4, 3)
        return (self.last(y.tanh()) * (2 * x - 1)[:, :, :4, None]).square().mean()


QUICK = (Permuted, Waves, Mirrored, Remembering, Normed, Chosen, Placed)
OTHERS = (Repeated, Joined, Interleaved, Overlapping, Scattered)
MODULES = {kind.__name__: kind for kind in (*QUICK, *OTHERS)}


def _made(name: str) -> nn.Module:
    torch.manual_seed(1)
    return MODULES[name]().double()


def _trained(module: nn.Module, steps: int = 2) -> tuple[list[float], dict[str, Any]]:
    return descended(module, X, steps)


def _on_rank(_rank: int, _world: int, given: list[tuple[str, Plan]]) -> list[Any]:
    return [_trained(parallelize(_made(name), plan, verify="off")) for name, plan in given]


def _plan(graph: Graph, kind: str) -> Plan:
    """Return a plan that splits the first dim of every layer that can be, or a random one."""
    if kind != "first dims":
        return random_plan(graph, 2, int(kind.removeprefix("random ")))
    splits = {}
    for operator in graph.operators:
        even = [dim for dim, extent in operator.extents.items() if extent % 2 == 0 and dim not in operator.unsplittable]
        splits[operator.name] = dict.fromkeys(even[:1], 2)
    return placed(make_plan(graph, 2, splits))


@pytest.mark.parametrize(
    ("kinds", "plan"),
    [
        (QUICK, "first dims"),
        pytest.param(OTHERS, "first dims", marks=pytest.mark.full),
        *(pytest.param((*QUICK, *OTHERS), f"random {seed}", marks=pytest.mark.full) for seed in range(3)),
    ],
)
def test_modules_are_trained_as_by_themselves(ranks: Pool, kinds: Sequence[type[nn.Module]], plan: str) -> None:
    names = [kind.__name__ for kind in kinds]
    given = [(name, _plan(pase.load((_made(name), X)), plan)) for name in names]
    alone = {name: _trained(_made(name)) for name in names}
    for found in ranks.run(_on_rank, given, world=2):
        for (name, _), (losses, state) in zip(given, found, strict=True):
            expected_losses, expected = alone[name]
            assert losses == pytest.approx(expected_losses, rel=1e-12), name
            assert all(difference(state[key], x) < 1e-12 for key, x in expected.items() if x.is_floating_point()), name


def _sent_on_rank(_rank: int, _world: int, given: list[tuple[str, Plan]]) -> list[Sent]:
    found = []
    for name, plan in given:
        parallel = parallelize(_made(name), plan, verify="off")
        parallel.traffic.is_counted = True
        _trained(parallel, steps=1)
        found.append(sent_by(parallel, plan))
    return found


@pytest.mark.parametrize("dim", ["b", "s", "n"])
def test_gradients_of_rows_of_a_table_are_summed_with_those_of_the_table(ranks: Pool, dim: str) -> None:
    graph = pase.load((_made("Placed"), X))
    plan = placed(make_plan(graph, 2, {op.name: {dim: 2} for op in graph.operators if op.extents.get(dim, 1) > 1}))
    sent = ranks.run(_sent_on_rank, [("Placed", plan)], world=2)
    assert wrong_bytes([found[0] for found in sent], predicted_of(plan)) == {}
    assert AtenLayers(trace_live((_made("Placed"), X)), plan).notes == []


def test_splits_are_carried_through_a_node_of_another_order() -> None:
    live = trace_live((_made("Permuted"), X))
    graph = live.model.graph
    plan = make_plan(graph, 2, {"first": {"b": 2}})
    layers = AtenLayers(live, plan)
    (order,) = layers.graphs[True].orders.values()
    assert order.base == (4, 2, 12)
    assert order.shape == (4, 4, 3, 2)
    assert not layers.layers["first"][True].layer.is_whole
