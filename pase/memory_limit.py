"""The search within a limit on the memory of a device, and what is said where nothing fits."""

from collections.abc import Hashable, Iterable, Sequence

from pase.configurations import enumerate_configurations
from pase.costs import Problem, layer_memory, memory_tables
from pase.errors import ConfigurationError, MemoryLimitError
from pase.graph import Graph
from pase.solver import LimitedSolution, Progress, Weighted, solve_limited

MAX_MORE_DEVICES = 64
"""How many times the devices are looked at for a number that would do."""


def search_within(
    problem: Problem,
    limit_bytes: int,
    *,
    optimiser: str,
    ordering: str = "auto",
    memory_limit_bytes: int | None = None,
    time_limit_s: float | None = None,
    known: Iterable[Sequence[int]] = (),
    on_progress: Progress | None = None,
) -> LimitedSolution:
    """Return the cheapest strategy that takes no more than a limit on each device.

    optimiser: whose state counts. Raises MemoryLimitError where nothing fits: by how much, and which layer binds.
    Other arguments and errors as for `solve_limited`.
    """
    weights = memory_tables(problem, optimiser=optimiser)
    least_bytes = [int(table.min()) for table in weights]
    if sum(least_bytes) > limit_bytes:
        raise MemoryLimitError(_nothing_fits(problem, least_bytes, limit_bytes, optimiser))
    return solve_limited(
        Weighted(tables=problem.tables, weights=weights, limit=float(limit_bytes)),
        ordering=ordering,
        memory_limit_bytes=memory_limit_bytes,
        time_limit_s=time_limit_s,
        known=known,
        on_progress=on_progress,
    )


def size_text(num_bytes: float) -> str:
    """Return a number of bytes with three digits and a decimal prefix: 8.12 GB."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= size * 0.9995:
            return f"{num_bytes / size:.3g} {unit}"
    return f"{num_bytes:.0f} B"


def _nothing_fits(problem: Problem, least_bytes: Sequence[int], limit_bytes: int, optimiser: str) -> str:
    total, devices = sum(least_bytes), problem.num_devices
    binding = max(range(len(least_bytes)), key=lambda v: (least_bytes[v], -v))
    _, kept = _least_bytes(problem.graph, devices, optimiser)
    enough = _enough_devices(problem.graph, devices, limit_bytes, optimiser)
    advice = f"{enough} devices would do" if enough else "use more devices"
    if kept <= limit_bytes:
        advice += ", or try a smaller batch"
    else:
        advice += f" (no smaller batch does: weights with their gradients and state take {size_text(kept)})"
    return (
        f"no strategy of {problem.graph.name!r} fits {size_text(limit_bytes)} on each of {devices} devices: the "
        f"least that one takes is {size_text(total)}, {size_text(total - limit_bytes)} too much; layer "
        f"{problem.graph.operators[binding].name!r} binds with {size_text(least_bytes[binding])} of it "
        f"({least_bytes[binding] / total:.0%}); {advice}"
    )


def _enough_devices(graph: Graph, num_devices: int, limit_bytes: int, optimiser: str) -> int | None:
    """Return the first of 2, 4, … times as many devices on which a strategy would fit; None where there is none."""
    factor, before = 2, float("inf")
    while factor <= MAX_MORE_DEVICES:
        try:
            least, _ = _least_bytes(graph, factor * num_devices, optimiser)
        except ConfigurationError:
            return None
        if least <= limit_bytes:
            return factor * num_devices
        if least >= before:
            return None
        factor, before = 2 * factor, least
    return None


def _least_bytes(graph: Graph, num_devices: int, optimiser: str) -> tuple[int, int]:
    """Return the least that a strategy takes on each device, and the least of what does not grow with the batch."""
    known: dict[Hashable, tuple[int, int]] = {}
    found = []
    for operator in graph.operators:
        # Where a gradient flows back, and who owns a shared weight, may tell repeated layers apart.
        back = graph.read_gradients(operator)
        owns = tuple(graph.owners.get(read.shared) == operator.name for read in operator.reads)
        key = operator.unnamed, back, owns
        if key not in known:
            splits = enumerate_configurations(operator, num_devices).splits
            memory = layer_memory(graph, operator, splits, optimiser=optimiser)
            kept = memory.weights + memory.gradients + memory.optimiser
            known[key] = int(memory.total.min()), int(kept.min())
        found.append(known[key])
    return sum(total for total, _ in found), sum(kept for _, kept in found)
