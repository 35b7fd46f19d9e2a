"""`pase train`: train replicas of a network that keep near one another, with one of eleven algorithms."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, Never

import click

from pase.cli.interrupts import interrupted
from pase.cli.launch import warn_of
from pase.cli.names import complete_models
from pase.cli.options import device_options, model_options
from pase.cli.progress import progress
from pase.cli.train_options import request_of, training_across_options, warn_of_what_is_not_used
from pase.easgd.job import TrainingRequest, count_tasks, task_ranks
from pase.easgd.supervise import pase_command, train_here
from pase.easgd.supervise import train_task as train_task_here
from pase.errors import TrainingError
from pase.targets.mesh_tensorflow.runtime.cluster import Cluster, cluster_of, kept_text, read_hosts
from pase.targets.mesh_tensorflow.runtime.resume import NEWEST

_ARGUMENTS = "pase.train.arguments"


class _Command(click.Command):
    """A command that keeps its arguments as they were given: processes of a job are started with the same ones."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.meta[_ARGUMENTS] = tuple(args)
        return super().parse_args(ctx, args)


@click.command("train", cls=_Command, epilog="Example: pase train lenet5 --batch 16 --data digits --learning-rate 0.05")
@click.argument("model", metavar="MODEL|PLAN|train.py", shell_complete=complete_models)
@training_across_options
@model_options(devices_required=False)
@device_options
@click.pass_context
def command(ctx: click.Context, /, model: str, as_json: bool, **values: Any) -> int:
    """Train P replicas of MODEL, of a plan or of an emitted program at once.

    Each has a part of the data and steps of its own; they are held together by a centre (elastic averaging) or by
    shared weights. The algorithms:

    \b
      original-easgd  async-easgd  async-measgd  hogwild-easgd
      sync-easgd1  sync-easgd2  sync-easgd3
      async-sgd  async-msgd  hogwild-sgd  sync-sgd

    --batch is that of each worker, --devices those of each replica [1, or the plan's]. The code of a train.py is
    executed. What --bind lets in can run anything as you: see pase launch --help.
    """
    cluster = cluster_of()
    request = request_of(model, values)
    if cluster is not None:
        _take_part(request, cluster, as_json=as_json)
    warn_of_what_is_not_used(model, values)
    if values["processes"] is not None or values["hosts"] is not None:
        return _start_processes(request, ctx.meta[_ARGUMENTS], values)
    return _shown(partial(_train, request), request, as_json=as_json)


def _train(request: TrainingRequest, **told: Any) -> None:
    # Only now: it loads the framework, which takes seconds.
    from pase.easgd.session import train

    train(request, **told)


def _shown(run: Callable[..., object], request: TrainingRequest, *, as_json: bool) -> int:
    """Train, show what happens and what came of it, and return the exit status."""
    from pase.cli.train_output import Report, print_summary, shown

    done: dict[str, Any] = {}
    try:
        with ExitStack() as showing:
            on_progress = showing.enter_context(progress())
            report: Report | None = None

            def report_and_keep(event: dict[str, Any]) -> None:
                nonlocal report
                if report is None:  # the training itself begins
                    showing.close()
                    report = showing.enter_context(shown(as_json=as_json))
                report(event)
                done.update(event if event["event"] == "done" else {})

            on_progress("loading TensorFlow", 0.0)
            run(report=report_and_keep, on_progress=on_progress)
    except KeyboardInterrupt:
        return interrupted(f"stopped{kept_text(_folder(request))}")
    if done and not as_json:
        print_summary(done)
    return 0


def _take_part(request: TrainingRequest, cluster: Cluster, *, as_json: bool) -> Never:
    """Do the part of this process in a cluster, and end it."""
    from pase.easgd.session import last_checkpoint, train_task
    from pase.targets.mesh_tensorflow.runtime.cluster_server import run_in_cluster

    def part() -> None:
        if cluster.task != 0:
            train_task(request, cluster)
            return
        try:
            status = _shown(partial(train_task, request, cluster), request, as_json=as_json)
        except BrokenPipeError:  # whoever reads our output has seen enough
            status = 0
        raise SystemExit(status)

    run_in_cluster(part, last_checkpoint(request))


def _start_processes(request: TrainingRequest, arguments: Sequence[str], values: Mapping[str, Any]) -> int:
    """Start the processes of a job on this machine, or one task of several hosts', and return the exit status."""
    processes, hosts, task, bind = (values[name] for name in ("processes", "hosts", "task", "bind"))
    if processes is not None and hosts is not None:
        raise click.UsageError("give --processes N for this machine, or --hosts with --task K for several")
    if (task is None) != (hosts is None):
        raise click.UsageError("--hosts and --task belong together")
    run = pase_command(["train", *arguments])
    is_synchronous = request.job.algorithm.is_synchronous
    if hosts is None:
        num_tasks = count_tasks(request.job, processes)
        warn_of(bind)
        return train_here(
            run,
            num_tasks=num_tasks,
            is_synchronous=is_synchronous,
            bind=bind,
            step_timeout_s=values["timeout_s"],
            checkpoints=_folder(request),
        )
    if request.checkpointing is not None and request.checkpointing.resume == NEWEST:
        raise TrainingError("with --hosts name the file to go on from, which every host can read: --resume FILE")
    cluster = Cluster(addresses=read_hosts(hosts), task=task, bind=bind, step_timeout_s=values["timeout_s"])
    task_ranks(request.job, len(cluster.addresses))
    warn_of(bind)
    return train_task_here(run, cluster, is_synchronous=is_synchronous, checkpoints=_folder(request))


def _folder(request: TrainingRequest) -> Path | None:
    return request.checkpointing.folder if request.checkpointing else None
