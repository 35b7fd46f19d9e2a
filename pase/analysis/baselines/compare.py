"""Our strategy beside the others: every one costed, placed and planned alike."""

from collections.abc import Iterable
from dataclasses import dataclass
from time import perf_counter

from pase.analysis.baselines.registry import BASELINES, Baseline
from pase.common.documents import StrPath
from pase.importers import load
from pase.machine import DEFAULT_MACHINE, Machine, load_machine
from pase.planning.plan import Plan
from pase.planning.planner import (
    Progress,
    check_search,
    data_parallel_choice,
    given_solution,
    plan_of,
    problem_of,
)
from pase.solver import solve

OURS = "pase"
"""What our strategy is called beside the others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """One strategy. plan: whole, so that it can be emitted and run; its bound is that of the cheapest strategy.

    search_time_s: to find it, once costs are known.
    """

    name: str
    plan: Plan
    search_time_s: float

    @property
    def compute(self) -> float:
        """Cost of the computation in all layers; of several groups of devices, in the mean."""
        return sum(layer.compute_cost for layer in self.plan.layers) / self.plan.num_groups

    @property
    def communication(self) -> float:
        """Cost of what layers communicate inside and of the transfers between them, less what of it is hidden.

        Of several groups of devices, in the mean.
        """
        inside = sum(layer.communication_cost for layer in self.plan.layers)
        between = sum(transfer.cost for layer in self.plan.layers for transfer in layer.transfers)
        return (inside + between - self.plan.hidden_cost) / self.plan.num_groups

    @property
    def memory_bytes(self) -> int:
        """What a step needs on each device."""
        return self.plan.memory.total_bytes

    @property
    def fits_device(self) -> bool:
        """Whether that is no more than a device of the machine has."""
        return self.memory_bytes <= self.plan.machine.device.memory_bytes

    @property
    def ratio_to_data_parallel(self) -> float:
        """This one's cost ÷ data parallelism's: below 1 where a step is faster, by the cost model."""
        data_parallel = self.plan.baselines["data_parallel"]
        return self.plan.total_cost / data_parallel if data_parallel else 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Strategies under one cost model, ours first. absent: baselines that do not apply to the network.

    tables_time_s: to work out all costs, which are the same for all of them.
    """

    contenders: tuple[Contender, ...]
    absent: tuple[Baseline, ...]
    tables_time_s: float


def compare(
    model: object,
    devices: int,
    *,
    machine: Machine | StrPath = DEFAULT_MACHINE,
    cost_model: str = "paper",
    baselines: Iterable[Baseline] = tuple(BASELINES.values()),
    keep_batch: bool = False,
    on_progress: Progress | None = None,
) -> Comparison:
    """Return our strategy and the baselines' for a model on a number of devices of a machine.

    model, machine: as `search` takes them. Raises a PaseError for what cannot be searched, as `search` does.
    """
    graph = load(model)
    machine = machine if isinstance(machine, Machine) else load_machine(machine)
    devices = check_search(graph, devices, keep_batch=keep_batch)
    start_s = perf_counter()
    problem = problem_of(graph, devices, machine, cost_model, on_progress)
    tables_time_s = perf_counter() - start_s
    found: list[tuple[Baseline, tuple[int, ...], float]] = []
    absent = []
    for baseline in baselines:
        if on_progress:
            on_progress(f"looking for the strategy {baseline.name}", 0.0)
        start_s = perf_counter()
        choice = baseline.choose(problem, machine)
        time_s = perf_counter() - start_s
        if choice is None:
            absent.append(baseline)
        else:
            found.append((baseline, choice, time_s))
    # Where the search ends without a proof its strategy is still none of the others' worse.
    known = [data_parallel_choice(problem), *(choice for _, choice, _ in found)]
    ours = solve(problem.tables, known=known, on_progress=on_progress)
    # No cheaper one than ours exists, or than its bound.
    solutions = [
        (OURS, ours),
        *(
            (entry.name, given_solution(problem, choice, lower_bound=ours.lower_bound, time_s=time_s))
            for entry, choice, time_s in found
        ),
    ]
    return Comparison(
        contenders=tuple(
            Contender(
                name=name,
                plan=plan_of(problem, solution, machine, cost_model, time_s=solution.time_s),
                search_time_s=solution.time_s,
            )
            for name, solution in solutions
        ),
        absent=tuple(absent),
        tables_time_s=tables_time_s,
    )
