"""Architectures of other packages with the loss that they are trained with, tiny, from configurations alone.

`ARCHITECTURES` by package, then by name: functions of a number of examples that return a source, as `load` takes it.
Nothing is downloaded. Packages are imported when one of their functions is called.
"""

import os
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import Any

import pytest

from pase.importers.frameworks import FRONT_ENDS, ImportedModel, import_model

Make = Callable[[int], Any]
"""From so many examples to a source; what takes any number of them (Keras) is made without."""

BATCH, STEPS, TOKENS, WIDTH, HEADS, CLASSES = 4, 8, 64, 32, 4, 10

ROUTED = frozenset({"mixtral", "qwen2_moe"})
"""Networks that choose experts for each token: what chooses may be opaque."""

RESIZED = frozenset({"segformer", "fcn_resnet50", "deeplabv3_resnet50", "upernet"})
"""Networks that resize images."""


# -- transformers


def _tokens(batch: int, steps: int = STEPS) -> Any:
    import torch

    return torch.arange(batch * steps).reshape(batch, steps) % (TOKENS - 4) + 4


def _images(batch: int, size: int = 32, channels: int = 3) -> Any:
    import torch

    return torch.zeros(batch, channels, size, size)


def _classes(batch: int, count: int = CLASSES) -> Any:
    import torch

    return torch.arange(batch) % count


_DECODER = {
    "vocab_size": TOKENS, "hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "num_hidden_layers": 1,
    "num_attention_heads": HEADS, "num_key_value_heads": 2, "max_position_embeddings": 32, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_ENCODER = {
    "vocab_size": TOKENS, "hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "num_hidden_layers": 1,
    "num_attention_heads": HEADS, "max_position_embeddings": 32, "pad_token_id": 0,
}  # fmt: skip
_GPT = {"vocab_size": TOKENS, "n_positions": 32, "n_embd": WIDTH, "n_layer": 1, "n_head": HEADS, "bos_token_id": 1,
        "eos_token_id": 2}  # fmt: skip
_VISION = {
    "image_size": 32, "patch_size": 8, "hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "num_hidden_layers": 1,
    "num_attention_heads": HEADS, "num_labels": CLASSES,
}  # fmt: skip
_SEQ2SEQ = {
    "vocab_size": TOKENS, "d_model": WIDTH, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": HEADS,
    "decoder_attention_heads": HEADS, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "max_position_embeddings": 32,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1,
}  # fmt: skip


def _of_transformers(model: str, sizes: Mapping[str, object], kinds: str) -> Make:
    """Return what makes a network with its own loss; kinds: of its inputs, "tokens" and the like."""

    def make(batch: int) -> Any:
        import transformers

        network = getattr(transformers, model)
        made = network(network.config_class(**sizes))
        inputs: dict[str, Any] = {}
        for kind in kinds.split():
            inputs |= _INPUTS[kind](batch)
        more = {"use_cache": False} if hasattr(made.config, "use_cache") and "tokens" in kinds else {}
        return made, inputs, more

    return make


def _zeros(*shape: int) -> Any:
    import torch

    return torch.zeros(shape)


_INPUTS: Mapping[str, Callable[[int], dict[str, Any]]] = {
    "tokens": lambda batch: {"input_ids": _tokens(batch)},
    "next": lambda batch: {"labels": _tokens(batch)},
    "targets": lambda batch: {"labels": _tokens(batch, 6)},
    "class": lambda batch: {"labels": _classes(batch)},
    "image": lambda batch: {"pixel_values": _images(batch)},
    "large_image": lambda batch: {"pixel_values": _images(batch, 64)},
    "speech": lambda batch: {"input_features": _zeros(batch, 8, 32), "labels": _tokens(batch, 6)},
    "waves": lambda batch: {"input_values": _zeros(batch, 400), "labels": _classes(batch, 2)},
}

_ENDS = {"bos_token_id": 1, "eos_token_id": 2}
_NETWORKS: Mapping[str, tuple[str, str, Mapping[str, object]]] = {
    "gpt2": ("GPT2LMHeadModel", "tokens next", _GPT),
    "gpt_neo": ("GPTNeoForCausalLM", "tokens next", {
        "vocab_size": TOKENS, "hidden_size": WIDTH, "num_layers": 2, "num_heads": HEADS, "window_size": 4,
        "max_position_embeddings": 32, "attention_types": [[["global", "local"], 1]], **_ENDS,
    }),
    "gptj": ("GPTJForCausalLM", "tokens next", {**_GPT, "rotary_dim": 4}),
    "gpt_neox": ("GPTNeoXForCausalLM", "tokens next", _DECODER),
    "llama": ("LlamaForCausalLM", "tokens next", _DECODER),
    "mistral": ("MistralForCausalLM", "tokens next", _DECODER),
    "qwen2": ("Qwen2ForCausalLM", "tokens next", _DECODER),
    "gemma": ("GemmaForCausalLM", "tokens next", {**_DECODER, "head_dim": 8}),
    "phi": ("PhiForCausalLM", "tokens next", _DECODER),
    "olmo": ("OlmoForCausalLM", "tokens next", _DECODER),
    "falcon": ("FalconForCausalLM", "tokens next", {**_DECODER, "new_decoder_architecture": False}),
    "opt": ("OPTForCausalLM", "tokens next", {**_DECODER, "ffn_dim": 64, "word_embed_proj_dim": WIDTH}),
    "bloom": ("BloomForCausalLM", "tokens next", {
        "vocab_size": TOKENS, "hidden_size": WIDTH, "n_layer": 2, "n_head": HEADS, **_ENDS,
    }),
    "mixtral": ("MixtralForCausalLM", "tokens next", {**_DECODER, "num_local_experts": 4}),
    "bert": ("BertForMaskedLM", "tokens next", _ENCODER),
    "roberta": ("RobertaForMaskedLM", "tokens next", _ENCODER),
    "albert": ("AlbertForMaskedLM", "tokens next", {**_ENCODER, "embedding_size": 16}),
    "electra": ("ElectraForMaskedLM", "tokens next", {**_ENCODER, "embedding_size": 16}),
    "distilbert": ("DistilBertForMaskedLM", "tokens next", {
        "vocab_size": TOKENS, "dim": WIDTH, "hidden_dim": 64, "n_layers": 2, "n_heads": HEADS,
        "max_position_embeddings": 32,
    }),
    "bert of sentences": ("BertForSequenceClassification", "tokens class", {**_ENCODER, "num_labels": CLASSES}),
    "t5": ("T5ForConditionalGeneration", "tokens targets", {
        "vocab_size": TOKENS, "d_model": WIDTH, "d_kv": 8, "d_ff": 64, "num_layers": 1, "num_heads": HEADS,
        "decoder_start_token_id": 0,
    }),
    "bart": ("BartForConditionalGeneration", "tokens targets", _SEQ2SEQ),
    "marian": ("MarianMTModel", "tokens targets", _SEQ2SEQ),
    "whisper": ("WhisperForConditionalGeneration", "speech", {
        **_SEQ2SEQ, "num_mel_bins": 8, "max_source_positions": 16, "max_target_positions": 16,
    }),
    "vit": ("ViTForImageClassification", "image class", _VISION),
    "deit": ("DeiTForImageClassification", "image class", _VISION),
    "beit": ("BeitForImageClassification", "image class", _VISION),
    "swin": ("SwinForImageClassification", "image class", {
        "image_size": 32, "patch_size": 2, "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4,
        "num_labels": CLASSES,
    }),
    "convnext": ("ConvNextForImageClassification", "image class", {
        "image_size": 32, "hidden_sizes": [8, 16, 32, 64], "depths": [1, 1, 2, 1], "num_labels": CLASSES,
    }),
    "segformer": ("SegformerForImageClassification", "large_image class", {
        "hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 1, 1], "decoder_hidden_size": 16, "num_labels": CLASSES,
    }),
    "wav2vec2": ("Wav2Vec2ForSequenceClassification", "waves", {
        "hidden_size": WIDTH, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": HEADS,
        "conv_dim": [8, 8], "conv_kernel": [4, 4], "conv_stride": [2, 2], "num_feat_extract_layers": 2,
        "num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 4, "classifier_proj_size": 16,
    }),
}  # fmt: skip
"""By name, the class of transformers', what its inputs are, and what its configuration says."""
_TRANSFORMERS = {name: _of_transformers(model, sizes, kinds) for name, (model, kinds, sizes) in _NETWORKS.items()}


# -- images, with a cross-entropy of ours


def _with_loss(net: Any, images: Any, targets: Any, loss: str = "cross_entropy") -> Any:
    import torch

    class Training(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def forward(self, x: Any, *given: Any) -> Any:
            *inputs, target = given
            found = self.net(x, *inputs)
            found = getattr(found, "sample", found)
            found = found["out"] if isinstance(found, dict) else found
            return getattr(torch.nn.functional, loss)(found, target)

    return Training(), (*images, targets) if isinstance(images, tuple) else (images, targets)


def _of_timm(name: str, size: int = 64, **options: Any) -> Make:
    def make(batch: int) -> Any:
        import timm

        net = timm.create_model(name, pretrained=False, num_classes=CLASSES, **options)
        return _with_loss(net, _images(batch, size), _classes(batch))

    return make


_SWIN = {"img_size": 64, "window_size": 4, "depths": (2, 2), "num_heads": (3, 6)}
_TIMM = {
    "resnet18": _of_timm("resnet18"),
    "resnext50": _of_timm("resnext50_32x4d"),
    **{name: _of_timm(name) for name in ("regnety_002", "efficientnet_b0", "densenet121", "convnext_atto")},
    "mobilenetv3_small": _of_timm("mobilenetv3_small_050"),
    "vit_tiny": _of_timm("vit_tiny_patch16_224", img_size=64, depth=2),
    "deit3_small": _of_timm("deit3_small_patch16_224", img_size=64, depth=2),
    "swin_tiny": _of_timm("swin_tiny_patch4_window7_224", **_SWIN),
    "mixer": _of_timm("mixer_s32_224", img_size=64),
    "xception": _of_timm("legacy_xception"),
}


def _of_torchvision(name: str, size: int = 64, **options: Any) -> Make:
    def make(batch: int) -> Any:
        import torchvision

        given = {"weights": None, "num_classes": CLASSES, **options}
        net = torchvision.models.get_model(name, **given)
        return _with_loss(net, _images(batch, size), _classes(batch))

    return make


def _segmenting(name: str) -> Make:
    def make(batch: int) -> Any:
        import torch
        import torchvision

        net = torchvision.models.get_model(name, weights=None, weights_backbone=None, num_classes=CLASSES)
        return _with_loss(net, _images(batch, 64), torch.zeros(batch, 64, 64, dtype=torch.long))

    return make


_PLAIN = """
    resnet18 densenet121 mobilenet_v2 mobilenet_v3_small efficientnet_b0 convnext_tiny swin_t shufflenet_v2:_x0_5
    squeezenet:1_1 mnasnet:0_5 regnet:_y_400mf
"""
_TORCHVISION = {
    **{name: _of_torchvision(name + more) for name, _, more in (each.partition(":") for each in _PLAIN.split())},
    "alexnet": _of_torchvision("alexnet", 224),
    "vgg11": _of_torchvision("vgg11", 224),
    "googlenet": _of_torchvision("googlenet", aux_logits=False, init_weights=False),
    "inception_v3": _of_torchvision("inception_v3", 96, aux_logits=False, init_weights=False),
    "vit_b_16": _of_torchvision("vit_b_16", image_size=64),
    "fcn_resnet50": _segmenting("fcn_resnet50"),
    "deeplabv3_resnet50": _segmenting("deeplabv3_resnet50"),
}


# -- diffusers, with the squares of what is left of the noise


def _unet(batch: int) -> Any:
    import diffusers
    import torch

    net = diffusers.UNet2DModel(
        sample_size=16,
        in_channels=3,
        out_channels=3,
        block_out_channels=(32, 64),
        layers_per_block=1,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    )
    return _with_loss(net, (_images(batch, 16), torch.zeros(batch)), _images(batch, 16), "mse_loss")


def _unet_of_texts(batch: int) -> Any:
    import diffusers
    import torch

    net = diffusers.UNet2DConditionModel(
        sample_size=16,
        block_out_channels=(32, 64),
        layers_per_block=1,
        cross_attention_dim=16,
        attention_head_dim=8,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
    )
    given = (_images(batch, 16, 4), torch.zeros(batch), torch.zeros(batch, STEPS, 16))
    return _with_loss(net, given, _images(batch, 16, 4), "mse_loss")


def _dit(batch: int) -> Any:
    import diffusers
    import torch

    net = diffusers.DiTTransformer2DModel(
        num_attention_heads=2, attention_head_dim=16, in_channels=4, num_layers=2, sample_size=16, patch_size=2,
        num_embeds_ada_norm=20,
    )  # fmt: skip

    class Training(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def forward(self, x: Any, steps: Any, labels: Any, noise: Any) -> Any:
            found = self.net(x, timestep=steps, class_labels=labels).sample
            return torch.nn.functional.mse_loss(found, noise)

    steps, labels = torch.zeros(batch, dtype=torch.long), _classes(batch, 20)
    return Training(), (_images(batch, 16, 4), steps, labels, _images(batch, 16, 4))


def _autoencoder(batch: int) -> Any:
    import diffusers

    net = diffusers.AutoencoderKL(
        block_out_channels=(32, 64),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        latent_channels=4,
        norm_num_groups=8,
    )
    return _with_loss(net, _images(batch, 32), _images(batch, 32), "mse_loss")


_DIFFUSERS = {"unet": _unet, "unet of texts": _unet_of_texts, "dit": _dit, "autoencoder": _autoencoder}

# -- keras.applications, with a cross-entropy of classes

KERAS_APPLICATIONS: tuple[str, ...] = (
    "Xception", "VGG16", "VGG19", "ResNet50", "ResNet101", "ResNet152", "ResNet50V2", "ResNet101V2", "ResNet152V2",
    "InceptionV3", "InceptionResNetV2", "MobileNet", "MobileNetV2", "MobileNetV3Small", "MobileNetV3Large",
    "DenseNet121", "DenseNet169", "DenseNet201", "NASNetMobile", "NASNetLarge",
    *(f"EfficientNetB{i}" for i in range(8)), *(f"EfficientNetV2B{i}" for i in range(4)),
    *(f"EfficientNetV2{size}" for size in "SML"),
    *(f"ConvNeXt{size}" for size in ("Tiny", "Small", "Base", "Large", "XLarge")),
)  # fmt: skip


def _of_applications(name: str) -> Make:
    def make(_batch: int) -> Any:
        import keras

        # The least that each of them takes.
        size = 75 if name.startswith("Inception") else 71 if name == "Xception" else 32
        net = getattr(keras.applications, name)(weights=None, classes=CLASSES, input_shape=(size, size, 3))
        net.compile(loss="sparse_categorical_crossentropy")
        return net

    return make


ARCHITECTURES: dict[str, dict[str, Make]] = {
    "transformers": _TRANSFORMERS,
    "timm": _TIMM,
    "torchvision": _TORCHVISION,
    "diffusers": _DIFFUSERS,
    "keras": {name: _of_applications(name) for name in KERAS_APPLICATIONS},
}


_IN_THE_SUITE = {
    "transformers": ("mixtral", "swin"),
    "keras": ("MobileNetV3Small",),
}
"""Networks that stand for the others of their package, which have about the same layers, or are slow."""

CASES = [
    pytest.param(package, name, marks=() if name in _IN_THE_SUITE.get(package, ()) else pytest.mark.full)
    for package, makes in ARCHITECTURES.items()
    for name in makes
]
"""(package, name) of every architecture as parameters of a test."""


def imported(package: str, name: str, *batches: int) -> list[ImportedModel]:
    """Return an architecture with each number of examples, made without weights; skips where its package is missing."""
    if package == "keras":
        os.environ.setdefault("KERAS_BACKEND", "tensorflow")
    else:
        pytest.importorskip("torch")
        stand_in_for_torchvision()
    pytest.importorskip(package)
    front_end = next(f for f in FRONT_ENDS if f.package == ("keras" if package == "keras" else "torch"))
    with front_end.without_weights():
        # A model of Keras takes any number: a second one would only be numbered on.
        sources = [ARCHITECTURES[package][name](batch) for batch in (batches[:1] if package == "keras" else batches)]
    if package == "keras":
        return [import_model(sources[0], batch=batch) for batch in batches]
    return [import_model(source) for source in sources]


def check_known(name: str, model: ImportedModel) -> None:
    """Assert that all that a model computes is known, but for routers and resizing, and that its loss is among it."""
    assert model.differences == ()
    opaque = [op for op in model.graph.operators if op.kind == "opaque"]
    functions = {op.attribute("function", "") for op in opaque}
    allowed = (
        {"aten.topk.default"} if name in ROUTED else {"aten.upsample_bilinear2d.vec"} if name in RESIZED else set()
    )
    assert functions <= allowed, [(op.name, op.attribute("function", ""), op.extents) for op in opaque]
    # The loss is among what it returns: one number.
    shapes = [model.traces[0].values[output].shape for output in model.traces[0].outputs]
    assert () in shapes


def stand_in_for_torchvision() -> None:
    """Declare the operators that torchvision's own build lacks beside a torch for CPUs: it cannot be loaded else.

    Before any of the packages is imported: transformers and timm look for it.
    """
    if find_spec("torchvision") is None or _KEPT:
        return
    import torch

    try:
        import torchvision  # noqa: F401
    except (ImportError, RuntimeError):
        library = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _KEPT.append(library)


_KEPT: list[Any] = []
"""Libraries: their operators go with them."""
