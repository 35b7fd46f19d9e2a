"""Ctrl-C: the first ends the work, and those of an impatient hand right after it do not disturb the end."""

import signal
import sys
from dataclasses import dataclass
from time import monotonic

import click

from pase.cli.output import is_terminal, warn

EXIT_INTERRUPTED = 130

PATIENCE_S = 1.0
"""What follows an interrupt sooner than this is taken for a part of it."""


@dataclass(slots=True)
class Interrupts:
    """What is done about SIGINT; heard_s: when the last one was that counted, None before the first."""

    heard_s: float | None = None

    def listen(self) -> None:
        """Hear of interrupts from now on; where they are ignored, as in a shell's background job, they stay so."""
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, self)

    def end(self) -> None:
        """Have no interrupt disturb what is left, Python's own end: it is under way, or nobody minds."""
        last = signal.SIG_DFL if self.heard_s is None else signal.SIG_IGN
        if signal.getsignal(signal.SIGINT) is self:
            signal.signal(signal.SIGINT, last)

    def __call__(self, _number: int, _frame: object) -> None:
        now_s = monotonic()
        if self.heard_s is None or now_s - self.heard_s >= PATIENCE_S:
            self.heard_s = now_s
            raise KeyboardInterrupt


def is_interrupted() -> bool:
    """Return whether the command was interrupted; a search may have answered with what it had by then."""
    handler = signal.getsignal(signal.SIGINT)
    return isinstance(handler, Interrupts) and handler.heard_s is not None


def interrupted(text: str) -> int:
    """Say what came of an interrupt, on standard error, and return the exit status."""
    if is_terminal(sys.stderr):
        click.echo(err=True)  # its line begins with ^C
    warn(text)
    return EXIT_INTERRUPTED
