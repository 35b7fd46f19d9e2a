"""The search within a limit on the memory of a device, and what is said where nothing fits."""

from collections.abc import Hashable, Iterable, Sequence

import numpy as np

from pase.common.words import quantity
from pase.costs import MemoryTables, Problem, memory_tables
from pase.costs.memory import keeping, layer_memory
from pase.errors import ConfigurationError, MemoryLimitError
from pase.graph import Graph
from pase.sharding.edges import table_edges
from pase.sharding.shards import IndexArray, enumerate_configurations
from pase.solver import (
    ConstrainedProblem,
    LimitedSolution,
    NothingFitsError,
    Progress,
    lightest_strategy,
    solve_limited,
)
from pase.tables.cost_tables import CostTables, EdgeTable

MAX_MORE_DEVICES = 64
"""How many times the devices are looked at for a number that would do."""


def search_within(
    problem: Problem,
    limit_bytes: int,
    *,
    optimiser: str,
    ordering: str = "auto",
    solver_memory_bytes: int | None = None,
    time_limit_s: float | None = None,
    known: Iterable[Sequence[int]] = (),
    is_constrained: bool = False,
    on_progress: Progress | None = None,
    memory: MemoryTables | None = None,
) -> LimitedSolution:
    """Return the cheapest strategy that takes no more than a limit on each device.

    optimiser: whose state counts. is_constrained: whether the problem has other constraints, for messages. memory: of
    the problem, where it is known. Raises MemoryLimitError where nothing fits: by how much, and which layer binds.
    Other arguments and errors as for `solve_limited`.
    """
    memory = memory_tables(problem, optimiser=optimiser) if memory is None else memory
    weighted = weighted_problem(problem.tables, memory, limit_bytes)
    try:
        return solve_limited(
            weighted,
            ordering=ordering,
            solver_memory_bytes=solver_memory_bytes,
            time_limit_s=time_limit_s,
            known=known,
            on_progress=on_progress,
        )
    except NothingFitsError:
        text = _nothing_fits(problem, weighted, limit_bytes, optimiser, is_constrained=is_constrained)
        raise MemoryLimitError(text) from None


def weighted_problem(tables: CostTables, memory: MemoryTables, limit_bytes: float) -> ConstrainedProblem:
    """Return a problem with the bytes of every strategy, and a limit on them."""
    return ConstrainedProblem(
        tables=tables,
        resource_usage=memory.weights,
        edge_usage=memory.edges,
        peaks=memory.peaks,
        limit=float(limit_bytes),
    )


def _nothing_fits(
    problem: Problem, weighted: ConstrainedProblem, limit_bytes: int, optimiser: str, *, is_constrained: bool
) -> str:
    graph, devices = problem.graph, problem.num_devices
    choice = lightest_strategy(weighted)
    total = int(weighted.usage(choice))
    kept = [float(usage[c]) for usage, c in zip(weighted.resource_usage, choice, strict=True)]
    for (u, v), usage in weighted.using_edges:
        kept[v] += usage.cost(choice[u], choice[v])
    binding = max(range(len(kept)), key=lambda v: (kept[v], -v))
    # More devices have other configurations, which constraints may not allow.
    enough = None if is_constrained else _enough_devices(graph, devices, limit_bytes, optimiser)
    advice = f"{enough} devices would do" if enough else "use more devices"
    if is_constrained:
        advice = f"loosen the constraints, or {advice}"
    state = _least_state_bytes(problem, optimiser)
    if state <= limit_bytes:
        advice += ", or try a smaller batch"
    else:
        advice += f" (no smaller batch does: weights with their gradients and state take {quantity(state, 'B')})"
    among = " that keeps to the constraints" if is_constrained else ""
    return (
        f"no strategy of {graph.name!r}{among} fits {quantity(limit_bytes, 'B')} on each of {devices} devices: the "
        f"least that one takes is {quantity(total, 'B')}, {quantity(total - limit_bytes, 'B')} too much; layer "
        f"{graph.operators[binding].name!r} binds with {quantity(kept[binding], 'B')} of it "
        f"({kept[binding] / total:.0%}); {advice}"
    )


def _enough_devices(graph: Graph, num_devices: int, limit_bytes: int, optimiser: str) -> int | None:
    """Return the first of 2, 4, … times as many devices on which a strategy would fit; None where there is none."""
    factor, before = 2, float("inf")
    while factor <= MAX_MORE_DEVICES:
        try:
            problem = _without_costs(graph, factor * num_devices)
        except ConfigurationError:
            return None
        memory = memory_tables(problem, optimiser=optimiser)
        weighted = weighted_problem(problem.tables, memory, limit_bytes)
        least = weighted.least_usage + sum(max(float(p.min()) for p in group) for group in weighted.peaks)
        if least <= limit_bytes and weighted.fits(lightest_strategy(weighted)):
            return factor * num_devices
        if least >= before:
            return None
        factor, before = 2 * factor, least
    return None


def _without_costs(graph: Graph, num_devices: int) -> Problem:
    """Return a problem in which nothing costs anything: memory depends on configurations alone."""
    numbers: dict[Hashable, int] = {}
    found: list[IndexArray] = []
    references = []
    for operator in graph.operators:
        if operator.unnamed not in numbers:
            numbers[operator.unnamed] = len(found)
            found.append(enumerate_configurations(operator, num_devices))
        references.append(numbers[operator.unnamed])
    edges = [(graph.index[edge.producer], graph.index[edge.consumer]) for edge in table_edges(graph)]
    kinds = list(dict.fromkeys((references[u], references[v]) for u, v in edges))
    nothing = [np.zeros(len(configurations)) for configurations in found]
    return Problem(
        graph=graph,
        num_devices=num_devices,
        tables=CostTables(
            vertex_names=tuple(graph.index),
            vertex_costs=tuple(nothing),
            vertex_table=tuple(references),
            edges=tuple(edges),
            edge_tables=tuple(
                EdgeTable(
                    row_class=nothing[u].astype(np.int32),
                    col_class=nothing[v].astype(np.int32),
                    values=np.zeros((1, 1)),
                )
                for u, v in kinds
            ),
            edge_table=tuple(kinds.index((references[u], references[v])) for u, v in edges),
        ),
        configurations=tuple(found[number] for number in references),
    )


def _least_state_bytes(problem: Problem, optimiser: str) -> int:
    """Return the least that weights, their gradients and their state take on each device, whatever the batch."""
    graph, keeps = problem.graph, keeping(problem.graph)
    known: dict[Hashable, int] = {}
    total = 0
    for operator, configurations in zip(graph.operators, problem.configurations, strict=True):
        key = (
            operator.unnamed,
            id(configurations),
            tuple(graph.owners.get(read.shared) == operator.name for read in operator.reads),
        )
        if key not in known:
            memory = layer_memory(graph, operator, configurations, keeps, optimiser=optimiser)
            known[key] = int((memory.weights + memory.gradients + memory.optimiser).min())
        total += known[key]
    return total
