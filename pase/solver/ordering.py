"""Elimination orders: in which sequence the solver eliminates vertices, and what each sequence would cost.

For a sequence v_1 … v_n (section III-B), D(i), the dependent set, holds the vertices of V>i next to the connected set
X(i), the vertices of V≤i that v_i reaches through V≤i alone. Joining the dependents of each vertex that is eliminated
to one another keeps D(i) = N(v_i) (Fig. 3). Positions i are counted from 0 here.

Every ordering is one function of the neighbours and the domain sizes, deterministic: among vertices of equal
merit the one with the lowest number comes first.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from math import inf, nan, prod

from pase.errors import SolverError, unknown_name

Neighbours = Sequence[frozenset[int]]
Eliminations = Iterator[tuple[int, set[int]]]
"""Each vertex in the sequence of elimination, with its dependent set."""

VALUE_BYTES = 8
MANY = 1e300  # combinations; more are not told apart

NOT_WORTH_WEIGHING = 4_000_000
"""With "auto", an ordering of no more operations than this (milliseconds) is accepted without trying the others."""


@dataclass(frozen=True, slots=True)
class Ordering:
    """One way to choose the sequence in which vertices are eliminated.

    Attributes:
        eliminations: Yields the sequence for the neighbours and the domain sizes of all vertices, with dependent sets.
    """

    eliminations: Callable[[Neighbours, Sequence[int]], Eliminations]

    def __call__(self, neighbours: Neighbours, domain_sizes: Sequence[int]) -> tuple[int, ...]:
        """Return the sequence."""
        return tuple([v for v, _ in self.eliminations(neighbours, domain_sizes)])


@Ordering
def generate_seq(neighbours: Neighbours, domain_sizes: Sequence[int]) -> Eliminations:
    """Yield GenerateSeq's sequence: always the vertex with the smallest dependent set next (Fig. 3).

    The domain sizes play no part. Ties go to the lowest vertex number.
    """
    return _greedy(neighbours, lambda _, dependent: len(dependent))


@Ordering
def min_weight(neighbours: Neighbours, domain_sizes: Sequence[int]) -> Eliminations:
    """Yield the sequence that always eliminates the vertex whose step evaluates the fewest combinations.

    That number is the product of the domain sizes of the vertex and of its dependent set. Ties go to the lowest vertex
    number; so do vertices of more than 10^300 combinations.
    """

    sizes = [float(size) for size in domain_sizes]
    size_of = sizes.__getitem__

    def combinations(v: int, dependent: set[int]) -> float:
        product = prod(map(size_of, dependent), start=sizes[v])
        return product if product <= MANY else inf

    return _greedy(neighbours, combinations)


@Ordering
def min_fill(neighbours: Neighbours, domain_sizes: Sequence[int]) -> Eliminations:
    """Yield the sequence that always eliminates the vertex that joins the fewest pairs not yet joined.

    The domain sizes play no part. Ties go to the lowest vertex number. The numbers of missing pairs are kept up to
    date with each pair that is joined, which costs what the smaller of two neighbourhoods costs.
    """
    around = [set(n) for n in neighbours]
    missing = [sum(len(n) - 1 - len(around[w] & n) for w in n) // 2 for n in around]
    heap = [(m, v) for v, m in enumerate(missing)]
    heapify(heap)
    done = [False] * len(around)
    while heap:
        m, u = heappop(heap)
        if done[u] or m != missing[u]:
            continue
        done[u] = True
        own = around[u]
        yield u, own
        changed = set(own)
        for w in own:  # pairs of u with what w knows and u does not are w's no more
            missing[w] -= len(around[w]) - 1 - len(around[w] & own)
            around[w].discard(u)
        members = sorted(own)
        for i, a in enumerate(members):
            for b in members[:i]:
                if b in around[a]:
                    continue
                common = around[a] & around[b]
                for c in common:
                    missing[c] -= 1
                changed |= common
                missing[a] += len(around[a]) - len(common)
                missing[b] += len(around[b]) - len(common)
                around[a].add(b)
                around[b].add(a)
        for w in changed:
            heappush(heap, (missing[w], w))


@Ordering
def breadth_first(neighbours: Neighbours, domain_sizes: Sequence[int]) -> Eliminations:
    """Yield the breadth-first sequence from vertex 0, neighbours in the order of their numbers (section III-A).

    The domain sizes play no part. A vertex that vertex 0 does not reach follows, with its own component, in the
    order of numbers.
    """
    seen = [False] * len(neighbours)
    order: list[int] = []
    for start in range(len(neighbours)):
        if seen[start]:
            continue
        seen[start] = True
        order.append(start)
        head = len(order) - 1
        while head < len(order):
            for w in sorted(neighbours[order[head]]):
                if not seen[w]:
                    seen[w] = True
                    order.append(w)
            head += 1
    return _eliminations(neighbours, order)


ORDERINGS: dict[str, Ordering] = {
    "generate_seq": generate_seq,
    "breadth_first": breadth_first,
    "min_fill": min_fill,
    "min_weight": min_weight,
}
AUTO = "auto"


def ordering_named(name: str) -> Ordering:
    """Return the ordering of that name; raises SolverError, with the valid names, for any other."""
    if name not in ORDERINGS:
        raise SolverError(unknown_name("ordering", name, [*ORDERINGS, AUTO]))
    return ORDERINGS[name]


def dependent_sets(neighbours: Neighbours, order: Sequence[int]) -> tuple[frozenset[int], ...]:
    """Return D(i), the vertices that the table R(i, ·) is indexed by, for each position of a sequence (section III-B).

    Raises SolverError unless the sequence holds each vertex once.
    """
    check_order(order, len(neighbours))
    return tuple(frozenset(d) for _, d in _eliminations(neighbours, order))


def check_order(order: Sequence[int], num_vertices: int) -> None:
    """Raise SolverError unless a sequence holds each vertex once."""
    if sorted(order) != list(range(num_vertices)):
        raise SolverError(
            f"an ordering has each of the {num_vertices} vertices once; found {len(order)} entries, "
            f"{len(set(order))} of them different"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderingReport:
    """Predicted work of eliminating vertices in one sequence.

    Attributes:
        name: Name of the ordering.
        order: The vertex at each position.
        largest_dependent_set: M of section III-B.
        operations: Combinations to evaluate, Σ over i of K(v_i) · Π over w in D(i) of K(w).
        table_bytes: Size of all tables R(i, ·) together, with 8-byte values.
        largest_table_bytes: Size of the largest one.
    """

    name: str
    order: tuple[int, ...]
    largest_dependent_set: int
    operations: int
    table_bytes: int
    largest_table_bytes: int


def report_ordering(name: str, neighbours: Neighbours, domain_sizes: Sequence[int]) -> OrderingReport:
    """Return the predicted work of the ordering of that name; raises SolverError for an unknown name."""
    report = _report_up_to(None, name, domain_sizes, ordering_named(name).eliminations(neighbours, domain_sizes))
    assert report is not None
    return report


def report_order(
    name: str, neighbours: Neighbours, domain_sizes: Sequence[int], order: Sequence[int]
) -> OrderingReport:
    """Return the predicted work of a given sequence; raises SolverError unless it holds each vertex once."""
    check_order(order, len(neighbours))
    report = _report_up_to(None, name, domain_sizes, _eliminations(neighbours, order))
    assert report is not None
    return report


def _report_up_to(
    most: int | None, name: str, domain_sizes: Sequence[int], eliminations: Eliminations
) -> OrderingReport | None:
    """Return the predicted work of a sequence; None as soon as it exceeds `most` operations."""
    width = operations = cells = largest = 0
    size_of = domain_sizes.__getitem__
    order: list[int] = []
    for v, dependent in eliminations:
        order.append(v)
        own = prod(map(size_of, dependent))
        operations += own * domain_sizes[v]
        if most is not None and operations > most:
            return None
        cells += own
        if own > largest:
            largest = own
        if len(dependent) > width:
            width = len(dependent)
    return OrderingReport(
        name=name,
        order=tuple(order),
        largest_dependent_set=width,
        operations=operations,
        table_bytes=VALUE_BYTES * cells,
        largest_table_bytes=VALUE_BYTES * largest,
    )


def choose_ordering(name: str, neighbours: Neighbours, domain_sizes: Sequence[int]) -> OrderingReport:
    """Return the report of the named ordering, or for "auto" of the one with the fewest operations, then bytes.

    For "auto", GenerateSeq's sequence is accepted at once if no step has two dependent vertices, or if it takes so few
    operations that evaluating the others would take longer than it can save. Ties go to the first in `ORDERINGS`.
    Raises SolverError for an unknown name.
    """
    if name != AUTO:
        return report_ordering(name, neighbours, domain_sizes)
    best = report_ordering("generate_seq", neighbours, domain_sizes)
    if best.largest_dependent_set <= 1 or best.operations <= NOT_WORTH_WEIGHING:
        return best
    for other, ordering in ORDERINGS.items():
        report = _report_up_to(best.operations, other, domain_sizes, ordering.eliminations(neighbours, domain_sizes))
        if report is not None:
            best = min(best, report, key=lambda r: (r.operations, r.table_bytes))
    return best


def _eliminations(neighbours: Neighbours, order: Sequence[int]) -> Eliminations:
    """Yield each vertex with its dependent set, by joining its dependents to one another as Fig. 3 does."""
    dependent = [set(n) for n in neighbours]
    for u in order:
        around = dependent[u]
        yield u, around
        for w in around:
            joined = dependent[w]
            joined |= around
            joined.discard(u)
            joined.discard(w)


def _greedy(neighbours: Neighbours, merit: Callable[[int, set[int]], float]) -> Eliminations:
    """Yield the sequence that always eliminates the vertex of least merit, joining its dependents to one another.

    Args:
        neighbours: [V] the vertices that share an edge with each vertex.
        merit: Gives the merit of a vertex with a dependent set. Stale heap entries are recognised by a merit that is
            not the vertex's latest.
    """
    dependent = [set(n) for n in neighbours]
    latest = [merit(v, around) for v, around in enumerate(dependent)]
    heap = [(m, v) for v, m in enumerate(latest)]
    heapify(heap)
    while heap:
        m, u = heappop(heap)
        if m != latest[u]:
            continue
        latest[u] = nan  # NaN equals no merit, so stale heap entries of this vertex are ignored
        around = dependent[u]
        yield u, around
        for w in around:
            joined = dependent[w]
            joined |= around
            joined.discard(u)
            joined.discard(w)
            m = merit(w, joined)
            if m != latest[w]:
                latest[w] = m
                heappush(heap, (m, w))
