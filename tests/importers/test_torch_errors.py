"""What is said of PyTorch modules that cannot be imported: which operator, where, and what to do."""

import sys
import warnings
from collections.abc import Callable
from typing import Any

import pytest

from pase import load
from pase.errors import MissingExtraError, ModelError
from pase.importers.torch.export import TorchFrontEnd, failure
from pase.importers.torch.program import location

torch = pytest.importorskip("torch")


def _branch(x: Any) -> Any:
    if x.sum() > 0:
        return x
    return x + 1


def _loop(x: Any) -> Any:
    for _ in range(int(x.sum())):
        x = x + 1
    return x


def _nonzero(x: Any) -> Any:
    return x.nonzero()


def _masked(x: Any) -> Any:
    return x[x > 0] * 2


def _cond(x: Any) -> Any:
    return torch.cond(x.sum() > 0, lambda a: a + 1, lambda a: a * 2, (x,))


def _cuda(x: Any) -> Any:
    return x + torch.zeros(4, device="cuda")


def _cuda_input(x: Any) -> Any:
    return x.cuda() + 1


def _wrong(x: Any) -> Any:
    return torch.nn.functional.linear(x, torch.zeros(3, 9))


def _nothing(x: Any) -> Any:
    return {"loss": None}


_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
_FOR_GPUS = pytest.mark.skipif(torch.backends.cuda.is_built(), reason="a PyTorch for GPUs traces this without one")


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (_branch, r"control flow depends on values at test_torch_errors\.py:\d+ \(if x\.sum\(\) > 0:\)"),
        (_loop, r"control flow depends on values at test_torch_errors\.py:\d+ \(for _ in range.*torch\.where"),
        (_nonzero, r"size depends on values at test_torch_errors\.py:\d+ .*aten\.nonzero\.default gives \[u0, 2\]"),
        (_masked, r"size depends on values at test_torch_errors\.py:\d+ .*operator aten\.index\.Tensor"),
        (_cond, r"has control flow at test_torch_errors\.py:\d+ .*operator torch\.cond runs a program of its own"),
        pytest.param(_cuda, r"needs a GPU at test_torch_errors\.py:\d+ .*device=x\.device", marks=_GPU),
        pytest.param(_cuda_input, r"needs a GPU at test_torch_errors\.py:\d+ .*leave out \.cuda\(\)", marks=_FOR_GPUS),
        (_wrong, r"cannot be traced at test_torch_errors\.py:\d+ .*RuntimeError: .*\[2, 4\]"),
        (_nothing, r"the module returns no tensor but dict; expected tensors"),
    ],
)
def test_what_cannot_be_traced_is_told_in_one_line(
    function: Callable[[Any], Any], text: str, capfd: pytest.CaptureFixture[str]
) -> None:
    class Module(torch.nn.Module):  # type: ignore[misc]
        def forward(self, x: Any) -> Any:
            return function(x)

    with pytest.raises(ModelError, match=text) as raised:
        load((Module(), torch.zeros(2, 4)))
    assert "\n" not in str(raised.value)
    assert capfd.readouterr() == ("", "")


_LINEAR, _X = torch.nn.Linear(4, 4), torch.zeros(2, 4)


def _sparse() -> Any:
    module = torch.nn.Linear(4, 4)
    module.weight = torch.nn.Parameter(torch.eye(4).to_sparse(), requires_grad=False)
    return module


def _script() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.jit.script(_LINEAR)


@pytest.mark.parametrize(
    ("source", "options", "text"),
    [
        (lambda: (_LINEAR, {"y": _X}), {}, "cannot be traced: TypeError: missing a required argument: 'input'"),
        (lambda: _LINEAR, {}, "a torch module needs example inputs"),
        (lambda: (_LINEAR,), {}, "a torch module needs example inputs"),
        (lambda: (_LINEAR, _X, _X), {}, "third item is a dict of inputs by name, or a loss; found a Tensor"),
        (lambda: (_LINEAR, (_X,), torch.nn.MSELoss()), {}, "a loss needs targets: give them as the last of the inputs"),
        (
            lambda: (torch.nn.Bilinear(4, 4, 4), (_X, torch.zeros(3, 4))),
            {"batch": 8},
            "leading dims 2, 3; --batch needs one that all share",
        ),
        (lambda: (_LINEAR, _X), {"batch": 0}, "the batch is 0; expected 1 or more"),
        (
            lambda: (_LINEAR, _X),
            {"arguments": {"depth": 3}},
            "takes no argument 'depth' here; arguments are those of a factory",
        ),
        (lambda: (torch.nn.LazyLinear(4), _X), {}, "weight 'weight' of the module has no shape yet"),
        (lambda: (_sparse(), _X), {}, r"weight 'weight' of the module is sparse.*to_dense"),
        (lambda: (_script(), _X), {}, "a TorchScript module has no Python source"),
    ],
)
def test_what_cannot_be_taken_is_told(source: Callable[[], Any], options: dict[str, Any], text: str) -> None:
    with pytest.raises(ModelError, match=text):
        load(source(), **options)


def test_torch_has_to_be_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    module = torch.nn.Linear(4, 4)
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(MissingExtraError, match="needs torch, which is not installed; PaSE's extra 'torch'"):
        TorchFrontEnd().trace((module, ()), batch=None, arguments={})


def test_places_are_the_users() -> None:
    stack = (
        '  File "/home/me/net.py", line 7, in forward\n    return self.layer(x)\n'
        '  File "/usr/lib/python3/site-packages/torch/nn/modules/linear.py", line 134, in forward\n    return f(x)\n'
    )
    assert location(stack) == ("net.py:7", "return self.layer(x)")
    assert location("") == ("", "")


def test_an_error_without_a_place_is_told_all_the_same() -> None:
    assert failure(ValueError("no\nmore")) == "the module cannot be traced: ValueError: no"
    assert failure(ValueError()) == "the module cannot be traced: ValueError: no message"
