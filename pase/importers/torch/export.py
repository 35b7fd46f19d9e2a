"""`exported`: a torch module's program as `torch.export` gives it, without operators that write into their inputs."""

import io
import logging
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from dataclasses import fields, is_dataclass
from typing import Any

from pase.errors import ModelError
from pase.importers.torch.aten import is_known
from pase.importers.torch.constants import known_values
from pase.importers.torch.failures import failure, is_control_flow
from pase.importers.torch.tensors import check_tensors, mapped, on_one_device

_LOGGERS = ("torch.fx.experimental.symbolic_shapes", "torch._export", "torch.export", "torch._subclasses")
"""They explain failures at length, which are told in one line here."""


def exported(
    torch: Any, module: Any, arguments: tuple[Any, ...], keywords: Mapping[str, Any]
) -> tuple[Any, tuple[str, ...]]:
    """Return the exported program of a module and what was assumed; ModelError where it cannot be traced."""
    check_tensors(torch, module)
    arguments, keywords = _apart(torch, (tuple(arguments), dict(keywords)))
    notes: list[str] = []
    with ExitStack() as stack:
        stack.enter_context(_quiet())
        stack.enter_context(_outside_training(module))
        stack.enter_context(_exportable_experts(module, notes))
        stack.callback(torch.backends.mha.set_fastpath_enabled, torch.backends.mha.get_fastpath_enabled())
        # The fast path has a whole encoder layer as one operator that nothing more is known of.
        torch.backends.mha.set_fastpath_enabled(False)
        hook = module.register_forward_hook(lambda _module, _inputs, output: _tensors(torch, output))
        stack.callback(hook.remove)
        positional, named = stack.enter_context(on_one_device(torch, module, (arguments, keywords)))
        try:
            # What the module prints is no result of ours; what torch prints of its failures is told in one line.
            with torch.no_grad(), redirect_stdout(sys.stderr), redirect_stderr(io.StringIO()):
                return _plain(torch, _traced(torch, module, positional, named)), tuple(notes)
        except ModelError:
            raise
        except Exception as error:
            raise ModelError(failure(error)) from error


def _apart(torch: Any, given: Any) -> Any:
    """Return example inputs of which each is a tensor of its own: `torch.export` takes the same one for one input."""
    seen: set[int] = set()

    def own(tensor: Any) -> Any:
        is_first = id(tensor) not in seen
        seen.add(id(tensor))
        return tensor if is_first else tensor.clone()

    return mapped(own, torch, given)


def _traced(torch: Any, module: Any, positional: tuple[Any, ...], named: dict[str, Any]) -> Any:
    """Return the program; control flow and sizes that depend on what the module makes itself are known."""
    try:
        program = torch.export.export(module, positional, named, strict=False)
        if not _has_unknown_sizes(program):
            return program
    except Exception as error:
        if not is_control_flow(error):
            raise
    with known_values(torch):
        return torch.export.export(module, positional, named, strict=False)


def _has_unknown_sizes(program: Any) -> bool:
    examples = (node.meta.get("val") for node in program.graph.nodes)
    return any(not isinstance(extent, int) for example in examples for extent in getattr(example, "shape", ()))


def _plain(torch: Any, program: Any) -> Any:
    """Return the program with its regions in line, nothing written over, and unknown operators taken apart by torch."""
    # Assertions give nothing that anyone reads, and tracing a program again takes as long as at first.
    nodes = [node for node in program.graph.nodes if node.op == "call_function"]
    calls = [node.target for node in nodes if node.users or _is_mutable(torch, node.target)]
    operators = {target for target in calls if isinstance(target, torch._ops.OpOverload)}
    unknown = {target for target in operators if not is_known(target._schema.name.rpartition("::")[2].rstrip("_"))}
    writes = any(_is_mutable(torch, target) for target in operators)
    regions = any(str(getattr(target, "__name__", "")).startswith("wrap_with") for target in calls)
    decompositions = torch.export.default_decompositions() if unknown else {}
    chosen = {target: decompositions[target] for target in unknown if target in decompositions}
    return program.run_decompositions(chosen) if chosen or writes or regions else program


def _is_mutable(torch: Any, target: Any) -> bool:
    """Whether an operator writes into what it reads."""
    return isinstance(target, torch._ops.OpOverload) and bool(target._schema.is_mutable)


@contextmanager
def _quiet() -> Iterator[None]:
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    levels = [logger.level for logger in loggers]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for logger in loggers:
            logger.setLevel(logging.CRITICAL)
        try:
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)


@contextmanager
def _outside_training(module: Any) -> Iterator[None]:
    """Switch a module to evaluation, and each part of it back to what it was."""
    was_training = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for part, flag in was_training:
            part.training = flag


@contextmanager
def _exportable_experts(module: Any, notes: list[str]) -> Iterator[None]:
    """Have mixtures of experts multiply in groups, not in a loop over the experts that were chosen."""
    with ExitStack() as stack:
        for part in module.modules():
            get, put = (getattr(part, f"{verb}_experts_implementation", None) for verb in ("get", "set"))
            if get is None or put is None:
                continue
            found = get()
            if not isinstance(found, dict) or "eager" not in found.values():
                continue
            try:
                put("grouped_mm")
            except ValueError:
                # It has no experts, or of one implementation alone.
                continue
            stack.callback(put, found)
            if "experts" not in " ".join(notes):
                notes.append("experts are traced as a grouped product, not one after the other")
        yield


def _tensors(torch: Any, output: Any) -> Any:
    """Return the tensors that a module returns: those in lists, dicts and dataclasses; caches and the like are not."""
    found: dict[int, Any] = {}
    for tensor in _walk(torch, output):
        found.setdefault(id(tensor), tensor)
    if not found:
        raise ModelError(
            f"the module returns no tensor but {type(output).__name__}; expected tensors, or lists, dicts or "
            "dataclasses of them"
        )
    return tuple(found.values())


def _walk(torch: Any, output: Any) -> Iterator[Any]:
    if isinstance(output, torch.Tensor):
        yield output
    elif isinstance(output, Mapping):
        for value in output.values():
            yield from _walk(torch, value)
    elif isinstance(output, list | tuple | set):
        yield from _each(torch, output)
    elif is_dataclass(output) and not isinstance(output, type):
        yield from _each(torch, (getattr(output, field.name) for field in fields(output)))


def _each(torch: Any, outputs: Iterable[Any]) -> Iterator[Any]:
    for value in outputs:
        yield from _walk(torch, value)
