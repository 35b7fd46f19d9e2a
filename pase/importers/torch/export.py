"""PyTorch modules with example inputs, traced by `torch.export` on tensors without values."""

import inspect
import io
import json
import linecache
import logging
import sys
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, redirect_stderr, redirect_stdout
from dataclasses import fields, is_dataclass, replace
from pathlib import PurePath
from typing import Any

from pase.errors import ModelError
from pase.graph import Scalar
from pase.importers.front_end import first_line, framework
from pase.importers.ir.trace import Trace, check_trace
from pase.importers.torch.inner_gradients import with_inner_gradients
from pase.importers.torch.operators import TRANSLATIONS
from pase.importers.torch.program import (
    constant_values,
    is_framework,
    is_transform,
    mark_origins,
    read_program,
    without_known_masks,
)
from pase.importers.torch.tensors import (
    check_tensors,
    ctc_operator,
    known_values,
    mapped,
    on_one_device,
    with_batch,
    without_values,
)
from pase.importers.torch.training import differences_in_training

_LOGGERS = ("torch.fx.experimental.symbolic_shapes", "torch._export", "torch.export", "torch._subclasses")
"""Loggers that explain failures at length; errors here have one line."""


class TorchFrontEnd:
    """Accepts (module, example inputs), optionally with keyword inputs or a loss: the arguments of a module call."""

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
        module, positional, keywords, loss = call_of(torch, source, batch)
        if arguments:
            raise ModelError(
                f"a torch module takes no argument {next(iter(arguments))!r} here; arguments are those of a factory"
            )
        trace = trace_module(module, positional, keywords, loss=loss)
        return replace(trace, call=recorded_call(torch, positional, keywords, has_loss=loss is not None))

    def without_weights(self) -> AbstractContextManager[object]:
        """Return a context in which tensors have only shapes."""
        context: AbstractContextManager[object] = without_values(framework("torch", "torch"))
        return context


Loss = Callable[[Any, Any], Any]
"""A loss of a module's result and targets, such as `torch.nn.CrossEntropyLoss()`."""


def trace_module(
    module: Any,
    arguments: tuple[Any, ...],
    keywords: Mapping[str, Any],
    *,
    name: str = "",
    loss: Loss | None = None,
) -> Trace:
    """Return the trace of a torch module called with example inputs; no weight's value is read.

    The module is traced in evaluation mode (dropout does nothing), and restored afterwards.

    Args:
        module: The module.
        arguments, keywords: Its example inputs.
        name: Name of the trace.
        loss: Function of the module's result and of targets, which are then the last of the inputs.

    Raises:
        ModelError: It cannot be traced: control flow or sizes depend on values, a GPU is missing, or a call fails.
    """
    torch = framework("torch", "torch")
    module = unwrapped(torch, module)
    program, notes = exported(torch, module, tuple(arguments), dict(keywords), loss)
    trace = check_trace(read_program(torch, module, program, name or type(module).__name__, notes))
    return as_trained(torch, trace, module, tuple(arguments), keywords, loss)


def as_trained(
    torch: Any,
    trace: Trace,
    module: Any,
    arguments: tuple[Any, ...],
    keywords: Mapping[str, Any],
    loss: Loss | None,
    unknown: str = "",
) -> Trace:
    """Return a module's trace with the reason why programs would not train it as it trains itself, as far as known.

    unknown: reason to give if its training cannot be recorded; default: the error of the recording.
    """
    try:
        with _as_called(torch, module, arguments, dict(keywords), loss, []):
            untrained = differences_in_training(torch, module, arguments, keywords)
    except Exception as error:  # noqa: BLE001 - the user's code may raise anything
        untrained = unknown or f"what it does in training alone is not known: {first_line(error)}"
    notes = [f"programs would not train it as it trains itself: {untrained}"] if untrained else []
    return replace(trace, untrained=untrained, notes=(*trace.notes, *notes))


def values_of(source: Any, names: Iterable[str], *, batch: int | None = None) -> dict[str, Any]:
    """Return weights, buffers and values computed only from these as tensors, by their names in the module's trace.

    source, batch: those of the trace. Values that the module does not have, or computes from its inputs, are omitted;
    ModelError for a weight without values.
    """
    torch = framework("torch", "torch")
    module = unwrapped(torch, source[0] if isinstance(source, list | tuple) else source)
    held = {**dict(module.named_buffers()), **module.state_dict()}
    found = {name: held[name].detach().cpu() for name in names if name in held}
    for name, tensor in found.items():
        if tensor.is_meta:
            raise ModelError(f"weight {name!r} was made without values (on the device 'meta')")
    rest = [name for name in names if name not in held]
    if rest:
        _, positional, keywords, loss = call_of(torch, source, batch)
        program, _ = exported(torch, module, positional, keywords, loss)
        found |= constant_values(torch, module, program, rest)
    return found


def unwrapped(torch: Any, module: Any) -> Any:
    """Return the module within one that is compiled or copied to several devices; ModelError for TorchScript."""
    if isinstance(module, torch.jit.ScriptModule):
        raise ModelError(
            "a TorchScript module has no Python source that could be traced; give the module that it was made of, or "
            "export it to ONNX"
        )
    if isinstance(module, torch.nn.DataParallel | torch.nn.parallel.DistributedDataParallel):
        return module.module
    return getattr(module, "_orig_mod", module)


def call_of(torch: Any, source: object, batch: int | None) -> tuple[Any, tuple[Any, ...], dict[str, Any], Loss | None]:
    """Return the module, its positional and its keyword inputs, with another batch where one is given, and its loss."""
    if not isinstance(source, list | tuple) or not 2 <= len(source) <= 4:
        raise ModelError(
            "a torch module needs example inputs: give (module, inputs), inputs being a tensor, a tuple of tensors "
            "or a dict of them by name, or (module, inputs, dict of more), or (module, inputs and targets, loss); "
            "tensors on the device 'meta' will do"
        )
    module, given, *more = source
    # Some libraries' dicts of inputs (such as tokens) are mappings, but not dicts.
    keywords: dict[str, Any] = dict(given) if isinstance(given, Mapping) else {}
    positional = () if isinstance(given, Mapping) else tuple(given) if isinstance(given, list | tuple) else (given,)
    loss: Loss | None = None
    for extra in more:
        if isinstance(extra, Mapping):
            keywords |= dict(extra)
        elif callable(extra):
            loss = extra
        else:
            raise ModelError(
                f"a torch module's third item is a dict of inputs by name, or a loss; found a {type(extra).__name__}; "
                "give all positional inputs as one tuple: (module, (x, y))"
            )
    if loss is not None and len(positional) + len(keywords) < 2:
        raise ModelError(
            "a loss needs targets: give them as the last of the inputs, (module, (x, targets), loss), or by the name "
            "'targets', (module, {'x': x, 'targets': targets}, loss)"
        )
    if batch is not None:
        positional, keywords = with_batch(torch, positional, keywords, batch)
    return module, positional, keywords, loss


# -- recording a call


def recorded_call(torch: Any, positional: tuple[Any, ...], keywords: Mapping[str, Any], *, has_loss: bool) -> str:
    """Return a module's call arguments as JSON, tensors by their shapes and types; "" where that is impossible."""

    def told(item: Any) -> Any:
        if isinstance(item, torch.Tensor):
            return {"shape": list(item.shape), "dtype": str(item.dtype).removeprefix("torch.")}
        if item is None or isinstance(item, bool | int | float | str):
            return item
        if type(item) in (list, tuple):
            return {type(item).__name__: [told(one) for one in item]}
        if isinstance(item, Mapping) and all(isinstance(key, str) for key in item):
            return {"dict": {key: told(value) for key, value in item.items()}}
        raise TypeError(type(item).__name__)

    try:
        call = {
            "positional": [told(item) for item in positional],
            "keywords": {key: told(item) for key, item in keywords.items()},
            "has_loss": has_loss,
        }
    except TypeError:
        return ""
    return json.dumps(call, separators=(",", ":"))


def call_inputs(call: str) -> tuple[tuple[Any, ...], dict[str, Any], bool]:
    """Return the inputs of a recorded call, tensors without values, and whether its last one is a loss's targets.

    Raises ModelError for text that is not a recorded call.
    """
    torch = framework("torch", "torch")

    def made(item: Any) -> Any:
        match item:
            case {"shape": [*extents], "dtype": str(dtype)} if all(type(n) is int and n >= 0 for n in extents):
                found = getattr(torch, dtype, None)
                if isinstance(found, torch.dtype):
                    return torch.empty(extents, dtype=found, device="meta")
            case {"list": [*items]}:
                return [made(one) for one in items]
            case {"tuple": [*items]}:
                return tuple(made(one) for one in items)
            case {"dict": dict(items)}:
                return {key: made(value) for key, value in items.items()}
            case None | bool() | int() | float() | str():
                return item
        raise ValueError

    try:
        read = json.loads(call)
        return (
            tuple(made(item) for item in read["positional"]),
            {key: made(item) for key, item in read["keywords"].items()},
            read["has_loss"] is True,
        )
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, RuntimeError):
        raise ModelError(
            "the plan does not tell what its module is called with; give example inputs, as the search was given them: "
            "(module, inputs)"
        ) from None


# -- the exported program


def exported(
    torch: Any,
    module: Any,
    arguments: tuple[Any, ...],
    keywords: Mapping[str, Any],
    loss: Loss | None = None,
    on_output: Callable[[Any], object] = lambda _: None,
) -> tuple[Any, tuple[str, ...]]:
    """Return the exported program of a module, and assumptions; ModelError where it cannot be traced.

    on_output: called with the module's result, with tensors without values, whenever it is called.
    """
    notes: list[str] = []

    def trace(computes_gradients: bool) -> Any:
        with (
            ready_to_trace(torch, module, arguments, keywords, loss, notes, on_output) as (positional, named),
            _outside_training(module),
            torch.set_grad_enabled(computes_gradients),
        ):
            program = traced(torch, module, positional, named)
            mark_origins(program)
            plain = _plain(torch, program)
            return without_known_masks(torch, _of_shapes(torch, plain))

    return with_inner_gradients(torch, trace), tuple(dict.fromkeys(notes))


@contextmanager
def ready_to_trace(
    torch: Any,
    module: Any,
    arguments: tuple[Any, ...],
    keywords: Mapping[str, Any],
    loss: Loss | None,
    notes: list[str],
    on_output: Callable[[Any], object] = lambda _: None,
) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Make a module return only tensors, or its loss where one is given; yield the inputs to trace it with.

    Args:
        torch: PyTorch.
        module: The module; it is restored afterwards.
        arguments, keywords: Its example inputs.
        loss: Function of its result and of targets, or None.
        notes: Receives assumptions.
        on_output: Called with the module's result, whenever it is called.

    Raises:
        ModelError: The module cannot be traced; any error of the body is converted, with the user's line.
    """
    check_tensors(torch, module)
    arguments, keywords = _apart(torch, (arguments, dict(keywords)))
    with ExitStack() as stack:
        stack.enter_context(_as_called(torch, module, arguments, keywords, loss, notes))

        def hooked(_module: Any, _inputs: Any, output: Any) -> Any:
            on_output(output)
            return _returned(torch, output)

        hook = module.register_forward_hook(hooked)
        stack.callback(hook.remove)
        given = stack.enter_context(on_one_device(torch, module, (arguments, keywords)))
        # Distributions would otherwise read the values of their parameters.
        distribution = torch.distributions.Distribution
        stack.callback(distribution.set_default_validate_args, distribution._validate_args)
        distribution.set_default_validate_args(False)
        # Output of the module is discarded, and torch's explanations of failures are reduced to one line here.
        stack.enter_context(redirect_stdout(sys.stderr))
        stack.enter_context(redirect_stderr(io.StringIO()))
        try:
            yield given
        except ModelError:
            raise
        except Exception as error:
            raise ModelError(failure(error)) from error


@contextmanager
def _as_called(
    torch: Any,
    module: Any,
    arguments: tuple[Any, ...],
    keywords: Mapping[str, Any],
    loss: Loss | None,
    notes: list[str],
) -> Iterator[None]:
    """Have a module that is called on tensors without values return its loss, by operators that are known."""
    with ExitStack() as stack:
        stack.enter_context(_quiet())
        if loss is not None:
            stack.enter_context(_returning(loss, module, arguments, keywords))
        stack.enter_context(_exportable_experts(module, notes))
        ctc_operator(torch)
        stack.callback(torch.backends.mha.set_fastpath_enabled, torch.backends.mha.get_fastpath_enabled())
        # The fast path computes a whole encoder layer in one opaque operator.
        torch.backends.mha.set_fastpath_enabled(False)
        yield


@contextmanager
def _returning(loss: Loss, module: Any, arguments: tuple[Any, ...], keywords: Mapping[str, Any]) -> Iterator[None]:
    """Make a module return the loss of its result; it takes the targets as the last of its inputs."""
    original = module.forward
    is_named = bool(keywords)
    last = "targets" if "targets" in keywords or not is_named else list(keywords)[-1]
    rest = {name: value for name, value in keywords.items() if name != last}
    try:
        own = inspect.signature(original).bind(*(arguments if is_named else arguments[:-1]), **rest)
    except TypeError as error:
        raise ModelError(
            f"the inputs of the module but the last, which is the loss's, do not fit its forward pass: {error}"
        ) from None

    def forward(*given: Any, **named: Any) -> Any:
        if is_named:
            targets = named.pop(last)
            return loss(original(*given, **named), targets)
        return loss(original(*given[:-1]), given[-1])

    kinds = {parameter.kind for parameter in own.signature.parameters.values()}
    if kinds.isdisjoint((inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)):
        # The program's inputs have the names of the module's, and of the targets.
        plain = inspect.Parameter.POSITIONAL_OR_KEYWORD
        names = [inspect.Parameter(name, plain) for name in (*own.arguments, last)]
        forward.__signature__ = inspect.Signature(names)  # type: ignore[attr-defined]
    module.forward = forward
    try:
        yield
    finally:
        del module.forward


def _apart(torch: Any, given: Any) -> Any:
    """Return example inputs as distinct tensors: `torch.export` treats a repeated tensor as one input."""
    seen: set[int] = set()

    def own(tensor: Any) -> Any:
        is_first = id(tensor) not in seen
        seen.add(id(tensor))
        return tensor if is_first else tensor.clone()

    return mapped(own, torch, given)


def traced(torch: Any, module: Any, positional: tuple[Any, ...], named: dict[str, Any]) -> Any:
    """Return the program; control flow and sizes that depend on tensors made by the module itself are known."""
    try:
        program = torch.export.export(module, positional, named, strict=False)
        examples = (node.meta.get("val") for node in program.graph.nodes)
        if all(isinstance(extent, int) for example in examples for extent in getattr(example, "shape", ())):
            return program
    except Exception as error:
        if _explanation(error) is not _CONTROL_FLOW and "_ctc_loss" not in str(error):
            raise
    with known_values(torch, keeps_gradients=torch.is_grad_enabled()):
        return torch.export.export(module, positional, named, strict=False)


def _plain(torch: Any, program: Any) -> Any:
    """Return the program with its regions inlined, in functional form, and unknown operators decomposed by torch."""
    # Assertions have no results, and tracing a program again takes as long as the first time.
    nodes = [node for node in program.graph.nodes if node.op == "call_function"]
    calls = [node.target for node in nodes if node.users or _is_mutable(torch, node.target)]
    operators = {target for target in calls if isinstance(target, torch._ops.OpOverload)}
    unknown = {t for t in operators if t._schema.name.rpartition("::")[2].rstrip("_") not in TRANSLATIONS}
    for node in nodes:
        if str(getattr(node.target, "__name__", "")).partition(".")[0] == "dropout" and len(node.args) > 1:
            # Outside training it is a copy, which decomposition preserves with its annotations.
            node.meta["custom"] = {**node.meta.get("custom", {}), "rate": float(node.args[1])}
            node.target, node.args, node.kwargs = torch.ops.aten.clone.default, node.args[:1], {}
    writes = any(_is_mutable(torch, target) for target in operators)
    regions = any(is_transform(t) or str(getattr(t, "__name__", "")).startswith("wrap_with") for t in calls)
    decompositions = torch.export.default_decompositions() if unknown else {}
    chosen = {target: decompositions[target] for target in unknown if target in decompositions}
    return program.run_decompositions(chosen) if chosen or writes or regions else program


def _of_shapes(torch: Any, program: Any) -> Any:
    """Return the program with operators that only use a tensor's shape and type replaced by factories.

    Otherwise their results would seem to depend on everything that the tensor was computed from.
    """
    aten = torch.ops.aten
    kinds = {"empty": aten.empty.memory_format, "zeros": aten.zeros.default, "ones": aten.ones.default}
    kinds["full"] = aten.full.default
    # The fill value follows the tensor, and the shape, if given.
    likes = {getattr(aten, f"{kind}_like").default: (made_by, 1) for kind, made_by in kinds.items()}
    likes |= {getattr(aten, f"new_{kind}").default: (made_by, 2) for kind, made_by in kinds.items()}
    for node in program.graph.nodes:
        if node.target not in likes:
            continue
        made, (made_by, behind) = node.meta["val"], likes[node.target]
        if made.is_contiguous() and all(type(extent) is int for extent in made.shape):
            fill = [*node.args[behind:], *([node.kwargs["fill_value"]] if "fill_value" in node.kwargs else [])]
            node.target, node.args = made_by, (list(made.shape), *fill)
            node.kwargs = {"dtype": made.dtype, "device": made.device}
    program.graph.eliminate_dead_code()
    program.graph_module.recompile()
    return program


def _is_mutable(torch: Any, target: Any) -> bool:
    """Return whether an operator writes into its operands."""
    return isinstance(target, torch._ops.OpOverload) and bool(target._schema.is_mutable)


# -- the state of a module while it is traced


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
    """Switch a module to evaluation, and restore the mode of each part of it."""
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
                # It has no experts, or only one implementation of them.
                continue
            stack.callback(put, found)
            if not notes:
                notes.append("experts are traced as a grouped product, not one after the other")
        yield


def _returned(torch: Any, output: Any) -> Any:
    """Return the tensors that a module returns: those in lists, dicts and dataclasses; caches and the like are not."""
    found = {id(tensor): tensor for tensor in tensors_of(torch, output)}
    if not found:
        raise ModelError(
            f"the module returns no tensor but {type(output).__name__}; expected tensors, or lists, dicts or "
            "dataclasses of them"
        )
    return tuple(found.values())


def tensors_of(torch: Any, output: Any) -> Iterator[Any]:
    """Yield the tensors in a module's result, in order."""
    if isinstance(output, torch.Tensor):
        yield output
        return
    inside: Iterable[Any] = ()
    if isinstance(output, Mapping):
        inside = output.values()
    elif isinstance(output, list | tuple | set):
        inside = output
    elif is_dataclass(output) and not isinstance(output, type):
        inside = (getattr(output, field.name) for field in fields(output))
    for value in inside:
        yield from tensors_of(torch, value)


# -- why a module cannot be traced


def failure(error: BaseException) -> str:
    """Describe an error of `torch.export`: what was found, in which operator, on which line."""
    place, text = _place(error), _explanation(error)
    if text:
        return text.format(place=place, operator=_operator(error) or "a branch or loop on a tensor's values")
    return f"the module cannot be traced{place}: {first_line(error)}"


def _explanation(error: BaseException) -> str:
    return next((text for applies, text in _EXPLANATIONS if applies(error)), "")


def _place(error: BaseException) -> str:
    """Return " at file:line (source)" of the innermost user frame in a traceback, "" where there is none."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not is_framework(frame.filename):
            source = (frame.line or linecache.getline(frame.filename, frame.lineno or 0)).strip()
            return f" at {PurePath(frame.filename).name}:{frame.lineno}" + (f" ({source})" if source else "")
    return ""


def _operator(error: BaseException) -> str:
    """Return the operator that was being traced."""
    named = getattr(error, "func", None)
    if named is not None:
        return f"operator {named}"
    frames = error.__traceback__
    found = ""
    while frames is not None:
        candidate: Any = frames.tb_frame.f_locals.get("func")
        if hasattr(candidate, "_schema"):
            found = f"operator {candidate}"
        frames = frames.tb_next
    return found


def _named(*names: str) -> Callable[[BaseException], bool]:
    return lambda error: any(kind.__name__ in names for kind in type(error).__mro__)


def _says(*texts: str) -> Callable[[BaseException], bool]:
    return lambda error: any(text in str(error).lower() for text in texts)


_GPU = (
    "the module needs a GPU{place}: it moves tensors to a device that is not here; leave out .cuda() and "
    "device='cuda', or take the device of an input, as in torch.zeros(n, device=x.device)"
)
_CONTROL_FLOW = (
    "the module's control flow depends on values{place}: {operator}; tracing has no values: use torch.where, or an "
    "argument of the factory, instead"
)
_SIZES = (
    "a tensor's size depends on values{place}: {operator}; sizes have to be fixed: use a mask, or torch.where, instead"
)
_UNTRACED = (
    "the module cannot be traced{place}: it computes with a tensor that no traced call gives: leave out what stores "
    "tensors outside the module; move dims behind torch.func.vmap, not by its out_dims"
)
_NO_GPU = ("not linked with support for", "not compiled with cuda", "no nvidia driver", "no cuda gpus", "cuda error")

_EXPLANATIONS: tuple[tuple[Callable[[BaseException], bool], str], ...] = (
    (_says(*_NO_GPU), _GPU),
    (lambda error: _says("same device")(error) and _says("cuda")(error), _GPU),
    (_named("DynamicOutputShapeException"), _SIZES),
    (_says("fake tensor in the exported program constant"), _UNTRACED),
    (_named("GuardOnDataDependentSymNode", "DataDependentOutputException"), _CONTROL_FLOW),
    (_says("data-dependent", "dynamic control flow", "cannot be called on meta tensors"), _CONTROL_FLOW),
)
"""Messages by the errors they apply to; the first match is used."""
