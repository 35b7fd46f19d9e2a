"""A training across processes: which task has which ranks, and a process's part in it.

Task 0 has the coordinator, and the master where there is one; a master leaves the workers to the other tasks. Several
workers of a task are threads of its process, as they are where there is but one: the same loops, the same results.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from pase.easgd.coordinator import Outcome, Report, Save
from pase.easgd.job import Job, Snapshot
from pase.easgd.liveness import progress_of
from pase.easgd.messages import Inbox
from pase.easgd.objective import Evaluator, Objective
from pase.easgd.ranks import run_ranks
from pase.easgd.server_transport import ServerTransport, Wiring
from pase.easgd.task_ranks import task_ranks
from pase.easgd.task_watch import TaskWatch
from pase.errors import TrainingError
from pase.targets.mesh_tensorflow.runtime.cluster import Cluster
from pase.targets.mesh_tensorflow.runtime.cluster_server import open_server, wait_for_others


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What the ranks of a process compute with, made when it is known which ones these are.

    objectives: of some workers. evaluator: asked for by the process of the coordinator alone.
    """

    objectives: Callable[[Collection[int]], Mapping[int, Objective]]
    evaluator: Callable[[], Evaluator | None] = lambda: None


def run_task(
    job: Job,
    start: Snapshot,
    cluster: Cluster,
    parts: Parts,
    *,
    batch_size: int,
    layout: Sequence[tuple[int, int]] | None = None,
    report: Report | None = None,
    save: Save | None = None,
    last_checkpoint: Callable[[], str] = lambda: "",
) -> Outcome | None:
    """Do this process's part; return the outcome where it is task 0, None elsewhere.

    batch_size, layout, report, save: as for `run_ranks`. last_checkpoint: what to add to the message of an end before
    its time. To be called within `cluster_server.run_in_cluster`: threads are left behind that wait for TensorFlow, and
    a process whose task 0 is gone is ended where it stands.

    Raises RuntimeFailure where the tasks do not come together, TrainingError where a synchronous method cannot go on,
    or nobody is left of an asynchronous one.
    """
    wiring = Wiring(
        ranks=task_ranks(job, len(cluster.addresses)), task=cluster.task, central=not job.algorithm.is_synchronous
    )
    workers = [rank for rank in wiring.own if rank < job.num_workers]
    with _in_touch(job, cluster, wiring, start.master.centre.dtype, last_checkpoint) as (inboxes, transport):
        objectives = parts.objectives(workers) if workers else {}
        evaluator = parts.evaluator() if cluster.task == 0 else None
        transport.meet()
        return run_ranks(
            job,
            start,
            ranks=wiring.own,
            inboxes=inboxes,
            transport=transport,
            layout=layout or ((0, len(start.master.centre)),),
            objectives=objectives,
            batch_size=batch_size,
            evaluator=evaluator,
            report=report,
            save=save,
        )


@contextmanager
def _in_touch(
    job: Job, cluster: Cluster, wiring: Wiring, dtype: Any, last_checkpoint: Callable[[], str]
) -> Iterator[tuple[Mapping[int, Inbox], ServerTransport]]:
    """Give inboxes and what brings messages to them, once all tasks are up; at the end, have all end together."""
    server = open_server(cluster, wiring.config())
    wait_for_others(cluster)
    inboxes = {rank: Inbox() for rank in wiring.own}
    progress = progress_of(job)
    transport = ServerTransport(wiring, inboxes, target=server.target, dtype=dtype, observe=progress.note)
    watch = TaskWatch(
        job=job,
        cluster=cluster,
        wiring=wiring,
        inboxes=inboxes,
        transport=transport,
        progress=progress,
        last_checkpoint=last_checkpoint,
    )
    transport.start()
    watch.start()
    problem = "the training ended on task 0 before it was done"
    try:
        yield inboxes, transport
        problem = ""
    except TrainingError as error:
        problem = str(error)
        raise
    finally:
        if cluster.task == 0:
            watch.stop()
            transport.end(problem)
    if cluster.task != 0:
        problem = transport.wait_for_the_end()
        watch.stop()
        if problem:
            raise TrainingError(problem)
