"""Checkpoint folders, independent of their contents: when to save, which one to resume from, and whether it fits.

The contents of a checkpoint, and how it is written and read, are up to each target: a file, or a folder that the ranks
write together.
"""

import os
import re
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from shlex import quote
from typing import Any, ClassVar, Self

from pase.common.documents import DocumentSource
from pase.common.options import PATH, option, options_of_all
from pase.common.structs import Document, Scalars, Whole, read
from pase.errors import ProgramError
from pase.targets.training.optimisers import Rule, name_of, options_of
from pase.targets.training.options import TrainingOptions

NEWEST = "newest"
"""Value of `resume` for the newest checkpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """Description of a training that its checkpoint stores.

    Attributes:
        step: Number of completed steps, which is also the position in the data.
        optimiser, options: Name and options of the update rule.
        data: Fingerprint of the data.
    """

    step: int
    dtype: str
    seed: int
    optimiser: str
    options: Mapping[str, Any]
    data: Mapping[str, Any]

    @classmethod
    def of(cls, options: TrainingOptions, *, step: int, seed: int, data: Mapping[str, Any], **others: Any) -> Self:
        """Return the description of a training after a step; `others` are further fields of a target's checkpoint."""
        rule: Rule = options.rule
        return cls(
            step=step,
            dtype=options.dtype,
            seed=seed,
            optimiser=name_of(rule),
            options=options_of(rule),
            data=data,
            **others,
        )

    def document(self) -> dict[str, Any]:
        """Return it as a JSON document."""
        return {
            "step": self.step,
            "dtype": self.dtype,
            "seed": self.seed,
            "optimiser": {"name": self.optimiser, "options": dict(self.options)},
            "data": dict(self.data),
        }

    @classmethod
    def read(
        cls, document: object, source: DocumentSource, kind: type["KeptDocument"] | None = None, **others: Any
    ) -> Self:
        """Read it from a document; raise the source's error where the document is invalid."""
        found = read(kind or KeptDocument, document, source)
        return cls(
            step=found.step,
            dtype=found.dtype,
            seed=found.seed,
            optimiser=found.optimiser.name,
            options=found.optimiser.options,
            data=found.data,
            **others,
        )


class _RuleDocument(Document):
    name: str
    options: Scalars


class KeptDocument(Document):
    """Description of a training that its checkpoint stores."""

    step: Whole
    dtype: str
    seed: Whole
    optimiser: _RuleDocument
    data: dict[str, Any]


def called(weight: str, slot: str) -> str:
    """Return the name of a weight, or of its optimiser state, for messages."""
    return f"{slot.replace('_', ' ')} of weight {weight!r}" if slot else f"weight {weight!r}"


# -- checkpoint folders


def checkpoint_path(folder: Path, step: int, suffix: str = "") -> Path:
    """Return where the checkpoint of a step is."""
    return folder / f"step-{step:010d}{suffix}"


def is_checkpoint_name(name: str, suffix: str = "") -> bool:
    """Return whether a name is that of a checkpoint."""
    return re.fullmatch(rf"step-(\d{{10}}){re.escape(suffix)}", name) is not None


def list_checkpoints(folder: Path, suffix: str = "") -> list[tuple[int, Path]]:
    """Return (step, path) of each complete checkpoint in a folder, newest first."""
    if not folder.is_dir():
        return []
    name = re.compile(rf"step-(\d{{10}}){re.escape(suffix)}")
    found = ((name.fullmatch(path.name), path) for path in folder.iterdir())
    return sorted(((int(match[1]), path) for match, path in found if match), reverse=True)


def with_another(
    error: ProgramError, damaged: Path, read: Callable[[Path], object], *, suffix: str = "", how: str
) -> ProgramError:
    """Return the error of a damaged checkpoint, extended by the newest intact one in the same folder.

    Args:
        error: The error.
        damaged: Path of the damaged checkpoint.
        read: Reads a checkpoint; raises ProgramError if it is damaged.
        suffix: Suffix of the names of checkpoints.
        how: What to do with the other one, for the message.
    """
    for step, path in list_checkpoints(damaged.parent, suffix):
        with suppress(ProgramError):
            if path != damaged:
                read(path)
                return ProgramError(f"{error}; that of step {step} is complete: {how} {path}")
    return ProgramError(f"{error}; there is no complete one in {damaged.parent}")


def prune(folder: Path, *, step: int, keep: int, suffix: str = "") -> None:
    """Remove all but the newest `keep` checkpoints up to a step, and incomplete ones of interrupted saves.

    Later ones, of a training from which this one branched off, are renamed to ``….superseded``.
    """
    listed = list_checkpoints(folder, suffix)
    for later, path in listed:
        if later > step:
            aside = path.with_name(f"{path.name}.superseded")
            _delete(aside)
            path.replace(aside)
    for _, path in [item for item in listed if item[0] <= step][keep:]:
        remove(path)
    part = re.compile(rf"\.step-\d{{10}}{re.escape(suffix)}\.(part|old)")
    for path in list(folder.iterdir()):
        if part.fullmatch(path.name):
            _delete(path)


def remove(path: Path) -> None:
    """Remove a checkpoint completely."""
    # Rename a folder first, so that a partly deleted one does not count as a checkpoint.
    hidden = path.with_name(f".{path.name}.old")
    if path.is_dir():
        _delete(hidden)
        path = path.rename(hidden)
    _delete(path)


def _delete(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def sync_folder(folder: Path) -> None:
    """Flush the directory entries of a folder to disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointFolder:
    """Where and when checkpoints are written.

    Attributes:
        folder: The folder; created if it is missing.
        save_every: Interval in steps; the last step is saved, too.
        keep: Number of checkpoints to keep.
        resume: None to start from scratch, `NEWEST`, or the checkpoint to resume from.
        suffix: Suffix of the names of checkpoints.
    """

    suffix: ClassVar[str] = ""

    folder: Path
    save_every: int = 100
    keep: int = 3
    resume: str | None = None

    def __post_init__(self) -> None:
        for name, value in (("save-every", self.save_every), ("keep", self.keep)):
            if value < 1:
                raise ProgramError(f"{name} is {value}; expected 1 or more")

    @classmethod
    def asked(cls, values: Mapping[str, Any]) -> "Self | None":
        """Return the folder for the values of `checkpoint_flags`, None where no checkpoints are requested.

        Raises ProgramError where an option requires a folder and none is named.
        """
        folder, every, resume = values["checkpoint"], values["save_every"], values["resume"]
        if folder is None:
            if resume is not None or every is not None:
                raise ProgramError("--resume and --save-every need --checkpoint DIR, the folder of the checkpoints")
            return None
        return cls(folder=folder, save_every=100 if every is None else every, keep=values["keep"], resume=resume)

    def begin(self) -> None:
        """Create the folder; ProgramError where that fails, or it contains another training's checkpoints."""
        listed = list_checkpoints(self.folder, self.suffix)
        if self.resume is None and listed:
            raise ProgramError(
                f"{self.folder} holds checkpoints up to step {listed[0][0]}; go on with --resume or name another one"
            )
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ProgramError(f"cannot make folder {self.folder} for checkpoints: {error}") from None

    def newest(self) -> Path | None:
        """Return the newest checkpoint of the folder, None if there is none."""
        listed = list_checkpoints(self.folder, self.suffix)
        return listed[0][1] if listed else None

    def path_of(self, found: Kept) -> Path:
        """Return the path of the checkpoint that a training resumes from."""
        is_named = self.resume not in (None, NEWEST)
        return Path(str(self.resume)) if is_named else checkpoint_path(self.folder, found.step, self.suffix)

    def is_due(self, step: int, num_steps: int) -> bool:
        """Return whether to write a checkpoint after a step, counted from 1."""
        return step % self.save_every == 0 or step == num_steps


def stopped_text(folder: Path | None) -> str:
    """Return the message for a training that the user interrupted."""
    hint = f"; go on with --checkpoint {quote(str(folder))} --resume" if folder else ""
    return f"\nstopped{hint}\n"


_checkpoints = partial(option, heading="Checkpoints")

checkpoint_flags = options_of_all(
    _checkpoints("--checkpoint", type=PATH, metavar="DIR", help="The folder to keep checkpoints in."),
    _checkpoints("--save-every", type=int, metavar="N", help="Steps [100]; the last one is saved too."),
    _checkpoints("--keep", type=int, default=3, metavar="K", help="Keep the last K."),
    _checkpoints(
        "--resume",
        is_flag=False,
        flag_value=NEWEST,
        metavar="[FILE]",
        help="Go on from the newest checkpoint in DIR, or from a file; begin with step 1 where there is none.",
    ),
)
"""Adds the options of `CheckpointFolder`."""


# -- whether a checkpoint fits this training


def check_fits(
    found: Kept,
    path: Path,
    options: TrainingOptions,
    *,
    weights: Mapping[str, tuple[int, ...]],
    expected: Mapping[str, tuple[int, ...]],
    data: Mapping[str, Any],
) -> None:
    """Raise ProgramError where a checkpoint has another model, optimiser, type, seed or data, naming the first.

    Args:
        found: Description of the checkpoint's training.
        path: Path of the checkpoint.
        options: Options of this training.
        weights: Shapes of the checkpoint's weights, by name.
        expected: Shapes of the model's weights, by name.
        data: Fingerprint of this training's data.
    """
    head = f"checkpoint {path} is of another"
    check_weights(f"{head} model", weights, expected)
    optimiser = name_of(options.rule)
    if found.optimiser != optimiser:
        raise ProgramError(f"{head} optimiser: {found.optimiser}, not {optimiser}; give --optimizer {found.optimiser}")
    if found.dtype != options.dtype:
        raise ProgramError(f"{head} type: {found.dtype}, not {options.dtype}; give --dtype {found.dtype}")
    if options.seed not in (None, found.seed):
        raise ProgramError(f"{head} seed: {found.seed}, not {options.seed}; leave --seed out, it is kept")
    check_data(f"{head} training's data", found, data)
    if found.step >= options.steps:
        raise ProgramError(f"{path} is of step {found.step}; nothing is left of {options.steps} steps, ask for more")


def check_weights(head: str, weights: Mapping[str, tuple[int, ...]], expected: Mapping[str, tuple[int, ...]]) -> None:
    """Raise ProgramError, starting with `head`, where a checkpoint's weights have other names or shapes."""
    for name in sorted({*expected, *weights}):
        if name not in weights:
            raise ProgramError(f"{head}: it has no weight {name!r}")
        if name not in expected:
            raise ProgramError(f"{head}: this one has no weight {name!r}")
        if weights[name] != expected[name]:
            raise ProgramError(
                f"{head}: its weight {name!r} has shape {list(weights[name])}, not {list(expected[name])}"
            )


def check_data(head: str, found: Kept, data: Mapping[str, Any]) -> None:
    """Raise ProgramError, starting with `head`, where a checkpoint's data differ from the given description."""
    for key in sorted({*found.data, *data}):
        if found.data.get(key) != data.get(key):
            raise ProgramError(
                f"{head}: their {key} is {found.data.get(key)}, not {data.get(key)}; "
                "give the same data, their position is part of the checkpoint"
            )
