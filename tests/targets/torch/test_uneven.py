"""Splits that do not divide their dims: ranks train as one does, and send what is predicted; LeNet-5 on 2 x 2."""

from dataclasses import replace
from functools import cache, partial
from itertools import product
from math import prod
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch import nn

import pase
from pase import Graph, Plan
from pase.errors import EmitError, PlanError
from pase.graph import Builder, Operator
from pase.graph.operators import concat, dense, softmax_loss
from pase.sharding.boxes import extents
from pase.sharding.traffic import held_weights
from tests.targets.torch.lockstep import Trained
from tests.targets.torch.networks import RELATIVE, check, differences, graph_of, trained_by

STRATEGY = """\
rest = "data_parallel"

[pin]
"conv*" = "h=2 w=2"
"pool*" = "h=2 w=2"
"fc*" = "n=2 c=2"
"""

TABLE_1 = {
    "conv1/w": (6, 1, 5, 5),
    "conv1/bias": (6,),
    "conv2/w": (16, 6, 5, 5),
    "conv2/bias": (16,),
    "fc1/w": (200, 60),
    "fc1/bias": (60,),
    "fc2/w": (60, 42),
    "fc2/bias": (42,),
    "fc3/w": (42, 5),
    "fc3/bias": (5,),
}
"""Hewett and Grady 2020, Table 1: what workers hold, matrices transposed; there worker 0 alone holds convolutions."""


@cache
def lenet5() -> Plan:
    graph = pase.load("lenet5", batch=8)
    document = {"rest": "data_parallel", "pin": {"conv*": "h=2 w=2", "pool*": "h=2 w=2", "fc*": "n=2 c=2"}}
    return pase.evaluate(graph, document, devices=4)


# With ε as large as the rate, what rounding leaves of a gradient that is 0 makes no larger step than it is itself; with
# AdamW's own ε of 1e-8 a step would be 1e5 times as large.
optimizer = partial(torch.optim.AdamW, lr=1e-3, eps=1e-3)


def test_lenet_5_on_2_by_2_workers_trains_as_on_one() -> None:
    plan = lenet5()
    assert plan["pool2"].dims["h"] == 5
    assert plan["pool2"].uneven_dims == ("h", "w")
    alone = pase.search(pase.load("lenet5", batch=8), 1)
    found, own = trained_by(plan, optimizer), trained_by(alone, optimizer)
    check(plan, found, own)
    assert max(differences(found.weights, own.weights, are_weights=True).values()) <= RELATIVE


def test_workers_hold_what_the_paper_says() -> None:
    held = {weight.name: {extents(box) for box in weight.parts} for weight in held_weights(lenet5())}
    assert held == {name: {shape} for name, shape in TABLE_1.items()}


def test_such_a_strategy_is_a_plan_like_any_other(tmp_path: Path) -> None:
    file, path = tmp_path / "lenet5.toml", tmp_path / "plan.json"
    file.write_text(STRATEGY)
    graph = pase.load("lenet5", batch=8)
    plan = pase.evaluate(graph, file, devices=4)
    assert plan.layers == lenet5().layers
    plan.save(path)
    assert pase.load_plan(path) == plan
    assert pase.evaluate(graph, path).layers == plan.layers
    assert pase.evaluate(graph, path).total_cost == plan.total_cost
    best = pase.search(graph, 4)
    assert plan.lower_bound == pytest.approx(best.total_cost)
    why = pase.explain(plan, ["pool2"])
    assert why.optimum_cost == pytest.approx(best.total_cost)
    assert why.improvement is not None
    assert plan.replace("pool2", rest="kept", b=4).total_cost != plan.total_cost
    assert pase.emit(plan, target="torch")
    assert pase.simulate(plan).step_time_s > 0


def test_what_cannot_run_it_says_so() -> None:
    plan = lenet5()
    with pytest.raises(EmitError, match=r"'pool2' splits h = 5 in 2 parts; a program for mesh_tensorflow needs splits"):
        pase.emit(plan, target="mesh_tensorflow")
    for name in ("jax", "torch", "mesh-tensorflow-layout"):
        with pytest.raises(PlanError, match=r"'pool2' splits h = 5 in 2 parts .*needs splits that divide their dims"):
            pase.export(plan, name)


def _ways(operator: Operator, p: int) -> list[dict[str, int]]:
    """Every split of a layer in parts of a point or more, on a number of devices that the parts divide."""
    every = [
        [1] if dim.name in operator.unsplittable else [k for k in range(1, p + 1) if p % k == 0 and k <= dim.extent]
        for dim in operator.dims
    ]
    found = (dict(zip(operator.extents, way, strict=True)) for way in product(*every))
    return [way for way in found if p % prod(way.values()) == 0]


def unevenly(plan: Plan, seed: int) -> Plan:
    """Return a plan with random splits on random devices, half of the layers with some that do not divide."""
    random, p, layers = Random(seed), plan.num_devices, []
    for layer in plan:
        ways = _ways(plan.graph[layer.name], p)
        uneven = [way for way in ways if any(layer.dims[dim] % k for dim, k in way.items())]
        whole = [way for way in ways if prod(way.values()) == p]
        splits = random.choice(uneven if uneven and random.random() < 0.5 else whole or ways)
        layers.append(replace(layer, splits=splits, devices=tuple(random.sample(range(p), p))))
    return replace(plan, layers=tuple(layers))


@cache
def alone(name: str) -> Trained:
    return trained_by(pase.search(graph_of(name), 1), optimizer)


@pytest.mark.parametrize(
    ("name", "num_devices", "seed"),
    [
        *(("mlp", 6, 0), ("lenet5", 6, 0), ("rnnlm", 6, 0), ("gpt", 6, 0)),
        *(
            pytest.param(*each, marks=pytest.mark.full)
            for each in (
                *(("mlp", 6, 1), ("mlp", 6, 2), ("lenet5", 6, 1), ("lenet5", 6, 2), ("lenet5", 4, 1), ("lenet5", 4, 2)),
                *(("gpt", 6, 10), ("bert_large", 6, 0)),
            )
        ),
    ],
)
def test_training_is_that_of_one_rank(name: str, num_devices: int, seed: int) -> None:
    plan = unevenly(pase.search(graph_of(name), num_devices, keep_batch=True), seed)
    assert any(layer.uneven_dims for layer in plan)
    check(plan, trained_by(plan, optimizer), alone(name))


class Gated(nn.Module):
    """A product whose halves go different ways, one joined with a third tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.beside, self.last = nn.Linear(5, 10), nn.Linear(5, 8), nn.Linear(13, 5)

    def forward(self, x: Any) -> Any:
        gate, value = self.first(x).chunk(2, -1)
        joined = torch.cat([torch.tanh(gate) * value, self.beside(x)], -1)
        return self.last(torch.relu(joined)).square().sum()


def joined_of_three() -> Graph:
    net = Builder("pieces")
    x = net.input((6, 5))
    pieces = [net.add(dense, f"fc{width}", x, out=(("n", width),)) for width in (5, 2, 3)]
    x = net.add(concat, "joined", *pieces, dims=("b", "n"), along="n")
    net.add(softmax_loss, "loss", net.add(dense, "last", x, out=(("n", 5),)))
    return net.build()


@cache
def in_pieces(kind: str) -> tuple[Graph, Trained]:
    graph = joined_of_three() if kind == "built in" else pase.load((Gated(), (torch.zeros(6, 5),)))
    return graph, trained_by(pase.search(graph, 1), optimizer)


@pytest.mark.parametrize(
    ("kind", "num_devices", "seed"),
    [
        *(("built in", 6, 0), ("imported", 4, 0)),
        *(
            pytest.param(*case, marks=pytest.mark.full)
            for case in (
                *(("built in", 4, 0), ("built in", 4, 1), ("built in", 6, 1)),
                *(("imported", 6, 0), ("imported", 6, 1), ("imported", 4, 1)),
            )
        ),
    ],
)
def test_uneven_slices_of_what_is_joined_or_taken_apart(kind: str, num_devices: int, seed: int) -> None:
    """Parts of a concatenation have points of several of its pieces; all bytes are those that are predicted."""
    graph, own = in_pieces(kind)
    plan = unevenly(pase.search(graph, num_devices, keep_batch=True), seed)
    along = {"joined": "n", "cat": "n", "first": "n"}
    layers = [
        replace(layer, splits={**dict.fromkeys(layer.dims, 1), along[layer.name]: num_devices})
        if layer.name in along
        else layer
        for layer in plan
    ]
    plan = replace(plan, layers=tuple(layers))
    assert all(layer.uneven_dims == ("n",) for layer in plan if layer.name in along)
    check(plan, trained_by(plan, optimizer), own)
