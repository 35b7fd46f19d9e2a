"""What may be asked of a training across workers, its defaults, and what is refused."""

from math import inf, nan
from typing import Any

import pytest

from pase.easgd.algorithms import ALGORITHMS, Rates, algorithm_named
from pase.easgd.job import Job, Reduction, make_job
from pase.errors import TrainingError

ASYNCHRONOUS = "original-easgd, async-easgd, async-measgd, hogwild-easgd, async-sgd, async-msgd and hogwild-sgd"


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm_has_its_defaults(name: str) -> None:
    job = make_job(algorithm=name, num_workers=5, learning_rate=0.02)
    elastic = "easgd" in name or "measgd" in name
    assert job.rates.rho * 5 * 0.02 == pytest.approx(0.9 if elastic else 0)
    assert job.rates.momentum == (0.9 if name in ("async-measgd", "async-msgd") else 0)
    assert job.rates.averages is False
    assert job.reduction is Reduction.TREE
    assert job.arrivals == ()


def test_what_is_asked_for_is_taken() -> None:
    job = make_job(algorithm="async-measgd", num_workers=2, rho=0.5, momentum=0.0, arrivals=(1, 0), num_steps=3)
    assert (job.rates.rho, job.rates.momentum, job.arrivals, job.num_events) == (0.5, 0.0, (1, 0), 6)
    averaging = make_job(algorithm="sync-sgd", averages=True, reduction="round-robin")
    assert (averaging.rates.averages, averaging.reduction) == (True, Reduction.ROUND_ROBIN)


def test_a_training_of_few_steps_shows_the_last_one() -> None:
    assert make_job(num_steps=4).report_every == 4
    assert make_job(num_steps=400).report_every == 10


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"algorithm": "easgd"}, "unknown algorithm 'easgd': .*known algorithms are async-easgd, .*, sync-sgd$"),
        ({"algorithm": "sync-sgd", "rho": 1}, "^sync-sgd takes no --rho; original-easgd, .* and sync-easgd3 do: leave"),
        ({"momentum": 0.5}, "^sync-easgd3 takes no --momentum; async-measgd and async-msgd do: leave it out$"),
        ({"averages": True}, "^sync-easgd3 takes no --average; sync-sgd does: leave it out$"),
        ({"arrivals": (0,)}, f"^sync-easgd3 takes no --arrivals; {ASYNCHRONOUS} do: leave it out$"),
        (
            {"algorithm": "async-sgd", "reduction": "tree"},
            "^async-sgd takes no --reduction; sync-easgd1, sync-easgd2, sync-easgd3 and sync-sgd do: leave it out$",
        ),
        ({"num_workers": 0}, "number of workers is 0; expected 1 to 1024$"),
        ({"num_workers": 10**30}, "number of workers is 1000000000000000000000000000000; expected 1 to 1024$"),
        ({"num_steps": 0}, "the number of steps is 0; expected 1 or more$"),
        ({"report_every": 0}, "report-every is 0; expected 1 or more$"),
        ({"test_every": -1}, "test-every is -1; expected 1 or more$"),
        ({"learning_rate": 0.0}, "the learning rate is 0; expected a number above 0$"),
        ({"learning_rate": nan}, "the learning rate is nan; expected a number above 0$"),
        ({"learning_rate": inf}, "the learning rate is inf; expected a number above 0$"),
        ({"rho": -1.0}, "ρ is -1; expected a number of 0 or more$"),
        (
            {"algorithm": "async-msgd", "momentum": 1.0},
            "momentum is 1; expected a number of 0 or more and below 1$",
        ),
        ({"until_accuracy": 0.9}, "--until-accuracy needs --test-every K, how often to look, and data to test on$"),
        ({"until_accuracy": 97.0, "test_every": 1}, "until-accuracy is 97; expected a fraction above 0, at most 1$"),
        ({"until_accuracy": nan, "test_every": 1}, "until-accuracy is nan; expected a fraction above 0, at most 1$"),
        ({"algorithm": "async-sgd", "arrivals": (0, 9)}, "arrivals name worker 9; expected 0 to 3, the first worker"),
        ({"algorithm": "async-sgd", "arrivals": (0, 1, 3)}, "arrivals never name worker 2; name each of 4 workers$"),
    ],
)
def test_what_cannot_be_is_refused(asked: dict[str, Any], message: str) -> None:
    with pytest.raises(TrainingError, match=message):
        make_job(**asked)


@pytest.mark.parametrize(
    ("name", "asked", "message"),
    [
        ("async-easgd", {"save_every": 0}, "save-every is 0; expected 1 or more"),
        ("async-easgd", {"until_accuracy": 0.9}, "to end at an accuracy, tests are needed between the steps"),
        (
            "async-easgd",
            {"until_accuracy": 0.9, "test_every": 1, "tests_wait": True},
            "give test-every, and let them not wait",
        ),
        ("sync-sgd", {"arrivals": (0, 1, 2)}, "sync-sgd takes every step with all workers together"),
    ],
)
def test_what_no_job_can_be_is_refused(name: str, asked: dict[str, Any], message: str) -> None:
    with pytest.raises(TrainingError, match=message):
        Job(algorithm=algorithm_named(name), rates=Rates(learning_rate=0.1), num_workers=3, num_steps=9, **asked)
