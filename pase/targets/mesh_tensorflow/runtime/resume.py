"""When checkpoints are written, which one a training goes on from, and whether that one is of this training."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pase.errors import RuntimeFailure
from pase.targets.mesh_tensorflow.runtime.checkpoint import (
    Checkpoint,
    checkpoint_path,
    list_checkpoints,
    newest_checkpoint,
    prune,
    read_checkpoint,
    write_checkpoint,
)
from pase.targets.mesh_tensorflow.runtime.optimisers import Rule, name_of, options_of
from pase.targets.mesh_tensorflow.runtime.options import TrainingOptions

if TYPE_CHECKING:  # they load the framework; a checkpoint that does not fit is found out before that
    from pase.targets.mesh_tensorflow.runtime.program import Program
    from pase.targets.mesh_tensorflow.runtime.training import TrainingState

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
                raise RuntimeFailure(f"{name} is {value}; expected 1 or more")

    def found(self) -> Checkpoint | None:
        """Return the checkpoint to go on from, None to begin with the first step.

        Raises RuntimeFailure where it is damaged, where the folder holds another training's, where it cannot be made.
        """
        listed = list_checkpoints(self.folder)
        if self.resume is None and listed:
            raise RuntimeFailure(
                f"{self.folder} holds checkpoints up to step {listed[0][0]}; go on with --resume or name another one"
            )
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RuntimeFailure(f"cannot make folder {self.folder} for checkpoints: {error}") from None
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
            raise RuntimeFailure(f"{path} is written, but an older one cannot be removed: {error}") from None
        return path


def check_fits(
    checkpoint: Checkpoint,
    checkpointing: Checkpointing,
    program: "Program",
    options: TrainingOptions,
    *,
    data: Mapping[str, Any],
) -> None:
    """Raise RuntimeFailure where a checkpoint is of another model, optimiser, type, seed or data, naming the first."""
    path = checkpointing.path_of(checkpoint)
    head = f"checkpoint {path} is of another"
    check_weights(f"{head} model", checkpoint, {name: weight.shape for name, weight in program.weights.items()})
    optimiser = name_of(options.rule)
    if checkpoint.optimiser != optimiser:
        raise RuntimeFailure(
            f"{head} optimiser: {checkpoint.optimiser}, not {optimiser}; give --optimizer {checkpoint.optimiser}"
        )
    if checkpoint.dtype != program.dtype.name:
        raise RuntimeFailure(
            f"{head} type: {checkpoint.dtype}, not {program.dtype.name}; give --dtype {checkpoint.dtype}"
        )
    if options.seed not in (None, checkpoint.seed):
        raise RuntimeFailure(f"{head} seed: {checkpoint.seed}, not {options.seed}; leave --seed out, it is kept")
    check_data(f"{head} training's data", checkpoint, data)
    if checkpoint.step >= options.steps:
        raise RuntimeFailure(
            f"{path} is of step {checkpoint.step}; nothing is left of {options.steps} steps, ask for more"
        )


def check_weights(head: str, checkpoint: Checkpoint, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raise RuntimeFailure, which begins with the head, where a checkpoint holds weights of other names or shapes."""
    for name in sorted({*shapes, *checkpoint.weights}):
        if name not in checkpoint.weights:
            raise RuntimeFailure(f"{head}: it has no weight {name!r}")
        if name not in shapes:
            raise RuntimeFailure(f"{head}: this one has no weight {name!r}")
        found = checkpoint.weights[name].shape
        if found != shapes[name]:
            raise RuntimeFailure(f"{head}: its weight {name!r} has shape {list(found)}, not {list(shapes[name])}")


def check_data(head: str, checkpoint: Checkpoint, data: Mapping[str, Any]) -> None:
    """Raise RuntimeFailure, which begins with the head, where a checkpoint's data are not those described."""
    for key in sorted({*checkpoint.data, *data}):
        if checkpoint.data.get(key) != data.get(key):
            raise RuntimeFailure(
                f"{head}: their {key} is {checkpoint.data.get(key)}, not {data.get(key)}; "
                "give the same data, their position is part of the checkpoint"
            )
