"""Checkpoints: the state of a training in files; `training/checkpointing.py` has when they are written and read."""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, ClassVar

import numpy as np

from pase.common.documents import Field
from pase.errors import ProgramError
from pase.targets.training import checkpointing
from pase.targets.training.checkpointing import NEWEST, CheckpointFolder, Kept, called, sync_folder
from pase.targets.training.options import TrainingOptions

if TYPE_CHECKING:  # it loads the framework; a checkpoint that does not fit is found out before that
    from pase.targets.mesh_tensorflow.runtime.training import TrainingState

Array = np.ndarray[Any, Any]

MAGIC = b"PASE-CHECKPOINT-1\n"
SCHEMA_VERSION = 1
_HEAD_BYTES = len(MAGIC) + 8 + 32
_MANIFEST_LIMIT_BYTES = 2**28
_DTYPES = ("float32", "float64")
SUFFIX = ".ckpt"


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint(Kept):
    """What a checkpoint holds. weights, slots: whole arrays, by weight, and by weight and slot."""

    weights: Mapping[str, Array]
    slots: Mapping[str, Mapping[str, Array]]

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Those of the weights, by name."""
        return {name: array.shape for name, array in self.weights.items()}


def model_hash(shapes: Mapping[str, tuple[int, ...]]) -> str:
    """Return what tells a model from others: the SHA-256 of its weights' names and shapes."""
    listed = sorted((name, list(shape)) for name, shape in shapes.items())
    return hashlib.sha256(json.dumps(listed, separators=(",", ":")).encode()).hexdigest()


# -- writing


def write_checkpoint(folder: Path, checkpoint: Checkpoint) -> Path:
    """Write a checkpoint and return its path; whoever looks sees the whole file or none.

    Raises ProgramError where it cannot be written or a number is not finite; older checkpoints are left alone.
    """
    for weight, slot, array in _listed(checkpoint):
        if not np.isfinite(array).all():
            raise ProgramError(
                f"step {checkpoint.step}: {called(weight, slot)} is not finite; no checkpoint was written"
            )
    path = checkpoint_path(folder, checkpoint.step)
    temporary = path.with_name(f".{path.name}.part")
    try:
        with temporary.open("wb") as stream:
            _write(stream, checkpoint)
            stream.flush()
            os.fsync(stream.fileno())
        temporary.replace(path)
        sync_folder(folder)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink()
        raise ProgramError(f"cannot write checkpoint {path}: {error}; older ones are as they were") from None
    return path


def _write(stream: IO[bytes], checkpoint: Checkpoint) -> None:
    arrays = [(weight, slot, _plain(array)) for weight, slot, array in _listed(checkpoint)]
    manifest = {
        "schema_version": SCHEMA_VERSION,
        **checkpoint.document(),
        "model_hash": model_hash(checkpoint.shapes),
        "arrays": [
            {
                "weight": weight,
                "slot": slot,
                "shape": list(array.shape),
                "dtype": array.dtype.name,
                "sha256": hashlib.sha256(array.data).hexdigest(),
            }
            for weight, slot, array in arrays
        ],
    }
    text = json.dumps(manifest).encode()
    stream.write(MAGIC + len(text).to_bytes(8, "little") + hashlib.sha256(text).digest() + text)
    for _, _, array in arrays:
        stream.write(array.data)


def _listed(checkpoint: Checkpoint) -> Iterator[tuple[str, str, Array]]:
    for weight, array in checkpoint.weights.items():
        yield weight, "", array
        for slot, kept in checkpoint.slots.get(weight, {}).items():
            yield weight, slot, kept


def _plain(array: Array) -> Array:
    return np.asarray(array, dtype=array.dtype.newbyteorder("<"), order="C")


# -- reading


def read_checkpoint(path: Path) -> Checkpoint:
    """Return what a checkpoint holds; ProgramError, with the file and the part, where it is damaged or none."""
    try:
        with path.open("rb") as stream:
            size_bytes = os.fstat(stream.fileno()).st_size
            manifest = _manifest(path, stream, size_bytes)
            return _checkpoint(path, stream, manifest, size_bytes)
    except OSError as error:
        raise ProgramError(f"cannot read checkpoint {path}: {error}") from None


def _damaged(path: Path, problem: str) -> ProgramError:
    return ProgramError(f"checkpoint {path} is damaged: {problem}")


def _manifest(path: Path, stream: IO[bytes], size_bytes: int) -> Field:
    head = stream.read(_HEAD_BYTES)
    if head[: len(MAGIC)] != MAGIC:
        raise _damaged(path, f"it does not begin with {MAGIC!r}, or is no checkpoint at all")
    length = int.from_bytes(head[len(MAGIC) : len(MAGIC) + 8], "little")
    if len(head) < _HEAD_BYTES or not 0 < length <= min(size_bytes - _HEAD_BYTES, _MANIFEST_LIMIT_BYTES):
        raise _damaged(path, "its manifest is cut off")
    text = stream.read(length)
    if hashlib.sha256(text).digest() != head[-32:]:
        raise _damaged(path, "its manifest does not have the checksum that was written with it")
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _damaged(path, f"its manifest is no JSON ({error})") from None
    return Field(value, "", ProgramError, f"checkpoint {path}")


def _checkpoint(path: Path, stream: IO[bytes], manifest: Field, size_bytes: int) -> Checkpoint:
    version = manifest["schema_version"].integer()
    if version != SCHEMA_VERSION:
        raise manifest["schema_version"].fail(f"is {version}; this version of PaSE reads {SCHEMA_VERSION}")
    entries = [_entry(item) for item in manifest["arrays"].items()]
    expected_bytes = stream.tell() + sum(prod(shape) * np.dtype(dtype).itemsize for _, _, shape, dtype, _ in entries)
    weights: dict[str, Array] = {}
    slots: dict[str, dict[str, Array]] = {}
    for weight, slot, shape, dtype, checksum in entries:
        count_bytes = prod(shape) * np.dtype(dtype).itemsize
        if stream.tell() + count_bytes > size_bytes:
            raise _damaged(path, f"it is cut off in {called(weight, slot)}: {size_bytes} of {expected_bytes} bytes")
        raw = stream.read(count_bytes)
        if hashlib.sha256(raw).hexdigest() != checksum:
            raise _damaged(path, f"{called(weight, slot)} does not have the checksum that was written with it")
        array = np.frombuffer(raw, np.dtype(dtype).newbyteorder("<")).reshape(shape)
        if slot:
            slots.setdefault(weight, {})[slot] = array
        else:
            weights[weight] = array
    if size_bytes != expected_bytes:
        raise _damaged(path, f"it has {size_bytes} bytes; expected {expected_bytes}")
    found = model_hash({name: array.shape for name, array in weights.items()})
    if manifest["model_hash"].text() != found:
        raise manifest["model_hash"].fail("is not that of the weights it lists")
    return Checkpoint.read(manifest, weights=weights, slots=slots)


def _entry(item: Field) -> tuple[str, str, tuple[int, ...], str, str]:
    dtype = item["dtype"].text()
    if dtype not in _DTYPES:
        raise item["dtype"].fail(f"is {dtype!r}; expected {' or '.join(_DTYPES)}")
    shape = tuple(extent.integer() for extent in item["shape"].items())
    return item["weight"].text(), item["slot"].text(), shape, dtype, item["sha256"].text()


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
        if self.resume is None:
            return None
        return newest_checkpoint(self.folder) if self.resume == NEWEST else read_checkpoint(Path(self.resume))

    def save(self, state: "TrainingState", options: TrainingOptions, *, seed: int, data: Mapping[str, Any]) -> Path:
        """Write the checkpoint of a state, remove those beyond `keep`, and return its path."""
        step, arrays = state.num_steps, {"weights": state.weights, "slots": state.slots}
        return self.write(Checkpoint.of(options, step=step, seed=seed, data=data, **arrays))

    def write(self, checkpoint: Checkpoint) -> Path:
        """Write a checkpoint, remove those beyond `keep`, and return its path."""
        path = write_checkpoint(self.folder, checkpoint)
        try:
            checkpointing.prune(self.folder, step=checkpoint.step, keep=self.keep, suffix=SUFFIX)
        except OSError as error:
            raise ProgramError(f"{path} is written, but an older one cannot be removed: {error}") from None
        return path
