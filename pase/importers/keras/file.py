"""`.keras` files: their configuration is checked name by name and then converted to a model without weights.

Nothing that a file names is imported, and none of its code is run: every class anywhere in the configuration must be
listed here. Keras never opens the file itself, but a copy of the checked contents.
"""

import json
import re
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from pase.errors import ModelError
from pase.importers.isolated import copy_arrays

_MAX_BYTES = 64 * 2**20
"""Of the configuration; that of a model of a thousand layers has about one million."""

_MAX_VALUES = 2_000_000
"""Of the configuration: a model of a thousand layers has about 100,000, and the emptiest takes 64 bytes in memory."""

_VALUES = frozenset({"__keras_tensor__", "__tensor__", "__numpy__", "__bytes__", "__ellipsis__", "__slice__"})
"""Literals."""

_CODE = "it holds code of the user's, and code from files is not run"
_FILES = "it loads a file of its own"
_TEXT = "it looks up text by files, and nothing of it is trained"
_REFUSED: Mapping[str, str] = {
    "Lambda": _CODE,
    "TorchModuleWrapper": _CODE,
    "JaxLayer": _CODE,
    "FlaxLayer": _CODE,
    "TFSMLayer": _FILES,
    "StringLookup": _TEXT,
    "IntegerLookup": _TEXT,
    "TextVectorization": _TEXT,
}
"""Classes of Keras' own that a file may not name, and why."""

_PLAIN = """
    Activation ActivityRegularization Add AdditiveAttention AlphaDropout Attention AugMix AutoContrast Average
    BatchNormalization Bidirectional CategoryEncoding CenterCrop Concatenate CutMix Dense Discretization Dot
    Dropout ELU EinsumDense Embedding Equalization Flatten GRU GRUCell GaussianDropout GaussianNoise
    GroupNormalization GroupedQueryAttention Identity InputLayer LSTM LSTMCell LayerNormalization LeakyReLU
    Masking MaxNumBoundingBoxes Maximum Minimum MixUp MultiHeadAttention Multiply Normalization PReLU Permute
    Pipeline RMSNormalization RNN RandAugment RandomBrightness RandomColorDegeneration RandomColorJitter
    RandomContrast RandomCrop RandomElasticTransform RandomErasing RandomFlip RandomGaussianBlur RandomGrayscale
    RandomHue RandomInvert RandomPerspective RandomPosterization RandomRotation RandomSaturation RandomSharpness
    RandomShear RandomTranslation RandomZoom ReLU RepeatVector Rescaling Reshape Resizing ReversibleEmbedding
    SimpleRNN SimpleRNNCell Softmax Solarization SpectralNormalization StackedRNNCells Subtract TimeDistributed
    UnitNormalization
"""
_SPATIAL = """
    AdaptiveAveragePooling*D AdaptiveMaxPooling*D AveragePooling*D Conv*D Conv*DTranspose ConvLSTM*D Cropping*D
    DepthwiseConv*D GlobalAveragePooling*D GlobalMaxPooling*D MaxPooling*D SeparableConv*D SpatialDropout*D
    UpSampling*D ZeroPadding*D
"""
_LAYERS = frozenset(_PLAIN.split()) | {name.replace("*", n) for name in _SPATIAL.split() for n in "123"}
"""Layers that a file may name: they compute with tensors, and their constructors read and allocate nothing."""

_MODELS = ("keras.src.models.functional", "keras.src.models.model", "keras.src.models.sequential")
_NUMBERS = re.compile(r"bool|u?int(8|16|32|64)|b?float(16|32|64)")
_MAX_DEPTH = 200

_WITHOUT_MODULE = ("layers", "initializers", "regularizers", "constraints", "dtype_policies", "models", "activations")
"""Modules in which to find classes without a module, as in older files."""


def read_model(keras: Any, path: str) -> Any:
    """Return the model of a file without loading its weights.

    Raises ModelError where the file has another format, is damaged, or names a class that is not part of Keras.
    """
    config = checked_config(keras, path)
    try:
        with _sequences_built_once(keras):
            model = keras.saving.deserialize_keras_object(_without(config, "build_config"), safe_mode=True)
    except Exception as error:
        raise ModelError(f"{path!r} cannot be made into a model: {type(error).__name__}: {_cause(error)}") from error
    if not isinstance(model, keras.Model):
        raise ModelError(f"{path!r} holds a {type(model).__name__}; expected a model")
    return model


@contextmanager
def _sequences_built_once(keras: Any) -> Iterator[None]:
    """Make Keras build a `Sequential` from a file only when all of its layers are present.

    Otherwise it rebuilds the model after each added layer: 600 layers take minutes.
    """
    original = vars(keras.Sequential)["from_config"]

    def from_config(cls: Any, config: Any, custom_objects: Any = None) -> Any:
        read = keras.saving.deserialize_keras_object
        if any("module" not in item for item in config["layers"]):
            return original.__func__(cls, config, custom_objects)
        model = cls([read(item, custom_objects=custom_objects) for item in config["layers"]], name=config["name"])
        shape = config.get("build_input_shape")
        if shape and not model.built and isinstance(shape, list | tuple):
            model.build(shape)
        return model

    keras.Sequential.from_config = classmethod(from_config)
    try:
        yield
    finally:
        keras.Sequential.from_config = original


def read_losses(path: str, notes: list[str]) -> Any:
    """Return the losses that the model of a file was compiled with, as `compile` takes them; None for none.

    They are read as names and numbers: only classes of `keras.losses` with plain settings are created.

    Args:
        path: Path of the file.
        notes: Receives notes about omitted losses.
    """
    compiled = read_config(path).get("compile_config")
    given = compiled.get("loss") if isinstance(compiled, dict) else None

    def known(item: Any) -> Any:
        found = _known_loss(item)
        if found is None and item is not None:
            name = item
            if isinstance(item, dict):
                is_function = item.get("class_name") == "function"
                name = item.get("config") if is_function else item.get("registered_name") or item.get("class_name")
            notes.append(
                f"the file's loss {name!r:.60} is left out: it is none of keras.losses with plain settings; to have "
                f"it, {_INSTEAD}"
            )
        return found

    if isinstance(given, list):
        return [known(item) for item in given]
    if isinstance(given, dict) and "class_name" not in given:
        return {name: known(item) for name, item in given.items()}
    return known(given)


def _known_loss(item: Any) -> Any:
    """Return the loss that a configuration describes; None for an unknown one."""
    settings: Any = {}
    if isinstance(item, dict):
        is_own = item.get("module") in ("keras.losses", "builtins", None)
        name, settings = item.get("class_name"), item.get("config")
        if name == "function":
            name, settings = settings, {}
        if not is_own or item.get("registered_name") not in (None, name, "function"):
            return None
    else:
        name = item
    if not isinstance(name, str) or not isinstance(settings, dict) or len(settings) > _MAX_SETTINGS:
        return None
    found = import_module("keras.src.losses").ALL_OBJECTS_DICT.get(name)
    # All but one compare an output with a target of its shape or without its classes.
    if getattr(found, "__module__", "") != "keras.src.losses.losses" or name.lower() == "ctc":
        return None
    if not isinstance(found, type):
        return found
    words = ("name", "reduction", "dtype")
    if not all(v is None or isinstance(v, str if key in words else int | float) for key, v in settings.items()):
        return None
    try:
        return found(**settings)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
        return None


_MAX_SETTINGS = 20


def checked_config(keras: Any, path: str) -> dict[str, Any]:
    """Return the configuration in a file without its compile settings; ModelError where it is unsafe."""
    try:
        config: dict[str, Any] = _without(read_config(path), "compile_config")
    except RecursionError:
        raise ModelError(f"{path!r}: its config.json is nested more than {_MAX_DEPTH} deep") from None
    for item, name in _objects(config):
        _check(keras, item, name, path)
    return config


@contextmanager
def clean_copy(keras: Any, path: str) -> Iterator[str]:
    """Yield the path of a copy of a file: the checked configuration, and the arrays of its weights.

    A separate process reads the weights; its crash is reported as an error. Raises ModelError.
    """
    config = checked_config(keras, path)
    with tempfile.TemporaryDirectory(prefix="pase-keras-") as folder:
        stored, copied, clean = (Path(folder) / name for name in ("stored.h5", "copied.h5", "model.keras"))
        try:
            with zipfile.ZipFile(path) as archive, archive.open(_WEIGHTS) as stream, stored.open("wb") as target:
                _copy_bytes(stream, target, Path(path).stat().st_size)
            copy_arrays(stored, copied)
        except Exception as error:
            # Damaged data make the decompressors raise errors of their own.
            raise ModelError(f"the weights in {path!r} cannot be read: {error}") from error
        with zipfile.ZipFile(clean, "w") as archive:
            archive.writestr("config.json", json.dumps(config))
            archive.writestr("metadata.json", json.dumps({"keras_version": keras.__version__}))
            archive.write(copied, _WEIGHTS)
        stored.unlink()
        copied.unlink()
        yield str(clean)


_WEIGHTS = "model.weights.h5"


def _copy_bytes(stream: Any, target: Any, file_bytes: int) -> None:
    """Copy a member if it is not larger than Keras, which does not compress, could have written."""
    left_bytes = 4 * file_bytes
    while data := stream.read(1 << 20):
        left_bytes -= len(data)
        if left_bytes < 0:
            raise ValueError("they unpack to far more than the file has")
        target.write(data)


def _cause(error: Exception) -> str:
    """Return the most informative line of a message: Keras puts that of the layer last."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or ["no message"]
    mark = "Exception encountered: "
    return next((line.removeprefix(mark) for line in lines if line.startswith(mark)), lines[0])


def read_config(path: str) -> dict[str, Any]:
    """Return the configuration in a file; ModelError where it cannot be read."""
    if Path(path).suffix.lower() != ".keras":
        raise ModelError(
            f"{path!r} is in a format of older versions of Keras; load it there and save it again: "
            "model.save('model.keras')"
        )
    if not Path(path).is_file():
        raise ModelError(f"there is no file {path!r}")
    try:
        with zipfile.ZipFile(path) as archive:
            entry = archive.getinfo("config.json")
            with archive.open(entry) as stream:
                # The size stated in the archive is not trusted.
                text = stream.read(_MAX_BYTES + 1)
    except KeyError:
        raise ModelError(f"{path!r} holds no config.json; expected what model.save('model.keras') writes") from None
    except Exception as error:
        # Damaged data make the decompressors raise errors of their own.
        raise ModelError(f"{path!r} is no .keras file, or it is damaged: {_cause(error)}") from error
    if len(text) > _MAX_BYTES:
        raise ModelError(f"{path!r}: its configuration is larger than {_MAX_BYTES >> 20} MiB; this is not a model")
    num_values = sum(map(text.count, (b"{", b"[", b",")))
    if num_values > _MAX_VALUES:
        raise ModelError(
            f"{path!r}: its configuration has {num_values:,} values; at most {_MAX_VALUES:,} are read: this is not "
            "a model"
        )
    try:
        config = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path!r}: its config.json is not JSON: {error}") from error
    if not isinstance(config, dict) or "class_name" not in config or not isinstance(config.get("config"), dict):
        raise ModelError(f"{path!r}: its config.json describes no model; expected class_name and config")
    return config


def _without(item: Any, left_out: str, depth: int = 0) -> Any:
    """Return a configuration without the compile settings, or without the build settings of its layers.

    Layers that are built when they are called have variables of the same names as in the saved model. Raises
    RecursionError where it is nested too deeply.
    """
    if depth > _MAX_DEPTH:
        raise RecursionError
    if isinstance(item, list):
        return [_without(inner, left_out, depth + 1) for inner in item]
    if not isinstance(item, dict):
        return item
    is_object = "class_name" in item and "config" in item
    return {k: _without(v, left_out, depth + 1) for k, v in item.items() if not (is_object and k == left_out)}


def _objects(config: Any) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield every object that a configuration describes, with the name of the layer that it is part of."""
    pending: list[tuple[Any, str]] = [(config, "")]
    while pending:
        item, name = pending.pop()
        if isinstance(item, list):
            pending += [(inner, name) for inner in item]
        elif isinstance(item, dict):
            if "class_name" in item:
                inner = item.get("config")
                own = inner.get("name") if isinstance(inner, dict) else None
                name = own if isinstance(own, str) else name
                yield item, name
            pending += [(inner, name) for inner in item.values()]


def _check(keras: Any, item: dict[str, Any], name: str, path: str) -> None:
    """Raise ModelError unless an object is one of Keras' own that only computes."""
    class_name, module = item["class_name"], item.get("module")
    where = f"{path!r}: layer {name!r}"
    if not isinstance(class_name, str):
        raise ModelError(f"{where}: its class_name is {class_name!r:.60}; expected a word")
    if class_name in _VALUES:
        dtype = item["config"].get("dtype") if isinstance(item.get("config"), dict) else None
        if dtype is not None and not (isinstance(dtype, str) and _NUMBERS.fullmatch(dtype)):
            raise ModelError(f"{where}: a literal has the type {dtype!r}; expected one of numbers")
        return
    if class_name == "__lambda__" or class_name in _REFUSED:
        kind, why = ("a Lambda", _CODE) if class_name == "__lambda__" else (f"a {class_name}", _REFUSED[class_name])
        raise ModelError(f"{where} is {kind}: {why}; {_INSTEAD}")
    is_function = class_name == "function"
    if is_function:
        module, class_name = None if module == "builtins" else module, item.get("config")
    found = _resolved(keras, module, class_name) if isinstance(class_name, str) else None
    registered = item.get("registered_name")
    is_own = registered in (None, class_name, "function") and found is not None
    if not is_own or not _is_harmless(keras, found, is_function=is_function):
        full = registered if registered and isinstance(registered, str) else f"{module or '?'}.{class_name}"
        raise ModelError(f"{where} is of {full!r}, which is not Keras' own: files' code is never imported; {_INSTEAD}")


_INSTEAD = "write a function that returns the model and name that, as package.module:function"


def _resolved(keras: Any, module: Any, name: str) -> Any:
    """Return an object of a Keras module by name; None where the module does not exist. Nothing is imported."""
    if module is None:
        found = (getattr(getattr(keras, place), name, None) for place in _WITHOUT_MODULE)
        return next((thing for thing in found if thing is not None), None)
    if not isinstance(module, str) or module.partition(".")[0] != "keras":
        return None
    place: Any = keras
    for part in module.split(".")[1:]:
        place = getattr(place, part, None)
        if not isinstance(place, ModuleType):
            return None
    return getattr(place, name, None)


def _is_harmless(keras: Any, found: Any, *, is_function: bool) -> bool:
    """Whether something is a layer or a model that is known, an operation on tensors, or what these are made with."""
    owner = str(getattr(found, "__module__", ""))
    if owner.partition(".")[0] != "keras":
        return False
    if not isinstance(found, type):
        return any(found is thing for thing in vars(keras.activations).values())
    if is_function:
        return False
    is_layer = found.__name__ in _LAYERS and any(found is thing for thing in vars(keras.layers).values())
    if is_layer or (owner in _MODELS and issubclass(found, keras.Model)):
        return True
    if owner.startswith("keras.src.ops."):
        return issubclass(found, keras.Operation)
    bases = (
        keras.initializers.Initializer,
        keras.regularizers.Regularizer,
        keras.constraints.Constraint,
        keras.dtype_policies.DTypePolicy,
        keras.random.SeedGenerator,
    )
    return issubclass(found, bases)
