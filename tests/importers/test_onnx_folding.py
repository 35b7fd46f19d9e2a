"""Shapes that a model computes are worked out as ONNX's own reference evaluator does it."""

from typing import Any

import numpy as np
import pytest

pytest.importorskip("onnx")

from onnx import helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from pase.errors import ModelError
from pase.importers.onnx.file import trace_onnx
from pase.importers.onnx.folding import MAX_ELEMENTS, Folding, fold
from pase.importers.onnx.model import open_model
from tests.importers.onnx_models import NEWEST, feed, model, node, whole

A = np.array([[3, -4, 5], [6, 7, -8]])
B = np.array([[2, 3, -2], [4, -5, 3]])
CASES: dict[str, tuple[str, list[Any], dict[str, Any]]] = {
    "add": ("Add", [A, B], {}),
    "subtract": ("Sub", [A, B[:1]], {}),
    "multiply": ("Mul", [A, B], {}),
    "divide_towards_zero": ("Div", [A, B], {}),
    "divide_floats": ("Div", [A.astype(np.float32), B.astype(np.float32)], {}),
    "remainder": ("Mod", [A, B], {}),
    "negate": ("Neg", [A], {}),
    "root": ("Sqrt", [np.abs(A).astype(np.float32)], {}),
    "ceil": ("Ceil", [np.array([1.5, -1.5], np.float32)], {}),
    "equal": ("Equal", [A, np.array(5)], {}),
    "where": ("Where", [A > 0, A, B], {}),
    "not": ("Not", [A > 0], {}),
    "max": ("Max", [A, B, np.array(4)], {}),
    "min": ("Min", [A, B], {}),
    "cast": ("Cast", [np.array([1.9, -1.9], np.float32)], {"to": 7}),
    "constant_of_shape": ("ConstantOfShape", [np.array([2, 3])], {}),
    "range": ("Range", [np.array(3), np.array(-7), np.array(-3)], {}),
    "gather": ("Gather", [A, np.array([[-1, 0]])], {"axis": 1}),
    "concat": ("Concat", [A, B, A], {"axis": -1}),
    "unsqueeze": ("Unsqueeze", [A, np.array([0, -1])], {}),
    "squeeze": ("Squeeze", [A[None], np.array([0])], {}),
    "squeeze_all": ("Squeeze", [A[None, :, :1]], {}),
    "reshape": ("Reshape", [A, np.array([0, -1, 1])], {}),
    "slice": ("Slice", [A, np.array([-1]), np.array([-99]), np.array([1]), np.array([-2])], {}),
    "slice_ends": ("Slice", [A, np.array([1, 0]), np.array([2**62, -1])], {}),
    "transpose": ("Transpose", [A], {}),
    "expand": ("Expand", [A[:, :1], np.array([4, 1, 3])], {}),
    "tile": ("Tile", [A, np.array([1, 2])], {}),
    "split": ("Split", [A, np.array([1, 2])], {"axis": 1}),
    "non_zero": ("NonZero", [A > 4], {}),
    "sum_over": ("ReduceSum", [A, np.array([1])], {"keepdims": 0}),
    "product": ("ReduceProd", [A], {}),
    "max_over": ("ReduceMax", [A, np.array([0])], {}),
    "cumulate": ("CumSum", [A, np.array(1)], {}),
    "triangle": ("Trilu", [A], {"upper": 0}),
    "identity": ("Identity", [A], {}),
}


@pytest.mark.parametrize("name", CASES)
def test_constants_are_worked_out(name: str) -> None:
    operator, inputs, attributes = CASES[name]
    outputs = ["y", "z"] if operator == "Split" else ["y"]
    made = node(operator, [f"i{k}" for k in range(len(inputs))], outputs, **attributes)
    stored = [numpy_helper.from_array(array, f"i{k}") for k, array in enumerate(inputs)]
    expected = ReferenceEvaluator(model([made], [], outputs, stored)).run(None, {})
    call = Folding(
        operator=operator, inputs=tuple(inputs), attributes=attributes, num_outputs=len(outputs), opset=NEWEST
    )
    found = fold(call)
    assert found is not None
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_array_equal(ours, theirs)
        assert ours.dtype == theirs.dtype


@pytest.mark.parametrize(
    ("operator", "inputs"),
    [
        ("ConstantOfShape", [np.array([MAX_ELEMENTS, 2])]),
        ("Expand", [np.array([1]), np.array([MAX_ELEMENTS + 1])]),
        ("Tile", [np.zeros(2), np.array([MAX_ELEMENTS])]),
        ("Range", [np.array(0), np.array(2**60), np.array(1)]),
        ("Add", [np.zeros((1000, 1)), np.zeros((1, 1000))]),
        ("Erf", [np.zeros(2)]),
    ],
)
def test_what_is_large_or_unknown_is_left_alone(operator: str, inputs: list[Any]) -> None:
    assert fold(Folding(operator=operator, inputs=tuple(inputs), attributes={}, num_outputs=1, opset=20)) is None


def test_a_slice_of_an_old_opset_has_attributes() -> None:
    call = Folding(
        operator="Slice",
        inputs=(np.arange(9),),
        attributes={"starts": (2,), "ends": (-1,), "axes": (0,)},
        num_outputs=1,
        opset=9,
    )
    found = fold(call)
    assert found is not None
    np.testing.assert_array_equal(found[0], np.arange(2, 8))


def test_a_shape_that_cannot_be_worked_out_is_told() -> None:
    nodes = [
        node("Shape", ["x"], ["s"]),
        node("Div", ["s", "zero"], ["d"], name="half"),
        node("Reshape", ["x", "d"], ["y"]),
    ]
    proto = model(nodes, [feed("x", (2, 3))], ["y"], [whole("zero", 0)])
    with pytest.raises(ModelError, match="operator Div 'half' cannot be worked out: a shape is divided by 0"):
        trace_onnx(open_model(proto))


def test_a_part_of_a_shape_is_known() -> None:
    nodes = [
        helper.make_node("Shape", ["x"], ["s"], start=1, end=-1),
        node("Size", ["x"], ["n"]),
        node("Unsqueeze", ["n", "zero"], ["nu"]),
        node("Concat", ["s", "nu"], ["t"], axis=0),
        node("Expand", ["w", "t"], ["y"]),
    ]
    proto = model(nodes, [feed("x", (2, 3, 4)), feed("w", (1, 1))], ["y"], [whole("zero", 0)])
    assert trace_onnx(open_model(proto)).values["y"].shape == (3, 24)
