"""Where models come from: `load` takes whatever the user has; `frameworks` knows the front ends."""

from pase.importers.front_end import MODEL_SUFFIXES, is_builtin, load
from pase.importers.lower.vertices import OPERATORS

__all__ = ["MODEL_SUFFIXES", "OPERATORS", "is_builtin", "load"]
