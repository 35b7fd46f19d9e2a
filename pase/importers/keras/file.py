"""`.keras` files: their configuration, checked name by name and then made into a model without weights.

Nothing that a file names is imported, and none of its code is run: every class has to be one of Keras' own that
computes with tensors and does nothing else.
"""

import json
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from pase.errors import ModelError

_MAX_BYTES = 64 * 2**20
"""Of the configuration; that of a model of a thousand layers has about one million."""

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

_WITHOUT_MODULE = ("layers", "initializers", "regularizers", "constraints", "dtype_policies", "models", "activations")
"""Where a class is looked for whose module older files leave out."""


def read_model(keras: Any, path: str) -> Any:
    """Return the model of a file, its weights left where they are.

    Raises ModelError where the file is no such file, is damaged, or names a class that is not Keras' own.
    """
    config = read_config(path)
    for item, name in _objects(config):
        _check(keras, item, name, path)
    try:
        model = keras.saving.deserialize_keras_object(_without(config), safe_mode=True)
    except Exception as error:
        raise ModelError(f"{path!r} cannot be made into a model: {type(error).__name__}: {_cause(error)}") from error
    if not isinstance(model, keras.Model):
        raise ModelError(f"{path!r} holds a {type(model).__name__}; expected a model")
    return model


def _cause(error: Exception) -> str:
    """Return the line of a message that tells most: Keras puts what a layer says last."""
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
                # What the archive says of the size is not believed.
                text = stream.read(_MAX_BYTES + 1)
    except KeyError:
        raise ModelError(f"{path!r} holds no config.json; expected what model.save('model.keras') writes") from None
    except (zipfile.BadZipFile, EOFError, OSError, NotImplementedError, RuntimeError, ValueError) as error:
        raise ModelError(f"{path!r} is no .keras file, or it is damaged: {_cause(error)}") from error
    except Exception as error:
        # Damaged data make the decompressors raise errors of their own.
        raise ModelError(f"{path!r} is damaged: {error}") from error
    if len(text) > _MAX_BYTES:
        raise ModelError(f"{path!r}: its configuration is larger than {_MAX_BYTES >> 20} MiB; this is no model")
    try:
        config = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path!r}: its config.json is no JSON: {error}") from error
    if not isinstance(config, dict) or "class_name" not in config or not isinstance(config.get("config"), dict):
        raise ModelError(f"{path!r}: its config.json describes no model; expected class_name and config")
    return config


def _without(item: Any) -> Any:
    """Return a configuration without what a model was compiled with, and without how its layers were built.

    Layers are built when they are called; their variables then have the same names as in the model that was saved.
    """
    if isinstance(item, list):
        return [_without(inner) for inner in item]
    if not isinstance(item, dict):
        return item
    is_object = "class_name" in item and "config" in item
    return {k: _without(v) for k, v in item.items() if not (is_object and k in ("compile_config", "build_config"))}


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
            # What a model was compiled with is not made.
            pending += [(inner, name) for key, inner in item.items() if key != "compile_config"]


def _check(keras: Any, item: dict[str, Any], name: str, path: str) -> None:
    """Raise ModelError unless an object is one of Keras' own that only computes."""
    class_name, module = item["class_name"], item.get("module")
    where = f"{path!r}: layer {name!r}"
    if not isinstance(class_name, str):
        raise ModelError(f"{where}: its class_name is {class_name!r:.60}; expected a word")
    if class_name in _VALUES:
        return
    if class_name == "__lambda__" or class_name in _REFUSED:
        kind, why = ("a Lambda", _CODE) if class_name == "__lambda__" else (f"a {class_name}", _REFUSED[class_name])
        raise ModelError(f"{where} is {kind}: {why}; {_INSTEAD}")
    if class_name == "function":
        module, class_name = None if module == "builtins" else module, item.get("config")
    found = _resolved(keras, module, class_name) if isinstance(class_name, str) else None
    registered = item.get("registered_name")
    is_own = registered in (None, class_name, "function") and found is not None
    if not is_own or not _is_harmless(keras, found):
        full = registered if registered and isinstance(registered, str) else f"{module or '?'}.{class_name}"
        raise ModelError(f"{where} is of {full!r}, which is not Keras' own: files' code is never imported; {_INSTEAD}")


_INSTEAD = "write a function that returns the model and name that, as package.module:function"


def _resolved(keras: Any, module: Any, name: str) -> Any:
    """Return what a module of Keras holds by a name; None where it is no such module. Nothing is imported."""
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


def _is_harmless(keras: Any, found: Any) -> bool:
    """Whether something is a class of Keras' own that computes with tensors, or an activation."""
    owner = str(getattr(found, "__module__", "")).partition(".")[0]
    if owner != "keras":
        return False
    if not isinstance(found, type):
        return any(found is thing for thing in vars(keras.activations).values())
    bases = (
        keras.Operation,
        keras.initializers.Initializer,
        keras.regularizers.Regularizer,
        keras.constraints.Constraint,
        keras.dtype_policies.DTypePolicy,
        keras.random.SeedGenerator,
    )
    return issubclass(found, bases)
