"""The events that a training across workers reports, beside those of its ranks, and the file of metrics."""

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from typing import Any

from pase.easgd.coordinator import Outcome, Report
from pase.easgd.preparing import Prepared
from pase.easgd.worker import WorkerOutcome
from pase.targets.mesh_tensorflow.runtime.metrics import MetricsFile

_IN_METRICS = frozenset({"step", "tested"})


@contextmanager
def reporting(prepared: Prepared, report: Report | None) -> Iterator[Report]:
    """Give a function that shows an event and writes those of steps and tests into the file of metrics.

    Reports ``resumed`` (after: events, path, changed: options that differ, in words) where it is so, and ``started``
    (algorithm, learning_rate, rho and momentum, None where the algorithm has none, num_workers, num_steps, num_weights,
    num_messages_per_exchange, batch_size). Others follow: those of
    `run_ranks`, and that of `done_event`.
    """
    request, job = prepared.request, prepared.job
    shown = report or _silent
    with ExitStack() as opened:
        metrics = None
        if request.metrics_path is not None:
            resumes = request.checkpointing is not None and request.checkpointing.resume is not None
            metrics = opened.enter_context(
                MetricsFile(request.metrics_path, num_steps=prepared.steps_done, resume=resumes)
            )

        def show(event: dict[str, Any]) -> None:
            shown(event)
            if metrics and event["event"] in _IN_METRICS:
                # Of all workers, where it is none's own.
                step = event["step"] if "step" in event else event["after"] // job.events_per_step
                metrics.write({**event, "step": step, "unix_time_s": time.time()})

        if prepared.resumed:
            show(dict(prepared.resumed))
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
    this training, without what a checkpoint that it went on from had. workers: each one's, None for one that was lost.
    num_messages, num_bytes: of all exchanges, the master's included. checkpoint: the newest one, None for none.
    """
    loss, accuracy, num_examples = _final_test(outcome)
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
        "loss": loss,
        "accuracy": accuracy,
        "num_examples": num_examples,
        "workers": [None if worker is None else _work(worker) for worker in outcome.workers],
        "num_messages": outcome.num_messages,
        "num_bytes": outcome.num_bytes,
        "lost": list(outcome.lost),
        "num_refused": outcome.num_refused,
        "checkpoint": None if newest is None else str(newest),
    }


def _work(worker: WorkerOutcome) -> dict[str, Any]:
    return {**asdict(worker), "communication_share": worker.communication_share}


def _final_test(outcome: Outcome) -> tuple[float | None, float | None, int | None]:
    """Return loss, accuracy and number of examples of the centre in the end, which the last test is of."""
    if not outcome.tests:
        return None, None, None
    last = outcome.tests[-1]
    assert last.event == outcome.num_events
    return last.loss, last.accuracy, last.num_examples


def _silent(_: dict[str, Any]) -> None:
    """Report nothing."""
