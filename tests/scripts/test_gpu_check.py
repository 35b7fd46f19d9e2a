"""`scripts/gpu-check`, on CPUs: that its checks pass here, that a fault is found, and what the page says."""

import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from pase.machine import load_machine
from scripts import gpu_check
from scripts.gpu_check import Check, Differences, Result, Times, attempt, checks, compared, page, timed
from tests.calibration.synthetic import TRUE
from tests.calibration.synthetic import made as made_samples
from tests.docs.markdown import ROOT


def backend_of(ranks: int) -> str:
    return f"gloo of {ranks}"


def result_of(check: Check, answer: Differences | Times | None, error: str = "") -> Result:
    return Result(check=check, answer=answer, error=error, time_s=1.0)


EQUAL = checks(on_gpu=False, gpus=0)[0]
TIMED = next(check for check in checks(on_gpu=False, gpus=0) if check.function is timed)


def test_every_check_is_of_a_model_that_there_is_and_those_of_gpus_are_more() -> None:
    for gpus in (0, 1, 4, 8):
        found = checks(on_gpu=gpus > 0, gpus=gpus)
        assert {check.model for check in found} <= gpu_check.MODELS.keys()
        assert {check.ranks for check in found} == {1, 4, gpus or 1}
        assert len({(c.what, c.model, c.plan, c.ranks) for c in found}) == len(found)
        assert {bool(check.options["compiled"]) for check in found if check.function is compared} == {False, True}


@pytest.mark.parametrize(("losses", "is_good"), [(1e-13, True), (1e-9, False), (float("nan"), False)])
def test_a_difference_is_a_failure(losses: float, is_good: bool) -> None:
    answer = Differences(losses=losses, gradients=1e-14, weights=1e-14)
    assert result_of(EQUAL, answer).is_good is is_good
    assert result_of(TIMED, Times(unmodified_s=1.0, parallel_s=1.0, difference=losses * 1e8)).is_good is is_good
    assert not result_of(EQUAL, None, "RankError: rank 1 failed").is_good


def test_the_page_says_what_was_found_and_what_failed() -> None:
    results = [
        result_of(EQUAL, Differences(losses=1e-16, gradients=2e-15, weights=3e-14)),
        result_of(EQUAL, None, "RankError: rank 1 of 1 failed:\n`nothing`"),
        result_of(TIMED, Times(unmodified_s=0.5, parallel_s=0.25, difference=0.001)),
    ]
    text = page([("GPUs", "1 × a GPU")], results, backend_of=backend_of)
    assert text.startswith("**2 of 3 checks passed.**\n")
    assert "| GPUs | 1 × a GPU |" in text
    assert "| GPT | searched | 1, gloo of 1 | float64 | 1.0e-16 | 2.0e-15 | 3.0e-14 | ok |" in text
    assert "| 0.5000 | 0.2500 | 0.50 | 1.0e-03 | ok |" in text
    assert text.endswith("- GPT, searched, 1, gloo of 1, float64: `RankError: rank 1 of 1 failed: 'nothing'`")


def test_the_page_has_its_place() -> None:
    whole = gpu_check.PAGE.read_text(encoding="utf-8")
    replaced = gpu_check.replaced(whole, "what was found")
    assert "\n\nwhat was found\n\n<!-- /gpu-check -->" in replaced
    assert replaced.partition("<!-- /gpu-check -->")[2] == whole.partition("<!-- /gpu-check -->")[2]
    with pytest.raises(SystemExit, match="has 0 places for gpu-check"):
        gpu_check.replaced("nothing", "")


def test_a_check_passes_on_cpus() -> None:
    found = attempt(EQUAL, 600.0)
    assert found.is_good, found.error


@pytest.mark.full
@pytest.mark.parametrize("what", ["GPT, random 0, 4 ranks, float64", "CNN, searched, 1 ranks, bf16"])
def test_the_program_runs_the_checks_that_are_named(what: str) -> None:
    before = gpu_check.PAGE.read_bytes()
    command = [ROOT / "scripts" / "gpu-check", "--cpu", "--only", what]
    environment = {**os.environ, "PASE_PYTHON": sys.executable}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert "**1 of 1 checks passed.**" in done.stdout or "**2 of 2 checks passed.**" in done.stdout, done.stdout
    assert done.returncode == 0, done.stderr
    assert gpu_check.PAGE.read_bytes() == before


def test_a_check_that_cannot_be_run_leaves_the_others() -> None:
    check = Check(what="", model="GPT", plan="of nobody", ranks=1, function=compared, options={"on_gpu": False})
    before = torch.distributed.is_initialized()
    found = attempt(check, 60.0)
    assert found.answer is None
    assert "TypeError" in found.error or "compiled" in found.error
    assert torch.distributed.is_initialized() is before


def test_kernels_and_what_they_predict_stand_on_the_page() -> None:
    samples = tuple(made_samples())
    machine = replace(load_machine("v100"), kernels=replace(TRUE, samples=samples))
    rows = gpu_check.predicted_steps(machine, ["GPT", "CNN"], on_gpu=False, runs=1)
    assert [row[:2] for row in rows] == [["GPT", "float32"], ["CNN", "float32"]]
    for _, _, measured, predicted, error in rows:
        assert float(measured) > 0
        assert float(predicted) > 0
        assert error.endswith("%")
    text = gpu_check.kernels_text(machine, rows)
    assert "| products | 18 | 0.90 |" in text
    assert f"| GPT | float32 | {rows[0][2]} |" in text
    assert "on NVIDIA Tesla V100 SXM2 32GB:" in text
