"""What users of PyTorch expect of a module under a plan beside its loss: parts, attributes, hooks, gradients."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

import pase
from pase.errors import ModelError, ProgramError
from pase.planning.plan import Plan
from pase.targets.torch.parallel import parallelize
from tests.runtime.plans import random_plan
from tests.targets.torch.equality import assert_close, full
from tests.targets.torch.ranks import Pool

X = torch.linspace(-2.0, 3.0, 32, dtype=torch.float64).reshape(4, 8).sin() * 2


class Net(nn.Module):
    hidden = 16
    """Of the class."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2))
        self.heads = nn.ModuleDict({"loss": nn.Linear(8, 1), "other": nn.Identity()})
        self.settings, self.every = {"rate": 0.5}, [self.blocks[0]]

    @property
    def width(self) -> int:
        return int(self.heads["loss"].weight.shape[1])

    def twice(self) -> int:
        return 2 * self.hidden

    def forward(self, x: Any) -> Any:
        for block in self.blocks:
            x = block(x) + x
        return self.heads["loss"](x).square().mean()


def _made() -> nn.Module:
    torch.manual_seed(5)
    return Net().double()


def _plan(world: int) -> Plan:
    return random_plan(pase.load((_made(), X)), world, 3)


def _parallel(plan: Plan) -> Any:
    return parallelize((_made(), X), plan, verify="off")


def _on_ranks(_rank: int, _world: int, plan: Plan) -> None:
    _check_parts(_parallel(plan))
    _check_hooks(plan)
    _check_gradients(plan)
    _check_shapes(plan)


def _check_parts(parallel: Any) -> None:
    assert len(parallel.blocks) == 2
    assert parallel.blocks[-1] is parallel.blocks[1] is parallel.get_submodule("blocks.1")
    assert [len(block) for block in parallel.blocks] == [2, 2]
    assert parallel.blocks[0][0].weight is dict(parallel.named_parameters())["blocks.0.0.weight"]
    assert parallel.blocks[0][0].in_features == 8
    assert len(parallel.blocks[1:]) == 1
    assert list(parallel.heads) == ["loss", "other"]
    assert "loss" in parallel.heads
    assert [name for name, _ in parallel.heads.items()] == parallel.heads.keys()
    assert parallel.heads["loss"].bias.shape == (1,)
    assert (parallel.hidden, parallel.settings, parallel.width) == (16, {"rate": 0.5}, 8)
    assert copy.deepcopy(parallel).blocks[1][0].weight is not parallel.blocks[1][0].weight
    for name in ("twice", "every", "missing"):
        with pytest.raises(AttributeError, match=rf"'Net' under a plan has no (method|attribute) '{name}'; it has the"):
            getattr(parallel, name)
    with pytest.raises(TypeError, match=r"This Linear contains no parts that could be counted or indexed"):
        parallel.heads["loss"][0]
    with pytest.raises(ProgramError, match=r"This Sequential is a part of a module under a plan, and computes nothing"):
        parallel.blocks[0](X)
    with pytest.raises(ProgramError, match=r"whose mode is that of the whole module: set that, or have the part in ev"):
        parallel.blocks[0].eval()
    assert not any(part.training for part in parallel.eval().modules())
    assert all(part.training for part in parallel.train().modules())


def _check_hooks(plan: Plan) -> None:
    parallel, alone, seen = _parallel(plan), _made(), list[Any]()
    for register in ("register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook"):
        with pytest.raises(ProgramError, match=r"a hook would never be called. Register it on the whole module"):
            getattr(parallel.blocks[0], register)(lambda *_: None)
    parallel.register_forward_hook(lambda _module, _inputs, output: seen.append(output.item()))
    for module in (parallel, alone):
        module.blocks[0][0].weight.register_hook(lambda gradient: gradient * 3)
        module.blocks[1][0].weight.register_hook(lambda gradient: seen.append(float(full(gradient).norm())))
        module(X).backward()
    loss, found, expected = seen
    assert found == pytest.approx(expected, rel=1e-12)
    assert loss == pytest.approx(alone(X).item(), rel=1e-12)
    for name, parameter in alone.named_parameters():
        assert_close(full(parallel.get_parameter(name).grad), parameter.grad, name)
    parallel.blocks[0][0].weight.register_hook(lambda _gradient: torch.zeros(3))
    with pytest.raises(ProgramError, match=r"a hook of a parameter of shape \[8, 8\] returned a Tensor of shape \[3\]"):
        parallel(X).backward()


def _check_gradients(plan: Plan) -> None:
    parallel = _parallel(plan)
    with pytest.raises(ProgramError, match=r"cannot be differentiated again \(create_graph=True\)"):
        parallel(X).backward(create_graph=True)
    # PyTorch's own: parameters have their gradients of collectives.
    with pytest.raises(RuntimeError, match="not have been used in the graph"):
        torch.autograd.grad(parallel(X), list(parallel.parameters()))


def _check_shapes(plan: Plan) -> None:
    """Another batch is refused at the call, with the shapes that work."""
    parallel = _parallel(plan).eval()
    with (
        torch.no_grad(),
        pytest.raises(ModelError, match=r"input 'x' is of shape \[3, 8\]; the plan is for a"),
    ):
        parallel(X[:3])


def test_on_one_device() -> None:
    plan = _plan(1)
    _check_shapes(plan)
    _check_parts(_parallel(plan))
    _check_hooks(plan)
    _check_gradients(plan)


def test_on_ranks(ranks: Pool) -> None:
    ranks.run(_on_ranks, _plan(2), world=2)


def test_hooks_that_a_module_has_are_refused_or_noted() -> None:
    plan = _plan(1)
    module = _made()
    module.blocks[0][0].weight.register_hook(lambda gradient: gradient * 2)
    with pytest.raises(ProgramError, match=r"parameter 'blocks.0.0.weight' has a hook, which is of this tensor alone"):
        parallelize((module, X), plan)
    module = _made()
    module.blocks[1].register_full_backward_hook(lambda *_: None)
    with pytest.raises(ProgramError, match=r"module 'blocks.1' has a backward hook, which a module under a plan would"):
        parallelize((module, X), plan)
    module = _made()
    module.heads["loss"].register_forward_hook(lambda _module, _inputs, output: output * 2)
    plan = random_plan(pase.load((module, X)), 1, 3)
    parallel = parallelize((module, X), plan)
    assert any("the forward hooks of module 'heads.loss' are traced with it" in note for note in parallel.notes)
    # What they compute is computed.
    assert parallel(X).item() == pytest.approx(module(X).item(), rel=1e-12)


def test_gradients_of_inputs_and_their_penalties() -> None:
    """Right on one device; on several, ranks would have parts of them, which is refused."""
    given, alone = X.clone().requires_grad_(), X.clone().requires_grad_()
    parallel, module = _parallel(_plan(1)), _made()
    for each, x in ((parallel, given), (module, alone)):
        (gradient,) = torch.autograd.grad(each(x), x, create_graph=True)
        gradient.square().sum().backward()
    assert_close(given.grad, alone.grad, "x")
    for name, parameter in module.named_parameters():
        if parameter.grad is not None:
            assert_close(parallel.get_parameter(name).grad, parameter.grad, name)


def _with_input(_rank: int, _world: int, plan: Plan) -> None:
    with pytest.raises(ProgramError, match=r"input 'x' requires a gradient, which a module under a plan does not"):
        _parallel(plan)(X.clone().requires_grad_())
    with torch.no_grad():
        _parallel(plan)(X.clone().requires_grad_())


def test_gradients_of_inputs_are_refused_on_ranks(ranks: Pool) -> None:
    ranks.run(_with_input, _plan(2), world=2)
