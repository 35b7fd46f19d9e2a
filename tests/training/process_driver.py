"""A training across processes without a network: what tests start, and what each of its processes then runs.

    python process_driver.py JSON

With PASE_CLUSTER it is one of the processes; without, it starts them.
"""

import json
import os
import sys
import time
from collections.abc import Collection
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from pase.easgd.actors import Gradient
from pase.easgd.algorithms import Array, Rates, algorithm_named
from pase.easgd.cluster import Cluster, cluster_of, kept_text
from pase.easgd.job import Job, Snapshot, begun
from pase.easgd.messages import Packing
from pase.errors import PaseError

PACKING = Packing(names=("first", "second", "third"), shapes=((2,), (2, 2), (1,)), dtype="float64")
LAYERS = PACKING.layout(packed=False)
START = np.linspace(-1.0, 1.0, PACKING.num_weights)


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What a test asks for.

    halt: (worker, step, file): write its process into the file, and never end this step. waiting: workers that do not
    end that step before the process in the file is gone. folder: for checkpoints.
    """

    algorithm: str
    num_workers: int = 4
    num_processes: int = 2
    num_steps: int = 5
    arrivals: tuple[int, ...] = ()
    save_every: int | None = None
    packed: bool = True
    halt: tuple[int, int, str] | None = None
    waiting: tuple[int, ...] = ()
    folder: str | None = None
    timeout_s: float | None = None

    @property
    def job(self) -> Job:
        return Job(
            algorithm=algorithm_named(self.algorithm),
            rates=Rates(learning_rate=0.1, rho=0.5, momentum=0.5),
            num_workers=self.num_workers,
            num_steps=self.num_steps,
            arrivals=tuple(self.arrivals),
            save_every=self.save_every,
        )

    def objective(self, worker: int) -> "Quadratic":
        halt = self.halt if self.halt and worker in (self.halt[0], *self.waiting) else None
        return Quadratic(worker=worker, halt=halt)


@dataclass(frozen=True, slots=True, kw_only=True)
class Quadratic:
    """½ a (w − c)², another a and c for each worker, and something that changes with the step."""

    worker: int
    halt: tuple[int, int, str] | None = None
    batch_size: int = 8

    def gradient(self, weights: Array, step: int) -> Gradient:
        if self.halt and step == self.halt[1]:
            path = Path(self.halt[2])
            if self.worker == self.halt[0]:
                path.with_suffix(".part").write_text(str(os.getpid()), encoding="ascii")
                path.with_suffix(".part").rename(path)
                time.sleep(600)
            while not path.exists() or Path("/proc", path.read_text(encoding="ascii")).exists():
                time.sleep(0.02)
        difference = weights - 0.3 * self.worker
        noise = 0.1 * np.cos(step + self.worker + np.arange(len(weights)))
        curvature = 1.0 + 0.1 * self.worker
        return Gradient(loss=float(curvature * difference @ difference / 2), vector=curvature * difference + noise)


def main(text: str) -> int:
    """Start the processes, or be one of them."""
    request = Request(**json.loads(text))
    cluster = cluster_of()
    folder = Path(request.folder) if request.folder else None
    if cluster:
        from pase.easgd.cluster_server import run_in_cluster

        run_in_cluster(partial(_take_part, request, cluster, folder), partial(kept_text, folder))
    from pase.easgd.job import count_tasks
    from pase.easgd.launch import local_clusters, supervise

    try:
        num_tasks = count_tasks(request.job, request.num_processes)
        return supervise(
            [sys.executable, __file__, text],
            local_clusters(num_tasks, step_timeout_s=request.timeout_s),
            goes_on=not request.job.algorithm.is_synchronous,
            checkpoints=folder,
        )
    except PaseError as error:
        sys.stderr.write(f"pase: {error}\n")
        return 1


def _take_part(request: Request, cluster: Cluster, folder: Path | None) -> None:
    from pase.easgd.checkpoint import write_checkpoint
    from pase.easgd.processes import run_task
    from pase.easgd.session import Origin, to_checkpoint

    job = request.job
    origin = Origin(packing=PACKING, seed=1, data={})

    def save(snapshot: Snapshot) -> Path:
        assert folder
        return write_checkpoint(folder, to_checkpoint(job, origin, snapshot))

    def objectives(workers: Collection[int]) -> dict[int, Quadratic]:
        return {worker: request.objective(worker) for worker in workers}

    if folder:
        folder.mkdir(exist_ok=True)
    outcome = run_task(
        job,
        begun(job, START),
        cluster,
        objectives,
        batch_size=8,
        layout=PACKING.layout(packed=request.packed),
        report=_say,
        save=save if folder else None,
        last_checkpoint=partial(kept_text, folder),
    )
    if outcome:
        _say(
            {
                "event": "outcome",
                "centre": [value.hex() for value in outcome.centre.tolist()],
                "num_events": outcome.num_events,
                "time_s": outcome.time_s,
                "lost": outcome.lost,
                "workers": [
                    each and {"num_messages": each.num_messages, "num_bytes": each.num_bytes}
                    for each in outcome.workers
                ],
            }
        )


def _say(event: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(event) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
