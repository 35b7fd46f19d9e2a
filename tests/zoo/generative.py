"""Models of what data are like: autoencoders, adversaries, flows, diffusion, energies."""

import math
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from tests.zoo.registry import Family, coins, floats, uniform, whole

zoo = Family("generative")


def network(inputs: int, outputs: int, width: int = 16) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, width), nn.SiLU(), nn.Linear(width, outputs))


@zoo.of("VAE with given noise", x=floats(8, 12), noise=floats(8, 4))
class Vae(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = network(12, 8), network(4, 12)

    def forward(self, x: Any, noise: Any) -> Any:
        mean, logs = self.encode(x).chunk(2, 1)
        z = mean + (0.5 * logs).exp() * noise
        divergence = -0.5 * (1 + logs - mean.square() - logs.exp()).sum(1).mean()
        return functional.mse_loss(self.decode(z), x) + 0.1 * divergence


@zoo.of("VAE with drawn noise in training", is_random=True, x=floats(8, 12))
class VaeDrawn(Vae):
    def forward(self, x: Any) -> Any:
        noise = torch.randn(len(x), 4, dtype=x.dtype, device=x.device)
        return super().forward(x, noise if self.training else torch.zeros_like(noise))


@zoo.of("convolutional VAE", is_random=True, x=floats(4, 1, 8, 8))
class ConvVae(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Sequential(nn.Conv2d(1, 8, 4, 2, 1), nn.ReLU(), nn.Conv2d(8, 8, 4, 2, 1), nn.Flatten())
        self.mean, self.logs, self.up = nn.Linear(32, 4), nn.Linear(32, 4), nn.Linear(4, 32)
        self.decode = nn.Sequential(nn.ConvTranspose2d(8, 8, 4, 2, 1), nn.ReLU(), nn.ConvTranspose2d(8, 1, 4, 2, 1))

    def forward(self, x: Any) -> Any:
        h = self.encode(x)
        mean, logs = self.mean(h), self.logs(h)
        z = mean + torch.randn_like(mean) * (logs / 2).exp()
        found = self.decode(self.up(z).view(-1, 8, 2, 2))
        return functional.binary_cross_entropy_with_logits(found, (x > 0).to(x.dtype)) + 0.01 * mean.square().mean()


@zoo.of("β-TC-VAE", x=floats(8, 12), noise=floats(8, 4))
class TotalCorrelation(Vae):
    def forward(self, x: Any, noise: Any) -> Any:
        mean, logs = self.encode(x).chunk(2, 1)
        z = mean + (0.5 * logs).exp() * noise

        def density(z: Any, mean: Any, logs: Any) -> Any:
            return -0.5 * ((z - mean).square() * (-logs).exp() + logs + math.log(2 * math.pi))

        pairs = density(z[:, None], mean[None], logs[None])
        joint = pairs.sum(2).logsumexp(1)
        marginal = pairs.logsumexp(1).sum(1)
        return functional.mse_loss(self.decode(z), x) + (joint - marginal).mean()


@zoo.of("Gumbel softmax, straight through", is_random=True, x=floats(8, 12))
class GumbelVae(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = network(12, 20), network(20, 12)

    def forward(self, x: Any) -> Any:
        q = functional.gumbel_softmax(self.encode(x).view(-1, 4, 5), tau=0.7, hard=True)
        return functional.mse_loss(self.decode(q.flatten(1)), x)


@zoo.of("GAN, both losses in one", real=floats(8, 6), noise=floats(8, 4))
class Gan(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator, self.critic = network(4, 6), network(6, 1)

    def forward(self, real: Any, noise: Any) -> Any:
        made = self.generator(noise)
        critic = functional.softplus(-self.critic(real)).mean() + functional.softplus(self.critic(made.detach())).mean()
        held = {name: value.detach() for name, value in self.critic.named_parameters()}
        fooled = torch.func.functional_call(self.critic, held, (made,))
        return critic + functional.softplus(-fooled).mean()


@zoo.of("Wasserstein GAN with a gradient penalty", real=floats(8, 6), noise=floats(8, 4), share=uniform(8, 1))
class Wgan(Gan):
    def forward(self, real: Any, noise: Any, share: Any) -> Any:
        made = self.generator(noise).detach()
        between = (share * real + (1 - share) * made).requires_grad_(True)
        (slope,) = torch.autograd.grad(self.critic(between).sum(), between, create_graph=True)
        return self.critic(made).mean() - self.critic(real).mean() + 10 * (slope.norm(2, dim=1) - 1).square().mean()


@zoo.of("domain adversary by a reversed gradient", x=floats(8, 6), y=floats(8, 6), labels=whole(8, high=3))
class Dann(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features, self.classes, self.domain = network(6, 8), nn.Linear(8, 3), network(8, 1)

    def forward(self, x: Any, y: Any, labels: Any) -> Any:
        one, other = self.features(x), self.features(y)
        z = Reverse.apply(torch.cat([one, other]), 0.3)
        sides = torch.cat([torch.zeros_like(one[:, :1]), torch.ones_like(other[:, :1])])
        side = functional.binary_cross_entropy_with_logits(self.domain(z), sides)
        return functional.cross_entropy(self.classes(one), labels) + side


class Reverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any, factor: float) -> Any:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dy: Any) -> Any:
        return -ctx.factor * dy, None


@zoo.of("RealNVP", x=floats(8, 6))
class RealNvp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.nets = nn.ModuleList([network(3, 6) for _ in range(3)])

    def forward(self, x: Any) -> Any:
        total = torch.zeros_like(x[:, 0])
        for net in self.nets:
            left, right = x.chunk(2, 1)
            scale, shift = net(left).chunk(2, 1)
            scale = scale.tanh()
            x = torch.cat([right * scale.exp() + shift, left], 1)
            total = total + scale.sum(1)
        return (0.5 * x.square().sum(1) - total).mean()


@zoo.of("Glow with invertible products", x=floats(8, 6))
class Glow(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.linalg.qr(torch.randn(6, 6))[0].contiguous())
        self.scale, self.shift, self.net = nn.Parameter(torch.zeros(6)), nn.Parameter(torch.zeros(6)), network(3, 6)

    def forward(self, x: Any) -> Any:
        x = (x + self.shift) * self.scale.exp() @ self.matrix.t()
        left, right = x.chunk(2, 1)
        scale, shift = self.net(left).chunk(2, 1)
        scale = (scale + 2).sigmoid()
        x = torch.cat([left, right * scale + shift], 1)
        logs = self.scale.sum() + torch.linalg.slogdet(self.matrix)[1] + scale.log().sum(1)
        return (0.5 * x.square().sum(1) - logs).mean()


@zoo.of("masked autoregressive flow", x=floats(8, 6))
class Maf(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(6, 18), nn.Linear(18, 12)
        degrees, hidden = torch.arange(6), torch.arange(18) % 5
        self.register_buffer("first", (hidden[:, None] >= degrees).double())
        self.register_buffer("second", (degrees.repeat(2)[:, None] > hidden).double())

    def forward(self, x: Any) -> Any:
        h = functional.linear(x, self.one.weight * self.first, self.one.bias).relu()
        mean, logs = functional.linear(h, self.other.weight * self.second, self.other.bias).chunk(2, 1)
        return (0.5 * ((x - mean) * (-logs).exp()).square() + logs).sum(1).mean()


@zoo.of("spline flow", x=uniform(8, 4, low=0.05, high=0.95))
class Spline(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = network(2, 2 * 11)

    def forward(self, x: Any) -> Any:
        left, right = x.chunk(2, 1)
        widths, slopes = self.net(left).view(-1, 2, 11).split([5, 6], 2)
        edges = functional.pad(widths.softmax(-1).cumsum(-1), (1, 0))
        place = (torch.searchsorted(edges.detach().contiguous(), right[..., None].contiguous()) - 1).clamp(0, 4)
        low, high = edges.gather(2, place), edges.gather(2, place + 1)
        t = (right[..., None] - low) / (high - low)
        slope = functional.softplus(slopes).gather(2, place)
        y = 0.2 * (place + t.pow(1.5)) * slope
        return (y.square() - slope.log()).mean()


@zoo.of("Sylvester and planar flows", x=floats(8, 6))
class Planar(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.u, self.w = nn.Parameter(0.3 * torch.randn(2, 6)), nn.Parameter(0.3 * torch.randn(2, 6))
        self.b = nn.Parameter(torch.zeros(2))

    def forward(self, x: Any) -> Any:
        total = 0.0
        for u, w, b in zip(self.u, self.w, self.b, strict=True):
            h = torch.tanh(x @ w + b)
            x = x + u * h[:, None]
            total = total + (1 + (1 - h.square()) * (u @ w)).abs().log()
        return (0.5 * x.square().sum(1) - total).mean()


@zoo.of("DDPM with given steps", x=floats(4, 2, 8, 8), noise=floats(4, 2, 8, 8), steps=whole(4, high=20))
class Ddpm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = (
            nn.Conv2d(a, b, 3, padding=1) for a, b in ((2, 16), (16, 16), (16, 2))
        )  # fmt: skip
        self.norm, self.time = nn.GroupNorm(4, 16), network(16, 32)
        self.register_buffer("kept", torch.cumprod(1 - torch.linspace(1e-4, 0.1, 20), 0))

    def forward(self, x: Any, noise: Any, steps: Any) -> Any:
        a = self.kept[steps][:, None, None, None]
        z = a.sqrt() * x + (1 - a).sqrt() * noise
        rates = torch.exp(-torch.arange(8, device=x.device, dtype=x.dtype) / 8 * math.log(1e4))
        angles = steps[:, None] * rates
        scale, shift = self.time(torch.cat([angles.sin(), angles.cos()], 1))[:, :, None, None].chunk(2, 1)
        h = functional.silu(self.norm(self.first(z)) * (1 + scale) + shift)
        return functional.mse_loss(self.last(functional.silu(self.second(h)) + h), noise)


@zoo.of("flow matching, times drawn", is_random=True, x=floats(8, 6))
class FlowMatching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = network(7, 6)

    def forward(self, x: Any) -> Any:
        t = torch.rand(len(x), 1, dtype=x.dtype, device=x.device)
        noise = torch.randn_like(x)
        return functional.mse_loss(self.net(torch.cat([(1 - t) * noise + t * x, t], 1)), x - noise)


@zoo.of("score matching by an inner gradient", x=floats(8, 6), noise=floats(8, 6))
class Score(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.energy = network(6, 1)

    def forward(self, x: Any, noise: Any) -> Any:
        def energy(z: Any) -> Any:
            return self.energy(z).sum()

        slope = torch.func.grad(energy)(x + 0.1 * noise)
        return (slope + noise / 0.1).square().mean()


@zoo.of("restricted Boltzmann machine", visible=coins(8, 6), made=coins(8, 6))
class Rbm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w, self.v, self.h = (
            nn.Parameter(0.1 * torch.randn(6, 8)),
            nn.Parameter(torch.zeros(6)),
            nn.Parameter(torch.zeros(8)),
        )

    def energy(self, x: Any) -> Any:
        return -(x @ self.v) - functional.softplus(x @ self.w + self.h).sum(1)

    def forward(self, visible: Any, made: Any) -> Any:
        return (self.energy(visible) - self.energy(made)).mean()


@zoo.of("PixelCNN", x=whole(4, 8, 8, high=4))
class PixelCnn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = (
            nn.Conv2d(1, 8, 5, padding=2),
            nn.Conv2d(8, 8, 3, padding=1),
            nn.Conv2d(8, 4, 1),
        )
        for name, size, kind in (("a", 5, 0), ("b", 3, 1)):
            mask = torch.ones(size, size)
            mask[size // 2, size // 2 + kind :] = 0
            mask[size // 2 + 1 :] = 0
            self.register_buffer(name, mask)

    def forward(self, x: Any) -> Any:
        y = x[:, None].to(self.first.weight.dtype) / 2 - 1
        y = functional.conv2d(y, self.first.weight * self.a, self.first.bias, padding=2).relu()
        y = functional.conv2d(y, self.second.weight * self.b, self.second.bias, padding=1).relu()
        return functional.cross_entropy(self.last(y), x)


@zoo.of("WaveNet", x=whole(4, 16, high=8))
class WaveNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(8, 8)
        self.gates = nn.ModuleList([nn.Conv1d(8, 16, 2, dilation=2**i) for i in range(3)])
        self.skips, self.head = nn.ModuleList([nn.Conv1d(8, 8, 1) for _ in range(3)]), nn.Conv1d(8, 8, 1)

    def forward(self, x: Any) -> Any:
        h, total = self.words(x).transpose(1, 2), 0.0
        for level, (gate, skip) in enumerate(zip(self.gates, self.skips, strict=True)):
            a, b = gate(functional.pad(h, (2**level, 0))).chunk(2, 1)
            y = skip(a.tanh() * b.sigmoid())
            total, h = total + y, h + y
        return functional.cross_entropy(self.head(total.relu())[:, :, :-1], x[:, 1:])


@zoo.of("normalised energy by log-sum-exp", x=floats(8, 6), others=floats(16, 6))
class Jem(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = network(6, 5)

    def forward(self, x: Any, others: Any) -> Any:
        return self.net(others).logsumexp(1).mean() - self.net(x).logsumexp(1).mean() + self.net(x).square().mean()


@zoo.of("maximum mean discrepancy", x=floats(8, 6), noise=floats(8, 4))
class Mmd(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = network(4, 6)

    def forward(self, x: Any, noise: Any) -> Any:
        y = self.net(noise)
        both = torch.cat([x, y])
        kernels = torch.stack([torch.exp(-torch.cdist(both, both).square() / s) for s in (1.0, 4.0, 16.0)]).sum(0)
        n = len(x)
        return kernels[:n, :n].mean() + kernels[n:, n:].mean() - 2 * kernels[:n, n:].mean()


@zoo.of("Sinkhorn distance", x=floats(8, 6), noise=floats(8, 4))
class Sinkhorn(Mmd):
    def forward(self, x: Any, noise: Any) -> Any:
        costs = torch.cdist(x, self.net(noise)).square()
        f, g = torch.zeros_like(costs[:, 0]), torch.zeros_like(costs[0])
        for _ in range(4):
            f = -((g[None] - costs) / 1.0).logsumexp(1)
            g = -((f[:, None] - costs) / 1.0).logsumexp(0)
        return ((f[:, None] + g[None] - costs).exp() * costs).sum()


@zoo.of("sliced Wasserstein distance", x=floats(8, 6), noise=floats(8, 4), directions=floats(6, 5))
class Sliced(Mmd):
    def forward(self, x: Any, noise: Any, directions: Any) -> Any:
        directions = functional.normalize(directions, dim=0)
        mine = (self.net(noise) @ directions).sort(0).values
        return (mine - (x @ directions).sort(0).values).square().mean()
