"""Networks of images, and what they normalise and sample by."""

from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from tests.zoo.registry import Family, floats, masks, uniform, whole

zoo = Family("images")

CLASSES = 4
IMAGES = {"x": floats(4, 3, 8, 8), "labels": whole(4, high=CLASSES)}


class Classifier(nn.Module):
    """What comes of `features` is averaged and classified."""

    def __init__(self, channels: int = 8) -> None:
        super().__init__()
        self.first, self.head = nn.Conv2d(3, 8, 3, padding=1), nn.Linear(channels, CLASSES)

    def features(self, x: Any) -> Any:
        return x

    def forward(self, x: Any, labels: Any) -> Any:
        return functional.cross_entropy(self.head(self.features(self.first(x)).mean((2, 3))), labels)


class StandardConv(nn.Conv2d):
    def forward(self, x: Any) -> Any:
        w = self.weight
        w = (w - w.mean((1, 2, 3), keepdim=True)) / (w.var((1, 2, 3), keepdim=True) + 1e-5).sqrt()
        return functional.conv2d(x, w, self.bias, self.stride, self.padding)


@zoo.of("weight standardisation", **IMAGES)
class Standardised(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = StandardConv(8, 8, 3, padding=1), nn.GroupNorm(4, 8)

    def features(self, x: Any) -> Any:
        return self.norm(self.conv(x.relu())).relu()


@zoo.of("weight norm on convolutions", **IMAGES)
class WeightNorm(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.utils.parametrizations.weight_norm(nn.Conv2d(8, 8, 3, padding=1))

    def features(self, x: Any) -> Any:
        return self.conv(x.relu())


@zoo.of("spectral norm on convolutions", **IMAGES)
class SpectralNorm(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.utils.parametrizations.spectral_norm(nn.Conv2d(8, 8, 3, padding=1))

    def features(self, x: Any) -> Any:
        return self.conv(x.relu())


@zoo.of("one batch norm called twice", **IMAGES)
class Twice(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8)

    def features(self, x: Any) -> Any:
        return self.norm(self.conv(self.norm(x).relu())).relu()


@zoo.of("batch norm without momentum", **IMAGES)
class Cumulative(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(8, momentum=None)

    def features(self, x: Any) -> Any:
        return self.norm(x).relu()


@zoo.of("batch norm, its first layer frozen", **IMAGES)
class Frozen(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.BatchNorm2d(8), nn.BatchNorm2d(8)

    def train(self, mode: bool = True) -> "Frozen":
        super().train(mode)
        self.one.eval()
        return self

    def features(self, x: Any) -> Any:
        return self.other(self.one(x).relu())


@zoo.of("instance norm with statistics", **IMAGES)
class Instances(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.InstanceNorm2d(8, affine=True, track_running_stats=True)

    def features(self, x: Any) -> Any:
        return self.norm(x).square()


@zoo.of("batch renormalisation by hand", **IMAGES)
class Renorm(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("deviation", torch.ones(8))

    def features(self, x: Any) -> Any:
        mean, deviation = x.mean((0, 2, 3)), x.std((0, 2, 3)) + 1e-3
        with torch.no_grad():
            r = (deviation / self.deviation).clamp(0.5, 2)
            d = ((mean - self.mean) / self.deviation).clamp(-1, 1)
            self.mean.lerp_(mean, 0.1)
            self.deviation.lerp_(deviation, 0.1)
        x = (x - mean[:, None, None]) / deviation[:, None, None]
        return (x * r[:, None, None] + d[:, None, None]).relu()


@zoo.of("adaptive instance norm", x=floats(4, 3, 8, 8), style=floats(4, 6), labels=whole(4, high=CLASSES))
class AdaIn(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.style = nn.Linear(6, 16)

    def forward(self, x: Any, style: Any, labels: Any) -> Any:
        x = self.first(x)
        scale, shift = self.style(style)[:, :, None, None].chunk(2, 1)
        x = functional.instance_norm(x) * (1 + scale) + shift
        return functional.cross_entropy(self.head(x.relu().mean((2, 3))), labels)


@zoo.of("modulated convolutions (StyleGAN)", x=floats(4, 3, 8, 8), style=floats(4, 6), labels=whole(4, high=CLASSES))
class Modulated(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.style = nn.Parameter(torch.randn(8, 8, 3, 3)), nn.Linear(6, 8)

    def forward(self, x: Any, style: Any, labels: Any) -> Any:
        x = self.first(x)
        w = self.weight * self.style(style)[:, None, :, None, None]
        w = w * (w.square().sum((2, 3, 4), keepdim=True) + 1e-8).rsqrt()
        y = functional.conv2d(x.reshape(1, 32, 8, 8), w.reshape(32, 8, 3, 3), padding=1, groups=4)
        return functional.cross_entropy(self.head(y.view(4, 8, 8, 8).relu().mean((2, 3))), labels)


@zoo.of("spatial transformer", **IMAGES)
class Spatial(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.place = nn.Linear(3 * 64, 6)
        nn.init.normal_(self.place.weight, std=0.01)

    def forward(self, x: Any, labels: Any) -> Any:
        theta = self.place(x.flatten(1)).view(-1, 2, 3) + torch.eye(2, 3, dtype=x.dtype, device=x.device)
        x = functional.grid_sample(
            x, functional.affine_grid(theta, list(x.shape), align_corners=False), align_corners=False
        )
        return super().forward(x, labels)


@zoo.of("deformable sampling", **IMAGES)
class Deformable(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.offsets = nn.Conv2d(8, 2, 3, padding=1)
        steps = torch.linspace(-1, 1, 8)
        self.register_buffer("grid", torch.stack(torch.meshgrid(steps, steps, indexing="xy"), -1))

    def features(self, x: Any) -> Any:
        moved = self.grid + 0.1 * self.offsets(x).tanh().permute(0, 2, 3, 1)
        return functional.grid_sample(x, moved, padding_mode="border", align_corners=True).relu()


@zoo.of("capsules with routing", **IMAGES)
class Capsules(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.weight = nn.Conv2d(3, 8, 3, stride=2), nn.Parameter(0.1 * torch.randn(18, CLASSES, 4, 6))

    @staticmethod
    def squashed(x: Any) -> Any:
        size = x.square().sum(-1, keepdim=True)
        return size / (1 + size) * x / (size + 1e-8).sqrt()

    def forward(self, x: Any, labels: Any) -> Any:
        u = self.squashed(self.first(x).flatten(1).view(-1, 18, 4))
        found = torch.einsum("bid,ijdk->bijk", u, self.weight)
        logits = torch.zeros_like(found[..., 0])
        for _ in range(2):
            v = self.squashed((logits.softmax(2)[..., None] * found).sum(1))
            logits = logits + (found * v[:, None]).sum(-1)
        sizes = (v.square().sum(-1) + 1e-8).sqrt()
        chosen = functional.one_hot(labels, CLASSES).to(sizes.dtype)
        return (
            (chosen * (0.9 - sizes).relu().square() + 0.5 * (1 - chosen) * (sizes - 0.1).relu().square()).sum(1).mean()
        )


@zoo.of("squeeze and excitation, depthwise", **IMAGES)
class Excited(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.depth, self.norm = nn.Conv2d(8, 8, 3, padding=1, groups=8, bias=False), nn.BatchNorm2d(8)
        self.down, self.up = nn.Conv2d(8, 4, 1), nn.Conv2d(4, 8, 1)

    def features(self, x: Any) -> Any:
        y = functional.hardswish(self.norm(self.depth(x)))
        return x + y * functional.hardsigmoid(self.up(self.down(functional.adaptive_avg_pool2d(y, 1)).relu()))


@zoo.of("dense blocks with a checkpoint", **IMAGES)
class Dense(Classifier):
    def __init__(self) -> None:
        super().__init__(16)
        self.one, self.other = nn.Conv2d(8, 4, 3, padding=1), nn.Conv2d(12, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(12)

    def features(self, x: Any) -> Any:
        x = torch.cat([x, self.one(x.relu())], 1)
        y = checkpoint(lambda z: self.other(self.norm(z).relu()), x, use_reentrant=False)
        return torch.cat([x, y], 1)


@zoo.of("shuffled groups of channels", **IMAGES)
class Shuffled(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(8, 8, 3, padding=1, groups=2)

    def features(self, x: Any) -> Any:
        return nn.functional.channel_shuffle(self.conv(x), 2).relu()


@zoo.of("pixels shuffled up and down", x=floats(4, 3, 8, 8), y=floats(4, 3, 16, 16))
class SuperResolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(12, 8, 3, padding=1), nn.Conv2d(2, 12, 3, padding=1)

    def forward(self, x: Any, y: Any) -> Any:
        z = functional.pixel_shuffle(self.first(functional.pixel_unshuffle(x, 2)), 2)
        up = functional.interpolate(x, scale_factor=2, mode="bicubic", align_corners=False)
        return functional.l1_loss(functional.pixel_shuffle(self.second(z), 2) + up, y)


@zoo.of("pyramid of features with anchors", x=floats(4, 3, 16, 16), labels=whole(4, 80, high=3), boxes=floats(4, 80, 4))
class Detector(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(3, 8, 3, 2, 1), nn.Conv2d(8, 8, 3, 2, 1)
        self.side, self.classes, self.boxes = (
            nn.Conv2d(8, 8, 1),
            nn.Conv2d(8, 3, 3, padding=1),
            nn.Conv2d(8, 4, 3, padding=1),
        )

    def forward(self, x: Any, labels: Any, boxes: Any) -> Any:
        fine = self.one(x).relu()
        coarse = self.two(fine).relu()
        levels = [self.side(fine) + functional.interpolate(coarse, size=(8, 8), mode="nearest"), coarse]
        logits = torch.cat([self.classes(z).flatten(2) for z in levels], 2).transpose(1, 2)
        found = torch.cat([self.boxes(z).flatten(2) for z in levels], 2).transpose(1, 2)
        positive = (labels > 0)[..., None].to(x.dtype)
        box = (functional.smooth_l1_loss(found, boxes, reduction="none") * positive).sum() / positive.sum().clamp(min=1)
        return functional.cross_entropy(logits.flatten(0, 1), labels.flatten()) + box


@zoo.of("generalised IoU of boxes", x=floats(4, 3, 8, 8), boxes=uniform(4, 4))
class Giou(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Conv2d(3, 8, 3, stride=2), nn.Linear(72, 4)

    def forward(self, x: Any, boxes: Any) -> Any:
        a, b = (self.corners(z) for z in (self.head(self.first(x).relu().flatten(1)).sigmoid(), boxes))
        inside = (torch.minimum(a[1], b[1]) - torch.maximum(a[0], b[0])).clamp(min=0).prod(-1)
        union = (a[1] - a[0]).prod(-1) + (b[1] - b[0]).prod(-1) - inside
        around = (torch.maximum(a[1], b[1]) - torch.minimum(a[0], b[0])).prod(-1)
        return (1 - inside / union + (around - union) / around).mean()

    @staticmethod
    def corners(x: Any) -> Any:
        centre, size = x.chunk(2, -1)
        return centre - size / 2 - 0.05, centre + size / 2 + 0.05


@zoo.of("partial convolutions with masks", x=floats(4, 3, 8, 8), seen=masks(4, 1, 8, 8, share=0.7))
class Inpainting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.Conv2d(8, 3, 3, padding=1)
        self.register_buffer("ones", torch.ones(1, 1, 3, 3))

    def forward(self, x: Any, seen: Any) -> Any:
        share = functional.conv2d(seen.to(x.dtype), self.ones, padding=1)
        z = self.one(x * seen) * torch.where(share > 0, 9 / share.clamp(min=1), 0.0)
        return ((self.other(z.relu()) - x).abs() * ~seen).mean()


@zoo.of("non-local block and axial attention", **IMAGES)
class NonLocal(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Conv2d(8, 4, 1) for _ in range(3))
        self.out, self.gain = nn.Conv2d(4, 8, 1), nn.Parameter(torch.tensor(0.5))

    def features(self, x: Any) -> Any:
        q, k, v = self.q(x), self.k(x), self.v(x)
        z = (q.flatten(2).transpose(1, 2) @ k.flatten(2)).softmax(-1) @ v.flatten(2).transpose(1, 2)
        rows = torch.einsum("bchw,bcgw->bwhg", q, k).softmax(-1)
        z = z.transpose(1, 2).view_as(v) + torch.einsum("bwhg,bcgw->bchw", rows, v)
        return x + self.gain * self.out(z)


@zoo.of("MLP-Mixer and gMLP", **IMAGES)
class Mixer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patches, self.norm, self.head = nn.Conv2d(3, 8, 2, 2), nn.LayerNorm(8), nn.Linear(8, CLASSES)
        self.tokens, self.up, self.down, self.gate = (
            nn.Linear(16, 16),
            nn.Linear(8, 16),
            nn.Linear(8, 8),
            nn.Linear(16, 16),
        )

    def forward(self, x: Any, labels: Any) -> Any:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = x + functional.gelu(self.tokens(self.norm(x).transpose(1, 2))).transpose(1, 2)
        u, v = functional.gelu(self.up(self.norm(x))).chunk(2, -1)
        x = x + self.down(u * self.gate(v.transpose(1, 2)).transpose(1, 2))
        return functional.cross_entropy(self.head(x.mean(1)), labels)


@zoo.of("involution and dynamic filters", **IMAGES)
class Involution(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.kernel = nn.Conv2d(8, 9 * 2, 1)

    def features(self, x: Any) -> Any:
        w = self.kernel(x).view(4, 2, 1, 9, 8, 8).softmax(3)
        return (functional.unfold(x, 3, padding=1).view(4, 2, 4, 9, 8, 8) * w).sum(3).view(4, 8, 8, 8)


@zoo.of("wavelets and a Fourier layer", **IMAGES)
class Fourier(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(0.2 * torch.randn(8, 8, 4, 4, 2))

    def features(self, x: Any) -> Any:
        z = torch.fft.rfft2(x)
        w = torch.view_as_complex(self.weight)
        low = torch.einsum("bixy,ioxy->boxy", z[:, :, :4, :4], w)
        z = functional.pad(torch.view_as_real(low), (0, 0, 0, 1, 0, 4))
        return functional.gelu(torch.fft.irfft2(torch.view_as_complex(z), s=(8, 8)) + x)


@zoo.of("NeRF with a ray of samples", origins=floats(8, 3), directions=floats(8, 3), colours=uniform(8, 3))
class Nerf(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(18, 16), nn.ReLU(), nn.Linear(16, 4))

    def forward(self, origins: Any, directions: Any, colours: Any) -> Any:
        t = torch.linspace(0.1, 1.0, 6, device=origins.device, dtype=origins.dtype)
        places = origins[:, None] + t[:, None] * functional.normalize(directions, dim=1)[:, None]
        waves = torch.cat([f(places * 2.0**i) for i in range(3) for f in (torch.sin, torch.cos)], -1)
        colour, density = self.net(waves).split([3, 1], -1)
        alpha = 1 - (-functional.softplus(density).squeeze(-1) * 0.15).exp()
        through = torch.cumprod(torch.cat([torch.ones_like(alpha[:, :1]), 1 - alpha + 1e-10], 1), 1)[:, :-1]
        return functional.mse_loss(((alpha * through)[..., None] * colour.sigmoid()).sum(1), colours)


@zoo.of("3-D convolutions and pools", x=floats(2, 2, 4, 8, 8), labels=whole(2, high=CLASSES))
class Video(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv3d(2, 8, 3, padding=1), nn.Conv3d(8, 8, (3, 1, 1), padding=(1, 0, 0))
        self.norm, self.head = nn.BatchNorm3d(8), nn.Linear(8, CLASSES)

    def forward(self, x: Any, labels: Any) -> Any:
        x = functional.max_pool3d(self.norm(self.first(x)).relu(), 2)
        return functional.cross_entropy(self.head(functional.adaptive_avg_pool3d(self.second(x), 1).flatten(1)), labels)


@zoo.of("maxout, blur and overlapping pools", **IMAGES)
class Pools(Classifier):
    def __init__(self) -> None:
        super().__init__(4)
        self.register_buffer("blur", torch.tensor([1.0, 2.0, 1.0])[:, None] * torch.tensor([1.0, 2.0, 1.0]) / 16)

    def features(self, x: Any) -> Any:
        x = x.view(4, 4, 2, 8, 8).amax(2)
        x = functional.conv2d(functional.pad(x, (1, 1, 1, 1), mode="reflect"), self.blur.expand(4, 1, 3, 3), groups=4)
        return functional.lp_pool2d(functional.max_pool2d(x, 3, 2, 1).square() + 1, 2, 2)


@zoo.of("stochastic depth and drop block", is_random=True, **IMAGES)
class Dropping(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.drop = nn.Conv2d(8, 8, 3, padding=1), nn.Dropout2d(0.2)

    def features(self, x: Any) -> Any:
        y = self.drop(self.conv(x))
        if self.training:
            y = y * (torch.rand(len(x), 1, 1, 1, dtype=x.dtype, device=x.device) > 0.3) / 0.7
        return x + y


@zoo.of("mixup within the batch", is_random=True, **IMAGES)
class Mixup(Classifier):
    def forward(self, x: Any, labels: Any) -> Any:
        share = torch.rand((), dtype=x.dtype, device=x.device)
        x = share * x + (1 - share) * x.flip(0)
        logits = self.head(self.first(x).relu().mean((2, 3)))
        return share * functional.cross_entropy(logits, labels) + (1 - share) * functional.cross_entropy(
            logits, labels.flip(0)
        )
