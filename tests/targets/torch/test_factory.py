"""PyTorch modules of factories, run under a plan beside themselves, and `pase run` and `pase emit` of them."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import pase
from pase.cli.main import run
from pase.errors import ProgramError
from pase.planning.plan import Plan
from pase.targets.execute import run_factory
from pase.targets.factories import Factory
from pase.targets.programs import emit, target_of
from pase.targets.training.optimisers import make_rule
from pase.targets.training.options import GPU
from tests.runtime.options import options
from tests.runtime.plans import placed_plan, random_plan, recomputing
from tests.targets.torch import factories
from tests.targets.torch.plans import in_stages
from tests.targets.torch.ranks import Pool, RanksFailedError
from tests.targets.torch.trained import program_events_on

pytestmark = pytest.mark.usefixtures("on_ranks")

TAGGER, IMAGES = (f"{factories.__name__}:{name}" for name in ("tagger", "images"))


def _plan(modes: str) -> Plan:
    if modes == "micro-batches":
        plan = recomputing(placed_plan(pase.load(TAGGER, batch=4), 2, 4), 1)
        return replace(plan, micro_batches=2)
    return (
        in_stages(pase.load(TAGGER), 2, 2, 4, "1f1b", 3) if modes == "stages" else random_plan(pase.load(TAGGER), 2, 4)
    )


@pytest.mark.parametrize("modes", ["", "micro-batches", "stages"])
def test_a_module_trains_under_a_plan_as_it_does_by_itself(modes: str) -> None:
    plan, batch = _plan(modes), 4 if modes == "micro-batches" else None
    given = options(3, rate=0.01, rule=make_rule("adamw" if modes else "adafactor", {}))
    result = run_factory(plan, Factory(name=TAGGER, batch=batch), given, measure=True)
    assert result.max_relative_difference < 1e-12
    assert len(result.losses) == len(result.reference_losses) == 3
    assert result.losses[2] < result.losses[0]
    assert result.predicted_bytes > 0
    assert result.measured_bytes == result.predicted_bytes or not modes


def test_a_module_trains_on_the_device_that_is_chosen() -> None:
    """Here there is none of the kind, which ranks say."""
    with pytest.raises(RanksFailedError, match="a GPU was asked for, and PyTorch finds none; leave the device out"):
        run_factory(random_plan(pase.load(TAGGER), 1, 4), Factory(name=TAGGER), options(1), device=GPU)


def test_the_losses_are_those_of_a_loop_of_ones_own(tmp_path: Path) -> None:
    numbers = np.random.default_rng(0)
    x, y = numbers.standard_normal((24, 3, 8, 8)), numbers.integers(10, size=24)
    np.savez(tmp_path / "data.npz", input=x, targets=y)
    given = options(3, rate=0.1, seed=5, data_path=tmp_path / "data.npz", rule=make_rule("momentum", {}))
    result = run_factory(random_plan(pase.load(IMAGES), 2, 1), Factory(name=IMAGES), given)
    torch.manual_seed(5)
    module, _, loss = factories.images()
    module.double()
    optimiser = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    expected = []
    for step in range(3):
        rows = slice(8 * step, 8 * step + 8)
        value = loss(module(torch.from_numpy(x[rows])), torch.from_numpy(y[rows]))
        value.backward()
        optimiser.step()
        optimiser.zero_grad()
        expected.append(value.item())
    assert result.losses == pytest.approx(expected, rel=1e-12)
    assert result.max_relative_difference < 1e-12


def test_a_factory_is_run_from_the_command_line(capfd: pytest.CaptureFixture[str]) -> None:
    arguments = ["--devices", "2", "--arg", "width=32", "--steps", "2", "--dtype", "float64", "--json"]
    assert run(["run", TAGGER, *arguments]) == 0
    found = json.loads(capfd.readouterr().out)
    assert found["max_relative_difference"] < 1e-12
    assert len(found["losses"]) == 2
    assert found["accuracies"] == [None, None]


def test_a_plan_of_a_factory_trains_its_module_where_the_factory_is_named(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """As the factory itself does: with the batch and the arguments that the plan was searched with."""
    plan, options = str(tmp_path / "plan.json"), ["--steps", "2", "--dtype", "float64", "--json"]
    given = ["--devices", "2", "--batch", "4", "--arg", "width=32"]
    assert run(["search", TAGGER, *given, "-o", plan]) == 0
    capfd.readouterr()
    losses = []
    for arguments in ([plan, "--model", TAGGER], [TAGGER, *given]):
        assert run(["run", *arguments, *options]) == 0
        found = json.loads(capfd.readouterr().out)
        losses.append((found["losses"], found["reference_losses"]))
    assert losses[0] == losses[1]
    assert run(["check", TAGGER, plan, "--json"]) == 0
    assert json.loads(capfd.readouterr().out)["is_equal"]
    # Whoever runs a plan names the code that runs; without, it is the plan's program.
    assert run(["run", plan, *options]) == 0
    assert "--model package.module:function trains the PyTorch module itself" in capfd.readouterr().err
    assert run(["run", plan, "--model", "factories"]) == 1
    assert "'factories' is not a factory; give package.module:function" in capfd.readouterr().err
    assert run(["run", TAGGER, *given, "--model", TAGGER]) == 2


def test_losses_beyond_rounding_end_with_status_one(capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["run", f"{factories.__name__}:annealed", "--devices", "1", "--steps", "4"]) == 1
    shown = capfd.readouterr()
    assert "the loss of step 4 is" in shown.err
    assert "--dtype float64 tells it from rounding" in shown.err
    # What was found is shown all the same.
    assert "largest difference" in shown.out


def test_a_model_with_cross_entropy_is_run_from_its_plan_and_weights(
    ranks: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("pase.targets.execute.program_events", program_events_on(ranks))
    name, plan, weights = f"{factories.__name__}:classifier", str(tmp_path / "plan.json"), str(tmp_path / "weights.npz")
    numbers = np.random.default_rng(1)
    data = {"tokens": numbers.integers(10, size=(24, 1)).reshape(24), "labels": numbers.integers(6, size=24)}
    np.savez(tmp_path / "data.npz", **data)
    assert run(["search", name, "--devices", "2", "-o", plan, "--pin", "scores: b=2"]) == 0
    assert run(["weights", name, "-o", weights]) == 0
    capfd.readouterr()
    options = ["--weights", weights, "--data", str(tmp_path / "data.npz"), "--dtype", "float64", "--json"]
    assert run(["run", plan, "--target", "torch", *options, "--steps", "3"]) == 0
    found = json.loads(capfd.readouterr().out)["losses"]
    # PyTorch's own, from the same weights.
    model = factories.Classifier().double()
    held = np.load(weights)
    model.load_state_dict(
        {
            "table.weight": torch.from_numpy(held["table/table"]),
            "scores.weight": torch.from_numpy(held["scores/w"]),
            "scores.bias": torch.from_numpy(held["scores/bias"]),
        }
    )
    optimiser = torch.optim.SGD(model.parameters(), lr=0.01)
    for number, loss in enumerate(found):
        rows = slice(8 * number, 8 * number + 8)
        value = model(*(torch.from_numpy(array[rows]) for array in data.values()))
        assert loss == pytest.approx(value.item(), rel=1e-12)
        value.backward()
        optimiser.step()
        optimiser.zero_grad()


def test_what_a_factory_has_no_use_for_is_refused() -> None:
    plan = random_plan(pase.load(TAGGER), 2, 1)
    with pytest.raises(ProgramError, match="--weights is of programs that are emitted; a factory makes a model with"):
        run_factory(plan, Factory(name=TAGGER), options(1, weights_path=Path("weights.npz")))


def test_a_model_without_a_loss_is_refused() -> None:
    name = f"{factories.__name__}:without_loss"
    match = "0 of the 1 tensors that the model returns are single numbers; expected one"
    with pytest.raises(RanksFailedError, match=match):
        run_factory(random_plan(pase.load(name), 1, 1), Factory(name=name), options(1))


def test_the_target_is_the_framework_that_a_model_came_from(tmp_path: Path) -> None:
    plan = random_plan(pase.load(TAGGER), 2, 1)
    assert target_of(plan, None).name == "torch"
    assert target_of(random_plan(pase.load("mlp"), 2, 1), None).name == "mesh_tensorflow"
    assert emit(plan) == emit(plan, target="torch")
    path = tmp_path / "train.py"
    assert run(["emit", TAGGER, "--devices", "2", "-o", str(path)]) == 0
    assert "from pase.targets.torch.script import Outputs, main" in path.read_text(encoding="utf-8")
    assert run(["emit", "mlp", "--devices", "2", "-o", str(path)]) == 0
    assert "from pase.targets.mesh_tensorflow.runtime.script import main" in path.read_text(encoding="utf-8")
    assert run(["emit", TAGGER, "--devices", "2", "--target", "mesh_tensorflow"]) == 1
