"""Options of training: devices, learning-rate schedule and hyperparameters, and their command-line flags."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from math import cos, pi, sqrt
from pathlib import Path
from types import MappingProxyType
from typing import Any

import click

from pase.common.options import PATH, POSITIVE, option, options_of_all
from pase.errors import ProgramError, unknown_name
from pase.targets.training.optimisers import OPTIMISERS, Rule, Sgd, make_rule, name_of, options_of

CPU, GPU = "CPU", "GPU"

KINDS = {CPU: "virtual CPU devices", GPU: "GPUs"}
"""Kinds of devices, and their names in messages."""

DEFAULT_GPU_MEMORY_MIB = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceChoice:
    """Virtual CPU devices or GPUs.

    Attributes:
        virtual: Whether to place several devices on one GPU where there are too few.
        memory_mib: Memory of each virtual GPU in MiB.

    Raises ProgramError for contradictory values.
    """

    kind: str = CPU
    virtual: bool = False
    memory_mib: int = DEFAULT_GPU_MEMORY_MIB

    def __post_init__(self) -> None:
        if self.virtual and self.kind == CPU:
            raise ProgramError(
                "--virtual is for GPUs, and CPU devices are virtual as they are; leave it out, or add --device GPU"
            )
        if self.memory_mib < 1:
            raise ProgramError(f"a virtual GPU is to have {self.memory_mib} MiB of memory; give 1 or more")

    @property
    def text(self) -> str:
        """Name of the devices in messages."""
        return KINDS[self.kind]

    def command_line(self) -> list[str]:
        """Return the program arguments that select the same devices."""
        chosen = [f"--device={self.kind}", f"--gpu-memory={self.memory_mib}"]
        return [*chosen, "--virtual"] if self.virtual else chosen


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """Learning-rate schedule.

    Attributes:
        peak: Rate after the warm-up, which rises linearly from peak / warmup_steps.
        kind: What follows the warm-up: a name of `SCHEDULES`.
        num_steps: Step at which a cosine reaches `final`.
        decay_every, decay_factor: Interval and factor of the "step" schedule.

    Raises ProgramError for a value out of range.
    """

    peak: float
    kind: str = "constant"
    warmup_steps: int = 0
    num_steps: int = 1
    final: float = 0.0
    decay_every: int = 1
    decay_factor: float = 0.1

    def __post_init__(self) -> None:
        if self.kind not in SCHEDULES:
            raise ProgramError(unknown_name("schedule", self.kind, SCHEDULES))
        if not 0 < self.peak < float("inf"):
            raise ProgramError(f"the learning rate is {self.peak:g}; it must be above 0")
        wrong = {
            "warm-up steps": (self.warmup_steps, self.warmup_steps >= 0, "0 or more"),
            "schedule steps": (self.num_steps, self.num_steps >= 1, "1 or more"),
            "final learning rate": (self.final, 0 <= self.final <= self.peak, "from 0 to the learning rate"),
            "steps of a decay": (self.decay_every, self.decay_every >= 1, "1 or more"),
            "decay factor": (self.decay_factor, 0 < self.decay_factor <= 1, "above 0 and at most 1"),
        }
        for name, (value, is_right, expected) in wrong.items():
            if not is_right:
                raise ProgramError(f"{name} is {value:g}; expected {expected}")
        if self.kind == "cosine" and self.warmup_steps >= self.num_steps:
            raise ProgramError(
                f"a warm-up of {self.warmup_steps} steps leaves none of {self.num_steps} for the cosine; shorten it"
            )

    def rate(self, step: int) -> float:
        """Return the learning rate of a step, counted from 0."""
        if step < self.warmup_steps:
            return self.peak * (step + 1) / self.warmup_steps
        return SCHEDULES[self.kind](self, step)


def _constant(schedule: Schedule, step: int) -> float:
    return schedule.peak


def _cosine(schedule: Schedule, step: int) -> float:
    """Half a cosine from the peak to the final rate (Loshchilov and Hutter 2017, Eq. 5, without restarts)."""
    done = min(1.0, (step - schedule.warmup_steps) / (schedule.num_steps - schedule.warmup_steps))
    return schedule.final + (schedule.peak - schedule.final) * (1 + cos(pi * done)) / 2


def _step(schedule: Schedule, step: int) -> float:
    """The peak, multiplied by the factor every `decay_every` steps after the warm-up."""
    return schedule.peak * float(schedule.decay_factor ** ((step - schedule.warmup_steps) // schedule.decay_every))


def _inverse_sqrt(schedule: Schedule, step: int) -> float:
    """The peak at the end of the warm-up, then proportional to 1/√step (Vaswani et al. 2017, Eq. 3)."""
    return schedule.peak * sqrt(max(1, schedule.warmup_steps) / (step + 1))


SCHEDULES: Mapping[str, Callable[[Schedule, int], float]] = MappingProxyType(
    {"constant": _constant, "cosine": _cosine, "step": _step, "inverse_sqrt": _inverse_sqrt}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingOptions:
    """Options that determine the losses of a training, independent of where it runs.

    Attributes:
        steps: Total number of steps, including those before a checkpoint to resume from.
        dtype: "float32" or "float64".
        seed: Seed of the weights and of synthetic data; None for 0, or the checkpoint's.
        schedule: Learning-rate schedule.
        rule: Update rule.
        data_path: Arrays to train on; None for synthetic data.
        test_data_path: Data to test on every `test_every` steps (None: never) and after the last step.
        weights_path: Initial weights, by name; None to draw them from the seed.

    Raises ProgramError for a value out of range.
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
            raise ProgramError(f"steps is {self.steps}; expected 1 or more")
        if self.dtype not in ITEMSIZES:
            raise ProgramError(f"the number type is {self.dtype!r}; expected {' or '.join(ITEMSIZES)}")
        if self.seed is not None and self.seed < 0:
            raise ProgramError(f"the seed is {self.seed}; it must be 0 or more")
        if self.test_every is not None and self.test_every < 1:
            raise ProgramError(f"test-every is {self.test_every}; expected 1 or more")
        if self.test_every is not None and self.test_data_path is None:
            raise ProgramError("--test-every needs --test-data PATH, the data to test on")

    def is_test_due(self, step: int) -> bool:
        """Return whether to test after a step, counted from 1."""
        if self.test_data_path is None:
            return False
        return step == self.steps or (self.test_every is not None and step % self.test_every == 0)


ITEMSIZES = {"float32": 4, "float64": 8}
"""Bytes per element of each type."""


dtype_option = option("--dtype", type=click.Choice(tuple(ITEMSIZES)), default="float32")
_data = partial(option, type=PATH, metavar="PATH", heading="Data")
_rule = partial(option, type=float, heading="Optimiser")
_rate = partial(option, type=float, heading="Learning rate")
_devices = partial(option, heading="Devices")

training_flags = options_of_all(
    dtype_option,
    option("--seed", type=int, metavar="N", help="Seed of the initial weights and of synthetic data [0]."),
    _data(
        "--data", help="An .npz file, or a directory of .npy files, with an array [N, ...] for each input [synthetic]."
    ),
    _data("--test-data", help="Held-out data; their loss and accuracy are shown after the last step."),
    _data(
        "--weights",
        metavar="FILE",
        help="Begin with these: an .npz file that 'pase weights' wrote of an imported model [drawn].",
    ),
    _data("--test-every", type=int, metavar="K", help="Test after every K steps too."),
    _rule("--optimizer", type=click.Choice(tuple(OPTIMISERS)), default="sgd"),
    _rule("--momentum", help="Of momentum [0.9]."),
    # None where not given, so that a rule without this option does not reject it.
    _rule("--nesterov", type=bool, is_flag=True, default=None, help="Nesterov momentum."),
    _rule("--weight-decay", help="L2 factor of sgd and momentum [0]; decay of adamw [0.01]."),
    _rule("--beta1", help="Of adam and adamw [0.9]."),
    _rule("--beta2", help="Of adam and adamw [0.999]."),
    _rule("--epsilon", help="Of adam and adamw [1e-8]."),
    _rate("--learning-rate", default=0.01, metavar="RATE", help="Its peak."),
    _rate("--schedule", type=click.Choice(tuple(SCHEDULES)), default="constant"),
    _rate("--warmup-steps", type=int, default=0, metavar="N", help="Rise to the peak over N steps."),
    _rate("--schedule-steps", type=int, metavar="N", help="Where a cosine ends [the last step]."),
    _rate("--final-learning-rate", default=0.0, metavar="RATE", help="Where a cosine ends."),
    _rate("--decay-every", type=int, default=1000, metavar="N", help="Steps of schedule step."),
    _rate("--decay-factor", default=0.1, help="Of schedule step."),
)
"""Adds the options that determine the losses of a training; a rule's own default is given in brackets."""

device_options = options_of_all(
    _devices("--device", type=click.Choice(tuple(KINDS)), default=CPU, help="Virtual CPUs, or GPUs."),
    _devices("--virtual", is_flag=True, help="Put several devices on a GPU where there are too few."),
    _devices(
        "--gpu-memory",
        type=POSITIVE,
        default=DEFAULT_GPU_MEMORY_MIB,
        metavar="MIB",
        help="Memory of each device of --virtual.",
    ),
)
"""Adds the options of `DeviceChoice`."""


def device_choice(values: Mapping[str, Any]) -> DeviceChoice:
    """Return the devices that the values of `device_options` select."""
    return DeviceChoice(kind=values["device"], virtual=values["virtual"], memory_mib=values["gpu_memory"])


_OF_TRAINING = {
    "dtype": "dtype",
    "seed": "seed",
    "data": "data_path",
    "test_data": "test_data_path",
    "test_every": "test_every",
    "weights": "weights_path",
}
"""Fields of `TrainingOptions` by the names of their command-line options."""

_OF_SCHEDULE = {
    "learning_rate": "peak",
    "schedule": "kind",
    "warmup_steps": "warmup_steps",
    "schedule_steps": "num_steps",
    "final_learning_rate": "final",
    "decay_every": "decay_every",
    "decay_factor": "decay_factor",
}
"""Likewise of `Schedule`."""

_RULE_OPTIONS = ("momentum", "nesterov", "weight_decay", "beta1", "beta2", "epsilon")


def training_options(values: Mapping[str, Any]) -> TrainingOptions:
    """Return the options for the values of `training_flags` by name, and of steps.

    Raises ProgramError for values out of range, and for an option that the optimiser does not have.
    """
    schedule = {field: values[name] for name, field in _OF_SCHEDULE.items()}
    if schedule["num_steps"] is None:
        # `TrainingOptions` itself checks that the number of steps is positive.
        schedule["num_steps"] = max(1, values["steps"])
    return TrainingOptions(
        steps=values["steps"],
        schedule=Schedule(**schedule),
        rule=make_rule(values["optimizer"], {name: values[name] for name in _RULE_OPTIONS}),
        **{field: values[name] for name, field in _OF_TRAINING.items()},
    )


def command_line(options: TrainingOptions) -> list[str]:
    """Return arguments from which `training_options` returns the same options, in any folder."""
    return list(_arguments(options))


def _arguments(options: TrainingOptions) -> Iterator[str]:
    schedule, rule = options.schedule, options.rule
    values: dict[str, Any] = {"steps": options.steps, "optimizer": name_of(rule)}
    values |= {name: getattr(options, field) for name, field in _OF_TRAINING.items()}
    values |= {name: getattr(schedule, field) for name, field in _OF_SCHEDULE.items()}
    values |= {name: Path(value).resolve() for name, value in values.items() if isinstance(value, Path)}
    defaults = options_of(make_rule(name_of(rule), {}))
    for name, value in options_of(rule).items():
        if value != defaults[name]:
            if name not in _RULE_OPTIONS:
                raise ProgramError(
                    f"{name} of optimiser {name_of(rule)} is {value:g}; programs have no flag for it, leave it at "
                    f"{defaults[name]:g}"
                )
            values[name] = value
    for key, value in values.items():
        flag = f"--{key.replace('_', '-')}"
        if value is True:
            yield flag
        elif value is not None:
            # One argument: a value may start with a dash.
            yield f"{flag}={value}"
