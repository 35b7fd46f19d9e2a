"""Networks in PyTorch: definitions of our own, and which of transformers' are tried, from configurations alone.

Nothing is imported that is not asked for: each entry of OWN is a function that takes no argument and returns the module
with its inputs; `transformers_model` makes one of the others.
"""

from collections.abc import Callable
from typing import Any

Made = tuple[Any, dict[str, Any] | tuple[Any, ...]]


def module(function: Callable[..., Any], **parts: Any) -> Any:
    """Return a module of named parts that calls a function of itself and of what it is given."""
    from torch import nn

    class Computing(nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            for name, part in parts.items():
                setattr(self, name, part)

        def forward(self, *inputs: Any) -> Any:
            return function(self, *inputs)

    return Computing()


def alexnet(batch: int = 2) -> Made:
    """AlexNet of one tower (Krizhevsky 2014)."""
    import torch
    from torch import nn

    widths = ((3, 64, 11, 4, 2), (64, 192, 5, 1, 2), (192, 384, 3, 1, 1), (384, 256, 3, 1, 1), (256, 256, 3, 1, 1))
    layers: list[Any] = []
    for i, (before, after, kernel, stride, padding) in enumerate(widths):
        layers += [nn.Conv2d(before, after, kernel, stride, padding), nn.ReLU(inplace=True)]
        if i in (0, 1, 4):
            layers.append(nn.MaxPool2d(3, 2))
    classifier = [nn.Dropout(), nn.Linear(256 * 36, 4096), nn.ReLU(inplace=True), nn.Dropout(), nn.Linear(4096, 4096)]
    head = [nn.AdaptiveAvgPool2d(6), nn.Flatten(), *classifier, nn.ReLU(inplace=True), nn.Linear(4096, 1000)]
    return nn.Sequential(*layers, *head), (torch.zeros(batch, 3, 224, 224),)


def resnet(depths: tuple[int, ...] = (3, 4, 23, 3), batch: int = 2, size: int = 224) -> Made:
    """A residual network of bottlenecks (He et al. 2016); ResNet-101 by default."""
    import torch
    from torch import nn

    class Bottleneck(nn.Module):  # type: ignore[misc]
        def __init__(self, before: int, width: int, stride: int) -> None:
            super().__init__()
            self.conv1, self.bn1 = nn.Conv2d(before, width, 1, bias=False), nn.BatchNorm2d(width)
            self.conv2, self.bn2 = nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width)
            self.conv3, self.bn3 = nn.Conv2d(width, 4 * width, 1, bias=False), nn.BatchNorm2d(4 * width)
            self.shortcut: Any = None
            if stride > 1 or before != 4 * width:
                self.shortcut = nn.Sequential(
                    nn.Conv2d(before, 4 * width, 1, stride, bias=False), nn.BatchNorm2d(4 * width)
                )

        def forward(self, x: Any) -> Any:
            y = torch.relu(self.bn1(self.conv1(x)))
            y = torch.relu(self.bn2(self.conv2(y)))
            y = self.bn3(self.conv3(y))
            return torch.relu(y + (x if self.shortcut is None else self.shortcut(x)))

    layers: list[Any] = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    before = 64
    for stage, depth in enumerate(depths):
        for i in range(depth):
            layers.append(Bottleneck(before, 64 << stage, 2 if stage and not i else 1))
            before = 256 << stage
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, 1000)]
    return nn.Sequential(*layers), (torch.zeros(batch, 3, size, size),)


def unet(batch: int = 2) -> Made:
    """An encoder and a decoder of images with connections across (Ronneberger et al. 2015), of two levels."""
    import torch
    from torch import nn

    def block(before: int, after: int) -> Any:
        return nn.Sequential(nn.Conv2d(before, after, 3, padding=1), nn.GroupNorm(4, after), nn.SiLU())

    class UNet(nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.down1, self.down2, self.middle = block(3, 16), block(16, 32), block(32, 64)
            self.up2, self.up1 = nn.ConvTranspose2d(64, 32, 2, 2), nn.Upsample(scale_factor=2, mode="bilinear")
            self.join2, self.join1, self.out = block(64, 32), block(48, 16), nn.Conv2d(16, 2, 1)

        def forward(self, x: Any) -> Any:
            first = self.down1(x)
            second = self.down2(nn.functional.max_pool2d(first, 2))
            third = self.middle(nn.functional.max_pool2d(second, 2))
            second = self.join2(torch.cat([second, self.up2(third)], dim=1))
            return self.out(self.join1(torch.cat([first, self.up1(second)], dim=1)))

    return UNet(), (torch.zeros(batch, 3, 32, 32),)


def shufflenet(batch: int = 2) -> Made:
    """Grouped and depthwise convolutions with channels shuffled between groups (Zhang et al. 2018), three units."""
    import torch
    from torch import nn

    class Unit(nn.Module):  # type: ignore[misc]
        def __init__(self, width: int, groups: int) -> None:
            super().__init__()
            self.groups = groups
            self.narrow, self.bn1 = nn.Conv2d(width, width, 1, groups=groups, bias=False), nn.BatchNorm2d(width)
            self.deep = nn.Conv2d(width, width, 3, padding=1, groups=width, bias=False)
            self.bn2 = nn.BatchNorm2d(width)
            self.wide, self.bn3 = nn.Conv2d(width, width, 1, groups=groups, bias=False), nn.BatchNorm2d(width)

        def forward(self, x: Any) -> Any:
            y = torch.relu(self.bn1(self.narrow(x)))
            b, c, h, w = y.shape
            y = y.view(b, self.groups, c // self.groups, h, w).transpose(1, 2).reshape(b, c, h, w)
            return torch.relu(x + self.bn3(self.wide(self.bn2(self.deep(y)))))

    units = [Unit(24, 3) for _ in range(3)]
    head = [nn.ChannelShuffle(4), nn.PixelUnshuffle(2), nn.PixelShuffle(2), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    net = nn.Sequential(nn.Conv2d(3, 24, 3, 2, 1), *units, *head, nn.Linear(24, 10))
    return net, (torch.zeros(batch, 3, 32, 32),)


def transformer(batch: int = 2) -> Made:
    """PyTorch's own encoder and decoder of attention."""
    import torch
    from torch import nn

    net = nn.Transformer(32, 4, 2, 2, 64, batch_first=True)
    return net, (torch.zeros(batch, 12, 32), torch.zeros(batch, 8, 32))


def tied_language_model(batch: int = 2) -> Made:
    """Tokens in and out by the same table, and a second head that has the first rows of it."""
    import torch
    from torch import nn

    class Tied(nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.table, self.body = nn.Embedding(40, 16), nn.Linear(16, 16)
            self.head, self.rows = nn.Linear(16, 40, bias=False), nn.Linear(16, 20, bias=False)
            self.head.weight = self.table.weight
            self.rows.weight = nn.Parameter(self.table.weight.detach()[:20])

        def forward(self, tokens: Any) -> dict[str, Any]:
            x = torch.tanh(self.body(self.table(tokens)))
            return {"all": self.head(x), "rows": self.rows(x)}

    return Tied(), (torch.zeros(batch, 8, dtype=torch.long),)


def products(batch: int = 2) -> Made:
    """Products of many kinds."""
    import torch
    from torch import nn

    class Products(nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.zeros(6, 8, 5))
            self.two = nn.Bilinear(8, 8, 8)

        def forward(self, x: Any) -> Any:
            heads = torch.einsum("bsd,hde->bhse", x, self.w)
            scores = torch.einsum("...se,...te->...st", heads, heads)
            mixed = torch.baddbmm(x, torch.bmm(x, x.transpose(1, 2)), x)
            return torch.matmul(scores, x.unsqueeze(1)).sum(1) + mixed + self.two(x, x)

    return Products(), (torch.zeros(batch, 7, 8),)


def volumes(batch: int = 2) -> Made:
    """Convolutions of one and three dims, normalised weights, and pooling to a size."""
    import torch
    from torch import nn
    from torch.nn.utils import parametrizations

    class Volumes(nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.volume = parametrizations.weight_norm(nn.Conv3d(2, 4, 3, padding=1))
            self.line = parametrizations.spectral_norm(nn.Conv1d(4, 6, 5, padding="same"))
            self.pool = nn.AdaptiveAvgPool3d((4, 4, 4))
            self.norm = nn.InstanceNorm1d(6, affine=True)

        def forward(self, x: Any) -> Any:
            y = self.pool(self.volume(x))
            return nn.functional.glu(self.norm(self.line(y.flatten(2))), dim=1)

    return Volumes(), (torch.zeros(batch, 2, 8, 8, 8),)


def bags(batch: int = 4) -> Made:
    """Sums of rows of a table."""
    import torch
    from torch import nn

    return nn.Sequential(nn.EmbeddingBag(50, 8, mode="sum"), nn.Linear(8, 3)), (
        torch.zeros(batch, 6, dtype=torch.long),
    )


def recurrent(batch: int = 2) -> Made:
    """Recurrent layers of each kind, one after the other, and a single cell."""
    import torch
    from torch import nn

    class Recurrent(nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(8, 16, 2, bidirectional=True, batch_first=True)
            self.gru, self.rnn = nn.GRU(32, 12, batch_first=True), nn.RNN(12, 10, batch_first=True)
            self.cell = nn.LSTMCell(10, 6)

        def forward(self, x: Any) -> Any:
            y, _ = self.lstm(x)
            y, _ = self.gru(y)
            y, last = self.rnn(y)
            return self.cell(last[0])[0], y

    return Recurrent(), (torch.zeros(batch, 5, 8),)


OWN: dict[str, Callable[[], Made]] = {
    "alexnet": alexnet,
    "resnet": lambda: resnet((1, 1), size=32),
    "unet": unet,
    "shufflenet": shufflenet,
    "transformer": transformer,
    "tied": tied_language_model,
    "products": products,
    "volumes": volumes,
    "bags": bags,
    "recurrent": recurrent,
}
"""By name."""

_SMALL = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

TRANSFORMERS: dict[str, dict[str, Any]] = {
    "bloom": {**_SMALL, "n_layer": 2, "n_head": 4},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 64},
    "mixtral": {**_SMALL, "num_key_value_heads": 2, "num_local_experts": 4},
    "mamba": {"hidden_size": 16, "num_hidden_layers": 1, "vocab_size": 64, "state_size": 4},
}
"""By the kind of model, what its configuration says; more of them are in `architectures`, with their losses."""


def transformers_model(kind: str, *, batch: int = 2, steps: int = 8, **more: Any) -> Made:
    """Return a model of transformers' that reads tokens, from a configuration alone, without a head."""
    import torch
    import transformers

    config = transformers.CONFIG_MAPPING[kind](**{"use_cache": False, **TRANSFORMERS[kind], **more})
    return transformers.AutoModel.from_config(config), {"input_ids": torch.zeros(batch, steps, dtype=torch.long)}
