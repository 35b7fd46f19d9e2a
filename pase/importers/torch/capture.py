"""`captured`: a module's own graph of ATen calls, as the module computes in training or in evaluation.

`torch.export` traces the module with gradients, and `run_decompositions` makes the result functional. Properties that
this would lose are first made explicit in the graph: regions under `torch.no_grad()` read detached values, and the
backward pass of a `torch.autograd.Function` is preserved.
"""

import inspect
import random
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from functools import partial, wraps
from operator import getitem
from pathlib import PurePath
from typing import Any

from pase.errors import ModelError
from pase.importers.front_end import first_line
from pase.importers.torch.export import Loss, ready_to_trace, traced, unwrapped
from pase.importers.torch.following import Checkpoints, followed
from pase.importers.torch.inner_gradients import with_inner_gradients
from pase.importers.torch.program import (
    Traced,
    flat_items,
    function_of,
    here,
    is_transform,
    mark_origins,
    origin_of,
    shapes_of,
    sized,
    user_line,
    where,
)
from pase.importers.torch.training import computed_with_earlier, restored


@dataclass(frozen=True, kw_only=True)
class Captured:
    """A module's own graph: ATen calls without side effects, which autograd differentiates as it does the module.

    Attributes:
        graph: A `torch.fx.GraphModule`. It takes parameters, buffers, constants and inputs by position, in the order
            of its placeholders, and returns the module's tensors, then the values in `written`.
        inputs: Names of the module's inputs, by placeholder.
        parameters: Names of the parameters, by placeholder; a tied weight has the first of its names.
        buffers: Names of the buffers, by placeholder.
        constants: Tensor literals in the source, and tensor attributes that are not buffers, by placeholder.
        outputs: Nodes of the tensors that the module returns, in order.
        written: Nodes with the new values of buffers (and of parameters that the module itself changes) after a call,
            by name. They may carry gradients, which stop there.
        trains: Whether it is the graph of training.
        computes_gradients: Whether the forward pass computes gradients.
        notes: Assumptions, in words.
    """

    graph: Any
    inputs: Mapping[str, str]
    parameters: Mapping[str, str]
    buffers: Mapping[str, str]
    constants: Mapping[str, Any]
    outputs: tuple[str, ...]
    written: Mapping[str, str]
    trains: bool
    computes_gradients: bool
    notes: tuple[str, ...]


def captured(
    torch: Any,
    module: Any,
    positional: tuple[Any, ...],
    keywords: Mapping[str, Any],
    loss: Loss | None = None,
    *,
    trains: bool,
    on_output: Callable[[Any], object] = lambda _: None,
) -> Captured:
    """Return the graph of a module.

    Args:
        torch: PyTorch.
        module: The module; it is restored afterwards. No value of a parameter is read.
        positional, keywords: Its example inputs, whose values are ignored.
        loss: Function of its result and of targets, which are then the last of the inputs.
        trains: Whether to trace it as it is set (after `train()` if it is in evaluation as a whole), or in evaluation.
        on_output: Called with the module's result, with tensors without values, whenever it is called.

    Raises:
        ModelError: The module cannot be traced: control flow or sizes depend on values, or a step cannot be part of a
            graph.
    """
    module = unwrapped(torch, module)

    def trace(computes_gradients: bool) -> Captured:
        notes: list[str] = []
        with ExitStack() as stack:
            stack.enter_context(restored(torch, module))
            given = stack.enter_context(ready_to_trace(torch, module, positional, keywords, loss, notes, on_output))
            if not trains:
                module.eval()
            elif not module.training:
                module.train()
            _average_cumulatively(torch, module)
            stack.enter_context(torch.enable_grad())
            with _PythonState(torch, module, given, notes):
                checkpoints = stack.enter_context(followed(torch, module))
                functions = _Functions(torch, checkpoints, computes_gradients=computes_gradients)
                stack.enter_context(_without_regions())
                stack.enter_context(functions.as_operators())
                program = traced(torch, module, *given)
            mark_origins(program)
            _Cuts(torch, program.graph_module).write()
            program = _functional(torch, program)
            capture = _finished(torch, module, program, functions, trains=trains, notes=notes)
            return replace(capture, computes_gradients=computes_gradients)

    return with_inner_gradients(torch, trace)


def corresponding(program: Any, capture: Captured) -> dict[str, str]:
    """Return the nodes of a captured graph by those of an exported program of the same module, both by name.

    Nodes correspond if the module calls the same operator, on the same line and with tensors of the same shape, in both
    traces. Nodes of only one trace are omitted, as are steps within a decomposed operator.
    """
    read, own = _by_origin(program.graph), _by_origin(capture.graph.graph)
    found: dict[Any, Any] = {}
    for origin, other in _aligned(list(read), list(own)):
        pair = _last_of_shape(read[origin], origin), _last_of_shape(own[other], other)
        if None not in pair:
            found[pair[0]] = pair[1]
    items = {(node.args[0], node.args[1]): node for node in capture.graph.graph.nodes if node.target is getitem}
    for node in program.graph.nodes:
        if node.target is getitem:
            item = items.get((found.get(node.args[0]), node.args[1]))
            if item is not None:
                found[node] = item
    names = {node.name: other.name for node, other in found.items()}
    held = {name: node for node, name in (*capture.parameters.items(), *capture.buffers.items())}
    signature = program.graph_signature
    for name, held_name in {**signature.inputs_to_parameters, **signature.inputs_to_buffers}.items():
        if held_name in held:
            names[name] = held[held_name]
    given = {name: node for node, name in capture.inputs.items()}
    return names | {name: given[name] for name in signature.user_inputs if name in given}


def in_both(one: Captured, other: Captured) -> frozenset[str]:
    """Return the nodes of one graph of a module, by name, that come from calls which the other one has, too."""
    ours, theirs = _by_origin(one.graph.graph), _by_origin(other.graph.graph)
    return frozenset(node.name for origin, _ in _aligned(list(ours), list(theirs)) for node in ours[origin])


def _by_origin(graph: Any) -> dict[Traced, list[Any]]:
    """Return the nodes of a graph by the traced ones that they come from."""
    found: dict[Traced, list[Any]] = {}
    for node in graph.nodes:
        origin = origin_of(node)
        if origin is not None:
            found.setdefault(origin, []).append(node)
    return found


def _aligned(origins: Sequence[Traced], others: Sequence[Traced]) -> Iterator[tuple[Traced, Traced]]:
    """Yield pairs of traced nodes of two traces, in the order of both within each module."""
    by_scope: dict[str, tuple[list[Traced], list[Traced]]] = {}
    for i, traced_nodes in enumerate((origins, others)):
        for origin in traced_nodes:
            by_scope.setdefault(origin.scope, ([], []))[i].append(origin)
    for ones, twos in by_scope.values():
        keys = [[(item.operator, item.line, item.shapes) for item in items] for items in (ones, twos)]
        matcher = SequenceMatcher(None, keys[0], keys[1], autojunk=False)
        for start, other_start, count in matcher.get_matching_blocks():
            yield from zip(ones[start : start + count], twos[other_start : other_start + count], strict=True)


def _last_of_shape(nodes: Sequence[Any], origin: Traced) -> Any:
    """Return the last node with the result shape of a traced node; None where there is none."""
    results = [node for node in nodes if shapes_of(node) == origin.shapes]
    return results[-1] if results else None


# -- while the module is traced


@contextmanager
def _without_regions() -> Iterator[None]:
    """Keep calls that switch gradients and autocast inline: `torch.export` loses some of them as separate regions."""
    from torch._export.passes import replace_autocast_with_hop_pass as of_casts
    from torch._export.passes import replace_set_grad_with_hop_pass as of_gradients

    with ExitStack() as stack:
        for passes, name in (
            (of_casts, "replace_autocast_with_hop_pass"),
            (of_gradients, "replace_set_grad_with_hop_pass"),
        ):
            stack.callback(setattr, passes, name, getattr(passes, name))
            setattr(passes, name, lambda module, signature: (module, signature))
        yield


class _Functions:
    """The calls of `torch.autograd.Function`s in a module, each traced as one operator.

    Attributes:
        calls: By number: the class, its arguments with tensors replaced by places, and its result, likewise.
    """

    def __init__(self, torch: Any, checkpoints: Checkpoints, *, computes_gradients: bool) -> None:
        self._torch, self._checkpoints = torch, checkpoints
        self._computes_gradients = computes_gradients
        self.calls: list[tuple[Any, Any, Any]] = []
        self._is_computed = False

    @contextmanager
    def as_operators(self) -> Iterator[None]:
        """Trace each call of a function as a call of `pase::function`, with its tensors as operands.

        The replacement is in the class's `forward`, since users may have bound `apply` to names of their own.
        """
        torch = self._torch
        library = torch.library.Library("pase", "FRAGMENT")
        library.define("function(Tensor[] tensors, int number) -> Tensor[]")
        torch.library.register_fake("pase::function", self._without_values, lib=library)
        with ExitStack() as stack:
            stack.callback(library._destroy)
            for cls in _subclasses(torch.autograd.Function):
                if (cls.__module__, cls.__name__) == ("torch.utils.checkpoint", "CheckpointFunction"):
                    _replace(stack, cls, "apply", staticmethod(lambda of, _, *args: self._checkpoints.run(of, args)))
                elif not cls.__module__.startswith("torch.") or cls.__module__.startswith("torch.nn."):
                    _replace(stack, cls, "forward", staticmethod(self._forward(cls)))
            yield

    def target(self, number: int) -> Callable[..., Any]:
        """Return a call as a function of a list of its tensors: the class's own `apply`."""
        torch, (cls, arguments, _) = self._torch, self.calls[number]

        def run(tensors: Sequence[Any]) -> list[Any]:
            args, kwargs = _with_tensors(torch, arguments, tensors)
            return _tensors(torch, cls.apply(*args, **kwargs))

        run.__name__ = run.__qualname__ = cls.__name__
        return run

    def _forward(self, cls: Any) -> Callable[..., Any]:
        """Return the replacement of a class's `forward`, which takes a context unless there is a `setup_context`."""
        forward = cls.forward
        has_context = cls.setup_context is self._torch.autograd.Function.setup_context

        @wraps(forward)
        def called(*args: Any, **kwargs: Any) -> Any:
            if self._is_computed:
                return forward(*args, **kwargs)
            return self._called(cls, args[1:] if has_context else args, kwargs)

        return called

    def _called(self, cls: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        torch = self._torch
        if self._computes_gradients:
            raise ModelError(
                f"the forward pass computes gradients, and calls torch.autograd.Function {cls.__name__!r}{here()}, "
                "whose backward pass is not traced: write it with PyTorch's own functions"
            )
        arguments, tensors = _with_places(torch, (args, dict(kwargs)))
        for item in torch.utils._pytree.tree_leaves(arguments):
            if isinstance(item, torch.nn.Module):
                raise ModelError(
                    f"torch.autograd.Function {cls.__name__!r} is given a module: gradients of its weights cannot be "
                    "followed; give it the weights as arguments"
                )
        number = len(self.calls)
        self.calls.append((cls, arguments, None))
        outputs = torch.ops.pase.function(tensors, number)
        return _with_tensors(torch, self.calls[number][2], outputs)

    def _applied(self, cls: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        self._is_computed = True
        try:
            return cls.apply(*args, **kwargs)
        finally:
            self._is_computed = False

    def _without_values(self, tensors: Sequence[Any], number: int) -> list[Any]:
        """Return tensors without values, with the shapes of a call's results."""
        torch, (cls, arguments, _) = self._torch, self.calls[number]
        versions = [tensor._version for tensor in tensors]
        args, kwargs = _with_tensors(torch, arguments, tensors)
        returned = self._applied(cls, args, kwargs)
        if versions != [tensor._version for tensor in tensors]:
            raise ModelError(f"torch.autograd.Function {cls.__name__!r} writes into its inputs: return new tensors")
        returned, outputs = _with_places(torch, returned)
        self.calls[number] = cls, arguments, returned
        return [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device) for x in outputs]


def _subclasses(cls: Any) -> Iterator[Any]:
    for own in cls.__subclasses__():
        yield own
        yield from _subclasses(own)


def _replace(stack: ExitStack, cls: Any, name: str, value: Any) -> None:
    """Give a class an attribute until a stack is left."""
    if name in vars(cls):
        stack.callback(setattr, cls, name, vars(cls)[name])
    else:
        stack.callback(delattr, cls, name)
    setattr(cls, name, value)


@dataclass(frozen=True)
class _Place:
    """The place of a tensor among arguments or results: its number."""

    number: int


def _with_places(torch: Any, items: Any) -> tuple[Any, list[Any]]:
    """Return nested items with places for tensors, and the tensors."""
    tensors: list[Any] = []

    def place(tensor: Any) -> _Place:
        tensors.append(tensor)
        return _Place(len(tensors) - 1)

    return torch.utils._pytree.tree_map_only(torch.Tensor, place, items), tensors


def _with_tensors(torch: Any, items: Any, tensors: Sequence[Any]) -> Any:
    """Return nested items with tensors in their places."""
    return torch.utils._pytree.tree_map_only(_Place, lambda place: tensors[place.number], items)


def _tensors(torch: Any, items: Any) -> list[Any]:
    return [item for item in torch.utils._pytree.tree_leaves(items) if isinstance(item, torch.Tensor)]


def _average_cumulatively(torch: Any, module: Any) -> None:
    """Prevent normalisation with cumulative averages (`momentum=None`) from reading the number of batches.

    Its forward pass then reads another attribute of the module.
    """
    batch_norm = torch.nn.modules.batchnorm._BatchNorm
    for part in module.modules():
        is_plain = isinstance(part, batch_norm) and type(part).forward is batch_norm.forward
        if is_plain and part.momentum is None and part.track_running_stats and part.training:
            part.forward = partial(_with_cumulative_average, torch, part)


def _with_cumulative_average(torch: Any, part: Any, x: Any) -> Any:
    part._check_input_dim(x)
    part.num_batches_tracked.add_(1)
    of_batch = torch.zeros_like(part.running_mean), torch.zeros_like(part.running_var)
    y = torch.nn.functional.batch_norm(x, *of_batch, part.weight, part.bias, training=True, momentum=1.0, eps=part.eps)
    share = part.num_batches_tracked.to(torch.float64).reciprocal()
    for held, new in zip((part.running_mean, part.running_var), of_batch, strict=True):
        held.copy_(held * (1 - share) + new * share)
    return y


# -- what a graph cannot contain: Python state


class _PythonState:
    """A context that verifies that a traced module changes its own Python state in the same way in every call.

    Args:
        torch: PyTorch.
        module: The module.
        given: Positional and keyword inputs of the trace.
        notes: Receives the state that changes without being read.

    Raises:
        ModelError: It counts, alternates, reads tensors of an earlier call, or draws Python's random numbers.
    """

    def __init__(self, torch: Any, module: Any, given: tuple[Any, Any], notes: list[str]) -> None:
        self._torch, self._module, self._given, self._notes = torch, module, given, notes
        self._lines: dict[tuple[int, str], str] = {}
        self._after: dict[tuple[int, str], Any] = {}

    def __enter__(self) -> None:
        self._drawn = _random_states()
        self._before = self._values()
        self._setattr = self._torch.nn.Module.__setattr__
        original, lines = self._setattr, self._lines

        def assign(part: Any, name: str, value: Any) -> None:
            lines.setdefault((id(part), name), here())
            original(part, name, value)

        self._torch.nn.Module.__setattr__ = assign
        # Tracing puts back what was assigned.
        self._hook = self._module.register_forward_hook(lambda *_: self._after.update(self._values()))

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        self._torch.nn.Module.__setattr__ = self._setattr
        self._hook.remove()
        drawn = _random_states()
        for restore, state in self._drawn:
            restore(state)
        if error is not None:
            return
        if [state for _, state in drawn] != [state for _, state in self._drawn]:
            raise ModelError(
                f"the module draws random numbers of Python's or NumPy's own{self._line_of_draw()}: every step would "
                "compute with those of the trace; draw with torch, and choose with torch.where"
            )
        changed = self._changed(self._before, self._after)
        if changed:
            self._check(changed)

    def _check(self, changed: Sequence[tuple[Any, str]]) -> None:
        torch, module = self._torch, self._module
        after_first: dict[tuple[int, str], Any] = {}
        positional, keywords = self._given
        try:
            problem = computed_with_earlier(
                torch, module, positional, keywords, lambda: after_first.update(self._values())
            )
        # The user's code may raise anything; what was changed is refused then.
        except Exception as error:  # noqa: BLE001
            problem, again = first_line(error), changed
        else:
            again = self._changed(after_first, self._values())
        for part, name in again:
            raise ModelError(
                f"the forward pass changes attribute {self._name(part, name)!r}{self._line(part, name)}: every step "
                "would compute with what it was in the trace; keep it in a buffer, or change it outside the module"
            )
        if problem:
            part, name = changed[0]
            raise ModelError(
                f"{problem}: attribute {self._name(part, name)!r}, which the forward pass changes"
                f"{self._line(part, name)}, has to be a buffer"
            )
        held = [(part, name) for part, name in changed if _has_tensor(self._after.get((id(part), name)))]
        if held:
            names = ", ".join(repr(self._name(part, name)) for part, name in held[:_MAX_SHOWN])
            self._notes.append(f"tensors that the forward pass writes into attributes stay in the trace: {names}")

    def _values(self) -> dict[tuple[int, str], Any]:
        """Return what attributes of modules hold, tensors by shape."""
        return {
            (id(part), name): _structure(self._torch, value, 0)
            for part in self._module.modules()
            for name, value in vars(part).items()
            if name not in _OF_MODULES
        }

    def _changed(
        self, before: Mapping[tuple[int, str], Any], after: Mapping[tuple[int, str], Any]
    ) -> list[tuple[Any, str]]:
        parts = {id(part): part for part in self._module.modules()}
        keys = [key for key in {**before, **after} if before.get(key) != after.get(key)]
        return [(parts[number], name) for number, name in keys if number in parts]

    def _name(self, part: Any, name: str) -> str:
        path = next(path for path, item in self._module.named_modules() if item is part)
        return f"{path}.{name}".removeprefix(".")

    def _line(self, part: Any, name: str) -> str:
        if (id(part), name) in self._lines:
            return self._lines[id(part), name]
        try:
            lines, first = inspect.getsourcelines(type(part).forward)
            file = PurePath(inspect.getsourcefile(type(part)) or "").name
        except (OSError, TypeError):
            return ""
        at = next((i for i, line in enumerate(lines) if f".{name}" in line), 0)
        return f" at {file}:{first + at} ({lines[at].strip()})"

    def _line_of_draw(self) -> str:
        """Return the line where the module draws a number, by calling it again; "" where it is not found."""
        found: list[str] = []

        def called(frame: Any, event: str, function: Any) -> None:
            if event == "c_call" and isinstance(getattr(function, "__self__", None), random.Random) and not found:
                line, source = user_line(frame)
                found.append(f" at {line} ({source})")

        sys.setprofile(called)
        try:
            with suppress(Exception):
                computed_with_earlier(self._torch, self._module, *self._given, lambda: None)
        finally:
            sys.setprofile(None)
            for restore, state in self._drawn:
                restore(state)
        return found[0] if found else ""


_MAX_SHOWN = 3
_MAX_DEPTH = 4
_OF_MODULES = frozenset(
    {"_parameters", "_buffers", "_modules", "_forward_hooks", "_forward_pre_hooks", "training", "forward"}
)
"""Attributes that all modules have, or that tracing sets."""


def _random_states() -> list[tuple[Callable[[Any], object], Any]]:
    """Return the states of the generators that are not PyTorch's, each with what sets it."""
    states: list[tuple[Callable[[Any], object], Any]] = [(random.setstate, random.getstate())]
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        kind, keys, *rest = numpy.random.get_state()
        states.append((numpy.random.set_state, (kind, tuple(keys.tolist()), *rest)))
    return states


class _Shape(tuple[int, ...]):
    """The shape of a tensor that an attribute holds."""


def _structure(torch: Any, value: Any, depth: int) -> Any:
    """Return an attribute's value so that two are equal if the module computes with the same."""
    if value is None or isinstance(value, bool | int | float | str | bytes):
        return value
    if isinstance(value, torch.Tensor):
        return _Shape(value.shape)
    if depth > _MAX_DEPTH or isinstance(value, torch.nn.Module | type) or callable(value):
        return type(value).__name__
    if isinstance(value, Mapping):
        return {str(key): _structure(torch, item, depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset | deque):
        return [_structure(torch, item, depth + 1) for item in value]
    if type(value).__module__.partition(".")[0] != "torch" and hasattr(value, "__dict__"):
        return {name: _structure(torch, item, depth + 1) for name, item in vars(value).items()}
    return type(value).__name__


def _has_tensor(structure: Any) -> bool:
    items = structure.values() if isinstance(structure, dict) else structure if isinstance(structure, list) else ()
    return isinstance(structure, _Shape) or any(map(_has_tensor, items))


# -- what making the graph functional would lose


class _Cuts:
    """Writes into a traced graph where gradients end: operators under `no_grad` read detached tensors.

    Args:
        torch: PyTorch.
        module: Whose graph it is, with its calls of `torch._C._set_grad_enabled`, which are gone then.
    """

    def __init__(self, torch: Any, module: Any) -> None:
        self._torch, self._module, self._graph = torch, module, module.graph
        self._detached: dict[Any, Any] = {}
        self._carrying = {node for node in self._graph.find_nodes(op="placeholder") if _needs_gradient(node)}
        """Nodes that a gradient flows through."""

    def write(self) -> None:
        """Rewrite the graph."""
        is_enabled = True
        for node in list(self._graph.nodes):
            if node.target is self._torch._C._set_grad_enabled:
                is_enabled = bool(node.args[0])
                self._graph.erase_node(node)
            elif node.op == "call_function":
                self._call(node, is_enabled=is_enabled)
        self._graph.lint()
        self._module.recompile()

    def _call(self, node: Any, *, is_enabled: bool) -> None:
        aten = self._torch.ops.aten
        if node.target is aten.detach_.default:
            node.target = aten.detach.default
            node.args[0].replace_all_uses_with(node, lambda user: user is not node and node < user)
        written = _written(self._torch, node)
        reads = [source for source in node.all_input_nodes if source in self._carrying]
        if not is_enabled:
            for source in reads:
                node.replace_input_with(source, self._detach(source))
        # The result is the tensor that is written itself.
        if len(written) == 1:
            node.replace_all_uses_with(written[0])
        for tensor in written:
            base = tensor if tensor in reads and not is_enabled else self._cut_base(tensor)
            if base is not None:
                self._keep_gradient(node, base)
        if reads and is_enabled and node.target is not aten.detach.default and _may_carry(node):
            self._carrying |= {node, *(alias for tensor in written for alias in _aliases(tensor))}

    def _keep_gradient(self, node: Any, base: Any) -> None:
        """Preserve the gradient of a tensor's previous value when it is written without autograd's knowledge."""
        aten = self._torch.ops.aten
        with self._graph.inserting_before(node):
            zero = self._new(aten.sub.Tensor, (base, self._new(aten.detach.default, (base,), base)), base)
        with self._graph.inserting_after(node):
            self._new(aten.add_.Tensor, (base, zero), base)

    def _detach(self, source: Any) -> Any:
        if source not in self._detached:
            last = source if source.op != "placeholder" else self._graph.find_nodes(op="placeholder")[-1]
            with self._graph.inserting_after(last):
                self._detached[source] = self._new(self._torch.ops.aten.detach.default, (source,), source)
        return self._detached[source]

    def _new(self, target: Any, args: tuple[Any, ...], like: Any) -> Any:
        node = self._graph.call_function(target, args)
        node.meta = {key: value for key, value in like.meta.items() if key != "custom"}
        return node

    def _cut_base(self, written: Any) -> Any:
        """Return the tensor with a gradient whose memory a detached one shares; None where there is none."""
        detach = self._torch.ops.aten.detach.default
        bases = [node.args[0] for node in _aliases(written) if node.target is detach]
        return next((base for base in reversed(bases) if base in self._carrying), None)


def _may_carry(node: Any) -> bool:
    """Return whether a gradient may flow through a node's result."""
    examples = [item for item in flat_items([node.meta.get("val")]) if hasattr(item, "is_floating_point")]
    return any(item.is_floating_point() or item.is_complex() for item in examples)


def _needs_gradient(node: Any) -> bool:
    return bool(getattr(node.meta.get("val"), "requires_grad", False))


def _written(torch: Any, node: Any) -> list[Any]:
    """Return the tensors that a call writes into."""
    if not _is_mutable(torch, node.target):
        return []
    names = [argument.name for argument in node.target._schema.arguments]
    given = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    is_written = [a.name for a in node.target._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    return [tensor for name in is_written for tensor in flat_items([given.get(name)]) if tensor is not None]


def _is_mutable(torch: Any, target: Any) -> bool:
    return isinstance(target, torch._ops.OpOverload) and bool(target._schema.is_mutable)


def _aliases(node: Any) -> Iterator[Any]:
    """Yield a node, then the nodes of which it is a view or an alias."""
    yield node
    while node.op == "call_function":
        schema = getattr(node.target, "_schema", None)
        if node.target is not getitem and not (schema and schema.arguments and schema.arguments[0].alias_info):
            return
        node = node.args[0]
        yield node


# -- what was made functional


def _functional(torch: Any, program: Any) -> Any:
    """Return a program without in-place calls, with the casts of autocast regions, and with `vmap` expanded.

    That traces the program again, which takes longer than the first time, so it is only done where necessary.
    """
    aten = torch.ops.aten
    norms = aten.batch_norm.default, aten.instance_norm.default
    casts = torch.amp.autocast_mode._enter_autocast
    for node in program.graph.nodes:
        is_norm_in_training = node.target in norms and node.args[5]
        if is_norm_in_training or node.target is casts or _is_mutable(torch, node.target) or is_transform(node.target):
            return program.run_decompositions(_decompositions(torch))
    return program


def _decompositions(torch: Any) -> dict[Any, Callable[..., Any]]:
    """Return what operators consist of that write into buffers without their schemas saying so."""
    aten = torch.ops.aten

    def instance_norm(
        x: Any, weight: Any, bias: Any, mean: Any, var: Any, by_batch: bool, momentum: float, eps: float, cudnn: bool
    ) -> Any:
        n, c = x.shape[:2]
        means, variances = (None if held is None else held.repeat(n) for held in (mean, var))
        scale, shift = (None if held is None else held.repeat(n) for held in (weight, bias))
        flat = x.reshape(1, n * c, *x.shape[2:])
        out = aten.batch_norm(flat, scale, shift, means, variances, by_batch, momentum, eps, cudnn)
        for held, new in ((mean, means), (var, variances)):
            if by_batch and held is not None and new is not None:
                held.copy_(new.reshape(n, c).mean(0))
        return out.reshape(x.shape)

    return {aten.instance_norm.default: instance_norm}


_ASSERTIONS = ("_assert", "sym_constrain", "_functional_assert", "_functional_sym_constrain")


def _finished(
    torch: Any, module: Any, program: Any, functions: _Functions, *, trains: bool, notes: Sequence[str]
) -> Captured:
    """Return a functional program as a graph whose operators autograd differentiates."""
    graph, signature = program.graph_module.graph, program.graph_signature
    for node in list(graph.nodes):
        if node.op == "call_function":
            _rewrite(torch, graph, node, functions)
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.index.Tensor):
        _as_range(torch, graph, node, program)
    outputs: list[Any] = []
    written: dict[str, Any] = {}
    names = _canonical(module)
    (returned,) = graph.find_nodes(op="output")
    notes = list(notes)
    for spec, node in zip(signature.output_specs, returned.args[0], strict=True):
        kind = spec.kind.name
        if kind == "USER_OUTPUT":
            outputs.append(node)
        elif kind in ("BUFFER_MUTATION", "PARAMETER_MUTATION"):
            written[names.get(spec.target, spec.target)] = node
        else:
            notes.append(
                f"input {spec.target!r} is changed by the forward pass{where(node)}: what is given stays as it is"
            )
    returned.args = ((*outputs, *written.values()),)
    graph.eliminate_dead_code()
    held = _placeholders(torch, graph, program, names)
    program.graph_module.recompile()
    for node in graph.nodes:
        _check(node)
    return Captured(
        graph=program.graph_module,
        **held,
        outputs=tuple(node.name for node in outputs),
        written={name: node.name for name, node in written.items()},
        trains=trains,
        computes_gradients=False,
        notes=tuple(notes),
    )


def _canonical(module: Any) -> dict[str, str]:
    """Return the first name of each parameter and buffer, by any of its names."""
    first: dict[int, str] = {}
    held = (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False))
    return {name: first.setdefault(id(tensor), name) for name, tensor in held}


def _placeholders(torch: Any, graph: Any, program: Any, names: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """Return the roles of the placeholders; unread ones are removed, except inputs."""
    inputs, parameters, buffers, constants = dict[str, str](), dict[str, str](), dict[str, str](), dict[str, Any]()
    first: dict[str, Any] = {}
    for spec, node in zip(program.graph_signature.input_specs, graph.find_nodes(op="placeholder"), strict=True):
        kind, name = spec.kind.name, names.get(spec.target, spec.target)
        if kind in ("PARAMETER", "BUFFER") and node is not first.setdefault(name, node):
            node.replace_all_uses_with(first[name])
        example = node.meta.get("val")
        if not isinstance(example, torch.Tensor) or (kind != "USER_INPUT" and not node.users):
            if node.users:
                node.replace_all_uses_with(example)
            graph.erase_node(node)
            first.pop(name, None)
        elif kind == "USER_INPUT":
            inputs[node.name] = spec.arg.name
        elif kind == "PARAMETER":
            parameters[node.name] = name
        elif kind == "BUFFER":
            buffers[node.name] = name
        else:
            constants[node.name] = _constant(program, spec.target)
    return {"inputs": inputs, "parameters": parameters, "buffers": buffers, "constants": constants}


def _constant(program: Any, name: str) -> Any:
    found = program.constants[name]
    if found.is_meta or hasattr(found, "fake_mode"):
        raise ModelError(
            f"tensor {name!r} of the module was made without values (on the device 'meta'); make it a buffer that is "
            "not, or compute it in the forward pass"
        )
    return found.detach()


def _rewrite(torch: Any, graph: Any, node: Any, functions: _Functions) -> None:
    """Replace an operator that autograd does not differentiate by one that it does; remove assertions."""
    aten = torch.ops.aten
    name = str(getattr(node.target, "_schema", node.target) and getattr(node.target, "__name__", ""))
    if name.startswith(_ASSERTIONS):
        graph.erase_node(node)
        return
    target, example = node.target, node.meta.get("val")
    if target in (aten.view.default, aten._unsafe_view.default):
        node.target = aten.reshape.default
    elif target is aten.as_strided_scatter.default:
        raise ModelError(f"elements are written by their places in memory{where(node)}; write them by their indices")
    elif target in (aten.as_strided.default, aten.as_strided_copy.default):
        node.target, node.args, node.kwargs = _strided(torch, node), node.args[:1], {}
    elif target in (aten.view_as.default, aten.unflatten.int):
        node.target, node.args = aten.reshape.default, (node.args[0], list(example.shape))
    elif target is aten.detach_copy.default:
        node.target = aten.detach.default
    elif target is aten.lift_fresh_copy.default:
        node.target = aten.clone.default
    elif target is aten.copy.default:
        new = node.args[1]
        with graph.inserting_before(node):
            made = _inserted(graph, node, aten.expand.default, (new, list(example.shape)))
            if new.meta["val"].dtype != example.dtype:
                made = _inserted(graph, node, aten._to_copy.default, (made,), dtype=example.dtype)
        node.replace_all_uses_with(made)
        graph.erase_node(node)
    elif target is aten.native_dropout.default and node.args[2]:
        _as_dropout(torch, graph, node)
    elif torch.Tag.nondeterministic_seeded in getattr(target, "tags", ()) and name.partition(".")[0] in _DRAWN:
        _of_shape_alone(torch, graph, node)
    elif target is aten.scaled_dot_product_attention.default and _argument(node, "dropout_p"):
        _as_softmax_with_dropout(torch, graph, node)
    elif target in (aten.feature_dropout.default, aten.alpha_dropout.default, aten.feature_alpha_dropout.default):
        _as_masked(torch, graph, node)
    elif target is aten.cat.default:
        _without_empty(graph, node)
    elif str(target) == "pase.function.default":
        node.target, node.args = functions.target(node.args[1]), node.args[:1]


def _strided(torch: Any, node: Any) -> Callable[..., Any]:
    """Return `as_strided` of a tensor, assuming that its elements are in the memory order of the trace.

    Raises:
        ModelError: It reads outside of its tensor, or reads elements that overlap.
    """
    example, size, stride = node.args[0].meta["val"], _argument(node, "size"), _argument(node, "stride")
    given = _argument(node, "storage_offset")
    offset = 0 if given is None else given - example.storage_offset()
    order = sorted(range(example.dim()), key=lambda dim: (-example.stride(dim), dim))
    inverse = [order.index(dim) for dim in range(example.dim())]
    dense = torch.empty([example.shape[dim] for dim in order], device="meta").permute(inverse)
    last = offset + sum((extent - 1) * step for extent, step in zip(size, stride, strict=True))
    kept = [dim for dim, extent in enumerate(example.shape) if extent > 1]
    if any(dense.stride(dim) != example.stride(dim) for dim in kept) or offset < 0 or last >= example.numel():
        raise ModelError(f"as_strided reads outside of its tensor{where(node)}; cut the tensor behind it")

    def run(x: Any) -> Any:
        # In new memory: indices are counted from its start.
        x = x.permute(order).clone(memory_format=torch.contiguous_format)
        return torch.as_strided(x, size, stride, offset)

    run.__name__ = run.__qualname__ = "as_strided"
    return run


_DRAWN = frozenset(
    {
        *("bernoulli", "cauchy", "exponential", "geometric", "log_normal", "normal_functional", "random", "uniform"),
        *("rand_like", "randint_like", "randn_like"),
    }
)
"""Operators that draw random values to replace a tensor's, of which they need only shape and type."""


def _inserted(graph: Any, like: Any, target: Any, args: tuple[Any, ...], **kwargs: Any) -> Any:
    """Insert a call of an operator that comes from the same call of the module as another node."""
    node = graph.call_function(target, args, kwargs)
    node.meta = dict(like.meta)
    values = [argument.meta["val"] for argument in node.all_input_nodes]
    mode = next(value.fake_mode for value in (*values, *flat_items([like.meta["val"]])) if hasattr(value, "fake_mode"))
    given = _with_values(args), {name: _with_values(value) for name, value in kwargs.items()}
    with mode:
        node.meta["val"] = target(*given[0], **given[1])
    return node


def _with_values(item: Any) -> Any:
    if isinstance(item, list | tuple):
        return type(item)(_with_values(each) for each in item)
    return item.meta["val"] if hasattr(item, "meta") else item


def _argument(node: Any, name: str) -> Any:
    """Return an argument of a call by its name, or its default."""
    for place, argument in enumerate(node.target._schema.arguments):
        if argument.name == name:
            if place < len(node.args):
                return node.args[place]
            return node.kwargs.get(name, argument.default_value)
    raise AssertionError(f"{node.target} has no argument {name}")


def _without_empty(graph: Any, node: Any) -> None:
    """Remove empty tensors from a concatenation, as they do not determine how it is split."""
    tensors = [x for x in node.args[0] if x.meta["val"].numel()]
    if len(tensors) == 1 and tensors[0].meta["val"].dtype == node.meta["val"].dtype:
        node.replace_all_uses_with(tensors[0])
        graph.erase_node(node)
    elif tensors:
        node.args = (tensors, *node.args[1:])


def _as_range(torch: Any, graph: Any, node: Any, program: Any) -> None:
    """Put a slice in place of an index by numbers of the source that follow one another, such as x[..., [-1], :]."""
    x, indices = node.args
    given = [(dim, index) for dim, index in enumerate(indices) if index is not None]
    if len(given) != 1:
        return
    ((dim, source),) = given
    while source.target in (torch.ops.aten.clone.default, torch.ops.aten.lift_fresh_copy.default):
        source = source.args[0]
    name = program.graph_signature.inputs_to_lifted_tensor_constants.get(source.name)
    numbers = None if name is None else program.constants[name]
    if numbers is None or numbers.is_meta or hasattr(numbers, "fake_mode"):
        return
    if numbers.dtype not in (torch.int64, torch.int32) or numbers.dim() != 1 or not len(numbers):
        return
    extent = x.meta["val"].shape[dim]
    places = [place % extent for place in numbers.tolist()]
    if places == list(range(places[0], places[0] + len(places))):
        with graph.inserting_before(node):
            made = _inserted(graph, node, torch.ops.aten.slice.Tensor, (x, dim, places[0], places[-1] + 1))
        node.replace_all_uses_with(made)
        graph.erase_node(node)


def _of_shape_alone(torch: Any, graph: Any, node: Any) -> None:
    """Have what draws random numbers in place of a tensor's not need that tensor."""
    if node.target is torch.ops.aten.bernoulli.default:
        # Its input is the probabilities.
        with graph.inserting_before(node):
            node.args = (_inserted(graph, node, torch.ops.aten.detach.default, node.args[:1]), *node.args[1:])
        return
    example = node.args[0].meta["val"]
    kind = {"dtype": example.dtype, "device": example.device}
    with graph.inserting_before(node):
        made = _inserted(graph, node, torch.ops.aten.zeros.default, (list(example.shape),), **kind)
    node.args = (made, *node.args[1:])


def _as_softmax_with_dropout(torch: Any, graph: Any, node: Any) -> None:
    """Replace attention with dropout of its weights by products, a softmax and an elementwise dropout."""
    aten = torch.ops.aten
    query, key, value = (_argument(node, name) for name in ("query", "key", "value"))
    mask, scale = _argument(node, "attn_mask"), _argument(node, "scale")
    examples = [item.meta["val"] for item in (query, key, value)]

    def add(target: Any, *args: Any, **kwargs: Any) -> Any:
        return _inserted(graph, node, target, args, **kwargs)

    with graph.inserting_before(node):
        if _argument(node, "enable_gqa"):
            key, value = (
                add(aten.repeat_interleave.self_int, item, examples[0].shape[-3] // example.shape[-3], -3)
                for item, example in ((key, examples[1]), (value, examples[2]))
            )
        factor = examples[0].shape[-1] ** -0.5 if scale is None else scale
        scores = add(aten.mul.Tensor, add(aten.matmul.default, query, add(aten.transpose.int, key, -2, -1)), factor)
        kind = {"dtype": examples[0].dtype, "device": examples[0].device}
        if _argument(node, "is_causal"):
            size = [examples[0].shape[-2], examples[1].shape[-2]]
            mask = add(aten.tril.default, add(aten.ones.default, size, **{**kind, "dtype": torch.bool}))
        if mask is not None:
            if mask.meta["val"].dtype == torch.bool:
                zero = add(aten.zeros.default, [], **kind)
                infinite = add(aten.full.default, [], float("-inf"), **kind)
                mask = add(aten.where.self, mask, zero, infinite)
            scores = add(aten.add.Tensor, scores, mask)
        weights = add(aten._safe_softmax.default, scores, -1)
        weights = add(aten.dropout.default, weights, _argument(node, "dropout_p"), True)
        made = add(aten.matmul.default, weights, value)
    node.replace_all_uses_with(made)
    graph.erase_node(node)


def _as_masked(torch: Any, graph: Any, node: Any) -> None:
    """Replace dropout of channels, and alpha dropout, by a product with a random mask."""
    aten = torch.ops.aten
    x, rate, trains = node.args
    example = x.meta["val"]

    def add(target: Any, *args: Any, **kwargs: Any) -> Any:
        return _inserted(graph, node, target, args, **kwargs)

    with graph.inserting_before(node):
        if not trains or not rate:
            made = add(aten.clone.default, x)
        elif rate == 1:
            made = add(aten.mul.Tensor, x, 0.0)
        else:
            of_channels = node.target is not aten.alpha_dropout.default
            shape = [extent if not of_channels or i < 2 else 1 for i, extent in enumerate(example.shape)]
            zeros = add(aten.zeros.default, shape, dtype=example.dtype, device=example.device)
            mask = add(aten.bernoulli.p, zeros, 1 - rate)
            if node.target is aten.feature_dropout.default:
                made = add(aten.mul.Tensor, x, add(aten.div.Tensor, mask, 1 - rate))
            else:
                # The value of SELU far from zero, and the affine map that preserves mean and variance (Klambauer 2017).
                alpha = 1.7580993408473766
                a = ((alpha**2 * rate + 1) * (1 - rate)) ** -0.5
                offset = add(aten.mul.Tensor, add(aten.sub.Tensor, mask, 1), alpha * a)
                shifted = add(aten.add.Tensor, offset, alpha * a * rate)
                made = add(aten.add.Tensor, add(aten.mul.Tensor, x, add(aten.mul.Tensor, mask, a)), shifted)
    node.replace_all_uses_with(made)
    graph.erase_node(node)


def _as_dropout(torch: Any, graph: Any, node: Any) -> None:
    """Replace a `native_dropout` whose mask is not read by `dropout`."""
    if any(user.args[1] == 1 and user.users for user in node.users):
        return
    x, rate, _ = node.args
    for user in list(node.users):
        if user.args[1] == 0:
            with graph.inserting_before(node):
                made = _inserted(graph, user, torch.ops.aten.dropout.default, (x, rate, True))
                made.meta = dict(user.meta)
                made.meta["custom"] = node.meta.get("custom")
            user.replace_all_uses_with(made)
        graph.erase_node(user)
    graph.erase_node(node)


def _check(node: Any) -> None:
    """Raise ModelError for control flow, and for sizes that depend on values."""
    if node.op == "call_function" and any(getattr(item, "op", "") == "get_attr" for item in node.args):
        function_of(node)
    for example in flat_items([node.meta.get("val")]):
        if hasattr(example, "shape"):
            sized(example, node)
