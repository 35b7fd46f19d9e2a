"""The `pase` command: finds its subcommands, and turns every error into one clear line."""

import os
import sys
from importlib import import_module

import click

from pase._version import __version__
from pase.errors import PaseError

COMMANDS = {
    "search": "find the best strategy for a model on a number of devices",
    "emit": "write a plan as a Mesh-TensorFlow program",
    "run": "train with a plan on virtual devices, beside the single-device program",
    "solve": "solve a file of cost tables",
    "models": "list the built-in networks",
    "machines": "list the machines",
}
"""Each command lives in the module of its name, which is imported when the command is used."""

EXIT_INPUT = 1
EXIT_INTERRUPTED = 130


class _LazyGroup(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command = import_module(f"pase.cli.{cmd_name}").command
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        # The texts stand here, so that --help imports no command.
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


@click.command(
    cls=_LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Start with: pase search alexnet --devices 8",
)
@click.version_option(__version__, prog_name="pase")
def cli() -> None:
    """Find the best way to parallelise the training of a neural network, with a proof."""


def main(arguments: list[str] | None = None) -> None:
    """Run the command line and exit: 0, 1 where the input is at fault, 2 for wrong usage, 130 when interrupted."""
    sys.exit(run(arguments))


def run(arguments: list[str] | None = None) -> int:
    """Run the command line and return its exit status."""
    try:
        result = cli.main(args=arguments, prog_name="pase", standalone_mode=False)
    except click.exceptions.Exit as finished:
        return finished.exit_code
    except click.Abort:
        click.echo("pase: interrupted", err=True)
        return EXIT_INTERRUPTED
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except PaseError as error:
        click.echo(f"pase: {_one_line(str(error))}", err=True)
        return EXIT_INPUT
    except KeyboardInterrupt:
        click.echo("pase: interrupted", err=True)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # Whoever read our output has seen enough (`pase search … | head`); say nothing on the way out.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return result if isinstance(result, int) else 0


def _one_line(text: str) -> str:
    return "".join(c if c.isprintable() else " " for c in text.replace("\n", " "))
