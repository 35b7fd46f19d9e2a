"""Programs of imported models compute what onnxruntime and Keras compute, under any strategy."""

import json
import os
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

os.environ.setdefault("KERAS_BACKEND", "tensorflow")
pytest.importorskip("torch")
onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")
keras = pytest.importorskip("keras")

from pase.common.documents import DocumentSource  # noqa: E402
from pase.errors import EmitError, ModelError, PlanError  # noqa: E402
from pase.graph import graph_document, graph_from_document  # noqa: E402
from pase.graph.operators import with_fan_outs  # noqa: E402
from pase.importers.frameworks import import_model  # noqa: E402
from pase.importers.weights import read_weights  # noqa: E402
from pase.planning.plan import Plan  # noqa: E402
from pase.planning.planner import search  # noqa: E402
from pase.targets.programs import emit  # noqa: E402
from tests.importers.programs import run  # noqa: E402
from tests.runtime.options import options  # noqa: E402
from tests.runtime.plans import random_plan  # noqa: E402
from tests.targets.torch.ranks import Pool, RanksFailedError  # noqa: E402
from tests.targets.torch.trained import outputs  # noqa: E402

pytestmark = pytest.mark.filterwarnings(
    # Keras' own, when it reads the values of its variables.
    "ignore:__array__ implementation doesn't accept a copy keyword:DeprecationWarning"
)

Array = np.ndarray[Any, Any]
FULL = pytest.mark.full
TOLERANCE = 1e-5


def difference(found: Array, expected: Array) -> float:
    assert found.shape == expected.shape
    return float(np.abs(found - expected).max() / np.abs(expected).max())


def random(*shape: int, scale: float = 1.0, seed: int = 0) -> Array:
    return (np.random.default_rng([seed, *shape]).standard_normal(shape) * scale).astype(np.float32)


# -- ONNX


def onnx_model(
    nodes: Sequence[Any], inputs: Mapping[str, Array], outputs: Mapping[str, list[int]], weights: Mapping[str, Array]
) -> Any:
    kinds = {np.dtype(np.float32): onnx.TensorProto.FLOAT, np.dtype(np.int64): onnx.TensorProto.INT64}
    helper = onnx.helper
    graph = helper.make_graph(
        list(nodes),
        "net",
        [helper.make_tensor_value_info(name, kinds[array.dtype], array.shape) for name, array in inputs.items()],
        [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, shape) for name, shape in outputs.items()],
        [onnx.numpy_helper.from_array(array, name) for name, array in weights.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    onnx.checker.check_model(model)
    return model


def node(operator: str, inputs: str, output: str, **attributes: Any) -> Any:
    return onnx.helper.make_node(operator, inputs.split(), [output], name=f"{operator}_{output}", **attributes)


@cache
def convolutional() -> tuple[Any, dict[str, Array]]:
    """Padding that is not the same on both sides, groups, dilation, kept statistics, ceil mode, padding that counts."""
    weights = {
        "w1": random(8, 3, 3, 3, scale=0.3), "b1": random(8), "s": random(8), "t": random(8), "m": random(8),
        "v": np.abs(random(8)) + 0.5, "w2": random(8, 2, 3, 3, scale=0.3), "w3": random(8, 1, 3, 3, scale=0.3),
        "w4": random(4, 16, 1, 1, scale=0.3), "fw": random(36, 10, scale=0.2), "fb": random(10),
        "low": np.array(-0.5, np.float32), "high": np.array(6, np.float32), "half": np.array(0.5, np.float32),
        "one": np.array(1, np.float32), "slope": random(8, 1, 1), "axes": np.array([2, 3]),
    }  # fmt: skip
    nodes = [
        node("Conv", "x w1 b1", "c1", strides=[2, 2], pads=[0, 0, 1, 1]),
        node("BatchNormalization", "c1 s t m v", "n1", epsilon=1e-3),
        node("Clip", "n1 low high", "r1"),
        node("Conv", "r1 w2", "c2", group=4, pads=[1, 1, 1, 1]),
        node("LeakyRelu", "c2", "r2", alpha=0.3),
        node("Conv", "r2 w3", "c3", group=8, pads=[2, 2, 2, 2], dilations=[2, 2]),
        node("HardSigmoid", "c3", "h"),
        node("Mul", "c3 h", "hs"),
        node("PRelu", "hs slope", "pr"),
        node("Add", "pr r1", "a"),
        node("Sub", "one a", "ra"),
        node("Mul", "ra half", "ah"),
        node("Concat", "ah r2", "cc", axis=1),
        node("AveragePool", "cc", "ap", kernel_shape=[3, 3], pads=[1, 1, 1, 1], count_include_pad=1),
        node("MaxPool", "ap", "mp", kernel_shape=[3, 3], strides=[2, 2], ceil_mode=1),
        node("Conv", "mp w4", "c4"),
        node("Flatten", "c4", "fl"),
        node("Gemm", "fl fw fb", "g"),
        node("Softmax", "g", "y", axis=-1),
        node("ReduceMax", "cc axes", "top", keepdims=0),
    ]
    data = {"x": random(4, 3, 14, 14)}
    return onnx_model(nodes, data, {"y": [4, 10], "top": [4, 16]}, weights), data


@cache
def transformer() -> tuple[Any, dict[str, Array]]:
    """A look-up, positions, layer normalisation step by step and as one, masked attention, GELU step by step."""
    size, heads, length = 16, 4, 6
    mask = np.triu(np.full((length, length), -1e9, np.float32), 1)
    weights = {
        "table": random(11, size), "places": random(1, length, size), "g1": random(size), "h1": random(size),
        "g2": random(size), "h2": random(size), "wq": random(size, 3 * size, scale=0.3), "bq": random(3 * size),
        "wo": random(size, size, scale=0.3), "wu": random(size, 32, scale=0.3), "bu": random(32),
        "wd": random(32, size, scale=0.3), "mask": mask.reshape(1, 1, length, length),
        "apart": np.array([0, length, heads, size // heads]), "together": np.array([0, length, size]),
        "thirds": np.array([size] * 3), "scale": np.array(0.5, np.float32), "two": np.array(2, np.float32),
        "eps": np.array(1e-5, np.float32), "root": np.array(np.sqrt(2), np.float32),
        "one": np.array(1, np.float32), "half": np.array(0.5, np.float32), "last": np.array([-1]),
    }  # fmt: skip
    nodes = [
        node("Gather", "table tokens", "e"),
        node("Add", "e places", "x"),
        node("LayerNormalization", "x g1 h1", "n"),
        node("MatMul", "n wq", "p"),
        node("Add", "p bq", "pb"),
        onnx.helper.make_node("Split", ["pb", "thirds"], ["q", "k", "v"], name="split", axis=-1),
        *(node("Reshape", f"{name} apart", f"{name}r") for name in "qkv"),
        node("Transpose", "qr", "qt", perm=[0, 2, 1, 3]),
        node("Transpose", "kr", "kt", perm=[0, 2, 3, 1]),
        node("Transpose", "vr", "vt", perm=[0, 2, 1, 3]),
        node("MatMul", "qt kt", "s"),
        node("Mul", "s scale", "ss"),
        node("Add", "ss mask", "sm"),
        node("Softmax", "sm", "pr", axis=-1),
        node("MatMul", "pr vt", "o"),
        node("Transpose", "o", "ot", perm=[0, 2, 1, 3]),
        node("Reshape", "ot together", "or"),
        node("MatMul", "or wo", "oo"),
        node("Add", "oo x", "x2"),
        node("ReduceMean", "x2 last", "mean", keepdims=1),
        node("Sub", "x2 mean", "c"),
        node("Pow", "c two", "cp"),
        node("ReduceMean", "cp last", "var", keepdims=1),
        node("Add", "var eps", "ve"),
        node("Sqrt", "ve", "dev"),
        node("Div", "c dev", "nn"),
        node("Mul", "nn g2", "ng"),
        node("Add", "ng h2", "n2"),
        node("MatMul", "n2 wu", "u"),
        node("Add", "u bu", "ub"),
        node("Div", "ub root", "ur"),
        node("Erf", "ur", "ue"),
        node("Add", "ue one", "u1"),
        node("Mul", "ub u1", "um"),
        node("Mul", "um half", "ug"),
        node("MatMul", "ug wd", "d"),
        node("Add", "d x2", "y"),
    ]
    data = {"tokens": np.random.default_rng(0).integers(0, 11, (4, length))}
    return onnx_model(nodes, data, {"y": [4, length, size]}, weights), data


@cache
def generative() -> tuple[Any, dict[str, Array]]:
    """Transposed convolutions whose padding is told in all ways that there are, and neighbouring channels."""
    weights = {"w1": random(3, 4, 3, 2), "b1": random(4), "w2": random(4, 3, 3, 4), "w3": random(6, 5, 2, 3)}
    nodes = [
        node("ConvTranspose", "x w1 b1", "c1", strides=[2, 1], dilations=[1, 2], pads=[1, 0, 0, 1]),
        node("LRN", "c1", "n1", size=3, alpha=0.3, beta=0.6, bias=1.5),
        node("ConvTranspose", "n1 w2", "c2", strides=[2, 2], auto_pad="SAME_LOWER", group=2),
        node("LRN", "c2", "n2", size=13, alpha=0.7),
        node("ConvTranspose", "n2 w3", "y", strides=[1, 2], output_shape=[12, 23]),
    ]
    data = {"x": random(4, 3, 3, 5)}
    return onnx_model(nodes, data, {"y": [4, 5, 12, 23]}, weights), data


ONNX = {"convolutional": convolutional, "transformer": transformer, "generative": generative}


def by_onnxruntime(model: Any, data: Mapping[str, Array]) -> dict[str, Array]:
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return dict(zip((output.name for output in session.get_outputs()), session.run(None, data), strict=True))


@cache
def onnx_outputs(name: str) -> dict[str, Array]:
    return by_onnxruntime(*ONNX[name]())


@pytest.mark.parametrize(
    ("name", "is_searched"),
    [*((name, False) for name in ONNX), ("convolutional", True), pytest.param("transformer", True, marks=FULL)],
)
def test_onnx_models(name: str, is_searched: bool) -> None:
    model, data = ONNX[name]()
    graph = import_model(model).graph
    found = run(search(graph, 2) if is_searched else random_plan(graph, 4, 0), read_weights(model), data)
    expected = onnx_outputs(name)
    assert set(found) == set(expected)
    for output, array in expected.items():
        assert difference(found[output], array) < TOLERANCE, output


@pytest.mark.parametrize("size", [1, 2, 4, 9])
def test_any_number_of_neighbouring_channels(size: int) -> None:
    """As ONNX defines them; onnxruntime computes odd numbers alone."""
    data = {"x": random(4, 5, 3, 2)}
    model = onnx_model([node("LRN", "x", "y", size=size, alpha=0.5)], data, {"y": [4, 5, 3, 2]}, {})
    squares = data["x"].astype(np.float64) ** 2
    first = [max(0, c - (size - 1) // 2) for c in range(5)]
    last = [min(4, c + int(np.ceil((size - 1) / 2))) for c in range(5)]
    sums = np.stack([squares[:, i : j + 1].sum(1) for i, j in zip(first, last, strict=True)], 1)
    found = run(random_plan(import_model(model).graph, 4, size), {}, data)
    assert difference(found["y"], data["x"] / (1 + 0.5 / size * sums) ** 0.75) < TOLERANCE


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("operator", ["SoftmaxCrossEntropyLoss", "NegativeLogLikelihoodLoss"])
def test_losses_of_classes(operator: str, reduction: str) -> None:
    data = {"x": random(4, 5, 3), "labels": np.random.default_rng(0).integers(0, 5, (4, 3))}
    shape = [4, 3] if reduction == "none" else []
    model = onnx_model([node(operator, "x labels", "y", reduction=reduction)], data, {"y": shape}, {})
    found = run(random_plan(import_model(model).graph, 4, 1), {}, data)
    assert difference(found["y"], by_onnxruntime(model, data)["y"]) < TOLERANCE


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=FULL) for seed in (1, 2))])
def test_what_several_layers_read_is_handed_on(seed: int) -> None:
    """Fan-outs, split as they may be, are layers of programs that compute outputs alone, too."""
    size = 8
    weights = {name: random(size, size, scale=0.3, seed=i) for i, name in enumerate(("w0", "wq", "wk", "wv"))}
    nodes = [
        node("MatMul", "x w0", "h"),
        *(node("MatMul", f"h w{name}", name) for name in "qkv"),
        node("Concat", "q k v h", "j", axis=1),
        node("Relu", "j", "y"),
    ]
    data = {"x": random(4, size)}
    model = onnx_model(nodes, data, {"y": [4, 4 * size]}, weights)
    graph = with_fan_outs(import_model(model).graph)
    assert [operator.name for operator in graph.operators if operator.is_fan_out] == ["MatMul_h_fan_out"]
    found = run(random_plan(graph, 4, seed), read_weights(model), data)
    assert difference(found["y"], by_onnxruntime(model, data)["y"]) < TOLERANCE


def test_a_wrong_weight_shows() -> None:
    """What the comparison would miss: a weight that is not read."""
    model, data = convolutional()
    plan = random_plan(import_model(model).graph, 1, 0)
    weights = read_weights(model)
    statistics = [name for name in weights if name.endswith(("c1", "c2")) and weights[name].shape == (8,)]
    assert statistics
    for name in [*statistics, next(name for name in weights if weights[name].shape == (8, 3, 3, 3))]:
        changed = {**weights, name: weights[name] + 0.1}
        found = run(plan, changed, data)
        assert difference(found["y"], onnx_outputs("convolutional")["y"]) > 1e-3, name


def on_ranks(
    ranks: Pool, plan: Plan, weights: Mapping[str, Array], data: Mapping[str, Array], folder: Path
) -> dict[str, Array]:
    """Return what a program computes as its file does, on processes, with weights in a file."""
    path = folder / "weights.npz"
    np.savez(path, **weights)  # type: ignore[arg-type]
    given = options(1, weights_path=path)
    return ranks.run(outputs, emit(plan, target="torch"), given, dict(data), world=plan.num_devices)[0]


def test_any_number_of_examples(ranks: Pool, tmp_path: Path) -> None:
    model, _ = convolutional()
    plan = random_plan(import_model(model).graph, 2, 1)
    rows = random(7, 3, 14, 14, seed=3)
    found = on_ranks(ranks, plan, read_weights(model), {"x": rows}, tmp_path)
    expected = [by_onnxruntime(model, {"x": rows[[i, i, i, i]]})["y"][0] for i in range(7)]
    assert difference(found["y"], np.stack(expected)) < TOLERANCE


def test_an_output_without_the_batch_is_of_one_batch(ranks: Pool, tmp_path: Path) -> None:
    turned = onnx_model([node("Transpose", "x", "y", perm=[1, 0])], {"x": random(4, 6)}, {"y": [6, 4]}, {})
    plan = random_plan(import_model(turned).graph, 1, 0)
    with pytest.raises(RanksFailedError, match=r"'y' has shape \[6, 4\], .* give exactly 4 examples, found 5"):
        on_ranks(ranks, plan, {}, {"x": random(5, 6)}, tmp_path)


# -- Keras


@cache
def keras_convolutional() -> Any:
    layers = keras.layers
    keras.utils.set_random_seed(0)
    image = layers.Input((17, 17, 3), name="image")
    x = layers.Rescaling(1 / 2.0, offset=-0.3)(image)
    x = layers.Conv2D(8, 3, strides=2, padding="same", activation="relu")(x)
    x = layers.ZeroPadding2D(((0, 1), (1, 2)))(x)
    x = kept = layers.ReLU(6.0)(layers.BatchNormalization()(x))
    x = layers.Activation("swish")(layers.DepthwiseConv2D(3, padding="same")(x))
    x = layers.LeakyReLU(negative_slope=0.2)(layers.SeparableConv2D(8, 3, padding="same", dilation_rate=2)(x))
    x = layers.Add()([x, kept])
    x = layers.Concatenate()([x, layers.Conv2D(4, (1, 3), padding="same", groups=2, use_bias=False)(x)])
    x = layers.AveragePooling2D(2, strides=1, padding="same")(layers.MaxPooling2D(3, strides=2, padding="same")(x))
    scale = layers.Dense(12, activation="hard_sigmoid")(layers.GlobalAveragePooling2D(keepdims=True)(x))
    x = layers.Flatten()(layers.Multiply()([x, scale]))
    return _moved(keras.Model(image, layers.Dense(10, activation="softmax")(x), name="convolutional"))


@cache
def keras_transformer() -> Any:
    layers = keras.layers
    keras.utils.set_random_seed(0)
    tokens = layers.Input((6,), dtype="int32", name="tokens")
    x = layers.Embedding(13, 16)(tokens)
    y = layers.LayerNormalization()(x)
    x = x + layers.MultiHeadAttention(4, 4)(y, y, use_causal_mask=True)
    y = layers.Dense(32, activation="gelu")(layers.LayerNormalization()(x))
    x = layers.GlobalAveragePooling1D()(x + layers.Dense(16)(y))
    return _moved(keras.Model(tokens, layers.Dense(3)(x), name="transformer"))


def _moved(model: Any) -> Any:
    """Return a model whose vectors are none of zeros and ones, as after training."""
    for i, variable in enumerate(model.variables):
        if len(variable.shape) == 1 and "seed" not in variable.path:
            values = random(*variable.shape, scale=0.2, seed=i)
            variable.assign(1 + np.abs(values) if "variance" in variable.path else variable.numpy() + values)
    return model


KERAS = {"convolutional": keras_convolutional, "transformer": keras_transformer}


def keras_data(model: Any, batch: int) -> Array:
    (declared,) = model.inputs
    if "int" in str(declared.dtype):
        return np.random.default_rng(0).integers(0, 13, (batch, *declared.shape[1:])).astype(np.int32)
    return random(batch, *declared.shape[1:])


@pytest.mark.parametrize(("name", "num_devices"), [("convolutional", 2), ("transformer", 4)])
def test_keras_models(name: str, num_devices: int, tmp_path: Path) -> None:
    model = KERAS[name]()
    data = keras_data(model, 4)
    expected = np.asarray(model(data, training=False))
    source: Any = model
    if num_devices == 2:
        source = str(tmp_path / "model.keras")
        model.save(source)
    graph = import_model(source, batch=4).graph
    found = run(random_plan(graph, num_devices, 1), read_weights(source), {model.inputs[0].name: data})
    (output,) = found.values()
    assert difference(output, expected) < TOLERANCE


# -- what cannot be done is said


def test_an_operator_that_is_not_known_is_named() -> None:
    data = {"x": random(4, 8)}
    nodes = [node("Relu", "x", "a"), node("LpNormalization", "a", "b", axis=-1, p=1), node("Tanh", "b", "y")]
    model = onnx_model(nodes, data, {"y": [4, 8]}, {})
    with pytest.raises(EmitError, match=r"cannot be written as a program: LpNormalization: .*replace it in the model"):
        emit(random_plan(import_model(model).graph, 1, 0))


def test_missing_weights_and_inputs_are_named(ranks: Pool, tmp_path: Path) -> None:
    model, data = convolutional()
    plan = random_plan(import_model(model).graph, 1, 0)
    weights = read_weights(model)
    name = next(iter(weights))
    with pytest.raises(RanksFailedError, match=r"the weights have no array .*pase weights MODEL"):
        on_ranks(ranks, plan, {key: array for key, array in weights.items() if key != name}, data, tmp_path)
    with pytest.raises(RanksFailedError, match=f"weight '{name}' has shape .*the weights are of another model"):
        on_ranks(ranks, plan, {**weights, name: random(3)}, data, tmp_path)
    with pytest.raises(RanksFailedError, match=r"the data have no array 'x'; the file holds other"):
        on_ranks(ranks, plan, weights, {"other": data["x"]}, tmp_path)
    with pytest.raises(RanksFailedError, match=r"input 'x' has shape \[4, 3, 14\]; expected \[N, 3, 14, 14\]"):
        on_ranks(ranks, plan, weights, {"x": data["x"][..., 0]}, tmp_path)


def test_weights_of_what_holds_none() -> None:
    with pytest.raises(
        ModelError, match="weights are read of ONNX files, Keras models, torch modules and JAX functions"
    ):
        read_weights("model.bin")


def test_every_layer_has_a_body_that_survives_its_document() -> None:
    graph = import_model(transformer()[0]).graph
    assert all(operator.body is not None and operator.body.steps for operator in graph.operators)
    document = json.loads(json.dumps(graph_document(graph), allow_nan=False))
    assert graph_from_document(document, DocumentSource(PlanError, "plan.json")) == graph
