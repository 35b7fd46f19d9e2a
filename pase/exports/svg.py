"""SVG: the graph of a plan as a picture."""

from pase.drawing.picture import svg
from pase.exports.registry import Exported, ExportOptions
from pase.plan import Plan


def write(plan: Plan, options: ExportOptions) -> Exported:
    """Return the picture, which holds everything that it needs."""
    text = svg(plan, fold=options.fold)
    return Exported(text=text if text.endswith("\n") else f"{text}\n")
