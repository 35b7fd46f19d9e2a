"""Modules that only their own graph trains, split over ranks, beside the unmodified ones."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import pase
from pase.errors import EmitError
from pase.importers.torch.live import trace_live
from pase.planning.plan import Plan
from pase.targets.torch.aten import AtenLayers
from pase.targets.torch.parallel import parallelize
from tests.importers.test_torch_training import DRAWN, OWN, REFUSED
from tests.runtime.plans import make_plan, random_plan
from tests.targets.torch.equality import descended, difference
from tests.targets.torch.ranks import Pool

X = torch.linspace(-2.0, 3.0, 32, dtype=torch.float64).reshape(4, 8).sin() * 2


def _made(name: str) -> nn.Module:
    torch.manual_seed(1)
    module: nn.Module = REFUSED[name][0]().double()
    return module


def _trained(module: nn.Module) -> tuple[list[float], dict[str, Any]]:
    return descended(module, X, 3)


def _on_rank(_rank: int, _world: int, given: list[tuple[str, Plan]]) -> list[Any]:
    return [_trained(parallelize(_made(name), plan, check=False)) for name, plan in given]


@pytest.mark.parametrize("seed", [0, pytest.param(3, marks=pytest.mark.full)])
def test_what_its_own_graph_trains_is_trained_on_ranks(ranks: Pool, seed: int) -> None:
    given = [(name, random_plan(pase.load((_made(name), X)), 2, seed)) for name in OWN if name != "no_grad"]
    alone = {name: _trained(_made(name)) for name, _ in given}
    for found in ranks.run(_on_rank, given, world=2):
        for (name, _), (losses, state) in zip(given, found, strict=True):
            expected_losses, expected = alone[name]
            assert losses == pytest.approx(expected_losses, rel=1e-12), name
            assert all(difference(state[key], x) < 1e-12 for key, x in expected.items() if x.is_floating_point()), name


def _numbers_of_rank(_rank: int, _world: int, given: list[tuple[str, Plan]]) -> list[Any]:
    return [_trained(parallelize(_made(name), plan)) for name, plan in given]


def test_random_numbers_are_those_of_one_device_whatever_the_plan(ranks: Pool) -> None:
    """Seeds are of the step and the place in the graph; one device is compared with the module in its first step."""
    given = [(name, random_plan(pase.load((_made(name), X)), 2, 3)) for name in DRAWN]
    alone = {name: _trained(parallelize(_made(name), pase.search((_made(name), X), devices=1))) for name in DRAWN}
    for found in ranks.run(_numbers_of_rank, given, world=2):
        for (name, _), (losses, state) in zip(given, found, strict=True):
            expected_losses, expected = alone[name]
            assert losses == pytest.approx(expected_losses, rel=1e-12), name
            assert len(set(losses)) == 3, name
            assert all(difference(state[key], x) < 1e-12 for key, x in expected.items() if x.is_floating_point()), name


def test_a_layer_whose_splits_are_not_carried_through_is_named() -> None:
    """A function of the user's own is given whole tensors."""
    graph = pase.load((_made("gradient reversal"), X))
    live = trace_live((_made("gradient reversal"), X))
    plan = random_plan(graph, 2, 0)
    layers = AtenLayers(live, plan)
    assert layers.problem == ""
    assert set(layers.layers) == {op.name for op in plan.graph.operators if not op.is_fan_out}
    assert layers.others == {}


class Fused(nn.Module):
    """Queries, keys and values are cut out of one product, in one of the ways of Hugging Face's models."""

    def __init__(self, cut: str) -> None:
        super().__init__()
        self.cut, self.weight, self.bias = cut, nn.Parameter(torch.randn(8, 24)), nn.Parameter(torch.randn(24))

    def forward(self, x: Any) -> Any:
        given = x.reshape(2, 2, 8)
        made = torch.addmm(self.bias, given.reshape(-1, 8), self.weight).view(2, 2, 24)
        if self.cut == "split":
            parts = [part.reshape(2, 2, 2, 4) for part in made.split(8, dim=2)]
        elif self.cut == "index":
            heads = made.view(2, 2, 6, 4)
            parts = [heads[:, :, :-4], heads[:, :, [2, 3]], heads[:, :, [-2, -1]]]
        else:
            parts = [made[..., at : at + 8].reshape(2, 2, 2, 4) for at in (0, 8, 16)]
            # The part that is not turned has no points.
            parts[:2] = [torch.cat([part[..., :4].tanh(), part[..., 4:]], -1) for part in parts[:2]]
        q, k, v = (part.transpose(1, 2) for part in parts)
        return functional.scaled_dot_product_attention(q, k, v, torch.ones(2, 2).tril().bool()).square().mean()


@pytest.mark.parametrize("cut", ["split", "index", "part"])
def test_attention_is_split_whatever_its_operands_are_cut_out_of(cut: str) -> None:
    live = trace_live((Fused(cut), X))
    graph = live.model.graph
    plan = make_plan(graph, 2, {op.name: {"b": 2} for op in graph.operators if "b" in op.extents})
    layers = AtenLayers(live, plan)
    assert {name for name, own in layers.layers.items() if own[True].layer.is_whole} == set()
    assert [graph[name].kind for name in layers.layers].count("attention") == 1


# -- what users write


class Weighted(nn.Module):
    """A loss that counts classes differently, of weights that are a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.scores = nn.Linear(8, 4)
        self.register_buffer("weights", torch.tensor([1.0, 2.0, 0.5, 1.0]))

    def forward(self, x: Any) -> Any:
        return functional.cross_entropy(self.scores(x), torch.arange(4), weight=self.weights)


class Answers(nn.Module):
    """What is returned beside the loss are the halves of one product: where an answer begins, and where it ends."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.ends = nn.Linear(2, 6), nn.Linear(6, 2)

    def forward(self, x: Any) -> Any:
        begin, end = self.ends(self.first(x.reshape(4, 4, 2)).relu()).split(1, dim=-1)
        begin, end, places = begin.squeeze(-1), end.squeeze(-1), torch.arange(4)
        loss = functional.cross_entropy(begin, places) + functional.cross_entropy(end, 3 - places)
        return {"loss": loss, "begin": begin, "end": end}


class Policy(nn.Module):
    """Its distribution would look at values of its parameters, were it asked to."""

    def __init__(self) -> None:
        super().__init__()
        self.scores = nn.Linear(8, 4)

    def forward(self, x: Any) -> Any:
        chosen = torch.distributions.Categorical(logits=self.scores(x))
        return -chosen.log_prob(torch.arange(4)).mean() - 0.1 * chosen.entropy().mean()


class Sorted(nn.Module):
    """The Lovász hinge: errors in order, and how much each adds."""

    def __init__(self) -> None:
        super().__init__()
        self.scores = nn.Linear(2, 1)

    def forward(self, x: Any) -> Any:
        labels = (x[:, :4] > 0).to(x.dtype)
        errors, places = (1 - self.scores(x.reshape(4, 4, 2)).flatten() * labels.flatten()).sort(descending=True)
        counts = labels.flatten()[places].cumsum(0)
        return (errors.relu() * torch.cat([counts[:1], counts[1:] - counts[:-1]])).sum()


class Following(nn.Module):
    """A target network, frozen, that follows the one that is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.online, self.target = nn.Linear(8, 4), nn.Linear(8, 4).requires_grad_(False)

    def forward(self, x: Any) -> Any:
        with torch.no_grad():
            for own, other in zip(self.target.parameters(), self.online.parameters(), strict=True):
                own.mul_(0.9).add_(other * 0.1)
            target = self.target(x)
        return (self.online(x.tanh()) - target).square().mean()


class Recomputed(nn.Module):
    """Its batch norm is recomputed in the backward pass, which writes its moments once more."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)

    def forward(self, x: Any) -> Any:
        def inner(y: Any) -> Any:
            return self.second(self.norm(y).tanh())

        return checkpoint(inner, self.first(x), use_reentrant=False).square().mean()


class Shuffled(nn.Module):
    """What is returned beside the loss has the points of a convolution in an order of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 1)

    def forward(self, x: Any) -> Any:
        image = x.reshape(4, 2, 2, 2)
        larger = functional.pixel_shuffle(self.conv(image), 2)
        return {"loss": functional.l1_loss(larger, image.reshape(4, 1, 2, 4).tile(1, 1, 2, 1)), "larger": larger}


class Queue(nn.Module):
    """Points are compared with those of earlier calls, which a buffer holds; unit lengths are translated."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(8, 4)
        self.register_buffer("queue", functional.normalize(torch.randn(8, 4), dim=1))

    def forward(self, x: Any) -> Any:
        points = functional.normalize(self.project(x), dim=1)
        logits = torch.cat([points.square().sum(1, keepdim=True), points @ self.queue.clone().t()], 1)
        self.queue = torch.cat([points.detach(), self.queue[:4]])
        return functional.cross_entropy(logits / 0.2, torch.zeros(4, dtype=torch.long))


class Penalised(nn.Module):
    """A penalty of the gradient at the inputs, and a weight that is read as its transpose, too."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 1)

    def forward(self, x: Any) -> Any:
        x = x.detach().requires_grad_()
        y = self.last((self.first(x).tanh() @ self.first.weight).sin())
        (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return (slope.norm(dim=1) - 1).square().mean() + y.mean()


class Clipped(nn.Module):
    """Writes into weights that it trains: those of a critic, and rows of at most some length."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.rows, self.last = nn.Linear(8, 8), nn.Embedding(4, 8, max_norm=0.5), nn.Linear(8, 1)

    def forward(self, x: Any) -> Any:
        with torch.no_grad():
            for parameter in self.first.parameters():
                parameter.clamp_(-0.1, 0.1)
        y = self.first(x).tanh() + self.rows(torch.tensor([0, 2, 2, 1]))
        return self.last(y.sin()).square().mean() + self.first.weight.square().sum()


class Edges(nn.Module):
    """Numbers in a grid are looked up, and points that others miss are left out of a convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.kinds, self.conv = nn.Embedding(2, 2), nn.Conv2d(2, 4, 3, padding=1)

    def forward(self, x: Any) -> Any:
        image, seen = x.reshape(4, 2, 2, 2), (x > 0).reshape(4, 2, 2, 2)
        bias = self.kinds(seen[:, 0].long()).permute(0, 3, 1, 2)
        return (self.conv(image * seen[:, :1]).chunk(2, 1)[0] * bias).sum(1).tanh().mean()


OF_USERS = (Weighted, Answers, Policy, Sorted, Following, Recomputed, Shuffled, Queue, Penalised, Clipped, Edges)
USERS = {kind.__name__: kind for kind in OF_USERS}


def _of_users(name: str) -> nn.Module:
    torch.manual_seed(1)
    return USERS[name]().double()


def _users_on_rank(_rank: int, _world: int, given: list[tuple[str, Plan]]) -> list[Any]:
    # The first step of each is compared with the module, outputs too.
    return [_trained(parallelize(_of_users(name), plan)) for name, plan in given]


def test_what_users_write_is_trained_on_ranks(ranks: Pool) -> None:
    given = [(name, random_plan(pase.load((_of_users(name), X)), 2, 3)) for name in USERS]
    alone = {name: _trained(_of_users(name)) for name in USERS}
    for found in ranks.run(_users_on_rank, given, world=2):
        for (name, _), (losses, state) in zip(given, found, strict=True):
            expected_losses, expected = alone[name]
            assert losses == pytest.approx(expected_losses, rel=1e-12), name
            assert all(difference(state[key], x) < 1e-12 for key, x in expected.items()), name


def test_gradients_of_statistics_are_not_taken_apart() -> None:
    """PyTorch's gradient of a norm's statistics is right only together with that of what it normalises."""

    class Slope(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.GroupNorm(2, 8)

        def forward(self, x: Any) -> Any:
            x = x.detach().requires_grad_()
            y = self.norm(x).tanh()
            (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
            return slope.square().sum()

    module = Slope().double()
    with pytest.raises(
        EmitError, match=r"computes gradients through .*test_aten.* of which layers would compute parts"
    ):
        parallelize(module, pase.search((module, X), devices=1))


class Dropped(nn.Module):
    """Points are dropped behind two steps that are one layer, and within attention."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.drop = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5)
        self.attention, self.last = nn.MultiheadAttention(8, 2, dropout=0.25, batch_first=True), nn.Linear(8, 1)

    def forward(self, x: Any) -> Any:
        x = self.drop(torch.tanh(self.norm(self.first(x))))
        return self.last(self.attention(x[None], x[None], x[None], need_weights=False)[0]).square().mean()


def test_points_are_dropped_once_where_the_module_drops_them() -> None:
    """The first step is compared with the module's, both of which keep every point, scaled."""
    torch.manual_seed(0)
    module = Dropped().double()
    parallel = parallelize(module, pase.search((module, X), devices=1))
    losses = {parallel(X).item() for _ in range(3)}
    assert len(losses) == 3
    assert not [note for note in parallel.notes if "compared" in note or "drop" in note]
    # Queries, keys and values are selected of one product.
    assert "attention/attention" in parallel._aten.layers
    assert not [note for note in parallel.notes if "computed whole" in note]
