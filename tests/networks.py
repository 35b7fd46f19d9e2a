"""The built-in networks made small: searched in milliseconds, with every kind of layer that the large ones have."""

from functools import cache

from pase import Graph, Machine, Plan, load, load_machine, search
from pase.graph import Scalar
from pase.machine import override_machine

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
def tiny_plan() -> Plan:
    """Return the plan of `tiny_graph` on 4 slow devices: its layers are split in different dims."""
    return search(tiny_graph(), 4, machine=slow_machine())
