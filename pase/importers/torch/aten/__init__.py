"""PyTorch's operators in the vocabulary of the intermediate form: a module for each family, one registry."""

from pase.importers.ir import Step
from pase.importers.torch.aten import (
    attention,
    losses,
    pieces,
    points,
    products,
    recurrent,
    reductions,
    tables,
    views,
    windows,
)
from pase.importers.torch.aten.call import Call, Translation, generic

TRANSLATIONS: dict[str, Translation] = (
    points.TRANSLATIONS
    | reductions.TRANSLATIONS
    | views.TRANSLATIONS
    | pieces.TRANSLATIONS
    | tables.TRANSLATIONS
    | products.TRANSLATIONS
    | windows.TRANSLATIONS
    | attention.TRANSLATIONS
    | recurrent.TRANSLATIONS
    | losses.TRANSLATIONS
)
"""By the operator's name, without its overload and the mark of one that writes into its input."""


def is_known(function: str) -> bool:
    """Return whether an operator has a translation."""
    return function in TRANSLATIONS


def translate(call: Call) -> list[Step]:
    """Return the nodes of an operator; one that nothing is known of passes the leading dim through, if any."""
    return TRANSLATIONS.get(call.function, generic)(call)


__all__ = ["TRANSLATIONS", "Call", "Step", "is_known", "translate"]
