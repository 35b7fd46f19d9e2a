"""Passes: small transformations from the operators of a source towards the vertices of a graph."""

from collections.abc import Callable

from pase.importers.ir.trace import Trace, check_trace
from pase.importers.passes.attention import recover_attention
from pase.importers.passes.fold import add_biases, fold_pointwise
from pase.importers.passes.merged import split_merged_dims
from pase.importers.passes.regions import collapse_regions
from pase.importers.passes.views import drop_constants, drop_noops, see_views

Pass = Callable[[Trace], Trace]

PASSES: dict[str, Pass] = {
    "drop no-ops": drop_noops,
    "drop constants and indices": drop_constants,
    "see through views": see_views,
    "split merged dims": split_merged_dims,
    "add biases": add_biases,
    "collapse regions": collapse_regions,
    "recover attention": recover_attention,
    "fold pointwise functions": fold_pointwise,
}
"""By name, in the order in which they run."""


def run_passes(trace: Trace) -> tuple[Trace, ...]:
    """Return the trace before the first pass and after each one; every one is verified."""
    found = [check_trace(trace)]
    for step in PASSES.values():
        found.append(check_trace(step(found[-1])))
    return tuple(found)


__all__ = ["PASSES", "Pass", "run_passes"]
