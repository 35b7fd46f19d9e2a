"""A training from the command line: data from a generator, what is kept and shown, an interrupt."""

import io
import json
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest

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


# Classes that a linear rule tells apart.
GENERATOR = """
    import numpy as np

    RULE = np.random.default_rng(1).standard_normal((12, 12))

    def points(seed, num):
        x = np.random.default_rng(seed).standard_normal((num, 12))
        return x, (x @ RULE).argmax(-1)

    def batches(start=0):
        step = start
        while True:
            x, labels = points(step, 24)
            yield {"inputs": x, "labels": labels}
            step += 1
"""


def test_it_learns_from_a_generator(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "rule.py").write_text(textwrap.dedent(GENERATOR), encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))

    plan = make_plan(small("mlp"), 4, {"fc1": {"b": 2, "n": 2}, "fc2": {"n": 2, "c": 2}, "fc3": {"b": 4}})
    metrics = tmp_path / "metrics.jsonl"
    arguments = ["--steps", "300", "--optimizer", "adam", "--learning-rate", "0.02", "--warmup-steps", "5"]
    arguments += ["--schedule", "cosine", "--data-generator", "rule:batches", "--metrics", str(metrics)]
    main(builder_of(emit(plan)), num_devices=4, arguments=arguments)
    assert capsys.readouterr().err == "note: --data-generator executes the code of module rule\n"
    lines = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    assert [line["step"] for line in lines] == list(range(1, 301))
    rates = [line["learning_rate"] for line in lines]
    assert max(rates) == rates[4] == pytest.approx(0.02)
    assert rates[-1] < 1e-4
    # Points that it has not seen, in every step.
    assert np.mean([line["accuracy"] for line in lines[-20:]]) > 0.8
    assert np.mean([line["loss"] for line in lines[-20:]]) < lines[0]["loss"] / 3


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


def test_an_interrupt_ends_it(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    step = Training.step

    def interrupted(self: Training, *arguments: Any, **options: Any) -> Any:
        if self.num_steps == 2:
            raise KeyboardInterrupt
        return step(self, *arguments, **options)

    monkeypatch.setattr(Training, "step", interrupted)
    with pytest.raises(SystemExit, match="130"):
        mlp("--steps", "5")
    assert capsys.readouterr().err == "\nstopped\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--optimizer", "adam", "--momentum", "0.5"], "optimiser adam has no momentum"),
        (["--data", "x.npz", "--data-generator", "a:b"], "both --data and --data-generator are given"),
        (["--data-generator", "a.b"], "'a.b' names no function; expected package.module:function"),
    ],
)
def test_options_that_do_not_go_together(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="1"):
        mlp(*arguments)
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert message in line


def test_programs_neither_save_nor_go_on(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        mlp("--checkpoint", "kept")
    assert "--checkpoint" in capsys.readouterr().err


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
