"""What front ends call functions is in one vocabulary, by which graphs are checked where they are read."""

from types import FunctionType

import pytest

from pase.graph.verify import IMPORTED_FUNCTIONS, OTHER_FUNCTION
from pase.importers.frameworks import imported
from pase.importers.ir import ops
from pase.importers.ir.shared import FUNCTIONS, reduction
from pase.importers.ir.trace import Leaf, Node, Origin, Trace, Use, Value
from pase.importers.onnx import operators as of_onnx

REDUCTIONS = {
    "jax": "argmax argmin reduce_and reduce_max reduce_min reduce_or reduce_prod reduce_sum reduce_xor",
    "onnx": of_onnx._REDUCTIONS,
    "torch": "sum mean max min amax amin var std prod any all argmax argmin logsumexp norm linalg_vector_norm nansum",
}


def test_what_front_ends_call_functions_is_in_the_vocabulary() -> None:
    assert set(FUNCTIONS.values()) | set(of_onnx._VARIADIC.values()) <= IMPORTED_FUNCTIONS


@pytest.mark.parametrize("front_end", REDUCTIONS)
def test_what_a_front_end_calls_reductions_is_in_the_vocabulary(front_end: str) -> None:
    assert {reduction(name) for name in REDUCTIONS[front_end].split()} <= IMPORTED_FUNCTIONS


@pytest.mark.parametrize("names", ["eq equal Equal", "mul multiply", "pow integer_pow power", "arccos acos"])
def test_a_function_has_one_name_whatever_its_source_calls_it(names: str) -> None:
    assert len({FUNCTIONS[name.lower()] for name in names.split()}) == 1


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
        op=ops.Pointwise(functions=("newest",)),
        inputs=(Use(value="x"),),
        outputs=(y,),
        origin=Origin(operator="n"),
    )
    trace = Trace(name="net", leaves=(Leaf(value=x, role="input"),), nodes=(node,), outputs=("y",))
    (operator,) = imported(trace, arguments={}, is_strict=False).graph.operators
    assert operator.attribute("function", "") == OTHER_FUNCTION
