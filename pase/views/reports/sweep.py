"""Cost against the number of devices: the same network searched on each number."""

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from pase.errors import ConfigurationError, PaseError
from pase.planning.plan import Plan
from pase.planning.planner import MAX_DEVICES, Progress, search, settings_of

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
