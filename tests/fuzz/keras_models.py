"""The reader of `.keras` files: layers, settings and objects in places where none belong. Keras runs on NumPy here."""

import io
import json
import os
import zipfile
from pathlib import Path
from random import Random
from typing import Any

from tests.fuzz.harness import Reader, Target
from tests.fuzz.mutations import change_bytes, change_document, change_text, word


def _keras_files() -> Reader:
    os.environ["KERAS_BACKEND"] = "numpy"
    import keras

    from pase.graph import graph_document, verify
    from pase.importers.frameworks import import_model

    bases = [_config(keras, model) for model in _models(keras)]

    def read(rng: Random, folder: Path) -> None:
        canary = folder / "canary.txt"
        canary.write_text("secret\n", encoding="utf-8")
        os.utime(canary, (1, 1))
        config = json.loads(rng.choice(bases))
        for _ in range(rng.choice((0, 1, 1, 2))):
            if rng.random() < 0.5:
                _hide(config, _object(str(canary), rng), rng)
            else:
                config = change_document(config, rng, 1)
        text = json.dumps(config)
        data = change_text(text, rng) if rng.random() < 0.1 else text.encode()
        stream = io.BytesIO()
        with zipfile.ZipFile(stream, "w", rng.choice((zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED))) as archive:
            archive.writestr("config.json", data)
            archive.writestr("metadata.json", "{}")
        path = folder / "model.keras"
        written = stream.getvalue()
        path.write_bytes(change_bytes(written, rng) if rng.random() < 0.1 else written)
        try:
            graph_document(verify(import_model(str(path), batch=rng.choice((None, 2))).graph))
        finally:
            assert canary.stat().st_atime == 1, "a file that the configuration names was read"

    return read


def _models(keras: Any) -> list[Any]:
    layers = keras.layers
    image = keras.Input((8, 8, 3), name="image")
    x = layers.Conv2D(4, 3, padding="same", activation="relu")(image)
    x = layers.BatchNormalization()(x)
    x = layers.MaxPooling2D()(x)
    x = layers.Flatten()(x)
    first = keras.Model(image, layers.Dense(5, kernel_regularizer="l2")(x))
    words = keras.Input((6,), dtype="int32", name="words")
    y = layers.Embedding(9, 4)(words)
    y = layers.Bidirectional(layers.LSTM(3, return_sequences=True))(y)
    y = layers.MultiHeadAttention(2, 4)(y, y)
    y = layers.TimeDistributed(layers.Dense(3))(layers.LayerNormalization()(y))
    second = keras.Model(words, y)
    third = keras.Sequential([keras.Input((4,)), layers.Dense(3), layers.Dropout(0.5), layers.Dense(2)])
    first.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    third.compile("sgd", ["mse"])
    return [first, second, third]


def _config(keras: Any, model: Any) -> str:
    return json.dumps(keras.saving.serialize_keras_object(model))


def _object(canary: str, rng: Random) -> dict[str, Any]:
    """Return an object that must not be made, or one of any class of Keras'."""
    name, config = rng.choice(
        (
            ("StringLookup", {"vocabulary": canary, "name": "lookup"}),
            ("TextVectorization", {"vocabulary": canary}),
            ("IntegerLookup", {"vocabulary": canary}),
            ("Lambda", {"function": "print"}),
            ("TFSMLayer", {"filepath": canary}),
            ("FeatureSpace", {"features": {"a": {"class_name": "StringLookup", "config": {"vocabulary": canary}}}}),
            ("Pipeline", {"layers": [{"class_name": "StringLookup", "config": {"vocabulary": canary}}]}),
            ("Dense", {"units": rng.choice((3, -1, 2**40))}),
            ("__numpy__", {"value": [1], "dtype": rng.choice(("float32", "O", "S1000000000"))}),
            ("__typespec__", {}),
            ("__lambda__", {"value": "x"}),
            ("Huber", {"delta": rng.choice((1.0, -1, "x", 10**400))}),
        )
    )
    return {
        "class_name": name,
        "module": rng.choice(("keras.layers", "keras.utils", None)),
        "config": config,
        "registered_name": None,
    }


def _hide(config: Any, thing: dict[str, Any], rng: Random) -> None:
    """Put an object somewhere, under names that are passed over elsewhere."""
    holders, pending = [], [config]
    while pending:
        item = pending.pop()
        if isinstance(item, dict):
            holders.append(item)
            pending += item.values()
        elif isinstance(item, list):
            pending += item
    holder = rng.choice(holders)
    key = rng.choice(("compile_config", "loss", "build_config", "layer", "config", "features", word(rng)[:50], *holder))
    holder[key] = rng.choice((thing, {"compile_config": thing}, {"build_config": [thing]}, [thing]))


TARGETS = (Target(name="keras", prepare=_keras_files, share=0.5),)
