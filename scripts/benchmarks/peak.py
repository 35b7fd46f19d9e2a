"""The peak of a step beside what PyTorch allocates and what its tracker counts: twelve models, on one of some ranks."""

import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch._C._profiler import _EventType
from torch.distributed.tensor import DTensor
from torch.nn import functional

import pase
from scripts.benchmarks.kernels import _DECODER, _NO_DROPOUT, Made, _made, _pictures, _words
from scripts.benchmarks.kernels import MODELS as TIMED
from scripts.benchmarks.tables import markdown, publish

RANKS = 4
SETTINGS = (("sgd", "float32"), ("adamw", "bf16-mixed"))
STRATEGIES = ("data_parallel", "optimal")
BARS = (-0.02, 0.05)
"""Predictions further off are told apart."""


class UNet(nn.Module):  # type: ignore[misc]
    """An encoder and a decoder of images with connections across, normalised by groups."""

    def __init__(self) -> None:
        super().__init__()

        def block(before: int, after: int) -> nn.Module:
            return nn.Sequential(nn.Conv2d(before, after, 3, padding=1), nn.GroupNorm(4, after), nn.SiLU())

        self.first, self.second, self.third = block(4, 32), block(32, 64), block(64, 128)
        self.up2, self.up1 = nn.ConvTranspose2d(128, 64, 2, 2), nn.Upsample(scale_factor=2, mode="nearest")
        self.join2, self.join1, self.out = block(128, 64), block(96, 32), nn.Conv2d(32, 4, 1)

    def forward(self, x: Any, noise: Any) -> Any:
        """Return the mean of the squares of what is left of the noise."""
        first = self.first(x)
        second = self.second(functional.max_pool2d(first, 2))
        third = self.third(functional.max_pool2d(second, 2))
        second = self.join2(torch.cat([second, self.up2(third)], 1))
        first = self.join1(torch.cat([first, self.up1(second)], 1))
        return functional.mse_loss(self.out(first), noise)


class Encoder(nn.Module):  # type: ignore[misc]
    """PyTorch's own encoder layers, and a class for each text."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0, batch_first=True)
        self.words, self.layers = nn.Embedding(2000, 256), nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.head = nn.Linear(256, 100)

    def forward(self, words: Any, labels: Any) -> Any:
        """Return the cross-entropy."""
        return functional.cross_entropy(self.head(self.layers(self.words(words)).mean(1)), labels)


def _whisper() -> Made:
    sizes = {f"{part}_{what}": n for part in ("encoder", "decoder") for what, n in _WHISPER.items()}
    module = _made(
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        **dict[str, Any]({"vocab_size": 2000, "d_model": 256, "num_mel_bins": 40, "pad_token_id": 0, **sizes}),
        **dict[str, Any]({"max_source_positions": 128, "max_target_positions": 64, **_DECODER}),
        **dict[str, Any]({"dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0}),
        **dict[str, Any]({"decoder_start_token_id": 1, "suppress_tokens": None, "begin_suppress_tokens": None}),
    )
    words = torch.randint(3, 2000, (8, 64))
    return module, {"input_features": torch.randn(8, 40, 256), "decoder_input_ids": words, "labels": words.clone()}


_WHISPER = {"layers": 3, "attention_heads": 4, "ffn_dim": 1024}


def _t5() -> Made:
    module = _made(
        "T5ForConditionalGeneration",
        "T5Config",
        **dict[str, Any]({"vocab_size": 2000, "d_model": 256, "d_kv": 64, "d_ff": 1024, "num_layers": 3}),
        **dict[str, Any]({"num_heads": 4, "dropout_rate": 0.0, "decoder_start_token_id": 0, "use_cache": False}),
    )
    words, told = torch.randint(3, 2000, (8, 128)), torch.randint(3, 2000, (8, 64))
    return module, {"input_ids": words, "decoder_input_ids": told, "labels": told.clone()}


MODELS: Mapping[str, Callable[[], Made]] = {
    **TIMED,
    "T5": _t5,
    "Mixtral": lambda: _words(
        "MixtralForCausalLM",
        "MixtralConfig",
        **dict[str, Any]({"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 3, **_DECODER}),
        **dict[str, Any]({"num_attention_heads": 4, "num_key_value_heads": 2}),
        **dict[str, Any]({"num_local_experts": 4, "num_experts_per_tok": 2}),
    ),
    "Swin": lambda: _pictures(
        "SwinForImageClassification",
        "SwinConfig",
        **dict[str, Any]({"embed_dim": 48, "depths": [2, 2, 2], "num_heads": [3, 6, 12], "window_size": 6}),
        **dict[str, Any]({"image_size": 96, "patch_size": 4, "drop_path_rate": 0.0, **_NO_DROPOUT}),
    ),
    "Whisper": _whisper,
    "U-Net": lambda: (UNet(), {"x": torch.randn(8, 4, 64, 64), "noise": torch.randn(8, 4, 64, 64)}),
    "encoder": lambda: (Encoder(), {"words": torch.randint(0, 2000, (8, 128)), "labels": torch.randint(0, 100, (8,))}),
}


def main(*, write: bool) -> None:
    """Print the table, or put it into docs/memory.md."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    dist.init_process_group("fake", rank=0, world_size=RANKS, store=FakeStore())
    rows = [
        row
        for name, make in MODELS.items()
        for optimiser, precision in SETTINGS
        for row in _rows(name, make, optimiser, precision)
    ]
    headers = ["model", "optimizer", "precision", "strategy", "allocated, MB", "tracked", "predicted", "error"]
    publish("memory.md", {"peaks": markdown(headers, rows)}, write=write)


def _rows(name: str, make: Callable[[], Made], optimiser: str, precision: str) -> list[list[str]]:
    rows = []
    for strategy in STRATEGIES:
        module, batch = make()
        settings: dict[str, Any] = {"machine": "h100", "optimiser": optimiser, "precision": precision}
        plan = pase.evaluate(pase.load((module, batch)), strategy, RANKS, **settings)
        told = [name, optimiser, precision, strategy.replace("_", " ")]
        predicted = plan.peak.bytes
        try:
            training = Training(module, batch, plan)
            training.step()
            allocated, tracked = training.allocated_bytes(), training.tracked_bytes()
        except RuntimeError as error:
            rows.append([*told, "—", "—", f"{predicted / 1e6:.1f}", str(error).split(":")[0]])
            continue
        off = predicted / allocated - 1
        mark = "" if BARS[0] <= off <= BARS[1] else " *"
        figures = [f"{size / 1e6:.1f}" if size else "—" for size in (allocated, tracked, predicted)]
        rows.append([*told, *figures, f"{off:+.1%}{mark}"])
        print(*rows[-1], flush=True)
    return rows


def _changes(events: Iterable[Any]) -> list[tuple[int, int]]:
    """Return what is allocated and freed, in turn: an address, and the bytes, negative of what is freed."""
    waiting, found = list(events), []
    while waiting:
        event = waiting.pop()
        waiting += event.children
        kind, fields = event.typed
        if kind == _EventType.Allocation:
            found.append((event.start_time_ns, fields.ptr, fields.alloc_size))
    return [(address, size) for _, address, size in sorted(found)]


def _unheard(*_: object, **__: object) -> None:
    pass


class Training:
    """Steps of one rank of a model under a plan, and what they take. batch: of a micro-batch; step: of all of them."""

    def __init__(
        self, module: Any, batch: Mapping[str, Any], plan: pase.Plan, step: Mapping[str, Any] | None = None
    ) -> None:
        self.module = pase.parallelize((module, batch), plan, check=False)
        own = self.module.inputs()
        self.batch = {
            name: value[tuple(slice(low, high) for low, high in own[name])].clone() if name in own else value
            for name, value in (step or batch).items()
        }
        made: dict[str, Any] = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}
        trained = [parameter for parameter in self.module.parameters() if parameter.requires_grad]
        self.optimizer = made[plan.optimiser](trained, lr=1e-3, foreach=False)

    def step(self) -> None:
        """Take a step."""
        if self.module.plan.has_parts:
            self.module.accumulate(**self.batch)
        else:
            found = self.module(**self.batch)
            loss = found if isinstance(found, torch.Tensor) else found["loss"]
            del found
            loss.backward()
            del loss
        self.optimizer.step()
        self.optimizer.zero_grad()

    def resident_bytes(self) -> int:
        """Return what is allocated between steps: weights, buffers, the optimizer's state and the inputs."""
        state = [value for of in self.optimizer.state.values() for value in of.values()]
        before = {
            local.untyped_storage().data_ptr(): local.untyped_storage().nbytes()
            for tensor in (*self.module.parameters(), *self.module.buffers(), *self.batch.values(), *state)
            if isinstance(tensor, torch.Tensor)
            for local in [tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()]
        }
        return sum(before.values())

    def allocated_bytes(self) -> int:
        """Return the peak of a step: what is resident before it, and the most that PyTorch allocates beside it."""
        before = self.resident_bytes()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiled:
            self.step()
        assert profiled.profiler is not None
        # Nobody tells what gloo's threads free: that ends at the latest where its address is given again.
        lying: dict[int, int] = {}
        total = most = 0
        for address, size in _changes(profiled.profiler.kineto_results.experimental_event_tree()):
            total += max(size, 0) - lying.pop(address, 0 if size > 0 else -size)
            if size > 0:
                lying[address] = size
            most = max(most, total)
        return before + most

    def tracked_bytes(self) -> int:
        """Return the peak of a step as PyTorch's tracker counts it, 0 where it cannot follow the step."""
        from torch.distributed._tools import mod_tracker
        from torch.distributed._tools.mem_tracker import MemTracker

        tracker = MemTracker()
        tracker.track_external(self.module, self.optimizer, *self.batch.values())
        try:
            # It would hold gradients of what a module is given until all are there, to know when its turn is over.
            with mock.patch.object(mod_tracker, "register_multi_grad_hook", new=_unheard), tracker:
                self.step()
        except RuntimeError:
            return 0
        # Tensors without memory, of which the shapes alone are known, are on a device of their own.
        found = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]
        return int(next(size for kind, size in found.items() if str(kind).endswith("Total")))
