"""`pase train`: train replicas of a network that keep near one another, with one of eleven algorithms."""

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any, Never

import click

from pase.cli.options import (
    ModelArguments,
    check_writable,
    chosen_clusters,
    complete_algorithms,
    complete_models,
    model_options,
    process_options,
)
from pase.cli.output import warn
from pase.cli.progress import interrupted, progress
from pase.easgd.job import (
    DEFAULT_ALGORITHM,
    DEFAULT_LEARNING_RATE,
    DEFAULT_REPORT_EVERY,
    DEFAULT_STEPS,
    DEFAULT_WORKERS,
    OPTIONS,
    DataSplit,
    Reduction,
    TrainingRequest,
    count_tasks,
    make_job,
    supervise_training,
    task_ranks,
)
from pase.errors import TrainingError
from pase.targets.mesh_tensorflow.runtime.checkpoint import NEWEST, Checkpointing
from pase.targets.mesh_tensorflow.runtime.cluster import Cluster, cluster_of, kept_text
from pase.targets.mesh_tensorflow.runtime.options import ITEMSIZES, device_choice, device_options, options_of_all

_SAVE_EVERY = 100


_KEEP = 3


_FINISHED = {".json": "plan", ".py": "program"}
"""What files that name their own devices are called, by their endings."""


class _Arrivals(click.ParamType[tuple[int, ...]]):
    """Numbers of workers with commas between."""

    name = "list"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        """Return the numbers."""
        if isinstance(value, tuple):
            return value
        items = str(value).split(",")
        if not all(re.fullmatch(r"\s*[0-9]{1,9}\s*", item, re.ASCII) for item in items):
            self.fail(f"{value!r} is not usable; expected numbers of workers, such as 0,1,0,1", param, ctx)
        return tuple(map(int, items))


_JOB_OPTIONS = (
    click.option(
        "--algorithm",
        default=DEFAULT_ALGORITHM,
        show_default=True,
        metavar="NAME",
        shell_complete=complete_algorithms,
        help="One of those named above.",
    ),
    click.option(
        "--workers", "num_workers", type=int, default=DEFAULT_WORKERS, show_default=True, metavar="P", help="Replicas."
    ),
    click.option(
        "--steps", "num_steps", type=int, default=DEFAULT_STEPS, show_default=True, metavar="K", help="Of each worker."
    ),
    click.option(
        "--learning-rate", type=float, default=DEFAULT_LEARNING_RATE, show_default=True, metavar="RATE", help="η."
    ),
    click.option("--rho", type=float, metavar="NUMBER", help="ρ; the elastic rate is η·ρ [0.9/(P·η)]."),
    click.option("--momentum", type=float, metavar="NUMBER", help="μ of the algorithms that have one [0.9]."),
    click.option("--average", "averages", is_flag=True, help="sync-sgd: the mean of the gradients, not their sum."),
    click.option(
        "--arrivals",
        type=_Arrivals(),
        metavar="LIST",
        help="Serve asynchronous workers in this order, over and over: 0,1,0,1.",
    ),
    click.option(
        "--reduction", type=click.Choice([each.value for each in Reduction]), help="Of synchronous methods [tree]."
    ),
    click.option(
        "--packed/--per-layer", default=True, show_default=True, help="One message for all weights, or one for each."
    ),
)


_PROCESS_OPTIONS = process_options(
    processes="Share the workers out to N processes of this machine.",
    hosts="HOST:PORT of each task; --resume then names a FILE.",
    timeout="Give up whoever takes longer than S seconds [never].",
    least=None,
)


_DATA_OPTIONS = (
    click.option(
        "--data",
        metavar="DATA",
        help="digits, mnist:FOLDER, cifar10:PATH, an .npz file or a folder of .npy files [made up].",
    ),
    click.option(
        "--data-split",
        type=click.Choice([each.value for each in DataSplit]),
        default=DataSplit.PARTITION.value,
        show_default=True,
        help="A part of the data for each worker, or all of them for each.",
    ),
    click.option("--test-data", metavar="DATA", help="What to test on [the test part of --data, where it has one]."),
    click.option("--test-every", type=int, metavar="K", help="Steps of each worker [after the last one]."),
    click.option(
        "--until-accuracy", type=float, metavar="FRACTION", help="End when a test of the centre reaches it: 0.97."
    ),
    click.option("--seed", type=int, metavar="N", help="Of the weights, the order of samples, made-up data [0]."),
    click.option("--dtype", type=click.Choice(list(ITEMSIZES)), default="float32", show_default=True),
)


_KEPT_OPTIONS = (
    click.option(
        "--checkpoint", type=click.Path(path_type=Path), metavar="DIR", help="The folder to keep checkpoints in."
    ),
    click.option("--save-every", type=int, metavar="K", help=f"Steps of each worker [{_SAVE_EVERY}]; the last, too."),
    click.option("--keep", type=int, default=_KEEP, show_default=True, metavar="N", help="How many checkpoints."),
    click.option(
        "--resume",
        is_flag=False,
        flag_value=NEWEST,
        metavar="[FILE]",
        help="Go on from the newest checkpoint in DIR, or from a file.",
    ),
    click.option(
        "--metrics",
        "metrics_path",
        type=click.Path(path_type=Path),
        metavar="FILE",
        help="Append a line of JSON for each step that is shown, and each test.",
    ),
    click.option(
        "--trace",
        "trace_path",
        type=click.Path(path_type=Path),
        metavar="FILE.npz",
        help="Write weights, gradient and centre of every step, to check the rules by hand.",
    ),
    click.option(
        "--report-every",
        type=int,
        default=DEFAULT_REPORT_EVERY,
        show_default=True,
        metavar="K",
        help="Show every K steps of a worker.",
    ),
    click.option("--json", "as_json", is_flag=True, help="Print a line of JSON for each event on standard output."),
)


training_across_options = options_of_all(*_JOB_OPTIONS, *_DATA_OPTIONS, *_KEPT_OPTIONS, _PROCESS_OPTIONS)
"""Adds the options of `pase train` but those of models and devices."""


def request_of(model: str, values: Mapping[str, Any]) -> TrainingRequest:
    """Return what the options ask for; PaseError for what cannot be."""
    asked = {
        name: values[name]
        for name in ("algorithm", "num_workers", "num_steps", "learning_rate", "report_every", "test_every")
    }
    asked |= {name: values[name] for name in ("until_accuracy", *OPTIONS)}
    if values["trace_path"] is not None:
        if values["processes"] is not None or values["hosts"] is not None:
            raise TrainingError("--trace is of a training in one process: leave out --processes and --hosts")
        check_writable(values["trace_path"])
    return TrainingRequest(
        job=make_job(**{**asked, "averages": asked["averages"] or None}),
        data_split=DataSplit(values["data_split"]),
        choice=device_choice(values),
        checkpointing=Checkpointing.asked(values),
        **{
            name: values[name]
            for name in ("packed", "dtype", "seed", "data", "test_data", "metrics_path", "trace_path")
        },
        **_source(model, values),
    )


def _source(model: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is trained; a file that names its own devices goes before options for them."""
    if Path(model).suffix in _FINISHED:
        return {"source": model}
    given = {field.name: values[field.name] for field in fields(ModelArguments) if field.name != "model"}
    chosen = ModelArguments(**{**given, "model": model, "devices": values["devices"] or 1})
    return {
        "source": model,
        "devices": chosen.devices,
        "batch": chosen.batch,
        "arguments": chosen.arguments,
        "machine": chosen.loaded_machine(),
    }


def warn_of_what_is_not_used(model: str, values: Mapping[str, Any]) -> None:
    """Warn of options that a file does not heed, and of code that is executed."""
    finished = _FINISHED.get(Path(model).suffix)
    if finished is not None and (values["devices"] is not None or values["batch"] is not None or values["arguments"]):
        warn(f"a {finished} names its own model and devices: --devices, --batch and --arg are not used")
    if finished == "program":
        warn(f"note: the code of {model} is executed")


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
def train_command(ctx: click.Context, /, model: str, as_json: bool, **values: Any) -> int:
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
    if values["hosts"] is not None and request.checkpointing is not None and request.checkpointing.resume == NEWEST:
        raise TrainingError("with --hosts name the file to go on from, which every host can read: --resume FILE")
    clusters = chosen_clusters(values, partial(count_tasks, request.job))
    task_ranks(request.job, len(clusters[0].addresses))
    return supervise_training(
        pase_command(["train", *arguments]),
        clusters,
        is_synchronous=request.job.algorithm.is_synchronous,
        checkpoints=_folder(request),
    )


def pase_command(arguments: Sequence[str]) -> list[str]:
    """Return the command of a process that does what `pase` does with some arguments, in this very Python."""
    return [sys.executable, "-c", "from pase.cli.main import main; main()", *arguments]


def _folder(request: TrainingRequest) -> Path | None:
    return request.checkpointing.folder if request.checkpointing else None
