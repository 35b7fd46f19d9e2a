"""Checkpoints: the state of a training in files, and how one goes on from them.

When they are written, which one a training goes on from, and whether that one is of this training.
"""

import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np

from pase.common.documents import Field
from pase.errors import ProgramError
from pase.targets.training.optimisers import Rule, name_of, options_of
from pase.targets.training.options import TrainingOptions

if TYPE_CHECKING:  # they load the framework; a checkpoint that does not fit is found out before that
    from pase.targets.mesh_tensorflow.runtime.program import Program
    from pase.targets.mesh_tensorflow.runtime.training import TrainingState

Array = np.ndarray[Any, Any]

MAGIC = b"PASE-CHECKPOINT-1\n"
SCHEMA_VERSION = 1
_HEAD_BYTES = len(MAGIC) + 8 + 32
_MANIFEST_LIMIT_BYTES = 2**28
_DTYPES = ("float32", "float64")
_NAME = re.compile(r"step-(\d{10})\.ckpt")
_PART = re.compile(r"\.step-\d{10}\.ckpt\.part")


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """What a checkpoint holds.

    step: steps done, which is the position in the data too. optimiser, options: name and options of the update rule.
    data: what tells the data from others. weights, slots: whole arrays, by weight, and by weight and slot.
    """

    step: int
    dtype: str
    seed: int
    optimiser: str
    options: Mapping[str, Any]
    data: Mapping[str, Any]
    weights: Mapping[str, Array]
    slots: Mapping[str, Mapping[str, Array]]


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
                f"step {checkpoint.step}: {_called(weight, slot)} is not finite; no checkpoint was written"
            )
    path = checkpoint_path(folder, checkpoint.step)
    temporary = path.with_name(f".{path.name}.part")
    try:
        with temporary.open("wb") as stream:
            _write(stream, checkpoint)
            stream.flush()
            os.fsync(stream.fileno())
        temporary.replace(path)
        _sync_folder(folder)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink()
        raise ProgramError(f"cannot write checkpoint {path}: {error}; older ones are as they were") from None
    return path


def _write(stream: IO[bytes], checkpoint: Checkpoint) -> None:
    arrays = [(weight, slot, _plain(array)) for weight, slot, array in _listed(checkpoint)]
    manifest = {
        "schema_version": SCHEMA_VERSION,
        "step": checkpoint.step,
        "dtype": checkpoint.dtype,
        "seed": checkpoint.seed,
        "optimiser": {"name": checkpoint.optimiser, "options": dict(checkpoint.options)},
        "data": dict(checkpoint.data),
        "model_hash": model_hash({name: array.shape for name, array in checkpoint.weights.items()}),
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


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


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
            raise _damaged(path, f"it is cut off in {_called(weight, slot)}: {size_bytes} of {expected_bytes} bytes")
        raw = stream.read(count_bytes)
        if hashlib.sha256(raw).hexdigest() != checksum:
            raise _damaged(path, f"{_called(weight, slot)} does not have the checksum that was written with it")
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
    options = {name: item.scalar() for name, item in manifest["optimiser"]["options"].members()}
    return Checkpoint(
        step=manifest["step"].integer(),
        dtype=manifest["dtype"].text(),
        seed=manifest["seed"].integer(),
        optimiser=manifest["optimiser"]["name"].text(),
        options=options,
        data={name: item.value for name, item in manifest["data"].members()},
        weights=weights,
        slots=slots,
    )


def _entry(item: Field) -> tuple[str, str, tuple[int, ...], str, str]:
    dtype = item["dtype"].text()
    if dtype not in _DTYPES:
        raise item["dtype"].fail(f"is {dtype!r}; expected {' or '.join(_DTYPES)}")
    shape = tuple(extent.integer() for extent in item["shape"].items())
    return item["weight"].text(), item["slot"].text(), shape, dtype, item["sha256"].text()


def _called(weight: str, slot: str) -> str:
    return f"{slot.replace('_', ' ')} of weight {weight!r}" if slot else f"weight {weight!r}"


# -- a folder of them


def checkpoint_path(folder: Path, step: int) -> Path:
    """Return where the checkpoint of a step is."""
    return folder / f"step-{step:010d}.ckpt"


def list_checkpoints(folder: Path) -> list[tuple[int, Path]]:
    """Return (step, path) of each checkpoint in a folder, the newest first; those being written are not among them."""
    if not folder.is_dir():
        return []
    found = ((_NAME.fullmatch(path.name), path) for path in folder.iterdir())
    return sorted(((int(match[1]), path) for match, path in found if match), reverse=True)


def newest_checkpoint(folder: Path) -> Checkpoint | None:
    """Return the newest checkpoint of a folder, None where there is none.

    Raises ProgramError where it is damaged, with the newest one that is not; nothing is changed.
    """
    listed = list_checkpoints(folder)
    if not listed:
        return None
    try:
        return read_checkpoint(listed[0][1])
    except ProgramError as error:
        for step, path in listed[1:]:
            try:
                read_checkpoint(path)
            except ProgramError:
                continue
            raise ProgramError(f"{error}; that of step {step} is complete: go on with --resume {path}") from None
        raise ProgramError(f"{error}; there is no complete one in {folder}") from None


def prune(folder: Path, *, step: int, keep: int) -> None:
    """Remove all but the newest `keep` checkpoints up to a step, and what a save that was cut off has left.

    Later ones, of a training that this one branched off from, are set aside: renamed to ``….superseded``.
    """
    listed = list_checkpoints(folder)
    for later, path in listed:
        if later > step:
            path.replace(path.with_name(f"{path.name}.superseded"))
    for _, path in [item for item in listed if item[0] <= step][keep:]:
        path.unlink(missing_ok=True)
    for path in list(folder.iterdir()):
        if _PART.fullmatch(path.name):
            path.unlink(missing_ok=True)


NEWEST = "newest"
"""What to go on from where no file is named."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpointing:
    """Where and when checkpoints are written.

    folder: made if it is missing. save_every: steps; the last step is saved too. keep: how many are kept.
    resume: None to begin anew, `NEWEST`, or the file to go on from.
    """

    folder: Path
    save_every: int = 100
    keep: int = 3
    resume: str | None = None

    def __post_init__(self) -> None:
        for name, value in (("save-every", self.save_every), ("keep", self.keep)):
            if value < 1:
                raise ProgramError(f"{name} is {value}; expected 1 or more")

    @classmethod
    def asked(cls, values: Mapping[str, Any]) -> "Checkpointing | None":
        """Return what the options checkpoint, save_every, keep and resume ask for, None where nothing is kept.

        Raises ProgramError where one of them needs a folder that is not named.
        """
        folder, every, resume = values["checkpoint"], values["save_every"], values["resume"]
        if folder is None:
            if resume is not None or every is not None:
                raise ProgramError("--resume and --save-every need --checkpoint DIR, the folder of the checkpoints")
            return None
        return cls(folder=folder, save_every=100 if every is None else every, keep=values["keep"], resume=resume)

    def found(self) -> Checkpoint | None:
        """Return the checkpoint to go on from, None to begin with the first step.

        Raises ProgramError where it is damaged, where the folder holds another training's, where it cannot be made.
        """
        listed = list_checkpoints(self.folder)
        if self.resume is None and listed:
            raise ProgramError(
                f"{self.folder} holds checkpoints up to step {listed[0][0]}; go on with --resume or name another one"
            )
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ProgramError(f"cannot make folder {self.folder} for checkpoints: {error}") from None
        if self.resume is None:
            return None
        return newest_checkpoint(self.folder) if self.resume == NEWEST else read_checkpoint(Path(self.resume))

    def newest(self) -> Path | None:
        """Return the newest checkpoint of the folder, None where there is none."""
        listed = list_checkpoints(self.folder)
        return listed[0][1] if listed else None

    def path_of(self, checkpoint: Checkpoint) -> Path:
        """Return the file that a checkpoint which was found is in."""
        is_named = self.resume not in (None, NEWEST)
        return Path(str(self.resume)) if is_named else checkpoint_path(self.folder, checkpoint.step)

    def is_due(self, step: int, num_steps: int) -> bool:
        """Whether to write one after a step, counted from 1."""
        return step % self.save_every == 0 or step == num_steps

    def save(self, state: "TrainingState", *, dtype: str, seed: int, rule: Rule, data: Mapping[str, Any]) -> Path:
        """Write the checkpoint of a state, remove those beyond `keep`, and return its path."""
        return self.write(
            Checkpoint(
                step=state.num_steps,
                dtype=dtype,
                seed=seed,
                optimiser=name_of(rule),
                options=options_of(rule),
                data=data,
                weights=state.weights,
                slots=state.slots,
            )
        )

    def write(self, checkpoint: Checkpoint) -> Path:
        """Write a checkpoint, remove those beyond `keep`, and return its path."""
        path = write_checkpoint(self.folder, checkpoint)
        try:
            prune(self.folder, step=checkpoint.step, keep=self.keep)
        except OSError as error:
            raise ProgramError(f"{path} is written, but an older one cannot be removed: {error}") from None
        return path


def check_fits(
    checkpoint: Checkpoint,
    checkpointing: Checkpointing,
    program: "Program",
    options: TrainingOptions,
    *,
    data: Mapping[str, Any],
) -> None:
    """Raise ProgramError where a checkpoint is of another model, optimiser, type, seed or data, naming the first."""
    path = checkpointing.path_of(checkpoint)
    head = f"checkpoint {path} is of another"
    check_weights(f"{head} model", checkpoint, {name: weight.shape for name, weight in program.weights.items()})
    optimiser = name_of(options.rule)
    if checkpoint.optimiser != optimiser:
        raise ProgramError(
            f"{head} optimiser: {checkpoint.optimiser}, not {optimiser}; give --optimizer {checkpoint.optimiser}"
        )
    if checkpoint.dtype != program.dtype.name:
        raise ProgramError(
            f"{head} type: {checkpoint.dtype}, not {program.dtype.name}; give --dtype {checkpoint.dtype}"
        )
    if options.seed not in (None, checkpoint.seed):
        raise ProgramError(f"{head} seed: {checkpoint.seed}, not {options.seed}; leave --seed out, it is kept")
    check_data(f"{head} training's data", checkpoint, data)
    if checkpoint.step >= options.steps:
        raise ProgramError(
            f"{path} is of step {checkpoint.step}; nothing is left of {options.steps} steps, ask for more"
        )


def check_weights(head: str, checkpoint: Checkpoint, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raise ProgramError, which begins with the head, where a checkpoint holds weights of other names or shapes."""
    for name in sorted({*shapes, *checkpoint.weights}):
        if name not in checkpoint.weights:
            raise ProgramError(f"{head}: it has no weight {name!r}")
        if name not in shapes:
            raise ProgramError(f"{head}: this one has no weight {name!r}")
        found = checkpoint.weights[name].shape
        if found != shapes[name]:
            raise ProgramError(f"{head}: its weight {name!r} has shape {list(found)}, not {list(shapes[name])}")


def check_data(head: str, checkpoint: Checkpoint, data: Mapping[str, Any]) -> None:
    """Raise ProgramError, which begins with the head, where a checkpoint's data are not those described."""
    for key in sorted({*checkpoint.data, *data}):
        if checkpoint.data.get(key) != data.get(key):
            raise ProgramError(
                f"{head}: their {key} is {checkpoint.data.get(key)}, not {data.get(key)}; "
                "give the same data, their position is part of the checkpoint"
            )
