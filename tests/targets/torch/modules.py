"""Modules that people train, small, with batches made of a seed: `MODULES` by name."""

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from tests.importers.architectures import stand_in_for_torchvision

Batch = dict[str, Any]

CLASSES, TOKENS, STEPS = 12, 24, 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Module:
    """make: the module, with float32 weights. batch: of a seed, what it is called with. loss: of what it returns.

    package: that it is of. examples: of a batch. devices: numbers of them.
    """

    make: Callable[[], nn.Module]
    batch: Callable[[int], Batch]
    loss: Callable[[Any], Any] = lambda found: found["loss"] if isinstance(found, dict) else found
    package: str = "torch"
    devices: tuple[int, ...] = (2, 4)


def _numbers(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def words(seed: int, *names: str, shape: tuple[int, ...] = (4, STEPS), most: int = TOKENS) -> Batch:
    """Whole numbers; those below 3 stand for padding and the like in several models."""
    numbers = _numbers(seed)
    return {name: torch.randint(3, most, shape, generator=numbers) for name in names}


def floats(seed: int, name: str, *shape: int) -> Batch:
    return {name: torch.randn(shape, generator=_numbers(seed), dtype=torch.float64)}


def classes(seed: int, name: str = "labels", count: int = 4) -> Batch:
    return {name: torch.randint(0, CLASSES, (count,), generator=_numbers(seed + 100))}


# -- PyTorch's own


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.after = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Any) -> Any:
        batch, steps, width = x.shape
        q, k, v = (
            part.view(batch, steps, self.heads, -1).transpose(1, 2)
            for part in self.attention(self.before(x)).split(width, dim=2)
        )
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.project(y.transpose(1, 2).reshape(x.shape))
        return x + self.down(functional.gelu(self.up(self.after(x))))


class Language(nn.Module):
    """Two blocks, one table for the tokens and for the projection to them; the loss inside, beside the logits."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(TOKENS, 24), nn.Embedding(STEPS, 24)
        self.blocks = nn.ModuleList([Block(24, 6) for _ in range(2)])
        self.norm, self.head = nn.LayerNorm(24), nn.Linear(24, TOKENS, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, words: Any, targets: Any) -> dict[str, Any]:
        x = self.tokens(words) + self.places(torch.arange(words.shape[1], device=words.device))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return {"logits": logits, "loss": functional.cross_entropy(logits.flatten(0, 1), targets.flatten())}


class UNet(nn.Module):
    """An encoder and a decoder of images with connections across, normalised by groups; the squares of what is left."""

    def __init__(self) -> None:
        super().__init__()

        def block(before: int, after: int) -> nn.Module:
            return nn.Sequential(nn.Conv2d(before, after, 3, padding=1), nn.GroupNorm(4, after), nn.SiLU())

        self.first, self.second, self.third = block(2, 8), block(8, 16), block(16, 32)
        self.up2, self.up1 = nn.ConvTranspose2d(32, 16, 2, 2), nn.Upsample(scale_factor=2, mode="nearest")
        self.join2, self.join1, self.out = block(32, 16), block(24, 8), nn.Conv2d(8, 2, 1)

    def forward(self, x: Any, noise: Any) -> Any:
        first = self.first(x)
        second = self.second(functional.max_pool2d(first, 2))
        third = self.third(functional.max_pool2d(second, 2))
        second = self.join2(torch.cat([second, self.up2(third)], dim=1))
        first = self.join1(torch.cat([first, self.up1(second)], dim=1))
        return functional.mse_loss(self.out(first), noise)


class FineTuned(nn.Module):
    """What comes first is frozen, scales and shifts behind it in part; images become one point."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(2, 4, 3, padding=1), nn.Conv2d(4, 4, 4, bias=False)
        self.third = nn.Conv2d(4, 8, 1, bias=False)
        self.norm1, self.norm2, self.norm3 = nn.BatchNorm2d(4), nn.BatchNorm2d(4), nn.BatchNorm2d(8)
        self.norm4, self.classes = nn.BatchNorm2d(8), nn.Linear(8, CLASSES)
        for part in (self.first, self.norm1, self.norm2.weight, self.norm3):
            part.requires_grad_(False)

    def forward(self, images: Any, labels: Any) -> Any:
        x = functional.relu(self.norm1(self.first(images)))
        x = functional.relu(self.norm2(self.second(x)))
        x = self.norm4(functional.silu(self.norm3(self.third(x))))
        return functional.cross_entropy(self.classes(x.flatten(1)), labels)


class Recommender(nn.Module):
    """Bags of what was bought, dense features, the products of all pairs of them (Naumov et al. 2019)."""

    def __init__(self, pairs: int = 4) -> None:
        super().__init__()
        self.bags = nn.ModuleList([nn.EmbeddingBag(24, 8, mode=mode) for mode in ("sum", "mean", "sum")])
        self.bottom = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 8), nn.ReLU())
        self.top = nn.Sequential(nn.Linear(8 + 6, 16), nn.ReLU(), nn.Linear(16, 1))
        self.register_buffer("rows", torch.tril_indices(4, 4, -1)[0], persistent=False)
        self.register_buffer("columns", torch.tril_indices(4, 4, -1)[1], persistent=False)

    def forward(self, dense: Any, bought: Any, clicked: Any) -> Any:
        x = self.bottom(dense)
        found = [x, *(bag(bought[:, i]) for i, bag in enumerate(self.bags))]
        features = torch.stack(found, dim=1)
        products = (features @ features.transpose(1, 2))[:, self.rows, self.columns]
        y = self.top(torch.cat([x, products], dim=1)).squeeze(1)
        return functional.binary_cross_entropy_with_logits(y, clicked)


class Tagger(nn.Module):
    """Two layers of LSTM, to and fro, and a class for each step."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.lstm = nn.Embedding(TOKENS, 8), nn.LSTM(8, 12, 2, bidirectional=True, batch_first=True)
        self.head = nn.Linear(24, CLASSES)

    def forward(self, words: Any) -> Any:
        return self.head(self.lstm(self.words(words))[0])


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(24, 4, 48, dropout=0.0, batch_first=True)
        self.words, self.layers = nn.Embedding(TOKENS, 24), nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(24, CLASSES)

    def forward(self, words: Any) -> Any:
        return self.head(self.layers(self.words(words)).mean(dim=1))


class Picture(nn.Module):
    """Normalisation by batches and by groups, a convolution and a transposed one; no loss."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.second, self.groups = nn.Conv2d(8, 16, 3, stride=2, padding=1), nn.GroupNorm(4, 16)
        self.up, self.head = nn.ConvTranspose2d(16, 8, 2, stride=2), nn.Linear(8 * 4 * 4, CLASSES)

    def forward(self, x: Any) -> Any:
        x = functional.max_pool2d(functional.relu(self.norm(self.first(x))), 2)
        x = functional.silu(self.groups(self.second(x)))
        return self.head(functional.avg_pool2d(self.up(x), 2).flatten(1))


class Pieces(nn.Module):
    """A product whose pieces, heads before steps, are turned in part and joined again."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 96), nn.Linear(32, 8)

    def forward(self, x: Any) -> Any:
        parts = self.first(x).unflatten(-1, (4, 24)).transpose(1, 2).chunk(3, -1)
        q, k = (torch.cat([part[..., :4].sin(), part[..., 4:]], -1) for part in parts[:2])
        return self.last((q * k + parts[2]).transpose(1, 2).flatten(2)).square().mean()


# -- such as pipelines cut


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        sizes = (8, 16, 16, 32, 16, CLASSES)
        self.layers = nn.Sequential(*(nn.Linear(a, b) for a, b in pairwise(sizes)))

    def forward(self, x: Any, labels: Any) -> Any:
        for layer in self.layers[:-1]:
            x = functional.relu(layer(x))
        return functional.cross_entropy(self.layers[-1](x), labels)


class Gpt(nn.Module):
    """The table of the tokens is that of the projection to them."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.blocks = nn.Embedding(TOKENS, 16), nn.Sequential(Block(16, 4), Block(16, 4))
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, TOKENS, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: Any, targets: Any) -> Any:
        x = functional.dropout(self.tokens(tokens), 0.0)
        return functional.cross_entropy(self.head(self.norm(self.blocks(x))).flatten(0, 1), targets.flatten())


class Pictures(nn.Module):
    """Convolutions with batch normalisation."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.second, self.after = nn.Conv2d(8, 8, 3, padding=1, stride=2), nn.BatchNorm2d(8)
        self.third, self.head = nn.Conv2d(8, 8, 3, padding=1), nn.Linear(8 * 4 * 4, CLASSES)

    def forward(self, x: Any, labels: Any) -> Any:
        x = functional.relu(self.norm(self.first(x)))
        x = functional.relu(self.after(self.second(x)))
        return functional.cross_entropy(self.head(self.third(x).flatten(1)), labels)


def _recommended(seed: int) -> Batch:
    bought = words(seed, "bought", shape=(12, 3, 4))
    clicked = torch.randint(0, 2, (12,), generator=_numbers(seed + 50)).double()
    return {**floats(seed, "dense", 12, 6), **bought, "clicked": clicked}


def _steps_told(found: Any) -> Any:
    numbers = torch.arange(found.shape[0] * found.shape[1], device=found.device)
    return functional.cross_entropy(found.flatten(0, 1), numbers % CLASSES)


def _told(found: Any) -> Any:
    return functional.cross_entropy(found, torch.arange(len(found), device=found.device) % CLASSES)


_OWN = {
    "nanogpt": Module(
        make=Language,
        batch=lambda seed: words(seed, "words", "targets", shape=(12, STEPS)),
        devices=(2, 4, 6, 8),
    ),
    "fine-tuned": Module(make=FineTuned, batch=lambda seed: {**floats(seed, "images", 4, 2, 4, 4), **classes(seed)}),
    "unet": Module(
        make=UNet,
        batch=lambda seed: {**floats(seed, "x", 4, 2, 16, 16), **floats(seed + 9, "noise", 4, 2, 16, 16)},
    ),
    "dlrm": Module(make=Recommender, batch=_recommended, loss=lambda found: found, devices=(2, 4, 6, 8)),
    "lstm": Module(make=Tagger, batch=lambda seed: words(seed, "words"), loss=_steps_told),
    "encoder": Module(make=Encoder, batch=lambda seed: words(seed, "words"), loss=_told),
    "picture": Module(make=Picture, batch=lambda seed: floats(seed, "x", 8, 3, 16, 16), loss=_told),
    "pieces": Module(make=Pieces, batch=lambda seed: floats(seed, "x", 4, 6, 16)),
    "mlp": Module(make=Layers, batch=lambda seed: {**floats(seed, "x", 4, 8), **classes(seed)}),
    "gpt": Module(make=Gpt, batch=lambda seed: words(seed, "tokens", "targets")),
    "cnn": Module(make=Pictures, batch=lambda seed: {**floats(seed, "x", 4, 3, 8, 8), **classes(seed)}),
}


# -- transformers

_DECODER = {
    "vocab_size": TOKENS, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 16, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "use_cache": False,
}  # fmt: skip
_DROPS = {
    "attention_dropout": 0.0, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "dropout": 0.0,
    "activation_dropout": 0.0, "dropout_rate": 0.0, "drop_path_rate": 0.0,
}  # fmt: skip


def _of_transformers(config: str, model: str, batch: Callable[[int], Batch], **sizes: object) -> Module:
    def make() -> nn.Module:
        stand_in_for_torchvision()
        import transformers

        found: nn.Module = getattr(transformers, model)(getattr(transformers, config)(**sizes))
        for module in found.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        return found

    return Module(make=make, batch=batch, package="transformers")


def _next_words(seed: int) -> Batch:
    ids = words(seed, "input_ids")
    return {**ids, "labels": ids["input_ids"].clone()}


def _pictures(seed: int) -> Batch:
    return {**floats(seed, "pixel_values", 4, 3, 32, 32), **classes(seed)}


def _translated(seed: int) -> Batch:
    return {**words(seed, "input_ids"), **words(seed + 7, "labels", shape=(4, 6))}


def _spoken(seed: int) -> Batch:
    return {**floats(seed, "input_features", 4, 8, 32), **words(seed + 7, "labels", shape=(4, 6))}


_VISION = {"image_size": 32, "num_labels": CLASSES}

_TRANSFORMERS = {
    "llama": _of_transformers("LlamaConfig", "LlamaForCausalLM", _next_words, **_DECODER),
    "qwen2_moe": _of_transformers(
        "Qwen2MoeConfig", "Qwen2MoeForCausalLM", _next_words, **_DECODER, num_experts=4, num_experts_per_tok=2,
        moe_intermediate_size=16, shared_expert_intermediate_size=32, decoder_sparse_step=1,
    ),
    "mixtral": _of_transformers("MixtralConfig", "MixtralForCausalLM", _next_words, **_DECODER, num_local_experts=4),
    "t5": _of_transformers(
        "T5Config", "T5ForConditionalGeneration", _translated, vocab_size=TOKENS, d_model=16, d_kv=4, d_ff=32,
        num_layers=2, num_heads=4, decoder_start_token_id=0, use_cache=False, dropout_rate=0.0,
    ),
    "bert": _of_transformers(
        "BertConfig", "BertForMaskedLM", _next_words, vocab_size=TOKENS, hidden_size=16, intermediate_size=32,
        num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=16, pad_token_id=0,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    ),
    "vit": _of_transformers(
        "ViTConfig", "ViTForImageClassification", _pictures, **_VISION, patch_size=8, hidden_size=16,
        intermediate_size=32, num_hidden_layers=2, num_attention_heads=4, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    ),
    "whisper": _of_transformers(
        "WhisperConfig", "WhisperForConditionalGeneration", _spoken, vocab_size=TOKENS, d_model=16, encoder_layers=2,
        decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=32, decoder_ffn_dim=32,
        pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1, num_mel_bins=8,
        max_source_positions=16, max_target_positions=16, dropout=0.0, use_cache=False,
    ),
    "swin": _of_transformers(
        "SwinConfig", "SwinForImageClassification", _pictures, **_VISION, patch_size=2, embed_dim=8, depths=[2, 2],
        num_heads=[2, 4], window_size=4, drop_path_rate=0.0, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    ),
    "convnext": _of_transformers(
        "ConvNextConfig", "ConvNextForImageClassification", _pictures, **_VISION, hidden_sizes=[8, 8, 16, 16],
        depths=[1, 1, 1, 1],
    ),
    "resnet": _of_transformers(
        "ResNetConfig", "ResNetForImageClassification", _pictures, num_labels=CLASSES, embedding_size=8,
        hidden_sizes=[8, 16], depths=[1, 2], layer_type="basic",
    ),
}  # fmt: skip


# -- torchvision


def _of_torchvision(make: Callable[[Any], Any], size: int = 32) -> Module:
    def made() -> nn.Module:
        stand_in_for_torchvision()
        import torchvision

        net: nn.Module = make(torchvision.models)
        return net

    return Module(make=made, batch=lambda seed: floats(seed, "x", 4, 3, size, size), loss=_told, package="torchvision")


def _convnext(models: Any) -> Any:
    from torchvision.models.convnext import CNBlockConfig

    blocks = [CNBlockConfig(8, 16, 1), CNBlockConfig(16, 24, 2), CNBlockConfig(24, None, 1)]
    return models.ConvNeXt(blocks, num_classes=CLASSES)


_TORCHVISION = {
    "torchvision resnet": _of_torchvision(
        lambda models: models.ResNet(models.resnet.BasicBlock, [1, 1, 1, 1], num_classes=CLASSES)
    ),
    "torchvision convnext": _of_torchvision(_convnext),
    "torchvision swin": _of_torchvision(
        lambda models: models.SwinTransformer(
            [2, 2], 8, [2, 2], [2, 4], [4, 4], stochastic_depth_prob=0.0, num_classes=CLASSES
        )
    ),
}

MODULES: Mapping[str, Module] = {**_OWN, **_TRANSFORMERS, **_TORCHVISION}


# -- in float64 throughout


class _Doubled:
    """Stands for `torch` in a module of another package: its float32 is float64."""

    float32 = torch.float64
    float = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


@contextmanager
def in_float64() -> Iterator[None]:
    """Have models of transformers compute in float64 what they compute in float32 themselves, whatever their weights.

    Sums of squares of normalisations, softmax of attention and of routers: parts of a sum in float32 are added with
    errors of 1e-7, which is no equality to speak of.
    """
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(torch.Tensor, "float", torch.Tensor.double)
        for name, module in list(sys.modules.items()):
            if name.startswith(("transformers.", "diffusers.")) and getattr(module, "torch", None) is torch:
                patched.setattr(module, "torch", _Doubled())
        if "transformers.integrations.moe" in sys.modules:
            # PyTorch's own product of rows with the matrices of their experts is of float32 and less.
            patched.setattr("transformers.integrations.moe._can_use_grouped_mm", lambda *_: False)
        yield


def made(name: str) -> nn.Module:
    """Return a module in float64. Its biases are random: what begins as 0 may be rounding alone after steps."""
    torch.manual_seed(0)
    module = MODULES[name].make().double().train()
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.ndim == 1:
                parameter += 0.1 * torch.randn(parameter.shape, dtype=torch.float64)
    return module
