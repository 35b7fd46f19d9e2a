"""The rounds of synchronous methods: every worker takes every step, and the centre goes down a tree and sums up it."""

from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field

from pase.easgd.algorithms import Place, Sends
from pase.easgd.clock import Clock
from pase.easgd.equations import Array
from pase.easgd.job import Job, Reduction
from pase.easgd.messages import Endpoint, Kind, Message
from pase.easgd.states import MasterState, changed
from pase.easgd.telling import have_tested, tell_state
from pase.easgd.tree import children, parent, tree_sum
from pase.easgd.worker import StopAskedError, Worker, is_finite
from pase.errors import TrainingError

_OVER = 1
"""Number of a centre that no round follows: a test has reached what was asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """Whom a rank exchanges with. above: who has the centre, None for its keeper. below: whose sums it takes."""

    above: int | None
    below: tuple[int, ...]


def links(job: Job, rank: int) -> Links:
    """Return whom a rank exchanges with: in a tree, or as one of those that the keeper of the centre serves."""
    keeper = keeper_of(job)
    workers = range(job.num_workers)
    if job.reduction is Reduction.ROUND_ROBIN:
        served = tuple(worker for worker in workers if worker != keeper)
        return Links(above=None, below=served) if rank == keeper else Links(above=keeper, below=())
    if rank == job.master:
        return Links(above=None, below=(0,))
    above = parent(rank) if rank > 0 else None if keeper == 0 else keeper
    return Links(above=above, below=children(rank, job.num_workers))


def keeper_of(job: Job) -> int:
    """Return the rank that keeps the centre of a synchronous method."""
    return job.master if job.algorithm.place is Place.MASTER else 0


@dataclass(slots=True)
class Group:
    """A rank's part in the collective operations of a round."""

    job: Job
    endpoint: Endpoint
    links: Links

    def broadcast(self, centre: Array | None, number: int) -> tuple[Array, int]:
        """Return the centre and its number, passed on to those below; given by its keeper, None elsewhere."""
        if self.links.above is not None:
            message = self._receive(self.links.above, Kind.CENTRE)
            centre, number = message.vector, message.number
        assert centre is not None
        # The one with the most below it first.
        for rank in reversed(self.links.below):
            self.endpoint.send(rank, Kind.CENTRE, centre, number=number)
        return centre, number

    def reduce(self, own: Array | None) -> Array | None:
        """Return the sum of the workers' vectors with the keeper of the centre, None elsewhere.

        own: None for a master, which has none. The order of additions is the tree's, however it is summed.
        """
        mine = [] if own is None else [own]
        theirs = (self._vector(rank) for rank in self.links.below)
        if self.job.reduction is Reduction.ROUND_ROBIN and self.links.above is None:
            return tree_sum(vector for vectors in (mine, theirs) for vector in vectors)
        total = own
        for vector in theirs:
            total = vector if total is None else total + vector
        assert total is not None
        if self.links.above is None:
            return total
        self.endpoint.send(self.links.above, Kind.SENT, total)
        return None

    def _vector(self, rank: int) -> Array:
        vector = self._receive(rank, Kind.SENT).vector
        assert vector is not None
        return vector

    def _receive(self, sender: int, kind: Kind) -> Message:
        def is_wanted(message: Message) -> bool:
            return message.kind is Kind.STOP or (message.sender == sender and message.kind is kind)

        return _unless_stopped(self.endpoint.receive(is_wanted))


def _unless_stopped(message: Message) -> Message:
    if message.kind is Kind.STOP:
        raise StopAskedError
    return message


@dataclass(slots=True)
class Keeper:
    """What the rank that has the centre does besides exchanging it. num_events: rounds done so far."""

    job: Job
    endpoint: Endpoint
    state: MasterState
    num_events: int = 0
    clock: Clock = field(default_factory=Clock)
    _has_reached: bool = False

    def number(self) -> int:
        """Return the number of the next centre: whether a round follows it."""
        stop = self.endpoint.poll(lambda message: message.kind is Kind.STOP)
        if stop is not None:
            raise StopAskedError
        return _OVER if self._has_reached else 0

    def update(self, total: Array) -> None:
        """Change the centre by Eq. 2, or by the sum of gradients; TrainingError where the sum is not finite."""
        if not is_finite(total):
            raise TrainingError(
                f"round {self.num_events + 1}: the sum of what the workers sent is not finite; use a smaller learning "
                "rate; the centre is as it was"
            )
        rule = self.job.algorithm.master
        self.state = changed(self.state, rule(self.job.rates, self.state, total, self.job.num_workers))

    def end_round(self) -> None:
        """Count a round, and tell the coordinator what is due; wait for a test on which it depends how to go on."""
        self.num_events += 1
        if self.job.is_due(self.job.save_every, self.num_events):
            self._tell(Kind.STATE)
        if not self.job.is_due(self.job.test_every, self.num_events):
            return
        verdict = have_tested(self.job, self.endpoint, self.state.centre, num_events=self.num_events, clock=self.clock)
        if verdict is not None:
            self._has_reached = bool(_unless_stopped(verdict).number)

    def end(self) -> None:
        """Tell the coordinator the centre in the end."""
        if is_last_save_due(self.job, self.num_events):
            self._tell(Kind.STATE)
        self._tell(Kind.ENDED)

    def _tell(self, kind: Kind) -> None:
        workers = range(self.job.num_workers)
        tell_state(
            self.job,
            self.endpoint,
            kind,
            self.state,
            num_events=self.num_events,
            workers=workers,
            clock=self.clock,
        )


def is_last_save_due(job: Job, num_events: int) -> bool:
    """Whether a checkpoint of the end is still to be written: it came before its time, and none was due just now."""
    return job.save_every is not None and not job.is_due(job.save_every, num_events)


def run_master(job: Job, keeper: Keeper) -> None:
    """Take part in all rounds as a master that computes nothing itself (Algorithm 2)."""
    group = Group(job=job, endpoint=keeper.endpoint, links=links(job, job.master))
    sends_weights = job.algorithm.sends is Sends.WEIGHTS
    while keeper.num_events < job.num_events:
        number = keeper.number()
        if sends_weights:
            group.broadcast(keeper.state.centre, number)
        if not (sends_weights and number == _OVER):
            total = _whole(group.reduce(None))
            if number != _OVER:
                keeper.update(total)
        if not sends_weights:
            group.broadcast(keeper.state.centre, number)
        if number == _OVER:
            break
        keeper.end_round()
    keeper.end()


def run_worker(worker: Worker, keeper: Keeper | None, num_events: int) -> None:
    """Take part in all rounds; keeper: of the centre, where this worker is it. num_events: rounds done before."""
    job = worker.job
    group = Group(job=job, endpoint=worker.endpoint, links=links(job, worker.number))
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
    if is_last_save_due(job, num_events):
        worker.tell_state(num_events)
    if keeper:
        keeper.end()
    worker.tell_end()


def _gradient_round(worker: Worker, group: Group) -> bool:
    """Sync SGD (Section 2.3): sum the gradients, then take the new weights. Return whether it was over before."""
    found = worker.gradient()
    with worker.clock.waiting():
        group.reduce(found.vector)
        centre, number = group.broadcast(None, 0)
    if number == _OVER:
        return True
    worker.step(found, centre)
    return False


def _elastic_round(worker: Worker, group: Group, keeper: Keeper | None, pool: ThreadPoolExecutor | None) -> bool:
    """Sync EASGD (Algorithms 2 and 3): steps 7 to 10, the gradient; 11 and 12, the exchange; 13 and 14, the updates.

    The exchange needs the weights before the step alone, so it may go on beside the gradient (Section 6.1.3). Returns
    whether it was over before.
    """
    given = (keeper.state.centre, keeper.number()) if keeper else (None, 0)

    def exchange() -> tuple[Array, int, Array | None]:
        centre, number = group.broadcast(*given)
        return centre, number, None if number == _OVER else group.reduce(worker.weights)

    if pool:
        under_way: Future[tuple[Array, int, Array | None]] = pool.submit(exchange)
        found = worker.gradient()
        with worker.clock.waiting():
            centre, number, total = under_way.result()
    else:
        found = worker.gradient()
        with worker.clock.waiting():
            centre, number, total = exchange()
    if number == _OVER:
        return True
    worker.step(found, centre)
    if keeper:
        keeper.update(_whole(total))
    return False


def _whole(total: Array | None) -> Array:
    assert total is not None
    return total
