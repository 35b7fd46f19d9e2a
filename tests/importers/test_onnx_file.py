"""ONNX models: the vertices, parameters and FLOP that they come to, whatever their batch and opset."""

from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("onnx")

import onnx
from onnx import helper, shape_inference

from pase.errors import ModelError
from pase.importers.ir import ops
from pase.importers.ir.trace import Trace
from pase.importers.lower import lower
from pase.importers.passes import run_passes
from tests.importers.onnx_models import (
    BOOL,
    INT64,
    NEWEST,
    convolutional,
    feed,
    model,
    node,
    number,
    one_process,  # noqa: F401
    traced,
    transformer,
    weight,
    whole,
)

pytestmark = pytest.mark.usefixtures("one_process")

LIGHT = Path(onnx.__file__).parent / "backend" / "test" / "data" / "light"
"""Models of the zoo without their weights' values, which ship with the package."""

ZOO = {
    "bvlc_alexnet": (40, 14, 60_965_224),
    "densenet121": (1746, 305, 7_978_856 + 2 * 41_824),
    "inception_v1": (237, 84, 6_998_552),
    "inception_v2": (916, 163, 11_214_888),
    "resnet50": (415, 126, 25_557_032),
    "shufflenet": (446, 140, 1_393_320),
    "squeezenet": (105, 39, 1_235_496),
    "vgg19": (82, 25, 143_667_240),
    "zfnet512": (38, 14, 87_250_536),
}
"""Operators before, vertices after, and parameters: of AlexNet, GoogLeNet, ResNet-50, SqueezeNet and VGG-19 those that
are published; DenseNet-121 has a second scale and shift behind each of its normalisations.
"""


def _flop(proto: Any, batch: int = 1) -> int:
    """Return 2 FLOP for each multiplication of the convolutions and products of a model, by ONNX's shapes of them."""
    inferred = shape_inference.infer_shapes(proto, data_prop=True).graph
    shapes = {
        info.name: [dim.dim_value for dim in info.type.tensor_type.shape.dim]
        for info in (*inferred.value_info, *inferred.input, *inferred.output)
    } | {tensor.name: list(tensor.dims) for tensor in inferred.initializer}
    total = 0
    for each in inferred.node:
        if each.op_type == "Conv":
            total += 2 * prod(shapes[each.output[0]]) * prod(shapes[each.input[1]][1:])
        elif each.op_type in ("Gemm", "MatMul"):
            flips = any(a.name == "transA" and a.i for a in each.attribute)
            total += 2 * prod(shapes[each.output[0]]) * shapes[each.input[0]][0 if flips else -1]
    return batch * total


IN_THE_SUITE = ("resnet50", "shufflenet", "squeezenet", "bvlc_alexnet")
"""Networks that stand for the others, which have the same layers."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in IN_THE_SUITE else pytest.mark.full) for name in ZOO]
)
def test_a_model_of_the_zoo_comes_to_its_vertices_parameters_and_flop(name: str) -> None:
    before, after, parameters = ZOO[name]
    path = LIGHT / f"light_{name}.onnx"
    trace = traced(path)
    graph = lower(run_passes(trace)[-1]).graph
    assert trace.num_source_operators == before == len(onnx.load(path).graph.node)
    assert len(graph.operators) == after
    assert trace.num_parameters == graph.num_parameters == parameters
    assert graph.forward_flop(contractions_only=True) == _flop(onnx.load(path))
    assert not any(isinstance(each.op, ops.Generic) for each in trace.nodes)


@pytest.mark.parametrize("name", ["resnet50", "shufflenet"])
def test_a_model_of_the_zoo_takes_another_batch(name: str) -> None:
    path = LIGHT / f"light_{name}.onnx"
    one, many = traced(path), traced(path, batch=6)
    assert [type(each.op) for each in one.nodes] == [type(each.op) for each in many.nodes]
    for a, b in zip(one.nodes, many.nodes, strict=True):
        for before, after in zip(a.outputs, b.outputs, strict=True):
            if before.name in {use.value for each in one.nodes for use in each.inputs}:
                assert after.shape == (
                    (6 * before.shape[0], *before.shape[1:]) if before.shape[0] == 1 else before.shape
                )
    graph = lower(run_passes(many)[-1]).graph
    assert graph.forward_flop(contractions_only=True) == 6 * _flop(onnx.load(path))
    assert len(graph.operators) == ZOO[name][1]
    assert any("the exported batch was written into the model: Reshape" in note for note in many.notes)


_OTHERS = [pytest.param(opset, marks=pytest.mark.full) for opset in range(8, NEWEST) if opset not in (9, 13, 18)]


@pytest.mark.parametrize("opset", [7, 9, 13, 18, NEWEST, *_OTHERS])
def test_every_opset_is_read_alike(opset: int) -> None:
    # LayerNormalization and the like apart, these operators are in all of them, in other forms.
    proto = convolutional(opset)
    trace = traced(proto)
    graph = lower(run_passes(trace)[-1]).graph
    assert [op.kind for op in graph.operators] == ["conv2d", "batch_norm", "pool2d", "dense", "softmax"]
    assert graph.num_parameters == 6 * 27 + 6 + 2 * 6 + 960 + 10
    assert graph.forward_flop(contractions_only=True) == _flop(proto) == 2 * 2 * (6 * 64 * 27 + 960)


def test_an_opset_that_is_newer_than_what_is_installed_is_read_as_the_newest() -> None:
    trace = traced(convolutional(NEWEST + 3))
    assert trace.notes == (
        f"operators are of opset {NEWEST + 3}, read as those of {NEWEST}, the newest that is installed",
    )


# -- another batch than the exported one


def _shapes(trace: Trace) -> dict[str, tuple[int, ...]]:
    return {value.name: value.shape for each in trace.nodes for value in each.outputs}


@pytest.mark.parametrize("exported", [1, 2])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("steps", [1, 5])
def test_a_batch_that_is_written_into_reshapes_is_replaced(exported: int, batch: int, steps: int) -> None:
    found = traced(transformer(exported, steps=steps), batch=batch)
    assert _shapes(found) == _shapes(traced(transformer(batch, steps=steps)))
    changed = any("instead of" in note for note in found.notes)
    assert changed == (exported != batch)


@pytest.mark.parametrize("exported", [1, 2])
@pytest.mark.parametrize("batch", [3, 4])
def test_a_batch_that_is_put_together_with_heads_and_steps_is_replaced(exported: int, batch: int) -> None:
    proto = transformer(exported, is_first=False)
    found = traced(proto, **{"x.1": batch})
    assert _shapes(found) == _shapes(traced(transformer(batch, is_first=False)))


def _class_token(batch: int, *, is_expanded: bool) -> Any:
    nodes = [
        *([node("Expand", ["token", "shape"], ["t"])] if is_expanded else [node("Identity", ["token"], ["t"])]),
        node("Concat", ["t", "x"], ["c"], axis=1, name="join"),
        node("Add", ["c", "positions"], ["y"]),
    ]
    weights = [weight("token", 1, 1, 4), weight("positions", 1, 6, 4), whole("shape", batch, 1, 4)]
    return model(nodes, [feed("x", (batch, 5, 4))], ["y"], weights)


@pytest.mark.parametrize(("exported", "is_expanded"), [(1, False), (1, True), (2, True)])
def test_a_token_of_one_example_is_repeated_for_all(exported: int, is_expanded: bool) -> None:
    found = traced(_class_token(exported, is_expanded=is_expanded), batch=3)
    assert _shapes(found)["y"] == (3, 6, 4)
    assert any(isinstance(each.op, ops.Broadcast) and each.outputs[0].shape == (3, 1, 4) for each in found.nodes)
    assert found.num_parameters == 4 + 24


def test_sizes_of_a_resize_follow_the_batch() -> None:
    resize = node("Resize", ["x", "", "", "sizes"], ["y"], mode="nearest")
    proto = model([resize], [feed("x", (1, 3, 4, 4))], ["y"], [whole("sizes", 1, 3, 8, 6)])
    (found,) = traced(proto, batch=7).nodes
    assert found.outputs[0].shape == (7, 3, 8, 6)
    assert found.op == ops.Generic(passes=((0, 0), (1, 1)))


def test_a_batch_that_cannot_be_replaced_is_said_to_be_written_into_the_model() -> None:
    nodes = [node("Squeeze", ["x", "axes"], ["s"], name="drop"), node("Relu", ["s"], ["y"])]
    proto = model(nodes, [feed("x", (1, 3))], ["y"], [whole("axes", 0)])
    with pytest.raises(
        ModelError, match=r"operator Squeeze 'drop' cannot take .*the batch may be written into the model"
    ):
        traced(proto, batch=4)


@pytest.mark.parametrize(
    ("operator", "shape", "made"), [("Squeeze", (1, 3), (3,)), ("Unsqueeze", (3,), (1, 3)), ("Tile", (2, 3), (4, 3))]
)
def test_a_batch_that_contradicts_a_shape_in_the_file_is_refused(
    operator: str, shape: tuple[int, ...], made: tuple[int, ...]
) -> None:
    # How it is called is an input, so that nothing but the file says what it makes.
    nodes = [node(operator, ["x", "how"], ["s"], name="op"), node("Relu", ["s"], ["y"])]
    proto = model(nodes, [feed("x", shape), feed("how", (2,) if operator == "Tile" else (1,), INT64)], ["y"])
    proto.graph.value_info.append(feed("s", made))
    assert _shapes(traced(proto))["y"] == made
    with pytest.raises(ModelError, match=rf"operator {operator} 'op' .*makes \[.*\] of \["):
        traced(proto, **{"x.0": 5})


def test_a_batch_that_is_left_open_need_not_be_one() -> None:
    # Written for pairs of examples: a batch of one, that of the reference, has no half.
    nodes = [node("Reshape", ["x", "pairs"], ["p"]), node("Relu", ["p"], ["y"])]
    proto = model(nodes, [feed("x", ("batch", 3))], ["y"], [whole("pairs", -1, 2, 3)])
    assert _shapes(traced(proto, batch=6))["y"] == (3, 2, 3)


# -- inputs


def _dense(*dims: int | str | None) -> Any:
    return model([node("MatMul", ["tokens", "w"], ["y"])], [feed("tokens", dims)], ["y"], [weight("w", 8, 4)])


def test_dims_that_are_left_open_are_given_by_name_or_position() -> None:
    assert _shapes(traced(_dense("batch", "sequence", 8), batch=3, sequence="16"))["y"] == (3, 16, 4)
    assert _shapes(traced(_dense("batch", "sequence", 8), batch=5, sequence=2))["y"] == (5, 2, 4)
    assert _shapes(traced(_dense(None, None, 8), **{"tokens.0": 2, "tokens.1": 7}))["y"] == (2, 7, 4)
    assert _shapes(traced(_dense(None, "past + new", 8), batch=2, past=3, new=4))["y"] == (2, 7, 4)
    # A dim that is named so is the batch wherever it stands.
    assert _shapes(traced(_dense("sequence", "batch_size", 8), batch=2, sequence=9))["y"] == (9, 2, 4)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ((None, 3), (None, 4)),
        (("unk__7", 3), ("unk__8", 4)),
        (("samples", 3), ("other", 4)),
        (("batch", 3), (None, 4)),
        ((2, 3), (2, 4)),
    ],
)
def test_the_batch_is_that_of_every_input(first: Any, second: Any) -> None:
    proto = model([node("Concat", ["a", "b"], ["y"], axis=1)], [feed("a", first), feed("b", second)], ["y"])
    trace = traced(proto, batch=5)
    assert _shapes(trace)["y"] == (5, 7)
    assert trace.notes[0] == "the batch is dim 0 of 'a', dim 0 of 'b'"


@pytest.mark.parametrize(
    ("dims", "given", "message"),
    [
        (
            ("batch", 3, 8),
            {},
            r"dim 0 of input 'tokens', 'batch', has no fixed extent; give it as --batch N or --arg b",
        ),
        (("n", "sequence", 8), {"n": 2}, r"dim 1 of input 'tokens', 'sequence', .* give it as --arg sequence=N$"),
        ((None, 3, 8), {}, r"dim 0 of input 'tokens' has no fixed extent; give it as --batch N or --arg tokens.0=N"),
        ((2, 0, 8), {}, r"dim 1 of input 'tokens' has no fixed extent; give it as --arg tokens.1=N"),
        (("n", "sequence", 8), {"sequense": 2}, r"unknown dim 'sequense': did you mean 'sequence'"),
        (("n", 3, 8), {"n": "many"}, r"n=many is not usable; expected a whole number from 0"),
        (("n", 3, 8), {"n": -1}, r"n=-1 is not usable"),
        (("n", 3, 8), {"batch": 0}, r"batch=0 is not usable; expected a whole number from 1"),
    ],
)
def test_dims_without_an_extent_are_named(dims: Any, given: dict[str, Any], message: str) -> None:
    batch = given.pop("batch", None) if "batch" in given and "batch" not in dims else None
    with pytest.raises(ModelError, match=message):
        traced(_dense(*dims), batch, **given)


def test_an_initialiser_that_is_listed_as_an_input_is_a_weight() -> None:
    proto = _dense(2, 3, 8)
    proto.graph.input.append(feed("w", (8, 4)))
    trace = traced(proto)
    assert [(leaf.value.name, leaf.role) for leaf in trace.leaves] == [("tokens", "input"), ("w", "parameter")]


# -- what is a parameter


def _roles(nodes: list[Any], initialisers: list[Any], inputs: list[Any]) -> dict[str, str]:
    trace = traced(model(nodes, inputs, [nodes[-1].output[0]], initialisers))
    return {leaf.value.name: leaf.role for leaf in trace.leaves if leaf.role != "input"}


def test_weights_are_told_by_their_use() -> None:
    x = feed("x", (2, 3, 4, 4))
    normal = node("BatchNormalization", ["x", "s", "b", "m", "v"], ["n"])
    found = _roles(
        [normal, node("Mul", ["n", "gain"], ["y"])], [*(weight(n, 3) for n in "sbmv"), weight("gain", 1, 3, 1, 1)], [x]
    )
    assert found == {"s": "parameter", "b": "parameter", "m": "constant", "v": "constant", "gain": "parameter"}


def test_single_floats_are_constants_but_for_a_bias_of_one_unit() -> None:
    x = feed("x", (2, 4))
    product = node("MatMul", ["x", "w"], ["p"])
    root = [product, node("Add", ["x", "e"], ["y"])]
    assert _roles(root, [weight("w", 4, 1), weight("e", 1)], [x]) == {"w": "parameter"}
    bias = [product, node("Add", ["p", "b"], ["y"])]
    assert _roles(bias, [weight("w", 4, 1), weight("b", 1)], [x]) == {"w": "parameter", "b": "parameter"}
    gemm = [node("Gemm", ["x", "w", "b"], ["y"])]
    assert _roles(gemm, [weight("w", 4, 1), weight("b", 1)], [x]) == {"w": "parameter", "b": "parameter"}


def test_tables_that_meet_positions_alone_are_no_weights() -> None:
    nodes = [
        node("Cast", ["at"], ["f"], to=1),
        node("MatMul", ["frequencies", "f"], ["angles"]),
        node("Cos", ["angles"], ["c"]),
        node("Transpose", ["c"], ["t"], perm=[0, 2, 1]),
        node("Gather", ["table", "ids"], ["e"]),
        node("Mul", ["e", "t"], ["y"]),
    ]
    inputs = [feed("at", (1, 1, 5), INT64), feed("ids", (2, 5), INT64)]
    roles = _roles(nodes, [weight("frequencies", 1, 6, 1), weight("table", 9, 6)], inputs)
    assert roles == {"frequencies": "constant", "table": "parameter"}


def test_a_mask_of_attentions_scores_is_no_weight() -> None:
    nodes = [
        node("MatMul", ["q", "k"], ["s"]),
        node("Div", ["s", "root"], ["d"]),
        node("Add", ["d", "mask"], ["m"]),
        node("Softmax", ["m"], ["p"]),
        node("MatMul", ["p", "q"], ["o"]),
        node("Mul", ["o", "gain"], ["y"]),
    ]
    inputs = [feed("q", (2, 5, 5)), feed("k", (2, 5, 5))]
    assert _roles(nodes, [weight("mask", 5, 5), weight("gain", 5), number("root", 2.0)], inputs) == {
        "mask": "constant",
        "gain": "parameter",
    }


def test_weights_that_are_read_twice_are_one() -> None:
    nodes = [
        node("Gather", ["table", "ids"], ["e"]),
        node("Identity", ["table"], ["same"]),
        node("Transpose", ["same"], ["t"]),
        node("MatMul", ["e", "t"], ["y"]),
    ]
    trace = traced(model(nodes, [feed("ids", (2, 5), INT64)], ["y"], [weight("table", 9, 6)]))
    graph = lower(run_passes(trace)[-1]).graph
    assert trace.num_parameters == graph.num_parameters == 54
    assert len(graph.operators) == 2


# -- shapes that are computed


def test_shapes_that_a_model_computes_are_worked_out() -> None:
    nodes = [
        node("Shape", ["x"], ["s"]),
        node("Gather", ["s", "zero"], ["b"]),
        node("Unsqueeze", ["b", "zeros"], ["bu"]),
        node("Slice", ["s", "one", "three"], ["rest"]),
        node("ReduceProd", ["rest"], ["p"], keepdims=1),
        node("Div", ["p", "two"], ["h"]),
        node("Concat", ["bu", "two", "h"], ["target"], axis=0),
        node("Reshape", ["x", "target"], ["r"]),
        node("ConstantOfShape", ["target"], ["ones"], value=helper.make_tensor("v", 1, [1], [2.0])),
        node("Add", ["r", "ones"], ["a"]),
        node("Range", ["zero", "count", "step"], ["range"]),
        node("Cast", ["range"], ["rf"], to=1),
        node("Mul", ["a", "rf"], ["y"]),
    ]
    stored = [whole("zeros", 0), whole("one", 1), whole("three", 3), whole("two", 2)]
    stored += [onnx.numpy_helper.from_array(np.asarray(v), n) for n, v in (("zero", 0), ("count", 6), ("step", 1))]
    proto = model(nodes, [feed("x", ("n", 4, 3))], ["y"], stored)
    trace = traced(proto, batch=5)
    assert [each.origin.operator for each in trace.nodes] == ["Reshape", "Add", "Mul"]
    assert _shapes(trace)["y"] == (5, 2, 6)
    assert trace.num_parameters == 0


def test_an_if_of_a_known_condition_is_its_branch() -> None:
    def branch(name: str, operator: str) -> Any:
        out = helper.make_tensor_value_info(f"{name}_out", 1, None)
        nodes = [node(operator, ["x"], ["inner"]), node("Mul", ["inner", "gain"], [f"{name}_out"])]
        return helper.make_graph(nodes, name, [], [out], [weight("gain", 3)])

    nodes = [
        node("Shape", ["x"], ["s"]),
        node("Size", ["s"], ["rank"]),
        node("Equal", ["rank", "two"], ["is"]),
        node("If", ["is"], ["c"], then_branch=branch("yes", "Relu"), else_branch=branch("no", "Tanh"), name="choice"),
        node("Add", ["c", "x"], ["y"]),
    ]
    two = onnx.numpy_helper.from_array(np.asarray(2), "two")
    for shape, operator in (((2, 3), "Relu"), ((2, 3, 3), "Tanh")):
        trace = traced(model(nodes, [feed("x", shape)], ["y"], [two]))
        assert [each.origin.operator for each in trace.nodes] == [operator, "Mul", "Identity", "Add"]
        assert trace.num_parameters == 3


@pytest.mark.parametrize(
    ("operator", "inputs", "message"),
    [
        ("Loop", ["", "flag", "x"], r"operator Loop 'flow' repeats a graph of its own; export .* loop written out"),
        ("If", ["flag"], r"operator If 'flow' is control flow that depends on values; export .* branches alone"),
        ("DynamicQuantizeLinear", ["x"], r"operator DynamicQuantizeLinear 'flow' computes with quantised numbers"),
        ("SplitToSequence", ["x"], r"operator SplitToSequence 'flow' makes or reads a list of tensors"),
        ("NonZero", ["x"], r"the shape of 'c', which operator NonZero 'flow' makes, depends on values: dim 1 is not"),
    ],
)
def test_what_cannot_be_imported_is_named(operator: str, inputs: list[str], message: str) -> None:
    body = helper.make_graph([node("Relu", ["x"], ["o"])], "b", [], [helper.make_tensor_value_info("o", 1, None)])
    attributes: dict[str, Any] = {
        "Loop": {"body": body},
        "If": {"then_branch": body, "else_branch": body},
    }.get(operator, {})
    nodes = [node(operator, inputs, ["c"], name="flow", **attributes)]
    proto = model(nodes, [feed("x", (2, 3)), feed("flag", (), BOOL)], ["c"])
    with pytest.raises(ModelError, match=message):
        traced(proto)


@pytest.mark.parametrize(
    ("nodes", "message"),
    [
        ([node("Relu", ["z"], ["y"], name="r")], r"operator Relu 'r' reads 'z', which nothing before it makes"),
        ([node("Relu", ["x"], ["z"])], r"the model's output 'y' is made by no operator"),
        ([node("Relu", ["x"], ["y"]), node("Relu", ["x"], ["y"])], r"two tensors are named 'y'"),
    ],
)
def test_graphs_that_do_not_hang_together_are_refused(nodes: list[Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        traced(model(nodes, [feed("x", (2, 3))], ["y"]))


def test_layers_are_named_as_in_the_source() -> None:
    nodes = [
        node("MatMul", ["x", "w"], ["p"], name="/encoder/dense/MatMul"),
        node("Div", ["p", "root"], ["y"], name="plain"),
    ]
    trace = traced(model(nodes, [feed("x", (2, 3))], ["y"], [weight("w", 3, 3), number("root", 2.0)]))
    assert [each.origin.scope for each in trace.nodes] == ["encoder/dense", "plain"]
    assert traced(convolutional(13)).nodes[0].name == "conv"
