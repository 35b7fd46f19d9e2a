"""The names that a shell completes: of models and of machines, with files beside them, and of algorithms."""

import click
from click.shell_completion import CompletionItem

from pase.machine import preset_names
from pase.models import MODELS


def complete_models(_context: click.Context, _parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Return the built-in networks whose names begin like that; files are completed, too."""
    return _with_files([name for name in MODELS if name.startswith(incomplete)], incomplete)


def complete_machines(_context: click.Context, _parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Return the machines whose names begin like that; files are completed, too."""
    return _with_files([name for name in preset_names() if name.startswith(incomplete)], incomplete)


def complete_algorithms(_context: click.Context, _parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Return the algorithms of training across workers whose names begin like that."""
    # Here: every command has this module, and few of them train.
    from pase.easgd.algorithms import ALGORITHMS

    return [CompletionItem(name) for name in ALGORITHMS if name.startswith(incomplete)]


def _with_files(names: list[str], incomplete: str) -> list[CompletionItem]:
    # First: it empties the list of what was found.
    return [CompletionItem(incomplete, type="file"), *map(CompletionItem, names)]
