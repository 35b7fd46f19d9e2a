"""Shapes that a model computes are worked out: against what the same is in NumPy, written by hand."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

pytest.importorskip("onnx")

from onnx import helper, numpy_helper

from pase.errors import ModelError
from pase.importers.isolated import Native
from pase.importers.onnx.file import MAX_ELEMENTS, Walk, trace_onnx
from pase.importers.onnx.model import open_model
from tests.importers.onnx_models import NEWEST, feed, kept_native, model, node, one_process, whole  # noqa: F401

A = np.array([[3, -4, 5], [6, 7, -8]])
B = np.array([[2, 3, -2], [4, -5, 3]])
CASES: dict[str, tuple[str, list[Any], dict[str, Any], list[Any]]] = {
    "add": ("Add", [A, B], {}, [A + B]),
    "subtract": ("Sub", [A, B[:1]], {}, [A - B[:1]]),
    "multiply": ("Mul", [A, B], {}, [A * B]),
    "divide_towards_zero": ("Div", [A, B], {}, [np.array([[1, -1, -2], [1, -1, -2]])]),
    "divide_floats": ("Div", [A.astype(np.float32), B.astype(np.float32)], {}, [(A / B).astype(np.float32)]),
    "remainder": ("Mod", [A, B], {}, [np.array([[1, 2, -1], [2, -3, 1]])]),
    "negate": ("Neg", [A], {}, [-A]),
    "root": ("Sqrt", [np.abs(A).astype(np.float32)], {}, [np.sqrt(np.abs(A).astype(np.float32))]),
    "ceil": ("Ceil", [np.array([1.5, -1.5], np.float32)], {}, [np.array([2, -1], np.float32)]),
    "equal": ("Equal", [A, np.array(5)], {}, [A == 5]),
    "where": ("Where", [A > 0, A, B], {}, [np.array([[3, 3, 5], [6, 7, 3]])]),
    "not": ("Not", [A > 0], {}, [A <= 0]),
    "max": ("Max", [A, B, np.array(4)], {}, [np.array([[4, 4, 5], [6, 7, 4]])]),
    "min": ("Min", [A, B], {}, [np.array([[2, -4, -2], [4, -5, -8]])]),
    "cast": ("Cast", [np.array([1.9, -1.9], np.float32)], {"to": 7}, [np.array([1, -1])]),
    "constant_of_shape": ("ConstantOfShape", [np.array([2, 3])], {}, [np.zeros((2, 3), np.float32)]),
    "range": ("Range", [np.array(3), np.array(-7), np.array(-3)], {}, [np.array([3, 0, -3, -6])]),
    "gather": ("Gather", [A, np.array([[-1, 0]])], {"axis": 1}, [np.array([[[5, 3]], [[-8, 6]]])]),
    "concat": ("Concat", [A, B, A], {"axis": -1}, [np.hstack([A, B, A])]),
    "unsqueeze": ("Unsqueeze", [A, np.array([0, -1])], {}, [A[None, :, :, None]]),
    "squeeze": ("Squeeze", [A[None], np.array([0])], {}, [A]),
    "squeeze_all": ("Squeeze", [A[None, :, :1]], {}, [A[:, 0]]),
    "reshape": ("Reshape", [A, np.array([0, -1, 1])], {}, [A[:, :, None]]),
    "slice": ("Slice", [A, np.array([-1]), np.array([-99]), np.array([1]), np.array([-2])], {}, [A[:, ::-2]]),
    "slice_ends": ("Slice", [A, np.array([1, 0]), np.array([2**62, -1])], {}, [A[1:, :-1]]),
    "transpose": ("Transpose", [A], {}, [A.T]),
    "expand": ("Expand", [A[:, :1], np.array([4, 1, 3])], {}, [np.stack([A[:, [0, 0, 0]]] * 4)]),
    "tile": ("Tile", [A, np.array([1, 2])], {}, [np.hstack([A, A])]),
    "split": ("Split", [A, np.array([1, 2])], {"axis": 1}, [A[:, :1], A[:, 1:]]),
    "non_zero": ("NonZero", [A > 4], {}, [np.array([[0, 1, 1], [2, 0, 1]])]),
    "sum_over": ("ReduceSum", [A, np.array([1])], {"keepdims": 0}, [np.array([4, 5])]),
    "product": ("ReduceProd", [A], {}, [np.array([[20160]])]),
    "max_over": ("ReduceMax", [A, np.array([0])], {}, [np.array([[6, 7, 5]])]),
    "cumulate": ("CumSum", [A, np.array(1)], {}, [np.array([[3, -1, 4], [6, 13, 5]])]),
    "triangle": ("Trilu", [A], {"upper": 0}, [np.array([[3, 0, 0], [6, 7, 0]])]),
    "identity": ("Identity", [A], {}, [A]),
}


pytestmark = pytest.mark.usefixtures("one_process")


@pytest.fixture(scope="module")
def process() -> Native:
    return kept_native()


def _known(process: Native, made: Any, inputs: Sequence[Any], opset: int = NEWEST) -> list[Any]:
    """Return what is known of an operator's results, its inputs being stored; None for one that is not known."""
    stored = [numpy_helper.from_array(np.asarray(array), name) for array, name in zip(inputs, made.input, strict=True)]
    proto = model([made], [], made.output, stored, opset=opset)
    constants = Walk(open_model(proto), {}, frozenset(), process).constants
    return [constants.get(name) for name in made.output]


def _check_known(found: list[Any], expected: list[Any]) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_array_equal(ours, theirs)
        assert ours.dtype == theirs.dtype


@pytest.mark.parametrize("name", CASES)
def test_constants_are_worked_out(name: str, process: Native) -> None:
    operator, inputs, attributes, expected = CASES[name]
    made = node(operator, [f"i{k}" for k in range(len(inputs))], [f"y{k}" for k in range(len(expected))], **attributes)
    _check_known(_known(process, made, inputs), expected)


@pytest.mark.parametrize(
    ("operator", "inputs"),
    [
        ("ConstantOfShape", [np.array([MAX_ELEMENTS, 2])]),
        ("ConstantOfShape", [np.array([2**20, 2**20, 2**2])]),
        ("Expand", [np.array([1]), np.array([MAX_ELEMENTS + 1])]),
        ("Expand", [np.array([1]), np.array([2**41])]),
        ("Tile", [np.zeros(2), np.array([MAX_ELEMENTS])]),
        ("Tile", [np.zeros(2), np.array([2**42])]),
        ("Range", [np.array(0), np.array(2**40), np.array(1)]),
        ("Tile", [np.zeros((1, 0)), np.array([2**30, 2])]),
        ("Range", [np.int32(-(2**31)), np.int32(2**31 - 1), np.int32(1)]),
        ("Add", [np.zeros((1000, 1)), np.zeros((1, 1000))]),
        ("Gather", [np.zeros((2, 1000)), np.zeros(1000, np.int64)]),
        ("Erf", [np.zeros(2)]),
    ],
)
def test_what_is_large_or_unknown_has_a_shape_alone(operator: str, inputs: list[Any], process: Native) -> None:
    made = node(operator, [f"i{k}" for k in range(len(inputs))], ["y"])
    assert _known(process, made, inputs) == [None]


def test_a_split_is_in_no_more_parts_than_it_has_results(process: Native) -> None:
    made = node("Split", ["x"], ["y"], name="cut", num_outputs=2**24)
    with pytest.raises(
        ModelError, match=r"operator Split 'cut' cannot be worked out: num_outputs is 16777216; expected 1"
    ):
        _known(process, made, [np.arange(4)])


@pytest.mark.parametrize("attributes", [{"value_string": "text"}, {"value_strings": ["one", "two"]}])
def test_a_text_is_no_constant(attributes: dict[str, Any], process: Native) -> None:
    assert _known(process, helper.make_node("Constant", [], ["y"], **attributes), []) == [None]


def test_a_constant_of_numbers_is_known(process: Native) -> None:
    made = helper.make_node("Constant", [], ["y"], value_ints=[3, 4])
    _check_known(_known(process, made, []), [np.array([3, 4])])


@pytest.mark.parametrize(
    ("operator", "inputs", "attributes", "opset", "expected"),
    [
        ("Slice", [np.arange(9)], {"starts": [2], "ends": [-1], "axes": [0]}, 9, [np.arange(2, 8)]),
        ("Unsqueeze", [A], {"axes": [0]}, 11, [A[None]]),
        ("Squeeze", [A[None]], {"axes": [0]}, 11, [A]),
        ("Squeeze", [A[None]], {}, 11, [A]),
        ("Split", [np.arange(4)], {"split": [1, 3]}, 11, [np.arange(1), np.arange(1, 4)]),
        ("ReduceSum", [A], {"axes": [0], "keepdims": 0}, 11, [np.array([9, 3, -3])]),
    ],
)
def test_an_operator_of_an_old_opset_has_attributes(
    operator: str, inputs: list[Any], attributes: dict[str, Any], opset: int, expected: list[Any], process: Native
) -> None:
    made = node(operator, ["x"], [f"y{k}" for k in range(len(expected))], **attributes)
    _check_known(_known(process, made, inputs, opset), expected)


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
