"""The command line of a training: what is read is what was meant, and what is handed on is read again."""

from pathlib import Path
from typing import Any

import pytest

from pase.errors import ProgramError
from pase.targets.mesh_tensorflow.runtime.script import command_of_program
from pase.targets.training.optimisers import Adafactor, AdamW, make_rule
from pase.targets.training.options import (
    Schedule,
    TrainingOptions,
    command_line,
    training_options,
)

DEFAULTS: dict[str, Any] = command_of_program.read([])


@pytest.mark.parametrize(
    "options",
    [
        TrainingOptions(steps=3),
        TrainingOptions(
            steps=400,
            dtype="float64",
            seed=7,
            schedule=Schedule(peak=1e-3, kind="cosine", warmup_steps=20, num_steps=500, final=1e-5),
            rule=make_rule("momentum", {"momentum": 0.95, "nesterov": True}),
            data_path=Path("/data/-x y.npz"),
            test_data_path=Path("/data/test"),
            test_every=50,
        ),
        TrainingOptions(
            steps=9,
            schedule=Schedule(peak=0.1 + 0.2, kind="step", num_steps=9, decay_every=3, decay_factor=1 / 3),
            rule=AdamW(beta1=0.7, epsilon=1e-30, weight_decay=0.0),
        ),
        TrainingOptions(steps=1, rule=Adafactor()),
    ],
)
def test_what_is_handed_on_is_read_again(options: TrainingOptions) -> None:
    assert training_options(command_of_program.read(command_line(options))) == options


def test_without_flags_the_defaults_hold() -> None:
    read = training_options(command_of_program.read(["--steps", "9"]))
    given = TrainingOptions(steps=9)
    for field in ("dtype", "seed", "rule", "data_path", "test_data_path", "test_every"):
        assert getattr(read, field) == getattr(given, field)
    assert [read.schedule.rate(step) for step in range(9)] == [given.schedule.rate(step) for step in range(9)]


def test_an_option_without_a_flag_is_not_lost_in_silence() -> None:
    with pytest.raises(ProgramError, match=r"^clip of optimiser adafactor is 2; programs have no flag for it, leave"):
        command_line(TrainingOptions(steps=1, rule=Adafactor(clip=2.0)))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"steps": 0}, r"^steps is 0; expected 1 or more"),
        ({"seed": -1}, r"^the seed is -1; it must be 0 or more"),
        ({"learning_rate": 0.0}, r"^the learning rate is 0; it must be above 0"),
        ({"learning_rate": float("nan")}, r"^the learning rate is nan; it must be above 0"),
        ({"schedule": "cosine", "warmup_steps": 5}, r"^a warm-up of 5 steps leaves none of 5 for the cosine"),
        ({"optimizer": "sgd", "beta1": 0.5}, r"^optimiser sgd has no beta1; it has weight decay; adam and adamw would"),
        (
            {"optimizer": "momentum", "momentum": 1.0},
            r"^momentum of optimiser momentum is 1; expected from 0 to below 1",
        ),
        ({"test_every": 5}, r"^--test-every needs --test-data PATH, the data to test on"),
        ({"test_every": 0, "test_data": Path("x")}, r"^test-every is 0; expected 1 or more"),
        ({"dtype": "float16"}, r"^the number type is 'float16'; expected float32 or float64"),
    ],
)
def test_what_makes_no_sense_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ProgramError, match=message):
        training_options({**DEFAULTS, "steps": 5, **given})
