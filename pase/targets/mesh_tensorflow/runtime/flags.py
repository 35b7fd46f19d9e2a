"""The training options of a command line: one table for emitted programs and for `pase run`."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pase.errors import RuntimeFailure
from pase.targets.mesh_tensorflow.runtime.optimisers import OPTIMISERS, make_rule, name_of, options_of
from pase.targets.mesh_tensorflow.runtime.options import WORD_BYTES, TrainingOptions
from pase.targets.mesh_tensorflow.runtime.schedules import SCHEDULES, Schedule


class Takes(Enum):
    """What follows a flag."""

    WHOLE = auto()
    NUMBER = auto()
    CHOICE = auto()
    PATH = auto()
    NOTHING = auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class Flag:
    """One option.

    text: what it is, as part of a sentence. choices: of `Takes.CHOICE`. metavar: "" for the usual one.
    """

    name: str
    takes: Takes
    text: str = ""
    default: Any = None
    choices: tuple[str, ...] = ()
    metavar: str = ""

    @property
    def key(self) -> str:
        """The name of its value."""
        return self.name.replace("-", "_")

    @property
    def shows_default(self) -> bool:
        """Whether its default says what happens without it."""
        return self.default is not None


GROUPS: Mapping[str, tuple[Flag, ...]] = MappingProxyType(
    {
        "": (
            Flag(name="dtype", takes=Takes.CHOICE, choices=tuple(WORD_BYTES), default="float32"),
            Flag(name="seed", takes=Takes.WHOLE, text="of the initial weights and of made-up data [0]", metavar="N"),
        ),
        "data": (
            Flag(
                name="data",
                takes=Takes.PATH,
                text="an .npz file, or a directory of .npy files, with an array [N, ...] for each input [made up]",
                metavar="PATH",
            ),
            Flag(
                name="test-data",
                takes=Takes.PATH,
                text="data that are not trained on: the loss and accuracy on them are shown after the last step",
                metavar="PATH",
            ),
            Flag(
                name="weights",
                takes=Takes.PATH,
                text="begin with these: an .npz file that 'pase weights' wrote of an imported model [drawn]",
                metavar="FILE",
            ),
            Flag(name="test-every", takes=Takes.WHOLE, text="test after every K steps too", metavar="K"),
        ),
        "optimiser": (
            Flag(name="optimizer", takes=Takes.CHOICE, choices=tuple(OPTIMISERS), default="sgd"),
            Flag(name="momentum", takes=Takes.NUMBER, text="of momentum [0.9]"),
            Flag(name="nesterov", takes=Takes.NOTHING, text="of momentum: look ahead"),
            Flag(
                name="weight-decay",
                takes=Takes.NUMBER,
                text="of an L2 term of sgd and momentum [0], or of adamw [0.01]",
            ),
            Flag(name="beta1", takes=Takes.NUMBER, text="of adam and adamw [0.9]"),
            Flag(name="beta2", takes=Takes.NUMBER, text="of adam and adamw [0.999]"),
            Flag(name="epsilon", takes=Takes.NUMBER, text="of adam and adamw [1e-8]"),
        ),
        "learning rate": (
            Flag(name="learning-rate", takes=Takes.NUMBER, text="its peak", default=0.01, metavar="RATE"),
            Flag(name="schedule", takes=Takes.CHOICE, choices=tuple(SCHEDULES), default="constant"),
            Flag(name="warmup-steps", takes=Takes.WHOLE, text="rise to the peak over N steps", default=0, metavar="N"),
            Flag(name="schedule-steps", takes=Takes.WHOLE, text="where a cosine ends [the last step]", metavar="N"),
            Flag(
                name="final-learning-rate",
                takes=Takes.NUMBER,
                text="where a cosine ends",
                default=0.0,
                metavar="RATE",
            ),
            Flag(name="decay-every", takes=Takes.WHOLE, text="steps of schedule step", default=1000, metavar="N"),
            Flag(name="decay-factor", takes=Takes.NUMBER, text="of schedule step", default=0.1),
        ),
    }
)
"""Flags by the heading that they stand under; what a rule's own default is stands in brackets."""

_RULE_OPTIONS = tuple(flag.key for flag in GROUPS["optimiser"] if flag.key != "optimizer")


def training_options(values: Mapping[str, Any]) -> TrainingOptions:
    """Return the options that a command line gave: the values of `GROUPS` by key, and of steps.

    Raises RuntimeFailure for what is out of range and for an option that the optimiser has not.
    """
    steps = values["steps"]
    schedule_steps = values["schedule_steps"]
    return TrainingOptions(
        steps=steps,
        dtype=values["dtype"],
        seed=values["seed"],
        schedule=Schedule(
            peak=values["learning_rate"],
            kind=values["schedule"],
            warmup_steps=values["warmup_steps"],
            # Whether there are any steps is for the options to say.
            num_steps=max(1, steps) if schedule_steps is None else schedule_steps,
            final=values["final_learning_rate"],
            decay_every=values["decay_every"],
            decay_factor=values["decay_factor"],
        ),
        rule=make_rule(values["optimizer"], {name: values[name] for name in _RULE_OPTIONS}),
        data_path=values["data"],
        test_data_path=values["test_data"],
        test_every=values["test_every"],
        weights_path=values["weights"],
    )


def command_line(options: TrainingOptions) -> list[str]:
    """Return the arguments from which `training_options` makes the same options, in any folder."""
    return list(_arguments(options))


def _arguments(options: TrainingOptions) -> Iterator[str]:
    schedule, rule = options.schedule, options.rule
    values: dict[str, Any] = {
        "steps": options.steps,
        "dtype": options.dtype,
        "seed": options.seed,
        "data": _absolute(options.data_path),
        "test_data": _absolute(options.test_data_path),
        "test_every": options.test_every,
        "weights": _absolute(options.weights_path),
        "optimizer": name_of(rule),
        "learning_rate": schedule.peak,
        "schedule": schedule.kind,
        "warmup_steps": schedule.warmup_steps,
        "schedule_steps": schedule.num_steps,
        "final_learning_rate": schedule.final,
        "decay_every": schedule.decay_every,
        "decay_factor": schedule.decay_factor,
    }
    defaults = options_of(make_rule(name_of(rule), {}))
    for name, value in options_of(rule).items():
        if value != defaults[name]:
            if name not in _RULE_OPTIONS:
                raise RuntimeFailure(
                    f"{name} of optimiser {name_of(rule)} is {value:g}; programs have no flag for it, leave it at "
                    f"{defaults[name]:g}"
                )
            values[name] = value
    for key, value in values.items():
        flag = f"--{key.replace('_', '-')}"
        if value is True:
            yield flag
        elif value is not None:
            # One argument: a value may begin with a dash.
            yield f"{flag}={value}"


def _absolute(path: Path | None) -> Path | None:
    return None if path is None else Path(path).resolve()
