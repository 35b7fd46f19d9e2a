"""Translations of ONNX's operators: evaluated with NumPy, they give what ONNX's own reference evaluator gives."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

pytest.importorskip("onnx")

from onnx import numpy_helper
from onnx.reference import ReferenceEvaluator

from pase.errors import ModelError
from pase.importers.ir import ops
from pase.importers.ir.trace import Node, Trace
from pase.importers.lower import lower
from pase.importers.passes import run_passes
from tests.importers.onnx_models import (  # noqa: F401
    BOOL,
    INT64,
    domain,
    feed,
    model,
    node,
    number,
    one_process,
    traced,
    weight,
    whole,
)
from tests.importers.traces import Array, evaluate

pytestmark = pytest.mark.usefixtures("one_process")


def _evaluated(trace: Trace, proto: Any, fed: Mapping[str, Array]) -> dict[str, Array]:
    """Return the trace's values by name, its leaves being those of the model."""
    return evaluate(trace, {**fed, **{t.name: numpy_helper.to_array(t) for t in proto.graph.initializer}})


X = (2, 3, 4, 6)
SINGLE: dict[str, tuple[Any, list[Any]]] = {
    "reshape": (node("Reshape", ["x", "t"], ["y"]), [whole("t", 0, -1, 2)]),
    "squeeze": (node("Squeeze", ["u", "t"], ["y"]), [whole("t", 1)]),
    "squeeze_all": (node("Squeeze", ["u"], ["y"]), []),
    "unsqueeze": (node("Unsqueeze", ["x", "t"], ["y"]), [whole("t", 0, -1)]),
    "flatten": (node("Flatten", ["x"], ["y"], axis=2), []),
    "transpose": (node("Transpose", ["x"], ["y"], perm=[2, 0, 3, 1]), []),
    "transpose_default": (node("Transpose", ["x"], ["y"]), []),
    "expand": (node("Expand", ["u", "t"], ["y"]), [whole("t", 7, 1, 5, 1, 3)]),
    "tile": (node("Tile", ["x", "t"], ["y"]), [whole("t", 1, 2, 3, 1)]),
    "slice": (
        node("Slice", ["x", "a", "b", "c", "d"], ["y"]),
        [whole("a", -3, 1), whole("b", 99, -1), whole("c", 2, -1), whole("d", 1, 2)],
    ),
    "split": (node("Split", ["x", "t"], ["y", "z"], axis=3), [whole("t", 2, 4)]),
    "split_in_parts": (node("Split", ["x"], ["y", "z"], axis=2, num_outputs=2), []),
    "concat": (node("Concat", ["x", "x", "x"], ["y"], axis=-2), []),
    "pad": (node("Pad", ["x", "t"], ["y"]), [whole("t", 0, 1, 0, 2, 0, 0, 3, 0)]),
    "pad_axes": (node("Pad", ["x", "t", "", "a"], ["y"]), [whole("t", 1, 2), whole("a", -1)]),
    "depth_to_space": (node("DepthToSpace", ["deep"], ["y"], blocksize=2), []),
    "depth_to_space_crd": (node("DepthToSpace", ["deep"], ["y"], blocksize=2, mode="CRD"), []),
    "space_to_depth": (node("SpaceToDepth", ["x"], ["y"], blocksize=2), []),
    "gather": (node("Gather", ["table", "ids"], ["y"]), [weight("table", 7, 5)]),
    "gather_middle": (node("Gather", ["x", "ids"], ["y"], axis=2), []),
    "gather_one": (node("Gather", ["x", "t"], ["y"], axis=1), [whole("t", -1)]),
    "gather_run": (node("Gather", ["x", "t"], ["y"], axis=3), [whole("t", 1, 2, 3)]),
    "matmul": (node("MatMul", ["x", "w"], ["y"]), [weight("w", 6, 5)]),
    "matmul_broadcast": (node("MatMul", ["x", "w"], ["y"]), [weight("w", 1, 3, 6, 5)]),
    "matmul_vector": (node("MatMul", ["x", "w"], ["y"]), [weight("w", 6)]),
    "matmul_vector_first": (node("MatMul", ["w", "x"], ["y"]), [weight("w", 4)]),
    "gemm": (node("Gemm", ["m", "w", "b"], ["y"], transB=1), [weight("w", 5, 6), weight("b", 5)]),
    "gemm_scaled": (
        node("Gemm", ["m", "w", "b"], ["y"], alpha=0.5, beta=2.0, transA=1),
        [weight("w", 4, 5), weight("b", 6, 1)],
    ),
    "gemm_row": (node("Gemm", ["m", "w", "b"], ["y"]), [weight("w", 6, 5), weight("b", 1, 5)]),
    "einsum": (node("Einsum", ["x", "w"], ["y"], equation="bchw, wk -> bkch"), [weight("w", 6, 5)]),
    "einsum_ellipsis": (node("Einsum", ["x", "w"], ["y"], equation="...w,wk->...k"), [weight("w", 6, 5)]),
    "einsum_implicit": (node("Einsum", ["m", "w"], ["y"], equation="ij,jk"), [weight("w", 6, 5)]),
    "einsum_single": (node("Einsum", ["x"], ["y"], equation="bchw->hb"), []),
    "add": (node("Add", ["x", "w"], ["y"]), [weight("w", 3, 1, 1)]),
    "subtract_from_number": (node("Sub", ["n", "x"], ["y"]), [number("n", 1.5)]),
    "divide_by_number": (node("Div", ["x", "n"], ["y"]), [number("n", 1.5)]),
    "reciprocal": (node("Div", ["n", "w"], ["y"]), [number("n", 1.0), weight("w", 3, 4)]),
    "power": (node("Pow", ["x", "n"], ["y"]), [number("n", 2.0)]),
    "sum": (node("Sum", ["x", "x", "u"], ["y"]), []),
    "mean": (node("Mean", ["x", "x", "u"], ["y"]), []),
    "max": (node("Max", ["x", "w"], ["y"]), [weight("w", 6)]),
    "where": (node("Where", ["mask", "x", "n"], ["y"]), [number("n", -2.0)]),
    "clip": (node("Clip", ["x", "lo"], ["y"]), [number("lo", 0.25)]),
    "elu": (node("Elu", ["x"], ["y"], alpha=0.5), []),
    "hard_sigmoid": (node("HardSigmoid", ["x"], ["y"]), []),
    "leaky_relu": (node("LeakyRelu", ["x"], ["y"]), []),
    "prelu": (node("PRelu", ["x", "w"], ["y"]), [weight("w", 3, 1, 1)]),
    "swish": (node("Swish", ["x"], ["y"], alpha=2.0), []),
    "dropout": (node("Dropout", ["x"], ["y"]), []),
    "reduce_sum": (node("ReduceSum", ["x", "t"], ["y"], keepdims=0), [whole("t", -1, 1)]),
    "reduce_all": (node("ReduceMean", ["x"], ["y"]), []),
    "reduce_nothing": (node("ReduceMax", ["x"], ["y"], noop_with_empty_axes=1), []),
    "global_average": (node("GlobalAveragePool", ["x"], ["y"]), []),
    "argmax": (node("ArgMax", ["x"], ["y"], axis=2, keepdims=0), []),
    "softmax": (node("Softmax", ["x"], ["y"], axis=1), []),
    "log_softmax": (node("LogSoftmax", ["x"], ["y"]), []),
    "batch_norm": (node("BatchNormalization", ["x", "s", "b", "m3", "v3"], ["y"]),
        [weight("s", 3), weight("b", 3), weight("m3", 3)]),
    "instance_norm": (node("InstanceNormalization", ["x", "s", "b"], ["y"]), [weight("s", 3), weight("b", 3)]),
    "group_norm": (
        node("GroupNormalization", ["deep", "s", "b"], ["y"], num_groups=2),
        [weight("s", 8), weight("b", 8)],
    ),
    "layer_norm": (node("LayerNormalization", ["x", "s", "b"], ["y"], axis=2), [weight("s", 4, 6), weight("b", 4, 6)]),
    "layer_norm_plain": (node("LayerNormalization", ["x", "s"], ["y"]), [weight("s", 6)]),
    "rms_norm": (node("RMSNormalization", ["x", "s"], ["y"]), [weight("s", 6)]),
    "mean_variance": (node("MeanVarianceNormalization", ["x"], ["y"], axes=[0, 2, 3]), []),
    "attention": (node("Attention", ["x", "key", "key"], ["y"]), []),
    "attention_causal": (node("Attention", ["x", "x", "x"], ["y"], is_causal=1, scale=0.3), []),
    "attention_flat": (node("Attention", ["flat", "flat", "flat"], ["y"], q_num_heads=3, kv_num_heads=3), []),
    "attention_grouped": (node("Attention", ["flat", "two", "two"], ["y"], q_num_heads=4, kv_num_heads=2), []),
}  # fmt: skip
SHAPES = {
    "x": X, "u": (2, 1, 4, 1), "m": (4, 6), "deep": (2, 8, 3, 2), "key": (2, 3, 5, 6), "flat": (2, 5, 12),
    "two": (2, 7, 6), "v3": (3,),
}  # fmt: skip


def _single(name: str) -> tuple[Any, dict[str, Array]]:
    operator, initialisers = SINGLE[name]
    stored = {tensor.name for tensor in initialisers}
    rng = np.random.default_rng(1)
    fed: dict[str, Array] = {}
    inputs = []
    for key in dict.fromkeys(operator.input):
        if not key or key in stored:
            continue
        if key == "ids":
            fed[key] = np.array([[1, 0, 3], [2, 2, 1]])
            inputs.append(feed(key, (2, 3), INT64))
        elif key == "mask":
            fed[key] = rng.random(X) > 0.5
            inputs.append(feed(key, X, BOOL))
        else:
            fed[key] = (rng.random(SHAPES[key]) + 0.1).astype(np.float32)
            inputs.append(feed(key, SHAPES[key]))
    return model([operator], inputs, list(operator.output), initialisers), fed


@pytest.mark.parametrize("name", SINGLE)
def test_a_translation_computes_what_the_operator_does(name: str) -> None:
    proto, fed = _single(name)
    expected = dict(zip([o.name for o in proto.graph.output], ReferenceEvaluator(proto).run(None, fed), strict=True))
    trace = traced(proto)
    found = _evaluated(trace, proto, fed)
    assert set(trace.outputs) == set(expected)
    for output, array in expected.items():
        assert trace.values[output].shape == array.shape
        np.testing.assert_allclose(found[output], array, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("opset", "shape"), [(7, (2, 3)), (12, (3,)), (12, (2, 1, 5, 1)), (12, (2, 3, 4))])
def test_a_softmax_was_once_over_all_dims_from_its_axis_on(opset: int, shape: tuple[int, ...]) -> None:
    axis = 1 if len(shape) > 1 else 0
    proto = model([node("Softmax", ["x"], ["y"], axis=axis)], [feed("x", shape)], ["y"], opset=opset)
    x = np.random.default_rng(0).random(shape).astype(np.float32)
    flat = np.exp(x.reshape(shape[0] if axis else 1, -1))
    found = _evaluated(traced(proto), proto, {"x": x})["y"]
    np.testing.assert_allclose(found, (flat / flat.sum(1, keepdims=True)).reshape(shape), rtol=1e-5)


# -- what NumPy has no word for: shapes, and what is told of them


def _only(proto: Any) -> Node:
    trace = traced(proto)
    (found,) = trace.nodes
    values = {value.name: value.shape for value in found.outputs}
    shapes = [np.asarray(a).shape for a in ReferenceEvaluator(proto).run(None, _zeros(proto))]
    assert [values[o.name] for o in proto.graph.output] == shapes
    return found


def _zeros(proto: Any) -> dict[str, Array]:
    shapes = {i.name: [d.dim_value for d in i.type.tensor_type.shape.dim] for i in proto.graph.input}
    return {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}


@pytest.mark.parametrize(
    ("mode", "pads"), [("SAME_UPPER", ((1, 2), (0, 1))), ("SAME_LOWER", ((2, 1), (1, 0))), ("VALID", ((0, 0), (0, 0)))]
)
def test_padding_may_follow_from_the_extents(mode: str, pads: Any) -> None:
    x = feed("x", (2, 4, 8, 8))
    conv = node(
        "Conv", ["x", "w"], ["y"], strides=[2, 2], dilations=[1, 1], group=2, auto_pad=mode, kernel_shape=[5, 3]
    )
    op = _only(model([conv], [x], ["y"], [weight("w", 6, 2, 5, 3)])).op
    assert isinstance(op, ops.Convolve)
    assert (op.pads, op.groups, op.stride, op.filters) == (pads, 2, (2, 2), (0, 1, 2, 3))


def test_pools_round_up_and_transposed_convolutions_are_told() -> None:
    x = feed("x", (2, 4, 7))
    pool = _only(model([node("MaxPool", ["x"], ["y"], kernel_shape=[2], strides=[2], ceil_mode=1)], [x], ["y"])).op
    assert pool == ops.Pool(
        function="max", spatial=(2,), kernel=(2,), stride=(2,), dilation=(1,), pads=((0, 0),), counts_padding=False
    )
    turned = node("ConvTranspose", ["x", "w", "b"], ["y"], strides=[3], pads=[1, 0])
    op = _only(model([turned], [x], ["y"], [weight("w", 4, 5, 3), weight("b", 5)])).op
    assert isinstance(op, ops.Convolve)
    assert op.is_transposed
    assert op.has_bias
    assert op.pads == ((1, 0),)


@pytest.mark.parametrize("operator", ["LSTM", "GRU", "RNN"])
@pytest.mark.parametrize("direction", ["forward", "bidirectional"])
def test_a_recurrent_layer_is_one_node(operator: str, direction: str) -> None:
    gates = {"LSTM": 4, "GRU": 3, "RNN": 1}[operator]
    n = 2 if direction == "bidirectional" else 1
    cell = node(operator, ["x", "w", "r", "b", "", "h"], ["y", "last"], hidden_size=6, direction=direction, name="cell")
    weights = [weight("w", n, gates * 6, 5), weight("r", n, gates * 6, 6), weight("b", n, 2 * gates * 6)]
    proto = model([cell], [feed("x", (7, 2, 5))], ["y", "last"], [*weights, weight("h", n, 2, 6)])
    trace = traced(proto)
    first = trace.nodes[0]
    assert first.op == ops.Recurrent(cell=operator.lower(), units=6, is_bidirectional=n == 2, is_batch_first=False)  # type: ignore[arg-type]
    assert first.outputs[0].shape == (7, 2, 6 * n)
    assert (trace.values["y"].shape, trace.values["last"].shape) == ((7, n, 2, 6), (n, 2, 6))
    # The state before the first step is no weight.
    assert trace.num_parameters == sum(int(np.prod(w.dims)) for w in weights)


@pytest.mark.parametrize(
    ("given", "attributes", "equations"),
    [
        ({}, {}, "lstm"),
        ({4: np.array([7, 7])}, {}, "lstm"),
        ({5: np.zeros((1, 2, 6))}, {"activations": ["Sigmoid", "Tanh", "Tanh"]}, "lstm"),
        ({4: np.array([7, 3])}, {}, ""),
        ({5: np.ones((1, 2, 6))}, {}, ""),
        ({7: np.zeros((1, 18))}, {}, ""),
        ({}, {"clip": 3.0}, ""),
        ({}, {"direction": "reverse"}, ""),
        ({}, {"activations": ["HardSigmoid", "Tanh", "Tanh"]}, ""),
    ],
)
def test_what_a_recurrent_layer_computes_is_told_where_pytorch_has_it_too(
    given: dict[int, Any], attributes: dict[str, Any], equations: str
) -> None:
    kinds = {4: np.int32}
    stored = {i: numpy_helper.from_array(array.astype(kinds.get(i, np.float32)), f"i{i}") for i, array in given.items()}
    names = ["x", "w", "r", "b", *(stored[i].name if i in stored else "" for i in range(4, 8))]
    cell = node("LSTM", names, ["y"], hidden_size=6, name="cell", **attributes)
    weights = [weight("w", 1, 24, 5), weight("r", 1, 24, 6), weight("b", 1, 48), *stored.values()]
    trace = traced(model([cell], [feed("x", (7, 2, 5))], ["y"], weights))
    op = trace.nodes[0].op
    assert isinstance(op, ops.Recurrent)
    assert op.equations == equations
    assert op.gates == ((0, 2, 3, 1) if equations else ())


def test_neighbouring_channels_are_read_whole() -> None:
    trace = traced(model([node("LRN", ["x"], ["y"], size=3)], [feed("x", (4, 6, 5, 5))], ["y"]))
    (operator,) = lower(run_passes(trace)[-1]).graph.operators
    assert operator.kind == "response_norm"
    assert operator.unsplittable == (operator.dims[1].name,)
    assert operator.exchanges == ()
    with pytest.raises(ModelError, match="'lrn' is not well formed: size is 0; expected a number of channels"):
        traced(model([node("LRN", ["x"], ["y"], size=0, name="lrn")], [feed("x", (4, 6, 5, 5))], ["y"]))


def test_what_is_not_known_passes_the_leading_dim_if_it_has_one() -> None:
    foreign = node("Blur", ["x"], ["y"], domain="org.example", name="blur")
    proto = model([foreign], [feed("x", (4, 3, 5))], ["y"], more=[domain("org.example", 1)])
    del proto.graph.output[:]
    proto.graph.output.append(feed("y", (4, 9)))
    (found,) = traced(proto).nodes
    assert found.op == ops.Generic(passes=((0, 0),))
    assert found.origin.operator == "Blur"
    assert found.outputs[0].shape == (4, 9)


def test_an_operator_of_which_nothing_tells_the_shape_is_refused() -> None:
    foreign = node("Blur", ["x"], ["y"], domain="org.example", name="blur")
    proto = model([foreign], [feed("x", (4, 3, 5))], ["y"], more=[domain("org.example", 1)])
    with pytest.raises(ModelError, match=r"nothing tells the shape of 'y', which operator Blur 'blur' of domain org"):
        traced(proto)


def test_a_transformer_that_was_optimised_for_the_runtime_is_known() -> None:
    def ms(operator: str, inputs: str, outputs: str, **attributes: Any) -> Any:
        return node(operator, inputs.split(), outputs.split(), domain="com.microsoft", name=outputs[0], **attributes)

    nodes = [
        ms("EmbedLayerNormalization", "ids segments words positions kinds s b", "e mask"),
        ms("Attention", "e qkv qb mask", "a", num_heads=2),
        ms("FusedMatMul", "a wo", "o", transB=1, alpha=0.5),
        ms("SkipLayerNormalization", "o e s b", "n"),
        ms("FastGelu", "n b", "g"),
        ms("MultiHeadAttention", "g g g", "y", num_heads=2),
    ]
    shapes = {"words": (11, 8), "positions": (16, 8), "kinds": (2, 8), "s": (8,), "b": (8,)}
    shapes |= {"qkv": (8, 24), "qb": (24,), "wo": (8, 8)}
    weights = [weight(name, *shape) for name, shape in shapes.items()]
    inputs = [feed("ids", (3, 5), INT64), feed("segments", (3, 5), INT64)]
    trace = traced(model(nodes, inputs, ["y"], weights, more=[domain("com.microsoft", 1)]))
    graph = lower(run_passes(trace)[-1]).graph
    # A position's row is 5 of 16, so that the table is held whole.
    assert graph.num_parameters == trace.num_parameters == (11 + 16 + 2 + 2 + 24 + 3 + 8) * 8
    assert graph.forward_flop(contractions_only=True) == 2 * 3 * 5 * (8 * 24 + 8 * 8 + 2 * (2 * 5 * 8))
    kinds = [op.kind for op in graph.operators]
    assert [kind for kind in kinds if kind in ("attention", "dense", "embedding")] == [
        "embedding", "embedding", "dense", "attention", "dense", "attention",
    ]  # fmt: skip
    assert "opaque" not in kinds
    assert trace.values["y"].shape == (3, 5, 8)


@pytest.mark.parametrize(
    ("operator", "initialisers"),
    [
        (node("Transpose", ["x"], ["y"], name="bad", perm=[0, 0, 1, 2]), []),
        (node("MaxPool", ["x"], ["y"], name="bad"), []),
        (node("Conv", ["x"], ["y"], name="bad"), []),
        (node("Concat", ["x", "x"], ["y"], name="bad", axis=9), []),
        (node("Gather", ["x", "t"], ["y"], name="bad"), [whole("t", 7)]),
        (node("Add", ["x", "w"], ["y"], name="bad"), [weight("w", 5)]),
    ],
)
def test_an_operator_that_does_not_fit_is_named(operator: Any, initialisers: list[Any]) -> None:
    proto = model([operator], [feed("x", X)], ["y"], initialisers)
    with pytest.raises(
        ModelError, match=rf"operator {operator.op_type} 'bad' (cannot take tensors|is not well formed)"
    ):
        traced(proto)
