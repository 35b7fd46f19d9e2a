"""Layer costs of the tables against the definition, element by element (tests/costs/by_element.py).

The suite takes a sample; all of it is run with LAYER_COSTS=60000 (six minutes).
"""

import os
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from pase.costs import PaperCostModel, build_problem
from pase.errors import GraphError
from pase.graph import Builder, Operator
from pase.graph.operators import (
    add_parameter,
    conv1d,
    conv2d,
    dense,
    elementwise,
    embedding,
    layer_norm,
    pool1d,
    softmax_loss,
)
from tests.costs import by_element as definition
from tests.costs.by_element import Layer

NUM_COSTS = int(os.environ.get("LAYER_COSTS", "1200"))
FLOP_PER_BYTE = 1000.0

Case = tuple[Callable[..., Operator], tuple[tuple[int, ...], ...], dict[str, Any], Layer]
"""A factory of an operator, the shapes of its inputs, its options, and the same layer by its definition."""


def _pick(rng: np.random.Generator, *choices: Any) -> Any:
    return choices[rng.integers(len(choices))]


def _dense(rng: np.random.Generator) -> Case:
    batch, made, summed = (int(_pick(rng, 2, 3, 4, 6, 8, 12)) for _ in range(3))
    options = {"bias": bool(rng.integers(2)), "activation": _pick(rng, "", "relu", "tanh")}
    layer = definition.dense(batch, made, summed, bias=options["bias"], activation=bool(options["activation"]))
    return dense, ((batch, summed),), {"out": (("n", made),), **options}, layer


def _windows(rng: np.random.Generator, rank: int) -> dict[str, tuple[int, ...]]:
    kernel = tuple(int(rng.integers(1, 5)) for _ in range(rank))
    dilation = tuple(int(rng.integers(1, 3)) for _ in range(rank))
    return {
        "kernel": kernel,
        "stride": tuple(int(rng.integers(1, 4)) for _ in range(rank)),
        "dilation": dilation,
        "padding": tuple(int(rng.integers(0, k)) for k in kernel),
    }


def _convolution(rng: np.random.Generator, rank: int) -> Case:
    groups = int(_pick(rng, 1, 1, 2))
    batch, channels, made = int(_pick(rng, 1, 2)), groups * int(_pick(rng, 1, 2)), groups * int(_pick(rng, 1, 2, 3))
    size = tuple(int(rng.integers(8, 20 if rank == 1 else 13)) for _ in range(rank))
    options = _windows(rng, rank)
    layer = definition.convolution(batch, channels, made, size, groups=groups, **options)  # type: ignore[arg-type]
    factory = conv1d if rank == 1 else conv2d
    return factory, ((batch, channels, *size),), {"out": made, "groups": groups, **options}, layer


def _pooling(rng: np.random.Generator) -> Case:
    batch, channels, size = int(_pick(rng, 1, 2, 4)), int(_pick(rng, 1, 2, 3)), int(rng.integers(8, 26))
    kernel, stride = int(rng.integers(1, 5)), int(rng.integers(1, 4))
    padding = int(rng.integers(0, kernel // 2 + 1))
    layer = definition.pooling(batch, channels, size, kernel, stride, padding)
    return pool1d, ((batch, channels, size),), {"kernel": kernel, "stride": stride, "padding": padding}, layer


def _pointwise(rng: np.random.Generator) -> Case:
    shape = tuple(int(_pick(rng, 1, 2, 4, 6, 12)) for _ in range(int(rng.integers(1, 4))))
    function = str(_pick(rng, "add", "multiply", "relu", "tanh"))
    count = int(rng.integers(2, 5)) if function in {"add", "multiply"} else 1
    activation = str(_pick(rng, "", "relu"))
    layer = definition.pointwise(shape, function, count, activation=bool(activation))
    options = {"dims": tuple("bcd"[: len(shape)]), "function": function, "activation": activation}
    return elementwise, (shape,) * count, options, layer


def _look_up(rng: np.random.Generator) -> Case:
    batch, steps, vocabulary, width = (int(_pick(rng, 1, 2, 4, 6)) for _ in range(4))
    layer = definition.look_up(batch, steps, vocabulary, width)
    return embedding, ((batch, steps),), {"vocabulary": vocabulary, "size": width}, layer


def _row_normalisation(rng: np.random.Generator) -> Case:
    shape = tuple(int(_pick(rng, 1, 2, 4, 6, 12)) for _ in range(3))
    return layer_norm, (shape,), {}, definition.row_normalisation(*shape)


def _class_loss(rng: np.random.Generator) -> Case:
    shape = tuple(int(_pick(rng, 1, 2, 4, 6, 12, 24)) for _ in range(2))
    return softmax_loss, (shape,), {}, definition.class_loss(*shape)


CASES: tuple[Callable[[np.random.Generator], Case], ...] = (
    _dense,
    lambda rng: _convolution(rng, 1),
    lambda rng: _convolution(rng, 2),
    _pooling,
    _pointwise,
    _look_up,
    _row_normalisation,
    _class_loss,
)
FED = ("data", "made of data alone", "trained")
"""Where a layer's inputs are from: only the last have a gradient, and only of the first are halos delivered."""


def _problem_of(case: Case, fed: str, num_devices: int) -> tuple[Any, Any]:
    factory, shapes, options, _ = case
    net = Builder("one layer")
    inputs = []
    for number, shape in enumerate(shapes):
        x, names = net.input(shape), tuple("bcdefg"[: len(shape)])
        if fed == "made of data alone":
            x = net.add(elementwise, f"before{number}", x, dims=names, function="relu")
        elif fed == "trained":
            x = net.add(add_parameter, f"before{number}", x, dims=names, over=names[-1:])
        inputs.append(x)
    net.add(factory, "layer", *inputs, **options)
    free, dear = (
        build_problem(net.build(), num_devices, PaperCostModel(flop_per_byte=r)) for r in (0.0, FLOP_PER_BYTE)
    )
    return free, dear


def _all(rng: np.random.Generator) -> Iterator[tuple[Case, str, int]]:
    while True:
        for make in CASES:
            try:
                case = make(rng)
                case[0]("layer", *case[1], **case[2])
            except GraphError:
                continue  # a window that does not fit its image
            yield case, FED[rng.integers(len(FED))], int(_pick(rng, 2, 3, 4, 6, 8, 12))


def test_layer_costs_are_those_of_the_definition() -> None:
    rng, compared = np.random.default_rng(16), 0
    seen: set[tuple[str, str]] = set()
    for case, fed, num_devices in _all(rng):
        factory, shapes, options, layer = case
        if factory is embedding and fed != "data":
            continue  # indices are data
        free, dear = _problem_of(case, fed, num_devices)
        vertex = free.graph.index["layer"]
        found = list(definition.configurations(layer, num_devices))
        assert len(found) == len(free.configurations[vertex]), (factory, shapes, options)
        for splits in found:
            # The definition's dims may come in another order.
            order = tuple(splits[dim] for dim in free.graph.operators[vertex].extents)
            choice = free.choice(vertex, order)
            where = (factory.__name__, shapes, options, fed, num_devices, splits)
            assert choice is not None, where
            work = free.tables.layer_costs(vertex)[choice]
            moved = (dear.tables.layer_costs(vertex)[choice] - work) / FLOP_PER_BYTE
            trained = fed == "trained"
            assert work == definition.flop(layer, splits, trained), where
            expected = definition.sent_bytes(layer, splits, is_fed=fed != "data", trained_inputs=trained)
            assert moved == pytest.approx(expected, rel=1e-9, abs=1e-6), where
            compared += 1
            seen.add((factory.__name__, fed))
        if compared >= NUM_COSTS:
            break
    assert len(seen) >= 20, f"only {sorted(seen)} were compared"
