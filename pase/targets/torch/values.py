"""Sources of initial values of parameters: a model's own tensors, a file, or random numbers; shard by shard.

A `Source` returns what one rank holds of a parameter, and allocates no more than that.

The initialisation of a module on the device 'meta' runs once on a copy without values, and its in-place operations on
each parameter and buffer are recorded: random numbers, fills, copies, scaling. A rank then applies them to its shards.
Random numbers are counter-based (`training/counted.py`), of the same distribution.
"""

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from inspect import Parameter, signature
from itertools import product
from math import erf, sqrt
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from pase.common.array_files import reading
from pase.common.documents import DocumentSource, open_regular, read_text
from pase.common.structs import Document, read
from pase.common.words import short
from pase.errors import ProgramError
from pase.sharding.boxes import Range
from pase.targets.torch.failures import naming_lost_ranks
from pase.targets.torch.placements import Held, place
from pase.targets.training.counted import layer_key, normal_part, uniform_part


class Source(Protocol):
    """Gives parts of tensors."""

    def __call__(self, names: Sequence[str], shape: tuple[int, ...], held: Held) -> torch.Tensor: ...


def cut(tensor: torch.Tensor, held: Held) -> torch.Tensor:
    """Return the held part of a full tensor: a view of it where that is one box."""
    for dim, runs in enumerate(held):
        if runs == ((0, tensor.shape[dim]),):
            continue
        parts = [tensor.narrow(dim, low, high - low) for low, high in runs or ((0, 0),)]
        tensor = parts[0] if len(parts) == 1 else torch.cat(parts, dim)
    return tensor


def from_tensors(tensors: Mapping[str, torch.Tensor]) -> Source:
    """Return a source of full tensors: a model's own, or a state_dict; their shapes are checked."""

    def values(names: Sequence[str], shape: tuple[int, ...], held: Held) -> torch.Tensor:
        name = _found(names, tensors, "the given state")
        tensor = tensors[name]
        if not isinstance(tensor, torch.Tensor):
            raise ProgramError(f"{name!r} of the given state is a {type(tensor).__name__}; expected a tensor")
        _check(name, tuple(tensor.shape), shape)
        if tensor.device.type == "meta":
            raise ProgramError(
                f"{name!r} of the given state is on the device 'meta' and has no values; give parallelize weights=… "
                "with values (a state_dict, or a file), or none, to begin with those of the module's own initialisation"
            )
        return cut(tensor.detach(), held).clone(memory_format=torch.contiguous_format)

    return values


def from_first_rank(tensors: Mapping[str, torch.Tensor], device: object) -> Source:
    """Return a source of a model's own tensors, broadcast from rank 0; all ranks request the same ones, in one order.

    device: where tensors must be for communication between ranks.
    """
    own = from_tensors(tensors)
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return own

    def values(names: Sequence[str], shape: tuple[int, ...], held: Held) -> torch.Tensor:
        everything = tuple(((0, extent),) for extent in shape)
        tensor = own(names, shape, everything).to(device)
        with naming_lost_ranks():
            # As bytes: not all backends know all types.
            dist.broadcast(tensor.reshape(-1).view(torch.uint8), 0)
        # A view would keep all of it alive.
        return cut(tensor, held).clone(memory_format=torch.contiguous_format)

    return values


def from_file(path: str | Path) -> Source:
    """Return a source of a file: safetensors (or the index of several), or one of torch.save, memory-mapped.

    Raises ProgramError where the file does not exist.
    """
    path = Path(path)
    if path.is_dir():
        found = [
            path / name for name in ("model.safetensors.index.json", "model.safetensors") if (path / name).exists()
        ]
        if not found:
            raise ProgramError(f"{path} holds no model.safetensors; give the file of weights itself")
        path = found[0]
    if not path.exists():
        raise ProgramError(f"the file of weights {path} does not exist")
    with reading(ProgramError, f"cannot read weights from {path}", "expected safetensors, or what torch.save wrote"):
        open_regular(path).close()
        if path.name.endswith(".safetensors.index.json") or path.suffix == ".safetensors":
            return _from_safetensors(path)
        loaded = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    for key in ("state_dict", "model", "module"):
        if isinstance(loaded, Mapping) and isinstance(loaded.get(key), Mapping):
            loaded = loaded[key]
    if not isinstance(loaded, Mapping):
        raise ProgramError(f"{path} holds a {type(loaded).__name__}; expected the tensors of a state_dict by name")
    return from_tensors(loaded)


def random_values(moments: Mapping[str, tuple[float, float]], seed: int = 0) -> Source:
    """Return a source of normal random numbers, from the seed, the parameter's name and an element's index.

    They do not depend on the strategy or the number of ranks, and no rank generates more than its shard. They are
    float32, generated on as many threads as PyTorch has (`training/counted.py`). moments: mean and standard deviation
    of each parameter by its first name; others are zeros.
    """

    def values(names: Sequence[str], shape: tuple[int, ...], held: Held) -> torch.Tensor:
        mean, deviation = moments.get(names[0], (0.0, 0.0))
        key = layer_key(f"weight {seed} {names[0]}")
        threads = torch.get_num_threads()
        return torch.from_numpy(normal_part(shape, held, key, mean=mean, deviation=deviation, threads=threads))

    return values


def _from_safetensors(path: Path) -> Source:
    try:
        from safetensors import safe_open
    except ImportError:
        raise ProgramError(f"{path} is read by the package safetensors; install it: pip install safetensors") from None
    files = [path]
    if path.suffix == ".json":
        files = [path.parent / name for name in _files_of_index(path)]
    opened: list[Any] = [safe_open(file, framework="pt") for file in files]
    where: dict[str, Any] = {name: file for file in opened for name in file.keys()}  # noqa: SIM118

    def values(names: Sequence[str], shape: tuple[int, ...], held: Held) -> torch.Tensor:
        name = _found(names, where, str(path))
        view: Any = where[name].get_slice(name)
        _check(name, tuple(view.get_shape()), shape)
        if not shape:
            whole: torch.Tensor = where[name].get_tensor(name)
            return whole.clone()
        made: torch.Tensor | None = None
        counts = [sum(high - low for low, high in runs) for runs in held]
        if 0 in counts:
            # Of the file's type.
            nothing: torch.Tensor = view[tuple(slice(0, 0) for _ in counts)]
            return nothing.new_empty(counts)
        for box in product(*held):
            part = view[tuple(slice(low, high) for low, high in box)]
            if made is None:
                # The tensor may be the file itself, mapped to memory.
                made = part.new_empty(counts)
            made[tuple(slice(*place(runs, run)) for runs, run in zip(held, box, strict=True))] = part
        assert made is not None, "a rank holds something of every parameter"
        return made

    return values


def _files_of_index(path: Path) -> list[str]:
    """Return the names of the files, in the folder of an index, that hold the tensors."""
    called = f"index of weights {path}"
    try:
        document = json.loads(read_text(path, ProgramError, called))
    except (ValueError, RecursionError) as error:
        raise ProgramError(f"{called} is not complete JSON ({error}); it may be truncated") from None
    source = DocumentSource(ProgramError, called)
    files = read(_IndexDocument, document, source).weight_map
    for name, file in files.items():
        if Path(file).name != file:
            raise source.fail(f"weight_map.{name}", f"is {short(file)!r}; expected a file name in the index's folder")
    return list(dict.fromkeys(files.values()))


class _IndexDocument(Document):
    weight_map: dict[str, str]


def _found(names: Sequence[str], given: Mapping[str, Any], where: str) -> str:
    found = next((name for name in names if name in given), None)
    if found is None:
        some = ", ".join(sorted(given)[:5])
        raise ProgramError(f"{where} has no tensor {names[0]!r} of the model; it has {len(given)}: {some} …")
    return found


def _check(name: str, shape: tuple[int, ...], expected: tuple[int, ...]) -> None:
    if shape != expected:
        raise ProgramError(
            f"parameter {name!r} has shape {list(shape)} where the values are from, {list(expected)} here"
        )


# -- values of a module's own initialisation


_DRAWN = {torch.ops.aten.normal_, torch.ops.aten.uniform_}
_SET = {*_DRAWN, torch.ops.aten.zero_, torch.ops.aten.fill_, torch.ops.aten.copy_}
_CHANGED = {
    *(torch.ops.aten.add_, torch.ops.aten.sub_, torch.ops.aten.mul_, torch.ops.aten.div_, torch.ops.aten.neg_),
    *(torch.ops.aten.clamp_, torch.ops.aten.clamp_min_, torch.ops.aten.clamp_max_, torch.ops.aten.erfinv_),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Write:
    """An in-place operation on a tensor; rows: of its first dim, None for all of it. others, named: the arguments."""

    function: Any
    others: tuple[Any, ...]
    named: Mapping[str, Any]
    rows: Range | None


@dataclass(slots=True, kw_only=True)
class _Recorded:
    """The operations on a tensor; problem: what cannot be done shard by shard, "" if all can."""

    tensor: torch.Tensor
    writes: list[_Write] = field(default_factory=list)
    problem: str = ""


class _Recorder(TorchDispatchMode):
    """Records operations on tensors without values; of: by the name of each; tensors are identified by storage."""

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
    """Return the rows of a tensor that a view of its storage covers: None for all, () for other views."""
    if seen.shape == whole.shape and seen.stride() == whole.stride():
        return None
    row = whole.stride(0) if whole.dim() else 0
    is_plain = whole.is_contiguous() and seen.is_contiguous() and row > 0
    if not is_plain or seen.storage_offset() % row or seen.numel() % row:
        return ()
    low = seen.storage_offset() // row
    return (low, low + seen.numel() // row)


def own_values(module: nn.Module, wanted: Collection[str], seed: int, otherwise: Source) -> tuple[Source, list[str]]:
    """Return a source of the values that a module's own initialisation gives tensors on the device 'meta', and notes.

    Args:
        module: The module; it is restored afterwards.
        wanted: Names of the tensors.
        seed: Seed of random numbers.
        otherwise: Source of parameters whose initialisation is unknown, or cannot be done shard by shard.

    The source raises ProgramError for a buffer whose value is unknown.
    """
    copied = deepcopy(module)
    tensors = [*copied.named_parameters(remove_duplicate=False), *copied.named_buffers(remove_duplicate=False)]
    buffers = {name for name, _ in copied.named_buffers(remove_duplicate=False)}
    recorder = _Recorder({name: tensor for name, tensor in tensors if name in wanted})
    notes = []
    with torch.random.fork_rng(devices=[]), torch.no_grad(), torch.device("cpu"), _cutting_off(), recorder:
        # Values that it draws itself, to be copied.
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
    """Yield the functions that initialise a module, in the order of its constructors, with their arguments."""
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
    """Yield the views of a part that cover some rows of its tensor, the parts that these hold, and their first row."""
    if rows is None:
        yield part, held, 0
        return
    begin = 0
    for low, high in held[0]:
        own = (max(low, rows[0]), min(high, rows[1]))
        if own[0] < own[1]:
            yield part.narrow(0, begin + own[0] - low, own[1] - own[0]), ((own,), *held[1:]), rows[0]
        begin += high - low
