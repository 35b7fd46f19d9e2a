"""`TrainingRequest`: what a training across workers is asked for, one value for every runtime; loads no framework."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from pase.common.documents import LARGEST_INTEGER
from pase.datasets import has_parts
from pase.easgd.job import Job
from pase.easgd.samples import DataSplit
from pase.errors import TrainingError
from pase.graph import Scalar
from pase.machine import DEFAULT_MACHINE, Machine
from pase.targets.mesh_tensorflow.runtime.device_choice import DeviceChoice
from pase.targets.mesh_tensorflow.runtime.options import WORD_BYTES
from pase.targets.mesh_tensorflow.runtime.resume import Checkpointing


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingRequest:
    """What is trained, how, and with what.

    source: a model, a plan or an emitted program, and devices, batch, arguments, machine: as `load_build` has them.
    packed: one message for all weights, not one for each weight array. seed: of weights, samples and made-up data; None
    for 0, or the checkpoint's. data, test_data: as `load_dataset` has them; data None for made-up numbers, test_data
    None for the test part of the data, where these have one. data_split: of the data among the workers. choice: of each
    replica's devices. metrics_path: of a file with a line of JSON for each event that is one of a step. trace_path: of
    a file with the arrays of every step, of a training in one process. Raises PaseError for what cannot be.
    """

    job: Job
    source: str
    devices: int = 1
    batch: int | None = None
    arguments: Mapping[str, Scalar] | None = None
    machine: Machine | str = DEFAULT_MACHINE
    packed: bool = True
    dtype: str = "float32"
    seed: int | None = None
    data: str | None = None
    data_split: DataSplit = DataSplit.PARTITION
    test_data: str | None = None
    choice: DeviceChoice = field(default_factory=DeviceChoice)
    checkpointing: Checkpointing | None = None
    metrics_path: Path | None = None
    trace_path: Path | None = None

    def __post_init__(self) -> None:
        if self.dtype not in WORD_BYTES:
            raise TrainingError(f"the number type is {self.dtype!r}; expected {' or '.join(WORD_BYTES)}")
        if self.seed is not None and not 0 <= self.seed <= LARGEST_INTEGER:
            raise TrainingError(f"the seed is {self.seed}; expected 0 to {LARGEST_INTEGER}")
        tests_on = self.tests_on
        if self.job.test_every is not None and tests_on is None:
            raise TrainingError("--test-every needs data to test on: --test-data PATH, or --data that have a test part")

    @property
    def tests_on(self) -> str | None:
        """The data to test on, None for none."""
        if self.test_data is not None:
            return self.test_data
        return self.data if self.data is not None and has_parts(self.data) else None

    @property
    def whole_job(self) -> Job:
        """The job with what follows from the rest: a last test where there are data for it, checkpoints."""
        test_every = self.job.test_every or (self.job.num_steps if self.tests_on else None)
        save_every = self.checkpointing.save_every if self.checkpointing else None
        return replace(self.job, test_every=test_every, save_every=save_every)
