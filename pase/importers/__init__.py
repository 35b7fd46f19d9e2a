"""Where models come from: `load` takes whatever the user has; `frameworks` knows the front ends."""

from pase.importers.load import is_builtin, load

__all__ = ["is_builtin", "load"]
