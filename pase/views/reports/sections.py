"""Parts of a report, as the page has them: stages over time, what other choices cost, cost by number of devices."""

from collections.abc import Hashable, Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from pase.analysis.explanation import every_choice
from pase.analysis.simulation.pipeline import StagedSimulation, Work, simulate_stages
from pase.errors import ConfigurationError, PaseError, PlanError
from pase.planning.plan import Plan
from pase.planning.planner import MAX_DEVICES, Progress, search, settings_of

MOST_PASSES = 6_000
"""That the page draws: of longer steps the first ones."""


def simulated(plan: Plan) -> tuple[StagedSimulation | None, str]:
    """Return a step of a plan with parts, and what stands in the way; None: nothing is said of it."""
    try:
        return simulate_stages(plan) if plan.has_parts else None, ""
    except PlanError as error:  # of several stages in one group of devices
        return None, str(error)


def recomputed_costs(found: StagedSimulation) -> list[float]:
    """Return what of each layer's cost is its forward pass once more."""
    costs = []
    for problem, choice in found.step.problems:
        for layer, c in zip(problem.tables.layers, choice, strict=True):
            assert layer.passes is not None
            costs.append(found.plan.micro_batches * float(layer.passes.remade[c]))
    return costs


def stages_document(found: StagedSimulation) -> dict[str, Any]:
    """Return how the stages of a plan spend a step.

    works: what a stage does, by name. stages: of each `layers`, its first and last layer, `devices`, first and last,
    `times_s` of the works, of one micro-batch. passes: [stage, work, micro-batch or null, begin, end] in seconds, by
    their begin; `num_passes`: how many there are in all.
    """
    works = [*Work]
    passes = sorted(found.passes, key=lambda each: (each.begin_s, each.stage))
    return {
        "step_time_s": found.step_time_s,
        "closed_form_s": found.closed_form_s,
        "waiting_share": found.bubble,
        "works": [str(work) for work in works],
        "stages": [
            {
                **asdict(use),
                "layers": [found.plan.index[name] for name in use.layers],
                "devices": [use.devices[0], use.devices[1] - 1],
                "times_s": [use.times_s[work] for work in works],
                "micro_batch_s": use.micro_batch_s,
            }
            for use in found.stages
        ],
        "num_passes": len(passes),
        "passes": [
            [each.stage, works.index(each.work), each.micro_batch, each.begin_s, each.end_s]
            for each in passes[:MOST_PASSES]
        ],
    }


# -- what other configurations would cost: what is said of several layers stands in it once

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


# -- cost against the number of devices: the same network searched on each number

OURS, DATA_PARALLEL = "PaSE", "data parallelism"


def sweep(plan: Plan, numbers: Sequence[int], *, on_progress: Progress | None = None) -> dict[str, Any]:
    """Return what a plan's network costs on other numbers of devices, with its machine, cost model and memory limit.

    A number that cannot be searched says why. What is returned is as JSON has it: model; cost_unit, of the costs of a
    step; devices; strategies, each with its name and total_cost; memory_bytes, of a device; exact, whether the cost
    is proven to be least; search_time_s; problems, why there is no strategy, or "". All have an entry for each
    number, null where there is no strategy.
    """
    settings = settings_of(plan)
    settings["constraints"] = ()
    found: list[Plan | None] = []
    problems: list[str] = []
    for number, devices in enumerate(numbers):
        if on_progress:
            on_progress(f"searching for {devices} devices", number / len(numbers))
        try:
            found.append(search(plan.graph, devices, machine=plan.machine, **settings))
            problems.append("")
        except PaseError as error:
            found.append(None)
            problems.append(str(error))
    return {
        "model": plan.graph.name,
        "cost_unit": plan.cost_unit,
        "devices": list(numbers),
        "strategies": [
            {"name": OURS, "total_cost": [one and one.total_cost for one in found]},
            {"name": DATA_PARALLEL, "total_cost": [one and one.baselines["data_parallel"] for one in found]},
        ],
        "memory_bytes": [one and one.memory.total_bytes for one in found],
        "exact": [one and one.exact for one in found],
        "search_time_s": [one and one.search.time_s for one in found],
        "problems": problems,
    }


def device_numbers(text: str) -> tuple[int, ...]:
    """Return the numbers that "1..64" (1, 2, 4, … 64) or "8,12,16" stands for; ConfigurationError for other text."""
    first, dots, last = text.partition("..")
    numbers: tuple[int, ...] = ()
    with suppress(ValueError):
        if not dots:
            numbers = tuple(map(int, text.split(",")))
        elif 0 < int(first) <= int(last):  # the first, twice that, and so on, and the last
            powers = (int(first) << power for power in range(MAX_DEVICES.bit_length()))
            numbers = (*(number for number in powers if number < int(last)), int(last))
    if not numbers or min(numbers) < 1 or max(numbers) > MAX_DEVICES or list(numbers) != sorted(set(numbers)):
        raise ConfigurationError(
            f"{text!r} says no numbers of devices; expected 1..64 (which doubles: 1, 2, 4, … 64) or a list that "
            f"grows, as 4,8,12, of numbers up to {MAX_DEVICES}"
        )
    return numbers
