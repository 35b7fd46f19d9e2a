"""Exported placements, and the program of the documentation, on ranks."""

import runpy
from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import distribute_tensor


def held(
    _rank: int,
    _world: int,
    text: str,
    tensors: Sequence[tuple[str, str, int | str, tuple[int, ...]]],
    products: Sequence[str],
) -> tuple[list[Any], list[bool]]:
    """Return what a rank holds of tensors of numbers that count up, as the text of an exported module says alone.

    tensors: layer, group, which of it, shape. products: names of layers that multiply an input by a matrix; whether
    PyTorch leaves their results as the module expects them is returned, too.
    """
    module: dict[str, Any] = {}
    exec(compile(text, "<exported>", "exec"), module)
    mesh, placements = module["device_mesh"]("cpu"), module["PLACEMENTS"]
    laid = {
        (layer, group, which): distribute_tensor(
            torch.arange(float(prod(shape))).reshape(shape), mesh, placements[layer][group][which]
        )
        for layer, group, which, shape in tensors
    }
    expected = {name: placements[name].get("partial_outputs", placements[name]["outputs"])[0] for name in products}
    found = {name: (laid[name, "inputs", 0] @ laid[name, "parameters", "w"]).placements for name in products}
    local = [laid[layer, group, which].to_local().numpy() for layer, group, which, _ in tensors]
    return local, [list(found[name]) == list(expected[name]) for name in products]


def example(_rank: int, _world: int, folder: Path) -> None:
    """Run the program of the documentation: its loss and gradients are those of this process alone."""
    random = torch.Generator().manual_seed(0)
    shapes = {"fc1": (784, 1024), "fc2": (1024, 1024), "fc3": (1024, 10)}
    weights = {
        name: {
            "w": torch.randn(shape, dtype=torch.float64, generator=random) / 32,
            "bias": torch.randn(shape[1], dtype=torch.float64, generator=random),
        }
        for name, shape in shapes.items()
    }
    x = torch.randn(32, 784, dtype=torch.float64, generator=random)
    labels = torch.randint(0, 10, (32,), generator=random)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        # The ranks are a group already.
        patch.setattr(dist, "init_process_group", {"gloo": None}.__getitem__)
        program = runpy.run_path(str(folder / "with_torch.py"))
    laid = program["lay"](weights)
    found = program["loss"](laid, x, labels)
    found.backward()
    leaves = {(layer, name): own.requires_grad_() for layer, of in weights.items() for name, own in of.items()}
    for layer in weights:
        x = torch.relu(x) if layer != "fc1" else x
        x = x @ leaves[layer, "w"] + leaves[layer, "bias"]
    expected = torch.nn.functional.cross_entropy(x, labels)
    expected.backward()  # type: ignore[no-untyped-call]
    assert abs(found - expected) < 1e-12
    for (layer, name), leaf in leaves.items():
        assert (laid[layer][name].grad.full_tensor() - leaf.grad).abs().max() < 1e-12, (layer, name)
