"""Keras models: parameters and shapes as Keras has them, FLOP by formula, vertices as published counts have them."""

import os
import resource
import subprocess
import sys
import warnings
from math import prod
from pathlib import Path
from typing import Any

import pytest

import pase
from pase import load, search
from pase.errors import ModelError
from pase.importers.frameworks import ImportedModel, import_model
from pase.importers.keras.model import KerasFrontEnd
from tests.importers import keras_zoo, torch_zoo
from tests.importers.keras_zoo import ZOO, cnn

with warnings.catch_warnings():
    # TensorFlow's own, when it is first imported.
    warnings.simplefilter("ignore")
    keras = pytest.importorskip("keras")

BATCH = 2
layers, ops = keras.layers, keras.ops


def _num_trained(model: Any) -> int:
    return sum(prod(variable.shape) for variable in model.trainable_variables)


def _flop(model: Any) -> int:
    """Return the FLOP of all convolutions and dense layers, by their formulas, from Keras' own shapes."""
    total = 0
    for layer in model._flatten_layers():
        for node in layer._inbound_nodes:
            out = BATCH * prod(node.outputs[0].shape[1:])
            match layer:
                case layers.DepthwiseConv2D():
                    total += 2 * out * prod(layer.kernel_size)
                case layers.Conv2D() | layers.Dense():
                    # Products for each element of the result: all of a filter.
                    total += 2 * out * prod(layer.kernel.shape[:-1])
                case _:
                    pass
    return total


def _imported(model: Any, **arguments: Any) -> ImportedModel:
    return import_model(model, batch=BATCH, arguments=arguments)


@pytest.mark.parametrize(
    ("name", "num_layers", "num_vertices"),
    [
        ("MobileNetV2", 155, 121),
        pytest.param("EfficientNetB0", 239, 174, marks=pytest.mark.full),
        pytest.param("DenseNet201", 708, 505, marks=pytest.mark.full),
        pytest.param("InceptionV3", 312, 218, marks=pytest.mark.full),
    ],
)
def test_applications_have_the_published_counts(name: str, num_layers: int, num_vertices: int) -> None:
    with KerasFrontEnd().without_weights():
        model = getattr(keras.applications, name)(weights=None)
    found = _imported(model)
    assert found.num_operators["source"] == num_layers
    assert len(found.graph.operators) == pytest.approx(num_vertices, rel=0.15)
    assert found.graph.num_parameters == _num_trained(model)
    assert found.graph.forward_flop(contractions_only=True) == _flop(model)
    assert not list(found.generic)
    assert all(variable._value is None for variable in model.variables)


@pytest.mark.parametrize("name", ZOO)
def test_parameters_and_shapes_are_keras_own(name: str) -> None:
    model = ZOO[name]()
    found = _imported(model)
    assert found.graph.num_parameters == _num_trained(model)
    assert not list(found.generic)
    source = found.traces[0]
    for tensor, value in zip(model.outputs, source.outputs, strict=True):
        # Keras leaves a dim open where a layer's configuration does.
        shape = source.values[value].shape
        assert shape[0] == BATCH
        assert all(a in (None, b) for a, b in zip(tensor.shape, shape, strict=True))
    shapes = {leaf.value.name: leaf.value.shape for leaf in source.leaves}
    assert {v.path: tuple(v.shape) for v in model.trainable_variables}.items() <= shapes.items()


def test_the_order_of_dims_makes_no_difference() -> None:
    last, first = (load(cnn(data_format), batch=32) for data_format in ("channels_last", "channels_first"))
    spaces = [sorted((op.kind, sorted(op.extents.values())) for op in graph.operators) for graph in (last, first)]
    assert spaces[0] == spaces[1]
    assert last.forward_flop() == first.forward_flop()
    plans = [search(graph, 8) for graph in (last, first)]
    assert plans[0].total_cost == plans[1].total_cost
    assert plans[0].baselines == plans[1].baselines


def test_a_network_is_the_same_through_pytorch() -> None:
    torch = pytest.importorskip("torch")
    with KerasFrontEnd().without_weights():
        ours = load(keras_zoo.resnet((1, 2), 32), batch=32)
    with torch.device("meta"):
        theirs = load(torch_zoo.resnet((1, 2), 32, 32))
    assert len(ours.operators) == len(theirs.operators) == 30
    assert ours.num_parameters == theirs.num_parameters
    assert ours.forward_flop() == theirs.forward_flop()
    plans = [search(graph, 8) for graph in (ours, theirs)]
    assert plans[0].exact
    assert plans[0].total_cost == plans[1].total_cost
    assert plans[0].baselines == plans[1].baselines


def test_flop_of_convolutions_and_attention_by_hand() -> None:
    x = keras.Input((8, 8, 6))
    y = layers.Conv2D(12, 3, groups=3, padding="same")(x)
    y = layers.SeparableConv2D(10, 3, strides=2, padding="same")(y)
    y = layers.Conv2DTranspose(4, 2, strides=2)(y)
    y = layers.Reshape((64, 4))(y)
    y = layers.MultiHeadAttention(2, 5)(y, y)
    # Products for one example: a group has 2 channels; 12 channels alone, then together; each of 4 · 4 points gives
    # 2 · 2; three projections, scores and their product with the values, and one projection more.
    convolutions = 64 * 12 * 9 * 2 + 16 * 12 * 9 + 16 * 12 * 10 + 16 * 10 * 4 * 4
    attention = 3 * 64 * 4 * 10 + 2 * 2 * 64 * 64 * 5 + 64 * 10 * 4
    graph = load(keras.Model(x, y), batch=BATCH)
    assert graph.forward_flop(contractions_only=True) == 2 * BATCH * (convolutions + attention)


def test_a_layer_that_is_called_twice_has_its_weights_once() -> None:
    x = keras.Input((16,))
    shared = layers.Dense(16)
    found = _imported(keras.Model(x, layers.Dense(3)(shared(shared(x)))))
    assert found.num_operators["source"] == 3
    reads = [access.shared for op in found.graph.operators for access in op.parameters if access.shared]
    assert sorted(reads) == sorted([f"{shared.name}/kernel", f"{shared.name}/bias"] * 2)
    assert found.graph.num_parameters == 16 * 17 + 17 * 3


def test_a_tied_table_is_one_parameter() -> None:
    x = keras.Input((16,), dtype="int32")
    table = layers.ReversibleEmbedding(100, 8)
    model = keras.Model(x, table(layers.Dense(8)(table(x)), reverse=True))
    assert load(model, batch=BATCH).num_parameters == 100 * 8 + 8 * 9 == model.count_params()


class _Positions(layers.Layer):  # type: ignore[misc]
    """Tokens and positions, as Keras' own examples have them."""

    def __init__(self, steps: int, words: int, width: int) -> None:
        super().__init__()
        self.tokens, self.positions = layers.Embedding(words, width), layers.Embedding(steps, width)

    def call(self, x: Any) -> Any:
        return self.tokens(x) + self.positions(ops.arange(0, ops.shape(x)[-1]))


class _Scale(layers.Layer):  # type: ignore[misc]
    def build(self, shape: Any) -> None:
        self.gain = self.add_weight(shape=(shape[-1],), name="gain")

    def call(self, x: Any) -> Any:
        # A variable first, and an operation on a variable alone.
        return self.gain * x + ops.square(self.gain)


class _Block(keras.Model):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__(name="block")
        self.first, self.second = _Positions(16, 50, 8), _Scale()
        self.last = layers.Dense(3, activation=lambda x: x * ops.sigmoid(x))

    def call(self, x: Any, training: bool = False) -> Any:
        return self.last(ops.mean(self.second(self.first(x)), axis=1))


def test_code_of_the_users_is_looked_into() -> None:
    model = _Block()
    inputs = keras.Input((16,), dtype="int32")
    found = _imported((model, inputs))
    assert not list(found.generic)
    assert found.graph.num_parameters == (50 + 16) * 8 + 8 + 9 * 3
    assert found.traces[0].notes == ()
    assert sum(op.kind == "embedding" for op in found.graph.operators) == 1


class _Opaque(layers.Layer):  # type: ignore[misc]
    def build(self, shape: Any) -> None:
        self.table = self.add_weight(shape=(shape[-1], 5), name="table")

    def call(self, x: Any) -> Any:
        return keras.ops.convert_to_tensor(keras.ops.convert_to_numpy(x)) @ self.table

    def compute_output_shape(self, shape: Any) -> Any:
        return (*shape[:-1], 5)


def test_what_cannot_be_followed_is_generic_with_its_weights() -> None:
    x = keras.Input((16,))
    model = keras.Model(x, layers.Dense(2)(_Opaque(name="odd")(x)))
    found = _imported(model)
    assert list(found.generic) == [("odd", "_Opaque")]
    assert found.graph.num_parameters == model.count_params() == 16 * 5 + 12
    assert any(note.startswith("odd is not taken apart: ") for note in found.traces[0].notes)
    with pytest.raises(ModelError, match="has operators that nothing is known of: _Opaque"):
        import_model(model, is_strict=True)


def test_a_model_whose_own_code_cannot_be_followed_is_refused() -> None:
    class Odd(keras.Model):  # type: ignore[misc]
        def call(self, x: Any) -> Any:
            return ops.convert_to_numpy(x)

    with pytest.raises(ModelError, match=r"Keras model 'odd' cannot be followed: .*keras.ops"):
        load((Odd(), keras.Input((4,))))


def test_frozen_layers_are_told() -> None:
    model = cnn()
    model.trainable = False
    found = _imported(model)
    assert found.graph.num_parameters == _num_trained(cnn())
    assert any("parameters are frozen in the model" in note for note in found.traces[0].notes)


def test_the_model_stays_as_it_is() -> None:
    model = cnn()
    block = layers.MultiHeadAttention(2, 4)
    x = keras.Input((6, 8))
    attention = keras.Model(x, block(x, x))
    before = [(len(layer._inbound_nodes), len(layer._outbound_nodes)) for layer in attention._flatten_layers()]
    weights = [variable.numpy().copy() for variable in model.variables]
    load(model, batch=BATCH), load(attention, batch=BATCH)
    assert before == [(len(layer._inbound_nodes), len(layer._outbound_nodes)) for layer in attention._flatten_layers()]
    assert all((a == b.numpy()).all() for a, b in zip(weights, model.variables, strict=True))
    assert model.layers[1].output.shape == (None, 8, 8, 16)


def test_weights_are_not_allocated() -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with KerasFrontEnd().without_weights():
        x = keras.Input((40_000,))
        model = keras.Model(x, layers.Dense(40_000)(layers.Dense(40_000)(x)))
    graph = load(model, batch=BATCH)
    # 12.8 GB of weights; ru_maxrss is in KiB.
    assert graph.num_parameters == 2 * 40_000 * 40_001
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300 * 2**10
    x = keras.Input((3,))
    assert keras.Model(x, layers.Dense(2)(x)).predict(ops.ones((1, 3)), verbose=0).shape == (1, 2)
    assert all(variable._value is None for variable in model.variables)


@pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy:DeprecationWarning")
def test_a_process_in_which_nothing_has_loaded_keras(tmp_path: Path) -> None:
    """A factory that imports Keras itself allocates nothing; a model is the same whatever Keras runs on."""
    (tmp_path / "late_factory.py").write_text(
        "def net(units, batch=1):\n"
        "    import keras.layers as layers\n"
        "    x = layers.Input((20000,), batch_size=batch)\n"
        "    from keras import Model\n"
        "    return Model(x, layers.Dense(units)(layers.Dense(60000)(x)), name='late')\n"
    )
    model = ZOO["transformer"]()
    model.save(tmp_path / "transformer.keras")
    program = (
        "import pase\n"
        "graph = pase.load('late_factory:net', batch=4, arguments={'units': '30000'})\n"
        # Not getrusage: its peak counts what this process held when it started the other.
        "print(next(line.split()[1] for line in open('/proc/self/status') if line.startswith('VmHWM:')))\n"
        "print(graph.num_parameters, graph.operators[0].extents['b'])\n"
        "import keras\n"
        "graph = pase.load('transformer.keras', batch=2)\n"
        "names = [f'{op.name}={op.kind}' for op in graph.operators]\n"
        "print(keras.backend.backend(), graph.num_parameters, graph.forward_flop(), *names)\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        timeout=120,
        env=os.environ | {"KERAS_BACKEND": "numpy", "PYTHONPATH": str(Path(pase.__file__).parents[1])},
    )
    assert result.returncode == 0, result.stderr
    *_, peak, counts, found = result.stdout.splitlines()
    # 12 GB of weights; in KiB.
    assert int(peak) < 1500 * 2**10
    assert counts == f"{20_001 * 60_000 + 60_001 * 30_000} 4"
    graph = load(model, batch=2)
    expected = ["numpy", str(graph.num_parameters), str(graph.forward_flop())]
    assert found.split() == expected + [f"{op.name}={op.kind}" for op in graph.operators]


# -- inputs


def _steps() -> Any:
    x = keras.Input((None, 8), name="steps")
    return keras.Model(x, layers.Dense(4)(x), name="any_length")


def test_shapes_that_are_not_known_are_asked_for() -> None:
    with pytest.raises(ModelError, match=r"input 'steps' of .*'any_length' has shape \[\?, \?, 8\].* --arg steps=Nx8$"):
        load(_steps())
    for name in ("steps", "shape"):
        graph = load(_steps(), batch=16, arguments={name: "12x8"})
        assert sorted(graph.operators[0].extents.values()) == [4, 8, 12, 16]
        assert dict(graph.arguments) == {"batch": 16, name: "12x8"}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"steps": "12x9"}, r"input 'steps' is given the shape '12x9'; the model has \[\?, 8\] there"),
        ({"steps": "12"}, r"the model has \[\?, 8\] there, without the batch"),
        ({"steps": "0x8"}, r"the shape '0x8' of input 'steps' is not usable; expected whole numbers"),
        ({"steps": "manyx8"}, r"the shape 'manyx8' of input 'steps' is not usable"),
        ({"step": "12x8"}, r"has no input 'step'; its inputs are steps"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(given: dict[str, str], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        load(_steps(), arguments=given)


def test_a_batch_that_nothing_tells_is_noted() -> None:
    found = import_model(cnn())
    assert found.traces[0].notes == ("a batch of 32 was assumed; --batch gives another",)
    assert found.graph.operators[0].extents["b"] == 32


def test_a_model_that_was_never_called_needs_a_shape() -> None:
    def chain() -> Any:
        return keras.Sequential([layers.Dense(8), layers.ReLU(), layers.Dense(2)], name="chain")

    with pytest.raises(ModelError, match=r"'chain' has never been called.*--arg shape=224x224x3"):
        load(chain())
    assert load(chain(), batch=4, arguments={"shape": "12"}).num_parameters == 13 * 8 + 9 * 2
    assert load((chain(), keras.Input((12,))), batch=4).num_parameters == 13 * 8 + 9 * 2
    with pytest.raises(ModelError, match=r"is given a str as input; expected keras.Input or an array"):
        load((chain(), "12"))


# -- what JAX would take apart, and what it is called


def _kinds(model: Any) -> list[tuple[str, str]]:
    found = _imported(model)
    assert not list(found.generic)
    return [(op.name, op.kind) for op in found.graph.operators]


def test_layers_have_their_names_whatever_these_mean_to_jax() -> None:
    x = keras.Input((8,))
    y = x
    for name in ("body", "cond", "jit", "vmap", "keras0", "a b", "one.two"):
        y = layers.Dense(8, name=name)(y)
    named = [name for name, _ in _kinds(keras.Model(x, y))]
    assert named == ["body", "cond", "jit", "vmap", "keras0", "a b", "one.two"]


def test_normalisations_are_what_their_layers_are() -> None:
    x = keras.Input((6, 6, 4))
    y = layers.Conv2D(8, 3)(layers.Normalization(name="data")(x))
    kinds = {"batch": layers.BatchNormalization(name="batch"), "layer": layers.LayerNormalization(name="layer"),
             "rms": layers.RMSNormalization(name="rms"), "group": layers.GroupNormalization(2, name="group"),
             "instance": layers.GroupNormalization(-1, name="instance")}  # fmt: skip
    for layer in kinds.values():
        y = layer(y)
    found = dict(_kinds(keras.Model(x, layers.Dense(2)(layers.Flatten()(y)))))
    assert {name: found[name] for name in kinds} == {name: f"{name}_norm" for name in kinds}
    # Statistics that were counted before training are no moments of the batch.
    assert list(found.values()).count("batch_norm") == 1


@pytest.mark.parametrize("kind", ["Average", "Max"])
@pytest.mark.parametrize(("size", "expected"), [(4, "pool2d"), (1, "reduction")])
def test_pooling_to_a_size_is_pooling(kind: str, size: int, expected: str) -> None:
    x = keras.Input((16, 16, 4))
    model = keras.Model(x, layers.Dense(3)(getattr(layers, f"Adaptive{kind}Pooling2D")(size, name="pool")(x)))
    assert dict(_kinds(model))["pool"] == expected


def test_resizing_lets_examples_and_channels_through() -> None:
    x = keras.Input((8, 8, 4))
    found = _imported(keras.Model(x, layers.UpSampling2D(2, interpolation="bilinear")(layers.Conv2D(6, 1)(x))))
    assert [name for _, name in found.generic] == ["resize"]
    extents = found.graph.operators[-1].extents
    assert sorted(value for name, value in extents.items() if name.startswith("p")) == [BATCH, 6]


def test_augmentation_is_done_in_training_alone() -> None:
    x = keras.Input((16, 16, 3))
    y = layers.RandomHue(0.1)(layers.RandomRotation(0.1)(layers.RandomFlip()(x)))
    assert [kind for _, kind in _kinds(keras.Model(x, layers.Conv2D(4, 3)(y)))] == ["conv2d"]


@pytest.mark.parametrize("unroll", [False, True])
def test_steps_of_a_layer_are_examples_to_it_even_where_some_are_masked(unroll: bool) -> None:
    x = keras.Input((9,), dtype="int32")
    y = layers.LSTM(6, return_sequences=True, unroll=unroll)(layers.Embedding(20, 8, mask_zero=True)(x))
    y = layers.GlobalAveragePooling1D()(layers.TimeDistributed(layers.Dense(4), name="steps")(y))
    kinds = [kind for _, kind in _kinds(keras.Model(x, y))]
    assert kinds[:3] == ["embedding", "recurrent", "dense"]
    assert kinds.count("dense") == 1
