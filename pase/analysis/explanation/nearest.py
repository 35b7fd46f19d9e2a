"""Of strategies that cost the same, the one that differs least from another: what changes is then what has to."""

from collections.abc import Collection, Sequence

from pase.tables.cost_tables import CostTables

TIE = 1e-9
"""Costs that differ by no more than this part of a strategy's cost count as equal: the solver tells no closer."""


def nearest(
    tables: Sequence[CostTables],
    reference: Sequence[int],
    choice: Sequence[int],
    *,
    moved: Collection[int] = (),
    costs: Sequence[float] = (),
) -> tuple[int, ...]:
    """Return `choice` with every vertex as in `reference` that can be so at the same cost.

    tables: one problem or several over the same vertices, edges and configurations; a change must cost the same in
    each. moved: vertices that stay as they are in `choice`. Changes that belong together (neighbours that both differ)
    are taken back together, then one at a time, until none is left that can be. costs: of `choice` in each problem,
    where they are known.
    """
    incident = tables[0].incident
    slack = [TIE * cost for cost in costs or [table.evaluate(choice) for table in tables]]
    found = list(choice)

    def take_back(group: Collection[int]) -> bool:
        before = dict.fromkeys(group)
        edges = {number for v in group for number in incident[v]}
        old = [_cost_of(table, found, group, edges) for table in tables]
        for v in group:
            before[v], found[v] = found[v], reference[v]
        new = [_cost_of(table, found, group, edges) for table in tables]
        if all(abs(n - o) <= s for n, o, s in zip(new, old, slack, strict=True)):
            return True
        for v, c in before.items():
            assert c is not None
            found[v] = c
        return False

    changed = {v for v, (c, r) in enumerate(zip(choice, reference, strict=True)) if c != r} - set(moved)
    for group in _groups(tables[0], changed):
        if take_back(group):
            changed -= group
    waiting = True
    while waiting:
        back = {v for v in sorted(changed) if take_back((v,))}
        changed -= back
        waiting = bool(back)
    return tuple(found)


def _cost_of(tables: CostTables, choice: Sequence[int], vertices: Collection[int], edges: Collection[int]) -> float:
    layers = sum(float(tables.layer_costs(v)[choice[v]]) for v in vertices)
    return layers + sum(tables.edge(e).cost(choice[tables.edges[e][0]], choice[tables.edges[e][1]]) for e in edges)


def _groups(tables: CostTables, vertices: Collection[int]) -> list[set[int]]:
    """Return the connected parts of some vertices."""
    left, groups = set(vertices), []
    while left:
        group, frontier = set(), [min(left)]
        while frontier:
            v = frontier.pop()
            group.add(v)
            left.discard(v)
            frontier += tables.neighbours[v] & left
        groups.append(group)
    return groups
