import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from pase.errors import ProgramError
from pase.graph import uniform
from pase.planning.plan import Plan
from pase.targets.execute import disagreement, max_relative_difference, run_plan
from pase.targets.mesh_tensorflow.runtime.reference import reference_losses
from pase.targets.training.optimisers import make_rule
from tests.runtime.networks import small
from tests.runtime.options import options
from tests.runtime.plans import random_plan


@pytest.fixture
def plan() -> Plan:
    return random_plan(small("mlp"), 4, 1)


@pytest.mark.full
def test_the_program_and_the_reference_agree_in_a_process_of_its_own(plan: Plan, tmp_path: Path) -> None:
    numbers = np.random.default_rng(0)
    for name in ("data", "test"):
        arrays = {"inputs": numbers.standard_normal((48, 12)), "labels": numbers.integers(12, size=48)}
        np.savez(tmp_path / f"{name}.npz", **arrays)  # type: ignore[arg-type]
    rule = make_rule("adamw", {"weight_decay": 0.1})
    given = options(3, data_path=tmp_path / "data.npz", test_data_path=tmp_path / "test.npz", test_every=2, rule=rule)
    seen: list[tuple[str, int, int]] = []
    result = run_plan(plan, given, measure=True, on_progress=lambda *what: seen.append(what))
    assert result.max_relative_difference < 1e-12
    assert len(result.losses) == len(result.reference_losses) == 3
    assert result.losses[2] < result.losses[0] != reference_losses(plan.graph, options(1))[0]
    assert result.measured_bytes is not None
    assert 0.9 * result.predicted_bytes < result.measured_bytes <= result.predicted_bytes
    assert result.build_time_s > 0
    assert result.step_time_s > 0
    assert seen[0] == ("building the program", 0, 3)
    assert seen[-1] == ("training on one device", 3, 3)
    assert result.accuracies == pytest.approx(result.reference_accuracies, abs=1e-15)
    assert [found.step for found in result.tests] == [found.step for found in result.reference_tests] == [2, 3]
    assert [found.loss for found in result.tests] == pytest.approx([f.loss for f in result.reference_tests], rel=1e-12)
    assert [found.accuracy for found in result.tests] == [found.accuracy for found in result.reference_tests]
    # Two moments of 8 bytes for each number of a weight's part.
    assert result.optimiser_bytes == 2 * result.predicted_memory.weights_bytes


@pytest.mark.parametrize(
    ("dtype", "losses", "said"),
    [
        # What a sum of the same numbers in another order leaves of them.
        ("float32", [0.5, 0.5 * (1 + 3e-6), 0.5 * (1 + 6e-6)], ""),
        ("float64", [0.5, 0.5 * (1 + 1e-14), 0.5 * (1 - 2e-14)], ""),
        # The first loss is right, the first update is not.
        ("float32", [0.5, 0.501, 0.6], "the loss of step 2 is 0.501, 0.5 on one device: a relative difference of 2"),
        ("float64", [0.5, 0.5 * (1 + 1e-9), 0.5], "the loss of step 2 is"),
        (
            "float32",
            [0.74, 0.5, 0.5],
            "the loss of step 1 is 0.74, 0.5 on one device: a relative difference of 4.8e-01",
        ),
        ("float32", [float("nan"), 0.5, 0.5], "the loss of step 1 is nan"),
        # Trainings that have gone on for long tell nothing of one another.
        ("float32", [0.5] * 40 + [0.6], ""),
    ],
)
def test_differences_that_rounding_does_not_explain_are_told(
    plan: Plan, dtype: str, losses: list[float], said: str
) -> None:
    run = replace(plan, graph=plan.graph.in_precision(uniform(dtype)))
    found = disagreement(losses, [0.5] * len(losses), run)
    assert found.startswith(said) if said else not found


# -- programs that load no framework


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("raise SystemExit('error: the data have no array')", r"^the data have no array$"),
        ("print('no JSON')\nraise KeyError('broken')", r"(?s)ended with status 1; its last lines:.*KeyError: 'broken'"),
        (
            "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)",
            r"was ended by signal 9 \(perhaps for want of memory",
        ),
        ("", r"ended after 0 of 1 steps"),
    ],
)
def test_a_program_that_fails_says_why(source: str, message: str, plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pase.targets.execute.emit", lambda _, **__: source)
    with pytest.raises(ProgramError, match=message):
        run_plan(plan, options(1))


def test_the_program_ends_when_nobody_listens_any_more(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = "while True: print(json.dumps({'event': 'step', 'loss': 1.0, 'accuracy': None}), flush=True)"
    monkeypatch.setattr("pase.targets.execute.emit", lambda _, **__: f"import json\n{steps}\n")

    def interrupt(what: str, done: int, total: int) -> None:
        if done == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_plan(plan, options(10**9), on_progress=interrupt)


def test_the_largest_relative_difference() -> None:
    assert max_relative_difference([1.0, 2.0, 0.0], [1.0, 4.0, 0.0]) == 0.5
    assert math.isclose(max_relative_difference([0.25], [0.0]), 0.25)
    assert max_relative_difference([], []) == 0
