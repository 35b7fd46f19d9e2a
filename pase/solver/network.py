"""The working state of the search: a pairwise problem whose configurations, vertices and edges disappear step by step.

A link is one edge with its table over layout classes and, for each end, a message: a vector over that end's classes
by which cost was moved from the edge to the vertex. Moving cost changes no strategy's total (a
reparametrisation): with messages m, vertex v has the costs θ_v(c) = cost_v(c) + Σ over links m(class(c)), and the link
keeps residual(i, j) = values(i, j) - m_a(i) - m_b(j).
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from pase.solver.classes import ClassArray, Partition, by_configuration
from pase.solver.elimination import Factor, Table
from pase.tables.cost_tables import CostTables, EdgeTable, FloatArray

Made = TypeVar("Made")


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
        return by_configuration(self.values[row] if side == 0 else self.values[:, row], self.of[1 - side])


@dataclass(frozen=True, slots=True, eq=False)
class Elimination:
    """What taking out a vertex leaves to decide, the same for vertices that repeat.

    costs: its layer costs. links: of each link, the side on which the vertex is, classes on both, and values. origin:
    its live configurations then; others: those of the other end of each link. known: what was decided already.
    """

    costs: FloatArray
    links: tuple[tuple[int, tuple[ClassArray, ClassArray], FloatArray], ...]
    origin: ClassArray
    others: tuple[ClassArray, ...]
    known: dict[tuple[int, ...], int] = field(default_factory=dict)

    def best(self, around: tuple[int, ...]) -> int:
        """Return the cheapest configuration given that of each link's other end; all are numbers in the tables."""
        if around not in self.known:
            total = self.costs
            for (side, of, values), origin, chosen in zip(self.links, self.others, around, strict=True):
                c = of[1 - side][np.searchsorted(origin, chosen)]
                total = total + by_configuration(values[:, c] if side == 0 else values[c], of[side])
            self.known[around] = int(self.origin[total.argmin()])
        return self.known[around]


class Eliminated(NamedTuple):
    """An eliminated vertex, and the other end of each of its links."""

    vertex: int
    others: tuple[int, ...]
    elimination: Elimination


class Network:
    """Live vertices, their costs over live configurations, and the links among them.

    costs: [V] layer costs over the live configurations of each vertex.
    origin: [V] the number that each live configuration has in the tables, ascending.
    incident: [V] (link, side) for every link of a vertex.
    live: the vertices that are still to be decided; the others are in `fixed` or in `eliminated`.
    fixed: the configuration (its number in the tables) of each vertex that only has one left.
    eliminated: the vertices that were taken out, in that order, to be decided in the reverse order.
    offset: the cost of what was fixed or eliminated.
    ceiling: the cost that stands for every higher one; +inf if none does.
    given: the identities of the arrays that belong to the cost tables.
    least: a lower bound of min θ_v for each live vertex, as the last pass left it; None once vertices are taken out.
    repeats: what was made of which arrays, while repeated parts of the problem are to stay the same arrays; or None.
    """

    __slots__ = (
        "ceiling",
        "costs",
        "eliminated",
        "fixed",
        "given",
        "incident",
        "least",
        "live",
        "offset",
        "origin",
        "repeats",
    )

    def __init__(
        self,
        costs: list[FloatArray],
        origin: list[ClassArray],
        incident: list[list[tuple[Link, int]]],
        live: list[int],
        fixed: dict[int, int],
        eliminated: list[Eliminated],
        offset: float,
        ceiling: float,
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
        self.ceiling = ceiling
        self.given = given
        self.least: dict[int, float] | None = None
        self.repeats: dict[tuple[int, ...], tuple[object, Any]] | None = None

    @classmethod
    def of_tables(cls, tables: CostTables, ceiling: float) -> "Network":
        """Return the network of cost tables, with every cost above `ceiling` lowered to it."""

        def capped(values: FloatArray) -> FloatArray:
            return np.minimum(values, ceiling) if np.isfinite(ceiling) else values

        unary = [capped(c) for c in tables.vertex_costs]
        number = {k: np.arange(k) for k in set(tables.domain_sizes)}
        distinct = [_occurring(t, capped(t.values), number) for t in tables.edge_tables]
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
            ceiling,
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
            self.ceiling,
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
        size = len(total)
        for link, side in self.incident[v]:
            message = link.messages[side]
            total = total + (message if len(message) == size else message.take(link.of[side]))
        return total

    def restrict(self, v: int, keep: NDArray[np.bool_]) -> None:
        """Drop the configurations of a vertex where `keep` is False, and the classes that no live one is in."""
        made = self.made
        index = made(lambda: keep.nonzero()[0], keep)
        number = made(lambda: np.arange(len(index)), index)
        costs, origin = self.costs[v], self.origin[v]
        self.costs[v] = made(lambda: costs.take(index), costs, index)
        self.origin[v] = made(lambda: origin.take(index), origin, index)
        for link, side in self.incident[v]:
            of, classes = made(
                partial(_left_of, link, side, index, number), link.of[side], index, link.values.shape[side]
            )
            link.of[side] = of
            if classes is not None:
                link.values = made(partial(_classes_of, link.values, classes, side), link.values, classes, side)
                link.messages[side] = link.messages[side].take(classes)

    def lower_ceiling(self, ceiling: float) -> None:
        """Lower every cost above `ceiling` to it, and move no cost any more; what was eliminated stays as it is."""
        known: dict[int, tuple[FloatArray, FloatArray]] = {}

        def capped(values: FloatArray) -> FloatArray:
            if id(values) not in known:
                known[id(values)] = (values, np.minimum(values, ceiling))
            return known[id(values)][1]

        self.ceiling, self.least = ceiling, None
        for v in self.live:
            self.costs[v] = capped(self.costs[v])
        for link in self.links():
            link.values = capped(link.values)
            link.messages = [np.zeros(size) for size in link.values.shape]

    def made(self, make: Callable[[], Made], *inputs: object) -> Made:
        """Return what `make` makes of some arrays and numbers; the same for the same ones, while `repeats` are kept.

        inputs: arrays are told apart by identity, and kept with what was made, so that their ids stay theirs.
        """
        if self.repeats is None:
            return make()
        key = tuple([x if isinstance(x, int) else id(x) for x in inputs])
        if key not in self.repeats:
            self.repeats[key] = (inputs, make())
        result: Made = self.repeats[key][1]
        return result

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
                costs, of = self.costs[w], link.of[1 - side]
                self.costs[w] = self.made(
                    partial(_plus_seen, costs, link, side), costs, link.values, int(link.of[side][0]), of, side
                )
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

    def eliminate(self, v: int) -> None:
        """Take the links of a vertex out, and note how to decide it; the caller passes on what it costs."""
        links, costs, origin = self.incident[v], self.costs[v], self.origin[v]
        ends = tuple([link.ends[1 - side] for link, side in links])
        others = tuple([self.origin[w] for w in ends])
        parts = tuple([(side, (link.of[0], link.of[1]), link.values) for link, side in links])
        elimination = self.made(
            lambda: Elimination(costs, parts, origin, others),
            *(costs, origin, *others, *(x for side, of, values in parts for x in (side, *of, values))),
        )
        self.eliminated.append(Eliminated(v, ends, elimination))
        self.detach(v)

    def complete(self, choice: Mapping[int, int]) -> dict[int, int]:
        """Return a choice for the live vertices with all others' added; configurations are numbers in the tables."""
        whole = self.fixed | dict(choice)
        for step in reversed(self.eliminated):
            whole[step.vertex] = step.elimination.best(tuple([whole[w] for w in step.others]))
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


def _plus_seen(costs: FloatArray, link: Link, side: int) -> FloatArray:
    return costs + link.seen_from(side, 0)


def _classes_of(values: FloatArray, classes: ClassArray, side: int) -> FloatArray:
    return values.take(classes, axis=side)


def _left_of(link: Link, side: int, index: ClassArray, number: ClassArray) -> tuple[ClassArray, ClassArray | None]:
    """Return the classes of some configurations of an end of a link, and which classes are left; None for all."""
    size, of = link.values.shape[side], link.of[side]
    if size == len(of):  # each configuration is a class of its own
        return number, index
    of = of.take(index)
    present = np.zeros(size, dtype=bool)
    present[of] = True
    count = np.count_nonzero(present)
    if count == len(of):
        return number, of
    if count == size:
        return of, None
    return (present.cumsum() - 1).take(of), present.nonzero()[0]


def _occurring(
    table: EdgeTable, values: FloatArray, number: dict[int, ClassArray]
) -> tuple[ClassArray, ClassArray, FloatArray]:
    """Return the classes of rows and columns and the values, without the classes that no configuration is in."""
    classes: list[ClassArray] = []
    for axis, of in enumerate((table.row_class.astype(np.intp), table.col_class.astype(np.intp))):
        present = np.zeros(values.shape[axis], dtype=bool)
        present[of] = True
        if not present.all():
            of = (np.cumsum(present) - 1).take(of)
            values = values.compress(present, axis=axis)
        if len(of) == values.shape[axis]:
            if (of[:-1] >= of[1:]).any():
                values = values.take(of, axis=axis)
            of = number.setdefault(len(of), np.arange(len(of)))
        classes.append(of)
    return classes[0], classes[1], values
