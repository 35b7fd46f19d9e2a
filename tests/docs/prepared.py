"""What pages presume that a reader has: a model file, data, names that the text speaks of."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

import pase
from pase.planning.plan_file import write_plan
from tests.docs.kinds import file_name
from tests.docs.markdown import blocks


def _nothing(folder: Path) -> dict[str, Any]:
    return {}


def _model(folder: Path) -> dict[str, Any]:
    """`model.onnx` with two dense layers, and an input for it."""
    import numpy as np
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    generator = np.random.default_rng(0)
    weights = {"w1": (32, 64), "w2": (64, 8)}
    graph = helper.make_graph(
        [
            helper.make_node("MatMul", ["images", "w1"], ["hidden"]),
            helper.make_node("Relu", ["hidden"], ["active"]),
            helper.make_node("MatMul", ["active", "w2"], ["scores"]),
        ],
        "two layers",
        [helper.make_tensor_value_info("images", TensorProto.FLOAT, [128, 32])],
        [helper.make_tensor_value_info("scores", TensorProto.FLOAT, [128, 8])],
        [numpy_helper.from_array(generator.standard_normal(s, np.float32), name) for name, s in weights.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=10)
    onnx.save(model, folder / "model.onnx")
    np.savez(folder / "inputs.npz", images=generator.standard_normal((128, 32), np.float32))
    return {}


def _plan(folder: Path) -> dict[str, Any]:
    """`plan.json`."""
    write_plan(pase.search(pase.load("mlp"), devices=8), folder / "plan.json")
    return {}


def _module(folder: Path) -> dict[str, Any]:
    """A module of PyTorch and its inputs; `model.onnx`; a factory `llama` in `models.py`."""
    import torch

    (folder / "models.py").write_text(
        "import torch\n\n\ndef llama(batch=8):\n    return torch.nn.Linear(32, 64), torch.zeros(batch, 32)\n",
        encoding="utf-8",
    )
    return _model(folder) | {"module": torch.nn.Linear(32, 64), "inputs": torch.zeros(64, 32)}


def _machines(folder: Path) -> dict[str, Any]:
    """A machine `mine.toml`, one that was measured, and the page's own with a key that is wrong."""
    page = "docs/machines.md"
    (own,) = (block.text for block in blocks(page) if file_name(block) == "lab.toml")
    wrong = own.replace("bandwidth_bytes_per_s = 25e9", "bandwidth_gb_per_s = 25")
    assert wrong != own
    for name in ("mine.toml", "machine.toml"):
        (folder / name).write_text(own.replace("devices = 8 ", "devices = 0 "), encoding="utf-8")
    (folder / "wrong.toml").write_text(wrong, encoding="utf-8")
    return {}


def _images(folder: Path) -> dict[str, Any]:
    """Six images and their labels."""
    import numpy as np

    return {"images": np.zeros((6, 1, 28, 28)), "labels": np.arange(6)}


def _transformers(folder: Path) -> dict[str, Any]:
    """What the page's programs import."""
    pytest.importorskip("accelerate")
    pytest.importorskip("transformers")
    return {}


PREPARED: Mapping[str, Callable[[Path], dict[str, Any]]] = {
    "README.md": _module,
    "docs/export.md": _plan,
    "docs/forward.md": _model,
    "docs/how-to/transformers.md": _transformers,
    "docs/importing.md": _model,
    "docs/machines.md": _machines,
    "docs/training.md": _images,
}
"""By page: takes its folder, returns the names that its snippets find."""


def prepare(page: str, folder: Path) -> dict[str, Any]:
    """Make what a page presumes; return its names."""
    return PREPARED.get(page, _nothing)(folder)
