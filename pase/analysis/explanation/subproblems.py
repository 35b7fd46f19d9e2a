"""Parts of a search problem: islands between vertices that are decided."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from pase.tables.cost_tables import CostTables, IndexArray, restricted_edge


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Island:
    """A connected part of a problem whose other neighbours have one configuration each.

    vertices: [W] of the whole problem. kept: [W] the configurations that are left of each.
    tables: its own problem, over `kept`; transfers to decided neighbours are part of the layer costs.
    """

    vertices: tuple[int, ...]
    kept: tuple[IndexArray, ...]
    tables: CostTables

    def present(self, choice: Sequence[int]) -> list[int]:
        """Return the island's part of a strategy of the whole problem, all of which is among `kept`."""
        return [int(np.searchsorted(rows, choice[v])) for v, rows in zip(self.vertices, self.kept, strict=True)]

    def numbered(self, choice: Sequence[int]) -> dict[int, int]:
        """Return a strategy of the island by the whole problem's vertices and configurations."""
        return {v: int(rows[c]) for v, rows, c in zip(self.vertices, self.kept, choice, strict=True)}


def islands(tables: CostTables, kept: Sequence[IndexArray]) -> Mapping[int, Island]:
    """Return the island of each vertex that has more than one of the `kept` configurations, [V] each ascending."""
    found: dict[int, Island] = {}
    open_vertices = [v for v, rows in enumerate(kept) if len(rows) > 1]
    for start in open_vertices:
        if start in found:
            continue
        reached, frontier = {start}, [start]
        while frontier:
            new = {w for w in tables.neighbours[frontier.pop()] if len(kept[w]) > 1} - reached
            reached |= new
            frontier.extend(new)
        island = _island(tables, kept, tuple(sorted(reached)))
        found |= dict.fromkeys(island.vertices, island)
    return found


def _island(tables: CostTables, kept: Sequence[IndexArray], vertices: tuple[int, ...]) -> Island:
    position = {v: i for i, v in enumerate(vertices)}
    costs = []
    edges: dict[int, tuple[int, int]] = {}
    for vertex in vertices:
        total = tables.layer_costs(vertex)[kept[vertex]]
        for number in tables.incident[vertex]:
            u, v = tables.edges[number]
            if u in position and v in position:
                edges[number] = position[u], position[v]
                continue
            table = tables.edge(number)
            rows, cols = table.row_class[kept[u]], table.col_class[kept[v]]
            total = total + table.values[rows, cols]  # one of the two has one configuration
        costs.append(total)
    return Island(
        vertices=vertices,
        kept=tuple(kept[v] for v in vertices),
        tables=CostTables(
            vertex_names=tuple(tables.vertex_names[v] for v in vertices),
            vertex_costs=tuple(costs),
            vertex_table=tuple(range(len(vertices))),
            edges=tuple(edges.values()),
            edge_tables=tuple(
                restricted_edge(tables.edge(n), kept[tables.edges[n][0]], kept[tables.edges[n][1]]) for n in edges
            ),
            edge_table=tuple(range(len(edges))),
        ),
    )
