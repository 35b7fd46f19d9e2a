"""Small ONNX models for tests, built with onnx.helper, and one process that many of them are read with."""

import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from pase.importers.ir.trace import Trace
from pase.importers.isolated import Native, native
from pase.importers.onnx.file import OnnxFrontEnd

NEWEST = onnx.defs.onnx_opset_version()
FLOAT, INT64, BOOL = TensorProto.FLOAT, TensorProto.INT64, TensorProto.BOOL


class _Kept(Native):
    """A process for many models, one after the other: starting one takes most of a small model's time."""

    def close(self) -> None:
        pass


_kept: dict[int, _Kept] = {}
"""By the process that started it."""


def kept_native() -> Native:
    """Return this process's one, as long as it lives."""
    found = _kept.get(os.getpid())
    if found is None or found._process.poll() is not None:
        _kept.clear()
        with native() as started:
            found = _kept[os.getpid()] = _Kept(str(started._process.args[-1]))  # type: ignore[index]
    return found


@pytest.fixture(scope="module")
def one_process() -> Iterator[None]:
    """Have all models of a module's tests read with one process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pase.importers.onnx.file.native", kept_native)
        yield
    while _kept:
        Native.close(_kept.popitem()[1])


def weight(name: str, *shape: int) -> Any:
    """Return an initialiser of random floats."""
    rng = np.random.default_rng(len(name) + sum(shape))
    return numpy_helper.from_array(rng.normal(size=shape).astype(np.float32), name)


def whole(name: str, *values: int) -> Any:
    """Return an initialiser of whole numbers in one dim."""
    return numpy_helper.from_array(np.asarray(values, dtype=np.int64), name)


def number(name: str, value: float) -> Any:
    """Return an initialiser of one float, of rank 0."""
    return numpy_helper.from_array(np.asarray(value, dtype=np.float32), name)


def feed(name: str, shape: Sequence[int | str | None], dtype: int = FLOAT) -> Any:
    """Return an input or output."""
    return helper.make_tensor_value_info(name, dtype, shape)


def model(
    nodes: Sequence[Any],
    inputs: Sequence[Any],
    outputs: Iterable[str],
    initialisers: Sequence[Any] = (),
    *,
    opset: int = NEWEST,
    more: Sequence[Any] = (),
    functions: Sequence[Any] = (),
) -> Any:
    """Return a model; its outputs are floats of unknown shape."""
    infos = [helper.make_tensor_value_info(name, FLOAT, None) for name in outputs]
    graph = helper.make_graph(list(nodes), "small", list(inputs), infos, list(initialisers))
    imports = [helper.make_opsetid("", opset), *more]
    return helper.make_model(graph, opset_imports=imports, functions=list(functions), ir_version=10)


node, domain = helper.make_node, helper.make_opsetid


def convolutional(opset: int, batch: int | str = 2) -> Any:
    """Return conv, batch normalisation, pooling, flattening, a dense layer and a softmax, in operators of an opset."""
    nodes = [
        node("Conv", ["x", "w", "b"], ["c"], name="conv", kernel_shape=[3, 3], pads=[1, 1, 1, 1], strides=[2, 2]),
        node("BatchNormalization", ["c", "scale", "shift", "mean", "var"], ["n"], name="bn"),
        node("Relu", ["n"], ["r"], name="relu"),
        node("MaxPool", ["r"], ["p"], name="pool", kernel_shape=[2, 2], strides=[2, 2]),
        node("Flatten", ["p"], ["f"], name="flat"),
        node("Gemm", ["f", "dense", "bias"], ["g"], name="fc", transB=1),
        node("Softmax", ["g"], ["y"], name="softmax", axis=1),
    ]
    weights = [weight("w", 6, 3, 3, 3), weight("b", 6), *(weight(n, 6) for n in ("scale", "shift", "mean", "var"))]
    weights += [weight("dense", 10, 6 * 4 * 4), weight("bias", 10)]
    return model(nodes, [feed("x", [batch, 3, 16, 16])], ["y"], weights, opset=opset)


def transformer(batch: int, *, steps: int = 5, heads: int = 2, width: int = 8, is_first: bool = True) -> Any:
    """Return one attention block whose batch is written into the targets of its reshapes, as tracing exporters do.

    is_first: the batch is the leading dim; else the sequence is, and batch and heads are put together.
    """
    size = width // heads
    shape = [batch, steps, width] if is_first else [steps, batch, width]
    nodes: list[Any] = []
    targets: list[Any] = []
    for name in ("q", "k", "v"):
        nodes.append(node("MatMul", ["x", f"w{name}"], [name], name=f"dense_{name}"))
        target = [batch, steps, heads, size] if is_first else [steps, batch * heads, size]
        targets.append(whole(f"t{name}", *target))
        nodes.append(node("Reshape", [name, f"t{name}"], [f"{name}r"], name=f"reshape_{name}"))
        order = {"q": [0, 2, 1, 3], "v": [0, 2, 1, 3], "k": [0, 2, 3, 1]} if is_first else {
            "q": [1, 0, 2], "v": [1, 0, 2], "k": [1, 2, 0]
        }  # fmt: skip
        nodes.append(node("Transpose", [f"{name}r"], [f"{name}t"], name=f"turn_{name}", perm=order[name]))
    nodes += [
        node("MatMul", ["qt", "kt"], ["s"], name="scores"),
        node("Div", ["s", "root"], ["d"], name="divide"),
        node("Softmax", ["d"], ["p"], name="softmax", axis=-1),
        node("MatMul", ["p", "vt"], ["o"], name="values"),
        node("Transpose", ["o"], ["ot"], name="turn_back", perm=[0, 2, 1, 3] if is_first else [1, 0, 2]),
        node("Reshape", ["ot", "to"], ["m"], name="reshape_back"),
        node("MatMul", ["m", "wo"], ["z"], name="dense_o"),
    ]
    last = "z"
    if is_first:
        targets.append(whole("to", batch, steps, width))
    else:
        targets += [whole("to", steps * batch, width), whole("tz", steps, batch, width)]
        nodes.append(node("Reshape", ["z", "tz"], ["zz"], name="reshape_apart"))
        last = "zz"
    nodes.append(node("Add", ["x", last], ["y"], name="residual"))
    weights = [weight(f"w{name}", width, width) for name in "qkvo"]
    return model(nodes, [feed("x", shape)], ["y"], [*weights, *targets, number("root", size**0.5)])


def traced(source: Any, batch: int | None = None, **arguments: Any) -> Trace:
    """Return the trace of a model, or of its file."""
    return OnnxFrontEnd().trace(str(source) if isinstance(source, Path) else source, batch=batch, arguments=arguments)


def saved(proto: Any, folder: Path) -> str:
    """Return the path of a model's file."""
    path = folder / "model.onnx"
    path.write_bytes(proto.SerializeToString())
    return str(path)
