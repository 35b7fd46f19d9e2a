"""Checkpoints of a parallel model and its optimizer, which any plan and any number of ranks can load.

A checkpoint is a folder: a file of shards for each rank (`shard_files.py`), and `training.json`, which gives the
location and checksum of each box of each tensor. `save_checkpoint` writes it under another name, flushes it to disk,
and renames it last: readers only see complete checkpoints, whenever a rank ends. Nothing that is read is executed.

torch.distributed.checkpoint neither writes nor reads them. `export_checkpoint` converts a checkpoint to its format, and
`checkpointable` makes it save and load the tensors of a parallel model.
"""

import hashlib
import json
import os
import shutil
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any, Protocol, TypeVar, runtime_checkable

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor

from pase.common.documents import DocumentSource, read_limited
from pase.common.structs import VERSION, Document, Integer, Whole, read
from pase.errors import PaseError, ProgramError
from pase.sharding.boxes import Box, num_points, whole
from pase.targets.torch.messages import told_by, told_by_all
from pase.targets.torch.old_checkpoints import read_metadata, with_slots_of_pytorch
from pase.targets.torch.parameters import held_by, reduced_like
from pase.targets.torch.placements import Held, place
from pase.targets.torch.shard_files import (
    Piece,
    Saved,
    Shard,
    TensorDocument,
    damage,
    fill,
    named_type,
    read_tensors,
    tensors_document,
    write_shards,
)
from pase.targets.training.checkpointing import (
    NEWEST,
    CheckpointFolder,
    Kept,
    checkpoint_path,
    is_checkpoint_name,
    list_checkpoints,
    prune,
    remove,
    sync_folder,
    with_another,
)

SCHEMA_VERSION = 2
_OLD_VERSION = 1
"""Of checkpoints that torch.distributed.checkpoint wrote, up to 0.10."""
_RECORD = "training.json"
_MAX_RECORD_BYTES = 1 << 27
_CHECKSUM = "sha256"
"""Key of the checksum over the rest of the record."""
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
    """A model of which each rank has only some parameters and buffers."""

    @property
    def all_names(self) -> tuple[str, ...]: ...

    def owns(self, name: str) -> bool:
        """Return whether this rank is of those that save one."""
        ...


# -- tensors with non-contiguous parts


class Part(torch.Tensor):
    """A rank's part of a tensor, which is saved and loaded box by box.

    Attributes:
        held: The part that it holds.
        whole: Shape of the whole tensor.
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
        """Return the shape of the whole tensor, which is compared with that of the saved one."""
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
        """Return the view of the shard that is one box, for reading or writing."""
        offsets = tuple(index.offset or ())
        return next(x for box, x in self.pieces() if tuple(low for low, _ in box) == offsets)

    def pieces(self) -> list[Piece]:
        """Return its boxes, with views of its memory."""
        found = []
        for box in self._boxes:
            view = self.detach().as_subclass(torch.Tensor)
            for dim, (runs, run) in enumerate(zip(self.held, box, strict=True)):
                low, high = place(runs, run)
                view = view.narrow(dim, low, high - low)
            found.append((box, view))
        return found

    @property
    def _boxes(self) -> list[Box]:
        return list(product(*self.held))


def checkpointable(state: Any) -> Any:
    """Return a state_dict, or nested dicts and lists, in a form that torch.distributed.checkpoint saves and loads into.

    The tensors are not copied. Without this, torch.distributed.checkpoint refuses to save parameters with
    non-contiguous parts on ranks, and their optimizer state.
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


def pieces_of(x: Any) -> list[Piece]:
    """Return this rank's boxes of a tensor, with views of its memory."""
    if isinstance(x, DTensor):
        x = Part.of(x._local_tensor, held_by(x), x.shape)
    return x.pieces() if isinstance(x, Part) else [(whole(tuple(x.shape)), x.detach())]


def _by_name(state: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the tensors of nested mappings by their keys, with dots between."""
    found: dict[str, Any] = {}
    for key, value in state.items():
        if isinstance(value, Mapping):
            found |= _by_name(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = value
    return found


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
    """Write a checkpoint atomically, and return its path; all ranks call it.

    Args:
        folder: A folder that all ranks see; the checkpoint becomes a folder in it.
        module: The parallel model.
        optimizer: Optimizer of its parameters.
        step: Number of completed steps.
        extra: Further state to restore, as JSON.
        keep: Number of checkpoints to keep, including this one; older ones are deleted.

    Raises:
        ProgramError: It cannot be written. Older ones are unchanged.
    """
    groups = None if optimizer is None else _of_all_ranks(module, _options(module, optimizer))
    state = {
        kind: {name: x for name, x in own.items() if not isinstance(module, InStages) or module.owns(name)}
        for kind, own in _state(module, optimizer).items()
    }
    folder = Path(folder)
    path = checkpoint_path(folder, step)
    part = folder / f".{path.name}.part"
    record = {
        "schema_version": SCHEMA_VERSION,
        "step": step,
        "extra": dict(extra or {}),
        "optimizer": groups,
        "mask_state": getattr(module, "mask_state", None),
    }
    _on_first(lambda: _begin(part), path)
    tensors = _written(part, path, _by_name(state))
    text = _record_text({**record, "tensors": tensors})
    _on_first(lambda: _finish(part, path, text), path)
    _on_first(lambda: prune(folder, step=step, keep=keep), path)
    return path


def _written(part: Path, path: Path, state: Mapping[str, Any]) -> dict[str, Any]:
    """Write this rank's shards of tensors into a folder, and return the record of all ranks.

    Raises ProgramError on all ranks, and removes the folder, where one of them cannot write.
    """
    rank, problem = _rank(), None
    pieces = {name: pieces_of(x) for name, x in state.items()}
    boxes: dict[str, Any] = {}
    try:
        for name, x in state.items():
            boxes[name] = named_type(name, x.dtype), tuple(x.size()), [box for box, _ in pieces[name]]
    except ProgramError as error:
        problem = str(error)
    answers = _told((boxes, problem))
    _stop_if_any(part, path, [text for _, text in answers])
    of_ranks = [own for own, _ in answers]
    writers = _writers(of_ranks)
    own = [(name, box, x) for name, held in pieces.items() for box, x in held if writers[name, box] == rank]
    shards = list[Shard]()
    try:
        if own:
            shards = write_shards(part / f"rank-{rank:05d}.safetensors", own)
    except OSError as error:
        problem = f"rank {rank}: {error}"
    written = [(name, shard) for (name, _, _), shard in zip(own, shards, strict=False)]
    answers = _told((written, problem))
    _stop_if_any(part, path, [text for _, text in answers])
    found: dict[str, tuple[str, Sequence[int], list[Shard]]] = {}
    for of_rank in of_ranks:
        for name, (dtype, shape, _) in of_rank.items():
            found.setdefault(name, (dtype, shape, []))
    for of_rank, _ in answers:
        for name, shard in of_rank:
            found[name][2].append(shard)
    return tensors_document(found)


def _stop_if_any(part: Path, path: Path, problems: Sequence[str | None]) -> None:
    """Raise ProgramError on all ranks where one has a problem, and remove what was written."""
    problem = next(filter(None, problems), None)
    if problem is not None:
        _on_first(lambda: shutil.rmtree(part, ignore_errors=True), path)
        raise ProgramError(f"cannot write checkpoint {path}: {problem}; older ones are as they were")


def _writers(of_ranks: Sequence[Mapping[str, Any]]) -> dict[tuple[str, Box], int]:
    """Return which rank writes each box of each tensor: of those that hold it, the one with the least to write."""
    holders: dict[tuple[str, Box], list[int]] = {}
    for rank, own in enumerate(of_ranks):
        for name, (_, _, boxes) in own.items():
            for box in boxes:
                holders.setdefault((name, box), []).append(rank)
    to_write = [0] * len(of_ranks)
    found = {}
    for (name, box), ranks in holders.items():
        writer = min(ranks, key=lambda rank: to_write[rank])
        to_write[writer] += num_points(box)
        found[name, box] = writer
    return found


def _record_text(record: Mapping[str, Any]) -> str:
    return json.dumps({_CHECKSUM: _checksum(record), **record}, indent=1)


def _checksum(record: Mapping[str, Any]) -> str:
    """Return the SHA-256 of a record, independent of order and white space."""
    text = json.dumps(record, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _told(own: Any) -> list[Any]:
    return told_by_all(own) if dist.is_initialized() else [own]


def _begin(part: Path) -> None:
    # Remainders of an earlier attempt do not form a checkpoint.
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
    """Call a function on rank 0, and return its result on all ranks, or raise its PaseError or OSError."""
    if not dist.is_initialized():
        return action()
    error: PaseError | OSError | None = None
    answer: Any = None
    if dist.get_rank() == 0:
        try:
            answer = action()
        except (OSError, PaseError) as raised:
            error = raised
    kind, text, found = told_by(0, (isinstance(error, OSError), None if error is None else str(error), answer))
    if error is not None:
        raise error
    if text is not None:
        raise (OSError if kind else ProgramError)(text)
    result: T = found
    return result


# -- loading


def checkpoints(folder: str | Path) -> list[Path]:
    """Return the complete checkpoints in a folder, oldest first."""
    return [path for _, path in reversed(list_checkpoints(Path(folder))) if (path / _RECORD).is_file()]


def load_checkpoint(
    folder: str | Path, module: nn.Module, optimizer: torch.optim.Optimizer | None = None
) -> Checkpoint | None:
    """Load the newest checkpoint of a folder, or a checkpoint itself, into a parallel model and its optimizer.

    It may have been saved under another plan and by another number of ranks; all ranks call it. Nothing in it is
    executed. All checksums are verified before anything is changed.

    Returns:
        The loaded checkpoint; None where the folder has none, and nothing is changed.

    Raises:
        ProgramError: It belongs to another model or optimizer; or it is damaged, with the newest intact one named.
    """
    # A checkpoint that is being renamed may be visible to some ranks only.
    path = from_first(lambda: newest(Path(folder)))
    if path is None:
        return None
    opened = Opened.found(path)
    load_opened(opened, module, optimizer)
    return Checkpoint(path=path, step=opened.step, extra=opened.extra)


def load_opened(opened: "Opened", module: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
    """Load an opened checkpoint into a parallel model and its optimizer, as `load_checkpoint` does."""
    path, is_of_old_program = opened.path, "optimizer" not in opened.record and "optimiser" in opened.extra
    if is_of_old_program:
        opened = replace(opened, saved=with_slots_of_pytorch(opened.saved, opened.extra["optimiser"]))
    state: dict[str, Any] = {"model": module.state_dict()}
    elsewhere = module.all_names if isinstance(module, InStages) else ()
    _check(path, {name: tuple(value.shape) for name, value in state["model"].items()}, opened.shapes, elsewhere)
    slots: dict[str, dict[str, torch.Tensor]] = {}
    if optimizer is not None:
        if opened.record.get("optimizer") is None and not is_of_old_program:
            raise ProgramError(f"checkpoint {path} holds no optimizer's state; load the model alone")
        slots = state["optimizer"] = _empty_slots(module, opened.saved)
    opened.load(state)
    if optimizer is not None:
        for own in slots.values() if is_of_old_program else ():
            own["step"] = torch.tensor(float(opened.step))
        _set_optimizer(path, module, optimizer, slots, opened.record.get("optimizer"))
    masks = opened.record.get("mask_state")
    if masks is not None and hasattr(module, "mask_state"):
        module.mask_state = masks


def newest(folder: Path) -> Path | None:
    """Return a checkpoint itself, complete or not, or the newest complete one of a folder, None where there is none."""
    if (folder / _RECORD).is_file() or is_checkpoint_name(folder.name):
        return folder
    return next(reversed(checkpoints(folder)), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """A checkpoint that can be read.

    Attributes:
        path: Its folder.
        step: Number of completed steps.
        record: The rest of its record, without the tensors.
        saved: Tensors by name: "model." or "optimizer.", the parameter's name, and for optimizers the slot.
    """

    path: Path
    step: int
    record: Mapping[str, Any]
    saved: Mapping[str, Saved]

    @classmethod
    def found(cls, path: Path) -> "Opened":
        """Open a checkpoint after verifying the checksum of each shard; all ranks call it.

        Raises:
            ProgramError: On all ranks where one finds damage; it names the newest intact checkpoint in the same folder.
        """
        opened, problem = None, None
        try:
            opened = cls.of(path)
        except ProgramError as error:
            problem = str(error)
        else:
            ranks = dist.get_world_size() if dist.is_initialized() else 1
            wrong = damage(opened.saved, _rank(), ranks)
            problem = wrong and f"checkpoint {path} is damaged: {wrong}"
        problems = [text for text in _told(problem) if text]

        def fail() -> None:
            raise with_another(ProgramError(problems[0]), path, cls._whole, how=_HOW)

        if problems:
            from_first(fail)
        assert opened is not None
        return opened

    @classmethod
    def _whole(cls, path: Path) -> None:
        if wrong := damage(cls.of(path).saved):
            raise ProgramError(f"checkpoint {path} is damaged: {wrong}")

    @classmethod
    def of(cls, path: Path) -> "Opened":
        """Return a checkpoint whose files have the sizes that they should have.

        Raises:
            ProgramError: It is damaged, or of another version.
        """
        source = f"checkpoint {path} is damaged"
        try:
            record = json.loads(read_limited(path / _RECORD, _MAX_RECORD_BYTES))
            version = record.get(VERSION) if isinstance(record, dict) else None
            if version == _OLD_VERSION:
                document = read(_RecordDocument, record, DocumentSource(ProgramError, source))
                saved = read_metadata(path, source)
            elif version == SCHEMA_VERSION:
                document = whole_record = read(_WholeRecordDocument, record, DocumentSource(ProgramError, source))
                if whole_record.sha256 != _checksum({key: value for key, value in record.items() if key != _CHECKSUM}):
                    raise ValueError(f"{_RECORD} does not say what was written (SHA-256)")
                saved = read_tensors(path, whole_record.tensors, DocumentSource(ProgramError, source))
            else:
                raise ProgramError(
                    f"checkpoint {path} has schema_version {version!r}, expected {SCHEMA_VERSION}; load it with the "
                    "version of pase that wrote it"
                )
        except (OSError, ValueError, RecursionError) as error:
            raise ProgramError(f"{source}: {error}") from None
        return cls(path=path, step=document.step, record=record, saved=saved)

    @property
    def extra(self) -> Mapping[str, Any]:
        found: Mapping[str, Any] = self.record["extra"]
        return found

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Those of the model's tensors, by name."""
        return {name.removeprefix("model."): own.shape for name, own in self.saved.items() if name.startswith("model.")}

    def load(self, state: Mapping[str, Any]) -> None:
        """Copy its contents into the tensors of nested mappings, those of this rank's part; all ranks call it.

        Raises:
            ProgramError: On all ranks where one lacks a tensor or a part of one.
        """
        problem = None
        with torch.no_grad():
            for name, x in _by_name(state).items():
                try:
                    if name not in self.saved:
                        raise ValueError(f"{name!r} is not in it")
                    fill(pieces_of(x), name, self.saved[name])
                except (OSError, ValueError) as error:
                    problem = str(error)
                    break
        problems = [text for text in _told(problem) if text]
        if problems:
            raise ProgramError(f"checkpoint {self.path} is damaged: {problems[0]}")


class _GroupDocument(Document):
    params: tuple[str, ...]


class _MasksDocument(Document):
    seed: Integer
    step: Integer


class _RecordDocument(Document):
    step: Whole
    extra: dict[str, Any]
    optimizer: tuple[_GroupDocument, ...] | None = None
    mask_state: _MasksDocument | None = None


class _WholeRecordDocument(_RecordDocument, kw_only=True):
    sha256: str
    tensors: dict[str, TensorDocument]


def export_checkpoint(path: str | Path, folder: str | Path) -> None:
    """Convert a checkpoint to one of torch.distributed.checkpoint, in one process with all of it in memory.

    Tensors have the names "model.…" and "optimizer.…" there. torch.distributed.checkpoint unpickles when it loads: only
    load checkpoints that you wrote yourself.

    Args:
        path: Path of the checkpoint.
        folder: Folder to write.

    Raises:
        ProgramError: The checkpoint is damaged.
    """
    opened = Opened.found(Path(path))
    state = {name: torch.empty(own.shape, dtype=own.dtype) for name, own in opened.saved.items()}
    opened.load(state)
    with warnings.catch_warnings():
        # It warns about running in one process, which is intended.
        warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
        dcp.save(state, storage_writer=dcp.FileSystemWriter(folder), no_dist=True)


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


def found_checkpoint(checkpointing: CheckpointFolder) -> tuple[Kept, Opened] | None:
    """Return the checkpoint that a program resumes from, None to start with the first step; all ranks call it.

    Raises:
        ProgramError: It is damaged, or the folder has another training's checkpoints, or cannot be created.
    """

    def chosen() -> Path | None:
        checkpointing.begin()
        resume = checkpointing.resume
        return None if resume is None else newest(checkpointing.folder if resume == NEWEST else Path(resume))

    path = from_first(chosen)
    if path is None:
        return None
    opened = Opened.found(path)
    said = {**opened.extra, "step": opened.step}
    return Kept.read(said, DocumentSource(ProgramError, f"checkpoint {path}")), opened


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
    """Return tensors to load optimizer state into: laid out as the parameter if the shapes match, else replicated."""
    found: dict[str, dict[str, torch.Tensor]] = {}
    for name, parameter in module.named_parameters():
        prefix = f"optimizer.{name}."
        for key, own in saved.items():
            slot = key.removeprefix(prefix)
            if slot == key or "." in slot:
                continue
            is_like = len(own.shape) == parameter.ndim and all(
                extent in (1, whole_extent) for extent, whole_extent in zip(own.shape, parameter.shape, strict=True)
            )
            found.setdefault(name, {})[slot] = (
                reduced_like(parameter, own.shape, own.dtype) if is_like else torch.zeros(own.shape, dtype=own.dtype)
            )
    return found


def _set_optimizer(
    path: Path,
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    slots: Mapping[str, Mapping[str, torch.Tensor]],
    groups: list[dict[str, Any]] | None,
) -> None:
    """Set the state of an optimizer; groups: None where the checkpoint lacks them: the current ones remain."""
    of_rank = _options(module, optimizer)
    own = _of_all_ranks(module, of_rank)
    groups = own if groups is None else groups
    if [group["params"] for group in own] != [group["params"] for group in groups]:
        raise ProgramError(
            f"checkpoint {path}: the optimizer's groups hold other parameters here than there; make them as they were"
        )
    numbers = {name: number for number, name in enumerate(name for group in of_rank for name in group["params"])}
    loaded = []
    try:
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
    except (LookupError, RuntimeError, TypeError, ValueError) as error:
        raise ProgramError(
            f"checkpoint {path} does not hold the state of a {type(optimizer).__name__}: {type(error).__name__}: "
            f"{error}; load it with the optimizer that it was saved with, or the model alone"
        ) from None


def _like(value: Any, now: Any) -> Any:
    return torch.full_like(now, value) if isinstance(now, torch.Tensor) else value
