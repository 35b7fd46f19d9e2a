"""Shapes that a model computes are worked out: against what the same is in NumPy, written by hand."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

pytest.importorskip("onnx")

from onnx import helper, numpy_helper

from pase.errors import ModelError
from pase.importers.isolated import Native
from pase.importers.onnx.file import MAX_ELEMENTS, Walk
from pase.importers.onnx.model import open_model
from tests.importers.onnx_models import NEWEST, feed, kept_native, model, node, one_process, traced, whole  # noqa: F401

A = np.array([[3, -4, 5], [6, 7, -8]])
B = np.array([[2, 3, -2], [4, -5, 3]])
F = np.float32
CASES: list[tuple[str, list[Any], dict[str, Any], list[Any]]] = [
    ("Div", [A, B], {}, [np.array([[1, -1, -2], [1, -1, -2]])]),  # towards zero
    ("Div", [A.astype(F), B.astype(F)], {}, [(A / B).astype(F)]),
    ("Mod", [A, B], {}, [np.array([[1, 2, -1], [2, -3, 1]])]),
    ("Where", [A > 0, A, B], {}, [np.array([[3, 3, 5], [6, 7, 3]])]),
    ("Cast", [np.array([1.9, -1.9], F)], {"to": 7}, [np.array([1, -1])]),
    ("Constant", [], {"value_ints": [3, 4]}, [np.array([3, 4])]),
    ("ConstantOfShape", [np.array([2, 3])], {}, [np.zeros((2, 3), F)]),
    ("Range", [np.array(3), np.array(-7), np.array(-3)], {}, [np.array([3, 0, -3, -6])]),
    ("Concat", [A, B, A], {"axis": -1}, [np.hstack([A, B, A])]),
    ("Squeeze", [A[None], np.array([0])], {}, [A]),
    ("Squeeze", [A[None, :, :1]], {}, [A[:, 0]]),
    ("Reshape", [A, np.array([0, -1, 1])], {}, [A[:, :, None]]),
    ("Slice", [A, np.array([-1]), np.array([-99]), np.array([1]), np.array([-2])], {}, [A[:, ::-2]]),
    ("Slice", [A, np.array([1, 0]), np.array([2**62, -1])], {}, [A[1:, :-1]]),
    ("Expand", [A[:, :1], np.array([4, 1, 3])], {}, [np.stack([A[:, [0, 0, 0]]] * 4)]),
    ("Tile", [A, np.array([1, 2])], {}, [np.hstack([A, A])]),
    ("Split", [A, np.array([1, 2])], {"axis": 1}, [A[:, :1], A[:, 1:]]),
    ("NonZero", [A > 4], {}, [np.array([[0, 1, 1], [2, 0, 1]])]),
]
OLD: list[tuple[str, list[Any], dict[str, Any], list[Any]]] = [
    ("Slice", [np.arange(9)], {"starts": [2], "ends": [-1], "axes": [0]}, [np.arange(2, 8)]),
    ("Unsqueeze", [A], {"axes": [0]}, [A[None]]),
    ("Squeeze", [A[None]], {"axes": [0]}, [A]),
    ("Squeeze", [A[None]], {}, [A]),
    ("Split", [np.arange(4)], {"split": [1, 3]}, [np.arange(1), np.arange(1, 4)]),
    ("ReduceSum", [A], {"axes": [0], "keepdims": 0}, [np.array([9, 3, -3])]),
]
"""Of opset 9, in which more are attributes."""

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


def _node(operator: str, num_inputs: int, num_outputs: int = 1, **attributes: Any) -> Any:
    return node(operator, [f"i{k}" for k in range(num_inputs)], [f"y{k}" for k in range(num_outputs)], **attributes)


@pytest.mark.parametrize(
    ("operator", "inputs", "attributes", "expected", "opset"),
    [*((*case, NEWEST) for case in CASES), *((*case, 9) for case in OLD)],
)
def test_constants_are_worked_out(
    operator: str, inputs: list[Any], attributes: dict[str, Any], expected: list[Any], opset: int, process: Native
) -> None:
    made = _node(operator, len(inputs), len(expected), **attributes)
    for ours, theirs in zip(_known(process, made, inputs, opset), expected, strict=True):
        np.testing.assert_array_equal(ours, theirs)
        assert ours.dtype == theirs.dtype


@pytest.mark.parametrize(
    ("operator", "inputs", "attributes"),
    [
        ("ConstantOfShape", [np.array([MAX_ELEMENTS, 2])], {}),
        ("ConstantOfShape", [np.array([2**20, 2**20, 2**2])], {}),
        ("Expand", [np.array([1]), np.array([MAX_ELEMENTS + 1])], {}),
        ("Expand", [np.array([1]), np.array([2**41])], {}),
        ("Tile", [np.zeros(2), np.array([MAX_ELEMENTS])], {}),
        ("Tile", [np.zeros(2), np.array([2**42])], {}),
        ("Range", [np.array(0), np.array(2**40), np.array(1)], {}),
        ("Tile", [np.zeros((1, 0)), np.array([2**30, 2])], {}),
        ("Range", [np.int32(-(2**31)), np.int32(2**31 - 1), np.int32(1)], {}),
        ("Add", [np.zeros((1000, 1)), np.zeros((1, 1000))], {}),
        ("Gather", [np.zeros((2, 1000)), np.zeros(1000, np.int64)], {}),
        ("Erf", [np.zeros(2)], {}),
        ("Constant", [], {"value_string": "text"}),
        ("Constant", [], {"value_strings": ["one", "two"]}),
    ],
)
def test_what_is_large_or_unknown_has_a_shape_alone(
    operator: str, inputs: list[Any], attributes: dict[str, Any], process: Native
) -> None:
    assert _known(process, _node(operator, len(inputs), **attributes), inputs) == [None]


def test_a_split_is_in_no_more_parts_than_it_has_results(process: Native) -> None:
    made = node("Split", ["x"], ["y"], name="cut", num_outputs=2**24)
    with pytest.raises(
        ModelError, match=r"operator Split 'cut' cannot be worked out: num_outputs is 16777216; expected 1"
    ):
        _known(process, made, [np.arange(4)])


def test_a_shape_that_cannot_be_worked_out_is_told() -> None:
    nodes = [
        node("Shape", ["x"], ["s"]),
        node("Div", ["s", "zero"], ["d"], name="half"),
        node("Reshape", ["x", "d"], ["y"]),
    ]
    proto = model(nodes, [feed("x", (2, 3))], ["y"], [whole("zero", 0)])
    with pytest.raises(ModelError, match="operator Div 'half' cannot be worked out: a shape is divided by 0"):
        traced(proto)


def test_a_part_of_a_shape_is_known() -> None:
    nodes = [
        helper.make_node("Shape", ["x"], ["s"], start=1, end=-1),
        node("Size", ["x"], ["n"]),
        node("Unsqueeze", ["n", "zero"], ["nu"]),
        node("Concat", ["s", "nu"], ["t"], axis=0),
        node("Expand", ["w", "t"], ["y"]),
    ]
    proto = model(nodes, [feed("x", (2, 3, 4)), feed("w", (1, 1))], ["y"], [whole("zero", 0)])
    assert traced(proto).values["y"].shape == (3, 24)
