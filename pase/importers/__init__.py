"""Where models come from: `load` takes whatever the user has; `frameworks` knows the front ends."""

from pase.importers.builtin import MODEL_SUFFIXES
from pase.importers.load import is_builtin, load

__all__ = ["MODEL_SUFFIXES", "is_builtin", "load"]
