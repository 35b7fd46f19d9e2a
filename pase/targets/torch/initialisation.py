"""First values of a module on the device 'meta': what its own code would give it, part by part, never whole.

The module's own initialisation runs once on a copy that has no values, and what it does in place to each parameter and
buffer is recorded: numbers drawn, filled in, copied, scaled. A rank then does the same to its parts. Numbers that are
drawn are those of a counter (`training/normal.py`), of the same distribution.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from inspect import Parameter, signature
from math import erf, sqrt
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from pase.errors import ProgramError
from pase.sharding.boxes import Range
from pase.targets.torch.placements import Held
from pase.targets.torch.values import Source, cut
from pase.targets.training.masks import layer_key
from pase.targets.training.normal import normal_part, uniform_part

_DRAWN = {torch.ops.aten.normal_, torch.ops.aten.uniform_}
_SET = {*_DRAWN, torch.ops.aten.zero_, torch.ops.aten.fill_, torch.ops.aten.copy_}
_CHANGED = {
    *(torch.ops.aten.add_, torch.ops.aten.sub_, torch.ops.aten.mul_, torch.ops.aten.div_, torch.ops.aten.neg_),
    *(torch.ops.aten.clamp_, torch.ops.aten.clamp_min_, torch.ops.aten.clamp_max_, torch.ops.aten.erfinv_),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Write:
    """What is done to a tensor in place. rows: of its first dim; None for all of it. others, named: the arguments."""

    function: Any
    others: tuple[Any, ...]
    named: Mapping[str, Any]
    rows: Range | None


@dataclass(slots=True, kw_only=True)
class _Recorded:
    """What is done to a tensor. problem: what cannot be done part by part, "" if all can."""

    tensor: torch.Tensor
    writes: list[_Write] = field(default_factory=list)
    problem: str = ""


class _Recorder(TorchDispatchMode):
    """Records what is done to tensors without values. of: by the name of each; tensors are known by their storage."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        self.of: dict[str, _Recorded] = {}
        self._names: dict[int, str] = {}
        for name, tensor in tensors.items():
            first = self._names.setdefault(tensor.untyped_storage()._cdata, name)
            self.of[name] = self.of.get(first) or _Recorded(tensor=tensor)

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function._schema.is_mutable:
            for i, x in enumerate(args):
                name = (
                    self._names.get(x.untyped_storage()._cdata) if isinstance(x, torch.Tensor) and x.is_meta else None
                )
                if name is not None and (i == 0 or function.overloadpacket is not torch.ops.aten.copy_):
                    self._note(self.of[name], function, args, kwargs or {})
        return function(*args, **(kwargs or {}))

    def _note(self, own: _Recorded, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        name, rows = function.overloadpacket, _rows(args[0], own.tensor)
        others, named = args[1:], {key: value for key, value in kwargs.items() if key != "generator"}
        given = (*others, *named.values())
        plain = all(not isinstance(x, torch.Tensor) or (not x.is_meta and x.dim() == 0) for x in given)
        copied = name is torch.ops.aten.copy_ and not others[0].is_meta
        if rows == () or name not in _SET | _CHANGED or not (plain or copied):
            own.problem = own.problem or str(name).removeprefix("aten.")
            return
        if rows is None and name in _SET:
            own.writes, own.problem = [], ""
        if copied:
            others = (others[0].detach().expand(args[0].shape).clone().reshape(args[0].shape),)
        own.writes.append(_Write(function=function, others=tuple(others), named=named, rows=rows or None))


def _rows(seen: torch.Tensor, whole: torch.Tensor) -> Range | tuple[()] | None:
    """Return which rows of a tensor another one is that shares its storage: None for all of it, () where it is none."""
    if seen.shape == whole.shape and seen.stride() == whole.stride():
        return None
    row = whole.stride(0) if whole.dim() else 0
    is_plain = whole.is_contiguous() and seen.is_contiguous() and row > 0
    if not is_plain or seen.storage_offset() % row or seen.numel() % row:
        return ()
    low = seen.storage_offset() // row
    return (low, low + seen.numel() // row)


def own_values(module: nn.Module, wanted: Collection[str], seed: int, otherwise: Source) -> tuple[Source, list[str]]:
    """Return a source of the values that a module's own initialisation gives its tensors on the device 'meta'.

    Args:
        module: it is left as it was.
        wanted: names of the tensors.
        seed: another one gives other numbers.
        otherwise: of parameters whose initialisation is not known, or cannot be done part by part.

    Returns:
        The source, which raises ProgramError for a buffer whose value is not known, and notes.
    """
    copied = deepcopy(module)
    tensors = [*copied.named_parameters(remove_duplicate=False), *copied.named_buffers(remove_duplicate=False)]
    buffers = {name for name, _ in copied.named_buffers(remove_duplicate=False)}
    recorder = _Recorder({name: tensor for name, tensor in tensors if name in wanted})
    notes = []
    with torch.random.fork_rng(devices=[]), torch.no_grad(), torch.device("cpu"), _cutting_off(), recorder:
        # What it draws by itself, to be copied.
        torch.manual_seed(seed)
        for what, initialise in _initialisations(copied):
            try:
                initialise()
            # The code is the module's own: it may raise anything.
            except Exception as error:  # noqa: BLE001
                notes.append(f"{what} failed on the device 'meta' ({type(error).__name__}: {error})")
    unknown = [name for name, own in recorder.of.items() if (own.problem or not own.writes) and name not in buffers]
    if unknown:
        some = ", ".join(unknown[:3]) + (" …" if len(unknown) > 3 else "")
        notes.append(
            f"the own initialisation of {len(unknown)} parameters is not known part by part ({some}): they are normal "
            "with deviation 1 / √(inputs of an output), ones what scales, zeros what is added"
        )

    def values(names: Sequence[str], shape: tuple[int, ...], held: Held) -> torch.Tensor:
        name = names[0]
        own = recorder.of[name]
        if own.writes and not own.problem:
            return _replayed(own, name, seed, shape, held)
        if name in buffers:
            raise ProgramError(
                f"buffer {name!r} is on the device 'meta', and no initialisation of the module gives it a value; make "
                "it on the CPU, or give the module a method init_weights that fills it"
            )
        return otherwise(names, shape, held)

    return values, notes


@contextmanager
def _cutting_off() -> Iterator[None]:
    """Have `trunc_normal_` do something on the device 'meta', where PyTorch leaves it undone."""
    functions, name = vars(nn.init), "_no_grad_trunc_normal_"
    before = functions[name]
    functions[name] = _cut_off
    try:
        yield
    finally:
        functions[name] = before


def _cut_off(tensor: torch.Tensor, mean: float, std: float, a: float, b: float, **_: Any) -> torch.Tensor:
    """Make normal numbers from `a` to `b`."""
    if min(mean - a, b - mean) > 5 * std:
        return tensor.normal_(mean, std).clamp_(a, b)
    low, high = (erf((bound - mean) / std / sqrt(2)) for bound in (a, b))
    return tensor.uniform_(low, high).erfinv_().mul_(std * sqrt(2)).add_(mean).clamp_(a, b)


def _initialisations(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield what gives a module its first values, in the order in which constructors run it, with what it is called."""
    for own in reversed(list(module.modules())):
        for name in ("reset_parameters", "_reset_parameters"):
            method = getattr(own, name, None)
            if _takes(method, 0):
                yield f"{type(own).__name__}.{name}", method
    for name in ("initialize_weights", "init_weights"):
        method = getattr(module, name, None)
        if _takes(method, 0):
            yield f"{type(module).__name__}.{name}", method
            return
    method = getattr(module, "_init_weights", None)
    if _takes(method, 1):
        yield f"{type(module).__name__}._init_weights", lambda: module.apply(method)


def _takes(method: Any, count: int) -> bool:
    """Return whether a method is there that is called with so many arguments."""
    if not callable(method):
        return False
    needed = [
        parameter
        for parameter in signature(method).parameters.values()
        if parameter.default is Parameter.empty
        and parameter.kind not in (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
    ]
    return len(needed) == count


def _replayed(own: _Recorded, name: str, seed: int, shape: tuple[int, ...], held: Held) -> torch.Tensor:
    dtype = own.tensor.dtype
    # Numbers are drawn, and scaled, in float32 at least.
    made = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
    found = torch.empty([sum(high - low for low, high in runs) for runs in held], dtype=made)
    drawn = 0
    for write in own.writes:
        function = write.function.overloadpacket
        for part, there, low in _within(found, held, write.rows):
            if function in _DRAWN:
                key = layer_key(f"weight {seed} {name}" + (f" {drawn}" if drawn else ""))
                numbers = _numbers(write, shape, there, key)
                if part is found and numbers.dtype == made:
                    found = numbers
                else:
                    part.copy_(numbers)
            elif function is torch.ops.aten.copy_:
                rows = write.others[0].reshape(-1, *shape[1:]) if shape else write.others[0]
                moved = (tuple((a - low, b - low) for a, b in there[0]), *there[1:]) if shape else there
                part.copy_(cut(rows, moved))
            else:
                write.function(part, *write.others, **write.named)
        drawn += function in _DRAWN
    return found


def _numbers(write: _Write, shape: tuple[int, ...], held: Held, key: Any) -> torch.Tensor:
    """Return numbers of a distribution by its two arguments; where these are not given, PyTorch has defaults."""
    threads = torch.get_num_threads()
    schema = write.function._schema.arguments[1:3]
    first, second = (*write.others, *(write.named.get(own.name, own.default_value) for own in schema))[:2]
    if write.function.overloadpacket is torch.ops.aten.normal_:
        return torch.from_numpy(normal_part(shape, held, key, mean=first, deviation=second, threads=threads))
    return torch.from_numpy(uniform_part(shape, held, key, low=first, high=second, threads=threads))


def _within(part: torch.Tensor, held: Held, rows: Range | None) -> Iterator[tuple[torch.Tensor, Held, int]]:
    """Yield what a part has of some rows of its tensor, as views of it, what these hold, and the first of the rows."""
    if rows is None:
        yield part, held, 0
        return
    begin = 0
    for low, high in held[0]:
        own = (max(low, rows[0]), min(high, rows[1]))
        if own[0] < own[1]:
            yield part.narrow(0, begin + own[0] - low, own[1] - own[0]), ((own,), *held[1:]), rows[0]
        begin += high - low
