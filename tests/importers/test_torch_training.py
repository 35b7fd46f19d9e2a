"""What modules do in training that their traces, which are of evaluation, do not show, is named with its line."""

import copy
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn import functional  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

import pase  # noqa: E402
from pase.errors import EmitError  # noqa: E402
from pase.importers.frameworks import import_model  # noqa: E402
from pase.targets.programs import emit  # noqa: E402


class Reverse(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(_ctx: Any, x: Any) -> Any:
        return x.view_as(x)

    @staticmethod
    def backward(_ctx: Any, dy: Any) -> Any:
        return -dy


reverse = Reverse.apply
"""As users name it: what patches the class comes too late for it."""


class Layers(nn.Module):  # type: ignore[misc]
    """Two products with something between, before or behind them."""

    def __init__(self, inner: nn.Module | None = None, **attributes: Any) -> None:
        super().__init__()
        self.first, self.second, self.inner = nn.Linear(8, 8), nn.Linear(8, 8), inner or nn.Identity()
        for name, value in attributes.items():
            (self.register_buffer if isinstance(value, torch.Tensor) else self.__setattr__)(name, value)

    def forward(self, x: Any) -> Any:
        return self.second(self.inner(self.first(x))).square().mean()


class Straight(Layers):
    def forward(self, x: Any) -> Any:
        z = self.first(x)
        q = torch.round(z)
        z = z + (q - z).detach()  # here
        return self.second(z).square().mean()


class Siamese(Layers):
    def forward(self, x: Any) -> Any:
        z = self.first(x)
        target = z.detach()  # here
        return -functional.cosine_similarity(self.second(z), target).mean()


class Target(Layers):
    def forward(self, x: Any) -> Any:
        with torch.no_grad():
            target = self.second(x)  # here
            target = target * 2
        return (self.first(x) - target).square().mean()


class Adversarial(Layers):
    def forward(self, x: Any) -> Any:
        return self.second(reverse(self.first(x))).square().mean()


class Variational(Layers):
    def forward(self, x: Any) -> Any:
        z = self.first(x)
        if self.training:
            z = z + torch.randn_like(z)  # here
        return self.second(z).square().mean()


class Average(Layers):
    def forward(self, x: Any) -> Any:
        z = self.first(x)
        with torch.no_grad():
            self.kept.mul_(0.9).add_(z.mean(0), alpha=0.1)  # here
        return self.second(z).square().mean()


class Replaced(Layers):
    def forward(self, x: Any) -> Any:
        self.kept = 0.9 * self.kept + 0.1 * x.mean(0)
        return super().forward(x)


class Squared(Layers):
    def forward(self, x: Any) -> Any:
        y = self.first(x)
        return (y * y.detach()).sum()  # here


class Data(Layers):
    def forward(self, x: Any) -> Any:
        y = self.first(x)
        return (y * y.data).sum()  # here


class Gumbel(Layers):
    def forward(self, x: Any) -> Any:
        z = functional.gumbel_softmax(self.first(x), hard=True)  # here
        return self.second(z).square().mean()


class Depth(Layers):
    def forward(self, x: Any) -> Any:
        for layer in (self.first, self.second):
            if self.training and bool(torch.rand([]) < self.rate):
                continue
            x = layer(x)  # here
        return x.square().mean()


class Annealed(Layers):
    def forward(self, x: Any) -> Any:
        self.calls += 1
        return super().forward(x) * min(1.0, self.calls / 100)  # here


class Remembering(Layers):
    def forward(self, x: Any) -> Any:
        y = self.first(x)
        loss = self.second(y - (0.0 if self.last is None else self.last)).square().mean()  # here
        self.last = x.mean(0)
        return loss


def frozen_statistics() -> Layers:
    module = Layers(nn.BatchNorm1d(8)).train()
    module.inner.eval()
    return module


def frozen_dropout() -> Layers:
    module = Layers(nn.Dropout(0.5)).train()
    module.inner.eval()
    return module


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "straight-through": (Straight, "LINE .* detaches what depends on weights"),
    "stop-gradient": (Siamese, "LINE .* detaches what depends on weights"),
    "product with itself": (Squared, "LINE .* detaches what depends on weights"),
    "hard gumbel": (Gumbel, "LINE .* detaches what depends on weights"),
    "no_grad": (Target, r"LINE .* computes under torch\.no_grad what depends on weights"),
    "gradient reversal": (
        Adversarial,
        r"torch\.autograd\.Function 'Reverse' \(test_torch_training\.py:\d+\) has a back",
    ),
    "branch": (Variational, "LINE .* is computed in training, .* in evaluation"),
    "stochastic depth": (lambda: Depth(rate=0.1), "LINE .* in evaluation"),
    "running average": (lambda: Average(kept=torch.zeros(8)), r"buffer 'kept' is written in the forward pass at LINE"),
    "buffer replaced": (lambda: Replaced(kept=torch.zeros(8)), "buffer 'kept' is written in the forward pass"),
    "spectral norm": (lambda: Layers(nn.utils.spectral_norm(nn.Linear(8, 8))), "computes under torch.no_grad what"),
    "row norms": (lambda: Layers(Rows()), r"parameter 'inner\.table\.weight' is written in the forward pass"),
    "frozen statistics": (
        frozen_statistics,
        r"batch_norm at .* by kept statistics in training; module 'inner'",
    ),
    "frozen dropout": (
        frozen_dropout,
        r"dropout at .* drops nothing in training; module 'inner' is left",
    ),
    "channels": (
        lambda: Layers(Channels(nn.Dropout2d(0.3))),
        r"feature_dropout at .* drops whole channels in training",
    ),
    "alpha": (
        lambda: Layers(nn.AlphaDropout(0.3)),
        "alpha_dropout at .* sets points to another value",
    ),
    "random slopes": (lambda: Layers(nn.RReLU()), "rrelu at .* draws its slopes in training"),
    "recurrent dropout": (lambda: Layers(Recurrent()), "lstm at .* drops points between its layers"),
    "annealed": (lambda: Annealed(calls=0), "LINE .* computes with another number in every call"),
    "remembered": (lambda: Remembering(last=None), "LINE .* computes with what an earlier call of the module left"),
}


OWN = (
    "straight-through",
    "stop-gradient",
    "product with itself",
    "no_grad",
    "gradient reversal",
    "frozen statistics",
    "frozen dropout",
    "running average",
    "buffer replaced",
    "spectral norm",
    "row norms",
)
"""What no translation trains, and the module's own graph does."""

DRAWN = ("hard gumbel", "branch", "channels", "alpha", "random slopes", "recurrent dropout")
"""Likewise, with random numbers."""


class Rows(nn.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(4, 8, max_norm=1.0)

    def forward(self, x: Any) -> Any:
        return x + self.table(torch.arange(4))


class Channels(nn.Module):  # type: ignore[misc]
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Any) -> Any:
        return self.inner(x[:, :, None, None]).flatten(1)


class Recurrent(nn.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.LSTM(8, 8, 2, dropout=0.2)

    def forward(self, x: Any) -> Any:
        return self.inner(x[None])[0][0]


class Logged(Layers):
    """What is detached counts for nothing that is trained."""

    def forward(self, x: Any) -> Any:
        scores = self.second(self.first(x))
        with torch.no_grad():
            accuracy = (scores.argmax(-1) == 0).float().mean()
        return {"loss": scores.square().mean(), "scores": scores.detach(), "accuracy": accuracy}


class Masked(Layers):
    def forward(self, x: Any) -> Any:
        y = self.first(x)
        with torch.no_grad():
            mask = (y > 0).float()
        return (self.second(y) * mask).square().mean()


class Backbone(Layers):
    def forward(self, x: Any) -> Any:
        with torch.no_grad():
            y = self.first(x)
        return self.second(y.detach()).square().mean()


def backbone() -> Backbone:
    module = Backbone()
    module.first.requires_grad_(False)
    return module


class Checkpointed(Layers):
    def forward(self, x: Any) -> Any:
        x = self.first(x)
        return checkpoint(lambda y: self.second(y.relu()), x, use_reentrant=self.reentrant).square().mean()


class Cached(Layers):
    def forward(self, x: Any) -> Any:
        if self.places is None:
            self.places = torch.arange(8.0)
        self.calls += 1
        return super().forward(x + self.places)


class Attention(nn.Module):  # type: ignore[misc]
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.inner, self.options = nn.MultiheadAttention(8, 2, dropout=0.1, batch_first=True), options

    def forward(self, x: Any) -> Any:
        return self.inner(x[None], x[None], x[None], **self.options)[0][0]


TAKEN: dict[str, Callable[[], Any]] = {
    "plain": Layers,
    "statistics": lambda: Layers(nn.BatchNorm1d(8)),
    "dropout": lambda: Layers(nn.Dropout(0.3)),
    "soft gumbel": lambda: Layers(Soft()),
    "logged": Logged,
    "masked": Masked,
    "backbone": backbone,
    "checkpointed": lambda: Checkpointed(reentrant=False),
    "checkpointed, reentrant": lambda: Checkpointed(reentrant=True),
    "cached": lambda: Cached(places=None, calls=0),
    "attention": lambda: Layers(Attention()),
    "attention without weights": lambda: Layers(Attention(need_weights=False)),
    "fused attention": lambda: Layers(Fused()),
    "encoder": lambda: Layers(nn.TransformerEncoderLayer(8, 2, 16)),
    "no depth": lambda: Depth(rate=0.0),
    "frozen whole": lambda: Layers(nn.BatchNorm1d(8)).eval(),
}


class Fused(nn.Module):  # type: ignore[misc]
    """Its kernel leaves another layout where it drops something."""

    def forward(self, x: Any) -> Any:
        q = x.reshape(1, 4, 2, 4).transpose(1, 2)
        rate = 0.1 if self.training else 0.0
        y = functional.scaled_dot_product_attention(q, q, q, dropout_p=rate)
        return y.transpose(1, 2).contiguous().reshape(4, 8)


class Soft(nn.Module):  # type: ignore[misc]
    def forward(self, x: Any) -> Any:
        return functional.gumbel_softmax(x)


def _state(module: Any) -> Any:
    attributes = {
        (path, name): deepcopy(value)
        for path, part in module.named_modules()
        for name, value in vars(part).items()
        if not name.startswith("_") and not isinstance(value, nn.Module)
    }
    return attributes, deepcopy(module.state_dict()), torch.get_rng_state()


def _line(module: Any) -> str:
    """Return where a class says "# here", as a pattern."""
    import inspect

    source, first = inspect.getsourcelines(type(module))
    marked = [first + i for i, line in enumerate(source) if "# here" in line]
    return rf"test_torch_training\.py:{marked[0]}\b" if marked else "(no line)"


@pytest.mark.parametrize("name", REFUSED)
def test_what_programs_would_train_wrong_is_named(name: str) -> None:
    make, said = REFUSED[name]
    module = make()
    before = _state(module)
    model = import_model((module, torch.ones(4, 8)))
    expected = said.replace("LINE", _line(module))
    # It is searched all the same, and a note says what it is.
    assert any(note.startswith("programs would not train it as it trains itself") for note in model.traces[0].notes)
    plan = pase.search((module, torch.ones(4, 8)), devices=1)
    with pytest.raises(EmitError, match=rf"{expected}.*; replace that in the model"):
        emit(plan)
    if name not in (*OWN, *DRAWN):
        with pytest.raises(EmitError, match=expected):
            pase.parallelize(module, plan)
    after = _state(module)
    assert str(before[0]) == str(after[0])
    assert all(torch.equal(one, other) for one, other in zip(before[1].values(), after[1].values(), strict=True))
    assert torch.equal(before[2], after[2])


def test_what_is_not_trained_is_evaluated_under_a_plan() -> None:
    module, x = Squared().eval(), torch.randn(4, 8)
    plan = pase.search((module, x), devices=1)
    parallel = pase.parallelize(module, plan)
    assert torch.allclose(parallel(x), module(x))


@pytest.mark.parametrize("name", OWN)
def test_what_its_own_graph_trains_is_trained_as_by_itself(name: str) -> None:
    """Losses, gradients and weights of three steps, in float64."""
    module, x = REFUSED[name][0]().double(), torch.randn(4, 8, dtype=torch.float64)
    alone = copy.deepcopy(module)
    parallel = pase.parallelize(module, pase.search((module, x), devices=1), check=False)
    for _ in range(3):
        losses = []
        for each in (parallel, alone):
            losses.append(each(x))
            losses[-1].backward()
        grads = [{key: p.grad for key, p in each.named_parameters()} for each in (parallel, alone)]
        assert [key for key, g in grads[0].items() if g is None] == [key for key, g in grads[1].items() if g is None]
        assert torch.allclose(losses[0], losses[1], rtol=1e-12, atol=0)
        for key, grad in grads[1].items():
            assert grad is None or torch.allclose(grads[0][key], grad, rtol=1e-11, atol=1e-13), key
        for each in (parallel, alone):
            torch.optim.SGD(each.parameters(), lr=0.05).step()
            each.zero_grad()
    for key, value in alone.state_dict().items():
        assert torch.allclose(parallel.state_dict()[key], value, rtol=1e-11, atol=1e-13), key


@pytest.mark.parametrize("name", DRAWN)
def test_what_draws_random_numbers_is_trained_as_by_itself_on_the_same_ones(name: str) -> None:
    """The first step compares losses, gradients and buffers with the module's, with the same numbers for both."""
    module, x = REFUSED[name][0]().double(), torch.randn(4, 8, dtype=torch.float64)
    parallel = pase.parallelize(module, pase.search((module, x), devices=1))
    losses = [parallel(x).item() for _ in range(3)]
    assert not [note for note in parallel.notes if "not compared" in note]
    # Each step draws anew.
    assert len(set(losses)) == 3


@pytest.mark.parametrize("name", TAKEN)
def test_what_programs_train_right_is_taken(name: str) -> None:
    module = TAKEN[name]()
    before = _state(module)
    model = import_model((module, torch.ones(4, 8)))
    assert model.graph.untrained == ""
    assert not [note for note in model.traces[0].notes if "training alone" in note]
    assert str(before[0]) == str(_state(module)[0])
