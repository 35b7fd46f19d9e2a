"""Exported shardings, and the program of the documentation, on virtual devices."""

import runpy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

P = jax.sharding.PartitionSpec

Ranges = dict[int, list[tuple[int, int]]]
"""Of each dim, by the number of a device."""


def held(text: str, tensors: Sequence[tuple[str, str, int | str, tuple[int, ...]]]) -> list[Ranges]:
    """Return what each device holds of tensors, as the text of an exported module says, which alone tells of the plan.

    tensors: layer, group, which of it, shape. What is left open is taken for whole.
    """
    module: dict[str, Any] = {}
    exec(compile(text, "<exported>", "exec"), module)
    mesh, found = module["make_mesh"](), []
    for layer, group, which, shape in tensors:
        spec = P(*(None if axes is P.UNCONSTRAINED else axes for axes in module["SPECS"][layer][group][which]))
        parts = module["sharding"](mesh, spec).devices_indices_map(shape)
        found.append(
            {
                device.id: [part.indices(extent)[:2] for part, extent in zip(parts[device], shape, strict=True)]
                for device in parts
            }
        )
    return found


def convolution() -> float:
    """Return by how much a line's convolution, split by positions and channels, is too large."""
    devices = np.array(jax.devices()[:4]).reshape(2, 2)
    mesh = jax.sharding.Mesh(devices, ("channels", "positions"))

    def lying(x: Any, *axes: str | None) -> Any:
        spec = jax.sharding.PartitionSpec(*axes)
        return jax.lax.with_sharding_constraint(x, jax.sharding.NamedSharding(mesh, spec))

    def convolved(x: Any, w: Any) -> Any:
        return jax.lax.conv_general_dilated(x, w, (1,), ((1, 1),), dimension_numbers=("NCH", "OIH", "NCH"))

    def split(x: Any, w: Any) -> Any:
        y = convolved(lying(x, None, None, "positions"), lying(w, "channels", None, None))
        return lying(y, None, "channels", "positions")

    x, w = np.arange(8.0).reshape(1, 1, 8), np.ones((2, 1, 3))
    return float((jax.jit(split)(x, w) / jax.jit(convolved)(x, w)).max())


def example(folder: Path) -> dict[str, Any]:
    """Run the program of the documentation: its loss and gradients beside those of a single device."""
    random = np.random.default_rng(0)
    shapes = {"fc1": (784, 1024), "fc2": (1024, 1024), "fc3": (1024, 10)}
    weights = {name: {"w": random.normal(size=s) / 32, "bias": random.normal(size=s[1])} for name, s in shapes.items()}
    x, labels = random.normal(size=(32, 784)), random.integers(0, 10, 32)

    def loss(weights: Any) -> Any:
        first = jax.nn.relu(x @ weights["fc1"]["w"] + weights["fc1"]["bias"])
        second = jax.nn.relu(first @ weights["fc2"]["w"] + weights["fc2"]["bias"])
        scores = jax.nn.log_softmax(second @ weights["fc3"]["w"] + weights["fc3"]["bias"])
        return -scores[np.arange(32), labels].mean()

    expected, gradients = jax.value_and_grad(loss)(weights)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        program = runpy.run_path(str(folder / "with_jax.py"))
    found, changes = program["step"](weights, x, labels)
    pairs = zip(*map(jax.tree.leaves, (changes, gradients)), strict=True)
    differences = [np.abs(ours - theirs).max() for ours, theirs in pairs]
    return {
        "loss": float(expected),
        "difference": float(max(np.abs(found - expected), *differences)),
        "devices": len({str(shard.index) for shard in changes["fc1"]["w"].addressable_shards}),
    }
