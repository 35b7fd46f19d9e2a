"""LeNet-5 trained on images that can be told apart, from a generator, on 2×2 devices: it learns to tell them apart."""

import io
import json
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pase.models import build
from pase.targets.mesh_tensorflow.primitives.compat import tf
from pase.targets.mesh_tensorflow.runtime.checkpoint import Checkpointing, newest_checkpoint
from pase.targets.mesh_tensorflow.runtime.script import main, train
from pase.targets.mesh_tensorflow.runtime.training import Training
from pase.targets.programs import emit
from pase.targets.training.optimisers import make_rule
from pase.targets.training.options import TrainingOptions
from tests.runtime.networks import small
from tests.runtime.plans import make_plan, random_plan
from tests.runtime.training import builder_of

Array = np.ndarray[Any, Any]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


# Each class is a bright square in a place of its own, under noise.
GENERATOR = """
    import numpy as np

    def images(seed, num):
        numbers = np.random.default_rng(seed)
        labels = numbers.integers(10, size=num)
        x = numbers.standard_normal((num, 1, 28, 28)) * 0.5
        for i, label in enumerate(labels):
            row, column = 2 + 13 * (label // 5), 1 + 5 * (label % 5)
            row, column = row + numbers.integers(4), column + numbers.integers(2)
            x[i, 0, row : row + 6, column : column + 4] += 2
        return x, labels

    def batches(start=0):
        step = start
        while True:
            x, labels = images(step, 40)
            yield {"inputs": x, "labels": labels}
            step += 1
"""


def logits(weights: dict[str, Array], x: Array) -> Array:
    """LeNet-5 written out, eagerly, on one device."""

    def w(name: str) -> Any:
        return tf.convert_to_tensor(weights[name])

    def convolved(x: Any, layer: str, padding: str) -> Any:
        # Channels last; filters are [n, c, r, s] in the program.
        y = tf.nn.conv2d(x, tf.transpose(w(f"{layer}/w"), [2, 3, 1, 0]), strides=1, padding=padding)
        return tf.nn.max_pool2d(tf.nn.relu(y + w(f"{layer}/bias")), 2, 2, "VALID")

    y = convolved(tf.transpose(tf.convert_to_tensor(x, tf.float32), [0, 2, 3, 1]), "conv1", "SAME")
    y = convolved(y, "conv2", "VALID")
    y = tf.reshape(tf.transpose(y, [0, 3, 1, 2]), [len(x), -1])
    for layer in ("fc1", "fc2"):
        y = tf.nn.relu(y @ w(f"{layer}/w") + w(f"{layer}/bias"))
    result: Array = (y @ w("fc3/w") + w("fc3/bias")).numpy()
    return result


def test_lenet_learns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "squares.py").write_text(textwrap.dedent(GENERATOR), encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    import squares  # type: ignore[import-not-found]

    spatial = {name: {"h": 2, "w": 2} for name in ("conv1", "pool1", "conv2")}
    dense = {name: {"n": 2, "c": 2} for name in ("fc1", "fc2")}
    plan = make_plan(build("lenet5", batch=40, arguments={}), 4, {**spatial, **dense, "fc3": {"b": 4}})
    kept, metrics = tmp_path / "kept", tmp_path / "metrics.jsonl"
    arguments = ["--steps", "60", "--optimizer", "adam", "--learning-rate", "0.003", "--warmup-steps", "5"]
    arguments += ["--schedule", "cosine", "--data-generator", "squares:batches", "--checkpoint", str(kept)]
    main(builder_of(emit(plan)), num_devices=4, arguments=[*arguments, "--metrics", str(metrics)])
    shown = capsys.readouterr()
    assert shown.err == "note: --data-generator executes the code of module squares\n"
    assert shown.out.splitlines()[-2] == f"saved step 60 in {kept / 'step-0000000060.safetensors'}"
    lines = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    assert [line["step"] for line in lines] == list(range(1, 61))
    rates = [line["learning_rate"] for line in lines]
    assert max(rates) == rates[4] == pytest.approx(0.003)
    assert rates[-1] < 1e-4
    found = newest_checkpoint(kept)
    assert found is not None
    # Images that it has not seen.
    x, labels = squares.images(10**6, 400)
    accuracy = (logits(dict(found.weights), x).argmax(-1) == labels).mean()
    untrained = {name: array * 0 for name, array in found.weights.items()}
    assert (logits(untrained, x).argmax(-1) == labels).mean() < 0.2
    assert accuracy > 0.97
    # The loss of the last batch is that of the weights before it: nearly these, the rate being nearly zero.
    x, labels = squares.images(59, 40)
    y = logits(dict(found.weights), x).astype(np.float64)
    loss = (np.log(np.exp(y).sum(-1)) - y[np.arange(40), labels]).mean()
    assert loss == pytest.approx(lines[-1]["loss"], rel=0.05, abs=1e-4)
    assert Checkpointing(folder=kept, resume="newest").newest() == kept / "step-0000000060.safetensors"


def mlp(*arguments: str) -> None:
    main(builder_of(emit(make_plan(small("mlp"), 1, {}))), num_devices=1, arguments=arguments)


def test_a_terminal_has_a_line_of_progress_instead_of_a_line_for_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    for stream in ("stdout", "stderr"):
        monkeypatch.setattr(sys, stream, Terminal())
    mlp("--steps", "3")
    assert isinstance(sys.stdout, Terminal)
    assert isinstance(sys.stderr, Terminal)
    built, done = sys.stdout.getvalue().splitlines()
    assert built.startswith("built in ")
    assert done.startswith("median step ")
    assert sys.stderr.getvalue().startswith("\rstep 1/3  loss ")
    assert sys.stderr.getvalue().rstrip().endswith(" examples/s")
    assert "\rstep 3/3  loss " in sys.stderr.getvalue()


def test_an_interrupt_says_how_to_go_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    step = Training.step

    def interrupted(self: Training, *arguments: Any, **options: Any) -> Any:
        if self.num_steps == 2:
            raise KeyboardInterrupt
        return step(self, *arguments, **options)

    monkeypatch.setattr(Training, "step", interrupted)
    with pytest.raises(SystemExit, match="130"):
        mlp("--steps", "5", "--checkpoint", str(tmp_path / "kept"), "--save-every", "1")
    assert capsys.readouterr().err == f"\nstopped; go on with --checkpoint {tmp_path / 'kept'} --resume\n"
    monkeypatch.setattr(Training, "step", step)
    mlp("--steps", "3", "--checkpoint", str(tmp_path / "kept"), "--resume")
    assert capsys.readouterr().out.startswith("going on after step 2\n")


@pytest.mark.parametrize("optimiser", ["adam", "adafactor"])
def test_what_an_optimiser_moves_is_predicted(optimiser: str) -> None:
    """Adafactor's means go over split dims; nothing else of an update moves."""
    done: list[dict[str, Any]] = []
    plan = random_plan(small("mlp"), 4, 1)
    train(
        builder_of(emit(plan)),
        TrainingOptions(steps=2, rule=make_rule(optimiser, {})),
        num_devices=4,
        measure=True,
        keep_alive=True,
        report=done.append,
    )
    assert done[0]["predicted_bytes"] == done[-1]["measured_bytes"] > 0
