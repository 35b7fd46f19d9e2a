"""What `pase train` shows: lines of JSON, or the progress of workers on standard error and a summary at the end."""

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import monotonic
from types import MappingProxyType
from typing import Any

import click
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from pase.cli.output import duration, is_terminal, print_table, quantity, say, warn
from pase.cli.progress import REDRAW_S
from pase.common.names import visible
from pase.common.quantities import percentage
from pase.studies.easgd_costs.paper import PARTS

Event = dict[str, Any]
Report = Callable[[Event], None]


@contextmanager
def shown(*, as_json: bool) -> Iterator[Report]:
    """Give a function that shows an event as it comes: JSON on standard output, progress on standard error."""
    is_live = is_terminal(sys.stderr) and not (as_json and sys.stdout.isatty())
    with live_table() if is_live else plain_lines(as_json) as progress:

        def report(event: Event) -> None:
            progress(event)
            if as_json:
                click.echo(json.dumps(event))

        yield report


@contextmanager
def plain_lines(as_json: bool) -> Iterator[Report]:
    """Give a function that shows an event as a line; nothing where lines of JSON say it."""

    def report(event: Event) -> None:
        text = "" if as_json else _text(event)
        if text:
            warn(text)

    yield report


# -- a table that is drawn over and over


@dataclass(slots=True)
class _Progress:
    """What a table of workers shows. rows: the last step of each worker."""

    num_steps: int = 0
    rows: dict[int, Event] = field(default_factory=dict)
    tested: Event | None = None

    def take(self, event: Event) -> bool:
        """Take an event, and return whether the table shows it."""
        match event:
            case {"event": "started", "num_steps": num_steps}:
                self.num_steps = num_steps
            case {"event": "step", "worker": worker}:
                self.rows[worker] = event
                return True
            case {"event": "tested"}:
                self.tested = event
                return True
            case {"event": "lost", "worker": worker}:
                self.rows.pop(worker, None)
        return False

    def table(self) -> Table:
        """Return the table as it is now."""
        caption = None if self.tested is None else Text(_text(self.tested))
        table = Table(box=None, pad_edge=False, caption=caption, caption_justify="left")
        for head in ("worker", "step", "loss", "accuracy", "communication", "examples/s"):
            table.add_column(head, justify="right")
        for worker, row in sorted(self.rows.items()):
            table.add_row(
                str(worker),
                f"{row['step']}/{self.num_steps}",
                f"{row['loss']:.4g}",
                percentage(row["accuracy"]),
                percentage(row["communication_share"]),
                f"{row['examples_per_s']:,.0f}",
            )
        return table


@contextmanager
def live_table() -> Iterator[Report]:
    """Give a function that shows workers in a table on a terminal, and what else happens in lines above it."""
    console = Console(stderr=True, highlight=False)
    progress = _Progress()
    drawn_s = 0.0
    with Live(console=console, auto_refresh=False, transient=True) as live:

        def report(event: Event) -> None:
            nonlocal drawn_s
            is_in_table = progress.take(event)
            text = _text(event)
            if text and not is_in_table:
                console.print(Text(f"pase: {visible(text)}"))
            if progress.rows and monotonic() - drawn_s >= REDRAW_S:
                live.update(progress.table(), refresh=True)
                drawn_s = monotonic()

        yield report


# -- events in words


def _text(event: Event) -> str:
    """Return an event as a line, "" for one that is shown otherwise."""
    in_words = _TEXTS.get(event["event"])
    return in_words(event) if in_words else ""


def _resumed(event: Event) -> str:
    changed = f"; other than there: {', '.join(event['changed'])}" if event["changed"] else ""
    return f"going on after {event['after']} events from {event['path']}{changed}"


def _started(event: Event) -> str:
    messages = event["num_messages_per_exchange"]
    return (
        f"{event['algorithm']}, {event['num_workers']} workers, {_rates(event)}; {event['num_weights']:,} weights in "
        f"{messages} message{'s' if messages > 1 else ''}, {event['batch_size']} examples a step of each"
    )


def _rates(event: Event) -> str:
    named = (("η", event["learning_rate"]), ("ρ", event["rho"]), ("μ", event["momentum"]))
    return ", ".join(f"{name} {value:.4g}" for name, value in named if value is not None)


def _step(event: Event) -> str:
    right = "" if event["accuracy"] is None else f"accuracy {event['accuracy']:.1%}  "
    return (
        f"worker {event['worker']}  step {event['step']}  loss {event['loss']:.4g}  {right}"
        f"communication {event['communication_share']:.0%}  {event['examples_per_s']:,.0f} examples/s"
    )


def _tested(event: Event) -> str:
    return f"centre after {event['after']} events, {event['num_samples']:,} samples: {_quality(event)}"


def _quality(event: Event) -> str:
    right = "" if event["accuracy"] is None else f"accuracy {event['accuracy']:.2%} "
    return f"loss {event['loss']:.4g}  {right}({event['num_examples']} test examples)"


def _refused(event: Event) -> str:
    step = "" if event.get("step") is None else f", step {event['step']}"
    return f"worker {event['worker']}{step}: {event['what']}; not used, the centre is as it was"


def _lost(event: Event) -> str:
    return f"worker {event['worker']} is lost ({event['what']}); the others go on"


_TEXTS: Mapping[str, Callable[[Event], str]] = MappingProxyType(
    {
        "resumed": _resumed,
        "started": _started,
        "step": _step,
        "tested": _tested,
        "saved": lambda event: f"saved {event['path']}",
        "refused": _refused,
        "lost": _lost,
    }
)


# -- the end


def print_summary(done: Event) -> None:
    """Print what a training came to, from its event ``done``."""
    print_table(
        ["worker", "steps", "time", "communication", "messages sent", "bytes sent"],
        [_row(worker, work) for worker, work in enumerate(done["workers"])],
    )
    say()
    _print_parts(done)
    say()
    if done["loss"] is None:
        say("centre       not tested: name data with --test-data")
    else:
        say(f"centre       {_quality(done)}")
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
    """Print where the time of each worker's steps went, and of the master's, in the columns of the paper's Table 3."""
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
        say(f"hidden       {duration(hidden_s)} in all, beside these")


def _row(worker: int, work: Event | None) -> list[str]:
    if work is None:
        return [str(worker), "lost", "", "", "", ""]
    return [
        str(worker),
        str(work["num_steps"]),
        duration(work["time_s"]),
        percentage(work["communication_share"]),
        f"{work['num_messages']:,}",
        quantity(work["num_bytes"], "B"),
    ]
