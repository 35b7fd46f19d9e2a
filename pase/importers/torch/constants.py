"""`known_values`: values of small tensors that depend on no input and no weight, so that control flow on them is known.

A module may make a mask of ones itself and then ask whether any of it is zero: tracing knows shapes alone and stops
there. Beside each such tensor its values are kept, computed as the module computes them.
"""

from contextlib import AbstractContextManager, suppress
from math import log, pi
from typing import Any

from pase.importers.torch.tensors import mapped, tensors_in

_RANDOM = ("rand", "empty", "normal", "bernoulli", "multinomial", "dropout", "new_empty")
"""Beginnings of the names of functions whose results have no values that could be told."""

_LIKE_ANOTHER = frozenset({"new_zeros", "new_ones", "new_full", "zeros_like", "ones_like", "full_like"})
"""These ask a tensor for its shape and type, not for its values."""

_QUESTIONS = frozenset({"item", "tolist", "__bool__", "__int__", "__float__", "__index__"})
_MAX_ELEMENTS = 1 << 20


def known_values(torch: Any) -> AbstractContextManager[object]:
    """Return a context for `torch.export`, in which questions about such tensors are answered."""

    class Known(torch.overrides.TorchFunctionMode):  # type: ignore[misc]
        """values: by the id of a tensor, that tensor (so that its id stays its own) and one with its values."""

        def __init__(self) -> None:
            super().__init__()
            self.values: dict[int, tuple[Any, Any]] = {}

        def __torch_function__(
            self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            given = dict(kwargs or {})
            if function is torch.nn.functional.gaussian_nll_loss:
                # It asks whether a variance is negative, which no strategy depends on.
                return _gaussian_nll(torch, *args, **given)
            name = str(getattr(function, "__name__", ""))
            read = tensors_in(torch, (args, given))
            is_known = all(id(tensor) in self.values for tensor in read) and not name.startswith(_RANDOM)
            if name in _QUESTIONS and is_known and read:
                return self._computed(function, args, given)
            made = function(*args, **given)
            if read and _writes(name):
                if is_known:
                    self._computed(function, args, given)
                else:
                    self.values.pop(id(read[0]), None)
            elif (is_known or name in _LIKE_ANOTHER) and _is_small(torch, made):
                # What cannot be computed apart (a function that asks where its tensors are) is not known.
                with suppress(RuntimeError, TypeError, ValueError):
                    self.values[id(made)] = made, self._computed(function, args, given)
            return made

        def _computed(self, function: Any, args: tuple[Any, ...], given: dict[str, Any]) -> Any:
            """Return what a function gives of values, without its being traced."""
            from torch.utils._python_dispatch import _disable_current_modes

            with _disable_current_modes(), torch._C.DisableTorchFunction():
                real, named = (mapped(self._real, torch, part) for part in (args, given))
                named = {key: value for key, value in named.items() if key not in ("device", "pin_memory")}
                return function(*real, **named)

        def _real(self, tensor: Any) -> Any:
            """Return a tensor with its values; with any where its shape alone is asked for."""
            if id(tensor) in self.values:
                return self.values[id(tensor)][1]
            return torch.zeros((), dtype=tensor.dtype).expand(tensor.shape)

    return Known()


def _gaussian_nll(
    torch: Any, x: Any, target: Any, var: Any, full: bool = False, eps: float = 1e-6, reduction: str = "mean"
) -> Any:
    """Return the negative log-likelihood of normal distributions; var: of x's shape, or of one for each row."""
    if isinstance(var, torch.Tensor) and var.dim() < x.dim() and var.shape == x.shape[:-1]:
        var = var.unsqueeze(-1)
    var = torch.clamp(torch.as_tensor(var), min=eps)
    loss = 0.5 * (torch.log(var) + (x - target) ** 2 / var)
    if full:
        loss = loss + 0.5 * log(2 * pi)
    return loss.mean() if reduction == "mean" else loss.sum() if reduction == "sum" else loss


def _writes(name: str) -> bool:
    """Return whether a function writes into its first tensor."""
    return name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))


def _is_small(torch: Any, made: Any) -> bool:
    return isinstance(made, torch.Tensor) and made.numel() <= _MAX_ELEMENTS
