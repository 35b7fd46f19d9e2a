"""Command-line options of `pase` and of emitted programs, declared with `option`."""

import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click

Decorator = Callable[[Any], Any]


class Option(click.Option):
    """An option with the heading under which help lists it, "" for none."""

    def __init__(self, *names: Any, heading: str = "", **attributes: Any) -> None:
        super().__init__(*names, **attributes)
        self.heading = heading


def option(*names: str, heading: str = "", **attributes: Any) -> Decorator:
    """Return a decorator that adds an option under a heading of the help text; its default is shown."""
    attributes = {"show_default": attributes.get("default") is not None} | attributes
    return click.option(*names, cls=Option, heading=heading, **attributes)


def options_of_all(*options: Decorator) -> Decorator:
    """Return one decorator that adds several options to a command, in their order."""

    def decorate(command: Any) -> Any:
        for add in reversed(options):
            command = add(command)
        return command

    return decorate


class WholeNumber(click.IntRange):
    """A whole number, with an error message that says so."""

    name = "N"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, str) and re.fullmatch(r"\s*[+-]?[0-9]{1,999}\s*", value, re.ASCII) is None:
            self.fail(f"{value!r} is not usable; expected a whole number of {self.min} or more", param, ctx)
        return super().convert(value, param, ctx)


POSITIVE = WholeNumber(min=1)
SECONDS = click.FloatRange(min=0, min_open=True)
PATH: click.ParamType[Any] = click.Path(path_type=Path)


class ProgramCommand(click.Command):
    """Command line of an emitted program: its help lists options under headings."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options, those without a heading first."""
        found: dict[str, list[tuple[str, str]]] = {"Options": []}
        for param in self.get_params(ctx):
            if record := param.get_help_record(ctx):
                found.setdefault(getattr(param, "heading", "") or "Options", []).append(record)
        for heading, records in found.items():
            with formatter.section(heading):
                formatter.write_dl(records)

    def read(self, arguments: Sequence[str] | None = None) -> dict[str, Any]:
        """Return the value of each option; end the process after the help, and on wrong usage.

        arguments: by default those of the process.
        """
        given = sys.argv[1:] if arguments is None else arguments
        try:
            return self.make_context(Path(sys.argv[0]).name, list(given)).params
        except click.exceptions.Exit as done:
            raise SystemExit(done.exit_code) from None
        except click.ClickException as wrong:
            wrong.show()
            raise SystemExit(wrong.exit_code) from None
