"""Front ends: where models come from. `load` takes whatever the user has and returns a `Graph`."""

from pase.importers.load import IMPORTERS, Importer, load

__all__ = ["IMPORTERS", "Importer", "load"]
