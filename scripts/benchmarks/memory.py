"""What a limit on the memory of a device costs, and how long the search takes to prove it."""

from pase import load, load_machine
from pase.common.words import quantity
from pase.costs import Problem
from pase.models import MODELS
from pase.planning.memory_limit import cheapest_within, lightest_within, limit_of
from pase.planning.problems import problem_of
from pase.solver import LimitedSolution
from scripts.benchmarks.tables import markdown, publish

DEVICES = (8, 64)
SHARES = (0.0, 0.1, 0.5, 0.9)
"""Limits, between what the lightest strategy needs (0) and what the cheapest one does (1)."""
OPTIMISER = "adam"
PLENTY = 10**15


def main(*, write: bool) -> None:
    """Print the table, or put it into docs/benchmarks.md."""
    machine = load_machine("1080ti")
    rows = [
        _row(name, problem_of(load(name), devices, machine, "paper")) for name in sorted(MODELS) for devices in DEVICES
    ]
    headers = [
        *("network", "p", "least needed", "by the cheapest"),
        *(f"at {share:.0%}" for share in SHARES),
        *("largest gap", "slowest search, s", "without limit, s"),
    ]
    publish("benchmarks.md", {"memory": markdown(headers, rows)}, write=write)


def _row(name: str, problem: Problem) -> list[str]:
    plenty = limit_of(problem, PLENTY, OPTIMISER)

    def solved(limit_bytes: int) -> LimitedSolution:
        return cheapest_within(problem.tables, limit_of(problem, limit_bytes, OPTIMISER))

    least = plenty.peak(lightest_within(problem.tables, plenty)[0]).bytes
    free = solved(PLENTY)
    found = [solved(int(least + share * (free.usage - least))).solution for share in SHARES]
    return [
        *(name, str(problem.num_devices), quantity(least, "B"), quantity(free.usage, "B")),
        *(f"{solution.cost / free.solution.cost:.3f}" for solution in found),
        "proven" if all(solution.exact for solution in found) else f"{max(s.gap for s in found):.2%}",
        *(f"{max(solution.time_s for solution in found):.2f}", f"{free.solution.time_s:.2f}"),
    ]
