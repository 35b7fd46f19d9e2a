"""Checkpoints of trainings across workers: all that training changes comes back, and others' are refused."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pase.easgd.algorithms import ALGORITHMS, Array, MasterState, WorkerState
from pase.easgd.checkpoint import Checkpoint, Checkpointing, list_checkpoints, read_checkpoint
from pase.easgd.job import Job, Snapshot, WorkerProgress, make_job
from pase.easgd.messages import Packing
from pase.easgd.session import Origin, changed_options, check_fits, to_checkpoint, to_snapshot
from pase.errors import ProgramError, TrainingError

PACKING = Packing(names=("a/w", "a/bias", "b/w"), shapes=((2, 3), (3,), (4,)), dtype="float64")
ORIGIN = Origin(packing=PACKING, seed=7, data={"source": "made up", "batch": {"inputs": [2, 3]}})


def job(algorithm: str = "sync-easgd3", num_workers: int = 3, num_steps: int = 9) -> Job:
    return make_job(algorithm=algorithm, num_workers=num_workers, num_steps=num_steps)


def snapshot(of: Job, num_events: int = 6) -> Snapshot:
    """Return a state in which every number is another one."""
    numbers = np.random.default_rng(len(of.algorithm.name))

    def vector(is_kept: bool = True) -> Array | None:
        return numbers.normal(size=PACKING.num_weights) if is_kept else None

    def weights() -> Array:
        return numbers.normal(size=PACKING.num_weights)

    return Snapshot(
        master=MasterState(centre=weights(), velocity=vector(of.algorithm.master_velocity)),
        workers=tuple(
            WorkerProgress(
                state=WorkerState(weights=weights(), velocity=vector(of.algorithm.worker_velocity)), num_steps=3 + i
            )
            for i in range(of.num_workers)
        ),
        num_events=num_events,
    )


def vectors(of: Snapshot) -> list[Array | None]:
    states = [each.state for each in of.workers]
    return [of.master.centre, of.master.velocity, *(s.weights for s in states), *(s.velocity for s in states)]


def written(folder: Path, of: Job, what: Snapshot) -> Checkpointing:
    folder.mkdir(exist_ok=True)
    Checkpointing(folder=folder).write(to_checkpoint(of, ORIGIN, what))
    return Checkpointing(folder=folder, resume="newest")


def found(checkpointing: Checkpointing) -> Checkpoint:
    checkpoint = checkpointing.found()
    assert checkpoint is not None
    return checkpoint


@pytest.mark.parametrize("name", ALGORITHMS)
def test_all_that_training_changes_comes_back(name: str, tmp_path: Path) -> None:
    before = snapshot(job(name))
    checkpointing = written(tmp_path, job(name), before)
    check_fits(found(checkpointing), checkpointing, job(name), ORIGIN, seed=None)
    after = to_snapshot(found(checkpointing), ALGORITHMS[name], PACKING)
    assert after.num_events == 6
    assert [worker.num_steps for worker in after.workers] == [3, 4, 5]
    for one, other in zip(vectors(before), vectors(after), strict=True):
        assert (one is None) == (other is None)
        if one is not None and other is not None:
            assert one.tobytes() == other.tobytes()


def test_a_checkpoint_holds_the_arrays_of_the_network(tmp_path: Path) -> None:
    """The centre is the weights, so that whatever reads a checkpoint finds the network that was trained."""
    before = snapshot(job("async-measgd"))
    checkpoint = read_checkpoint(written(tmp_path, job("async-measgd"), before).folder / "step-0000000006.safetensors")
    np.testing.assert_array_equal(checkpoint.weights["a/w"], before.master.centre[:6].reshape(2, 3))
    np.testing.assert_array_equal(checkpoint.weights["b/w"], before.master.centre[9:])
    velocity = before.workers[2].state.velocity
    assert velocity is not None
    np.testing.assert_array_equal(checkpoint.slots["a/bias"]["worker_2_velocity"], velocity[6:9])
    assert set(checkpoint.slots["b/w"]) == {f"worker_{i}{of}" for i in range(3) for of in ("", "_velocity")}
    assert (checkpoint.optimiser, checkpoint.seed, checkpoint.dtype) == ("async-measgd", 7, "float64")
    assert checkpoint.options["worker_1_steps"] == 4


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"job": job("async-easgd")}, r"algorithm: sync-easgd3, not async-easgd; give --algorithm sync-easgd3$"),
        ({"job": job(num_workers=4)}, r"number of workers: 3, not 4; give --workers 3$"),
        ({"packing": replace(PACKING, shapes=((2, 3), (3,), (5,)))}, r"model: its weight 'b/w' has shape \[4\], not"),
        ({"packing": replace(PACKING, names=("a/w", "a/bias", "c"))}, r"model: this one has no weight 'b/w'$"),
        ({"packing": replace(PACKING, dtype="float32")}, r"type: float64, not float32; give --dtype float64$"),
        ({"seed": 8}, r"seed: 7, not 8; leave --seed out, it is kept$"),
        ({"data": {"source": "digits"}}, r"training's data: their batch is \{'inputs': \[2, 3\]\}, not None"),
        (
            {"job": job(num_steps=6)},
            r"is after 6 events, 6 steps of each worker; nothing is left of 6, give more",
        ),
    ],
)
def test_a_checkpoint_of_another_training_is_refused(other: Mapping[str, Any], message: str, tmp_path: Path) -> None:
    checkpointing = written(tmp_path, job(), snapshot(job()))
    origin = replace(ORIGIN, **{name: other[name] for name in ("packing", "data") if name in other})
    with pytest.raises((TrainingError, ProgramError), match=message):
        check_fits(found(checkpointing), checkpointing, other.get("job", job()), origin, seed=other.get("seed"))


def test_nothing_left_of_an_asynchronous_training_is_counted_in_events(tmp_path: Path) -> None:
    of = job("async-sgd", num_steps=2)
    checkpointing = written(tmp_path, of, snapshot(of))
    with pytest.raises(TrainingError, match="after 6 events, 2 steps of each worker; nothing is left of 2"):
        check_fits(found(checkpointing), checkpointing, of, ORIGIN, seed=None)
    check_fits(found(checkpointing), checkpointing, replace(of, num_steps=3), ORIGIN, seed=None)


def test_a_checkpoint_without_workers_is_refused(tmp_path: Path) -> None:
    checkpoint = replace(to_checkpoint(job(), ORIGIN, snapshot(job())), optimiser="adam")
    Checkpointing(folder=tmp_path).write(checkpoint)
    checkpointing = Checkpointing(folder=tmp_path, resume="newest")
    with pytest.raises(TrainingError, match="not of a training across workers: optimiser adam; name another folder"):
        check_fits(found(checkpointing), checkpointing, job(), ORIGIN, seed=None)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_is_not_finite_is_not_kept(value: float, tmp_path: Path) -> None:
    before = snapshot(job())
    before.workers[1].state.weights[2] = value
    with pytest.raises(ProgramError, match="step 6: worker 1 of weight 'a/w' is not finite; no checkpoint was"):
        written(tmp_path, job(), before)
    assert list_checkpoints(tmp_path) == []


def test_a_checkpoint_that_lacks_something_says_what() -> None:
    checkpoint = to_checkpoint(job(), ORIGIN, snapshot(job()))
    with pytest.raises(TrainingError, match="lacks worker 0 velocity of weight 'a/w', which async-measgd needs"):
        to_snapshot(checkpoint, ALGORITHMS["async-measgd"], PACKING)
    for wrong in ("many", -1, True, 2.5):
        options = {**checkpoint.options, "worker_2_steps": wrong}
        with pytest.raises(TrainingError, match=f"worker 2 steps are {wrong!r}; expected a whole number"):
            to_snapshot(replace(checkpoint, options=options), ALGORITHMS["sync-easgd3"], PACKING)


def test_other_rates_are_named_but_not_refused() -> None:
    checkpoint = to_checkpoint(job(), ORIGIN, snapshot(job()))
    assert changed_options(checkpoint, job()) == ()
    slower = make_job(num_workers=3, num_steps=9, learning_rate=0.005)
    assert changed_options(checkpoint, slower) == ("learning rate 0.005, not 0.01", "rho 60, not 30")
