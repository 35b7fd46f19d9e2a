"""Checkpoints of trainings across workers, in safetensors files; `checkpointing.py` has when they are written.

The metadata of a file are what it says of its training, as JSON, and the checksums of that and of each array.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np

from pase.common.documents import DocumentSource
from pase.errors import ProgramError
from pase.targets.training import checkpointing
from pase.targets.training.checkpointing import NEWEST, CheckpointFolder, Kept, KeptDocument, called, sync_folder

Array = np.ndarray[Any, Any]

SCHEMA_VERSION = 2
SUFFIX = ".safetensors"
_OLD_SUFFIX = ".ckpt"
"""Of files in a format of PaSE's own, up to 0.8."""
_DTYPES = ("float32", "float64")
_KEPT, _CHECKSUMS = "pase", "sha256"
"""The metadata."""
_WEIGHT = "weight"
"""In a name, in place of the slot: \"weight/fc1/w\" beside \"velocity/fc1/w\"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint(Kept):
    """What a checkpoint holds. weights, slots: whole arrays, by weight, and by weight and slot."""

    weights: Mapping[str, Array]
    slots: Mapping[str, Mapping[str, Array]]

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Those of the weights, by name."""
        return {name: array.shape for name, array in self.weights.items()}


# -- writing


def write_checkpoint(folder: Path, checkpoint: Checkpoint) -> Path:
    """Write a checkpoint and return its path; whoever looks sees the whole file or none.

    Raises ProgramError where it cannot be written or a number is not finite; older checkpoints are left alone.
    """
    kept = {_WEIGHT: dict(checkpoint.weights)}
    for weight, slots in checkpoint.slots.items():
        for slot, array in slots.items():
            kept.setdefault(slot, {})[weight] = array
    arrays = {
        f"{slot}/{weight}": np.asarray(array, dtype=array.dtype.newbyteorder("<"), order="C")
        for slot, own in kept.items()
        for weight, array in own.items()
    }
    for name, array in arrays.items():
        if not np.isfinite(array).all():
            raise ProgramError(f"step {checkpoint.step}: {_called(name)} is not finite; no checkpoint was written")
    path = checkpoint_path(folder, checkpoint.step)
    # A folder, since safetensors writes to a file of another name beside the one that it is given: whatever a process
    # that is killed has left is in there, and the next save removes it.
    part = path.with_name(f".{path.name}.part")
    try:
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir()
        temporary = part / path.name
        _write(temporary, arrays, json.dumps({"schema_version": SCHEMA_VERSION, **checkpoint.document()}))
        with temporary.open("rb") as stream:
            os.fsync(stream.fileno())
        temporary.replace(path)
        sync_folder(folder)
    except OSError as error:
        raise ProgramError(f"cannot write checkpoint {path}: {error}; older ones are as they were") from None
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return path


def _write(path: Path, arrays: Mapping[str, Array], text: str) -> None:
    from safetensors import SafetensorError
    from safetensors.numpy import save_file

    try:
        save_file(dict(arrays), path, {_KEPT: text, _CHECKSUMS: json.dumps(_checksums(arrays, text), sort_keys=True)})
    except SafetensorError as error:
        raise OSError(str(error)) from None


def _checksums(arrays: Mapping[str, Array], text: str) -> dict[str, str]:
    """Return the SHA-256 of each array, its type and shape among them, and of the text."""
    found = {_KEPT: hashlib.sha256(text.encode()).hexdigest()}
    for name, array in arrays.items():
        digest = hashlib.sha256(f"{array.dtype.name} {array.shape}".encode())
        digest.update(array.data)
        found[name] = digest.hexdigest()
    return found


def _called(name: str) -> str:
    """Return what messages call an array."""
    slot, _, weight = name.partition("/")
    return called(weight, "" if slot == _WEIGHT else slot)


# -- reading


def read_checkpoint(path: Path) -> Checkpoint:
    """Return what a checkpoint holds; ProgramError, with the file and the part, where it is damaged or none."""
    from safetensors import SafetensorError, safe_open

    if path.suffix == _OLD_SUFFIX:
        raise ProgramError(
            f"checkpoint {path} is of PaSE 0.8 or older, whose format is not read any more: expected a {SUFFIX} file; "
            "go on with that version, or begin anew"
        )
    try:
        with safe_open(path, framework="numpy") as opened:
            metadata = opened.metadata() or {}
            arrays = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    except OSError as error:
        raise ProgramError(f"cannot read checkpoint {path}: {error}") from None
    except (SafetensorError, TypeError, ValueError) as error:
        raise _damaged(path, f"it is cut off, or no checkpoint at all ({error})") from None
    if metadata.keys() != {_KEPT, _CHECKSUMS}:
        those = ", ".join(sorted(metadata)) or "none"
        raise _damaged(path, f"its metadata are {those}; expected those of a checkpoint")
    expected, found = metadata[_CHECKSUMS], _checksums(arrays, metadata[_KEPT])
    if json.dumps(found, sort_keys=True) != expected:
        wrong = next((name for name, own in found.items() if own not in expected), None)
        what = "the list of its arrays" if wrong is None else "what it says" if wrong == _KEPT else _called(wrong)
        raise _damaged(path, f"{what} does not have the checksum that was written with it")
    for name, array in arrays.items():
        if array.dtype.name not in _DTYPES:
            raise _damaged(path, f"{_called(name)} is {array.dtype.name}; expected {' or '.join(_DTYPES)}")
    try:
        value = json.loads(metadata[_KEPT])
    except (ValueError, RecursionError) as error:
        raise _damaged(path, f"what it says is no JSON ({error})") from None
    weights, slots = dict[str, Array](), dict[str, dict[str, Array]]()
    for name, array in arrays.items():
        slot, _, weight = name.partition("/")
        if slot == _WEIGHT:
            weights[weight] = array
        else:
            slots.setdefault(weight, {})[slot] = array
    source = DocumentSource(ProgramError, f"checkpoint {path}")
    return Checkpoint.read(value, source, _CheckpointDocument, weights=weights, slots=slots)


class _CheckpointDocument(KeptDocument, kw_only=True):
    schema_version: Literal[2]


def _damaged(path: Path, problem: str) -> ProgramError:
    return ProgramError(f"checkpoint {path} is damaged: {problem}")


# -- a folder of them


def checkpoint_path(folder: Path, step: int) -> Path:
    """Return where the checkpoint of a step is."""
    return checkpointing.checkpoint_path(folder, step, SUFFIX)


def list_checkpoints(folder: Path) -> list[tuple[int, Path]]:
    """Return (step, path) of each checkpoint in a folder, the newest first; those being written are not among them."""
    return checkpointing.list_checkpoints(folder, SUFFIX)


def newest_checkpoint(folder: Path) -> Checkpoint | None:
    """Return the newest checkpoint of a folder, None where there is none.

    Raises ProgramError where it is damaged, with the newest one that is not; nothing is changed.
    """
    listed = list_checkpoints(folder)
    if not listed:
        return None
    _, path = listed[0]
    try:
        return read_checkpoint(path)
    except ProgramError as error:
        how = "go on with --resume"
        raise checkpointing.with_another(error, path, read_checkpoint, suffix=SUFFIX, how=how) from None


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpointing(CheckpointFolder):
    """Where and when checkpoints are written to files."""

    suffix: ClassVar[str] = SUFFIX

    def found(self) -> Checkpoint | None:
        """Return the checkpoint to go on from, None to begin with the first step.

        Raises ProgramError where it is damaged, where the folder holds another training's, where it cannot be made.
        """
        self.begin()
        old = checkpointing.list_checkpoints(self.folder, _OLD_SUFFIX)
        if self.resume == NEWEST and old and not list_checkpoints(self.folder):
            read_checkpoint(old[0][1])
        if self.resume is None:
            return None
        return newest_checkpoint(self.folder) if self.resume == NEWEST else read_checkpoint(Path(self.resume))

    def write(self, checkpoint: Checkpoint) -> Path:
        """Write a checkpoint, remove those beyond `keep`, and return its path."""
        path = write_checkpoint(self.folder, checkpoint)
        try:
            checkpointing.prune(self.folder, step=checkpoint.step, keep=self.keep, suffix=SUFFIX)
        except OSError as error:
            raise ProgramError(f"{path} is written, but an older one cannot be removed: {error}") from None
        return path
