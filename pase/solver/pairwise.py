"""The working state of the search: a pairwise model whose configurations, vertices and edges disappear step by step.

An edge has its table over layout classes and, for each end, a message: a vector over that end's classes by which cost
was moved from the edge to the vertex. Moving cost changes no strategy's total (a reparametrisation): with messages m,
vertex v has the costs θ_v(c) = cost_v(c) + Σ over edges m(class(c)), and the edge keeps
residual(i, j) = values(i, j) - m_a(i) - m_b(j).

Arrays are distinguished by identity, so that work on tables that repeated layers share is done once.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from pase.errors import SolverError
from pase.tables.cost_tables import CostTables, EdgeTable, FloatArray, IndexArray

FEW_CONFIGURATIONS = 16
"""Up to this many configurations, each is a class of its own: joining classes would take longer than larger tables."""

ClassArray = NDArray[np.intp]
Mask = NDArray[np.bool_]
Made = TypeVar("Made")


@dataclass(frozen=True, slots=True, eq=False)
class Partition:
    """One partition of K configurations into layout classes: a table sees a configuration only through its class.

    Attributes:
        of: [K] the class of each configuration, in 0 … num_classes - 1; every class occurs. With K classes, class c is
            configuration c.
        num_classes: Number of classes, L.
    """

    of: ClassArray
    num_classes: int


class Product(NamedTuple):
    """The coarsest partition that refines two others: its classes are the pairs of classes that occur.

    Attributes:
        first, second: [joint.num_classes] the class in the first and in the second partition; None if
            the numbering is unchanged.
    """

    joint: Partition
    first: ClassArray | None
    second: ClassArray | None


@dataclass(frozen=True, slots=True, eq=False)
class ClassAlgebra:
    """Products of partitions, computed once for each distinct pair."""

    _products: dict[tuple[int, int], tuple[Partition, Partition, Product]] = field(default_factory=dict)

    def product(self, a: Partition, b: Partition) -> Product:
        """Return the product of two partitions of the same configurations."""
        if a is b:
            return Product(a, None, None)
        key = (id(a), id(b))
        known = self._products.get(key)
        if known is None:
            known = self._products[key] = (a, b, _product(a, b))  # keeps a and b alive, and their ids unique
        return known[2]

    def join(self, partitions: Sequence[Partition]) -> tuple[Partition, list[ClassArray | None]]:
        """Return the product of several partitions, and its classes' class in each of them (None: the same)."""
        joint = partitions[0]
        maps: list[ClassArray | None] = [None]
        for p in partitions[1:]:
            if p is joint:
                maps.append(None)
                continue
            joint, first, second = self.product(joint, p)
            if first is not None:
                maps = [first if m is None else m[first] for m in maps]
            maps.append(second)
        return joint, maps


def _product(a: Partition, b: Partition) -> Product:
    if a.num_classes == 1:
        return Product(b, np.zeros(b.num_classes, dtype=np.intp), None)
    if b.num_classes == 1:
        return Product(a, None, np.zeros(a.num_classes, dtype=np.intp))
    if a.num_classes == len(a.of):  # a already distinguishes every configuration
        return Product(a, None, _per_class(a, b))
    if b.num_classes == len(b.of):
        return Product(b, _per_class(b, a), None)
    pair = a.of * b.num_classes + b.of
    num_pairs = a.num_classes * b.num_classes
    if num_pairs <= 64 * len(pair) + 4096:
        occurs = np.zeros(num_pairs, dtype=bool)
        occurs[pair] = True
        pairs = np.flatnonzero(occurs)
        number = np.empty(num_pairs, dtype=np.intp)
        number[pairs] = np.arange(len(pairs))
        of = number[pair]
    else:
        pairs, of = np.unique(pair, return_inverse=True)
    first, second = pairs // b.num_classes, pairs % b.num_classes
    if len(pairs) == a.num_classes:  # b is coarser: its class follows from a's
        return Product(a, None, second)
    if len(pairs) == b.num_classes:
        return Product(b, _per_class(b, a), None)
    if len(pairs) == len(of):
        return Product(Partition(np.arange(len(of)), len(of)), a.of, b.of)
    return Product(Partition(of, len(pairs)), first, second)


def _per_class(fine: Partition, coarse: Partition) -> ClassArray:
    """Return the coarse partition's class of each class of a finer one."""
    result = np.empty(fine.num_classes, dtype=np.intp)
    result[fine.of] = coarse.of
    return result


def by_configuration(values: FloatArray, of: ClassArray) -> FloatArray:
    """Return the [K] value of each configuration's class; values: [L]."""
    return values if len(values) == len(of) else values.take(of)


def class_minima(costs: FloatArray, of: ClassArray, num_classes: int) -> FloatArray:
    """Return the [L] smallest cost in each class; costs, of: [K]."""
    if num_classes == len(of):
        return costs
    result = np.full(num_classes, np.inf)
    np.minimum.at(result, of, costs)
    return result


@dataclass(slots=True, eq=False)
class Edge:
    """An edge: its ends (a, b), the classes of live configurations at each end, values [L_a, L_b], and messages."""

    ends: tuple[int, int]
    of: list[ClassArray]
    values: FloatArray
    messages: list[FloatArray]

    def seen_from(self, side: int, configuration: int) -> FloatArray:
        """Return the edge's costs over the other end's live configurations, for one configuration of this end."""
        row = self.of[side][configuration]
        return by_configuration(self.values[row] if side == 0 else self.values[:, row], self.of[1 - side])


Decision = Callable[[tuple[int, ...]], int]
"""Chooses an eliminated vertex's configuration from those at the other ends of its edges, numbered as in the tables."""


@dataclass(slots=True, eq=False)
class PairwiseModel:
    """Live vertices, their costs over live configurations, and the edges among them.

    Attributes:
        costs: [V] layer costs over the live configurations of each vertex.
        origin: [V] the number that each live configuration has in the tables, ascending.
        incident: [V] (edge, side) for every edge of a vertex.
        live: Vertices still to be decided; the others are in `fixed` or in `eliminated`.
        ceiling: Cost to which every higher cost was lowered; +inf if none was.
        given: Identities of the arrays that belong to the cost tables.
        fixed: The configuration (its number in the tables) of each vertex that has only one left.
        eliminated: Eliminated vertices, to be decided in reverse order, each with its neighbours at elimination.
        offset: Cost of the fixed and eliminated vertices.
        least: Lower bound of min θ_v for each live vertex, from the last pass; None once vertices are removed.
        repeats: Cache from input arrays to derived arrays, so that repeated parts keep sharing arrays; or None.
        may_repeat: Whether passes may reuse the messages of earlier blocks, which weakens the bound slightly.
    """

    costs: list[FloatArray]
    origin: list[ClassArray]
    incident: list[list[tuple[Edge, int]]]
    live: list[int]
    ceiling: float
    given: frozenset[int]
    fixed: dict[int, int] = field(default_factory=dict)
    eliminated: list[tuple[int, tuple[int, ...], Decision]] = field(default_factory=list)
    offset: float = 0.0
    least: dict[int, float] | None = None
    repeats: dict[tuple[int, ...], tuple[object, Any]] | None = None
    may_repeat: bool = True

    @classmethod
    def of_tables(cls, tables: CostTables, ceiling: float = np.inf) -> "PairwiseModel":
        """Return the model of cost tables, with every cost above `ceiling` lowered to it.

        Raises SolverError for costs that are not additive.
        """
        if tables.hiding is not None:
            raise SolverError(
                "some of these costs overlap with others, so they are not additive, as this search requires; use an "
                "additive cost model (alpha_beta)"
            )
        number = {k: np.arange(k) for k in set(tables.domain_sizes)}
        classes = _OccurringClasses(number)
        distinct = []
        for table in tables.edge_tables:
            rows, cols, values = classes.of_table(table)
            distinct.append((rows, cols, values, _zeros(len(values)), _zeros(values.shape[1])))
        incident: list[list[tuple[Edge, int]]] = [[] for _ in tables.vertex_names]
        for (a, b), t in zip(tables.edges, tables.edge_table, strict=True):
            rows, cols, values, to_rows, to_cols = distinct[t]
            edge = Edge((a, b), [rows, cols], values, [to_rows, to_cols])
            incident[a].append((edge, 0))
            incident[b].append((edge, 1))
        model = cls(
            costs=[tables.vertex_costs[t] for t in tables.vertex_table],
            origin=[number[k] for k in tables.domain_sizes],
            incident=incident,
            live=list(range(tables.num_vertices)),
            ceiling=np.inf,
            given=frozenset(id(t.values) for t in tables.edge_tables),
        )
        if ceiling < np.inf:
            model.lower_ceiling(ceiling)
        return model

    def copy(self) -> "PairwiseModel":
        """Return a copy whose reduction does not affect this model; arrays are shared."""
        incident: list[list[tuple[Edge, int]]] = [[] for _ in self.incident]
        for edge in self.edges():
            twin = Edge(edge.ends, list(edge.of), edge.values, list(edge.messages))
            for side in (0, 1):
                incident[edge.ends[side]].append((twin, side))
        return PairwiseModel(
            costs=list(self.costs),
            origin=list(self.origin),
            incident=incident,
            live=list(self.live),
            ceiling=self.ceiling,
            given=self.given,
            fixed=dict(self.fixed),
            eliminated=list(self.eliminated),
            offset=self.offset,
        )

    def edges(self) -> list[Edge]:
        """Return every edge once, in the order of its first end."""
        return [edge for v in self.live for edge, side in self.incident[v] if side == 0]

    def num_configurations(self) -> int:
        """Return how many live configurations there are in all."""
        return sum(len(self.costs[v]) for v in self.live)

    def own_bytes(self) -> int:
        """Return the memory of the edges' tables that do not belong to the cost tables, shared ones counted once."""
        own = {id(edge.values): edge.values.nbytes for edge in self.edges() if id(edge.values) not in self.given}
        return sum(own.values())

    def neighbours(self) -> tuple[list[frozenset[int]], list[int]]:
        """Return the live vertices' neighbours and domain sizes, numbered by their position in `live`."""
        position = {v: i for i, v in enumerate(self.live)}
        around = [frozenset(position[edge.ends[1 - side]] for edge, side in self.incident[v]) for v in self.live]
        return around, [len(self.costs[v]) for v in self.live]

    def reparametrised(self, v: int) -> FloatArray:
        """Return θ_v, the costs of a vertex with the messages that it received."""
        total = self.costs[v]
        size = len(total)
        for edge, side in self.incident[v]:
            message = edge.messages[side]
            total = total + (message if message.size == size else message.take(edge.of[side]))
        return total

    def restrict(self, v: int, keep: Mask) -> None:
        """Drop the configurations of a vertex where `keep` is False, and the classes that no live one is in."""
        made = self.made
        index = made(lambda: keep.nonzero()[0], keep)
        number = made(lambda: np.arange(len(index)), index)
        costs, origin = self.costs[v], self.origin[v]
        self.costs[v] = made(lambda: costs.take(index), costs, index)
        self.origin[v] = made(lambda: origin.take(index), origin, index)
        for edge, side in self.incident[v]:
            of, classes = made(
                partial(_classes_left, edge, side, index, number), edge.of[side], index, edge.values.shape[side]
            )
            edge.of[side] = of
            if classes is not None:
                edge.values = made(partial(_taken, edge.values, classes, side), edge.values, classes, side)
                message = edge.messages[side]
                edge.messages[side] = made(partial(_taken, message, classes, 0), message, classes, 0)

    def lower_ceiling(self, ceiling: float) -> None:
        """Lower every cost above `ceiling` to it and reset the messages; eliminated vertices are unaffected."""
        known: dict[int, tuple[FloatArray, FloatArray]] = {}

        def capped(values: FloatArray) -> FloatArray:
            if id(values) not in known:
                known[id(values)] = (values, np.minimum(values, ceiling))
            return known[id(values)][1]

        for v in self.live:
            self.costs[v] = capped(self.costs[v])
        self.ceiling, self.least = ceiling, {v: float(self.costs[v].min()) for v in self.live}
        for edge in self.edges():
            edge.values = capped(edge.values)
            edge.messages = [_zeros(size) for size in edge.values.shape]

    def made(self, make: Callable[[], Made], *inputs: object) -> Made:
        """Return `make()`, cached by its inputs while `repeats` is on.

        Args:
            make: Computes the result.
            inputs: Arrays, distinguished by identity, and numbers. They stay alive with the result, so that ids are
                unique.
        """
        if self.repeats is None:
            return make()
        key = tuple([x if isinstance(x, int) else id(x) for x in inputs])
        if key not in self.repeats:
            self.repeats[key] = (inputs, make())
        result: Made = self.repeats[key][1]
        return result

    @contextmanager
    def repeating(self) -> Iterator[None]:
        """Cache derived arrays within this context, so that repeated parts of the problem keep sharing arrays.

        Nothing is cached where few vertices share their costs.
        """
        outer = self.repeats
        if outer is None and self.may_repeat and 2 * len({id(self.costs[v]) for v in self.live}) <= len(self.live):
            self.repeats = {}
        try:
            yield
        finally:
            self.repeats = outer

    def fix_singles(self) -> None:
        """Decide every vertex that has one configuration left.

        Its layer cost joins the offset, its transfer costs join its neighbours' layer costs.
        """
        singles = [v for v in self.live if len(self.costs[v]) == 1]
        least, changed = self.least, set[int]()
        with self.repeating():
            for v in singles:
                self.fixed[v] = int(self.origin[v][0])
                self.offset += float(self.costs[v][0])
                for edge, side in self.incident[v]:
                    w = edge.ends[1 - side]
                    costs, row = self.costs[w], int(edge.of[side][0])
                    self.costs[w] = self.made(
                        partial(_with_transfer, costs, edge, side), costs, edge.values, edge.of[1 - side], side, row
                    )
                    changed.add(w)
                self._detach(v)
        self.remove(singles)
        if singles and least is not None:
            self.least = {v: float(self.reparametrised(v).min()) if v in changed else least[v] for v in self.live}

    def eliminate(self, v: int) -> None:
        """Detach a vertex from its neighbours, and record how to decide it; the caller adds its cost to the rest."""
        costs, origin = self.costs[v], self.origin[v]
        ends = tuple([edge.ends[1 - side] for edge, side in self.incident[v]])
        parts: list[tuple[int, ClassArray, ClassArray, FloatArray, ClassArray]] = [
            (side, edge.of[0], edge.of[1], edge.values, self.origin[w])
            for (edge, side), w in zip(self.incident[v], ends, strict=True)
        ]

        def best(around: tuple[int, ...]) -> int:
            total = costs
            for (side, rows, cols, values, other), chosen in zip(parts, around, strict=True):
                of, seen = (rows, cols) if side == 0 else (cols, rows)
                c = seen[np.searchsorted(other, chosen)]
                total = total + by_configuration(values[:, c] if side == 0 else values[c], of)
            return int(origin[total.argmin()])

        # Vertices that repeat are decided once for the same choices around them.
        decision = self.made(lambda: cache(best), costs, origin, *(x for part in parts for x in part))
        self.eliminated.append((v, ends, decision))
        self._detach(v)

    def remove(self, vertices: Iterable[int]) -> None:
        """Remove vertices without edges from the live ones."""
        gone = set(vertices)
        if gone:
            self.live = [v for v in self.live if v not in gone]
            self.least = None

    def complete(self, choice: Mapping[int, int]) -> dict[int, int]:
        """Extend a choice for the live vertices to all vertices, in configuration numbers of the tables."""
        whole = self.fixed | {v: int(self.origin[v][c]) for v, c in choice.items()}
        for v, others, decision in reversed(self.eliminated):
            whole[v] = decision(tuple([whole[w] for w in others]))
        return whole

    def _detach(self, v: int) -> None:
        """Remove all edges of a vertex."""
        for edge, side in self.incident[v]:
            w = edge.ends[1 - side]
            self.incident[w] = [entry for entry in self.incident[w] if entry[0] is not edge]
        self.incident[v] = []


def _with_transfer(costs: FloatArray, edge: Edge, side: int) -> FloatArray:
    """Return the costs of an edge's other end, with those of the edge to the only configuration of this one."""
    return costs + edge.seen_from(side, 0)


def _taken(values: FloatArray, classes: ClassArray, side: int) -> FloatArray:
    return values.take(classes, axis=side)


def _classes_left(edge: Edge, side: int, index: ClassArray, number: ClassArray) -> tuple[ClassArray, ClassArray | None]:
    """Return the classes of some configurations at an end of an edge, and which classes remain; None for all."""
    size, of = edge.values.shape[side], edge.of[side]
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


@dataclass(frozen=True, slots=True)
class _OccurringClasses:
    """Renumbers partitions to the classes that occur; equal partitions become the same array.

    Attributes:
        number: For each K, the partition of K configurations into K classes.
        known: Cache by identity of the input partition.
    """

    number: dict[int, ClassArray]
    known: dict[tuple[int, int, bytes], tuple[ClassArray, ClassArray | None]] = field(default_factory=dict)

    def of_table(self, table: EdgeTable) -> tuple[ClassArray, ClassArray, FloatArray]:
        """Return the classes of rows and columns, and the values without the classes that do not occur."""
        values = table.values
        rows, occurring_rows = self._of_axis(table.row_class, len(values))
        cols, occurring_cols = self._of_axis(table.col_class, values.shape[1])
        if occurring_rows is not None:
            values = values.take(occurring_rows, axis=0)
        if occurring_cols is not None:
            values = values.take(occurring_cols, axis=1)
        return rows, cols, values

    def _of_axis(self, given: IndexArray, num_classes: int) -> tuple[ClassArray, ClassArray | None]:
        """Return the class of each configuration, and the original number of each class; None if unchanged.

        Where every configuration is a class of its own, class c is configuration c in all tables.
        """
        key = (num_classes, len(given), given.tobytes())
        if key not in self.known:
            self.known[key] = self._occurring(given.astype(np.intp), num_classes)
        return self.known[key]

    def _occurring(self, of: ClassArray, num_classes: int) -> tuple[ClassArray, ClassArray | None]:
        present = np.zeros(num_classes, dtype=bool)
        present[of] = True
        occurring = present.nonzero()[0]
        if len(occurring) == len(of) or len(of) <= FEW_CONFIGURATIONS:
            number = self.number.setdefault(len(of), np.arange(len(of)))
            is_same = num_classes == len(of) and bool((of == number).all())
            return number, None if is_same else of
        if len(occurring) == num_classes:
            return of, None
        return (present.cumsum() - 1).take(of), occurring


@cache
def _zeros(size: int) -> FloatArray:
    """Return the message that transfers no cost; messages are replaced, never changed in place."""
    zeros = np.zeros(size)
    zeros.flags.writeable = False
    return zeros
