"""A module's captured graph computes what the module itself does: values, gradients and buffers, in two steps."""

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn import functional  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

from pase.importers.torch.capture import Captured, captured  # noqa: E402
from pase.importers.torch.export import tensors_of  # noqa: E402

_TOLERANCE = 1e-11


def call(capture: Captured, module: nn.Module, inputs: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """Return what a captured graph gives of a module's own tensors: outputs, and what is written."""
    held = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    arguments = []
    for node in capture.graph.graph.find_nodes(op="placeholder"):
        name = node.name
        held_name = capture.parameters.get(name) or capture.buffers.get(name)
        if held_name is not None:
            arguments.append(held[held_name])
        else:
            arguments.append(capture.constants[name] if name in capture.constants else inputs[capture.inputs[name]])
    results = list(capture.graph(*arguments))
    count = len(capture.outputs)
    return results[:count], dict(zip(capture.written, results[count:], strict=True))


def scalar(tensors: list[Any]) -> Any:
    """Return a number that depends on every element of tensors that have gradients."""
    total = torch.zeros((), dtype=torch.float64)
    for tensor in tensors:
        if tensor.is_floating_point() and tensor.requires_grad:
            weights = torch.sin(torch.arange(tensor.numel(), dtype=torch.float64) + 1)
            total = total + (tensor.double() * weights.reshape(tensor.shape)).sum()
    return total


def assert_equal(ours: Any, theirs: Any, what: str) -> None:
    """Check tensors, either of which may be None for zeros."""
    if ours is None and theirs is None:
        return
    ours = torch.zeros_like(theirs) if ours is None else ours.detach()
    theirs = torch.zeros_like(ours) if theirs is None else theirs.detach()
    scale = max(1.0, float(theirs.abs().max())) if theirs.numel() else 1.0
    torch.testing.assert_close(
        ours, theirs, rtol=0, atol=_TOLERANCE * scale, equal_nan=True, msg=lambda m: f"{what}: {m}"
    )


def assert_as_module(module: nn.Module, inputs: dict[str, Any], *, trains: bool = True, steps: int = 2) -> Captured:
    """Check that two steps of SGD by the captured graph are those of the module."""
    state = deepcopy(module.state_dict())
    modes = [part.training for part in module.modules()]
    capture = captured(torch, module, (), inputs, trains=trains)
    assert modes == [part.training for part in module.modules()]
    for name, tensor in module.state_dict().items():
        assert torch.equal(tensor, state[name]), f"{name} is not as it was"
    reference, own = deepcopy(module), deepcopy(module)
    if not trains:
        reference.eval()
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.05) for part in (reference, own)]
    for step in range(steps):
        for optimizer in optimizers:
            optimizer.zero_grad()
        torch.manual_seed(step)
        expected = list({id(x): x for x in tensors_of(torch, reference(**deepcopy(inputs)))}.values())
        scalar(expected).backward()
        torch.manual_seed(step)
        outputs, written = call(capture, own, deepcopy(inputs))
        scalar(outputs).backward()
        held = {**dict(own.named_parameters()), **dict(own.named_buffers())}
        with torch.no_grad():
            for name, value in written.items():
                held[name].copy_(value)
        assert len(outputs) == len(expected)
        for i, (ours, theirs) in enumerate(zip(outputs, expected, strict=True)):
            assert_equal(ours, theirs, f"output {i}")
        for (name, ours), theirs in zip(own.named_parameters(), reference.parameters(), strict=True):
            assert_equal(ours.grad, theirs.grad, f"gradient of {name}")
        for optimizer in optimizers:
            optimizer.step()
        for name, theirs in reference.state_dict().items():
            assert_equal(own.state_dict()[name], theirs, name)
    return capture


class Sign(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, x: Any, scale: float) -> Any:
        ctx.save_for_backward(x)
        ctx.scale = scale
        return torch.sign(x) * scale

    @staticmethod
    def backward(ctx: Any, dy: Any) -> Any:
        (x,) = ctx.saved_tensors
        return dy * (x.abs() < 1) * ctx.scale, None


class Reverse(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(_ctx: Any, x: Any) -> Any:
        return x.view_as(x)

    @staticmethod
    def backward(_ctx: Any, dy: Any) -> Any:
        return -dy


reverse = Reverse.apply
"""As users name it: bound before anything is traced."""


class Layers(nn.Module):  # type: ignore[misc]
    """Three products, and a function of the module and its input."""

    def __init__(self, function: Callable[[Any, Any], Any], **parts: Any) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.function = function
        for name, value in parts.items():
            (self.register_buffer if isinstance(value, torch.Tensor) else self.__setattr__)(name, value)

    def forward(self, x: Any) -> Any:
        return self.function(self, x)


def _stopped(self: Any, x: Any) -> Any:
    y = self.first(x)
    return y * y.detach()


def _target_network(self: Any, x: Any) -> Any:
    with torch.no_grad():
        target = self.second(self.first(x))
    return (self.third(self.first(x)) - target).square().mean()


def _own_backward(self: Any, x: Any) -> Any:
    y = reverse(Sign.apply(self.first(x), 2.0))
    return self.second(y).square().mean()


def _moving_average(self: Any, x: Any) -> Any:
    y = self.first(x)
    with torch.no_grad():
        self.mean.mul_(0.9).add_(y.mean(0), alpha=0.1)
    return self.second(y - self.mean)


def _checkpointed(self: Any, x: Any) -> Any:
    y = checkpoint(self.first, x, use_reentrant=False)
    y = checkpoint(lambda y: functional.dropout(self.second(y).relu(), 0.3), y, use_reentrant=True)
    return self.third(y)


def _normal_likelihood(self: Any, x: Any) -> Any:
    return functional.gaussian_nll_loss(self.first(x), self.second(x), self.third(x).square(), eps=0.1)


MODULES: dict[str, Callable[[], nn.Module]] = {
    "stopped gradient": lambda: Layers(_stopped),
    "target network": lambda: Layers(_target_network),
    "autograd functions": lambda: Layers(_own_backward),
    "moving average": lambda: Layers(_moving_average, mean=torch.zeros(8)),
    "checkpoints": lambda: Layers(_checkpointed),
    "gaussian_nll_loss": lambda: Layers(_normal_likelihood),
}


@pytest.mark.parametrize("name", MODULES)
def test_captured_graph_computes_what_the_module_does_in_training(name: str) -> None:
    torch.manual_seed(0)
    module = MODULES[name]().double()
    assert_as_module(module, {"x": torch.randn(4, 8, dtype=torch.float64)})
