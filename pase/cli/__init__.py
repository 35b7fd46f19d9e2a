"""The command line: thin commands over the library."""

from pase.cli.main import main

__all__ = ["main"]
