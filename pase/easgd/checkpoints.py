"""Checkpoints of trainings across workers: centre, workers and how far each has come, in one file.

A file of `pase.targets.mesh_tensorflow.runtime.checkpoint`. Its step counts events. Its weights are the centre; what
else is kept stands beside each weight as a slot: "velocity" of the master, "worker_0" and "worker_0_velocity" of each
worker. Its optimiser is the algorithm, and the options of that hold the rates, and "worker_0_steps" of each worker.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from pase.easgd.algorithms import ALGORITHMS, Algorithm
from pase.easgd.equations import Array, MasterState, WorkerState
from pase.easgd.job import Job, Snapshot, WorkerProgress
from pase.easgd.messages import Packing
from pase.errors import TrainingError
from pase.targets.mesh_tensorflow.runtime.checkpoint import Checkpoint, Checkpointing, check_data, check_weights

_WORKERS = "workers"
_VELOCITY = "velocity"


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """What tells a training across workers from others, beside its algorithm: packing of the network, seed, data."""

    packing: Packing
    seed: int
    data: Mapping[str, Any]


def to_checkpoint(job: Job, origin: Origin, snapshot: Snapshot) -> Checkpoint:
    """Return the checkpoint of a snapshot."""
    unpack = origin.packing.unpack
    slots: dict[str, dict[str, Array]] = {name: {} for name in origin.packing.names}
    for slot, vector in _vectors(snapshot):
        for name, array in unpack(vector).items():
            slots[name][slot] = array
    steps = {_steps_of(i): worker.num_steps for i, worker in enumerate(snapshot.workers)}
    return Checkpoint(
        step=snapshot.num_events,
        dtype=_dtype(origin.packing),
        seed=origin.seed,
        optimiser=job.algorithm.name,
        options={_WORKERS: job.num_workers, **_options(job), **steps},
        data=origin.data,
        weights=unpack(snapshot.master.centre),
        slots=slots,
    )


def to_snapshot(checkpoint: Checkpoint, algorithm: Algorithm, packing: Packing) -> Snapshot:
    """Return the snapshot that a checkpoint holds; TrainingError where something of it is missing."""
    num_workers = _count(checkpoint, _WORKERS)

    def vector(slot: str) -> Array:
        for name in packing.names:
            if slot not in checkpoint.slots.get(name, {}):
                raise TrainingError(
                    f"the checkpoint lacks {_called(slot)} of weight {name!r}, which {algorithm.name} needs; "
                    "go on from another one"
                )
        return packing.pack({name: checkpoint.slots[name][slot] for name in packing.names})

    return Snapshot(
        master=MasterState(
            centre=packing.pack(checkpoint.weights), velocity=vector(_VELOCITY) if algorithm.master_velocity else None
        ),
        workers=tuple(
            WorkerProgress(
                state=WorkerState(
                    weights=vector(_worker(i)),
                    velocity=vector(f"{_worker(i)}_{_VELOCITY}") if algorithm.worker_velocity else None,
                ),
                num_steps=_count(checkpoint, _steps_of(i)),
            )
            for i in range(num_workers)
        ),
        num_events=checkpoint.step,
    )


def check_fits(
    checkpoint: Checkpoint, checkpointing: Checkpointing, job: Job, origin: Origin, *, seed: int | None
) -> None:
    """Raise TrainingError or ProgramError where a checkpoint is of another training, naming what differs first.

    seed: the one that was asked for, None for the checkpoint's.
    """
    path = checkpointing.path_of(checkpoint)
    head = f"checkpoint {path} is of another"
    algorithm = job.algorithm.name
    if checkpoint.optimiser not in ALGORITHMS:
        raise TrainingError(
            f"checkpoint {path} is not of a training across workers: optimiser {checkpoint.optimiser}; "
            "name another folder with --checkpoint"
        )
    if checkpoint.optimiser != algorithm:
        raise TrainingError(
            f"{head} algorithm: {checkpoint.optimiser}, not {algorithm}; give --algorithm {checkpoint.optimiser}"
        )
    num_workers = _count(checkpoint, _WORKERS)
    if num_workers != job.num_workers:
        raise TrainingError(
            f"{head} number of workers: {num_workers}, not {job.num_workers}; give --workers {num_workers}"
        )
    packing = origin.packing
    check_weights(f"{head} model", checkpoint, dict(zip(packing.names, packing.shapes, strict=True)))
    if checkpoint.dtype != _dtype(packing):
        raise TrainingError(f"{head} type: {checkpoint.dtype}, not {_dtype(packing)}; give --dtype {checkpoint.dtype}")
    if seed not in (None, checkpoint.seed):
        raise TrainingError(f"{head} seed: {checkpoint.seed}, not {seed}; leave --seed out, it is kept")
    check_data(f"{head} training's data", checkpoint, origin.data)
    if checkpoint.step >= job.num_events:
        raise TrainingError(
            f"{path} is after {checkpoint.step} events, {checkpoint.step // job.events_per_step} steps of each worker; "
            f"nothing is left of {job.num_steps}, give more --steps"
        )


def changed_options(checkpoint: Checkpoint, job: Job) -> tuple[str, ...]:
    """Return what of a job differs from the one that wrote a checkpoint, in words: what follows may differ with it."""
    found = checkpoint.options
    return tuple(
        f"{name.replace('_', ' ')} {_shown(value)}, not {_shown(found.get(name))}"
        for name, value in _options(job).items()
        if found.get(name) != value
    )


def _options(job: Job) -> dict[str, float | bool | str]:
    """Return what decides how a training goes on, for a record."""
    rates = job.rates
    return {
        "learning_rate": float(rates.learning_rate),
        "rho": float(rates.rho),
        "momentum": float(rates.momentum),
        "averages": rates.averages,
        "arrivals": ",".join(map(str, job.arrivals)),
    }


def _shown(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value) or "none"


def _vectors(snapshot: Snapshot) -> Iterator[tuple[str, Array]]:
    """Yield what is kept beside the centre, by slot."""
    if snapshot.master.velocity is not None:
        yield _VELOCITY, snapshot.master.velocity
    for i, worker in enumerate(snapshot.workers):
        yield _worker(i), worker.state.weights
        if worker.state.velocity is not None:
            yield f"{_worker(i)}_{_VELOCITY}", worker.state.velocity


def _worker(i: int) -> str:
    return f"worker_{i}"


def _steps_of(i: int) -> str:
    return f"{_worker(i)}_steps"


def _called(slot: str) -> str:
    return slot.replace("_", " ")


def _count(checkpoint: Checkpoint, option: str) -> int:
    found = checkpoint.options.get(option)
    if not isinstance(found, int) or isinstance(found, bool) or found < 0:
        raise TrainingError(
            f"the checkpoint's {_called(option)} are {found!r}; expected a whole number: go on from another one"
        )
    return found


def _dtype(packing: Packing) -> str:
    return np.dtype(packing.dtype).name
