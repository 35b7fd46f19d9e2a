"""Programs for PyTorch: their losses are those of the other target and of the reference; their command line.

The reference interprets graphs with TensorFlow on one device, and knows nothing of emitted programs.
"""

import json
import subprocess
import sys
from dataclasses import replace
from math import inf
from pathlib import Path

import numpy as np
import pytest

from pase.graph import Graph, uniform
from pase.graph.body import Body, Constant, Step
from pase.sharding.traffic import flows
from pase.targets.execute import max_relative_difference, run_plan
from pase.targets.mesh_tensorflow.runtime.reference import reference_losses, reference_training
from pase.targets.programs import emit
from pase.targets.torch.script import main
from pase.targets.training.options import TrainingOptions
from tests.emitter.test_forward import DENSE, SUM, network
from tests.emitter.test_targets import with_logits
from tests.runtime.networks import dropping, small
from tests.runtime.options import RULES, options, options_of_rule
from tests.runtime.plans import make_plan, random_plan
from tests.runtime.training import parallel_losses
from tests.targets.torch.ranks import Pool, RanksFailedError
from tests.targets.torch.trained import builder_of, events, outputs, program_events_on, refused


def losses(ranks: Pool, graph: Graph, given: TrainingOptions, *, world: int = 4, seed: int = 3) -> list[float]:
    """The losses of a program for PyTorch under a random strategy, on which all ranks agree."""
    source = emit(random_plan(graph, world, seed), target="torch")
    found = [own[-1]["losses"] for own in ranks.run(events, source, given, world=world)]
    assert all(own == found[0] for own in found)
    return list(found[0])


@pytest.mark.full
@pytest.mark.parametrize("name", ["transformer", "lenet5", "rnnlm", "gpt", "lstm_lm"])
def test_both_targets_have_the_same_losses(ranks: Pool, name: str) -> None:
    graph = small(name)
    plan = random_plan(graph, 4, 3)
    ours = losses(ranks, graph, options(4))
    assert max_relative_difference(ours, parallel_losses(plan, steps=4)) < 1e-10
    assert max_relative_difference(ours, reference_losses(graph, options(4))) < 1e-12
    assert ours[-1] < ours[0]


@pytest.mark.parametrize("split", [{"b": 2, "n": 2}, {"n": 2}])
def test_accuracies_are_those_of_the_reference(ranks: Pool, split: dict[str, int]) -> None:
    graph = small("mlp")
    source = emit(make_plan(graph, 4, {"softmax": split}), target="torch")
    found = ranks.run(events, source, options(6, rate=0.5, seed=1))[0]
    accuracies = [event["accuracy"] for event in found if event["event"] == "step"]
    assert accuracies == reference_training(graph, options(6, rate=0.5, seed=1)).accuracies
    assert len(set(accuracies)) > 1


@pytest.mark.parametrize(
    "rule",
    [pytest.param(rule, marks=[] if rule == "adafactor" else pytest.mark.full) for rule in RULES],
)
def test_every_rule_updates_as_that_of_the_reference(ranks: Pool, rule: str) -> None:
    graph, given = small("lenet5"), options_of_rule(rule, 5)
    reference = reference_training(graph, given).losses
    assert max_relative_difference(losses(ranks, graph, given, seed=5), reference) < 1e-12


def test_what_is_dropped_is_that_of_the_reference(ranks: Pool) -> None:
    graph, given = dropping(), options(3, rate=0.2, seed=3)
    assert max_relative_difference(losses(ranks, graph, given), reference_training(graph, given).losses) < 1e-12


def test_files_of_data_are_trained_and_tested_on(ranks: Pool, tmp_path: Path) -> None:
    graph, numbers = dropping(), np.random.default_rng(0)
    for name in ("data", "test"):
        arrays = {"inputs": numbers.standard_normal((24, 4, 6)), "labels": numbers.integers(6, size=24)}
        np.savez(tmp_path / f"{name}.npz", **arrays)  # type: ignore[arg-type]
    given = options(4, data_path=tmp_path / "data.npz", test_data_path=tmp_path / "test.npz", test_every=2)
    found = ranks.run(events, emit(random_plan(graph, 2, 1), target="torch"), given, world=2)[0]
    reference = reference_training(graph, given)
    assert max_relative_difference(found[-1]["losses"], reference.losses) < 1e-12
    tests = [event for event in found if event["event"] == "tested"]
    assert [test["step"] for test in tests] == [test.step for test in reference.tests] == [2, 4]
    assert [test["loss"] for test in tests] == pytest.approx([test.loss for test in reference.tests], rel=1e-12)
    assert [test["accuracy"] for test in tests] == [test.accuracy for test in reference.tests]


# -- outputs


def test_the_outputs_of_a_model_without_a_loss_are_those_of_numpy(ranks: Pool, tmp_path: Path) -> None:
    numbers = np.random.default_rng(1)
    x, w = numbers.standard_normal((10, 8)), numbers.standard_normal((8, 6))
    np.savez(tmp_path / "weights.npz", **{"fc/w": w})
    given = options(1, weights_path=tmp_path / "weights.npz")
    plan = make_plan(network(), 2, {"fc": {"c": 2}, "sum": {"b": 2}})
    for found in ranks.run(outputs, emit(plan, target="torch"), given, {"pixels": x}, world=2):
        np.testing.assert_allclose(found["scores"], np.clip(x @ w, 0, 6) + 0.5, rtol=1e-14)


def test_outputs_beside_a_loss_have_the_models_shape(ranks: Pool, tmp_path: Path) -> None:
    numbers = np.random.default_rng(2)
    x, w = numbers.standard_normal((4, 8)), numbers.standard_normal((8, 6))
    np.savez(tmp_path / "weights.npz", **{"fc/w": w})
    given = options(2, weights_path=tmp_path / "weights.npz")
    source = emit(make_plan(with_logits(), 2, {"fc": {"n": 2}, "loss": {"b": 2}}), target="torch")
    logits = np.clip(x @ w, 0, 6) + 0.5
    np.testing.assert_allclose(
        ranks.run(outputs, source, given, {"pixels": x}, world=2)[0]["logits"], logits.T, rtol=1e-14
    )
    np.savez(tmp_path / "data.npz", pixels=x)
    found = ranks.run(events, source, replace(given, data_path=tmp_path / "data.npz"), world=2)[0]
    assert found[-1]["losses"][0] == pytest.approx(logits.mean(), rel=1e-14)
    assert found[-1]["losses"][1] < found[-1]["losses"][0]


def test_kept_statistics_stand_for_the_batchs_where_nothing_is_trained(ranks: Pool, tmp_path: Path) -> None:
    options_of_step = (("epsilon", 1e-5), ("momentum", 0.1), ("factor", 4 / 3))
    step = Step(
        result="y", function="batch_norm", operands=("t1", 1.0, 0.0, "m", "v"), dims=("b",), options=options_of_step
    )
    constants = (Constant(name="m", dims=("n",)), Constant(name="v", dims=("n",)))
    body = Body(steps=(DENSE.steps[0], step), constants=constants, inputs=DENSE.inputs)
    numbers = np.random.default_rng(3)
    x, w, m, v = (numbers.standard_normal(shape) for shape in ((4, 8), (8, 6), 6, 6))
    np.savez(tmp_path / "weights.npz", **{"fc/w": w, "fc/m": m, "fc/v": v**2})
    source = emit(make_plan(network(first=body, last=SUM), 2, {"fc": {"b": 2}}), target="torch")
    given = options(1, weights_path=tmp_path / "weights.npz")
    expected = (x @ w - m) / np.sqrt(v**2 + 1e-5) + 0.5
    np.testing.assert_allclose(ranks.run(outputs, source, given, {"pixels": x}, world=2)[1]["scores"], expected)


# -- what goes wrong


def test_a_program_of_other_ranks_is_refused(ranks: Pool) -> None:
    source = emit(random_plan(small("mlp"), 4, 1), target="torch")
    with pytest.raises(
        RanksFailedError, match="the program is one of 4 ranks, and 2 were started; start it with: torc"
    ):
        ranks.run(refused, source, options(1), 4, world=2)


def test_a_loss_that_is_not_finite_ends_all_ranks(ranks: Pool) -> None:
    source = emit(random_plan(small("mlp"), 2, 1), target="torch")
    with pytest.raises(RanksFailedError, match=r"step \d+: the loss is (nan|inf); use a smaller learning rate"):
        ranks.run(events, source, options(50, rate=1e300), world=2)


def test_constants_of_a_model_are_asked_for(ranks: Pool) -> None:
    step = Step(result="y", function="add", operands=("t1", "m"), dims=("b", "n"))
    body = Body(steps=(DENSE.steps[0], step), constants=(Constant(name="m", dims=("n",)),), inputs=DENSE.inputs)
    source = emit(make_plan(network(first=body, last=SUM), 2, {"fc": {"b": 2}}), target="torch")
    with pytest.raises(
        RanksFailedError, match=r"constants of its model, such as 'fc/m'; write them with: pase weights"
    ):
        ranks.run(outputs, source, options(1), {"pixels": np.zeros((4, 8))}, world=2)


# -- the command line


def program(folder: Path, graph: Graph, world: int, seed: int = 3) -> Path:
    path = folder / "train.py"
    path.write_text(emit(random_plan(graph, world, seed), target="torch"), encoding="utf-8")
    return path


def run(*arguments: object) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, *map(str, arguments)], capture_output=True, text=True, check=False, timeout=300
    )


@pytest.mark.parametrize("goes_on", [False, pytest.param(True, marks=pytest.mark.full)])
def test_a_program_starts_its_own_ranks_and_torchrun_goes_on(
    tmp_path: Path, goes_on: bool, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    graph = small("mlp")
    path, reference = program(tmp_path, graph, 2), reference_losses(graph, options(3 if goes_on else 2))
    given = ["--dtype", "float64", "--learning-rate", "0.05", "--json", "--metrics", str(tmp_path / "metrics")]
    given += ["--checkpoint", str(tmp_path / "kept")]
    # The process that starts the ranks is this one.
    monkeypatch.setattr(sys, "argv", [str(path)])
    main(builder_of(path.read_text(encoding="utf-8")), num_devices=2, arguments=[*given, "--steps", "2"])
    found = [json.loads(line) for line in capfd.readouterr().out.splitlines()]
    assert [event["event"] for event in found] == ["built", "step", "step", "saved", "done"]
    if goes_on:
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2]
        done = run(*torchrun, path, *given, "--steps", 3, "--resume")
        assert done.returncode == 0, done.stderr
        found += [json.loads(line) for line in done.stdout.splitlines()]
        assert [event["event"] for event in found[5:]] == ["resumed", "built", "step", "saved", "done"]
    steps = [event["loss"] for event in found if event["event"] == "step"]
    assert max_relative_difference(steps, reference) < 1e-12
    lines = (tmp_path / "metrics").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["loss"] for line in lines] == steps


@pytest.mark.full
def test_bad_input_gets_one_message(tmp_path: Path) -> None:
    done = run(program(tmp_path, small("mlp"), 2), "--data", "nowhere.npz")
    assert done.returncode == 1
    assert "failed: cannot read data from nowhere.npz: " in done.stderr
    assert done.stderr.count("error: ") == 1, done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (["--steps", "0"], "error: steps is 0; expected 1 or more\n"),
        (["--output", "out.npz"], "error: --output needs --data PATH"),
    ],
)
def test_options_that_cannot_be_are_named_before_ranks_start(
    given: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    build = builder_of(emit(random_plan(small("mlp"), 2, 3), target="torch"))
    with pytest.raises(SystemExit) as ended:
        main(build, num_devices=2, arguments=given)
    errors = capsys.readouterr().err
    assert ended.value.code == 1
    assert errors.startswith(expected)
    assert errors.count("error: ") == 1


# -- beside one process


@pytest.mark.parametrize("by_itself", [False, pytest.param(True, marks=pytest.mark.full)])
def test_a_plan_is_run_beside_one_process_and_measured(
    ranks: Pool, by_itself: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """by_itself: in processes of its own; else on the session's ranks."""
    if not by_itself:
        monkeypatch.setattr("pase.targets.execute.program_events", program_events_on(ranks))
    plan = make_plan(small("mlp"), 2, {"fc1": {"c": 2}, "fc2": {"n": 2}, "softmax": {"b": 2}})
    result = run_plan(plan, options(3), target="torch", measure=True)
    assert result.max_relative_difference < 1e-12
    assert len(result.losses) == len(result.reference_losses) == 3
    wide = replace(plan, graph=plan.graph.in_precision(uniform("float64")))
    assert result.predicted_bytes == sum(flow.total_bytes for flow in flows(wide)) > 0
    assert result.measured_bytes == result.predicted_bytes
    assert sum(row["measured_bytes"] for row in (*result.edges, *result.layers)) == result.measured_bytes
    assert result.build_time_s < inf
