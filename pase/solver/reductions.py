"""Reductions that preserve a cheapest strategy (merging, dominance, contraction), and lower bounds.

(a) Configurations that no neighbour can tell apart are merged to the cheapest. Proof: let c and c' be configurations of
v that are in the same layout class on every edge of v, with cost_v(c) ≤ cost_v(c'). Replacing c' by c in any strategy
changes no transfer cost and does not raise the layer cost. So some cheapest strategy does not contain c'. Of equals the
one with the lowest index stays. Of a vertex of few configurations (`FEW_CONFIGURATIONS` in `pairwise`) each is a
class of its own; there (b) drops them.

(b) Dominated configurations, which another one beats for every choice of the neighbours, are dropped, to a fixed point.
c' dominates c at
vertex v when

    cost_v(c') + Σ over edges of v of max over x of [ T(c', x) - T(c, x) ]  ≤  cost_v(c).

Proof: replace c by c' in any strategy. Each edge's cost rises by at most its maximum, so the total does not rise; hence
some cheapest strategy does not contain c. Of configurations that dominate one another the lowest index stays: along
a chain of dominations the left side less the right never sums to less than nothing, so a cycle would consist of
equalities, and an equality only drops the higher index. Equalities are taken exactly, and a strict domination needs a
margin above rounding, so that rounding cannot close a cycle either.

(c) Vertices with at most two neighbours are eliminated while the problem stays pairwise: one step of `elimination`, in
which the vertex and its edges become a number (no neighbour), a vector of layer costs (one) or an edge between its two
neighbours. That edge inherits the messages of those it replaces, so a bound that was proven stays proven: its residual
is at least min θ_v ≥ 0.

(d) Lower bounds and good strategies result from moving cost between edges and vertices (sequential soft arc
consistency).
One pass visits the vertices in sequence. A visited vertex first collects what earlier passes and vertices sent to it;
then it shares the part of its costs above their minimum among the edges that lead on, and each of these sends on, over
its other end's classes, the least that any choice of this vertex must pay (min over rows of the residual). Every
residual stays non-negative, so Σ over vertices of min θ_v is a lower bound on every strategy's cost at any time,
and a pass never lowers it, except where a repeated layer takes the messages of an earlier one (`_Repeated`). On a tree
in which every vertex has one edge that leads on, the pass is dynamic programming and the bound is the optimum.

Proof of the pruning rule: fix x_v = c in any strategy. Its cost is Σ_u θ_u(x_u) + Σ residuals, which is at least
θ_v(c) + Σ_{u≠v} min θ_u. If that exceeds the cost of a strategy that is known, no cheapest strategy has x_v = c, and
c is dropped.
"""

from collections import deque
from collections.abc import Callable, Sequence
from math import prod
from typing import NamedTuple

import numpy as np

from pase.solver.elimination import Check, EliminationStep, Planner
from pase.solver.pairwise import (
    ClassAlgebra,
    ClassArray,
    Edge,
    Mask,
    PairwiseModel,
    Partition,
    by_configuration,
    class_minima,
)
from pase.solver.solution import RELATIVE_TOLERANCE, Outcome, SearchBudget
from pase.tables.cost_tables import CostTables, FloatArray, IndexArray, verify_tables

MAX_CELLS = 1 << 25
"""Vertices and tables whose comparison would evaluate more combinations than this are left as they are."""

ROUNDING = 1e-12


class _Dropping:
    """Drops configurations; vertices with the same costs and edges share the decision."""

    def __init__(self, model: PairwiseModel, keep_of: Callable[[int], Mask]) -> None:
        self.model, self.keep_of, self.dropped = model, keep_of, 0
        self.known: dict[tuple[object, ...], tuple[Mask, object]] = {}

    def drop(self, v: int, *edges: tuple[object, ...]) -> bool:
        """Restrict a vertex, given the identities of its edges' arrays; return whether anything was dropped."""
        costs = self.model.costs[v]
        key = (id(costs), *sorted(edges))
        if key not in self.known:
            # The arrays stay alive with the result, so that their ids are not reused.
            held = costs, [(edge.values, edge.of[side]) for edge, side in self.model.incident[v]]
            self.known[key] = self.keep_of(v), held
        keep = self.known[key][0]
        num_dropped = len(keep) - int(np.count_nonzero(keep))
        if num_dropped:
            self.model.restrict(v, keep)
            self.dropped += num_dropped
        return num_dropped > 0


def merge_alike(model: PairwiseModel) -> int:
    """Merge the configurations of every live vertex; return how many were dropped."""
    algebra = ClassAlgebra()
    partitions: dict[int, Partition] = {}

    def cheapest_of_each(v: int) -> Mask:
        costs = model.costs[v]
        of = np.zeros(len(costs), dtype=np.intp)
        if model.incident[v]:
            sides = [(edge.of[side], edge.values.shape[side]) for edge, side in model.incident[v]]
            of = algebra.join([partitions.setdefault(id(own), Partition(own, size)) for own, size in sides])[0].of
        order = np.lexsort((costs, of))  # stable: the lowest index first among equals
        first = np.ones(len(order), dtype=bool)
        first[1:] = np.diff(of[order]) != 0
        keep = np.zeros(len(costs), dtype=bool)
        keep[order[first]] = True
        return keep

    merging = _Dropping(model, cheapest_of_each)
    for v in model.live:
        merging.drop(v, *[(id(edge.of[side]),) for edge, side in model.incident[v]])
    return merging.dropped


def drop_dominated(model: PairwiseModel, check: Check) -> int:
    """Drop dominated configurations until none is left; return how many were dropped. Costs must be finite."""
    worst: dict[tuple[int, int], tuple[FloatArray, FloatArray]] = {}
    dropping = _Dropping(model, lambda v: ~_dominated(model, v, worst, check))
    waiting = list(model.live)
    while waiting:
        again: set[int] = set()
        for v in waiting:
            check(0)
            edges = model.incident[v]
            if len(model.costs[v]) > 1 and dropping.drop(
                v, *[(id(edge.values), side, id(edge.of[side])) for edge, side in edges]
            ):
                again.update(edge.ends[1 - side] for edge, side in edges)
        waiting = sorted(again)
    return dropping.dropped


def _dominated(
    model: PairwiseModel, v: int, worst: dict[tuple[int, int], tuple[FloatArray, FloatArray]], check: Check
) -> Mask:
    """Return a mask of the live configurations of a vertex that another one dominates.

    Args:
        model: The model.
        v: The vertex.
        worst: Cache of edges' worst differences, by identity; extended here.
        check: As for `drop_dominated`.
    """
    costs = model.costs[v]
    size = len(costs)
    none = np.zeros(size, dtype=bool)
    if size * size > MAX_CELLS:
        return none
    check(size * size * (1 + len(model.incident[v])))
    rise = costs[:, None] - costs  # [c', c] how much the total can rise when c becomes c'
    scale = float(costs.max())
    for edge, side in model.incident[v]:
        num_classes, num_others = edge.values.shape[side], edge.values.shape[1 - side]
        if num_classes * num_classes * num_others > MAX_CELLS:
            return none
        of = edge.of[side]
        key = (id(edge.values), side)
        if key not in worst:
            check(num_classes * num_classes * num_others)
            worst[key] = (edge.values, _worst_differences(edge.values if side == 0 else edge.values.T))
        rise += worst[key][1][of[:, None], of]
        scale += float(edge.values.max())
    lower_index = np.tri(size, k=-1, dtype=bool).T  # [c', c]: c' < c
    np.fill_diagonal(rise, np.inf)
    return np.asarray(((rise < -ROUNDING * scale) | ((rise <= 0) & lower_index)).any(axis=0))


def _worst_differences(values: FloatArray) -> FloatArray:
    """Return [L, L] max over the other end's classes x of T(i, x) - T(j, x)."""
    rows = np.ascontiguousarray(values)
    worst = np.empty((len(rows), len(rows)))
    for i, row in enumerate(rows):
        np.subtract(row, rows).max(axis=1, out=worst[i])
    return worst


def contract(model: PairwiseModel, max_operations: int, max_bytes: int, check: Check) -> int:
    """Eliminate vertices of degree 0, 1 and 2, lowest number first, until none is left; return how many there were.

    Vertices with the same costs and tables (repeated layers) share the work. Where arrays of repeated parts are cached,
    a round eliminates no two neighbours: a chain of equal vertices halves, and the remaining ones stay equal.

    Args:
        model: The model; it is changed.
        max_operations: Vertices whose elimination would evaluate more combinations than this are skipped.
        max_bytes: Limit on the memory of all new tables; vertices whose table would exceed it are skipped.
        check: Called between units of work.
    """
    planner = Planner()
    gone: set[int] = set()
    held_bytes = 0
    waiting = list(model.live)
    while waiting:
        again: set[int] = set()
        blocked: set[int] = set()
        for v in waiting:
            check(0)
            edges = model.incident[v]
            around = {edge.ends[1 - side] for edge, side in edges}
            if v in gone or len(around) > 2 or v in blocked:
                continue
            factors = [planner.factor(edge, side) for edge, side in edges]
            step = planner.eliminate((v, *sorted(around)), model.costs[v], factors)
            result = step.kernel.result
            if result.values is None:
                num_bytes = 8 * prod(result.shape)
                if step.kernel.operations > max_operations or held_bytes + num_bytes > max_bytes:
                    continue
                held_bytes += num_bytes
                step.kernel.fill(check)
            _replace(model, step)
            gone.add(v)
            again |= around
            blocked |= around if model.repeats is not None else set()
        waiting = sorted(again)
    model.remove(gone)
    return len(gone)


def _replace(model: PairwiseModel, step: EliminationStep) -> None:
    """Eliminate a vertex, and add the table that this produces to the model."""
    v, *dependent = step.scope
    edges, values, partitions = model.incident[v], step.kernel.result.filled(), step.kernel.partitions[1:]
    model.eliminate(v)
    if not dependent:
        model.offset += float(values)
    elif len(dependent) == 1:
        w = dependent[0]
        costs, of = model.costs[w], partitions[0].of
        model.costs[w] = model.made(lambda: costs + by_configuration(values, of), costs, values, of)
    else:
        messages = []
        for w, partition in zip(dependent, partitions, strict=True):
            moved = np.zeros(len(model.costs[w]))
            for edge, side in edges:
                if edge.ends[1 - side] == w:
                    moved = moved + by_configuration(edge.messages[1 - side], edge.of[1 - side])
            message = np.empty(partition.num_classes)
            message[partition.of] = moved
            messages.append(message)
        a, b = dependent
        new = Edge((a, b), [p.of for p in partitions], values, messages)
        model.incident[a] = [*model.incident[a], (new, 0)]
        model.incident[b] = [*model.incident[b], (new, 1)]


WORTH_DROPPING = 0.7
"""A vertex is restricted when at most this share of its configurations remains: restricting takes time, too."""
MAX_SWEEPS = 60
MAX_SWEEPS_NEAR_OPTIMUM = 12
MOST_ALIKE = 4
"""Number of messages of one table, or sets of configurations of one vertex, that are cached."""
ABOUT_ALIKE = 0.8
"""A cached set of configurations replaces a subset of it that has at least this share of its size."""
REPEATED_LOSS = 1e-3
"""Share of the gap between bound and limit that a pass may lose by reusing messages, for each edge of a vertex."""
PASS_ROUNDING = 1e-13
"""Share of the bound that a pass may lose without a limit: about its rounding error."""
LOOSE = 32
"""Largest ratio of the ceiling to the cost of the best strategy."""
LITTLE_LEFT = 4
"""Live configurations per live vertex below which elimination is almost free."""


def sweep(model: PairwiseModel, limit: float, forward: bool, check: Check) -> float:
    """Make one pass in ascending (or descending) order of vertices; return the lower bound after it.

    limit: configurations whose bound exceeds it are dropped from the model on the way; +inf keeps all.
    """
    order = model.live if forward else model.live[::-1]
    least = model.least or {v: _least(model.reparametrised(v)) for v in order}
    bound = model.offset + sum(least.values())
    with model.repeating():
        loss = REPEATED_LOSS * max(limit - bound, 0.0) if limit < np.inf else PASS_ROUNDING * bound
        repeated = None if model.repeats is None else _Repeated(model, forward, loss / max(len(order), 1), check)
        for v in order:
            most = limit - (bound - least[v])  # of θ_v, given the least θ of all other vertices
            done = repeated.visit(v, most) if repeated else _visit(model, v, most, forward, check)
            if done is None:
                return np.inf
            low, losses = done
            bound += low - least[v]
            least[v] = low  # still a lower bound after this vertex has sent its surplus on
            for place, lost in losses:
                edge, side = model.incident[v][place]
                least[edge.ends[1 - side]] -= lost
                bound -= lost
    model.least = least
    return bound


Losses = Sequence[tuple[int, float]]
"""(position among the edges of a vertex, by how much θ at the other end may have fallen)."""


def _visit(
    model: PairwiseModel, v: int, most: float, forward: bool, check: Check, repeated: "_Repeated | None" = None
) -> tuple[float, Losses] | None:
    """Drop configurations of a vertex, and send its surplus along the edges that lead on.

    Args:
        model: The model; it is changed.
        v: The vertex.
        most: Configurations with a higher θ are dropped.
        forward: Whether edges lead on to higher numbers.
        check: As for `sweep`.
        repeated: Results at earlier vertices; None where nothing repeats.

    Returns:
        A lower bound of the vertex's θ afterwards, and the losses of its neighbours; None if no configuration is left.
    """
    total, ahead = model.costs[v], []
    size = total.size
    cells = 0
    for place, (edge, side) in enumerate(model.incident[v]):
        message = edge.messages[side]
        total = total + (message if message.size == size else message.take(edge.of[side]))
        if (edge.ends[1 - side] > v) is forward:
            ahead.append((place, edge, side))
            cells += edge.values.size
    check(cells)
    low = _least(total)
    if most < np.inf:
        keep = total <= most
        num_kept = int(np.count_nonzero(keep))
        if num_kept <= WORTH_DROPPING * len(total):
            if not num_kept:
                return None
            if repeated is not None:
                keep = repeated.mask(model.costs[v], keep, num_kept)
            model.restrict(v, keep)
            total = total[keep]
    if not ahead:
        return low, ()
    # NumPy is quicker with arrays of no axes than with numbers.
    surplus = total - np.array(low)
    if len(ahead) > 1:
        surplus *= np.array(1.0 / len(ahead))
    losses = []
    for place, edge, side in ahead:
        values, messages = edge.values, edge.messages
        size = values.shape[side]
        sent = surplus if size == surplus.size else class_minima(surplus, edge.of[side], size)
        own = messages[side] - sent
        if repeated is None:
            messages[side] = own
            messages[1 - side] = _least_residuals(values, own, side)
        else:
            lost_here, lost_there = repeated.send(edge, side, own)
            low -= lost_here
            if lost_there:
                losses.append((place, lost_there))
    return low, losses


def _least_residuals(values: FloatArray, message: FloatArray, side: int) -> FloatArray:
    """Return the least residual for each class of the other end; `message` is the one to this side."""
    residuals = values - (message[:, None] if side == 0 else message)
    least: FloatArray = np.minimum.reduce(residuals, side)
    return least


class _Visited(NamedTuple):
    """Result of a pass at a vertex.

    Attributes:
        before: Arrays that identify the vertex and its edges, kept alive so that their ids are not reused.
        most: Limit on θ of the configurations that were kept.
        is_restricted: Whether some were dropped.
        done: What `_visit` returned.
        costs: Costs of the vertex afterwards.
        origin: Numbers of its configurations afterwards.
        edges: For each edge the values, the classes of the vertex, and the messages afterwards.
    """

    before: list[FloatArray | ClassArray]
    most: float
    is_restricted: bool
    done: tuple[float, Losses]
    costs: FloatArray
    origin: ClassArray
    edges: list[tuple[FloatArray, ClassArray, list[FloatArray]]]

    def serves(self, most: float) -> bool:
        """Return whether the result is valid for another limit on θ, and drops about as many configurations."""
        low = self.done[0]
        return most - low >= ABOUT_ALIKE * (self.most - low) and not (self.is_restricted and most > self.most)


class _Repeated:
    """Reuses the results of one pass at a vertex for repeated layers whose results would be (almost) the same.

    Along a chain of equal blocks, messages and dropped configurations soon reach a steady state from one block to the
    next. From there on the arrays of an earlier block are reused, and vertices with equal arrays around them need no
    work.

    Attributes:
        model: The model, which is changed.
        forward: The direction of the pass.
        tolerance: Largest difference between a message and the one that replaces it.
        check: As for `sweep`.
    """

    def __init__(self, model: PairwiseModel, forward: bool, tolerance: float, check: Check) -> None:
        self.model, self.forward, self.tolerance, self.check = model, forward, tolerance, check
        self._visited: dict[tuple[int, ...], _Visited] = {}
        self._sent: dict[tuple[int, int], tuple[FloatArray, deque[list[FloatArray]]]] = {}
        self._kept: dict[int, tuple[FloatArray, deque[tuple[Mask, int]]]] = {}

    def visit(self, v: int, most: float) -> tuple[float, Losses] | None:
        """Do what `_visit` does, or reuse the result of an earlier vertex with the same arrays."""
        model, forward = self.model, self.forward
        around = model.incident[v]
        before: list[FloatArray | ClassArray] = [model.costs[v], model.origin[v]]
        ways = 1
        for edge, side in around:
            before += (edge.values, edge.of[side], *edge.messages)
            ways = 4 * ways + 2 * side + ((edge.ends[1 - side] > v) is forward)
        key = (ways, *map(id, before))
        earlier = self._visited.get(key)
        if earlier is not None and earlier.serves(most):
            self.check(0)
            model.costs[v], model.origin[v] = earlier.costs, earlier.origin
            for (edge, side), (values, of, messages) in zip(around, earlier.edges, strict=True):
                edge.values, edge.of[side], edge.messages = values, of, messages.copy()
            return earlier.done
        done = _visit(model, v, most, forward, self.check, self)
        if done is not None:
            costs, origin = model.costs[v], model.origin[v]
            edges = [(edge.values, edge.of[side], edge.messages.copy()) for edge, side in around]
            self._visited[key] = _Visited(before, most, costs is not before[0], done, costs, origin, edges)
        return done

    def send(self, edge: Edge, side: int, own: FloatArray) -> tuple[float, float]:
        """Set the messages of an edge whose one end sends its whole surplus.

        The other end's message is computed from the one that remains here, so that no residual is negative.
        Args:
            edge: The edge.
            side: Its end that sends, 0 or 1.
            own: [L] the message that is to remain there.

        Returns:
            The most that θ may lose at the end that sends, compared with `own`, and at the other, compared with before.
        """
        values = edge.values
        _, sent = self._sent.setdefault((id(values), side), (values, deque(maxlen=MOST_ALIKE)))
        for messages in sent:
            if abs(own.item(0) - messages[side].item(0)) > self.tolerance:
                continue  # as most do at once
            difference = own - messages[side]
            most = float(difference.max())
            if most <= self.tolerance and difference.min() >= -self.tolerance:
                lost_there = float((edge.messages[1 - side] - messages[1 - side]).max())
                edge.messages = messages.copy()
                return max(most, 0.0), max(lost_there, 0.0)
        other = _least_residuals(values, own, side)
        edge.messages = [own, other] if side == 0 else [other, own]
        sent.appendleft(edge.messages.copy())
        return 0.0, 0.0

    def mask(self, costs: FloatArray, keep: Mask, num_kept: int) -> Mask:
        """Return which configurations of a vertex to keep: those of an earlier one with equal costs, or `keep`.

        Args:
            costs: [K] layer costs of the vertex.
            keep: [K] the configurations that have to be kept.
            num_kept: How many they are.
        """
        _, kept = self._kept.setdefault(id(costs), (costs, deque(maxlen=MOST_ALIKE)))
        for earlier, num_earlier in kept:
            if num_kept >= ABOUT_ALIKE * num_earlier and not (keep > earlier).any():
                return earlier
        kept.appendleft((keep, num_kept))
        return keep


def _least(values: FloatArray) -> float:
    """Return the least of a short vector, in a fraction of the time that a reduction takes."""
    return values.item(values.argmin())


def decode(model: PairwiseModel, forward: bool) -> tuple[float, dict[int, int]]:
    """Return a cost and a choice for the live vertices: each in turn takes its best given the ones before it.

    The cost of undecided neighbours is estimated by their messages. Ties go to the lowest number.
    """
    chosen: dict[int, int] = {}
    cost = model.offset
    for v in model.live if forward else model.live[::-1]:
        paid, estimate = model.costs[v], None
        size = paid.size
        for edge, side in model.incident[v]:
            row = chosen.get(edge.ends[1 - side])
            if row is not None:
                row = edge.of[1 - side][row]
                seen = edge.values[row] if side else edge.values[:, row]
                paid = paid + (seen if seen.size == size else seen.take(edge.of[side]))
            else:
                message = edge.messages[side]
                message = message if message.size == size else message.take(edge.of[side])
                estimate = message if estimate is None else estimate + message
        c = int((paid if estimate is None else paid + estimate).argmin())
        chosen[v] = c
        cost += paid.item(c)
    return cost, chosen


def tighten_bounds(
    model: PairwiseModel,
    budget: SearchBudget,
    outcome: Outcome | None = None,
    *,
    limit: float = np.inf,
    max_sweeps: int = MAX_SWEEPS,
    little: int = LITTLE_LEFT,
    whole: bool = True,
) -> float:
    """Bound, decode and drop configurations until little is left or a pass changes little; return the lower bound.

    Args:
        model: The model; it is changed.
        budget: Limits of the search.
        outcome: Its best strategy gives the limit, and better decoded ones are offered to it. The ceiling follows the
            best strategy down, since rounding errors are relative to the largest cost.
        limit: Largest cost of a strategy that matters; used without `outcome`.
        max_sweeps: Maximum number of passes.
        little: Live configurations per live vertex at which to stop.
        whole: Whether the model is the whole problem, so that its bound holds for every strategy.
    """
    first = max(model.num_configurations(), 1)
    bounds = [-np.inf, -np.inf]
    cost = limit
    for number in range(max_sweeps):
        before = model.num_configurations()
        forward = number % 2 == 0
        if outcome is not None:
            cost, limit = outcome.cost, outcome.limit
            if LOOSE * cost < model.ceiling < np.inf:
                model.lower_ceiling(2 * cost)
                bounds = [-np.inf, -np.inf]
            if before:
                left = f"{before} configurations of {len(model.live)} layers left"
                budget.progress(f"bounding: {left}", 1 - before / first)
        bound = sweep(model, limit, forward, budget.check)
        scale = min(cost, model.ceiling)
        bound -= RELATIVE_TOLERANCE * scale if scale < np.inf else 0.0
        budget.sweeps += 1
        if outcome is not None and whole:
            outcome.raise_bound(bound)
        if bound > limit:
            return bound
        model.fix_singles()
        after = model.num_configurations()
        gained = bound - bounds[-2]  # by a pass each way
        bounds.append(max(bound, bounds[-1]))
        is_little = after <= little * len(model.live)
        is_slow = number >= 3 and after > 0.95 * before and gained < 0.02 * (cost - bound)
        # Every second pass is decoded, and the last.
        if outcome is not None and (number == 0 or not forward or is_little or is_slow):
            found, chosen = decode(model, not forward)
            if found < cost:  # the model's cost is never above that in the tables
                outcome.offer(model.complete(chosen))
                cost = outcome.cost
            budget.holds(model.own_bytes())
        if is_little or (is_slow and gained < 0.02 * (cost - bound)):
            break
    return bounds[-1]


def near_optimal(tables: CostTables, limit: float, check: Check = lambda _: None) -> tuple[IndexArray, ...]:
    """Return for each vertex the configurations, ascending, that a strategy of a cost of at most `limit` may have.

    Args:
        tables: The cost tables.
        limit: At least the least cost, or every vertex's result is empty.
        check: Called between units of work; may raise to stop.

    Returns:
        [V] configuration numbers: a superset of those that occur in strategies within the limit.
    """
    verify_tables(tables)
    limit += RELATIVE_TOLERANCE * abs(limit)
    # Costs are not negative, so every cost above the limit may be replaced by twice the limit.
    model = PairwiseModel.of_tables(tables, 2 * limit if limit > 0 else 1.0)
    for number in range(MAX_SWEEPS_NEAR_OPTIMUM):
        before = model.num_configurations()
        if sweep(model, limit, number % 2 == 0, check) > limit:
            return tuple(np.empty(0, dtype=np.int32) for _ in model.live)
        if number and model.num_configurations() > 0.98 * before:
            break
    least = model.least or {}
    low = model.offset + sum(least.values())
    return tuple(
        model.origin[v][model.reparametrised(v) <= limit - (low - least[v])].astype(np.int32) for v in model.live
    )
