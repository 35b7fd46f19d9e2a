"""Front ends: where models come from. `load` takes whatever the user has and returns a `Graph`."""

from pase.importers.front_end import FrontEnd
from pase.importers.load import FRONT_ENDS, import_model, is_builtin, load
from pase.importers.model import ImportedModel

__all__ = ["FRONT_ENDS", "FrontEnd", "ImportedModel", "import_model", "is_builtin", "load"]
