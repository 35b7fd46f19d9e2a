"""What a limit on the memory of a device costs, and how long the search takes to prove it."""

from dataclasses import replace

from pase import load, load_machine
from pase.common.words import quantity
from pase.costs import Problem, memory_tables
from pase.models import MODELS
from pase.planning.memory_limit import weighted_problem
from pase.planning.planner import problem_of
from pase.solver import LimitedSolution, lightest_strategy, solve_limited
from scripts.benchmarks.tables import markdown, publish

DEVICES = (8, 64)
SHARES = (0.0, 0.1, 0.5, 0.9)
"""Limits, between what the lightest strategy needs (0) and what the cheapest one does (1)."""
OPTIMISER = "adam"
PLENTY = 1e15


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
    weighted = weighted_problem(problem.tables, memory_tables(problem, optimiser=OPTIMISER), PLENTY)

    def solved(limit: float) -> LimitedSolution:
        return solve_limited(replace(weighted, limit=limit))

    least = weighted.usage(lightest_strategy(weighted))
    free = solved(PLENTY)
    found = [solved(float(int(least + share * (free.usage - least)))).solution for share in SHARES]
    return [
        *(name, str(problem.num_devices), quantity(least, "B"), quantity(free.usage, "B")),
        *(f"{solution.cost / free.solution.cost:.3f}" for solution in found),
        "proven" if all(solution.exact for solution in found) else f"{max(s.gap for s in found):.2%}",
        *(f"{max(solution.time_s for solution in found):.2f}", f"{free.solution.time_s:.2f}"),
    ]
