"""The `pase` command: finds its subcommands, and reports every error in one line."""

import gc
import os
import sys
from contextlib import suppress
from importlib import import_module
from io import StringIO, TextIOWrapper
from pathlib import Path

import click
from click.shell_completion import CompletionItem

from pase._version import __version__
from pase.cli.progress import EXIT_INTERRUPTED, Interrupts, interrupted, is_interrupted
from pase.common.words import visible
from pase.errors import MissingExtraError, PaseError, unknown_name

COMMANDS = {
    "search": ("search", "find the best strategy for a model on a number of devices"),
    "evaluate": ("evaluate", "say what a strategy of your own costs, and what to change in it first"),
    "diff": ("evaluate", "say which layers two plans split differently, and what that costs"),
    "compare": ("compare", "compare the best strategy with those of experts and of a random search"),
    "explain": ("explain", "say what a plan or one of its layers costs, its placement and its transfers"),
    "export": ("documents", "write a plan in formats that other programs read"),
    "report": ("documents", "write a page that shows a plan, or several side by side"),
    "serve": ("documents", "show a plan on a page that plans again while its sliders are moved"),
    "simulate": ("simulate", "simulate a training step of a plan, message by message"),
    "emit": ("run", "write a plan as a Mesh-TensorFlow program"),
    "weights": ("run", "write the weights of a model, for programs of its forward pass"),
    "run": ("run", "train with a plan on virtual devices, and compare with the single-device program"),
    "check": ("check", "compare a PyTorch module under a plan with the module itself"),
    "train": ("train", "train replicas of a network that keep near one another"),
    "solve": ("tables", "solve a file of cost tables"),
    "tables": ("tables", "write the cost tables of a model to a file"),
    "models": ("inspect", "list the built-in networks"),
    "inspect": ("inspect", "show what importing a model makes of it, and what was not understood"),
    "machines": ("inspect", "list the machines"),
    "calibrate": ("calibrate", "measure this machine and write it as a machine file"),
    "easgd-model": ("easgd_model", "show what training across workers costs with the EASGD family"),
    "integrated": ("integrated", "show what integrated model, batch and domain parallelism communicates"),
    "halo": ("integrated", "show the halos of a sliding kernel on a number of workers"),
    "doctor": ("doctor", "say what is installed, what is missing for what, and what to type"),
    "completion": ("doctor", "print what makes a shell complete commands, models and machines"),
}
"""Module and description of each command; the module is imported when the command is used, and has it as
``<name>_command``."""

PROGRAM = "pase"
EXIT_INPUT = 1


class _InterruptedError(Exception):
    """Replaces KeyboardInterrupt, for which click would print an empty line."""


class _LazyGroup(click.Group):
    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise _InterruptedError from None

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module = import_module(f"pase.cli.{COMMANDS[cmd_name][0]}")
        command = getattr(module, f"{cmd_name.replace('-', '_')}_command")
        assert isinstance(command, click.Command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in COMMANDS and not args[0].startswith("-"):
            raise click.UsageError(unknown_name("command", args[0], COMMANDS), ctx)
        return super().resolve_command(ctx, args)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        # The descriptions are here, so that no command is imported.
        found = [CompletionItem(name, help=text) for name, (_, text) in COMMANDS.items() if name.startswith(incomplete)]
        return [*found, *click.Command.shell_complete(self, ctx, incomplete)]

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        # The descriptions are here, so that --help imports no command.
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in COMMANDS.items()])


@click.command(
    cls=_LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Start with: pase search alexnet --devices 8",
)
@click.version_option(__version__, prog_name=PROGRAM)
def cli() -> None:
    """Find the best way to parallelise the training of a neural network, with a proof."""


def main(arguments: list[str] | None = None) -> None:
    """Run the command line and exit: 0, 1 where the input is at fault, 2 for wrong usage, 130 when interrupted."""
    _prepare_streams()
    # Graphs, tables and plans are many small objects that live until the end, so collecting garbage among them is
    # useless.
    gc.set_threshold(200_000, 50, 100)
    interrupts = Interrupts()
    interrupts.listen()
    try:
        status = run(arguments)
    except KeyboardInterrupt:  # another one while reporting the first
        status = EXIT_INTERRUPTED
    interrupts.end()
    sys.exit(status)


def run(arguments: list[str] | None = None) -> int:
    """Run the command line and return its exit status."""
    try:
        result = cli.main(args=arguments, prog_name=PROGRAM, standalone_mode=False)
    except click.exceptions.Exit as finished:
        return finished.exit_code
    except (_InterruptedError, click.Abort):
        return interrupted("interrupted")
    except click.ClickException as error:
        shown = StringIO()
        error.show(shown)
        click.echo(visible(shown.getvalue(), keeping="\n\t"), nl=False, err=True)
        return error.exit_code
    except PaseError as error:
        if isinstance(error, MissingExtraError):
            _install_and_repeat(error.extra, arguments)
        return _failed(str(error))
    except MemoryError:
        return _failed("there is not enough memory for this; use fewer devices or a smaller model")
    except SystemExit:
        # How click ends when the reader of our output has closed it (`pase search … | head`): not an error.
        return 0
    except OSError as error:
        if error.filename is not None:
            return _failed(f"{error.filename} cannot be used: {error.strerror}")
        _discard_output()
        return _failed(f"the output cannot be written: {error.strerror or error}")
    if is_interrupted() and result != EXIT_INTERRUPTED:
        return interrupted("interrupted: this is the best answer that was found until then")
    return result if isinstance(result, int) else 0


def _install_and_repeat(extra: str, arguments: list[str] | None) -> None:
    """Replace this process by the script that started it, which installs a permitted extra and repeats the command.

    scripts/pase installs only what searches need, and lists in PASE_LAUNCHER_EXTRAS what else it would install on
    demand.
    """
    launcher = os.environ.get("PASE_LAUNCHER")
    if launcher is None or extra not in os.environ.get("PASE_LAUNCHER_EXTRAS", "").split(","):
        return
    sys.stdout.flush()
    repeated = sys.argv[1:] if arguments is None else arguments
    os.execve(launcher, [launcher, *repeated], {**os.environ, "PASE_INSTALL": extra})


def _failed(text: str) -> int:
    click.echo(f"pase: {visible(text)}", err=True)
    return EXIT_INPUT


def _prepare_streams() -> None:
    """Make output possible where a stream is closed, or its encoding lacks some of our characters."""
    sys.stdout = sys.stdout or Path(os.devnull).open("w")  # noqa: SIM115
    sys.stderr = sys.stderr or Path(os.devnull).open("w")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")


def _discard_output() -> None:
    """Discard buffered output, which Python would otherwise fail to write again at exit."""
    with suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
