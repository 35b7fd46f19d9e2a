"""`pase.check` and `pase check`: modules that are equal under a plan, and what is found of those that are not."""

import inspect
import json
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import pase
from pase.cli.main import run
from pase.errors import ModelError, ProgramError
from pase.importers.torch import live
from pase.importers.torch.operators import TRANSLATIONS
from pase.planning.plan import Plan
from pase.targets.check import check_factory
from pase.targets.differences import Run
from pase.targets.factories import Factory
from tests.runtime.plans import placed_plan, random_plan, recomputing
from tests.targets.torch import checked
from tests.targets.torch.checked import KINDS, given
from tests.targets.torch.plans import in_stages

MAKE = f"{checked.__name__}:make"


def _made(kind: str) -> nn.Module:
    torch.manual_seed(3)
    return KINDS[kind]()


def _alone(kind: str) -> pase.targets.differences.CheckResult:
    return pase.check(_made(kind), given(), devices=1)


def _plan(kind: str, module: str = "Net") -> Plan:
    graph = pase.load((_made(module), given()))
    if kind == "stages":
        return in_stages(graph, 2, 2, 2, "1f1b", 3)
    return replace(recomputing(placed_plan(graph, 2, 4), 1), micro_batches=2) if kind else random_plan(graph, 2, 4)


@pytest.mark.usefixtures("on_ranks")
@pytest.mark.parametrize(
    "kind", ["", *(pytest.param(kind, marks=pytest.mark.full) for kind in ("micro-batches", "stages"))]
)
def test_a_module_is_equal_under_plans_of_every_kind(kind: str) -> None:
    module = _made("Net")
    before = {name: x.clone() for name, x in module.state_dict().items()}
    drawn, was_in_group = torch.get_rng_state(), dist.is_initialized()
    result = pase.check(module, given(), _plan(kind))
    assert result.is_equal, str(result)
    devices, types, modes = (1, 2), ("float64", "float32"), ("training", "evaluation")
    assert set(result.compared) == {Run(devices=n, dtype=t, mode=m) for n in devices for t in types for m in modes}
    # In each of two steps: the loss, the gradients of five parameters and a tied one, as many updates, buffers.
    parameters, buffers = 8, 3
    outputs = 0 if kind else 1
    training = result.compared[Run(devices=1, dtype="float64", mode="training")]
    assert training == 2 * (1 + outputs + parameters + (parameters + buffers) + parameters)
    # The pipeline returns the loss alone.
    assert [text.partition(":")[0] for text in result.not_compared] == (
        [f"evaluation in {dtype} on 2 devices, forward pass" for dtype in types] if kind == "stages" else []
    )
    assert module.training
    assert all(torch.equal(x, module.state_dict()[name]) for name, x in before.items())
    assert torch.equal(torch.get_rng_state(), drawn)
    assert all(p.grad is None for p in module.parameters())
    assert dist.is_initialized() == was_in_group


def test_gradients_alone_that_differ_are_found_where_they_are() -> None:
    result = _alone("OtherGradient")
    first = result.differences[0]
    assert first.run == Run(devices=1, dtype="float64", mode="training")
    # The first gradient that is computed behind the loss is that of the layer before, and those behind are right.
    of_step = [each.what for each in result.differences if each.step == 1 and each.run == first.run]
    assert of_step[0] in ("the gradient of 'norm.bias'", "the gradient of 'norm.weight'")
    assert not {"the loss", "output 1", "the gradient of 'last.weight'"} & set(of_step)
    assert first.line.startswith("checked.py:")
    assert {run.dtype for run in result.differing()} == {"float64", "float32"}


@pytest.mark.full
def test_values_and_buffers_that_differ_are_found_where_they_are() -> None:
    value, buffer = _alone("OtherValue"), _alone("OtherBuffer")
    first = value.differences[0]
    assert (first.what, first.step, first.run) == ("output 1", 1, Run(devices=1, dtype="float64", mode="training"))
    assert 1e-10 < first.relative < 1e-8
    # Rounding of float32 hides it.
    assert {run.dtype for run in value.differing()} == {"float64"}
    buffers = {"'norm.running_mean' after it", "'norm.running_var' after it"}
    assert {each.what for each in buffer.differences} == buffers
    assert {each.run.mode for each in buffer.differences if each.run} == {"training"}


@pytest.mark.full
def test_the_layer_is_named_at_which_a_difference_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any, **__: Any) -> Any:
        raise ModelError("it cannot be captured")

    # What is run is the translation then.
    monkeypatch.setattr(live, "captured", refused)
    monkeypatch.setitem(TRANSLATIONS, "tanh", lambda call: call.point("sigmoid", call.x, out=call.result))
    result = _alone("Net")
    (origin,) = result.origins()
    # The activation is a part of the normalisation before it, which is in this line.
    assert (origin.what, origin.step) == ("what layer 'norm' computes", 0)
    _, first = inspect.getsourcelines(KINDS["Net"].forward)
    assert origin.line == f"checked.py:{first + 1}"
    assert str(result).startswith("it begins here: what layer 'norm' computes (checked.py:")
    monkeypatch.undo()
    # A trace that is another one than the module is computed as it is.
    other = _alone("OtherValue")
    assert not other.origins()
    assert any("every layer computes what was traced of it" in note for note in other.notes)


@pytest.mark.full
@pytest.mark.usefixtures("on_ranks")
def test_what_ranks_alone_compute_otherwise_is_found() -> None:
    result = check_factory(Factory(name=MAKE, arguments={"kind": "OtherOnRanks"}), _plan("", "OtherOnRanks"))
    assert {run.devices for run in result.differing()} == {2}, str(result)
    assert {each.rank for each in result.differences} == {1}
    assert {run.devices for run in result.compared} == {1, 2}


def test_types_that_a_module_does_not_run_in_are_named() -> None:
    result = _alone("OfOneType")
    assert result.is_equal
    assert {run.dtype for run in result.compared} == {"float32"}
    (text,) = result.not_compared
    assert text.startswith("float64: the module itself does not run in it (TypeError: these are torch.float64")


def test_a_module_that_is_refused_for_training_is_compared_in_evaluation(monkeypatch: pytest.MonkeyPatch) -> None:
    def between(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.table.weight.data.clamp_(-1.0, 1.0)
        return x.tanh()

    monkeypatch.setattr(KINDS["Net"], "between", between)
    result = _alone("Net")
    assert not result.is_equal
    assert not result.differences
    assert {run.mode for run in result.refused} == {"training"}
    assert {run.mode for run in result.compared} == {"evaluation"}
    (text,) = result.refusals()
    assert text.startswith("training in float64 on 1 device; training in float32 on 1 device: 'Net' cannot be trained")


def test_what_cannot_be_checked_is_one_line() -> None:
    module = _made("Net")
    with pytest.raises(ProgramError, match=r"a list cannot be checked; give a torch.nn.Module, with its inputs"):
        pase.check([], given())
    with pytest.raises(ProgramError, match=r"the plan is for 1 devices, and devices=2; leave that out"):
        pase.check(module, given(), pase.search((module, given()), devices=1), devices=2)
    with pytest.raises(ProgramError, match=r"'table.weight' was made without values"):
        pase.check(_made("Net").to("meta"), given(), devices=1)
    own = type("Own", (nn.Linear,), {"__module__": "__main__"})
    with pytest.raises(ProgramError, match=r"'Own' is in the main program, which other processes cannot import"):
        pase.check(own(4, 4), torch.ones(2, 4))
    assert pase.check(own(4, 4), torch.ones(2, 4), devices=1).is_equal


def test_from_the_command_line(capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["check", MAKE, "--devices", "1", "--arg", "kind=OtherValue"]) == 1
    shown = capfd.readouterr()
    assert "training in float64 on 1 device:" in shown.out
    assert "output 1" in shown.out
    assert "differ by more than rounding explains" in shown.err.splitlines()[-1]
    assert run(["check", "alexnet"]) == 1
    assert capfd.readouterr().err.splitlines()[-1].startswith("pase: 'alexnet' is not a factory; give package.module:")


@pytest.mark.full
@pytest.mark.usefixtures("on_ranks")
def test_what_is_equal_is_one_document(capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["check", MAKE, "--devices", "2", "--flops", "1e9", "--json"]) == 0
    found = json.loads(capfd.readouterr().out)
    assert found["is_equal"]
    assert len(found["runs"]) == 8


def test_a_plan_of_another_model_is_refused(tmp_path: object, capfd: pytest.CaptureFixture[str]) -> None:
    path = f"{tmp_path}/plan.json"
    pase.search((nn.Linear(4, 4), torch.ones(2, 4)), devices=1).save(path)
    assert run(["check", MAKE, path]) == 1
    assert "the plan is of another model" in capfd.readouterr().out
