"""Learning without labels: contrast, prediction of one view by another, codebooks, what is masked."""

import copy
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from tests.zoo.registry import Family, floats, masks, whole

zoo = Family("self-supervised")

VIEWS = {"one": floats(8, 12), "other": floats(8, 12)}


def projector(inputs: int = 12, width: int = 16, outputs: int = 8) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, outputs))


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = projector()


@zoo.of("SimCLR", **VIEWS)
class SimClr(Two):
    def forward(self, one: Any, other: Any) -> Any:
        z = functional.normalize(self.net(torch.cat([one, other])), dim=1)
        count = len(one)
        logits = z @ z.T / 0.2
        logits = logits - torch.eye(2 * count, dtype=z.dtype, device=z.device) * 1e9
        targets = torch.arange(2 * count, device=z.device).roll(count)
        return functional.cross_entropy(logits, targets)


@zoo.of("CLIP", images=floats(8, 12), texts=floats(8, 10))
class Clip(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.images, self.texts = projector(), projector(10)
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, images: Any, texts: Any) -> Any:
        x, y = functional.normalize(self.images(images), dim=-1), functional.normalize(self.texts(texts), dim=-1)
        logits = self.scale.exp().clamp(max=100) * x @ y.t()
        labels = torch.arange(len(x), device=x.device)
        return (functional.cross_entropy(logits, labels) + functional.cross_entropy(logits.t(), labels)) / 2


@zoo.of("SigLIP", images=floats(8, 12), texts=floats(8, 10))
class SigLip(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.images, self.texts = projector(), projector(10)
        self.scale, self.shift = nn.Parameter(torch.tensor(2.3)), nn.Parameter(torch.tensor(-10.0))

    def forward(self, images: Any, texts: Any) -> Any:
        x, y = functional.normalize(self.images(images), dim=-1), functional.normalize(self.texts(texts), dim=-1)
        logits = x @ y.t() * self.scale.exp() + self.shift
        signs = 2 * torch.eye(len(x), dtype=x.dtype, device=x.device) - 1
        return -functional.logsigmoid(signs * logits).sum() / len(x)


@zoo.of("SimSiam", **VIEWS)
class SimSiam(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net, self.predict = projector(), nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 8))

    def forward(self, one: Any, other: Any) -> Any:
        x, y = self.net(one), self.net(other)
        first = functional.cosine_similarity(self.predict(x), y.detach(), dim=-1)
        second = functional.cosine_similarity(self.predict(y), x.detach(), dim=-1)
        return -(first.mean() + second.mean()) / 2


@zoo.of("BYOL with its moving average", **VIEWS)
class Byol(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.online, self.predict = projector(), projector(8)
        self.target = copy.deepcopy(self.online).requires_grad_(False)

    def forward(self, one: Any, other: Any) -> Any:
        with torch.no_grad():
            for slow, fast in zip(self.target.parameters(), self.online.parameters(), strict=True):
                slow.mul_(0.9).add_(fast, alpha=0.1)
            x, y = self.target(one), self.target(other)
        found = self.predict(self.online(one)), self.predict(self.online(other))
        return 4 - 2 * sum(functional.cosine_similarity(a, b).mean() for a, b in zip(found, (y, x), strict=True))


@zoo.of("BYOL with a target left alone", **VIEWS)
class ByolFixed(Byol):
    def forward(self, one: Any, other: Any) -> Any:
        with torch.no_grad():
            x, y = self.target(one), self.target(other)
        found = self.predict(self.online(one)), self.predict(self.online(other))
        return 4 - 2 * sum(functional.cosine_similarity(a, b).mean() for a, b in zip(found, (y, x), strict=True))


@zoo.of("Barlow twins", **VIEWS)
class Barlow(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net, self.norm = projector(), nn.BatchNorm1d(8, affine=False)

    def forward(self, one: Any, other: Any) -> Any:
        c = self.norm(self.net(one)).T @ self.norm(self.net(other)) / len(one)
        diagonal = torch.diagonal(c)
        return (diagonal - 1).square().sum() + 0.01 * (c.square().sum() - diagonal.square().sum())


@zoo.of("VICReg", **VIEWS)
class VicReg(Two):
    def forward(self, one: Any, other: Any) -> Any:
        x, y = self.net(one), self.net(other)
        loss = 25 * functional.mse_loss(x, y)
        for z in (x, y):
            z = z - z.mean(0)
            loss = loss + 12.5 * functional.relu(1 - (z.var(0) + 1e-4).sqrt()).mean()
            covariance = z.T @ z / (len(z) - 1)
            off = covariance.flatten()[:-1].view(7, 9)[:, 1:]
            loss = loss + off.square().sum() / 8
        return loss


@zoo.of("VICReg by torch.cov", **VIEWS)
class VicRegCov(Two):
    def forward(self, one: Any, other: Any) -> Any:
        x, y = self.net(one), self.net(other)
        return functional.mse_loss(x, y) + (x.T.cov() - torch.eye(8, dtype=x.dtype, device=x.device)).square().mean()


@zoo.of("W-MSE by a Cholesky factor", **VIEWS)
class Whitened(Two):
    def forward(self, one: Any, other: Any) -> Any:
        found = []
        for z in (self.net(one), self.net(other)):
            z = z[:, :4] - z[:, :4].mean(0)
            factor = torch.linalg.cholesky(z.T @ z / len(z) + 1e-2 * torch.eye(4, dtype=z.dtype, device=z.device))
            found.append(torch.linalg.solve_triangular(factor, z.T, upper=False))
        return functional.mse_loss(*found)


@zoo.of("DINO with its centre", **VIEWS)
class Dino(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.student = projector()
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)
        self.register_buffer("centre", torch.zeros(1, 8))

    def forward(self, one: Any, other: Any) -> Any:
        with torch.no_grad():
            targets = self.teacher(other)
            soft = ((targets - self.centre) / 0.04).softmax(-1)
            self.centre.copy_(0.9 * self.centre + 0.1 * targets.mean(0, keepdim=True))
        return -(soft * (self.student(one) / 0.1).log_softmax(-1)).sum(-1).mean()


@zoo.of("SwAV by Sinkhorn steps", **VIEWS)
class Swav(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net, self.prototypes = projector(), nn.utils.parametrizations.weight_norm(nn.Linear(8, 6, bias=False))

    def forward(self, one: Any, other: Any) -> Any:
        scores = [self.prototypes(functional.normalize(self.net(x), dim=1)) for x in (one, other)]
        codes = [self.balanced(x) for x in scores]
        return -sum((q * (s / 0.1).log_softmax(1)).sum(1).mean() for q, s in zip(codes, scores[::-1], strict=True))

    @torch.no_grad()
    def balanced(self, scores: Any) -> Any:
        q = (scores / 0.5).exp().t()
        q = q / q.sum()
        for _ in range(3):
            q = q / q.sum(1, keepdim=True) / q.shape[0]
            q = q / q.sum(0, keepdim=True) / q.shape[1]
        return (q * q.shape[1]).t()


@zoo.of("MoCo with its queue", **VIEWS)
class Moco(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query = projector()
        self.key = copy.deepcopy(self.query).requires_grad_(False)
        self.register_buffer("queue", functional.normalize(torch.randn(16, 8), dim=1))

    def forward(self, one: Any, other: Any) -> Any:
        q = functional.normalize(self.query(one), dim=1)
        with torch.no_grad():
            k = functional.normalize(self.key(other), dim=1)
        logits = torch.cat([(q * k).sum(1, keepdim=True), q @ self.queue.clone().t()], 1) / 0.2
        self.queue = torch.cat([k, self.queue[: -len(k)]])
        return functional.cross_entropy(logits, torch.zeros(len(q), dtype=torch.long, device=q.device))


class Codes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = nn.Linear(12, 8), nn.Linear(8, 12)
        self.codes = nn.Embedding(10, 8)

    def nearest(self, z: Any) -> Any:
        table = self.codes.weight
        return (z.square().sum(1, keepdim=True) - 2 * z @ table.t() + table.square().sum(1)).argmin(1)


@zoo.of("VQ-VAE", x=floats(8, 12))
class VqVae(Codes):
    def forward(self, x: Any) -> Any:
        z = self.encode(x)
        q = self.codes(self.nearest(z))
        loss = functional.mse_loss(q, z.detach()) + 0.25 * functional.mse_loss(z, q.detach())
        return loss + functional.mse_loss(self.decode(z + (q - z).detach()), x)


@zoo.of("VQ-VAE with moving codes", x=floats(8, 12))
class VqEma(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = nn.Linear(12, 8), nn.Linear(8, 12)
        self.register_buffer("codes", torch.randn(10, 8))
        self.register_buffer("counts", torch.ones(10))
        self.register_buffer("sums", self.codes.clone())

    def forward(self, x: Any) -> Any:
        z = self.encode(x)
        with torch.no_grad():
            chosen = functional.one_hot(torch.cdist(z, self.codes).argmin(1), 10).to(z.dtype)
        q = chosen @ self.codes
        if self.training:
            with torch.no_grad():
                self.counts.mul_(0.99).add_(chosen.sum(0), alpha=0.01)
                self.sums.mul_(0.99).add_(chosen.t() @ z, alpha=0.01)
                self.codes.copy_(self.sums / (self.counts[:, None] + 1e-5))
        straight = z + (q - z).detach()
        return functional.mse_loss(self.decode(straight), x) + 0.25 * functional.mse_loss(z, q.detach())


@zoo.of("finite scalar quantisation", x=floats(8, 12))
class Fsq(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = nn.Linear(12, 4), nn.Linear(4, 12)

    def forward(self, x: Any) -> Any:
        z = self.encode(x).tanh() * 3
        return functional.mse_loss(self.decode(z + (z.round() - z).detach()), x)


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = {"nhead": 4, "dim_feedforward": 32, "dropout": 0.0, "batch_first": True, "norm_first": True}
        self.patches, self.places = nn.Linear(12, 16), nn.Parameter(0.1 * torch.randn(1, 8, 16))
        self.encoder = nn.TransformerEncoderLayer(16, **layer)
        self.decoder, self.head = nn.TransformerEncoderLayer(16, **layer), nn.Linear(16, 12)
        self.token = nn.Parameter(torch.randn(1, 1, 16))


@zoo.of("MAE, orders given", patches=floats(4, 8, 12), noise=floats(4, 8))
class Mae(Masked):
    def forward(self, patches: Any, noise: Any) -> Any:
        order = noise.argsort(1)
        back = order.argsort(1)
        x = self.patches(patches) + self.places
        seen = x.gather(1, order[:, :4, None].expand(-1, -1, 16))
        z = self.encoder(seen)
        z = torch.cat([z, self.token.expand(len(z), 4, -1)], 1).gather(1, back[:, :, None].expand(-1, -1, 16))
        found = self.head(self.decoder(z + self.places))
        hidden = (back >= 4).to(found.dtype)
        return ((found - patches).square().mean(-1) * hidden).sum() / hidden.sum()


@zoo.of("MAE, orders drawn", is_random=True, patches=floats(4, 8, 12))
class MaeDrawn(Mae):
    def forward(self, patches: Any) -> Any:
        return super().forward(patches, torch.rand(patches.shape[:2], dtype=patches.dtype, device=patches.device))


@zoo.of("SimMIM", patches=floats(4, 8, 12), hidden=masks(4, 8))
class SimMim(Masked):
    def forward(self, patches: Any, hidden: Any) -> Any:
        x = torch.where(hidden[..., None], self.token, self.patches(patches)) + self.places
        found = self.head(self.encoder(x))
        return ((found - patches).abs().mean(-1) * hidden).sum() / hidden.sum().clamp(min=1)


@zoo.of("data2vec", patches=floats(4, 8, 12), hidden=masks(4, 8))
class Data2Vec(Masked):
    def __init__(self) -> None:
        super().__init__()
        self.teacher = copy.deepcopy(self.encoder).requires_grad_(False)

    def forward(self, patches: Any, hidden: Any) -> Any:
        x = self.patches(patches)
        with torch.no_grad():
            targets = functional.layer_norm(self.teacher(x + self.places), (16,))
        found = self.encoder(torch.where(hidden[..., None], self.token, x) + self.places)
        return (functional.smooth_l1_loss(found, targets, reduction="none").mean(-1) * hidden).sum() / 8


@zoo.of("CPC", x=floats(4, 8, 12))
class Cpc(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encode, self.context, self.ahead = nn.Linear(12, 8), nn.GRU(8, 8, batch_first=True), nn.Linear(8, 8)

    def forward(self, x: Any) -> Any:
        z = self.encode(x)
        c = self.ahead(self.context(z)[0][:, :-1])
        logits = torch.einsum("btd,ntd->tbn", c, z[:, 1:])
        labels = torch.arange(len(x), device=x.device).expand(logits.shape[:2])
        return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


@zoo.of("deep clustering with moved centres", x=floats(8, 12), labels=whole(8, high=4))
class Clusters(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net, self.centres = projector(), nn.Parameter(torch.randn(4, 8))

    def forward(self, x: Any, labels: Any) -> Any:
        q = 1 / (1 + torch.cdist(self.net(x), self.centres).square())
        q = q / q.sum(1, keepdim=True)
        p = (q.square() / q.sum(0)).detach()
        p = p / p.sum(1, keepdim=True)
        return functional.kl_div(q.log(), p, reduction="batchmean") + functional.nll_loss(q.log(), labels)


@zoo.of("HSIC bottleneck", **VIEWS)
class Hsic(Two):
    def forward(self, one: Any, other: Any) -> Any:
        def kernel(z: Any) -> Any:
            return torch.exp(-torch.cdist(z, z).square() / 8)

        n = len(one)
        centred = torch.eye(n, dtype=one.dtype, device=one.device) - 1 / n
        return -torch.trace(kernel(self.net(one)) @ centred @ kernel(self.net(other)) @ centred) / (n - 1) ** 2
