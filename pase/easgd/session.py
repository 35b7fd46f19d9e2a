"""A training across workers from what was asked for to its end: network, data, tests, checkpoints, events and metrics.

A checkpoint holds centre, workers and how far each has come, in one file of `pase.easgd.checkpoint`. Its step counts
events. Its weights are the centre; what else is kept stands beside each weight as a slot: "velocity" of the master,
"worker_0" and "worker_0_velocity" of each worker. Its optimiser is the algorithm, and the options of that hold the
rates, and "worker_0_steps" of each worker.
"""

import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from pase.datasets import Dataset, fit_to, load_dataset
from pase.easgd.actors import Evaluator, Objective, Trace
from pase.easgd.algorithms import ALGORITHMS, Algorithm, Array, MasterState, WorkerState
from pase.easgd.checkpoint import Checkpoint, Checkpointing
from pase.easgd.cluster import Cluster, kept_text
from pase.easgd.job import DataSplit, Job, Snapshot, TrainingRequest, WorkerProgress, begun
from pase.easgd.messages import Packing
from pase.easgd.network import Network, batches_of_workers, load_build
from pase.easgd.processes import run_task
from pase.easgd.ranks import Outcome, Report, train_in_threads
from pase.errors import PaseError, TrainingError
from pase.planning.planner import Progress
from pase.targets.mesh_tensorflow.runtime.devices import local_devices
from pase.targets.training.checkpointing import check_data, check_weights
from pase.targets.training.data import DataInput
from pase.targets.training.script import MetricsFile

_IN_METRICS = frozenset({"step", "tested"})


def train(request: TrainingRequest, *, report: Report | None = None, on_progress: Progress | None = None) -> Outcome:
    """Train in threads of this process and return what came of it.

    on_progress: told of what comes before the training. Reports the events of `reporting`. Raises PaseError where the
    training cannot begin, and where it cannot go on, with the last checkpoint.
    """
    with (
        prepare(request, on_progress=on_progress) as prepared,
        reporting(prepared, report) as shown,
        _told_of_the_checkpoint(last_checkpoint(request)),
    ):
        trace: Trace | None = None if request.trace_path is None else {}
        outcome = train_in_threads(
            prepared.job,
            prepared.start,
            objectives=list(prepared.objectives(range(prepared.job.num_workers)).values()),
            layout=prepared.layout,
            evaluator=prepared.evaluator,
            report=shown,
            save=prepared.save,
            trace=trace,
        )
        if request.trace_path is not None and trace is not None:
            _write_trace(request.trace_path, trace, prepared.network.packing)
        shown(done_event(prepared, outcome))
    return outcome


def _write_trace(path: Path, trace: Trace, packing: Packing) -> None:
    """Write the arrays of all steps, and where in them each weight lies; whole or not at all."""
    places = {f"weight {name}": np.array(bounds) for name, bounds in zip(packing.names, packing.bounds, strict=True)}
    new = path.with_name(f".{path.name}.new.npz")
    np.savez(new, **trace, **places)  # type: ignore[arg-type]
    new.replace(path)


def train_task(
    request: TrainingRequest,
    cluster: Cluster,
    *,
    report: Report | None = None,
    on_progress: Progress | None = None,
) -> None:
    """Do the part of this process, a task of a cluster; task 0 reports, tests and saves.

    To be called within `run_in_cluster`. Raises PaseError as `train` does.
    """
    told = last_checkpoint(request)
    with prepare(request, cluster, on_progress=on_progress) as prepared, _told_of_the_checkpoint(told):
        take_part = partial(
            run_task,
            prepared.job,
            prepared.start,
            cluster,
            prepared.objectives,
            evaluator=prepared.evaluator,
            batch_size=prepared.network.batch_size,
            layout=prepared.layout,
            last_checkpoint=told,
        )
        if cluster.task != 0:
            take_part()
            return
        with reporting(prepared, report) as shown:
            outcome = take_part(report=shown, save=prepared.save)
            assert outcome is not None
            shown(done_event(prepared, outcome))


def last_checkpoint(request: TrainingRequest) -> Callable[[], str]:
    """Return a function that says which checkpoint is left, to be added to the message of an early end."""
    folder = request.checkpointing.folder if request.checkpointing else None
    return lambda: kept_text(folder)


@contextmanager
def _told_of_the_checkpoint(told: Callable[[], str]) -> Iterator[None]:
    """Have a failure name the checkpoint that is left."""
    try:
        yield
    except PaseError as error:
        text, kept = str(error), told()
        raise TrainingError(text if kept in text else text + kept) from None


# -- what a training begins with


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """What tells a training across workers from others, beside its algorithm: packing of the network, seed, data."""

    packing: Packing
    seed: int
    data: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A training that can begin.

    start: the state to begin with. layout: how a vector is cut into messages. arrays: of the data, None for made-up
    ones. resumed: the event that says so, None where it begins anew.
    """

    request: TrainingRequest
    job: Job
    start: Snapshot
    network: Network
    layout: tuple[tuple[int, int], ...]
    origin: Origin
    evaluator: Evaluator | None
    arrays: Mapping[str, Array] | None
    resumed: dict[str, Any] | None

    def objectives(self, workers: Collection[int]) -> dict[int, Objective]:
        """Return the replicas of some workers."""
        seed = self.origin.seed
        batches = batches_of_workers(
            self.arrays,
            self.network.inputs,
            workers=workers,
            num_workers=self.job.num_workers,
            seed=seed,
            split=self.request.data_split,
        )
        return {worker: self.network.replica(own, seed=seed, worker=worker) for worker, own in batches.items()}

    @property
    def save(self) -> Callable[[Snapshot], Path] | None:
        """What writes a checkpoint and returns where it is, None where none are kept."""
        checkpointing = self.request.checkpointing
        if checkpointing is None:
            return None
        return lambda snapshot: checkpointing.write(to_checkpoint(self.job, self.origin, snapshot))


@contextmanager
def prepare(
    request: TrainingRequest, cluster: Cluster | None = None, *, on_progress: Progress | None = None
) -> Iterator[Prepared]:
    """Give a training that can begin: the network loaded, the data checked, the checkpoint read.

    cluster: the one that this process belongs to, None for none; tests and new checkpoints are those of its task 0.
    Raises PaseError where that cannot be done, before anything is trained.
    """
    task = cluster.task if cluster else 0
    checkpointing = request.checkpointing
    # Before anything expensive: what is wrong is found out at once.
    found = checkpointing.found() if checkpointing and (task == 0 or checkpointing.resume) else None
    data = None if request.data is None else load_dataset(request.data)
    tests = None if request.tests_on is None or task != 0 else load_dataset(request.tests_on, part="test")
    loaded = load_build(
        request.source,
        devices=request.devices,
        batch=request.batch,
        arguments=request.arguments,
        machine=request.machine,
        on_progress=on_progress,
    )
    if on_progress:
        on_progress("building the program", 0.0)
    devices = local_devices(request.choice, loaded.num_devices, task)
    with closing(
        Network.load(loaded.build, num_devices=loaded.num_devices, dtype=request.dtype, devices=devices)
    ) as network:
        job = request.whole_job
        seed = found.seed if found else request.seed or 0
        origin = Origin(packing=network.packing, seed=seed, data=_description(data, request.data_split, network.inputs))
        start, resumed = begun(job, network.initial(seed)), None
        if found and checkpointing:
            check_fits(found, checkpointing, job, origin, seed=request.seed)
            start = to_snapshot(found, job.algorithm, network.packing)
            resumed = {
                "event": "resumed",
                "after": found.step,
                "path": str(checkpointing.path_of(found)),
                "changed": list(changed_options(found, job)),
            }
        yield Prepared(
            request=request,
            job=job,
            start=start,
            network=network,
            layout=network.packing.layout(packed=request.packed),
            origin=origin,
            evaluator=None if tests is None else network.evaluator(fit_to(tests, network.inputs).arrays),
            arrays=None if data is None else fit_to(data, network.inputs).arrays,
            resumed=resumed,
        )


def _description(data: Dataset | None, split: DataSplit, inputs: tuple[DataInput, ...]) -> dict[str, Any]:
    """Return what tells the data of a training from others, as JSON has it."""
    batch = {item.name: list(item.shape) for item in inputs}
    if data is None:
        return {"source": "made up", "batch": batch}
    # Not told where it is as it always was: checkpoints of before can be resumed.
    own = {} if split is DataSplit.PARTITION else {"split": split.value}
    return {**data.description, "batch": batch, **own}


# -- what is reported


@contextmanager
def reporting(prepared: Prepared, report: Report | None) -> Iterator[Report]:
    """Give a function that shows an event and writes those of steps and tests into the file of metrics.

    Reports ``resumed`` (after: events, path, changed: options that differ, in words) where it is so, and ``started``
    (algorithm, learning_rate, rho and momentum, None where the algorithm has none, num_workers, num_steps, num_weights,
    num_messages_per_exchange, batch_size). Others follow: those of
    `run_ranks`, and that of `done_event`.
    """
    request, job, start = prepared.request, prepared.job, prepared.start
    with ExitStack() as opened:
        metrics = None
        if request.metrics_path is not None:
            # How many steps each worker has done before this training, and None: how many the centre has seen of all.
            done: dict[int | None, int] = {None: start.num_events // job.events_per_step}
            done |= {worker: progress.num_steps for worker, progress in enumerate(start.workers)}
            resumes = request.checkpointing is not None and request.checkpointing.resume is not None
            metrics = opened.enter_context(MetricsFile(request.metrics_path, num_steps=done, resume=resumes))

        def show(event: dict[str, Any]) -> None:
            if report:
                report(event)
            if metrics and event["event"] in _IN_METRICS:
                # Of all workers, where it is none's own.
                step = event["step"] if "step" in event else event["after"] // job.events_per_step
                metrics.write({**event, "step": step, "unix_time_s": time.time()})

        if prepared.resumed:
            show(prepared.resumed)
        show(
            {
                "event": "started",
                "algorithm": job.algorithm.name,
                "learning_rate": job.rates.learning_rate,
                "rho": job.rates.rho if job.algorithm.has_rho else None,
                "momentum": job.rates.momentum if job.algorithm.has_momentum else None,
                "num_workers": job.num_workers,
                "num_steps": job.num_steps,
                "num_weights": prepared.origin.packing.num_weights,
                "num_messages_per_exchange": len(prepared.layout),
                "batch_size": prepared.network.batch_size,
            }
        )
        yield show


def done_event(prepared: Prepared, outcome: Outcome) -> dict[str, Any]:
    """Return the event ``done``: what a training came to, as JSON has it.

    loss, accuracy, num_examples: of the centre on the test data in the end, None without such data. examples_per_s: of
    this training, without what a checkpoint that it went on from had. workers: each one's, None for one that was lost;
    their parts, and master_parts, are those of `Clock.parts`. num_messages, num_bytes: of all exchanges, the master's
    included. checkpoint: the newest one, None for none.
    """
    # The last test is of the centre in the end.
    last = outcome.tests[-1] if outcome.tests else None
    assert last is None or last.event == outcome.num_events
    checkpointing = prepared.request.checkpointing
    newest = checkpointing.newest() if checkpointing else None
    num_new = outcome.num_events - prepared.start.num_events
    num_trained = outcome.num_samples * num_new // max(outcome.num_events, 1)
    return {
        "event": "done",
        "num_events": outcome.num_events,
        "num_samples": outcome.num_samples,
        "time_s": outcome.time_s,
        "examples_per_s": num_trained / max(outcome.time_s, 1e-9),
        "loss": last and last.loss,
        "accuracy": last and last.accuracy,
        "num_examples": last and last.num_examples,
        "workers": [
            each and {**asdict(each), "communication_share": each.communication_share} for each in outcome.workers
        ],
        "master_parts": outcome.master_parts,
        "num_messages": outcome.num_messages,
        "num_bytes": outcome.num_bytes,
        "lost": list(outcome.lost),
        "num_refused": outcome.num_refused,
        "checkpoint": None if newest is None else str(newest),
    }


# -- checkpoints

_WORKERS = "workers"
_VELOCITY = "velocity"


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
    check_weights(f"{head} model", checkpoint.shapes, dict(zip(packing.names, packing.shapes, strict=True)))
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
