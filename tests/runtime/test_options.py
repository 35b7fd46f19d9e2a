"""The command line of a training, and the learning rate of every step."""

import os
from pathlib import Path
from typing import Any

import pytest

from pase.errors import ProgramError
from pase.targets.mesh_tensorflow.runtime.script import command_of_program
from pase.targets.training.optimisers import Adafactor, AdamW, make_rule
from pase.targets.training.options import (
    SCHEDULES,
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
        ({"test_every": 5}, r"^--test-every needs --test-data PATH, the data to test on"),
        ({"test_every": 0, "test_data": Path("x")}, r"^test-every is 0; expected 1 or more"),
        ({"dtype": "float16"}, r"^the number type is 'float16'; expected float32 or float64"),
    ],
)
def test_what_makes_no_sense_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ProgramError, match=message):
        training_options({**DEFAULTS, "steps": 5, **given})


def rates(num: int = 10, **options: Any) -> list[float]:
    schedule = Schedule(peak=0.8, **options)
    return [schedule.rate(step) for step in range(num)]


def test_the_warm_up_is_a_straight_line_to_the_peak() -> None:
    assert rates(6, warmup_steps=4) == pytest.approx([0.2, 0.4, 0.6, 0.8, 0.8, 0.8])
    assert rates(3) == [0.8, 0.8, 0.8]


def test_steps() -> None:
    found = rates(8, kind="step", warmup_steps=1, decay_every=3, decay_factor=0.5)
    assert found == pytest.approx([0.8, 0.8, 0.8, 0.8, 0.4, 0.4, 0.4, 0.2])


def test_the_inverse_square_root_is_that_of_the_transformer() -> None:
    """Vaswani et al. (2017), Eq. 3: size^-0.5 · min(step^-0.5, step · warmup^-1.5), steps counted from 1."""
    size, warmup = 512, 7
    peak = size**-0.5 * warmup**-0.5
    schedule = Schedule(peak=peak, kind="inverse_sqrt", warmup_steps=warmup)
    for step in range(1, 50):
        expected = size**-0.5 * min(step**-0.5, step * warmup**-1.5)
        assert schedule.rate(step - 1) == pytest.approx(expected, rel=1e-14)
    assert rates(4, kind="inverse_sqrt") == pytest.approx([0.8, 0.8 / 2**0.5, 0.8 / 3**0.5, 0.4])


def test_the_cosine_is_that_of_keras() -> None:
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    keras = pytest.importorskip("keras")
    theirs = keras.optimizers.schedules.CosineDecay(0.8, decay_steps=20, alpha=0.25)
    schedule = Schedule(peak=0.8, kind="cosine", warmup_steps=5, num_steps=25, final=0.2)
    for step in range(30):
        assert schedule.rate(step + 5) == pytest.approx(float(theirs(step)), rel=1e-6)
    assert schedule.rate(5) == 0.8
    assert schedule.rate(15) == pytest.approx(0.5)
    assert schedule.rate(25) == schedule.rate(99) == pytest.approx(0.2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "cosin"}, r"unknown schedule 'cosin': did you mean 'cosine'"),
        ({"peak": 0.0}, r"the learning rate is 0; it must be above 0"),
        ({"peak": float("nan")}, r"the learning rate is nan; it must be above 0"),
        ({"warmup_steps": -1}, r"warm-up steps is -1; expected 0 or more"),
        ({"num_steps": 0}, r"schedule steps is 0; expected 1 or more"),
        ({"final": 0.9}, r"final learning rate is 0.9; expected from 0 to the learning rate"),
        ({"decay_every": 0}, r"steps of a decay is 0; expected 1 or more"),
        ({"decay_factor": 0.0}, r"decay factor is 0; expected above 0 and at most 1"),
        (
            {"kind": "cosine", "warmup_steps": 9, "num_steps": 9},
            r"a warm-up of 9 steps leaves none of 9 for",
        ),
    ],
)
def test_schedules_that_make_no_sense_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ProgramError, match=message):
        Schedule(**{"peak": 0.8, **options})


def test_rates_are_positive_whatever_the_schedule() -> None:
    for kind in SCHEDULES:
        assert all(0 < rate < 0.8 * (1 + 1e-12) for rate in rates(50, kind=kind, num_steps=51, warmup_steps=3))
