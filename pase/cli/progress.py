"""Progress of long work, on standard error: a bar on a terminal, lines elsewhere, nothing for quick work."""

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from threading import TIMEOUT_MAX, Event, Thread
from time import monotonic

import click

from pase.cli.output import has_colour, is_terminal, shortened, warn
from pase.common.words import clock, visible

Progress = Callable[[str, float], None]
"""Called with the current activity and the fraction of it that is complete, 0 to 1."""

QUIET_S = 1.0
"""Work that takes less than this shows no progress."""

REDRAW_S = 0.1
"""Minimum time between two updates of the display."""

REPEAT_S = 15.0
"""Minimum time between two lines about the same activity."""

READING = "reading the model"

_LONGEST_BAR, _SHORTEST_BAR = 40, 8
_DONE, _LEFT, _PLAIN_DONE, _PLAIN_LEFT = "━", "─", "#", "."


@contextmanager
def progress(what: str = "") -> Iterator[Progress]:
    """Return a function that reports progress, which is displayed once the work has taken longer than a second.

    A thread updates the display, so that the clock advances while the work reports nothing. The function raises
    KeyboardInterrupt if a search has already returned early because of an interrupt: no further work may start.

    Args:
        what: First activity.
    """
    told: tuple[str, float] | None = (what, 0.0) if what else None
    ended, start_s = Event(), monotonic()
    display = _Bar() if is_terminal(sys.stderr) else _Lines()

    def show(what: str, fraction: float) -> None:
        nonlocal told
        if is_interrupted():
            raise KeyboardInterrupt
        told = what, fraction

    def draw() -> None:
        wait_s = QUIET_S
        while not ended.wait(min(wait_s, TIMEOUT_MAX)):
            wait_s = REDRAW_S
            if told is not None:
                # The reader of the stream may be gone; the work continues.
                with suppress(OSError, ValueError):
                    display.draw(*told, monotonic() - start_s)

    thread = Thread(target=draw, name="progress", daemon=True)
    thread.start()
    try:
        yield show
    finally:
        ended.set()
        thread.join()
        with suppress(OSError, ValueError):
            display.clear()


@dataclass(slots=True)
class _Lines:
    """Prints a line for each activity, and now and then its state, given after a colon."""

    begun: set[str] = field(default_factory=set)
    said: str = ""
    said_s: float = 0.0

    def draw(self, what: str, fraction: float, elapsed_s: float) -> None:
        thing = what.partition(":")[0]
        if thing not in self.begun or (what != self.said and elapsed_s - self.said_s >= REPEAT_S):
            warn(f"{what} …")
            self.begun.add(thing)
            self.said, self.said_s = what, elapsed_s

    def clear(self) -> None:
        """Do nothing, as printed lines remain."""


@dataclass(slots=True)
class _Bar:
    """One line of a terminal that is redrawn repeatedly; the cursor stays visible."""

    drawn: str = ""

    def draw(self, what: str, fraction: float, elapsed_s: float) -> None:
        columns = os.get_terminal_size(sys.stderr.fileno()).columns
        line = bar_line(what, fraction, elapsed_s, columns)
        if line != self.drawn:
            click.echo(f"\r{line}\x1b[K", err=True, nl=False, color=True)
            self.drawn = line

    def clear(self) -> None:
        if self.drawn:
            click.echo("\r\x1b[K", err=True, nl=False, color=True)


def bar_line(what: str, fraction: float, elapsed_s: float, columns: int) -> str:
    """Return the activity, a bar, per cent and the time, in fewer columns than the terminal has.

    A full line would wrap. At fraction 0 there is no bar, as the total may be unknown. The bar is shortened first, then
    the activity.
    """
    from rich.cells import cell_len

    fraction = min(max(fraction, 0.0), 1.0)
    figures = f"  {fraction:4.0%}  {clock(elapsed_s)}" if fraction else f"  {clock(elapsed_s)}"
    available = columns - 1 - len(figures)
    if available < 1:
        return ""
    what = shortened(visible(what), available)
    room = min(available - cell_len(what) - 2, _LONGEST_BAR)
    return f"{what}  {_bar(fraction, room)}{figures}" if fraction and room >= _SHORTEST_BAR else what + figures


def _bar(fraction: float, width: int) -> str:
    num_done = round(fraction * width)
    encoding = (sys.stderr.encoding or "").lower()
    done, left = (_DONE, _LEFT) if encoding.startswith("utf") else (_PLAIN_DONE, _PLAIN_LEFT)
    if not has_colour(sys.stderr):
        return done * num_done + left * (width - num_done)
    return click.style(done * num_done, fg="cyan") + click.style(left * (width - num_done), dim=True)


EXIT_INTERRUPTED = 130

PATIENCE_S = 1.0
"""An interrupt within this time after another one counts as part of it."""


@dataclass(slots=True)
class Interrupts:
    """Handler of SIGINT; heard_s: time of the last one that counted, None before the first."""

    heard_s: float | None = None

    def listen(self) -> None:
        """Install the handler; where interrupts are ignored, as in a shell's background job, they remain ignored."""
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, self)

    def end(self) -> None:
        """Ignore interrupts during Python's own shutdown."""
        last = signal.SIG_DFL if self.heard_s is None else signal.SIG_IGN
        if signal.getsignal(signal.SIGINT) is self:
            signal.signal(signal.SIGINT, last)

    def __call__(self, _number: int, _frame: object) -> None:
        now_s = monotonic()
        if self.heard_s is None or now_s - self.heard_s >= PATIENCE_S:
            self.heard_s = now_s
            raise KeyboardInterrupt


def is_interrupted() -> bool:
    """Return whether the command was interrupted; a search may then have returned its best result so far."""
    handler = signal.getsignal(signal.SIGINT)
    return isinstance(handler, Interrupts) and handler.heard_s is not None


def interrupted(text: str) -> int:
    """Report an interrupt on standard error, and return the exit status."""
    if is_terminal(sys.stderr):
        click.echo(err=True)  # its line begins with ^C
    warn(text)
    return EXIT_INTERRUPTED
