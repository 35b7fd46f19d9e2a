"""Losses, each behind a small network."""

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from tests.zoo.registry import Family, coins, floats, lengths, uniform, whole

zoo = Family("losses")

CLASSES = 6


def network(inputs: int = 8, outputs: int = CLASSES, width: int = 16) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, width), nn.GELU(), nn.Linear(width, outputs))


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = network()


@zoo.of("focal loss", x=floats(8, 8), labels=whole(8, high=CLASSES))
class Focal(Classifier):
    def forward(self, x: Any, labels: Any) -> Any:
        logs = self.net(x).log_softmax(-1).gather(1, labels[:, None]).squeeze(1)
        return -((1 - logs.exp()) ** 2 * logs).mean()


@zoo.of("focal loss of two classes", x=floats(8, 8), targets=coins(8, CLASSES))
class SigmoidFocal(Classifier):
    def forward(self, x: Any, targets: Any) -> Any:
        logits = self.net(x)
        entropy = functional.binary_cross_entropy_with_logits(logits, targets, reduction="none")
        p = logits.sigmoid()
        right = p * targets + (1 - p) * (1 - targets)
        balance = 0.25 * targets + 0.75 * (1 - targets)
        return (balance * (1 - right).pow(2.0) * entropy).sum() / targets.sum().clamp(min=1)


@zoo.of("weighted cross-entropy", x=floats(8, 8), labels=whole(8, high=CLASSES))
class Weighted(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.loss = nn.CrossEntropyLoss(weight=torch.linspace(0.5, 2.0, CLASSES))

    def forward(self, x: Any, labels: Any) -> Any:
        return self.loss(self.net(x), labels)


@zoo.of("smoothed labels, some ignored", x=floats(8, 8), labels=whole(8, high=CLASSES))
class Smoothed(Classifier):
    def forward(self, x: Any, labels: Any) -> Any:
        labels = torch.where(labels == 2, -100, labels)
        return functional.cross_entropy(self.net(x), labels, label_smoothing=0.1)


@zoo.of("soft targets", x=floats(8, 8), targets=floats(8, CLASSES))
class Soft(Classifier):
    def forward(self, x: Any, targets: Any) -> Any:
        return functional.cross_entropy(self.net(x), targets.softmax(-1))


@zoo.of("dice loss", images=floats(4, 2, 8, 8), labels=whole(4, 8, 8, high=3))
class Dice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(2, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 3, 1))

    def forward(self, images: Any, labels: Any) -> Any:
        p = self.net(images).softmax(1)
        targets = functional.one_hot(labels, 3).permute(0, 3, 1, 2).to(p.dtype)
        overlap = (p * targets).sum((0, 2, 3))
        return (1 - (2 * overlap + 1) / (p.sum((0, 2, 3)) + targets.sum((0, 2, 3)) + 1)).mean()


@zoo.of("Lovász hinge", x=floats(4, 8), targets=coins(4, CLASSES))
class Lovasz(Classifier):
    def forward(self, x: Any, targets: Any) -> Any:
        logits = self.net(x).flatten()
        truth = targets.flatten()
        errors, order = (1 - logits * (2 * truth - 1)).sort(descending=True)
        truth = truth[order]
        total = truth.sum()
        overlap, union = total - truth.cumsum(0), total + (1 - truth).cumsum(0)
        jaccard = 1 - overlap / union
        steps = torch.cat([jaccard[:1], jaccard[1:] - jaccard[:-1]])
        return errors.relu() @ steps


@zoo.of("quantile loss", x=floats(8, 8), y=floats(8))
class Quantile(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = network(outputs=3)
        self.register_buffer("levels", torch.tensor([0.1, 0.5, 0.9]))

    def forward(self, x: Any, y: Any) -> Any:
        errors = y[:, None] - self.net(x)
        return torch.maximum(self.levels * errors, (self.levels - 1) * errors).mean()


@zoo.of("Huber and smooth L1", x=floats(8, 8), y=floats(8, 4))
class Robust(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = network(outputs=4)

    def forward(self, x: Any, y: Any) -> Any:
        found = self.net(x)
        return functional.huber_loss(found, y, delta=0.7) + functional.smooth_l1_loss(found, y, beta=0.3)


@zoo.of("log-cosh and Charbonnier", x=floats(8, 8), y=floats(8, 4))
class LogCosh(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = network(outputs=4)

    def forward(self, x: Any, y: Any) -> Any:
        e = self.net(x) - y
        return (e + functional.softplus(-2 * e)).mean() + (e.square() + 1e-6).sqrt().mean()


class Embedder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = network(outputs=8)


@zoo.of("triplet margin", anchor=floats(6, 8), positive=floats(6, 8), negative=floats(6, 8))
class Triplet(Embedder):
    def forward(self, anchor: Any, positive: Any, negative: Any) -> Any:
        return functional.triplet_margin_loss(self.net(anchor), self.net(positive), self.net(negative), swap=True)


@zoo.of("hardest triplets of a batch", x=floats(8, 8), labels=lengths(0, 0, 1, 1, 2, 2, 3, 3))
class HardTriplet(Embedder):
    def forward(self, x: Any, labels: Any) -> Any:
        z = functional.normalize(self.net(x), dim=-1)
        distances = torch.cdist(z, z)
        same = labels[:, None] == labels[None, :]
        farthest = distances.masked_fill(~same, 0.0).amax(1)
        nearest = distances.masked_fill(same, float("inf")).amin(1)
        return functional.relu(farthest - nearest + 0.3).mean()


@zoo.of("contrastive loss of pairs", x=floats(6, 8), y=floats(6, 8), same=coins(6))
class Pairs(Embedder):
    def forward(self, x: Any, y: Any, same: Any) -> Any:
        d = functional.pairwise_distance(self.net(x), self.net(y))
        return (same * d.square() + (1 - same) * (1.5 - d).clamp(min=0).square()).mean()


@zoo.of("supervised contrastive", x=floats(8, 8), labels=lengths(0, 1, 2, 3, 0, 1, 2, 3))
class SupCon(Embedder):
    def forward(self, x: Any, labels: Any) -> Any:
        z = functional.normalize(self.net(x), dim=1)
        mine = torch.eye(len(z), dtype=torch.bool, device=z.device)
        logits = (z @ z.t() / 0.1).masked_fill(mine, -1e9)
        logs = logits - logits.logsumexp(1, keepdim=True)
        positive = (labels[:, None] == labels) & ~mine
        return -(logs * positive).sum(1).div(positive.sum(1)).mean()


@zoo.of("cosine embedding", x=floats(6, 8), y=floats(6, 8), same=lengths(1, -1, 1, -1, 1, 1))
class Cosine(Embedder):
    def forward(self, x: Any, y: Any, same: Any) -> Any:
        return functional.cosine_embedding_loss(self.net(x), self.net(y), same, margin=0.1)


@zoo.of("margin ranking", x=floats(6, 8), y=floats(6, 8))
class Ranking(Embedder):
    def forward(self, x: Any, y: Any) -> Any:
        one, other = self.net(x).sum(-1), self.net(y).sum(-1)
        return functional.margin_ranking_loss(one, other, torch.ones_like(one), margin=0.5)


@zoo.of(
    "multi-label margin and soft margin", x=floats(4, 8), labels=whole(4, CLASSES, high=CLASSES), y=coins(4, CLASSES)
)
class MultiLabel(Classifier):
    def forward(self, x: Any, labels: Any, y: Any) -> Any:
        logits = self.net(x)
        return functional.multilabel_margin_loss(logits, labels) + functional.multilabel_soft_margin_loss(logits, y)


@zoo.of("multi margin", x=floats(8, 8), labels=whole(8, high=CLASSES))
class MultiMargin(Classifier):
    def forward(self, x: Any, labels: Any) -> Any:
        return functional.multi_margin_loss(self.net(x), labels, margin=0.7)


@zoo.of("CTC", x=floats(4, 12, 8), targets=whole(4, 4, low=1, high=CLASSES))
class Ctc(Classifier):
    def forward(self, x: Any, targets: Any) -> Any:
        logs = self.net(x).log_softmax(-1).transpose(0, 1)
        times = torch.full((4,), 12, dtype=torch.long)
        return functional.ctc_loss(logs, targets, times, torch.tensor([4, 3, 2, 4]), blank=0)


@zoo.of("ArcFace", x=floats(8, 8), labels=whole(8, high=CLASSES))
class ArcFace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = network(outputs=8)
        self.centres = nn.Parameter(torch.randn(CLASSES, 8))

    def forward(self, x: Any, labels: Any) -> Any:
        cosines = functional.linear(functional.normalize(self.net(x)), functional.normalize(self.centres))
        angles = cosines.clamp(-1 + 1e-6, 1 - 1e-6).acos()
        chosen = functional.one_hot(labels, CLASSES).to(x.dtype)
        return functional.cross_entropy(16.0 * (chosen * (angles + 0.3).cos() + (1 - chosen) * cosines), labels)


@zoo.of("centre loss with moving centres", x=floats(8, 8), labels=whole(8, high=CLASSES))
class Centre(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net, self.head = network(outputs=8), nn.Linear(8, CLASSES)
        self.register_buffer("centres", torch.randn(CLASSES, 8))

    def forward(self, x: Any, labels: Any) -> Any:
        z = self.net(x)
        loss = functional.cross_entropy(self.head(z), labels) + 0.1 * (z - self.centres[labels]).square().sum(1).mean()
        with torch.no_grad():
            sums = torch.zeros_like(self.centres).index_add_(0, labels, z - self.centres[labels])
            counts = torch.bincount(labels, minlength=CLASSES).to(z.dtype)
            self.centres.add_(0.5 * sums / (1 + counts[:, None]))
        return loss


@zoo.of("Gaussian likelihood", x=floats(8, 8), y=floats(8, 3))
class Gaussian(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = network(outputs=6)

    def forward(self, x: Any, y: Any) -> Any:
        mean, spread = self.net(x).chunk(2, -1)
        return functional.gaussian_nll_loss(mean, y, functional.softplus(spread) + 1e-3)


@zoo.of("mixture of Gaussians", x=floats(8, 8), y=floats(8))
class MixtureDensity(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = network(outputs=12)

    def forward(self, x: Any, y: Any) -> Any:
        weights, means, logs = self.net(x).chunk(3, -1)
        density = torch.distributions.Normal(means, logs.exp()).log_prob(y[:, None])
        return -(weights.log_softmax(-1) + density).logsumexp(-1).mean()


@zoo.of("Poisson and negative binomial", x=floats(8, 8), counts=whole(8, high=7))
class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = network(outputs=2)

    def forward(self, x: Any, counts: Any) -> Any:
        rate, shape = self.net(x).unbind(-1)
        y, r, mean = counts.to(x.dtype), functional.softplus(shape) + 0.1, rate.exp()
        logs = torch.lgamma(y + r) - torch.lgamma(r) - torch.lgamma(y + 1) + r * (r / (r + mean)).log()
        return functional.poisson_nll_loss(rate, y) - (logs + y * (mean / (r + mean)).log()).mean()


@zoo.of("Cox partial likelihood", x=floats(8, 8), time=uniform(8), seen=coins(8, share=0.7))
class Cox(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = network(outputs=1)

    def forward(self, x: Any, time: Any, seen: Any) -> Any:
        risk = self.net(x).squeeze(1)[time.argsort(descending=True)]
        seen = seen[time.argsort(descending=True)]
        return -((risk - risk.logcumsumexp(0)) * seen).sum() / seen.sum().clamp(min=1)


@zoo.of("distillation from a frozen teacher", x=floats(8, 8), labels=whole(8, high=CLASSES))
class Distilled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = network(width=8), network(width=32).requires_grad_(False)

    def forward(self, x: Any, labels: Any) -> Any:
        logits = self.student(x)
        with torch.no_grad():
            targets = (self.teacher(x) / 2).softmax(-1)
        soft = functional.kl_div((logits / 2).log_softmax(-1), targets, reduction="batchmean") * 4
        return 0.5 * soft + 0.5 * functional.cross_entropy(logits, labels)


@zoo.of("CORAL ordinal", x=floats(8, 8), labels=whole(8, high=CLASSES))
class Ordinal(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = network(outputs=1)
        self.bias = nn.Parameter(torch.linspace(1.0, -1.0, CLASSES - 1))

    def forward(self, x: Any, labels: Any) -> Any:
        levels = (labels[:, None] > torch.arange(CLASSES - 1, device=labels.device)).to(x.dtype)
        return functional.binary_cross_entropy_with_logits(self.net(x) + self.bias, levels)


@zoo.of("uncertainty-weighted tasks", x=floats(8, 8), labels=whole(8, high=CLASSES), y=floats(8))
class Tasks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.one, self.other = network(outputs=16), nn.Linear(16, CLASSES), nn.Linear(16, 1)
        self.logs = nn.Parameter(torch.zeros(2))

    def forward(self, x: Any, labels: Any, y: Any) -> Any:
        z = self.trunk(x)
        losses = torch.stack(
            [functional.cross_entropy(self.one(z), labels), functional.mse_loss(self.other(z).squeeze(-1), y)]
        )
        return (losses * (-self.logs).exp() + self.logs).sum()


@zoo.of("hard negatives mined", x=floats(16, 8), labels=whole(16, high=CLASSES))
class Mined(Classifier):
    def forward(self, x: Any, labels: Any) -> Any:
        return functional.cross_entropy(self.net(x), labels, reduction="none").topk(6).values.mean()


@zoo.of("sampled softmax", x=floats(8, 8), labels=whole(8, high=40), negatives=whole(12, high=40))
class Sampled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net, self.table = network(outputs=8), nn.Embedding(40, 8)

    def forward(self, x: Any, labels: Any, negatives: Any) -> Any:
        z = self.net(x)
        right = (z * self.table(labels)).sum(-1, keepdim=True)
        others = (z @ self.table(negatives).t()).masked_fill(labels[:, None] == negatives, -1e9)
        return functional.cross_entropy(torch.cat([right, others], 1), torch.zeros_like(labels))


@zoo.of("adaptive softmax", x=floats(8, 8), labels=whole(8, high=24))
class Adaptive(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = network(outputs=16)
        self.head = nn.AdaptiveLogSoftmaxWithLoss(16, 24, cutoffs=[6, 12], div_value=2.0)

    def forward(self, x: Any, labels: Any) -> Any:
        return self.head(self.net(x), labels).loss


@zoo.of("linear-chain CRF", x=floats(4, 6, 8), tags=whole(4, 6, high=CLASSES))
class Crf(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = network()
        self.moves = nn.Parameter(0.1 * torch.randn(CLASSES, CLASSES))
        self.start = nn.Parameter(torch.randn(CLASSES))

    def forward(self, x: Any, tags: Any) -> Any:
        scores = self.net(x)
        total = self.start + scores[:, 0]
        for step in range(1, scores.shape[1]):
            total = (total[:, :, None] + self.moves).logsumexp(1) + scores[:, step]
        path = self.start[tags[:, 0]] + scores.gather(2, tags[:, :, None]).squeeze(2).sum(1)
        path = path + self.moves[tags[:, :-1], tags[:, 1:]].sum(1)
        return (total.logsumexp(1) - path).mean()
