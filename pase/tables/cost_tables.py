"""`CostTables`: the complete input of the solver.

Each vertex has a vector of layer costs over its configurations, each edge a matrix of transfer costs (Eq. 1 of the
PaSE paper). Identical tables are stored once: vertices and edges refer to them by index.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import fsum, inf, isnan

import numpy as np
from numpy.typing import NDArray

from pase.common.containers import connected
from pase.errors import TablesError

FloatArray = NDArray[np.float64]
IndexArray = NDArray[np.int32]
_Numbers = NDArray[np.intp]


@dataclass(frozen=True, kw_only=True, eq=False)
class EdgeTable:
    """Transfer costs of one edge, stored by layout instead of by configuration.

    A transfer cost depends on the layouts of the shared tensor alone, and there are far fewer layouts than
    configurations: ``cost[i, j] = values[row_class[i], col_class[j]]``.

    Attributes:
        row_class: [K_u] layout of each configuration of the producer, in 0 … L_u - 1.
        col_class: [K_v] layout of each configuration of the consumer, in 0 … L_v - 1.
        values: [L_u, L_v] cost, in the unit of the layer costs.
    """

    row_class: IndexArray
    col_class: IndexArray
    values: FloatArray

    @classmethod
    def from_dense(cls, values: FloatArray) -> "EdgeTable":
        """Return the table whose every configuration is a layout of its own; values: [K_u, K_v]."""
        rows, cols = values.shape
        return cls(row_class=np.arange(rows, dtype=np.int32), col_class=np.arange(cols, dtype=np.int32), values=values)

    @classmethod
    def factored(cls, values: FloatArray) -> "EdgeTable":
        """Return the table for [K_u, K_v] values, with equal rows and equal columns merged into one layout each.

        Layouts are numbered in the order in which they first occur.
        """
        first_rows, row_class = _distinct_rows(values)
        first_cols, col_class = _distinct_rows(values[first_rows].T)
        return cls(
            row_class=row_class, col_class=col_class, values=np.ascontiguousarray(values[first_rows][:, first_cols])
        )

    @property
    def shape(self) -> tuple[int, int]:
        """(K_u, K_v)."""
        return len(self.row_class), len(self.col_class)

    def dense(self) -> FloatArray:
        """Return the [K_u, K_v] matrix of costs."""
        return self.values[self.row_class[:, None], self.col_class[None, :]]

    def row(self, row: int) -> FloatArray:
        """Return the [K_v] costs for one configuration of the producer."""
        costs: FloatArray = self.values[self.row_class[row]].take(self.col_class)
        return costs

    def column(self, col: int) -> FloatArray:
        """Return the [K_u] costs for one configuration of the consumer."""
        costs: FloatArray = self.values[:, self.col_class[col]].take(self.row_class)
        return costs

    def cost(self, row: int, col: int) -> float:
        """Return the cost for one configuration of the producer and one of the consumer."""
        return float(self.values[self.row_class[row], self.col_class[col]])


def joint_classes(first: IndexArray, second: IndexArray) -> tuple[IndexArray, IndexArray, IndexArray]:
    """Return [K] the number of each pair of classes, and for each number its class in the first and in the second."""
    width = int(second.max()) + 1
    values, number = np.unique(first.astype(np.int64) * width + second, return_inverse=True)
    return number.astype(np.int32), (values // width).astype(np.int32), (values % width).astype(np.int32)


@dataclass(frozen=True, kw_only=True, eq=False)
class Hiding:
    """The parts of the costs that overlap: communication A of a strategy overlaps with computation B.

    A strategy costs its sum less the smaller of A and B. Parts are in the order of `CostTables.vertex_costs` and
    `edge_tables`, and none exceeds the cost that it is a part of.

    Attributes:
        hideable: [tables] arrays of [K], the overlappable parts of the layer costs. A is their sum, with `edges`.
        cover: [tables] arrays of [K], the parts that others can overlap with. B is their sum.
        edges: [tables] arrays of [L_u, L_v], the overlappable parts of the transfer costs; None for a table without
            any.
    """

    hideable: tuple[FloatArray, ...]
    cover: tuple[FloatArray, ...]
    edges: tuple[FloatArray | None, ...]


@dataclass(frozen=True, kw_only=True, eq=False)
class CostTables:
    """A min-sum problem over a weakly connected graph.

    With `hiding`, a strategy costs the sum less the smaller of A and B: the larger of two sums (`weighed`).

    Attributes:
        vertex_names: [V] unique names.
        vertex_costs: Distinct layer-cost vectors, each [K].
        vertex_table: [V] index into `vertex_costs` for each vertex.
        edges: [E] (u, v), producer first. Two edges may join the same two vertices: both count.
        edge_tables: Distinct transfer-cost tables.
        edge_table: [E] index into `edge_tables` for each edge.
        hiding: Parts of the costs that overlap; None where costs are additive.
    """

    vertex_names: tuple[str, ...]
    vertex_costs: tuple[FloatArray, ...]
    vertex_table: tuple[int, ...]
    edges: tuple[tuple[int, int], ...]
    edge_tables: tuple[EdgeTable, ...]
    edge_table: tuple[int, ...]
    hiding: Hiding | None = None

    @property
    def num_vertices(self) -> int:
        """V."""
        return len(self.vertex_names)

    @cached_property
    def domain_sizes(self) -> tuple[int, ...]:
        """[V] number of configurations of each vertex, K_v."""
        return tuple(len(self.vertex_costs[t]) for t in self.vertex_table)

    @cached_property
    def num_bytes(self) -> int:
        """Memory of the distinct tables."""
        arrays = [*self.vertex_costs, *(a for t in self.edge_tables for a in (t.values, t.row_class, t.col_class))]
        if self.hiding is not None:
            arrays += [*self.hiding.hideable, *self.hiding.cover, *(a for a in self.hiding.edges if a is not None)]
        return sum({id(a): a.nbytes for a in arrays}.values())

    @cached_property
    def neighbours(self) -> tuple[frozenset[int], ...]:
        """[V] the vertices that share an edge with each vertex, N(v)."""
        sets: list[set[int]] = [set() for _ in self.vertex_names]
        for u, v in self.edges:
            sets[u].add(v)
            sets[v].add(u)
        return tuple(frozenset(s) for s in sets)

    @cached_property
    def incident(self) -> tuple[tuple[int, ...], ...]:
        """[V] the numbers of each vertex's edges, ascending."""
        found: list[list[int]] = [[] for _ in self.vertex_names]
        for number, (u, v) in enumerate(self.edges):
            found[u].append(number)
            found[v].append(number)
        return tuple(map(tuple, found))

    def layer_costs(self, vertex: int) -> FloatArray:
        """Return the [K_v] layer costs of a vertex."""
        return self.vertex_costs[self.vertex_table[vertex]]

    def edge(self, number: int) -> EdgeTable:
        """Return the transfer-cost table of an edge."""
        return self.edge_tables[self.edge_table[number]]

    def evaluate(self, choice: Sequence[int]) -> float:
        """Return F(G, φ) (Eq. 1) for one configuration index for each vertex, as the correctly rounded sum.

        With `hiding`, the smaller of A and B is subtracted.

        Raises:
            TablesError: The number of indices is not V, or one is not a configuration of its vertex.
        """
        if len(choice) != self.num_vertices:
            raise TablesError(
                f"a strategy has one configuration for each of {self.num_vertices} vertices; found {len(choice)}"
            )
        for v, (c, size) in enumerate(zip(choice, self.domain_sizes, strict=True)):
            if not 0 <= c < size:
                raise TablesError(f"vertex {self.vertex_names[v]!r} has configurations 0 to {size - 1}; found {c}")
        total = self._sum(choice, self.vertex_costs, [table.values for table in self.edge_tables])
        return total - min(self.hidden(choice)) if self.hiding is not None else total

    def hidden(self, choice: Sequence[int]) -> tuple[float, float]:
        """Return A and B of a strategy: its overlappable cost, and the cost that this can overlap with."""
        if self.hiding is None:
            return 0.0, 0.0
        return self._sum(choice, self.hiding.hideable, self.hiding.edges), self._sum(choice, self.hiding.cover, ())

    def hidden_share(self, choice: Sequence[int]) -> float:
        """Return the share of a strategy's overlappable cost that is overlapped: 0 to 1."""
        hideable, cover = self.hidden(choice)
        return min(1.0, cover / hideable) if hideable else 0.0

    def _sum(
        self, choice: Sequence[int], of_layers: Sequence[FloatArray], of_edges: Sequence[FloatArray | None]
    ) -> float:
        """Return the correctly rounded sum of a strategy's entries in tables given in the order of these."""
        found = [of_layers[t].item(c) for t, c in zip(self.vertex_table, choice, strict=True)]
        if of_edges:
            pairs = zip(self.edge_table, self._places(choice), strict=True)
            found += [values.item(place) for t, place in pairs if (values := of_edges[t]) is not None]
        return fsum(found)

    def _places(self, choice: Sequence[int]) -> list[int]:
        """Return the flat, row-major index of each edge's cost for a strategy among the values of its table."""
        chosen = np.array(choice, dtype=np.intp)
        ends, layouts, starts, num_cols = self._layouts
        rows, cols = layouts[starts + chosen[ends]]
        places: list[int] = (rows * num_cols + cols).tolist()
        return places

    @cached_property
    def _layouts(self) -> tuple[_Numbers, _Numbers, _Numbers, _Numbers]:
        """The layouts of all tables' rows and columns in one vector, with each edge's offsets into it.

        Returns:
            ends: [2, E] vertices of each edge. layouts: of all tables. starts: [2, E] offsets of an edge's rows and
            columns. num_cols: [E] number of columns.
        """
        classes = [of for table in self.edge_tables for of in (table.row_class, table.col_class)]
        start = np.cumsum([0, *map(len, classes)])[:-1].reshape(-1, 2)
        table = np.array(self.edge_table, dtype=np.intp)
        cols = np.array([t.values.shape[1] for t in self.edge_tables], dtype=np.intp)
        ends = np.array(self.edges, dtype=np.intp).reshape(-1, 2).T
        layouts = np.concatenate(classes) if classes else np.zeros(0, dtype=np.intp)
        return ends, layouts.astype(np.intp), start[table].T, cols[table]

    def weighed(self, share: float) -> "CostTables":
        """Return an additive problem whose cost is S - A at share 0, S - B at share 1, and interpolated between.

        S is the sum. A strategy costs the larger of the two ends, so the optimum at any share is a lower bound.
        """
        hiding = self.hiding
        if hiding is None:
            return self
        parts = zip(self.vertex_costs, hiding.hideable, hiding.cover, strict=True)
        edges = zip(self.edge_tables, hiding.edges, strict=True)
        return replace(
            self,
            # Rounding may leave a value slightly below 0.
            vertex_costs=tuple(np.maximum(c - (1 - share) * a - share * b, 0.0) for c, a, b in parts),
            edge_tables=tuple(
                t if a is None else replace(t, values=np.maximum(t.values - (1 - share) * a, 0.0)) for t, a in edges
            ),
            hiding=None,
        )

    def costs_beside(self, vertex: int, choice: Sequence[int]) -> FloatArray:
        """Return the [K_v] costs of a vertex, transfers included, with all other vertices fixed to a strategy.

        The overlapped cost is subtracted from each, so that they differ by as much as the costs of the whole strategy.
        """
        total = self._costs_given(vertex, choice, self.vertex_costs, None)
        if self.hiding is None:
            return total
        own, hideable, cover = choice[vertex], *self.hidden(choice)
        could = self._costs_given(vertex, choice, self.hiding.hideable, self.hiding.edges)
        behind = self.hiding.cover[self.vertex_table[vertex]]
        less: FloatArray = np.minimum(hideable + (could - could[own]), cover + (behind - behind[own]))
        return total - less

    def _costs_given(
        self,
        vertex: int,
        choice: Sequence[int],
        of_layers: Sequence[FloatArray],
        of_edges: Sequence[FloatArray | None] | None,
    ) -> FloatArray:
        """Return the entries of given tables for a vertex and its edges; their own edges if `of_edges` is None."""
        total = of_layers[self.vertex_table[vertex]].copy()
        for number in self.incident[vertex]:
            u, v = self.edges[number]
            table = self.edge(number)
            values = table.values if of_edges is None else of_edges[self.edge_table[number]]
            if values is not None:
                if u == vertex:
                    total += values[table.row_class, table.col_class[choice[v]]]
                else:
                    total += values[table.row_class[choice[u]], table.col_class]
        return total

    @cached_property
    def _verified(self) -> bool:
        """True once the checks of `verify_tables` have passed; tables are immutable, so once is enough."""
        _verify(self)
        return True


def verify_tables(tables: CostTables) -> None:
    """Raise TablesError unless shapes agree, every cost is finite or +inf and not negative, and the graph is connected.

    The work is done once for each value of `CostTables`.
    """
    assert tables._verified


def _verify(tables: CostTables) -> None:
    if not tables.vertex_names:
        raise TablesError("the problem has no vertices; at least one is needed")
    if len(set(tables.vertex_names)) != len(tables.vertex_names):
        twice = next(n for n in tables.vertex_names if tables.vertex_names.count(n) > 1)
        raise TablesError(f"two vertices are named {twice!r}; names must be unique")
    _verify_references(tables.vertex_table, tables.num_vertices, len(tables.vertex_costs), "vertex")
    _verify_references(tables.edge_table, len(tables.edges), len(tables.edge_tables), "edge")
    for t, costs in enumerate(tables.vertex_costs):
        if costs.ndim != 1 or costs.size == 0:
            raise TablesError(f"layer costs {t} have the shape {costs.shape}; expected one or more in a vector")
        _verify_values(costs, f"layer costs {t}{_first_user(tables.vertex_table, t, tables.vertex_names)}")
    for t, table in enumerate(tables.edge_tables):
        _verify_classes(table, t)
        _verify_values(table.values, f"edge table {t}")
        if table.values.size and table.values.max() == inf:  # layouts without a configuration do not count
            _verify_values(table.values[np.unique(table.row_class)][:, np.unique(table.col_class)], f"edge table {t}")
    _verify_edges(tables)
    _verify_hiding(tables)
    _, *others = connected(range(tables.num_vertices), tables.edges)
    if others:
        raise TablesError(
            f"the graph is not connected: {sum(map(len, others))} of {tables.num_vertices} vertices, "
            f"{tables.vertex_names[others[0][0]]!r} the first, cannot be reached from {tables.vertex_names[0]!r}; "
            "solve each component on its own"
        )


def _verify_hiding(tables: CostTables) -> None:
    hiding = tables.hiding
    if hiding is None:
        return
    edges = [table.values for table in tables.edge_tables]
    for what, parts, wholes in (
        ("hideable layer costs", hiding.hideable, tables.vertex_costs),
        ("costs to overlap with", hiding.cover, tables.vertex_costs),
        ("hideable transfer costs", hiding.edges, edges),
    ):
        if len(parts) != len(wholes):
            raise TablesError(f"there are {what} for {len(parts)} tables; expected one for each of {len(wholes)}")
        for number, (part, whole) in enumerate(zip(parts, wholes, strict=True)):
            if part is None:
                continue
            if part.shape != whole.shape:
                raise TablesError(f"{what} of table {number} have the shape {part.shape}; the costs have {whole.shape}")
            if not (np.isfinite(part).all() and (part >= 0).all() and (part <= whole * (1 + 1e-12)).all()):
                raise TablesError(f"{what} of table {number} are not between 0 and the cost that they are a part of")


def _verify_references(references: Sequence[int], num_users: int, num_tables: int, what: str) -> None:
    if len(references) != num_users:
        raise TablesError(f"{num_users} {what} entries refer to tables by {len(references)} numbers; expected as many")
    for user, t in enumerate(references):
        if not 0 <= t < num_tables:
            raise TablesError(f"{what} {user} refers to table {t}; there are {num_tables} (numbered from 0)")


def _verify_edges(tables: CostTables) -> None:
    sizes = tables.domain_sizes
    for e, (u, v) in enumerate(tables.edges):
        if not (0 <= u < tables.num_vertices and 0 <= v < tables.num_vertices):
            raise TablesError(f"edge {e} joins vertices {u} and {v}; there are {tables.num_vertices} (numbered from 0)")
        if u == v:
            raise TablesError(f"edge {e} joins vertex {tables.vertex_names[u]!r} to itself")
        if tables.edge(e).shape != (sizes[u], sizes[v]):
            raise TablesError(
                f"edge {e} ({tables.vertex_names[u]!r} to {tables.vertex_names[v]!r}) has a table of shape "
                f"{tables.edge(e).shape}; its vertices have {sizes[u]} and {sizes[v]} configurations"
            )


def _verify_classes(table: EdgeTable, number: int) -> None:
    if table.values.ndim != 2 or table.row_class.ndim != 1 or table.col_class.ndim != 1:
        raise TablesError(f"edge table {number} has values of shape {table.values.shape}; expected a matrix by layouts")
    for classes, num_layouts, what in zip(
        (table.row_class, table.col_class), table.values.shape, ("row", "column"), strict=True
    ):
        if len(classes) and not (classes.min() >= 0 and classes.max() < num_layouts):
            raise TablesError(
                f"edge table {number} has {what} layouts from {classes.min()} to {classes.max()}; "
                f"its values have {num_layouts} {what}s (numbered from 0)"
            )


def _verify_values(values: FloatArray, what: str) -> None:
    if values.size == 0:
        return
    least = float(values.min())  # NaN if any value is NaN
    if isnan(least):
        raise TablesError(f"{what} hold NaN; every cost must be a number")
    if least < 0:
        raise TablesError(f"{what} hold a negative cost ({least}); costs are FLOP, bytes or seconds")
    if least == inf:
        raise TablesError(f"{what} are all infinite; at least one choice must be possible")


def _first_user(references: Sequence[int], table: int, names: Sequence[str]) -> str:
    return f" (of vertex {names[references.index(table)]!r})" if table in references else ""


def _distinct_rows(values: FloatArray) -> tuple[NDArray[np.intp], IndexArray]:
    """Return the rows that differ from every earlier one, and each row's number among these; values: [K, …] ≥ 0."""
    number: dict[bytes, int] = {}
    rows = np.ascontiguousarray(values)
    of = np.array([number.setdefault(row.tobytes(), len(number)) for row in rows], dtype=np.int32)
    return np.unique(of, return_index=True)[1], of


def among(tables: CostTables, vertex: int, rows: IndexArray) -> CostTables:
    """Return tables in which all but some configurations of a vertex have infinite cost; the numbering is unchanged."""
    number = tables.vertex_table[vertex]
    costs = np.full(len(tables.vertex_costs[number]), np.inf)
    costs[rows] = tables.vertex_costs[number][rows]
    hiding = tables.hiding and replace(
        tables.hiding,
        hideable=(*tables.hiding.hideable, tables.hiding.hideable[number]),
        cover=(*tables.hiding.cover, tables.hiding.cover[number]),
    )
    references = list(tables.vertex_table)
    references[vertex] = len(tables.vertex_costs)
    return replace(tables, vertex_costs=(*tables.vertex_costs, costs), vertex_table=tuple(references), hiding=hiding)


def restricted(tables: CostTables, kept: Mapping[int, IndexArray]) -> CostTables:
    """Return the problem in which some vertices have only the configurations in `kept`, renumbered by position there.

    Vertices with identical tables and the same array in `kept` still share their tables.
    """
    vertex_costs, vertex_table = list(tables.vertex_costs), list(tables.vertex_table)
    edge_tables, edge_table = list(tables.edge_tables), list(tables.edge_table)
    hiding = tables.hiding
    hideable, cover = (list(hiding.hideable), list(hiding.cover)) if hiding else ([], [])
    of_edges = list(hiding.edges) if hiding else []
    known: dict[tuple[int, ...], int] = {}
    for vertex, rows in kept.items():
        before = tables.vertex_table[vertex]
        key: tuple[int, ...] = before, id(rows)
        if key not in known:
            known[key] = len(vertex_costs)
            vertex_costs.append(tables.vertex_costs[before][rows])
            if hiding:
                hideable.append(hiding.hideable[before][rows])
                cover.append(hiding.cover[before][rows])
        vertex_table[vertex] = known[key]
    known = {}
    for number, (u, v) in enumerate(tables.edges):
        if u in kept or v in kept:
            before = tables.edge_table[number]
            key = before, id(kept.get(u)), id(kept.get(v))
            if key not in known:
                known[key] = len(edge_tables)
                table, ends = tables.edge_tables[before], (kept.get(u), kept.get(v))
                edge_tables.append(restricted_edge(table, *ends))
                if hiding:
                    part = hiding.edges[before]
                    of_edges.append(
                        None if part is None else restricted_edge(replace(table, values=part), *ends).values
                    )
            edge_table[number] = known[key]
    return replace(
        tables,
        vertex_costs=tuple(vertex_costs),
        vertex_table=tuple(vertex_table),
        edge_tables=tuple(edge_tables),
        edge_table=tuple(edge_table),
        hiding=hiding and Hiding(hideable=tuple(hideable), cover=tuple(cover), edges=tuple(of_edges)),
    )


def joined_edge(blocks: Sequence[Sequence[EdgeTable]]) -> EdgeTable:
    """Return the table of an edge whose ends have configurations of several kinds, one kind behind the other.

    blocks: [kinds of the producer][kinds of the consumer] tables between the configurations of two kinds.
    """
    row_class, rows = _joined_classes([[block.row_class for block in row] for row in blocks])
    col_class, cols = _joined_classes([[block.col_class for block in column] for column in zip(*blocks, strict=True)])
    values = [
        [block.values.take(rows[a][b], axis=0).take(cols[b][a], axis=1) for b, block in enumerate(row)]
        for a, row in enumerate(blocks)
    ]
    return EdgeTable(row_class=row_class, col_class=col_class, values=np.block(values))


def _joined_classes(kinds: Sequence[Sequence[IndexArray]]) -> tuple[IndexArray, list[list[IndexArray]]]:
    """Return the classes of configurations of several kinds, and those that each class has in each block.

    kinds: [kinds][blocks] the classes of a kind's configurations in a block.
    """
    classes, parts, num = list[IndexArray](), list[list[IndexArray]](), 0
    for first, *others in kinds:
        number, own = first, [np.arange(int(first.max()) + 1, dtype=np.int32)]
        for other in others:
            number, before, last = joint_classes(number, other)
            own = [*(part[before] for part in own), last]
        classes.append(number + num)
        parts.append(own)
        num += len(own[0])
    return np.concatenate(classes).astype(np.int32), parts


def restricted_edge(table: EdgeTable, rows: IndexArray | None, cols: IndexArray | None) -> EdgeTable:
    """Return an edge's table for some configurations of its ends; None for all."""
    row_class = table.row_class if rows is None else table.row_class[rows]
    col_class = table.col_class if cols is None else table.col_class[cols]
    row_layouts, new_rows = np.unique(row_class, return_inverse=True)
    col_layouts, new_cols = np.unique(col_class, return_inverse=True)
    return EdgeTable(
        row_class=new_rows.astype(np.int32),
        col_class=new_cols.astype(np.int32),
        values=table.values[np.ix_(row_layouts, col_layouts)],
    )
