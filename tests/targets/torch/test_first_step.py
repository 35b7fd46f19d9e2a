"""In the first step of training, what is traced of a module is compared with the module, which is the oracle."""

import gc
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import nn

import pase
from pase.errors import ModelError, ProgramError
from pase.importers.torch import export, live
from pase.importers.torch.operators import TRANSLATIONS
from pase.planning.plan import Plan
from pase.targets.torch import comparison, first_step
from tests.importers.test_torch_training import REFUSED, TAKEN
from tests.runtime.plans import random_plan
from tests.targets.torch.modules import MODULES, made
from tests.targets.torch.plans import in_stages
from tests.targets.torch.ranks import Pool

X = torch.linspace(-2.0, 3.0, 32).reshape(4, 8).sin() * 2

LATER = {"annealed", "remembered", "stochastic depth"}
"""Their first step is right, the last one's most times."""

NO_PROGRAM = {"random slopes", "recurrent dropout", "row norms", "attention", "encoder"}
"""No program of these is written that could be trained, for what they are in evaluation."""


def _alone(module: nn.Module, *given: Any, **options: Any) -> Any:
    given = given or (X,)
    return pase.parallelize(module, pase.search((module, given), devices=1), **options)


@pytest.mark.parametrize("name", [name for name in REFUSED if name not in LATER | NO_PROGRAM])
def test_what_is_traced_wrong_raises_in_the_first_step(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that the importer refuses, were it not refused and the module's own graph not at hand."""
    monkeypatch.setattr(export, "differences_in_training", lambda *_: "")
    _translated(monkeypatch)
    torch.manual_seed(1)
    module = REFUSED[name][0]()
    parallel = _alone(module)
    parallel.train()
    said = (
        r"the plan's program computes something else than the module: .* of the module itself: .* of its size, of which"
    )
    with pytest.raises(ProgramError, match=said):
        parallel(X)


@pytest.mark.parametrize("name", [name for name in TAKEN if name not in NO_PROGRAM])
def test_what_is_traced_right_trains(name: str) -> None:
    torch.manual_seed(1)
    module = TAKEN[name]()
    state = deepcopy(module.state_dict())
    parallel = _alone(module)
    parallel.train()
    drawn = torch.get_rng_state()
    found = parallel(X)
    assert not [note for note in parallel.notes if "compared" in note]
    assert all(torch.equal(x, module.state_dict()[key]) for key, x in state.items())
    assert all(parameter.grad is None for parameter in module.parameters())
    # Neither the comparison nor the step touches the generator of PyTorch.
    assert torch.equal(torch.get_rng_state(), drawn)
    loss = found["loss"] if isinstance(found, dict) else found
    loss.backward()
    assert all(p.grad is not None for p in parallel.parameters() if p.requires_grad)


class Tanh(nn.Module):
    def __init__(self, depth: int = 1) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(depth))
        self.last = nn.Linear(8, 3)

    def forward(self, x: Any) -> Any:
        for layer in self.layers:
            x = layer(x)
        return self.last(x)


def _translated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the translation be what is run."""

    def refused(*_: Any, **__: Any) -> Any:
        raise ModelError("it cannot be captured")

    monkeypatch.setattr(live, "captured", refused)


def _wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    _translated(monkeypatch)
    monkeypatch.setitem(TRANSLATIONS, "tanh", lambda call: call.point("sigmoid", call.x, out=call.result))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_outputs_of_a_module_without_a_loss_are_compared(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    x = X.to(dtype)
    right = _alone(Tanh().to(dtype), x)
    right(x)
    assert not [note for note in right.notes if "compared" in note]
    _wrong(monkeypatch)
    with pytest.raises(
        ProgramError, match=r"computes something else than the module: .* \(verify=\"off\" trains all the same"
    ):
        _alone(Tanh().to(dtype), x)(x)
    assert _alone(Tanh().to(dtype), x, verify="off")(x).shape == (4, 3)
    # An evaluation is no training.
    assert _alone(Tanh().to(dtype).eval(), x)(x).shape == (4, 3)


def test_all_steps_are_compared_or_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """A module that becomes another one than was traced in its second step."""
    found = []
    for verify in ("off", "first_step", "always"):
        module = Tanh()
        parallel = _alone(module, verify=verify)
        parallel(X)
        monkeypatch.setattr(module.layers[0], "forward", lambda x: torch.sigmoid(x[..., :8]))
        try:
            parallel(X)
        except ProgramError as error:
            found.append((verify, "computes something else than the module" in str(error)))
    assert found == [("always", True)]
    with pytest.raises(ProgramError, match=r"unknown value of verify 'first'"):
        _alone(Tanh(), verify="first")
    # What it was called before.
    assert _alone(Tanh(), check=False)._compares is None
    assert _alone(Tanh(), check=True)._compares is not None


def test_a_loss_that_stands_apart_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    given = (X, torch.tensor([0, 1, 2, 0])), nn.CrossEntropyLoss()
    plan = pase.search((Tanh(), *given), devices=1)
    pase.parallelize((Tanh(), given[1]), plan)(*given[0]).backward()
    _wrong(monkeypatch)
    plan = pase.search((Tanh(), *given), devices=1)
    with pytest.raises(ProgramError, match="computes something else than the module"):
        pase.parallelize((Tanh(), given[1]), plan)(*given[0])


def test_a_module_that_is_too_large_is_compared_with_two_blocks_of_each_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    x = X.repeat(4, 1)
    # One layer of 8 × 8 for 16 examples has 2,048 FLOP.
    monkeypatch.setitem(first_step._MOST_FLOP, "cpu", 10_000)
    module = Tanh(depth=7)
    parallel = _alone(module, x)
    parallel(x)
    assert any("it was compared without 5 repeated blocks, of 4 examples" in note for note in parallel.notes)
    assert len(module.layers) == 7
    monkeypatch.setitem(first_step._MOST_FLOP, "cpu", 1_000)
    parallel = _alone(Tanh(depth=7), x)
    parallel(x)
    assert any("was not compared with the module itself, which is too much work" in note for note in parallel.notes)
    _wrong(monkeypatch)
    monkeypatch.setitem(first_step._MOST_FLOP, "cpu", 10_000)
    with pytest.raises(ProgramError, match="computes something else than the module"):
        _alone(Tanh(depth=7), x)(x)


def test_memory_that_is_not_there_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_step, "_free_bytes", lambda _: 2_000.0)
    parallel = _alone(Tanh())
    parallel(X)
    assert any("is too large for one device (0.0 GB, 0.0 GB are free)" in note for note in parallel.notes)


def _alive() -> int:
    """Return the bytes of all plain tensors that there are."""
    plain = [x for x in gc.get_objects() if type(x) in (torch.Tensor, nn.Parameter)]
    tensors = [x for x in plain if x.layout is torch.strided]
    return sum({x.untyped_storage()._cdata: x.untyped_storage().nbytes() for x in tensors}.values())


@pytest.mark.parametrize("fails", [False, True])
def test_nothing_of_the_comparison_outlives_it(fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before garbage is collected, too."""
    if fails:
        # The module itself asks first.
        given = [torch.ones(4, 3)]
        weights = iter(given)
        monkeypatch.setattr(comparison, "_weights", lambda _: next(weights))
    added = []
    for verify in ("off", "first_step"):
        parallel = _alone(Tanh(), verify=verify)
        gc.collect()
        gc.disable()
        try:
            before = _alive()
            parallel(X).sum().backward()
            added.append(_alive() - before)
        finally:
            gc.enable()
        assert any("not compared with the module itself" in x for x in parallel.notes) == (
            fails and verify == "first_step"
        )
    assert added[0] == added[1] == 4 * sum(p.numel() for p in parallel.parameters())


def _trained(_rank: int, _world: int, plan: Plan, in_parts: bool) -> list[str]:
    """The module is another one than what was traced, once."""
    found = []
    for is_wrong in (False, True):
        batch, module = MODULES["gpt"].batch(0), made("gpt")
        parallel = pase.parallelize((module, batch), plan)
        if is_wrong:
            module.blocks[0].forward = lambda x, block=module.blocks[0]: type(block).forward(block, x) * 1.001
        if in_parts:
            own = parallel.inputs()
            batch = {key: x[tuple(slice(*along) for along in own[key])] for key, x in batch.items()}
        try:
            parallel.accumulate(**batch)
        except ProgramError as error:
            found.append(str(error))
        found += [note for note in parallel.notes if "compared" in note]
    return found


@pytest.mark.parametrize("kind", ["whole", pytest.param("in parts", marks=pytest.mark.full), "in stages"])
def test_all_ranks_are_told_of_it(ranks: Pool, kind: str) -> None:
    graph = pase.load((made("gpt"), MODULES["gpt"].batch(0)))
    plan = in_stages(graph, 2, 2, 1, "1f1b", 3) if kind == "in stages" else random_plan(graph, 2, 1)
    found = ranks.run(_trained, plan, kind == "in parts", world=2)
    assert found[0] == found[1]
    assert len(found[0]) == 1
    assert "the plan's program computes something else than the module: " in found[0][0]
