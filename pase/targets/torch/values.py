"""Where the first values of parameters are from: a model's own tensors, a file, or random numbers; part by part.

A `Source` is asked for what one rank holds of a parameter and makes no more of it than that.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

from pase.errors import ProgramError
from pase.sharding.boxes import Box
from pase.targets.torch.launch import naming_lost_ranks
from pase.targets.torch.placements import Held, place
from pase.targets.training.masks import layer_key
from pase.targets.training.normal import normal_part


class Source(Protocol):
    """Gives parts of tensors."""

    def __call__(self, names: Sequence[str], shape: tuple[int, ...], held: Held) -> torch.Tensor: ...


def cut(tensor: torch.Tensor, held: Held) -> torch.Tensor:
    """Return what is held of a whole tensor: a view of it where that is one box."""
    for dim, runs in enumerate(held):
        if runs == ((0, tensor.shape[dim]),):
            continue
        parts = [tensor.narrow(dim, low, high - low) for low, high in runs]
        tensor = parts[0] if len(parts) == 1 else torch.cat(parts, dim)
    return tensor


def _boxes(held: Held) -> Iterator[Box]:
    return product(*held)


def from_tensors(tensors: Mapping[str, torch.Tensor]) -> Source:
    """Return a source of whole tensors: a model's own, or a state_dict; their shapes are checked."""

    def values(names: Sequence[str], shape: tuple[int, ...], held: Held) -> torch.Tensor:
        name = _found(names, tensors, "the given state")
        tensor = tensors[name]
        _check(name, tuple(tensor.shape), shape)
        if tensor.device.type == "meta":
            raise ProgramError(
                f"{name!r} of the given state is on the device 'meta' and has no values; give parallelize weights=… "
                "with values (a state_dict, or a file), or none, to begin with those of the module's own initialisation"
            )
        return cut(tensor.detach(), held).clone(memory_format=torch.contiguous_format)

    return values


def from_first_rank(tensors: Mapping[str, torch.Tensor], device: object) -> Source:
    """Return a source of a model's own tensors, as rank 0 has them; all ranks ask it for the same ones, in one order.

    device: where tensors have to be that go between ranks.
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
        # A view would keep all of it.
        return cut(tensor, held).clone(memory_format=torch.contiguous_format)

    return values


def from_file(path: str | Path) -> Source:
    """Return a source of a file: safetensors (or the index of several), or what torch.save wrote, mapped to memory.

    Raises ProgramError where there is no such file.
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
        raise ProgramError(f"there is no file of weights {path}")
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
    """Return a source of normal random numbers: a function of the seed, the parameter's name and an element's number.

    The strategy and the number of ranks change nothing of them, and no rank makes more than its part. They are float32,
    made by as many threads as PyTorch has (`training/normal.py`).

    Args:
        moments: the mean and the standard deviation of each parameter by its first name; else all are zeros.
        seed: another one gives other numbers.
    """

    def values(names: Sequence[str], shape: tuple[int, ...], held: Held) -> torch.Tensor:
        mean, deviation = moments.get(names[0], (0.0, 0.0))
        key = layer_key(f"weight {seed} {names[0]}")
        threads = torch.get_num_threads()
        return torch.from_numpy(normal_part(shape, held, key, mean=mean, deviation=deviation, threads=threads))

    return values


def _from_safetensors(path: Path) -> Source:
    import json

    try:
        from safetensors import safe_open
    except ImportError:
        raise ProgramError(f"{path} is read by the package safetensors; install it: pip install safetensors") from None
    files = [path]
    if path.suffix == ".json":
        files = [path.parent / name for name in dict.fromkeys(json.loads(path.read_text())["weight_map"].values())]
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
        for box in _boxes(held):
            part = view[tuple(slice(low, high) for low, high in box)]
            if made is None:
                # What is read may be the file itself, mapped to memory.
                made = part.new_empty(counts)
            made[tuple(slice(*place(runs, run)) for runs, run in zip(held, box, strict=True))] = part
        assert made is not None, "a rank holds something of every parameter"
        return made

    return values


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
