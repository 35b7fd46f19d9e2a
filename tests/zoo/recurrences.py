"""What goes through a sequence step by step, or is made as if it did: cells, state spaces, solvers, memories."""

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from tests.zoo.registry import Family, floats, lengths, whole

zoo = Family("recurrences")

SEQUENCE = {"x": floats(4, 8, 6), "y": floats(4, 8, 3)}


@zoo.of("LSTM cell in a loop", **SEQUENCE)
class CellLoop(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.LSTMCell(6, 8), nn.Linear(8, 3)

    def forward(self, x: Any, y: Any) -> Any:
        h = c = x.new_zeros(len(x), 8)
        found = []
        for step in x.unbind(1):
            h, c = self.cell(step, (h, c))
            found.append(self.head(h))
        return functional.mse_loss(torch.stack(found, 1), y)


@zoo.of("GRU, two ways, two layers", **SEQUENCE)
class Gru(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gru, self.head = nn.GRU(6, 8, 2, bidirectional=True, batch_first=True), nn.Linear(16, 3)

    def forward(self, x: Any, y: Any) -> Any:
        return functional.mse_loss(self.head(self.gru(x)[0]), y)


@zoo.of("LSTM with projections and a first state", **SEQUENCE)
class Projected(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(6, 8, proj_size=4, batch_first=True), nn.Linear(4, 3)
        self.h, self.c = nn.Parameter(torch.randn(1, 1, 4)), nn.Parameter(torch.randn(1, 1, 8))

    def forward(self, x: Any, y: Any) -> Any:
        first = self.h.expand(-1, len(x), -1).contiguous(), self.c.expand(-1, len(x), -1).contiguous()
        return functional.mse_loss(self.head(self.lstm(x, first)[0]), y)


@zoo.of("LSTM with dropout", is_random=True, **SEQUENCE)
class DroppingLstm(Gru):
    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.LSTM(6, 8, 2, bidirectional=True, batch_first=True, dropout=0.3)


@zoo.of("packed sequences", x=floats(4, 8, 6), counts=lengths(8, 6, 5, 3))
class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(6, 8, batch_first=True)

    def forward(self, x: Any, counts: Any) -> Any:
        packed = nn.utils.rnn.pack_padded_sequence(x, counts, batch_first=True)
        return nn.utils.rnn.pad_packed_sequence(self.gru(packed)[0], batch_first=True)[0].square().mean()


@zoo.of("Elman network, tied cells", **SEQUENCE)
class Elman(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.RNN(6, 8, nonlinearity="relu", batch_first=True), nn.Linear(8, 3)

    def forward(self, x: Any, y: Any) -> Any:
        z, last = self.rnn(x)
        return functional.mse_loss(self.head(z + last.transpose(0, 1)), y)


@zoo.of("minimal GRU by a parallel scan", **SEQUENCE)
class MinGru(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.value, self.head = nn.Linear(6, 8), nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: Any, y: Any) -> Any:
        gate = self.gate(x)
        forget = -functional.softplus(gate).cumsum(1)
        values = -functional.softplus(-gate) + functional.logsigmoid(self.value(x))
        states = (forget + (values - forget).logcumsumexp(1)).exp()
        return functional.mse_loss(self.head(states), y)


@zoo.of("selective state space (Mamba)", **SEQUENCE)
class Mamba(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(6, 16, bias=False), nn.Linear(8, 3, bias=False)
        self.conv = nn.Conv1d(8, 8, 3, groups=8, padding=2)
        self.select, self.step = nn.Linear(8, 2 + 8), nn.Linear(2, 8)
        self.a = nn.Parameter(torch.arange(1.0, 5.0).repeat(8, 1).log())
        self.d = nn.Parameter(torch.ones(8))

    def forward(self, x: Any, y: Any) -> Any:
        u, gate = self.enter(x).chunk(2, -1)
        u = functional.silu(self.conv(u.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2))
        rate, b, c = self.select(u).split([2, 4, 4], -1)
        rate = functional.softplus(self.step(rate))
        decay = torch.exp(rate[..., None] * -self.a.exp())
        fed = rate[..., None] * b[:, :, None, :] * u[..., None]
        state, found = torch.zeros_like(decay[:, 0]), []
        for t in range(x.shape[1]):
            state = decay[:, t] * state + fed[:, t]
            found.append((state * c[:, t, None, :]).sum(-1))
        z = (torch.stack(found, 1) + self.d * u) * functional.silu(gate)
        return functional.mse_loss(self.leave(z), y)


@zoo.of("S4D by a convolution of its kernel", **SEQUENCE)
class S4D(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(6, 8), nn.Linear(8, 3)
        self.rate, self.real = nn.Parameter(torch.rand(8) - 3), nn.Parameter(torch.zeros(8, 4))
        self.imaginary = nn.Parameter(torch.arange(4.0).repeat(8, 1))
        self.c = nn.Parameter(torch.randn(8, 4, 2))

    def forward(self, x: Any, y: Any) -> Any:
        length = x.shape[1]
        a = torch.complex(-self.real.exp(), self.imaginary) * self.rate.exp()[:, None]
        steps = torch.arange(length, device=x.device, dtype=x.dtype)
        kernel = 2 * (torch.view_as_complex(self.c)[..., None] * (a[..., None] * steps).exp()).sum(1).real
        u = self.enter(x).transpose(1, 2)
        z = torch.fft.irfft(torch.fft.rfft(u, 2 * length) * torch.fft.rfft(kernel, 2 * length), 2 * length)
        return functional.mse_loss(self.leave(functional.gelu(z[..., :length].transpose(1, 2))), y)


@zoo.of("linear attention with a decay (retention)", **SEQUENCE)
class Retention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(6, 24, bias=False), nn.Linear(8, 3)
        self.norm = nn.GroupNorm(2, 8)

    def forward(self, x: Any, y: Any) -> Any:
        q, k, v = (part.unflatten(-1, (2, 4)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        n = torch.arange(x.shape[1], device=x.device)
        gap = (n[:, None] - n).to(x.dtype)
        rates = 1 - 2.0 ** -torch.arange(2.0, 4.0, device=x.device, dtype=x.dtype)
        decay = torch.where(gap >= 0, rates[:, None, None] ** gap, torch.zeros_like(gap))
        z = ((q @ k.transpose(-1, -2)) * decay) @ v
        return functional.mse_loss(self.out(self.norm(z.transpose(1, 2).reshape(-1, 8)).view(4, 8, 8)), y)


@zoo.of("linear attention by feature maps", **SEQUENCE)
class LinearAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(a, b) for a, b in ((6, 8), (6, 8), (6, 8), (8, 3)))

    def forward(self, x: Any, y: Any) -> Any:
        q, k = functional.elu(self.q(x)) + 1, functional.elu(self.k(x)) + 1
        states = torch.einsum("btd,bte->btde", k, self.v(x)).cumsum(1)
        z = torch.einsum("btd,btde->bte", q, states) / (q * k.cumsum(1)).sum(-1, keepdim=True)
        return functional.mse_loss(self.out(z), y)


@zoo.of("delta rule with fast weights", **SEQUENCE)
class DeltaNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.beta = (nn.Linear(6, n) for n in (4, 4, 3, 1))

    def forward(self, x: Any, y: Any) -> Any:
        q, k, v = self.q(x), functional.normalize(self.k(x), dim=-1), self.v(x)
        beta, state, found = self.beta(x).sigmoid(), x.new_zeros(len(x), 3, 4), []
        for t in range(x.shape[1]):
            error = v[:, t] - torch.bmm(state, k[:, t, :, None]).squeeze(-1)
            state = state + torch.bmm((beta[:, t] * error)[:, :, None], k[:, t, None, :])
            found.append(torch.bmm(state, q[:, t, :, None]).squeeze(-1))
        return functional.mse_loss(torch.stack(found, 1), y)


@zoo.of("RWKV time mixing", **SEQUENCE)
class Rwkv(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Parameter(torch.rand(3, 6))
        self.r, self.k, self.v, self.out = (nn.Linear(a, b, bias=False) for a, b in ((6, 8), (6, 8), (6, 8), (8, 3)))
        self.decay, self.first = nn.Parameter(torch.zeros(8)), nn.Parameter(torch.zeros(8))

    def forward(self, x: Any, y: Any) -> Any:
        before = functional.pad(x, (0, 0, 1, -1))
        r, k, v = (layer(x * m + before * (1 - m)) for layer, m in zip((self.r, self.k, self.v), self.mix, strict=True))
        a = b = torch.zeros_like(k[:, 0])
        found, decay = [], (-self.decay.exp()).exp()
        for t in range(x.shape[1]):
            now = (self.first + k[:, t]).exp()
            found.append((a + now * v[:, t]) / (b + now))
            a, b = decay * a + k[:, t].exp() * v[:, t], decay * b + k[:, t].exp()
        return functional.mse_loss(self.out(r.sigmoid() * torch.stack(found, 1)), y)


@zoo.of("neural ODE by Runge-Kutta steps", x=floats(8, 6), y=floats(8, 6))
class Ode(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(7, 16), nn.Tanh(), nn.Linear(16, 6))

    def slope(self, x: Any, t: float) -> Any:
        return self.net(torch.cat([x, torch.full_like(x[:, :1], t)], 1))

    def forward(self, x: Any, y: Any) -> Any:
        h = 0.25
        for step in range(4):
            t = step * h
            a = self.slope(x, t)
            b = self.slope(x + h / 2 * a, t + h / 2)
            c = self.slope(x + h / 2 * b, t + h / 2)
            d = self.slope(x + h * c, t + h)
            x = x + h / 6 * (a + 2 * b + 2 * c + d)
        return functional.mse_loss(x, y)


@zoo.of("deep equilibrium by fixed steps", x=floats(8, 6), y=floats(8, 8))
class Equilibrium(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.enter = nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8)), nn.Linear(6, 8)

    def forward(self, x: Any, y: Any) -> Any:
        fed = self.enter(x)
        z = torch.zeros_like(fed)
        with torch.no_grad():
            for _ in range(4):
                z = (0.5 * self.inner(z) + fed).tanh()
        return functional.mse_loss((0.5 * self.inner(z) + fed).tanh(), y)


@zoo.of("Hamiltonian network", x=floats(8, 6), y=floats(8, 6))
class Hamiltonian(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))

    def forward(self, x: Any, y: Any) -> Any:
        slope = torch.func.grad(lambda z: self.net(z).sum())(x)
        q, p = slope.chunk(2, 1)
        return functional.mse_loss(torch.cat([p, -q], 1), y)


@zoo.of("hypernetwork", x=floats(8, 6), code=floats(4), y=floats(8, 3))
class Hyper(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.make = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 6 * 3 + 3))

    def forward(self, x: Any, code: Any, y: Any) -> Any:
        weight, bias = self.make(code).split([18, 3])
        return functional.mse_loss(functional.linear(x, weight.view(3, 6), bias), y)


@zoo.of("a weight of its own for each example", x=floats(8, 6), code=floats(8, 4), y=floats(8, 3))
class HyperEach(Hyper):
    def forward(self, x: Any, code: Any, y: Any) -> Any:
        weight, bias = self.make(code).split([18, 3], 1)
        return functional.mse_loss(torch.baddbmm(bias[:, None], x[:, None], weight.view(-1, 6, 3))[:, 0], y)


@zoo.of("Neural Turing memory", **SEQUENCE)
class Turing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head, self.key, self.write = (
            nn.GRUCell(10, 8),
            nn.Linear(8, 3),
            nn.Linear(8, 4),
            nn.Linear(8, 4),
        )
        self.memory = nn.Parameter(torch.randn(5, 4))

    def forward(self, x: Any, y: Any) -> Any:
        memory, h = self.memory.expand(len(x), -1, -1), x.new_zeros(len(x), 8)
        read, found = x.new_zeros(len(x), 4), []
        for step in x.unbind(1):
            h = self.cell(torch.cat([step, read], 1), h)
            weights = functional.cosine_similarity(self.key(h)[:, None], memory, dim=2).mul(3).softmax(1)
            memory = memory + weights[..., None] * self.write(h)[:, None].tanh()
            read = torch.einsum("bn,bnd->bd", weights, memory)
            found.append(self.head(h))
        return functional.mse_loss(torch.stack(found, 1), y)


@zoo.of("adaptive steps with halting shares", x=floats(8, 6), y=floats(8, 6))
class Halting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.step, self.halt = nn.Linear(6, 6), nn.Linear(6, 1)

    def forward(self, x: Any, y: Any) -> Any:
        left, total = torch.ones_like(x[:, :1]), torch.zeros_like(x)
        for number in range(3):
            x = self.step(x).tanh() + x
            share = left if number == 2 else left * self.halt(x).sigmoid()
            left, total = left - share, total + share * x
        return functional.mse_loss(total, y)


@zoo.of("sequence to sequence with attention", words=whole(4, 6, high=12), targets=whole(4, 5, high=12))
class Translator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.encode = nn.Embedding(12, 8), nn.GRU(8, 8, batch_first=True)
        self.cell, self.score, self.head = nn.GRUCell(16, 8), nn.Bilinear(8, 8, 1), nn.Linear(16, 12)

    def forward(self, words: Any, targets: Any) -> Any:
        states, h = self.encode(self.words(words))
        h, context, loss = h[0], states.mean(1), 0.0
        for number in range(targets.shape[1] - 1):
            h = self.cell(torch.cat([self.words(targets[:, number]), context], 1), h)
            weights = self.score(states, h[:, None].expand_as(states).contiguous()).softmax(1)
            context = (weights * states).sum(1)
            loss = loss + functional.cross_entropy(self.head(torch.cat([h, context], 1)), targets[:, number + 1])
        return loss
