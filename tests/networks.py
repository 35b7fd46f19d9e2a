"""The built-in networks made small: searched in milliseconds, with every kind of layer that the large ones have."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache
from itertools import product
from math import prod

import numpy as np

from pase import Builder, Graph, Machine, Plan, load, load_machine, search
from pase.graph import Operator, Scalar
from pase.graph.operators import dense, elementwise
from pase.machine import override_machine
from pase.planning.steps import LayerChoice, TrainingStep

_TEXT: dict[str, Scalar] = {"batch": 16, "vocabulary": 64, "steps": 8, "model_width": 16, "heads": 4}
_IMAGE: dict[str, Scalar] = {"batch": 16, "image": 32, "classes": 16}

SMALL: dict[str, dict[str, Scalar]] = {
    "alexnet": _IMAGE | {"image": 64, "width": 8},
    "inception_v3": _IMAGE | {"image": 75, "width": 8, "blocks": "1,1,1"},
    "rnnlm": {"batch": 16, "vocabulary": 64, "units": 16, "steps": 8},
    "transformer": _TEXT | {"hidden": 32, "layers": 1},
    "transformer_big": _TEXT | {"hidden": 32, "layers": 2},
    "lenet5": {"batch": 16},
    "vgg16": _IMAGE | {"width": 8},
    "vgg19": _IMAGE | {"width": 8},
    "googlenet": _IMAGE | {"width": 8},
    "resnet101": _IMAGE | {"width": 8, "blocks": "1,2,1,1"},
    "densenet121": _IMAGE | {"growth": 8, "blocks": "2,2,1,1"},
    "bert_large": _TEXT | {"hidden": 32, "layers": 2},
    "gpt": _TEXT | {"layers": 2},
    "mlp": {"batch": 16, "inputs": 32, "hidden": 64, "classes": 8},
}
"""Arguments of the builders."""


@cache
def small_graph(name: str) -> Graph:
    """Return a small built-in network."""
    return load(name, arguments=SMALL[name])


@cache
def small_plan(name: str, num_devices: int) -> Plan:
    """Return the plan of a small built-in network."""
    return search(small_graph(name), num_devices)


@cache
def tiny_graph() -> Graph:
    """Return two dense layers and a softmax: few enough strategies to try them all."""
    return load("mlp", arguments={"layers": 2, "batch": 8, "inputs": 8, "hidden": 8, "classes": 4})


def whole_splits(graph: Graph, splits: Mapping[str, Mapping[str, int]]) -> list[dict[str, int]]:
    """Return the split factors of all dims of all layers; layers and dims that are not named are not split."""
    return [{dim: splits.get(o.name, {}).get(dim, 1) for dim in o.extents} for o in graph.operators]


def row_of(operator: Operator, split: Mapping[str, int]) -> np.ndarray[tuple[int, int], np.dtype[np.int32]]:
    """Return [1, D] one configuration of an operator; dims that are not named are not split."""
    return np.array([[split.get(dim, 1) for dim in operator.extents]], dtype=np.int32)


def diamond(inputs: int = 6, outputs: int = 2) -> Graph:
    """Return a graph with two paths between its ends."""
    net = Builder("diamond")
    x = net.add(dense, "fc1", net.input((4, inputs)), out=(("n", 4),), bias=False)
    left, right = (net.add(dense, name, x, out=(("n", outputs),), bias=False) for name in ("left", "right"))
    net.add(elementwise, "add", left, right, dims=("b", "n"))
    return net.build()


def every_strategy(graph: Graph, num_devices: int) -> Iterator[tuple[dict[str, int], ...]]:
    """Yield every way to split all layers evenly into numbers of parts that divide p, by trying them all."""
    domains = []
    for operator in graph.operators:
        extents = operator.extents
        factors = product(*(range(1, min(extent, num_devices) + 1) for extent in extents.values()))
        domains.append(
            [
                dict(zip(extents, split, strict=True))
                for split in factors
                if num_devices % prod(split) == 0
                and all(extent % factor == 0 for extent, factor in zip(extents.values(), split, strict=True))
            ]
        )
    yield from product(*domains)


def slow_machine() -> Machine:
    """Return a machine that computes so slowly that splitting even tiny layers pays."""
    return override_machine(load_machine("1080ti"), flop_per_s=1e9, bandwidth_bytes_per_s=None)


@cache
def staged_plan() -> Plan:
    """Two stages that differ, of four micro-batches, some weights in pieces, some layers recomputed; sums hide."""
    arguments = {"layers": 4, "model_width": 64, "heads": 4, "steps": 32, "vocabulary": 96}
    return search(
        load("gpt", batch=16, arguments=arguments),
        8,
        machine="v100",
        cost_model="step",
        stages=2,
        micro_batches=4,
        modes=["zero1", "zero3", "recompute"],
        optimiser="adamw",
        device_memory_bytes=900_000,
    )


@cache
def limited_staged_plan() -> Plan:
    """Two small stages of four micro-batches, some layers recomputed to stay within the memory limit."""
    arguments = {"layers": 2, "model_width": 32, "heads": 2, "steps": 16, "vocabulary": 64}
    return search(
        load("gpt", batch=16, arguments=arguments),
        4,
        machine="v100",
        cost_model="step",
        stages=2,
        micro_batches=4,
        modes=["zero1", "zero3", "recompute"],
        optimiser="adamw",
        device_memory_bytes=304_000,
    )


@cache
def tiny_plan() -> Plan:
    """Return the plan of `tiny_graph` on 4 slow devices: its layers are split in different dims."""
    return search(tiny_graph(), 4, machine=slow_machine())


def with_layer(step: TrainingStep, position: int, choice: LayerChoice) -> TrainingStep:
    """Return a step with another choice of a layer, of the same stage."""
    return replace(step, layers=(*step.layers[:position], choice, *step.layers[position + 1 :]))
