"""`pase train`: train replicas that elastic averaging or shared weights keep together, with one of 11 algorithms."""

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any, Never

import click

from pase.cli.options import (
    ModelArguments,
    check_writable,
    choice_option,
    complete_algorithms,
    complete_models,
    flag,
    model_options,
    whole_numbers,
)
from pase.cli.output import is_terminal, print_table, say, warn
from pase.cli.progress import REDRAW_S, interrupted, progress
from pase.common.options import PATH, SECONDS, option, options_of_all
from pase.common.words import duration, percentage, quantity, visible
from pase.easgd.checkpoint import Checkpointing
from pase.easgd.cluster import Cluster, cluster_of, kept_text
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
)
from pase.easgd.launch import local_clusters, supervise
from pase.errors import TrainingError
from pase.studies.easgd_paper import PARTS
from pase.targets.training.checkpointing import checkpoint_flags
from pase.targets.training.options import device_choice, device_options, dtype_option

_FINISHED = {".json": "plan", ".py": "program"}
"""Descriptions of files that name their own devices, by their endings."""

training_across_options = options_of_all(
    option(
        "--algorithm",
        default=DEFAULT_ALGORITHM,
        metavar="NAME",
        shell_complete=complete_algorithms,
        help="One of those named above.",
    ),
    option("--workers", "num_workers", type=int, default=DEFAULT_WORKERS, metavar="P", help="Replicas."),
    option("--steps", "num_steps", type=int, default=DEFAULT_STEPS, metavar="K", help="Of each worker."),
    option("--learning-rate", type=float, default=DEFAULT_LEARNING_RATE, metavar="RATE", help="η."),
    option("--rho", type=float, metavar="NUMBER", help="ρ; the elastic rate is η·ρ [0.9/(P·η)]."),
    option("--momentum", type=float, metavar="NUMBER", help="μ of the algorithms that have one [0.9]."),
    flag("--average", "averages", help="sync-sgd: the mean of the gradients, not their sum."),
    option(
        "--arrivals",
        type=whole_numbers,
        metavar="LIST",
        help="Serve asynchronous workers in this order, over and over: 0,1,0,1.",
    ),
    choice_option("--reduction", [each.value for each in Reduction], help="Of synchronous methods [tree]."),
    option("--packed/--per-layer", default=True, help="One message for all weights, or one for each."),
    option(
        "--data",
        metavar="DATA",
        help="digits, mnist:FOLDER, cifar10:PATH, an .npz file or a folder of .npy files [made up].",
    ),
    choice_option(
        "--data-split",
        [each.value for each in DataSplit],
        default=DataSplit.PARTITION.value,
        help="A part of the data for each worker, or all of them for each.",
    ),
    option("--test-data", metavar="DATA", help="What to test on [the test part of --data, where it has one]."),
    option("--test-every", type=int, metavar="K", help="Steps of each worker [after the last one]."),
    option("--until-accuracy", type=float, metavar="FRACTION", help="End when a test of the centre reaches it: 0.97."),
    option("--seed", type=int, metavar="N", help="Of the weights, the order of samples, made-up data [0]."),
    dtype_option,
    checkpoint_flags,
    option(
        "--metrics",
        "metrics_path",
        type=PATH,
        metavar="FILE",
        help="Append a line of JSON for each step that is shown, and each test.",
    ),
    option(
        "--trace",
        "trace_path",
        type=PATH,
        metavar="FILE.npz",
        help="Write weights, gradient and centre of every step, to check the rules by hand.",
    ),
    option(
        "--report-every", type=int, default=DEFAULT_REPORT_EVERY, metavar="K", help="Show every K steps of a worker."
    ),
    flag("--json", "as_json", help="Print a line of JSON for each event on standard output."),
    option("--processes", type=int, metavar="N", help="Share the workers out to N processes of this machine."),
    option(
        "--timeout",
        "timeout_s",
        type=SECONDS,
        metavar="S",
        help="Give up on a process that takes longer than S seconds [never].",
    ),
)
"""Adds the options of `pase train` but those of models and devices."""


_ARGUMENTS = "pase.train.arguments"


class _Command(click.Command):
    """A command that records its arguments: the processes of a job are started with the same ones."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.meta[_ARGUMENTS] = tuple(args)
        return super().parse_args(ctx, args)


@click.command("train", cls=_Command, epilog="Example: pase train lenet5 --batch 16 --data digits --learning-rate 0.05")
@click.argument("source", metavar="MODEL|PLAN|train.py", shell_complete=complete_models)
@training_across_options
@model_options(has_precision=False)
@device_options
@click.pass_context
def train_command(ctx: click.Context, /, source: str, model: ModelArguments, as_json: bool, **values: Any) -> int:
    """Train P replicas of MODEL, of a plan or of an emitted program at once.

    Each has a part of the data and steps of its own; they are held together by a centre (elastic averaging) or by
    shared weights. The algorithms:

    \b
      original-easgd  async-easgd  async-measgd  hogwild-easgd
      sync-easgd1  sync-easgd2  sync-easgd3
      async-sgd  async-msgd  hogwild-sgd  sync-sgd

    --batch is that of each worker, --devices those of each replica [1, or the plan's]. The code of a train.py is
    executed. With --processes, TensorFlow's servers listen on loopback and have no authentication: other users of this
    machine could run anything as you.
    """
    cluster = cluster_of()
    in_processes = values["processes"] is not None
    if values["trace_path"] is not None:
        if in_processes:
            raise TrainingError("--trace is of a training in one process: leave out --processes")
        check_writable(values["trace_path"])
    request = _request(source, model, values)
    if cluster is not None:
        _take_part(request, cluster, as_json=as_json)
    finished = _FINISHED.get(Path(source).suffix)
    if finished is not None and (model.num_devices is not None or model.batch is not None or model.arguments):
        warn(f"a {finished} names its own model and devices: --devices, --batch and --arg are not used")
    if finished == "program":
        warn(f"note: the code of {source} is executed")
    if in_processes:
        return _start_processes(request, ctx.meta[_ARGUMENTS], values)
    return _shown(partial(_train, request), request, as_json=as_json)


def _request(source: str, model: ModelArguments, values: Mapping[str, Any]) -> TrainingRequest:
    """Return the training that the options request; PaseError for invalid ones."""
    names = ("algorithm", "num_workers", "num_steps", "learning_rate", "report_every", "test_every", "until_accuracy")
    asked = {name: values[name] for name in (*names, *OPTIONS)}
    kept = ("packed", "dtype", "seed", "data", "test_data", "metrics_path", "trace_path")
    # A file that names its own devices has priority over options.
    own: dict[str, Any] = {}
    if Path(source).suffix not in _FINISHED:
        own = {"devices": model.num_devices or 1, "batch": model.batch, "arguments": model.arguments}
        own["machine"] = model.loaded_machine()
    return TrainingRequest(
        job=make_job(**{**asked, "averages": asked["averages"] or None}),
        data_split=DataSplit(values["data_split"]),
        choice=device_choice(values),
        checkpointing=Checkpointing.asked(values),
        source=source,
        **{name: values[name] for name in kept},
        **own,
    )


def _train(request: TrainingRequest, **told: Any) -> None:
    # Imported late, as it loads the framework, which takes seconds.
    from pase.easgd.session import train

    train(request, **told)


def _shown(run: Callable[..., object], request: TrainingRequest, *, as_json: bool) -> int:
    """Train, display events and the result, and return the exit status."""
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
    """Run the part of this process in a cluster, and exit."""
    from pase.easgd.cluster_server import run_in_cluster
    from pase.easgd.session import last_checkpoint, train_task

    def part() -> None:
        if cluster.task != 0:
            train_task(request, cluster)
            return
        try:
            status = _shown(partial(train_task, request, cluster), request, as_json=as_json)
        except BrokenPipeError:  # the reader has closed our output
            status = 0
        raise SystemExit(status)

    run_in_cluster(part, last_checkpoint(request))


def _start_processes(request: TrainingRequest, arguments: Sequence[str], values: Mapping[str, Any]) -> int:
    """Start the processes of a job and return the exit status; asynchronous methods continue if one is lost."""
    num_tasks = count_tasks(request.job, values["processes"])
    return supervise(
        pase_command(["train", *arguments]),
        local_clusters(num_tasks, step_timeout_s=values["timeout_s"]),
        goes_on=not request.job.algorithm.is_synchronous,
        checkpoints=_folder(request),
    )


def pase_command(arguments: Sequence[str]) -> list[str]:
    """Return the command that runs `pase` with some arguments in the same Python."""
    return [sys.executable, "-c", "from pase.cli.main import main; main()", *arguments]


def _folder(request: TrainingRequest) -> Path | None:
    return request.checkpointing.folder if request.checkpointing else None


# -- display during training

Event = dict[str, Any]
Report = Callable[[Event], None]


@contextmanager
def shown(*, as_json: bool) -> Iterator[Report]:
    """Return a function that displays an event as it arrives: JSON on standard output, progress on standard error."""
    is_live = is_terminal(sys.stderr) and not (as_json and sys.stdout.isatty())
    with live_table() if is_live else plain_lines(as_json) as progress:

        def report(event: Event) -> None:
            progress(event)
            if as_json:
                click.echo(json.dumps(event))

        yield report


@contextmanager
def plain_lines(as_json: bool) -> Iterator[Report]:
    """Return a function that displays an event as a line; nothing where JSON lines are printed."""

    def report(event: Event) -> None:
        text = "" if as_json else _text(event)
        if text:
            warn(text)

    yield report


@contextmanager
def live_table() -> Iterator[Report]:
    """Return a function that displays workers in a table on a terminal, and other events in lines above it."""
    from rich.console import Console
    from rich.live import Live
    from rich.table import Table
    from rich.text import Text

    console = Console(stderr=True, highlight=False)
    rows: dict[int, Event] = {}
    num_steps, tested, drawn_s = 0, "", 0.0

    def table() -> Table:
        found = Table(box=None, pad_edge=False, caption=Text(tested) if tested else None, caption_justify="left")
        for head in ("worker", "step", "loss", "accuracy", "communication", "examples/s"):
            found.add_column(head, justify="right")
        for worker, row in sorted(rows.items()):
            shares = percentage(row["accuracy"]), percentage(row["communication_share"])
            speed = f"{row['examples_per_s']:,.0f}"
            found.add_row(str(worker), f"{row['step']}/{num_steps}", f"{row['loss']:.4g}", *shares, speed)
        return found

    with Live(console=console, auto_refresh=False, transient=True) as live:

        def report(event: Event) -> None:
            nonlocal num_steps, tested, drawn_s
            text = _text(event)
            match event["event"]:
                case "step":
                    rows[event["worker"]], text = event, ""
                case "tested":
                    tested, text = text, ""
                case "started":
                    num_steps = event["num_steps"]
                case "lost":
                    rows.pop(event["worker"], None)
            if text:
                console.print(Text(f"pase: {visible(text)}"))
            if rows and monotonic() - drawn_s >= REDRAW_S:
                live.update(table(), refresh=True)
                drawn_s = monotonic()

        yield report


def _text(event: Event) -> str:
    """Return an event as a line, "" for one that is displayed otherwise."""
    match event["event"]:
        case "resumed":
            changed = f"; other than there: {', '.join(event['changed'])}" if event["changed"] else ""
            return f"going on after {event['after']} events from {event['path']}{changed}"
        case "started":
            messages = event["num_messages_per_exchange"]
            named = (("η", event["learning_rate"]), ("ρ", event["rho"]), ("μ", event["momentum"]))
            rates = ", ".join(f"{name} {value:.4g}" for name, value in named if value is not None)
            return (
                f"{event['algorithm']}, {event['num_workers']} workers, {rates}; {event['num_weights']:,} weights in "
                f"{messages} message{'s' if messages > 1 else ''}, {event['batch_size']} examples a step of each"
            )
        case "step":
            return (
                f"worker {event['worker']}  step {event['step']}  {_quality(event, 1)} "
                f"communication {event['communication_share']:.0%}  {event['examples_per_s']:,.0f} examples/s"
            )
        case "tested":
            return f"centre after {event['after']} events, {event['num_samples']:,} samples: {_tested(event)}"
        case "saved":
            return f"saved {event['path']}"
        case "refused":
            step = "" if event.get("step") is None else f", step {event['step']}"
            return f"worker {event['worker']}{step}: {event['what']}; not used, the centre is as it was"
        case "lost":
            return f"worker {event['worker']} is lost ({event['what']}); the others go on"
        case _:
            return ""


def _quality(event: Event, digits: int) -> str:
    right = "" if event["accuracy"] is None else f"accuracy {percentage(event['accuracy'], digits)} "
    return f"loss {event['loss']:.4g}  {right}"


def _tested(event: Event) -> str:
    return f"{_quality(event, 2)}({event['num_examples']} test examples)"


# -- summary


def print_summary(done: Event) -> None:
    """Print the result of a training, from its event ``done``."""
    rows = []
    for worker, work in enumerate(done["workers"]):
        told = (
            ["lost"]
            if work is None
            else [
                str(work["num_steps"]),
                duration(work["time_s"]),
                percentage(work["communication_share"]),
                f"{work['num_messages']:,}",
                quantity(work["num_bytes"], "B"),
            ]
        )
        rows.append([str(worker), *told, *[""] * (5 - len(told))])
    print_table(["worker", "steps", "time", "communication", "messages sent", "bytes sent"], rows)
    say()
    _print_parts(done)
    say()
    say(f"centre       {'not tested: name data with --test-data' if done['loss'] is None else _tested(done)}")
    say(
        f"throughput   {done['examples_per_s']:,.0f} examples/s for {duration(done['time_s'])}; "
        f"{done['num_samples']:,} examples in all"
    )
    say(f"exchanged    {done['num_messages']:,} messages, {quantity(done['num_bytes'], 'B')}, with those of the master")
    if done["lost"]:
        say(f"lost         worker {', '.join(map(str, done['lost']))}")
    if done["num_refused"]:
        say(f"refused      {done['num_refused']} steps, whose values were not finite")
    if done["checkpoint"]:
        say(f"checkpoint   {done['checkpoint']}")


def _print_parts(done: Event) -> None:
    """Print the breakdown of each worker's step time, and of the master's, in the columns of the paper's Table 3."""
    rows = {str(worker): work["parts"] for worker, work in enumerate(done["workers"]) if work is not None}
    rows |= {} if done["master_parts"] is None else {"master": done["master_parts"]}
    columns = {**PARTS, "other_s": "other"}
    print_table(
        ["worker", *columns.values()],
        [
            [name, *(percentage(parts[column] / max(parts["time_s"], 1e-9)) for column in columns)]
            for name, parts in rows.items()
        ],
    )
    hidden_s = sum(parts["hidden_s"] for parts in rows.values())
    if hidden_s:
        say(f"hidden       {duration(hidden_s)} in all, in addition to these")
