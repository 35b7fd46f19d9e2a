"""Emitted files run as scripts, as they are and edited by hand."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pase.targets.mesh_tensorflow.runtime.reference import reference_losses
from pase.targets.mesh_tensorflow.runtime.script import main
from pase.targets.programs import emit
from tests.emitter.golden import GOLDEN
from tests.runtime.networks import small
from tests.runtime.plans import random_plan
from tests.runtime.training import builder_of, options

ROOT = Path(__file__).resolve().parents[2]


def losses(shown: str) -> list[float]:
    events: list[dict[str, Any]] = [json.loads(line) for line in shown.splitlines()]
    assert [event["event"] for event in events] == ["built", *["step"] * (len(events) - 2), "done"]
    return [event["loss"] for event in events if event["event"] == "step"]


def test_a_file_runs_on_its_own(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(emit(random_plan(small("mlp"), 6, 9)), encoding="utf-8")
    arguments = ["--steps", "5", "--dtype", "float64", "--seed", "4", "--learning-rate", "0.2", "--json"]
    command, environment = [sys.executable, str(script), *arguments], {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    expected = reference_losses(small("mlp"), options(5, rate=0.2, seed=4))
    assert losses(done.stdout) == pytest.approx(expected, rel=1e-12)


def test_an_edited_file_computes_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    source = GOLDEN.read_text(encoding="utf-8")
    edits = [
        ('[("b", 4)]', '[("c", 2), ("n", 2)]'),
        ('[("n", 2), ("c", 2)]', '[("b", 2)]'),
        ("[0, 2, 1, 3]", "[3, 1, 0, 2]"),
    ]
    for old, new in edits:
        assert source.count(old) == 1
        source = source.replace(old, new)
    main(builder_of(source), num_devices=4, arguments=["--steps", "5", "--dtype", "float64", "--json"])
    expected = reference_losses(small("mlp"), options(5, rate=0.01))
    assert losses(capsys.readouterr().out) == pytest.approx(expected, rel=1e-12)
