"""Which row of a layered drawing each vertex stands in (Sugiyama et al. 1981, first two steps)."""

from collections.abc import Collection, Sequence


def acyclic(num_vertices: int, edges: Sequence[tuple[int, int]]) -> tuple[tuple[tuple[int, int], ...], frozenset[int]]:
    """Return the edges with some of them turned round so that no cycle is left, and the numbers of those turned.

    Edges between a vertex and itself stay as they are. Where there is no cycle, nothing is turned.
    """
    if all(u <= v for u, v in edges):
        return tuple(edges), frozenset()
    leaving: list[list[int]] = [[] for _ in range(num_vertices)]
    for number, (u, v) in enumerate(edges):
        if u != v:
            leaving[u].append(number)
    entered = [False] * num_vertices
    turned = _edges_back(num_vertices, edges, leaving, entered)
    return tuple((v, u) if number in turned else (u, v) for number, (u, v) in enumerate(edges)), turned


def _edges_back(
    num_vertices: int, edges: Sequence[tuple[int, int]], leaving: list[list[int]], entered: list[bool]
) -> frozenset[int]:
    """Return the edges that lead to a vertex that a depth-first search has entered and not yet left."""
    active = [False] * num_vertices
    found = set()
    for start in range(num_vertices):
        if entered[start]:
            continue
        entered[start] = active[start] = True
        path = [(start, iter(leaving[start]))]
        while path:
            vertex, numbers = path[-1]
            for number in numbers:
                target = edges[number][1]
                if active[target]:
                    found.add(number)
                elif not entered[target]:
                    entered[target] = active[target] = True
                    path.append((target, iter(leaving[target])))
                    break
            else:
                active[vertex] = False
                path.pop()
    return frozenset(found)


def rows(
    num_vertices: int,
    edges: Sequence[tuple[int, int]],
    *,
    at_top: Collection[int] = (),
    at_bottom: Collection[int] = (),
) -> tuple[int, ...]:
    """Return [V] the row of each vertex of an acyclic graph: every edge leads to a later row.

    A vertex that nothing follows stands as early as its predecessors let it, all others as late as their successors
    let them: what enters late (a second input) stands by its reader, and what ends early (a second output) by its
    source. at_top: vertices without predecessors, in a row before all others; at_bottom: without successors, after all
    others.
    """
    apart = {*at_top, *at_bottom}
    inner = [(u, v) for u, v in edges if not (u in apart or v in apart)] if apart else edges
    found = _tight_rows(num_vertices, inner)
    if not apart:
        return tuple(found)
    shift = 1 if at_top else 0
    last = max((found[v] for v in range(num_vertices) if v not in apart), default=-1) + shift + 1
    top, bottom = dict.fromkeys(at_top, 0), dict.fromkeys(at_bottom, last)
    return tuple(top.get(v, bottom.get(v, row + shift)) for v, row in enumerate(found))


def _tight_rows(num_vertices: int, edges: Sequence[tuple[int, int]]) -> list[int]:
    after: list[list[int]] = [[] for _ in range(num_vertices)]
    waiting = [0] * num_vertices
    for u, v in edges:
        if u != v:
            after[u].append(v)
            waiting[v] += 1
    row = [0] * num_vertices
    order = [v for v in range(num_vertices) if not waiting[v]]
    for u in order:
        following = row[u] + 1
        for v in after[u]:
            if row[v] < following:
                row[v] = following
            waiting[v] -= 1
            if not waiting[v]:
                order.append(v)  # the list is the queue
    assert len(order) == num_vertices, "the graph has a cycle"
    for u in reversed(order):
        if after[u]:
            row[u] = min([row[v] for v in after[u]]) - 1
    return row
