"""Orderings: in which sequence the solver eliminates vertices, and what each sequence would cost.

The paper's terms (section III-B), for a sequence v_1 … v_n: the connected set X(i) holds the vertices of V≤i that
v_i reaches through V≤i alone; the dependent set D(i) = N(X(i)) ∩ V>i; the connected subsets S(i) are the components
of X(i) - {v_i}, each of which is X(j) for some j < i. Positions i are counted from 0 here.

Every ordering is one function of the neighbours and the domain sizes, deterministic: among vertices of equal
merit the one with the lowest number comes first.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from math import inf

from pase.errors import SolverError, unknown_name

Neighbours = Sequence[frozenset[int]]
Ordering = Callable[[Neighbours, Sequence[int]], tuple[int, ...]]

VALUE_BYTES = 8
MANY = 1e300  # combinations; more are not told apart

NOT_WORTH_WEIGHING = 4_000_000
"""With "auto", an ordering that takes no more operations than this (milliseconds) is not set against others."""


def generate_seq(neighbours: Neighbours, domain_sizes: Sequence[int]) -> tuple[int, ...]:
    """Return GenerateSeq's sequence: always the vertex with the smallest dependent set next (Fig. 3).

    The domain sizes play no part. Ties go to the lowest vertex number.
    """
    return _greedy(neighbours, lambda v, dependent: len(dependent[v]))


def min_weight(neighbours: Neighbours, domain_sizes: Sequence[int]) -> tuple[int, ...]:
    """Return the sequence that always eliminates the vertex whose step looks at the fewest combinations.

    That number is the product of the domain sizes of the vertex and of its dependent set. Ties go to the lowest
    vertex number, and so do vertices of more than 10^300 combinations.
    """

    def combinations(v: int, dependent: Sequence[set[int]]) -> float:
        product = float(domain_sizes[v])
        for w in dependent[v]:
            product *= domain_sizes[w]
            if product > MANY:
                return inf
        return product

    return _greedy(neighbours, combinations)


def min_fill(neighbours: Neighbours, domain_sizes: Sequence[int]) -> tuple[int, ...]:
    """Return the sequence that always eliminates the vertex that joins the fewest pairs not yet joined.

    The domain sizes play no part. Ties go to the lowest vertex number. The numbers of missing pairs are kept up to
    date with each pair that is joined, which costs what the smaller of two neighbourhoods costs.
    """
    around = [set(n) for n in neighbours]
    missing = [sum(len(n) - 1 - len(around[w] & n) for w in n) // 2 for n in around]
    heap = [(m, v) for v, m in enumerate(missing)]
    heapify(heap)
    done = [False] * len(around)
    order: list[int] = []
    while heap:
        m, u = heappop(heap)
        if done[u] or m != missing[u]:
            continue
        done[u] = True
        order.append(u)
        own = around[u]
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
    return tuple(order)


def breadth_first(neighbours: Neighbours, domain_sizes: Sequence[int]) -> tuple[int, ...]:
    """Return the breadth-first sequence from vertex 0, neighbours in the order of their numbers (section III-A).

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
    return tuple(order)


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


@dataclass(frozen=True, slots=True, kw_only=True)
class DependentSets:
    """The sets of section III-B for one sequence; every tuple has one entry for each position.

    order: the vertex at each position.
    dependent: D(i), the vertices that the table R(i, ·) is indexed by.
    subsets: S(i), as the positions j whose connected sets X(j) are the components of X(i) - {v_i}.
    """

    order: tuple[int, ...]
    dependent: tuple[frozenset[int], ...]
    subsets: tuple[tuple[int, ...], ...]

    @property
    def largest(self) -> int:
        """The size of the largest dependent set, which the paper calls M."""
        return max((len(d) for d in self.dependent), default=0)

    def connected(self, position: int) -> frozenset[int]:
        """Return X(i), as the vertex at a position together with all that its connected subsets hold."""
        found, stack = [], [position]
        while stack:
            i = stack.pop()
            found.append(self.order[i])
            stack.extend(self.subsets[i])
        return frozenset(found)


def dependent_sets(neighbours: Neighbours, order: Sequence[int]) -> DependentSets:
    """Return the dependent sets and connected subsets of a sequence (section III-B).

    X(i) is v_i with every earlier component that touches it, so S(i) are those components and
    D(i) = (N(v_i) ∩ V>i) ∪ (∪ over X(j) in S(i) of D(j)) - {v_i}. Raises SolverError unless the sequence holds
    each vertex once.
    """
    position = _positions(order, len(neighbours))
    parent = list(range(len(order)))  # of each position, towards the position at which its component was last joined
    dependent: list[frozenset[int]] = []
    subsets: list[tuple[int, ...]] = []
    for i, v in enumerate(order):
        later: set[int] = set()
        components: set[int] = set()
        for w in neighbours[v]:
            if position[w] > i:
                later.add(w)
            else:
                components.add(_root(parent, position[w]))
        for j in components:
            parent[j] = i
            later |= dependent[j]
        later.discard(v)
        dependent.append(frozenset(later))
        subsets.append(tuple(sorted(components)))
    return DependentSets(order=tuple(order), dependent=tuple(dependent), subsets=tuple(subsets))


def naive_dependent_sets(neighbours: Neighbours, order: Sequence[int]) -> tuple[frozenset[int], ...]:
    """Return recurrence (2)'s dependent sets: the neighbours of V≤i among V>i, for each position i (section III-A).

    Raises SolverError unless the sequence holds each vertex once.
    """
    position = _positions(order, len(neighbours))
    frontier: set[int] = set()
    sets = []
    for i, v in enumerate(order):
        frontier.discard(v)
        frontier.update(w for w in neighbours[v] if position[w] > i)
        sets.append(frozenset(frontier))
    return tuple(sets)


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderingReport:
    """What eliminating vertices in one sequence would take, known before anything is solved.

    name: the ordering's.
    order: the vertex at each position.
    largest_dependent_set: M of section III-B.
    operations: combinations that are looked at, Σ over i of K(v_i) · Π over w in D(i) of K(w).
    table_bytes: size of all tables R(i, ·) together, with 8-byte values.
    largest_table_bytes: size of the largest one.
    """

    name: str
    order: tuple[int, ...]
    largest_dependent_set: int
    operations: int
    table_bytes: int
    largest_table_bytes: int


def report_ordering(name: str, neighbours: Neighbours, domain_sizes: Sequence[int]) -> OrderingReport:
    """Return what the ordering of that name would take; raises SolverError for an unknown name."""
    return report_order(name, neighbours, domain_sizes, ordering_named(name)(neighbours, domain_sizes))


def report_order(
    name: str, neighbours: Neighbours, domain_sizes: Sequence[int], order: Sequence[int]
) -> OrderingReport:
    """Return what a given sequence would take."""
    sets = dependent_sets(neighbours, order)
    cells = [table_cells(d, domain_sizes) for d in sets.dependent]
    return OrderingReport(
        name=name,
        order=sets.order,
        largest_dependent_set=sets.largest,
        operations=sum(c * domain_sizes[v] for c, v in zip(cells, order, strict=True)),
        table_bytes=VALUE_BYTES * sum(cells),
        largest_table_bytes=VALUE_BYTES * max(cells, default=0),
    )


def choose_ordering(name: str, neighbours: Neighbours, domain_sizes: Sequence[int]) -> OrderingReport:
    """Return the report of the named ordering, or for "auto" of the one with the fewest operations, then bytes.

    For "auto", GenerateSeq's sequence is taken without looking further where no step of it has two dependent vertices,
    or it takes so few operations that weighing the others would take longer than it can save. Of equals the first
    in `ORDERINGS` wins. Raises SolverError for an unknown name.
    """
    if name != AUTO:
        return report_ordering(name, neighbours, domain_sizes)
    best = report_ordering("generate_seq", neighbours, domain_sizes)
    if best.largest_dependent_set <= 1 or best.operations <= NOT_WORTH_WEIGHING:
        return best
    for other in ORDERINGS:
        order = ORDERINGS[other](neighbours, domain_sizes)
        if _takes_at_most(best.operations, neighbours, domain_sizes, order):
            report = report_order(other, neighbours, domain_sizes, order)
            best = min(best, report, key=lambda r: (r.operations, r.table_bytes))
    return best


def _takes_at_most(limit: int, neighbours: Neighbours, domain_sizes: Sequence[int], order: Sequence[int]) -> bool:
    """Return whether a sequence takes no more operations than `limit`, looking no further once it does."""
    operations = 0
    for v, dependent in _eliminations(neighbours, order):
        operations += domain_sizes[v] * table_cells(dependent, domain_sizes)
        if operations > limit:
            return False
    return True


def _eliminations(neighbours: Neighbours, order: Sequence[int]) -> Iterator[tuple[int, set[int]]]:
    """Yield each vertex with its dependent set, by joining its dependents to one another as Fig. 3 does."""
    dependent = [set(n) for n in neighbours]
    for u in order:
        around = dependent[u]
        yield u, around
        for w in around:
            dependent[w] |= around
            dependent[w] -= {u, w}


def table_cells(vertices: Sequence[int] | set[int] | frozenset[int], domain_sizes: Sequence[int]) -> int:
    """Return the number of combinations of configurations of some vertices."""
    cells = 1
    for v in vertices:
        cells *= domain_sizes[v]
    return cells


def _greedy(neighbours: Neighbours, merit: Callable[[int, Sequence[set[int]]], float]) -> tuple[int, ...]:
    """Return the sequence that always takes the vertex of least merit, joining its dependents to one another.

    Stale heap entries are recognised by a merit that is not the vertex's latest.
    """
    dependent = [set(n) for n in neighbours]
    latest = [merit(v, dependent) for v in range(len(dependent))]
    heap = [(m, v) for v, m in enumerate(latest)]
    heapify(heap)
    done = [False] * len(dependent)
    order: list[int] = []
    while heap:
        m, u = heappop(heap)
        if done[u] or m != latest[u]:
            continue
        done[u] = True
        order.append(u)
        around = dependent[u]
        for w in around:
            dependent[w] |= around
            dependent[w] -= {u, w}
        for w in around:
            m = merit(w, dependent)
            if m != latest[w]:
                latest[w] = m
                heappush(heap, (m, w))
    return tuple(order)


def _positions(order: Sequence[int], num_vertices: int) -> list[int]:
    if sorted(order) != list(range(num_vertices)):
        raise SolverError(
            f"an ordering has each of the {num_vertices} vertices once; found {len(order)} entries, "
            f"{len(set(order))} of them different"
        )
    position = [0] * num_vertices
    for i, v in enumerate(order):
        position[v] = i
    return position


def _root(parent: list[int], i: int) -> int:
    """Return the representative of a position's component, halving the path on the way."""
    while parent[i] != i:
        parent[i] = parent[parent[i]]
        i = parent[i]
    return i
