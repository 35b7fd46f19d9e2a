"""Elimination with two numbers: the cheapest strategy up to a cost that a limit on weight allows, with its proof.

This is `elimination`, Eq. 4, where an entry of a table is not one minimum but a front: the partial strategies for one
choice of the dependent vertices of which none is beaten in cost and in weight by another. Fronts stay small because
partial strategies go as soon as no completion is of interest. With a price λ on weight, the least priced cost
(cost + λ weight) of any completion is known exactly (`completions`).

Proof: let x be a strategy of cost at most C and weight at most W, and so of priced cost at most C + λ W. Follow its
partial strategies through the steps. Each is dropped only where another with the same choices for the rest stays, no
heavier and dearer by less than the slack; put that one in its place. After all of at most `num_thinnings` such
exchanges the strategy weighs at most W and costs less than C + num_thinnings × slack: where `Limits` allow that much,
none of them was dropped for exceeding these.
"""

from dataclasses import dataclass
from math import prod

import numpy as np

from pase.solver.classes import ClassAlgebra, ClassArray, Partition
from pase.solver.completions import Pairs, Step, axes_of, completed
from pase.solver.effort import Effort
from pase.solver.fronts import Numbers, TooManyError, expanded, front, runs
from pase.solver.network import Network
from pase.solver.weighted import Weighted
from pase.tables.cost_tables import FloatArray


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a strategy is of interest for.

    priced: most of cost + price × weight. weight: most of that. price: λ, cost for a unit of weight. slack: by which
    an entry of a front may be dearer than one that it stands for.
    """

    priced: float
    weight: float
    price: float
    slack: float


@dataclass(frozen=True, slots=True, eq=False)
class _Vertex:
    """A vertex by states: configurations that every neighbour sees alike are in one state.

    state, priced, weight, configuration (its position in the network): the front of each state, one after the other.
    least: [states] priced cost. maps: each link's class of each state, None: the identity.
    """

    state: Numbers
    priced: FloatArray
    weight: FloatArray
    configuration: Numbers
    least: FloatArray
    maps: tuple[ClassArray | None, ...]


@dataclass(frozen=True, slots=True, eq=False)
class _Table:
    """The fronts that a step leaves, one after the other; start, count: [cells] where each is.

    own: entry of the vertex's fronts. below: entry of each child's table.
    """

    start: Numbers
    count: Numbers
    priced: FloatArray
    weight: FloatArray
    own: Numbers
    below: tuple[Numbers, ...]


def num_thinnings(num_vertices: int) -> int:
    """Return how often the slack can add up: in each vertex's own front, its table's, and where these are joined."""
    return 4 * num_vertices + 1


def cheapest_within(network: Network, problem: Weighted, limits: Limits, effort: Effort) -> dict[int, int] | None:
    """Return a strategy within the limits, as configuration numbers in the tables; None if there is none.

    No strategy of a priced cost within the limits less num_thinnings × slack, that weighs no more than they allow, is
    cheaper than it by that or more. network: of the priced tables, no vertex eliminated; their costs are finite there.
    Raises TooWideError, and TooManyError where fronts grow too large.
    """
    weights, fixed = _weights_left(network, problem)
    vertices = {v: _vertex(network, v, weights[v], limits) for v in network.live}
    pairs = _pairs(network, vertices)
    pair_weights = _pair_weights(network, vertices, problem)
    steps = completed(network, {v: vertex.least for v, vertex in vertices.items()}, pairs, effort)
    lightest = {v: float(weights[v].min()) for v in network.live}
    rest = limits.weight - fixed - sum(lightest.values())
    below: list[float] = []
    tables: list[_Table] = []
    held_bytes = 0
    for step in steps:
        effort.check()
        below.append(lightest[step.scope[0]] + sum(below[child] for child in step.children))
        tables.append(_eliminate(step, steps, tables, vertices, pairs, pair_weights, limits, rest + below[-1]))
        found = tables[-1]
        if not len(found.priced):
            return None
        held_bytes += 8 * len(found.priced) * (3 + len(found.below)) + 2 * step.total.nbytes
        if held_bytes > effort.memory_limit_bytes:
            raise TooManyError
        effort.holds(network.own_bytes() + held_bytes)
        effort.operations += len(found.priced)
    return _decide(network, steps, vertices, tables, limits, fixed)


def _weights_left(network: Network, problem: Weighted) -> tuple[dict[int, FloatArray], float]:
    """Return the weights of what live vertices have left, edges to decided ones included, and those of the decided."""
    fixed, origin = network.fixed, network.origin
    weights = {v: problem.weights[v][origin[v]] for v in network.live}
    decided = sum(float(problem.weights[v][c]) for v, c in fixed.items())
    for (u, v), table in zip(problem.tables.edges, problem.edge_weights, strict=False):
        if table is None:
            continue
        if u in fixed and v in fixed:
            decided += table.cost(fixed[u], fixed[v])
        elif u in fixed:
            weights[v] = weights[v] + table.row(fixed[u])[origin[v]]
        elif v in fixed:
            weights[u] = weights[u] + table.column(fixed[v])[origin[u]]
    return weights, decided


def _vertex(network: Network, v: int, weight: FloatArray, limits: Limits) -> _Vertex:
    links = network.incident[v]
    priced = network.costs[v]
    joint, maps = Partition(np.zeros(len(priced), dtype=np.intp), 1), list[ClassArray | None]()
    if links:
        joint, maps = ClassAlgebra().join([Partition(k.of[side], k.values.shape[side]) for k, side in links])
    kept = front(joint.of, priced - limits.price * weight, weight, limits.slack)
    least = np.full(joint.num_classes, np.inf)
    np.minimum.at(least, joint.of, priced)
    return _Vertex(joint.of[kept], priced[kept], weight[kept], kept, least, tuple(maps))


def _pairs(network: Network, vertices: dict[int, _Vertex]) -> Pairs:
    """Return the transfer costs of each two neighbours by state, [S_u, S_v], either way round."""
    maps = {
        (id(link), side): of
        for v in network.live
        for (link, side), of in zip(network.incident[v], vertices[v].maps, strict=True)
    }
    pairs: dict[tuple[int, int], FloatArray] = {}
    for link in network.links():
        values = link.values
        for side in (0, 1):
            of = maps[id(link), side]
            values = values if of is None else values.take(of, axis=side)
        a, b = link.ends
        pairs[a, b] = pairs[a, b] + values if (a, b) in pairs else values
        pairs[b, a] = pairs[a, b].T
    return pairs


def _pair_weights(network: Network, vertices: dict[int, _Vertex], problem: Weighted) -> Pairs:
    """Return what edges between live vertices weigh by state, as `_pairs` does their transfer costs."""
    # Configurations of one state are alike to every neighbour: one of them stands for all.
    member: dict[int, Numbers] = {}
    for v, vertex in vertices.items():
        first = np.zeros(len(vertex.least), dtype=np.intp)
        first[vertex.state[::-1]] = vertex.configuration[::-1]
        member[v] = network.origin[v][first]
    pairs: dict[tuple[int, int], FloatArray] = {}
    for (u, v), table in zip(problem.tables.edges, problem.edge_weights, strict=False):
        if u in member and v in member and table is not None:
            found = table.values[table.row_class[member[u]]][:, table.col_class[member[v]]]
            pairs[u, v] = pairs[u, v] + found if (u, v) in pairs else found
            pairs[v, u] = pairs[u, v].T
    return pairs


def _eliminate(
    step: Step,
    steps: list[Step],
    tables: list[_Table],
    vertices: dict[int, _Vertex],
    pairs: Pairs,
    pair_weights: Pairs,
    limits: Limits,
    most_weight: float,
) -> _Table:
    """Return a step's table; most_weight: of what lies below, with the lightest of all else."""
    v, vertex = step.scope[0], vertices[step.scope[0]]
    at = np.nonzero(step.total <= limits.priced)
    links, link_weights = np.zeros(len(at[0])), np.zeros(len(at[0]))
    for axis, d in enumerate(step.scope[1:], 1):
        if (v, d) in pairs:
            links += pairs[v, d][at[0], at[axis]]
        if (v, d) in pair_weights:
            link_weights += pair_weights[v, d][at[0], at[axis]]
    shape = step.up.shape
    cell = np.ravel_multi_index(at[1:], shape) if shape else np.zeros(len(at[0]), dtype=np.intp)
    # What is added to an entry to bound it: what it does not hold yet, at the least.
    missing = step.down.reshape(-1)[cell] + links
    cells, least = [], []
    for number in step.children:
        child = steps[number]
        cells.append(np.ravel_multi_index(tuple(at[a] for a in axes_of(child, step.scope)), child.up.shape))
        least.append(child.up.reshape(-1)[cells[-1]])
        missing += least[-1]

    row, own = expanded(at[0], *runs(vertex.state, len(vertex.least)))
    kept = np.flatnonzero(vertex.priced[own] + missing[row] <= limits.priced)
    row, own = row[kept], own[kept]
    priced, weight = vertex.priced[own], vertex.weight[own]
    below: list[Numbers] = []
    for number, of, ahead in zip(step.children, cells, least, strict=True):
        table = tables[number]
        missing = missing - ahead
        before, entry = expanded(of[row], table.start, table.count)
        row, priced, weight = row[before], priced[before] + table.priced[entry], weight[before] + table.weight[entry]
        kept = np.flatnonzero((priced + missing[row] <= limits.priced) & (weight <= most_weight))
        kept = kept[front(row[kept], (priced - limits.price * weight)[kept], weight[kept], limits.slack)]
        row, priced, weight = row[kept], priced[kept], weight[kept]
        own, below = own[before[kept]], [*(b[before[kept]] for b in below), entry[kept]]
    priced, weight = priced + links[row], weight + link_weights[row]
    kept = np.flatnonzero(weight <= most_weight)
    kept = kept[front(cell[row[kept]], (priced - limits.price * weight)[kept], weight[kept], limits.slack)]
    start, count = runs(cell[row[kept]], prod(shape))
    return _Table(start, count, priced[kept], weight[kept], own[kept], tuple(b[kept] for b in below))


def _decide(
    network: Network,
    steps: list[Step],
    vertices: dict[int, _Vertex],
    tables: list[_Table],
    limits: Limits,
    fixed: float,
) -> dict[int, int] | None:
    """Join the tables of the parts that are not connected, and follow the cheapest entry back; fixed: weight."""
    roots = [number for number, step in enumerate(steps) if len(step.scope) == 1]
    priced, weight = np.array([network.offset]), np.array([fixed])
    taken: list[Numbers] = []
    for number in roots:
        table = tables[number]
        before, entry = expanded(np.zeros(len(priced), dtype=np.intp), table.start, table.count)
        priced, weight = priced[before] + table.priced[entry], weight[before] + table.weight[entry]
        kept = np.flatnonzero(weight <= limits.weight)
        same = np.zeros(len(kept), dtype=np.intp)
        kept = kept[front(same, (priced - limits.price * weight)[kept], weight[kept], limits.slack)]
        priced, weight = priced[kept], weight[kept]
        taken = [*(t[before[kept]] for t in taken), entry[kept]]
    if not len(priced) or weight[0] > limits.weight:
        return None
    best = int((priced - limits.price * weight).argmin())
    chosen: dict[int, int] = {}
    waiting = [(number, int(entries[best])) for number, entries in zip(roots, taken, strict=True)]
    while waiting:
        number, place = waiting.pop()
        step, table = steps[number], tables[number]
        v = step.scope[0]
        chosen[v] = int(network.origin[v][vertices[v].configuration[table.own[place]]])
        waiting += [(child, int(b[place])) for child, b in zip(step.children, table.below, strict=True)]
    return network.complete(chosen)
