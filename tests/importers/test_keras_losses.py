"""Losses that a Keras model is compiled with, and those that it computes itself."""

import os
from collections.abc import Callable
from typing import Any

import pytest

os.environ.setdefault("KERAS_BACKEND", "tensorflow")
keras = pytest.importorskip("keras")

from pase import load, search  # noqa: E402
from pase.importers.frameworks import import_model  # noqa: E402
from tests.importers.agreement import check_apart  # noqa: E402

BATCH, STEPS, CLASSES, WIDTH = 8, 16, 32, 64
losses = keras.losses


def _model(loss: Any, *, outputs: int = 1) -> Any:
    tokens = keras.Input((STEPS,), dtype="int32", batch_size=BATCH, name="tokens")
    x = keras.layers.Embedding(CLASSES, WIDTH, name="table")(tokens)
    x = keras.layers.Dense(2 * WIDTH, activation="relu", name="body")(x)
    found = [keras.layers.Dense(CLASSES, name=f"head{i}")(x) for i in range(outputs)]
    model = keras.Model(tokens, found if outputs > 1 else found[0])
    if loss is not None:
        model.compile("adam", loss=loss)
    return model


LOSSES: dict[str, Callable[[], Any]] = {
    "sparse": lambda: "sparse_categorical_crossentropy",
    "sparse of logits": lambda: losses.SparseCategoricalCrossentropy(from_logits=True),
    "sparse ignoring": lambda: losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=0),
    "classes": lambda: "categorical_crossentropy",
    "classes of logits, smoothed": lambda: losses.CategoricalCrossentropy(from_logits=True, label_smoothing=0.1),
    "classes, focal": losses.CategoricalFocalCrossentropy,
    "binary": lambda: "binary_crossentropy",
    "binary of logits": lambda: losses.BinaryCrossentropy(from_logits=True),
    "binary, focal": losses.BinaryFocalCrossentropy,
    "function of ours": lambda: lambda y, x: keras.ops.mean(keras.ops.square(y - x), axis=-1),
} | {
    name: (lambda name=name: name)  # type: ignore[misc]
    for name in ("mse", "mae", "mape", "msle", "kl_divergence", "poisson", "log_cosh", "huber", "hinge",
                 "squared_hinge", "categorical_hinge", "cosine_similarity", "dice", "tversky")
}  # fmt: skip


_ALIKE = ("mae", "mape", "msle", "poisson", "log_cosh", "huber", "hinge", "squared_hinge", "tversky")
"""Those that are computed as others are."""


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.full if n in _ALIKE else ()) for n in LOSSES])
def test_a_loss_is_known_and_keeps_examples_and_steps_apart(name: str) -> None:
    model = import_model(_model(LOSSES[name]()), is_strict=True)
    assert model.traces[0].notes == ()
    loss = (op for op in model.graph.operators if op.name not in ("table", "body", "head0"))
    check_apart(loss, BATCH, STEPS)


def test_a_model_that_is_not_compiled_has_no_loss() -> None:
    assert [op.name for op in load(_model(None)).operators] == ["table", "body", "head0"]


def test_each_output_has_its_own_loss() -> None:
    by_name = import_model(_model({"head0": "mse", "head1": None}, outputs=2))
    assert len(by_name.traces[0].outputs) == 3
    in_order = import_model(_model(["mse", "sparse_categorical_crossentropy"], outputs=2))
    inputs = {leaf.value.name: leaf.value for leaf in in_order.traces[0].leaves if leaf.role == "input"}
    assert set(inputs) == {"tokens", "targets of head0", "targets of head1"}
    assert inputs["targets of head0"].shape == (BATCH, STEPS, CLASSES)
    assert inputs["targets of head1"].shape == (BATCH, STEPS)
    for_all = import_model(_model("mse", outputs=2))
    assert len(for_all.traces[0].outputs) == 4


def test_a_loss_that_cannot_be_followed_is_left_out_with_a_note() -> None:
    def broken(y: Any, x: Any) -> Any:
        raise ValueError("not today")

    model = import_model(_model(broken))
    assert "the loss of 'head0' is left out" in model.traces[0].notes
    assert [op.name for op in model.graph.operators] == ["table", "body", "head0"]


def test_a_split_of_the_classes_exchanges_rows_alone() -> None:
    """What a device holds of the classes is enough for its share: no score goes to another one."""
    graph = load(_model(losses.SparseCategoricalCrossentropy(from_logits=True)))
    softmax, gather = (next(op for op in graph.operators if op.kind == kind) for kind in ("softmax", "gather"))
    (rows,) = softmax.exchanges
    assert rows.shape == (BATCH, STEPS)
    assert gather.partial_dims(gather.writes[0]) == (gather.attribute("along", ""),)
    assert gather.partial_dims(gather.reads[0]) == ()


def test_a_model_is_compiled_while_it_has_no_weights(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A factory may do so: an optimiser's own variables had no place."""
    (tmp_path / "compiled_nets.py").write_text(
        "import keras\n\n\ndef net():\n"
        "    model = keras.Sequential([keras.Input((8,), batch_size=64), keras.layers.Dense(10)])\n"
        "    model.compile('adam', 'sparse_categorical_crossentropy')\n"
        "    return model\n"
    )
    monkeypatch.chdir(tmp_path)
    plan = search(load("compiled_nets:net"), devices=4)
    assert any(layer.kind == "gather" for layer in plan.layers)
    assert keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)]).compile("adam") is None
