"""What a plan that is not the cheapest pays too much for, and what to change in it first."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from pase.analysis.explanation.constrained_search import TIE, connected_parts
from pase.costs import Problem
from pase.tables.cost_tables import CostTables, FloatArray

Choice = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Improvement:
    """What to change in a plan that is not the cheapest.

    layer: the one whose own cost, with the transfers to it, is most above what it is in the cheapest strategy. excess:
    by how much. changes: what to change first, configurations by layer; all other layers stay as they are. saving: what
    that takes off the plan's cost.
    """

    layer: str
    excess: float
    changes: tuple[tuple[str, dict[str, int]], ...]
    saving: float


def improvement(
    problem: Problem,
    choice: Sequence[int],
    optimum: Sequence[int],
    fits: Callable[[Sequence[int]], bool] = lambda _: True,
) -> Improvement | None:
    """Return what to change first in a strategy; None where the optimum is not cheaper.

    First is what saves most for each layer that is changed: one layer alone, with those that are alike and save as much
    by the same, or neighbours that together become what they are in the optimum.

    Args:
        problem: with the costs.
        choice: the strategy, by configuration index.
        optimum: a cheaper strategy, the nearest to it.
        fits: whether a strategy is one that may be.
    """
    tables = problem.tables
    cost, least = tables.evaluate(choice), tables.evaluate(optimum)
    if cost <= least * (1 + TIE):
        return None
    excess = _own_costs(tables, choice) - _own_costs(tables, optimum)
    worst = int(excess.argmax())

    def saving(other: Choice) -> float:
        return cost - tables.evaluate(other)

    def saving_by_layer(other: Choice) -> float:
        return saving(other) / sum(old != new for old, new in zip(choice, other, strict=True))

    changed = {v for v, (own, best) in enumerate(zip(choice, optimum, strict=True)) if own != best}
    parts = [_with(choice, optimum, part) for part in connected_parts(tables, changed)]
    alone, alike = _alone(tables, choice)
    # Of parts it may be that none fits but all of them together.
    found = max(filter(fits, [*alone.values(), *parts, tuple(optimum)]), key=saving_by_layer)
    for vertices, other in alike:
        if found in map(alone.get, vertices) and fits(other) and saving(other) > saving(found):
            found = other
    return Improvement(
        layer=tables.vertex_names[worst],
        excess=float(excess[worst]),
        changes=tuple(
            (tables.vertex_names[v], problem.splits(v, new))
            for v, (old, new) in enumerate(zip(choice, found, strict=True))
            if old != new
        ),
        saving=saving(found),
    )


def _own_costs(tables: CostTables, choice: Sequence[int]) -> FloatArray:
    """Return what each layer costs with the transfers to it, less what is hidden: together the cost of the strategy."""
    costs = np.array([tables.layer_costs(v)[c] for v, c in enumerate(choice)])
    for number, (u, v) in enumerate(tables.edges):
        costs[v] += tables.edge(number).cost(choice[u], choice[v])
    if tables.hiding is not None:
        share = tables.hidden_share(choice)
        for v, c in enumerate(choice):
            costs[v] -= share * tables.hiding.hideable[tables.vertex_table[v]][c]
        for number, (u, v) in enumerate(tables.edges):
            table, hideable = tables.edge(number), tables.hiding.edges[tables.edge_table[number]]
            if hideable is not None:
                costs[v] -= share * hideable[table.row_class[choice[u]], table.col_class[choice[v]]]
    return costs


def _alone(tables: CostTables, choice: Sequence[int]) -> tuple[dict[int, Choice], list[tuple[list[int], Choice]]]:
    """Return, by layer that another configuration alone makes cheaper, the strategy with the best of them.

    And, for layers that are alike in this, these layers and the strategy with all of them changed.
    """
    alone: dict[int, Choice] = {}
    groups: dict[tuple[int, int, int], list[int]] = {}
    for vertex, own in enumerate(choice):
        beside = tables.costs_beside(vertex, choice)
        best = int(beside.argmin())
        if beside[best] < beside[own]:
            groups.setdefault((tables.vertex_table[vertex], own, best), []).append(vertex)
            alone[vertex] = _with(choice, {vertex: best}, [vertex])
    return alone, [(found, _with(choice, dict.fromkeys(found, best), found)) for (_, _, best), found in groups.items()]


def _with(choice: Sequence[int], other: Sequence[int] | Mapping[int, int], vertices: Iterable[int]) -> Choice:
    """Return a strategy with some layers as in another one."""
    found = list(choice)
    for vertex in vertices:
        found[vertex] = other[vertex]
    return tuple(found)
