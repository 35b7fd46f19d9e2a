"""What front ends call functions is in one vocabulary, by which graphs are checked where they are read."""

from collections.abc import Iterable
from types import FunctionType

import pytest

from pase.graph.attributes import IMPORTED_FUNCTIONS, OTHER_FUNCTION
from pase.importers.ir import Leaf, Node, Origin, Pointwise, Trace, Use, Value
from pase.importers.jax import elementwise as of_jax
from pase.importers.keras import elementwise as of_keras
from pase.importers.model import imported
from pase.importers.onnx.operators import points as of_onnx
from pase.importers.torch.aten import points as of_torch

TABLES: dict[str, Iterable[str]] = {
    "jax": (*of_jax.FUNCTIONS.values(), *of_jax.REDUCTIONS.values()),
    "keras": (*of_keras.FUNCTIONS.values(), *of_keras.REDUCTIONS.values()),
    "onnx": (
        *(*of_onnx._UNARY.values(), *of_onnx._BINARY.values(), *of_onnx._VARIADIC.values()),
        *(*of_onnx._REDUCTIONS.values(), *(name for name, _ in of_onnx._OF_INPUTS.values())),
    ),
    "torch": (*of_torch.POINTWISE.values(), *of_torch._REDUCTIONS.values()),
}


@pytest.mark.parametrize("front_end", TABLES)
def test_what_a_front_end_calls_functions_is_in_the_vocabulary(front_end: str) -> None:
    assert set(TABLES[front_end]) <= IMPORTED_FUNCTIONS


def test_activations_of_keras_are_in_the_vocabulary() -> None:
    keras = pytest.importorskip("keras")
    names = {item.__name__ for item in vars(keras.activations).values() if isinstance(item, FunctionType)}
    names -= {"get", "serialize", "deserialize"}
    # A layer without one; and those that are looked into.
    assert names - {"linear", "glu", "sparsemax"} <= IMPORTED_FUNCTIONS


def test_a_function_without_a_name_there_is_another_one() -> None:
    x, y = (Value(name=name, shape=(4, 8), dtype="float32") for name in "xy")
    node = Node(
        name="y",
        op=Pointwise(functions=("newest",)),
        inputs=(Use(value="x"),),
        outputs=(y,),
        origin=Origin(operator="n"),
    )
    trace = Trace(name="net", leaves=(Leaf(value=x, role="input"),), nodes=(node,), outputs=("y",))
    (operator,) = imported(trace, arguments={}, is_strict=False).graph.operators
    assert operator.attribute("function", "") == OTHER_FUNCTION
