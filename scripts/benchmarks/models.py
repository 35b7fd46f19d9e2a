"""Models of other frameworks, made from configurations alone: no weight is downloaded, none is allocated."""

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from pase.importers.frameworks import FRONT_ENDS


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """source: what `pase.load` takes. num_parameters: as its framework counts; None where it has no count.

    product_flop: of its forward pass by the framework's own counter, where it has one; called without weights.
    """

    source: Any
    num_parameters: int | None
    product_flop: Callable[[], float] | None = None


@contextmanager
def without_weights() -> Iterator[None]:
    """Make models of the frameworks that are imported without allocating their weights."""
    with ExitStack() as stack:
        for front_end in FRONT_ENDS:
            if front_end.package.partition(".")[0] in sys.modules:
                stack.enter_context(front_end.without_weights())
        yield


def _torch(make: Callable[[], tuple[Any, Any]]) -> Made:
    import torch

    with without_weights():
        module, given = make()
    module.eval()
    positional, keywords = ((), dict(given)) if isinstance(given, dict) else (tuple(given), {})

    def counted(program: Any) -> float:
        from torch.utils.flop_counter import FlopCounterMode

        with FlopCounterMode(display=False) as counter, torch.no_grad():
            program(*positional, **keywords)
        return float(counter.get_total_flops())

    def flop() -> float:
        try:
            return counted(module)
        except RuntimeError:
            # Some modules look at values that are not there; the program that is exported of them does not.
            return counted(torch.export.export(module, positional, keywords, strict=False).module())

    count = sum(parameter.numel() for parameter in module.parameters())
    return Made(source=(module, given), num_parameters=count, product_flop=flop)


def _own(name: str) -> Made:
    from tests.importers import torch_zoo

    return _torch(getattr(torch_zoo, name))


def _transformers(kind: str, config: str, batch: int, steps: int, **options: Any) -> Made:
    import torch
    import transformers

    def make() -> tuple[Any, Any]:
        module = getattr(transformers, kind)(getattr(transformers, config)(**options))
        if steps:
            return module, (torch.zeros((batch, steps), dtype=torch.long),)
        return module, (torch.zeros((batch, 3, 224, 224)),)

    return _torch(make)


def _keras(name: str) -> Made:
    import keras

    with without_weights():
        model = getattr(keras.applications, name)(weights=None)
    return Made(source=model, num_parameters=sum(_size(w.shape) for w in model.trainable_variables))


def _size(shape: tuple[int, ...]) -> int:
    size = 1
    for extent in shape:
        size *= extent
    return size


def _onnx(name: str) -> Made:
    import onnx

    folder = Path(onnx.__file__).parent / "backend" / "test" / "data" / "light"
    return Made(source=folder / f"light_{name}.onnx", num_parameters=None)


_LARGE = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}
_70B = {
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
}

MODELS: dict[str, tuple[Callable[[], Made], int, int]] = {
    "torch AlexNet": (partial(_own, "alexnet"), 22, 12),
    "torch ResNet-101": (partial(_own, "resnet"), 345, 244),
    "transformers GPT-2": (partial(_transformers, "GPT2LMHeadModel", "GPT2Config", 2, 128, use_cache=False), 545, 111),
    "transformers BERT-large": (partial(_transformers, "BertModel", "BertConfig", 2, 128, **_LARGE), 621, 269),
    "transformers ViT-L": (
        partial(_transformers, "ViTForImageClassification", "ViTConfig", 2, 0, num_labels=1000, **_LARGE),
        606,
        268,
    ),
    "transformers Llama-2 7B": (
        partial(_transformers, "LlamaForCausalLM", "LlamaConfig", 2, 128, use_cache=False),
        1926,
        419,
    ),
    "transformers Llama-2 70B": (
        partial(_transformers, "LlamaForCausalLM", "LlamaConfig", 2, 128, use_cache=False, **_70B),
        5190,
        1043,
    ),
    "Keras InceptionV3": (partial(_keras, "InceptionV3"), 312, 218),
    "Keras DenseNet201": (partial(_keras, "DenseNet201"), 708, 505),
    "Keras EfficientNetB0": (partial(_keras, "EfficientNetB0"), 239, 174),
    "ONNX ResNet-50": (partial(_onnx, "resnet50"), 415, 126),
    "ONNX DenseNet-121": (partial(_onnx, "densenet121"), 1746, 305),
    "ONNX Inception v1": (partial(_onnx, "inception_v1"), 237, 84),
    "ONNX SqueezeNet": (partial(_onnx, "squeezenet"), 105, 39),
    "ONNX AlexNet": (partial(_onnx, "bvlc_alexnet"), 40, 14),
    "ONNX VGG-19": (partial(_onnx, "vgg19"), 82, 25),
}
"""By name: how a model is made, and about how many operators and vertices it is expected to have."""
