"""What modules do in their own way: functions of their own, checkpoints, shared weights, buffers, odd operators."""

from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from tests.zoo.registry import Family, coins, floats, lengths, whole

zoo = Family("functions")

VECTORS = {"x": floats(8, 6), "y": floats(8, 3)}


class Regression(nn.Module):
    """Two products with something between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)

    def between(self, x: Any) -> Any:
        return x.tanh()

    def forward(self, x: Any, y: Any) -> Any:
        return functional.mse_loss(self.last(self.between(self.first(x))), y)


class Sign(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        ctx.save_for_backward(x)
        return x.sign()

    @staticmethod
    def backward(ctx: Any, dy: Any) -> Any:
        (x,) = ctx.saved_tensors
        return dy * (x.abs() <= 1)


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any, w: Any) -> Any:
        ctx.save_for_backward(x, w)
        return x @ w.t()

    @staticmethod
    def backward(ctx: Any, dy: Any) -> Any:
        x, w = ctx.saved_tensors
        return 0.5 * dy @ w, 2 * dy.t() @ x


class Pair(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any, factor: float) -> Any:
        ctx.factor = factor
        return x * factor, x.square()

    @staticmethod
    def backward(ctx: Any, a: Any, b: Any) -> Any:
        return ctx.factor * a + b, None


@zoo.of("binary weights, gradients straight through", **VECTORS)
class Binary(Regression):
    def forward(self, x: Any, y: Any) -> Any:
        h = functional.linear(x, Sign.apply(self.first.weight), self.first.bias)
        return functional.mse_loss(self.last(Sign.apply(h)), y)


@zoo.of("a product of its own", **VECTORS)
class OwnProduct(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.square = nn.Parameter(torch.randn(8, 8))

    def between(self, x: Any) -> Any:
        return Product.apply(x, self.square).tanh()


@zoo.of("a function of two results", **VECTORS)
class TwoResults(Regression):
    def between(self, x: Any) -> Any:
        a, b = Pair.apply(x, 0.7)
        return a + 0.1 * b


@zoo.of("clipped gradients within", **VECTORS)
class Clipped(Regression):
    def between(self, x: Any) -> Any:
        return Clip.apply(x)


class Clip(torch.autograd.Function):
    @staticmethod
    def forward(_ctx: Any, x: Any) -> Any:
        return x.clone()

    @staticmethod
    def backward(_ctx: Any, dy: Any) -> Any:
        return dy / dy.norm().clamp(min=1e-3)


@zoo.of("checkpoints, nested", **VECTORS)
class Checkpointed(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(8, 8), nn.Linear(8, 8)

    def between(self, x: Any) -> Any:
        def inner(z: Any) -> Any:
            return self.other(z).tanh()

        return checkpoint(
            lambda z: checkpoint(inner, self.one(z).relu(), use_reentrant=False) + z, x, use_reentrant=False
        )


@zoo.of("checkpoint with dropout", is_random=True, **VECTORS)
class CheckpointedDropout(Regression):
    def between(self, x: Any) -> Any:
        return checkpoint(lambda z: functional.dropout(z.tanh(), 0.3), x, use_reentrant=False)


@zoo.of("one block called three times", **VECTORS)
class Universal(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.GELU())

    def between(self, x: Any) -> Any:
        for _ in range(3):
            x = x + self.block(x)
        return x


@zoo.of("a weight and its transpose", **VECTORS)
class TiedTranspose(Regression):
    def forward(self, x: Any, y: Any) -> Any:
        back = functional.linear(self.first(x).tanh(), self.first.weight.t())
        return functional.mse_loss(back, x) + super().forward(x, y)


@zoo.of("modules that share a parameter by two names", **VECTORS)
class Shared(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(8, 3)
        self.other.weight = self.last.weight

    def forward(self, x: Any, y: Any) -> Any:
        h = self.first(x)
        return functional.mse_loss(self.last(h.tanh()) * self.other(h).sigmoid(), y)


@zoo.of("a parameter that nothing reads, one that is frozen", **VECTORS)
class Unread(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.unread, self.frozen = nn.Parameter(torch.randn(3)), nn.Linear(8, 8).requires_grad_(False)

    def between(self, x: Any) -> Any:
        return self.frozen(x).tanh()


@zoo.of("counters and averages in buffers", **VECTORS)
class Counting(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("hidden", torch.zeros(8), persistent=False)

    def between(self, x: Any) -> Any:
        if self.training:
            self.steps += 1
            self.mean.mul_(0.9).add_(0.1 * x.detach().mean(0))
            self.hidden.copy_(x.detach().amax(0))
        return (x - self.mean) / (1 + self.steps)


@zoo.of("LayerNorm, RMSNorm, GroupNorm, LocalResponseNorm", x=floats(4, 8, 6), y=floats(4, 8, 3))
class Norms(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)
        self.layer, self.rms, self.group = nn.LayerNorm((8, 8)), nn.RMSNorm(8), nn.GroupNorm(2, 8)

    def forward(self, x: Any, y: Any) -> Any:
        x = self.rms(self.layer(self.first(x)))
        x = functional.local_response_norm(self.group(x.transpose(1, 2)), 3).transpose(1, 2)
        return functional.mse_loss(self.last(x), y)


ACTIVATIONS = (
    "elu", "selu", "celu", "mish", "softsign", "tanhshrink", "hardtanh", "hardshrink", "softshrink", "relu6",
    "logsigmoid", "hardswish", "silu", "softplus",
)  # fmt: skip


@zoo.of("all activations in turn", **VECTORS)
class Activations(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.slopes = nn.PReLU(8)

    def between(self, x: Any) -> Any:
        found = [getattr(functional, name)(x) for name in ACTIVATIONS]
        glu = functional.glu(torch.cat([x, x.sin()], 1), 1)
        return torch.stack([*found, glu, self.slopes(x), functional.threshold(x, 0.1, -0.2)]).mean(0)


@zoo.of("random slopes and alpha dropout", is_random=True, **VECTORS)
class RandomSlopes(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.slopes, self.drop = nn.RReLU(), nn.AlphaDropout(0.2)

    def between(self, x: Any) -> Any:
        return self.drop(self.slopes(x))


@zoo.of("Kolmogorov-Arnold splines", **VECTORS)
class Splines(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base, self.weights = nn.Linear(6, 3), nn.Parameter(0.3 * torch.randn(3, 6, 7))
        self.register_buffer("knots", torch.linspace(-3.0, 3.0, 10))

    def forward(self, x: Any, y: Any) -> Any:
        z, t = x[..., None], self.knots
        bases = ((z >= t[:-1]) & (z < t[1:])).to(x.dtype)
        for k in range(1, 3):
            left = (z - t[: -(k + 1)]) / (t[k:-1] - t[: -(k + 1)]) * bases[..., :-1]
            bases = left + (t[k + 1 :] - z) / (t[k + 1 :] - t[1:-k]) * bases[..., 1:]
        return functional.mse_loss(self.base(functional.silu(x)) + torch.einsum("bik,oik->bo", bases, self.weights), y)


@zoo.of("low-rank adapters over frozen weights", **VECTORS)
class Lora(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(6, 3).requires_grad_(False)
        self.down, self.up = nn.Parameter(torch.randn(2, 6)), nn.Parameter(torch.randn(3, 2))

    def forward(self, x: Any, y: Any) -> Any:
        return functional.mse_loss(self.base(x) + x @ self.down.t() @ self.up.t() * 0.5, y)


@zoo.of("weights from a Kronecker product and a tensor train", x=floats(8, 6), y=floats(8, 4))
class Factored(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(2, 3)), nn.Parameter(torch.randn(2, 2))
        self.cores = nn.ParameterList([nn.Parameter(torch.randn(2, 2, 3)), nn.Parameter(torch.randn(3, 2, 3))])

    def forward(self, x: Any, y: Any) -> Any:
        train = torch.einsum("air,rbj->abij", *self.cores).reshape(4, 6)
        return functional.mse_loss(functional.linear(x, torch.kron(self.a, self.b) + train), y)


@zoo.of("orthogonal parametrisation", **VECTORS)
class Orthogonal(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.turn = nn.utils.parametrizations.orthogonal(nn.Linear(8, 8), orthogonal_map="cayley")

    def between(self, x: Any) -> Any:
        return self.turn(x).tanh()


@zoo.of("weight norm and a symmetric weight", **VECTORS)
class Symmetric(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.square, self.normed = (
            nn.Parameter(torch.randn(8, 8)),
            nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)),
        )

    def between(self, x: Any) -> Any:
        return self.normed(x @ (self.square.triu() + self.square.triu(1).t())).tanh()


@zoo.of("squares of what dropout leaves", is_random=True, **VECTORS)
class Dropped(Regression):
    def between(self, x: Any) -> Any:
        return functional.dropout(x, 0.3, self.training).square()


@zoo.of("attention, padded on the left", x=floats(4, 6, 8), y=floats(4, 6, 8), counts=lengths(6, 4, 3, 5))
class PaddedLeft(nn.Module):
    """The first queries of some examples have no key: attention gives zeros for them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: Any, y: Any, counts: Any) -> Any:
        q, k, v = (part.unflatten(-1, (2, 4)).transpose(1, 2) for part in self.first(x).chunk(3, -1))
        places = torch.arange(6, device=x.device)
        seen = (places >= 6 - counts[:, None])[:, None, None] & (places[:, None] >= places)
        z = functional.scaled_dot_product_attention(q, k, v, attn_mask=seen)
        return functional.mse_loss(self.last(z.transpose(1, 2).flatten(2)), y)


@zoo.of("rows of at most norm 1", words=whole(8, 4, high=12), y=floats(8, 3))
class MaxNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(12, 8, max_norm=1.0), nn.Linear(8, 3)

    def forward(self, words: Any, y: Any) -> Any:
        return functional.mse_loss(self.head(self.table(words).mean(1)), y)


@zoo.of("padding rows and scaled gradients", words=whole(8, 4, high=6), y=floats(8, 3))
class Padded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(6, 8, padding_idx=0, scale_grad_by_freq=True), nn.Linear(8, 3)

    def forward(self, words: Any, y: Any) -> Any:
        return functional.mse_loss(self.head(self.table(words).mean(1)), y)


@zoo.of("a decision tree with soft branches", **VECTORS)
class Tree(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.branches, self.leaves = nn.Linear(6, 3), nn.Parameter(torch.randn(4, 3))

    def forward(self, x: Any, y: Any) -> Any:
        p = self.branches(x).sigmoid()
        a, b, c = p.unbind(1)
        paths = torch.stack([a * b, a * (1 - b), (1 - a) * c, (1 - a) * (1 - c)], 1)
        return functional.mse_loss(paths @ self.leaves, y)


@zoo.of("Gaussian process by a Cholesky factor", x=floats(8, 3), y=floats(8))
class Process(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.length, self.noise = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.tensor(-1.0))

    def forward(self, x: Any, y: Any) -> Any:
        z = x * self.length.exp()
        k = torch.exp(-0.5 * torch.cdist(z, z).square()) + self.noise.exp() * torch.eye(
            8, dtype=x.dtype, device=x.device
        )
        factor = torch.linalg.cholesky(k)
        return 0.5 * y @ torch.cholesky_solve(y[:, None], factor)[:, 0] + factor.diagonal().log().sum()


@zoo.of("Bayesian weights, noise given", x=floats(8, 6), y=floats(8, 3), noise=floats(3, 6))
class Bayesian(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mean, self.spread = nn.Parameter(torch.randn(3, 6)), nn.Parameter(torch.full((3, 6), -2.0))

    def forward(self, x: Any, y: Any, noise: Any) -> Any:
        s = functional.softplus(self.spread)
        divergence = (-s.log() + (s.square() + self.mean.square()) / 2 - 0.5).sum()
        return functional.mse_loss(functional.linear(x, self.mean + s * noise), y) + 0.01 * divergence


@zoo.of("physics: residuals by inner derivatives", x=floats(8, 2))
class Physics(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, x: Any) -> Any:
        def u(z: Any) -> Any:
            return self.net(z).squeeze(-1)

        slope = torch.func.vmap(torch.func.grad(lambda z: u(z[None])[0]))(x)
        return (slope[:, 0] + u(x) * slope[:, 1]).square().mean() + u(x).square().mean()


@zoo.of("complex weights", **VECTORS)
class ComplexWeights(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.head = nn.Parameter(torch.randn(8, 6, 2)), nn.Linear(8, 3)

    def forward(self, x: Any, y: Any) -> Any:
        w = torch.view_as_complex(self.weight)
        z = torch.complex(x, x.cos()) @ w.t()
        return functional.mse_loss(self.head(z.abs() * z.angle().cos()), y)


@zoo.of("quaternion rotations", x=floats(8, 4), points=floats(8, 3), y=floats(8, 3))
class Quaternions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(4, 4)

    def forward(self, x: Any, points: Any, y: Any) -> Any:
        q = functional.normalize(self.net(x), dim=1)
        w, v = q[:, :1], q[:, 1:]
        t = 2 * torch.linalg.cross(v, points)
        return functional.mse_loss(points + w * t + torch.linalg.cross(v, t), y)


@zoo.of("quantised weights with learned steps (LSQ)", **VECTORS)
class Lsq(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.step = nn.Parameter(torch.tensor(0.1))

    def forward(self, x: Any, y: Any) -> Any:
        w = (self.first.weight / self.step).clamp(-8, 7)
        w = ((w.round() - w).detach() + w) * self.step
        return functional.mse_loss(self.last(functional.linear(x, w, self.first.bias).relu()), y)


@zoo.of("sorting, ranking and medians", **VECTORS)
class Sorting(Regression):
    def between(self, x: Any) -> Any:
        top, places = x.topk(4, 1)
        return torch.cat([top, x.sort(1).values[:, :3], x.median(1, keepdim=True).values], 1) + 0.1 * x.gather(
            1, places
        ).mean(1, keepdim=True)


@zoo.of("cumulative and rolled", **VECTORS)
class Rolled(Regression):
    def between(self, x: Any) -> Any:
        return x.cumsum(1) * 0.1 + x.roll(1, 1) + x.flip(1).cummax(1).values + x.diff(dim=1, prepend=x[:, :1])


@zoo.of("loss in a tuple with outputs", x=floats(8, 6), labels=coins(8, 3))
class Dictionary(Regression):
    def forward(self, x: Any, labels: Any) -> Any:
        logits = self.last(self.between(self.first(x)))
        return {"loss": functional.binary_cross_entropy_with_logits(logits, labels), "logits": logits}


@zoo.of("in-place writes of views", **VECTORS)
class InPlace(Regression):
    def between(self, x: Any) -> Any:
        x = x.clone()
        x[:, :4] *= 2
        x[:, 4:].add_(1).mul_(3)
        x.masked_fill_(x > 2, 2.0)
        return x


@zoo.of("tables of constants, one-hot products, einsum", words=whole(8, 5, high=7), y=floats(8, 3))
class OneHot(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.bilinear = nn.Parameter(torch.randn(7, 4)), nn.Parameter(torch.randn(3, 4, 4))
        self.register_buffer("places", torch.linspace(0, 1, 5)[:, None].sin().expand(5, 4).clone())

    def forward(self, words: Any, y: Any) -> Any:
        x = functional.one_hot(words, 7).to(self.table.dtype) @ self.table + self.places
        return functional.mse_loss(torch.einsum("bsi,oij,btj->bo", x, self.bilinear, x) / 25, y)


@zoo.of("gradient penalty of weights (a norm in the loss)", **VECTORS)
class Penalised(Regression):
    def forward(self, x: Any, y: Any) -> Any:
        loss = super().forward(x, y)
        return loss + 1e-2 * sum(p.norm() for p in self.parameters()) + 1e-3 * self.first.weight.abs().sum()


@zoo.of("nuclear norm and singular values", **VECTORS)
class Singular(Regression):
    def forward(self, x: Any, y: Any) -> Any:
        return super().forward(x, y) + 0.01 * torch.linalg.svdvals(self.first.weight).sum()
