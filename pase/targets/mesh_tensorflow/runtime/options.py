"""`TrainingOptions`: how a network is trained, one value for the parallel program and for the reference."""

from dataclasses import dataclass, field
from pathlib import Path

from pase.errors import RuntimeFailure
from pase.targets.mesh_tensorflow.runtime.optimisers import Rule, Sgd
from pase.targets.mesh_tensorflow.runtime.schedules import Schedule


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingOptions:
    """What decides the losses of a training, wherever it runs.

    steps: in all, those before a checkpoint that it goes on from included. dtype: "float32" or "float64". seed: of the
    weights and of made-up data; None for 0, or the checkpoint's. schedule: of the learning rate. rule: of the updates.
    data_path: of the arrays to train on, None for made-up ones. test_data_path: of those to test on every test_every
    steps (None: never between) and after the last one. weights_path: of the weights to begin with, by name, None for
    those that the seed draws. Raises RuntimeFailure for a value out of range.
    """

    steps: int
    dtype: str = "float32"
    seed: int | None = None
    schedule: Schedule = field(default_factory=lambda: Schedule(peak=0.01))
    rule: Rule = field(default_factory=Sgd)
    data_path: Path | None = None
    test_data_path: Path | None = None
    test_every: int | None = None
    weights_path: Path | None = None

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise RuntimeFailure(f"steps is {self.steps}; expected 1 or more")
        if self.dtype not in WORD_BYTES:
            raise RuntimeFailure(f"the number type is {self.dtype!r}; expected {' or '.join(WORD_BYTES)}")
        if self.seed is not None and self.seed < 0:
            raise RuntimeFailure(f"the seed is {self.seed}; it must be 0 or more")
        if self.test_every is not None and self.test_every < 1:
            raise RuntimeFailure(f"test-every is {self.test_every}; expected 1 or more")
        if self.test_every is not None and self.test_data_path is None:
            raise RuntimeFailure("--test-every needs --test-data PATH, the data to test on")

    def is_test_due(self, step: int) -> bool:
        """Whether to test after a step, counted from 1."""
        if self.test_data_path is None:
            return False
        return step == self.steps or (self.test_every is not None and step % self.test_every == 0)


WORD_BYTES = {"float32": 4, "float64": 8}
"""Bytes of a number of each type."""
