"""Tensors without values: of example inputs, of modules created without weights, and of modules being traced.

`known_values` keeps the values of small tensors that depend on no input or weight, so that control flow on them is
known: a module may create a mask of ones and then test whether any of it is zero. Tracing only knows shapes and would
stop there. The values of each such tensor are therefore computed alongside.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from functools import cache, partial
from math import inf, log, pi
from typing import Any

from pase.errors import ModelError

_SMALL = "arange linspace logspace tensor as_tensor eye scalar_tensor"
"""Factories of ranges and literals, whose values a constructor may read (rates of a schedule, sizes)."""

_MAX_SMALL = 4096
"""Elements of such a tensor."""

_RANDOM = ("rand", "empty", "normal", "bernoulli", "multinomial", "dropout", "new_empty")
"""Prefixes of functions whose results have no known values."""

LIKE_ANOTHER = frozenset({"new_zeros", "new_ones", "new_full", "zeros_like", "ones_like", "full_like"})
"""Functions that read a tensor's shape and type, not its values."""

_QUESTIONS = frozenset({"item", "tolist", "__bool__", "__int__", "__float__", "__index__"})
_MAX_ELEMENTS = 1 << 20
"""Maximum elements of a tensor whose values are kept."""


def mapped(function: Callable[[Any], Any], torch: Any, given: Any) -> Any:
    """Return example inputs with a function applied to every tensor in lists, tuples and dicts of them."""
    if isinstance(given, torch.Tensor):
        return function(given)
    if isinstance(given, Mapping) and type(given) is dict:
        return {key: mapped(function, torch, value) for key, value in given.items()}
    if type(given) in (list, tuple):
        return type(given)(mapped(function, torch, value) for value in given)
    return given


def tensors_in(torch: Any, given: Any) -> list[Any]:
    """Return the tensors of example inputs, in order."""
    found: list[Any] = []
    mapped(lambda tensor: found.append(tensor) or tensor, torch, given)  # type: ignore[func-returns-value]
    return found


def with_batch(
    torch: Any, positional: tuple[Any, ...], keywords: dict[str, Any], batch: int
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the inputs with another leading dim, where all of them have the same one; ModelError where not."""
    if batch < 1:
        raise ModelError(f"the batch is {batch}; expected 1 or more")
    leading = {tensor.shape[0] for tensor in tensors_in(torch, (positional, keywords)) if tensor.dim()}
    if len(leading) != 1:
        found = ", ".join(map(str, sorted(leading))) or "of no tensor"
        raise ModelError(
            f"the example inputs have leading dims {found}; --batch needs one that all share: make the inputs of that "
            "batch instead (a factory that takes an argument 'batch' is given it)"
        )

    def changed(tensor: Any) -> Any:
        if not tensor.dim():
            return tensor
        return torch.empty((batch, *tensor.shape[1:]), dtype=tensor.dtype, device="meta")

    return mapped(changed, torch, positional), mapped(changed, torch, keywords)


def check_tensors(torch: Any, module: Any) -> None:
    """Raise ModelError for weights that are not plain arrays of numbers."""
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if isinstance(tensor, torch.nn.parameter.UninitializedTensorMixin):
            raise ModelError(
                f"weight {name!r} of the module has no shape yet, as it is lazy; call the module once, or give the size"
            )
        if tensor.layout != torch.strided:
            raise ModelError(
                f"weight {name!r} of the module is sparse ({tensor.layout}); only dense ones can be imported: give it "
                "as tensor.to_dense()"
            )
        if tensor.is_quantized:
            raise ModelError(
                f"weight {name!r} of the module is quantised ({tensor.dtype}); give the module before quantisation, "
                "which is what is trained"
            )


@contextmanager
def on_one_device(torch: Any, module: Any, given: Any) -> Iterator[Any]:
    """Yield example inputs that are on one device with the module's weights, without allocating memory.

    Within the context, weights without values (on the device 'meta') are replaced by fake ones on the CPU, where a
    module creates its own tensors; so are inputs on other devices than the weights.
    """
    held = [*module.parameters(), *module.buffers()]
    inputs = tensors_in(torch, given)
    # 'meta' is not a real device: tensors there are compatible with any.
    places = {tensor.device for tensor in (*held, *inputs)} - {torch.device("meta")}
    home = next((tensor.device for tensor in held if tensor.device.type != "meta"), None)
    home = home or next(iter(places), torch.device("cpu"))
    if all(tensor.device == home for tensor in (*held, *inputs)) and not _has_meta(torch, module):
        yield given
        return
    modes = [tensor.fake_mode for tensor in (*held, *inputs) if hasattr(tensor, "fake_mode")]
    mode = modes[0] if modes else torch._subclasses.FakeTensorMode()
    made: dict[int, Any] = {}

    def fake(tensor: Any) -> Any:
        """Return a tensor of the same shape at home, the same one for the same tensor."""
        if id(tensor) not in made:
            with mode:
                new = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=home)
            if isinstance(tensor, torch.nn.Parameter):
                new = torch.nn.Parameter(new, requires_grad=tensor.requires_grad)
            made[id(tensor)] = new
        return made[id(tensor)]

    with ExitStack() as stack:
        for part in module.modules():
            for holder in (part._parameters, part._buffers, part.__dict__):
                for name, tensor in list(holder.items()):
                    if isinstance(tensor, torch.Tensor) and tensor.device.type == "meta":
                        stack.callback(holder.__setitem__, name, tensor)
                        holder[name] = fake(tensor)
        yield mapped(lambda t: t if t.device == home and not modes and not t.is_meta else fake(t), torch, given)


def _has_meta(torch: Any, module: Any) -> bool:
    return any(
        isinstance(value, torch.Tensor) and value.device.type == "meta"
        for part in module.modules()
        for value in part.__dict__.values()
    )


@contextmanager
def without_values(torch: Any) -> Iterator[None]:
    """Return a context in which modules are created on the device 'meta'.

    Ranges and literals keep their values unless they are combined with tensors without values: constructors read them.
    """
    small = frozenset(getattr(torch, name) for name in _SMALL.split())

    class Values(torch.overrides.TorchFunctionMode):  # type: ignore[misc]
        def __torch_function__(
            self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            given = dict(kwargs or {})
            if function in small and given.get("device") is None and not tensors_in(torch, (args, given)):
                made = function(*args, **{**given, "device": "cpu"})
                return made if made.numel() <= _MAX_SMALL else made.to("meta")
            devices = {tensor.device.type for tensor in tensors_in(torch, (args, given))}
            if devices == {"cpu", "meta"} and function is not torch.Tensor.copy_:
                args, given = (mapped(lambda t: t.to("meta"), torch, part) for part in (args, given))
            return function(*args, **given)

    with torch.device("meta"), Values():
        yield


# -- values that are known while a module is traced


def known_values(torch: Any, *, keeps_gradients: bool = False) -> AbstractContextManager[object]:
    """Return a context for `torch.export` in which the values of such tensors can be read.

    Functions that read the values of their inputs are computed in another way there. With `keeps_gradients`, the
    gradients of losses equal PyTorch's even where that detaches them.
    """
    functional = torch.nn.functional
    replaced: dict[Any, Any] = {functional.gaussian_nll_loss: _gaussian_nll, functional.ctc_loss: _ctc_loss}
    if keeps_gradients:
        replaced = {function: partial(instead, keeps_gradients=True) for function, instead in replaced.items()}
    replaced |= dict.fromkeys((torch.bincount, torch.Tensor.bincount), _bincount)
    replaced |= dict.fromkeys((torch.cov, torch.Tensor.cov), _cov)

    class Known(torch.overrides.TorchFunctionMode):  # type: ignore[misc]
        """Computes values alongside; values: by a tensor's id, that tensor (to keep the id unique) and its values."""

        def __init__(self) -> None:
            super().__init__()
            self.values: dict[int, tuple[Any, Any]] = {}

        def __torch_function__(
            self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            given = dict(kwargs or {})
            if function in replaced:
                return replaced[function](torch, *args, **given)
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
            elif (is_known or name in LIKE_ANOTHER) and _is_small(torch, made):
                # Computations that fail alongside (a function that reads the device of its tensors) have unknown
                # results.
                with suppress(RuntimeError, TypeError, ValueError):
                    self.values[id(made)] = made, self._computed(function, args, given)
            return made

        def _computed(self, function: Any, args: tuple[Any, ...], given: dict[str, Any]) -> Any:
            """Return the result of a function for values, without tracing it."""
            from torch.utils._python_dispatch import _disable_current_modes

            with _disable_current_modes(), torch._C.DisableTorchFunction():
                real, named = (mapped(self._real, torch, part) for part in (args, given))
                named = {key: value for key, value in named.items() if key not in ("device", "pin_memory")}
                return function(*real, **named)

        def _real(self, tensor: Any) -> Any:
            """Return a tensor with its values; with arbitrary ones where only its shape is needed."""
            if id(tensor) in self.values:
                return self.values[id(tensor)][1]
            return torch.zeros((), dtype=tensor.dtype).expand(tensor.shape)

    return Known()


def _bincount(torch: Any, x: Any, weights: Any = None, minlength: int = 0) -> Any:
    """Return how often each number occurs; numbers from `minlength` on are out of range."""
    if not minlength:
        return torch.bincount(x, weights)
    if weights is None:
        weights = torch.ones_like(x, dtype=torch.int64)
    elif weights.dtype != torch.float32:
        weights = weights.double()
    return torch.zeros(minlength, dtype=weights.dtype, device=x.device).index_add(0, x, weights.detach())


def _cov(torch: Any, x: Any, *, correction: int = 1, fweights: Any = None, aweights: Any = None) -> Any:
    """Return the covariances of rows; PyTorch's own function tests whether all weights are zero."""
    if fweights is not None or aweights is not None:
        return torch.cov(x, correction=correction, fweights=fweights, aweights=aweights)
    rows = x if x.dim() == 2 else x.reshape(1, -1)
    apart = rows - rows.mean(1, keepdim=True)
    return (apart @ apart.t().conj() / max(rows.shape[1] - correction, 0)).squeeze()


def _gaussian_nll(
    torch: Any,
    x: Any,
    target: Any,
    var: Any,
    full: bool = False,
    eps: float = 1e-6,
    reduction: str = "mean",
    *,
    keeps_gradients: bool = False,
) -> Any:
    """Return the negative log-likelihood of normal distributions; var: of x's shape, or of one for each row.

    PyTorch's own function tests whether a variance is negative, on which no strategy depends.
    """
    if isinstance(var, torch.Tensor) and var.dim() < x.dim() and var.shape == x.shape[:-1]:
        var = var.unsqueeze(-1)
    var = torch.as_tensor(var)
    clamped = torch.clamp(var, min=eps)
    if keeps_gradients:
        # PyTorch clamps under no_grad: the gradient is that without clamping.
        clamped = clamped.detach() + (var - var.detach())
    var = clamped
    loss = 0.5 * (torch.log(var) + (x - target) ** 2 / var)
    if full:
        loss = loss + 0.5 * log(2 * pi)
    return loss.mean() if reduction == "mean" else loss.sum() if reduction == "sum" else loss


@cache
def ctc_operator(torch: Any) -> Any:
    """Define an operator `pase::ctc_loss`, once: the losses of examples, [n]; return the library that holds it.

    PyTorch's own operator also returns data for its backward pass, whose size depends on the targets' lengths.
    """
    ctc = torch.nn.functional.ctc_loss
    library = torch.library.Library("pase", "FRAGMENT")
    library.define(
        "ctc_loss(Tensor scores, Tensor targets, Tensor steps, Tensor lengths, int blank, bool zero_infinity=False) "
        "-> Tensor"
    )

    def losses(scores: Any, targets: Any, steps: Any, lengths: Any, blank: int, zero_infinity: bool = False) -> Any:
        return ctc(scores, targets, steps, lengths, blank, "none", zero_infinity)

    def save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.save_for_backward(*inputs[:4])
        ctx.options = inputs[4:]

    def gradient(ctx: Any, dy: Any) -> tuple[Any, ...]:
        scores, *others = ctx.saved_tensors
        with torch.enable_grad():
            scores = scores.detach().requires_grad_()
            (dx,) = torch.autograd.grad(losses(scores, *others, *ctx.options), scores, dy)
        return dx, *(None for _ in (*others, *ctx.options))

    library.impl("ctc_loss", losses, "CompositeExplicitAutograd")
    torch.library.register_fake("pase::ctc_loss", lambda scores, *_: scores.new_empty(scores.shape[1]), lib=library)
    torch.library.register_autograd("pase::ctc_loss", gradient, setup_context=save, lib=library)
    return library


def _ctc_loss(
    torch: Any,
    log_probs: Any,
    targets: Any,
    input_lengths: Any,
    target_lengths: Any,
    blank: int = 0,
    reduction: str = "mean",
    zero_infinity: bool = False,
    *,
    keeps_gradients: bool = False,
) -> Any:
    """Return the connectionist temporal classification loss; log_probs: [t, n, c], or [t, c] of one example."""
    scores = log_probs if log_probs.dim() == 3 else log_probs.unsqueeze(1)
    steps, lengths = torch.as_tensor(input_lengths), torch.as_tensor(target_lengths)
    options = (blank, zero_infinity) if keeps_gradients else (blank,)
    losses = torch.ops.pase.ctc_loss(scores, targets, steps, lengths, *options)
    if zero_infinity and not keeps_gradients:
        losses = torch.where(losses == inf, 0.0, losses)
    if reduction == "mean":
        return (losses / lengths.clamp(min=1)).mean()
    return losses.sum() if reduction == "sum" else losses if log_probs.dim() == 3 else losses.squeeze(0)


def _writes(name: str) -> bool:
    """Return whether a function writes into its first tensor."""
    return name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))


def _is_small(torch: Any, made: Any) -> bool:
    return isinstance(made, torch.Tensor) and made.numel() <= _MAX_ELEMENTS
