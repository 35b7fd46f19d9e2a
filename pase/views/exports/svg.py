"""SVG: the graph of a plan as a picture."""

from pase.planning.plan import Plan
from pase.views.drawing.picture import svg
from pase.views.exports.registry import Exported, ExportOptions


def write(plan: Plan, options: ExportOptions) -> Exported:
    """Return the picture, which holds everything that it needs."""
    text = svg(plan, fold=options.fold)
    return Exported(text=text if text.endswith("\n") else f"{text}\n")
