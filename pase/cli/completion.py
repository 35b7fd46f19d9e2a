"""`pase completion`: what makes a shell complete the words of `pase`."""

import click
from click.shell_completion import get_completion_class

from pase.cli.main import PROGRAM, cli
from pase.cli.output import say_whole

VARIABLE = "_PASE_COMPLETE"
"""Set by the script that is printed here, when a word is to be completed; click looks for it."""

SHELLS = ("bash", "zsh", "fish")


@click.command("completion", epilog="Example: pase completion bash")
@click.argument("shell", type=click.Choice(SHELLS))
def command(shell: str) -> None:
    """Print what makes SHELL complete commands, options, models and machines.

    \b
    bash: add to ~/.bashrc                    eval "$(pase completion bash)"
    zsh:  add to ~/.zshrc                     eval "$(pase completion zsh)"
    fish: save as ~/.config/fish/completions/pase.fish
    """
    found = get_completion_class(shell)
    assert found is not None
    for line in found(cli, {}, PROGRAM, VARIABLE).source().splitlines():
        say_whole(line)
