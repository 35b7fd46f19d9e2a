"""What other configurations would cost, as the page has it: what is said of several layers stands in it once."""

from collections.abc import Hashable
from typing import Any

from pase.analysis.explanation import every_choice
from pase.errors import PlanError
from pase.planning.plan import Plan
from pase.planning.planner import Progress

_DIGITS = 9
"""Of differences, as parts of the plan's cost: costs that are no further apart are equal."""


def choices_document(
    plan: Plan, *, time_limit_s: float | None = None, on_progress: Progress | None = None
) -> tuple[dict[str, Any] | None, str]:
    """Return what each layer's configurations would cost and what else would change, and what of it is not known.

    None stands for all of it where nothing is known.

    splits: all configurations that it speaks of. changes: of other layers, [how far it is from this layer in the plan's
    order, row of splits, …]. lists: of each, `entries` of [row of splits, relative difference to the plan's cost, row
    of changes], `num_configurations`, and `beyond`, the least difference of those without an entry. layers: which list
    is each one's, null for those that were not reached within the time limit.
    """
    try:
        found = every_choice(plan, time_limit_s=time_limit_s, on_progress=on_progress)
    except PlanError as error:
        return None, str(error)

    splits: dict[tuple[int, ...], int] = {}
    changes: dict[tuple[int, ...], int] = {}
    lists: dict[Hashable, tuple[int, dict[str, Any]]] = {}

    def relative(difference: float) -> float:
        return round(difference / plan.total_cost, _DIGITS) if plan.total_cost else 0.0

    def numbered(row: tuple[int, ...]) -> int:
        return splits.setdefault(row, len(splits))

    layers: list[int | None] = []
    for number, layer in enumerate(found):
        if layer is None:
            layers.append(None)
            continue
        entries = []
        for choice in layer.choices:
            changed = tuple(part for other, row in choice.changes for part in (other - number, numbered(row)))
            entries.append(
                (numbered(choice.splits), relative(choice.difference), changes.setdefault(changed, len(changes)))
            )
        key = tuple(entries), layer.num_configurations, relative(layer.beyond)
        whole = {"entries": entries, "num_configurations": layer.num_configurations, "beyond": relative(layer.beyond)}
        layers.append(lists.setdefault(key, (len(lists), whole))[0])
    missing = layers.count(None)
    note = ""
    if missing:
        note = (
            f"what other configurations would cost is not known of {missing} of {len(layers)} layers, which were not "
            f"reached within the time limit of {time_limit_s:g} s; give more time (--time-limit)"
        )
    return {
        "splits": list(splits),
        "changes": list(changes),
        "lists": [whole for _, whole in lists.values()],
        "layers": layers,
    }, note
