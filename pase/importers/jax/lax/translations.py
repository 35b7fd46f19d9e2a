"""`translate`: one primitive, by its name, as the nodes of the intermediate form."""

from pase.importers.jax.lax.call import Call, Step, Translation, generic
from pase.importers.jax.lax.gathers import GATHERS
from pase.importers.jax.lax.moves import MOVES
from pase.importers.jax.lax.points import POINTS
from pase.importers.jax.lax.products import PRODUCTS
from pase.importers.jax.lax.windows import WINDOWS

TRANSLATIONS: dict[str, Translation] = {**POINTS, **PRODUCTS, **WINDOWS, **MOVES, **GATHERS}
"""By the primitive's name. Those that run a program of their own are in `programs`."""


def translate(call: Call) -> list[Step]:
    """Return the nodes of a primitive; one that nothing is known of passes the leading dim through, if any."""
    return TRANSLATIONS.get(call.name, generic)(call)
