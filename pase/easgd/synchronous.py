"""The rounds of synchronous methods: every worker takes every step, and the centre goes down a tree and sums up it.

The tree over workers is binomial: ⌈log2 P⌉ rounds in place of P (Section 6.1.1). In round k, worker i with
i mod 2^(k+1) = 0 takes what worker i + 2^k has. So the order of additions follows from the workers' numbers alone:
whoever adds, in however many processes, gets the same bits.
"""

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass

from pase.easgd.actors import Keeper, StopAskedError, Worker, exchange_part, is_finite
from pase.easgd.algorithms import Array, Place, Sends, num_rounds
from pase.easgd.job import Job, Reduction
from pase.easgd.messages import Endpoint, Kind, Message
from pase.errors import TrainingError

_OVER = 1
"""Number of a centre that no round follows: a test has reached what was asked for."""


# -- the tree


def children(worker: int, num_workers: int) -> tuple[int, ...]:
    """Return whose sums a worker takes, in the order of the rounds; a broadcast goes to them in the reverse order."""
    found = []
    for round_ in range(num_rounds(num_workers)):
        distance = 1 << round_
        if worker & distance:
            break
        if worker + distance < num_workers:
            found.append(worker + distance)
    return tuple(found)


def parent(worker: int) -> int:
    """Return to whom a worker gives its sum; worker 0 has none."""
    assert worker > 0
    return worker & (worker - 1)


def tree_sum(vectors: Iterable[Array]) -> Array:
    """Return the sum of the workers' vectors, [n], taken in their order and added as the tree adds them.

    Holds ⌈log2 P⌉ + 1 of them at a time.
    """
    partial: list[tuple[int, Array]] = []
    for vector in vectors:
        count, total = 1, vector
        while partial and partial[-1][0] == count:
            earlier = partial.pop()
            count, total = count + earlier[0], earlier[1] + total
        partial.append((count, total))
    _, total = partial.pop()
    while partial:
        total = partial.pop()[1] + total
    return total


# -- a rank's part in the collective operations of a round


def keeper_of(job: Job) -> int:
    """Return the rank that keeps the centre of a synchronous method."""
    return job.master if job.algorithm.place is Place.MASTER else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Whom a rank exchanges with. above: who has the centre, None for its keeper. below: whose sums it takes."""

    job: Job
    endpoint: Endpoint
    above: int | None
    below: tuple[int, ...]

    @classmethod
    def of(cls, job: Job, rank: int, endpoint: Endpoint) -> "Group":
        """Return the group of a rank: in a tree, or as one of those that the keeper of the centre serves."""
        keeper, above = keeper_of(job), None
        below: tuple[int, ...] = ()
        if job.reduction is Reduction.ROUND_ROBIN:
            above = None if rank == keeper else keeper
            below = tuple(worker for worker in range(job.num_workers) if worker != keeper) if rank == keeper else ()
        elif rank == job.master:
            below = (0,)
        else:
            above = parent(rank) if rank > 0 else None if keeper == 0 else keeper
            below = children(rank, job.num_workers)
        return cls(job=job, endpoint=endpoint, above=above, below=below)

    def broadcast(self, centre: Array | None, number: int) -> tuple[Array, int]:
        """Return the centre and its number, passed on to those below; given by its keeper, None elsewhere."""
        if self.above is not None:
            message = self._receive(self.above, Kind.CENTRE)
            centre, number = message.vector, message.number
        assert centre is not None
        # The one with the most below it first.
        for rank in reversed(self.below):
            self.endpoint.send(rank, Kind.CENTRE, centre, number=number)
        return centre, number

    def reduce(self, own: Array | None) -> Array | None:
        """Return the sum of the workers' vectors with the keeper of the centre, None elsewhere.

        own: None for a master, which has none. The order of additions is the tree's, however it is summed.
        """
        mine = [] if own is None else [own]
        theirs = (self._receive(rank, Kind.SENT).vector for rank in self.below)
        vectors = (vector for group in (mine, theirs) for vector in group if vector is not None)
        if self.job.reduction is Reduction.ROUND_ROBIN and self.above is None:
            return tree_sum(vectors)
        total = next(vectors)
        for vector in vectors:
            total = total + vector
        if self.above is None:
            return total
        self.endpoint.send(self.above, Kind.SENT, total)
        return None

    def _receive(self, sender: int, kind: Kind) -> Message:
        return _unless_stopped(
            self.endpoint.receive(
                lambda message: message.kind is Kind.STOP or (message.sender == sender and message.kind is kind)
            )
        )


def _unless_stopped(message: Message) -> Message:
    if message.kind is Kind.STOP:
        raise StopAskedError
    return message


# -- who keeps the centre


@dataclass(slots=True)
class RoundKeeper(Keeper):
    """The rank that has the centre, whose events are rounds."""

    _has_reached: bool = False

    def number(self) -> int:
        """Return the number of the next centre: whether a round follows it."""
        if self.endpoint.poll(lambda message: message.kind is Kind.STOP) is not None:
            raise StopAskedError
        return _OVER if self._has_reached else 0

    def update_by_all(self, total: Array | None) -> None:
        """Change the centre by Eq. 2, or by the sum of gradients; TrainingError where the sum is not finite."""
        assert total is not None
        if not is_finite(total):
            raise TrainingError(
                f"round {self.num_events + 1}: the sum of what the workers sent is not finite; use a smaller learning "
                "rate; the centre is as it was"
            )
        self.update(total, self.job.num_workers)

    def end_round(self) -> None:
        """Count a round, and tell the coordinator what is due; wait for a test on which it depends how to go on."""
        self.num_events += 1
        if self.job.is_due(self.job.save_every, self.num_events):
            self.tell(Kind.STATE, range(self.job.num_workers))
        if self.job.is_due(self.job.test_every, self.num_events):
            verdict = self.have_tested()
            self._has_reached = verdict is not None and bool(_unless_stopped(verdict).number)

    def end(self) -> None:
        """Tell the coordinator the centre in the end."""
        for kind in [Kind.STATE] * self.job.is_last_save_due(self.num_events) + [Kind.ENDED]:
            self.tell(kind, range(self.job.num_workers))


def run_master(keeper: RoundKeeper) -> None:
    """Take part in all rounds as a master that computes nothing itself (Algorithm 2)."""
    job, clock, part = keeper.job, keeper.clock, exchange_part(keeper.job)
    group = Group.of(job, job.master, keeper.endpoint)
    sends_weights = job.algorithm.sends is Sends.WEIGHTS
    while keeper.num_events < job.num_events:
        number = keeper.number()
        if sends_weights:
            with clock.measuring(part):
                group.broadcast(keeper.state.centre, number)
        if not (sends_weights and number == _OVER):
            with clock.measuring(part):
                total = group.reduce(None)
            if number != _OVER:
                keeper.update_by_all(total)
        if not sends_weights:
            with clock.measuring(part):
                group.broadcast(keeper.state.centre, number)
        if number == _OVER:
            break
        keeper.end_round()
    keeper.end()


# -- workers


def run_worker(worker: Worker, keeper: RoundKeeper | None, num_events: int) -> None:
    """Take part in all rounds; keeper: of the centre, where this worker is it. num_events: rounds done before."""
    job = worker.job
    group = Group.of(job, worker.number, worker.endpoint)
    with ThreadPoolExecutor(1, "exchange") if job.algorithm.overlaps else nullcontext() as pool:
        while num_events < job.num_events:
            if job.algorithm.sends is Sends.GRADIENTS:
                is_over = _gradient_round(worker, group)
            else:
                is_over = _elastic_round(worker, group, keeper, pool)
            if is_over:
                break
            num_events += 1
            if keeper:
                keeper.end_round()
            if job.is_due(job.save_every, num_events):
                worker.tell_state(num_events)
    if job.is_last_save_due(num_events):
        worker.tell_state(num_events)
    if keeper:
        keeper.end()
    worker.tell_end()


def _gradient_round(worker: Worker, group: Group) -> bool:
    """Sync SGD (Section 2.3): sum the gradients, then take the new weights. Return whether it was over before."""
    found = worker.gradient()
    with worker.exchanging():
        group.reduce(found.vector)
        centre, number = group.broadcast(None, 0)
    if number != _OVER:
        worker.step(found, centre)
    return number == _OVER


def _elastic_round(worker: Worker, group: Group, keeper: RoundKeeper | None, pool: ThreadPoolExecutor | None) -> bool:
    """Sync EASGD (Algorithms 2 and 3): steps 7 to 10, the gradient; 11 and 12, the exchange; 13 and 14, the updates.

    The exchange needs the weights before the step alone, so it may go on beside the gradient (Section 6.1.3). Returns
    whether it was over before.
    """
    now = worker.clock.now
    given = (keeper.state.centre, keeper.number()) if keeper else (None, 0)

    def exchange() -> tuple[Array, int, Array | None, float]:
        begin_s = now()
        centre, number = group.broadcast(*given)
        total = None if number == _OVER else group.reduce(worker.weights)
        return centre, number, total, now() - begin_s

    under_way = pool.submit(exchange) if pool else None
    found = worker.gradient()
    begin_s = now()
    with worker.exchanging():
        centre, number, total, exchange_s = under_way.result() if under_way else exchange()
    worker.clock.hidden_s += max(0.0, exchange_s - (now() - begin_s))
    if number == _OVER:
        return True
    worker.step(found, centre)
    if keeper:
        keeper.update_by_all(total)
    return False
