"""`train`: a training across workers from what was asked for, from its beginning to its end."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np

from pase.easgd.coordinator import Outcome, Report
from pase.easgd.events import done_event, reporting
from pase.easgd.packing import Packing
from pase.easgd.preparing import prepare
from pase.easgd.processes import Parts, run_task
from pase.easgd.request import TrainingRequest
from pase.easgd.threads import train_in_threads
from pase.easgd.worker import Trace
from pase.errors import PaseError, TrainingError
from pase.planning.planner import Progress
from pase.targets.mesh_tensorflow.runtime.cluster import Cluster, kept_text


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
    ends = np.cumsum(packing.sizes)
    places = {
        f"weight {name}": np.array([end - size, end])
        for name, size, end in zip(packing.names, packing.sizes, ends.tolist(), strict=True)
    }
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
        parts = Parts(objectives=prepared.objectives, evaluator=lambda: prepared.evaluator)
        take_part = partial(
            run_task,
            prepared.job,
            prepared.start,
            cluster,
            parts,
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
