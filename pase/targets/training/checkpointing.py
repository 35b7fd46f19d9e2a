"""Checkpoints, whatever is in them: when they are kept in a folder, which one a training goes on from, whether it fits.

What a checkpoint is, and how it is written and read, is each target's: a file, or a folder that ranks write together.
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
"""What to go on from where no checkpoint is named."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """What a checkpoint says of its training.

    step: steps done, which is the position in the data too. optimiser, options: name and options of the update rule.
    data: what tells the data from others.
    """

    step: int
    dtype: str
    seed: int
    optimiser: str
    options: Mapping[str, Any]
    data: Mapping[str, Any]

    @classmethod
    def of(cls, options: TrainingOptions, *, step: int, seed: int, data: Mapping[str, Any], **others: Any) -> Self:
        """Return what is said of a training after a step; others: what a target's checkpoint has beside it."""
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
        """Return it as JSON has it."""
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
        """Return what a document says; the source's error where it is not of its kind."""
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
    """What a checkpoint says of its training."""

    step: Whole
    dtype: str
    seed: Whole
    optimiser: _RuleDocument
    data: dict[str, Any]


def called(weight: str, slot: str) -> str:
    """Return what messages call a weight, or what the optimiser keeps of it."""
    return f"{slot.replace('_', ' ')} of weight {weight!r}" if slot else f"weight {weight!r}"


# -- a folder of them


def checkpoint_path(folder: Path, step: int, suffix: str = "") -> Path:
    """Return where the checkpoint of a step is."""
    return folder / f"step-{step:010d}{suffix}"


def is_checkpoint_name(name: str, suffix: str = "") -> bool:
    """Return whether a name is that of a checkpoint."""
    return re.fullmatch(rf"step-(\d{{10}}){re.escape(suffix)}", name) is not None


def list_checkpoints(folder: Path, suffix: str = "") -> list[tuple[int, Path]]:
    """Return (step, path) of each checkpoint in a folder, the newest first; those being written are not among them."""
    if not folder.is_dir():
        return []
    name = re.compile(rf"step-(\d{{10}}){re.escape(suffix)}")
    found = ((name.fullmatch(path.name), path) for path in folder.iterdir())
    return sorted(((int(match[1]), path) for match, path in found if match), reverse=True)


def with_another(
    error: ProgramError, damaged: Path, read: Callable[[Path], object], *, suffix: str = "", how: str
) -> ProgramError:
    """Return the error of a damaged checkpoint, and the newest one beside it that is not.

    read: raises ProgramError where one is damaged. how: what is to be done with the other one.
    """
    for step, path in list_checkpoints(damaged.parent, suffix):
        with suppress(ProgramError):
            if path != damaged:
                read(path)
                return ProgramError(f"{error}; that of step {step} is complete: {how} {path}")
    return ProgramError(f"{error}; there is no complete one in {damaged.parent}")


def prune(folder: Path, *, step: int, keep: int, suffix: str = "") -> None:
    """Remove all but the newest `keep` checkpoints up to a step, and what a save that was cut off has left.

    Later ones, of a training that this one branched off from, are set aside: renamed to ``….superseded``.
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
    """Remove a checkpoint, whole."""
    # The name of a folder goes first: what is half deleted is no checkpoint.
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
    """Have the names in a folder on disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointFolder:
    """Where and when checkpoints are written.

    folder: made if it is missing. save_every: steps; the last step is saved too. keep: how many are kept.
    resume: None to begin anew, `NEWEST`, or the checkpoint to go on from. suffix: of the names of checkpoints.
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
        """Return what the values of `checkpoint_flags` ask for, None where nothing is kept.

        Raises ProgramError where one of them needs a folder that is not named.
        """
        folder, every, resume = values["checkpoint"], values["save_every"], values["resume"]
        if folder is None:
            if resume is not None or every is not None:
                raise ProgramError("--resume and --save-every need --checkpoint DIR, the folder of the checkpoints")
            return None
        return cls(folder=folder, save_every=100 if every is None else every, keep=values["keep"], resume=resume)

    def begin(self) -> None:
        """Make the folder; ProgramError where that cannot be, and where it holds another training's checkpoints."""
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
        """Return the newest checkpoint of the folder, None where there is none."""
        listed = list_checkpoints(self.folder, self.suffix)
        return listed[0][1] if listed else None

    def path_of(self, found: Kept) -> Path:
        """Return where a checkpoint is that was found to go on from."""
        is_named = self.resume not in (None, NEWEST)
        return Path(str(self.resume)) if is_named else checkpoint_path(self.folder, found.step, self.suffix)

    def is_due(self, step: int, num_steps: int) -> bool:
        """Whether to write one after a step, counted from 1."""
        return step % self.save_every == 0 or step == num_steps


def stopped_text(folder: Path | None) -> str:
    """Return what to say where somebody stops a training."""
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


# -- whether one is of this training


def check_fits(
    found: Kept,
    path: Path,
    options: TrainingOptions,
    *,
    weights: Mapping[str, tuple[int, ...]],
    expected: Mapping[str, tuple[int, ...]],
    data: Mapping[str, Any],
) -> None:
    """Raise ProgramError where a checkpoint is of another model, optimiser, type, seed or data, naming the first.

    weights: shapes of the checkpoint's weights, by name. expected: those of the model's.
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
    """Raise ProgramError, which begins with the head, where a checkpoint holds weights of other names or shapes."""
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
    """Raise ProgramError, which begins with the head, where a checkpoint's data are not those described."""
    for key in sorted({*found.data, *data}):
        if found.data.get(key) != data.get(key):
            raise ProgramError(
                f"{head}: their {key} is {found.data.get(key)}, not {data.get(key)}; "
                "give the same data, their position is part of the checkpoint"
            )
