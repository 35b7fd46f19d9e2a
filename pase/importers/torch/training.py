"""Find what a module does in training that its trace, which is of evaluation, does not show.

The module is called on tensors without values, in training and in evaluation mode, and every call of PyTorch is
recorded with the calls that computed its operands. The records show detached gradients, backward passes of its own,
writes to buffers, and branches on `self.training`; the trace shows none of these. This module becomes obsolete when
programs run the module's own graph.
"""

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import PurePath
from typing import Any

from pase.importers.torch.program import user_line
from pase.importers.torch.tensors import LIKE_ANOTHER, known_values, mapped

_DETACHING = frozenset({"detach", "detach_", "data"})
_DROPPING = {"dropout": 0, "dropout_": 0}
"""Functions that drop single points."""

_DROPPING_OTHERWISE = {
    "feature_dropout": "drops whole channels",
    "alpha_dropout": "sets points to another value and scales all",
    "feature_alpha_dropout": "sets whole channels to another value and scales all",
    "rrelu": "draws its slopes",
}
_NORMALISING = frozenset({"batch_norm", "instance_norm"})
_RECURRENT = frozenset({"lstm", "gru", "rnn_tanh", "rnn_relu"})
_ATTENTION = "scaled_dot_product_attention"
_OF_BATCHES = ("running_mean", "running_var", "num_batches_tracked")
"""Buffers of batch normalisation, which programs maintain as the module does."""


@dataclass(slots=True, kw_only=True)
class _Call:
    """A call of PyTorch.

    Attributes:
        name: Name of the function.
        options: Its arguments that are not tensors.
        shapes: Shapes of its results.
        operands: The calls that computed its tensors.
        reads_held: Whether an input, a parameter or a buffer is an operand.
        parameters: Those that are operands, by their ids.
        is_float: Whether a gradient could flow through a result.
        is_cut: Whether the gradient of an operand stops here.
        is_in_attention: Whether `torch.nn.functional.multi_head_attention_forward` calls it.
        line, source: Its position in the user's code.
    """

    name: str
    options: tuple[object, ...]
    shapes: tuple[object, ...] = ()
    operands: "list[_Call]" = field(default_factory=list)
    reads_held: bool = False
    parameters: tuple[int, ...] = ()
    is_float: bool = False
    is_cut: bool = False
    is_in_attention: bool = False
    line: str = ""
    source: str = ""

    @property
    def at(self) -> str:
        return f"{self.line} ({self.source})" if self.source else self.line


@dataclass(slots=True, kw_only=True)
class _Record:
    """Record of one call of the module.

    Attributes:
        calls: Calls of PyTorch, in order.
        returned: The calls that computed the relevant results: the loss, or all float tensors.
        functions: Classes of `torch.autograd.Function` that the gradient of these goes through.
        written: The first call that wrote into each parameter or buffer, by its name; None where it was replaced.
    """

    calls: list[_Call]
    returned: list[_Call]
    functions: list[type]
    written: dict[str, _Call | None]

    def live(self) -> list[_Call]:
        """Return the calls that the results depend on, in order."""
        needed = _behind(self.returned, lambda call: call.operands)
        return [call for call in self.calls if id(call) in needed]

    def cuts(self) -> Iterator[_Call]:
        """Yield the calls that stop a gradient which the results would have otherwise."""
        needed = _behind(self.returned, lambda call: [each for each in call.operands if each.is_float])
        yield from (call for call in self.calls if call.is_cut and id(call) in needed)


def _behind(calls: Sequence[_Call], operands: Callable[[_Call], Sequence[_Call]]) -> set[int]:
    found, frontier = set[int](), list(calls)
    while frontier:
        call = frontier.pop()
        if id(call) not in found:
            found.add(id(call))
            frontier += operands(call)
    return found


def differences_in_training(torch: Any, module: Any, positional: tuple[Any, ...], keywords: Mapping[str, Any]) -> str:
    """Return why the trace of a module, in evaluation, does not train it as it trains itself; "" for no reason.

    Args:
        torch: PyTorch.
        module: The module; it is restored afterwards. A module in evaluation mode is examined after `train()`.
        positional, keywords: Its example inputs, whose values are ignored.

    Raises:
        Exception: Any error of the module when it is called on tensors without values.
    """
    flags = {part: part.training for part in module.modules()}
    recorder = _Recording(torch, module, positional, keywords)
    with restored(torch, module):
        if not module.training:
            module.train()
        trained, then = recorder.recorded(), recorder.recorded()
    with restored(torch, module):
        module.eval()
        evaluated = recorder.recorded()
    stateful = next(_of_state(torch, module, trained, then), "")
    return next(_reasons(module, flags, trained, evaluated), stateful)


def computed_with_earlier(
    torch: Any, module: Any, positional: tuple[Any, ...], keywords: Mapping[str, Any], between: Callable[[], object]
) -> str:
    """Return how the second of two calls of a module differs from the first; "" for no difference.

    Args:
        torch: PyTorch.
        module: The module. Changes to its own state remain.
        positional, keywords: Its example inputs, whose values are ignored.
        between: Called between the two calls.
    """
    recorder = _Recording(torch, module, positional, keywords)
    first = recorder.recorded()
    between()
    # Writes to parameters are not separate state.
    for parameter in recorder.parameters.values():
        recorder.makers.pop(id(parameter), None)
    second = recorder.recorded()
    return next(_of_first_call(first, second), "") or next(_of_earlier_calls(first, second), "")


def _of_state(torch: Any, module: Any, trained: _Record, then: _Record) -> Iterator[str]:
    """Yield how a module's behaviour changes between calls; then: the record of another call."""
    owners = {
        f"{path}.{last}".removeprefix("."): part
        for path, part in module.named_modules(remove_duplicate=False)
        for last in (*part._parameters, *part._buffers)
    }
    for name, writer in trained.written.items():
        is_of_batches = isinstance(owners[name], torch.nn.modules.batchnorm._BatchNorm)
        if is_of_batches and name.rpartition(".")[2] in _OF_BATCHES:
            continue
        kind = "parameter" if name.rpartition(".")[2] in owners[name]._parameters else "buffer"
        where = f" at {writer.at}" if writer is not None and writer.line else ""
        yield f"{kind} {name!r} is written in the forward pass{where}"
    yield from _of_earlier_calls(trained, then)


def _reasons(module: Any, flags: Mapping[Any, bool], trained: _Record, evaluated: _Record) -> Iterator[str]:
    """Yield differences of a module in training and in evaluation, and gradients that do not follow its calls."""
    for function in trained.functions:
        yield f"torch.autograd.Function {function.__name__!r}{_defined(function)} has a backward pass of its own"
    for call in trained.cuts():
        if call.name in _DETACHING:
            yield f"{call.at} detaches what depends on weights"
        else:
            yield f"{call.at} computes under torch.no_grad what depends on weights"
    yield from _of_flags(module, flags, trained)
    yield from _of_drops(trained, evaluated)
    yield from _of_branches(trained.live(), evaluated.live())


def _of_flags(module: Any, flags: Mapping[Any, bool], trained: _Record) -> Iterator[str]:
    """Yield dropout and normalisation that differ from those of programs."""
    paths = {id(part): path for path, part in module.named_modules()}
    left = [paths[id(part)] for part, flag in flags.items() if module.training and not flag and id(part) in paths]
    why = f"; module {left[0]!r} is left in evaluation (.eval())" if left and flags[module] else ""
    for call in trained.calls:
        if call.name in _DROPPING and len(call.options) > 1:
            rate, trains = call.options[:2]
            if rate and not trains:
                yield f"dropout at {call.at} drops nothing in training{why}"
        elif call.name in _DROPPING_OTHERWISE and True in call.options:
            numbers = [option for option in call.options if isinstance(option, float)]
            if call.name == "rrelu" or any(numbers):
                yield f"{call.name} at {call.at} {_DROPPING_OTHERWISE[call.name]} in training"
        elif call.name == "batch_norm" and call.options[0] is False:
            yield f"batch_norm at {call.at} normalises by kept statistics in training{why}"
        elif call.name in _RECURRENT and _drops_between(call):
            yield f"{call.name} at {call.at} drops points between its layers"


def _drops_between(call: _Call) -> bool:
    numbers = [option for option in call.options if isinstance(option, float)]
    return any(numbers)


def _of_drops(trained: _Record, evaluated: _Record) -> Iterator[str]:
    """Yield the first dropout that a module only calls in training, except those within its attention."""

    def drops(record: _Record) -> list[_Call]:
        return [call for call in record.calls if call.name in _DROPPING and call.options[:1] != (0.0,)]

    ours, others = drops(trained), drops(evaluated)
    if [call.options[:1] for call in ours] == [call.options[:1] for call in others]:
        return
    lines = {call.line for call in others}
    for call in ours:
        if call.line not in lines and not call.is_in_attention:
            yield f"dropout at {call.at} is called in training alone"


def _of_branches(trained: Sequence[_Call], evaluated: Sequence[_Call]) -> Iterator[str]:
    """Yield the first call that a module only makes in training, or only in evaluation."""

    def shown(calls: Sequence[_Call]) -> list[_Call]:
        # Whether a tensor is copied to another memory format depends on the kernel that computed it.
        ignored = {*_DROPPING, *_DROPPING_OTHERWISE, "contiguous"}
        return [call for call in calls if call.name not in ignored]

    def key(call: _Call) -> object:
        differs = call.name in _NORMALISING or call.name in _RECURRENT or call.name == _ATTENTION
        return call.name, call.shapes, () if differs else call.options

    ours, others = shown(trained), shown(evaluated)
    for one, other in zip(ours, others, strict=False):
        if key(one) != key(other):
            yield f"{one.at} is computed in training, {other.at} in evaluation"
            return
    if len(ours) != len(others):
        call, when = (ours[len(others)], "training") if len(ours) > len(others) else (others[len(ours)], "evaluation")
        yield f"{call.at} is computed in {when} alone"


def _of_earlier_calls(trained: _Record, then: _Record) -> Iterator[str]:
    """Yield computations with tensors of an earlier call; tensors that were created only once are ignored."""
    before = {id(call) for call in trained.calls}
    of_inputs = _behind_all(trained.calls)
    for call in then.live():
        if any(id(each) in before and id(each) in of_inputs for each in call.operands):
            yield f"{call.at} computes with what an earlier call of the module left"
    for one, other in zip(trained.live(), then.live(), strict=False):
        if (one.name, one.shapes) != (other.name, other.shapes):
            return
        if one.options != other.options:
            yield f"{one.at} computes with another number in every call"


def _of_first_call(first: _Record, then: _Record) -> Iterator[str]:
    """Yield computations of the first call only; those that depend on no input or weight are ignored."""
    for name, call in first.written.items():
        if name not in then.written:
            yield f"{name!r} is written{f' at {call.at}' if call else ''}, in the first call alone"
    of_inputs = _behind_all([*first.calls, *then.calls])
    ones, twos = ([call for call in record.live() if id(call) in of_inputs] for record in (first, then))
    for one, two in zip(ones, twos, strict=False):
        if (one.name, one.shapes, one.line, one.parameters) != (two.name, two.shapes, two.line, two.parameters):
            yield f"{one.at} is computed in the first call, {two.at} in later ones"
            return
    if len(ones) != len(twos):
        shorter, longer = sorted((ones, twos), key=len)
        yield f"{longer[len(shorter)].at} is not computed in every call"


def _behind_all(calls: Sequence[_Call]) -> set[int]:
    """Return the calls, in the order of their making, that depend on an input, a parameter or a buffer."""
    found = set[int]()
    for call in calls:
        is_of_shape = call.name in LIKE_ANOTHER
        if not is_of_shape and (call.reads_held or any(id(each) in found for each in call.operands)):
            found.add(id(call))
    return found


def _defined(function: type) -> str:
    """Return where a class is defined, as " (file:line)"."""
    try:
        file, (_, line) = inspect.getsourcefile(function), inspect.getsourcelines(function)
    except (OSError, TypeError):
        return ""
    return f" ({PurePath(str(file)).name}:{line})"


# -- one call of the module


class _Recording:
    """Calls a module on tensors without values.

    Attributes:
        fake: Creates them; the same for all calls, as a module may store some of them.
        parameters: Fake parameters that all calls share, by the id of the module's own.
        makers: The call that computed, or last wrote, each tensor, by its id.
        kept: Tensors, to keep their ids unique.
    """

    def __init__(self, torch: Any, module: Any, positional: tuple[Any, ...], keywords: Mapping[str, Any]) -> None:
        self.torch, self.module, self.given = torch, module, (positional, dict(keywords))
        self.fake = torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True)
        self.parameters: dict[int, Any] = {}
        self.makers: dict[int, _Call] = {}
        self.kept: list[Any] = []

    def recorded(self) -> _Record:
        """Return the record of the module; values of tensors that it creates itself are known."""
        try:
            return self._run(is_known=False)
        except Exception:  # noqa: BLE001 - the second try raises the relevant error
            return self._run(is_known=True)

    def _run(self, *, is_known: bool) -> _Record:
        torch, module = self.torch, self.module
        functional = torch.nn.functional
        with ExitStack() as stack:
            held = stack.enter_context(held_instead(torch, module, lambda _, x: self._fake_held(x)))
            positional, keywords = mapped(lambda x: _fake(torch, self.fake, x), torch, self.given)
            leaves = torch.utils._pytree.tree_leaves((positional, keywords))
            mode = _recorder(self, {id(x) for x in (*held.values(), *leaves)})
            # Functions written in Python check for these before they call others, so these are recorded.
            for name in ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic"):
                stack.callback(setattr, functional, name, getattr(functional, name))
                setattr(functional, name, lambda *_: False)
            stack.enter_context(torch.enable_grad())
            stack.enter_context(self.fake)
            if is_known:
                stack.enter_context(known_values(torch))
            with mode:
                returned = module(*positional, **keywords)
            names = {_storage(tensor): name for name, tensor in held.items()}
            written = {names[key]: call for key, call in mode.written.items() if key in names}
            for path, part in module.named_modules():
                for last, now in part._buffers.items():
                    name = f"{path}.{last}".removeprefix(".")
                    if name in held and now is not held[name]:
                        written.setdefault(name, None)
        tensors = [x for x in torch.utils._pytree.tree_leaves(_plain(returned)) if isinstance(x, torch.Tensor)]
        floats = [x for x in tensors if x.is_floating_point()]
        losses = [x for x in floats if x.numel() == 1 and x.requires_grad]
        counted = losses if len(losses) == 1 else floats
        return _Record(
            calls=mode.calls,
            returned=[self.makers[id(x)] for x in counted if id(x) in self.makers],
            functions=list(_functions(counted)),
            written=written,
        )

    def _fake_held(self, tensor: Any) -> Any:
        """Return the replacement of a parameter, the same in all calls, or of a buffer, which a call may overwrite."""
        if not isinstance(tensor, self.torch.nn.Parameter):
            return _fake(self.torch, self.fake, tensor)
        if id(tensor) not in self.parameters:
            made = self.torch.nn.Parameter(_fake(self.torch, self.fake, tensor), requires_grad=tensor.requires_grad)
            self.parameters[id(tensor)] = made
        return self.parameters[id(tensor)]


def _storage(tensor: Any) -> int:
    return int(tensor.untyped_storage()._cdata)


def _plain(returned: Any) -> Any:
    """Return a module's result with its records as dicts, too."""
    if isinstance(returned, Mapping):
        return {str(key): _plain(value) for key, value in returned.items()}
    if isinstance(returned, list | tuple):
        return [_plain(value) for value in returned]
    if hasattr(returned, "__dataclass_fields__"):
        return {name: _plain(getattr(returned, name)) for name in returned.__dataclass_fields__}
    return returned


def _functions(tensors: Sequence[Any]) -> Iterator[type]:
    """Yield the autograd functions, but PyTorch's own, that the gradients of tensors go through."""
    seen = set[Any]()
    frontier = [tensor.grad_fn for tensor in tensors]
    while frontier:
        node = frontier.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        function = getattr(node, "_forward_cls", None)
        if function is not None and function.__module__.partition(".")[0] != "torch":
            yield function
        frontier += [before for before, _ in node.next_functions]


def _recorder(of: _Recording, held: set[int]) -> Any:
    """Return a mode that records calls; held: ids of inputs, parameters and buffers."""
    torch: Any = of.torch

    class Recorder(torch.overrides.TorchFunctionMode):  # type: ignore[misc]
        """written: the first call that wrote into each storage."""

        def __init__(self) -> None:
            super().__init__()
            self.calls: list[_Call] = []
            self.written: dict[int, _Call] = {}

        def __torch_function__(
            self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            given = dict(kwargs or {})
            name = _name(function)
            leaves = torch.utils._pytree.tree_leaves((args, given))
            tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
            carries = any(x.requires_grad for x in tensors)
            if name == "rand" and all(size in (0, 1) for size in leaves if isinstance(size, int)):
                # The number that a module draws to leave something out: it does, if it ever does.
                made = torch.zeros(*args, **given)
            else:
                made = function(*args, **given)
            results = [x for x in torch.utils._pytree.tree_leaves(made) if isinstance(x, torch.Tensor)]
            written = given.get("out", tensors[0] if _writes(name) and tensors else None)
            if isinstance(written, torch.Tensor):
                results.append(written)
            if not results:
                return made
            call = _Call(
                name=name,
                options=tuple(leaf for leaf in leaves if isinstance(leaf, bool | int | float | str)),
                shapes=tuple((tuple(x.shape), x.dtype) for x in results),
                operands=[of.makers[id(x)] for x in tensors if id(x) in of.makers],
                reads_held=any(id(x) in held for x in tensors),
                parameters=tuple(id(x) for x in tensors if isinstance(x, torch.nn.Parameter)),
                is_float=any(x.is_floating_point() for x in results),
            )
            call.line, call.source, callers = _place()
            # From PyTorch 2.14 on `apply` is not written in Python.
            is_function = not callers.isdisjoint({"autograd/function.py:apply", "utils/checkpoint.py:forward"})
            call.is_in_attention = "nn/functional.py:multi_head_attention_forward" in callers
            is_disabled = call.is_float and not torch.is_grad_enabled() and not is_function
            call.is_cut = carries and (name in _DETACHING or is_disabled)
            if isinstance(written, torch.Tensor) and name != "requires_grad_":
                self.written.setdefault(_storage(written), call)
            # A returned argument was not computed, unless it was written into.
            made_here = [x for x in results if x is written or all(x is not other for other in tensors)]
            of.makers |= {id(x): call for x in made_here}
            of.kept += (*tensors, *results)
            self.calls.append(call)
            return made

    return Recorder()


def _writes(name: str) -> bool:
    """Return whether a function writes into its first tensor."""
    return name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))


def _name(function: Any) -> str:
    """Return the name of a function, or of the attribute that is read."""
    name = str(getattr(function, "__name__", function))
    owner = getattr(function, "__self__", None)
    return str(getattr(owner, "__name__", name)) if name == "__get__" else name


def _place() -> tuple[str, str, set[str]]:
    """Return the calling line of the user's code, its text, and the functions of the stack by their files."""
    frame: Any = sys._getframe(2)
    line, source = user_line(frame)
    callers = set[str]()
    while frame is not None:
        callers.add(_function_name(frame.f_code.co_filename, frame.f_code.co_name))
        frame = frame.f_back
    return line, source, callers


@cache
def _function_name(file: str, name: str) -> str:
    """Return a function's name with its file's, such as "nn/functional.py:gelu"."""
    return "/".join(file.split("/")[-2:]) + ":" + name


# -- the module without values


def _fake(torch: Any, fake: Any, tensor: Any, device: Any = "cpu") -> Any:
    """Return a tensor without values of the same shape, one that is trained where the other is."""
    with fake:
        made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    return made.requires_grad_(tensor.requires_grad and tensor.is_leaf)


@contextmanager
def held_instead(torch: Any, module: Any, make: Callable[[str, Any], Any]) -> Iterator[dict[str, Any]]:
    """Replace the tensors of a module temporarily; yield the replacements by all of their names.

    make: returns the replacement, given the name and the parameter or buffer; each tensor gets one, trained as before.
    """
    made: dict[int, Any] = {}
    named: dict[str, Any] = {}
    replaced = set[int]()
    with ExitStack() as stack:
        for path, part in module.named_modules(remove_duplicate=False):
            for holder in (part._parameters, part._buffers):
                for last, tensor in list(holder.items()):
                    name = f"{path}.{last}".removeprefix(".")
                    if tensor is None or id(tensor) in replaced:
                        # A part that is in several places was met before.
                        named |= {} if tensor is None else {name: tensor}
                        continue
                    stack.callback(holder.__setitem__, last, tensor)
                    if id(tensor) not in made:
                        other = make(name, tensor)
                        if isinstance(tensor, torch.nn.Parameter) and not isinstance(other, torch.nn.Parameter):
                            other = torch.nn.Parameter(other, requires_grad=tensor.requires_grad)
                        made[id(tensor)] = other
                        replaced.add(id(other))
                    holder[last] = named[name] = made[id(tensor)]
        yield named


@contextmanager
def restored(torch: Any, module: Any) -> Iterator[None]:
    """Put a module back as it was, its attributes and whether its parts are in training, and the random numbers."""
    flags = {part: part.training for part in module.modules()}
    before = [(part, dict(part.__dict__)) for part in module.modules()]
    filled = [value for _, attributes in before for value in attributes.values() if type(value) in (list, dict, set)]
    contents = [value.copy() for value in filled]
    state = torch.get_rng_state()
    try:
        yield
    finally:
        torch.set_rng_state(state)
        for part, attributes in before:
            part.__dict__.clear()
            part.__dict__.update(attributes)
        for value, content in zip(filled, contents, strict=True):
            value.clear()
            (value.extend if isinstance(value, list) else value.update)(content)
        for part, flag in flags.items():
            part.training = flag
