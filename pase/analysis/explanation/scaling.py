"""One problem at every communication scale s: links s times as slow as the machine's, in latency and in bytes/s.

A strategy's cost is A(φ) + s · B(φ), computation and communication, under every cost model here: a time for messages
is proportional to latencies and inverse bandwidths, and r of Eq. 1 to the latter. Two builds give A and B, with links
2^200 times as fast and as slow: powers of two, so that nothing is rounded, and so far apart that neither holds a
trace of the other.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from pase.analysis.explanation.nearest import TIE
from pase.graph import Graph
from pase.machine import Machine
from pase.planning.planner import Progress, problem_of
from pase.tables.cost_tables import CostTables

_FAR = 2.0**200


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A strategy and its cost at any scale, compute + s · communication."""

    choice: tuple[int, ...]
    compute: float
    communication: float

    def at(self, scale: float) -> float:
        """Return the cost at a scale."""
        return self.compute + scale * self.communication

    def is_parallel_to(self, other: "Line") -> bool:
        """Whether two strategies cost the same at every scale, as far as the solver can tell."""
        return abs(self.compute - other.compute) <= TIE * max(self.compute, other.compute) and abs(
            self.communication - other.communication
        ) <= TIE * max(self.communication, other.communication)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ScaledTables:
    """compute, communication: cost tables of one structure, which add up to the machine's own problem."""

    compute: CostTables
    communication: CostTables

    def at(self, scale: float) -> CostTables:
        """Return the problem at a scale."""
        return replace(
            self.compute,
            vertex_costs=tuple(
                a + scale * b for a, b in zip(self.compute.vertex_costs, self.communication.vertex_costs, strict=True)
            ),
            edge_tables=tuple(
                replace(a, values=a.values + scale * b.values)
                for a, b in zip(self.compute.edge_tables, self.communication.edge_tables, strict=True)
            ),
        )

    def line(self, choice: Sequence[int]) -> Line:
        """Return what a strategy costs."""
        return Line(
            choice=tuple(choice),
            compute=self.compute.evaluate(choice),
            communication=self.communication.evaluate(choice),
        )


def scaled_tables(
    graph: Graph, num_devices: int, machine: Machine, cost_model: str, on_progress: Progress | None = None
) -> ScaledTables:
    """Return a graph's problem at every communication scale."""
    free = problem_of(graph, num_devices, scaled_links(machine, 1 / _FAR), cost_model, on_progress).tables
    slow = problem_of(graph, num_devices, scaled_links(machine, _FAR), cost_model, on_progress).tables
    communication = replace(
        slow,
        vertex_costs=tuple(costs / _FAR for costs in slow.vertex_costs),
        edge_tables=tuple(replace(table, values=table.values / _FAR) for table in slow.edge_tables),
    )
    assert communication.vertex_table == free.vertex_table
    assert communication.edge_table == free.edge_table
    return ScaledTables(compute=free, communication=communication)


def scaled_links(machine: Machine, scale: float) -> Machine:
    """Return the machine with every latency × scale and every bandwidth ÷ scale."""
    return replace(
        machine,
        levels=tuple(
            replace(level, latency_s=level.latency_s * scale, bandwidth_bytes_per_s=level.bandwidth_bytes_per_s / scale)
            for level in machine.levels
        ),
    )
