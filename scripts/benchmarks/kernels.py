"""Steps of single processes beside their prediction by the machine's kernels, which are timed first."""

from collections.abc import Callable, Mapping
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
import torch

from pase.calibration.kernels import calibrated
from pase.costs import cost_model, traffic_of
from pase.graph import Graph
from pase.importers import load
from pase.machine import Kernels, Machine
from pase.machine.machine import KERNELS
from scripts.benchmarks.tables import markdown, publish

STEPS, WARM = 15, 3
BAR = 0.1
"""A step that is predicted further off is told apart."""

Made = tuple[Any, dict[str, Any]]
"""A module, and what it is called with."""


def _words(kind: str, config: str, **options: Any) -> Made:
    module, words = _made(kind, config, vocab_size=2000, **options), torch.randint(0, 2000, (8, 128))
    return module, {"input_ids": words, "labels": words.clone()}


def _pictures(kind: str, config: str, **options: Any) -> Made:
    module = _made(kind, config, num_labels=10, **options)
    return module, {"pixel_values": torch.randn(8, 3, 96, 96), "labels": torch.randint(0, 10, (8,))}


def _made(kind: str, config: str, **options: Any) -> Any:
    import transformers

    torch.manual_seed(0)
    return getattr(transformers, kind)(getattr(transformers, config)(return_dict=True, **options)).train()


_NO_DROPOUT: dict[str, Any] = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_DECODER: dict[str, Any] = {"use_cache": False, "bos_token_id": 1, "eos_token_id": 2}

MODELS: Mapping[str, Callable[[], Made]] = {
    "GPT-2": lambda: _words(
        "GPT2LMHeadModel",
        "GPT2Config",
        **dict[str, Any]({"n_layer": 4, "n_embd": 256, "n_head": 4, "n_positions": 128, **_DECODER}),
        **dict[str, Any]({"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}),
    ),
    "Llama": lambda: _words(
        *("LlamaForCausalLM", "LlamaConfig"),
        **dict[str, Any](
            {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 4, "num_attention_heads": 4, **_DECODER}
        ),
    ),
    "BERT": lambda: _words(
        *("BertForMaskedLM", "BertConfig"),
        hidden_size=256,
        intermediate_size=1024,
        num_hidden_layers=4,
        num_attention_heads=4,
        **_NO_DROPOUT,
    ),
    "ViT": lambda: _pictures(
        *("ViTForImageClassification", "ViTConfig"),
        hidden_size=192,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=3,
        **dict[str, Any]({"image_size": 96, "patch_size": 8, **_NO_DROPOUT}),
    ),
    "ResNet": lambda: _pictures(
        *("ResNetForImageClassification", "ResNetConfig"),
        embedding_size=32,
        hidden_sizes=[64, 128, 256],
        depths=[2, 2, 2],
        layer_type="basic",
    ),
    "ConvNeXt": lambda: _pictures(
        *("ConvNextForImageClassification", "ConvNextConfig"),
        hidden_sizes=[48, 96, 192],
        depths=[2, 2, 2],
        num_stages=3,
        image_size=96,
    ),
}


def main(*, write: bool) -> None:
    """Print the tables, or put them into docs/kernels.md."""
    torch.set_num_threads(1)
    machine = calibrated(None, "cpu")
    assert machine.kernels is not None
    rows = [_row(name, *make(), machine) for name, make in MODELS.items()]
    headers = ["model", "forward, ms", "predicted", "backward, ms", "predicted", "step, ms", "predicted", "error"]
    tables = {"kernels": fit_table(machine.kernels), "steps": markdown(headers, rows)}
    publish("kernels.md", tables, write=write)


def fit_table(figures: Kernels) -> str:
    """Return a row for each kind of kernel: its share, and how far off the figures are."""
    rows = []
    for what in KERNELS:
        errors = sorted(abs(s.predicted_s / s.time_s - 1) for s in figures.samples if s.what == what)
        rows.append(
            [what, f"{len(errors)}", f"{getattr(figures, what):.2f}", f"{median(errors):.1%}", f"{errors[-1]:.0%}"]
        )
    errors = sorted(abs(s.predicted_s / s.time_s - 1) for s in figures.samples)
    rows.append(["all", f"{len(errors)}", "", f"{median(errors):.1%}", f"{errors[-1]:.0%}"])
    return markdown(["kernels", "timed", "share of the peak", "error, median", "largest"], rows)


def _row(name: str, module: Any, batch: dict[str, Any], machine: Machine) -> list[str]:
    measured = _measured(module, batch)
    predicted = passes_s(load((module, batch)), machine)
    pairs = [*zip(measured, predicted, strict=True), (sum(measured), sum(predicted))]
    error = pairs[-1][1] / pairs[-1][0] - 1
    told = [f"{1e3 * seconds:.1f}" for pair in pairs for seconds in pair]
    return [name, *told, f"{error:+.0%}{' *' if abs(error) > BAR else ''}"]


def passes_s(graph: Graph, machine: Machine) -> tuple[float, float]:
    """Return the seconds of a forward and of a backward pass on one device, by the machine's kernels."""
    model, forward, backward = cost_model("step", machine, 1, graph.precision), 0.0, 0.0
    for operator in graph.operators:
        traffic = traffic_of(graph, operator, np.ones((1, len(operator.extents)), dtype=np.int32))
        forward += float(model.work(traffic.forward)[0])
        backward += float(model.work(traffic.backward)[0])
    return forward, backward


def _measured(module: Any, batch: dict[str, Any]) -> tuple[float, float]:
    """Return the median times of forward and backward passes."""
    forward, backward = [], []
    for _ in range(WARM + STEPS):
        module.zero_grad()
        begin = perf_counter()
        loss = module(**batch).loss
        between = perf_counter()
        loss.backward()
        forward.append(between - begin)
        backward.append(perf_counter() - between)
    return median(forward[WARM:]), median(backward[WARM:])
