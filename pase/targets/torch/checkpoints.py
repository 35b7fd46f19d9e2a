"""Checkpoints of a parallel model and its optimizer, which any plan and any number of ranks load.

`save_checkpoint` writes them with torch.distributed.checkpoint into a new folder, has it on disk, and gives it its name
last: who looks finds whole checkpoints alone, whenever a rank ends. Parameters whose parts lie apart (`placements.py`)
are written box by box; `checkpointable` does the same for whoever calls torch.distributed.checkpoint.
"""

import json
import os
import pickle
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol, TypeVar, runtime_checkable

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor

from pase.common.documents import Field
from pase.errors import PaseError, ProgramError
from pase.sharding.boxes import Box
from pase.targets.torch.messages import told_by_all
from pase.targets.torch.parameters import held_by
from pase.targets.torch.placements import Held, place
from pase.targets.training.checkpointing import (
    NEWEST,
    CheckpointFolder,
    Kept,
    checkpoint_path,
    list_checkpoints,
    prune,
    remove,
    sync_folder,
    with_another,
)

SCHEMA_VERSION = 1
_RECORD = "training.json"
_HOW = "go on from"
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A checkpoint that was loaded. step: steps done. extra: what was saved with it."""

    path: Path
    step: int
    extra: Mapping[str, Any] = field(default_factory=dict)


@runtime_checkable
class InStages(Protocol):
    """A model of which each rank has some parameters and buffers alone."""

    @property
    def all_names(self) -> tuple[str, ...]: ...

    def owns(self, name: str) -> bool:
        """Return whether this rank is of those that save one."""
        ...


# -- tensors whose parts lie apart


class Part(torch.Tensor):
    """A rank's part of a tensor as torch.distributed.checkpoint asks for it: box by box.

    held: what it holds. whole: the shape of the tensor.
    """

    held: Held
    whole: torch.Size

    @classmethod
    def of(cls, local: torch.Tensor, held: Held, shape: Sequence[int]) -> "Part":
        """Return a part; its storage is that of the tensor that is given."""
        found: Part = local.detach().as_subclass(cls)
        found.held, found.whole = held, torch.Size(shape)
        return found

    def size(self, *_: Any) -> Any:
        """Return the shape of the whole tensor, which is compared with that of the one that was saved."""
        return self.whole

    def __create_write_items__(self, name: str, _: Any) -> list[WriteItem]:
        properties = TensorProperties.create_from_tensor(self.as_subclass(torch.Tensor))
        data = [
            TensorWriteData(chunk=chunk, properties=properties, size=self.whole)
            for chunk in self.__create_chunk_list__()
        ]
        return [
            WriteItem(index=MetadataIndex(name, own.chunk.offsets, number), type=WriteItemType.SHARD, tensor_data=own)
            for number, own in enumerate(data)
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [
            ChunkStorageMetadata(
                offsets=torch.Size([low for low, _ in box]), sizes=torch.Size([high - low for low, high in box])
            )
            for box in self._boxes
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        """Return the part of the shard that is one box, to be read or written."""
        box = next(own for own in self._boxes if tuple(low for low, _ in own) == tuple(index.offset or ()))
        found = self.detach().as_subclass(torch.Tensor)
        for dim, (runs, run) in enumerate(zip(self.held, box, strict=True)):
            low, high = place(runs, run)
            found = found.narrow(dim, low, high - low)
        return found

    @property
    def _boxes(self) -> list[Box]:
        return list(product(*self.held))


def checkpointable(state: Any) -> Any:
    """Return a state_dict, or any dict and list of such, that torch.distributed.checkpoint saves and loads into.

    The tensors are those that are given. Without this, torch.distributed.checkpoint refuses to save parameters of
    which ranks hold parts that lie apart, and what an optimizer has of them.
    """
    if isinstance(state, DTensor):
        held = held_by(state)
        if all(len(runs) == 1 for runs in held):
            return state
        return Part.of(state._local_tensor, held, state.shape)
    if isinstance(state, Mapping):
        return {key: checkpointable(value) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return [checkpointable(value) for value in state]
    return state


# -- saving


def save_checkpoint(
    folder: str | Path,
    module: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    step: int,
    extra: Mapping[str, Any] | None = None,
    keep: int = 2,
) -> Path:
    """Write a checkpoint, whole or not at all, and return its path; all ranks call it.

    Args:
        folder: that all ranks see; the checkpoint becomes a folder in it.
        module: the parallel model.
        optimizer: of its parameters.
        step: how many steps are done.
        extra: what else is to be had again when it is loaded, as JSON has it.
        keep: how many checkpoints are left, this one included; older ones are deleted.

    Raises:
        ProgramError: it cannot be written. Older ones are as they were.
    """
    groups = None if optimizer is None else _of_all_ranks(module, _options(module, optimizer))
    said = {"optimizer": groups, "mask_state": getattr(module, "mask_state", None)}
    state = {
        kind: {name: x for name, x in own.items() if not isinstance(module, InStages) or module.owns(name)}
        for kind, own in _state(module, optimizer).items()
    }
    return save_state(folder, state, step=step, extra=extra or {}, said=said, keep=keep)


def save_state(
    folder: str | Path,
    state: Mapping[str, Any],
    *,
    step: int,
    extra: Mapping[str, Any],
    said: Mapping[str, Any] = MappingProxyType({}),
    keep: int,
) -> Path:
    """Write tensors as a checkpoint, whole or not at all, and return its path; all ranks call it.

    state: DTensors, whole tensors or `Part`s, in mappings. said: what else the record says. Others as `save_checkpoint`
    has them, whose errors it raises.
    """
    folder = Path(folder)
    path = checkpoint_path(folder, step)
    part = folder / f".{path.name}.part"
    record = {"schema_version": SCHEMA_VERSION, "step": step, "extra": dict(extra), **said}
    text = json.dumps(record, indent=1)
    _on_first(lambda: _begin(part), path)
    dcp.save(
        checkpointable(state),
        storage_writer=dcp.FileSystemWriter(part, sync_files=True),
        no_dist=not dist.is_initialized(),
    )
    _on_first(lambda: _finish(part, path, text), path)
    _on_first(lambda: prune(folder, step=step, keep=keep), path)
    return path


def _begin(part: Path) -> None:
    # What an earlier attempt left is no checkpoint.
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)


def _finish(part: Path, path: Path, text: str) -> None:
    with (part / _RECORD).open("w", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
    sync_folder(part)
    if path.exists():
        remove(path)
    part.rename(path)
    sync_folder(path.parent)


def _on_first(action: Callable[[], None], path: Path) -> None:
    try:
        from_first(action)
    except OSError as error:
        raise ProgramError(f"cannot write checkpoint {path}: {error}; older ones are as they were") from None


def from_first(action: Callable[[], T]) -> T:
    """Have rank 0 do something, and return on all ranks what it returns, or raise its PaseError or OSError."""
    told: list[Any] = [None, None]
    if not dist.is_initialized() or dist.get_rank() == 0:
        try:
            told[0] = action()
        except (OSError, PaseError) as error:
            told[1] = error
    if dist.is_initialized():
        dist.broadcast_object_list(told, src=0)
    if told[1] is not None:
        raise told[1]
    found: T = told[0]
    return found


# -- loading


def checkpoints(folder: str | Path) -> list[Path]:
    """Return the whole checkpoints in a folder, the oldest first."""
    return [path for _, path in reversed(list_checkpoints(Path(folder))) if (path / _RECORD).is_file()]


def load_checkpoint(
    folder: str | Path, module: nn.Module, optimizer: torch.optim.Optimizer | None = None
) -> Checkpoint | None:
    """Load the newest checkpoint of a folder, or a checkpoint itself, into a parallel model and its optimizer.

    It may have been saved under another plan and by another number of ranks; all ranks call it. Files of checkpoints
    are read as torch.distributed.checkpoint reads them: load only those that you trust.

    Returns:
        Which one that is; None where the folder holds none, and nothing is changed.

    Raises:
        ProgramError: it is of another model, or of another optimizer; it is damaged, and which one is not.
    """
    # One that is being renamed may be seen by some ranks alone.
    path = from_first(lambda: newest(Path(folder)))
    if path is None:
        return None
    opened = Opened.found(path)
    state: dict[str, Any] = {"model": module.state_dict()}
    elsewhere = module.all_names if isinstance(module, InStages) else ()
    _check(path, {name: tuple(value.shape) for name, value in state["model"].items()}, opened.shapes, elsewhere)
    slots: dict[str, dict[str, torch.Tensor]] = {}
    if optimizer is not None:
        if opened.record["optimizer"] is None:
            raise ProgramError(f"checkpoint {path} holds no optimizer's state; load the model alone")
        slots = state["optimizer"] = _empty_slots(module, opened.saved)
    opened.load(state)
    if optimizer is not None:
        _set_optimizer(path, module, optimizer, slots, opened.record["optimizer"])
    masks = opened.record.get("mask_state")
    if masks is not None and hasattr(module, "mask_state"):
        module.mask_state = masks
    return Checkpoint(path=path, step=opened.step, extra=opened.extra)


def newest(folder: Path) -> Path | None:
    """Return a checkpoint itself, or the newest one of a folder, None where there is none."""
    return folder if (folder / _RECORD).is_file() else next(reversed(checkpoints(folder)), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """A checkpoint that can be read. record: what it says of itself. saved: what there is of tensors, by name."""

    path: Path
    record: Mapping[str, Any]
    saved: Mapping[str, Any]

    @classmethod
    def found(cls, path: Path) -> "Opened":
        """Return a checkpoint; the errors of `of`, with the newest one beside it that is whole."""
        try:
            return cls.of(path)
        except ProgramError as error:
            raise with_another(error, path, cls.of, how=_HOW) from None

    @classmethod
    def of(cls, path: Path) -> "Opened":
        """Return a checkpoint; ProgramError where it is damaged, or of another version."""
        try:
            record = json.loads((path / _RECORD).read_text(encoding="utf-8"))
            metadata = dcp.FileSystemReader(path).read_metadata()
            version = record.get("schema_version")
            for part in metadata.storage_data.values():
                end, size_bytes = part.offset + part.length, (path / part.relative_path).stat().st_size
                if end > size_bytes:
                    raise ValueError(f"{part.relative_path} has {size_bytes} bytes; expected {end} or more")
        except (OSError, ValueError, AttributeError, EOFError, pickle.UnpicklingError) as error:
            raise ProgramError(f"checkpoint {path} is damaged: {error}") from None
        if version != SCHEMA_VERSION:
            raise ProgramError(
                f"checkpoint {path} has schema_version {version!r}, expected {SCHEMA_VERSION}; "
                "load it with the version of pase that wrote it"
            )
        return cls(path=path, record=record, saved=metadata.state_dict_metadata)

    @property
    def step(self) -> int:
        return int(self.record["step"])

    @property
    def extra(self) -> Mapping[str, Any]:
        found: Mapping[str, Any] = self.record["extra"]
        return found

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Those of the model's tensors, by name."""
        tensors = ((name, own) for name, own in self.saved.items() if isinstance(own, TensorStorageMetadata))
        return {n.removeprefix("model."): tuple(own.size) for n, own in tensors if n.startswith("model.")}

    def load(self, state: Mapping[str, Any]) -> None:
        try:
            dcp.load(
                checkpointable(state),
                storage_reader=dcp.FileSystemReader(self.path),
                no_dist=not dist.is_initialized(),
            )
        except dcp.CheckpointException as error:
            first = next(iter(error.failures.values()))[0]
            damaged = ProgramError(f"checkpoint {self.path} is damaged: {first}")
            raise with_another(damaged, self.path, Opened.of, how=_HOW) from None


def _check(
    path: Path, own: Mapping[str, tuple[int, ...]], saved: Mapping[str, tuple[int, ...]], elsewhere: Sequence[str]
) -> None:
    """Raise ProgramError where a model has other tensors than are saved; elsewhere: those that other ranks have."""
    for name, shape in own.items():
        if saved.get(name) != shape:
            what = "none" if name not in saved else f"one of shape {list(saved[name])}"
            raise ProgramError(
                f"checkpoint {path} is of another model: {name!r} has shape {list(shape)} here, and there is {what} in "
                "it"
            )
    more = [name for name in saved if name not in own and name not in elsewhere]
    if more:
        raise ProgramError(f"checkpoint {path} is of another model: it holds {more[0]!r}, which there is not here")


# -- of programs


@dataclass(frozen=True, slots=True, kw_only=True)
class RankCheckpoint(Kept):
    """A checkpoint of a program that was found to go on from."""

    opened: Opened

    @property
    def path(self) -> Path:
        return self.opened.path

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return self.opened.shapes


@dataclass(frozen=True, slots=True, kw_only=True)
class RankCheckpoints(CheckpointFolder):
    """Where and when ranks write checkpoints together; each one is a folder of its own."""

    def found(self) -> RankCheckpoint | None:
        """Return the checkpoint to go on from, None to begin with the first step; all ranks call it.

        Raises ProgramError where it is damaged, where the folder holds another training's, where it cannot be made.
        """
        path = from_first(self._chosen)
        if path is None:
            return None
        opened = Opened.found(path)
        said = {"step": opened.step, **opened.extra}
        return RankCheckpoint.read(Field(said, "", ProgramError, f"checkpoint {path}"), opened=opened)

    def _chosen(self) -> Path | None:
        self.begin()
        return None if self.resume is None else newest(self.folder if self.resume == NEWEST else Path(self.resume))


# -- optimizers


def _state(module: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, Any]:
    state: dict[str, Any] = {"model": module.state_dict()}
    if optimizer is not None:
        names = {parameter: name for name, parameter in module.named_parameters()}
        state["optimizer"] = {
            names[parameter]: {slot: value for slot, value in slots.items() if isinstance(value, torch.Tensor)}
            for parameter, slots in optimizer.state.items()
        }
    return state


def _options(module: nn.Module, optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    names = {parameter: name for name, parameter in module.named_parameters()}
    found = []
    for group in optimizer.param_groups:
        strange = [parameter for parameter in group["params"] if parameter not in names]
        if strange:
            raise ProgramError("the optimizer has a parameter that the module does not have; give the module it is of")
        options = {key: value for key, value in group.items() if key != "params"}
        plain = {key: value.item() if isinstance(value, torch.Tensor) else value for key, value in options.items()}
        found.append({**plain, "params": [names[parameter] for parameter in group["params"]]})
    return found


def _of_all_ranks(module: nn.Module, groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the groups of an optimizer with the parameters that other ranks have of a model in stages."""
    if not isinstance(module, InStages):
        return groups
    of_ranks = told_by_all([group["params"] for group in groups])
    found = []
    for number, group in enumerate(groups):
        every = {name for own in of_ranks for name in own[number]}
        found.append({**group, "params": [name for name in module.all_names if name in every]})
    return found


def _empty_slots(module: nn.Module, saved: Mapping[str, Any]) -> dict[str, dict[str, torch.Tensor]]:
    """Return tensors to load what an optimizer had: as its parameter is laid out where they have its shape."""
    found: dict[str, dict[str, torch.Tensor]] = {}
    for name, parameter in module.named_parameters():
        prefix = f"optimizer.{name}."
        for key, own in saved.items():
            slot = key.removeprefix(prefix)
            if slot == key or not isinstance(own, TensorStorageMetadata) or "." in slot:
                continue
            dtype = own.properties.dtype
            is_like = own.size == parameter.shape
            made = torch.zeros_like(parameter, dtype=dtype) if is_like else torch.zeros(own.size, dtype=dtype)
            found.setdefault(name, {})[slot] = made.detach()
    return found


def _set_optimizer(
    path: Path,
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    slots: Mapping[str, Mapping[str, torch.Tensor]],
    groups: list[dict[str, Any]],
) -> None:
    of_rank = _options(module, optimizer)
    own = _of_all_ranks(module, of_rank)
    if [group["params"] for group in own] != [group["params"] for group in groups]:
        raise ProgramError(
            f"checkpoint {path}: the optimizer's groups hold other parameters here than there; make them as they were"
        )
    numbers = {name: number for number, name in enumerate(name for group in of_rank for name in group["params"])}
    loaded = []
    for group, now in zip(groups, optimizer.param_groups, strict=True):
        options = {
            # JSON has lists in place of tuples, and numbers in place of tensors of one.
            key: tuple(value) if isinstance(now.get(key), tuple) else _like(value, now.get(key))
            for key, value in group.items()
            if key != "params"
        }
        loaded.append({**options, "params": [numbers[name] for name in group["params"] if name in numbers]})
    state = {numbers[name]: dict(values) for name, values in slots.items() if name in numbers}
    optimizer.load_state_dict({"state": state, "param_groups": loaded})


def _like(value: Any, now: Any) -> Any:
    return torch.full_like(now, value) if isinstance(now, torch.Tensor) else value
