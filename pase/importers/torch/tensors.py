"""Tensors without values: of example inputs, of modules made without weights, and of modules while they are traced."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

from pase.errors import ModelError

_SMALL = "arange linspace logspace tensor as_tensor eye scalar_tensor"
"""Factories of ranges and literals, whose values a constructor may ask for (rates of a schedule, sizes)."""

_MAX_SMALL = 4096
"""Elements of such a tensor."""


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
    """Raise ModelError for weights that are no plain arrays of numbers."""
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
    """Yield example inputs beside which the module's weights lie on one device; none of them takes memory.

    Weights without values (on the device 'meta') are stood in for by fake ones on the CPU, where a module makes its own
    tensors, until the context ends; so are inputs that lie elsewhere than the weights.
    """
    held = [*module.parameters(), *module.buffers()]
    inputs = tensors_in(torch, given)
    # 'meta' is no place: what lies there can stand anywhere.
    places = {tensor.device for tensor in (*held, *inputs)} - {torch.device("meta")}
    home = next((tensor.device for tensor in held if tensor.device.type != "meta"), None)
    home = home or next(iter(places), torch.device("cpu"))
    if all(tensor.device == home for tensor in (*held, *inputs)) and not _has_meta(torch, module):
        yield given
        return
    modes = [tensor.fake_mode for tensor in (*held, *inputs) if hasattr(tensor, "fake_mode")]
    mode = modes[0] if modes else _fake_mode()
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
        yield mapped(lambda t: t if t.device == home and not modes and _is_real(t) else fake(t), torch, given)


def _is_real(tensor: Any) -> bool:
    return bool(tensor.device.type != "meta")


def _has_meta(torch: Any, module: Any) -> bool:
    return any(
        isinstance(value, torch.Tensor) and value.device.type == "meta"
        for part in module.modules()
        for value in part.__dict__.values()
    )


def _fake_mode() -> Any:
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode()


@contextmanager
def without_values(torch: Any) -> Iterator[None]:
    """Return a context in which modules are made on the device 'meta'.

    Ranges and literals keep their values as long as nothing that has none meets them: constructors ask for them.
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
