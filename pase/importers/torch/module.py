"""PyTorch modules with example inputs; `torch.export` traces them on tensors without values."""

import sys
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any

from pase.errors import ModelError
from pase.graph import Scalar
from pase.importers.front_end import framework
from pase.importers.ir import Trace, check_trace
from pase.importers.torch.export import exported
from pase.importers.torch.program import constant_values, read_program
from pase.importers.torch.tensors import with_batch, without_values


class TorchFrontEnd:
    """Takes (module, example inputs) or (module, example inputs, keyword inputs): what a call of the module takes."""

    package = "torch"
    extra = "torch"

    def takes(self, source: object) -> bool:
        """Return whether a source is a module, alone or with inputs."""
        torch = sys.modules.get("torch")
        first = source[0] if isinstance(source, list | tuple) and source else source
        return torch is not None and isinstance(first, torch.nn.Module)

    def trace(self, source: object, *, batch: int | None, arguments: Mapping[str, Scalar]) -> Trace:
        """Return the trace of a module."""
        torch = framework("torch", "torch")
        module, positional, keywords = _call(source)
        if arguments:
            raise ModelError(
                f"a torch module takes no argument {next(iter(arguments))!r} here; arguments are those of a factory"
            )
        if batch is not None:
            positional, keywords = with_batch(torch, positional, keywords, batch)
        return trace_module(module, positional, keywords)

    def without_weights(self) -> AbstractContextManager[object]:
        """Return a context in which tensors have shapes alone."""
        context: AbstractContextManager[object] = without_values(framework("torch", "torch"))
        return context


def trace_module(module: Any, arguments: tuple[Any, ...], keywords: Mapping[str, Any], *, name: str = "") -> Trace:
    """Return the trace of a torch module called with example inputs; no weight's value is read.

    The module is traced as it is outside training (dropout does nothing), and left as it was. Raises ModelError where
    it cannot be: control flow that depends on values, sizes that do, a GPU that is not there, a call that fails.
    """
    torch = framework("torch", "torch")
    module = _unwrapped(torch, module)
    program, notes = exported(torch, module, tuple(arguments), dict(keywords))
    return check_trace(read_program(torch, module, program, name or type(module).__name__, notes))


def values_of(source: Any, names: Iterable[str], *, batch: int | None = None) -> dict[str, Any]:
    """Return weights, buffers and what a module computes of these alone as tensors, by their names in its trace.

    source, batch: those of the trace. Values that the module does not have, or computes of its inputs, are left out;
    ModelError for a weight that was made without values.
    """
    torch = framework("torch", "torch")
    module, *_ = source if isinstance(source, list | tuple) else (source,)
    module = _unwrapped(torch, module)
    held = {**dict(module.named_buffers()), **module.state_dict()}
    found = {name: held[name].detach().cpu() for name in names if name in held}
    for name, tensor in found.items():
        if tensor.is_meta:
            raise ModelError(f"weight {name!r} was made without values (on the device 'meta')")
    rest = [name for name in names if name not in held]
    if rest:
        _, positional, keywords = _call(source)
        if batch is not None:
            positional, keywords = with_batch(torch, positional, keywords, batch)
        program, _ = exported(torch, module, positional, keywords)
        found |= constant_values(torch, module, program, rest)
    return found


def _unwrapped(torch: Any, module: Any) -> Any:
    """Return the module within one that is compiled or copied to several devices; ModelError for TorchScript."""
    if isinstance(module, torch.jit.ScriptModule):
        raise ModelError(
            "a TorchScript module has no Python source that could be traced; give the module that it was made of, or "
            "export it to ONNX"
        )
    if isinstance(module, torch.nn.DataParallel | torch.nn.parallel.DistributedDataParallel):
        return module.module
    return getattr(module, "_orig_mod", module)


def _call(source: object) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """Return the module, its positional and its keyword inputs."""
    if not isinstance(source, list | tuple) or len(source) not in (2, 3):
        raise ModelError(
            "a torch module needs example inputs: give (module, inputs), inputs being a tensor, a tuple of tensors "
            "or a dict of them by name, or (module, inputs, dict of more); tensors on the device 'meta' will do"
        )
    module, given, *more = source
    # Some libraries' dicts of inputs (of tokens, say) are mappings without being dicts.
    keywords: dict[str, Any] = dict(given) if isinstance(given, Mapping) else {}
    positional = () if isinstance(given, Mapping) else tuple(given) if isinstance(given, list | tuple) else (given,)
    for extra in more:
        if not isinstance(extra, Mapping):
            raise ModelError(
                f"a torch module's third item is a dict of inputs by name; found a {type(extra).__name__}; give all "
                "positional inputs as one tuple: (module, (x, y))"
            )
        keywords |= dict(extra)
    return module, positional, keywords
