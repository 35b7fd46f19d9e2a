"""The working state of the search: a pairwise problem whose configurations, vertices and edges disappear step by step.

A link is one edge with its table over layout classes and, for each end, a message: a vector over that end's classes
by which cost was moved from the edge to the vertex. Moving cost changes no strategy's total (a
reparametrisation): with messages m, vertex v has the costs θ_v(c) = cost_v(c) + Σ over links m(class(c)), and the link
keeps residual(i, j) = values(i, j) - m_a(i) - m_b(j).
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pase.solver.classes import ClassArray, Partition
from pase.solver.elimination import Factor, Table
from pase.tables import CostTables, EdgeTable, FloatArray


class Link:
    """One edge: its ends (a, b), each end's classes of live configurations, values [L_a, L_b], messages to the ends."""

    __slots__ = ("ends", "messages", "of", "values")

    def __init__(
        self, ends: tuple[int, int], of: list[ClassArray], values: FloatArray, messages: list[FloatArray] | None = None
    ) -> None:
        """Start with empty messages unless some are given; nothing is copied."""
        self.ends = ends
        self.of = of
        self.values = values
        self.messages = messages or [np.zeros(values.shape[0]), np.zeros(values.shape[1])]

    def copy(self) -> "Link":
        """Return a link whose arrays can be replaced without changing this one."""
        return Link(self.ends, list(self.of), self.values, list(self.messages))

    def seen_from(self, side: int, configuration: int) -> FloatArray:
        """Return the edge's costs over the other end's live configurations, for one configuration of this end."""
        row = self.of[side][configuration]
        return (self.values[row] if side == 0 else self.values[:, row]).take(self.of[1 - side])


@dataclass(frozen=True, slots=True, eq=False)
class Eliminated:
    """An eliminated vertex: its costs and links as they were, and its and its neighbours' live configurations then."""

    vertex: int
    costs: FloatArray
    links: tuple[tuple[Link, int], ...]
    origin: dict[int, ClassArray]

    def best(self, choice: Mapping[int, int]) -> int:
        """Return the cheapest configuration given the neighbours' choices; all are numbers in the tables."""
        total = self.costs
        for link, side in self.links:
            w = link.ends[1 - side]
            total = total + link.seen_from(1 - side, int(np.searchsorted(self.origin[w], choice[w])))
        return int(self.origin[self.vertex][total.argmin()])


class Network:
    """Live vertices, their costs over live configurations, and the links among them.

    costs: [V] layer costs over the live configurations of each vertex.
    origin: [V] the number that each live configuration has in the tables, ascending.
    incident: [V] (link, side) for every link of a vertex.
    live: the vertices that are still to be decided; the others are in `fixed` or in `eliminated`.
    fixed: the configuration (its number in the tables) of each vertex that only has one left.
    eliminated: the vertices that were taken out, in that order, to be decided in the reverse order.
    offset: the cost of what was fixed or eliminated.
    given: the identities of the arrays that belong to the cost tables.
    least: a lower bound of min θ_v for each live vertex, as the last pass left it; None once vertices are taken out.
    """

    __slots__ = ("costs", "eliminated", "fixed", "given", "incident", "least", "live", "offset", "origin")

    def __init__(
        self,
        costs: list[FloatArray],
        origin: list[ClassArray],
        incident: list[list[tuple[Link, int]]],
        live: list[int],
        fixed: dict[int, int],
        eliminated: list[Eliminated],
        offset: float,
        given: frozenset[int],
    ) -> None:
        """Take the parts as they are."""
        self.costs = costs
        self.origin = origin
        self.incident = incident
        self.live = live
        self.fixed = fixed
        self.eliminated = eliminated
        self.offset = offset
        self.given = given
        self.least: dict[int, float] | None = None

    @classmethod
    def of_tables(cls, tables: CostTables, ceiling: float) -> "Network":
        """Return the network of cost tables, with every cost above `ceiling` lowered to it."""

        def capped(values: FloatArray) -> FloatArray:
            return np.minimum(values, ceiling) if np.isfinite(ceiling) else values

        unary = [capped(c) for c in tables.vertex_costs]
        distinct = [_occurring(t, capped(t.values)) for t in tables.edge_tables]
        number = {k: np.arange(k) for k in set(tables.domain_sizes)}
        incident: list[list[tuple[Link, int]]] = [[] for _ in tables.vertex_names]
        for (a, b), t in zip(tables.edges, tables.edge_table, strict=True):
            rows, cols, values = distinct[t]
            link = Link((a, b), [rows, cols], values)
            incident[a].append((link, 0))
            incident[b].append((link, 1))
        return cls(
            [unary[t] for t in tables.vertex_table],
            [number[k] for k in tables.domain_sizes],
            incident,
            list(range(tables.num_vertices)),
            {},
            [],
            0.0,
            frozenset(id(t.values) for t in tables.edge_tables),
        )

    def copy(self) -> "Network":
        """Return a network that can be narrowed without changing this one; arrays are shared."""
        incident: list[list[tuple[Link, int]]] = [[] for _ in self.incident]
        for link in self.links():
            twin = link.copy()
            for side in (0, 1):
                incident[link.ends[side]].append((twin, side))
        return Network(
            list(self.costs),
            list(self.origin),
            incident,
            list(self.live),
            dict(self.fixed),
            list(self.eliminated),
            self.offset,
            self.given,
        )

    def links(self) -> list[Link]:
        """Return every link once, in the order of its first end."""
        return [link for v in self.live for link, side in self.incident[v] if side == 0]

    def num_configurations(self) -> int:
        """Return how many live configurations there are in all."""
        return sum(len(self.costs[v]) for v in self.live)

    def own_bytes(self) -> int:
        """Return the memory of the links' tables that are not the given ones, shared ones counted once."""
        own = {id(link.values): link.values.nbytes for link in self.links() if id(link.values) not in self.given}
        return sum(own.values())

    def reparametrised(self, v: int) -> FloatArray:
        """Return θ_v, the costs of a vertex with the messages that it received."""
        total = self.costs[v]
        for link, side in self.incident[v]:
            total = total + link.messages[side].take(link.of[side])
        return total

    def restrict(self, v: int, keep: NDArray[np.bool_]) -> None:
        """Drop the configurations of a vertex where `keep` is False, and the classes that no live one is in."""
        index = keep.nonzero()[0]
        self.costs[v] = self.costs[v].take(index)
        self.origin[v] = self.origin[v].take(index)
        for link, side in self.incident[v]:
            of = link.of[side].take(index)
            present = np.zeros(link.values.shape[side], dtype=bool)
            present[of] = True
            if not present.all():
                classes = present.nonzero()[0]
                of = (present.cumsum() - 1).take(of)
                link.values = link.values.take(classes, axis=side)
                link.messages[side] = link.messages[side].take(classes)
            link.of[side] = of

    def fix_singles(self) -> None:
        """Decide every vertex that has one configuration left.

        Its layer cost joins the offset, its transfer costs join its neighbours' layer costs.
        """
        singles = [v for v in self.live if len(self.costs[v]) == 1]
        for v in singles:
            self.fixed[v] = int(self.origin[v][0])
            self.offset += float(self.costs[v][0])
            for link, side in self.incident[v]:
                w = link.ends[1 - side]
                self.costs[w] = self.costs[w] + link.seen_from(side, 0)
            self.detach(v)
        self.remove(singles)

    def detach(self, v: int) -> None:
        """Take the links of a vertex out."""
        for link, side in self.incident[v]:
            w = link.ends[1 - side]
            self.incident[w] = [entry for entry in self.incident[w] if entry[0] is not link]
        self.incident[v] = []

    def remove(self, vertices: Iterable[int]) -> None:
        """Take vertices without links out of the live ones."""
        gone = set(vertices)
        if gone:
            self.live = [v for v in self.live if v not in gone]
            self.least = None

    def complete(self, choice: Mapping[int, int]) -> dict[int, int]:
        """Return a choice for the live vertices with all others' added; configurations are numbers in the tables."""
        whole = self.fixed | dict(choice)
        for step in reversed(self.eliminated):
            whole[step.vertex] = step.best(whole)
        return whole

    def neighbours(self) -> tuple[list[frozenset[int]], list[int]]:
        """Return the live vertices' neighbours and domain sizes, numbered by their position in `live`."""
        position = {v: i for i, v in enumerate(self.live)}
        around = [frozenset(position[link.ends[1 - side]] for link, side in self.incident[v]) for v in self.live]
        return around, [len(self.costs[v]) for v in self.live]

    def factors(self) -> list[Factor]:
        """Return the links as the factors of an elimination; equal arrays become equal partitions and tables."""
        partitions: dict[int, Partition] = {}
        known: dict[int, Table] = {}
        factors = []
        for link in self.links():
            ends = []
            for side in (0, 1):
                of = link.of[side]
                if id(of) not in partitions:
                    partitions[id(of)] = Partition(of, link.values.shape[side])
                ends.append(partitions[id(of)])
            table = known.setdefault(id(link.values), Table(link.values.shape, link.values))
            factors.append(Factor(link.ends, (ends[0], ends[1]), table))
        return factors


def _occurring(table: EdgeTable, values: FloatArray) -> tuple[ClassArray, ClassArray, FloatArray]:
    """Return the classes of rows and columns and the values, without the classes that no configuration is in."""
    classes: list[ClassArray] = []
    for axis, of in enumerate((table.row_class.astype(np.intp), table.col_class.astype(np.intp))):
        present = np.zeros(values.shape[axis], dtype=bool)
        present[of] = True
        if not present.all():
            of = (np.cumsum(present) - 1).take(of)
            values = values.compress(present, axis=axis)
        classes.append(of)
    return classes[0], classes[1], values
