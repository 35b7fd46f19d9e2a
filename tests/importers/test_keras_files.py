"""`.keras` files: the same trace as the model's that was saved, its weights by name, and what is refused."""

import json
import os
import re
import warnings
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pase import load
from pase.errors import MissingExtraError, ModelError
from pase.importers import isolated
from pase.importers.keras import model as keras_model
from pase.importers.keras.model import KerasFrontEnd, read_weights
from tests.importers.keras_zoo import ZOO

with warnings.catch_warnings():
    # TensorFlow's own, when it is first imported.
    warnings.simplefilter("ignore")
    keras = pytest.importorskip("keras")
    h5py = pytest.importorskip("h5py")

layers = keras.layers
# Of Keras itself, with NumPy 2.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy:DeprecationWarning")


def _trace(source: Any) -> Any:
    return KerasFrontEnd().trace(source, batch=4, arguments={})


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of one layer, named "out"."""
    path = tmp_path_factory.mktemp("small") / "model.keras"
    x = keras.Input((4,))
    keras.Model(x, layers.Dense(2, name="out")(x), name="small").save(path)
    return path


def _written(path: Path, entries: Mapping[str, bytes | str]) -> str:
    # Weights lie as they are, as in Keras' own files.
    method = zipfile.ZIP_STORED if "model.weights.h5" in entries else zipfile.ZIP_DEFLATED
    with zipfile.ZipFile(path, "w", method) as archive:
        for name, data in entries.items():
            archive.writestr(name, data)
    return str(path)


def _entries(path: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def _changed(source: Path, target: Path, layer: Mapping[str, Any] | None = None, **model: Any) -> str:
    """Write a file with the descriptions of its layer, of whose settings those that are told, or model changed."""
    entries = _entries(source)
    config = json.loads(entries["config.json"]) | model
    own = config["config"]["layers"][1]
    for key, value in (layer or {}).items():
        own[key] = own[key] | value if key == "config" else value
    return _written(target, entries | {"config.json": json.dumps(config)})


def _function(module: str, name: str) -> dict[str, Any]:
    return {"class_name": "function", "module": module, "config": name, "registered_name": name}


_LARGER = [pytest.param(name, marks=pytest.mark.full) for name in ("images", "transformer")]


@pytest.mark.parametrize("name", ["nested", "operations", "recurrent", *_LARGER])
def test_a_file_is_what_was_saved(name: str, tmp_path: Path) -> None:
    model = ZOO[name]()
    model.compile("adam", "mse")
    expected = _trace(model)
    path = str(tmp_path / "model.keras")
    model.save(path)
    trace = _trace(path)
    assert repr(trace) == repr(expected)  # a number may be no number
    found, held = read_weights(path), read_weights(model)
    assert (
        found.keys()
        == held.keys()
        == {leaf.value.name for leaf in trace.leaves if leaf.storage and leaf.role != "input"}
    )
    for variable in model.trainable_variables:
        np.testing.assert_array_equal(found[variable.path], variable.numpy())
    assert all(np.array_equal(found[key], held[key]) for key in held)


def test_a_file_is_loaded_by_its_name(tmp_path: Path) -> None:
    path = tmp_path / "model.keras"
    model = ZOO["cnn"]()
    model.save(path)
    for source in (path, str(path)):
        assert load(source, batch=4) == load(model, batch=4)


LOSSES: dict[str, Callable[[], Any]] = {
    "short name": lambda: "mse",
    "name": lambda: "sparse_categorical_crossentropy",
    "function": lambda: keras.losses.categorical_crossentropy,
    "settings": lambda: keras.losses.CategoricalCrossentropy(from_logits=True, label_smoothing=0.1),
    "by output": lambda: {"out": keras.losses.SparseCategoricalCrossentropy(from_logits=True)},
    "in a list": lambda: ["hinge"],
    "none": lambda: None,
}


@pytest.mark.parametrize("name", LOSSES)
def test_the_loss_of_a_file_is_that_of_the_model_that_was_compiled(name: str, tmp_path: Path) -> None:
    x = keras.Input((4,))
    model = keras.Model(x, layers.Dense(3, name="out")(x))
    plain = _trace(model)
    model.compile("sgd", loss=LOSSES[name]())
    model.save(tmp_path / "model.keras")
    trace = _trace(str(tmp_path / "model.keras"))
    assert trace == _trace(model)
    assert len(trace.outputs) == len(plain.outputs) + (name != "none")
    assert trace.notes == plain.notes


def _loss(name: object, **config: object) -> dict[str, object]:
    return {"module": "keras.losses", "class_name": name, "config": config, "registered_name": None}


@pytest.mark.parametrize(
    ("loss", "named"),
    [
        ("mine", "'mine'"),
        ("get", "'get'"),
        ("deserialize", "'deserialize'"),
        (["x"], r"'x'"),
        (_loss("CTC"), "'CTC'"),
        (_loss("Loss"), "'Loss'"),
        (_loss(["MeanSquaredError"]), r"\['MeanSquaredError'\]"),
        (_loss("Huber", delta="wide"), "'Huber'"),
        (_loss("Huber", delta={"class_name": "Lambda"}), "'Huber'"),
        (_loss("Huber", spread=1.0), "'Huber'"),
        (_loss("Huber") | {"module": "os"}, "'Huber'"),
        (_loss("Huber") | {"registered_name": "mine>Huber"}, "'mine>Huber'"),
        (_loss("Huber") | {"config": [1]}, "'Huber'"),
        (_function("builtins", "eval"), "'eval'"),
        (_function("builtins", "mine") | {"registered_name": "function"}, "'mine'"),
        ({"class_name": "__lambda__", "config": {"value": ["code"]}}, "'__lambda__'"),
        (7, "7"),
    ],
)
def test_a_loss_that_is_not_known_is_left_out_with_one_note(
    small: Path, tmp_path: Path, loss: object, named: str
) -> None:
    path = _changed(small, tmp_path / "loss.keras", compile_config={"loss": loss})
    (note,) = [note for note in _trace(path).notes if "loss" in note]
    assert re.match(rf"the file's loss {named} is left out: it is none of keras.losses with plain settings; ", note)
    assert "package.module:function" in note
    assert _trace(path).outputs == _trace(str(small)).outputs


def test_a_model_without_weights_has_none_to_read() -> None:
    with KerasFrontEnd().without_weights():
        model = ZOO["nested"]()
    with pytest.raises(ModelError, match=r"'nested' was made without weights: '.*' has no values"):
        read_weights(model)


# -- what is refused


def _in(setting: str, value: object) -> dict[str, Any]:
    return {"config": {setting: value}}


def _literal(dtype: str) -> dict[str, Any]:
    return _in("units", {"class_name": "__numpy__", "config": {"value": [1, 2], "dtype": dtype}})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"module": "os", "class_name": "system"}, "layer 'out' is of 'os.system', which is not Keras' own"),
        ({"module": "keras.utils", "class_name": "get_file"}, "is of 'keras.utils.get_file', which is not Keras' own"),
        ({"module": "keras.src.utils.file_utils", "class_name": "get_file"}, "which is not Keras' own"),
        ({"registered_name": "mine>Dense"}, "layer 'out' is of 'mine>Dense', which is not Keras' own"),
        ({"class_name": "Lambda"}, "layer 'out' is a Lambda: it holds code of the user's"),
        ({"class_name": "TorchModuleWrapper"}, "layer 'out' is a TorchModuleWrapper: it holds code"),
        ({"class_name": "TFSMLayer"}, "layer 'out' is a TFSMLayer: it loads a file of its own"),
        ({"class_name": "StringLookup"}, "layer 'out' is a StringLookup: it looks up text by files"),
        ({"class_name": ["Dense"]}, r"layer 'out': its class_name is \['Dense'\]; expected a word"),
        (_in("activation", _function("keras.utils", "get_file")), "is of 'get_file', which is not Keras' own"),
        (_in("activation", _function("builtins", "eval")), "is of 'eval', which is not Keras' own"),
        (_in("activation", _function("keras.layers", "Dense")), "is of 'Dense', which is not Keras' own"),
        (_in("activation", {"class_name": "__lambda__", "config": {}}), "layer 'out' is a Lambda"),
        (_in("kernel_initializer", {"class_name": "Popen", "module": "subprocess"}), "'subprocess.Popen'"),
        (_literal("object"), "a literal has the type 'object'; expected one of numbers"),
        (_literal("S1000000000"), "a literal has the type 'S1000000000'; expected one of numbers"),
        (_literal("V999999999"), "a literal has the type 'V999999999'; expected one of numbers"),
        (_in("units", "many"), "cannot be made into a model: "),
        (_in("units", -1), "cannot be made into a model: "),
    ],
)
def test_what_is_not_known_to_be_harmless_is_refused(
    small: Path, tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        load(_changed(small, tmp_path / "bad.keras", change))


def test_an_enormous_layer_takes_no_memory(small: Path, tmp_path: Path) -> None:
    path = _changed(small, tmp_path / "large.keras", _in("units", 10**9))
    assert load(path, batch=1).num_parameters == 5 * 10**9


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (" " * (65 * 2**20), "its configuration is larger than 64 MiB"),
        ("{", "its config.json is not JSON"),
        ('{"class_name": "Functional", "config": ' + "[" * 100_000 + "]" * 100_000 + "}", "is not JSON"),
        ('{"class_name": "A", "config": {"a": ' + "[" * 250 + "]" * 250 + "}}", "is nested more than 200 deep"),
        ("[1]", "its config.json describes no model"),
        (
            '{"class_name": "Dense", "module": "keras.layers", "config": {"units": 2}}',
            "holds a Dense; expected a model",
        ),
    ],
)
def test_configurations_that_are_none_are_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        load(_written(tmp_path / "bad.keras", {"config.json": text}))


def test_files_that_are_none_are_refused(small: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"^there is no file '.*none.keras'"):
        load(tmp_path / "none.keras")
    truncated = tmp_path / "truncated.keras"
    truncated.write_bytes(small.read_bytes()[:700])
    with pytest.raises(ModelError, match=r"is no .keras file, or it is damaged"):
        load(truncated)
    with pytest.raises(ModelError, match=r"holds no config.json"):
        load(_written(tmp_path / "empty.keras", {"readme.txt": "nothing"}))
    with pytest.raises(ModelError, match=r"older versions of Keras; load it there and save it again"):
        load("model.h5")


def test_a_backend_that_is_missing_is_told(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(package: str, extra: str) -> Any:
        raise ModuleNotFoundError(f"No module named 'nobackend' for {package}, {extra}", name="nobackend")

    monkeypatch.setattr(keras_model, "framework", missing)
    with pytest.raises(MissingExtraError, match=r"Keras needs nobackend, which is not installed; PaSE's extra 'keras'"):
        load(small)


def test_damaged_weights_are_told(small: Path, tmp_path: Path) -> None:
    path = _written(tmp_path / "damaged.keras", _entries(small) | {"model.weights.h5": b"nothing"})
    assert load(path, batch=1).num_parameters == 10
    with pytest.raises(ModelError, match=r"the weights in '.*' cannot be read"):
        read_weights(path)


# -- what hides in a file


HIDDEN: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "beside a nested layer": lambda lookup: {
        "class_name": "Bidirectional", "config": {"name": "both", "layer": {"compile_config": lookup}}
    },
    "in a nested layer": lambda lookup: {
        "class_name": "Bidirectional",
        "config": {"layer": {"class_name": "LSTM", "config": {"units": 2, "name": "inner", "compile_config": lookup}}},
    },
    "in a pipeline": lambda lookup: {"class_name": "Pipeline", "config": {"layers": [{"compile_config": lookup}]}},
    "in a space of features": lambda lookup: {
        "class_name": "FeatureSpace", "module": "keras.utils", "config": {"features": {"compile_config": {"a": lookup}}}
    },
    "how it was built": lambda lookup: {"build_config": {"input_shape": [lookup]}},
}  # fmt: skip


@pytest.mark.parametrize("hide", HIDDEN.values(), ids=HIDDEN)
def test_a_file_that_a_configuration_names_is_not_read(
    small: Path, tmp_path: Path, hide: Callable[[dict[str, Any]], dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    vocabulary = tmp_path / "vocabulary.txt"
    vocabulary.write_text("secret\n", encoding="utf-8")
    made = []
    init = keras.layers.StringLookup.__init__
    monkeypatch.setattr(
        keras.layers.StringLookup, "__init__", lambda self, *a, **k: made.append(k) or init(self, *a, **k)
    )
    plain = {"module": "keras.layers", "registered_name": None}
    config = {"name": "lookup", "vocabulary": str(vocabulary)}
    change = plain | hide(plain | {"class_name": "StringLookup", "config": config})
    path = _changed(small, tmp_path / "hidden.keras", change)
    os.utime(vocabulary, (1, 1))
    for read in (load, read_weights):
        with pytest.raises(
            ModelError, match=r"StringLookup: it looks up text by files|FeatureSpace', which is not Keras'"
        ):
            read(path)
    assert made == []
    assert vocabulary.stat().st_atime == 1


def _claims_too_much(file: Any) -> None:
    del file["layers/dense/vars/0"]
    file.create_dataset("layers/dense/vars/0", (10**6, 10**4), "f4", chunks=(1, 1))


def _lies_elsewhere(file: Any) -> None:
    del file["layers/dense/vars/0"]
    file.create_dataset("layers/dense/vars/0", (4, 2), "f4", external=[("/etc/passwd", 0, 32)])


def _links(file: Any) -> None:
    file["layers/other"] = h5py.ExternalLink("/etc/passwd", "/")


def _goes_round(file: Any) -> None:
    file["layers/dense/again"] = file["layers"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_claims_too_much, "claims the shape|is stored in another file"),
        (_lies_elsewhere, "'0' is stored in another file"),
        (_links, "'other' is a link"),
        (_goes_round, "is nested in itself"),
    ],
)
def test_weights_that_are_more_than_arrays_are_refused(
    small: Path, tmp_path: Path, change: Callable[[Any], None], message: str
) -> None:
    entries, stored = _entries(small), tmp_path / "weights.h5"
    stored.write_bytes(entries["model.weights.h5"])
    with h5py.File(stored, "a") as file:
        change(file)
    path = _written(tmp_path / "weights.keras", entries | {"model.weights.h5": stored.read_bytes()})
    with pytest.raises(ModelError, match=rf"^the weights in '.*' cannot be read: .*({message})"):
        read_weights(path)


def test_weights_that_end_their_reader_are_told(small: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = tmp_path / "isolated.py"
    program.write_text("import os; os.abort()", encoding="utf-8")
    monkeypatch.setattr(isolated, "__file__", str(program))
    with pytest.raises(ModelError, match=r"the weights in '.*' cannot be read: reading them ended in signal 6"):
        read_weights(str(small))


def test_a_file_of_few_bytes_is_no_configuration_of_millions_of_values(tmp_path: Path) -> None:
    text = '{"class_name": "Functional", "config": {"layers": [' + "{}," * 3_000_000 + "{}]}}"
    path = _written(tmp_path / "model.keras", {"config.json": text})
    assert Path(path).stat().st_size < 50_000
    with pytest.raises(ModelError, match=r"its configuration has 6,000,00\d values; at most 2,000,000 are read"):
        load(path)


def test_a_sequence_of_layers_is_built_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keras builds it anew after each layer that it adds: the time of 600 is that of 180,000."""
    inner = keras.Sequential([keras.Input((4,)), *(layers.Dense(4) for _ in range(20))])
    model = keras.Sequential([keras.Input((4,)), inner, *(layers.Dense(4) for _ in range(40))])
    path = tmp_path / "model.keras"
    model.save(path)
    expected = len(load(model).operators)
    calls = []
    build = keras.Sequential.build
    original = vars(keras.Sequential)["from_config"]

    def counted(self: Any, *arguments: Any) -> None:
        calls.append(self.name)
        build(self, *arguments)

    monkeypatch.setattr(keras.Sequential, "build", counted)
    assert len(load(str(path)).operators) == expected
    assert len(calls) <= 4
    assert vars(keras.Sequential)["from_config"] is original
