"""Exported placements, as DTensor reads them on four ranks: each rank has its own part of every tensor."""

import ast
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pase import search
from pase.graph import Builder, Graph
from pase.graph.operators import attention, dense, elementwise, layer_norm, softmax_loss
from pase.models import build
from pase.planning.plan import Plan
from pase.targets.named_mesh import named_mesh
from pase.views.exports import export
from pase.views.exports.named_mesh import in_mesh_order
from tests.exports.boxes import named_tensors, pairs, plan_boxes
from tests.exports.example import write_example
from tests.exports.placements import mesh_plan
from tests.networks import slow_machine
from tests.runtime.plans import make_plan, random_plan
from tests.targets.torch.ranks import Pool

pytest.importorskip("torch")

from tests.exports import on_torch

PROCESSES = 4


def _block() -> Graph:
    """Self-attention and a feed-forward network, each with its residual connection and normalisation."""
    net = Builder("block")
    lead, heads, dims = ("b", "s"), (("h", 4), ("k", 4)), ("b", "s", "d")
    x = net.add(dense, "embed", net.input((2, 8, 6)), lead=lead, reduce=("c",), out=(("d", 16),))
    y = net.add(layer_norm, "norm1", x)
    q, k, v = (net.add(dense, name, y, lead=lead, reduce=("d",), out=heads) for name in "qkv")
    y = net.add(attention, "attention", q, k, v)
    y = net.add(dense, "o", y, lead=lead, reduce=("h", "k"), out=(("d", 16),))
    x = net.add(elementwise, "add1", x, y, dims=dims)
    y = net.add(layer_norm, "norm2", x)
    y = net.add(dense, "ff1", y, lead=lead, reduce=("d",), out=(("e", 32),), activation="gelu")
    y = net.add(dense, "ff2", y, lead=lead, reduce=("e",), out=(("d", 16),))
    x = net.add(elementwise, "add2", x, y, dims=dims)
    x = net.add(dense, "fc", x, lead=lead, reduce=("d",), out=(("n", 8),))
    net.add(softmax_loss, "loss", x, dims=("b", "s", "n"))
    return net.build()


def _mlp() -> Graph:
    return build("mlp", batch=4, arguments={"inputs": 8, "hidden": 16, "layers": 4, "classes": 8})


PLANS: dict[str, Callable[[], Plan]] = {
    "searched block": lambda: search(_block(), PROCESSES, machine=slow_machine()),
    "mlp on one mesh": lambda: mesh_plan(_mlp(), PROCESSES, seed=1),
    "mlp on any devices": lambda: random_plan(_mlp(), PROCESSES, seed=4),
}


@pytest.mark.parametrize("name", PLANS)
def test_ranks_hold_the_parts_that_the_plan_gives_them(ranks: Pool, name: str) -> None:
    plan = PLANS[name]()
    assert any(prod(layer.splits.values()) == PROCESSES for layer in plan.layers)
    mesh, tensors = in_mesh_order(named_mesh(plan)), named_tensors(plan)
    products = [op.name for op in plan.graph.operators if op.kind == "dense" and len(op.reads[0].shape) == 2]
    found = ranks.run(on_torch.held, export(plan, "torch").text, tensors, products, world=PROCESSES)
    kept = {layer.name: layer.keeps_devices for layer in mesh.layers}
    for number, (operator, access, tensor) in enumerate(pairs(plan, mesh)):
        assert not any(dim.reason for dim in tensor.dims)
        whole, boxes = np.arange(float(prod(access.shape))).reshape(access.shape), plan_boxes(plan, operator, access)
        # The process of rank r uses the device that is at place r of the mesh.
        parts = [whole[tuple(slice(*span) for span in boxes[device] if span)].tolist() for device in mesh.devices]
        held = [local[number].tolist() for local, _ in found]
        if kept[operator.name]:
            assert held == parts, (operator.name, access.tensor)
        else:
            assert sorted(held) == sorted(parts), (operator.name, access.tensor)
    # What PyTorch makes of the product of tensors that lie so is what the plan expects.
    assert all(is_expected for _, own in found for is_expected in own)


def test_the_program_of_the_documentation_computes_the_same(ranks: Pool, tmp_path: Path) -> None:
    write_example("torch", PROCESSES, tmp_path)
    ranks.run(on_torch.example, tmp_path, world=PROCESSES)


def _placements(text: str) -> Any:
    """PLACEMENTS read without PyTorch: Shard(0) as 0, Replicate() as "whole", Partial() as "sum"."""
    (table,) = (
        node.value
        for node in ast.parse(text).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "PLACEMENTS"
    )
    known = {"Replicate()": "whole", "Partial()": "sum"}

    def value(node: ast.expr) -> Any:
        match node:
            case ast.Dict():
                return {ast.literal_eval(k): value(v) for k, v in zip(node.keys, node.values, strict=True) if k}
            case ast.List():
                return [value(element) for element in node.elts]
            case ast.Call(func=ast.Name(id="Shard"), args=[ast.Constant(value=int(dim))], keywords=[]):
                return dim
            case _:
                return known[ast.unparse(node)]

    return value(table)


def _one_layer(splits: dict[str, int]) -> str:
    net = Builder("one")
    net.add(dense, "fc", net.input((8, 8)), out=(("n", 8),))
    return export(make_plan(net.build(), 8, {"fc": splits}), "torch").text


def test_a_split_of_what_is_summed_leaves_partial_outputs() -> None:
    entry = _placements(_one_layer({"b": 2, "c": 4}))["fc"]
    assert entry == {
        "inputs": [[0, 1]],
        "parameters": {"w": ["whole", 0], "bias": ["whole", "whole"]},
        "outputs": [[0, "whole"]],
        "partial_outputs": [[0, "sum"]],
    }
    assert "partial_outputs" not in _placements(_one_layer({"b": 2, "n": 4}))["fc"]


def test_layers_that_count_parts_in_another_order_are_named() -> None:
    net = Builder("two")
    x = net.add(dense, "one", net.input((8, 8)), out=(("n", 8),))
    x = net.add(dense, "other", x, out=(("n", 8),))
    net.add(dense, "half", x, out=(("n", 8),))
    splits = {"one": {"b": 4}, "other": {"b": 4}, "half": {"b": 2}}
    exported = export(make_plan(net.build(), 4, splits, {"other": (0, 2, 1, 3)}), "torch")
    (note,) = exported.notes
    assert note.startswith("on other devices than the plan's: other; DTensor counts")
    assert f"- {note}" in exported.text
    assert _placements(exported.text)["other"]["inputs"] == [[0, 0]]
    assert export(make_plan(net.build(), 4, splits, {"other": (0, 2, 1, 3)}), "jax").notes == ()
