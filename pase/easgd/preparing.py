"""`prepare`: what a training across workers begins with: network, data, tests, and its state, new or kept."""

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pase.datasets import Dataset, fit_to, load_dataset
from pase.easgd.equations import Array
from pase.easgd.job import Job, Snapshot, begun
from pase.easgd.kept import Origin, changed_options, check_fits, to_checkpoint, to_snapshot
from pase.easgd.networks import load_build
from pase.easgd.objective import Evaluator, Objective
from pase.easgd.replica import Network
from pase.easgd.request import TrainingRequest
from pase.easgd.samples import DataSplit, batches_of_workers
from pase.planning.planner import Progress
from pase.targets.mesh_tensorflow.runtime.cluster import Cluster
from pase.targets.mesh_tensorflow.runtime.data import DataInput
from pase.targets.mesh_tensorflow.runtime.devices import local_devices


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
    resumed: Mapping[str, Any] | None

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

    @property
    def steps_done(self) -> dict[int | None, int]:
        """How many steps each worker has done before this training, and None: how many the centre has seen of all."""
        done: dict[int | None, int] = {None: self.start.num_events // self.job.events_per_step}
        return done | {worker: progress.num_steps for worker, progress in enumerate(self.start.workers)}


@contextmanager
def prepare(
    request: TrainingRequest, cluster: Cluster | None = None, *, on_progress: Progress | None = None
) -> Iterator[Prepared]:
    """Give a training that can begin: the network loaded, the data checked, the checkpoint read.

    cluster: the one that this process belongs to, None for none; tests and new checkpoints are those of its task 0.
    Raises PaseError where that cannot be done, before anything is trained.
    """
    task, local_task = (cluster.task, cluster.local_task) if cluster else (0, 0)
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
    devices = local_devices(request.choice, loaded.num_devices, local_task)
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
