"""The search of a stage: the cheapest strategy of a `StageProblem` within a device's memory, and a bound on all.

The shares of the sides and the price of memory at which the bound is highest are found by cutting planes: each strategy
is a plane above the bound as a function of them. Strategies that fit come of the optima, and of pairs of them: one
up to a layer, the other from there on; of a stage whose blocks repeat, of runs of equal blocks; of chunks of a group,
each as in some optimum.

Whether a strategy fits is decided by its peak. Sums have what is held in one turn, at first the one in which
micro-batches begin to go back; where strategies that fit in it do not fit in another one, that turn is limited instead.
No strategy that fits is over the limit in any turn, so that each of the bounds holds. If the peak of a
strategy exceeds the limit by some bytes that these sums leave out, the search is repeated with a limit that is lower by
them. What is then left between bound and strategy is closed by enumerating all choices that the bound leaves, where
these are few.
"""

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, combinations, permutations, product
from math import prod
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pase.costs import TimeUpError
from pase.costs.choices import CRITERIA
from pase.costs.step_memory import GroupTurn
from pase.planning.stage_problem import (
    TOLERANCE,
    Choice,
    Looked,
    StageProblem,
    StageSums,
    between,
    together,
)
from pase.solver import near_optimal
from pase.tables.cost_tables import FloatArray, IndexArray

MAX_PLANES, MAX_WHOLE_PLANES, MAX_KNOWN = 24, 8, 12
"""Optima at most by which a bound is raised: of segments, of whole stages, and of those that are known."""
MAX_ENUMERATED = 1_000_000
"""Strategies that are gone through at most to close a gap."""
MAX_NARROWED = 50_000
"""Choices of all layers of which those are sought that may be gone through."""
MAX_MIXED, MAX_RUNS, MAX_NEAR = 10, 12, 3
"""Of the strategies of a block those of which runs are made, and how finely the blocks are shared out at first; and at
how many weights blocks are sought that fit between others."""
UNHIDDEN, PRICES, MAX_COMBINED = (0.0, 0.03, 0.1, 0.3), (0.3, 0.7, 1.0, 1.5, 3.0, 7.0), 300
"""Shares of what does not hide in any micro-batch, and prices of memory as factors, at which chunks are looked at to be
combined; and combinations that are kept at a time."""
MAX_SPLICED = 8
"""Of the optima that came last, which are spliced."""
MAX_TURNS, MAX_TIGHTER, MAX_TRIES, CLOSE_BYTES = 3, 3, 8, 1e-3
"""Turns that are limited, one after the other; how often strategies are sought within less in each, where one that fits
is known and where none is; and to which share of the limit."""
MAX_PEAKS, MAX_FRONT_PEAKS = 300, 2_000
"""Strategies of which peaks are worked out at most where all are gone through: for the cheapest that fits, and for all
that no other beats."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageFound:
    """The answer to a stage. bound: no strategy that fits has a lower α t + o; infinite where none fits.

    choice: none where none is known to fit. weights: [criteria] at which the sums give the bound; at: these as shares
    of the sides and the price of a byte, where there are any. is_held_back: whether choices that tables leave out keep
    the bound low.
    """

    choice: Choice
    sums: StageSums | None
    bound: float
    weights: FloatArray
    at: FloatArray | None
    is_held_back: bool = False


@dataclass(slots=True)
class _Search:
    """One search: its problem, the strategies that it came by, and the best one that fits.

    pool: strategies of problems by key, those of parts of stages, too; more are added. tolerance: share of the cost
    that may be left between bound and strategy. loose: another one, and the cost up to which that counts. enough: a
    bound that is. room: bytes that strategies may hold by sums that are likely to fit. bound: no strategy that fits has
    a lower α t + o.
    """

    problem: StageProblem
    pool: dict[Hashable, list[Looked]]
    tolerance: float
    loose: tuple[float, float] = (0.0, 0.0)
    optima: list[Looked] = field(default_factory=list)
    columns: list[FloatArray] = field(default_factory=list)
    weights: list[FloatArray] = field(default_factory=list)
    enough: float = np.inf
    room: float = np.inf
    is_held_back: bool = False
    blocks: set[Choice] = field(default_factory=set)
    bound: float = 0.0
    cost: float = np.inf
    best: Looked | None = None

    def found(self, weights: FloatArray, at: FloatArray | None) -> StageFound:
        """Return what is known; weights, at: as in `StageFound`."""
        return StageFound(
            choice=self.best.choice if self.best else (),
            sums=self.best.sums if self.best else None,
            bound=float(min(self.bound, self.cost)),
            weights=weights,
            at=at,
        )

    def offer(self, choice: Choice) -> Looked:
        """Look at a strategy, and keep it if it is the best that fits."""
        problem, looked = self.problem, self.problem.looked_at(choice)
        cost = problem.cost(looked.sums)
        if cost < self.cost and problem.may_fit(looked.sums) and problem.fits(choice):
            self.cost, self.best = cost, looked
        return looked

    def goal(self) -> float:
        """Return a bound that is high enough, to what is known."""
        loose, up_to = self.loose
        return min(self.cost / (1 + (loose if self.cost <= up_to else self.tolerance)), self.enough)

    def note(self, choice: Choice) -> Looked:
        """Look at an optimum, which others are made of."""
        if all(choice != looked.choice for looked in self.optima):
            self.optima.append(self.offer(choice))
        return next(looked for looked in self.optima if looked.choice == choice)

    def is_close(self) -> bool:
        """Return whether the bound is high enough, to what is known."""
        return self.bound >= self.goal()

    def at(self, weights: FloatArray) -> tuple[FloatArray, float]:
        """Return the [criteria] of the optimum of a problem of sums, which is noted, and a bound on its cost."""
        choice, low = self.problem.optimum(weights, [self.best] if self.best else [])
        beyond = self.apart(weights)[1] if any(map(len, self.problem.beyond)) else np.inf
        return self.note(choice).criteria, min(low, beyond)

    def apart(self, weights: FloatArray) -> tuple[float, float]:
        """Return bounds on the sum of every strategy, and of those with a choice that the tables leave out."""
        bound, more = 0.0, np.inf
        for segment, count in self.problem.segments:
            beyond = segment.least_beyond(weights, self.pool)
            low = min(segment.looked_for(weights, self.pool)[1], beyond)
            bound += count * low
            more = min(more, beyond - low)
        return bound, bound + more

    def looped(self, weights: FloatArray) -> tuple[FloatArray, float]:
        """Return the [criteria] of equal blocks, each the best behind its like, and what they come to by the weights.

        With what is ahead of them and behind they are a strategy, which is noted, but for what they take at the ends.
        """
        total, low, whole = np.zeros(len(CRITERIA)), 0.0, Choice()
        for segment, count in self.problem.columns:
            looked, least = segment.looked_for(weights, self.pool)
            total += count * looked.criteria
            low += count * least
            whole += count * looked.choice
        self.note(whole)
        self.weights.append(weights)
        return total, low

    def known(self, weights: FloatArray) -> tuple[FloatArray, float]:
        """Return what `looped` does, of strategies that are known."""
        total = np.zeros(len(CRITERIA))
        for segment, count in self.problem.columns:
            total += count * min((own.criteria for own in self.pool[segment.key]), key=lambda own: float(own @ weights))
        return total, float(total @ weights)

    def relax(self, room: float, near: FloatArray | None = None) -> tuple[float, FloatArray, FloatArray]:
        """Return the best bound on all strategies that need no more than some room, by sums; and at which weights.

        Args:
            room: bytes; infinite without a limit.
            near: shares of the sides and price of a byte to begin at.

        Returns:
            The bound, infinite where there are none; its weights; and these as shares and price.
        """
        problem, has_blocks = self.problem, len(self.problem.segments) > 1
        enough = self.goal()
        seek = partial(climb, sides=problem.sides, memory=problem.memory, room=room, tolerance=self.tolerance)
        if not has_blocks:
            found = seek(self.at, most=MAX_WHOLE_PLANES, near=near, enough=enough)
            return found.bound, found.weights, found.at
        if all(self.pool.get(segment.key) for segment, _ in problem.columns):
            # Where it is likely to be highest, by what is known.
            near = seek(self.known, most=MAX_KNOWN, near=near, columns=self.columns).at
        bound = 0.0
        for own in (enough, np.inf):
            found = seek(self.looped, most=MAX_PLANES, near=near, columns=self.columns, enough=own)
            if found.bound == np.inf and self.apart(problem.memory)[0] > room * (1 + TOLERANCE):
                return np.inf, problem.memory, found.at
            low, beyond = self.apart(found.weights)
            bound = max(bound, low - (found.at[-1] * room if found.at[-1] > 0 else 0.0))
            self.is_held_back = beyond <= low
            if not self.is_held_back or found.bound < own or bound >= enough:
                break
            # What is left out may count for more where the bound is highest.
            near = found.at
        return bound, found.weights, found.at

    def mix(self, weights: FloatArray) -> None:
        """Look at strategies in which up to three runs of equal blocks follow one another, those that take least.

        Of chunks at those, too, in which each is as in some optimum at a price of memory about as high.
        """
        if len(self.problem.bounds) > 1:
            # Each chunk hides by itself, and has less to choose from for it than a stage.
            unhidden = self.problem.sides[-1] + weights[5] * self.problem.memory
            for share, factor in product(UNHIDDEN, PRICES):
                self.looped(_repriced(self.problem, (1 - share) * weights + share * unhidden, factor))
            for choice in _combined(self.problem, self.optima, self.room):
                self.note(choice)
        looped = self.problem.looped
        if looped is not None and self.pool.get(looped.key):
            common = min(self.pool[looped.key], key=lambda own: float(own.criteria @ weights))
            within = self.problem.within(common.choice)
            known = self.pool.setdefault((looped.key, common.choice), [])
            for near in [weights, *self.weights[-MAX_NEAR:]]:
                choice, _ = within.optimum(near, known=known)
                if all(choice != own.choice for own in known):
                    known.append(within.looked_at(choice))
            self.blocks |= {own.choice for own in known}
        runs = _Runs.of(self, weights)
        if runs:
            for choice in runs.best():
                self.offer(choice)

    def look(self, weights: FloatArray) -> None:
        """Look at whole strategies on either side of a price, which the limit is between, and what they make.

        The bound on all strategies that fit rises with what is found.
        """
        memory = self.problem.memory
        for factor in (1.0, 0.97, 1.03) if len(self.problem.segments) > 1 else ():
            if not self.is_close():
                before = self.cost, self.bound
                own = _repriced(self.problem, weights, factor)
                price = float(own @ memory / (memory @ memory))
                low = self.at(own)[1] - (price * self.problem.limit_bytes if price > 0 else 0.0)
                self.bound = max(self.bound, low)
                self.mix(weights)
                self.splice()
                if (self.cost, self.bound) == before:
                    break

    def tighten(self, at: FloatArray) -> None:
        """Look for strategies that fit within less by sums, as much as one that nearly fits has more at its peak.

        at: shares of the sides and price of a byte to begin at.
        """
        limit = self.problem.limit_bytes
        least, most, room = 0.0, limit, limit - self.besides(limit)
        for number in range(MAX_TRIES):
            if self.is_close() or (self.best and number >= MAX_TIGHTER) or most - least < CLOSE_BYTES * limit:
                break
            if not least < room <= most:
                room = (least + most) / 2
            self.room, before = room, self.cost
            bound, weights, point = self.relax(room, near=at)
            if bound < self.goal():
                at = point
                self.splice()
                self.look(weights)
            if bound >= self.goal() or self.cost < before:
                # Within more there may be cheaper ones.
                least, room = room, (room + most) / 2
            else:
                most, room = room, min(limit - self.besides(room), (least + room) / 2)

    def besides(self, room: float) -> float:
        """Return how much more the strategy whose sums are nearest to some bytes has at its peak."""
        nearest = self.nearest(room)
        assert self.problem.device is not None
        return self.problem.device.peak(nearest.choice).bytes - float(nearest.criteria @ self.problem.memory)

    def nearest(self, room: float) -> Looked:
        """Return the optimum whose sums are nearest to some bytes."""
        return min(self.optima, key=lambda own: abs(float(own.criteria @ self.problem.memory) - room))

    def splice(self) -> None:
        """Look at strategies that follow one optimum up to a layer and another from there on."""
        for first, second in permutations(self.optima[-MAX_SPLICED:], 2):
            at = _best_splice(self.problem, first, second, self.cost, self.room)
            if at is not None:
                self.offer((*first.choice[:at], *second.choice[at:]))


def solve_stage(
    problem: StageProblem,
    *,
    known: Iterable[Choice] = (),
    tolerance: float = 1e-4,
    pool: dict[Hashable, list[Looked]] | None = None,
    near: FloatArray | None = None,
    enough: float = np.inf,
    may_widen: bool = False,
    loose: tuple[float, float] = (0.0, 0.0),
) -> StageFound:
    """Return the cheapest strategy of a stage that fits, as far as it is found, and a bound on all that fit.

    Args:
        problem: the stage.
        known: strategies to start from.
        tolerance: up to which share of the cost bound and strategy are worth to be brought together.
        pool: strategies of problems by their keys, which help with others; more are added.
        near: `StageFound.at` of a stage that is much alike.
        enough: a bound that is high enough: nothing is looked for beyond it.
        may_widen: whether nothing is looked for where choices that tables leave out keep the bound low.
        loose: another tolerance, and the cost up to which that is enough.
    """
    search = _Search(problem, {} if pool is None else pool, tolerance, loose, enough=enough)
    try:
        return _solve(search, known, near, may_widen=may_widen)
    except TimeUpError:
        return search.found(np.zeros(len(CRITERIA)), None)


def _solve(search: _Search, known: Iterable[Choice], near: FloatArray | None, *, may_widen: bool) -> StageFound:
    problem, enough = search.problem, search.enough
    for choice in known:
        search.note(tuple(choice))
    search.room = problem.limit_bytes
    search.bound, weights, at = search.relax(problem.limit_bytes, near=near)
    if search.bound == np.inf:
        return StageFound(choice=(), sums=None, bound=np.inf, weights=weights, at=None)
    if may_widen and search.is_held_back and not search.is_close():
        return StageFound(choice=(), sums=None, bound=search.bound, weights=weights, at=at, is_held_back=True)
    if not search.is_close():
        search.mix(weights)
    if not search.is_close():
        search.splice()
    if problem.limit_bytes == np.inf:
        search.look(weights)
    elif not search.is_close():
        _limit_turns(search, at)
    if search.bound * (1 + TOLERANCE) < min(search.cost, enough):
        closed = _closed(problem, search, weights)
        search.bound = search.bound if closed is None else closed
    return search.found(weights, at)


def _limit_turns(search: _Search, at: FloatArray) -> None:
    """Look for strategies that fit, and raise the bound, by what is held in turns in which others do not fit.

    at: shares of the sides and the price of a byte at which the bound is highest by what is known.
    """
    problem, own, turns = search.problem, search, set[GroupTurn]()
    assert problem.device is not None
    search.tighten(at)
    for _ in range(MAX_TURNS):
        turn = problem.device.peak(own.nearest(own.room).choice).at
        if not search.best:
            # What fits most nearly is one that holds least.
            own.at(own.problem.memory)
            turn = problem.device.peak(own.optima[-1].choice).at
        if search.is_close() or turn in turns:
            break
        turns.add(turn)
        # Sums of another turn are those of other layers: what is known of parts does not help with them.
        own = _Search(problem.at(turn), {}, search.tolerance, search.loose, enough=search.enough)
        own.room, own.bound = problem.limit_bytes, search.bound
        for looked in [*search.optima[-MAX_SPLICED:], *([search.best] if search.best else [])]:
            own.note(looked.choice)
        bound, weights, point = own.relax(problem.limit_bytes, near=at)
        own.bound = max(own.bound, bound)
        if not own.is_close():
            own.mix(weights)
            own.splice()
        if not own.is_close():
            own.look(weights)
        if not own.is_close():
            own.tighten(point)
        search.bound = max(search.bound, own.bound)
        if own.best:
            search.offer(own.best.choice)
        for looked in own.optima[-MAX_SPLICED:]:
            search.note(looked.choice)


@dataclass(frozen=True, kw_only=True)
class _Runs:
    """Strategies of a stage whose blocks repeat: what is ahead of the blocks, runs of equal ones, what is behind.

    blocks: [K, L] choices of a block; ahead, behind: [A, L], [B, L] those of the ends. own: [K, criteria]; base:
    [A, B, criteria] of the ends; enters, follows, leaves: [A, K], [K, K], [K, B] of the edges between. room: bytes that
    strategies may hold by sums.
    """

    problem: StageProblem
    count: int
    blocks: IndexArray
    ahead: IndexArray
    behind: IndexArray
    own: FloatArray
    base: FloatArray
    enters: FloatArray
    follows: FloatArray
    leaves: FloatArray
    room: float

    @classmethod
    def of(cls, search: _Search, weights: FloatArray) -> "_Runs | None":
        """Return the strategies made of what a search came by; None where no blocks repeat."""
        problem, parts = search.problem, search.problem.segments
        if problem.looped is None:
            return None
        first, length, count = problem.repeats
        starts = accumulate((times * len(part.tables.layers) for part, times in parts), initial=0)
        block = dict(zip(starts, (part for part, _ in parts), strict=False))[first]
        beyond = first + count * length
        known = {own.choice for own in search.pool.get(problem.looped.key, ())} | search.blocks
        for optimum in search.optima:
            known |= {optimum.choice[at : at + length] for at in range(first, beyond, length)}
        looped = [problem.looped.looked_at(choice) for choice in sorted(known)]
        looped = sorted(looped, key=lambda own: float(own.criteria @ weights))[:MAX_MIXED]
        pool = [block.looked_at(own.choice) for own in looped]
        nearest = sorted(search.optima, key=lambda own: float(own.criteria @ weights))
        ahead = list(dict.fromkeys(own.choice[:first] for own in nearest))[:2]
        behind = list(dict.fromkeys(own.choice[beyond:] for own in nearest))[:2]
        blocks, heads, tails = (
            np.array(rows, dtype=np.int32).reshape(len(rows), -1)
            for rows in ([own.choice for own in pool], ahead, behind)
        )
        num = len(blocks), len(heads), len(tails)
        shapes = (num[1], num[2]), (num[1], num[0]), (num[0], num[0]), (num[0], num[2])
        base, enters, follows, leaves = (np.zeros((*shape, len(CRITERIA))) for shape in shapes)

        def choices(v: int) -> IndexArray:
            """Return the choices of a layer: [A, 1] ahead, [1, B] behind."""
            return heads[:, None, v] if v < first else tails[None, :, v - beyond]

        for edge, (u, v) in zip(problem.tables.edges, problem.tables.ends, strict=True):
            low, high = min(u, v), max(u, v)
            at = [None if w < first or w >= beyond else (w - first) // length for w in (low, high)]
            if at[0] is None and at[1] is None:
                base += problem.edge_part(edge, choices(u), choices(v))
            elif at[0] == at[1] or (at[0] is not None and at[1] is not None and at[1] > 1):
                continue
            elif at == [None, 0]:
                own, other = heads[:, None, low], blocks[None, :, high - first]
                enters += problem.edge_part(edge, *((own, other) if u < v else (other, own)))
            elif at == [count - 1, None] and high >= beyond:
                own, other = blocks[:, None, low - first - (count - 1) * length], tails[None, :, high - beyond]
                leaves += problem.edge_part(edge, *((own, other) if u < v else (other, own)))
            elif at == [0, 1]:
                own, other = blocks[:, None, low - first], blocks[None, :, high - first - length]
                follows += problem.edge_part(edge, *((own, other) if u < v else (other, own)))
            else:
                return None
        layers = problem.tables.layers
        ends = [*range(first), *range(beyond, len(layers))]
        for v in ends:
            base += layers[v].columns[choices(v)]
        return cls(
            problem=problem,
            count=count,
            blocks=blocks,
            ahead=heads,
            behind=tails,
            own=np.array([own.criteria for own in pool]),
            base=base,
            enters=enters,
            follows=follows,
            leaves=leaves,
            room=search.room,
        )

    def best(self) -> Iterator[Choice]:
        """Yield the strategies that take least of those that seem to fit."""
        num, step = len(self.blocks), -(-self.count // MAX_RUNS)
        cuts = sorted({*range(0, self.count + 1, step), self.count})
        pairs = np.array([(x, y) for x in cuts for y in cuts if 0 < x <= y])
        found: list[tuple[float, tuple[int, ...]]] = []
        for head in range(len(self.ahead)):
            for tail in range(len(self.behind)):
                triples = np.stack(np.meshgrid(*[np.arange(num)] * 3, indexing="ij"), axis=-1).reshape(-1, 3)
                costs = self._costs(head, tail, triples[:, None], pairs[None])
                for n in np.argsort(costs, axis=None, kind="stable")[:MAX_MIXED]:
                    of, cut = divmod(int(n), len(pairs))
                    x, y = pairs[cut].tolist()
                    near = [
                        (i, j)
                        for i in range(max(1, x - step + 1), min(self.count, x + step - 1) + 1)
                        for j in range(max(i, y - step + 1), min(self.count, y + step - 1) + 1)
                    ]
                    fine = self._costs(head, tail, triples[of][None, None], np.array(near)[None])[0]
                    best = int(fine.argmin())
                    if np.isfinite(fine[best]):
                        found.append((float(fine[best]), (head, tail, *triples[of].tolist(), *near[best])))
        for _, (head, tail, a, b, c, x, y) in sorted(set(found))[:MAX_MIXED]:
            runs = [a] * x + [b] * (y - x) + [c] * (self.count - y)
            middle = [c for k in runs for c in self.blocks[k].tolist()]
            yield (*self.ahead[head].tolist(), *middle, *self.behind[tail].tolist())

    def _costs(self, head: int, tail: int, triples: NDArray[np.int_], cuts: NDArray[np.int_]) -> FloatArray:
        """Return [..., N] costs of runs of three blocks, [..., 1, 3], from one cut to the next, [..., N, 2]."""
        a, b, c = (triples[..., k] for k in range(3))
        x, y = cuts[..., 0, None], cuts[..., 1, None]
        z = self.count - y
        y = y - x
        follows = self.follows
        sums = self.base[head, tail] + self.enters[head, a] + x * self.own[a] + (x - 1) * follows[a, a]
        sums = sums + y * self.own[b] + np.maximum(y - 1, 0) * follows[b, b] + (y > 0) * follows[a, b]
        last = np.where(y > 0, follows[b, c], follows[a, c])
        sums = sums + z * self.own[c] + np.maximum(z - 1, 0) * follows[c, c] + (z > 0) * last
        sums = sums + np.where(z > 0, self.leaves[c, tail], np.where(y > 0, self.leaves[b, tail], self.leaves[a, tail]))
        costs = (sums @ self.problem.sides.T).max(axis=-1)
        return np.where(sums @ self.problem.memory <= self.room, costs, np.inf)


class Climbed(NamedTuple):
    """Where a bound is highest. bound: infinite where nothing fits. at: shares of the sides and price of a byte."""

    bound: float
    weights: FloatArray
    at: FloatArray


def climb(
    optimum: Callable[[FloatArray], tuple[FloatArray, float]],
    *,
    sides: FloatArray,
    memory: FloatArray,
    room: float,
    tolerance: float,
    most: int,
    near: FloatArray | None = None,
    columns: list[FloatArray] | None = None,
    enough: float = np.inf,
) -> Climbed:
    """Return where the least of a sum is highest, over shares of the sides and prices of memory, by cutting planes.

    Args:
        optimum: returns, by [criteria] weights, the [criteria] of what is least, and a bound on the sum.
        sides, memory: [sides, criteria] and [criteria] weights.
        room: bytes; infinite without a limit.
        tolerance: up to which share the bound is raised.
        most: optima at most.
        near: shares and a price to begin at.
        columns: [criteria] of optima that are known; more are added.
        enough: a bound that is high enough.
    """
    columns = [] if columns is None else columns
    is_limited, scale = room < np.inf, room if 0 < room < np.inf else 1.0
    point = np.zeros(len(sides))
    if near is not None and is_limited:
        shares = near[:-1][: len(point) - 1]
        point[: len(shares)], point[-1] = shares, near[-1] * scale
    bound, best = -np.inf, point

    def weights_at(point: FloatArray) -> FloatArray:
        weights = between(sides, point[:-1])
        return weights + point[-1] / scale * memory if point[-1] > 0 else weights

    for _ in range(most):
        found, low = optimum(weights_at(point))
        columns.append(found)
        low -= point[-1] * room / scale if point[-1] > 0 else 0.0
        if low > bound:
            bound, best = low, point
        if is_limited and all(column @ memory > room for column in columns):
            found, least = optimum(memory)
            columns.append(found)
            if least > room * (1 + TOLERANCE):
                return Climbed(np.inf, weights_at(best), np.array([*best[:-1], best[-1] / scale]))
        last = np.array(columns[-MAX_PLANES:])
        heights = last @ sides.T
        over = (last @ memory - room) / scale if is_limited else np.zeros(len(last))
        planes = np.column_stack([heights[:, 0], heights[:, 1:] - heights[:, :1], over])
        highest, point = _highest(planes, is_limited=is_limited)
        if highest <= bound * (1 + tolerance) or bound >= enough:
            break
    return Climbed(bound, weights_at(best), np.array([*best[:-1], best[-1] / scale]))


def _repriced(problem: StageProblem, weights: FloatArray, factor: float) -> FloatArray:
    """Return weights with another price of memory, by a factor."""
    memory = problem.memory
    price = weights @ memory / (memory @ memory)
    return weights + (factor - 1.0) * price * memory


def _highest(planes: FloatArray, *, is_limited: bool) -> tuple[float, FloatArray]:
    """Return where the lowest of some planes is highest, and how high that is.

    planes: [N, 1 + d] the height at 0, and the slopes. Of d the last is a price of 0 or more, 0 where nothing is
    limited; the others are shares, whose sum is at most 1.
    """
    num, width = planes.shape
    d = width - 1
    # Rows (a, c) of a · (x, height) <= c, of which d + 1 meet in the point.
    rows = [np.concatenate([-planes[:, 1:], np.ones((num, 1))], axis=1)]
    limits = [planes[:, 0]]
    rows.append(np.concatenate([-np.eye(d), np.zeros((d, 1))], axis=1))
    limits.append(np.zeros(d))
    extra = np.zeros((2, width))
    extra[0, : d - 1] = 1.0
    extra[1, d - 1] = 1.0
    keep = [0] * (d > 1) + [1] * (not is_limited)
    rows.append(extra[keep])
    limits.append(np.array([1.0, 0.0])[keep])
    a, c = np.concatenate(rows), np.concatenate(limits)
    subsets = np.array(list(combinations(range(len(a)), width)))
    systems = a[subsets]
    is_point = np.abs(np.linalg.det(systems)) > 1e-12
    points = np.linalg.solve(systems[is_point], c[subsets[is_point]][..., None])[..., 0]
    slack = c + 1e-9 * (1 + np.abs(c)) - points @ a.T
    points = points[(slack >= -1e-9 * (1 + np.abs(points[:, -1:]))).all(axis=1)]
    if not len(points):
        return float(planes[:, 0].min()), np.zeros(d)
    best = points[points[:, -1].argmax()]
    return float(best[-1]), np.maximum(best[:-1], 0.0)


def _combined(problem: StageProblem, optima: Sequence[Looked], room: float) -> list[Choice]:
    """Return strategies within some room that take least, each chunk of which is as in one of the optima."""
    held = np.array([optimum.parts @ problem.memory for optimum in optima])
    costs = np.array([[problem.cost(StageSums(*part)) for part in optimum.parts.tolist()] for optimum in optima])
    # [N] of combinations of the chunks up to one: what they cost, and hold; [N, chunks] which.
    found = np.zeros((1, 2))
    which = np.zeros((1, 0), dtype=np.int32)
    for c in range(len(problem.bounds)):
        _, first = np.unique(np.column_stack([costs[:, c], held[:, c]]), axis=0, return_index=True)
        cost, needed = (np.add.outer(found[:, k], own[first, c]).ravel() for k, own in enumerate((costs, held)))
        order = np.argsort(cost, kind="stable")
        order = order[needed[order] <= np.minimum.accumulate(needed[order])]
        order = order[np.unique(np.linspace(0, len(order) - 1, MAX_COMBINED).astype(int))]
        found = np.column_stack([cost, needed])[order]
        before, last = np.divmod(order, len(first))
        which = np.column_stack([which[before], first[last]])
    fits = which[found[:, 1] <= room][:MAX_NEAR]
    return [
        tuple(c for k, (low, high) in zip(row, problem.bounds, strict=True) for c in optima[k].choice[low:high])
        for row in fits.tolist()
    ]


def _best_splice(problem: StageProblem, first: Looked, second: Looked, below: float, room: float) -> int | None:
    """Return up to which layer a strategy best follows one, and another from there on; None: none is below a cost.

    room: bytes that it may hold.
    """
    num = len(first.choice)
    changes = np.zeros((num + 2, len(CRITERIA)))
    changes[0] = second.criteria
    changes[1 : num + 1] += first.own - second.own
    ends = np.array(problem.tables.ends, dtype=np.int32).reshape(-1, 2)
    is_ahead = ends[:, 0] < ends[:, 1]
    # Of an edge that is spliced the earlier end is the first strategy's.
    a, b = np.array(first.choice), np.array(second.choice)
    mixed = np.where(is_ahead[:, None], problem.edge_parts(a, b), problem.edge_parts(b, a))
    np.add.at(changes, ends.min(axis=1, initial=num) + 1, mixed - second.edges)
    np.add.at(changes, ends.max(axis=1, initial=-1) + 1, first.edges - mixed)
    sums = np.cumsum(changes, axis=0)[: num + 1]
    costs = (sums @ problem.sides.T).max(axis=1)
    costs = np.where(sums @ problem.memory <= room * (1 + TOLERANCE), costs, np.inf)
    best = int(costs.argmin())
    return best if costs[best] < below else None


def _closed(problem: StageProblem, search: _Search, weights: FloatArray) -> float | None:
    """Go through all strategies that the bound leaves; the bound that is then known, None where they are too many."""
    price = float(weights @ problem.memory / (problem.memory @ problem.memory))
    found = _left(problem, weights, search.cost + (price * problem.limit_bytes if price > 0 else 0.0))
    if found is None:
        return None
    choices, sums = found
    costs = np.where(_held(problem, sums) <= problem.limit_bytes * (1 + TOLERANCE), _costs(problem, sums), np.inf)
    for number, best in enumerate(np.argsort(costs, kind="stable").tolist()):
        if costs[best] >= search.cost:
            break
        if number == MAX_PEAKS:
            return max(search.bound, float(costs[best]))
        problem.check_time()
        search.offer(tuple(choices[best].tolist()))
    return search.cost


def stage_front(problem: StageProblem, limit: float) -> list[tuple[float, float, Choice, StageSums]] | None:
    """Return the strategies that fit of which none other has a lower t and a lower o: (t, o, choice, sums), by t.

    Args:
        problem: The stage.
        limit: Of α t + o, beyond which they are of no interest.

    Returns:
        The strategies; None where there are too many to go through.
    """
    found = _left(problem, problem.sides[0], limit)
    if found is None:
        return None
    choices, sums = found
    left = np.flatnonzero(_held(problem, sums) <= problem.limit_bytes * (1 + TOLERANCE))
    each = [StageSums(*row) for row in sums[left].tolist()]
    order = sorted(range(len(each)), key=lambda n: (each[n].micro_batch, each[n].step))
    front: list[tuple[float, float, Choice, StageSums]] = []
    looked = 0
    for n in order:
        choice = tuple(choices[left[n]].tolist())
        if front and each[n].step >= front[-1][1]:
            continue
        looked += 1
        if looked > MAX_FRONT_PEAKS:
            return None
        problem.check_time()
        if problem.fits(choice):
            front.append((each[n].micro_batch, each[n].step, choice, each[n]))
    return front


def _costs(problem: StageProblem, sums: FloatArray) -> FloatArray:
    costs: FloatArray = (sums @ problem.sides.T).max(axis=1)
    return costs


def _held(problem: StageProblem, sums: FloatArray) -> FloatArray:
    held: FloatArray = sums @ problem.memory
    return held


def _left(problem: StageProblem, weights: FloatArray, limit: float) -> tuple[IndexArray, FloatArray] | None:
    """Return all strategies whose sum, so weighed, is up to a limit, and perhaps others; None: they are too many."""
    left = [np.arange(len(layer), dtype=np.int32) for layer in problem.tables.layers]
    # Both sides are infinite where no strategy is known to fit and tables leave nothing out.
    leaves_out = any(map(len, problem.beyond)) and problem.least_alone(weights) <= limit
    if leaves_out or sum(map(len, left)) > MAX_NARROWED:
        return None
    if np.isfinite(limit):
        left = list(near_optimal(problem.weighed(weights)[0], limit, problem.check_time))
    if not all(map(len, left)):
        return np.zeros((0, len(left)), dtype=np.int32), np.zeros((0, len(CRITERIA)))
    return None if prod(map(len, left)) > MAX_ENUMERATED else _enumerated(problem, left)


def _enumerated(problem: StageProblem, left: Sequence[IndexArray]) -> tuple[IndexArray, FloatArray]:
    """Return all strategies of some choices of each layer, [N, V], and their `StageSums`, [N, …]."""
    sizes = [len(own) for own in left]
    number, beyond = np.arange(prod(sizes)), np.cumprod([1, *reversed(sizes)])[-2::-1].tolist()
    choices = np.stack([own[number // stride % len(own)] for own, stride in zip(left, beyond, strict=True)], axis=1)
    chunks = [
        _sums_of_all(part, choices[:, first:last])
        for part, (first, last) in zip(problem.parts, problem.bounds, strict=True)
    ]
    return choices, chunks[0] if len(chunks) == 1 else together(np.stack(chunks, axis=1), problem.moments)


def _sums_of_all(problem: StageProblem, choices: IndexArray) -> FloatArray:
    """Return the `StageSums` of strategies of one chunk, [N, …] of [N, V]."""
    layers = problem.tables.layers
    sums = np.zeros((len(choices), len(CRITERIA)))
    for v, layer in enumerate(layers):
        problem.check_time()
        sums += layer.columns[choices[:, v]]
    for (u, v), edge in zip(problem.tables.ends, problem.tables.edges, strict=True):
        sums += problem.edge_part(edge, choices[:, u], choices[:, v])
    return sums
