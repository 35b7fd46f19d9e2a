"""Emitted files run as scripts, as they are and edited by hand."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pase.targets.emitter import emit
from pase.targets.mesh_tensorflow.runtime.reference import reference_losses
from tests.emitter.golden import GOLDEN, golden_plan
from tests.runtime.networks import small
from tests.runtime.plans import random_plan
from tests.runtime.training import options

ROOT = Path(__file__).resolve().parents[2]


def run(script: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(script), *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"},
        cwd=script.parent,
    )


def losses(done: subprocess.CompletedProcess[str]) -> list[float]:
    assert done.returncode == 0, done.stderr
    events: list[dict[str, Any]] = [json.loads(line) for line in done.stdout.splitlines()]
    assert [event["event"] for event in events] == ["built", *["step"] * (len(events) - 2), "done"]
    return [event["loss"] for event in events if event["event"] == "step"]


def reference(*, rate: float = 0.01, seed: int = 0) -> list[float]:
    return reference_losses(small("mlp"), options(5, rate=rate, seed=seed))


def test_a_file_runs_on_its_own(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(emit(random_plan(small("mlp"), 6, 9)), encoding="utf-8")
    arguments = ["--steps", "5", "--dtype", "float64", "--seed", "4", "--learning-rate", "0.2", "--json"]
    done = run(script, *arguments)
    assert losses(done) == pytest.approx(reference(seed=4, rate=0.2), rel=1e-12)
    assert done.stderr == ""


def test_an_edited_file_computes_the_same(tmp_path: Path) -> None:
    source = GOLDEN.read_text(encoding="utf-8")
    edits = [
        ('[("b", 4)]', '[("c", 2), ("n", 2)]'),
        ('[("n", 2), ("c", 2)]', '[("b", 2)]'),
        ("[0, 2, 1, 3]", "[3, 1, 0, 2]"),
    ]
    for old, new in edits:
        assert source.count(old) == 1
        source = source.replace(old, new)
    script = tmp_path / "edited.py"
    script.write_text(source, encoding="utf-8")
    edited = losses(run(script, "--steps", "5", "--dtype", "float64", "--json"))
    assert edited == pytest.approx(reference(), rel=1e-12)


def test_an_edit_that_does_not_fit_is_one_clear_line(tmp_path: Path) -> None:
    script = tmp_path / "edited.py"
    source = GOLDEN.read_text(encoding="utf-8")
    script.write_text(source.replace("[0, 2, 1, 3]", "[0, 2, 1]"), encoding="utf-8")
    done = run(script, "--steps", "1")
    message = "error: layer 'fc2': devices [0, 2, 1] must name each of 0 to 3 once; "
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == message + "correct the list, or leave it out for the default order\n"


def test_the_golden_plan_is_the_golden_file() -> None:
    assert emit(golden_plan()) == GOLDEN.read_text(encoding="utf-8")
