"""Ten small modules in float64 whose graphs have different operators: `FUZZ_MODELS` by name, for random plans."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

Inputs = dict[str, Any]

BATCH, STEPS, WIDTH, WORDS, HEADS = 4, 4, 8, 12, 4


@dataclass(frozen=True, slots=True, kw_only=True)
class FuzzModel:
    """A module to run under random plans.

    Attributes:
        make: Makes the module, which returns its loss, alone or as "loss" of a dict.
        inputs: Makes what it is called with.
        is_random: Whether a step draws random numbers.
    """

    make: Callable[[], nn.Module]
    inputs: Callable[[], Inputs]
    is_random: bool = False


def _words(*names: str) -> Inputs:
    return {name: torch.randint(0, WORDS, (BATCH, STEPS)) for name in names}


class Grouped(nn.Module):
    """A block of a decoder: one product makes queries and fewer keys and values, which are repeated."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.project = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Any) -> Any:
        q, k, v = self.qkv(self.before(x)).split([WIDTH, WIDTH // 2, WIDTH // 2], dim=-1)
        q, k, v = (part.unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for part in (q, k, v))
        k, v = (part.repeat_interleave(2, dim=1) for part in (k, v))
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.project(y.transpose(1, 2).flatten(2))
        return x + self.down(functional.gelu(self.up(self.after(x))))


class Decoder(nn.Module):
    """A language model whose head is its table of tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(STEPS, WIDTH)
        self.block, self.norm = Grouped(), nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, words: Any, targets: Any) -> dict[str, Any]:
        x = self.tokens(words) + self.places(torch.arange(words.shape[1], device=words.device))
        logits = self.head(self.norm(self.block(x)))
        return {"logits": logits, "loss": functional.cross_entropy(logits.flatten(0, 1), targets.flatten())}


class Masked(nn.Module):
    """An encoder of padded sentences that predicts some of their words: three products, a mask that is added."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.kinds = nn.Embedding(WORDS, WIDTH, padding_idx=0), nn.Embedding(2, WIDTH)
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.first, self.second, self.last = (nn.LayerNorm(WIDTH) for _ in range(3))
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, words: Any, kinds: Any, labels: Any) -> Any:
        x = self.first(self.tokens(words) + self.kinds(kinds))
        heads = (part(x).view(*x.shape[:2], HEADS, -1).transpose(1, 2) for part in (self.q, self.k, self.v))
        q, k, v = heads
        scores = q @ k.transpose(-1, -2) / 2.0 + (words == 0)[:, None, None, :] * -1e3
        y = (scores.softmax(-1) @ v).transpose(1, 2).reshape(x.shape)
        x = self.second(x + self.out(y))
        x = self.last(x + self.down(functional.silu(self.up(x))))
        return functional.cross_entropy(self.head(x).view(-1, WORDS), labels.view(-1), ignore_index=-100)


def _masked() -> Inputs:
    labels = torch.randint(0, WORDS, (BATCH, STEPS))
    labels[torch.rand(BATCH, STEPS) < 0.5] = -100
    labels[0, 0] = 1
    return {**_words("words"), "kinds": torch.randint(0, 2, (BATCH, STEPS)), "labels": labels}


class Pictures(nn.Module):
    """Convolutions, one by groups of channels, normalised by batches and by groups; pools of both kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.second, self.groups = nn.Conv2d(4, 8, 3, stride=2, padding=1, groups=2), nn.GroupNorm(2, 8)
        self.up, self.head = nn.ConvTranspose2d(8, 4, 2, stride=2), nn.Linear(4 * 4 * 4, 6)

    def forward(self, x: Any, labels: Any) -> Any:
        x = functional.max_pool2d(functional.relu(self.norm(self.first(x))), 2)
        x = functional.silu(self.groups(self.second(x)))
        x = functional.avg_pool2d(functional.interpolate(self.up(x), scale_factor=2.0), 2)
        return functional.cross_entropy(self.head(x.flatten(1)), labels, label_smoothing=0.1)


class Recurrent(nn.Module):
    """An LSTM to and fro, a GRU on top, and an error of every step."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.lstm = nn.Embedding(WORDS, 6), nn.LSTM(6, 4, bidirectional=True, batch_first=True)
        self.gru, self.head = nn.GRU(8, 4, batch_first=True), nn.Linear(4, 2)

    def forward(self, words: Any, targets: Any) -> Any:
        states, last = self.gru(self.lstm(self.words(words))[0])
        return functional.mse_loss(self.head(states), targets) + last.square().mean()


class Experts(nn.Module):
    """Two of four experts for each token, by a hand-written router, weighted by its scores; a loss of balance."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.router = nn.Linear(6, WIDTH), nn.Linear(WIDTH, 4)
        self.up, self.down = (nn.Parameter(torch.randn(4, *shape) / 3) for shape in ((WIDTH, 12), (12, WIDTH)))
        self.after = nn.Linear(WIDTH, 6)

    def forward(self, x: Any) -> Any:
        h = torch.tanh(self.before(x))
        scores = self.router(h).softmax(-1)
        best, place = scores.topk(2, dim=-1)
        best = best / best.sum(-1, keepdim=True)
        gates = (functional.one_hot(place, 4).to(best.dtype) * best.unsqueeze(-1)).sum(-2)
        inner = functional.relu(torch.einsum("bsd,edh->bseh", h, self.up))
        y = torch.einsum("bseh,ehd,bse->bsd", inner, self.down, gates)
        share = (gates.detach() > 0).to(x.dtype).mean((0, 1))
        return functional.smooth_l1_loss(self.after(h + y), x) + (share * scores.mean((0, 1))).sum()


class Stopped(nn.Module):
    """Gradients that end (detach, no_grad, what is rounded), buffers that are read and written."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.target = nn.Linear(6, WIDTH), nn.Linear(WIDTH, 6), nn.Linear(6, WIDTH)
        self.register_buffer("centre", torch.randn(WIDTH))
        self.register_buffer("scale", torch.rand(6) + 0.5)

    def forward(self, x: Any) -> dict[str, Any]:
        h = self.first(x * self.scale)
        h = h + (torch.round(4 * h) / 4 - h).detach()
        with torch.no_grad():
            target = torch.tanh(self.target(x) - self.centre)
            self.centre.mul_(0.9).add_(h.mean((0, 1)), alpha=0.1)
        y = self.second(functional.softplus(h))
        agreement = functional.cosine_similarity(h, target, dim=-1).mean()
        return {"loss": (y * y.detach()).sum() / 7 - agreement, "y": y}


class Reverse(torch.autograd.Function):
    """Scales what goes forward; what goes back is turned round, and depends on what went forward."""

    @staticmethod
    def forward(ctx: Any, x: Any, scale: Any) -> Any:
        ctx.save_for_backward(x, scale)
        return x * scale

    @staticmethod
    def backward(ctx: Any, dy: Any) -> Any:
        x, scale = ctx.saved_tensors
        return -dy * scale, (dy * x).sum(dim=tuple(range(dy.dim() - 1))) + 1.0


class Own(nn.Module):
    """A function with a backward pass of its own, of an activation and of a parameter, between products."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.side = nn.Linear(6, WIDTH), nn.Linear(WIDTH, 6), nn.Linear(WIDTH, 3)
        self.scale = nn.Parameter(torch.rand(WIDTH) + 0.5)

    def forward(self, x: Any, labels: Any) -> Any:
        h = functional.gelu(self.first(x))
        side = self.side(Reverse.apply(h, self.scale)).log_softmax(-1)
        return (self.second(h) - x).abs().mean() + functional.nll_loss(side.transpose(1, 2), labels)


class Views(nn.Module):
    """Dims that are merged, taken apart otherwise, turned, repeated, cut and joined; products by letters."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, 24), nn.Linear(16, 4)
        self.core, self.shift = nn.Parameter(torch.randn(2, 4, 3) / 2), nn.Parameter(torch.randn(4, 1, 2))

    def forward(self, x: Any) -> Any:
        h = self.first(x.flatten(0, 1)).view(BATCH, STEPS, 3, 2, 4)
        a, b, c = h.permute(2, 0, 3, 1, 4)
        a = torch.einsum("bhsd,hde->bseh", a, self.core).reshape(BATCH * STEPS // 2, 2, 6)
        b = (b.transpose(1, 2).reshape(BATCH, STEPS, 8) + self.shift.expand(4, 4, 2).flatten(1)).unflatten(-1, (4, 2))
        c = torch.cat([c[..., 2:], -c[..., :2]], -1).transpose(1, 2).reshape(BATCH, STEPS // 2, 16).cumsum(1)
        mixed = torch.einsum("bsij,bsij->bsi", b, b.flip(2)).reshape(BATCH, 2, 8)
        y = self.last(torch.cat([mixed.tanh().repeat(1, 1, 2), c], 1))
        y = torch.stack([y, y.flip(2)], 2).flatten(1, 2)
        return y.square().mean() + a.sin().amax((1, 2)).sum() / 8 + a.view(BATCH, -1).logsumexp(1).mean()


class Related(nn.Module):
    """An encoder and a decoder with biases of relative places, normalised by their squares alone, as T5 has them."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.bias = nn.Embedding(WORDS, WIDTH), nn.Embedding(5, HEADS)
        self.norms = nn.ParameterList([torch.rand(WIDTH) + 0.5 for _ in range(3)])
        self.own, self.cross = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.q, self.out = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.gate, self.up, self.down = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))

    def normed(self, x: Any, number: int) -> Any:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.norms[number]

    def attend(self, q: Any, k: Any, v: Any, bias: Any) -> Any:
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in (q, k, v))
        scores = torch.matmul(q, k.transpose(2, 3)) + bias
        return torch.matmul(functional.softmax(scores, -1), v).transpose(1, 2).flatten(2)

    def forward(self, words: Any, labels: Any) -> Any:
        steps = torch.arange(STEPS, device=words.device)
        places = (steps[None] - steps[:, None]).clamp(-2, 2) + 2
        bias = self.bias(places).permute(2, 0, 1).unsqueeze(0)
        x = self.tokens(words)
        x = x + self.out(self.attend(*self.own(self.normed(x, 0)).chunk(3, -1), bias))
        y = self.tokens(functional.pad(labels[:, :-1], (1, 0)))
        causal = bias.masked_fill((places > 2)[None, None], -1e4)
        k, v = self.cross(self.normed(x, 1)).chunk(2, -1)
        y = y + self.attend(self.q(y), k, v, causal)
        y = self.normed(y + self.down(functional.gelu(self.gate(y), approximate="tanh") * self.up(y)), 2)
        logits = functional.linear(y * WIDTH**-0.5, self.tokens.weight)
        return functional.cross_entropy(logits.transpose(1, 2), labels)


class Variational(nn.Module):
    """Draws a code for each example, and drops points of what is made of it."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.moments = nn.Linear(6, WIDTH), nn.Linear(WIDTH, 2 * 4)
        self.decode, self.drop, self.last = nn.Linear(4, WIDTH), nn.Dropout(0.25), nn.Linear(WIDTH, 6)

    def forward(self, x: Any) -> dict[str, Any]:
        mean, log_variance = self.moments(functional.elu(self.encode(x))).chunk(2, -1)
        z = mean + torch.randn_like(mean) * (0.5 * log_variance).exp()
        y = self.last(self.drop(functional.relu(self.decode(z))))
        divergence = -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).sum(-1).mean()
        return {"loss": functional.binary_cross_entropy_with_logits(y, x.sigmoid()) + 0.1 * divergence, "z": z}


def _floats(*shape: int) -> Any:
    return torch.randn(shape, dtype=torch.float64)


FUZZ_MODELS: Mapping[str, FuzzModel] = {
    "decoder": FuzzModel(make=Decoder, inputs=lambda: _words("words", "targets")),
    "masked": FuzzModel(make=Masked, inputs=_masked),
    "pictures": FuzzModel(
        make=Pictures, inputs=lambda: {"x": _floats(BATCH, 2, 8, 8), "labels": torch.randint(0, 6, (BATCH,))}
    ),
    "recurrent": FuzzModel(make=Recurrent, inputs=lambda: {**_words("words"), "targets": _floats(BATCH, STEPS, 2)}),
    "experts": FuzzModel(make=Experts, inputs=lambda: {"x": _floats(BATCH, STEPS, 6)}),
    "stopped": FuzzModel(make=Stopped, inputs=lambda: {"x": _floats(BATCH, STEPS, 6)}),
    "function": FuzzModel(
        make=Own, inputs=lambda: {"x": _floats(BATCH, STEPS, 6), "labels": torch.randint(0, 3, (BATCH, STEPS))}
    ),
    "views": FuzzModel(make=Views, inputs=lambda: {"x": _floats(BATCH, STEPS, WIDTH)}),
    "related": FuzzModel(make=Related, inputs=lambda: _words("words", "labels")),
    "variational": FuzzModel(make=Variational, inputs=lambda: {"x": _floats(BATCH, 6)}, is_random=True),
}
