"""Networks with exported shardings on virtual devices, and without on one."""

import runpy
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from pase.graph import Graph, Role
from pase.sharding.traffic import parameter_name
from tests.exports.jax_forward import run


def numbers(graph: Graph) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return weights by name and data by "layer/position"."""
    random = np.random.default_rng(0)
    weights, data = {}, {}
    for operator in graph.operators:
        top = operator.writes[0].shape[-1] if operator is graph.operators[-1] else 2
        for position, read in enumerate(operator.reads):
            name = parameter_name(operator, read)
            if read.role is Role.PARAMETER and name not in weights:
                weights[name] = random.normal(size=read.shape) / max(1, prod(read.shape) // max(read.shape)) ** 0.5
            elif read.role is Role.INDEX:
                extent = operator.extents.get("v", top)
                data[f"{operator.name}/{position}"] = random.integers(0, extent, read.shape)
            elif read.role is Role.ACTIVATION and (operator.name, position) not in graph.incoming:
                data[f"{operator.name}/{position}"] = random.normal(size=read.shape)
    return weights, data


def ranges(array: Any) -> dict[int, list[tuple[int, int]]]:
    """Return the range of each dim that each device holds."""
    return {
        shard.device.id: [part.indices(extent)[:2] for part, extent in zip(shard.index, array.shape, strict=True)]
        for shard in array.addressable_shards
    }


def case(graph: Graph, text: str) -> dict[str, Any]:
    """Return what one network did under the text of an exported module, which alone tells of the plan.

    That is the largest difference of loss, gradients and outputs from one device, and what range of each tensor each
    device held.
    """
    names: dict[str, Any] = {}
    exec(compile(text, "<exported>", "exec"), names)
    module = SimpleNamespace(**names)
    mesh = module.make_mesh()
    weights, data = numbers(graph)

    def laid(name: str, group: str, which: int | str) -> Any:
        return module.sharding(mesh, module.SPECS[name][group][which])

    def constrain(name: str, group: str, which: int | str, x: Any) -> Any:
        return jax.lax.with_sharding_constraint(x, laid(name, group, which))

    weights_laid, data_laid = {}, {}
    for operator in graph.operators:
        inputs = [i for i, read in enumerate(operator.reads) if read.role is not Role.PARAMETER]
        for number, position in enumerate(inputs):
            if (operator.name, position) not in graph.incoming:
                data_laid[f"{operator.name}/{position}"] = laid(operator.name, "inputs", number)
        for read in operator.parameters:
            weights_laid.setdefault(parameter_name(operator, read), laid(operator.name, "parameters", read.tensor))

    def loss(weights: Any, data: Any, constrain: Any) -> Any:
        return run(graph, weights, data, constrain)

    def plain(weights: Any, data: Any) -> Any:
        return jax.value_and_grad(lambda w: loss(w, data, lambda _, __, ___, x: x), has_aux=True)(weights)

    def sharded(weights: Any, data: Any) -> Any:
        return jax.value_and_grad(lambda w: loss(w, data, constrain), has_aux=True)(weights)

    (expected, outputs), gradients = jax.jit(plain)(weights, data)
    step = jax.jit(sharded, in_shardings=(weights_laid, data_laid), out_shardings=((None, None), weights_laid))
    held = {name: jax.device_put(weight, weights_laid[name]) for name, weight in weights.items()}
    given = {name: jax.device_put(x, data_laid[name]) for name, x in data.items()}
    (found, values), changes = step(held, given)

    # Some gradients are nothing but round-off: that of attention's keys' bias is 0.
    least = 1e-3 * max(float(np.abs(gradient).max()) for gradient in gradients.values())

    def difference(ours: Any, theirs: Any) -> float:
        return float(np.abs(np.asarray(ours) - np.asarray(theirs)).max() / max(least, float(np.abs(theirs).max())))

    return {
        "loss": float(expected),
        "differences": {
            "loss": difference(found, expected),
            **{f"gradient of {name}": difference(changes[name], gradients[name]) for name in weights},
            **{f"output of {name}": difference(values[name], outputs[name]) for name in outputs},
        },
        "weights": {name: ranges(weight) for name, weight in held.items()},
        "gradients": {name: ranges(gradient) for name, gradient in changes.items()},
        "data": {name: ranges(x) for name, x in given.items()},
        "outputs": {name: ranges(value) for name, value in values.items()},
    }


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
